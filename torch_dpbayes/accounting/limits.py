"""What the budget lets through: an admission, and the filter or schedule that is in force."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

from .admission import Admission
from .events import in_words
from .failures import without_delta
from .filters import Budget, Filter
from .history import History, Part, PrivacyBudgetExceeded, needed
from .pairs import Failure, Gaussian, NonPrivate, Pair, added

_NAMED = 2  # different events of one charge, in an error
_NOTHING = "Nothing was recorded; release nothing."
_LATER = "this job or another began after others had charged, whose outputs it may depend on"

Counts = Mapping[Pair, int]


class Limits:
    """Decides for one history. ``committed`` is everywhere what was charged, together with what is
    registered and was not charged yet.

    Args:
        history: what was charged.

    Attributes:
        admission: what is left of the budget; ``None`` without one.
    """

    def __init__(self, history: History) -> None:
        self._history = history
        budget, method = history.settings.budget, history.settings.method
        self.admission = None if budget is None else Admission(budget, method)

    @property
    def budget(self) -> Budget | None:
        """Epsilon and delta."""
        return self._history.settings.budget

    def used_share(self, committed: Counts) -> float:
        """How much of the filter's limit is used."""
        rule = self._history.filter
        assert rule is not None
        return rule.cost(committed) / rule.limit

    def remaining(self, committed: Counts, need: Counts, is_later: bool) -> int | None:
        """How many times ``need`` still fits; ``None`` without a budget."""
        admission = self.admission
        if admission is not None and self._history.filter is None and is_later:
            admission = self._under(self._filter_of_budget(), committed)
        return None if admission is None else admission.remaining(committed, need)

    def refuse(self, committed: Counts, parts: list[Part]) -> NoReturn:
        """Says why ``parts`` do not fit."""
        assert self.budget is not None and self.admission is not None
        rule, (epsilon, delta) = self._history.filter, self.budget
        need = needed(parts)
        if any(isinstance(pair, NonPrivate) for pair in need):
            raise PrivacyBudgetExceeded(
                "a release without noise (z = 0) has no finite epsilon and fits no budget: use a"
                f" positive noise multiplier, or an accountant without a budget. {_NOTHING}"
            )
        if rule is not None and any(isinstance(pair, Failure) for pair in need):
            raise PrivacyBudgetExceeded(
                "a release that may fail outright fits no filter, and what is adaptive, not"
                " registered or of a later job needs one: charge it to an accountant of its own, or"
                f" register it first. {_NOTHING}"
            )
        if why := without_delta(added(committed, need), delta):
            raise PrivacyBudgetExceeded(f"{why} {_NOTHING}")
        times = sum(need.values())
        fit = "none fits"
        if times > 1:
            left = self.admission.remaining(committed, dict.fromkeys(need, 1))
            fit = f"{left} of these would still fit"
        different = list(dict.fromkeys(in_words(part.event) for part in parts))
        events = " and ".join(different[:_NAMED])
        if len(different) > _NAMED:
            events += f" and {len(different) - _NAMED} others"
        under = ""
        if rule is not None:
            if self._history.schedule:
                why = "what is not registered is adaptive"
            else:
                why = "the charges were declared adaptive" if self._history.declared else _LATER
            used = self.used_share(committed)
            under = f" {used:.1%} of {rule.describe()} is used, which counts: {why}."
        raise PrivacyBudgetExceeded(
            f"charging {times} x {events} would pass the budget epsilon ="
            f" {epsilon:g} at delta = {delta:g}; {fit}. {_NOTHING} Plan fewer, or"
            f" more noise (get_noise_multiplier).{under}"
        )

    # --- filters ----------------------------------------------------------------------------------

    def rule(self, need: Counts, adaptive: bool, is_later: bool) -> Filter | None:
        """The filter that this charge puts into force, or ``None``."""
        history = self._history
        if history.filter is not None or history.schedule or not (adaptive or is_later):
            return None
        if is_later:
            return None if self.budget is None else self._rule_of_later_jobs()
        if self.budget is None:
            raise ValueError(
                "adaptive=True needs a budget: parameters chosen from earlier outputs are private"
                " only against a limit that was fixed before. Write"
                " PrivacyAccountant(epsilon=..., delta=...)."
            )
        if history.counts:
            raise ValueError(
                "this accountant already holds charges that were not adaptive, and becoming"
                " adaptive would be a choice made after seeing outputs: charge with adaptive=True"
                " from the first charge on, in a new accountant."
            )
        if all(isinstance(pair, Gaussian) for pair in need):
            return Filter.gaussian(self.budget)
        return Filter.renyi(self.budget, need)

    def _rule_of_later_jobs(self) -> Filter:
        rule = self._filter_of_budget()
        if (cost := rule.cost(self._history.counts)) > rule.limit:
            raise PrivacyBudgetExceeded(
                f"a job used {cost / rule.limit:.1%} of what later jobs may find in this ledger"
                f" ({rule.describe()}). {_NOTHING} In a new ledger"
                " register the schedule of all jobs, or charge with adaptive=True from the"
                " start."
            )
        return rule

    def _filter_of_budget(self) -> Filter:
        """The filter for later jobs: a function of the budget and of the first release, which
        were there before any output.
        """
        assert self.budget is not None
        return Filter.renyi(self.budget, self._history.first)

    def _under(self, rule: Filter, committed: Counts) -> Admission:
        """Everything that was charged or registered counted against ``rule``."""
        assert self.budget is not None
        admission = Admission(self.budget, self._history.settings.method, rule)
        admission.restart(committed)
        return admission

    def start(self, rule: Filter, declared: bool, committed: Counts) -> None:
        """Puts ``rule`` into force."""
        history = self._history
        self.admission, history.filter = self._under(rule, committed), rule
        history.declared = declared
        history.changes += 1

    @contextmanager
    def provisionally(
        self, rule: Filter | None, declared: bool, committed: Counts
    ) -> Iterator[None]:
        """Under ``rule``, which stays in force unless there is an exception."""
        history = self._history
        before = self.admission, history.filter, history.declared
        if rule is not None:
            self.start(rule, declared, committed)
        try:
            yield
        except BaseException:
            self.admission, history.filter, history.declared = before
            raise

    # --- histories as a whole ---------------------------------------------------------------------

    def check_schedule(self, parts: list[Part]) -> None:
        """Raises unless ``parts`` may be registered now."""
        history = self._history
        if history.schedule or history.counts or history.filter is not None:
            what = "another schedule is registered" if history.schedule else "something was charged"
            raise ValueError(
                f"{what} already, and a schedule has to be fixed before the first release:"
                " register it in a new accountant."
            )
        if self.budget is None:
            raise ValueError(
                "a schedule is registered against a budget: write PrivacyAccountant("
                "epsilon=..., delta=...)."
            )
        epsilon, delta = self.budget
        if (cost := history.price(needed(parts), delta)) > epsilon:
            if math.isinf(cost) and (why := without_delta(needed(parts), delta)):
                raise PrivacyBudgetExceeded(
                    f"the schedule costs more than the budget. {why} Nothing was registered."
                )
            raise PrivacyBudgetExceeded(
                f"the schedule costs epsilon = {cost:.4g} at delta = {delta:g}, more than the"
                f" budget {epsilon:g}. Nothing was registered. Register fewer steps, or more"
                " noise (torch_dpbayes.get_noise_multiplier)."
            )

    def check_saved(self, counts: Counts, rule: Filter | None, slack: float) -> None:
        """Raises unless a saved history, which may pass the budget by the ratio ``slack``, fits."""
        if self.budget is None or not counts:
            return
        epsilon, delta = self.budget
        fits = (
            self._history.price(counts, delta) <= epsilon * slack
            if rule is None
            else rule.cost(counts) <= rule.limit * (1 + 1e-9)
        )
        if not fits:
            raise PrivacyBudgetExceeded(
                "the saved history costs more than this accountant's budget, epsilon ="
                f" {epsilon:g} at delta = {delta:g}. Nothing was loaded. Load it into an"
                " accountant with the budget that it was made with."
            )
