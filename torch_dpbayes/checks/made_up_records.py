"""Records that are made up: of the shapes and types of real ones, with none of their values."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..clipping.nested import map_tensors, tensors_in

# "given": those that stand for the model's inputs; "codes": categories and counts
KINDS = ("given", "copies", "codes", "ties", "outliers", "missing", "short", "plain", "holes")
_SIZES = (2, 5, 33)
TARGETS = frozenset({"label", "labels", "target", "targets", "y"})


def made_up_inputs(batch: Any) -> tuple[Any, ...]:
    """Arguments for two made-up records, with the shapes and types of ``batch`` and none of its
    values.

    A tuple or list is taken as the model's inputs followed by the target; anything else as the one
    input.
    """
    inputs = (
        (batch[:-1] if len(batch) > 1 else batch) if isinstance(batch, (tuple, list)) else (batch,)
    )
    generator = torch.Generator().manual_seed(17)
    for _ in range(64):
        made = tuple(
            map_tensors(
                inputs,
                lambda t: _values_like(t, 2, 2, generator) if t.dim() > 0 else torch.ones_like(t),
            )
        )
        if not _are_equal_records(made):
            break
    return made


class Keywords(dict[str, Any]):
    """Arguments that are given by name, after all others."""


def taken_apart(arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by place, and those by name."""
    if arguments and isinstance(arguments[-1], Keywords):
        return arguments[:-1], arguments[-1]
    return arguments, {}


def output_of(module: nn.Module, arguments: tuple[Any, ...]) -> Any:
    """``module`` of ``arguments``, of which the last may be :class:`Keywords`."""
    positional, by_name = taken_apart(arguments)
    return module(*positional, **by_name)


