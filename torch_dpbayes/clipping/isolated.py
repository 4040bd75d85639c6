"""Isolated records: every record's forward and backward pass by ``torch.func``, some records at a
time.

Book-keeping is faster, but only knows layers. Here nothing of the model is known: what it does with
its parameters, whatever that is, it does for one record, under ``torch.func.vmap``. The forward
pass is run without a graph. When the step asks for the clipped sum, the records are run again in
chunks, each with its gradient with respect to the parameters (Subramani, Vadivelu and Kamath 2021),
which is clipped, added up and forgotten: no more than one chunk's per-record gradients are ever
held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from .gradient_source import (
    COPIED,
    REMOVED,
    UNUSED,
    ForwardPasses,
    GradientSource,
    add_clipped,
    attach,
    require_first_backward,
    require_no_ordinary_gradient,
)
from .mapped_forward import Loss, MappedForward, OfOne
from .record_map import RecordMap, one_record_only

_NUMBERS_HELD = 2**24  # of per-record gradients in a chunk, 64 MiB in float32


class IsolatedGradientSource(GradientSource):
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
        self, module: nn.Module, *, loss_reduction: str = "mean", loss: Loss | None = None
    ) -> None:
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f'loss_reduction must be "mean" or "sum", got {loss_reduction!r}')
        self.loss_reduction = loss_reduction
        self.independence = "by construction"
        self.is_copy = False
        self._has_loss = loss is not None
        self._is_paused = self._is_removed = False
        self._pass: _Pass | None = None
        self._module = module
        before = GradientSource.attached_to(module)
        if before is not None:
            before.remove()
        self._trainable = [p for p in module.parameters() if p.requires_grad]
        self.passes = ForwardPasses(module, self._is_enabled, loss_reduction)
        self.mapped = MappedForward(module, self, self._trainable, loss)
        attach(self, module)

    def over_records(
        self, of_one: OfOne, rows: Sequence[Tensor], direct: Sequence[Tensor], n: int
    ) -> Sequence[Tensor]:
        """The results of all records without a graph; what comes back to them is kept until
        the step.
        """
        size = max(1, _NUMBERS_HELD // max(1, sum(p.numel() for p in direct)))
        this = _Pass(
            of_one,
            list(rows),
            list(direct),
            n,
            size,
            _random_state(rows),
            [t._version for t in (*rows, *direct)],
        )
        values = [p.detach() for p in direct]
        parts: list[list[Tensor]] = []
        with torch.no_grad():
            for chunk in this.chunks():
                record_map = RecordMap(len(chunk[0]), leaves=False)
                parts.append(record_map(lambda inside: of_one(inside, values), chunk))
                record_map.require_nothing_kept()
        found = [torch.cat(part) if len(part) > 1 else part[0] for part in zip(*parts, strict=True)]
        this.found = [t.detach() for t in found]
        anchor = torch.zeros((), device=rows[0].device, requires_grad=True)
        results = list(_Results.apply(anchor, this, *found))
        if self.passes.count == 1:
            self._pass = this
        return results

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
        norms = [
            torch.linalg.vector_norm(
                torch.stack([torch.linalg.vector_norm(g, dim=1) for g in gradients]), dim=0
            )
            for gradients in self._gradients(named_parameters)
        ]
        return (
            torch.cat(norms).float()
            if norms
            else torch.zeros(0, device=named_parameters[0][1].device)
        )

    @torch.no_grad()
    def per_record_gradients(self, parameter: Tensor) -> Tensor | None:
        if (
            self._pass is None
            or not self._pass.is_back
            or not any(p is parameter for p in self._pass.parameters)
        ):
            return None
        parts = [gradients[0] for gradients in self._gradients([("", parameter)])]
        return (
            torch.cat(parts).reshape(-1, *parameter.shape)
            if parts
            else parameter.new_zeros(0, *parameter.shape)
        )

    def zero_grad(self, parameters: Iterable[Tensor]) -> None:
        if self._pass is not None and self._pass.is_back:
            self._pass = None

    def discard(self, parameters: Iterable[Tensor]) -> None:
        if self._pass is not None:
            self._pass.is_over = True
        self._pass = None
        self.passes.forget()

    def watch_loss(self) -> None:
        self.passes.watches_loss = True

    @property
    def loss_state(self) -> str:
        if self._has_loss:
            return "loss by construction"
        return f"loss {self.passes.loss.state}"

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._is_paused = True
        try:
            with one_record_only():  # with the random numbers that records draw
                yield
        finally:
            self._is_paused = False

    def use_stand_in(self) -> None:
        self.passes.uses_stand_in = True

    def remove(self) -> None:
        self._is_removed = True
        self.discard(())
        self.passes.remove()
        self.mapped.remove()
        attach(None, self._module)

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a private model takes along how to get rid of the hooks, and nothing of
        the data.
        """
        return {**self.__dict__, "_pass": None, "is_copy": True}

    def _is_enabled(self) -> bool:
        return not (self._is_paused or self._is_removed)

    def _gradients(self, named_parameters: Sequence[tuple[str, Tensor]]) -> Iterator[list[Tensor]]:
        """Per-record gradients as (records, numel) matrices, one chunk of records after another."""
        if self._is_removed:
            raise RuntimeError(REMOVED)
        require_no_ordinary_gradient(named_parameters)
        if {id(p) for p in self._trainable} != {
            id(p) for p in self._module.parameters() if p.requires_grad
        }:
            raise RuntimeError(COPIED)
        this = self._pass
        self.passes.require_one(this is not None)
        for name, p in named_parameters:
            if this is None or not this.is_back or not any(q is p for q in this.parameters):
                raise RuntimeError(UNUSED.format(name))
        assert this is not None
        if self.passes.has_stand_in or this.n == 0:
            return
        places = {id(p): k for k, p in enumerate(this.parameters)}
        wanted = [places[id(p)] for _, p in named_parameters]
        for gradients in this.gradients():
            yield [gradients[k].flatten(1) for k in wanted]


