"""One interface to the sum of clipped per-sample gradients.

This is one of the three places where data is touched. What leaves it is the vector Σ_i g_i·min(1,
C/‖g_i‖), which one record changes by at most C, and the number of records in the batch, which only
the checks of ``release/`` see.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, StepError
from .mapped_forward import EVALUATED, ForwardPasses

DISAGREE = (
    "the parameters disagree on the number of records in the batch: keep records in dimension 0,"
    " and do not fold time or patches into it, or one record would be clipped as several."
)
UNUSED = (
    "parameter {!r} has no per-sample gradient in this step: call backward() once, on one forward"
    " pass in training mode, and freeze with requires_grad_(False) what the model does not use."
)
REMOVED = (
    "the model was made private again since: step with the optimizer of the last make_private call"
)
UNCLIPPED = (
    "a parameter of the private model got an ordinary gradient, which is not clipped: train on the"
    " private loader's batches in training mode, take prior_std= for a penalty, and"
    " torch.autograd.grad for gradients of inputs."
)
VOUCHED = "vouched for by the user (assume_independent_records=True)"
BY_CONSTRUCTION = "by construction, in the model and in the loss"
_ATTRIBUTE = "_dpbayes_gradient_source"


class GradientSource(ABC):
    """Where Σ_i clip(g_i) comes from. An implementation belongs to the forward and backward passes
    of one model.

    Args:
        module: the model; it stays the user's own object. None: its hooks are the caller's.
        loss_reduction: ``"mean"`` or ``"sum"``, what the loss does over the batch.
        assume_independent: the user vouches that the loss keeps records apart; it is not followed.

    Attributes:
        independence: how records are kept apart.
        passes: of the model, where they are counted.
        is_copy: it came with a copy of its model, and is only good for :meth:`remove`.
    """

    passes: ForwardPasses | None = None

    def __init__(
        self, module: nn.Module | None, loss_reduction: str, *, assume_independent: bool = False
    ) -> None:
        if loss_reduction not in ("mean", "sum"):
            raise ArgumentError(f'loss_reduction must be "mean" or "sum", got {loss_reduction!r}')
        self.loss_reduction = loss_reduction
        self.independence = VOUCHED if assume_independent else BY_CONSTRUCTION
        self.is_copy = self._is_paused = self._is_removed = False
        self.unrecorded: list[Tensor] | None = None  # while the model is checked
        self._module = module
        self._handles: list[Any] = []
        if module is not None:
            before = GradientSource.attached_to(module)
            if before is not None:
                before.remove()
            self._handles = [
                p.register_post_accumulate_grad_hook(self._refuse_gradient)
                for p in module.parameters()
                if p.requires_grad
            ]

    @staticmethod
    def attached_to(module: nn.Module) -> GradientSource | None:
        """The source whose hooks ``module`` carries."""
        source: GradientSource | None = module.__dict__.get(_ATTRIBUTE)
        return source

    def require_pass_in_training_mode(self) -> None:
        """Raise where the only forward passes of this step were in eval mode."""
        if (
            self.passes is not None
            and self.passes.count == 0
            and self._module is not None
            and not self._module.training
        ):
            raise StepError(EVALUATED, code="step-eval")

    @abstractmethod
    def add_clipped_sum(
        self,
        named_parameters: Sequence[tuple[str, Tensor]],
        max_grad_norm: float,
        out: Sequence[Tensor],
        *,
        scale: Tensor | None = None,
        second_moment: Tensor | None = None,
    ) -> int:
        """Add the last backward pass' Σ_i g_i·min(1, C/‖g_i‖₂) to ``out``.

        The norm runs over all parameters together. A record whose gradient or norm is not finite
        contributes exactly 0.

        Args:
            named_parameters: the trainable parameters θ_1 … θ_P and their names for error messages.
            max_grad_norm: C > 0.
            out: P one-dimensional tensors, float32 or better; the p-th has ``θ_p.numel()`` entries.
            scale: F, by which every gradient is divided before anything else, g_i ← F⁻¹g_i: its
                diagonal, or a lower triangular matrix, over the d entries of all parameters one
                after another.
            second_moment: where Σ_i of the clipped g_i∘g_i (length d) or g_i·g_iᵀ (d × d) is added
                as well. One record moves the former by at most C² in Euclidean norm, the latter by
                at most C² in Frobenius norm.

        Returns:
            The number of records in the batch. It depends on the data: it must not leave the
            library.

        Raises:
            StepError: a parameter has no per-sample gradients, or more than one backward pass was
                made.
        """

    @abstractmethod
    def zero_grad(self, parameters: Iterable[Tensor]) -> None:
        """Forget the gradients of the last backward pass; a forward pass that waits for its
        backward pass stays intact.
        """

    @abstractmethod
    def discard(self, parameters: Iterable[Tensor]) -> None:
        """Forget everything that forward and backward passes left behind."""

    def require_nothing_kept(self) -> None:  # noqa: B027 - most have looked before
        """Raise if a tensor of the last forward pass is still alive, after :meth:`discard`."""

    def require_unchanged(self) -> None:  # noqa: B027 - a model under vmap may change
        """Raise if code that runs on whole batches is not what it was at ``make_private``."""

    @abstractmethod
    def norms(self, named_parameters: Sequence[tuple[str, Tensor]]) -> Tensor:
        """Every record's ‖g_i‖₂ of the last backward pass: data, which must not leave the
        library unless the records are public.
        """

    @abstractmethod
    def per_record_gradients(self, parameter: Tensor) -> Tensor | None:
        """What was recorded for one parameter, (records, *shape), for the check on synthetic
        records; None if nothing was.
        """

    @abstractmethod
    def paused(self) -> AbstractContextManager[None]:
        """No per-sample gradients are recorded inside."""

    def remove(self) -> None:
        """Take the hooks off the model again."""
        self._is_removed = True
        self.discard(())
        for handle in self._handles:
            handle.remove()
        if self._module is not None:
            self._module.__dict__.pop(_ATTRIBUTE, None)

    def _attach(self) -> None:
        """Note on the module whose hooks it carries, so that it, and a copy of it, can be made
        private again.
        """
        assert self._module is not None
        self._module.__dict__[_ATTRIBUTE] = self

    def _is_enabled(self) -> bool:
        return not (self._is_paused or self._is_removed)

    def _refuse_gradient(self, parameter: Tensor) -> None:
        """An ordinary gradient is neither clipped nor noisy: another optimizer would step on it."""
        if not self._is_enabled():
            return
        parameter.grad = None
        if self.unrecorded is None:
            raise StepError(UNCLIPPED, code="step-unclipped")
        self.unrecorded.append(parameter)


def require_no_ordinary_gradient(named_parameters: Sequence[tuple[str, Tensor]]) -> None:
    """Raise where autograd computed a gradient by itself, which is never clipped."""
    for name, p in named_parameters:
        if p.grad is not None:
            raise StepError(
                f"parameter {name!r} has an ordinary gradient, which is not clipped: call the whole"
                " model, use weights through their modules, take prior_std= instead of a penalty,"
                " and call optimizer.zero_grad() after other backward passes.",
                code="step-unclipped",
            )


def require_first_backward(is_again: bool) -> None:
    """Raise in a backward pass that would be recorded twice, or by none."""
    if is_again:
        raise StepError(
            "backward() ran twice through one forward pass, or through one of an earlier batch: add"
            " the losses up and call backward() once for each batch.",
            code="loss-twice",
        )
    if torch.is_grad_enabled():
        raise StepError(
            "backward(create_graph=True): gradients of gradients are not recorded by record, so a"
            " penalty on them would not be clipped. Leave out create_graph.",
            code="loss-backward",
        )


def add_clipped(
    gradients: Sequence[Tensor],
    max_grad_norm: float,
    out: Sequence[Tensor],
    scale: Tensor | None,
    second_moment: Tensor | None,
) -> int:
    """:meth:`GradientSource.add_clipped_sum` of per-record gradients, (records, numel) for
    each parameter.
    """
    if scale is not None:
        gradients = _rescaled(gradients, scale)
    norm = joint_norms(gradients)
    # 0/0 does not occur: C/0 = inf, clamped
    factor = (max_grad_norm / norm).clamp(max=1.0)
    # not of a norm that is not finite, nor of one so large that a subnormal factor is rounded up
    kept = factor >= torch.finfo(factor.dtype).tiny
    factor = torch.where(kept, factor, 0.0)
    if not kept.all():  # 0·inf is nan: such a record has to be cut out, not scaled away
        gradients = [torch.where(kept[:, None], g, 0.0) for g in gradients]
    for g, o in zip(gradients, out, strict=True):
        o.addmv_(g.to(o.dtype).T, factor.to(o.dtype))
    if second_moment is not None:
        _add_second_moment(gradients, factor, second_moment)
    return len(norm)


def joint_norms(gradients: Sequence[Tensor]) -> Tensor:
    """Every record's norm over all parameters, in float32 or better."""
    return joint_norm_of_parts(
        [
            torch.linalg.vector_norm(g, dim=1, dtype=torch.promote_types(g.dtype, torch.float32))
            for g in gradients
        ]
    )


