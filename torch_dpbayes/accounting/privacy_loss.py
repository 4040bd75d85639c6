"""Privacy loss distributions: from releases to one (epsilon, delta).

A release is represented by a pair (P, Q) that dominates it: for every neighbouring pair of data
sets and every epsilon the hockey-stick divergence H(P || Q) = sup_S P(S) - e^epsilon Q(S) is at
least that of the release. Compositions are dominated by the product of the pairs (Zhu, Dong, Wang
2022, Theorem 10), so that with the privacy loss L = log dP/dQ under P, summed over the releases,

    delta(epsilon) = E[(1 - e^(epsilon - L))_+].

How it is computed, and why the result is an upper bound:

1. *Discretisation* (Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022, "connect the dots"): loss l
   between two points of the grid h*Z is split between them so that its mass under P and under Q is
   kept. That is the tightest privacy profile above the true one with losses on the grid. The masses
   are Gauss-Legendre integrals over pieces cut at the grid, sums of positive terms, so that their
   *relative* error is of the order of 1e-13 even in the tails.
2. *Composition* by one pass of FFTs over the distribution tilted by e^(theta L). The tilt moves the
   losses that decide delta to the centre, where round-off is small relative to them; round-off,
   loss beyond the window and truncated tails are bounded and added to delta. Mass that wraps around
   only adds to delta.
3. *Many levels*: lowering a noise multiplier or raising a sampling rate only weakens privacy, so
   close levels are merged at their least private member.

Releases that fail outright with some probability are left out of 1 to 3: with f the probability
that one of them fails, delta(epsilon) = f + (1 - f) * (delta(epsilon) of the others).

The lower bound rounds multipliers the other way, leaves out the mass at infinity, and pays for the
discretisation by Hoeffding's inequality: given L, each step's rounding is independent, spans one
grid cell, and has mean in [0, h^2/8].
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import fft, optimize, signal, special

from .choices import Neighboring, NeighboringRelation, neighboring_relation
from .events import (
    BoundedRangeDpEvent,
    DpEvent,
    FailureDpEvent,
    GaussianDpEvent,
    MuGaussianDpEvent,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    PureDpEvent,
    RecordwiseBatchGaussianDpEvent,
    SampledWithoutReplacementDpEvent,
    ShuffledEpochDpEvent,
    UnspecifiedBatchGaussianDpEvent,
    ZCDpEvent,
)

Array = NDArray[np.float64]


# --- pairs ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gaussian:
    """(N(mu, 1), N(0, 1))."""

    mu: float


@dataclass(frozen=True, slots=True)
class Sampled:
    """A Gaussian sum of sensitivity 1 and standard deviation ``noise``, taken with probability
    ``rate``.

    kind "directed": ((1-q) N(0, z^2) + q N(1, z^2), N(0, z^2)) for a removed record, the reverse
    for an added one. kind "antipodal": ((1-q) N(0, z^2) + q N(1, z^2), (1-q) N(0, z^2) + q N(-1,
    z^2)), which is its own reverse. kind "symmetric": the pair whose profile for epsilon >= 0 is
    that of "directed" and which is its own reverse.
    """

    kind: Literal["directed", "antipodal", "symmetric"]
    rate: float
    noise: float


@dataclass(frozen=True, slots=True)
class Pure:
    """Randomised response with parameter ``epsilon``: dominates every epsilon-differentially
    private release.
    """

    epsilon: float


@dataclass(frozen=True, slots=True)
class BoundedRange:
    """The profile (1 - e^(-(b-g)/2))^2 / (1 - e^(-b)), -b <= g <= b (Dong, Durfee, Rogers
    2020), b = ``epsilon``.
    """

    epsilon: float


@dataclass(frozen=True, slots=True)
class Concentrated:
    """(xi, rho)-zCDP: known by its Renyi curve only."""

    rho: float
    xi: float


@dataclass(frozen=True, slots=True)
class Failure:
    """Loss +infinity with probability ``delta``, else 0; its own reverse."""

    delta: float


@dataclass(frozen=True, slots=True)
class NonPrivate:
    """No guarantee at all."""


Pair = Gaussian | Sampled | Pure | BoundedRange | Concentrated | Failure | NonPrivate

# Below this noise / sensitivity sampling is ignored (an upper bound): one step alone then costs
# epsilon > 1000.
_LEAST_NOISE = 0.02
_LEAST_RATE = 1e-30  # smaller ones are rounded up to it, for their inverses to be floats


def _sampled(
    kind: Literal["directed", "antipodal", "symmetric"], rate: float, noise: float
) -> Pair:
    if rate == 1.0 or noise < _LEAST_NOISE:
        return Gaussian((2.0 if kind == "antipodal" else 1.0) / noise)
    return Sampled(kind, max(rate, _LEAST_RATE), noise)


def dominating_pair(event: DpEvent, neighboring: Neighboring | NeighboringRelation) -> Pair:
    """The pair that dominates one elementary event: the only place where noise / clip bound meets a
    sensitivity.

    Raises:
        ValueError: the event gives no guarantee under this neighbouring relation.
    """
    replace = neighboring_relation(neighboring) == "replace_one"
    if isinstance(event, GaussianDpEvent):
        return Gaussian((2.0 if replace else 1.0) / event.noise_multiplier)
    if isinstance(event, PoissonSampledDpEvent):
        rate, noise = event.sampling_probability, event.event.noise_multiplier
        return _sampled("antipodal" if replace else "directed", rate, noise)
    if isinstance(event, SampledWithoutReplacementDpEvent):
        # A batch of fixed size swaps one member for another under either relation: sensitivity 2C.
        rate = event.sample_size / event.source_dataset_size
        return _sampled("symmetric", rate, event.event.noise_multiplier / 2)
    if isinstance(event, UnspecifiedBatchGaussianDpEvent | RecordwiseBatchGaussianDpEvent):
        if not replace and isinstance(event, UnspecifiedBatchGaussianDpEvent):
            raise ValueError(
                "an unspecified batch may change altogether when one record is added: use"
                ' PrivacyAccountant(neighboring="replace_one") or PrivacyEngine.make_private, or'
                " charge RecordwiseBatchGaussianDpEvent if who is in a batch does not depend on"
                " other records."
            )
        return Gaussian(2.0 / event.noise_multiplier)
    if isinstance(event, ShuffledEpochDpEvent):
        if not replace:
            raise ValueError(
                "a shuffled loader gives no per-record guarantee under add_or_remove_one: an added"
                " record displaces others from their batches, so every batch of the epoch may"
                " change: use PrivacyAccountant(neighboring='replace_one'), or Poisson sampling"
                " (PrivacyEngine.make_private)."
            )
        return Gaussian(2.0 / event.noise_multiplier)
    if isinstance(event, MuGaussianDpEvent):
        return Gaussian(event.mu)
    if isinstance(event, PureDpEvent):
        return Pure(event.epsilon)
    if isinstance(event, BoundedRangeDpEvent):
        return BoundedRange(event.epsilon)
    if isinstance(event, ZCDpEvent):
        return Concentrated(event.rho, event.xi)
    if isinstance(event, FailureDpEvent):
        return Failure(event.delta)
    if isinstance(event, NonPrivateDpEvent):
        return NonPrivate()
    raise TypeError(f"{event!r} is not an elementary event.")


# --- one pair as quadrature nodes -----------------------------------------------------------------

_RULES = {degree: np.polynomial.legendre.leggauss(degree) for degree in (3, 5)}


def pieces(edges: Array, degree: int = 3) -> tuple[Array, Array]:
    """Gauss-Legendre nodes and weights on every interval between consecutive edges."""
    nodes, weights = _RULES[degree]
    half = np.diff(edges) / 2
    return ((edges[:-1] + half)[:, None] + half[:, None] * nodes).ravel(), (
        half[:, None] * weights
    ).ravel()


def log_mixture(x: Array, rate: float, noise: float) -> Array:
    """log(1 - q + q exp((2x - 1) / (2 z^2))), accurate where it is small and where the
    exponential overflows.
    """
    exponent = (2 * x - 1) / (2 * noise**2)
    low = np.minimum(exponent, 30.0)
    high = np.maximum(exponent, 30.0)
    return np.where(
        exponent < 30.0,
        np.log1p(rate * np.expm1(low)),
        high + math.log(rate) + np.log1p((1 - rate) / rate * np.exp(-high)),
    )


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


def _sampled_point(pair: Sampled, loss: Array) -> Array:
    """The x at which ``pair`` has the given loss."""
    q, z = pair.rate, pair.noise
    if pair.kind == "antipodal":
        log_scale = math.log((1 - q) / q) + 1 / (2 * z**2)
        return z**2 * (loss / 2 + _log_asinh_product(log_scale, loss))
    low = np.minimum(loss, 30.0)
    ratio = np.where(
        loss < 30.0, np.log1p(np.maximum(np.expm1(low) / q, -1 + 1e-300)), loss - math.log(q)
    )
    return 0.5 + z**2 * ratio


class Nodes(NamedTuple):
    """Losses of a pair with their masses under P. ``central`` is mass at loss 0 that the
    nodes leave out.
    """

    losses: Array
    masses: Array
    central: float = 0.0


def loss_nodes(pair: Pair, tail: float, interval: float | None = None) -> Nodes:
    """Quadrature nodes of the privacy loss of ``pair``, all but P-mass (and Q-mass) ``tail`` at
    either end.

    Args:
        pair: a pair that has a loss distribution.
        tail: mass that may be left out at the upper end, and as much at the lower end.
        interval: if given, no piece of the quadrature crosses a multiple of it.
    """
    width = -float(special.ndtri(tail))
    if isinstance(pair, Pure):
        e = pair.epsilon
        return Nodes(np.array([-e, e]), special.expit(np.array([-e, e])))
    if isinstance(pair, BoundedRange):
        b = pair.epsilon
        # towards the largest loss, which large tilts single out
        fine = b - 2 * b * np.geomspace(1e-9, 1.0, 60)
        edges = np.union1d(np.linspace(-b, b, 2 + int(20 * b)), np.append(fine, b))
        if interval is not None:
            edges = np.union1d(edges, np.clip(interval * _grid(-b, b, interval), -b, b))
        loss, weight = pieces(edges)
        return Nodes(loss, weight * np.exp((loss - b) / 2) / (2 * -math.expm1(-b)))
    if isinstance(pair, Gaussian):
        mu = pair.mu
        ends = mu - width, mu + width
        edges = np.linspace(*ends, 2 + int(20 * width))
        if interval is not None:
            grid = interval * _grid(mu * ends[0] - mu**2 / 2, mu * ends[1] - mu**2 / 2, interval)
            edges = np.union1d(edges, np.clip(grid / mu + mu / 2, *ends))
        x, weight = pieces(edges)
        return Nodes(
            mu * x - mu**2 / 2, weight * np.exp(-((x - mu) ** 2) / 2) / math.sqrt(2 * math.pi)
        )
    if not isinstance(pair, Sampled):
        raise TypeError(f"{pair!r} has no privacy loss distribution.")
    q, z = pair.rate, pair.noise
    ends = (0.5 if pair.kind == "symmetric" else -z * width), 1 + z * width
    edges = np.linspace(*ends, 2 + int((ends[1] - ends[0]) / (0.1 * z * min(1.0, 2 * z))))
    if interval is not None:
        low, high = (_sampled_loss(pair, np.array([end]))[0] for end in ends)
        grid = interval * _grid(low, high, interval)
        grid = grid[(grid > low) & (grid < high)]
        edges = np.union1d(edges, np.clip(_sampled_point(pair, grid), *ends))
    x, weight = pieces(edges)
    log_ratio = log_mixture(x, q, z)
    mass = weight * np.exp(log_ratio - x**2 / (2 * z**2)) / (z * math.sqrt(2 * math.pi))
    loss = log_ratio - log_mixture(-x, q, z) if pair.kind == "antipodal" else log_ratio
    if pair.kind != "symmetric":
        return Nodes(loss, mass)
    mirrored = mass * np.exp(-loss)
    central = max(0.0, 1.0 - float(mass.sum() + mirrored.sum()) - 2 * tail)
    return Nodes(np.concatenate([loss, -loss]), np.concatenate([mass, mirrored]), central)


def _sampled_loss(pair: Sampled, x: Array) -> Array:
    loss = log_mixture(x, pair.rate, pair.noise)
    return loss - log_mixture(-x, pair.rate, pair.noise) if pair.kind == "antipodal" else loss


def _grid(low: float, high: float, interval: float) -> Array:
    return np.arange(math.ceil(low / interval), math.floor(high / interval) + 1, dtype=np.float64)


# --- one pair on the grid -------------------------------------------------------------------------


class Masses(NamedTuple):
    """Masses at the losses ``interval * (first + arange(len(masses)))``; the rest,
    ``infinity``, is at +infinity.
    """

    first: int
    masses: Array
    infinity: float


def _has_two_directions(pair: Pair) -> bool:
    """Every other pair is its own reverse."""
    return isinstance(pair, Sampled) and pair.kind == "directed"


def grid_masses(pair: Pair, interval: float, tail: float) -> tuple[Masses, Masses]:
    """Connect the dots: ``pair`` and its reverse on the grid ``interval * Z``.

    Args:
        interval: the discretisation interval.
        tail: mass of each end that may be moved upwards: to infinity, or to the lowest grid points.
    """
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
    if not _has_two_directions(pair):
        masses[1] += tail
        return (Masses(first, masses, tail),) * 2
    if -interval * first > 700:
        raise OverflowError(_BEYOND)
    # The nodes cover the bulk of both distributions, so their masses under the other one are all
    # there is but ``tail``.
    reverse = (masses * np.exp(-interval * (first + np.arange(size))))[::-1].copy()
    # The loss of what lies beyond the lower end is at most the second grid point's.
    masses[1] += tail
    reverse[1] += tail
    return Masses(first, masses, tail), Masses(-(first + size - 1), reverse, tail)


# --- composition ----------------------------------------------------------------------------------

_TILTS = np.geomspace(1e-4, 1e6, 104)
_WINDOW_TILTS = np.array([0.5, 1.0, 2.0, 3.0, 4.5, 6.0, 8.0])
_OUTSIDE = 1e-9  # tilted mass that the window may miss
_LARGEST_WINDOW = 2**22
# at a wider window, if the first was too narrow; after that the bound holds, but is loose
_ATTEMPTS = 4
_BEYOND = "the privacy loss is beyond the range of floating-point numbers"
_STEP_ERROR = 1e-12  # relative error of one level's masses and of one multiplication of spectra
_ACCURACY = 1e-4  # relative excess of epsilon that the discretisation aims at
_LARGEST_PLAN = 48  # levels that the choice of tilt and window looks at


def _cumulants(nodes: list[tuple[Array, Array, int]], tilts: Array) -> tuple[Array, Array, Array]:
    """K(theta) = sum of count * log E exp(theta L), with K' and K''."""
    total = np.zeros((3, len(tilts)))
    for losses, log_masses, count in nodes:
        exponent = tilts[:, None] * losses + log_masses
        peak = exponent.max(axis=1)
        weight = np.exp(exponent - peak[:, None])
        norm = weight.sum(axis=1)
        mean = weight @ losses / norm
        variance = np.maximum(weight @ losses**2 / norm - mean**2, 0.0)
        total += count * np.stack([peak + np.log(norm), mean, variance])
    return total[0], total[1], total[2]


