r"""Decides whether a release fits a privacy budget.

Three bounds are asked in turn; each is an upper bound, and only the last one refuses.

1. *Renyi.* Renyi divergences add up, and (epsilon, delta) allows each order a divergence that
   follows from the budget alone. This costs microseconds.
2. *Renyi, counted from the history.* Let delta_H be the privacy profile of the history H. If

   .. math:: \delta_H(\varepsilon - s) \le \delta_\infty + \sum_k C_k e^{\lambda_k s}
       \quad \text{for all } s,

   then after any further releases, with R_k the sum of their divergences of order 1 + lambda_k,

   .. math:: \delta(\varepsilon) = E[\delta_H(\varepsilon - L)] \le \delta_\infty + \sum_k C_k
       e^{\lambda_k R_k}, \qquad\text{because } E_P[e^{\lambda L}] = e^{\lambda R}.

   So one composition of the history admits nearly all that is left. A linear program finds the
   constants; they are then raised until the inequality holds everywhere. For the empty history and
   one k, C is the conversion of Canonne, Kamath and Steinke (2020): the first bound is a case of
   the second.
3. *Composition.* The epsilon that is reported, of the history and the release together.

A privacy filter replaces all three where parameters may depend on earlier outputs: one order, one
limit, fixed before the first release.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

from . import bounds, renyi
from .bounds import MOST_STEPS, largest
from .dominating_pairs import (
    Array,
    Failure,
    Gaussian,
    Laplace,
    NonPrivate,
    Pair,
    Sampled,
    added,
    covers,
    dominating_mu,
    merge,
    take,
)
from .events import Method
from .fft_composition import Composition, compose
from .gdp import gaussian_mu
from .privacy_loss import apart, failing

_GRID = 1.02  # ratio of noise multipliers and rates that share one cost where releases differ much
_FEW = 4  # releases that fit, below which a reserve is decided by a composition
_LOWERED = 1.08  # by how much noise is lowered where releases like the last ones are expected
_EXACT_COSTS = 16  # different releases before costs are shared
_ROUND_OFF = 1e-9  # relative, of sums of costs
_MERGED = 0.015  # of epsilon, which merging close releases may add to a Renyi bound
# of lambda, relative to the slope of log delta_H
_FACTORS = np.array([0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 1.0, 1.2])
_SHARES = (0.0, 0.01, 0.05)  # of the history, which further releases are to cost least
_CELL = 0.001  # by which log delta_H falls in one cell near epsilon
_RANGE = 12.0  # of logarithms that a linear program can tell apart


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


class _Limits(NamedTuple):
    """Divergences of which one has to keep its limit."""

    orders: tuple[float, ...]
    limits: Array
    reverse: NDArray[np.bool_] = np.zeros(0, dtype=bool)

    def keep(self, spent: Array) -> bool:
        """Whether these divergences fit."""
        return bool((spent <= self.limits).any())

    def often(self, spent: Array, each: Array) -> int:
        """How often ``each`` fits beside ``spent``."""
        left = self.limits - spent
        possible = (left > 0) & np.isfinite(each)
        if not possible.any():
            return 0
        with np.errstate(over="ignore"):
            found = np.max(left[possible] / np.maximum(each[possible], 1e-300)) * (1 - 1e-12)
        return int(min(found, MOST_STEPS))


class _Tangents(NamedTuple):
    """Bounds on delta after a history, as in the module's second bound.

    Attributes:
        orders: 1 + lambda, those of one direction after those of the other.
        logs: log C by alternative, direction and lambda.
        lefts: log of the delta that may be reached, by direction.
        reverse: of each order, whether it is of an added record.
    """

    orders: tuple[float, ...]
    logs: Array
    lefts: Array
    reverse: NDArray[np.bool_]

    def keep(self, spent: Array) -> bool:
        """Whether these divergences fit by one of the alternatives, in both directions."""
        # an infinite divergence makes a sum that is no number, which is not below any limit
        with np.errstate(invalid="ignore"):
            grown = (np.array(self.orders) - 1) * spent
            deltas = self.logs + grown.reshape(self.logs.shape[1:])
            largest = deltas.max(axis=2)
            sums = largest + np.log(np.exp(deltas - largest[..., None]).sum(axis=2))
        return bool((sums <= self.lefts).all(axis=1).any())

    def often(self, spent: Array, each: Array) -> int:
        """How often ``each`` fits beside ``spent``."""
        if not self.keep(spent + each):
            return 0
        high = 2
        while high < MOST_STEPS and self.keep(spent + high * each):
            high *= 2
        low = high // 2
        while high - low > 1 + low // 1000:
            middle = (low + high) // 2
            low, high = (middle, high) if self.keep(spent + middle * each) else (low, middle)
        return low


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
        self._next_anchor = 0.0  # releases
        self._guess, self._recent = 0, dict[Pair, int]()
        self._promised: dict[Pair, int] = {}
        self.restart({})

    def spend(self, pair: Pair, count: int) -> None:
        """``count`` releases were charged; a negative number was given back."""
        if count < 0:
            self._stale = True
        elif count:
            self._add(pair, count)
            self._recent = added(self._recent, {pair: count})
            if self._promised and take(self._promised, pair, count) is None:
                self._promised = {}

    def restart(self, counts: Mapping[Pair, int]) -> None:
        """Everything that was charged is ``counts``."""
        self._promised, self._recent, self._next_anchor = {}, {}, 0.0
        if self._filter is not None:
            gaussian = self._filter.kind == "gaussian"
            orders: tuple[float, ...] = () if gaussian else (self._filter.order,)
            limits = np.array([self._filter.limit])
        else:
            orders = orders_of(self._epsilon, self._delta, 0.15, 1.6, 12)
            # what is reported by method "rdp" merges releases, and decides near the budget
            epsilon = self._epsilon * (1.0 if self._is_composed else 1 - _MERGED)
            limits = renyi.allowed(epsilon, self._delta, orders)
        self._count_from(counts, _Limits(orders, limits * (1 - _ROUND_OFF)))

    def _count_from(self, counts: Mapping[Pair, int], rule: _Limits | _Tangents) -> None:
        self._rule, self._costs = rule, dict[Hashable, Array]()
        self._spent = np.zeros(max(len(rule.orders), 1))
        self._is_anchored = self._stale = False
        for pair, count in counts.items():
            self.spend(pair, count)

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
        if not (reserved or self._stale):  # the common case, in the fewest operations
            spent = self._spent
            for pair, count in need.items():
                spent = spent + n * count * self._cost(pair)
            if self._rule.keep(spent):
                return True
        reserved = reserved or {}
        if self._prepared(counts, need, reserved) >= n:
            return True
        if not reserved and self._promised_times(need) >= n:
            return True
        whole = added(counts, reserved)
        if self._excess(whole, need)(n) > 0:
            return False
        if self._is_composed and not reserved:
            self._promise(added(whole, need, n), need)
        return True

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
        if not reserved:
            known = max(known, self._promised_times(need))
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

    # Few releases of large losses have a profile that no Renyi divergence follows. There a search
    # shows how many more releases like the last ones fit, and these are let through.

    def _promised_times(self, need: Mapping[Pair, int]) -> int:
        """How often ``need`` can be taken out of what was promised."""
        if len(need) > 1:
            left = dict(self._promised)
            return int(all(take(left, pair, n) is not None for pair, n in need.items()))
        ((pair, count),) = need.items()
        known = [left for kept, left in self._promised.items() if covers(kept, pair)]
        return max(known, default=0) // count

    def _promise(self, counts: Mapping[Pair, int], need: Mapping[Pair, int]) -> None:
        unit: dict[Hashable, tuple[Pair, int]] = {}
        for pair, count in added(self._recent, need).items():
            kind = (pair.kind, pair.rate) if isinstance(pair, Sampled) else pair
            least, known = unit.get(kind, (pair, 0))
            unit[kind] = (pair if covers(pair, least) else least, known + count)
        rare = min(count for _, count in unit.values())
        more = {
            _weaker(pair): max(1, min(round(count / rare), 1000)) for pair, count in unit.values()
        }
        start = max(self._guess // 8, 1)
        times = largest(self._excess(counts, more), start=start)
        self._guess = times or sum(counts.values()) // (4 * sum(more.values()))
        self._recent = {}
        self._promised = added({pair: n for pair, n in need.items()}, more, times)

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
        if known >= least or self._is_anchored or not is_priced or self._promised:
            return known
        if sum(counts.values()) < self._next_anchor:
            return known
        self._anchor(counts)
        known = max(known, self._additive(need, reserved))
        if not known:  # nothing is gained before the history has grown
            self._next_anchor = 1.1 * sum(counts.values())
        return known

    def _additive(self, need: Mapping[Pair, int], reserved: Mapping[Pair, int]) -> int:
        spent, each = self._spent, np.zeros(len(self._spent))
        for pair, count in reserved.items():
            spent = spent + count * self._cost(pair)
        for pair, count in need.items():
            each = each + count * self._cost(pair)
        return self._rule.often(spent, each)

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
                self._count_from({}, found)
        self._is_anchored = True

    def _cost(self, pair: Pair) -> Array:
        """The divergences of one release. Where many releases differ, noise is rounded down and
        sampling rates up, onto a geometric grid.
        """
        if isinstance(pair, Gaussian):
            orders = self._rule.orders
            return np.asarray(pair.mu**2 * (np.array(orders) / 2 if orders else np.ones(1)))
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
            if self._rule.orders:
                cost = renyi.curve({pair: 1}, self._rule.orders)
                if self._rule.reverse.any():
                    bounded = np.minimum(cost, _largest_reverse(pair))
                    cost = np.where(self._rule.reverse, bounded, cost)
            else:
                cost = np.array([dominating_mu(pair) ** 2])
            if len(self._costs) < 100_000:
                self._costs[key] = cost
        return cost


def _tangents(counts: Mapping[Pair, int], epsilon: float, delta: float) -> _Tangents | None:
    """Bounds after the history; ``None`` where the composition leaves nothing, or is better done
    in closed form.
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
    found = [_tangents_of(composition, others, epsilon, left) for composition in directions]
    known = [row for row in found if row is not None]
    if len(known) < len(found):
        return None
    orders = np.concatenate([orders for orders, _, _ in known])
    logs = np.stack([logs for _, logs, _ in known], axis=1)
    reverse = [np.full(len(_FACTORS), composition.reverse) for composition in directions]
    lefts = np.array([left for *_, left in known])
    return _Tangents(tuple(orders.tolist()), logs, lefts, np.concatenate(reverse))


