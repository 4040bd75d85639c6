"""What a ledger was made with: read, and checked against its seal and its first row."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..choices import accounting_method, neighboring_relation, privacy_unit
from .errors import LedgerError, damaged, replaced
from .format import (
    APPLICATION,
    COLUMNS,
    FORMAT,
    SEAL,
    TABLES,
    UNSEALED,
    first_digest,
    next_digest,
)


class Made(NamedTuple):
    """What is fixed when a ledger is made.

    Attributes:
        settings: budget, method, relation, identity and moment.
        is_sealed: whether the last digest is repeated, as in files of this version.
    """

    settings: dict[str, Any]
    is_sealed: bool


def read_settings(connection: sqlite3.Connection, path: Path) -> Made:
    """What the file at ``path`` was made with.

    Raises:
        LedgerError: it is not a ledger, or is damaged.
    """
    connection.execute("BEGIN")  # settings, seal and first row of one moment
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION:
        raise LedgerError(
            f"{path} is an SQLite file, but not a ledger of torch_dpbayes. Give another path."
        )
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version not in (UNSEALED, FORMAT):
        raise LedgerError(
            f"the ledger {path} has format {version}, this torch_dpbayes reads format"
            f" {FORMAT}. Use the version that wrote it; nothing was changed."
        )
    (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise damaged(path, verdict)
    if not {sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master")}.issuperset(
        TABLES
    ):
        raise damaged(path, "its tables are not those that were made")
    try:
        saved = dict(connection.execute("SELECT name, value FROM settings").fetchall())
        is_sealed = version == FORMAT
        expected = saved.pop(SEAL) if is_sealed else None
        found = _decoded(saved)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise damaged(path, f"its settings are not what was written: {error!r}") from error
    digest = first_digest(found)
    first = connection.execute(f"SELECT {COLUMNS}, digest FROM rows WHERE seq = 1").fetchone()
    if first is not None:
        digest, expected = next_digest(digest, list(first[:-1])), first[-1]
    if digest != expected and (is_sealed or first is not None):
        raise damaged(path, "its settings or its first row are not what was written")
    return Made(found, is_sealed)


def seal_of_same_file(connection: sqlite3.Connection, path: Path, identity: str) -> str | None:
    """The seal, of which files of the version before have none.

    Raises:
        LedgerError: the file is another one than that with this identity.
    """
    wanted = "SELECT name, value FROM settings WHERE name IN ('id', ?)"
    found = dict(connection.execute(wanted, (SEAL,)).fetchall())
    if found.get("id") != json.dumps(identity):
        raise replaced(path)
    return found.get(SEAL)


def _decoded(saved: Mapping[Any, Any]) -> dict[str, Any]:
    """Settings that were read from a file.

    Raises:
        TypeError, ValueError: they are not what a ledger is made with.
    """
    found = {"unit": "record", **{name: json.loads(value) for name, value in saved.items()}}
    if set(found) != {"epsilon", "delta", "method", "neighboring", "unit", "id", "created"}:
        raise ValueError(f"they are {sorted(map(str, found))}")
    accounting_method(found["method"])
    neighboring_relation(found["neighboring"])
    privacy_unit(found["unit"])
    epsilon, delta = found["epsilon"], found["delta"]
    for number, largest in ((epsilon, math.inf), (delta, 1)):
        if number is not None and not (isinstance(number, float) and 0 < number < largest):
            raise ValueError(f"epsilon = {epsilon!r}, delta = {delta!r}")
    if not isinstance(found["id"], str) or (epsilon is not None and delta is None):
        raise ValueError(f"epsilon = {epsilon!r}, delta = {delta!r}, id = {found['id']!r}")
    return found
