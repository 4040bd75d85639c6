"""The only place of this package that reads records: noisy sums of them, each charged
beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..accounting.accountant import PrivacyAccountant
from ..accounting.events import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    Neighboring,
    neighboring_relation,
)
from ..noise import GaussianNoise
from .groups import Groups
from .planning import Plan
from .priors import GaussianPrior
from .response import Response
from .transcript import (
    ClippedRelease,
    CurvatureRelease,
    DiagonalRelease,
    GradientRelease,
    LengthRelease,
    LevelRelease,
)

_CPU = torch.device("cpu")


class PrivateSums(Protocol):
    """Sums over private records, exact. What one record adds to a sum is bounded, whatever
    the record holds.
    """

    dimension: int
    gradient_bound: float
    """Of a record's part in :meth:`gradient_sum`, Euclidean norm."""
    curvature_bound: float
    """Frobenius norm of a record's part in :meth:`curvature_sum`, which is not negative."""
    max_feature_norm: float | None
    """To which rows of features are shortened; None where they are not."""

    def is_valid(self, theta: Tensor) -> bool:
        """Whether the model can be evaluated at θ, whatever the records are."""

    def gradient_sum(self, theta: Tensor) -> Tensor:
        """Σ clip(∇ℓ_i(θ)), ``[d]`` in float64. Private data."""

    def curvature_sum(self, theta: Tensor) -> Tensor:
        """What stands for Σ ∇²ℓ_i(θ), ``[d, d]`` in float64. Private data."""


class GeneralSums(PrivateSums, Protocol):
    """The same for any model."""

    num_records: int
    site: Tensor
    """The number of each parameter's site, ``[d]``, from 0 without gaps."""
    curvature_is_of_gradients: bool
    """Whether :meth:`curvature_sum` is Σ c cᵀ of the clipped gradients."""

    @property
    def groups(self) -> Groups | None:
        """Parameters of which every record reads one group's; None where there are none."""

    def clipped_count(self, theta: Tensor) -> int:
        """How many gradients are clipped and nothing makes up for it. Private data."""


class DiagonalSums(PrivateSums, Protocol):
    """The same for the diagonal form."""

    num_records: int
    curvature_is_of_gradients: bool

    def clipped_count(self, theta: Tensor) -> int:
        """How many gradients are clipped and nothing makes up for it. Private data."""

    def curvature_diagonal(self, theta: Tensor) -> Tensor:
        """The diagonal of what :meth:`curvature_sum` is, without the rest; ``[d]`` in float64. What
        a record adds is not negative, and no longer than ``curvature_bound``. Private data.
        """


class PrivateGram(PrivateSums, Protocol):
    """The same for a model with one linear predictor x·θ a record."""

    gram_bound: float
    """Frobenius norm of a record's part in :meth:`gram_sum`, which is not negative."""

    prior: GaussianPrior
    """Of the parameters, with mean zero."""

    def gram_sum(self) -> Tensor:
        """Σ x xᵀ, ``[d, d]`` in float64. Private data."""

    def response(self, gram: Tensor, num_data: int) -> Response:
        """How gradients change with θ if the Gram matrix is ``gram``."""

    def slope(self, length: float) -> float:
        """Of a clipped gradient at zero weights, for features of that length, in units of the
        bound; over the length's square.
        """

    def length_counts(self, shape: Tensor, edges: Sequence[float]) -> Tensor:
        """How many records have ‖Ax‖² below the first edge, between two edges each, and above the
        last one, in float64. Private data.
        """

    def in_shape(self, shape: Tensor) -> PrivateGram:
        """The sums for the features Ax, with weights that bound them by 1."""


