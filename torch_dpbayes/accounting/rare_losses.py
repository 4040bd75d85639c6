r"""Compositions in which rare, large losses decide.

A release is cut in two: losses up to a cut, of mass a under P and b under Q, and the rest, r.
Losses up to the cut are composed on a grid of their own. With G the delta of that composition,

.. math:: \delta(\varepsilon) = \sum_A \int G_{-A}\Big(\varepsilon - \sum_{i \in A} \ell_i\Big)
    \prod_{i \in A} r_i(d\ell_i),

A the releases with a loss above the cut, and G_{-A} as G, without them. Fewer releases tell no more
than all of them, so that

.. math:: G_{-A}(x) \le G\Big(x + \sum_{i \in A} \log \frac{a_i}{b_i}\Big)
    \prod_{i \in A} \frac1{a_i}.

One loss above the cut, and the sum of two, have masses on a grid that is even in log l; three and
more have a mass of at most m^3 / 6 exp(m), m that of one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from scipy import special

from .dominating_pairs import Array, Capped, Gaussian, Pair, Sampled, has_two_directions
from .fft_composition import Composition, tail_of
from .privacy_loss import Nodes, loss_nodes, sampled_nodes, sampled_point
from .tilted_window import choose_window

_CUT, _LARGEST_CUT = 0.25, 8.0  # of epsilon
_THREE = 1e-4  # of delta, that three losses above the cut may have
_TILT = 50.0  # over epsilon: a larger one would hide losses about 0
_POINTS, _EVERY = 1536, 3  # of the grid, and which of them count for sums of two
_ATTEMPTS, _CLOSE = 4, 0.9  # at a smaller epsilon, if the one before was far too large
_BELOW = 1 - 1e-9  # rounds a mass by quadrature down


@loss_nodes.register
def _(pair: Capped, tail: float, interval: float | None = None) -> Nodes:
    sampled, most = pair.pair, pair.most
    if pair.reverse:  # of which no loss passes -log(1 - q)
        losses, masses, _ = sampled_nodes(sampled, tail, interval, most=most)
        losses, masses = -losses, masses * np.exp(-losses)
        below = float(special.ndtr(-sampled_point(sampled, np.array([most]))[0] / sampled.noise))
    elif sampled.kind == "antipodal":
        losses, masses, _ = sampled_nodes(sampled, tail, interval, -most, most)
        q, z, x = sampled.rate, sampled.noise, sampled_point(sampled, np.array([-most]))[0]
        below = (1 - q) * float(special.ndtr(x / z)) + q * float(special.ndtr((x - 1) / z))
    else:
        return sampled_nodes(sampled, tail, interval, most=most)
    return Nodes(np.append(losses, -most), np.append(masses, below / _BELOW))


def can_be_cut(levels: Mapping[Pair, int]) -> bool:
    """Whether the releases are sampled ones, and perhaps a Gaussian, which is not cut."""
    return all(isinstance(pair, Sampled | Gaussian) for pair in levels)


def epsilon_by_cut(
    levels: Mapping[Pair, int], delta: float, epsilon: float, reverse: bool = False
) -> float:
    """An upper bound on epsilon at ``delta``, below ``epsilon`` where that is shown to be one, else
    ``epsilon``.

    Raises:
        OverflowError: the losses are too far apart.
    """
    for _ in range(_ATTEMPTS):
        before, epsilon = epsilon, _cut_at(levels, delta, epsilon, reverse)
        if epsilon > _CLOSE * before:
            break
    return epsilon


def _cut_at(levels: Mapping[Pair, int], delta: float, epsilon: float, reverse: bool) -> float:
    tail, cut, three = tail_of(delta, sum(levels.values())), _CUT * epsilon, math.inf
    # a reverse is all in the core; a pair that is its own reverse has the same large losses
    cuttable = {p: n for p, n in levels.items() if not (reverse and has_two_directions(p))}
    while three > _THREE * delta:
        if cut > _LARGEST_CUT * epsilon:
            return epsilon
        most, above = cut, _above(cuttable, cut, tail)
        mass, cut = math.fsum(mass for *_, mass, _ in above), 1.5 * cut
        three = mass**3 / 6 * math.exp(min(mass, 1.0))
    core: dict[Pair, int] = {}
    for pair, count in levels.items():
        turned = reverse and has_two_directions(pair)
        core[Capped(pair, most, turned) if isinstance(pair, Sampled) else pair] = count
    window = choose_window(core, False, tail, epsilon=epsilon, largest_tilt=_TILT / epsilon)
    of_core = Composition(window, core, False, tail).profile()
    largest = max((loss for *_, loss in above), default=most)
    points = np.geomspace(most, 2.5 * max(largest, most), _POINTS + 1)
    once = np.zeros(len(points))
    for found, shift, scale, _, _ in above:
        # no piece of the quadrature crosses a point
        losses, masses, _ = sampled_nodes(found, tail, points - shift, least=most)
        is_above = losses > 0
        once += scale * _split(losses[is_above] + shift, masses[is_above], points)
    few = points[::_EVERY]
    some = _split(points, once, few)
    sums, both = np.add.outer(few, few).ravel(), np.multiply.outer(some, some).ravel() / 2
    kept = both > 0
    rare = once + _split(sums[kept], both[kept], points)
    lost = three + tail * sum(levels.values())

    def excess(at: float) -> float:
        found = of_core(np.append(at - points, at))
        return float(rare @ found[:-1] + found[-1]) * (1 + 1e-12) + lost - delta

    if excess(epsilon) > 0:
        return epsilon
    low, high = 0.0, epsilon
    while high - low > 1e-6 * high and high > 1e-12 * epsilon:
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high


def _above(
    levels: Mapping[Pair, int], cut: float, tail: float
) -> list[tuple[Sampled, float, float, float, float]]:
    """Of each sampled release log(b / a), its number over a, the mass of both with the losses above
    the cut, and the largest loss.
    """
    found = []
    for pair, count in levels.items():
        if isinstance(pair, Sampled):
            losses, masses, _ = sampled_nodes(pair, tail, least=cut)
            losses, masses = losses[losses > 0], masses[losses > 0]  # not those mirrored
            above = float(masses.sum()) / _BELOW + tail
            if above > 0.5:
                return [(pair, 0.0, 0.0, math.inf, cut)]  # the cut is too low
            shift = math.log1p(-float(masses @ np.exp(-losses)) * _BELOW) - math.log1p(-above)
            scale = count / (1 - above) / _BELOW
            largest = float(losses.max(initial=cut)) + 2 * shift
            found.append((pair, shift, scale, scale * above, largest))
    return found


def _split(losses: Array, masses: Array, points: Array) -> Array:
    """Masses between points, moved to both so that their sums under P and under Q stay."""
    cell = np.clip(np.searchsorted(points, losses, "right") - 1, 0, len(points) - 2)
    low, high = points[cell], points[cell + 1]
    up = masses * np.clip(np.expm1(low - losses) / np.expm1(low - high), 0.0, 1.0)
    found = np.bincount(cell, masses - up, len(points)) + np.bincount(cell + 1, up, len(points))
    return np.asarray(found, dtype=np.float64)
