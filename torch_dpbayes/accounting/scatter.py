r"""Many sampled releases, each with a noise and a rate of its own, from few at a grid's corners.

A release between four corners of a grid of (rate, noise) is dominated by a lottery among them whose
outcome is told. The excess is of second order in the grid's spacing, where rounding to the least
private corner costs a first-order one.

* *Rate.* Both laws of a pair are linear in q, and hockey-stick divergences are jointly convex, so a
  divergence at q lies below its chord between two rates.
* *Noise.* Let m be 1/z for the pairs "directed" and "symmetric", and 2/z for "antipodal" (so that
  delta(0) = q (2 Phi(m/2) - 1)), and t = Phi(m / 2). At each epsilon delta is a convex function of
  t. Directed: at q = 1 the derivative d delta / d t is proportional to exp(epsilon/2 - epsilon^2 /
  (2 m^2)), which grows with m, and sampling maps epsilon to another epsilon, whatever m is; the
  reverse and the symmetric profile are this one at -epsilon, times and plus what does not depend on
  m. Antipodal: the threshold at which the divergence is attained moves with n = m / 2 so that,
  with u = n y - epsilon / 2, d log(d delta / d t) / d n = ((y - n tanh(u) / 2)^2 + 3/4 n^2
  tanh(u)^2) / n.

A lottery over pairs dominates the release, so compositions of lotteries dominate compositions
(Zhu, Dong, Wang 2022, Theorem 10).
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

from .pairs import Array, Sampled, SampledKind

_FINEST = 0.05  # spacing of the grid, in logarithms
_COARSER, _COARSEST = 1.1, 1e3
_DOWN = 1 - 4e-16  # by which a corner's noise is rounded down
_UP = 1e-12  # by which a weight on the less private corner is rounded up


class Lotteries(NamedTuple):
    """What stands for each of so many releases: a lottery among four of the corners."""

    corners: list[Sampled]
    among: NDArray[np.int64]  # (releases, 4)
    weights: Array  # (releases, 4), which add up to 1
    counts: NDArray[np.int64]  # (releases,)


def lotteries(sampled: list[tuple[Sampled, int]], most: int) -> Lotteries | None:
    """Lotteries among at most ``most`` corners, or ``None`` where the releases themselves are no
    more than the corners.
    """
    columns = [_columns(sampled, kind) for kind in sorted({pair.kind for pair, _ in sampled})]
    spacing = _FINEST
    while True:
        found = [_placed(*of_kind, spacing) for of_kind in columns]
        total = sum(len(part.corners) for part in found)
        if total <= most or spacing > _COARSEST:
            break
        # halving the number of rates and of noises leaves a quarter of the corners, or more
        spacing *= max(_COARSER, 0.95 * math.sqrt(total / most))
    if total >= len(sampled) <= most:
        return None
    starts = np.cumsum([0, *(len(part.corners) for part in found)])
    return Lotteries(
        [corner for part in found for corner in part.corners],
        np.concatenate([part.among + start for part, start in zip(found, starts, strict=False)]),
        np.concatenate([part.weights for part in found]),
        np.concatenate([part.counts for part in found]),
    )


def _columns(
    sampled: list[tuple[Sampled, int]], kind: SampledKind
) -> tuple[SampledKind, Array, Array, NDArray[np.int64]]:
    """Rates, noises and counts of the releases of one kind."""
    chosen = [(pair.rate, pair.noise, count) for pair, count in sampled if pair.kind == kind]
    rate, noise, count = (np.array(column) for column in zip(*chosen, strict=True))
    return kind, rate, noise, count.astype(np.int64)


def _placed(
    kind: SampledKind, rate: Array, noise: Array, count: NDArray[np.int64], spacing: float
) -> Lotteries:
    sensitivity = 2.0 if kind == "antipodal" else 1.0
    shift = sensitivity / noise
    # spaced as the logarithm of what a release adds at the tilts that decide
    rates = np.exp(_grid(np.log(rate), 0.5 * spacing))
    rates[0], rates[-1] = rate.min(), rate.max()
    shifts = sensitivity * np.sqrt(_softplus(_grid(_log_expm1(2 / noise**2), spacing)) / 2)
    shifts[0], shifts[-1] = shift.min(), shift.max()
    column, of_rate = _chord(rates, rate, lambda low, high: high - low)
    row, of_shift = _chord(shifts, shift, _probability_between)
    step = len(shifts)
    cells = [
        (np.minimum(column + i, len(rates) - 1) * step + np.minimum(row + j, step - 1))
        for i in (0, 1)
        for j in (0, 1)
    ]
    weights = np.stack(
        [
            (of_rate if i else 1 - of_rate) * (of_shift if j else 1 - of_shift)
            for i in (0, 1)
            for j in (0, 1)
        ],
        axis=1,
    )
    used, index = np.unique(np.stack(cells, axis=1), return_inverse=True)
    corners = [
        Sampled(kind, float(rates[cell // step]), float(sensitivity / shifts[cell % step]) * _DOWN)
        for cell in used.tolist()
    ]
    return Lotteries(corners, index.reshape(-1, 4), weights, count)


def _grid(values: Array, spacing: float) -> Array:
    low, high = float(values.min()), float(values.max())
    if low == high:
        return np.array([low])
    return np.linspace(low, high, 2 + int((high - low) / spacing))


def _chord(nodes: Array, values: Array, between: Any) -> tuple[NDArray[np.int64], Array]:
    """In which interval each value lies, and its weight at the upper end, rounded up."""
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


def _log_expm1(x: Array) -> Array:
    return np.asarray(x + np.log(-np.expm1(-x)))


def _softplus(x: Array) -> Array:
    return np.logaddexp(0.0, x)


def representatives(sampled: list[tuple[Sampled, int]], most: int) -> list[tuple[Sampled, int]]:
    """A few releases that cost about what all together do. No bound."""
    side = max(int(math.sqrt(most)), 1)
    found = []
    for kind in sorted({pair.kind for pair, _ in sampled}):
        chosen = sorted(
            ((pair.rate, pair.noise, count) for pair, count in sampled if pair.kind == kind)
        )
        for strip in _split(chosen, side):
            for cell in _split(sorted(strip, key=lambda member: member[1]), side):
                rate, noise, count = (np.array(column) for column in zip(*cell, strict=True))
                share = count * rate**2
                growth = np.expm1(np.minimum(1 / noise**2, 700.0))
                mean = float((share * growth).sum() / share.sum())
                found.append(
                    (
                        Sampled(
                            kind,
                            math.sqrt(float(share.sum() / count.sum())),
                            max(1 / math.sqrt(math.log1p(mean)), float(noise.min())),
                        ),
                        int(count.sum()),
                    )
                )
    return found


def _split(members: list[Any], parts: int) -> list[list[Any]]:
    edges = np.linspace(0, len(members), min(parts, len(members)) + 1).astype(int)
    return [members[a:b] for a, b in pairwise(edges)]
