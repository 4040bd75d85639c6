"""Terms and gradients of records, recorded once on synthetic rows and replayed on the data.

Rows are computed together only under ``torch.func.vmap``, where no row can read another. Operations
that vmap does not control are refused. So privacy does not rely on the check on synthetic rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

from ..per_sample.record_map import RecordsApart, in_plain_words
from .arguments import full_vectors
from .locality import MadeUpRecords
from .pieces import Piece, in_pieces, pieces_of
from .pyro_runs import UnfitModel, agree, without_value_checks
from .recording import most_bytes, recorded, result_of

_CHUNK_BYTES = 2**24  # of intermediate results: larger chunks exceed the processor's caches


class Program:
    """Tensor operations, recorded for a fixed number of rows, and for a few rows."""

    def __init__(self, graph: GraphModule, made_up: list[Tensor], few: GraphModule) -> None:
        self.graph, self.made_up, self.rows, self._few = graph, made_up, len(made_up[0]), few

    def __call__(self, theta: Tensor, rows: Sequence[Tensor], count: int) -> Any:
        """One number for each of the first ``count`` of ``self.rows`` rows."""
        return self.graph(theta, *rows)[:count]

    def of_few(self, theta: Tensor, rows: Sequence[Tensor]) -> Tensor | None:
        """One result for each of a few synthetic rows; None if the program fails at θ."""
        try:
            result: Tensor = self._few(theta, *rows)
        except torch.OutOfMemoryError:
            raise
        except Exception:
            return None
        return result

    def of_thetas(self, thetas: Tensor, rows: Sequence[Tensor], few: int) -> Tensor:
        """One number for each row and every θ, for whole blocks of ``few`` rows; NaN if the program
        fails at a θ. Differentiable.
        """
        blocks = [torch.stack(row.split(few)) for row in rows]
        of_blocks = vmap(self._few, in_dims=(None, *[0] * len(blocks)))
        try:
            return vmap(lambda theta: of_blocks(theta, *blocks).flatten())(thetas)
        except RuntimeError:  # vmap lacks an operation of the model, or it fails at one θ
            return torch.stack([self._of_blocks(theta, blocks, few) for theta in thetas])

    def _of_blocks(self, theta: Tensor, blocks: list[Tensor], few: int) -> Tensor:
        try:
            return torch.cat([self._few(theta, *block) for block in zip(*blocks, strict=True)])
        except RuntimeError:
            return theta.new_full((len(blocks[0]) * few,), math.nan)


class Gradients(Program):
    """A program for the gradients of records, (rows, dimension)."""

    def __init__(self, graph: GraphModule, made_up: list[Tensor], few: GraphModule) -> None:
        graph, self._layout = in_pieces(graph)
        super().__init__(graph, made_up, few)

    def __call__(self, theta: Tensor, rows: Sequence[Tensor], count: int) -> list[Piece]:
        """The gradients of the first ``count`` of ``self.rows`` rows, in pieces of columns."""
        outputs = self.graph(theta, *rows)
        if self._layout is None:
            return [Piece(0, outputs.shape[1], outputs[:count], None)]
        return [piece.of(slice(count)) for piece in pieces_of(outputs, self._layout)]


def record_programs(
    made_up: MadeUpRecords, num_records: int, with_gradients: bool
) -> tuple[Program, Gradients | None]:
    """The programs of the records' terms and, ``with_gradients``, of their gradients: the first
    ones that can be recorded and agree with Pyro. ``num_records``: the usual number of records.
    """

    def of_row(theta: Tensor, *row: Tensor) -> Tensor:
        with RecordsApart():
            return made_up.terms.of_row(theta, *row)

    def of_row_with_own_tensors(theta: Tensor, *row: Tensor) -> Tensor:
        with _TensorsOfTheRow(row[0]):
            return of_row(theta, *row)

    in_dims, problems = (None, *(0 for _ in made_up.few())), []
    for term in (of_row, of_row_with_own_tensors):
        try:
            with without_value_checks(), torch.no_grad():
                way = grad_and_value(term) if with_gradients else term
                graph, rows, few = _recorded(vmap(way, in_dims=in_dims), made_up, num_records)
                terms, gradients = Program(graph, rows, few), None
                if with_gradients:
                    parts = {each: [result_of(each, k) for k in (0, 1)] for each in {graph, few}}
                    terms = Program(parts[graph][1], rows, parts[few][1])
                    gradients = Gradients(parts[graph][0], rows, parts[few][0])
                if _is_right(terms, made_up):
                    return terms, gradients
            problems.append("it computes with numpy, or with .item()?")
        except Exception as error:
            problems.append(in_plain_words(error))
    raise UnfitModel(
        "the record terms cannot be recorded as tensor operations on one row:"
        f" {'; '.join(dict.fromkeys(problems))}. Write torch.where instead of masks,"
        " num_classes of one_hot, no branches on values and no .item()."
    )


def _recorded(
    way: Callable[..., Any], made_up: MadeUpRecords, num_records: int
) -> tuple[GraphModule, list[Tensor], GraphModule]:
    """The graph for chunks, synthetic rows of one chunk, and the graph for a few rows. Chunks
    have about equal length, and keep within the bound on memory.
    """
    theta, least = made_up.theta, full_vectors(1)
    rows = made_up.rows(least)
    graph = few = recorded(way, theta, *rows)
    if num_records > least:
        limit = max(1, int(_CHUNK_BYTES / max(most_bytes(few, theta, *rows) / least, 1)))
        chunks = math.ceil(num_records / limit)
        rows = made_up.rows(full_vectors(math.ceil(num_records / chunks)))
        graph = recorded(way, theta, *rows)
    return graph, rows, few


def _is_right(terms: Program, made_up: MadeUpRecords) -> bool:
    """Whether the program agrees with Pyro, at a θ and on rows that were not recorded."""
    theta, rows = made_up.theta.flip(0) * 0.7, made_up.rows(terms.rows, start=3)
    return agree(
        lambda theta: terms(theta, rows, terms.rows),
        lambda theta: made_up.terms(theta, rows),
        theta,
    )


class _TensorsOfTheRow(TorchFunctionMode):
    """Extends vmap: tensors that the model creates belong to the row, too, so values of the row
    can be written into them. ``.data`` works, because Pyro's enumeration reads its shape.
    """

    def __init__(self, row: Tensor) -> None:
        super().__init__()
        self._zero = row.new_zeros(())

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function == Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].detach()
        made = function(*args, **(kwargs or {}))
        if function not in _MAKING:
            return made
        is_mask = made.dtype == torch.bool
        return made.logical_or(self._zero) if is_mask else made + self._zero.to(made.dtype)


_MAKING = {
    *(torch.zeros, torch.ones, torch.empty, torch.full, torch.eye, torch.tensor),
    *(torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like),
    *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_tensor),
}
