"""Where a penalty kernel goes from here: a random walk, or a proposal of the user's."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from ..accounting import events
from ..errors import ArgumentError, ArgumentTypeError
from .checks import check_positive


class Proposal(Protocol):
    """Where to go from here.

    Attributes:
        event: what one call of :meth:`propose` releases about the data; ``NoOpDpEvent()`` for a
            proposal that does not look at them. It is charged before the call.
    """

    @property
    def event(self) -> events.DpEvent: ...

    def propose(self, params: dict[str, Tensor]) -> tuple[dict[str, Tensor], float]:
        """θ' by site, in unconstrained space, and log q(θ | θ') − log q(θ' | θ), from what
        ``event`` pays for.
        """
        ...


class Moves:
    """The two arguments that say where to go: exactly one of them is given.

    Args:
        proposal_scale: of a Gaussian random walk with a public covariance: a number, (dimension,)
            or lower triangular (dimension, dimension).
        proposal: a :class:`Proposal`.
    """

    def __init__(self, proposal_scale: float | Tensor | None, proposal: Proposal | None) -> None:
        if (proposal is None) == (proposal_scale is None):
            raise ArgumentError(
                "give either proposal_scale, the standard deviation of a random walk in"
                " unconstrained space, or proposal=."
            )
        if proposal is not None and not isinstance(
            getattr(proposal, "event", None), events.DpEvent
        ):
            raise ArgumentTypeError(
                "proposal needs an attribute event, a DpEvent that says what a call releases:"
                " NoOpDpEvent() if it does not use the data."
            )
        self.proposal = proposal
        self._factor: Tensor | None = None
        self.scale = math.nan
        if isinstance(proposal_scale, Tensor):
            self._factor, self.scale = (
                _factor(proposal_scale),
                float(torch.linalg.vector_norm(proposal_scale)) / math.sqrt(len(proposal_scale)),
            )
        elif proposal_scale is not None:
            self.scale = check_positive(
                "proposal_scale", proposal_scale, "a standard deviation in unconstrained space"
            )

    def require_dimension(self, dimension: int) -> None:
        """Refuse a scale for another number of coordinates."""
        if self._factor is not None and len(self._factor) != dimension:
            raise ArgumentError(
                f"proposal_scale is for {len(self._factor)} coordinates, the model has {dimension}"
                " unconstrained ones."
            )

    def charges(self) -> list[tuple[events.DpEvent, int]]:
        """What a move releases."""
        return [] if self.proposal is None else [(self.proposal.event, 1)]

    def step(self, standard: Tensor) -> Tensor:
        """A step of the random walk from a standard Gaussian vector."""
        if self._factor is None:
            return self.scale * standard
        factor = self._factor.to(standard)
        return factor * standard if factor.dim() == 1 else factor @ standard


def _factor(scale: Tensor) -> Tensor:
    if scale.dim() not in (1, 2) or scale.shape[0] != scale.shape[-1] or not scale.isfinite().all():
        raise ArgumentError(
            "proposal_scale as a tensor is finite: (dimension,) standard deviations or a triangular"
            " (dimension, dimension)."
        )
    if not (scale if scale.dim() == 1 else scale.diagonal()).gt(0).all():
        raise ArgumentError(
            "proposal_scale needs positive entries (on its diagonal): else the chain cannot reach"
            " the whole space."
        )
    if scale.dim() == 2 and not torch.equal(scale, scale.tril()):
        raise ArgumentError(
            "proposal_scale as a matrix is the lower Cholesky factor of the covariance:"
            " torch.linalg.cholesky(covariance)."
        )
    return scale.detach().clone()
