"""What one layer adds to every record's gradient: its norm, and sums of it, without the gradients
themselves where that is cheaper.

A layer's gradient of record i follows from what went into it, a_i, and the gradient of the loss
with respect to what came out, g_i. For a linear layer over T positions it is Σ_t g_it a_itᵀ, of
norm² Σ_ts (g_it·g_is)(a_it·a_is) (Goodfellow 2015 for T = 1; Li et al. 2022), and the weighted sum
over records is the product (c∘g)ᵀa that autograd would have computed with c = 1 (Bu et al. 2023).
Where T² is large beside the number of weights, per-record gradients are cheaper than the Gram
matrices.

Which way is taken is said by :mod:`torch_dpbayes.clipping.costs`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from opacus.grad_sample import GradSampleHooks
from opacus.layers.dp_rnn import RNNLinear
from torch import Tensor, nn
from torch.func import grad, vmap

from .contributions import Contribution, Outer, PerRecord, Tokens, outer, together, trainable
from .convolutions import Convolution, Geometry
from .costs import choose_convolution, choose_linear


class Call(NamedTuple):
    """One call of a layer.

    Attributes:
        inputs: the tensors that went in.
        backprops: the gradient of what came out.
        again: repeats the call with given values of the parameters and given tensors.
    """

    inputs: Sequence[Tensor]
    backprops: Tensor
    again: Callable[[Mapping[Tensor, Tensor], Sequence[Tensor]], Tensor]


def linear(module: nn.Module, calls: Sequence[Call], way: str | None) -> Contribution:
    weight, bias = trainable(module, "weight"), trainable(module, "bias")
    pieces = []
    for (inputs,), g, _ in calls:
        if g.dim() < 2:
            raise ValueError("the input has no dimension of records")
        g = g.flatten(1, -2) if g.dim() > 3 else g
        a = inputs.to(g.dtype)
        pieces.append((a if a.dim() == g.dim() else a.reshape(*g.shape[:-1], a.shape[-1]), g))
    if len(pieces) == 1:
        a, g = pieces[0]
    else:
        a, g = (
            torch.cat([t if t.dim() == 3 else t[:, None] for t in side], dim=1)
            for side in zip(*pieces, strict=True)
        )
    if g.dim() == 2:
        return Outer(weight, bias, a, g)
    if g.shape[1] == 1:
        return Outer(weight, bias, a[:, 0], g[:, 0])
    if way is None:
        way = choose_linear(g.shape[1], a.shape[2], g.shape[2])
    if way == "gram":
        return Outer(weight, bias, a, g)
    return PerRecord(outer(weight, bias, a, g))


def convolution(module: nn.Module, calls: Sequence[Call], way: str | None) -> Contribution:
    geometry = Geometry(module)
    if len(calls) > 1:
        return together([convolution(module, [call], way) for call in calls])
    (inputs,), g, _ = calls[0]
    if g.dim() != len(geometry.kernel) + 2:
        raise ValueError("the input has no dimension of records")
    if geometry.weight is None:
        assert geometry.bias is not None
        return PerRecord({geometry.bias: g.flatten(2).sum(2)})
    a, g = geometry.padded(inputs.to(g.dtype)), g.contiguous()
    chosen, is_kept = choose_convolution(geometry.numel, geometry.groups, a, g)
    if way is not None:
        chosen, is_kept = way, way != "gram" and is_kept
    if is_kept:
        return PerRecord(geometry.per_record(a, g, chosen))
    return Convolution(geometry, a, g, chosen)


def embedding(module: nn.Module, calls: Sequence[Call], _way: str | None) -> Contribution:
    assert isinstance(module, nn.Embedding)
    tokens = torch.cat([inputs.reshape(len(inputs), -1) for (inputs,), _, _ in calls], dim=1)
    g = torch.cat([g.reshape(len(g), -1, module.embedding_dim) for _, g, _ in calls], dim=1)
    return Tokens(module.weight, tokens, g, module.padding_idx)


def normalization(module: nn.Module, calls: Sequence[Call], _way: str | None) -> Contribution:
    weight, bias = trainable(module, "weight"), trainable(module, "bias")
    parts: list[Contribution] = []
    for (inputs,), g, _ in calls:
        a = inputs.to(g.dtype)
        gradients: dict[Tensor, Tensor] = {}
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            if g.dim() == len(module.normalized_shape):
                raise ValueError("the input has no dimension of records")
            shape = list(module.normalized_shape)
            middle = (len(g), -1, math.prod(shape))
            if weight is not None:
                normal = (
                    F.layer_norm(a, shape, eps=module.eps)
                    if isinstance(module, nn.LayerNorm)
                    else F.rms_norm(a, shape, eps=module.eps)
                )
                gradients[weight] = normal.mul_(g).reshape(middle).sum(1)
            if bias is not None:
                gradients[bias] = g.reshape(middle).sum(1)
        else:
            if weight is not None:
                if isinstance(module, nn.GroupNorm):
                    normal = F.group_norm(a, module.num_groups, eps=module.eps)
                else:
                    normal = F.instance_norm(a, eps=module.eps)  # type: ignore[arg-type]
                gradients[weight] = (
                    normal.mul_(g).flatten(2).sum(2) if g.dim() > 2 else normal.mul_(g)
                )
            if bias is not None:
                gradients[bias] = g.flatten(2).sum(2) if g.dim() > 2 else g
        parts.append(PerRecord(gradients))
    return together(parts)


def any_other(module: nn.Module, calls: Sequence[Call], _way: str | None) -> Contribution:
    """Through Opacus' grad sampler for this kind of layer, or by running it once more for
    each record under torch.func.
    """
    sampler = GradSampleHooks.GRAD_SAMPLERS.get(type(module))
    parts: list[Contribution] = []
    for call in calls:
        found = (
            _transformed(module, call)
            if sampler is None
            else sampler(module, list(call.inputs), call.backprops)
        )
        parts.append(PerRecord({p: t for p, t in found.items() if p.requires_grad}))
    return together(parts)


def _transformed(module: nn.Module, call: Call) -> dict[Tensor, Tensor]:
    """grad of each record's (output · backprop) under vmap. Opacus would do it with a copy of
    the layer, which does not hear of later changes.
    """
    g = call.backprops
    parameters = [p for p in module.parameters() if p.requires_grad]
    inputs = tuple(t.to(g.dtype) if t.is_floating_point() else t for t in call.inputs)
    is_mixed = any(p.dtype != g.dtype for p in parameters) and g.dtype in (
        torch.bfloat16,
        torch.float16,
    )

    def loss(values: tuple[Tensor, ...], tensors: tuple[Tensor, ...], backprop: Tensor) -> Tensor:
        with torch.autocast(g.device.type, dtype=g.dtype, enabled=is_mixed):
            out = call.again(dict(zip(parameters, values, strict=True)), [t[None] for t in tensors])
        return (out * backprop[None]).sum()

    found = vmap(grad(loss), in_dims=(None, 0, 0))(tuple(p.detach() for p in parameters), inputs, g)
    return dict(zip(parameters, found, strict=True))


Kernel = Callable[[nn.Module, Sequence[Call], str | None], Contribution]


class Kind(NamedTuple):
    """What book-keeping knows of one kind of layer.

    Attributes:
        kernel: what a call of it adds to every record's gradient.
        row_dimensions: how many dimensions one row has that goes in: a number, or a function of the
            layer and of what one record gives to it.
        functions: those of torch.nn.functional that it calls.
        has_positions: whether further dimensions are positions of one record.
        ways: what ``clipping_kernels`` may choose for it.
    """

    kernel: Kernel
    row_dimensions: int | Callable[[Any, Tensor], int]
    functions: tuple[str, ...]
    has_positions: bool = False
    ways: tuple[str, ...] = ()


def _of_normalized_shape(module: nn.LayerNorm | nn.RMSNorm, _given: Tensor) -> int:
    return len(module.normalized_shape)


def _convolution(dimensions: int) -> Kind:
    functions = (f"conv{dimensions}d", "pad")
    ways = ("gram", "unfold", "grouped", "loop")
    return Kind(convolution, 1 + dimensions, functions, ways=ways)


def _instance_norm(dimensions: int) -> Kind:
    return Kind(normalization, 1 + dimensions, ("instance_norm",))


_LINEAR = Kind(linear, 1, ("linear",), True, ("gram", "instantiate"))

# A new kind of layer is a function above and a line here.
KINDS: dict[type[nn.Module], Kind] = {
    nn.Linear: _LINEAR,
    RNNLinear: _LINEAR,
    nn.Conv1d: _convolution(1),
    nn.Conv2d: _convolution(2),
    nn.Conv3d: _convolution(3),
    nn.Embedding: Kind(embedding, 0, ("embedding",), True),
    nn.LayerNorm: Kind(normalization, _of_normalized_shape, ("layer_norm",), True),
    nn.RMSNorm: Kind(normalization, _of_normalized_shape, ("rms_norm",), True),
    nn.GroupNorm: Kind(normalization, lambda _, given: given.dim() - 1, ("group_norm",)),
    nn.InstanceNorm1d: _instance_norm(1),
    nn.InstanceNorm2d: _instance_norm(2),
    nn.InstanceNorm3d: _instance_norm(3),
}
# of torch.nn.functional, what layers with a kernel call
FUNCTIONS = {name for kind in KINDS.values() for name in kind.functions}


def rows_of(module: nn.Module, given: Tensor) -> tuple[bool, bool]:
    """Of what one record gives to a layer: whether dimension 0 is one row of the layer's, and
    whether it is several.
    """
    kind = KINDS[type(module)]
    of_one_row = kind.row_dimensions
    if not isinstance(of_one_row, int):
        of_one_row = of_one_row(module, given)
    if given.dim() <= of_one_row:
        return False, False
    if given.shape[0] == 1:
        return True, False
    # other rows are positions of the record
    return False, not kind.has_positions


def kind_of(module: nn.Module) -> Kind | None:
    """What is known of exactly this kind of layer; None where it has parameters that the kernel
    does not know.

    Raises:
        ValueError: the kernel is the caller's own, and would go unused.
    """
    kind = KINDS.get(type(module))
    names = {name for name, p in module._parameters.items() if p is not None}
    if "weight" in names and names <= {"weight", "bias"}:
        return kind
    if names and is_own_kernel(kind):  # weight_norm gives torch's layers other parameters
        raise ValueError(
            f"KINDS has a kernel for {type(module).__name__}, which would not be called: its"
            f" parameters are {', '.join(sorted(names))}. Call them weight and bias, or take the"
            " line out of KINDS."
        )
    return None


def is_own_kernel(kind: Kind | None) -> bool:
    """Whether it is not one of this file's."""
    return kind is not None and kind.kernel.__module__ != __name__
