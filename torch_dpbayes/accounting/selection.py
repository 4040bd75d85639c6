r"""Private selection: the best of K private runs at one price, where K is drawn and stays hidden.

One run is a mechanism M whose output has a score. A selection draws K from a truncated negative
binomial law D(eta, gamma),

.. math:: P(K = k) \propto (1 - \gamma)^k \prod_{l<k} \frac{l + \eta}{l + 1}, \quad k \ge 1,

runs M that often, independently and each time from the start, and releases the output of the
largest score. With F(y) = P(an output is at most y) its density is m(y) f'(F(y)), f the generating
function of K. For this law f' is a power of gamma + (1 - gamma)(1 - F), so that

.. math:: \delta_A(\varepsilon) \le E[K]\, \delta_M(\varepsilon - c), \qquad
    c = (1 + \eta) \max_u \log\frac{\gamma + (1 - \gamma) T(u)}{\gamma + (1 - \gamma) u},

where T is the trade-off curve of M (its largest true-positive rate at false-positive rate u). That
is Koskela, Redberg and Wang (2024) with their free epsilon at its best value: each line above T
gives one of their bounds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from scipy import optimize

from ..errors import ArgumentError
from . import bounds, events
from .calibration import counts_of
from .dominating_pairs import Array
from .events import DpEvent, Neighboring, NeighboringRelation
from .risk import profiles, trade_offs

_UNSEEN = 1e-32  # larger K have this probability; they count as the largest K
_MOST_RUNS = 2**20
_DRAWING = 1e-7  # a bound on the relative error of K's probabilities when it is drawn


@dataclass(frozen=True)
class Repetitions:
    """The law of the number of runs: truncated negative binomial.

    Args:
        mean: how many runs to expect, above 1.
        shape: eta, above -1 and at most 1. 1 is the geometric law, 0 the logarithmic one. The
            smaller, the cheaper, and the more often there are few runs, or very many.
    """

    mean: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        if not -1 < self.shape <= 1:
            raise ArgumentError(f"shape must be above -1 and at most 1, got {self.shape!r}.")
        if not 1 < self.mean < math.inf:
            raise ArgumentError(f"mean must be above 1 and finite, got {self.mean!r}.")
        if self._most > _MOST_RUNS:
            raise ArgumentError(
                f"a mean of {self.mean:g} runs at shape {self.shape:g} may take more than"
                f" {_MOST_RUNS} of them: use a smaller mean, or a larger shape."
            )

    @property
    def gamma(self) -> float:
        """The gamma at which the mean is ``mean``."""

        def excess(log_gamma: float) -> float:
            return _mean(math.exp(log_gamma), self.shape) - self.mean

        return math.exp(optimize.brentq(excess, -600.0, -1e-9, xtol=1e-14))

    @property
    def _most(self) -> float:
        # for these shapes P(K >= k) is at most k (1 - gamma)^k E[K] / P(K = 1)
        return 10 + 1.5 * math.log(_UNSEEN) / math.log1p(-self.gamma)

    def probabilities(self) -> Array:
        """P(K = 1), P(K = 2), ..., until next to nothing is left."""
        k = np.arange(1, int(self._most))
        ratios = np.log1p(-self.gamma) + np.log((k + self.shape) / (k + 1))
        logs = np.concatenate([[0.0], np.cumsum(ratios)])
        masses = np.exp(logs - logs.max())
        return np.asarray(masses / math.fsum(masses))

    def draw(self) -> int:
        """K, by the operating system's entropy: nobody may learn it but by the time it takes."""
        masses = self.probabilities()
        # The probability that K = k, given K <= k. A draw with these, not with the distribution
        # function, gives rare numbers their right probability, too.
        last = masses / np.cumsum(masses[::-1])[::-1]
        source = random.SystemRandom()
        for number, share in enumerate(last.tolist(), start=1):
            if source.random() < share:
                return number
        return len(last)


def _mean(gamma: float, shape: float) -> float:
    if abs(shape) < 1e-12:
        return (1 - gamma) / gamma / -math.log(gamma)
    return shape * (1 - gamma) / (gamma * -math.expm1(shape * math.log(gamma)))


def selection_epsilon(
    schedule: Iterable[tuple[DpEvent, int]],
    repetitions: Repetitions,
    delta: float,
    neighboring: Neighboring | NeighboringRelation = "add_or_remove_one",
) -> float:
    """Epsilon at ``delta`` of releasing the best of ``repetitions`` runs.

    Args:
        schedule: pairs (event, count): all that one run may release, whatever its settings.
        repetitions: the law of the number of runs.
        delta: of the selection.
        neighboring: the accountant's relation.

    Returns:
        An upper bound, valid if runs are independent of each other, each releases no more than
        ``schedule``, the score is a function of what its run released and of public things, and
        nothing but the best run becomes known: not K, not the others, not their scores.
    """
    delta = events.check_delta(delta)
    neighboring = events.neighboring_relation(neighboring)
    if not (counts := counts_of(schedule, neighboring)):
        return 0.0
    # K is drawn from nearly this law: every density is off by a factor of 1 +- _DRAWING at most,
    # and _UNSEEN counts on both sides
    least = delta * (1 - 1e-6) - 1e-25
    if least <= 0:
        raise ArgumentError("delta of a selection must be at least 1e-24.")
    gamma, shape, largest = repetitions.gamma, repetitions.shape, 1.0
    for curve in trade_offs(*profiles(frozenset(counts.items()), "pld")):
        # a ratio of two functions that are linear between vertices is largest at one of them
        below, above = (gamma + (1 - gamma) * rates for rates in curve.vertices)
        largest = max(largest, float(np.max(above / below)) * (1 + 1e-12))
    # gamma decides the mean, even if another one was asked for.
    share = least / (_mean(gamma, shape) * (1 + _DRAWING))
    once = bounds.upper_epsilon(counts, share) if share >= events.SMALLEST_DELTA else math.inf
    return ((1 + shape) * math.log(largest) + once) * (1 + _DRAWING) + 4 * _DRAWING


def selection_event(
    schedule: Iterable[tuple[DpEvent, int]],
    repetitions: Repetitions,
    delta: float,
    neighboring: Neighboring | NeighboringRelation,
) -> DpEvent:
    """The event of a selection: it is (:func:`selection_epsilon`, ``delta``)-private. For a
    schedule of :class:`~torch_dpbayes.accounting.events.UserLevelDpEvent` it is a user-level event,
    too.

    Args: as of :func:`selection_epsilon`; ``neighboring`` is that of the charged accountant.
    """
    planned = list(schedule)
    parts = (part for event, _ in planned for part, _ in events.elementary(event, 1))
    units = {isinstance(part, events.UserLevelDpEvent) for part in parts}
    if len(units) > 1:
        raise ArgumentError(
            "a schedule must charge users or records, not both: put every event into a"
            " UserLevelDpEvent, or none."
        )
    epsilon = selection_epsilon(planned, repetitions, delta, neighboring)
    if math.isinf(epsilon):
        raise ArgumentError(
            "a run of this schedule is not private at this delta, and so neither is the selection:"
            " pass a larger delta, or a schedule without failures and releases without noise."
        )
    selection = events.ComposedDpEvent([events.PureDpEvent(epsilon), events.FailureDpEvent(delta)])
    return events.UserLevelDpEvent(selection) if True in units else selection
