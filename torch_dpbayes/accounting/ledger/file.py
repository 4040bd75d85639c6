"""The SQLite file: opened once for each transaction, made once, read and appended to.

A connection lives as long as one transaction, and a fork waits for its end. So no connection is
inherited by a child, or writes into a file that was deleted or replaced.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import quote

from ...errors import ArgumentError
from ..history import Settings
from .schema import (
    COLUMNS,
    SEAL,
    LedgerError,
    Row,
    damaged,
    explained,
    first_digest,
    make_tables,
    next_digest,
    now,
    open_blocks,
    read_settings,
    replaced,
    seal_of_same_file,
)

BUSY_SECONDS = 60.0
_MAKING = "-making-"
_MOUNTS = Path("/proc/self/mountinfo")

# Held by whoever charges or reads, and by whoever forks: a child must not begin in the middle of a
# change, and SQLite keeps a process' locks in its memory, where a child would find those of a
# connection that it does not have.
LOCK = threading.RLock()
if hasattr(os, "register_at_fork"):  # else there is no fork
    os.register_at_fork(
        before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release
    )

T = TypeVar("T")
_log = logging.getLogger("torch_dpbayes")


class Ledger:
    """The file: settings fixed at creation, and rows.

    Args:
        path: a plain path on a local disk.
        settings: what must be in force. A ``None`` value takes over what the file has.
        create: make the file with these settings if there is none.
        read_only: never write, not even what SQLite keeps beside the file.

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
        self.id = str(found["id"])
        self.settings = Settings(*(found[name] for name in Settings._fields))
        self._before = first_digest(found)  # of the first row
        self._version, self._digest = 0, self._before  # the last row that was read
        if settings.get("id", self.id) != self.id:
            raise replaced(self.path)
        for name, value in settings.items():
            if value is not None and found[name] != value:
                raise ArgumentError(
                    f"the ledger {self.path} was made with {name} = {found[name]!r},"
                    f" not {value!r}. These are fixed at its creation, for what is in it was"
                    " charged under them: open it with its own, or make another file."
                )

    # --- connections ------------------------------------------------------------------------------

    def _connected(
        self,
        purpose: Literal["create", "read", "write"],
        work: Callable[[sqlite3.Connection], T],
        path: Path | None = None,
    ) -> T:
        """What ``work`` does with a connection of its own, to the ledger or to ``path``. (Not a
        context manager, in whose ``__exit__`` Ctrl-C could leave it open.)

        Raises:
            LedgerError: SQLite cannot do it; in words.
        """
        connection: sqlite3.Connection | None = None
        mode = {"create": "rwc", "read": "ro" if self._is_read_only else "rw", "write": "rw"}
        with LOCK:
            try:
                connection = self._connect(path or self.path, mode[purpose])
                if purpose != "read":
                    connection.execute("PRAGMA synchronous = FULL")
                return work(connection)
            # the latter where a damaged text is quoted in the former
            except (sqlite3.Error, UnicodeDecodeError) as error:
                raise explained(self.path, error, BUSY_SECONDS) from error
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
            # else SQLite would keep an index beside the file, which cannot be made, or could not be
            # written by its owner
            address += "&immutable=1"
        return sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS, isolation_level=None)

    def _require_one_name(self) -> None:
        """Raise where the file can be opened under another name."""
        if self.path.stat().st_nlink > 1:
            for other in self.path.parent.glob(f"{escape(self.path.name)}{_MAKING}*"):
                with suppress(OSError):  # else its maker removes it, or nobody may
                    if other.samefile(self.path):  # it was made a moment ago
                        other.unlink(missing_ok=True)
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
            return connection.execute(rows, (self._version or 1,)).fetchall(), seal

        rows, seal = self._connected("read", select)
        if self._version and (not rows or rows.pop(0)[-1] != self._digest):
            raise LedgerError(
                f"the ledger {self.path} does not hold any more what this process read in it: a"
                " copy or a backup took its place. Nothing is released: put the newer file back."
            )
        found, last = [], self._digest
        for number, (*values, digest) in enumerate(rows, self._version + 1):
            last = next_digest(last, values)
            if values[0] != number or digest != last:
                raise damaged(self.path, f"row {values[0]} is not what was written")
            found.append(Row.decoded(values))
        if seal != last:
            raise damaged(self.path, f"its seal is not that of row {self._version + len(found)}")
        self._version, self._digest = self._version + len(found), last
        return found

    def append(
        self, rows: Iterable[Row], *, job: str, writer: str, if_unchanged: bool = True
    ) -> list[int] | None:
        """Commits the rows and returns their numbers; ``None`` if ``if_unchanged`` and the file
        has rows that were not read yet.

        Raises:
            LedgerError: it cannot be said that the rows are on disk.
        """

        def insert(connection: sqlite3.Connection) -> tuple[list[int], str, bool] | None:
            connection.execute("BEGIN IMMEDIATE")
            seal = seal_of_same_file(connection, self.path, self.id)
            last = "SELECT seq, digest FROM rows ORDER BY seq DESC LIMIT 1"
            seq, digest = connection.execute(last).fetchone() or (0, self._before)
            if not (isinstance(seq, int) and isinstance(digest, str)) or digest != seal:
                raise damaged(self.path, f"its seal is not that of row {seq}")
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

    def open_blocks_of(self, writer: str) -> list[Row]:
        """The blocks of one process that were not returned, whatever was read before."""
        rows = Ledger(self.path, {"id": self.id}, read_only=self._is_read_only).read()
        return open_blocks(row for row in rows if row.writer == writer)

    @property
    def place(self) -> list[Any]:
        """How far the file was read: number and digest of a row, which stand for all up to it."""
        return [self._version, self._digest]

    def holds(self, place: list[Any]) -> bool:
        """Whether the file goes on from there, unlike one that was restored from an older copy."""
        number, digest = place

        def select(connection: sqlite3.Connection) -> Any:
            row = "SELECT digest FROM rows WHERE seq = ?"
            return connection.execute(row, (number,)).fetchone()

        found = self._connected("read", select) if number else (self._before,)
        return found is not None and bool(found[0] == digest)

    # --- making -----------------------------------------------------------------------------------

    def _make_if_missing(self, settings: Mapping[str, Any]) -> None:
        """Makes the file with these settings if there is none: whole, under a name of its own,
        which then becomes this one. So whatever has this name held all that was charged to it.

        Raises:
            LedgerError: it cannot be made.
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
    plain = isinstance(text, str) and text and "\0" not in text
    if not plain or text.startswith((":memory:", "file:")):
        raise ArgumentError(
            f"path must be the path of a file on a local disk, got {text!r}. Without path= the"
            " history is kept in memory."
        )
    return Path(os.path.realpath(os.path.expanduser(text)))