@dataclass(eq=False)
class _Pass:
    """One forward pass, to be run again with its gradients."""

    of_one: OfOne
    rows: list[Tensor]
    parameters: list[Tensor]
    n: int
    size: int  # records in a chunk
    random_state: list[Tensor]
    versions: list[int]
    found: list[Tensor] = field(default_factory=list)
    backprops: list[Tensor] = field(default_factory=list)
    is_back: bool = False
    is_over: bool = False

    def receive(self, backprops: Sequence[Tensor]) -> None:
        require_first_backward(self.is_back or self.is_over)
        self.backprops, self.is_back = [g.detach() for g in backprops], True

    def chunks(self) -> Iterator[list[Tensor]]:
        """The rows of some records at a time; one chunk without rows for an empty batch."""
        for start in range(0, max(self.n, 1), self.size):
            yield [t[start : start + self.size] for t in self.rows]

    def gradients(self) -> Iterator[list[Tensor]]:
        """Of each chunk, the per-record gradients of every parameter."""
        if [t._version for t in (*self.rows, *self.parameters)] != self.versions:
            raise RuntimeError(
                "an input or a parameter was changed in place between forward() and step(), which"
                " runs the records again: write into copies"
            )

        def loss(
            values: tuple[Tensor, ...], slices: tuple[Tensor, ...], backprops: tuple[Tensor, ...]
        ) -> tuple[Tensor, tuple[Tensor, ...]]:
            results = tuple(self.of_one(slices, values))
            terms = [
                (t * g).sum()
                for t, g in zip(results, backprops, strict=True)
                if t.is_floating_point()
            ]
            return torch.stack(terms).sum(), results

        of_chunk: Callable[..., Any] = vmap(
            grad(loss, has_aux=True), in_dims=(None, 0, 0), randomness="different"
        )
        values = tuple(p.detach() for p in self.parameters)
        starts = range(0, self.n, self.size)
        devices = list({t.device for t in self.rows if t.device.type == "cuda"})
        with torch.random.fork_rng(devices=devices), one_record_only():
            _set_random_state(self.random_state, self.rows)
            for start, slices in zip(starts, self.chunks(), strict=True):
                backprops = tuple(g[start : start + self.size] for g in self.backprops)
                gradients, again = of_chunk(values, tuple(slices), backprops)
                for t, first in zip(again, self.found, strict=True):
                    _require_same(t.detach(), first[start : start + self.size])
                yield list(gradients)


def _require_same(again: Tensor, first: Tensor) -> None:
    """Raise if records that are run again for their gradients come out differently: these
    would be gradients of something else.
    """
    tolerance = 2e-2 if again.dtype in (torch.float16, torch.bfloat16) else 1e-3
    is_close = torch.isclose(again, first, rtol=tolerance, atol=tolerance, equal_nan=True).reshape(
        len(first), -1
    )
    if not bool((is_close.all(1) | ~torch.isfinite(first).reshape(len(first), -1).all(1)).all()):
        raise RuntimeError(
            "the records, run again for their gradients, gave other outputs: a mode, autocast, the"
            " batch, a parameter or a random number of Python's or of a generator changed between"
            ' forward() and step(). Leave them alone, or take grad_sample_mode="bookkeeping".'
        )


class _Results(torch.autograd.Function):
    """The records' results, whose gradients are kept for the step."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, this: _Pass, *found: Tensor) -> tuple[Tensor, ...]:
        ctx.this = this
        ctx.like = found
        ctx.mark_non_differentiable(*(t for t in found if not t.is_floating_point()))
        return tuple(t.view_as(t) for t in found)

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
