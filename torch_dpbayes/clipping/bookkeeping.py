"""Book-keeping: the sum of clipped per-record gradients from one backward pass (Bu, Wang, Zha and
Karypis 2023).

While a model runs in training mode, its layers see their parameters detached, so that autograd
propagates through them but computes no gradient of theirs. Each layer notes what goes in and, on
the way back, the gradient of what came out; from both follow every record's norm and the clipped
sum (:mod:`torch_dpbayes.clipping.layers`), in place of the sum that autograd would have computed,
and not in addition to it.

An ordinary ``p.grad`` can therefore come only from a use that was not noted: a weight in
``torch.nn.functional``, a penalty in the loss, a part of the model called by itself. It is never
clipped, and the step raises.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from inspect import isbuiltin
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from opacus.grad_sample import GradSampleHooks
from opacus.layers.dp_rnn import DPRNNBase, RNNLinear
from torch import Tensor, nn

from . import layers
from .contributions import LARGEST_CANCELLATION, Contribution, PerRecord, Product, together
from .gradient_source import (
    COPIED,
    DISAGREE,
    PACKED,
    REMOVED,
    UNUSED,
    ForwardPasses,
    GradientSource,
    add_clipped,
    joint_norm_of_parts,
    require_first_backward,
    require_no_ordinary_gradient,
)
from .mapped_forward import MappedForward, OfOne
from .nested import map_tensors, tensors_in
from .record_map import InnerTransform, RecordMap, attention_as_in_maps
from .replaced_forward import ReplacedForward


class UsedElsewhere(RuntimeError):
    """A layer runs inside the map as book-keeping cannot follow it: with other parameters, or in a
    transform of the model's own.
    """

    def __init__(self, text: str, parameters: Iterable[Tensor]) -> None:
        super().__init__(text)
        self.parameters = list(parameters)


class BookkeepingGradientSource(GradientSource):
    """Σ clip(g_i) from the inputs and output gradients of the layers.

    Args:
        module: the model to record; it stays the user's own object.
        loss_reduction: how the loss reduces over the batch, ``"mean"`` or ``"sum"``.
        clipping_kernels: the way of computing for a layer by its name, in place of the one that the
            cost model takes: ``"gram"`` or ``"instantiate"`` for linear layers, ``"gram"``,
            ``"unfold"``, ``"grouped"`` or ``"loop"`` for convolutions.

        is_mapped: run the model as a map over records. Layers without a kernel then take part in
            the map, with a copy of their parameters for each record.
        unrecorded: names of parameters that are used elsewhere than in their own layer; they too
            get a copy for each record. For maps only.
        loss: ``(output, *targets) -> scalar``, which :meth:`private_loss` runs inside the map.

    Raises:
        ValueError: no per-record gradients can be had of a layer, or ``clipping_kernels`` does not
            fit the model.

    **Privacy.** ‖Σ clip(g_i)‖ changes by at most C when a record is added or removed, provided that
    what goes into a layer and the gradient of what comes out depend, in record i's row, on record i
    alone. A map makes that so, up to the loss; otherwise ``PrivacyEngine.make_private`` checks what
    can be checked of it.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        loss_reduction: str = "mean",
        clipping_kernels: Mapping[str, str] | None = None,
        is_mapped: bool = False,
        unrecorded: Iterable[str] = (),
        loss: Callable[..., Tensor] | None = None,
    ) -> None:
        super().__init__(module, loss_reduction, has_loss=loss is not None)
        # which forward passes may still be backpropagated; grows when they are forgotten
        self.step = 0
        self._noted: list[tuple[_Layer | Tensor, Contribution | layers.Call]] = []
        self._held: list[tuple[_Layer, Tensor, int]] = []  # and its version
        outside: set[Tensor] = {
            p for name, p in module.named_parameters() if name in set(unrecorded)
        }
        found = list(_trusted(module, outside) if is_mapped else _recordable(module))
        ways = _checked_ways(dict(found), clipping_kernels or {})
        self._layers: list[_Layer] = []
        for name, layer in found:
            try:
                self._layers.append(_Layer(self, name, layer, ways.get(name)))
            except NotImplementedError as error:
                for done in self._layers:
                    done.remove()
                raise ValueError(
                    f"there are no per-record gradients for layer {name!r}"
                    f" ({type(layer).__name__}): {error}. Replace it."
                ) from error
        recorded = {p for layer in self._layers for _, _, p in layer.known if p.requires_grad}
        self._direct = (
            [
                (name, p)
                for name, p in module.named_parameters()
                if p.requires_grad and p not in recorded
            ]
            if is_mapped
            else []
        )
        if is_mapped:
            self.independence = "by construction"
        self.record_map: RecordMap | None = None  # while a pass of the map runs
        # whose rows are known to be apart
        is_layer = len(self._layers) == 1 and self._layers[0].module is module
        self.mapped = (
            MappedForward(module, self, [p for _, p in self._direct], loss)
            if is_mapped and (loss or not is_layer)
            else None
        )
        others = sorted(
            {
                type(layer.module).__name__
                for layer in self._layers
                if layer.kernel is layers.any_other
            }
        )
        if others:
            warnings.warn(
                f"there is no book-keeping kernel for {', '.join(others)}: their per-record"
                " gradients are instantiated by Opacus, which takes more time and memory",
                stacklevel=2,
            )
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        self.passes: ForwardPasses = ForwardPasses(
            module, self._is_enabled, loss_reduction, partial(self.discard, ())
        )
        self._attach()

    def add_clipped_sum(
        self,
        named_parameters: Sequence[tuple[str, Tensor]],
        max_grad_norm: float,
        out: Sequence[Tensor],
        *,
        scale: Tensor | None = None,
        second_moment: Tensor | None = None,
    ) -> int:
        with torch.no_grad(), _full_precision(out[0].device):
            contributions = self._contributions(named_parameters)
            n = contributions[0].records
            if self.passes.has_stand_in or n == 0:
                return 0
            if scale is not None or (second_moment is not None and second_moment.dim() > 1):
                return add_clipped(
                    self._per_record(named_parameters, contributions),
                    max_grad_norm,
                    out,
                    scale,
                    second_moment,
                )
            norm = self._norm(contributions, max_grad_norm)
            factor = torch.full_like(norm, max_grad_norm).div_(norm).clamp_max_(1.0)
            # 0·inf is nan: a record that is not finite has to be cut out, not scaled away. So has
            # one so large that a subnormal factor is rounded up. Squares overflow before either;
            # where only they do, no record is found to be cut out.
            if max_grad_norm < _SMALL_BOUND or not math.isfinite(norm.dot(norm)):
                kept = factor >= torch.finfo(factor.dtype).tiny
                factor = torch.where(kept, factor, 0.0)
                for contribution in contributions:
                    contribution.keep_only(kept)
            into = {p: o for (_, p), o in zip(named_parameters, out, strict=True)}
            for contribution in contributions:
                contribution.add_sum(factor, into)
            if second_moment is not None:
                pieces = second_moment.split([p.numel() for _, p in named_parameters])
                squares = {p: o for (_, p), o in zip(named_parameters, pieces, strict=True)}
                for contribution in contributions:
                    contribution.add_squares(factor, squares)
            return n

    @torch.no_grad()
    def norms(self, named_parameters: Sequence[tuple[str, Tensor]]) -> Tensor:
        contributions = self._contributions(named_parameters)
        with _full_precision(contributions[0].parameters[0].device):
            rows = 0 if self.passes.has_stand_in else contributions[0].records
            return self._norm(contributions, 0.0)[:rows].float()

    @torch.no_grad()
    def per_record_gradients(self, parameter: Tensor) -> Tensor | None:
        for contribution in self._merged():
            if any(p is parameter for p in contribution.parameters):
                return contribution.per_record()[parameter].reshape(-1, *parameter.shape)
        return None

    def zero_grad(self, parameters: Iterable[Tensor]) -> None:
        self._noted.clear()
        self._held.clear()

    def discard(self, parameters: Iterable[Tensor]) -> None:
        self._noted.clear()
        self._held.clear()
        self.step += 1
        self.passes.forget()

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._is_paused = True
        try:
            with nullcontext() if self.mapped is None else attention_as_in_maps():
                yield
        finally:
            self._is_paused = False

    def remove(self) -> None:
        super().remove()
        if self.mapped is not None:
            self.mapped.remove()
        for layer in self._layers:
            layer.remove()

    def over_records(
        self, of_one: OfOne, rows: Sequence[Tensor], direct: Sequence[Tensor], n: int
    ) -> Sequence[Tensor]:
        """A map in which layers see the whole batch, and each record has its own copy of the
        parameters of everything else.
        """
        copies = [
            _Copies.apply(
                p.detach(),
                torch.zeros((), device=p.device, requires_grad=True),
                n,
                self._receiver(p),
            )
            for p in direct
        ]
        self.record_map = record_map = RecordMap(n)
        try:
            found = record_map(
                lambda inside: of_one(inside[: len(rows)], inside[len(rows) :]), [*rows, *copies]
            )
        finally:
            self.record_map = None
        record_map.require_nothing_kept()
        return found

    def _receiver(self, parameter: Tensor) -> Callable[[Tensor], None]:
        """What the backward pass calls with a parameter's gradients, a row for each record."""
        step, version, is_done = self.step, parameter._version, False

        def receive(gradients: Tensor) -> None:
            nonlocal is_done
            require_first_backward(is_done or step != self.step)
            if parameter._version != version:
                raise RuntimeError(
                    "a parameter was changed between forward() and backward(): step before both, or"
                    " after both"
                )
            is_done = True
            self._noted.append((parameter, PerRecord({parameter: gradients.detach()})))

        return receive

    def note(self, layer: _Layer, what: Contribution | layers.Call) -> None:
        """The backward pass reached a layer."""
        self._noted.append((layer, what))
        self._held += [
            (layer, t, t._version)
            for t in (what.held() if isinstance(what, Contribution) else layer.needed(what))
        ]

    def is_recording(self) -> bool:
        """Inside a forward pass in training mode, or where a backward pass repeats a part of
        it (activation checkpointing).
        """
        return self.passes.is_open or (
            self.passes.count > 0 and self._is_enabled() and torch._C._current_graph_task_id() != -1
        )

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a private model takes along how to get rid of the hooks, and nothing of
        the data.
        """
        return {**self.__dict__, "_noted": [], "_held": [], "is_copy": True}

    def _norm(self, contributions: Sequence[Contribution], floor: float) -> Tensor:
        """Every record's norm over everything that was recorded; norms below ``floor`` are
        not clipped.
        """
        norm = joint_norm_of_parts([contribution.norm() for contribution in contributions])
        sizes = [
            (c, size)
            for c in contributions
            if isinstance(c, Product) and (size := c.size()) is not None
        ]
        if not sizes:
            return norm
        limit = LARGEST_CANCELLATION * norm.clamp(min=floor)
        above = torch.stack([size > limit for _, size in sizes])
        if not bool(above.any()):
            return norm
        for (contribution, _), which in zip(sizes, above, strict=True):
            if bool(which.any()):
                contribution.set_apart(which)
        return joint_norm_of_parts([contribution.norm() for contribution in contributions])

    def _per_record(
        self, named_parameters: Sequence[tuple[str, Tensor]], contributions: Sequence[Contribution]
    ) -> list[Tensor]:
        found = {
            p: g for contribution in contributions for p, g in contribution.per_record().items()
        }
        return [found[p] for _, p in named_parameters]

    def _contributions(self, named_parameters: Sequence[tuple[str, Tensor]]) -> list[Contribution]:
        """Of the last backward pass, each parameter in one of them; or an error that says why
        there are none.
        """
        if self._is_removed:
            raise RuntimeError(REMOVED)
        require_no_ordinary_gradient(named_parameters)
        if any(p.requires_grad for p in self._frozen):
            raise RuntimeError(COPIED)
        self.passes.require_one(bool(self._noted))
        for layer, t, version in self._held:
            if t._version != version:
                raise RuntimeError(
                    f"the input of layer {layer.name!r}, the gradient of its output or a parameter"
                    " was changed in place between backward() and step(): write into them after"
                    " the step, or into copies."
                )
        contributions = self._merged()
        # tensors are slow to hash
        found = {id(p) for contribution in contributions for p in contribution.parameters}
        for name, p in named_parameters:
            if id(p) not in found:
                raise RuntimeError(UNUSED.format(name))
        if len({contribution.records for contribution in contributions}) > 1:
            raise RuntimeError(DISAGREE)
        return contributions

    def _merged(self) -> list[Contribution]:
        """One contribution for each layer, and one for layers that share a parameter."""
        if len(self._noted) == 1 and isinstance(self._noted[0][1], Contribution):
            return [self._noted[0][1]]
        of_layer: dict[_Layer | Tensor, list[Contribution | layers.Call]] = {}
        for layer, what in self._noted:
            of_layer.setdefault(layer, []).append(what)
        merged: list[Contribution] = []
        for layer, noted in of_layer.items():
            calls = [what for what in noted if not isinstance(what, Contribution)]
            parts = [what for what in noted if isinstance(what, Contribution)]
            if calls:
                assert isinstance(layer, _Layer)
                parts.append(layer.contribution(calls))
            merged.append(together(parts))
        if len(merged) > 1 and sum(len(c.parameters) for c in merged) > len(
            {p for c in merged for p in c.parameters}
        ):
            merged = _by_shared_parameter(merged)
        self._noted = [(layer, c) for layer, c in zip(of_layer, merged, strict=False)]
        return merged


class _Layer(ReplacedForward):
    """One layer of a private model: runs it on detached parameters and notes what its
    gradients follow from.
    """

    def __init__(
        self, source: BookkeepingGradientSource, name: str, module: nn.Module, way: str | None
    ) -> None:
        self.source, self.name, self.way = source, name, way
        kind = layers.kind_of(module)
        self.kernel = layers.any_other if kind is None else kind.kernel
        self.is_whole = kind is None and type(module) not in GradSampleHooks.GRAD_SAMPLERS
        owners = [m for m in (module.modules() if self.is_whole else [module]) if m._parameters]
        self.known = [(m, n, p) for m in owners for n, p in m._parameters.items() if p is not None]
        self.calls = self.calls_of_step = 0
        self.anchor = torch.zeros((), requires_grad=True)
        super().__init__(module, owners)

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and self.source.is_recording()):
            return self.original(*args, **kwargs)
        is_trainable, is_changed = False, self.source.is_copy
        for owner, name, p in self.known:
            is_trainable |= p.requires_grad
            is_changed |= owner._parameters.get(name) is not p
        if is_changed and self.source.record_map is not None:  # by functional_call, most likely
            raise UsedElsewhere(COPIED, (p for _, _, p in self.known))
        if is_changed:
            raise RuntimeError(COPIED)
        if not is_trainable:
            return self.original(*args, **kwargs)
        if self.source.record_map is not None:
            return self._forward_in_map(self.source.record_map, args, kwargs)
        return self._record(args, kwargs)

    def _forward_in_map(self, record_map: RecordMap, args: Any, kwargs: Any) -> Tensor:
        """The whole batch at once; several rows of one record are several calls."""
        inputs = list(tensors_in((args, kwargs)))
        is_one, is_several = layers.rows_of(self.module, inputs[0])

        def on_batch(*given: Tensor) -> Tensor:
            n, rows = given[0].shape[:2] if is_one or is_several else (len(given[0]), 1)
            if is_one:
                given = tuple(t.squeeze(1) for t in given)
            elif is_several:
                given = tuple(t.flatten(0, 1) for t in given)
            remaining = iter(given)
            whole_args, whole_kwargs = map_tensors((args, kwargs), lambda _: next(remaining))
            out = self._record(whole_args, whole_kwargs, rows)
            if is_one:
                return out.unsqueeze(1)
            return out.unflatten(0, (n, rows)) if is_several else out

        try:
            return record_map.on_batch(on_batch, inputs)
        except InnerTransform as error:
            raise UsedElsewhere(str(error), (p for _, _, p in self.known)) from error

    def _record(self, args: Any, kwargs: Any, rows: int = 1) -> Any:
        inputs = list(tensors_in((args, kwargs)))
        call = _Call(self, inputs, args, kwargs, rows)
        has_graph = any(t.requires_grad for t in inputs)
        if has_graph:
            out = self._run_detached({}, args, kwargs)
        else:
            with torch.no_grad():
                out = self.original(*args, **kwargs)
        if not isinstance(out, Tensor):
            raise RuntimeError(
                f"layer {self.name!r} returns {type(out).__name__}: a layer with parameters of its"
                " own must return one tensor"
            )
        is_input = any(out is t for t in inputs)
        if has_graph and out.requires_grad:
            out = out.view_as(out) if is_input else out
            out.register_hook(call.receive)
            return out
        return _Start.apply(
            out.clone() if is_input or out._base is not None else out, self.anchor, call
        )

    def again(
        self, args: Any, kwargs: Any, values: Mapping[Tensor, Tensor], inputs: Sequence[Tensor]
    ) -> Any:
        """The same call with other numbers."""
        tensors = iter(inputs)
        args, kwargs = map_tensors((args, kwargs), lambda _: next(tensors))
        return self._run_detached(values, args, kwargs)

    def _run_detached(self, values: Mapping[Tensor, Tensor], args: Any, kwargs: Any) -> Any:
        taken: dict[Tensor, Tensor] = {
            p: values[p] if p in values else p.detach() for _, _, p in self.known
        }
        return self.run_with(taken, args, kwargs)

    def needed(self, call: layers.Call) -> list[Tensor]:
        """What must not change until :meth:`contribution`."""
        return [
            *call.inputs,
            call.backprops,
            *((p for _, _, p in self.known) if self.is_whole else ()),
        ]

    def contribution(self, calls: Sequence[layers.Call]) -> Contribution:
        records = {call.backprops.shape[0] for call in calls}
        if 0 in records:
            return PerRecord(
                {p: p.new_zeros(0, p.numel()) for _, _, p in self.known if p.requires_grad}
            )
        if len(records) > 1:
            raise RuntimeError(PACKED if isinstance(self.module, RNNLinear) else DISAGREE)
        try:
            return self.kernel(self.module, calls, self.way)
        except Exception as error:
            raise RuntimeError(
                f"layer {self.name!r} has no per-record gradients here: {error}"
            ) from error


class _Call:
    """One call of a layer, waiting for the gradient of what came out."""

    __slots__ = ("again", "inputs", "is_done", "layer", "rows", "step", "versions", "weights")

    def __init__(
        self, layer: _Layer, inputs: Sequence[Tensor], args: Any, kwargs: Any, rows: int
    ) -> None:
        self.layer, self.step, self.is_done, self.rows = layer, layer.source.step, False, rows
        self.inputs = [t.clone() if t.is_inference() else t.detach() for t in inputs]
        self.versions = [t._version for t in self.inputs]
        # without the tensors, which would keep the graph alive
        self.again = (
            partial(layer.again, *map_tensors((args, kwargs), lambda t: _EMPTY))
            if layer.is_whole
            else _unneeded
        )
        self.weights = [p._version for _, _, p in layer.known]
        if layer.calls_of_step != self.step:
            layer.calls, layer.calls_of_step = 0, self.step
        layer.calls += 1

    def receive(self, backprops: Tensor) -> None:
        layer, source = self.layer, self.layer.source
        require_first_backward(self.is_done or self.step != source.step)
        for t, version in zip(self.inputs, self.versions, strict=True):
            if version != t._version:
                raise RuntimeError(
                    f"the input of layer {layer.name!r} was changed in place after the layer saw"
                    " it: write x = x + y instead of x += y, and F.relu(x) instead of F.relu_(x)."
                )
        for (_, name, p), version in zip(layer.known, self.weights, strict=True):
            if version != p._version:
                raise RuntimeError(
                    f"{name!r} of layer {layer.name!r} was changed between forward() and"
                    " backward(), so these are the gradients of neither: step, load and"
                    " re-initialise before the forward pass or after the backward pass."
                )
            if p._backward_hooks or p._post_accumulate_grad_hooks:
                raise RuntimeError(
                    f"{name!r} of layer {layer.name!r} has a hook on its gradient (register_hook),"
                    " which is not called: there is no such gradient. Remove the hook; to leave"
                    " parameters as they are, freeze them with requires_grad_(False)."
                )
        self.is_done = True
        backprops = backprops.detach()
        if self.rows == 1:
            calls = [layers.Call(self.inputs, backprops, self.again)]
        else:
            calls = [
                layers.Call(
                    [t[k :: self.rows] for t in self.inputs], backprops[k :: self.rows], self.again
                )
                for k in range(self.rows)
            ]
        self.inputs = []
        if layer.calls > 1:
            for call in calls:
                source.note(layer, call)
            return
        with _full_precision(backprops.device):
            source.note(layer, layer.contribution(calls))


class _Copies(torch.autograd.Function):
    """A parameter with a row for each record; what comes back is every record's gradient."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, _anchor: Tensor, n: int, receive: Callable[[Tensor], None]
    ) -> Tensor:
        ctx.receive = receive
        return value.expand(n, *value.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None, None, None]:
        ctx.receive(gradients[0])
        return None, None, None, None


