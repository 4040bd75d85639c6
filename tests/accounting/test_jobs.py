"""Which processes are one job, and what a later job is told."""

import multiprocessing

import pytest
from support.ledgers import DELTA, STEP, counted, forks, in_child, later_job

from torch_dpbayes.accounting import PrivacyAccountant
from torch_dpbayes.accounting.accountant import look_at

pytestmark = forks


@pytest.fixture
def path(tmp_path):
    return tmp_path / "budget.db"


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


@pytest.mark.parametrize("budget", [(3.0, DELTA), ()])
def test_the_first_charge_of_a_later_job_says_what_that_costs(path, budget, caplog):
    PrivacyAccountant(*budget, path=path).compose(STEP, 700).close()
    assert ("has no budget" in caplog.text) == (not budget)
    caplog.clear()
    left = PrivacyAccountant(*budget).compose(STEP, 701).remaining(STEP)
    later = later_job(path=path)
    assert later.is_later_job and not caplog.text
    later.compose(STEP)
    (record,) = caplog.records
    assert str(path) in record.message
    if budget:
        assert f"About {later.remaining(STEP)} more such releases" in record.message
        assert f"({left} in the first job)" in record.message
    else:
        assert "epsilon is infinite" in record.message
    later.compose(STEP)
    assert len(caplog.records) == 1
    later_job(path=path).compose(STEP)
    assert len(caplog.records) == 2 and "in the first job" not in caplog.records[1].message
