"""Releases whose privacy loss is bounded: what they cost without a grid.

Basic composition adds their largest losses. Randomised response, the worst of all releases that are
epsilon-differentially private, has two losses, so that a few kinds of it compose exactly (Kairouz,
Oh, Viswanath 2015; Murtagh, Vadhan 2016).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction

import numpy as np
from scipy import optimize, special, stats

from .pairs import Array, Pair, Pure, largest_loss

_MOST_LOSSES = 2**16  # different sums of losses that are looked at one by one
_MASS_ERROR = 1e-9  # relative error of one of their masses, by far


def sum_as_written(terms: Iterable[tuple[float, int]]) -> float:
    """Sum of count * value, rounded up; each number is the decimal that Python writes it as.

    So three times 0.1 is 0.3, which as sums of floats it is not.
    """
    total = sum((count * Fraction(repr(value)) for value, count in terms), Fraction(0))
    try:
        found = float(total)
    except OverflowError:
        return math.inf
    return found if Fraction(repr(found)) >= total else math.nextafter(found, math.inf)


def largest_sum(counts: Mapping[Pair, int]) -> float:
    """What the privacy loss of all releases together never passes."""
    terms = [(largest_loss(pair), count) for pair, count in counts.items() if count]
    if any(math.isinf(loss) for loss, _ in terms):
        return math.inf
    return sum_as_written(terms)


def split(counts: Mapping[Pair, int]) -> tuple[dict[Pair, int], dict[Pair, int]]:
    """Releases whose loss is bounded, and the others."""
    bounded = {pair: count for pair, count in counts.items() if largest_loss(pair) < math.inf}
    return bounded, {pair: count for pair, count in counts.items() if pair not in bounded}


def least_epsilon(
    counts: Mapping[Pair, int], price: Callable[[Mapping[Pair, int]], float]
) -> float:
    """The smaller of two bounds on epsilon: the price of all together, or what is bounded at its
    largest loss, beside the price of the rest, which has all of delta.
    """
    found = price(counts)
    bounded, rest = split(counts)
    if not bounded or (largest := largest_sum(bounded)) >= found:
        return found
    if not rest:
        return largest
    return min(found, math.nextafter(largest + price(rest), math.inf))


def least_delta(
    counts: Mapping[Pair, int], epsilon: float, price: Callable[[Mapping[Pair, int], float], float]
) -> float:
    """The smaller of the same two bounds on delta at ``epsilon``."""
    bounded, rest = split(counts)
    largest = largest_sum(bounded)
    if not rest and largest <= epsilon:
        return 0.0
    found = price(counts, epsilon)
    if bounded and rest and largest < epsilon:
        found = min(found, price(rest, math.nextafter(epsilon - largest, 0.0)))
    return found


class RandomizedResponses:
    """The composition of releases of which no more is known than that they are pure, exactly.

    delta(epsilon) is the sum of mass * (1 - e^(epsilon - loss)) over the losses above epsilon.
    """

    def __init__(self, counts: Mapping[Pair, int]) -> None:
        losses, masses = np.zeros(1), np.ones(1)
        for pair, count in counts.items():
            epsilon = largest_loss(pair)
            worse = np.arange(count + 1)
            mass = stats.binom.pmf(worse, count, float(special.expit(epsilon)))
            losses = np.add.outer(losses, epsilon * (2.0 * worse - count)).ravel()
            masses = np.multiply.outer(masses, mass).ravel()
        order = np.argsort(losses)
        self._losses: Array = losses[order]
        self._masses: Array = masses[order] * (1 + _MASS_ERROR)

    @classmethod
    def of(cls, counts: Mapping[Pair, int]) -> RandomizedResponses | None:
        """The composition, or ``None`` where it has other releases, or too many losses."""
        if not counts or not all(isinstance(pair, Pure) for pair in counts):
            return None
        losses = math.prod(count + 1 for count in counts.values())
        return cls(counts) if losses <= _MOST_LOSSES else None

    def delta(self, epsilon: float) -> float:
        """An upper bound on delta, by round-off alone."""
        above = np.searchsorted(self._losses, epsilon, "right")
        terms = self._masses[above:] * -np.expm1(epsilon - self._losses[above:])
        return min(float(terms.sum()), 1.0)

    def epsilon(self, delta: float) -> float:
        """An upper bound on epsilon, by round-off alone."""
        if self.delta(0.0) <= delta:
            return 0.0
        largest = float(self._losses[-1])
        solution = optimize.brentq(
            lambda epsilon: self.delta(epsilon) - delta, 0.0, largest, xtol=1e-14, rtol=1e-14
        )
        margin = 1e-14 * (1 + largest)
        while self.delta(solution) > delta:
            solution, margin = solution + margin, 2 * margin
        return float(solution)
