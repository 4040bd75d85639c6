"""The history of an accountant: what was charged, what it guarantees, and how it is saved."""

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
_NOTHING = "Nothing was recorded; release nothing."
_KNOWN_EVENTS = 4096  # whose parts are kept
_NAMED = 2  # different events of one charge, in an error
# relative: a history that was admitted under the same budget may be bounded a hair above it by
# another discretisation
_SLACK = {"pld": 1e-3, "rdp": 1e-9}


class PrivacyBudgetExceeded(DPBayesError, RuntimeError):
    """A charge would exceed the budget. Nothing was recorded, and nothing may be released."""

    code = "budget-exceeded"


class Settings(NamedTuple):
    """Settings that never change. ``delta`` without ``epsilon`` means: no budget."""

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
    """The key of charges that are added up. Only a job itself charges under its name."""

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
    """Parts added up by pair."""
    counts: dict[Pair, int] = {}
    for _, times, pair in parts:
        counts[pair] = counts.get(pair, 0) + times
    return counts


class Block:
    """Releases that fit, or are reserved: how many are left, and what the others were used for."""

    __slots__ = ("key", "last_use", "left", "open", "pair", "seq", "taken", "used")

    def __init__(self, seq: int, key: Key | None, pair: Pair, left: int) -> None:
        self.seq, self.key, self.pair, self.left, self.open = seq, key, pair, left, True
        self.used: dict[Key, int] = {}
        self.last_use = 0  # how many releases had been made
        self.taken = 0  # of those used, how many are not in the history yet


