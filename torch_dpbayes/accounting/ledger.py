"""A history that outlives its process: one SQLite file that many processes charge.

The file only grows. A row is a charge, a *block* (releases that one process reserves in advance;
all other processes count them as spent), the *return* of the unused rest of a block, or a note.
Rows are numbered without gaps. Each row has a digest of itself and of the row before; the first row
has one of itself and the settings. The *seal* repeats the last digest. So changed, lost and older
rows are detected.

A connection is open for one transaction only, and a fork waits until it is closed. So no child
inherits a connection, and no process writes into a file that was deleted or replaced.
:mod:`session` is the view of one process on a ledger.

Why charges never exceed the budget:

* *Processes.* A block is committed in an exclusive transaction, and only if the file has no row
  that the decision did not see (``Ledger.append``). Blocks of others count in full.
* *Threads.* Only one thread charges or reads at a time (``LOCK``).
* *Forks.* A fork waits for the lock. A session belongs to one process: a child starts a new session
  from the file, and owns no block (``Session.begun_anew``).
* *Crashes.* Each release is taken from a block that is already on disk (``synchronous = FULL``).
  Releases that nobody returns stay charged.
* *Interruptions.* While memory and file may differ, a session is ``stale``, and the next call
  starts a new session. A unique index ensures that a block is returned only once.
* *Copies of an accountant* contain the path and the file's identity, and no block. Two accountants
  that one process opens share no block either.
* *Copies of the file.* Each access checks the file's identity and the digest of the row that was
  read last.
* *Two names.* Hard links, and files that are mount points, are refused: SQLite has a journal for
  each name.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sqlite3
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from glob import escape
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args
from urllib.parse import quote

from ..errors import ArgumentError, DPBayesError
from . import events
from .events import DpEvent
from .history import Flag, Key, Settings

BUSY_SECONDS = 60.0
_MAKING = "-making-"
_MOUNTS = Path("/proc/self/mountinfo")
FORMAT = 5
APPLICATION = 0x64706279
SEAL = "seal"  # the last row's digest, repeated among the settings

Kind = Literal["charge", "block", "return", "note"]
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

# Held during each charge, reading and fork. A child must not start in the middle of a change; and
# SQLite stores locks in the memory of the process, so a child would inherit the locks of a
# connection that it does not have.
LOCK = threading.RLock()
if hasattr(os, "register_at_fork"):  # missing on systems without fork
    os.register_at_fork(
        before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release
    )

T = TypeVar("T")
_log = logging.getLogger("torch_dpbayes")


# --- errors ---------------------------------------------------------------------------------------


class LedgerError(DPBayesError, RuntimeError):
    """The ledger could not be read or written. Nothing may be released."""

    code = "ledger"


def replaced(path: Path) -> LedgerError:
    """The error if the opened file was replaced by another one."""
    return LedgerError(
        f"{path} was replaced by another ledger after it was opened. Nothing is released. Put the"
        " right file back."
    )


def damaged(path: Path, what: str) -> LedgerError:
    """The error if the file is not as it was written."""
    return LedgerError(
        f"the ledger {path} is damaged ({what}). Its charges are unknown, so nothing is released."
        " Restore the newest backup only if nothing was charged after it; otherwise consider the"
        " budget spent."
    )


def of_another_version(path: Path, error: Exception) -> LedgerError:
    """The error if another version wrote the file."""
    return LedgerError(
        f"the ledger {path} has content that this torch_dpbayes does not know ({error!r:.80}):"
        " another version wrote it. Use that version; nothing was changed."
    )


_NONE = "Nothing may be released"
_EXPLAINED = {
    sqlite3.SQLITE_FULL: f"cannot grow: the disk is full. {_NONE}; free some space, then continue",
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
        "was locked by other processes for {seconds:g} s. Nothing was recorded: release nothing"
        " new, and try again"
    ),
}
_EXPLAINED[sqlite3.SQLITE_LOCKED] = _EXPLAINED[sqlite3.SQLITE_BUSY]
_EXPLAINED[sqlite3.SQLITE_PERM] = _EXPLAINED[sqlite3.SQLITE_READONLY]


def explained(path: Path, error: sqlite3.Error | UnicodeDecodeError) -> LedgerError:
    """The ledger error for an SQLite error."""
    what = _EXPLAINED.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)
    if what is None:
        return damaged(path, str(error))
    why = "check the permissions: the file and its folder must be writable"
    why = why if path.is_file() else "it is not a file" if path.exists() else "it is gone"
    return LedgerError(
        f"the ledger {path} {what.format(error=error, why=why, seconds=BUSY_SECONDS)}."
    )


# --- digests --------------------------------------------------------------------------------------


def first_digest(settings: Mapping[str, Any]) -> str:
    """The digest of the settings, which precedes the first row."""
    return _hashed(json.dumps(dict(settings), sort_keys=True))


def next_digest(before: str, values: list[Any]) -> str:
    """The digest of a row; ``before``: that of the row before it."""
    return _hashed(before + json.dumps(values, default=repr))  # repr: damaged files may hold bytes


def _hashed(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def now() -> str:
    """The time as text, for humans: nothing is ordered by it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


