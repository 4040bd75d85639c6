"""Pairs of distributions that dominate a release, and which pair belongs to which event.

A release is represented by a pair (P, Q) that dominates it: for every neighbouring pair of data
sets and every epsilon the hockey-stick divergence H(P || Q) = sup_S P(S) - e^epsilon Q(S) is at
least that of the release. Compositions are dominated by the product of the pairs (Zhu, Dong, Wang
2022, Theorem 10).

What is known of a kind of pair is registered by its type: quadrature nodes of its privacy loss in
:mod:`loss_grid`, its Renyi curve in :mod:`renyi`, and here what has a default.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import singledispatch
from typing import Literal

import numpy as np
from dp_accounting.dp_event import LaplaceDpEvent
from numpy.typing import NDArray
from scipy import special

from .choices import Neighboring, NeighboringRelation, neighboring_relation
from .events import (
    BoundedRangeDpEvent,
    DpEvent,
    FailureDpEvent,
    GaussianDpEvent,
    MuGaussianDpEvent,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    PureDpEvent,
    RecordwiseBatchGaussianDpEvent,
    SampledWithoutReplacementDpEvent,
    ShuffledEpochDpEvent,
    UnspecifiedBatchGaussianDpEvent,
    ZCDpEvent,
)

Array = NDArray[np.float64]
SampledKind = Literal["directed", "antipodal", "symmetric"]


@dataclass(frozen=True, slots=True)
class Gaussian:
    """(N(mu, 1), N(0, 1))."""

    mu: float


@dataclass(frozen=True, slots=True)
class Sampled:
    """A Gaussian sum of sensitivity 1 and standard deviation ``noise``, taken with probability
    ``rate``.

    kind "directed": ((1-q) N(0, z^2) + q N(1, z^2), N(0, z^2)) for a removed record, the reverse
    for an added one. kind "antipodal": ((1-q) N(0, z^2) + q N(1, z^2), (1-q) N(0, z^2) + q N(-1,
    z^2)), which is its own reverse. kind "symmetric": the pair whose profile for epsilon >= 0 is
    that of "directed" and which is its own reverse.
    """

    kind: SampledKind
    rate: float
    noise: float


@dataclass(frozen=True, slots=True)
class Allocated:
    """A Gaussian sum of sensitivity 1 and standard deviation ``noise`` in one of ``steps`` steps.

    kind "directed": (the average of N(e_i, z^2 1) over the unit vectors, N(0, z^2 1)) for a removed
    record, the reverse for an added one. kind "antipodal": a bound on the pair of the averages of
    N(e_i, z^2 1) and of N(-e_i, z^2 1), see :mod:`allocation`; its own reverse.
    """

    kind: Literal["directed", "antipodal"]
    steps: int
    noise: float


@dataclass(frozen=True, slots=True)
class Mixed:
    """One of several releases, drawn with these weights; which one, is told."""

    parts: tuple[tuple[float, Sampled], ...]


@dataclass(frozen=True, slots=True)
class Laplace:
    """A sum of sensitivity 1 with Laplace noise of this scale b, taken with probability ``rate``:
    ((1-q) Lap(0, b) + q Lap(1, b), Lap(0, b)) for a removed record, the reverse for an added one.
    """

    rate: float
    scale: float


@dataclass(frozen=True, slots=True)
class FewLosses:
    """Privacy losses with their probabilities, all of them; its own reverse."""

    losses: tuple[float, ...]
    masses: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class DiscreteGaussian:
    """Discrete Gaussians of parameter ``std`` around ``move`` and around 0; its own reverse."""

    std: float
    move: int


@dataclass(frozen=True, slots=True)
class GaussianMixture:
    """(the mixture of N(moves_i, 1), chances_i and of N(0, 1) for the rest, N(0, 1))."""

    moves: tuple[float, ...]
    chances: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Pure:
    """Randomised response with parameter ``epsilon``: dominates every epsilon-differentially
    private release.
    """

    epsilon: float


@dataclass(frozen=True, slots=True)
class BoundedRange:
    """The profile (1 - e^(-(b-g)/2))^2 / (1 - e^(-b)), -b <= g <= b (Dong, Durfee, Rogers
    2020), b = ``epsilon``.
    """

    epsilon: float


@dataclass(frozen=True, slots=True)
class Concentrated:
    """(xi, rho)-zCDP: known by its Renyi curve only."""

    rho: float
    xi: float


@dataclass(frozen=True, slots=True)
class Repeated:
    """The best of a hidden number of runs, each of which makes the releases ``parts``: pairs with
    how often. Known by its Renyi curve only, see :mod:`repeated`.
    """

    parts: tuple[tuple[Pair, int], ...]
    mean: float
    shape: float


@dataclass(frozen=True, slots=True)
class Failure:
    """Loss +infinity with probability ``delta``, else 0; its own reverse."""

    delta: float


@dataclass(frozen=True, slots=True)
class NonPrivate:
    """No guarantee at all."""


Pair = (
    Gaussian
    | Sampled
    | Allocated
    | Mixed
    | Laplace
    | FewLosses
    | DiscreteGaussian
    | GaussianMixture
    | Pure
    | BoundedRange
    | Concentrated
    | Repeated
    | Failure
    | NonPrivate
)

# Below this noise / sensitivity sampling is ignored (an upper bound): one step alone then costs
# epsilon > 1000.
_LEAST_NOISE = 0.02
_LEAST_RATE = 1e-30  # smaller ones are rounded up to it, for their inverses to be floats


def sampled_pair(kind: SampledKind, rate: float, noise: float) -> Pair:
    """A sampled Gaussian sum, or an unsampled one where sampling changes nothing."""
    if rate == 1.0 or noise < _LEAST_NOISE:
        return Gaussian((2.0 if kind == "antipodal" else 1.0) / noise)
    return Sampled(kind, max(rate, _LEAST_RATE), noise)


# --- from events to pairs -------------------------------------------------------------------------


def dominating_pair(event: DpEvent, neighboring: Neighboring | NeighboringRelation) -> Pair:
    """The pair that dominates one elementary event.

    Only the functions registered here turn a noise / clip bound into a noise / sensitivity.

    Raises:
        ValueError: the event gives no guarantee under this neighbouring relation.
    """
    return pair_of(event, neighboring_relation(neighboring) == "replace_one")


@singledispatch
def pair_of(event: DpEvent, replace: bool) -> Pair:
    """:func:`dominating_pair` of one kind of event; ``replace``: a record is replaced by another.

    A new kind of event registers its own: ``@pair_of.register``.
    """
    raise TypeError(f"{event!r} is not an elementary event.")


@pair_of.register
def _(event: GaussianDpEvent, replace: bool) -> Pair:
    return Gaussian((2.0 if replace else 1.0) / event.noise_multiplier)


@pair_of.register
def _(event: PoissonSampledDpEvent, replace: bool) -> Pair:
    if isinstance(event.event, LaplaceDpEvent):
        if replace and event.sampling_probability < 1:
            raise ValueError(
                "Laplace noise on Poisson batches is accounted for under add_or_remove_one only:"
                " use that relation, or charge LaplaceDpEvent, without amplification."
            )
        return Laplace(event.sampling_probability, event.event.noise_multiplier / (1 + replace))
    if isinstance(event.event, PureDpEvent | FailureDpEvent):
        # Balle, Barthe, Gaboardi 2018, Theorem 8: (log(1 + q (e^epsilon - 1)), q delta)
        q = event.sampling_probability
        if replace and q < 1:
            raise ValueError(
                "Poisson batches amplify a pure release, or one that may fail, under"
                " add_or_remove_one only: use that relation, or charge the release itself."
            )
        if isinstance(event.event, FailureDpEvent):
            return (
                Failure(q * event.event.delta * (1 + 1e-15))
                if q < 1
                else pair_of(event.event, replace)
            )
        epsilon = event.event.epsilon
        if q < 1 and epsilon > 30:  # no exponential beyond floats
            epsilon += math.log(q) + math.log1p((1 - q) / q * math.exp(-epsilon))
        elif q < 1:
            epsilon = math.log1p(q * math.expm1(epsilon))
        return Pure(epsilon * (1 + 1e-14) if q < 1 else epsilon)
    kind: SampledKind = "antipodal" if replace else "directed"
    return sampled_pair(kind, event.sampling_probability, event.event.noise_multiplier)


@pair_of.register
def _(event: SampledWithoutReplacementDpEvent, replace: bool) -> Pair:
    # A batch of fixed size swaps one member for another under either relation: sensitivity 2C.
    rate = event.sample_size / event.source_dataset_size
    return sampled_pair("symmetric", rate, event.event.noise_multiplier / 2)


@pair_of.register
def _(event: RecordwiseBatchGaussianDpEvent, replace: bool) -> Pair:
    return Gaussian(2.0 / event.noise_multiplier)


@pair_of.register
def _(event: UnspecifiedBatchGaussianDpEvent, replace: bool) -> Pair:
    if not replace:
        raise ValueError(
            "an unspecified batch may change altogether when one record is added: use"
            ' PrivacyAccountant(neighboring="replace_one") or PrivacyEngine.make_private, or charge'
            " RecordwiseBatchGaussianDpEvent if who is in a batch does not depend on other records."
        )
    return Gaussian(2.0 / event.noise_multiplier)


@pair_of.register
def _(event: ShuffledEpochDpEvent, replace: bool) -> Pair:
    if not replace:
        raise ValueError(
            "a shuffled loader gives no guarantee under add_or_remove_one, where an added record"
            " may change every batch: use PrivacyAccountant(neighboring='replace_one'), or Poisson"
            " sampling (PrivacyEngine.make_private)."
        )
    return Gaussian(2.0 / event.noise_multiplier)


@pair_of.register
def _(event: MuGaussianDpEvent, replace: bool) -> Pair:
    return Gaussian(event.mu)


@pair_of.register
def _(event: PureDpEvent, replace: bool) -> Pair:
    return Pure(event.epsilon)


@pair_of.register
def _(event: BoundedRangeDpEvent, replace: bool) -> Pair:
    return BoundedRange(event.epsilon)


@pair_of.register
def _(event: ZCDpEvent, replace: bool) -> Pair:
    return Concentrated(event.rho, event.xi)


@pair_of.register
def _(event: FailureDpEvent, replace: bool) -> Pair:
    return Failure(event.delta)


@pair_of.register
def _(event: NonPrivateDpEvent, replace: bool) -> Pair:
    return NonPrivate()


# --- what is known of a pair ----------------------------------------------------------------------


def has_two_directions(pair: Pair) -> bool:
    """Whether a removed and an added record differ; every other pair is its own reverse."""
    if isinstance(pair, Mixed):
        return any(has_two_directions(part) for _, part in pair.parts)
    if isinstance(pair, Laplace):
        return pair.rate < 1
    if isinstance(pair, GaussianMixture):
        return True
    return isinstance(pair, (Sampled, Allocated)) and pair.kind == "directed"


@singledispatch
def largest_loss(pair: Pair) -> float:
    """What the privacy loss of one release never passes."""
    return math.inf


@largest_loss.register
def _(pair: Pure | BoundedRange) -> float:
    return pair.epsilon


@singledispatch
def dominating_mu(pair: Pair) -> float:
    """A mu for which ``pair`` is mu-Gaussian differentially private."""
    return math.inf


@dominating_mu.register
def _(pair: Gaussian) -> float:
    return pair.mu


@dominating_mu.register
def _(pair: Sampled) -> float:
    return (2.0 if pair.kind == "antipodal" else 1.0) / pair.noise  # without amplification


@dominating_mu.register
def _(pair: Pure | BoundedRange) -> float:
    # The Gaussian whose trade-off curve meets that of randomised response where both errors are
    # equal; it is convex with the same ends, so it lies below.
    return -2.0 * float(special.ndtri(special.expit(-pair.epsilon)))


@dominating_mu.register
def _(pair: Concentrated | Repeated) -> float:
    raise ValueError(
        "a release known by its Renyi curve only implies no Gaussian differential privacy, on which"
        " this accountant's adaptive guarantee rests since its first charge: charge it to an"
        " accountant of its own."
    )


def covers(reserve: Pair, pair: Pair) -> bool:
    """Whether ``reserve`` dominates ``pair``: less noise and a larger rate are less private."""
    if isinstance(reserve, Sampled) and isinstance(pair, Sampled):
        return (
            reserve.kind == pair.kind and reserve.rate >= pair.rate and reserve.noise <= pair.noise
        )
    if isinstance(reserve, Allocated) and isinstance(pair, Allocated):
        return (
            reserve.kind == pair.kind
            and reserve.steps <= pair.steps
            and reserve.noise <= pair.noise
        )
    if isinstance(reserve, Gaussian) and isinstance(pair, Gaussian):
        return reserve.mu >= pair.mu
    return reserve == pair


def added(counts: Mapping[Pair, int], more: Mapping[Pair, int], times: int = 1) -> dict[Pair, int]:
    """``counts`` plus ``times`` times ``more``."""
    total = dict(counts)
    for pair, count in more.items():
        total[pair] = total.get(pair, 0) + times * count
    return total


def take(tokens: dict[Pair, int], pair: Pair, count: int) -> Pair | None:
    """Takes ``count`` of what covers ``pair`` out of ``tokens``, and says what that was;
    ``None``: nothing does.
    """
    left = tokens.get(pair, 0)
    if left < count:
        found = next((p for p, n in tokens.items() if n >= count and covers(p, pair)), None)
        if found is None:
            return None
        pair, left = found, tokens[found]
    tokens[pair] = left - count
    return pair
