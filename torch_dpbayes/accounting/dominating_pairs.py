"""Pairs of distributions that dominate a release, and the pair of each event.

A pair (P, Q) dominates a release if for all neighbouring data sets and every epsilon its
hockey-stick divergence H(P || Q) = sup_S P(S) - e^epsilon Q(S) is at least that of the release.
Compositions are dominated by the product of the pairs (Zhu, Dong, Wang 2022, Theorem 10).

For each type of pair :mod:`privacy_loss` registers the privacy loss, and :mod:`renyi` the Renyi
curve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any, Literal

import attr
import numpy as np
from numpy.typing import NDArray
from scipy import special

from ..errors import ArgumentError, ArgumentTypeError
from . import events
from .events import DpEvent, Neighboring, NeighboringRelation

Array = NDArray[np.float64]
SampledKind = Literal["directed", "antipodal", "symmetric"]

EXACT_LEVELS = 48  # up to so many different sampled releases are composed without rounding
_MOST_LEVELS = 1000
# above so many kinds of epochs of random allocation their noise is rounded: each takes a second
_MOST_EPOCHS, _EPOCHS_RATIO = 8, 1.01
# below this noise / sensitivity sampling is ignored: a single step costs epsilon > 1000
_LEAST_NOISE = 0.02
_LEAST_RATE = 1e-30  # smaller rates are rounded up to it, so that their inverses are finite

# --- kinds of pairs -------------------------------------------------------------------------------


class Pair:
    """Two distributions; other modules register their properties by type."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Gaussian(Pair):
    """(N(mu, 1), N(0, 1))."""

    mu: float


@dataclass(frozen=True, slots=True)
class Sampled(Pair):
    """A Gaussian sum of sensitivity 1 and standard deviation z = ``noise``, which includes the
    record with probability q = ``rate``.

    kind "directed": ((1-q) N(0, z^2) + q N(1, z^2), N(0, z^2)) for a removed record, the reverse
    for an added one. kind "antipodal": ((1-q) N(0, z^2) + q N(1, z^2), (1-q) N(0, z^2) + q N(-1,
    z^2)). kind "symmetric": the pair that is its own reverse and has the profile of "directed" for
    epsilon >= 0.
    """

    kind: SampledKind
    rate: float
    noise: float

    @property
    def mu(self) -> float:
        """The mu of the release without amplification."""
        return (2.0 if self.kind == "antipodal" else 1.0) / self.noise


@dataclass(frozen=True, slots=True)
class Capped(Pair):
    """The losses of ``pair``, or of its reverse, up to ``most``. For an antipodal pair, and for a
    reverse, losses below ``-most`` are set to ``-most``.
    """

    pair: Sampled
    most: float
    reverse: bool = False


@dataclass(frozen=True, slots=True)
class Allocated(Pair):
    """Gaussian sums of sensitivity 1 and standard deviation z = ``noise`` in ``steps`` steps; the
    record is in one of them.

    kind "directed": (the average of N(e_i, z^2 1) over the unit vectors, N(0, z^2 1)) for a removed
    record, the reverse for an added one. kind "antipodal": its own reverse, a bound on the pair of
    the averages of N(e_i, z^2 1) and of N(-e_i, z^2 1), see :mod:`random_allocation`.
    """

    kind: Literal["directed", "antipodal"]
    steps: int
    noise: float


@dataclass(frozen=True, slots=True)
class Mixed(Pair):
    """One of several releases, chosen at random with these weights. The choice is public."""

    parts: tuple[tuple[float, Sampled], ...]


@dataclass(frozen=True, slots=True)
class Laplace(Pair):
    """(Lap(1, b), Lap(0, b)), b = ``scale``; its own reverse."""

    scale: float


@dataclass(frozen=True, slots=True)
class FewLosses(Pair):
    """A list of all privacy losses, with probabilities; its own reverse unless ``directed``."""

    losses: tuple[float, ...]
    masses: tuple[float, ...]
    directed: bool = False


