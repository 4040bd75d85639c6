"""Releases that are not Gaussian sums: events, checks of their numbers, and dominating pairs.

*Truncated Poisson batches.* If more than m records are drawn, m of them are chosen at random. Let
M ~ Binomial(n, q) be the number of other drawn records. If M < m, the record joins with probability
q and displaces no other record: a Poisson-sampled sum. If M >= m, it is in the batch with
probability q' = E[q m / (M + 1) | M >= m] and displaces another record, so the sum moves by up to
2C. The bound holds even if it is public which of the two cases occurs, and the batch without the
record.
"""

from __future__ import annotations

import math

import attr
import numpy as np
from dp_accounting import dp_event
from dp_accounting.dp_event import DiscreteLaplaceDpEvent as DiscreteLaplaceDpEvent
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent as MixtureOfGaussiansDpEvent
from dp_accounting.dp_event import RandomizedResponseDpEvent as RandomizedResponseDpEvent
from dp_accounting.dp_event import (
    TruncatedSubsampledGaussianDpEvent as TruncatedSubsampledGaussianDpEvent,
)
from scipy import special, stats

from ..errors import ArgumentError
from . import dominating_pairs as pairs
from . import events
from .dominating_pairs import Pair
from .events import DpEvent, Parts, parts_of

_MOST_LOSSES = 2**16  # of a discrete release; one with more counts as pure, by its largest loss
_LARGEST_STD = 1e5  # of discrete Gaussian noise; losses of all values are computed
_LARGEST_MOVE = 50.0  # in standard deviations; one larger move costs an epsilon above 1000
_ONE = 1e-9  # tolerance for probabilities that must add up to 1
_ROUND_OFF = 1e-12  # relative error of a binomial probability, and of a computed sensitivity


@attr.frozen
class EpsilonDeltaDpEvent(DpEvent):
    """A release that is (epsilon, delta)-differentially private: exactly a pure release and a
    failure together (Kairouz, Oh, Viswanath 2015, Theorem 3.3).
    """

    epsilon: float
    delta: float


@attr.frozen
class ExponentialMechanismDpEvent(DpEvent):
    """A choice with probability proportional to exp(epsilon u / (2 D)), where the score u of each
    candidate moves by at most D. A ``BoundedRangeDpEvent``.
    """

    epsilon: float


@attr.frozen
class PermuteAndFlipDpEvent(DpEvent):
    """A choice by permute-and-flip (McKenna, Sheldon 2020), or by the largest score with
    exponential noise of mean 2 D / epsilon. A ``PureDpEvent``: no bounded range is known.
    """

    epsilon: float


@attr.frozen
class DiscreteGaussianDpEvent(DpEvent):
    """A sum of whole numbers and discrete Gaussian noise (Canonne, Kamath, Steinke 2020): x with
    probability proportional to exp(-x^2 / (2 sigma^2)), on each of ``dimension`` coordinates.

    A record moves the sum by at most ``sensitivity`` in L2 norm. With several coordinates, or an
    unknown number (None), this is a ``ZCDpEvent(sensitivity^2 / (2 sigma^2))``.
    """

    sigma: float
    sensitivity: float = 1.0
    dimension: int | None = None


# --- checks of their numbers ----------------------------------------------------------------------


@parts_of.register
def _(event: EpsilonDeltaDpEvent, count: int) -> Parts:
    yield from parts_of(events.PureDpEvent(event.epsilon), count)
    if event.delta != 0:
        yield from parts_of(events.FailureDpEvent(event.delta), count)


@parts_of.register
def _(event: ExponentialMechanismDpEvent | PermuteAndFlipDpEvent, count: int) -> Parts:
    is_flip = isinstance(event, PermuteAndFlipDpEvent)
    yield from parts_of(
        (events.PureDpEvent if is_flip else events.BoundedRangeDpEvent)(event.epsilon), count
    )


@parts_of.register
def _(event: DiscreteLaplaceDpEvent, count: int) -> Parts:
    sensitivity = events.positive_count(event.sensitivity, "sensitivity")
    if a := events.non_negative(event.noise_parameter, "noise_parameter"):
        yield DiscreteLaplaceDpEvent(a, sensitivity), count
    else:  # as dp_accounting does
        yield events.NonPrivateDpEvent(), count


