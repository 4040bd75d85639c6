"""What the modules of a model take and give for each record, and whether two runs agree in it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ..clipping.nested import tensors_in
from .findings import OF_NUMBER, OF_OTHERS, MixedRecordsError
from .gradient_hooks import HOOKED, HookWatch
from .made_up_records import output_of, rows_in
from .precision import FLOAT32
from .seeded_draws import SeededDraws

ALONE = "Compute what it needs from each record alone, or from public data before training."
_TIME_FIRST = (
    "It takes dimension 0, which is that of the records, for time: build it with batch_first=True,"
    " or transpose its input and output."
)
_ENTRIES = 1024  # of what a layer takes or gives, compared for each record
# of a layer in one pass that are compared: cells of recurrent layers have one for each position
_CALLS = 8

# module, which of its calls, whether it is an output, place among the tensors
_Key = tuple[str, int, bool, int]
_Room = Callable[[Tensor, Tensor], Tensor]  # for rounding, of each number


@dataclass
class Forward:
    """One run of the model: its output and, for each record, what its modules took and gave."""

    outputs: list[Tensor] = field(default_factory=list)
    # in the order in which modules finish
    notes: dict[_Key, list[Tensor]] = field(default_factory=dict)
    shapes: dict[_Key, torch.Size] = field(default_factory=dict)


def run(
    module: nn.Module,
    arguments: tuple[Any, ...],
    draws: SeededDraws,
    alone: Forward | None = None,
) -> Forward:
    """Run, and note what modules take and give: whole where ``alone``, the run of one record,
    is None, otherwise by record.
    """
    found = Forward()
    rows = len(next(rows_in(arguments), ()))
    calls: Counter[str] = Counter()

    def note(name: str, given: Any, output: Any) -> None:
        calls[name] += 1
        if calls[name] > _CALLS:
            return
        # what follows is not the model's: the modes that watch that cost more than all of it
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            keep(name, given, output)

    def keep(name: str, given: Any, output: Any) -> None:
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
                    and (axis := record_axis(alone.notes[key][0].shape, t.shape, rows)) is not None
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
            found.outputs = [t.detach() for t in tensors_in(output_of(module, arguments))]
    finally:
        for handle in handles:
            handle.remove()
        if watch.found is not None:
            where = f"the forward pass of {type(module).__name__!r}"
            raise MixedRecordsError(HOOKED.format(where, f"Tensor.{watch.found}"))
    return found


def expected_of(single: Forward, together: Forward, rows: int) -> Forward:
    """What a batch of ``rows`` records that are all the ``single`` one would give, as far as
    ``together``, a batch of as many, shows it.
    """
    expected = Forward(
        [t.expand(rows, *t.shape[1:]) for t in single.outputs], shapes=together.shapes
    )
    for key in together.notes.keys() & single.notes.keys():
        whole = single.notes[key][0]
        axis = record_axis(whole.shape, together.shapes[key], rows)
        if axis is not None:
            expected.notes[key] = [note.expand(rows, -1) for note in _by_record(whole, axis, 1)]
    return expected


def record_axis(one: Sequence[int], several: Sequence[int], rows: int) -> int | None:
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


def require_same(
    module: nn.Module,
    first: Forward,
    second: Forward,
    keep: Tensor,
    rounding: float | None = None,
    *,
    are_copies: bool = False,
) -> None:
    """Raise, and say where, unless the records in ``keep`` fare the same in both runs: ``rounding``
    and ``are_copies`` as of :func:`same_rows`.
    """
    room = partial(_room, rounding=rounding, are_copies=are_copies)
    on_what = OF_OTHERS if rounding is None else OF_NUMBER
    where, fix = f"the forward pass of {type(module).__name__!r}", ALONE
    for key, notes in first.notes.items():
        others = second.notes.get(key, [])
        # another way through the model, which its output decides upon
        if len(notes) != len(others) or first.shapes[key] != second.shapes[key]:
            continue
        name, _, is_output, _ = key
        pairs = list(zip(notes, others, strict=True))
        if any(_same_there(a, b, keep, room) for a, b in pairs):
            continue
        layer = module.get_submodule(name)
        if any(_same_somewhere(a, b, keep, room) for a, b in pairs):
            if not _is_trained(layer):
                continue
            raise MixedRecordsError(
                f"module {name!r} sees rows in another order than the model, or mixed ones, so that"
                f" gradients depend on {on_what}: leave the rows in their places, and use a mask."
            )
        if not is_output:
            owner = name.rpartition(".")[0] or type(module).__name__
            where = f"the forward pass of {owner!r}, before module {name!r},"
        else:
            where = f"module {name!r}"
            if any(getattr(part, "batch_first", None) is False for part in layer.modules()):
                fix = _TIME_FIRST
        break
    else:
        if _same(first.outputs, second.outputs, keep, room):
            return
    raise MixedRecordsError(f"{where} makes a record's output depend on {on_what}. {fix}")


def same_outputs(first: list[Tensor], second: list[Tensor], rounding: float = FLOAT32) -> bool:
    """Whether all records come out the same: ``rounding`` as of :func:`same_rows`."""
    return _same(first, second, slice(None), partial(_room, rounding=rounding))


def _same(first: list[Tensor], second: list[Tensor], keep: Tensor | slice, room: _Room) -> bool:
    return len(first) == len(second) and all(
        s.shape == t.shape and _same_there(s.reshape(len(s), -1), t.reshape(len(t), -1), keep, room)
        for s, t in zip(first, second, strict=True)
    )


def are_finite(outputs: Sequence[Tensor]) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in outputs if t.is_floating_point())


def _is_trained(layer: nn.Module) -> bool:
    return any(p is not None and p.requires_grad for p in layer._parameters.values())


def _same_there(a: Tensor, b: Tensor, keep: Tensor | slice, room: _Room) -> bool:
    return torch.equal(a[keep], b[keep]) or bool(_within(a, b, room(a, b))[keep].all())


def _same_somewhere(a: Tensor, b: Tensor, keep: Tensor, room: _Room) -> bool:
    """Whether as many rows are the same as are kept: a layer without trainable parameters may
    take records in another order.
    """
    found = (_within(row, b, own).any() for row, own in zip(a, room(a, b), strict=True))
    return sum(map(bool, found)) >= int(keep.sum())


def same_rows(
    a: Tensor, b: Tensor, rounding: float | None = None, *, are_copies: bool = False
) -> Tensor:
    """For each record whether its row is the same.

    Args:
        a, b: ``[records, numbers]``.
        rounding: ε of the type that batches of several sizes were computed in, which run other
            kernels. None: of one size, which run the same ones, to the bit in whatever type.
        are_copies: the records of ``a`` are equal, so that they are apart by rounding alone.
    """
    if torch.equal(a, b):
        return torch.ones(len(a), dtype=torch.bool, device=a.device)
    return _within(a, b, _room(a, b, rounding, are_copies=are_copies))


def _within(a: Tensor, b: Tensor, room: Tensor) -> Tensor:
    return ((a == b) | (a.isnan() & b.isnan()) | ((a.double() - b.double()).abs() <= room)).all(-1)


def _room(
    a: Tensor, b: Tensor, rounding: float | None = None, *, are_copies: bool = False
) -> Tensor:
    """By how much each number of ``a`` may differ in the same row: arguments as there."""
    first, second = (t.double().nan_to_num(0.0, 0.0, 0.0) for t in (a, b))
    numbers = first.abs()
    if rounding is None:
        own, spread = ((t - t.mean(0)).abs().mean(0) for t in (first, second))
        if not are_copies:
            spread = torch.minimum(own, spread)
        # a number is rounded by what cancels in it: of most records that is what is left of it
        return 16 * FLOAT32 * torch.maximum(numbers, numbers.mean(0)) + 1e-4 * spread
    of_each, of_largest = max(1e-3, rounding), max(1e-4, 4 * rounding)
    largest = numbers.amax(1, keepdim=True)
    if rounding > FLOAT32:
        # where all that a record puts out cancels, a few digits leave no small number exact
        largest = largest.clamp(min=largest.median())
    return of_each * numbers + 1e-5 + of_largest * largest
