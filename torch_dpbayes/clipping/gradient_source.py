"""One interface to the sum of clipped per-record gradients, and its plain implementation on Opacus'
hooks.

This is one of the three places where data is touched. What leaves it is the vector Σ_i g_i·min(1,
C/‖g_i‖), which one record changes by at most C, and the number of records in the batch, which only
the checks of ``optim/base.py`` see.
"""

from __future__ import annotations

import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from opacus.grad_sample import GradSampleHooks
from opacus.layers.dp_rnn import RNNLinear
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..troubleshooting import explained
from .loss_check import LossWatch
from .nested import Nested, map_tensors, tensors_in

PACKED = (
    "a recurrent layer was given a packed sequence, which sorts records by length, so their"
    " gradients cannot be told apart: pad the sequences and pass a tensor."
)
DISAGREE = (
    "the parameters disagree on the number of records in the batch: keep records in dimension 0,"
    " and do not fold time or patches into it, or one record would be clipped as several."
)
UNUSED = (
    "parameter {!r} has no per-record gradient in this step: call backward() once, on one forward"
    " pass in training mode, and freeze with requires_grad_(False) what the model does not use."
)
EVALUATED = (
    "the model is in eval mode, in which no per-record gradients are recorded: call model.train()"
    " before the training loop, and again after every validation."
)
AVERAGED = (
    "the model is called through torch's DistributedDataParallel, which averages unclipped"
    " gradients. Call the model that make_private returned; for several ranks"
    " PrivacyEngine(process_group=torch.distributed.group.WORLD)."
)
TRAINED = (
    "an input of the model requires gradients, which are neither clipped nor noisy: whatever they"
    " train would release the records. Put that into the model, or pass x.detach()."
)
REMOVED = (
    "the model was made private again since: step with the optimizer of the last make_private call"
)
COPIED = (
    "no per-record gradients can be recorded: the model is a copy of a private one, or a parameter"
    " was added, exchanged or unfrozen since. Call make_private again; predict under model.eval()."
)
# The first layer's input needs no gradient; Opacus' hooks are right there, and torch warns all the
# same.
_HARMLESS_WARNING = (
    "Full backward hook is firing when gradients are computed with respect to module outputs"
)
_ATTRIBUTE = "_dpbayes_gradient_source"


class GradientSource(ABC):
    """Where Σ_i clip(g_i) comes from. An implementation belongs to the forward and backward passes
    of one model.

    Args:
        module: the model; it stays the user's own object. None: its hooks are the caller's.
        loss_reduction: ``"mean"`` or ``"sum"``, what the loss does over the batch.
        has_loss: the loss is computed for each record alone.

    Attributes:
        independence: how records are kept apart.
        passing_attributes: what it keeps on modules between a forward pass and the end of the step.
        passes: of the model, where they are watched.
        is_copy: it came with a copy of its model, and is only good for :meth:`remove`.
    """

    independence: str = "tested on made-up records"
    passing_attributes: tuple[str, ...] = ()
    passes: ForwardPasses | None = None

    def __init__(
        self, module: nn.Module | None, loss_reduction: str, *, has_loss: bool = False
    ) -> None:
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f'loss_reduction must be "mean" or "sum", got {loss_reduction!r}')
        self.loss_reduction = loss_reduction
        self.is_copy = self._is_paused = self._is_removed = False
        self._module, self._has_loss = module, has_loss
        before = None if module is None else GradientSource.attached_to(module)
        if before is not None:
            before.remove()

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
            raise RuntimeError(EVALUATED)

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
            RuntimeError: a parameter has no per-record gradients, or more than one backward pass
                was made.
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

    @abstractmethod
    def norms(self, named_parameters: Sequence[tuple[str, Tensor]]) -> Tensor:
        """Every record's ‖g_i‖₂ of the last backward pass: data, which must not leave the
        library unless the records are public.
        """

    @abstractmethod
    def per_record_gradients(self, parameter: Tensor) -> Tensor | None:
        """What was recorded for one parameter, (records, *shape), for the checks on made-up
        records; None if nothing was.
        """

    def watch_loss(self) -> None:
        """From now on, see that what reaches a record's output comes from that record's loss
        alone.
        """
        if self.passes is not None:
            self.passes.watches_loss = True

    @property
    def loss_state(self) -> str:
        """How records are kept apart in the loss."""
        if self._has_loss:
            return "loss by construction"
        return f"loss {'not seen' if self.passes is None else self.passes.loss.state}"

    @abstractmethod
    def paused(self) -> AbstractContextManager[None]:
        """No per-record gradients are recorded inside."""

    def use_stand_in(self) -> None:
        """From now on the model is given a made-up record in place of an empty batch, of
        which nothing is kept but the shapes.
        """
        assert self.passes is not None
        self.passes.uses_stand_in = True

    def remove(self) -> None:
        """Take the hooks off the model again."""
        self._is_removed = True
        self.discard(())
        if self.passes is not None:
            self.passes.remove()
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


