"""Pyro models and torch modules as posteriors. What the records say is read by
:class:`~torch_dpbayes.density.RecordDensity`.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pyro
import torch
from pyro.distributions import Normal
from torch import Tensor, nn
from torch.distributions import transforms
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from ..density import InvalidPoint, Prior, RecordDensity, UnfitModel
from ..errors import ArgumentError, ArgumentTypeError, CertificateError
from ..noise import check_positive
from ..per_sample.model_check import check_layers
from .models import Loss, using_pyro

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

    def clipped_potential(self, theta: Tensor, low: float, high: float, relative: bool) -> Tensor:
        """U with every log likelihood clipped into [low, high], what is not a number to ``low``;
        ``relative``: its difference to that at the start.
        """

        def likelihood(point: Tensor) -> tuple[float, Tensor]:
            terms = self._density.log_likelihoods(point)
            if relative:
                terms = terms - self._density.log_likelihoods(self._start)
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


# --- torch modules --------------------------------------------------------------------------------


def model_of_module(module: nn.Module, loss: Loss, prior_std: float) -> ModuleModel:
    """The Pyro model with N(0, prior_std²) priors on the trainable parameters, and −log p(y |
    x) = loss(module(x), y).
    """
    require_module(module)
    check_positive("prior_std", prior_std)
    copy = deepcopy(module).train()
    for layer in copy.modules():  # frozen statistics stay, as the copy will run in eval mode
        if isinstance(layer, _BatchNorm) and not any(p.requires_grad for p in layer.parameters()):
            layer.eval()
    check_layers(copy)
    copy.eval()  # dropout is no part of a posterior
    latents = {name: p.detach() for name, p in copy.named_parameters() if p.requires_grad}
    if not latents:
        raise ArgumentError("every parameter of the module is frozen: there is nothing to sample")
    for values in latents.values():  # which nothing reads, and which may come from the records
        values.zero_()
    return ModuleModel(copy, latents, loss, prior_std)


def require_module(module: Any) -> None:
    """Refuses what is no module, such as the class of one."""
    if not isinstance(module, nn.Module):
        got = f"the class {module.__name__}" if isinstance(module, type) else type(module).__name__
        raise ArgumentTypeError(
            f"module must be an instance of a torch.nn.Module, as torch.nn.Linear(3, 2); got {got}."
        )


class ModuleModel:
    """A Pyro model of a module's trainable parameters ``latents``, which may be pickled."""

    def __init__(
        self, module: nn.Module, latents: dict[str, Tensor], loss: Loss, prior_std: float
    ) -> None:
        self._module, self._latents = module, latents
        self._loss, self._prior_std = loss, prior_std

    def __call__(self, inputs: Any, targets: Any) -> None:
        """One run of the model."""
        values = {}
        for name, p in self._latents.items():
            prior = Normal(torch.zeros_like(p), torch.full_like(p, self._prior_std))
            values[name] = pyro.sample(name, prior.to_event(p.dim()))
        losses = self._loss(functional_call(self._module, values, (inputs,)), targets)
        if not isinstance(losses, Tensor) or losses.shape != targets.shape[:1]:
            raise UnfitModel(
                "the loss must return one number a record, as"
                ' functools.partial(torch.nn.functional.cross_entropy, reduction="none").'
            )
        with pyro.plate("data", len(inputs)):
            pyro.factor("log_likelihood", -losses)
