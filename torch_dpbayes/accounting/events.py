"""What can be charged: the vocabulary of releases.

dp_accounting's event classes are used where they exist; the ones it lacks stand beside them in the
same frozen form. An event describes one release and nothing else. ``noise_multiplier`` is **noise
standard deviation / clip bound** everywhere; the neighbouring relation belongs to the accountant,
which turns the clip bound into a sensitivity.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator
from functools import singledispatch
from typing import Any, TypeAlias

import attr
from dp_accounting.dp_event import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
    SelfComposedDpEvent,
    ZCDpEvent,
)

__all__ = [
    "BoundedRangeDpEvent",
    "ComposedDpEvent",
    "DpEvent",
    "FailureDpEvent",
    "GaussianDpEvent",
    "MuGaussianDpEvent",
    "NoOpDpEvent",
    "NonPrivateDpEvent",
    "PoissonSampledDpEvent",
    "PureDpEvent",
    "RecordwiseBatchGaussianDpEvent",
    "SampledWithoutReplacementDpEvent",
    "SelfComposedDpEvent",
    "ShuffledEpochDpEvent",
    "UnspecifiedBatchGaussianDpEvent",
    "ZCDpEvent",
]

# of the numbers in events: squares of them, and of many together, are floats
_LEAST, _LARGEST = 1e-50, 1e50
_GRID = 1.005  # ratio of the noise multipliers that reserves are rounded down to


@attr.s(frozen=True, slots=True, auto_attribs=True)
class UnspecifiedBatchGaussianDpEvent(DpEvent):
    """A Gaussian sum over a batch of which no more is known than a shuffled loader tells.

    Valid under replace-one only, where one member may turn into another: sensitivity 2C, no
    amplification. What the records hold must not decide who is in a batch. Under add-or-remove-one
    one record more may change the batch altogether (a seeded shuffle does), so there it is refused.
    """

    noise_multiplier: float


@attr.s(frozen=True, slots=True, auto_attribs=True)
class RecordwiseBatchGaussianDpEvent(DpEvent):
    """A Gaussian sum over a batch; the caller states that who is in it does not depend on other
    records.

    That is, whether a record is in the batch is a function of this record, of public things, and of
    chance that has nothing to do with other records: not of its position, of how many records there
    are, or of what they hold. A batch chosen by a hash of the record's name or by its date is one;
    a shuffled or a sorted loader's is not. Charged at sensitivity 2C under both relations, without
    amplification, which also covers a record that takes another's place.
    ``PrivacyAccountant.summary()`` shows the statement.
    """

    noise_multiplier: float


@attr.s(frozen=True, slots=True, auto_attribs=True)
class ShuffledEpochDpEvent(DpEvent):
    """One pass over an ordinary shuffled loader, in which every record is used at most once.

    Valid under replace-one only: the replaced record moves one batch sum by at most 2C, the other
    batches not at all. Under add-or-remove-one an added record displaces others from their batches.
    A started epoch counts as a whole, so charge the event when the epoch begins, with the smallest
    noise multiplier that the epoch will use.
    """

    noise_multiplier: float


@attr.s(frozen=True, slots=True, auto_attribs=True)
class MuGaussianDpEvent(DpEvent):
    """A release that is mu-Gaussian differentially private (Dong, Roth, Su 2022) under the
    accountant's relation.
    """

    mu: float


@attr.s(frozen=True, slots=True, auto_attribs=True)
class PureDpEvent(DpEvent):
    """A release that is epsilon-differentially private, delta = 0, under the accountant's
    relation.
    """

    epsilon: float


@attr.s(frozen=True, slots=True, auto_attribs=True)
class BoundedRangeDpEvent(DpEvent):
    """A release whose log-likelihood ratios span at most ``epsilon``: the exponential mechanism
    (Dong, Durfee, Rogers 2020). It is epsilon-differentially private under the accountant's
    relation, and composes better than that.
    """

    epsilon: float


@attr.s(frozen=True, slots=True, auto_attribs=True)
class FailureDpEvent(DpEvent):
    """A release that fails with probability ``delta``, 0 < delta < 1: then it reveals everything,
    else nothing, under the accountant's relation.

    An (epsilon, delta)-differentially private release is dominated exactly by
    ``ComposedDpEvent([PureDpEvent(epsilon), FailureDpEvent(delta)])`` (Kairouz, Oh, Viswanath 2015,
    Theorem 3.3). At a total delta below that of the failures epsilon is infinite.
    """

    delta: float


GaussianSum: TypeAlias = (
    GaussianDpEvent
    | UnspecifiedBatchGaussianDpEvent
    | RecordwiseBatchGaussianDpEvent
    | ShuffledEpochDpEvent
)


def gaussian_noise_multiplier(value: Any, what: str = "noise_multiplier") -> float:
    """``value`` as a positive finite ``float``, or the error that says what to write instead."""
    multiplier = _real(value, what)
    if multiplier == 0:
        raise ValueError(
            f"{what} is 0: a sum without noise is not private at any epsilon. Charge"
            " NonPrivateDpEvent() (epsilon becomes infinite), or use a positive noise multiplier."
        )
    if not _LEAST <= multiplier <= _LARGEST:
        raise ValueError(
            f"{what} must be positive and finite (noise standard deviation / clip bound), between"
            f" {_LEAST:g} and {_LARGEST:g}: got {value!r}."
        )
    return multiplier


def sampling_rate(value: Any, what: str = "sample_rate") -> float:
    """``value`` as a ``float`` in (0, 1]."""
    rate = _real(value, what)
    if not 0 < rate <= 1:
        raise ValueError(
            f"{what} must lie in (0, 1] (it is expected batch size / number of records, both"
            f" public), got {value!r}."
        )
    return rate


def positive_count(value: Any, what: str = "count") -> int:
    """``value`` as a positive ``int``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(f"{what} must be a positive whole number, got {value!r}.")
    if int(value) > 2**53:
        raise ValueError(
            f"{what} must be at most 2**53, up to which it can be saved exactly, got {value!r}."
        )
    return int(value)


