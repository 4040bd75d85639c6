"""What a history guarantees, as numbers."""

from __future__ import annotations

import math

from . import bounds, renyi
from .history import History
from .pairs import Concentrated, Pair, Repeated


class Prices:
    """Prices one history after another of the same settings, and remembers the last one's."""

    def __init__(self) -> None:
        self._known: dict[float, float] = {}
        self._known_of = 0

    def epsilon(self, history: History, delta: float) -> float:
        """An upper bound on epsilon of what the guarantee has to cover."""
        if not history.counts:
            return 0.0
        if history.guarantee == "none":
            return math.inf
        if history.guarantee == "filter" and history.filter is not None:
            return history.filter.epsilon(delta)
        if self._known_of != history.changes:
            self._known, self._known_of = {}, history.changes
        if delta not in self._known:
            value = history.price(history.guaranteed(), delta)
            budget = history.settings.budget
            if budget is not None and delta == budget[1]:
                # What is recorded was admitted by a bound on more releases than these, which kept
                # the budget.
                value = min(value, budget[0])
            self._known[delta] = value
        return self._known[delta]

    def delta(self, history: History, epsilon: float) -> float:
        """An upper bound on delta of what the guarantee has to cover."""
        if not history.counts:
            return 0.0
        if history.guarantee == "none":
            return 1.0
        if history.guarantee == "filter" and history.filter is not None:
            return history.filter.delta(epsilon)
        if history.settings.method == "rdp":
            return renyi.upper_delta(history.guaranteed(), epsilon)
        return bounds.upper_delta(history.guaranteed(), epsilon)


def lower_epsilon(history: History, delta: float) -> float:
    """What no accountant that knows only the events can go below."""
    known: dict[Pair, int] = {
        pair: n
        for pair, n in history.counts.items()
        if not isinstance(pair, Concentrated | Repeated)
    }
    return bounds.lower_epsilon(known, delta) if known else 0.0
