r"""How the gradient sum changes with θ where the curvature changes along the way of a run.

Where weights become large, a log likelihood has several times less curvature at the end of a run
than at its beginning, most of all along the way itself. One curvature for all of it promises a
gradient that is not there: steps stay short of the maximum, and a gradient near zero at the end is
better explained by θ near the prior's mean and hardly any curvature. With the way u = c − θ₁ from
the first point to the centre c, and F at the centre,

.. math:: r(\theta) = F(\theta - c) + (h(s) - s)\, F u, \qquad s = \frac{u^\top F (\theta -
    c)}{u^\top F u}, \qquad h(0) = 0, \quad h'(s) = e^{-\kappa s}

so that the curvature along the way is e^κ times as large at its beginning, s = −1, as at its end.
It stays what it is beyond |s| = 1, and across the way it is taken for the same everywhere.

κ and F are learned from how the releases differ, which does not depend on θ
(:mod:`~torch_dpbayes.noise_aware.learned_curvature`); each κ of a grid counts by the likelihood of
these differences. A released curvature is shrunk to what its directions have in common, and the way
is where it has least in common with the others: there F begins with what was released and all of
its noise.

Where noise hides directions across the way, they have a level λ in common
(:mod:`~torch_dpbayes.noise_aware.hidden_directions`), which may be that of all directions. Then F
begins with what was released, and with λ among these; no error among them is larger than λ. Each
pair of λ and κ is a part of the likelihood, and here, too, the differences of the gradients tell
which of them are likely.

Derived in this project.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from .hidden_directions import HiddenDirections, num_alike
from .learned_curvature import (
    LARGEST_DIMENSION,
    LEAST_STD,
    LearnedCurvatureSurrogate,
    symmetric_units,
)
from .priors import GaussianPrior
from .response import FLOOR_OF_NOISE, MISFIT, floored
from .surrogate import AnySurrogate, gaussian_log_likelihood
from .transcript import GradientRelease

BENDS = (-2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0)  # κ
LEVELS = 6  # of hidden directions
_ENOUGH = 0.99  # of the likelihood of the differences, which the parts that are kept have
_NUMBERS_AT_ONCE = 2**22  # that a tensor for many θ holds
SHORTEST_WAY = 0.5  # standard deviations of the prior
IS_KNOWN = 4.0  # standard deviations of the noise
_LEAST, LEAST_OF_WAY = 0.25, 0.5  # of the noise, of eigenvalues and along the way

_Part = TypeVar("_Part", bound=AnySurrogate)


class BentResponse:
    """r and its derivative.

    Args:
        curvature: F at the centre, positive definite.
        centre: c.
        way: u.
        bend: κ.
    """

    misfit = MISFIT

    def __init__(self, curvature: Tensor, centre: Tensor, way: Tensor, bend: float) -> None:
        self._curvature, self._centre = curvature, centre
        self._bend = curvature.new_tensor(bend)
        self._moved = curvature @ way
        self._square = float(way @ self._moved)

    def value(self, theta: Tensor) -> Tensor:
        """r(θ)."""
        more, _ = bent(self._along(theta), self._bend)
        return (theta - self._centre) @ self._curvature + more[..., None] * self._moved

    def slope(self, theta: Tensor) -> Tensor:
        """∂r/∂θ."""
        _, slope = bent(self._along(theta), self._bend)
        of_way = torch.outer(self._moved, self._moved) / self._square
        return self._curvature + (slope - 1)[..., None, None] * of_way

    def variability(self, theta: Tensor) -> float:
        """1: as where nothing is clipped."""
        return 1.0

    def predictor_std(self, theta: Tensor) -> float:
        """It rests on none."""
        return 0.0

    def _along(self, theta: Tensor) -> Tensor:
        """s."""
        return (theta - self._centre) @ self._moved / self._square


def bent(along: Tensor, bend: Tensor) -> tuple[Tensor, Tensor]:
    """h(s) − s and h'(s), for s = ``along`` and κ = ``bend``."""
    inside = along.clamp(-1.0, 1.0)
    slope = (-bend * inside).exp()
    is_straight = bend == 0
    divisor = torch.where(is_straight, 1.0, bend)  # no 0/0 in a gradient
    within = torch.where(is_straight, inside, (1 - slope) / divisor)
    return within + slope * (along - inside) - along, slope