class _Plan(NamedTuple):
    """Grid, tilt and window for one direction. How tight the result is depends on it, not
    whether it is a bound.
    """

    interval: float
    tilt: float
    lower_tilt: float
    upper_tilt: float
    lower: float
    upper: float


def _plan(
    levels: Mapping[Pair, int],
    reverse: bool,
    tail: float,
    *,
    log_delta: float,
    epsilon: float | None = None,
    accuracy: float = _ACCURACY,
    interval: float | None = None,
) -> _Plan:
    pairs = sorted(levels.items(), key=_level_order)
    total = sum(levels.values())
    nodes = []
    widest = 0.0
    for chunk in np.array_split(np.arange(len(pairs)), min(_LARGEST_PLAN, len(pairs))):
        # The least noise stands for all: it decides how far the window must reach.
        worst = min(
            (pairs[i][0] for i in chunk),
            key=lambda pair: pair.noise if isinstance(pair, Sampled) else 0.0,
        )
        losses, masses, central = loss_nodes(worst, tail)
        widest = max(widest, float(losses.max() - losses.min()))
        if central:
            losses, masses = np.append(losses, 0.0), np.append(masses, central)
        log_masses = _log(masses)
        if reverse and _has_two_directions(worst):
            losses, log_masses = -losses, log_masses - losses
        nodes.append((losses, log_masses, sum(pairs[i][1] for i in chunk)))
    cumulant, mean, variance = _cumulants(nodes, _TILTS)
    # Tangent point of the bound delta <= exp(K - t epsilon) t^t / (1 + t)^(1 + t) (Canonne, Kamath,
    # Steinke 2020), interpolated, so that the result changes smoothly with the levels.
    if epsilon is None:
        depth = np.maximum.accumulate(_TILTS * mean - cumulant + np.log1p(_TILTS))
        tilt = float(np.exp(np.interp(-log_delta, depth, np.log(_TILTS))))
        conversion = _TILTS * np.log(_TILTS) - (1 + _TILTS) * np.log1p(_TILTS)
        epsilon = max(
            float(np.interp(tilt, _TILTS, (cumulant - log_delta + conversion) / _TILTS)), 0.0
        )
    else:
        tangent = np.maximum.accumulate(mean - np.log1p(1 / _TILTS))
        tilt = float(np.exp(np.interp(epsilon, tangent, np.log(_TILTS))))
    if interval is None:
        # A step's rounding adds at most theta (1 + theta) h^2 / 12 to its cumulant, on average over
        # the cell.
        scale = max(epsilon, 0.05 * math.sqrt(float(np.interp(tilt, _TILTS, variance))))
        interval = min(math.sqrt(12 * accuracy * scale / (total * (1 + tilt))), 2e-4 * scale)
        interval = max(interval, 4 * widest / _LARGEST_WINDOW, 1e-12)
    tilt = min(tilt, 0.5 / interval)
    # What the rounding adds at most to a step's variance is h^2 / 4.
    center, _, spread = (float(value[0]) for value in _cumulants(nodes, np.array([tilt])))
    steps = _WINDOW_TILTS / math.sqrt(spread + total * interval**2 / 4)
    tilts = np.concatenate([tilt + steps, tilt - steps])
    outer, _, _ = _cumulants(nodes, tilts)
    outer += total * interval**2 / 8 * (tilts + tilts**2 - tilt - tilt**2)
    excess = (outer - center - math.log(_OUTSIDE)) / np.concatenate([steps, steps])
    above, below = excess[: len(steps)], excess[len(steps) :]
    top, bottom = int(np.argmin(above)), int(np.argmin(below))
    upper, lower = float(above[top]), -float(below[bottom])
    # The smallest and the largest possible loss bound the window too.
    upper = min(
        upper, sum(count * float(losses.max()) for losses, _, count in nodes) + total * interval
    )
    lower = max(
        lower, sum(count * float(losses.min()) for losses, _, count in nodes) - total * interval
    )
    if not np.isfinite([interval, tilt, lower, upper]).all():
        raise OverflowError(_BEYOND)
    return _Plan(
        interval=max(interval, (upper - lower) / _LARGEST_WINDOW),
        tilt=tilt,
        lower_tilt=tilt - float(steps[bottom]),
        upper_tilt=tilt + float(steps[top]),
        lower=lower,
        upper=upper,
    )


