"""Grid, tilt and window of a composition. They decide only how tight its bounds are.

The tilt is the tangent point of the moment bound on delta. The grid follows from the requested
accuracy, and the window from Chernoff bounds on the mass of the tilted, rounded losses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from .dominating_pairs import Array, Pair, Pure, has_two_directions, scattered_of
from .mixture_bounds import Mixtures, Near, mixtures
from .privacy_loss import BEYOND, loss_nodes

ACCURACY = 1e-4  # relative excess of epsilon that the discretisation aims at
SMALLEST = 1e-40  # for a smaller delta bounds may be loose
LARGEST_WINDOW = 2**22  # grid points
# the largest ones are for losses of about 1e-9
_TILTS = np.append(np.geomspace(1e-4, 1e6, 104), np.geomspace(3e6, 3e16, 21))
_WINDOW_TILTS = np.array([0.5, 1.0, 2.0, 3.0, 4.5, 6.0, 8.0])
_CUT_TILTS = np.append([0.05, 0.1, 0.2], _WINDOW_TILTS)  # for losses up to a cut
_OUTSIDE = 1e-9  # tilted mass that may be outside the window, at ordinary tilts
_LEAST_INTERVAL, _LARGEST_EPSILON = 1e-30, 1e280  # far within the range of floats
# largest interval at epsilons below the spread of the loss, relative to one step's share of it
_OF_LOSS = 0.05
_OF_DELTA = 30.0  # largest scale of the interval, times the tilt
_AROUND = 8.0  # ratio up to which tilts around a pilot's tilt are searched
_PILOT_EXCESS = 0.5  # target excess of log(delta) in a pilot
_CELL = 2e-4  # the largest interval, relative to epsilon
_GROWTH = 4  # the window of a growing composition is for so many times its releases
_FEWEST_NODES = 20  # rates, and noises, of the grid of mixtures at ACCURACY
_MIXED_ACCURACY = 2.0  # factor of the accuracy for mixtures
_MIXED_GRID = 5.0  # factor of the accuracy for the grid of many releases, which takes most time


class _Losses:
    """Quadrature nodes of the losses of a composition, for the choice of tilt and window."""

    def __init__(self, levels: Mapping[Pair, int], reverse: bool, tail: float) -> None:
        self._reverse, self._tail = reverse, tail
        self.widest = 0.0
        self._nodes = [(*self._of(pair), count) for pair, count in levels.items()]
        self._mixed: Mixtures | None = None
        self._corners: list[tuple[Array, Array]] = []

    def _of(self, pair: Pair) -> tuple[Array, Array]:
        found = losses_of(pair, self._reverse, self._tail)
        self.widest = max(self.widest, float(np.ptp(found[0])))
        return found

    def set_mixtures(self, mixed: Mixtures) -> None:
        """Set the mixtures; they replace earlier ones."""
        self._mixed, self._corners = mixed, [self._of(corner) for corner in mixed.corners]

    def cumulants(self, tilts: Array) -> tuple[Array, Array, Array]:
        """K(theta) = sum of count * log E exp(theta L), with K' and K''."""
        total = np.zeros((3, len(tilts)))
        for losses, log_masses, count in self._nodes:
            total += count * np.stack(_cumulants(losses, log_masses, tilts))
        if self._mixed is not None:
            each = np.array([_cumulants(*corner, tilts) for corner in self._corners])
            log_moment, mean, variance = np.moveaxis(each[self._mixed.among], 2, 0)
            exponent = log_of(self._mixed.weights)[:, :, None] + log_moment  # (groups, 4, tilts)
            peak = exponent.max(axis=1)
            share = np.exp(exponent - peak[:, None])
            norm = share.sum(axis=1)
            share /= norm[:, None]
            center = (share * mean).sum(axis=1)
            spread = (share * (variance + (mean - center[:, None]) ** 2)).sum(axis=1)
            found = np.stack([peak + np.log(norm), center, spread])
            total += np.tensordot(found, self._mixed.counts, (1, 0))
        return total[0], total[1], total[2]

    def ends(self) -> tuple[float, float]:
        """The least and the largest possible loss."""
        least = sum(count * float(losses.min()) for losses, _, count in self._nodes)
        largest = sum(count * float(losses.max()) for losses, _, count in self._nodes)
        if self._mixed is not None:
            total = self._mixed.total
            least += total * min(float(losses.min()) for losses, _ in self._corners)
            largest += total * max(float(losses.max()) for losses, _ in self._corners)
        return least, largest

    def spread(self) -> float:
        """The typical size of the loss: the s at which E min((L / s)^2, 1) adds up to a half. Rare
        losses that are far larger than most hardly raise it.
        """
        parts = [(np.abs(losses), n * np.exp(logs)) for losses, logs, n in self._nodes]
        low, high = -700.0, 700.0
        for _ in range(24):
            middle = (low + high) / 2
            scale = math.exp(-middle)
            found = sum(float(mass @ np.minimum(scale * loss, 1.0) ** 2) for loss, mass in parts)
            low, high = (middle, high) if found > 0.5 else (low, middle)
        return math.exp(low)


