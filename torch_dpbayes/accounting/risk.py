"""Bounds on what an attacker can learn about a user: the meaning of epsilon.

The attacker knows everything except whether the user is in the data (under replace-one: which of
two records the user has), sees all releases, and decides. All bounds follow from the trade-off
curve: the largest true-positive rate of an attack at each false-positive rate.

*From privacy profiles.* Let P(S) <= e^epsilon Q(S) + delta for every S. Then a test that rejects Q
on S has a true-positive rate P(S) of at most e^epsilon times its false-positive rate Q(S), plus
delta. With P and Q exchanged, the same for the complement of S gives
P(S) <= 1 - e^-epsilon (1 - Q(S) - delta'). The curve is the lower envelope of such lines. Fewer
lines give a higher curve, which is still a bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import special

from . import renyi
from .bounds import only_mu
from .dominating_pairs import Array, NonPrivate, Pair, directions, largest_added_sum, merge
from .events import Method
from .fft_composition import compose
from .gdp import gaussian_delta, gaussian_epsilon
from .privacy_loss import apart, failing, largest_sum, loss_nodes

if TYPE_CHECKING:
    from .history import History

_ROUND_OFF = 1e-12  # a generous bound on the relative error of numbers computed from a curve
_PROFILE_ROUND_OFF = 1e-10  # relative error of closed forms
_LARGEST_LOSS = 700.0  # exp() of larger numbers overflows
_LARGEST_EXPONENT = 600.0
_LEAST_SLACK = 1e-9  # smallest delta for mu
_POINTS = 700  # evenly spaced epsilons of a profile; as many more are dense near 0
SMALLEST = 1e-36  # a profile reaches to the epsilon of this delta
# compositions are tuned for these values of delta, and for the advantage
_DELTAS = (1e-3, 1e-8, 1e-16, 1e-30)
_MOST_LOSSES = 2**18  # grid points for one release

# --- trade-off curves -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Profile:
    """``deltas[i]`` bounds the hockey-stick divergence of P from Q at ``epsilons[i]`` >= 0."""

    epsilons: Array
    deltas: Array

    def ending(self, largest: float) -> Profile:
        """This profile, if the loss is never above ``largest``."""
        if largest == math.inf:
            return self
        return Profile(np.append(self.epsilons, largest), np.append(self.deltas, 0.0))


@dataclass(frozen=True)
class TradeOff:
    """A concave, piecewise linear upper bound on the trade-off curve, with the vertices
    ``(false_positive_rates[i], true_positive_rates[i])``, from rate 0 to rate 1.
    """

    false_positive_rates: Array
    true_positive_rates: Array

    @classmethod
    def of_profiles(cls, forward: Profile, backward: Profile) -> TradeOff:
        """The curve of tests of Q against P, from the profiles of (P, Q) and of (Q, P)."""
        near = forward.epsilons <= _LARGEST_LOSS
        back = backward.epsilons <= _LARGEST_LOSS
        small = np.exp(-backward.epsilons[back])
        # rounded up: the exponential of a tiny loss could be rounded to 1
        steep = np.nextafter(np.exp(forward.epsilons[near]), np.inf)
        slopes = np.concatenate([steep, small, [0.0]])
        forwards = np.clip(forward.deltas[near], 0.0, 1.0)
        backwards = -np.expm1(-backward.epsilons[back])
        backwards += small * np.clip(backward.deltas[back], 0.0, 1.0)
        intercepts = np.concatenate([forwards, backwards, [1.0]])
        order = np.lexsort((intercepts, -slopes))
        return cls(*_envelope(slopes[order].tolist(), intercepts[order].tolist()))

    @property
    def vertices(self) -> tuple[Array, Array]:
        """The false-positive and the true-positive rates of the vertices."""
        return self.false_positive_rates, self.true_positive_rates

    def __call__(self, false_positive_rate: Array | float) -> Array:
        """Upper bounds on the true-positive rate, at false-positive rates in [0, 1]."""
        found = np.interp(false_positive_rate, self.false_positive_rates, self.true_positive_rates)
        return np.minimum(found * (1 + _ROUND_OFF), 1.0)

    @property
    def advantage(self) -> float:
        """The largest difference of true-positive and false-positive rate."""
        return float(np.clip(np.max(self.true_positive_rates - self.false_positive_rates), 0, 1))

    def best_guess(self, prior: float) -> float:
        """The probability that the best attack is right, if P has probability ``prior``."""
        right = prior * self.true_positive_rates + (1 - prior) * (1 - self.false_positive_rates)
        return float(min(np.max(right) * (1 + _ROUND_OFF), 1.0))

    def mu(self, slack: float) -> float:
        """The least mu of a Gaussian whose curve, raised by ``slack``, is above this curve."""
        slack = max(slack, _LEAST_SLACK)
        above = self.true_positive_rates > slack
        rates, powers = self.false_positive_rates[above], self.true_positive_rates[above] - slack
        if not len(rates) or rates[0] <= 0:
            return math.inf if len(rates) else 0.0
        # checking the vertices suffices: between them this curve is linear, the Gaussian's concave
        with np.errstate(invalid="ignore"):
            mus = special.ndtri(powers) - special.ndtri(rates)
        return max(float(np.nanmax(mus)) * (1 + 1e-9), 0.0)


def _envelope(slopes: list[float], intercepts: list[float]) -> tuple[Array, Array]:
    """Vertices of the minimum of lines on [0, 1]. The lines are sorted by falling slope."""
    kept: list[int] = []

    def meet(first: int, second: int) -> float:
        fall = slopes[first] - slopes[second]
        return (intercepts[second] - intercepts[first]) / fall if fall > 0 else 0.0

    for i in range(len(slopes)):
        if kept and intercepts[i] <= intercepts[kept[-1]]:
            # this line is nowhere above earlier lines with a higher intercept
            while kept and intercepts[i] <= intercepts[kept[-1]]:
                kept.pop()
        elif kept and slopes[i] == slopes[kept[-1]]:
            continue
        while len(kept) > 1 and meet(kept[-1], i) <= meet(kept[-2], kept[-1]):
            kept.pop()
        kept.append(i)
    rates, powers = [0.0], [intercepts[kept[0]]]
    for first, second in pairwise(kept):
        rate = meet(first, second)
        if rate >= 1.0:
            break
        rates.append(rate)
        # the larger value, so that between two vertices the curve is not below the line
        at = (intercepts[i] + slopes[i] * rate for i in (first, second))
        powers.append(max(at) * (1 + _ROUND_OFF))
    return np.array([*rates, 1.0]), np.minimum([*powers, 1.0], 1.0)


def trade_offs(forward: Profile, backward: Profile) -> tuple[TradeOff, ...]:
    """The curves of two attacks: one accuses "with the record", the other one "without"."""
    there = TradeOff.of_profiles(forward, backward)
    return (there,) if forward is backward else (there, TradeOff.of_profiles(backward, forward))


def highest(curves: tuple[TradeOff, ...], false_positive_rates: Array) -> Array:
    """The largest true-positive rates over the curves."""
    return np.asarray(np.max([curve(false_positive_rates) for curve in curves], axis=0))


# --- privacy profiles -----------------------------------------------------------------------------


def points(largest: float, number: int = _POINTS) -> Array:
    """Epsilons from 0 to ``largest``."""
    share = np.linspace(0.0, 1.0, number)
    return max(largest, 1e-12) * np.union1d(share, share**3)


def of_function(delta: Callable[[float], float], largest: float) -> Profile:
    """The profile of a function from epsilon to delta."""
    at = points(min(largest, _LARGEST_LOSS))
    return Profile(at, np.array([delta(epsilon) for epsilon in at.tolist()]))


def _certain() -> Profile:
    """The profile of a release that reveals everything."""
    return Profile(np.zeros(1), np.ones(1))


@lru_cache(maxsize=16)
def profiles(counts: frozenset[tuple[Pair, int]], method: Method) -> tuple[Profile, Profile]:
    """Bounds on the hockey-stick divergences of a composition that was fixed in advance: of (P, Q)
    for a removed record, and of (Q, P).
    """
    failures, others = apart(dict(counts))
    if NonPrivate() in others:
        return (_certain(),) * 2
    failed = failing(failures)
    found = (Profile(np.zeros(1), np.zeros(1)),) * 2
    if others and method == "rdp":
        curve = renyi.curve(others)
        profile = of_function(lambda e: renyi.delta(curve, e), renyi.epsilon(curve, SMALLEST))
        found = (profile.ending(largest_sum(others)),) * 2
    elif others:
        found = _profiles(others)
    forward, backward = (
        Profile(
            p.epsilons, np.minimum(failed + (1 - failed) * p.deltas * (1 + _PROFILE_ROUND_OFF), 1.0)
        )
        for p in found
    )
    return (forward, forward) if found[0] is found[1] else (forward, backward)


def _profiles(counts: Mapping[Pair, int]) -> tuple[Profile, Profile]:
    largest, both = largest_sum(counts), directions(counts)
    added = largest_added_sum(counts) * (1 + 1e-15)
    levels = merge(counts)
    if (mu := only_mu(levels)) is not None:
        at = points(gaussian_epsilon(mu, 1e-100), 5 * _POINTS)
        deltas = [gaussian_delta(mu, e) * (1 + _PROFILE_ROUND_OFF) for e in at.tolist()]
        found = [Profile(at, np.clip(deltas, 0.0, 1.0))]
    else:
        try:
            found = [_composed(levels, reverse) for reverse in both]
        except OverflowError:
            return (_certain().ending(largest),) * 2
    found = [
        p.ending(added if reverse else largest) for p, reverse in zip(found, both, strict=True)
    ]
    return found[0], found[-1]


def _composed(levels: Mapping[Pair, int], reverse: bool) -> Profile:
    """A composition is accurate only near the delta for which its tilt was chosen. So at each
    epsilon this takes the smallest bound of several compositions.
    """
    finest = max(float(np.ptp(loss_nodes(pair, 1e-20).losses)) for pair in levels) / _MOST_LOSSES
    options: dict[str, Any] = {"is_pilot": True, "finest": finest}
    found = [compose(levels, reverse, delta=delta, **options) for delta in _DELTAS]
    found.append(compose(levels, reverse, epsilon=0.0, **options))
    # for very small losses the bounds may stay above the smallest delta: then take a larger one
    ends = (
        min(composition.upper_epsilon(target) for composition in found)
        for target in (SMALLEST, *reversed(_DELTAS))
    )
    at = points(next(filter(math.isfinite, ends), _LARGEST_LOSS))
    return Profile(at, np.min([composition.profile()(at) for composition in found], axis=0))


# --- the risk of a history ------------------------------------------------------------------------


@dataclass(frozen=True)
class Risk:
    """Upper bounds on what an attacker learns about one record, or one user; ``print`` it.

    An attack accuses "with" (the record is in the data) or "without" (it is not; under replace-one
    the data contain another record instead). Every number holds for both.

    Attributes:
        advantage: the largest difference of true- and false-positive rate: delta at epsilon = 0.
        false_positive_rate: the probability of a wrong accusation, as passed.
        true_positive_rate: an upper bound on the probability of a right accusation.
        prior: the attacker's probability before the release, as passed.
        posterior: the largest probability that an accusation by this attack is right.
        posterior_odds: the posterior as odds.
        best_guess: the probability that the best decision for this prior is right; without any
            release it is ``max(prior, 1 - prior)``.
        epsilon: the epsilon at ``delta``.
        delta: the delta of ``epsilon`` and ``gdp_mu``.
        gdp_mu: mu of Gaussian differential privacy, up to ``delta`` (at least 1e-9): every
            true-positive rate is at most ``delta`` above that for a Gaussian of mean ``mu``.
        neighboring: the relation.
        curves: the trade-off curves of both attacks, for all false-positive rates.
    """

    advantage: float
    false_positive_rate: float
    true_positive_rate: float
    prior: float
    posterior: float
    posterior_odds: float
    best_guess: float
    epsilon: float
    delta: float
    gdp_mu: float
    neighboring: str
    unit: str
    curves: tuple[TradeOff, ...]

    def true_positive_rates(self, false_positive_rates: Any) -> Array:
        """The larger true-positive rate of the two attacks, at each false-positive rate."""
        return highest(self.curves, np.asarray(false_positive_rates, dtype=np.float64))

    def as_dict(self) -> dict[str, Any]:
        """The numbers in a form for JSON; infinite ones are ``None``."""
        return {
            name: None if isinstance(value, float) and math.isinf(value) else value
            for name, value in vars(self).items()
            if name != "curves"
        }

    def __str__(self) -> str:
        is_swap = self.neighboring == "replace_one"
        which = f"Which of two {self.unit}s" if is_swap else f"Whether a {self.unit}"
        return "\n".join(
            [
                f"{which} is in the data: upper bounds for an attacker who knows everything else",
                f"  advantage   {self.advantage:.4g} (0 is guessing, 1 is certainty)",
                f"  detection   {self.true_positive_rate:.4g} of the {self.unit}s in the data, at"
                f" a false-positive rate of {self.false_positive_rate:g}",
                f"  posterior   {self.posterior:.4g} for an accused {self.unit}, from a prior of"
                f" {self.prior:g} (odds {self.posterior_odds:.4g})",
                f"  best guess  right with probability {self.best_guess:.4g}; without any release"
                f" {max(self.prior, 1 - self.prior):.4g}",
                f"  the same as epsilon = {self.epsilon:.5g}, or mu = {self.gdp_mu:.4g} (Gaussian),"
                f" at delta = {self.delta:g}",
            ]
        )


def assess(history: History, *, prior: float, false_positive_rate: float, delta: float) -> Risk:
    """The risk of a history."""
    curves = curves_of(history)
    rate = float(highest(curves, np.array([false_positive_rate]))[0])
    accused = prior * rate + (1 - prior) * false_positive_rate
    return Risk(
        advantage=max(curve.advantage for curve in curves),
        false_positive_rate=false_positive_rate,
        true_positive_rate=rate,
        prior=prior,
        posterior=prior * rate / accused,
        posterior_odds=prior / (1 - prior) * rate / false_positive_rate,
        best_guess=max(curve.best_guess(prior) for curve in curves),
        epsilon=history.epsilon(delta),
        delta=delta,
        gdp_mu=max(curve.mu(delta) for curve in curves),
        neighboring=history.settings.neighboring,
        unit=history.settings.unit,
        curves=curves,
    )


def curves_of(history: History) -> tuple[TradeOff, ...]:
    """The trade-off curves of a history, under its guarantee."""
    if not history.counts:
        return trade_offs(*profiles(frozenset(), "pld"))
    if history.guarantee == "none":
        return trade_offs(_certain(), _certain())
    if history.guarantee == "filter" and history.filter is not None:
        limit = history.filter
        profile = of_function(limit.delta, limit.epsilon(SMALLEST))
        return trade_offs(profile, profile)
    return trade_offs(*profiles(frozenset(history.counts.items()), history.settings.method))
