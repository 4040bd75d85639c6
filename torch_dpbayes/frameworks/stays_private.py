"""Does a framework train on the private loader, with the private optimizer?"""

from __future__ import annotations

from typing import Any

from ..batches.poisson_loader import PoissonLoader
from ..engine.privacy_engine import PrivacyEngine
from ..errors import ArgumentError, ArgumentTypeError, StateError
from ..optim.base import PrivateOptimizer

Numbers = dict[str, float]


def checked_engine(engine: PrivacyEngine) -> PrivacyEngine:
    """The engine, or an error that says what a callback is given."""
    if not isinstance(engine, PrivacyEngine):
        raise ArgumentTypeError(
            f"PrivacyCallback takes the engine whose make_private was called, got"
            f" {type(engine).__name__}"
        )
    return engine


def numbers(engine: PrivacyEngine, optimizer: Any, delta: float | None) -> Numbers:
    """What is shown beside the training, ε beside any optimizer; all of it is public."""
    epsilon = {"epsilon": engine.get_epsilon(delta)}
    if not isinstance(optimizer, PrivateOptimizer):
        return epsilon
    return epsilon | {
        "clip_norm": optimizer.max_grad_norm,
        "temperature": optimizer.effective_temperature,
        "noise_multiplier": optimizer.effective_noise_multiplier,
    }


def require_private(
    engine: PrivacyEngine,
    framework: str,
    *,
    delta: float | None,
    loader: Any,
    pass_loader: str,
    optimizers: list[Any],
    pass_optimizer: str,
) -> None:
    """Raise unless a framework goes on with what ``make_private`` returned.

    A step on other batches fails by itself; here it is known who exchanged what. A model that is
    trained by an optimizer without noise never reaches a private step.

    Args:
        engine: where the steps are to be charged.
        framework: its name.
        delta: of the ε that is shown; None takes the budget's.
        loader: the one that it takes training batches from.
        pass_loader: what to write for the private loader to be that.
        optimizers: those that it steps with, its own wrappers taken off.
        pass_optimizer: what to write for the private optimizer to be that.

    Raises:
        RuntimeError: which of them was replaced, by what.
        ValueError: there is no δ.
    """
    if delta is None and engine.accountant.delta is None:
        raise ArgumentError(
            "the accountant has no budget to take delta from: write PrivacyCallback(engine,"
            " delta=1e-5)",
            code="budget-delta",
        )
    strangers = [o for o in optimizers if not isinstance(o, PrivateOptimizer)]
    if strangers or not optimizers:
        what = type(strangers[0]).__name__ if strangers else "no optimizer"
        raise StateError(
            f"{framework} trains with {what} in the place of the private optimizer, without noise:"
            f" {pass_optimizer}",
            code="framework-replaced",
        )
    if not isinstance(loader, PoissonLoader):
        raise StateError(
            f"{framework} replaced the private loader by a {type(loader).__name__}, whose batches"
            f" are no Poisson draws: {pass_loader}",
            code="framework-replaced",
        )
    for optimizer in optimizers:
        if optimizer.accountant is not engine.accountant:
            raise StateError(
                f"{framework} steps with an optimizer that charges another accountant than this"
                " callback's engine: pass the engine whose make_private returned the optimizer",
                code="framework-replaced",
            )
        if optimizer.release.draws is not loader.sampler_of_draws:
            raise StateError(
                f"{framework} trains on the loader of another make_private call than its"
                " optimizer's: pass the loader and the optimizer that one call returned",
                code="framework-replaced",
            )
