"""The privacy profile of a composition by an integral over its cumulant: no grid, no bound.

For any theta > 0, with K(w) = log E exp(w L) the cumulant of the composed privacy loss,

    delta(epsilon) = (1 / 2 pi i) * integral of exp(K(w) - epsilon w) / (w (w + 1)) over
    Re w = theta,

taken at the saddle of the integrand, from where it falls as a Gaussian does.
"""

import math

import numpy as np
from scipy import optimize

from torch_dpbayes.accounting.dominating_pairs import BoundedRange, Gaussian, Pure


def _nodes(pair, reverse, reach):
    """Losses with log masses, by the trapezoid rule, which is exact to round-off for what is
    smooth and falls off.
    """
    if isinstance(pair, Pure):
        losses = np.array([-pair.epsilon, pair.epsilon])
        return losses, -np.logaddexp(0.0, -losses)
    if isinstance(pair, BoundedRange):
        points, weights = np.polynomial.legendre.leggauss(200)
        losses, weights = pair.epsilon * points, pair.epsilon * weights
        density = (losses - pair.epsilon) / 2 - math.log(2 * -math.expm1(-pair.epsilon))
        return losses, np.log(weights) + density
    if isinstance(pair, Gaussian):
        mu = pair.mu
        x = np.linspace(-reach, reach + mu * reach, 4000)
        log_mass = -((x - mu) ** 2) / 2 - math.log(math.sqrt(2 * math.pi)) + math.log(x[1] - x[0])
        return mu * x - mu**2 / 2, log_mass
    q, z = pair.rate, pair.noise
    x = np.arange(-reach * z, 1 + reach * z, 0.02 * min(z, z**2, 1.0))
    center = -(x**2) / (2 * z**2) - math.log(z * math.sqrt(2 * math.pi)) + math.log(x[1] - x[0])
    up = np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * z**2))
    if pair.kind == "antipodal":
        down = np.logaddexp(math.log1p(-q), math.log(q) + (-2 * x - 1) / (2 * z**2))
        return up - down, center + up
    return (-up, center) if reverse else (up, center + up)


class Profile:
    """delta(epsilon) of (pair, count) pairs in one direction."""

    def __init__(self, counts, reverse, reach=16.0):
        self._nodes = [(*_nodes(pair, reverse, reach), n) for pair, n in counts.items()]

    def _cumulant(self, w):
        w = np.asarray(w)
        total = np.zeros(w.shape, dtype=complex)
        for losses, log_masses, count in self._nodes:
            exponent = np.multiply.outer(w, losses) + log_masses
            peak = exponent.real.max(axis=-1)
            left = np.exp(exponent - peak[..., None]).sum(axis=-1)
            # far from the real axis nothing may be left, and 0 has no logarithm
            total += count * (peak + np.log(np.where(left == 0, 1e-300, left)))
        return total

    def log_integrand(self, theta, epsilon):
        value = self._cumulant(np.array([theta])).real[0]
        return value - epsilon * theta - math.log(theta) - math.log1p(theta)

    def delta(self, epsilon):
        found = optimize.minimize_scalar(
            lambda t: self.log_integrand(math.exp(t), epsilon), bounds=(-9, 11), method="bounded"
        )
        theta = math.exp(found.x)
        step = 1e-3 * theta
        curvature = (
            self.log_integrand(theta + step, epsilon)
            + self.log_integrand(theta - step, epsilon)
            - 2 * self.log_integrand(theta, epsilon)
        ) / step**2
        width = 1 / math.sqrt(max(curvature, 1e-12))
        peak = self.log_integrand(theta, epsilon)
        # The trapezoid rule adds the profile's images at a distance of 2 pi / step: they must lie
        # where the tilted loss has no mass.
        tilts = theta + width * np.array([-8, -4, -2, -1, -0.5, 0.5, 1, 2, 4, 8])
        tilts = tilts[tilts > -0.9]
        moved = self._cumulant(tilts).real - self._cumulant(np.array([theta])).real
        reach = (moved + 32) / np.abs(tilts - theta)
        above, below = reach[tilts > theta].min(), reach[tilts < theta].min(initial=math.inf)
        span = above + min(below, (32 - peak) / theta)
        step, total = min(0.1 * width, 2 * math.pi / span), 0.0
        for start in range(0, 2**17, 512):
            part = step * np.arange(start, start + 512)
            w = theta + 1j * part
            terms = np.exp(self._cumulant(w) - epsilon * w - peak) / (w * (w + 1))
            total += float(terms.real.sum()) - (0.5 * float(terms.real[0]) if start == 0 else 0.0)
            if np.abs(terms).max() * theta * (theta + 1) < 1e-12:
                return step * total * math.exp(peak) / math.pi
        return math.nan


def true_delta(counts, epsilon):
    """In the worse direction. A few pairs without atoms, or many releases."""
    return max(Profile(counts, reverse).delta(epsilon) for reverse in (False, True))
