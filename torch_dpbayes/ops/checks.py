"""Arguments that several files of this room check alike."""

from __future__ import annotations

import math
from typing import Any


def require_positive(name: str, value: Any) -> None:
    """Refuse what is no positive finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value!r}.")
