"""What a certificate asks of a model."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from .langevin import Target


class Model(Protocol):
    """A prior and a likelihood with one term a record, over flat vectors in an unconstrained space."""

    def num_records(self, data: tuple[Any, ...]) -> int:
        """Checks the shapes of the data and returns how many records they hold. May raise on shapes, never on values."""

    def target(self, data: tuple[Any, ...], *, tempering: float, max_grad_norm: float) -> Target:
        """∝ prior · Π likelihood^tempering, every record's gradient clipped to ``max_grad_norm`` before tempering."""

    def release(self, theta: Tensor) -> dict[str, Tensor]:
        """The draw as the user's named, constrained values."""

    def require_unconstrained(self, certificate: str) -> None:
        """Raises unless every latent lives on all of ℝ."""
