"""An accountant's history as plain strings, numbers, lists and dicts, and back."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from . import events
from .choices import Method, Neighboring, Unit
from .events import DpEvent
from .history import History
from .ledger import Flag, Key, Ledger, checked_flag

Jobs = dict[str, Counter[DpEvent]]  # how often each job charged each event


class Line(NamedTuple):
    """Releases of one event by one job, which is empty where a ledger knows it."""

    event: DpEvent
    count: int  # type: ignore[assignment]
    label: str | None
    flag: Flag
    job: str


class SavedState(NamedTuple):
    """What :func:`written` put into a state, checked.

    Attributes:
        lines: the history.
        jobs: what each job charged; nothing where a ledger knows it.
        names_jobs: whether the state says so itself. Those of earlier versions do not.
        schedule: what was registered.
        filter: its code.
        budget: epsilon and delta, or nothing.
        ledger: the file that the state belongs to, or empty.
        place: how far that file was read.
        notes: statements on which the guarantee rests.
    """

    lines: list[Line]
    jobs: Jobs
    names_jobs: bool
    schedule: dict[Key, int]
    filter: str
    budget: list[float]
    ledger: str
    place: list[Any] | None
    notes: list[str]

    @property
    def is_adaptive(self) -> bool:
        """Whether the guarantee rests on the budget that was there at the start."""
        return bool(self.schedule) or any(line.flag == "adaptive" for line in self.lines)

    def require_in(self, ledger: Ledger | None) -> None:
        """Raises unless this is the file that the state belongs to, and holds what was saved."""
        if ledger is None or ledger.id != self.ledger:
            raise ValueError(
                "the saved history belongs to a ledger file, which goes on counting: open that"
                " file, PrivacyAccountant(path=...), and hand it to whatever resumes."
            )
        if not self.lines:
            return
        if self.place is None:
            raise ValueError(
                f"this state, of an earlier version, does not say how far the ledger {ledger.path}"
                " was read: unless the file was restored from a copy, go on from the saved"
                " parameters with a new optimizer."
            )
        saved: Counter[DpEvent] = Counter()
        for line in self.lines:
            saved[line.event] += line.count
        held = ledger.charged_until(self.place)
        if held is None or saved - held:
            raise ValueError(
                f"the ledger {ledger.path} holds less than the saved run was charged for: it was"
                " restored from an older copy. Put the newer file back."
            )


def written(
    history: History, jobs: Jobs, ledger: Ledger | None, notes: list[str]
) -> dict[str, Any]:
    """The state of an accountant."""
    settings, rule = history.settings, history.filter
    return {
        "method": settings.method,
        "neighboring": settings.neighboring,
        "unit": settings.unit,
        "filter": rule.code if rule is not None and not history.schedule else "",
        "budget": list(settings.budget or ()),
        "history": [
            [events.encode(event), float(count), label or "", flag]
            for (event, label, flag), count in history.charges.items()
        ],
        "registered": _encoded({event: n for (event, _, _), n in history.schedule.items()}),
        "ledger": "" if ledger is None else ledger.id,
        "place": [] if ledger is None else ledger.place,
        "jobs": {job: _encoded(counts) for job, counts in jobs.items()},
        "notes": notes,
    }


def _encoded(counts: Mapping[DpEvent, int]) -> list[list[Any]]:
    return [[events.encode(event), float(count)] for event, count in counts.items()]


def read(
    state: Mapping[str, Any], method: Method, neighboring: Neighboring, unit: Unit = "record"
) -> SavedState:
    """A state, for an accountant of this method, relation and unit.

    Raises:
        ValueError: it is none, has other settings, or was changed.
    """
    missing = {"method", "neighboring", "filter", "budget", "history"} - set(state)
    if missing:
        raise ValueError(
            f"this is not the state of a PrivacyAccountant: {sorted(missing)} missing. Load what"
            " state_dict() returned."
        )
    settings = {"unit": "record", **state}  # states of earlier versions do not say it
    for name, own in (("method", method), ("neighboring", neighboring), ("unit", unit)):
        if settings[name] != own:
            raise ValueError(
                f"the saved accountant has {name}={settings[name]!r}, this one {own!r}: their"
                " numbers mean different things. Make this accountant with the saved setting."
            )
    decode = partial(events.recorded, neighboring=neighboring)
    lines = [
        Line(decode(code), events.positive_count(int(n)), label or None, checked_flag(flag), "")
        for code, n, label, flag in state["history"]
    ]
    jobs: Jobs = {}
    if not state.get("ledger"):
        # In a state of an earlier version the releases are nobody's: of a job that no other state
        # names.
        nobody = {uuid.uuid4().hex: [line[:2] for line in state["history"]]}
        for job, counts in state.get("jobs", nobody).items():
            jobs[job] = Counter()
            for code, count in counts:
                jobs[job][decode(code)] += int(count)
        lines = _by_jobs(lines, jobs)
    schedule: dict[Key, int] = {
        (decode(code), None, "registered"): int(count)
        for code, count in state.get("registered", [])
    }
    return SavedState(
        lines=lines,
        jobs=jobs,
        names_jobs="jobs" in state,
        schedule=schedule,
        filter=state["filter"],
        budget=list(state["budget"]),
        ledger=str(state.get("ledger", "")),
        place=state.get("place"),
        notes=list(state.get("notes", [])),
    )


def _by_jobs(lines: list[Line], jobs: Jobs) -> list[Line]:
    """The lines divided among the jobs that charged them."""
    left = {job: counts.copy() for job, counts in jobs.items()}
    shares: list[Line] = []
    nobodys = 0
    for line in lines:
        count = line.count
        for job, counts in left.items():
            if share := min(count, counts[line.event]):
                shares.append(line._replace(count=share, job=job))
                counts[line.event] -= share
                count -= share
        nobodys += count
    if nobodys or any(counts.total() for counts in left.values()):
        raise ValueError(
            "this state's history is not the sum of what its jobs charged: it was changed. Load it"
            " as it was saved."
        )
    return shares
