"""Releases that are not Gaussian sums: the events of dp-accounting, and a few that it lacks.

Each has its event, the numbers it takes, the pair that dominates it, and that pair's privacy loss
and Renyi curve.

**Laplace noise on several coordinates.** Shifts d_1 and d_2 of two coordinates cost no more than
one shift of d_1 + d_2: for noise with a log-concave density the trade-off curve of the latter is
that of the former two, one after the other, which group privacy bounds from below.

Poisson batches of which at most a fixed number of records is used.

A draw of more than ``m`` records is cut to ``m`` of them, chosen at random. Let M ~ Binomial(n, q)
be how many other records are drawn. If M < m, the record joins with probability q and displaces
nobody: a Poisson-sampled sum. If M >= m, it is in the batch with probability q' = E[q m / (M + 1) |
M >= m] and then takes the place of another one, so that the sum moves by up to 2C. Which of the two
it is may be told, and so may the batch without the record: given that it is full it does not
depend on M.
"""

from __future__ import annotations

import math

import attr
import numpy as np
from dp_accounting.dp_event import (
    DiscreteLaplaceDpEvent,
    LaplaceDpEvent,
    MixtureOfGaussiansDpEvent,
    RandomizedResponseDpEvent,
    TruncatedSubsampledGaussianDpEvent,
)
from scipy import special, stats

from . import events, loss_grid, pairs, renyi
from .events import (
    BoundedRangeDpEvent,
    DpEvent,
    FailureDpEvent,
    GaussianDpEvent,
    NonPrivateDpEvent,
    Parts,
    PoissonSampledDpEvent,
    PureDpEvent,
)
from .loss_grid import Nodes
from .pairs import (
    Array,
    DiscreteGaussian,
    FewLosses,
    Gaussian,
    GaussianMixture,
    Laplace,
    Mixed,
    Pair,
    Pure,
    Sampled,
    SampledKind,
)

_MOST_LOSSES = 2**16  # of a discrete release; one with more counts at its largest
_LARGEST_STD = 1e5  # of discrete Gaussian noise, whose every value is looked at
_ONE = 1e-9  # by which probabilities may miss 1 together


@attr.s(frozen=True, slots=True, auto_attribs=True)
class EpsilonDeltaDpEvent(DpEvent):
    """A release that is (epsilon, delta)-differentially private under the accountant's relation,
    of which no more is known: ``PureDpEvent(epsilon)`` and ``FailureDpEvent(delta)``, exactly
    (Kairouz, Oh, Viswanath 2015).
    """

    epsilon: float
    delta: float


@attr.s(frozen=True, slots=True, auto_attribs=True)
class ExponentialMechanismDpEvent(DpEvent):
    """A choice with probability proportional to exp(epsilon u / (2 D)), where the score u of each
    candidate moves by at most D under the accountant's relation. A ``BoundedRangeDpEvent``.
    """

    epsilon: float


@attr.s(frozen=True, slots=True, auto_attribs=True)
class PermuteAndFlipDpEvent(DpEvent):
    """A choice by permute-and-flip (McKenna, Sheldon 2020), or by the largest score with
    exponential noise of mean 2 D / epsilon, where scores move by at most D under the accountant's
    relation. A ``PureDpEvent``: no smaller range of its losses is known.
    """

    epsilon: float


@attr.s(frozen=True, slots=True, auto_attribs=True)
class DiscreteGaussianDpEvent(DpEvent):
    """A sum of whole numbers and discrete Gaussian noise (Canonne, Kamath, Steinke 2020).

    The noise is x with probability proportional to exp(-x^2 / (2 standard_deviation^2)); each
    record's number is at most ``sensitivity`` in size.
    """

    standard_deviation: float
    sensitivity: int


# --- the numbers they take ------------------------------------------------------------------------


@events.parts_of.register
def _(event: EpsilonDeltaDpEvent, count: int) -> Parts:
    yield from events.parts_of(PureDpEvent(event.epsilon), count)
    if event.delta != 0:
        yield from events.parts_of(FailureDpEvent(event.delta), count)


