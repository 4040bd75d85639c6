"""Tensors in nested arguments and results of a model, synthetic records of the same shapes, and
records for which a function fails.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentTypeError, DPBayesError
from .followed import flatten, unflatten

TARGETS = frozenset({"label", "labels", "target", "targets", "y"})
# Types that contain neither tensors nor other values.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, slice, torch.dtype, torch.device)


def _items(value: Any) -> dict[Any, Any] | None:
    """The values in a tuple, list, mapping or dataclass, by index or name; None for other types."""
    if isinstance(value, (tuple, list)):
        return dict(enumerate(value))
    if isinstance(value, _PLAIN):
        return None
    if isinstance(value, Mapping):
        return dict(value)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)} or None


def _holds_items_only(value: Any, items: Mapping[Any, Any]) -> bool:
    """Whether a container has nothing else, such as a cached property made of all records."""
    return getattr(value, "__dict__", {}).keys() <= {
        *items,
        *getattr(value, "__dataclass_fields__", ()),
    }


def _with_items(value: Any, items: Mapping[Any, Any]) -> Any:
    """The same container with other values."""
    kind: Any = type(value)
    try:
        if isinstance(value, (tuple, list)):
            return kind(*items.values()) if hasattr(value, "_fields") else kind(items.values())
        is_mapping = isinstance(value, Mapping)
        if not _holds_items_only(value, items):  # its other attributes may be made of old tensors
            return kind(items) if is_mapping else kind(**items)
        whole: Any = copy.copy(value)
        for key, child in items.items():
            if is_mapping:
                whole[key] = child
            else:
                object.__setattr__(whole, key, child)
    except Exception as error:
        raise ArgumentTypeError(
            f"the tensors in a {kind.__name__} cannot be replaced ({type(error).__name__}):"
            " use tuples, lists, dicts or dataclasses of tensors"
        ) from None
    return whole


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``function`` to every tensor in nested tuples, lists, mappings and dataclasses; these
    keep their types.
    """
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)([map_tensors(v, function) for v in value])
    if (items := _items(value)) is None:
        return value
    return _with_items(value, {key: map_tensors(v, function) for key, v in items.items()})


def nesting_of(value: Any) -> Any:
    """The types and names of the containers, and which of the other values are tensors."""
    items = None if isinstance(value, Tensor) else _items(value)
    if items is None:
        return isinstance(value, Tensor)
    return type(value), [(key, nesting_of(child)) for key, child in items.items()]


def leaves_in(value: Any) -> Iterator[Any]:
    """The tensors that :func:`map_tensors` finds, and all other values except containers."""
    items = None if isinstance(value, Tensor) else _items(value)
    if items is None:
        yield value
    else:
        for child in items.values():
            yield from leaves_in(child)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of :func:`leaves_in`."""
    for leaf in leaves_in(value):
        if isinstance(leaf, Tensor):
            yield leaf


class Nested:
    """A value split into its tensors and the rest, to be rebuilt with other tensors.

    Attributes:
        tensors: the tensors found, in order.
        is_plain: the value is a call's arguments and named arguments, without containers.
        strangers: objects that are neither tensors nor plain values, and may contain tensors.
            ``rebuilt`` puts them back, or None instead.
    """

    def __init__(self, value: Any, *, keeps_strangers: bool = True) -> None:
        self.tensors: list[Tensor] = []
        self.strangers: list[Any] = []
        self._keeps_strangers = keeps_strangers
        self._spec: Any = None  # of a call's arguments without containers
        leaves: list[Any] = []
        if type(value) is tuple and len(value) == 2 and type(value[1]) is dict:
            leaves, spec = flatten(value)
            self._spec = spec if type(spec) is tuple else None
        self.is_plain = self._spec is not None
        for k, leaf in enumerate(leaves if self.is_plain else ()):
            if isinstance(leaf, Tensor):
                self.tensors.append(leaf)
                leaves[k] = _PLACE
        self._shell: Any = leaves if self.is_plain else self._taken(value)

    def _taken(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return _PLACE
        if isinstance(value, _PLAIN):
            return value
        items = _items(value)
        if items is not None and _holds_items_only(value, items):
            return _with_items(value, {key: self._taken(child) for key, child in items.items()})
        self.strangers.append(value)
        return value if self._keeps_strangers else None

    def rebuilt(self, tensors: Sequence[Tensor]) -> Any:
        """The value with ``tensors`` in place of its own."""
        if self._shell is _PLACE:
            return tensors[0]
        remaining = iter(tensors)
        if self.is_plain:
            leaves = [next(remaining) if v is _PLACE else v for v in self._shell]
            return unflatten(leaves, self._spec)
        return map_tensors(self._shell, lambda _: next(remaining))


_PLACE = torch.empty(0)  # marks the place of a tensor


def holds_plain_sequence(value: Any) -> bool:
    """Whether a container has several numbers or texts: most likely one for each record."""
    items = None if isinstance(value, (Tensor, torch.Size)) else _items(value)
    if not items:
        return False
    are_plain = all(
        isinstance(item, (int, float, complex, str, bytes)) and not isinstance(item, bool)
        for item in items.values()
    )
    return (are_plain and len(items) > 1) or any(map(holds_plain_sequence, items.values()))


# -- synthetic records -----------------------------------------------------------------------------


class Keywords(dict[str, Any]):
    """The keyword arguments, after all others."""


def output_of(module: nn.Module, arguments: tuple[Any, ...]) -> Any:
    """Call ``module`` with ``arguments``; the last one may be :class:`Keywords`."""
    if arguments and isinstance(arguments[-1], Keywords):
        return module(*arguments[:-1], **arguments[-1])
    return module(*arguments)


def named_inputs(module: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a mapping whose names ``module`` accepts."""
    parameters = inspect.signature(module.forward).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(batch)
    names = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    return {name: value for name, value in batch.items() if name in names}


