"""What a run will cost and sample, known before anything is spent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..accounting.accountant import PrivacyAccountant
from ..batches.poisson_loader import PoissonLoader
from ..optim.base import PrivateOptimizer
from .optimizers import event_of, limit
from .settings import Settings, is_held

_WASTE = 1.02  # times the noise that the target needs, beyond which somebody should hear of it

_ALL = 0.995  # of a target, from which on it counts as used
_MOST = 0.8  # of a target: what is left wants twice the noise


@dataclass(frozen=True)
class Plan:
    """What a run will cost and sample, known before anything is spent."""

    langevin_noise_multiplier: float
    noise_multiplier: float
    effective_noise_multiplier: float
    effective_temperature: float
    temperature: float
    sample_rate: float
    steps: int
    epsilon: float
    delta: float
    target_epsilon: float | None
    lr: float
    free_lr: float

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))  # in a notebook

    def __str__(self) -> str:
        lines = [
            (
                f"noise multiplier      z_L = {self.langevin_noise_multiplier:.4g} (the sampler's"
                f" own), z_min = {self.noise_multiplier:.4g} (the floor); in force:"
                f" {self.effective_noise_multiplier:.4g}"
            ),
            (
                f"temperature           {self.effective_temperature:.4g} from the Gaussian noise;"
                f" asked for: {self.temperature:.4g}"
            ),
            f"steps                 {self.steps} at sampling rate {self.sample_rate:.6g}",
            (
                f"privacy               ({self.epsilon:.4g}, {self.delta:.3g}) at the end, what was"
                " spent before included"
            ),
            f"privacy is free up to lr = {self.free_lr:.4g} (now {self.lr:.4g})",
        ]
        return "\n".join([*lines, *self.unused_target])

    @property
    def unused_target(self) -> list[str]:
        """A line on what of the target will not be used, and how it could be; none where all is."""
        if self.target_epsilon is None or not (
            self.langevin_noise_multiplier > _WASTE * self.noise_multiplier > 0
        ):
            return []
        if self.epsilon > self.target_epsilon * _ALL:
            return []  # a filter guarantees the whole budget, however much of it is used
        colder = self.temperature * (self.noise_multiplier / self.langevin_noise_multiplier) ** 2
        return [
            f"epsilon = {self.target_epsilon:.4g} was asked for, but at temperature"
            f" {self.temperature:.4g} the sampler's own noise decides: {self.epsilon:.2g} at the"
            f' end. lr = {self.free_lr:.4g} (lr="free") or temperature = {colder:.3g} would use the'
            " rest."
        ]


def plan_of(
    settings: Settings[Any],
    optimizer: PrivateOptimizer,
    loader: PoissonLoader,
    accountant: PrivacyAccountant,
    target_epsilon: float | None,
) -> Plan:
    """What the passes will cost and sample, on top of the accountant's history."""
    assert settings.epochs is not None
    epochs, delta = settings.epochs, settings.delta(accountant)
    steps = epochs * len(loader)
    z = optimizer.effective_noise_multiplier
    after = PrivacyAccountant(
        method=accountant.method, neighboring=accountant.neighboring, unit=accountant.unit
    )
    for charge in accountant.history:
        after.compose(charge.event, charge.count)
    if math.isfinite(z):
        # a built optimizer hears of it from make_private only
        after.compose(event_of(optimizer, loader, z), loader.num_charges(epochs))
    return Plan(
        langevin_noise_multiplier=optimizer.langevin_noise_multiplier,
        noise_multiplier=optimizer.noise_multiplier,
        effective_noise_multiplier=z,
        effective_temperature=optimizer.effective_temperature,
        temperature=optimizer.temperature,
        sample_rate=loader.sample_rate,
        steps=steps,
        epsilon=limit(accountant, delta) if is_held(accountant) else after.get_epsilon(delta),
        delta=delta,
        target_epsilon=target_epsilon,
        lr=max(float(group["lr"]) for group in optimizer.param_groups),
        free_lr=optimizer.free_lr,
    )


def little_left(accountant: PrivacyAccountant, plan: Plan) -> list[str]:
    """A line where most of a target was spent before; none elsewhere."""
    if plan.target_epsilon is None or len(accountant) == 0 or is_held(accountant):
        return []
    spent = accountant.get_epsilon(plan.delta)
    if spent < _MOST * plan.target_epsilon:
        return []
    return [
        f"of epsilon = {plan.target_epsilon:.4g}, the target of everything on this accountant,"
        f" {spent:.4g} was spent before: hence noise multiplier {plan.noise_multiplier:.3g}. For a"
        " share of its own pass additional_epsilon= instead."
    ]


def overridden_floor(optimizer: PrivateOptimizer) -> list[str]:
    """A line where the sampler's own noise is larger than the one that was asked for."""
    floor, own = optimizer.noise_multiplier, optimizer.langevin_noise_multiplier
    if not (math.inf > own > _WASTE * floor > 0):
        return []
    colder = optimizer.temperature * (floor / own) ** 2
    return [
        f"noise_multiplier = {floor:.4g} is only a floor: at temperature"
        f" {optimizer.temperature:.4g} the sampler's own noise is {own:.4g}, which is added and"
        f' charged. lr = {optimizer.free_lr:.4g} (lr="free") or temperature = {colder:.3g} would'
        " use the floor."
    ]