@events.parts_of.register
def _(event: ExponentialMechanismDpEvent, count: int) -> Parts:
    yield from events.parts_of(BoundedRangeDpEvent(event.epsilon), count)


@events.parts_of.register
def _(event: PermuteAndFlipDpEvent, count: int) -> Parts:
    yield from events.parts_of(PureDpEvent(event.epsilon), count)


@events.parts_of.register
def _(event: LaplaceDpEvent, count: int) -> Parts:
    yield LaplaceDpEvent(events.gaussian_noise_multiplier(event.noise_multiplier)), count


@events.parts_of.register
def _(event: DiscreteLaplaceDpEvent, count: int) -> Parts:
    sensitivity = events.positive_count(event.sensitivity, "sensitivity")
    a = events.gaussian_noise_multiplier(event.noise_parameter, "noise_parameter")
    yield DiscreteLaplaceDpEvent(a, sensitivity), count


@events.parts_of.register
def _(event: DiscreteGaussianDpEvent, count: int) -> Parts:
    sensitivity = events.positive_count(event.sensitivity, "sensitivity")
    std = events.gaussian_noise_multiplier(event.standard_deviation, "standard_deviation")
    if std > _LARGEST_STD or sensitivity > _LARGEST_STD:
        raise ValueError(
            f"standard_deviation and sensitivity of discrete Gaussian noise may be at most"
            f" {_LARGEST_STD:g}, got {std:g} and {sensitivity}: charge ZCDpEvent(sensitivity**2 /"
            " (2 * standard_deviation**2)) with method='rdp'."
        )
    yield DiscreteGaussianDpEvent(std, sensitivity), count


@events.parts_of.register
def _(event: RandomizedResponseDpEvent, count: int) -> Parts:
    buckets = events.positive_count(event.num_buckets, "num_buckets")
    if not 0 <= (p := float(event.noise_parameter)) <= 1:
        raise ValueError(f"noise_parameter must lie in [0, 1], got {event.noise_parameter!r}")
    if buckets == 1 or p == 1:
        return
    if p == 0:
        yield NonPrivateDpEvent(), count
    else:
        yield RandomizedResponseDpEvent(p, buckets), count


@events.parts_of.register
def _(event: MixtureOfGaussiansDpEvent, count: int) -> Parts:
    std = events.gaussian_noise_multiplier(event.standard_deviation, "standard_deviation")
    moves = [float(move) for move in event.sensitivities]
    chances = [float(chance) for chance in event.sampling_probs]
    if (
        len(moves) != len(chances)
        or not all(0 <= move < 1e50 for move in moves)
        or not all(0 <= chance <= 1 for chance in chances)
        or abs(math.fsum(chances) - 1) > _ONE
    ):
        raise ValueError(
            "a MixtureOfGaussiansDpEvent needs as many sampling_probs, which add up to 1, as"
            f" sensitivities, none negative: got {chances} and {moves}."
        )
    kept = [(m, c) for m, c in zip(moves, chances, strict=True) if m > 0 and c > 0]
    if kept:
        yield (
            MixtureOfGaussiansDpEvent(
                std, tuple(move for move, _ in kept), tuple(chance for _, chance in kept)
            ),
            count,
        )


# --- the pairs ------------------------------------------------------------------------------------


@pairs.pair_of.register
def _(event: LaplaceDpEvent, replace: bool) -> Pair:
    return Laplace(1.0, event.noise_multiplier / (1 + replace))


@pairs.pair_of.register
def _(event: DiscreteLaplaceDpEvent, replace: bool) -> Pair:
    a, move = event.noise_parameter, (1 + replace) * event.sensitivity
    if move > _MOST_LOSSES or a * move > 700:
        return Pure(a * move)
    inner = np.arange(1, move)
    ends = special.expit(a)
    losses = a * np.concatenate([[-move], 2 * inner - move, [move]])
    masses = np.concatenate(
        [[ends * math.exp(-a * move)], math.tanh(a / 2) * np.exp(-a * (move - inner)), [ends]]
    )
    return FewLosses(tuple(losses.tolist()), tuple(masses.tolist()))


