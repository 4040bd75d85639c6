"""What a ledger file holds: its tables, its settings, its rows, and the digests that chain them."""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ...errors import DPBayesError
from .. import events
from ..events import DpEvent, accounting_method, neighboring_relation, privacy_unit
from ..history import Flag, Key

FORMAT = 3
APPLICATION = 0x64706279
SEAL = "seal"  # the last row's digest, repeated among the settings

COLUMNS = "seq, time, job, writer, later, kind, label, event, count, flag, block"
TABLES = (
    "CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    (
        "CREATE TABLE rows (seq INTEGER PRIMARY KEY, time TEXT NOT NULL, job TEXT NOT NULL, writer"
        " TEXT NOT NULL, later INTEGER NOT NULL, kind TEXT NOT NULL, label TEXT, event TEXT NOT"
        " NULL, count INTEGER NOT NULL, flag TEXT NOT NULL, block INTEGER NOT NULL, digest TEXT NOT"
        " NULL)"
    ),
    "CREATE UNIQUE INDEX returned_once ON rows (block) WHERE kind = 'return'",
    (
        "CREATE TABLE notes (seq INTEGER PRIMARY KEY, time TEXT NOT NULL, job TEXT NOT NULL, text"
        " TEXT NOT NULL, digest TEXT NOT NULL)"
    ),
)

Kind = Literal["charge", "block", "return", "filter"]
CHARGING = ("charge", "block", "return")


# --- errors ---------------------------------------------------------------------------------------


class LedgerError(DPBayesError, RuntimeError):
    """The ledger could not be read or written. Nothing may be released."""

    code = "ledger"


def replaced(path: Path) -> LedgerError:
    """Another file has taken the place of the one that was opened."""
    return LedgerError(
        f"{path} is another ledger than the one that was opened: it was replaced. Nothing is"
        " released. Put the right one back."
    )


def damaged(path: Path, what: str) -> LedgerError:
    """The file is not what was written."""
    return LedgerError(
        f"the ledger {path} is damaged ({what}). What was charged cannot be known, so nothing is"
        " released. Restore the newest backup only if nothing was charged after it; otherwise take"
        " the budget as spent."
    )


def is_busy(error: LedgerError) -> bool:
    """Whether SQLite said that another process has the file."""
    code: int = getattr(error.__cause__, "sqlite_errorcode", 0) & 0xFF
    return code == sqlite3.SQLITE_BUSY


def explained(
    path: Path, error: sqlite3.Error | UnicodeDecodeError, busy_seconds: float
) -> LedgerError:
    """An error of SQLite in words, and what to do."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        what = (
            f"was kept busy by other processes for {busy_seconds:g} s. Nothing was recorded;"
            " release nothing, and try again"
        )
    elif code == sqlite3.SQLITE_FULL:
        what = "cannot grow: the disk is full. Nothing may be released; make room, then go on"
    elif code == sqlite3.SQLITE_IOERR:
        what = (
            f"cannot be read or written ({error}): is the disk full, or a size limit reached?"
            " Nothing may be released"
        )
    elif code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        what = (
            "cannot be written: the file or its folder is read-only. Charging needs write access to"
            " both. Nothing may be released"
        )
    elif code == sqlite3.SQLITE_CANTOPEN:
        why = "check the permissions of the file and of its folder, which both must be writable"
        why = why if path.is_file() else "it is no file" if path.exists() else "it is gone"
        what = f"cannot be opened: {why}. Nothing may be released"
    elif code == sqlite3.SQLITE_CONSTRAINT:
        what = f"refused a row ({error}). Nothing may be released"
    else:
        return damaged(path, str(error))
    return LedgerError(f"the ledger {path} {what}.")


# --- digests --------------------------------------------------------------------------------------


def first_digest(settings: Mapping[str, Any]) -> str:
    """The digest before the first row."""
    return _hashed(json.dumps(dict(settings), sort_keys=True))


def next_digest(before: str, values: list[Any]) -> str:
    """The digest of a row or a note after the one with the digest ``before``."""
    return _hashed(before + json.dumps(values, default=repr))  # bytes, which are never written


def _hashed(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def now() -> str:
    """The moment, for people: nothing is ordered by it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


