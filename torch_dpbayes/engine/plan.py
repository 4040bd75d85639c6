"""Builds the optimizer of a private run, computes the noise that its budget needs, and predicts its
cost and its temperature before anything is spent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.optim import Optimizer

from ..accounting.accountant import PrivacyAccountant
from ..accounting.calibration import noise_multiplier_for, total_multiplier
from ..accounting.events import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    SelfComposedDpEvent,
    check_epsilon,
)
from ..distributed import CALIBRATION, Ranks
from ..errors import ArgumentError, ArgumentTypeError
from ..optim.base import PrivateOptimizer
from ..posterior.calibration import event_of as event_of_calibration
from .settings import Settings, private_loader

_ALL = 0.995  # a target counts as used above this share
_MOST = 0.8  # of a target: if this share is spent, the rest needs twice the noise
_OF_OPTIMIZER = (
    "langevin_noise_multiplier noise_multiplier effective_noise_multiplier effective_temperature"
    " temperature max_grad_norm derives_clip_norm num_data free_lr unused_noise"
).split()


@dataclass(frozen=True)
class Plan:
    """The cost and the distribution of a run, predicted before anything is spent. ``epsilon`` is
    that of all charges at the end of the run.
    """

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
    epsilon: float

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))  # in a notebook

    def __str__(self) -> str:
        if self.derives_clip_norm:
            origin = "derived: the sampler needs this noise at this lr and temperature"
        else:
            origin = "as given"
        asked = "it is derived" if self.temperature is None else f"your T: {self.temperature:.4g}"
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
            (
                f"steps                 {self.steps} at lr {self.lr:.4g} and sampling rate"
                f" {self.sample_rate:.6g}"
            ),
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
        """Warnings about settings that the user may want to change."""
        lines, target, hot = [], self.target_epsilon, self.effective_temperature
        # a filter guarantees the whole budget, even if a run uses less
        if target is not None and self.unused_noise and self.epsilon <= target * _ALL:
            lines.append(
                f"the target is epsilon = {target:.4g}, but the sampler needs more noise at"
                f" temperature {self.temperature:.4g}: epsilon is {self.epsilon:.2g} at the end."
                f" To use the rest, pass {self.unused_noise}."
            )
        # If all clipped gradients of a run had one direction, they would move the parameters by
        # lr·C·steps; the noise moves them by about lr·zC·√(parameters·steps)/B.
        walk = self.effective_noise_multiplier * math.sqrt(self.num_parameters)
        if math.inf > walk > self.sample_rate * self.num_data * math.sqrt(self.steps):
            lines.append(
                "the noise of all steps is larger than all clipped gradients together: this"
                " budget cannot train the model. Use more records, larger batches, fewer trained"
                " parameters or a larger epsilon"
            )
        elif self.temperature is None and hot > 1:
            lines.append(
                f"the noise samples temperature {hot:.4g}, hotter than the posterior."
                f" max_grad_norm = {self.max_grad_norm / math.sqrt(hot):.4g} would sample 1 (leave"
                " it out), as would a smaller lr or larger batches"
            )
        if self.delta * self.num_data >= 1:
            lines.append(
                f"delta = {self.delta:.3g} is not below 1 / {self.num_data} records: a program"
                " that publishes one record would satisfy it. Use a much smaller delta"
            )
        return lines


class Run:
    """A private run before it begins. ``target``: the accountant's total ε at the end of the run;
    None if the noise is given.
    """

    def __init__(
        self, settings: Settings[Any], found: PrivacyAccountant | None, ranks: Ranks | None
    ) -> None:
        self.settings, self.ranks = settings, ranks
        self.accountant = settings.accountant(found)
        self.target = settings.target_epsilon
        if settings.additional_epsilon is not None:
            if self._is_held:
                raise ArgumentError(
                    "additional_epsilon does not work here: this accountant's guarantee is always"
                    " its whole budget. Pass the budget as target_epsilon",
                    code="budget-whole",
                )
            share = check_epsilon(settings.additional_epsilon)
            self.target = self.accountant.get_epsilon(self.delta) + share
        self.loader = private_loader(settings, ranks)
        self.draws = self.loader.sampler_of_draws
        self._after: list[DpEvent] = []  # reserved for the end of the run

    @property
    def delta(self) -> float:
        """δ of the run; if none is given, that of the accountant's budget."""
        given = self.settings.target_delta
        if (delta := self.accountant.delta if given is None else given) is None:
            raise ArgumentError(
                "target_delta is needed, because the accountant has no budget with a delta",
                code="budget-delta",
            )
        return delta

    @property
    def _is_held(self) -> bool:
        """Whether the guarantee is a limit that was fixed beforehand, whatever is charged."""
        return self.accountant.is_later_job or self.accountant.guarantee == "filter"

    def optimizer(self) -> tuple[PrivateOptimizer, float]:
        """The optimizer, and the noise floor at which the accountant's history and this run
        together stay within the target; 0 without a target.

        Raises:
            ValueError, TypeError: optimizer, target and accountant contradict each other.
        """
        if self.target is None:
            return self._built(self.settings.noise_multiplier), 0.0
        self._require_within_budget(self.target)
        if (share := self.settings.calibrate) is not None:
            if self.ranks is not None:
                raise ArgumentError(
                    "calibrate= reads all records in one process, but several ranks share them:"
                    " leave it out, and call samples.calibrate in a separate process"
                )
            whole = total_multiplier(self.accountant, self.target, self.delta)
            self.draws.reserved = whole / math.sqrt(share)
            self._after = [event_of_calibration(self.draws.reserved)]

        def plain(noise_multiplier: float) -> DpEvent:
            return self.draws.event(GaussianDpEvent(noise_multiplier))

        is_built = isinstance(self.settings.optimizer, PrivateOptimizer)
        floor = None if is_built else self._enough_noise(plain)
        built = self._built(floor)
        event = partial(self.event, built)
        if floor is None or event(floor) != plain(floor):
            # a built optimizer, or one that releases more than the gradient
            floor = self._enough_noise(event)
            built = built if is_built else self._built(floor)
        return built, floor

    def event(self, optimizer: PrivateOptimizer, noise_multiplier: float) -> DpEvent:
        """The event of one charge of this optimizer, which may cover several steps."""
        return optimizer.release.event(noise_multiplier, self.draws.scheme, self.draws)

    def _require_within_budget(self, epsilon: float) -> None:
        accountant, delta = self.accountant, self.delta
        budget = accountant.epsilon, accountant.delta
        if accountant.epsilon is not None and accountant.delta is not None:
            if epsilon > accountant.epsilon or delta > accountant.delta:
                raise ArgumentError(
                    f"the target ({epsilon}, {delta}) exceeds the accountant's budget {budget},"
                    " which includes what was spent before: pass a target_epsilon= and"
                    " target_delta= within it",
                    code="budget-target",
                )
        if self._is_held and (epsilon, delta) != budget:
            raise ArgumentError(
                f"this accountant's guarantee is always its whole budget, {budget}: pass this as"
                " the target, or use make_private. accountant.summary() says why.",
                code="budget-whole",
            )

    def _enough_noise(self, event: Callable[[float], DpEvent]) -> float:
        """The least noise multiplier at which all passes fit."""
        found = partial(self._calibrated, event, self.loader.num_charges(self.settings.epochs))
        # rank 0 decides: a ledger may be charged meanwhile, and machines may round differently
        return found() if self.ranks is None else self.ranks.from_rank_0(CALIBRATION, found)

    def _calibrated(self, event: Callable[[float], DpEvent], steps: int) -> float:
        accountant, after = self.accountant, self._after

        def fits(noise_multiplier: float) -> bool:
            run = SelfComposedDpEvent(event(noise_multiplier), steps)
            return accountant.remaining(ComposedDpEvent([run, *after])) >= 1

        low = 0.01
        if self.target is not None and not self._is_held:
            low = noise_multiplier_for(
                event,
                target_epsilon=self.target,
                target_delta=self.delta,
                steps=steps,
                neighboring=accountant.neighboring,
                history=[*accountant.history, *((later, 1) for later in after)],
                method=accountant.method,
            )
        high = low
        # the accountant checks its budget by another rule than the calibration above: method
        # "rdp", or a filter
        while not fits(high):
            low, high = high, 2 * high
            if high > 1e7:
                raise ArgumentError(
                    f"nothing is left of the accountant's budget for {steps} steps, however large"
                    " the noise",
                    code="budget-spent",
                )
        while high > 1.0005 * low:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if fits(middle) else (middle, high)
        return high

    def plan(self, optimizer: PrivateOptimizer) -> Plan:
        """The cost and the distribution of these passes, added to the accountant's history."""
        module = self.settings.module
        return Plan(
            **{name: getattr(optimizer, name) for name in _OF_OPTIMIZER},
            num_parameters=sum(p.numel() for p in module.parameters() if p.requires_grad),
            sample_rate=self.loader.sample_rate,
            steps=self.settings.epochs * len(self.loader),
            delta=self.delta,
            target_epsilon=self.target,
            calibration_noise_multiplier=self.draws.reserved,
            lr=max(float(group["lr"]) for group in optimizer.param_groups),
            epsilon=self._epsilon_at_end(optimizer),
        )

    def _epsilon_at_end(self, optimizer: PrivateOptimizer) -> float:
        """ε of the charges so far and of this run."""
        accountant, delta = self.accountant, self.delta
        if accountant.guarantee == "filter":
            return accountant.get_epsilon(delta)
        if self._is_held:
            budget = accountant.epsilon if delta == accountant.delta else None
            return math.inf if budget is None else budget
        together = PrivacyAccountant(
            method=accountant.method, neighboring=accountant.neighboring, unit=accountant.unit
        )
        for charge in accountant.history:
            together.compose(charge.event, charge.count)
        if math.isfinite(z := optimizer.effective_noise_multiplier):
            # the loader's scheme: make_private has not set that of a built optimizer yet
            charges = self.loader.num_charges(self.settings.epochs)
            together.compose(self.event(optimizer, z), charges)
        for event in self._after:
            together.compose(event)
        return together.get_epsilon(delta)

    def warnings(self, optimizer: PrivateOptimizer) -> list[str]:
        """The plan's warnings, and one if most of the target was spent before."""
        plan, accountant = self.plan(optimizer), self.accountant
        if self.target is None or not len(accountant) or self._is_held:
            return plan.warnings
        if (spent := accountant.get_epsilon(self.delta)) < _MOST * self.target:
            return plan.warnings
        return [
            f"the target, epsilon = {self.target:.4g}, is for everything on this accountant, and"
            f" {spent:.4g} was spent before: hence noise multiplier {plan.noise_multiplier:.3g}."
            " To give this run its own share pass additional_epsilon= instead.",
            *plan.warnings,
        ]

    def _built(self, noise_multiplier: float | None) -> PrivateOptimizer:
        """The optimizer that a factory makes for this model and loader, or the built one if its
        values agree.
        """
        accountant, optimizer = self.accountant, self.settings.optimizer
        given = {
            "max_grad_norm": self.settings.max_grad_norm,
            "noise_multiplier": noise_multiplier,
            "num_data": self.draws.counted_records,
            "expected_batch_size": self.loader.expected_batch_size,
        }
        stated = {name: value for name, value in given.items() if value is not None}
        trained = [(n, p) for n, p in self.settings.module.named_parameters() if p.requires_grad]
        built: Any = optimizer
        if not isinstance(optimizer, PrivateOptimizer):
            _check_factory(optimizer, {**stated, "accountant": accountant})
            if not trained:
                raise ArgumentError(
                    "all parameters of the model are frozen: there is nothing to sample"
                )
            # for other schemes, the optimizer must not assume anything until make_private binds it
            sampling = "poisson" if self.draws.scheme == "poisson" else None
            built = optimizer(trained, **stated, sampling=sampling, accountant=accountant)
        if not isinstance(built, PrivateOptimizer):
            raise _not_private(f"{type(built).__name__}, which the factory made,")
        if built.accountant is not accountant:
            raise ArgumentError(
                "engine and optimizer have different accountants: build the optimizer with"
                " accountant=engine.accountant, or with the accountant= that a factory gets",
                code="optimizer-settings",
            )
        for name, value in stated.items():
            if not math.isclose(getattr(built, name), value, rel_tol=1e-9):
                raise _differs(name, getattr(built, name), value)
        mine = {id(p) for group in built.param_groups for p in group["params"] if p.requires_grad}
        if mine != {id(p) for _, p in trained}:
            raise ArgumentError(
                "the optimizer must have exactly the model's trainable parameters, because a"
                " gradient is clipped over all of them: use parameter groups for different"
                " settings, and requires_grad_(False) to freeze",
                code="optimizer-parameters",
            )
        return built


def _check_factory(optimizer: Any, called_with: dict[str, Any]) -> None:
    """Raise if the factory makes no private optimizer, or if the call replaces its arguments."""
    is_partial = isinstance(optimizer, partial)  # partial of partial is one
    made, own = (optimizer.func, optimizer.keywords) if is_partial else (optimizer, {})
    is_class = isinstance(made, type) and issubclass(made, Optimizer)
    if not callable(made) or (is_class and not issubclass(made, PrivateOptimizer)):
        raise _not_private(made.__name__ if is_class else type(made).__name__)
    for name, value in called_with.items():
        if own.get(name, value) != value:
            raise _differs(name, own[name], value)


def _differs(name: str, own: Any, here: Any) -> ArgumentError:
    return ArgumentError(
        f"the optimizer was built with {name} = {own}, but here it is {here}",
        code="optimizer-settings",
    )


def _not_private(what: str) -> ArgumentTypeError:
    return ArgumentTypeError(
        f"{what} is not private: pass optimizer=partial(torch_dpbayes.optim.DPSGLD, lr=0.25), or"
        " another of torch_dpbayes.optim; lr is as for SGD",
        code="optimizer-not-private",
    )