class _Start(torch.autograd.Function):
    """Where autograd's graph begins: the output of a layer whose input needs no gradient."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, _anchor: Tensor, call: _Call) -> Tensor:
        ctx.mark_dirty(out)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, backprops: Tensor) -> tuple[None, None, None]:
        ctx.call.receive(backprops)
        return None, None, None


def _trusted(module: nn.Module, outside: set[Tensor]) -> Iterator[tuple[str, nn.Module]]:
    """Layers of torch's own, unchanged, whose rows are known to be computed one by one; none
    that has a parameter ``outside``.
    """
    for name, layer in module.named_modules():
        own = [p for p in layer._parameters.values() if p is not None]
        is_own = type(layer).forward is getattr(layer.forward, "__func__", None)
        if (
            is_own
            and not _has_code_of_its_own(layer)
            and not _is_exchanged(type(layer))
            and any(p.requires_grad for p in own)
            and outside.isdisjoint(own)
            and layers.kind_of(layer) is not None
        ):
            yield name, layer


def _has_code_of_its_own(layer: nn.Module) -> bool:
    """Whether a function of the layer's class was exchanged on the layer, or a parameter's class
    brings code along: either would see the whole batch.
    """
    return any(
        callable(value) and callable(getattr(type(layer), name, None))
        for name, value in vars(layer).items()
    ) or any(type(p) not in (Tensor, nn.Parameter, type(None)) for p in layer._parameters.values())


def _is_exchanged(kind: type) -> bool:
    """Whether somebody exchanged a function of a layer's class, or one of torch.nn.functional that
    such layers call: it would see the whole batch.
    """
    own = [
        (f, vars(sys.modules[cls.__module__]))
        for cls in kind.__mro__[: kind.__mro__.index(nn.Module)]
        for name, f in vars(cls).items()
        if isinstance(f, FunctionType) or name == "forward"
    ]
    functions = [(f, vars(F)) for f in map(F.__dict__.get, layers.FUNCTIONS) if not isbuiltin(f)]
    return any(getattr(f, "__globals__", None) is not home for f, home in (*own, *functions))


def _recordable(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The layers that have trainable parameters of their own; where there is nothing to
    compute those with but functorch, with all beneath.
    """
    has_own = any(p is not None and p.requires_grad for p in module._parameters.values())
    # which lists the parameters of its cells as its own
    if has_own and not isinstance(module, DPRNNBase):
        yield name, module
        if layers.kind_of(module) is None and type(module) not in GradSampleHooks.GRAD_SAMPLERS:
            return
    for child, layer in module.named_children():  # each once
        yield from _recordable(layer, f"{name}.{child}" if name else child)


