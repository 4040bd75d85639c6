r"""Of many parameters, what gradients tell of the curvature along the way of a run, and how much a
gradient says in directions that noise hides.

Of d parameters the error E of a released curvature has d(d+1)/2 numbers, of which the releases of a
run cannot tell. What they do tell is how gradients change along the way, e = Ew for its unit vector
w: d numbers, each of which is a regression on one number of each release, s_k = w·θ_k. In
coordinates of w and of the eigenvectors across it, with Var e_i = p_i and n_ki the variance of
release k in coordinate i, which is its noise, what a straight line gets wrong, and the error of the
curvature across the way,

.. math:: c_i = \Big(\frac1{p_i} + \sum_k \frac{(s_k - \bar s_i)^2}{n_{ki}}\Big)^{-1}, \qquad
    \hat e_i = c_i \sum_k \frac{(s_k - \bar s_i)(\tilde g_k - F\theta_k)_i}{n_{ki}},

s̄_i being the mean with weights 1/n_ki. The releases' mean, of which a likelihood is made, has one
weight ω_k for all coordinates, so that it is independent of their differences but for how much n_ki
varies with i.

In a positive definite F, F_wi² is at most F_ww F_ii/d on average. It may be much less, which the
released row and the differences tell, of all entries together: the likeliest of a few multiples.

With δ = Σω_kθ_k − θ, δ_U and δ_S its parts in hidden and in other directions across
(:mod:`~torch_dpbayes.noise_aware.hidden_directions`), z_i = c_iδ_i across and z_w = 0, and t =
min(1, λ/v),

.. math:: \operatorname{Cov} E\delta = \operatorname{diag}(\ldots) + \delta_w (w z^\top + z w^\top)
    + \tfrac{v^2}2 (t^2 \delta_U\delta_U^\top + \delta_U\delta_S^\top + \delta_S\delta_U^\top +
    \delta_S\delta_S^\top),

whose diagonal is Σ c_iδ_i² along the way, c_iδ_w² + ½v²(t²‖δ_U‖² + ‖δ_S‖²) in hidden directions
and c_iδ_w² + ½v²(‖δ_U‖² + ‖δ_S‖²) in others. F itself is a diagonal matrix but for the row and
the column of the way, so that M is a diagonal matrix and a change of rank five.

A Gaussian error spreads what it does not know over all of the |U| hidden directions. A curvature
that noise hides may as well be that of few of them, ρ|U|, and none in the others: correlated
features have such a one. A gradient near zero is then ρ|U| coincidences, and not |U| of them, which
would say that θ is near in directions where records say nothing. So

.. math:: \log p(r) = \log p(r_S) + \rho \log p(r_U \mid r_S), \qquad \rho = \frac{\lambda^2}
    {\lambda^2 + |U|\tau^2}

with the residual's parts, and τ² the variance of the entries of F_UU, as far as they are not λI:
that is the ρ of a multiple of a projection. A power of a density is none; ρ is the same for all
levels λ, which therefore can be compared.

Where directions across the way may be taken for alike, none is hidden, and their curvature is the
estimate. That along the way may change on it by a factor of e^κ, as in
:mod:`~torch_dpbayes.noise_aware.bent_response`, but with s = w·(θ − c)/‖u‖, the way's own share of
it: then φ changes s_k alone, and F_α has (1 + ⅔γ)Fw beside the way and (1 + ⅔γ)²wᵀFw along it.
Each κ counts by the likelihood of the differences along the way, with the likeliest row and misfit.
The curvature along the way begins with what was released of it, and all of its noise, which holds
none at all for possible: θ at the prior's mean, where the prior's log density is L²/2 higher than
at the end of a way of L deviations, though the data chose its direction. So a κ counts only if its
differences are against that by clearly more, F_ww²/2c_w; where none is left, the way is taken for
a direction like others.

Derived in this project.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .bent_response import (
    BENDS,
    IS_KNOWN,
    LEAST_OF_WAY,
    LEVELS,
    SHORTEST_WAY,
    BentResponse,
    bent,
    likeliest,
)
from .hidden_directions import HiddenDirections
from .learned_curvature import LARGEST_DIMENSION, MISFITS
from .priors import GaussianPrior
from .response import FLOOR_OF_NOISE
from .surrogate import AnySurrogate
from .transcript import GradientRelease

_MOST_PARAMETERS = 1000  # every step takes their eigenvectors
_IS_ALIKE = 0.5  # ρ
_SURELY = 2.0  # standard errors
_SURELY_FAR = 10.0  # twice a difference of log densities
# of the squares that the row of a positive definite matrix can have; the likeliest of these counts
_MULTIPLES = (1.0, 0.3, 0.1, 0.03, 0.01)
_MOST_EXPLAINED = 0.9  # of the curvature along the way, by what it has in common with others
_NUMBERS_AT_ONCE = 2**21  # that a tensor for many θ holds
_RANK = 5


class Across(NamedTuple):
    """What is known of F across the way."""

    vectors: Tensor
    """Its eigenvectors there, hidden ones first, and the unit vector of the way, ``[d, d]``."""
    values: Tensor
    """Their eigenvalues, ``[d - 1]``."""
    std: float
    """v, of the error."""
    num_hidden: int
    """|U|."""
    shrinkage: float
    """t."""
    power: float
    """ρ."""


def learned_ways(
    gradients: Sequence[GradientRelease],
    curvature: Tensor,
    curvature_std: float,
    released: Tensor,
    released_std: float,
    centre: Tensor,
    prior: GaussianPrior,
    most: float | None = None,
) -> list[LearnedWaySurrogate]:
    """Surrogates for equally likely levels of hidden directions. Where none is hidden, as the
    directions across the way may be taken for alike, for the likeliest κ that tell where the way
    leads. None where the way is short; of few parameters, whose whole curvature is learned; and of
    too many.

    Args:
        gradients: the noisy gradients.
        curvature: F̂ at the centre, positive definite, with the noise ``curvature_std`` left in it.
        released: what was released of the curvature, with the noise ``released_std``.
        centre: where the run is.
        prior: at whose mean it began.
        most: of the sum of all levels of the curvature. None: one level is enough.
    """
    way = centre - prior.mean
    length = float((way @ prior.matrix @ way).sqrt())
    if not LARGEST_DIMENSION < len(centre) <= _MOST_PARAMETERS or length < SHORTEST_WAY:
        return []
    unit = way / way.norm()
    beside = torch.linalg.svd(unit[None])[2][1:]
    hidden = HiddenDirections.of(beside @ released @ beside.T, released_std)
    power = _share_with_curvature(hidden, released_std)
    if power > _IS_ALIKE and hidden.mean > IS_KNOWN * hidden.std:
        values, vectors = torch.linalg.eigh(beside @ curvature @ beside.T)
        turn = torch.cat([vectors.T @ beside, unit[None]]).T
        known = Across(turn, values, curvature_std, 0, 1.0, 1.0)
        bends = [
            LearnedWaySurrogate(gradients, known, released, released_std, centre, way, bend)
            for bend in BENDS
        ]
        return [one for one in likeliest(bends) if one.knows_a_way_of(length)]
    levels = [hidden.middle]
    if most is not None:
        levels = hidden.levels(float(prior.precision.mean()), most, LEVELS)
    turn = torch.cat([hidden.vectors.T @ beside, unit[None]]).T
    found = []
    for level in levels:
        share, values = min(1.0, level / released_std), hidden.values_at(level)
        across = Across(turn, values, released_std, hidden.num_hidden, share, power)
        found.append(LearnedWaySurrogate(gradients, across, released, released_std, centre, way))
    return found


def _share_with_curvature(hidden: HiddenDirections, noise_std: float) -> float:
    """ρ, no larger than is sure."""
    count = hidden.num_hidden
    numbers = count * (count + 1) / 2
    spread = (hidden.spread / numbers - noise_std**2) / 2
    error = noise_std**2 / 2 * math.sqrt(2 / numbers)
    variance = max(spread, 0.0) + _SURELY * error
    return hidden.middle**2 / (hidden.middle**2 + count * variance)


class LearnedWaySurrogate(AnySurrogate):
    """log p(transcript | θ), for Gaussian releases.

    Args:
        gradients: the noisy gradients.
        across: F̂ across the way.
        released: what was released of the curvature, with the noise ``released_std``.
        centre: c, where the run is, at the end of the way.
        way: u.
        bend: κ.
    """

    def __init__(
        self,
        gradients: Sequence[GradientRelease],
        across: Across,
        released: Tensor,
        released_std: float,
        centre: Tensor,
        way: Tensor,
        bend: float = 0.0,
    ) -> None:
        turn, others = across.vectors, across.values
        row = turn.T @ (released @ turn[:, -1])
        along = max(float(row[-1]), LEAST_OF_WAY * released_std)
        possible = along * others / len(others)
        begins = [_begin(row, along, k * possible, others, released_std) for k in _MULTIPLES]
        dense = turn @ begins[0].start @ turn.T
        # φ moves θ along the way and by how far it is along the way
        beside_none = turn * begins[0].start.diagonal() @ turn.T
        response = BentResponse(beside_none, centre, way, bend)
        super().__init__(gradients, response, dense, across.std, centre)
        self._length, self._bend = float(way.norm()), bend
        points, values = (self._points - centre) @ turn, self._values @ turn
        noises = self._noises @ torch.stack([dense.new_ones(()), dense.diagonal().mean()])
        fits = [_learned(points, values, noises, across, begin) for begin in begins]
        best = max(range(len(fits)), key=lambda k: begins[k].log_evidence + fits[k].of_others)
        fit, start = fits[best], begins[best].start
        self.log_evidence, self._left, self._across = fit.of_way, fit.variances, across
        least = FLOOR_OF_NOISE * math.sqrt(float(fit.variances[-1]))
        row = start[-1] + fit.estimates
        self._turned = _arrow(float(row[-1]), row[:-1], others, least)
        total = fit.noises + _errors_of_others(points, across, fit.variances).mean(-1)
        weights = total.reciprocal() / total.reciprocal().sum()
        self._point = weights @ points
        self._at_centre = weights @ (values - points @ self._turned)
        self._own = float(weights.square() @ fit.noises)
        self.curvature = turn @ self._turned @ turn.T
        self._mean = turn @ self._at_centre - centre @ self.curvature
        self.noise = self._own * torch.eye(len(centre), dtype=dense.dtype)

    def _of_curvature_error(self, moved: Tensor) -> Tensor:
        across, turn = self._across, self._across.vectors
        delta = self._point - (moved - self.centre) @ turn
        own = _errors_of_others(delta, across, self._left) + self._left * delta[-1].square()
        shrunk = torch.ones_like(self._turned)
        shrunk[: across.num_hidden, : across.num_hidden] = across.shrinkage**2
        found = 0.5 * across.std**2 * shrunk * torch.outer(delta, delta)
        found[-1] = found[:, -1] = delta[-1] * self._left * delta
        found[-1, -1] = 0.0
        return turn @ (torch.diag(own) + found) @ turn.T

    def precision(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """As of any surrogate; of it what hidden directions add to the others counts ρ times."""
        whole, product = super().precision(theta)
        seen = self._across.vectors[:, self._across.num_hidden :]
        slope = seen.T @ self._straight.tangent(self.curvature, theta)
        moved = self._straight.moved(theta)
        residual = seen.T @ (self._mean + self.curvature @ moved)
        covariance = self.curvature + self.noise + self._of_curvature_error(moved)
        weighted = torch.linalg.solve(seen.T @ covariance @ seen, slope).T
        part = weighted @ slope
        of_part = part @ theta - weighted @ residual
        power = self._across.power
        return (
            power * whole + (1 - power) * (part + part.T) / 2,
            power * product + (1 - power) * of_part,
        )

    def knows_a_way_of(self, length: float) -> bool:
        """Whether F_ww says surely that the way led somewhere, in ``length`` deviations of the
        prior.
        """
        return float(self._turned[-1, -1].square() / self._left[-1]) > length**2 + _SURELY_FAR

    def form(self) -> ManyWays:
        """A diagonal, and what changes it."""
        return self._form

    @cached_property
    def _form(self) -> ManyWays:
        across = self._across

        def number(value: float) -> Tensor:
            return torch.full((1, 1), value, dtype=torch.float64)

        return ManyWays(
            across.vectors,
            self.centre,
            across.num_hidden,
            across.power,
            self._length,
            self._turned[-1][None, None],
            self._turned.diagonal()[None, None],
            self._at_centre[None, None],
            self._point[None, None],
            self._left[None, None],
            number(self._own),
            number(0.5 * across.std**2),
            number(across.shrinkage**2),
            number(self._bend),
            number(self.log_evidence),
        )

    def log_likelihood(self, theta: Tensor) -> Tensor:
        """By its form."""
        rows = theta.reshape(-1, theta.shape[-1])
        return self._form.log_likelihood(rows).reshape(theta.shape[:-1])


class ManyWays(NamedTuple):
    """K such likelihoods at once, with different levels of the same hidden directions. These come
    first in their coordinates, and the way last.
    """

    turn: Tensor
    """To these coordinates, ``[d, d]``."""
    centre: Tensor
    """c, ``[d]``."""
    num_hidden: int
    """|U|."""
    power: float
    """ρ."""
    length: float
    """‖u‖."""
    row: Tensor
    """F w, ``[K, 1, d]``."""
    diagonal: Tensor
    """Of F, ``[K, 1, d]``."""
    mean: Tensor
    """The residual at c, ``[K, 1, d]``."""
    point: Tensor
    """Σω_kθ_k − c, ``[K, 1, d]``."""
    left: Tensor
    """c_i, ``[K, 1, d]``."""
    own: Tensor
    """Variance of the mean release, ``[K, 1]``."""
    half: Tensor
    """½v², ``[K, 1]``."""
    shrinkage: Tensor
    """t², ``[K, 1]``."""
    bend: Tensor
    """κ, ``[K, 1]``."""
    log_evidence: Tensor
    """``[K, 1]``."""

    @staticmethod
    def stacked(forms: Sequence[ManyWays]) -> ManyWays:
        """All of them; the first five entries are the same in each."""
        common, parts = forms[0][:5], zip(*(form[5:] for form in forms), strict=True)
        return ManyWays(*common, *map(torch.cat, parts))

    def log_likelihood(self, theta: Tensor) -> Tensor:
        """log p(transcript | θ) up to a constant, ``[K, m]`` for θ ``[m, d]``; differentiable."""
        rows = max(1, _NUMBERS_AT_ONCE // (_RANK * self.row.numel()))
        return torch.cat([self._of_some(some) for some in theta.split(rows)], 1)

    def _of_some(self, theta: Tensor) -> Tensor:
        # of hidden directions, of others across the way, and of the way
        sizes = [self.num_hidden, len(self.turn) - 1 - self.num_hidden, 1]
        rows, values, means, points, lefts = (
            part.split(sizes, -1)
            for part in (self.row, self.diagonal, self.mean, self.point, self.left)
        )
        *places, away = ((theta - self.centre) @ self.turn).split(sizes, -1)
        steps = away[..., 0] / self.length
        further, slope = bent(steps, self.bend)
        of_way = away[..., 0] + self.length * further
        # T scales what F_α has along the way
        scale = (1 + 2 * slope.sqrt()) / 3
        delta_way = self.point[..., -1] - of_way
        deltas = [points[k] - places[k] for k in range(2)]
        of_hidden, of_others = (delta.square().sum(-1) for delta in deltas)
        errors = [
            self.half * (self.shrinkage * of_hidden + of_others),
            self.half * (of_hidden + of_others),
        ]
        sums = []
        for k, delta in enumerate(deltas):
            more = (self.own + errors[k])[..., None]
            vectors = [rows[k].expand_as(delta), delta, lefts[k] * delta]
            sums.append(
                _Sums.of(
                    means[k] + rows[k] * of_way[..., None] + values[k] * places[k],
                    values[k] + more + lefts[k] * delta_way.square()[..., None],
                    torch.stack(vectors, -2),
                    _PLACES[k],
                )
            )
        error = sum((lefts[k] * deltas[k].square()).sum(-1) for k in range(2))
        rest = self.own + self.left[..., -1] * delta_way.square() + error
        residual = self.mean[..., -1] + self.row[..., -1] * of_way
        residual = residual + sum((rows[k] * places[k]).sum(-1) for k in range(2))
        of_one = torch.eye(_RANK, dtype=theta.dtype)[:, :1]
        unit = torch.ones_like(rest)[..., None, None]
        own, unbent = (
            _Sums.of(residual[..., None], (self.row[..., -1] * s + rest)[..., None], unit, of_one)
            for s in (scale.square(), 1.0)
        )
        # what M has besides its diagonal, of vectors w, Fw but for its last entry, δ_U, δ_S and z
        half, shrinkage = self.half[..., None, None], self.shrinkage[..., None, None]
        others = half * (
            shrinkage * _between(2, 2) / 2 + _between(2, 3) + _between(3, 3) / 2
        ) + delta_way[..., None, None] * _between(0, 4)
        products = scale[..., None, None] * _between(0, 1) + others, _between(0, 1) + others
        seen = sums[1] + own, sums[1] + unbent
        found = _log_density(seen, products)
        if self.num_hidden:
            all_of_them = sums[0] + seen[0], sums[0] + seen[1]
            found = found + self.power * (_log_density(all_of_them, products) - found)
        return self.log_evidence + torch.where(found.isfinite(), found, -torch.inf)


def _between(i: int, j: int) -> Tensor:
    """The matrix of v_i v_jᵀ + v_j v_iᵀ in products of the vectors."""
    found = torch.zeros(_RANK, _RANK, dtype=torch.float64)
    found[i, j] += 1
    found[j, i] += 1
    return found


# of Fw, δ and z, in hidden directions and in others, among the vectors
_PLACES = [torch.eye(_RANK, dtype=torch.float64)[:, own] for own in ([1, 2, 4], [1, 3, 4])]


class _Sums(NamedTuple):
    """What a normal density with a covariance D + VᵀCV needs of its coordinates."""

    squares: Tensor
    """rᵀD⁻¹r."""
    log_scale: Tensor
    """log|D|."""
    seen: Tensor
    """VD⁻¹r."""
    gram: Tensor
    """VD⁻¹Vᵀ."""

    @staticmethod
    def of(residual: Tensor, diagonal: Tensor, vectors: Tensor, places: Tensor) -> _Sums:
        """Of some coordinates, in which all vectors are 0 but for ``vectors`` at ``places``."""
        scaled = vectors / diagonal[..., None, :]
        return _Sums(
            (residual.square() / diagonal).sum(-1),
            diagonal.log().sum(-1),
            (scaled * residual[..., None, :]).sum(-1) @ places.T,
            places @ (scaled @ vectors.mT) @ places.T,
        )

    def __add__(self, other: object) -> _Sums:
        assert isinstance(other, _Sums)
        return _Sums(*(a + b for a, b in zip(self, other, strict=True)))

    def misfit(self, products: Tensor) -> Tensor:
        """rᵀM⁻¹r with C = ``products``."""
        right = (products @ self.seen[..., None])[..., 0]
        explained, _ = torch.linalg.solve_ex(self._inner(products), right)
        return self.squares - (self.seen * explained).sum(-1)

    def log_determinant(self, products: Tensor) -> Tensor:
        """log |M|, likewise."""
        return self.log_scale + torch.logdet(self._inner(products))

    def _inner(self, products: Tensor) -> Tensor:
        return torch.eye(products.shape[-1], dtype=products.dtype) + products @ self.gram


def _log_density(sums: tuple[_Sums, _Sums], products: tuple[Tensor, Tensor]) -> Tensor:
    """−½(rᵀM⁻¹r + log |M₀|), with M first and then M₀."""
    return -0.5 * (sums[0].misfit(products[0]) + sums[1].log_determinant(products[1]))


def _errors_of_others(delta: Tensor, across: Across, variances: Tensor) -> Tensor:
    """Variances of Eδ in each coordinate but for those of e·δ_w, ``[..., d]``."""
    hidden, half = across.num_hidden, 0.5 * across.std**2
    squares = delta[..., :-1].square()
    of_hidden = squares[..., :hidden].sum(-1, keepdim=True)
    of_others = squares[..., hidden:].sum(-1, keepdim=True)
    rows = [
        (half * (across.shrinkage**2 * of_hidden + of_others)).expand_as(squares[..., :hidden]),
        (half * (of_hidden + of_others)).expand_as(squares[..., hidden:]),
        (squares * variances[:-1]).sum(-1, keepdim=True),
    ]
    return torch.cat(rows, -1)


class _Begin(NamedTuple):
    """What the release tells of the row along the way."""

    start: Tensor
    """F, ``[d, d]``."""
    variances: Tensor
    """p_i."""
    log_evidence: float
    """Of what was released of it beside the way."""


def _begin(
    row: Tensor, along: float, possible: Tensor, others: Tensor, released_std: float
) -> _Begin:
    """With entries beside the way of the variances ``possible`` before their release."""
    half = 0.5 * released_std**2
    total = possible + half
    variances = torch.cat([possible * half / total, row.new_tensor([released_std**2])])
    log_evidence = -0.5 * float((row[:-1].square() / total + total.log()).sum())
    return _Begin(_arrow(along, row[:-1] * possible / total, others, 0.0), variances, log_evidence)


class _Learned(NamedTuple):
    """What the gradients' differences tell of that row."""

    estimates: Tensor
    """ê_i."""
    variances: Tensor
    """c_i."""
    noises: Tensor
    """Of the releases, with what a straight line gets wrong."""
    of_way: float
    """log p(differences) along the way."""
    of_others: float
    """In all other coordinates."""


