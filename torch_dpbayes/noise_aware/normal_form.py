r"""The normal form: one observation of the gradient of a quadratic log likelihood, and a curvature
that is itself uncertain.

.. math::
    \bar g = F(\bar\theta - \theta_L) + N(0, V), \quad \theta_L \mid \theta \sim N(\theta, F^{-1}),
    \quad \hat F = F + R^{1/2} E R^{1/2}

    \log p = -\tfrac12 r^\top M^{-1} r - \tfrac12\log|M|, \quad r = \bar g - \hat F\Delta, \quad
    \Delta = \bar\theta - \theta, \quad
    M = \hat F + V + \tfrac12 v^2\big(\Delta^\top R\Delta\, R + R\Delta\Delta^\top R\big)

with E symmetric Gaussian, of standard deviation v on the diagonal and v/√2 off it: the last term is
the covariance of R^{1/2}ER^{1/2}Δ. It is :class:`~torch_dpbayes.noise_aware.surrogate.Surrogate`
for a quadratic likelihood whose curvature was not released but estimated, more surely in some
directions than in others.

As Δ grows, M grows with it, and log p comes to an end: far away hardly any curvature explains ḡ,
and under a wide prior that plateau may have most of the mass, or a few per cent that decide the
variance. A run that ended near θ̄ contradicts it, which log p does not know: the run's earlier
gradients are not part of it. So where the :meth:`~NormalForm.plateau` does not decide, or where
earlier gradients contradict it, the error of the curvature is counted as at most that at the
distance from θ̄ to the likelihood's mode and what a stated share of posteriors exceeds
(:meth:`~NormalForm.without_plateau`). Derived in this project.
"""

from __future__ import annotations

import math

import torch
from scipy.stats import chi2
from torch import Tensor

from .modes import mode
from .priors import GaussianPrior
from .response import FLOOR_OF_NOISE, denoised, floored

NOT_HEARD = (
    "the run says so little of the curvature that the prior alone would explain it: make more"
    " steps, use a wider prior, or noise_aware.laplace."
)
CLIPPED_UNKNOWN = (
    "  NOT KNOWN   nothing that was released says how many gradients are clipped: where many are,"
    " the mean may be off by more than its width"
)
_SURELY = 1e-6


