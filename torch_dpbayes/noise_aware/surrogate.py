r"""What a transcript says about θ, without the data: a log likelihood that is as wide as the noise
makes it.

Near its maximum θ_L a log likelihood has the gradient F(θ − θ_L), and θ_L | θ ~ N(θ, F⁻¹)
approximately. A noisy gradient at θ_k is then g̃_k ~ N(F(θ_k − θ), F + V_k): the sampling noise F
is common to all releases, the privacy noises are independent. With weights ω_k, Σ ω_k = 1,

.. math::
    r = \sum_k \omega_k \tilde g_k - \hat F\Delta, \quad \Delta = \sum_k \omega_k \varphi(\theta_k)
    - \varphi(\theta), \quad
    M(\theta) = F_\alpha(\theta) + \sum_k \omega_k^2 V_k
    + \tfrac12 v^2(\|\Delta\|^2 I + \Delta\Delta^\top)

    \log p(\text{transcript} \mid \theta) = -\tfrac12 r^\top M^{-1} r - \tfrac12 \log|M_0|

where φ straightens the log likelihood (the identity for a quadratic one), v is the noise in F̂,
whose part is the covariance of EΔ for a symmetric Gaussian matrix E, and M₀ has F̂ for F_α: the
normalising constant of the data's own distribution stays with the data.

Sources: Bernstein and Sheldon (2018); Alrawajfeh, Jälkö and Honkela (2025) for the idea; the
formulas are derived in this project.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from scipy.stats import chi2
from torch import Tensor

from .response import (
    FLOOR_OF_NOISE,
    LinearResponse,
    OuterProductResponse,
    Response,
    floored,
    shorter,
)
from .transcript import GradientRelease

HARMLESS = 0.1  # of the records' own variance


class AnySurrogate:
    """What surrogates share: the residual r(θ) = m + F̂φ(θ) of releases averaged to one, and its
    covariance M(θ) = F_α(θ) + ``noise`` + that of the curvature's error.

    Args:
        gradients: the noisy gradients.
        response: how gradients change with θ.
        curvature: F̂ at ``centre``, positive definite.
        curvature_std: v, the noise left in F̂.
        centre: where F̂ was released, and around which φ straightens.
    """

    _mean: Tensor  # m
    noise: Tensor  # of the average
    log_evidence = 0.0  # of what is not in the average

    def __init__(
        self,
        gradients: Sequence[GradientRelease],
        response: Response,
        curvature: Tensor,
        curvature_std: float,
        centre: Tensor,
    ) -> None:
        self.curvature, self._curvature_std, self.centre = curvature, curvature_std, centre
        self._response, self._straight = response, Straightening(response, centre)
        # of the gradient sum itself, given θ: it is the curvature where nothing is clipped
        self._variability = response.variability(centre)
        self._releases = gradients
        self._misfit = response.misfit
        self.predictor_std = response.predictor_std(centre)
        self._points = self._straight.moved(torch.stack([g.theta for g in gradients]))
        self._values = torch.stack([g.value for g in gradients])
        self._noises = noises(gradients, curvature.dtype)

    def _of_curvature_error(self, moved: Tensor) -> Tensor:
        """The part of M that the error of F̂ has, at φ(θ) = ``moved``."""
        raise NotImplementedError

    def form(self) -> Form | None:
        """A form of which several are computed at once; None where there is none."""
        return None

    @property
    def gradient_std(self) -> float:
        """How sure the gradient at a point is, records' own randomness and noise, per direction."""
        total = self._variability * self.curvature + self.noise
        return float(total.trace() / len(total)) ** 0.5

    def log_likelihood(self, theta: Tensor) -> Tensor:
        """log p(transcript | θ) up to a constant, ``[...]`` for θ ``[..., d]``; differentiable."""
        moved = self._straight.moved(theta)
        residual = self._mean + moved @ self.curvature
        extra = self._of_curvature_error(moved)
        own = self._variability * self.curvature
        bend = self._straight.bend(theta)
        covariance, unbent = bend @ own @ bend.mT + self.noise + extra, own + self.noise + extra
        return self.log_evidence + gaussian_log_likelihood(residual, covariance, unbent)

    def precision(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """H and Hθ̂ of the Gaussian likelihood exp(−½(θ−θ̂)ᵀH(θ−θ̂)) that is tangent to this
        one at ``theta``, M held fixed.
        """
        slope = self._straight.tangent(self.curvature, theta)
        moved = self._straight.moved(theta)
        residual = self._mean + self.curvature @ moved
        own = self._variability * self.curvature
        covariance = own + self.noise + self._of_curvature_error(moved)
        weighted = torch.linalg.solve(covariance, slope).T
        precision = weighted @ slope
        return (precision + precision.T) / 2, precision @ theta - weighted @ residual

    def agreement(self, mode: Tensor, precision: Tensor) -> float:
        """How well the last half of the releases agree with the fitted curvature: the smaller of
        two tail probabilities, which are tiny where the run has not arrived.

        The first is of the releases' residuals, in units of their noise and of what the response
        may get wrong; misfits far below the records' own randomness do no harm and are let pass.
        The second is of the way from the last point, around which everything was fitted, to the
        mode, as far as the releases tell the two apart: where they hardly do, the posterior is the
        prior, wherever the run ended.

        Args:
            mode: of the posterior.
            precision: of the likelihood there.
        """
        size, first = len(self.curvature), len(self._releases) // 2
        points, values = self._points[first:], self._values[first:]
        noise = torch.tensor([g.noise_std**2 for g in self._releases[first:]], dtype=points.dtype)
        weights = noise.reciprocal() / noise.reciprocal().sum()
        apart = points - weights @ points
        residuals = values - weights @ values - apart @ self.curvature
        harmless = HARMLESS * self.curvature.trace() / size
        variances = noise + harmless + self._curvature_std**2 * apart.square().sum(-1)
        wrong = self._misfit * (points - self.centre) @ self.curvature
        variances += wrong.square().mean(-1)
        total = float((residuals.square().sum(-1) / variances).sum())
        step = mode - self.centre
        return min(
            float(chi2.sf(total, size * (len(points) - 1))) if len(points) > 1 else 1.0,
            float(chi2.sf(float(step @ precision @ step), size)),
        )


class Surrogate(AnySurrogate):
    """log p(transcript | θ), for Gaussian releases; arguments as in :class:`AnySurrogate`, and

    Args:
        counted: of which releases the average is, ``[releases]``. None: of all.
        units: s, where the error of entry ij has the deviation s_i·s_j·v and not v, ``[d]``.
    """

    def __init__(
        self,
        gradients: Sequence[GradientRelease],
        response: Response,
        curvature: Tensor,
        curvature_std: float,
        centre: Tensor,
        counted: Tensor | None = None,
        units: Tensor | None = None,
    ) -> None:
        super().__init__(gradients, response, curvature, curvature_std, centre)
        self._units = torch.ones_like(centre) if units is None else units
        away = self._points - centre
        # where there is little noise, releases from far away would otherwise outvote the last ones
        misfits = self._misfit * away @ curvature
        sampled = self._variability * curvature
        own = self._noises @ torch.stack([sampled.new_ones(()), sampled.diagonal().mean()])
        weights = trust(own, away, misfits, curvature_std)
        if counted is not None:
            weights = weights * counted / (weights * counted).sum()
        self._point = weights @ self._points
        self._mean = weights @ self._values - self._point @ curvature
        self._eye = torch.eye(len(curvature), dtype=curvature.dtype)
        added, multiple = weights.square() @ self._noises
        self.noise = added * self._eye + multiple * sampled

    @cached_property
    def _form(self) -> Form | None:
        return self.form()

    def _of_curvature_error(self, moved: Tensor) -> Tensor:
        delta = self._units * (self._point - moved)
        square = delta.square().sum(-1)[..., None, None]
        units = self._units[:, None] * self._units
        return (
            0.5
            * self._curvature_std**2
            * units
            * (square * self._eye + delta[..., :, None] * delta[..., None, :])
        )

    def log_likelihood(self, theta: Tensor) -> Tensor:
        """As of any surrogate; of one that does not bend by its form."""
        if self._form is None:
            return super().log_likelihood(theta)
        rows = theta.reshape(-1, theta.shape[-1])
        return self._form.log_likelihood(rows).reshape(theta.shape[:-1])

    def form(self) -> Form | None:
        """That of a response that does not bend: a change of rank one."""
        if self._straight.bends:
            return None
        response = self._response
        return ChangesOfRankOne.of(
            self._point,
            self._mean,
            self.curvature,
            self._variability * self.curvature + self.noise,
            self._units,
            self._curvature_std,
            self.centre,
            response.shortening if isinstance(response, OuterProductResponse) else 0.0,
        )


def gaussian_log_likelihood(residual: Tensor, covariance: Tensor, unbent: Tensor) -> Tensor:
    """−½(rᵀM⁻¹r + log |M₀|), ``[...]``; −∞ where numbers end, as where a chain runs away.

    Args:
        residual: r, ``[..., d]``.
        covariance: M, ``[..., d, d]``.
        unbent: M₀, likewise.
    """
    factor, failed = torch.linalg.cholesky_ex(covariance)
    scale, also_failed = torch.linalg.cholesky_ex(unbent)
    whitened = torch.linalg.solve_triangular(factor, residual[..., None], upper=False)[..., 0]
    log_scale = scale.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    found = -0.5 * whitened.square().sum(-1) - log_scale
    is_right = (failed == 0) & (also_failed == 0) & found.isfinite()
    return torch.where(is_right, found, -torch.inf)


class Form(Protocol):
    """Likelihoods of the same kind, K of them at once."""

    @staticmethod
    def stacked(forms: Sequence[Any]) -> Form:
        """All of them, which are of this kind."""

    def log_likelihood(self, theta: Tensor) -> Tensor:
        """log p(transcript | θ) up to a constant, ``[K, m]`` for θ ``[m, d]``; differentiable."""


class ChangesOfRankOne(NamedTuple):
    """Likelihoods of responses that do not bend, K of them at once: M = S(Q(Λ + c)Qᵀ +
    ½v²SΔΔᵀS)S, which differs between points by c = ½v²‖SΔ‖² and one vector, S = diag(s).
    """

    point: Tensor
    """Where the mean release was, ``[K, 1, d]``."""
    mean: Tensor
    """m of the residual m + F̂θ, ``[K, 1, d]``."""
    curvature: Tensor
    """F̂, ``[K, d, d]``."""
    units: Tensor
    """s, ``[K, 1, d]``."""
    eigenvalues: Tensor
    """Λ, ``[K, 1, d]``."""
    vectors: Tensor
    """Q, ``[K, d, d]``."""
    half: Tensor
    """½v², ``[K, 1]``."""
    centre: Tensor
    """Around which φ straightens, ``[K, 1, d]``."""
    shortening: Tensor
    """Of φ far from there, 0 for a linear response, ``[K, 1]``."""

    @staticmethod
    def of(
        point: Tensor,
        mean: Tensor,
        curvature: Tensor,
        covariance: Tensor,
        units: Tensor,
        curvature_std: float,
        centre: Tensor,
        shortening: float,
    ) -> ChangesOfRankOne:
        """One likelihood, whose M is ``covariance`` without the part of the curvature's error."""
        values, vectors = torch.linalg.eigh(covariance / torch.outer(units, units))
        half = torch.tensor([[0.5 * curvature_std**2]], dtype=point.dtype)
        return ChangesOfRankOne(
            point[None, None],
            mean[None, None],
            curvature[None],
            units[None, None],
            values[None, None],
            vectors[None],
            half,
            centre[None, None],
            torch.full_like(half, shortening),
        )

    @staticmethod
    def stacked(forms: Sequence[ChangesOfRankOne]) -> ChangesOfRankOne:
        """All of them."""
        return ChangesOfRankOne(*(torch.cat(parts) for parts in zip(*forms, strict=True)))

    def log_likelihood(self, theta: Tensor) -> Tensor:
        """log p(transcript | θ) up to a constant, ``[K, m]`` for θ ``[m, d]``; differentiable."""
        away = theta - self.centre
        moved = away @ self.curvature
        share = shorter((away * moved).sum(-1), self.shortening)[..., None]
        delta = self.units * (self.point - self.centre - share * away)
        residual = (self.mean + self.centre @ self.curvature + share * moved) / self.units
        values = self.eigenvalues + self.half[..., None] * delta.square().sum(-1, keepdim=True)
        a, b = residual @ self.vectors, delta @ self.vectors
        aa, ab, bb = ((x * y / values).sum(-1) for x, y in ((a, a), (a, b), (b, b)))
        half, scale = self.half, self.units.log().sum(-1)
        return (
            -0.5 * (aa - half * ab**2 / (1 + half * bb))
            - 0.5 * (values.log().sum(-1) + torch.log1p(half * bb))
            - scale
        )


class Straightening:
    """φ, in which the response is linear around a point: φ(θ) = c + F_m(c)⁻¹(r(θ) − r(c)).

    Args:
        response: r, with the derivative F_m.
        centre: c.
    """

    def __init__(self, response: Response, centre: Tensor) -> None:
        self._response, self._centre = response, centre
        self.is_linear = isinstance(response, LinearResponse)
        self.bends = not isinstance(response, LinearResponse | OuterProductResponse)
        if self.bends:
            self._slope_factor = torch.linalg.cholesky(response.slope(centre))
            self._response_at_centre = response.value(centre)

    def moved(self, theta: Tensor) -> Tensor:
        """φ(θ), ``[..., d]``; differentiable."""
        if isinstance(self._response, LinearResponse):
            return theta
        if isinstance(self._response, OuterProductResponse):
            return self._response.straight(theta)
        moved = self._response.value(theta) - self._response_at_centre
        return self._centre + torch.cholesky_solve(moved[..., None], self._slope_factor)[..., 0]

    def bend(self, theta: Tensor) -> Tensor:
        """T of F_α = T F̂ Tᵀ: I + ⅔(L(θ)L(c)⁻¹ − I), F_m = LLᵀ."""
        eye = torch.eye(len(self._centre), dtype=theta.dtype)
        if not self.bends:
            return eye
        factor, _ = torch.linalg.cholesky_ex(self._response.slope(theta))
        return (eye + 2 * factor @ torch.linalg.inv(self._slope_factor)) / 3

    def tangent(self, curvature: Tensor, theta: Tensor) -> Tensor:
        """The derivative of F̂φ at θ."""
        if isinstance(self._response, LinearResponse):
            return curvature
        if isinstance(self._response, OuterProductResponse):
            return curvature @ self._response.slope_of_straight(theta)
        return curvature @ torch.cholesky_solve(self._response.slope(theta), self._slope_factor)


def noises(releases: Sequence[GradientRelease], dtype: torch.dtype) -> Tensor:
    """σ² and (1−q)/q of each release, ``[releases, 2]``: V_k = σ²·I, and under Poisson batches of
    rate q also the noise of sampling the records, (1−q)/q·F.
    """
    rows = [(r.noise_std**2, 1 / r.sample_rate - 1) for r in releases]
    return torch.tensor(rows, dtype=dtype)


def trust(own: Tensor, distances: Tensor, misfits: Tensor, curvature_std: float) -> Tensor:
    """ω: releases count by their noise, a variance for each, to which that of the curvature and
    what the response gets wrong add where they lie far from the centre.
    """
    of_curvature = 0.5 * curvature_std**2 * distances.square().sum(-1)
    weights = 1 / (own + of_curvature + misfits.square().mean(-1))
    return weights / weights.sum()


def positive(curvature: Tensor, noise_std: float) -> Tensor:
    """A released curvature with eigenvalues raised to a part of its noise. A larger floor would
    take directions that the records hardly tell for ones that they tell surely.
    """
    return floored(curvature, max(FLOOR_OF_NOISE * noise_std, 1e-12))
