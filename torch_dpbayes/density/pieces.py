"""Vectors of records that are zero in all but a few columns, without the zeros.

Where a record picks its entry of a latent, ``effect[group]``, the recorded gradient writes one
number into a row of zeros, as long as there are groups. Here such a graph is rewritten to give the
number and its column instead; what is not recognised stays as it is. Norms and sums are the same,
as every column of a record has one number at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

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


class Piece(NamedTuple):
    """Some columns of the vectors of records; columns that no piece has are 0.

    Attributes:
        start, width: which columns.
        values: (records, width), or with ``column`` (records,).
        column: (records,), which one of them alone is not 0. None: they are all in ``values``.
    """

    start: int
    width: int
    values: Tensor
    column: Tensor | None

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
        """The same of some records: a mask, or a slice."""
        column = None if self.column is None else self.column[records]
        return self._replace(values=self.values[records], column=column)

    def in_float64(self) -> Piece:
        return self._replace(values=self.values.double())

    def norms(self) -> Tensor:
        """(records,)."""
        if self.column is None:
            return torch.linalg.vector_norm(self.values, dim=1)
        return self.values.abs()

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """Σ factor · values over the records, (width,)."""
        if self.column is None:
            return factors @ self.values
        zeros = self.values.new_zeros(self.width)
        return zeros.index_add_(0, self.column, factors * self.values)


class Pieces:
    """What a rewritten graph gives: its outputs are values, then columns, of each piece."""

    def __init__(self, layout: Sequence[tuple[int, int, bool]], dimension: int) -> None:
        self._layout, self.dimension = list(layout), dimension

    def of(self, outputs: Sequence[Tensor]) -> list[Piece]:
        """
        Raises:
            IndexError: a record picks an entry that there is not.
        """
        left, found = list(outputs), []
        for start, width, is_picked in self._layout:
            values, column = left.pop(0), None
            if is_picked:
                column = left.pop(0)
                if len(column) and not 0 <= int(column.min()) <= int(column.max()) < width:
                    raise IndexError("index out of range")
            found.append(Piece(start, width, values, column))
        return found


def dense(pieces: Sequence[Piece], dimension: int) -> Tensor:
    """(records, dimension)."""
    if len(pieces) == 1 and pieces[0].width == dimension:
        return pieces[0].dense()
    values = pieces[0].values
    result = values.new_zeros(len(values), dimension)
    for piece in pieces:
        result[:, piece.columns] = piece.dense()
    return result


def norms_of(pieces: Sequence[Piece]) -> Tensor:
    """Of the records' vectors, (records,)."""
    first, *others = [piece.norms() for piece in pieces]
    return torch.linalg.vector_norm(torch.stack([first, *others]), dim=0) if others else first


class _Part(NamedTuple):
    """A piece as nodes of the graph."""

    start: int
    width: int
    values: Node
    column: Node | None


def in_pieces(graph: GraphModule) -> tuple[GraphModule, Pieces] | None:
    """A graph for the same rows, (records, dimension), in pieces; None if that saves nothing."""
    if any(_writes(node) for node in graph.graph.nodes):  # what began as zeros may not be zeros
        return None
    copied = Graph()
    result = copied.graph_copy(graph.graph, val_map={})
    if not isinstance(result, Node) or len(_shape(result)) != 2:
        return None
    output = copied.output(result)
    parts = _Rewriter(output).parts(result)
    if parts is None or not any(part.column is not None for part in parts):
        return None
    nodes = [n for part in parts for n in (part.values, part.column) if n is not None]
    output.args = (tuple(nodes),)
    copied.eliminate_dead_code()
    copied.lint()
    layout = [(part.start, part.width, part.column is not None) for part in parts]
    return GraphModule(graph, copied), Pieces(layout, _shape(result)[1])