@parts_of.register
def _(event: DiscreteGaussianDpEvent, count: int) -> Parts:
    sensitivity = events.non_negative(event.sensitivity, "sensitivity")
    sigma = events.non_negative(event.sigma, "sigma")
    if event.dimension is not None:
        events.positive_count(event.dimension, "dimension")
    if not sensitivity:
        return
    if not sigma:
        yield events.NonPrivateDpEvent(), count
    elif event.dimension != 1 or max(sigma, sensitivity) > _LARGEST_STD:
        yield from parts_of(events.ZCDpEvent((sensitivity / sigma) ** 2 / 2 * (1 + 1e-15)), count)
    # a sum of whole numbers moves by a whole number; 100 * 0.29, which is rounded down, means 29
    elif move := math.floor(sensitivity * (1 + _ROUND_OFF)):
        yield DiscreteGaussianDpEvent(sigma, float(move), 1), count


@parts_of.register
def _(event: RandomizedResponseDpEvent, count: int) -> Parts:
    buckets = events.positive_count(event.num_buckets, "num_buckets")
    given = event.noise_parameter
    p = events.within(given, "noise_parameter", lambda p: 0 <= p <= 1, "lie in [0, 1]")
    if buckets > 1 and p < 1:
        yield (RandomizedResponseDpEvent(p, buckets) if p else events.NonPrivateDpEvent()), count


@parts_of.register
def _(event: MixtureOfGaussiansDpEvent, count: int) -> Parts:
    std = events.non_negative(event.standard_deviation, "standard_deviation")
    moves = [float(move) for move in event.sensitivities]
    chances = [float(chance) for chance in event.sampling_probs]
    if (
        len(moves) != len(chances)
        or not all(0 <= move < events.LARGEST for move in moves)
        or not all(0 <= chance <= 1 for chance in chances)
        or abs(math.fsum(chances) - 1) > _ONE
    ):
        raise ArgumentError(
            "a MixtureOfGaussiansDpEvent needs non-negative sensitivities, and as many"
            f" sampling_probs, which add up to 1: got {moves} and {chances}."
        )
    kept = [(m, c) for m, c in zip(moves, chances, strict=True) if c > 0]
    if not any(m for m, _ in kept):
        return
    if not std:
        yield events.NonPrivateDpEvent(), count
    else:
        yield MixtureOfGaussiansDpEvent(std, *map(tuple, zip(*kept, strict=True))), count


@parts_of.register
def _(event: TruncatedSubsampledGaussianDpEvent, count: int) -> Parts:
    if 0 in (event.truncated_batch_size, event.dataset_size):
        return
    size = events.positive_count(event.dataset_size, "dataset_size")
    most = events.positive_count(event.truncated_batch_size, "truncated_batch_size")
    gaussian = events.GaussianDpEvent(event.noise_multiplier)
    for part, _ in parts_of(events.PoissonSampledDpEvent(event.sampling_probability, gaussian), 1):
        # there may be one record more than stated
        if isinstance(part, events.PoissonSampledDpEvent) and most <= size:
            rate, noise = part.sampling_probability, part.event.noise_multiplier
            part = TruncatedSubsampledGaussianDpEvent(size, rate, most, noise)
        yield part, count


for _kind in (
    EpsilonDeltaDpEvent,
    ExponentialMechanismDpEvent,
    PermuteAndFlipDpEvent,
    DiscreteGaussianDpEvent,
):
    # also dp_accounting's class of the same name and numbers, in versions that have it
    if hasattr(dp_event, _kind.__name__):
        parts_of.register(
            getattr(dp_event, _kind.__name__),
            lambda event, count, kind=_kind: parts_of(kind(*attr.astuple(event)), count),
        )
events.AMPLIFIED.extend([DiscreteGaussianDpEvent, DiscreteLaplaceDpEvent])
pairs.ADDITIVE.extend([DiscreteGaussianDpEvent, DiscreteLaplaceDpEvent])
for _kind in (DiscreteGaussianDpEvent, DiscreteLaplaceDpEvent, MixtureOfGaussiansDpEvent):
    pairs.WHERE_ZEROED[_kind] = pairs.as_removed

# --- their pairs ----------------------------------------------------------------------------------


