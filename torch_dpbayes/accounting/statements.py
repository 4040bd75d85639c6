"""On what a guarantee rests, in sentences."""

from __future__ import annotations

from .charging import Charging
from .events import RecordwiseBatchGaussianDpEvent
from .origins import Origins
from .people import PersonDpEvent

RESUMED = (
    "resumed from a saved state: nothing was released after it was saved, nor from another copy"
    " of it"
)
_RECORDWISE = "RecordwiseBatchGaussianDpEvent: who is in a batch does not depend on other records"


class Statements:
    """What was noted, in memory or in the ledger."""

    def __init__(self) -> None:
        self._noted: dict[str, None] = {}

    def note(self, statement: str, charging: Charging) -> None:
        """Keeps a sentence, once."""
        if not isinstance(statement, str) or not statement.strip():
            raise ValueError(f"a statement must be a string that is not empty, got {statement!r}.")
        statement = " ".join(statement.split())
        if charging.session is None:
            self._noted[statement] = None
        else:
            charging.session.ledger.notes.add(statement, charging.session.job)

    def of(self, charging: Charging, origins: Origins) -> list[str]:
        """All sentences for this history, those that its events make included."""
        session, history = charging.session, charging.history
        found = dict.fromkeys(self._noted if session is None else session.ledger.notes.read())
        if origins.goes_on(history):
            found[RESUMED] = None
        known = [event for event, _, _ in (*history.charges, *history.schedule)]
        known = [event.event if isinstance(event, PersonDpEvent) else event for event in known]
        if any(isinstance(event, RecordwiseBatchGaussianDpEvent) for event in known):
            found[_RECORDWISE] = None
        return list(found)
