"""Private tuning: releases the best of a hidden number of private runs, with one charge."""

from __future__ import annotations

import logging
import math
import random
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn

from ..accounting.accountant import PrivacyAccountant, PrivacyBudgetExceeded
from ..accounting.dominating_pairs import Pair, added, dominating_pair, uncovered
from ..accounting.events import (
    DpEvent,
    Neighboring,
    Unit,
    check_delta,
    elementary,
    in_words,
    positive_count,
)
from ..accounting.selection import Repetitions, selection_event
from ..errors import ArgumentError, StateError
from ..noise import seeded
from .privacy_engine import PrivacyEngine

Candidate = TypeVar("Candidate")
Result = TypeVar("Result")
Schedule = list[tuple[DpEvent, int]]

_STATEMENT = (
    "selection: runs start anew and share nothing, scores use only releases of the run or public"
    " data, and only the best run was seen"
)


class BestRun(NamedTuple, Generic[Candidate, Result]):
    """The best run: its candidate, what ``train`` returned, and the score."""

    candidate: Candidate
    result: Result
    score: float


def best_of_runs(
    train: Callable[[PrivacyEngine, Candidate], tuple[Result, float]],
    candidates: Sequence[Candidate],
    *,
    schedule: Iterable[tuple[DpEvent, int]],
    accountant: PrivacyAccountant,
    delta: float,
    mean_runs: float,
    shape: float = 1.0,
) -> BestRun[Candidate, Result]:
    """Trains a hidden number of times, with settings drawn from ``candidates``, and returns the
    best run.

    Args:
        train: one whole private run. It takes a new engine, which it must use, and a candidate; it
            returns any result and a score (the largest wins). Each call makes a new model and
            optimizer, passes nothing to later runs, and prints and saves nothing. Compute the score
            from releases, such as the trained model, and public data; charge a score from private
            data to the engine's accountant.
        candidates: settings; each run draws one, all with the same probability.
        schedule: pairs (event, count): the most that one run may release, with any candidate. A run
            may release less: fewer steps, more noise, a smaller rate.
        accountant: the accountant that is charged, once and before the first run.
        delta: δ of the selection.
        mean_runs: the expected number of runs, above 1.
        shape: shape of the distribution of that number, above -1 and at most 1: 1 is geometric, 0
            logarithmic. A smaller shape costs less, and more often gives few or very many runs.

    Raises:
        PrivacyBudgetExceeded: the selection does not fit the budget, or a run releases more than
            ``schedule``. Nothing is returned; the charge stays.
        ValueError: a setting is out of range.
        RuntimeError: a run did not use its engine, or returned the result of another run.

    **Privacy.** The best run is released, and charged as (epsilon, delta)-private by
    :func:`torch_dpbayes.accounting.selection.selection_epsilon`, whatever the number of candidates.
    The number of runs must stay hidden: it is neither returned nor kept, but the duration of this
    call reveals something about it. Each run begins with a seed from the operating system;
    afterwards the global generators of torch, Python and NumPy have their old states. This
    library's log lines and warnings are suppressed. ``summary()`` states what the guarantee and the
    best run assume.
    """
    if not (choices := list(candidates)):
        raise ArgumentError("candidates are empty: give at least one setting.")
    delta, repetitions = check_delta(delta), Repetitions(mean_runs, shape)
    planned = [(event, count) for event, count in schedule]
    event = selection_event(planned, repetitions, delta, accountant.neighboring)
    accountant.compose(event, label="selection")
    accountant.note(_STATEMENT)
    relation, unit = accountant.neighboring, accountant.unit
    source = random.SystemRandom()
    best: BestRun[Candidate, Result] | None = None
    notes: tuple[str, ...] = ()
    seen: list[nn.Parameter] = []
    # the generators' states and log lines would reveal the number of runs
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())), _silence():
        for _ in range(repetitions.draw()):
            candidate = source.choice(choices)
            own = _PlannedAccountant(planned, relation, unit)
            with seeded(source.randrange(2**32)):
                result, score = train(PrivacyEngine(own), candidate)
            if not len(own):
                raise StateError(
                    "a run must release something with the engine that train() gets: nothing is"
                    " returned."
                )
            _require_fresh(result, seen)
            number = float(score)
            number = -math.inf if math.isnan(number) else number
            if best is None or number > best.score:
                best, notes = BestRun(candidate, result, number), own.notes
    assert best is not None
    for statement in notes:
        accountant.note(statement)
    return best


@contextmanager
def _silence() -> Iterator[None]:
    """Suppress this library's log lines from this thread, and all warnings."""
    log, thread = logging.getLogger("torch_dpbayes"), threading.get_ident()

    def is_other(record: logging.LogRecord) -> bool:
        return record.thread != thread

    log.addFilter(is_other)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.removeFilter(is_other)


class _PlannedAccountant(PrivacyAccountant):
    """The accountant of one run: it accepts only releases that the schedule covers.

    A release is covered by one that is left in the schedule and has at most as much noise and at
    least its sampling rate. Which part of the schedule a run releases may depend on outputs: adding
    an independent loss never lowers E[(1 - e^(epsilon - L))_+], so by induction no choice costs
    more than a release of the whole schedule.
    """

    def __init__(self, planned: Schedule, neighboring: Neighboring, unit: Unit) -> None:
        super().__init__(neighboring=neighboring, unit=unit)
        self._left = self._pairs(planned)

    def _pairs(self, releases: Schedule) -> dict[Pair, int]:
        found: dict[Pair, int] = {}
        for event, count in releases:
            for part, times in elementary(event, positive_count(count)):
                found = added(found, {dominating_pair(part, self.neighboring): times})
        return found

    def compose(
        self, event: DpEvent, count: int = 1, label: str | None = None, adaptive: bool = False
    ) -> PrivacyAccountant:
        """Records a release, or raises before anything is recorded."""
        left = dict(self._left)
        if uncovered(left, self._pairs([(event, count)])):
            raise PrivacyBudgetExceeded(
                "a run of best_of_runs may release at most schedule=, which does not include"
                f" {count} x {in_words(event)}. Nothing was recorded: release nothing new."
            )
        super().compose(event, count, label)
        self._left = left
        return self

    def remaining(self, event: DpEvent) -> int | float:
        """How many times the rest of the schedule covers ``event``."""
        need, left, times = self._pairs([(event, 1)]), dict(self._left), 0
        while need and not uncovered(left, need):
            times += 1
        return times if need else math.inf

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Refused: a run starts afresh."""
        raise ArgumentError(
            "a run of best_of_runs must start anew: do not load a saved accountant."
        )


def _require_fresh(result: Any, seen: list[nn.Parameter]) -> None:
    """Raise if two runs returned the same module."""
    parts = result if isinstance(result, tuple | list) else [result]
    own = [p for part in parts if isinstance(part, nn.Module) for p in part.parameters()]
    if {id(p) for p in own} & {id(p) for p in seen}:
        raise StateError(
            "two runs returned the same model, so they did not start anew: build the model"
            " inside train(). Nothing is returned."
        )
    seen += own
