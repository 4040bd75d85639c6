#!/usr/bin/env python3
"""Random compositions of every kind of release against a reference that shares no code with it.

    python random_compositions.py [--number 1000] [--seed S] [--lines FILE]

The reference takes each event from its definition, as a list of privacy losses with their
probabilities by quadrature, adds up the cumulants K(w) = log E exp(w L), and integrates

    delta(epsilon) = (1 / 2 pi i) * integral of exp(K(w) - epsilon w) / (w (w + 1))

through the saddle. Compositions on one lattice are convolved instead, as there the integrand does
not fall off. The library knows only a bound for some releases (the best of several runs, zero-
concentrated ones). The reference for these is one release that keeps the bound, so only violations
count. ``--lines`` appends one line of JSON for each composition, so that a stop loses nothing. The
report then covers all lines of the file.
"""

import argparse
import itertools
import json
import math
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import dp_accounting as dpa
import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

from torch_dpbayes.accounting import PrivacyAccountant, events, mechanisms
from torch_dpbayes.accounting.events import UserLevelDpEvent
from torch_dpbayes.accounting.random_allocation import RandomAllocationDpEvent
from torch_dpbayes.accounting.selection import Repetitions, selection_event

Array = NDArray[np.float64]
REACH = 16.0  # standard deviations that the quadrature goes out
ROUND_OFF = 1e-7  # relative, of a reference delta
LEAST = 5e-16  # absolute, beside deltas from 1e-12 on: round-off, and a loss just at epsilon
SETTLED = 1e-6  # relative, between one quadrature and one that is twice as fine


@dataclass
class Law:
    """Privacy losses and logarithms of their probabilities, for a removed and an added record."""

    removed: tuple[Array, Array]
    added: tuple[Array, Array] | None = None  # None: the same
    lattice: float | None = None  # all losses are whole multiples of it
    two_atoms: bool = False  # it has them, so that what K does it does again and again

    def side(self, reverse: bool) -> tuple[Array, Array]:
        return self.added if reverse and self.added is not None else self.removed


Laws = list[tuple[Law, float]]


# --- quadrature -----------------------------------------------------------------------------------


def both_ways(log_p: Array, log_q: Array, log_weight: Array | float = 0.0, **kind: Any) -> Law:
    """Of two densities at nodes with these weights, or of probabilities."""
    loss = log_p - log_q
    return Law((loss, log_weight + log_p), (-loss, log_weight + log_q), **kind)


def normal(x: Array, mean: float, std: float) -> Array:
    return np.asarray(stats.norm.logpdf(x, mean, std))


def line(low: float, high: float, step: float) -> tuple[Array, Array]:
    """Nodes and log weights of the trapezoid rule, exact to round-off for what is analytic."""
    x = np.arange(low, high, step)
    return x, np.full(len(x), math.log(step))


def panels(low: float, high: float, number: int) -> tuple[Array, Array]:
    """Those of Gauss and Legendre's rule on so many pieces."""
    edges = np.linspace(low, high, number + 1)
    half, (u, v) = np.diff(edges) / 2, np.polynomial.legendre.leggauss(8)
    x = ((edges[:-1] + half)[:, None] + half[:, None] * u).ravel()
    return x, np.log((half[:, None] * v).ravel())


def compressed(losses: Array, masses: Array, width: float) -> tuple[Array, Array]:
    """Three Gauss nodes for each interval of this width: moments up to the fifth are kept."""
    cell = np.floor(losses / width).astype(np.int64)
    cell -= cell.min()
    used = np.bincount(cell) > 0
    index = (np.cumsum(used) - 1)[cell]
    mass = np.bincount(index, masses)
    mean = np.bincount(index, masses * losses) / mass
    apart = losses - mean[index]
    std = np.sqrt(np.bincount(index, masses * apart**2) / mass)
    one = std < 1e-7 * width
    u = apart / np.where(one, 1.0, std)[index]
    cubes = masses * u * u * u
    third, fourth, fifth = (
        np.bincount(index, powers) / mass for powers in (cubes, cubes * u, cubes * u * u)
    )
    three = ~one & (fourth - third**2 - 1 > 1e-6)
    two = ~one & ~three
    found = [(mean[one], mass[one])]
    root = np.sqrt(third[two] ** 2 / 4 + 1)
    for sign in (1.0, -1.0):
        place = third[two] / 2 + sign * root
        found.append((mean[two] + std[two] * place, mass[two] / (1 + place**2)))
    zero, unit = np.zeros(int(three.sum())), np.ones(int(three.sum()))
    moments = np.stack([unit, zero, unit, third[three], fourth[three], fifth[three]], axis=1)
    hankel = np.stack([moments[:, i : i + 3] for i in range(3)], axis=1)
    companion = np.zeros_like(hankel)
    companion[:, 1, 0] = companion[:, 2, 1] = 1.0
    companion[:, :, 2] = np.linalg.solve(hankel, moments[:, 3:, None])[..., 0]
    roots = np.linalg.eigvals(companion).real
    weights = np.linalg.solve(roots[:, None, :] ** np.arange(3)[:, None], moments[:, :3, None])
    places = mean[three][:, None] + std[three][:, None] * roots
    found.append((places.ravel(), (weights[..., 0] * mass[three][:, None]).ravel()))
    losses, masses = (np.concatenate(part) for part in zip(*found, strict=True))
    return losses[masses > 0], masses[masses > 0]


