"""The ledger among processes: nothing is lost or spent twice; jobs, and their guarantees."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import util
from pathlib import Path

import numpy as np
import pytest
from support.children import in_child
from support.ledgers import DELTA, STEP, WHERE, counted, counts_of, forks, later_job, made, sampled

from torch_dpbayes.accounting import PrivacyAccountant, PrivacyBudgetExceeded, bounds, ledger, renyi
from torch_dpbayes.accounting.accountant import look_at
from torch_dpbayes.accounting.events import GaussianDpEvent
from torch_dpbayes.accounting.ledger import open_blocks
from torch_dpbayes.accounting.session import Session

pytestmark = forks

ROOT = Path(__file__).resolve().parents[2]


def release(accountant, path, steps, opened, answers):
    """A worker, with the parent's accountant or its own: it tells how often it was let through."""
    accountant = accountant or PrivacyAccountant(path=path)
    if opened is not None:
        opened.wait(60)
    released = 0
    with suppress(PrivacyBudgetExceeded):
        for k in range(steps):
            accountant.compose(sampled((1.0, 1.3, 2.0)[k % 3]), label=f"worker {os.getpid()}")
            released += 1
    accountant.close()
    answers.put((os.getpid(), released))


@pytest.mark.parametrize(
    ("number", "steps"), [(3, 200), pytest.param(8, 10_000, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("how", "budget"),
    [("forked", 25.0), ("by path", 1.2), pytest.param("forked", 1.2, marks=pytest.mark.slow)],
)
def test_no_charge_is_lost_and_no_budget_passed(path, number, steps, budget, how):
    parent = PrivacyAccountant(budget, DELTA, path=path)
    fit, fork = parent.remaining(STEP), multiprocessing.get_context("fork")
    # who opened the file before the first charge is no later job
    opened, answers = fork.Barrier(number) if budget == 25.0 else None, fork.Queue()
    given = (parent if how == "forked" else None, path, steps, opened, answers)
    workers = [fork.Process(target=release, args=given) for _ in range(number)]
    for worker in workers:
        worker.start()
    told = dict(answers.get(timeout=500) for _ in workers)
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    released = sum(told.values())
    assert released == counted(path) == len(parent)
    if budget == 25.0:
        assert set(told.values()) == {steps}
        by_worker = Counter()
        for charge in parent.history:
            by_worker[charge.label] += charge.count
        assert by_worker == {f"worker {pid}": steps for pid in told}
    elif how == "forked":  # of others' open blocks some is refused and given back
        assert released > 0.7 * fit
    assert not open_blocks(look_at(path)[1])
    assert parent.guarantee == "fixed" or (how == "by path" and opened is None)
    assert bounds.upper_epsilon(counts_of(parent), DELTA) <= budget


def test_threads_share_one_accountant(path):
    accountant = PrivacyAccountant(3.0, DELTA, path=path)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: [accountant.compose(STEP) for _ in range(200)], range(4)))
    accountant.close()
    assert counted(path) == len(accountant) == 800


def test_a_fork_in_the_middle_of_another_threads_charge(path):
    """SQLite in the child would find locks of a thread that it does not have."""
    parent = PrivacyAccountant(30.0, DELTA, path=path)
    stop, going, charged = threading.Event(), threading.Event(), []

    def work():
        while going.wait() and not stop.is_set():
            parent.compose(GaussianDpEvent(1e3)).close()
            charged.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for number in range(4):
            going.set()
            while len(charged) <= number:
                time.sleep(0.001)
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    signal.alarm(30)
                    parent.compose(GaussianDpEvent(1e3)).close()
                    code = 0
                finally:
                    os._exit(code)
            going.clear()  # who charges without a pause leaves others no lock
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        stop.set()
        going.set()
        thread.join()
    assert counted(path) == len(charged) + 4


def charge_and_fail(accountant):
    for _ in range(50):
        accountant.compose(STEP)
    sys.exit(3)


def test_a_worker_that_fails_returns_its_blocks(path):
    parent = PrivacyAccountant(3.0, DELTA, path=path)
    child = multiprocessing.get_context("fork").Process(target=charge_and_fail, args=(parent,))
    child.start()
    child.join()
    assert child.exitcode == 3
    assert counted(path) == 50 and not open_blocks(look_at(path)[1])


# --- ending ---------------------------------------------------------------------------------------

ENDING = """
import os, pickle, sys
from torch_dpbayes.accounting import __main__
from torch_dpbayes.accounting.events import GaussianDpEvent
assert not {"torch", "opacus", "pyro", "matplotlib"} & {*sys.modules}
accountant = pickle.loads(bytes.fromhex(sys.argv[1]))
for _ in range(300):
    accountant.compose(GaussianDpEvent(1e3))
    os.write(1, b"x")
print(accountant.guarantee, flush=True)
raise ValueError
"""


def test_a_program_that_was_given_an_accountant_and_ends_without_close(path):
    """It is a later job, and returns what it reserved."""
    accountant = PrivacyAccountant(30.0, DELTA, path=path).compose(STEP)
    accountant.close()
    kept = pickle.dumps(accountant)
    assert pickle.loads(kept).guarantee == "fixed"
    command = [sys.executable, "-c", ENDING, kept.hex()]
    ran = subprocess.run(command, capture_output=True, cwd=ROOT)
    assert b"ValueError" in ran.stderr and ran.stdout.endswith(b"xfilter\n"), ran.stderr
    assert counted(path) == 1 + ran.stdout.count(b"x") == 301
    assert accountant.guarantee == "filter"


def test_what_gives_blocks_back_at_the_end_waits_for_the_charge_that_takes_from_them(
    path, monkeypatch
):
    accountant = PrivacyAccountant(3.0, DELTA, path=path).compose(STEP)
    inside, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    block_for = Session.block_for

    def slow(*arguments):
        found = block_for(*arguments)
        inside.set()
        go_on.wait(20)
        return found

    monkeypatch.setattr(Session, "block_for", slow)
    charging = threading.Thread(target=lambda: accountant.compose(STEP))
    charging.start()
    inside.wait(20)
    references = {
        finalizer: getattr(finalizer, "_weakref", None)
        for finalizer in util._finalizer_registry.values()
    }
    sessions = {f: getattr(known(), "session", None) for f, known in references.items() if known}
    (at_the_end,) = [f for f, own in sessions.items() if own and str(own.path) == str(path)]
    ending = threading.Thread(target=lambda: (at_the_end(), ended.set()))
    ending.start()
    assert not ended.wait(0.3), "the block was given back in the middle of a charge"
    go_on.set()
    charging.join()
    ending.join()
    assert counted(path) == 2


# --- jobs -----------------------------------------------------------------------------------------


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

    assert in_child(first_job) is None
    assert PrivacyAccountant(path=path).is_later_job


def test_a_forked_process_that_opens_the_file_by_itself_is_a_later_job(path):
    PrivacyAccountant(3.0, DELTA, path=path).compose(STEP).close()
    assert in_child(lambda: PrivacyAccountant(path=path).is_later_job) is True


def test_the_first_charge_of_a_later_job_says_what_that_costs(path, caplog):
    PrivacyAccountant(3.0, DELTA, path=path).compose(STEP, 700).close()
    left = PrivacyAccountant(3.0, DELTA).compose(STEP, 701).remaining(STEP)
    later = later_job(path=path)
    assert later.is_later_job and not caplog.text
    later.compose(STEP).compose(STEP)
    (record,) = caplog.records
    assert f"About {later.remaining(STEP) + 1} more such releases" in record.message
    assert f"({left} in the first job)" in record.message


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
