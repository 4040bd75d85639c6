"""Does the collate function mix records? It is run on synthetic ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from ..errors import ArgumentError
from ..per_sample.nested import tensors_in

_ROWS = (5, 7)  # a tensor that has as many rows as there are records, in both, has one for each
_KEPT = 2  # records that stay while all others are exchanged
_SEEDS = 8  # in a random order a record may be its own partner
_TOLERANCE = 1e-4  # of sums in another order
_MIXES = (
    "collate_fn makes something else of a record when the others in the batch change, as mixup and"
    " standardising a batch do. Work on each record alone, in the data set's __getitem__."
)


def check_collate(dataset: Any, collate_fn: Callable[[list[Any]], Any]) -> None:
    """Raise if what ``collate_fn`` makes of a record depends on the values of the others.

    All records have the shapes of the first, so padding to the longest one is not looked at;
    neither are strings and other objects, which are those of the first. A function that fails on
    synthetic records is not tested, and neither is what comes out differently each time.
    """
    if collate_fn is default_collate or len(dataset) == 0:
        return
    record = dataset[0]
    for seed in range(_SEEDS):
        by_rows = [_collated(collate_fn, record, rows, seed) for rows in _ROWS]
        if len({len(run) for runs in by_rows for run in runs}) != 1:
            return  # it failed, or hands out a changing number of tensors
        for few, many in zip(*map(_by_tensor, by_rows), strict=True):
            if _has_rows(few, _ROWS[0]) and _has_rows(many, _ROWS[1]):
                if _is_moved(*few) or _is_moved(*many):
                    raise ArgumentError(_MIXES, code="loader-collate")


def _collated(
    collate_fn: Callable[[list[Any]], Any], record: Any, rows: int, seed: int
) -> list[list[Tensor]]:
    """Tensors of a batch, of the same again, and of one in which the last records are others."""
    runs = list[list[Tensor]]()
    for others in (1, 1, 2):
        records = [
            _synthetic(record, 100 * seed + 3 * k + (others if k >= _KEPT else 0))
            for k in range(rows)
        ]
        with _seeded(seed):
            try:
                runs.append(list(tensors_in(collate_fn(records))))
            except Exception:
                runs.append([])
    return runs


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """The generators of torch, Python and NumPy, which are left as they were."""
    before, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            yield
    finally:
        random.setstate(before)
        np.random.set_state(of_numpy)


def _by_tensor(runs: list[list[Tensor]]) -> list[tuple[Tensor, Tensor, Tensor]]:
    first, again, changed = runs
    return list(zip(first, again, changed, strict=True))


def _has_rows(runs: tuple[Tensor, Tensor, Tensor], rows: int) -> bool:
    return len({t.shape for t in runs}) == 1 and runs[0].dim() > 0 and len(runs[0]) == rows


def _is_moved(first: Tensor, again: Tensor, changed: Tensor) -> bool:
    kept, same, moved = (t[:_KEPT].double().nan_to_num() for t in (first, again, changed))
    is_repeatable = torch.equal(kept, same)
    return is_repeatable and not torch.allclose(kept, moved, _TOLERANCE, _TOLERANCE)


def _synthetic(record: Any, seed: int) -> Any:
    return pytree.tree_map(partial(_like, generator=torch.Generator().manual_seed(seed)), record)


def _like(value: Any, generator: torch.Generator) -> Any:
    """Numbers of the same shape and type: parts of one, or labels of two classes."""
    if isinstance(value, Tensor):
        uniform = torch.rand(value.shape, generator=generator)
        return (uniform if value.is_floating_point() else uniform < 0.5).to(value.dtype)
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        return _like(torch.from_numpy(np.zeros(value.shape, value.dtype)), generator).numpy()
    if isinstance(value, (bool, int, float, np.number, np.bool_)):
        number = float(torch.rand((), generator=generator))
        as_given: Any = type(value)
        return as_given(number if isinstance(value, (float, np.floating)) else round(number))
    return value
