"""Noise and numbers of steps that meet a target."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from . import bounds, events, failures, pairs, renyi
from .budget import Budget
from .choices import (
    Method,
    Neighboring,
    NeighboringRelation,
    accounting_method,
    check_delta,
    check_epsilon,
    check_probability,
    neighboring_relation,
)
from .events import DpEvent, GaussianDpEvent, PoissonSampledDpEvent
from .pairs import Pair
from .profiles import profiles, trade_offs
from .risk import highest
from .search import crossing

_PRECISION = 5e-4  # relative; the result lies on the safe side
_FINE_PRECISION = 2e-5  # of a true-positive rate, which may change faster than the noise
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

    def excess(counts: dict[Pair, int]) -> float:
        if why := failures.without_delta(counts, delta):
            raise ValueError(f"no noise multiplier meets the target. {why}")
        return price(counts, delta) - epsilon

    return _smallest_noise(make_event, before, steps, neighboring, excess, _PRECISION)


def _smallest_noise(
    make_event: Callable[[float], DpEvent],
    before: dict[Pair, int],
    steps: int,
    neighboring: Neighboring,
    excess: Callable[[dict[Pair, int]], float],
    precision: float,
) -> float:
    """The smallest noise multiplier at which ``excess`` of everything is at most 0."""

    def excess_at(log_noise: float) -> float:
        counts = dict(before)
        _add(counts, make_event(math.exp(log_noise)), steps, neighboring)
        return excess(counts)

    least, most = math.log(_SMALLEST_NOISE), math.log(_LARGEST_NOISE)
    log_noise = crossing(excess_at, 0.0, least, most, precision)
    if log_noise is None:
        raise ValueError(
            f"no noise multiplier up to {_LARGEST_NOISE:g} meets the target: use fewer steps, a"
            " smaller sampling rate, or a larger target."
        )
    return math.exp(log_noise)


def noise_multiplier_against_attacks(
    make_event: Callable[[float], DpEvent],
    *,
    target_advantage: float | None = None,
    target_true_positive_rate: float | None = None,
    false_positive_rate: float | None = None,
    steps: int,
    neighboring: Neighboring | NeighboringRelation = "add_or_remove_one",
    history: Iterable[tuple[Any, ...]] = (),
) -> float:
    """The smallest noise multiplier z at which no attack on ``history`` and ``steps`` times
    ``make_event(z)`` does better than the target (Kulynych, Gomez, Kaissis, Calmon, Troncoso 2024).

    Args:
        make_event: from a noise multiplier to what one step charges.
        target_advantage: the largest difference of true- and false-positive rate; or
        target_true_positive_rate: the largest true-positive rate at
        false_positive_rate: this false-positive rate, which is smaller.
        steps: how many steps are planned.
        neighboring: the accountant's relation.
        history: what was charged before.

    Returns:
        z, at which ``PrivacyAccountant.risk`` lies at most 0.1 percent below the target.

    Raises:
        ValueError: the history alone passes the target, or no noise up to 1e7 meets it.
    """
    neighboring = neighboring_relation(neighboring)
    steps = events.positive_count(steps, "steps")
    if (target_advantage is None) == (target_true_positive_rate is None):
        raise ValueError(
            "give target_advantage, or target_true_positive_rate with false_positive_rate."
        )
    if target_advantage is not None:
        target = check_probability(target_advantage, "target_advantage")

        def found(counts: dict[Pair, int]) -> float:
            return bounds.upper_delta(counts, 0.0)

    else:
        target = check_probability(target_true_positive_rate, "target_true_positive_rate")
        rate = np.array([check_probability(false_positive_rate, "false_positive_rate")])
        if rate[0] >= target:
            raise ValueError(
                "target_true_positive_rate must be above false_positive_rate, which guessing has."
            )

        def found(counts: dict[Pair, int]) -> float:
            curves = trade_offs(*profiles(frozenset(counts.items()), "pld"))
            return float(highest(curves, rate)[0])

    before = _counts(history, neighboring)
    if before and found(before) > target:
        raise ValueError(
            f"attacks on what was charged before do better than {target:g} already: no noise is"
            " large enough for another step."
        )
    precision = _PRECISION if target_advantage is not None else _FINE_PRECISION
    return _smallest_noise(
        make_event, before, steps, neighboring, lambda counts: found(counts) - target, precision
    )


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
    target_epsilon: float | None = None,
    target_delta: float | None = None,
    sample_rate: float,
    steps: int,
    neighboring: Neighboring | NeighboringRelation = "add_or_remove_one",
    history: Iterable[tuple[Any, ...]] = (),
    target_advantage: float | None = None,
    target_true_positive_rate: float | None = None,
    false_positive_rate: float | None = None,
) -> float:
    """The smallest noise multiplier at which ``steps`` Poisson-sampled steps, after ``history``,
    meet the target: of (epsilon, delta), or of what an attacker can tell.

    Args:
        target_epsilon: for everything together, with
        target_delta: likewise; or
        target_advantage: what :meth:`PrivacyAccountant.risk` calls ``advantage``, at most; or
        target_true_positive_rate: the true-positive rate at most, with
        false_positive_rate: the false-positive rate at which.
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

    def make_event(noise: float) -> DpEvent:
        return PoissonSampledDpEvent(rate, GaussianDpEvent(noise))

    if target_epsilon is None and target_delta is None:
        return noise_multiplier_against_attacks(
            make_event,
            target_advantage=target_advantage,
            target_true_positive_rate=target_true_positive_rate,
            false_positive_rate=false_positive_rate,
            steps=steps,
            neighboring=neighboring,
            history=history,
        )
    given = (target_advantage, target_true_positive_rate, false_positive_rate)
    if target_epsilon is None or target_delta is None or any(x is not None for x in given):
        raise ValueError(
            "give one target: target_epsilon with target_delta, target_advantage, or"
            " target_true_positive_rate with false_positive_rate."
        )
    return noise_multiplier_for(
        make_event,
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
    budget = Budget(epsilon, delta, "pld")
    budget.restart(before)
    return budget.max_count(before, step)
