"""The largest tempering at which everything on an accountant meets a target."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache, lru_cache, partial

from scipy import optimize

from ..accounting import bounds, renyi
from ..accounting.accountant import PrivacyAccountant
from ..accounting.dominating_pairs import Pair, added, dominating_pair
from ..accounting.events import DpEvent, Method, elementary
from ..errors import ArgumentError

Counts = dict[Pair, int]

LEAST_TEMPERING = 1e-9
PRECISION = 1e-7  # relative, of the tempering
_FAR = 40.0  # log of cost / ε, in whose place larger ones count as this
_WIDEST = 3.0  # of a first step towards an interval around the solution, in logs


def epsilon_with(
    accountant: PrivacyAccountant, delta: float
) -> Callable[[Iterable[DpEvent]], float]:
    """ε at ``delta`` of what the accountant holds now and of given events, as it computes it.

    Raises:
        ArgumentError: the accountant promises its budget as a whole, and nothing below it.
    """
    if accountant.is_later_job or accountant.guarantee != "fixed":
        raise ArgumentError(
            "adaptive charges, or those of a later job, are guaranteed by the accountant's budget"
            " as a whole: leave out epsilon= and choose a certificate that fits the budget.",
            code="budget-whole",
        )
    relation, method = accountant.neighboring, accountant.method
    pair_of = cache(partial(dominating_pair, neighboring=relation))  # trials share parts

    def pairs(counts: Counts, event: DpEvent, count: int) -> Counts:
        more: Counts = {}
        for part, times in elementary(event, count):
            pair = pair_of(part)
            more[pair] = more.get(pair, 0) + times
        return added(counts, more)

    held: Counts = {}
    for charge in accountant.history:
        held = pairs(held, charge.event, charge.count)

    def epsilon(events: Iterable[DpEvent]) -> float:
        counts = held
        for event in events:
            counts = pairs(counts, event, 1)
        return _upper(frozenset(counts.items()), delta, method) if counts else 0.0

    return epsilon


@lru_cache(maxsize=64)  # before and after a charge the same is asked again
def _upper(counts: frozenset[tuple[Pair, int]], delta: float, method: Method) -> float:
    return (renyi if method == "rdp" else bounds).upper_epsilon(dict(counts), delta)


def largest_tempering(cost: Callable[[float], float], epsilon: float) -> float | None:
    """The largest ρ in [1e-9, 1] at which ``cost(ρ)`` is at most ``epsilon``, to a relative
    precision of 1e-7 and never above; None: not even the least is.

    Args:
        cost: ε as a function of ρ, not falling; infinite where nothing is certified.
        epsilon: the target.
    """

    tried: dict[float, float] = {}  # by the logarithm of ρ

    def excess(log: float) -> float:  # nearly linear, as ε is nearly proportional to ρ
        if log not in tried:
            tried[log] = cost(math.exp(log))
        ratio = tried[log] / epsilon
        return min(math.log(ratio), _FAR) if ratio > math.exp(-_FAR) else -_FAR

    if excess(0.0) <= 0:
        return 1.0
    least = math.log(LEAST_TEMPERING)
    low, factor = 0.0, 1.05
    while excess(low) > 0:
        if low == least:
            return None
        width = min(factor * excess(low), _WIDEST) + PRECISION
        low, high, factor = max(low - width, least), low, 2 * factor
    optimize.brentq(excess, low, high, xtol=PRECISION / 2, rtol=1e-15)
    # the accountant's own number decides: the lower end of the last interval meets the target
    return math.exp(max(log for log, found in tried.items() if found <= epsilon))
