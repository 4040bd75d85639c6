"""Whatever interrupts work at a ledger, no charge is lost and none is returned twice."""

import gc
import json
import os
import random
import shutil
import signal
import sqlite3
import sys
import time

import pytest
from support.children import in_child
from support.ledgers import DELTA, STEP, counted, edited, made, sampled

from torch_dpbayes.accounting import PrivacyAccountant, PrivacyBudgetExceeded, ledger, session
from torch_dpbayes.accounting.accountant import look_at
from torch_dpbayes.accounting.events import GaussianDpEvent, encode
from torch_dpbayes.accounting.ledger import FORMAT, LedgerError, Row, open_blocks
from torch_dpbayes.errors import StateError

EVENTS = [STEP, STEP, GaussianDpEvent(1e3), *(sampled(z) for z in (1.5, 1.9, 2.4, 3.0))]
MOST = 5  # releases of one charge


def arm(strike, moment, of_sqlite):
    """Calls ``strike`` at the so-manyth moment, from here on, at which Python lets a signal in
    while accounting works: where a function begins or one of C has returned; or before and after
    SQLite's statements.
    """

    def watch(frame, event, function):
        nonlocal moment
        if of_sqlite:
            counts = event != "return" and getattr(function, "__name__", "") == "execute"
        else:
            counts = event in ("call", "c_return")
        if counts and f"accounting{os.sep}" in frame.f_code.co_filename:
            moment -= 1
            if moment <= 0:
                sys.setprofile(None)
                strike()

    sys.setprofile(watch)


def work(accountant, steps, tell):
    """Random charges, and what comes between them; ``tell`` hears of each release."""
    for _ in range(steps):
        kind = random.random()
        if kind < 0.1:
            accountant.close()
        elif kind < 0.15:
            len(accountant)
        else:
            count = random.choice([1, 1, 1, MOST])
            accountant.compose(random.choice(EVENTS[:2] if kind < 0.6 else EVENTS), count)
            tell(count)


def interrupt():
    raise KeyboardInterrupt


def lose_the_disk():
    raise sqlite3.OperationalError("disk I/O error")


