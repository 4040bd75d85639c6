"""The privacy accountant: what was released, what it cost, what is left."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, NoReturn, overload

import attr
import numpy as np

from . import events, privacy_loss, renyi
from .events import ComposedDpEvent, DpEvent, GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from .privacy_loss import Concentrated, Gaussian, Neighboring, NonPrivate, Pair, Sampled, added

Method = Literal["pld", "rdp"]

_SMALLEST_DELTA = 1e-10
_MOST_STEPS = 2**40
_COARSE = 1.02  # ratio of merged levels in a first, cheap check of a charge


class PrivacyBudgetExceeded(RuntimeError):
    """A charge would have passed the budget. Nothing was recorded, and nothing may be released."""


class Charge(NamedTuple):
    """One line of an accountant's history: ``count`` releases of one elementary event."""

    event: DpEvent
    count: int = 1  # type: ignore[assignment]
    label: str | None = None
    adaptive: bool = False


class EpsilonBounds(NamedTuple):
    """``upper`` is the guarantee; ``lower`` is what no accountant that knows only the events can go below."""

    lower: float
    upper: float


class _Filter(NamedTuple):
    """A limit on an additive cost, fixed by the budget alone: it holds however the charges are chosen."""

    kind: Literal["gaussian", "renyi"]
    order: float
    limit: float

    @classmethod
    def fixed(cls, kind: Literal["gaussian", "renyi"], epsilon: float, delta: float) -> _Filter:
        if kind == "gaussian":
            return cls(kind, math.inf, privacy_loss.gaussian_mu(epsilon, delta) ** 2)
        order = renyi.filter_order(epsilon, delta)
        return cls(kind, order, float(renyi.allowed(epsilon, delta, [order])[0]))

    def cost(self, counts: Mapping[Pair, int]) -> float:
        if self.kind == "gaussian":
            return math.fsum(count * privacy_loss.dominating_mu(pair) ** 2 for pair, count in counts.items())
        return float(renyi.curve(counts, [self.order])[0])

    def epsilon(self, delta: float) -> float:
        if self.kind == "gaussian":
            return privacy_loss.upper_epsilon({Gaussian(math.sqrt(self.limit)): 1}, delta)
        return renyi.epsilon(np.array([self.limit]), delta, [self.order])

    def delta(self, epsilon: float) -> float:
        if self.kind == "gaussian":
            return privacy_loss.upper_delta({Gaussian(math.sqrt(self.limit)): 1}, epsilon)
        return renyi.delta(np.array([self.limit]), epsilon, [self.order])


class _Reserve:
    """Releases that certainly still fit, together with all other reserves."""

    __slots__ = ("last", "left", "used")

    def __init__(self, left: int, last: Pair) -> None:
        self.left, self.used, self.last = left, 0, last


