"""Whose releases a history holds, and how a saved run finds or brings its own."""

from __future__ import annotations

import uuid
from collections import Counter

from .charging import Charging
from .filters import Filter
from .history import History
from .ledger import Ledger
from .parts import Elements
from .saved_state import Jobs, SavedState


class Origins:
    """Of a history in memory: the job that charges here, and what was taken over of earlier ones.

    Nothing else charges under this name, so who holds as many of its releases holds the same.

    Args:
        job: the name of an accountant that is there already; empty: a new one.
    """

    def __init__(self, job: str = "") -> None:
        self.job = job or uuid.uuid4().hex
        self._earlier: Jobs = {}

    def charged(self, history: History) -> Jobs:
        """What each job charged."""
        own: Jobs = {self.job: Counter()}
        for (event, _, _), count in history.charges.items():
            own[self.job][event] += count
        for counts in self._earlier.values():
            own[self.job] -= counts
        return {**self._earlier, **own} if own[self.job] else dict(self._earlier)

    def saved(self, history: History) -> Jobs:
        """What each job charged, the own one also if that is nothing: a copy does not know it."""
        return {self.job: Counter(), **self.charged(history)}

    def goes_on(self, history: History) -> bool:
        """Whether the history was taken over and charged since."""
        return bool(self._earlier) and self.job in self.charged(history)

    def take_over(self, jobs: Jobs) -> None:
        """The history holds what these jobs charged."""
        self._earlier = {job: counts for job, counts in jobs.items() if job != self.job}

    def require_held(self, saved: SavedState, history: History, ledger: Ledger | None) -> None:
        """Raises unless the history holds the saved run's own releases."""
        if saved.lines and not saved.names_jobs:
            raise ValueError(
                "this state, saved by an earlier version, does not say whose releases it holds, and"
                " the accountant is not empty: resume with an empty one, which takes them over, and"
                " save again."
            )
        if ledger is None:
            held = self.charged(history)
        else:
            held = {job: ledger.charged_by(job) for job in saved.jobs}
        if any(counts - held.get(job, Counter()) for job, counts in saved.jobs.items()):
            raise ValueError(
                "this accountant does not know the releases of the saved run, and resuming would"
                " forget them: resume with that run's own accountant, or an empty one, which takes"
                " them over."
            )


def load(charging: Charging, saved: SavedState, elements: Elements) -> None:
    """Takes a saved history over, into an empty one.

    Raises:
        PrivacyBudgetExceeded: it does not fit the budget. Nothing is loaded.
        ValueError: this one is not empty, or has another budget under an adaptive history.
    """
    settings = charging.history.settings
    if charging.history.counts or charging.history.schedule:
        raise ValueError(
            "this accountant is not empty: loading would forget or double what it holds."
            " Load into a new PrivacyAccountant."
        )
    own = list(settings.budget or ())
    same = saved.budget == own
    if saved.is_adaptive and not same:
        raise ValueError(
            "the saved history is adaptive or registered, which is private only against"
            f" its budget {saved.budget}; this accountant's is {own}. Load it into one with"
            " the saved budget."
        )
    # A history that was admitted under the same budget may be priced a hair above it by another
    # discretisation.
    slack = 1.0 if not same else 1.001 if settings.method == "pld" else 1 + 1e-9
    parts = [
        (part, line.label, line.flag, line.job)
        for line in saved.lines
        for part in elements.of(line.event, line.count)
    ]
    rule = Filter.decoded(saved.filter, settings.budget)
    charging.load(parts, saved.schedule, rule, slack)
