"""Events: descriptions of releases that can be charged, and checks of their numbers.

Event classes are those of dp_accounting if it has them; the others are frozen classes like them. An
event describes one release. ``noise_multiplier`` always means **noise standard deviation / clip
bound**; :mod:`dominating_pairs` computes the sensitivity from the clip bound and the accountant's
neighbouring relation. Unless stated otherwise, a guarantee in an event holds under this relation.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterator
from functools import singledispatch
from typing import Any, Literal, TypeAlias, get_args

import attr
from dp_accounting import NeighboringRelation as NeighboringRelation
from dp_accounting.dp_event import ComposedDpEvent as ComposedDpEvent
from dp_accounting.dp_event import DpEvent as DpEvent
from dp_accounting.dp_event import GaussianDpEvent as GaussianDpEvent
from dp_accounting.dp_event import LaplaceDpEvent as LaplaceDpEvent
from dp_accounting.dp_event import NonPrivateDpEvent as NonPrivateDpEvent
from dp_accounting.dp_event import NoOpDpEvent as NoOpDpEvent
from dp_accounting.dp_event import PoissonSampledDpEvent as PoissonSampledDpEvent
from dp_accounting.dp_event import (
    SampledWithoutReplacementDpEvent as SampledWithoutReplacementDpEvent,
)
from dp_accounting.dp_event import SelfComposedDpEvent as SelfComposedDpEvent
from dp_accounting.dp_event import ZCDpEvent as ZCDpEvent

from ..errors import ArgumentError, ArgumentTypeError

Neighboring = Literal["add_or_remove_one", "replace_one", "zero_out"]
Method = Literal["pld", "rdp"]
Unit = Literal["record", "user"]
Parts = Iterator[tuple[DpEvent, int]]

SMALLEST_DELTA = 1e-30  # bounds were tested against exact values down to this delta
# range of the numbers in events: their squares, and sums of these, are finite floats
_LEAST, LARGEST = 1e-50, 1e50
_GRID = 1.005  # ratio of the grid to which noise multipliers of reserves are rounded down
_RELATIONS: dict[Any, str] = {
    NeighboringRelation.ADD_OR_REMOVE_ONE: "add_or_remove_one",
    NeighboringRelation.REPLACE_ONE: "replace_one",
    NeighboringRelation.REPLACE_SPECIAL: "zero_out",
}

# --- settings and numbers -------------------------------------------------------------------------


def one_of(value: Any, words: Any, what: str) -> Any:
    """``value``, which must be one of the strings of a ``Literal``."""
    known = get_args(words)
    if isinstance(value, str) and value in known:
        return known[known.index(value)]
    spelt = " or ".join([", ".join(map(repr, known[:-1])), repr(known[-1])])
    raise ArgumentError(f"{what} must be {spelt}, got {value!r}.")


def neighboring_relation(value: Any) -> Neighboring:
    """The neighbouring relation as its documented string, from this string or from dp_accounting's
    relation. "zero_out" (``REPLACE_SPECIAL``): the record stays in its batch, but contributes 0.
    """
    word = _RELATIONS[value] if isinstance(value, NeighboringRelation) else value
    return one_of(word, Neighboring, "neighboring")


def within(
    value: Any, what: str, is_right: Callable[[float], bool], rule: str, advice: str = ""
) -> float:
    """``value`` as a ``float``; raises unless it ``is_right``."""
    number = real(value, what)
    if not is_right(number):
        raise ArgumentError(f"{what} must {rule}, got {value!r}.{advice}")
    return number


def check_epsilon(epsilon: Any) -> float:
    """``epsilon`` as a positive finite ``float``."""
    advice = " For no limit write epsilon=None."
    return within(epsilon, "epsilon", lambda e: 0 < e < math.inf, "be positive and finite", advice)


def check_delta(delta: Any) -> float:
    """``delta`` as a ``float`` in [1e-30, 1)."""
    advice = " A common choice is below 1 / number of records."
    value = within(delta, "delta", lambda d: 0 < d < 1, "lie in (0, 1)", advice)
    if value < SMALLEST_DELTA:
        raise ArgumentError(
            f"delta = {value:g} is below {SMALLEST_DELTA:g}, the smallest value at which bounds"
            " were tested. Use delta >= 1e-30."
        )
    return value


def check_probability(value: Any, what: str) -> float:
    """``value`` as a ``float`` in (0, 1)."""
    return within(value, what, lambda p: 0 < p < 1, "lie between 0 and 1, both excluded")


def gaussian_noise_multiplier(value: Any, what: str = "noise_multiplier") -> float:
    """``value`` as a positive finite ``float``."""
    multiplier = real(value, what)
    if multiplier == 0:
        raise ArgumentError(
            f"{what} is 0: a sum without noise is not private at any epsilon. Charge"
            " NonPrivateDpEvent() (epsilon becomes infinite), or use a positive noise multiplier."
        )
    if not _LEAST <= multiplier <= LARGEST:
        raise ArgumentError(
            f"{what} must be positive and finite (noise standard deviation / clip bound), between"
            f" {_LEAST:g} and {LARGEST:g}: got {value!r}."
        )
    return multiplier


def noise_multiplier_or_0(value: Any, what: str = "noise_multiplier") -> float:
    """The same, or 0 for a sum without noise."""
    return 0.0 if value == 0 else gaussian_noise_multiplier(value, what)


def noise_event(multiplier: float) -> DpEvent:
    """A sum over all records with Gaussian noise, or without any."""
    return GaussianDpEvent(multiplier) if multiplier else NonPrivateDpEvent()


def sampling_rate(value: Any, what: str = "sample_rate") -> float:
    """``value`` as a ``float`` in (0, 1]."""
    rule = "lie in (0, 1] (it is expected batch size / number of records, both public)"
    return within(value, what, lambda rate: 0 < rate <= 1, rule)


def positive_count(value: Any, what: str = "count") -> int:
    """``value`` as a positive ``int``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ArgumentError(f"{what} must be a positive whole number, got {value!r}.")
    if int(value) > 2**53:
        raise ArgumentError(
            f"{what} must be at most 2**53, because larger numbers cannot be saved exactly, got"
            f" {value!r}."
        )
    return int(value)