@dataclass(frozen=True, slots=True)
class DiscreteGaussian(Pair):
    """Discrete Gaussians of parameter ``std`` around ``move`` and around 0; its own reverse."""

    std: float
    move: int


@dataclass(frozen=True, slots=True)
class Amplified(Pair):
    """((1-q) Q + q P, Q) of a pair (P, Q), q = ``rate`` < 1, for a removed record, the reverse for
    an added one (Zhu, Dong, Wang 2022, Theorem 11).
    """

    rate: float
    pair: Laplace | FewLosses | DiscreteGaussian | Pure


@dataclass(frozen=True, slots=True)
class GaussianMixture(Pair):
    """(sum_i chances_i N(moves_i, 1), with the remaining weight on N(0, 1); N(0, 1))."""

    moves: tuple[float, ...]
    chances: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Pure(Pair):
    """Randomised response with parameter ``epsilon``; it dominates every pure release."""

    epsilon: float


@dataclass(frozen=True, slots=True)
class BoundedRange(Pair):
    """The profile (1 - e^(-(b-g)/2))^2 / (1 - e^(-b)), -b <= g <= b (Dong, Durfee, Rogers 2020),
    b = ``epsilon``.
    """

    epsilon: float


@dataclass(frozen=True, slots=True)
class Concentrated(Pair):
    """(xi, rho)-zCDP, on a Poisson sample of this rate; it has only a Renyi curve."""

    rho: float
    xi: float
    rate: float = 1.0


@dataclass(frozen=True, slots=True)
class Failure(Pair):
    """Loss +infinity with probability ``delta``, else 0; its own reverse."""

    delta: float


@dataclass(frozen=True, slots=True)
class NonPrivate(Pair):
    """No guarantee at all."""


def sampled_pair(kind: SampledKind, rate: float, noise: float) -> Pair:
    """A sampled Gaussian sum, or an unsampled one if sampling does not help."""
    found = Sampled(kind, rate, noise)
    return Gaussian(found.mu) if rate == 1.0 or noise < _LEAST_NOISE else found


# --- from events to pairs -------------------------------------------------------------------------


def dominating_pair(event: DpEvent, neighboring: Neighboring | NeighboringRelation) -> Pair:
    """The pair that dominates one elementary event.

    Only the functions registered here convert noise / clip bound to noise / sensitivity.

    Raises:
        ArgumentError: the event gives no guarantee under this neighbouring relation.
    """
    relation = events.neighboring_relation(neighboring)
    release = event.event if isinstance(event, events.UserLevelDpEvent) else event
    if relation != "zero_out":
        return pair_of(release, relation == "replace_one")
    if (found := WHERE_ZEROED.get(type(release))) is None:
        raise ArgumentError(
            f"{type(release).__name__} is not supported under zero_out: use add_or_remove_one"
            " or replace_one, or charge its guarantee (PureDpEvent, MuGaussianDpEvent)."
        )
    return found(release)


@singledispatch
def pair_of(event: DpEvent, replace: bool) -> Pair:
    """:func:`dominating_pair` for one kind of event; ``replace``: a record is replaced by another.

    A new kind of event registers its own function: ``@pair_of.register``.
    """
    raise ArgumentTypeError(f"{event!r} is not an elementary event.")


@pair_of.register
def _(event: events.GaussianDpEvent, replace: bool) -> Pair:
    return Gaussian((2.0 if replace else 1.0) / event.noise_multiplier)


@pair_of.register
def _(event: events.PoissonSampledDpEvent, replace: bool) -> Pair:
    q = max(event.sampling_probability, _LEAST_RATE)
    if isinstance(event.event, events.GaussianDpEvent):
        return sampled_pair("antipodal" if replace else "directed", q, event.event.noise_multiplier)
    pair = pair_of(event.event, replace)
    if q == 1:
        return pair
    if replace:
        raise ArgumentError(
            f"Poisson batches amplify {type(event.event).__name__} under add_or_remove_one only:"
            " use that relation, or charge the release itself, without amplification."
        )
    if isinstance(pair, Concentrated):
        return Concentrated(pair.rho, pair.xi, q)
    # Balle, Barthe, Gaboardi 2018, Theorem 8
    if isinstance(pair, Failure):
        return Failure(q * pair.delta * (1 + 1e-15))
    assert isinstance(pair, Laplace | FewLosses | DiscreteGaussian | Pure)
    return Amplified(q, pair)


