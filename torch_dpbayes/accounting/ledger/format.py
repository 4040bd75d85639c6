"""What is written in a ledger: its tables, its versions, and the digests that chain its rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

FORMAT = 2
UNSEALED = 1  # the format before the seal, which is read and written as it was
APPLICATION = 0x64706279
SEAL = "seal"
_UNIT_BEFORE = ("unit", "record")

COLUMNS = "seq, time, job, writer, later, kind, label, event, count, flag, block"
TABLES = (
    "CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    (
        "CREATE TABLE rows (seq INTEGER PRIMARY KEY, time TEXT NOT NULL, job TEXT NOT NULL, writer"
        " TEXT NOT NULL, later INTEGER NOT NULL, kind TEXT NOT NULL, label TEXT, event TEXT NOT"
        " NULL, count INTEGER NOT NULL, flag TEXT NOT NULL, block INTEGER NOT NULL, digest TEXT NOT"
        " NULL)"
    ),
    "CREATE UNIQUE INDEX returned_once ON rows (block) WHERE kind = 'return'",
)
NOTES = (  # made when first needed: files of earlier versions have none
    "CREATE TABLE IF NOT EXISTS notes (seq INTEGER PRIMARY KEY, time TEXT NOT NULL, "
    "job TEXT NOT NULL, text TEXT NOT NULL, digest TEXT NOT NULL)"
)


def written(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that stand in a file: the unit only where it is not the record, for all files
    of earlier versions.
    """
    return {name: value for name, value in settings.items() if (name, value) != _UNIT_BEFORE}


def first_digest(settings: Mapping[str, Any]) -> str:
    """What the first row's digest goes on from."""
    return _hashed(json.dumps(written(settings), sort_keys=True))


def next_digest(before: str, values: list[Any]) -> str:
    """The digest of a row or a note after the one with the digest ``before``."""
    return _hashed(before + json.dumps(values, default=repr))  # bytes, which are never written


def _hashed(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def now() -> str:
    """The moment, for people: nothing is ordered by it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
