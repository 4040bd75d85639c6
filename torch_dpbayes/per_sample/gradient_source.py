"""One interface to the sum of clipped per-sample gradients.

This is one of the three places where data is touched. What leaves it is the vector Σ_i g_i·min(1,
C/‖g_i‖), which one record changes by at most C, and the number of records in the batch, which only
the checks of ``release/`` see.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, StepError
from .contributions import Contribution, add_clipped, full_precision, joint_norm
from .mapped_forward import EVALUATED, ForwardPasses, Loss, MappedForward

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
        self._module = module
        self._handles: list[Any] = []
        if module is not None:
            if (before := GradientSource.attached_to(module)) is not None:
                before.remove()
            self._handles = [
                p.register_post_accumulate_grad_hook(self._refuse_gradient)
                for p in module.parameters()
                if p.requires_grad
            ]
            module.__dict__[_ATTRIBUTE] = self  # it, and a copy of it, can be made private again

    @staticmethod
    def attached_to(module: nn.Module) -> GradientSource | None:
        """The source whose hooks ``module`` carries."""
        source: GradientSource | None = module.__dict__.get(_ATTRIBUTE)
        return source

    @torch.no_grad()
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
        sums = {p: o for (_, p), o in zip(named_parameters, out, strict=True)}
        n = 0
        for parts in self._checked(named_parameters):
            with full_precision(out[0].device):
                n += add_clipped(parts, max_grad_norm, sums, scale, second_moment)
        return n

    @torch.no_grad()
    def norms(self, named_parameters: Sequence[tuple[str, Tensor]]) -> Tensor:
        """Every record's ‖g_i‖₂ of the last backward pass: data, which must not leave the
        library unless the records are public.
        """
        device = named_parameters[0][1].device
        norms = [torch.zeros(0, device=device)]
        for parts in self._checked(named_parameters):
            with full_precision(device):
                norms.append(joint_norm(parts))
        return torch.cat(norms).float()

    @abstractmethod
    def recorded(
        self, named_parameters: Sequence[tuple[str, Tensor]]
    ) -> Iterator[Sequence[Contribution]]:
        """What the last backward pass recorded, some records at a time."""

    @abstractmethod
    def zero_grad(self, parameters: Iterable[Tensor]) -> None:
        """Forget the gradients of the last backward pass; a forward pass that waits for its
        backward pass stays intact.
        """

    @abstractmethod
    def discard(self, parameters: Iterable[Tensor]) -> None:
        """Forget everything that forward and backward passes left behind."""

    def require_pass_in_training_mode(self) -> None:
        """Raise where the only forward passes of this step were in eval mode."""
        is_evaluated = self._module is not None and not self._module.training
        if is_evaluated and self.passes is not None and self.passes.count == 0:
            raise StepError(EVALUATED, code="step-eval")

    def require_unchanged(self) -> None:  # noqa: B027 - a model under vmap may change
        """Raise if code that runs on whole batches is not what it was at ``make_private``."""

    def remove(self) -> None:
        """Take the hooks off the model again."""
        self._is_removed = True
        self.discard(())
        for handle in self._handles:
            handle.remove()
        if self._module is not None:
            self._module.__dict__.pop(_ATTRIBUTE, None)

    def _is_enabled(self) -> bool:
        return not (self._is_paused or self._is_removed)

    def _checked(
        self, named_parameters: Sequence[tuple[str, Tensor]]
    ) -> Iterator[Sequence[Contribution]]:
        """What was recorded, each parameter in it; or an error that says why it was not."""
        if self._is_removed:
            raise StepError(
                "the model was made private again since: step with the optimizer of the last"
                " make_private call",
                code="step-removed",
            )
        for parts in self.recorded(named_parameters):
            found = {id(p) for part in parts for p in part.parameters}  # tensors hash slowly
            for name, p in named_parameters:
                if id(p) not in found:
                    raise StepError(
                        f"parameter {name!r} has no per-sample gradient in this step: call"
                        " backward() once, on one forward pass in training mode, and freeze with"
                        " requires_grad_(False) what the model does not use.",
                        code="step-unused",
                    )
            if self.passes is None or not self.passes.is_empty:
                yield parts

    def _refuse_gradient(self, parameter: Tensor) -> None:
        """Autograd computed an ordinary gradient as well: nobody may step on it."""
        parameter.grad = None


class MappedSource(GradientSource):
    """A source whose model runs as a map over records.

    Args:
        module: the model; it stays the user's own object.
        loss_reduction: how the loss reduces over the batch, ``"mean"`` or ``"sum"``.
        assume_independent: the user vouches for the loss, which is not followed.
        loss: ``(output, *targets) -> scalar``, which ``module.private_loss`` runs inside the map.
    """

    passes: ForwardPasses
    _alone: Callable[[], AbstractContextManager[Any]]  # as in the map, for one record

    def __init__(
        self,
        module: nn.Module,
        *,
        loss_reduction: str = "mean",
        assume_independent: bool = False,
        loss: Loss | None = None,
    ) -> None:
        super().__init__(module, loss_reduction, assume_independent=assume_independent)
        self.passes = ForwardPasses(
            self._is_enabled, partial(self.discard, ()), follows=not assume_independent
        )
        self.mapped = MappedForward(module, self, self._in_map(module), loss)

    @abstractmethod
    def _in_map(self, module: nn.Module) -> Sequence[Tensor]:
        """The trainable parameters that take part in the map."""

    @abstractmethod
    def over_records(
        self, of_one: Any, rows: Sequence[Tensor], direct: Sequence[Tensor], n: int
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """As :class:`~torch_dpbayes.per_sample.mapped_forward.MapsRecords` says."""

    def require_nothing_kept(self) -> None:
        """Raise if a tensor of the last forward pass is still alive, after :meth:`discard`."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No per-sample gradients are recorded inside, and torch functions compute as in maps."""
        self._is_paused = True
        try:
            with self._alone():
                yield
        finally:
            self._is_paused = False

    def remove(self) -> None:
        super().remove()
        self.mapped.remove()

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a private model takes along how to get rid of the hooks, and no data."""
        return {**self.__dict__, "_handles": [], "is_copy": True}

    def _checked(
        self, named_parameters: Sequence[tuple[str, Tensor]]
    ) -> Iterator[Sequence[Contribution]]:
        for name, p in named_parameters:
            if p.grad is not None:
                raise StepError(
                    f"parameter {name!r} has an ordinary gradient, which is not clipped: call the"
                    " whole model, take prior_std= instead of a penalty, and call"
                    " optimizer.zero_grad() after other backward passes.",
                    code="step-unclipped",
                )
        return super()._checked(named_parameters)

    def _refuse_gradient(self, parameter: Tensor) -> None:
        if self._is_enabled():
            parameter.grad = None
            raise StepError(
                "a parameter of the private model got an ordinary gradient, which is not clipped:"
                " train on the private loader's batches in training mode, and take"
                " torch.autograd.grad for gradients of inputs.",
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