class PrivacyAccountant:
    r"""Records releases, and says what they cost together: epsilon such that for all neighbours D, D' and all S

    .. math:: \Pr[M(D) \in S] \le e^\varepsilon \Pr[M(D') \in S] + \delta.

    With a budget it also refuses: a charge that would pass the budget raises :class:`PrivacyBudgetExceeded` and leaves
    the accountant as it was. Charge first, release second.

    Args:
        epsilon: the budget's epsilon. ``None``: no limit.
        delta: the budget's delta, also the default of :meth:`get_epsilon`. At least 1e-10.
        method: ``"pld"`` composes privacy loss distributions and is tight. ``"rdp"`` adds Renyi curves: 3 to 15 percent
            above, and knows zero-concentrated releases.
        neighboring: ``"add_or_remove_one"`` record, or ``"replace_one"`` record by another.

    **Privacy.** Every number returned is an upper bound, discretisation and round-off included, for releases whose
    parameters were fixed before the first of them (``method="rdp"``: likewise, because the best order is chosen
    afterwards). Parameters chosen from earlier outputs need ``compose(..., adaptive=True)`` from the first charge on.
    """

    def __init__(
        self,
        epsilon: float | None = None,
        delta: float | None = None,
        *,
        method: Method = "pld",
        neighboring: Neighboring = "add_or_remove_one",
    ) -> None:
        if method not in ("pld", "rdp"):
            raise ValueError(f"method must be 'pld' or 'rdp', got {method!r}.")
        if neighboring not in ("add_or_remove_one", "replace_one"):
            raise ValueError(f"neighboring must be 'add_or_remove_one' or 'replace_one', got {neighboring!r}.")
        if epsilon is not None:
            epsilon = check_epsilon(epsilon)
            if delta is None:
                raise ValueError("a budget needs both numbers: PrivacyAccountant(epsilon=3.0, delta=1e-5).")
        self._epsilon = epsilon
        self._delta = None if delta is None else check_delta(delta)
        self._method: Method = method
        self._neighboring: Neighboring = neighboring
        self._charges: dict[tuple[DpEvent, str | None, bool], int] = {}
        self._counts: dict[Pair, int] = {}
        self._filter: _Filter | None = None
        self._reserves: dict[Pair, _Reserve] = {}
        self._falling = False
        self._last_steps = 1
        self._memory: dict[float, float] = {}
        self._process = os.getpid()
        self._lock = threading.RLock()

    # --- reading -----------------------------------------------------------------------------------------------------

    @property
    def epsilon(self) -> float | None:
        """The budget's epsilon, or ``None``."""
        return self._epsilon

    @property
    def delta(self) -> float | None:
        """The budget's delta, or ``None``."""
        return self._delta

    @property
    def method(self) -> Method:
        """``"pld"`` or ``"rdp"``."""
        return self._method

    @property
    def neighboring(self) -> Neighboring:
        """``"add_or_remove_one"`` or ``"replace_one"``."""
        return self._neighboring

    @property
    def history(self) -> tuple[Charge, ...]:
        """What was charged, equal charges added up, in the order of their first occurrence. A copy."""
        with self._lock:
            return tuple(Charge(event, n, label, adaptive) for (event, label, adaptive), n in self._charges.items())

    def __len__(self) -> int:
        """How many releases were charged."""
        return sum(self._charges.values())

    def __bool__(self) -> bool:
        # Else an empty accountant would be false, and ``accountant or PrivacyAccountant()`` would drop a budget.
        return True

    def __repr__(self) -> str:
        return (
            f"PrivacyAccountant(epsilon={self._epsilon}, delta={self._delta}, method={self._method!r}, "
            f"neighboring={self._neighboring!r}): {len(self)} releases"
        )

    @overload
    def get_epsilon(self, delta: float | None = None, return_bounds: Literal[False] = False) -> float: ...

    @overload
    def get_epsilon(self, delta: float | None = None, *, return_bounds: Literal[True]) -> EpsilonBounds: ...

    def get_epsilon(self, delta: float | None = None, return_bounds: bool = False) -> float | EpsilonBounds:
        """Epsilon of everything charged so far.

        Args:
            delta: defaults to the budget's.
            return_bounds: also return a lower bound, to see how tight the guarantee is.

        Returns:
            An upper bound on epsilon. Under an adaptive filter it is what the filter guarantees, spent or not: a run
            that may stop depending on its outputs has no smaller guarantee.
        """
        delta = self._default_delta(delta)
        with self._lock:
            upper = self._upper(delta)
            if not return_bounds:
                return upper
            known: dict[Pair, int] = {pair: n for pair, n in self._counts.items() if not isinstance(pair, Concentrated)}
            lower = privacy_loss.lower_epsilon(known, delta) if known else 0.0
            return EpsilonBounds(min(lower, upper), upper)

    def get_delta(self, epsilon: float) -> float:
        """An upper bound on delta at ``epsilon`` >= 0, for everything charged so far."""
        epsilon = float(epsilon)
        if not 0 <= epsilon < math.inf:
            raise ValueError(f"epsilon must be finite and at least 0, got {epsilon!r}.")
        with self._lock:
            if not self._counts:
                return 0.0
            if self._filter is not None:
                return self._filter.delta(epsilon)
            if self._method == "rdp":
                return renyi.delta(renyi.curve(self._counts), epsilon)
            return privacy_loss.upper_delta(self._counts, epsilon)

    def remaining(self, event: DpEvent) -> int | float:
        """How many times ``event`` still fits the budget. ``math.inf`` without a budget, or if it costs nothing."""
        need = self._need(self._parts(event, 1))
        with self._lock:
            if self._epsilon is None or not need:
                return math.inf
            if any(isinstance(pair, NonPrivate) for pair in need):
                return 0
            return largest(self._fits_more(self._counts, need), start=self._last_steps)

    def _default_delta(self, delta: float | None) -> float:
        if delta is not None:
            return check_delta(delta)
        if self._delta is None:
            raise ValueError("delta is needed, as this accountant has no budget: get_epsilon(delta=1e-5).")
        return self._delta

    def _upper(self, delta: float) -> float:
        if not self._counts:
            return 0.0
        if self._filter is not None:
            return self._filter.epsilon(delta)
        if delta not in self._memory:
            value = self._price(self._counts, delta)
            if self._epsilon is not None and delta == self._delta:
                # What is recorded was admitted by a composition with more releases than these, which kept the budget.
                value = min(value, self._epsilon)
            self._memory[delta] = value
        return self._memory[delta]

    def _price(self, counts: Mapping[Pair, int], delta: float) -> float:
        if self._method == "rdp":
            return renyi.epsilon(renyi.curve(counts), delta)
        return privacy_loss.upper_epsilon(counts, delta)

    # --- charging ----------------------------------------------------------------------------------------------------

    def compose(
        self, event: DpEvent, count: int = 1, label: str | None = None, adaptive: bool = False
    ) -> PrivacyAccountant:
        """Records ``count`` releases of ``event``, or raises before anything is recorded.

        Args:
            event: see :mod:`torch_dpbayes.accounting.events`.
            count: how often.
            label: what :meth:`summary` adds up the shares by.
            adaptive: the parameters of this charge depend on earlier outputs. The guarantee is then a filter: a limit
                on a Renyi divergence at one order, or on mu^2 if the first charge is a Gaussian, derived from the
                budget alone. It needs a budget, and must be in force from the first charge.

        Raises:
            PrivacyBudgetExceeded: the charge would pass the budget. Nothing may be released.
            ValueError: the event gives no guarantee here; the message says what to use instead.
        """
        count = events.positive_count(count)
        if label is not None and (not isinstance(label, str) or not label):
            raise ValueError(f"label must be a non-empty string or None, got {label!r}.")
        parts = self._parts(event, count)
        with self._lock:
            self._record(parts, label, bool(adaptive))
        return self

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """One Poisson-sampled Gaussian release, under the name that Opacus uses.

        The caller asserts Poisson sampling. Opacus calls this also for ``poisson_sampling=False``, where it is not
        true: use ``make_private(..., poisson_sampling=True)``, its default.
        """
        rate = events.sampling_rate(sample_rate)
        self.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(events.gaussian_noise_multiplier(noise_multiplier))))

    def _parts(self, event: DpEvent, count: int) -> list[tuple[DpEvent, int, Pair]]:
        parts = []
        for part, times in events.elementary(event, count):
            pair = privacy_loss.dominating_pair(part, self._neighboring)
            if self._method == "pld" and isinstance(pair, Concentrated):
                raise ValueError(privacy_loss.ZCDP_REFUSAL)
            parts.append((part, times, pair))
        return parts

    @staticmethod
    def _need(parts: Iterable[tuple[DpEvent, int, Pair]]) -> dict[Pair, int]:
        need: dict[Pair, int] = {}
        for _, times, pair in parts:
            need[pair] = need.get(pair, 0) + times
        return need

    def _record(self, parts: list[tuple[DpEvent, int, Pair]], label: str | None, adaptive: bool) -> None:
        if not parts:
            return
        if os.getpid() != self._process:
            raise RuntimeError(
                "this accountant was forked into another process, where a charge would be lost to its parent: one "
                "budget would be spent twice. Charge in the process that made the accountant, or give every process "
                "an accountant with a share of the budget."
            )
        if adaptive and self._filter is None:
            self._start_filter("gaussian" if all(isinstance(pair, Gaussian) for _, _, pair in parts) else "renyi")
        try:
            if self._epsilon is not None and not self._reserved(parts):
                self._admit(self._need(parts))
        except BaseException:
            if not self._counts:
                self._filter = None
            raise
        self._keep(parts, label, adaptive)

    def _keep(self, parts: list[tuple[DpEvent, int, Pair]], label: str | None, adaptive: bool) -> None:
        for part, times, pair in parts:
            key = (part, label, adaptive)
            self._charges[key] = self._charges.get(key, 0) + times
            self._counts[pair] = self._counts.get(pair, 0) + times
        self._memory.clear()

    def _start_filter(self, kind: Literal["gaussian", "renyi"]) -> None:
        if self._epsilon is None or self._delta is None:
            raise ValueError(
                "adaptive=True needs a budget: parameters chosen from earlier outputs are private only against a limit "
                "that was fixed before. Make the accountant with PrivacyAccountant(epsilon=..., delta=...)."
            )
        if self._counts:
            raise ValueError(
                "this accountant already holds charges that were not adaptive. Whether to become adaptive would itself "
                "be a choice made after seeing outputs, which neither guarantee covers. Charge with adaptive=True from "
                "the first charge on, in a new accountant."
            )
        self._filter = _Filter.fixed(kind, self._epsilon, self._delta)

    def _reserved(self, parts: list[tuple[DpEvent, int, Pair]]) -> bool:
        """Takes the charge out of the reserves if they cover it: no composition per step."""
        taken: list[tuple[_Reserve, int, Pair]] = []
        for _, times, pair in parts:
            reserve = self._reserves.get(pair)
            if reserve is None or reserve.left < times:
                reserve = next((r for p, r in self._reserves.items() if r.left >= times and _covers(p, pair)), None)
            if reserve is None:
                for other, n, _ in taken:
                    other.left += n
                    other.used -= n
                return False
            reserve.left -= times
            reserve.used += times
            taken.append((reserve, times, pair))
        for reserve, _, pair in taken:
            reserve.last = pair
        return True

    def _fits(self, counts: Mapping[Pair, int], tolerance: float = 1.0) -> bool:
        assert self._epsilon is not None and self._delta is not None
        if self._filter is not None:
            return self._filter.cost(counts) <= self._filter.limit * tolerance
        return self._price(counts, self._delta) <= self._epsilon * tolerance

    def _admit(self, need: dict[Pair, int]) -> None:
        """Checks a charge against the budget, and reserves what else will fit for the charges to come."""
        if any(isinstance(pair, NonPrivate) for pair in need):
            raise PrivacyBudgetExceeded(
                "a release without noise (z = 0) has no finite epsilon and fits no budget. Use a positive noise "
                "multiplier, or an accountant without a budget. Nothing was recorded; release nothing."
            )
        expected = {reserve.last: reserve.used for reserve in self._reserves.values() if reserve.used}
        for pair, times in need.items():
            family = [p for p in expected if _same_family(p, pair)]
            expected[pair] = max([times, *(expected.pop(p) for p in family)])
            # A multiplier that fell below what was reserved will fall again: from now on reserve for lower ones.
            self._falling |= any(_same_family(p, pair) and not _covers(p, pair) for p in self._reserves)
        least = min(expected.values())
        base = added(self._counts, need)
        many = self._method == "pld" and len(base) > 48
        if not many and not self._fits(base):
            self._refuse(need)
        # From cheap to exact: coarse levels first. While multipliers fall, a reserve for lower ones lasts longer, but
        # is smaller; one for the present multiplier serves this step only.
        slacks = ((1.2, 1.0), (1.03, 0.5), (1.0, 0.02)) if self._falling else ((1.0, 1.0),)
        steps, worth = 0, 0.0
        weights: dict[Pair, int] = {}
        for ratio in (_COARSE, privacy_loss.RATIO) if many else (privacy_loss.RATIO,):
            for slack, value in slacks:
                candidate: dict[Pair, int] = {}
                for pair, used in expected.items():
                    candidate[_weaker(pair, slack)] = max(1, min(round(used / least), 1000))
                fit = largest(self._fits_more(base, candidate, ratio), start=self._last_steps, rough=True)
                if fit * value > worth:
                    steps, weights, worth = fit, candidate, fit * value
                if fit > 4 + len(self) // 20:
                    break
            if worth > 4:
                break
        if many and not steps and not self._fits(base):
            self._refuse(need)
        self._reserves = {pair: _Reserve(steps * n, pair) for pair, n in weights.items()}
        for pair, times in need.items():  # charged past the reserve, but part of what to expect next time
            kept = (r for p, r in self._reserves.items() if _same_family(p, pair) or p == pair)
            reserve = next(kept, None) or self._reserves.setdefault(pair, _Reserve(0, pair))
            reserve.used, reserve.last = times, pair
        self._last_steps = max(steps, 1)

    def _fits_more(
        self, base: Mapping[Pair, int], more: Mapping[Pair, int], ratio: float = privacy_loss.RATIO
    ) -> Callable[[int], bool]:
        """Whether so many times ``more`` fit after ``base``, as a function that is cheap to call again."""
        assert self._epsilon is not None and self._delta is not None
        epsilon, delta = self._epsilon, self._delta
        if self._filter is not None:
            before, each, limit = self._filter.cost(base), self._filter.cost(more), self._filter.limit
            return lambda steps: before + steps * each <= limit
        if self._method == "rdp":
            past, step = renyi.curve(base), renyi.curve(more)
            return lambda steps: renyi.epsilon(past + steps * step, delta) <= epsilon
        if len(base) <= 4:
            return lambda steps: self._fits(added(base, more, steps))
        price = privacy_loss.extension(base, more, delta, self._last_steps, ratio)
        return lambda steps: price(steps) <= epsilon

    def _refuse(self, need: dict[Pair, int]) -> NoReturn:
        assert self._epsilon is not None and self._delta is not None
        times = sum(need.values())
        if times > 1:
            unit = {pair: 1 for pair in need}
            left = largest(self._fits_more(self._counts, unit))
            fit = f"{left} of these would still fit"
        else:
            fit = "not one more fits"
        raise PrivacyBudgetExceeded(
            f"charging {times} x {', '.join(map(str, need))} would pass the budget epsilon = {self._epsilon:g} at "
            f"delta = {self._delta:g} ({len(self)} releases so far, epsilon = {self._upper(self._delta):.4g}); {fit}. "
            "Nothing was recorded; release nothing. Stop here, or plan the next run with fewer steps, a larger noise "
            "multiplier or a smaller sampling rate (torch_dpbayes.get_noise_multiplier)."
        )

    # --- handing on --------------------------------------------------------------------------------------------------

    def to_dp_event(self) -> ComposedDpEvent:
        """The history as one event, for any dp_accounting accountant that knows its parts."""
        return ComposedDpEvent([SelfComposedDpEvent(charge.event, charge.count) for charge in self.history])

    def summary(self) -> str:
        """Relation, method, budget, epsilon with bounds, the guarantee in force, and the shares of each label."""
        with self._lock:
            delta = self._delta if self._delta is not None else 1e-5
            bounds = self.get_epsilon(delta, return_bounds=True)
            lines = [
                f"Privacy accountant: neighbouring data sets differ by {self._neighboring}, method {self._method}",
                "  budget      "
                + ("none" if self._epsilon is None else f"epsilon = {self._epsilon:g} at delta = {self._delta:g}"),
                f"  spent       epsilon <= {bounds.upper:.5g} at delta = {delta:g} (and >= {bounds.lower:.5g}), "
                f"{len(self)} releases",
                f"  guarantee   {self._guarantee()}",
            ]
            lines += self._shares(delta)
            return "\n".join(lines)

    def _guarantee(self) -> str:
        if self._filter is None:
            kind = "privacy loss distributions" if self._method == "pld" else "Renyi curves, at the best order"
            return f"upper bound by {kind}; valid for parameters fixed before the first release"
        spent = self._filter.cost(self._counts) / self._filter.limit
        what = "mu^2" if self._filter.kind == "gaussian" else f"the Renyi divergence of order {self._filter.order:.3g}"
        return f"filter on {what}, valid for parameters chosen from earlier outputs; {spent:.1%} of it used"

    def _shares(self, delta: float) -> list[str]:
        """Shares of an additive cost: the Renyi divergence at the order that decides epsilon."""
        labels: dict[str, dict[Pair, int]] = {}
        for (event, label, _), count in self._charges.items():
            for _, times, pair in self._parts(event, count):
                group = labels.setdefault(label or "(no label)", {})
                group[pair] = group.get(pair, 0) + times
        if any(isinstance(pair, NonPrivate) for pair in self._counts):
            return [f"  {label:<11} {sum(group.values())} releases" for label, group in labels.items()]
        total = renyi.curve(self._counts)
        best = renyi.best_order(total, delta) if self._counts else 0
        return [
            f"  {label:<11} {renyi.curve(group)[best] / total[best]:.1%} of the cost, {sum(group.values())} releases"
            for label, group in labels.items()
        ]

    def state_dict(self) -> dict[str, Any]:
        """The history and the settings, as strings, floats and lists."""
        with self._lock:
            return {
                "method": self._method,
                "neighboring": self._neighboring,
                "filter": self._filter.kind if self._filter else "",
                "budget": [b for b in (self._epsilon, self._delta) if b is not None] if self._epsilon else [],
                "history": [
                    [_encode(event), float(count), label or "", "adaptive" if adaptive else "fixed"]
                    for (event, label, adaptive), count in self._charges.items()
                ],
            }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over a saved history. This accountant must be empty, of the same method and relation; its own budget
        holds, and must be the saved one if the history is adaptive.

        Raises:
            PrivacyBudgetExceeded: the history does not fit this accountant's budget. Nothing is loaded.
        """
        with self._lock:
            if self._counts:
                raise ValueError(
                    "this accountant is not empty: loading would forget or double what it holds. Load into a new "
                    "PrivacyAccountant."
                )
            missing = {"method", "neighboring", "filter", "budget", "history"} - set(state_dict)
            if missing:
                raise ValueError(f"this is not the state of a PrivacyAccountant: {sorted(missing)} missing.")
            for name in ("method", "neighboring"):
                if state_dict[name] != getattr(self, name):
                    raise ValueError(
                        f"the saved accountant has {name}={state_dict[name]!r}, this one {getattr(self, name)!r}: "
                        "their numbers mean different things. Make this accountant with the saved setting."
                    )
            lines = [
                (_decode(code), int(count), label or None, kind == "adaptive")
                for code, count, label, kind in state_dict["history"]
            ]
            own = [] if self._epsilon is None or self._delta is None else [self._epsilon, self._delta]
            if any(adaptive for *_, adaptive in lines) and list(state_dict["budget"]) != own:
                raise ValueError(
                    f"the saved history is adaptive, which is private only against the limit {state_dict['budget']} "
                    f"that was fixed at its start; this accountant's is {own}."
                )
            loaded = [(self._parts(event, events.positive_count(count)), *rest) for event, count, *rest in lines]
            counts = self._need(part for parts, _, _ in loaded for part in parts)
            self._reserves.clear()
            if state_dict["filter"]:
                self._start_filter(state_dict["filter"])
            # A history that was admitted under the same budget may be priced a hair above it by another discretisation.
            same = list(state_dict["budget"]) == own
            try:
                slack = 1.0 if not same else 1.001 if self._method == "pld" and self._filter is None else 1 + 1e-9
                if self._epsilon is not None and counts and not self._fits(counts, slack):
                    raise PrivacyBudgetExceeded(
                        f"the saved history costs more than this accountant's budget, epsilon = {self._epsilon:g} at "
                        f"delta = {self._delta:g}. Nothing was loaded. Load it into an accountant with the budget that "
                        "it was made with."
                    )
            except BaseException:
                self._filter = None
                raise
            for parts, label, adaptive in loaded:
                self._keep(parts, label, adaptive)

    def _refuse_copy(self, *_: Any) -> NoReturn:
        raise TypeError(
            "a PrivacyAccountant cannot be copied or sent to another process: both copies would spend the same budget. "
            "Pass the object itself on, or save state_dict() and load it into a new accountant when this one is gone."
        )

    __copy__ = __deepcopy__ = __reduce_ex__ = _refuse_copy

    # --- what Opacus asks of an accountant ---------------------------------------------------------------------------

    @classmethod
    def mechanism(cls) -> str:
        """Name under which Opacus files the state."""
        return "torch_dpbayes"

    def get_optimizer_hook_fn(self, sample_rate: float) -> Callable[[Any], None]:
        """The hook that Opacus' ``make_private`` attaches to its optimizer."""
        rate = events.sampling_rate(sample_rate)

        def hook(optimizer: Any) -> None:
            if optimizer.accumulated_iterations != 1:
                raise RuntimeError(
                    f"Opacus summed {optimizer.accumulated_iterations} batches before one step. A record drawn in more "
                    "than one of them counts more than once, which no charge of this library covers. Use Opacus' "
                    "BatchMemoryManager for batches that do not fit into memory, and step after every batch."
                )
            self.step(noise_multiplier=optimizer.noise_multiplier, sample_rate=rate)

        return hook


