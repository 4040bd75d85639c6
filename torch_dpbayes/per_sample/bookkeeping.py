"""Book-keeping: the sum of clipped per-sample gradients from one backward pass (Bu, Wang, Zha and
Karypis 2023).

The model runs as a map over records. Torch's own layers leave the map and run on the whole batch,
each row by itself, with detached parameters: autograd propagates through the layers but computes no
gradient of their parameters. Each layer stores its input and, in the backward pass, the gradient of
its output. Every record's norm and the clipped sum are computed from both
(:mod:`torch_dpbayes.per_sample.layers`). All other parameters take part in the map, with a copy for
each record.

An ordinary ``p.grad`` can therefore come only from a use that was not recorded. It is not clipped,
so it raises an error.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter, is_not
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ModelError, StepError
from . import layers
from .arithmetic import full_precision
from .contributions import Contribution, PerRecord, together
from .gradient_source import COPIED, GradientSource, require_first_backward
from .mapped_forward import Loss, MappedForward, ReplacedForward
from .nested import of_those_that_run
from .record_map import (
    CannotBeMapped,
    InnerTransform,
    OfOne,
    RecordMap,
    as_traced,
    require_no_modes,
)

_requires_grad, _anchor, _device = map(attrgetter, ("requires_grad", "anchor", "device"))


class UsedElsewhere(CannotBeMapped):
    """A layer runs inside the map in a way that book-keeping cannot record: with other parameters,
    or in one of the model's own transforms.
    """

    def __init__(self, text: str, parameters: Iterable[Tensor]) -> None:
        super().__init__(text)
        self.parameters = list(parameters)


class BookkeepingGradientSource(GradientSource):
    """Σ clip(g_i) from the inputs and output gradients of the layers.

    Args: as those of :class:`GradientSource`, and
        loss: ``(output, target) -> scalar``, which ``module.private_loss`` runs inside the map.

    **Privacy.** ‖Σ clip(g_i)‖ changes by at most C when a record is added or removed: row i of a
    layer's input, and of the gradient of its output, depends on record i alone.
    """

    _sees_layers = True

    def __init__(
        self,
        module: nn.Module,
        *,
        loss_reduction: str = "mean",
        assume_independent: bool = False,
        loss: Loss | None = None,
    ) -> None:
        super().__init__(module, loss_reduction, assume_independent=assume_independent)
        self.follows = not assume_independent
        self._is_paused = self.is_second_way = False
        # only forward passes of the current step may be backpropagated; discard() increases it
        self.step = 0
        self._noted: list[tuple[_Layer, Contribution | layers.Call]] = []
        self._gradients: dict[Tensor, Tensor] = {}  # of parameters that take part in the map
        self._held: list[tuple[str, Tensor, int]] = []  # tensors of layers, with their versions
        self._versions: list[tuple[str, Tensor, int]] = []  # parameters in the last forward pass
        self._layers = [
            _Layer(self, name, layer)
            for name, layer in module.named_modules()
            if self._sees_layers and layers.is_known(layer)
        ]
        self.record_map: RecordMap | _WholeBatch | None = None  # while a pass of the map runs
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._gelus = [_Gelu(m) for m in module.modules() if type(m).__name__ == "BloomGelu"]
        recorded = {p for layer in self._layers for p in layer.known.values()}
        in_map = [p for p in self._parameters if p not in recorded]
        self.mapped = MappedForward(module, self, in_map, loss)

    @property
    def is_recording(self) -> bool:
        """Whether a forward pass in training mode would be recorded."""
        return torch.is_grad_enabled() and not (self._is_paused or self._is_removed)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which no per-sample gradients are recorded."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def take_into_map(self, parameters: Iterable[Tensor]) -> bool:
        """Give every record a copy of these parameters, because they are used outside of their
        layer. Returns whether a layer recorded any of them before.
        """
        outside = set(parameters)
        moved = [layer for layer in self._layers if not outside.isdisjoint(layer.known.values())]
        for layer in moved:
            if layer.module is self.mapped.module:  # both replace the same forward
                self.mapped.original, self.mapped.own = layer.original, layer.own
            else:
                layer.remove()
            self._layers.remove(layer)
            self.mapped.add_direct(layer.known.values())
        return bool(moved)

    def recorded(self, named_parameters: Sequence[tuple[str, Tensor]]) -> Sequence[Contribution]:
        for name, p in named_parameters:
            if p.grad is not None:
                raise StepError(
                    f"parameter {name!r} has an ordinary gradient, which is not clipped: call the"
                    " whole model, use prior_std= instead of a penalty, and call"
                    " optimizer.zero_grad() after other backward passes.",
                    code="step-unclipped",
                )
        for name, t, version in (*self._held, *self._versions):
            if t._version != version:
                raise StepError(_WRITTEN.format(name, "backward() and step()"), code="step-changed")
        found: list[Contribution] = []
        calls: dict[_Layer, list[layers.Call]] = {}
        for layer, what in self._noted:
            if isinstance(what, tuple):
                calls.setdefault(layer, []).append(what)
            else:
                found.append(what)
        for layer, several in calls.items():
            found.append(layer.contribution(several))
        for p, g in self._gradients.items():
            found.append(PerRecord({p: g}))
        uses: list[int] = []
        for contribution in found:
            uses += map(id, contribution.parameters)
        if len(set(uses)) < len(uses):
            shared = [c for c in found if any(uses.count(id(p)) > 1 for p in c.parameters)]
            found = [*(c for c in found if c not in shared), together(shared)]
        return found

    def zero_grad(self, parameters: Iterable[Tensor]) -> None:
        self._noted.clear()
        self._held.clear()
        self._gradients.clear()

    def discard(self, parameters: Iterable[Tensor]) -> None:
        self.zero_grad(parameters)
        self._gradients, self._versions = {}, []
        self.step += 1
        self.passes = self.spare = 0

    def remove(self) -> None:
        super().remove()
        self.mapped.remove()
        for layer in (*self._layers, *self._gelus):
            layer.remove()

    def _refuse_gradient(self, parameter: Tensor) -> None:
        if not (self._is_paused or self._is_removed):
            parameter.grad = None
            raise StepError(
                "a parameter of the private model got an ordinary gradient, which is not clipped:"
                " train on the private loader's batches in training mode, and use"
                " torch.autograd.grad for gradients of inputs.",
                code="step-unclipped",
            )

    def over_records(
        self, of_one: OfOne, rows: Sequence[Tensor], direct: Sequence[Tensor], n: int
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Apply ``of_one`` to each of n records, in a map in which layers see the whole batch. The
        slices of a record are its rows, then its own copies of ``direct``, the parameters that no
        layer records. Returns the results, and the leaves of the autograd graph.
        """
        if self.is_copy:
            raise StepError(COPIED, code="model-copied")
        require_no_modes()
        parameters = self._parameters
        leaves = [*map(_anchor, self._layers), *filter(_requires_grad, parameters)]
        self._versions = [("a parameter", p, p._version) for p in parameters]
        try:
            # a single layer, which draws no random numbers, needs no map
            is_one_layer = len(self._layers) == 1 and self._layers[0].module is self.mapped.module
            if is_one_layer and len(rows) == 1 and self.mapped.loss is None and self.follows:
                self.record_map = _WholeBatch()
                with as_traced():
                    return of_one(rows), leaves
            hides = *rows, *parameters
            drawn = numbers_outside() if self.is_in_parts else None
            with self.randomness(map(_device, hides), hides):
                self._gradients = gradients = dict[Tensor, Tensor]()
                anchors, copies = list[Tensor](), list[Tensor]()
                for p in direct:
                    anchor = torch.zeros((), requires_grad=True)
                    receive = partial(self._receive, gradients, p)
                    copy: Tensor = _Copies.apply(anchor, p.detach(), n, receive)
                    anchors.append(anchor)
                    copies.append(copy)
                    self._versions.append(("a parameter", copy, copy._version))
                self.record_map = record_map = RecordMap(
                    n, is_second_way=self.is_second_way, is_part=self.is_in_parts
                )
                found = record_map(of_one, rows, copies)
            if self.is_in_parts and drawn != numbers_outside():
                raise CannotBeMapped(
                    "it draws random numbers of Python or NumPy, which differ between parts of a"
                    " batch: draw torch.rand(len(x)), or leave out BatchMemoryManager and ranks"
                )
        finally:
            self.record_map = None
        if kept := record_map.kept():
            raise ModelError(self.mapped.where(kept), code="model-kept")
        return found, [*anchors, *leaves]

    def _receive(self, found: dict[Tensor, Tensor], p: Tensor, rows: Tensor) -> None:
        """Store the gradients of a parameter's copies. A later use of them adds to the first."""
        require_first_backward(False)
        found[p] = found[p] + rows if p in found else rows
        self._held.append(("the gradient of a parameter", rows, rows._version))

    def note(self, layer: _Layer, what: Contribution | layers.Call) -> None:
        """Record what the backward pass found for a layer."""
        self._noted.append((layer, what))
        for t in what if isinstance(what, tuple) else what.held:
            self._held.append((layer.tensors, t, t._version))

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a private model can remove the hooks. It contains no data."""
        lists = ("_handles", "_noted", "_held", "_versions")
        empty: dict[str, Any] = {k: [] for k in lists}
        # the number of records in a batch is private
        empty |= {"_gradients": {}, "batch": None, "spare": 0}
        return {**self.__dict__, **empty, "is_copy": True}


class VmapGradientSource(BookkeepingGradientSource):
    """Every parameter takes part in the map, with a copy for each record; layers have no kernels.
    It needs memory for a gradient of each record, and more time than book-keeping.

    Args: as those of :class:`BookkeepingGradientSource`.

    **Privacy.** As for :class:`BookkeepingGradientSource`. Record i's gradient is computed from
    record i, its random numbers and the gradient of its outputs.
    """

    _sees_layers = False


def numbers_outside() -> Any:
    """The states of Python's and NumPy's random numbers, which a pass has once for all records."""
    numpys: Any = np.random.get_state()
    return random.getstate(), numpys[1].tobytes(), numpys[2:]


class _WholeBatch:
    """Replaces the map if the whole model is one layer, which would leave the map anyway."""

    @staticmethod
    def call_batched(run: Callable[..., Tensor], tensors: Sequence[Tensor]) -> Tensor:
        with torch._C.DisableTorchFunction():
            return of_those_that_run(run, tensors)


class _Gelu(ReplacedForward):
    """Replaces Bloom's GELU, an autograd.Function of the old style."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")


