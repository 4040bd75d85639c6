"""Which processes are one job, what a later job is told, and which guarantee holds for them."""

import multiprocessing
from contextlib import suppress

import numpy as np
import pytest
from support.ledgers import (
    DELTA,
    STEP,
    WHERE,
    counted,
    counts_of,
    forks,
    in_child,
    later_job,
    made,
    sampled,
)

from torch_dpbayes.accounting import PrivacyAccountant, PrivacyBudgetExceeded, bounds, ledger, renyi
from torch_dpbayes.accounting.accountant import look_at
from torch_dpbayes.accounting.events import GaussianDpEvent

pytestmark = forks


def work(path, barrier, answers):
    accountant = PrivacyAccountant(path=path)
    barrier.wait(60)
    for _ in range(20):
        accountant.compose(STEP)
    accountant.close()
    answers.put((accountant.is_later_job, accountant.guarantee))


def test_workers_that_open_the_file_before_the_first_charge_are_not_later(path):
    PrivacyAccountant(3.0, DELTA, path=path)
    fork = multiprocessing.get_context("fork")
    barrier, answers = fork.Barrier(3), fork.Queue()
    workers = [fork.Process(target=work, args=(path, barrier, answers)) for _ in range(3)]
    for worker in workers:
        worker.start()
    assert [answers.get(timeout=60) for _ in workers] == [(False, "fixed")] * 3
    for worker in workers:
        worker.join()
    assert counted(path) == 60 and len({row.writer for row in look_at(path)[1]}) == 3


def test_a_process_that_opens_the_file_again_goes_on_with_its_job(path, caplog):
    """As a cell of a notebook that runs twice, with the accountant before still in use or not."""
    first = PrivacyAccountant(3.0, DELTA, path=path).compose(STEP, 700)
    left = first.remaining(STEP)
    again = PrivacyAccountant(3.0, DELTA, path=path)
    assert not again.is_later_job and again.remaining(STEP) == left
    assert again.compose(STEP).guarantee == first.guarantee == "fixed"
    del first
    third = PrivacyAccountant(path=path).compose(STEP)
    assert third.guarantee == "fixed" and third.remaining(STEP) == left - 2
    assert not caplog.text
    again.close()
    third.close()
    assert counted(path) == 702 and len({row.job for row in look_at(path)[1]}) == 1


def test_another_file_of_the_same_name_is_another_ledger(path):
    PrivacyAccountant(3.0, DELTA, path=path).compose(STEP).close()
    path.unlink()

    def first_job():
        PrivacyAccountant(3.0, DELTA, path=path).compose(STEP).close()

    assert in_child(first_job) == 0
    assert PrivacyAccountant(path=path).is_later_job


def test_a_forked_process_that_opens_the_file_by_itself_is_a_later_job(path):
    PrivacyAccountant(3.0, DELTA, path=path).compose(STEP).close()
    assert in_child(lambda: PrivacyAccountant(path=path).is_later_job and 17) == 17


def test_the_first_charge_of_a_later_job_says_what_that_costs(path, caplog):
    PrivacyAccountant(3.0, DELTA, path=path).compose(STEP, 700).close()
    left = PrivacyAccountant(3.0, DELTA).compose(STEP, 701).remaining(STEP)
    later = later_job(path=path)
    assert later.is_later_job and not caplog.text
    later.compose(STEP).compose(STEP)
    (record,) = caplog.records
    assert f"About {later.remaining(STEP) + 1} more such releases" in record.message
    assert f"({left} in the first job)" in record.message


# --- which guarantee ------------------------------------------------------------------------------


def test_a_second_job_is_adaptive_and_everything_counts_against_its_filter(path):
    first = PrivacyAccountant(3.0, DELTA, path=path).compose(STEP, 500, label="first")
    first.close()
    second = later_job(path=path)
    fit = second.remaining(STEP)
    assert second.compose(STEP, label="second").guarantee == "filter"
    assert second.history[-1].adaptive and first.guarantee == "filter"
    assert first.get_epsilon() == second.get_epsilon() == pytest.approx(3.0, rel=1e-9)
    assert "2e-05" in first.summary()  # two of the filter's delta, for each of both directions
    with pytest.raises(PrivacyBudgetExceeded):
        for _ in range(10_000):
            second.compose(STEP)
    second.close()
    assert abs(len(second) - 500 - fit) <= 1
    with pytest.raises(PrivacyBudgetExceeded):  # the first job is under the filter now, too
        first.compose(STEP)
    # the limit, computed here from the definition of a Renyi filter
    order = look_at(path)[0]._session.filter.order
    total = renyi.curve(counts_of(second), [order])[0]
    assert renyi.epsilon(np.array([total]), DELTA, [order]) <= 3.0 + 1e-6
    assert renyi.epsilon(np.array([total * 1.002]), DELTA, [order]) > 3.0


def test_a_second_job_is_refused_where_the_first_used_more_than_a_filter_allows(path):
    first = PrivacyAccountant(3.0, DELTA, path=path)
    fit = first.remaining(STEP)
    first.compose(STEP, int(0.99 * fit)).close()
    second = later_job(path=path)
    assert second.remaining(STEP) == 0
    with pytest.raises(PrivacyBudgetExceeded):
        second.compose(sampled(50.0))
    assert second.guarantee == first.guarantee == "fixed"
    first.compose(STEP, fit - int(0.99 * fit))  # the first job goes on
    assert first.remaining(STEP) == 0


@pytest.mark.parametrize("event", [STEP, GaussianDpEvent(30.0)], ids=["renyi", "gaussian"])
def test_a_declared_filter_holds_for_all_jobs(path, event):
    PrivacyAccountant(3.0, DELTA, path=path).compose(event, adaptive=True).close()
    memory = PrivacyAccountant(3.0, DELTA).compose(event, adaptive=True)
    second = later_job(path=path)
    assert second.guarantee == "filter"
    assert second.remaining(event) == memory.remaining(event)
    second.compose(sampled(3.0))
    third = later_job(path=path).compose(event)
    assert "2e-05" not in third.summary()
    assert {charge.adaptive for charge in third.history} == {True}


@WHERE
def test_a_refused_declaration_leaves_everything_as_it_was(where, path):
    accountant = made(where, path, 0.1, DELTA)
    with pytest.raises(PrivacyBudgetExceeded):
        accountant.compose(GaussianDpEvent(1.0), adaptive=True)
    accountant.compose(GaussianDpEvent(100.0))
    assert accountant.guarantee == "fixed"
    with pytest.raises(ValueError):
        accountant.compose(GaussianDpEvent(100.0), adaptive=True)
    accountant.close()
    assert len(accountant) == 1 and (where == "memory" or counted(path) == 1)


def test_a_first_charge_that_was_taken_back_decides_the_filter(tmp_path, monkeypatch):
    """The filter that admits a charge is the one that is reported."""
    accountant = PrivacyAccountant(1.0, DELTA, path=tmp_path / "budget.db")
    append = ledger.Ledger.append

    def cut(*arguments, **options):
        monkeypatch.undo()
        append(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(ledger.Ledger, "append", cut)
    with pytest.raises(KeyboardInterrupt):
        accountant.compose(STEP)
    accountant.close()
    assert not len(accountant)
    for multiplier in (3.74, 30.0, 300.0, 3000.0):
        with suppress(PrivacyBudgetExceeded):
            accountant.compose(GaussianDpEvent(multiplier), adaptive=True)
    for delta in (1e-2, 1e-3, DELTA):
        assert accountant.get_epsilon(delta) >= bounds.lower_epsilon(counts_of(accountant), delta)
