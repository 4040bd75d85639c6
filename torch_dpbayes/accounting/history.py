"""The history of an accountant: what was charged, what it guarantees, and how it is saved."""

from __future__ import annotations

import math
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, NoReturn, get_args

from ..errors import ArgumentError, DPBayesError
from . import bounds, events, renyi
from .bounds import MOST_STEPS
from .budget import Budget, Filter
from .dominating_pairs import (
    Concentrated,
    Failure,
    Gaussian,
    NonPrivate,
    Pair,
    Repeated,
    added,
    dominating_pair,
)
from .events import (
    DpEvent,
    Method,
    Neighboring,
    RecordwiseBatchGaussianDpEvent,
    Unit,
    UserLevelDpEvent,
    require_unit,
)
from .privacy_loss import without_delta

Guarantee = Literal["fixed", "filter", "none"]
Flag = Literal["fixed", "adaptive"]
Key = tuple[DpEvent, str | None, Flag]  # event, label, flag
Counts = Mapping[Pair, int]
Jobs = dict[str, Counter[DpEvent]]  # how often each job charged each event

RESUMED = (
    "resumed from a saved state: nothing was released after it was saved, nor from another copy"
    " of it"
)
_RECORDWISE = "RecordwiseBatchGaussianDpEvent: who is in a batch does not depend on other records"
_NOTHING = "Nothing was recorded; release nothing."
_KNOWN_EVENTS = 4096  # whose parts are kept
_NAMED = 2  # different events of one charge, in an error


class PrivacyBudgetExceeded(DPBayesError, RuntimeError):
    """A charge would have passed the budget. Nothing was recorded, and nothing may be released."""

    code = "budget-exceeded"


class Settings(NamedTuple):
    """What never changes: budget (epsilon, delta), method, neighbouring relation, privacy unit."""

    budget: tuple[float, float] | None
    method: Method
    neighboring: Neighboring
    unit: Unit = "record"


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


def checked_flag(flag: Any) -> Flag:
    """``flag`` if it is one: a misspelt one would pass for "fixed"."""
    if flag not in get_args(Flag):
        raise ArgumentError(f"a saved charge is one of {', '.join(get_args(Flag))}, got {flag!r}.")
    checked: Flag = flag
    return checked


