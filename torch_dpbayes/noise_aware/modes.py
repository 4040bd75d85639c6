"""Where a data-free posterior is largest."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .priors import GaussianPrior

# Each gains, so that few are taken; where the likelihood's width follows from the parameters, the
# first may land on a plateau far above (a noise scale of exp(20) in place of exp(-4)), from which
# one comes back by half a unit a step.
_ITERATIONS = 400
# of the log density, below which the mode is near enough for a step, or for a proposal
_GAIN = 1e-3


class Likelihood(Protocol):
    """What was released, as a function of the parameters."""

    centre: Tensor

    def log_likelihood(self, theta: Tensor) -> Tensor:
        """log p(releases | θ) up to a constant, ``[...]`` for θ ``[..., d]``; differentiable."""

    def precision(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """H and Hθ̂ of the Gaussian likelihood that is tangent to it at ``theta``."""


def mode(likelihood: Likelihood, prior: GaussianPrior, start: Tensor | None = None) -> Tensor:
    """Where likelihood and prior together are largest, by Gauss-Newton steps that are halved
    until they gain.
    """
    theta = likelihood.centre if start is None else start

    def objective(at: Tensor) -> float:
        return float(likelihood.log_likelihood(at) + prior.log_density(at))

    value = objective(theta)
    for _ in range(_ITERATIONS):
        precision, product = likelihood.precision(theta)
        total = precision + prior.matrix
        step = torch.linalg.solve(total, product + prior.matrix @ prior.mean) - theta
        scale, gain = 1.0, -1.0
        while scale > 1e-3 and not (gain := objective(theta + scale * step) - value) > 0:
            scale /= 2
        if not gain > 0:
            break
        theta, value = theta + scale * step, value + gain
        if gain < _GAIN:
            break
    return theta
