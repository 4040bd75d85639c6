"""Batches that are read at once, where record by record would give the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate


def can_be_read_at_once(dataset: Any, collate_fn: Callable[[list[Any]], Any]) -> bool:
    """Whether :class:`Batched` gives what ``collate_fn([dataset[i] for i in positions])`` would.

    That is known, with torch's own collate function, of torch's ``TensorDataset``, of memory-mapped
    tensors too, of tables of Hugging Face's ``datasets``, and of ``Subset`` of these.
    """
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return collate_fn is default_collate and (type(dataset) is TensorDataset or _is_table(dataset))


def _is_table(dataset: Any) -> bool:
    return hasattr(dataset, "column_names") and hasattr(dataset, "__getitems__")


def _read(dataset: Any, positions: list[int]) -> Any:
    if isinstance(dataset, Subset):
        return _read(dataset.dataset, [dataset.indices[i] for i in positions])
    if isinstance(dataset, TensorDataset):
        index = torch.from_numpy(np.array(positions))  # torch.tensor takes ten times as long
        return [tensor[index] for tensor in dataset.tensors]
    if getattr(dataset, "format", {}).get("type") == "torch":
        columns = dataset[positions]
        if all(isinstance(c, torch.Tensor) and len(c) == len(positions) for c in columns.values()):
            return columns
    return default_collate(dataset.__getitems__(positions))


class Batched(Dataset[Any]):
    """A data set that can be read at once, for a loader that collates its batches by
    :func:`as_it_is`.

    Args:
        dataset: the records.
        collate_fn: makes the batch without records.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any]) -> None:
        self._dataset, self._collate = dataset, collate_fn

    def __getitems__(self, positions: list[int]) -> Any:
        return _read(self._dataset, positions) if positions else self._collate([])


def as_it_is(batch: Any) -> Any:
    """The collate function of batches that are complete."""
    return batch
