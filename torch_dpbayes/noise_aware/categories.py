r"""Private categories: how often they are, together, and what rows of numbers differ by.

Beside the counts of its categories an argument has the sums of (1, x/R) over the records of each,
and several arguments have the counts of their combinations. Rows are x = mean + Σ_j d_j[c_j] + e:
effects of the arguments add up, and e has one covariance. With z the indicators of all categories,
p their means, sums less n·p·mean are

.. math::
    n\,\mathrm{Cov}(z)\,d + \mathrm{noise}, \qquad d_{ki} \sim N(0, \rho_i \lambda_i), \qquad
    \rho_i \sim \mathrm{Beta}(1, h)

in eigenvectors of the rows' covariance, of eigenvalues λ; ρ is the share of a variance that is
between categories. It is drawn from its posterior, log h uniform, then d from its own: effects that
noise hides are small if all are (empirical Bayes; Efron and Morris 1975, "Data analysis using
Stein's estimator"). Counts are shrunk likewise, those of combinations to what they are if the
arguments are independent.

**Privacy.** A record adds m vectors (1, x/R), no longer than √2, and 1 to a combination: √(2m + 1)
for m arguments. If it is replaced by one of another category a vector moves by 2 at most, within
its category by ‖x − x'‖/R ≤ 2, and combinations by √2: √2·√(2m + 1). Without rows of numbers the
vectors are 1, without combinations the last 1 is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from .covariance import normal_numbers
from .records import seeded

MOST_BETWEEN = 0.99  # of a variance, between categories
_MOST_COMBINATIONS = 10_000
_GRID = 24  # of ρ and of h


def has_combinations(sizes: Mapping[int, int]) -> bool:
    """Whether combinations are counted."""
    return len(sizes) > 1 and math.prod(sizes.values()) <= _MOST_COMBINATIONS


def num_ones(sizes: Mapping[int, int], has_numbers: bool) -> int:
    """The squared length of what a record adds, at most."""
    return len(sizes) * (1 + has_numbers) + has_combinations(sizes)


class CategoryLaw(NamedTuple):
    """What categories are drawn from, and what means of rows differ by."""

    numbers: Sequence[int] = ()  # of the arguments, in this order
    tables: Sequence[tuple[Tensor, Tensor]] = ()  # combinations [c, arguments] and their shares
    effects: Sequence[Tensor] = ()  # [categories, p] of each argument

    def drawn(self, count: int) -> list[Tensor]:
        """Categories of each argument."""
        result = list[Tensor]()
        for combinations, shares in self.tables:
            chosen = torch.multinomial(shares, count, replacement=True)
            result += combinations[chosen].T
        return result


class NoisyCategories(NamedTuple):
    """Sums over the records of each category, with noise."""

    sizes: Mapping[int, int]  # how many categories, by number of the argument
    sums: Tensor  # of (1, x/R), those of one argument after another's, [q, 1 + p]
    combinations: Tensor | None  # how often each is
    std: float  # of the noise of all of these

    def laws(
        self, num_data: int, moments: Sequence[tuple[Tensor, Tensor] | None], seed: int
    ) -> list[CategoryLaw]:
        """A draw for each of the ``moments`` of rows from the posterior given the release; the
        first one is the most likely, with the mean effects of the others.
        """
        first, *others = (
            self.law(num_data, each, seed + k if k else None) for k, each in enumerate(moments)
        )
        means = [
            torch.stack(each).mean(0) for each in zip(*(o.effects for o in others), strict=True)
        ]
        return [first._replace(effects=means), *others]

    def law(
        self, num_data: int, moments: tuple[Tensor, Tensor] | None, seed: int | None
    ) -> CategoryLaw:
        """One of them; with ``seed`` counts have the release's noise once more."""
        sizes, counts, table = list(self.sizes.values()), self.sums[:, 0], self.combinations
        with seeded(seed or 0):
            if seed is not None:
                counts = counts + self.std * torch.randn(len(counts), dtype=torch.float64)
            levels = [c.mean().clamp_min(self.std).expand_as(c) for c in counts.split(sizes)]
            shares = list(map(self._shares, counts.split(sizes), levels))
            values = [torch.arange(size) for size in sizes]
            tables = [(v[:, None], s) for v, s in zip(values, shares, strict=True)]
            if table is not None:
                if seed is not None:
                    table = table + self.std * torch.randn(len(table), dtype=torch.float64)
                total = (counts.sum() / len(sizes)).clamp_min(self.std)
                own = self._shares(table, total * torch.cartesian_prod(*shares).prod(1))
                tables = [(torch.cartesian_prod(*values), own)]
            effects = () if moments is None else self._effects(num_data, tables, *moments)
        return CategoryLaw(list(self.sizes), tables, effects)

    def _shares(self, counts: Tensor, level: Tensor) -> Tensor:
        """Shrunk towards shares like ``level`` by empirical Bayes, and positive."""
        apart = counts - level * (counts.sum() / level.sum())
        variance = max(float(apart.square().mean()) - self.std**2, float(level.mean()))
        found = level + variance / (variance + self.std**2) * apart
        found = found.clamp_min(0.0)
        return found / found.sum()

    def _effects(
        self,
        num_data: int,
        tables: Sequence[tuple[Tensor, Tensor]],
        mean: Tensor,
        covariance: Tensor,
    ) -> Sequence[Tensor]:
        """A draw of d, by argument."""
        means, spreads = [], []
        for combinations, shares in tables:
            marks = torch.cat([one_hot(column) for column in combinations.T], 1).double()
            means.append(shares @ marks)
            spreads.append((marks - means[-1]).T @ (shares[:, None] * (marks - means[-1])))
        sums = self.sums[:, 1:] - num_data * torch.outer(torch.cat(means), mean)
        weights, turn = torch.linalg.eigh(num_data * torch.block_diag(*spreads))
        scales, basis = torch.linalg.eigh(covariance)
        weights, scales = weights.clamp_min(0.0)[:, None], scales.clamp_min(0.0)
        sums = turn.T @ sums @ basis
        rho = torch.logspace(-3.0, math.log10(MOST_BETWEEN), _GRID, dtype=torch.float64)
        variances = (weights.square() * scales)[..., None] * rho + self.std**2
        told = -(sums.square()[..., None] / variances + variances.log()).sum(0) / 2
        h = torch.logspace(0.0, 3.0, _GRID, dtype=torch.float64)[:, None, None]
        joint = told + (rho.log() + (h - 1) * torch.log1p(-rho)).log_softmax(2)  # [h, i, ρ]
        own = joint[torch.multinomial(joint.logsumexp(2).sum(1).softmax(0), 1)[0]]
        between = rho[torch.multinomial(own.softmax(1), 1)[:, 0]] * scales
        gain = between / (weights.square() * between + self.std**2)
        white = torch.randn(sums.shape, dtype=torch.float64)
        drawn = gain * weights * sums + self.std * gain.sqrt() * white
        return (turn @ drawn @ basis.T).split(list(self.sizes.values()))


def noisy_categories(
    columns: Sequence[Tensor], sizes: Mapping[int, int], rows: Tensor | None, multiplier: float
) -> NoisyCategories:
    """Released from private categories, ``[n]`` of each argument, and rows ``[n, p]`` of norm 1 at
    most, if any. Categories outside of their range are left out.
    """
    own = torch.ones(len(columns[0]), 1, dtype=torch.float64)
    if rows is not None:
        own = torch.cat([own, rows], 1)
    sums, place, is_known = [], torch.zeros_like(columns[0]), own[:, 0] > 0
    for column, size in zip(columns, sizes.values(), strict=True):
        is_one = (column >= 0) & (column < size)
        empty = torch.zeros(size, own.shape[1], dtype=torch.float64)
        sums.append(empty.index_add(0, column[is_one], own[is_one]))
        place, is_known = place * size + column, is_known & is_one
    total, table = torch.cat(sums), None
    total = total + multiplier * normal_numbers(total.numel()).reshape(total.shape)
    if has_combinations(sizes):
        table = place[is_known].bincount(minlength=math.prod(sizes.values()))
        table = table + multiplier * normal_numbers(len(table))
    return NoisyCategories(sizes, total, table, multiplier)
