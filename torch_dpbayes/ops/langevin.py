"""Langevin samplers on the full data. No accept step, nothing that a record can stop: every
step does the same whatever the records are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..accounting.events import positive_count
from ..errors import ArgumentError
from ..mcmc.checks import check_positive
from ..noise import GaussianNoise
from ..words import shown
from .models import Density, Target

_LARGEST_FRICTION = 1.2  # of the thermostat, as in DPSGNHT: beyond 2 a step explodes


class Sampler(Protocol):
    """Public settings of a chain, and how it runs. Its state after the last step is a draw,
    close to the target or not.
    """

    def draw(self, density: Density, noise: GaussianNoise) -> Tensor:
        """The last state, ``[d]``."""


@torch.no_grad()
def overdamped(
    target: Target | Density, step_sizes: Iterable[float], noise: GaussianNoise
) -> Tensor:
    r"""The unadjusted Langevin algorithm on the full data.

    .. math:: \theta \leftarrow \theta - h \nabla U(\theta) + \sqrt{2h}\,\xi, \qquad \xi \sim N(0,
    I)

    On a Gaussian target with precision κ the stationary variance is 1/(κ(1 − hκ/2)).

    Args:
        target: the density; the chain begins at ``target.start``.
        step_sizes: h of each step, in units of θ²: fixed before the data are seen.
        noise: where the Gaussians come from.

    Returns:
        The last state only, ``[d]``.

    **Privacy.** The last state is the release, the earlier ones are not:
    :class:`~torch_dpbayes.ops.FiniteRunLangevin` has the guarantee.
    """
    theta = target.start.clone()
    for h in shown(step_sizes, "drawing one posterior sample"):
        xi = _gaussian(theta, noise)
        theta.sub_(target.gradient(theta), alpha=h).add_(xi, alpha=math.sqrt(2 * h))
    return theta


@dataclass(frozen=True)
class Overdamped:
    """:func:`overdamped` Langevin dynamics as a sampler for :class:`~torch_dpbayes.ops.RenyiClose`
    and :class:`~torch_dpbayes.ops.TotalVariationClose`.

    Args:
        steps: how many.
        step_size: h, in units of θ².

    **Privacy.** The settings are public. How close the draw is to the target is the certificate's
    assumption.
    """

    steps: int
    step_size: float

    def __post_init__(self) -> None:
        positive_count(self.steps, "steps")
        check_positive("step_size", self.step_size)

    def draw(self, density: Density, noise: GaussianNoise) -> Tensor:
        return overdamped(density, [self.step_size] * self.steps, noise)


@dataclass(frozen=True)
class Underdamped:
    r"""Underdamped Langevin dynamics, the gradient frozen over each step and the linear equation
    integrated exactly.

    .. math::
        dx = v\,dt, \qquad dv = -\gamma v\,dt - u \nabla U(x_k)\,dt + \sqrt{2 \gamma u}\,dB, \qquad
        \text{law} \propto \exp(-U(x) - \|v\|^2 / (2u))

    With E = e^{−γh}: v' = E·v − (u/γ)(1−E)∇U + W_v, x' = x + (1−E)v/γ − (u/γ)(h − (1−E)/γ)∇U + W_x,
    where Var W_v = u(1−E²), Cov(W_x, W_v) = (u/γ)(1−E)² and Var W_x = (2u/γ)(h − 2(1−E)/γ +
    (1−E²)/(2γ)).

    Source: Cheng, Chatterji, Bartlett and Jordan (2018), "Underdamped Langevin MCMC", equations 5
    and 10.

    Args:
        steps: how many.
        step_size: h, a time.
        friction: γ, per time.
        inverse_mass: u; with 1/M, M the smoothness of U, times are in units in which γ = 2 is a
            good choice.

    **Privacy.** The settings are public. Only the last position leaves; the velocity does not.
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
        rest = 2 * u / gamma**2 * _spread(gamma * h) - covariance**2 / variance  # of W_x given W_v
        x = density.start.clone()
        v = math.sqrt(u) * _gaussian(x, noise)
        for _ in shown(range(self.steps), "drawing one posterior sample"):
            gradient = density.gradient(x)
            kick = math.sqrt(variance) * _gaussian(x, noise)
            x.add_(v, alpha=gone / gamma).sub_(gradient, alpha=u / gamma**2 * lag)
            x.add_(kick, alpha=covariance / variance).add_(
                _gaussian(x, noise), alpha=math.sqrt(max(rest, 0.0))
            )
            v.mul_(1 - gone).sub_(gradient, alpha=drift).add_(kick)
        return x


@dataclass(frozen=True)
class NoseHoover:
    r"""The Nosé-Hoover thermostat on the full data, without an accept step.

    .. math::
        v' = (1 - \alpha) v - h \nabla U(\theta) + \sqrt{2ah}\,\xi, \qquad
        \theta \leftarrow \theta + v', \qquad
        \alpha \leftarrow \alpha + \mathrm{gain}
        \Bigl( \frac{1}{dh} \Bigl\| \frac{v + v'}{2} \Bigr\|^2 - 1 \Bigr)

    The kinetic energy is taken at the half step: at the end of the step it would sample temperature
    1 − α/2.

    Source: Ding, Fang, Babbush, Chen, Skeel and Neven (2014); :class:`~torch_dpbayes.optim.DPSGNHT`
    is its private counterpart.

    Args:
        steps: how many.
        step_size: h, in units of θ².
        friction: a in (0, 1]: friction that the noise is made for, and where α starts.
        thermostat_gain: how fast α follows the kinetic energy.

    **Privacy.** The settings are public. Only the last θ leaves; velocity and friction, which
    depend on the records, do not.
    """

    steps: int
    step_size: float
    friction: float = 0.1
    thermostat_gain: float = 0.01

    def __post_init__(self) -> None:
        positive_count(self.steps, "steps")
        for name in ("step_size", "friction", "thermostat_gain"):
            check_positive(name, getattr(self, name))
        if self.friction > 1:
            raise ArgumentError(
                "friction is the share of the velocity that a step takes away, at most 1; got"
                f" {self.friction}."
            )

    @torch.no_grad()
    def draw(self, density: Density, noise: GaussianNoise) -> Tensor:
        h, alpha = self.step_size, self.friction
        theta = density.start.clone()
        v = math.sqrt(h) * _gaussian(theta, noise)
        for _ in shown(range(self.steps), "drawing one posterior sample"):
            new = (
                (1 - alpha) * v
                - h * density.gradient(theta)
                + math.sqrt(2 * self.friction * h) * _gaussian(theta, noise)
            )
            theta.add_(new)
            kinetic = float((v + new).square().sum()) / (4 * h * len(theta))
            alpha = min(alpha + self.thermostat_gain * (kinetic - 1), _LARGEST_FRICTION)
            v = new
        return theta


def _gaussian(like: Tensor, noise: GaussianNoise) -> Tensor:
    return noise.standard_normal(len(like), dtype=like.dtype, device=like.device)


def _second_order(t: float) -> float:
    """t − (1 − e^{−t}) = t²/2 − t³/6 + …"""
    return t + math.expm1(-t) if t > 1e-3 else t * t / 2 * (1 - t / 3 * (1 - t / 4))


def _spread(t: float) -> float:
    """t − 2(1 − e^{−t}) + (1 − e^{−2t})/2 = t³/3 − t⁴/4 + 7t⁵/60 − …"""
    return (
        t + 2 * math.expm1(-t) - math.expm1(-2 * t) / 2
        if t > 1e-2
        else t**3 / 3 * (1 - 0.75 * t + 0.35 * t * t - 0.125 * t**3)
    )
