r"""Decides whether releases fit a privacy budget (epsilon, delta).

Let H be releases whose privacy profile is known (the *anchor*), and R what was charged after them.
With L the privacy loss of R, lambda > 0, and the Renyi divergence D of R at order 1 + lambda,

.. math:: \delta_{H+R}(\varepsilon) = E[\delta_H(\varepsilon - L)]
    \le A_\lambda E[e^{\lambda L}] = A_\lambda e^{\lambda D},
    \qquad A_\lambda = \sup_e \delta_H(e) e^{\lambda (e - \varepsilon)}.

The equation is Fubini's theorem for independent losses under P; then come the definitions of A and
of the divergence. Infinite losses stay so: their probability, in H and in R, is added. A charge
fits if, in each direction (a record removed, a record added), some lambda shows it.

* For empty H, A is the conversion of Canonne, Kamath and Steinke (2020): this is Renyi accounting.
* Where log delta_H is concave, A = delta_H(epsilon) for the lambda that is its slope there, so the
  bound is exact to first order in R, and one anchor admits nearly all that is left.
* Where few large losses decide, it is not concave. Then a search shows how many more releases like
  the last ones fit (the *credit*). They join the anchor, and charges are taken out of them.

When the bound does not show that a charge fits, what was charged joins the composition of the
history, which becomes the anchor. Only the composition that is reported finally refuses.

A privacy filter replaces all of this where parameters may depend on earlier outputs: one order, one
limit, fixed before the first release.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Literal, NamedTuple

import numpy as np

from . import bounds, renyi
from .bounds import MOST_STEPS, largest
from .dominating_pairs import (
    EXACT_LEVELS,
    Array,
    Failure,
    Gaussian,
    NonPrivate,
    Pair,
    Sampled,
    added,
    covers,
    directions,
    dominating_mu,
    merge,
)
from .events import Method
from .fft_composition import Composition, compose
from .gdp import gaussian_mu
from .privacy_loss import apart, failing

Counts = Mapping[Pair, int]

_GRID = 1.02  # ratio of noise multipliers and rates that share one cost where releases differ much
_EXACT_COSTS = 16  # different releases before costs are shared
_ROUND_OFF = 1e-9  # relative, of sums of costs and of constants
_LAMBDAS = 10  # of an anchor
_LEAST, _MOST = 0.85, 1.03  # of them, relative to the slopes of log(delta)
_LEAST_SLOPE = 1e-3
_LOWEST_LOG = -1e4  # of A, in the place of minus infinity
_LOWERED = 1.02  # by how much noise is lowered where releases like the last ones are expected
_ENOUGH = 16  # releases that fit, from which on nothing is looked for
_PRECISION = 1.2  # of a search for how many more of many different releases fit
_MOST_JOINED = 0.25  # of the releases of a base, that others may join on its grid
_MOST_OF_UNIT = 1000  # releases of a kind for one of the rarest


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


class Anchor(NamedTuple):
    """What is known of the releases that are counted from.

    Attributes:
        orders: 1 + lambda.
        logs: log A by direction and lambda.
        lefts: by direction, delta less the probability of an infinite loss.
    """

    orders: tuple[float, ...]
    logs: Array
    lefts: Array

    def keep(self, spent: Array) -> bool:
        """Whether releases with these divergences fit too; the last number is the probability that
        they fail outright.
        """
        if not spent.any():  # an anchor fits
            return True
        left = self.lefts - spent[-1]
        if not (left > 0).all():
            return False
        shown = self.logs + (np.array(self.orders) - 1) * spent[:-1]
        return bool((shown.min(axis=1) <= np.log(left)).all())

    @classmethod
    def empty(cls, epsilon: float, delta: float, orders: tuple[float, ...]) -> Anchor:
        """No releases."""
        lambdas = np.array(orders) - 1
        logs = math.log(delta) - lambdas * renyi.allowed(epsilon, delta, orders)
        return cls(orders, logs[None] + _ROUND_OFF, np.array([delta]))

    @classmethod
    def of_filter(cls, rule: Filter) -> Anchor:
        """No releases, under a filter."""
        order = rule.order if rule.kind == "renyi" else 2.0
        logs = -(order - 1) * rule.limit * (1 - _ROUND_OFF)
        return cls((order,), np.array([[logs]]), np.ones(1))

    @classmethod
    def full(cls) -> Anchor:
        """Releases beside which no others fit."""
        return cls((2.0,), np.zeros((1, 1)), np.ones(1))


class Composed:
    """Releases composed on a grid, which others can join.

    Args:
        directions: the composition in each direction.
        failed: the probability that one of the releases fails outright.
    """

    def __init__(self, directions: list[Composition], failed: float) -> None:
        self._directions, self._failed = directions, failed
        self._levels: dict[Pair, int] = {}  # that joined last, and their compositions
        self._steps: list[Composition] = []

    @classmethod
    def of(cls, counts: Counts, delta: float) -> Composed | None:
        """``None``: these losses have no distribution on a grid, or nothing is left of delta."""
        failures, others = apart(counts)
        failed = failing(failures)
        if not others or failed > delta / 2 or NonPrivate() in others:
            return None
        if bounds.without_extremes(others) != (others, 0.0):
            return None
        try:
            return cls(compose(merge(others), delta=delta - failed), failed)
        except OverflowError:
            return None

    def followed_by(self, more: Counts, times: int = 1) -> Composed | None:
        """With ``times`` times ``more``; ``None``: these cannot join."""
        failures, others = apart(more)
        levels = merge(others)
        if len(directions(levels)) > len(self._directions) or NonPrivate() in others:
            return None
        if bounds.without_extremes(others) != (others, 0.0):
            return None
        found = self._directions
        try:
            if others:
                if levels != self._levels:
                    self._levels, self._steps = levels, [part.like(levels) for part in found]
                steps = zip(found, self._steps, strict=True)
                found = [part.followed_by(step, times) for part, step in steps]
        except OverflowError:
            return None
        return Composed(found, self._failed + times * failing(failures))

    def keeps(self, epsilon: float, delta: float) -> bool:
        """Whether these releases keep (epsilon, delta)."""
        largest = max(part.upper_delta(epsilon) for part in self._directions)
        return (self._failed + largest) * (1 + _ROUND_OFF) <= delta

    def anchor(self, epsilon: float, delta: float) -> Anchor | None:
        """``None``: they pass delta."""
        infinite = [float(part.transform.infinity + part.above) for part in self._directions]
        lefts = (delta - self._failed) * (1 - _ROUND_OFF) - np.array(infinite)
        if lefts.min() <= 0:
            return None
        profiles = [_profile(*part) for part in zip(self._directions, infinite, strict=True)]
        slopes = max(_slopes(*profile, epsilon, delta) for profile in profiles)[1:]
        lambdas = np.geomspace(_LEAST * min(slopes), _MOST * max(slopes), _LAMBDAS)
        logs = np.array([_log_constants(*profile, epsilon, lambdas) for profile in profiles])
        return Anchor(tuple((1 + lambdas).tolist()), logs + _ROUND_OFF, lefts)


def _profile(found: Composition, infinite: float) -> tuple[Array, Array]:
    """The losses of the grid, and bounds on delta there without that of infinite losses."""
    return found.losses, np.maximum(found.upper_deltas(found.losses) - infinite, 0.0)


def _slopes(losses: Array, deltas: Array, epsilon: float, delta: float) -> tuple[float, ...]:
    """Where delta is as small as ``delta``, and about -d log(delta) / d epsilon there and at
    ``epsilon``.
    """
    reached = int(np.argmax(deltas <= delta))
    slopes = []
    for i in (reached, int(np.searchsorted(losses, epsilon))):
        i = min(max(i, 1), len(losses) - 2)
        before, after = float(deltas[i - 1]), float(deltas[i + 1])
        fall = math.log(before / after) if after > 0 else 0.0
        slopes.append(max(fall / float(losses[i + 1] - losses[i - 1]), _LEAST_SLOPE))
    return float(losses[reached]), *slopes


def _log_constants(losses: Array, deltas: Array, epsilon: float, lambdas: Array) -> Array:
    """log A_lambda: the logarithm of the least upper bound of delta(e) exp(lambda (e - epsilon)).

    Below the grid delta is at most 1, and above it 0 (what lies beyond the window counts as
    infinite). delta is convex in y = exp(e), so between two losses it is at most the chord a + b y
    with b <= 0, and (a + b y) y^lambda is largest at y = -lambda a / (b (1 + lambda)), or at the
    end that is nearer.
    """
    width = float(losses[1] - losses[0])
    first, last = deltas[:-1], deltas[1:]
    chord = np.minimum((last - first) / math.expm1(width), -1e-300)  # b, with y = 1 at the first
    result = []
    for power in lambdas:
        y = power / (1 + power) * (first - chord) / -chord
        y = np.clip(y, 1.0, math.exp(width))
        with np.errstate(divide="ignore"):
            logs = np.log(np.maximum(first + chord * (y - 1), last)) + power * np.log(y)
        inside = float(np.max(logs + power * (losses[:-1] - epsilon)))
        below = power * (float(losses[0]) - epsilon)
        result.append(max(inside, below, _LOWEST_LOG))
    return np.array(result)


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
        if filter is None:
            orders = _orders_of(epsilon, delta, 0.15, 1.6, 12)
            if method == "rdp":  # those of the bound that is reported
                known = np.array(renyi.ORDERS)
                orders = tuple({float(known[np.argmin(abs(known - o))]): 0 for o in orders})
            self._start = Anchor.empty(epsilon, delta, orders)
        else:
            self._start = Anchor.of_filter(filter)
        self.restart({})

    def restart(self, counts: Counts) -> None:
        """Everything that was charged is ``counts``."""
        self._base: Composed | None = None
        self._recent: dict[Pair, int] = {}  # charged since the base
        self._last: dict[Pair, int] = {}  # before that, since the base before it
        self._size, self._is_fresh = 0, False  # releases of the base, and whether none joined it
        self._count_from(self._start, {})
        for pair, count in counts.items():
            self.spend(pair, count)

    def _count_from(self, anchor: Anchor, credit: Counts) -> None:
        self._anchor, self._spent = anchor, np.zeros(len(anchor.orders) + 1)
        self._costs: dict[Hashable, Array] = {}
        # releases that are counted above and that the history does not hold, or not any more
        self._credit = dict(credit)

    def spend(self, pair: Pair, count: int) -> None:
        """``count`` releases were charged; a negative number was given back."""
        if count < 0:
            self._credit[pair] = self._credit.get(pair, 0) - count
            self._base, self._recent = None, {}
            return
        self._recent[pair] = self._recent.get(pair, 0) + count
        if self._credit:
            count = _beyond(self._credit, {pair: count}).get(pair, 0)
        if count:
            self._spent = self._spent + count * self._cost(pair)

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
        need = added(reserved or {}, need, n)
        if self._keeps(need):
            return True
        if NonPrivate() in need or self._filter is not None:
            return False
        joint = added(counts, need)
        if self._method == "pld" and len(joint) > EXACT_LEVELS:
            for is_fresh in (False, True):
                if self._compose_history(counts, is_fresh):
                    if self._keeps(need):
                        return True
                    if self._joins(counts, need, not reserved):
                        return True
        if self._bound(joint) > self._epsilon:
            return False
        if not reserved and len(joint) <= EXACT_LEVELS:
            self._look_ahead(joint, need)
        return True

    def certain(self, counts: Counts, need: Counts, reserved: Counts | None = None) -> int:
        """How often ``need`` certainly fits; 0 means that it does not fit once."""
        known = self.cheap(need, reserved)
        if known < _ENOUGH and self.fits(counts, need, 1, reserved):
            known = max(self.cheap(need, reserved), 1)
        return known

    def cheap(self, need: Counts, reserved: Counts | None = None) -> int:
        """How often ``need`` fits as far as the anchor shows."""
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
        is_few = len(added(counts, need)) <= EXACT_LEVELS or self._method == "rdp"
        while not is_few and known._compose_history(added(counts, need, n), True):
            if not (more := known.cheap(need)):
                break
            n += more
            known._base = None

        def excess(n: int) -> float:
            return self._bound(added(counts, need, n)) - self._epsilon

        if not is_few and excess(n + 1) > 0:
            return n
        return max(largest(excess, start=max(n + n // 4, 1)), n)

    def _keeps(self, need: Counts) -> bool:
        if self._credit:
            need = _beyond(dict(self._credit), need)
        spent = self._spent
        for pair, count in need.items():
            spent = spent + count * self._cost(pair)
        return self._anchor.keep(spent)

    # --- compositions -----------------------------------------------------------------------------

    def _compose_history(self, counts: Counts, is_fresh: bool) -> bool:
        """Makes the history the anchor, from the last composition of it or afresh; whether that
        could change anything.
        """
        if is_fresh:
            if self._base is not None and self._is_fresh and not self._recent:
                return False
            self._base, self._size = Composed.of(counts, self._delta), sum(counts.values())
        elif self._base is None or not self._recent:
            return False
        elif sum(self._recent.values()) > _MOST_JOINED * self._size:  # the grid is too narrow
            return False
        else:
            self._base = self._base.followed_by(self._recent)
        self._is_fresh = is_fresh
        self._last, self._recent = self._recent or self._last, {}
        anchor = None if self._base is None else self._base.anchor(self._epsilon, self._delta)
        if anchor is None:
            return False
        self._count_from(anchor, {})
        return True

    def _bound(self, counts: Counts) -> float:
        """The epsilon that is reported."""
        bound = renyi if self._method == "rdp" else bounds
        return bound.upper_epsilon(counts, self._delta)

    def _look_ahead(self, counts: Counts, need: Counts) -> None:
        """Counts from ``counts``, which fit and in which ``need`` is about to be charged, and from
        as many more releases like the last ones as fit.
        """
        unit, size = _like(added(self._recent, need)), sum(counts.values())
        self._recent = {}

        def excess(n: int) -> float:
            return self._bound(added(counts, unit, n)) - self._epsilon

        n = largest(excess, start=max(size // (8 * sum(unit.values())), 1))
        self._count_from(Anchor.full(), added(need, unit, n))

    def _joins(self, counts: Counts, need: Counts, is_alone: bool) -> bool:
        """Whether ``need`` fits as the composition of the history shows. Then, if it is all that is
        reserved, as many more releases like the last ones are counted as fit.
        """
        assert self._base is not None
        joint = self._base.followed_by(need)
        if joint is None or not joint.keeps(self._epsilon, self._delta):
            return False
        if not is_alone:
            return True
        unit = _like(added(self._last, need))
        most = max(int(_MOST_JOINED * self._size) // sum(unit.values()), 1)
        n = self._search(joint, unit, 0, most)
        found = (joint.followed_by(unit, n) if n else None) or joint
        anchor = found.anchor(self._epsilon, self._delta)
        if anchor is not None:
            self._count_from(anchor, added(need, unit, n))
        return True

    def _search(self, joint: Composed, unit: Counts, low: int, most: int) -> int:
        """About how often ``unit`` can join, from ``low`` to ``most`` times."""

        def fits(n: int) -> bool:
            found = joint.followed_by(unit, n)
            return found is not None and found.keeps(self._epsilon, self._delta)

        if fits(most):
            return most
        high = most
        while high > max(low + 1, low * _PRECISION):
            middle = max(low + 1, math.isqrt(low * high))
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    # --- costs ------------------------------------------------------------------------------------

    def _cost(self, pair: Pair) -> Array:
        """The divergences of one release, and the probability that it fails outright. Before the
        first composition, where many releases differ, noise is rounded down and sampling rates up,
        onto a geometric grid.
        """
        orders = self._anchor.orders
        if isinstance(pair, Gaussian):
            half = 1.0 if self._filter is not None and self._filter.kind == "gaussian" else 0.5
            return np.append(half * pair.mu**2 * np.array(orders if half < 1 else (1.0,)), 0.0)
        cost = self._costs.get(pair)
        if cost is not None:
            return cost
        key: Hashable = pair
        is_shared = self._anchor is self._start and self._filter is None
        if isinstance(pair, Sampled) and is_shared and len(self._costs) >= _EXACT_COSTS:
            cell = math.floor(math.log(pair.noise) / math.log(_GRID))
            rate = _GRID ** math.ceil(math.log(pair.rate) / math.log(_GRID)) * (1 + 1e-12)
            rate = max(min(rate, 1 - 1e-12), pair.rate)
            key = (pair.kind, rate, cell)
            cost = self._costs.get(key)
            pair = Sampled(pair.kind, rate, min(pair.noise, _GRID**cell * (1 - 1e-12)))
        if cost is None:
            if isinstance(pair, Failure) and self._filter is None:
                cost = np.append(np.zeros(len(orders)), pair.delta)
            elif self._filter is not None and self._filter.kind == "gaussian":
                cost = np.array([dominating_mu(pair) ** 2, 0.0])
            else:
                cost = np.append(renyi.curve({pair: 1}, orders), 0.0)
            if len(self._costs) < 100_000:
                self._costs[key] = cost
        return cost


def _beyond(credit: dict[Pair, int], need: Counts) -> dict[Pair, int]:
    """Takes ``need`` out of ``credit``, as far as that covers it, and returns the rest."""
    rest = {}
    for pair, count in need.items():
        for kept in (pair, *credit):
            if count and credit.get(kept, 0) and covers(kept, pair):
                used = min(count, credit[kept])
                credit[kept] -= used
                count -= used
        if count:
            rest[pair] = count
    return rest


def _like(recent: Counts) -> dict[Pair, int]:
    """Releases in the proportions of these. Of those that differ only in their noise the one with
    the least stands for all, with a little less, where there are several.
    """
    kinds: dict[Hashable, tuple[Pair, int, bool]] = {}
    for pair, count in recent.items():
        kind = (pair.kind, pair.rate) if isinstance(pair, Sampled) else pair
        least, known, differ = kinds.get(kind, (pair, 0, False))
        kinds[kind] = pair if covers(pair, least) else least, known + count, differ or pair != least
    rarest = min(count for _, count, _ in kinds.values())
    found: dict[Pair, int] = {}
    for pair, count, differ in kinds.values():
        if differ and isinstance(pair, Sampled):
            pair = Sampled(pair.kind, pair.rate, pair.noise / _LOWERED)
        found[pair] = min(round(count / rarest), _MOST_OF_UNIT)
    return found
