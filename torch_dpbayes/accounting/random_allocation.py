"""One epoch of random allocation ("balls and bins"): every record joins one of t batches,
independently of the other records.

Let Y_i = exp(x_i / z^2 - 1 / (2 z^2)) with x_i ~ N(0, z^2). The likelihood ratio of an epoch with a
record to one without it is the average W of t such values. A pair costs at least as much as another
one if its W is larger in convex order (equal means, and E f(W) larger for every convex f), because
both hockey-stick divergences are such expectations. Spreading a value between its neighbours on a
grid, with the same mean, makes W larger in this order; so does a sum of spread values. The
distribution of W is therefore computed by doubling, on grids that are even in log W. The result is
an upper bound. It is tight, because grids are coarser only where more values are averaged.

**Adaptive queries.** Let step j release f_j + [I = j] g_j + N(0, z^2), |g_j| <= 1, where f_j and
g_j follow from earlier outputs, and I is the record's batch. This equals f_j + X_j g_j and noise,
with X = (indicators of I) + N(0, z^2 1). The release is computed from X, step by step, so the pair
of X with and without a record dominates it for any other records. Under replace-one g_j becomes
g_j', |g_j'| <= 1. A hockey-stick divergence is the expectation of a convex function phi(p, q) of
two mixtures of exponentials of Gaussians, and phi_pq <= 0: it grows with the covariances of the
exponents within p and within q, and falls with those between p and q. All of them are extreme at
g_j' = -g_j; by induction from the last step to the first, this holds for any earlier outputs. The
pair of X and -X therefore dominates. Its divergence at exp(epsilon) is E (sum of f(x_i))_+ / t,
f(x) = Y(x) - exp(epsilon) Y(-x). The distribution of this sum of t independent values is computed
by FFT, at many epsilons. If the divergence is below round-off, another bound is used: at alpha *
beta the divergence is at most H_alpha(X || noise) + alpha * H_beta(noise || -X), and the least of
these is the profile of the sum of the two losses with matched quantiles. Between these epsilons,
profiles are convex in exp(epsilon). ``Allocated`` of kind "antipodal" is this bound.

A replaced record may cost more than with Poisson sampling, because it is in some batch for certain:
for two steps at z = 1 delta(0) is 0.520, and 0.471 with Poisson sampling.

The first pair is from Chua et al. 2024 (balls and bins) and Feldman, Shenfeld 2025, 2026.
"""

from __future__ import annotations

import math
from functools import lru_cache

import attr
import numpy as np
from scipy import fft, optimize, signal, special

from .dominating_pairs import WHERE_ZEROED, Allocated, Array, Gaussian, Pair, as_removed, pair_of
from .events import DpEvent, GaussianDpEvent, Parts, parts_of, positive_count, sampled_gaussian
from .privacy_loss import Nodes, loss_nodes, pieces
from .renyi import divergences

_EXCESS = 2e-4  # relative increase of the variance of W - 1 by the grids
_COARSEST = 0.01  # largest ratio of neighbouring values on a grid, minus 1
_MOST_VALUES = 2**13  # on a grid; with more than about a million steps this makes grids coarser
# For other noise the bound assumes that the record is in every batch. With less noise W overflows,
# and one Gaussian sum costs epsilon = 90.
_LEAST_NOISE, _LARGEST_NOISE = 0.1, 1e4
_LEAST_REPLACED = 1e-12  # smaller divergences of a replaced record are only bounded roughly
_NO_NODE = 1e-20  # share of the mean of Y that the nodes leave out
_LARGEST_EXPONENT = 600.0
_FEW_EPSILONS, _EPSILONS = 16, 250  # the first few decide the position of the others
_SHARES = 1.0, 0.4, 0.16, 0.06, 0.02, 0.007, 0.002  # tried shares of a value's largest size
_WINDOW = 2**15  # grid points of a sum
_MOMENTS = 256  # highest order of a computed moment
_UNSEEN = 1e-60  # probability of the values of W that negative moments leave out
_ROUND_OFF = 1e-12  # generous bound on the error of a moment


