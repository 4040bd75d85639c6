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
the model is right; if it is not, weights move the parameters that fit best.

Derived in this project; weights that depend on features alone: Mallows (1975), "On some topics in
robustness".
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .priors import GaussianPrior
from .surrogate import AnySurrogate
from .uncertain_level import UncertainLevel

_MEAN_SQUARE = 0.5  # of ‖x'‖
_LEAST_GAIN = 0.1  # of log standard deviation for each parameter; below, R is good enough
_LEAST_SHARE = 0.01  # of what a direction has if all have the same part of the bound
_ITERATIONS = 60


def feature_map(
    gram: Tensor,
    gram_std: float,
    slope: Tensor,
    prior: GaussianPrior,
    noise_std: float,
    num_data: int,
    feature_norm: float,
) -> Tensor | None:
    """A, or None where it would gain too little.

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
    today = _learnt(told, noise_std**2 * units, of_curvature * units, units)
    found = _learnt(
        told, variance / scales, of_curvature / feature_norm**2 / scales, scales.reciprocal()
    )
    # nor where numbers are too large to tell
    if not found - today >= _LEAST_GAIN * len(gram):
        return None
    return scales.sqrt()[:, None] * vectors.T * unit


def _learnt(told: Tensor, noise: Tensor, of_curvature: Tensor, units: Tensor) -> float:
    """log of prior over posterior standard deviations, summed.

    Args:
        told: F of the parameters in units of the prior.
        noise: variance of the gradients' noise there.
        of_curvature: standard deviation of the curvature's noise there, times the unit.
        units: squared lengths of prior deviations where that noise is the same in all directions.
    """
    way = (units / (1 + told.square() / (told + noise))).sum()
    more = of_curvature.square() / units * way / 2
    return float(torch.log1p(told.square() / (told + noise + more)).sum()) / 2


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
        self.centre = inner.centre @ shape

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