def _learned(
    points: Tensor, values: Tensor, noises: Tensor, across: Across, begin: _Begin
) -> _Learned:
    """With the misfit that is likeliest along the way."""
    wrong = (points @ begin.start).square().mean(-1)
    of_others = _errors_of_others(points, across, begin.variances)
    found = []
    for misfit in MISFITS:
        total = noises + misfit**2 * wrong
        estimates, variances, evidence = _along_the_way(
            points[:, -1],
            values - points @ begin.start,
            total[:, None] + of_others,
            begin.variances,
        )
        of_way, of_rest = float(evidence[-1]), float(evidence[:-1].sum())
        found.append(_Learned(estimates, variances, total, of_way, of_rest))
    return max(found, key=lambda one: one.of_way)


def _along_the_way(
    places: Tensor, values: Tensor, noises: Tensor, variances: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """ê, c and log p(differences), from ``values`` = e·s_k + a + noise, ``[releases, d]``, with a
    flat prior of a, for each coordinate by itself.
    """
    precisions = 1 / noises
    weights = precisions / precisions.sum(0)
    apart = places[:, None] - (weights * places[:, None]).sum(0)
    differences = values - (weights * values).sum(0)
    total = 1 / variances + (apart.square() * precisions).sum(0)
    estimates = (apart * differences * precisions).sum(0) / total
    log_evidence = (
        estimates.square() * total
        - (differences.square() * precisions).sum(0)
        - (variances * total).log()
        - noises.log().sum(0)
        - precisions.sum(0).log()
    )
    return estimates, 1 / total, log_evidence / 2


def _arrow(along: float, beside: Tensor, others: Tensor, least: float) -> Tensor:
    """F, ``[d, d]``, positive definite: with ``along`` no less than ``least``, and ``beside`` as
    far as it allows.
    """
    along = max(along, least)
    explained = float((beside.square() / others).sum()) / along
    beside = beside * math.sqrt(min(1.0, _MOST_EXPLAINED / max(explained, 1e-300)))
    matrix = torch.diag(torch.cat([others, others.new_tensor([along])]))
    matrix[-1, :-1] = matrix[:-1, -1] = beside
    return matrix
