"""The ledger: one history in a file, and the guarantee that holds for those who share it."""

import copy
import json
import math
import os
import pickle
import shutil
import sqlite3

import numpy as np
import pytest
from support.children import in_child
from support.ledgers import DELTA, STEP, WHERE, counted, made, sampled

from torch_dpbayes.accounting import (
    PrivacyAccountant,
    PrivacyBudgetExceeded,
    bounds,
    budget,
    events,
    ledger,
)
from torch_dpbayes.accounting.accountant import look_at
from torch_dpbayes.accounting.ledger import LedgerError


def charge_until_refused(accountant, event=STEP, most=100_000, **options):
    """How often it was charged."""
    for released in range(most):
        try:
            accountant.compose(event, **options)
        except PrivacyBudgetExceeded:
            return released
    raise AssertionError("nothing was refused")


def listened(monkeypatch, owner, name, note):
    """``note`` hears of every call."""
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *a, **k: (note(), original(*a, **k))[1])


# --- the history ----------------------------------------------------------------------------------


def test_blocks_count_for_everyone_until_they_are_returned(path):
    accountant = PrivacyAccountant(3.0, DELTA, path=path).compose(events.PureDpEvent(0.1))
    assert counted(path) == 1, "a single charge reserves nothing beyond itself"
    for _ in range(40):
        accountant.compose(STEP)
    assert len(accountant) == 41 < counted(path) == len(PrivacyAccountant(path=path))
    accountant.close()
    assert len(accountant) == counted(path) == len(PrivacyAccountant(path=path)) == 41
    accountant.compose(STEP)
    del accountant  # forgetting an accountant closes it
    assert counted(path) == 42


def test_every_commit_is_synchronous_and_conditional(path, monkeypatch):
    said, composed = [], []

    class Listening(sqlite3.Connection):
        def execute(self, sql, *arguments):
            said.append(sql)
            return super().execute(sql, *arguments)

    connect = sqlite3.connect
    monkeypatch.setattr(
        ledger.sqlite3, "connect", lambda *a, **k: connect(*a, factory=Listening, **k)
    )
    accountant = PrivacyAccountant(1.0, DELTA, path=path)
    for module in (bounds, budget):
        listened(monkeypatch, module, "compose", lambda: composed.append(len(said)))
    charge_until_refused(accountant)
    begins = [i for i, sql in enumerate(said) if sql == "BEGIN IMMEDIATE"]
    ends = [i for i, sql in enumerate(said) if sql in ("COMMIT", "ROLLBACK")]
    assert len(begins) == len(ends) > 10
    assert sum("synchronous = FULL" in sql for sql in said) == len(begins)
    written = [i for i, sql in enumerate(said) if sql.startswith(("INSERT", "UPDATE"))]
    transactions = list(zip(begins, ends, strict=True))
    assert all(any(b < i < e for b, e in transactions) for i in written)
    assert composed, "near the edge something must have been composed"
    inside = [moment for moment in composed for begin, end in transactions if begin < moment <= end]
    assert not inside, "a composition inside a transaction"
    connection = connect(path)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    row = connection.execute("SELECT kind, event, count FROM rows ORDER BY seq").fetchone()
    connection.close()
    code = json.dumps(["PoissonSampledDpEvent", 0.01, ["GaussianDpEvent", 1.0]])
    assert row == ("block", code, 1), "other tools read it"


PAIR = events.ComposedDpEvent([events.PureDpEvent(0.02), events.FailureDpEvent(2e-7)])
BESIDE_A_FAILURE = events.ComposedDpEvent([STEP, events.FailureDpEvent(2e-7)])
EXACT = [
    ("pld", "add_or_remove_one", "memory", sampled(1.2, 0.02)),
    ("rdp", "replace_one", "file", events.GaussianDpEvent(60.0)),
    ("pld", "add_or_remove_one", "file", PAIR),
    ("pld", "replace_one", "memory", BESIDE_A_FAILURE),
]


@pytest.mark.parametrize(("method", "relation", "where", "event"), EXACT)
def test_remaining_is_exact(where, method, relation, event, path):
    accountant = made(where, path, 2.5, DELTA, method=method, neighboring=relation)
    accountant.compose(sampled(1.5), 100).compose(events.GaussianDpEvent(90.0), 3)
    fit = accountant.remaining(event)
    assert fit > 30
    for k in range(fit):
        accountant.compose(event)
        if k == fit - 30:
            assert accountant.remaining(event) == fit - k - 1
    assert accountant.remaining(event) == 0
    assert charge_until_refused(accountant, event) == 0 and accountant.get_epsilon() <= 2.5
    # the bound that is reported, for one more, is above the budget, and not above it as it is
    beyond = PrivacyAccountant(method=method, neighboring=relation)
    for charge in accountant.history:
        beyond.compose(charge.event, charge.count)
    assert beyond.get_epsilon(DELTA) <= 2.5 * (1 + 1e-6)
    assert beyond.compose(event).get_epsilon(DELTA) > 2.5 * (1 - 1e-6)


