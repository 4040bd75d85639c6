"""Is a record's recorded gradient its own, and does it depend on that record alone?

The forward pass may keep records apart and the backward pass mix them all the same: through hooks
on gradients, custom functions, or rows that a layer sees in another order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..clipping.layers import KINDS, is_own_kernel
from ..clipping.nested import Nested, tensors_in
from .findings import (
    OF_NUMBER,
    OF_OTHERS,
    MayFail,
    MissingGradientsError,
    MixedRecordsError,
    affordable,
    failing_as,
)
from .made_up_records import exchanged, given, groups_that_stay, output_of, over_rows
from .seeded_draws import FIRST_DIMENSION, SeededDraws
from .tried_model import TriedModel

# powers of ten of the output gradients of all records, and of those that take the others' places
_MAGNITUDES = (0, 3, -3, 6, -6, 1, -1, 4, -4, 2, -2, 5, -5)
_FEWEST_TRIALS = 3
_SAME = 1e-3  # relative, of gradients that the same kernels compute, in whatever type
_PIECE = 2**21  # numbers of a gradient that are held at a time

_MIXED = (
    "the gradient of parameter {!r} in one record's row depends on {}: a hook, a custom "
    "autograd.Function or rows in another order mix records in the backward pass. Compute it from "
    "that record alone."
)
_NOT_USED = (
    "parameter {!r} is not used by the forward pass: it would be given noise only. Use it, or"
    " freeze it with requires_grad_(False)."
)
_BY_CHANCE = " Skip it by chance by a factor of 0, not by an if."


def check_gradients(tried: TriedModel, *, is_mapped: bool) -> bool:
    """Raise unless recorded gradients are those of each record: of its own pass where the model
    is mapped, otherwise of its row. Returns whether there was any to compare.
    """
    source, parameters = tried.source, tried.parameters
    generator = torch.Generator().manual_seed(1)
    weights: list[Tensor] = []  # of the gradient that comes to each output

    def draws() -> SeededDraws:
        return SeededDraws(0, FIRST_DIMENSION if is_mapped else (), are_alike=is_mapped)

    def losses(arguments: tuple[Any, ...], rows: slice) -> tuple[Tensor, Tensor]:
        """One of each record, and what outputs without rows add."""
        output = output_of(tried.module, arguments)
        outputs = Nested(output).tensors if is_mapped else list(tensors_in(output))
        outputs = [t.float() for t in outputs if t.is_floating_point()]
        by_row = [t.reshape(len(t), -1) for t in outputs if t.dim() > 0]
        if not weights:
            weights.extend(torch.randn(t.shape, generator=generator).to(t.device) for t in by_row)
        none = torch.zeros((), device=parameters[0].device)
        terms = [(t * w[rows]).sum(1) for t, w in zip(by_row, weights, strict=True)]
        return sum(terms, none.expand(1)), sum((t for t in outputs if t.dim() == 0), none)

    def alone(k: int) -> Tensor:
        """One record's loss."""
        with source.paused(), draws():
            if is_mapped:
                each, shared = losses(tried.given(k), slice(k, k + 1))
                return each[0] + shared
            return losses(tried.inputs, slice(None))[0][k]

    source.discard(parameters)
    with (
        nullcontext()
        if is_mapped
        else failing_as(
            "per-record gradients of this model cannot be computed: {}. Leave out"
            " grad_sample_mode=, or give a parameter beside layers (a class token) its own module."
        )
    ):
        drawn = draws()
        with drawn:
            each, shared = losses(tried.inputs, slice(None))
        total = (each.sum() if source.loss_reduction == "sum" else each.mean()) + shared
        if not total.requires_grad:
            raise ValueError(
                "the model's output has no gradient: return a tensor of floating-point numbers with"
                " a row per record, or a loss, computed from trainable parameters"
            )
        total.backward()
    differences: list[tuple[float, float]] = []  # from the true gradients, and how long those are
    parts: list[Tensor] = []
    for (name, p), true in zip(
        tried.named,
        _gradients_of_two([alone(k) for k in range(2)], tried, drawn.is_random),
        strict=True,
    ):
        with draws():  # a source may run the records again
            records = source.per_record_gradients(p)
        if records is None:
            raise ValueError(_wrong_gradient(name, "got no per-record gradient"))
        if records.shape[1:] == p.shape and len(records) != len(true):
            raise ValueError(
                f"parameter {name!r} got {len(records)} per-record gradients for two records: its"
                " module sees another first dimension. Keep records in dimension 0 of every"
                " layer's input (for positions, .expand(len(x), -1))."
            )
        difference = math.nan
        if records.shape == (2, *p.shape):
            difference = _norm_of_all(r - g for r, g in zip(records, true, strict=True))
            parts.append(_norms([records.flatten(1)]))
        differences.append((difference, _norm_of_all(true)))
        del records, true
    largest = max((float(part.max()) for part in parts), default=0.0)
    for (name, p), (difference, length) in zip(tried.named, differences, strict=True):
        # a gradient that cancels is rounding error
        if not difference <= tried.tolerance * max(length, 1e-3 * largest):
            what = "got per-record gradients that are not the gradients of the records"
            raise ValueError(_wrong_kernel(tried, p, name) or _wrong_gradient(name, what))
    if largest > 0:
        norms = torch.linalg.vector_norm(torch.stack(parts), dim=0)
        with draws():
            recorded = (source.per_record_gradients(p) for p in parameters)
            check_clipped_sum(tried, norms, (r.flatten(1) for r in recorded if r is not None))
    source.discard(parameters)
    return largest > 0


