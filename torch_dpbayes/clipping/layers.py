"""What one layer adds to every record's gradient: its norm, and sums of it, without the gradients
themselves where that is cheaper.

A layer's gradient of record i follows from what went into it, a_i, and the gradient of the loss
with respect to what came out, g_i. For a linear layer over T positions it is Σ_t g_it a_itᵀ, of
norm² Σ_ts (g_it·g_is)(a_it·a_is) (Goodfellow 2015 for T = 1; Li et al. 2022), and the weighted sum
over records is the product (c∘g)ᵀa that autograd would have computed with c = 1 (Bu et al. 2023).
Where T² is large beside the number of weights, per-record gradients are cheaper than the Gram
matrices.

Which way is taken follows from shapes alone, by :func:`choose`; it never depends on data or on a
clock.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from opacus.grad_sample import GradSampleHooks
from opacus.layers.dp_rnn import RNNLinear
from torch import Tensor, nn
from torch.func import grad, vmap

from .gradient_source import joint_norms


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


# Nanoseconds on one core (AMD EPYC 9005, torch 2.15), fitted by hand to timings of single layers: a
# multiply-add in a matrix product, in one of float64 and in a oneDNN convolution, a number copied
# by unfold, a number written to fresh memory, a call of a convolution.
_MATMUL, _GRAM, _CONVOLUTION, _UNFOLD, _WRITE, _CALL = 0.022, 0.044, 0.012, 0.5, 1.0, 80e3
_CHUNK = 2**20  # numbers in a temporary that is worked off in chunks: about what stays in the cache

# A product over positions adds up terms of size κ·‖g_i‖, which cancel down to ‖g_i‖ and leave about
# κ·2⁻²⁴·‖g_i‖ of rounding in float32. Below this κ that is 6e-5 of the clip norm; a record above it
# is summed by itself first, as its norm is.
LARGEST_CANCELLATION = 2.0**10


class Contribution(ABC):
    """What a layer adds to the gradient g_i of every record, before clipping.

    Attributes:
        records: n.
        parameters: those it has gradients for.
    """

    records: int
    parameters: tuple[Tensor, ...]

    def held(self) -> tuple[Tensor, ...]:
        """Tensors of other people's that must stay as they are until the sum is taken."""
        return ()

    @abstractmethod
    def norm(self) -> Tensor:
        """Every record's Euclidean norm over ``parameters``, never below that of what
        :meth:`add_sum` adds but for rounding; float32 or better.
        """

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
        return joint_norms(list(self.gradients.values()))

    def add_sum(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        for p, g in self.gradients.items():
            if p in out:
                out[p].addmv_(g.to(out[p].dtype).T, factor.to(out[p].dtype))

    def per_record(self) -> dict[Tensor, Tensor]:
        return self.gradients

    def keep_only(self, keep: Tensor) -> None:
        self.gradients = {p: _rows(g, keep) for p, g in self.gradients.items()}


class Product(Contribution):
    """Held as what went in and the gradient of what came out, of which one product makes the sum
    over records and positions.

    Args:
        inputs, backprops: with records in dimension 0.
    """

    def __init__(self, inputs: Tensor, backprops: Tensor) -> None:
        self.inputs, self.backprops = inputs, backprops
        self.records = len(backprops)
        self._apart: tuple[Tensor, PerRecord] | None = None
        self._norm: Tensor
        self._size: Tensor | None

    def held(self) -> tuple[Tensor, ...]:
        return (self.inputs, self.backprops)

    def norm(self) -> Tensor:
        return self._norm

    def size(self) -> Tensor | None:
        """At least Σ_t ‖(term t of g_i)‖, what rounding in the product is relative to; None
        where there is one term.
        """
        return self._size

    def set_apart(self, which: Tensor) -> None:
        """Sum these records by themselves from now on, their norms included."""
        index = which.nonzero().flatten()
        apart = PerRecord(self._instantiated(self.inputs[index], self.backprops[index]))
        self.inputs, self.backprops = _rows(self.inputs, ~which), _rows(self.backprops, ~which)
        self._norm, self._size = (
            self._norm.index_copy(0, index, apart.norm().to(self._norm.dtype)),
            None,
        )
        self._apart = index, apart

    def add_sum(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        self._add_product(factor, out)
        if self._apart is not None:
            index, apart = self._apart
            apart.add_sum(factor[index], out)

    def per_record(self) -> dict[Tensor, Tensor]:
        gradients = PerRecord(self._instantiated(self.inputs, self.backprops)).gradients
        if self._apart is not None:
            index, apart = self._apart
            gradients = {
                p: g.index_copy(0, index, apart.gradients[p]) for p, g in gradients.items()
            }
        return gradients

    def keep_only(self, keep: Tensor) -> None:
        self.inputs, self.backprops = _rows(self.inputs, keep), _rows(self.backprops, keep)
        if self._apart is not None:
            index, apart = self._apart
            apart.keep_only(keep[index])

    @abstractmethod
    def _instantiated(self, inputs: Tensor, backprops: Tensor) -> dict[Tensor, Tensor]: ...

    @abstractmethod
    def _add_product(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None: ...


class Outer(Product):
    """A linear layer: Σ_t g_t a_tᵀ and Σ_t g_t, held as a and g.

    Args:
        weight, bias: the parameters, None where there is none or it is frozen.
        inputs: a, (records, [positions,] in).
        backprops: g, (records, [positions,] out).
    """

    def __init__(
        self, weight: Tensor | None, bias: Tensor | None, inputs: Tensor, backprops: Tensor
    ) -> None:
        super().__init__(inputs, backprops)
        self.weight, self.bias = weight, bias
        self.parameters = tuple(p for p in (weight, bias) if p is not None)
        self._norm, self._size = (
            (self._vector_norm(), None) if backprops.dim() == 2 else self._gram_norm()
        )

    def _vector_norm(self) -> Tensor:
        g = _norm_above(self.backprops)
        if self.weight is None:
            return g
        a = _norm_above(self.inputs)
        return g.mul_(a if self.bias is None else a.square_().add_(1.0).sqrt_())

    def _gram_norm(self) -> tuple[Tensor, Tensor]:
        """In float64: where positions cancel, the square of the norm is small beside the
        terms that it is the sum of.
        """
        n, positions, _ = self.backprops.shape
        norms, sizes = [], []
        for part in _chunks(n, positions * positions * 2):
            g = self.backprops[part].double()
            gram = torch.bmm(g, g.transpose(1, 2))
            size = gram.diagonal(dim1=1, dim2=2)
            if self.weight is not None:
                a = self.inputs[part].double()
                other = torch.bmm(a, a.transpose(1, 2))
                if self.bias is not None:
                    other.add_(1.0)
                size = size * other.diagonal(dim1=1, dim2=2)
                gram.mul_(other)
            sizes.append(size.clamp(min=0.0).sqrt().sum(1))
            norms.append(gram.sum((1, 2)).clamp_(min=0.0).sqrt_())
        dtype = _wide(self.backprops)
        return torch.cat(norms).to(dtype), torch.cat(sizes).to(dtype)

    def _add_product(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        dtype = next(iter(out.values())).dtype
        g = self.backprops.to(dtype) * factor.to(dtype).view(-1, *[1] * (self.backprops.dim() - 1))
        g = g.flatten(0, -2)
        if self.weight is not None and self.weight in out:
            out[self.weight].view(self.weight.shape).addmm_(
                g.T, self.inputs.reshape(len(g), -1).to(dtype)
            )
        if self.bias is not None and self.bias in out:
            out[self.bias].add_(g.sum(0))

    def add_squares(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        if self.backprops.dim() > 2:
            super().add_squares(factor, out)
            return
        dtype = next(iter(out.values())).dtype
        g = (self.backprops.to(dtype) * factor.to(dtype)[:, None]).square_()
        if self.weight is not None and self.weight in out:
            out[self.weight].view(self.weight.shape).addmm_(g.T, self.inputs.to(dtype).square())
        if self.bias is not None and self.bias in out:
            out[self.bias].add_(g.sum(0))

    def _instantiated(self, inputs: Tensor, backprops: Tensor) -> dict[Tensor, Tensor]:
        return _outer(self.weight, self.bias, inputs, backprops)


class Convolution(Product):
    """A convolution that is too large for its per-record gradients to be kept."""

    def __init__(self, geometry: _Geometry, inputs: Tensor, backprops: Tensor, way: str) -> None:
        super().__init__(inputs, backprops)
        self.geometry, self.parameters = geometry, geometry.parameters
        a, g = inputs.to(_wide(inputs)), backprops.to(_wide(backprops))
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
        dtype = next(iter(out.values())).dtype
        g = self.backprops.to(dtype) * factor.to(dtype).view(-1, *[1] * (self.backprops.dim() - 1))
        if weight is not None and weight in out:
            out[weight].add_(self.geometry.weight_gradient(self.inputs.to(dtype), g).flatten())
        if bias is not None and bias in out:
            out[bias].add_(g.flatten(2).sum(2).sum(0))


class Tokens(Contribution):
    """An embedding: each record's gradient has a row for each of its tokens, Σ of g over the
    token's positions.

    Args:
        weight: the table.
        tokens: (records, positions).
        backprops: g, (records, positions, width).
        padding_idx: the row that gets no gradient.
    """

    def __init__(
        self, weight: Tensor, tokens: Tensor, backprops: Tensor, padding_idx: int | None
    ) -> None:
        self.weight, self.parameters, self.records = weight, (weight,), len(tokens)
        self._held = (tokens, backprops)  # which one position a record is used as it is
        records = torch.arange(len(tokens), device=tokens.device)
        g = backprops.flatten(0, 1)
        if tokens.shape[1] == 1:
            self._tokens, self._records, self._rows = tokens[:, 0], records, g
        else:
            pairs, where = torch.unique(
                records[:, None] * len(weight) + tokens, return_inverse=True
            )
            self._tokens, self._records = pairs % len(weight), pairs // len(weight)
            self._rows = torch.zeros(
                len(pairs), g.shape[1], dtype=_wide(g), device=g.device
            ).index_add_(0, where.flatten(), g.to(_wide(g)))
        if padding_idx is not None:
            kept = self._tokens != padding_idx
            self._tokens, self._records, self._rows = (
                self._tokens[kept],
                self._records[kept],
                self._rows[kept],
            )

    def held(self) -> tuple[Tensor, ...]:
        return self._held

    def norm(self) -> Tensor:
        norms = torch.linalg.vector_norm(self._rows, dim=1, dtype=_wide(self._rows))
        return (
            torch.zeros(self.records, dtype=norms.dtype, device=norms.device)
            .index_add_(0, self._records, norms.square())
            .sqrt_()
        )

    def add_sum(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        if self.weight in out:
            into = out[self.weight].view(self.weight.shape)
            into.index_add_(
                0,
                self._tokens,
                self._rows.to(into.dtype) * factor.to(into.dtype)[self._records, None],
            )

    def add_squares(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        if self.weight in out:
            into = out[self.weight].view(self.weight.shape)
            into.index_add_(
                0,
                self._tokens,
                (self._rows.to(into.dtype) * factor.to(into.dtype)[self._records, None]).square_(),
            )

    def per_record(self) -> dict[Tensor, Tensor]:
        rows = torch.zeros(
            self.records * len(self.weight),
            self._rows.shape[1],
            dtype=self._rows.dtype,
            device=self._rows.device,
        )
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


# -- one function for each kind of layer: calls of it -> contribution ------------------------------


def linear(module: nn.Module, calls: Sequence[Call], way: str | None) -> Contribution:
    weight, bias = _trainable(module, "weight"), _trainable(module, "bias")
    pieces = []
    for (inputs,), g, _ in calls:
        if g.dim() < 2:
            raise ValueError("the input has no dimension of records")
        g = g.flatten(1, -2) if g.dim() > 3 else g
        a = inputs.to(g.dtype)
        pieces.append((a.reshape(*g.shape[:-1], a.shape[-1]), g))
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
    return PerRecord(_outer(weight, bias, a, g))


def convolution(module: nn.Module, calls: Sequence[Call], way: str | None) -> Contribution:
    geometry = _Geometry(module)
    if len(calls) > 1:
        return together([convolution(module, [call], way) for call in calls])
    (inputs,), g, _ = calls[0]
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
    tokens = torch.cat([inputs.reshape(len(inputs), -1) for (inputs,), _, _ in calls], dim=1)
    g = torch.cat([g.reshape(len(g), -1, module.embedding_dim) for _, g, _ in calls], dim=1)
    return Tokens(module.weight, tokens, g, module.padding_idx)


def normalization(module: nn.Module, calls: Sequence[Call], _way: str | None) -> Contribution:
    weight, bias = _trainable(module, "weight"), _trainable(module, "bias")
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

_DIMENSIONS_OF_ONE_ROW: dict[type[nn.Module], int] = {
    nn.Linear: 1,
    RNNLinear: 1,
    nn.Embedding: 0,
    nn.Conv1d: 2,
    nn.Conv2d: 3,
    nn.Conv3d: 4,
    nn.InstanceNorm1d: 2,
    nn.InstanceNorm2d: 3,
    nn.InstanceNorm3d: 4,
}


def rows_of(module: nn.Module, given: Tensor) -> tuple[bool, bool]:
    """Of what one record gives to a layer: whether dimension 0 is one row of the layer's, and
    whether it is several.
    """
    if isinstance(module, nn.GroupNorm):
        of_one_row = given.dim() - 1
    elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        of_one_row = len(module.normalized_shape)
    else:
        of_one_row = _DIMENSIONS_OF_ONE_ROW[type(module)]
    if given.dim() <= of_one_row:
        return False, False
    if given.shape[0] == 1:
        return True, False
    # other rows are positions of the record
    has_positions = isinstance(module, (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm))
    return False, not has_positions


def kernel_of(module: nn.Module) -> Kernel | None:
    """The kernel for exactly this kind of layer; None where it has parameters that the kernel
    does not know.
    """
    kernel = KERNELS.get(type(module))
    known = {name for name, p in module._parameters.items() if p is not None} <= {
        "weight",
        "bias",
    } and module._parameters.get("weight") is not None
    return kernel if known else None


# -- which way -------------------------------------------------------------------------------------


def choose_linear(positions: int, width_in: int, width_out: int) -> str:
    """``"gram"`` or ``"instantiate"`` for a linear layer, by the estimated time of either."""
    weights = width_in * width_out
    gram = positions**2 * (width_in + width_out) * _GRAM + positions * weights * _MATMUL
    instantiate = positions * weights * _MATMUL + weights * _WRITE
    return "gram" if gram < instantiate else "instantiate"


def choose_convolution(geometry: _Geometry, inputs: Tensor, backprops: Tensor) -> tuple[str, bool]:
    """``"gram"``, ``"unfold"``, ``"grouped"`` or ``"loop"``, and whether the per-record
    gradients are kept for the sum.
    """
    positions = backprops[0, 0].numel()
    weights, held = geometry.numel, inputs[0].numel() + backprops[0].numel()
    columns = weights // backprops.shape[1]  # of the unfolded input, for each group
    products, unfolded = positions * weights, columns * geometry.groups * positions
    is_onednn = (
        inputs.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and backprops.dtype == torch.float32
    )
    times = {"unfold": products * _MATMUL + unfolded * _UNFOLD}
    if is_onednn:
        times["loop"] = products * _CONVOLUTION + _CALL
        if (
            inputs.shape[1] // geometry.groups % 16 == 0
            and backprops.shape[1] // geometry.groups % 16 == 0
        ):
            times["grouped"] = products * _CONVOLUTION + weights * 2 * _WRITE
    way = min(times, key=lambda w: times[w])
    # the weighted sum, from inputs and output gradients
    again = products * (_CONVOLUTION if is_onednn else _MATMUL) + held * _UNFOLD
    is_kept = weights <= held or (weights <= 2 * held and weights * _WRITE < again)
    gram = (
        unfolded * _UNFOLD + positions**2 * (columns * geometry.groups + backprops.shape[1]) * _GRAM
    )
    if gram + again < times[way] + (weights * _WRITE if is_kept else again):
        return "gram", False
    return way, is_kept


# -- convolutions ----------------------------------------------------------------------------------


class _Geometry:
    """The arithmetic of one convolution layer: padding, strides, groups, in one to three
    dimensions.
    """

    def __init__(self, module: nn.Module) -> None:
        assert isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
        self.weight, self.bias = _trainable(module, "weight"), _trainable(module, "bias")
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
        return torch.cat(
            [
                torch.linalg.vector_norm(g, dim=1, dtype=_wide(g))
                for g in self.instantiate(inputs, backprops, way)
            ]
        )

    def gram_norm(self, inputs: Tensor, backprops: Tensor) -> Tensor:
        """As a linear layer over positions, for each group."""
        norms = []
        positions = backprops[0, 0].numel()
        assert self.weight is not None
        for part in _chunks(len(backprops), self.numel // self.shape[0] * self.groups * positions):
            u = self.unfolded(inputs[part]).flatten(0, 1).transpose(1, 2)
            g = backprops[part].reshape(len(u), -1, positions).transpose(1, 2)
            norms.append(
                torch.linalg.vector_norm(
                    Outer(self.weight, None, u, g).norm().view(-1, self.groups), dim=1
                )
            )
        return torch.cat(norms)


# -- small things ----------------------------------------------------------------------------------


def _trainable(module: nn.Module, name: str) -> Tensor | None:
    p = module._parameters.get(name)
    return p if p is not None and p.requires_grad else None


def _outer(
    weight: Tensor | None, bias: Tensor | None, inputs: Tensor, backprops: Tensor
) -> dict[Tensor, Tensor]:
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
    """Row norms, plus at most what is lost where squares underflow: a product with a huge
    number must not hide it.
    """
    if t.dtype == torch.float64:
        return torch.linalg.vector_norm(t, dim=1).add_(math.sqrt(t.shape[1]) * 1.5e-154)
    return torch.linalg.vector_norm(t, dim=1, dtype=torch.float32).add_(
        math.sqrt(t.shape[1]) * 1.1e-19
    )


def _rows(t: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep.view(-1, *[1] * (t.dim() - 1)), t, 0.0)


def _chunks(n: int, numbers: int) -> Iterator[slice]:
    """Slices of the records, each with about ``_CHUNK`` numbers if one record has ``numbers``."""
    step = max(1, _CHUNK // max(1, numbers))
    return (slice(i, i + step) for i in range(0, n, step))