FOUR_KINDS = [STEP, events.GaussianDpEvent(300.0)]
FOUR_KINDS += [events.PureDpEvent(1e-4), events.BoundedRangeDpEvent(1e-4)]
SCHEDULE = [sampled(2 + math.sin(t / 50)) for t in range(600)]


@pytest.mark.parametrize(
    ("turns", "most_commits"),
    [([STEP], 12), (FOUR_KINDS, 100), (SCHEDULE, 60)],
    ids=["one event", "four kinds", "schedule"],
)
def test_a_kill_costs_half_of_what_was_released_or_64_steps(path, turns, most_commits, monkeypatch):
    """Counted in the file at every step; a commit is rare all the same, and nothing is composed."""
    accountant, commits, compositions = PrivacyAccountant(20.0, DELTA, path=path), set(), []
    for module in (bounds, budget):
        listened(monkeypatch, module, "compose", lambda: compositions.append(1))
    for released in range(1, 601):
        accountant.compose(turns[(released - 1) % len(turns)])
        commits.add(accountant._session.ledger.place[0])
        assert released <= counted(path) <= released + max(64, released / 2)
    assert len(commits) <= most_commits and not compositions


@WHERE
def test_a_refused_charge_changes_nothing(where, path):
    accountant = made(where, path, 1.0, DELTA).compose(STEP, 10, label="kept")
    before = accountant.state_dict()
    two = events.ComposedDpEvent([STEP, events.FailureDpEvent(2 * DELTA)])
    for event in (events.NonPrivateDpEvent(), two):
        with pytest.raises(PrivacyBudgetExceeded):
            accountant.compose(event)
        assert accountant.state_dict() == before
    accountant.compose(STEP).close()
    assert len(accountant) == 11 and (where == "memory" or counted(path) == 11)


@pytest.mark.parametrize(("where", "adaptive"), [("memory", False), ("file", True)])
def test_repetitions_are_counted_like_any_other_charge(where, adaptive, path):
    """On their short way; whatever comes between, each counts once in history and budget."""
    accountant = made(where, path, 2.0, DELTA)
    other, charged, mixed = sampled(3.0), 0, 0
    for k in range(600):
        label = "a" if k % 400 < 300 else "b"
        accountant.compose(STEP, label=label, adaptive=adaptive)
        charged += 1
        if k % 97 == 0:
            for _ in range(2):
                accountant.compose(other, label=label, adaptive=adaptive)
            mixed += 2
        if k % 61 == 0:
            assert len(accountant) == charged + mixed
        if k % 211 == 0:
            accountant.close()
        if k % 500 == 0:
            accountant.remaining(other)
            accountant.state_dict()
    by_event = {}
    for charge in accountant.history:
        by_event[charge.event] = by_event.get(charge.event, 0) + charge.count
    assert by_event == {STEP: charged, other: mixed}
    labels = {charge.label: charge.count for charge in accountant.history if charge.event == STEP}
    assert labels == {"a": 500, "b": 100}
    fit = accountant.remaining(STEP)
    assert charge_until_refused(accountant, adaptive=adaptive) == fit
    assert len(accountant) == charged + fit + mixed
    accountant.close()
    assert where == "memory" or counted(path) == len(accountant)


def test_an_event_that_changes_is_charged_as_it_is():
    """Numbers in an event may be arrays: the same object may stand for another release."""
    noise = np.array(2.0)
    event = events.PoissonSampledDpEvent(0.01, events.GaussianDpEvent(noise))
    accountant = PrivacyAccountant()
    for _ in range(5):
        accountant.compose(event)
    noise[...] = 1.0
    accountant.compose(event)
    found = {charge.event: charge.count for charge in accountant.history}
    assert found == {sampled(2.0): 5, STEP: 1}


# --- settings -------------------------------------------------------------------------------------


