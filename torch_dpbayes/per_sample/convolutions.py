"""Convolutions in one to three dimensions, with their padding, strides and groups."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from . import arithmetic
from .arithmetic import chunks, wide
from .contributions import Outer, Product, beside, trainable, weighted


class Geometry:
    """The arithmetic of one convolution layer."""

    def __init__(self, module: nn.Module) -> None:
        assert isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
        self.weight, self.bias = trainable(module, "weight"), trainable(module, "bias")
        self.parameters = tuple(p for p in (self.weight, self.bias) if p is not None)
        self.shape, self.numel = module.weight.shape, module.weight.numel()
        self.kernel, self.stride = module.kernel_size, module.stride
        self.dilation, self.groups = module.dilation, module.groups
        self._mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        # torch pads by zeros itself where both sides are alike
        is_even = self._mode == "constant" and not isinstance(module.padding, str)
        self._pad = [] if is_even else list(module._reversed_padding_repeated_twice)
        self.padding = [int(p) for p in module.padding] if is_even else [0] * len(self.kernel)
        # how many positions an input takes part in
        self.overlap = math.prod(-(-k // s) for k, s in zip(self.kernel, self.stride, strict=True))

    def padded(self, inputs: Tensor) -> Tensor:
        return torch._C._nn.pad(inputs, self._pad, self._mode) if any(self._pad) else inputs

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
        n, channels, *sizes = inputs.shape
        rows, of_channel, *steps = inputs.stride()
        each = channels // self.groups
        outer, strides = [], []
        for size, k, t, d in zip(sizes, self.kernel, self.stride, self.dilation, strict=True):
            outer.append((size - d * (k - 1) - 1) // t + 1)
        strides = [d * s for d, s in zip(self.dilation, steps, strict=True)]
        strides += [t * s for t, s in zip(self.stride, steps, strict=True)]
        view = inputs.as_strided(
            (n, self.groups, each, *self.kernel, *outer),
            (rows, each * of_channel, of_channel, *strides),
        )
        return view.reshape(n, self.groups, each * math.prod(self.kernel), math.prod(outer))

    def _as_linear(self, inputs: Tensor, backprops: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and gradients as those of a linear layer over positions, a row for each record
        and group, some records at a time.
        """
        positions = backprops[0, 0].numel()
        numbers = self.numel // self.shape[0] * self.groups * positions  # of the unfolded input
        for part in chunks(len(backprops), numbers, backprops.device):
            u = self.unfolded(inputs[part]).flatten(0, 1).transpose(1, 2)
            yield u, backprops[part].reshape(len(u), -1, positions).transpose(1, 2)

    def instantiate(self, inputs: Tensor, backprops: Tensor, way: str) -> Iterator[Tensor]:
        """Per-record gradients of the weight, (records, numel), some records at a time; in the type
        of the layer, so that their norms have to be taken of what is found here.
        """
        if way == "grouped":
            numbers = max(self.numel, inputs[0].numel())
            for part in chunks(len(backprops), numbers, backprops.device):
                a, g = inputs[part].flatten(0, 1)[None], backprops[part].flatten(0, 1)[None]
                yield self.weight_gradient(a, g, records=len(inputs[part])).reshape(-1, self.numel)
        else:
            for u, g in self._as_linear(inputs, backprops):
                yield torch.bmm(g.transpose(1, 2), u).view(-1, self.numel)

    def per_record(self, inputs: Tensor, backprops: Tensor, way: str) -> dict[Tensor, Tensor]:
        gradients = {}
        if self.weight is not None:
            parts = list(self.instantiate(inputs, backprops, way))
            gradients[self.weight] = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self.bias is not None:
            gradients[self.bias] = backprops.flatten(2).sum(2)
        return gradients

    def norms(self, inputs: Tensor, backprops: Tensor, way: str) -> tuple[Tensor, Tensor]:
        """Every record's norm of the weight's gradient, and at least the sum of the norms of its
        terms.
        """
        if way != "gram":
            parts = self.instantiate(inputs, backprops, way)
            norms = [torch.linalg.vector_norm(g, dim=1, dtype=wide(g)) for g in parts]
            of_inputs, of_outputs = (
                torch.linalg.vector_norm(t.flatten(1), dim=1, dtype=wide(t))
                for t in (inputs, backprops)
            )
            return beside(norms), of_inputs * of_outputs * math.sqrt(self.overlap)
        assert self.weight is not None
        found = [Outer(self.weight, None, u, g) for u, g in self._as_linear(inputs, backprops)]
        norm, size = (
            beside(t).view(-1, self.groups)
            for t in ([part.norm() for part in found], [_size_of(part) for part in found])
        )
        if self.groups == 1:
            return norm[:, 0], size[:, 0]
        return torch.linalg.vector_norm(norm, dim=1), size.sum(1)


