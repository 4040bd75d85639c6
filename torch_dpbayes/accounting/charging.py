"""How one process charges: in memory, or against a file that others charge too."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

from .admission import Admission
from .events import DpEvent, lowered
from .failures import without_delta
from .filters import Filter
from .history import History, Part, PrivacyBudgetExceeded, Settings, needed
from .ledger import Block, Entry, Flag, Key, Row, Session
from .pairs import Failure, Gaussian, NonPrivate, Pair, added, covers
from .reservations import SHARE, Reservations
from .search import MOST_STEPS

_NOTHING = "Nothing was recorded; release nothing."


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


class Charging:
    """Brings charges into a history, as long as they fit the budget.

    Args:
        settings: budget, method and relation.
        session: the process' place at a ledger, or ``None`` for a history in memory.
    """

    def __init__(self, settings: Settings, session: Session | None) -> None:
        self.settings, self.session = settings, session
        self.process = os.getpid()
        self.history = History(settings)
        # what is known may differ from the file, since reading or writing it was interrupted: begin
        # anew
        self.stale = False
        self._reservations = None if session is None else Reservations(session, self.history)
        budget, method = settings.budget, settings.method
        self._admission = None if budget is None else Admission(budget, method)

    @property
    def is_later(self) -> bool:
        """Whether this job began after others had charged."""
        return self.session is not None and self.session.later

    def used_share(self) -> float:
        """How much of the filter's limit is used."""
        rule = self.history.filter
        assert rule is not None
        return rule.cost(self._committed()) / rule.limit

    def open_registered(self) -> dict[Pair, int]:
        """What is left of the registered schedule for this process, its own open blocks
        included.
        """
        left = self.history.schedule_left
        if self._reservations is not None:
            left = added(left, self._reservations.left(self._reservations.registered))
        return {pair: count for pair, count in left.items() if count}

    def remaining(self, need: Mapping[Pair, int]) -> int | None:
        """How many times ``need`` still fits; ``None`` without a budget."""
        if self._admission is None:
            return None
        registered, covered = self.open_registered(), 0
        if len(need) == 1:
            ((pair, count),) = need.items()
            covered = sum(left // count for kept, left in registered.items() if covers(kept, pair))
        admission = self._admission
        if self.history.filter is None and self.is_later:
            admission = self._under(self._filter_of_budget())
        return covered + admission.remaining(self._committed(), need)

    def _committed(self) -> dict[Pair, int]:
        """What was charged, and what is registered and was not charged yet."""
        return added(self.history.counts, self.open_registered())

    # --- charging ---------------------------------------------------------------------------------

    def charge(self, parts: list[Part], label: str | None, adaptive: bool) -> None:
        """Records the parts, or raises before anything is recorded."""
        flag: Flag = "adaptive" if adaptive or self.is_later else "fixed"
        if self.session is not None and self._reservations is not None:
            if adaptive and not self.is_later:
                # refuses where a filter cannot begin, whatever open blocks would cover
                self._rule(needed(parts), adaptive)
            while (found := self._reservations.cover(parts)) is None:
                self._reserve(self.session, self._reservations, parts, label, flag)
            for block, part in found:
                block.left -= part.times
                self._taken(self._reservations, block, part, label, flag)
            return
        history = self.history
        registered, rest = history.split(parts, history.schedule_left)
        if need := needed(rest):
            flag = "adaptive" if history.schedule else flag
            with self._provisionally(self._rule(need, adaptive)):
                counts = self._committed() if history.schedule else history.counts
                if self._admission is not None and not self._admission.admits(counts, need):
                    self._refuse(need)
        for part in registered:
            history.schedule_left[part.pair] -= part.times
            history.keep(part, label, "registered")
        for part in rest:
            if self._admission is not None:
                self._admission.spend(part.pair, part.times)
            history.keep(part, label, flag)

    def run(self, event: DpEvent, part: Part, label: str | None, adaptive: bool) -> Run | None:
        """What the next charges like this one may be taken out of, if it is worth it. Any
        other charge ends it.
        """
        flag: Flag = "adaptive" if adaptive or self.is_later else "fixed"
        if self._reservations is not None:
            block = self._reservations.covering(part.pair, {})
        else:
            certain = MOST_STEPS if self._admission is None else self._admission.certain(part.pair)
            block = Block(0, (part.event, label, flag), 0 if self.history.schedule else certain)
        if block is None or block.left < SHARE:
            return None
        return Run(event, part, label, adaptive, flag, block)

    def enter(self, run: Run) -> None:
        """Records what was taken. An interruption must not lose it: then the file tells, or
        in memory it is recorded twice.
        """
        part = run.part._replace(times=run.taken)
        if run.taken and self._reservations is not None:
            was_stale = self.stale
            self.stale, run.taken = True, 0
            self._taken(self._reservations, run.block, part, run.label, run.flag)
            self.stale = was_stale
        elif run.taken:
            if self._admission is not None:
                self._admission.take({part.pair: part.times}, 1)
                self._admission.spend(part.pair, part.times)
            self.history.keep(part, run.label, run.flag)
            run.taken = 0

    def _refuse(self, need: Mapping[Pair, int]) -> NoReturn:
        assert self.settings.budget is not None and self._admission is not None
        rule, (epsilon, delta) = self.history.filter, self.settings.budget
        if any(isinstance(pair, NonPrivate) for pair in need):
            raise PrivacyBudgetExceeded(
                "a release without noise (z = 0) has no finite epsilon and fits no budget: use a"
                f" positive noise multiplier, or an accountant without a budget. {_NOTHING}"
            )
        if rule is not None and any(isinstance(pair, Failure) for pair in need):
            raise PrivacyBudgetExceeded(
                "a release that may fail outright fits no filter, and what is adaptive, not"
                " registered or of a later job needs one: charge it to an accountant of its own, or"
                f" register it first. {_NOTHING}"
            )
        if why := without_delta(added(self._committed(), need), delta):
            raise PrivacyBudgetExceeded(f"{why} {_NOTHING}")
        times = sum(need.values())
        fit = "not one more fits"
        if times > 1:
            left = self._admission.remaining(self._committed(), dict.fromkeys(need, 1))
            fit = f"{left} of these would still fit"
        under = ""
        if rule is not None:
            why = "the charges were declared adaptive" if self.history.declared else _LATER
            under = f" {self.used_share():.1%} of {rule.describe()} is used, which counts: {why}."
        raise PrivacyBudgetExceeded(
            f"charging {times} x {', '.join(map(str, need))} would pass the budget epsilon ="
            f" {epsilon:g} at delta = {delta:g}; {fit}. {_NOTHING} Plan with fewer steps, more"
            f" noise or a smaller sampling rate (get_noise_multiplier).{under}"
        )

    # --- filters and registered schedules ---------------------------------------------------------

    def _rule(self, need: Mapping[Pair, int], adaptive: bool) -> Filter | None:
        """The filter that this charge puts into force, or ``None``."""
        history, budget = self.history, self.settings.budget
        if history.filter is not None or history.schedule or not (adaptive or self.is_later):
            return None
        if self.is_later:
            if budget is None:
                return None
            rule = self._filter_of_budget()
            if (cost := rule.cost(history.counts)) > rule.limit:
                assert self.session is not None
                raise PrivacyBudgetExceeded(
                    f"a job used {cost / rule.limit:.1%} of what later jobs may find in the ledger"
                    f" {self.session.ledger.path} ({rule.describe()}). {_NOTHING} In a new ledger"
                    " register the schedule of all jobs, or charge with adaptive=True from the"
                    " start."
                )
            return rule
        if budget is None:
            raise ValueError(
                "adaptive=True needs a budget: parameters chosen from earlier outputs are private"
                " only against a limit that was fixed before. Write"
                " PrivacyAccountant(epsilon=..., delta=...)."
            )
        if history.counts:
            raise ValueError(
                "this accountant already holds charges that were not adaptive, and becoming"
                " adaptive would be a choice made after seeing outputs: charge with adaptive=True"
                " from the first charge on, in a new accountant."
            )
        if all(isinstance(pair, Gaussian) for pair in need):
            return Filter.gaussian(budget)
        return Filter.renyi(budget, need)

    def _filter_of_budget(self) -> Filter:
        """The filter for later jobs: a function of the budget and of the first release, which
        were there before any output.
        """
        assert self.settings.budget is not None
        return Filter.renyi(self.settings.budget, self.history.first)

    def _under(self, rule: Filter) -> Admission:
        """Everything that was charged or registered counted against ``rule``."""
        assert self.settings.budget is not None
        admission = Admission(self.settings.budget, self.settings.method, rule)
        admission.restart(self._committed())
        return admission

    def _start(self, rule: Filter, declared: bool) -> None:
        history = self.history
        self._admission, history.filter, history.declared = self._under(rule), rule, declared
        history.changes += 1

    @contextmanager
    def _provisionally(self, rule: Filter | None) -> Iterator[None]:
        """Under ``rule``, which stays in force unless there is an exception."""
        history = self.history
        before = self._admission, history.filter, history.declared
        if rule is not None:
            self._start(rule, declared=not self.is_later)
        try:
            yield
        except BaseException:
            self._admission, history.filter, history.declared = before
            raise

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
            if self.history.schedule or self.history.counts or self.history.filter is not None:
                had = self.history.schedule
                what = "another schedule is registered" if had else "something was charged"
                raise ValueError(
                    f"{what} already, and a schedule has to be fixed before the first release:"
                    " register it in a new accountant."
                )
            if self.settings.budget is None:
                raise ValueError(
                    "a schedule is registered against a budget: write PrivacyAccountant("
                    "epsilon=..., delta=...)."
                )
            epsilon, delta = self.settings.budget
            if (cost := self.history.price(needed(parts), delta)) > epsilon:
                if math.isinf(cost) and (why := without_delta(needed(parts), delta)):
                    raise PrivacyBudgetExceeded(
                        f"the schedule costs more than the budget. {why} Nothing was registered."
                    )
                raise PrivacyBudgetExceeded(
                    f"the schedule costs epsilon = {cost:.4g} at delta = {delta:g}, more than the"
                    f" budget {epsilon:g}. Nothing was registered. Register fewer steps, or more"
                    " noise (torch_dpbayes.get_noise_multiplier)."
                )
            if self.session is None or self._write(self.session, _registering(schedule)):
                self._adopt(schedule)
                return

    def _adopt(self, schedule: Mapping[Key, int]) -> None:
        self.history.schedule = dict(schedule)
        self.history.schedule_left = self.history.scheduled()
        # whatever is not registered has to fit a filter beside all that is
        if self.settings.budget is not None:
            rule = Filter.renyi(self.settings.budget, self.history.scheduled())
            self._start(rule, declared=True)

    # --- the file ---------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Takes in what other processes charged."""
        if self.session is None:
            return
        self.stale = True
        rows = self.session.read()
        if rows:
            self._take_in(rows)
        self.stale = False

    def _take_in(self, rows: list[Row]) -> None:
        history = self.history
        history.changes += 1
        schedule = {row.key: row.count for row in rows if row.kind == "plan"}
        if schedule:
            self._adopt(schedule)
        net: dict[Pair, int] = {}
        rule: Filter | None = None
        declared = False
        for row in rows:
            if row.kind == "filter":
                rule = Filter.decoded(row.label or "", self.settings.budget)
                declared = row.flag == "adaptive"
            if row.kind in ("filter", "plan"):
                continue
            event, label, flag = row.key
            part = Part(event, row.count, history.pair(event))
            history.first = history.first or {part.pair: 1}
            history.later_jobs |= row.later
            history.keep(part, label, flag)
            if flag == "registered":
                history.schedule_left[part.pair] = (
                    history.schedule_left.get(part.pair, 0) - part.times
                )
            else:
                net = added(net, {part.pair: part.times})
        if rule is not None and history.filter is None:
            self._start(rule, declared)
        elif self._admission is not None:
            net = {pair: count for pair, count in net.items() if count}
            self._admission.others_spent(self._committed(), net)

    def _taken(
        self,
        reservations: Reservations,
        block: Block,
        part: Part,
        label: str | None,
        flag: Flag,
    ) -> None:
        reservations.made(part)
        if block.key[2] == "registered":
            part = Part(block.key[0], part.times, reservations.pair(block))
            flag = "registered"
        else:
            flag = "adaptive" if self.history.schedule else flag
            if self._admission is not None:
                self._admission.spend(part.pair, part.times)
        key = part.event, label, flag
        block.used[key] = block.used.get(key, 0) + part.times
        self.history.keep(part, label, flag)

    def _reserve(
        self,
        session: Session,
        reservations: Reservations,
        parts: list[Part],
        label: str | None,
        flag: Flag,
    ) -> None:
        """Opens blocks that cover ``parts``, or raises."""
        history = self.history
        committed = False
        while not committed:
            self.refresh()
            pairs = [part.pair for part in parts]
            finished = [
                block
                for block in session.blocks
                if block.key[2] == "registered" or reservations.is_finished(block, pairs)
            ]
            left = self.open_registered()  # for that blocks are given back
            registered, rest = history.split(parts, left)
            rule = self._rule(needed(rest), flag == "adaptive") if rest else None
            origin: Flag = "fixed" if self.is_later else "adaptive"
            also = [] if rule is None else [Entry("filter", rule.code, None, 0, origin)]
            try:
                with self._provisionally(rule):
                    wanted = self._registered_blocks(reservations, registered, label, left)
                    kind: Flag = "adaptive" if history.schedule else flag
                    wanted += self._blocks(reservations, rest, label, kind, finished)
                    self.stale = True
                    committed = session.commit(wanted, finished, also)
                    if not committed:
                        raise _Outrun
            except _Outrun:
                self.stale = False
                continue
            history.first = history.first or {parts[0].pair: 1}
            history.later_jobs |= session.later
            for block in finished:
                self._is_settled(reservations, block)
            for (event, _, kind), count in wanted:
                pair = history.pair(event)
                if kind == "registered":
                    history.schedule_left[pair] -= count
                elif self._admission is not None:
                    self._admission.take({pair: count}, 1)
            self.stale = False

    def _is_settled(self, reservations: Reservations, block: Block) -> None:
        pair = reservations.pair(block)
        if block.key[2] == "registered":
            self.history.schedule_left[pair] += block.left
        elif self._admission is not None:
            self._admission.reserved(pair, fell_through=block.left > 0)

    def _registered_blocks(
        self,
        reservations: Reservations,
        parts: list[Part],
        label: str | None,
        left: Mapping[Pair, int],
    ) -> list[tuple[Key, int]]:
        if not parts:
            return []
        fit = min(left[pair] // count for pair, count in needed(parts).items())
        size = max(1, min(reservations.size(parts), fit // SHARE))
        return _blocks_of(parts, size, label, "registered")

    def _blocks(
        self,
        reservations: Reservations,
        parts: list[Part],
        label: str | None,
        flag: Flag,
        finished: list[Block],
    ) -> list[tuple[Key, int]]:
        """Blocks for ``parts``. May add to ``finished`` what has to be given back."""
        if not parts:
            return []
        size = reservations.size(parts)
        if self._admission is None:
            return _blocks_of(parts, size, label, flag)
        need, fit = needed(parts), 0
        counts = self._committed() if self.history.schedule else self.history.counts
        while not fit:
            others = [
                block
                for block in reservations.session.blocks
                if block not in finished and block.left and block.key[2] != "registered"
            ]
            reserved = reservations.left(others)
            lower = [self._lowered(part, self._admission) for part in parts]
            if fit := self._admission.room(counts, reserved, needed(lower), SHARE * size):
                parts = lower
            elif not (fit := self._admission.room(counts, reserved, need, SHARE * size)):
                if not others:
                    self._refuse(need)
                finished += others
        return _blocks_of(parts, max(1, min(size, fit // SHARE)), label, flag)

    def _lowered(self, part: Part, admission: Admission) -> Part:
        """What covers ``part`` and what may follow it where noise falls."""
        slack = admission.slack(part.pair)
        if slack == 1:
            return part
        event = lowered(part.event, slack)
        return Part(event, part.times, self.history.pair(event))

    def _write(self, session: Session, entries: list[Entry]) -> bool:
        self.stale = True
        written = session.commit([], also=entries)
        self.stale = False
        return written

    def settle(self) -> None:
        """Gives back what the open blocks did not use."""
        if self.session is None or self._reservations is None:
            return
        blocks, was_stale, self.stale = list(self.session.blocks), self.stale, True
        self.session.settle()
        for block in blocks:
            if block.key[2] == "registered":
                self.history.schedule_left[self._reservations.pair(block)] += block.left
        self.stale = was_stale

    # --- saved histories --------------------------------------------------------------------------

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
        history, counts = self.history, needed(part for part, *_ in parts)
        if self.settings.budget is not None and counts and not schedule:
            epsilon, delta = self.settings.budget
            fits = (
                history.price(counts, delta) <= epsilon * slack
                if rule is None
                else rule.cost(counts) <= rule.limit * (1 + 1e-9)
            )
            if not fits:
                raise PrivacyBudgetExceeded(
                    "the saved history costs more than this accountant's budget, epsilon ="
                    f" {epsilon:g} at delta = {delta:g}. Nothing was loaded. Load it into an"
                    " accountant with the budget that it was made with."
                )
        if self.session is not None:
            entries = _registering(schedule)
            if rule is not None:
                entries.append(Entry("filter", rule.code, None, 0, "adaptive"))
            entries += [
                Entry("charge", label, part.event, part.times, flag, job=job)
                for part, label, flag, job in parts
            ]
            if not self._write(self.session, entries):
                raise ValueError(
                    "another process charged this ledger in the meantime: it is not empty any more,"
                    " so nothing was loaded. Take a new ledger."
                )
        if schedule:
            self._adopt(schedule)
        for part, label, flag, _ in parts:
            history.first = history.first or {part.pair: 1}
            history.keep(part, label, flag)
            if flag == "registered" and schedule:
                history.schedule_left[part.pair] -= part.times
        if rule is not None:
            self._start(rule, declared=True)
        elif self._admission is not None:
            self._admission.restart(self._committed())


_LATER = "this job or another began after others had charged, whose outputs it may depend on"


class _Outrun(Exception):
    """Another process committed first."""


def _registering(schedule: Mapping[Key, int]) -> list[Entry]:
    return [Entry("plan", None, event, n, "registered") for (event, _, _), n in schedule.items()]


def _blocks_of(
    parts: list[Part], size: int, label: str | None, flag: Flag
) -> list[tuple[Key, int]]:
    wanted: dict[Key, int] = {}
    for part in parts:
        key: Key = part.event, label, flag
        wanted[key] = wanted.get(key, 0) + size * part.times
    return list(wanted.items())
