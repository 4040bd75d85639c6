"""The accountant's settings that are one of a few words: read here and nowhere else.

Whatever takes such a setting passes it through :func:`neighboring_relation` or
:func:`accounting_method` before it is compared, so that a misspelt one is an error and never falls
to the other branch.
"""

from __future__ import annotations

from typing import Any, Literal

from dp_accounting import NeighboringRelation

__all__ = [
    "Method",
    "Neighboring",
    "NeighboringRelation",
    "accounting_method",
    "neighboring_relation",
]

Neighboring = Literal["add_or_remove_one", "replace_one"]
Method = Literal["pld", "rdp"]

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
