"""Does a record's recorded gradient depend on that record alone? Found out on made-up batches.

The forward pass may keep records apart and the backward pass mix them all the same: through hooks
on gradients, custom functions, or rows that a layer sees in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..clipping.gradient_source import GradientSource, map_tensors, tensors_in

# powers of ten of the output gradients of all records, and of those that take the others' places
MAGNITUDES = (0, 3, -3, 6, -6, 1, -1, 4, -4, 2, -2, 5, -5)
_MANY = 2**25  # numbers in the per-record gradients of one batch

HOOKED = (
    "{} has a hook on gradients ({}), which may mix records where no check sees it. Remove it; to "
    "change gradients record by record use the loss, or a custom torch.autograd.Function."
)
MIXED = (
    "the gradient of parameter {!r} in one record's row depends on {}: a hook, a custom "
    "autograd.Function or rows in another order mix records in the backward pass. Compute it from "
    "that record alone."
)


class MixedRecordsError(ValueError):
    """What a check found out, and not what the model itself raised."""


class MissingGradientsError(MixedRecordsError):
    """A parameter has no gradient of each record."""


@dataclass
class Trial:
    """A made-up batch, and another one in which some records stay and all others are exchanged.

    Attributes:
        first, second: the model's arguments.
        keep: which records stay.
        power: of ten, of the output gradients; those that are exchanged get another one.
        seed: of everything random.
        draws: with which random numbers both batches, and records alone, are run.
        is_comparable: whether a record draws the same numbers alone.
    """

    first: tuple[Any, ...]
    second: tuple[Any, ...]
    keep: Tensor
    power: int
    seed: int
    draws: Callable[[], AbstractContextManager[Any]]
    is_comparable: bool


class HookWatch(TorchFunctionMode):
    """Finds hooks that a forward pass registers on tensors; those of this library are no such
    hooks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: str | None = None

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook):
            hook = args[1] if len(args) > 1 else next(iter((kwargs or {}).values()), None)
            owner = type(getattr(hook, "__self__", None)).__module__
            if not owner.startswith("torch_dpbayes."):
                self.found = function.__name__
        return function(*args, **(kwargs or {}))


def require_no_hooks(module: nn.Module) -> None:
    """Raise if a module has hooks of the caller's on its backward pass.

    Raises:
        ValueError: with the module's name.
    """
    ours = {handle.id for handle in getattr(module, "autograd_grad_sample_hooks", ())}  # Opacus'
    for name, layer in module.named_modules():
        for kind in ("_backward_hooks", "_backward_pre_hooks"):
            if not ours.issuperset(vars(layer)[kind]):
                what = "register_full_backward" + kind.removeprefix("_backward").removesuffix("s")
                raise ValueError(HOOKED.format(f"module {name or type(layer).__name__!r}", what))


