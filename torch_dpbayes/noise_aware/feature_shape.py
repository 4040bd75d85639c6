r"""Coordinates of the features in which the noise of a generalised linear model does least harm.

A gradient is a number times its record's features x, and noise for all x up to the bound R is the
same in all directions. Where features are correlated, some directions have hardly any of R: the
noise there hides what the records say. With x' = Ax and weights that depend on x alone,

.. math::
    \sum_i w_i \psi_i x'_i, \qquad w_i = \min(1, \|x'_i\|^{-2}),

has mean zero at the truth whatever A is, and a record moves it, the Gram matrix Σ w x'x'ᵀ and the
Hessian by as much as a record of norm 1 would. A comes from a released Gram matrix G: with the
parameters in units of their prior and G = U diag(λ) Uᵀ there, A = diag(√a) Uᵀ, and a makes

.. math::
    \sum_j \log\Big(1 + \frac{F_j^2}{F_j + \sigma^2/a_j}\Big), \quad F = bG, \quad
    \text{largest under} \quad \frac1n \sum_j a_j \lambda_j = \tfrac12,

the part of a bound's square that a record has on average; b is the slope of gradients at the
prior's mean, and σ the noise of all gradients together. Of normal features in many directions few
records have weights below 1 then; of features with heavy tails one in six. Scores keep mean zero if
the model is right; if it is not, weights move the parameters that fit best. So the lengths are
chosen once more when it is known how they are distributed:
:mod:`~torch_dpbayes.noise_aware.feature_lengths`.

Derived in this project; weights that depend on features alone: Mallows (1975), "On some topics in
robustness".
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .priors import GaussianPrior
from .surrogate import AnySurrogate
from .uncertain_level import UncertainLevel

_MEAN_SQUARE = 0.5  # of ‖x'‖
_LEAST_SHARE = 0.01  # of what a direction has if all have the same part of the bound
_ITERATIONS = 60


class FeatureShape(NamedTuple):
    """A, and what is known of each of its directions, all in units of the prior there."""

    matrix: Tensor
    told: Tensor
    """F."""
    scales: Tensor
    """a."""
    noise: float
    """σ²."""
    noise_of_curvature: float
    """Standard deviation, for features of norm 1."""
    mean_square: float
    """Of Ax."""
    today: Tensor
    """Variances of the posterior for the features as they are."""

    def variances(self, length: float, kept: float) -> Tensor:
        """Of the posterior for the features √length·Ax, of whose Gram matrix the weights leave the
        share ``kept``.
        """
        scales = length * self.scales
        told, of_curvature = kept * self.told, self.noise_of_curvature / scales
        return _variances(told, self.noise / scales, of_curvature, scales.reciprocal())


def feature_shape(
    gram: Tensor,
    gram_std: float,
    slope: Tensor,
    prior: GaussianPrior,
    noise_std: float,
    num_data: int,
    feature_norm: float,
) -> FeatureShape:
    """A of the mean square ½.

    Args:
        gram: G without its noise, as far as that is possible.
        gram_std: of the noise that is left.
        slope: bG.
        prior: of the parameters, with mean zero.
        noise_std: of all gradients together, for features of norm up to ``feature_norm``.
        num_data: n, public.
        feature_norm: R.
    """
    unit = prior.precision.rsqrt()
    values, vectors = torch.linalg.eigh(unit[:, None] * gram * unit)
    units = vectors.square().T @ unit.square()  # how far a prior deviation is
    values = torch.maximum(values, gram_std * units)
    factor = float(slope.trace() / gram.trace())
    told = factor * values
    variance = (noise_std / feature_norm) ** 2
    scales = _best_scales(values / num_data, told, variance)
    of_curvature = factor * gram_std
    return FeatureShape(
        scales.sqrt()[:, None] * vectors.T * unit,
        told,
        scales,
        variance,
        of_curvature / feature_norm**2,
        float((scales * values).sum()) / num_data,
        _variances(told, noise_std**2 * units, of_curvature * units, units),
    )


def _variances(told: Tensor, noise: Tensor, of_curvature: Tensor, units: Tensor) -> Tensor:
    """Of the posterior, in units of the prior's.

    Args:
        told: F of the parameters in units of the prior.
        noise: variance of the gradients' noise there.
        of_curvature: standard deviation of the curvature's noise there, times the unit.
        units: squared lengths of prior deviations where that noise is the same in all directions.
    """
    way = (units / (1 + told.square() / (told + noise))).sum()
    more = of_curvature.square() / units * way / 2
    return 1 / (1 + told.square() / (told + noise + more))


def _best_scales(squares: Tensor, told: Tensor, variance: float) -> Tensor:
    """a: where its derivative of the sum is the same multiple η of λ/n in all directions, which is
    a quadratic equation; η by bisection.
    """
    first = told.square() * (1 + told)
    second = variance * told * (2 + told)
    full = _MEAN_SQUARE / (len(told) * squares)

    def at(log_price: float) -> Tensor:
        third = variance**2 - told.square() * variance / (math.exp(log_price) * squares)
        root = (second.square() - 4 * first * third).clamp_min(0.0).sqrt()
        return torch.maximum(-2 * third / (second + root), _LEAST_SHARE * full)

    low, high = -200.0, 200.0
    for _ in range(_ITERATIONS):
        middle = (low + high) / 2
        if float((at(middle) * squares).sum()) > _MEAN_SQUARE:
            low = middle
        else:
            high = middle
    scales = at(high)
    return scales * _MEAN_SQUARE / float((scales * squares).sum())


class InShape:
    """A likelihood of θ' = A⁻ᵀθ, as one of θ.

    Args:
        inner: the likelihood of θ'.
        shape: A.
    """

    def __init__(self, inner: AnySurrogate | UncertainLevel, shape: Tensor) -> None:
        self._inner, self._shape = inner, shape
        self._inverse = torch.linalg.inv(shape)
        self.centre, self.predictor_std = inner.centre @ shape, inner.predictor_std

    @property
    def gradient_std(self) -> float:
        """See :attr:`~torch_dpbayes.noise_aware.surrogate.AnySurrogate.gradient_std`."""
        return self._inner.gradient_std

    def log_likelihood(self, theta: Tensor) -> Tensor:
        """log p(transcript | θ) up to a constant, ``[...]`` for θ ``[..., d]``; differentiable."""
        return self._inner.log_likelihood(theta @ self._inverse)

    def precision(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """H and Hθ̂ of the Gaussian likelihood that is tangent to this one at ``theta``."""
        precision, product = self._inner.precision(theta @ self._inverse)
        return self._inverse @ precision @ self._inverse.T, self._inverse @ product

    def agreement(self, mode: Tensor, precision: Tensor) -> float:
        """See :meth:`~torch_dpbayes.noise_aware.surrogate.Surrogate.agreement`."""
        return self._inner.agreement(mode @ self._inverse, self._shape @ precision @ self._shape.T)
