"""The ledger among processes: nothing is lost, nothing is spent twice, and nothing is
forgotten when a process dies.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import util
from pathlib import Path

import pytest
from support.ledgers import DELTA, STEP, counted, counts_of, forks, sampled

from torch_dpbayes.accounting import (
    PrivacyAccountant,
    PrivacyBudgetExceeded,
    bounds,
)
from torch_dpbayes.accounting.accountant import look_at
from torch_dpbayes.accounting.events import GaussianDpEvent
from torch_dpbayes.accounting.ledger import open_blocks
from torch_dpbayes.accounting.session import Session

pytestmark = forks

ROOT = Path(__file__).resolve().parents[2]


def charge(opener, steps, noises, answers):
    """A worker: opens the ledger as ``opener`` says, and tells how often it was let through."""
    accountant = opener()
    released = 0
    try:
        for k in range(steps):
            accountant.compose(sampled(noises[k % len(noises)]), label=f"worker {os.getpid()}")
            released += 1
    except PrivacyBudgetExceeded:
        pass
    accountant.close()
    answers.put((os.getpid(), released))


def the_same(accountant):
    return accountant


def run_workers(opener, number, steps, noises, method):
    context = multiprocessing.get_context(method)
    answers = context.Queue()
    workers = [
        context.Process(target=charge, args=(opener, steps, noises, answers)) for _ in range(number)
    ]
    for worker in workers:
        worker.start()
    told = dict(answers.get(timeout=500) for _ in workers)
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    return told


@pytest.mark.parametrize(
    ("number", "steps"), [(4, 400), pytest.param(8, 10_000, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("budget", [25.0, pytest.param(1.2, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("how", ["forked", "by path"])
def test_no_charge_is_lost_and_no_budget_passed(path, number, steps, budget, how):
    parent = PrivacyAccountant(budget, DELTA, path=path)
    fit = parent.remaining(STEP)
    opener = partial(the_same, parent) if how == "forked" else partial(PrivacyAccountant, path=path)
    told = run_workers(opener, number, steps, [1.0, 1.3, 2.0], "fork")
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
    assert how == "by path" or parent.guarantee == "fixed"
    assert bounds.upper_epsilon(counts_of(parent), DELTA) <= budget


def compose_in_pool(accountant):
    with accountant:
        return accountant.compose(STEP).guarantee


@pytest.mark.thorough
def test_an_accountant_sent_to_a_pool_is_the_same_job(path):
    parent = PrivacyAccountant(3.0, DELTA, path=path).compose(STEP, 10)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(compose_in_pool, parent).result() == "fixed"
    assert len(parent) == 11
    assert parent.guarantee == "fixed"


def test_threads_share_one_accountant(path):
    accountant = PrivacyAccountant(3.0, DELTA, path=path)
    threads = [
        threading.Thread(target=lambda: [accountant.compose(STEP) for _ in range(200)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    accountant.close()
    assert counted(path) == len(accountant) == 800


def test_a_fork_in_the_middle_of_another_threads_charge(path):
    """SQLite in the child would find locks of the thread that it does not have: it would wait
    for ever, or take the file for damaged.
    """
    parent = PrivacyAccountant(30.0, DELTA, path=path)
    stop, charged = threading.Event(), []

    def work():
        while not stop.is_set():
            parent.compose(GaussianDpEvent(1e3)).close()
            charged.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(4):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    signal.alarm(30)
                    parent.compose(GaussianDpEvent(1e3)).close()
                    code = 0
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        stop.set()
        thread.join()
    assert counted(path) == len(charged) + 4


def charge_and_fail(accountant):
    for _ in range(50):
        accountant.compose(STEP)
    sys.exit(3)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.thorough)])
def test_a_worker_that_fails_returns_its_blocks(path, method):
    parent = PrivacyAccountant(3.0, DELTA, path=path)
    child = multiprocessing.get_context(method).Process(target=charge_and_fail, args=(parent,))
    child.start()
    child.join()
    assert child.exitcode == 3
    assert counted(path) == 50 and not open_blocks(look_at(path)[1])


# --- ending ---------------------------------------------------------------------------------------

ENDING = """
import os, sys, threading
from torch_dpbayes.accounting import PrivacyAccountant
from torch_dpbayes.accounting.events import GaussianDpEvent
accountant = PrivacyAccountant(30.0, 1e-5, path=sys.argv[1])
def work(steps):
    for _ in range(steps):
        accountant.compose(GaussianDpEvent(1e3))
        os.write(1, b"x")
if sys.argv[2] == "daemon":
    started = threading.Event()
    threading.Thread(target=lambda: (work(300), started.set(), work(10**9)), daemon=True).start()
    started.wait()
else:
    work(300)
if sys.argv[2] == "ValueError":
    raise ValueError
if sys.argv[2] == "_exit":
    os._exit(0)
"""


@pytest.mark.parametrize("how", ["ValueError", "_exit", "daemon"])
def test_a_program_that_ends_without_close(path, how):
    ran = subprocess.run(
        [sys.executable, "-c", ENDING, str(path), how], capture_output=True, cwd=ROOT
    )
    released = ran.stdout.count(b"x")
    if how == "ValueError":
        assert how.encode() in ran.stderr
        assert counted(path) == released == 300
    else:  # nobody was asked for the rest; a thread may charge while the program ends
        assert counted(path) >= released >= 300


def finalizer_of(accountant):
    (found,) = [
        f
        for f in util._finalizer_registry.values()
        if (reference := getattr(f, "_weakref", None)) is not None and reference() is accountant
    ]
    return found


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
    at_the_end = finalizer_of(accountant)
    ending = threading.Thread(target=lambda: (at_the_end(), ended.set()))
    ending.start()
    assert not ended.wait(0.3), "the block was given back in the middle of a charge"
    go_on.set()
    charging.join()
    ending.join()
    assert counted(path) == 2


def test_a_charge_after_blocks_were_given_back_at_the_end_is_written_anew(path):
    """As by a thread that outlives the main program."""
    accountant = PrivacyAccountant(3.0, DELTA, path=path)
    for _ in range(100):
        accountant.compose(STEP)
    at_the_end = finalizer_of(accountant)
    at_the_end()
    assert counted(path) == 100
    for _ in range(3):
        accountant.compose(STEP)
    assert counted(path) >= 103
    accountant.close()
    assert counted(path) == len(accountant) == 103
