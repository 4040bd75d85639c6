r"""Odometer: an epsilon that is valid at every moment, for adaptively chosen noise and rates.

Let L be the privacy loss of all releases so far, and R_a the sum of their Renyi divergences of
order a. Each divergence is known before its release. Then exp((a - 1) (L - R_a)) is a
supermartingale under the data set that L refers to, even if parameters depend on earlier outputs
(Whitehouse, Ramdas, Rogers, Wu 2023; for filters Feldman, Zrnic 2021). So is a mixture over orders,

.. math:: N = \sum_a w_a \exp((a - 1) (L - R_a)), \qquad \sum_a w_a = 1.

The odometer is the least epsilon for which (1 - exp(epsilon - L))_+ <= delta * N for every L:

.. math:: \varepsilon = \max_\ell \ \ell + \log\Big(1 - \delta \sum_a w_a
    e^{(a - 1)(\ell - R_a)}\Big).

By optional stopping E[(1 - exp(epsilon - L))_+] <= delta at every stopping time. So for any rule
that stops by looking at outputs, P(S) <= E_Q[exp(epsilon) 1_S] + delta for every S, with the
epsilon at the time of stopping. For a single order this is the conversion of Canonne, Kamath and
Steinke (2020) at a fixed time; the mixture costs the logarithm of the weight of the best orders.

The weights depend on delta and on the first release, and no output can influence these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from scipy import optimize, special

from . import renyi
from .dominating_pairs import Array, NonPrivate, Pair
from .privacy_loss import apart

_COUNTS = np.geomspace(1, 1e7, 36)  # numbers of releases; each has its best order
_LIKELY, _LIKELY_SPREAD = math.log(3e3), 3.0  # mean and deviation of log(number)
_BROAD = 0.05  # share of the weight that is spread evenly over all orders
_SPREAD = 1.0  # deviation of log(number) around the number that a budget allows


def epsilon(
    counts: Mapping[Pair, int],
    delta: float,
    first: Pair | None,
    budget: tuple[float, float] | None = None,
) -> float:
    """The odometer after ``counts``; ``first``: the first release. With a budget it is tightest
    near the budget's epsilon and delta.
    """
    failures, others = apart(counts)
    if failures or NonPrivate() in others:
        return math.inf
    if not others:
        return 0.0
    exponents = np.array(renyi.ORDERS) - 1
    with np.errstate(divide="ignore"):
        logs = np.log(weights(first, delta, budget))
    spent = renyi.curve(others)
    known = np.isfinite(spent) & np.isfinite(logs)
    return largest(exponents[known], logs[known] + math.log(delta), spent[known])


def largest(exponents: Array, logs: Array, spent: Array) -> float:
    """max over l of l + log(1 - S), S = sum of exp(logs + exponents * (l - spent)). At the maximum
    S and its derivative add up to 1.
    """
    if not len(logs):
        return math.inf
    slopes = np.log1p(exponents)

    def excess(loss: float) -> float:
        return float(special.logsumexp(logs + slopes + exponents * (loss - spent)))

    # the root is below the root of each single order; some order has at least 1/n of the sum
    alone = spent - (logs + slopes) / exponents
    margin = 1e-9 * (1 + float(np.min(np.abs(alone))))
    high = float(np.min(alone)) + margin
    low = float(np.min(alone - math.log(len(logs)) / exponents)) - margin
    loss = optimize.brentq(excess, low, high, xtol=1e-13, rtol=1e-13)
    kept = -float(np.expm1(special.logsumexp(logs + exponents * (loss - spent))))
    # the derivative is 0 at the optimum, so an error of ``loss`` has an effect of second order
    return max(0.0, (loss + math.log(kept)) * (1 + 1e-9)) if kept > 0 else math.inf


def weights(first: Pair | None, delta: float, budget: tuple[float, float] | None) -> Array:
    """The weight of each order of the Renyi curves. Most weight is on the orders that are best for
    some number of releases like the first one; the rest is spread over all orders.
    """
    number = len(renyi.ORDERS)
    broad = np.full(number, 1 / number)
    one = np.zeros(0) if first is None else renyi.curve({first: 1})
    if not len(one) or not np.isfinite(one).any() or not one.min() > 0:
        return broad
    best = np.array([renyi.best_order(count * one, delta) for count in _COUNTS])
    likely = np.exp(-(((np.log(_COUNTS) - _LIKELY) / _LIKELY_SPREAD) ** 2) / 2)
    likely /= likely.sum()
    if budget is not None:
        limits = renyi.allowed(*budget, renyi.ORDERS)
        fits = float(np.max(limits / one))
        if fits > 0:
            distance = np.log(_COUNTS / np.clip(fits, _COUNTS[0], _COUNTS[-1])) / _SPREAD
            near = np.exp(-(distance**2) / 2)
            likely = (likely + 3 * near / near.sum()) / 4
    return _BROAD * broad + (1 - _BROAD) * np.bincount(best, likely, number)
