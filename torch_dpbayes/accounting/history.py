"""What was charged: releases added up, with the guarantee that they are under."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from ..errors import DPBayesError
from . import bounds, renyi
from .choices import Method, Neighboring, Unit
from .events import DpEvent
from .filters import Budget, Filter
from .ledger import Flag, Key
from .pairs import Pair, dominating_pair, take

Guarantee = Literal["fixed", "registered", "filter", "none"]


class PrivacyBudgetExceeded(DPBayesError, RuntimeError):
    """A charge would have passed the budget. Nothing was recorded, and nothing may be released."""

    code = "budget-exceeded"


class Settings(NamedTuple):
    """What never changes."""

    budget: Budget | None
    method: Method
    neighboring: Neighboring
    unit: Unit = "record"


class Part(NamedTuple):
    """Releases of one elementary event, and the pair that dominates it."""

    event: DpEvent
    times: int
    pair: Pair


class History:
    """Charges and a registered schedule. What still fits is decided elsewhere.

    Attributes:
        charges: how often each event was charged, by label and flag.
        counts: the same by dominating pair.
        schedule: what was registered before the first release.
        schedule_left: of that what no process has taken.
        filter: the limit in force, if any.
        declared: whether the filter was there before the first release.
        later_jobs: whether a job charged that began after others had.
        first: what was released first, once.
        changes: grows whenever something above changes.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.charges: dict[Key, int] = {}
        self.counts: dict[Pair, int] = {}
        self.schedule: dict[Key, int] = {}
        self.schedule_left: dict[Pair, int] = {}
        self.filter: Filter | None = None
        self.declared = False
        self.later_jobs = False
        self.first: dict[Pair, int] = {}
        self.changes = 0

    @property
    def guarantee(self) -> Guarantee:
        """What a price is a bound for; see ``PrivacyAccountant``."""
        adaptive = any(flag == "adaptive" for _, _, flag in self.charges)
        if self.filter is not None and (not self.schedule or adaptive):
            return "filter"
        if self.schedule:
            return "registered"
        return "none" if self.later_jobs else "fixed"

    def pair(self, event: DpEvent) -> Pair:
        """The pair that dominates an elementary event here."""
        return dominating_pair(event, self.settings.neighboring)

    def price(self, counts: Mapping[Pair, int], delta: float) -> float:
        """Epsilon of releases that were fixed in advance."""
        if self.settings.method == "rdp":
            return renyi.upper_epsilon(counts, delta)
        return bounds.upper_epsilon(counts, delta)

    def guaranteed(self) -> Mapping[Pair, int]:
        """What the guarantee has to cover: what was charged, or all that is registered, of which a
        part was taken that may depend on outputs.
        """
        return self.scheduled() if self.schedule else self.counts

    def scheduled(self) -> dict[Pair, int]:
        """All that is registered."""
        return needed(
            Part(event, n, self.pair(event)) for (event, _, _), n in self.schedule.items()
        )

    def split(
        self, parts: Iterable[Part], left: Mapping[Pair, int]
    ) -> tuple[list[Part], list[Part]]:
        """The parts that ``left`` of the schedule covers, as the events registered there, and
        the others.
        """
        if not self.schedule:
            return [], list(parts)
        left = dict(left)
        scheduled = {self.pair(event): event for event, _, _ in self.schedule}
        registered: list[Part] = []
        rest: list[Part] = []
        for event, times, pair in parts:
            while times and (kept := take(left, pair, 1)) is not None:
                count = min(times, left[kept] + 1)
                left[kept] -= count - 1
                registered.append(Part(scheduled[kept], count, kept))
                times -= count
            if times:
                rest.append(Part(event, times, pair))
        return registered, rest

    def keep(self, part: Part, label: str | None, flag: Flag) -> None:
        """Adds up one more charge. A negative count takes back."""
        _change(self.charges, (part.event, label, flag), part.times)
        _change(self.counts, part.pair, part.times)
        self.changes += 1


def needed(parts: Iterable[Part]) -> dict[Pair, int]:
    """Parts added up by pair."""
    counts: dict[Pair, int] = {}
    for _, times, pair in parts:
        counts[pair] = counts.get(pair, 0) + times
    return counts


def _change(counts: dict[Any, int], key: Any, by: int) -> None:
    counts[key] = counts.get(key, 0) + by
    if not counts[key]:
        del counts[key]
