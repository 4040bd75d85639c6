"""The terms that layers add to every record's gradient."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from . import arithmetic
from .arithmetic import LOST_IN_SPLIT, constant, is_split, joined, pieces, row_norms, split, wide

_IN_ORDER = 32  # records whose rows are added one after another


class Contribution(ABC):
    """The term that a layer adds to the gradient g_i of every record, before clipping.

    Attributes:
        parameters: the parameters that it has gradients for.
        held: tensors that must not change until the sum is computed.
        norms: of a :class:`Product`, after they were computed.
        size: an upper bound of Σ_t ‖(term t of g_i)‖; the rounding error of a product is relative
            to it. None if there is only one term.
    """

    parameters: tuple[Tensor, ...]
    held: tuple[Tensor, ...] = ()
    norms: Tensor | None = None
    size: Tensor | None = None

    @abstractmethod
    def norm(self) -> Tensor:
        """Every record's Euclidean norm over ``parameters``, float32 or better. Up to rounding, it
        is at least the norm of the term in :meth:`add_sum`.
        """

    @abstractmethod
    def add_sum(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        """out[p] ← out[p] + Σ_i factor_i·g_i; ``out`` is flat and has the type of ``factor``."""

    @abstractmethod
    def per_record(self) -> dict[Tensor, Tensor]:
        """Every record's gradient, as (records, numel) matrices."""

    @abstractmethod
    def keep_only(self, keep: Tensor) -> None:
        """Replace the records where ``keep`` is False by zeros, also if they are not finite."""