def real(value: Any, what: str) -> float:
    # float(): inside composed events dp_accounting drops multipliers that are not Python floats
    number: Any = None if isinstance(value, str | bytes) else value
    try:
        return float(number)
    except (TypeError, ValueError):
        raise ArgumentTypeError(f"{what} must be a number, got {value!r}.") from None


def non_negative(value: Any, what: str) -> float:
    """``value`` as 0 or a ``float`` that can be squared; a smaller one is rounded up."""
    rule = f"be at least 0 and at most {LARGEST:g} (above this nothing is private)"
    number = within(value, what, lambda x: 0 <= x <= LARGEST, rule)
    return max(number, _LEAST) if number else 0.0


# --- events ---------------------------------------------------------------------------------------


@attr.frozen
class UnspecifiedBatchGaussianDpEvent(DpEvent):
    """A Gaussian sum over a batch whose sampling is unknown, such as that of a shuffled loader.

    Refused under add-or-remove-one, because one added record may change the whole batch (with a
    seeded shuffle it does). Under replace-one the sensitivity is 2C, without amplification; the
    contents of records must not decide which records are in a batch.
    """

    noise_multiplier: float


@attr.frozen
class RecordwiseBatchGaussianDpEvent(DpEvent):
    """A Gaussian sum over a batch. The caller states that no record decides whether another one is
    in the batch; ``PrivacyAccountant.summary()`` shows this assumption.

    Whether a record is in the batch may depend on this record, on public values, and on randomness
    that is independent of other records; not on its position or on the number of records. A hash of
    the record's name is allowed; a shuffled or sorted loader is not. The sensitivity is 2C.
    """

    noise_multiplier: float


@attr.frozen
class ShuffledEpochDpEvent(DpEvent):
    """One pass over an ordinary shuffled loader, in which every record is used at most once.

    Refused under add-or-remove-one, because an added record moves others to other batches. Under
    replace-one, one batch sum moves by at most 2C. Charge the whole epoch at its start, with its
    smallest noise multiplier.
    """

    noise_multiplier: float


@attr.frozen
class MuGaussianDpEvent(DpEvent):
    """A release that is mu-Gaussian differentially private (Dong, Roth, Su 2022)."""

    mu: float


@attr.frozen
class PureDpEvent(DpEvent):
    """A release that is epsilon-differentially private, with delta = 0."""

    epsilon: float


@attr.frozen
class BoundedRangeDpEvent(DpEvent):
    """A release whose log-likelihood ratios span at most ``epsilon``: the exponential mechanism
    (Dong, Durfee, Rogers 2020). It composes better than a pure release.
    """

    epsilon: float


@attr.frozen
class FailureDpEvent(DpEvent):
    """A release that reveals everything with probability ``delta``, 0 < delta < 1, else nothing.

    Epsilon is infinite at any delta below the probability that some release fails.
    """

    delta: float


@attr.frozen
class UserLevelDpEvent(DpEvent):
    """A release; ``event`` bounds the influence of all records of one user together.

    Neighbouring data sets differ by a user with all their records. If a user has at most k records
    in a sum, and each moves it by at most C, noise of standard deviation zC is
    ``GaussianDpEvent(z / k)`` for a user. ``PrivacyAccountant(unit="user")`` accepts only such
    events; an accountant for records refuses them.
    """

    event: DpEvent


