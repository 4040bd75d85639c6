# ruff: noqa: SLF001 - only this module puts the rows of followed tensors into the map
"""The forward pass of a private model: the model's own program, run for each record alone.

The arguments are split into tensors with a row for each record. The model's program sees one row at
a time (:mod:`torch_dpbayes.per_sample.record_map`), and its results are stacked again. If the model
returns a scalar, it is the loss of one record.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.weight_norm import WeightNorm

from ..errors import (
    ArgumentError,
    ArgumentTypeError,
    DPBayesError,
    LossError,
    ModelError,
    StepError,
)
from .derived import is_private
from .followed import Batch, Followed, is_constant
from .gradient_source import COPIED
from .nested import Nested, holds_plain_sequence, tensors_in, two_rows
from .record_map import CannotBeMapped, OutsideTensor, without_values

if TYPE_CHECKING:
    from .bookkeeping import BookkeepingGradientSource

Loss = Callable[..., Tensor]

BATCH_NORM_TO_EVAL = '[m.eval() for m in model.modules() if "BatchNorm" in type(m).__name__]'
EVALUATED = (
    "the model is in eval mode, so no per-sample gradients are recorded: call model.train()"
    " before training, and after every validation; evaluate under torch.no_grad()."
)
STRANGE_INPUT = (
    "the model gets a tensor (rows of shape {}) that is not from the private loader, or that"
    " mixes records: pass the loader's batch; make constants buffers; evaluate under"
    " torch.no_grad()"
)

_NO_TENSOR = (
    "its output is of type {}, which contains no tensor: return tensors (for a distribution its"
    " parameters), and build other objects outside"
)
_SEVERAL_ROWS = (
    "its output has several rows for one record: return one row per record in dimension 0"
)
_OTHER_INPUT = (
    "the model gets a tensor of another batch, of mixed records, or with records outside of"
    " dimension 0",
    "model-input",
    "Standardise by public constants; transpose inside the model; for Trainer of transformers set"
    " net.accepts_loss_kwargs = False",
)


class ReplacedForward(ABC):
    """Takes the place of a module's ``forward`` until :meth:`remove`."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.own = module, module.__dict__.get("forward")
        # no bound methods: accelerate would bind the first to the module, and pickle would look up
        # the second by its name, and find the replacement
        self.original: Callable[..., Any] = self.own or partial(type(module).forward, module)
        module.__dict__["forward"] = partial(self.forward)

    def remove(self) -> None:
        """Give the module its own ``forward`` back."""
        self.module.__dict__.pop("forward", None)
        if self.own is not None:
            self.module.__dict__["forward"] = self.own

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The function that runs in place of the module's own forward."""


