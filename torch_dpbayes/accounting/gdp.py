"""Closed forms for Gaussian sums, and for one release of some other kinds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
from scipy import optimize, special

from .dominating_pairs import BoundedRange, Gaussian, Mixed, Pair, Pure, Sampled
from .privacy_loss import sampled_point, unsampled_loss

# for larger mu the second term of delta is left out: it would lower epsilon by 1 in mu**2/2, which
# is below round-off
_LARGE_MU = 1e5
_MARGIN = 1e-12  # relative error of distribution functions
_FAR = 1e6  # with the least noise of sampled releases delta is 0 there


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu), rounded up (Balle and Wang 2018,
    Theorem 8), with a small relative error even in the tail.
    """
    above = float(special.log_ndtr(mu / 2 - epsilon / mu)) if mu else -math.inf
    if above == -math.inf:
        return 0.0
    below = epsilon + float(special.log_ndtr(-mu / 2 - epsilon / mu))
    error = 1e-15 * (1 + epsilon - above)
    return math.exp(above) * -math.expm1(min(below - above - error, 0.0)) * (1 + _MARGIN + error)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The least epsilon >= 0 at ``delta`` of a Gaussian, rounded up."""
    if mu > _LARGE_MU:
        return (mu**2 / 2 - mu * float(special.ndtri(delta))) * (1 + 1e-10)
    return _epsilon_of(partial(gaussian_delta, mu), delta)


def gaussian_mu(epsilon: float, delta: float) -> float:
    """The largest mu at which a Gaussian is (epsilon, delta)-private, rounded down."""
    high = 1.0
    while gaussian_delta(high, epsilon) <= delta:
        high *= 2
    low = high / 2
    while gaussian_delta(low, epsilon) > delta:
        low, high = low / 2, low
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        is_private = gaussian_delta(middle, epsilon) <= delta
        low, high = (middle, high) if is_private else (low, middle)
    return low


def advantage_sum(counts: Mapping[Pair, int]) -> float:
    """The sum of the releases' deltas at epsilon = 0, rounded up; infinite if one is unknown."""
    return math.fsum(count * _advantage(pair) for pair, count in counts.items()) * (1 + _MARGIN)


def _advantage(pair: Pair) -> float:
    if isinstance(pair, Gaussian | Sampled):
        rate = pair.rate if isinstance(pair, Sampled) else 1.0
        return rate * math.erf(pair.mu / math.sqrt(8))
    if isinstance(pair, Mixed):
        return math.fsum(weight * _advantage(part) for weight, part in pair.parts)
    return math.tanh(pair.epsilon / 2) if isinstance(pair, Pure) else math.inf


def sampled_delta(pair: Sampled | Mixed, epsilon: float) -> float:
    """delta at ``epsilon`` >= 0 of one release, rounded up.

    Let H be the profile of the unsampled Gaussian. A removed record costs q H(e'), with exp(e') =
    1 + (exp(epsilon) - 1) / q. An added one costs f H(e''), with f = 1 - (1 - q) exp(epsilon) and
    exp(e'') = q exp(epsilon) / f (Balle, Barthe, Gaboardi 2018, Theorem 2). This is not more,
    because f <= q and e'' >= e'.
    """
    if isinstance(pair, Mixed):
        return math.fsum(weight * sampled_delta(part, epsilon) for weight, part in pair.parts)
    q, mu = pair.rate, 1 / pair.noise
    if pair.kind != "antipodal":
        return q * gaussian_delta(mu, float(unsampled_loss(np.array([epsilon]), q)[0]))
    epsilon = min(epsilon, _FAR)
    x = float(sampled_point(pair, np.array([epsilon]))[0])
    near, middle, far = (float(special.log_ndtr((at - x) * mu)) for at in (1.0, 0.0, -1.0))
    # no exponent is far above 0: above x the first density exceeds e^epsilon times the second
    with_it = q * math.exp(near)
    without = (1 - q) * -math.expm1(-epsilon) * math.exp(epsilon + middle)
    found = with_it - q * math.exp(epsilon + far) - without
    return max(found, 0.0) + _MARGIN * (1 + epsilon / 100) * (with_it + without)


def sampled_epsilon(pair: Sampled | Mixed, delta: float) -> float:
    """epsilon at ``delta`` of one release, rounded up."""
    return _epsilon_of(partial(sampled_delta, pair), delta)


def _epsilon_of(delta_at: Callable[[float], float], delta: float) -> float:
    """The least epsilon >= 0 at which a falling function is at most ``delta``, rounded up."""
    if delta_at(0.0) <= delta:
        return 0.0
    high = 1e-9
    while delta_at(high) > delta:
        high *= 4

    def log_excess(e: float) -> float:
        return math.log(max(delta_at(e), 1e-300) / delta)

    found = float(optimize.brentq(log_excess, 0.0, high, xtol=1e-300, rtol=1e-13, disp=False))
    margin = 1e-13 * found
    while delta_at(found) > delta:
        found, margin = found + margin, 2 * margin
    return found


def bounded_epsilon(pair: Pure | BoundedRange, delta: float) -> float:
    """epsilon at ``delta`` of one release, rounded up. Pure: e + log(1 - delta (1 + e^-e)). Bounded
    range: b + 2 log(1 - sqrt(delta (1 - e^-b))) (Dong, Durfee, Rogers 2020).
    """
    largest = pair.epsilon
    if isinstance(pair, Pure):
        share, times = delta * (1 + math.exp(-largest)), 1
    else:
        share, times = math.sqrt(delta * -math.expm1(-largest)), 2
    found = largest + times * math.log1p(-min(share, 1.0) * (1 - _MARGIN))
    return min(max(found + 1e-15 * largest, 0.0), largest)