# events that Poisson sampling amplifies, besides Gaussian sums; mechanisms.py adds others
AMPLIFIED: list[type] = [LaplaceDpEvent, ZCDpEvent]
_KNOWN_BY_NUMBERS = (PureDpEvent, BoundedRangeDpEvent, FailureDpEvent)
GaussianSum: TypeAlias = (
    GaussianDpEvent
    | UnspecifiedBatchGaussianDpEvent
    | RecordwiseBatchGaussianDpEvent
    | ShuffledEpochDpEvent
)


# --- from an event to elementary ones -------------------------------------------------------------


def elementary(event: DpEvent, count: int = 1) -> Parts:
    """Pairs (elementary event, count) of which ``event`` consists, with Python floats as
    parameters. ``NoOpDpEvent`` and sampling at rate 0 yield nothing.

    Raises:
        ArgumentTypeError: this library does not support this kind of event.
        ArgumentError: a parameter is out of range.
    """
    return parts_of(event, count)


@singledispatch
def parts_of(event: Any, count: int) -> Parts:
    """:func:`elementary` for one kind of event. A new kind registers its own function here, and
    another one in :mod:`dominating_pairs`.
    """
    if not isinstance(event, DpEvent):
        raise ArgumentTypeError(
            f"pass an event from torch_dpbayes.accounting.events, got {event!r}."
        )
    raise ArgumentTypeError(
        f"{type(event).__name__} is not supported: charge its guarantee under the"
        " accountant's relation, PureDpEvent(epsilon), MuGaussianDpEvent(mu) or"
        " EpsilonDeltaDpEvent(epsilon, delta); for a selection selection_event(...)."
    )


@parts_of.register
def _(event: NoOpDpEvent, count: int) -> Parts:
    yield from ()


@parts_of.register
def _(event: ComposedDpEvent, count: int) -> Parts:
    if not isinstance(event.events, list | tuple):
        raise ArgumentTypeError(
            "a ComposedDpEvent needs a list of events: a generator is empty when it is read again,"
            " so a second charge would cost nothing."
        )
    for part in event.events:
        yield from parts_of(part, count)


@parts_of.register
def _(event: SelfComposedDpEvent, count: int) -> Parts:
    if event.count != 0:
        times = count * positive_count(event.count, "SelfComposedDpEvent.count")
        what = "the number of releases in a SelfComposedDpEvent"
        yield from parts_of(event.event, positive_count(times, what))


@parts_of.register
def _(event: GaussianSum | LaplaceDpEvent | NonPrivateDpEvent, count: int) -> Parts:
    noise = getattr(event, "noise_multiplier", 0.0)
    if noise == 0:
        yield NonPrivateDpEvent(), count
    else:
        yield type(event)(gaussian_noise_multiplier(noise)), count


@parts_of.register
def _(event: PoissonSampledDpEvent, count: int) -> Parts:
    parts = list(parts_of(event.event, 1))
    if real(event.sampling_probability, "sampling_probability") == 0:
        return
    rate = sampling_rate(event.sampling_probability, "sampling_probability")
    if parts and all(isinstance(part, _KNOWN_BY_NUMBERS) for part, _ in parts):
        for part in _epsilon_delta(parts):
            yield PoissonSampledDpEvent(rate, part), count
    elif len(parts) == 1 and parts[0][1] == 1 and isinstance(parts[0][0], tuple(AMPLIFIED)):
        yield PoissonSampledDpEvent(rate, parts[0][0]), count
    else:
        release = sampled_gaussian(event, "PoissonSampledDpEvent")
        if isinstance(release, GaussianDpEvent):
            release = PoissonSampledDpEvent(rate, release)
        yield release, count


@parts_of.register
def _(event: SampledWithoutReplacementDpEvent, count: int) -> Parts:
    release = sampled_gaussian(event, "SampledWithoutReplacementDpEvent")
    size = positive_count(event.source_dataset_size, "source_dataset_size")
    batch = positive_count(event.sample_size, "sample_size")
    if batch > size:
        raise ArgumentError(
            f"sample_size {batch} is larger than source_dataset_size {size}: a batch has at most"
            " all records."
        )
    if isinstance(release, GaussianDpEvent):
        release = SampledWithoutReplacementDpEvent(size, batch, release)
    yield release, count


def sampled_gaussian(event: Any, sampler: str) -> DpEvent:
    """One Gaussian event that costs as much as ``event.event`` inside a ``sampler``: several
    Gaussian sums over one batch are one Gaussian sum of concatenated contributions.
    """
    parts = list(parts_of(event.event, 1))
    if any(type(part) is NonPrivateDpEvent for part, _ in parts):
        return NonPrivateDpEvent()
    if not parts or any(type(part) is not GaussianDpEvent for part, _ in parts):
        raise ArgumentTypeError(
            f"{sampler} must contain only GaussianDpEvents, because amplification is proved for"
            f" them, got {event.event!r}: charge the others as separate releases."
        )
    if isinstance(event.event, GaussianDpEvent):
        return parts[0][0]
    squared = math.fsum(n / part.noise_multiplier**2 for part, n in parts)
    return GaussianDpEvent(gaussian_noise_multiplier(squared**-0.5 * (1 - 1e-15)))


