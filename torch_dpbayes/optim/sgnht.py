"""DP-SGNHT: the stochastic gradient Nosé-Hoover thermostat. Its friction adapts to the noise."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal, Unpack

import torch

from ..noise import check_positive
from ..release import GroupGradient
from .base import PrivateOptimizer
from .settings import Options, read_only, require_fraction

# Far from the posterior, the kinetic energy of the drift could raise α above 2 in one step, and (1
# − α)v would diverge. α* is at most 1; at α = 1.2 the step is stable up to ηκ = 1.6 and damps
# almost everything.
_LARGEST_FRICTION = 1.2


class DPSGNHT(PrivateOptimizer):
    r"""Differentially private stochastic gradient Nosé-Hoover thermostat.

    .. math::
        S = \sum_{i \in \mathrm{batch}} g_i \min(1, C / \|g_i\|) + z C \xi, \qquad
        \hat g = S / B + \nabla r(\theta) / N

    .. math::
        v' = (1 - \alpha) v - \eta \hat g, \qquad \theta \leftarrow \theta + v', \qquad
        \alpha \leftarrow \alpha + \mathrm{gain} \cdot
        \Bigl( \frac{N}{n \eta T} \Bigl\|\frac{v + v'}{2}\Bigr\|^2 - 1 \Bigr)

    for n parameters, with z = max(``noise_multiplier``, z_L) and z_L = (B/C)·√(2aT/(ηN)), a = 1 −
    ``momentum``. The friction α settles where the kinetic energy has temperature T: at α* = ηN
    z²C²/(2TB²) for the Gaussian noise, plus what isotropic minibatch noise needs. So larger privacy
    noise does not raise the temperature, as long as α* ≤ 1. α starts at α*. All groups have the
    same α; their kinetic terms add up. The step is stable on a quadratic of curvature κ while ηκ <
    2(2−α*). α is at most 1.2: otherwise the drift from a far start could make the step unstable.

    Source: Ding, Fang, Babbush, Chen, Skeel and Neven (2014); Wang, Fienberg and Smola (2015),
    Algorithm 3. They measure the kinetic energy at the end of the step, ‖v'‖²: that samples
    temperature T(1 − α/2), and diverges if α* is about 1, as with privacy noise. At the half step
    the discretisation errors of noise and friction cancel. Wang et al. also add noise of variance
    2aη to the privacy noise; here one Gaussian with the larger variance is drawn.

    With ``max_grad_norm`` and no ``temperature`` the thermostat keeps, for each group, the T at
    which z_L equals ``noise_multiplier`` at the current lr: α* = a.

    Args:
        params, lr: as for :class:`DPSGLD`; lr is as for SGD with momentum.
        momentum: 1 − a in [0, 1); z_L is computed for friction a.
        thermostat_gain: how fast α follows the kinetic energy; positive. α settles in about 1/gain
            steps.
        options: as for :class:`DPSGLD`; the temperature is positive.

    Raises:
        ValueError: an argument is out of range, or α* > 1; the message says what to write.

    **Privacy.** One step releases S; velocity and α are computed from releases only. Its
    sensitivity and event are those of :class:`DPSGLD`.
    """

    _holds_temperature = _needs_temperature = _matches_friction = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Literal["free"],
        *,
        momentum: float = 0.9,
        thermostat_gain: float = 0.01,
        **options: Unpack[Options],
    ) -> None:
        self._momentum = require_fraction("momentum", momentum)
        self._thermostat_gain = check_positive("thermostat_gain", thermostat_gain)
        super().__init__(params, lr, **options)

    momentum: Final[float] = read_only("_momentum", "1 − a; z_L is computed for friction a.")
    thermostat_gain: Final[float] = read_only(
        "_thermostat_gain", "How fast the friction follows the kinetic energy."
    )

    @property
    def friction(self) -> float | None:
        """α, the current friction; None before the first step."""
        return next((group["friction"] for group in self.param_groups if "friction" in group), None)

    def _friction(self, group: dict[str, Any]) -> float:
        return 1 - self._momentum

    def _update(self, parts: list[GroupGradient]) -> None:
        active = [part for part in parts if part.group["lr"] > 0]
        number = sum(len(part.gradient) for part in active)
        friction = self.friction
        if friction is None and active:
            needed = (
                len(part.gradient) * self._matching_friction(part.group, part.noise_multiplier)
                for part in active
            )
            friction = sum(needed) / number
        friction = friction or 0.0
        kinetic = 0.0
        for part in parts:
            lr = float(part.group["lr"])
            temperature = self._temperature_of(part.group)
            velocities = self._kept(part, "velocity")
            if lr == 0:
                torch._foreach_mul_(velocities, 1 - friction)
            else:
                # −(v + v')/η, twice the velocity at the half step
                torch._foreach_add_(part.gradients, velocities, alpha=-(2 - friction) / lr)
                square = sum_of_squares(part.gradient)
                kinetic += self.num_data * lr * square / (4 * temperature)
                torch._foreach_neg_(velocities)
                torch._foreach_add_(velocities, part.gradients, alpha=-lr)
            torch._foreach_add_(part.parameters, velocities)
        if active:
            friction = min(
                friction + self._thermostat_gain * (kinetic / number - 1), _LARGEST_FRICTION
            )
            for group in self.param_groups:
                group["friction"] = friction


def sum_of_squares(vector: torch.Tensor) -> float:
    """Of many numbers; a single float32 sum of 10⁸ of them on the CPU is 0.8 % too small. A GPU
    adds in blocks itself.
    """
    pieces = vector.split(2**16) if vector.is_cpu else (vector,)
    return float(torch.stack([torch.dot(v, v) for v in pieces]).double().sum())
