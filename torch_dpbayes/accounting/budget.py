r"""Decides whether releases fit a privacy budget (epsilon, delta).

A charge fits if one of three bounds shows it, from the cheapest to the one that is reported:

1. *Renyi divergences.* At order 1 + lambda those of all releases add up to D, and
   ``delta(epsilon) <= delta * exp(lambda * (D - limit))`` with the limit of Canonne, Kamath and
   Steinke (2020). Of many different releases, each counts as a mixture of four of a grid that
   dominates it (:mod:`mixture_bounds`), whose divergences are kept.
2. *One composition.* The history is composed on a grid once. What is charged after that joins by a
   multiplication of spectra; of many different releases, again, as mixtures. The composition of a
   sequence that dominates another one bounds it, so what it keeps is kept.
3. *The composition that is reported.* Only this one refuses.

Where a charge fits by 2 or 3, more releases like it are tried at once. They are *held*: these
releases together keep the budget, so charges that they cover fit without another look.

A privacy filter replaces all of this where parameters may depend on earlier outputs: one order, one
limit, fixed before the first release.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from . import bounds, renyi
from .bounds import LARGEST_EXCESS, MOST_STEPS, largest
from .dominating_pairs import (
    EXACT_LEVELS,
    Array,
    Failure,
    Gaussian,
    NonPrivate,
    Pair,
    Pure,
    Sampled,
    added,
    dominating_mu,
    has_two_directions,
    largest_added_loss,
    merge,
    uncovered,
)
from .events import Method
from .fft_composition import Composition, Transform, compose, mean_transform
from .gdp import gaussian_mu
from .mixture_bounds import four_corners
from .privacy_loss import apart, failing

Counts = Mapping[Pair, int]

_GRID = 1.1  # ratio of rates and of noises that stand for many different releases
_EXACT = 16  # different releases that count as they are
_KEPT_NUMBERS = 2**24  # of spectra that wait for releases to come
_KEPT_COSTS = 100_000  # different releases whose divergences are kept
_ROUND_OFF = 1e-9  # relative, of sums of divergences and of their limits
_LOWERED = 1.02  # by how much less noise new releases are tried in advance
_ENOUGH = 16  # releases that fit, from which on nothing is looked for


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
    def renyi(cls, epsilon: float, delta: float, first: Counts) -> Filter:
        """The filter of a budget at the order that admits ``first`` most often. No output can have
        decided what is released first.
        """
        orders = _orders_of(epsilon, delta, 0.05, 2, 60)
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

    def cost(self, counts: Counts) -> float:
        """What the limit bounds, for these releases."""
        if self.kind == "gaussian":
            return math.fsum(count * dominating_mu(pair) ** 2 for pair, count in counts.items())
        each = (count * renyi.curve({pair: 1}, [self.order])[0] for pair, count in counts.items())
        return math.fsum(map(float, each))

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


def _orders_of(
    epsilon: float, delta: float, low: float, high: float, number: int
) -> tuple[float, ...]:
    """Orders around the one at which a budget admits most Gaussians, and below it, since sampling
    makes large orders explode.
    """
    best = renyi.filter_order(epsilon, delta) - 1
    orders = np.minimum(1 + best * np.geomspace(low, high, number), renyi.ORDERS[-1])
    # at whole orders sampling has a closed form
    return tuple(sorted({float(round(order)) if order > 3 else float(order) for order in orders}))


class Divergences:
    """The Renyi divergences of what was charged, beside their limits.

    Args:
        epsilon, delta: the budget.
        method: whose orders are used.
        filter: the limit in force instead.
    """

    def __init__(self, epsilon: float, delta: float, method: Method, filter: Filter | None) -> None:
        self._filter = filter
        if filter is None:
            orders = _orders_of(epsilon, delta, 0.15, 1.6, 12)
            if method == "rdp":  # those of the bound that is reported
                known = np.array(renyi.ORDERS)
                orders = tuple({float(known[np.argmin(abs(known - o))]): 0 for o in orders})
            limits, self._left = renyi.allowed(epsilon, delta, orders) - _ROUND_OFF, delta
        else:
            orders = (filter.order if filter.kind == "renyi" else 2.0,)
            limits, self._left = np.array([filter.limit]) * (1 - _ROUND_OFF), 1.0
        self._orders, self._limits = np.array(orders), limits
        self._costs: dict[Pair, Array] = {}
        self._spent = np.zeros(len(orders) + 1)

    def spend(self, pair: Pair, count: int) -> None:
        """``count`` releases were charged; a negative number was given back."""
        with np.errstate(invalid="ignore"):  # what is infinite stays so
            spent = self._spent + count * self._cost(pair)
        self._spent = np.where(np.isnan(spent), math.inf, spent)

    def keep(self, need: Counts) -> bool:
        """Whether ``need`` fits too."""
        spent = self._spent
        for pair, count in need.items():
            spent = spent + count * self._cost(pair)
        left = self._left - spent[-1] * (1 + _ROUND_OFF)  # beside releases that fail outright
        if not left > 0:
            return False
        rise = math.log(left / self._left) / (self._orders - 1)
        return bool((spent[:-1] <= self._limits + rise).any())

    def _cost(self, pair: Pair) -> Array:
        """The divergences of one release, and the probability that it fails outright."""
        if isinstance(pair, Gaussian) and self._filter is None:
            return np.append(pair.mu**2 / 2 * self._orders, 0.0)
        cost = self._costs.get(pair)
        if cost is None:
            if self._filter is not None and self._filter.kind == "gaussian":
                cost = np.array([dominating_mu(pair) ** 2, 0.0])
            elif isinstance(pair, Failure) and self._filter is None:
                cost = np.append(np.zeros(len(self._orders)), pair.delta)
            elif isinstance(pair, Sampled) and self._filter is None and len(self._costs) >= _EXACT:
                cost = np.append(self._of_mixture(*four_corners(pair, _GRID)), 0.0)
            else:
                cost = np.append(self._of(pair), 0.0)
            if len(self._costs) < _KEPT_COSTS:
                self._costs[pair] = cost
        return cost

    def _of(self, pair: Pair) -> Array:
        return renyi.curve({pair: 1}, tuple(self._orders.tolist()))

    def _of_mixture(self, weights: list[float], corners: list[Sampled]) -> Array:
        power = self._orders - 1
        with np.errstate(over="ignore", invalid="ignore"):
            moments = np.expm1(power * [self._of(corner) for corner in corners])
            found = np.log1p(np.array(weights) @ moments) / power * (1 + 1e-14)
        return np.nan_to_num(found, nan=math.inf, posinf=math.inf)


class Composed:
    """Releases composed on a grid for one budget, which others can join.

    Losses of an added record may be so bounded that they never pass epsilon: then only the other
    direction is composed.

    Args:
        epsilon: the budget's.
        grids: a composition in each direction, on whose grid the releases are.
        transforms: the releases there.
        kept: single releases there, for all that join.
        failures: of the releases, those that may fail outright.
        added_loss: of the releases, as :func:`_added_loss` says.
    """

    def __init__(
        self,
        epsilon: float,
        grids: list[Composition],
        transforms: list[Transform],
        kept: dict[Pair, list[Transform]],
        failures: dict[Failure, int],
        added_loss: tuple[bool, float],
    ) -> None:
        self._epsilon, self._grids, self._transforms = epsilon, grids, transforms
        self._kept, self._failures, self._added_loss = kept, failures, added_loss

    @classmethod
    def of(cls, counts: Counts, need: Counts, epsilon: float, delta: float) -> Composed | None:
        """``counts``, which ``need`` is to join; ``None``: their losses have no distribution on a
        grid, or nothing is left of delta.
        """
        failures, others = apart(counts)
        failed = failing(failures)
        if not others or failed > delta / 2 or not _are_on_grids(others):
            return None
        both = _passes(_added_loss(others, need), epsilon)
        try:
            grids = [
                compose(merge(others), delta=delta - failed, epsilon=epsilon, reverse=reverse)[0]
                for reverse in ((False, True) if both else (False,))
            ]
        except OverflowError:
            return None
        transforms = [grid.transform for grid in grids]
        return cls(epsilon, grids, transforms, {}, failures, _added_loss(others, {}))

    def followed_by(self, more: Counts) -> Composed | None:
        """With ``more``; ``None``: these cannot join."""
        failures, others = apart(more)
        added_loss = _added_loss(others, {})
        added_loss = added_loss[0] or self._added_loss[0], added_loss[1] + self._added_loss[1]
        if not _are_on_grids(others):
            return None
        if len(self._grids) == 1 and _passes(added_loss, self._epsilon):
            return None
        found = self._transforms
        try:
            for pair, count in merge(others).items():
                steps = zip(found, self._steps(pair), strict=True)
                found = [part.followed_by(step, count) for part, step in steps]
        except OverflowError:
            return None
        joint = {**self._failures}
        for failure, count in failures.items():
            joint[failure] = joint.get(failure, 0) + count
        return Composed(self._epsilon, self._grids, found, self._kept, joint, added_loss)

    def _steps(self, pair: Pair) -> list[Transform]:
        """One release in each direction."""
        if pair in self._kept or len(self._kept) < _EXACT or not isinstance(pair, Sampled):
            return self._exact_steps(pair)
        weights, corners = four_corners(pair, _GRID)
        each = zip(*map(self._exact_steps, corners), strict=True)
        return [mean_transform(weights, part) for part in each]

    def _exact_steps(self, pair: Pair) -> list[Transform]:
        found = self._kept.get(pair)
        if found is None:
            found = [grid.step(pair) for grid in self._grids]
            if (len(self._kept) + 1) * sum(t.spectrum.size for t in found) > _KEPT_NUMBERS:
                self._kept.clear()
            self._kept[pair] = found
        return found

    def log_excess(self, delta: float) -> float:
        """log(delta at epsilon / delta); at most 0: these releases keep (epsilon, delta)."""
        try:
            parts = [g.of_others(t) for g, t in zip(self._grids, self._transforms, strict=True)]
        except OverflowError:
            return LARGEST_EXCESS
        largest = max(part.upper_delta(self._epsilon) for part in parts)
        found = (failing(self._failures) + largest) * (1 + _ROUND_OFF)
        return math.log(found / delta) if found else -LARGEST_EXCESS


def _are_on_grids(counts: Counts) -> bool:
    return NonPrivate() not in counts and bounds.without_extremes(counts) == (counts, 0.0)


def _added_loss(counts: Counts, more: Counts) -> tuple[bool, float]:
    """Whether an added record differs from a removed one, and the largest loss where it was
    added.
    """
    both = [*counts.items(), *apart(more)[1].items()]
    differs = any(has_two_directions(pair) for pair, _ in both)
    return differs, math.fsum(n * largest_added_loss(pair) for pair, n in both)


def _passes(added_loss: tuple[bool, float], epsilon: float) -> bool:
    """Whether the direction of an added record has to be looked at."""
    return added_loss[0] and added_loss[1] * (1 + _ROUND_OFF) > epsilon


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
        self._epsilon, self._delta, self._method, self._filter = epsilon, delta, method, filter
        self.restart({})

    def restart(self, counts: Counts) -> None:
        """Everything that was charged is ``counts``."""
        self._renyi = Divergences(self._epsilon, self._delta, self._method, self._filter)
        # what was charged, together with what is held, keeps the budget
        self._held: dict[Pair, int] = {}
        self._last: dict[Pair, int] = {}  # charged since more was held than was asked for
        self._base: Composed | None = None
        self._is_fresh = False  # whether nothing joined the base
        self._recent: dict[Pair, int] = {}  # charged since then
        for pair, count in counts.items():
            self.spend(pair, count)

    def spend(self, pair: Pair, count: int) -> None:
        """``count`` releases were charged; a negative number was given back."""
        self._renyi.spend(pair, count)
        if count < 0:
            self._base = None
            if self._held:
                self._held[pair] = self._held.get(pair, 0) - count
        else:
            self._recent = added(self._recent, {pair: count})
            self._last = added(self._last, {pair: count})
            if self._held and uncovered(self._held, {pair: count}):
                self._held = {}

    # --- deciding ---------------------------------------------------------------------------------

    def fits(
        self, counts: Counts, need: Counts, n: int = 1, reserved: Counts | None = None
    ) -> bool:
        """Whether ``n`` times ``need`` fits the budget after the history.

        Args:
            counts: how often each pair was charged.
            need: the pairs of a release.
            n: how often it is made.
            reserved: what is set aside for other releases.
        """
        wanted = added(reserved or {}, need, n)
        if self._keeps(wanted):
            return True
        if NonPrivate() in wanted or self._filter is not None:
            return False
        joint = added(counts, wanted)
        if self._method == "pld" and not _is_closed_form(joint):
            for composed in self._compositions(counts, wanted):
                if self._excess(composed, {}) <= 0:
                    self._hold(wanted, need, partial(self._excess, composed))
                    return True
        if self._bound(joint) > self._epsilon:
            return False
        if len(joint) <= EXACT_LEVELS:
            self._hold(wanted, need, lambda more: self._bound(added(joint, more)) - self._epsilon)
        return True

    def certain(self, counts: Counts, need: Counts, reserved: Counts | None = None) -> int:
        """How often ``need`` certainly fits; 0 means that it does not fit once."""
        known = self.cheap(need, reserved)
        if known < _ENOUGH and self.fits(counts, need, 1, reserved):
            known = max(self.cheap(need, reserved), 1)
        return known

    def cheap(self, need: Counts, reserved: Counts | None = None) -> int:
        """How often ``need`` fits without a composition."""
        beside, low, high = reserved or {}, 0, 1
        while low < MOST_STEPS and self._keeps(added(beside, need, high)):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            fits = self._keeps(added(beside, need, middle))
            low, high = (middle, high) if fits else (low, middle)
        return low

    def max_count(self, counts: Counts, need: Counts) -> int:
        """How often ``need`` fits after the history, exactly."""
        if NonPrivate() in need or NonPrivate() in counts:
            return 0
        known = Budget(self._epsilon, self._delta, self._method, self._filter)
        known.restart(counts)
        n = known.cheap(need)
        if self._filter is not None or n >= MOST_STEPS:
            return n

        def excess(n: int) -> float:
            return self._bound(added(counts, need, n)) - self._epsilon

        if self._method == "pld" and len(added(counts, need)) > EXACT_LEVELS:
            for one in known._compositions(counts, need):
                if self._excess(one, {}) <= 0:  # one fits
                    n = max(n, 1 + largest(partial(self._excess, one, need)))
            if excess(n + 1) > 0:
                return n
        return max(largest(excess, start=max(n + n // 4, 1)), n)

    def _keeps(self, wanted: Counts) -> bool:
        if self._held and not uncovered(dict(self._held), wanted):
            return True
        return self._renyi.keep(wanted)

    def _bound(self, counts: Counts) -> float:
        """The epsilon that is reported."""
        bound = renyi if self._method == "rdp" else bounds
        return bound.upper_epsilon(counts, self._delta)

    # --- compositions -----------------------------------------------------------------------------

    def _compositions(self, counts: Counts, wanted: Counts) -> Iterator[Composed]:
        """The history and ``wanted``: joined to the last composition, and to a new one."""
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

    def _excess(self, composed: Composed, more: Counts, times: int = 1) -> float:
        joint = composed.followed_by(added({}, more, times)) if more and times else composed
        return LARGEST_EXCESS if joint is None else joint.log_excess(self._delta)

    def _hold(self, wanted: Counts, need: Counts, excess: Callable[[Counts], float]) -> None:
        """Holds ``wanted`` and, if what was held is used up, as much as fits of twice what was
        charged since, about.
        """
        was_used, self._held = not any(self._held.values()), dict(wanted)
        share = 2.0 if was_used else 0.0
        recent = _alike(added(self._last, need))
        if len(recent) > _EXACT:
            recent, self._last = {}, {}
        while more := {pair: n for pair, c in recent.items() if (n := int(c * share))}:
            if excess(more) <= 0:
                self._held, self._last = added(wanted, more), {}
                return
            share /= 4


def _is_closed_form(counts: Counts) -> bool:
    return len({type(pair) for pair in counts}) == 1 and isinstance(
        next(iter(counts)), Gaussian | Pure
    )


def _alike(counts: Counts) -> dict[Pair, int]:
    """``counts``; of those that differ in their noise only, the one with the least stands for all,
    with a little less.
    """
    kinds: dict[tuple[object, ...], list[Pair]] = {}
    for pair in counts:
        kind = (pair.kind, pair.rate) if isinstance(pair, Sampled) else ()
        kinds.setdefault((type(pair), *kind), []).append(pair)
    found: dict[Pair, int] = {}
    for pairs in kinds.values():
        if len(pairs) > 1 and isinstance(pairs[0], Sampled):
            least = min(pair.noise for pair in pairs if isinstance(pair, Sampled))
            lowered = Sampled(pairs[0].kind, pairs[0].rate, least / _LOWERED)
            found[lowered] = sum(counts[pair] for pair in pairs)
        else:
            found |= {pair: counts[pair] for pair in pairs}
    return found