class History:
    """Charges under one budget: what one process knows of them, here all there is.

    Attributes:
        charges: how often each event was charged, by label, flag and job.
        counts: the same by dominating pair.
        first: what was released first.
        declared: whether the first charge was adaptive.
        is_adaptive: whether any charge was: declared so, or of a later job.
        is_taken_over: whether it was saved by another accountant, whose bounds nobody knows.
        budget: decides what still fits; ``None`` without a budget.
        job: the name under which it charges.
        process: the only one that may charge; a fork begins a session of its own, if it can.
        later: whether the job began after others had charged.
        stale: a change or a reading is under way, or was interrupted: what is known may not be what
            is kept.
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
        self._epsilons: dict[float, float] = {}  # by delta, of the present charges

    def _budget(self, rule: Filter | None) -> Budget | None:
        if self.settings.budget is None:
            return None
        return Budget(*self.settings.budget, self.settings.method, rule, self.counts)

    @property
    def filter(self) -> Filter | None:
        """The limit in force, if any."""
        return None if self.budget is None else self.budget.filter

    # --- events -----------------------------------------------------------------------------------

    def decompose(self, event: DpEvent, count: int) -> list[Part]:
        """The elementary events of ``count`` times ``event``, if it gives a guarantee here."""
        try:
            known = self._parts.get(event)
        except TypeError:  # an event that cannot be hashed; the checks below say what is wrong
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
        # what comes first decides on a filter, and that of Gaussians sees no sampling
        parts.sort(key=lambda part: isinstance(part.pair, pairs.Gaussian))
        if len(parts) == 1 and parts[0].event == event:
            if len(self._parts) >= _KNOWN_EVENTS:
                self._parts.clear()
            # not under ``event``, whose numbers may be arrays that change
            self._parts[parts[0].event] = parts[0]
        return parts

    def pair(self, event: DpEvent) -> Pair:
        """The pair that dominates an elementary event here."""
        return pairs.dominating_pair(event, self.settings.neighboring)

    def keep(self, pair: Pair, key: Key, count: int) -> None:
        """Adds ``count`` more charges. A negative count takes back."""
        if self.first is None:
            self.first, self.declared = pair, key.flag == "adaptive"
        if key.flag == "adaptive" and not self.is_adaptive:
            self.budget, self.is_adaptive = self.filtered(self.first, self.declared), True
        if self.budget is not None:
            self.budget.spend(pair, count)
        _change(self.charges, key, count)
        _change(self.counts, pair, count)
        self._epsilons = {}

    # --- what it guarantees -----------------------------------------------------------------------

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
        """Epsilon, had all releases been fixed in advance."""
        return float(self._bound.upper_epsilon(self.counts, delta))

    def epsilon(self, delta: float) -> float:
        """An upper bound on epsilon."""
        if not self.counts:
            return 0.0
        if self.budget is not None and self.filter is not None:
            return self.filter.epsilon(delta) if self.budget.keeps_filter else math.inf
        if self.is_adaptive:
            return math.inf
        known = self._epsilons  # a signal's handler may charge meanwhile
        if delta not in known:
            value, budget = self.fixed_epsilon(delta), self.settings.budget
            if budget is not None and delta == budget[1] and not self.is_taken_over:
                # a charge may have been admitted by a bound that is tighter than this one
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
        """No accountant that knows only the events can prove less than this."""
        known = {p: n for p, n in self.counts.items() if not isinstance(p, pairs.Concentrated)}
        return bounds.lower_epsilon(known, delta) if known else 0.0

    def used_share(self, rule: Filter) -> float:
        """The used share of a filter's limit."""
        return rule.cost(self.counts) / rule.limit

    def event_notes(self) -> list[str]:
        """The assumptions that charged events state."""
        known: list[Any] = [key.event for key in self.charges]
        known += [event.event for event in known if isinstance(event, events.UserLevelDpEvent)]
        stated = any(isinstance(event, events.RecordwiseBatchGaussianDpEvent) for event in known)
        return [_RECORDWISE] if stated else []

    # --- deciding ---------------------------------------------------------------------------------

    def remaining(self, need: Counts) -> int | None:
        """How many times ``need`` still fits; ``None`` without a budget."""
        budget = self.budget
        if self.later and not self.is_adaptive and self.first is not None:
            budget = self.filtered(self.first, False)
        return None if budget is None else budget.max_count(self.counts, need)

    def refuse(self, parts: list[Part], budget: Budget) -> NoReturn:
        """Says why ``parts`` do not fit ``budget``."""
        assert self.settings.budget is not None
        rule, (epsilon, delta), need = budget.filter, self.settings.budget, needed(parts)
        if any(isinstance(pair, pairs.NonPrivate) for pair in need):
            raise PrivacyBudgetExceeded(
                "a release without noise (z = 0) has no finite epsilon and fits no budget: use a"
                f" positive noise multiplier, or an accountant without a budget. {_NOTHING}"
            )
        if rule is not None and any(isinstance(pair, pairs.Failure) for pair in need):
            raise PrivacyBudgetExceeded(
                "a release that may fail fits no filter, and adaptive charges and later jobs need"
                f" one: charge it to a separate accountant. {_NOTHING}"
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
            planner = "a filter fits fewer than dpb.get_noise_multiplier says: ask remaining(event)"
            why = "this job or another began after others had charged, whose outputs it may use"
            if self.declared or not self.counts:
                why = "the charges were declared adaptive"
            under = f" {self.used_share(rule):.1%} of {rule} is used: {why}."
        raise PrivacyBudgetExceeded(
            f"charging {times} x {' and '.join(named)} would pass the budget epsilon ="
            f" {epsilon:g} at delta = {delta:g}; {fit}. {_NOTHING} Plan"
            f" fewer, or more noise ({planner}).{under}"
        )

    def filtered(self, first: Pair, declared: bool) -> Budget | None:
        """The budget under the filter that adaptive charges begin."""
        budget = self.settings.budget
        return self._budget(None if budget is None else Filter.of(*budget, first, declared))

    def budget_for(self, parts: list[Part], flag: Flag) -> Budget | None:
        """The budget that a charge has to fit, if any; raises if adaptive charges cannot begin."""
        if flag == "fixed" or self.is_adaptive or (self.later and self.settings.budget is None):
            return self.budget
        if self.later and self.first is not None:
            budget = self.filtered(self.first, False)
            assert budget is not None and budget.filter is not None
            if (used := self.used_share(budget.filter)) > 1:
                raise PrivacyBudgetExceeded(
                    f"a job used {used:.1%} of what later jobs may find in this ledger"
                    f" ({budget.filter}). {_NOTHING} In a new ledger charge with adaptive=True"
                    " from the start, or let one job make all releases."
                )
            return budget
        if self.settings.budget is None:
            raise ArgumentError(
                "adaptive=True needs a budget: if earlier outputs decide parameters, only a limit"
                " fixed in advance gives a guarantee. Write PrivacyAccountant(epsilon=...,"
                " delta=...)."
            )
        if self.counts:
            raise ArgumentError(
                "this accountant already has charges that were not adaptive, so it is too late"
                " for adaptive=True: use a new accountant and charge with adaptive=True from the"
                " first charge on."
            )
        # not that of these parts if a charge was here before and was taken back
        return self.filtered(self.first or parts[0].pair, self.first is None or self.declared)

    # --- charging ---------------------------------------------------------------------------------

    @property
    def place(self) -> dict[str, Any]:
        """The part of a saved state that identifies its file and how far this was read."""
        return {"ledger": "", "place": []}

    def refresh(self) -> None:
        """Takes in what other processes charged."""

    def settle(self, in_doubt: bool = False) -> None:
        """Returns what is reserved and unused; ``in_doubt``: more may be than is known here."""

    def flag(self, adaptive: bool) -> Flag:
        """Under which flag this job's charges stand."""
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
        """These releases were charged, out of a block if they were reserved."""
        self.keep(part.pair, Key(part.event, label, flag, self.job), part.times)

    def block_for(self, pair: Pair) -> Block | None:
        """Releases of ``pair`` that need no decision."""
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
        """The statements on which the guarantee rests."""
        if self._is_resumed and any(key.job == self.job for key in self.charges):
            self._notes[RESUMED] = None
        return [*self._notes]

    def note(self, statement: str) -> None:
        """Keeps a statement, unless it is there already."""
        self._notes[statement] = None

    def take_over(self, state: Mapping[str, Any], charges: Mapping[Key, int]) -> None:
        """Loads a saved state into an empty history; see ``PrivacyAccountant.load_state_dict``."""
        if state["ledger"]:
            raise ArgumentError(
                "the saved history belongs to a ledger file, which may have later charges: open"
                " that file, PrivacyAccountant(path=...), and resume with it."
            )
        if self.counts:
            raise ArgumentError(
                "this accountant is not empty: loading would lose or double its charges. Load"
                " into a new PrivacyAccountant."
            )
        settings, budget = self.settings, self.settings.budget
        is_same = (state["epsilon"], state["delta"]) == (settings.epsilon, settings.delta)
        is_adaptive = any(key.flag == "adaptive" for key in charges)
        if is_adaptive and not is_same:
            raise ArgumentError(
                "the saved history is adaptive: it is only valid with its budget"
                f" {[state['epsilon'], state['delta']]}; this accountant's is"
                f" {[settings.epsilon, settings.delta]}. Load it into one with the saved budget."
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
        """Keeps what is taken over, where others can read it if there are any."""
        self._is_resumed |= state["job"] != self.job

    def require(self, charges: Mapping[Key, int]) -> None:
        """Raises unless this history holds these charges, each of the job that made it."""
        held, wanted = (_by_job(found) for found in (self.charges, charges))
        if wanted - held:
            raise ArgumentError(
                "this accountant does not know the releases of the saved run, so they would be"
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
        # a count that nothing rounds down, and a flag that no misspelling turns into "fixed"
        is_row = isinstance(row, list | tuple) and len(row) == 5 and row[3] in get_args(Flag)
        if not (is_row and isinstance(row[1], int | float) and float(row[1]).is_integer()):
            raise ArgumentError(
                "this is not the state of a PrivacyAccountant: a charge in it is no whole number of"
                f" an event, {' or '.join(get_args(Flag))}. Load what state_dict() returned."
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
