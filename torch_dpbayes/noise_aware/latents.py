"""The latents of a model as the engine uses them: a vector θ, its prior, and where to begin."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..density import Prior
from .noncentred import NonCentred, is_hierarchical

_DRAWS = 500  # of a prior, of which quantiles are taken
_STEP = 1e-4  # of a prior's deviation, by which its gradient is differenced
# of a curvature, in units of a prior's deviations: a prior with heavy tails has negative curvatures
_LEAST_CURVATURE = 0.1
_NEWTON_STEPS = 20


class Latents:
    """The prior of a model's latents in unconstrained space, θ ``[D]``, in float64.

    Args:
        prior: of the model.
        read: numbers of the coordinates that records depend on, ``[d]``.

    **Privacy.** A function of the prior alone.
    """

    def __init__(self, prior: Prior, read: Tensor) -> None:
        self.prior, self.read = prior, read
        self.is_hierarchical = is_hierarchical(prior)
        self.draws = self.sample(_DRAWS)
        low, middle, high = torch.quantile(
            self.draws, torch.tensor([0.1587, 0.5, 0.8413], dtype=torch.float64), dim=0
        )
        self.median, self.stddev = middle, ((high - low) / 2).clamp_min(1e-9)

    @property
    def dimension(self) -> int:
        """D."""
        return self.prior.dimension

    def sample(self, count: int) -> Tensor:
        """Draws of θ, ``[count, D]``."""
        return self.prior.samples(count).to("cpu", torch.float64)

    @cached_property
    def start(self) -> Tensor:
        """The mode of the prior near its median; of a hierarchical one the median."""
        theta = self.median
        if self.is_hierarchical:
            return theta
        for _ in range(_NEWTON_STEPS):
            slope, precision = self._local(theta, torch.arange(self.dimension))
            step = torch.linalg.solve(precision, slope)
            theta = theta + step
            if float((step / self.stddev).abs().max()) < 1e-6:
                break
        outside = ((theta - self.median) / self.stddev).abs() > 3  # a mode at infinity
        return torch.where(outside, self.median, theta)

    @cached_property
    def _gaussian(self) -> tuple[Tensor, Tensor]:
        """Mean and precision of the read coordinates of a hierarchical prior."""
        scored = self.draws[:, self.read]
        correlations = _correlations(scored)
        covariance = self.stddev[self.read][:, None] * correlations * self.stddev[self.read]
        return self.median[self.read], torch.linalg.inv(covariance)

    def slope_and_precision(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """∇ log p(θ) of the read coordinates and a positive definite −∇² of it; of a hierarchical
        prior those of the Gaussian with its quantiles and rank correlations.
        """
        if self.is_hierarchical:
            mean, precision = self._gaussian
            return -precision @ (theta[self.read] - mean), precision
        return self._local(theta, self.read)

    def _local(self, theta: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        width = self.stddev[chosen]
        moved = theta.repeat(2 * len(chosen) + 1, 1)
        place = torch.arange(len(chosen))
        moved[place, chosen] += _STEP * width
        moved[len(chosen) + place, chosen] -= _STEP * width
        _, gradients = self.values_and_gradients(moved)
        gradients = gradients[:, chosen] * width
        up, down, slope = gradients.split([len(chosen), len(chosen), 1])
        curvature = (down - up) / (2 * _STEP)
        values, vectors = torch.linalg.eigh((curvature + curvature.T) / 2)
        positive = (vectors * values.clamp_min(_LEAST_CURVATURE)) @ vectors.T
        return slope[0] / width, positive / width[:, None] / width

    def log_density(self, theta: Tensor) -> Tensor:
        """log p(θ) of every row, Jacobians included, ``[m]``; differentiable."""
        if theta.requires_grad:
            result: Tensor = _LogDensities.apply(theta, self)
            return result
        return self.prior.log_densities(self._own(theta)).to("cpu", torch.float64)

    def values_and_gradients(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """log p(θ) of every row and its gradients, ``[m]`` and ``[m, D]``."""
        values, gradients = self.prior.log_densities_and_gradients(self._own(theta))
        return values.to("cpu", torch.float64), gradients.to("cpu", torch.float64)

    def _own(self, theta: Tensor) -> Tensor:
        return theta.detach().to(self.prior.device, self.prior.dtype)

    @cached_property
    def _non_centred(self) -> NonCentred:
        return NonCentred(self.prior)

    def outer(self, xi: Tensor) -> tuple[Tensor, Tensor]:
        """θ and log |∂θ/∂ξ| for non-centred coordinates ξ, ``[m, D]`` and ``[m]``."""
        if not self.is_hierarchical:
            return xi, xi.new_zeros(len(xi))
        theta, log_jacobian = self._non_centred.outer(xi.to(self.prior.device, self.prior.dtype))
        return theta.to(xi), log_jacobian.to(xi)

    def inner(self, theta: Tensor) -> Tensor:
        """The inverse of :meth:`outer`."""
        if not self.is_hierarchical:
            return theta
        return self._non_centred.inner(self._own(theta)).to(theta)

    def constrain(self, theta: Tensor) -> dict[str, Tensor]:
        """Values of the sites for one θ ``[D]``."""
        return self.prior.constrain(theta.to(self.prior.device, self.prior.dtype))

    def unconstrain(self, values: dict[str, Any]) -> tuple[Tensor, float]:
        """θ for values of every site, and the log Jacobian determinant of the map there."""
        moved, total = {}, 0.0
        for name, transform in self.prior.transforms.items():
            value = torch.as_tensor(values[name]).to(self.prior.device, self.prior.dtype)
            moved[name] = transform(value)
            total += float(transform.log_abs_det_jacobian(value, moved[name]).sum())
        return self.prior.flatten(moved).to("cpu", torch.float64), total


class _LogDensities(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, theta: Tensor, latents: Latents) -> Tensor:
        values, gradients = latents.values_and_gradients(theta)
        ctx.save_for_backward(gradients.to(theta))
        return values.to(theta)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None]:
        (gradients,) = ctx.saved_tensors
        return outer[0][:, None] * gradients, None


def _correlations(draws: Tensor) -> Tensor:
    """Of the normal scores of draws ``[m, d]``, shrunk to none as far as chance explains them."""
    count, size = draws.shape
    ranks = draws.argsort(0).argsort(0).to(torch.float64)
    found = torch.corrcoef(torch.special.ndtri((ranks + 0.5) / count).T).reshape(size, size)
    eye = torch.eye(size, dtype=torch.float64)
    square = float((found - eye).square().sum())
    chance = min(1.0, size * (size - 1) / count / square) if square else 1.0
    return (1 - chance) * found + chance * eye
