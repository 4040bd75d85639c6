r"""Distributions of covariates: none, public rows, or one that is released once.

Private rows of numbers are shortened to norm R, and their sums :math:`\sum x_i` and :math:`\sum x_i
x_i^\top` are released with noise. Simulated rows are Gaussian with these moments and shortened as
the real ones are; the Gaussian is stretched until the *shortened* rows have the released moments.
Covariance matrices are drawn from their posterior given the release (:mod:`.covariance`); records
are simulated with their mean, and posteriors under each of them are averaged. Rows of different
categories have different means, which are drawn, too.

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

**Privacy.** With norms in units of R: Σx moves by at most 1 when a record is added or removed, and
by 2 when one is replaced; Σxxᵀ by 1 or √2 in Frobenius norm (the inner product of two positive
semi-definite matrices is not negative). A row with a number that is not finite counts as 0. Nothing
about columns is found from the data.

A record adds m vectors (1, x/R), no longer than √2, and 1 to a combination: √(2m + 1)
for m arguments. If it is replaced by one of another category a vector moves by 2 at most, within
its category by ‖x − x'‖/R ≤ 2, and combinations by √2: √2·√(2m + 1). Without rows of numbers the
vectors are 1, without combinations the last 1 is left out.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ..density import UnfitModel
from ..errors import ArgumentError, ArgumentTypeError
from .covariance import gram_draws, normal_numbers, with_symmetric_noise
from .records import ModelRecords, seeded, shorten

_FITTING_STEPS = 12  # until shortened rows have the wanted moments
_ROWS_OF_A_COLUMN = 8  # fewer have no covariance that can be inverted well
_RIDGE = 1e-9  # relative
_MOST_BETWEEN = 0.99  # of a variance, between categories
_MOST_COMBINATIONS = 10_000
_GRID = 24  # of ρ and of h
_LEAST_COUNT = 1e-6
_SWEEPS, _RAKINGS = 20, 20


class FeatureShape(NamedTuple):
    """How rows of numbers are scaled down to a norm."""

    bound: float  # R
    constants: Mapping[int, float]  # value by number of a constant column
    widths: tuple[int, ...]  # how many columns each argument has

    @property
    def free(self) -> list[int]:
        """Numbers of the columns that are not constant."""
        return [k for k in range(sum(self.widths)) if k not in self.constants]

    def shortened(self, rows: Tensor) -> Tensor:
        """Rows ``[n, p]`` with their constants, the others no longer than R; 0 where one of those
        is not finite.
        """
        result, free = rows.clone(), self.free
        wide = rows[:, free].to(torch.float64)
        squares = wide.square().sum(1)
        factors = shorten(squares, self.bound)
        moved = torch.where(squares.isfinite()[:, None], wide * factors[:, None], 0.0)
        result[:, free] = moved.to(rows.dtype)
        for column, value in self.constants.items():
            result[:, column] = value
        return result


def constants_of(given: Any) -> dict[int, float]:
    """Value by column: a mapping, or numbers of columns of ones."""
    try:
        pairs = given.items() if isinstance(given, Mapping) else ((k, 1.0) for k in given)
        found = {operator.index(k): float(v) for k, v in pairs}
    except (TypeError, ValueError):
        found = {-1: 0.0}
    if any(k < 0 or not math.isfinite(v) for k, v in found.items()):
        raise ArgumentError(
            "constant_columns are indices of columns of ones, from 0, or a dict from a column's"
            f" index to its public value; got {given!r}."
        )
    return found


# -- sources of covariates -------------------------------------------------------------------------


class PublicRows:
    """Rows that are public, by number of the argument: a sample, or those of the records
    themselves. These come in pairs of equal ones: moments are then conditional on them.
    """

    def __init__(self, rows: Mapping[int, Tensor], *, is_paired: bool, seed: int) -> None:
        self._rows, self.is_paired, self._seed = rows, is_paired, seed

    def rows(self, count: int, batch: int) -> Mapping[int, Tensor]:
        """Each row as often as any other, as far as ``count`` goes."""
        found = len(next(iter(self._rows.values())))
        wanted = count // 2 if self.is_paired else count
        with seeded(self._seed + batch):
            chosen = torch.cat([torch.randperm(found) for _ in range(math.ceil(wanted / found))])
        chosen = chosen[:wanted]
        if self.is_paired:
            chosen = chosen.repeat_interleave(2)
            chosen = torch.cat([chosen, chosen[: count - len(chosen)]])
        return {k: row[chosen] for k, row in self._rows.items()}


def public_rows(records: ModelRecords, given: Any, seed: int) -> PublicRows | None:
    """The public sample that was ``given``, or the rows of public arguments; None without any.

    Raises:
        ValueError, TypeError: they do not fit the arguments, or are not finite.
    """
    public, private = records.of_role("public"), records.of_role("numbers", "category")
    own: dict[int, Tensor] = {}
    if given is None:
        if public and private:
            raise ArgumentError(
                "public= names only some covariates: name all, or pass covariates=, a public"
                " sample of all."
            )
        rows = records.density.rows()
        own = {k: rows[k] for k in public}
    else:
        numbers = sorted(public + private)
        given = given if isinstance(given, tuple | list) else (given,)
        if len(given) != len(numbers):
            raise ArgumentError(
                f"covariates= takes one tensor for each of {[records.names[k] for k in numbers]},"
                f" got {len(given)}."
            )
        for number, sample in zip(numbers, given, strict=True):
            if not isinstance(sample, Tensor) or not sample.dim():
                raise ArgumentTypeError(
                    "covariates= is a tensor of public rows, or a tuple of one for each covariate;"
                    f" got {sample!r:.60}."
                )
            like = records.density.made_up.few()[number]
            row = records.density.arguments.rows_first(number, sample.to(like.dtype))
            own[number] = row
            if row.shape[1:] != like.shape[1:] or not len(row):
                raise ArgumentError(
                    f"the public sample of {records.names[number]!r} has another shape than the"
                    " argument."
                )
    for number, row in own.items():
        if not bool(row.isfinite().all()):
            raise ArgumentError(
                f"the public rows of {records.names[number]!r} have numbers that are not finite:"
                " replace them by public constants."
            )
    return PublicRows(own, is_paired=given is None, seed=seed) if own else None


class Released:
    """Covariates drawn from a released law; none where the model has none.

    Args:
        records: the model.
        seed: of the draws.
        shape: how rows of numbers are shortened.
        moments: of rows of numbers, in units of the bound.
        categories: what they are drawn from; None without any.
    """

    is_paired = False

    def __init__(
        self,
        records: ModelRecords,
        seed: int,
        shape: FeatureShape | None = None,
        moments: tuple[Tensor, Tensor] | None = None,
        categories: CategoryLaw | None = None,
    ) -> None:
        self._records, self._seed, self._shape, self._moments = records, seed, shape, moments
        self._categories = categories or CategoryLaw()
        self._cache: dict[tuple[int, int], Mapping[int, Tensor]] = {}

    def rows(self, count: int, batch: int) -> Mapping[int, Tensor]:
        """Fresh draws, the same ones for a batch."""
        if (count, batch) not in self._cache:
            if len(self._cache) > 3:  # of the mode; batches are used once
                self._cache.pop(next(iter(self._cache)))
            self._cache[count, batch] = self._drawn(count, batch)
        return self._cache[count, batch]

    def _drawn(self, count: int, batch: int) -> Mapping[int, Tensor]:
        records, shape, law = self._records, self._shape, self._categories
        result, few, grouped = {}, records.density.made_up.few(), None
        with seeded(self._seed + batch):
            most = max(count, _ROWS_OF_A_COLUMN * sum(sum(e.shape) for e in law.effects))
            columns = law.drawn(most)
            if law.effects:
                parts = [e[own] for e, own in zip(law.effects, columns, strict=True)]
                grouped = torch.stack(parts).sum(0), columns
            if shape is not None and self._moments is not None:
                rows = torch.zeros(count, sum(shape.widths), dtype=torch.float64)
                own = shortened_draws(*self._moments, count, grouped)
                rows[:, shape.free] = shape.bound * own
                result = parts_of(records, rows, shape)
            for number, column in zip(law.numbers, columns, strict=True):
                result[number] = column[:count].to(few[number].dtype)
        return result


Covariates = PublicRows | Released


# -- the release -----------------------------------------------------------------------------------


class NoisyMoments(NamedTuple):
    """Noisy moments of the free columns."""

    total: Tensor  # Σx/R, [p]
    total_std: float  # of its noise
    products: Tensor  # Σxxᵀ/R², [p, p]
    products_std: float  # of its noise on the diagonal; 1/√2 of it off the diagonal

    def draws(
        self,
        num_data: int,
        count: int,
        seed: int,
        matrices_of: Callable[[Tensor, float, int], Tensor] = gram_draws,
    ) -> list[tuple[Tensor, Tensor]]:
        """Means and covariances of a row in units of R, from their posterior given the release; the
        first one is the average of the others.
        """
        n = max(num_data, 1)
        middle = self.total / n
        middle = middle * shorten(middle.square().sum(), 1.0)  # more than 1 is no row of norm 1
        with seeded(seed):
            released = self.products / n - torch.outer(middle, middle)
            matrices = matrices_of(released, self.products_std / n, count)
            error = torch.randn(count, len(middle), dtype=torch.float64)
        means = middle + self.total_std / n * error
        means = means * shorten(means.square().sum(1), 1.0)[:, None]
        means = torch.cat([middle[None], means])
        matrices = torch.cat([matrices.mean(0, keepdim=True), matrices])
        # rows of norm 1 at most have second moments whose trace is 1 at most
        traces = matrices.diagonal(dim1=1, dim2=2).sum(1)
        matrices = matrices * ((1 - means.square().sum(1)) / traces).clamp(1e-9, 1.0)[:, None, None]
        return list(zip(means, matrices, strict=True))


def in_units(rows: Tensor, shape: FeatureShape) -> Tensor:
    """The free columns of rows ``[n, p]`` that are shortened already, no longer than 1."""
    own = rows[:, shape.free].to("cpu", torch.float64) / shape.bound
    # once more: rows of few digits, as of bfloat16, are longer than the bound by their rounding
    return own * shorten(own.square().sum(1), 1.0)[:, None]


def noisy_moments(own: Tensor, multipliers: tuple[float, float]) -> NoisyMoments:
    """Released from private rows :func:`in_units`, with z of the mean and of the products."""
    total = own.sum(0) + multipliers[0] * normal_numbers(own.shape[1])
    products = with_symmetric_noise(own.T @ own, multipliers[1])
    return NoisyMoments(total, multipliers[0], products, multipliers[1])


def shortened_draws(
    mean: Tensor,
    covariance: Tensor,
    count: int,
    grouped: tuple[Tensor, Sequence[Tensor]] | None = None,
) -> Tensor:
    """Gaussian rows, shortened to norm 1, that have these moments once they are; their own moments
    are those wanted, without the error of so many draws.

    ``grouped`` are what means differ by, ``[count or more, p]``, and the categories of which they
    are the effects; effects are shrunk where they vary more than rows do.
    """
    offsets, columns = (None, ()) if grouped is None else grouped
    size, root = len(mean), torch.linalg.cholesky(covariance)
    number = max(count, _ROWS_OF_A_COLUMN * size) if offsets is None else len(offsets)
    normal = torch.randn(number, size, dtype=torch.float64)
    place, apart_by = mean, torch.zeros(1, size, dtype=torch.float64)
    if offsets is not None:
        white = torch.linalg.solve_triangular(root, (offsets - offsets.mean(0)).T, upper=False)
        between, basis = torch.linalg.eigh(white @ white.T / number)
        kept = (_MOST_BETWEEN / between.clamp_min(_MOST_BETWEEN)).sqrt()
        apart_by = (root @ (basis * kept) @ basis.T @ white).T
        # as of Cholesky: another root would turn, and rows with it, from step to step
        root = root @ (basis * (1 - between.clamp_max(_MOST_BETWEEN)).sqrt())
        root = torch.linalg.cholesky(root @ root.T)
    wanted, fitted = torch.linalg.cholesky(covariance), apart_by
    # rows of norm 1 are rounded: a mean that noise has moved there leaves no covariance
    least = _RIDGE * float(wanted.square().sum()) / size + torch.finfo(torch.float64).eps
    steps = _FITTING_STEPS * (1 + len(columns))
    for step in range(steps + 1):
        rows = place + fitted + normal @ root.T
        rows = rows * shorten(rows.square().sum(1), 1.0)[:, None]
        if step < steps:
            found = rows.mean(0)
            place, apart = place + mean - found, rows - found
            for column in columns:  # steps that are short enough where these depend on each other
                number_of = column.bincount().clamp_min(1)[:, None]
                left = torch.zeros(len(number_of), size, dtype=torch.float64)
                left = left.index_add(0, column, apart - apart_by) / number_of
                fitted = fitted - left[column] / len(columns)
            own = apart.T @ apart / len(rows) + least * torch.eye(size, dtype=torch.float64)
            own = torch.linalg.cholesky(own)
            root = wanted @ torch.linalg.solve_triangular(own, root, upper=False)
    return rows[:count]


def all_numbers(records: ModelRecords, rows: Sequence[Tensor]) -> Tensor:
    """The columns of all arguments that are private rows of numbers, ``[n, p]``."""
    parts = []
    for number in records.of_role("numbers"):
        row = rows[number]
        parts.append(row.reshape(len(row), math.prod(row.shape[1:])))  # of no rows, too
    return torch.cat(parts, 1)


def feature_shape(
    records: ModelRecords, bound: float, constants: Mapping[int, float]
) -> FeatureShape | None:
    """The shape of the arguments that are private rows of numbers; None if there are none."""
    few = records.density.made_up.few()
    numbers = records.of_role("numbers")
    widths = [math.prod(few[k].shape[1:]) for k in numbers]
    if any(k >= sum(widths) for k in constants):
        raise ArgumentError(
            f"constant_columns names column {max(constants)}, and private covariates that are"
            f" numbers have {sum(widths)}."
        )
    if not widths:
        return None
    if len(constants) == sum(widths):
        raise UnfitModel(
            "all covariates are constant columns: pass them inside the model or as public=."
        )
    return FeatureShape(float(bound), dict(constants), tuple(widths))


def parts_of(records: ModelRecords, columns: Tensor, shape: FeatureShape) -> dict[int, Tensor]:
    """Shortened columns ``[n, p]`` as the arguments that they belong to."""
    result, like = {}, records.density.made_up.few()
    parts = shape.shortened(columns).split(list(shape.widths), dim=1)
    for number, part in zip(records.of_role("numbers"), parts, strict=True):
        part = part.reshape(len(columns), *like[number].shape[1:])
        result[number] = part.to(like[number].dtype)
    return result


def shortened_rows(
    records: ModelRecords, rows: Sequence[Tensor], shape: FeatureShape | None
) -> list[Tensor]:
    """Rows of all arguments, those of private numbers shortened. Private data."""
    result = list(rows)
    if shape is not None:
        for number, part in parts_of(records, all_numbers(records, rows), shape).items():
            result[number] = part
    return result


# -- categories ------------------------------------------------------------------------------------


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
        rho = _MOST_BETWEEN * (n + 1.0) ** -places
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
