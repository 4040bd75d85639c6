"""Statements in a ledger on which its guarantee rests, in a chain of their own."""

from __future__ import annotations

import sqlite3
from typing import Any

from .database import Database
from .errors import damaged
from .format import NOTES, first_digest, next_digest, now
from .settings import Made, seal_of_same_file


class Notes:
    """The statements of one ledger.

    Args:
        database: its file.
        made: what it was made with.
    """

    def __init__(self, database: Database, made: Made) -> None:
        self._database, self._settings = database, made.settings
        self._last = (0, first_digest(made.settings))  # number and digest of those that were read

    def read(self) -> list[str]:
        """The statements that jobs noted, in order.

        Raises:
            LedgerError: a note is damaged, or one that was read before is not there any more.
        """

        def select(connection: sqlite3.Connection) -> list[str]:
            self._require_same_file(connection)
            return self._checked(connection)

        return self._database.connected("read", select)

    def add(self, text: str, job: str) -> None:
        """Keeps a statement for all jobs, unless it is there already."""

        def insert(connection: sqlite3.Connection) -> None:
            connection.execute("BEGIN IMMEDIATE")
            self._require_same_file(connection)
            connection.execute(NOTES)
            known = self._checked(connection)
            number, digest = self._last
            if text not in known:
                number += 1
                values = [number, now(), job, text]
                digest = next_digest(digest, values)
                connection.execute("INSERT INTO notes VALUES (?, ?, ?, ?, ?)", [*values, digest])
            connection.execute("COMMIT")
            self._last = (number, digest)

        if text not in self.read():
            self._database.connected("write", insert)

    def _require_same_file(self, connection: sqlite3.Connection) -> None:
        seal_of_same_file(connection, self._database.path, self._settings["id"])

    def _checked(self, connection: sqlite3.Connection) -> list[str]:
        path = self._database.path
        table = "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = 'notes'"
        rows: list[tuple[Any, ...]] = []
        if connection.execute(table).fetchone()[0]:
            columns = "SELECT seq, time, job, text, digest FROM notes ORDER BY seq"
            rows = connection.execute(columns).fetchall()
        digests = [first_digest(self._settings)]
        for number, (*values, digest) in enumerate(rows, 1):
            whole = values[0] == number and all(isinstance(value, str) for value in values[1:])
            if not whole or digest != next_digest(digests[-1], values):
                raise damaged(path, f"note {number} is not what was written")
            digests.append(digest)
        number, digest = self._last
        if digests[number : number + 1] != [digest]:
            raise damaged(path, "notes that were read before are gone")
        self._last = (len(rows), digests[-1])
        return [values[3] for values in rows]
