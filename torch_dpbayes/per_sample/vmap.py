"""Chunked vmap: every record's forward and backward pass by ``torch.func``, some records at a
time.

Book-keeping is faster, but only knows layers. Here nothing of the model is known: what it does with
its parameters, whatever that is, it does for one record, under ``torch.func.vmap``. A batch whose
per-record gradients fit into memory runs once. A larger one runs forward without a graph; when the
step asks for the clipped sum, its records are run again in chunks, each with its gradient with
respect to the parameters (Subramani, Vadivelu and Kamath 2021), which is clipped, added up and
forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp

from ..errors import StepError
from .contributions import Contribution, PerRecord
from .gradient_source import MappedSource, require_first_backward
from .mapped_forward import OfOne
from .record_map import (
    SAVED_TENSORS,
    CannotBeMapped,
    KeptTensors,
    RecordMap,
    in_plain_words,
    one_record_only,
)

_NUMBERS_HELD = 2**25  # of per-record gradients in a chunk, 128 MiB in float32


class VmapGradientSource(MappedSource):
    """Σ clip(g_i) from per-record gradients under ``torch.func``, chunk by chunk.

    Args: as those of :class:`~torch_dpbayes.per_sample.gradient_source.MappedSource`.

    **Privacy.** ‖Σ clip(g_i)‖ changes by at most C when a record is added or removed: what record
    i's gradient is computed from is record i, its random numbers and the gradient that reaches its
    outputs.
    """

    _alone = staticmethod(one_record_only)  # with the random numbers that records draw
    _pass: _Pass | None = None  # the last one

    def _in_map(self, module: nn.Module) -> Sequence[Tensor]:
        return [p for p in module.parameters() if p.requires_grad]

    def over_records(
        self, of_one: OfOne, rows: Sequence[Tensor], direct: Sequence[Tensor], n: int
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """The results of all records; what comes back to them is kept until the step."""
        if self._pass is not None:
            self._pass.forget()
            self._pass.require_nothing_kept()
        this = _Pass(of_one, [t.detach() for t in rows], list(direct), n)
        found = this.run()
        anchor = torch.zeros((), device=rows[0].device, requires_grad=True)
        self._pass = this
        return list(_Results.apply(anchor, this, *found)), [anchor]

    def recorded(
        self, named_parameters: Sequence[tuple[str, Tensor]]
    ) -> Iterator[Sequence[Contribution]]:
        this = self._pass
        is_back = this is not None and this.is_back and not this.is_over
        self.passes.require_one(is_back)
        if this is None or not is_back:
            yield []
            return
        wanted = {id(p) for _, p in named_parameters}
        try:
            for gradients in this.gradients():
                found = zip(this.parameters, gradients, strict=True)
                yield [PerRecord({p: g for p, g in found if id(p) in wanted})]
        except KeptTensors as kept:
            raise KeptTensors(kept.tensors, self.mapped.where(kept.tensors)) from None

    def zero_grad(self, parameters: Iterable[Tensor]) -> None:
        if self._pass is not None and self._pass.is_back:
            self._pass.end()

    def discard(self, parameters: Iterable[Tensor]) -> None:
        if self._pass is not None:
            self._pass.end()
        self.passes.forget()

    def require_nothing_kept(self) -> None:
        if self._pass is not None:
            try:
                self._pass.require_nothing_kept()
            except KeptTensors as kept:
                raise KeptTensors(kept.tensors, self.mapped.where(kept.tensors)) from None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_pass": None}


class _Pass:
    """One forward pass, and what its gradients follow from.

    Args:
        of_one: the program of one record.
        rows: tensors with records in dimension 0.
        parameters: the trainable parameters.
        n: the number of records.
    """

    rows: list[Tensor]
    _graph: _Graph | None  # of one chunk with all records
    _gradients: list[Tensor]  # of that
    _found: Sequence[Tensor]  # of several chunks, which will be run again
    _backprops: list[Tensor]

    def __init__(self, of_one: OfOne, rows: list[Tensor], parameters: list[Tensor], n: int) -> None:
        self.forget()
        self.of_one, self.rows, self.parameters, self.n = of_one, rows, parameters, n
        self.is_back = self.is_over = False
        self._map: RecordMap | None = None  # of that
        largest = max(1, _NUMBERS_HELD // max(1, sum(p.numel() for p in parameters)))
        self._size = math.ceil(n / math.ceil(n / largest))  # records in a chunk
        self._versions = [t._version for t in (*rows, *parameters)]
        self._values = [p.detach() for p in parameters]
        self._random_state = [torch.get_rng_state()]
        self._device = rows[0].device
        if self._device.type == "cuda":
            self._random_state.append(torch.cuda.get_rng_state(self._device))

    def run(self) -> Sequence[Tensor]:
        """The results of all records."""
        if self.n <= self._size:
            self._graph = _Graph(self.of_one, self.rows, self._values)
            self._map = self._graph.map
            return self._graph.taken()
        parts: list[list[Tensor]] = []
        with torch.no_grad():
            for chunk in self._chunks(self.rows):
                record_map = RecordMap(len(chunk[0]), leaves=False)
                parts.append(record_map(lambda inside: self.of_one(inside, self._values), chunk))
                record_map.require_nothing_kept()
        self._found = [torch.cat(part) for part in zip(*parts, strict=True)]
        return self._found

    def receive(self, backprops: Sequence[Tensor]) -> None:
        """The backward pass reached the results."""
        require_first_backward(self.is_back or self.is_over)
        self._backprops, self.is_back = [g.detach() for g in backprops], True

    def forget(self) -> None:
        """Keep nothing of the records."""
        self._graph = None
        self.rows, self._gradients, self._found, self._backprops = [], [], [], []

    def end(self) -> None:
        """No step will ask for the gradients."""
        self.is_over = True
        self.forget()

    def require_nothing_kept(self) -> None:
        """Raise if a tensor of the finished pass is still alive."""
        if self._map is not None:
            self._map.require_nothing_kept()

    def gradients(self) -> Iterator[list[Tensor]]:
        """Of each chunk, the per-record gradients of every parameter."""
        if [t._version for t in (*self.rows, *self.parameters)] != self._versions:
            raise StepError(
                "an input or a parameter was changed in place between forward() and step(), which"
                " needs them as they were: write into copies",
                code="step-changed",
            )
        if self.n <= self._size:
            if self._graph is not None:
                graph, self._graph = self._graph, None
                self._gradients = graph.gradients(self._backprops)
            yield self._gradients
            return
        with torch.random.fork_rng(devices=[self._device] * (len(self._random_state) - 1)):
            torch.set_rng_state(self._random_state[0])
            for state in self._random_state[1:]:
                torch.cuda.set_rng_state(state, self._device)
            chunks = (self._chunks(t) for t in (self.rows, self._backprops, self._found))
            for rows, backprops, found in zip(*chunks, strict=True):
                graph = _Graph(self.of_one, rows, self._values)
                for again, first in zip(graph.taken(), found, strict=True):
                    _require_same(again, first)
                yield graph.gradients(backprops)

    def _chunks(self, tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        for start in range(0, self.n, self._size):
            yield [t[start : start + self._size] for t in tensors]


class _Graph:
    """The forward pass of some records, differentiated within their map; one backward pass enters
    that map again.

    Args:
        of_one: the program of one record.
        rows: tensors with records in dimension 0.
        values: the parameters.
    """

    def __init__(self, of_one: OfOne, rows: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self.map = RecordMap(len(rows[0]), leaves=False)
        self._pull: Callable[..., Sequence[Tensor]] | None = None

        def run(slices: Sequence[Tensor]) -> Sequence[Tensor]:
            def program(*values: Tensor) -> tuple[Any, Any]:
                # in the map's words, not in vjp's
                with torch.autograd.graph.disable_saved_tensors_hooks(SAVED_TENSORS):
                    results = tuple(of_one(slices, values))
                numbers = tuple(t for t in results if t.is_floating_point())
                if not numbers:
                    raise CannotBeMapped(
                        "its output has no gradient: return a tensor of floating-point numbers"
                        " with a row per record, or a loss"
                    )
                return numbers, results

            found: Any = vjp(program, *values, has_aux=True)
            _, self._pull, results = found
            return tuple(results)

        self._results = self.map(run, rows)

    def taken(self) -> list[Tensor]:
        """What the program returned, records in dimension 0; it is not kept here."""
        results, self._results = self._results, []
        return results

    def gradients(self, backprops: Sequence[Tensor]) -> list[Tensor]:
        """Of every parameter, each record's, from the gradients of its results."""
        pulls, self._pull = [self._pull], None

        def run(inside: Sequence[Tensor]) -> Sequence[Tensor]:
            pull = pulls.pop()  # so that nothing holds the graph afterwards
            assert pull is not None
            return pull(tuple(inside), retain_graph=False)

        try:
            with torch.no_grad():
                found = self.map.again(run, [g for g in backprops if g.is_floating_point()])
        except Exception as error:
            raise CannotBeMapped(
                f"its backward pass cannot be run for one record: {in_plain_words(error)}"
            ) from error
        self.map.require_nothing_kept()
        return found


