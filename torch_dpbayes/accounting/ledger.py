"""A history that outlives its process: one SQLite file that many processes charge.

The file only grows. A row is a charge, a *block* (releases reserved ahead by one process, which
count as spent for all the others), or the *return* of what a block did not use. Rows are numbered
without gaps, and each carries a digest of itself and of the row before, the first one of the
settings, so that the last digest is a version: a row that was changed, lost or brought back from a
copy is noticed. The *seal* repeats the last digest (that of the settings where there is no row), so
that missing ends are noticed too.

How a process charges: it reads what is new, decides outside of any transaction whether a block
fits, and commits the block in ``BEGIN IMMEDIATE`` only if the version is still the one it decided
on; otherwise it decides again. Steps are then taken out of the block in memory. What was released
is therefore on disk before it is released, whatever becomes of the process:

* killed: the whole block stays charged, which is more than was released, never less;
* closed (``close()``, the end of a ``with`` block or of the program, also by Ctrl-C): the rest is
  returned, once, which a unique index enforces;
* forked: the child starts afresh from the file and never returns a block of its parent;
* a commit that was interrupted, so that nobody knows whether it reached the disk: its block is not
  used, and is returned once the file can be read.

A connection lives as long as one transaction, and a fork waits for its end, so that none is ever
inherited by a child or writes into a file that was deleted or replaced.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import sqlite3
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args
from urllib.parse import quote

from . import events
from .choices import accounting_method, neighboring_relation
from .events import DpEvent
from .pairs import Pair

BUSY_SECONDS = 60.0
MAKING_SECONDS = 10.0
FORMAT = 2
_UNSEALED = 1  # the format before the seal, which is read and written as it was
_APPLICATION = 0x64706279
_SEAL = "seal"

# Held while a connection is open, also by who forks: SQLite keeps a process' locks in its memory,
# where a child would find those of a connection that it does not have. It would wait for them in
# vain, or read without any.
_connections = threading.RLock()
_being_written: set[str] = set()  # names, whose hash no signal handler can interrupt
if hasattr(os, "register_at_fork"):  # else there is no fork
    os.register_at_fork(
        before=_connections.acquire,
        after_in_parent=_connections.release,
        after_in_child=_connections.release,
    )

T = TypeVar("T")

Kind = Literal["charge", "block", "return", "plan", "filter"]
Flag = Literal["fixed", "adaptive", "registered"]
Key = tuple[DpEvent, str | None, Flag]

_COLUMNS = "seq, time, job, writer, later, kind, label, event, count, flag, block"
_TABLES = (
    "CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    (
        "CREATE TABLE rows (seq INTEGER PRIMARY KEY, time TEXT NOT NULL, job TEXT NOT NULL, writer"
        " TEXT NOT NULL, later INTEGER NOT NULL, kind TEXT NOT NULL, label TEXT, event TEXT NOT"
        " NULL, count INTEGER NOT NULL, flag TEXT NOT NULL, block INTEGER NOT NULL, digest TEXT NOT"
        " NULL)"
    ),
    "CREATE UNIQUE INDEX returned_once ON rows (block) WHERE kind = 'return'",
)
_NOTES = (  # made when first needed: files of earlier versions have none
    "CREATE TABLE IF NOT EXISTS notes (seq INTEGER PRIMARY KEY, time TEXT NOT NULL, "
    "job TEXT NOT NULL, text TEXT NOT NULL, digest TEXT NOT NULL)"
)


def checked_flag(flag: Any) -> Flag:
    """``flag`` if it is one: a misspelt one would pass for "fixed"."""
    if flag not in get_args(Flag):
        raise ValueError(f"a saved charge is one of {', '.join(get_args(Flag))}, got {flag!r}.")
    checked: Flag = flag
    return checked


class LedgerError(RuntimeError):
    """The ledger could not be read or written. Nothing may be released."""


class Row(NamedTuple):
    """One line of the file. ``block``: the number of the row that a return belongs to."""

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


class Entry(NamedTuple):
    """What is to become a row."""

    kind: Kind
    label: str | None
    event: DpEvent | None
    count: int  # type: ignore[assignment]
    flag: Flag
    block: int = 0
    job: str = ""  # whose it is; empty: of the job that writes it


class Ledger:
    """The file: settings fixed at creation, and rows.

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
        self.path = _plain_path(path)
        self._read_only = read_only
        self.version, self._digest = 0, ""
        self._making = Path(f"{self.path}-making")
        if create:
            if self._is_blank():
                self._create(settings)
            self._is_being_made(False)
        found: dict[str, Any] = self._connected("read", self._checked_settings)
        self.settings = found
        self._digest = _first_digest(found)
        self._last_note = (0, self._digest)  # of those that were read
        if settings.get("id", self.id) != self.id:
            raise LedgerError(_replaced(self.path))
        for name, value in settings.items():
            if value is not None and found.get(name) != value:
                raise ValueError(
                    f"the ledger {self.path} was made with {name} = {found.get(name)!r}, not"
                    f" {value!r}. These are fixed at its creation, for what is in it was charged"
                    " under them: open it with its own, or make another file."
                )

    @property
    def id(self) -> str:
        return str(self.settings["id"])

    def _is_blank(self) -> bool:
        """No file, or one whose making was cut off, which therefore never held a charge."""
        if not self.path.exists():
            return True
        end = time.monotonic() + MAKING_SECONDS
        while self.path.is_file() and (
            not self.path.stat().st_size or self._connected("read", _has_no_tables)
        ):
            if self._making.exists():
                return True
            if time.monotonic() > end:
                raise LedgerError(
                    f"{self.path} is empty. If it was a ledger, what was charged is lost (a full"
                    " disk?), and beginning anew would spend the budget twice: restore it. If it"
                    " never was one, remove it."
                )
            time.sleep(0.01)  # another process may be making it
        return False

    def _create(self, settings: Mapping[str, Any]) -> None:
        if not self.path.parent.is_dir():
            raise LedgerError(
                f"there is no folder {self.path.parent} for the ledger {self.path.name}: make it"
                " first."
            )
        written = {**settings, "id": uuid.uuid4().hex, "created": _now()}
        self._is_being_made(True)

        def create(connection: sqlite3.Connection) -> None:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("BEGIN IMMEDIATE")
            if _has_no_tables(connection):  # else another process was faster
                connection.execute(f"PRAGMA application_id = {_APPLICATION}")
                connection.execute(f"PRAGMA user_version = {FORMAT}")
                for table in _TABLES:
                    connection.execute(table)
                values = [(name, json.dumps(value)) for name, value in written.items()]
                values.append((_SEAL, _first_digest(written)))
                connection.executemany("INSERT INTO settings VALUES (?, ?)", values)
            connection.execute("COMMIT")

        end = time.monotonic() + MAKING_SECONDS
        while True:
            try:
                return self._connected("create", create)
            except LedgerError as error:  # SQLite does not wait where two turn a new file to WAL
                if (
                    getattr(error.__cause__, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_BUSY
                    or time.monotonic() > end
                ):
                    raise
                time.sleep(0.01)

    def _is_being_made(self, answer: bool) -> None:
        """Notes beside an empty file that it never held a charge; no other empty file may be begun
        anew. Every process takes the note away before it charges anything.
        """
        try:
            self._making.touch() if answer else self._making.unlink(missing_ok=True)
        except OSError as error:
            raise LedgerError(
                f"the ledger {self.path} cannot be made: {error}. Nothing may be released."
            ) from error

    def _checked_settings(self, connection: sqlite3.Connection) -> dict[str, Any]:
        connection.execute("BEGIN")  # settings, seal and first row of one moment
        if connection.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION:
            raise LedgerError(
                f"{self.path} is an SQLite file, but not a ledger of torch_dpbayes. Give another"
                " path."
            )
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version not in (_UNSEALED, FORMAT):
            raise LedgerError(
                f"the ledger {self.path} has format {version}, this torch_dpbayes reads format"
                f" {FORMAT}. Use the version that wrote it; nothing was changed."
            )
        (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise LedgerError(_damaged(self.path, verdict))
        if not {sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master")}.issuperset(
            _TABLES
        ):
            raise LedgerError(_damaged(self.path, "its tables are not those that were made"))
        try:
            saved = dict(connection.execute("SELECT name, value FROM settings").fetchall())
            self._is_sealed = version == FORMAT
            expected = saved.pop(_SEAL) if self._is_sealed else None
            found = _settings(saved)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise LedgerError(
                _damaged(self.path, f"its settings are not what was written: {error!r}")
            ) from error
        digest = _first_digest(found)
        first = connection.execute(f"SELECT {_COLUMNS}, digest FROM rows WHERE seq = 1").fetchone()
        if first is not None:
            digest, expected = _digest(digest, list(first[:-1])), first[-1]
        if digest != expected and (self._is_sealed or first is not None):
            raise LedgerError(
                _damaged(self.path, "its settings or its first row are not what was written")
            )
        return found

    def read(self) -> list[Row]:
        """The rows that came since the last call.

        Raises:
            LedgerError: a row is damaged, or what was read before is not there any more.
        """

        def select(connection: sqlite3.Connection) -> tuple[list[tuple[Any, ...]], str | None]:
            connection.execute("BEGIN")  # rows and seal of one moment
            seal = self._seal_of_same_file(connection)
            rows = f"SELECT {_COLUMNS}, digest FROM rows WHERE seq >= ? ORDER BY seq"
            return connection.execute(rows, (self.version or 1,)).fetchall(), seal

        rows, seal = self._connected("read", select)
        if self.version and (not rows or rows.pop(0)[-1] != self._digest):
            raise LedgerError(
                f"the ledger {self.path} does not hold any more what this process read in it: a"
                " copy or a backup took its place. Nothing is released: put the newer file back."
            )
        found, last = [], self._digest
        for number, (*values, digest) in enumerate(rows, self.version + 1):
            last = _digest(last, values)
            if values[0] != number or digest != last:
                raise LedgerError(_damaged(self.path, f"row {values[0]} is not what was written"))
            found.append(self._decoded(values))
        if self._is_sealed and seal != last:
            raise LedgerError(
                _damaged(self.path, f"its seal is not that of row {self.version + len(found)}")
            )
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
            seal = self._seal_of_same_file(connection)
            last = connection.execute(
                "SELECT seq, digest FROM rows ORDER BY seq DESC LIMIT 1"
            ).fetchone()
            seq, digest = last or (0, _first_digest(self.settings))
            if not (isinstance(seq, int) and isinstance(digest, str)) or (
                self._is_sealed and digest != seal
            ):
                raise LedgerError(_damaged(self.path, f"its seal is not that of row {seq}"))
            unchanged = (seq, digest) == (self.version, self._digest)
            if if_unchanged and not unchanged:
                connection.execute("ROLLBACK")
                return None
            moment, first = _now(), seq + 1
            for entry in entries:
                seq += 1
                code = "" if entry.event is None else json.dumps(events.encode(entry.event))
                values = [
                    seq,
                    moment,
                    entry.job or job,
                    writer,
                    int(later),
                    entry.kind,
                    entry.label,
                    code,
                    entry.count,
                    entry.flag,
                    entry.block,
                ]
                digest = _digest(digest, values)
                connection.execute(
                    f"INSERT INTO rows ({_COLUMNS}, digest) VALUES ({', '.join('?' * 12)})",
                    [*values, digest],
                )
            if self._is_sealed:
                connection.execute("UPDATE settings SET value = ? WHERE name = ?", (digest, _SEAL))
            connection.execute("COMMIT")
            return list(range(first, seq + 1)), digest, unchanged

        written = self._connected("write", insert)
        if written is None:
            return None
        numbers, digest, unchanged = written
        if unchanged and numbers:
            self.version, self._digest = numbers[-1], digest
        return numbers

    def open_blocks_of(self, writer: str) -> list[Row]:
        """The blocks of one process that were not settled."""
        return open_blocks(row for row in self._read_anew() if row.writer == writer)

    def charged_by(self, job: str) -> Counter[DpEvent]:
        """How often a job charged each event."""
        return _charges(row for row in self._read_anew() if row.job == job)

    @property
    def place(self) -> list[Any]:
        """How far the file was read: number and digest of a row, which stand for all up to it."""
        return [self.version, self._digest]

    def charged_until(self, place: list[Any]) -> Counter[DpEvent] | None:
        """How often each event had been charged there.

        ``None``: the file does not go on from there, as one that was restored from an older copy.
        """
        number, digest = place

        def select(connection: sqlite3.Connection) -> tuple[Any, ...] | None:
            self._seal_of_same_file(connection)
            row = connection.execute("SELECT digest FROM rows WHERE seq = ?", (number,))
            found: tuple[Any, ...] | None = row.fetchone()
            return found

        last = self._connected("read", select) if number else (_first_digest(self.settings),)
        if last != (digest,):
            return None
        return _charges(row for row in self._read_anew() if row.seq <= number)

    def _read_anew(self) -> list[Row]:
        """All rows, whatever was read before."""
        return Ledger(self.path, {"id": self.id}, read_only=self._read_only).read()

    def _decoded(self, values: list[Any]) -> Row:
        seq, moment, job, writer, later, kind, label, code, count, flag, block = values
        event = events.recorded(json.loads(code), self.settings["neighboring"]) if code else None
        return Row(seq, moment, job, writer, bool(later), kind, label, event, count, flag, block)

    def notes(self) -> list[str]:
        """The statements that jobs noted, in order.

        Raises:
            LedgerError: a note is damaged, or one that was read before is not there any more.
        """

        def select(connection: sqlite3.Connection) -> list[str]:
            self._seal_of_same_file(connection)
            return self._checked_notes(connection)

        return self._connected("read", select)

    def add_note(self, text: str, job: str) -> None:
        """Keeps a statement for all jobs, unless it is there already."""

        def insert(connection: sqlite3.Connection) -> None:
            connection.execute("BEGIN IMMEDIATE")
            self._seal_of_same_file(connection)
            connection.execute(_NOTES)
            known = self._checked_notes(connection)
            number, digest = self._last_note
            if text not in known:
                number += 1
                values = [number, _now(), job, text]
                digest = _digest(digest, values)
                connection.execute("INSERT INTO notes VALUES (?, ?, ?, ?, ?)", [*values, digest])
            connection.execute("COMMIT")
            self._last_note = (number, digest)

        if text not in self.notes():
            self._connected("write", insert)

    def _checked_notes(self, connection: sqlite3.Connection) -> list[str]:
        table = "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = 'notes'"
        rows: list[tuple[Any, ...]] = []
        if connection.execute(table).fetchone()[0]:
            columns = "SELECT seq, time, job, text, digest FROM notes ORDER BY seq"
            rows = connection.execute(columns).fetchall()
        digests = [_first_digest(self.settings)]
        for number, (*values, digest) in enumerate(rows, 1):
            whole = values[0] == number and all(isinstance(value, str) for value in values[1:])
            if not whole or digest != _digest(digests[-1], values):
                raise LedgerError(_damaged(self.path, f"note {number} is not what was written"))
            digests.append(digest)
        number, digest = self._last_note
        if digests[number : number + 1] != [digest]:
            raise LedgerError(_damaged(self.path, "notes that were read before are gone"))
        self._last_note = (len(rows), digests[-1])
        return [values[3] for values in rows]

    def _seal_of_same_file(self, connection: sqlite3.Connection) -> str | None:
        found = dict(
            connection.execute(
                "SELECT name, value FROM settings WHERE name IN ('id', ?)", (_SEAL,)
            ).fetchall()
        )
        if found.get("id") != json.dumps(self.id):
            raise LedgerError(_replaced(self.path))
        return found.get(_SEAL)

    def _connected(
        self, purpose: Literal["create", "read", "write"], work: Callable[[sqlite3.Connection], T]
    ) -> T:
        """What ``work`` does with a connection of its own. (Not a context manager, in whose
        ``__exit__`` Ctrl-C could leave it open.)
        """
        connection: sqlite3.Connection | None = None
        mode, name = (
            "rwc" if purpose == "create" else "ro" if self._read_only else "rw",
            str(self.path),
        )
        with _connections:
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
                raise _explained(self.path, error) from error
            finally:
                try:
                    if connection is not None:
                        connection.close()
                finally:
                    if purpose != "read":
                        _being_written.discard(name)

    def _connect(self, mode: str) -> sqlite3.Connection:
        if self.path.is_file() and self.path.stat().st_nlink > 1:
            raise LedgerError(
                f"{self.path} has a second name (a hard link). SQLite keeps a journal for each"
                " name, so that charges under one would be invisible under the other. Remove one"
                " of the names."
            )
        address = f"file:{quote(str(self.path))}?mode={mode}"
        journal = Path(f"{self.path}-wal")
        writable = os.access(self.path, os.W_OK) and os.access(self.path.parent, os.W_OK)
        if mode == "ro" and not writable and not (journal.exists() and journal.stat().st_size):
            # else SQLite would keep an index beside the file, which cannot be made, or could not be
            # written by its owner
            address += "&immutable=1"
        return sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS, isolation_level=None)


class Block:
    """Releases that one process reserved: how many are left, and what the others were used for."""

    __slots__ = ("count", "key", "left", "open", "pair", "seq", "used")

    def __init__(self, seq: int, key: Key, count: int) -> None:
        self.seq, self.key, self.count, self.left, self.open = seq, key, count, count, True
        self.used: dict[Key, int] = {}
        self.pair: Pair | None = None  # what the accountant takes its event for

    def settlement(self) -> list[Entry]:
        """What takes the place of the block: the releases that it was used for, where they
        are others than its own, and the rest returned.
        """
        event, label, flag = self.key
        others = {key: count for key, count in self.used.items() if key != self.key}
        entries = [
            Entry("charge", name, other, count, kind)
            for (other, name, kind), count in others.items()
        ]
        return [
            *entries,
            Entry("return", label, event, -(self.left + sum(others.values())), flag, self.seq),
        ]


class Session:
    """One process at one ledger: the job that it belongs to, and its open blocks.

    Args:
        ledger: the file.
        job: the same for all processes that an accountant was forked or sent to.
        later: the ledger held charges already when the job began.
    """

    def __init__(self, ledger: Ledger, job: str, later: bool) -> None:
        self.ledger, self.job, self.later = ledger, job, later
        self.writer = f"{uuid.uuid4().hex} pid {os.getpid()} on {platform.node()}"
        self.blocks: list[Block] = []
        self._process = os.getpid()
        # a commit was interrupted: there may be blocks that nobody took anything out of
        self._uncertain = False

    def read(self) -> list[Row]:
        """What others wrote since the last call."""
        return [row for row in self.ledger.read() if row.writer != self.writer]

    def commit(
        self,
        wanted: Iterable[tuple[Key, int]],
        finished: Iterable[Block] = (),
        also: Iterable[Entry] = (),
    ) -> bool:
        """Opens blocks and settles finished ones in one transaction, if the ledger is still what
        was read last.

        Returns:
            Whether it is. If not, nothing happened.

        Raises:
            LedgerError: nobody knows what is on disk. Take nothing out of any block any more:
                :meth:`settle`, and begin anew.
        """
        finished, wanted, also = list(finished), list(wanted), list(also)
        entries = [entry for block in finished for entry in block.settlement()] + also
        first = len(entries)
        entries += [
            Entry("block", label, event, count, flag) for (event, label, flag), count in wanted
        ]
        self._uncertain = True
        numbers = self.ledger.append(entries, job=self.job, writer=self.writer, later=self.later)
        if numbers is not None:
            self.blocks = [block for block in self.blocks if block not in finished]
            self.blocks += [
                Block(seq, key, count)
                for seq, (key, count) in zip(numbers[first:], wanted, strict=True)
            ]
        self._uncertain = False
        return numbers is not None

    def settle(self) -> None:
        """Returns what the open blocks did not use."""
        if os.getpid() != self._process:
            return  # the blocks are the parent's
        if self._uncertain:
            known = {block.seq for block in self.blocks}
            self.blocks += [
                Block(row.seq, row.key, row.count)
                for row in self.ledger.open_blocks_of(self.writer)
                if row.seq not in known
            ]
            self._uncertain = False
        for block in list(self.blocks):
            block.open = False
            try:
                self.ledger.append(
                    block.settlement(),
                    job=self.job,
                    writer=self.writer,
                    later=self.later,
                    if_unchanged=False,
                )
            except LedgerError as error:
                # settled before, by a commit that seemed to fail
                if not isinstance(error.__cause__, sqlite3.IntegrityError):
                    raise
            self.blocks.remove(block)


def open_blocks(rows: Iterable[Row]) -> list[Row]:
    """The blocks that were neither settled nor returned: of running processes, or of some
    that died.
    """
    found: dict[int, Row] = {}
    for row in rows:
        if row.kind == "block":
            found[row.seq] = row
        elif row.kind == "return":
            found.pop(row.block, None)
    return list(found.values())


def _charges(rows: Iterable[Row]) -> Counter[DpEvent]:
    found: Counter[DpEvent] = Counter()
    for row in rows:
        if row.event is not None and row.kind in ("charge", "block", "return"):
            found[row.event] += row.count
    return found


def _has_no_tables(connection: sqlite3.Connection) -> bool:
    return not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]


