"""Gaussian differential privacy in closed form."""

from __future__ import annotations

import numpy as np
from scipy import optimize, special

# from here on the second term of delta, which lowers epsilon by 1 in mu**2/2, is below round-off
# and left out
_LARGE_MU = 1e5


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Balle and Wang 2018, Theorem 8."""
    if mu == 0:
        return 0.0
    first = float(special.ndtr(mu / 2 - epsilon / mu))
    if mu > _LARGE_MU:
        return first * (1 + 1e-15)
    # round-off
    return first * (1 + 1e-15) - float(
        np.exp(epsilon + special.log_ndtr(-mu / 2 - epsilon / mu))
    ) * (1 - 1e-15)


def gaussian_epsilon(mu: float, delta: float) -> float:
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    largest = mu**2 / 2 - mu * float(special.ndtri(delta))
    if mu > _LARGE_MU:
        return largest * (1 + 1e-10)
    solution = optimize.brentq(
        lambda e: gaussian_delta(mu, e) - delta, 0.0, largest, xtol=1e-14, rtol=1e-12
    )
    return float(solution) * (1 + 1e-10)


def gaussian_mu(epsilon: float, delta: float) -> float:
    """The largest mu at which a Gaussian keeps (epsilon, delta), rounded down."""
    high = 1.0
    while gaussian_delta(high, epsilon) <= delta:
        high *= 2
    low = high / 2
    while gaussian_delta(low, epsilon) > delta:
        low /= 2
    solution = optimize.brentq(
        lambda mu: gaussian_delta(mu, epsilon) - delta, low, high, xtol=1e-15, rtol=1e-12
    )
    return float(solution) * (1 - 1e-9)