def _require_same(again: Tensor, first: Tensor) -> None:
    """Raise if records that are run again for their gradients come out differently: these
    would be gradients of something else.
    """
    tolerance = 2e-2 if again.dtype in (torch.float16, torch.bfloat16) else 1e-3
    again, first = again.reshape(len(again), -1), first.reshape(len(first), -1)
    is_same = torch.isclose(again, first, rtol=tolerance, atol=tolerance, equal_nan=True).all(1)
    if not bool((is_same | ~torch.isfinite(first).all(1)).all()):
        raise StepError(
            "the records, run again for their gradients, gave other outputs: change no mode, batch"
            " or random number between forward() and step(), or take"
            ' grad_sample_mode="bookkeeping".',
            code="step-changed",
        )


class _Results(torch.autograd.Function):
    """The records' results, whose gradients are kept for the step."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, this: _Pass, *found: Tensor) -> tuple[Tensor, ...]:
        ctx.this, ctx.like = this, found
        ctx.mark_non_differentiable(*(t for t in found if not t.is_floating_point()))
        return tuple(t.clone() for t in found)  # the graph may need them as they are

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, ...]:
        given = zip(gradients, ctx.like, strict=True)
        ctx.this.receive([torch.zeros_like(t) if g is None else g for g, t in given])
        return (None, None, *(None for _ in gradients))
