"""Trade-off curves: the largest true-positive rate of an attack at each false-positive rate.

From privacy profiles: if P(S) <= e^epsilon Q(S) + delta for every S, then a test that rejects Q on
S has true-positive rate P(S) at most e^epsilon times its false-positive rate Q(S), plus delta; and
with Q and P exchanged, for the complement of S, at most 1 - e^-epsilon (1 - Q(S) - delta'). The
curve is the lower envelope of such lines. Leaving lines out only raises it, and round-off is
rounded up, so it is an upper bound wherever the profiles are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy import special

from .pairs import Array

_ROUND_OFF = 1e-12  # relative, of what is computed of a curve; by far
_MOST_VERTICES = 20_000
LARGEST_LOSS = 700.0  # whose exponential is a float
LEAST_SLACK = 1e-9  # down to which mu is told apart


@dataclass(frozen=True)
class Profile:
    """``deltas[i]`` bounds the hockey-stick divergence of P from Q at ``epsilons[i]`` >= 0."""

    epsilons: Array
    deltas: Array

    def ending(self, largest: float) -> Profile:
        """The same, where the loss never passes ``largest``."""
        if largest == math.inf:
            return self
        return Profile(np.append(self.epsilons, largest), np.append(self.deltas, 0.0))


@dataclass(frozen=True)
class TradeOff:
    """A concave, piecewise linear upper bound: between the vertices
    ``(false_positive_rates[i], true_positive_rates[i])``, from rate 0 to rate 1.
    """

    false_positive_rates: Array
    true_positive_rates: Array

    @classmethod
    def of_profiles(cls, forward: Profile, backward: Profile) -> TradeOff:
        """The curve of tests of Q against P, from the profile of (P, Q) and that of (Q, P)."""
        near = forward.epsilons <= LARGEST_LOSS
        back = backward.epsilons <= LARGEST_LOSS
        small = np.exp(-backward.epsilons[back])
        # the exponential of a tiny loss, rounded, would say that there is none
        steep = np.nextafter(np.exp(forward.epsilons[near]), np.inf)
        slopes = np.concatenate([steep, small, [0.0]])
        intercepts = np.concatenate(
            [
                np.clip(forward.deltas[near], 0.0, 1.0),
                -np.expm1(-backward.epsilons[back])
                + small * np.clip(backward.deltas[back], 0.0, 1.0),
                [1.0],
            ]
        )
        return cls.of_lines(slopes, intercepts)

    @classmethod
    def of_lines(cls, slopes: Array, intercepts: Array) -> TradeOff:
        """The minimum of lines; ``intercepts`` are at least 0."""
        order = np.lexsort((intercepts, -slopes))
        return cls(*_envelope(slopes[order].tolist(), intercepts[order].tolist()))

    @property
    def vertices(self) -> tuple[Array, Array]:
        """Both rates."""
        return self.false_positive_rates, self.true_positive_rates

    def __call__(self, false_positive_rate: Array | float) -> Array:
        """The true-positive rate at most, at false-positive rates in [0, 1]."""
        found = np.interp(false_positive_rate, self.false_positive_rates, self.true_positive_rates)
        return np.minimum(found * (1 + _ROUND_OFF), 1.0)

    def after(self, other: TradeOff) -> TradeOff:
        """``self(other(rate))`` as a curve: from one data set to a neighbour, and on to the next
        (Dong, Roth, Su 2022, Theorem 2.14).
        """
        before, between = other.vertices
        # where ``other`` arrives at a vertex of this curve
        rising = np.concatenate([[True], np.diff(between) > 0])
        inner = np.interp(self.false_positive_rates, between[rising], before[rising])
        inner = inner[self.false_positive_rates >= between[0]]
        rates = np.unique(np.concatenate([before, inner]))
        return TradeOff(rates, self(other(rates))).thinned()

    def thinned(self) -> TradeOff:
        """A curve above this one, of few enough vertices."""
        rates, powers = self.vertices
        if len(rates) <= _MOST_VERTICES:
            return self
        # Every second one, raised by as much as what is left out lies above the lines between them.
        kept = np.unique(np.linspace(0, len(rates) - 1, _MOST_VERTICES // 2).astype(np.int64))
        above = powers / np.maximum(np.interp(rates, rates[kept], powers[kept]), 1e-300)
        between = np.maximum.reduceat(above, kept[:-1])
        factors = np.maximum(np.append(between, 1.0), np.append(1.0, between)) * (1 + _ROUND_OFF)
        return TradeOff(rates[kept], powers[kept] * factors)

    def of_groups(self, size: int) -> TradeOff:
        """The curve where data sets are ``size`` neighbours apart."""
        curve, power, left = None, self, size
        while True:
            if left & 1:
                curve = power if curve is None else curve.after(power)
            left >>= 1
            if not left:
                assert curve is not None
                return curve
            power = power.after(power)

    @property
    def advantage(self) -> float:
        """The largest difference of the two rates."""
        return float(np.clip(np.max(self.true_positive_rates - self.false_positive_rates), 0, 1))

    def best_guess(self, prior: float) -> float:
        """The probability with which the best attack is right, where P holds with probability
        ``prior``, else Q.
        """
        right = prior * self.true_positive_rates + (1 - prior) * (1 - self.false_positive_rates)
        return float(min(np.max(right) * (1 + _ROUND_OFF), 1.0))

    def delta(self, epsilon: float) -> float:
        """The hockey-stick divergence at ``epsilon`` at most."""
        with np.errstate(over="ignore", invalid="ignore"):
            excess = (
                self.true_positive_rates
                - math.exp(min(epsilon, LARGEST_LOSS)) * self.false_positive_rates
            )
        return float(np.clip(np.max(excess), 0.0, 1.0))

    def epsilon(self, delta: float) -> float:
        """The least epsilon >= 0 with ``delta(epsilon) <= delta``; infinite if there is none."""
        above = self.true_positive_rates > delta
        rates, excess = self.false_positive_rates[above], self.true_positive_rates[above] - delta
        if not len(rates):
            return 0.0
        if rates[0] <= 0:
            return math.inf
        slope = float(np.max(excess / rates))
        return max(math.log(slope) * (1 + _ROUND_OFF), 0.0) if slope > 0 else 0.0

    def mu(self, slack: float) -> float:
        """The least mu of a Gaussian whose true-positive rate, and ``slack`` more, is nowhere
        passed; infinite if there is none.
        """
        slack = max(slack, LEAST_SLACK)
        above = self.true_positive_rates > slack
        rates, powers = self.false_positive_rates[above], self.true_positive_rates[above] - slack
        if not len(rates):
            return 0.0
        if rates[0] <= 0:
            return math.inf
        # A line between two points of the curve stays below a concave function that is above both.
        with np.errstate(invalid="ignore"):
            mus = special.ndtri(powers) - special.ndtri(rates)
        return max(float(np.nanmax(mus)) * (1 + 1e-9), 0.0)


def _envelope(slopes: list[float], intercepts: list[float]) -> tuple[Array, Array]:
    """Vertices of the minimum of lines on [0, 1], which are sorted by falling slope."""
    kept: list[int] = []

    def meet(first: int, second: int) -> float:
        fall = slopes[first] - slopes[second]
        return (intercepts[second] - intercepts[first]) / fall if fall > 0 else 0.0

    for i in range(len(slopes)):
        if kept and intercepts[i] <= intercepts[kept[-1]]:
            # nowhere above the earlier ones that start higher
            while kept and intercepts[i] <= intercepts[kept[-1]]:
                kept.pop()
        elif kept and slopes[i] == slopes[kept[-1]]:
            continue
        while len(kept) > 1 and meet(kept[-1], i) <= meet(kept[-2], kept[-1]):
            kept.pop()
        kept.append(i)
    rates, powers = [0.0], [intercepts[kept[0]]]
    for first, second in pairwise(kept):
        rate = meet(first, second)
        if rate >= 1.0:
            break
        rates.append(rate)
        # the larger of the two, so that what lies between two vertices is above the line there
        powers.append(
            max(
                intercepts[first] + slopes[first] * rate,
                intercepts[second] + slopes[second] * rate,
            )
            * (1 + _ROUND_OFF)
        )
    return np.array([*rates, 1.0]), np.minimum([*powers, 1.0], 1.0)
