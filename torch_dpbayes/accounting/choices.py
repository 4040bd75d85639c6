"""The accountant's settings: read here and nowhere else.

Whatever takes a setting that is one of a few words passes it through :func:`neighboring_relation`,
:func:`accounting_method` or :func:`privacy_unit` before it is compared, so that a misspelt one is
an error and never falls to the other branch.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from dp_accounting import NeighboringRelation

__all__ = [
    "SMALLEST_DELTA",
    "Method",
    "Neighboring",
    "NeighboringRelation",
    "Unit",
    "accounting_method",
    "check_delta",
    "check_epsilon",
    "check_probability",
    "neighboring_relation",
    "privacy_unit",
]

SMALLEST_DELTA = 1e-30  # down to which bounds were compared with the truth

Neighboring = Literal["add_or_remove_one", "replace_one"]
Method = Literal["pld", "rdp"]
Unit = Literal["record", "person"]

_OF_DP_ACCOUNTING: dict[NeighboringRelation, Neighboring] = {
    NeighboringRelation.ADD_OR_REMOVE_ONE: "add_or_remove_one",
    NeighboringRelation.REPLACE_ONE: "replace_one",
}


def neighboring_relation(value: Any) -> Neighboring:
    """The neighbouring relation as its documented string.

    Args:
        value: that string, or the member of ``dp_accounting.NeighboringRelation``.

    Raises:
        ValueError: it is neither; ``REPLACE_SPECIAL`` is not accounted for.
    """
    if isinstance(value, NeighboringRelation):
        value = _OF_DP_ACCOUNTING.get(value, value)
    if isinstance(value, str):
        if value == "add_or_remove_one":
            return "add_or_remove_one"
        if value == "replace_one":
            return "replace_one"
    raise ValueError(
        "neighboring must be 'add_or_remove_one' or 'replace_one' (or dp_accounting's "
        f"NeighboringRelation.ADD_OR_REMOVE_ONE or REPLACE_ONE), got {value!r}."
    )


def accounting_method(value: Any) -> Method:
    """The accountant's method.

    Raises:
        ValueError: it is neither ``"pld"`` nor ``"rdp"``.
    """
    if isinstance(value, str):
        if value == "pld":
            return "pld"
        if value == "rdp":
            return "rdp"
    raise ValueError(f"method must be 'pld' or 'rdp', got {value!r}.")


def privacy_unit(value: Any) -> Unit:
    """What neighbouring data sets differ by.

    Raises:
        ValueError: it is neither ``"record"`` nor ``"person"``.
    """
    if isinstance(value, str):
        if value == "record":
            return "record"
        if value == "person":
            return "person"
    raise ValueError(f"unit must be 'record' or 'person', got {value!r}.")


def check_epsilon(epsilon: Any) -> float:
    """``epsilon`` as a positive finite ``float``."""
    value = float(epsilon)
    if not 0 < value < math.inf:
        raise ValueError(
            f"epsilon must be positive and finite, got {epsilon!r}. No limit is epsilon=None."
        )
    return value


def check_delta(delta: Any) -> float:
    """``delta`` as a ``float`` in [1e-30, 1)."""
    value = float(delta)
    if not 0 < value < 1:
        raise ValueError(
            f"delta must lie in (0, 1), got {delta!r}. A common choice is below 1 / number of"
            " records."
        )
    if value < SMALLEST_DELTA:
        raise ValueError(
            f"delta = {value:g} is below {SMALLEST_DELTA:g}, down to which bounds were compared"
            " with the truth. Use delta >= 1e-30."
        )
    return value


def check_probability(value: Any, what: str) -> float:
    """``value`` as a ``float`` in (0, 1)."""
    number = float(value)
    if not 0 < number < 1:
        raise ValueError(f"{what} must lie between 0 and 1, both excluded, got {value!r}.")
    return number
