"""Arguments that several kernels check alike."""

from __future__ import annotations

import math
from typing import Any

from ..accounting.events import gaussian_noise_multiplier
from ..errors import ArgumentError


def can_hide(scale: float) -> bool:
    """False for a clip bound, or a noise standard deviation, where squares and sums over records
    could overflow or be rounded to nothing, and one record would show. All is clipped, summed and
    noised in float64, whatever the model's dtype. ``scale`` is public.
    """
    return 1e-30 < scale < 1e150


def check_noise(name: str, value: float) -> float:
    """``value`` as 0 or a valid noise multiplier."""
    return float(value) if value == 0 else gaussian_noise_multiplier(value, name)


def check_positive(name: str, value: Any, what: str = "") -> float:
    """``value`` as a positive finite float."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        what = what and f", {what}"
        raise ArgumentError(f"{name} must be a positive finite number{what}; got {value!r}.")
    return float(value)


def check_clip_bound(name: str, value: Any, what: str) -> float:
    """``value`` as a clip bound that noise can hide."""
    if not can_hide(bound := check_positive(name, value, what)):
        raise ArgumentError(
            f"{name} = {value!r} is too extreme for sums in 64-bit floats: take a value between"
            " 1e-30 and 1e150, in other units of the parameters or the data if need be."
        )
    return bound