class _Rewriter:
    """Adds nodes before ``output``."""

    def __init__(self, output: Node) -> None:
        self._output, self._graph = output, output.graph

    def parts(self, node: Node) -> list[_Part] | None:
        """The parts of ``node``, (records, width), in the order of their columns; None if it
        cannot be had in parts. What is 0 has none.
        """
        shape = _shape(node)
        if node.op != "call_function" or len(shape) != 2:
            return None
        source = node.args[0] if node.args else None
        if _is_zero(node):
            return []
        if node.target in _SAME and isinstance(source, Node) and _shape(source) == shape:
            return self.parts(source)
        if node.target is _aten.cat.default and _argument(node, 1, 0) in (1, -1):
            return self._side_by_side(node)
        if node.target is _aten.index_put.default:
            return self._picked(node)
        if node.target is _aten.add.Tensor and not node.kwargs:
            return self._together(node)
        return None

    def _side_by_side(self, node: Node) -> list[_Part]:
        found, start = [], 0
        nodes: Any = node.args[0]
        for one in nodes:
            for part in self._parts_or_whole(one):
                found.append(part._replace(start=start + part.start))
            start += _shape(one)[1]
        return found

    def _together(self, node: Node) -> list[_Part] | None:
        """A sum whose terms have no column in common."""
        found: list[_Part] = []
        for term in node.args:
            if not isinstance(term, Node) or _shape(term) != _shape(node):
                return None
            found += self._parts_or_whole(term)
        found.sort(key=lambda part: part.start)
        ends = [part.start + part.width for part in found]
        if any(part.start < end for part, end in zip(found[1:], ends, strict=False)):
            return None
        return found

    def _picked(self, node: Node) -> list[_Part] | None:
        """One number in each row of zeros: ``zeros.index_put([arange, column], values, True)``."""
        rows, width = _shape(node)
        zeros, where, values, *rest = node.args
        if rest != [True] or not isinstance(zeros, Node) or not _is_zero(zeros):
            return None
        if not isinstance(where, list | tuple) or len(where) != 2 or not isinstance(values, Node):
            return None
        row, column = where
        if not isinstance(row, Node) or not isinstance(column, Node) or not _is_arange(row, rows):
            return None
        shapes = [list(_shape(n)) for n in (row, column, values)]
        if any(shape not in ([rows], [rows, 1]) for shape in shapes):
            return None
        # of [rows] and [rows, 1] one would be repeated for every entry of the other
        if any(shape != shapes[0] for shape in shapes):
            return None
        if column.meta["val"].dtype not in _WHOLE_NUMBERS:
            return None
        with self._graph.inserting_before(self._output):
            call = self._graph.call_function
            flat = call(_aten.reshape.default, (values, [rows]))
            picked = call(_aten.reshape.default, (column, [rows]))
            picked = call(_aten.to.dtype, (picked, torch.int64))
            wrapped = call(_aten.add.Scalar, (picked, width))
            is_negative = call(_aten.lt.Scalar, (picked, 0))
            picked = call(_aten.where.self, (is_negative, wrapped, picked))
        return [_Part(0, width, flat, picked)]

    def _parts_or_whole(self, node: Node) -> list[_Part]:
        found = self.parts(node)
        return [_Part(0, _shape(node)[1], node, None)] if found is None else found


def _shape(node: Node) -> tuple[int, ...]:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _writes(node: Node) -> bool:
    """Whether an operation changes one of its arguments."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _argument(node: Node, number: int, default: Any) -> Any:
    return node.args[number] if len(node.args) > number else default


def _is_zero(node: Node) -> bool:
    if node.target in _ZEROS:
        return True
    source = node.args[0] if node.args else None
    return node.target in _SAME and isinstance(source, Node) and _is_zero(source)


def _is_arange(node: Node, count: int) -> bool:
    """Whether these are the numbers of the rows, in their order."""
    while node.target in {_aten.unsqueeze.default, _aten.view.default} and isinstance(
        node.args[0], Node
    ):
        node = node.args[0]
    return node.target is _aten.arange.default and node.args == (count,)
