"""People with several records.

*A path of neighbours.* Data sets that differ in k records are the ends of k steps between
neighbours. If T(a) bounds the true-positive rate between neighbours at false-positive rate a, then
T(T(...T(a))), k times, bounds it between the ends (Dong, Roth, Su 2022, Theorem 2.14). That holds
for everything that was charged, under every guarantee, and is exact for Gaussians.
"""

from __future__ import annotations

import math

from .history import History
from .trade_off import TradeOff


def curves_of(history: History, curves: tuple[TradeOff, ...], size: int) -> tuple[TradeOff, ...]:
    """The trade-off curves of people with at most ``size`` records, from those of one record."""
    return tuple(curve.of_groups(size) for curve in curves)


def concentration(rho: float, order: float, size: int) -> tuple[float, float]:
    """(rho, order)-truncated concentration of ``size`` records (Bun, Dwork, Rothblum, Steinke
    2018): ``size``^2 * rho for orders below order / ``size``.
    """
    return (size**2 * rho, order / size) if order > size else (math.inf, math.inf)
