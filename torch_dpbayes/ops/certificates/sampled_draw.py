"""What certificates of a draw that is close to an exact one share."""

from __future__ import annotations

from typing import Any

from ...accounting.events import ComposedDpEvent, FailureDpEvent, PureDpEvent
from ...errors import ArgumentTypeError
from .certificate import Certificate

SINGLE_GUARANTEE = (
    "if what is assumed holds, one draw is (epsilon, delta) = ({:.5g}, {:g})-differentially private"
)


def event_of_pair(epsilon: float, delta: float) -> ComposedDpEvent:
    """What dominates every (ε, δ)-differentially private release, exactly (Kairouz, Oh,
    Viswanath 2015, Theorem 3.3).
    """
    return ComposedDpEvent([PureDpEvent(epsilon), FailureDpEvent(delta)])


def require_sampler(sampler: Any) -> None:
    """Refuse what is no sampler."""
    if not callable(getattr(sampler, "draw", None)) or isinstance(sampler, type | Certificate):
        raise ArgumentTypeError(
            "sampler must be one of dpb.ops, as Underdamped(steps=1000, step_size=0.1); got"
            f" {sampler!r}."
        )
