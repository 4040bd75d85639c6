"""Is a model, run for each record alone, what it is on whole batches?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..clipping.bookkeeping import UsedElsewhere
from ..clipping.nested import Nested, tensors_in
from ..clipping.record_map import CannotBeMapped, KeptTensors, in_plain_words
from .findings import MayFail, affordable, failing_as
from .forward_runs import ALONE, are_finite, same_outputs
from .independence import CANNOT_BE_RUN, NOT_FINITE, check_independence, require_unchanged
from .made_up_records import output_of, repeated
from .model_state import ModelAsChecked
from .precision import FLOAT32
from .seeded_draws import FIRST_DIMENSION, SeededDraws
from .tried_model import TriedModel

_OTHER_KINDS = ("outliers", "plain", "short")


class Unrecorded(Exception):
    """Parameters are used elsewhere than in the forward pass of their own layer."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(", ".join(names))
        self.names = names


def check_map(tried: TriedModel) -> ModelAsChecked:
    """Raise where records mapped one by one give other outputs than a batch of them.

    Returns:
        The model's state after its first passes, which may have filled caches.
    """
    module, source, inputs = tried.module, tried.source, tried.inputs
    as_checked: ModelAsChecked | None = None
    before = {name: t.detach().clone() for name, t in tried.tensors().items()}
    # made-up records of any size, whose outputs are small where large numbers cancel
    rounding = tried.rounding if tried.rounding == FLOAT32 else 4 * tried.rounding
    cannot_be_run = CANNOT_BE_RUN.format([list(t.shape) for t in tensors_in(inputs)])
    trials = [(True, rows, repeated(inputs, rows)) for rows in (1, *tried.sizes)]
    for seed, kind in enumerate(_OTHER_KINDS):
        trials.append((False, tried.middle, tried.neighbours(tried.middle, kind, seed)[0]))
    for is_given, rows, batch in affordable(trials, 2):
        axes = FIRST_DIMENSION if rows > 1 else ()
        running = failing_as(cannot_be_run) if is_given else MayFail()
        batched = None
        with running, source.paused(), torch.no_grad(), SeededDraws(0, axes, are_alike=True):
            batched = Nested(output_of(module, batch)).tensors
        if batched is None:
            continue
        if as_checked is None:
            require_unchanged(module, before)
        draws = SeededDraws(0, axes, are_alike=True)
        try:
            with _blamed(module), draws:
                mapped = Nested(output_of(module, batch)).tensors
            if sums := [t.float().sum() for t in mapped if t.requires_grad]:
                torch.stack(sums).sum().backward()
            if unrecorded := [name for name, p in module.named_parameters() if p.grad is not None]:
                raise Unrecorded(unrecorded)
        finally:
            tried.discard()
        with _blamed(module):
            source.require_nothing_kept()
        if as_checked is None:
            require_unchanged(module, before)
            as_checked = ModelAsChecked(module, source.passing_attributes, watch_passes=False)
        # a loss, of which the batched one may be another mean
        has_losses = any(t.dim() == 0 for t in mapped)
        mapped = [t.detach() for t in mapped if t.dim() > 0]
        batched = [t for t in batched if t.dim() > 0]
        if is_given and not are_finite(batched):
            raise ValueError(NOT_FINITE)
        if same_outputs(mapped, batched, rounding=rounding):
            continue
        if not has_losses:
            check_independence(tried)
        # its draws come in another order; one record alone was the same
        if rows > 1 and draws.is_random:
            break
        raise ValueError(
            f"the forward pass of {type(module).__name__!r} gives other outputs where every record"
            f" runs alone than on a batch of {rows}: it mixes records, or depends on their number."
            f" {ALONE}"
        )
    require_unchanged(module, before)
    assert as_checked is not None
    return as_checked


@contextmanager
def _blamed(module: nn.Module) -> Iterator[None]:
    """An error inside is a reason why the model cannot be mapped, with the innermost module
    in which it came up.
    """
    running: list[str] = []

    def leave(*_: Any) -> None:
        running.pop()

    handles = []
    for name, layer in module.named_modules():
        handles.append(layer.register_forward_pre_hook(lambda *_, name=name: running.append(name)))
        handles.append(layer.register_forward_hook(leave))
    try:
        yield
    except KeptTensors as error:
        raise ValueError(str(error)) from None  # the tensors it names are data
    except UsedElsewhere as error:
        own: dict[Tensor, str] = {p: name for name, p in module.named_parameters()}
        raise Unrecorded([own[p] for p in error.parameters]) from error
    except CannotBeMapped as error:
        raise CannotBeMapped(f"module {_name_of(module, running)!r}: {error}") from error
    except Exception as error:
        raise CannotBeMapped(
            f"module {_name_of(module, running)!r}: {in_plain_words(error)}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()


def _name_of(module: nn.Module, running: list[str]) -> str:
    return (running[-1] if running else "") or type(module).__name__