def check_epsilon(epsilon: Any) -> float:
    """``epsilon`` as a positive finite ``float``."""
    value = float(epsilon)
    if not 0 < value < math.inf:
        raise ValueError(f"epsilon must be positive and finite, got {epsilon!r}. No limit is epsilon=None.")
    return value


def check_delta(delta: Any) -> float:
    """``delta`` as a ``float`` in [1e-10, 1)."""
    value = float(delta)
    if not 0 < value < 1:
        raise ValueError(f"delta must lie in (0, 1), got {delta!r}. A common choice is below 1 / number of records.")
    if value < _SMALLEST_DELTA:
        raise ValueError(
            f"delta = {value:g} is below {_SMALLEST_DELTA:g}, where round-off and truncated tails of the "
            "floating-point computation are no longer negligible: the epsilon would not be a proven bound. Use "
            "delta >= 1e-10."
        )
    return value


def largest(fits: Callable[[int], bool], *, start: int = 1, rough: bool = False) -> int:
    """The largest number of steps that fits, 0 if none; ``rough``: one that fits and is at least 3/4 of it."""
    low, high = 0, start
    if fits(start):
        while fits(4 * high):
            high *= 4
            if high >= _MOST_STEPS:
                return high
        low, high = high, 4 * high
    else:
        while high > 1 and not fits(high // 4 or 1):
            high = high // 4 or 1
        if high == 1:
            return 0
        low = high // 4 or 1
    while high - low > (max(1, high // 4) if rough else 1):
        middle = max(low + 1, min(high - 1, math.isqrt(low * high)))
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _same_family(a: Pair, b: Pair) -> bool:
    if isinstance(a, Sampled) and isinstance(b, Sampled):
        return a.kind == b.kind and a.rate == b.rate
    return type(a) is type(b) and isinstance(a, Gaussian)


def _covers(reserve: Pair, pair: Pair) -> bool:
    """Whether ``reserve`` dominates ``pair``: less noise and a larger sampling rate are less private."""
    if isinstance(reserve, Sampled) and isinstance(pair, Sampled):
        return reserve.kind == pair.kind and reserve.rate >= pair.rate and reserve.noise <= pair.noise
    if isinstance(reserve, Gaussian) and isinstance(pair, Gaussian):
        return reserve.mu >= pair.mu
    return reserve == pair


def _weaker(pair: Pair, slack: float) -> Pair:
    if isinstance(pair, Sampled):
        return Sampled(pair.kind, pair.rate, pair.noise / slack)
    return Gaussian(pair.mu * slack) if isinstance(pair, Gaussian) else pair


def _encode(event: DpEvent) -> list[Any]:
    values = (getattr(event, field.name) for field in attr.fields(type(event)))
    return [type(event).__name__, *(_encode(v) if isinstance(v, DpEvent) else float(v) for v in values)]


def _decode(code: Any) -> DpEvent:
    if not isinstance(code, list) or not code or code[0] not in events.__all__:
        raise ValueError(f"this is not a saved event: {code!r}.")
    values = [_decode(value) if isinstance(value, list) else float(value) for value in code[1:]]
    if code[0] == "SampledWithoutReplacementDpEvent":
        values[:2] = int(values[0]), int(values[1])
    event: DpEvent = getattr(events, code[0])(*values)
    return event
