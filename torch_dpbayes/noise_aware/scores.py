r"""Clipped gradients of generalised linear models whose mean is zero at the truth.

A gradient is (E[Y | u] − y) x, and clipping it to norm C limits the residual to ±c, c = C/‖x‖.
Where Y is skewed, the limited residual does not have mean zero at the true parameters, and the
point at which the gradients sum to zero is off by more than the posterior's width as soon as there
are some thousand records. So the residual is taken about the Huber mean t of the model's own
distribution of Y instead,

.. math::
    \psi(u, y) = \mathrm{clip}(t - y, \pm c) = t - \mathrm{clip}(y, t \pm c), \qquad
    t = \mathrm{E}[\mathrm{clip}(Y, t \pm c) \mid u],

which is no longer than c, equal to the gradient where nothing is clipped, and has mean zero. Its
expected slope J = Cov(clip(Y), Y | u) and its variance K = Var(clip(Y) | u) take the place of the
second derivative: an estimator of θ from Σ ψ x has the covariance J⁻¹KJ⁻¹.

Source: Cantoni and Ronchetti (2001), "Robust inference for generalized linear models", who subtract
the mean after clipping, which the clip bound would not survive.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

_ITERATIONS = 3  # each leaves of the bias a share that is the share of clipped records
_LARGEST_EXPONENT = 30.0
_GRID = 3001  # points at which a curve is tabulated, a fiftieth apart


class Target(Protocol):
    """The distribution of Y given the linear predictor u, in units in which u is its natural
    parameter.
    """

    def mean(self, u: Tensor) -> Tensor:
        """E[Y]."""

    def clipped_mean(self, u: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """E[clip(Y, low, high)]."""

    def clipped_slope(self, u: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Cov(clip(Y, low, high), Y), which is the derivative of :meth:`clipped_mean` by u."""

    def clipped_square(self, u: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """E[clip(Y, low, high)²]."""


def scores(target: Target, u: Tensor, y: Tensor, bounds: Tensor) -> Tensor:
    """ψ of each record, finite and at most its bound whatever the record holds."""
    centre = _huber_mean(target, u, bounds)
    return torch.minimum(torch.maximum(centre - y, -bounds), bounds).nan_to_num(nan=0.0)


def slopes(target: Target, u: Tensor, bounds: Tensor) -> Tensor:
    """J of each record, not negative."""
    centre = _huber_mean(target, u, bounds)
    return target.clipped_slope(u, centre - bounds, centre + bounds).clamp_min(0.0)


def slope_curve(target: Target, bound: Tensor) -> Callable[[Tensor], Tensor]:
    """J as a function of u, for one bound; by interpolation where it is dear."""
    if not isinstance(target, Poisson):
        return partial(slopes, target, bounds=bound)
    grid = torch.linspace(-_LARGEST_EXPONENT, _LARGEST_EXPONENT, _GRID, dtype=torch.float64)
    return interpolated(slopes(target, grid, bound), -_LARGEST_EXPONENT, _LARGEST_EXPONENT)


def interpolated(table: Tensor, first: float, last: float) -> Callable[[Tensor], Tensor]:
    """The curve through equally spaced values, ``[points]``, between ``first`` and ``last``,
    by Catmull and Rom's cubic, whose derivative has no jumps.
    """
    return partial(_interpolated_at, table, first, (last - first) / (len(table) - 1))


def _interpolated_at(table: Tensor, first: float, step: float, u: Tensor) -> Tensor:
    count = len(table)
    place = ((u - first) / step).clamp(1, count - 2)
    left = place.detach().long().clamp(max=count - 3)
    t = place - left
    a, b, c, d = (table[left + k] for k in (-1, 0, 1, 2))
    return b + t / 2 * (c - a + t * (2 * a - 5 * b + 4 * c - d + t * (3 * (b - c) + d - a)))


def hermite(
    table: Tensor, changes: Tensor, last: float
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """The curve through equally spaced values between 0 and ``last`` with these derivatives there,
    by Hermite's cubic, and its own derivative.
    """
    return partial(_hermite_at, table, changes, last / (len(table) - 1))


def _hermite_at(table: Tensor, changes: Tensor, step: float, x: Tensor) -> tuple[Tensor, Tensor]:
    place = (x / step).clamp(0, len(table) - 1)
    left = place.detach().long().clamp(max=len(table) - 2)
    t = place - left
    start, rise = table[left], table[left + 1] - table[left]
    first, second = changes[left] * step, changes[left + 1] * step
    bend, twist = 3 * rise - 2 * first - second, first + second - 2 * rise
    value = start + t * (first + t * (bend + t * twist))
    return value, (first + t * (2 * bend + 3 * t * twist)) / step


def variances(target: Target, u: Tensor, bounds: Tensor) -> Tensor:
    """K of each record, not negative."""
    centre = _huber_mean(target, u, bounds)
    low, high = centre - bounds, centre + bounds
    square = target.clipped_square(u, low, high)
    return (square - target.clipped_mean(u, low, high).square()).clamp_min(0.0)


def _huber_mean(target: Target, u: Tensor, bounds: Tensor) -> Tensor:
    centre = target.mean(u)
    for _ in range(_ITERATIONS):
        centre = target.clipped_mean(u, centre - bounds, centre + bounds)
    return centre


@dataclass(frozen=True)
class Bernoulli:
    """Y ∈ {0, 1}."""

    def mean(self, u: Tensor) -> Tensor:
        """The logistic function."""
        return u.sigmoid()

    def clipped_mean(self, u: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Of two values."""
        zero, one = _zero_and_one(low, high)
        return zero + u.sigmoid() * (one - zero)

    def clipped_slope(self, u: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """p(1 − p) times how far the two values are apart."""
        zero, one = _zero_and_one(low, high)
        return u.sigmoid() * (-u).sigmoid() * (one - zero)

    def clipped_square(self, u: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Of two values."""
        zero, one = _zero_and_one(low, high)
        return (-u).sigmoid() * zero.square() + u.sigmoid() * one.square()


def _zero_and_one(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    return low.clamp_min(0.0), high.clamp_max(1.0)


@dataclass(frozen=True)
class Poisson:
    """Counts, those above ``max_count`` taken as that many."""

    max_count: float

    def mean(self, u: Tensor) -> Tensor:
        """e^u, at most ``max_count``."""
        return _rate(u).clamp(max=self.max_count)

    def clipped_mean(self, u: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """low + E(Y − low)⁺ − E(Y − high)⁺."""
        return _mean_between(_rate(u), self._within(low), self._within(high))

    def clipped_slope(self, u: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """e^u·E[clip(Y + 1) − clip(Y)]."""
        rate, low, high = _rate(u), self._within(low), self._within(high)
        more = 1 + _mean_between(rate, low - 1, high - 1)
        return rate * (more - _mean_between(rate, low, high))

    def clipped_square(self, u: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """low² + E(Y² − low²)⁺ − E(Y² − high²)⁺."""
        rate = _rate(u)
        low, high = self._within(low).clamp_min(0.0), self._within(high)
        return low.square() + _square_excess(rate, low) - _square_excess(rate, high)

    def _within(self, bound: Tensor) -> Tensor:
        # no count is below 0: at −1 nothing is clipped any more
        return bound.clamp(-1.0, self.max_count)


@dataclass(frozen=True)
class Gaussian:
    """Y ~ N(weight·u, weight): a target of variance 1/weight, times ``weight``."""

    weight: float

    def mean(self, u: Tensor) -> Tensor:
        """weight·u."""
        return self.weight * u

    def clipped_mean(self, u: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Of a censored normal distribution."""
        mean, std = self.mean(u), math.sqrt(self.weight)
        a, b = (low - mean) / std, (high - mean) / std
        between = torch.special.ndtr(b) - torch.special.ndtr(a)
        return (
            low * torch.special.ndtr(a)
            + high * torch.special.ndtr(-b)
            + mean * between
            + std * (_density(a) - _density(b))
        )

    def clipped_slope(self, u: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """weight·P(low < Y < high)."""
        mean, std = self.mean(u), math.sqrt(self.weight)
        inside = torch.special.ndtr((high - mean) / std) - torch.special.ndtr((low - mean) / std)
        return self.weight * inside

    def clipped_square(self, u: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Of a censored normal distribution."""
        mean, std = self.mean(u), math.sqrt(self.weight)
        a, b = (low - mean) / std, (high - mean) / std
        between = torch.special.ndtr(b) - torch.special.ndtr(a)
        return (
            low.square() * torch.special.ndtr(a)
            + high.square() * torch.special.ndtr(-b)
            + (mean.square() + self.weight) * between
            + std * ((mean + low) * _density(a) - (mean + high) * _density(b))
        )


def _density(z: Tensor) -> Tensor:
    return torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)


def _rate(u: Tensor) -> Tensor:
    return u.clamp(max=_LARGEST_EXPONENT).exp()


def _at_least(count: Tensor, rate: Tensor) -> Tensor:
    """P(Y ≥ count)."""
    # whole numbers have no derivative
    above = torch.special.gammainc(count.detach().clamp_min(1.0), rate)
    return torch.where(count > 0, above, torch.ones_like(above))


def _mean_between(rate: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return low + _excess(rate, low) - _excess(rate, high)


def _excess(rate: Tensor, bound: Tensor) -> Tensor:
    """E(Y − bound)⁺."""
    whole = bound.floor()
    return rate * _at_least(whole, rate) - bound * _at_least(whole + 1, rate)


def _square_excess(rate: Tensor, bound: Tensor) -> Tensor:
    """E(Y² − bound²)⁺ for a bound of at least 0."""
    whole = bound.floor()
    return (
        rate.square() * _at_least(whole - 1, rate)
        + rate * _at_least(whole, rate)
        - bound.square() * _at_least(whole + 1, rate)
    )
