"""Where a model's per-record gradients come from."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from threading import Timer
from typing import Any, NamedTuple

from opacus.grad_sample import AbstractGradSampleModule
from torch import nn

from ..checks import known_models
from ..checks.layer_kinds import check_layers
from ..checks.mapped_model import Unrecorded
from ..checks.model_checks import check_mapped_model, check_model
from ..checks.model_state import ModelAsChecked, global_hooks
from ..clipping.bookkeeping import BookkeepingGradientSource
from ..clipping.gradient_source import GradientSource, HooksGradientSource
from ..clipping.isolated import IsolatedGradientSource
from ..clipping.mapped_forward import Loss
from ..clipping.record_map import CannotBeMapped

_SOON = 0.5  # seconds after which it is said what takes so long
_OPACUS_MODES = {
    "ghost": '"bookkeeping", the default',
    "functorch": '"isolated"',
    "ew": '"hooks"',
}

_log = logging.getLogger("torch_dpbayes")


class Recording(NamedTuple):
    """How per-record gradients are to be had: arguments of ``make_private``."""

    mode: str | None
    clipping_kernels: Mapping[str, str] | None
    loss_reduction: str
    loss: Loss | None
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | None


def checked_source(
    module: nn.Module, recording: Recording, inputs: tuple[Any, ...], batch_size: float
) -> GradientSource:
    """Where the model's per-record gradients come from: a map over records where its program
    can be one, else whole batches, tested.
    """
    mode, clipping_kernels, loss_reduction, loss, _ = recording
    if isinstance(module, AbstractGradSampleModule):
        raise TypeError(
            f"the model is wrapped in Opacus' {type(module).__name__} already: pass the model"
            " inside, module=model._module"
        )
    if mode not in (None, "bookkeeping", "isolated", "hooks"):
        ours = _OPACUS_MODES.get(str(mode))
        raise ValueError(
            f'grad_sample_mode must be "bookkeeping", "isolated" or "hooks", got {mode!r}'
            + (f", which is {ours} here" if ours else "")
        )
    if clipping_kernels and mode in ("isolated", "hooks"):
        raise ValueError('clipping_kernels are those of grad_sample_mode="bookkeeping"')

    if (before := GradientSource.attached_to(module)) is not None:
        before.remove()
    ModelAsChecked.remove_from(module)
    # a loss may be anything, and is not compared
    settings = (mode, loss_reduction, dict(clipping_kernels or {}), batch_size)
    key = None if loss is not None else known_models.key_of(module, inputs, settings)
    way: _Way | None = known_models.recall(key)
    if way is None:
        way = _checked_way(module, recording, inputs, batch_size)
        # nothing can make records meet where each runs alone, so that only such a way may outlive
        # what a key cannot see: the environment, other files, what is far away
        if key is not None and way.mode in ("isolated", "mapped"):
            known_models.remember(key, known_models.key_of(module, inputs, settings), way)
    if way.reason:
        _log.warning(
            "records are kept apart by a test on made-up records only, for the model cannot be run"
            " for one record at a time: %s",
            way.reason,
        )
    return way.source(module, recording)


class _Way(NamedTuple):
    """How per-record gradients of a model are had, which the check finds out.

    Attributes:
        mode: ``"isolated"``, ``"mapped"``, ``"whole batches"`` or ``"hooks"``.
        unrecorded: names of parameters that take part in the map.
        reason: why it is not a map.
        uses_stand_in: the model cannot take an empty batch.
    """

    mode: str
    unrecorded: tuple[str, ...] = ()
    reason: str = ""
    uses_stand_in: bool = False

    def source(self, module: nn.Module, recording: Recording) -> GradientSource:
        """Attached to ``module``."""
        _, kernels, loss_reduction, loss, _ = recording
        source: GradientSource
        if self.mode == "isolated":
            source = IsolatedGradientSource(module, loss_reduction=loss_reduction, loss=loss)
        elif self.mode == "hooks":
            source = HooksGradientSource(module, loss_reduction=loss_reduction)
        else:
            source = BookkeepingGradientSource(
                module,
                loss_reduction=loss_reduction,
                clipping_kernels=kernels,
                is_mapped=self.mode == "mapped",
                unrecorded=self.unrecorded,
                loss=loss,
            )
        if self.reason:
            source.independence += f": {self.reason}"
        # torch cannot map F.cross_entropy(out, y) * 2.0 over no records: it looks for the type of a
        # scalar in the first of them
        if self.uses_stand_in or loss is not None:
            source.use_stand_in()
        return source


def _checked_way(
    module: nn.Module, recording: Recording, inputs: tuple[Any, ...], batch_size: float
) -> _Way:
    """The first way in which the model stands its check; the source it had there is taken off."""
    mode, loss = recording.mode, recording.loss

    def checked(
        way: _Way, check: Callable[[nn.Module, GradientSource, tuple[Any, ...]], None]
    ) -> _Way:
        source = way.source(module, recording)
        try:
            with _said_if_slow(module):
                check(module, source, inputs)
        finally:
            source.remove()
        assert source.passes is not None
        return way._replace(uses_stand_in=source.passes.uses_stand_in)

    check_whole_batches = partial(check_model, batch_size=batch_size)
    reason = _hooks_on(module)
    if mode == "isolated":
        if reason:
            raise ValueError(reason)
        check_layers(module, is_mapped=True)
        try:
            return checked(_Way("isolated"), check_mapped_model)
        except CannotBeMapped as error:
            reason = str(error).partition(". ")[0]  # torch goes on about its own
            raise ValueError(
                f'grad_sample_mode="isolated": {reason}. Leave it out for the default mode'
            ) from error
    if mode != "hooks" and not reason:
        check_layers(module, is_mapped=True)
        unrecorded: list[str] = []
        while True:
            try:
                return checked(_Way("mapped", tuple(unrecorded)), check_mapped_model)
            except Unrecorded as found:
                if not set(found.names) - set(unrecorded):
                    raise ValueError(
                        f"parameters {found.names} are used outside the model's forward pass"
                    ) from found
                unrecorded += found.names
            except CannotBeMapped as error:
                reason = str(error)
                break
    if loss is not None:
        raise ValueError(
            "loss= runs for each record alone, which this model cannot:"
            f" {reason or 'hooks run on whole batches'}"
        )
    check_layers(module)
    if mode == "hooks":
        return checked(_Way("hooks"), check_whole_batches)
    return checked(_Way("whole batches", reason=reason), check_whole_batches)


@contextmanager
def _said_if_slow(module: nn.Module) -> Iterator[None]:
    """A line for whoever waits at a terminal or in a notebook."""

    def say() -> None:
        if sys.stderr.isatty():
            name = type(module).__name__
            print(f"checking {name} on made-up records, once before training", file=sys.stderr)

    timer = Timer(_SOON, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _hooks_on(module: nn.Module) -> str:
    """Why the model cannot be run for one record at a time: what surrounds its forward pass
    sees whole batches.
    """
    if (
        type(module).__call__ is not nn.Module.__call__
        or {"_call_impl", "_wrapped_call_impl"} & vars(module).keys()
    ):
        return (
            f"{type(module).__name__} has a __call__ of its own, which sees whole batches: write"
            " forward"
        )
    if any(global_hooks().values()):
        return (
            "hooks for all modules are registered (torch.nn.modules.module), which see whole"
            " batches: remove them"
        )
    if any(
        (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
    ):
        return "the model itself has hooks, which see whole batches: put them on a module inside it"
    return ""
