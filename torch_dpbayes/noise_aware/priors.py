"""Priors as the steps and the samplers use them: free of data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from ..mcmc.density import NonCentred, Prior, is_exchangeable, is_hierarchical

_DRAWS, _DRAWS_WITH_CORRELATIONS = 200, 500


class Frame(Protocol):
    """Other coordinates ξ of the same vectors."""

    def outer(self, xi: Tensor) -> tuple[Tensor, Tensor]:
        """θ ``[m, d]`` and log |∂θ/∂ξ| ``[m]``; differentiable."""

    def inner(self, theta: Tensor) -> Tensor:
        """ξ, ``[m, d]``."""


class LatentPrior(Protocol):
    """A proper density of a flat, unconstrained vector."""

    frames: Sequence[Frame]
    """Further coordinates in which a sampler should move."""

    def log_density(self, theta: Tensor) -> Tensor:
        """log p(θ) up to a constant, ``[...]`` for ``[..., d]``; differentiable."""

    def gaussian(self) -> GaussianPrior:
        """A Gaussian of about this place and width."""

    def is_alike(self, places: Tensor) -> bool:
        """Whether the K of coordinates ``[K, m]`` have the same prior."""


class GaussianPrior:
    """N(mean, diag(1/precision)) on a flat vector, or N(mean, covariance).

    Args:
        mean: ``[d]`` in float64.
        precision: ``[d]``, positive: 1 over the variance of each coordinate.
        covariance: ``[d, d]``, whose diagonal is 1/precision. None: that diagonal alone.
    """

    frames: Sequence[Frame] = ()

    def __init__(self, mean: Tensor, precision: Tensor, covariance: Tensor | None = None) -> None:
        self.mean, self.precision = mean, precision
        self._covariance = covariance

    @cached_property
    def matrix(self) -> Tensor:
        """The inverse of the covariance, ``[d, d]``."""
        if self._covariance is None:
            return torch.diag(self.precision)
        return torch.cholesky_inverse(self.root)

    @cached_property
    def root(self) -> Tensor:
        """R of the covariance RRᵀ, ``[d, d]``."""
        if self._covariance is None:
            return torch.diag(self.precision.rsqrt())
        return torch.linalg.cholesky(self._covariance)

    def of(self, chosen: Tensor) -> GaussianPrior:
        """That of some coordinates."""
        some = None if self._covariance is None else self._covariance[chosen][:, chosen]
        return GaussianPrior(self.mean[chosen], self.precision[chosen], some)

    @property
    def dimension(self) -> int:
        """d."""
        return len(self.mean)

    @property
    def is_diagonal(self) -> bool:
        """Whether coordinates are independent."""
        return self._covariance is None

    def is_alike(self, places: Tensor) -> bool:
        """Whether independent coordinates ``[K, m]`` have the same prior for all K."""
        mean, precision = self.mean[places], self.precision[places]
        same = bool((mean == mean[:1]).all()) and bool((precision == precision[:1]).all())
        return same and self.is_diagonal

    @property
    def covariance(self) -> Tensor:
        """``[d, d]``."""
        return torch.diag(1 / self.precision) if self._covariance is None else self._covariance

    def log_density(self, theta: Tensor) -> Tensor:
        """Up to a constant, ``[...]`` for ``[..., d]``; differentiable."""
        apart = theta - self.mean
        if self._covariance is None:
            return -0.5 * (self.precision * apart.square()).sum(-1)
        return -0.5 * ((apart @ self.matrix) * apart).sum(-1)

    def gaussian(self) -> GaussianPrior:
        """Itself."""
        return self


class PyroPrior:
    """The prior of a Pyro model's latents in unconstrained space, Jacobians included."""

    def __init__(self, prior: Prior) -> None:
        self._prior = prior
        self.frames: Sequence[Frame] = (_NonCentredFrame(prior),) if is_hierarchical(prior) else ()
        self._gaussian: GaussianPrior | None = None

    def log_density(self, theta: Tensor) -> Tensor:
        """log p(θ), ``[...]`` for ``[..., d]``; differentiable."""
        if theta.dim() == 1:
            return self.log_density(theta[None])[0]
        if not theta.requires_grad:
            return self._prior.log_densities(theta.to(self._prior.device, self._prior.dtype)).to(
                theta
            )
        result: Tensor = _LogDensities.apply(theta, self._prior)
        return result

    def gaussian(self) -> GaussianPrior:
        """From quantiles of draws, coordinate by coordinate: tails of any weight do no harm; of a
        hierarchical model with the correlations of their normal scores.
        """
        if self._gaussian is None:
            count = _DRAWS_WITH_CORRELATIONS if self.frames else _DRAWS
            draws = self._prior.samples(count).to("cpu", torch.float64)
            low, middle, high = torch.quantile(
                draws, torch.tensor([0.1587, 0.5, 0.8413], dtype=torch.float64), dim=0
            )
            std = ((high - low) / 2).clamp_min(1e-9)
            covariance = None
            if self.frames:
                covariance = std[:, None] * _correlations(draws) * std
            self._gaussian = GaussianPrior(middle, std**-2, covariance)
        return self._gaussian

    def is_alike(self, places: Tensor) -> bool:
        """Whether the K of coordinates ``[K, m]`` have the same prior: that of the model itself, as
        quantiles of draws always differ.
        """
        return is_exchangeable(self._prior, places)


def _correlations(draws: Tensor) -> Tensor:
    """Of the normal scores of ``[m, d]`` draws, shrunk to none as far as chance explains them."""
    count, size = draws.shape
    ranks = draws.argsort(0).argsort(0).to(torch.float64)
    found = torch.corrcoef(torch.special.ndtri((ranks + 0.5) / count).T).reshape(size, size)
    eye = torch.eye(size, dtype=torch.float64)
    square = float((found - eye).square().sum())
    chance = min(1.0, size * (size - 1) / count / square) if square else 1.0
    return (1 - chance) * found + chance * eye


class _NonCentredFrame:
    """Non-centred coordinates, in the surrogates' dtype and where they lie."""

    def __init__(self, prior: Prior) -> None:
        self._prior, self._non_centred = prior, NonCentred(prior)

    def outer(self, xi: Tensor) -> tuple[Tensor, Tensor]:
        theta, log_jacobian = self._non_centred.outer(xi.to(self._prior.device, self._prior.dtype))
        return theta.to(xi), log_jacobian.to(xi)

    def inner(self, theta: Tensor) -> Tensor:
        return self._non_centred.inner(theta.to(self._prior.device, self._prior.dtype)).to(theta)


class _LogDensities(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, theta: Tensor, prior: Prior) -> Tensor:
        values, gradients = prior.log_densities_and_gradients(
            theta.detach().to(prior.device, prior.dtype)
        )
        ctx.save_for_backward(gradients.to(theta))
        return values.to(theta)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None]:
        (gradients,) = ctx.saved_tensors
        return outer[0][:, None] * gradients, None