def _real(value: Any, what: str) -> float:
    # float(): dp_accounting drops multipliers that are not Python floats when they stand inside a
    # composed event.
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{what} must be a number, got {value!r}.") from None


def _non_negative(value: Any, what: str) -> float:
    """``value`` as 0 or a ``float`` that can be squared. A smaller one is rounded up, which
    costs no more than it can be told apart.
    """
    number = _real(value, what)
    if not 0 <= number <= _LARGEST:
        raise ValueError(
            f"{what} must be at least 0 and at most {_LARGEST:g}, beyond which nothing is private:"
            f" got {value!r}."
        )
    return max(number, _LEAST) if number else 0.0


def sampled_gaussian(event: DpEvent, sampler: str) -> GaussianDpEvent:
    """The one Gaussian that ``event`` costs as much as inside of a ``sampler``, or the error that
    says why there is none. Several releases from one batch may follow from one another.
    """
    is_joint = isinstance(event, (ComposedDpEvent, SelfComposedDpEvent))
    parts = list(parts_of(event, 1)) if is_joint else [(event, 1)]
    if any(type(part) is NonPrivateDpEvent for part, _ in parts):
        raise TypeError(
            f"{sampler} of a non-private release is not private: charge NonPrivateDpEvent() itself."
        )
    if not parts or any(type(part) is not GaussianDpEvent for part, _ in parts):
        raise TypeError(
            f"{sampler} must hold GaussianDpEvents, for which amplification is proved, got"
            f" {event!r}: charge what else there is as releases of their own."
        )
    multipliers = [gaussian_noise_multiplier(part.noise_multiplier) for part, _ in parts]
    if not is_joint:
        return GaussianDpEvent(multipliers[0])
    # Gaussian sums over one batch are one, with the batch's contributions side by side
    squared = math.fsum(n / z**2 for z, (_, n) in zip(multipliers, parts, strict=True))
    return GaussianDpEvent(gaussian_noise_multiplier(squared**-0.5 * (1 - 1e-15)))


