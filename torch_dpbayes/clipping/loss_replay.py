"""The way from a model's outputs to the loss, run again for one record in a batch of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from .loss_program import SCALING, NotReplayed, Op, Outside, Program, Ref, flat

_FULL = {Tensor.float, Tensor.half, Tensor.bfloat16}
_SIZED = frozenset(
    "view reshape expand repeat unflatten broadcast_to tile "
    "new_zeros new_ones new_full new_empty layer_norm rms_norm".split()
)
# Their arguments of fewer dimensions have the records in front; elsewhere broadcasting aligns the
# last dimensions.
_ROWS_FIRST = frozenset(
    "cross_entropy nll_loss multi_margin_loss cosine_embedding_loss ctc_loss gather take_along_dim "
    "__getitem__".split()
)


class NotAlone(Exception):
    """An operation failed on one record."""

    def __init__(self, op: Op, error: Exception) -> None:
        super().__init__(str(error))
        self.op = op


class Replay:
    """What was noted, run again: for one record in a batch of its own, or (None) for the batch."""

    def __init__(
        self,
        program: Program,
        needed: Sequence[Op],
        record: int | None,
        numbers: Mapping[tuple[int, int], float],
        *,
        is_double: bool,
        is_wide: bool = False,
    ) -> None:
        self.program, self.needed, self.record, self.numbers, self.is_double = (
            program,
            needed,
            record,
            numbers,
            is_double,
        )
        self.is_wide = is_wide  # any dimension of n entries, wherever it is, holds records
        self.widened: list[Op] = []  # for which that mattered
        self.n = program.n
        self.leaves: list[Tensor] = []
        self.values: dict[int, Tensor] = {}
        self.owners: dict[
            int, tuple[int, Tensor]
        ] = {}  # of tensors whose rows are not n blocks: dimension, records
        self.is_partial = False  # an operation got no row of this record

    def gradient(self) -> tuple[Tensor, ...]:
        """That of the loss with regard to each output; zeros where it has none."""
        with torch.enable_grad():
            for index, (value, _) in enumerate(self.program.values):
                value = value if self.record is None else value[self.record : self.record + 1]
                if value.is_floating_point() or value.is_complex():
                    value = self._number(value).detach().clone().requires_grad_()
                self.leaves.append(value)
                self.values[index] = value.clone()
            for place, op in enumerate(self.needed):
                self._run(place, op)
            starts = [
                (self.values[index].sum(), gradient) for index, gradient in self.program.starts
            ]
            total = sum(
                ((v if g is None else v * g.detach().to(v.dtype)) for v, g in starts),
                torch.zeros(()),
            )
            wanted = [leaf for leaf in self.leaves if leaf.requires_grad]
            if not total.requires_grad:
                raise NotReplayed
            found = iter(torch.autograd.grad(total, wanted, allow_unused=True))
        gradients = [next(found) if leaf.requires_grad else None for leaf in self.leaves]
        return tuple(
            torch.zeros_like(leaf) if g is None else g
            for leaf, g in zip(self.leaves, gradients, strict=True)
        )

    def _run(self, place: int, op: Op) -> None:
        with ExitStack() as stack:
            if not op.has_grad:
                stack.enter_context(torch.no_grad())
            if op.autocast is not None and not self.is_double:
                stack.enter_context(torch.autocast(self.program.device, op.autocast))
            error: Exception = ValueError("shapes do not fit")
            for sizes, is_left in self._ways(op):
                try:
                    args, kwargs = self._arguments(place, op, sizes, is_left)
                    func = Tensor.double if self.is_double and op.func in _FULL else op.func
                    result = func(*args, **kwargs)
                    if op.is_inplace and result is None:
                        result = args[0]
                    if isinstance(result, float):
                        result = torch.tensor(result, dtype=torch.float64)
                    if self._place(op, op.result, result):
                        return
                except (RuntimeError, ValueError, IndexError, TypeError) as failure:
                    error = failure
        raise NotAlone(op, error)

    def _ways(self, op: Op) -> Iterator[tuple[int | None, bool]]:
        """Which integer stands for the records; are tensors aligned at their first dimensions?"""
        sizes: list[int | None] = [None]
        if self.record is not None and op.name in _SIZED:
            integers = list(flat((op.args, op.kwargs), int))
            multiples: list[int | None] = [
                k for k, size in enumerate(integers) if size >= self.n and size % self.n == 0
            ]
            sizes = [None, *multiples] if integers[:1] == [-1] else [*multiples, None]
        sides = [op.name in _ROWS_FIRST, op.name not in _ROWS_FIRST]
        if self.record is None or not op.outsides or op.is_inplace:
            sides = sides[:1]
        return itertools.product(sizes, sides)

    def _arguments(
        self, place: int, op: Op, size: int | None, is_left: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        integers, numbers = itertools.count(), itertools.count()
        scales = op.name.strip("_") in SCALING
        weight = op.args[2] if len(op.args) > 2 else op.kwargs.get("weight")
        fixed = weight if op.name in ("cross_entropy", "nll_loss") else None

        def given(value: Any) -> Any:
            if isinstance(value, Ref):
                return self.values[value.index]
            if isinstance(value, Outside):
                number = self.numbers.get((place, next(numbers))) if scales else None
                if number is not None:
                    return self._number(torch.full_like(value.tensor, number))
                t = value.tensor.detach()
                t = t if self.record is None or value is fixed else self._own(t, op, is_left)
                return self._number(t.clone() if value.is_written else t)
            if type(value) in (tuple, list):
                return type(value)([given(v) for v in value])
            if type(value) is dict:
                return {k: given(v) for k, v in value.items()}
            if type(value) is slice:
                return slice(given(value.start), given(value.stop), given(value.step))
            if isinstance(value, torch.dtype):
                return torch.float64 if self.is_double and value.is_floating_point else value
            if scales and isinstance(value, (int, float)) and not isinstance(value, bool):
                return self.numbers.get((place, next(numbers)), value)
            if type(value) is int and next(integers) == size:
                return value // self.n
            return value

        if (
            op.name in ("__getitem__", "masked_select")
            and self.record is not None
            and isinstance(op.args[0], Ref)
            and len(op.args) > 1
        ):
            key = self._own_key(op)
            if key is not None:
                return (self.values[op.args[0].index], key), {}
        return given(op.args), given(op.kwargs)

    def _number(self, t: Tensor) -> Tensor:
        return t.double() if self.is_double and t.is_floating_point() else t

    def rows_of(self, index: int) -> dict[int, Tensor]:
        """Of each dimension that holds records: whose its entries are."""
        if index in self.owners:
            dim, owners = self.owners[index]
            return {dim: owners}
        noted, now = self.program.shapes[index], self.values[index].shape
        each = torch.arange(self.n)
        return {
            d: each.repeat_interleave(b)
            for d, (a, b) in enumerate(zip(noted, now, strict=True))
            if a != b and a == b * self.n
        }

    def _own(self, t: Tensor, op: Op, is_left: bool) -> Tensor:
        """This record's part of a tensor from outside."""
        done: set[int] = set()
        most = 0
        for index in op.refs:
            noted = self.program.shapes[index]
            most = max(most, len(noted))
            for dim, owners in self.rows_of(index).items():
                own = dim if is_left else dim + t.dim() - len(noted)
                if 0 <= own < t.dim() and own not in done and t.shape[own] == len(owners):
                    done.add(own)
                    t = t.index_select(
                        own, torch.eq(owners, self.record or 0).nonzero().flatten().to(t.device)
                    )
                    self.is_partial |= t.shape[own] == 0
        if not done and t.dim() > 0 and self.record is not None:
            if len(t) == self.n and (t.dim() > most or is_left):
                return t[self.record : self.record + 1]
            if self.is_wide and self.n in t.shape:
                self.widened.append(op)
                return t.narrow(list(t.shape).index(self.n), self.record, 1)
        return t

    def _own_key(self, op: Op) -> Any:
        """The key that chose rows, for the rows of this record; None where it chose none."""
        source = op.args[0].index
        rows = self.rows_of(source).get(0)
        key = op.args[1] if isinstance(op.args[1], tuple) else (op.args[1],)
        if rows is None or not key or list(flat(key, Ref)):
            return None
        parts = [k.tensor.cpu() if isinstance(k, Outside) else k for k in key]
        first = torch.tensor(list(parts[0])) if isinstance(parts[0], (list, range)) else parts[0]
        is_mask = isinstance(first, Tensor) and first.dtype is torch.bool and len(parts) == 1
        if is_mask and (first.dim() > 1 or op.name == "masked_select"):
            if first.shape != self.program.shapes[source][: first.dim()]:
                return None
            mine = torch.eq(rows, self.record or 0)
            self.is_partial |= not bool(first[mine].any())
            self.owners[next(flat(op.result, Ref)).index] = 0, rows[first.nonzero()[:, 0]]
            return first[mine].to(self.values[source].device)
        if isinstance(first, slice):
            if first == slice(None):
                return None
        elif not isinstance(first, Tensor) or first.dim() != 1 or first.dtype is torch.uint8:
            return None
        device = self.values[source].device
        chosen = torch.arange(len(rows))[first]
        mine = torch.eq(rows[chosen], self.record or 0)
        place = torch.cumsum(torch.eq(rows, self.record or 0), 0) - 1
        local = place[chosen[mine]]
        rest = [
            (
                k[mine].to(device)
                if isinstance(k, Tensor) and isinstance(first, Tensor) and k.shape == chosen.shape
                else k
            )
            for k in parts[1:]
        ]
        self.is_partial |= len(local) == 0
        self.owners[next(flat(op.result, Ref)).index] = 0, rows[chosen]
        return (local.to(device), *rest)

    def _place(self, op: Op, refs: Any, result: Any) -> bool:
        """Keep what an operation gave, if its shape is that of a part of what was noted."""
        if refs is None:
            return True
        if not isinstance(refs, Ref):
            return (
                isinstance(result, (tuple, list))
                and len(result) == len(refs)
                and all(self._place(op, r, t) for r, t in zip(refs, result, strict=True))
            )
        noted = self.program.shapes[refs.index]
        if not isinstance(result, Tensor) or result.dim() != len(noted):
            return False
        if self.record is not None:
            self._inherit(op, refs.index, noted, result)
            explicit = self.owners.get(refs.index, (-1, noted))[0]
            for d, (a, b) in enumerate(zip(noted, result.shape, strict=True)):
                if a != b and a != b * self.n and d != explicit:
                    return False
        self.values[refs.index] = result
        return True

    def _inherit(self, op: Op, index: int, noted: tuple[int, ...], result: Tensor) -> None:
        """Whose the rows of a result are, where they are not n blocks."""
        if index in self.owners or not noted:
            return
        sources = [self.rows_of(i) for i in op.refs]
        if op.name in ("cat", "concat", "concatenate"):
            parts = [rows[0] for rows in sources if 0 in rows]
            if len(parts) == len(sources) and sum(map(len, parts)) == noted[0]:
                self.owners[index] = 0, torch.cat(parts)
            return
        for i, rows in zip(op.refs, sources, strict=True):
            shape = self.program.shapes[i]
            if i in self.owners and self.owners[i][0] == 0 and noted[0] == len(rows[0]):
                self.owners[index] = 0, rows[0]
            elif (
                1 in rows
                and len(shape) > 1
                and noted[0] == shape[0] * shape[1]
                and len(result) == self.values[i].shape[:2].numel()
            ):
                self.owners[index] = 0, rows[1].repeat(shape[0])
