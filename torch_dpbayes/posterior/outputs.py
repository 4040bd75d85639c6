"""The outputs of a model under every posterior sample, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from .. import words
from ..errors import ArgumentError, ArgumentTypeError, DPBayesError, SamplesError, StateError
from ..noise import PrivateRandomness
from ..per_sample.derived import same_values
from ..per_sample.nested import TARGETS, Nested, holds_plain_sequence, named_inputs
from ..per_sample.record_map import RecordMap, without_values

Transform = Callable[[Tensor], Tensor]
Forward = Callable[[nn.Module, Any], Tensor]  # (model, batch) -> output
Inputs = Tensor | Iterable[Any]
Sample = dict[str, Tensor]
Reduce = Callable[[Iterator[Tensor]], Tensor]  # its argument: the outputs of one sample each

_NO_BATCHES = (
    "x must be a tensor whose first dimension is the record (torch.as_tensor of an array), or a"
    " DataLoader; for another kind of batch write [batch]."
)

# size of a tensor's batches: about so many numbers, or at least so many rows
_NUMBERS, _ROWS = 2**16, 256


def evaluate(
    samples: Sequence[Sample],
    model: nn.Module,
    x: Inputs,
    forward: Forward | None,
    reduce: Reduce,
    dim: int = 0,
    *,
    is_alone: bool = False,
) -> Tensor:
    """Apply ``reduce`` to the outputs ``[rows, ...]`` of one sample after another, for each batch,
    and concatenate the results along ``dim``. ``is_alone``: the records are private, so the model
    runs for each record alone.
    """
    if not samples:
        raise StateError(
            "There is no posterior sample yet: call samples.collect(model) after burn-in, before"
            " predicting."
        )
    require_same_buffers(model, None, is_prediction=True)
    batches = _batches(x)
    parameters = dict(model.named_parameters())
    shapes = {name: p.shape for name, p in samples[0].items()}
    # A model may be frozen after training; what was frozen during training cannot be trainable
    # now.
    of_model = {
        name: p.shape for name, p in parameters.items() if p.requires_grad or name in shapes
    }
    if of_model != shapes:
        raise SamplesError(
            "The model's trainable parameters are not those of the samples:"
            f" {difference_of(shapes, of_model)}. Pass the model that was collected, or one built"
            " and frozen like it."
        )
    device = parameters[next(iter(shapes))].device
    called = _Called(model, output_of if forward is None else forward)

    def run(sample: Sample, batch: Any) -> Tensor:
        output = functional_call(called, {f"model.{n}": p for n, p in sample.items()}, (batch,))
        if not isinstance(output, Tensor):
            raise ArgumentTypeError(
                f"The model returned a {type(output).__name__}; predictions need one tensor with"
                " one row per record: pass for example forward=lambda model, x: model(x)[0]."
            )
        tensors = (t for t in pytree.tree_leaves(batch) if isinstance(t, Tensor) and t.dim() > 0)
        return _require_rows(output, len(next(tensors, ())))

    def of_all(batch: Any) -> Iterator[Tensor]:
        for sample in samples:
            on_model = {name: s.to(parameters[name]) for name, s in sample.items()}
            own = _moved(batch, device, copy=True)  # the model may write into it
            yield _each_alone(partial(run, on_model), own) if is_alone else run(on_model, own)

    def reduced_of(batch: Any) -> Tensor:
        # random masks depend on positions, and one added record shifts positions
        with PrivateRandomness()({device}) if is_alone else nullcontext():
            return reduce(of_all(_moved(batch, device)))

    with _evaluation_mode(model), torch.no_grad():
        # a progress bar would show the number of private records
        shown = batches if is_alone else words.shown(batches, "predicting")
        reduced = [*map(reduced_of, shown)]
    if not reduced:
        raise SamplesError("x has no batch: pass a tensor, or a DataLoader that is not empty.")
    return torch.cat(reduced, dim)


def require_same_buffers(
    model: nn.Module, first: dict[str, Tensor] | None, *, is_prediction: bool = False
) -> None:
    """Raise if a buffer or frozen parameter changed since the first private batch or, without one,
    since ``first``, the first call's copy. A prediction checks only buffers of the state_dict.
    """
    own: dict[str, Tensor] | None = getattr(model, "_dpbayes_buffers", None)
    if own is None and first is None:  # nothing is known about loaded samples
        return
    before, since = (first or {}, "the first collect()") if own is None else (own, "training began")
    buffers = dict(model.named_buffers(remove_duplicate=False))
    if is_prediction:
        buffers = {n: b for n, b in buffers.items() if n in before and n in model.state_dict()}
        before = {n: before[n] for n in buffers}
    now = {**dict(model.named_parameters(remove_duplicate=False)), **buffers}
    for name in sorted(before.keys() | buffers.keys()):
        if name not in before or name not in now or not same_values(before[name], now[name]):
            raise ArgumentError(
                f"{name!r} changed since {since} and may hold private records. Use GroupNorm for"
                " BatchNorm (opacus.validators.ModuleValidator.fix). Load public buffers into a"
                " separate network, by load_state_dict.",
                code="model-buffer",
            )


def target_of(batch: Any) -> Tensor:
    """The targets of a batch: the last item, or the entry with a target's name."""
    found = [batch[-1]] if isinstance(batch, (tuple, list)) and len(batch) > 1 else []
    if isinstance(batch, Mapping):
        found = [value for name, value in batch.items() if name in TARGETS]
    if len(found) != 1 or not isinstance(found[0], Tensor):
        raise ArgumentTypeError(
            "a batch must hold one tensor of targets: the last item of a tuple, or one of"
            f" {', '.join(sorted(TARGETS))} in a mapping."
        )
    return found[0]