class History:
    """Charges under one budget.

    Attributes:
        charges: how often each event was charged, by label and flag.
        counts: the same by dominating pair.
        filter: the limit in force, if any.
        declared: whether the filter was there before the first release.
        later_jobs: whether a job charged that began after others had.
        first: what was released first, once.
        budget: decides what still fits; ``None`` without a budget.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.charges: dict[Key, int] = {}
        self.counts: dict[Pair, int] = {}
        self.filter: Filter | None = None
        self.declared = False
        self.later_jobs = False
        self.first: dict[Pair, int] = {}
        self.budget = self._budget(None)
        self._parts: dict[DpEvent, Part] = {}
        self._epsilons: dict[float, float] = {}  # by delta, of the present charges

    def _budget(self, rule: Filter | None) -> Budget | None:
        if self.settings.budget is None:
            return None
        return Budget(*self.settings.budget, self.settings.method, rule)

    # --- events -----------------------------------------------------------------------------------

    def decompose(self, event: DpEvent, count: int) -> list[Part]:
        """The elementary events of ``count`` times ``event``.

        Raises:
            ValueError: the event gives no guarantee here; the message says what to use instead.
        """
        try:
            known = self._parts.get(event)
        except TypeError:  # an event that cannot be hashed; the checks below say what is wrong
            known = None
        if known is not None:
            return [Part(known.event, count, known.pair)]
        parts = []
        for part, times in events.elementary(event, count):
            require_unit(part, self.settings.unit)
            pair = self.pair(part)
            if self.settings.method == "pld":
                bounds.require_loss_distribution(pair)
            parts.append(Part(part, times, pair))
        if len(parts) == 1 and parts[0].event == event:
            if len(self._parts) >= _KNOWN_EVENTS:
                self._parts.clear()
            # not under ``event``, whose numbers may be arrays that change
            self._parts[parts[0].event] = parts[0]
        return parts

    def pair(self, event: DpEvent) -> Pair:
        """The pair that dominates an elementary event here."""
        return dominating_pair(event, self.settings.neighboring)

    def keep(self, part: Part, label: str | None, flag: Flag) -> None:
        """Adds one more charge. A negative count takes back."""
        if self.budget is not None:
            self.budget.spend(part.pair, part.times)
        _change(self.charges, (part.event, label, flag), part.times)
        _change(self.counts, part.pair, part.times)
        self._epsilons.clear()

    # --- what it guarantees -----------------------------------------------------------------------

    @property
    def guarantee(self) -> Guarantee:
        """What epsilon is a bound for; see ``PrivacyAccountant``."""
        if self.filter is not None:
            return "filter"
        return "none" if self.later_jobs else "fixed"

    def fixed_epsilon(self, delta: float) -> float:
        """Epsilon, had all releases been fixed in advance."""
        if self.settings.method == "rdp":
            return renyi.upper_epsilon(self.counts, delta)
        return bounds.upper_epsilon(self.counts, delta)

    def epsilon(self, delta: float) -> float:
        """An upper bound on epsilon."""
        if not self.counts:
            return 0.0
        if self.filter is not None:
            return self.filter.epsilon(delta)
        if self.later_jobs:
            return math.inf
        if delta not in self._epsilons:
            value = self.fixed_epsilon(delta)
            budget = self.settings.budget
            if self.settings.method == "pld" and budget is not None and delta == budget[1]:
                # a charge may have been admitted by a bound that is tighter than this one
                value = min(value, budget[0])
            self._epsilons[delta] = value
        return self._epsilons[delta]

    def delta(self, epsilon: float) -> float:
        """An upper bound on delta."""
        if not self.counts:
            return 0.0
        if self.filter is not None:
            return self.filter.delta(epsilon)
        if self.later_jobs:
            return 1.0
        if self.settings.method == "rdp":
            return renyi.upper_delta(self.counts, epsilon)
        return bounds.upper_delta(self.counts, epsilon)

    def lower_epsilon(self, delta: float) -> float:
        """No accountant that knows only the events can prove less than this."""
        known: dict[Pair, int] = {
            pair: count
            for pair, count in self.counts.items()
            if not isinstance(pair, Concentrated | Repeated)
        }
        return bounds.lower_epsilon(known, delta) if known else 0.0

    def used_share(self) -> float:
        """How much of the filter's limit is used."""
        assert self.filter is not None
        return self.filter.cost(self.counts) / self.filter.limit

    def event_notes(self) -> list[str]:
        """What charged events state."""
        known = [event for event, _, _ in self.charges]
        known = [event.event if isinstance(event, UserLevelDpEvent) else event for event in known]
        stated = any(isinstance(event, RecordwiseBatchGaussianDpEvent) for event in known)
        return [_RECORDWISE] if stated else []

    # --- charging ---------------------------------------------------------------------------------

    def remaining(self, need: Counts, is_later: bool) -> int | None:
        """How many times ``need`` still fits; ``None`` without a budget."""
        budget = self.budget
        if budget is None:
            return None
        if self.filter is None and is_later:
            budget = self._budget(self._filter_of_budget())
            assert budget is not None
            budget.restart(self.counts)
        return budget.max_count(self.counts, need)

    def cheap(self, pair: Pair) -> int:
        """How often ``pair`` fits without a decision."""
        return MOST_STEPS if self.budget is None else self.budget.cheap({pair: 1})

    def charge(self, parts: list[Part], label: str | None, adaptive: bool) -> None:
        """Records a charge in memory, or raises before anything is recorded."""
        need = needed(parts)
        rule = self.rule(need, True, is_later=False) if adaptive else None
        if rule is not None:
            with self.under(rule, declared=True):
                self._require_fit(parts, need)
        else:
            self._require_fit(parts, need)
        self.first = self.first or {parts[0].pair: 1}
        for part in parts:
            self.keep(part, label, "adaptive" if adaptive else "fixed")

    def _require_fit(self, parts: list[Part], need: Counts) -> None:
        if self.budget is not None and not self.budget.fits(self.counts, need):
            self.refuse(parts)

    def refuse(self, parts: list[Part]) -> NoReturn:
        """Says why ``parts`` do not fit."""
        assert self.settings.budget is not None and self.budget is not None
        rule, (epsilon, delta) = self.filter, self.settings.budget
        need = needed(parts)
        if any(isinstance(pair, NonPrivate) for pair in need):
            raise PrivacyBudgetExceeded(
                "a release without noise (z = 0) has no finite epsilon and fits no budget: use a"
                f" positive noise multiplier, or an accountant without a budget. {_NOTHING}"
            )
        if rule is not None and any(isinstance(pair, Failure) for pair in need):
            raise PrivacyBudgetExceeded(
                "a release that may fail outright fits no filter, and what is adaptive or of a"
                f" later job needs one: charge it to an accountant of its own. {_NOTHING}"
            )
        if why := without_delta(added(self.counts, need), delta):
            raise PrivacyBudgetExceeded(f"{why} {_NOTHING}")
        times = sum(need.values())
        fit = "none fits"
        if times > 1:
            left = self.budget.max_count(self.counts, dict.fromkeys(need, 1))
            fit = f"{left} of these would still fit"
        different = list(dict.fromkeys(events.in_words(part.event) for part in parts))
        named = " and ".join(different[:_NAMED])
        if len(different) > _NAMED:
            named += f" and {len(different) - _NAMED} others"
        under = ""
        if rule is not None:
            why = (
                "the charges were declared adaptive"
                if self.declared
                else "this job or another began after others had charged, whose outputs it may"
                " depend on"
            )
            under = f" {self.used_share():.1%} of {rule.describe()} is used, which counts: {why}."
        raise PrivacyBudgetExceeded(
            f"charging {times} x {named} would pass the budget epsilon = {epsilon:g} at delta ="
            f" {delta:g}; {fit}. {_NOTHING} Plan fewer, or more noise"
            f" (get_noise_multiplier).{under}"
        )

    # --- filters ----------------------------------------------------------------------------------

    def rule(self, need: Counts, adaptive: bool, is_later: bool) -> Filter | None:
        """The filter that this charge puts into force, or ``None``."""
        if self.filter is not None or not (adaptive or is_later):
            return None
        budget = self.settings.budget
        if is_later:
            return None if budget is None else self._rule_of_later_jobs()
        if budget is None:
            raise ArgumentError(
                "adaptive=True needs a budget: parameters chosen from earlier outputs are private"
                " only against a limit that was fixed before. Write"
                " PrivacyAccountant(epsilon=..., delta=...)."
            )
        if self.counts:
            raise ArgumentError(
                "this accountant already holds charges that were not adaptive, and becoming"
                " adaptive would be a choice made after seeing outputs: charge with adaptive=True"
                " from the first charge on, in a new accountant."
            )
        if all(isinstance(pair, Gaussian) for pair in need):
            return Filter.gaussian(*budget)
        return Filter.renyi(*budget, need)

    def _rule_of_later_jobs(self) -> Filter:
        rule = self._filter_of_budget()
        if (cost := rule.cost(self.counts)) > rule.limit:
            raise PrivacyBudgetExceeded(
                f"a job used {cost / rule.limit:.1%} of what later jobs may find in this ledger"
                f" ({rule.describe()}). {_NOTHING} In a new ledger charge with adaptive=True from"
                " the start, or let one job make all releases."
            )
        return rule

    def _filter_of_budget(self) -> Filter:
        """The filter for later jobs: a function of the budget and of the first release, which
        were there before any output.
        """
        assert self.settings.budget is not None
        return Filter.renyi(*self.settings.budget, self.first or self.counts)

    def start(self, rule: Filter, declared: bool) -> None:
        """Puts ``rule`` into force."""
        self.filter, self.declared = rule, declared
        self.budget = self._budget(rule)
        if self.budget is not None:
            self.budget.restart(self.counts)

    @contextmanager
    def under(self, rule: Filter | None, declared: bool) -> Iterator[None]:
        """Under ``rule``, which stays in force unless there is an exception."""
        before = self.budget, self.filter, self.declared
        if rule is not None:
            self.start(rule, declared)
        try:
            yield
        except BaseException:
            self.budget, self.filter, self.declared = before
            raise