# where it strikes a generator that is thrown away, Python says that nobody hears of it
IN_GENERATORS = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@IN_GENERATORS
@pytest.mark.parametrize("more", [1, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("where", "strike", "times"),
    [("file", interrupt, 40), ("file", lose_the_disk, 40), ("memory", interrupt, 200)],
)
def test_an_interruption_at_any_moment_loses_no_charge(path, where, strike, times, more):
    """It costs at most the charge that it met, and what it left in doubt is returned."""
    accountant, told, strikes = made(where, path, 3e3, DELTA), [], 0
    for _ in range(times * more):
        of_sqlite = strike is lose_the_disk
        arm(strike, int(10 ** random.uniform(0, 1.7 if of_sqlite else 3)), of_sqlite)
        try:
            work(accountant, 60, told.append)
        except (KeyboardInterrupt, LedgerError):
            strikes += 1
        finally:
            sys.setprofile(None)
        assert (counted(path) if where == "file" else len(accountant)) >= sum(told)
        if where == "file":
            accountant.close()  # nor does the next interruption mend what this one left
            assert len(accountant) == counted(path) and not open_blocks(look_at(path)[1])
    assert strikes > times * more / 2
    assert len(accountant) - sum(told) <= MOST * strikes
    assert where == "memory" or len(PrivacyAccountant(path=path)) == counted(path)


@pytest.mark.parametrize("times", [4, pytest.param(400, marks=pytest.mark.slow)])
def test_a_killed_process_leaves_at_least_what_it_released(path, times):
    """A pipe, written after each charge, says what a forked child released."""
    parent, released = PrivacyAccountant(3e3, DELTA, path=path).compose(STEP), 1
    for _ in range(times):
        reader, writer = os.pipe()
        moment, of_sqlite = int(10 ** random.uniform(1, 4)), random.random() < 0.3

        def child(writer=writer, moment=moment, of_sqlite=of_sqlite):
            arm(lambda: os.kill(os.getpid(), signal.SIGKILL), moment, of_sqlite)
            work(parent, 10**6, lambda count: os.write(writer, b"x" * count))

        before = counted(path)
        assert in_child(child) == -signal.SIGKILL
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            new = len(pipe.read())
        released += new
        assert counted(path) >= max(released, before + new)
    assert len(PrivacyAccountant(path=path)) == counted(path) == len(parent)
    assert len(open_blocks(look_at(path)[1])) <= len(EVENTS) * times + 1


@pytest.mark.parametrize(
    ("owner", "moment", "what"),
    [
        (session.Session, "block_for", PrivacyAccountant.close),
        (session.Session, "block_for", lambda accountant: accountant.compose(STEP)),
        (ledger.Ledger, "append", PrivacyAccountant.get_epsilon),
    ],
)
def test_a_signal_handler_in_the_middle_of_a_charge_is_refused(
    path, monkeypatch, owner, moment, what
):
    """Else it could give back the block that the charge is about to be taken from."""
    accountant = PrivacyAccountant(3.0, DELTA, path=path).compose(STEP)
    original = getattr(owner, moment)

    def interrupted(*arguments, **options):
        result = original(*arguments, **options)
        os.kill(os.getpid(), signal.SIGUSR1)
        return result

    before = signal.signal(signal.SIGUSR1, lambda *_: what(accountant))
    released = 1
    try:
        with monkeypatch.context() as patch, pytest.raises(StateError):
            patch.setattr(owner, moment, interrupted)
            for _ in range(100):
                accountant.compose(STEP)
                released += 1
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert counted(path) >= released
    accountant.compose(STEP).close()
    assert released + 1 <= counted(path) == len(accountant) <= released + 2
    assert not open_blocks(look_at(path)[1])


@pytest.mark.parametrize("what", [len, lambda accountant: accountant.compose(STEP, 2)])
def test_a_signal_handler_in_the_middle_of_a_reading_leaves_that_as_it_is(path, what):
    """What the handler reads or writes is not taken for damage."""
    accountant, charged, refused = PrivacyAccountant(3e3, DELTA, path=path), 0, 0
    another = ledger.Ledger(path, {})

    def strike():
        nonlocal charged, refused
        try:
            charged += 0 if what(accountant) is not accountant else 2
        except StateError:
            refused += 1

    for moment in range(1, 100, 3):
        accountant.compose(STEP)  # takes from a block of its own, or opens one
        if moment % 2:  # else nothing is new to the reading but what the handler writes
            row = Row("charge", None, STEP, 1, "fixed")
            another.append([row], job="x", writer="x", if_unchanged=False)
        before = charged = charged + 1 + moment % 2
        arm(strike, moment, False)
        try:
            assert len(accountant) >= before
        finally:
            sys.setprofile(None)
    accountant.close()
    assert counted(path) == len(accountant) == charged and refused < 5


def test_an_accountant_collected_in_the_middle_of_a_commit_does_not_wait_for_itself(
    path, monkeypatch
):
    accountant = PrivacyAccountant(3.0, DELTA, path=path)
    lost = [PrivacyAccountant(path=path).compose(STEP).compose(STEP)]
    lost.append(lost)
    now = ledger.now
    monkeypatch.setattr(ledger, "now", lambda: (gc.collect(), now())[1])
    gc.disable()
    try:
        del lost
        start = time.monotonic()
        accountant.compose(STEP)
    finally:
        gc.enable()
    assert time.monotonic() - start < 20
    accountant.close()
    assert counted(path) >= 3  # what the other had reserved stays charged


# --- what goes wrong at the file ------------------------------------------------------------------


def test_a_busy_file_is_an_error_and_no_release(path, monkeypatch):
    monkeypatch.setattr(ledger, "BUSY_SECONDS", 0.2)
    accountant = PrivacyAccountant(3.0, DELTA, path=path).compose(STEP)
    accountant.close()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerError):
        accountant.compose(STEP)
    other.execute("ROLLBACK")
    other.close()
    accountant.compose(STEP).close()
    assert counted(path) == len(accountant) == 2


def test_a_file_that_cannot_grow_is_an_error_and_no_release(path, monkeypatch):
    accountant, released = PrivacyAccountant(1e3, DELTA, path=path).compose(STEP), 1
    connect, pages = ledger.Ledger._connect, 0

    def limited(own, *arguments):
        connection = connect(own, *arguments)
        connection.execute(f"PRAGMA max_page_count = {pages}")
        return connection

    with monkeypatch.context() as patch, pytest.raises(LedgerError, match="cannot grow"):
        patch.setattr(ledger.Ledger, "_connect", limited)
        pages = 1  # SQLite takes as few as there are
        for k in range(1000):
            accountant.compose(sampled(1 + k / 1000), label="x" * 200)
            released += 1
    assert released <= counted(path) <= released + 64
    accountant.compose(STEP).close()  # room was made
    assert counted(path) == len(accountant) == released + 1


