"""What a certificate asks of a model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from .langevin import Target

Loss = Callable[[Any, Any], Tensor]  # (output, targets) -> one number a record

# Pyro keeps the effects that are in force in one list for all threads, and torch the global
# generator: one draw at a time may use them.
using_pyro = threading.RLock()


class Model(Protocol):
    """A prior and a likelihood with one term a record, over flat vectors in an unconstrained
    space.
    """

    def prepare(self, data: tuple[Any, ...]) -> tuple[Any, ...]:
        """Checks the shapes of the data, and brings them into the form that the other methods
        take. May raise on shapes, never on values.
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