class MappedForward(ReplacedForward):
    """Runs a model for each record alone while its gradients are recorded.

    Args:
        module: the model, whose ``forward`` is replaced. Hooks on it see followed tensors.
        source: the gradient source that records, if it is recording.
        direct: trainable parameters that take part in the map themselves, with a copy for each
            record.
        loss: ``(output, target) -> scalar`` of one record, for :meth:`private_loss`.

    Attributes:
        around: a context in which the program of one record runs, used again in each pass.
        pending: a check of the model that waits for the shapes of its arguments.
        is_checking: whether the model runs on synthetic records.
        rows_of_scalars: which outputs have one number for each record, and are not losses.
    """

    def __init__(
        self,
        module: nn.Module,
        source: BookkeepingGradientSource,
        direct: Sequence[Tensor],
        loss: Loss | None,
    ) -> None:
        self.source, self.loss = source, loss
        self._direct: list[tuple[nn.Module, str, Tensor]] = []
        self._targets: tuple[Any, ...] | None = None
        self.pending: Callable[[tuple[Any, ...], dict[str, Any]], None] | None = None
        self.is_checking = False
        self.rows_of_scalars: tuple[bool, ...] = ()
        self.around: AbstractContextManager[Any] = nullcontext()
        super().__init__(module)
        self.add_direct(direct)
        module.__dict__["private_loss"] = self.private_loss

    def add_direct(self, parameters: Iterable[Tensor]) -> None:
        """More parameters take part in the map."""
        chosen = set(parameters)
        self._direct += [
            (owner, name, p)
            for owner in self.module.modules()
            for name, p in owner._parameters.items()
            if p in chosen
        ]

    def remove(self) -> None:
        self.module.__dict__.pop("private_loss", None)
        super().remove()

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        source = self.source
        is_recording = source.is_recording
        if not (is_recording and self.module.training):
            if is_recording and any(t._batch.is_open for t in _followed_in(args, kwargs)):
                raise StepError(EVALUATED, code="step-eval")
            return self.original(*args, **kwargs)
        targets, self._targets = self._targets, None
        given = Nested(((*args, *(targets or ())), kwargs))
        if self.pending is not None:
            if source.follows:  # the check would blame the model for an argument without rows
                self._rows(given.tensors)
            pending, self.pending = self.pending, None
            pending(args, kwargs)
        source.begin_pass(given.tensors)
        try:
            if self.loss is not None and targets is None and not self.is_checking:
                raise LossError(
                    "this model was made private with loss=: train with net.private_loss(x, y),"
                    " which computes it for each record alone",
                    code="loss-twice-given",
                )
            return self._mapped(given, args, kwargs, targets)
        except BaseException as error:
            if source.passes == 1:  # no other forward pass waits for its backward pass
                source.discard(())
            if self.is_checking:
                raise
            # no second try: one record may cause the error
            for t in _followed_in(args, kwargs, targets):
                t._batch.refusal = t._batch.refusal or "the forward pass failed"
            if isinstance(error, OutsideTensor) and error.tensor in set(self.module.parameters()):
                raise StepError(COPIED, code="model-copied") from None
            if isinstance(error, DPBayesError) or not isinstance(error, (IndexError, RuntimeError)):
                raise
            raise CannotBeMapped(without_values(error)) from None

    def private_loss(self, *batch: Any, **inputs: Any) -> Tensor:
        """The loss of a batch, computed for each record alone: ``net.private_loss(x,
        y).backward()``.

        Args:
            batch: the model's positional arguments, and the target as the last one.
            inputs: the model's named arguments.
        """
        if self.loss is None:
            raise ArgumentError(
                "private_loss computes the loss that was passed to make_private: write"
                " make_private(..., loss=fn), with fn(output, target) of one record"
            )
        self._targets = batch[-1:]
        try:
            output: Tensor = self.module(*batch[:-1], **inputs)
            if self._targets is not None:  # in eval mode, or without gradients: nothing was mapped
                output = self._loss_of(output, *self._targets)
        finally:
            self._targets = None
        return output

    def _loss_of(self, output: Any, *targets: Any) -> Tensor:
        assert self.loss is not None
        try:
            return self.loss(output, *targets)
        except TypeError:
            try:
                inspect.signature(self.loss).bind(output, *targets)
            except TypeError as error:
                raise ArgumentTypeError(
                    f"private_loss(*inputs, target) calls loss=fn as fn(output, target): {error}"
                ) from None
            raise

    def _run_with(self, values: Mapping[Tensor, Tensor], args: Any, kwargs: Any) -> Any:
        """The module's own forward pass, with other tensors in place of its parameters."""
        before = {owner: owner._parameters for owner, _, _ in self._direct}
        for owner, parameters in before.items():
            owner.__dict__["_parameters"] = {
                n: None if p is None else values.get(p, p) for n, p in parameters.items()
            }
        try:
            return self.original(*args, **kwargs)
        finally:
            for owner, parameters in before.items():
                owner.__dict__["_parameters"] = parameters

    def _mapped(self, given: Nested, args: Any, kwargs: Any, targets: Any) -> Any:
        around = self._around()
        kind = type(given.strangers[0]).__name__ if given.strangers else None
        several = () if given.is_plain else (*args, *kwargs.values(), *(targets or ()))
        if any(map(holds_plain_sequence, several)):
            kind = "several numbers or texts"
        if kind is not None:
            raise CannotBeMapped(
                f"an argument contains {kind}, which is the same for all records: pass a tensor"
                " with one row per record"
            )
        batch, rows, n = self._rows(given.tensors)
        direct: dict[Tensor, None] = {}  # the parameters that take part in the map
        for owner, name, p in self._direct:
            if owner._parameters.get(name) is not p:
                raise StepError(COPIED, code="model-copied")
            if p.requires_grad:
                direct[p] = None
        result: Nested | None = None

        def of_one(slices: Sequence[Tensor]) -> Sequence[Tensor]:
            nonlocal result
            tensors: Sequence[Tensor] = slices
            if len(rows) < len(given.tensors):  # dim() is slow on a followed tensor
                mapped = iter(slices)
                tensors = [
                    next(mapped) if isinstance(t, Followed) or t.dim() > 0 else t
                    for t in given.tensors
                ]
            one_args, one_kwargs = given.rebuilt(tensors)
            with around:
                if direct:
                    own = dict(zip(direct, slices[len(rows) :], strict=True))
                    output = self._run_with(own, one_args[: len(args)], one_kwargs)
                else:
                    output = self.original(*one_args[: len(args)], **one_kwargs)
                if targets is not None:
                    output = _scalar(self._loss_of(output, *one_args[len(args) :]))
            result = Nested(output, keeps_strangers=False)
            found, result.tensors, result.strangers = result.tensors, [], []
            if not found:
                raise CannotBeMapped(_NO_TENSOR.format(type(output).__name__))
            if batch is None and any(t.dim() > 0 and t.shape[0] != 1 for t in found):
                raise CannotBeMapped(_SEVERAL_ROWS)
            return found

        found, leaves = self.source.over_records(of_one, rows, list(direct), n)
        assert result is not None
        how = self.source.loss_reduction
        if batch is None:
            n -= self.source.spare
            whole = (undivided(t[:n] if self.source.spare else t, how) for t in found)
            divisor = max(n, 1) if how == "mean" else 1
            return result.rebuilt(
                [t.squeeze(1) if t.dim() > 1 else t.sum() / divisor for t in whole]
            )
        batch.loss_reduction, batch.leaves = how, leaves
        are_rows = self.rows_of_scalars
        if len(are_rows) != len(found) or targets is not None:
            are_rows = (False,) * len(found)
        outputs = []
        for t, is_row in zip(found, are_rows, strict=True):
            if t.dim() == 1 and not is_row:
                outputs.append(Followed(t, batch, None, how))  # a loss
            else:
                outputs.append(Followed(t.unsqueeze(1) if t.dim() == 1 else t, batch))
        return result.rebuilt(outputs)

    def _around(self) -> AbstractContextManager[Any]:
        """The context in which compiled modules run eagerly. Raises if a module has something that
        a map cannot restrict to one record.
        """
        is_compiled = False
        made: list[tuple[nn.Module, str]] = []  # attributes that torch sets in every pass
        modules: list[nn.Module | None] = [self.module]
        seen: set[nn.Module] = set()
        for module in modules:  # faster than modules(), which is recursive
            if module is None or module in seen:
                continue
            seen.add(module)
            modules += module._modules.values()
            special = (_BatchNorm, nn.RNNBase, torch._dynamo.OptimizedModule)
            if not (isinstance(module, special) or any(map(vars(module).get, _ADDED))):
                continue
            if module._backward_hooks or module._backward_pre_hooks:
                raise ModelError(
                    f"{type(module).__name__} has a backward hook (register_full_backward_hook),"
                    " which does not run here: remove it",
                    code="model-backward-hook",
                )
            if isinstance(module, _BatchNorm) and module.training and module.track_running_stats:
                raise ModelError(
                    "a BatchNorm is in training mode, so its statistics depend on the records:"
                    f" after model.train() write {BATCH_NORM_TO_EVAL}",
                    code="model-layer",
                )
            is_compiled |= _is_compiled(module)
            if isinstance(module, nn.RNNBase):
                made += [(module, "_flat_weights"), (module, "_flat_weight_refs")]
            for hook in module._forward_pre_hooks.values():
                if isinstance(hook, (BasePruningMethod, WeightNorm)):
                    if module is self.module:
                        raise CannotBeMapped(
                            "a hook makes its weight (pruning or weight norm): make"
                            " nn.Sequential(model) private"
                        )
                    name = hook.name if isinstance(hook, WeightNorm) else hook._tensor_name
                    made.append((module, name))
        return _as_written(self.around, is_compiled, made) if is_compiled or made else self.around

    def _rows(self, tensors: Sequence[Tensor]) -> tuple[Batch | None, list[Tensor], int]:
        """The batch, the rows of all tensors with dimensions, and the number of records."""
        if not self.source.follows:
            return None, *self._vouched_rows(tensors)
        batch: Batch | None = None
        n, is_any_followed = 0, False
        for t in tensors:
            if isinstance(t, Followed):
                is_any_followed = True
                if batch is None and t._batch.is_open:
                    batch, n = t._batch, t._rows.shape[0]
        if batch is None:
            raise LossError(
                "the model gets a batch after its backward(), or after a later batch was"
                " delivered: take a new batch from the loader"
                if is_any_followed
                else STRANGE_INPUT.format(list(tensors[0].shape[1:]) if tensors else []),
                code="model-input",
            )
        if batch.refusal is not None:
            raise batch.refuse(batch.refusal)
        self.source.spare, self.source.batch = batch.spare, batch
        rows = []
        for t in tensors:
            if isinstance(t, Followed):
                if t._batch is not batch or t._how is not None or (t._dim != 0 and t.dim() > 0):
                    raise batch.refuse(*_OTHER_INPUT)
                rows.append(t._rows)
            elif is_private(t) or not (t.dim() == 0 or is_constant(t, batch)):
                raise batch.refuse(STRANGE_INPUT.format(list(t.shape[1:])), "model-input")
            elif t.dim() > 0:
                each = t[: len(t) // batch.shown]
                rows.append(each.expand(n, *each.shape))  # the map gives each record a copy
        return batch, rows, n

    def _vouched_rows(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], int]:
        """Rows of ordinary tensors, if the user vouches for the loss."""
        sizes = {len(t) for t in tensors if t.dim() > 0}
        if len(sizes) != 1:
            raise CannotBeMapped(
                f"its arguments have shapes {[list(t.shape) for t in tensors]}: each tensor needs a"
                " row for every record; keep constants in buffers"
            )
        (n,) = sizes
        self.source.spare = max(0, 2 - n)
        return [two_rows(t).unsqueeze(1) for t in tensors if t.dim() > 0], max(n, 2)

    def where(self, kept: Sequence[Tensor]) -> str:
        """The explanation in an error about tensors that outlive their map."""
        places = (
            f"as {attribute!r} of module {name or type(self.module).__name__!r}"
            for name, layer in self.module.named_modules()
            for attribute, value in vars(layer).items()
            if any(t is value for t in kept)
        )
        place = next(places, "in a container, a closure or a global variable")
        return (
            f"the forward pass stores a tensor computed from records ({place}), which the next"
            " batch could read: return it instead"
        )


