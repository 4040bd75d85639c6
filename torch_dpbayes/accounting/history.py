"""The history of an accountant: its charges, its guarantee, and its saved state."""

from __future__ import annotations

import math
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, get_args

from ..errors import ArgumentError, DPBayesError
from ..processes import this_process
from . import bounds, events, renyi
from . import dominating_pairs as pairs
from .bounds import MOST_STEPS
from .budget import Budget, Counts, Filter
from .dominating_pairs import Pair
from .events import DpEvent, Method, Neighboring, Unit
from .privacy_loss import without_delta

Guarantee = Literal["fixed", "filter", "none"]
Flag = Literal["fixed", "adaptive"]

RESUMED = (
    "resumed from a saved state: assumes no release after it was saved or from another copy of"
    " it, and parameters fixed before the first release"
)
_RECORDWISE = "RecordwiseBatchGaussianDpEvent: no record decides whether another one is in a batch"
_NOTHING = "Nothing was recorded: release nothing new."
_KNOWN_EVENTS = 4096  # events whose parts are cached
_NAMED = 2  # different events of one charge that an error names
# relative: another discretisation may give a slightly larger bound for a history that fitted the
# same budget
_SLACK = {"pld": 1e-3, "rdp": 1e-9}


class PrivacyBudgetExceeded(DPBayesError, RuntimeError):
    """A charge would exceed the budget. Nothing was recorded, and nothing may be released."""

    code = "budget-exceeded"


class Settings(NamedTuple):
    """Settings of an accountant, which never change. Without ``epsilon`` there is no budget."""

    epsilon: float | None
    delta: float | None
    method: Method
    neighboring: Neighboring
    unit: Unit = "record"

    @classmethod
    def checked(
        cls, epsilon: Any, delta: Any, method: Any, neighboring: Any, unit: Any
    ) -> Settings:
        """These settings, or an error."""
        return cls(
            None if epsilon is None else events.check_epsilon(epsilon),
            None if delta is None else events.check_delta(delta),
            events.one_of(method, Method, "method"),
            events.neighboring_relation(neighboring),
            events.one_of(unit, Unit, "unit"),
        )

    @property
    def budget(self) -> tuple[float, float] | None:
        """(epsilon, delta), or ``None``."""
        return None if self.epsilon is None or self.delta is None else (self.epsilon, self.delta)


class Key(NamedTuple):
    """Charges with equal keys are added up. Only the job itself charges under its name."""

    event: DpEvent
    label: str | None
    flag: Flag
    job: str


class Part(NamedTuple):
    """Releases of one elementary event, and the pair that dominates it."""

    event: DpEvent
    times: int
    pair: Pair


def needed(parts: Iterable[Part]) -> dict[Pair, int]:
    """The number of releases of each pair."""
    counts: dict[Pair, int] = {}
    for _, times, pair in parts:
        counts[pair] = counts.get(pair, 0) + times
    return counts


class Block:
    """Releases that fit or are reserved: how many are left, and the charges made from them."""

    __slots__ = ("key", "last_use", "left", "open", "pair", "seq", "taken", "used")

    def __init__(self, seq: int, key: Key | None, pair: Pair, left: int) -> None:
        self.seq, self.key, self.pair, self.left, self.open = seq, key, pair, left, True
        self.used: dict[Key, int] = {}
        self.last_use = 0  # the session's number of releases at the last use of this block
        self.taken = 0  # used releases that are not in the history yet


