r"""The posterior for more parameters than a full curvature allows: coordinate by coordinate, from
released gradients and the released diagonal of the curvature.

With the curvature's diagonal F_j, the weighted mean ḡ of the gradients and that of their points θ̄,

.. math::
    \bar g_j = F_j(\bar\theta_j - \theta_j) + N(0,\ F_j(1 + s) + V + O), \qquad
    \tilde F_j = F_j + N(0, v^2), \qquad V = \sum_k \omega_k^2 \sigma_k^2, \quad
    s = \sum_k \omega_k^2 \frac{1 - q_k}{q_k}

F_j is positive: log-normal around a common level, how widely is estimated from the released
diagonal (empirical Bayes), and a few equally likely values of it make the posterior of θ_j a
mixture of Gaussians. O is what the entries off the diagonal, which are not released, add:
τ²·E‖θ̄ − θ‖², with τ² from how far gradients differ from each other beyond their noise and the
diagonal.

Derived in this project.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from scipy.stats import chi2
from torch import Tensor

from .mechanism import DiagonalSums, Mechanism
from .planning import Plan
from .priors import GaussianPrior
from .response import level_quantiles
from .transcript import DiagonalRelease, GradientRelease, Transcript

_VALUES = 12  # of F_j
_LEVELS = 12
_GRID = 256
_SURE = 10.0  # standard deviations of a level above 0: then it is taken as known
_SURELY = 3.0  # standard errors, beyond which τ² counts
_LEAST_OF_EXPECTED = 0.1
_ROUNDS = 30
_AT_ONCE = 2**14  # coordinates


class DiagonalCurvature:
    """What F_j may be: log-normal with means and deviations of log F_j, ``[d]``.

    Args:
        released: F̃, ``[d]``.
        noise_std: v.
        least, most: public bounds on the mean of F_j.
        largest: a public bound on F_j.
    """

    def __init__(
        self, released: Tensor, noise_std: float, least: float, most: float, largest: float
    ) -> None:
        size, mean = len(released), float(released.mean())
        of_mean = noise_std / math.sqrt(size)
        levels = torch.tensor([mean], dtype=torch.float64)
        if mean < _SURE * of_mean:
            levels = level_quantiles(mean, of_mean, least, most, _LEVELS)
        # as much as the noise may hide: one standard deviation of its own mean square
        spread = max(0.0, float((released - mean).square().mean()) - noise_std**2)
        spread += noise_std**2 * math.sqrt(2 / size)
        relative = (spread / levels.square()).clamp(max=(largest / levels - 1).clamp_min(1e-6))
        stds = relative.log1p().sqrt()
        means = levels.log() - stds.square() / 2
        low, high = float((means - 4 * stds).min()), float((means + 4 * stds).max())
        logs = torch.linspace(low, high, _GRID, dtype=torch.float64)
        apart = (logs - means[:, None]) / stds[:, None]
        log_prior = (-0.5 * apart.square() - stds.log()[:, None]).logsumexp(0)
        parts = []
        for some in released.split(_AT_ONCE):
            misfit = (some[:, None] - logs.exp()) / max(noise_std, 1e-300)
            weights = torch.softmax(log_prior - 0.5 * misfit.square(), dim=1)
            centre = weights @ logs
            parts.append((centre, (weights @ logs.square() - centre.square()).clamp_min(0.0)))
        self._means = torch.cat([centre for centre, _ in parts])
        self._stds = torch.cat([variance for _, variance in parts]).sqrt()

    def values(self) -> Tensor:
        """Equally likely values of F_j, ``[values, d]``."""
        shares = (torch.arange(_VALUES, dtype=torch.float64) + 0.5) / _VALUES
        normal = torch.special.ndtri(shares)
        normal = normal / normal.square().mean().sqrt()
        return (self._means + self._stds * normal[:, None]).exp()


class DiagonalSurrogate:
    """p(θ | transcript), a mixture of Gaussians in each coordinate.

    Args:
        gradients: the noisy gradients.
        curvature: what F_j may be.
        prior: independent coordinates.
    """

    def __init__(
        self,
        gradients: Sequence[GradientRelease],
        curvature: DiagonalCurvature,
        prior: GaussianPrior,
    ) -> None:
        self._prior, self._values = prior, curvature.values()
        points = torch.stack([g.theta for g in gradients])
        values = torch.stack([g.value for g in gradients])
        noises = noise_variances(gradients)
        rates = torch.tensor([1 / g.sample_rate - 1 for g in gradients], dtype=torch.float64)
        sampled = noises + rates * float(self._values.mean())
        off_diagonal = 0.0
        away = (points - points[-1]).square().sum(-1)
        for _ in range(2):  # the second time without what the first one found far away
            weights = 1 / (sampled + off_diagonal * away)
            weights = weights / weights.sum()
            point, gradient = weights @ points, weights @ values
            off_diagonal = self._off_diagonal(points - point, values - gradient, sampled, weights)
        point = point + self._along_the_way(points, point, values, gradient, sampled)
        own = float(weights.square() @ noises)
        sampling = float(weights.square() @ rates)
        extra = 0.0
        for _ in range(_ROUNDS if off_diagonal else 1):
            self._mix(point, gradient, own + extra, sampling)
            distance = self.variance + (self.mean - point).square()
            extra, before = off_diagonal * float(distance.sum()), extra
            if abs(extra - before) < 1e-3 * (own + extra):
                break
        self._last = points[-1]
        self.gradient_std = math.sqrt(float(self._values.mean()) + own)

    def _off_diagonal(
        self, apart: Tensor, differences: Tensor, noises: Tensor, weights: Tensor
    ) -> float:
        """τ²: mean over coordinates of the sum of squares of a row's other entries, as far as
        differences of gradients are larger than their noise explains.
        """
        size = apart.shape[1]
        left = differences - apart * self._values.mean(0)
        explained = noises * (1 - weights) * size
        explained = explained + apart.square() @ self._values.var(0)
        excess = left.square().sum(-1) - explained
        squares = apart.square().sum(-1)
        seen = float((squares / noises**2) @ excess)
        # of next to no way the noise would say anything
        error = math.sqrt(2 * size * float((squares / noises).square().sum()))
        if seen <= _SURELY * error:
            return 0.0
        return seen / (float((squares / noises**2) @ squares) * size)

    def _along_the_way(
        self, points: Tensor, point: Tensor, values: Tensor, gradient: Tensor, noises: Tensor
    ) -> Tensor:
        """What the diagonal gets wrong in the direction u from the first point to the last: there
        the secants of the gradients tell the curvature, f, to which the diagonal's is the prior.
        """
        way = points[-1] - points[0]
        if not float(way.norm()) > 0:
            return torch.zeros_like(point)
        way = way / way.norm()
        expected = float(self._values.mean(0) @ way.square())
        lengths, differences = (points - point) @ way, (values - gradient) @ way
        told = float((lengths / noises) @ lengths)
        seen = float((lengths / noises) @ differences)
        f = (seen + 1 / expected) / (told + expected**-2)
        f = max(f, _LEAST_OF_EXPECTED * expected)
        return -float(gradient @ way) * (1 / f - 1 / expected) * way

    def _mix(self, point: Tensor, gradient: Tensor, noise: float, sampling: float) -> None:
        values, prior = self._values, self._prior
        variance = values * (1 + sampling) + noise
        precision = values.square() / variance
        total = prior.precision + precision
        means = (
            prior.precision * prior.mean + precision * point - values / variance * gradient
        ) / total
        spread = variance + values.square() / prior.precision
        missed = gradient - values * (point - prior.mean)
        weights = torch.softmax(-0.5 * (missed.square() / spread + spread.log()), dim=0)
        self._weights, self._means, self._stds = weights, means, total.rsqrt()
        self.mean = (weights * means).sum(0)
        second = (weights * (means.square() + 1 / total)).sum(0)
        self.variance = (second - self.mean.square()).clamp_min(1e-300)

    def log_density(self, theta: Tensor) -> Tensor:
        """log p(θ | transcript), ``[...]`` for θ ``[..., d]``."""
        apart = (theta[..., None, :] - self._means) / self._stds
        parts = self._weights.log() - self._stds.log() - 0.5 * apart.square()
        return (parts.logsumexp(-2) - 0.5 * math.log(2 * math.pi)).sum(-1)

    def draws(self, count: int) -> Tensor:
        """``[count, d]``."""
        chosen = torch.multinomial(self._weights.T, count, replacement=True).T
        normal = torch.randn(chosen.shape, dtype=torch.float64)
        return self._means.gather(0, chosen) + self._stds.gather(0, chosen) * normal

    def agreement(self) -> float:
        """Tail probability of the way from the last point to the mean."""
        way = (self.mean - self._last).square() / self.variance
        return float(chi2.sf(float(way.sum()), len(way)))


def noise_variances(releases: Sequence[GradientRelease]) -> Tensor:
    """σ_k², ``[releases]``."""
    return torch.tensor([r.noise_std**2 for r in releases], dtype=torch.float64)


def run_diagonal(
    sums: DiagonalSums, plan: Plan, prior: GaussianPrior, num_data: int
) -> tuple[DiagonalSurrogate, Transcript]:
    """A run for any model, with the diagonal of the curvature in the place of the whole.

    Args:
        sums: the records.
        plan: the noise, charged already.
        prior: independent coordinates.
        num_data: number of records, a public constant.
    """
    mechanism, transcript = Mechanism(sums), Transcript()
    multipliers = dict(zip(plan.curvature_steps, plan.curvature_multipliers, strict=True))
    theta = prior.mean
    released, noise_std = torch.zeros_like(theta), 0.0
    bound = sums.curvature_bound
    # below the prior's precision the records say nothing, and more than this they cannot say
    least = float(prior.precision.mean())
    for step, multiplier in enumerate(plan.gradient_multipliers):
        transcript.gradients.append(mechanism.gradient(theta, multiplier))
        if step in multipliers:
            release = mechanism.curvature_diagonal(sums, theta, multipliers[step])
            transcript.diagonals.append(release)
            value, std = release.value, release.noise_std
            if sums.curvature_is_of_gradients:
                value, std = _about_their_mean(release, transcript.gradients[-1], num_data)
            if len(transcript.diagonals) == 1:
                released, noise_std = value, std
            # the curvature changes on the way: what the older ones say is as sure as they agree
            # with the new one
            apart = float((value - released).square().mean()) - std**2
            older = max(noise_std**2, apart)
            share = older / (older + std**2)
            released = released + share * (value - released)
            noise_std = std * math.sqrt(share)
            curvature = DiagonalCurvature(
                released, noise_std, least, num_data * bound / len(theta), num_data * bound
            )
        surrogate = DiagonalSurrogate(transcript.gradients, curvature, prior)
        centre, theta = theta, surrogate.mean
        # the point before it is valid, and all between them are public or released
        while not sums.is_valid(theta):
            theta = (theta + centre) / 2
    for multiplier in plan.clipped_multipliers:
        transcript.clipped.append(mechanism.clipped_count(sums, centre, multiplier))
    return surrogate, transcript


def _about_their_mean(
    curvature: DiagonalRelease, gradient: GradientRelease, num_data: int
) -> tuple[Tensor, float]:
    """Σ c∘c − (Σ c)∘(Σ c)/n and the noise that it has, but for few records, as for a full one."""
    own = gradient.noise_std**2 / num_data
    if math.sqrt(2) * own > curvature.noise_std:
        return curvature.value, curvature.noise_std
    mean = gradient.value / num_data
    of_mean = 2 * float(mean.square().mean().sqrt()) * gradient.noise_std
    noise = math.hypot(curvature.noise_std, of_mean, math.sqrt(2) * own)
    return curvature.value - num_data * mean.square() + own, noise
