"""The SQLite file: opened once for each transaction, made once, read and appended to.

A connection lives as long as one transaction, and a fork waits for its end. So no connection is
inherited by a child, or writes into a file that was deleted or replaced.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import quote

from ...errors import ArgumentError
from ..events import DpEvent
from .schema import (
    APPLICATION,
    CHARGING,
    COLUMNS,
    FORMAT,
    SEAL,
    TABLES,
    Entry,
    LedgerError,
    Row,
    charges,
    damaged,
    explained,
    first_digest,
    is_busy,
    next_digest,
    now,
    open_blocks,
    read_settings,
    replaced,
    seal_of_same_file,
)

BUSY_SECONDS = 60.0
MAKING_SECONDS = 10.0
_MOUNTS = Path("/proc/self/mountinfo")

# Held by whoever charges or reads, and by whoever forks: a child must not begin in the middle of a
# change, and SQLite keeps a process' locks in its memory, where a child would find those of a
# connection that it does not have.
LOCK = threading.RLock()
_being_written: set[str] = set()  # names, whose hash no signal handler can interrupt
if hasattr(os, "register_at_fork"):  # else there is no fork
    os.register_at_fork(
        before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release
    )

T = TypeVar("T")


class Database:
    """Opens one file.

    Args:
        path: a plain path on a local disk.
        read_only: never write, not even what SQLite keeps beside the file.
    """

    def __init__(self, path: str | os.PathLike[str], *, read_only: bool = False) -> None:
        self.path = _plain_path(path)
        self.read_only = read_only
        self._is_checked = False

    def connected(
        self, purpose: Literal["create", "read", "write"], work: Callable[[sqlite3.Connection], T]
    ) -> T:
        """What ``work`` does with a connection of its own. (Not a context manager, in whose
        ``__exit__`` Ctrl-C could leave it open.)

        Raises:
            LedgerError: SQLite cannot do it; in words.
        """
        connection: sqlite3.Connection | None = None
        mode, name = (
            "rwc" if purpose == "create" else "ro" if self.read_only else "rw",
            str(self.path),
        )
        with LOCK:
            if purpose != "read" and name in _being_written:
                raise LedgerError(
                    f"the ledger {self.path} is being written by this very thread: what runs now,"
                    " in a signal handler or in garbage collection, came in the middle of it."
                    " Nothing was recorded; release nothing."
                )
            try:
                connection = self._connect(mode)
                if purpose != "read":
                    _being_written.add(name)
                    connection.execute("PRAGMA synchronous = FULL")
                return work(connection)
            # the latter where a damaged text is quoted in the former
            except (sqlite3.Error, UnicodeDecodeError) as error:
                raise explained(self.path, error, BUSY_SECONDS) from error
            finally:
                try:
                    if connection is not None:
                        connection.close()
                finally:
                    if purpose != "read":
                        _being_written.discard(name)

    def _connect(self, mode: str) -> sqlite3.Connection:
        if self.path.is_file():
            self.require_one_name()
        address = f"file:{quote(str(self.path))}?mode={mode}"
        journal = Path(f"{self.path}-wal")
        writable = os.access(self.path, os.W_OK) and os.access(self.path.parent, os.W_OK)
        if mode == "ro" and not writable and not (journal.exists() and journal.stat().st_size):
            # else SQLite would keep an index beside the file, which cannot be made, or could not be
            # written by its owner
            address += "&immutable=1"
        return sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS, isolation_level=None)

    def require_one_name(self) -> None:
        """Raise where the file can be opened under another name.

        SQLite keeps a journal for each name, so charges under one would be invisible under the
        other, and the file would be damaged.
        """
        if self.path.stat().st_nlink > 1:
            raise LedgerError(
                f"{self.path} has a second name (a hard link). SQLite keeps a journal for each"
                " name, so that charges under one would be invisible under the other. Remove one"
                " of the names."
            )
        if not self._is_checked and _is_mounted(self.path):
            raise LedgerError(
                f"{self.path} is itself a mount point, as one file bound into a container is."
                " SQLite keeps a journal for each name, so charges under another would be"
                " invisible here. Release nothing; mount the folder."
            )
        self._is_checked = True


def _is_mounted(path: Path) -> bool:
    """Whether a file is a mount point of its own. Where the system lists no mounts, only a file of
    another device than its folder's is known to be one.
    """
    if path.stat().st_dev != path.parent.stat().st_dev:
        return True
    try:
        mounts = _MOUNTS.read_bytes().splitlines()
    except OSError:
        return False
    name = os.fsencode(path)
    for special in b"\\ \t\n":  # written as octal numbers there
        name = name.replace(bytes([special]), b"\\%03o" % special)
    return any(fields[4] == name for fields in map(bytes.split, mounts) if len(fields) > 4)


def _plain_path(path: str | os.PathLike[str]) -> Path:
    text = os.fspath(path)
    if (
        not isinstance(text, str)
        or not text
        or text.startswith((":memory:", "file:"))
        or "\0" in text
    ):
        raise ArgumentError(
            f"path must be the path of a file on a local disk, got {text!r}. Without path= the"
            " history is kept in memory."
        )
    return Path(os.path.realpath(os.path.expanduser(text)))


class Ledger:
    """The file: settings fixed at creation, rows, and notes.

    Args:
        path: a plain path on a local disk.
        settings: what must be in force. A ``None`` value takes over what the file has.
        create: make the file with these settings if there is none.
        read_only: never write, not even what SQLite keeps beside the file.

    Raises:
        ValueError: the file has other settings.
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
        self._database = database = Database(path, read_only=read_only)
        if create:
            _make_if_missing(database, settings)
        self.settings = database.connected(
            "read", lambda connection: read_settings(connection, self.path)
        )
        self.version, self._digest = 0, first_digest(self.settings)
        self._last_note = (0, self._digest)  # number and digest of those that were read
        if settings.get("id", self.id) != self.id:
            raise replaced(self.path)
        for name, value in settings.items():
            if value is not None and self.settings.get(name) != value:
                raise ArgumentError(
                    f"the ledger {self.path} was made with {name} = {self.settings.get(name)!r},"
                    f" not {value!r}. These are fixed at its creation, for what is in it was"
                    " charged under them: open it with its own, or make another file."
                )

    @property
    def path(self) -> Path:
        return self._database.path

    @property
    def id(self) -> str:
        return str(self.settings["id"])

    # --- rows -------------------------------------------------------------------------------------

    def read(self) -> list[Row]:
        """The rows that came since the last call.

        Raises:
            LedgerError: a row is damaged, or what was read before is not there any more.
        """

        def select(connection: sqlite3.Connection) -> tuple[list[tuple[Any, ...]], Any]:
            connection.execute("BEGIN")  # rows and seal of one moment
            seal = seal_of_same_file(connection, self.path, self.id)
            rows = f"SELECT {COLUMNS}, digest FROM rows WHERE seq >= ? ORDER BY seq"
            return connection.execute(rows, (self.version or 1,)).fetchall(), seal

        rows, seal = self._database.connected("read", select)
        if self.version and (not rows or rows.pop(0)[-1] != self._digest):
            raise LedgerError(
                f"the ledger {self.path} does not hold any more what this process read in it: a"
                " copy or a backup took its place. Nothing is released: put the newer file back."
            )
        found, last = [], self._digest
        for number, (*values, digest) in enumerate(rows, self.version + 1):
            last = next_digest(last, values)
            if values[0] != number or digest != last:
                raise damaged(self.path, f"row {values[0]} is not what was written")
            found.append(Row.decoded(values))
        if seal != last:
            raise damaged(self.path, f"its seal is not that of row {self.version + len(found)}")
        self.version, self._digest = self.version + len(found), last
        return found

    def append(
        self,
        entries: Iterable[Entry],
        *,
        job: str,
        writer: str,
        later: bool,
        if_unchanged: bool = True,
    ) -> list[int] | None:
        """Commits the entries and returns their numbers; ``None`` if ``if_unchanged`` and the file
        has rows that were not read yet.

        Raises:
            LedgerError: it cannot be said that the entries are on disk.
        """

        def insert(connection: sqlite3.Connection) -> tuple[list[int], str, bool] | None:
            connection.execute("BEGIN IMMEDIATE")
            seal = seal_of_same_file(connection, self.path, self.id)
            last = connection.execute(
                "SELECT seq, digest FROM rows ORDER BY seq DESC LIMIT 1"
            ).fetchone()
            seq, digest = last or (0, first_digest(self.settings))
            if not (isinstance(seq, int) and isinstance(digest, str)) or digest != seal:
                raise damaged(self.path, f"its seal is not that of row {seq}")
            unchanged = (seq, digest) == (self.version, self._digest)
            if if_unchanged and not unchanged:
                connection.execute("ROLLBACK")
                return None
            moment, first = now(), seq + 1
            for entry in entries:
                seq += 1
                values = entry.encoded(seq, moment, job, writer, later)
                digest = next_digest(digest, values)
                connection.execute(
                    f"INSERT INTO rows ({COLUMNS}, digest) VALUES ({', '.join('?' * 12)})",
                    [*values, digest],
                )
            connection.execute("UPDATE settings SET value = ? WHERE name = ?", (digest, SEAL))
            connection.execute("COMMIT")
            return list(range(first, seq + 1)), digest, unchanged

        written = self._database.connected("write", insert)
        if written is None:
            return None
        numbers, digest, unchanged = written
        if unchanged and numbers:
            self.version, self._digest = numbers[-1], digest
        return numbers

    # --- questions about all rows, whatever was read before ---------------------------------------

    def open_blocks_of(self, writer: str) -> list[Row]:
        """The blocks of one process that were not returned."""
        return open_blocks(row for row in self._read_anew() if row.writer == writer)

    def charges_of(self, job: str) -> list[Row]:
        """The rows in which a job charged something."""
        return [row for row in self._read_anew() if row.job == job and row.kind in CHARGING]

    def charged_by(self, job: str) -> Counter[DpEvent]:
        """How often a job charged each event."""
        return charges(self.charges_of(job))

    @property
    def place(self) -> list[Any]:
        """How far the file was read: number and digest of a row, which stand for all up to it."""
        return [self.version, self._digest]

    def charged_until(self, place: list[Any]) -> Counter[DpEvent] | None:
        """How often each event had been charged there.

        ``None``: the file does not go on from there, as one that was restored from an older copy.
        """
        number, digest = place
        rows = self._read_anew()
        last = first_digest(self.settings)
        if number:
            known = self._database.connected(
                "read",
                lambda connection: connection.execute(
                    "SELECT digest FROM rows WHERE seq = ?", (number,)
                ).fetchone(),
            )
            last = known[0] if known else ""
        return charges(row for row in rows if row.seq <= number) if last == digest else None

    def _read_anew(self) -> list[Row]:
        return Ledger(self.path, {"id": self.id}, read_only=self._database.read_only).read()

    # --- notes ------------------------------------------------------------------------------------

    def notes(self) -> list[str]:
        """The statements that jobs noted, in order.

        Raises:
            LedgerError: a note is damaged, or one that was read before is not there any more.
        """

        def select(connection: sqlite3.Connection) -> list[str]:
            seal_of_same_file(connection, self.path, self.id)
            return self._checked_notes(connection)

        return self._database.connected("read", select)

    def add_note(self, text: str, job: str) -> None:
        """Keeps a statement for all jobs, unless it is there already."""

        def insert(connection: sqlite3.Connection) -> None:
            connection.execute("BEGIN IMMEDIATE")
            seal_of_same_file(connection, self.path, self.id)
            known = self._checked_notes(connection)
            number, digest = self._last_note
            if text not in known:
                number += 1
                values = [number, now(), job, text]
                digest = next_digest(digest, values)
                connection.execute("INSERT INTO notes VALUES (?, ?, ?, ?, ?)", [*values, digest])
            connection.execute("COMMIT")
            self._last_note = (number, digest)

        if text not in self.notes():
            self._database.connected("write", insert)

    def _checked_notes(self, connection: sqlite3.Connection) -> list[str]:
        columns = "SELECT seq, time, job, text, digest FROM notes ORDER BY seq"
        rows = connection.execute(columns).fetchall()
        digests = [first_digest(self.settings)]
        for number, (*values, digest) in enumerate(rows, 1):
            whole = values[0] == number and all(isinstance(value, str) for value in values[1:])
            if not whole or digest != next_digest(digests[-1], values):
                raise damaged(self.path, f"note {number} is not what was written")
            digests.append(digest)
        number, digest = self._last_note
        if digests[number : number + 1] != [digest]:
            raise damaged(self.path, "notes that were read before are gone")
        self._last_note = (len(rows), digests[-1])
        return [values[3] for values in rows]


