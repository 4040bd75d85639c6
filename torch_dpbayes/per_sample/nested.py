"""Tensors in nested arguments and results of a model."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


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
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        whole = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(whole, field.name, map_tensors(getattr(value, field.name), function))
        return whole
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for v in value:
            yield from tensors_in(v)
    elif isinstance(value, Mapping):
        for v in value.values():
            yield from tensors_in(v)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.Size,
    slice,
)


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
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type) and _has_fields_only(leaf):
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
        if not isinstance(leaf, _PLAIN):
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
    return (
        vars(value).keys() <= {f.name for f in dataclasses.fields(value)}
        if hasattr(value, "__dict__")
        else True
    )


def holds_plain_sequence(value: Any) -> bool:
    """Whether several numbers or texts stand in a list, tuple or dict: one for each record,
    most likely.
    """
    if not isinstance(value, (list, tuple, dict)):
        return False
    items = list(value.values()) if isinstance(value, dict) else list(value)
    plain = [
        item
        for item in items
        if isinstance(item, (int, float, complex, str, bytes)) and not isinstance(item, bool)
    ]
    return (len(plain) > 1 and len(plain) == len(items)) or any(map(holds_plain_sequence, items))


@dataclasses.dataclass(frozen=True)
class _Dataclass:
    shell: Any  # with nothing in its fields
    parts: dict[str, Nested]


_PLACE = object()
