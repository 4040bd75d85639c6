"""Where a monotone function crosses zero: brackets by doubling, then scipy's ``brentq``."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

from scipy import optimize

MOST_STEPS = 2**40
_INFINITE = 1e3  # in the place of larger values, between which nothing can be interpolated


def largest(excess: Callable[[int], float], *, start: int = 1) -> int:
    """The largest whole n >= 1 at which the increasing function is at most 0, or 0 if none is.

    At most ``2 * MOST_STEPS``. ``start`` is a guess.
    """

    @cache
    def value(n: int) -> float:
        return min(excess(n), _INFINITE) or -math.ulp(0.0)  # 0 is to count as below

    low = high = max(start, 1)
    while value(low) > 0:
        if low == 1:
            return 0
        low, high = max(1, low // 2), low
    while value(high) <= 0:
        if high >= MOST_STEPS:
            return high
        low, high = high, 2 * high
    if high - low > 1:
        low = math.floor(
            optimize.brentq(lambda x: value(math.floor(x)), low, high, xtol=0.5, rtol=1e-15)
        )
    return low if value(low) <= 0 else low - 1


def crossing(
    excess: Callable[[float], float], start: float, least: float, most: float, precision: float
) -> float | None:
    """Where the falling function turns non-positive, or up to ``precision`` above.

    Args:
        excess: the function.
        start: a guess.
        least, most: where the search ends: ``least`` if the function is not positive there, and
            ``None`` if it is still positive at ``most``.
        precision: absolute.
    """
    value = cache(lambda x: min(excess(x), _INFINITE))
    low = high = start
    step = 0.7
    while value(high) > 0:
        if high >= most:
            return None
        low, high, step = high, min(high + step, most), 2 * step
    while value(low) <= 0:
        if low <= least:
            return least
        low, high, step = max(low - step, least), low, 2 * step
    found = float(optimize.brentq(value, low, high, xtol=precision / 2, rtol=1e-15))
    while value(found) > 0:
        found += precision / 2
    return found