class ForwardPasses:
    """Watches the forward passes of a model in training mode; both sources ask it whether what was
    recorded makes one batch.

    It also lets empty batches through models that cannot take them. Poisson sampling delivers some,
    and they must get their noise: the model then sees one record of ones, and its output is cut to
    zero rows, so that no gradient reaches the made-up record.

    Args:
        module: the model.
        is_enabled: whether anything is recorded at all.
        loss_reduction: ``"mean"`` or ``"sum"``, what the loss does over the batch.
        forget: called after a pass that raised, if no other waits for its backward pass.
    """

    def __init__(
        self,
        module: nn.Module,
        is_enabled: Callable[[], bool],
        loss_reduction: str,
        forget: Callable[[], None],
    ) -> None:
        self.loss = LossWatch(loss_reduction)
        self._is_mean = loss_reduction == "mean"
        self.watches_loss = False  # while the model is checked, with losses that are made up
        self.count = 0
        self._thread: int | None = None  # inside a pass that is recorded, which runs there
        self.has_stand_in = False
        self.uses_stand_in = False
        self._is_enabled, self._forget = is_enabled, forget
        self._handles = [
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.register_forward_hook(self._after, always_call=True),
        ]

    @property
    def is_open(self) -> bool:
        """Whether this thread is inside a pass that is recorded."""
        return self._thread is not None and self._thread == threading.get_ident()

    @torch.compiler.disable
    @explained
    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not (module.training and torch.is_grad_enabled() and self._is_enabled()):
            if self.is_open:  # of a pass that was interrupted
                self._thread = None
            return None
        if self._thread not in (None, threading.get_ident()):
            raise RuntimeError(
                "another thread runs this model forward in training mode: train in one thread, and"
                " evaluate in others under torch.no_grad()"
            )
        if self.watches_loss and any(t.requires_grad for t in tensors_in((args, kwargs))):
            raise RuntimeError(TRAINED)
        self._thread = threading.get_ident()
        if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
            raise RuntimeError(AVERAGED)
        self.count += 1
        if not self.uses_stand_in:
            return None
        first = next(tensors_in((args, kwargs)), None)
        if first is None or first.dim() == 0 or len(first) > 0:
            return None
        self.has_stand_in = True
        return map_tensors(
            (args, kwargs),
            lambda t: t.new_ones(1, *t.shape[1:]) if t.dim() > 0 and len(t) == 0 else t,
        )

    @torch.compiler.disable
    def _after(self, _module: nn.Module, _input: Any, output: Any) -> Any:
        if not self.is_open:
            return None
        self._thread = None
        if output is None:  # it raised
            if self.count == 1:
                self._forget()
            return None
        if self.has_stand_in:
            return map_tensors(output, lambda t: t[:0] if t.dim() > 0 else t)
        nested = Nested(output)
        rows = [t for t in nested.tensors if t.requires_grad and t.dim() > 0]
        if not rows:
            return None
        if self._is_mean:
            output = nested.rebuilt(
                [_undivided(t) if t.requires_grad and t.dim() > 0 else t for t in nested.tensors]
            )
        return self.loss.outputs(output, len(rows[0])) if self.watches_loss else output

    def require_one(self, is_anything_recorded: bool) -> None:
        if self.count > 1:
            raise RuntimeError(
                f"the model was run forward {self.count} times in training mode for one step:"
                " evaluate under torch.no_grad() or model.eval(), and compute all that a loss"
                " needs in one forward pass."
            )
        self.loss.require_each_alone()
        if self.count == 0 and is_anything_recorded:
            raise RuntimeError(
                "call the model itself, not its parts: model(x), so that it can be checked that"
                " every record is used once"
            )

    def forget(self) -> None:
        self.count, self.has_stand_in = 0, False
        if self.is_open:
            self._thread = None
        self.loss.forget()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _undivided(output: Tensor) -> Tensor:
    """The output, of which each row's gradient goes on as if that record were alone: a mean
    divided it by their number.
    """
    n = len(output)
    row = output.view_as(output)
    row.register_hook(lambda gradient: gradient * n)
    return row


