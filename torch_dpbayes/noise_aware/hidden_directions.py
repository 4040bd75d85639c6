r"""Directions whose curvature is no larger than the noise of its release, beside others that are
known.

A network's hidden layer can be scaled up if the next one is scaled down: the log likelihood does
not change, its curvature is 0 there, and what is released of it is noise. A surrogate marginalises
that noise under a flat prior of the curvature; a gradient near zero would then say that θ is near,
as hardly any curvature under a flat prior is so small that it says nothing. The mean level over all
directions, which :class:`~torch_dpbayes.noise_aware.uncertain_level.UncertainLevel` has, is known
well and does not tell of them.

So the directions U of the released matrix whose eigenvalues lie within the semicircle of its noise
around their own mean have a level λ of their own: p(λ) ∝ 1/λ given that mean. In the matrix's
eigenvectors and with Δ = (Δ_S, Δ_U), the error of the curvature then is

.. math::
    \tfrac12 v^2 \big(\operatorname{diag}(T\Delta^2) + T \circ \Delta\Delta^\top\big), \qquad
    T_{UU} = \min(1, \lambda/v)^2, \quad T_{SS} = T_{SU} = 1

as no entry among them is larger than λ where they all have that level; one that has none beside
others that have several v is not told from these. The entries beside the others say how sure the
directions themselves are. M is that and a diagonal matrix.

Derived in this project.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .feature_shape import InShape
from .response import Response, level_quantiles
from .surrogate import AnySurrogate, Surrogate
from .transcript import GradientRelease
from .uncertain_level import UncertainLevel

_LEVELS = 12
_NOTHING = 1e-3  # of the least level: most of log λ is where records say nothing
_STANDS_OUT = 10.0  # standard deviations of a mean's noise
# What least squares find, in standard deviations, where nothing draws iterates back: these are a
# random walk which the noise of the gradients drives (Dickey and Fuller 1979, with a constant)
_OF_WALK, _OF_WALK_STD = 1.53, 0.84
_IS_SEEN = 2.0  # standard deviations beyond that


def num_alike(values: Tensor, noise_std: float) -> int:
    """How many of the ascending eigenvalues of a noisy matrix do not stand out of the semicircle
    of its noise around their mean.

    Args:
        values: ``[d]``.
        noise_std: of the matrix, on the diagonal; 1/√2 of it off the diagonal.
    """
    count, before = len(values), 0
    while count not in (before, 1):
        edge = noise_std * math.sqrt(2 * count)
        before, count = count, int((values[:count] <= values[:count].mean() + edge).sum())
    return count


def num_like_walks(values: Tensor) -> int:
    """In how many directions a regression finds no more than it would where the iterates are a
    random walk. Of one direction alone nothing can be said by comparison: 0.

    Args:
        values: ascending eigenvalues of the estimate, in units of its error.
    """
    count = num_alike(values, 1.0)
    mean = float(values[:count].mean()) - _OF_WALK
    seen = mean > _IS_SEEN * _OF_WALK_STD / math.sqrt(count)
    return 0 if seen or len(values) == 1 else count


def with_hidden_levels(
    gradients: Sequence[GradientRelease],
    response: Callable[[Tensor, Tensor], Response],
    released: Tensor,
    noise_std: float,
    centre: Tensor,
    counted: Tensor,
    least: float,
    most: float,
) -> InShape | None:
    """The likelihood with a level for the hidden directions; None where there are none.

    Args:
        gradients: the releases.
        response: r for a curvature and a centre; it must not bend.
        released: the noisy curvature.
        noise_std: v, of its diagonal.
        centre: where it was released.
        counted: which releases count.
        least: a level below which records say nothing beside the prior.
        most: of the sum of all levels.
    """
    found = HiddenDirections.of(released, noise_std)
    if found.mean > _STANDS_OUT * found.std:
        return None
    vectors, hidden = found.vectors, found.num_hidden
    turned = [
        GradientRelease(g.theta @ vectors, g.value @ vectors, g.noise_std, g.sample_rate)
        for g in gradients
    ]
    place = centre @ vectors

    def at(level: float) -> PartlyHidden:
        matrix = torch.diag(found.values_at(level))
        own = response(matrix, place)
        return PartlyHidden(turned, own, matrix, noise_std, place, counted, hidden)

    parts: list[AnySurrogate] = [at(level) for level in found.levels(least, most, _LEVELS)]
    return InShape(UncertainLevel(parts, at(found.middle)), vectors.T)


class HiddenDirections(NamedTuple):
    """Which eigenvectors of a noisy matrix are hidden, and what is known of their level."""

    values: Tensor
    """All eigenvalues, ascending; those that are not hidden are no less than the noise, as they
    stand out of it."""
    vectors: Tensor
    num_hidden: int
    """How many are hidden, the first ones."""
    mean: float
    """Of the eigenvalues of those: the level, with the error ``std``."""
    std: float
    spread: float
    """Sum of their squared distances from it."""

    @staticmethod
    def of(released: Tensor, noise_std: float) -> HiddenDirections:
        """Those of a matrix with that noise on its diagonal."""
        values, vectors = torch.linalg.eigh(released)
        count = num_alike(values, noise_std)
        mean, std = float(values[:count].mean()), noise_std / math.sqrt(count)
        spread = float((values[:count] - mean).square().sum())
        return HiddenDirections(values.clamp_min(noise_std), vectors, count, mean, std, spread)

    @property
    def middle(self) -> float:
        """One level that they may have."""
        return max(self.mean, self.std)

    def levels(self, least: float, most: float, count: int) -> list[float]:
        """So many equally likely ones; bounds as of :func:`with_hidden_levels`."""
        found = level_quantiles(
            self.mean, self.std, _NOTHING * least, most / self.num_hidden, count
        )
        return [float(level) for level in found]

    def values_at(self, level: float) -> Tensor:
        """The eigenvalues where the hidden ones are ``level``."""
        return torch.cat(
            [self.values.new_full((self.num_hidden,), level), self.values[self.num_hidden :]]
        )


class PartlyHidden(Surrogate):
    """log p(transcript | θ) for one level of the hidden directions; arguments as in
    :class:`~torch_dpbayes.noise_aware.surrogate.Surrogate`, with a diagonal curvature, and

    Args:
        hidden: how many directions are, the first ones: there the curvature is λ.
    """

    def __init__(
        self,
        gradients: Sequence[GradientRelease],
        response: Response,
        curvature: Tensor,
        curvature_std: float,
        centre: Tensor,
        counted: Tensor,
        hidden: int,
    ) -> None:
        super().__init__(gradients, response, curvature, curvature_std, centre, counted)
        self._hidden = hidden
        self._share = min(1.0, float(curvature[0, 0]) / curvature_std) ** 2
        self._half = 0.5 * curvature_std**2
        self._diagonal = curvature.diagonal()
        self._sure = self._variability * self._diagonal + self.noise.diagonal()

    def _of_curvature_error(self, moved: Tensor) -> Tensor:
        delta = self._point - moved
        entries = torch.ones_like(self.curvature)
        entries[: self._hidden, : self._hidden] = self._share
        outer = delta[..., :, None] * delta[..., None, :]
        return self._half * (torch.diag_embed(delta.square() @ entries) + entries * outer)

    def form(self) -> None:
        """A change of rank two has none."""

    def log_likelihood(self, theta: Tensor) -> Tensor:
        """By a change of rank two: M = D + ½v²BCBᵀ, B = (Δ_U, Δ_S) with zeros elsewhere, C =
        (T_UU, 1; 1, 1).
        """
        moved = self._straight.moved(theta)
        delta, residual = self._point - moved, self._mean + moved * self._diagonal
        count, half = self._hidden, self._half
        squares = delta.square()
        of_hidden = squares[..., :count].sum(-1, keepdim=True)
        total = squares.sum(-1, keepdim=True)
        rows = total.expand_as(squares).clone()
        rows[..., :count] = total - (1 - self._share) * of_hidden
        diagonal = self._sure + half * rows
        sizes, products = squares / diagonal, residual * delta / diagonal
        a, b = sizes[..., :count].sum(-1), sizes[..., count:].sum(-1)
        p, q = products[..., :count].sum(-1), products[..., count:].sum(-1)
        determinant = (1 + half * self._share * a) * (1 + half * b) - half**2 * a * b
        # (1 + CG)⁻¹C of G = diag(a, b), times ½v²
        lost = half * (self._share - 1) * half
        explained = (
            (half * self._share + lost * b) * p.square()
            + 2 * half * p * q
            + (half + lost * a) * q.square()
        ) / determinant
        misfit = (residual.square() / diagonal).sum(-1) - explained
        return -0.5 * (misfit + diagonal.log().sum(-1) + determinant.log())
