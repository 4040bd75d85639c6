"""What a charge consists of: elementary events, each with the pair that dominates it."""

from __future__ import annotations

from . import bounds, events
from .events import DpEvent
from .history import Part, Settings
from .pairs import dominating_pair
from .people import require_unit

_KNOWN_EVENTS = 4096


class Elements:
    """Takes events apart, and remembers those that are elementary.

    Args:
        settings: under which the events are charged.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._known: dict[DpEvent, Part] = {}

    def of(self, event: DpEvent, count: int) -> list[Part]:
        """The parts of ``count`` times ``event``.

        Raises:
            ValueError: the event gives no guarantee here; the message says what to use instead.
        """
        try:
            known = self._known.get(event)
        # an event that cannot be hashed; the checks below say what is wrong with it
        except TypeError:
            known = None
        if known is not None:
            return [Part(known.event, count, known.pair)]
        parts = []
        for part, times in events.elementary(event, count):
            require_unit(part, self._settings.unit)
            pair = dominating_pair(part, self._settings.neighboring)
            if self._settings.method == "pld":
                bounds.require_loss_distribution(pair)
            parts.append(Part(part, times, pair))
        if len(parts) == 1 and parts[0][0] == event:
            if len(self._known) >= _KNOWN_EVENTS:
                self._known.clear()
            # not under ``event``, whose numbers may be arrays that change
            self._known[parts[0][0]] = parts[0]
        return parts
