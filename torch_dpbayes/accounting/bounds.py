"""Epsilon and delta of a history by privacy loss distributions: upper bounds, and lower ones.

Upper bounds discretise so that privacy only looks worse, and add what the computation does not see.
Lower bounds round the other way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache

from scipy import optimize

from ..errors import ArgumentError
from .dominating_pairs import (
    EXACT_LEVELS,
    Allocated,
    BoundedRange,
    Concentrated,
    Gaussian,
    Mixed,
    NonPrivate,
    Pair,
    Pure,
    Sampled,
    directions,
    dominating_mu,
    grouped,
    largest_added_loss,
    merge,
)
from .events import SMALLEST_DELTA
from .fft_composition import Composition, compose
from .gdp import (
    advantage_sum,
    bounded_epsilon,
    gaussian_delta,
    gaussian_epsilon,
    sampled_epsilon,
)
from .privacy_loss import (
    apart,
    delta_of_all,
    epsilon_of_all,
    failing,
)
from .rare_losses import can_be_cut, epsilon_by_cut
from .tilted_window import ACCURACY

MOST_STEPS = 2**40
LARGEST_EXCESS = 1e3  # in the place of larger values, between which nothing can be interpolated
_ROUGH_ACCURACY = 1e-2  # of a first bound in the better direction
_MOST_CUT = 512  # different releases whose losses are cut
_LOWER_RATIO = 1.005
# shares of delta, and of epsilon, from which on cut losses are tighter
_ROUND_OFF, _OF_EPSILON = 1e-4, 4e-3


def require_loss_distribution(pair: Pair) -> None:
    """Raise where a pair is known by its Renyi curve only."""
    if isinstance(pair, Concentrated):
        raise ArgumentError(
            "zero-concentrated differential privacy has no privacy loss distribution: use"
            " PrivacyAccountant(method='rdp'), or, if the release is a Gaussian, charge"
            " MuGaussianDpEvent(sqrt(2 * rho)), which costs less."
        )


def _has_no_guarantee(counts: Mapping[Pair, int]) -> bool:
    for pair in counts:
        require_loss_distribution(pair)
    return any(isinstance(pair, NonPrivate) for pair in counts)


def _only_mu(levels: Mapping[Pair, int]) -> float | None:
    """mu of merged levels that are one Gaussian; 0 if there are none; ``None`` if there is
    anything else.
    """
    if not levels:
        return 0.0
    only = next(iter(levels))
    return only.mu if len(levels) == 1 and isinstance(only, Gaussian) else None


def _unsampled(counts: Mapping[Pair, int]) -> float:
    """mu of Gaussians that dominate ``counts``, without amplification."""
    squared = math.fsum(n * dominating_mu(pair) ** 2 for pair, n in counts.items())
    return math.sqrt(squared) * (1 + 1e-15)


# --- upper bounds ---------------------------------------------------------------------------------


def upper_epsilon(counts: Mapping[Pair, int], delta: float) -> float:
    """An upper bound on epsilon at ``delta``, for releases whose parameters were fixed in advance.

    Args:
        counts: how often each pair was released.
        delta: the probability with which the loss may pass epsilon.
    """
    if _has_no_guarantee(counts):
        return math.inf
    return epsilon_of_all(counts, delta, _upper_epsilon)


def _upper_epsilon(counts: Mapping[Pair, int], delta: float) -> float:
    if advantage_sum(counts) <= delta:  # (0, delta)-privacy adds up
        return 0.0
    if sum(counts.values()) == 1:
        only = next(iter(counts))
        if isinstance(only, Sampled):
            return sampled_epsilon(only, delta)
        if isinstance(only, Pure | BoundedRange):
            return bounded_epsilon(only, delta)
    levels = merge(counts)
    if (mu := _only_mu(levels)) is not None:
        return gaussian_epsilon(mu, delta)
    try:
        return _worse(levels, lambda c: c.upper_epsilon(delta), delta=delta)
    except OverflowError:
        mu = _unsampled(levels)
        return gaussian_epsilon(mu, delta) if mu < math.inf else mu


def upper_delta(counts: Mapping[Pair, int], epsilon: float) -> float:
    """An upper bound on delta at ``epsilon``."""
    if _has_no_guarantee(counts):
        return 1.0
    return delta_of_all(counts, epsilon, _upper_delta)


def _upper_delta(counts: Mapping[Pair, int], epsilon: float) -> float:
    levels = merge(counts)
    if (mu := _only_mu(levels)) is None:
        try:
            return min(1.0, _worse(levels, lambda c: c.upper_delta(epsilon), epsilon=epsilon))
        except OverflowError:
            mu = _unsampled(levels)
    if mu == math.inf:
        return 1.0
    return max(0.0, min(1.0, gaussian_delta(mu, epsilon) * (1 + 1e-10)))


def _worse(
    levels: Mapping[Pair, int],
    ask: Callable[[Composition], float],
    *,
    delta: float | None = None,
    epsilon: float | None = None,
) -> float:
    """The answer in the worse direction, which a rough bound on the other one often shows."""
    worst, is_cut = math.nan, False
    for reverse in directions(levels):
        if not math.isnan(worst):
            most = math.fsum(n * largest_added_loss(pair) for pair, n in levels.items())
            if most * (1 + 1e-12) <= (worst if epsilon is None else epsilon):
                continue
            if is_cut and delta is not None:
                with suppress(OverflowError):
                    if epsilon_by_cut(levels, delta, worst, reverse=True) < worst:
                        continue
            (rough,) = compose(
                levels,
                delta=delta,
                epsilon=epsilon,
                accuracy=_ROUGH_ACCURACY,
                reverse=reverse,
                is_pilot=True,
            )
            if ask(rough) <= worst:
                continue
        cuts = delta is not None and len(levels) <= _MOST_CUT and can_be_cut(levels)
        (fine,) = compose(levels, delta=delta, epsilon=epsilon, reverse=reverse, is_pilot=cuts)
        found, is_cut = ask(fine), False
        if delta is not None and cuts and _lacks_digits(fine, found):
            with suppress(OverflowError):  # losses too far apart: it stays loose
                found, is_cut = epsilon_by_cut(levels, delta, found, reverse), True
        if fine.interval > fine.window.wanted_interval and cuts and not is_cut:
            (fine,) = compose(levels, delta=delta, reverse=reverse)
            found = min(found, ask(fine))
        if math.isnan(found):
            return math.inf
        worst = found if math.isnan(worst) else max(worst, found)
    return worst


def _lacks_digits(found: Composition, epsilon: float) -> bool:
    return 0 < epsilon < math.inf and (
        found.interval > _OF_EPSILON * epsilon or found.share_of_round_off(epsilon) > _ROUND_OFF
    )


# --- lower bounds ---------------------------------------------------------------------------------


def lower_epsilon(counts: Mapping[Pair, int], delta: float) -> float:
    """A lower bound: no accountant that knows no more than the events can prove less than this."""
    if _has_no_guarantee(counts):
        return math.inf
    failures, others = apart(counts)
    if failures:
        failed = failing(failures, upper=False)
        if failed > delta:
            return math.inf
        delta = max((delta - failed) / (1 - failed) * (1 + 1e-15), SMALLEST_DELTA)
    # leaving releases out only lowers it: those whose pair is a bound
    known: dict[Pair, int] = {}
    for pair, count in others.items():
        if not isinstance(pair, BoundedRange | Allocated | Mixed):
            if isinstance(pair, Sampled) and pair.kind == "symmetric":
                pair = Sampled("directed", pair.rate, pair.noise)
            known[pair] = known.get(pair, 0) + count
    levels = grouped(merge(known), _LOWER_RATIO, upper=False)
    if (mu := _only_mu(levels)) is not None:
        return gaussian_epsilon(mu, delta) * (1 - 1e-9)
    accuracy = ACCURACY / (100 if len(levels) <= 4 else 10 if len(levels) <= EXACT_LEVELS else 3)
    try:
        # either direction is a lower bound: the one that looks worse
        rough = compose(levels, delta=delta, accuracy=_ROUGH_ACCURACY)
        reverse = max(rough, key=lambda c: c.upper_epsilon(delta)).reverse
        (fine,) = compose(levels, delta=delta, accuracy=accuracy, reverse=reverse, mixed=False)
        return fine.lower_epsilon(delta)
    except OverflowError:
        return 0.0


def largest(excess: Callable[[int], float], *, start: int = 1) -> int:
    """The largest whole n >= 1 at which the increasing function is at most 0, or 0 if none is.

    At most ``2 * MOST_STEPS``. ``start`` is a guess.
    """

    @cache
    def value(n: int) -> float:
        return min(excess(n), LARGEST_EXCESS) or -math.ulp(0.0)  # 0 is to count as below

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