def _epsilon_delta(event: DpEvent) -> list[DpEvent]:
    """The pure release and the failure that dominate what is released from one batch, if all of it
    is known by its (epsilon, delta); else nothing.
    """
    if isinstance(event, GaussianDpEvent | LaplaceDpEvent | NonPrivateDpEvent):
        return []
    parts = list(parts_of(event, 1))
    known = PureDpEvent | BoundedRangeDpEvent | FailureDpEvent
    if not all(isinstance(part, known) for part, _ in parts):
        return []
    failures = [n * part.delta for part, n in parts if isinstance(part, FailureDpEvent)]
    epsilons = [n * part.epsilon for part, n in parts if not isinstance(part, FailureDpEvent)]
    found: list[DpEvent] = []
    if epsilons:
        epsilon = epsilons[0] if len(epsilons) == 1 else math.fsum(epsilons) * (1 + 1e-15)
        found.append(PureDpEvent(epsilon))
    if failures:
        found.append(FailureDpEvent(min(math.fsum(failures) * (1 + 1e-15), 1 - 1e-16)))
    return found


Parts = Iterator[tuple[DpEvent, int]]


def elementary(event: DpEvent, count: int = 1) -> Parts:
    """The releases that ``event`` consists of, validated, with plain ``float`` parameters.

    Yields:
        Pairs (elementary event, how often). ``NoOpDpEvent`` and sampling at rate 0 yield nothing.

    Raises:
        TypeError: the event is of a kind that this library does not account for.
        ValueError: a parameter is out of range.
    """
    return parts_of(event, count)


@singledispatch
def parts_of(event: Any, count: int) -> Parts:
    """:func:`elementary` of one kind of event. A new kind registers its own, and in
    :mod:`pairs` the pair that dominates it; it is then charged, saved and read like the others.
    """
    raise TypeError(f"an event from torch_dpbayes.accounting.events is needed, got {event!r}.")


@parts_of.register
def _(event: DpEvent, count: int) -> Parts:
    raise TypeError(
        f"{type(event).__name__} is not accounted for here: charge what its guarantee is under the"
        " accountant's relation, PureDpEvent(epsilon), MuGaussianDpEvent(mu), or for (epsilon,"
        " delta) ComposedDpEvent([PureDpEvent(epsilon), FailureDpEvent(delta)])."
    )


@parts_of.register
def _(event: NoOpDpEvent, count: int) -> Parts:
    yield from ()


@parts_of.register
def _(event: ComposedDpEvent, count: int) -> Parts:
    for part in event.events:
        yield from parts_of(part, count)


@parts_of.register
def _(event: SelfComposedDpEvent, count: int) -> Parts:
    if event.count != 0:
        times = count * positive_count(event.count, "SelfComposedDpEvent.count")
        what = "the number of releases in a SelfComposedDpEvent"
        yield from parts_of(event.event, positive_count(times, what))


@parts_of.register
def _(event: NonPrivateDpEvent, count: int) -> Parts:
    yield event, count


@parts_of.register
def _(event: GaussianSum, count: int) -> Parts:
    yield type(event)(gaussian_noise_multiplier(event.noise_multiplier)), count


@parts_of.register
def _(event: PoissonSampledDpEvent, count: int) -> Parts:
    if bounded := _epsilon_delta(event.event):
        if _real(event.sampling_probability, "sampling_probability") != 0:
            rate = sampling_rate(event.sampling_probability, "sampling_probability")
            for part in bounded:
                yield PoissonSampledDpEvent(rate, part), count
        return
    if type(event.event) is LaplaceDpEvent:
        release: DpEvent = LaplaceDpEvent(gaussian_noise_multiplier(event.event.noise_multiplier))
    else:
        release = sampled_gaussian(event.event, "PoissonSampledDpEvent")
    if _real(event.sampling_probability, "sampling_probability") != 0:
        rate = sampling_rate(event.sampling_probability, "sampling_probability")
        yield PoissonSampledDpEvent(rate, release), count


@parts_of.register
def _(event: SampledWithoutReplacementDpEvent, count: int) -> Parts:
    gaussian = sampled_gaussian(event.event, "SampledWithoutReplacementDpEvent")
    size = positive_count(event.source_dataset_size, "source_dataset_size")
    batch = positive_count(event.sample_size, "sample_size")
    if batch > size:
        raise ValueError(
            f"sample_size {batch} is larger than source_dataset_size {size}: a batch holds at most"
            " all records."
        )
    yield SampledWithoutReplacementDpEvent(size, batch, gaussian), count