class BentSurrogate(LearnedCurvatureSurrogate):
    """log p(transcript | θ) with that response; arguments as in
    :class:`~torch_dpbayes.noise_aware.learned_curvature.LearnedCurvatureSurrogate`, and

    Args:
        way: u.
        bend: κ.
    """

    def __init__(
        self,
        gradients: Sequence[GradientRelease],
        curvature: Tensor,
        curvature_std: float,
        centre: Tensor,
        units: Tensor,
        least: float | None,
        way: Tensor,
        bend: float,
    ) -> None:
        response = BentResponse(curvature, centre, way, bend)
        super().__init__(gradients, response, curvature, curvature_std, centre, units, least)
        self._way, self._bend = way, bend
        moved = curvature @ way
        self._direction = moved / (way @ moved)

    def form(self) -> ManyBent:
        """Polynomials, and what bends them."""
        return self._form

    @cached_property
    def _form(self) -> ManyBent:
        changed = self.curvature @ self._way
        crossed = torch.outer(self._direction, changed)
        square = float(self._way @ changed) * torch.outer(self._direction, self._direction)
        more = torch.stack([2 / 3 * (crossed + crossed.T), 4 / 9 * square])
        return ManyBent(
            self.centre[None, None],
            self._way[None, None],
            self._direction[None, None],
            torch.full((1, 1), self._bend, dtype=torch.float64),
            (self._mean + self.centre @ self.curvature)[None, None],
            self.curvature[None],
            (self.curvature + self.noise)[None],
            self.quadratic.flatten(1)[None],
            more.flatten(1)[None],
            torch.full((1, 1), self.log_evidence, dtype=torch.float64),
        )

    def log_likelihood(self, theta: Tensor) -> Tensor:
        """By its form."""
        rows = theta.reshape(-1, theta.shape[-1])
        return self._form.log_likelihood(rows).reshape(theta.shape[:-1])


