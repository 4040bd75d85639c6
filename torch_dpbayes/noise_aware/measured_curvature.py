"""What a released matrix says of the curvature at its point, and how it errs."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .block_levels import BlockLevels, Errors
from .transcript import CurvatureRelease, GradientRelease, LevelRelease


class MeasuredCurvature(NamedTuple):
    """What is taken for the curvature at a point, and how it errs."""

    value: Tensor
    noise_std: float
    """Of a release and of what was taken from it, as of a diagonal entry."""
    totals: Tensor | None = None
    """Sums of its diagonal over each site."""
    of_each: float = 0.0
    """Variance of these sums, at most."""
    of_square: float = 0.0
    """What every coordinate adds to that."""
    holds_mean: bool = False
    """Whether the mean of the gradients is a part of it."""

    @staticmethod
    def about_the_mean(
        curvature: CurvatureRelease,
        levels: LevelRelease | None,
        gradient: GradientRelease,
        num_data: int,
        blocks: BlockLevels,
    ) -> MeasuredCurvature:
        """Σ c cᵀ − (Σ c)(Σ c)ᵀ/n.

        Away from the mode the mean of the gradients is no curvature: with it, steps would be the
        shorter the further there is to go. Of few records the product is little but noise: there it
        stays.
        """
        totals, of_each = None, 0.0
        if levels is not None:
            totals, of_each = levels.value, levels.noise_std**2
        own = gradient.noise_std**2 / num_data
        if math.sqrt(2) * own > curvature.noise_std:
            return MeasuredCurvature(
                curvature.value, curvature.noise_std, totals, of_each, 0.0, True
            )
        mean = gradient.value / num_data
        less = num_data * mean.outer(mean) - own * torch.eye(len(mean)).to(mean)
        of_mean = 2 * float(mean.norm()) * gradient.noise_std
        if totals is not None:
            totals = totals - blocks.totals(less)
        return MeasuredCurvature(
            curvature.value - less,
            math.hypot(curvature.noise_std, of_mean, math.sqrt(2) * own),
            totals,
            of_each + of_mean**2,
            2 * own**2,
        )

    def on(self, blocks: BlockLevels) -> tuple[Tensor, Errors]:
        """The matrix with the levels that the sums say, too."""
        errors = blocks.errors(self.noise_std)
        if self.totals is None:
            return self.value, errors
        variances = self.of_each + blocks.sizes * self.of_square
        return blocks.with_levels(self.value, errors, self.totals, variances)
