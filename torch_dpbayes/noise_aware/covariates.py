r"""Distributions of covariates: none, public rows, or a law that is released once.

Private rows of numbers are shortened to norm R, and their sums :math:`\sum x_i` and :math:`\sum x_i
x_i^\top` are released with noise. They are released again for rows that are centred and whitened by
earlier releases: noise then hides only what is small in these units (Biswas et al. 2020,
"CoinPress: practical private mean and covariance estimation"). They are shortened to a norm C that
the share z/n of simulated rows exceeds: E[‖b‖² − C²]₊ + C²z/n, the loss by shortening plus the
noise, is least there (Amin et al. 2019, "Bounding user contributions").

Simulated rows are Gaussian, and shortened to R like the real ones. The Gaussian is fitted so that
the *shortened* rows have the released moments. Covariance matrices are drawn from their posterior
given the releases (:mod:`.covariance`). Records are simulated with the mean of these matrices, and
the posteriors under each of them are averaged. Rows of different categories have different means,
which are drawn, too.

For each category of an argument, the sum of (1, x/R) over its records is released; for several
arguments, also the counts of their combinations. Rows are x = mean + Σ_j d_j[c_j] + e: the effects
of the arguments add up, and e has one covariance. With the indicators z of all categories and their
means p, the sums minus n·p·mean are

.. math::
    n\,\mathrm{Cov}(z)\,d + \mathrm{noise}, \qquad d_{jki} \sim N(0, \rho_{ji} \lambda_i), \qquad
    \rho_{ji} \sim \mathrm{Beta}(1, h_j)

in the eigenvectors of the rows' covariance, with eigenvalues λ. ρ is the share of a variance that
lies between the categories of an argument. Likewise, counts differ from nπ by N(0, ρ·n²π), the
variance of a Dirichlet distribution. π is uniform; for combinations it is the law of independent
arguments. No count is below 0, and combinations are raked to the counts of each argument (Deming
and Stephan 1940, "On a least squares adjustment of a sampled frequency table").

In each case ρ is drawn from its posterior, then the differences given ρ, one argument after another
given the others (Gibbs). 1/√h is uniform, so a single √ρ is about uniform (Gelman 2006, "Prior
distributions for variance parameters in hierarchical models"). So hidden differences may be as
large as the noise allows, and are small if all differences are small.

**Privacy.** With norms in units of R: Σx moves by at most 1 when a record is added or removed, and
by 2 when one is replaced; Σxxᵀ by 1 or √2 in Frobenius norm (the inner product of two positive
semi-definite matrices is not negative). The same holds for whitened rows in units of their norm. A
row with a number that is not finite counts as 0. No property of columns is computed from the data.

For m arguments, a record adds m vectors (1, x/R) of norm at most √2, and 1 to a combination:
√(2m + 1). If it is replaced, the sums of an argument move by at most 2 if its category changes, and
by ‖x − x'‖/R ≤ 2 if not; combinations move by √2: together √2·√(2m + 1). Without rows of numbers
the vectors are (1); without combinations the last 1 is left out.
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
from .covariance import Look, gram_draws, normal_numbers, with_symmetric_noise
from .records import ModelRecords, seeded, short

_FITTING_STEPS = 12  # until shortened rows have the wanted moments
_ROWS_OF_A_COLUMN = 8  # the covariance of fewer rows per column is badly conditioned
_RIDGE = 1e-9  # relative
_MOST_BETWEEN = 0.99  # largest share of a variance between categories
_MOST_COMBINATIONS = 10_000
_LAWS_TRIED, _ROWS_TRIED = 16, 128  # simulated before each whitened release; rows of each law
_GRID = 24  # points of ρ and of h
_LEAST_COUNT = 1e-6
_SWEEPS, _RAKINGS = 20, 20


class FeatureShape(NamedTuple):
    """How rows of numbers are scaled down to a norm."""

    bound: float  # R
    constants: Mapping[int, float]  # value by index of a constant column
    widths: tuple[int, ...]  # how many columns each argument has

    @property
    def free(self) -> list[int]:
        """Indices of the columns that are not constant."""
        return [k for k in range(sum(self.widths)) if k not in self.constants]

    def shortened(self, rows: Tensor) -> Tensor:
        """Rows ``[n, p]`` with the constants set, and the other columns scaled down to norm R; 0 if
        one of these is not finite.
        """
        result, free = rows.clone(), self.free
        wide = rows[:, free].to(torch.float64)
        is_finite = wide.square().sum(1, keepdim=True).isfinite()
        result[:, free] = torch.where(is_finite, short(wide, self.bound), 0.0).to(rows.dtype)
        for column, value in self.constants.items():
            result[:, column] = value
        return result


def constants_of(given: Any) -> dict[int, float]:
    """Values by column index, from a mapping, or from indices of columns of ones."""
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
    """Public rows by number of the argument: a sample, or the rows of the records themselves. The
    latter are drawn in pairs of equal rows, for moments that are conditional on the rows.
    """

    def __init__(self, rows: Mapping[int, Tensor], *, is_paired: bool, seed: int) -> None:
        self._rows, self.is_paired, self._seed = rows, is_paired, seed

    def rows(self, count: int, batch: int) -> Mapping[int, Tensor]:
        """``count`` rows, each about equally often."""
        found = len(next(iter(self._rows.values())))
        wanted = count // 2 if self.is_paired else count
        with seeded(self._seed + batch):
            chosen = torch.cat([torch.randperm(found) for _ in range(math.ceil(wanted / found))])
        if self.is_paired:  # the last row of an odd number has no partner
            pairs = chosen[:wanted].repeat_interleave(2)
            chosen = torch.cat([pairs, pairs[:1]])
        return {k: row[chosen[:count]] for k, row in self._rows.items()}


def public_rows(records: ModelRecords, given: Any, seed: int) -> PublicRows | None:
    """The public sample that was ``given``, or the rows of public arguments; None if there are
    none.

    Raises:
        ValueError, TypeError: rows do not fit the arguments, or are not finite.
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
                f"covariates= needs one tensor for each of {[records.names[k] for k in numbers]},"
                f" got {len(given)}."
            )
        for number, sample in zip(numbers, given, strict=True):
            if not isinstance(sample, Tensor) or not sample.dim():
                raise ArgumentTypeError(
                    "covariates= must be a tensor of public rows, or a tuple with one for each"
                    f" covariate; got {sample!r:.60}."
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
    """Covariates drawn from a released law; none if the model has none. ``moments``: mean and
    covariance of rows of numbers, in units of the bound.
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
        """Draws; the same ones for the same batch."""
        if (count, batch) not in self._cache:
            if len(self._cache) > 3:  # the mode reuses few draws; other batches are used once
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
    """Noisy moments of the vectors b = W·(x/R − c), shortened to norm 1, of the free columns."""

    total: Tensor  # Σb, [p]
    total_std: float  # of its noise
    products: Tensor  # Σbbᵀ, [p, p]
    products_std: float  # of its noise on the diagonal; 1/√2 of it off the diagonal
    centre: Tensor  # c, [p]
    whitening: Tensor  # W, [p, p]


def law_draws(
    releases: Sequence[NoisyMoments],
    num_data: int,
    count: int,
    seed: int,
    matrices_of: Callable[[Sequence[Look], int], Tensor] = gram_draws,
) -> list[tuple[Tensor, Tensor]]:
    """Mean and covariance of a row in units of R: the average of the draws, then the draws."""
    n = max(num_data, 1)
    precisions = [each.whitening * (n / each.total_std) for each in releases]
    means = [each.centre + torch.linalg.solve(each.whitening, each.total / n) for each in releases]
    precision = sum(w.T @ w for w in precisions)
    pulled = sum(w.T @ (w @ mean) for w, mean in zip(precisions, means, strict=True))
    root = torch.linalg.cholesky(precision)
    middle = short(torch.cholesky_solve(pulled[:, None], root)[:, 0])
    looks = []
    for each in releases:
        apart = each.whitening @ (middle - each.centre)
        released, noise = each.products / n - torch.outer(apart, apart), each.products_std / n
        # an error e of W·mean moves this by aeᵀ + eaᵀ: scale a down until noise hides it
        errors = torch.linalg.solve_triangular(root, each.whitening.T, upper=False)
        length = apart.square().sum().clamp_min(1e-300)
        kept = noise / (noise**2 + 2 * length * torch.linalg.matrix_norm(errors, 2) ** 2).sqrt()
        scaled = torch.eye(len(middle)).double() - (1 - kept) / length * torch.outer(apart, apart)
        looks.append(Look(scaled @ released @ scaled, noise, scaled @ each.whitening))
    with seeded(seed):
        matrices = matrices_of(looks, count)
        errors = torch.randn(count, len(middle), dtype=torch.float64)
    errors = torch.linalg.solve_triangular(root.T, errors.T, upper=True).T
    centres = torch.cat([middle[None], short(middle + errors)])
    # columns may be collinear: a root of their covariance exists nevertheless
    ridge = _RIDGE * matrices.diagonal(dim1=1, dim2=2).mean(1)
    matrices = matrices + ridge[:, None, None] * torch.eye(len(middle)).double()
    matrices = torch.cat([matrices.mean(0, keepdim=True), matrices])
    # rows of norm 1 at most have second moments whose trace is 1 at most
    traces = matrices.diagonal(dim1=1, dim2=2).sum(1)
    matrices = matrices * ((1 - centres.square().sum(1)) / traces).clamp(1e-9, 1.0)[:, None, None]
    return list(zip(centres, matrices, strict=True))


def in_units(rows: Tensor, shape: FeatureShape) -> Tensor:
    """The free columns of shortened rows ``[n, p]``, in units of R: norms are at most 1."""
    # again: rounding to few digits, for example to bfloat16, can make rows longer than the bound
    return short(rows[:, shape.free].to("cpu", torch.float64) / shape.bound)


def noisy_moments(
    rows: Tensor,
    multipliers: Sequence[tuple[float, float]],
    num_data: int,
    seed: int,
    ridge: float = 0.0,
    matrices_of: Callable[[Sequence[Look], int], Tensor] = gram_draws,
) -> list[NoisyMoments]:
    """Release moments of private rows (:func:`in_units`), with z of each mean and of each matrix of
    products. The first rows are not whitened. Variances below ``ridge`` are not scaled up to 1.
    """
    size, found = rows.shape[1], list[NoisyMoments]()
    centre, whitening = torch.zeros(size).double(), torch.eye(size, dtype=torch.float64)
    for of_mean, of_products in multipliers:
        if found:
            laws = law_draws(found, num_data, _LAWS_TRIED, seed, matrices_of)
            share = min(0.5, of_products / max(num_data, 1))
            centre, whitening = _centre_and_whitening(laws, ridge, share, seed)
        own = short((rows - centre) @ whitening.T)
        total = own.sum(0) + of_mean * normal_numbers(size)
        products = with_symmetric_noise(own.T @ own, of_products)
        found.append(NoisyMoments(total, of_mean, products, of_products, centre, whitening))
    return found


def _centre_and_whitening(
    laws: Sequence[tuple[Tensor, Tensor]], ridge: float, share: float, seed: int
) -> tuple[Tensor, Tensor]:
    """c, and W such that this share of simulated rows W·(x/R − c) is longer than 1."""
    (centre, covariance), *others = laws
    values, vectors = torch.linalg.eigh(covariance)
    values = values.clamp_min(_RIDGE * float(values.max())) + ridge
    whitening = (vectors / values.sqrt()).T
    norms = []
    with seeded(seed):
        for mean, own in others:
            spread, axes = torch.linalg.eigh(own)
            normal = torch.randn(_ROWS_TRIED, len(mean), dtype=torch.float64)
            row = short(mean + (normal * spread.clamp_min(0.0).sqrt()) @ axes.T)
            norms.append(((row - centre) @ whitening.T).norm(dim=1))
    return centre, whitening / float(torch.cat(norms).quantile(1 - share))


def shortened_draws(
    mean: Tensor,
    covariance: Tensor,
    count: int,
    grouped: tuple[Tensor, Sequence[Tensor]] | None = None,
) -> Tensor:
    """Gaussian rows that have these moments after they are shortened to norm 1. The moments of the
    drawn rows themselves are fitted, without sampling error.

    ``grouped``: the differences of the rows' means, ``[count or more, p]``, and the categories that
    cause them. The differences are shrunk if they vary more than the rows.
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
        # Cholesky's root: another root would rotate, and rows with it, from step to step
        root = root @ (basis * (1 - between.clamp_max(_MOST_BETWEEN)).sqrt())
        root = torch.linalg.cholesky(root @ root.T)
    wanted, fitted = torch.linalg.cholesky(covariance), apart_by
    # if noise has moved the mean to norm 1, rounded rows have no covariance
    least = _RIDGE * float(wanted.square().sum()) / size + torch.finfo(torch.float64).eps
    steps = _FITTING_STEPS * (1 + len(columns))
    for step in range(steps + 1):
        rows = short(place + fitted + normal @ root.T)
        if step < steps:
            found = rows.mean(0)
            place, apart = place + mean - found, rows - found
            for column in columns:  # short steps, as columns may depend on each other
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
    parts = [rows[number] for number in records.of_role("numbers")]
    # also for no rows
    return torch.cat([row.reshape(len(row), math.prod(row.shape[1:])) for row in parts], 1)


def feature_shape(
    records: ModelRecords, bound: float, constants: Mapping[int, float]
) -> FeatureShape | None:
    """The shape of the arguments that are private rows of numbers; None if there are none."""
    few = records.density.made_up.few()
    numbers = records.of_role("numbers")
    widths = [math.prod(few[k].shape[1:]) for k in numbers]
    if any(k >= sum(widths) for k in constants):
        raise ArgumentError(
            f"constant_columns names column {max(constants)}, but private covariates that are"
            f" numbers have {sum(widths)} columns."
        )
    if not widths:
        return None
    if len(constants) == sum(widths):
        raise UnfitModel(
            "all covariates are constant columns: pass them inside the model or as public=."
        )
    return FeatureShape(float(bound), dict(constants), tuple(widths))


def parts_of(records: ModelRecords, columns: Tensor, shape: FeatureShape) -> dict[int, Tensor]:
    """Shortened columns ``[n, p]``, split into the arguments."""
    result, like = {}, records.density.made_up.few()
    parts = shape.shortened(columns).split(list(shape.widths), dim=1)
    for number, part in zip(records.of_role("numbers"), parts, strict=True):
        part = part.reshape(len(columns), *like[number].shape[1:])
        result[number] = part.to(like[number].dtype)
    return result


def shortened_rows(
    records: ModelRecords, rows: Sequence[Tensor], shape: FeatureShape | None
) -> list[Tensor]:
    """Rows of all arguments, where private numbers are shortened. Private data."""
    if shape is None:
        return list(rows)
    parts = parts_of(records, all_numbers(records, rows), shape)
    return [parts.get(number, row) for number, row in enumerate(rows)]


# -- categories ------------------------------------------------------------------------------------


def has_combinations(sizes: Mapping[int, int]) -> bool:
    """Whether combinations are counted."""
    return len(sizes) > 1 and math.prod(sizes.values()) <= _MOST_COMBINATIONS


def num_ones(sizes: Mapping[int, int], has_numbers: bool) -> int:
    """The largest squared length of the vector that a record adds."""
    return len(sizes) * (1 + has_numbers) + has_combinations(sizes)


class CategoryLaw(NamedTuple):
    """The distribution of categories, and by how much the means of rows differ between them."""

    numbers: Sequence[int] = ()  # numbers of the arguments
    tables: Sequence[tuple[Tensor, Tensor]] = ()  # combinations [c, arguments] and their shares
    effects: Sequence[Tensor] = ()  # [categories, p] of each argument

    def drawn(self, count: int) -> list[Tensor]:
        """``count`` draws of categories, for each argument."""
        result = list[Tensor]()
        for combinations, shares in self.tables:
            chosen = torch.multinomial(shares, count, replacement=True)
            result += combinations[chosen].T
        return result


def uniform_law(sizes: Mapping[int, int]) -> CategoryLaw:
    """All categories are equally frequent, and arguments are independent."""
    each = [torch.ones(size, dtype=torch.float64) for size in sizes.values()]
    return CategoryLaw(list(sizes), [(torch.arange(len(e))[:, None], e) for e in each])


class NoisyCategories(NamedTuple):
    """Sums over the records of each category, with noise."""

    sizes: Mapping[int, int]  # number of categories, by number of the argument
    sums: Tensor  # of (1, x/R), one argument after another, [q, 1 + p]
    combinations: Tensor | None  # their counts
    std: float  # of the noise of all these numbers

    def laws(
        self, num_data: int, moments: Sequence[tuple[Tensor, Tensor] | None], seed: int
    ) -> list[CategoryLaw]:
        """The mean of the draws, then a draw for each of the ``moments`` of rows but the first."""
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
        """A draw of counts. A priori they are about proportional to ``level``."""
        level = n * (level / level.sum())[:, None]
        apart = self._differences(noisy[:, None] - level, torch.ones_like(level), n * level, n)
        return (level + apart)[:, 0].clamp_min(_LEAST_COUNT)

    def _effects(
        self, n: int, tables: Sequence[tuple[Tensor, Tensor]], mean: Tensor, covariance: Tensor
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
        # start with one ρ for all arguments: in Gibbs steps, dependent arguments move slowly
        values, turn = torch.linalg.eigh(weights)
        start = turn @ self._differences(turn.T @ left, values.clamp_min(0.0)[:, None], scales, n)
        left, sizes = left - weights @ start, list(self.sizes.values())
        if len(sizes) == 1:
            return [start @ basis.T]
        found, weights = list(start.split(sizes)), weights.split(sizes, 1)
        turns = [torch.linalg.svd(each, full_matrices=False) for each in weights]
        # one sweep is enough if arguments are independent
        for number in [*range(len(found))] * (_SWEEPS if len(tables) < len(found) else 1):
            own, (out, size, back) = left + weights[number] @ found[number], turns[number]
            found[number] = back.T @ self._differences(out.T @ own, size[:, None], scales, n)
            left = own - weights[number] @ found[number]
        return [each @ basis.T for each in found]

    def _differences(self, sums: Tensor, weights: Tensor, scales: Tensor, n: int) -> Tensor:
        """A draw of d ``[k, p]``, N(0, ρ·``scales``), ρ by column, given ``weights``·d + noise."""
        places = torch.linspace(0.0, 1.0, _GRID, dtype=torch.float64)
        # the least is about the variance of n independent records
        rho = _MOST_BETWEEN * (n + 1.0) ** -places
        h = 1 / rho[:, None, None]
        variances = (weights.square() * scales)[..., None] * rho + self.std**2
        of_sums = -(sums.square()[..., None] / variances + variances.log()).sum(0) / 2
        joint = of_sums + (rho.log() + (h - 1) * torch.log1p(-rho)).log_softmax(2)  # [h, i, ρ]
        of_h = joint.logsumexp(2).sum(1) - h[:, 0, 0].log() / 2
        own = joint[torch.multinomial(of_h.softmax(0), 1)[0]]
        between = rho[torch.multinomial(own.softmax(1), 1)[:, 0]] * scales
        gain = between / (weights.square() * between + self.std**2)
        white = torch.randn(sums.shape, dtype=torch.float64)
        return gain * weights * sums + self.std * gain.sqrt() * white


def noisy_categories(
    columns: Sequence[Tensor], sizes: Mapping[int, int], rows: Tensor | None, multiplier: float
) -> NoisyCategories:
    """Release sums over private categories, ``[n]`` of each argument, and rows ``[n, p]`` of norm
    at most 1, if any. Categories outside their range are left out.
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
