"""Does a model treat every record by itself? Found out on made-up records; no data is touched.

A clip bound limits what one record does to *its own* gradient. It says nothing where another
record's gradient depends on it as well, or where per-record gradients miss a part of the real one.
Both are tested here by running the model, not by its list of layers.
"""

from __future__ import annotations

import itertools
import math
import random
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy
import torch
from opacus.validators import ModuleValidator
from torch import Tensor, nn
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._python_dispatch import TorchDispatchMode

from ..clipping.bookkeeping import UsedElsewhere
from ..clipping.gradient_source import GradientSource, map_tensors, tensors_in
from ..clipping.record_map import CannotBeMapped, KeptTensors, Nested, in_plain_words
from .decision_checks import (
    Bounds,
    Constants,
    Decisions,
    Outcome,
    Place,
    bounds_after,
    numbers_near,
)
from .gradient_checks import (
    HOOKED,
    MAGNITUDES,
    HookWatch,
    MissingGradientsError,
    MixedRecordsError,
    Trial,
    check_clipped_sum,
    check_trial,
    require_no_hooks,
    rows_for,
)
from .model_state import KEPT, ModelAsChecked

_FIX = (
    "Replace it by a layer that treats each record by itself:"
    " opacus.validators.ModuleValidator.fix(model) turns BatchNorm into GroupNorm and untracks"
    " InstanceNorm."
)
_ALONE = (
    "Compute what is needed from each record alone, or from public data before training, and keep"
    " it constant. (For BatchNorm: opacus.validators.ModuleValidator.fix(model) turns it into"
    " GroupNorm.)"
)
_TIME_FIRST = (
    "It takes dimension 0, which is that of the records, for time: build it with batch_first=True,"
    " or transpose its input and output."
)
_ATTENTION = (
    "Take opacus.layers.DPMultiheadAttention, or write attention with nn.Linear layers for queries,"
    " keys and values and torch.nn.functional.scaled_dot_product_attention."
)


def made_up_inputs(batch: Any) -> tuple[Any, ...]:
    """Arguments for two made-up records, with the shapes and types of ``batch`` and none of its
    values.

    A tuple or list is taken as the model's inputs followed by the target; anything else as the one
    input.
    """
    inputs = (
        (batch[:-1] if len(batch) > 1 else batch) if isinstance(batch, (tuple, list)) else (batch,)
    )
    generator = torch.Generator().manual_seed(17)
    for _ in range(64):
        made = tuple(
            map_tensors(
                inputs,
                lambda t: _values_like(t, 2, 2, generator) if t.dim() > 0 else torch.ones_like(t),
            )
        )
        if not _are_equal_records(made):
            break
    return made


def check_layers(module: nn.Module, *, is_mapped: bool = False) -> None:
    """Raise where the kind of a layer, or eval mode, already rules out per-record gradients.

    Args:
        module: the model, before any hooks are attached.
        is_mapped: the model will run for each record alone, where torch's own attention is no
            obstacle.

    Raises:
        ValueError: with the layer's name and the remedy.
    """
    if not module.training:
        raise ValueError(
            "the model is in eval mode, in which no per-record gradients are recorded: call"
            " model.train() first"
        )
    for name, layer in module.named_modules():
        if any(type(hook) is WeightNorm for hook in layer._forward_pre_hooks.values()):
            raise ValueError(
                f"module {name!r} has torch's old weight_norm, whose weight is left over from the"
                " last forward pass: take torch.nn.utils.parametrizations.weight_norm, after"
                " torch.nn.utils.remove_weight_norm"
            )
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.max_norm is not None:
            raise ValueError(
                f"module {name!r} renormalises rows of its weight in the forward pass (max_norm),"
                " which tells without noise which ones the batch uses. Leave out max_norm."
            )
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.scale_grad_by_freq:
            raise ValueError(
                f"module {name!r} divides gradients by how often a token occurs in the batch"
                " (scale_grad_by_freq), which depends on the other records. Leave it out."
            )
        if is_mapped and isinstance(layer, nn.MultiheadAttention):
            continue
        validate = ModuleValidator.VALIDATORS.get(type(layer))
        errors = (
            validate(layer)
            if validate is not None and any(p.requires_grad for p in layer.parameters())
            else []
        )
        if errors:
            fix = _ATTENTION if isinstance(layer, nn.MultiheadAttention) else _FIX
            raise ValueError(
                f"module {name or type(module).__name__!r} cannot be trained privately: {errors[0]}"
                f" {fix}"
            )