def _epsilon_delta(parts: list[tuple[Any, int]]) -> list[DpEvent]:
    """A pure release and a failure that dominate all releases from one batch."""
    failures = [n * part.delta for part, n in parts if isinstance(part, FailureDpEvent)]
    epsilons = [n * part.epsilon for part, n in parts if not isinstance(part, FailureDpEvent)]
    found: list[DpEvent] = []
    if epsilons:
        epsilon = epsilons[0] if len(epsilons) == 1 else math.fsum(epsilons) * (1 + 1e-15)
        found.append(PureDpEvent(epsilon))
    if failures:
        found.append(FailureDpEvent(min(math.fsum(failures) * (1 + 1e-15), 1 - 1e-16)))
    return found


@parts_of.register
def _(
    event: MuGaussianDpEvent | PureDpEvent | BoundedRangeDpEvent | ZCDpEvent, count: int
) -> Parts:
    names = [field.name for field in attr.fields(type(event))]
    numbers = [non_negative(getattr(event, name), name) for name in names]
    if any(numbers):
        yield type(event)(*numbers), count


@parts_of.register
def _(event: FailureDpEvent, count: int) -> Parts:
    advice = " Without failures leave it out; for certain failure use NonPrivateDpEvent()."
    what, rule = "delta of a FailureDpEvent", "lie in (0, 1)"
    yield FailureDpEvent(within(event.delta, what, lambda d: 0 < d < 1, rule, advice)), count


@parts_of.register
def _(event: UserLevelDpEvent, count: int) -> Parts:
    for part, times in parts_of(event.event, count):
        if isinstance(part, UserLevelDpEvent):
            raise ArgumentTypeError(
                f"a UserLevelDpEvent cannot contain another one, got {event!r}: write only one."
            )
        yield UserLevelDpEvent(part), times


def require_unit(event: DpEvent, unit: Unit) -> None:
    """Raise if an elementary event protects another unit than the accountant."""
    if isinstance(event, UserLevelDpEvent) == (unit == "user"):
        return
    if unit == "user":
        raise ArgumentError(
            f"this accountant protects users, but {type(event).__name__} is for one record: use"
            " make_private(..., user_ids=ids), or UserLevelDpEvent(event) if the event covers all"
            " records of a user."
        )
    raise ArgumentError(
        "this accountant protects records, but a UserLevelDpEvent is for a user: charge it to"
        ' PrivacyAccountant(unit="user").'
    )


# --- events as text -------------------------------------------------------------------------------


def in_words(event: DpEvent | None) -> str:
    """An event as text: mechanism and noise."""
    if isinstance(event, PoissonSampledDpEvent):
        return f"Poisson q = {event.sampling_probability:.6g}, {in_words(event.event)}"
    if isinstance(event, GaussianDpEvent):
        return f"Gaussian z = {event.noise_multiplier:.6g}"
    if isinstance(event, LaplaceDpEvent):
        return f"Laplace scale = {event.noise_multiplier:.6g}"
    return str(event)


def lowered(event: Any, slack: float) -> Any:
    """``event`` with its Gaussian noise divided by at least ``slack``, on a grid of ratio 1.005;
    the event itself if it has no Gaussian noise.
    """

    def down(noise: float) -> float:
        return min(_GRID ** math.floor(math.log(noise / slack) / math.log(_GRID)), noise / slack)

    if isinstance(getattr(event, "event", None), DpEvent):
        return attr.evolve(event, event=lowered(event.event, slack))
    if isinstance(event, MuGaussianDpEvent):
        return MuGaussianDpEvent(1 / down(1 / event.mu))
    if hasattr(event, "noise_multiplier") and not isinstance(event, LaplaceDpEvent):
        return attr.evolve(event, noise_multiplier=down(event.noise_multiplier))
    return event


def encode(event: DpEvent) -> list[Any]:
    """An event as a list of its class name and its numbers; JSON stores this exactly."""

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
        raise ArgumentError(
            f"this is not a saved event: {code!r}. Load what state_dict() returned."
        )

    def decoded(value: Any) -> Any:
        if not isinstance(value, list):
            return float(value)
        return decode(value) if isinstance(value[0], str) else tuple(map(decoded, value))

    kind = kinds[code[0]]
    values = [
        int(value) if "int" in str(field.type) else decoded(value)
        for value, field in zip(code[1:], attr.fields(kind), strict=True)
    ]
    return kind(*values)
