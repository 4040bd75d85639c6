"""Langevin samplers on the full data. They have no accept step, and no record can stop them: every
step runs the same operations, whatever the records are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..accounting.events import positive_count
from ..noise import GaussianNoise, check_positive
from ..words import shown
from .models import Density

_LEAST_GAP = 1e-290  # below, floats lose digits; even here all steps count as if c were 1


def mu_of_last_state(sensitivity: float, step_size: float, gap: float, steps: int) -> float:
    """μ of the last step of :class:`Overdamped` (Bok, Su, Altschuler 2024); ``gap``: 1 − c."""
    gap = max(gap, _LEAST_GAP)
    # (1 − c^t)/(1 + c^t) = tanh(−t log(c)/2), which loses no digits if c is close to 1
    grown = math.tanh(-steps * math.log1p(-gap) / 2) if gap < 1 else 1.0
    return sensitivity * math.sqrt(step_size / 2 * (grown * (2 - gap) / gap))


@dataclass(frozen=True)
class Overdamped:
    r"""Overdamped Langevin dynamics, the unadjusted Langevin algorithm: a sampler for
    :class:`~torch_dpbayes.ops.RenyiClose` and :class:`~torch_dpbayes.ops.TotalVariationClose`.

    .. math:: \theta \leftarrow \theta - h \nabla U(\theta) + \sqrt{2h}\,\xi, \quad \xi \sim N(0, I)

    On a Gaussian target with precision κ the stationary variance is 1/(κ(1 − hκ/2)).

    Args:
        steps: the number of steps.
        step_size: h, in units of θ².

    **Privacy.** The settings are public. The certificate assumes how close the draw is to the
    target. Only the last state is released.
    """

    steps: int
    step_size: float

    def __post_init__(self) -> None:
        positive_count(self.steps, "steps")
        check_positive("step_size", self.step_size)

    @torch.no_grad()
    def draw(self, density: Density, noise: GaussianNoise) -> Tensor:
        theta, h = density.start.clone(), self.step_size
        for _ in shown(range(self.steps), "drawing one posterior sample"):
            xi = _gaussian(theta, noise)
            theta.sub_(density.gradient(theta), alpha=h).add_(xi, alpha=math.sqrt(2 * h))
        return theta


@dataclass(frozen=True)
class Underdamped:
    r"""Underdamped Langevin dynamics. Each step keeps the gradient fixed and integrates the
    remaining linear equation exactly.

    .. math::
        dx = v\,dt, \qquad dv = -\gamma v\,dt - u \nabla U(x_k)\,dt + \sqrt{2 \gamma u}\,dB, \qquad
        \text{law} \propto \exp(-U(x) - \|v\|^2 / (2u))

    With E = e^{−γh}: v' = E·v − (u/γ)(1−E)∇U + W_v, x' = x + (1−E)v/γ − (u/γ)(h − (1−E)/γ)∇U + W_x,
    where Var W_v = u(1−E²), Cov(W_x, W_v) = (u/γ)(1−E)² and Var(W_x | W_v) = (2u/γ²)(γh − 2
    tanh(γh/2)).

    Source: Cheng, Chatterji, Bartlett and Jordan (2018), "Underdamped Langevin MCMC", equations 5
    and 10.

    Args:
        steps: the number of steps.
        step_size: h, in units of time.
        friction: γ, per unit of time.
        inverse_mass: u. With u = 1/M, where M is the smoothness of U, γ = 2 is a good choice.

    **Privacy.** The settings are public. Only the last position is released, not the velocity.
    """

    steps: int
    step_size: float
    friction: float = 2.0
    inverse_mass: float = 1.0

    def __post_init__(self) -> None:
        positive_count(self.steps, "steps")
        for name in ("step_size", "friction", "inverse_mass"):
            check_positive(name, getattr(self, name))

    @torch.no_grad()
    def draw(self, density: Density, noise: GaussianNoise) -> Tensor:
        gamma, u, h = self.friction, self.inverse_mass, self.step_size
        gone = -math.expm1(-gamma * h)  # 1 − E
        drift = u / gamma * gone
        lag = _second_order(gamma * h)  # γh − (1 − E), without cancellation
        variance = u * -math.expm1(-2 * gamma * h)
        covariance = u / gamma * gone**2
        rest = 2 * u / gamma**2 * _third_order(gamma * h)  # Var(W_x | W_v)
        x = density.start.clone()
        v = math.sqrt(u) * _gaussian(x, noise)
        for _ in shown(range(self.steps), "drawing one posterior sample"):
            gradient = density.gradient(x)
            kick = math.sqrt(variance) * _gaussian(x, noise)
            x.add_(v, alpha=gone / gamma).sub_(gradient, alpha=u / gamma**2 * lag)
            x.add_(kick, alpha=covariance / variance)
            x.add_(_gaussian(x, noise), alpha=math.sqrt(rest))
            v.mul_(1 - gone).sub_(gradient, alpha=drift).add_(kick)
        return x


def _gaussian(like: Tensor, noise: GaussianNoise) -> Tensor:
    return noise.standard_normal(len(like), dtype=like.dtype, device=like.device)


def _second_order(t: float) -> float:
    """t − (1 − e^{−t}) = t²/2 − t³/6 + …"""
    return t + math.expm1(-t) if t > 1e-3 else t * t / 2 * (1 - t / 3 * (1 - t / 4))


def _third_order(t: float) -> float:
    """t − 2 tanh(t/2) = t³/12 − t⁵/120 + …"""
    return t - 2 * math.tanh(t / 2) if t > 1e-2 else t**3 / 12 * (1 - t * t / 10)
