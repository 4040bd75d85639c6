"""Numbers in a loss that may stand for the number of records."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from torch import Tensor

from .loss_program import SCALING, Op, Outside, flat


@dataclasses.dataclass
class Number:
    place: tuple[int, int]  # operation, and which of its numbers
    value: float
    options: list[str]


def numbers_in(needed: Sequence[Op], n: int) -> list[Number]:
    found = []
    for k, op in enumerate(needed):
        if op.name.strip("_") not in SCALING:
            continue
        numbers = itertools.count()
        for value in flat((op.args, op.kwargs), (Outside, int, float)):
            place = k, next(numbers)
            number: float | None = (
                value if not isinstance(value, Outside) else _uniform(value.tensor)
            )
            options = (
                []
                if number is None
                else _options(number, n, is_python=not isinstance(value, Outside))
            )
            if number is not None and len(options) > 1:
                found.append(Number(place, number, options))
    return found


def _uniform(t: Tensor) -> float | None:
    if t.numel() == 0 or t.is_complex():
        return None
    first = t.flatten()[0]
    return float(first) if t.dim() == 0 or bool((t == first).all()) else None


def _options(value: float, n: int, *, is_python: bool) -> list[str]:
    if not math.isfinite(value) or value == 0:
        return ["constant"]
    if is_whole(value / n):
        # a tensor may be a count of the batch's targets, and a multiple of n by accident
        return ["c n", "constant"] if is_python else ["constant"]
    if is_whole(1 / (value * n)):
        return ["x/n", "constant"]
    if not is_python or is_whole(value) or is_whole(1 / value):
        return ["constant"]
    return ["constant", "maybe x/n"]


def is_whole(value: float) -> bool:
    return abs(value) > 0.5 and math.isclose(value, round(value), rel_tol=1e-6)


def read(value: float, way: str, n: int) -> float:
    if way == "constant":
        return value
    if way != "c n":
        return value * n
    return value // n if isinstance(value, int) else value / n