def _checked_ways(found: Mapping[str, nn.Module], given: Mapping[str, str]) -> Mapping[str, str]:
    for name, way in given.items():
        kind = layers.kind_of(found[name]) if name in found else None
        allowed = kind.ways if kind else ()
        if way not in allowed:
            raise ValueError(
                f"clipping_kernels: {name!r} cannot be computed by {way!r}; "
                + (
                    f"it takes {' or '.join(map(repr, allowed))}"
                    if allowed
                    else "it is not a trainable linear or convolution layer of this model"
                )
            )
    return given


def _by_shared_parameter(contributions: Sequence[Contribution]) -> list[Contribution]:
    groups: list[list[Contribution]] = []
    for contribution in contributions:
        mine = set(contribution.parameters)
        joined = [contribution]
        for group in [g for g in groups if any(mine & set(c.parameters) for c in g)]:
            groups.remove(group)
            joined += group
        groups.append(joined)
    for group in groups:
        if len({c.records for c in group}) > 1:
            raise RuntimeError(DISAGREE)
    return [together(group) for group in groups]


def _unneeded(_values: Mapping[Tensor, Tensor], _inputs: Sequence[Tensor]) -> Tensor:
    raise AssertionError("a kernel needs no second run")


_EMPTY = torch.empty(0)

