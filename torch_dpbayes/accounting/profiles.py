"""The privacy profile of a composition at many epsilons at once, in each direction.

A composition on a tilted grid is accurate near the delta for which its tilt was chosen. Here a few
are made, from the advantage down to the smallest delta that counts, and the smallest of their
bounds is taken at each epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache

import numpy as np

from . import renyi
from .bounded import RandomizedResponses, largest_sum
from .bounds import without_extremes
from .choices import Method
from .composition import Composition, choose_window, compose, tail_of
from .failures import apart, failing
from .gaussian import gaussian_delta, gaussian_epsilon
from .levels import EXACT_LEVELS, directions, merge, only_mu
from .loss_grid import loss_nodes
from .pairs import Array, GaussianMixture, NonPrivate, Pair
from .trade_off import LARGEST_LOSS, Profile, TradeOff

_POINTS = 700  # evenly spaced, and as many towards 0
_DELTAS = (1e-3, 1e-8, 1e-16, 1e-30)  # that compositions are tuned for, beside the advantage
SMALLEST = 1e-36  # delta up to which the points reach
_ACCURACY = 5e-4  # relative excess of epsilon that discretisation aims at
_OF_ADVANTAGE = 2e-5  # of the advantage
_REFINED = 3  # times at most, until that is met
_ROUGH_ACCURACY = 1e-3  # the same of many different levels
_MOST_LOSSES = 2**18  # on the grid, of one release, for the advantage
_MOST_BEYOND = 2**15  # the same for larger losses
_MOST_OF_MIXTURES = 2**15  # whose losses have no inverse in closed form
_ROUND_OFF = 1e-10  # relative, of closed forms


def points(largest: float, number: int = _POINTS) -> Array:
    """Epsilons from 0 to ``largest``."""
    share = np.linspace(0.0, 1.0, number)
    return max(largest, 1e-12) * np.union1d(share, share**3)


def certain() -> Profile:
    """The profile of what reveals everything."""
    return Profile(np.zeros(1), np.ones(1))


@lru_cache(maxsize=16)
def profiles(counts: frozenset[tuple[Pair, int]], method: Method) -> tuple[Profile, Profile]:
    """Bounds on the hockey-stick divergences of a composition whose parameters were fixed in
    advance: of (P, Q), where a record was removed, and of (Q, P).
    """
    failures, others = apart(dict(counts))
    if NonPrivate() in others:
        return (certain(),) * 2
    failed = failing(failures)
    found = (Profile(np.zeros(1), np.zeros(1)),) * 2
    if others and method == "rdp":
        found = (_of_curve(renyi.curve(others), largest_sum(others)),) * 2
    elif others:
        found = _profiles(others)
    forward, backward = (
        Profile(p.epsilons, np.minimum(failed + (1 - failed) * p.deltas * (1 + _ROUND_OFF), 1.0))
        for p in found
    )
    return (forward, forward) if found[0] is found[1] else (forward, backward)


def of_function(delta: Callable[[float], float], largest: float) -> Profile:
    """The profile of which ``delta`` is known at every epsilon."""
    at = points(min(largest, LARGEST_LOSS))
    return Profile(at, np.array([delta(epsilon) for epsilon in at.tolist()]))


def _of_curve(curve: Array, largest: float) -> Profile:
    profile = of_function(
        lambda epsilon: renyi.delta(curve, epsilon), renyi.epsilon(curve, SMALLEST)
    )
    return profile.ending(largest)


def _profiles(counts: Mapping[Pair, int]) -> tuple[Profile, Profile]:
    largest = largest_sum(counts)
    if (exact := RandomizedResponses.of(counts)) is not None:
        return (of_function(exact.delta, largest).ending(largest),) * 2
    near, far = without_extremes(counts)
    levels = merge(near)
    if not levels:
        return (certain().ending(far),) * 2
    if (mu := only_mu(levels)) is not None:
        at = points(gaussian_epsilon(mu, 1e-100), 5 * _POINTS)
        deltas = [gaussian_delta(mu, epsilon) * (1 + _ROUND_OFF) for epsilon in at.tolist()]
        found = [Profile(at, np.clip(deltas, 0.0, 1.0))]
    else:
        try:
            found = [_composed(levels, reverse) for reverse in directions(levels)]
        except OverflowError:
            return (certain().ending(largest),) * 2
    found = [
        Profile(profile.epsilons + far * (1 + 1e-15), profile.deltas).ending(largest)
        for profile in found
    ]
    return found[0], found[-1]


def _composed(levels: Mapping[Pair, int], reverse: bool) -> Profile:
    few = len(levels) <= EXACT_LEVELS
    accuracy = _ACCURACY if few else _ROUGH_ACCURACY
    mixed = any(isinstance(pair, GaussianMixture) for pair in levels)
    most = _MOST_OF_MIXTURES if mixed else _MOST_LOSSES
    least = max(map(_spread, levels)) / most if few else 0.0
    tail = tail_of(SMALLEST, sum(levels.values()))
    found = []
    for target in _DELTAS:
        window = choose_window(levels, reverse, tail, accuracy=accuracy, log_delta=math.log(target))
        interval = max(window.interval, least * most / min(most, _MOST_BEYOND))
        found += compose(levels, delta=target, interval=interval, reverse=reverse)
    window = choose_window(levels, reverse, tail, accuracy=accuracy, epsilon=0.0)
    finest, last = max(window.interval, least), found[0]
    for _ in range(_REFINED if few else 1):
        interval = max(finest, min(_interval_for_advantage(last), last.interval)) if few else finest
        if last is not found[0] and last.interval <= 1.5 * interval:
            break
        (last,) = compose(levels, epsilon=0.0, interval=interval, reverse=reverse)
        found.append(last)
    # of very small losses the bounds do not reach the smallest delta: then to one that they reach
    ends = (
        min(composition.upper_epsilon(delta) for composition in found)
        for delta in (SMALLEST, *reversed(_DELTAS))
    )
    at = points(next(filter(math.isfinite, ends), LARGEST_LOSS))
    return Profile(at, np.min([composition.upper_deltas(at) for composition in found], axis=0))


def _interval_for_advantage(composition: Composition) -> float:
    """The grid on which rounding, of variance h^2 / 6 for each release, adds little to delta at 0:
    half of that variance times the density of the losses there.
    """
    near = np.abs(composition.losses) <= 10 * composition.interval
    scale = composition.log_scale - composition.window.tilt * composition.losses[near]
    mass = float(np.sum(np.maximum(composition.tilted[near], 0.0) * np.exp(scale)))
    density = mass / (21 * composition.interval)
    if not density > 0:
        return 0.0
    variance = 2 * _OF_ADVANTAGE * composition.upper_delta(0.0) / density
    return math.sqrt(6 * variance / composition.transform.count)


def _spread(pair: Pair) -> float:
    return float(np.ptp(loss_nodes(pair, 1e-20).losses))


def trade_offs(forward: Profile, backward: Profile) -> tuple[TradeOff, ...]:
    """The curves of the attack that has to reject "without the record", and "with" it; one, where
    they are the same.
    """
    there = TradeOff.of_profiles(forward, backward)
    return (there,) if forward is backward else (there, TradeOff.of_profiles(backward, forward))
