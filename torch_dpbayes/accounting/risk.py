"""What epsilon means to a person: what an attacker can tell at most.

The attacker knows everything but whether the person took part (under replace-one: which of two
records was theirs), sees all that was released, and decides. Everything here is read off the
trade-off curve between the two errors of that decision, which the composed privacy losses bound
from both sides.

People with several records.

*A path of neighbours.* Data sets that differ in k records are the ends of k steps between
neighbours. If T(a) bounds the true-positive rate between neighbours at false-positive rate a, then
T(T(...T(a))), k times, bounds it between the ends (Dong, Roth, Su 2022, Theorem 2.14). That holds
for everything that was charged, under every guarantee, and is exact for Gaussians.

*Sampled sums.* Under add-or-remove-one, each of k records of a person joins a Poisson batch by
itself: the pair (sum over j of Binomial(k, q)(j) N(j, z^2), N(0, z^2)) dominates one release, and
is tight (Ganesh 2024). Where all releases are such sums, or Gaussian ones (whose mu counts k
times), these pairs are composed too, and the smaller bound counts. What is known of a release by a
pair only, such as a failure beside a pure loss, is not: the parts of a pair do not stand for
releases of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import numpy as np
from scipy import stats

from . import profiles, renyi
from .events import GaussianDpEvent, MuGaussianDpEvent, PoissonSampledDpEvent
from .failures import apart
from .history import History
from .levels import EXACT_LEVELS
from .pairs import (
    Array,
    Concentrated,
    Gaussian,
    GaussianMixture,
    Pair,
    Repeated,
    Sampled,
    dominating_mu,
    largest_loss,
)
from .trade_off import TradeOff

_SMALL_ORDERS = (1.001, 1.01, 1.03, 1.06)  # before those of the Renyi curves
_NO_DEARER = 1.02  # what holds at all orders is preferred up to this factor


@dataclass(frozen=True)
class Risk:
    """Upper bounds on what an attacker learns about one person; ``print`` it.

    "With" means that the person took part, "without" that not; under replace-one they are the
    person's record and any other in its place. Every number holds for whichever of the two the
    attacker accuses somebody of, and is rounded up.

    Attributes:
        advantage: the largest difference of true- and false-positive rate, which is delta at
            epsilon = 0. Guessing has 0.
        false_positive_rate: how often the attack accuses somebody wrongly; as it was asked for.
        true_positive_rate: how often it then accuses somebody rightly, at most.
        prior: the attacker's probability before; as it was asked for.
        posterior: the probability at most that an accusation by the attack above is right.
        posterior_odds: the same as odds, the prior's odds times ``true_positive_rate /
            false_positive_rate``.
        best_guess: the probability at most that the best decision for this prior is right; without
            what was released it is ``max(prior, 1 - prior)``.
        epsilon: at ``delta``.
        delta: what ``epsilon`` and ``gdp_mu`` are stated with.
        gdp_mu: mu-Gaussian differential privacy (Dong, Roth, Su 2022), up to ``delta``: no
            true-positive rate is more than ``delta`` above that against a Gaussian of mean ``mu``.
            Without ``delta`` sampling would not show in it. A ``delta`` below 1e-9 counts as 1e-9.
        zcdp_rho: the Renyi divergence of each order a < ``zcdp_order`` is at most ``zcdp_rho *
            a``: zero-concentrated differential privacy if the order is infinite (Bun, Steinke
            2016), else its truncated form (Bun, Dwork, Rothblum, Steinke 2018), which alone shows
            what sampling gains.
        zcdp_order: see ``zcdp_rho``.
        records_per_person: how many records a person has at most.
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
    zcdp_rho: float
    zcdp_order: float
    records_per_person: int
    neighboring: str
    curves: tuple[TradeOff, ...]

    def true_positive_rates(self, false_positive_rates: Any) -> Array:
        """The largest true-positive rates of either attack at these false-positive rates."""
        return highest(self.curves, np.asarray(false_positive_rates, dtype=np.float64))

    def as_dict(self) -> dict[str, Any]:
        """The numbers, as JSON can hold them; infinite ones as ``None``."""
        return {
            name: None if isinstance(value, float) and math.isinf(value) else value
            for name, value in vars(self).items()
            if name != "curves"
        }

    def __str__(self) -> str:
        who = "a person"
        if self.records_per_person > 1:
            who += f" with at most {self.records_per_person} records"
        what = (
            "took part" if self.neighboring == "add_or_remove_one" else "gave one record or another"
        )
        order = "" if math.isinf(self.zcdp_order) else f" up to order {self.zcdp_order:.4g}"
        return "\n".join(
            [
                f"Whether {who} {what}: what an attacker who knows all else can tell, at most",
                f"  advantage   {self.advantage:.4g} (0 is guessing, 1 is certainty)",
                f"  detection   {self.true_positive_rate:.4g} of those who did, at a"
                f" false-positive rate of {self.false_positive_rate:g}",
                f"  posterior   {self.posterior:.4g} for an accused person, from a prior of"
                f" {self.prior:g} (odds {self.posterior_odds:.4g})",
                f"  best guess  right with probability {self.best_guess:.4g}; without any release"
                f" {max(self.prior, 1 - self.prior):.4g}",
                f"  the same as epsilon = {self.epsilon:.5g}, or mu = {self.gdp_mu:.4g} (Gaussian),"
                f" at delta = {self.delta:g}; rho = {self.zcdp_rho:.4g} (zero-concentrated{order})",
            ]
        )


