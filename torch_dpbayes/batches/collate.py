"""A collate function of the user's: it is given each record alone, and refused if that gives
something else than the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, default_collate
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from ..errors import ArgumentError
from ..noise import seeded
from ..per_sample.derived import Derived, as_plain
from ..per_sample.nested import leaves_in, map_tensors, nesting_of, tensors_in
from .datasets import writes_into

_RECORDS = 5  # synthetic ones, which are compared
_TOLERANCE = 1e-4  # of sums in another order
_PLAIN = ("builtins", "collections")  # where containers are defined that mix nothing
_VOUCHED = "collate_fn is given whole batches: you vouch that it keeps records apart, too"
_RANDOM = (
    "collate_fn draws random numbers, and is called for each record alone: what it draws for a"
    " batch, as mixup does, it draws for every record"
)
_FIELDS = "some records have other fields than others: put a number in place of what is missing"
_DIFFERS = (
    "collate_fn is given each record alone, which makes something else of synthetic records than"
    " the batch: use neither the number of records nor the others, as mixup does, or vouch by"
    " assume_independent_records=True"
)


def users_collate(data_loader: DataLoader[Any]) -> Callable[[list[Any]], Any]:
    """The user's collate function, also of a loader that was made private before."""
    collate_fn: Any = data_loader.collate_fn
    while hasattr(collate_fn, "wrapped_collator_fn"):
        collate_fn = collate_fn.wrapped_collator_fn
    return collate_fn


def _is_plain(value: Any) -> bool:
    """Whether ``default_collate`` runs none of the user's code for a value of this type: it builds
    containers of the record's own types, and stacks tensors of theirs.
    """
    kind = type(value)
    if isinstance(value, (Mapping, list, tuple)):
        is_named = kind.__base__ is tuple and hasattr(kind, "_fields")
        parts = value.values() if isinstance(value, Mapping) else value
        return (is_named or kind.__module__ in _PLAIN) and all(map(_is_plain, parts))
    return not isinstance(value, Tensor) or kind is Tensor


def _without_code(t: Tensor) -> Tensor:
    """As a plain tensor, so that no class of the user's sees all records; marks of records stay."""
    return t if isinstance(t, Derived) else as_plain(t)


def _layout(part: Any) -> str:
    leaves = [v.shape if isinstance(v, Tensor) else v for v in leaves_in(part)]
    return repr((nesting_of(part), leaves))


class RecordwiseCollate:
    """Gives a collate function each record alone, so that no batch mixes records. One that keeps
    records apart, as torch's own does and the user vouches of others, is given whole batches.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any]) -> None:
        self.wrapped_collator_fn = collate_fn
        self._is_vouched = False

    @property
    def is_torchs(self) -> bool:
        """Whether the function is torch's own, and calls none that were registered with it."""
        if self.wrapped_collator_fn is not default_collate:
            return False
        for function in default_collate_fn_map.values():
            if getattr(function, "__globals__", None) is not vars(torch_collate):
                return False
        return True

    def __call__(self, records: Any) -> Any:
        batch = self._batch_of(records)
        if any(t.requires_grad for t in tensors_in(batch)):
            raise ArgumentError(
                "the data set or collate_fn makes tensors that require grad, which would be trained"
                " without clipping and noise: leave it to the model, or detach() them",
                code="loader-collate",
            )
        return batch

    def _batch_of(self, records: Any) -> Any:
        is_plain = self.is_torchs and all(map(_is_plain, records))
        nestings = [*map(nesting_of, records)] if is_plain else []
        if any(nesting != nestings[0] for nesting in nestings):  # torch takes the first for all
            raise ArgumentError(_FIELDS, code="loader-collate")
        if self._is_vouched or is_plain:
            return self.wrapped_collator_fn(records)
        if isinstance(records, list):
            parts = [self.wrapped_collator_fn([record]) for record in records]
            # what is no tensor is the same for all records
            is_row = [t.dim() > 0 and len(t) == 1 for t in tensors_in(parts[0])]
            if all(is_row) and len({*map(_layout, parts)}) == 1:
                columns = zip(*map(tensors_in, parts), strict=True)
                whole = [torch.cat([*map(_without_code, column)]) for column in columns]
                rest = iter(whole)
                batch = map_tensors(parts[0], lambda _: next(rest))
                found = [(id(t), writes_into(t)) for t in tensors_in(batch)]
                if found == [(id(t), 0) for t in whole]:  # by code of a container's own
                    return batch
        raise ArgumentError(
            "collate_fn is given each record alone, and has to make tensors with one row of it, of"
            " one shape for all records: pad to a fixed length, or vouch by"
            " assume_independent_records=True",
            code="loader-collate",
        )

    def require_same_alone(self, dataset: Any, *, is_vouched: bool = False) -> str:
        """Raise if synthetic records give something else alone than as a batch, unless the user
        vouches for it. A function that fails on them is not tested; of a random one, only the
        shapes are compared. Returns what the user should know, or an empty text.
        """
        self._is_vouched |= is_vouched
        if len(dataset) == 0 or (self.is_torchs and _is_plain(dataset[0])):
            return ""
        if self._is_vouched:
            return _VOUCHED
        streams = [torch.Generator().manual_seed(k) for k in range(_RECORDS)]
        first = dataset[0]
        records = [pytree.tree_map(partial(_like, generator=s), first) for s in streams]
        together, again = (_tensors(self.wrapped_collator_fn, records, seed) for seed in (0, 1))
        if together is None or again is None:
            return ""
        with seeded(0):
            alone = list(tensors_in(self(records)))
        shapes = [t.shape for t in together]
        is_repeatable = shapes == [t.shape for t in again] and _are_close(together, again, 0.0)
        if shapes != [t.shape for t in alone] or (
            is_repeatable and not _are_close(together, alone, _TOLERANCE)
        ):
            raise ArgumentError(_DIFFERS, code="loader-collate")
        return "" if is_repeatable else _RANDOM