def _require_different(inputs: tuple[Any, ...]) -> None:
    if _are_equal_records(inputs):
        raise ValueError(
            "example_inputs holds two equal records, on which mixing does not show: pass two that"
            " differ, made up and not from the data."
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
    _require_different(inputs)
    require_no_hooks(module)
    with (
        _left_as_found(module),
        torch.random.fork_rng(devices=_cuda_devices(module)),
        _other_generators_left_as_found(),
    ):
        as_checked, axes, is_aligned = _check_independence(module, source, inputs)
        for seed in range(1, _ATTEMPTS):
            if _check_gradients(module, source, inputs):
                break
            _vary(module, seed)
        else:
            raise ValueError(_NO_GRADIENT)
        _check_gradients_unmoved(module, source, inputs, axes, is_aligned)
        _check_decisions(module, source, inputs, axes, is_aligned, batch_size)
        _check_empty_batch(module, source, inputs)
        if (what := as_checked.changed()) is not None:
            raise ValueError(KEPT.format(what))


class Unrecorded(Exception):
    """Parameters are used elsewhere than in the forward pass of their own layer."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(", ".join(names))
        self.names = names


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
    _require_different(inputs)
    with (
        _left_as_found(module),
        torch.random.fork_rng(devices=_cuda_devices(module)),
        _other_generators_left_as_found(),
    ):
        as_checked = _check_map(module, source, inputs)
        for seed in range(1, _ATTEMPTS):
            if _check_mapped_gradients(module, source, inputs):
                break
            _vary(module, seed)
        else:
            raise ValueError(_NO_GRADIENT)
        _check_empty_batch(module, source, inputs)
        if (what := as_checked.changed()) is not None:
            raise ValueError(KEPT.format(what))


def _check_map(
    module: nn.Module, source: GradientSource, inputs: tuple[Any, ...]
) -> ModelAsChecked:
    """Returns the model's state after its first passes, which may have filled caches."""
    as_checked: ModelAsChecked | None = None
    parameters = [p for p in module.parameters() if p.requires_grad]
    before = {
        name: t.detach().clone()
        for name, t in [*module.named_buffers(), *module.named_parameters()]
    }
    middle = _sizes(inputs)[len(_sizes(inputs)) // 2]
    with source.paused():
        limits = _integer_limits(module, inputs)
    given = [_given(inputs, [i % 2 for i in range(rows)]) for rows in (1, *_sizes(inputs))]
    others = [
        _neighbours(inputs, middle, kind, limits, seed)[0] for seed, kind in enumerate(_OTHER_KINDS)
    ]
    start = time.thread_time()
    for place, batch in enumerate([*given, *others]):
        is_given, rows = place < len(given), len(next(_rows(batch)))
        if rows > 2 and time.thread_time() - start > _SECONDS:
            break
        axes = [0] * _MANY if rows > 1 else ()
        with source.paused(), torch.no_grad(), _SeededDraws(0, axes, are_alike=True):
            try:
                batched = Nested(module(*batch)).tensors
            except Exception as error:
                if not is_given:  # it may refuse such values
                    continue
                shapes = [list(t.shape) for t in tensors_in(inputs)]
                raise ValueError(_CANNOT_BE_RUN.format(shapes, error)) from error
        _require_unchanged(module, before)
        draws = _SeededDraws(0, axes, are_alike=True)
        try:
            with _blamed(module), draws:
                mapped = Nested(module(*batch)).tensors
            if sums := [t.float().sum() for t in mapped if t.requires_grad]:
                torch.stack(sums).sum().backward()
            if unrecorded := [name for name, p in module.named_parameters() if p.grad is not None]:
                raise Unrecorded(unrecorded)
        finally:
            source.discard(parameters)
            for p in parameters:
                p.grad = None
        with _blamed(module):
            source.require_nothing_kept()
        _require_unchanged(module, before)
        as_checked = as_checked or ModelAsChecked(
            module, source.passing_attributes, watch_passes=False
        )
        # a loss, of which the batched one may be another mean
        has_losses = any(t.dim() == 0 for t in mapped)
        mapped, batched = [t for t in mapped if t.dim() > 0], [t for t in batched if t.dim() > 0]
        if is_given and not all(
            bool(torch.isfinite(t).all()) for t in batched if t.is_floating_point()
        ):
            raise ValueError(_NOT_FINITE)
        mapped = [t.detach() for t in mapped]
        if _same_outputs(mapped, batched, torch.ones(rows, dtype=torch.bool), is_same_size=False):
            continue
        if not has_losses:
            _check_independence(module, source, inputs)
        # its draws come in another order; one record alone was the same
        if rows > 1 and draws.is_random:
            break
        raise ValueError(
            f"the forward pass of {type(module).__name__!r} gives other outputs where every record"
            f" runs alone than on a batch of {rows}: it mixes records, or depends on their number."
            f" {_ALONE}"
        )
    assert as_checked is not None
    return as_checked


def _check_mapped_gradients(
    module: nn.Module, source: GradientSource, inputs: tuple[Any, ...]
) -> bool:
    """Raise unless recorded gradients are those of each record by itself. Returns whether
    there was any to compare.
    """
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    parameters = [p for _, p in named]
    generator, weights = torch.Generator().manual_seed(1), dict[int, Tensor]()

    def loss_of(arguments: tuple[Any, ...]) -> Tensor:
        outputs = [t for t in Nested(module(*arguments)).tensors if t.is_floating_point()]
        rows = [t.float().reshape(len(t), -1) for t in outputs if t.dim() > 0]
        total = torch.zeros(len(rows[0]) if rows else 1, device=parameters[0].device)
        for k, t in enumerate(rows):
            if k not in weights:
                weights[k] = torch.randn(t.shape[1], generator=generator).to(t.device)
            total = total + t @ weights[k]
        total = total.sum() if source.loss_reduction == "sum" else total.mean()
        return total + sum(t.float() for t in outputs if t.dim() == 0)

    def draws() -> _SeededDraws:
        return _SeededDraws(0, [0] * _MANY, are_alike=True)

    with draws():
        loss = loss_of(inputs)
    if not loss.requires_grad:
        raise ValueError(
            "the model's output has no gradient: return a tensor of floating-point numbers with a"
            " row per record, or a loss, computed from trainable parameters"
        )
    loss.backward()
    recorded = []
    for p in parameters:
        with draws():  # a source may run the records again
            recorded.append(source.per_record_gradients(p))
    truth: list[list[Tensor]] = []
    is_used = [False] * len(parameters)
    for k in range(2):
        with source.paused(), _SeededDraws(0, are_alike=True):
            loss = loss_of(_given(inputs, [k]))
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        is_used = [used or g is not None for used, g in zip(is_used, found, strict=True)]
        truth.append(
            [
                torch.zeros_like(p) if g is None else g.to_dense()
                for p, g in zip(parameters, found, strict=True)
            ]
        )
    largest = max(float(g.norm()) for gradients in truth for g in gradients)
    for k, ((name, p), records) in enumerate(zip(named, recorded, strict=True)):
        true = torch.stack([gradients[k] for gradients in truth])
        if not is_used[k]:
            raise ValueError(_NOT_USED.format(name))
        if records is None:
            raise ValueError(_wrong_gradient(name, "got no per-record gradient"))
        tolerance = 1e-2 if p.dtype in (torch.float16, torch.bfloat16) else 1e-3
        if records.shape != true.shape or not float((records - true).norm()) <= tolerance * max(
            float(true.norm()), 1e-3 * largest
        ):
            raise ValueError(
                _wrong_gradient(
                    name, "got per-record gradients that are not the gradients of the records"
                )
            )
    if largest > 0:
        with draws():
            check_clipped_sum(
                named,
                source,
                [torch.stack(gradients).flatten(1) for gradients in zip(*truth, strict=True)],
            )
    source.discard(parameters)
    return largest > 0


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


# -- does a record's output depend on other records? -----------------------------------------------

_MANY = 100_000
_NOT_USED = (
    "parameter {!r} is not used by the forward pass: it would be given noise only. Use it, or"
    " freeze it with requires_grad_(False)."
)
_OTHER_KINDS = ("outliers", "plain", "short")
_NO_GRADIENT = (
    "no parameter has a gradient on made-up records, so that per-record gradients cannot be"
    " checked: the output is saturated or cut off for them. Pass example_inputs=, made-up records"
    " to which the model responds."
)
_CANNOT_BE_RUN = (
    "the model cannot be run on two made-up records of shapes {}: {}. Pass example_inputs=, the"
    " positional arguments of the model for two made-up records (no real ones)."
)
_NOT_FINITE = (
    "the model's output on made-up records is not finite: pass example_inputs=, made-up records"
    " that the model can take"
)

_ATTEMPTS = 20  # parameters at which the gradients of a model with dead outputs are looked for
_SIZES = (2, 5, 33)
_SEEDS = 64  # all of them miss a branch of probability 0.1 with probability 0.001
_FEWEST_SEEDS = 8
_FEWEST_TRIALS = 3
_OTHER_SEEDS = 2**20
_SECONDS = 0.4  # of this thread, on optional comparisons and again on seeds
_ENTRIES = 1024  # of what a layer takes or gives, compared for each record
# of a layer in one pass that are compared: cells of recurrent layers have one for each position
_CALLS = 8

# each number from one place of the arguments alone, or from one row
_SAMPLERS = frozenset(
    "bernoulli binomial multinomial normal poisson native_dropout rrelu_with_noise"
    " rrelu_with_noise_ _standard_gamma _sample_dirichlet".split()
)

# module, which of its calls, whether it is an output, place among the tensors
_Key = tuple[str, int, bool, int]


@dataclass
class _Forward:
    """One run of the model: its output and, for each record, what its modules took and gave."""

    outputs: list[Tensor]
    trained: frozenset[str] = frozenset()  # modules with trainable parameters of their own
    # in the order in which modules finish
    notes: dict[_Key, list[Tensor]] = field(default_factory=dict)
    shapes: dict[_Key, torch.Size] = field(default_factory=dict)


def _check_independence(
    module: nn.Module, source: GradientSource, inputs: tuple[Any, ...]
) -> tuple[ModelAsChecked, list[int | None], bool]:
    """Raise if a record's output depends on others.

    Returns:
        The model's state after its first pass, which may have filled caches; for each draw of
        random numbers the dimension of the records; and whether records draw in a batch what they
        would draw alone.
    """
    before = {
        name: t.detach().clone()
        for name, t in [*module.named_buffers(), *module.named_parameters()]
    }
    versions = [t._version for t in tensors_in(inputs)]
    with source.paused():
        try:
            first = _run(module, inputs, _SeededDraws(0)).outputs
        except MixedRecordsError:
            raise
        except Exception as error:
            shapes = [list(t.shape) for t in tensors_in(inputs)]
            raise ValueError(_CANNOT_BE_RUN.format(shapes, error)) from error
        as_checked = ModelAsChecked(module, source.passing_attributes, watch_passes=False)
        _require_unchanged(module, before)
        are_changed = [t._version for t in tensors_in(inputs)] != versions
        if not first or any(t.dim() == 0 or len(t) != 2 for t in first):
            raise ValueError(
                "the model's output must be a tensor with one row per record in dimension 0 (a loss"
                " computed inside the model mixes records)"
            )
        if not all(bool(torch.isfinite(t).all()) for t in first if t.is_floating_point()):
            raise ValueError(_NOT_FINITE)
        if not _same_outputs(
            first,
            _run(module, inputs, _SeededDraws(0)).outputs,
            torch.ones(2, dtype=torch.bool),
            is_same_size=False,
        ):
            if are_changed:
                raise ValueError(
                    f"the forward pass of {type(module).__name__!r} changes its input in place, so"
                    " that it gives another output on the same records: write x = x * 2 instead of"
                    " x *= 2."
                )
            raise ValueError(
                "the model gives another output when it is run again on the same records: keep"
                " nothing between forward passes, and draw with torch's own generator."
            )
        draws = _SeededDraws(0)
        try:
            alone = _run(module, _given(inputs, [0]), draws)
        except MixedRecordsError:
            raise
        except Exception as error:
            raise ValueError(
                "the model fails on a batch of one record, which Poisson sampling delivers:"
                f" {error}. {_FIX}"
            ) from error
        several = _SeededDraws(0)
        rows = _sizes(inputs)[-1]
        _run_given(module, inputs, rows, several)
        # in what is drawn, the dimension of the records; None: they draw one after another
        axes = None
        if len(draws.shapes) == len(several.shapes):
            axes = [
                _record_axis(s, t, rows) for s, t in zip(draws.shapes, several.shapes, strict=True)
            ]
        is_aligned = axes is not None and not several.is_elsewhere
        _require_unmoved(module, inputs, alone, axes or [], is_aligned)
        _require_same_alone(module, inputs, axes or [], is_aligned, _sizes(inputs))
    _require_unchanged(module, before)
    return as_checked, axes or [], is_aligned


def _require_unchanged(module: nn.Module, before: Mapping[str, Tensor]) -> None:
    for name, t in [*module.named_buffers(), *module.named_parameters()]:
        if name in before and torch.equal(t, before[name]):
            continue
        owner = name.rpartition(".")[0]
        what = (
            f"module {owner or type(module).__name__!r} changes its buffer or parameter {name!r} in"
            " the forward pass"
        )
        layer = module.get_submodule(owner)
        if any(
            type(part).__name__ in ("SpectralNorm", "_SpectralNorm")
            for part in [layer, *layer._forward_pre_hooks.values()]
        ):
            raise ValueError(
                f"{what}: the power iteration of spectral_norm, which moves on at every call. Take"
                " it off by remove_spectral_norm or parametrize.remove_parametrizations, and bound"
                " the weight after optimizer.step(), which costs no privacy."
            )
        raise ValueError(
            f"{what}: statistics of the records would leave without noise. Keep them out of the"
            f" module. {_FIX}"
        )


def _require_same_alone(
    module: nn.Module,
    inputs: tuple[Any, ...],
    axes: list[int | None],
    is_aligned: bool,
    sizes: Sequence[int],
) -> None:
    """Raise if a record's output depends on how many others there are or on its place among them.
    All records draw the same random numbers here.

    Args:
        axes: for each draw, the dimension of the records.
        is_aligned: records after the first one draw what they would alone.
        sizes: of batches.
    """
    singles = [
        _run(module, _given(inputs, [k]), _SeededDraws(0, axes, are_alike=True)) for k in range(2)
    ]
    for rows in sizes:
        together = _run_given(
            module, inputs, rows, _SeededDraws(0, axes, are_alike=True), singles[0]
        )
        places = torch.arange(rows)
        for k, single in enumerate(singles[: 2 if is_aligned else 1]):
            expected = _Forward(
                [t.expand(rows, *t.shape[1:]) for t in single.outputs],
                single.trained,
                shapes=together.shapes,
            )
            for key in together.notes.keys() & single.notes.keys():
                whole = single.notes[key][0]
                axis = _record_axis(whole.shape, together.shapes[key], rows)
                if axis is not None:
                    expected.notes[key] = [
                        note.expand(rows, -1) for note in _by_record(whole, axis, 1)
                    ]
            keep = places % 2 == k if is_aligned else places == 0
            _require_same(
                module,
                expected,
                together,
                keep,
                "the number of records in the batch, or on its place among them",
                is_same_size=False,
            )


def _require_unmoved(
    module: nn.Module,
    inputs: tuple[Any, ...],
    alone: _Forward,
    axes: list[int | None],
    is_aligned: bool,
) -> None:
    """Raise if other values of the other records move what happens to a record, under the
    same random numbers, or other numbers of theirs.
    """
    limits, on_cpu = _integer_limits(module, inputs), _on_cpu(module)
    start, spent, is_random = time.thread_time(), 0, False

    def compare(
        rows: int, kind: str, seed: int, kept: list[Tensor], is_by_record: bool = False
    ) -> None:
        """One batch, in which those in each of ``kept`` stay and all others are exchanged,
        with what they draw where records draw apart.
        """
        nonlocal spent, is_random
        base, others = _neighbours(inputs, rows, kind, limits, seed)
        draws = _SeededDraws(seed, axes, by_record=is_by_record)
        try:
            if on_cpu:
                _tried(module, base, on_cpu)
            first = _run(module, base, draws, alone, rows)
        except MixedRecordsError:
            raise
        except Exception as error:
            if kind in ("given", "copies"):
                raise ValueError(
                    f"the model fails on a batch of {rows} made-up records: {error}"
                ) from error
            return  # it may refuse such values
        for keep in kept:
            mixed = _exchanged(base, others, keep)
            try:
                if on_cpu:
                    _tried(module, mixed, on_cpu)
                second = _run(
                    module,
                    mixed,
                    _SeededDraws(
                        seed, axes, by_record=is_by_record, others=~keep if is_by_record else None
                    ),
                    alone,
                    rows,
                )
            except MixedRecordsError:
                raise
            except Exception:
                continue
            _require_same(
                module, first, second, keep, "another record in the batch", is_same_size=True
            )
        spent += rows * (1 + len(kept))
        is_random |= draws.is_random

    kinds = ("given", "copies", "codes", "ties", "outliers", "missing", "short", "plain", "holes")
    middle, large = _sizes(inputs)[len(_sizes(inputs)) // 2], _sizes(inputs)[-1]
    batches = [(middle, kinds), (large, (*kinds[2:], *kinds[:2])), (2, kinds[:2])]
    groups = [(rows, kind) for rows, several in batches for kind in several]
    required = 0.0  # seconds
    for seed, (rows, kind) in enumerate(groups):
        seconds = time.thread_time() - start
        if seed == len(kinds):
            required = seconds
        if seed < len(kinds) or seconds * (1 + 5 * rows / spent) < _SECONDS + required:
            compare(rows, kind, seed, _kept(rows))
    start = time.thread_time()
    for seed in range(_SEEDS if is_random else 0):
        if seed >= _FEWEST_SEEDS and time.thread_time() - start > _SECONDS:
            return
        rows, is_by_record = (2, middle)[seed // 2 % 2], is_aligned and seed // 2 % 2 == 1
        compare(
            rows,
            kinds[seed % 2],
            len(groups) + seed,
            [_kept(rows)[seed // 4 % len(_kept(rows))]],
            is_by_record,
        )


def _exchanged(base: tuple[Any, ...], others: tuple[Any, ...], keep: Tensor) -> tuple[Any, ...]:
    """The records in ``keep`` of ``base``, and all others of ``others``."""
    exchanged = iter(list(_rows(others)))
    return tuple(_map(lambda t: torch.where(_like(keep, t), t, next(exchanged)), base))


def _are_equal_records(inputs: tuple[Any, ...]) -> bool:
    tensors = [t for t in _rows(inputs) if len(t) == 2 and t.numel() > 0]
    return len(tensors) > 0 and all(torch.equal(t[0], t[1]) for t in tensors)


def _kept(rows: int) -> list[Tensor]:
    """Which records stay while all others change: the first, the last, the middle one, any half."""
    places = torch.arange(rows)
    half = torch.randperm(rows, generator=torch.Generator().manual_seed(rows)) < rows // 2
    return [places == 0, places == rows - 1, *([places == rows // 2, half] if rows > 2 else [])]


def _neighbours(
    inputs: tuple[Any, ...], rows: int, kind: str, limits: list[int], seed: int
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Made-up records and others that may take their places."""
    generator = torch.Generator().manual_seed(seed)
    pairs = [
        _neighbours_like(t, rows, kind, limit, generator)
        for t, limit in zip(_rows(inputs), limits, strict=True)
    ]
    bases, others = iter(pairs), iter(pairs)
    return tuple(_map(lambda _: next(bases)[0], inputs)), tuple(
        _map(lambda _: next(others)[1], inputs)
    )


def _neighbours_like(
    t: Tensor, rows: int, kind: str, limit: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    def chance(probability: float) -> Tensor:
        return (torch.rand(made.shape, generator=generator) < probability).to(t.device)

    made, other = _values_like(t, rows, limit, generator), _values_like(t, rows, limit, generator)
    if kind == "given":
        return t[torch.arange(rows, device=t.device) % 2], (
            other * 4 + 3 if t.is_floating_point() else other
        )
    if kind == "copies":
        return t[:1].repeat_interleave(rows, 0), t[1:2].repeat_interleave(rows, 0)
    if kind in ("plain", "holes") and t.is_floating_point():
        made = (
            torch.rand(made.shape, generator=generator).to(t.dtype).to(t.device)
            if kind == "plain"
            else made
        )
        return made, other * 300 if kind == "plain" else other.masked_fill(chance(0.25), math.nan)
    if kind == "ties":
        return _tied(made, 0), _tied(other, 1)
    if kind == "codes":  # categories and counts, whatever their type
        codes = torch.randint(
            3 if t.is_floating_point() else min(limit, 3), (2, *made.shape), generator=generator
        ).to(t)
        return codes[0], codes[1]
    if kind == "outliers":
        if not t.is_floating_point():
            return made, torch.full_like(other, limit - 1)
        made[[0, rows // 2, rows - 1]] *= 20
        return made, other * 300
    if kind == "missing" and t.is_floating_point():
        return made.masked_fill(chance(0.25), math.nan), other.masked_fill(
            chance(0.25), math.nan
        ).masked_fill(chance(0.05), math.inf)
    if kind == "short" and t.dim() > 1:
        made, other = made.masked_fill(made == 0, 1), other.masked_fill(other == 0, 1)
        lengths = torch.randint(1, t.shape[1] // 2 + 2, (rows, 1), generator=generator)
        return made.masked_fill(_like(torch.arange(t.shape[1]) >= lengths, t), 0), other
    return made, other


def _tied(made: Tensor, shift: int) -> Tensor:
    """Records that tie in some keys and not in others: of the same entries in another order,
    of opposite signs, with the same first entry.
    """
    for k in range(len(made)):
        which = (k + shift) % 4
        if which == 1:
            made[k] = made[0].flatten().flip(0).reshape(made[0].shape)
        elif which == 2 and k > 0:
            made[k] = -made[0] if made.is_floating_point() else made[0]
        elif k > 0:
            made[k].flatten()[:1] = made[0].flatten()[:1]
    return made


def _values_like(t: Tensor, rows: int, limit: int, generator: torch.Generator) -> Tensor:
    shape = (rows, *t.shape[1:])
    if t.is_floating_point():
        values = torch.randn(shape, generator=generator)
    elif limit > 256:  # of every order of magnitude
        values = (limit ** torch.rand(shape, generator=generator, dtype=torch.float64)).long() - 1
    else:
        values = torch.randint(limit, shape, generator=generator)
    return values.to(t.dtype).to(t.device)


def _integer_limits(module: nn.Module, inputs: tuple[Any, ...]) -> list[int]:
    """For each tensor, the number below which the model takes any integer; 2 where integers
    would be out of place.
    """
    tables = {
        layer.num_embeddings
        for layer in module.modules()
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag))
    }
    candidates = sorted(
        {100_001, 256, *tables, *(n for t in _rows(inputs) for n in t.shape[1:])}, reverse=True
    )
    on_cpu = _on_cpu(module)

    def takes(place: int, limit: int) -> bool:
        places = itertools.count()
        trial = tuple(
            _map(lambda t: torch.full_like(t, limit - 1) if next(places) == place else t, inputs)
        )
        try:
            outputs = _tried(module, trial, on_cpu)
            return all(
                bool(torch.isfinite(t).all()) for t in tensors_in(outputs) if t.is_floating_point()
            )
        except Exception:
            return False

    limits = []
    for place, t in enumerate(_rows(inputs)):
        is_integer = not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)
        fitting = [n for n in candidates if is_integer and 2 < n <= torch.iinfo(t.dtype).max + 1]
        limits.append(next((n for n in fitting if takes(place, n)), 2))
    return limits


def _on_cpu(module: nn.Module) -> dict[str, Tensor]:
    """What a model on a GPU has, on the CPU: there an index that is too large is an ordinary
    exception, and does not end the use of the GPU.
    """
    return (
        {
            name: t.detach().cpu()
            for name, t in [*module.named_parameters(), *module.named_buffers()]
        }
        if _cuda_devices(module)
        else {}
    )


def _tried(module: nn.Module, arguments: tuple[Any, ...], on_cpu: dict[str, Tensor]) -> Any:
    with torch.no_grad(), _SeededDraws(0):
        return (
            torch.func.functional_call(module, on_cpu, map_tensors(arguments, Tensor.cpu))
            if on_cpu
            else module(*arguments)
        )


def _sizes(inputs: tuple[Any, ...]) -> list[int]:
    largest = max((t[:1].numel() for t in _rows(inputs)), default=1)
    return sorted({min(n, max(2, 2**18 // max(largest, 1))) for n in _SIZES})


def _given(inputs: tuple[Any, ...], places: list[int]) -> tuple[Any, ...]:
    return tuple(_map(lambda t: t[torch.tensor(places, device=t.device)], inputs))


def _run_given(
    module: nn.Module,
    inputs: tuple[Any, ...],
    rows: int,
    draws: _SeededDraws,
    alone: _Forward | None = None,
) -> _Forward:
    try:
        return _run(module, _given(inputs, [i % 2 for i in range(rows)]), draws, alone, rows)
    except MixedRecordsError:
        raise
    except Exception as error:
        raise ValueError(
            f"the model fails on a batch of {rows} made-up records: {error}"
        ) from error


# -- are recorded gradients those of the records? --------------------------------------------------


def _check_gradients(module: nn.Module, source: GradientSource, inputs: tuple[Any, ...]) -> bool:
    """Raise unless recorded gradients are those of the records. Returns whether there was any
    to compare.
    """
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    parameters = [p for _, p in named]
    weights: list[Tensor] = []

    def loss_per_record(arguments: tuple[Any, ...]) -> Tensor:
        with _SeededDraws(0):
            outputs = [
                t.float().reshape(len(t), -1)
                for t in tensors_in(module(*arguments))
                if t.is_floating_point()
            ]
        if not weights:
            generator = torch.Generator().manual_seed(1)
            weights.extend(torch.randn(t.shape, generator=generator).to(t.device) for t in outputs)
        return torch.stack([(t * w).sum(1) for t, w in zip(outputs, weights, strict=True)]).sum(0)

    def gradients(loss: Tensor) -> tuple[Tensor | None, ...]:
        if not loss.requires_grad:
            return (None,) * len(parameters)
        found = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
        return tuple(g.to_dense() if g is not None and g.is_sparse else g for g in found)

    source.discard(parameters)
    try:
        losses = loss_per_record(inputs)
        (losses.sum() if source.loss_reduction == "sum" else losses.mean()).backward()
    except Exception as error:
        raise ValueError(
            f"per-record gradients of this model cannot be computed: {error}. Give a parameter that"
            " stands beside other layers (a class token) a small module of its own."
        ) from error
    recorded = [source.per_record_gradients(p) for p in parameters]
    with source.paused():
        losses = loss_per_record(inputs)
        truth = [gradients(losses[i]) for i in range(2)]
    largest = max((float(g.norm()) for t in truth for g in t if g is not None), default=0.0)
    true_gradients = []
    for k, ((name, p), records) in enumerate(zip(named, recorded, strict=True)):
        true = torch.stack([torch.zeros_like(p) if g is None else g for g in (t[k] for t in truth)])
        true_gradients.append(true.flatten(1))
        if records is None:
            if truth[0][k] is None and truth[1][k] is None:
                raise ValueError(_NOT_USED.format(name))
            raise ValueError(_wrong_gradient(name, "got no per-record gradient"))
        if records.shape[1:] == true.shape[1:] and len(records) != len(true):
            raise ValueError(
                f"parameter {name!r} got {len(records)} per-record gradients for two records: its"
                " module sees another first dimension. Keep records in dimension 0 of every"
                " layer's input (for positions, .expand(len(x), -1))."
            )
        if records.shape != true.shape:
            raise ValueError(
                _wrong_gradient(
                    name,
                    f"got per-record gradients of shape {tuple(records.shape)}, expected"
                    f" {tuple(true.shape)}",
                )
            )
        tolerance = 1e-2 if p.dtype in (torch.float16, torch.bfloat16) else 1e-3
        scale = max(float(true.norm()), 1e-3 * largest)  # a gradient that cancels is rounding error
        if not float((records - true).norm()) <= tolerance * scale:
            raise ValueError(
                _wrong_gradient(
                    name, "got per-record gradients that are not the gradients of the records"
                )
            )
    if largest > 0:
        check_clipped_sum(named, source, true_gradients)
    source.discard(parameters)
    return largest > 0


def _check_gradients_unmoved(
    module: nn.Module,
    source: GradientSource,
    inputs: tuple[Any, ...],
    axes: list[int | None],
    is_aligned: bool,
) -> None:
    """Raise if a record's gradient depends on others: made-up records of every kind, output
    gradients of every order of magnitude.
    """
    kinds = ("ties", "codes", "given", "short", "outliers", "plain")
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    middle, large = _sizes(inputs)[len(_sizes(inputs)) // 2], _sizes(inputs)[-1]
    limits, on_cpu = _integer_limits(module, inputs), _on_cpu(module)
    start, required = time.thread_time(), 0.0
    for seed, power in enumerate(MAGNITUDES):
        seconds = time.thread_time() - start
        if seed == _FEWEST_TRIALS:
            required = seconds
        if seed >= _FEWEST_TRIALS and seconds - required + required / _FEWEST_TRIALS > _SECONDS:
            return
        rows, are_alike = (
            rows_for(named, large if seed % 4 == 3 else middle),
            is_aligned and seed % 2 == 0,
        )
        keep = _kept(rows)[(seed + 1) % len(_kept(rows))]
        base, others = _neighbours(inputs, rows, kinds[seed % len(kinds)], limits, seed)
        mixed = _exchanged(base, others, keep)

        def draws(seed: int = seed, are_alike: bool = are_alike) -> _SeededDraws:
            return _SeededDraws(seed, axes, are_alike=are_alike)

        try:
            if on_cpu:
                _tried(module, base, on_cpu)
                _tried(module, mixed, on_cpu)
            check_trial(module, source, Trial(base, mixed, keep, power, seed, draws, are_alike))
        except MixedRecordsError:
            raise
        except Exception as error:
            if kinds[seed % len(kinds)] == "given":
                raise ValueError(
                    f"the model's gradients cannot be computed on {rows} made-up records: {error}"
                ) from error


# -- what do decisions on the batch decide? --------------------------------------------------------

_MOST_DECISIONS, _DEPTH = 48, 3  # lines that decide; decisions that are forced together
_MOST_CALLS = 16  # of a line that runs once for each record, which are flipped one by one
_LARGEST_BATCH, _LARGEST_NUMBERS, _MOST_SIZES = 4096, 2**20, 8
_FORCED_KINDS = ("given", "short", "ties", "codes")
_FLIP_KINDS = ("given", "short", "plain", "codes", "outliers", "missing")
_DECIDES = (
    "a decision on the batch, at {}, changes other records' outputs or gradients, and one record"
    " can bring it about. Decide for each record alone: torch.where with a condition per row."
)
_TAKES = (
    "a number taken out of the batch, at {}, changes other records' outputs or gradients, and one"
    " record can change it. Compute it for each record alone, as a tensor with a row for each."
)
_TOO_MANY = (
    "the model takes decisions on the batch at more than {} lines, too many to test each. Decide"
    " for each record alone, with torch.where and a condition per row."
)


@dataclass
class _Branches:
    """What decisions of a model are tried on.

    Attributes:
        module, source, inputs, axes, is_aligned: as everywhere here.
        limits: of integers, for each input.
        alone: the run of one record.
    """

    module: nn.Module
    source: GradientSource
    inputs: tuple[Any, ...]
    axes: list[int | None]
    is_aligned: bool
    limits: list[int]
    alone: _Forward

    def __post_init__(self) -> None:
        self.named = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        sizes = _sizes(self.inputs)
        self.rows = rows_for(self.named, sizes[len(sizes) // 2])
        self.on_cpu = _on_cpu(self.module)

    def made(self, kind: str, seed: int = 0) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return _neighbours(self.inputs, self.rows, kind, self.limits, seed)

    def draws(self) -> _SeededDraws:
        return _SeededDraws(0, self.axes, are_alike=self.is_aligned)

    def observed(
        self, arguments: tuple[Any, ...], decisions: Decisions
    ) -> tuple[list[Tensor], Tensor]:
        """Outputs and recorded gradients, each as (records, numbers); and whose are finite."""
        module, source = self.module, self.source
        parameters = [p for _, p in self.named]
        if self.on_cpu:
            _tried(module, arguments, self.on_cpu)
        source.discard(parameters)
        decisions.start()
        try:
            with decisions:
                with self.draws():
                    outputs = list(tensors_in(module(*arguments)))
                rows = len(outputs[0])
                terms = []
                for t in outputs:
                    if t.is_floating_point():
                        generator = torch.Generator().manual_seed(t[:1].numel())
                        weight = torch.randn(t.shape, generator=generator).to(t.device)
                        if decisions.is_watching:
                            decisions.watch([weight])
                        terms.append((t.float() * weight).sum())
                total = torch.stack(terms).sum()
                (total if source.loss_reduction == "sum" else total / rows).backward()
            gradients = [source.per_record_gradients(p) for p in parameters]
        finally:
            source.discard(parameters)
            for p in parameters:
                p.grad = None
        by_record = [
            t.detach().reshape(rows, -1)
            for t in (*outputs, *gradients)
            if t is not None and len(t) == rows
        ]
        finite = [t.isfinite().all(1).cpu() for t in by_record[len(outputs) :]]
        return by_record, torch.stack([torch.ones(rows, dtype=torch.bool), *finite]).all(0)

    def seen(self, forced: Mapping[Place, Outcome]) -> Decisions:
        """The decisions of one pass, as far as they depend on the batch."""
        decisions = Decisions(forced)
        arguments = _map(lambda t: t.clone(), self.made("given")[0])
        decisions.watch(list(tensors_in(arguments)))
        try:
            self.observed(arguments, decisions)
        except MixedRecordsError:
            raise
        except Exception:
            if not forced:
                raise
        return decisions

    def changed(
        self,
        arguments: tuple[Any, ...],
        forced: Decisions,
        natural: tuple[Sequence[Tensor], Tensor],
    ) -> int | None:
        """How many records come out differently; None where the model fails. Those whose
        gradients are not finite count for nothing.
        """
        try:
            found, is_finite = self.observed(arguments, forced)
        except MixedRecordsError:
            raise
        except Exception:
            return None
        before, was_finite = natural
        if [t.shape for t in found] != [t.shape for t in before]:
            return len(was_finite)
        same = [_same_rows(a, b, True).cpu() for a, b in zip(before, found, strict=True)]
        return int((~torch.stack(same).all(0) & (is_finite | was_finite)).sum())


# arguments, what comes out of the decision, and what is observed
_Suspect = tuple[tuple[Any, ...], list[Outcome], tuple[list[Tensor], Tensor]]


def _check_decisions(
    module: nn.Module,
    source: GradientSource,
    inputs: tuple[Any, ...],
    axes: list[int | None],
    is_aligned: bool,
    batch_size: float,
) -> None:
    """Raise if decisions that the model takes from a batch, or constants in its code, let a
    record's output or gradient depend on others.
    """
    with source.paused():
        alone = _run(module, _given(inputs, [0]), _SeededDraws(0))
        limits = _integer_limits(module, inputs)
    tried = _Branches(module, source, inputs, axes, is_aligned, limits, alone)
    constants = Constants()
    with constants.collected():
        first = tried.seen({})
    _check_sizes(tried, constants.sizes, batch_size)
    _check_constants(tried, constants.numbers)
    known: set[Place] = set()
    waiting: list[tuple[dict[Place, Outcome], Decisions]] = [({}, first)]
    while waiting:
        forced, seen = waiting.pop(0)
        for place, values in list(seen.outcomes.items()):
            if place in known:
                continue
            known.add(place)
            if len(known) > _MOST_DECISIONS:
                raise ValueError(_TOO_MANY.format(_MOST_DECISIONS))
            outcomes: Sequence[Outcome] = (
                numbers_near(values, constants.numbers) if place.is_number else (True, False)
            )
            changing = _check_flips(tried, place, outcomes, forced, seen)
            for outcome in changing if place.is_number else outcomes:
                together = {**forced, place: outcome}
                _check_forced(tried, together, place, bounds_after(seen))
                if len(together) < _DEPTH:
                    waiting.append((together, tried.seen(together)))


def _check_flips(
    tried: _Branches,
    place: Place,
    outcomes: Sequence[Outcome],
    forced: Mapping[Place, Outcome],
    seen: Decisions,
) -> list[Outcome]:
    """Raise if a decision may change other records in the direction in which one record can turn
    it, where that is seen, or else in every direction that made-up records show. Returns outcomes
    that change something.
    """
    # 1: up, or from False to True; -1: down
    is_changed, moves, changing = dict[int, bool](), set[int](), dict[Outcome, None]()
    suspects = []
    for seed, kind in enumerate(_FLIP_KINDS[: 2 if place.is_number else None]):
        whole = tried.made(kind, seed)[0]
        one = _given(whole, [seed % tried.rows])
        noted = []
        for arguments in (whole, one):
            decisions = Decisions(forced, bounds=bounds_after(seen))
            try:
                natural = tried.observed(arguments, decisions)
            except MixedRecordsError:
                raise
            except Exception:
                continue
            values = decisions.outcomes.get(place, [])
            noted.append(values)
            for outcome in outcomes if values else ():
                direction = _direction(values, outcome)
                if direction == 0:
                    continue
                other = Decisions({**forced, place: outcome}, bounds=bounds_after(seen))
                count = tried.changed(arguments, other, natural)
                is_changed.setdefault(direction, False)
                if count != 0:
                    changing[outcome] = None
                if count:
                    is_changed[direction] = True
                    suspects.append((arguments, values, natural))
        if len(noted) == 2 and len(noted[0]) == len(noted[1]):
            for value, value_of_one in zip(*noted, strict=True):
                moves |= {int(value > value_of_one) - int(value < value_of_one)} - {0}
    required = [is_changed[move] for move in moves if move in is_changed]
    is_harmless = not any(required) if required else not all(is_changed.values())
    if not is_changed or is_harmless:
        return list(changing)
    if _is_of_single_records(tried, place, forced, seen, suspects):
        return list(changing)
    raise MixedRecordsError((_TAKES if place.is_number else _DECIDES).format(place))


def _direction(values: Sequence[Outcome], outcome: Outcome) -> int:
    """Which way all of ``values`` go if they become ``outcome``; 0 where they stay or part."""
    if isinstance(outcome, bool):
        return 0 if all(value == outcome for value in values) else 1 if outcome else -1
    return int(outcome > max(values)) - int(outcome < min(values))


def _is_of_single_records(
    tried: _Branches,
    place: Place,
    forced: Mapping[Place, Outcome],
    seen: Decisions,
    suspects: Sequence[_Suspect],
) -> bool:
    """Whether each call of the line decides on one record: a loop over records."""
    several = [suspect for suspect in suspects if len(suspect[2][1]) > 1]
    if not several:
        return False
    arguments, values, natural = several[0]
    if len(values) < len(natural[1]):
        return False
    for call, value in list(enumerate(values))[:_MOST_CALLS]:
        others = (value + 1, value - 1) if place.is_number else (not value,)
        for other in others:
            decisions = Decisions({**forced, place: other}, call=call, bounds=bounds_after(seen))
            if (tried.changed(arguments, decisions, natural) or 0) > 1:
                return False
    return True


def _check_forced(
    tried: _Branches, forced: Mapping[Place, Outcome], place: Place, limits: Bounds
) -> None:
    """Raise if records depend on one another where decisions come out as ``forced``."""
    module, inputs, rows = tried.module, tried.inputs, tried.rows
    decisions = Decisions(forced, bounds=limits)
    handle = module.register_forward_pre_hook(lambda *_: decisions.start(), prepend=True)
    try:
        with decisions:
            for seed, kind in enumerate(_FORCED_KINDS):
                keep = _kept(rows)[seed % len(_kept(rows))]
                # a branch left out may leave layers out, too
                with suppress(MissingGradientsError):
                    _compare_exchanged(tried, *tried.made(kind, seed), keep, seed)
            with tried.source.paused():
                _where_it_runs(
                    lambda: _require_same_alone(
                        module, inputs, tried.axes, tried.is_aligned, [rows]
                    )
                )
    except MixedRecordsError as error:
        raise MixedRecordsError(
            f"where the decision at {place} comes out as {forced[place]}, {error}"
        ) from error
    finally:
        handle.remove()


def _where_it_runs(check: Callable[[], None]) -> bool:
    """Whether the model could be run; what a check finds is raised."""
    try:
        check()
    except MixedRecordsError:
        raise
    except Exception:
        return False
    return True


def _compare_exchanged(
    tried: _Branches, base: tuple[Any, ...], others: tuple[Any, ...], keep: Tensor, seed: int
) -> bool:
    """Raise if records in ``keep`` fare otherwise when all others are exchanged. Returns whether
    the model could be run on both.
    """
    module, rows = tried.module, len(keep)
    mixed = _exchanged(base, others, keep)

    def check_outputs() -> None:
        if tried.on_cpu:
            _tried(module, base, tried.on_cpu)
            _tried(module, mixed, tried.on_cpu)
        first, second = (
            _run(module, arguments, _SeededDraws(seed, tried.axes), tried.alone, rows)
            for arguments in (base, mixed)
        )
        _require_same(module, first, second, keep, "another record in the batch", is_same_size=True)

    with tried.source.paused():
        if not _where_it_runs(check_outputs):
            return False
    if rows_for(tried.named, rows) < rows:
        return True
    trial = Trial(base, mixed, keep, 0, seed, tried.draws, False)
    return _where_it_runs(lambda: check_trial(module, tried.source, trial))


def _check_sizes(tried: _Branches, constants: Sequence[int], batch_size: float) -> None:
    """Raise if a record fares otherwise in a batch larger than a constant in the code, or than
    batches will be.
    """
    largest = max((t[:1].numel() for t in tensors_in(tried.inputs) if t.dim()), default=1)
    most = min(_LARGEST_BATCH, _LARGEST_NUMBERS // max(largest, 1))
    tested = {1, *_sizes(tried.inputs)}
    fitting = [n for n in constants if n <= most and n not in tested]
    sizes = sorted({*fitting[:_MOST_SIZES], min(math.ceil(2 * batch_size), most)} - tested - {0})
    start, spent = time.thread_time(), 0
    for rows in sizes:
        seconds = time.thread_time() - start
        if spent and seconds * (1 + rows / spent) > 2 * _SECONDS:
            return
        spent += rows
        check = partial(
            _require_same_alone, tried.module, tried.inputs, tried.axes, tried.is_aligned, [rows]
        )
        with tried.source.paused():
            if not _where_it_runs(check):
                continue
        if rows in fitting and rows_for(tried.named, rows) == rows:
            base, others = _neighbours(tried.inputs, rows, "given", tried.limits, rows)
            _compare_exchanged(tried, base, others, torch.arange(rows) % 2 == 0, rows)


def _check_constants(tried: _Branches, numbers: Sequence[float]) -> None:
    """Raise if records that hold constants of the model's code change what becomes of others."""
    if not numbers:
        return
    shown = [
        (sign * (2 * n + 1 if is_beyond else n), is_first)
        for n in numbers
        for sign, is_beyond, is_first in (
            (1, False, False),
            (1, False, True),
            (1, True, False),
            (-1, False, False),
            (-1, True, True),
        )
    ]
    largest = max((t[:1].numel() for t in tensors_in(tried.inputs) if t.dim()), default=1)
    most = max(1, min(64, 2**18 // max(largest, 1)))
    waiting = [shown[k : k + most] for k in range(0, len(shown), most)]
    left = 2 * len(waiting) + 16
    while waiting and left:
        left -= 1
        some = waiting.pop(0)
        rows = len(some) + 4
        base, others = _neighbours(tried.inputs, rows, "plain", tried.limits, left)
        limits = iter(tried.limits)
        others = tuple(_map(partial(_showing, some=some, limits=limits), others))
        keep = (torch.arange(rows) < 2) | (torch.arange(rows) >= rows - 2)
        if not _compare_exchanged(tried, base, others, keep, left) and len(some) > 1:
            waiting += [some[: len(some) // 2], some[len(some) // 2 :]]


def _showing(t: Tensor, some: Sequence[tuple[float, bool]], limits: Iterator[int]) -> Tensor:
    """The records of ``t`` after the first two hold one of the numbers each, all through or in
    their first entry.
    """
    t, limit = t.clone(), next(limits)
    highest = torch.finfo(t.dtype).max if t.is_floating_point() else limit - 1
    for row, (number, is_first) in zip(t[2:].reshape(len(t) - 2, -1), some, strict=False):
        if (t.is_floating_point() and abs(number) <= highest) or 0 <= number <= highest:
            row[: 1 if is_first else None] = number if t.is_floating_point() else int(number)
    return t


def _check_empty_batch(module: nn.Module, source: GradientSource, inputs: tuple[Any, ...]) -> None:
    empty = tuple(_map(lambda t: t[:0], inputs))
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    parameters = [p for _, p in named]

    def run() -> None:
        try:
            outputs = [t for t in Nested(module(*empty)).tensors if t.requires_grad]
            torch.stack([t.float().sum() for t in outputs]).sum().backward()
            if any(source.per_record_gradients(p) is None for p in parameters):
                raise ValueError(
                    "it leaves parameters without gradients; no shortcut for empty inputs may leave"
                    " the forward pass early"
                )
            if len(source.norms(named)) > 0:
                raise ValueError("it comes out as a record")
        finally:
            source.discard(parameters)
            for p in parameters:
                p.grad = None

    try:
        run()
    except Exception:
        source.use_stand_in()
        try:
            run()
        except Exception as error:
            raise ValueError(
                "the model cannot take an empty batch, which Poisson sampling delivers now and"
                f" then: {error}. Write x.flatten(1) instead of x.view(len(x), -1), and replace"
                " layers that fail on zero rows."
            ) from error


# -- running and comparing -------------------------------------------------------------------------


def _run(
    module: nn.Module,
    arguments: tuple[Any, ...],
    draws: _SeededDraws,
    alone: _Forward | None = None,
    rows: int = 1,
) -> _Forward:
    """Run, and note what modules take and give: whole where ``alone``, the run of one record,
    is None, otherwise by record.
    """
    found = _Forward([], _trained(module))
    calls: Counter[str] = Counter()

    def note(name: str, given: Any, output: Any) -> None:
        calls[name] += 1
        if calls[name] > _CALLS:
            return
        for is_output, value in enumerate((given, output)):
            for place, t in enumerate(tensors_in(value)):
                # sorted indices may change, as long as sorted values do not
                if not t.is_floating_point() or t.numel() == 0:
                    continue
                key = (name, calls[name], bool(is_output), place)
                if alone is None:
                    found.notes[key] = [t.detach().clone()]
                elif (
                    key in alone.notes
                    and (axis := _record_axis(alone.notes[key][0].shape, t.shape, rows)) is not None
                ):
                    found.notes[key] = _by_record(t.detach(), axis, rows)
                found.shapes[key] = t.shape

    handles = [
        layer.register_forward_hook(
            lambda _, given, named, output, name=name: note(name, (given, named), output),
            with_kwargs=True,
        )
        for name, layer in module.named_modules()
        if layer is not module
    ]
    watch = HookWatch()
    try:
        with torch.set_grad_enabled(bool(draws.seed % 2)), draws, watch:  # the model may ask which
            found.outputs = [t.detach() for t in tensors_in(module(*arguments))]
    finally:
        for handle in handles:
            handle.remove()
        if watch.found is not None:
            raise MixedRecordsError(
                HOOKED.format(
                    f"the forward pass of {type(module).__name__!r}", f"Tensor.{watch.found}"
                )
            )
    return found


def _record_axis(one: Sequence[int], several: Sequence[int], rows: int) -> int | None:
    """The dimension that grows with the number of records."""
    if len(one) != len(several):
        return None
    grown = [k for k, (n, m) in enumerate(zip(one, several, strict=True)) if n != m]
    return grown[0] if len(grown) == 1 and several[grown[0]] == rows * one[grown[0]] else None


def _by_record(t: Tensor, axis: int, rows: int) -> list[Tensor]:
    """Some entries of ``t`` as (records, entries); in both orders where a record has several
    places in the dimension.
    """
    t = t.movedim(axis, 0)
    places = len(t) // rows
    found = []
    for outer in {1, places}:
        by_record = t.reshape(outer, rows, places // outer, -1).movedim(1, 0).flatten(1)
        step = max(1, by_record.shape[1] // _ENTRIES)
        while math.gcd(step, by_record.shape[1]) > 1:  # every channel gets its turn
            step += 1
        found.append(by_record[:, ::step].clone())
    return found


def _require_same(
    module: nn.Module,
    first: _Forward,
    second: _Forward,
    keep: Tensor,
    on_what: str,
    *,
    is_same_size: bool,
) -> None:
    """Raise, and say where, unless the records in ``keep`` fare the same in both runs."""
    where, fix = f"the forward pass of {type(module).__name__!r}", _ALONE
    if is_same_size and (name := _unlike(first, second)) is not None:
        raise MixedRecordsError(
            f"module {name!r} sees a number of rows that depends on the records: one record would"
            " decide whether others' gradients are taken. Run it on all records, and choose among"
            " its outputs with a mask."
        )
    for key, notes in first.notes.items():
        others = second.notes.get(key, [])
        # another way through the model, which its output decides upon
        if len(notes) != len(others) or first.shapes[key] != second.shapes[key]:
            continue
        name, _, is_output, _ = key
        if any(_same_there(a, b, keep, is_same_size) for a, b in zip(notes, others, strict=True)):
            continue
        if any(
            _same_somewhere(a, b, keep, is_same_size) for a, b in zip(notes, others, strict=True)
        ):
            if name not in first.trained:
                continue
            raise MixedRecordsError(
                f"module {name!r} sees rows in another order than the model, or mixed ones, so that"
                f" gradients depend on {on_what}: leave the rows in their places, and use a mask."
            )
        if not is_output:
            where = (
                f"the forward pass of {name.rpartition('.')[0] or type(module).__name__!r}, before"
                f" module {name!r},"
            )
        else:
            where = f"module {name!r}"
            if any(
                getattr(part, "batch_first", None) is False
                for part in module.get_submodule(name).modules()
            ):
                fix = _TIME_FIRST
        break
    else:
        if _same_outputs(first.outputs, second.outputs, keep, is_same_size=is_same_size):
            return
    raise MixedRecordsError(
        f"{where} makes a record's output depend on {on_what}: clipping each record's gradient does"
        f" not bound what one record does. {fix}"
    )


def _same_outputs(
    first: list[Tensor], second: list[Tensor], keep: Tensor, *, is_same_size: bool
) -> bool:
    return len(first) == len(second) and all(
        s.shape == t.shape
        and bool(_same_rows(s.reshape(len(s), -1), t.reshape(len(t), -1), is_same_size)[keep].all())
        for s, t in zip(first, second, strict=True)
    )


def _trained(module: nn.Module) -> frozenset[str]:
    return frozenset(
        name
        for name, layer in module.named_modules()
        if any(p is not None and p.requires_grad for p in layer._parameters.values())
    )


def _unlike(first: _Forward, second: _Forward) -> str | None:
    """A trainable module that runs in one of two batches of the same size only, or on another
    number of rows.
    """
    for key in first.shapes.keys() | second.shapes.keys():
        name, call, is_output, _ = key
        if name in first.trained and is_output and call == 1:
            shapes = first.shapes.get(key), second.shapes.get(key)
            if shapes[0] is None or shapes[1] is None or shapes[0][:1] != shapes[1][:1]:
                return name
    return None


def _same_there(a: Tensor, b: Tensor, keep: Tensor, is_same_size: bool) -> bool:
    return torch.equal(a[keep], b[keep]) or bool(_same_rows(a, b, is_same_size)[keep].all())


def _same_somewhere(a: Tensor, b: Tensor, keep: Tensor, is_same_size: bool) -> bool:
    """Whether as many rows are the same as are kept: a layer without trainable parameters may
    take records in another order.
    """
    return sum(bool(_same_rows(row.expand_as(b), b, is_same_size).any()) for row in a) >= int(
        keep.sum()
    )


def _same_rows(a: Tensor, b: Tensor, is_same_size: bool) -> Tensor:
    """For each record whether its row is the same, up to rounding: next to none in batches of
    the same size, which run the same kernels.
    """
    eps = torch.finfo(a.dtype).eps if a.is_floating_point() else 0.0
    a, b = a.double(), b.double()
    finite = a.nan_to_num(0.0, 0.0, 0.0)
    if is_same_size:
        spreads = [(t - t.mean(0)).abs().mean(0) for t in (finite, b.nan_to_num(0.0, 0.0, 0.0))]
        smaller, larger = torch.minimum(*spreads), torch.maximum(*spreads)
        # more than equal records differ by rounding
        is_spread = smaller > 16 * eps * finite.abs().amax(0)
        tolerance = 16 * eps * finite.abs() + 1e-4 * torch.where(is_spread, smaller, larger)
    else:
        tolerance = 1e-3 * finite.abs() + 1e-5 + 1e-4 * finite.abs().amax(1, keepdim=True)
    return ((a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= tolerance)).all(1)


def _like(mask: Tensor, t: Tensor) -> Tensor:
    """``mask``, over the first dimensions of ``t``, made to broadcast."""
    return mask.to(t.device).reshape(*mask.shape, *(1,) * (t.dim() - mask.dim()))


def _wrong_gradient(name: str, what: str) -> str:
    return (
        f"parameter {name!r} {what}: clipping would miss a part of what a record contributes. Use"
        " every parameter through the forward pass of the module that owns it, not through"
        " torch.nn.functional, and change nothing in place."
    )


@contextmanager
def _left_as_found(module: nn.Module) -> Iterator[None]:
    tensors = [*module.named_buffers(), *module.named_parameters()]
    before = {name: t.detach().clone() for name, t in tensors}
    grads = [(p, p.grad) for p in module.parameters()]
    try:
        with torch.no_grad():
            for p, _ in grads:
                p.grad = None
        _vary(module, 0)  # layers that start at zero would hide what lies behind them
        yield
    finally:
        for p, grad in grads:
            p.grad = grad
        with torch.no_grad():
            for name, t in tensors:
                t.copy_(before[name])


def _vary(module: nn.Module, seed: int) -> None:
    """Move the parameters; with a seed other than 0, also change the signs of half of the
    tensors, which revives a dead output every other time.
    """
    generator = torch.Generator().manual_seed(17 + seed)
    with torch.no_grad():
        for p in module.parameters():
            if p.is_floating_point():
                scale = 0.5 / math.sqrt(p[0].numel()) if p.dim() > 1 else 0.1
                sign = -1 if seed and bool(torch.rand((), generator=generator) < 0.5) else 1
                p.mul_(sign).add_(
                    torch.randn(p.shape, generator=generator).to(p.dtype).to(p.device) * scale
                )


def _map(function: Any, value: Any) -> Any:
    """``function`` of every tensor with a row for each record; one without dimensions is the same
    for all.
    """
    return map_tensors(value, lambda t: function(t) if t.dim() > 0 else t)


def _rows(value: Any) -> Iterator[Tensor]:
    return (t for t in tensors_in(value) if t.dim() > 0)


class _SeededDraws(TorchDispatchMode):
    """Random numbers that depend on ``seed``, on the operation and on which of its calls with such
    shapes it is, on nothing else.

    Args:
        seed: of torch's generators, Python's and NumPy's.
        axes: for each draw, the dimension of the records, where known.
        are_alike: all records get the same numbers, and so do all draws.
        by_record: every record draws from a seed of its own.
        others: records that draw from other seeds, with ``by_record``.
    """

    def __init__(
        self,
        seed: int,
        axes: Sequence[int | None] = (),
        *,
        are_alike: bool = False,
        by_record: bool = False,
        others: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.seed, self._axes, self._are_alike = seed, axes, are_alike
        self._by_record, self._others = by_record, others
        self._calls: Counter[str] = Counter()
        self.shapes: list[torch.Size] = []
        # random numbers of Python, of NumPy, or within an operation that may mix records
        self.is_elsewhere = False

    @property
    def is_random(self) -> bool:
        return bool(self.shapes) or self.is_elsewhere

    def __enter__(self) -> Any:
        random.seed(self.seed)
        numpy.random.seed(self.seed)
        self._before = _other_states()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.is_elsewhere |= self._before != _other_states()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _is_random(function, args, kwargs):
            return function(*args, **kwargs)
        seed = self.seed
        if not self._are_alike:
            call = repr((seed, function, [a.shape if isinstance(a, Tensor) else a for a in args]))
            self._calls[call] += 1
            seed = zlib.crc32(f"{call}{self._calls[call]}".encode())
        drawn = _drawn(seed, function, args, kwargs)
        shape = next(tensors_in(drawn)).shape
        axis = self._axes[len(self.shapes)] if len(self.shapes) < len(self._axes) else None
        self.shapes.append(shape)
        samples = function.overloadpacket.__name__ in _SAMPLERS
        is_for_each = samples or not _reads_values(function)
        self.is_elsewhere |= not is_for_each
        # a record's values decide how many random numbers a sampler takes for it, and so where
        # those of the next record start
        if (
            axis is None
            or axis >= len(shape)
            or not (samples or (is_for_each and (self._are_alike or self._by_record)))
        ):
            return drawn
        others = (
            self._others if self._others is not None and len(self._others) == shape[axis] else None
        )
        one = [*shape[:axis], 1, *shape[axis + 1 :]]
        for k in range(shape[axis]):
            parts = [
                (
                    a.narrow(axis, k, 1)
                    if isinstance(a, Tensor)
                    and a.dim() == len(shape)
                    and a.shape[axis] == shape[axis]
                    else one
                    if isinstance(a, list) and a == list(shape)
                    else a
                )
                for a in args
            ]
            is_other = others is not None and bool(others[k])
            part = _drawn(
                seed if self._are_alike else seed + k + _OTHER_SEEDS * is_other,
                function,
                parts,
                kwargs,
            )
            for whole, slice_ in zip(tensors_in(drawn), tensors_in(part), strict=True):
                if whole.shape == shape and list(slice_.shape) == one:
                    whole.narrow(axis, k, 1).copy_(slice_)
        return drawn


def _is_random(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether the operation draws random numbers; fused attention does with dropout only."""
    if torch.Tag.nondeterministic_seeded not in function.tags:
        return False
    names = [a.name for a in function._schema.arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    given = (
        args[place]
        if len(args) > place
        else kwargs.get("dropout_p", function._schema.arguments[place].default_value)
    )
    return bool(given != 0)


def _reads_values(function: Any) -> bool:
    return "_like" not in function.name() and any(
        isinstance(a.type, torch.TensorType) and not (a.alias_info and a.alias_info.is_write)
        for a in function._schema.arguments
    )


def _drawn(seed: int, function: Any, args: Any, kwargs: Any) -> Any:
    generator = kwargs.get("generator")
    if generator is None:
        # torch.manual_seed notes a stack trace at every call while CUDA is not in use
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)
        return function(*args, **kwargs)
    state = generator.get_state()
    try:
        generator.manual_seed(seed)
        return function(*args, **kwargs)
    finally:
        generator.set_state(state)


def _other_states() -> tuple[Any, ...]:
    """Where the generators of Python and NumPy stand."""
    state: Any = numpy.random.get_state()
    return random.getstate(), state[1].tobytes(), state[2:]


@contextmanager
def _other_generators_left_as_found() -> Iterator[None]:
    python, arrays = random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        numpy.random.set_state(arrays)


def _cuda_devices(module: nn.Module) -> list[torch.device]:
    return list({p.device for p in module.parameters() if p.device.type == "cuda"})
