"""dp-accounting's repeat-and-select against dp-accounting; test_selection.py has exact laws."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from support.dp_accounting_adapter import DpAccountingAdapter

from torch_dpbayes.accounting import PrivacyAccountant, events, renyi
from torch_dpbayes.accounting.dominating_pairs import dominating_pair
from torch_dpbayes.accounting.events import (
    ComposedDpEvent,
    FailureDpEvent,
    GaussianDpEvent,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    UserLevelDpEvent,
)

STEP = PoissonSampledDpEvent(0.02, GaussianDpEvent(1.0))
RUN = SelfComposedDpEvent(STEP, 300)


def accountant(event, count=1, **options):
    return PrivacyAccountant(method="rdp", **options).compose(event, count)


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, 5.0, math.inf])
@pytest.mark.parametrize("mean", [1.0, 1.5, 30.0, 1e6])
def test_no_more_than_dp_accounting_and_nearly_as_much(mean, shape):
    for run in (GaussianDpEvent(3.0), RUN, ComposedDpEvent([RUN, GaussianDpEvent(4.0)])):
        event = RepeatAndSelectDpEvent(run, mean, shape)
        theirs = dp_accounting.rdp.RdpAccountant([*renyi.ORDERS]).compose(event, 2)
        ours = accountant(event, 2)
        for delta in (1e-5, 1e-9):
            found = ours.get_epsilon(delta)
            assert found <= theirs.get_epsilon(delta) * (1 + 1e-5)
            assert found >= 0.5 * theirs.get_epsilon(delta)
            assert found >= accountant(run, 2).get_epsilon(delta) * (1 - 1e-9)


def test_a_larger_order_holds_at_a_smaller_one():
    pair = dominating_pair(
        next(events.elementary(RepeatAndSelectDpEvent(RUN, 10.0, 1.0)))[0], "add_or_remove_one"
    )
    found = renyi.curve({pair: 1})
    assert (np.diff(found) >= 0).all()
    one = [renyi.curve({pair: 1}, [order])[0] for order in renyi.ORDERS[::20]]
    assert one == pytest.approx(found[::20], rel=1e-12)


def test_where_it_is_supported():
    event = RepeatAndSelectDpEvent(RUN, 5.0, 0.0)
    assert DpAccountingAdapter(method="rdp").supports(event)
    assert not DpAccountingAdapter().supports(event)
    with pytest.raises(ValueError, match=r"method='rdp'.*selection_event"):
        PrivacyAccountant().compose(event)
    user = PrivacyAccountant(method="rdp", unit="user").compose(UserLevelDpEvent(event))
    assert user.get_epsilon(1e-6) == accountant(event).get_epsilon(1e-6)


@pytest.mark.parametrize(
    ("run", "mean", "shape", "said"),
    [
        (RUN, 0.5, 1.0, "mean"),
        (RUN, math.nan, 1.0, "mean"),
        (RUN, math.inf, 1.0, "mean"),
        (RUN, 2.0, -1.0, "shape"),
        (RUN, 2.0, math.nan, "shape"),
        (NonPrivateDpEvent(), 2.0, 1.0, "fail"),
        (ComposedDpEvent([RUN, FailureDpEvent(1e-9)]), 2.0, 1.0, "fail"),
        (UserLevelDpEvent(RUN), 2.0, 1.0, "UserLevelDpEvent"),
        (None, 2.0, 1.0, "event"),
    ],
)
def test_what_cannot_be_priced_is_refused(run, mean, shape, said):
    with pytest.raises((ValueError, TypeError), match=said):
        accountant(RepeatAndSelectDpEvent(run, mean, shape))