class Window(NamedTuple):
    """Grid, tilt and window for one direction."""

    interval: float
    tilt: float
    lower_tilt: float
    upper_tilt: float
    lower: float
    upper: float
    wanted_interval: float  # the interval for the requested accuracy
    near: Near


def choose_window(
    levels: Mapping[Pair, int],
    reverse: bool,
    tail: float,
    *,
    log_delta: float | None = None,
    epsilon: float | None = None,
    accuracy: float = ACCURACY,
    largest_tilt: float = math.inf,
    grows: bool = False,
    fineness: float = 1.0,
) -> Window:
    """The window for a result near ``epsilon``, or near ``log_delta``. If the composition
    ``grows``, the window is for both, and for several times as many releases. Cells are narrower by
    ``fineness``.
    """
    asked, asked_log_delta = epsilon, log_delta
    if grows:
        levels = {pair: _GROWTH * count for pair, count in levels.items()}
    total = sum(levels.values())
    sampled, others = scattered_of(levels)
    losses = _Losses(others if sampled else levels, reverse, tail)
    near = Near(1.0, -1.0, reverse, _PILOT_EXCESS, 2)
    tilts = _TILTS[::4] if sampled else _TILTS
    for _ in range(2 if sampled else 1):
        if sampled:
            mixed = mixtures(sampled, near)
            if mixed is None:
                losses, sampled = _Losses(levels, reverse, tail), []
            else:
                losses.set_mixtures(mixed)
        cumulant, mean, variance = losses.cumulants(tilts)
        tilt, epsilon, log_delta = _tangent(
            tilts, cumulant, mean, asked, None if grows else asked_log_delta
        )
        if grows and asked_log_delta is not None:
            log_delta = asked_log_delta
        tilt = min(tilt, largest_tilt)
        variance_there = float(np.interp(tilt, tilts, variance))
        tilts = _TILTS[(_TILTS >= tilt / _AROUND) & (_TILTS <= tilt * _AROUND)]
        fewest = max(2, round(_FEWEST_NODES * math.sqrt(ACCURACY / accuracy)))
        excess = _MIXED_ACCURACY * accuracy * tilt * epsilon
        near = Near(tilt, log_delta, reverse, excess, fewest)
    assert epsilon is not None and log_delta is not None
    if sampled:
        accuracy *= _MIXED_GRID
    least, largest = losses.ends()
    # A step's rounding adds at most theta (1 + theta) h^2 / 12 to its cumulant, on average over
    # the cell.
    scale = max(epsilon, 0.05 * math.sqrt(variance_there))
    scale = min(scale, _OF_DELTA / tilt)  # delta falls as exp(-tilt * epsilon)
    wanted = math.sqrt(12 * accuracy * scale / (total * (1 + tilt)))
    if largest_tilt == math.inf:  # not for losses up to a cut, which have a density
        wanted = min(wanted, _CELL * scale)
    # At small epsilons, where most of the mass may be, the relative error of delta is n (h / s)^2 /
    # 8, with s the spread: see of_grid.
    if not sampled:
        spread = losses.spread() / math.sqrt(total)  # of a step
        if (epsilon if asked is None else asked) < total * spread:
            wanted = min(wanted, _OF_LOSS * spread)
    wanted /= fineness
    # the range of losses may be wider for this tail than for that of the final delta
    interval = max(wanted, 4 * losses.widest / LARGEST_WINDOW, _LEAST_INTERVAL)
    atoms = {pair.epsilon for pair in levels if isinstance(pair, Pure)}
    if len(atoms) == 1 and (atom := atoms.pop()) > interval:
        interval = atom / math.ceil(atom / interval)  # both its losses on the grid
    tilt = min(tilt, 0.5 / interval)
    # rounding adds at most h^2 / 4 to the variance of a step
    center, _, spread = (float(value[0]) for value in losses.cumulants(np.array([tilt])))
    relative = _WINDOW_TILTS if largest_tilt == math.inf else _CUT_TILTS
    steps = relative / math.sqrt(spread + total * interval**2 / 4)
    tilts = np.concatenate([tilt + steps, tilt - steps])
    outer, _, _ = losses.cumulants(tilts)
    outer += total * interval**2 / 8 * (tilts + tilts**2 - tilt - tilt**2)
    reach = (outer - center - log_outside(tilt)) / np.concatenate([steps, steps])
    above, below = reach[: len(steps)], reach[len(steps) :]
    top, bottom = int(np.argmin(above)), int(np.argmin(below))
    # the smallest and the largest possible loss bound the window, too
    upper = min(float(above[top]), largest + total * interval)
    lower = max(-float(below[bottom]), least - total * interval)
    if not np.isfinite([interval, tilt, lower, upper]).all():
        raise OverflowError(BEYOND)
    return Window(
        interval=max(interval, (upper - lower) / LARGEST_WINDOW),
        tilt=tilt,
        lower_tilt=tilt - float(steps[bottom]),
        upper_tilt=tilt + float(steps[top]),
        lower=lower,
        upper=upper,
        # for smaller deltas bounds may be loose
        wanted_interval=wanted if log_delta > math.log(SMALLEST) else interval,
        near=near,
    )


