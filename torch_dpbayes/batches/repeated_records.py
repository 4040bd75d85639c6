"""Records that stand in a data set several times, as far as torch's own wrappers show it."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Subset

from ..errors import ArgumentError

_Numbers = np.ndarray[Any, np.dtype[np.int64]]
_REPEATED = (
    "the data set holds some records several times, by a Subset or a ConcatDataset: epsilon would"
    " be that of one copy. Keep each once, or pass people=, the id of each record's person."
)


def require_each_once(dataset: Any) -> None:
    """Raise if a ``Subset`` or ``ConcatDataset`` repeats records of one data set.

    Copies that were made in another way (the same file read twice, repeated rows of a tensor)
    cannot be told from other records.
    """
    kept, subsets = _parts(dataset)
    if len(set(map(id, kept))) == len(kept) and not any(map(_may_repeat, subsets)):
        return  # without a number for each of 10⁹ records
    owners, places = _origins(dataset, {})
    for owner in np.unique(owners):
        own = np.sort(places[owners == owner])
        if (own[1:] == own[:-1]).any():
            raise ArgumentError(_REPEATED, code="loader-repeats")


def _parts(dataset: Any) -> tuple[list[Any], list[Any]]:
    """Data sets that are no wrappers, as often as they are met, and the subsets around them."""
    if type(dataset) is Subset:
        kept, subsets = _parts(dataset.dataset)
        return kept, [dataset, *subsets]
    if type(dataset) is ConcatDataset:
        met = [_parts(part) for part in dataset.datasets]
        return [d for kept, _ in met for d in kept], [s for _, subsets in met for s in subsets]
    return [dataset], []


def _may_repeat(subset: Any) -> bool:
    if type(subset.indices) is range and subset.indices.start >= 0 <= subset.indices.stop:
        return False
    chosen = np.asarray(subset.indices, dtype=np.int64)
    return bool((chosen < 0).any()) or len(np.unique(chosen)) < chosen.size


def _origins(dataset: Any, known: dict[int, int]) -> tuple[_Numbers, _Numbers]:
    """For each record, which data set that is no wrapper holds it, and where.

    Args:
        dataset: the records.
        known: numbers of data sets by their identity, to which new ones are added.
    """
    if type(dataset) is Subset:
        owners, places = _origins(dataset.dataset, known)
        chosen = np.asarray(dataset.indices, dtype=np.int64).reshape(-1)
        return owners[chosen], places[chosen]
    if type(dataset) is ConcatDataset:
        parts = [_origins(part, known) for part in dataset.datasets]
        owners, places = (np.concatenate(numbers) for numbers in zip(*parts, strict=True))
        return owners, places
    number, size = known.setdefault(id(dataset), len(known)), len(dataset)
    return np.full(size, number, dtype=np.int64), np.arange(size, dtype=np.int64)