@pairs.pair_of.register
def _(event: DiscreteGaussianDpEvent, replace: bool) -> Pair:
    return DiscreteGaussian(event.standard_deviation, (1 + replace) * event.sensitivity)


@pairs.pair_of.register
def _(event: RandomizedResponseDpEvent, replace: bool) -> Pair:
    if not replace:
        raise ValueError(
            "randomized response gives no guarantee under add_or_remove_one, where it shows that a"
            ' record is there: use PrivacyAccountant(neighboring="replace_one").'
        )
    other = event.noise_parameter / event.num_buckets
    kept = 1 - event.noise_parameter + other
    loss = math.log(kept / other)
    return FewLosses((-loss, 0.0, loss), (other, max(1 - kept - other, 0.0), kept))


@pairs.pair_of.register
def _(event: MixtureOfGaussiansDpEvent, replace: bool) -> Pair:
    if replace:
        raise ValueError(
            "a MixtureOfGaussiansDpEvent says what adding or removing a record does: use"
            ' PrivacyAccountant(neighboring="add_or_remove_one").'
        )
    std = event.standard_deviation
    moves = tuple(move / std for move in event.sensitivities)
    if max(moves) > 50:  # one release alone then costs an epsilon above 1000
        return pairs.Gaussian(max(moves))
    return GaussianMixture(moves, event.sampling_probs)


# --- their privacy losses -------------------------------------------------------------------------


@pairs.largest_loss.register
def _(pair: Laplace) -> float:
    if pair.rate == 1:
        return 1 / pair.scale
    return float(np.logaddexp(math.log1p(-pair.rate), math.log(pair.rate) + 1 / pair.scale))


@pairs.largest_loss.register
def _(pair: FewLosses) -> float:
    return max(pair.losses)


def _laplace_loss(pair: Laplace, u: Array) -> Array:
    """At u, in units of the noise's scale, between no shift and the shift."""
    return np.asarray(np.log1p(pair.rate * np.expm1(2 * u - 1 / pair.scale)))


@loss_grid.loss_nodes.register
def _(pair: Laplace, tail: float, interval: float | None = None) -> Nodes:
    q, shift = pair.rate, 1 / pair.scale
    # towards the ends, which Renyi divergences of high order single out
    fine = shift * np.geomspace(1e-9, 0.5, 150)
    edges = np.union1d(
        np.linspace(0.0, shift, 2 + int(20 * shift)), np.concatenate([fine, shift - fine])
    )
    low, high = _laplace_loss(pair, np.array([0.0, shift]))
    if interval is not None:
        grid = interval * np.arange(math.ceil(low / interval), math.floor(high / interval) + 1)
        u = (shift + np.log1p(np.expm1(grid[(grid > low) & (grid < high)]) / q)) / 2
        edges = np.union1d(edges, np.clip(u, 0.0, shift))
    u, weight = loss_grid.pieces(edges, 5)
    loss = _laplace_loss(pair, u)
    left = (1 - q) / 2 + q * math.exp(-shift) / 2
    right = (1 - q) * math.exp(-shift) / 2 + q / 2
    return Nodes(
        np.concatenate([[low], loss, [high]]),
        np.concatenate([[left], weight * np.exp(loss - u) / 2, [right]]),
    )


@loss_grid.loss_nodes.register
def _(pair: FewLosses, tail: float, interval: float | None = None) -> Nodes:
    return Nodes(np.array(pair.losses), np.array(pair.masses))


@loss_grid.loss_nodes.register
def _(pair: DiscreteGaussian, tail: float, interval: float | None = None) -> Nodes:
    std, move = pair.std, pair.move
    # a discrete Gaussian's tails lie below a Gaussian's of the same parameter, but for one value
    reach = math.ceil(-float(special.ndtri(tail / 4)) * std) + 1
    x = np.arange(-reach, move + reach + 1, dtype=np.float64)
    normal = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * std**2)).sum()
    return Nodes(
        move * (2 * x - move) / (2 * std**2), np.exp(-((x - move) ** 2) / (2 * std**2)) / normal
    )