class Mechanism:
    """Draws the noise of a run that was charged.

    **Privacy.** A gradient release has noise of standard deviation ``multiplier``·bound on every
    coordinate. A matrix release has it on the diagonal, and 1/√2 of it off the diagonal, which is
    the same noise in every direction of the symmetric matrices under the Frobenius norm.
    """

    def __init__(self, sums: PrivateSums) -> None:
        self._sums = sums
        self._noise = GaussianNoise()

    def gradient(self, theta: Tensor, multiplier: float) -> GradientRelease:
        """The noisy clipped gradient sum at ``theta``."""
        std = multiplier * self._sums.gradient_bound
        exact = self._sums.gradient_sum(theta).to(_CPU)
        return GradientRelease(theta, exact + std * self._standard_normal(len(exact)), std)

    def curvature(self, theta: Tensor, multiplier: float) -> CurvatureRelease:
        """The noisy curvature at ``theta``."""
        return self._matrix(
            self._sums.curvature_sum(theta), theta, multiplier * self._sums.curvature_bound
        )

    def curvature_with_levels(
        self, sums: GeneralSums, theta: Tensor, multiplier: float, level_multiplier: float
    ) -> tuple[CurvatureRelease, LevelRelease]:
        """The noisy curvature at ``theta``, Σ c cᵀ, and noisy sums of its diagonal over each site.
        Those of one record are ‖c‖² together, and so no longer than its matrix.
        """
        if not sums.curvature_is_of_gradients:
            raise ValueError(
                "the trace of other matrices than Σ c cᵀ may be larger than their bound"
            )
        exact, bound = sums.curvature_sum(theta).to(_CPU), sums.curvature_bound
        totals = exact.new_zeros(int(sums.site.max()) + 1)
        totals.index_add_(0, sums.site, exact.diagonal())
        std = level_multiplier * bound
        noisy = totals + std * self._standard_normal(len(totals))
        return self._matrix(exact, theta, multiplier * bound), LevelRelease(theta, noisy, std)

    def gram(self, sums: PrivateGram, multiplier: float) -> CurvatureRelease:
        """The noisy Gram matrix of the features."""
        return self._matrix(sums.gram_sum(), None, multiplier * sums.gram_bound)

    def length_counts(
        self, sums: PrivateGram, shape: Tensor, edges: Sequence[float], multiplier: float
    ) -> LengthRelease:
        """The noisy histogram of the lengths of Ax."""
        exact = sums.length_counts(shape, edges).to(_CPU)
        noise = multiplier * self._standard_normal(len(exact))
        return LengthRelease(shape, exact + noise, multiplier)

    def clipped_count(
        self, sums: GeneralSums | DiagonalSums, theta: Tensor, multiplier: float
    ) -> ClippedRelease:
        """The noisy number of clipped gradients at ``theta``."""
        noise = multiplier * float(self._standard_normal(1))
        return ClippedRelease(theta, sums.clipped_count(theta) + noise, multiplier)

    def curvature_diagonal(
        self, sums: DiagonalSums, theta: Tensor, multiplier: float
    ) -> DiagonalRelease:
        """The noisy diagonal of the curvature at ``theta``."""
        std = multiplier * sums.curvature_bound
        exact = sums.curvature_diagonal(theta).to(_CPU)
        return DiagonalRelease(theta, exact + std * self._standard_normal(len(exact)), std)

    def _matrix(self, exact: Tensor, theta: Tensor | None, std: float) -> CurvatureRelease:
        size = len(exact)
        draws = self._standard_normal(size * size).reshape(size, size)
        return CurvatureRelease(theta, noisy_matrix(exact, std, draws), std)

    def _standard_normal(self, size: int) -> Tensor:
        return self._noise.standard_normal(size, dtype=torch.float64, device=_CPU)


def noisy_matrix(exact: Tensor, std: float, draws: Tensor) -> Tensor:
    """A symmetric matrix with symmetric noise, made of as many standard normal draws as it has
    entries.

    The mean of a square Gaussian matrix and its transpose has variance 1 on the diagonal and 1/2
    off it. One triangle is mirrored: rounding makes sums over records a little unsymmetric, and the
    difference of the two halves would have no noise at all.
    """
    upper = torch.triu(exact.to(draws) + std * (draws + draws.T) / 2)
    return upper + torch.triu(upper, 1).T


def matrix_event(multiplier: float, neighboring: Neighboring) -> DpEvent:
    """A sum of positive semi-definite matrices of Frobenius norm at most B, or of vectors without
    negative entries that are at most B long, with noise ``multiplier``·B.

    Adding a record moves the sum by up to B. Replacing one moves it by up to √2·B, and not by 2B,
    for the inner product of two positive semi-definite matrices is not negative, nor that of two
    such vectors. The accountant doubles the bound under replace-one, so it is told of a larger
    multiplier.
    """
    is_swap = neighboring_relation(neighboring) == "replace_one"
    return GaussianDpEvent(multiplier * (math.sqrt(2) if is_swap else 1.0))


def charge(accountant: PrivacyAccountant, plan: Plan, label: str) -> None:
    """Charges everything that the plan will release, or raises before any of it is."""
    relation = accountant.neighboring
    matrices = [
        *plan.curvature_multipliers,
        *plan.gram_multipliers,
        *plan.length_multipliers,
        *plan.level_multipliers,
        *plan.clipped_multipliers,
    ]
    parts: list[DpEvent] = [GaussianDpEvent(z) for z in plan.gradient_multipliers]
    accountant.compose(
        ComposedDpEvent([*parts, *(matrix_event(z, relation) for z in matrices)]), label=label
    )
