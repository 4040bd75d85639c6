"""Releases that fail outright with some probability, beside which others are priced.

With f the probability that one of them fails, delta(epsilon) = f + (1 - f) * (delta(epsilon) of the
others).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction

from .bounded import largest_sum
from .choices import SMALLEST_DELTA
from .pairs import Failure, NonPrivate, Pair

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
    if not upper:
        return -math.expm1(none) * (1 - _FAILURE_ERROR)
    total = sum((n * Fraction(failure.delta) for failure, n in failures.items()), Fraction(0))
    together = float(total)
    if together < total:
        together = math.nextafter(together, math.inf)
    return min(-math.expm1(none) * (1 + _FAILURE_ERROR), together, 1.0)


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
    left = left_of(delta, failed)
    return price(others, left) if left >= SMALLEST_DELTA else largest_sum(others)


def left_of(delta: float, failed: float) -> float:
    """The delta that other releases may have beside failures of probability ``failed`` <=
    ``delta``, rounded down.
    """
    return (delta - failed) / (1 - failed) * (1 - 1e-15)


def without_delta(counts: Mapping[Pair, int], delta: float) -> str:
    """A sentence for a person where epsilon is infinite because releases that may fail
    outright use all of ``delta``, else empty.
    """
    failures, others = apart(counts)
    failed = failing(failures)
    if (
        not failed
        or NonPrivate() in others
        or (
            failed <= delta
            and (left_of(delta, failed) >= SMALLEST_DELTA or math.isfinite(largest_sum(others)))
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
    if not (beside := price(others) if others else 0.0):
        return failed
    return min((failed + (1 - failed) * beside) * (1 + 1e-15), 1.0)
