"""The ledger itself: settings fixed at creation, and rows that are read and appended."""

from __future__ import annotations

import os
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..events import DpEvent
from .database import Database
from .errors import LedgerError, damaged, replaced
from .format import COLUMNS, SEAL, first_digest, next_digest, now
from .making import make_if_missing
from .notes import Notes
from .rows import Entry, Row, charges, open_blocks
from .settings import read_settings, seal_of_same_file


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
        self._database = database = Database(path, read_only=read_only)
        if create:
            make_if_missing(database, settings)
        made = database.connected("read", lambda connection: read_settings(connection, self.path))
        self.settings, self._is_sealed = made
        self.version, self._digest = 0, first_digest(self.settings)
        self.notes = Notes(database, made)
        if settings.get("id", self.id) != self.id:
            raise replaced(self.path)
        for name, value in settings.items():
            if value is not None and self.settings.get(name) != value:
                raise ValueError(
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

    def read(self) -> list[Row]:
        """The rows that came since the last call.

        Raises:
            LedgerError: a row is damaged, or what was read before is not there any more.
        """

        def select(connection: sqlite3.Connection) -> tuple[list[tuple[Any, ...]], str | None]:
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
            found.append(Row.decoded(values, self.settings["neighboring"]))
        if self._is_sealed and seal != last:
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
            if not (isinstance(seq, int) and isinstance(digest, str)) or (
                self._is_sealed and digest != seal
            ):
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
            if self._is_sealed:
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
        """The blocks of one process that were not settled."""
        return open_blocks(row for row in self._read_anew() if row.writer == writer)

    def charges_of(self, job: str) -> list[Row]:
        """The rows in which a job charged something."""
        kinds = ("charge", "block", "return")
        return [row for row in self._read_anew() if row.job == job and row.kind in kinds]

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

        def select(connection: sqlite3.Connection) -> tuple[Any, ...] | None:
            seal_of_same_file(connection, self.path, self.id)
            row = connection.execute("SELECT digest FROM rows WHERE seq = ?", (number,))
            found: tuple[Any, ...] | None = row.fetchone()
            return found

        last = (
            self._database.connected("read", select) if number else (first_digest(self.settings),)
        )
        if last != (digest,):
            return None
        return charges(row for row in self._read_anew() if row.seq <= number)

    def _read_anew(self) -> list[Row]:
        return Ledger(self.path, {"id": self.id}, read_only=self._database.read_only).read()
