"""Chunked vmap: every record's forward and backward pass by ``torch.func``, some records at a
time.

Book-keeping is faster, but only knows layers. Here nothing of the model is known: what it does with
its parameters, whatever that is, it does for one record, under ``torch.func.vmap``. The forward
pass is run without a graph. When the step asks for the clipped sum, the records are run again in
chunks, each with its gradient with respect to the parameters (Subramani, Vadivelu and Kamath 2021),
which is clipped, added up and forgotten: no more than one chunk's per-record gradients are ever
held.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp

from ..errors import StepError
from .gradient_source import (
    REMOVED,
    UNUSED,
    GradientSource,
    add_clipped,
    joint_norms,
    require_first_backward,
    require_no_ordinary_gradient,
)
from .mapped_forward import COPIED, ForwardPasses, Loss, MappedForward, OfOne
from .record_map import (
    SAVED_TENSORS,
    CannotBeMapped,
    KeptTensors,
    RecordMap,
    in_plain_words,
    one_record_only,
)

_NUMBERS_HELD = 2**25  # of per-record gradients in a chunk, 128 MiB in float32


class VmapGradientSource(GradientSource):
    """Σ clip(g_i) from per-record gradients under ``torch.func``, chunk by chunk.

    Args:
        module: the model; it stays the user's own object.
        loss_reduction: how the loss reduces over the batch, ``"mean"`` or ``"sum"``.
        loss: ``(output, *targets) -> scalar`` of one record, for ``module.private_loss``.

    **Privacy.** ‖Σ clip(g_i)‖ changes by at most C when a record is added or removed: what record
    i's gradient is computed from is record i, its random numbers and the gradient that reaches its
    outputs.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        loss_reduction: str = "mean",
        assume_independent: bool = False,
        loss: Loss | None = None,
    ) -> None:
        super().__init__(module, loss_reduction, assume_independent=assume_independent)
        self._pass: _Pass | None = None  # the first since the last step
        self._last: _Pass | None = None
        self._trainable = [p for p in module.parameters() if p.requires_grad]
        self.passes: ForwardPasses = ForwardPasses(
            self._is_enabled, partial(self.discard, ()), follows=not assume_independent
        )
        self.mapped = MappedForward(module, self, self._trainable, loss)
        self._attach()

    def over_records(
        self, of_one: OfOne, rows: Sequence[Tensor], direct: Sequence[Tensor], n: int
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """The results of all records; what comes back to them is kept until the step."""
        if self._last is not None:
            self._last.finish()
            self._last.require_nothing_kept()
        this = _Pass(of_one, [t.detach() for t in rows], list(direct), n)
        found = this.run()
        anchor = torch.zeros((), device=rows[0].device, requires_grad=True)
        results = list(_Results.apply(anchor, this, *found))
        self._last = this
        if self.passes.count == 1:
            self._pass = this
        return results, [anchor]

    def add_clipped_sum(
        self,
        named_parameters: Sequence[tuple[str, Tensor]],
        max_grad_norm: float,
        out: Sequence[Tensor],
        *,
        scale: Tensor | None = None,
        second_moment: Tensor | None = None,
    ) -> int:
        n = 0
        for gradients in self._gradients(named_parameters):
            n += add_clipped(gradients, max_grad_norm, out, scale, second_moment)
        return n

    @torch.no_grad()
    def norms(self, named_parameters: Sequence[tuple[str, Tensor]]) -> Tensor:
        nobody = torch.zeros(0, device=named_parameters[0][1].device)
        norms = [joint_norms(gradients) for gradients in self._gradients(named_parameters)]
        return torch.cat([nobody, *norms]).float()

    @torch.no_grad()
    def per_record_gradients(self, parameter: Tensor) -> Tensor | None:
        if (
            self._pass is None
            or not self._pass.is_back
            or not any(p is parameter for p in self._pass.parameters)
        ):
            return None
        nobody = parameter.new_zeros(0, parameter.numel())
        parts = [gradients[0] for gradients in self._gradients([("", parameter)])]
        return torch.cat([nobody, *parts]).reshape(-1, *parameter.shape)

    def zero_grad(self, parameters: Iterable[Tensor]) -> None:
        if self._pass is not None and self._pass.is_back:
            self._pass.finish()
            self._pass = None

    def discard(self, parameters: Iterable[Tensor]) -> None:
        if self._last is not None:
            self._last.is_over = True
            self._last.finish()
        self._pass = None
        self.passes.forget()

    def require_nothing_kept(self) -> None:
        """Of what its graph kept alive, nothing can be said before the pass is finished."""
        if self._last is None:
            return
        try:
            self._last.require_nothing_kept()
        except KeptTensors as kept:
            raise KeptTensors(kept.tensors, self.mapped.where(kept.tensors)) from None

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._is_paused = True
        try:
            with one_record_only():  # with the random numbers that records draw
                yield
        finally:
            self._is_paused = False

    def remove(self) -> None:
        super().remove()
        self.mapped.remove()

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a private model takes along how to get rid of the hooks, and nothing of
        the data.
        """
        return {**self.__dict__, "_pass": None, "_last": None, "_handles": [], "is_copy": True}

    def _gradients(self, named_parameters: Sequence[tuple[str, Tensor]]) -> Iterator[list[Tensor]]:
        """Per-record gradients as (records, numel) matrices, one chunk of records after another."""
        if self._is_removed:
            raise StepError(REMOVED, code="step-removed")
        require_no_ordinary_gradient(named_parameters)
        if {id(p) for p in self._trainable} != {
            id(p) for p in self.mapped.module.parameters() if p.requires_grad
        }:
            raise StepError(COPIED, code="model-copied")
        this = self._pass
        self.passes.require_one(this is not None)
        for name, p in named_parameters:
            if this is None or not this.is_back or not any(q is p for q in this.parameters):
                raise StepError(UNUSED.format(name), code="step-unused")
        assert this is not None
        if self.passes.is_empty:
            return
        places = {id(p): k for k, p in enumerate(this.parameters)}
        wanted = [places[id(p)] for _, p in named_parameters]
        try:
            for gradients in this.gradients():
                yield [gradients[k].flatten(1) for k in wanted]
        except KeptTensors as kept:
            raise KeptTensors(kept.tensors, self.mapped.where(kept.tensors)) from None


class _Pass:
    """One forward pass, and what its gradients follow from.

    Args:
        of_one: the program of one record.
        rows: tensors with records in dimension 0.
        parameters: the trainable parameters.
        n: the number of records.
    """

    def __init__(self, of_one: OfOne, rows: list[Tensor], parameters: list[Tensor], n: int) -> None:
        self.of_one, self.rows, self.parameters, self.n = of_one, rows, parameters, n
        self.is_back = self.is_over = False
        self._backprops: list[Tensor] = []
        largest = max(1, _NUMBERS_HELD // max(1, sum(p.numel() for p in parameters)))
        self._size = math.ceil(max(n, 1) / math.ceil(max(n, 1) / largest))  # records in a chunk
        self._versions = [t._version for t in (*rows, *parameters)]
        self._values = [p.detach() for p in parameters]
        self._graph: _Graph | None = None  # of one chunk with all records
        self._map: RecordMap | None = None  # of that
        self._gradients: list[Tensor] = []
        self._found: list[Tensor] = []  # of several chunks, which will be run again
        self._random_state: list[Tensor] = []

    def run(self) -> Sequence[Tensor]:
        """The results of all records."""
        if self.n <= self._size:
            self._graph = _Graph(self.of_one, self.rows, self._values)
            self._map = self._graph.map
            found, self._graph.results = self._graph.results, []
            return found
        self._random_state = _random_state(self.rows)
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

    def finish(self) -> None:
        """Keep nothing of the records."""
        self._graph = None
        self.rows, self._gradients, self._found, self._backprops = [], [], [], []

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
        devices = list({t.device for t in self.rows if t.device.type == "cuda"})
        with torch.random.fork_rng(devices=devices):
            _set_random_state(self._random_state, self.rows)
            chunks = (self._chunks(t) for t in (self.rows, self._backprops, self._found))
            for rows, backprops, found in zip(*chunks, strict=True):
                graph = _Graph(self.of_one, rows, self._values)
                for again, first in zip(graph.results, found, strict=True):
                    _require_same(again, first)
                graph.results = []
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

    Attributes:
        map: of the records.
        results: what the program returned, records in dimension 0.
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

        self.results = self.map(run, rows)

    def gradients(self, backprops: Sequence[Tensor]) -> list[Tensor]:
        """Of every parameter, each record's, from the gradients of its results."""
        pulls, self._pull = [self._pull], None
        backprops = [g for g in backprops if g.is_floating_point()]

        def run(inside: Sequence[Tensor]) -> Sequence[Tensor]:
            pull = pulls.pop()  # so that nothing holds the graph afterwards
            assert pull is not None
            return pull(tuple(inside), retain_graph=False)

        try:
            with torch.no_grad():
                found = self.map.again(run, backprops)
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
    is_close = torch.isclose(again, first, rtol=tolerance, atol=tolerance, equal_nan=True).reshape(
        len(first), -1
    )
    if not bool((is_close.all(1) | ~torch.isfinite(first).reshape(len(first), -1).all(1)).all()):
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
        ctx.this = this
        ctx.like = found
        ctx.mark_non_differentiable(*(t for t in found if not t.is_floating_point()))
        return tuple(t.clone() for t in found)  # the graph may need them as they are

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, ...]:
        ctx.this.receive(
            [
                torch.zeros_like(t) if g is None else g
                for g, t in zip(gradients, ctx.like, strict=True)
            ]
        )
        return (None, None, *(None for _ in gradients))


def _random_state(rows: Sequence[Tensor]) -> list[Tensor]:
    devices = [t.device for t in rows if t.device.type == "cuda"]
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in devices[:1])]


def _set_random_state(state: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
    torch.set_rng_state(state[0])
    devices = [t.device for t in rows if t.device.type == "cuda"]
    if len(state) > 1:
        torch.cuda.set_rng_state(state[1], devices[0])