def assess(
    history: History,
    *,
    prior: float,
    false_positive_rate: float,
    delta: float,
    records_per_person: int,
    epsilon: float,
) -> Risk:
    """The risk of a history; ``epsilon`` is that of one record at ``delta``."""
    curves = curves_of(history)
    rho, order = concentration(history, delta)
    if records_per_person > 1:
        curves = curves_of_people(history, curves, records_per_person, delta)
        epsilon = max(curve.epsilon(delta) for curve in curves)
        rho, order = concentration_of_people(rho, order, records_per_person)
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
        epsilon=epsilon,
        delta=delta,
        gdp_mu=max(curve.mu(delta) for curve in curves),
        zcdp_rho=rho,
        zcdp_order=order,
        records_per_person=records_per_person,
        neighboring=history.settings.neighboring,
        curves=curves,
    )


def highest(curves: tuple[TradeOff, ...], false_positive_rates: Array) -> Array:
    """The largest true-positive rates over the curves."""
    return np.asarray(np.max([curve(false_positive_rates) for curve in curves], axis=0))


def curves_of(history: History) -> tuple[TradeOff, ...]:
    """The trade-off curves of a history, under the guarantee that it has."""
    if not history.counts:
        return profiles.trade_offs(*profiles.profiles(frozenset(), "pld"))
    if history.guarantee == "none":
        return profiles.trade_offs(*(profiles.certain(),) * 2)
    if history.guarantee == "filter" and history.filter is not None:
        limit = history.filter
        profile = profiles.of_function(limit.delta, limit.epsilon(profiles.SMALLEST))
        return profiles.trade_offs(profile, profile)
    found = profiles.profiles(frozenset(history.counts.items()), history.settings.method)
    return profiles.trade_offs(*found)


@singledispatch
def concentrated(pair: Pair) -> float:
    """A rho for which ``pair`` is rho-zero-concentrated at all orders."""
    return min(dominating_mu(pair), largest_loss(pair)) ** 2 / 2


@concentrated.register
def _(pair: Concentrated) -> float:
    return pair.rho + pair.xi  # xi <= xi * order


@concentrated.register
def _(pair: Repeated) -> float:
    return math.inf


def concentration(history: History, delta: float) -> tuple[float, float]:
    """``zcdp_rho`` and ``zcdp_order`` of :class:`Risk`.

    The order is infinite where that is at most 2 percent dearer; else it is the one that decides
    epsilon at ``delta``.
    """
    if not history.counts:
        return 0.0, math.inf
    if history.guarantee == "none":
        return math.inf, math.inf
    if history.guarantee == "filter" and history.filter is not None:
        limit = history.filter
        gaussian = limit.kind == "gaussian"
        return (limit.limit / 2, math.inf) if gaussian else (limit.limit, limit.order)
    failures, others = apart(history.counts)
    if failures:
        return math.inf, math.inf
    return _concentration(others, delta)


