"""The sum of clipped gradients, from what layers add to them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import arithmetic
from .arithmetic import is_split, joined, split
from .contributions import Contribution, Outer, PerRecord, Product, merged, set_norms

# A product over positions adds up terms of size κ·‖g_i‖, which cancel down to ‖g_i‖ and leave about
# κ·2⁻²⁴·‖g_i‖ of rounding in float32. Below this κ that is 6e-5 of the clip norm; a record above it
# is summed by itself first, as its norm is.
LARGEST_CANCELLATION = 2.0**10


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
    else:
        parts = merged(parts)
    norm, check = _norm_and_check(parts, max_grad_norm)
    if not (is_ordinary := math.isfinite(check)):
        norm = _set_apart(parts, max_grad_norm)
    factor = torch.full_like(norm, max_grad_norm).div_(norm).clamp_max_(1.0)
    # 0·inf is nan: a record that is not finite has to be cut out, not scaled away. So has one so
    # large that a subnormal factor is rounded up. Squares overflow before either (C is 1e-12 or
    # more); where only they do, no record is found to be cut out.
    if not is_ordinary:
        kept = factor >= torch.finfo(factor.dtype).tiny
        factor = torch.where(kept, factor, 0.0)
        for part in parts:
            part.keep_only(kept)
    _add_sums(parts, factor, out)
    if second_moment is not None and is_full:
        rows = [g.to(second_moment.dtype) for g in parts[0].per_record().values()]
        clipped = torch.cat(rows, dim=1) * factor[:, None].to(second_moment.dtype)
        second_moment.addmm_(clipped.T, clipped)
    elif second_moment is not None:
        squares = dict(zip(out, second_moment.split([p.numel() for p in out]), strict=True))
        for part in parts:
            part.add_squares(factor, squares)
    return len(norm)


def _add_sums(parts: Sequence[Contribution], factor: Tensor, out: Mapping[Tensor, Tensor]) -> None:
    """out[p] += Σ_i factor_i·g_i; on a GPU with few launches and few casts."""
    machine = arithmetic.machine_of(factor.device)
    if not machine.is_accelerator or next(iter(out.values())).dtype != torch.float32:
        for part in parts:
            part.add_sum(factor, out)
        return
    groups: dict[Any, list[Outer]] = {}
    terms: Tensor | None = None
    for part in parts:
        if isinstance(part, Outer) and part.is_with_others(out):
            groups.setdefault((part.key, part.is_transposed), []).append(part)
        elif isinstance(part, PerRecord) and all(map(is_split, part.gradients.values())):
            if terms is None:
                terms = torch.stack(split(factor.float(), 3))  # all of a float32
            part.add_in_terms(terms, out)
        else:
            part.add_sum(factor, out)
    for alike in groups.values():
        numbers = alike[0].inputs.numel() + 2 * alike[0].backprops.numel()
        assert alike[0].weight is not None
        step = max(1, machine.piece // (2 * max(numbers, alike[0].weight.numel())))
        for start in range(0, len(alike), step):
            some = alike[start : start + step]
            some[0].add_sums(some, factor, out)


def joint_norm(parts: Sequence[Contribution], floor: float = 0.0) -> Tensor:
    """Every record's norm over everything; norms below ``floor`` are not clipped."""
    norm, check = _norm_and_check(parts, floor)
    return norm if math.isfinite(check) else _set_apart(parts, floor)


def _norm_and_check(parts: Sequence[Contribution], floor: float) -> tuple[Tensor, Tensor]:
    """The norms, and a number that is finite if they are and no product cancels too far: the one
    look at the records of a step, for which a GPU has to be waited for.
    """
    set_norms(parts)
    norm = joined([part.norm() for part in parts])
    check = norm.dot(norm)
    products = [part for part in parts if isinstance(part, Product)]
    if sizes := [part.size for part in products if part.size is not None]:
        largest = sizes[0] if len(sizes) == 1 else torch.stack(sizes).amax(0)
        above = largest > LARGEST_CANCELLATION * norm.clamp(min=floor)
        check = check + torch.where(above.any(), math.inf, 0.0)
    return norm, check


def _set_apart(parts: Sequence[Contribution], floor: float) -> Tensor:
    """Sum by themselves the records whose products cancel too far; the norms then."""
    norm = joined([part.norm() for part in parts])
    limit = LARGEST_CANCELLATION * norm.clamp(min=floor)
    for part in parts:
        if isinstance(part, Product) and part.size is not None:
            if bool((which := part.size > limit).any()):
                part.set_apart(which)
    return joined([part.norm() for part in parts])


def _scaled(gradients: Sequence[Tensor], scale: Tensor) -> list[Tensor]:
    """F⁻¹g for every record's g."""
    rows = torch.cat([g.to(scale.dtype) for g in gradients], dim=1)
    if scale.dim() == 1:
        rows = rows / scale
    else:
        rows = torch.linalg.solve_triangular(scale, rows.T, upper=False).T
    return list(rows.split([g.shape[1] for g in gradients], dim=1))
