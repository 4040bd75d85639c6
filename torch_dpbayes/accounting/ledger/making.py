"""Making the file of a ledger, once, whoever else makes it at the same moment."""

from __future__ import annotations

import json
import sqlite3
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .database import Database
from .errors import LedgerError, is_busy
from .format import APPLICATION, FORMAT, SEAL, TABLES, first_digest, now, written

MAKING_SECONDS = 10.0


def make_if_missing(database: Database, settings: Mapping[str, Any]) -> None:
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
            values = [(name, json.dumps(value)) for name, value in written(made).items()]
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
