"""Where a model's per-sample gradients come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from opacus.grad_sample import AbstractGradSampleModule
from torch import nn

from ..errors import ArgumentError, ArgumentTypeError, DPBayesError, ModelError
from ..per_sample.bookkeeping import BookkeepingGradientSource
from ..per_sample.gradient_source import GradientSource
from ..per_sample.hooks import HooksGradientSource
from ..per_sample.mapped_forward import Loss
from ..per_sample.model_check import check_layers, check_model
from ..per_sample.vmap import VmapGradientSource

_OPACUS_MODES = {
    "ghost": '"bookkeeping", the default',
    "functorch": '"vmap"',
    "ew": '"hooks"',
}


class Recording(NamedTuple):
    """How per-sample gradients are to be had: arguments of ``make_private``."""

    mode: str | None
    loss_reduction: str
    loss: Loss | None
    assume_independent: bool
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | None


def attached_source(
    module: nn.Module, recording: Recording, ways: Sequence[tuple[Any, ...]]
) -> GradientSource:
    """Where the model's per-sample gradients come from, attached to the model.

    Args:
        module: the model.
        recording: the user's choices.
        ways: arguments with the shapes of the model's own, in the ways in which it may take them.

    Raises:
        ModelError: it cannot be run for one record at a time.
    """
    mode, loss_reduction, loss, assume_independent, _ = recording
    if isinstance(module, AbstractGradSampleModule):
        raise ArgumentTypeError(
            f"the model is wrapped in Opacus' {type(module).__name__} already: pass the model"
            " inside, module=model._module",
            code="model-wrapped",
        )
    if mode not in (None, "bookkeeping", "vmap", "hooks"):
        ours = _OPACUS_MODES.get(str(mode))
        raise ArgumentError(
            f'grad_sample_mode must be "bookkeeping", "vmap" or "hooks", got {mode!r}'
            + (f", which is {ours} here" if ours else "")
        )
    if mode == "hooks" and not assume_independent:
        raise ModelError(
            'grad_sample_mode="hooks" runs model and loss on whole batches, where nothing keeps'
            " records apart: leave it out, or vouch for both by assume_independent_records=True",
            code="model-vouch",
        )
    if loss is not None and assume_independent:
        raise ArgumentError(
            "loss= keeps records apart by construction: leave out assume_independent_records"
        )
    if (before := GradientSource.attached_to(module)) is not None:
        before.remove()
    check_layers(module)
    if mode == "hooks":
        return HooksGradientSource(module, loss_reduction=loss_reduction)
    if mode == "vmap":
        return _checked(
            module,
            VmapGradientSource(
                module,
                loss_reduction=loss_reduction,
                assume_independent=assume_independent,
                loss=loss,
            ),
            ways,
        )
    source = BookkeepingGradientSource(
        module, loss_reduction=loss_reduction, assume_independent=assume_independent, loss=loss
    )
    try:
        return _checked(module, source, ways)
    except DPBayesError as error:
        if not assume_independent or mode is not None or error.code != "model-map":
            raise
        return HooksGradientSource(module, loss_reduction=loss_reduction)


def _checked(
    module: nn.Module,
    source: BookkeepingGradientSource | VmapGradientSource,
    ways: Sequence[tuple[Any, ...]],
) -> GradientSource:
    try:
        check_model(module, source, ways)
    except BaseException:
        source.remove()
        raise
    return source
