"""The optimizer of a private run, with the noise that its budget needs."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer

from ..accounting.accountant import PrivacyAccountant
from ..accounting.calibration import noise_multiplier_for, total_multiplier
from ..accounting.events import ComposedDpEvent, DpEvent, GaussianDpEvent, SelfComposedDpEvent
from ..batches.poisson_loader import PoissonLoader
from ..distributed import CALIBRATION, Ranks
from ..errors import ArgumentError, ArgumentTypeError
from ..optim.base import PrivateOptimizer
from ..posterior.calibration import event_of as event_of_calibration
from .settings import Settings, is_held


def build(
    settings: Settings[Any],
    loader: PoissonLoader,
    accountant: PrivacyAccountant,
    noise_multiplier: float | None,
) -> PrivateOptimizer:
    """The optimizer that a factory makes for this model and loader, or the built one if its
    values agree.
    """
    module, optimizer, max_grad_norm = settings.module, settings.optimizer, settings.max_grad_norm
    given = {"max_grad_norm": max_grad_norm, "noise_multiplier": noise_multiplier}
    stated = {name: value for name, value in given.items() if value is not None}
    declared: dict[str, float] = {
        "num_data": loader.sampler_of_draws.num_samples,
        "expected_batch_size": loader.expected_batch_size,
    }
    if isinstance(optimizer, PrivateOptimizer):
        built = optimizer
        if accountant is not built.accountant:
            raise ArgumentError(
                "engine and optimizer have different accountants: build the optimizer with"
                " accountant=engine.accountant",
                code="optimizer-settings",
            )
    else:
        made: Any = optimizer
        while isinstance(made, partial):
            made = made.func
        # what a factory gives by itself would be replaced by what it is called with
        own = optimizer.keywords if isinstance(optimizer, partial) else {}
        is_class = isinstance(made, type) and issubclass(made, Optimizer)
        if not callable(made) or (is_class and not issubclass(made, PrivateOptimizer)):
            raise _not_private(made.__name__ if is_class else type(made).__name__)
        for name, value in {**stated, **declared, "accountant": accountant}.items():
            if name in own and own[name] != value:
                raise ArgumentError(
                    f"{name} = {own[name]} in the optimizer factory, but here it is {value}",
                    code="optimizer-settings",
                )
        parameters = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        if not parameters:
            raise ArgumentError(
                "all parameters of the model are frozen: there is nothing to sample"
            )
        scheme = loader.sampler_of_draws.scheme
        # of other schemes nothing may be assumed before the release knows the draws
        sampling = "poisson" if scheme == "poisson" else None
        built = optimizer(
            parameters, **declared, **stated, sampling=sampling, accountant=accountant
        )
        if not isinstance(built, PrivateOptimizer):
            raise _not_private(f"{type(built).__name__}, which the factory made,")
        if built.accountant is not accountant:
            raise ArgumentError(
                "the factory must use the accountant= that it gets: choose it by"
                " PrivacyEngine(accountant=...)",
                code="optimizer-settings",
            )
    for name, value in {**stated, **declared}.items():
        if not math.isclose(getattr(built, name), value, rel_tol=1e-9):
            raise ArgumentError(
                f"the optimizer was built with {name} = {getattr(built, name)}, but here it is"
                f" {value}",
                code="optimizer-settings",
            )
    mine = {id(p) for group in built.param_groups for p in group["params"] if p.requires_grad}
    theirs = {id(p) for p in module.parameters() if p.requires_grad}
    if mine != theirs:
        raise ArgumentError(
            "the optimizer must have exactly the model's trainable parameters, because a gradient"
            " is clipped over all of them: use parameter groups for different settings, and"
            " requires_grad_(False) to freeze",
            code="optimizer-parameters",
        )
    return built


def _not_private(what: str) -> ArgumentTypeError:
    return ArgumentTypeError(
        f"{what} is not private: pass optimizer=partial(torch_dpbayes.optim.DPSGLD, lr=0.25), or"
        " another of torch_dpbayes.optim; lr is that of SGD",
        code="optimizer-not-private",
    )


def build_calibrated(
    settings: Settings[Any],
    loader: PoissonLoader,
    accountant: PrivacyAccountant,
    epsilon: float,
    ranks: Ranks | None,
) -> tuple[PrivateOptimizer, float]:
    """The optimizer, and the floor with which ``epochs`` passes on top of the accountant's
    history stay within ``epsilon``.
    """
    passes, optimizer, delta = settings.passes, settings.optimizer, settings.delta(accountant)
    if accountant.epsilon is not None and accountant.delta is not None:
        if epsilon > accountant.epsilon or delta > accountant.delta:
            raise ArgumentError(
                f"the target ({epsilon}, {delta}) exceeds the accountant's budget"
                f" ({accountant.epsilon}, {accountant.delta}), which includes what was spent"
                " before: pass a target_epsilon= and target_delta= within it",
                code="budget-target",
            )
    if is_held(accountant) and (epsilon, delta) != (accountant.epsilon, accountant.delta):
        raise ArgumentError(
            f"this accountant's guarantee is always its whole budget, ({accountant.epsilon},"
            f" {accountant.delta}): pass that as the target, or use make_private."
            " accountant.summary() says why.",
            code="budget-whole",
        )
    charges, draws = loader.num_charges(passes), loader.sampler_of_draws
    after: list[DpEvent] = []
    if settings.calibrate is not None:
        if ranks is not None:
            raise ArgumentError(
                "calibrate= reads all records in one process, but several ranks share them: leave"
                " it out, and call samples.calibrate in a separate process"
            )
        whole = total_multiplier(accountant, epsilon, delta)
        draws.reserved = whole / math.sqrt(settings.calibrate)
        after.append(event_of_calibration(draws.reserved))

    def enough_noise(event: Callable[[float], DpEvent]) -> float:
        found = partial(_calibrated, event, charges, accountant, epsilon, delta, after)
        # a ledger may be charged by others meanwhile, and floats may round differently on another
        # machine
        return found() if ranks is None else ranks.from_rank_0(CALIBRATION, found)

    if isinstance(optimizer, PrivateOptimizer):
        built = build(settings, loader, accountant, None)
        return built, enough_noise(lambda z: event_of(built, loader, z))

    def plain(noise_multiplier: float) -> DpEvent:
        return draws.event(GaussianDpEvent(noise_multiplier))

    floor = enough_noise(plain)
    built = build(settings, loader, accountant, floor)
    if event_of(built, loader, floor) != plain(floor):  # it releases more than the gradient
        floor = enough_noise(lambda z: event_of(built, loader, z))
        built = build(settings, loader, accountant, floor)
    return built, floor


def event_of(
    optimizer: PrivateOptimizer, loader: PoissonLoader, noise_multiplier: float
) -> DpEvent:
    """What this optimizer will be charged on this loader's draws, for as many steps as are charged
    together.
    """
    draws = loader.sampler_of_draws
    return optimizer.release.event(noise_multiplier, draws.scheme, draws)


def _calibrated(
    event: Callable[[float], DpEvent],
    steps: int,
    accountant: PrivacyAccountant,
    epsilon: float,
    delta: float,
    after: list[DpEvent],
) -> float:
    def fits(noise_multiplier: float) -> bool:
        if not after:
            return accountant.remaining(event(noise_multiplier)) >= steps
        run = SelfComposedDpEvent(event(noise_multiplier), steps)
        return accountant.remaining(ComposedDpEvent([run, *after])) >= 1

    low = 0.01
    if not is_held(accountant):
        low = noise_multiplier_for(
            event,
            target_epsilon=epsilon,
            target_delta=delta,
            steps=steps,
            neighboring=accountant.neighboring,
            history=[*accountant.history, *((later, 1) for later in after)],
            method=accountant.method,
        )
    high = low
    # the budget is kept by another rule than the one that the target is priced by: method "rdp", or
    # a filter
    while not fits(high):
        low, high = high, 2 * high
        if high > 1e7:
            raise ArgumentError(
                f"nothing is left of the accountant's budget for {steps} steps, however large the"
                " noise",
                code="budget-spent",
            )
    while high > 1.0005 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
