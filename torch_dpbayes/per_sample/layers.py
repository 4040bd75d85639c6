"""Kernels of layers: norms and sums of the terms that a layer adds to every record's gradient. They
avoid the gradients themselves if that is cheaper.

A layer's gradient of record i follows from what went into it, a_i, and the gradient of the loss
with respect to what came out, g_i. For a linear layer over T positions it is Σ_t g_it a_itᵀ, of
norm² Σ_ts (g_it·g_is)(a_it·a_is) (Goodfellow 2015 for T = 1; Li et al. 2022), and the weighted sum
over records is the product (c∘g)ᵀa that autograd would have computed with c = 1 (Bu et al. 2023).
Where T² is large beside the number of weights, per-record gradients are cheaper than the Gram
matrices.

Which way is taken depends on shapes and on the device alone.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from opacus.layers.dp_rnn import RNNLinear
from torch import Tensor, nn

from . import arithmetic
from .arithmetic import pieces, wide
from .contributions import (
    Contribution,
    Outer,
    PerRecord,
    Product,
    Tokens,
    beside,
    in_type,
    outer,
    together,
    trainable,
    weighted,
)

# one call of a layer: what went in, and the gradient of what came out
Call = tuple[Tensor, Tensor]


def linear(
    module: nn.Module, calls: Sequence[Call], *, is_transposed: bool = False
) -> Contribution:
    weight, bias = trainable(module, "weight"), trainable(module, "bias")
    sides = []
    for inputs, g in calls:
        g = g.flatten(1, -2) if g.dim() > 3 else g
        a = in_type(inputs, g.dtype)
        sides.append((a if a.dim() == g.dim() else a.reshape(*g.shape[:-1], a.shape[-1]), g))
    a, g = sides[0]
    if len(sides) > 1:
        a, g = (
            torch.cat([t if t.dim() == 3 else t[:, None] for t in side], dim=1)
            for side in zip(*sides, strict=True)
        )
    if g.dim() == 3 and g.shape[1] == 1:
        a, g = a[:, 0], g[:, 0]
    if g.dim() == 3:
        machine = arithmetic.machine_of(g.device)
        if choose_linear(g.shape[1], a.shape[2], g.shape[2], machine) != "gram":
            return PerRecord(outer(weight, bias, a, g, is_transposed=is_transposed))
    return Outer(weight, bias, a, g, is_transposed=is_transposed)


def convolution(module: nn.Module, calls: Sequence[Call]) -> Contribution:
    if len(calls) > 1:
        return together([convolution(module, [call]) for call in calls])
    part = Convolution(module, *calls[0])
    a, g = part.inputs, part.backprops
    part.way, is_kept = choose_convolution(part.numel, part.groups, a, g)
    if is_kept or part.weight is None:
        with arithmetic.tf32(g.device) if is_reduced(g) else nullcontext():
            return PerRecord(part.instantiated(a, g, part.way))
    # Gram matrices have a bound that only float32 keeps
    part.is_reduced = is_reduced(g) and part.way != "gram"
    if part.is_reduced and g.dtype == torch.float32:
        part.inputs, part.backprops = part.held = arithmetic.cut(a), arithmetic.cut(g)
    return part


def embedding(module: nn.Module, calls: Sequence[Call]) -> Contribution:
    assert isinstance(module, nn.Embedding)
    tokens = torch.cat([inputs.reshape(len(inputs), -1) for inputs, _ in calls], dim=1)
    g = torch.cat([g.reshape(len(g), -1, module.embedding_dim) for _, g in calls], dim=1)
    return Tokens(module.weight, tokens, g, module.padding_idx)


def normalization(module: nn.Module, calls: Sequence[Call]) -> Contribution:
    weight, bias = trainable(module, "weight"), trainable(module, "bias")

    def summed(t: Tensor) -> Tensor:
        """Over everything but the records and the parameter's own numbers."""
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            return t.reshape(len(t), -1, math.prod(module.normalized_shape)).sum(1)
        return t.flatten(2).sum(2) if t.dim() > 2 else t

    parts: list[Contribution] = []
    for inputs, g in calls:
        gradients: dict[Tensor, Tensor] = {}
        if weight is not None:
            normal = KINDS[type(module)].run(module, in_type(inputs, g.dtype), None, None)
            gradients[weight] = summed(normal.mul_(g))
        if bias is not None:
            gradients[bias] = summed(g)
        parts.append(PerRecord(gradients))
    return together(parts)


