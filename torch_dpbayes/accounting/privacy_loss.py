"""The privacy loss of one pair, as quadrature nodes and as masses on a grid; bounds without a grid.

*Connect the dots* (Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022): a loss between two points of
the grid h*Z is split between them so that its masses under P and under Q stay the same. This is the
tightest profile above the true one with losses on the grid. The masses are Gauss-Legendre integrals
over pieces that do not cross grid points. All terms are positive, so their *relative* error is
small: on pieces of width w, at x standard deviations, about 5e-7 (wx)^6. The grid adds far more,
about (wx)^2 / 8.

*Bounded losses.* Basic composition adds the largest losses.

*Failures.* If some release fails with probability f, delta(epsilon) = f + (1 - f) *
(delta(epsilon) of the others).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from functools import partial, singledispatch
from typing import NamedTuple

import numpy as np
from scipy import special

from . import dominating_pairs as pairs
from .dominating_pairs import Array, Pair
from .events import SMALLEST_DELTA

BEYOND = "the privacy loss is beyond the range of floating-point numbers"

_LARGEST_LOSS = 1e4  # nodes are a twentieth apart, so larger losses would need too many
_LARGEST_EXPONENT = 700.0
_RULES = {degree: np.polynomial.legendre.leggauss(degree) for degree in (3, 5)}
_FAILURE_ERROR = 1e-14  # generous bound on the relative error of a failure probability

# --- quadrature -----------------------------------------------------------------------------------


def pieces(edges: Array, degree: int = 3) -> tuple[Array, Array]:
    """Gauss-Legendre nodes and weights on every interval between consecutive edges."""
    nodes, weights = _RULES[degree]
    half = np.diff(edges) / 2
    return ((edges[:-1] + half)[:, None] + half[:, None] * nodes).ravel(), (
        half[:, None] * weights
    ).ravel()


def _degree(width: float) -> int:
    """The degree for a normal density up to ``width`` standard deviations, on pieces of 0.1."""
    return 3 if width < 9 else 5


def _between(low: float, high: float, interval: float | Array) -> Array:
    """The multiples of ``interval`` (if it is an array, its elements) between two losses."""
    if isinstance(interval, float):
        first, last = math.ceil(low / interval), math.floor(high / interval)
        interval = interval * np.arange(first, last + 1, dtype=np.float64)
    return interval[(interval > low) & (interval < high)]


def _cut(
    edges: Array,
    interval: float | Array | None,
    loss_of: Callable[[Array], Array],
    place_of: Callable[[Array], Array],
) -> Array:
    """``edges``, and cuts at all multiples of ``interval`` (if an array: at its elements)."""
    if interval is None:
        return edges
    ends = edges[[0, -1]]
    low, high = loss_of(ends).tolist()
    cuts = place_of(_between(low, high, interval))
    return np.asarray(np.union1d(edges, np.clip(cuts, *ends)), dtype=np.float64)


def amplified_loss(losses: Array, q: float) -> Array:
    """log(1 - q + q exp(loss)), accurate where it is small and where the exponential overflows."""
    near = np.log1p(q * np.expm1(np.minimum(losses, 30.0)))
    if losses.max(initial=0.0) < 30.0:
        return near
    high = np.maximum(losses, 30.0)
    far = high + math.log(q) + np.log1p((1 - q) / q * np.exp(-high))
    return np.where(losses < 30.0, near, far)


def unsampled_loss(losses: Array, q: float) -> Array:
    """The inverse of :func:`amplified_loss`; very negative for losses of at most log(1 - q)."""
    low, high = np.minimum(losses, 30.0), np.maximum(losses, 30.0)
    far = high - math.log(q) + np.log1p((q - 1) * np.exp(-high))
    return np.where(losses < 30, np.log1p(np.maximum(np.expm1(low) / q, -1 + 1e-300)), far)


def log_mixture(x: Array, rate: float, noise: float) -> Array:
    """log(1 - q + q exp((2x - 1) / (2 z^2)))."""
    return amplified_loss((2 * x - 1) / (2 * noise**2), rate)


def _log_asinh_product(log_scale: float, loss: Array) -> Array:
    """asinh(exp(log_scale) * sinh(loss / 2)) without overflow, odd in loss."""
    half = np.abs(loss) / 2
    with np.errstate(divide="ignore"):
        log_product = log_scale + half + np.log(-np.expm1(-2 * half) / 2)
    magnitude = np.where(
        log_product > 300,
        log_product + math.log(2),
        np.arcsinh(np.exp(np.minimum(log_product, 300.0))),
    )
    return np.copysign(magnitude, loss)


def sampled_point(pair: pairs.Sampled, loss: Array) -> Array:
    """The x at which ``pair`` has the given loss."""
    q, z = pair.rate, pair.noise
    if pair.kind == "antipodal":
        log_scale = math.log((1 - q) / q) + 1 / (2 * z**2)
        return z**2 * (loss / 2 + _log_asinh_product(log_scale, loss))
    return 0.5 + z**2 * unsampled_loss(loss, q)


class Nodes(NamedTuple):
    """Losses of a pair with their masses under P. ``central``: further mass, at loss 0."""

    losses: Array
    masses: Array
    central: float = 0.0


@singledispatch
def loss_nodes(pair: Pair, tail: float, interval: float | Array | None = None) -> Nodes:
    """Quadrature nodes of the privacy loss of ``pair``. They leave out at most P-mass (and Q-mass)
    ``tail`` at either end. A new kind of pair with a privacy loss distribution registers its own
    function.

    No piece of the quadrature crosses a multiple of ``interval`` (if it is an array, one of its
    elements; only for sampled Gaussian and Laplace releases).
    """
    raise TypeError(f"{pair!r} has no privacy loss distribution.")


@loss_nodes.register
def _(pair: pairs.Pure, tail: float, interval: float | None = None) -> Nodes:
    e = pair.epsilon
    return Nodes(np.array([-e, e]), special.expit(np.array([-e, e])))


@loss_nodes.register
def _(pair: pairs.FewLosses, tail: float, interval: float | None = None) -> Nodes:
    return Nodes(np.array(pair.losses), np.array(pair.masses))


@loss_nodes.register
def _(pair: pairs.DiscreteGaussian, tail: float, interval: float | None = None) -> Nodes:
    std, move = pair.std, pair.move
    # the tails of a discrete Gaussian are, except for one value, below those of a Gaussian with the
    # same parameter
    reach = math.ceil(-float(special.ndtri(tail / 4)) * std) + 1
    x = np.arange(-reach, move + reach + 1, dtype=np.float64)
    normal = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * std**2)).sum()
    return Nodes(
        move * (2 * x - move) / (2 * std**2), np.exp(-((x - move) ** 2) / (2 * std**2)) / normal
    )


@loss_nodes.register
def _(pair: pairs.Amplified, tail: float, interval: float | None = None) -> Nodes:
    q, cuts = pair.rate, None
    if interval is not None and isinstance(pair.pair, pairs.Laplace):
        least = float(amplified_loss(np.array(-pairs.largest_loss(pair.pair)), q))
        cuts = unsampled_loss(_between(least, pairs.largest_loss(pair), interval), q)
    losses, masses, _ = loss_nodes(pair.pair, tail, cuts)
    if losses.min() < -_LARGEST_EXPONENT:
        raise OverflowError(BEYOND)
    return Nodes(amplified_loss(losses, q), masses * (q + (1 - q) * np.exp(-losses)))


@loss_nodes.register
def _(pair: pairs.BoundedRange, tail: float, interval: float | None = None) -> Nodes:
    b = pair.epsilon
    if b > _LARGEST_LOSS:
        raise OverflowError(BEYOND)
    # more nodes near the largest loss, which decides at large tilts
    fine = b - 2 * b * np.geomspace(1e-9, 1.0, 60)
    edges = np.union1d(np.linspace(-b, b, 2 + int(20 * b)), np.append(fine, b))
    loss, weight = pieces(_cut(edges, interval, np.asarray, np.asarray))
    return Nodes(loss, weight * np.exp((loss - b) / 2) / (2 * -math.expm1(-b)))


@loss_nodes.register
def _(pair: pairs.Gaussian, tail: float, interval: float | None = None) -> Nodes:
    width, mu = -float(special.ndtri(tail)), pair.mu
    edges = np.linspace(mu - width, mu + width, 2 + int(20 * width))
    edges = _cut(edges, interval, lambda x: mu * x - mu**2 / 2, lambda loss: loss / mu + mu / 2)
    x, weight = pieces(edges, _degree(width))
    return Nodes(mu * x - mu**2 / 2, weight * np.exp(-((x - mu) ** 2) / 2) / math.sqrt(2 * math.pi))


@loss_nodes.register
def sampled_nodes(
    pair: pairs.Sampled,
    tail: float,
    interval: float | Array | None = None,
    least: float = -math.inf,
    most: float = math.inf,
) -> Nodes:
    """:func:`loss_nodes`, only for losses from ``least`` to ``most``."""
    width = -float(special.ndtri(tail))
    q, z = pair.rate, pair.noise
    start, stop = (0.5 if pair.kind == "symmetric" else -z * width), 1 + z * width
    if least > -math.inf:
        start = max(start, float(sampled_point(pair, np.array([least]))[0]))
    if most < math.inf:
        stop = min(stop, float(sampled_point(pair, np.array([most]))[0]))
    start = min(start, stop)
    edges = np.linspace(start, stop, 2 + int((stop - start) / (0.1 * z * min(1.0, 2 * z))))
    edges = _cut(edges, interval, partial(_sampled_loss, pair), partial(sampled_point, pair))
    x, weight = pieces(edges, _degree(width))
    log_ratio = log_mixture(x, q, z)
    mass = weight * np.exp(log_ratio - x**2 / (2 * z**2)) / (z * math.sqrt(2 * math.pi))
    loss = log_ratio - log_mixture(-x, q, z) if pair.kind == "antipodal" else log_ratio
    if pair.kind != "symmetric":
        return Nodes(loss, mass)
    mirrored = mass * np.exp(-loss)
    central = max(0.0, 1.0 - float(mass.sum() + mirrored.sum()) - 2 * tail)
    return Nodes(np.concatenate([loss, -loss]), np.concatenate([mass, mirrored]), central)


def _sampled_loss(pair: pairs.Sampled, x: Array) -> Array:
    loss = log_mixture(x, pair.rate, pair.noise)
    return loss - log_mixture(-x, pair.rate, pair.noise) if pair.kind == "antipodal" else loss


@loss_nodes.register
def _(pair: pairs.Laplace, tail: float, interval: float | Array | None = None) -> Nodes:
    shift = 1 / pair.scale
    if shift > _LARGEST_LOSS:
        raise OverflowError(BEYOND)
    # more nodes near the ends, which decide Renyi divergences of high order
    fine = shift * np.geomspace(1e-9, 0.5, 150)
    edges = np.union1d(
        np.linspace(0.0, shift, 2 + int(20 * shift)), np.concatenate([fine, shift - fine])
    )
    # u: position between the two centres, in units of the noise scale
    edges = _cut(edges, interval, lambda u: 2 * u - shift, lambda loss: (shift + loss) / 2)
    u, weight = pieces(edges, 5)
    loss = 2 * u - shift
    return Nodes(
        np.concatenate([[-shift], loss, [shift]]),
        np.concatenate([[math.exp(-shift) / 2], weight * np.exp(loss - u) / 2, [0.5]]),
    )


@loss_nodes.register
def _(pair: pairs.GaussianMixture, tail: float, interval: float | None = None) -> Nodes:
    width = -float(special.ndtri(tail))
    low_end, high_end = -width, max(pair.moves) + width
    number = 2 + int(10 * (high_end - low_end) * max(1.0, max(pair.moves)))
    edges = np.linspace(low_end, high_end, number)

    def place_of(losses: Array) -> Array:
        left, right = np.full(len(losses), low_end), np.full(len(losses), high_end)
        for _ in range(28):  # the loss grows with x
            middle = (left + right) / 2
            is_below = _mixture_loss(pair, middle) < losses
            left, right = np.where(is_below, middle, left), np.where(is_below, right, middle)
        low, high = _mixture_loss(pair, left), _mixture_loss(pair, right)
        # a chord is off by a millionth of a millionth of what is left
        share = np.divide(losses - low, high - low, out=np.zeros(len(losses)), where=high > low)
        return left + np.clip(share, 0.0, 1.0) * (right - left)

    x, weight = pieces(_cut(edges, interval, partial(_mixture_loss, pair), place_of), 5)
    loss = _mixture_loss(pair, x)
    return Nodes(loss, weight * np.exp(loss - x**2 / 2) / math.sqrt(2 * math.pi))


def _mixture_loss(pair: pairs.GaussianMixture, x: Array) -> Array:
    exponents = [move * x - move**2 / 2 for move in pair.moves]
    near = np.maximum.reduce(exponents) < 30
    stay, total = max(1 - math.fsum(pair.chances), 0.0), np.zeros(len(x))
    for exponent, chance in zip(exponents, pair.chances, strict=True):
        total += chance * np.expm1(np.minimum(exponent, 30.0))
    near &= total > -0.5
    found = np.log1p(np.where(near, total, 0.0))
    if not near.all():
        logs = np.full(len(x), math.log(stay) if stay else -math.inf)
        for exponent, chance in zip(exponents, pair.chances, strict=True):
            logs = np.logaddexp(logs, math.log(chance) + exponent)
        found = np.where(near, found, logs)
    return found


@loss_nodes.register
def _(pair: pairs.Mixed, tail: float, interval: float | None = None) -> Nodes:
    found = [(weight, loss_nodes(part, tail, interval)) for weight, part in pair.parts]
    return Nodes(
        np.concatenate([nodes.losses for _, nodes in found]),
        np.concatenate([weight * nodes.masses for weight, nodes in found]),
        sum(weight * nodes.central for weight, nodes in found),
    )


# --- connect the dots -----------------------------------------------------------------------------


class Masses(NamedTuple):
    """Masses at ``interval * (first + arange(len(masses)))``, and the mass at +infinity."""

    first: int
    masses: Array
    infinity: float


def grid_masses(pair: Pair, interval: float, tail: float) -> tuple[Masses, Masses]:
    """``pair`` and its reverse on the grid ``interval * Z``; at each end mass ``tail`` moves up."""
    nodes = loss_nodes(pair, tail, interval)
    cell = np.floor(nodes.losses / interval)
    first = int(min(cell.min(), -1 if nodes.central else cell.min()))
    index = cell.astype(np.int64) - first
    upper = nodes.masses * (
        np.expm1(np.minimum(cell * interval - nodes.losses, 0.0)) / math.expm1(-interval)
    )
    upper = np.minimum(upper, nodes.masses)
    size = int(index.max()) + 2
    masses = np.zeros(size)
    masses += np.bincount(index, nodes.masses - upper, size)
    masses += np.bincount(index + 1, upper, size)
    if nodes.central:
        masses[-first] += nodes.central
    if not pairs.has_two_directions(pair):
        masses[1] += tail
        return (Masses(first, masses, tail),) * 2
    if -interval * first > _LARGEST_EXPONENT:
        raise OverflowError(BEYOND)
    # The nodes cover both distributions up to ``tail``, so their masses under the other one are
    # complete up to ``tail``.
    reverse = (masses * np.exp(-interval * (first + np.arange(size))))[::-1].copy()
    # the loss of mass beyond the lower end is at most that of the second grid point
    masses[1] += tail
    reverse[1] += tail
    return Masses(first, masses, tail), Masses(-(first + size - 1), reverse, tail)


# --- bounded losses -------------------------------------------------------------------------------


def sum_as_written(terms: Iterable[tuple[float, int]]) -> float:
    """Sum of count * value, rounded up. Values are read as decimals: three times 0.1 is 0.3."""
    total = sum((count * Fraction(repr(value)) for value, count in terms), Fraction(0))
    try:
        found = float(total)
    except OverflowError:
        return math.inf
    return found if Fraction(repr(found)) >= total else math.nextafter(found, math.inf)


def largest_sum(counts: Mapping[Pair, int]) -> float:
    """The largest possible privacy loss of all releases together."""
    terms = [(pairs.largest_loss(pair), count) for pair, count in counts.items() if count]
    if any(math.isinf(loss) for loss, _ in terms):
        return math.inf
    return sum_as_written(terms)


# --- releases that fail with some probability -----------------------------------------------------


def apart(counts: Mapping[Pair, int]) -> tuple[dict[pairs.Failure, int], dict[Pair, int]]:
    """The releases that fail with some probability, and the others."""
    failures = {p: count for p, count in counts.items() if count and isinstance(p, pairs.Failure)}
    return failures, {p: n for p, n in counts.items() if n and not isinstance(p, pairs.Failure)}


def failing(failures: Mapping[pairs.Failure, int], *, upper: bool = True) -> float:
    """The probability that one of the releases fails, rounded up; ``upper=False``: rounded down."""
    if sum(failures.values()) == 1:
        return next(iter(failures)).delta
    none = math.fsum(count * math.log1p(-failure.delta) for failure, count in failures.items())
    if not upper:
        return -math.expm1(none) * (1 - _FAILURE_ERROR)
    total = sum((n * Fraction(failure.delta) for failure, n in failures.items()), Fraction(0))
    together = float(total)
    if together < total:
        together = math.nextafter(together, math.inf)
    return min(-math.expm1(none) * (1 + _FAILURE_ERROR), together, 1.0)


def left_of(delta: float, failed: float) -> float:
    """The delta that failures of probability ``failed`` leave for other releases, rounded down."""
    return (delta - failed) / (1 - failed) * (1 - 1e-15)


def _split(counts: Mapping[Pair, int]) -> tuple[dict[Pair, int], dict[Pair, int]]:
    """Releases with a bounded loss, and the others."""
    bounded = {pair: count for pair, count in counts.items() if pairs.largest_loss(pair) < math.inf}
    return bounded, {pair: count for pair, count in counts.items() if pair not in bounded}


def epsilon_of_all(
    counts: Mapping[Pair, int], delta: float, bound: Callable[[Mapping[Pair, int], float], float]
) -> float:
    """An upper bound on epsilon at ``delta``. ``bound(others, left)`` is one for releases that do
    not fail. It is applied to all of these; or only to those with an unbounded loss, and then the
    largest loss of the others is added. The smaller result counts.
    """
    failures, others = apart(counts)
    failed = failing(failures)
    if failed > delta:
        return math.inf
    if not others:
        return 0.0
    left = left_of(delta, failed) if failed else delta
    if failed and left < SMALLEST_DELTA:
        return largest_sum(others)
    found = bound(others, left)
    bounded, rest = _split(others)
    if not bounded or (largest := largest_sum(bounded)) >= found:
        return found
    return min(found, math.nextafter(largest + bound(rest, left), math.inf)) if rest else largest


def delta_of_all(
    counts: Mapping[Pair, int], epsilon: float, bound: Callable[[Mapping[Pair, int], float], float]
) -> float:
    """An upper bound on delta at ``epsilon``, likewise."""
    failures, others = apart(counts)
    bounded, rest = _split(others)
    largest, beside = largest_sum(bounded), 0.0
    if rest or largest > epsilon:
        beside = bound(others, epsilon)
        if bounded and rest and largest < epsilon:
            beside = min(beside, bound(rest, math.nextafter(epsilon - largest, 0.0)))
    failed = failing(failures)
    if not failed or not beside:
        return failed or beside
    return min((failed + (1 - failed) * beside) * (1 + 1e-15), 1.0)


def without_delta(counts: Mapping[Pair, int], delta: float) -> str:
    """The reason for an infinite epsilon if failures use all of ``delta``; else an empty text."""
    failures, others = apart(counts)
    failed = failing(failures)
    if not failed or pairs.NonPrivate() in others:
        return ""
    if failed <= delta and (
        left_of(delta, failed) >= SMALLEST_DELTA or math.isfinite(largest_sum(others))
    ):
        return ""
    return (
        f"Releases that may fail (FailureDpEvent) use a delta of {failed:.4g} in total, so nothing"
        f" is left of delta = {delta:g}: epsilon is infinite. Use a larger delta, or charge smaller"
        " failures."
    )
