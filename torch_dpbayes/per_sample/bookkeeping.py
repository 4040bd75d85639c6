"""Book-keeping: the sum of clipped per-sample gradients from one backward pass (Bu, Wang, Zha and
Karypis 2023).

The model runs as a map over records. Torch's own layers leave the map and run on the whole batch,
each row by itself, with their parameters detached: autograd propagates through them but computes no
gradient of theirs. Each layer notes what goes in and, on the way back, the gradient of what came
out; from both follow every record's norm and the clipped sum
(:mod:`torch_dpbayes.per_sample.layers`). All other parameters take part in the map, with a copy for
each record.

An ordinary ``p.grad`` can therefore come only from a use that was not noted. It is never clipped,
and raises an error.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import StepError
from . import layers
from .contributions import LARGEST_CANCELLATION, Contribution, PerRecord, Product, together
from .gradient_source import (
    DISAGREE,
    REMOVED,
    UNUSED,
    GradientSource,
    add_clipped,
    joint_norm_of_parts,
    require_first_backward,
    require_no_ordinary_gradient,
)
from .mapped_forward import COPIED, ForwardPasses, Loss, MappedForward, OfOne, ReplacedForward
from .nested import map_tensors, tensors_in
from .record_map import InnerTransform, RecordMap, attention_as_in_maps


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
        assume_independent: the user vouches for the loss, which is not followed.
        loss: ``(output, *targets) -> scalar``, which ``module.private_loss`` runs inside the map.

    **Privacy.** ‖Σ clip(g_i)‖ changes by at most C when a record is added or removed: what goes
    into a layer, and the gradient of what comes out, depend in record i's row on record i alone.
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
        # which forward passes may still be backpropagated; grows when they are forgotten
        self.step = 0
        self._noted: list[tuple[_Layer | Tensor, Contribution | layers.Call]] = []
        self._held: list[tuple[_Layer, Tensor, int]] = []  # and its version
        named = dict(module.named_parameters())
        self._layers = [_Layer(self, *found) for found in _trusted(module)]
        self._code: _Code | None = _Code(type(layer.module) for layer in self._layers)
        recorded = {p for layer in self._layers for _, p in layer.known if p.requires_grad}
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._versions: list[tuple[Tensor, int]] = []  # in the last forward pass
        self.record_map: RecordMap | None = None  # while a pass of the map runs
        self.passes: ForwardPasses = ForwardPasses(
            self._is_enabled, partial(self.discard, ()), follows=not assume_independent
        )
        direct = [p for p in named.values() if p.requires_grad and p not in recorded]
        self.mapped = MappedForward(module, self, direct, loss)
        self._attach()

    def take_into_map(self, parameters: Iterable[Tensor]) -> bool:
        """Give every record a copy of these parameters, which are used elsewhere than in their own
        layer; returns whether any of them was recorded by layer.
        """
        outside = set(parameters)
        moved = [layer for layer in self._layers if outside & {p for _, p in layer.known}]
        for layer in moved:
            if layer.module is self.mapped.module:  # both stand in one place
                self.mapped.original, self.mapped.had_own = layer.original, layer.had_own
            else:
                layer.remove()
            self._layers.remove(layer)
            self.mapped.add_direct(p for _, p in layer.known)
        return bool(moved)

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
            if self.passes.is_empty:
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
            rows = 0 if self.passes.is_empty else contributions[0].records
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
            with attention_as_in_maps():
                yield
        finally:
            self._is_paused = False

    def remove(self) -> None:
        super().remove()
        self.mapped.remove()
        for layer in self._layers:
            layer.remove()

    def require_unchanged(self) -> None:
        if self._code is None:
            raise StepError(COPIED, code="model-copied")
        self._code.require_unchanged()
        for layer in self._layers:
            if type(layer.module) is not layer.kind or _has_code_of_its_own(layer.module):
                raise StepError(_CHANGED.format(layer.name), code="step-changed")

    def over_records(
        self, of_one: OfOne, rows: Sequence[Tensor], direct: Sequence[Tensor], n: int
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """A map in which layers see the whole batch, and each record has its own copy of the
        parameters of everything else.
        """
        self.require_unchanged()
        self._versions = [(p, p._version) for p in self._parameters]
        anchors = [torch.zeros((), device=p.device, requires_grad=True) for p in direct]
        copies = [
            _Copies.apply(p.detach(), anchor, n, self._receiver(p))
            for p, anchor in zip(direct, anchors, strict=True)
        ]
        self.record_map = record_map = RecordMap(n)
        try:
            found = record_map(
                lambda inside: of_one(inside[: len(rows)], inside[len(rows) :]), [*rows, *copies]
            )
        finally:
            self.record_map = None
        record_map.require_nothing_kept()
        return found, [*anchors, *(layer.anchor for layer in self._layers)]

    def _receiver(self, parameter: Tensor) -> Callable[[Tensor], None]:
        """What the backward pass calls with a parameter's gradients, a row for each record."""
        step, version, is_done = self.step, parameter._version, False

        def receive(gradients: Tensor) -> None:
            nonlocal is_done
            require_first_backward(is_done or step != self.step)
            if parameter._version != version:
                raise StepError(
                    "a parameter was changed between forward() and backward(): step before both, or"
                    " after both",
                    code="step-changed",
                )
            is_done = True
            self._noted.append((parameter, PerRecord({parameter: gradients.detach()})))

        return receive

    def note(self, layer: _Layer, what: Contribution | layers.Call) -> None:
        """The backward pass reached a layer."""
        self._noted.append((layer, what))
        held = what.held() if isinstance(what, Contribution) else [*what.inputs, what.backprops]
        self._held += [(layer, t, t._version) for t in held]

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a private model takes along how to get rid of the hooks, and nothing of
        the data.
        """
        return {
            **self.__dict__,
            "_noted": [],
            "_held": [],
            "_handles": [],
            "_code": None,
            "is_copy": True,
        }

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
            raise StepError(REMOVED, code="step-removed")
        require_no_ordinary_gradient(named_parameters)
        if any(p.requires_grad for p in self._frozen):
            raise StepError(COPIED, code="model-copied")
        self.passes.require_one(bool(self._noted))
        for layer, t, version in self._held:
            if t._version != version:
                raise StepError(
                    f"the input of layer {layer.name!r}, the gradient of its output or a parameter"
                    " was changed in place between backward() and step(): write into them after"
                    " the step, or into copies.",
                    code="step-changed",
                )
        if any(p._version != version for p, version in self._versions):
            raise StepError(
                "a parameter was changed between forward() and step(), so these are not its"
                " gradients: change parameters before the forward pass or after the step.",
                code="step-changed",
            )
        contributions = self._merged()
        # tensors are slow to hash
        found = {id(p) for contribution in contributions for p in contribution.parameters}
        for name, p in named_parameters:
            if id(p) not in found:
                raise StepError(UNUSED.format(name), code="step-unused")
        if len({contribution.records for contribution in contributions}) > 1:
            raise StepError(DISAGREE, code="step-disagree")
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

    def __init__(self, source: BookkeepingGradientSource, name: str, module: nn.Module) -> None:
        self.source, self.name, self.kind = source, name, type(module)
        self.kernel = layers.KINDS[type(module)].kernel
        self.known = [(n, p) for n, p in module._parameters.items() if p is not None]
        self.calls = self.calls_of_step = 0
        self.anchor = torch.zeros((), requires_grad=True)
        super().__init__(module, [module])

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        record_map = self.source.record_map
        if record_map is None or not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        is_trainable, is_changed = False, self.source.is_copy
        for name, p in self.known:
            is_trainable |= p.requires_grad
            is_changed |= self.module._parameters.get(name) is not p
        if is_changed and not self.source.mapped.is_checking:
            raise StepError(COPIED, code="model-copied")
        if is_changed:  # by functional_call, most likely
            raise UsedElsewhere(COPIED, (p for _, p in self.known))
        if not is_trainable:
            return self.original(*args, **kwargs)
        return self._forward_in_map(record_map, args, kwargs)

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
            raise UsedElsewhere(str(error), (p for _, p in self.known)) from error

    def _record(self, args: Any, kwargs: Any, rows: int) -> Tensor:
        inputs = list(tensors_in((args, kwargs)))
        call = _Call(self, inputs, rows)
        out: Tensor
        if any(t.requires_grad for t in inputs):
            out = self.run_with({p: p.detach() for _, p in self.known}, args, kwargs)
            if out.requires_grad:
                out.register_hook(call.receive)
                return out
        else:
            with torch.no_grad():
                out = self.original(*args, **kwargs)
        return _Start.apply(out.clone() if out._base is not None else out, self.anchor, call)

    def contribution(self, calls: Sequence[layers.Call]) -> Contribution:
        if len({call.backprops.shape[0] for call in calls}) > 1:
            raise StepError(DISAGREE, code="step-disagree")
        return self.kernel(self.module, calls)


class _Call:
    """One call of a layer, waiting for the gradient of what came out."""

    __slots__ = ("inputs", "is_done", "layer", "rows", "step", "versions", "weights")

    def __init__(self, layer: _Layer, inputs: Sequence[Tensor], rows: int) -> None:
        self.layer, self.step, self.is_done, self.rows = layer, layer.source.step, False, rows
        self.inputs = [t.clone() if t.is_inference() else t.detach() for t in inputs]
        self.versions = [t._version for t in self.inputs]
        self.weights = [p._version for _, p in layer.known]
        if layer.calls_of_step != self.step:
            layer.calls, layer.calls_of_step = 0, self.step
        layer.calls += 1

    def receive(self, backprops: Tensor) -> None:
        layer, source = self.layer, self.layer.source
        require_first_backward(self.is_done or self.step != source.step)
        for t, version in zip(self.inputs, self.versions, strict=True):
            if version != t._version:
                raise StepError(
                    f"the input of layer {layer.name!r} was changed in place after the layer saw"
                    " it: write x = x + y instead of x += y, and F.relu(x) instead of F.relu_(x).",
                    code="step-changed",
                )
        for (name, p), version in zip(layer.known, self.weights, strict=True):
            if version != p._version:
                raise StepError(
                    f"{name!r} of layer {layer.name!r} was changed between forward() and"
                    " backward(), so these are the gradients of neither: step, load and"
                    " re-initialise before the forward pass or after the backward pass.",
                    code="step-changed",
                )
            if p._backward_hooks:
                raise StepError(
                    f"{name!r} of layer {layer.name!r} has a hook on its gradient (register_hook),"
                    " which is not called: there is no such gradient. Remove the hook; to leave"
                    " parameters as they are, freeze them with requires_grad_(False).",
                    code="model-gradient-hook",
                )
        self.is_done = True
        backprops = backprops.detach()
        if self.rows == 1:
            calls = [layers.Call(self.inputs, backprops)]
        else:
            calls = [
                layers.Call([t[k :: self.rows] for t in self.inputs], backprops[k :: self.rows])
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


_CHANGED = (
    "the code of layer {!r} is not what it was when the model was made private, and it runs on"
    " whole batches: undo that, or call make_private again"
)


class _Code:
    """The functions that layers on whole batches run, as they are now.

    Args:
        kinds: the classes of the layers.
    """

    def __init__(self, kinds: Iterable[type]) -> None:
        self._functions = [
            (vars(home), name, value, getattr(value, "__code__", None))
            for home, name, value in _code_of(set(kinds))
        ]

    def require_unchanged(self) -> None:
        """Raise if one was exchanged."""
        for home, name, value, code in self._functions:
            if home.get(name) is not value or getattr(value, "__code__", None) is not code:
                raise StepError(_CHANGED.format(name), code="step-changed")


def _code_of(kinds: set[type]) -> Iterator[tuple[Any, str, Any]]:
    classes = {cls for kind in kinds for cls in kind.__mro__[: kind.__mro__.index(nn.Module)]}
    for cls in classes:
        for name, value in vars(cls).items():
            if isinstance(value, FunctionType) or name == "forward":
                yield cls, name, value
    for name in {name for kind in kinds for name in layers.KINDS[kind].functions}:
        yield F, name, vars(F)[name]


def _trusted(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Layers of torch's own, unchanged, whose rows are known to be computed one by one."""
    for name, layer in module.named_modules():
        own = [p for p in layer._parameters.values() if p is not None]
        is_own = type(layer).forward is getattr(layer.forward, "__func__", None)
        if (
            is_own
            and any(p.requires_grad for p in own)
            and layers.kind_of(layer) is not None
            and not _has_code_of_its_own(layer)
            and not _is_exchanged(type(layer))
        ):
            yield name, layer


def _has_code_of_its_own(layer: nn.Module) -> bool:
    """Whether a function of the layer's class was exchanged on the layer, or a parameter's class
    brings code along: either would see the whole batch.
    """
    return any(
        callable(value) and name != "forward" and callable(getattr(type(layer), name, None))
        for name, value in vars(layer).items()
    ) or any(type(p) not in (Tensor, nn.Parameter, type(None)) for p in layer._parameters.values())


def _is_exchanged(kind: type) -> bool:
    """Whether somebody exchanged a function of a layer's class, or one of torch.nn.functional that
    such layers call.
    """
    for home, _, value in _code_of({kind}):
        of = F.__name__ if home is F else home.__module__
        if isinstance(value, FunctionType) and value.__globals__ is not vars(sys.modules[of]):
            return True
    return False


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
            raise StepError(DISAGREE, code="step-disagree")
    return [together(group) for group in groups]


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