def _change(counts: dict[Any, int], key: Any, by: int) -> None:
    counts[key] = counts.get(key, 0) + by
    if not counts[key]:
        del counts[key]


# --- saving ---------------------------------------------------------------------------------------


class Line(NamedTuple):
    """Releases of one event by one job, which is empty where a ledger knows it."""

    event: DpEvent
    count: int  # type: ignore[assignment]
    label: str | None
    flag: Flag
    job: str


class SavedState(NamedTuple):
    """A state that :func:`save` wrote, checked.

    Attributes:
        lines: the history.
        jobs: what each job charged; nothing where a ledger knows it.
        filter: its code.
        budget: epsilon and delta, or nothing.
        ledger: the identity of the file that the state belongs to, or empty.
        place: how far that file was read.
        notes: statements on which the guarantee rests.
    """

    lines: list[Line]
    jobs: Jobs
    filter: str
    budget: list[float]
    ledger: str
    place: list[Any]
    notes: list[str]

    def counted(self) -> Counter[DpEvent]:
        """How often each event was charged."""
        found: Counter[DpEvent] = Counter()
        for line in self.lines:
            found[line.event] += line.count
        return found


def save(
    history: History, jobs: Jobs, ledger: str, place: list[Any], notes: list[str]
) -> dict[str, Any]:
    """A history as strings, numbers, lists and dicts."""
    settings, rule = history.settings, history.filter
    return {
        "method": settings.method,
        "neighboring": settings.neighboring,
        "unit": settings.unit,
        "filter": "" if rule is None else rule.code,
        "budget": list(settings.budget or ()),
        "history": [
            [events.encode(event), float(count), label or "", flag]
            for (event, label, flag), count in history.charges.items()
        ],
        "ledger": ledger,
        "place": place,
        "jobs": {
            job: [[events.encode(event), float(count)] for event, count in counts.items()]
            for job, counts in jobs.items()
        },
        "notes": notes,
    }


