r"""How far a budget carries a chain, before anything is spent.

Where noise decides how far a step goes, an iteration that moves a distance d has the log
acceptance probability N(−s²/2, s²), s² = d²·v, with

.. math::
    v = (z c)^2 \text{ for a penalty kernel}, \qquad
    v = (z_l c)^2 + (z_g b)^2\,(L - \tfrac12)/L^2 \text{ for DP-HMC},

and so is accepted with probability 2Φ(−s/2). The expected squared distance 2Φ(−s/2)·s²/v is
largest, 1.326/v, at s = 2.38; k iterations together move k times as far. That is the *reach*: no
step size, mass matrix or number of iterations at the same budget gets farther. Jitter makes steps
of unequal length and costs some of it: 1.298 at j = 0.2, .880 at j = 1.

How many effective samples that is depends on the posterior. On a Gaussian with given standard
deviations one iteration from stationarity is simulated for many step sizes, with the kernel's own
noise; a coordinate's first autocorrelation ρ makes k iterations worth k(1−ρ)/(1+ρ) samples. Derived
in this project.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError

FEW = 10  # effective samples, below which a kernel has not mixed
_DRAWS, _SCALES = 1024, 40
_LONGEST, _SHORTEST = 2.5, 0.01  # scales that are tried, over the longest one that makes sense


def squared_distance(jitter: float = 0.0) -> float:
    """max over s of E[S²·2Φ(−S/2)], S = s·(1 + ``jitter``·(2u − 1)) with u uniform: the squared
    distance of an iteration times v.
    """
    uniform = (torch.arange(200, dtype=torch.float64) + 0.5) / 200
    s = torch.linspace(1.0, 4.0, 601, dtype=torch.float64)[:, None]
    s = s * (1 + jitter * (2 * uniform - 1))
    return float((s**2 * 2 * torch.special.ndtr(-s / 2)).mean(1).max())


class Iteration(NamedTuple):
    """What decides how far an iteration goes.

    Attributes:
        ratio_std: standard deviation of the noise on the log ratio for each unit of distance.
        gradient_std: of the noise on each gradient; 0 for a penalty kernel.
        num_steps: leapfrog steps; 0 for a random walk.
        jitter: of the step size.
    """

    ratio_std: float
    gradient_std: float
    num_steps: int
    jitter: float

    @property
    def variance(self) -> float:
        """v, of the log acceptance ratio for each unit of squared distance."""
        steps = max(self.num_steps, 1)
        return self.ratio_std**2 + self.gradient_std**2 * (steps - 0.5) / steps**2


class Tuned(NamedTuple):
    """The scale of the moves, and the share of an independent sample that an iteration is worth."""

    scale: float
    worth: float


def tuned(iteration: Iteration, stddev: Tensor, shaped: bool) -> Tuned:
    """The best scale on a Gaussian posterior.

    Args:
        iteration: the noise.
        stddev: (dimension,) of the posterior in independent directions.
        shaped: whether the moves have its shape.
    """
    stddev = stddev.double()
    shape = stddev if shaped else torch.ones_like(stddev)
    generator = torch.Generator().manual_seed(0)  # of public numbers: the same answer every time

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, len(stddev), generator=generator, dtype=torch.float64)

    start, momentum = stddev * normal(_DRAWS), normal(_DRAWS)
    kicks = normal(iteration.num_steps + 1, _DRAWS) if iteration.num_steps else start
    uniform = torch.rand(2, _DRAWS, generator=generator, dtype=torch.float64)
    test = torch.randn(_DRAWS, generator=generator, dtype=torch.float64)
    narrowest = float((stddev / shape).min())
    spread = float(torch.linalg.vector_norm(shape))
    steps = max(iteration.num_steps, 1)
    by_noise = _LONGEST * 2.38 / (steps * spread * math.sqrt(iteration.variance))
    # a leapfrog is stable below twice the narrowest direction; a walk need not be
    by_shape = (2.0 if iteration.num_steps else 10.0) * narrowest
    longest = min(by_noise, by_shape)
    found = Tuned(longest, 0.0)
    for scale in (longest * _SHORTEST ** (torch.arange(_SCALES) / (_SCALES - 1))).tolist():
        lengths = (scale * (1 + iteration.jitter * (2 * uniform[0] - 1)))[:, None]
        moved, log_ratio = _moved(iteration, start, momentum, kicks, lengths, stddev, shape)
        std = iteration.ratio_std * torch.linalg.vector_norm(moved - start, dim=1)
        accepted = uniform[1].log() < log_ratio + std * test - std**2 / 2
        squared = torch.where(accepted[:, None], (moved - start) ** 2, 0.0).mean(0)
        unlike = (squared / (2 * stddev**2)).clamp(max=1.0)  # 1 − ρ
        worth = float((unlike / (2 - unlike)).min())
        if worth > found.worth:
            found = Tuned(scale, worth)
    return found


def _moved(
    iteration: Iteration,
    start: Tensor,
    momentum: Tensor,
    kicks: Tensor,
    lengths: Tensor,
    stddev: Tensor,
    shape: Tensor,
) -> tuple[Tensor, Tensor]:
    """Where iterations end on a Gaussian, and the exact log ratio of their test."""
    if not iteration.num_steps:
        moved = start + lengths * shape * momentum
        return moved, ((start / stddev).square() - (moved / stddev).square()).sum(1) / 2

    def gradient(theta: Tensor, kick: Tensor) -> Tensor:
        # in coordinates in which the mass matrix is the identity
        return shape * (iteration.gradient_std * kick + theta / stddev**2)

    moved, p, slope = start, momentum, gradient(start, kicks[0])
    for kick in kicks[1:]:
        p = p - lengths / 2 * slope
        moved = moved + lengths * shape * p
        slope = gradient(moved, kick)
        p = p - lengths / 2 * slope
    kinetic = (momentum.square() - p.square()).sum(1) / 2
    change = ((start / stddev).square() - (moved / stddev).square()).sum(1) / 2
    return moved, (change + kinetic).nan_to_num(nan=-math.inf)


def standard_deviations(value: float | Tensor | Mapping[str, Tensor]) -> Tensor:
    """``value`` as a vector, by site sorted by name.

    Raises:
        ValueError: one of them is not positive and finite.
    """
    if isinstance(value, Mapping):
        sites = [torch.as_tensor(value[name]).reshape(-1) for name in sorted(value)]
        value = torch.cat(sites) if sites else torch.empty(0)
    vector = torch.as_tensor(value, dtype=torch.float64).detach().cpu().reshape(-1)
    if not len(vector) or not bool((vector.isfinite() & (vector > 0)).all()):
        raise ArgumentError(
            "posterior_stddev is one positive standard deviation for each coordinate of the"
            " unconstrained space: a number, a tensor, or tensors by site."
        )
    return vector


def warn_if_few(effective: float) -> None:
    """Say plainly what cannot work."""
    if effective < FEW:
        warnings.warn(
            f"this budget is worth {effective:.2g} effective samples: the kernel cannot mix on such"
            " a posterior, whatever its settings. Use noise_aware.posterior, more records or a"
            " larger epsilon.",
            stacklevel=3,
        )