@pair_of.register
def _(event: events.SampledWithoutReplacementDpEvent, replace: bool) -> Pair:
    # under either relation one member of the batch is replaced by another: sensitivity 2C
    rate = event.sample_size / event.source_dataset_size
    return sampled_pair("symmetric", rate, event.event.noise_multiplier / 2)


@pair_of.register
def _(event: events.RecordwiseBatchGaussianDpEvent, replace: bool) -> Pair:
    return Gaussian(2.0 / event.noise_multiplier)


@pair_of.register
def _(
    event: events.UnspecifiedBatchGaussianDpEvent | events.ShuffledEpochDpEvent, replace: bool
) -> Pair:
    if replace:
        return Gaussian(2.0 / event.noise_multiplier)
    if isinstance(event, events.ShuffledEpochDpEvent):
        raise ArgumentError(
            "a shuffled loader gives no guarantee under add_or_remove_one, because an added"
            " record may change every batch: use PrivacyAccountant(neighboring='replace_one'), or"
            " Poisson sampling (PrivacyEngine.make_private)."
        )
    raise ArgumentError(
        "batches are unspecified, so an added record may change a whole batch: use"
        ' PrivacyAccountant(neighboring="replace_one") or PrivacyEngine.make_private. If no'
        " record decides whether another one is in a batch, charge"
        " RecordwiseBatchGaussianDpEvent."
    )


@pair_of.register
def _(event: events.LaplaceDpEvent, replace: bool) -> Pair:
    # One coordinate that moves by s costs at least as much as several that move by s in total: for
    # log-concave noise its trade-off curve is theirs, applied one after the other.
    return Laplace(event.noise_multiplier / (1 + replace))


# guarantees that hold under the accountant's relation, for any relation
_GUARANTEES: dict[type[Any], Callable[..., Pair]] = {
    events.MuGaussianDpEvent: Gaussian,
    events.PureDpEvent: Pure,
    events.BoundedRangeDpEvent: BoundedRange,
    events.ZCDpEvent: Concentrated,
    events.FailureDpEvent: Failure,
    events.NonPrivateDpEvent: NonPrivate,
}
for _kind, _pair in _GUARANTEES.items():
    pair_of.register(_kind, lambda event, replace, _pair=_pair: _pair(*attr.astuple(event)))


def as_removed(event: Any) -> Pair:
    """The pair for zero_out if only the record's contribution changes: as for removal."""
    return pair_of(event, False)


# releases of a sum: zeroing out a record changes it in the same way as removing the record
ADDITIVE: list[type[Any]] = [events.GaussianDpEvent, events.LaplaceDpEvent]


def _sampled_where_zeroed(event: events.PoissonSampledDpEvent) -> Pair:
    """A zeroed-out record stays in its batch, and other releases may show the batch's size."""
    if event.sampling_probability < 1 and type(event.event) not in ADDITIVE:
        raise ArgumentError(
            f"Poisson batches do not amplify {type(event.event).__name__} under zero_out, because"
            " a record stays in its batch: use add_or_remove_one, or charge the release itself,"
            " without amplification."
        )
    return as_removed(event)


def _any_batch_where_zeroed(event: Any) -> Pair:
    """Zeroing out a record does not change the members of any batch."""
    return Gaussian(1.0 / event.noise_multiplier)


# the pair of each kind of event that "zero_out" supports; mechanisms.py adds others
WHERE_ZEROED: dict[type[Any], Callable[[Any], Pair]] = {
    **dict.fromkeys((*ADDITIVE, *_GUARANTEES), as_removed),
    events.PoissonSampledDpEvent: _sampled_where_zeroed,
    events.UnspecifiedBatchGaussianDpEvent: _any_batch_where_zeroed,
    events.RecordwiseBatchGaussianDpEvent: _any_batch_where_zeroed,
    events.ShuffledEpochDpEvent: _any_batch_where_zeroed,
}