# attributes of a module that matter to a map
_ADDED = ("_backward_hooks", "_backward_pre_hooks", "_forward_pre_hooks", "_compiled_call_impl")


def _is_compiled(module: nn.Module) -> bool:
    is_optimized = isinstance(module, torch._dynamo.OptimizedModule)
    return is_optimized or module._compiled_call_impl is not None


def uncompiled(module: nn.Module) -> AbstractContextManager[Any]:
    """Run compiled modules eagerly: torch's compiler does not support the map."""
    is_compiled = any(map(_is_compiled, module.modules()))
    return torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()


@contextmanager
def _as_written(
    around: AbstractContextManager[Any], is_compiled: bool, made: list[tuple[nn.Module, str]]
) -> Iterator[None]:
    """Run compiled modules eagerly. Afterwards, restore the attributes that torch sets in every
    pass: weights under ``torch.nn.utils.prune``, lists of weights of recurrent layers.
    """
    before = [(module, name, vars(module).get(name)) for module, name in made]
    eager = torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
    with around, eager:
        yield
    for module, name, value in before:
        vars(module)[name] = value


def _followed_in(*given: Any) -> list[Followed]:
    return [t for t in tensors_in(given) if isinstance(t, Followed)]


def _scalar(loss: Any) -> Tensor:
    with torch._C.DisableTorchFunction():  # attributes are slow to read through a map
        is_one = isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point()
    if is_one:
        return loss.reshape(())
    what = f"{loss.dtype} {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise LossError(
        f"the loss of one record must be a scalar floating-point tensor, got {what}: sum its"
        " entries, and compute it from the output without argmax or comparisons",
        code="loss-vector",
    )


def undivided(output: Tensor, loss_reduction: str) -> Tensor:
    """The output; in the backward pass each row gets the gradient of its record alone, because the
    division by the number of records is undone.
    """
    if loss_reduction == "sum" or not output.requires_grad:
        return output
    n = len(output)
    row = output.view_as(output)
    row.register_hook(lambda gradient: gradient * n)
    return row
