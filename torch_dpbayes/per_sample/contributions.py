"""What one layer adds to the gradient of every record: norms, and sums of what is clipped."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from .gradient_source import joint_norms

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
        self.records = backprops.shape[0]
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
        apart = self._per_record(self.inputs[index], self.backprops[index])
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
        gradients = self._per_record(self.inputs, self.backprops).gradients
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
        self._norm, self._size = (
            (self._vector_norm(), None) if backprops.dim() == 2 else self._gram_norm()
        )

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
        """In float64: where positions cancel, the square of the norm is small beside the
        terms that it is the sum of.
        """
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
                len(pairs), g.shape[1], dtype=wide(g), device=g.device
            ).index_add_(0, where.flatten(), g.to(wide(g)))
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
        norms = torch.linalg.vector_norm(self._rows, dim=1, dtype=wide(self._rows))
        return (
            torch.zeros(self.records, dtype=norms.dtype, device=norms.device)
            .index_add_(0, self._records, norms.square())
            .sqrt_()
        )

    def add_sum(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        self._add(weighted(self._rows, factor[self._records], out), out)

    def add_squares(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        self._add(weighted(self._rows, factor[self._records], out).square_(), out)

    def _add(self, rows: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        if self.weight in out:
            out[self.weight].view(self.weight.shape).index_add_(0, self._tokens, rows)

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
    dtype = torch.promote_types(t.dtype, torch.float32)
    return torch.linalg.vector_norm(t, dim=1, dtype=dtype).add_(_lost_in_squares(t))


def _lost_in_squares(t: Tensor) -> float:
    """At most the length of a row of ``t`` whose squares underflow."""
    return math.sqrt(t.shape[-1]) * (1.5e-154 if t.dtype == torch.float64 else 1.1e-19)


def weighted(rows: Tensor, factor: Tensor, out: Mapping[Tensor, Tensor]) -> Tensor:
    """``rows``, each times its factor, in the type of sums."""
    dtype = next(iter(out.values())).dtype
    return rows.to(dtype) * factor.to(dtype).view(-1, *[1] * (rows.dim() - 1))


def _rows(t: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep.view(-1, *[1] * (t.dim() - 1)), t, 0.0)


def chunks(n: int, numbers: int) -> Iterator[slice]:
    """Slices of the records, each with about ``_CHUNK`` numbers if one record has ``numbers``."""
    step = max(1, _CHUNK // max(1, numbers))
    return (slice(i, i + step) for i in range(0, n, step))