def read_saved(state: Mapping[str, Any], settings: Settings) -> SavedState:
    """A saved state, for an accountant of these settings.

    Raises:
        ValueError: it is none, has other settings, or was changed.
    """
    wanted = {"method", "neighboring", "unit", "filter", "budget", "history"}
    wanted |= {"ledger", "place", "jobs", "notes"}
    if missing := wanted - set(state):
        raise ArgumentError(
            f"this is not the state of a PrivacyAccountant: {sorted(missing)} missing. Load what"
            " state_dict() returned."
        )
    for name in ("method", "neighboring", "unit"):
        if state[name] != getattr(settings, name):
            raise ArgumentError(
                f"the saved accountant has {name}={state[name]!r}, this one"
                f" {getattr(settings, name)!r}: their numbers mean different things. Make this"
                " accountant with the saved setting."
            )
    decode = events.decode
    lines = [
        Line(decode(code), events.positive_count(int(n)), label or None, checked_flag(flag), "")
        for code, n, label, flag in state["history"]
    ]
    jobs: Jobs = {}
    if not state["ledger"]:
        for job, counts in state["jobs"].items():
            jobs[job] = Counter({decode(code): int(count) for code, count in counts})
        lines = _by_jobs(lines, jobs)
    return SavedState(
        lines,
        jobs,
        state["filter"],
        list(state["budget"]),
        str(state["ledger"]),
        list(state["place"]),
        list(state["notes"]),
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
        raise ArgumentError(
            "this state's history is not the sum of what its jobs charged: it was changed. Load it"
            " as it was saved."
        )
    return shares


def check_saved(history: History, saved: SavedState) -> Filter | None:
    """Raises unless an empty history may take a saved one over; else the filter that is then in
    force.

    Raises:
        PrivacyBudgetExceeded: it does not fit the budget.
        ValueError: this history is not empty, or has another budget than an adaptive saved one.
    """
    settings = history.settings
    if history.counts:
        raise ArgumentError(
            "this accountant is not empty: loading would forget or double what it holds."
            " Load into a new PrivacyAccountant."
        )
    same = saved.budget == list(settings.budget or ())
    if any(line.flag == "adaptive" for line in saved.lines) and not same:
        raise ArgumentError(
            "the saved history is adaptive, which is private only against its budget"
            f" {saved.budget}; this accountant's is {list(settings.budget or ())}. Load it into one"
            " with the saved budget."
        )
    rule = Filter.decoded(saved.filter, settings.budget)
    if settings.budget is None or not saved.lines:
        return rule
    trial = History(settings)
    for line in saved.lines:
        for part in trial.decompose(line.event, line.count):
            trial.keep(part, line.label, line.flag)
    epsilon, delta = settings.budget
    # a history that was admitted under the same budget may be bounded a hair above it by another
    # discretisation
    slack = 1.0 if not same else 1.001 if settings.method == "pld" else 1 + 1e-9
    if rule is None:
        fits = trial.fixed_epsilon(delta) <= epsilon * slack
    else:
        fits = rule.cost(trial.counts) <= rule.limit * (1 + 1e-9)
    if not fits:
        raise PrivacyBudgetExceeded(
            "the saved history costs more than this accountant's budget, epsilon ="
            f" {epsilon:g} at delta = {delta:g}. Nothing was loaded. Load it into an accountant"
            " with the budget that it was made with."
        )
    return rule


class Origins:
    """Whose releases a history in memory holds. Nothing else charges under its job's name, so
    whoever holds as many of its releases holds the same ones.
    """

    def __init__(self) -> None:
        self.job = uuid.uuid4().hex
        self._earlier: Jobs = {}

    def charged(self, history: History) -> Jobs:
        """What each job charged."""
        own: Jobs = {self.job: Counter()}
        for (event, _, _), count in history.charges.items():
            own[self.job][event] += count
        for counts in self._earlier.values():
            own[self.job] -= counts
        return {**self._earlier, **own} if own[self.job] else dict(self._earlier)

    def saved(self, history: History) -> Jobs:
        """What each job charged, and the own one also if that is nothing: a copy does not know
        it.
        """
        return {self.job: Counter(), **self.charged(history)}

    def goes_on(self, history: History) -> bool:
        """Whether the history was taken over and charged since."""
        return bool(self._earlier) and self.job in self.charged(history)

    def take_over(self, jobs: Jobs) -> None:
        """The history holds what these jobs charged."""
        self._earlier = {job: counts for job, counts in jobs.items() if job != self.job}
