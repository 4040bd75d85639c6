r"""Epsilon and delta of a history by privacy loss distributions: upper bounds, and lower ones.

Upper bounds discretise towards less privacy, and add all mass that the computation leaves out.
Lower bounds round the other way.

*Rare, large losses.* If these decide, the losses of a release are split: losses up to a cut, with
mass a under P and b under Q, and the rest, r. Losses up to the cut are composed on a separate grid.
With G the delta of that composition,

.. math:: \delta(\varepsilon) = \sum_A \int G_{-A}\Big(\varepsilon - \sum_{i \in A} \ell_i\Big)
    \prod_{i \in A} r_i(d\ell_i),

where A is the set of releases with a loss above the cut, and G_{-A} is G without them. Fewer
releases reveal at most as much as all of them, so

.. math:: G_{-A}(x) \le G\Big(x + \sum_{i \in A} \log \frac{a_i}{b_i}\Big)
    \prod_{i \in A} \frac1{a_i}.

One loss above the cut, and sums of two, have masses on a grid that is even in log l. Three or more
have a mass of at most m^3 / 6 exp(m), where m is the mass of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
from scipy import optimize, special

from ..errors import ArgumentError
from . import dominating_pairs as pairs
from .dominating_pairs import Array, Pair
from .events import SMALLEST_DELTA
from .fft_composition import Composition, compose, tail_of
from .gdp import (
    advantage_sum,
    bounded_epsilon,
    gaussian_delta,
    gaussian_epsilon,
    sampled_delta,
    sampled_epsilon,
)
from .mixture_bounds import Mixtures, Near, mixtures
from .privacy_loss import (
    Nodes,
    apart,
    delta_of_all,
    epsilon_of_all,
    failing,
    loss_nodes,
    sampled_nodes,
    sampled_point,
)
from .tilted_window import ACCURACY, choose_window, of_grid

MOST_STEPS = 2**40
LARGEST_EXCESS = 1e3  # replaces larger values, so that root finding can interpolate
_ROUGH = 1e-2  # accuracy of a first bound; for many releases a fifth of it is tried, too
_LOWER_RATIO = 1.005
_MOST_CUT = 512  # losses of more different releases are cut as those of mixtures
# above these shares of delta, and of epsilon, a cut is tighter
_ROUND_OFF, _OF_EPSILON = 1e-4, 4e-3
_COARSE = 0.05  # largest width of a cell, relative to epsilon
_VANISHING = 1e-3  # target for the relative excess if epsilon is far below the losses
_FINER = 8.0  # ratio of consecutive grids that are tried for it
# above these relative excesses (of many different releases, of few) a grid is up to so much finer
_OF_MANY, _OF_FEW, _FINEST = 3e-3, 5e-4, 4.0
_RARE = 0.01  # largest sum of added losses, about the sum of all rates
# first and largest tried cut, and one that is far, relative to epsilon
_CUT, _LARGEST_CUT, _FAR = 0.25, 4096.0, 64.0
_THREE = 1e-4  # largest share of delta for three losses above the cut
_MOST_MASS = 5e-4  # above the cut; it increases delta by about the same
_TILT = 50.0  # largest tilt, times epsilon: a larger one would hide losses about 0
_POINTS, _EVERY = 1536, 3  # grid points; every third one is used for sums of two
_ATTEMPTS, _CLOSE = 4, 0.9  # tries again while the bound falls below this ratio
_BELOW = 1 - 1e-9  # rounds a mass by quadrature down


def require_loss_distribution(pair: Pair) -> None:
    """Raise if a pair has only a Renyi curve."""
    if isinstance(pair, pairs.Concentrated):
        raise ArgumentError(
            "zero-concentrated differential privacy has no privacy loss distribution: use"
            " PrivacyAccountant(method='rdp'), or, if the release is a Gaussian, charge"
            " MuGaussianDpEvent(sqrt(2 * rho)), which costs less."
        )


def _has_no_guarantee(counts: Mapping[Pair, int]) -> bool:
    for pair in counts:
        require_loss_distribution(pair)
    return any(isinstance(pair, pairs.NonPrivate) for pair in counts)


def only_mu(levels: Mapping[Pair, int]) -> float | None:
    """mu of merged levels that are one Gaussian or empty; else ``None``."""
    only = next(iter(levels), pairs.Gaussian(0.0))
    return only.mu if len(levels) <= 1 and isinstance(only, pairs.Gaussian) else None


def _unsampled(counts: Mapping[Pair, int]) -> float:
    """mu of Gaussians that dominate ``counts``, without amplification."""
    squared = math.fsum(n * pairs.dominating_mu(pair) ** 2 for pair, n in counts.items())
    return math.sqrt(squared) * (1 + 1e-15)


# --- upper bounds ---------------------------------------------------------------------------------


def upper_epsilon(counts: Mapping[Pair, int], delta: float) -> float:
    """An upper bound on epsilon at ``delta``, for releases that were fixed in advance."""
    if _has_no_guarantee(counts):
        return math.inf
    return epsilon_of_all(counts, delta, _upper_epsilon)


def _upper_epsilon(counts: Mapping[Pair, int], delta: float) -> float:
    if advantage_sum(counts) <= delta:  # (0, delta)-privacy adds up
        return 0.0
    if sum(counts.values()) == 1:
        only = next(iter(counts))
        if isinstance(only, pairs.Sampled | pairs.Mixed):
            return sampled_epsilon(only, delta)
        if isinstance(only, pairs.Pure | pairs.BoundedRange):
            return bounded_epsilon(only, delta)
    levels = pairs.merge(counts)
    if (mu := only_mu(levels)) is None:
        try:
            return _worse(levels, delta=delta)
        except OverflowError:
            mu = _unsampled(levels)
    return gaussian_epsilon(mu, delta) if mu < math.inf else mu


def upper_delta(counts: Mapping[Pair, int], epsilon: float) -> float:
    """An upper bound on delta at ``epsilon``."""
    if _has_no_guarantee(counts):
        return 1.0
    return delta_of_all(counts, epsilon, _upper_delta)


def _upper_delta(counts: Mapping[Pair, int], epsilon: float) -> float:
    only = next(iter(counts))
    if isinstance(only, pairs.Sampled | pairs.Mixed) and sum(counts.values()) == 1:
        return min(1.0, sampled_delta(only, epsilon))
    levels = pairs.merge(counts)
    if (mu := only_mu(levels)) is None:
        try:
            return min(1.0, _worse(levels, epsilon=epsilon))
        except OverflowError:
            mu = _unsampled(levels)
    if mu == math.inf:
        return 1.0
    return max(0.0, min(1.0, gaussian_delta(mu, epsilon) * (1 + 1e-10)))


def _worse(levels: Mapping[Pair, int], **asked: Any) -> float:
    """Epsilon at ``delta``, or delta at ``epsilon``, in the worse direction. A rough bound often
    shows that the second direction is not worse.
    """
    delta: Any = asked.get("delta")
    epsilon: Any = asked.get("epsilon")
    # sampled releases are cut, also together with Gaussians, which are not
    cuts = all(isinstance(pair, pairs.Sampled | pairs.Gaussian) for pair in levels)

    def ask(reverse: bool, **options: Any) -> tuple[float, Composition]:
        given, turned = _of_added(levels) if reverse else (levels, False)
        found = compose(given, turned, **asked, **options)
        answer = found.upper_delta(epsilon) if delta is None else found.upper_epsilon(delta)
        return answer, found

    def by_cut(found: float, near: Near, reverse: bool) -> float:
        alone, mixed = levels, None
        if len(levels) > _MOST_CUT:
            sampled, others = pairs.scattered_of(levels)
            if (mixed := mixtures(sampled, near._replace(reverse=reverse))) is not None:
                alone = others
        with suppress(OverflowError):  # losses are too far apart: the bound stays loose
            if epsilon is None:
                return epsilon_by_cut(alone, delta, found, reverse, mixed)
            return delta_by_cut(alone, epsilon, found, reverse, mixed)
        return found

    worst, is_cut = math.nan, False
    near: Any = None
    rough = (_ROUGH,) if len(levels) <= pairs.EXACT_LEVELS else (_ROUGH, _ROUGH / 5)
    for reverse in pairs.directions(levels):
        if not math.isnan(worst):
            most = pairs.largest_added_sum(levels) * (1 + 1e-12)
            least = worst if epsilon is None else epsilon
            if least == 0 or most <= least:  # at 0 delta is the total variation: both have the same
                continue
            if is_cut and (found := by_cut(1.05 * worst, near, True)) < 1.05 * worst:
                worst = max(worst, found)
                continue
            if any(ask(reverse, accuracy=a, is_pilot=True)[0] <= worst for a in rough):
                continue
        (found, fine), is_cut = ask(reverse, is_pilot=cuts), False
        near = fine.window.near
        at = found if epsilon is None else epsilon
        excess = fine.excess_of_grid(at) if 0 < at < math.inf else 0.0
        if cuts and 0 < at < math.inf:
            coarse = fine.interval > _OF_EPSILON * at or fine.share_of_round_off(at) > _ROUND_OFF
            if coarse or (len(levels) > pairs.EXACT_LEVELS and excess > _OF_MANY):
                before, found = found, by_cut(found, near, reverse)
                is_cut = found < before
        if (
            cuts
            and not is_cut
            and fine.interval > fine.window.wanted_interval
            and excess > ACCURACY
        ):
            again, fine = ask(reverse, finest=fine.interval * ACCURACY / excess)
            found = min(found, again)
        grid_decides = delta is not None and not is_cut and 0 < found < math.inf
        if grid_decides:  # few large losses may have misled the choice of the grid
            most = _OF_MANY if len(levels) > pairs.EXACT_LEVELS else _OF_FEW
            if (excess := fine.excess_of_grid(found)) > most:
                fineness = min(math.sqrt(3 * excess / most), _FINEST)
                again, fine = ask(reverse, fineness=fineness)
                found = min(found, again)
        if grid_decides and found < fine.interval / _COARSE:
            with suppress(OverflowError):  # the window was chosen for a far larger epsilon
                found = _vanishing_epsilon(levels, delta, found, reverse)
        if math.isnan(found):
            return math.inf
        worst = found if math.isnan(worst) else max(worst, found)
    return worst


def _of_added(levels: Mapping[Pair, int]) -> tuple[Mapping[Pair, int], bool]:
    """The levels for an added record, and whether their pairs must still be reversed. With a few
    rare releases, losses far below 0 make the sum negative, and are set to a larger value.
    """
    most = pairs.largest_added_sum(levels) * (1 + 1e-12)
    sampled = {pair: n for pair, n in levels.items() if isinstance(pair, pairs.Sampled)}
    if not len(sampled) == len(levels) <= pairs.EXACT_LEVELS or most > _RARE:
        return levels, True
    return {pairs.Capped(pair, most, reverse=True): n for pair, n in sampled.items()}, False


def _vanishing_epsilon(
    levels: Mapping[Pair, int], delta: float, epsilon: float, reverse: bool
) -> float:
    """An upper bound on an epsilon far below most losses, by finer and finer grids; ``epsilon`` if
    none is smaller. The relative error is that of delta(0), divided by 1 - delta / delta(0).
    """
    fineness = 1.0
    for _ in range(_ATTEMPTS):
        near = compose(levels, reverse, epsilon=epsilon, fineness=fineness)
        before, epsilon = epsilon, min(epsilon, near.upper_epsilon(delta))
        small = 1 - delta / near.upper_delta(0.0)
        # the error is proportional to interval^2, and at most a quarter of its bound
        is_close = fineness > 1 and before - epsilon <= (_FINER**2 - 1) * _VANISHING * before
        if epsilon == 0 or is_close or of_grid(fineness) / 4 <= _VANISHING * small:
            break
        fineness *= _FINER
    return epsilon


# --- rare, large losses ---------------------------------------------------------------------------


@loss_nodes.register
def _(pair: pairs.Capped, tail: float, interval: float | None = None) -> Nodes:
    sampled, most = pair.pair, pair.most
    if pair.reverse:  # no loss of a reverse is above -log(1 - q)
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


def epsilon_by_cut(
    levels: Mapping[Pair, int],
    delta: float,
    epsilon: float,
    reverse: bool = False,
    mixed: Mixtures | None = None,
) -> float:
    """An upper bound on epsilon at ``delta`` if one is shown below ``epsilon``, else that."""
    for _ in range(_ATTEMPTS):
        bound = _cut(levels, delta, epsilon, reverse, mixed)
        if bound is None or not bound(epsilon) <= delta:  # so that NaN shows nothing
            break
        if bound(0.0) <= delta:
            return 0.0
        before, low = epsilon, 0.0
        while epsilon - low > 1e-6 * epsilon and epsilon > 1e-12 * before:
            middle = (low + epsilon) / 2
            low, epsilon = (low, middle) if bound(middle) <= delta else (middle, epsilon)
        if epsilon > _CLOSE * before:
            break
    return epsilon


def delta_by_cut(
    levels: Mapping[Pair, int],
    epsilon: float,
    delta: float,
    reverse: bool = False,
    mixed: Mixtures | None = None,
) -> float:
    """An upper bound on delta at ``epsilon`` if one is shown below ``delta``, else that."""
    for _ in range(_ATTEMPTS):
        if (bound := _cut(levels, delta, epsilon, reverse, mixed)) is None:
            break
        before, delta = delta, min(delta, bound(epsilon))
        if delta > _CLOSE * before:
            break
    return delta


def _cut(
    alone: Mapping[Pair, int], delta: float, epsilon: float, reverse: bool, mixed: Mixtures | None
) -> Callable[[float], float] | None:
    """An upper bound on delta at each epsilon, tight near these two; ``None`` if no cut fits."""
    levels: dict[Pair, Any] = dict(alone)
    if mixed is not None:  # each release is a mixture of corners, and has one loss
        for corner, share in zip(mixed.corners, mixed.shares.tolist(), strict=True):
            levels[corner] = levels.get(corner, 0) + share * mixed.total
    total: Any = sum(levels.values())
    tail, cut, three = tail_of(delta, total), _CUT * epsilon, math.inf
    mass = math.inf
    # a reverse is completely in the core; a pair that is its own reverse has the same large losses
    cuttable = {p: n for p, n in levels.items() if not (reverse and pairs.has_two_directions(p))}
    while three > _THREE * delta or mass > _MOST_MASS:
        if cut > _LARGEST_CUT * epsilon:
            return None
        most, above = cut, _above(cuttable, cut, tail, mixed is not None)
        mass, cut = math.fsum(mass for *_, mass, _ in above), 1.5 * cut
        three = mass**3 / 6 * math.exp(min(mass, 1.0))

    def capped(pair: Pair) -> Pair:
        turned = reverse and pairs.has_two_directions(pair)
        return pairs.Capped(pair, most, turned) if isinstance(pair, pairs.Sampled) else pair

    core = {capped(pair): count for pair, count in levels.items()}
    # far below most losses epsilon asks for more digits of delta
    fineness = _FINER if most > _FAR * epsilon and len(core) <= pairs.EXACT_LEVELS else 1.0
    window = choose_window(
        core, False, tail, epsilon=epsilon, largest_tilt=_TILT / epsilon, fineness=fineness
    )
    given: Mixtures | bool = mixed is not None
    if mixed is not None:
        core = {capped(pair): count for pair, count in alone.items()}
        given = mixed._replace(corners=[capped(corner) for corner in mixed.corners])
    composed = Composition(window, core, False, tail, given)
    if composed.above > _THREE * delta:  # mass above the window counts at every epsilon
        further = math.log(composed.above / (_THREE * delta)) / window.upper_tilt
        window = window._replace(upper=window.upper + further)
        composed = Composition(window, core, False, tail, given)
    of_core = composed.profile()
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
    lost = three + tail * total

    def bound(at: float) -> float:
        found = of_core(np.append(at - points, at))
        return float(rare @ found[:-1] + found[-1]) * (1 + 1e-12) + lost

    return bound


def _above(
    levels: Mapping[Pair, float], cut: float, tail: float, together: bool
) -> list[tuple[pairs.Sampled, float, float, float, float]]:
    """For each sampled release: the pair, log(b / a), the factor count / a, the mass beyond the cut
    times this factor, and the largest loss. ``together``: all get the largest log(b / a) and 1 / a,
    as releases are mixtures of these.
    """
    found: list[Any] = []
    for pair, count in levels.items():
        if isinstance(pair, pairs.Sampled):
            losses, masses, _ = sampled_nodes(pair, tail, least=cut)
            losses, masses = losses[losses > 0], masses[losses > 0]  # not the mirrored ones
            above = float(masses.sum()) / _BELOW + tail
            if above > 0.5:
                return [(pair, 0.0, 0.0, math.inf, cut)]  # the cut is too low
            shift = math.log1p(-float(masses @ np.exp(-losses)) * _BELOW) - math.log1p(-above)
            found.append((pair, count, above, above, shift, float(losses.max(initial=cut))))
    if together and found:
        highest, furthest = (max(row[i] for row in found) for i in (2, 4))
        found = [(pair, n, highest, own, furthest, most) for pair, n, _, own, _, most in found]
    return [
        (pair, shift, n / (1 - above) / _BELOW, n * own / (1 - above) / _BELOW, most + 2 * shift)
        for pair, n, above, own, shift, most in found
    ]


def _split(losses: Array, masses: Array, points: Array) -> Array:
    """Split masses between neighbouring points; the sums under P and under Q stay the same."""
    cell = np.clip(np.searchsorted(points, losses, "right") - 1, 0, len(points) - 2)
    low, high = points[cell], points[cell + 1]
    up = masses * np.clip(np.expm1(low - losses) / np.expm1(low - high), 0.0, 1.0)
    found = np.bincount(cell, masses - up, len(points)) + np.bincount(cell + 1, up, len(points))
    return np.asarray(found, dtype=np.float64)


# --- lower bounds ---------------------------------------------------------------------------------


def lower_epsilon(counts: Mapping[Pair, int], delta: float) -> float:
    """A lower bound on any epsilon that follows from the events alone."""
    if _has_no_guarantee(counts):
        return math.inf
    failures, others = apart(counts)
    if failures:
        failed = failing(failures, upper=False)
        if failed > delta:
            return math.inf
        delta = max((delta - failed) / (1 - failed) * (1 + 1e-15), SMALLEST_DELTA)
    # leave out releases whose pair is only a bound: this only lowers the result
    known: dict[Pair, int] = {}
    for pair, count in others.items():
        if not isinstance(pair, pairs.BoundedRange | pairs.Allocated | pairs.Mixed):
            if isinstance(pair, pairs.Sampled) and pair.kind == "symmetric":
                pair = pairs.Sampled("directed", pair.rate, pair.noise)
            known[pair] = known.get(pair, 0) + count
    levels = pairs.grouped(pairs.merge(known), _LOWER_RATIO, upper=False)
    if (mu := only_mu(levels)) is not None:
        return gaussian_epsilon(mu, delta) * (1 - 1e-9)
    number = len(levels)
    accuracy = ACCURACY / (100 if number <= 4 else 10 if number <= pairs.EXACT_LEVELS else 3)
    try:
        # both directions are lower bounds: take the worse one by a rough composition
        rough = [compose(levels, r, delta=delta, accuracy=_ROUGH) for r in pairs.directions(levels)]
        reverse = max(rough, key=lambda c: c.upper_epsilon(delta)).reverse
        fine = compose(levels, reverse, delta=delta, accuracy=accuracy, mixed=False)
        return fine.lower_epsilon(delta)
    except OverflowError:
        return 0.0


def largest(excess: Callable[[int], float], *, start: int = 1) -> int:
    """The largest whole n from 1 to ``2 * MOST_STEPS`` at which the increasing function is at most
    0, or 0 if none is. ``start`` is a guess.
    """

    @cache
    def value(n: int) -> float:
        return min(excess(n), LARGEST_EXCESS) or -math.ulp(0.0)  # 0 counts as below

    low = high = max(start, 1)
    while value(low) > 0:
        if low == 1:
            return 0
        low, high = max(1, low // 2), low
    while value(high) <= 0:
        if high >= MOST_STEPS:
            return high
        low, high = high, 2 * high
    if high - low > 1:
        low = math.floor(
            optimize.brentq(lambda x: value(math.floor(x)), low, high, xtol=0.5, rtol=1e-15)
        )
    return low if value(low) <= 0 else low - 1