def _mixture_loss(pair: GaussianMixture, x: Array) -> Array:
    total = np.zeros(len(x))
    largest = np.maximum(pair.moves[-1] * x - pair.moves[-1] ** 2 / 2, 0.0)
    for move in pair.moves:
        largest = np.maximum(largest, move * x - move**2 / 2)
    small = largest < 30
    stay = max(1 - math.fsum(pair.chances), 0.0)
    logs = np.full(len(x), math.log(stay) if stay else -math.inf)
    for move, chance in zip(pair.moves, pair.chances, strict=True):
        exponent = move * x - move**2 / 2
        total += chance * np.expm1(np.minimum(exponent, 30.0))
        logs = np.logaddexp(logs, math.log(chance) + exponent)
    return np.where(small, np.log1p(np.maximum(total, -1 + 1e-300)), logs)


@loss_grid.loss_nodes.register
def _(pair: GaussianMixture, tail: float, interval: float | None = None) -> Nodes:
    width = -float(special.ndtri(tail))
    low_end, high_end = -width, max(pair.moves) + width
    number = 2 + int(10 * (high_end - low_end) * max(1.0, max(pair.moves)))
    edges = np.linspace(low_end, high_end, number)
    if interval is not None:
        low, high = _mixture_loss(pair, np.array([low_end, high_end]))
        grid = interval * np.arange(math.ceil(low / interval), math.floor(high / interval) + 1)
        left, right = np.full(len(grid), low_end), np.full(len(grid), high_end)
        for _ in range(60):  # the loss grows with x
            middle = (left + right) / 2
            is_below = _mixture_loss(pair, middle) < grid
            left, right = np.where(is_below, middle, left), np.where(is_below, right, middle)
        edges = np.union1d(edges, left)
    x, weight = loss_grid.pieces(edges, 5)
    loss = _mixture_loss(pair, x)
    return Nodes(loss, weight * np.exp(loss - x**2 / 2) / math.sqrt(2 * math.pi))


# --- their Renyi curves ---------------------------------------------------------------------------


@renyi.divergences.register
def _(pair: Laplace | FewLosses, alpha: Array) -> Array:
    losses, masses, _ = loss_grid.loss_nodes(pair, 0.0)
    with np.errstate(divide="ignore"):
        logs = np.log(masses)
    moments = np.array([special.logsumexp(logs + (a - 1) * losses) for a in alpha])
    if pairs.has_two_directions(pair):
        back = [special.logsumexp(logs - a * losses) for a in alpha]
        moments = np.maximum(moments, back)
    return renyi.of_bounded_loss(moments + 1e-12, pairs.largest_loss(pair), alpha)


@renyi.divergences.register
def _(pair: DiscreteGaussian, alpha: Array) -> Array:
    # Canonne, Kamath, Steinke 2020, Proposition 5
    return np.asarray(alpha * pair.move**2 / (2 * pair.std**2))


@renyi.divergences.register
def _(pair: GaussianMixture, alpha: Array) -> Array:
    # that of the release that tells which of the Gaussians it is
    stay = math.log(max(1 - math.fsum(pair.chances), 1e-300))
    terms = [np.full(len(alpha), stay)]
    for move, chance in zip(pair.moves, pair.chances, strict=True):
        terms.append(math.log(chance) + alpha * (alpha - 1) * move**2 / 2)
    return np.asarray(np.maximum(special.logsumexp(terms, axis=0), 0.0) / (alpha - 1) + 1e-14)


@pairs.dominating_mu.register
def _(pair: Laplace | FewLosses) -> float:
    return pairs.dominating_mu(Pure(pairs.largest_loss(pair)))


@pairs.dominating_mu.register
def _(pair: GaussianMixture) -> float:
    return max(pair.moves)


