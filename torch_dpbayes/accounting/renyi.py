"""Renyi differential privacy: from releases to one curve, and from the curve to (epsilon, delta).

The curve of a release is that of the pair which dominates it
(:func:`pairs.dominating_pair`): every Renyi divergence is a positive combination of
hockey-stick divergences, so it can only grow from the release to its dominating pair. Curves add up
under composition, also when parameters are chosen adaptively, for as long as the sum at one order
fixed in advance stays below a limit fixed in advance (Feldman, Zrnic 2021).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache, singledispatch

import numpy as np
from scipy import special

from .bounded import least_delta, least_epsilon
from .failures import beside_failures, with_failures
from .levels import EXACT_LEVELS, merge
from .loss_grid import log_mixture, pieces
from .pairs import Array, BoundedRange, Concentrated, Gaussian, Pair, Pure, Sampled

ORDERS: tuple[float, ...] = (
    *(1 + i / 10 for i in range(1, 100)),
    *range(11, 65),
    *(80, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096),
)
# Quadrature follows the integrand to x = order; beyond this order it would cost more than it
# brings.
_LARGEST_QUADRATURE_ORDER = 256
_RATIO = 1.005
_MOST_EXACT = 20_000  # different releases that are composed as they are
_STRIDE = 16  # between the orders that are looked at first, a power of 2
_MARGIN = 1e-9  # relative error of the quadrature, by far


@singledispatch
def divergences(pair: Pair, alpha: Array) -> Array:
    """The Renyi divergence of one release at the orders ``alpha``; infinite where nothing is known.

    A new kind of pair registers its own.
    """
    return np.full(len(alpha), math.inf)


@divergences.register
def _(pair: Gaussian, alpha: Array) -> Array:
    return alpha * pair.mu**2 / 2


@divergences.register
def _(pair: Concentrated, alpha: Array) -> Array:
    return pair.xi + pair.rho * alpha


@divergences.register
def _(pair: Pure, alpha: Array) -> Array:
    # log E exp(theta L) for L = e with probability e^e / (1 + e^e), else -e
    e, theta = pair.epsilon, alpha - 1
    log_moment = np.logaddexp(alpha * e - np.logaddexp(0, e), -theta * e - np.logaddexp(0, e))
    return of_bounded_loss(log_moment, e, alpha)


@divergences.register
def _(pair: BoundedRange, alpha: Array) -> Array:
    # density exp((l - b) / 2) / (2 (1 - e^-b)) on [-b, b]
    b, slope = pair.epsilon, alpha - 1 + 0.5
    log_moment = (
        (slope - 0.5) * b
        + np.log(-np.expm1(-2 * slope * b) / (2 * slope))
        - math.log(-math.expm1(-b))
    )
    return of_bounded_loss(log_moment, b, alpha)


@divergences.register
def _(pair: Sampled, alpha: Array) -> Array:
    # Where the loss is tiny, the logarithm of a sum close to 1 has lost digits: an absolute margin
    # as well.
    found = np.array([_sampled(pair, order) for order in alpha.tolist()])
    return found * (1 + _MARGIN) + 2e-15 * (1 + alpha) / (alpha - 1)


@lru_cache(maxsize=2**18)
def _divergence(pair: Pair, order: float) -> float:
    return float(divergences(pair, np.array([order], dtype=np.float64))[0])


@lru_cache(maxsize=4096)
def _curve(pair: Pair, orders: tuple[float, ...]) -> Array:
    return divergences(pair, np.array(orders, dtype=np.float64))


def of_bounded_loss(log_moment: Array, largest: float, alpha: Array) -> Array:
    """Where the loss is tiny, log E exp(theta L) is a difference of larger numbers: an absolute
    margin for their round-off, or the divergence alpha e^2 / 2 that no loss within [-e, e] passes
    (Bun, Steinke 2016, Proposition 3.3).
    """
    margin = 1e-15 * (8 + abs(math.log(largest)) + np.abs(log_moment))
    return np.minimum((log_moment + margin) / (alpha - 1), alpha * largest**2 / 2) * (1 + 1e-14)


def _sampled(pair: Sampled, order: float) -> float:
    if pair.kind == "directed" and float(order).is_integer():
        return _binomial(pair.rate, pair.noise, int(order))
    if order > _LARGEST_QUADRATURE_ORDER:
        return math.inf
    q, z = pair.rate, pair.noise
    start = 0.5 if pair.kind == "symmetric" else -12 * z
    # Right of the centre the log ratio grows at most as x / z^2 per order; for the antipodal pair
    # twice that.
    end = (2 if pair.kind == "antipodal" else 1) * order + 12 * z
    x, weight = pieces(
        np.linspace(start, end, 2 + int((end - start) / (0.1 * z * min(1.0, 2 * z)))), 5
    )
    base = np.log(weight) - x**2 / (2 * z**2) - math.log(z * math.sqrt(2 * math.pi))
    up = log_mixture(x, q, z)
    if pair.kind == "directed":
        # For a Gaussian the divergence of the removed record is the larger one (Mironov, Talwar,
        # Zhang 2019, Thm 5).
        return float(special.logsumexp(base + order * up)) / (order - 1)
    if pair.kind == "antipodal":
        return float(special.logsumexp(base + order * up - (order - 1) * log_mixture(-x, q, z))) / (
            order - 1
        )
    central = 1 - float(np.sum(np.exp(base) + np.exp(base + up)))
    terms = np.concatenate(
        [base + order * up, base - (order - 1) * up, [math.log(max(central, 1e-300))]]
    )
    return max(float(special.logsumexp(terms)), 0.0) / (order - 1)


def _binomial(q: float, z: float, order: int) -> float:
    """Mironov, Talwar, Zhang 2019, section 3.3."""
    k = np.arange(order + 1)
    log_binomial = (
        special.gammaln(order + 1) - special.gammaln(k + 1) - special.gammaln(order - k + 1)
    )
    terms = log_binomial + k * math.log(q) + (order - k) * math.log1p(-q) + k * (k - 1) / (2 * z**2)
    return max(float(special.logsumexp(terms)), 0.0) / (order - 1)


def curve(counts: Mapping[Pair, int], orders: Sequence[float] = ORDERS) -> Array:
    """The Renyi divergence of the composition, in the worse direction, at each order."""
    total = np.zeros(len(orders))
    for pair, count in merge(counts, _RATIO, concentrated=True, fixed=True).items():
        total = total + count * _curve(pair, tuple(orders))
    return total


def epsilon(of_orders: Array, delta: float, orders: Sequence[float] = ORDERS) -> float:
    """Epsilon at ``delta``: Canonne, Kamath, Steinke 2020, Proposition 12, at the best order."""
    return max(0.0, float(np.min(_epsilons(of_orders, delta, orders))))


def _epsilons(of_orders: Array, delta: float, orders: Sequence[float]) -> Array:
    return of_orders - _conversion(np.asarray(orders, dtype=np.float64), delta)


def best_order(of_orders: Array, delta: float, orders: Sequence[float] = ORDERS) -> int:
    """Index of the order that decides :func:`epsilon`."""
    return int(np.argmin(of_orders - _conversion(np.asarray(orders, dtype=np.float64), delta)))


def delta(of_orders: Array, epsilon: float, orders: Sequence[float] = ORDERS) -> float:
    """Delta at ``epsilon``, by the same bound."""
    return math.exp(min(0.0, float(np.min(_log_deltas(of_orders, epsilon, orders)))))


def _log_deltas(of_orders: Array, epsilon: float, orders: Sequence[float]) -> Array:
    alpha = np.asarray(orders, dtype=np.float64)
    found = (alpha - 1) * (of_orders - epsilon + np.log1p(-1 / alpha)) - np.log(alpha)
    return np.asarray(found)


def _least(
    counts: Mapping[Pair, int], at_orders: Callable[[Array, Sequence[float]], Array]
) -> float:
    """The least of ``at_orders(curve, orders)`` over orders, each of which gives a bound.

    Of many different releases the best order is searched for, from afar to near, with each release
    as it is; of very many, close ones are merged first.
    """
    levels = merge(counts, concentrated=True)
    if not EXACT_LEVELS < len(levels) <= _MOST_EXACT:
        return float(np.min(at_orders(curve(counts), ORDERS)))

    @cache
    def at(place: int) -> float:
        order = ORDERS[place]
        total = sum(count * _divergence(pair, order) for pair, count in levels.items())
        return float(at_orders(np.array([total]), [order])[0])

    best, stride = min(range(0, len(ORDERS), _STRIDE), key=at), _STRIDE
    while stride > 1:
        stride //= 2
        near = (best - stride, best, best + stride)
        best = min((place for place in near if 0 <= place < len(ORDERS)), key=at)
    return at(best)


def upper_epsilon(counts: Mapping[Pair, int], delta: float) -> float:
    """Epsilon at ``delta`` of releases whose parameters were fixed in advance; those that may
    fail outright have no curve but a part of delta.
    """
    return beside_failures(
        counts,
        delta,
        lambda others, left: least_epsilon(
            others, lambda c: max(0.0, _least(c, lambda r, at: _epsilons(r, left, at)))
        ),
    )


def upper_delta(counts: Mapping[Pair, int], epsilon: float) -> float:
    """Delta at ``epsilon``, likewise."""

    def price(c: Mapping[Pair, int], largest: float) -> float:
        return math.exp(min(0.0, _least(c, lambda r, at: _log_deltas(r, largest, at))))

    return with_failures(counts, lambda others: least_delta(others, epsilon, price))


def allowed(epsilon: float, delta: float, orders: Sequence[float] = ORDERS) -> Array:
    """The divergence at each order up to which (epsilon, delta) is kept."""
    return epsilon + _conversion(np.asarray(orders, dtype=np.float64), delta)


def _conversion(alpha: Array, delta: float) -> Array:
    return np.asarray((math.log(delta) + np.log(alpha)) / (alpha - 1) - np.log1p(-1 / alpha))


def filter_order(epsilon: float, delta: float) -> float:
    """The order at which a Renyi filter for this budget lets a Gaussian run longest: a
    function of the budget only.
    """
    orders = 1 + np.geomspace(1e-3, 1e6, 2000)
    return float(orders[np.argmax(allowed(epsilon, delta, orders.tolist()) / orders)])