class History:
    """Charges under one budget, as one process knows them. Here they are only in memory.

    Attributes:
        charges: the number of releases by event, label, flag and job.
        counts: the number of releases by dominating pair.
        first: the pair of the first release.
        declared: whether the first charge was adaptive.
        is_adaptive: whether any charge was adaptive: declared so, or made by a later job.
        is_taken_over: whether another accountant saved it, with bounds that may differ.
        budget: decides what still fits; ``None`` without a budget.
        job: the name under which this job charges.
        process: the only process that may charge; a forked child needs its own session.
        later: whether the ledger held charges when the job began.
        stale: a change or a reading is in progress or was interrupted, so memory and file may
            differ.
    """

    path: Path | None = None

    def __init__(self, settings: Settings, job: str = "") -> None:
        self.settings, self.job = settings, job or uuid.uuid4().hex
        self.process, self.later, self.stale = this_process(), False, False
        self._notes: dict[str, None] = {}
        self._is_resumed = False
        self.charges: dict[Key, int] = {}
        self.counts: dict[Pair, int] = {}
        self.first: Pair | None = None
        self.declared = self.is_adaptive = self.is_taken_over = False
        self.budget = self._budget(None)
        self._parts: dict[DpEvent, Part] = {}
        self._epsilons: dict[float, float] = {}  # cache: epsilon of these charges by delta

    def _budget(self, rule: Filter | None) -> Budget | None:
        if self.settings.budget is None:
            return None
        return Budget(*self.settings.budget, self.settings.method, rule, self.counts)

    @property
    def filter(self) -> Filter | None:
        """The filter in force, if any."""
        return None if self.budget is None else self.budget.filter

    # --- events -----------------------------------------------------------------------------------

    def decompose(self, event: DpEvent, count: int) -> list[Part]:
        """The elementary events of ``count`` times ``event``; raises if there is no guarantee."""
        try:
            known = self._parts.get(event)
        except TypeError:  # the event cannot be hashed; the checks below explain what is wrong
            known = None
        if known is not None:
            return [Part(known.event, count, known.pair)]
        parts = []
        for part, times in events.elementary(event, count):
            events.require_unit(part, self.settings.unit)
            pair = self.pair(part)
            if self.settings.method == "pld":
                bounds.require_loss_distribution(pair)
            parts.append(Part(part, times, pair))
        # the first pair decides the filter; Gaussians come last, as their filter ignores sampling
        parts.sort(key=lambda part: isinstance(part.pair, pairs.Gaussian))
        if len(parts) == 1 and parts[0].event == event:
            if len(self._parts) >= _KNOWN_EVENTS:
                self._parts.clear()
            # not under ``event``: its numbers may be arrays, which can change
            self._parts[parts[0].event] = parts[0]
        return parts

    def pair(self, event: DpEvent) -> Pair:
        """The pair that dominates an elementary event under this relation."""
        return pairs.dominating_pair(event, self.settings.neighboring)

    def keep(self, pair: Pair, key: Key, count: int) -> None:
        """Adds ``count`` releases; a negative count removes some."""
        if self.first is None:
            self.first, self.declared = pair, key.flag == "adaptive"
        if key.flag == "adaptive" and not self.is_adaptive:
            self.budget, self.is_adaptive = self.filtered(self.first, self.declared), True
        if self.budget is not None:
            self.budget.spend(pair, count)
        _change(self.charges, key, count)
        _change(self.counts, pair, count)
        self._epsilons = {}

    # --- the guarantee ----------------------------------------------------------------------------

    @property
    def guarantee(self) -> Guarantee:
        """The condition under which epsilon is a bound; see ``PrivacyAccountant``."""
        if self.filter is not None:
            return "filter"
        return "none" if self.is_adaptive else "fixed"

    @property
    def _bound(self) -> Any:
        return renyi if self.settings.method == "rdp" else bounds

    def fixed_epsilon(self, delta: float) -> float:
        """Epsilon under the assumption that all releases were fixed in advance."""
        return float(self._bound.upper_epsilon(self.counts, delta))

    def epsilon(self, delta: float) -> float:
        """An upper bound on epsilon."""
        if not self.counts:
            return 0.0
        if self.budget is not None and self.filter is not None:
            return self.filter.epsilon(delta) if self.budget.keeps_filter else math.inf
        if self.is_adaptive:
            return math.inf
        known = self._epsilons  # a signal handler may charge meanwhile and replace it
        if delta not in known:
            value, budget = self.fixed_epsilon(delta), self.settings.budget
            if budget is not None and delta == budget[1] and not self.is_taken_over:
                # a bound that is tighter than this one may have decided that a charge fits
                value = min(value, budget[0])
            known[delta] = value
        return known[delta]

    def delta(self, epsilon: float) -> float:
        """An upper bound on delta."""
        if not self.counts:
            return 0.0
        if self.budget is not None and self.filter is not None:
            return self.filter.delta(epsilon) if self.budget.keeps_filter else 1.0
        if self.is_adaptive:
            return 1.0
        return float(self._bound.upper_delta(self.counts, epsilon))

    def lower_epsilon(self, delta: float) -> float:
        """A lower bound on any epsilon that follows from the events alone."""
        known = {p: n for p, n in self.counts.items() if not isinstance(p, pairs.Concentrated)}
        return bounds.lower_epsilon(known, delta) if known else 0.0

    def used_share(self, rule: Filter) -> float:
        """The used share of a filter's limit."""
        return rule.cost(self.counts) / rule.limit

    def event_notes(self) -> list[str]:
        """The assumptions of charged events."""
        known: list[Any] = [key.event for key in self.charges]
        known += [event.event for event in known if isinstance(event, events.UserLevelDpEvent)]
        stated = any(isinstance(event, events.RecordwiseBatchGaussianDpEvent) for event in known)
        return [_RECORDWISE] if stated else []

    # --- deciding ---------------------------------------------------------------------------------

    def remaining(self, need: Counts) -> int | None:
        """How many times ``need`` still fits; ``None``: there is no budget."""
        budget = self.budget
        if self.later and not self.is_adaptive and self.first is not None:
            budget = self.filtered(self.first, False)
        return None if budget is None else budget.max_count(self.counts, need)

    def refuse(self, parts: list[Part], budget: Budget) -> NoReturn:
        """Raises the error that explains why ``parts`` do not fit ``budget``."""
        assert self.settings.budget is not None
        rule, (epsilon, delta), need = budget.filter, self.settings.budget, needed(parts)
        if any(isinstance(pair, pairs.NonPrivate) for pair in need):
            raise PrivacyBudgetExceeded(
                "a release without noise (z = 0) has no finite epsilon and fits no budget: use a"
                f" positive noise multiplier, or an accountant without a budget. {_NOTHING}"
            )
        if rule is not None and any(isinstance(pair, pairs.Failure) for pair in need):
            raise PrivacyBudgetExceeded(
                "adaptive charges and later jobs need a filter, which accepts no FailureDpEvent (a"
                f" release that fails with probability delta): charge it to a separate accountant."
                f" {_NOTHING}"
            )
        if why := without_delta(pairs.added(self.counts, need), delta):
            raise PrivacyBudgetExceeded(f"{why} {_NOTHING}")
        fit, times = "none fits", sum(need.values())
        if times > 1:
            left = budget.max_count(self.counts, dict.fromkeys(need, 1))
            fit = f"{left} of these would still fit"
        named = list(dict.fromkeys(events.in_words(part.event) for part in parts))
        if len(named) > _NAMED:
            named[_NAMED:] = [f"{len(named) - _NAMED} others"]
        under, planner = "", "dpb.get_noise_multiplier"
        if rule is not None:
            planner = "dpb.get_noise_multiplier finds too little for a filter: see remaining()"
            why = "a job began after others had charged and may depend on their outputs"
            if self.declared or not self.counts:
                why = "the charges were declared adaptive"
            under = f" {self.used_share(rule):.1%} of {rule} is used: {why}."
        raise PrivacyBudgetExceeded(
            f"charging {times} x {' and '.join(named)} would exceed the budget epsilon ="
            f" {epsilon:g} at delta = {delta:g}; {fit}. {_NOTHING} Plan"
            f" fewer releases, or more noise ({planner}).{under}"
        )

    def filtered(self, first: Pair, declared: bool) -> Budget | None:
        """The budget with the filter that starts at the first adaptive charge."""
        budget = self.settings.budget
        return self._budget(None if budget is None else Filter.of(*budget, first, declared))

    def budget_for(self, parts: list[Part], flag: Flag) -> Budget | None:
        """The budget that a charge must fit, or ``None``; raises if no filter can start."""
        if flag == "fixed" or self.is_adaptive or (self.later and self.settings.budget is None):
            return self.budget
        if self.later and self.first is not None:
            budget = self.filtered(self.first, False)
            assert budget is not None and budget.filter is not None
            if (used := self.used_share(budget.filter)) > 1:
                raise PrivacyBudgetExceeded(
                    f"earlier charges use {used:.1%} of the filter limit for later jobs"
                    f" ({budget.filter}). {_NOTHING} In a new ledger charge with adaptive=True"
                    " from the start, or let one job make all releases."
                )
            return budget
        if self.settings.budget is None:
            raise ArgumentError(
                "adaptive=True needs a budget: if parameters depend on earlier outputs, only a"
                " limit fixed in advance gives a guarantee. Write PrivacyAccountant(epsilon=...,"
                " delta=...)."
            )
        if self.counts:
            raise ArgumentError(
                "this accountant already has charges that were not adaptive, so it is too late"
                " for adaptive=True: use a new accountant and charge with adaptive=True from the"
                " first charge on."
            )
        # an earlier charge that was returned still decides the filter
        return self.filtered(self.first or parts[0].pair, self.first is None or self.declared)

    # --- charging ---------------------------------------------------------------------------------

    @property
    def place(self) -> dict[str, Any]:
        """The part of a saved state that identifies its file and the last row read."""
        return {"ledger": "", "place": []}

    def refresh(self) -> None:
        """Reads the charges of other processes."""

    def settle(self, in_doubt: bool = False) -> None:
        """Returns unused reserved releases; ``in_doubt``: also those not known in memory."""

    def flag(self, adaptive: bool) -> Flag:
        """The flag of this job's charges."""
        return "adaptive" if adaptive or self.later else "fixed"

    def charge(self, parts: list[Part], label: str | None, adaptive: bool) -> None:
        """Records a charge, or raises before anything is recorded."""
        flag = self.flag(adaptive)
        budget = self.budget_for(parts, flag)
        if budget is not None and not budget.fits(self.counts, needed(parts)):
            self.refuse(parts, budget)
        for part in parts:
            self.taken(None, part, label, flag)

    def taken(self, block: Block | None, part: Part, label: str | None, flag: Flag) -> None:
        """Note that these releases were charged; ``block``: the block they were taken from."""
        self.keep(part.pair, Key(part.event, label, flag, self.job), part.times)

    def block_for(self, pair: Pair) -> Block | None:
        """Releases of ``pair`` that fit without a new decision."""
        budget = self.budget
        return Block(0, None, pair, MOST_STEPS if budget is None else budget.cheap({pair: 1}))

    # --- saving -----------------------------------------------------------------------------------

    def saved(self) -> dict[str, Any]:
        """Settings and charges as strings, numbers, lists and dicts."""
        charges = [
            [events.encode(key.event), float(count), key.label or "", key.flag, key.job]
            for key, count in self.charges.items()
        ]
        return {**self.settings._asdict(), "history": charges}

    def notes(self) -> list[str]:
        """The stored assumptions of the guarantee."""
        if self._is_resumed and any(key.job == self.job for key in self.charges):
            self._notes[RESUMED] = None
        return [*self._notes]

    def note(self, statement: str) -> None:
        """Stores a statement once."""
        self._notes[statement] = None

    def take_over(self, state: Mapping[str, Any], charges: Mapping[Key, int]) -> None:
        """Loads a saved state into an empty history; see ``PrivacyAccountant.load_state_dict``."""
        if state["ledger"]:
            raise ArgumentError(
                "the saved history belongs to a ledger file, which may have later charges: open"
                " that file with PrivacyAccountant(path=...), and resume with this accountant."
            )
        if self.counts:
            raise ArgumentError(
                "this accountant is not empty: loading would lose charges or count them twice."
                " Load the state into a new PrivacyAccountant."
            )
        settings, budget = self.settings, self.settings.budget
        is_same = (state["epsilon"], state["delta"]) == (settings.epsilon, settings.delta)
        is_adaptive = any(key.flag == "adaptive" for key in charges)
        if is_adaptive and not is_same:
            raise ArgumentError(
                "the saved history is adaptive, so it is only valid with its budget"
                f" {[state['epsilon'], state['delta']]}; this accountant's budget is"
                f" {[settings.epsilon, settings.delta]}. Use an accountant with the saved budget."
            )
        parts = [
            (part, key)
            for key, count in charges.items()
            for part in self.decompose(key.event, count)
        ]
        if budget is not None and parts:
            counts = needed(part for part, _ in parts)
            if not is_adaptive:
                slack = _SLACK[settings.method] if is_same else 0.0
                fits = self._bound.upper_epsilon(counts, budget[1]) <= budget[0] * (1 + slack)
            else:
                rule = Filter.of(*budget, parts[0][0].pair, True)
                fits = rule.cost(counts) <= rule.limit * (1 + _SLACK["rdp"])
            if not fits:
                raise PrivacyBudgetExceeded(
                    "the saved history costs more than this accountant's budget, epsilon ="
                    f" {budget[0]:g} at delta = {budget[1]:g}. Nothing was loaded. Load it into an"
                    " accountant with the original budget."
                )
        self._write(state, parts)
        self.is_taken_over = True
        for part, key in parts:
            self.keep(part.pair, key, part.times)

    def _write(self, state: Mapping[str, Any], parts: list[tuple[Part, Key]]) -> None:
        """Stores the loaded charges; in a file other processes read them, too."""
        self._is_resumed |= state["job"] != self.job

    def require(self, charges: Mapping[Key, int]) -> None:
        """Raises unless this history contains these charges, each from the same job."""
        held, wanted = (_by_job(found) for found in (self.charges, charges))
        if wanted - held:
            raise ArgumentError(
                "this accountant does not contain the charges of the saved run, so they would be"
                " lost: resume with that run's accountant, or with an empty one, which copies"
                " them."
            )


