"""How one process brings charges into a history that it keeps in memory; and what is the same where
a file keeps it, in ``ledger_charging``.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping

from .events import DpEvent
from .filters import Filter
from .history import History, Part, Settings, needed
from .ledger import Block, Entry, Flag, Key, Session
from .limits import Limits
from .pairs import Pair, added, covers
from .reservations import SHARE
from .search import MOST_STEPS


class Run:
    """Repetitions of one charge that need no decision any more: what they are taken out of,
    and how many are not in the history yet.
    """

    __slots__ = ("adaptive", "block", "event", "flag", "label", "part", "taken")

    def __init__(
        self,
        event: DpEvent,
        part: Part,
        label: str | None,
        adaptive: bool,
        flag: Flag,
        block: Block,
    ) -> None:
        self.event, self.part, self.label = event, part, label
        self.adaptive, self.flag, self.block, self.taken = adaptive, flag, block, 0


class Charging(ABC):
    """Brings charges into a history, as long as they fit the budget.

    Args:
        settings: budget, method and relation.

    Attributes:
        session: the process' place at a ledger; ``None`` in memory.
        process: which one this is.
        history: what was charged.
        limits: what still fits.
        stale: what is known may differ from the file, since reading or writing it was interrupted:
            begin anew.
    """

    session: Session | None = None

    def __init__(self, settings: Settings) -> None:
        self.process = os.getpid()
        self.history = History(settings)
        self.limits = Limits(self.history)
        self.stale = False

    # --- what differs between memory and a file ---------------------------------------------------

    @abstractmethod
    def charge(self, parts: list[Part], label: str | None, adaptive: bool) -> None:
        """Records the parts, or raises before anything is recorded."""

    @abstractmethod
    def enter(self, run: Run) -> None:
        """Records what was taken out of a run, also if this is interrupted."""

    @abstractmethod
    def _certain(self, part: Part, label: str | None, flag: Flag) -> Block | None:
        """What repetitions of ``part`` can be taken out of without a decision."""

    @abstractmethod
    def refresh(self) -> None:
        """Takes in what other processes charged."""

    @abstractmethod
    def settle(self) -> None:
        """Gives back what the open blocks did not use."""

    @abstractmethod
    def _write(self, entries: list[Entry]) -> bool:
        """Keeps rows that no block was opened for; ``False``: others wrote first, and nothing
        happened.
        """

    @property
    def is_later(self) -> bool:
        """Whether this job began after others had charged."""
        return self.session is not None and self.session.later

    def open_registered(self) -> dict[Pair, int]:
        """What is left of the registered schedule for this process, its own open blocks
        included.
        """
        return {pair: count for pair, count in self.history.schedule_left.items() if count}

    # --- what does not ----------------------------------------------------------------------------

    def committed(self) -> dict[Pair, int]:
        """What was charged, and what is registered and was not charged yet."""
        return added(self.history.counts, self.open_registered())

    def used_share(self) -> float:
        """How much of the filter's limit is used."""
        return self.limits.used_share(self.committed())

    def remaining(self, need: Mapping[Pair, int]) -> int | None:
        """How many times ``need`` still fits; ``None`` without a budget."""
        beside = self.limits.remaining(self.committed(), need, self.is_later)
        if beside is None:
            return None
        covered = 0
        if len(need) == 1:
            ((pair, count),) = need.items()
            registered = self.open_registered()
            covered = sum(left // count for kept, left in registered.items() if covers(kept, pair))
        return covered + beside

    def run(self, event: DpEvent, part: Part, label: str | None, adaptive: bool) -> Run | None:
        """What the next charges like this one may be taken out of, if it is worth it. Any
        other charge ends it.
        """
        flag = self._flag(adaptive)
        block = self._certain(part, label, flag)
        if block is None or block.left < SHARE:
            return None
        return Run(event, part, label, adaptive, flag, block)

    def _flag(self, adaptive: bool) -> Flag:
        return "adaptive" if adaptive or self.is_later else "fixed"

    def register(self, parts: list[Part]) -> None:
        """Fixes what may be released without a filter, before the first release."""
        schedule: dict[Key, int] = {}
        for event, times, _ in parts:
            key: Key = event, None, "registered"
            schedule[key] = schedule.get(key, 0) + times
        while True:
            self.refresh()
            if self.history.schedule == schedule:
                return
            self.limits.check_schedule(parts)
            if self._write(_registering(schedule)):
                self.adopt(schedule)
                return

    def adopt(self, schedule: Mapping[Key, int]) -> None:
        """Takes charges out of this schedule from now on."""
        history = self.history
        history.schedule = dict(schedule)
        history.schedule_left = history.scheduled()
        # whatever is not registered has to fit a filter beside all that is
        if history.settings.budget is not None:
            rule = Filter.renyi(history.settings.budget, history.scheduled())
            self.limits.start(rule, True, self.committed())

    def load(
        self,
        parts: list[tuple[Part, str | None, Flag, str]],
        schedule: dict[Key, int],
        rule: Filter | None,
        slack: float,
    ) -> None:
        """Takes over a history, into an empty one: parts with their label, flag and job (empty:
        this one).

        ``slack``: the ratio by which it may pass the budget.
        """
        history, limits = self.history, self.limits
        if not schedule:
            limits.check_saved(needed(part for part, *_ in parts), rule, slack)
        entries = _registering(schedule)
        if rule is not None:
            entries.append(Entry("filter", rule.code, None, 0, "adaptive"))
        entries += [
            Entry("charge", label, part.event, part.times, flag, job=job)
            for part, label, flag, job in parts
        ]
        if not self._write(entries):
            raise ValueError(
                "another process charged this ledger in the meantime: it is not empty any more,"
                " so nothing was loaded. Take a new ledger."
            )
        if schedule:
            self.adopt(schedule)
        for part, label, flag, _ in parts:
            history.first = history.first or {part.pair: 1}
            history.keep(part, label, flag)
            if flag == "registered" and schedule:
                history.schedule_left[part.pair] -= part.times
        if rule is not None:
            limits.start(rule, True, self.committed())
        elif limits.admission is not None:
            limits.admission.restart(self.committed())


class ChargingInMemory(Charging):
    """A history that ends with its process."""

    def charge(self, parts: list[Part], label: str | None, adaptive: bool) -> None:
        history, limits, flag = self.history, self.limits, self._flag(adaptive)
        registered, rest = history.split(parts, history.schedule_left)
        if need := needed(rest):
            flag = "adaptive" if history.schedule else flag
            rule = limits.rule(need, adaptive, is_later=False)
            committed = self.committed() if history.schedule else history.counts
            with limits.provisionally(rule, True, committed):
                if limits.admission is not None and not limits.admission.admits(committed, need):
                    limits.refuse(committed, rest)
        for part in registered:
            history.schedule_left[part.pair] -= part.times
            history.keep(part, label, "registered")
        for part in rest:
            if limits.admission is not None:
                limits.admission.spend(part.pair, part.times)
            history.keep(part, label, flag)

    def _certain(self, part: Part, label: str | None, flag: Flag) -> Block:
        admission = self.limits.admission
        certain = MOST_STEPS if admission is None else admission.certain(part.pair)
        return Block(0, (part.event, label, flag), 0 if self.history.schedule else certain)

    def enter(self, run: Run) -> None:
        """An interruption must not lose it: then it is recorded twice."""
        part, admission = run.part._replace(times=run.taken), self.limits.admission
        if not run.taken:
            return
        if admission is not None:
            admission.take({part.pair: part.times}, 1)
            admission.spend(part.pair, part.times)
        self.history.keep(part, run.label, run.flag)
        run.taken = 0

    def refresh(self) -> None:
        """No other process charges it."""

    def settle(self) -> None:
        """Nothing is reserved."""

    def _write(self, entries: list[Entry]) -> bool:
        return True


def _registering(schedule: Mapping[Key, int]) -> list[Entry]:
    return [Entry("plan", None, event, n, "registered") for (event, _, _), n in schedule.items()]
