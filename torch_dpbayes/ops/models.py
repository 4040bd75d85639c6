"""What certificates need from a model, and samplers from a density."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Data = tuple[Any, ...]  # the user's arguments, or what Model.prepare makes of them


class Limits(NamedTuple):
    """The weight of every record's likelihood, and the bounds of its term."""

    tempering: float
    max_grad_norm: float = math.inf  # clip bound of its gradient
    log_likelihood_range: tuple[float, float] | None = None  # clip range of the log likelihood
    lipschitz: float = math.inf  # asserted: Lipschitz constant of the log likelihood


class Density(NamedTuple):
    """∝ exp(−U(θ)) over flat vectors θ in float64, with a bounded term for every record."""

    start: Tensor  # [d], chosen without the data
    potential: Callable[[Tensor], Tensor]  # U up to a constant, differentiable
    gradient: Callable[[Tensor], Tensor]  # ∇U, [d]


class Constants(NamedTuple):
    """Constants of a model that hold for every data set, with gradients clipped."""

    lipschitz: float  # L: the largest norm of one record's clipped gradient
    strength: float  # λ: −log prior is λ-strongly convex, and all losses are convex
    prior_smoothness: float
    record_smoothness: float  # smoothness of one record's clipped loss


class Model(ABC):
    """A prior and a likelihood (one term per record) on flat vectors in unconstrained space."""

    @abstractmethod
    def prepare(self, data: Data) -> Data:
        """The data in the form that the other methods need. May raise an error because of shapes,
        never because of values.
        """

    def num_records(self, data: Data) -> int:
        return len(data[0])

    @abstractmethod
    def target(self, data: Data, limits: Limits) -> Density:
        """∝ prior · Π likelihood^tempering."""

    @abstractmethod
    def release(self, theta: Tensor) -> dict[str, Tensor]:
        """The draw as the user's named, constrained values."""

    def require_unconstrained(self, certificate: str) -> None:  # noqa: B027
        """Raises, here or in :meth:`prepare`, unless the support of every latent is ℝ."""

    def derived_constants(self, max_grad_norm: float = 1.0) -> Constants | None:
        """The certificate's constants if gradients are clipped to ``max_grad_norm``; None if the
        caller must assert them.
        """
        return None


def gradient_of(potential: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """∇U by automatic differentiation."""

    def gradient(theta: Tensor) -> Tensor:
        with torch.enable_grad():
            theta = theta.detach().requires_grad_()
            (result,) = torch.autograd.grad(potential(theta), theta)
        return result

    return gradient
