"""The forward pass of a private model as a map over records, in place of the model's own.

What arrives is taken apart into tensors, each with a row for every record; the model runs on one
row at a time as far as its program can tell (:mod:`torch_dpbayes.clipping.record_map`); what it
returns is put together again. A scalar that the model returns is one for each record, a loss: their
mean (or sum) is handed out, and the gradient that arrives there must be the constant 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..troubleshooting import explained
from .gradient_source import COPIED, ForwardPasses
from .nested import Nested, holds_plain_sequence, map_tensors
from .record_map import CannotBeMapped, KeptTensors
from .replaced_forward import ReplacedForward

Loss = Callable[..., Tensor]


# slices, parameters -> results
OfOne = Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]


class MapsRecords(Protocol):
    """A gradient source that runs a model over records."""

    loss_reduction: str
    passes: ForwardPasses
    is_copy: bool

    def over_records(
        self, of_one: OfOne, rows: Sequence[Tensor], direct: Sequence[Tensor], n: int
    ) -> Sequence[Tensor]:
        """``of_one`` of each of n records' slices of ``rows``; results have records in dimension 0.

        Args:
            of_one: the program of one record: its slices and the values of ``direct``, to its
                results.
            rows: tensors with records in dimension 0.
            direct: parameters that take part in the map.
            n: the number of records.
        """


class MappedForward(ReplacedForward):
    """Runs a model for each record alone while its gradients are recorded.

    Args:
        module: the model, whose ``forward`` is replaced.
        source: what records, and says when.
        direct: trainable parameters that take part in the map themselves, with a copy for each
            record.
        loss: ``(output, *targets) -> scalar`` of one record, for :meth:`private_loss`.
    """

    def __init__(
        self, module: nn.Module, source: MapsRecords, direct: Sequence[Tensor], loss: Loss | None
    ) -> None:
        self.source, self.loss = source, loss
        chosen = set(direct)
        self._direct = [
            (owner, name, p)
            for owner in module.modules()
            for name, p in owner._parameters.items()
            if p in chosen
        ]
        self._targets: tuple[Any, ...] | None = None
        super().__init__(module, list(dict.fromkeys(owner for owner, _, _ in self._direct)))
        if loss is not None:
            module.__dict__["private_loss"] = self.private_loss

    def remove(self) -> None:
        self.module.__dict__.pop("private_loss", None)
        super().remove()

    @torch.compiler.disable
    @explained
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.source.passes.is_open:
            return self.original(*args, **kwargs)
        targets, self._targets = self._targets, None
        if self.loss is not None and targets is None and self.source.passes.watches_loss:
            raise RuntimeError(
                "this model was made private with loss=: train with net.private_loss(x, y), which"
                " computes it for each record alone"
            )
        if targets is not None and self.source.passes.has_stand_in:
            # the pass replaced an empty batch by one made-up record, which needs a target
            targets = map_tensors(targets, lambda t: t.new_zeros(1, *t.shape[1:]) if t.dim() else t)
        try:
            return self._mapped(args, kwargs, targets)
        except Exception as error:
            error.add_note(_NOTE)
            raise

    def private_loss(self, *batch: Any, **inputs: Any) -> Tensor:
        """The loss of a batch, computed for each record alone: ``net.private_loss(x,
        y).backward()``.

        Args:
            batch: the model's positional arguments, and the target as the last one.
            inputs: the model's named arguments.
        """
        self._targets = batch[-1:]
        try:
            output: Tensor = self.module(*batch[:-1], **inputs)
            if self._targets is not None:  # in eval mode, or without gradients: nothing was mapped
                assert self.loss is not None
                output = self.loss(output, *self._targets)
        finally:
            self._targets = None
        return output

    def _mapped(self, args: Any, kwargs: Any, targets: tuple[Any, ...] | None) -> Any:
        for module in self.module.modules():
            if module._backward_hooks or module._backward_pre_hooks:
                raise CannotBeMapped(_BACKWARD_HOOK.format(type(module).__name__))
        is_plain = len(args) == 1 and not kwargs and targets is None
        given = Nested(args[0] if is_plain else (args, kwargs, targets))
        if given.strangers:
            raise CannotBeMapped(
                f"an argument of type {type(given.strangers[0]).__name__} may hold several records:"
                " pass tensors"
            )
        if not is_plain and any(
            map(holds_plain_sequence, (*args, *kwargs.values(), *(targets or ())))
        ):
            raise CannotBeMapped(
                "an argument holds several numbers or texts, which every record would see: pass a"
                " tensor with a row for each"
            )
        n = _number_of_records(given.tensors)
        is_mapped = [t.dim() > 0 for t in given.tensors]
        rows = [t.unsqueeze(1) for t in given.tensors if t.dim() > 0]
        direct = self._trainable() if self._direct else []
        result: Nested | None = None

        def of_one(slices: Sequence[Tensor], parameters: Sequence[Tensor]) -> Sequence[Tensor]:
            nonlocal result
            mapped = iter(slices)
            one = given.rebuilt(
                [
                    next(mapped) if is_row else t
                    for is_row, t in zip(is_mapped, given.tensors, strict=True)
                ]
            )
            one_args, one_kwargs, one_targets = ((one,), {}, None) if is_plain else one
            output = self.run_with(dict(zip(direct, parameters, strict=True)), one_args, one_kwargs)
            if one_targets is not None:
                assert self.loss is not None
                output = _scalar(self.loss(output, *one_targets))
            result = Nested(output, stands_in=_Withheld)
            if not result.tensors:
                raise CannotBeMapped(
                    f"its output is of type {type(output).__name__}, in which no tensor is found:"
                    " return tensors (for a distribution its parameters), and make of them what"
                    " you need outside"
                )
            for t in result.tensors:
                if t.dim() > 0 and t.shape[0] != 1:
                    raise CannotBeMapped(
                        f"its output has {t.shape[0]} rows for one record: return one row per"
                        " record in dimension 0"
                    )
            tensors, result.tensors, result.strangers = result.tensors, [], []
            return tensors

        try:
            found = self.source.over_records(of_one, rows, direct, n)
        except KeptTensors as kept:
            raise KeptTensors(kept.tensors, self.where(kept.tensors)) from None
        assert result is not None
        is_mean = self.source.loss_reduction == "mean"
        count = 0 if self.source.passes.has_stand_in else n
        return result.rebuilt(
            [_Reduced.apply(t, count, is_mean) if t.dim() == 1 else t.squeeze(1) for t in found]
        )

    def _trainable(self) -> list[Tensor]:
        """The parameters that take part in the map, each once."""
        if self.source.is_copy or any(
            owner._parameters.get(name) is not p for owner, name, p in self._direct
        ):
            raise RuntimeError(COPIED)
        return list(dict.fromkeys(p for _, _, p in self._direct if p.requires_grad))

    def where(self, kept: Sequence[Tensor]) -> str:
        """What to say of tensors that outlive their map."""
        places = (
            f"as {attribute!r} of module {name or type(self.module).__name__!r}"
            for name, layer in self.module.named_modules()
            for attribute, value in vars(layer).items()
            if any(t is value for t in kept)
        )
        place = next(places, "in a container, a closure or a global variable")
        return (
            f"the forward pass keeps a tensor made of the records ({place}), which the next batch"
            " would see: return it instead"
        )


class _Withheld:
    """In the place of what a model returned beside its tensors, which may hold what it made of
    one record.
    """

    def __init__(self, kind: str) -> None:
        self.__dict__["_kind"] = kind

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(
            f"the model returned a {self._kind}, which cannot leave the map over records: return"
            " tensors (for a distribution its parameters), and make of them what you need outside"
        )


_NOTE = (
    "While gradients are recorded, this model runs for one record at a time (records are"
    ' independent by construction). make_private(..., grad_sample_mode="hooks") runs it on whole'
    " batches."
)
_BACKWARD_HOOK = (
    "{} has a backward hook (register_full_backward_hook), which would not run where records are"
    " kept apart: remove it"
)


def _number_of_records(tensors: Sequence[Tensor]) -> int:
    sizes = {len(t) for t in tensors if t.dim() > 0}
    if len(sizes) != 1:
        shapes = [list(t.shape) for t in tensors]
        raise CannotBeMapped(
            f"its arguments have shapes {shapes}: each tensor needs a row for every record; keep"
            " constants in buffers"
        )
    return sizes.pop()


def _scalar(loss: Tensor) -> Tensor:
    if loss.numel() != 1:
        raise ValueError(
            f"the loss of one record must be a scalar, got shape {list(loss.shape)}: add its"
            " entries up"
        )
    return loss.reshape(())


class _Reduced(torch.autograd.Function):
    """The losses of ``count`` records added up, or their mean, without that of a made-up one; every
    record's own gets the gradient 1, and no other may come back.
    """

    @staticmethod
    def forward(ctx: Any, losses: Tensor, count: int, is_mean: bool) -> Tensor:
        ctx.like = losses
        total = losses[:count].sum()
        return total / max(count, 1) if is_mean else total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        if not bool((gradients[0] == 1).all()):
            raise RuntimeError(
                "a scalar that the model returned came back with another gradient than 1: call"
                " backward() on it as it is, and weigh its terms in forward."
            )
        return torch.ones_like(ctx.like), None, None
