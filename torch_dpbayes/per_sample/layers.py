"""Kernels of layers: norms and sums of the terms that a layer adds to every record's gradient. They
avoid the gradients themselves if that is cheaper.

A layer's gradient of record i is computed from its input a_i and from g_i, the gradient of the loss
with respect to its output. For a linear layer over T positions the gradient is Σ_t g_it a_itᵀ, and
its norm² is Σ_ts (g_it·g_is)(a_it·a_is) (Goodfellow 2015 for T = 1; Li et al. 2022). The weighted
sum over records is the product (c∘g)ᵀa; autograd computes it with c = 1 (Bu et al. 2023). If T² is
large compared to the number of weights, per-record gradients are cheaper than the Gram matrices.

The choice depends only on shapes and on the device.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from operator import mul
from typing import Any, NamedTuple

import torch
from opacus.layers.dp_rnn import RNNLinear
from torch import Tensor, nn

from . import arithmetic
from .arithmetic import pieces, row_norms, wide
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
from .function_kinds import IN_PYTHON, flags_of

# one call of a layer: its input, and the gradient of its output
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
    # the error bound of Gram matrices needs float32
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
        """The sum over all dimensions except records and those of the parameter."""
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            return t.reshape(t.shape[0], -1, math.prod(module.normalized_shape)).sum(1)
        return t.flatten(2).sum(2) if t.dim() > 2 else t

    parts: list[Contribution] = []
    for inputs, g in calls:
        gradients: dict[Tensor, Tensor] = {}
        if weight is not None:
            found = []
            for some, of_some in pieces(2 * g.shape[1:].numel(), inputs, g, is_small=True):
                normal = KINDS[type(module)].run(module, in_type(some, g.dtype), None, None)
                found.append(summed(normal.mul_(of_some)))
            gradients[weight] = beside(found)
        if bias is not None:
            gradients[bias] = summed(g)
        parts.append(PerRecord(gradients))
    return together(parts)


# -- convolutions ----------------------------------------------------------------------------------

_IN_ORDER = 2048  # positions


class Convolution(Product):
    """A convolution, stored as its padded input and the gradient of its output, because its
    per-record gradients are too large to be stored.

    If its norms are computed in TensorFloat-32, inputs and output gradients are truncated to this
    type, for the record's gradient, too. Their products are then exact, in the norm and in the sum,
    which is computed in float32.
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
        # torch itself pads by zeros if both sides are equal
        is_even = mode == "constant" and not isinstance(module.padding, str)
        self.padding = [int(p) for p in module.padding] if is_even else [0] * len(self.kernel)
        pad = [] if is_even else list(module._reversed_padding_repeated_twice)
        inputs = inputs.to(backprops.dtype)
        inputs = torch._C._nn.pad(inputs, pad, mode) if any(pad) else inputs
        super().__init__(inputs, backprops.contiguous(), backprops.shape[2:].numel())

    def weight_gradient(self, inputs: Tensor, backprops: Tensor, records: int = 1) -> Tensor:
        """Σ over all rows. With ``records`` > 1, records are channels and groups of one
        convolution.
        """
        like = backprops.new_empty(1).expand(self.shape[0] * records, *self.shape[1:])
        geometry = (self.stride, self.padding, self.dilation, False, [0] * len(self.kernel))
        gradient: Tensor = torch.ops.aten.convolution_backward(
            backprops, inputs, like, None, *geometry, self.groups * records, [False, True, False]
        )[1]
        return gradient

    def unfolded(self, inputs: Tensor) -> Tensor:
        """A view: (records, channels, kernel, positions), the last two of several dimensions."""
        if any(self.padding):
            inputs = torch._C._nn.pad(inputs, [p for p in reversed(self.padding) for _ in range(2)])
        n, channels, *lengths = inputs.shape
        of_rows, *steps = inputs.stride()
        sizes, strides = [n, channels, *self.kernel], [of_rows, steps.pop(0)]
        strides += map(mul, steps, self.dilation)
        for length, k, t, d in zip(lengths, self.kernel, self.stride, self.dilation, strict=True):
            sizes.append((length - d * (k - 1) - 1) // t + 1)
        strides += map(mul, steps, self.stride)
        return inputs.as_strided(sizes, strides)

    def _as_linear(self, inputs: Tensor, backprops: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and output gradients of the equivalent linear layer over positions: a row for each
        record and group, some records at a time, always in the same memory.
        """
        positions, columns = backprops.shape[2:].numel(), self.numel // self.shape[0]
        numbers = columns * self.groups * positions  # of the unfolded input
        memory: Tensor | None = None
        for a, g in pieces(numbers, inputs, backprops, is_small=True):
            u = self.unfolded(a)
            if not u.is_contiguous():
                memory = u.new_empty(u.shape) if memory is None else memory
                u = memory[: u.shape[0]].copy_(u)
            u = u.view(-1, columns, positions).transpose(1, 2)
            yield u, g.reshape(u.shape[0], -1, positions).transpose(1, 2)

    def instantiate(self, inputs: Tensor, backprops: Tensor, way: str) -> Iterator[Tensor]:
        """Per-record gradients of the weight, (records, numel), some records at a time. They are
        rounded to the layer's type, so norms must be computed from these gradients.
        """
        if way == "grouped":
            numbers = max(self.numel, inputs.shape[1:].numel())
            for a, g in pieces(numbers, inputs, backprops):
                channels, of_outputs = a.flatten(0, 1)[None], g.flatten(0, 1)[None]
                found = self.weight_gradient(channels, of_outputs, records=len(a))
                yield found.reshape(-1, self.numel)
        else:
            for u, g in self._as_linear(inputs, backprops):
                yield torch.bmm(g.transpose(1, 2), u).view(-1, self.numel)

    def instantiated(self, inputs: Tensor, backprops: Tensor, way: str) -> dict[Tensor, Tensor]:
        gradients = {}
        if self.weight is not None and way == "grouped":
            gradients[self.weight] = beside(list(self.instantiate(inputs, backprops, way)))
        elif self.weight is not None:
            n, start, (width, *columns) = len(inputs), 0, self.shape
            shape = n * self.groups, width // self.groups, math.prod(columns)
            rows = backprops.new_empty(shape)
            for u, g in self._as_linear(inputs, backprops):
                torch.bmm(g.transpose(1, 2), u, out=rows[start : start + u.shape[0]])
                start += u.shape[0]
            gradients[self.weight] = rows.view(n, -1)
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
        return self.inputs.shape[1:].numel() + self.backprops.shape[1:].numel()

    def norms_and_sizes(self, inputs: Tensor, backprops: Tensor) -> tuple[Tensor, Tensor]:
        a, g = inputs.to(wide(inputs)), backprops.to(wide(backprops))
        with arithmetic.tf32(g.device) if self.is_reduced else nullcontext():
            norms, sizes = self._of_gram(a, g) if self.way == "gram" else self._of_gradients(a, g)
        if self.bias is not None:
            each = g.flatten(2)
            norms = norms.hypot(torch.linalg.vector_norm(each.sum(2), dim=1))
            sizes = sizes + torch.linalg.vector_norm(each, dim=1).sum(1)
        return norms, sizes

    def _of_gradients(self, inputs: Tensor, backprops: Tensor) -> tuple[Tensor, Tensor]:
        """Every record's norm of the weight's gradient, and an upper bound of the sum of the norms
        of its terms.
        """
        gradients = self.instantiate(inputs, backprops, self.way)
        norms = [row_norms(g) for g in gradients]
        of_inputs, of_outputs = (row_norms(t.flatten(1)) for t in (inputs, backprops))
        # the largest number of positions that use an input
        sides = zip(self.kernel, self.stride, self.dilation, strict=True)
        overlap = math.prod(-(-k * math.gcd(s, d) // s) for k, s, d in sides)
        return beside(norms), of_inputs * of_outputs * math.sqrt(overlap)

    def _of_gram(self, inputs: Tensor, backprops: Tensor) -> tuple[Tensor, Tensor]:
        assert self.weight is not None
        norms, sizes = [], []
        for u, g in self._as_linear(inputs, backprops):
            part = Outer(self.weight, None, u, g)
            norms.append(part.norm())  # this sets its size, too
            assert part.size is not None
            sizes.append(part.size)
        norm, size = (beside(t).view(-1, self.groups) for t in (norms, sizes))
        return torch.linalg.vector_norm(norm, dim=1), size.sum(1)

    def add_sum(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        g = weighted(self.backprops, factor)
        if self.weight is not None and self.weight in out:
            total, step = out[self.weight], len(g)
            if g.is_cpu:  # oneDNN adds up all positions of all records one after another
                step = max(1, _IN_ORDER // g[0, 0].numel())
            for a, some in zip(self.inputs.split(step), g.split(step), strict=True):
                total.add_(self.weight_gradient(a.to(g.dtype), some).flatten())
        if self.bias is not None and self.bias in out:
            out[self.bias].add_(g.flatten(2).sum(2).sum(0))


def is_reduced(backprops: Tensor) -> bool:
    """Whether a convolution's products run in TensorFloat-32, which is exact for half types."""
    if backprops.dtype in (torch.float16, torch.bfloat16):
        return arithmetic.machine_of(backprops.device).is_accelerator
    return backprops.dtype == torch.float32 and arithmetic.allows_tf32(backprops.device)


# -- the forward passes, on whole batches. They call only torch's C++ functions: if the caller
# replaced a Python function, that code never sees more than one record.

_torch: Any = torch._C._VariableFunctions  # noqa: SLF001 - the same names as in torch
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


Kernel = Callable[[nn.Module, Sequence[Call]], Contribution]


class Kind(NamedTuple):
    """The rules of book-keeping for one kind of layer.

    Attributes:
        kernel: computes the contribution of its calls to every record's gradient.
        run: ``(layer, input, weight, bias)``, its forward pass.
        forward: torch's ``forward`` of the class; a class with another one is another kind.
        row_dimensions: the number of dimensions of one input row: a number, or a function of the
            layer and of the shape of one record's input.
        has_positions: whether further dimensions are positions of one record.
    """

    kernel: Kernel
    run: Callable[[Any, Tensor, Any, Any], Any]
    forward: Any
    row_dimensions: int | Callable[[Any, Sequence[int]], int]
    has_positions: bool = False


def _of_shape(module: Any, _given: Sequence[int]) -> int:
    return len(module.normalized_shape)


# A new kind of layer needs two functions above and a line here.
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
    )
}


