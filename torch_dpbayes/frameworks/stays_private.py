"""Checks that a framework trains on the private loader, with the private optimizer."""

from __future__ import annotations

from typing import Any

from ..batches.poisson_loader import PoissonLoader
from ..engine.privacy_engine import PrivacyEngine
from ..errors import ArgumentError, ArgumentTypeError, StateError
from ..optim.base import PrivateOptimizer


class StaysPrivate:
    """The part of a callback that is the same for all frameworks: the checks and the logged
    numbers. A subclass states the framework's name, and what a user writes there to pass the
    private loader and optimizer.
    """

    framework: str
    pass_loader: str
    pass_optimizer: str

    def __init__(self, engine: PrivacyEngine, delta: float | None = None) -> None:
        if not isinstance(engine, PrivacyEngine):
            raise ArgumentTypeError(
                f"PrivacyCallback needs the engine whose make_private was called, got"
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
        """Raise unless the framework uses what ``make_private`` returned: ``loader`` gives the
        training batches, and ``optimizers`` have no wrappers of the framework.

        A private step on other batches fails anyway, but here the error says what was replaced. An
        optimizer without noise never makes a private step, so only this check can find it.
        """
        accountant = self._engine.accountant
        if self._delta is None and accountant.delta is None:
            raise ArgumentError(
                "the accountant has no budget with a delta: write PrivacyCallback(engine,"
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
                    "uses a loader and an optimizer of different make_private calls: pass the"
                    " loader and the optimizer that one call returned"
                )

    def _replaced(self, what: str) -> StateError:
        return StateError(f"{self.framework} {what}", code="framework-replaced")
