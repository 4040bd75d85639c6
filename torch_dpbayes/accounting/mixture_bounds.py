r"""Bounds on many sampled releases with different rates and noises, by mixtures of a few releases.

A release between the points of a grid of (rate, noise) is dominated by a mixture of the four
corners around it; the drawn corner is public. The excess is of second order in the grid spacing.
Rounding to the least private corner has an excess of first order.

* *Rate.* Both distributions of a pair are linear in q, and hockey-stick divergences are jointly
  convex, so the divergence at q lies below its chord between two rates.
* *Noise.* Let m be 1/z for the pairs "directed" and "symmetric", and 2/z for "antipodal" (so that
  delta(0) = q (2 Phi(m/2) - 1)), and let t = Phi(m / 2). At each epsilon delta is convex in t.
  Directed: at q = 1 the derivative d delta / d t is proportional to exp(epsilon/2 - epsilon^2 /
  (2 m^2)), which grows with m. Sampling maps epsilon to another epsilon that does not depend on m.
  The reverse and the symmetric profile are this one at -epsilon, up to factors and terms without
  m. Antipodal: the threshold at which the divergence is attained moves with n = m / 2. With
  u = n y - epsilon / 2 this gives d log(d delta / d t) / d n = ((y - n tanh(u) / 2)^2 + 3/4 n^2
  tanh(u)^2) / n.

If a mixture of pairs dominates each release, the product of mixtures dominates the composition
(Zhu, Dong, Wang 2022, Theorem 10). Its characteristic function is the product over the releases of
sum_k w_k phi_k. Releases of one cell with similar weights form a group, and the n factors of a
group are replaced by the n-th power of their mean. Let x_i be the relative deviations from the
mean, which sum to 0, and s^2 = sum |x_i|^2. Then the logarithm of the product changes by at most
s^2 / (2 (1 - s)), because |log(1 + x) - x| <= |x|^2 / (2 (1 - |x|)).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

from .dominating_pairs import Array, Pair, Sampled, SampledKind, has_two_directions
from .privacy_loss import loss_nodes

Indices = NDArray[np.int64]

_PILOTS = 6  # rates and noises whose cost decides where the grid must be fine
_PILOT_TAIL = 1e-20
_BINS = 400
_STEP = 0.1  # relative distance from a release to the ends of a chord around it
_MOST_NODES = 32  # rates, or noises, of the grid
_WORTH = 0.7  # mixtures are faster if there are fewer corners per release
_MOST_GROUPS = 4096  # up to so many releases are single groups
_DOWN = 1 - 4e-16  # factor that rounds the noise of a corner down
_UP = 1e-12  # relative and absolute rounding of the weight on the less private corner


class Mixtures(NamedTuple):
    """Groups of releases, each with a mixture of four corners: the mean over its members."""

    corners: Sequence[Pair]  # sampled Gaussians, perhaps with losses up to a cut
    among: Indices  # (groups, 4)
    weights: Array  # (groups, 4), the mean over a group; they sum to 1
    counts: Indices  # (groups,)
    spread: Array  # (groups, 4, 4), sum over a group of the outer products of weights - mean

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    @property
    def shares(self) -> Array:
        """The weight of each corner in all releases together."""
        weights = self.weights * self.counts[:, None] / self.total
        shares = np.bincount(self.among.ravel(), weights.ravel(), len(self.corners))
        return np.asarray(shares, dtype=np.float64)


class Near(NamedTuple):
    """The point near which a composition is evaluated, and the precision."""

    tilt: float
    log_delta: float
    reverse: bool
    excess: float  # target excess of log(delta) by mixtures
    fewest: int  # least number of rates, and of noises, in their grid

    def growth(self, pair: Sampled) -> float:
        """The approximate factor by which a release multiplies delta, minus 1: E exp(tilt * L) - 1,
        at most 1.
        """
        losses, masses, _ = loss_nodes(pair, _PILOT_TAIL)
        if self.reverse and has_two_directions(pair):
            losses, masses = -losses, masses * np.exp(-losses)
        return float(masses @ np.expm1(np.minimum(self.tilt * losses, -self.log_delta)))


def mixtures(sampled: list[tuple[Sampled, int]], near: Near) -> Mixtures | None:
    """The mixtures, or ``None`` if there are almost as many corners as different releases."""
    found = []
    for kind in sorted({pair.kind for pair, _ in sampled}):
        chosen = [(pair.rate, pair.noise, n) for pair, n in sampled if pair.kind == kind]
        rate, noise, count = (np.array(column) for column in zip(*chosen, strict=True))
        found.append(_placed(kind, rate, noise, count, near))
    if sum(len(part.corners) for part in found) >= _WORTH * len(sampled):
        return None
    starts = np.cumsum([0, *(len(part.corners) for part in found)])
    return Mixtures(
        [corner for part in found for corner in part.corners],
        np.concatenate([part.among + start for part, start in zip(found, starts, strict=False)]),
        *(np.concatenate([part[i] for part in found]) for i in (2, 3, 4)),
    )


def _placed(kind: SampledKind, rate: Array, noise: Array, count: Indices, near: Near) -> Mixtures:
    sensitivity = 2.0 if kind == "antipodal" else 1.0
    shift = sensitivity / noise
    # coordinates x, y in which a release of small loss costs about exp(2 (x + y))
    double = 2 / noise**2
    log_ratio = double + np.log(-np.expm1(-double) / double)  # log(expm1(double) / double)
    place = np.log(rate), np.log(shift) + log_ratio / 2
    bends = _bends(kind, rate, noise, place, near)
    column, row = (
        _nodes(at, count * bend, near.excess / 2, near.fewest)
        for at, bend in zip(place, bends, strict=True)
    )
    rates, shifts = rate[column], shift[row]
    rates[-1], shifts[-1] = rate.max(), shift.max()  # the largest of equal logarithms
    column, of_rate = _chord(rates, rate, _difference)
    row, of_shift = _chord(shifts, shift, _probability_between)
    step, corners, weights = len(shifts), [], []
    for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
        at = np.minimum(column + i, len(rates) - 1), np.minimum(row + j, step - 1)
        corners.append(at[0] * step + at[1])
        weights.append((of_rate if i else 1 - of_rate) * (of_shift if j else 1 - of_shift))
    first, group = _groups(corners[0], of_rate, of_shift)
    used, among = np.unique(np.stack(corners, axis=1)[first], return_inverse=True)
    total = np.bincount(group, count)
    means = np.stack([np.bincount(group, count * w) / total for w in weights], axis=1)
    apart = [w - means[group, k] for k, w in enumerate(weights)]
    spread = [[np.bincount(group, count * a * b) for b in apart] for a in apart]
    return Mixtures(
        [
            Sampled(kind, float(rates[c // step]), float(sensitivity / shifts[c % step]) * _DOWN)
            for c in used.tolist()
        ],
        among.reshape(-1, 4),
        means,
        np.rint(total).astype(np.int64),
        np.moveaxis(np.array(spread), 2, 0),
    )


def _groups(cell: Indices, u: Array, v: Array) -> tuple[Indices, Indices]:
    """A member of each group, and the group of each release. Releases of one cell are a group if
    their weights ``u``, ``v`` are in one square of a grid. The grid is the finest that gives at
    most ``_MOST_GROUPS`` groups.
    """
    if len(cell) <= _MOST_GROUPS:
        return np.arange(len(cell)), np.arange(len(cell))
    for parts in (64, 45, 32, 23, 16, 11, 8, 5, 3, 2, 1):
        across, along = (np.minimum((w * parts).astype(np.int64), parts - 1) for w in (u, v))
        square = cell * parts**2 + across * parts + along
        _, first, group = np.unique(square, return_index=True, return_inverse=True)
        if len(first) <= _MOST_GROUPS:
            break
    return first, group


def _bends(
    kind: SampledKind, rate: Array, noise: Array, place: tuple[Array, Array], near: Near
) -> tuple[Array, Array]:
    """Approximate excess of a chord in each coordinate, divided by the square of its half width. It
    is interpolated between a few releases and not a bound.
    """
    sensitivity = 2.0 if kind == "antipodal" else 1.0
    pilots = []
    for values, at in zip((rate, noise), place, strict=True):
        order = np.argsort(at)
        wanted = np.linspace(at[order[0]], at[order[-1]], _PILOTS)
        index = np.unique(np.clip(np.searchsorted(at[order], wanted), 0, len(at) - 1))
        pilots.append((values[order[index]], at[order[index]]))
    (rates, xs), (noises, ys) = pilots
    bends = np.zeros((2, len(rates), len(noises)))
    low, high = 1 - _STEP, 1 + _STEP
    for i, q in enumerate(np.minimum(rates, 1 / high).tolist()):
        for j, z in enumerate(noises.tolist()):
            here = near.growth(Sampled(kind, q, z))
            around = [near.growth(Sampled(kind, q * by, z)) for by in (low, high)]
            bends[0, i, j] = (around[0] + around[1]) / 2 - here
            around = [near.growth(Sampled(kind, q, z / by)) for by in (low, high)]
            shifts = np.array([low, 1.0, high]) * (sensitivity / z)
            (_,), (up,) = _chord(shifts[[0, 2]], shifts[1:2], _probability_between)
            bends[1, i, j] = (1 - up) * around[0] + up * around[1] - here
    bends = np.maximum(bends, 1e-12 * np.max(bends, axis=(1, 2), keepdims=True) + 1e-300)
    row, u = _chord(xs, place[0], _difference)
    column, v = _chord(ys, place[1], _difference)
    below, right = np.minimum(row + 1, len(xs) - 1), np.minimum(column + 1, len(ys) - 1)
    found = []
    for logs in np.log(bends / _STEP**2):
        at_row, at_next = ((1 - v) * logs[i, column] + v * logs[i, right] for i in (row, below))
        found.append(np.exp((1 - u) * at_row + u * at_next))
    return found[0], found[1]


def _nodes(x: Array, bend: Array, excess: float, fewest: int) -> Indices:
    """Indices of releases whose coordinates ``x`` are the nodes of the grid, in rising order.

    On average the excess of a cell of width s is s^2 / 6 times the sum of ``bend`` over its
    members. The best spacing is proportional to (density of this sum)^(-1/3).
    """
    values, index = np.unique(x, return_index=True)
    if len(values) <= 2:
        return index
    edges = np.linspace(values[0], values[-1], _BINS + 1)
    width = (values[-1] - values[0]) / _BINS
    density = np.histogram(x, edges, weights=bend)[0] / width
    density = np.cbrt(np.maximum(density, 1e-9 * density.max()))
    aimed = (density.sum() * width) ** 3
    number = math.sqrt(aimed / (6 * excess)) if 6 * excess > 0 else math.inf
    number = int(min(max(number, fewest), _MOST_NODES))
    if len(values) <= number:
        return index
    places = np.concatenate([[0.0], np.cumsum(density)])
    nodes = np.interp(np.linspace(0.0, places[-1], number), places, edges)
    above = np.clip(np.searchsorted(values, nodes), 0, len(values) - 1)
    # no cell spans a wide gap between releases
    gap = np.flatnonzero(np.diff(values) > 2 * (values[-1] - values[0]) / number)
    chosen = np.unique(np.concatenate([above, gap, gap + 1, [0, len(values) - 1]]))
    return index[chosen]


def _chord(nodes: Array, values: Array, between: Any) -> tuple[Indices, Array]:
    """For each value its interval, and the weight of the interval's upper end, rounded up."""
    if len(nodes) == 1:
        return np.zeros(len(values), dtype=np.int64), np.zeros(len(values))
    lower = np.clip(np.searchsorted(nodes, values, "right") - 1, 0, len(nodes) - 2)
    low, high = nodes[lower], nodes[lower + 1]
    whole = between(low, high)
    with np.errstate(divide="ignore", invalid="ignore"):
        weight = np.where(whole > 0, between(low, values) / whole, 1.0)
    return lower, np.clip(weight * (1 + _UP) + _UP, 0.0, 1.0)


def _difference(low: Array, high: Array) -> Array:
    return high - low


def _probability_between(low: Array, high: Array) -> Array:
    """2 (Phi(high / 2) - Phi(low / 2)) for positive numbers, without cancellation."""
    a, b = low / math.sqrt(8), high / math.sqrt(8)
    near, far = special.erf(b) - special.erf(a), special.erfc(a) - special.erfc(b)
    return np.asarray(np.where(a < 0.5, near, far))
