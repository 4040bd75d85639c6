"""Does a framework train on the private loader, with the private optimizer?"""

from __future__ import annotations

from typing import Any

from ..batches.poisson_loader import PoissonLoader
from ..engine.privacy_engine import PrivacyEngine
from ..errors import ArgumentError, ArgumentTypeError, StateError
from ..optim.base import PrivateOptimizer


class StaysPrivate:
    """The part of a callback that needs no framework: what it looks at and what it shows. A
    subclass says which framework it is for, and what to write there for the private loader and
    optimizer to be used.
    """

    framework: str
    pass_loader: str
    pass_optimizer: str

    def __init__(self, engine: PrivacyEngine, delta: float | None = None) -> None:
        if not isinstance(engine, PrivacyEngine):
            raise ArgumentTypeError(
                f"PrivacyCallback takes the engine whose make_private was called, got"
                f" {type(engine).__name__}"
            )
        self._engine, self._delta = engine, delta

    def numbers(self, optimizer: Any) -> dict[str, float]:
        """Public numbers to show during training; ε works with any optimizer."""
        epsilon = {"epsilon": self._engine.get_epsilon(self._delta)}
        if not isinstance(optimizer, PrivateOptimizer):
            return epsilon
        return epsilon | {
            "clip_norm": optimizer.max_grad_norm,
            "temperature": optimizer.effective_temperature,
            "noise_multiplier": optimizer.effective_noise_multiplier,
        }

    def require_private(self, loader: Any, optimizers: list[Any]) -> None:
        """Raise unless the framework goes on with what ``make_private`` returned: the loader that
        it takes training batches from, and the optimizers, its own wrappers taken off.

        A step on other batches fails by itself; here it is known who exchanged what. A model that
        is trained by an optimizer without noise never reaches a private step.
        """
        accountant = self._engine.accountant
        if self._delta is None and accountant.delta is None:
            raise ArgumentError(
                "the accountant has no budget to take delta from: write PrivacyCallback(engine,"
                " delta=1e-5)",
                code="budget-delta",
            )
        strangers = [o for o in optimizers if not isinstance(o, PrivateOptimizer)]
        if strangers or not optimizers:
            what = type(strangers[0]).__name__ if strangers else "no optimizer"
            raise self._replaced(
                f"trains with {what} instead of the private optimizer, without noise:"
                f" {self.pass_optimizer}"
            )
        if not isinstance(loader, PoissonLoader):
            raise self._replaced(
                f"replaced the private loader by a {type(loader).__name__}, whose batches are not"
                f" Poisson draws: {self.pass_loader}"
            )
        for optimizer in optimizers:
            if optimizer.accountant is not accountant:
                raise self._replaced(
                    "uses an optimizer that charges another accountant than this callback's"
                    " engine: pass the engine whose make_private returned the optimizer"
                )
            if optimizer.release.draws is not loader.sampler_of_draws:
                raise self._replaced(
                    "uses a loader and an optimizer of different make_private calls: pass those"
                    " that one call returned"
                )

    def _replaced(self, what: str) -> StateError:
        return StateError(f"{self.framework} {what}", code="framework-replaced")