class ManyBent(NamedTuple):
    """Likelihoods with bent responses, K of them at once. With γ = √h' − 1 and m = Fu/uᵀFu, F_α =
    T F̂ Tᵀ has T = I + ⅔γ m uᵀ, so that it, too, is a polynomial.
    """

    centre: Tensor
    """c, ``[K, 1, d]``."""
    way: Tensor
    """u, ``[K, 1, d]``."""
    direction: Tensor
    """m, ``[K, 1, d]``."""
    bend: Tensor
    """κ, ``[K, 1]``."""
    mean: Tensor
    """The residual at c, ``[K, 1, d]``."""
    curvature: Tensor
    """F̂, ``[K, d, d]``."""
    own: Tensor
    """F̂ and the noise, ``[K, d, d]``."""
    quadratic: Tensor
    """Of the curvature's error, as in the learned curvature's surrogate, ``[K, p, d²]``."""
    more: Tensor
    """What γ and γ² add, ``[K, 2, d²]``."""
    log_evidence: Tensor
    """``[K, 1]``."""

    @staticmethod
    def stacked(forms: Sequence[ManyBent]) -> ManyBent:
        """All of them."""
        return ManyBent(*(torch.cat(parts) for parts in zip(*forms, strict=True)))

    def log_likelihood(self, theta: Tensor) -> Tensor:
        """log p(transcript | θ) up to a constant, ``[K, m]`` for θ ``[m, d]``; differentiable."""
        rows = max(1, _NUMBERS_AT_ONCE // self.quadratic.shape[:2].numel())
        return torch.cat([self._of_some(some) for some in theta.split(rows)], 1)

    def _of_some(self, theta: Tensor) -> Tensor:
        away = theta - self.centre
        along = (away * self.direction).sum(-1)
        further, slope = bent(along, self.bend)
        away = away + further[..., None] * self.way
        both = torch.cat([torch.ones_like(away[..., :1]), away], -1)
        rows, columns = torch.triu_indices(both.shape[-1], both.shape[-1])
        error = (both[..., rows] * both[..., columns]) @ self.quadratic
        gamma = slope.sqrt() - 1
        change = torch.stack([gamma, gamma.square()], -1) @ self.more
        shape = (*along.shape, *self.own.shape[1:])
        unbent = self.own[:, None] + error.reshape(shape)
        residual = self.mean + away @ self.curvature
        found = gaussian_log_likelihood(residual, unbent + change.reshape(shape), unbent)
        return self.log_evidence + found


def bent_surrogates(
    gradients: Sequence[GradientRelease],
    curvature: Tensor,
    curvature_std: float,
    released: Tensor,
    released_std: float,
    centre: Tensor,
    prior: GaussianPrior,
    most: float | None = None,
) -> list[BentSurrogate]:
    """Surrogates for each κ, and each level of hidden directions, the likeliest ones first, which
    are likely to ``_ENOUGH`` together. None where the way is short, of one parameter, and of too
    many for a learned curvature.

    Args:
        gradients: the noisy gradients.
        curvature: F̂ at the centre, positive definite, with the noise ``curvature_std`` left in it.
        released: what was released of it, with the noise ``released_std``.
        centre: where the run is.
        prior: at whose mean it began.
        most: of the sum of all levels of the curvature. None: hidden directions have one level.
    """
    way = centre - prior.mean
    length = float((way @ prior.matrix @ way).sqrt())
    # of one parameter the level is all of the curvature, and is known
    if not 1 < len(centre) <= LARGEST_DIMENSION or length < SHORTEST_WAY:
        return []
    unit = way / way.norm()
    if _are_known_across(released, released_std, unit):
        fits = [_known(curvature, curvature_std, released, released_std, unit)]
    else:
        hidden = HiddenDirections.of(released, released_std)
        levels = [hidden.middle]
        if most is not None:
            levels = hidden.levels(float(prior.precision.mean()), most, LEVELS)
        fits = [_hidden(hidden, level, released, released_std, unit) for level in levels]
    found = [
        BentSurrogate(gradients, fit.curvature, fit.std, centre, fit.units, fit.least, way, bend)
        for fit in fits
        for bend in BENDS
    ]
    return likeliest(found)


def likeliest(found: list[_Part]) -> list[_Part]:
    """Those with the largest likelihoods of the differences, which have ``_ENOUGH`` of it."""
    found.sort(key=lambda one: -one.log_evidence)
    evidence = torch.tensor([one.log_evidence for one in found], dtype=torch.float64)
    before = evidence.softmax(0).cumsum(0) < _ENOUGH
    return found[: int(before.sum()) + 1]


class _Begin(NamedTuple):
    """What is known of F before the gradients are compared; as for
    :class:`~torch_dpbayes.noise_aware.learned_curvature.LearnedCurvatureSurrogate`.
    """

    curvature: Tensor
    std: float
    units: Tensor
    least: float | None


def _known(
    curvature: Tensor, std: float, released: Tensor, released_std: float, unit: Tensor
) -> _Begin:
    """The estimate; along the way what was released, with all of its noise."""
    of_way = torch.outer(unit, unit)
    along = _along(released, released_std, unit) - float(unit @ curvature @ unit)
    more = math.sqrt(max(released_std**2 - std**2, 0.0)) / max(std, LEAST_STD)
    units = torch.cat([symmetric_units(len(unit)), more * of_way[None]])
    return _Begin(floored(curvature + along * of_way, _LEAST * released_std), std, units, None)


def _hidden(
    found: HiddenDirections, level: float, released: Tensor, noise_std: float, unit: Tensor
) -> _Begin:
    """What was released, with that level where it is hidden. Among those directions no error is
    larger than the level; along the way it has all of the noise.
    """
    vectors, share = found.vectors, min(1.0, level / noise_std)
    shares = torch.ones_like(released)
    shares[: found.num_hidden, : found.num_hidden] = share
    units = vectors @ (symmetric_units(len(unit)) * shares) @ vectors.T
    of_way = torch.outer(unit, unit)
    curvature = (vectors * found.values_at(level)) @ vectors.T
    along = _along(released, noise_std, unit) - float(unit @ curvature @ unit)
    curvature = curvature + max(along, 0.0) * of_way
    return _Begin(curvature, noise_std, torch.cat([units, of_way[None]]), FLOOR_OF_NOISE * level)


def _along(released: Tensor, noise_std: float, unit: Tensor) -> float:
    return max(float(unit @ released @ unit), LEAST_OF_WAY * noise_std)


def _are_known_across(released: Tensor, noise_std: float, unit: Tensor) -> bool:
    """Whether the directions across the way stand out of the noise: the lowest of them that are
    alike, by their mean.
    """
    across = torch.linalg.svd(unit[None])[2][1:]
    values = torch.linalg.eigvalsh(across @ released @ across.T)
    count = num_alike(values, noise_std)
    return float(values[:count].mean()) > IS_KNOWN * noise_std / math.sqrt(count)