def _settings(saved: Mapping[Any, Any]) -> dict[str, Any]:
    """Settings that were read from a file.

    Raises:
        TypeError, ValueError: they are not what :meth:`Ledger._create` writes.
    """
    found = {name: json.loads(value) for name, value in saved.items()}
    if set(found) != {"epsilon", "delta", "method", "neighboring", "id", "created"}:
        raise ValueError(f"they are {sorted(map(str, found))}")
    accounting_method(found["method"])
    neighboring_relation(found["neighboring"])
    epsilon, delta = found["epsilon"], found["delta"]
    for number, largest in ((epsilon, math.inf), (delta, 1)):
        if number is not None and not (isinstance(number, float) and 0 < number < largest):
            raise ValueError(f"epsilon = {epsilon!r}, delta = {delta!r}")
    if not isinstance(found["id"], str) or (epsilon is not None and delta is None):
        raise ValueError(f"epsilon = {epsilon!r}, delta = {delta!r}, id = {found['id']!r}")
    return found


def _plain_path(path: str | os.PathLike[str]) -> Path:
    text = os.fspath(path)
    if (
        not isinstance(text, str)
        or not text
        or text.startswith((":memory:", "file:"))
        or "\0" in text
    ):
        raise ValueError(
            f"path must be the path of a file on a local disk, got {text!r}. Without path= the"
            " history is kept in memory."
        )
    return Path(os.path.realpath(os.path.expanduser(text)))


def _first_digest(settings: Mapping[str, Any]) -> str:
    return hashlib.blake2b(
        json.dumps(settings, sort_keys=True).encode(), digest_size=16
    ).hexdigest()


def _digest(before: str, values: list[Any]) -> str:
    text = json.dumps(values, default=repr)  # bytes, which are never written
    return hashlib.blake2b((before + text).encode(), digest_size=16).hexdigest()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _replaced(path: Path) -> str:
    return (
        f"{path} is another ledger than the one that was opened: it was replaced. Nothing is"
        " released. Put the right one back."
    )


def _damaged(path: Path, what: str) -> str:
    return (
        f"the ledger {path} is damaged ({what}). What was charged cannot be known, so nothing is"
        " released. Restore the newest backup only if nothing was charged after it; otherwise take"
        " the budget as spent."
    )


def _explained(path: Path, error: sqlite3.Error | UnicodeDecodeError) -> LedgerError:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        what = (
            f"was kept busy by other processes for {BUSY_SECONDS:g} s. Nothing was recorded;"
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
        return LedgerError(_damaged(path, str(error)))
    return LedgerError(f"the ledger {path} {what}.")
