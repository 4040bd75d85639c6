"""What one process knows of a history, and how it charges: in memory, or against a file that
others charge too.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, NoReturn

from . import bounds, events, failures, pairs, renyi
from .choices import Method, Neighboring
from .events import DpEvent
from .headroom import Filter, Headroom, take
from .ledger import Block, Entry, Flag, Key, Row, Session
from .pairs import Failure, Gaussian, NonPrivate, Pair, added, covers

_LARGEST_BLOCK = 8192  # steps
_GROWTH = 4
# how long a block should last: what a crash costs, against what a commit costs
_SECONDS = (1.0, 10.0)
_SHARE = 8  # a block takes at most one part in so many of what is left

Guarantee = Literal["fixed", "registered", "filter", "none"]
Part = tuple[DpEvent, int, Pair]


class PrivacyBudgetExceeded(RuntimeError):
    """A charge would have passed the budget. Nothing was recorded, and nothing may be released."""


class Settings(NamedTuple):
    """What never changes. ``budget``: (epsilon, delta), or ``None``."""

    budget: tuple[float, float] | None
    method: Method
    neighboring: Neighboring


class Run:
    """Repetitions of one charge that need no decision any more: what they are taken out of,
    and how many are not in the book yet.
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
        self.event, self.part, self.label, self.adaptive, self.flag, self.block, self.taken = (
            event,
            part,
            label,
            adaptive,
            flag,
            block,
            0,
        )


