"""What is said when a ledger cannot be used."""

from __future__ import annotations

import sqlite3
from pathlib import Path


class LedgerError(RuntimeError):
    """The ledger could not be read or written. Nothing may be released."""


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
