"""What one layer adds to every record's gradient: its norm, and sums of it, without the gradients themselves where that is cheaper.

A layer's gradient of record i follows from what went into it, a_i, and the gradient of the loss with respect to what came out, g_i. For a linear
layer over T positions it is Σ_t g_it a_itᵀ, of norm² Σ_ts (g_it·g_is)(a_it·a_is) (Goodfellow 2015 for T = 1; Li et al. 2022), and the weighted
sum over records is the product (c∘g)ᵀa that autograd would have computed with c = 1 (Bu et al. 2023). Where T² is large beside the number of
weights, per-record gradients are cheaper than the Gram matrices.

Which way is taken follows from shapes alone, by :func:`choose`; it never depends on data or on a clock.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from opacus.grad_sample import GradSampleHooks
from opacus.grad_sample.functorch import ft_compute_per_sample_gradient
from opacus.layers.dp_rnn import RNNLinear
from torch import Tensor, nn

# (what went in, gradient of what came out) for one call of a layer
Call = tuple[Sequence[Tensor], Tensor]

WAYS = ("gram", "instantiate", "unfold", "grouped", "loop")

# Nanoseconds on one core (AMD EPYC 9005, torch 2.15), fitted by hand to timings of single layers: a multiply-add in a matrix product and in a
# oneDNN convolution, a number copied by unfold, a number written to fresh memory, a call of a convolution.
_MATMUL, _CONVOLUTION, _UNFOLD, _WRITE, _CALL = 0.022, 0.012, 0.5, 1.0, 80e3
_CHUNK = 2**20  # numbers in a temporary that is worked off in chunks: about what stays in the cache


class Contribution(ABC):
    """What a layer adds to the gradient g_i of every record, before clipping and per unit of the loss' reduction.

    Attributes:
        records: n.
        parameters: those it has gradients for.
    """

    records: int
    parameters: tuple[Tensor, ...]

    @abstractmethod
    def norm(self) -> Tensor:
        """Every record's Euclidean norm over ``parameters``, never below that of what :meth:`add_sum` adds but for rounding; float32 or better."""

    @abstractmethod
    def add_sum(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        """out[p] += Σ_i factor_i·g_i, for flat ``out``."""

    @abstractmethod
    def per_record(self) -> dict[Tensor, Tensor]:
        """Every record's gradient, as (records, numel) matrices."""

    @abstractmethod
    def keep_only(self, keep: Tensor) -> None:
        """Put zeros in place of the records where ``keep`` is False, whatever numbers they have."""

    def add_squares(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        """out[p] += Σ_i (factor_i·g_i)∘(factor_i·g_i)."""
        for p, g in self.per_record().items():
            if p in out:
                out[p].addmv_(g.to(out[p].dtype).square().T, factor.to(out[p].dtype).square())


class PerRecord(Contribution):
    """Per-record gradients themselves."""

    def __init__(self, gradients: dict[Tensor, Tensor]) -> None:
        self.gradients = {p: g.reshape(len(g), p.numel()) for p, g in gradients.items()}
        self.parameters = tuple(gradients)
        self.records = max(len(g) for g in gradients.values())
        if any(len(g) != self.records for g in gradients.values()):
            self.records = -1  # no number of records: the source raises

    def norm(self) -> Tensor:
        norms = [torch.linalg.vector_norm(g, dim=1, dtype=_wide(g)) for g in self.gradients.values()]
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), dim=0)

    def add_sum(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        for p, g in self.gradients.items():
            if p in out:
                out[p].addmv_(g.to(out[p].dtype).T, factor.to(out[p].dtype))

    def per_record(self) -> dict[Tensor, Tensor]:
        return self.gradients

    def keep_only(self, keep: Tensor) -> None:
        self.gradients = {p: _rows(g, keep) for p, g in self.gradients.items()}


class Outer(Contribution):
    """A linear layer: Σ_t g_t a_tᵀ and Σ_t g_t, held as a and g.

    Args:
        weight, bias: the parameters, None where there is none or it is frozen.
        inputs: a, (records, [positions,] in).
        backprops: g, (records, [positions,] out).
    """

    def __init__(self, weight: Tensor | None, bias: Tensor | None, inputs: Tensor, backprops: Tensor) -> None:
        self.weight, self.bias, self.inputs, self.backprops = weight, bias, inputs, backprops
        self.parameters = tuple(p for p in (weight, bias) if p is not None)
        self.records = len(backprops)
        self._norm: Tensor | None = None

    def norm(self) -> Tensor:
        if self._norm is None:
            self._norm = self._vector_norm() if self.backprops.dim() == 2 else self._gram_norm()
        return self._norm

    def _vector_norm(self) -> Tensor:
        g = _norm_above(self.backprops)
        if self.weight is None:
            return g
        a = _norm_above(self.inputs)
        return g * a if self.bias is None else g * (a * a + 1.0).sqrt_()

    def _gram_norm(self) -> Tensor:
        n, positions, _ = self.backprops.shape
        norms = []
        for part in _chunks(n, positions * positions * 2):
            a, g = self.inputs[part], self.backprops[part]
            a, g = a.to(_wide(a)), g.to(_wide(g))
            gram = torch.bmm(g, g.transpose(1, 2))
            size = gram.diagonal(dim1=1, dim2=2)
            if self.weight is not None:
                other = torch.bmm(a, a.transpose(1, 2))
                if self.bias is not None:
                    other.add_(1.0)
                size = size * other.diagonal(dim1=1, dim2=2)
                gram.mul_(other)
            square = gram.sum((1, 2)).clamp_(min=0.0)
            # Where the positions cancel, rounding can eat the whole norm, and the record would go unclipped: those are computed as they are summed.
            size = size.clamp(min=0.0).sqrt().sum(1).square()
            unit = 4 * math.sqrt(max(a.shape[-1], g.shape[-1])) * torch.finfo(gram.dtype).eps
            doubtful = square < 100 * unit * size
            if bool(doubtful.any()):
                terms = _outer(self.weight, self.bias, a[doubtful], g[doubtful]).values()
                square[doubtful] = torch.stack([t.flatten(1).square().sum(1) for t in terms]).sum(0)
            norms.append(square.sqrt_())
        return torch.cat(norms)

    def add_sum(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        dtype = out[self.parameters[0]].dtype
        factor = factor.to(dtype)
        g = self.backprops.to(dtype) * factor.view(-1, *[1] * (self.backprops.dim() - 1))
        if g.dim() > 2:
            g = g.flatten(0, 1)
        if self.weight is not None and self.weight in out:
            out[self.weight].view(self.weight.shape).addmm_(g.T, self.inputs.reshape(len(g), -1).to(dtype))
        if self.bias is not None and self.bias in out:
            out[self.bias].add_(g.sum(0))

    def add_squares(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        if self.backprops.dim() > 2:
            super().add_squares(factor, out)
            return
        dtype = out[self.parameters[0]].dtype
        g = (self.backprops.to(dtype) * factor.to(dtype)[:, None]).square_()
        if self.weight is not None and self.weight in out:
            out[self.weight].view(self.weight.shape).addmm_(g.T, self.inputs.to(dtype).square())
        if self.bias is not None and self.bias in out:
            out[self.bias].add_(g.sum(0))

    def per_record(self) -> dict[Tensor, Tensor]:
        return PerRecord(_outer(self.weight, self.bias, self.inputs, self.backprops)).gradients

    def keep_only(self, keep: Tensor) -> None:
        self.inputs, self.backprops = _rows(self.inputs, keep), _rows(self.backprops, keep)


class Convolution(Contribution):
    """A convolution held as what went in and the gradient of what came out, its norm computed already."""

    def __init__(self, geometry: _Geometry, inputs: Tensor, backprops: Tensor, way: str) -> None:
        self.geometry, self.inputs, self.backprops = geometry, inputs, backprops
        self.parameters = geometry.parameters
        self.records = len(backprops)
        weight = geometry.gram_norm(inputs, backprops) if way == "gram" else geometry.instantiated_norm(inputs, backprops, way)
        self._bias = backprops.flatten(2).sum(2) if geometry.bias is not None else None
        if self._bias is None:
            self._norm = weight
        else:
            self._norm = torch.linalg.vector_norm(torch.stack([weight, torch.linalg.vector_norm(self._bias, dim=1, dtype=_wide(self._bias))]), dim=0)

    def norm(self) -> Tensor:
        return self._norm

    def add_sum(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        weight, bias = self.geometry.weight, self.geometry.bias
        if weight is not None and weight in out:
            dtype = out[weight].dtype
            g = self.backprops.to(dtype) * factor.to(dtype).view(-1, *[1] * (self.backprops.dim() - 1))
            out[weight].add_(self.geometry.weight_gradient(self.inputs.to(dtype), g).flatten())
        if bias is not None and self._bias is not None and bias in out:
            out[bias].addmv_(self._bias.to(out[bias].dtype).T, factor.to(out[bias].dtype))

    def per_record(self) -> dict[Tensor, Tensor]:
        return self.geometry.per_record(self.inputs, self.backprops, "unfold")

    def keep_only(self, keep: Tensor) -> None:
        self.inputs, self.backprops = _rows(self.inputs, keep), _rows(self.backprops, keep)
        if self._bias is not None:
            self._bias = _rows(self._bias, keep)


class Tokens(Contribution):
    """An embedding: each record's gradient has a row for each of its tokens, Σ of g over the token's positions.

    Args:
        weight: the table.
        tokens: (records, positions).
        backprops: g, (records, positions, width).
        padding_idx: the row that gets no gradient.
    """

    def __init__(self, weight: Tensor, tokens: Tensor, backprops: Tensor, padding_idx: int | None) -> None:
        self.weight, self.parameters, self.records = weight, (weight,), len(tokens)
        records = torch.arange(len(tokens), device=tokens.device)
        g = backprops.flatten(0, 1)
        if tokens.shape[1] == 1:
            self._tokens, self._records, self._rows = tokens[:, 0], records, g
        else:
            pairs, where = torch.unique(records[:, None] * len(weight) + tokens, return_inverse=True)
            self._tokens, self._records = pairs % len(weight), pairs // len(weight)
            self._rows = torch.zeros(len(pairs), g.shape[1], dtype=_wide(g), device=g.device).index_add_(0, where.flatten(), g.to(_wide(g)))
        if padding_idx is not None:
            kept = self._tokens != padding_idx
            self._tokens, self._records, self._rows = self._tokens[kept], self._records[kept], self._rows[kept]

    def norm(self) -> Tensor:
        norms = torch.linalg.vector_norm(self._rows, dim=1, dtype=_wide(self._rows))
        return torch.zeros(self.records, dtype=norms.dtype, device=norms.device).index_add_(0, self._records, norms.square()).sqrt_()

    def add_sum(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        if self.weight in out:
            into = out[self.weight].view(self.weight.shape)
            into.index_add_(0, self._tokens, self._rows.to(into.dtype) * factor.to(into.dtype)[self._records, None])

    def add_squares(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        if self.weight in out:
            into = out[self.weight].view(self.weight.shape)
            into.index_add_(0, self._tokens, (self._rows.to(into.dtype) * factor.to(into.dtype)[self._records, None]).square_())

    def per_record(self) -> dict[Tensor, Tensor]:
        rows = torch.zeros(self.records * len(self.weight), self._rows.shape[1], dtype=self._rows.dtype, device=self._rows.device)
        rows[self._records * len(self.weight) + self._tokens] = self._rows
        return {self.weight: rows.view(self.records, -1)}

    def keep_only(self, keep: Tensor) -> None:
        self._rows = _rows(self._rows, keep[self._records])


def together(parts: Sequence[Contribution]) -> Contribution:
    """Contributions to parameters that are shared: norms do not add up, per-record gradients do."""
    if len(parts) == 1:
        return parts[0]
    gradients: dict[Tensor, Tensor] = {}
    for part in parts:
        for p, g in part.per_record().items():
            gradients[p] = g if p not in gradients else gradients[p] + g
    return PerRecord(gradients)


# -- one function for each kind of layer: calls of it -> contribution ------------------------------------------------------------------


def linear(module: nn.Module, calls: Sequence[Call], way: str | None) -> Contribution:
    weight, bias = _trainable(module, "weight"), _trainable(module, "bias")
    pieces = []
    for (inputs,), g in calls:
        if g.dim() < 2:
            raise ValueError("the input has no dimension of records")
        g = g.flatten(1, -2) if g.dim() > 3 else g
        a = inputs.to(g.dtype)
        pieces.append((a.reshape(*g.shape[:-1], a.shape[-1]), g))
    if len(pieces) == 1:
        a, g = pieces[0]
    else:
        a, g = (torch.cat([t if t.dim() == 3 else t[:, None] for t in side], dim=1) for side in zip(*pieces, strict=True))
    if g.dim() == 2:
        return Outer(weight, bias, a, g)
    if g.shape[1] == 1:
        return Outer(weight, bias, a[:, 0], g[:, 0])
    if way is None:
        way = choose_linear(g.shape[1], a.shape[2], g.shape[2])
    if way == "gram":
        return Outer(weight, bias, a, g)
    return PerRecord(_outer(weight, bias, a, g))


def convolution(module: nn.Module, calls: Sequence[Call], way: str | None) -> Contribution:
    geometry = _Geometry(module)
    if len(calls) > 1:
        return together([convolution(module, [call], way) for call in calls])
    ((inputs,), g) = calls[0]
    if g.dim() != len(geometry.kernel) + 2:
        raise ValueError("the input has no dimension of records")
    if geometry.weight is None:
        assert geometry.bias is not None
        return PerRecord({geometry.bias: g.flatten(2).sum(2)})
    a, g = geometry.padded(inputs.to(g.dtype)), g.contiguous()
    chosen, is_kept = choose_convolution(geometry, a, g)
    if way is not None:
        chosen, is_kept = way, way != "gram" and is_kept
    if is_kept:
        return PerRecord(geometry.per_record(a, g, chosen))
    return Convolution(geometry, a, g, chosen)


def embedding(module: nn.Module, calls: Sequence[Call], _way: str | None) -> Contribution:
    assert isinstance(module, nn.Embedding)
    tokens = torch.cat([inputs.reshape(len(inputs), -1) for (inputs,), _ in calls], dim=1)
    g = torch.cat([g.reshape(len(g), -1, module.embedding_dim) for _, g in calls], dim=1)
    return Tokens(module.weight, tokens, g, module.padding_idx)


def normalization(module: nn.Module, calls: Sequence[Call], _way: str | None) -> Contribution:
    weight, bias = _trainable(module, "weight"), _trainable(module, "bias")
    parts: list[Contribution] = []
    for (inputs,), g in calls:
        a = inputs.to(g.dtype)
        gradients: dict[Tensor, Tensor] = {}
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            if g.dim() == len(module.normalized_shape):
                raise ValueError("the input has no dimension of records")
            shape = list(module.normalized_shape)
            middle = (len(g), -1, math.prod(shape))
            if weight is not None:
                normal = F.layer_norm(a, shape, eps=module.eps) if isinstance(module, nn.LayerNorm) else F.rms_norm(a, shape, eps=module.eps)
                gradients[weight] = normal.mul_(g).reshape(middle).sum(1)
            if bias is not None:
                gradients[bias] = g.reshape(middle).sum(1)
        else:
            if weight is not None:
                if isinstance(module, nn.GroupNorm):
                    normal = F.group_norm(a, module.num_groups, eps=module.eps)
                else:
                    normal = F.instance_norm(a, eps=module.eps)  # type: ignore[arg-type]
                gradients[weight] = normal.mul_(g).flatten(2).sum(2) if g.dim() > 2 else normal.mul_(g)
            if bias is not None:
                gradients[bias] = g.flatten(2).sum(2) if g.dim() > 2 else g
        parts.append(PerRecord(gradients))
    return together(parts)


def any_other(module: nn.Module, calls: Sequence[Call], _way: str | None) -> Contribution:
    """Through Opacus: its grad sampler for this kind of layer, or functorch."""
    sampler = GradSampleHooks.GRAD_SAMPLERS.get(type(module), ft_compute_per_sample_gradient)
    parts: list[Contribution] = []
    for inputs, g in calls:
        found = sampler(module, list(inputs), g)
        parts.append(PerRecord({p: t for p, t in found.items() if p.requires_grad}))
    return together(parts)


Kernel = Callable[[nn.Module, Sequence[Call], str | None], Contribution]

KERNELS: dict[type[nn.Module], Kernel] = {
    nn.Linear: linear,
    RNNLinear: linear,
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    nn.Conv3d: convolution,
    nn.Embedding: embedding,
    nn.LayerNorm: normalization,
    nn.RMSNorm: normalization,
    nn.GroupNorm: normalization,
    nn.InstanceNorm1d: normalization,
    nn.InstanceNorm2d: normalization,
    nn.InstanceNorm3d: normalization,
}


def kernel_of(module: nn.Module) -> Kernel | None:
    """The kernel for exactly this kind of layer; None where it has parameters that the kernel does not know."""
    kernel = KERNELS.get(type(module))
    known = {name for name, p in module._parameters.items() if p is not None} <= {"weight", "bias"} and module._parameters.get("weight") is not None
    return kernel if known else None


# -- which way ---------------------------------------------------------------------------------------------------------------------


def choose_linear(positions: int, width_in: int, width_out: int) -> str:
    """``"gram"`` or ``"instantiate"`` for a linear layer, by the estimated time of either."""
    weights = width_in * width_out
    gram = positions**2 * (width_in + width_out) * _MATMUL + positions * weights * _MATMUL
    instantiate = positions * weights * _MATMUL + weights * _WRITE
    return "gram" if gram < instantiate else "instantiate"


def choose_convolution(geometry: _Geometry, inputs: Tensor, backprops: Tensor) -> tuple[str, bool]:
    """``"gram"``, ``"unfold"``, ``"grouped"`` or ``"loop"``, and whether the per-record gradients are kept for the sum."""
    positions = backprops[0, 0].numel()
    weights, held = geometry.numel, inputs[0].numel() + backprops[0].numel()
    columns = weights // backprops.shape[1]  # of the unfolded input, for each group
    products, unfolded = positions * weights, columns * geometry.groups * positions
    is_onednn = inputs.device.type == "cpu" and torch.backends.mkldnn.is_available() and backprops.dtype == torch.float32
    times = {"unfold": products * _MATMUL + unfolded * _UNFOLD}
    if is_onednn:
        times["loop"] = products * _CONVOLUTION + _CALL
        if inputs.shape[1] // geometry.groups % 16 == 0 and backprops.shape[1] // geometry.groups % 16 == 0:
            times["grouped"] = products * _CONVOLUTION + weights * 2 * _WRITE
    way = min(times, key=lambda w: times[w])
    again = products * (_CONVOLUTION if is_onednn else _MATMUL) + held * _UNFOLD  # the weighted sum, from inputs and output gradients
    is_kept = weights <= held or (weights <= 2 * held and weights * _WRITE < again)
    gram = unfolded * _UNFOLD + positions**2 * (columns * geometry.groups + backprops.shape[1]) * _MATMUL
    if gram + again < times[way] + (weights * _WRITE if is_kept else again):
        return "gram", False
    return way, is_kept


# -- convolutions ------------------------------------------------------------------------------------------------------------------


class _Geometry:
    """The arithmetic of one convolution layer: padding, strides, groups, in one to three dimensions."""

    def __init__(self, module: nn.Module) -> None:
        assert isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
        self.weight, self.bias = _trainable(module, "weight"), _trainable(module, "bias")
        self.parameters = tuple(p for p in (self.weight, self.bias) if p is not None)
        self.shape, self.numel = module.weight.shape, module.weight.numel()
        self.kernel, self.stride, self.dilation, self.groups = module.kernel_size, module.stride, module.dilation, module.groups
        self._mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        self._pad: list[int] = list(module._reversed_padding_repeated_twice)
        # torch pads by zeros itself where both sides are alike
        is_even = self._mode == "constant" and not isinstance(module.padding, str)
        self.padding: list[int] = [int(p) for p in module.padding] if is_even else [0] * len(self.kernel)
        if is_even:
            self._pad = [0] * len(self._pad)

    def padded(self, inputs: Tensor) -> Tensor:
        return F.pad(inputs, self._pad, mode=self._mode) if any(self._pad) else inputs

    def weight_gradient(self, inputs: Tensor, backprops: Tensor, records: int = 1) -> Tensor:
        """Σ over all rows; with ``records`` > 1 these are channels and the groups of one convolution."""
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
        outer = [(s - d * (k - 1) - 1) // t + 1 for s, k, t, d in zip(sizes, self.kernel, self.stride, self.dilation, strict=True)]
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
            for part in _chunks(n, max(self.numel, inputs[0].numel())):
                a, g = inputs[part].flatten(0, 1)[None], backprops[part].flatten(0, 1)[None]
                yield self.weight_gradient(a, g, records=len(inputs[part])).reshape(-1, self.numel)
        else:
            positions = backprops[0, 0].numel()
            for part in _chunks(n, self.numel // self.shape[0] * self.groups * positions):
                u = self.unfolded(inputs[part]).flatten(0, 1)
                g = backprops[part].reshape(len(u), -1, positions)
                yield torch.bmm(g, u.transpose(1, 2)).view(-1, self.numel)

    def per_record(self, inputs: Tensor, backprops: Tensor, way: str) -> dict[Tensor, Tensor]:
        gradients = {}
        if self.weight is not None:
            gradients[self.weight] = torch.cat(list(self.instantiate(inputs, backprops, way)))
        if self.bias is not None:
            gradients[self.bias] = backprops.flatten(2).sum(2)
        return gradients

    def instantiated_norm(self, inputs: Tensor, backprops: Tensor, way: str) -> Tensor:
        return torch.cat([torch.linalg.vector_norm(g, dim=1, dtype=_wide(g)) for g in self.instantiate(inputs, backprops, way)])

    def gram_norm(self, inputs: Tensor, backprops: Tensor) -> Tensor:
        """As a linear layer over positions, for each group."""
        norms = []
        positions = backprops[0, 0].numel()
        assert self.weight is not None
        for part in _chunks(len(backprops), self.numel // self.shape[0] * self.groups * positions):
            u = self.unfolded(inputs[part]).flatten(0, 1).transpose(1, 2)
            g = backprops[part].reshape(len(u), -1, positions).transpose(1, 2)
            norms.append(torch.linalg.vector_norm(Outer(self.weight, None, u, g).norm().view(-1, self.groups), dim=1))
        return torch.cat(norms)


# -- small things ------------------------------------------------------------------------------------------------------------------


def _trainable(module: nn.Module, name: str) -> Tensor | None:
    p = module._parameters.get(name)
    return p if p is not None and p.requires_grad else None


def _outer(weight: Tensor | None, bias: Tensor | None, inputs: Tensor, backprops: Tensor) -> dict[Tensor, Tensor]:
    gradients = {}
    if backprops.dim() == 2:
        inputs, backprops = inputs[:, None], backprops[:, None]
    if weight is not None:
        gradients[weight] = torch.bmm(backprops.transpose(1, 2), inputs)
    if bias is not None:
        gradients[bias] = backprops.sum(1)
    return gradients


def _wide(t: Tensor) -> torch.dtype:
    """The type of norms and of sums: float32, or float64 where the numbers are."""
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def _norm_above(t: Tensor) -> Tensor:
    """Row norms, plus at most what is lost where squares underflow: a product with a huge number must not hide it."""
    if t.dtype == torch.float64:
        return torch.linalg.vector_norm(t, dim=1).add_(math.sqrt(t.shape[1]) * 1.5e-154)
    return torch.linalg.vector_norm(t, dim=1, dtype=torch.float32).add_(math.sqrt(t.shape[1]) * 1.1e-19)


def _rows(t: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep.view(-1, *[1] * (t.dim() - 1)), t, 0.0)


def _chunks(n: int, numbers: int) -> Iterator[slice]:
    """Slices of the records, each with about ``_CHUNK`` numbers if one record has ``numbers``."""
    step = max(1, _CHUNK // max(1, numbers))
    return (slice(i, i + step) for i in range(0, n, step))
