"""The likelihood with a bent response, of a run with few parameters: the gradients' differences
tell all of the curvature.

Derived in this project.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .bent_response import BentResponse, bent
from .learned_curvature import LearnedCurvatureSurrogate
from .surrogate import gaussian_log_likelihood
from .transcript import GradientRelease

_NUMBERS_AT_ONCE = 2**22  # that a tensor for many θ holds


class BentSurrogate(LearnedCurvatureSurrogate):
    """log p(transcript | θ) with that response; arguments as in
    :class:`~torch_dpbayes.noise_aware.learned_curvature.LearnedCurvatureSurrogate`, and

    Args:
        way: u.
        bend: κ.
    """

    def __init__(
        self,
        gradients: Sequence[GradientRelease],
        curvature: Tensor,
        curvature_std: float,
        centre: Tensor,
        units: Tensor,
        least: float | None,
        way: Tensor,
        bend: float,
    ) -> None:
        response = BentResponse(curvature, centre, way, bend)
        super().__init__(gradients, response, curvature, curvature_std, centre, units, least)
        self._way, self._bend = way, bend
        moved = curvature @ way
        self._direction = moved / (way @ moved)

    def form(self) -> ManyBent:
        """Polynomials, and what bends them."""
        return self._form

    @cached_property
    def _form(self) -> ManyBent:
        changed = self.curvature @ self._way
        crossed = torch.outer(self._direction, changed)
        square = float(self._way @ changed) * torch.outer(self._direction, self._direction)
        more = torch.stack([2 / 3 * (crossed + crossed.T), 4 / 9 * square])
        return ManyBent(
            self.centre[None, None],
            self._way[None, None],
            self._direction[None, None],
            torch.full((1, 1), self._bend, dtype=torch.float64),
            (self._mean + self.centre @ self.curvature)[None, None],
            self.curvature[None],
            (self.curvature + self.noise)[None],
            self.quadratic.flatten(1)[None],
            more.flatten(1)[None],
            torch.full((1, 1), self.log_evidence, dtype=torch.float64),
        )

    def log_likelihood(self, theta: Tensor) -> Tensor:
        """By its form."""
        rows = theta.reshape(-1, theta.shape[-1])
        return self._form.log_likelihood(rows).reshape(theta.shape[:-1])


class ManyBent(NamedTuple):
    """Likelihoods with bent responses, K of them at once. With γ = √h' − 1 and m = Fu/uᵀFu, F_α =
    T F̂ Tᵀ has T = I + ⅔γ m uᵀ, so that it, too, is a polynomial.
    """

    centre: Tensor
    """c, ``[K, 1, d]``."""
    way: Tensor
    """u, ``[K, 1, d]``."""
    direction: Tensor
    """m, ``[K, 1, d]``."""
    bend: Tensor
    """κ, ``[K, 1]``."""
    mean: Tensor
    """The residual at c, ``[K, 1, d]``."""
    curvature: Tensor
    """F̂, ``[K, d, d]``."""
    own: Tensor
    """F̂ and the noise, ``[K, d, d]``."""
    quadratic: Tensor
    """Of the curvature's error, as in the learned curvature's surrogate, ``[K, p, d²]``."""
    more: Tensor
    """What γ and γ² add, ``[K, 2, d²]``."""
    log_evidence: Tensor
    """``[K, 1]``."""

    @staticmethod
    def stacked(forms: Sequence[ManyBent]) -> ManyBent:
        """All of them."""
        return ManyBent(*(torch.cat(parts) for parts in zip(*forms, strict=True)))

    def log_likelihood(self, theta: Tensor) -> Tensor:
        """log p(transcript | θ) up to a constant, ``[K, m]`` for θ ``[m, d]``; differentiable."""
        rows = max(1, _NUMBERS_AT_ONCE // self.quadratic.shape[:2].numel())
        return torch.cat([self._of_some(some) for some in theta.split(rows)], 1)

    def _of_some(self, theta: Tensor) -> Tensor:
        away = theta - self.centre
        along = (away * self.direction).sum(-1)
        further, slope = bent(along, self.bend)
        away = away + further[..., None] * self.way
        both = torch.cat([torch.ones_like(away[..., :1]), away], -1)
        rows, columns = torch.triu_indices(both.shape[-1], both.shape[-1])
        error = (both[..., rows] * both[..., columns]) @ self.quadratic
        gamma = slope.sqrt() - 1
        change = torch.stack([gamma, gamma.square()], -1) @ self.more
        shape = (*along.shape, *self.own.shape[1:])
        unbent = self.own[:, None] + error.reshape(shape)
        residual = self.mean + away @ self.curvature
        found = gaussian_log_likelihood(residual, unbent + change.reshape(shape), unbent)
        return self.log_evidence + found
