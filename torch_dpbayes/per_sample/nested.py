"""Tensors in nested arguments and results of a model, and synthetic records of the same shapes."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

TARGETS = frozenset({"label", "labels", "target", "targets", "y"})
_PLAIN = (type(None), bool, int, float, complex, str, bytes, slice)
_TORCHS = (torch.dtype, torch.device, torch.Size)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """``function`` of every tensor in nested tuples, lists, mappings and dataclasses, which keep
    their types.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        mapped: Any = copy.copy(value)  # of which more than its items may count
        for k, v in value.items():
            mapped[k] = map_tensors(v, function)
        return mapped
    if isinstance(value, (tuple, list)):
        items = [map_tensors(v, function) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if _is_dataclass(value):
        whole = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(whole, field.name, map_tensors(getattr(value, field.name), function))
        return whole
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors that :func:`map_tensors` finds."""
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, Mapping):
        value = value.values()
    elif _is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif not isinstance(value, (tuple, list)):
        return
    for v in value:
        yield from tensors_in(v)


class Nested:
    """A value taken apart into its tensors and the rest, to be put together again with other
    tensors.

    Tuples, lists, dicts, dataclasses and what is registered with torch's pytree are looked into.

    Args:
        value: the arguments or the result of a model.
        stands_in: what is put back in a stranger's place, given the name of its type; None:
            itself.

    Attributes:
        tensors: those found, in order.
        strangers: what is neither a tensor nor a plain value, and may hold tensors unseen.
    """

    def __init__(self, value: Any, *, stands_in: Callable[[str], Any] | None = None) -> None:
        self._stands_in = stands_in
        self.tensors: list[Tensor] = []
        self.strangers: list[Any] = []
        self._is_tensor = isinstance(value, Tensor)
        if self._is_tensor:  # most often; the rest of this takes 20 microseconds
            self.tensors.append(value)
            return
        leaves, self._shape = pytree.tree_flatten(value)
        self._leaves = [self._taken(leaf) for leaf in leaves]

    def _taken(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            self.tensors.append(leaf)
            return _PLACE
        if _is_dataclass(leaf) and _has_fields_only(leaf):
            inner = {
                f.name: Nested(getattr(leaf, f.name), stands_in=self._stands_in)
                for f in dataclasses.fields(leaf)
            }
            shell = copy.copy(leaf)
            for name, part in inner.items():
                self.tensors += part.tensors
                self.strangers += part.strangers
                part.tensors, part.strangers = [], []
                object.__setattr__(shell, name, None)
            return _Dataclass(shell, inner)
        if not isinstance(leaf, (*_PLAIN, *_TORCHS)):
            self.strangers.append(leaf)
            return leaf if self._stands_in is None else self._stands_in(type(leaf).__name__)
        return leaf

    def rebuilt(self, tensors: Sequence[Tensor]) -> Any:
        """The value with ``tensors`` in place of its own."""
        return tensors[0] if self._is_tensor else self.rebuilt_from(iter(tensors))

    def rebuilt_from(self, remaining: Iterator[Tensor]) -> Any:
        if self._is_tensor:
            return next(remaining)

        def put(leaf: Any) -> Any:
            if leaf is _PLACE:
                return next(remaining)
            if isinstance(leaf, _Dataclass):
                whole = copy.copy(leaf.shell)
                for name, part in leaf.parts.items():
                    object.__setattr__(whole, name, part.rebuilt_from(remaining))
                return whole
            return leaf

        return pytree.tree_unflatten([put(leaf) for leaf in self._leaves], self._shape)


def _has_fields_only(value: Any) -> bool:
    """Whether nothing else is kept on a dataclass instance, such as a cached property made of
    all records.
    """
    return getattr(value, "__dict__", {}).keys() <= {f.name for f in dataclasses.fields(value)}


@dataclasses.dataclass(frozen=True)
class _Dataclass:
    shell: Any  # with nothing in its fields
    parts: dict[str, Nested]


_PLACE = object()


def holds_plain_sequence(value: Any) -> bool:
    """Whether several numbers or texts stand in a list, tuple or dict: one for each record,
    most likely.
    """
    if not isinstance(value, (list, tuple, dict)):
        return False
    items = list(value.values()) if isinstance(value, dict) else list(value)
    are_plain = all(
        isinstance(item, (int, float, complex, str, bytes)) and not isinstance(item, bool)
        for item in items
    )
    return (are_plain and len(items) > 1) or any(map(holds_plain_sequence, items))


# -- synthetic records -----------------------------------------------------------------------------


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
    """Arguments of the same shapes for ``rows`` records, with none of their values."""

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
