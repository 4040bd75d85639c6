"""Priors as the steps and the samplers use them: free of data."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from ..mcmc.density import Prior

_DRAWS = 200


class LatentPrior(Protocol):
    """A proper density of a flat, unconstrained vector."""

    def log_density(self, theta: Tensor) -> Tensor:
        """log p(θ) up to a constant, ``[...]`` for ``[..., d]``; differentiable."""

    def gaussian(self) -> GaussianPrior:
        """A Gaussian of about this place and width."""


class GaussianPrior:
    """N(mean, diag(1/precision)) on a flat vector.

    Args:
        mean: ``[d]`` in float64.
        precision: ``[d]``, positive.
    """

    def __init__(self, mean: Tensor, precision: Tensor) -> None:
        self.mean, self.precision = mean, precision

    @property
    def dimension(self) -> int:
        """d."""
        return len(self.mean)

    def log_density(self, theta: Tensor) -> Tensor:
        """Up to a constant, ``[...]`` for ``[..., d]``; differentiable."""
        return -0.5 * (self.precision * (theta - self.mean).square()).sum(-1)

    def gaussian(self) -> GaussianPrior:
        """Itself."""
        return self


class PyroPrior:
    """The prior of a Pyro model's latents in unconstrained space, Jacobians included."""

    def __init__(self, prior: Prior) -> None:
        self._prior = prior
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
        """From quantiles of draws, coordinate by coordinate: tails of any weight do no harm."""
        if self._gaussian is None:
            draws = self._prior.samples(_DRAWS).to("cpu", torch.float64)
            low, middle, high = torch.quantile(
                draws, torch.tensor([0.1587, 0.5, 0.8413], dtype=torch.float64), dim=0
            )
            self._gaussian = GaussianPrior(middle, ((high - low) / 2).clamp_min(1e-9) ** -2)
        return self._gaussian


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
