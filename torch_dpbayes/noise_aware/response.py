r"""How the gradient sum changes with the parameters, as far as released numbers tell: r(θ), with Σ
∇ℓ_i(θ) = r(θ) − ρ.

ρ does not depend on θ: for a generalised linear model it is Σ y x, and r(θ) = Σ b'(x·θ) x. Every
noisy gradient is then an observation of one and the same vector ρ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from .scores import Target, hermite, slope_curve, variances

# The trapezoidal rule for E[J(σz)], whose error falls off exponentially for smooth functions: in z
# up to σ = 1, and from there on in u = σz, for J has the same shape whatever σ is. Nodes that grow
# with σ would pass over it. Beyond the last u J is nothing.
_NODES, _REACH = 61, 6.0
_PREDICTORS, _LAST_PREDICTOR = 801, 40.0
MISFIT = 0.3  # the share of a gradient's change on a way that a model of it may get wrong
FLOOR_OF_NOISE, _ROUNDING = 0.1, 1e-9  # of a released matrix, and of its level
_LEAST_VARIANCE, _LARGEST_STD = 1e-10, 200.0  # of the linear predictor
_LEAST_ALONG = 1e-4  # curvature along θ over that across it
_LEAST_OF_MOST = 0.1  # of a level
_POINTS, _LAST = 401, math.asinh(_LARGEST_STD)  # of a table in asinh(σ)


class Response(Protocol):
    """r and its derivative."""

    misfit: float
    """The share of a difference of r that it may get wrong."""

    def value(self, theta: Tensor) -> Tensor:
        """r(θ) for ``theta`` ``[..., d]``."""

    def slope(self, theta: Tensor) -> Tensor:
        """∂r/∂θ, ``[..., d, d]``, symmetric and positive semi-definite."""

    def variability(self, theta: Tensor) -> float:
        """The covariance of the gradient sum at the truth over its slope: 1 where nothing is
        clipped.
        """

    def predictor_std(self, theta: Tensor) -> float:
        """Standard deviation of the linear predictors that r rests on; 0 where it does not."""


class LinearResponse:
    """r(θ) = Fθ: the log likelihood is a quadratic function.

    Args:
        curvature: F.
        variability: the covariance of the gradient sum over F.
        misfit: the share of a difference of r that it may get wrong.
    """

    def __init__(self, curvature: Tensor, variability: float = 1.0, misfit: float = 0.0) -> None:
        self.curvature, self._variability, self.misfit = curvature, variability, misfit

    def value(self, theta: Tensor) -> Tensor:
        """Fθ."""
        return theta @ self.curvature

    def slope(self, theta: Tensor) -> Tensor:
        """F."""
        return self.curvature.expand(*theta.shape[:-1], *self.curvature.shape)

    def variability(self, theta: Tensor) -> float:
        """As stated."""
        return self._variability

    def predictor_std(self, theta: Tensor) -> float:
        """A quadratic function rests on none."""
        return 0.0


class OuterProductResponse:
    r"""r(θ) where S = Σ c cᵀ of the gradients at a point stands for the curvature.

    With θ the truth and δ = point − θ, the gradients there have the sum v = Fδ, and S is not F but
    F + vvᵀ/n: their mean is a part of it. So

    .. math:: r(\theta) = -v(\delta), \qquad v = \frac{2 S\delta}{1 + \sqrt{1 + 4\, \delta^\top
        S \delta / n}}

    which is never longer than Cauchy and Schwarz allow: vᵀS⁻¹v ≤ n. Of many records this is F̂θ; of
    few, far from the truth, S is mostly the mean, and a straight line would promise gradients many
    times as large as any.

    It is exact for the gradients at the point itself; a run's best point, which stands for it, is
    often a step further on, and other releases count by differences of r.

    Derived in this project.

    Args:
        outer: S.
        point: where it is from.
        num_data: n, public.
        misfit: the share of a difference of r that it may get wrong.
    """

    def __init__(self, outer: Tensor, point: Tensor, num_data: int, misfit: float = 0.0) -> None:
        self._outer, self._point, self.misfit = outer, point, misfit
        self.shortening = 4 / num_data

    def value(self, theta: Tensor) -> Tensor:
        """r(θ)."""
        away = theta - self._point
        moved = away @ self._outer
        return shorter((away * moved).sum(-1), self.shortening)[..., None] * moved

    def slope(self, theta: Tensor) -> Tensor:
        """∂r/∂θ."""
        away = theta - self._point
        moved = away @ self._outer
        share = shorter((away * moved).sum(-1), self.shortening)[..., None, None]
        less = self.shortening * share**3 / (2 - share)
        return share * self._outer - less / 2 * moved[..., :, None] * moved[..., None, :]

    def straight(self, theta: Tensor) -> Tensor:
        """point + S⁻¹(r(θ) − r(point)), in which r is linear."""
        away = theta - self._point
        square = ((away @ self._outer) * away).sum(-1)
        return self._point + shorter(square, self.shortening)[..., None] * away

    def slope_of_straight(self, theta: Tensor) -> Tensor:
        """S⁻¹∂r/∂θ, ``[d, d]`` for θ ``[d]``."""
        away = theta - self._point
        moved = away @ self._outer
        share = shorter(moved @ away, self.shortening)
        less = self.shortening * share**3 / (2 - share)
        return share * torch.eye(len(away), dtype=away.dtype) - less / 2 * away.outer(moved)

    def variability(self, theta: Tensor) -> float:
        """1: that covariance is S − vvᵀ/n, and S the safe side of it."""
        return 1.0

    def predictor_std(self, theta: Tensor) -> float:
        """It rests on none."""
        return 0.0


class NormalFeatureResponse:
    r"""r(θ) = n·E[m(u) x] with m' = J, for features x ~ N(0, G/n), with u = x·θ = σz and σ² =
    θᵀGθ/n, by Stein's lemma:

    .. math:: r(\theta) = a\, G\theta, \qquad
        \partial r / \partial\theta = a\, G + (c - a)\, \frac{(G\theta)(G\theta)^\top}{\theta^\top
        G\theta}, \qquad a = \mathrm{E}[J(\sigma z)],\ c = \mathrm{E}[J(\sigma z) z^2]

    A model of how curvature falls off where the linear predictor is large; its errors are what the
    release of a Hessian corrects.

    Args:
        target: the distribution of a record's target.
        bound: c, to which residuals are clipped.
        gram: G = Σ x xᵀ, positive definite.
        num_data: n, public.
    """

    misfit = MISFIT

    def __init__(self, target: Target, bound: Tensor, gram: Tensor, num_data: int) -> None:
        self._gram, self._num_data = gram, num_data
        self._target, self._bound = target, bound
        self._slope_at = slope_curve(target, bound)
        self._curve = self._tabulated()

    def value(self, theta: Tensor) -> Tensor:
        """r(θ)."""
        moved = theta @ self._gram
        return self._expectations(theta, moved)[0][..., None] * moved

    def slope(self, theta: Tensor) -> Tensor:
        """∂r/∂θ."""
        moved = theta @ self._gram
        across, along, variance = self._expectations(theta, moved)
        change = (along - across) / (self._num_data * variance)
        return (
            across[..., None, None] * self._gram
            + change[..., None, None] * moved[..., :, None] * moved[..., None, :]
        )

    def variability(self, theta: Tensor) -> float:
        """E[K(u)] over E[J(u)]."""
        std = min(self.predictor_std(theta), _LARGEST_STD)
        u, weights = _normal_nodes(torch.tensor([std], dtype=torch.float64))
        spread = variances(self._target, u, self._bound) * weights
        return float(spread.sum() / (self._slope_at(u) * weights).sum())

    def predictor_std(self, theta: Tensor) -> float:
        """σ."""
        variance = theta @ self._gram @ theta / self._num_data
        return math.sqrt(max(float(variance), _LEAST_VARIANCE))

    def _expectations(self, theta: Tensor, moved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """a, c and σ²; c is exactly the derivative of aσ, also between the points of the table."""
        variance = ((theta * moved).sum(-1) / self._num_data).clamp_min(_LEAST_VARIANCE)
        std = variance.sqrt()
        known = std.clamp(max=_LARGEST_STD)
        place = known.asinh()
        log_across, change = self._curve(place)
        across = log_across.exp()
        along = across * (1 + change * place.tanh())
        # beyond the table c stays what it is at its end
        return along + (across - along) * known / std, along, variance

    def _tabulated(self) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """log a as a function of asinh(σ), and its derivative. Both are wanted for thousands of θ;
        logarithms, for Poisson regression's grow like the square of σ.

        c, which is small beside a where σ is large, is what is known, and aσ its integral. From two
        tables they would be the gradient and the curvature of different functions.
        """
        places = torch.linspace(0.0, _LAST, _POINTS, dtype=torch.float64)
        stds = places.sinh()
        across, along = torch.empty_like(stds), torch.empty_like(stds)
        for some in (stds <= 1, stds > 1):
            u, weights = _normal_nodes(stds[some])
            second = self._slope_at(u) * weights
            across[some] = second.sum(-1)
            along[some] = (second * (u / stds[some, None].clamp_min(1e-30)).square()).sum(-1)
        along[0] = across[0]
        along = torch.maximum(along, _LEAST_ALONG * across)
        widths = places.diff()
        integrand = along * places.cosh()
        parts = widths * (integrand[1:] + integrand[:-1]) / 2
        log_across = torch.cat([across[:1], parts.cumsum(0) / stds[1:]]).log()
        change = torch.zeros_like(stds)
        change[1:] = (along[1:] / log_across[1:].exp() - 1) / places[1:].tanh()
        return hermite(log_across, change, _LAST)


def _normal_nodes(stds: Tensor) -> tuple[Tensor, Tensor]:
    """Linear predictors ``[stds, nodes]`` and their weights: those of N(0, σ²) for each σ, which
    are all at most 1 or all above it.
    """
    if float(stds[-1]) > 1:
        u = torch.linspace(-_LAST_PREDICTOR, _LAST_PREDICTOR, _PREDICTORS, dtype=torch.float64)
        weights = torch.exp(-(u / stds[:, None]).square() / 2) / stds[:, None]
        return u, weights * float(u[1] - u[0]) / math.sqrt(2 * math.pi)
    z = torch.linspace(-_REACH, _REACH, _NODES, dtype=torch.float64)
    return stds[:, None] * z, torch.softmax(-z.square() / 2, dim=0)


def shorter(square: Tensor, shortening: Tensor | float) -> Tensor:
    """2 / (1 + √(1 + 4δᵀSδ/n)): what a gradient sum has of Sδ.

    Args:
        square: δᵀSδ, ``[...]``.
        shortening: 4/n; 0 for a straight line.
    """
    return 2 / (1 + (1 + shortening * square).sqrt())


def denoised(released: Tensor, noise_std: float) -> tuple[Tensor, float]:
    """A noisy sum of positive semi-definite matrices, shrunk to a multiple of I as far as the noise
    explains its shape (empirical Bayes).

    Args:
        released: the noisy matrix.
        noise_std: on the diagonal; 1/√2 of it off the diagonal.

    Returns:
        A positive definite matrix, and the standard deviation of what is left of the noise, of
        which eigenvalues are at least a tenth: no more is known of smaller ones.
    """
    size = len(released)
    eye = torch.eye(size, dtype=released.dtype)
    found = max(float(released.trace()) / size, 1e-3 * noise_std)
    # its noise has the standard deviation noise_std/√d
    level = found**3 / (found**2 + noise_std**2 / size)
    kept = shape_kept(released, noise_std)
    left = min(1.0, kept + 2 / size)  # the level's noise moves all eigenvalues together
    shape = released - found * eye
    std = noise_std * math.sqrt(left)
    return floored(level * eye + kept * shape, max(FLOOR_OF_NOISE * std, _ROUNDING * level)), std


def shape_kept(released: Tensor, noise_std: float) -> float:
    """The part of what tells a noisy matrix from a multiple of I that its noise does not explain,
    between 0 and 1.
    """
    size = len(released)
    shape = released - released.trace() / size * torch.eye(size, dtype=released.dtype)
    square = float(shape.square().sum())
    expected = noise_std**2 * (size * (size + 1) / 2 - 1)
    return max(0.0, 1 - expected / square) if square > 0 else 0.0


def levels(released: Tensor, noise_std: float, least: float, most: float, count: int) -> Tensor:
    """What the mean eigenvalue λ may be, ``[count]`` equally likely values: given the trace of a
    noisy matrix, under p(λ) ∝ 1/λ.

    Args:
        released: the noisy matrix.
        noise_std: on the diagonal.
        least, most, count: as for :func:`level_quantiles`.
    """
    size = len(released)
    return level_quantiles(
        float(released.trace()) / size, noise_std / math.sqrt(size), least, most, count
    )


def level_quantiles(mean: float, std: float, least: float, most: float, count: int) -> Tensor:
    """Equally likely values of a level of which ``mean`` is an observation with the error
    ``std``, ``[count]``, under p(λ) ∝ 1/λ.

    Args:
        mean, std: the observation.
        least: below that level records say nothing beside the prior, so that none is lower, unless
            few records bound it to hardly more: then it is between the bound and a tenth of it.
        most: the bound.
        count: how many.
    """
    least = min(least, _LEAST_OF_MOST * most)
    grid = torch.linspace(math.log(least), math.log(most), 2000, dtype=torch.float64).exp()
    passed = torch.softmax(-((mean - grid) / std).square() / 2, dim=0).cumsum(0)
    quantiles = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return grid[torch.searchsorted(passed, quantiles).clamp(max=len(grid) - 1)]


def at_level(matrix: Tensor, level: float) -> Tensor:
    """``matrix`` moved by a multiple of I to where ``level`` is the mean of its eigenvalues, none
    of them far below that.
    """
    size = len(matrix)
    eye = torch.eye(size, dtype=matrix.dtype)
    moved = floored(matrix + (level - matrix.trace() / size) * eye, 0.05 * level)
    return moved * (level * size / moved.trace())


def floored(matrix: Tensor, least: float) -> Tensor:
    """``matrix`` with its eigenvalues raised to ``least``."""
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    return (vectors * values.clamp_min(least)) @ vectors.T


def combined(
    model: Tensor, model_std: float, released: Tensor, released_std: float
) -> tuple[Tensor, float]:
    """Two estimates of a curvature, averaged by their variances: a model's, and a noisy release.

    The model's own error is estimated from how far the two are apart, beyond what their noise
    explains.

    Returns:
        The average, and the standard deviation of what is left of its error, as that of a symmetric
        Gaussian matrix.
    """
    size = len(model)
    apart = float((released - model).square().sum()) / (size * (size + 1) / 2)
    model_variance = max(model_std**2, apart - released_std**2)
    weight = model_variance / (model_variance + released_std**2)
    variance = model_variance * released_std**2 / (model_variance + released_std**2)
    return model + weight * (released - model), math.sqrt(variance)