@attr.frozen
class RandomAllocationDpEvent(DpEvent):
    """One epoch of ``num_steps`` Gaussian sums ("balls and bins"): every record joins one batch,
    each with the same probability, independently of the other records.

    A started epoch counts as a whole. ``event`` has the smallest noise multiplier of the epoch. A
    step may depend on earlier outputs of the epoch.
    """

    num_steps: int
    event: DpEvent


WHERE_ZEROED[RandomAllocationDpEvent] = as_removed


@parts_of.register
def _(event: RandomAllocationDpEvent, count: int) -> Parts:
    gaussian = sampled_gaussian(event, "RandomAllocationDpEvent")
    steps = positive_count(event.num_steps, "num_steps")
    if steps > 1 and isinstance(gaussian, GaussianDpEvent):
        gaussian = RandomAllocationDpEvent(steps, gaussian)
    yield gaussian, count


@pair_of.register
def _(event: RandomAllocationDpEvent, replace: bool) -> Pair:
    noise = event.event.noise_multiplier
    if not _LEAST_NOISE <= noise <= _LARGEST_NOISE:
        return Gaussian((2.0 if replace else 1.0) / noise)
    return Allocated("antipodal" if replace else "directed", event.num_steps, noise)


# --- the distribution of W without the record -----------------------------------------------------


@attr.frozen
class _Law:
    """A distribution: ``masses`` of the values exp(interval * (first + arange(len(masses))))."""

    interval: float
    first: int
    masses: Array

    @property
    def logs(self) -> Array:
        return np.asarray(self.interval * (self.first + np.arange(len(self.masses))), dtype=float)

    def on(self, interval: float) -> _Law:
        """The same on another grid; each value is spread between its neighbours."""
        return self if interval == self.interval else _spread(self.logs, self.masses, interval)

    def trimmed(self, below: float, beyond: float) -> _Law:
        """Without the ends: the smallest values, of probability ``below``, move up. The largest
        values, with a share of ``beyond`` of the mean, move down.
        """
        masses = self.masses.copy()
        start = int(np.searchsorted(np.cumsum(masses), below))
        masses[start] += masses[:start].sum()
        shares = np.cumsum((masses * np.exp(self.logs))[::-1])[::-1]
        end = max(int(np.searchsorted(-shares, -beyond)), start + 2)
        if end < len(masses):
            masses[end - 1] += masses[end:].sum()
        return _Law(self.interval, self.first + start, masses[start:end])


def _spread(logs: Array, masses: Array, interval: float) -> _Law:
    cell = np.floor(logs / interval)
    first = int(cell.min())
    index = (cell - first).astype(np.int64)
    up = masses * np.clip(np.expm1(logs - cell * interval) / math.expm1(interval), 0.0, 1.0)
    size = int(index.max()) + 2
    total = np.bincount(index, masses - up, size) + np.bincount(index + 1, up, size)
    return _Law(interval, first, total.astype(np.float64))


def _sum(one: _Law, other: _Law) -> _Law:
    """The distribution of the sum of two independent values, on their common grid.

    If two values are d cells apart, their sum is log(1 + exp(-d h)) / h cells above the larger one.
    """
    h = one.interval
    low = min(one.first, other.first)
    size = max(one.first + len(one.masses), other.first + len(other.masses)) - low
    p, q = np.zeros(size), np.zeros(size)
    p[one.first - low :][: len(one.masses)] = one.masses
    q[other.first - low :][: len(other.masses)] = other.masses
    apart = h * np.arange(size)
    rise = np.log1p(np.exp(-apart))
    cells = np.floor(rise / h).astype(np.int64)
    share = np.clip(np.expm1(rise - cells * h) / math.expm1(h), 0.0, 1.0)
    start = int(cells[0])  # the least cell of a sum
    total = np.zeros(size + 2)
    near = int(np.searchsorted(-cells, 0))  # from this d on the sum is in the larger one's cell
    ends = [(law.first - low, law.first - low + len(law.masses)) for law in (one, other)]
    for larger, smaller, (a, b), (c, e), least in (
        (p, q, ends[0], ends[1], 0),
        (q, p, ends[1], ends[0], 1),
    ):
        for d in range(max(least, a - e + 1), min(near, b - c)):  # distances of values in range
            first, last = max(a, c + d), min(b, e + d)
            both = larger[first:last] * smaller[first - d : last - d]
            first, last = first + cells[d] - start, last + cells[d] - start
            total[first:last] += both * (1 - share[d])
            total[first + 1 : last + 1] += both * share[d]
    if near < size:
        for larger, smaller in ((p, q), (q, p)):
            kept = smaller[: size - near]
            number = np.cumsum(kept)
            # sum of kept * exp(-d h) by recursion, because exp(d h) may overflow
            moved = signal.lfilter([math.exp(-near * h) / math.expm1(h)], [1, -math.exp(-h)], kept)
            moved = np.minimum(moved, number)
            total[near - start : size - start] += larger[near:] * (number - moved)
            total[near + 1 - start : size + 1 - start] += larger[near:] * moved
    filled = np.flatnonzero(total)
    return _Law(h, low + start + int(filled[0]), total[filled[0] : filled[-1] + 1])


