"""Where the numbers of records lie in memory.

vmap puts a new tensor's numbers where its kernels find them, which may depend on how many records
there are. A model could read this from strides, or from whether ``reshape`` copies: it writes into
the result, and looks at the original. Therefore each record of a new tensor gets memory of its own,
with its numbers in order. All further tensors are views of such, or copies of a parameter, which
share one memory.
"""

from __future__ import annotations

import gc
import operator
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch._C._functorch import (
    get_unwrapped,
    is_batchedtensor,
    is_gradtrackingtensor,
    maybe_get_bdim,
    maybe_get_level,
)

from ..errors import ModelError
from .derived import storage_of

_SHARED, _MAP = "_dpbayes_shared", "_dpbayes_map"  # attributes of a storage


class OfOneMap:
    """Knows the tensors of a map. None may outlive it: in the next map, each record could read the
    values of others in it. So each argument must be such a tensor, or have memory that one of the
    model's own transforms made in this map, whose results no function returns.
    """

    _known: dict[int, weakref.ref[Tensor]]
    _level: int | None = None  # of a running map

    def known(self, found: Any, given: Iterable[Any], *, is_inner: bool = False) -> Any:
        """What a function made of ``given``, in a transform of the model's own or not, with new
        tensors in order; views stay views. It may be used in this map.
        """
        if isinstance(found, (tuple, list)):
            parts = [self.known(part, given, is_inner=is_inner) for part in found]
            is_same = all(map(operator.is_, parts, found))
            return found if is_same else type(found)(parts)
        if not isinstance(found, Tensor):
            return found
        memory, is_first = found, True  # whether dimension 0 of the memory is that of the records
        while is_batchedtensor(memory) or is_gradtrackingtensor(memory):
            is_first &= maybe_get_bdim(memory) <= 0
            memory = get_unwrapped(memory)
        if memory is found:
            return found
        if not (is_first and memory.is_contiguous()) and not _is_among(storage_of(memory), given):
            found = found.clone(memory_format=torch.contiguous_format)
        self._known[id(found)] = weakref.ref(found)
        if is_inner:
            setattr(storage_of(unwrapped(found)), _MAP, self)
        return found

    def require(self, t: Tensor) -> None:
        """Refuse a tensor that an earlier map left."""
        is_of_records = False
        while is_batchedtensor(t) or is_gradtrackingtensor(t):
            if (known := self._known.get(id(t))) is not None and known() is t:
                return
            is_of_records |= is_batchedtensor(t) and maybe_get_level(t) == self._level
            t = get_unwrapped(t)
        if is_of_records and getattr(storage_of(t), _MAP, None) is not self:
            raise ModelError(
                "the forward pass uses a tensor made by TorchScript (torch.jit), one that an"
                " earlier pass stored, or a parameter made of records: leave these out, and return"
                " such a tensor instead",
                code="model-kept",
            )

    def kept(self) -> list[Tensor]:
        """Tensors of the finished map that are still alive."""
        for generation in (0, 2):  # most reference cycles are young
            if not [True for reference in self._known.values() if reference() is not None]:
                return []
            torch.clear_autocast_cache()  # it may hold casts of tensors of the map
            gc.collect(generation)
        return [t for reference in self._known.values() if (t := reference()) is not None]


def unwrapped(t: Tensor) -> Tensor:
    """The tensor of all records, below all transforms."""
    while is_batchedtensor(t) or is_gradtrackingtensor(t):
        t = get_unwrapped(t)
    return t


def _is_among(storage: Any, values: Iterable[Any]) -> bool:
    """Whether a tensor among these values, also in tuples and lists, has this memory."""
    for value in values:
        if isinstance(value, (tuple, list)):
            if _is_among(storage, value):
                return True
        elif isinstance(value, Tensor) and storage_of(unwrapped(value)) is storage:
            return True
    return False


def shared(copies: Tensor) -> Tensor:
    """Note that copies of a parameter, one for each record, share one memory."""
    setattr(storage_of(copies), _SHARED, True)
    return copies


def _is_shared(t: Tensor) -> bool:
    return hasattr(storage_of(unwrapped(t)), _SHARED)


def require_seen() -> None:
    """Refuse ``torch.func.functionalize``: its tensors do not show that they are of records."""
    running: Any = functorch.get_interpreter_stack() or ()
    if any(transform.key() == functorch.TransformType.Functionalize for transform in running):
        raise ModelError(
            "torch.func.functionalize hides which tensors are of records: leave it out",
            code="model-map",
        )


def strided(t: Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> None:
    """Refuse a view that vmap would lay over other records, or whose gradient it would mix."""
    if storage_offset is not None or _is_shared(t):
        raise ModelError(
            "as_strided would read the memory of other records: write view, unfold or an index",
            code="model-map",
        )


def statistics(place: int) -> Callable[..., None]:
    """Refuse a parameter as a running mean or variance: torch writes into it unseen."""

    def run(*given: Any, running_mean: Any = None, running_var: Any = None, **_: Any) -> None:
        written = *given[place : place + 2], running_mean, running_var
        if any(isinstance(t, Tensor) and _is_shared(t) for t in written):
            raise ModelError(
                "batch_norm writes running statistics into a parameter: leave them out",
                code="model-map",
            )

    return run


def layout(function: Callable[..., Any]) -> Callable[..., Any]:
    """Strides of dimensions of size 1 have no meaning; they follow from the others."""

    def run(t: Tensor, *args: Any, **options: Any) -> Any:
        strides, place = list(t.stride()), 1
        for dim in reversed(range(t.dim())):
            strides[dim] = strides[dim] if t.shape[dim] > 1 else place
            place = strides[dim] * t.shape[dim]
        like = torch.empty_strided(t.shape, strides, device="meta")
        return function(like, *args, **options)

    return run


def offset(t: Tensor) -> int | None:
    """0: the numbers before a slice may be those of all records."""
    return 0 if is_batchedtensor(t) or is_gradtrackingtensor(t) else None
