r"""Parameters of groups, of which every record reads one: what their curvature cannot have, and its
inverse.

No record's gradient has entries of two groups, so that all sums of outer products, and second
derivatives, are 0 between them: noise there is known to be noise. With the entries of group g as
block A_g, what all groups have in common with the rest as C_g, and the rest as E,

.. math::
    M = \begin{pmatrix} A_1 & & C_1 \\ & \ddots & \vdots \\ C_1^\top & \cdots & E \end{pmatrix},
    \qquad E' = E - \sum_g C_g^\top A_g^{-1} C_g,

which is eliminated one entry of the groups after the other, of all groups at once.

Derived in this project.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from scipy.stats import chi2
from torch import Tensor

from .response import floored
from .transcript import CurvatureRelease

# a group has few coordinates, and the rest is inverted as a whole
_MOST_OF_A_GROUP, _MOST_OF_THE_REST = 8, 32
_CONTRADICTS = 1e-6  # tail probability of what should be noise
_TOLD = 0.5  # of the rest's curvature, that is left
_SMALLEST_PART = 0.05  # of what the blocks on the diagonal have, in any direction


class Groups:
    """Which coordinates belong to each group.

    Args:
        places: of each group's entries, ``[groups, m]``.
        dimension: of all coordinates, d.
    """

    def __init__(self, places: Tensor, dimension: int) -> None:
        self.places = places
        own = torch.full((dimension,), -1, dtype=torch.int64)
        own[places] = torch.arange(len(places))[:, None]
        self.rest = (own < 0).nonzero().flatten()
        in_one = own >= 0
        both = in_one[:, None] & in_one
        self.apart = both & (own[:, None] != own)
        """Pairs of coordinates of two groups, ``[d, d]``."""
        self._is_cross = in_one[:, None] != in_one

    @staticmethod
    def of(places: Tensor, dimension: int) -> Groups | None:
        """None where there are none, or where a group or the rest has too many coordinates."""
        if not places.numel() or places.shape[1] > _MOST_OF_A_GROUP:
            return None
        found = Groups(places, dimension)
        return found if len(found.rest) <= _MOST_OF_THE_REST else None

    def contradict(self, release: CurvatureRelease) -> bool:
        """Whether what a release has between two groups is more than noise: made-up rows, which
        have few of the groups, would not show it.
        """
        entries = release.value[self.apart]
        # off the diagonal it has half of the variance; every entry is there twice
        total = float(entries.square().sum()) / max(release.noise_std, 1e-30) ** 2
        return bool(chi2.sf(total, len(entries) / 2) < _CONTRADICTS)

    def are_told_apart(self, curvature: Tensor) -> bool:
        """Whether the rest keeps half of its curvature where groups make up for it as far as they
        can. Where it does not, what the two have in common can have none, and noise hides that.
        """
        a, c, e = self.blocks(curvature)
        solved = torch.linalg.solve(a.movedim(-1, 0), c.movedim(-1, 0))
        left = e - (c.movedim(-1, 0).mT @ solved).sum(0)
        root = torch.linalg.inv(torch.linalg.cholesky(e))
        return not len(e) or bool(torch.linalg.eigvalsh(root @ left @ root.T)[0] > _TOLD)

    def floored(self, matrix: Tensor, least: float) -> Tensor:
        """``matrix`` without entries between groups, eigenvalues of its blocks raised to ``least``,
        and what groups have in common with the rest as far as it leaves the whole positive.
        """
        found = torch.where(self.apart, 0.0, matrix)
        for block in (*self.places, self.rest):
            found[block[:, None], block] = floored(found[block[:, None], block], least)
        blocks = torch.where(self._is_cross, 0.0, found)
        root = torch.linalg.inv(torch.linalg.cholesky(blocks))
        lowest = float(torch.linalg.eigvalsh(root @ (found - blocks) @ root.T)[0])
        share = 1.0 if lowest > _SMALLEST_PART - 1 else (_SMALLEST_PART - 1) / lowest
        return blocks + share * (found - blocks)

    @property
    def order(self) -> Tensor:
        """The first coordinates of all groups, the second ones, and so on, and then the rest,
        ``[d]``.
        """
        return torch.cat([self.places.T.flatten(), self.rest])

    def parts(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """The groups' coordinates ``[..., m, groups]`` of a vector in that order, and the rest."""
        count, own = self.places.shape
        some, rest = vector.split([count * own, len(self.rest)], -1)
        return some.unflatten(-1, (own, count)), rest

    def blocks(self, matrix: Tensor) -> GroupedMatrix:
        """The blocks of a matrix, ``[..., d, d]``."""
        places, rest = self.places.T, self.rest
        return GroupedMatrix(
            matrix[..., places[:, None], places],
            matrix[..., places[:, None], rest[:, None]],
            matrix[..., rest[:, None], rest],
        )