@parts_of.register
def _(event: MuGaussianDpEvent, count: int) -> Parts:
    if mu := _non_negative(event.mu, "mu"):
        yield MuGaussianDpEvent(mu), count


@parts_of.register
def _(event: PureDpEvent | BoundedRangeDpEvent, count: int) -> Parts:
    if epsilon := _non_negative(event.epsilon, "epsilon"):
        yield type(event)(epsilon), count


@parts_of.register
def _(event: FailureDpEvent, count: int) -> Parts:
    delta = _real(event.delta, "delta")
    if not 0 < delta < 1:
        raise ValueError(
            f"delta of a FailureDpEvent must lie in (0, 1), got {event.delta!r}. What never fails"
            " needs no such event, and what always fails is NonPrivateDpEvent()."
        )
    yield FailureDpEvent(delta), count


@parts_of.register
def _(event: ZCDpEvent, count: int) -> Parts:
    rho, xi = _non_negative(event.rho, "rho"), _non_negative(event.xi, "xi")
    if rho or xi:
        yield ZCDpEvent(rho, xi), count


def in_words(event: DpEvent | None) -> str:
    """An event as a person reads it, with the mechanism that its noise belongs to."""
    if isinstance(event, PoissonSampledDpEvent):
        return f"Poisson q = {event.sampling_probability:.6g}, {in_words(event.event)}"
    if isinstance(event, GaussianDpEvent):
        return f"Gaussian z = {event.noise_multiplier:.6g}"
    if isinstance(event, LaplaceDpEvent):
        return f"Laplace scale = {event.noise_multiplier:.6g}"
    return str(event)


@singledispatch
def lowered(event: DpEvent, slack: float) -> DpEvent:
    """An elementary event that dominates ``event`` and all those with up to ``slack`` times less
    noise, on a grid of ratio 1.005. The event itself where no noise is known.
    """
    return event


def _down(noise: float, slack: float) -> float:
    return min(_GRID ** math.floor(math.log(noise / slack) / math.log(_GRID)), noise / slack)


@lowered.register
def _(event: PoissonSampledDpEvent | SampledWithoutReplacementDpEvent, slack: float) -> DpEvent:
    changed: DpEvent = attr.evolve(event, event=lowered(event.event, slack))
    return changed


@lowered.register
def _(event: GaussianSum, slack: float) -> DpEvent:
    return type(event)(_down(event.noise_multiplier, slack))


@lowered.register
def _(event: MuGaussianDpEvent, slack: float) -> DpEvent:
    return MuGaussianDpEvent(1 / _down(1 / event.mu, slack))


def encode(event: DpEvent) -> list[Any]:
    """An event as a list of its class name and its numbers, which JSON keeps exactly."""

    def encoded(value: Any) -> Any:
        if isinstance(value, DpEvent):
            return encode(value)
        return [encoded(item) for item in value] if isinstance(value, tuple) else float(value)

    values = (getattr(event, field.name) for field in attr.fields(type(event)))
    return [type(event).__name__, *map(encoded, values)]


def decode(code: Any) -> DpEvent:
    """The event that :func:`encode` wrote."""
    kinds = {kind.__name__: kind for kind in parts_of.registry if issubclass(kind, DpEvent)}
    if not isinstance(code, list) or not code or code[0] not in kinds:
        raise ValueError(f"this is not a saved event: {code!r}. Load what state_dict() returned.")

    def decoded(value: Any) -> Any:
        if not isinstance(value, list):
            return float(value)
        return decode(value) if isinstance(value[0], str) else tuple(map(decoded, value))

    kind = kinds[code[0]]
    values = [
        int(value) if field.type in (int, "int") else decoded(value)
        for value, field in zip(code[1:], attr.fields(kind), strict=True)
    ]
    event: DpEvent = kind(*values)
    return event


def recorded(code: Any, neighboring: str) -> DpEvent:
    """The event of a saved history under this relation.

    Under add-or-remove-one earlier versions charged unspecified batches as recordwise ones are.
    """
    event = decode(code)
    if neighboring != "replace_one" and isinstance(event, UnspecifiedBatchGaussianDpEvent):
        return RecordwiseBatchGaussianDpEvent(event.noise_multiplier)
    return event
