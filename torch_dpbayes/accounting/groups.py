"""People with several records.

*A path of neighbours.* Data sets that differ in k records are the ends of k steps between
neighbours. If T(a) bounds the true-positive rate between neighbours at false-positive rate a, then
T(T(...T(a))), k times, bounds it between the ends (Dong, Roth, Su 2022, Theorem 2.14). That holds
for everything that was charged, under every guarantee, and is exact for Gaussians.

*Sampled sums.* Under add-or-remove-one, each of k records of a person joins a Poisson batch by
itself: the pair (sum over j of Binomial(k, q)(j) N(j, z^2), N(0, z^2)) dominates one release, and
is tight (Ganesh 2024). Where all releases are such sums, or Gaussian ones (whose mu counts k
times), these pairs are composed too, and the smaller bound counts. What is known of a release by a
pair only, such as a failure beside a pure loss, is not: the parts of a pair do not stand for
releases of their own.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

from .events import GaussianDpEvent, MuGaussianDpEvent, PoissonSampledDpEvent
from .history import History
from .levels import EXACT_LEVELS
from .pairs import Gaussian, GaussianMixture, Pair, Sampled
from .profiles import profiles, trade_offs
from .trade_off import TradeOff

_LEAST_CHANCE = 1e-280


def curves_of(
    history: History, curves: tuple[TradeOff, ...], size: int, delta: float
) -> tuple[TradeOff, ...]:
    """The trade-off curves of people with at most ``size`` records, from those of one record;
    those with the smaller epsilon at ``delta``.
    """
    path = tuple(curve.of_groups(size) for curve in curves)
    pairs = _pairs(history, size)
    if pairs is None:
        return path
    composed = trade_offs(*profiles(frozenset(pairs.items()), "pld"))
    return min(composed, path, key=lambda found: max(curve.epsilon(delta) for curve in found))


def _pairs(history: History, size: int) -> dict[Pair, int] | None:
    """The pairs that dominate releases for ``size`` records; ``None``: not all are known."""
    if history.guarantee != "fixed" or history.settings.method != "pld":
        return None
    found: dict[Pair, int] = {}
    for (event, _, _), count in history.charges.items():
        if not isinstance(event, PoissonSampledDpEvent | GaussianDpEvent | MuGaussianDpEvent):
            return None
        pair = _pair(history.pair(event), size)
        if pair is None:
            return None
        found[pair] = found.get(pair, 0) + count
    return found if len(found) <= EXACT_LEVELS else None


def _pair(pair: Pair, size: int) -> Pair | None:
    if isinstance(pair, Gaussian):
        return Gaussian(size * pair.mu)
    if not isinstance(pair, Sampled) or pair.kind != "directed":
        return None
    joined = np.arange(1, size + 1)
    chances = stats.binom.pmf(joined, size, pair.rate)
    if chances.min() < _LEAST_CHANCE:
        return None
    return GaussianMixture(tuple((joined / pair.noise).tolist()), tuple(chances.tolist()))


def concentration(rho: float, order: float, size: int) -> tuple[float, float]:
    """(rho, order)-truncated concentration of ``size`` records (Bun, Dwork, Rothblum, Steinke
    2018): ``size``^2 * rho for orders below order / ``size``.
    """
    return (size**2 * rho, order / size) if order > size else (math.inf, math.inf)
