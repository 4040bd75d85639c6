r"""Decides whether releases fit a privacy budget (epsilon, delta).

A charge fits if one of three bounds shows it. They are tried from the fastest to the reported one:

1. *Renyi divergences.* At order 1 + lambda the divergences of all releases add up to D, and
   ``delta(epsilon) <= delta * exp(lambda * (D - limit))`` with the limit of Canonne, Kamath and
   Steinke (2020).
2. *One composition.* The history is composed on a grid once. Later charges are added by a
   multiplication of spectra.
3. *The reported composition.* Only this one can refuse a charge.

If a charge fits by 2 or 3, more releases like it are tried at the same time. If all of them
together fit the budget, they are *held*: later charges that they cover fit without computation.

If parameters may depend on earlier outputs, a privacy filter replaces all of this: one order and
one limit, fixed before the first release.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal, NamedTuple

import numpy as np

from . import bounds, renyi
from . import dominating_pairs as pairs
from .bounds import LARGEST_EXCESS, MOST_STEPS, largest
from .dominating_pairs import EXACT_LEVELS, Array, Pair
from .events import Method
from .fft_composition import Composition, Transform, compose
from .gdp import gaussian_mu
from .privacy_loss import apart, failing
from .tilted_window import ACCURACY

Counts = Mapping[Pair, int]

_KEPT_COSTS = 100_000  # different releases whose divergences are cached
_EXACT_COSTS, _COSTS_RATIO = 8, 1.02  # after so many, sampled releases are rounded to a grid
_KEPT_NUMBERS = 2**24  # numbers in cached spectra of single releases
_ROUND_OFF = 1e-9  # relative round-off of sums of divergences and of their limits
_MOST_HELD = 16  # up to so many different releases are tried in advance


class Filter(NamedTuple):
    """A limit, fixed before the first release: on the Renyi divergence at one order (Feldman, Zrnic
    2021, Theorem 4.3), or, for kind "gaussian", on mu^2 (Smith, Thakurta 2022).
    """

    kind: Literal["gaussian", "renyi"]
    order: float
    limit: float

    @classmethod
    def of(cls, epsilon: float, delta: float, first: Pair, declared: bool) -> Filter:
        """The filter of a budget. It depends on nothing that outputs can influence: on the first
        release, and on whether the filter was ``declared`` before it or is for later jobs.
        """
        if declared and isinstance(first, pairs.Gaussian):
            return cls("gaussian", math.inf, gaussian_mu(epsilon, delta) ** 2)
        # the order at which ``first`` fits most often
        orders = _orders_of(epsilon, delta, 0.05, 2, 60)
        limits = renyi.allowed(epsilon, delta, orders)
        best = int(np.argmax(limits / np.maximum(renyi.curve({first: 1}, orders), 1e-300)))
        return cls("renyi", orders[best], float(limits[best]))

    def cost(self, counts: Counts) -> float:
        """The quantity that the limit bounds, for these releases."""
        if self.kind == "gaussian":
            return math.fsum(
                count * pairs.dominating_mu(pair) ** 2 for pair, count in counts.items()
            )
        each = (count * renyi.curve({pair: 1}, [self.order])[0] for pair, count in counts.items())
        return math.fsum(map(float, each))

    def epsilon(self, delta: float) -> float:
        """The ε that the limit guarantees."""
        if self.kind == "gaussian":
            return bounds.upper_epsilon({pairs.Gaussian(math.sqrt(self.limit)): 1}, delta)
        return renyi.epsilon(np.array([self.limit]), delta, [self.order])

    def delta(self, epsilon: float) -> float:
        """The δ that the limit guarantees."""
        if self.kind == "gaussian":
            return bounds.upper_delta({pairs.Gaussian(math.sqrt(self.limit)): 1}, epsilon)
        return renyi.delta(np.array([self.limit]), epsilon, [self.order])

    def __str__(self) -> str:
        kind = f"the Renyi divergence of order {self.order:.3g}"
        return "mu^2" if self.kind == "gaussian" else kind


def _orders_of(
    epsilon: float, delta: float, low: float, high: float, number: int
) -> tuple[float, ...]:
    """Orders around the one at which most Gaussians fit; sampling makes large orders bad."""
    known = 1 + np.geomspace(1e-3, 1e6, 2000)
    best = known[np.argmax(renyi.allowed(epsilon, delta, known.tolist()) / known)] - 1
    orders = np.minimum(1 + best * np.geomspace(low, high, number), renyi.ORDERS[-1])
    # sampled Gaussians have a closed form at whole orders
    return tuple(sorted({float(round(order)) if order > 3 else float(order) for order in orders}))


@dataclass(frozen=True)
class Composed:
    """Releases composed on a grid for one budget; others can be added."""

    counts: Counts
    epsilon: float
    grids: list[Composition]  # one for each direction
    transforms: list[Transform]  # all releases together, on these grids
    kept: dict[Pair, list[Transform]]  # cache: single releases on these grids

    @classmethod
    def of(cls, counts: Counts, need: Counts, epsilon: float, delta: float) -> Composed | None:
        """Compose ``counts`` so that ``need`` can be added; ``None``: no grid, or no delta left."""
        failures, others = apart(counts)
        failed = failing(failures)
        if not others or failed > delta / 2 or pairs.NonPrivate() in others:
            return None
        try:
            grids = [
                compose(pairs.merge(others), reverse, delta=delta - failed, epsilon=epsilon)
                for reverse in _directions(pairs.added(counts, need), epsilon)
            ]
        except OverflowError:
            return None
        return cls(counts, epsilon, grids, [grid.transform for grid in grids], {})

    def followed_by(self, more: Counts) -> Composed | None:
        """These charges and ``more``; ``None`` if the grid does not fit."""
        others, joint, found = apart(more)[1], pairs.added(self.counts, more), self.transforms
        if pairs.NonPrivate() in others or len(_directions(joint, self.epsilon)) > len(found):
            return None
        try:
            for pair, count in pairs.merge(others).items():
                steps = zip(found, self._steps(pair), strict=True)
                found = [part.followed_by(step, count) for part, step in steps]
        except OverflowError:
            return None
        return Composed(joint, self.epsilon, self.grids, found, self.kept)

    def _steps(self, pair: Pair) -> list[Transform]:
        """The transform of one release, in each direction."""
        found = self.kept.get(pair)
        if found is None:
            found = [grid.step(pair) for grid in self.grids]
            if (len(self.kept) + 1) * sum(t.spectrum.size for t in found) > _KEPT_NUMBERS:
                self.kept.clear()
            self.kept[pair] = found
        return found

    def log_excess(self, delta: float, more: Counts | None = None) -> float:
        """log(delta at epsilon / delta) with ``more``; at most 0 if they fit (epsilon, delta)."""
        if (joint := self.followed_by(more) if more else self) is None:
            return LARGEST_EXCESS
        # Closer cases are left to the reported bound with its own grid, unless that takes seconds
        # (many different releases).
        near = ACCURACY if len(joint.counts) <= EXACT_LEVELS else 0.0
        try:
            parts = [g.of_others(t) for g, t in zip(self.grids, joint.transforms, strict=True)]
        except OverflowError:
            return LARGEST_EXCESS
        largest = max(part.upper_delta(self.epsilon * (1 - near)) for part in parts)
        found = (failing(apart(joint.counts)[0]) + largest) * (1 + _ROUND_OFF)
        return math.log(found / delta) if found else -LARGEST_EXCESS


def _on_grid(pair: Pair) -> Pair:
    """A pair on a grid that dominates ``pair`` and costs little more; many releases share it."""
    if not isinstance(pair, pairs.Sampled):
        return pair
    step = math.log(_COSTS_RATIO)
    noise = math.exp(step * math.floor(math.log(pair.noise) / step))
    rate = max(math.exp(step * math.ceil(math.log(pair.rate) / step)), pair.rate)
    return pairs.Sampled(pair.kind, rate if rate < 1 else pair.rate, min(noise, pair.noise))


@lru_cache(maxsize=_KEPT_COSTS)
def _cost(
    pair: Pair, orders: tuple[float, ...], rule: Filter | None, is_exact: bool = True
) -> Array:
    """The cost of one release; ``is_exact=False``: rounded up, for many different ones."""
    if not is_exact:
        return _cost(_on_grid(pair), orders, rule)
    if rule is not None:
        return np.array([rule.cost({pair: 1}), 0.0])
    if isinstance(pair, pairs.Failure):
        return np.append(np.zeros(len(orders)), pair.delta)
    return np.append(renyi.divergences(pair, np.array(orders)), 0.0)


def _directions(counts: Counts, epsilon: float) -> tuple[bool, ...]:
    """Directions in which a loss can exceed epsilon: losses of an added record may be bounded."""
    others = apart(counts)[1]
    most = pairs.largest_added_sum(others) * (1 + _ROUND_OFF)
    return pairs.directions(others) if most > epsilon else (False,)


class Budget:
    """A privacy budget, with or without a filter, and the charges to it, at first ``counts``."""

    def __init__(
        self,
        epsilon: float,
        delta: float,
        method: Method,
        filter: Filter | None = None,
        counts: Counts | None = None,
    ) -> None:
        self._epsilon, self._delta, self._method, self.filter = epsilon, delta, method, filter
        orders = _orders_of(epsilon, delta, 0.3, 1.2, 5)
        if method == "rdp":  # the nearest orders of the reported bound
            known = np.array(renyi.ORDERS)
            orders = tuple({float(known[np.argmin(abs(known - o))]): 0 for o in orders})
        limits = renyi.allowed(epsilon, delta, orders) - _ROUND_OFF
        if filter is not None:
            orders, limits = (math.inf,), np.array([filter.limit]) * (1 - _ROUND_OFF)
        self._orders, self._limits, self._of_costs = np.array(orders), limits, (orders, filter)
        self._exact: set[Pair] = set()  # the first releases, whose costs are not rounded
        self._spent = np.zeros(len(self._orders) + 1)
        # all charges and all held releases together fit the budget
        self._held: dict[Pair, int] = {}
        self._last: dict[Pair, int] = {}  # charges since releases were last held in advance
        self._base: Composed | None = None
        self._is_fresh = False  # whether nothing was added to the base
        self._recent: dict[Pair, int] = {}  # charges that are not yet in the base
        for pair, count in (counts or {}).items():
            self.spend(pair, count)

    def spend(self, pair: Pair, count: int) -> None:
        """Note that ``count`` releases were charged; a negative count was returned."""
        cost = self._cost(pair)
        if count < 0:
            with np.errstate(invalid="ignore"):  # an infinite sum stays infinite
                spent = self._spent + count * cost
            self._spent, self._base = np.where(np.isnan(spent), math.inf, spent), None
            if self._held:
                self._held[pair] = self._held.get(pair, 0) - count
            return
        self._spent = self._spent + count * cost
        for counts in (self._last, self._recent):
            counts[pair] = counts.get(pair, 0) + count
        if self._held and pairs.uncovered(self._held, {pair: count}):
            self._held = {}

    def _cost(self, pair: Pair) -> Array:
        """The cost of one release in the unit of the limits, and its probability of failure."""
        if self.filter is None and pair not in self._exact:
            if len(self._exact) >= _EXACT_COSTS:
                return _cost(pair, *self._of_costs, is_exact=False)
            self._exact.add(pair)
        return _cost(pair, *self._of_costs)

    # --- deciding ---------------------------------------------------------------------------------

    @property
    def keeps_filter(self) -> bool:
        """Whether the charges are within the filter's limit."""
        assert self.filter is not None
        return bool(self._spent[0] <= self.filter.limit * (1 + _ROUND_OFF))

    def fits(
        self, counts: Counts, need: Counts, n: int = 1, reserved: Counts | None = None
    ) -> bool:
        """Whether ``n`` times ``need`` fits after the charges ``counts`` and ``reserved``."""
        wanted = pairs.added(reserved or {}, need, n)
        if self._keeps(wanted):
            return True
        if self.filter is not None or pairs.NonPrivate() in wanted:
            return False
        joint = pairs.added(counts, wanted)
        if self._method == "pld" and not all(isinstance(pair, pairs.Gaussian) for pair in joint):
            for composed in self._compositions(counts, wanted):
                excess = partial(composed.log_excess, self._delta)
                if excess() <= 0:
                    self._hold(wanted, need, excess)
                    return True
        if not self._bound(joint) <= self._epsilon:  # NaN does not fit
            return False
        if len(joint) <= EXACT_LEVELS:
            self._hold(
                wanted, need, lambda more: self._bound(pairs.added(joint, more)) - self._epsilon
            )
        return True

    def certain(self, counts: Counts, need: Counts, reserved: Counts | None = None) -> int:
        """A number of times that ``need`` fits; 0 only if it does not fit once."""
        known = self.cheap(need, reserved)
        if not known and self.fits(counts, need, 1, reserved):
            known = max(self.cheap(need, reserved), 1)
        return known

    def cheap(self, need: Counts, reserved: Counts | None = None) -> int:
        """How often ``need`` fits, decided without a composition."""

        def excess(n: int) -> float:
            return -1.0 if self._keeps(pairs.added(reserved or {}, need, n)) else 1.0

        return largest(excess)

    def max_count(self, counts: Counts, need: Counts) -> int:
        """How often ``need`` fits after the history, exactly."""
        if pairs.NonPrivate() in need or pairs.NonPrivate() in counts:
            return 0
        known = Budget(self._epsilon, self._delta, self._method, self.filter, counts)
        n = known.cheap(need)
        if self.filter is not None or n >= MOST_STEPS:
            return n

        def excess(n: int) -> float:
            return self._bound(pairs.added(counts, need, n)) - self._epsilon

        def excess_of(composed: Composed, n: int) -> float:
            return composed.log_excess(self._delta, pairs.added({}, need, n - 1))

        if self._method == "pld" and len(pairs.added(counts, need)) > EXACT_LEVELS:
            # a charge also fits if these compositions show it, and they may be tighter than the
            # reported bound; a composition contains one more release
            for one in known._compositions(pairs.added(counts, need, n), need):
                n += largest(partial(excess_of, one))
            if excess(n + 1) > 0:
                return n
        return max(largest(excess, start=max(n + n // 4, 1)), n)

    def _keeps(self, wanted: Counts) -> bool:
        """Whether held releases cover ``wanted``, or divergences stay in their limits with it."""
        if self._held and not pairs.uncovered(dict(self._held), wanted):
            return True
        spent = self._spent + sum(n * self._cost(pair) for pair, n in wanted.items())
        left, limits = self._delta if self.filter is None else 1.0, self._limits
        if failed := float(spent[-1]) * (1 + _ROUND_OFF):
            if not failed < left:
                return False
            limits = limits + math.log((left - failed) / left) / (self._orders - 1)
        return bool((spent[:-1] <= limits).any())

    def _bound(self, counts: Counts) -> float:
        """The reported epsilon."""
        bound = renyi if self._method == "rdp" else bounds
        return bound.upper_epsilon(counts, self._delta)

    # --- compositions -----------------------------------------------------------------------------

    def _compositions(self, counts: Counts, wanted: Counts) -> Iterator[Composed]:
        """The history and ``wanted``: added to the last composition, then to a new one."""
        if self._base is not None:
            if self._recent:
                self._base, self._is_fresh = self._base.followed_by(self._recent), False
                self._recent = {}
            if self._base is not None and (joint := self._base.followed_by(wanted)) is not None:
                yield joint
            if self._base is not None and self._is_fresh:
                return
        self._base, self._is_fresh = Composed.of(counts, wanted, self._epsilon, self._delta), True
        self._recent = {}
        if self._base is not None and (joint := self._base.followed_by(wanted)) is not None:
            yield joint

    def _hold(self, wanted: Counts, need: Counts, excess: Callable[[Counts], float]) -> None:
        """Holds ``wanted``. If all held releases were charged, it also holds up to twice the
        charges since then; not after a first charge, which may be the only one.
        """
        was_used, self._held = bool(self._last) and not any(self._held.values()), dict(wanted)
        share = 2.0 if was_used else 0.0
        recent = pairs.added(self._last, need)
        if len(recent) > _MOST_HELD:
            recent, self._last = {}, {}
        while more := {pair: n for pair, c in recent.items() if (n := int(c * share))}:
            if excess(more) <= 0:
                self._held, self._last = pairs.added(wanted, more), {}
                return
            share /= 4
