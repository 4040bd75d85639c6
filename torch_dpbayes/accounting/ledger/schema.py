"""What a ledger file holds: its tables, its settings, its rows, and the digests that chain them."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ...errors import DPBayesError
from .. import events
from ..events import DpEvent
from ..history import Flag, Key

FORMAT = 5
APPLICATION = 0x64706279
SEAL = "seal"  # the last row's digest, repeated among the settings

COLUMNS = "seq, time, job, writer, kind, label, event, count, flag, block"
TABLES = (
    "CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    (
        "CREATE TABLE rows (seq INTEGER PRIMARY KEY, time TEXT NOT NULL, job TEXT NOT NULL, writer"
        " TEXT NOT NULL, kind TEXT NOT NULL, label TEXT, event TEXT NOT NULL, count INTEGER NOT"
        " NULL, flag TEXT NOT NULL, block INTEGER NOT NULL, digest TEXT NOT NULL)"
    ),
    "CREATE UNIQUE INDEX returned_once ON rows (block) WHERE kind = 'return'",
)


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


_NONE = "Nothing may be released"
_EXPLAINED = {
    sqlite3.SQLITE_FULL: f"cannot grow: the disk is full. {_NONE}; make room, then go on",
    sqlite3.SQLITE_IOERR: (
        f"cannot be read or written ({{error}}): is the disk full, or a size limit reached? {_NONE}"
    ),
    sqlite3.SQLITE_READONLY: (
        "cannot be written: the file or its folder is read-only. Charging needs write access to"
        f" both. {_NONE}"
    ),
    sqlite3.SQLITE_CANTOPEN: f"cannot be opened: {{why}}. {_NONE}",
    sqlite3.SQLITE_CONSTRAINT: f"refused a row ({{error}}). {_NONE}",
    sqlite3.SQLITE_BUSY: (
        "was kept busy by other processes for {seconds:g} s. Nothing was recorded; release nothing,"
        " and try again"
    ),
}
_EXPLAINED[sqlite3.SQLITE_LOCKED] = _EXPLAINED[sqlite3.SQLITE_BUSY]
_EXPLAINED[sqlite3.SQLITE_PERM] = _EXPLAINED[sqlite3.SQLITE_READONLY]


def code_of(error: BaseException | None) -> int:
    """The code of SQLite's error, or 0."""
    code: int = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code


def explained(path: Path, error: sqlite3.Error | UnicodeDecodeError, seconds: float) -> LedgerError:
    """An error of SQLite, after so many seconds of waiting, in words."""
    what = _EXPLAINED.get(code_of(error))
    if what is None:
        return damaged(path, str(error))
    why = "check the permissions of the file and of its folder, which both must be writable"
    why = why if path.is_file() else "it is no file" if path.exists() else "it is gone"
    return LedgerError(f"the ledger {path} {what.format(error=error, why=why, seconds=seconds)}.")


# --- digests --------------------------------------------------------------------------------------


def first_digest(settings: Mapping[str, Any]) -> str:
    """The digest before the first row."""
    return _hashed(json.dumps(dict(settings), sort_keys=True))


def next_digest(before: str, values: list[Any]) -> str:
    """The digest of a row after the one with the digest ``before``."""
    return _hashed(before + json.dumps(values, default=repr))  # bytes, which are never written


def _hashed(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def now() -> str:
    """The moment, for reading: nothing is ordered by it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


# --- rows -----------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One row. ``label``: also the text of a note. ``block``: the number of the row that a return
    belongs to. ``job``: whose it is; empty in one that is not written yet: of the job that writes
    it.
    """

    kind: Literal["charge", "block", "return", "note"]
    label: str | None
    event: DpEvent | None
    count: int  # type: ignore[assignment]
    flag: Flag
    block: int = 0
    job: str = ""
    seq: int = 0
    time: str = ""
    writer: str = ""

    @property
    def key(self) -> Key:
        assert self.event is not None
        return Key(self.event, self.label, self.flag, self.job)

    @classmethod
    def decoded(cls, values: list[Any]) -> Row:
        """The row with these columns."""
        seq, time, job, writer, kind, label, code, count, flag, block = values
        event = events.decode(json.loads(code)) if code else None
        return cls(kind, label, event, count, flag, block, job, seq, time, writer)

    def encoded(self, seq: int, time: str, job: str, writer: str) -> list[Any]:
        """The columns of this row, as number ``seq``."""
        code = "" if self.event is None else json.dumps(events.encode(self.event))
        columns = [self.kind, self.label, code, self.count, self.flag, self.block]
        return [seq, time, self.job or job, writer, *columns]


def open_blocks(rows: Iterable[Row]) -> list[Row]:
    """The blocks that were not returned: of running processes, or of some that died."""
    found: dict[int, Row] = {}
    for row in rows:
        if row.kind == "block":
            found[row.seq] = row
        elif row.kind == "return":
            found.pop(row.block, None)
    return list(found.values())


# --- settings -------------------------------------------------------------------------------------


def make_tables(connection: sqlite3.Connection, settings: Mapping[str, Any]) -> None:
    """Makes an empty ledger with these settings."""
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(f"PRAGMA application_id = {APPLICATION}")
    connection.execute(f"PRAGMA user_version = {FORMAT}")
    for table in TABLES:
        connection.execute(table)
    values = [(name, json.dumps(value)) for name, value in settings.items()]
    values.append((SEAL, first_digest(settings)))
    connection.executemany("INSERT INTO settings VALUES (?, ?)", values)
    connection.execute("COMMIT")


def read_settings(connection: sqlite3.Connection, path: Path) -> dict[str, Any]:
    """The settings that the file at ``path`` was made with, checked against its first row.

    Raises:
        LedgerError: it is not a ledger, or is damaged.
    """
    connection.execute("BEGIN")  # settings, seal and first row of one moment
    if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        raise LedgerError(
            f"{path} is empty. If it was a ledger, what was charged is lost (a full disk?), and"
            " beginning anew would spend the budget twice: restore it. If it never was one, remove"
            " it."
        )
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
    made = {sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master")}
    if not made.issuperset(TABLES):
        raise damaged(path, "its tables are not those that were made")
    try:
        saved = dict(connection.execute("SELECT name, value FROM settings").fetchall())
        expected = saved.pop(SEAL)
        found = {name: json.loads(value) for name, value in saved.items()}
        digest = first_digest(found)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise damaged(path, f"its settings are not what was written: {error!r}") from error
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