def _gradients_of_two(
    losses: Sequence[Tensor], tried: TriedModel, is_random: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """For each parameter the gradients of the losses of two records, which of large models take
    the most memory: one piece of the parameters after the other.

    Raises:
        ValueError: a parameter has none.
    """
    pieces: list[list[tuple[str, Tensor]]] = [[]]
    size = 0
    for name, p in tried.named:
        if size and size + p.numel() > _PIECE:
            pieces.append([])
            size = 0
        pieces[-1].append((name, p))
        size += p.numel()
    for piece in pieces:
        with tried.source.paused():
            first, second = (
                list(
                    torch.autograd.grad(
                        loss,
                        [p for _, p in piece],
                        allow_unused=True,
                        retain_graph=piece is not pieces[-1],
                    )
                )
                for loss in losses
            )
        for (name, _), of_one, of_other in zip(piece, first, second, strict=True):
            if of_one is None and of_other is None:
                raise ValueError(_NOT_USED.format(name) + (_BY_CHANCE if is_random else ""))
        for _, parameter in piece:
            yield _dense(parameter, first.pop(0)), _dense(parameter, second.pop(0))


def check_gradients_unmoved(tried: TriedModel) -> None:
    """Raise if a record's gradient depends on others: made-up records of every kind, output
    gradients of every order of magnitude.
    """
    kinds = ("ties", "codes", "given", "short", "outliers", "plain")
    for seed, power in affordable(enumerate(_MAGNITUDES), _FEWEST_TRIALS):
        kind = kinds[seed % len(kinds)]
        rows = tried.rows_for(tried.large if seed % 4 == 3 else tried.middle)
        are_alike = tried.is_aligned and seed % 2 == 0
        keep = groups_that_stay(rows)[(seed + 1) % len(groups_that_stay(rows))]
        base, others = tried.neighbours(rows, kind, seed)
        mixed = exchanged(base, others, keep)
        message = f"the model's gradients cannot be computed on {rows} made-up records: {{}}"
        with failing_as(message) if kind == "given" else MayFail():
            check_trial(
                tried,
                base,
                mixed,
                keep,
                seed=seed,
                power=power,
                are_alike=are_alike,
                is_comparable=are_alike,
            )


def check_trial(
    tried: TriedModel,
    first: tuple[Any, ...],
    second: tuple[Any, ...],
    keep: Tensor,
    *,
    seed: int,
    power: int,
    are_alike: bool,
    is_comparable: bool,
) -> None:
    """Raise unless recorded gradients and the clipped sum are those of each record by itself.

    Args:
        tried: the model.
        first: a made-up batch.
        second: one in which some records stay and all others are exchanged.
        keep: which records stay.
        seed: of everything random.
        power: of ten, of the output gradients; those that are exchanged get another one.
        are_alike: all records draw the same numbers.
        is_comparable: a record comes out the same alone.

    Raises:
        MixedRecordsError: a record's gradient depends on others, or their clipped sum is wrong.
        Exception: whatever the model raises on such a batch.
    """
    source, parameters = tried.source, tried.parameters
    generator = torch.Generator().manual_seed(seed)
    # for each output, those of the first and second batch
    weights: list[tuple[Tensor, Tensor]] = []
    tried.try_on_cpu(first, second)

    def loss(arguments: tuple[Any, ...], which: int, rows: slice = slice(None)) -> Tensor:
        with SeededDraws(seed, tried.axes, are_alike=are_alike):
            outputs = [
                t for t in tensors_in(output_of(tried.module, arguments)) if t.is_floating_point()
            ]
        if not weights:
            other = power - 3 if power > 2 else power + 6
            for t in outputs:
                base = torch.randn(t.shape, generator=generator) * 10.0**power
                mixed = torch.randn(t.shape, generator=generator) * 10.0**other
                mixed = torch.where(over_rows(keep, base), base, mixed)
                weights.append((base.to(t.device), mixed.to(t.device)))
        terms = [(t.float() * w[which][rows]).sum() for t, w in zip(outputs, weights, strict=True)]
        return torch.stack(terms).sum()

    def recorded(arguments: tuple[Any, ...], which: int) -> Iterator[Tensor]:
        source.discard(parameters)
        total = loss(arguments, which)
        (total if source.loss_reduction == "sum" else total / len(keep)).backward()
        for name, p in tried.named:
            records = source.per_record_gradients(p)
            if records is None or records.shape != (len(keep), *p.shape):
                raise MissingGradientsError(
                    f"parameter {name!r} has per-record gradients for some batches only: its layer "
                    "sees a number of rows that depends on the records. Run it on all of them."
                )
            yield records.detach().flatten(1)

    moved = None
    try:
        before = list(recorded(first, 0))
        norms = _norms(before)
        check_clipped_sum(tried, norms, before)
        if is_comparable:
            with source.paused():
                for row in range(len(keep)):
                    alone = loss(given(first, row), 0, slice(row, row + 1))
                    _compare_alone(tried, before, norms, row, alone)
        rows = (keep.to(norms.device) & norms.isfinite()).nonzero().flatten()
        for (name, _), after in zip(tried.named, recorded(second, 1), strict=True):
            a, b = before.pop(0).index_select(0, rows), after.index_select(0, rows)
            if moved is None and not torch.equal(a, b):
                scale = torch.maximum(a.norm(dim=1), 1e-3 * norms[rows])
                if not bool(((a - b).norm(dim=1) <= _SAME * scale).all()):
                    moved = name  # a layer without gradients comes first
    finally:
        tried.discard()
    if moved is not None:
        raise MixedRecordsError(_MIXED.format(moved, OF_OTHERS))


def _compare_alone(
    tried: TriedModel, recorded: Sequence[Tensor], norms: Tensor, row: int, loss: Tensor
) -> None:
    """One record's recorded gradient against the one that it has in a batch of its own.

    Another batch size may run other kernels, whose rounding sets a ReLU or two otherwise.
    """
    if not bool(norms[row].isfinite()) or not loss.requires_grad:
        return
    alone = torch.autograd.grad(loss, tried.parameters, allow_unused=True)
    for (name, p), found, g in zip(tried.named, recorded, alone, strict=True):
        true = _dense(p, g)
        difference = float((found[row] - true.flatten()).norm())
        scale = max(float(true.norm()), 1e-2 * float(norms[row]))
        if not difference <= max(30 * _SAME, 8 * tried.tolerance) * scale:
            raise MixedRecordsError(_MIXED.format(name, OF_NUMBER))


def check_clipped_sum(tried: TriedModel, norms: Tensor, recorded: Iterable[Tensor]) -> None:
    """Norms and the clipped sum, which a source may compute by other ways, right after a backward
    pass, against those of the gradients that it recorded.

    Args:
        tried: the model.
        norms: every record's, (records).
        recorded: for each parameter its per-record gradients, (records, numel).

    Raises:
        MixedRecordsError: they differ.
    """
    named, source = tried.named, tried.source
    norms = norms.double()
    if not bool(norms.isfinite().all()):
        return
    clip = max(float(norms.max()) / 2, 1e-12)
    dtype = torch.float64 if any(p.dtype == torch.float64 for _, p in named) else torch.float32
    factor = (clip / norms).clamp(max=1.0)
    sizes = [p.numel() for _, p in named]
    if len({p.device for _, p in named}) == 1:  # in one piece, which is given back as one
        whole = torch.zeros(sum(sizes), dtype=dtype, device=named[0][1].device)
        out = list(whole.split(sizes))
    else:
        out = [torch.zeros(p.numel(), dtype=dtype, device=p.device) for _, p in named]
    for _, p in named:
        p.grad = None  # hooks leave an ordinary gradient, and an unhooked use was found before
    found = source.norms(named).double()
    source.add_clipped_sum(named, clip, out)
    are_norms = float((found - norms).norm()) <= 2 * _SAME * float(norms.norm()) + 1e-15
    errors = []
    for records, total in zip(recorded, out, strict=True):
        for gradient, share in zip(records, factor.tolist(), strict=True):
            total.sub_(gradient, alpha=share)
        errors.append(total.norm().double())
    if not are_norms or not float(torch.stack(errors).norm()) <= 2 * _SAME * clip:
        raise MixedRecordsError(
            "the clipped sum of made-up records is not that of their gradients, which are recorded "
            'correctly: an error of this library. Try grad_sample_mode="hooks", and please report '
            "the model."
        )


def _norm_of_all(tensors: Iterable[Tensor]) -> float:
    return math.hypot(*(float(t.norm()) for t in tensors))


def _norms(gradients: Sequence[Tensor]) -> Tensor:
    # row by row, as over a dimension torch takes six times as long in float64
    parts = [
        torch.stack([torch.linalg.vector_norm(row, dtype=torch.float64) for row in g])
        for g in gradients
    ]
    return torch.linalg.vector_norm(torch.stack(parts), dim=0)


def _dense(parameter: Tensor, gradient: Tensor | None) -> Tensor:
    if gradient is None:
        return torch.zeros_like(parameter)
    return gradient.to_dense() if gradient.is_sparse else gradient


def _wrong_kernel(tried: TriedModel, parameter: Tensor, name: str) -> str | None:
    """What to say where the gradient comes from a kernel of the caller's."""
    for layer in tried.module.modules():
        kind = KINDS.get(type(layer))
        if kind is None or not is_own_kernel(kind):
            continue
        if any(p is parameter for p in layer._parameters.values()):
            return (
                f"kernel {kind.kernel.__name__!r} of {type(layer).__name__} in KINDS is wrong: what"
                f" it gives for parameter {name!r} are not the gradients of the records, which"
                " autograd computed. Correct it, or take it out of KINDS."
            )
    return None


def _wrong_gradient(name: str, what: str) -> str:
    return (
        f"parameter {name!r} {what}: clipping would miss a part of what a record contributes. Use"
        " every parameter through the forward pass of the module that owns it, not through"
        " torch.nn.functional, and change nothing in place."
    )
