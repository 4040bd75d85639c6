"""Sparse gradients: vectors of records that are zero in all but a few columns.

If a record selects its entry of a latent, ``effect[group]``, the recorded gradient writes one
number into a row of zeros, which is as long as the number of groups. This file rewrites such a
graph to return the number and its column; other operations stay unchanged. Norms and sums are the
same, because every column of a record has at most one number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ..per_sample.arithmetic import row_norms

_aten = torch.ops.aten
_SAME = {
    _aten.view.default,
    _aten.reshape.default,
    _aten.expand.default,
    _aten.alias.default,
    _aten.clone.default,
}
_ZEROS = {_aten.zeros.default, _aten.new_zeros.default, _aten.zeros_like.default}
_WHOLE_NUMBERS = {torch.int64, torch.int32}
Layout = list[tuple[int, int, bool]]  # start and width of each piece, and whether it has a column


class Piece(NamedTuple):
    """Some columns of the records' vectors. Columns that are in no piece are 0."""

    start: int
    width: int
    values: Tensor  # (records, width); with a column (records,)
    column: Tensor | None  # (records,): the only column that is not 0. None: values has all columns

    @property
    def columns(self) -> slice:
        return slice(self.start, self.start + self.width)

    def dense(self) -> Tensor:
        """(records, width)."""
        if self.column is None:
            return self.values
        zeros = self.values.new_zeros(len(self.values), self.width)
        return zeros.scatter_(1, self.column[:, None], self.values[:, None])

    def of(self, records: Tensor | slice) -> Piece:
        """The piece of some records: a mask, or a slice."""
        column = None if self.column is None else self.column[records]
        return self._replace(values=self.values[records], column=column)

    def in_float64(self) -> Piece:
        return self._replace(values=self.values.double())

    def norms(self) -> Tensor:
        """(records,)."""
        if self.column is None:
            return row_norms(self.values)
        return self.values.abs()

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """Σ factor · values over the records, (width,)."""
        if self.column is None:
            return factors @ self.values
        zeros = self.values.new_zeros(self.width)
        return zeros.index_add_(0, self.column, factors * self.values)


def pieces_of(outputs: Sequence[Tensor], layout: Layout) -> list[Piece]:
    """The pieces from the ``outputs`` of a rewritten graph: values, and columns if it has them.

    Raises:
        IndexError: a record selects an entry that does not exist.
    """
    left, found = iter(outputs), []
    for start, width, is_picked in layout:
        piece = Piece(start, width, next(left), next(left) if is_picked else None)
        column = piece.column
        if column is not None and len(column):
            if not 0 <= int(column.min()) <= int(column.max()) < width:
                raise IndexError("index out of range")
        found.append(piece)
    return found


def dense(pieces: Sequence[Piece], dimension: int) -> Tensor:
    """(records, dimension)."""
    values = pieces[0].values
    result = values.new_zeros(len(values), dimension)
    for piece in pieces:
        result[:, piece.columns] = piece.dense()
    return result


def norms_of(pieces: Sequence[Piece]) -> Tensor:
    """The norms of the records' vectors, ``(records,)``."""
    first, *others = [piece.norms() for piece in pieces]
    return torch.linalg.vector_norm(torch.stack([first, *others]), dim=0) if others else first


def in_pieces(graph: GraphModule) -> tuple[GraphModule, Layout | None]:
    """Rewrite a graph with the result (records, dimension) to return pieces. The same graph and
    None if this saves nothing.
    """
    copied = Graph()
    result = _source(copied.graph_copy(graph.graph, val_map={}))
    if result is None or len(_shape(result)) != 2:
        return graph, None
    output = copied.output(result)
    is_joined = result.target is _aten.cat.default and result.args[1:] in ((1,), (-1,))
    joined: Any = result.args[0] if is_joined else [result]
    outputs: list[Node] = []
    layout: Layout = []
    start = 0
    for node in map(_source, joined):
        width = _shape(node)[1]
        with copied.inserting_before(output):
            picked = _picked(node)
        if not _is_zero(node):
            outputs += [node] if picked is None else picked
            layout.append((start, width, picked is not None))
        start += width
    if not any(is_picked for _, _, is_picked in layout):
        return graph, None
    output.args = (tuple(outputs),)
    copied.eliminate_dead_code()
    copied.lint()
    return GraphModule(graph, copied), layout


def _picked(node: Node) -> list[Node] | None:
    """The numbers and their columns, if each row of zeros gets one number:
    ``zeros.index_put([arange, column], values, True)``.
    """
    rows, width = _shape(node)
    if node.target is not _aten.index_put.default:
        return None
    zeros, where, values, *rest = map(_source, node.args)
    if rest != [True] or not _is_zero(zeros) or len(where) != 2:
        return None
    row, column = where
    is_whole = column is not None and column.meta["val"].dtype in _WHOLE_NUMBERS
    if row is None or not is_whole or not _is_arange(row, rows):
        return None
    # [rows] and [rows, 1] together would broadcast to [rows, rows]
    shapes = {_shape(each) for each in (row, column, values)}
    if shapes not in ({(rows,)}, {(rows, 1)}):
        return None
    call = node.graph.call_function
    flat = call(_aten.reshape.default, (values, [rows]))
    whole = call(_aten.to.dtype, (call(_aten.reshape.default, (column, [rows])), torch.int64))
    from_the_end = call(_aten.add.Scalar, (whole, width))
    is_negative = call(_aten.lt.Scalar, (whole, 0))
    return [flat, call(_aten.where.self, (is_negative, from_the_end, whole))]


def _source(node: Any) -> Any:
    """The first node with the values and the shape of ``node``."""
    while isinstance(node, Node) and node.target in _SAME:
        inner = node.args[0]
        if not isinstance(inner, Node) or _shape(inner) != _shape(node):
            break
        node = inner
    return node


def _is_zero(node: Any) -> bool:
    while isinstance(node, Node) and node.target in _SAME:
        node = node.args[0]
    return isinstance(node, Node) and node.target in _ZEROS


def _shape(node: Node) -> tuple[int, ...]:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _is_arange(node: Node, count: int) -> bool:
    """Whether these are the indices of the rows, in their order."""
    while node.target in {_aten.unsqueeze.default, _aten.view.default} and isinstance(
        node.args[0], Node
    ):
        node = node.args[0]
    return node.target is _aten.arange.default and node.args == (count,)
