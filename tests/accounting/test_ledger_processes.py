"""The ledger among processes: nothing is lost, nothing is spent twice, and nothing is
forgotten when a process dies.
"""

import multiprocessing
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import util
from pathlib import Path

import pytest
from support.ledgers import DELTA, STEP, counted, forks, sampled

from torch_dpbayes.accounting import (
    PrivacyAccountant,
    PrivacyBudgetExceeded,
    bounds,
    dominating_pairs,
)
from torch_dpbayes.accounting.accountant import look_at
from torch_dpbayes.accounting.events import GaussianDpEvent
from torch_dpbayes.accounting.ledger.schema import open_blocks
from torch_dpbayes.accounting.ledger.session import Session

pytestmark = forks

ROOT = Path(__file__).resolve().parents[2]


def epsilon_of(path):
    """What the rows cost, as if all of them had been fixed in advance."""
    counts = {}
    for row in look_at(path)[1]:
        if row.kind in ("charge", "block", "return"):
            pair = dominating_pairs.dominating_pair(row.event, "add_or_remove_one")
            counts[pair] = counts.get(pair, 0) + row.count
    return bounds.upper_epsilon({pair: count for pair, count in counts.items() if count}, DELTA)


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
    ("number", "steps"),
    [
        pytest.param(4, 500, id="4x500"),
        pytest.param(8, 10_000, id="8x10000", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("how", ["forked", "by path"])
def test_no_charge_is_lost(tmp_path, number, steps, how):
    path = tmp_path / "budget.db"
    budget = 4.0 if number == 4 else 25.0
    parent = PrivacyAccountant(budget, DELTA, path=path)
    opener = partial(the_same, parent) if how == "forked" else partial(PrivacyAccountant, path=path)
    told = run_workers(opener, number, steps, [1.0, 1.3, 2.0], "fork")
    assert sum(told.values()) == number * steps == counted(path) == len(parent)
    by_worker = {}
    for label in parent.history:
        by_worker[label.label] = by_worker.get(label.label, 0) + label.count
    assert by_worker == {f"worker {pid}": steps for pid in told}
    assert not open_blocks(look_at(path)[1])
    assert parent.guarantee == "fixed" if how == "forked" else "filter"
    assert epsilon_of(path) <= budget


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("number", "steps"),
    [
        pytest.param(4, 500, id="4x500"),
        pytest.param(8, 10_000, id="8x10000", marks=pytest.mark.slow),
    ],
)
def test_the_budget_is_never_passed(tmp_path, number, steps):
    path = tmp_path / "budget.db"
    parent = PrivacyAccountant(1.2, DELTA, path=path)
    fit = parent.remaining(STEP)
    assert fit < number * steps
    told = run_workers(partial(the_same, parent), number, steps, [1.0], "fork")
    released = sum(told.values())
    assert released == counted(path) == len(parent) <= fit
    # A worker may have been refused for what another had reserved and gave back: that is left.
    assert parent.remaining(STEP) == fit - released
    assert released > 0.7 * fit
    assert epsilon_of(path) <= 1.2


def compose_in_pool(accountant):
    with accountant:
        return accountant.compose(STEP).guarantee


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_an_accountant_sent_to_a_pool_is_the_same_job(tmp_path, method):
    parent = PrivacyAccountant(3.0, DELTA, path=tmp_path / "budget.db").compose(STEP, 10)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool:
        assert pool.submit(compose_in_pool, parent).result() == "fixed"
    assert len(parent) == 11
    assert parent.guarantee == "fixed"


def test_threads_share_one_accountant(tmp_path):
    accountant = PrivacyAccountant(3.0, DELTA, path=tmp_path / "budget.db")
    threads = [
        threading.Thread(target=lambda: [accountant.compose(STEP) for _ in range(200)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    accountant.close()
    assert counted(accountant.path) == len(accountant) == 800


def test_a_fork_in_the_middle_of_another_threads_charge(tmp_path):
    """SQLite in the child would find locks of the thread that it does not have: it would wait
    for ever, or take the file for damaged.
    """
    path = tmp_path / "budget.db"
    parent = PrivacyAccountant(30.0, DELTA, path=path)
    stop, charged = threading.Event(), []

    def work():
        while not stop.is_set():
            parent.compose(GaussianDpEvent(1e3)).close()
            charged.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(10):
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
    assert counted(path) == len(charged) + 10


def make(path):
    return PrivacyAccountant(3.0, DELTA, path=path).compose(STEP).epsilon


def test_many_processes_may_make_the_file_at_once(tmp_path):
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(6, mp_context=context) as pool:
        for k in range(5):
            path = tmp_path / f"budget{k}.db"
            assert set(pool.map(make, [path] * 6)) == {3.0}
            assert counted(path) >= 6


def charge_and_fail(accountant):
    for _ in range(50):
        accountant.compose(STEP)
    sys.exit(3)


@pytest.mark.parametrize(
    "method",
    ["fork", *(pytest.param(m, marks=pytest.mark.thorough) for m in ("spawn", "forkserver"))],
)
def test_a_worker_that_fails_returns_its_blocks(tmp_path, method):
    path = tmp_path / "budget.db"
    parent = PrivacyAccountant(3.0, DELTA, path=path)
    child = multiprocessing.get_context(method).Process(target=charge_and_fail, args=(parent,))
    child.start()
    child.join()
    assert child.exitcode == 3
    assert counted(path) == 50 and not open_blocks(look_at(path)[1])


# --- dying ----------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("times", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_a_killed_process_leaves_at_least_what_it_released(tmp_path, times):
    """Children of a warm parent die at random moments; a pipe, written after each charge,
    says what they released.
    """
    path = tmp_path / "budget.db"
    parent = PrivacyAccountant(60.0, DELTA, path=path)
    for k in range(50):
        parent.compose(sampled(1 + k / 100))
    parent.close()
    released, before = 50, 50
    generator, delay = random.Random(), None
    for _ in range(times):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(reader)
                for k in range(1_000_000):
                    parent.compose(sampled(1.5 + 0.5 * ((k * 7919) % 100) / 100))
                    os.write(writer, b"x")
                    if k % 37 == 0:
                        parent.close()
            finally:
                os._exit(1)
        os.close(writer)
        start = time.monotonic()
        if delay is None or generator.random() < 0.8:  # else while it opens the ledger
            select.select([reader], [], [], 60)
            # of the first one: later ones open what the earlier wrote
            delay = delay or time.monotonic() - start
        time.sleep(generator.expovariate(1 / delay))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(reader, "rb") as pipe:
            released += len(pipe.read())
        after = counted(path)
        assert after >= released
        assert after >= before
        before = after
    assert released >= 50 + times / 2, "the children were killed before they did anything"
    assert len(PrivacyAccountant(path=path)) == before == len(parent)
    assert len(open_blocks(look_at(path)[1])) <= 2 * times


STORM = """
import random, signal, sys, time
from torch_dpbayes.accounting import PrivacyAccountant
from torch_dpbayes.accounting.events import GaussianDpEvent
accountant = PrivacyAccountant(300.0, 1e-5, path=sys.argv[1] if sys.argv[1] else None)
generator, released, armed, end = random.Random(), 0, False, time.monotonic() + 10

def interrupt(*_):
    if armed:
        raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
while time.monotonic() < end:
    kind = generator.random()
    signal.setitimer(signal.ITIMER_REAL, 10 ** generator.uniform(-6, -2))
    try:
        try:
            armed = True
            if kind < 0.05:
                accountant.close()
            elif kind < 0.1:
                len(accountant)
            else:
                count = generator.choice([1, 1, 1, 5])
                accountant.compose(GaussianDpEvent(1e3 + int(10 * kind)), count)
                armed = False
                released += count
        finally:
            armed = False
    except KeyboardInterrupt:
        pass
accountant.close()
assert len(accountant) >= released > 100
print(released)
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["file", "memory"])
def test_interrupts_at_any_moment(tmp_path, where):
    path = tmp_path / "budget.db"
    ran = subprocess.run(
        [sys.executable, "-c", STORM, str(path) if where == "file" else ""],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert ran.returncode == 0, ran.stderr
    if where == "file":
        assert counted(path) >= int(ran.stdout)
        assert not open_blocks(look_at(path)[1])


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
if sys.argv[2] in ("ValueError", "KeyboardInterrupt"):
    raise getattr(__builtins__, sys.argv[2])
if sys.argv[2] == "_exit":
    os._exit(0)
"""


@pytest.mark.parametrize("how", ["end", "ValueError", "KeyboardInterrupt", "_exit", "daemon"])
def test_a_program_that_ends_without_close(tmp_path, how):
    path = tmp_path / "budget.db"
    ran = subprocess.run(
        [sys.executable, "-c", ENDING, str(path), how], capture_output=True, cwd=ROOT
    )
    released = ran.stdout.count(b"x")
    if how not in ("_exit", "daemon"):
        assert how == "end" or how.encode() in ran.stderr
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
    tmp_path, monkeypatch
):
    path = tmp_path / "budget.db"
    accountant = PrivacyAccountant(3.0, DELTA, path=path).compose(STEP)
    inside, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    covering = Session.covering

    def slow(*arguments):
        found = covering(*arguments)
        inside.set()
        go_on.wait(20)
        return found

    monkeypatch.setattr(Session, "covering", slow)
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


def test_a_charge_after_blocks_were_given_back_at_the_end_is_written_anew(tmp_path):
    """As by a thread that outlives the main program."""
    path = tmp_path / "budget.db"
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
