"""Renyi differential privacy: from releases to one curve, and from the curve to (epsilon, delta).

The curve of a release is that of its dominating pair: a Renyi divergence is a positive combination
of hockey-stick divergences, so the pair's divergence is not smaller. Curves add up under
composition. If parameters are chosen adaptively, this holds as long as the sum at one order stays
below a limit, both fixed in advance (Feldman, Zrnic 2021).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache, singledispatch

import numpy as np
from scipy import special

from . import dominating_pairs as pairs
from .dominating_pairs import Array, Pair
from .privacy_loss import delta_of_all, epsilon_of_all, log_mixture, loss_nodes, pieces

ORDERS: tuple[float, ...] = (
    *(1 + i / 10 for i in range(1, 100)),
    *range(11, 65),
    *(80, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096),
)
# quadrature extends to x = order; for larger orders it is too slow for its benefit
_LARGEST_QUADRATURE_ORDER = 256
_LARGEST_SAMPLED_ORDER = 256  # for Poisson samples of other mechanisms than the Gaussian
_MOST_VALUES = 2**14  # values of discrete Gaussian noise in a sum
_RATIO = 1.005  # ratio of the grid to which many different releases are rounded
_MOST_EXACT = 20_000  # up to so many different releases are composed without rounding
_STRIDE = 16  # distance of the orders that are tried first; a power of 2
_MARGIN = 1e-9  # a generous bound on the relative error of the quadrature

# --- of one release -------------------------------------------------------------------------------


def log_sum(logs: Array) -> float:
    """log of the sum of exp(logs); SciPy's function takes a millisecond."""
    largest = int(np.argmax(logs))
    if not math.isfinite(logs[largest]):
        return float(logs[largest])
    others = np.exp(logs - logs[largest])
    others[largest] = 0.0
    return float(logs[largest]) + math.log1p(float(others.sum()))


@singledispatch
def divergences(pair: Pair, alpha: Array) -> Array:
    """The Renyi divergence of one release at the orders ``alpha``, in the worse direction; infinite
    if no bound is known. A new kind of pair registers its own function.
    """
    return np.full(len(alpha), math.inf)


@divergences.register
def _(pair: pairs.Gaussian, alpha: Array) -> Array:
    return alpha * pair.mu**2 / 2


@divergences.register
def _(pair: pairs.Pure, alpha: Array) -> Array:
    # log E exp(theta L) for L = e with probability e^e / (1 + e^e), else -e
    e, theta = pair.epsilon, alpha - 1
    log_moment = np.logaddexp(alpha * e - np.logaddexp(0, e), -theta * e - np.logaddexp(0, e))
    return _of_bounded_loss(log_moment, e, alpha)


@divergences.register
def _(pair: pairs.BoundedRange, alpha: Array) -> Array:
    # density exp((l - b) / 2) / (2 (1 - e^-b)) on [-b, b]
    b, slope = pair.epsilon, alpha - 1 + 0.5
    log_moment = (
        (slope - 0.5) * b
        + np.log(-np.expm1(-2 * slope * b) / (2 * slope))
        - math.log(-math.expm1(-b))
    )
    return _of_bounded_loss(log_moment, b, alpha)


@divergences.register
def _(pair: pairs.Laplace | pairs.FewLosses | pairs.Amplified, alpha: Array) -> Array:
    if isinstance(pair, pairs.Amplified) and isinstance(pair.pair, pairs.DiscreteGaussian):
        return _discrete_sampled(pair.pair, pair.rate, alpha)
    return _of_bounded_loss(_log_moments(pair, alpha) + 1e-12, pairs.largest_loss(pair), alpha)


def _log_moments(pair: Pair, alpha: Array) -> Array:
    """log E exp((alpha - 1) L) in the worse direction, from quadrature nodes."""
    try:
        losses, masses, _ = loss_nodes(pair, 0.0)
    except OverflowError:
        return np.full(len(alpha), math.inf)
    with np.errstate(divide="ignore"):
        logs = np.log(masses)
    moments = np.array([log_sum(logs + (a - 1) * losses) for a in alpha])
    if pairs.has_two_directions(pair):
        back = [log_sum(logs - a * losses) for a in alpha]
        moments = np.maximum(moments, back)
    return moments


def _of_bounded_loss(log_moment: Array, largest: float, alpha: Array) -> Array:
    """The Renyi divergence of a loss in [-e, e], with a margin for the round-off of tiny losses. It
    is at most alpha e^2 / 2 (Bun, Steinke 2016, Proposition 3.3) and at most e, even if moments
    overflow.
    """
    margin = 1e-15 * (8 + abs(math.log(largest)) + np.abs(log_moment))
    found = np.fmin((log_moment + margin) / (alpha - 1), alpha * largest**2 / 2)
    return np.minimum(found, largest) * (1 + 1e-14)