def of_transformed(transform: Transform | None, reduce: Reduce) -> Reduce:
    """A function that applies ``transform`` to every output, then ``reduce``."""
    if transform is None:
        return reduce
    return lambda found: reduce(_require_rows(transform(o), len(o)) for o in found)


def average(found: Iterator[Tensor]) -> Tensor:
    """The average over samples. Only one of them and the sum are in memory; the sum is in double
    precision, or single on Apple's devices, which have no double.
    """
    first = next(found)
    wide = torch.float32 if first.device.type == "mps" else torch.float64
    total, count = first.to(torch.promote_types(first.dtype, wide)), 1
    for point in found:
        total = total + point
        count += 1
    is_number = first.is_floating_point() or first.is_complex()
    return (total / count).to(first.dtype if is_number else torch.get_default_dtype())


def _require_rows(result: Any, rows: int) -> Tensor:
    if not isinstance(result, Tensor) or result.dim() == 0 or result.shape[0] != rows:
        shape = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise SamplesError(
            f"the output for {rows} records is {shape}: model and transform must return a tensor"
            " with one row per record in its first dimension."
        )
    return result


def difference_of(before: dict[str, torch.Size], now: dict[str, torch.Size]) -> str:
    """The names of parameters in which two models differ."""
    missing = [f"missing {name}" for name in before if name not in now]
    added = [f"added {name}" for name in now if name not in before]
    changed = [
        f"{name} was {list(before[name])} and is {list(now[name])}"
        for name in before
        if before[name] != now.get(name, before[name])
    ]
    return "; ".join(missing[:3] + added[:3] + changed[:3])


class _Called(nn.Module):
    """A model and the function that calls it, as one module for ``functional_call``."""

    def __init__(self, model: nn.Module, call: Forward) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, batch: Any) -> Tensor:
        return self.call(self.model, batch)


def _batches(x: Inputs) -> Iterable[Any]:
    if isinstance(x, Tensor) and x.dim() > 0:
        return x.split(max(_ROWS, _NUMBERS // max(1, x[:1].numel())))
    if hasattr(x, "sampler_of_draws"):
        raise ArgumentTypeError(
            "x is a private loader, which draws records at random for one step each: pass"
            " DataLoader(dataset, batch_size=256)."
        )
    is_array = isinstance(x, np.ndarray) or hasattr(x, "to_numpy")
    if is_array or isinstance(x, (Tensor, Mapping)) or not isinstance(x, Iterable):
        raise ArgumentTypeError(_NO_BATCHES)
    return x


def output_of(model: nn.Module, batch: Any) -> Any:
    """The model's output, or its ``logits``, as Hugging Face's models return them."""
    inputs: Sequence[Any] = [batch]
    named: Mapping[str, Any] = {}
    if isinstance(batch, Mapping):
        inputs = []
        named = named_inputs(model, {k: v for k, v in batch.items() if k not in TARGETS})
        if not named:
            raise ArgumentTypeError(
                f"the model accepts none of {', '.join(map(str, batch))} by name: pass"
                ' forward=lambda model, batch: model(batch["..."]).'
            )
    elif isinstance(batch, (tuple, list)):
        inputs = batch[:-1] if len(batch) > 1 else batch
    output = model(*inputs, **named)
    return getattr(output, "logits", output)


def _moved(batch: Any, device: torch.device, *, copy: bool = False) -> Any:
    batch = dict(batch) if isinstance(batch, Mapping) else batch
    if not any(isinstance(t, Tensor) for t in pytree.tree_leaves(batch)):
        raise ArgumentTypeError(_NO_BATCHES)
    return pytree.tree_map(lambda t: t.to(device, copy=copy) if isinstance(t, Tensor) else t, batch)


def _each_alone(function: Callable[[Any], Tensor], batch: Any) -> Tensor:
    """Apply ``function`` to every record as a batch of one. Errors do not show a record's
    values.
    """
    given = Nested(batch)
    columns = given.tensors
    if given.strangers or holds_plain_sequence(batch) or not all(t.dim() for t in columns):
        raise SamplesError(
            "a batch has an entry for all records together, such as texts or one number: return"
            " tensors with one row per record."
        )
    records, rows = RecordMap(len(columns[0])), [t.unsqueeze(1) for t in columns]
    try:
        (found,) = records(lambda slices: [function(given.rebuilt(slices))[0]], rows)
    except DPBayesError:
        raise
    except Exception as error:
        raise SamplesError(
            f"the model cannot run for one record at a time: {without_values(error)}."
        ) from None
    if records.kept():
        raise SamplesError("the forward pass stores a tensor of a record: return it instead.")
    return found


def synthetic_like(batch: Any) -> Any:
    """One record of zeros, with the shapes and dtypes of a batch."""
    return pytree.tree_map(
        lambda t: torch.zeros_like(t[:1]) if isinstance(t, Tensor) and t.dim() else t, batch
    )


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training
