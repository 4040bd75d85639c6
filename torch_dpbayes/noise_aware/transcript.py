"""What was released: noisy sums over the records, and how much noise each of them holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, eq=False, slots=True)
class GradientRelease:
    r"""g̃ = Σ_i clip(∇ℓ_i(θ)) + noise, with ℓ_i = −log p(x_i | θ), in float64.

    Under Poisson batches ``value`` is the sum over the batch divided by the sampling rate q, and so
    is ``noise_std``.
    """

    theta: Tensor
    value: Tensor
    noise_std: float
    sample_rate: float = 1.0


@dataclass(frozen=True, eq=False, slots=True)
class CurvatureRelease:
    """A d × d sum over the records plus a symmetric Gaussian matrix: ``noise_std`` on the diagonal,
    1/√2 of it off the diagonal.

    ``theta`` is None for the Gram matrix Σ x xᵀ, which belongs to no parameters.
    """

    theta: Tensor | None
    value: Tensor
    noise_std: float


@dataclass(frozen=True, eq=False, slots=True)
class DiagonalRelease:
    """The diagonal of a d × d sum over the records plus independent noise of one deviation."""

    theta: Tensor
    value: Tensor
    noise_std: float


@dataclass(frozen=True, eq=False, slots=True)
class LengthRelease:
    """Numbers of records by ‖Ax‖², A the ``feature_map``, plus independent noise."""

    feature_map: Tensor
    value: Tensor
    noise_std: float


@dataclass(frozen=True, eq=False, slots=True)
class LevelRelease:
    """The sums of a curvature's diagonal over each site, ``[sites]``, plus independent noise of one
    deviation.
    """

    theta: Tensor
    value: Tensor
    noise_std: float


@dataclass(frozen=True, eq=False, slots=True)
class ClippedRelease:
    """The number of records whose gradients are clipped, plus noise."""

    theta: Tensor
    value: float
    noise_std: float


@dataclass(frozen=True, eq=False, slots=True)
class Transcript:
    """Everything that a private run released, in the order of the releases."""

    gradients: list[GradientRelease] = field(default_factory=list)
    curvatures: list[CurvatureRelease] = field(default_factory=list)
    diagonals: list[DiagonalRelease] = field(default_factory=list)
    grams: list[CurvatureRelease] = field(default_factory=list)
    lengths: list[LengthRelease] = field(default_factory=list)
    """Of the features in the coordinates that the first Gram matrix suggests."""
    levels: list[LevelRelease] = field(default_factory=list)
    """Of the curvatures, where parameters are of groups and noise would hide their levels."""
    clipped: list[ClippedRelease] = field(default_factory=list)
    """At the last point, of models whose gradients are clipped."""
    feature_map: Tensor | None = None
    """A, where all later releases are of the features Ax, weighted, and of the parameters A⁻ᵀθ
    (:mod:`~torch_dpbayes.noise_aware.feature_shape`)."""
    turned: Sequence[Tensor] = ()
    """Places ``[K, m]`` of latents of which records tell only differences: all releases are of φ =
    Qθ, without what each K have in common (:mod:`~torch_dpbayes.noise_aware.turned`)."""
    groups: Tensor | None = None
    """Of each group the places in these θ, ``[groups, m]``: no record reads those of two. None
    where there are no groups, or where releases contradict it.
    """