def test_a_file_that_went_back_in_time_or_away_is_noticed(path, tmp_path):
    accountant = PrivacyAccountant(3.0, DELTA, path=path).compose(STEP)
    accountant.close()
    shutil.copy(path, tmp_path / "backup.db")
    accountant.compose(STEP, 100).close()
    shutil.copy(tmp_path / "backup.db", path)
    with pytest.raises(LedgerError, match="backup"):
        accountant.compose(STEP)
    path.unlink()
    for _ in range(2):
        with pytest.raises(LedgerError, match="gone"):
            accountant.compose(STEP)
    assert not path.exists(), "a charge must not make the file anew"
    PrivacyAccountant(3.0, DELTA, path=path)
    with pytest.raises(LedgerError, match="another ledger"):
        accountant.compose(STEP)


def test_what_is_no_ledger_is_refused(path, tmp_path):
    edited(path, "CREATE TABLE mine (x)")
    content = path.read_bytes()
    for name in (path, tmp_path, tmp_path / "none" / "budget.db"):
        with pytest.raises(LedgerError):
            PrivacyAccountant(3.0, DELTA, path=name)
    assert path.read_bytes() == content


OF_STEP = json.dumps(encode(STEP))


@pytest.mark.parametrize(
    ("settings", "row"),
    [
        ({"method": "newest"}, ()),
        ({"neighboring": None}, ()),
        ({"id": None}, ()),
        ({"of_a_user": 3}, ()),
        ({"epsilon": "three"}, ()),
        ({}, ("charge", None, '["NewestDpEvent", 1.0]', 1, "fixed", 0)),
        ({}, ("transfer", None, OF_STEP, 1, "fixed", 0)),
        ({}, ("charge", None, OF_STEP, 1, "paused", 0)),
        ({}, ("charge", None, "", 1, "fixed", 0)),
        *(({"format": number}, ()) for number in (-1, 0, FORMAT - 1, FORMAT + 1)),
    ],
)
def test_what_another_version_wrote_is_not_guessed(path, settings, row):
    """It is not damaged, but what it means is not known here."""
    values = {"epsilon": 3.0, "delta": DELTA, "method": "pld", "unit": "record", "id": "x"}
    values |= {"neighboring": "add_or_remove_one", "created": "", "format": FORMAT, **settings}
    values = {name: value for name, value in values.items() if value is not None}
    number = values.pop("format")
    connection = sqlite3.connect(path, isolation_level=None)
    ledger.make_tables(connection, values)
    if row:
        columns = [1, "", "job", "writer", *row]
        columns.append(ledger.next_digest(ledger.first_digest(values), columns))
        connection.execute(f"INSERT INTO rows VALUES ({', '.join('?' * 11)})", columns)
        connection.execute("UPDATE settings SET value = ? WHERE name = 'seal'", columns[-1:])
    connection.execute(f"PRAGMA user_version = {number}")
    connection.close()
    content = path.read_bytes()
    with pytest.raises(LedgerError, match="version"):
        PrivacyAccountant(path=path)
    assert path.read_bytes() == content


def test_a_clock_that_jumps_changes_nothing(path, monkeypatch):
    """Rows are ordered by their numbers."""
    times = iter(["2030-01-01T00:00:00", "1970-01-01T00:00:00", "2020-01-01T00:00:00"] * 100)
    monkeypatch.setattr(ledger, "now", lambda: next(times))
    accountant, released = PrivacyAccountant(1.0, DELTA, path=path), 0
    with pytest.raises(PrivacyBudgetExceeded):
        while True:
            accountant.compose(STEP, 20)
            released += 20
            assert len(PrivacyAccountant(path=path)) == len(accountant) == released
    accountant.close()
    assert counted(path) == released <= PrivacyAccountant(1.0, DELTA).remaining(STEP)


def test_a_block_is_decided_anew_where_another_process_charged_in_between(path, monkeypatch):
    accountant = PrivacyAccountant(1.0, DELTA, path=path)
    fit, append = accountant.remaining(STEP), session.Session._append

    def late(own, *arguments):
        monkeypatch.setattr(session.Session, "_append", append)
        rows = [Row("charge", None, STEP, fit, "fixed")]
        ledger.Ledger(path, {}).append(rows, job=own.job, writer="another", if_unchanged=False)
        return append(own, *arguments)

    monkeypatch.setattr(session.Session, "_append", late)
    with pytest.raises(PrivacyBudgetExceeded):
        accountant.compose(STEP)
    accountant.close()
    assert counted(path) == fit
