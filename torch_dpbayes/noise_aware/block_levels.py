r"""Noisy curvatures of parameters that belong to several sites: each site has a level of its own.

An intercept that all records have and an effect of one group in twenty differ in their curvature by
a factor of twenty, which everybody knows beforehand and which the noise of single entries hides.
The means of the diagonal over a site's coordinates hide it much less, so a matrix is shrunk to a
multiple of I for each site, and not to one for all. Of what is left the noise explains a part
(empirical Bayes), which is found for each pair of sites, and for the diagonal: that the effects of
different groups have no second derivative in common does not hide that one group has more records.

The mean over a site's d_s coordinates has 1/√d_s of the noise of one of them. The sum of the
diagonal over a site may be released besides (:class:`~torch_dpbayes.noise_aware.planning.Plan`),
and the noise of that, over d_s, is what the mean then has: both are averaged by their variances.

Derived in this project.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .groups import Groups
from .noisy_gram import mean_part
from .response import FLOOR_OF_NOISE, floored, level_quantiles
from .transcript import LevelRelease

_ROUNDING = 1e-9  # of a level
_SMALLEST_PART = 0.05  # of a site's level, that a direction of its coordinates has
_FEW = 0.1  # of a site's coordinates, about which its level says nothing
_NOTHING, _DEVIATIONS, _GRID, _SHAPES = 1e-3, 6.0, 500, (1e-2, 1e6)
# modulo 5, 11 or 13, which are prime, no two of the first four powers are the same
_STRIDE = 7


class Errors(NamedTuple):
    """Variances of what is wrong with a noisy matrix."""

    entries: Tensor
    """For each class of entries."""
    levels: Tensor | None = None
    """Of the means of its diagonal over each site, where these have errors of their own."""


class BlockLevels:
    """Which coordinates make up each site, and which entries of a matrix are alike: the diagonal of
    a site, and what is off the diagonal between two sites, or in one. Variances of an error are
    stated for every such class, as those of a diagonal entry: off the diagonal they are half.

    Args:
        site: number of each coordinate's site, ``[d]``, from 0 without gaps.
        num_data: n, public: entries are known to be no more alike than those of n records.
        groups: between which entries are known to be 0.
    """

    def __init__(self, site: Tensor, num_data: int, groups: Groups | None = None) -> None:
        self._site, self._num_data, self._groups = site, num_data, groups
        self.sizes = torch.bincount(site).to(torch.float64)
        sites = len(self.sizes)
        low, high = torch.minimum(site[:, None], site), torch.maximum(site[:, None], site)
        self._class = (sites + low * sites + high).fill_diagonal_(0) + torch.diag(site)
        known = sites * (1 + sites)  # the last class
        if groups is not None:
            self._class[groups.apart] = known
        counts = torch.bincount(self._class.flatten(), minlength=known + 1)
        self._counts = counts.to(torch.float64)
        self._counts[sites:] /= 2  # entries off the diagonal are there twice

    def errors(self, noise_std: float) -> Errors:
        """Those of a matrix whose entries all have the same noise, but for those known to be 0."""
        found = torch.full_like(self._counts, noise_std**2)
        found[-1] = 0.0
        return Errors(found)

    def with_levels(
        self, released: Tensor, noise_std: float, levels: LevelRelease
    ) -> tuple[Tensor, Tensor]:
        """A noisy matrix whose diagonal was moved to what the sums over each site say besides, and
        the variances of its means over them.

        Args:
            released, noise_std: the matrix.
            levels: the sums, with noise of their own.
        """
        of_matrix = noise_std**2 / self.sizes
        of_sums = (levels.noise_std / self.sizes).square()
        share = of_matrix / (of_matrix + of_sums)
        change = share * (levels.value / self.sizes - self.means(released))
        return released + torch.diag(change[self._site]), share * of_sums

    def totals(self, matrix: Tensor) -> Tensor:
        """Sums of a matrix' diagonal, over each site."""
        zeros = torch.zeros_like(self.sizes)
        return zeros.index_add_(0, self._site, matrix.diagonal().to(zeros))

    def means(self, matrix: Tensor) -> Tensor:
        """Of a matrix' diagonal, for each site."""
        return self.totals(matrix) / self.sizes

    def are_known(self, released: Tensor, errors: Errors, share: float) -> bool:
        """Whether the error of each level is less than that share of it."""
        return bool((self._of_levels(errors).sqrt() < share * self.means(released)).all())

    def left(self, released: Tensor, errors: Errors) -> float:
        """Standard deviation of the error that is left when entries are multiplied by what of them
        it does not explain; the mean over all entries.
        """
        return self.root_mean(errors.entries * self._kept(released, errors.entries))

    def denoised(self, released: Tensor, errors: Errors) -> tuple[Tensor, float]:
        """A positive definite estimate of what was released, and the standard deviation of what is
        left of its error, of which eigenvalues are at least a tenth.
        """
        variances, means = errors.entries, self.means(released)
        found = torch.maximum(means, 1e-3 * variances[: len(means)].sqrt())
        level = found**3 / (found**2 + self._of_levels(errors))
        kept = self._kept(released, variances)
        # the levels' errors move all eigenvalues together
        of_levels = self._of_levels(errors) * self.sizes / variances[: len(means)]
        share = 2 * float(of_levels.nan_to_num(1.0).sum()) / len(released)
        std = self.root_mean(variances * (kept + share).clamp(max=1.0))
        matrix = torch.diag(level[self._site])
        matrix += kept[self._class] * (released - torch.diag(means[self._site]))
        least = max(FLOOR_OF_NOISE * std, _ROUNDING * float(level.max()))
        return self._floored(matrix, least), std

    def combined(
        self, earlier: Tensor, earlier_errors: Errors, later: Tensor, later_errors: Errors
    ) -> tuple[Tensor, Errors]:
        """Two releases averaged by their variances, for the point of the later one.

        How much the curvature changed between their points is told by how far they are apart,
        beyond what noise explains.
        """
        apart = self._squares(later - earlier) / self._counts.clamp_min(1.0)
        weight, entries = _averaged(apart, earlier_errors.entries, later_errors.entries)
        found = earlier + weight[self._class] * (later - earlier)
        if earlier_errors.levels is None or later_errors.levels is None:  # as of all releases
            return found, Errors(entries)
        apart = self.means(later) - self.means(earlier)
        weight, of_levels = _averaged(apart.square(), earlier_errors.levels, later_errors.levels)
        change = self.means(earlier) + weight * apart - self.means(found)
        return found + torch.diag(change[self._site]), Errors(entries, of_levels)

    def average(self, releases: Sequence[tuple[Tensor, Errors]]) -> tuple[Tensor, Errors]:
        """Of matrices in the order of their release, for the last one's point."""
        (average, errors), *later = releases
        for value, own in later:
            average, errors = self.combined(average, errors, value, own)
        return average, errors

    def _of_levels(self, errors: Errors) -> Tensor:
        if errors.levels is not None:
            return errors.levels
        return errors.entries[: len(self.sizes)] / self.sizes

    def _kept(self, released: Tensor, variances: Tensor) -> Tensor:
        """The part of what tells a released matrix from its sites' levels that its error does not
        explain, between 0 and 1, for each class: as of a
        :class:`~torch_dpbayes.noise_aware.noisy_gram.NoisyGram`, with bounds on a class's entries.
        """
        sites = len(self.sizes)
        means = self.means(released)
        squares = self._squares(released - torch.diag(means[self._site]))
        levels = torch.maximum(means, 1e-3 * variances[:sites].sqrt())
        # of a site's sum one coordinate has it all; and no entry is larger than the two on the
        # diagonal beside it
        most = torch.cat([self.sizes * levels**2, 2 * torch.outer(levels, levels).flatten()])
        free = self._counts[:-1].clone()
        free[:sites] -= 1
        kept = torch.zeros_like(self._counts)
        for k in (free > 0).nonzero().flatten().tolist():
            noise, highest = float(variances[k]), float(most[k])
            if noise:
                square, count = float(squares[k]), float(free[k])
                kept[k] = mean_part(square, count, noise, highest / self._num_data, highest)
            else:
                kept[k] = 1.0
        return kept

    def error_variances(self, released: Tensor, errors: Errors, levels: Tensor) -> Tensor:
        """Those of what is left of each entry's error, ``[d, d]``, where sites have these levels:
        without negative eigenvalues no entry is larger than the levels of its two sites.
        """
        variances = errors.entries
        entries = (variances * self._kept(released, variances))[self._class]
        own = levels[self._site]
        return _as_off_diagonal(torch.minimum(entries, torch.outer(own, own)))

    def own_levels(
        self, released: Tensor, errors: Errors, levels: Tensor, most: float, count: int
    ) -> Tensor:
        """``count`` equally likely curvatures of each coordinate, ``[count, d]``, where sites have
        these levels: from a gamma distribution around its site's as wide as the released diagonal
        is, or, of a few, from p(λ) ∝ 1/λ, for groups with hardly any records; below ``most``, as
        without that bound a gradient of nothing but large noise would be taken for a steep slope.
        """
        sites, variances = len(self.sizes), errors.entries
        kept = self._kept(released, variances)[:sites].clamp(max=1 - 1e-9)
        mean = levels[self._site]
        noise = variances[:sites][self._site].sqrt().clamp_min(_ROUNDING * mean)
        spread = noise.square() * (kept / (1 - kept))[self._site]
        shape = (mean.square() / spread).clamp(*_SHAPES)
        found = released.diagonal()
        nothing = _NOTHING * noise.clamp(max=most)
        low = torch.maximum(found - _DEVIATIONS * noise, nothing).clamp(max=most / 2)
        high = torch.maximum(found + _DEVIATIONS * noise, 2 * low).clamp(max=most)
        grid = low * (high / low) ** torch.linspace(0, 1, _GRID).to(low)[:, None]
        of_site = torch.distributions.Gamma(shape, shape / mean).log_prob(grid)
        of_few = -grid.log() - math.log(-math.log(_NOTHING))
        prior = torch.logaddexp(of_site + math.log(1 - _FEW), of_few + math.log(_FEW))
        seen = -((found - grid) / noise).square() / 2
        passed = torch.softmax(seen + prior + grid.log(), dim=0).cumsum(0).T.contiguous()
        shares = ((torch.arange(count) + 0.5) / count).to(low)
        at = torch.searchsorted(passed, shares.expand(len(low), -1).contiguous())
        return grid.gather(0, at.clamp(max=_GRID - 1).T)

    def _floored(self, matrix: Tensor, least: float) -> Tensor:
        if self._groups is None:
            return floored(matrix, least)
        return self._groups.floored(matrix, least)

    def _squares(self, matrix: Tensor) -> Tensor:
        """Sums over each class, of as many numbers as ``_counts`` says."""
        return torch.zeros_like(self._counts).index_add_(
            0, self._class.flatten(), matrix.square().flatten()
        )

    def root_mean(self, variances: Tensor) -> float:
        """The standard deviation of an error, over all entries."""
        return math.sqrt(float((self._counts * variances).sum() / self._counts.sum()))

    def likely(
        self, released: Tensor, errors: Errors, least: float, most: float, count: int
    ) -> list[Tensor]:
        """``count`` equally likely levels of each site, given the means of a released diagonal and
        p(λ) ∝ 1/λ: a lattice of their quantiles.

        Args:
            released, errors: the noisy matrix.
            most: of the sum over the diagonal.
            least, count: as for :func:`~torch_dpbayes.noise_aware.response.level_quantiles`.
        """
        columns, order = [], torch.arange(count)
        stds = self._of_levels(errors).sqrt()
        for mean, size, std in zip(self.means(released), self.sizes, stds, strict=True):
            found = level_quantiles(float(mean), float(std), least, most / float(size), count)
            columns.append(found[order])
            order = order * _STRIDE % count
        return list(torch.stack(columns, 1))

    def at(self, matrix: Tensor, levels: Tensor) -> Tensor:
        """``matrix`` moved to where ``levels`` are the means of its diagonal over each site, and
        no eigenvalue is far below them.
        """
        unit = levels[self._site].sqrt()
        moved = matrix + torch.diag((levels - self.means(matrix))[self._site])
        relative = self._floored(moved / torch.outer(unit, unit), _SMALLEST_PART)
        bounded = unit[:, None] * relative * unit
        scale = (levels / self.means(bounded)).sqrt()[self._site]
        return scale[:, None] * bounded * scale

    def shape_scales(self, levels: Tensor, spread: float) -> Tensor:
        """How much of a curvature's error of standard deviation ``spread`` each coordinate can
        have: without negative eigenvalues no entry is larger than the levels of its two sites.
        """
        if spread <= 0:
            return torch.ones(len(self._site), dtype=levels.dtype)
        return (levels / spread).sqrt().clamp(max=1.0)[self._site]


def _averaged(apart: Tensor, earlier: Tensor, later: Tensor) -> tuple[Tensor, Tensor]:
    """The later one's weight and the average's variance, of two measurements with these variances
    that are ``apart`` in the mean square.
    """
    weight = torch.maximum(earlier, apart - later)
    weight = (weight / (weight + later)).nan_to_num(0.0)
    return weight, weight * later


def _as_off_diagonal(variances: Tensor) -> Tensor:
    """Half of what is off the diagonal."""
    return (variances + torch.diag(variances.diagonal())) / 2