# --- properties of pairs --------------------------------------------------------------------------


def has_two_directions(pair: Pair) -> bool:
    """Whether a removed and an added record differ; every other pair is its own reverse."""
    if isinstance(pair, Mixed):
        return any(has_two_directions(part) for _, part in pair.parts)
    if isinstance(pair, FewLosses):
        return pair.directed
    if isinstance(pair, GaussianMixture | Amplified):
        return True
    return isinstance(pair, (Sampled, Allocated)) and pair.kind == "directed"


def directions(levels: Mapping[Pair, int]) -> tuple[bool, ...]:
    """The directions to compute: False for a removed record, True (reversed) for an added one."""
    return (False, True) if any(map(has_two_directions, levels)) else (False,)


def largest_loss(pair: Pair) -> float:
    """The largest possible privacy loss of one release."""
    if isinstance(pair, Pure | BoundedRange):
        return pair.epsilon
    if isinstance(pair, Laplace):
        return 1 / pair.scale
    if isinstance(pair, Amplified):
        q, inner = pair.rate, largest_loss(pair.pair)
        if inner > 30:  # the exponential would overflow
            found = inner + math.log(q) + math.log1p((1 - q) / q * math.exp(-inner))
        else:
            found = math.log1p(q * math.expm1(inner))
        return found * (1 + 1e-14)
    return max(map(abs, pair.losses)) if isinstance(pair, FewLosses) else math.inf


def largest_added_loss(pair: Pair) -> float:
    """The same for an added record: with probability 1 - q the release does not contain it."""
    if isinstance(pair, Sampled | Amplified) and has_two_directions(pair):
        return -math.log1p(-pair.rate)
    return largest_loss(pair)


def largest_added_sum(levels: Mapping[Pair, int]) -> float:
    """The same for all releases together."""
    return math.fsum(n * largest_added_loss(pair) for pair, n in levels.items())


def dominating_mu(pair: Pair) -> float:
    """A mu for which ``pair`` is mu-Gaussian differentially private, without amplification."""
    if isinstance(pair, Gaussian | Sampled):
        return pair.mu
    if isinstance(pair, Allocated):
        return (2.0 if pair.kind == "antipodal" else 1.0) / pair.noise
    if isinstance(pair, GaussianMixture):
        return max(pair.moves)
    if isinstance(pair, Mixed):
        return max(part.mu for _, part in pair.parts)
    if isinstance(pair, Concentrated):
        raise ArgumentError(
            "this accountant's first charge was adaptive and Gaussian, so each release needs"
            " Gaussian differential privacy, and a Renyi curve does not give it: charge this"
            " release to a separate accountant."
        )
    # The Gaussian whose trade-off curve touches that of randomised response at equal errors. It is
    # convex with the same ends, so it lies below.
    largest = largest_loss(pair)
    return math.inf if largest == math.inf else -2.0 * float(special.ndtri(special.expit(-largest)))


def covers(reserve: Pair, pair: Pair) -> bool:
    """Whether ``reserve`` dominates ``pair``: less noise and a larger rate are less private."""
    if isinstance(reserve, Sampled) and isinstance(pair, Sampled) and reserve.kind == pair.kind:
        return reserve.rate >= pair.rate and reserve.noise <= pair.noise
    if isinstance(reserve, Allocated) and isinstance(pair, Allocated) and reserve.kind == pair.kind:
        return reserve.steps <= pair.steps and reserve.noise <= pair.noise
    if isinstance(reserve, Gaussian) and isinstance(pair, Gaussian):
        return reserve.mu >= pair.mu
    return reserve == pair


def added(counts: Mapping[Pair, int], more: Mapping[Pair, int], times: int = 1) -> dict[Pair, int]:
    """``counts`` plus ``times`` times ``more``."""
    total = dict(counts)
    for pair, count in more.items():
        total[pair] = total.get(pair, 0) + times * count
    return total


