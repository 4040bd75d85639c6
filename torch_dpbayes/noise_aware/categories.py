r"""Private categories: how often they are, together, and what rows of numbers differ by.

Beside the counts of its categories an argument has the sums of (1, x/R) over the records of each,
and several arguments have the counts of their combinations. Rows are x = mean + Σ_j d_j[c_j] + e:
effects of the arguments add up, and e has one covariance. With z the indicators of all categories,
p their means, sums less n·p·mean are

.. math::
    n\,\mathrm{Cov}(z)\,d + \mathrm{noise}, \qquad d_{jki} \sim N(0, \rho_{ji} \lambda_i), \qquad
    \rho_{ji} \sim \mathrm{Beta}(1, h_j)

in eigenvectors of the rows' covariance, of eigenvalues λ; ρ is the share of a variance that is
between the categories of an argument. Counts differ from equal ones, those of combinations from
what they are if the arguments are independent, likewise: from nπ by N(0, ρ·n²π), the variance of a
Dirichlet distribution. None is below 0, and combinations are raked to the counts of each argument
(Deming and Stephan 1940, "On a least squares adjustment of a sampled frequency table").

In all of these ρ is drawn from its posterior, then differences given it; those of one argument
after another given the others' (Gibbs). 1/√h is uniform, and so a single √ρ, about (Gelman 2006,
"Prior distributions for variance parameters in hierarchical models"): what noise hides is as large
as it may be, and differences are small if all are.

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
_LEAST_COUNT = 1e-6
_SWEEPS, _RAKINGS = 20, 20


def has_combinations(sizes: Mapping[int, int]) -> bool:
    """Whether combinations are counted."""
    return len(sizes) > 1 and math.prod(sizes.values()) <= _MOST_COMBINATIONS


def num_ones(sizes: Mapping[int, int], has_numbers: bool) -> int:
    """The squared length of what a record adds, at most."""
    return len(sizes) * (1 + has_numbers) + has_combinations(sizes)


class CategoryLaw(NamedTuple):
    """The distribution of categories, and by how much the means of rows differ between them."""

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


def uniform_law(sizes: Mapping[int, int]) -> CategoryLaw:
    """All categories as frequent, and independent of each other."""
    each = [torch.ones(size, dtype=torch.float64) for size in sizes.values()]
    return CategoryLaw(list(sizes), [(torch.arange(len(e))[:, None], e) for e in each])


class NoisyCategories(NamedTuple):
    """Sums over the records of each category, with noise."""

    sizes: Mapping[int, int]  # how many categories, by number of the argument
    sums: Tensor  # of (1, x/R), those of one argument after another's, [q, 1 + p]
    combinations: Tensor | None  # how often each is
    std: float  # of the noise of all of these

    def laws(
        self, num_data: int, moments: Sequence[tuple[Tensor, Tensor] | None], seed: int
    ) -> list[CategoryLaw]:
        """The mean of the others, and a draw from the posterior given the release for each of the
        ``moments`` of rows but the first.
        """
        with seeded(seed):
            drawn = [self._drawn(max(num_data, 1), each) for each in moments[1:]]
        tables = [
            (each[0][0], torch.stack([shares for _, shares in each]).mean(0))
            for each in zip(*(law.tables for law in drawn), strict=True)
        ]
        effects = zip(*(law.effects for law in drawn), strict=True)
        means = [torch.stack(each).mean(0) for each in effects]
        return [CategoryLaw(list(self.sizes), tables, means), *drawn]

    def _drawn(self, n: int, moments: tuple[Tensor, Tensor] | None) -> CategoryLaw:
        sizes = list(self.sizes.values())
        values = [torch.arange(size) for size in sizes]
        counts = [
            self._counts(own, n, torch.ones(len(own), dtype=torch.float64))
            for own in self.sums[:, 0].split(sizes)
        ]
        tables = [(v[:, None], c / c.sum()) for v, c in zip(values, counts, strict=True)]
        if self.combinations is not None:
            own = self._counts(self.combinations, n, torch.cartesian_prod(*counts).prod(1))
            table = own.reshape(sizes)
            for axis in [*range(len(sizes))] * _RAKINGS:
                by_axis = table.movedim(axis, -1)
                by_axis *= tables[axis][1] / by_axis.flatten(0, -2).sum(0)
            tables = [(torch.cartesian_prod(*values), own / own.sum())]
        effects = () if moments is None else self._effects(n, tables, *moments)
        return CategoryLaw(list(self.sizes), tables, effects)

    def _counts(self, noisy: Tensor, n: int, level: Tensor) -> Tensor:
        """A draw of counts, which are about proportional to ``level``."""
        level = n * (level / level.sum())[:, None]
        apart = self._differences(noisy[:, None] - level, torch.ones_like(level), n * level, n)
        return (level + apart)[:, 0].clamp_min(_LEAST_COUNT)

    def _effects(
        self,
        n: int,
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
        scales, basis = torch.linalg.eigh(covariance)
        scales = scales.clamp_min(0.0)
        left = (self.sums[:, 1:] - n * torch.outer(torch.cat(means), mean)) @ basis
        weights = n * torch.block_diag(*spreads)
        # at first as if all arguments had one ρ: in turn, those that go together move slowly
        values, turn = torch.linalg.eigh(weights)
        start = turn @ self._differences(turn.T @ left, values.clamp_min(0.0)[:, None], scales, n)
        left, sizes = left - weights @ start, list(self.sizes.values())
        if len(sizes) == 1:
            return [start @ basis.T]
        found, weights = list(start.split(sizes)), weights.split(sizes, 1)
        turns = [torch.linalg.svd(each, full_matrices=False) for each in weights]
        # one is enough where arguments are independent
        for number in [*range(len(found))] * (_SWEEPS if len(tables) < len(found) else 1):
            own, (out, size, back) = left + weights[number] @ found[number], turns[number]
            found[number] = back.T @ self._differences(out.T @ own, size[:, None], scales, n)
            left = own - weights[number] @ found[number]
        return [each @ basis.T for each in found]

    def _differences(self, sums: Tensor, weights: Tensor, scales: Tensor, n: int) -> Tensor:
        """A draw of d ``[k, p]``, N(0, ρ·scales), given ``sums`` that are ``weights``·d and noise;
        each column has a ρ.
        """
        places = torch.linspace(0.0, 1.0, _GRID, dtype=torch.float64)
        # from what n independent records vary by
        rho = MOST_BETWEEN * (n + 1.0) ** -places
        h = 1 / rho[:, None, None]
        variances = (weights.square() * scales)[..., None] * rho + self.std**2
        told = -(sums.square()[..., None] / variances + variances.log()).sum(0) / 2
        joint = told + (rho.log() + (h - 1) * torch.log1p(-rho)).log_softmax(2)  # [h, i, ρ]
        of_h = joint.logsumexp(2).sum(1) - h[:, 0, 0].log() / 2
        own = joint[torch.multinomial(of_h.softmax(0), 1)[0]]
        between = rho[torch.multinomial(own.softmax(1), 1)[:, 0]] * scales
        gain = between / (weights.square() * between + self.std**2)
        white = torch.randn(sums.shape, dtype=torch.float64)
        return gain * weights * sums + self.std * gain.sqrt() * white


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
