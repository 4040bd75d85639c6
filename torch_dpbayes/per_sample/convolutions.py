"""Convolutions in one to three dimensions, with their padding, strides and groups."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .contributions import (
    Outer,
    Product,
    chunks,
    trainable,
    weighted,
    wide,
)


class Geometry:
    """The arithmetic of one convolution layer: padding, strides, groups, in one to three
    dimensions.
    """

    def __init__(self, module: nn.Module) -> None:
        assert isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
        self.weight, self.bias = trainable(module, "weight"), trainable(module, "bias")
        self.parameters = tuple(p for p in (self.weight, self.bias) if p is not None)
        self.shape, self.numel = module.weight.shape, module.weight.numel()
        self.kernel, self.stride, self.dilation, self.groups = (
            module.kernel_size,
            module.stride,
            module.dilation,
            module.groups,
        )
        self._mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        self._pad: list[int] = list(module._reversed_padding_repeated_twice)
        # torch pads by zeros itself where both sides are alike
        is_even = self._mode == "constant" and not isinstance(module.padding, str)
        self.padding: list[int] = (
            [int(p) for p in module.padding] if is_even else [0] * len(self.kernel)
        )
        if is_even:
            self._pad = [0] * len(self._pad)
        # how many positions an input takes part in
        self.overlap = math.prod(-(-k // s) for k, s in zip(self.kernel, self.stride, strict=True))

    def padded(self, inputs: Tensor) -> Tensor:
        return F.pad(inputs, self._pad, mode=self._mode) if any(self._pad) else inputs

    def weight_gradient(self, inputs: Tensor, backprops: Tensor, records: int = 1) -> Tensor:
        """Σ over all rows; with ``records`` > 1 these are channels and the groups of one
        convolution.
        """
        like = backprops.new_empty(1).expand(self.shape[0] * records, *self.shape[1:])
        gradient: Tensor = torch.ops.aten.convolution_backward(
            backprops,
            inputs,
            like,
            None,
            self.stride,
            self.padding,
            self.dilation,
            False,
            [0] * len(self.kernel),
            self.groups * records,
            [False, True, False],
        )[1]
        return gradient

    def unfolded(self, inputs: Tensor) -> Tensor:
        """(records, groups, channels·kernel, positions)."""
        if any(self.padding):
            inputs = F.pad(inputs, [p for p in reversed(self.padding) for _ in range(2)])
        n, channels, *sizes = inputs.shape
        rows, of_channel, *steps = inputs.stride()
        outer = [
            (s - d * (k - 1) - 1) // t + 1
            for s, k, t, d in zip(sizes, self.kernel, self.stride, self.dilation, strict=True)
        ]
        each = channels // self.groups
        view = inputs.as_strided(
            (n, self.groups, each, *self.kernel, *outer),
            (
                rows,
                each * of_channel,
                of_channel,
                *(d * s for d, s in zip(self.dilation, steps, strict=True)),
                *(t * s for t, s in zip(self.stride, steps, strict=True)),
            ),
        )
        return view.reshape(n, self.groups, each * math.prod(self.kernel), math.prod(outer))

    def instantiate(self, inputs: Tensor, backprops: Tensor, way: str) -> Iterator[Tensor]:
        """Per-record gradients of the weight, (records, numel), some records at a time."""
        n = len(backprops)
        if way == "loop":
            for i in range(n):
                yield self.weight_gradient(inputs[i : i + 1], backprops[i : i + 1]).view(1, -1)
        elif way == "grouped":
            for part in chunks(n, max(self.numel, inputs[0].numel())):
                a, g = inputs[part].flatten(0, 1)[None], backprops[part].flatten(0, 1)[None]
                yield self.weight_gradient(a, g, records=len(inputs[part])).reshape(-1, self.numel)
        else:
            positions = backprops[0, 0].numel()
            for part in chunks(n, self.numel // self.shape[0] * self.groups * positions):
                u = self.unfolded(inputs[part]).flatten(0, 1)
                g = backprops[part].reshape(len(u), -1, positions)
                yield torch.bmm(g, u.transpose(1, 2)).view(-1, self.numel)

    def per_record(self, inputs: Tensor, backprops: Tensor, way: str) -> dict[Tensor, Tensor]:
        gradients = {}
        if self.weight is not None:
            parts = list(self.instantiate(inputs, backprops, way))
            gradients[self.weight] = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self.bias is not None:
            gradients[self.bias] = backprops.flatten(2).sum(2)
        return gradients

    def instantiated_norm(self, inputs: Tensor, backprops: Tensor, way: str) -> Tensor:
        return torch.cat(
            [
                torch.linalg.vector_norm(g, dim=1, dtype=wide(g))
                for g in self.instantiate(inputs, backprops, way)
            ]
        )

    def gram_norm(self, inputs: Tensor, backprops: Tensor) -> Tensor:
        """As a linear layer over positions, for each group."""
        norms = []
        positions = backprops[0, 0].numel()
        assert self.weight is not None
        for part in chunks(len(backprops), self.numel // self.shape[0] * self.groups * positions):
            u = self.unfolded(inputs[part]).flatten(0, 1).transpose(1, 2)
            g = backprops[part].reshape(len(u), -1, positions).transpose(1, 2)
            norms.append(
                torch.linalg.vector_norm(
                    Outer(self.weight, None, u, g).norm().view(-1, self.groups), dim=1
                )
            )
        return torch.cat(norms)


class Convolution(Product):
    """A convolution that is too large for its per-record gradients to be kept."""

    def __init__(self, geometry: Geometry, inputs: Tensor, backprops: Tensor, way: str) -> None:
        super().__init__(inputs, backprops)
        self.geometry, self.parameters = geometry, geometry.parameters
        a, g = inputs.to(wide(inputs)), backprops.to(wide(backprops))
        self._norm = (
            geometry.gram_norm(a, g) if way == "gram" else geometry.instantiated_norm(a, g, way)
        )
        if geometry.bias is not None:
            bias = torch.linalg.vector_norm(g.flatten(2).sum(2), dim=1)
            self._norm = torch.linalg.vector_norm(torch.stack([self._norm, bias]), dim=0)
        a_and_g = [torch.linalg.vector_norm(t.flatten(1), dim=1) for t in (a, g)]
        self._size = a_and_g[0] * a_and_g[1] * math.sqrt(geometry.overlap)

    def _instantiated(self, inputs: Tensor, backprops: Tensor) -> dict[Tensor, Tensor]:
        return self.geometry.per_record(inputs, backprops, "unfold")

    def _add_product(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        weight, bias = self.geometry.weight, self.geometry.bias
        g = weighted(self.backprops, factor, out)
        if weight is not None and weight in out:
            out[weight].add_(self.geometry.weight_gradient(self.inputs.to(g.dtype), g).flatten())
        if bias is not None and bias in out:
            out[bias].add_(g.flatten(2).sum(2).sum(0))