# --- the events, each from its definition ---------------------------------------------------------


def of_gaussian(mu: float, fine: int = 1) -> Law:
    x, w = line(-REACH, mu + REACH, 0.1 / max(1.0, mu / 5) / fine)
    return both_ways(normal(x, mu, 1.0), normal(x, 0.0, 1.0), w)


def of_poisson(q: float, z: float, replace: bool, fine: int = 1) -> Law:
    x, w = line(-REACH * z - 1, 1 + REACH * z, min(z / 10, z**2 / 8) / fine)

    def mixed(move: float) -> Array:
        return np.logaddexp(math.log1p(-q) + normal(x, 0.0, z), math.log(q) + normal(x, move, z))

    return both_ways(mixed(1.0), mixed(-1.0) if replace else normal(x, 0.0, z), w)


def symmetric(losses: Array, logs: Array) -> tuple[Array, Array]:
    """The law that is its own reverse and has the same profile for epsilon >= 0 as these losses."""
    up = losses > 0
    losses, logs = losses[up], logs[up]
    middle = 1 - np.exp(logs).sum() - np.exp(logs - losses).sum()
    return (
        np.concatenate([losses, -losses, [0.0]]),
        np.concatenate([logs, logs - losses, [math.log(middle)]]),
    )


def of_fixed_size(q: float, z: float, fine: int = 1) -> Law:
    """A swap of members. The symmetric law has a kink at loss 0, where the quadrature begins."""
    noise = z / 2
    x, w = panels(0.5, 1 + REACH * noise, fine * (80 + int(20 / noise)))
    ratio = np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * noise**2))
    return Law(symmetric(ratio, w + ratio + normal(x, 0.0, noise)))


def of_truncated(size: int, q: float, most: int, z: float, replace: bool, fine: int = 1) -> Law:
    """By sums over how many others are drawn; given that, the record joins at the rate shown."""

    def full(others: int) -> tuple[float, float]:
        k = np.arange(most, others + 1)
        p = np.exp(
            special.gammaln(others + 1)
            - special.gammaln(k + 1)
            - special.gammaln(others - k + 1)
            + k * math.log(q)
            + (others - k) * math.log1p(-q)
        )
        return float(p.sum()), float((p * q * most / (k + 1)).sum() / p.sum())

    share, joins = full(size - 1)
    parts = [(1 - share, of_poisson(q, z, replace, fine))]
    if replace:
        parts.append((share, of_fixed_size(joins, z, fine)))
    else:
        more = full(size)[0]
        parts = [(1 - more, parts[0][1]), (share, of_poisson(joins, z / 2, False, fine))]
        parts.append((more - share, of_poisson(q, z / 2, False, fine)))
    sides = []
    for reverse in (False, True):
        laws = [(math.log(weight), *law.side(reverse)) for weight, law in parts]
        logs = [log_weight + log for log_weight, _, log in laws]
        sides.append((np.concatenate([losses for _, losses, _ in laws]), np.concatenate(logs)))
    return Law(*sides)