# --- Poisson batches of at most a fixed number of records -----------------------------------------

_ROUND_OFF = 1e-12  # relative, of a binomial probability


@events.parts_of.register
def _(event: TruncatedSubsampledGaussianDpEvent, count: int) -> Parts:
    size = events.positive_count(event.dataset_size, "dataset_size")
    most = events.positive_count(event.truncated_batch_size, "truncated_batch_size")
    gaussian = GaussianDpEvent(events.gaussian_noise_multiplier(event.noise_multiplier))
    plain = PoissonSampledDpEvent(event.sampling_probability, gaussian)
    for sampled, _ in events.parts_of(plain, count):  # nothing at rate 0
        assert isinstance(sampled, PoissonSampledDpEvent)
        rate, noise = sampled.sampling_probability, gaussian.noise_multiplier
        # one record more may be there than was stated
        if most > size:
            yield sampled, count
        else:
            yield TruncatedSubsampledGaussianDpEvent(size, rate, most, noise), count


@events.lowered.register
def _(event: TruncatedSubsampledGaussianDpEvent, slack: float) -> DpEvent:
    gaussian = events.lowered(GaussianDpEvent(event.noise_multiplier), slack)
    return TruncatedSubsampledGaussianDpEvent(
        event.dataset_size,
        event.sampling_probability,
        event.truncated_batch_size,
        gaussian.noise_multiplier,
    )


def _displacing(others: int, rate: float, most: int) -> tuple[float, float]:
    """P(M >= m) and q', both rounded up."""
    probability = float(stats.binom.sf(most - 1, others, rate))
    if probability < 1e-290:
        return 1e-290, rate
    joins = most / (others + 1) * float(stats.binom.sf(most, others + 1, rate)) / probability
    return min(probability * (1 + _ROUND_OFF), 1.0), min(joins * (1 + _ROUND_OFF), rate)


@pairs.pair_of.register
def _(event: TruncatedSubsampledGaussianDpEvent, replace: bool) -> Pair:
    size, most = event.dataset_size, event.truncated_batch_size
    rate, noise = event.sampling_probability, event.noise_multiplier
    if not isinstance(pairs.sampled_pair("directed", 0.5, noise / 2), Sampled):
        return Gaussian(2.0 / noise)
    if rate == 1:
        return Gaussian(2.0 / noise)
    full, joins = _displacing(size - 1, rate, most)
    parts: list[tuple[float, SampledKind, float, float]]
    if replace:
        parts = [(1 - full, "antipodal", rate, noise), (full, "symmetric", joins, noise / 2)]
    else:
        # A record may also be added to the stated number: the batch is full a little more often
        # then. What lies between costs no more than a swap at the full rate.
        fuller = max(_displacing(size, rate, most)[0], full)
        parts = [
            (1 - fuller, "directed", rate, noise),
            (full, "directed", joins, noise / 2),
            (fuller - full, "directed", rate, noise / 2),
        ]
    return Mixed(tuple((weight, Sampled(kind, q, z)) for weight, kind, q, z in parts if weight > 0))


@loss_grid.loss_nodes.register
def _(pair: Mixed, tail: float, interval: float | None = None) -> loss_grid.Nodes:
    found = [(weight, loss_grid.loss_nodes(part, tail, interval)) for weight, part in pair.parts]
    return loss_grid.Nodes(
        np.concatenate([nodes.losses for _, nodes in found]),
        np.concatenate([weight * nodes.masses for weight, nodes in found]),
        sum(weight * nodes.central for weight, nodes in found),
    )


@renyi.divergences.register
def _(pair: Mixed, alpha: Array) -> Array:
    terms = [
        np.log(weight) + (alpha - 1) * renyi.divergences(part, alpha) for weight, part in pair.parts
    ]
    return np.asarray(np.maximum(special.logsumexp(terms, axis=0), 0.0) / (alpha - 1))


@pairs.dominating_mu.register
def _(pair: Mixed) -> float:
    return max(pairs.dominating_mu(part) for _, part in pair.parts)
