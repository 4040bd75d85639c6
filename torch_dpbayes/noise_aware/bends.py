"""The likelihoods of a run along whose way the curvature changes, each with another bend.

κ and F are learned from how the releases differ, which does not depend on θ; each κ of a grid
counts by the likelihood of these differences. A released curvature is shrunk to what its directions
have in common, and the way is where it has least in common with the others: there F begins with
what was released and all of its noise.

Where noise hides directions across the way, they have a level λ in common
(:mod:`~torch_dpbayes.noise_aware.hidden_directions`), which may be that of all directions. Then F
begins with what was released, and with λ among these; no error among them is larger than λ. Each
pair of λ and κ is a part of the likelihood, and here, too, the differences of the gradients tell
which of them are likely.

Of few parameters all of F is learned (:mod:`~torch_dpbayes.noise_aware.bent_surrogate`), and of
many its row along the way (:mod:`~torch_dpbayes.noise_aware.learned_way`).

Derived in this project.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .bent_surrogate import BentSurrogate
from .hidden_directions import HiddenDirections, num_alike
from .learned_curvature import LARGEST_DIMENSION, LEAST_STD, symmetric_units
from .learned_way import LEAST_OF_WAY, Across, LearnedWaySurrogate
from .priors import GaussianPrior
from .response import FLOOR_OF_NOISE, denoised, floored
from .surrogate import AnySurrogate
from .transcript import GradientRelease

_BENDS = (-2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0)  # κ
MOST_PARAMETERS = 1000  # every step takes their eigenvectors
_LEVELS = 6  # of hidden directions
_ENOUGH = 0.99  # of the likelihood of the differences, which the parts that are kept have
_SHORTEST_WAY = 0.5  # standard deviations of the prior
_IS_KNOWN = 4.0  # standard deviations of the noise
_LEAST = 0.25  # of the noise, of eigenvalues
_SURELY = 2.0  # standard errors
_IS_ALIKE = 0.5  # of the directions, that have a curvature


def bent_surrogates(
    gradients: Sequence[GradientRelease],
    curvature: Tensor,
    curvature_std: float,
    released: Tensor,
    released_std: float,
    centre: Tensor,
    prior: GaussianPrior,
    most: float | None = None,
) -> list[AnySurrogate]:
    """Surrogates for each κ, and each level of hidden directions, the likeliest ones first, which
    are likely to ``_ENOUGH`` together. None where the way is short, of one parameter, and of too
    many.

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
    if not 1 < len(centre) <= MOST_PARAMETERS or length < _SHORTEST_WAY:
        return []
    unit = way / way.norm()

    def levels(hidden: HiddenDirections) -> list[float]:
        if most is None:
            return [hidden.middle]
        return hidden.levels(float(prior.precision.mean()), most, _LEVELS)

    found: list[AnySurrogate]
    if len(centre) <= LARGEST_DIMENSION:
        if _are_known_across(released, released_std, unit):
            fits = [_known(curvature, curvature_std, released, released_std, unit)]
        else:
            hidden = HiddenDirections.of(released, released_std)
            fits = [
                _hidden(hidden, level, released, released_std, unit) for level in levels(hidden)
            ]
        found = [
            BentSurrogate(
                gradients, fit.curvature, fit.std, centre, fit.units, fit.least, way, bend
            )
            for fit in fits
            for bend in _BENDS
        ]
    else:
        beside = torch.linalg.svd(unit[None])[2][1:]
        hidden = HiddenDirections.of(beside @ released @ beside.T, released_std)
        power = _share_with_curvature(hidden, released_std)
        if power > _IS_ALIKE and hidden.mean > _IS_KNOWN * hidden.std:
            # what tells the way from the others is no noise among these
            of_others, std = denoised(beside @ released @ beside.T, released_std)
            if std > curvature_std:
                of_others, std = beside @ curvature @ beside.T, curvature_std
            values, vectors = torch.linalg.eigh(of_others)
            turn = torch.cat([vectors.T @ beside, unit[None]]).T
            parts = [Across(turn, values, std, 0, 1.0, 1.0)]
        else:
            turn = torch.cat([hidden.vectors.T @ beside, unit[None]]).T
            parts = [
                Across(
                    turn,
                    hidden.values_at(level),
                    released_std,
                    hidden.num_hidden,
                    min(1.0, level / released_std),
                    power,
                )
                for level in levels(hidden)
            ]
        found = [
            LearnedWaySurrogate(gradients, part, released, released_std, centre, way, bend)
            for part in parts
            for bend in _BENDS
        ]
    found.sort(key=lambda one: -one.log_evidence)
    evidence = torch.tensor([one.log_evidence for one in found], dtype=torch.float64)
    before = evidence.softmax(0).cumsum(0) < _ENOUGH
    return found[: int(before.sum()) + 1]


def _share_with_curvature(hidden: HiddenDirections, noise_std: float) -> float:
    """ρ, of which hidden directions have about all of their curvature, no larger than is sure."""
    count = hidden.num_hidden
    numbers = count * (count + 1) / 2
    spread = (hidden.spread / numbers - noise_std**2) / 2
    error = noise_std**2 / 2 * math.sqrt(2 / numbers)
    variance = max(spread, 0.0) + _SURELY * error
    return hidden.middle**2 / (hidden.middle**2 + count * variance)


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
    return float(values[:count].mean()) > _IS_KNOWN * noise_std / math.sqrt(count)
