"""A damaged ledger reads as it was written, or is an error; so is one that cannot be made."""

import contextlib
import os
import random
import resource
import shutil

import pytest
from support.children import in_child
from support.ledgers import DELTA, STEP, counted, edited, sampled

from torch_dpbayes.accounting import PrivacyAccountant, ledger
from torch_dpbayes.accounting.events import GaussianDpEvent
from torch_dpbayes.accounting.ledger import LedgerError

BUDGET = {"epsilon": 3.0, "delta": DELTA, "neighboring": "replace_one"}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Ledgers of every kind, and what they hold."""
    found = {}
    for kind in ("empty", "fixed", "adaptive", "many"):
        path = tmp_path_factory.mktemp("sources") / f"{kind}.db"
        with PrivacyAccountant(path=path, **BUDGET) as accountant:
            if kind == "adaptive":
                accountant.compose(STEP, adaptive=True, label="first")
            for k in range({"empty": 0, "many": 60}.get(kind, 20)):
                accountant.compose(sampled(2 + k / 10), label="even" if k % 2 else None)
                if kind == "fixed" and k < 2:
                    accountant.note(f"the statement number {k}")
        found[kind] = path, told(accountant)
    return found


def told(accountant):
    settings = accountant.epsilon, accountant.delta, accountant.method, accountant.neighboring
    return settings, sorted(accountant.history, key=str), accountant.guarantee


# --- damage ---------------------------------------------------------------------------------------


def damage(rng, path):
    """Bits flipped, a range overwritten, another length, or a page in the place of another."""
    content, what = bytearray(path.read_bytes()), rng.randrange(4)
    start = rng.randrange(1, len(content))
    if what == 0:
        for _ in range(rng.choice([1, 1, 2, 8, 64])):
            place = rng.randrange(len(content) if rng.random() < 0.6 else 200)
            content[place] ^= 1 << rng.randrange(8)
    elif what == 1:
        size = min(rng.choice([1, 4, 16, 100, 1000, 4096]), len(content) - start)
        content[start : start + size] = rng.choice([bytes(size), rng.randbytes(size)])
    elif what == 2 and rng.random() < 0.8:
        del content[start:]
    elif what == 2:
        content += rng.randbytes(rng.randrange(9000))
    else:
        first, second = (4096 * rng.randrange(len(content) // 4096) for _ in range(2))
        content[second : second + 4096] = content[first : first + 4096]
    path.write_bytes(content)
    for end, size in (("-wal", rng.randrange(5000)), ("-shm", 32768)):
        if rng.random() < 0.1:
            path.with_name(path.name + end).write_bytes(rng.randbytes(size))


def charged(path):
    accountant = PrivacyAccountant(path=path, **BUDGET)
    before = told(accountant)
    with contextlib.suppress(RuntimeError):  # which is no LedgerError where a later job is refused
        accountant.compose(GaussianDpEvent(300.0)).close()
    return before


@pytest.mark.parametrize("times", [30, pytest.param(4000, marks=pytest.mark.slow)])
def test_a_damaged_ledger_reads_as_it_was_or_says_so(times, sources, tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "BUSY_SECONDS", 0.2)
    errors = 0
    for k in range(times):
        seed = random.SystemRandom().getrandbits(64)
        rng = random.Random(seed)
        kind = rng.choice(list(sources))
        source, expected = sources[kind]
        path = tmp_path / f"{k}.db"
        shutil.copy(source, path)
        is_open = rng.random() < 0.4
        try:
            if is_open:
                accountant = PrivacyAccountant(path=path, **BUDGET)
                if rng.random() < 0.5:
                    accountant.compose(GaussianDpEvent(300.0)).compose(GaussianDpEvent(300.0))
                expected = told(accountant)
                damage(rng, path)
                use = rng.choice(
                    [told, told, PrivacyAccountant.close, PrivacyAccountant.state_dict]
                )
                found = use(accountant)
                found = found if use is told else expected
            else:
                damage(rng, path)
                found = charged(path)
        except LedgerError:
            errors += 1
        except BaseException as error:
            raise AssertionError(f"seed {seed}, {kind}, open before: {is_open}") from error
        else:
            assert found == expected, f"seed {seed}, {kind}, open before: {is_open}"
        for leftover in tmp_path.glob(f"{k}.db*"):
            leftover.unlink()
    assert errors > times / 30  # about half of them are


EDITS = [
    "UPDATE settings SET value = x'ff' WHERE name = 'epsilon'",
    "UPDATE settings SET value = x'ff' WHERE name = 'id'",
    "UPDATE settings SET value = '30.0' WHERE name = 'epsilon'",
    "UPDATE settings SET value = '\"replace-one\"' WHERE name = 'neighboring'",
    "DELETE FROM settings WHERE name = 'method'",
    "DELETE FROM settings WHERE name = 'seal'",
    "INSERT INTO settings VALUES ('other', '1')",
    "DROP INDEX returned_once",
]
OF_ROWS = [
    "UPDATE rows SET count = 1 WHERE seq = 4",
    "DELETE FROM rows WHERE seq = 4",
    "UPDATE rows SET label = 'nothing' WHERE kind = 'note' AND seq = 2",
    "DELETE FROM rows WHERE kind = 'note' AND seq = 2",
    "UPDATE rows SET label = x'ff' WHERE seq = 6",
    "UPDATE rows SET digest = x'ff' WHERE seq = (SELECT max(seq) FROM rows)",
    "DELETE FROM rows WHERE seq = (SELECT max(seq) FROM rows)",
    "DELETE FROM rows",
]


@pytest.mark.parametrize(
    ("kind", "statement"),
    [("empty", edit) for edit in EDITS] + [("fixed", edit) for edit in EDITS + OF_ROWS],
)
def test_one_edit_is_noticed(kind, statement, sources, path):
    shutil.copy(sources[kind][0], path)
    PrivacyAccountant(path=path, neighboring="replace_one")
    edited(path, statement)
    with pytest.raises(LedgerError):
        PrivacyAccountant(path=path, neighboring="replace_one")
    with pytest.raises(LedgerError):
        PrivacyAccountant(path=path, **BUDGET)


def test_a_block_is_not_returned_to_a_ledger_that_was_damaged_since(path):
    accountant = PrivacyAccountant(path=path, **BUDGET).compose(STEP)
    edited(path, "UPDATE rows SET digest = x'ff' WHERE seq = (SELECT max(seq) FROM rows)")
    with pytest.raises(LedgerError, match="damaged"):
        accountant.close()


# --- making ---------------------------------------------------------------------------------------


def made(path):
    with PrivacyAccountant(path=path, **BUDGET) as accountant:
        accountant.compose(STEP)
    again = told(PrivacyAccountant(path=path, **BUDGET))
    return again[1][0].count == counted(path) == 1 == path.stat().st_nlink


def test_a_ledger_whose_making_met_a_full_disk_can_be_made_again(tmp_path):
    outcomes = set()
    for room in (0, 1, 4095, 4096, 8192, 16384, 30_000, 100_000):
        path = tmp_path / f"{room}.db"

        def child(path=path, room=room):
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
            try:
                PrivacyAccountant(path=path, **BUDGET)
            except LedgerError:
                return 17

        outcomes.add((in_child(child), path.exists()))
        assert made(path)
    assert outcomes == {(17, False), (None, True)}


@pytest.mark.parametrize("content", [0, 4096])
def test_an_empty_file_is_not_begun_anew(content, path):
    """A first page without tables is also what is left of a database whose ``-wal`` was lost."""
    edited(path, "PRAGMA journal_mode = WAL")
    os.truncate(path, content)
    with pytest.raises(LedgerError, match="is empty"):
        PrivacyAccountant(path=path, **BUDGET)
    assert path.stat().st_size == content


def test_the_name_that_a_killed_maker_left_is_taken_away(path):
    PrivacyAccountant(path=path, **BUDGET)
    left = path.with_name("budget.db-making-x")
    os.link(path, left)
    PrivacyAccountant(path=path, **BUDGET).compose(STEP).close()
    assert counted(path) == 1 and not left.exists()


def test_of_two_that_make_a_ledger_one_is_kept(path, monkeypatch):
    """The other one appears when this one is ready."""
    link = os.link

    def late(made, name):
        monkeypatch.setattr(os, "link", link)
        PrivacyAccountant(path=path, **BUDGET).compose(STEP).close()
        link(made, name)

    monkeypatch.setattr(os, "link", late)
    assert len(PrivacyAccountant(path=path, **BUDGET).compose(STEP)) == 2
