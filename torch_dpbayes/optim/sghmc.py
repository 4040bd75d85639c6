"""DP-SGHMC: stochastic gradient Hamiltonian Monte Carlo whose noise is the privacy noise."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal, Unpack

import torch

from ..errors import ArgumentError
from ..release import GroupGradient
from .base import PrivateOptimizer
from .settings import Options, require_fraction


class DPSGHMC(PrivateOptimizer):
    r"""Differentially private stochastic gradient Hamiltonian Monte Carlo.

    .. math::
        S = \sum_{i \in \mathrm{batch}} g_i \min(1, C / \|g_i\|) + z C \xi, \qquad
        \hat g = S / B + \nabla r(\theta) / N, \qquad
        v \leftarrow m v - \eta \hat g, \qquad \theta \leftarrow \theta + v

    with z = max(``noise_multiplier``, z_L) and z_L = (B/C)·√(2(1−m)T/(ηN)). A larger z samples the
    temperature ηN z²C²/(2(1−m)B²). On a quadratic U/N of curvature κ, full batch, nothing clipped,
    the variance is T/(κN)·1/(1 − ηκ/(2(1+m))).

    With ``momentum="matched"`` the friction is derived from the noise: 1−m = b̂ = ηN z²C²/(2TB²) at
    z = ``noise_multiplier``. Then the temperature is T for any privacy noise, as long as b̂ ≤ 1,
    and there is no z_L. When η changes, the velocity is scaled by √(η_new/η_old) to its standard
    deviation at the new η.

    Source: Chen, Fox and Guestrin (2014), eq. (15); Li, Chen, Wang, Ren, Bai and Carin (2019) for
    its private form. The noise variance of one step is 2(1−m)·ηT/N. Some code uses (1−m²)·ηT/N,
    which preserves only the distribution of v; the position variance is then wrong by the factor
    (1+m)/2, even as η → 0.

    Args:
        params, lr: as for :class:`DPSGLD`; lr is as for SGD with momentum.
        momentum: m in [0, 1), or ``"matched"``, which needs ``noise_multiplier``, ``temperature``
            and ``max_grad_norm``, all above 0. m = 0 is :class:`DPSGLD`. A number may differ
            between parameter groups, and schedulers may change it (``OneCycleLR``): the friction
            1−m and z_L change with it.
        options: as for :class:`DPSGLD`.

    Raises:
        ValueError: an argument is out of range, or b̂ > 1; the message says what to write.

    **Privacy.** One step releases S; the velocity is computed from releases only. Its sensitivity
    and event are those of :class:`DPSGLD`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Literal["free"],
        *,
        momentum: float | Literal["matched"] = 0.9,
        **options: Unpack[Options],
    ) -> None:
        self._matches_friction = self._holds_temperature = momentum == "matched"
        if isinstance(momentum, str):
            if not self._matches_friction:
                raise ArgumentError(
                    f'momentum must be a number in [0, 1) or "matched", got {momentum!r}'
                )
            needed = ("noise_multiplier", "temperature", "max_grad_norm")
            if not all(options.get(name) for name in needed):
                raise ArgumentError(
                    'momentum="matched" derives the friction from the noise: it needs'
                    " noise_multiplier, temperature and max_grad_norm, all above 0"
                )
        else:  # torch's schedulers cycle the momentum under this name
            require_fraction("momentum", momentum)
            self._group_options = {"momentum": momentum}
        self._momentum = momentum
        super().__init__(params, lr, **options)

    @property
    def momentum(self) -> float | str:
        """The current m of the first group, or ``"matched"``."""
        return self._momentum if self._matches_friction else self.param_groups[0]["momentum"]

    def _friction(self, group: dict[str, Any]) -> float:
        if self._matches_friction:
            return 1.0
        return 1 - require_fraction("momentum", group["momentum"])

    def _group_langevin_noise_multiplier(self, group: dict[str, Any]) -> float:
        # a matched friction needs no noise of the sampler's own
        return 0.0 if self._matches_friction else super()._group_langevin_noise_multiplier(group)

    def _require_group(self, group: dict[str, Any]) -> None:
        super()._require_group(group)
        self._friction(group)  # raises unless the momentum is valid

    def _update(self, parts: list[GroupGradient]) -> None:
        for part in parts:
            lr = float(part.group["lr"])
            velocities = self._kept(part, "velocity")
            if not self._matches_friction:
                friction = self._friction(part.group)
            else:
                friction = self._matching_friction(part.group, part.noise_multiplier) if lr else 0.0
                before = part.group.get("velocity_lr", lr)
                if lr != before and before > 0:
                    torch._foreach_mul_(velocities, math.sqrt(lr / before))
                part.group["velocity_lr"] = lr
            torch._foreach_mul_(velocities, 1 - friction)
            torch._foreach_add_(velocities, part.gradients, alpha=-lr)
            torch._foreach_add_(part.parameters, velocities)
