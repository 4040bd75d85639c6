"""Inspect the data set of a private loader: read batches at once, find repeated records, recognise
private data sets, and compare data sets between ranks.
"""

from __future__ import annotations

import contextlib
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import zip_longest
from numbers import Number
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from opacus.data_loader import DPDataLoader
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, StackDataset, Subset, TensorDataset

from ..errors import ArgumentError, StateError
from ..noise import digest, seeded
from ..per_sample.derived import OF_DATA_SET, is_private
from ..per_sample.nested import tensors_in

_Positions = range | NDArray[np.int64]

_REPEATED = (
    "the data set contains some records more than once (Subset, ConcatDataset or list), but epsilon"
    " would protect one copy. Keep each record once, or pass user_ids=, the id of each record's"
    " user."
)
_LOOKED_AT = 64  # compared records of a data set, evenly spaced from first to last
# A data set is registered as long as it exists. A list, which allows no weak reference, is
# registered as long as a loader of it exists.
_private_data: WeakValueDictionary[int, Any] = WeakValueDictionary()
_private_loaders: WeakSet[DataLoader[Any]] = WeakSet()


class BatchedDataset(Dataset[Any]):
    """Reads a batch at once if :meth:`fits`, else record by record, for a loader that collates by
    :func:`unchanged`. ``collate_fn`` collates batches that are read record by record, and empty
    ones.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any]) -> None:
        self._dataset, self._collate = dataset, collate_fn
        self._is_at_once = self.fits(dataset)

    @staticmethod
    def fits(dataset: Any) -> bool:
        """Whether a batch read at once equals ``default_collate`` of its records: for torch's
        ``TensorDataset`` of plain tensors, for tables of Hugging Face's ``datasets``, and for a
        ``Subset`` of these.
        """
        while type(dataset) is Subset:
            dataset = dataset.dataset
        if type(dataset) is TensorDataset:
            return all(type(tensor) is Tensor for tensor in dataset.tensors)
        return _is_table(dataset)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, positions: list[int]) -> Any:
        dataset = self._dataset
        if self._is_at_once and not self.fits(dataset):  # its random numbers would not be secret
            raise StateError(
                "the data set got a transform, or tensors of another class, after it was made"
                " private: call make_private again.",
                code="data-changed",
            )
        while type(dataset) is Subset:
            positions = [dataset.indices[i] for i in positions]
            dataset = dataset.dataset
        if positions and type(dataset) is TensorDataset:
            index = torch.from_numpy(np.array(positions))  # torch.tensor is ten times as slow
            return [tensor[index] for tensor in dataset.tensors]
        if not positions or not _is_table(dataset):
            return self._collate([dataset[i] for i in positions])
        if dataset.format["type"] == "torch":
            columns = dataset[positions]
            if all(isinstance(c, Tensor) and len(c) == len(positions) for c in columns.values()):
                return columns
        return self._collate(dataset.__getitems__(positions))


def unchanged(batch: Any) -> Any:
    """The collate function for batches that are already collated."""
    return batch


def _is_table(dataset: Any) -> bool:
    """Whether this is a table of Hugging Face's ``datasets`` without a transform (which would see
    whole batches).
    """
    is_theirs = type(dataset).__module__ == "datasets.arrow_dataset"
    return is_theirs and dataset.format["type"] != "custom"


def reads_whole_batches(dataset: Any) -> bool:
    """Whether the user's own ``__getitems__`` would read all records of a batch and could mix them.
    Torch calls it if it exists.
    """
    while type(dataset) is Subset:
        dataset = dataset.dataset
    if type(dataset) is StackDataset:
        return any(map(reads_whole_batches, _parts(dataset)))
    return bool(getattr(dataset, "__getitems__", None)) and not _is_table(dataset)


def _parts(dataset: Any) -> list[Any]:
    """The parts of a ``ConcatDataset`` or a ``StackDataset``."""
    parts = dataset.datasets if isinstance(dataset, ConcatDataset | StackDataset) else ()
    return list(parts.values() if isinstance(parts, dict) else parts)


def require_no_repeats(dataset: Any) -> None:
    """Raise if a ``Subset`` or ``ConcatDataset`` repeats records of a data set, or a list repeats
    an object. Other copies, such as equal rows of a tensor, are not found.
    """
    found = defaultdict[Any, list[_Positions]](list)
    for leaf, positions in _leaves(dataset, None):
        found[leaf].append(positions)
    for parts in found.values():
        if len(parts) == 1 and type(parts[0]) is range:  # saves an array of up to 10⁹ positions
            continue
        together = np.sort(np.concatenate([np.asarray(part) for part in parts]))
        if (together[1:] == together[:-1]).any():
            raise ArgumentError(_REPEATED, code="loader-repeats")


def require_each_once(dataset: Any, positions: list[int]) -> None:
    """The same for the records of one batch: a ``Subset`` or a list may change during a pass."""
    found: list[Any] = positions
    while type(dataset) is Subset:
        at, dataset = dataset.indices, dataset.dataset
        found = [int(at[i]) % len(dataset) for i in found]
    if type(dataset) is list and found and not isinstance(dataset[found[0]], Number | str | None):
        found = [id(dataset[i]) for i in found]
    if found is not positions and len(set(found)) < len(found):
        raise ArgumentError(_REPEATED, code="loader-repeats")


class Arrangement:
    """The order of the records in a data set, as far as it can be seen: the positions of a
    ``Subset``, the items of a list, the tensors of a ``TensorDataset`` and how often torch wrote
    into them, and the identity of any other data set. Equal as long as none of these changes.
    """

    def __init__(self, dataset: Any) -> None:
        self._values: list[Any] = []
        self.objects: list[Any] = []  # references, so that no new object gets the same identity
        self._look_at(dataset)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Arrangement) or self._values != other._values:
            return False
        return all(map(operator.is_, self.objects, other.objects))

    def _look_at(self, dataset: Any) -> None:
        self._values.append(len(dataset))
        if isinstance(dataset, Subset):
            at: Any = dataset.indices
            is_known = isinstance(at, list | range)  # comparing these is several times as fast
            self._values.append(at[:] if is_known else np.asarray(at).tobytes())
            self._look_at(dataset.dataset)
        elif isinstance(dataset, ConcatDataset | StackDataset):
            for part in _parts(dataset):
                self._look_at(part)
        elif isinstance(dataset, list):
            self.objects += dataset
        else:
            parts = dataset.tensors if isinstance(dataset, TensorDataset) else (dataset,)
            self._values += map(writes_into, parts)
            self.objects += parts


def writes_into(value: Any) -> int:
    """How often torch wrote into a tensor."""
    is_counted = isinstance(value, Tensor) and not value.is_inference()
    return value._version if is_counted else 0


def _leaves(dataset: Any, chosen: _Positions | None) -> Iterator[tuple[Any, _Positions]]:
    """Identities of the data sets that contain these records (None: all), and the positions there;
    for a list of records the identities of the records.
    """
    if isinstance(dataset, ConcatDataset):
        start = 0
        for part in dataset.datasets:
            size: int = len(part)  # type: ignore[arg-type]
            end, inside = start + size, None
            if chosen is not None:
                places = np.asarray(chosen)
                inside = places[(start <= places) & (places < end)] - start
            yield from _leaves(part, inside)
            start = end
    elif isinstance(dataset, StackDataset):  # a record has the same position in each part
        for k, part in enumerate(_parts(dataset)):
            # positions, not identities: equal labels may be one object
            known: Any = range(len(part)) if type(part) is list else part
            yield from (((k, leaf), at) for leaf, at in _leaves(known, chosen))
    elif isinstance(dataset, Subset):
        below: Any = dataset.indices
        whole: Any = dataset.dataset
        if chosen is not None or type(below) is not range or min(below.start, below.stop) < 0:
            below = np.asarray(below, dtype=np.int64).reshape(-1) % max(len(whole), 1)
            below = below if chosen is None else below[np.asarray(chosen)]
        yield from _leaves(whole, below)
    else:
        at: Any = range(len(dataset)) if chosen is None else chosen
        # equal numbers and texts may be one object
        if type(dataset) is list and not isinstance((*dataset, 0)[0], Number | str | None):
            yield list, np.array([id(dataset[i]) for i in at], dtype=np.int64)
        else:
            parts = dataset.tensors if type(dataset) is TensorDataset else [dataset]
            yield (*map(id, parts),), at


def register_private(loader: DataLoader[Any]) -> None:
    """Register the loader, its data set, and the data set's tensors as private: of its attributes
    those with a row for each record; of a list those of the first record, which may be views of
    all.
    """
    _private_loaders.add(loader)
    found = Arrangement(loader.dataset).objects
    found += tensors_in(found[:1])
    parts: list[Any] = [part for part in found if isinstance(part, Dataset)]
    for part in parts:
        own = getattr(part, "__dict__", {}).values()
        found += [t for t in own if isinstance(t, Tensor) and t.shape[:1] == (len(part),)]
    for part in found:
        if isinstance(part, Tensor) and part.layout is torch.strided:
            setattr(part.untyped_storage(), OF_DATA_SET, True)
    with contextlib.suppress(TypeError):
        _private_data[id(loader.dataset)] = loader.dataset


def reads_private_data(loader: Any) -> bool:
    """Whether this is a private loader; or a loader whose data set has records in common with that
    of a private loader; or a tensor, or a part of one, in such a data set.
    """
    if isinstance(loader, Tensor):
        return is_private(loader)
    if isinstance(loader, DPDataLoader) or _private_data.get(id(loader)) is loader:
        return True
    if any(loader is private.dataset for private in _private_loaders):
        return True
    below = [getattr(loader, "dataset", None), *_parts(loader)]
    below += loader.tensors if isinstance(loader, TensorDataset) else ()
    return any(reads_private_data(part) for part in below if part is not None)


def records_digests(dataset: Any, collate: Callable[[list[Any]], Any]) -> list[str]:
    """Digests of up to 64 records, in order: one for each tensor of a record, and for its shape.
    Records are read twice under one seed; a digest is an empty text if the values differ.

    If ranks had the same records in different orders, they would use some records twice.

    Raises:
        ValueError: the values that stay the same are equal for all records.
    """
    last = _LOOKED_AT - 1
    positions = sorted({round(i * (len(dataset) - 1) / last) for i in range(_LOOKED_AT)})

    def look() -> list[tuple[str, ...]]:
        found = []
        with seeded(0):
            for i in positions:
                tensors = list(tensors_in(collate([dataset[i]])))
                shapes = [repr((t.dtype, tuple(t.shape))) for t in tensors]
                found.append([*shapes, *(digest([t]).hex() for t in tensors)])
        return list(zip_longest(*found, fillvalue=""))

    looks = list(zip_longest(look(), look()))
    lasting = [first for first, second in looks if first == second]
    if len(lasting) < len(looks) and all(len(set(part)) == 1 for part in lasting):
        raise ArgumentError(
            "records change each time they are read, so ranks cannot compare them: draw random"
            " numbers from torch's, NumPy's or Python's global generator, or return a label with"
            " every record."
        )
    return [digest(first).hex() if first == second else "" for first, second in looks]
