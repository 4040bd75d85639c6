"""Does a model treat every record by itself? Found out on made-up records; no data is touched.

A clip bound limits what one record does to *its own* gradient. It says nothing where another
record's gradient depends on it as well, or where per-record gradients miss a part of the real one.
Both are tested here by running the model, not by its list of layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..clipping.gradient_source import GradientSource
from ..clipping.nested import Nested
from .decision_checks import check_decisions
from .findings import MayFail, failing_as
from .gradient_checks import check_gradients, check_gradients_unmoved
from .gradient_hooks import require_no_hooks
from .independence import check_independence
from .made_up_records import map_rows, output_of, require_different
from .mapped_model import check_map
from .model_state import KEPT, ModelAsChecked
from .precision import FLOAT32, CoarsestType, WithoutAutocast
from .seeded_draws import SeededDraws, generators_left_as_found
from .tried_model import TriedModel

_ATTEMPTS = 20  # parameters at which the gradients of a model with dead outputs are looked for
_TRIES_IN_FLOAT32 = 3  # one resnet-18 in some thousands fails the first
_NO_GRADIENT = (
    "no parameter has a gradient on made-up records, so that per-record gradients cannot be"
    " checked: the output is saturated or cut off for them. Pass example_inputs=, made-up records"
    " to which the model responds."
)


def check_model(
    module: nn.Module, source: GradientSource, inputs: tuple[Any, ...], batch_size: float = 0.0
) -> None:
    """Raise unless per-record gradients of ``module`` are what clipping takes them for.

    Args:
        module: the model, with ``source``'s hooks attached. It is left as it was found, buffers and
            ``p.grad`` included.
        source: its gradient source.
        inputs: positional arguments of ``module`` for two records, records in dimension 0. Larger
            batches repeat them, or are made up from their shapes, with outliers, missing values,
            zeros at the end, ties, codes and every size of integers that the model takes.
        batch_size: that the data loader gives on average, in records.

    Raises:
        ValueError: a record's output, or what a layer makes of it, depends on another record, on
            their number or on its place among them; a decision that the model takes from a batch
            changes what it does to several records; per-record gradients are not the gradients of
            the records; a buffer changed; or the forward pass cannot take an empty batch. The
            message names the module, or the line, and the remedy.

    **Privacy.** A test, not a proof. Each decision that Python takes from a tensor of the batch is
    forced both ways, with decisions that this brings about up to three deep and 48 lines of code
    in all; numbers that leave a tensor are exchanged for others; the constants in the code that
    runs are tried as values of records and as batch sizes up to 4096. A way of mixing records that
    none of these, nor 64 seeds, bring about goes unseen: through NumPy, by the shape of
    ``x[mask]`` or ``nonzero()``, or by two decisions together of which neither is enough.
    """
    require_no_hooks(module)
    with _tried(module, source, inputs) as tried:

        def check() -> None:
            as_checked = check_independence(tried)
            _check_some_gradients(tried, is_mapped=False)
            check_gradients_unmoved(tried)
            check_decisions(tried, batch_size)
            _check_empty_batch(tried)
            _require_nothing_kept(as_checked)

        _allowing_for_rounding(check, tried)


def check_mapped_model(module: nn.Module, source: GradientSource, inputs: tuple[Any, ...]) -> None:
    """Raise unless ``module``, run for each record alone, is the model that it is on whole batches.

    Privacy does not rest on this: what runs for one record alone cannot see another. A model that
    comes out differently was meant to mix records, and would be trained as something else.

    Args:
        module: the model, whose forward pass ``source`` maps over records. It is left as it was
            found.
        source: its gradient source.
        inputs: as in :func:`check_model`.

    Raises:
        CannotBeMapped: the program cannot be run for one record; the message names the module.
        Unrecorded: parameters are used outside their layers, and must take part in the map
            themselves.
        ValueError: records are mixed, gradients are not those of the records, a tensor is kept
            between passes, or an empty batch fails.
    """
    with _tried(module, source, inputs) as tried:

        def check() -> None:
            as_checked = check_map(tried)
            _check_some_gradients(tried, is_mapped=True)
            _check_empty_batch(tried)
            _require_nothing_kept(as_checked)

        _allowing_for_rounding(check, tried, is_mapped=True)


def first_that_runs(module: nn.Module, ways: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """The first of several ``ways`` to pass made-up records with which the model runs; the first
    of all if it runs with none. The model is left as it was found.
    """
    buffers = {name: b.detach().clone() for name, b in module.named_buffers()}
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
    for inputs in ways if len(ways) > 1 else ():
        try:
            with torch.no_grad(), generators_left_as_found(list(devices)):
                output_of(module, inputs)
            return inputs
        except Exception:  # of the model: it takes its inputs in another way
            continue
        finally:
            with torch.no_grad():
                for name, b in module.named_buffers():
                    b.copy_(buffers[name])
    return ways[0]


def _allowing_for_rounding(
    check: Callable[[], None], tried: TriedModel, *, is_mapped: bool = False
) -> None:
    """Run a check. Where a model fails it that computes in half precision, which other kernels
    round otherwise, it runs again with more room between batches of several sizes; none between
    those of one size. So that nothing hides there, what is not mapped has to pass the check
    without that room in float32 first, where the same program can be had in it.
    """
    if all(p.dtype not in (torch.float16, torch.bfloat16) for p in tried.parameters):
        try:
            check()
            return
        except ValueError:
            if _coarsest_type(tried) in (None, FLOAT32):
                raise
        with nullcontext() if is_mapped else WithoutAutocast():
            if _coarsest_type(tried) == FLOAT32:
                check()
    tried.rounding = _coarsest_type(tried) or FLOAT32
    check()


def _coarsest_type(tried: TriedModel) -> float | None:
    """ε of the coarsest type in a forward pass; None if the model cannot be run."""
    with MayFail() as running, torch.no_grad(), tried.source.paused(), SeededDraws():
        with CoarsestType() as seen:
            output_of(tried.module, tried.inputs)
    return None if running.failed else seen.eps


def _check_some_gradients(tried: TriedModel, *, is_mapped: bool) -> None:
    # alone, a record may be rounded so that a ReLU is set otherwise; in half precision often
    is_rounded = is_mapped and tried.rounding > FLOAT32
    tries = (_ATTEMPTS - 1 if is_rounded else _TRIES_IN_FLOAT32) if is_mapped else 1
    for seed in range(1, _ATTEMPTS):
        try:
            if check_gradients(tried, is_mapped=is_mapped):
                return
        except ValueError:
            tries -= 1
            if tries == 0:
                raise
            if not is_rounded:
                _nudge(tried.module, seed)
                continue
        _vary(tried.module, seed)
    raise ValueError(_NO_GRADIENT)


def _require_nothing_kept(as_checked: ModelAsChecked) -> None:
    if (what := as_checked.changed()) is not None:
        raise ValueError(KEPT.format(what))


def _check_empty_batch(tried: TriedModel) -> None:
    empty = map_rows(lambda t: t[:0], tried.inputs)

    def run() -> None:
        try:
            outputs = [t for t in Nested(output_of(tried.module, empty)).tensors if t.requires_grad]
            torch.stack([t.float().sum() for t in outputs]).sum().backward()
            if any(tried.source.per_record_gradients(p) is None for p in tried.parameters):
                raise ValueError(
                    "it leaves parameters without gradients; no shortcut for empty inputs may leave"
                    " the forward pass early"
                )
            if len(tried.source.norms(tried.named)) > 0:
                raise ValueError("it comes out as a record")
        finally:
            tried.discard()

    try:
        run()
    except Exception:
        tried.source.use_stand_in()
        with failing_as(
            "the model cannot take an empty batch, which Poisson sampling delivers now and"
            " then: {}. Write x.flatten(1) instead of x.view(len(x), -1), and replace layers that"
            " fail on zero rows."
        ):
            run()


@contextmanager
def _tried(
    module: nn.Module, source: GradientSource, inputs: tuple[Any, ...]
) -> Iterator[TriedModel]:
    """The model with other parameters; afterwards it, and all generators, are as they were."""
    require_different(inputs)
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
    tensors = [*module.named_buffers(), *module.named_parameters()]
    before = _copies([t for _, t in tensors])
    grads = [(p, p.grad) for p in module.parameters()]
    try:
        with generators_left_as_found(list(devices)):
            with torch.no_grad():
                for p, _ in grads:
                    p.grad = None
            _vary(module, 0)  # layers that start at zero would hide what lies behind them
            yield TriedModel(module, source, inputs)
    finally:
        for p, grad in grads:
            p.grad = grad
        with torch.no_grad():
            for (_, t), copy in zip(tensors, before, strict=True):
                t.copy_(copy)


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in one piece of memory for each type and device: many small ones would be left over
    between what the check needs for a short time, which would then not fit there again.
    """
    copies: list[Tensor] = [torch.empty(0)] * len(tensors)
    alike: dict[Any, list[int]] = {}
    for place, t in enumerate(tensors):
        if t.layout is torch.strided and not t.is_quantized:
            alike.setdefault((t.dtype, t.device), []).append(place)
        else:
            copies[place] = t.detach().clone()
    for places in alike.values():
        whole = torch.cat([tensors[k].detach().reshape(-1) for k in places])
        for k, part in zip(places, whole.split([tensors[k].numel() for k in places]), strict=True):
            copies[k] = part.view(tensors[k].shape)
    return copies


def _vary(module: nn.Module, seed: int) -> None:
    """Move the parameters; with a seed other than 0, also change the signs of half of the
    tensors, which revives a dead output every other time.
    """
    generator = torch.Generator().manual_seed(17 + seed)
    with torch.no_grad():
        for p in module.parameters():
            if p.is_floating_point():
                scale = 0.8 / math.sqrt(p[0].numel()) if p.dim() > 1 else 0.2
                sign = -1 if seed and bool(torch.rand((), generator=generator) < 0.5) else 1
                change = torch.empty(p.shape).uniform_(-scale, scale, generator=generator)
                p.mul_(sign).add_(change.to(p))


def _nudge(module: nn.Module, seed: int) -> None:
    """Change each parameter by up to a hundredth of itself: enough to round otherwise, and what
    depends on its sign stays as it is.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            if p.is_floating_point():
                change = torch.empty(p.shape).uniform_(0.99, 1.01, generator=generator)
                p.mul_(change.to(p))