def rows_for(named: Sequence[tuple[str, Tensor]], most: int) -> int:
    """Records in a batch whose gradients are all instantiated."""
    return max(2, min(most, _MANY // max(1, sum(p.numel() for _, p in named))))


def check_trial(module: nn.Module, source: GradientSource, trial: Trial) -> None:
    """Raise unless recorded gradients and the clipped sum are those of each record by itself.

    Args:
        module: the model, with ``source`` attached.
        source: where per-record gradients come from.
        trial: the two batches.

    Raises:
        MixedRecordsError: a record's gradient depends on others, or their clipped sum is wrong.
        Exception: whatever the model raises on such a batch.
    """
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    parameters = [p for _, p in named]
    keep = trial.keep
    generator = torch.Generator().manual_seed(trial.seed)
    # for each output, those of the first and second batch
    weights: list[tuple[Tensor, Tensor]] = []

    def loss(arguments: tuple[Any, ...], which: int, row: int | None = None) -> Tensor:
        with trial.draws():
            outputs = [t for t in tensors_in(module(*arguments)) if t.is_floating_point()]
        if not weights:
            other = trial.power - 3 if trial.power > 2 else trial.power + 6
            for t in outputs:
                base = torch.randn(t.shape, generator=generator) * 10.0**trial.power
                exchanged = torch.randn(t.shape, generator=generator) * 10.0**other
                mask = keep.reshape(-1, *(1,) * (t.dim() - 1))
                weights.append((base.to(t.device), torch.where(mask, base, exchanged).to(t.device)))
        terms = [
            (t.float() * (w[which] if row is None else w[which][row : row + 1])).sum()
            for t, w in zip(outputs, weights, strict=True)
        ]
        return torch.stack(terms).sum()

    def recorded(arguments: tuple[Any, ...], which: int) -> list[Tensor]:
        source.discard(parameters)
        total = loss(arguments, which)
        (total if source.loss_reduction == "sum" else total / len(keep)).backward()
        found = []
        for name, p in named:
            records = source.per_record_gradients(p)
            if records is None or records.shape != (len(keep), *p.shape):
                raise MissingGradientsError(
                    f"parameter {name!r} has per-record gradients for some batches only: its layer "
                    "sees a number of rows that depends on the records. Run it on all of them."
                )
            found.append(records.detach().flatten(1))
        return found

    try:
        first = recorded(trial.first, 0)
        norms = _norms(first)
        check_clipped_sum(named, source, first)
        if trial.is_comparable:
            with source.paused():
                for row in range(len(keep)):
                    one = map_tensors(trial.first, partial(_row, row=row))
                    _compare_alone(named, first, norms, row, loss(one, 0, row))
        second = recorded(trial.second, 1)
    finally:
        source.discard(parameters)
        for p in parameters:
            p.grad = None
    tolerance = _tolerance(parameters)
    rows = keep.to(norms.device) & norms.isfinite()
    for (name, _), a, b in zip(named, first, second, strict=True):
        a, b = a[rows], b[rows]
        scale = torch.maximum(a.norm(dim=1), 1e-3 * norms[rows])
        if not bool(((a - b).norm(dim=1) <= tolerance * scale).all()):
            raise MixedRecordsError(MIXED.format(name, "another record in the batch"))


def _row(t: Tensor, row: int) -> Tensor:
    """That of one record; a tensor without dimensions is the same for all."""
    return t[row : row + 1] if t.dim() > 0 else t


def _compare_alone(
    named: Sequence[tuple[str, Tensor]],
    recorded: Sequence[Tensor],
    norms: Tensor,
    row: int,
    loss: Tensor,
) -> None:
    """One record's recorded gradient against the one that it has in a batch of its own.

    Another batch size may run other kernels, whose rounding sets a ReLU or two otherwise.
    """
    if not bool(norms[row].isfinite()) or not loss.requires_grad:
        return
    parameters = [p for _, p in named]
    alone = torch.autograd.grad(loss, parameters, allow_unused=True)
    for (name, p), found, g in zip(named, recorded, alone, strict=True):
        true = torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g
        difference = float((found[row] - true.flatten()).norm())
        scale = max(float(true.norm()), 1e-2 * float(norms[row]))
        if not difference <= 30 * _tolerance(parameters) * scale:
            what = "the number of records in the batch, or on its place among them"
            raise MixedRecordsError(MIXED.format(name, what))


def check_clipped_sum(
    named: Sequence[tuple[str, Tensor]], source: GradientSource, truth: Sequence[Tensor]
) -> None:
    """Norms and the clipped sum, which a source may compute by other ways, against ``truth``.

    Args:
        named: the trainable parameters.
        source: right after a backward pass.
        truth: for each parameter every record's gradient, (records, numel).

    Raises:
        ValueError: they differ.
    """
    norms = _norms(truth).double()
    if not bool(norms.isfinite().all()):
        return
    clip = max(float(norms.max()) / 2, 1e-12)
    dtype = torch.float64 if any(p.dtype == torch.float64 for _, p in named) else torch.float32
    out = [torch.zeros(p.numel(), dtype=dtype, device=p.device) for _, p in named]
    for _, p in named:
        p.grad = None  # hooks leave an ordinary gradient, and an unhooked use was found before
    found = source.norms(named).double()
    source.add_clipped_sum(named, clip, out)
    factor = (clip / norms).clamp(max=1.0)
    tolerance = 2 * _tolerance([p for _, p in named])
    are_norms = float((found - norms).norm()) <= tolerance * float(norms.norm()) + 1e-15
    errors = [
        (o.double() - factor @ g.detach().double()).norm() for g, o in zip(truth, out, strict=True)
    ]
    if not are_norms or not float(torch.stack(errors).norm()) <= tolerance * clip:
        raise MixedRecordsError(
            "the clipped sum of made-up records is not that of their gradients, which are recorded "
            'correctly: an error of this library. Try grad_sample_mode="hooks", and please report '
            "the model."
        )


def _norms(gradients: Sequence[Tensor]) -> Tensor:
    parts = [torch.linalg.vector_norm(g, dim=1, dtype=torch.float64) for g in gradients]
    return torch.linalg.vector_norm(torch.stack(parts), dim=0)


def _tolerance(parameters: Sequence[Tensor]) -> float:
    is_half = any(p.dtype in (torch.float16, torch.bfloat16) for p in parameters)
    return 1e-2 if is_half else 1e-3
