"""One interface to the sum of clipped per-sample gradients.

This is one of the three places that read data. It returns the vector Σ_i g_i·min(1, C/‖g_i‖), which
one record changes by at most C, and the number of records in the batch, which only the checks of
``release.py`` see.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import ArgumentError, LossError, StepError
from ..noise import PrivateRandomness
from .arithmetic import constant, full_precision, joined
from .contributions import Contribution, PerRecord, in_type, norms_of
from .followed import Batch, Followed

VOUCHED = "as the user vouches (assume_independent_records=True)"
BY_CONSTRUCTION = "by construction, in the model and in the loss"
_ATTRIBUTE = "_dpbayes_gradient_source"

COPIED = (
    "no per-sample gradients can be recorded: the model is a copy of a private one, or a"
    " parameter was added, replaced or unfrozen. Call make_private again; predict under"
    " model.eval()."
)
AVERAGED = (
    "the model is called through torch's DistributedDataParallel, which averages unclipped"
    " gradients. Call the model that make_private returned; for several ranks write"
    " PrivacyEngine(process_group=torch.distributed.group.WORLD)."
)
TRAINED = (
    "an input of the model requires gradients, which are neither clipped nor noisy, so they would"
    " release the records. Put the trained part into the model, or pass x.detach()."
)


class GradientSource(ABC):
    """Computes Σ_i clip(g_i). An implementation belongs to the forward and backward passes of one
    model.

    Args:
        module: the model; it stays the user's own object. None: the caller has added the hooks.
        loss_reduction: ``"mean"`` or ``"sum"``, the reduction of the loss over the batch.
        assume_independent: the user vouches that the loss keeps records apart; the loss is then
            not tracked.

    Attributes:
        independence: how records are kept apart.
        follows: whether the model takes and returns followed tensors.
        passes: the number of recorded forward passes in this step.
        spare: the number of rows behind those of the records, which count as none.
        is_in_parts: whether a new record may move others to another rank or pass of the batch.
        batch: the batch of the model's input in this step.
        randomness: random numbers for the model while it is mapped over records.
        is_copy: it belongs to a copy of the model, and can only be removed.
    """

    follows = False
    passes = 0
    spare = 0
    is_in_parts = False
    batch: Batch | None = None
    _parameters: Sequence[Tensor] = ()  # that may be unused: their gradient is then zero

    def __init__(
        self, module: nn.Module | None, loss_reduction: str, *, assume_independent: bool = False
    ) -> None:
        if loss_reduction not in ("mean", "sum"):
            raise ArgumentError(f'loss_reduction must be "mean" or "sum", got {loss_reduction!r}')
        self.loss_reduction = loss_reduction
        self.independence = VOUCHED if assume_independent else BY_CONSTRUCTION
        self.is_copy = self._is_removed = False
        self._module = module
        self.randomness = PrivateRandomness()
        self._handles: list[Any] = []
        if module is not None:
            if (before := GradientSource.attached_to(module)) is not None:
                before.remove()
            for p in module.parameters():
                if (p.is_floating_point() or p.is_complex()) and not p.is_inference():
                    is_trained = p.requires_grad
                    # torch refuses the hook otherwise; it stays if p is frozen or unfrozen
                    p.requires_grad_(True)
                    hook = p.register_post_accumulate_grad_hook(self._refuse_gradient)
                    self._handles.append(hook)
                    p.requires_grad_(is_trained)
            module.__dict__[_ATTRIBUTE] = self  # make_private finds it here, and in a copy

    @staticmethod
    def attached_to(module: nn.Module) -> GradientSource | None:
        """The source whose hooks are on ``module``."""
        source: GradientSource | None = module.__dict__.get(_ATTRIBUTE)
        return source

    def add_clipped_sum(
        self,
        named_parameters: Sequence[tuple[str, Tensor]],
        max_grad_norm: float,
        out: Sequence[Tensor],
        *,
        scale: Tensor | None = None,
        second_moment: Tensor | None = None,
        beta: float = 1.0,
    ) -> int:
        """Add the last backward pass' Σ_i g_i·min(1, C/‖g_i‖₂) to ``out``.

        The norm runs over all parameters together. A record whose gradient or norm is not finite
        contributes exactly 0.

        Args:
            named_parameters: the trainable parameters θ_1 … θ_P and their names for error messages.
            max_grad_norm: C > 0.
            out: P one-dimensional tensors, float32 or better; the p-th has ``θ_p.numel()`` entries.
            scale: F, the d entries of all parameters one after another. Every gradient is first
                divided by F: g_i ← g_i/F.
            second_moment: a tensor to which Σ_i of the clipped g_i∘g_i (length d) or g_i·g_iᵀ (d ×
                d) is added. One record moves the former by at most C² in Euclidean norm, the latter
                by at most C² in Frobenius norm.
            beta: 0.0 to replace what is in ``out``, instead of adding to it.

        Returns:
            The number of records in the batch. It depends on the data: it must not leave the
            library.

        Raises:
            StepError: a parameter has no per-sample gradients, or more than one backward pass was
                made.
        """
        parts = self._checked(named_parameters)
        sums: dict[Tensor, Tensor] = {}
        for (_, p), found in zip(named_parameters, out, strict=True):
            sums[p] = found if beta else found.zero_()
        with full_precision(out[0].device):
            return add_clipped(parts, max_grad_norm, sums, scale, second_moment, self.spare)

    @torch.no_grad()
    def norms(self, named_parameters: Sequence[tuple[str, Tensor]]) -> Tensor:
        """Every record's ‖g_i‖₂ of the last backward pass. These norms are data: they must not
        leave the library unless the records are public.
        """
        parts, device = self._checked(named_parameters), named_parameters[0][1].device
        with full_precision(device):
            norms = joined(norms_of(parts)).float()
        return norms[: len(norms) - self.spare]

    @abstractmethod
    def recorded(self, named_parameters: Sequence[tuple[str, Tensor]]) -> Sequence[Contribution]:
        """The records of the last backward pass."""

    @abstractmethod
    def zero_grad(self, parameters: Iterable[Tensor]) -> None:
        """Forget the gradients of the last backward pass, but keep a forward pass that waits for
        its backward pass.
        """

    @abstractmethod
    def discard(self, parameters: Iterable[Tensor]) -> None:
        """Forget everything that forward and backward passes have stored."""

    def begin_pass(self, given: Iterable[Tensor]) -> None:
        """Begin a recorded forward pass with these tensors."""
        for t in given:
            if not isinstance(t, Followed) and t.requires_grad:
                raise LossError(TRAINED, code="loss-outside")
        if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
            raise StepError(AVERAGED, code="step-ddp")
        self.passes += 1

    def remove(self) -> None:
        """Remove the hooks from the model."""
        self._is_removed = True
        self.discard(())
        for handle in self._handles:
            handle.remove()
        if self._module is not None:
            self._module.__dict__.pop(_ATTRIBUTE, None)

    def _checked(self, named_parameters: Sequence[tuple[str, Tensor]]) -> Sequence[Contribution]:
        """The recorded terms with their parameters, or an error that says why they are missing."""
        if self._is_removed:
            raise StepError(
                "the model was made private again: use the optimizer of the last make_private call",
                code="step-removed",
            )
        if self.passes > 1:  # it would add up rows of different records
            raise StepError(
                f"the model was run forward {self.passes} times in training mode for one step:"
                " evaluate under torch.no_grad() or model.eval(), and use one forward pass for"
                " the whole loss, such as model(torch.stack([x, fake], 1)).",
                code="step-passes",
            )
        parts = self.recorded(named_parameters)
        found = set(map(id, self._parameters if parts else ()))  # tensors hash slowly
        for part in parts:
            found.update(map(id, part.parameters))
        for name, p in named_parameters:
            if id(p) not in found:
                raise StepError(
                    f"parameter {name!r} has no per-sample gradient in this step: call"
                    " backward() once, on one forward pass in training mode, and freeze with"
                    " requires_grad_(False) what the model does not use.",
                    code="step-unused",
                )
        return parts

    def _refuse_gradient(self, parameter: Tensor) -> None:
        """Delete the ordinary gradient that autograd computed: no optimizer may use it."""
        parameter.grad = None


def require_first_backward(is_again: bool) -> None:
    """Raise in a backward pass that would be recorded twice, or never, or without versions."""
    if torch.is_inference_mode_enabled():
        raise StepError(
            "backward() runs under torch.inference_mode(): call it outside", code="loss-backward"
        )
    if is_again:
        raise StepError(
            "backward() ran twice through one forward pass, or through that of an earlier batch:"
            " add the losses and call backward() once for each batch.",
            code="loss-twice",
        )
    if torch.is_grad_enabled():
        raise StepError(
            "backward(create_graph=True): gradients of gradients are not recorded for each"
            " record, so a penalty on them would not be clipped. Leave out create_graph.",
            code="loss-backward",
        )


# -- the clipped sum -------------------------------------------------------------------------------

# A product over positions adds up terms of total size κ·‖g_i‖, which cancel down to ‖g_i‖. The
# error of a norm is 2⁻²⁴ of the terms' size: in float32, and in float64 for the squares from a Gram
# matrix. Above κ = 2¹⁰ the norm counts as larger than it is, as the terms' size over 2¹⁰. So its
# error, and that of the record's part of a sum in float32, stays below 6e-5 of the clip norm.
_MOST_CANCELLED = 2.0**10
# An output gradient is multiplied by its factor first. If the input is near the largest float32,
# this product is subnormal, with an error up to 2⁻²²/C of the record: small clip norms use float64.
_WIDE_BELOW = 2.0**-7


def add_clipped(
    parts: Sequence[Contribution],
    max_grad_norm: float,
    out: Mapping[Tensor, Tensor],
    scale: Tensor | None = None,
    second_moment: Tensor | None = None,
    spare: int = 0,
) -> int:
    """Add Σ_i clip(g_i) of some records to ``out``, a flat tensor for each parameter; returns how
    many records they are, without spare rows.
    """
    is_full = second_moment is not None and second_moment.dim() > 1
    if scale is not None or is_full:
        found = {p: g for part in parts for p, g in part.per_record().items()}
        n = len(next(iter(found.values())))
        rows = [found[p] if p in found else p.new_zeros(()).expand(n, p.numel()) for p in out]
        if scale is not None:  # g/F
            scaled = torch.cat([g.to(scale.dtype) for g in rows], dim=1) / scale
            rows = list(scaled.split([p.numel() for p in out], dim=1))
        parts = [PerRecord(dict(zip(out, rows, strict=True)))]
    norm = joined(norms_of(parts))
    sizes: list[Tensor] = []
    for part in parts:
        if part.size is not None:
            sizes.append(part.size)
    if sizes:
        largest = sizes[0] if len(sizes) == 1 else torch.stack(sizes).amax(0)
        norm = torch.maximum(norm, largest / _MOST_CANCELLED)
    if spare:
        norm[-spare:] = math.inf
    factor = torch.div(constant(max_grad_norm, norm.dtype), norm).clamp_max_(1.0)
    # 0·inf is nan: a record that is not finite has to be replaced by zeros, not scaled. So has a
    # record so large that its factor is subnormal and may be rounded up. Squares overflow before
    # either (C is 1e-12 or more); if only squares overflow, no record is replaced. This is the only
    # number of the records that a step reads, and it waits for the GPU.
    if not math.isfinite(norm.dot(norm)):
        kept = factor >= torch.finfo(factor.dtype).tiny
        factor = torch.where(kept, factor, 0.0)
        for part in parts:
            part.keep_only(kept)
    sums, dtype = out, next(iter(out.values())).dtype
    if max_grad_norm < _WIDE_BELOW and dtype != torch.float64:
        dtype = torch.float64
        sums = {p: torch.zeros_like(o, dtype=dtype) for p, o in out.items()}
    in_sum = in_type(factor, dtype)
    for part in parts:
        part.add_sum(in_sum, sums)
    if sums is not out:
        for p, o in out.items():
            o.add_(sums[p])
    if second_moment is not None and is_full:
        rows = [g.to(second_moment.dtype) for g in parts[0].per_record().values()]
        clipped = torch.cat(rows, dim=1) * factor[:, None].to(second_moment.dtype)
        second_moment.addmm_(clipped.T, clipped)
    elif second_moment is not None:
        squares = dict(zip(out, second_moment.split([p.numel() for p in out]), strict=True))
        weights = factor.to(second_moment.dtype)[:, None]
        for p, g in (found for part in parts for found in part.per_record().items()):
            if p in squares:
                # clipped before they are squared: squares of large ones would overflow
                squares[p].add_((g.to(second_moment.dtype) * weights).square_().sum(0))
    return norm.shape[0] - spare
