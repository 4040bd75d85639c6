r"""Repeat-and-select: dp-accounting's event of private selection, by its Renyi curve.

Runs are made a hidden number K of times, independently and each from the start, and the best is
released. With D_a the Renyi divergence of one run in the worse direction, that of the selection at
order a is at most (Papernot, Steinke 2022)

.. math:: D_a + (1 + \eta)\Big(1 - \frac1b\Big) D_b + \frac{1 + \eta}{b} \log\frac1\gamma
    + \frac{\log E[K]}{a - 1} \qquad \text{for all } b > 1

where K is truncated negative binomial of shape eta (Theorem 2), and

.. math:: D_a + E[K]\,\delta + \frac{\log E[K]}{a - 1}, \qquad
    \text{one run being } \Big(\log\frac{a}{a - 1}, \delta\Big)\text{-private},

where K is a Poisson number, shape infinity, and what is released at K = 0 has nothing to do with
the data (Theorem 6). Divergences grow with the order, so that the bound at a larger order holds at
a smaller one.
"""

from __future__ import annotations

import math

import numpy as np
from dp_accounting.dp_event import (
    ComposedDpEvent,
    RepeatAndSelectDpEvent,
    SelfComposedDpEvent,
)

from . import events, pairs, renyi
from .events import FailureDpEvent, NonPrivateDpEvent, Parts
from .pairs import Array, Pair, Repeated
from .people import PersonDpEvent
from .selection import gamma_of

_LEAST_MEAN = 1 + 1e-6  # smaller ones count as this, which costs more
_MARGIN = 1e-9  # relative, by far that of gamma


@events.parts_of.register
def _(event: RepeatAndSelectDpEvent, count: int) -> Parts:
    mean, shape = float(event.mean), float(event.shape)
    if not 1 <= mean <= 1e100:
        raise ValueError(f"the mean number of runs must be from 1 to 1e100, got {event.mean!r}.")
    if not shape > -1:
        raise ValueError(
            f"shape must be above -1, or math.inf for a Poisson number, got {event.shape!r}."
        )
    parts = [*events.parts_of(event.event, 1)]
    if any(isinstance(part, NonPrivateDpEvent | FailureDpEvent) for part, _ in parts):
        raise ValueError(
            "runs that may fail outright have no Renyi curve: charge"
            " accounting.selection.selection_event(...), which prices them by their profile."
        )
    if any(isinstance(part, PersonDpEvent) for part, _ in parts):
        raise TypeError("a selection holds a PersonDpEvent: write PersonDpEvent(selection).")
    if mean == 1 and math.isfinite(shape):  # one run, always
        yield from ((part, count * times) for part, times in parts)
    elif parts:
        run = ComposedDpEvent(tuple(SelfComposedDpEvent(part, n) for part, n in parts))
        yield RepeatAndSelectDpEvent(run, mean, shape), count


@pairs.pair_of.register
def _(event: RepeatAndSelectDpEvent, replace: bool) -> Pair:
    counts: dict[Pair, int] = {}
    for part, times in events.parts_of(event.event, 1):
        counts = pairs.added(counts, {pairs.pair_of(part, replace): times})
    return Repeated(tuple(counts.items()), event.mean, event.shape)


@renyi.divergences.register
def _(pair: Repeated, alpha: Array) -> Array:
    # a larger order is never cheaper than a smaller one
    orders = np.union1d(alpha, np.array(renyi.ORDERS))
    found = _at(pair, orders)
    found = np.minimum.accumulate(found[::-1])[::-1]
    return np.asarray(found[np.searchsorted(orders, alpha)])


def _at(pair: Repeated, orders: Array) -> Array:
    counts = dict(pair.parts)
    once = renyi.curve(counts, orders.tolist())
    mean = max(pair.mean, _LEAST_MEAN) * (1 + _MARGIN)
    of_number = math.log(mean) / (orders - 1)
    if math.isinf(pair.shape):
        curve = renyi.curve(counts)
        limits = np.log1p(1 / (orders - 1)) * (1 - 1e-15)
        failing = np.array([renyi.delta(curve, limit) for limit in limits.tolist()])
        return np.asarray(once + mean * failing + of_number)
    log_gamma = math.log(gamma_of(mean, pair.shape)) * (1 + _MARGIN) - _MARGIN
    of_all = (1 + pair.shape) * ((1 - 1 / orders) * once - log_gamma / orders)
    return np.asarray(once + float(np.min(of_all)) + of_number)
