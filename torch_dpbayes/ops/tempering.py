"""The largest tempering at which everything on an accountant meets a target."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from ..accounting import bounds, renyi
from ..accounting.accountant import PrivacyAccountant
from ..accounting.bounds import LARGEST_EXCESS
from ..accounting.calibration import counts_of, crossing
from ..accounting.dominating_pairs import Pair, added
from ..accounting.events import DpEvent, Method
from ..errors import ArgumentError

LEAST_TEMPERING = 1e-9
PRECISION = 1e-7  # relative, of the tempering


def epsilon_with(accountant: PrivacyAccountant, delta: float) -> Callable[..., float]:
    """ε at ``delta`` of what the accountant holds now and of given events, as it computes it.

    Raises:
        ArgumentError: the accountant promises its budget as a whole, and nothing below it.
    """
    if accountant.is_later_job or accountant.guarantee != "fixed":
        raise ArgumentError(
            "after adaptive charges, or for a later job, the guarantee is always the accountant's"
            " whole budget: leave out epsilon= and choose a certificate that fits the budget.",
            code="budget-whole",
        )
    relation = accountant.neighboring
    held = counts_of(accountant.history, relation)

    def epsilon(*events: DpEvent) -> float:
        counts = added(held, counts_of([(event, 1) for event in events], relation))
        return _upper(frozenset(counts.items()), delta, accountant.method)

    return epsilon


@lru_cache(maxsize=64)  # before and after a charge the same is asked again
def _upper(counts: frozenset[tuple[Pair, int]], delta: float, method: Method) -> float:
    return (renyi if method == "rdp" else bounds).upper_epsilon(dict(counts), delta)


def largest_tempering(cost: Callable[[float], float], epsilon: float) -> float | None:
    """The largest ρ in [1e-9, 1] at which ``cost(ρ)``, not falling and infinite where nothing is
    certified, is at most ``epsilon``: to a relative precision of 1e-7 and never above. None: not
    even the least is.
    """

    def excess(minus_log: float) -> float:  # nearly linear, as ε is nearly proportional to ρ
        ratio = cost(math.exp(-minus_log)) / epsilon
        return math.log(ratio) if ratio > 0 else -LARGEST_EXCESS

    found = crossing(excess, 0.0, -math.log(LEAST_TEMPERING), PRECISION)
    return None if found is None else math.exp(-found)
