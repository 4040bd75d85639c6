r"""Private selection: the cost of releasing the best of K private runs, with a secret random K.

One run is a mechanism M whose output has a score. A selection draws K from a truncated negative
binomial distribution D(eta, gamma),

.. math:: P(K = k) \propto (1 - \gamma)^k \prod_{l<k} \frac{l + \eta}{l + 1}, \quad k \ge 1,

runs M independently K times, and releases the output with the largest score. Let f be the
generating function of K, and F(y) = P(an output is at most y). Then the density of the selected
output is m(y) f'(F(y)). For this distribution f' is a power of gamma + (1 - gamma)(1 - F), so

.. math:: \delta_A(\varepsilon) \le E[K]\, \delta_M(\varepsilon - c), \qquad
    c = (1 + \eta) \max_u \log\frac{\gamma + (1 - \gamma) T(u)}{\gamma + (1 - \gamma) u},

where T is the trade-off curve of M (its largest true-positive rate at false-positive rate u). This
is the bound of Koskela, Redberg and Wang (2024) with the best value of their free epsilon: each
line above T gives one of their bounds.
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

_UNSEEN = 1e-32  # probability of larger K, which are replaced by the largest K
_LEAST_MEAN, _MOST_RUNS = 1.000001, 2**20
_DRAWING = 1e-7  # bound on the relative error of the probabilities with which K is drawn


@dataclass(frozen=True)
class Repetitions:
    """The distribution of the number of runs: truncated negative binomial.

    Args:
        mean: the expected number of runs, at least 1.000001.
        shape: eta, above -1 and at most 1. 1: geometric distribution; 0: logarithmic distribution.
            A smaller value costs less, but very small and very large numbers are more probable.
    """

    mean: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        if not -1 < self.shape <= 1:
            raise ArgumentError(f"shape must be above -1 and at most 1, got {self.shape!r}.")
        if not _LEAST_MEAN <= self.mean < math.inf:
            raise ArgumentError(
                f"mean must be at least {_LEAST_MEAN} and finite, got {self.mean!r}."
            )
        if self._most > _MOST_RUNS:
            raise ArgumentError(
                f"with a mean of {self.mean:g} runs at shape {self.shape:g} there may be more than"
                f" {_MOST_RUNS} runs: use a smaller mean, or a larger shape."
            )

    @property
    def gamma(self) -> float:
        """The gamma for which K has this mean."""

        def excess(log_gamma: float) -> float:
            return _mean(math.exp(log_gamma), self.shape) - self.mean

        if excess(-600.0) <= 0:
            return math.ulp(0.0)  # refused, because K may be too large
        return math.exp(optimize.brentq(excess, -600.0, -1e-9, xtol=1e-14))

    @property
    def _most(self) -> float:
        # for these shapes P(K >= k) is at most k (1 - gamma)^k E[K] / P(K = 1)
        return 10 + 1.5 * math.log(_UNSEEN) / math.log1p(-self.gamma)

    def probabilities(self) -> Array:
        """P(K = 1), P(K = 2), ..., up to a negligible rest."""
        k = np.arange(1, int(self._most))
        ratios = np.log1p(-self.gamma) + np.log((k + self.shape) / (k + 1))
        logs = np.concatenate([[0.0], np.cumsum(ratios)])
        masses = np.exp(logs - logs.max())
        return np.asarray(masses / math.fsum(masses))

    def draw(self) -> int:
        """Draw K with the operating system's entropy; only the time of the runs may reveal K."""
        masses = self.probabilities()
        # P(K = k | K >= k). With these, and not with the distribution function, rare numbers have
        # the right probability, too.
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
        schedule: pairs (event, count): all releases of one run, with any settings.
        repetitions: the distribution of the number of runs.
        delta: δ of the selection.
        neighboring: the accountant's relation.

    Returns:
        An upper bound. It is valid if runs are independent, each run releases at most ``schedule``,
        a score is a function of its run's releases and of public values, and only the best run is
        published: not K, and not the other runs or their scores.
    """
    delta = events.check_delta(delta)
    neighboring = events.neighboring_relation(neighboring)
    if not (counts := counts_of(schedule, neighboring)):
        return 0.0
    # K has this distribution only approximately: every density may be off by a factor of
    # 1 +- _DRAWING, and _UNSEEN counts on both sides
    least = delta * (1 - 1e-6) - 1e-25
    if least <= 0:
        raise ArgumentError(f"delta of a selection must be above 1e-25, got {delta:g}.")
    gamma, shape, largest = repetitions.gamma, repetitions.shape, 1.0
    # the mean that gamma has, which may differ from ``repetitions.mean``
    share = least / (_mean(gamma, shape) * (1 + _DRAWING))
    once = bounds.upper_epsilon(counts, share) if share >= events.SMALLEST_DELTA else math.inf
    for curve in trade_offs(*profiles(frozenset(counts.items()), "pld")):
        # a ratio of two functions that are linear between vertices is largest at a vertex
        below, above = (gamma + (1 - gamma) * rates for rates in curve.vertices)
        largest = max(largest, float(np.max(above / below)) * (1 + 1e-12))
    return ((1 + shape) * math.log(largest) + once) * (1 + _DRAWING) + 4 * _DRAWING


def selection_event(
    schedule: Iterable[tuple[DpEvent, int]],
    repetitions: Repetitions,
    delta: float,
    neighboring: Neighboring | NeighboringRelation,
) -> DpEvent:
    """The event of a selection: it is (:func:`selection_epsilon`, ``delta``)-private. If the
    schedule consists of :class:`~torch_dpbayes.accounting.events.UserLevelDpEvent`, it is a
    user-level event, too.

    Args: as for :func:`selection_epsilon`; ``neighboring``: that of the charged accountant.
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
            "a run of this schedule has an infinite epsilon at this delta, and so has the"
            " selection: pass a larger delta, or remove failures and releases without noise from"
            " the schedule."
        )
    selection = events.ComposedDpEvent([events.PureDpEvent(epsilon), events.FailureDpEvent(delta)])
    return events.UserLevelDpEvent(selection) if True in units else selection