def _size_of(part: Outer) -> Tensor:
    assert part.size is not None
    return part.size


class Convolution(Product):
    """A convolution that is too large for its per-record gradients to be kept.

    Where its norms are found in TensorFloat-32, the record's gradient is that of its inputs and
    output gradients cut to that type: products of these are exact, in the norm as in the sum, which
    is made in float32.
    """

    def __init__(self, geometry: Geometry, inputs: Tensor, backprops: Tensor, way: str) -> None:
        super().__init__(inputs, backprops)
        self.geometry, self.parameters, self.way = geometry, geometry.parameters, way
        self.is_reduced = is_reduced(backprops)

    @property
    def key(self) -> tuple[Any, ...]:
        of, dtype = self.geometry, self.backprops.dtype
        kind = of.shape, of.stride, of.padding, of.dilation, of.groups, of.bias is None, self.way
        return self.inputs.shape, self.backprops.shape, dtype, repr(kind), self.is_reduced

    def set_norms(self, alike: Sequence[Convolution]) -> None:
        machine = arithmetic.machine_of(self.backprops.device)
        numbers = self.inputs.numel() + self.backprops.numel()
        step = max(1, machine.piece // numbers) if machine.is_accelerator else 1
        for start in range(0, len(alike), step):
            self._set_norms(alike[start : start + step])

    def _set_norms(self, alike: Sequence[Convolution]) -> None:
        a, g = (beside(t) for t in ([x.inputs for x in alike], [x.backprops for x in alike]))
        if self.is_reduced and self.way != "gram" and g.dtype == torch.float32:
            a, g = arithmetic.cut(a), arithmetic.cut(g)
            for layer, mine, theirs in zip(
                alike, a.chunk(len(alike)), g.chunk(len(alike)), strict=True
            ):
                layer.inputs, layer.backprops = mine, theirs
        a, g = a.to(wide(a)), g.to(wide(g))
        # Gram matrices have a bound that only float32 keeps
        is_coarse = self.is_reduced and self.way != "gram"
        with arithmetic.tf32(g.device) if is_coarse else nullcontext():
            norms, sizes = self.geometry.norms(a, g, self.way)
        if self.geometry.bias is not None:
            norms = norms.hypot(torch.linalg.vector_norm(g.flatten(2).sum(2), dim=1))
        self.note_norms(alike, norms, sizes)

    def per_record(self) -> dict[Tensor, Tensor]:
        return self.geometry.per_record(*self.widened(), "unfold")

    def add_sum(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        weight, bias = self.geometry.weight, self.geometry.bias
        g = weighted(self.backprops, factor, out)
        if weight is not None and weight in out:
            out[weight].add_(self.geometry.weight_gradient(self.inputs.to(g.dtype), g).flatten())
        if bias is not None and bias in out:
            out[bias].add_(g.flatten(2).sum(2).sum(0))


def is_reduced(backprops: Tensor) -> bool:
    """Whether a convolution's products run in TensorFloat-32, which holds what half types do."""
    if backprops.dtype in (torch.float16, torch.bfloat16):
        return arithmetic.machine_of(backprops.device).is_accelerator
    return backprops.dtype == torch.float32 and arithmetic.allows_tf32(backprops.device)