class NormalForm:
    """log p(ḡ, F̂ | θ).

    Args:
        point: θ̄, ``[d]``.
        gradient: ḡ, the observation of the gradient of −log p(data | θ) there.
        noise: V, ``[d, d]``.
        curvature: F̂, positive definite.
        shape: R, positive definite.
        curvature_std: v.
        reach: of Δ, in standard deviations √(ΔᵀHΔ) under an exact F̂: from there on its direction
            alone decides what M is.
    """

    def __init__(
        self,
        point: Tensor,
        gradient: Tensor,
        noise: Tensor,
        curvature: Tensor,
        shape: Tensor,
        curvature_std: float,
        reach: float = math.inf,
    ) -> None:
        self.centre, self.curvature, self.noise = point, curvature, noise
        self._gradient, self._shape, self._std = gradient, shape, curvature_std
        self._variance, self._reach = curvature_std**2, reach
        self._sure = curvature @ torch.linalg.solve(curvature + noise, curvature)
        self._half, inverse = roots(shape)
        # in coordinates in which R is the identity, M is a matrix with known eigenvalues, a
        # multiple of I, and a matrix of rank one
        self._values, vectors = torch.linalg.eigh(inverse @ (curvature + noise) @ inverse)
        self._rotated = inverse @ vectors
        self._vectors = vectors

    def log_likelihood(self, theta: Tensor) -> Tensor:
        """Up to a constant, ``[...]`` for θ ``[..., d]``; differentiable."""
        delta = self.centre - theta
        a = (self._gradient - delta @ self.curvature) @ self._rotated
        b = self._within_reach(delta) @ self._half @ self._vectors
        half = 0.5 * self._variance
        values = self._values + half * b.square().sum(-1, keepdim=True)
        aa, ab, bb = ((x * y / values).sum(-1) for x, y in ((a, a), (a, b), (b, b)))
        return -0.5 * (
            aa - half * ab**2 / (1 + half * bb) + values.log().sum(-1) + torch.log1p(half * bb)
        )

    def precision(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """H and Hθ̂ of the Gaussian likelihood exp(−½(θ−θ̂)ᵀH(θ−θ̂)) that is tangent to this
        one at ``theta``, M held fixed.
        """
        delta = self.centre - theta
        residual = self._gradient - self.curvature @ delta
        covariance = self.curvature + self.noise + self.of_curvature_error(delta)
        weighted = torch.linalg.solve(covariance, self.curvature).T
        precision = weighted @ self.curvature
        return (precision + precision.T) / 2, precision @ theta - weighted @ residual

    def plateau(self, prior: GaussianPrior) -> Tensor | None:
        """The mode, where the prior decides it and not the records. Far from θ̄ the curvature's
        error explains any gradient, and a prior that lies there would be the posterior, whatever
        the records say.

        Returns:
            None where the mode is no further from where it were if F̂ was exact than all but one
            posterior in 10⁶ is.
        """
        sure, product = self.precision(self.centre)
        total = sure + prior.matrix
        expected = torch.linalg.solve(total, product + prior.matrix @ prior.mean)

        def log_mass(theta: Tensor) -> float:
            density = self.log_likelihood(theta) + prior.log_density(theta)
            return float(density - (self.precision(theta)[0] + prior.matrix).logdet() / 2)

        found = max((mode(self, prior, start) for start in (self.centre, prior.mean)), key=log_mass)
        step = found - expected
        is_near = chi2.sf(float(step @ total @ step), len(step)) >= _SURELY
        return None if is_near else found

    def most_curvature(self, deviations: float) -> Tensor:
        """F̂ and so many standard deviations of its error, in every direction."""
        return self.curvature + deviations * self._std * self._shape

    def without_plateau(self, share_beyond: float = _SURELY) -> NormalForm:
        """The same near θ̄, with a reach of the distance from θ̄ to the mode under an exact F̂ and
        what such a share of posteriors exceeds.
        """
        explained = torch.linalg.solve(self.curvature + self.noise, self._gradient)
        reach = float(self._gradient @ explained) ** 0.5
        reach += float(chi2.isf(share_beyond, len(self.centre))) ** 0.5
        return NormalForm(
            self.centre, self._gradient, self.noise, self.curvature, self._shape, self._std, reach
        )

    def _within_reach(self, delta: Tensor) -> Tensor:
        if self._reach == math.inf:
            return delta
        squares = ((delta @ self._sure) * delta).sum(-1, keepdim=True)
        return delta * (self._reach / squares.clamp_min(self._reach**2).sqrt())

    def of_curvature_error(self, delta: Tensor) -> Tensor:
        """½v²(ΔᵀRΔ·R + RΔΔᵀR), the covariance of (F̂ − F)Δ for Δ within reach."""
        delta = self._within_reach(delta)
        moved = self._shape @ delta
        return 0.5 * self._variance * (delta @ moved * self._shape + torch.outer(moved, moved))


def roots(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The symmetric square root of a positive definite matrix, and its inverse."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.sqrt()) @ vectors.T, (vectors / values.sqrt()) @ vectors.T


def sure_part(
    estimate: Tensor, shape: Tensor, std: float, apart: Tensor | None = None
) -> tuple[Tensor, Tensor, float]:
    """A positive definite curvature from an estimate with the error R^{1/2}ER^{1/2}.

    In coordinates in which R is the identity, eigenvalues that stand out of the error's semicircle
    are freed of what it adds to them, λ = ℓ + d·std²/(2ℓ) (Benaych-Georges and Nadakuditi 2011);
    the others are shrunk to their mean as far as the error explains how they differ.

    Args:
        estimate: of the curvature.
        shape: R.
        std: on E's diagonal; 1/√2 of it off the diagonal.
        apart: a direction whose curvature may be another one than that of all others, which is
            not shrunk to theirs, ``[d]``.

    Returns:
        The curvature, and R and standard deviation of the error that is left.
    """
    half, inverse = roots(shape)
    whitened = inverse @ estimate @ inverse
    if apart is None or len(estimate) == 1:
        found, left = _shrunk(whitened, std)
        return half @ found @ half, half @ left @ half, std
    eye = torch.eye(len(estimate)).to(estimate)
    turn, _ = torch.linalg.qr(torch.cat([(half @ apart)[:, None], eye], 1))  # that one first
    found, left = turn.T @ whitened @ turn, eye.clone()
    found[1:, 1:], left[1:, 1:] = _shrunk(found[1:, 1:], std)
    # what it has in common with the others, as far as the error does not explain that
    square = float(found[0, 1:].square().sum())
    kept = max(0.0, 1 - std**2 * (len(found) - 1) / (2 * square)) if square > 0 else 0.0
    found[0, 1:] *= kept
    found[1:, 0] *= kept
    found = floored(turn @ found @ turn.T, FLOOR_OF_NOISE * std)
    return half @ found @ half, half @ turn @ left @ turn.T @ half, std


def _shrunk(whitened: Tensor, std: float) -> tuple[Tensor, Tensor]:
    """What is left of an estimate with the error E, and R of the error that is left."""
    values, vectors = torch.linalg.eigh(whitened)
    edge, count, before = std * math.sqrt(2 * len(values)), len(values), 0
    while count not in (before, 1):  # of those that do not stand out
        before, count = count, int((values[:count] <= values[:count].mean() + edge).sum())
    rest = vectors[:, :count]
    kept, left = denoised(rest.T @ whitened @ rest, std)
    level = float(kept.trace()) / count
    kept = floored(kept, max(0.02 * level, 0.1 * left))
    out = values[count:] - level
    freed = level + (out + (out.square() - edge**2).clamp_min(0.0).sqrt()) / 2
    found = (vectors[:, count:] * freed) @ vectors[:, count:].T + rest @ kept @ rest.T
    share = torch.ones(len(values), dtype=values.dtype)
    share[:count] = left / std
    return found, (vectors * share) @ vectors.T