@divergences.register
def _(pair: pairs.DiscreteGaussian, alpha: Array) -> Array:
    # With S(c) = sum over x of exp(-(x - c)^2 / (2 s^2)), of period 1, the divergence is alpha m^2
    # / (2 s^2) + log(S(alpha m) / S(0)) / (alpha - 1) <= the first term (Canonne, Kamath, Steinke
    # 2020, Proposition 5). For s >= 2 the second term is below 1e-30.
    std, move = pair.std, pair.move
    whole = alpha * move**2 / (2 * std**2)
    if std >= 2:
        return np.asarray(whole)
    place = (alpha * move) % 1.0
    x = np.arange(-math.ceil(40 * std) - 1, math.ceil(40 * std) + 3)
    sums = special.logsumexp(-((x - place[:, None]) ** 2) / (2 * std**2), axis=1)
    at_zero = log_sum(-(x**2) / (2 * std**2))
    return np.asarray(whole + np.minimum(sums - at_zero + 1e-12, 0.0) / (alpha - 1))


def _discrete_sampled(pair: pairs.DiscreteGaussian, q: float, alpha: Array) -> Array:
    std, move = pair.std, pair.move
    found = np.full(len(alpha), math.inf)
    for i, order in enumerate(alpha.tolist()):
        reach = math.ceil(order * move + 40 * std)
        if order <= _LARGEST_SAMPLED_ORDER and reach <= _MOST_VALUES:
            x = np.arange(-reach, reach + 1, dtype=np.float64)
            with_record, without = (-((x - c) ** 2) / (2 * std**2) for c in (move, 0))
            norm = log_sum(without)
            mixed = np.logaddexp(math.log1p(-q) + without, math.log(q) + with_record)
            both = (
                log_sum(order * p - (order - 1) * r) - norm
                for p, r in ((mixed, without), (without, mixed))
            )
            found[i] = (max(*both, 0.0) + 1e-12) / (order - 1)
    once = divergences(pair, _WHOLE)
    return np.minimum(found, _of_curve_sampled(once, q, alpha))


@divergences.register
def _(pair: pairs.Concentrated, alpha: Array) -> Array:
    curve = pair.xi + pair.rho * alpha
    if pair.rate == 1:
        return curve
    return np.minimum(_of_curve_sampled(pair.xi + pair.rho * _WHOLE, pair.rate, alpha), curve)


_WHOLE = np.arange(2.0, _LARGEST_SAMPLED_ORDER + 1)


def _of_curve_sampled(once: Array, q: float, alpha: Array) -> Array:
    """The curve of a Poisson sample of a release, from its divergences ``once`` at the orders 2, 3,
    …: Zhu, Wang 2019, Theorem 5, at the next whole order.
    """
    found = np.full(len(alpha), math.inf)
    for i, order in enumerate(np.ceil(np.maximum(alpha, 2.0)).astype(int).tolist()):
        if order <= _LARGEST_SAMPLED_ORDER:
            j = np.arange(2, order + 1)
            terms = (
                _log_binomial(order)[2:]
                + j * math.log(q)
                + (order - j) * math.log1p(-q)
                + (j - 1) * once[: order - 1]
                + np.where(j > 2, math.log(3.0), 0.0)
            )
            first = (order - 1) * math.log1p(-q) + math.log1p((order - 1) * q)
            found[i] = (np.logaddexp(first, log_sum(terms)) + 1e-12) / (order - 1)
    return found


@divergences.register
def _(pair: pairs.GaussianMixture, alpha: Array) -> Array:
    # an upper bound: the curve of a release that also shows which Gaussian was drawn
    stay = math.log(max(1 - math.fsum(pair.chances), 1e-300))
    terms = [np.full(len(alpha), stay)]
    for move, chance in zip(pair.moves, pair.chances, strict=True):
        terms.append(math.log(chance) + alpha * (alpha - 1) * move**2 / 2)
    return np.asarray(np.maximum(special.logsumexp(terms, axis=0), 0.0) / (alpha - 1) + 1e-14)


@divergences.register
def _(pair: pairs.Mixed, alpha: Array) -> Array:
    terms = [np.log(weight) + (alpha - 1) * divergences(part, alpha) for weight, part in pair.parts]
    return np.asarray(np.maximum(special.logsumexp(terms, axis=0), 0.0) / (alpha - 1))


@divergences.register
def _(pair: pairs.Sampled, alpha: Array) -> Array:
    # for tiny losses the logarithm of a sum near 1 loses digits: also add an absolute margin
    found = np.array([_sampled(pair, order) for order in alpha.tolist()])
    return found * (1 + _MARGIN) + 2e-15 * (1 + alpha) / (alpha - 1)