# -- convolutions ----------------------------------------------------------------------------------


class Convolution(Product):
    """A convolution, held as what went in, padded, and the gradient of what came out, where its
    per-record gradients are too large to be kept.

    Where its norms are found in TensorFloat-32, the record's gradient is that of its inputs and
    output gradients cut to that type: products of these are exact, in the norm as in the sum, which
    is made in float32.
    """

    is_reduced, way = False, "unfold"

    def __init__(self, module: nn.Module, inputs: Tensor, backprops: Tensor) -> None:
        assert isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
        self.weight, self.bias = trainable(module, "weight"), trainable(module, "bias")
        self.parameters = tuple(p for p in (self.weight, self.bias) if p is not None)
        self.shape, self.numel = module.weight.shape, module.weight.numel()
        self.kernel, self.stride = module.kernel_size, module.stride
        self.dilation, self.groups = module.dilation, module.groups
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        # torch pads by zeros itself where both sides are alike
        is_even = mode == "constant" and not isinstance(module.padding, str)
        self.padding = [int(p) for p in module.padding] if is_even else [0] * len(self.kernel)
        pad = [] if is_even else list(module._reversed_padding_repeated_twice)
        inputs = inputs.to(backprops.dtype)
        inputs = torch._C._nn.pad(inputs, pad, mode) if any(pad) else inputs
        super().__init__(inputs, backprops.contiguous())

    def weight_gradient(self, inputs: Tensor, backprops: Tensor, records: int = 1) -> Tensor:
        """Σ over all rows; with ``records`` > 1 these are channels and the groups of one
        convolution.
        """
        like = backprops.new_empty(1).expand(self.shape[0] * records, *self.shape[1:])
        geometry = (self.stride, self.padding, self.dilation, False, [0] * len(self.kernel))
        gradient: Tensor = torch.ops.aten.convolution_backward(
            backprops, inputs, like, None, *geometry, self.groups * records, [False, True, False]
        )[1]
        return gradient

    def unfolded(self, inputs: Tensor) -> Tensor:
        """(records, groups, channels·kernel, positions)."""
        if any(self.padding):
            inputs = torch._C._nn.pad(inputs, [p for p in reversed(self.padding) for _ in range(2)])
        dims = len(self.kernel)
        for at, (k, t, d) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True)):
            inputs = inputs.unfold(2 + at, d * (k - 1) + 1, t)[..., ::d]
        # (records, channels, positions, kernel), the last two of several dimensions
        view = inputs.movedim([*range(-dims, 0)], [*range(2, 2 + dims)])
        columns = self.numel // self.shape[0]
        return view.reshape(len(view), self.groups, columns, -1)

    def _as_linear(self, inputs: Tensor, backprops: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and gradients as those of a linear layer over positions, a row for each record
        and group, some records at a time.
        """
        positions = backprops[0, 0].numel()
        numbers = self.numel // self.shape[0] * self.groups * positions  # of the unfolded input
        for a, g in pieces(numbers, inputs, backprops):
            u = self.unfolded(a).flatten(0, 1).transpose(1, 2)
            yield u, g.reshape(len(u), -1, positions).transpose(1, 2)

    def instantiate(self, inputs: Tensor, backprops: Tensor, way: str) -> Iterator[Tensor]:
        """Per-record gradients of the weight, (records, numel), some records at a time; in the type
        of the layer, so that their norms have to be taken of what is found here.
        """
        if way == "grouped":
            numbers = max(self.numel, inputs[0].numel())
            for a, g in pieces(numbers, inputs, backprops):
                channels, of_outputs = a.flatten(0, 1)[None], g.flatten(0, 1)[None]
                found = self.weight_gradient(channels, of_outputs, records=len(a))
                yield found.reshape(-1, self.numel)
        else:
            for u, g in self._as_linear(inputs, backprops):
                yield torch.bmm(g.transpose(1, 2), u).view(-1, self.numel)

    def instantiated(self, inputs: Tensor, backprops: Tensor, way: str) -> dict[Tensor, Tensor]:
        gradients = {}
        if self.weight is not None:
            gradients[self.weight] = beside(list(self.instantiate(inputs, backprops, way)))
        if self.bias is not None:
            gradients[self.bias] = backprops.flatten(2).sum(2)
        return gradients

    def per_record(self) -> dict[Tensor, Tensor]:
        return self.instantiated(*self.widened(), "unfold")

    @property
    def key(self) -> tuple[Any, ...]:
        kind = self.shape, self.stride, self.padding, self.dilation, self.groups
        how = repr(kind), self.bias is None, self.way, self.is_reduced
        return self.inputs.shape, self.backprops.shape, self.backprops.dtype, how

    def numbers(self) -> float:
        if not arithmetic.machine_of(self.backprops.device).is_accelerator:
            return math.inf
        return self.inputs[0].numel() + self.backprops[0].numel()

    def norms_and_sizes(self, inputs: Tensor, backprops: Tensor) -> tuple[Tensor, Tensor]:
        a, g = inputs.to(wide(inputs)), backprops.to(wide(backprops))
        with arithmetic.tf32(g.device) if self.is_reduced else nullcontext():
            norms, sizes = self._of_gram(a, g) if self.way == "gram" else self._of_gradients(a, g)
        if self.bias is not None:
            norms = norms.hypot(torch.linalg.vector_norm(g.flatten(2).sum(2), dim=1))
        return norms, sizes

    def _of_gradients(self, inputs: Tensor, backprops: Tensor) -> tuple[Tensor, Tensor]:
        """Every record's norm of the weight's gradient, and at least the sum of the norms of its
        terms.
        """
        gradients = self.instantiate(inputs, backprops, self.way)
        norms = [torch.linalg.vector_norm(g, dim=1, dtype=wide(g)) for g in gradients]
        of_inputs, of_outputs = (
            torch.linalg.vector_norm(t.flatten(1), dim=1, dtype=wide(t))
            for t in (inputs, backprops)
        )
        # how many positions an input takes part in
        overlap = math.prod(-(-k // s) for k, s in zip(self.kernel, self.stride, strict=True))
        return beside(norms), of_inputs * of_outputs * math.sqrt(overlap)

    def _of_gram(self, inputs: Tensor, backprops: Tensor) -> tuple[Tensor, Tensor]:
        assert self.weight is not None
        found = [Outer(self.weight, None, u, g) for u, g in self._as_linear(inputs, backprops)]
        norms = [part.norm() for part in found]  # and with them sizes
        sizes = [part.size for part in found if part.size is not None]
        norm, size = (beside(t).view(-1, self.groups) for t in (norms, sizes))
        return torch.linalg.vector_norm(norm, dim=1), size.sum(1)

    def add_sum(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        g = weighted(self.backprops, factor)
        if self.weight is not None and self.weight in out:
            out[self.weight].add_(self.weight_gradient(self.inputs.to(g.dtype), g).flatten())
        if self.bias is not None and self.bias in out:
            out[self.bias].add_(g.flatten(2).sum(2).sum(0))


def is_reduced(backprops: Tensor) -> bool:
    """Whether a convolution's products run in TensorFloat-32, which holds what half types do."""
    if backprops.dtype in (torch.float16, torch.bfloat16):
        return arithmetic.machine_of(backprops.device).is_accelerator
    return backprops.dtype == torch.float32 and arithmetic.allows_tf32(backprops.device)


# -- the forward passes, on whole batches. Torch's functions of C++ alone run: no code of the
# caller's, put in the place of a function of Python, sees more than one record.

_torch: Any = torch._C._VariableFunctions  # noqa: SLF001 - of the same names in torch
_linear: Any = torch._C._nn.linear
_pad: Any = torch._C._nn.pad
_CONVOLVE = {1: _torch.conv1d, 2: _torch.conv2d, 3: _torch.conv3d}


def _run_linear(_: Any, x: Tensor, w: Any, b: Any) -> Any:
    return _linear(x, w, b)


def _run_transposed(_: Any, x: Tensor, w: Any, b: Any) -> Any:
    return _torch.addmm(b, x.reshape(-1, x.shape[-1]), w).view(*x.shape[:-1], -1)


def _run_convolution(module: Any, x: Tensor, w: Any, b: Any) -> Any:
    padding = module.padding
    if module.padding_mode != "zeros":
        x, padding = _pad(x, module._reversed_padding_repeated_twice, module.padding_mode), 0
    run = _CONVOLVE[len(module.kernel_size)]
    return run(x, w, b, module.stride, padding, module.dilation, module.groups)


def _run_embedding(module: Any, x: Tensor, w: Any, _: Any) -> Any:
    padding = -1 if module.padding_idx is None else module.padding_idx
    return _torch.embedding(w, x, padding)


def _run_layer_norm(module: Any, x: Tensor, w: Any, b: Any) -> Any:
    return _torch.layer_norm(x, module.normalized_shape, w, b, module.eps)


def _run_rms_norm(module: Any, x: Tensor, w: Any, _: Any) -> Any:
    return _torch.rms_norm(x, module.normalized_shape, w, module.eps)


def _run_group_norm(module: Any, x: Tensor, w: Any, b: Any) -> Any:
    return _torch.group_norm(x, module.num_groups, w, b, module.eps)


def _run_instance_norm(module: Any, x: Tensor, w: Any, b: Any) -> Any:
    return _torch.instance_norm(x, w, b, None, None, True, 0.0, module.eps, True)


Kernel = Callable[[nn.Module, Sequence[Call]], Contribution]


class Kind(NamedTuple):
    """The rules of book-keeping for one kind of layer.

    Attributes:
        kernel: what a call of it adds to every record's gradient.
        run: ``(layer, input, weight, bias)``, its forward pass.
        forward: torch's own of the class; a class with another is another kind.
        row_dimensions: how many dimensions one row has that goes in: a number, or a function of the
            layer and of the shape that one record gives to it.
        has_positions: whether further dimensions are positions of one record.
    """

    kernel: Kernel
    run: Callable[[Any, Tensor, Any, Any], Any]
    forward: Any
    row_dimensions: int | Callable[[Any, Sequence[int]], int]
    has_positions: bool = False


def _of_shape(module: Any, _given: Sequence[int]) -> int:
    return len(module.normalized_shape)


# A new kind of layer is two functions above and a line here.
KINDS: dict[type[nn.Module], Kind] = {
    kind: Kind(kernel, run, kind.forward, *rest)
    for kind, kernel, run, *rest in (
        (nn.Linear, linear, _run_linear, 1, True),
        (RNNLinear, linear, _run_linear, 1, True),
        (nn.Conv1d, convolution, _run_convolution, 2),
        (nn.Conv2d, convolution, _run_convolution, 3),
        (nn.Conv3d, convolution, _run_convolution, 4),
        (nn.Embedding, embedding, _run_embedding, 0, True),
        (nn.LayerNorm, normalization, _run_layer_norm, _of_shape, True),
        (nn.RMSNorm, normalization, _run_rms_norm, _of_shape, True),
        (nn.GroupNorm, normalization, _run_group_norm, lambda _, given: len(given) - 1),
        (nn.InstanceNorm1d, normalization, _run_instance_norm, 2),
        (nn.InstanceNorm2d, normalization, _run_instance_norm, 3),
        (nn.InstanceNorm3d, normalization, _run_instance_norm, 4),
    )
}


def rows_of(kind: Kind, module: nn.Module, given: Sequence[int]) -> int | None:
    """The number of rows that one record has in dimension 0 of a layer's input, whose shape is
    ``given``. None if it has no row dimension, or if its rows are positions of the record.
    """
    of_one_row = kind.row_dimensions
    if not isinstance(of_one_row, int):
        of_one_row = of_one_row(module, given)
    is_row = len(given) > of_one_row and (given[0] == 1 or not kind.has_positions)
    return given[0] if is_row else None


# What the forward pass of a layer of transformers calls, a linear layer with a transposed weight; a
# version with another runs in the map.
_CONV1D = {"size", "nf", "torch", "addmm", "bias", "view", "weight"}
_PLAIN = (Tensor, nn.Parameter, type(None))


def is_known(module: nn.Module) -> bool:
    """Whether this is exactly a known kind of layer, which is trained, with a weight of its own (of
    which torch's pruning makes an attribute), no code of its own and no option that sees the whole
    batch.
    """
    kind: Any = type(module)
    theirs: Any = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    if kind is theirs and kind not in KINDS:
        if set(kind.forward.__code__.co_names) == _CONV1D:
            of = partial(linear, is_transposed=True)
            KINDS[kind] = Kind(of, _run_transposed, kind.forward, 1, True)
    sees_batch = any(
        getattr(module, option, None)
        for option in ("max_norm", "scale_grad_by_freq", "track_running_stats")
    )
    return (
        kind in KINDS
        and kind.forward is KINDS[kind].forward
        and "weight" in module._parameters
        and any(p is not None and p.requires_grad for p in module._parameters.values())
        and all(type(p) in _PLAIN for p in module._parameters.values())
        and not any(callable(getattr(kind, name, None)) for name in vars(module))
        and not sees_batch
    )


# Per-record gradients are kept where they have at most so many times the numbers of the inputs and
# output gradients, which the step would hold in their place: with them, a step takes no more memory
# than these many times a plain step's activations. Matrices of more numbers have fewer positions
# than 1.6 times the mean width, for which Gram matrices are cheaper.
_KEPT = 1.6


def choose_linear(
    positions: int, width_in: int, width_out: int, machine: arithmetic.Machine
) -> str:
    """``"instantiate"`` or ``"gram"`` for a linear layer: by memory, or on a CPU by time."""
    weights, widths = width_in * width_out, width_in + width_out
    is_kept = weights <= _KEPT * positions * widths
    if not machine.is_accelerator:
        is_kept = weights * machine.write <= positions**2 * widths * machine.gram
    return "instantiate" if is_kept else "gram"


def choose_convolution(
    weights: int, groups: int, inputs: Tensor, backprops: Tensor
) -> tuple[str, bool]:
    """``"gram"``, ``"unfold"`` or ``"grouped"``, by the estimated time, and whether the per-record
    gradients are kept for the sum.
    """
    machine, positions = arithmetic.machine_of(backprops.device), backprops[0, 0].numel()
    is_kept = weights <= _KEPT * (inputs[0].numel() + backprops[0].numel())
    columns = weights // backprops.shape[1]  # of the unfolded input, for each group
    products, unfolded = positions * weights, columns * groups * positions * machine.unfold
    times = {"unfold": products + unfolded + weights * machine.write}
    if machine.is_accelerator:
        is_fast = columns >= 16 * 9
    else:  # oneDNN's own convolutions
        is_fast = torch.backends.mkldnn.is_available() and backprops.dtype == torch.float32
        is_fast &= not (inputs.shape[1] // groups % 16 or backprops.shape[1] // groups % 16)
    if is_fast:
        times["grouped"] = products * machine.grouped + weights * machine.group
    if machine.has_double and not is_kept:
        in_gram = positions**2 * (columns * groups + backprops.shape[1])
        times["gram"] = unfolded + in_gram * machine.gram
    return min(times, key=lambda way: times[way]), is_kept