def _tangents_of(
    composition: Composition, counts: Mapping[Pair, int], epsilon: float, delta: float
) -> tuple[Array, Array, float] | None:
    """Of one direction the orders, log C by alternative and order, and log of the delta left."""
    # mass at infinity stays there, whatever is released later
    infinite = float(composition.transform.infinity + composition.above)
    if infinite >= delta:
        return None
    left = math.log(delta - infinite)
    losses = composition.losses
    deltas = np.maximum(composition.upper_deltas(losses) - infinite, 0.0)
    # delta falls: between two losses it is at most that at the first, and below all of them 1
    with np.errstate(divide="ignore"):
        logs = np.log(np.append(1.0, deltas[:-1]))
    known = np.isfinite(logs)
    logs, shifts = logs[known], epsilon - losses[known]
    # fine cells where delta is near what it is at epsilon, coarser ones far away
    here = float(np.interp(0.0, -shifts, logs))
    falls = np.append(0.0, -np.diff(logs)) / (_CELL * (1 + 10 * np.abs(logs - here)))
    cells = np.floor(np.cumsum(falls))
    first = np.flatnonzero(np.append(True, np.diff(cells) > 0))
    last = np.append(first[1:], len(logs)) - 1
    logs, shifts = logs[first], shifts[last]
    slope = -np.polyfit(*_near(-shifts, logs), 1)[0]
    tilt = composition.window.tilt  # the slope where delta is as asked for
    factors = min(max(float(slope), tilt), 2 * tilt) * _FACTORS
    divergences = renyi.curve(counts, (1 + factors).tolist())
    if composition.reverse:
        largest = sum(count * _largest_reverse(pair) for pair, count in counts.items())
        divergences = np.minimum(divergences, largest)
    usable = np.isfinite(divergences)
    if not usable.any():
        return None
    terms = factors * shifts[:, None] - logs[:, None] + left  # log of e^(lambda s) delta / delta_H
    nearest = terms[np.argmin(np.abs(shifts))]  # variables are shares of delta near epsilon
    table = np.exp(np.minimum(terms - nearest, _RANGE)) * usable
    finite = np.where(usable, divergences, 0.0)
    alternatives = []
    for share in _SHARES:
        growth = np.where(usable, factors * share * finite, np.inf) - nearest
        prices = np.exp(np.minimum(growth - growth.min(), 2 * _RANGE))
        solved = optimize.linprog(prices, A_ub=-table, b_ub=-np.ones(len(table)))
        if solved.x is None:
            return None
        with np.errstate(divide="ignore"):
            constants = np.where(usable, np.log(np.maximum(solved.x, 0.0)) - nearest, -np.inf)
        # raised until every cell is covered, whatever the accuracy of the solution
        lacking = -np.min(special.logsumexp(terms + constants, axis=1))
        if not math.isfinite(lacking):
            return None
        alternatives.append(constants + left + max(float(lacking), 0.0) + _ROUND_OFF)
    return 1 + factors, np.array(alternatives), left


def _weaker(pair: Pair) -> Pair:
    """``pair`` with a little less noise, where there may be other noises: it covers those too."""
    if isinstance(pair, Sampled):
        return Sampled(pair.kind, pair.rate, pair.noise / _LOWERED)
    return pair


def _largest_reverse(pair: Pair) -> float:
    """A bound on the loss where a record was added, which no Renyi divergence passes: with
    probability 1 - q the release is as without the record.
    """
    if isinstance(pair, Sampled) and pair.kind == "directed":
        return -math.log1p(-pair.rate)
    if isinstance(pair, Laplace) and pair.rate < 1:
        return -math.log1p(-pair.rate)
    return math.inf


def _near(losses: Array, logs: Array) -> tuple[Array, Array]:
    """The cells around epsilon, to which a slope is fitted."""
    order = np.argsort(np.abs(losses))[:10]
    return losses[order], logs[order]