def _concentration(counts: Mapping[Pair, int], delta: float) -> tuple[float, float]:
    strict = math.fsum(count * concentrated(pair) for pair, count in counts.items()) * (1 + 1e-12)
    curve = renyi.curve(counts)
    last = renyi.best_order(curve, delta)
    if not math.isfinite(curve[last]):
        return strict, math.inf
    orders = np.array([*_SMALL_ORDERS, *renyi.ORDERS[: last + 1]])
    found = np.append(renyi.curve(counts, _SMALL_ORDERS), curve[: last + 1])
    rho = max(float(found[0]), *(_largest_ratio(orders, found)).tolist())
    if strict <= _NO_DEARER * rho:
        return strict, math.inf
    return rho * (1 + 1e-12), renyi.ORDERS[last]


def _largest_ratio(orders: Array, divergences: Array) -> Array:
    """The largest divergence / order between each order and the next, at most.

    u * divergence is convex in u = order - 1, so there it lies below its chord b u - c, and (b u -
    c) / (u (1 + u)) rises up to the u that is computed here, and falls from there on.
    """
    u = orders - 1
    moments = u * divergences
    slope = np.diff(moments) / np.diff(u)
    below = np.maximum(slope * u[:-1] - moments[:-1], 0.0)
    peak = (below + np.sqrt(below**2 + slope * below)) / np.maximum(slope, 1e-300)
    peak = np.clip(peak, u[:-1], u[1:])
    # the value at the peak, or at an end if round-off hides it
    ends = np.maximum(divergences[:-1] / orders[:-1], divergences[1:] / orders[1:])
    return np.maximum((slope * peak - below) / (peak * (1 + peak)), ends)


# --- people with several records ------------------------------------------------------------------

_LEAST_CHANCE = 1e-280


def curves_of_people(
    history: History, curves: tuple[TradeOff, ...], size: int, delta: float
) -> tuple[TradeOff, ...]:
    """The trade-off curves of people with at most ``size`` records, from those of one record;
    those with the smaller epsilon at ``delta``.
    """
    path = tuple(curve.of_groups(size) for curve in curves)
    pairs = _pairs(history, size)
    if pairs is None:
        return path
    composed = profiles.trade_offs(*profiles.profiles(frozenset(pairs.items()), "pld"))
    return min(composed, path, key=lambda found: max(curve.epsilon(delta) for curve in found))


def _pairs(history: History, size: int) -> dict[Pair, int] | None:
    """The pairs that dominate releases for ``size`` records; ``None``: not all are known."""
    if history.guarantee != "fixed" or history.settings.method != "pld":
        return None
    found: dict[Pair, int] = {}
    for (event, _, _), count in history.charges.items():
        if not isinstance(event, PoissonSampledDpEvent | GaussianDpEvent | MuGaussianDpEvent):
            return None
        pair = _pair(history.pair(event), size)
        if pair is None:
            return None
        found[pair] = found.get(pair, 0) + count
    return found if len(found) <= EXACT_LEVELS else None


def _pair(pair: Pair, size: int) -> Pair | None:
    if isinstance(pair, Gaussian):
        return Gaussian(size * pair.mu)
    if not isinstance(pair, Sampled) or pair.kind != "directed":
        return None
    joined = np.arange(1, size + 1)
    chances = stats.binom.pmf(joined, size, pair.rate)
    if chances.min() < _LEAST_CHANCE:
        return None
    return GaussianMixture(tuple((joined / pair.noise).tolist()), tuple(chances.tolist()))


def concentration_of_people(rho: float, order: float, size: int) -> tuple[float, float]:
    """(rho, order)-truncated concentration of ``size`` records (Bun, Dwork, Rothblum, Steinke
    2018): ``size``^2 * rho for orders below order / ``size``.
    """
    return (size**2 * rho, order / size) if order > size else (math.inf, math.inf)
