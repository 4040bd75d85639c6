"""The SQLite file behind a ledger: one connection for each transaction.

A connection lives as long as one transaction, and a fork waits for its end, so that none is ever
inherited by a child or writes into a file that was deleted or replaced.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar
from urllib.parse import quote

from .errors import LedgerError, explained

BUSY_SECONDS = 60.0

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


class Database:
    """Opens one file.

    Args:
        path: a plain path on a local disk.
        read_only: never write, not even what SQLite keeps beside the file.
    """

    def __init__(self, path: str | os.PathLike[str], *, read_only: bool = False) -> None:
        self.path = _plain_path(path)
        self.read_only = read_only

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
                raise explained(self.path, error, BUSY_SECONDS) from error
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