def joint_norm_of_parts(norms: Sequence[Tensor]) -> Tensor:
    """Every record's norm over all parts from those of the parts."""
    if len(norms) == 1:
        return norms[0]
    dtype = max((n.dtype for n in norms), key=lambda d: d.itemsize)
    return torch.linalg.vector_norm(torch.stack([n.to(dtype) for n in norms]), dim=0)


def _rescaled(gradients: Sequence[Tensor], scale: Tensor) -> list[Tensor]:
    """F⁻¹g for every record's g."""
    sizes = [g.shape[1] for g in gradients]
    if scale.dim() == 1:
        return [g.to(scale.dtype) / f for g, f in zip(gradients, scale.split(sizes), strict=True)]
    together = torch.cat([g.to(scale.dtype) for g in gradients], dim=1)
    return list(torch.linalg.solve_triangular(scale, together.T, upper=False).T.split(sizes, dim=1))


def _add_second_moment(gradients: Sequence[Tensor], factor: Tensor, second_moment: Tensor) -> None:
    clipped = [
        g.to(second_moment.dtype) * factor[:, None].to(second_moment.dtype) for g in gradients
    ]
    if second_moment.dim() == 1:
        for g, m in zip(clipped, second_moment.split([g.shape[1] for g in clipped]), strict=True):
            m.add_(g.square().sum(0))
    else:
        together = torch.cat(clipped, dim=1)
        second_moment.addmm_(together.T, together)