def read_saved(state: Mapping[str, Any], settings: Settings) -> dict[Key, int]:
    """The charges of a saved state, for an accountant of these settings."""
    wanted = {*Settings._fields, "history", "ledger", "place", "job", "notes"}
    if missing := wanted - set(state):
        raise ArgumentError(
            f"this is not the state of a PrivacyAccountant: {sorted(missing)} missing. Load what"
            " state_dict() returned."
        )
    for name in ("method", "neighboring", "unit"):
        if state[name] != getattr(settings, name):
            raise ArgumentError(
                f"the saved accountant has {name}={state[name]!r}, this one"
                f" {getattr(settings, name)!r}: their numbers cannot be compared. Make this"
                " accountant with the saved setting."
            )
    found: dict[Key, int] = {}
    for row in state["history"]:
        # reject counts that would be rounded down, and misspelled flags, which would mean "fixed"
        is_row = isinstance(row, list | tuple) and len(row) == 5 and row[3] in get_args(Flag)
        if not (is_row and isinstance(row[1], int | float) and float(row[1]).is_integer()):
            raise ArgumentError(
                "this is not the state of a PrivacyAccountant: a charge in it has no whole number"
                f" as count, or no flag {' or '.join(get_args(Flag))}. Load what state_dict()"
                " returned."
            )
        code, count, label, flag, job = row
        key = Key(events.decode(code), label or None, flag, job)
        found[key] = found.get(key, 0) + events.positive_count(int(count))
    return found


def _by_job(charges: Mapping[Key, int]) -> Counter[tuple[str, DpEvent]]:
    found: Counter[tuple[str, DpEvent]] = Counter()
    for key, count in charges.items():
        found[key.job, key.event] += count
    return found


def _change(counts: dict[Any, int], key: Any, by: int) -> None:
    counts[key] = counts.get(key, 0) + by
    if not counts[key]:
        del counts[key]
