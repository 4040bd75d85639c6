"""Pyro models as posteriors. Only :class:`~torch_dpbayes.density.RecordDensity` reads records."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.distributions import transforms

from ..density import InvalidPoint, Prior, RecordDensity, clipped_ratio_sum
from ..density.pyro_runs import using_pyro
from ..errors import CertificateError
from .linear_model import ROUNDING
from .models import Data, Density, Limits, Model, gradient_of

# log likelihood where the model cannot be evaluated: finite, because samplers may fail at infinity
_IMPOSSIBLE = -1e30


class PyroModel(Model):
    """The posterior of a Pyro model's continuous latents, in unconstrained space."""

    def __init__(self, model: Callable[..., Any], *, count_is_public: bool = True) -> None:
        self._model, self._count_is_public = model, count_is_public
        self._prior: Prior | None = None
        self._wants_unconstrained: str | None = None

    def require_unconstrained(self, certificate: str) -> None:
        self._wants_unconstrained = certificate  # checked when the latents are known

    def prepare(self, data: Data) -> Data:
        """The model on its data, after checks on synthetic rows of the data's shapes."""
        with using_pyro:
            density = RecordDensity(self._model, data, count_is_public=self._count_is_public)
            prior = density.prior
            prior.sample()  # before the charge, refuse a prior that gives no start
        if self._wants_unconstrained is not None:
            for name, transform in prior.transforms.items():
                if not _is_identity(transform):
                    raise CertificateError(
                        f"{self._wants_unconstrained} needs latents without constraints, but"
                        f" {name!r} has one: transform a real latent in the model, or use Bounded."
                    )
        self._prior = prior
        return (density,)

    def num_records(self, data: Data) -> int:
        return int(data[0].num_records)

    def target(self, data: Data, limits: Limits) -> Density:
        """The target density, and a draw from the prior as the start. Its randomness comes from the
        operating system.
        """
        density: RecordDensity = data[0]
        prior, (tempering, max_grad_norm, interval, lipschitz) = density.prior, limits
        max_norm = (1 - ROUNDING) * max_grad_norm
        reference: dict[str, tuple[Tensor, Tensor]] = {}  # the first point and its terms

        def likelihood(point: Tensor) -> tuple[float, Tensor]:
            terms = density.log_likelihoods(point).to(torch.float64)
            if interval is None:
                # terms have no bound: with one large term, the sum would lose the others' digits
                here, before = reference.setdefault("first", (point, terms))
                reach = lipschitz * float(torch.linalg.vector_norm((point - here).double()))
                value = clipped_ratio_sum(before, terms, reach)
                return value, density.clipped_gradient_sum(point, max_norm)
            low, high = interval
            inside = (terms > low) & (terms < high)
            clipped = terms.nan_to_num(nan=low, posinf=high, neginf=low).clamp(low, high)
            return float(clipped.sum()), density.clipped_gradient_sum(point, math.inf, inside)

        def potential(theta: Tensor) -> Tensor:
            point = theta.detach().to(prior.dtype)
            value, slope = prior.log_density_and_gradient(point)
            try:
                more, more_slope = likelihood(point)
            except InvalidPoint:  # also for synthetic rows: the prior alone drives the chain back
                more, more_slope = _IMPOSSIBLE, torch.zeros_like(slope)
            gradient = -(slope + tempering * more_slope).to(theta.dtype)
            # moved is 0, and has the computed gradient
            moved = gradient @ (theta - theta.detach())
            return moved - (value + tempering * more)

        def gradient(theta: Tensor) -> Tensor:
            point = theta.to(prior.dtype)
            _, slope = prior.log_density_and_gradient(point)
            with suppress(InvalidPoint):
                slope = slope + tempering * density.clipped_gradient_sum(point, max_norm)
            return -slope.to(torch.float64)

        with using_pyro:
            start = prior.sample().to(torch.float64)
        return Density(start, potential, gradient if interval is None else gradient_of(potential))

    def release(self, theta: Tensor) -> dict[str, Tensor]:
        """Values by site, in the supports of the model's distributions."""
        assert self._prior is not None
        values = self._prior.constrain(theta.to(self._prior.dtype))
        return {name: value.detach().clone() for name, value in values.items()}


def _is_identity(transform: Any) -> bool:
    if isinstance(transform, transforms.IndependentTransform):
        return _is_identity(transform.base_transform)
    if type(transform).__name__ == "_InverseTransform":
        return _is_identity(transform.inv)
    return isinstance(transform, transforms.ComposeTransform) and not transform.parts
