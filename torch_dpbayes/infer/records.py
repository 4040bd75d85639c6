"""What a step of variational inference asks of the data: one clipped gradient sum at one θ."""

from __future__ import annotations

import torch

from ..batches.sampler import PoissonSampler
from ..density import RecordDensity
from ..per_sample.gradient_source import GradientSource
from ..release.layout import Layout
from ..release.query import ClippedSum


class DrawnGradients(ClippedSum):
    """Σ clip(−∇ log p(x_i | θ)) over a Poisson draw of a Pyro model's records.

    **Privacy.** Adding or removing a record moves the sum by at most C, replacing one by 2C, at a θ
    where ``density.has_gradients(theta)``: elsewhere one record could end the sum of all.
    """

    def __init__(
        self,
        density: RecordDensity,
        draws: PoissonSampler,
        max_grad_norm: float,
        expected_batch_size: float,
    ) -> None:
        super().__init__(max_grad_norm, expected_batch_size)
        self._density, self._draws = density, draws

    def independence(self, source: GradientSource) -> str:
        """Each record runs through a graph of its own."""
        return "by torch.func.vmap over a graph recorded on synthetic records"

    def collect(self, source: GradientSource, layout: Layout) -> int:
        """Add the sum over the draw delivered last to ``layout``, at the θ that stands there."""
        records = self._records
        (theta,), (piece,) = layout.parameters, layout.pieces
        own = theta.detach().to(self._density.prior.device, self._density.prior.dtype)
        piece.sub_(self._density.of(records).clipped_gradient_sum(own, self.max_grad_norm))
        return len(records)

    def draw(self) -> None:
        """Take the next batch, or the one that no release was made of yet."""
        self._records = torch.tensor(next(iter(self._draws)), dtype=torch.long)
        self._draws.delivered()