class GroupedMatrix(NamedTuple):
    """M by its blocks, with the groups along the last dimension: what is computed of all of them
    at once lies together in memory.
    """

    groups: Tensor
    """A, ``[..., m, m, groups]``."""
    cross: Tensor
    """C, ``[..., m, s, groups]``."""
    rest: Tensor
    """E, ``[..., s, s]``."""

    def misfit(self, of_groups: Tensor, of_rest: Tensor, own: GroupLevels) -> Tensor:
        """rᵀM⁻¹r + log|M|, ``[...]``, with −2·log of a mean over levels in place of each group's
        Gaussian; differentiable.

        Args:
            of_groups: r, ``[..., m, groups]``.
            of_rest: r, ``[..., s]``.
            own: of each group's coordinates, given those before it.
        """
        a, c, e = self
        total = torch.zeros((), dtype=e.dtype)
        size = a.shape[-2]
        for k in range(size):
            pivot, row, first = a[..., 0, 0, :], c[..., 0, :, :], of_groups[..., 0, :]
            scaled = row / pivot[..., None, :]
            total = total + own.misfit(k, pivot, first).sum(-1)
            e = e - scaled @ row.mT
            of_rest = of_rest - (scaled * first[..., None, :]).sum(-1)
            if k + 1 < size:
                below = a[..., 1:, 0, :]
                share = below / pivot[..., None, :]
                a = a[..., 1:, 1:, :] - share[..., :, None, :] * below[..., None, :, :]
                c = c[..., 1:, :, :] - share[..., :, None, :] * row[..., None, :, :]
                of_groups = of_groups[..., 1:, :] - share * first[..., None, :]
        # where θ is no number, neither is this
        factor = torch.linalg.cholesky_ex(e).L
        whitened = torch.linalg.solve_triangular(factor, of_rest[..., None], upper=False)[..., 0]
        log_determinant = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return total + whitened.square().sum(-1) + log_determinant


class GroupLevels(NamedTuple):
    """What the curvature of a group's coordinate may be, where its error is a large part of it.

    A Gaussian error has negative curvatures, too, and nearly none: far away, where nothing else
    would explain a gradient near zero, they do, for each group by itself. So the density of a
    group's residual is the mean of those at equally likely levels above 0.
    """

    change: Tensor
    """Of the residual, ``[..., m, groups, levels]``: by the level less the estimate."""
    added: Tensor
    """To the variance, likewise, in place of the error's."""
    least: Tensor
    """Of the variance, ``[..., m, groups]``."""

    def misfit(self, k: int, pivot: Tensor, first: Tensor) -> Tensor:
        """−2·log of the mean density at ``first``, ``[..., groups]``, of which ``pivot`` is the
        Gaussian variance.
        """
        residual = first[..., None] + self.change[..., k, :, :]
        variance = pivot[..., None] + self.added[..., k, :, :]
        variance = torch.maximum(variance, self.least[..., k, :, None])
        logs = -0.5 * (residual.square() / variance + variance.log())
        return -2 * (logs.logsumexp(-1) - math.log(logs.shape[-1]))
