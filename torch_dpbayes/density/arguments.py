"""The arguments of a model: which of them are data, and calls with other rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..errors import ArgumentTypeError
from ..per_sample.nested import which_fail
from .pyro_runs import UnfitModel, made_up

Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments

# other objects may have records, which would count as public
_PLAIN = (Tensor, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_VECTOR = 64  # rows: four of the longest SIMD vectors that exist, of float32
_STAND_INS = 19  # least number of synthetic rows if the number of records is private
ROWS_ONLY = (
    "under add-or-remove-one every tensor of the call is data, with one row per record. Bind"
    " others with functools.partial."
)


def aligned(tensor: Tensor) -> Tensor:
    """``tensor`` at an aligned address: at others, products may be rounded differently."""
    own = tensor.detach()
    if own.layout != torch.strided:
        raise UnfitModel("an argument is a sparse or nested tensor: pass x.to_dense().")
    return own if own.data_ptr() % 16 == 0 else own.clone()


def full_vectors(count: int) -> int:
    """``count`` rows or more, in full SIMD vectors. Rows in an incomplete vector are rounded
    differently, and one record more or less would move other rows there: their clipped ratios could
    then differ by up to two bounds each.
    """
    return _VECTOR * max(1, math.ceil(count / _VECTOR))


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch divides an operation among as many threads as its size needs, and where a thread's part
    ends is an incomplete vector, too.
    """
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


