"""DP-SGHMC: stochastic gradient Hamiltonian Monte Carlo whose noise is the privacy noise."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch

from ..accounting.accountant import PrivacyAccountant
from ..errors import ArgumentError
from ..noise import in_cache
from ..release.layout import GroupGradient
from .base import PrivateOptimizer
from .priors import LogPrior
from .settings import require_number


class DPSGHMC(PrivateOptimizer):
    r"""Differentially private stochastic gradient Hamiltonian Monte Carlo.

    .. math::
        S = \sum_{i \in \mathrm{batch}} g_i \min(1, C / \|g_i\|) + z C \xi, \qquad
        \hat g = S / B + \nabla r(\theta) / N, \qquad
        v \leftarrow m v - \eta \hat g, \qquad \theta \leftarrow \theta + v

    with z = max(``noise_multiplier``, z_L) and z_L = (B/C)·√(2(1−m)T/(ηN)). A larger z samples the
    temperature ηN z²C²/(2(1−m)B²). On a quadratic U/N of curvature κ, full batch, nothing clipped,
    the variance is T/(κN)·1/(1 − ηκ/(2(1+m))).

    With ``momentum="matched"`` the friction is chosen to fit the noise instead of the noise to fit
    the friction: 1−m = b̂ = ηN z²C²/(2TB²) at z = ``noise_multiplier``. No noise is wasted: the
    temperature is T however large the privacy noise is, as long as b̂ ≤ 1. There is no z_L then.
    When η changes the velocity is scaled by √(η_new/η_old), its standard deviation at the new η.

    Source: Chen, Fox and Guestrin (2014), eq. (15); Li, Chen, Wang, Ren, Bai and Carin (2019) for
    its private form. The noise variance of one step is 2(1−m)·ηT/N. The (1−m²)·ηT/N that is found
    in code, which would keep the law of v alone, leaves the position variance off by (1+m)/2 even
    as η → 0.

    Args:
        params: parameters, ``model.named_parameters()`` or parameter groups.
        lr: step size η on the *mean* loss, the one that SGD with momentum would take; ``"free"`` is
            :attr:`free_lr`.
        num_data: number of records N, a public constant.
        expected_batch_size: B, a public constant; the sum is divided by it, never by the number of
            records that came.
        max_grad_norm: clip norm C of one record's gradient of −log p.
        noise_multiplier: floor z_min of the noise std on the sum, in units of C; positive with
            ``momentum="matched"``.
        temperature: T. 0 turns the sampler's own noise off; positive with ``momentum="matched"``.
        prior_std: standard deviation of the Gaussian prior; ``math.inf`` for a flat one. SGD's
            ``weight_decay`` λ is 1/√(Nλ).
        prior_mean: its mean.
        log_prior: ``{name: parameter} -> log p(θ)`` instead of the Gaussian; must not look at data.
        sampling: ``"poisson"``, ``"recordwise"`` or None, see
            :class:`~torch_dpbayes.optim.base.PrivateOptimizer`; ``make_private`` sets it.
        accountant: where steps are charged; None: one of its own, ``optimizer.accountant``.
        generator: source of the noise; None: operating-system entropy.
        momentum: m in [0, 1), or ``"matched"``. m = 0 is :class:`DPSGLD`. A number may differ
            between parameter groups, and schedulers may change it (``OneCycleLR``): the friction
            1−m, and with it z_L, is that of the step.

    Raises:
        ValueError: an argument is out of range, or b̂ > 1; the message says what would do.

    **Privacy.** One step releases S; the velocity is made of released vectors only. Adding or
    removing a record moves the clipped sum by at most C, replacing one by at most 2C. The event is
    ``PoissonSampledDpEvent(B/N, GaussianDpEvent(z))`` under Poisson sampling,
    ``GaussianDpEvent(z)`` on full batches, on any others ``UnspecifiedBatchGaussianDpEvent(z)``
    (replace-one) or, if so stated, ``RecordwiseBatchGaussianDpEvent(z)``; ``NonPrivateDpEvent()``
    at z = 0.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Literal["free"],
        *,
        num_data: int,
        expected_batch_size: float,
        max_grad_norm: float,
        noise_multiplier: float = 0.0,
        temperature: float = 1.0,
        prior_std: float = 1.0,
        prior_mean: float = 0.0,
        log_prior: LogPrior | None = None,
        sampling: str | None = None,
        accountant: PrivacyAccountant | None = None,
        generator: torch.Generator | None = None,
        assume_independent_records: bool = False,
        momentum: float | Literal["matched"] = 0.9,
    ) -> None:
        self._is_matched = momentum == "matched"
        if isinstance(momentum, str):
            if not self._is_matched:
                raise ArgumentError(
                    f'momentum must be a number in [0, 1) or "matched", got {momentum!r}'
                )
            if not noise_multiplier > 0:
                raise ArgumentError(
                    'momentum="matched" fits the friction to the privacy noise: it needs'
                    " noise_multiplier > 0"
                )
            if not temperature > 0:
                raise ArgumentError(
                    'momentum="matched" needs temperature > 0: no friction makes noise sample'
                    " temperature 0"
                )
        elif not 0 <= momentum < 1:
            raise ArgumentError(f"momentum must be in [0, 1), got {momentum}")
        self._momentum = momentum
        defaults = {"lr": lr, "prior_std": prior_std, "prior_mean": prior_mean}
        super().__init__(
            params,
            # under this name torch's schedulers cycle it
            defaults if self._is_matched else {**defaults, "momentum": momentum},
            num_data=num_data,
            expected_batch_size=expected_batch_size,
            max_grad_norm=max_grad_norm,
            noise_multiplier=noise_multiplier,
            temperature=temperature,
            log_prior=log_prior,
            sampling=sampling,
            accountant=accountant,
            generator=generator,
            assume_independent_records=assume_independent_records,
        )

    @property
    def momentum(self) -> float | str:
        """m in force, of the first group, or ``"matched"``."""
        return self._momentum if self._is_matched else self._momentum_of(self.param_groups[0])

    def _group_langevin_noise_multiplier(self, group: dict[str, Any]) -> float:
        if self._is_matched:
            return 0.0  # asks for no noise of its own
        scale = self.expected_batch_size / self.max_grad_norm
        return scale * math.sqrt(
            2 * self._friction(group, 0.0) * self.temperature / (group["lr"] * self.num_data)
        )

    def _group_temperature(self, group: dict[str, Any], noise_multiplier: float) -> float:
        if self._is_matched:
            return self.temperature
        ratio = noise_multiplier * self.max_grad_norm / self.expected_batch_size
        return (
            group["lr"] * self.num_data * ratio**2 / (2 * self._friction(group, noise_multiplier))
        )

    def _free_lr(self) -> float:
        ratio = self.expected_batch_size / (self.max_grad_norm * self.noise_multiplier)
        friction = 1.0 if self._is_matched else 1 - self._momentum_of(self.defaults)
        return 2 * friction * self.temperature * ratio**2 / self.num_data

    def _friction(self, group: dict[str, Any], noise_multiplier: float) -> float:
        """1 − m."""
        if not self._is_matched:
            return 1 - self._momentum_of(group)
        ratio = noise_multiplier * self.max_grad_norm / self.expected_batch_size
        return group["lr"] * self.num_data * ratio**2 / (2 * self.temperature)

    def _momentum_of(self, group: dict[str, Any]) -> float:
        """m of a group; that of a state saved before groups had one is the optimizer's."""
        momentum = group.get("momentum", self._momentum)
        require_number("momentum", momentum)
        if not 0 <= momentum < 1:
            raise ArgumentError(f"momentum must be in [0, 1), got {momentum}")
        return float(momentum)

    def _multiplier(self, group: dict[str, Any]) -> float:
        if not self._is_matched:
            self._momentum_of(group)
        noise_multiplier = super()._multiplier(group)
        if self._is_matched and group["lr"] > self._free_lr() * (1 + 1e-9):
            raise ArgumentError(
                f"lr = {group['lr']} needs a friction of"
                f" {self._friction(group, noise_multiplier):.4g} > 1 to match the privacy noise,"
                f" which is more than temperature {self.temperature} allows. Use lr <="
                f" {self._free_lr():.4g}, or a number for momentum and a higher temperature."
            )
        return noise_multiplier

    def _update(self, parts: list[GroupGradient]) -> None:
        for part in parts:
            lr = float(part.group["lr"])
            velocity, velocities = self._kept(part, "velocity")
            if self._is_matched:
                before = part.group.get("velocity_lr", lr)
                if lr != before and before > 0:
                    velocity.mul_(math.sqrt(lr / before))
                part.group["velocity_lr"] = lr
            friction = (
                self._friction(part.group, part.noise_multiplier)
                if lr > 0 or not self._is_matched
                else 0.0
            )
            for v, gradient in in_cache(velocity, part.gradient):
                v.mul_(1 - friction).add_(gradient, alpha=-lr)
            torch._foreach_add_(part.parameters, velocities)
