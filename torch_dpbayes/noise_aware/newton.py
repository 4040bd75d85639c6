"""The private run: noisy gradients and curvatures at points that Newton-like steps on the
surrogate choose.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .mechanism import Mechanism, PrivateGram, PrivateSums
from .modes import mode
from .planning import Plan
from .priors import GaussianPrior
from .response import LinearResponse, Response, combined, denoised
from .surrogate import Surrogate, positive
from .transcript import CurvatureRelease, GradientRelease, Transcript


def run_glm(
    sums: PrivateGram, plan: Plan, prior: GaussianPrior, response_of: Callable[[Tensor], Response]
) -> tuple[Surrogate, Transcript]:
    """A run for a model with one linear predictor a record.

    Args:
        sums: the records.
        plan: the noise, charged already.
        prior: where the run starts, and what holds it where the noise is large.
        response_of: how gradients change with θ, given a Gram matrix.
    """
    mechanism = Mechanism(sums)
    assert plan.gram_multiplier is not None
    gram = mechanism.gram(sums, plan.gram_multiplier)
    features, features_std = denoised(gram.value, gram.noise_std)
    response = response_of(features)
    relative = features_std / float(features.trace())
    transcript = Transcript(gram=gram)
    theta = prior.mean
    for multiplier in plan.gradient_multipliers:
        transcript.gradients.append(mechanism.gradient(theta, multiplier))
        centre = theta
        slope = response.slope(centre)
        spread = relative * float(slope.trace())
        theta = mode(Surrogate(transcript.gradients, response, slope, spread, centre), prior)
    curvature = slope
    for multiplier in plan.curvature_multipliers:
        release = mechanism.curvature(centre, multiplier)
        transcript.curvatures.append(release)
        curvature, spread = combined(slope, spread, release.value, release.noise_std)
        curvature = positive(curvature, spread)
    return Surrogate(transcript.gradients, response, curvature, spread, centre), transcript


def run_general(
    sums: PrivateSums, plan: Plan, prior: GaussianPrior, num_data: int
) -> tuple[Surrogate, Transcript]:
    """A run for any model: its log likelihood is taken as quadratic around the last points.

    Args:
        sums: the records.
        plan: the noise, charged already.
        prior: a Gaussian one, or what a Gaussian says of another one; the steps alone use it.
        num_data: number of records, a public constant.
    """
    mechanism = Mechanism(sums)
    transcript = Transcript()
    multipliers = dict(zip(plan.curvature_steps, plan.curvature_multipliers, strict=True))
    theta, raw_std = prior.mean, 0.0
    raw = torch.zeros(prior.dimension, prior.dimension, dtype=torch.float64)
    for step, multiplier in enumerate(plan.gradient_multipliers):
        transcript.gradients.append(mechanism.gradient(theta, multiplier))
        if step in multipliers:
            release = mechanism.curvature(theta, multipliers[step])
            first = not transcript.curvatures
            transcript.curvatures.append(release)
            value, std = _about_their_mean(release, transcript.gradients[-1], num_data)
            raw, raw_std = (value, std) if first else combined(raw, raw_std, value, std)
            curvature, spread = denoised(raw, raw_std)
        centre = theta
        surrogate = Surrogate(
            transcript.gradients, LinearResponse(curvature), curvature, spread, centre
        )
        theta = mode(surrogate, prior)
        # the point before it is valid, and all between them are public or released
        while not sums.is_valid(theta):
            theta = (theta + centre) / 2
    return surrogate, transcript


def _about_their_mean(
    curvature: CurvatureRelease, gradient: GradientRelease, num_data: int
) -> tuple[Tensor, float]:
    """Σ c cᵀ − (Σ c)(Σ c)ᵀ/n and the noise that it has.

    Away from the mode the mean of the gradients is no curvature: with it, steps would be the
    shorter the further there is to go.
    """
    mean = gradient.value / num_data
    own = gradient.noise_std**2 / num_data
    value = curvature.value - num_data * mean.outer(mean) + own * torch.eye(len(mean)).to(mean)
    return value, math.hypot(curvature.noise_std, 2 * float(mean.norm()) * gradient.noise_std)