@pairs.pair_of.register
def _(event: DiscreteLaplaceDpEvent, replace: bool) -> Pair:
    a, move = event.noise_parameter, (1 + replace) * event.sensitivity
    if move > _MOST_LOSSES or a * move > 700:
        return pairs.Pure(a * move)
    inner = np.arange(1, move)
    ends = special.expit(a)
    losses = a * np.concatenate([[-move], 2 * inner - move, [move]])
    masses = np.concatenate(
        [[ends * math.exp(-a * move)], math.tanh(a / 2) * np.exp(-a * (move - inner)), [ends]]
    )
    return pairs.FewLosses(tuple(losses.tolist()), tuple(masses.tolist()))


@pairs.pair_of.register
def _(event: DiscreteGaussianDpEvent, replace: bool) -> Pair:
    return pairs.DiscreteGaussian(event.sigma, (1 + replace) * int(event.sensitivity))


@pairs.pair_of.register
def _(event: RandomizedResponseDpEvent, replace: bool) -> Pair:
    if not replace:
        raise ArgumentError(
            "randomized response gives no guarantee under add_or_remove_one, because it shows"
            ' that the record exists: use PrivacyAccountant(neighboring="replace_one").'
        )
    other = event.noise_parameter / event.num_buckets
    kept = 1 - event.noise_parameter + other
    loss = math.log(kept / other) * (1 + 1e-15)
    return pairs.FewLosses((-loss, 0.0, loss), (other, max(1 - kept - other, 0.0), kept))


def _uniform_where_zeroed(event: RandomizedResponseDpEvent) -> Pair:
    p, k = event.noise_parameter, event.num_buckets
    kept = 1 - p + p / k
    return pairs.FewLosses((math.log(p), math.log(k * kept)), (1 - kept, kept), directed=True)


pairs.WHERE_ZEROED[RandomizedResponseDpEvent] = _uniform_where_zeroed


@pairs.pair_of.register
def _(event: MixtureOfGaussiansDpEvent, replace: bool) -> Pair:
    if replace:
        raise ArgumentError(
            "a MixtureOfGaussiansDpEvent is for adding or removing a record: use"
            ' PrivacyAccountant(neighboring="add_or_remove_one").'
        )
    found = zip(event.sensitivities, event.sampling_probs, strict=True)
    moving = [(move / event.standard_deviation, chance) for move, chance in found if move > 0]
    moves, chances = map(tuple, zip(*moving, strict=True))
    if max(moves) > _LARGEST_MOVE:
        return pairs.Gaussian(max(moves))
    return pairs.GaussianMixture(moves, chances)


@pairs.pair_of.register
def _(event: TruncatedSubsampledGaussianDpEvent, replace: bool) -> Pair:
    size, most = event.dataset_size, event.truncated_batch_size
    rate, noise = event.sampling_probability, event.noise_multiplier
    if rate == 1 or not isinstance(pairs.sampled_pair("directed", 0.5, noise / 2), pairs.Sampled):
        return pairs.Gaussian(2.0 / noise)
    full, joins = _displacing(size - 1, rate, most)
    parts: list[tuple[float, pairs.SampledKind, float, float]]
    if replace:
        parts = [(1 - full, "antipodal", rate, noise), (full, "symmetric", joins, noise / 2)]
    else:
        # A record may also be added to the stated number, and then the batch is full a little more
        # often. The difference costs no more than a swap at the full rate.
        fuller = max(_displacing(size, rate, most)[0], full)
        parts = [
            (1 - fuller, "directed", rate, noise),
            (full, "directed", joins, noise / 2),
            (fuller - full, "directed", rate, noise / 2),
        ]
    return pairs.Mixed(
        tuple((weight, pairs.Sampled(kind, q, z)) for weight, kind, q, z in parts if weight > 0)
    )


def _displacing(others: int, rate: float, most: int) -> tuple[float, float]:
    """P(M >= m) and q', both rounded up."""
    probability = float(stats.binom.sf(most - 1, others, rate))
    if probability < 1e-290:
        return 1e-290, rate
    joins = most / (others + 1) * float(stats.binom.sf(most, others + 1, rate)) / probability
    return min(probability * (1 + _ROUND_OFF), 1.0), min(joins * (1 + _ROUND_OFF), rate)
