"""Noise and numbers of steps that meet a target."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from . import bounds, events, failures, pairs, renyi
from .admission import Admission
from .choices import (
    Method,
    Neighboring,
    NeighboringRelation,
    accounting_method,
    check_delta,
    check_epsilon,
    neighboring_relation,
)
from .events import DpEvent, GaussianDpEvent, PoissonSampledDpEvent
from .pairs import Pair
from .search import crossing

_PRECISION = 5e-4  # relative; the result lies on the safe side
_SMALLEST_NOISE = 1e-2
_LARGEST_NOISE = 1e7


def noise_multiplier_for(
    make_event: Callable[[float], DpEvent],
    *,
    target_epsilon: float,
    target_delta: float,
    steps: int,
    neighboring: Neighboring | NeighboringRelation = "add_or_remove_one",
    history: Iterable[tuple[Any, ...]] = (),
) -> float:
    """The smallest noise multiplier z such that ``history`` and ``steps`` times ``make_event(z)``
    meet the target.

    Args:
        make_event: from a noise multiplier to what one step charges.
        target_epsilon: for everything together.
        target_delta: likewise.
        steps: how many steps are planned.
        neighboring: the accountant's relation, as :class:`PrivacyAccountant` takes it.
        history: what was charged before: ``accountant.history``, or pairs (event, count).

    Returns:
        z, at most 0.05 percent above the smallest that meets the target.

    Raises:
        ValueError: the history alone passes the target, or no noise up to 1e7 meets it.
    """
    return calibrated(make_event, target_epsilon, target_delta, steps, neighboring, history, "pld")


def calibrated(
    make_event: Callable[[float], DpEvent],
    target_epsilon: float,
    target_delta: float,
    steps: int,
    neighboring: Neighboring | NeighboringRelation,
    history: Iterable[tuple[Any, ...]],
    method: Method,
) -> float:
    """:func:`noise_multiplier_for` an accountant of this method: ``"rdp"`` reports more, and
    wants a little more noise for it.
    """
    epsilon, delta = check_epsilon(target_epsilon), check_delta(target_delta)
    steps = events.positive_count(steps, "steps")
    neighboring, method = neighboring_relation(neighboring), accounting_method(method)
    before = _counts(history, neighboring)
    price = renyi.upper_epsilon if method == "rdp" else bounds.upper_epsilon
    if before and price(before, delta) > epsilon:
        if why := failures.without_delta(before, delta):
            raise ValueError(
                f"what was charged before costs more than epsilon = {epsilon:g} alone. {why}"
            )
        raise ValueError(
            f"what was charged before costs more than epsilon = {epsilon:g} at delta = {delta:g}"
            " alone: no noise is large enough for another step."
        )

    def excess(log_noise: float) -> float:
        counts = dict(before)
        _add(counts, make_event(math.exp(log_noise)), steps, neighboring)
        if why := failures.without_delta(counts, delta):
            raise ValueError(f"no noise multiplier meets the target. {why}")
        return price(counts, delta) - epsilon

    least, most = math.log(_SMALLEST_NOISE), math.log(_LARGEST_NOISE)
    log_noise = crossing(excess, 0.0, least, most, _PRECISION)
    if log_noise is None:
        raise ValueError(
            f"no noise multiplier up to {_LARGEST_NOISE:g} meets the target: use fewer steps, a"
            " smaller sampling rate, or a larger epsilon."
        )
    return math.exp(log_noise)


def _counts(history: Iterable[tuple[Any, ...]], neighboring: Neighboring) -> dict[Pair, int]:
    counts: dict[Pair, int] = {}
    for event, count, *rest in history:
        if len(rest) > 1 and rest[1]:
            raise ValueError(
                "the history holds adaptive charges, whose guarantee is their accountant's budget"
                " as a whole: no target below it can be calibrated for. Choose the noise multiplier"
                " yourself and charge with adaptive=True."
            )
        _add(counts, event, events.positive_count(count), neighboring)
    return counts


def _add(counts: dict[Pair, int], event: DpEvent, count: int, neighboring: Neighboring) -> None:
    for part, times in events.elementary(event, count):
        pair = pairs.dominating_pair(part, neighboring)
        counts[pair] = counts.get(pair, 0) + times


def get_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    neighboring: Neighboring | NeighboringRelation = "add_or_remove_one",
    history: Iterable[tuple[Any, ...]] = (),
) -> float:
    """The smallest noise multiplier at which ``steps`` Poisson-sampled steps, after ``history``,
    meet the target.

    Args:
        target_epsilon: for everything together.
        target_delta: likewise.
        sample_rate: expected batch size / number of records; 1 for full batches.
        steps: how many steps are planned.
        neighboring: ``"add_or_remove_one"`` or ``"replace_one"``, as :class:`PrivacyAccountant`
            takes it.
        history: what was charged before: ``accountant.history``, or pairs (event, count).

    Returns:
        Noise standard deviation / clip bound, at most 0.05 percent above the smallest that meets
        the target.
    """
    rate = events.sampling_rate(sample_rate)
    return noise_multiplier_for(
        lambda noise: PoissonSampledDpEvent(rate, GaussianDpEvent(noise)),
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
    """The largest number of Poisson-sampled steps that, after ``history``, meets the target; 0 if
    not one does.

    Args: as in :func:`get_noise_multiplier`.
    """
    epsilon, delta = check_epsilon(target_epsilon), check_delta(target_delta)
    event = PoissonSampledDpEvent(
        events.sampling_rate(sample_rate),
        GaussianDpEvent(events.gaussian_noise_multiplier(noise_multiplier)),
    )
    neighboring = neighboring_relation(neighboring)
    before, step = _counts(history, neighboring), _counts([(event, 1)], neighboring)
    admission = Admission((epsilon, delta), "pld")
    admission.restart(before)
    return admission.remaining(before, step)