def _log(masses: Array) -> Array:
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(masses))


def _level_order(level: tuple[Pair, int]) -> tuple[float, ...]:
    pair = level[0]
    return (pair.rate, pair.noise) if isinstance(pair, Sampled) else (2.0, 0.0)


def _power(spectrum: NDArray[np.complex128], count: int) -> NDArray[np.complex128]:
    """spectrum ** count by repeated squaring: an order of magnitude faster than NumPy's
    complex power.
    """
    result = None
    while True:
        if count & 1:
            result = spectrum if result is None else result * spectrum
        count >>= 1
        if not count:
            assert result is not None
            return result
        spectrum = spectrum * spectrum


class Composition:
    """One direction, composed level by level on the tilted grid, then read as a privacy profile."""

    def __init__(self, plan: _Plan, levels: Mapping[Pair, int], reverse: bool, tail: float) -> None:
        self.plan, self.interval, self.tail, self.reverse = plan, plan.interval, tail, reverse
        self._first = math.floor(plan.lower / plan.interval) - 2
        last = math.ceil(plan.upper / plan.interval) + 2
        self._size = fft.next_fast_len(max(last - self._first + 1, 64), real=True)
        self._last = self._first + self._size - 1
        self._spectrum: NDArray[np.complex128] = np.ones(self._size // 2 + 1, dtype=np.complex128)
        self._offset = self._extent = self.count = 0
        self.infinity = 0.0
        # log E exp(t L) at a tilt above, a tilt below and at the tilt
        self._log_moments = np.zeros(3)
        for pair, count in levels.items():
            self._add(grid_masses(pair, self.interval, tail)[reverse], count)
        self._finish()

    def like(self, levels: Mapping[Pair, int]) -> Composition:
        """Other levels on the same grid."""
        return Composition(self.plan, levels, self.reverse, self.tail)

    def followed_by(self, other: Composition, times: int) -> Composition:
        """This composition, and then ``times`` the other, which was made with the same plan."""
        joint = copy.copy(self)
        joint._spectrum = self._spectrum * _power(other._spectrum, times)
        joint._offset += times * other._offset
        joint._extent += times * other._extent
        joint.count += times * other.count
        joint.infinity += times * other.infinity
        joint._log_moments = self._log_moments + times * other._log_moments
        joint._finish()
        return joint

    def _add(self, level: Masses, count: int) -> None:
        grid = self.interval * (level.first + np.arange(len(level.masses)))
        log_masses = _log(level.masses)
        for i, tilt in enumerate((self.plan.upper_tilt, self.plan.lower_tilt, self.plan.tilt)):
            exponent = tilt * grid
            exponent += log_masses
            peak = float(exponent.max())
            tilted = np.exp(exponent - peak)
            norm = float(tilted.sum())
            self._log_moments[i] += count * (peak + math.log(norm))
        tilted /= norm
        if len(tilted) > self._size:
            tilted = (
                np.append(tilted, np.zeros(-len(tilted) % self._size))
                .reshape(-1, self._size)
                .sum(axis=0)
            )
        self._spectrum *= _power(fft.rfft(tilted, self._size), count)
        self._offset += count * level.first
        self._extent += count * (len(level.masses) - 1)
        self.count += count
        self.infinity += count * level.infinity

    def _finish(self) -> None:
        """One inverse FFT, and the bounds on everything that it does not see."""
        self.losses = self.interval * (self._first + np.arange(self._size))
        self.tilted = np.roll(
            fft.irfft(self._spectrum, self._size), (self._offset - self._first) % self._size
        )
        if not (np.isfinite(self.tilted).all() and np.isfinite(self._log_moments).all()):
            raise OverflowError(_BEYOND)
        # Round-off of an entry: each factor carries a relative error of a few eps log(size); the
        # inverse FFT averages.
        magnitude = float(np.abs(self._spectrum).mean()) + 1 / self._size
        self.round_off = (
            8 * float(np.finfo(float).eps) * math.log2(self._size) * (self.count + 1) * magnitude
        )
        self.relative_error = _STEP_ERROR * self.count
        plan, end, start = self.plan, self.interval * self._last, self.interval * self._first
        upper, lower, self.log_scale = (float(moment) for moment in self._log_moments)
        # Mass beyond the window, and tilted mass that came in from outside, by Chernoff's bound.
        self.above = self.wrapped = 0.0
        if self._offset + self._extent > self._last:
            self.above = math.exp(min(upper - plan.upper_tilt * end, 0.0))
            self.wrapped += math.exp(
                min(upper - self.log_scale - (plan.upper_tilt - plan.tilt) * end, 0.0)
            )
        if self._offset < self._first:
            self.wrapped += math.exp(
                min(lower - self.log_scale - (plan.lower_tilt - plan.tilt) * start, 0.0)
            )

    def wider_plan(self) -> _Plan:
        """The plan with the window that the moments measured on the grid ask for."""
        plan = self.plan
        upper, lower, center = (float(moment) for moment in self._log_moments)
        end = (upper - center - math.log(_OUTSIDE)) / (plan.upper_tilt - plan.tilt)
        start = (lower - center - math.log(_OUTSIDE)) / (plan.lower_tilt - plan.tilt)
        width = plan.upper - plan.lower
        if end - start > 3 * width:
            # The outer tilts lie where moments explode: closer ones bound the tails better.
            start, end = plan.lower - width / 4, plan.upper + width / 4
            plan = plan._replace(
                lower_tilt=(plan.tilt + plan.lower_tilt) / 2,
                upper_tilt=(plan.tilt + plan.upper_tilt) / 2,
            )
        start = max(min(start, plan.lower), self.interval * self._offset)
        end = min(max(end, plan.upper), self.interval * (self._offset + self._extent))
        interval = max(plan.interval, (end - start) / _LARGEST_WINDOW)
        return plan._replace(lower=start, upper=end, interval=interval)

    def _profile(self, tilted: Array) -> tuple[Array, Array]:
        """Mass at or above each loss l, and sum of mass * exp(l - loss) over the same;
        delta(l) is their difference.
        """
        # What underflows is far below any delta; what is cut off lies where delta is far above 1 in
        # any case.
        mass = tilted * np.exp(np.minimum(self.log_scale - self.plan.tilt * self.losses, 300.0))
        discounted = signal.lfilter([1.0], [1.0, -math.exp(-self.interval)], mass[::-1])[::-1]
        return np.cumsum(mass[::-1])[::-1], discounted

    def upper_delta(self, epsilon: float) -> float:
        tilted = np.maximum(self.tilted, 0.0) + self.round_off
        above = self.losses > epsilon
        losses = self.losses[above]
        scale = np.minimum(self.log_scale - self.plan.tilt * losses, 600.0)
        total = float(np.sum(tilted[above] * np.exp(scale) * -np.expm1(epsilon - losses)))
        return min(total * (1 + self.relative_error) + self.infinity + self.above, 1.0)

    def upper_epsilon(self, delta: float) -> float:
        rest = delta - self.infinity - self.above
        if rest <= 0:
            return math.inf
        tilted = (np.maximum(self.tilted, 0.0) + self.round_off) * (1 + self.relative_error)
        mass, discounted = self._profile(tilted)
        # delta falls, so the first grid point that meets the target ends the cell of the solution.
        met = mass - discounted <= rest
        cell = int(np.argmax(met)) if met[-1] else len(met) - 1
        if cell == 0:
            return max(float(self.losses[0]), 0.0)
        if mass[cell] <= rest:
            return max(float(self.losses[cell - 1]), 0.0)
        solution = max(
            float(self.losses[cell]) + math.log((mass[cell] - rest) / discounted[cell]), 0.0
        )
        # The difference above loses digits where the tilt is large; the sum of positive terms in
        # upper_delta does not.
        margin = 1e-10 * solution + 1e-14
        while self.upper_delta(solution) > delta:
            solution, margin = solution + margin, 2 * margin
        return solution

    def lower_epsilon(self, delta: float) -> float:
        # probability with which the discretisation may have moved the loss further than ``shift``
        slip = delta / 50
        shift = self._shift(slip)
        mass, discounted = self._profile(
            np.maximum(self.tilted - self.round_off, 0.0) * (1 - self.relative_error)
        )
        foreign = (
            np.exp(np.minimum(self.log_scale - self.plan.tilt * self.losses, 700.0)) * self.wrapped
        )
        enough = np.flatnonzero(
            mass * (1 - 1e-9) - discounted - foreign >= delta + slip + 2 * self.tail * self.count
        )
        return max(float(self.losses[enough[-1]]) - shift, 0.0) if len(enough) else 0.0

    def _shift(self, slip: float) -> float:
        ratio = self.interval / -math.expm1(-self.interval)
        mean = ratio - 1 - math.log(ratio)
        return self.count * mean + self.interval * math.sqrt(self.count * -math.log(slip) / 2)


def _tail(delta: float, total: int) -> float:
    return max(1e-7 * delta / total, 1e-30)


def _directions(levels: Mapping[Pair, int]) -> tuple[bool, ...]:
    """Whether to look at the pairs as they are (a record was removed) and at their reverse (a
    record was added).
    """
    return (
        (False, True)
        if any(isinstance(p, Sampled) and p.kind == "directed" for p in levels)
        else (False,)
    )


# --- what the accountant asks ---------------------------------------------------------------------

_EXACT_LEVELS = 48  # up to this many different levels are composed as they are
_MOST_LEVELS = 1000
_ROUGH_RATIO, _ROUGH_ACCURACY = 1.02, 1e-3  # of a first bound where levels are many
RATIO = 1.002  # ratio within which levels are merged
_LOWER_RATIO = 1.005
_FAR_LOSS, _FAR_MU = 500.0, 1e4  # beyond these the loss is not put on a grid
# from here on the second term of a Gaussian's delta, which lowers epsilon by 1 in mu**2/2, is below
# round-off and left out
_LARGE_MU = 1e5


def merge(
    counts: Mapping[Pair, int],
    ratio: float = RATIO,
    *,
    upper: bool = True,
    concentrated: bool = False,
    fixed: bool = False,
) -> dict[Pair, int]:
    """Gaussians become one; close levels of sampled releases become their least private member.

    Args:
        counts: how often each pair occurs.
        ratio: levels are merged if there are many and their noise and rate are within it.
        upper: ``False`` merges at the most private member, and leaves out what need not cost
            anything.
        concentrated: keep pairs that have no privacy loss distribution.
        fixed: merged levels stand on a fixed grid, whatever the members (so that what is computed
            for one can be kept).
    """
    squared = 0.0
    merged: dict[Pair, int] = {}
    sampled: list[tuple[Sampled, int]] = []
    for pair, count in counts.items():
        if isinstance(pair, Gaussian):
            squared += count * pair.mu**2
        elif isinstance(pair, Sampled):
            if not upper and pair.kind == "symmetric":
                pair = Sampled("directed", pair.rate, pair.noise)
            sampled.append((pair, count))
        elif isinstance(pair, Pure) or (upper and isinstance(pair, BoundedRange)) or concentrated:
            merged[pair] = merged.get(pair, 0) + count
        elif upper:
            raise TypeError(f"{pair!r} has no privacy loss distribution.")
    if len(sampled) <= _EXACT_LEVELS:
        for pair, count in sampled:
            merged[pair] = merged.get(pair, 0) + count
    else:
        while True:
            groups = _group(sampled, ratio, upper, fixed)
            if len(groups) <= _MOST_LEVELS:
                break
            ratio = 1 + 2 * (ratio - 1)
        merged.update(groups)
    if squared:
        merged[Gaussian(math.sqrt(squared))] = 1
    return merged


def _group(
    sampled: list[tuple[Sampled, int]], ratio: float, upper: bool, fixed: bool
) -> dict[Pair, int]:
    noise = np.array([pair.noise for pair, _ in sampled])
    rate = np.array([pair.rate for pair, _ in sampled])
    noise_cell = np.floor(np.log(noise) / math.log(ratio)).astype(np.int64)
    rate_cell = np.floor(np.log(rate) / math.log(ratio)).astype(np.int64)
    members: dict[tuple[str, int, int], list[int]] = {}
    for i, (pair, _) in enumerate(sampled):
        members.setdefault((pair.kind, int(noise_cell[i]), int(rate_cell[i])), []).append(i)
    groups: dict[Pair, int] = {}
    for (kind, _, _), index in members.items():
        least, most = (np.min, np.max) if upper else (np.max, np.min)
        level = Sampled(kind, float(most(rate[index])), float(least(noise[index])))  # type: ignore[arg-type]
        if fixed:
            level = Sampled(
                level.kind, level.rate, min(level.noise, ratio ** int(noise_cell[index[0]]))
            )
        groups[level] = groups.get(level, 0) + sum(sampled[i][1] for i in index)
    return groups


def compose(
    levels: Mapping[Pair, int],
    *,
    delta: float | None = None,
    epsilon: float | None = None,
    accuracy: float = _ACCURACY,
    interval: float | None = None,
    reverse: bool | None = None,
) -> list[Composition]:
    """Composes the levels in each direction (one is enough where every pair is its own reverse).

    Args:
        levels: how often each pair occurs. Gaussians are cheapest as one pair.
        delta: the delta near which the result will be asked for epsilon; or
        epsilon: the epsilon near which it will be asked for delta.
        accuracy: relative excess of epsilon that the discretisation aims at.
        interval: the discretisation interval, instead.
        reverse: this direction only.
    """
    total = sum(levels.values())
    log_delta = math.log(delta) if delta is not None else -23.0
    tail = _tail(math.exp(log_delta), total)
    compositions = []
    for direction in _directions(levels) if reverse is None else (reverse,):
        plan = _plan(
            levels,
            direction,
            tail,
            epsilon=epsilon,
            log_delta=log_delta,
            accuracy=accuracy,
            interval=interval,
        )
        composition = Composition(plan, levels, direction, tail)
        for _ in range(_ATTEMPTS):
            if composition.wrapped <= 100 * _OUTSIDE:
                break
            composition = Composition(composition.wider_plan(), levels, direction, tail)
        compositions.append(composition)
    return compositions


def _only_mu(levels: Mapping[Pair, int]) -> float | None:
    """mu of merged levels that are one Gaussian; 0 if there are none; ``None`` if there is
    anything else.
    """
    mu = 0.0
    for pair in levels:
        if not isinstance(pair, Gaussian):
            return None
        mu = pair.mu
    return mu


def _gaussian_delta(mu: float, epsilon: float) -> float:
    """Balle and Wang 2018, Theorem 8."""
    if mu == 0:
        return 0.0
    first = float(special.ndtr(mu / 2 - epsilon / mu))
    if mu > _LARGE_MU:
        return first * (1 + 1e-15)
    # round-off
    return first * (1 + 1e-15) - float(
        np.exp(epsilon + special.log_ndtr(-mu / 2 - epsilon / mu))
    ) * (1 - 1e-15)


def _gaussian_epsilon(mu: float, delta: float) -> float:
    if _gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    largest = mu**2 / 2 - mu * float(special.ndtri(delta))
    if mu > _LARGE_MU:
        return largest * (1 + 1e-10)
    solution = optimize.brentq(
        lambda e: _gaussian_delta(mu, e) - delta, 0.0, largest, xtol=1e-14, rtol=1e-12
    )
    return float(solution) * (1 + 1e-10)


def gaussian_mu(epsilon: float, delta: float) -> float:
    """The largest mu at which a Gaussian keeps (epsilon, delta), rounded down."""
    high = 1.0
    while _gaussian_delta(high, epsilon) <= delta:
        high *= 2
    low = high / 2
    while _gaussian_delta(low, epsilon) > delta:
        low /= 2
    solution = optimize.brentq(
        lambda mu: _gaussian_delta(mu, epsilon) - delta, low, high, xtol=1e-15, rtol=1e-12
    )
    return float(solution) * (1 - 1e-9)


def dominating_mu(pair: Pair) -> float:
    """A mu for which ``pair`` is mu-Gaussian differentially private."""
    if isinstance(pair, Gaussian):
        return pair.mu
    if isinstance(pair, Sampled):
        return (2.0 if pair.kind == "antipodal" else 1.0) / pair.noise  # without amplification
    if isinstance(pair, Pure | BoundedRange):
        # The Gaussian whose trade-off curve meets that of randomised response where both errors are
        # equal; it is convex with the same ends, so it lies below.
        return -2.0 * float(special.ndtri(special.expit(-pair.epsilon)))
    if isinstance(pair, Concentrated):
        raise ValueError(
            "zero-concentrated differential privacy implies no Gaussian differential privacy, which"
            " this accountant's adaptive guarantee rests on since its first charge was a Gaussian."
            " Charge it to an accountant of its own."
        )
    return math.inf


def _refused(counts: Mapping[Pair, int]) -> bool:
    if any(isinstance(pair, Concentrated) for pair in counts):
        raise ValueError(ZCDP_REFUSAL)
    return any(isinstance(pair, NonPrivate) for pair in counts)


ZCDP_REFUSAL = (
    "zero-concentrated differential privacy is known by its Renyi curve only and has no privacy"
    " loss distribution: use PrivacyAccountant(method='rdp'), or, if the release is a Gaussian,"
    " charge MuGaussianDpEvent(sqrt(2 * rho)), which costs less."
)


# --- releases that fail outright ------------------------------------------------------------------

SMALLEST_DELTA = 1e-10  # below it round-off and truncated tails are no longer negligible
_FAILURE_ERROR = 1e-14  # relative error of a probability that one of many releases fails, by far


def apart(counts: Mapping[Pair, int]) -> tuple[dict[Failure, int], dict[Pair, int]]:
    """The releases that fail outright with some probability, and the others."""
    failures = {
        pair: count for pair, count in counts.items() if count and isinstance(pair, Failure)
    }
    return failures, {
        pair: count for pair, count in counts.items() if count and not isinstance(pair, Failure)
    }


def failing(failures: Mapping[Failure, int], *, upper: bool = True) -> float:
    """The probability that one of the releases fails, rounded up; ``upper=False``: rounded down."""
    if sum(failures.values()) == 1:
        return next(iter(failures)).delta
    none = math.fsum(count * math.log1p(-failure.delta) for failure, count in failures.items())
    return min(-math.expm1(none) * (1 + _FAILURE_ERROR if upper else 1 - _FAILURE_ERROR), 1.0)


def beside_failures(
    counts: Mapping[Pair, int], delta: float, price: Callable[[dict[Pair, int], float], float]
) -> float:
    """An upper bound on epsilon at ``delta``, where ``price(others, left)`` is one for
    releases that do not fail outright.
    """
    failures, others = apart(counts)
    failed = failing(failures)
    if not failed:
        return price(others, delta)
    if failed > delta:
        return math.inf
    if not others:
        return 0.0
    left = _left(delta, failed)
    return price(others, left) if left >= SMALLEST_DELTA else _largest_loss(others)


def _left(delta: float, failed: float) -> float:
    """The delta that other releases may have beside failures of probability ``failed`` <=
    ``delta``, rounded down.
    """
    return (delta - failed) / (1 - failed) * (1 - 1e-15)


def _largest_loss(counts: Mapping[Pair, int]) -> float:
    """What the privacy loss never passes."""
    return math.fsum(
        count * (pair.epsilon if isinstance(pair, Pure | BoundedRange) else math.inf)
        for pair, count in counts.items()
    ) * (1 + 1e-15)


def without_delta(counts: Mapping[Pair, int], delta: float) -> str:
    """A sentence for a person where epsilon is infinite because releases that may fail
    outright use all of ``delta``, else empty.
    """
    failures, others = apart(counts)
    failed = failing(failures)
    if (
        not failed
        or _refused(others)
        or (
            failed <= delta
            and (_left(delta, failed) >= SMALLEST_DELTA or math.isfinite(_largest_loss(others)))
        )
    ):
        return ""
    return (
        f"Releases that may fail outright (FailureDpEvent) use a delta of {failed:.4g} in all,"
        f" which leaves nothing of delta = {delta:g}: epsilon is infinite. Ask for a larger delta,"
        " or charge smaller failures."
    )


def with_failures(counts: Mapping[Pair, int], price: Callable[[dict[Pair, int]], float]) -> float:
    """An upper bound on delta, where ``price(others)`` is one for releases that do not fail
    outright.
    """
    failures, others = apart(counts)
    failed = failing(failures)
    if not failed:
        return price(others)
    return min((failed + (1 - failed) * price(others)) * (1 + 1e-15), 1.0) if others else failed


# --- bounds ---------------------------------------------------------------------------------------


def upper_epsilon(counts: Mapping[Pair, int], delta: float, ratio: float = RATIO) -> float:
    """An upper bound on epsilon at ``delta``, for releases whose parameters were fixed in advance.

    Args:
        counts: how often each pair was released.
        delta: the probability with which the loss may pass epsilon.
        ratio: if there are many levels, those within this ratio of each other are merged at the
            least private.
    """
    if _refused(counts):
        return math.inf
    return beside_failures(
        counts,
        delta,
        lambda others, left: min(_upper_epsilon(others, left, ratio), _largest_loss(others)),
    )


def _upper_epsilon(counts: Mapping[Pair, int], delta: float, ratio: float) -> float:
    counts, largest = _without_extremes(counts)
    if largest:
        return (largest + _upper_epsilon(counts, delta, ratio)) * (1 + 1e-15)
    levels = merge(counts, ratio)
    if (mu := _only_mu(levels)) is not None:
        return _gaussian_epsilon(mu, delta)
    try:
        if len(levels) <= _EXACT_LEVELS:
            return _worst([c.upper_epsilon(delta) for c in compose(levels, delta=delta)])
        # Where levels are many a rough bound on one direction often shows that it is not the worse
        # one.
        rough = compose(merge(levels, _ROUGH_RATIO), delta=delta, accuracy=_ROUGH_ACCURACY)
        bounds = {c.reverse: c.upper_epsilon(delta) for c in rough}
        fine: dict[bool, float] = {}
        for reverse in sorted(bounds, key=lambda direction: -bounds[direction]):
            if not fine or not bounds[reverse] <= max(fine.values()):
                (composition,) = compose(levels, delta=delta, reverse=reverse)
                fine[reverse] = composition.upper_epsilon(delta)
        return _worst(list(fine.values()))
    except OverflowError:
        return math.inf


class Extension:
    """The function from steps to an upper bound on epsilon of ``counts`` and ``steps`` times
    ``more``.

    A call costs one inverse FFT. The bound is tightest near ``guess`` steps.
    """

    def __init__(
        self,
        counts: Mapping[Pair, int],
        more: Mapping[Pair, int],
        delta: float,
        guess: int,
        ratio: float = RATIO,
        accuracy: float = _ACCURACY,
    ) -> None:
        self._delta, self._ratio, self._counts, self._more = delta, ratio, dict(counts), dict(more)
        self._directions: list[tuple[Composition, Composition]] = []
        self._beyond = False
        joint = added(counts, more, guess)
        # of these a bound that needs no grid is asked for each time
        self._gridless = set(map(type, joint)) <= {Gaussian, Failure} or _without_extremes(
            apart(joint)[1]
        ) != (apart(joint)[1], 0.0)
        if self._gridless:
            return
        failures, others = apart(added(counts, more, guess))
        delta = max(_left(delta, min(failing(failures), delta)), SMALLEST_DELTA)
        base, step = merge(apart(counts)[1], ratio), merge(apart(more)[1], ratio)
        joint = merge(others, ratio)
        tail = _tail(delta, 4 * sum(joint.values()))

        def composed(
            reverse: bool, levels: Mapping[Pair, int], accuracy: float
        ) -> tuple[Composition, Composition]:
            plan = _plan(joint, reverse, tail, log_delta=math.log(delta), accuracy=accuracy)
            return Composition(plan, levels, reverse, tail), Composition(plan, step, reverse, tail)

        try:
            # the better direction does not decide: it may stay rough
            if len(base) > _EXACT_LEVELS and ratio < _ROUGH_RATIO:
                rough = [
                    composed(reverse, merge(base, _ROUGH_RATIO), _ROUGH_ACCURACY)
                    for reverse in _directions(joint)
                ]
                rough.sort(key=lambda pair: pair[0].upper_epsilon(delta))
                self._directions = [*rough[:-1], composed(rough[-1][0].reverse, base, accuracy)]
            else:
                self._directions = [
                    composed(reverse, base, accuracy) for reverse in _directions(joint)
                ]
        except OverflowError:
            self._beyond = True

    def extend(self, counts: Mapping[Pair, int], more: Mapping[Pair, int]) -> None:
        """``counts`` were released too, and ``more`` is to be asked for from now on. The grid
        stays what it was.
        """
        self._counts, self._more = added(self._counts, counts), dict(more)
        new, step = merge(apart(counts)[1], self._ratio), merge(apart(more)[1], self._ratio)
        try:
            self._directions = [
                (base.followed_by(base.like(new), 1) if new else base, base.like(step))
                for base, _ in self._directions
            ]
        except OverflowError:
            self._beyond = True

    def __call__(self, steps: int) -> float:
        if self._gridless:
            return upper_epsilon(added(self._counts, self._more, steps), self._delta)
        if self._beyond:
            return math.inf

        def price(_: dict[Pair, int], delta: float) -> float:
            try:
                joint = [
                    before.followed_by(after, steps) if steps else before
                    for before, after in self._directions
                ]
                return _worst([c.upper_epsilon(delta) for c in joint])
            except OverflowError:
                return math.inf

        return beside_failures(added(self._counts, self._more, steps), self._delta, price)


def _without_extremes(counts: Mapping[Pair, int]) -> tuple[dict[Pair, int], float]:
    """What a distribution on a grid can tell apart, and what is to be added to its epsilon for the
    rest, which costs far more than any guarantee is worth: bounded losses count at their largest
    (basic composition), and beside such a Gaussian other releases count as Gaussians without
    amplification.
    """
    far: dict[Pair, int] = {
        pair: n
        for pair, n in counts.items()
        if isinstance(pair, Pure | BoundedRange) and pair.epsilon > _FAR_LOSS
    }
    near: dict[Pair, int] = {pair: n for pair, n in counts.items() if pair not in far}
    if (
        math.fsum(n * pair.mu**2 for pair, n in near.items() if isinstance(pair, Gaussian))
        > _FAR_MU**2
    ):
        squared = math.fsum(n * dominating_mu(pair) ** 2 for pair, n in near.items())
        near = {Gaussian(math.sqrt(squared) * (1 + 1e-15)): 1}
    return near, _largest_loss(far)


def _worst(values: list[float]) -> float:
    """The largest; ``max`` would pass over a NaN that does not come first."""
    return math.inf if any(map(math.isnan, values)) else max(values)


def added(counts: Mapping[Pair, int], more: Mapping[Pair, int], times: int = 1) -> dict[Pair, int]:
    """``counts`` plus ``times`` times ``more``."""
    total = dict(counts)
    for pair, count in more.items():
        total[pair] = total.get(pair, 0) + times * count
    return total


def lower_epsilon(counts: Mapping[Pair, int], delta: float) -> float:
    """A lower bound: no accountant that knows no more than the events can prove less than this."""
    if _refused(counts):
        return math.inf
    failures, others = apart(counts)
    if failures:
        failed = failing(failures, upper=False)
        if failed > delta:
            return math.inf
        delta = max((delta - failed) / (1 - failed) * (1 + 1e-15), SMALLEST_DELTA)
    if (near := _without_extremes(others)[0]) != others:  # leaving the others out only lowers it
        others = (
            {pair: n for pair, n in others.items() if isinstance(pair, Gaussian)}
            if _FAR_MU < (_only_mu(near) or 0.0)
            else near
        )
    levels = merge(others, _LOWER_RATIO, upper=False)
    if (mu := _only_mu(levels)) is not None:
        return _gaussian_epsilon(mu, delta) * (1 - 1e-9)
    accuracy = _ACCURACY / (100 if len(levels) <= 4 else 10 if len(levels) <= _EXACT_LEVELS else 3)
    try:
        return max(c.lower_epsilon(delta) for c in compose(levels, delta=delta, accuracy=accuracy))
    except OverflowError:
        return 0.0


def upper_delta(counts: Mapping[Pair, int], epsilon: float) -> float:
    """An upper bound on delta at ``epsilon``."""
    if _refused(counts):
        return 1.0
    return with_failures(counts, lambda others: _upper_delta(others, epsilon))


def _upper_delta(counts: Mapping[Pair, int], epsilon: float) -> float:
    counts, largest = _without_extremes(counts)
    if largest:
        return _upper_delta(counts, (epsilon - largest) * (1 - 1e-15)) if epsilon > largest else 1.0
    levels = merge(counts)
    if (mu := _only_mu(levels)) is not None:
        return max(0.0, min(1.0, _gaussian_delta(mu, epsilon) * (1 + 1e-10)))
    try:
        return min(1.0, _worst([c.upper_delta(epsilon) for c in compose(levels, epsilon=epsilon)]))
    except OverflowError:
        return 1.0