def named_inputs(module: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a mapping whose names ``module`` takes."""
    parameters = inspect.signature(module.forward).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(batch)
    names = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    return {name: value for name, value in batch.items() if name in names}


def ways_to_pass(module: nn.Module, batch: Any) -> list[tuple[Any, ...]]:
    """Arguments for two made-up records, as ``module`` may be meant to take such a batch, the
    likeliest first.

    A tuple or list holds the model's inputs followed by the target. A mapping is passed by name,
    with or without the target; as it is; or without its names, and the target.
    """
    if not isinstance(batch, Mapping):
        return [made_up_inputs(batch)]
    (made,) = made_up_inputs((batch,))
    by_name = {k: v for k, v in made.items() if isinstance(k, str) and [*tensors_in(v)]}
    inputs = {k: v for k, v in by_name.items() if k not in TARGETS}
    if inputs == by_name:
        inputs = dict(list(by_name.items())[:-1])
    ways: list[tuple[Any, ...]] = []
    for given_by_name in (by_name, inputs):
        if taken := named_inputs(module, given_by_name):
            ways.append((Keywords(taken),))
    parameters = inspect.signature(module.forward).parameters.values()
    places = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    by_place = tuple(inputs.values())
    return [*ways, (made,), by_place[:places] or by_place]


def require_different(inputs: tuple[Any, ...]) -> None:
    """Raise if two records are equal."""
    if _are_equal_records(inputs):
        raise ValueError(
            "example_inputs holds two equal records, on which mixing does not show: pass two that"
            " differ, made up and not from the data."
        )


def _are_equal_records(inputs: tuple[Any, ...]) -> bool:
    tensors = [t for t in rows_in(inputs) if len(t) == 2 and t.numel() > 0]
    return len(tensors) > 0 and all(torch.equal(t[0], t[1]) for t in tensors)


def map_rows(function: Callable[[Tensor], Tensor], arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """``function`` of every tensor with a row for each record; one without dimensions is the same
    for all.
    """
    return tuple(map_tensors(arguments, lambda t: function(t) if t.dim() > 0 else t))


def rows_in(value: Any) -> Iterator[Tensor]:
    return (t for t in tensors_in(value) if t.dim() > 0)


def over_rows(mask: Tensor, t: Tensor) -> Tensor:
    """``mask``, over the first dimensions of ``t``, made to broadcast."""
    return mask.to(t.device).reshape(*mask.shape, *(1,) * (t.dim() - mask.dim()))


def given(inputs: tuple[Any, ...], *places: int) -> tuple[Any, ...]:
    """The records at ``places`` of ``inputs``."""
    return map_rows(lambda t: t[torch.tensor(places, device=t.device)], inputs)


def repeated(inputs: tuple[Any, ...], rows: int) -> tuple[Any, ...]:
    """The two records of ``inputs`` in turn."""
    return given(inputs, *(i % 2 for i in range(rows)))


def fitting_rows(inputs: tuple[Any, ...], most: int, numbers: int) -> int:
    """Records in a batch of no more than ``most`` records and about so many ``numbers``."""
    largest = max((t[:1].numel() for t in rows_in(inputs)), default=1)
    return min(most, numbers // max(largest, 1))


def batch_sizes(inputs: tuple[Any, ...]) -> list[int]:
    return sorted({min(n, max(2, fitting_rows(inputs, n, 2**18))) for n in _SIZES})


def exchanged(base: tuple[Any, ...], others: tuple[Any, ...], keep: Tensor) -> tuple[Any, ...]:
    """The records in ``keep`` of ``base``, and all others of ``others``."""
    others_rows = rows_in(others)
    return map_rows(lambda t: torch.where(over_rows(keep, t), t, next(others_rows)), base)


def groups_that_stay(rows: int) -> list[Tensor]:
    """Which records stay while all others change: the first, the last, the middle one, any half."""
    places = torch.arange(rows)
    half = torch.randperm(rows, generator=torch.Generator().manual_seed(rows)) < rows // 2
    return [places == 0, places == rows - 1, *([places == rows // 2, half] if rows > 2 else [])]


def neighbours(
    inputs: tuple[Any, ...], rows: int, kind: str, limits: list[int], seed: int
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Made-up records and others that may take their places.

    Args:
        inputs: two records.
        rows: how many are made.
        kind: one of :data:`KINDS`.
        limits: for each tensor with rows, a number below which the model takes any integer.
        seed: of their values.
    """
    generator = torch.Generator().manual_seed(seed)
    pairs = [
        _neighbours_like(t, rows, kind, limit, generator)
        for t, limit in zip(rows_in(inputs), limits, strict=True)
    ]
    bases, others = iter(pairs), iter(pairs)
    return map_rows(lambda _: next(bases)[0], inputs), map_rows(lambda _: next(others)[1], inputs)


def _neighbours_like(
    t: Tensor, rows: int, kind: str, limit: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    def chance(probability: float) -> Tensor:
        return (torch.rand(made.shape, generator=generator) < probability).to(t.device)

    made, other = _values_like(t, rows, limit, generator), _values_like(t, rows, limit, generator)
    if kind == "given":
        return t[torch.arange(rows, device=t.device) % 2], (
            other * 4 + 3 if t.is_floating_point() else other
        )
    if kind == "copies":
        return t[:1].repeat_interleave(rows, 0), t[1:2].repeat_interleave(rows, 0)
    if kind in ("plain", "holes") and t.is_floating_point():
        made = (
            torch.rand(made.shape, generator=generator).to(t.dtype).to(t.device)
            if kind == "plain"
            else made
        )
        return made, other * 300 if kind == "plain" else other.masked_fill(chance(0.25), math.nan)
    if kind == "ties":
        return _tied(made, 0), _tied(other, 1)
    if kind == "codes":  # categories and counts, whatever their type
        codes = torch.randint(
            3 if t.is_floating_point() else min(limit, 3), (2, *made.shape), generator=generator
        ).to(t)
        return codes[0], codes[1]
    if kind == "outliers":
        if not t.is_floating_point():
            return made, torch.full_like(other, limit - 1)
        made[[0, rows // 2, rows - 1]] *= 20
        return made, other * 300
    if kind == "missing" and t.is_floating_point():
        return made.masked_fill(chance(0.25), math.nan), other.masked_fill(
            chance(0.25), math.nan
        ).masked_fill(chance(0.05), math.inf)
    if kind == "short" and t.dim() > 1:
        made, other = made.masked_fill(made == 0, 1), other.masked_fill(other == 0, 1)
        lengths = torch.randint(1, t.shape[1] // 2 + 2, (rows, 1), generator=generator)
        return made.masked_fill(over_rows(torch.arange(t.shape[1]) >= lengths, t), 0), other
    return made, other


def _tied(made: Tensor, shift: int) -> Tensor:
    """Records that tie in some keys and not in others: of the same entries in another order,
    of opposite signs, with the same first entry.
    """
    for k in range(len(made)):
        which = (k + shift) % 4
        if which == 1:
            made[k] = made[0].flatten().flip(0).reshape(made[0].shape)
        elif which == 2 and k > 0:
            made[k] = -made[0] if made.is_floating_point() else made[0]
        elif k > 0:
            made[k].flatten()[:1] = made[0].flatten()[:1]
    return made


def _values_like(t: Tensor, rows: int, limit: int, generator: torch.Generator) -> Tensor:
    shape = (rows, *t.shape[1:])
    if t.is_floating_point():
        values = torch.randn(shape, generator=generator)
    elif limit > 256:  # of every order of magnitude
        values = (limit ** torch.rand(shape, generator=generator, dtype=torch.float64)).long() - 1
    else:
        values = torch.randint(limit, shape, generator=generator)
    return values.to(t.dtype).to(t.device)