def _one_value(noise: float, interval: float, below: float, beyond: float) -> _Law:
    """The distribution of Y. ``below``: the probability of small values that move up. ``beyond``:
    the share of the mean in large values that are cut off.
    """
    s = 1 / noise
    low, high = float(special.ndtri(below)), s - float(special.ndtri(beyond))
    ends = s * low - s**2 / 2, s * high - s**2 / 2
    grid = interval * np.arange(math.ceil(ends[0] / interval), math.floor(ends[1] / interval) + 1)
    edges = np.union1d(
        np.linspace(low, high, 2 + int(10 * (high - low))),
        np.clip((grid + s**2 / 2) / s, low, high),
    )
    x, weight = pieces(edges, 5)
    masses = weight * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    masses[0] += below
    return _spread(s * x - s**2 / 2, masses, interval)


@lru_cache(maxsize=32)
def _average(steps: int, noise: float, below: float, beyond: float) -> tuple[Array, Array]:
    """log W and its probabilities without the record. ``below``: the probability of small W that
    may have moved up. ``beyond``: the share of the mean in large W that may be missing.
    """
    finest = math.sqrt(_EXCESS * math.expm1(noise**-2) / steps)

    def interval(number: int) -> float:
        return min(finest * (steps / number) ** (1 / 3), _COARSEST)

    # each value is trimmed once per level, at two places of the code
    levels = 2 * steps.bit_length() + 2
    below, beyond = below / (steps * levels), beyond / (steps * levels)
    block, number = _one_value(noise, interval(1), below, beyond), 1
    total: _Law | None = None
    done = 0
    while True:
        if steps & number:
            done += number
            if total is None:
                total = block
            else:
                total = _sum(total.on(block.interval), block).trimmed(below * done, beyond * done)
        if 2 * number > steps:
            break
        number *= 2
        block = _sum(block, block).trimmed(below * number, beyond * number)
        width = block.interval * len(block.masses)
        block = block.on(max(interval(number), width / _MOST_VALUES))
    assert total is not None
    return total.logs - math.log(steps), total.masses


def _power_of_ten(tail: float) -> float:
    """The largest power of ten of at most ``tail``, so that cached results fit other tails."""
    return max(10.0 ** math.floor(math.log10(tail)), 1e-290)


@loss_nodes.register
def _(pair: Allocated, tail: float, interval: float | None = None) -> Nodes:
    tail = _power_of_ten(tail)
    if pair.kind == "directed":
        losses, masses = _average(pair.steps, pair.noise, tail, tail)
        return Nodes(losses, masses * np.exp(losses))
    return _read_off(_matched(pair, tail), *_replaced(pair.steps, pair.noise))


def _matched(pair: Allocated, tail: float) -> Nodes:
    """The sum of the two losses with matched quantiles."""
    # if one loss is large, errors in the other one's probability are multiplied by its exponential
    s = 1 / pair.noise
    largest = s**2 / 2 - s * float(special.ndtri(tail / (2 * pair.steps)))
    below = _power_of_ten(max(tail * math.exp(-min(largest, 600.0)), 1e-290))
    losses, masses = _average(pair.steps, pair.noise, below, tail)
    upper, lower = np.cumsum(masses[::-1]), np.cumsum(masses)
    ends = np.union1d(upper[upper < 0.5], lower[lower < 0.5])
    starts = np.concatenate([[0.0], ends])
    width = np.diff(np.append(starts, 0.5))
    top = losses[::-1][np.searchsorted(upper, starts, "right")]
    bottom = losses[np.searchsorted(lower, starts, "right")]
    return Nodes(
        np.concatenate([top - bottom, bottom - top]),
        np.concatenate([width * np.exp(top), width * np.exp(bottom)]),
    )


