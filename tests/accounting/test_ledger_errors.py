"""What goes wrong at a ledger is an error and no release; an interruption loses no charge."""

import gc
import os
import resource
import shutil
import signal
import sqlite3
import tempfile
import time
from pathlib import Path

import pytest
from support.ledgers import DELTA, STEP, counted, forks, in_child, sampled

from torch_dpbayes.accounting import PrivacyAccountant
from torch_dpbayes.accounting.accountant import look_at
from torch_dpbayes.accounting.ledger import file, session
from torch_dpbayes.accounting.ledger.schema import LedgerError, open_blocks


@pytest.fixture
def path(tmp_path):
    return tmp_path / "budget.db"


def test_a_busy_file_is_an_error_and_no_release(path, monkeypatch):
    monkeypatch.setattr(file, "BUSY_SECONDS", 0.2)
    accountant = PrivacyAccountant(3.0, DELTA, path=path).compose(STEP)
    accountant.close()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerError, match="busy"):
        accountant.compose(STEP)
    other.execute("ROLLBACK")
    other.close()
    accountant.compose(STEP).close()
    assert counted(path) == len(accountant) == 2


@forks
def test_a_full_disk_is_an_error_and_no_release(path):
    accountant = PrivacyAccountant(20.0, DELTA, path=path)
    accountant.compose(STEP).close()

    def child():
        room = path.stat().st_size + 40_000
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        released = 0
        try:
            for k in range(100_000):
                accountant.compose(sampled(1 + k / 1000), label="x" * 200)
                accountant.close()
                released += 1
        except LedgerError as error:
            resource.setrlimit(
                resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            )
            kept = counted(path) >= 1 + released
            accountant.compose(STEP)  # room was made
            accountant.close()
            return (
                17
                if kept and released > 3 and "disk" in str(error) and counted(path) >= 2 + released
                else 1
            )

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert in_child(child) == 17
    assert resource.getrlimit(resource.RLIMIT_FSIZE) == before
    assert len(PrivacyAccountant(path=path)) == counted(path)


@forks
@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_read_only_file_is_an_error_and_no_release(what):
    folder = Path(tempfile.mkdtemp())  # where another user may go, unlike pytest's
    try:
        folder.chmod(0o777)
        path = folder / "budget.db"
        PrivacyAccountant(3.0, DELTA, path=path).compose(STEP).close()
        (path if what == "file" else folder).chmod(0o444 if what == "file" else 0o555)

        def child():
            if os.getuid() == 0:
                os.setuid(65534)
            assert look_at(path)[0].get_epsilon() > 0
            try:
                PrivacyAccountant(path=path).compose(STEP)
            except LedgerError as error:
                return 17 if "read-only" in str(error) or "permissions" in str(error) else 1

        assert in_child(child) == 17
        folder.chmod(0o777)
        assert counted(path) == 1
    finally:
        shutil.rmtree(folder)


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


def test_other_databases_and_other_formats_are_refused(path):
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE mine (x)")
    connection.commit()
    connection.close()
    content = path.read_bytes()
    with pytest.raises(LedgerError, match="not a ledger"):
        PrivacyAccountant(3.0, DELTA, path=path)
    assert path.read_bytes() == content
    path.unlink()
    PrivacyAccountant(3.0, DELTA, path=path).compose(STEP, 3).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 2")
    connection.close()
    with pytest.raises(LedgerError, match="format 2, this torch_dpbayes reads format 5"):
        PrivacyAccountant(3.0, DELTA, path=path)
    assert counted(path) == 3


@pytest.mark.parametrize(
    ("owner", "moment"), [(session.Session, "covering"), (file.Ledger, "append")]
)
@pytest.mark.parametrize("what", ["close", "compose", "get_epsilon", "state_dict"])
def test_a_signal_handler_in_the_middle_of_a_charge_is_refused(
    path, monkeypatch, owner, moment, what
):
    """Else ``close`` could give back the block that a charge is about to be taken from, or a
    read could pass for the check before a commit.
    """
    accountant = PrivacyAccountant(3.0, DELTA, path=path).compose(STEP)
    work = {name: getattr(accountant, name) for name in ("close", "get_epsilon", "state_dict")} | {
        "compose": lambda: accountant.compose(STEP)
    }
    original = getattr(owner, moment)

    def interrupted(*arguments, **options):
        result = original(*arguments, **options)
        os.kill(os.getpid(), signal.SIGUSR1)
        return result

    before = signal.signal(signal.SIGUSR1, lambda *_: work[what]())
    released = 1
    try:
        monkeypatch.setattr(owner, moment, interrupted)
        with pytest.raises(RuntimeError, match="signal handler"):
            for _ in range(100):
                accountant.compose(STEP)
                released += 1
    finally:
        signal.signal(signal.SIGUSR1, before)
        monkeypatch.setattr(owner, moment, original)
    assert counted(path) >= released
    accountant.compose(STEP).close()
    assert released + 1 <= counted(path) <= released + 2
    assert len(accountant) == counted(path)
    assert not open_blocks(look_at(path)[1])


def test_an_accountant_collected_in_the_middle_of_a_commit_does_not_wait_for_itself(
    path, monkeypatch
):
    accountant = PrivacyAccountant(3.0, DELTA, path=path)
    lost = [PrivacyAccountant(path=path).compose(STEP).compose(STEP)]
    lost.append(lost)
    now = file.now
    monkeypatch.setattr(file, "now", lambda: (gc.collect(), now())[1])
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


def test_no_folder(tmp_path):
    with pytest.raises(LedgerError, match="no file"):
        PrivacyAccountant(path=tmp_path)
    with pytest.raises(LedgerError, match="no folder"):
        PrivacyAccountant(path=tmp_path / "none" / "budget.db")


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, sqlite3.OperationalError("disk I/O error")])
def test_an_interrupted_commit_never_counts_less_than_was_released(
    path, monkeypatch, moment, error
):
    """Whether or not the commit reached the disk, nothing is used twice and nothing is
    returned twice.
    """
    accountant = PrivacyAccountant(3.0, DELTA, path=path)
    released, fail = 0, []

    class Failing(sqlite3.Connection):
        def execute(self, sql, *arguments):
            if sql == "COMMIT" and fail and moment == "before":
                raise fail.pop()
            result = super().execute(sql, *arguments)
            if sql == "COMMIT" and fail:
                raise fail.pop()
            return result

    connect = sqlite3.connect
    monkeypatch.setattr(file.sqlite3, "connect", lambda *a, **k: connect(*a, factory=Failing, **k))
    for k in range(2000):
        if k in (20, 130, 133, 500, 1400):
            fail.append(error)
        try:
            accountant.compose(sampled(2 - k / 4000))
            released += 1
        except (KeyboardInterrupt, LedgerError):
            pass
        if k % 100 == 0:
            assert counted(path) >= released
    fail.clear()
    accountant.close()
    assert released >= 2000 - 5, "an interruption costs one charge, and the next one goes on"
    # what an interrupt left in doubt was returned; a charge may be recorded whose release the
    # interrupt prevented
    assert released <= counted(path) <= released + 5
    assert not open_blocks(look_at(path)[1])
    assert len(accountant) == len(PrivacyAccountant(path=path)) == counted(path)
