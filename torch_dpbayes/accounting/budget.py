r"""Decides whether a release fits a privacy budget.

Three bounds are asked in turn; each is an upper bound, and only the last one refuses.

1. *Renyi.* Renyi divergences add up, and (epsilon, delta) allows each order a divergence that
   follows from the budget alone. This costs microseconds.
2. *Renyi, counted from the history.* Let delta_H be the privacy profile of the history H. If

   .. math:: \delta_H(\varepsilon - s) \le \delta_\infty + C_\lambda e^{\lambda s}
       \quad \text{for all } s,

   then after any further releases, with the sum R of their divergences of order 1 + lambda,

   .. math:: \delta(\varepsilon) = E[\delta_H(\varepsilon - L)] \le \delta_\infty + C_\lambda
       e^{\lambda R}, \qquad\text{because } E_P[e^{\lambda L}] = e^{\lambda R}.

   So one composition of the history gives new limits on divergences, which are tangent to the
   truth: they admit nearly all that is left. For the empty history C is the conversion of
   Canonne, Kamath and Steinke (2020), so the first bound is a case of the second.
3. *Composition.* The epsilon that is reported, of the history and the release together.

A privacy filter replaces all three where parameters may depend on earlier outputs: one order, one
limit, fixed before the first release.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from typing import Literal, NamedTuple

import numpy as np

from . import bounds, renyi
from .choices import Method
from .composition import compose
from .failures import apart, failing
from .gaussian import gaussian_mu
from .levels import merge
from .pairs import Array, Failure, Gaussian, NonPrivate, Pair, Sampled, added, dominating_mu
from .search import MOST_STEPS, largest

_GRID = 1.02  # ratio of noise multipliers and rates that share one cost where releases differ much
_FEW = 16  # releases that fit, below which a reserve is decided by a composition
_EXACT_COSTS = 16  # different releases before costs are shared
_ROUND_OFF = 1e-9  # relative, of sums of costs
_MERGED = 0.015  # of epsilon, which merging close releases may add to a Renyi bound
_SLOPES = np.array([0.5, 0.7, 0.85, 0.95, 1.0])  # of lambda, relative to the slope of log delta_H


class Filter(NamedTuple):
    """A limit on an additive cost, fixed before the first release.

    kind "renyi": the Renyi divergence at one order (Feldman, Zrnic 2021, Theorem 4.3); kind
    "gaussian": mu^2 (Smith, Thakurta 2022).
    """

    kind: Literal["gaussian", "renyi"]
    order: float
    limit: float

    @classmethod
    def gaussian(cls, epsilon: float, delta: float) -> Filter:
        """The filter of a budget for Gaussian releases."""
        return cls("gaussian", math.inf, gaussian_mu(epsilon, delta) ** 2)

    @classmethod
    def renyi(cls, epsilon: float, delta: float, first: Mapping[Pair, int]) -> Filter:
        """The filter of a budget at the order that admits ``first`` most often. No output can have
        decided what is released first.
        """
        orders = orders_of(epsilon, delta, 0.05, 2, 60)
        limits = renyi.allowed(epsilon, delta, orders)
        best = int(np.argmax(limits / np.maximum(renyi.curve(first, orders), 1e-300)))
        return cls("renyi", orders[best], float(limits[best]))

    @classmethod
    def decoded(cls, code: str, budget: tuple[float, float] | None) -> Filter | None:
        """The filter that :attr:`code` names; ``None`` for an empty one."""
        if not code or budget is None:
            return None
        if code == "gaussian":
            return cls.gaussian(*budget)
        order = float(code.removeprefix("renyi "))
        return cls("renyi", order, float(renyi.allowed(*budget, [order])[0]))

    @property
    def code(self) -> str:
        """The filter as a string."""
        return self.kind if self.kind == "gaussian" else f"renyi {self.order!r}"

    def cost(self, counts: Mapping[Pair, int]) -> float:
        """What the limit bounds, for these releases."""
        if self.kind == "gaussian":
            return math.fsum(count * dominating_mu(pair) ** 2 for pair, count in counts.items())
        return float(renyi.curve(counts, [self.order])[0])

    def epsilon(self, delta: float) -> float:
        """What the limit guarantees."""
        if self.kind == "gaussian":
            return bounds.upper_epsilon({Gaussian(math.sqrt(self.limit)): 1}, delta)
        return renyi.epsilon(np.array([self.limit]), delta, [self.order])

    def delta(self, epsilon: float) -> float:
        """What the limit guarantees."""
        if self.kind == "gaussian":
            return bounds.upper_delta({Gaussian(math.sqrt(self.limit)): 1}, epsilon)
        return renyi.delta(np.array([self.limit]), epsilon, [self.order])

    def describe(self) -> str:
        """The limited quantity."""
        if self.kind == "gaussian":
            return "mu^2"
        return f"the Renyi divergence of order {self.order:.3g}"


def orders_of(
    epsilon: float, delta: float, low: float, high: float, number: int
) -> tuple[float, ...]:
    """Orders around the one at which a budget admits most Gaussians, and below it, since sampling
    makes large orders explode.
    """
    best = renyi.filter_order(epsilon, delta) - 1
    orders = np.minimum(1 + best * np.geomspace(low, high, number), renyi.ORDERS[-1])
    # at whole orders sampling has a closed form
    return tuple(sorted({float(round(order)) if order > 3 else float(order) for order in orders}))


class Budget:
    """A privacy budget, and what was spent of it.

    Args:
        epsilon, delta: the budget.
        method: how compositions are bounded.
        filter: the limit in force where parameters may depend on earlier outputs.
    """

    def __init__(
        self, epsilon: float, delta: float, method: Method, filter: Filter | None = None
    ) -> None:
        self._epsilon, self._delta = epsilon, delta
        self._method, self._filter = method, filter
        self._stale = False
        self.restart({})

    def spend(self, pair: Pair, count: int) -> None:
        """``count`` releases were charged; a negative number was given back."""
        if count < 0:
            self._stale = True
        elif count:
            self._add(pair, count)

    def restart(self, counts: Mapping[Pair, int]) -> None:
        """Everything that was charged is ``counts``."""
        if self._filter is not None:
            gaussian = self._filter.kind == "gaussian"
            self._orders: tuple[float, ...] = () if gaussian else (self._filter.order,)
            self._limits = np.array([self._filter.limit]) * (1 - _ROUND_OFF)
        else:
            self._orders = orders_of(self._epsilon, self._delta, 0.15, 1.6, 12)
            # what is reported by method "rdp" merges releases, and decides near the budget
            epsilon = self._epsilon * (1.0 if self._is_composed else 1 - _MERGED)
            self._limits = renyi.allowed(epsilon, self._delta, self._orders) * (1 - _ROUND_OFF)
        self._count_from(counts)

    def _count_from(self, counts: Mapping[Pair, int]) -> None:
        self._spent, self._costs = np.zeros(len(self._limits)), dict[Hashable, Array]()
        self._is_anchored = self._stale = False
        for pair, count in counts.items():
            self._add(pair, count)

    def _add(self, pair: Pair, count: int) -> None:
        self._spent = self._spent + count * self._cost(pair)
        self._is_anchored = False

    # --- deciding ---------------------------------------------------------------------------------

    def fits(
        self,
        counts: Mapping[Pair, int],
        need: Mapping[Pair, int],
        n: int = 1,
        reserved: Mapping[Pair, int] | None = None,
    ) -> bool:
        """Whether ``n`` times ``need`` fits the budget after the history.

        Args:
            counts: how often each pair was charged.
            need: the pairs of a release.
            n: how often it is made.
            reserved: what is set aside for other releases.
        """
        if any(isinstance(pair, NonPrivate) for pair in need):
            return False
        reserved = reserved or {}
        if self._prepared(counts, need, reserved) >= n:
            return True
        return self._excess(added(counts, reserved), need)(n) <= 0

    def certain(
        self,
        counts: Mapping[Pair, int],
        need: Mapping[Pair, int],
        reserved: Mapping[Pair, int] | None = None,
    ) -> int:
        """How often ``need`` certainly fits; 0 means that it does not fit once."""
        if any(isinstance(pair, NonPrivate) for pair in need):
            return 0
        known = self._prepared(counts, need, reserved or {}, _FEW)
        return known or int(self.fits(counts, need, 1, reserved))

    def cheap(self, counts: Mapping[Pair, int], need: Mapping[Pair, int]) -> int:
        """How often ``need`` fits by the limits at hand, without a composition."""
        if self._stale:
            self.restart(counts)
        return self._additive(need, {})

    def max_count(self, counts: Mapping[Pair, int], need: Mapping[Pair, int]) -> int:
        """How often ``need`` fits after the history, exactly."""
        if any(isinstance(pair, NonPrivate) for pair in (*need, *counts)):
            return 0
        known = self._prepared(counts, need, {})
        if known >= MOST_STEPS:
            return known
        start, more = known, known
        if self._is_composed:
            while more > 16:  # limits that count from further releases admit nearly all of the rest
                further = Budget(self._epsilon, self._delta, self._method)
                joint = added(counts, need, start)
                further.restart(joint)
                further._anchor(joint)
                more = further._additive(need, {})
                start += more
        return max(largest(self._excess(counts, need), start=max(start, 1)), known)

    @property
    def _is_composed(self) -> bool:
        return self._method == "pld" and self._filter is None

    def _prepared(
        self,
        counts: Mapping[Pair, int],
        need: Mapping[Pair, int],
        reserved: Mapping[Pair, int],
        least: int = 1,
    ) -> int:
        """How often ``need`` fits by additive limits; counted from the history where that is less
        than ``least``.
        """
        if self._stale:
            self.restart(counts)
        known = self._additive(need, reserved)
        is_priced = not any(isinstance(pair, Failure) for pair in need)
        if known < least and not self._is_anchored and is_priced:
            self._anchor(counts)
            known = max(known, self._additive(need, reserved))
        return known

    def _additive(self, need: Mapping[Pair, int], reserved: Mapping[Pair, int]) -> int:
        left, each = self._limits - self._spent, np.zeros(len(self._limits))
        for pair, count in reserved.items():
            left = left - count * self._cost(pair)
        for pair, count in need.items():
            each = each + count * self._cost(pair)
        possible = (left > 0) & np.isfinite(each)
        if not possible.any():
            return 0
        with np.errstate(over="ignore"):
            often = np.max(left[possible] / np.maximum(each[possible], 1e-300)) * (1 - 1e-12)
        return int(min(often, MOST_STEPS))

    def _excess(
        self, counts: Mapping[Pair, int], need: Mapping[Pair, int]
    ) -> Callable[[int], float]:
        """The reported cost of ``counts`` and n times ``need``, minus the limit."""

        def excess(n: int) -> float:
            joint = added(counts, need, n) if n else counts
            if self._filter is not None:
                return self._filter.cost(joint) - self._filter.limit
            bound = renyi if self._method == "rdp" else bounds
            return bound.upper_epsilon(joint, self._delta) - self._epsilon

        return excess

    # --- limits -----------------------------------------------------------------------------------

    def _anchor(self, counts: Mapping[Pair, int]) -> None:
        """Counts from the history."""
        if self._filter is not None:
            self._spent = np.array([self._filter.cost(counts)])
        elif self._is_composed:
            found = _tangents(counts, self._epsilon, self._delta)
            if found is not None:
                self._orders, limits = found
                self._limits = limits * (1 - _ROUND_OFF)
                self._count_from({})
        self._is_anchored = True

    def _cost(self, pair: Pair) -> Array:
        """The divergences of one release. Where many releases differ, noise is rounded down and
        sampling rates up, onto a geometric grid.
        """
        if isinstance(pair, Gaussian):
            orders = np.array(self._orders) / 2 if self._orders else np.ones(1)
            return np.asarray(pair.mu**2 * orders)
        key: Hashable = pair
        cost = self._costs.get(key)
        if cost is None and isinstance(pair, Sampled) and len(self._costs) >= _EXACT_COSTS:
            cell = math.floor(math.log(pair.noise) / math.log(_GRID))
            rate = _GRID ** math.ceil(math.log(pair.rate) / math.log(_GRID)) * (1 + 1e-12)
            rate = max(min(rate, 1 - 1e-12), pair.rate)
            key = (pair.kind, rate, cell)
            cost = self._costs.get(key)
            pair = Sampled(pair.kind, rate, min(pair.noise, _GRID**cell * (1 - 1e-12)))
        if cost is None:
            if self._orders:
                cost = renyi.curve({pair: 1}, self._orders)
            else:
                cost = np.array([dominating_mu(pair) ** 2])
            if len(self._costs) < 100_000:
                self._costs[key] = cost
        return cost


def _tangents(
    counts: Mapping[Pair, int], epsilon: float, delta: float
) -> tuple[tuple[float, ...], Array] | None:
    """Orders, and the divergence that each of them allows after the history; ``None`` where the
    composition leaves nothing, or is better done in closed form.
    """
    failures, others = apart(counts)
    if not others or NonPrivate() in others or set(map(type, others)) == {Gaussian}:
        return None
    if bounds.without_extremes(others) != (others, 0.0):
        return None
    failed = failing(failures)
    left = (delta - failed) / (1 - failed) * (1 - _ROUND_OFF)
    if left <= 0:
        return None
    try:
        directions = compose(merge(others), delta=left)
    except OverflowError:
        return None
    worst, slope, profiles = 0.0, 0.0, []
    for composition in directions:
        losses = composition.losses
        # mass at infinity stays there, whatever is released later
        infinite = float(composition.transform.infinity + composition.above)
        deltas = np.maximum(composition.upper_deltas(losses) - infinite, 0.0)
        here, near = composition.upper_deltas(np.array([epsilon, epsilon * 1.001])) - infinite
        if not 0 < near < here or infinite >= left:
            return None
        if here > worst:
            worst, slope = float(here), math.log(here / near) / (epsilon * 0.001)
        profiles.append((losses, deltas, infinite))
    factors = slope * _SLOPES
    limits = np.full(len(factors), np.inf)
    for losses, deltas, infinite in profiles:
        known = deltas > 0
        # delta falls: between two losses it is at most that at the first; below the first, 1
        logs = np.log(np.append(1.0, np.where(known, deltas, 1.0)[:-1]))
        logs[1:][~known[:-1]] = -np.inf
        for i, factor in enumerate(factors.tolist()):
            log_constant = float(np.max(logs + factor * (losses - epsilon)))
            limits[i] = min(limits[i], (math.log(left - infinite) - log_constant) / factor)
    positive = limits > 0
    if not positive.any():
        return None
    return tuple((1 + factors[positive]).tolist()), limits[positive]