def ways_to_pass(
    module: nn.Module, batch: Any, *, is_loss_apart: bool = False
) -> list[tuple[Any, ...]]:
    """The ways in which ``module`` may accept such a batch, the most likely one first.

    A tuple or list contains the model's inputs, then the target. A mapping is passed by name, with
    or without the target, or as one argument. In all other cases the first pass shows the shapes.
    ``is_loss_apart``: the target is given to ``loss=``.
    """
    if not isinstance(batch, Mapping):
        if not isinstance(batch, (tuple, list)):
            return [(batch,)]
        return [tuple(batch[:k]) for k in range(max(1, len(batch) - 1), 0, -1)]
    by_name = {k: v for k, v in batch.items() if isinstance(k, str) and [*tensors_in(v)]}
    inputs = {k: v for k, v in by_name.items() if k not in TARGETS}
    named = (inputs,) if is_loss_apart else (by_name, inputs)
    taken = (named_inputs(module, given) for given in named)
    return [*((Keywords(given),) for given in taken if given), (batch,)]


def synthetic(arguments: tuple[Any, ...], rows: int, generator: torch.Generator) -> tuple[Any, ...]:
    """Arguments of the same shapes for ``rows`` records, with none of their values."""

    def like(t: Tensor) -> Tensor:
        if t.dim() == 0:
            return torch.ones_like(t)
        shape = (rows, *t.shape[1:])
        if t.is_floating_point():
            made = torch.randn(shape, generator=generator)
        else:  # classes and tokens of the smallest possible vocabulary
            made = torch.randint(2, shape, generator=generator)
        return made.to(t.dtype).to(t.device)

    return tuple(map_tensors(arguments, like))


def rows_of(arguments: tuple[Any, ...], row: int) -> tuple[Any, ...]:
    """The arguments of one record, as a batch of one."""
    return tuple(map_tensors(arguments, lambda t: t[row : row + 1] if t.dim() > 0 else t))


def two_rows(t: Tensor) -> Tensor:
    """The rows, with spare ones behind them if there are less than two: torch computes a batch of
    one in other ways, for example gradients of ``instance_norm``, so one record would show in
    what the other contributes.
    """
    rows = t if len(t) else synthetic_row(t)
    return rows if len(rows) > 1 else torch.cat([rows, rows])


def synthetic_row(t: Tensor) -> Tensor:
    """A record with the shape of these rows. Integers are zero. Others are in (0, 1), so they are
    valid probabilities; square matrices are invertible and have a Cholesky factor.
    """
    made = t.new_zeros(1, *t.shape[1:])
    if t.is_floating_point() or t.is_complex():
        stream = torch.Generator("cpu").manual_seed(0)
        made += torch.rand(made.shape, generator=stream, device="cpu").to(made)
        if t.dim() > 2 and t.shape[-1] == t.shape[-2]:
            made = made / (2 * t.shape[-1]) + torch.eye(t.shape[-1]).to(made) / 2
    return made


def of_those_that_run(run: Callable[..., Any], rows: Sequence[Tensor]) -> Any:
    """Call ``run``, a function of torch, for all records. A record for which it fails gets NaN in
    each result, which counts as zero: no record stops a step.

    Raises:
        Exception: the error of ``run``, if it fails for a synthetic record, too.
    """
    try:
        return run(*rows)
    except DPBayesError:
        raise
    except Exception:
        pass  # its text may hold values of a record
    spare = [synthetic_row(t) for t in rows]
    run(*spare)
    fails = torch.tensor(which_fail(run, rows))

    def put(value: Tensor | float, t: Tensor) -> Tensor:
        where = fails.to(t.device).view(-1, *[1] * (t.dim() - 1))
        return torch.where(where, value, t)

    found = run(*(put(s, t) for s, t in zip(spare, rows, strict=True)))

    def without_failed(t: Tensor) -> Tensor:
        return put(math.nan, t) if t.is_floating_point() or t.is_complex() else t

    return map_tensors(found, without_failed)


def which_fail(run: Callable[..., Any], rows: Sequence[Tensor]) -> list[bool]:
    """Which records fail; found by bisection of the batch."""
    count = len(rows[0])
    try:
        run(*rows)
    except torch.OutOfMemoryError:  # no record causes it
        raise
    except Exception:
        if count == 1:
            return [True]
        half = count // 2
        return which_fail(run, [t[:half] for t in rows]) + which_fail(run, [t[half:] for t in rows])
    return [False] * count