# --- rows -----------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One row. ``label``: in a note, its text. ``block``: in a return, the number of the block's
    row. ``job``: empty in a row that is not written yet and belongs to the writing job.
    """

    kind: Kind
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
        is_known = kind in get_args(Kind) and flag in get_args(Flag)
        if not is_known or (event is None) != (kind == "note"):
            raise ArgumentError(f"{kind}, {flag}")
        return cls(kind, label, event, count, flag, block, job, seq, time, writer)

    def encoded(self, seq: int, time: str, job: str, writer: str) -> list[Any]:
        """The columns of this row, as number ``seq``."""
        code = "" if self.event is None else json.dumps(events.encode(self.event))
        columns = [self.kind, self.label, code, self.count, self.flag, self.block]
        return [seq, time, self.job or job, writer, *columns]


def open_blocks(rows: Iterable[Row]) -> list[Row]:
    """The blocks that were not returned: those of running processes, and of killed ones."""
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
    """The settings that the file at ``path`` was made with, checked against its first row."""
    connection.execute("BEGIN")  # one transaction: settings, seal and first row are consistent
    if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        raise LedgerError(
            f"{path} is empty. If it was a ledger, its charges are lost (a full disk?), and a new"
            " one would spend the budget twice: restore it. If it never was a ledger, remove it."
        )
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION:
        raise LedgerError(
            f"{path} is an SQLite file, but not a ledger of torch_dpbayes. Give another path."
        )
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version != FORMAT:
        raise LedgerError(
            f"the ledger {path} has format {version}, but this torch_dpbayes reads format"
            f" {FORMAT}. Use the version that wrote it; nothing was changed."
        )
    (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise damaged(path, verdict)
    made = {sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master")}
    if not made.issuperset(TABLES):
        raise damaged(path, "its tables are not the original ones")
    try:
        saved = dict(connection.execute("SELECT name, value FROM settings").fetchall())
        expected = saved.pop(SEAL)
        found = {name: json.loads(value) for name, value in saved.items()}
        digest = first_digest(found)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise damaged(path, f"its settings were changed: {error!r}") from error
    first = connection.execute(f"SELECT {COLUMNS}, digest FROM rows WHERE seq = 1").fetchone()
    if first is not None:
        digest, expected = next_digest(digest, list(first[:-1])), first[-1]
    if digest != expected:
        raise damaged(path, "its settings or its first row were changed")
    return found


def seal_of_same_file(connection: sqlite3.Connection, path: Path, identity: str) -> Any:
    """The seal of the file; raises if the file has another identity."""
    wanted = "SELECT name, value FROM settings WHERE name IN ('id', ?)"
    found = dict(connection.execute(wanted, (SEAL,)).fetchall())
    if found.get("id") != json.dumps(identity):
        raise replaced(path)
    return found.get(SEAL)


# --- the file -------------------------------------------------------------------------------------


class Ledger:
    """The file: settings fixed at creation, and rows.

    Args:
        settings: the expected settings. ``None``: the value of the file is used.
        create: make the file with these settings if there is none.
        read_only: never write, not even SQLite's files beside the ledger.

    Raises:
        ArgumentError: the file has other settings.
        LedgerError: the file is not a ledger, is damaged, or cannot be used.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        settings: Mapping[str, Any],
        *,
        create: bool = False,
        read_only: bool = False,
    ) -> None:
        self.path = _plain_path(path)
        self._is_read_only, self._is_checked = read_only, False
        if create:
            self._make_if_missing(settings)
        found = self._connected("read", lambda connection: read_settings(connection, self.path))
        try:
            if unknown := found.keys() - {*Settings._fields, "id", "created"}:
                raise ArgumentError(f"{unknown}")
            self.id = str(found["id"])
            self.settings = Settings.checked(*(found[name] for name in Settings._fields))
        except (DPBayesError, KeyError) as error:
            raise of_another_version(self.path, error) from error
        self._before = first_digest(found)  # the digest before the first row
        self._version, self._digest = 0, self._before  # number and digest of the last row read
        if settings.get("id", self.id) != self.id:
            raise replaced(self.path)
        for name, value in settings.items():
            if value is not None and found[name] != value:
                raise ArgumentError(
                    f"the ledger {self.path} was made with {name} = {found[name]!r}, not"
                    f" {value!r}. Settings of a ledger cannot change: open it with its own"
                    " settings, or make another file."
                )

    # --- connections ------------------------------------------------------------------------------

    def _connected(
        self,
        purpose: Literal["create", "read", "write"],
        work: Callable[[sqlite3.Connection], T],
        path: Path | None = None,
    ) -> T:
        """The result of ``work`` with a new connection to the ledger or to ``path``. (This is not a
        context manager, because Ctrl-C in ``__exit__`` could leave the connection open.)
        """
        connection: sqlite3.Connection | None = None
        mode = {"create": "rwc", "read": "ro" if self._is_read_only else "rw", "write": "rw"}
        with LOCK:
            try:
                connection = self._connect(path or self.path, mode[purpose])
                if purpose != "read":
                    connection.execute("PRAGMA synchronous = FULL")
                return work(connection)
            # UnicodeDecodeError: sqlite3 quotes damaged text in its message
            except (sqlite3.Error, UnicodeDecodeError) as error:
                raise explained(self.path, error) from error
            finally:
                if connection is not None:
                    connection.close()

    def _connect(self, path: Path, mode: str) -> sqlite3.Connection:
        if self.path.is_file():
            self._require_one_name()
        address = f"file:{quote(str(path))}?mode={mode}"
        journal = Path(f"{path}-wal")
        writable = os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)
        if mode == "ro" and not writable and not (journal.exists() and journal.stat().st_size):
            # otherwise SQLite makes an index file here. That may fail, and the ledger's owner could
            # not write to it.
            address += "&immutable=1"
        return sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS, isolation_level=None)

    def _require_one_name(self) -> None:
        """Raise if the file has another name."""
        if self.path.stat().st_nlink > 1:
            for other in self.path.parent.glob(f"{escape(self.path.name)}{_MAKING}*"):
                with suppress(OSError):  # if this fails, the process that made it removes it
                    if other.samefile(self.path):  # the file was just made
                        other.unlink(missing_ok=True)
        if self.path.stat().st_nlink > 1:
            raise LedgerError(
                f"{self.path} has a second name (a hard link). SQLite has a journal for each name,"
                " so charges under one are invisible under the other. Remove one of the names."
            )
        if not self._is_checked and _is_mounted(self.path):
            raise LedgerError(
                f"{self.path} is a mount point, such as a single file mounted into a container."
                " SQLite has a journal for each name, so charges under another name are invisible"
                " here. Release nothing; mount the folder."
            )
        self._is_checked = True

    # --- rows -------------------------------------------------------------------------------------

    def read(self) -> list[Row]:
        """The rows that were added since the last call."""

        def select(connection: sqlite3.Connection) -> tuple[list[tuple[Any, ...]], Any]:
            connection.execute("BEGIN")  # one transaction: rows and seal are consistent
            seal = seal_of_same_file(connection, self.path, self.id)
            rows = f"SELECT {COLUMNS}, digest FROM rows WHERE seq >= ? ORDER BY seq"
            return connection.execute(rows, (self._version or 1,)).fetchall(), seal

        rows, seal = self._connected("read", select)
        if self._version and (not rows or rows.pop(0)[-1] != self._digest):
            raise LedgerError(
                f"the ledger {self.path} no longer contains the rows that this process read: a"
                " copy or a backup replaced it. Nothing is released: put the newer file back."
            )
        found, last = [], self._digest
        for number, (*values, digest) in enumerate(rows, self._version + 1):
            last = next_digest(last, values)
            if values[0] != number or digest != last:
                raise damaged(self.path, f"row {values[0]} was changed")
            try:
                found.append(Row.decoded(values))
            except (DPBayesError, TypeError, ValueError) as error:
                raise of_another_version(self.path, error) from error
        if seal != last:
            raise damaged(self.path, f"its seal is not that of row {self._version + len(found)}")
        self._version, self._digest = self._version + len(found), last
        return found

    def append(
        self, rows: Iterable[Row], *, job: str, writer: str, if_unchanged: bool = True
    ) -> list[int] | None:
        """Commits the rows and returns their numbers; ``None`` if ``if_unchanged`` and the file has
        rows that were not read yet. After an error it is unknown whether the rows are on disk.
        """

        def insert(connection: sqlite3.Connection) -> tuple[list[int], str, bool] | None:
            connection.execute("BEGIN IMMEDIATE")
            seal = seal_of_same_file(connection, self.path, self.id)
            last = "SELECT seq, digest FROM rows ORDER BY seq DESC LIMIT 1"
            seq, digest = connection.execute(last).fetchone() or (0, self._before)
            if not (isinstance(seq, int) and isinstance(digest, str)) or digest != seal:
                raise damaged(self.path, f"its seal does not match row {seq}")
            unchanged = (seq, digest) == (self._version, self._digest)
            if if_unchanged and not unchanged:
                connection.execute("ROLLBACK")
                return None
            moment, first = now(), seq + 1
            for row in rows:
                seq += 1
                values = row.encoded(seq, moment, job, writer)
                digest = next_digest(digest, values)
                connection.execute(
                    f"INSERT INTO rows ({COLUMNS}, digest) VALUES ({', '.join('?' * 11)})",
                    [*values, digest],
                )
            connection.execute("UPDATE settings SET value = ? WHERE name = ?", (digest, SEAL))
            connection.execute("COMMIT")
            return list(range(first, seq + 1)), digest, unchanged

        written = self._connected("write", insert)
        if written is None:
            return None
        numbers, digest, unchanged = written
        if unchanged and numbers:
            self._version, self._digest = numbers[-1], digest
        return numbers

    @property
    def place(self) -> list[Any]:
        """Number and digest of the last row read; the digest depends on all rows before it."""
        return [self._version, self._digest]

    def holds(self, place: list[Any]) -> bool:
        """Whether the file contains this row; a file restored from an older copy may not."""
        number, digest = place

        def select(connection: sqlite3.Connection) -> Any:
            row = "SELECT digest FROM rows WHERE seq = ?"
            return connection.execute(row, (number,)).fetchone()

        found = self._connected("read", select) if number else (self._before,)
        return found is not None and bool(found[0] == digest)

    # --- making -----------------------------------------------------------------------------------

    def _make_if_missing(self, settings: Mapping[str, Any]) -> None:
        """Makes the file with these settings if there is none. It is completed under a temporary
        name and then linked to its own name, so there is never an incomplete ledger.
        """
        if self.path.exists():
            return
        if not self.path.parent.is_dir():
            raise LedgerError(
                f"there is no folder {self.path.parent} for the ledger {self.path.name}: make it"
                " first."
            )
        made = Path(f"{self.path}{_MAKING}{uuid.uuid4().hex}")
        values = {**settings, "id": uuid.uuid4().hex, "created": now()}
        try:
            self._connected("create", lambda connection: make_tables(connection, values), made)
            os.link(made, self.path)
            if settings["epsilon"] is None:
                _log.warning("%s is new and has no budget: every charge fits", self.path)
        except FileExistsError:  # another process was faster
            pass
        except OSError as error:
            raise LedgerError(
                f"the ledger {self.path} cannot be made: {error}. Nothing may be released; a file"
                " system without hard links cannot hold one."
            ) from error
        finally:
            for end in ("", "-wal", "-shm"):
                Path(f"{made}{end}").unlink(missing_ok=True)


def _is_mounted(path: Path) -> bool:
    """Whether a file is a mount point: on another device than its folder, or a listed mount."""
    if path.stat().st_dev != path.parent.stat().st_dev:
        return True
    try:
        mounts = _MOUNTS.read_bytes().splitlines()
    except OSError:
        return False
    name = os.fsencode(path)
    for special in b"\\ \t\n":  # octal numbers in the list of mounts
        name = name.replace(bytes([special]), b"\\%03o" % special)
    return any(fields[4] == name for fields in map(bytes.split, mounts) if len(fields) > 4)


def _plain_path(path: str | os.PathLike[str]) -> Path:
    text = os.fspath(path)
    plain = isinstance(text, str) and text and "\0" not in text
    if not plain or text.startswith((":memory:", "file:")):
        raise ArgumentError(
            f"path must be the path of a file on a local disk, got {text!r}. Without path= the"
            " history is kept in memory."
        )
    return Path(os.path.realpath(os.path.expanduser(text)))
