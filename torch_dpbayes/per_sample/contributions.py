"""What a layer adds to every record's gradient, and the sum of the clipped gradients."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

_CHUNK = 2**20  # numbers in a temporary that is worked off in chunks: about what stays in the cache

# A product over positions adds up terms of size κ·‖g_i‖, which cancel down to ‖g_i‖ and leave about
# κ·2⁻²⁴·‖g_i‖ of rounding in float32. Below this κ that is 6e-5 of the clip norm; a record above it
# is summed by itself first, as its norm is.
LARGEST_CANCELLATION = 2.0**10


class Contribution(ABC):
    """What a layer adds to the gradient g_i of every record, before clipping.

    Attributes:
        parameters: those it has gradients for.
        held: tensors that must stay as they are until the sum is taken.
    """

    parameters: tuple[Tensor, ...]
    held: tuple[Tensor, ...] = ()

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

    def __init__(self, gradients: Mapping[Tensor, Tensor]) -> None:
        self.gradients = {p: g.reshape(len(g), p.numel()) for p, g in gradients.items()}
        self.parameters = tuple(gradients)

    def norm(self) -> Tensor:
        return _joined(
            [
                torch.linalg.vector_norm(
                    g, dim=1, dtype=torch.promote_types(g.dtype, torch.float32)
                )
                for g in self.gradients.values()
            ]
        )

    def add_sum(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        for p, g in self.gradients.items():
            if p in out:
                out[p].addmv_(g.to(out[p].dtype).T, factor.to(out[p].dtype))

    def per_record(self) -> dict[Tensor, Tensor]:
        return self.gradients

    def keep_only(self, keep: Tensor) -> None:
        self.gradients = {p: _kept(g, keep) for p, g in self.gradients.items()}


class Product(Contribution):
    """Held as what went in and the gradient of what came out, of which one product makes the sum
    over records and positions.

    Args:
        inputs, backprops: with records in dimension 0.

    Attributes:
        size: at least Σ_t ‖(term t of g_i)‖, what rounding in the product is relative to; None
            where there is one term.
    """

    size: Tensor | None = None
    _norm: Tensor

    def __init__(self, inputs: Tensor, backprops: Tensor) -> None:
        self.inputs, self.backprops = inputs, backprops
        self.held = (inputs, backprops)
        self._apart: tuple[Tensor, PerRecord] | None = None

    def norm(self) -> Tensor:
        return self._norm

    def set_apart(self, which: Tensor) -> None:
        """Sum these records by themselves from now on, their norms included."""
        index = which.nonzero().flatten()
        apart = self._per_record(self.inputs[index], self.backprops[index])
        self.keep_only(~which)
        self._norm = self._norm.index_copy(0, index, apart.norm().to(self._norm.dtype))
        self._apart, self.size = (index, apart), None

    def add_sum(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        self._add_product(factor, out)
        if self._apart is not None:
            index, apart = self._apart
            apart.add_sum(factor[index], out)

    def per_record(self) -> dict[Tensor, Tensor]:
        gradients = self._per_record(self.inputs, self.backprops).gradients
        if self._apart is None:
            return gradients
        index, apart = self._apart
        return {p: g.index_copy(0, index, apart.gradients[p]) for p, g in gradients.items()}

    def keep_only(self, keep: Tensor) -> None:
        self.inputs, self.backprops = _kept(self.inputs, keep), _kept(self.backprops, keep)
        if self._apart is not None:
            index, apart = self._apart
            apart.keep_only(keep[index])

    def _per_record(self, inputs: Tensor, backprops: Tensor) -> PerRecord:
        """In the type of sums, so that nothing is rounded of which the norm knows nothing."""
        dtype = wide(backprops)
        return PerRecord(self._instantiated(inputs.to(dtype), backprops.to(dtype)))

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
        if backprops.dim() == 2:
            self._norm = self._vector_norm()
        else:
            self._norm, self.size = self._gram_norm()

    def _vector_norm(self) -> Tensor:
        g = _norm_above(self.backprops)
        if self.weight is None:
            return g
        if self.bias is None:
            return g.mul_(_norm_above(self.inputs))
        # inputs whose squares underflow are nothing beside the bias' 1
        a = torch.linalg.vector_norm(self.inputs, dim=1, dtype=g.dtype)
        return a.mul_(g).hypot_(g)

    def _gram_norm(self) -> tuple[Tensor, Tensor]:
        """In float64: where positions cancel, the squared norm is small beside its terms."""
        n, positions, _ = self.backprops.shape
        norms, sizes = [], []
        for part in chunks(n, positions * positions * 2):
            g = self.backprops[part].double()
            gram = torch.bmm(g, g.transpose(1, 2))
            size = gram.diagonal(dim1=1, dim2=2)
            lost: Tensor | float = 0.0  # where squares underflow and the other factor is huge
            if self.weight is not None:
                a = self.inputs[part].double()
                other = torch.bmm(a, a.transpose(1, 2))
                if self.bias is not None:
                    other.add_(1.0)
                of_inputs = other.diagonal(dim1=1, dim2=2)
                if self.backprops.dtype == torch.float64:
                    lost = _lost_in_squares(g) * of_inputs.sqrt().sum(1)
                    lost += _lost_in_squares(a) * size.sqrt().sum(1)
                size = size * of_inputs
                gram.mul_(other)
            sizes.append(size.clamp(min=0.0).sqrt().sum(1))
            norms.append(gram.sum((1, 2)).clamp_(min=0.0).sqrt_().add_(lost))
        dtype = wide(self.backprops)
        return torch.cat(norms).to(dtype), torch.cat(sizes).to(dtype)

    def _add_product(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        g, a = weighted(self.backprops, factor, out), self.inputs
        if g.dim() > 2:
            g, a = g.flatten(0, -2), a.flatten(0, -2)
        self._add(g, a.to(g.dtype), out)

    def add_squares(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        if self.backprops.dim() > 2:
            super().add_squares(factor, out)
            return
        g = weighted(self.backprops, factor, out).square_()
        self._add(g, self.inputs.to(g.dtype).square(), out)

    def _add(self, g: Tensor, a: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        if self.weight is not None and self.weight in out:
            out[self.weight].view(self.weight.shape).addmm_(g.t(), a)
        if self.bias is not None and self.bias in out:
            out[self.bias].add_(g.sum(0))

    def _instantiated(self, inputs: Tensor, backprops: Tensor) -> dict[Tensor, Tensor]:
        return outer(self.weight, self.bias, inputs, backprops)


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
        self.weight, self.parameters = weight, (weight,)
        self.held = (tokens, backprops)  # of one position a record they are used as they are
        self._number = len(tokens)
        records, g = torch.arange(len(tokens), device=tokens.device), backprops.flatten(0, 1)
        if tokens.shape[1] == 1:
            self._tokens, self._records, self._rows = tokens[:, 0], records, g
        else:
            pairs, where = torch.unique(
                records[:, None] * len(weight) + tokens, return_inverse=True
            )
            self._tokens, self._records = pairs % len(weight), pairs // len(weight)
            rows = torch.zeros(len(pairs), g.shape[1], dtype=wide(g), device=g.device)
            self._rows = rows.index_add_(0, where.flatten(), g.to(rows.dtype))
        if padding_idx is not None:
            kept = self._tokens != padding_idx
            self._tokens, self._records = self._tokens[kept], self._records[kept]
            self._rows = self._rows[kept]

    def norm(self) -> Tensor:
        norms = torch.linalg.vector_norm(self._rows, dim=1, dtype=wide(self._rows))
        squares = torch.zeros(self._number, dtype=norms.dtype, device=norms.device)
        return squares.index_add_(0, self._records, norms.square()).sqrt_()

    def add_sum(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        self._add(weighted(self._rows, factor[self._records], out), out)

    def add_squares(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        self._add(weighted(self._rows, factor[self._records], out).square_(), out)

    def _add(self, rows: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        if self.weight in out:
            out[self.weight].view(self.weight.shape).index_add_(0, self._tokens, rows)

    def per_record(self) -> dict[Tensor, Tensor]:
        rows = self._rows.new_zeros(self._number * len(self.weight), self._rows.shape[1])
        rows[self._records * len(self.weight) + self._tokens] = self._rows
        return {self.weight: rows.view(self._number, -1)}

    def keep_only(self, keep: Tensor) -> None:
        self._rows = _kept(self._rows, keep[self._records])


def together(parts: Sequence[Contribution]) -> Contribution:
    """Contributions to parameters that are shared: norms do not add up, per-record gradients do."""
    if len(parts) == 1:
        return parts[0]
    gradients: dict[Tensor, Tensor] = {}
    for part in parts:
        for p, g in part.per_record().items():
            gradients[p] = g if p not in gradients else gradients[p] + g
    return PerRecord(gradients)


# -- clipping --------------------------------------------------------------------------------------


def add_clipped(
    parts: Sequence[Contribution],
    max_grad_norm: float,
    out: Mapping[Tensor, Tensor],
    scale: Tensor | None,
    second_moment: Tensor | None,
) -> int:
    """Add Σ_i clip(g_i) of some records to ``out``, a flat tensor for each parameter; returns how
    many records they are.
    """
    is_full = second_moment is not None and second_moment.dim() > 1
    if scale is not None or is_full:
        found = {p: g for part in parts for p, g in part.per_record().items()}
        rows = [found[p] for p in out]
        rows = rows if scale is None else _scaled(rows, scale)
        parts = [PerRecord(dict(zip(out, rows, strict=True)))]
    norm = joint_norm(parts, max_grad_norm)
    factor = torch.full_like(norm, max_grad_norm).div_(norm).clamp_max_(1.0)
    # 0·inf is nan: a record that is not finite has to be cut out, not scaled away. So has one so
    # large that a subnormal factor is rounded up. Squares overflow before either (C is 1e-12 or
    # more); where only they do, no record is found to be cut out.
    if not math.isfinite(norm.dot(norm)):
        kept = factor >= torch.finfo(factor.dtype).tiny
        factor = torch.where(kept, factor, 0.0)
        for part in parts:
            part.keep_only(kept)
    for part in parts:
        part.add_sum(factor, out)
    if second_moment is not None and is_full:
        rows = [g.to(second_moment.dtype) for g in parts[0].per_record().values()]
        clipped = torch.cat(rows, dim=1) * factor[:, None].to(second_moment.dtype)
        second_moment.addmm_(clipped.T, clipped)
    elif second_moment is not None:
        squares = dict(zip(out, second_moment.split([p.numel() for p in out]), strict=True))
        for part in parts:
            part.add_squares(factor, squares)
    return len(norm)


def joint_norm(parts: Sequence[Contribution], floor: float = 0.0) -> Tensor:
    """Every record's norm over everything; norms below ``floor`` are not clipped."""
    norm = _joined([part.norm() for part in parts])
    sized = [p for p in parts if isinstance(p, Product) and p.size is not None]
    if sized:
        limit = LARGEST_CANCELLATION * norm.clamp(min=floor)
        above = torch.stack([part.size for part in sized if part.size is not None]) > limit
        if bool(above.any()):
            for part, which in zip(sized, above, strict=True):
                if bool(which.any()):
                    part.set_apart(which)
            norm = _joined([part.norm() for part in parts])
    return norm


