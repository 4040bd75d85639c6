# ruff: noqa: SLF001 - of products, whose norms are taken together
"""What a layer adds to every record's gradient."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import arithmetic
from .arithmetic import LOST_IN_SPLIT, chunks, is_split, joined, product, split, wide


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
        return joined(
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


class Small(Contribution):
    """Per-record gradients of parameters with few numbers, side by side: one operation for all."""

    def __init__(self, gradients: Mapping[Tensor, Tensor]) -> None:
        self.parameters, self._sizes = tuple(gradients), [p.numel() for p in gradients]
        self._rows = torch.cat(list(gradients.values()), dim=1)

    def norm(self) -> Tensor:
        return torch.linalg.vector_norm(self._rows, dim=1)

    def add_sum(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        dtype = next(iter(out.values())).dtype
        total = torch.mv(self._rows.to(dtype).T, factor.to(dtype)).split(self._sizes)
        found = [(out[p], t) for p, t in zip(self.parameters, total, strict=True) if p in out]
        torch._foreach_add_([p for p, _ in found], [t for _, t in found])

    def per_record(self) -> dict[Tensor, Tensor]:
        rows = self._rows.split(self._sizes, dim=1)
        return dict(zip(self.parameters, rows, strict=True))

    def keep_only(self, keep: Tensor) -> None:
        self._rows = _kept(self._rows, keep)


_SMALL = 2**12  # numbers of a parameter
_ALL = slice(None)


def merged(parts: Sequence[Contribution]) -> Sequence[Contribution]:
    """The same contributions with small gradients together."""
    small: dict[Tensor, Tensor] = {}
    rest: list[Contribution] = []
    for part in parts:
        if type(part) is not PerRecord:
            rest.append(part)
            continue
        found = {p: g for p, g in part.gradients.items() if g.shape[1] <= _SMALL}
        small.update((p, g.to(wide(g))) for p, g in found.items())
        if len(found) < len(part.gradients):
            rest.append(PerRecord({p: g for p, g in part.gradients.items() if p not in found}))
    if len(small) < 3 or len({g.dtype for g in small.values()}) > 1:
        return parts
    return [*rest, Small(small)]


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
    _norm: Tensor | None = None

    def __init__(self, inputs: Tensor, backprops: Tensor) -> None:
        self.inputs, self.backprops = inputs, backprops
        self.held = (inputs, backprops)
        self._apart: tuple[Tensor, PerRecord] | None = None

    def norm(self) -> Tensor:
        if self._norm is None:
            found = self._norms_and_sizes()
            self._norm, self.size = (t.to(wide(self.backprops)) for t in found)
        return self._norm

    @abstractmethod
    def _norms_and_sizes(self) -> tuple[Tensor, Tensor]: ...

    def set_apart(self, which: Tensor) -> None:
        """Sum these records by themselves from now on, their norms included."""
        index = which.nonzero().flatten()
        apart, norm = PerRecord(self.per_record_of(index)), self.norm()
        self.keep_only(~which)
        self._norm = norm.index_copy(0, index, apart.norm().to(norm.dtype))
        self._apart, self.size = (index, apart), None

    def add_sum(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        self._add_product(factor, out)
        if self._apart is not None:
            index, apart = self._apart
            apart.add_sum(factor[index], out)

    def per_record(self) -> dict[Tensor, Tensor]:
        gradients = self.per_record_of(_ALL)
        if self._apart is None:
            return gradients
        index, apart = self._apart
        return {p: g.index_copy(0, index, apart.gradients[p]) for p, g in gradients.items()}

    def keep_only(self, keep: Tensor) -> None:
        self.inputs, self.backprops = _kept(self.inputs, keep), _kept(self.backprops, keep)
        if self._apart is not None:
            index, apart = self._apart
            apart.keep_only(keep[index])

    def wide_of(self, which: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Inputs and output gradients of these records, in the type of sums."""
        dtype = wide(self.backprops)
        return self.inputs[which].to(dtype), self.backprops[which].to(dtype)

    @abstractmethod
    def per_record_of(self, which: Tensor | slice) -> dict[Tensor, Tensor]:
        """As matrices, in the type of sums: nothing is rounded that the norm does not see."""

    @abstractmethod
    def _add_product(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None: ...


class Outer(Product):
    """A linear layer: Σ_t g_t a_tᵀ and Σ_t g_t, held as a and g.

    Args:
        weight, bias: the parameters, None where there is none or it is frozen.
        inputs: a, (records, [positions,] in).
        backprops: g, (records, [positions,] out).
        is_transposed: whether the weight is (in, out).
    """

    def __init__(
        self,
        weight: Tensor | None,
        bias: Tensor | None,
        inputs: Tensor,
        backprops: Tensor,
        *,
        is_transposed: bool = False,
    ) -> None:
        super().__init__(inputs, backprops)
        self.weight, self.bias, self.is_transposed = weight, bias, is_transposed
        self.parameters = tuple(p for p in (weight, bias) if p is not None)
        if backprops.dim() == 2:
            norm = self._vector_norm()
            self._norm = norm.mul_(1 + LOST_IN_SPLIT) if is_split(backprops) else norm

    def _norms_and_sizes(self) -> tuple[Tensor, Tensor]:
        return self._norms_of(self.inputs, self.backprops)

    def _norms_of(self, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        each = g.shape[1] * 2 * (2 * g.shape[1] + g.shape[2] + a.shape[2])
        parts = chunks(len(g), each, g.device)
        has = {"has_weight": self.weight is not None, "has_bias": self.bias is not None}
        norms, sizes = beside([gram_norms(a[part], g[part], **has) for part in parts])
        return (norms + LOST_IN_SPLIT * sizes if is_split(g) else norms), sizes

    def _vector_norm(self) -> Tensor:
        g = _norm_above(self.backprops)
        if self.weight is None:
            return g
        if self.bias is None:
            return g.mul_(_norm_above(self.inputs))
        # inputs whose squares underflow are nothing beside the bias' 1
        a = torch.linalg.vector_norm(self.inputs, dim=1, dtype=g.dtype)
        return a.mul_(g).hypot_(g)

    def _add_product(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        parts = [_ALL]
        if is_split(self.backprops):
            parts = list(chunks(len(factor), self.backprops[0].numel(), factor.device))
        for part in parts:
            g, a = weighted(self.backprops[part], factor[part], out), self.inputs[part]
            self._add(g.reshape(-1, g.shape[-1]), a.reshape(-1, a.shape[-1]), out)

    def add_squares(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        if self.backprops.dim() > 2:
            super().add_squares(factor, out)
            return
        g = weighted(self.backprops, factor, out).square_()
        self._add(g, self.inputs.to(g.dtype).square(), out)

    def _add(self, g: Tensor, a: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        if self.weight is not None and self.weight in out:
            weight = out[self.weight].view(self.weight.shape)
            if not is_split(a) or g.dtype != torch.float32:
                left, right = (a.to(g.dtype), g) if self.is_transposed else (g, a.to(g.dtype))
                weight.addmm_(left.t(), right)
            else:  # the factors in g stay exact
                for term in split(g, 2):
                    left, right = (a, term) if self.is_transposed else (term, a)
                    weight.add_(product(left.t(), right))
        if self.bias is not None and self.bias in out:
            out[self.bias].add_(g.sum(0))

    def per_record_of(self, which: Tensor | slice) -> dict[Tensor, Tensor]:
        a, g = self.wide_of(which)
        found = outer(self.weight, self.bias, a, g, is_transposed=self.is_transposed)
        return PerRecord(found).gradients


def set_norms(parts: Sequence[Contribution]) -> None:
    """Norms of linear layers with equal shapes are taken together: to launch an operation on a GPU
    takes longer than to run a small one.
    """
    groups: dict[Any, list[Outer]] = {}
    for part in parts:
        if type(part) is Outer and part._norm is None:
            a, g = part.inputs, part.backprops
            key = a.shape, g.shape, g.dtype, part.weight is None, part.bias is None
            groups.setdefault(key, []).append(part)
    for alike in groups.values():
        n, numbers = len(alike[0].inputs), alike[0].inputs.numel() + alike[0].backprops.numel()
        step = max(1, arithmetic.machine_of(alike[0].inputs.device).piece // numbers)
        for some in (alike[k : k + step] for k in range(0, len(alike), step) if step > 1):
            a, g = (
                torch.cat(t) for t in zip(*((x.inputs, x.backprops) for x in some), strict=True)
            )
            rows = (t.to(wide(g)).view(-1, n) for t in some[0]._norms_of(a, g))
            for layer, norm, size in zip(some, *rows, strict=True):
                layer._norm, layer.size = norm, size


def beside(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Norms and sizes of some records after those of others."""
    if len(pairs) == 1:
        return pairs[0]
    norms, sizes = zip(*pairs, strict=True)
    return torch.cat(norms), torch.cat(sizes)


def gram_norms(
    a: Tensor, g: Tensor, *, has_weight: bool = True, has_bias: bool = False
) -> tuple[Tensor, Tensor]:
    """Norms, and sizes Σ_t ‖g_t‖·‖a_t‖, in float64: where positions cancel, the squared norm is
    small beside its terms. To norms of float32 2⁻¹²⁶ is added: they are normal numbers then, whose
    rounding is relative.
    """
    is_wider, g, a = g.dtype != torch.float64, g.double(), a.double()
    products = torch.bmm(g, g.transpose(1, 2))
    size = products.diagonal(dim1=1, dim2=2).clone()
    lost: Tensor | float = _TINY if is_wider else 0.0
    if has_weight:
        others = torch.bmm(a, a.transpose(1, 2))
        if has_bias:
            others.add_(1.0)
        of_inputs = others.diagonal(dim1=1, dim2=2)
        if not is_wider:  # where squares underflow and the other factor is huge
            lost = _lost_in_squares(g) * of_inputs.sqrt().sum(1)
            lost += _lost_in_squares(a) * size.sqrt().sum(1)
        size.mul_(of_inputs)
        products.mul_(others)
    norm = products.sum((1, 2)).clamp_(min=0.0).sqrt_().add_(lost)
    return norm, size.sqrt_().sum(1)


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
        n, positions = tokens.shape
        g, self.tokens = backprops.flatten(0, 1), tokens.flatten()
        self._records = torch.arange(n, device=tokens.device).repeat_interleave(positions)
        if positions > 1:  # the first place of each token gets the sum, the others nothing
            where = _first_places(tokens).flatten()
            rows = torch.zeros(g.shape, dtype=wide(g), device=g.device)
            g = rows.index_add_(0, where, g.to(rows.dtype))
        if padding_idx is not None:
            g = _kept(g, self.tokens != padding_idx)
        self.rows, self._number = g, n

    def norm(self) -> Tensor:
        norms = torch.linalg.vector_norm(self.rows, dim=1, dtype=wide(self.rows))
        squares = torch.zeros(self._number, dtype=norms.dtype, device=norms.device)
        return squares.index_add_(0, self._records, norms.square()).sqrt_()

    def add_sum(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        self._add(weighted(self.rows, factor[self._records], out), out)

    def add_squares(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        self._add(weighted(self.rows, factor[self._records], out).square_(), out)

    def _add(self, rows: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        if self.weight in out:
            out[self.weight].view(self.weight.shape).index_add_(0, self.tokens, rows)

    def per_record(self, which: Tensor | slice = _ALL) -> dict[Tensor, Tensor]:
        g = self.rows.view(self._number, -1, self.rows.shape[1])[which]
        places = self.tokens.view(self._number, -1, 1)[which].expand_as(g)
        rows = g.new_zeros(len(g), *self.weight.shape).scatter_add_(1, places, g)
        return {self.weight: rows.flatten(1)}

    def keep_only(self, keep: Tensor) -> None:
        self.rows = _kept(self.rows, keep[self._records])


class Tied(Product):
    """An embedding whose table is a linear layer's weight as well, as in language models.

    With A of the linear layer and E of the embedding, ‖A + E‖² = ‖A‖² + ‖E‖² + 2⟨A, E⟩, where E has
    a row e_r for each token r and ⟨A, E⟩ = Σ_r Σ_t g_t[r]·⟨a_t, e_r⟩. All three are found in
    float64, of what the sum is made of: where A and E cancel, their rounding would not.
    """

    def __init__(self, linear: Outer, tokens: Tokens) -> None:
        super().__init__(linear.inputs, linear.backprops)
        self.linear, self.tokens, self.parameters = linear, tokens, tokens.parameters
        self.held = (*linear.held, *tokens.held)

    def _norms_and_sizes(self) -> tuple[Tensor, Tensor]:
        n, rows, places = len(self.inputs), self.tokens.rows, self.tokens.tokens
        a, g, e = (t.view(n, -1, t.shape[-1]) for t in (self.inputs, self.backprops, rows))
        places, positions = places.view(n, 1, -1), g.shape[1]
        widths = 2 * positions + a.shape[2] + g.shape[2] + 2 * e.shape[1]
        found = []
        for part in chunks(n, 2 * (positions * widths + e[0].numel()), g.device):
            norm, size = gram_norms(a[part], g[part])
            of_tokens = e[part].double()
            other = torch.linalg.vector_norm(of_tokens, dim=(1, 2))
            if rows.dtype == torch.float64:  # the inner product loses less than both norms
                other += math.sqrt(e.shape[1]) * _lost_in_squares(e)
            picked = g[part].gather(2, places[part].expand(-1, positions, -1)).double()
            inner = torch.bmm(a[part].double(), of_tokens.transpose(1, 2)).mul_(picked).sum((1, 2))
            norm = (norm.square() + other.square() + 2 * inner).clamp_(min=0.0).sqrt_()
            if is_split(g):  # the linear layer's product
                norm += LOST_IN_SPLIT * size
            found.append((norm, size + other))
        return beside(found)

    def per_record_of(self, which: Tensor | slice) -> dict[Tensor, Tensor]:
        return _added([self.linear.per_record_of(which), self.tokens.per_record(which)])

    def keep_only(self, keep: Tensor) -> None:
        super().keep_only(keep)
        self.linear.keep_only(keep)
        self.tokens.keep_only(keep)

    def _add_product(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        self.linear.add_sum(factor, out)
        self.tokens.add_sum(factor, out)


def together(parts: Sequence[Contribution]) -> Contribution:
    """Contributions to parameters that are shared: norms do not add up, per-record gradients do."""
    if len(parts) == 1:
        return parts[0]
    linear = next((p for p in parts if isinstance(p, Outer) and not p.is_transposed), None)
    tokens = next((p for p in parts if isinstance(p, Tokens)), None)
    if len(parts) == 2 and linear is not None and tokens is not None:
        if [*map(id, linear.parameters)] == [*map(id, tokens.parameters)]:
            return Tied(linear, tokens)
    return PerRecord(_added([part.per_record() for part in parts]))


def _added(several: Sequence[Mapping[Tensor, Tensor]]) -> dict[Tensor, Tensor]:
    gradients: dict[Tensor, Tensor] = {}
    for found in several:
        for p, g in found.items():
            gradients[p] = g if p not in gradients else gradients[p] + g
    return gradients


# -- what layers share -----------------------------------------------------------------------------


def trainable(module: nn.Module, name: str) -> Tensor | None:
    p = module._parameters.get(name)
    return p if p is not None and p.requires_grad else None


def outer(
    weight: Tensor | None,
    bias: Tensor | None,
    inputs: Tensor,
    backprops: Tensor,
    *,
    is_transposed: bool = False,
) -> dict[Tensor, Tensor]:
    gradients = {}
    if backprops.dim() == 2:
        inputs, backprops = inputs[:, None], backprops[:, None]
    if weight is not None:
        left, right = (inputs, backprops) if is_transposed else (backprops, inputs)
        gradients[weight] = torch.bmm(left.transpose(1, 2), right)
    if bias is not None:
        gradients[bias] = backprops.sum(1)
    return gradients


def _norm_above(t: Tensor) -> Tensor:
    """Row norms, plus at most what is lost where squares underflow: a product with a huge
    number must not hide it.
    """
    return torch.linalg.vector_norm(t, dim=1, dtype=wide(t)).add_(_lost_in_squares(t))


_TINY = 2.0**-126  # the least normal number of float32


def _first_places(tokens: Tensor) -> Tensor:
    """Where each token of a record first stands, among the places of all records."""
    ordered, order = tokens.sort(dim=1, stable=True)
    places = torch.arange(tokens.numel(), device=tokens.device).view(tokens.shape)
    starts = torch.zeros_like(places)
    starts[:, 1:] = torch.where(ordered[:, 1:] != ordered[:, :-1], places[:, 1:] - places[:, :1], 0)
    first = order.gather(1, starts.cummax(1).values) + places[:, :1]
    return torch.empty_like(places).scatter_(1, order, first)


def _lost_in_squares(t: Tensor) -> float:
    """At most the length of a row of ``t`` whose squares underflow."""
    return math.sqrt(t.shape[-1]) * (1.5e-154 if t.dtype == torch.float64 else 1.1e-19)


def weighted(rows: Tensor, factor: Tensor, out: Mapping[Tensor, Tensor]) -> Tensor:
    """``rows``, each times its factor, in the type of sums."""
    dtype = next(iter(out.values())).dtype
    return rows.to(dtype) * factor.to(dtype).view(-1, *[1] * (rows.dim() - 1))


def _kept(t: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep.view(-1, *[1] * (t.dim() - 1)), t, 0.0)