class CollateWithEmpty:
    """Makes a batch without records, too, like that of one record.

    Raises:
        ArgumentError: it cannot be made.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any], record: Any) -> None:
        self.wrapped_collator_fn, batch = collate_fn, collate_fn([record])
        leaves = list(leaves_in(batch))
        for leaf in leaves or [None]:
            if not isinstance(leaf, Tensor) or not leaf.dim():
                raise _no_empty_batch(record, f"there is a value of type {type(leaf).__name__}")
        self._empty = map_tensors(batch, itemgetter(slice(0, 0)))
        self._nesting = nesting_of(batch)

    def __call__(self, records: list[Any]) -> Any:
        if not records:
            return map_tensors(self._empty, torch.clone)
        batch = self.wrapped_collator_fn(records)
        if nesting_of(batch) != self._nesting:
            raise ArgumentError(_FIELDS, code="loader-collate")
        return batch


def require_own_memory(dataset: Any, record: Any, collate_fn: Callable[[list[Any]], Any]) -> None:
    """Raise if a record changes while others are read: a batch would hold its last one often."""
    looks: list[list[Tensor]] = []
    others = {1, len(dataset) // 2, len(dataset) - 1} - {0, len(dataset)}
    for positions in (set[int](), set[int](), others):
        for k in positions:
            dataset[k]
        with seeded(0):
            looks.append([t.clone() for t in tensors_in(collate_fn([record]))])
    first, again, after = looks
    if _are_close(first, again, 0.0) and not _are_close(again, after, 0.0):
        raise ArgumentError(
            "a record changes when another one is read, as in one buffer: hand out buffer.clone()",
            code="loader-collate",
        )


def _no_empty_batch(record: Any, what: str) -> ArgumentError:
    fields = record.items() if isinstance(record, Mapping) else ()
    texts = [repr(name) for name, value in fields if isinstance(value, (str, bytes))]
    what = f"{', '.join(texts)} is text" if texts else what
    return ArgumentError(
        "no empty batch can be made of these records, which Poisson sampling delivers now and then:"
        f" {what}. Records are tensors and numbers, in tuples, lists or dicts; leave names and"
        " paths out.",
        code="loader-collate",
    )


def _tensors(
    collate_fn: Callable[[list[Any]], Any], records: list[Any], seed: int
) -> list[Tensor] | None:
    """The tensors of a batch of synthetic records; None if the function fails on them."""
    with seeded(seed):
        try:
            return list(tensors_in(collate_fn(records)))
        except Exception:
            return None


def _are_close(found: list[Tensor], others: list[Tensor], tolerance: float) -> bool:
    """Whether the numbers of tensors are equal up to the tolerance, NaN to NaN."""
    wide = [t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (*found, *others)]
    pairs = zip(wide[: len(found)], wide[len(found) :], strict=True)
    return all(torch.allclose(a, b, tolerance, tolerance, equal_nan=True) for a, b in pairs)


def _like(value: Any, generator: torch.Generator) -> Any:
    """Numbers of the same shape and type: parts of one, or labels of two classes."""
    if isinstance(value, Tensor):
        uniform = torch.rand(value.shape, generator=generator)
        return (uniform if value.is_floating_point() else uniform < 0.5).to(value.dtype)
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        return _like(torch.from_numpy(np.zeros(value.shape, value.dtype)), generator).numpy()
    if isinstance(value, (bool, int, float, np.number, np.bool_)):
        number = float(torch.rand((), generator=generator))
        as_given: Any = type(value)
        return as_given(number if isinstance(value, (float, np.floating)) else round(number))
    return value