def _joined(norms: Sequence[Tensor]) -> Tensor:
    if len(norms) == 1:
        return norms[0]
    dtype = max((n.dtype for n in norms), key=lambda d: d.itemsize)
    return torch.linalg.vector_norm(torch.stack([n.to(dtype) for n in norms]), dim=0)


def _scaled(gradients: Sequence[Tensor], scale: Tensor) -> list[Tensor]:
    """F⁻¹g for every record's g."""
    rows = torch.cat([g.to(scale.dtype) for g in gradients], dim=1)
    if scale.dim() == 1:
        rows = rows / scale
    else:
        rows = torch.linalg.solve_triangular(scale, rows.T, upper=False).T
    return list(rows.split([g.shape[1] for g in gradients], dim=1))


# -- what layers share -----------------------------------------------------------------------------


def trainable(module: nn.Module, name: str) -> Tensor | None:
    p = module._parameters.get(name)
    return p if p is not None and p.requires_grad else None


def outer(
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


def wide(t: Tensor) -> torch.dtype:
    """The type of norms and of sums: float32, or float64 where the numbers are."""
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def _norm_above(t: Tensor) -> Tensor:
    """Row norms, plus at most what is lost where squares underflow: a product with a huge
    number must not hide it.
    """
    return torch.linalg.vector_norm(t, dim=1, dtype=wide(t)).add_(_lost_in_squares(t))


def _lost_in_squares(t: Tensor) -> float:
    """At most the length of a row of ``t`` whose squares underflow."""
    return math.sqrt(t.shape[-1]) * (1.5e-154 if t.dtype == torch.float64 else 1.1e-19)


def weighted(rows: Tensor, factor: Tensor, out: Mapping[Tensor, Tensor]) -> Tensor:
    """``rows``, each times its factor, in the type of sums."""
    dtype = next(iter(out.values())).dtype
    return rows.to(dtype) * factor.to(dtype).view(-1, *[1] * (rows.dim() - 1))


def _kept(t: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep.view(-1, *[1] * (t.dim() - 1)), t, 0.0)


def chunks(n: int, numbers: int) -> Iterator[slice]:
    """Slices of the records, each with about ``_CHUNK`` numbers if one record has ``numbers``."""
    step = max(1, _CHUNK // max(1, numbers))
    return (slice(i, i + step) for i in range(0, n, step))


# Products of float32 that torch may compute in TensorFloat-32 or bfloat16, by device. Read without
# the properties, which are slow.
_PRODUCTS = {
    "cpu": (("mkldnn", "matmul"), ("mkldnn", "conv")),
    "cuda": (("cuda", "matmul"), ("cuda", "conv")),
}
_FULL, _AS_IT_IS = ("ieee", "none"), nullcontext()
if hasattr(torch._C, "_get_fp32_precision_getter"):
    _precision_of: Any = torch._C._get_fp32_precision_getter
    _set_precision_of: Any = torch._C._set_fp32_precision_setter
else:  # torch before 2.9
    _FLAGS: dict[str, Any] = {"matmul": torch.backends.cuda.matmul, "conv": torch.backends.cudnn}

    def _precision_of(backend: str, name: str) -> Any:
        return "tf32" if backend == "cuda" and _FLAGS[name].allow_tf32 else "ieee"

    def _set_precision_of(_backend: str, name: str, precision: Any) -> None:
        _FLAGS[name].allow_tf32 = precision != "ieee"


def full_precision(device: torch.device) -> AbstractContextManager[None]:
    """Neither autocast nor reduced products: norms and sums would differ by their rounding."""
    kind = device.type
    are_full = all(_precision_of(*of) in _FULL for of in _PRODUCTS.get(kind, ()))
    if are_full and not torch.is_autocast_enabled(kind):
        return _AS_IT_IS
    return _raised_precision(kind, [(of, _precision_of(*of)) for of in _PRODUCTS.get(kind, ())])


@contextmanager
def _raised_precision(kind: str, products: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    for of, _ in products:
        _set_precision_of(*of, "ieee")
    try:
        with torch.autocast(kind, enabled=False):
            yield
    finally:
        for of, precision in products:
            _set_precision_of(*of, precision)