def uncovered(held: dict[Pair, int], need: Mapping[Pair, int]) -> dict[Pair, int]:
    """Removes from ``held`` what covers ``need``, and returns the part of ``need`` that is left."""
    rest = {}
    for pair, count in need.items():
        for kept in (pair, *held):
            if count and held.get(kept, 0) and covers(kept, pair):
                used = min(count, held[kept])
                held[kept] -= used
                count -= used
        if count:
            rest[pair] = count
    return rest


# --- merging releases -----------------------------------------------------------------------------


def merge(counts: Mapping[Pair, int]) -> dict[Pair, int]:
    """Merges Gaussians into one, and many kinds of epochs into a few that cost no less."""
    mus = [(n, pair.mu) for pair, n in counts.items() if isinstance(pair, Gaussian)]
    several = sum(isinstance(pair, Allocated) for pair in counts) > _MOST_EPOCHS
    merged: dict[Pair, int] = {}
    for pair, count in counts.items():
        if isinstance(pair, Gaussian):
            continue
        if isinstance(pair, Allocated) and several:
            cell = math.floor(math.log(pair.noise) / math.log(_EPOCHS_RATIO))
            pair = replace(pair, noise=min(_EPOCHS_RATIO**cell, pair.noise))
        merged[pair] = merged.get(pair, 0) + count
    if squared := math.fsum(n * mu**2 for n, mu in mus):
        merged[Gaussian(math.sqrt(squared))] = 1
    return merged


def scattered_of(levels: Mapping[Pair, int]) -> tuple[list[tuple[Sampled, int]], dict[Pair, int]]:
    """Sampled releases, if they are too many to compose one by one, and the others. The others
    include each sampled release with a share of the cost above 1 / ``EXACT_LEVELS``.
    """
    sampled = [(pair, count) for pair, count in levels.items() if isinstance(pair, Sampled)]
    if len(sampled) <= EXACT_LEVELS:
        return [], dict(levels)
    rate, noise, count = np.array([(pair.rate, pair.noise, n) for pair, n in sampled]).T
    # log of n q^2 (exp(1 / z^2) - 1): for small losses about twice the mean loss
    logs = np.log(count) + 2 * np.log(rate) + noise**-2 + np.log(-np.expm1(-(noise**-2)))
    large = logs > special.logsumexp(logs) - math.log(EXACT_LEVELS)
    few = {pair for (pair, _), is_large in zip(sampled, large.tolist(), strict=True) if is_large}
    others = {p: n for p, n in levels.items() if p in few or not isinstance(p, Sampled)}
    return [(pair, n) for pair, n in sampled if pair not in few], others


def grouped(levels: Mapping[Pair, int], ratio: float, *, upper: bool) -> dict[Pair, int]:
    """Rounds many sampled releases on a grid of rates and noises with at least this ratio and at
    most a thousand cells. ``upper``: to the least private member of the cell, with its noise on the
    grid, so that its curve can be reused for other histories; else to the most private member.
    """
    sampled, groups = scattered_of(levels)
    if not sampled:
        return groups
    noise, rate = np.array([(pair.noise, pair.rate) for pair, _ in sampled]).T
    while True:
        cells = np.floor(np.log([noise, rate]) / math.log(ratio)).astype(np.int64)
        members: dict[tuple[SampledKind, int, int], list[int]] = {}
        for i, (pair, _) in enumerate(sampled):
            members.setdefault((pair.kind, *cells[:, i].tolist()), []).append(i)
        if len(members) <= _MOST_LEVELS:
            break
        ratio = 1 + 2 * (ratio - 1)
    for (kind, cell, _), index in members.items():
        least, most = (np.min, np.max) if upper else (np.max, np.min)
        z = float(least(noise[index]))
        level = Sampled(kind, float(most(rate[index])), min(z, ratio**cell) if upper else z)
        groups[level] = groups.get(level, 0) + sum(sampled[i][1] for i in index)
    return groups