# Products of float32 that torch may compute in TensorFloat-32 or bfloat16, by device. Read without
# the properties, which are slow.
_PRODUCTS = {
    "cpu": (("mkldnn", "matmul"), ("mkldnn", "conv")),
    "cuda": (("cuda", "matmul"), ("cuda", "conv")),
}
_FULL = frozenset(("ieee", "none"))
_SMALL_BOUND = 1e-18  # below it factors of norms whose squares do not overflow may be subnormal
_AS_IT_IS = nullcontext()
if hasattr(torch._C, "_get_fp32_precision_getter"):
    _precision_of: Callable[[str, str], Any] = torch._C._get_fp32_precision_getter
    _set_precision_of: Callable[[str, str, Any], Any] = torch._C._set_fp32_precision_setter
else:  # torch before 2.9

    def _precision_of(backend: str, operation: str) -> Any:
        return "tf32" if backend == "cuda" and _flags(operation).allow_tf32 else "ieee"

    def _set_precision_of(_backend: str, operation: str, precision: Any) -> None:
        _flags(operation).allow_tf32 = precision != "ieee"

    def _flags(operation: str) -> Any:
        return torch.backends.cuda.matmul if operation == "matmul" else torch.backends.cudnn


def _full_precision(device: torch.device) -> AbstractContextManager[None]:
    """Neither autocast nor reduced products: norms and sums would differ by their rounding."""
    kind = device.type
    products = _PRODUCTS.get(kind, ())
    for of in products:
        if _precision_of(*of) not in _FULL:
            return _raised_precision(kind, products)
    return _raised_precision(kind, ()) if torch.is_autocast_enabled(kind) else _AS_IT_IS


@contextmanager
def _raised_precision(kind: str, products: Sequence[tuple[str, str]]) -> Iterator[None]:
    before = [_precision_of(*of) for of in products]
    for of in products:
        _set_precision_of(*of, "ieee")
    try:
        with torch.autocast(kind, enabled=False):
            yield
    finally:
        for of, precision in zip(products, before, strict=True):
            _set_precision_of(*of, precision)
