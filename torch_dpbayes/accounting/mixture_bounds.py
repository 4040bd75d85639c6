r"""Bounds on many sampled releases, each with its own rate and noise, by mixtures of a few.

A release between the corners of a grid of (rate, noise) is dominated by a mixture of the four
corners around it in which the drawn corner is announced. The excess is of second order in the
grid's spacing; rounding to the least private corner has an excess of first order.

* *Rate.* Both distributions of a pair are linear in q, and hockey-stick divergences are jointly
  convex, so the divergence at q lies below its chord between two rates.
* *Noise.* Let m be 1/z for the pairs "directed" and "symmetric", and 2/z for "antipodal" (so that
  delta(0) = q (2 Phi(m/2) - 1)), and t = Phi(m / 2). At each epsilon delta is a convex function of
  t. Directed: at q = 1 the derivative d delta / d t is proportional to exp(epsilon/2 - epsilon^2 /
  (2 m^2)), which grows with m, and sampling maps epsilon to another epsilon that does not depend on
  m. The reverse and the symmetric profile are this one at -epsilon, up to factors and terms without
  m. Antipodal: the threshold at which the divergence is attained moves with n = m / 2 so that,
  with u = n y - epsilon / 2, d log(d delta / d t) / d n = ((y - n tanh(u) / 2)^2 + 3/4 n^2
  tanh(u)^2) / n.

A mixture of pairs that dominates each release dominates their composition too (Zhu, Dong, Wang
2022, Theorem 10). The characteristic function of a composition is then the product over the
releases of sum_k w_k phi_k. Releases of one cell whose weights are close form a group; its n
factors are replaced by the n-th power of their mean. With x_i the relative deviations from the
mean, which sum to 0, and s^2 = sum |x_i|^2, that changes the logarithm of the product by at most
s^2 / (2 (1 - s)), because |log(1 + x) - x| <= |x|^2 / (2 (1 - |x|)).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

from .dominating_pairs import Array, Sampled, SampledKind

Indices = NDArray[np.int64]

_BINS = 400
_MORE = 8  # times as many noises, where there are few rates
_WORTH = 0.7  # corners for each release, up to which mixtures are faster
_MOST_GROUPS = 4096  # releases up to which each is a group of its own
_LARGEST_RATE = 1 - 1e-6  # of a corner, unless a release has a larger one
_DOWN = 1 - 4e-16  # factor that rounds the noise of a corner down
_UP = 1e-12  # relative and absolute rounding of the weight on the less private corner


class Mixtures(NamedTuple):
    """Groups of releases, and the mixture of four corners that dominates each member on average."""

    corners: list[Sampled]
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


def mixtures(sampled: list[tuple[Sampled, int]], nodes: int) -> Mixtures | None:
    """The mixtures, or ``None`` if there are hardly fewer corners than different releases.

    Args:
        sampled: releases and how often each occurs.
        nodes: rates, and noises, of the grid of corners, about.
    """
    found = []
    for kind in sorted({pair.kind for pair, _ in sampled}):
        chosen = [(pair.rate, pair.noise, n) for pair, n in sampled if pair.kind == kind]
        rate, noise, count = (np.array(column) for column in zip(*chosen, strict=True))
        found.append(_placed(kind, rate, noise, count, nodes))
    if sum(len(part.corners) for part in found) >= _WORTH * len(sampled):
        return None
    starts = np.cumsum([0, *(len(part.corners) for part in found)])
    return Mixtures(
        [corner for part in found for corner in part.corners],
        np.concatenate([part.among + start for part, start in zip(found, starts, strict=False)]),
        *(np.concatenate([part[i] for part in found]) for i in (2, 3, 4)),
    )


def _placed(kind: SampledKind, rate: Array, noise: Array, count: Indices, nodes: int) -> Mixtures:
    sensitivity = 2.0 if kind == "antipodal" else 1.0
    shift = sensitivity / noise
    # coordinates in which the cost of a release of small loss is exp(2 (x + y))
    place = np.log(rate), np.log(shift) + _log_expm1_over(2 / noise**2) / 2
    # the cost that decides: flatter where losses are large and grow less, steeper far out, where
    # the largest ones count most; the grid serves both
    size = np.exp(place[0] - place[0].max() + place[1] - place[1].max())
    near, far = count * size**1.5, count * size**4
    cost = near / near.sum() + far / far.sum()
    column = _nodes(place[0], cost, nodes)
    row = _nodes(place[1], cost, min(nodes**2 // len(column), _MORE * nodes))
    rates, shifts = rate[column], shift[row]
    rates[-1], shifts[-1] = rate.max(), shift.max()  # of numbers with equal logarithms
    column, of_rate = _chord(rates, rate, lambda low, high: high - low)
    row, of_shift = _chord(shifts, shift, _probability_between)
    step = len(shifts)
    corners = [
        np.minimum(column + i, len(rates) - 1) * step + np.minimum(row + j, step - 1)
        for i in (0, 1)
        for j in (0, 1)
    ]
    weights = [
        (of_rate if i else 1 - of_rate) * (of_shift if j else 1 - of_shift)
        for i in (0, 1)
        for j in (0, 1)
    ]
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


def four_corners(pair: Sampled, ratio: float) -> tuple[list[float], list[Sampled]]:
    """The corners of a geometric grid around one release, and the weights of their mixture that
    dominates it.
    """
    sensitivity = 2.0 if pair.kind == "antipodal" else 1.0
    shift = sensitivity / pair.noise
    rates, shifts = _ends(pair.rate, ratio), _ends(shift, ratio)
    rates[1] = max(min(rates[1], _LARGEST_RATE), pair.rate)
    _, (u,) = _chord(rates, np.array([pair.rate]), lambda low, high: high - low)
    _, (v,) = _chord(shifts, np.array([shift]), _probability_between)
    corners = [
        Sampled(pair.kind, float(q), float(sensitivity / m) * _DOWN) for q in rates for m in shifts
    ]
    return [float(a * b) for a in (1 - u, u) for b in (1 - v, v)], corners


def _ends(value: float, ratio: float) -> Array:
    cell = math.floor(math.log(value) / math.log(ratio))
    return np.array([min(ratio**cell, value), max(ratio ** (cell + 1), value)])


def _groups(cell: Indices, u: Array, v: Array) -> tuple[Indices, Indices]:
    """A member of each group, and the group of each release: members of one cell whose weights
    ``u`` and ``v`` lie in one square of a grid as fine as the number of groups allows.
    """
    if len(cell) <= _MOST_GROUPS:
        return np.arange(len(cell)), np.arange(len(cell))
    for parts in (64, 45, 32, 23, 16, 11, 8, 5, 3, 2, 1):
        squares = np.minimum((u * parts).astype(np.int64), parts - 1) * parts
        squares += np.minimum((v * parts).astype(np.int64), parts - 1)
        _, first, group = np.unique(
            cell * parts**2 + squares, return_index=True, return_inverse=True
        )
        if len(first) <= _MOST_GROUPS:
            break
    return first, group


def _nodes(x: Array, cost: Array, number: int) -> Indices:
    """Indices of releases whose coordinates ``x`` are the nodes of the grid, in rising order.

    The excess of a cell of width s is about s^2 / 6 times the cost of its members, twice over. So
    the best spacing is proportional to the density of the cost to the power -1/3.
    """
    values, index = np.unique(x, return_index=True)
    if len(values) <= number:
        return index
    edges = np.linspace(values[0], values[-1], _BINS + 1)
    density = np.cbrt(np.histogram(x, edges, weights=cost)[0])
    density = np.maximum(density, 1e-3 * density.max())
    places = np.concatenate([[0.0], np.cumsum(density)])
    nodes = np.interp(np.linspace(0.0, places[-1], number), places, edges)
    above = np.clip(np.searchsorted(values, nodes), 0, len(values) - 1)
    # no cell reaches over a wide gap between releases
    gap = np.flatnonzero(np.diff(values) > 2 * (values[-1] - values[0]) / number)
    chosen = np.unique(np.concatenate([above, gap, gap + 1, [0, len(values) - 1]]))
    return index[chosen]


def _chord(nodes: Array, values: Array, between: Any) -> tuple[Indices, Array]:
    """The interval that holds each value, and its weight at the upper end, rounded up."""
    if len(nodes) == 1:
        return np.zeros(len(values), dtype=np.int64), np.zeros(len(values))
    lower = np.clip(np.searchsorted(nodes, values, "right") - 1, 0, len(nodes) - 2)
    low, high = nodes[lower], nodes[lower + 1]
    whole = between(low, high)
    with np.errstate(divide="ignore", invalid="ignore"):
        weight = np.where(whole > 0, between(low, values) / whole, 1.0)
    return lower, np.clip(weight * (1 + _UP) + _UP, 0.0, 1.0)


def _probability_between(low: Array, high: Array) -> Array:
    """2 (Phi(high / 2) - Phi(low / 2)) of positive numbers, without loss of digits."""
    a, b = low / math.sqrt(8), high / math.sqrt(8)
    near, far = special.erf(b) - special.erf(a), special.erfc(a) - special.erfc(b)
    return np.asarray(np.where(a < 0.5, near, far))


def _log_expm1_over(x: Array) -> Array:
    """log(expm1(x) / x)."""
    return np.asarray(x + np.log(-np.expm1(-x) / x))