class _Layer(ReplacedForward):
    """One layer of a private model: runs it on detached parameters, and records its input and the
    gradient of its output.
    """

    def __init__(self, source: BookkeepingGradientSource, name: str, module: nn.Module) -> None:
        self.source, self.name, self.type = source, name, type(module)
        self.kind = layers.KINDS[self.type]
        self.tensors = f"the input of layer {name!r}, or the gradient of its output,"
        self.known = {n: p for n, p in module._parameters.items() if p is not None}
        self.calls = self.calls_of_step = 0
        self.anchor = torch.zeros((), requires_grad=True)
        self.settings = layers.settings_of(module)  # the model could put records' tensors there
        super().__init__(module)

    @torch.compiler.disable  # a backend would be given whole batches
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        record_map = self.source.record_map
        if record_map is None or not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        own, known = vars(self.module), self.known
        if any(map(is_not, map(own["_parameters"].get, known), known.values())):
            if self.source.mapped.is_checking:  # by functional_call, most likely
                raise self._used_elsewhere(COPIED)
            raise StepError(COPIED, code="model-copied")
        with torch._C.DisableTorchFunction():  # attributes are slow to read through a map
            is_trained = any(map(_requires_grad, known.values()))
        if not is_trained:
            return self.original(*args, **kwargs)
        given = (*args, *kwargs.values())
        if len(given) != 1 or not isinstance(given[0], Tensor):
            raise self._used_elsewhere("with arguments besides its input")
        is_changed = any(map(is_not, map(own.get, self.settings), self.settings.values()))
        is_changed |= type(self.module) is not self.type
        if is_changed or self.type.forward is not self.kind.forward:
            raise StepError(_CHANGED.format(self.name), code="step-changed")
        try:
            return record_map.call_batched(self._record, given)
        except InnerTransform as error:
            raise self._used_elsewhere(str(error)) from error

    def _used_elsewhere(self, how: str) -> UsedElsewhere:
        return UsedElsewhere(how, self.known.values())

    def _record(self, whole: Tensor) -> Tensor:
        """Run the whole batch at once. If a record has several rows, each row is one call."""
        kind, of_record = self.kind, whole.shape[1:]
        of_row, rows = kind.row_dimensions, None
        if not isinstance(of_row, int):
            of_row = of_row(self.module, of_record)
        # otherwise there is no dimension for rows, or they are positions of the record
        if len(of_record) > of_row and (of_record[0] == 1 or not kind.has_positions):
            rows = of_record[0]
            whole = whole.squeeze(1) if rows == 1 else whole.flatten(0, 1)
        given = whole.clone() if whole.is_inference() else whole
        values = {name: p.detach() for name, p in self.known.items()}
        out: Tensor = kind.run(self.module, given, values.get("weight"), values.get("bias"))
        # the hook is on the base: an in-place operation on a view would lose a hook on the view
        base, shape = out if out._base is None else out._base, out.shape
        source, step, is_done = self.source, self.source.step, False
        inputs, version = [given.detach()], given._version
        if self.calls_of_step != step:
            self.calls, self.calls_of_step = 0, step
        self.calls += 1

        def receive(backprops: Tensor) -> None:
            """Receive the gradient of the output."""
            nonlocal is_done
            require_first_backward(is_done or step != source.step)
            if inputs[0]._version != version:
                error = _WRITTEN.format(self.tensors, "forward() and backward()")
                raise StepError(error, code="step-changed")
            for name, p in self.known.items():
                if p._backward_hooks:
                    raise StepError(
                        f"{name!r} of layer {self.name!r} has a hook on its gradient"
                        " (register_hook), which is not called: remove it, or freeze the parameter"
                        " with requires_grad_(False)",
                        code="model-gradient-hook",
                    )
            is_done, g = True, backprops.detach()
            a, g = inputs.pop(), g if g.shape == shape else g.reshape(shape)
            calls = [(a, g)]
            if rows is not None and rows > 1:
                calls = [(a[k::rows], g[k::rows]) for k in range(rows)]
            for what in [self.contribution(calls)] if self.calls == 1 else calls:
                source.note(self, what)

        if out.requires_grad:
            base.register_hook(receive)
        else:
            start: Tensor = _Start.apply(base, self.anchor, receive)
            out = start if base is out else start.view(shape)
        if rows is None:
            return out
        return out.unsqueeze(1) if rows == 1 else out.unflatten(0, (-1, rows))

    def contribution(self, calls: Sequence[layers.Call]) -> Contribution:
        with full_precision(calls[0][1].device):
            return self.kind.kernel(self.module, calls)