def _sampled(pair: pairs.Sampled, order: float) -> float:
    q, z = pair.rate, pair.noise
    if pair.kind == "directed" and float(order).is_integer():
        return _binomial(q, z, int(order))
    if order > _LARGEST_QUADRATURE_ORDER:
        return math.inf
    start = 0.5 if pair.kind == "symmetric" else -12 * z
    # right of the centre the log ratio grows at most by x / z^2 per order, for the antipodal pair
    # by twice that
    end = (2 if pair.kind == "antipodal" else 1) * order + 12 * z
    edges = np.linspace(start, end, 2 + int((end - start) / (0.1 * z * min(1.0, 2 * z))))
    x, weight = pieces(edges, 5)
    base = np.log(weight) - x**2 / (2 * z**2) - math.log(z * math.sqrt(2 * math.pi))
    up = log_mixture(x, q, z)
    if pair.kind == "directed":
        # the direction of a removed record is worse (Mironov, Talwar, Zhang 2019, Theorem 5)
        terms = base + order * up
    elif pair.kind == "antipodal":
        terms = base + order * up - (order - 1) * log_mixture(-x, q, z)
    else:
        central = 1 - float(np.sum(np.exp(base) + np.exp(base + up)))
        middle = [math.log(max(central, 1e-300))]
        terms = np.concatenate([base + order * up, base - (order - 1) * up, middle])
        return max(log_sum(terms), 0.0) / (order - 1)
    return log_sum(terms) / (order - 1)


def _binomial(q: float, z: float, order: int) -> float:
    """Mironov, Talwar, Zhang 2019, section 3.3."""
    k = np.arange(order + 1)
    terms = (
        _log_binomial(order)
        + k * math.log(q)
        + (order - k) * math.log1p(-q)
        + k * (k - 1) / (2 * z**2)
    )
    return max(log_sum(terms), 0.0) / (order - 1)


@lru_cache(maxsize=512)
def _log_binomial(n: int) -> Array:
    """log of n choose k, k = 0, ..., n."""
    k = np.arange(n + 1)
    found = special.gammaln(n + 1) - special.gammaln(k + 1) - special.gammaln(n - k + 1)
    return np.asarray(found)


# --- of a composition -----------------------------------------------------------------------------


@lru_cache(maxsize=2**18)
def _divergence(pair: Pair, order: float) -> float:
    return float(divergences(pair, np.array([order], dtype=np.float64))[0])


@lru_cache(maxsize=4096)
def _curve(pair: Pair, orders: tuple[float, ...]) -> Array:
    return divergences(pair, np.array(orders, dtype=np.float64))


def curve(counts: Mapping[Pair, int], orders: Sequence[float] = ORDERS) -> Array:
    """The Renyi divergence of the composition, in the worse direction, at each order."""
    total = np.zeros(len(orders))
    for pair, count in pairs.grouped(pairs.merge(counts), _RATIO, upper=True).items():
        total = total + count * _curve(pair, tuple(orders))
    return np.where(np.isnan(total), math.inf, total)  # nan: overflow, so no bound


def allowed(epsilon: float, delta: float, orders: Sequence[float] = ORDERS) -> Array:
    """The largest divergence at each order that implies (epsilon, delta): Canonne, Kamath, Steinke
    2020, Proposition 12.
    """
    alpha = np.asarray(orders, dtype=np.float64)
    log_share = (math.log(delta) + np.log(alpha)) / (alpha - 1) - np.log1p(-1 / alpha)
    return np.asarray(epsilon + log_share)


def _epsilons(of_orders: Array, delta: float, orders: Sequence[float]) -> Array:
    return of_orders - allowed(0.0, delta, orders)


def _log_deltas(of_orders: Array, epsilon: float, orders: Sequence[float]) -> Array:
    alpha = np.asarray(orders, dtype=np.float64)
    found = (alpha - 1) * (of_orders - epsilon + np.log1p(-1 / alpha)) - np.log(alpha)
    return np.asarray(found)


def epsilon(of_orders: Array, delta: float, orders: Sequence[float] = ORDERS) -> float:
    """Epsilon at ``delta``, at the best order."""
    return max(0.0, float(np.min(_epsilons(of_orders, delta, orders))))


def best_order(of_orders: Array, delta: float, orders: Sequence[float] = ORDERS) -> int:
    """Index of the best order in :func:`epsilon`."""
    return int(np.argmin(_epsilons(of_orders, delta, orders)))


def delta(of_orders: Array, epsilon: float, orders: Sequence[float] = ORDERS) -> float:
    """Delta at ``epsilon``, by the same bound."""
    return math.exp(min(0.0, float(np.min(_log_deltas(of_orders, epsilon, orders)))))


def _least(
    counts: Mapping[Pair, int], at_orders: Callable[[Array, Sequence[float]], Array]
) -> float:
    """The smallest of the bounds ``at_orders(curve, orders)``. For many different releases it
    searches for the best order; for very many, similar releases are grouped first.
    """
    levels = pairs.merge(counts)
    if not pairs.EXACT_LEVELS < len(levels) <= _MOST_EXACT:
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
    """An upper bound on epsilon at ``delta``, for releases that were fixed in advance."""

    def bound(others: Mapping[Pair, int], left: float) -> float:
        return max(0.0, _least(others, lambda found, at: _epsilons(found, left, at)))

    return epsilon_of_all(counts, delta, bound)


def upper_delta(counts: Mapping[Pair, int], epsilon: float) -> float:
    """An upper bound on delta at ``epsilon``, likewise."""

    def bound(others: Mapping[Pair, int], largest: float) -> float:
        return math.exp(min(0.0, _least(others, lambda r, at: _log_deltas(r, largest, at))))

    return delta_of_all(counts, epsilon, bound)
