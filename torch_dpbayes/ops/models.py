"""What a certificate asks of a model, and what a sampler asks of a density."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

# Pyro keeps active effects in one list for all threads, and torch its global generator: one draw
# at a time may use them.
using_pyro = threading.RLock()


class Target(Protocol):
    """A density ∝ exp(−U(θ)) over flat vectors θ in float64, with every record's part bounded."""

    @property
    def start(self) -> Tensor:
        """Where chains begin, ``[d]``: chosen without the data."""

    def gradient(self, theta: Tensor) -> Tensor:
        """∇U(θ), ``[d]``."""

    def potential(self, theta: Tensor) -> Tensor:
        """U(θ) up to a constant, differentiable; for samplers with an accept step."""

    def clipped_potential(self, theta: Tensor, low: float, high: float) -> Tensor:
        """U(θ) with every log likelihood clipped into [low, high], differentiable."""


class Density(NamedTuple):
    """∝ exp(−U(θ)) over flat vectors in float64, as samplers see it."""

    start: Tensor  # [d], chosen without the data
    potential: Callable[[Tensor], Tensor]  # differentiable
    gradient: Callable[[Tensor], Tensor]


class Constants(NamedTuple):
    """Constants of a model that hold for every data set, with gradients clipped."""

    lipschitz: float  # L: the largest norm of one record's clipped gradient
    strength: float  # λ: −log prior is λ-strongly convex, and all losses are convex
    prior_smoothness: float
    record_smoothness: float  # of one record's clipped loss


class Model(Protocol):
    """A prior and a likelihood with one term a record, over flat vectors in an unconstrained
    space.
    """

    def prepare(self, data: tuple[Any, ...]) -> tuple[Any, ...]:
        """The data in the form that the other methods take. May raise on shapes, never on
        values.
        """

    def num_records(self, data: tuple[Any, ...]) -> int:
        """How many records there are."""

    def target(self, data: tuple[Any, ...], *, tempering: float, max_grad_norm: float) -> Target:
        """∝ prior · Π likelihood^tempering, every record's gradient clipped to
        ``max_grad_norm`` before tempering.
        """

    def release(self, theta: Tensor) -> dict[str, Tensor]:
        """The draw as the user's named, constrained values."""

    def require_unconstrained(self, certificate: str) -> None:
        """Raises unless every latent lives on all of ℝ."""

    def derived_constants(self, max_grad_norm: float = 1.0) -> Constants | None:
        """The constants with gradients clipped to ``max_grad_norm``; None where a caller has to
        assert them.
        """


class LinearPredictor(nn.Module):
    """Linear predictors of clipped features, as a module of the parameter ``weights``.

    Args:
        shape: of the weights, ``[d]`` for one predictor a record, ``[K, d]`` for K.
        features: clips rows ``[n, d]``.
    """

    def __init__(self, shape: tuple[int, ...], features: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
        self._features = features

    def forward(self, x: Tensor) -> Tensor:
        x = self._features(x)
        return x @ self.weights.to(x).mT if self.weights.dim() > 1 else x @ self.weights.to(x)


def gradient_of(potential: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """∇U by automatic differentiation."""

    def gradient(theta: Tensor) -> Tensor:
        with torch.enable_grad():
            theta = theta.detach().requires_grad_()
            (result,) = torch.autograd.grad(potential(theta), theta)
        return result

    return gradient