def of_allocation(steps: int, z: float, replace: bool, fine: int = 1) -> Law:
    s = 1 / z
    if replace:  # two steps, or three: from the joint density of the sums
        x, w = line(-11.0 - s, 11.0 + s, {2: 0.1, 3: 0.4}[steps] / fine)
        rest = normal(x, 0.0, 1.0) + w
        up, down, mass = s * x, -s * x, normal(x, s, 1.0) + w
        for _ in range(steps - 1):
            up = np.logaddexp.outer(up, s * x).ravel()
            down = np.logaddexp.outer(down, -s * x).ravel()
            mass = np.add.outer(mass, rest).ravel()
        losses, masses = compressed(up - down, np.exp(mass), 0.04 / fine)
        return Law((losses, np.log(masses)))
    width = 0.06 / math.sqrt(fine)
    x, w = line(-12.0, 12.0 + s, 0.01)
    one = compressed(s * x - s**2 / 2, np.exp(normal(x, 0.0, 1.0) + w), width)

    def together(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        (a, p), (b, q) = ((law[0][law[1] > 1e-26], law[1][law[1] > 1e-26]) for law in (a, b))
        return compressed(np.logaddexp.outer(a, b).ravel(), np.multiply.outer(p, q).ravel(), width)

    total, power, left = None, one, steps
    while left:
        if left & 1:
            total = power if total is None else together(total, power)
        left >>= 1
        if left:
            power = together(power, power)
    log_w, mass = total[0] - math.log(steps), np.log(total[1])
    return Law((log_w, mass + log_w), (-log_w, mass))


def of_laplace(q: float, b: float, fine: int = 1) -> Law:
    shift = 1 / b
    x, w = panels(0.0, shift, fine * (30 + int(8 * shift)))
    # the density ratio is constant beyond both ends, where the density integrates to itself
    x, weight = np.append(x, [0.0, shift]), np.append(w, [0.0, 0.0])
    log_q = -np.abs(x) - math.log(2)
    log_p = np.logaddexp(
        math.log1p(-q) + log_q if q < 1 else np.full(len(x), -np.inf),
        math.log(q) - np.abs(x - shift) - math.log(2),
    )
    return both_ways(log_p, log_q, weight, two_atoms=True)


def of_discrete_laplace(a: float, move: int, fine: int = 1) -> Law:
    far = move + math.ceil(60 / a)
    k = np.arange(-far, far + move + 1)
    log_q = math.log(math.tanh(a / 2)) - a * np.abs(k)
    log_p = math.log(math.tanh(a / 2)) - a * np.abs(k - move)
    return both_ways(log_p, log_q, lattice=a)


def of_discrete_gaussian(q: float, std: float, move: int, fine: int = 1) -> Law:
    """Of a release that is sampled at rate q, or of all records, where losses lie on a lattice."""
    k = np.arange(-math.ceil(60 * std) - move, math.ceil(60 * std) + move + 1)
    log_q, log_p = (-((k - at) ** 2) / (2 * std**2) for at in (0, move))
    norm = special.logsumexp(log_q)
    if q == 1:
        return both_ways(log_p - norm, log_q - norm, lattice=move / (2 * std**2))
    mixed = np.logaddexp(math.log1p(-q) + log_q, math.log(q) + log_p)
    return both_ways(mixed - norm, log_q - norm)


def of_response(p: float, buckets: int, fine: int = 1) -> Law:
    log_p = np.log(np.array([1 - p + p / buckets] + [p / buckets] * (buckets - 1)))
    log_q = log_p.copy()
    log_q[:2] = log_p[[1, 0]]
    return both_ways(log_p, log_q, lattice=float((log_p - log_q).max()))


def of_pure(epsilon: float, fine: int = 1) -> Law:
    log_p = np.array([-math.log1p(math.exp(-epsilon)), -epsilon - math.log1p(math.exp(-epsilon))])
    return both_ways(log_p, log_p[::-1], lattice=epsilon)


def of_bounded_range(b: float, fine: int = 1) -> Law:
    """From delta(g) = (1 - e^(-(b-g)/2))^2 / (1 - e^-b): the mass at g is delta'' - delta'."""
    g, w = panels(-b, b, 20 * fine)
    return Law((g, w + (g - b) / 2 - math.log(2 * -math.expm1(-b))))


def of_mixture(std: float, moves: list[float], chances: list[float], fine: int = 1) -> Law:
    top = max(moves)
    step = min(std / 10, std**2 / max(top, 0.1) / 8) / fine
    x, w = line(-REACH * std, top + REACH * std, step)
    parts = [math.log(c) + normal(x, m, std) for m, c in zip(moves, chances, strict=True)]
    if (stay := 1 - math.fsum(chances)) > 1e-12:
        parts.append(math.log(stay) + normal(x, 0.0, std))
    return both_ways(np.logaddexp.reduce(parts), normal(x, 0.0, std), w)


def of_best(mu: float, mean: float, shape: float, fine: int = 1) -> Law:
    """The best of K Gaussian releases, scored by themselves: density f'(F(y)) p(y), with f the
    probability generating function of K, ((1 - (1 - gamma) s)^-shape - 1) / (gamma^-shape - 1).
    """
    x, w = line(-12.0, mu + 12.0, 0.04 / fine)

    def excess(log_gamma: float) -> float:  # of E[K] = f'(1)
        g = math.exp(log_gamma)
        return -(1 - g) / (g * special.boxcox(g, shape)) - mean

    gamma = math.exp(optimize.brentq(excess, -600.0, -1e-9, xtol=1e-14))

    def log_slope(cdf: Array) -> Array:
        return -(shape + 1) * np.log1p(-(1 - gamma) * cdf)

    log_p, log_q = (log_slope(special.ndtr(x - m)) + normal(x, m, 1.0) for m in (mu, 0.0))
    scale = special.logsumexp(log_q + w)
    return both_ways(log_p - scale, log_q - scale, w)


# --- the integral ---------------------------------------------------------------------------------


class Reference:
    """delta(epsilon), and its slope, of releases in one direction."""

    def __init__(self, laws: Laws, reverse: bool, fine: int = 1) -> None:
        self._laws: list[tuple[Array, Array, float]] = []
        self._fine = fine
        smooth = [law for law in laws if law[0].lattice is None and not law[0].two_atoms]
        self._smooth = Reference(smooth, reverse) if len(smooth) < len(laws) else self
        for law, count in laws:
            losses, logs = law.side(reverse)
            likely = logs > -700
            self._laws.append((losses[likely], logs[likely], count))

    def cumulant(self, tilts: Array) -> Array:
        """K at real points."""
        total = np.zeros(len(tilts))
        for losses, logs, count in self._laws:
            total += count * special.logsumexp(np.multiply.outer(tilts, losses) + logs, axis=-1)
        return total

    def along(self, theta: float, step: float) -> Iterator[Any]:
        """K at theta + i k step for k = 0, 1, ...: 16 rows of 8 at a time, as a product of two
        matrices of exponentials.
        """
        parts = []
        for losses, logs, count in self._laws:
            tilted = theta * losses + logs
            counts = tilted > tilted.max() - 60
            losses, peak = losses[counts], tilted.max()
            near = np.exp(1j * step * np.multiply.outer(losses, np.arange(8)))
            parts.append((losses, np.exp(tilted[counts] - peak), near, peak, count))
        for start in itertools.count(0, 128):
            total, rows = np.zeros(128, dtype=complex), start + 8 * np.arange(16)
            for losses, masses, near, peak, count in parts:
                far = masses * np.exp(1j * step * np.multiply.outer(rows, losses))
                total += count * (peak + np.log((far @ near).ravel()))
            yield total

    def path(self, epsilon: float) -> tuple[float, float]:
        """Where the integral crosses the real line, and its step."""

        def height(theta: float) -> float:
            value = float(self.cumulant(np.array([theta]))[0])
            return value - epsilon * theta - math.log(theta) - math.log1p(theta)

        found = optimize.minimize_scalar(
            lambda t: height(math.exp(t)), bounds=(-8, 9), method="bounded"
        )
        theta = math.exp(found.x)
        peak, step = height(theta), 1e-3 * theta
        curvature = (height(theta + step) + height(theta - step) - 2 * peak) / step**2
        width = 1 / math.sqrt(max(curvature, 1e-12))
        # the trapezoid rule adds images of the profile at distances of 2 pi / step
        tilts = theta + width * np.array([-8, -4, -2, -1, -0.5, 0.5, 1, 2, 4, 8])
        tilts = tilts[tilts > -0.9]
        moved = self.cumulant(tilts) - self.cumulant(np.array([theta]))
        reach = (moved + 34) / np.abs(tilts - theta)
        above, below = reach[tilts > theta].min(), reach[tilts < theta].min(initial=math.inf)
        span = above + min(below, (34 - peak) / theta)
        return theta, min(0.1 * width, 2 * math.pi / span) / self._fine**0.25

    def at(self, epsilon: float) -> tuple[float, float]:
        """delta, and -d delta / d epsilon; NaN if the integral does not settle."""
        (theta, step), totals = self.path(epsilon), np.zeros(2)
        peak = float(self.cumulant(np.array([theta]))[0]) - epsilon * theta
        peak -= math.log(theta) + math.log1p(theta)
        smooth = self._smooth.along(theta, step) if self._smooth is not self else None
        at_theta = self._smooth.cumulant(np.array([theta]))
        for start, found in zip(range(0, 2**13, 128), self.along(theta, step), strict=False):
            w = theta + 1j * step * np.arange(start, start + 128)
            terms = np.exp(found - epsilon * w - peak)
            both = np.stack([terms / (w * (w + 1)), terms / (w + 1)])
            if start == 0:
                both[:, 0] /= 2
            totals += both.real.sum(axis=1)
            # of what does not fall off the modulus may be 1 again, further out
            fallen = (found if smooth is None else next(smooth)).real - at_theta
            if (np.exp(fallen) / np.abs(w * (w + 1))).max() * theta * (theta + 1) < 1e-11:
                delta, slope = step * totals * math.exp(peak) / math.pi
                return float(delta), float(slope)
        return math.nan, math.nan


def on_lattice(laws: Laws, epsilon: float, reverse: bool) -> tuple[float, float]:
    """The same by convolution, all terms positive."""
    ((law, count),) = laws
    losses, logs = law.side(reverse)
    place = np.rint(losses / law.lattice).astype(int)
    assert np.abs(losses / law.lattice - place).max() < 1e-6
    masses = np.bincount(place - place.min(), np.exp(logs))
    total = np.ones(1)
    for _ in range(count):
        total = np.convolve(total, masses)
    found = law.lattice * (count * int(place.min()) + np.arange(len(total)))
    above = found > epsilon
    scaled = total[above] * np.exp(epsilon - found[above])
    return float((total[above] * -np.expm1(epsilon - found[above])).sum()), float(scaled.sum())


def in_worse_direction(laws: Laws, epsilon: float, fine: int) -> tuple[float, float]:
    found = (0.0, 0.0)
    lattice = len(laws) == 1 and laws[0][0].lattice is not None
    for reverse in (False, True):
        if reverse and all(law.added is None for law, _ in laws):
            continue
        if not lattice:
            one = Reference(laws, reverse, fine).at(epsilon)
        else:
            one = on_lattice(laws, epsilon, reverse)
        if math.isnan(one[0]):
            return one
        found = max(found, one)
    return found


def truth(
    laws: list[tuple[Callable[..., Law], float]], failed: float, epsilon: float
) -> tuple[float, float, float]:
    """delta in the worse direction, the slope of its logarithm, and the relative error: how much
    a quadrature differs from one that is twice as fine.
    """
    delta, slope, error = 0.0, 0.0, 0.0
    if laws:
        coarse = math.nan
        for fine in (1, 2, 4):
            made = [(law(fine=fine), count) for law, count in laws]
            delta, slope = in_worse_direction(made, epsilon, fine)
            error = abs(delta - coarse) / delta if delta else 0.0
            if error <= SETTLED or (fine > 1 and math.isnan(delta)):
                break
            coarse = delta
    delta, slope = failed + (1 - failed) * delta, (1 - failed) * slope
    return delta, slope / delta if delta else math.inf, error


# --- random compositions --------------------------------------------------------------------------


class Drawn(NamedTuple):
    """An event, its law, and its probability of failure."""

    event: events.DpEvent
    law: Callable[..., Law] | None
    failed: float = 0.0


class Draws:
    """Random events with their laws."""

    def __init__(self, rng: np.random.Generator, replace: bool, delta: float) -> None:
        self.rng, self.replace, self.delta = rng, replace, delta

    def log(self, low: float, high: float) -> float:
        return float(np.exp(self.rng.uniform(math.log(low), math.log(high))))

    def gaussian(self) -> Drawn:
        z = self.log(0.8, 30.0)
        return Drawn(events.GaussianDpEvent(z), partial(of_gaussian, (1 + self.replace) / z))

    def poisson(self) -> Drawn:
        q, z = self.log(1e-3, 0.5), self.log(0.6, 5.0)
        event = events.PoissonSampledDpEvent(q, events.GaussianDpEvent(z))
        return Drawn(event, partial(of_poisson, q, z, self.replace))

    def joint(self) -> Drawn:
        """Several Gaussians of one batch."""
        q, one, two = self.log(1e-3, 0.3), self.log(1.0, 5.0), self.log(1.0, 9.0)
        number = int(self.rng.integers(1, 4))
        others = events.SelfComposedDpEvent(events.GaussianDpEvent(two), number)
        inner = events.ComposedDpEvent([events.GaussianDpEvent(one), others])
        z = (1 / one**2 + number / two**2) ** -0.5
        event = events.PoissonSampledDpEvent(q, inner)
        return Drawn(event, partial(of_poisson, q, z, self.replace))

    def fixed_size(self) -> Drawn:
        size, z = int(self.rng.integers(50, 5000)), self.log(1.5, 8.0)
        batch = int(self.rng.integers(1, size // 3))
        event = events.SampledWithoutReplacementDpEvent(size, batch, events.GaussianDpEvent(z))
        return Drawn(event, partial(of_fixed_size, batch / size, z))

    def truncated(self) -> Drawn:
        size, q, z = int(self.rng.integers(100, 3000)), self.log(0.01, 0.2), self.log(1.5, 6.0)
        mean = size * q
        most = max(int(mean + self.rng.uniform(0.2, 4.0) * math.sqrt(mean)), 1)
        event = dpa.dp_event.TruncatedSubsampledGaussianDpEvent(size, q, most, z)
        return Drawn(event, partial(of_truncated, size, q, most, z, self.replace))

    def allocation(self) -> Drawn:
        z = self.log(0.8, 4.0)
        steps = 2 + int(self.rng.random() < 0.1) if self.replace else int(self.log(2, 65))
        event = RandomAllocationDpEvent(steps, events.GaussianDpEvent(z))
        return Drawn(event, partial(of_allocation, steps, z, self.replace))

    def mu(self) -> Drawn:
        mu = self.log(0.03, 1.0)
        return Drawn(events.MuGaussianDpEvent(mu), partial(of_gaussian, mu))

    def batch(self) -> Drawn:
        z = self.log(2.0, 30.0)
        kinds: list[Any] = [events.RecordwiseBatchGaussianDpEvent]
        if self.replace:
            kinds += [events.UnspecifiedBatchGaussianDpEvent, events.ShuffledEpochDpEvent]
        return Drawn(kinds[self.rng.integers(len(kinds))](z), partial(of_gaussian, 2 / z))

    def laplace(self) -> Drawn:
        b = self.log(0.7, 20.0)
        return Drawn(dpa.LaplaceDpEvent(b), partial(of_laplace, 1.0, b / (1 + self.replace)))

    def sampled_laplace(self) -> Drawn:
        b, q = self.log(0.7, 20.0), self.log(0.01, 0.5)
        event = events.PoissonSampledDpEvent(q, dpa.LaplaceDpEvent(b))
        return Drawn(event, partial(of_laplace, q, b))

    def discrete_laplace(self) -> Drawn:
        a, move = self.log(0.05, 0.8), int(self.rng.integers(1, 4))
        law = partial(of_discrete_laplace, a, move * (1 + self.replace))
        return Drawn(dpa.dp_event.DiscreteLaplaceDpEvent(a, move), law)

    def discrete_gaussian(self) -> Drawn:
        std, move = self.log(2.0, 40.0), int(self.rng.integers(1, 3))
        law = partial(of_discrete_gaussian, 1.0, std, move * (1 + self.replace))
        return Drawn(mechanisms.DiscreteGaussianDpEvent(std, move, 1), law)

    def sampled_discrete_gaussian(self) -> Drawn:
        std, move, q = self.log(0.7, 10.0), int(self.rng.integers(1, 3)), self.log(0.01, 0.5)
        event = events.PoissonSampledDpEvent(q, mechanisms.DiscreteGaussianDpEvent(std, move, 1))
        return Drawn(event, partial(of_discrete_gaussian, q, std, move))

    def response(self) -> Drawn:
        p, buckets = float(self.rng.uniform(0.2, 0.95)), int(self.rng.integers(2, 10))
        event = dpa.dp_event.RandomizedResponseDpEvent(p, buckets)
        return Drawn(event, partial(of_response, p, buckets))

    def mixture(self) -> Drawn:
        std, number = self.log(0.8, 4.0), int(self.rng.integers(1, 4))
        moves = self.rng.uniform(0.2, 1.5, number).tolist()
        chances = (self.rng.dirichlet(np.ones(number + 1))[:number]).tolist()
        all_chances = (1 - math.fsum(chances), *chances)
        event = dpa.dp_event.MixtureOfGaussiansDpEvent(std, (0.0, *moves), all_chances)
        return Drawn(event, partial(of_mixture, std, moves, chances))

    def pure(self) -> Drawn:
        epsilon = self.log(0.01, 1.0)
        kind = [events.PureDpEvent, mechanisms.PermuteAndFlipDpEvent][self.rng.integers(2)]
        return Drawn(kind(epsilon), partial(of_pure, epsilon))

    def bounded_range(self) -> Drawn:
        epsilon = self.log(0.05, 2.0)
        kind = [events.BoundedRangeDpEvent, mechanisms.ExponentialMechanismDpEvent]
        return Drawn(kind[self.rng.integers(2)](epsilon), partial(of_bounded_range, epsilon))

    def failure(self) -> Drawn:
        delta = float(self.delta * self.rng.uniform(1e-3, 0.2))
        return Drawn(events.FailureDpEvent(delta), None, delta)

    def epsilon_delta(self) -> Drawn:
        epsilon, delta = self.log(0.02, 1.0), float(self.delta * self.rng.uniform(1e-3, 0.2))
        event = mechanisms.EpsilonDeltaDpEvent(epsilon, delta)
        return Drawn(event, partial(of_pure, epsilon), delta)

    def selection(self) -> Drawn:
        """Its price is a pair (epsilon, delta); the reference is the best of Gaussian releases."""
        mu, mean = self.log(0.1, 1.0), self.log(1.5, 20.0)
        shape = float(self.rng.choice([1.0, 0.5, 0.0, -0.5]))
        run = [(events.MuGaussianDpEvent(mu), 1)]
        relation = "replace_one" if self.replace else "add_or_remove_one"
        own = self.delta * float(self.rng.uniform(0.05, 0.5))
        event = selection_event(run, Repetitions(mean, shape), own, relation)  # type: ignore[arg-type]
        return Drawn(event, partial(of_best, mu, mean, shape))

    def concentrated(self) -> Drawn:
        rho = self.log(1e-3, 0.3)
        return Drawn(events.ZCDpEvent(rho), partial(of_gaussian, math.sqrt(2 * rho)))


SMOOTH = ("gaussian", "poisson", "joint", "fixed_size", "truncated", "allocation", "mu", "batch")
OTHERS = ("laplace", "discrete_laplace", "discrete_gaussian", "pure", "bounded_range", "failure",
          "epsilon_delta", "selection")  # fmt: skip
LATTICE = ("discrete_laplace", "discrete_gaussian", "pure")
ONE_RELATION = {
    False: ("mixture", "sampled_laplace", "sampled_discrete_gaussian"),
    True: ("response",),
}
# whose cumulants do not fall off
ATOMS = {"laplace", "selection", "epsilon_delta", "response", *LATTICE, *ONE_RELATION[False]}
ONLY_RENYI = ("concentrated",)
FEW = {"allocation": 20, "selection": 2, "failure": 3, "epsilon_delta": 3}


def composition(
    rng: np.random.Generator, wanted: str | None = None, replace: bool | None = None
) -> dict[str, Any]:
    """One random composition, with a release of the kind ``wanted``: what the library says and what
    is true.
    """
    replace = bool(rng.integers(2)) if replace is None else replace
    if wanted in ONE_RELATION[not replace]:
        replace = not replace
    delta = float(10 ** rng.uniform(-12, -2))
    method = "rdp" if rng.random() < 0.1 or wanted in ONLY_RENYI else "pld"
    draws = Draws(rng, replace, delta)
    relation = "replace_one" if replace else "add_or_remove_one"
    if wanted is not None:
        kinds = [wanted] if wanted in SMOOTH else ["mu", wanted]
    elif rng.random() < 0.15:  # on one lattice
        kinds = [str(rng.choice([*LATTICE, *(ONE_RELATION[True] if replace else ())]))]
    else:
        pool = [*SMOOTH, *OTHERS, *ONE_RELATION[replace]]
        kinds = [str(kind) for kind in rng.choice(pool, rng.integers(0, 4))]
        kinds.insert(0, str(rng.choice(["gaussian", "mu"] if ATOMS & {*kinds} else [*SMOOTH])))
        if method == "rdp" and rng.random() < 0.5:
            kinds.append(str(rng.choice(ONLY_RENYI)))
    if method == "rdp":
        kinds = [k for k in kinds if k not in ("failure", "epsilon_delta", "selection")] or ["mu"]
    unit = "user" if rng.random() < 0.1 and kinds[-1] not in ONLY_RENYI else "record"
    accountant = PrivacyAccountant(neighboring=relation, method=method, unit=unit)  # type: ignore[arg-type]
    laws: list[tuple[Callable[..., Law], float]] = []
    log_none_failed, described = 0.0, []
    for kind in kinds:
        event, law, failed = getattr(draws, kind)()
        count = int(draws.log(1, FEW.get(kind, 12 if len(kinds) == 1 and kind in LATTICE else 300)))
        count = min(count, 3) if replace and kind == "allocation" else count
        accountant.compose(UserLevelDpEvent(event) if unit == "user" else event, count)
        if law is not None:
            laws.append((law, count))
        log_none_failed += count * math.log1p(-failed)
        described.append(f"{count} x {event!r}")
    start = time.process_time()
    epsilon = accountant.get_epsilon(delta)
    seconds = time.process_time() - start
    failed = -math.expm1(log_none_failed)
    # the failures alone exceed delta; of a selection the reference does not know how often it fails
    if math.isinf(epsilon) and (failed >= delta or "selection" in kinds):
        return composition(rng, wanted, replace)
    back = accountant.get_delta(epsilon) if epsilon > 0 else math.nan
    row = {
        "kinds": kinds, "relation": relation, "method": method, "unit": unit, "delta": delta,
        "epsilon": epsilon, "back": back, "seconds": seconds, "releases": described,
        "is_bound": any(kind in ("selection", *ONLY_RENYI) for kind in kinds),
    }  # fmt: skip
    true_delta, slope, error = truth(laws, failed, epsilon)
    row |= {"true_delta": true_delta, "slope": slope, "error": error}
    claimed = delta if math.isnan(back) else min(delta, back)
    row["violated"] = bool(true_delta * (1 - error) > claimed * (1 + ROUND_OFF) + LEAST)
    # by how much epsilon is too high: log delta falls by slope * (epsilon - the true one)
    if epsilon > 0 and slope > 0 and true_delta > 0:
        gap = math.log(delta / true_delta) / slope
        row["excess"], row["excess_of_back"] = gap / epsilon, back / true_delta - 1
    return row


def report(rows: list[dict[str, Any]]) -> None:
    known = [row for row in rows if not math.isnan(row["error"])]
    rough = [row["error"] for row in known if row["error"] > SETTLED]
    print(f"{len(rows)} compositions, {len(rows) - len(known)} whose integral did not settle")
    print(f"{len(rough)} references are known to {max(rough, default=0):.1e} only")
    print(f"violations: {sum(row['violated'] for row in known)}")
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in known:
        name = row["method"] + ", with a selection" * (row["is_bound"] and row["method"] == "pld")
        if "excess" in row:
            groups.setdefault(name, []).append(row)
    print("| excess of | number | median | 90 % quantile | 99 % quantile | largest |")
    print("|---" * 6 + "|")
    for name, some in groups.items():
        for what, key in (("ε", "excess"), ("`get_delta` at that ε", "excess_of_back")):
            if key == "excess_of_back" and name != "pld":  # rough bounds
                continue
            excess = np.array([row[key] for row in some])
            found = " | ".join(f"{100 * x:.2g} %" for x in np.quantile(excess, [0.5, 0.9, 0.99, 1]))
            print(f"| {what}, {name} | {len(some)} | {found} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--number", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=None, help="default: fresh")
    parser.add_argument("--lines", help="file to which each composition is appended")
    arguments = parser.parse_args()
    seed = secrets.randbits(60) if arguments.seed is None else arguments.seed
    print(f"seed {seed}")
    rows = []
    for i in range(arguments.number):
        row = composition(np.random.default_rng([seed, i])) | {"seed": seed, "index": i}
        rows.append(row)
        if row["violated"]:
            print("VIOLATED", json.dumps(row), file=sys.stderr, flush=True)
        if arguments.lines:
            with open(arguments.lines, "a") as lines:
                lines.write(json.dumps(row) + "\n")
    if arguments.lines:
        with open(arguments.lines) as lines:
            rows = [json.loads(line) for line in lines]
    report(rows)
    sys.exit(any(row["violated"] for row in rows))


if __name__ == "__main__":
    main()