class PerRecord(Contribution):
    """Per-record gradients themselves, with records in dimension 0."""

    def __init__(self, gradients: Mapping[Tensor, Tensor]) -> None:
        self.parameters = tuple(gradients)
        # autograd's gradients are often transposed, and slow to copy: entries stay as they are in
        # memory, with the order of their dimensions
        self._orders = [*map(_order, gradients.values())]
        self._rows = [
            g.reshape(g.shape[0], p.numel()) if order is None else g.permute(0, *order).flatten(1)
            for (p, g), order in zip(gradients.items(), self._orders, strict=True)
        ]

    def norm(self) -> Tensor:
        return joined([*map(row_norms, self._rows)])

    def add_sum(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        for p, g, order in zip(self.parameters, self._rows, self._orders, strict=True):
            if (total := out.get(p)) is None:
                continue
            if order is not None:
                total = total.view(p.shape).permute(*(k - 1 for k in order))
            total.add_(_added_up(in_type(g, factor.dtype), factor).view(total.shape))

    def per_record(self) -> dict[Tensor, Tensor]:
        found = {}
        for p, g, order in zip(self.parameters, self._rows, self._orders, strict=True):
            if order is not None:
                g = g.unflatten(1, [p.shape[k - 1] for k in order])
                g = g.permute(0, *(1 + k for k in np.argsort(order))).flatten(1)
            found[p] = g
        return found

    def keep_only(self, keep: Tensor) -> None:
        self._rows = [_kept(g, keep) for g in self._rows]


def _added_up(rows: Tensor, factor: Tensor) -> Tensor:
    """Σ_i factor_i·row_i. CPUs add one row after another, and round each time: one more record
    could change the roundings of thousands of others. So few rows are added in order, and torch's
    own sum adds the results in a tree.
    """
    groups = rows.shape[0] // _IN_ORDER
    count = groups * _IN_ORDER
    total = rows[count:].T.mv(factor[count:])
    if groups:
        weights = factor[:count].view(groups, 1, _IN_ORDER)
        blocks = rows[:count].view(groups, _IN_ORDER, rows.shape[1])
        total += torch.bmm(weights, blocks).sum((0, 1))
    return total


def _order(rows: Tensor) -> list[int] | None:
    """The dimensions of a record in the order of memory; None if they are in order."""
    strides = rows.stride()
    found = sorted(range(1, rows.dim()), key=lambda k: -strides[k])
    return None if found == [*range(1, rows.dim())] else found


class Product(Contribution):
    """A layer's input and the gradient of its output. One product of them computes the sum over
    records and positions.
    """

    def __init__(self, inputs: Tensor, backprops: Tensor, positions: int) -> None:
        self.inputs, self.backprops = self.held = inputs, backprops
        self.positions = positions

    def norm(self) -> Tensor:
        if self.norms is None:
            self.set_norms([self])
        assert self.norms is not None
        return self.norms

    @property
    def key(self) -> tuple[Any, ...]:
        """A key that is equal for layers whose norms can be computed together."""
        return (id(self),)

    def numbers(self) -> float:
        """The size of one record's temporaries; infinite if a layer must be computed alone."""
        return math.inf

    @abstractmethod
    def norms_and_sizes(self, inputs: Tensor, backprops: Tensor) -> tuple[Tensor, Tensor]:
        """Norms and sizes from inputs and output gradients of one or several such layers."""

    def set_norms(self, alike: Sequence[Any]) -> None:
        """Compute norms and sizes of layers with the same key, some at a time."""
        n, dtype = self.backprops.shape[0], wide(self.backprops)
        # Relative to the terms' size, a sum of T terms rounds by at most T units of 2⁻²⁴, and both
        # factors by two (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section
        # 3.1). The norm may be of another sum of the same terms. Clipping is never too weak.
        lost = (self.positions + 1) * torch.finfo(dtype).eps
        piece = arithmetic.machine_of(self.backprops.device).piece
        step = max(1, int(piece // (self.numbers() * n)))
        for start in range(0, len(alike), step):
            some = alike[start : start + step]
            a, g = (beside(t) for t in ([x.inputs for x in some], [x.backprops for x in some]))
            found = self.norms_and_sizes(a, g)
            rows = (t.to(dtype).view(len(some), n).unbind() for t in found)
            for layer, norm, size in zip(some, *rows, strict=True):
                layer.norms, layer.size = norm.add(size, alpha=lost), size

    def keep_only(self, keep: Tensor) -> None:
        self.inputs, self.backprops = _kept(self.inputs, keep), _kept(self.backprops, keep)

    def widened(self) -> tuple[Tensor, Tensor]:
        """Inputs and output gradients in the type of sums, so that per-record gradients have no
        rounding that the norm does not include.
        """
        dtype = wide(self.backprops)
        return self.inputs.to(dtype), self.backprops.to(dtype)


class Outer(Product):
    """A linear layer: Σ_t g_t a_tᵀ and Σ_t g_t, stored as a and g.

    Args:
        weight, bias: the parameters; None for a missing or frozen one.
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
        super().__init__(inputs, backprops, backprops.shape[1:-1].numel())
        self.weight, self.bias, self.is_transposed = weight, bias, is_transposed
        self.parameters = () if weight is None else (weight,)
        self.parameters += () if bias is None else (bias,)
        self._is_split = is_split(backprops)
        if backprops.dim() == 2:
            norm = _norm_above(backprops)
            if weight is not None and bias is None:
                norm.mul_(_norm_above(inputs))
            elif weight is not None:
                # inputs whose squares underflow are negligible compared to the bias' 1
                norm = row_norms(inputs).mul_(norm).hypot_(norm)
            self.norms = norm.mul_(1 + LOST_IN_SPLIT) if self._is_split else norm

    @property
    def key(self) -> tuple[Any, ...]:
        kept = self.weight is None, self.bias is None
        return self.backprops.shape, self.inputs.shape, self.backprops.dtype, kept

    def _by_gram(self) -> bool:
        has_double = arithmetic.machine_of(self.backprops.device).has_double
        return has_double or self.backprops.dtype == torch.float64

    def numbers(self) -> float:
        (_, positions, width), width_in = self.backprops.shape, self.inputs.shape[2]
        if self._by_gram():
            return positions * 2 * (2 * positions + width + width_in)
        return 2 * width * (width_in + 1)

    def norms_and_sizes(self, inputs: Tensor, backprops: Tensor) -> tuple[Tensor, Tensor]:
        found_by = _gram_norms if self._by_gram() else _instantiated_norms
        parts = pieces(int(self.numbers()), backprops, inputs)
        found = [found_by(self, *some_records) for some_records in parts]
        norms, sizes = (beside(f) for f in zip(*found, strict=True))
        return norms + LOST_IN_SPLIT * sizes if self._is_split else norms, sizes

    def add_sum(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        whole = self.backprops, self.inputs, factor
        parts = pieces(self.backprops.shape[1:].numel(), *whole) if self._is_split else (whole,)
        for g, a, weights in parts:
            g = weighted(g, weights)
            if g.dim() > 2:
                g, a = g.flatten(0, -2), a.flatten(0, -2)
            if self.weight is not None and (weight := out.get(self.weight)) is not None:
                weight = weight.view(self.weight.shape)
                weight = weight.t() if self.is_transposed else weight
                if 1 in weight.shape:  # BLAS adds up a vector's terms in order
                    rows, one = (a, g) if len(weight) == 1 else (g, a)
                    rows, one = in_type(rows, g.dtype), in_type(one[:, 0], g.dtype)
                    weight.add_(_added_up(rows, one).view(weight.shape))
                elif not self._is_split or g.dtype != torch.float32:
                    weight.addmm_(g.t(), in_type(a, g.dtype))
                else:  # the factors in g stay exact
                    for term in split(g):
                        weight.add_(arithmetic.product(term.t(), a))
            if self.bias is not None and (bias := out.get(self.bias)) is not None:
                bias.add_(g.sum(0))

    def per_record(self) -> dict[Tensor, Tensor]:
        a, g = self.widened()
        return outer(self.weight, self.bias, a, g, is_transposed=self.is_transposed)


def norms_of(parts: Sequence[Contribution]) -> list[Tensor]:
    """The norms of each part. Products with equal shapes are computed together: on a GPU, the
    launch of a small operation takes longer than the operation.
    """
    groups: dict[Any, list[Product]] = {}
    for part in parts:
        if part.norms is None and isinstance(part, Product):
            groups.setdefault((type(part), part.key), []).append(part)
    for alike in groups.values():
        alike[0].set_norms(alike)
    norms: list[Tensor] = []
    for part in parts:
        norms.append(part.norm())
    return norms


def beside(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate the tensors; without a copy if there is only one."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _gram_norms(like: Outer, g: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Norms, and sizes Σ_t ‖g_t‖·‖a_t‖: if positions cancel, the squared norm is small compared
    to its terms. Products of all pairs of positions are in float64, so the error of a norm is about
    2⁻²⁶ of its size.
    """
    is_double, (g, a) = g.dtype == torch.float64, (g.double(), a.double())
    products = torch.bmm(g, g.transpose(1, 2))
    size = products.diagonal(dim1=1, dim2=2)
    lost: Tensor | None = None  # bounds float64 squares that underflow, times the other factor
    if like.weight is not None:
        others = torch.bmm(a, a.transpose(1, 2))
        if like.bias is not None:
            others.add_(1.0)
        of_inputs = others.diagonal(dim1=1, dim2=2)
        if is_double:
            lost = _lost_in_squares(g) * of_inputs.sqrt().sum(1)
            lost += _lost_in_squares(a) * size.sqrt().sum(1)
        size = size * of_inputs
        products.mul_(others)
    # keeps float32 norms normal: subnormal numbers have no relative error bound
    least = 0.0 if is_double else 2.0**-252
    norms = products.sum((1, 2)).clamp_(min=least).sqrt_()
    return norms if lost is None else norms.add_(lost), size.sqrt().sum(1)


def _instantiated_norms(like: Outer, g: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """The same from the gradients in float32, for devices with slow float64. A bound for squares
    that underflow is added to the norm.
    """
    g, a = g.float(), a.float()
    size = torch.linalg.vector_norm(g, dim=2)
    if like.weight is not None:
        of_inputs = torch.linalg.vector_norm(a, dim=2)
        size = size * (of_inputs if like.bias is None else of_inputs.hypot(torch.ones(())))
    size = size.sum(1)
    rows = torch.cat(list(outer(like.weight, like.bias, a, g).values()), 1)
    return row_norms(rows).add_(_lost_in_squares(rows)), size


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
        self.held = (tokens, backprops)  # with one position per record, they are not copied
        n, positions = tokens.shape
        g, self.tokens = backprops.flatten(0, 1), tokens.flatten()
        self._records = torch.arange(n, device=tokens.device).repeat_interleave(positions)
        if positions > 1:  # the first place of each token gets the sum, the others get zero
            where = _first_places(tokens).flatten()
            rows = torch.zeros(g.shape, dtype=wide(g), device=g.device)
            g = rows.index_add_(0, where, g.to(rows.dtype))
        if padding_idx is not None:
            g = _kept(g, self.tokens != padding_idx)
        self.rows, self._number = g, n

    def norm(self) -> Tensor:
        return row_norms(self.rows.reshape(self._number, -1))

    def add_sum(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        if self.weight in out:
            rows = weighted(self.rows, factor[self._records])
            if self._number > _IN_ORDER and arithmetic.machine_of(rows.device).has_double:
                # for the same reason as in _added_up(); the first place of a token gets the sum
                where = _first_places(self.tokens[None]).flatten()
                total = torch.zeros(rows.shape, dtype=torch.float64, device=rows.device)
                rows = total.index_add_(0, where, rows.double()).to(rows.dtype)
            out[self.weight].view(self.weight.shape).index_add_(0, self.tokens, rows)

    def per_record(self) -> dict[Tensor, Tensor]:
        g = self.rows.view(self._number, -1, self.rows.shape[1])
        places = self.tokens.view(self._number, -1, 1).expand_as(g)
        rows = g.new_zeros(len(g), *self.weight.shape).scatter_add_(1, places, g)
        return {self.weight: rows.flatten(1)}

    def keep_only(self, keep: Tensor) -> None:
        self.rows = _kept(self.rows, keep[self._records])


class Tied(Product):
    """An embedding whose table is also a linear layer's weight, as in language models.

    Let A be the gradient of the linear layer and E that of the embedding, with a row e_r for each
    token r. Then ‖A + E‖² = ‖A‖² + ‖E‖² + 2⟨A, E⟩ and ⟨A, E⟩ = Σ_r Σ_t g_t[r]·⟨a_t, e_r⟩. All three
    are computed in float64, from the numbers of the sum: if A and E cancel, their rounding errors
    do not.
    """

    def __init__(self, linear: Outer, tokens: Tokens) -> None:
        super().__init__(linear.inputs, linear.backprops, linear.positions)
        self.linear, self.tokens, self.parameters = linear, tokens, tokens.parameters
        self.held = (*linear.held, *tokens.held)

    def norms_and_sizes(self, inputs: Tensor, backprops: Tensor) -> tuple[Tensor, Tensor]:
        n, rows, places = len(inputs), self.tokens.rows, self.tokens.tokens
        a, g, e = (t.view(n, -1, t.shape[-1]) for t in (inputs, backprops, rows))
        places, positions = places.view(n, 1, -1), g.shape[1]
        widths = 2 * positions + a.shape[2] + g.shape[2] + 2 * e.shape[1]
        found = []
        places = places.expand(-1, positions, -1)
        numbers = 2 * (positions * widths + e[0].numel())
        for g_, a_, e_, places_ in pieces(numbers, g, a, e, places):
            norm, size = _gram_norms(self.linear, g_, a_)
            of_tokens = e_.double()
            other = torch.linalg.vector_norm(of_tokens, dim=(1, 2))
            if rows.dtype == torch.float64:  # underflow changes the inner product by less
                other += math.sqrt(e.shape[1]) * _lost_in_squares(e)
            picked = g_.gather(2, places_).double()
            inner = torch.bmm(a_.double(), of_tokens.transpose(1, 2)).mul_(picked).sum((1, 2))
            norm = (norm.square() + other.square() + 2 * inner).clamp_(min=0.0).sqrt_()
            if is_split(g):  # the linear layer's product
                norm += LOST_IN_SPLIT * size
            found.append((norm, size + other))
        norms, sizes = (beside(f) for f in zip(*found, strict=True))
        return norms, sizes

    def per_record(self) -> dict[Tensor, Tensor]:
        return _added([self.linear.per_record(), self.tokens.per_record()])

    def keep_only(self, keep: Tensor) -> None:
        super().keep_only(keep)
        self.linear.keep_only(keep)
        self.tokens.keep_only(keep)

    def add_sum(self, factor: Tensor, out: Mapping[Tensor, Tensor]) -> None:
        self.linear.add_sum(factor, out)
        self.tokens.add_sum(factor, out)


def together(parts: Sequence[Contribution]) -> Contribution:
    """Merge contributions to shared parameters: norms cannot be added, per-record gradients can."""
    if len(parts) == 1:
        return parts[0]
    linear = next((p for p in parts if isinstance(p, Outer) and not p.is_transposed), None)
    tokens = next((p for p in parts if isinstance(p, Tokens)), None)
    if len(parts) == 2 and linear is not None and tokens is not None:
        has_double = arithmetic.machine_of(linear.backprops.device).has_double
        if [*map(id, linear.parameters)] == [*map(id, tokens.parameters)] and has_double:
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
        gradients[weight] = torch.bmm(left.transpose(1, 2), right).flatten(1)
    if bias is not None:
        gradients[bias] = backprops.sum(1)
    return gradients


def _norm_above(t: Tensor) -> Tensor:
    """Row norms plus an upper bound for squares that underflow: they count if they are multiplied
    by a huge number.
    """
    norms = row_norms(t)
    return norms.add_(constant(_lost_in_squares(t), norms.dtype))


def _first_places(tokens: Tensor) -> Tensor:
    """The first position of each token of a record, among the positions of all records."""
    ordered, order = tokens.sort(dim=1, stable=True)
    places = torch.arange(tokens.numel(), device=tokens.device).view(tokens.shape)
    starts = torch.zeros_like(places)
    starts[:, 1:] = torch.where(ordered[:, 1:] != ordered[:, :-1], places[:, 1:] - places[:, :1], 0)
    first = order.gather(1, starts.cummax(1).values) + places[:, :1]
    return torch.empty_like(places).scatter_(1, order, first)


def _lost_in_squares(t: Tensor) -> float:
    """An upper bound of the norm of a row of ``t`` whose squares underflow."""
    return math.sqrt(t.shape[-1]) * (1.5e-154 if t.dtype == torch.float64 else 1.1e-19)


def weighted(rows: Tensor, factor: Tensor) -> Tensor:
    """Each row times its factor, in the factor's type, which is the type of sums."""
    return in_type(rows, factor.dtype) * factor.view(-1, *[1] * (rows.dim() - 1))


def in_type(t: Tensor, dtype: torch.dtype) -> Tensor:
    """``t.to(dtype)``, but faster if the type is right already."""
    return t if t.dtype == dtype else t.to(dtype)


def _kept(t: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep.view(-1, *[1] * (t.dim() - 1)), t, 0.0)