# The names in the forward pass of Conv1D of transformers, a linear layer with a transposed weight.
# A version with other names runs inside the map.
_CONV1D = {"size", "nf", "torch", "addmm", "bias", "view", "weight"}
_PLAIN = (Tensor, nn.Parameter, type(None))


def settings_of(module: nn.Module) -> dict[str, Any]:
    """The attributes that torch's C++ functions read."""
    found = {k: v for k, v in vars(module).items() if k[0] != "_" or "padding" in k}
    return {k: v for k, v in found.items() if k != "training"}


def is_known(module: nn.Module) -> bool:
    """Whether this is exactly a known kind of layer: it is trained, its weight is a parameter (and
    not an attribute, as with torch's pruning), it has no code of its own, also in its settings, and
    no option that sees the whole batch.
    """
    kind: Any = type(module)
    theirs: Any = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    if kind is theirs and kind not in KINDS:
        if set(kind.forward.__code__.co_names) == _CONV1D:
            of = partial(linear, is_transposed=True)
            KINDS[kind] = Kind(of, _run_transposed, kind.forward, 1, True)
    sees_batch = any(getattr(module, option, None) for option in ("max_norm", "scale_grad_by_freq"))
    return (
        kind in KINDS
        and kind.forward is KINDS[kind].forward
        and "weight" in module._parameters
        and any(p is not None and p.requires_grad for p in module._parameters.values())
        and all(type(p) in _PLAIN for p in module._parameters.values())
        and not any(callable(getattr(kind, name, None)) for name in vars(module))
        and not any(flags_of(type(v)) & IN_PYTHON for v in settings_of(module).values())
        and not sees_batch
    )


# Per-record gradients are kept if their size is at most this multiple of the size of inputs and
# output gradients, which would be stored instead. So a step needs at most this multiple of a plain
# step's memory for activations. For larger gradients positions·widths < weights, so Gram matrices
# are cheaper.
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
    machine, positions = arithmetic.machine_of(backprops.device), backprops.shape[2:].numel()
    is_kept = weights <= _KEPT * (inputs.shape[1:].numel() + backprops.shape[1:].numel())
    columns = weights // backprops.shape[1]  # of the unfolded input, per group
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