class Book:
    """Charges, added up, with the guarantee that they are under and what is left of the budget.

    Args:
        settings: budget, method and relation.
        session: the process' place at a ledger, or ``None`` for a history in memory.
    """

    def __init__(self, settings: Settings, session: Session | None) -> None:
        self.settings, self.session = settings, session
        self.process = os.getpid()
        self.charges: dict[Key, int] = {}
        self.counts: dict[Pair, int] = {}
        self.plan: dict[Key, int] = {}
        self.filter: Filter | None = None
        self.declared = False  # the filter was there before the first release
        self.later_jobs = False  # a job charged that began after others had
        self.changes = 0
        # what is known may differ from the file, since reading or writing it was interrupted: begin
        # anew
        self.stale = False
        self._plan_left: dict[Pair, int] = {}
        self._first: dict[Pair, int] = {}
        self._headroom = (
            None if settings.budget is None else Headroom(*settings.budget, settings.method)
        )
        # of each kind of event how large the last one was, and when it was opened
        self._blocks: dict[type, tuple[int, float]] = {}

    @property
    def guarantee(self) -> Guarantee:
        if self.filter is not None and (
            not self.plan or any(flag == "adaptive" for _, _, flag in self.charges)
        ):
            return "filter"
        if self.plan:
            return "registered"
        return "none" if self.later_jobs else "fixed"

    @property
    def is_later(self) -> bool:
        """Whether this job began after others had charged."""
        return self.session is not None and self.session.later

    def pair(self, event: DpEvent) -> Pair:
        return pairs.dominating_pair(event, self.settings.neighboring)

    def price(self, counts: Mapping[Pair, int], delta: float) -> float:
        """Epsilon of releases that were fixed in advance."""
        if self.settings.method == "rdp":
            return renyi.upper_epsilon(counts, delta)
        return bounds.upper_epsilon(counts, delta)

    def guaranteed(self) -> Mapping[Pair, int]:
        """What the guarantee has to cover: what was charged, or all that is registered, for
        which part was taken may depend on outputs.
        """
        return self._planned() if self.plan else self.counts

    def used_share(self) -> float:
        """How much of the filter's limit is used."""
        assert self.filter is not None
        return self.filter.cost(self._committed()) / self.filter.limit

    def open_registered(self) -> dict[Pair, int]:
        """What is left of the registered schedule for this process, its own open blocks
        included.
        """
        left = dict(self._plan_left)
        for block in self.session.blocks if self.session is not None else []:
            if block.key[2] == "registered" and block.open:
                pair = self._block_pair(block)
                left[pair] = left.get(pair, 0) + block.left
        return {pair: count for pair, count in left.items() if count}

    def remaining(self, need: Mapping[Pair, int]) -> int | None:
        """How many times ``need`` still fits; ``None`` without a budget."""
        if self._headroom is None:
            return None
        registered, covered = self.open_registered(), 0
        if len(need) == 1:
            ((pair, count),) = need.items()
            covered = sum(left // count for kept, left in registered.items() if covers(kept, pair))
        headroom = self._headroom
        if self.filter is None and self.is_later:
            headroom = self._as_filter(self._filter_of_budget())
        return covered + headroom.remaining(self._committed(), need)

    def _planned(self) -> dict[Pair, int]:
        counts: dict[Pair, int] = {}
        for (event, _, _), count in self.plan.items():
            counts = added(counts, {self.pair(event): count})
        return counts

    def _committed(self) -> dict[Pair, int]:
        """What was charged, and what is registered and was not charged yet."""
        return added(self.counts, self.open_registered())

    # --- charging ---------------------------------------------------------------------------------

    def charge(self, parts: list[Part], label: str | None, adaptive: bool) -> None:
        """Records the parts, or raises before anything is recorded."""
        flag: Flag = "adaptive" if adaptive or self.is_later else "fixed"
        if self.session is not None:
            if adaptive and not self.is_later:
                # refuses where a filter cannot begin, whatever open blocks would cover
                self._rule(_need(parts), adaptive)
            while not self._take_from_blocks(self.session, parts, label, flag):
                self._reserve(self.session, parts, label, flag)
            return
        registered, rest = self._split(parts, self._plan_left)
        if need := _need(rest):
            flag = "adaptive" if self.plan else flag
            with self._provisionally(self._rule(need, adaptive)):
                if self._headroom is not None and not self._headroom.admits(
                    self._committed() if self.plan else self.counts, need
                ):
                    self._refuse(need)
        for event, times, pair in registered:
            self._plan_left[pair] -= times
            self._keep(event, label, "registered", times, pair)
        for event, times, pair in rest:
            if self._headroom is not None:
                self._headroom.spend(pair, times)
            self._keep(event, label, flag, times, pair)

    def run(self, event: DpEvent, part: Part, label: str | None, adaptive: bool) -> Run | None:
        """What the next charges like this one may be taken out of, if it is worth it. Any
        other charge ends it.
        """
        flag: Flag = "adaptive" if adaptive or self.is_later else "fixed"
        if self.session is not None:
            block = self._covering(self.session, part[2], {})
        else:
            certain = (
                0
                if self.plan
                else _LARGEST_BLOCK
                if self._headroom is None
                else self._headroom.certain(part[2])
            )
            block = Block(0, (part[0], label, flag), certain)
        return (
            Run(event, part, label, adaptive, flag, block)
            if block is not None and block.left >= _SHARE
            else None
        )

    def enter(self, run: Run) -> None:
        """Records what was taken. An interruption must not lose it: then the file tells, or
        in memory it is recorded twice.
        """
        event, _, pair = run.part
        if run.taken and self.session is not None:
            taken, was_stale = run.taken, self.stale
            self.stale, run.taken = True, 0
            self._taken(run.block, (event, taken, pair), run.label, run.flag)
            self.stale = was_stale
        elif run.taken:
            if self._headroom is not None:
                self._headroom.take({pair: run.taken}, 1)
                self._headroom.spend(pair, run.taken)
            self._keep(event, run.label, run.flag, run.taken, pair)
            run.taken = 0

    def _keep(self, event: DpEvent, label: str | None, flag: Flag, count: int, pair: Pair) -> None:
        key = event, label, flag
        self.charges[key] = self.charges.get(key, 0) + count
        self.counts[pair] = self.counts.get(pair, 0) + count
        self.changes += 1

    def _split(
        self, parts: Iterable[Part], left: Mapping[Pair, int]
    ) -> tuple[list[Part], list[Part]]:
        """The parts that what is left of the registered schedule covers, as the events
        registered there, and the others.
        """
        if not self.plan:
            return [], list(parts)
        left = dict(left)
        planned = {self.pair(event): event for event, _, _ in self.plan}
        registered: list[Part] = []
        rest: list[Part] = []
        for event, times, pair in parts:
            while times and (kept := take(left, pair, 1)) is not None:
                count = min(times, left[kept] + 1)
                left[kept] -= count - 1
                registered.append((planned[kept], count, kept))
                times -= count
            if times:
                rest.append((event, times, pair))
        return registered, rest

    def _refuse(self, need: dict[Pair, int]) -> NoReturn:
        assert self.settings.budget is not None and self._headroom is not None
        if any(isinstance(pair, NonPrivate) for pair in need):
            raise PrivacyBudgetExceeded(
                "a release without noise (z = 0) has no finite epsilon and fits no budget. Use a"
                " positive noise multiplier, or an accountant without a budget. Nothing was"
                " recorded; release nothing."
            )
        if self.filter is not None and any(isinstance(pair, Failure) for pair in need):
            raise PrivacyBudgetExceeded(
                f"a release that may fail outright fits no filter: {self.filter.describe()}, which"
                " holds what was declared adaptive, what is not registered and what later jobs"
                " charge, is infinite for it. Charge it to an accountant of its own, or register"
                " it (PrivacyAccountant.register) before the first release. Nothing was recorded;"
                " release nothing."
            )
        if why := failures.without_delta(added(self._committed(), need), self.settings.budget[1]):
            raise PrivacyBudgetExceeded(f"{why} Nothing was recorded; release nothing.")
        times = sum(need.values())
        fit = "not one more fits"
        if times > 1:
            fit = (
                f"{self._headroom.remaining(self._committed(), dict.fromkeys(need, 1))} of these"
                " would still fit"
            )
        why = ""
        if self.filter is not None:
            why = (
                f" What counts is {self.filter.describe()}, of which {self.used_share():.1%} is"
                " used: "
            )
            why += "the charges were declared adaptive." if self.declared else _LATER
        epsilon, delta = self.settings.budget
        raise PrivacyBudgetExceeded(
            f"charging {times} x {', '.join(map(str, need))} would pass the budget epsilon ="
            f" {epsilon:g} at delta = {delta:g} ({sum(self.charges.values())} releases so far);"
            f" {fit}. Nothing was recorded; release nothing. Stop here, or plan the next run with"
            " fewer steps, a larger noise multiplier or a smaller sampling rate"
            f" (torch_dpbayes.get_noise_multiplier).{why}"
        )

    # --- filters and registered schedules ---------------------------------------------------------

    def _rule(self, need: Mapping[Pair, int], adaptive: bool) -> Filter | None:
        """The filter that this charge puts into force, or ``None``."""
        if self.filter is not None or self.plan or not (adaptive or self.is_later):
            return None
        if self.is_later:
            if self.settings.budget is None:
                return None
            rule = self._filter_of_budget()
            if (cost := rule.cost(self.counts)) > rule.limit:
                assert self.session is not None
                raise PrivacyBudgetExceeded(
                    f"the ledger {self.session.ledger.path} holds a job that used more than later"
                    f" jobs may find there ({rule.describe()} is {cost / rule.limit:.1%} of its"
                    " limit). That job is private because its schedule was fixed in advance; a"
                    " later one, which may depend on its outputs, would not be. Nothing was"
                    " recorded; release nothing. In a new ledger, register the schedule of all"
                    " jobs (PrivacyAccountant.register), or charge with adaptive=True from the"
                    " start."
                )
            return rule
        if self.settings.budget is None:
            raise ValueError(
                "adaptive=True needs a budget: parameters chosen from earlier outputs are private"
                " only against a limit that was fixed before. Make the accountant with"
                " PrivacyAccountant(epsilon=..., delta=...)."
            )
        if self.counts:
            raise ValueError(
                "this accountant already holds charges that were not adaptive. Whether to become"
                " adaptive would itself be a choice made after seeing outputs, which neither"
                " guarantee covers. Charge with adaptive=True from the first charge on, in a new"
                " accountant."
            )
        if all(isinstance(pair, Gaussian) for pair in need):
            return Filter.gaussian(*self.settings.budget)
        return Filter.renyi(*self.settings.budget, need)

    def _filter_of_budget(self) -> Filter:
        """The filter for later jobs: a function of the budget and of the first release, which
        were there before any output.
        """
        assert self.settings.budget is not None
        return Filter.renyi(*self.settings.budget, self._first)

    def _as_filter(self, rule: Filter) -> Headroom:
        """Everything that was charged or registered counted against ``rule``."""
        assert self.settings.budget is not None
        headroom = Headroom(*self.settings.budget, self.settings.method, rule)
        headroom.restart(self._committed())
        return headroom

    def _start(self, rule: Filter, declared: bool) -> None:
        self._headroom, self.filter, self.declared = self._as_filter(rule), rule, declared
        self.changes += 1

    @contextmanager
    def _provisionally(self, rule: Filter | None) -> Iterator[None]:
        """Under ``rule``, which stays in force unless there is an exception."""
        before = self._headroom, self.filter, self.declared
        if rule is not None:
            self._start(rule, declared=not self.is_later)
        try:
            yield
        except BaseException:
            self._headroom, self.filter, self.declared = before
            raise

    def register(self, parts: list[Part]) -> None:
        """Fixes what may be released without a filter, before the first release."""
        plan: dict[Key, int] = {}
        for event, times, _ in parts:
            plan[event, None, "registered"] = plan.get((event, None, "registered"), 0) + times
        while True:
            self.refresh()
            if self.plan == plan:
                return
            if self.plan or self.counts or self.filter is not None:
                what = "another schedule is registered" if self.plan else "something was charged"
                raise ValueError(
                    f"{what} already, and a schedule has to be fixed before the first release."
                    " Register it in a new accountant."
                )
            if self.settings.budget is None:
                raise ValueError(
                    "a schedule is registered against a budget: PrivacyAccountant(epsilon=...,"
                    " delta=...)."
                )
            epsilon, delta = self.settings.budget
            if (cost := self.price(_need(parts), delta)) > epsilon:
                if math.isinf(cost) and (why := failures.without_delta(_need(parts), delta)):
                    raise PrivacyBudgetExceeded(
                        f"the schedule costs more than the budget. {why} Nothing was registered."
                    )
                raise PrivacyBudgetExceeded(
                    f"the schedule costs epsilon = {cost:.4g} at delta = {delta:g}, more than the"
                    f" budget {epsilon:g}. Nothing was registered. Register fewer steps, or more"
                    " noise (torch_dpbayes.get_noise_multiplier)."
                )
            if self.session is None or self._write(self.session, _plan_entries(plan)):
                self._adopt(plan)
                return

    def _adopt(self, plan: Mapping[Key, int]) -> None:
        self.plan = dict(plan)
        self._plan_left = self._planned()
        # whatever is not registered has to fit a filter beside all that is
        if self.settings.budget is not None:
            self._start(Filter.renyi(*self.settings.budget, self._planned()), declared=True)

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
        self.changes += 1
        plan = {row.key: row.count for row in rows if row.kind == "plan"}
        if plan:
            self._adopt(plan)
        net: dict[Pair, int] = {}
        rule: Filter | None = None
        declared = False
        for row in rows:
            if row.kind == "filter":
                rule, declared = self.saved_filter(row.label or ""), row.flag == "adaptive"
            if row.kind in ("filter", "plan"):
                continue
            pair = self.pair(row.key[0])
            self._first = self._first or {pair: 1}
            self.later_jobs |= row.later
            _change(self.charges, row.key, row.count)
            _change(self.counts, pair, row.count)
            if row.flag == "registered":
                self._plan_left[pair] = self._plan_left.get(pair, 0) - row.count
            else:
                _change(net, pair, row.count)
        if rule is not None and self.filter is None:
            self._start(rule, declared)
        elif self._headroom is not None:
            self._headroom.others_spent(self._committed(), net)

    def saved_filter(self, code: str) -> Filter | None:
        """The filter that :func:`filter_code` wrote."""
        if not code or self.settings.budget is None:
            return None
        if code == "gaussian":
            return Filter.gaussian(*self.settings.budget)
        return Filter.at(float(code.removeprefix("renyi ")), *self.settings.budget)

    def _take_from_blocks(
        self, session: Session, parts: list[Part], label: str | None, flag: Flag
    ) -> bool:
        """Takes the charge out of open blocks if they cover it: nothing is written, nothing
        is composed.
        """
        taken: list[tuple[Block, Part]] = []
        chosen: dict[Block, int] = {}
        for event, times, pair in parts:
            while times:
                block = self._covering(session, pair, chosen)
                if block is None:
                    return False
                count = min(times, block.left - chosen.get(block, 0))
                chosen[block] = chosen.get(block, 0) + count
                taken.append((block, (event, count, pair)))
                times -= count
        for block, part in taken:
            block.left -= part[1]
            self._taken(block, part, label, flag)
        return True

    def _taken(self, block: Block, part: Part, label: str | None, flag: Flag) -> None:
        event, times, pair = part
        if block.key[2] == "registered":
            event, pair, flag = block.key[0], self._block_pair(block), "registered"
        else:
            flag = "adaptive" if self.plan else flag
            if self._headroom is not None:
                self._headroom.spend(pair, times)
        key = event, label, flag
        block.used[key] = block.used.get(key, 0) + times
        self._keep(event, label, flag, times, pair)

    def _covering(self, session: Session, pair: Pair, taken: Mapping[Block, int]) -> Block | None:
        """A block with something left for ``pair``: its own rather than one that merely
        dominates it.
        """
        found = None
        for block in session.blocks:
            if block.open and block.left > taken.get(block, 0):
                kept = self._block_pair(block)
                if kept == pair:
                    return block
                if found is None and covers(kept, pair):
                    found = block
        return found

    def _block_pair(self, block: Block) -> Pair:
        if block.pair is None:
            block.pair = self.pair(block.key[0])
        return block.pair

    def _reserve(self, session: Session, parts: list[Part], label: str | None, flag: Flag) -> None:
        """Opens blocks that cover ``parts``, or raises."""
        committed = False
        while not committed:
            self.refresh()
            pairs = [pair for _, _, pair in parts]
            finished = [
                block
                for block in session.blocks
                if block.key[2] == "registered" or self._is_finished(block, pairs)
            ]
            left = self.open_registered()  # for that blocks are given back
            registered, rest = self._split(parts, left)
            wanted = self._sized(session, registered, label, "registered", finished, left)
            rule = self._rule(_need(rest), flag == "adaptive") if rest else None
            also = (
                []
                if rule is None
                else [
                    Entry(
                        "filter",
                        filter_code(rule),
                        None,
                        0,
                        "fixed" if self.is_later else "adaptive",
                    )
                ]
            )
            try:
                with self._provisionally(rule):
                    wanted += self._sized(
                        session, rest, label, "adaptive" if self.plan else flag, finished, left
                    )
                    self.stale = True
                    committed = session.commit(wanted, finished, also)
                    if not committed:
                        raise _Outrun
            except _Outrun:
                self.stale = False
                continue
            self._first = self._first or {parts[0][2]: 1}
            self.later_jobs |= session.later
            for block in finished:
                self._is_settled(block)
            for key, count in wanted:
                pair = self.pair(key[0])
                if key[2] == "registered":
                    self._plan_left[pair] -= count
                elif self._headroom is not None:
                    self._headroom.take({pair: count}, 1)
            self.stale = False

    def _is_finished(self, block: Block, pairs: Iterable[Pair]) -> bool:
        """Used up, or left behind: noise fell below what the block covers."""
        kept = self._block_pair(block)
        return block.left == 0 or (
            any(covers(pair, kept) for pair in pairs)
            and not any(covers(kept, pair) for pair in pairs)
        )

    def _is_settled(self, block: Block) -> None:
        pair = self._block_pair(block)
        if block.key[2] == "registered":
            self._plan_left[pair] += block.left
        elif self._headroom is not None:
            self._headroom.reserved(pair, fell_through=block.left > 0)

    def _sized(
        self,
        session: Session,
        parts: list[Part],
        label: str | None,
        flag: Flag,
        finished: list[Block],
        left: Mapping[Pair, int],
    ) -> list[tuple[Key, int]]:
        """Blocks for ``parts`` that last for seconds, but are a small share of what is left.
        May add to ``finished`` what has to be given back.
        """
        if not parts:
            return []
        need = _need(parts)
        kind = type(parts[0][0])
        size, opened = self._blocks.get(kind, (1, time.monotonic()))
        lasted = time.monotonic() - opened
        if lasted > _SECONDS[1]:
            size = max(size // _GROWTH, 1)
        elif lasted < _SECONDS[0]:
            size = min(_GROWTH * size, max(_LARGEST_BLOCK // sum(need.values()), 1))
        fit = _SHARE * size
        if flag == "registered":
            fit = min(left[pair] // count for pair, count in need.items())
        elif self._headroom is not None:
            fit = 0
            counts = self._committed() if self.plan else self.counts
            while not fit:
                others = [
                    block
                    for block in session.blocks
                    if block not in finished and block.left and block.key[2] != "registered"
                ]
                reserved: dict[Pair, int] = {}
                for block in others:
                    reserved = added(reserved, {self._block_pair(block): block.left})
                lowered = [
                    (self._lowered(event, pair, self._headroom), count)
                    for event, count, pair in parts
                ]
                lower = [(event, count, self.pair(event)) for event, count in lowered]
                if fit := self._headroom.room(counts, reserved, _need(lower), _SHARE * size):
                    parts = lower
                elif not (fit := self._headroom.room(counts, reserved, need, _SHARE * size)):
                    if not others:
                        self._refuse(need)
                    finished += others
        size = max(1, min(size, fit // _SHARE))
        self._blocks[kind] = size, time.monotonic()
        wanted: dict[Key, int] = {}
        for event, count, _ in parts:
            wanted[event, label, flag] = wanted.get((event, label, flag), 0) + size * count
        return list(wanted.items())

    @staticmethod
    def _lowered(event: DpEvent, pair: Pair, headroom: Headroom) -> DpEvent:
        slack = headroom.slack(pair)
        return events.lowered(event, slack) if slack > 1 else event

    def _write(self, session: Session, entries: list[Entry]) -> bool:
        self.stale = True
        written = session.commit([], also=entries)
        self.stale = False
        return written

    def settle(self) -> None:
        """Gives back what the open blocks did not use."""
        if self.session is None:
            return
        blocks, was_stale, self.stale = list(self.session.blocks), self.stale, True
        self.session.settle()
        for block in blocks:
            if block.key[2] == "registered":
                self._plan_left[self._block_pair(block)] += block.left
        self.stale = was_stale

    # --- saved histories --------------------------------------------------------------------------

    def load(
        self,
        parts: list[tuple[Part, str | None, Flag, str]],
        plan: dict[Key, int],
        rule: Filter | None,
        slack: float,
    ) -> None:
        """Takes over a history, into an empty book: parts with their label, flag and job (empty:
        this one).

        ``slack``: the ratio by which it may pass the budget.
        """
        counts = _need(part for part, *_ in parts)
        if self.settings.budget is not None and counts and not plan:
            epsilon, delta = self.settings.budget
            fits = (
                self.price(counts, delta) <= epsilon * slack
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
            entries = _plan_entries(plan)
            entries += (
                [Entry("filter", filter_code(rule), None, 0, "adaptive")]
                if rule is not None
                else []
            )
            entries += [
                Entry("charge", label, event, count, flag, job=job)
                for (event, count, _), label, flag, job in parts
            ]
            if not self._write(self.session, entries):
                raise ValueError(
                    "another process charged this ledger in the meantime: it is not empty any more,"
                    " so nothing was loaded."
                )
        if plan:
            self._adopt(plan)
        for (event, count, pair), label, flag, _ in parts:
            self._first = self._first or {pair: 1}
            self._keep(event, label, flag, count, pair)
            if flag == "registered" and plan:
                self._plan_left[pair] -= count
        if rule is not None:
            self._start(rule, declared=True)
        elif self._headroom is not None:
            self._headroom.restart(self._committed())


_LATER = (
    "this job or another began after others had charged, and may depend on their outputs"
    " (PrivacyAccountant.register avoids that)."
)


class _Outrun(Exception):
    """Another process committed first."""


def filter_code(rule: Filter) -> str:
    """A filter as a string."""
    return rule.kind if rule.kind == "gaussian" else f"renyi {rule.order!r}"


def _plan_entries(plan: Mapping[Key, int]) -> list[Entry]:
    return [
        Entry("plan", None, event, count, "registered") for (event, _, _), count in plan.items()
    ]


def _need(parts: Iterable[Part]) -> dict[Pair, int]:
    need: dict[Pair, int] = {}
    for _, times, pair in parts:
        need[pair] = need.get(pair, 0) + times
    return need


def _change(counts: dict[Any, int], key: Any, by: int) -> None:
    counts[key] = counts.get(key, 0) + by
    if not counts[key]:
        del counts[key]
