"""Per-sample gradients of whole batches, which Opacus' hooks store in ``p.grad_sample``.

Nothing here keeps records apart: the user vouches that model and loss do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from opacus.grad_sample import GradSampleHooks
from opacus.layers.dp_rnn import RNNLinear
from torch import Tensor, nn

from ..errors import ModelError, StepError
from .contributions import Contribution, PerRecord
from .gradient_source import COPIED, GradientSource, require_first_backward
from .nested import map_tensors, tensors_in

_IN_PLACE = (
    "Opacus' hooks forbid changes of a layer's output in place: write x = x / 2 instead of x /= 2"
)


class HooksGradientSource(GradientSource):
    """Per-sample gradients that Opacus' ``GradSampleHooks`` store in ``p.grad_sample``.

    Args: as those of :class:`GradientSource`, and
        is_vouched: the user vouches that records are independent; otherwise nothing is released.

    **Privacy.** ‖Σ clip(g_i)‖ changes by at most C when a record is added or removed, provided that
    record i's gradient depends on record i alone. The user vouches for this.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        *,
        loss_reduction: str = "mean",
        is_vouched: bool = True,
    ) -> None:
        super().__init__(module, loss_reduction, assume_independent=True)
        self._is_vouched = is_vouched
        self._hooks: _Hooks | None = None
        if module is not None:
            try:
                self._hooks = _Hooks(module, self)
            except NotImplementedError as error:
                module.__dict__.pop("autograd_grad_sample_hooks", None)
                self.remove()
                raise ModelError(
                    f"Opacus has no per-sample gradients for a layer of this model: {error}."
                    " Replace the layer.",
                    code="model-no-sampler",
                ) from error

    def recorded(self, named_parameters: Sequence[tuple[str, Tensor]]) -> Sequence[Contribution]:
        records = {p: g for n, p in named_parameters if (g := _records_of(n, p)) is not None}
        if not self._is_vouched:
            raise StepError(
                "these per-sample gradients (p.grad_sample) were not recorded by make_private: use"
                " PrivacyEngine().make_private(...), or vouch that each depends on one record alone"
                " by assume_independent_records=True.",
                code="step-vouch",
            )
        if len({len(g) for g in records.values()}) > 1:
            raise StepError(
                "parameters have gradients of different numbers of records: give every layer all"
                " records in dimension 0 (multiply experts by the mask), and fold neither time nor"
                " patches into it.",
                code="step-disagree",
            )
        return [PerRecord(records)]

    def zero_grad(self, parameters: Iterable[Tensor]) -> None:
        for p in parameters:
            if hasattr(p, "grad_sample"):
                p.grad_sample = None

    def discard(self, parameters: Iterable[Tensor]) -> None:
        self.zero_grad(parameters)
        self.passes = self.spare = 0
        # other data of the caller's hooks is on modules that are not known here
        if self._hooks is not None:
            self._hooks.forget_pass()

    def remove(self) -> None:
        super().remove()
        if self._hooks is not None:
            self._hooks.remove()


class _Hooks(GradSampleHooks):
    """Opacus' hooks. They also count forward passes, accept empty batches, and ignore padding."""

    def __init__(self, module: nn.Module, source: HooksGradientSource) -> None:
        super().__init__(module, loss_reduction=source.loss_reduction, strict=False)
        self._source = source
        self._is_open = False  # whether a recorded forward pass is running
        self._of_passes = [
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.register_forward_hook(self._after, always_call=True),
        ]

    def remove(self) -> None:
        for handle in self._of_passes:
            handle.remove()
        self.cleanup()

    def forget_pass(self) -> None:
        for module in self._module.modules():
            for left_behind in ("activations", "max_batch_len"):
                if hasattr(module, left_behind):
                    delattr(module, left_behind)
        for p in self._module.parameters():
            if hasattr(p, "_forward_counter"):
                p._forward_counter = 0
            if hasattr(p, "_current_grad_sample"):
                del p._current_grad_sample

    @torch.compiler.disable
    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._is_open = self.hooks_enabled and module.training and torch.is_grad_enabled()
        if not self._is_open:
            return None
        given = list(tensors_in((args, kwargs)))
        self._source.begin_pass(given)
        if not given or given[0].dim() == 0 or len(given[0]) > 0:
            return None
        self._source.spare = 1  # many layers fail on 0 records: pass one of ones
        return map_tensors(
            (args, kwargs),
            lambda t: t.new_ones(1, *t.shape[1:]) if t.dim() > 0 and len(t) == 0 else t,
        )

    @torch.compiler.disable
    def _after(self, _module: nn.Module, _input: Any, output: Any) -> Any:
        if not self._is_open:
            return None
        self._is_open = False
        if output is None and self._source.passes == 1:  # the forward pass failed
            self._source.discard(())
            if "BackwardHookFunction" in str(error := sys.exception()):
                assert error is not None
                error.add_note(_IN_PLACE)
        elif self._source.spare:
            return map_tensors(output, lambda t: t[:0] if t.dim() > 0 else t)
        return None

    def capture_activations_hook(
        self, module: nn.Module, forward_input: list[Tensor], _forward_output: Tensor
    ) -> None:
        trained = [p for p in module.parameters(recurse=False) if p.requires_grad]
        is_recorded = module.training and torch.is_grad_enabled()
        if is_recorded and not all(hasattr(p, "_forward_counter") for p in trained):
            raise StepError(COPIED, code="model-copied")
        if isinstance(module, RNNLinear):
            rows = len(forward_input[0])
            if rows != getattr(module, "max_batch_len", rows):
                raise StepError(
                    "a recurrent layer got a packed sequence, which sorts records by length: pad"
                    " the sequences and pass a tensor.",
                    code="model-packed",
                )
        super().capture_activations_hook(module, forward_input, _forward_output)

    def capture_backprops_hook(self, module: Any, *given: Any, **options: Any) -> None:
        if self.hooks_enabled:
            require_first_backward(not getattr(module, "activations", None))
        try:
            super().capture_backprops_hook(module, *given, **options)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ModelError(
                f"Opacus computes no per-sample gradients of this {type(module).__name__}"
                f" ({type(error).__name__}): leave out grad_sample_mode, or replace the layer",
                code="model-no-sampler",
            ) from error
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            # in torch the padding row has no gradient, but in Opacus it has
            records: Any = getattr(module.weight, "grad_sample", None)
            if records is not None:
                (records[-1] if isinstance(records, list) else records)[:, module.padding_idx] = 0.0


def _records_of(name: str, parameter: Tensor) -> Tensor | None:
    """The parameter's per-record gradients, or an error that says what is wrong with them."""
    if not hasattr(parameter, "grad_sample"):
        raise StepError(
            f"parameter {name!r} has no per-record gradients: its module has no hooks, and p.grad"
            " is not clipped. Build model, optimizer and loader by"
            " torch_dpbayes.PrivacyEngine().make_private(...).",
            code="step-grad-sample",
        )
    records: Tensor | list[Tensor] | None = parameter.grad_sample
    if isinstance(records, list):
        if len(records) > 1:
            raise StepError(
                f"{len(records)} backward passes were made since the last step: call step() after"
                " each, and use Opacus' BatchMemoryManager for large batches.",
                code="step-grad-sample",
            )
        records = records[0] if records else None
    return None if records is None else records.detach()
