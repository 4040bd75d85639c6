"""A registered schedule of several events is taken out of the file in blocks: few commits, little
lost to a kill, and every event of it to the last.
"""

import random
import sqlite3

import pytest
from support.ledgers import DELTA, counted, sampled

from torch_dpbayes.accounting import PrivacyAccountant
from torch_dpbayes.accounting.accountant import look_at
from torch_dpbayes.accounting.events import GaussianDpEvent

# of which some dominate others
EVENTS = (sampled(2.0), sampled(4.0), sampled(2.0, 0.02), GaussianDpEvent(200.0))
EACH = 250
ORDERS = ("in turn", "one after the other", "at random")


def commits(path):
    """Moments at which something was written."""
    with sqlite3.connect(path) as connection:
        return connection.execute(
            "SELECT count(DISTINCT time) FROM rows WHERE kind = 'block'"
        ).fetchone()[0]


def steps(order):
    if order == "in turn":
        return list(EVENTS) * EACH
    found = [event for event in EVENTS for _ in range(EACH)]
    if order == "at random":
        random.shuffle(found)
    return found


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("order", ORDERS)
def test_few_commits_little_lost_and_all_of_it_released(order, tmp_path):
    path = tmp_path / "budget.db"
    schedule = [(event, EACH) for event in EVENTS]
    accountant = PrivacyAccountant(8.0, DELTA, path=path).register(schedule)
    for made, event in enumerate(steps(order), start=1):
        accountant.compose(event)
        if made % 20 == 0:  # were it killed here, so much would be lost
            assert counted(path) - made <= max(50, made // 2)
    assert accountant.guarantee == "registered"
    assert {charge.event: charge.count for charge in accountant.history} == dict(schedule)
    # near the end of an event blocks are an eighth of what is left of it
    assert commits(path) < len(EVENTS) * EACH / 4
    accountant.close()
    assert counted(path) == len(EVENTS) * EACH
    seen, _ = look_at(path)
    assert {charge.event: charge.count for charge in seen.history} == dict(schedule)


def test_a_release_takes_its_own_event_and_another_only_when_that_is_used_up(tmp_path):
    """A block of the dearer event is open, and what is cheaper leaves it alone."""
    dear, cheap = sampled(2.0), sampled(4.0)
    accountant = PrivacyAccountant(8.0, DELTA, path=tmp_path / "budget.db")
    accountant.register([(dear, 100), (cheap, 30)])
    for event, number in ((dear, 3), (cheap, 40), (dear, 87)):
        for _ in range(number):
            accountant.compose(event)
    assert accountant.guarantee == "registered"
    assert {c.event: c.count for c in accountant.history} == {dear: 100, cheap: 30}
    accountant.compose(cheap)  # nothing is left of the schedule
    assert accountant.guarantee == "filter"


def test_what_is_reserved_is_given_back_where_another_event_needs_it(tmp_path):
    """Only what an open block of the dearer event holds is left for the cheaper one."""
    dear, cheap = sampled(2.0), sampled(4.0)
    accountant = PrivacyAccountant(8.0, DELTA, path=tmp_path / "budget.db")
    accountant.register([(dear, 5), (cheap, 2)])
    accountant.compose(dear).compose(dear)
    accountant.compose(cheap, 5)
    assert accountant.guarantee == "registered"
    assert {c.event: c.count for c in accountant.history} == {dear: 5, cheap: 2}
