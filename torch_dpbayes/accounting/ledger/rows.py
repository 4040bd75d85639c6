"""The lines of a ledger: charges, blocks and what they gave back."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, get_args

from .. import events
from ..choices import Neighboring
from ..events import DpEvent

Kind = Literal["charge", "block", "return", "plan", "filter"]
Flag = Literal["fixed", "adaptive", "registered"]
Key = tuple[DpEvent, str | None, Flag]


def checked_flag(flag: Any) -> Flag:
    """``flag`` if it is one: a misspelt one would pass for "fixed"."""
    if flag not in get_args(Flag):
        raise ValueError(f"a saved charge is one of {', '.join(get_args(Flag))}, got {flag!r}.")
    checked: Flag = flag
    return checked


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

    @classmethod
    def decoded(cls, values: list[Any], neighboring: Neighboring) -> Row:
        """The line that these columns say."""
        seq, moment, job, writer, later, kind, label, code, count, flag, block = values
        event = events.recorded(json.loads(code), neighboring) if code else None
        return cls(seq, moment, job, writer, bool(later), kind, label, event, count, flag, block)


class Entry(NamedTuple):
    """What is to become a row."""

    kind: Kind
    label: str | None
    event: DpEvent | None
    count: int  # type: ignore[assignment]
    flag: Flag
    block: int = 0
    job: str = ""  # whose it is; empty: of the job that writes it

    def encoded(self, seq: int, moment: str, job: str, writer: str, later: bool) -> list[Any]:
        """The columns of the row with number ``seq``."""
        code = "" if self.event is None else json.dumps(events.encode(self.event))
        whose = self.job or job
        line = [self.kind, self.label, code, self.count, self.flag, self.block]
        return [seq, moment, whose, writer, int(later), *line]


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


def charges(rows: Iterable[Row]) -> Counter[DpEvent]:
    """How often these rows charge each event."""
    found: Counter[DpEvent] = Counter()
    for row in rows:
        if row.event is not None and row.kind in ("charge", "block", "return"):
            found[row.event] += row.count
    return found