# --- a replaced record ----------------------------------------------------------------------------


@lru_cache(maxsize=32)
def _replaced(steps: int, noise: float) -> tuple[Array, Array]:
    """Epsilons, and a bound on the hockey-stick divergence at each epsilon."""
    rough = _matched(Allocated("antipodal", steps, noise), _LEAST_REPLACED)
    order = np.argsort(rough.losses)
    shares = np.cumsum(rough.masses[order][::-1])[::-1]
    largest = float(rough.losses[order][int(np.searchsorted(-shares, -_LEAST_REPLACED))])
    few = np.linspace(0.0, min(max(largest, 1e-9), _LARGEST_EXPONENT), _FEW_EPSILONS)
    found = [
        min((_of_replaced(steps, noise, epsilon, share), share) for share in _SHARES)
        for epsilon in few.tolist()
    ]
    bounds, share = (np.array(column) for column in zip(*found, strict=True))
    # relative to delta, a chord's excess is about (step * (1/2 - slope of log delta))^2 / 8: place
    # the points evenly in epsilon / 2 - log(delta)
    bounds = np.minimum(bounds, np.maximum(_profile(rough, few), _NO_NODE))
    place = np.maximum.accumulate(few / 2 - np.log(bounds))
    epsilons = np.interp(np.linspace(place[0], place[-1], _EPSILONS), place, few)
    epsilons = np.unique(np.concatenate([few, epsilons]))
    near = np.searchsorted(few, epsilons)
    deltas = [
        _of_replaced(steps, noise, epsilon, share[i])
        for epsilon, i in zip(epsilons.tolist(), near.tolist(), strict=True)
    ]
    return epsilons, np.array(deltas)