class _Start(torch.autograd.Function):
    """The start of autograd's graph: the output of a layer whose input needs no gradient."""

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, _anchor: Tensor, receive: Callable[[Tensor], None]
    ) -> Tensor:
        ctx.mark_dirty(out)
        ctx.receive = receive
        return out

    @staticmethod
    def backward(ctx: Any, backprops: Tensor) -> tuple[None, None, None]:
        ctx.receive(backprops)
        return None, None, None


class _Copies(torch.autograd.Function):
    """A copy of a parameter for each record. Its gradient is stored as autograd makes it: for a
    leaf, autograd would first put its entries in order, which takes longer than all else.
    """

    @staticmethod
    def forward(
        ctx: Any, _anchor: Tensor, value: Tensor, n: int, receive: Callable[[Tensor], None]
    ) -> Tensor:
        ctx.receive = receive
        # memory of its own, for the model may write into it; no view, which refuses that with an
        # error of autograd's
        rows = value.new_empty_strided((n, *value.shape), (0, *torch.empty_like(value).stride()))
        rows[0] = value
        return rows

    @staticmethod
    def backward(ctx: Any, rows: Tensor) -> tuple[None, None, None, None]:
        ctx.receive(rows)
        return None, None, None, None


_WRITTEN = (
    "{} was changed in place between {}: write x = x + y instead of x += y, F.relu(x) instead of"
    " F.relu_(x); change parameters before the forward pass or after the step"
)
_CHANGED = (
    "the class of layer {!r}, its forward() or a setting (eps, stride) changed after the model"
    " was made private: undo this, or call make_private again"
)