class Arguments:
    """All arguments of a model as one flat list. A tensor with a dimension as long as the data
    plate is data, with records along the first such dimension; everything else is public.

    Outside the model, records are along the first dimension of the rows. This object has the data
    until :meth:`take_rows`.

    Args:
        args, kwargs: the arguments of the model's call, nested in any way.
        count_is_public: whether synthetic tensors may be as long as the data. False: every tensor
            is data, and the number of synthetic rows is the length of no other dimension.

    Attributes:
        size: of the data plate in the model's run; not the data's if their number is private.
        shapes: for each argument that is a tensor with a dimension, the shape of its synthetic
            replacement.
        row_dims: for each data argument, the dimension of its records in the model.

    Raises:
        TypeError: an argument is no tensor, number or text.
    """

    def __init__(
        self, args: Sequence[Any], kwargs: Mapping[str, Any] | None, count_is_public: bool = True
    ) -> None:
        leaves, self._nesting = tree_flatten((tuple(args), dict(kwargs or {})))
        for leaf in leaves:
            if not isinstance(leaf, _PLAIN):
                raise ArgumentTypeError(
                    f"an argument of the model is a {type(leaf).__name__}: pass data as torch"
                    " tensors, torch.as_tensor(...); bind public objects with functools.partial."
                )
        self._leaves = [aligned(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.count_is_public, self.size = count_is_public, 0
        self.row_dims: dict[int, int] = {}
        self.shapes = {
            k: leaf.shape
            for k, leaf in enumerate(self._leaves)
            if isinstance(leaf, Tensor) and leaf.dim()
        }
        if not count_is_public:
            if any(isinstance(leaf, Tensor) and not leaf.dim() for leaf in self._leaves):
                raise UnfitModel(f"an argument is a tensor of one number: {ROWS_ONLY}")
            lengths = {length for shape in self.shapes.values() for length in shape[1:]}
            self.size = next(n for n in itertools.count(_STAND_INS) if n not in lengths)
            self.shapes = {k: torch.Size([self.size, *s[1:]]) for k, s in self.shapes.items()}

    def take_rows(self, size: int) -> list[Tensor]:
        """Remove and return the data: ``size`` is that of the data plate in synthetic calls.
        Shapes, types and public arguments remain. Private data.
        """
        if not self.count_is_public and size != self.size:
            raise UnfitModel(f"the data plate is not as long as the arguments: {ROWS_ONLY}")
        if size > 1 and any(shape.count(size) > 1 for shape in self.shapes.values()):
            raise UnfitModel(
                "an argument has two dimensions as long as the data plate: for pairs, every row"
                " contains each record. Pass features of single records (columns x.unbind(1) if"
                " as many); bind public matrices with functools.partial."
            )
        self.size = size
        self.row_dims = {k: s.index(size) for k, s in self.shapes.items() if size in s}
        if not self.row_dims:
            raise UnfitModel(
                "no argument of the model has a dimension as long as the data plate: pass the data"
                " as arguments, MCMC.run(x, y)."
            )
        rows = []
        for k, dim in self.row_dims.items():
            leaf = self._leaves[k]
            rows.append(leaf.movedim(dim, 0).contiguous() if dim else leaf)
            self._leaves[k] = leaf.new_empty([0, *rows[-1].shape[1:]])
        if len({len(row) for row in rows}) > 1:
            raise UnfitModel(f"the model's tensors differ in their number of rows: {ROWS_ONLY}")
        return rows

    def with_rows(self, rows: Sequence[Tensor]) -> Call:
        """The arguments of a call on these rows."""
        return self._call(zip(self.row_dims, self.in_model(rows), strict=True))

    def in_model(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """The rows, with the records along the dimension that they have in the model."""
        dims = self.row_dims.values()
        return [row.movedim(0, d) if d else row for row, d in zip(rows, dims, strict=True)]

    def rows_first(self, number: int, tensor: Tensor) -> Tensor:
        """``tensor``, which is the data argument with this number in the model, with the records
        moved to dimension 0.
        """
        return tensor.movedim([*self.row_dims.values()][number], 0)

    def made_up_call(self, flavour: str) -> Call:
        """Call arguments with synthetic values in place of all tensors that have a dimension."""
        made = [made_up(shape, self._leaves[k], flavour) for k, shape in self.shapes.items()]
        return self._call(zip(self.shapes, made, strict=True))

    def _call(self, others: Iterable[tuple[int, Tensor]]) -> Call:
        leaves = list(self._leaves)
        for k, other in others:
            leaves[k] = other
        args, kwargs = tree_unflatten(leaves, self._nesting)
        return args, kwargs

    def made_up_rows(self, count: int, flavour: str) -> list[Tensor]:
        like = [self._leaves[k] for k in self.row_dims]
        return [made_up(torch.Size([count, *row.shape[1:]]), row, flavour) for row in like]

    def described(self) -> list[Any]:
        """For every data argument its number and type, the dimension of its records, and the shape
        of one record. Neither the records nor their number change this.
        """
        like = [(k, dim, self._leaves[k]) for k, dim in self.row_dims.items()]
        return [(k, str(row.dtype), dim, list(row.shape[1:])) for k, dim, row in like]


def pick(rows: Sequence[Tensor], index: Sequence[int] | Tensor) -> list[Tensor]:
    """Copies of the rows with these indices."""
    chosen = torch.as_tensor(index, dtype=torch.long)  # an empty list, too, gets this dtype
    return [row.index_select(0, chosen.to(row.device)) for row in rows]


def replaced(rows: Sequence[Tensor], stand_ins: Sequence[Tensor], gone: Tensor) -> list[Tensor]:
    """The rows, where those in the mask ``gone`` are replaced by stand-ins."""
    if not gone.any():
        return list(rows)
    (where,) = gone.nonzero(as_tuple=True)
    return [
        row.index_copy(0, where.to(row.device), other[: len(where)].to(row.dtype))
        for row, other in zip(rows, stand_ins, strict=True)
    ]


def of_full_vectors(
    function: Callable[[list[Tensor], int], Any], rows: list[Tensor], stand_ins: Sequence[Tensor]
) -> tuple[Any, Tensor]:
    """The result of ``function`` for the rows, filled up with stand-ins to their number, and a mask
    of the rows at which it fails. These are replaced; neither the values nor the rounding of other
    rows change. ``function`` gets the rows, and how many of them are real.
    """

    def run(*own: Tensor) -> Any:
        filled, count = list(own), len(own[0])
        if count < len(stand_ins[0]):
            pairs = zip(own, stand_ins, strict=True)
            filled = [torch.cat([row, more[count:].to(row.dtype)]) for row, more in pairs]
        return function(filled, count)

    fails = torch.zeros(len(rows[0]), dtype=torch.bool, device=rows[0].device)
    try:
        return run(*rows), fails
    except Exception:  # only some rows fail: the function runs on synthetic ones
        fails |= torch.tensor(which_fail(run, rows), device=fails.device)
        return run(*replaced(rows, stand_ins, fails)), fails
