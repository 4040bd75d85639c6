"""What a step asks of the data: a sum over records, and how much noise hides one of them."""

from __future__ import annotations

import math

import torch

from ..noise import add_gaussian
from ..per_sample.gradient_source import GradientSource
from .layout import Layout


class ClippedSum:
    """Σ clip(g_i), of which every step releases S = Σ clip(g_i) + zC·ξ.

    A query that releases more is a subclass: it says how many numbers more, fills
    ``layout.beside``, adds their noise, and states the noise multiplier that a release of the
    clipped sum alone would have at the same cost.

    Args:
        max_grad_norm: clip norm C of one record's gradient.
        expected_batch_size: B, by which sums are divided.

    **Privacy.** Adding or removing a record moves the sum by at most C, replacing one by 2C.
    """

    def __init__(self, max_grad_norm: float, expected_batch_size: float) -> None:
        # plain numbers, which nobody can change and no type rounds
        self.max_grad_norm = float(max_grad_norm)
        self.expected_batch_size = float(expected_batch_size)

    def independence(self, source: GradientSource) -> str:
        """How records are kept apart, in the model and in the loss."""
        return source.independence

    def numbers_beside(self, num_parameters: int, device: torch.device) -> int:
        """How many numbers a step releases beside the gradient."""
        return 0

    def collect(self, source: GradientSource, layout: Layout) -> int:
        """Add the batch's sum to ``layout``; returns how many records it had."""
        return source.add_clipped_sum(layout.named, self.max_grad_norm, layout.pieces)

    def add_noise(self, layout: Layout, smallest: float, stream: torch.Generator | None) -> None:
        """Σ clip(g_i) turns into S/B, for each group with its own z, of which ``smallest`` is the
        smallest; without a stream into a rank's share of it that has no noise.
        """
        for group in layout.groups:
            if not math.isfinite(group.noise_multiplier):
                group.gradient.zero_()
            elif stream is None:
                group.gradient.div_(self.expected_batch_size)
            else:
                std = group.noise_multiplier * self.max_grad_norm
                add_gaussian(group.gradient, std, self.expected_batch_size, stream)

    def equivalent_noise_multiplier(
        self, noise_multiplier: float, *, is_full: bool, sampling: str | None, neighboring: str
    ) -> float:
        """z at which the clipped sum alone would cost what this query costs."""
        return noise_multiplier