def of_grid(fineness: float) -> float:
    """The relative error of delta at an epsilon below most losses."""
    return (_OF_LOSS / fineness) ** 2 / 8


def _tangent(
    tilts: Array, cumulant: Array, mean: Array, epsilon: float | None, log_delta: float | None
) -> tuple[float, float, float]:
    """Tilt, epsilon and log(delta); one of the last two is given. The tangent point of the
    bound delta <= exp(K - t epsilon) t^t / (1 + t)^(1 + t) (Canonne, Kamath, Steinke 2020),
    interpolated, so that the result changes smoothly with the levels.
    """
    conversion = -tilts * np.log1p(1 / tilts) - np.log1p(tilts)
    if log_delta is not None:
        depth = np.maximum.accumulate(tilts * mean - cumulant + np.log1p(tilts))
        tilt = float(np.exp(np.interp(-log_delta, depth, np.log(tilts))))
        found = float(np.interp(tilt, tilts, (cumulant - log_delta + conversion) / tilts))
        return tilt, max(found, 0.0), log_delta
    assert epsilon is not None
    epsilon = min(epsilon, _LARGEST_EPSILON)
    log_delta = min(float(np.min(cumulant - tilts * epsilon + conversion)), 0.0)
    tangent = np.maximum.accumulate(mean - np.log1p(1 / tilts))
    return float(np.exp(np.interp(epsilon, tangent, np.log(tilts)))), epsilon, log_delta


def _cumulants(losses: Array, log_masses: Array, tilts: Array) -> tuple[Array, Array, Array]:
    exponent = tilts[:, None] * losses + log_masses
    peak = exponent.max(axis=1)
    weight = np.exp(exponent - peak[:, None])
    norm = weight.sum(axis=1)
    mean = weight @ losses / norm
    variance = np.maximum(weight @ losses**2 / norm - mean**2, 0.0)
    return peak + np.log(norm), mean, variance


def losses_of(pair: Pair, reverse: bool, tail: float) -> tuple[Array, Array]:
    """Losses in one direction, with the logarithms of their masses."""
    losses, masses, central = loss_nodes(pair, tail)
    if central:
        losses, masses = np.append(losses, 0.0), np.append(masses, central)
    log_masses = log_of(masses)
    if reverse and has_two_directions(pair):
        return -losses, log_masses - losses
    return losses, log_masses


def log_moment(pair: Pair, tilt: float, reverse: bool, tail: float) -> float:
    """log E exp(tilt * L) without a grid."""
    return float(_cumulants(*losses_of(pair, reverse, tail), np.array([tilt]))[0][0])


def log_outside(tilt: float) -> float:
    """Logarithm of the tilted mass that may be outside the window. It is added to delta; at the
    decisive losses, tilted mass is about 1 / tilt of delta.
    """
    return math.log(_OUTSIDE / (1 + 1e-4 * tilt))


def log_of(masses: Array) -> Array:
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(masses))