# --- making ---------------------------------------------------------------------------------------


def _make_if_missing(database: Database, settings: Mapping[str, Any]) -> None:
    """Makes the file with these settings if there is none, or one whose making was cut off.

    Raises:
        LedgerError: it cannot be made, or is empty without being known never to have held a
            charge.
    """
    mark = Path(f"{database.path}-making")
    if _is_blank(database, mark):
        _make(database, settings, mark)
    _mark_as_being_made(database, mark, False)


def _is_blank(database: Database, mark: Path) -> bool:
    """No file, or one whose making was cut off, which therefore never held a charge."""
    path = database.path
    if not path.exists():
        return True
    end = time.monotonic() + MAKING_SECONDS
    while path.is_file() and (
        not path.stat().st_size or database.connected("read", _has_no_tables)
    ):
        if mark.exists():
            return True
        database.require_one_name()
        if time.monotonic() > end:
            raise LedgerError(
                f"{path} is empty. If it was a ledger, what was charged is lost (a full"
                " disk?), and beginning anew would spend the budget twice: restore it. If it"
                " never was one, remove it."
            )
        time.sleep(0.01)  # another process may be making it
    return False


def _make(database: Database, settings: Mapping[str, Any], mark: Path) -> None:
    if not database.path.parent.is_dir():
        raise LedgerError(
            f"there is no folder {database.path.parent} for the ledger {database.path.name}: make"
            " it first."
        )
    made = {**settings, "id": uuid.uuid4().hex, "created": now()}
    _mark_as_being_made(database, mark, True)

    def make(connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("BEGIN IMMEDIATE")
        if _has_no_tables(connection):  # else another process was faster
            connection.execute(f"PRAGMA application_id = {APPLICATION}")
            connection.execute(f"PRAGMA user_version = {FORMAT}")
            for table in TABLES:
                connection.execute(table)
            values = [(name, json.dumps(value)) for name, value in made.items()]
            values.append((SEAL, first_digest(made)))
            connection.executemany("INSERT INTO settings VALUES (?, ?)", values)
        connection.execute("COMMIT")

    end = time.monotonic() + MAKING_SECONDS
    while True:
        try:
            return database.connected("create", make)
        except LedgerError as error:  # SQLite does not wait where two turn a new file to WAL
            if not is_busy(error) or time.monotonic() > end:
                raise
            time.sleep(0.01)


def _mark_as_being_made(database: Database, mark: Path, answer: bool) -> None:
    """Notes beside an empty file that it never held a charge; no other empty file may be begun
    anew. Every process takes the note away before it charges anything.
    """
    try:
        mark.touch() if answer else mark.unlink(missing_ok=True)
    except OSError as error:
        raise LedgerError(
            f"the ledger {database.path} cannot be made: {error}. Nothing may be released."
        ) from error


def _has_no_tables(connection: sqlite3.Connection) -> bool:
    return not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