class HooksGradientSource(GradientSource):
    """Per-record gradients as Opacus' ``GradSampleHooks`` leave them in ``p.grad_sample``.

    Args:
        module: the model to hook; it stays the user's own object. None: the hooks are the caller's.
        loss_reduction: how the loss reduces over the batch, ``"mean"`` or ``"sum"``.

    **Privacy.** ‖Σ clip(g_i)‖ changes by at most C when a record is added or removed, provided that
    record i's gradient depends on record i alone. ``PrivacyEngine.make_private`` checks what can be
    checked of that.
    """

    passing_attributes = ("activations", "max_batch_len")  # Opacus'

    def __init__(self, module: nn.Module | None = None, *, loss_reduction: str = "mean") -> None:
        super().__init__(module, loss_reduction)
        self._hooks: _Hooks | None = None
        if module is not None:
            warnings.filterwarnings("ignore", message=_HARMLESS_WARNING)
            try:
                self._hooks = _Hooks(module, loss_reduction)
            except NotImplementedError as error:
                module.__dict__.pop("autograd_grad_sample_hooks", None)
                raise ValueError(
                    f"Opacus has no per-record gradients for a layer of this model: {error}."
                    " Replace the layer."
                ) from error
            self.passes = self._hooks.passes
            self._attach()

    def add_clipped_sum(
        self,
        named_parameters: Sequence[tuple[str, Tensor]],
        max_grad_norm: float,
        out: Sequence[Tensor],
        *,
        scale: Tensor | None = None,
        second_moment: Tensor | None = None,
    ) -> int:
        return add_clipped(
            self._records(named_parameters), max_grad_norm, out, scale, second_moment
        )

    def norms(self, named_parameters: Sequence[tuple[str, Tensor]]) -> Tensor:
        return joint_norms(self._records(named_parameters)).float()

    def zero_grad(self, parameters: Iterable[Tensor]) -> None:
        for p in parameters:
            if hasattr(p, "grad_sample"):
                p.grad_sample = None

    def discard(self, parameters: Iterable[Tensor]) -> None:
        self.zero_grad(parameters)
        # what else the caller's hooks keep is on modules that are not known here
        if self._hooks is None:
            return
        self._hooks.forget_pass()

    def per_record_gradients(self, parameter: Tensor) -> Tensor | None:
        records: Tensor | list[Tensor] | None = getattr(parameter, "grad_sample", None)
        return records[0] if isinstance(records, list) else records

    @contextmanager
    def paused(self) -> Iterator[None]:
        if self._hooks is None:
            yield
            return
        self._hooks.disable_hooks()
        try:
            yield
        finally:
            self._hooks.enable_hooks()

    def _records(self, named_parameters: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
        if self._is_removed:
            raise RuntimeError(REMOVED)
        if self._module is None or self.passes is None:
            return _records(named_parameters)
        parameters = self._module.parameters()
        self.passes.require_one(
            any(getattr(p, "grad_sample", None) is not None for p in parameters)
        )
        assert self._hooks is not None
        self._hooks.require_unchanged(named_parameters)
        gradients = _records(named_parameters)
        return [g[:0] for g in gradients] if self.passes.has_stand_in else gradients

    def remove(self) -> None:
        super().remove()
        if self._hooks is not None:
            self._hooks.cleanup()


class _Hooks(GradSampleHooks):
    """Opacus' hooks, which watch forward passes and handle what Opacus stumbles over: copied
    models, empty batches, padding.
    """

    def __init__(self, module: nn.Module, loss_reduction: str) -> None:
        # of gradients that are no more divided by their number
        super().__init__(module, loss_reduction="sum", strict=False)
        self._is_mean = loss_reduction == "mean"
        self._left: dict[Tensor, tuple[Tensor, int]] = {}  # per-record gradients and their versions
        self.passes = ForwardPasses(module, self._is_enabled, loss_reduction, self.forget_pass)
        # Opacus' list, which cleanup() takes off the module
        handles: Any = module.autograd_grad_sample_hooks
        handles += [
            p.register_post_accumulate_grad_hook(self._forget_gradient)
            for p in module.parameters()
            if p.requires_grad
        ]

    def _is_enabled(self) -> bool:
        return bool(self.hooks_enabled)

    def forget_pass(self) -> None:
        """Forget the last forward pass."""
        self.passes.forget()
        self._left.clear()
        for module in self._module.modules():
            for left_behind in ("activations", "max_batch_len"):
                if hasattr(module, left_behind):
                    delattr(module, left_behind)
        for p in self._module.parameters():
            if hasattr(p, "_forward_counter"):
                p._forward_counter = 0
            if hasattr(p, "_current_grad_sample"):
                del p._current_grad_sample

    def _forget_gradient(self, parameter: Tensor) -> None:
        """The ordinary gradient is neither clipped nor noisy: another optimizer on these
        parameters would step on it.
        """
        if self.hooks_enabled:
            parameter.grad = None

    def capture_activations_hook(
        self, module: nn.Module, forward_input: list[Tensor], _forward_output: Tensor
    ) -> None:
        recording = self.hooks_enabled and module.training and torch.is_grad_enabled()
        if recording and any(
            p.requires_grad and not hasattr(p, "_forward_counter") for p in module.parameters()
        ):
            raise RuntimeError(COPIED)
        if (
            recording
            and isinstance(module, RNNLinear)
            and len(forward_input[0]) != getattr(module, "max_batch_len", len(forward_input[0]))
        ):
            raise RuntimeError(PACKED)
        super().capture_activations_hook(module, forward_input, _forward_output)

    def capture_backprops_hook(
        self, module: Any, _forward_input: Any, forward_output: Any, **options: Any
    ) -> None:
        if not self.hooks_enabled:
            return
        if not getattr(module, "activations", None):
            raise RuntimeError(
                "backward() ran twice through one forward pass, or through one of an earlier batch:"
                " add the losses up and call backward() once for each batch."
            )
        trainable = [p for p in module.parameters() if p.requires_grad]
        # which sees gradients before they are multiplied by their number
        if module is self._module and self._is_mean:
            forward_output = tuple(g * len(g) for g in forward_output)
        if len(forward_output[0]) == 0:  # some of Opacus' grad samplers fail on empty batches
            module.activations.pop()
            for p in trainable:
                p._forward_counter -= 1
                p.grad_sample = torch.zeros(0, *p.shape, dtype=p.dtype, device=p.device)
            self._note(trainable)
            return
        super().capture_backprops_hook(module, _forward_input, forward_output, **options)
        if (
            isinstance(module, nn.Embedding)
            and module.padding_idx is not None
            and module.weight.requires_grad
        ):
            # torch gives the padding row no gradient, Opacus does
            records: Any = getattr(module.weight, "grad_sample", None)
            if records is not None:
                (records[-1] if isinstance(records, list) else records)[:, module.padding_idx] = 0.0
        self._note(trainable)

    def _note(self, parameters: Sequence[Tensor]) -> None:
        for p in parameters:
            records = getattr(p, "grad_sample", None)
            if isinstance(records, Tensor):
                self._left[p] = records, records._version

    def require_unchanged(self, named_parameters: Sequence[tuple[str, Tensor]]) -> None:
        """Raise if per-record gradients are not those that the backward pass left behind."""
        for name, p in named_parameters:
            records = getattr(p, "grad_sample", None)
            if not isinstance(records, Tensor):
                continue
            left, version = self._left.get(p, (None, 0))
            if records is not left or records._version != version:
                raise RuntimeError(
                    f"grad_sample of parameter {name!r} was changed between backward() and step(),"
                    " where records may be mixed before they are clipped: leave it as it is, and"
                    " change copies."
                )


def require_no_ordinary_gradient(named_parameters: Sequence[tuple[str, Tensor]]) -> None:
    """Raise where autograd computed a gradient by itself, which is never clipped."""
    for name, p in named_parameters:
        if p.grad is not None:
            raise RuntimeError(
                f"parameter {name!r} has an ordinary gradient, which is not clipped: call the whole"
                " model, use weights through their modules, take prior_std= instead of a penalty,"
                " and call optimizer.zero_grad() after other backward passes."
            )


def require_first_backward(is_again: bool) -> None:
    """Raise in a backward pass that would be recorded twice, or by none."""
    if is_again:
        raise RuntimeError(
            "backward() ran twice through one forward pass, or through one of an earlier batch: add"
            " the losses up and call backward() once for each batch."
        )
    if torch.is_grad_enabled():
        raise RuntimeError(
            "backward(create_graph=True): gradients of gradients are not recorded by record, so a"
            " penalty on them would not be clipped. Leave out create_graph."
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


def _records(named_parameters: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
    """Per-record gradients of each parameter as (records, numel) matrices."""
    gradients = [_records_of(name, p) for name, p in named_parameters]
    if len({len(g) for g in gradients}) > 1:
        raise RuntimeError(DISAGREE)
    return gradients


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


def _records_of(name: str, parameter: Tensor) -> Tensor:
    """The parameter's per-record gradients as a (records, numel) matrix, or an error that
    says what is wrong.
    """
    if not hasattr(parameter, "grad_sample"):
        raise RuntimeError(
            f"parameter {name!r} has no per-record gradients: its module is not hooked, and an"
            " ordinary p.grad, which is not clipped, would release its records. Build model,"
            " optimizer and loader with torch_dpbayes.PrivacyEngine().make_private(module=...,"
            " optimizer=..., data_loader=...)."
        )
    records = parameter.grad_sample
    if isinstance(records, list):
        if len(records) > 1:
            raise RuntimeError(
                f"{len(records)} backward passes were made since the last step: call step() after"
                " every backward(), and use Opacus' BatchMemoryManager for batches that do not fit"
                " into memory."
            )
        records = records[0] if records else None
    if records is None:
        raise RuntimeError(UNUSED.format(name))
    if records.shape[1:] != parameter.shape:
        raise RuntimeError(
            f"the per-record gradient of parameter {name!r} has shape {tuple(records.shape)};"
            f" expected (records, *{tuple(parameter.shape)})"
        )
    return records.detach().reshape(len(records), parameter.numel())
