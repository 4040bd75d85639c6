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
    of_levels: Tensor | None = None
    """Variances of the means of its diagonal over each site, where these were released, too."""
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
        value, std, of_levels = curvature.value, curvature.noise_std, None
        if levels is not None:
            value, of_levels = blocks.with_levels(value, std, levels)
        own = gradient.noise_std**2 / num_data
        if math.sqrt(2) * own > std:
            return MeasuredCurvature(value, std, of_levels, holds_mean=True)
        mean = gradient.value / num_data
        less = num_data * mean.outer(mean) - own * torch.eye(len(mean)).to(mean)
        of_mean = 2 * float(mean.norm()) * gradient.noise_std
        if of_levels is not None:
            each = 4 * gradient.noise_std**2 * mean.square() + 2 * own**2
            of_levels = of_levels + blocks.totals(torch.diag(each)) / blocks.sizes.square()
        return MeasuredCurvature(
            value - less, math.hypot(std, of_mean, math.sqrt(2) * own), of_levels
        )

    def on(self, blocks: BlockLevels) -> tuple[Tensor, Errors]:
        """The matrix, and how its entries err."""
        return self.value, blocks.errors(self.noise_std)._replace(levels=self.of_levels)
