"""Noise multipliers and numbers of steps for a target epsilon and delta."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

from scipy import optimize

from ..errors import ArgumentError
from . import bounds, events, renyi
from .bounds import LARGEST_EXCESS, MOST_STEPS
from .budget import Budget
from .dominating_pairs import Pair, added, dominating_pair
from .events import DpEvent, Method, Neighboring, NeighboringRelation
from .privacy_loss import without_delta

if TYPE_CHECKING:
    from .accountant import PrivacyAccountant

_PRECISION = 5e-4  # relative; the result is rounded towards more privacy
_SMALLEST_NOISE, _LARGEST_NOISE = 1e-2, 1e7
_ROUNDING = 1e-9  # relative; the parts of a budget add up to the whole up to this


def noise_multiplier_for(
    make_event: Callable[[float], DpEvent],
    *,
    target_epsilon: float,
    target_delta: float,
    steps: int,
    neighboring: Neighboring | NeighboringRelation = "add_or_remove_one",
    history: Iterable[tuple[Any, ...]] = (),
    method: Method = "pld",
) -> float:
    """The smallest noise multiplier z at which ``history`` and ``steps`` times ``make_event(z)``
    meet the target.

    Args:
        make_event: a function from a noise multiplier to the event of one step.
        method: the accountant's method. ``"rdp"`` reports a larger epsilon, and needs a little more
            noise.

    The others are those of :func:`get_noise_multiplier`.

    Returns:
        z, at most 0.05 percent above the smallest possible value.

    Raises:
        ArgumentError: the history alone exceeds the target, or no noise up to 1e7 suffices.
    """
    epsilon, delta = events.check_epsilon(target_epsilon), events.check_delta(target_delta)
    bound = renyi if events.one_of(method, Method, "method") == "rdp" else bounds
    before = counts_of(history, neighboring)
    if before and bound.upper_epsilon(before, delta) > epsilon:
        why = without_delta(before, delta)
        raise ArgumentError(
            f"earlier charges alone cost more than epsilon = {epsilon:g} at delta = {delta:g}"
            f"{': no noise is large enough for another step.' if not why else '. ' + why}"
        )

    steps = events.positive_count(steps, "steps")

    def excess(log_noise: float) -> float:
        planned = counts_of([(make_event(math.exp(log_noise)), steps)], neighboring)
        counts = added(before, planned)
        if why := without_delta(counts, delta):
            raise ArgumentError(f"no noise multiplier meets the target. {why}")
        return bound.upper_epsilon(counts, delta) - epsilon

    found = crossing(excess, math.log(_SMALLEST_NOISE), math.log(_LARGEST_NOISE))
    if found is None:
        raise ArgumentError(
            f"no noise multiplier up to {_LARGEST_NOISE:g} meets the target: use fewer steps, a"
            " smaller sampling rate, or a larger target."
        )
    return math.exp(found)


def get_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    neighboring: Neighboring | NeighboringRelation = "add_or_remove_one",
    history: Iterable[tuple[Any, ...]] = (),
) -> float:
    """The smallest noise multiplier at which ``history`` and ``steps`` Poisson-sampled steps meet
    the target.

    Args:
        target_epsilon: the epsilon of ``history`` and all steps together.
        target_delta: its delta.
        sample_rate: expected batch size / number of records; 1 for full batches.
        steps: the planned number of steps.
        neighboring: the accountant's relation, as in :class:`PrivacyAccountant`.
        history: earlier charges: ``accountant.history``, or pairs (event, count).

    Returns:
        Noise standard deviation / clip bound, at most 0.05 percent above the smallest possible
        value.
    """
    rate = events.sampling_rate(sample_rate)
    return noise_multiplier_for(
        lambda noise: events.PoissonSampledDpEvent(rate, events.GaussianDpEvent(noise)),
        target_epsilon=target_epsilon,
        target_delta=target_delta,
        steps=steps,
        neighboring=neighboring,
        history=history,
    )


def get_num_steps(
    *,
    noise_multiplier: float,
    sample_rate: float,
    target_epsilon: float,
    target_delta: float,
    neighboring: Neighboring | NeighboringRelation = "add_or_remove_one",
    history: Iterable[tuple[Any, ...]] = (),
) -> int:
    """The largest number of Poisson-sampled steps that meets the target after ``history``; 0 if no
    step fits.

    Args: as in :func:`get_noise_multiplier`.
    """
    epsilon, delta = events.check_epsilon(target_epsilon), events.check_delta(target_delta)
    event = events.PoissonSampledDpEvent(
        events.sampling_rate(sample_rate),
        events.GaussianDpEvent(events.gaussian_noise_multiplier(noise_multiplier)),
    )
    before, step = counts_of(history, neighboring), counts_of([(event, 1)], neighboring)
    return min(Budget(epsilon, delta, "pld").max_count(before, step), MOST_STEPS)


def total_multiplier(
    accountant: PrivacyAccountant, epsilon: float | None, delta: float | None
) -> float:
    """The noise multiplier of one Gaussian release that costs the whole rest of the budget.
    ``epsilon`` and ``delta`` are for all charges together; ``None``: those of the accountant.

    Raises:
        ArgumentError: there is no budget, or nothing is left of it.
    """
    epsilon = accountant.epsilon if epsilon is None else epsilon
    delta = accountant.delta if delta is None else delta
    if epsilon is None or delta is None:
        raise ArgumentError(
            "a budget needs both numbers: pass epsilon=1.0, delta=1e-5, or an accountant with a"
            " budget."
        )
    epsilon, delta = events.check_epsilon(epsilon), events.check_delta(delta)
    try:
        found = noise_multiplier_for(
            events.GaussianDpEvent,
            target_epsilon=epsilon,
            target_delta=delta,
            steps=1,
            neighboring=accountant.neighboring,
            history=accountant.history,
            method=accountant.method,
        )
    except ValueError as error:
        if not len(accountant) or math.isinf(held := accountant.get_epsilon(delta)):
            raise
        raise ArgumentError(
            f"nothing is left for this run: epsilon = {held:.5g} of {epsilon:g} is already"
            " spent. epsilon= is the total after this run: pass a larger one, or use a new"
            " accountant."
        ) from error
    return found * (1 + _ROUNDING)


def crossing(
    excess: Callable[[float], float], least: float, most: float, precision: float = _PRECISION
) -> float | None:
    """The point at which a falling function becomes non-positive, or a point up to ``precision``
    above it: ``least`` if it is not positive there, ``None`` if it is still positive at ``most``.
    """
    value = cache(lambda x: min(excess(x), LARGEST_EXCESS))
    low = high = 0.0
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


def counts_of(
    history: Iterable[tuple[Any, ...]], neighboring: Neighboring | NeighboringRelation
) -> dict[Pair, int]:
    """The number of releases of each dominating pair in a history, or in pairs (event, count)."""
    counts: dict[Pair, int] = {}
    for event, count, *rest in history:
        if len(rest) > 1 and rest[1]:
            raise ArgumentError(
                "the history has adaptive charges, so the guarantee is always the accountant's"
                " whole budget, and a smaller target is impossible. Choose the noise multiplier"
                " yourself and charge with adaptive=True."
            )
        for part, times in events.elementary(event, events.positive_count(count)):
            counts = added(counts, {dominating_pair(part, neighboring): times})
    return counts
