"""Releases whose guarantee is for people: what all records of a person do together."""

from __future__ import annotations

import attr
from dp_accounting.dp_event import DpEvent

from . import events, pairs
from .choices import Unit
from .events import Parts
from .pairs import Pair


@attr.s(frozen=True, slots=True, auto_attribs=True)
class PersonDpEvent(DpEvent):
    """A release of which ``event`` bounds what all records of one person do together.

    Neighbouring data sets differ by a person with all their records: one more person, or, under
    replace-one, another person in their place. Where each of at most k records moves a sum by at
    most C, a person moves it by at most kC, so that noise of z clip bounds is
    ``GaussianDpEvent(z / k)`` to a person. It is charged to ``PrivacyAccountant(unit="person")``,
    which takes nothing else; an accountant of records refuses it.
    """

    event: DpEvent


@events.parts_of.register
def _(event: PersonDpEvent, count: int) -> Parts:
    for part, times in events.parts_of(event.event, count):
        if isinstance(part, PersonDpEvent):
            raise TypeError(f"a PersonDpEvent holds no other one, got {event!r}: write only one.")
        yield PersonDpEvent(part), times


@events.lowered.register
def _(event: PersonDpEvent, slack: float) -> DpEvent:
    return PersonDpEvent(events.lowered(event.event, slack))


@pairs.pair_of.register
def _(event: PersonDpEvent, replace: bool) -> Pair:
    return pairs.pair_of(event.event, replace)


def require_unit(event: DpEvent, unit: Unit) -> None:
    """Raise where an elementary event is not about what the accountant protects.

    Raises:
        ValueError: it is about records, and the accountant about people, or the other way round.
    """
    if isinstance(event, PersonDpEvent) == (unit == "person"):
        return
    if unit == "person":
        raise ValueError(
            f"this accountant protects people, and {type(event).__name__} is about one record:"
            " use make_private(..., people=ids), or PersonDpEvent(event) where it bounds all of a"
            " person's records."
        )
    raise ValueError(
        "this accountant protects records, and a PersonDpEvent is about people, whose epsilon is"
        ' another number: charge it to PrivacyAccountant(unit="person").'
    )