def _of_replaced(steps: int, noise: float, epsilon: float, share: float) -> float:
    """E (sum of f)_+ / t for f = Y(x) - exp(epsilon) Y(-x) of each step.

    Values below -M count as -M. A value f above M is bounded apart from the others, with their sum
    R, by f + R + (M + R)_-. This holds for any M: ``share`` is its ratio to an M that hardly any
    value exceeds. For few steps with little noise a smaller M is tighter at large epsilons: values
    near 0 decide there, and the grid is finer. Values between -M and M are spread on a grid with
    the same mean, so no convex function of the sum has a smaller expectation. The quadrature's
    pieces end at grid points, because it is exact only for integrands without a kink. The sum's
    distribution is computed by FFT of tilted masses. Mass above the window is bounded by Chernoff;
    mass that leaves it below only increases the bound.
    """
    s = 1 / noise
    end = s - float(special.ndtri(_NO_NODE))
    edges = np.linspace(-end, end, 2 + int(10 * end * max(1.0, s)))

    def nodes(edges: Array) -> tuple[Array, Array]:
        u, weight = pieces(edges, 5)
        mass = weight * np.exp(-(u**2) / 2) / math.sqrt(2 * math.pi)
        mass[0] += float(special.ndtr(-end))
        # in units of exp(epsilon), to avoid overflow
        return np.exp(s * u - s**2 / 2 - epsilon) - np.exp(-s * u - s**2 / 2), mass

    f, mass = nodes(edges)
    largest = math.inf
    for _ in range(4):
        kept = np.clip(f, -largest, largest)
        mean = float(mass @ kept)
        spread = math.sqrt(steps * float(mass @ (kept - mean) ** 2))
        largest = 2 * steps * abs(mean) + 20 * spread
    largest *= share
    size, reach = _WINDOW, 3 * largest
    h = 2 * reach / size
    cuts = np.append(h * np.arange(-(size // 6), size // 6 + 1), [-largest, largest])
    places_of_cuts = (epsilon / 2 + np.arcsinh(cuts * math.exp((s**2 + epsilon) / 2) / 2)) / s
    f, mass = nodes(np.sort(np.append(edges, np.clip(places_of_cuts, -end, end)), kind="stable"))
    rest = (steps - 1) * float(mass @ np.maximum(f, -largest))
    kept = np.clip(f, -largest, largest)
    mean = float(mass @ kept)
    distance = largest + (steps - 1) * mean
    variance = (steps - 1) * float(mass @ (kept - mean) ** 2)
    below = (math.hypot(math.sqrt(variance), distance) - distance) / 2  # E (M + R)_- at most
    over = f > largest
    alone = float(mass[over] @ f[over]) + float(mass[over].sum()) * (rest + below)
    # the sum of values that are not above M
    cell = np.floor(kept[~over] / h)
    up = mass[~over] * np.clip(kept[~over] / h - cell, 0.0, 1.0)
    first = int(cell.min())
    index = (cell - first).astype(np.int64)
    number = int(index.max()) + 2
    masses = np.bincount(index, mass[~over] - up, number) + np.bincount(index + 1, up, number)
    filled = np.flatnonzero(masses)
    places, logs = first + filled, np.log(masses[filled])
    values = np.asarray(h * places, dtype=np.float64)

    # a coarser grid suffices to find the best tilt
    starts = np.arange(0, len(filled), 16)
    sums = np.add.reduceat(masses[filled], starts)
    coarse = np.add.reduceat(masses[filled] * values, starts) / sums, np.log(sums)

    def log_moment(theta: float, values: Array = values, logs: Array = logs) -> float:
        exponent = theta * values + logs
        peak = float(exponent.max())
        return peak + math.log(float(np.exp(exponent - peak).sum()))

    search = optimize.minimize_scalar(
        lambda theta: log_moment(theta, *coarse),
        bounds=(0.0, 60.0 / largest),
        method="bounded",
        options={"xatol": 0.1 / reach},
    )
    theta = float(search.x)
    scale = log_moment(theta)
    placed = np.zeros(size)
    placed[places % size] = np.exp(theta * values + logs - scale)
    spectrum = fft.rfft(placed)
    power = np.ones_like(spectrum)
    for bit in bin(steps)[2:]:
        power = power * power * spectrum if bit == "1" else power * power
    total = fft.irfft(power, size)[1 : size // 2]
    eps = float(np.finfo(float).eps)
    magnitude = float(np.mean(np.abs(spectrum) ** (steps - 1))) + 1 / size
    error = 8 * eps * math.log2(size) * (steps + 1) * magnitude
    sums = h * np.arange(1, size // 2)
    exponent = np.minimum(steps * scale - theta * sums, _LARGEST_EXPONENT)
    inside = float(np.sum((np.maximum(total, 0.0) + error) * np.exp(exponent) * sums))
    # s <= reach exp(theta (s - reach)) for s >= reach, if theta is at least 1 / reach
    tilts = (theta + np.geomspace(1.0, 300.0, 12) / reach).tolist()
    tilt = min(tilts, key=lambda tilt: steps * log_moment(tilt, *coarse) - tilt * reach)
    beyond = steps * log_moment(tilt) - tilt * reach
    outside = reach * math.exp(min(beyond, 0.0))
    bound = (inside + outside) * (1 + 1e-9) / steps + alone * (1 + 1e-9)
    # back to the original units, and add the values of x that the nodes leave out
    return min(math.exp(epsilon) * bound + _NO_NODE * (1 + steps), 1.0)


def _read_off(nodes: Nodes, epsilons: Array, deltas: Array) -> Nodes:
    """Losses with a profile below two others: that of ``nodes``, and ``deltas`` at ``epsilons``. It
    is the greatest function below both that is convex in exp(epsilon).
    """
    largest = float(nodes.losses.max())
    if largest > _LARGEST_EXPONENT:
        return nodes
    ends = np.linspace(epsilons[-1], max(largest, epsilons[-1] * (1 + 1e-9)), 300)
    at = np.concatenate([epsilons, ends[1:]])
    found = _profile(nodes, at)
    found[: len(deltas)] = np.minimum(found[: len(deltas)], deltas)
    kept = _lower_hull(np.exp(at), found)
    ratio, delta = np.exp(at[kept]), found[kept]
    slopes = np.append(np.diff(delta) / np.diff(ratio), 0.0)
    without = np.maximum(np.diff(slopes), 0.0)  # masses under Q at each loss above 0
    middle = max(1 + 2 * float(slopes[0]) - float(delta[0]), 0.0)
    loss = at[kept][1:]
    return Nodes(
        np.concatenate([-loss[::-1], [0.0], loss]),
        np.concatenate([without[::-1], [middle], without * ratio[1:]]),
    )


def _profile(nodes: Nodes, epsilons: Array) -> Array:
    order = np.argsort(nodes.losses)
    losses, masses = nodes.losses[order], nodes.masses[order]
    above = np.cumsum(masses[::-1])[::-1]
    # exp(-loss) does not overflow for large losses
    other = np.cumsum((masses * np.exp(-losses))[::-1])[::-1]
    place = np.minimum(np.searchsorted(losses, epsilons), len(losses) - 1)
    found = np.maximum(above[place] - np.exp(epsilons) * other[place], 0.0)
    found[epsilons >= losses[-1]] = 0.0
    return np.asarray(found)


def _lower_hull(x: Array, y: Array) -> list[int]:
    kept: list[int] = []
    for i in range(len(x)):
        while len(kept) > 1:
            a, b = kept[-2], kept[-1]
            if (y[b] - y[a]) * (x[i] - x[a]) < (y[i] - y[a]) * (x[b] - x[a]):
                break
            kept.pop()
        kept.append(i)
    return kept


# --- Renyi curves ---------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _log_moments(steps: int, noise: float) -> Array:
    """log E W^k without the record, k = 0, 1, ...: E W^k is k! / t^k times the k-th coefficient of
    (sum of E Y^k x^k / k!)^t.
    """
    k = np.arange(_MOMENTS + 1)
    factorial = special.gammaln(k + 1)
    power = k * (k - 1) / (2 * noise**2) - factorial
    total = np.where(k == 0, 0.0, -np.inf)
    for bit in bin(steps)[2:]:
        total = _log_product(total, total)
        if bit == "1":
            total = _log_product(total, power)
    return np.asarray(total + factorial - k * math.log(steps))


def _log_product(a: Array, b: Array) -> Array:
    """The product of two series, given logarithms of their coefficients."""
    return np.array([special.logsumexp(a[: n + 1] + b[n::-1]) for n in range(len(a))])


def _with_record(pair: Allocated, alpha: Array) -> Array:
    """D_alpha of an epoch with the record from one without it, by log-convexity of moments."""
    found = alpha / (2 * pair.noise**2)
    small = alpha <= _MOMENTS
    moments = np.interp(alpha, np.arange(_MOMENTS + 1), _log_moments(pair.steps, pair.noise))
    bound = (np.maximum(moments, 0.0) + _ROUND_OFF * alpha) / (alpha - 1)
    return np.where(small, np.minimum(found, bound), found)


def _without_record(pair: Allocated, alpha: Array) -> Array:
    """D_alpha of an epoch without the record from one with it."""
    s2, order = pair.noise**-2, alpha - 1
    losses, masses = _average(pair.steps, pair.noise, _UNSEEN, _UNSEEN)
    seen = special.logsumexp(np.log(masses) - order[:, None] * losses, axis=1)
    # by the inequality of Cauchy and Schwarz, and because W >= the geometric mean of the Y
    unseen = math.log(_UNSEEN) / 2 + (2 * order**2 / pair.steps + order) * s2 / 2
    bound = (np.maximum(np.logaddexp(seen, unseen), 0.0) + _ROUND_OFF * alpha) / order
    return np.minimum(alpha * s2 / 2, bound)


@divergences.register
def _(pair: Allocated, alpha: Array) -> Array:
    if pair.kind == "directed":
        return np.maximum(_with_record(pair, alpha), _without_record(pair, alpha))
    # Mironov 2017, Proposition 11, with pure noise as the distribution in between
    sum_of_both = (alpha - 0.5) / (alpha - 1) * _with_record(pair, 2 * alpha)
    sum_of_both = sum_of_both + _without_record(pair, 2 * alpha - 1)
    return np.asarray(np.minimum(sum_of_both, 2 * alpha / pair.noise**2))