def test_names_that_mean_the_same_file(path, tmp_path, monkeypatch):
    PrivacyAccountant(3.0, DELTA, path=path).compose(STEP, 5).close()
    (tmp_path / "link.db").symlink_to(path)
    assert len(PrivacyAccountant(path=tmp_path / "link.db").compose(STEP)) == 6
    monkeypatch.chdir(tmp_path)
    accountant = PrivacyAccountant(path="budget.db")
    monkeypatch.chdir("/")
    assert accountant.compose(STEP).path == path
    os.link(path, tmp_path / "second.db")
    with pytest.raises(LedgerError, match="hard link"):
        PrivacyAccountant(path=tmp_path / "second.db")


@pytest.mark.parametrize("name", ["budget.db", "a \\040 b.db"])
def test_a_file_that_is_a_mount_point_is_refused(name, tmp_path, monkeypatch):
    """Mounts as a container with one bound file lists them."""
    for each in ("budget.db", "other.db", name):
        PrivacyAccountant(3.0, DELTA, path=tmp_path / each).compose(STEP).close()
    mounts = tmp_path / "mountinfo"
    monkeypatch.setattr(ledger, "_MOUNTS", mounts)
    line = b"36 35 98:0 /host/x.db %b rw,noatime shared:1 - ext4 /dev/root rw\n"
    written = os.fsencode(tmp_path / name).replace(b"\\", b"\\134").replace(b" ", b"\\040")
    mounts.write_bytes(line % b"/" + line % os.fsencode(tmp_path) + line % written)
    for use in (lambda path: PrivacyAccountant(path=path), look_at):
        with pytest.raises(LedgerError, match="mount the folder"):
            use(tmp_path / name)
    assert len(PrivacyAccountant(path=tmp_path / "other.db")) == 1


# --- copies, processes ----------------------------------------------------------------------------


def test_copies_share_the_file(path):
    accountant = PrivacyAccountant(3.0, DELTA, path=path).compose(STEP, 3)
    pickled = pickle.loads(pickle.dumps(accountant))
    for copied in (copy.copy(accountant), copy.deepcopy(accountant), pickled):
        before = len(accountant)
        copied.compose(STEP, 2)
        copied.close()
        assert len(accountant) == before + 2
        assert copied.guarantee == accountant.guarantee == "fixed"  # the same job
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"would spend the same budget.*path="):
            duplicate(PrivacyAccountant(1.0, DELTA))


@pytest.mark.parametrize("same_pid", [False, True])
def test_forked_children_name_path_or_share(same_pid, path, monkeypatch):
    """Also with the pid of their parent: a pid comes again, a session and its block must not."""
    parent = os.getpid()
    memory, file = PrivacyAccountant(3.0, DELTA), PrivacyAccountant(3.0, DELTA, path=path)
    for _ in range(10):
        file.compose(STEP)
        memory.compose(STEP)

    def child():
        if same_pid:
            monkeypatch.setattr(os, "getpid", lambda: parent)
        file.compose(STEP, 7)
        file.close()
        try:
            memory.compose(STEP)
        except RuntimeError as error:
            return 17 if "path=" in str(error) and len(memory) == 10 else 1

    assert in_child(child) == 17
    file.compose(STEP)
    assert len(file) == 18
    file.close()
    assert counted(path) == 18 and file.guarantee == "fixed"


def test_a_child_never_returns_a_block_of_its_parent(path):
    accountant = PrivacyAccountant(3.0, DELTA, path=path).compose(STEP).compose(STEP)
    reserved = counted(path)
    assert reserved > 2
    assert in_child(lambda: accountant.close()) is None
    # to the child the parent's block is spent
    assert in_child(lambda: len(accountant)) == reserved
    assert counted(path) == reserved


# --- saving ---------------------------------------------------------------------------------------


def test_a_state_belongs_to_its_file(path, tmp_path):
    accountant = PrivacyAccountant(3.0, DELTA, path=path)
    for k in range(100):
        accountant.compose(sampled(1 + k / 1000))
    state, history = json.loads(json.dumps(accountant.state_dict())), accountant.history
    for same in (accountant, PrivacyAccountant(path=path)):
        same.load_state_dict(state)
        assert sorted(same.history, key=str) == sorted(history, key=str)
    for other in (None, tmp_path / "other.db"):
        with pytest.raises(ValueError, match="belongs to a ledger"):
            PrivacyAccountant(3.0, DELTA, path=other).load_state_dict(state)
    copied = shutil.copy(path, tmp_path / "backup.db")
    accountant.compose(STEP).close()
    newer = accountant.state_dict()
    shutil.copy(copied, path)
    with pytest.raises(ValueError, match="older copy"):
        PrivacyAccountant(path=path).load_state_dict(newer)
