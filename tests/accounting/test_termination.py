"""SIGTERM gives back what was reserved and not used, and ends the program as it always did."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.ledgers import counted

from torch_dpbayes.accounting.accountant import look_at
from torch_dpbayes.accounting.ledger import open_blocks

ROOT = Path(__file__).resolve().parents[2]

# says "x" after each release; what follows `how` differs
PROGRAM = """
import os, signal, sys, threading, time
from torch_dpbayes.accounting import PrivacyAccountant
from torch_dpbayes.accounting.events import GaussianDpEvent, PoissonSampledDpEvent
path, how = sys.argv[1:]
def release(accountant, k):
    noise = 1e3 + (k % 5 if how == "turns" else k / 10 if how == "falling" else 0)
    accountant.compose(GaussianDpEvent(2e3 - noise if how == "falling" else noise), label=how)
    os.write(1, b"x")
def work(accountant):
    for k in range(1_000_000):
        release(accountant, k)
        if how != "busy":
            time.sleep(0.002)
if how == "handler":
    def mine(*_):
        os.write(1, b"mine")
        os._exit(7)
    signal.signal(signal.SIGTERM, mine)
if how == "ignored":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
accountant = PrivacyAccountant(30.0, 1e-5, path=path)
if how == "thread":
    threading.Thread(target=work, args=(accountant,), daemon=True).start()
    time.sleep(1000)
elif how == "child":
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    child = os.fork()
    if child:
        signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        _, status = os.waitpid(child, 0)
        os._exit(0 if os.waitstatus_to_exitcode(status) == -signal.SIGTERM else 1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    work(accountant)
else:
    work(accountant)
"""


def terminated(path, how, after):
    """Exit status and what was said of a program that was sent SIGTERM after so many releases."""
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(path), how], stdout=subprocess.PIPE, cwd=ROOT
    )
    said = b""
    while said.count(b"x") < after:
        said += os.read(program.stdout.fileno(), 4096)
    program.send_signal(signal.SIGTERM)
    if how == "ignored":
        time.sleep(0.3)
        program.kill()
    rest, _ = program.communicate(timeout=300)
    return program.returncode, said + rest


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("how", ["busy", "steps", "thread", "child", "turns", "falling"])
@pytest.mark.parametrize("after", [120, 1, 700])
def test_sigterm_gives_back_what_was_not_used(tmp_path, how, after):
    path = tmp_path / "budget.db"
    code, said = terminated(path, how, after)
    assert code == (0 if how == "child" else -signal.SIGTERM)
    released = said.count(b"x")
    assert released >= after
    # the signal may come between a charge and what it was for
    assert released <= counted(path) <= released + 1
    accountant, rows = look_at(path)
    assert not open_blocks(rows)
    assert {charge.label for charge in accountant.history} == {how}


@pytest.mark.thorough
def test_a_handler_of_the_programs_own_stays(tmp_path):
    path = tmp_path / "budget.db"
    code, said = terminated(path, "handler", 120)
    assert code == 7 and said.endswith(b"mine")
    assert counted(path) >= said.count(b"x")


@pytest.mark.thorough
def test_a_program_that_ignores_the_signal_goes_on(tmp_path):
    path = tmp_path / "budget.db"
    code, said = terminated(path, "ignored", 120)
    assert code == -signal.SIGKILL
    assert counted(path) >= said.count(b"x") > 120


@pytest.mark.slow
def test_sigterm_at_any_moment(tmp_path):
    """Never less than was released, whatever the signal interrupts."""
    for k in range(40):
        path = tmp_path / f"{k}.db"
        code, said = terminated(path, "busy", 1 + 97 * k)
        released = said.count(b"x")
        assert code == -signal.SIGTERM
        assert released <= counted(path) <= released + 1
