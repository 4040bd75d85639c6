"""Synthetic records: of the shapes and types of real ones, with none of their values."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .nested import map_tensors, tensors_in

TARGETS = frozenset({"label", "labels", "target", "targets", "y"})


class Keywords(dict[str, Any]):
    """Arguments that are given by name, after all others."""


def output_of(module: nn.Module, arguments: tuple[Any, ...]) -> Any:
    """``module`` of ``arguments``, of which the last may be :class:`Keywords`."""
    if arguments and isinstance(arguments[-1], Keywords):
        return module(*arguments[:-1], **arguments[-1])
    return module(*arguments)


def named_inputs(module: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a mapping whose names ``module`` takes."""
    parameters = inspect.signature(module.forward).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(batch)
    names = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    return {name: value for name, value in batch.items() if name in names}


def ways_to_pass(module: nn.Module, batch: Any) -> list[tuple[Any, ...]]:
    """Arguments as ``module`` may be meant to take such a batch, the likeliest first.

    A tuple or list holds the model's inputs followed by the target. A mapping is passed by name,
    with or without the target; as it is; or without its names, and the target.
    """
    if not isinstance(batch, Mapping):
        if not isinstance(batch, (tuple, list)):
            return [(batch,)]
        return [tuple(batch[:k]) for k in range(max(1, len(batch) - 1), 0, -1)]
    by_name = {k: v for k, v in batch.items() if isinstance(k, str) and [*tensors_in(v)]}
    inputs = {k: v for k, v in by_name.items() if k not in TARGETS}
    if inputs == by_name:
        inputs = dict(list(by_name.items())[:-1])
    ways: list[tuple[Any, ...]] = [
        (Keywords(taken),) for given in (by_name, inputs) if (taken := named_inputs(module, given))
    ]
    parameters = inspect.signature(module.forward).parameters.values()
    places = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    by_place = tuple(inputs.values())
    return [*ways, (batch,), by_place[:places] or by_place]


def synthetic(arguments: tuple[Any, ...], rows: int, generator: torch.Generator) -> tuple[Any, ...]:
    """Arguments of the same shapes for ``rows`` records."""

    def like(t: Tensor) -> Tensor:
        if t.dim() == 0:
            return torch.ones_like(t)
        shape = (rows, *t.shape[1:])
        if t.is_floating_point():
            made = torch.randn(shape, generator=generator)
        else:  # classes and tokens of the smallest vocabulary there is
            made = torch.randint(2, shape, generator=generator)
        return made.to(t.dtype).to(t.device)

    return tuple(map_tensors(arguments, like))


def rows_of(arguments: tuple[Any, ...], row: int) -> tuple[Any, ...]:
    """The arguments of one record, as a batch of one."""
    return tuple(map_tensors(arguments, lambda t: t[row : row + 1] if t.dim() > 0 else t))


def rows_in(value: Any) -> Iterator[Tensor]:
    """The tensors that have dimensions."""
    return (t for t in tensors_in(value) if t.dim() > 0)