# --- rows -----------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One row. ``block``: the number of the row that a return belongs to."""

    seq: int
    time: str
    job: str
    writer: str
    later: bool
    kind: Kind
    label: str | None
    event: DpEvent | None
    count: int  # type: ignore[assignment]
    flag: Flag
    block: int

    @property
    def key(self) -> Key:
        assert self.event is not None
        return self.event, self.label, self.flag

    @classmethod
    def decoded(cls, values: list[Any]) -> Row:
        """The row with these columns."""
        seq, moment, job, writer, later, kind, label, code, count, flag, block = values
        event = events.decode(json.loads(code)) if code else None
        return cls(seq, moment, job, writer, bool(later), kind, label, event, count, flag, block)


class Entry(NamedTuple):
    """What is to become a row."""

    kind: Kind
    label: str | None
    event: DpEvent | None
    count: int  # type: ignore[assignment]
    flag: Flag
    block: int = 0
    job: str = ""  # whose it is; empty: of the job that writes it

    def encoded(self, seq: int, moment: str, job: str, writer: str, later: bool) -> list[Any]:
        """The columns of the row with number ``seq``."""
        code = "" if self.event is None else json.dumps(events.encode(self.event))
        row = [self.kind, self.label, code, self.count, self.flag, self.block]
        return [seq, moment, self.job or job, writer, int(later), *row]


def open_blocks(rows: Iterable[Row]) -> list[Row]:
    """The blocks that were not returned: of running processes, or of some that died."""
    found: dict[int, Row] = {}
    for row in rows:
        if row.kind == "block":
            found[row.seq] = row
        elif row.kind == "return":
            found.pop(row.block, None)
    return list(found.values())


def charges(rows: Iterable[Row]) -> Counter[DpEvent]:
    """How often these rows charge each event."""
    found: Counter[DpEvent] = Counter()
    for row in rows:
        if row.event is not None and row.kind in CHARGING:
            found[row.event] += row.count
    return found


# --- settings -------------------------------------------------------------------------------------


def read_settings(connection: sqlite3.Connection, path: Path) -> dict[str, Any]:
    """The settings that the file at ``path`` was made with, checked against its first row.

    Raises:
        LedgerError: it is not a ledger, or is damaged.
    """
    connection.execute("BEGIN")  # settings, seal and first row of one moment
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION:
        raise LedgerError(
            f"{path} is an SQLite file, but not a ledger of torch_dpbayes. Give another path."
        )
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version != FORMAT:
        raise LedgerError(
            f"the ledger {path} has format {version}, this torch_dpbayes reads format"
            f" {FORMAT}. Use the version that wrote it; nothing was changed."
        )
    (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise damaged(path, verdict)
    if not {sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master")}.issuperset(
        TABLES
    ):
        raise damaged(path, "its tables are not those that were made")
    try:
        saved = dict(connection.execute("SELECT name, value FROM settings").fetchall())
        expected = saved.pop(SEAL)
        found = _decoded(saved)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise damaged(path, f"its settings are not what was written: {error!r}") from error
    digest = first_digest(found)
    first = connection.execute(f"SELECT {COLUMNS}, digest FROM rows WHERE seq = 1").fetchone()
    if first is not None:
        digest, expected = next_digest(digest, list(first[:-1])), first[-1]
    if digest != expected:
        raise damaged(path, "its settings or its first row are not what was written")
    return found


def seal_of_same_file(connection: sqlite3.Connection, path: Path, identity: str) -> Any:
    """The seal.

    Raises:
        LedgerError: the file is not the one with this identity.
    """
    wanted = "SELECT name, value FROM settings WHERE name IN ('id', ?)"
    found = dict(connection.execute(wanted, (SEAL,)).fetchall())
    if found.get("id") != json.dumps(identity):
        raise replaced(path)
    return found.get(SEAL)


def _decoded(saved: Mapping[Any, Any]) -> dict[str, Any]:
    """Settings that were read from a file.

    Raises:
        TypeError, ValueError: a ledger is not made with these.
    """
    found = {name: json.loads(value) for name, value in saved.items()}
    if set(found) != {"epsilon", "delta", "method", "neighboring", "unit", "id", "created"}:
        raise ValueError(f"they are {sorted(map(str, found))}")
    accounting_method(found["method"])
    neighboring_relation(found["neighboring"])
    privacy_unit(found["unit"])
    epsilon, delta = found["epsilon"], found["delta"]
    for number, largest in ((epsilon, math.inf), (delta, 1)):
        if number is not None and not (isinstance(number, float) and 0 < number < largest):
            raise ValueError(f"epsilon = {epsilon!r}, delta = {delta!r}")
    if not isinstance(found["id"], str) or (epsilon is not None and delta is None):
        raise ValueError(f"epsilon = {epsilon!r}, delta = {delta!r}, id = {found['id']!r}")
    return found
