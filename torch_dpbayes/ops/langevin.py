"""Langevin samplers on the full data. No accept step, nothing adaptive: every step does the same whatever the records are."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from ..noise import GaussianNoise


class Target(Protocol):
    """A density ∝ exp(−U(θ)) over flat vectors θ in float64."""

    @property
    def start(self) -> Tensor:
        """Where chains begin, ``[d]``: chosen without the data."""

    def gradient(self, theta: Tensor) -> Tensor:
        """∇U(θ), ``[d]``."""

    def potential(self, theta: Tensor) -> Tensor:
        """U(θ) up to a constant, differentiable; for samplers with an accept step."""

    def clipped_potential(self, theta: Tensor, low: float, high: float, relative: bool) -> Tensor:
        """U(θ) with every record's log likelihood clipped into [low, high], differentiable; ``relative``: less its value at the start."""


@torch.no_grad()
def overdamped(target: Target, step_sizes: Iterable[float], noise: GaussianNoise) -> Tensor:
    r"""The unadjusted Langevin algorithm on the full data.

    .. math:: \theta \leftarrow \theta - h \nabla U(\theta) + \sqrt{2h}\,\xi, \qquad \xi \sim N(0, I)

    On a Gaussian target with precision κ the stationary variance is 1/(κ(1 − hκ/2)).

    Args:
        target: the density; the chain begins at ``target.start``.
        step_sizes: h of each step, in units of θ²: fixed before the data are seen.
        noise: where the Gaussians come from.

    Returns:
        The last state only, ``[d]``.

    **Privacy.** The last state is the release, the earlier ones are not: :class:`~torch_dpbayes.ops.FiniteRunLangevin` has the guarantee.
    """
    theta = target.start.clone()
    for h in step_sizes:
        xi = noise.standard_normal(len(theta), dtype=theta.dtype, device=theta.device)
        theta.sub_(target.gradient(theta), alpha=h).add_(xi, alpha=math.sqrt(2 * h))
    return theta
