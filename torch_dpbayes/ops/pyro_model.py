"""Pyro models as posteriors. What the records say is read by
:class:`~torch_dpbayes.density.RecordDensity`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributions import transforms

from ..density import InvalidPoint, Prior, RecordDensity
from ..errors import CertificateError
from .models import using_pyro

# log likelihood of what cannot happen: finite, for a sampler may fail at infinity, and one record
# would decide that
_IMPOSSIBLE = -1e30
_ROUNDING = 1e-6  # clipped gradients are shortened by this share, which covers float32


class PyroModel:
    """A Pyro model with one data plate, over its continuous latents in unconstrained space. Only
    the prior, which is made without the data, is kept between calls.
    """

    def __init__(self, model: Callable[..., Any], *, count_is_public: bool = True) -> None:
        self._model = model
        self._count_is_public = count_is_public
        self._prior: Prior | None = None
        self._wants_unconstrained: str | None = None

    def require_unconstrained(self, certificate: str) -> None:
        """Remembered until the latents are known."""
        self._wants_unconstrained = certificate

    def derived_constants(self, max_grad_norm: float = 1.0) -> None:
        """Nobody knows them."""

    def prepare(self, data: tuple[Any, ...]) -> tuple[Any, ...]:
        """The model on its data, after checks on synthetic rows of the data's shapes."""
        with using_pyro:
            density = RecordDensity(self._model, data, count_is_public=self._count_is_public)
            density.prior.sample()  # refuses, before the charge, a prior that no chain starts from
        prior = density.prior
        if self._wants_unconstrained is not None:
            for name, transform in prior.transforms.items():
                if not _is_identity(transform):
                    raise CertificateError(
                        f"{self._wants_unconstrained} needs latents on all of R, and {name!r} is"
                        " not: transform a real latent in the model, or use Bounded."
                    )
        self._prior = prior
        return (density,)

    def num_records(self, data: tuple[Any, ...]) -> int:
        """The number of rows."""
        return int(data[0].num_records)

    def target(
        self, data: tuple[Any, ...], *, tempering: float, max_grad_norm: float
    ) -> PyroTarget:
        """∝ prior · Π likelihood^tempering."""
        return PyroTarget(data[0], tempering, max_grad_norm)

    def release(self, theta: Tensor) -> dict[str, Tensor]:
        """Values by site, in the supports of the model's distributions."""
        assert self._prior is not None
        values = self._prior.constrain(theta.to(self._prior.dtype))
        return {name: value.detach().clone() for name, value in values.items()}


class PyroTarget:
    """U(θ) = −log p(θ) − ρ Σ log p(x_i | θ); ``max_grad_norm`` clips records' gradients, and
    infinity leaves them.
    """

    def __init__(self, density: RecordDensity, tempering: float, max_grad_norm: float) -> None:
        self._density, self._tempering = density, tempering
        self._max_norm = (1 - _ROUNDING) * max_grad_norm
        with using_pyro:
            self._start = density.prior.sample()

    @property
    def start(self) -> Tensor:
        """A draw from the prior, by the operating system's entropy."""
        return self._start.to(torch.float64)

    def gradient(self, theta: Tensor) -> Tensor:
        """∇U with clipped gradients."""
        point = theta.to(self._density.prior.dtype)
        _, gradient = self._density.prior.log_density_and_gradient(point)
        try:
            gradient = gradient + self._tempering * self._density.clipped_gradient_sum(
                point, self._max_norm
            )
        except InvalidPoint:  # of synthetic rows: the prior alone leads back
            pass
        return -gradient.to(torch.float64)

    def potential(self, theta: Tensor) -> Tensor:
        """U, differentiable once, with clipped gradients."""

        def likelihood(point: Tensor) -> tuple[float, Tensor]:
            terms = self._density.log_likelihoods(point).to(torch.float64)
            finite = terms.nan_to_num(nan=0.0, posinf=-_IMPOSSIBLE, neginf=_IMPOSSIBLE)
            return float(finite.sum()), self._density.clipped_gradient_sum(point, self._max_norm)

        return self._differentiable(theta, likelihood)

    def clipped_potential(self, theta: Tensor, low: float, high: float) -> Tensor:
        """U with every log likelihood clipped into [low, high], what is not a number to
        ``low``.
        """

        def likelihood(point: Tensor) -> tuple[float, Tensor]:
            terms = self._density.log_likelihoods(point)
            inside = (terms > low) & (terms < high)
            clipped = terms.nan_to_num(nan=low, posinf=high, neginf=low).clamp(low, high)
            return (
                float(clipped.sum(dtype=torch.float64)),
                self._density.gradient_sum(point, inside),
            )

        return self._differentiable(theta, likelihood)

    def _differentiable(
        self, theta: Tensor, likelihood: Callable[[Tensor], tuple[float, Tensor]]
    ) -> Tensor:
        point = theta.detach().to(self._density.prior.dtype)
        value, gradient = self._density.prior.log_density_and_gradient(point)
        try:
            more, slope = likelihood(point)
        except InvalidPoint:
            more, slope = _IMPOSSIBLE, torch.zeros_like(gradient)
        gradient = -(gradient + self._tempering * slope).to(theta.dtype)
        result: Tensor = _WithGradient.apply(theta, -(value + self._tempering * more), gradient)
        return result


class _WithGradient(torch.autograd.Function):
    """A number whose gradient was computed elsewhere."""

    @staticmethod
    def forward(ctx: Any, theta: Tensor, value: float, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return theta.new_tensor(value)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return outer[0] * gradient, None, None


def _is_identity(transform: Any) -> bool:
    if isinstance(transform, transforms.IndependentTransform):
        return _is_identity(transform.base_transform)
    if type(transform).__name__ == "_InverseTransform":
        return _is_identity(transform.inv)
    return isinstance(transform, transforms.ComposeTransform) and not transform.parts
