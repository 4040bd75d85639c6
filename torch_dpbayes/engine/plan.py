"""What a run will cost and sample, known before anything is spent."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from ..accounting.accountant import PrivacyAccountant
from ..accounting.events import DpEvent
from ..batches.poisson_loader import PoissonLoader
from ..optim.base import PrivateOptimizer
from ..posterior.calibration import event_of as event_of_calibration
from .optimizers import event_of
from .settings import Settings, is_held

_ALL = 0.995  # of a target, from which on it counts as used
_MOST = 0.8  # of a target: what is left wants twice the noise
_OF_OPTIMIZER = (
    "langevin_noise_multiplier noise_multiplier effective_noise_multiplier effective_temperature"
    " temperature max_grad_norm derives_clip_norm num_data free_lr unused_noise"
).split()


@dataclass(frozen=True)
class Plan:
    """What a run will cost and sample, known before anything is spent."""

    langevin_noise_multiplier: float
    noise_multiplier: float
    effective_noise_multiplier: float
    effective_temperature: float
    temperature: float | None
    max_grad_norm: float
    derives_clip_norm: bool
    num_parameters: int
    num_data: int
    sample_rate: float
    steps: int
    delta: float
    target_epsilon: float | None
    calibration_noise_multiplier: float | None
    lr: float
    free_lr: float
    unused_noise: str
    epsilon_at_end: Callable[[], float] = field(repr=False, compare=False)

    @cached_property
    def epsilon(self) -> float:
        """ε of everything on the accountant at the end; computed on demand."""
        return self.epsilon_at_end()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))  # in a notebook

    def __str__(self) -> str:
        if self.derives_clip_norm:
            origin = "derived: the sampler needs this noise at this lr and temperature"
        else:
            origin = "as given"
        asked = "it follows" if self.temperature is None else f"asked for: {self.temperature:.4g}"
        lines = [
            f"clip norm             C = {self.max_grad_norm:.4g}, {origin}",
            (
                f"noise multiplier      z_L = {self.langevin_noise_multiplier:.4g} (the sampler's"
                f" own), z_min = {self.noise_multiplier:.4g} (the floor); in force:"
                f" {self.effective_noise_multiplier:.4g}"
            ),
            (
                f"temperature           T = {self.effective_temperature:.4g} from the Gaussian"
                f" noise; {asked}"
            ),
            f"steps                 {self.steps} at sampling rate {self.sample_rate:.6g}",
            f"privacy               ({self.epsilon:.4g}, {self.delta:.3g}) of all charges",
        ]
        if self.calibration_noise_multiplier is not None:
            lines.append(
                "calibration           reserved: noise multiplier"
                f" {self.calibration_noise_multiplier:.4g}, charged by samples.calibrate"
            )
        if not self.derives_clip_norm:
            lines.append(f"privacy is free up to lr = {self.free_lr:.4g} (now {self.lr:.4g})")
        return "\n".join([*lines, *self.warnings])

    @property
    def warnings(self) -> list[str]:
        """Lines on what the user may want to change."""
        lines = [self._unused_target, self._too_much_noise]
        if self.delta * self.num_data >= 1:
            lines.append(
                f"delta = {self.delta:.3g} is no smaller than 1 / {self.num_data} records: a"
                " program that publishes one of them would satisfy this. Set it well below"
            )
        return [line for line in lines if line]

    @property
    def _unused_target(self) -> str:
        """What of the target will not be used, and how it could be."""
        if self.target_epsilon is None or not self.unused_noise:
            return ""
        if self.epsilon > self.target_epsilon * _ALL:
            return ""  # a filter guarantees the whole budget, however much of it is used
        return (
            f"epsilon = {self.target_epsilon:.4g} was asked for, but at temperature"
            f" {self.temperature:.4g} the sampler's own noise decides: {self.epsilon:.2g} at the"
            f" end. The rest would be used with {self.unused_noise}."
        )

    @property
    def _too_much_noise(self) -> str:
        hot = self.effective_temperature
        # All gradients of a run, clipped and in one direction, move the parameters by lr·C·steps;
        # the noise moves them by about lr·zC·√(parameters·steps)/B.
        walk = self.effective_noise_multiplier * math.sqrt(self.num_parameters)
        if math.inf > walk > self.sample_rate * self.num_data * math.sqrt(self.steps):
            return (
                "the noise of all steps is larger than all clipped gradients together: this"
                " budget cannot train the model. Use more records, larger batches, fewer trained"
                " parameters or a larger epsilon"
            )
        if self.temperature is None and hot > 1:
            return (
                f"the noise samples temperature {hot:.4g}, hotter than the posterior."
                f" max_grad_norm = {self.max_grad_norm / math.sqrt(hot):.4g} would sample 1 (leave"
                " it out), as would a smaller lr or larger batches"
            )
        return ""


def plan_of(
    settings: Settings[Any],
    optimizer: PrivateOptimizer,
    loader: PoissonLoader,
    accountant: PrivacyAccountant,
    target_epsilon: float | None,
) -> Plan:
    """What the passes will cost and sample, on top of the accountant's history."""
    epochs, delta = settings.passes, settings.delta(accountant)
    z, reserved = optimizer.effective_noise_multiplier, loader.sampler_of_draws.reserved
    # as of now: the accountant may be charged before epsilon is asked for
    released = [(charge.event, charge.count) for charge in accountant.history]
    if math.isfinite(z):
        # a built optimizer hears of it from make_private only
        released.append((event_of(optimizer, loader, z), loader.num_charges(epochs)))
    if reserved is not None:
        released.append((event_of_calibration(reserved), 1))
    of = {name: getattr(accountant, name) for name in ("method", "neighboring", "unit")}
    at_end = partial(_epsilon_of, released, of, delta)
    if is_held(accountant):
        at_end = partial(float, _limit(accountant, delta))

    return Plan(
        **{name: getattr(optimizer, name) for name in _OF_OPTIMIZER},
        num_parameters=sum(p.numel() for p in settings.module.parameters() if p.requires_grad),
        sample_rate=loader.sample_rate,
        steps=epochs * len(loader),
        delta=delta,
        target_epsilon=target_epsilon,
        calibration_noise_multiplier=reserved,
        lr=max(float(group["lr"]) for group in optimizer.param_groups),
        epsilon_at_end=at_end,
    )


def _epsilon_of(released: list[tuple[DpEvent, int]], of: dict[str, Any], delta: float) -> float:
    accountant = PrivacyAccountant(**of)
    for event, count in released:
        accountant.compose(event, count)
    return accountant.get_epsilon(delta)


def _limit(accountant: PrivacyAccountant, delta: float) -> float:
    """Epsilon of an accountant whose guarantee is a limit."""
    if accountant.guarantee == "filter":
        return accountant.get_epsilon(delta)
    is_budget = accountant.epsilon is not None and delta == accountant.delta
    return accountant.epsilon if accountant.epsilon is not None and is_budget else math.inf


def little_left(accountant: PrivacyAccountant, plan: Plan) -> list[str]:
    """A line where most of a target was spent before; none elsewhere."""
    if plan.target_epsilon is None or len(accountant) == 0 or is_held(accountant):
        return []
    spent = accountant.get_epsilon(plan.delta)
    if spent < _MOST * plan.target_epsilon:
        return []
    return [
        f"of epsilon = {plan.target_epsilon:.4g}, the target of everything on this accountant,"
        f" {spent:.4g} was spent before: hence noise multiplier {plan.noise_multiplier:.3g}. To"
        " give this run its own share pass additional_epsilon= instead."
    ]
