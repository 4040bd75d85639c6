r"""A Gram matrix that was released with noise: how much of its shape is the noise's, and what is
left of that.

A symmetric Gaussian matrix E, of standard deviation v on the diagonal and v/√2 off it, is a
multiple of I with the variance v²/d and, independent of that, a matrix of trace 0:

.. math::
    \mathrm{Cov}(E\Delta) = \tfrac{v^2}{d}\Delta\Delta^\top + \Big(\tfrac{v^2}{2}(\|\Delta\|^2 I +
    \Delta\Delta^\top) - \tfrac{v^2}{d}\Delta\Delta^\top\Big)

Eigenvalues of the release that stand out of the others by more than the noise's semicircle is wide,
ℓ above or below their mean, are freed of what it moves them by, which takes them to ℓ + d·v²/(2ℓ)
(Benaych-Georges and Nadakuditi 2011), and their directions keep all of its covariance: above are
those of correlated features, below those of a constant column, or of columns that add up to
another. In the m other directions Q the noise is such a matrix
again, of size m and independent of the rest. Of the exact shape there, what tells it from λI,
entries are taken for normal with a standard deviation τ, and then κ = τ²/(τ² + v²) of the released
shape is the exact one's and the second part of the covariance shrinks to κ of itself. τ is a scale,
p(τ) ∝ 1/τ, between λ/√n, the randomness of n records with independent features, and the largest
shape that a positive semi-definite matrix with the mean eigenvalue λ has. One κ for all directions
would take a part of the largest eigenvalue away, and give it to the smallest, which is more than
their noise. Derived in this project.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .response import FLOOR_OF_NOISE

_ROUNDING = 1e-9  # of the level
_GRID = 2000


class NoisyGram(NamedTuple):
    """What a noisy release tells of a Gram matrix."""

    matrix: Tensor
    """Its estimate ``[d, d]``, positive definite."""
    noise_std: float
    """v."""
    kept: float
    """κ, by which the shape of the rest was multiplied: 0 where the noise explains it."""
    rest: Tensor
    """Q, an orthonormal basis of what does not stand out, ``[d, m]``."""

    def error_covariance(self, delta: Tensor) -> Tensor:
        """Of what the estimate gets wrong, times ``delta``."""
        inside = delta @ self.rest
        explained = self._of_noise(inside)
        explained = explained - self.noise_std**2 / len(inside) * torch.outer(inside, inside)
        return self._of_noise(delta) - (1 - self.kept) * self.rest @ explained @ self.rest.T

    def _of_noise(self, delta: Tensor) -> Tensor:
        eye = torch.eye(len(delta), dtype=delta.dtype)
        return self.noise_std**2 / 2 * (delta.square().sum() * eye + torch.outer(delta, delta))


def estimated(released: Tensor, noise_std: float, num_data: int) -> NoisyGram:
    """The Gram matrix behind a release, and the noise left in it.

    Args:
        released: the noisy matrix.
        noise_std: v.
        num_data: n.
    """
    values, vectors = torch.linalg.eigh(released)
    edge = noise_std * math.sqrt(2 * len(values))
    low, high = _rest(values, edge)
    some, rest = values[low:high], vectors[:, low:high]
    # the level's own noise has the standard deviation v/√m
    found = max(float(some.mean()), 1e-3 * noise_std)
    level = found**3 / (found**2 + noise_std**2 / len(some))
    shape = some - some.mean()
    kept = part_kept(float(shape.square().sum()), len(some), noise_std, found, num_data)
    of_rest = level + kept * shape
    out = torch.cat([values[:low], values[high:]]) - level
    freed = level + (out + out.sign() * (out.square() - edge**2).clamp_min(0.0).sqrt()) / 2
    estimate = torch.cat([freed[:low], of_rest, freed[low:]])
    # no more is known of eigenvalues below a tenth of the noise
    least = torch.full_like(estimate, FLOOR_OF_NOISE * noise_std)
    least[low:high] *= math.sqrt(kept)
    estimate = torch.maximum(estimate, least.clamp_min(_ROUNDING * level))
    return NoisyGram((vectors * estimate) @ vectors.T, noise_std, kept, rest)


def _rest(values: Tensor, edge: float) -> tuple[int, int]:
    """From where to where do ascending eigenvalues not stand out of the others?"""
    low, high = 0, len(values)
    while high - low > 1:
        mean = float(values[low:high].mean())
        above, below = float(values[high - 1]) - mean, mean - float(values[low])
        if max(above, below) <= edge:
            break
        low, high = (low, high - 1) if above >= below else (low + 1, high)
    return low, high


def part_kept(square: float, size: int, noise_std: float, level: float, num_data: int) -> float:
    """The posterior mean of κ, given the sum of squares of the d(d+1)/2 − 1 numbers that make a
    released shape.
    """
    count = size * (size + 1) / 2 - 1
    if not count:
        return 0.0  # a number has no shape
    most = size * (size - 1) * level**2 / count
    return mean_part(square, count, noise_std**2, level**2 / num_data, most)


def mean_part(square: float, count: float, noise: float, least: float, most: float) -> float:
    """The posterior mean of τ²/(τ² + v²), given the sum of squares of so many normal numbers of
    that variance.

    Args:
        square: the sum.
        count: how many.
        noise: v².
        least, most: between which τ² lies.
    """
    own = torch.linspace(math.log(least), math.log(most), _GRID, dtype=torch.float64).exp()
    total = own + noise
    likely = (-(count * total.log() + square / total) / 2).softmax(0)
    return float(likely @ (own / total))
