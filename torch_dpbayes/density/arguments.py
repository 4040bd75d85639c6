"""The arguments of a model taken apart: which of them are data, and their rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..errors import ArgumentTypeError
from .pyro_runs import UnfitModel, made_up

Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments

_VECTOR = 64  # rows: four of float32, of the longest vectors that there are
_STAND_INS = 19  # rows in place of those whose number is private
ROWS_ONLY = (
    "under add-or-remove-one every tensor of the call is data, a record a row along its first"
    " dimension. Bind others with functools.partial."
)


def _aligned(tensor: Tensor) -> Tensor:
    """Where vectors of the processor begin: elsewhere products are rounded otherwise."""
    own = tensor.detach()
    return own if own.layout != torch.strided or own.data_ptr() % 16 == 0 else own.clone()


def full_vectors(count: int) -> int:
    """``count`` rows or more: equally many for each of torch's threads, in full vectors of the
    processor. The rest of a vector is rounded otherwise, and one record more or less would move
    others there: clipped ratios then differ by up to two bounds each.
    """
    each = _VECTOR * torch.get_num_threads()
    return each * max(1, math.ceil(count / each))


def failing_rows(
    run: Callable[[list[Tensor]], Any],
    rows: Sequence[Tensor],
    filling: Sequence[Tensor],
    dims: Sequence[int],
    count: int,
) -> list[int]:
    """Numbers of the first ``count`` rows at which ``run`` fails: each is tried with others of
    ``filling``, at which it does not. ``dims``: of the rows.
    """

    def failing(first: int, last: int) -> list[int]:
        mixed = [more.clone() for more in filling]
        for row, into, dim in zip(rows, mixed, dims, strict=True):
            into.narrow(dim, first, last - first).copy_(row.narrow(dim, first, last - first))
        try:
            run(mixed)
            return []
        except torch.OutOfMemoryError:
            raise
        except Exception:
            if last - first == 1:
                return [first]
            middle = (first + last) // 2
            return failing(first, middle) + failing(middle, last)

    return failing(0, count)


class Arguments:
    """All arguments of a model as one flat list. A tensor with a dimension as long as the data
    plate is data, one row a record along the first such dimension; everything else is public.

    Args:
        args, kwargs: as the model is called, nested in any way.

    Raises:
        TypeError: an argument is an array of another library.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
        leaves, self._nesting = tree_flatten((tuple(args), dict(kwargs or {})))
        for leaf in leaves:
            if type(leaf).__module__.split(".")[0] in ("numpy", "pandas", "polars", "jax"):
                raise ArgumentTypeError(
                    f"an argument of the model is a {type(leaf).__name__}: pass data as torch"
                    " tensors, torch.as_tensor(...)."
                )
        self._leaves = [_aligned(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.count_is_public = True
        self.num_records = 0
        self.row_dims: dict[int, int] = {}  # number of a data argument -> dimension of its records

    @property
    def are_empty(self) -> bool:
        """Whether a tensor has no rows."""
        return any(isinstance(leaf, Tensor) and leaf.shape[:1] == (0,) for leaf in self._leaves)

    def standing_in(self) -> Arguments:
        """Arguments of the same kinds that say nothing about the number of records: every tensor
        but single numbers has as many rows, along its first dimension, as nothing else is long.
        """
        tensors = {
            k: leaf
            for k, leaf in enumerate(self._leaves)
            if isinstance(leaf, Tensor) and leaf.dim()
        }
        lengths = {length for leaf in tensors.values() for length in leaf.shape[1:]}
        count = next(n for n in itertools.count(_STAND_INS) if n not in lengths)
        leaves = list(self._leaves)
        for k, leaf in tensors.items():
            leaves[k] = leaf.new_zeros((count, *leaf.shape[1:]))
        other = copy(self)
        other.__dict__.update(_leaves=leaves, count_is_public=False, num_records=count)
        return other

    def take_data_of(self, other: Arguments) -> None:
        """Take the same tensors as data as in ``other``, which stood in for these."""
        self.row_dims = other.row_dims
        lengths = {self._leaves[k].shape[dim] for k, dim in self.row_dims.items()}
        if len(lengths) > 1:
            raise UnfitModel(f"the model's tensors differ in their number of rows: {ROWS_ONLY}")
        (self.num_records,) = lengths

    def find_data(self, num_records: int) -> None:
        """Take the tensors with a dimension of length ``num_records`` as data."""
        if not self.count_is_public and num_records != self.num_records:
            raise UnfitModel(f"the data plate is not as long as the arguments: {ROWS_ONLY}")
        if num_records > 1 and any(
            leaf.shape.count(num_records) > 1 for leaf in self._leaves if isinstance(leaf, Tensor)
        ):
            raise UnfitModel(
                "an argument has two dimensions as long as the data plate: of pairs, a record is in"
                " every row. Pass features of single records (columns x.unbind(1) if as many); bind"
                " public matrices with functools.partial."
            )
        self.num_records = num_records
        self.row_dims = {
            k: next(d for d, s in enumerate(leaf.shape) if s == num_records)
            for k, leaf in enumerate(self._leaves)
            if isinstance(leaf, Tensor) and num_records in leaf.shape
        }
        if not self.row_dims:
            raise UnfitModel(
                "no argument of the model has a dimension as long as the data plate: pass the data"
                " as arguments, MCMC.run(x, y)."
            )

    # -- rows --------------------------------------------------------------------------------------

    def with_rows(self, rows: Sequence[Tensor]) -> Call:
        """The arguments of a call on other rows than the data's."""
        leaves = list(self._leaves)
        for k, row in zip(self.row_dims, rows, strict=True):
            leaves[k] = row
        args, kwargs = tree_unflatten(leaves, self._nesting)
        return args, kwargs

    def rows(self, start: int, count: int) -> list[Tensor]:
        """``count`` rows of the data, from number ``start`` on. Private data."""
        return [self._leaves[k].narrow(dim, start, count) for k, dim in self.row_dims.items()]

    def of_rows(self, rows: Sequence[Tensor]) -> Arguments:
        """The same with other records in place of the data."""
        leaves = list(self._leaves)
        for k, row in zip(self.row_dims, rows, strict=True):
            leaves[k] = row
        (count,) = {leaves[k].shape[dim] for k, dim in self.row_dims.items()}
        other = copy(self)
        other.__dict__.update(_leaves=leaves, num_records=count)
        return other

    def pick(self, rows: Sequence[Tensor], index: Sequence[int] | Tensor) -> list[Tensor]:
        """Copies of the rows with these numbers."""
        chosen = torch.as_tensor(index, dtype=torch.long)  # of an empty list, too
        return [
            row.index_select(dim, chosen.to(row.device))
            for row, dim in zip(rows, self.row_dims.values(), strict=True)
        ]

    def single_row(self, row: Sequence[Tensor]) -> list[Tensor]:
        """One row that has lost the dimension of the records, with it."""
        return [r.unsqueeze(dim) for r, dim in zip(row, self.row_dims.values(), strict=True)]

    def without_rows(self) -> Arguments:
        """Shapes, types and public arguments alone, for what outlives the data."""
        leaves = list(self._leaves)
        for k in self.row_dims:
            leaves[k] = leaves[k].new_empty(self._shape(k, [0]))
        other = copy(self)
        other.__dict__.update(_leaves=leaves)
        return other

    # -- shapes and made-up values -----------------------------------------------------------------

    def made_up_call(self, flavour: str) -> Call:
        """Made-up values of the shapes of all tensors that are no single numbers."""
        leaves = [
            made_up(leaf.shape, leaf, flavour) if isinstance(leaf, Tensor) and leaf.dim() else leaf
            for leaf in self._leaves
        ]
        args, kwargs = tree_unflatten(leaves, self._nesting)
        return args, kwargs

    def made_up_rows(self, count: int, flavour: str) -> list[Tensor]:
        """Made-up rows of the shapes of the data's."""
        return [
            made_up(torch.Size(self._shape(k, [count])), self._leaves[k], flavour)
            for k in self.row_dims
        ]

    def described(self) -> list[Any]:
        """Of every data argument its number and type, and the dimension of its records and the
        shape of one; no function of the records, nor of their number.
        """
        leaves, dims = self._leaves, self.row_dims.items()
        return [(k, str(leaves[k].dtype), dim, self._shape(k, [])) for k, dim in dims]

    def _shape(self, k: int, of_records: list[int]) -> list[int]:
        shape, dim = list(self._leaves[k].shape), self.row_dims[k]
        return shape[:dim] + of_records + shape[dim + 1 :]
