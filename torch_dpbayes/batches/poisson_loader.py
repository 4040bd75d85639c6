"""A loader that delivers the draws of a sampler, and calls the user's collate function with each
record alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

import torch
from opacus.data_loader import DPDataLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from ..distributed import Ranks
from ..errors import ArgumentError, StateError
from ..noise import OF_RECORDS, PrivateRandomness, seed_worker, seeded
from ..per_sample.derived import Derived, as_plain
from ..per_sample.nested import leaves_in, map_tensors, nesting_of, tensors_in
from ..processes import this_process
from .datasets import (
    BatchedDataset,
    reads_whole_batches,
    register_private,
    require_no_repeats,
    unchanged,
    writes_into,
)
from .sampler import PoissonSampler

_ROWS = 256  # batch size of a loader of all records
_TAKEN_OVER = (
    "num_workers pin_memory timeout worker_init_fn multiprocessing_context prefetch_factor"
    " persistent_workers"
).split()
_PLAIN = ("builtins", "collections")  # modules of containers that do not mix records
_FIELDS = "records have different fields: put a number in place of missing values"
_SHAPES = "records have different shapes: pad them in the data set to one public length"


class _DeliveringCollate:
    """A collate function of the main process. It delivers the parts of a draw that Opacus'
    BatchMemoryManager makes. The loader delivers all other batches.
    """

    def __init__(
        self,
        collate_fn: Callable[[list[Any]], Any],
        sampler: PoissonSampler,
        private_numbers: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.wrapped_collator_fn, self._sampler = collate_fn, sampler
        self._private_numbers, self._reading = private_numbers, ExitStack()
        sampler.before_part = self._begin

    def _begin(self) -> None:
        """Called before the records of a part are read."""
        self._reading.close()  # an earlier part whose records could not be read
        self._reading.enter_context(self._private_numbers())

    def __call__(self, records: list[Any]) -> Any:
        is_part = self._sampler.takes_part(len(records))
        try:
            batch, deliver = self.wrapped_collator_fn(records), self._sampler.delivery
        finally:
            self._reading.close()
        return deliver(batch, len(records)) if is_part and deliver is not None else batch


class _WorkerInit:
    """Seed a worker's random numbers, then run the user's ``worker_init_fn``."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self.then = then

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None
        seed_worker(info.seed)
        if self.then is not None:
            self.then(worker_id)


def _refuse(_: PoissonLoader, value: Any) -> None:
    raise StateError(
        "a private loader cannot be changed: pass another DataLoader(..., collate_fn=f) to"
        " make_private"
    )


class PoissonLoader(DPDataLoader):
    """Delivers the batches of a :class:`PoissonSampler`, or of a sampler with another scheme.

    A batch waits until a step is taken on it. A new pass, also ``next(iter(loader))``, begins with
    the waiting batches. So looking at batches changes nothing, and after a ``break`` the next pass
    continues.

    Args:
        data_loader: the user's loader. Its data set, collate function and worker settings are used;
            a collate function other than torch's own is called for each record alone.
        sample_rate: q in (0, 1].
        ranks: the ranks that share the draws; None: a single process.
        draws: the class of the sampler, or a function that makes one.

    **Privacy.** Nothing is released, but the batches are private data. Draws use the generator of
    ``data_loader`` if it has one (keep its seed as secret as that of the noise), else fresh entropy
    from the operating system, in each forked process and each copy. The number of steps, and their
    lr, must not depend on the contents of batches.
    """

    def __init__(
        self,
        data_loader: DataLoader[Any],
        sample_rate: float,
        ranks: Ranks | None = None,
        draws: Callable[..., PoissonSampler] = PoissonSampler,
    ) -> None:
        dataset: Any = data_loader.dataset
        generator = data_loader.generator
        if isinstance(data_loader, PoissonLoader):
            before = data_loader.sampler_of_draws
            if ranks is None and before.ranks is not None:
                raise ArgumentError(
                    "several ranks share this loader's draws, but this call uses only one: make the"
                    " loader in one process",
                    code="ranks-alone",
                )
            if before.generator is not None:
                before.require_own_process()
                generator = before.generator
        record = dataset[0]
        self.recordwise = collate_fn = RecordwiseCollate(users_collate(data_loader), [record])
        if not BatchedDataset.fits(dataset):
            require_own_memory(dataset, record, self.recordwise)
        sampler = draws(len(dataset), sample_rate, generator, data_loader.num_workers, ranks)
        settings: dict[str, Any] = {name: getattr(data_loader, name) for name in _TAKEN_OVER}
        settings["batch_sampler"] = sampler
        self._aside: PoissonLoader | None = None
        self._batched: DataLoader[Any] | None = None  # reads each batch at once
        then = getattr(data_loader.worker_init_fn, "then", data_loader.worker_init_fn)
        # not with a worker_init_fn, which may access the user's data set
        is_at_once = then is None and self.recordwise.is_torchs and BatchedDataset.fits(dataset)
        is_alone = reads_whole_batches(dataset)
        # The context for reading records. Augmentations are drawn one after another, so an added
        # record changes those of others, and anyone who knows the program's seeds could see this.
        # Torch's own code, which reads a batch at once, draws no random numbers.
        self._private_numbers: Callable[[], AbstractContextManager[None]] = nullcontext
        if not is_at_once:
            kinds: list[torch.device | str] = [t.device for t in tensors_in(collate_fn([record]))]
            kinds += OF_RECORDS
            rank = 0 if ranks is None else ranks.rank
            self._private_numbers = partial(PrivateRandomness(sampler.generator, rank), kinds)
        if data_loader.num_workers > 0:
            settings["worker_init_fn"] = then if is_at_once else _WorkerInit(then)
        if is_alone or is_at_once:
            batched = BatchedDataset(dataset, collate_fn)
            self._batched = DataLoader(batched, collate_fn=unchanged, **settings)
        if data_loader.num_workers == 0 and not is_alone:
            settings["collate_fn"] = _DeliveringCollate(collate_fn, sampler, self._private_numbers)
        # num_workers is read-only here, and torch's __init__ would set it
        self.__setstate__(vars(DataLoader(dataset, **{"collate_fn": collate_fn, **settings})))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.sampler_of_draws.watch(self.dataset)
        register_private(self)

    def __repr__(self) -> str:
        sampler = self.sampler_of_draws
        number, what = sampler.drawn
        shared = "" if sampler.ranks is None else f", shared by {sampler.ranks.size} ranks"
        return (
            f"{type(self).__name__}({sampler.batches}: {number} {what}, each in a"
            f" batch with probability {self.sample_rate:.6g}: {self.expected_batch_size:.6g} on"
            f" average, {len(self)} batches a pass{shared})"
        )

    # Read-only: steps are charged for the rate, parts of a draw need the main process, and only
    # this collate function separates records.
    num_workers = property(lambda self: self.__dict__["num_workers"], _refuse)
    collate_fn = property(lambda self: self.__dict__["collate_fn"], _refuse)
    sample_rate = property(lambda self: self.sampler_of_draws.sample_rate, _refuse)
    expected_batch_size = property(
        lambda self: self.sample_rate * self.sampler_of_draws.counted_records
    )

    # keeps track of draws and deliveries
    sampler_of_draws: PoissonSampler = property(attrgetter("batch_sampler"))  # type: ignore[assignment]

    def aside(self) -> PoissonLoader:
        """A second loader with separate draws, always the same; it repeats draws without a step."""
        if self._aside is None:
            self._aside = PoissonLoader(self, self.sample_rate)
        return self._aside

    @staticmethod
    def every_record(loader: DataLoader[Any]) -> Iterable[Any]:
        """All records of a loader, once and in order; each record is collated alone."""
        dataset: Any = getattr(loader, "dataset", None)
        if not isinstance(loader, DataLoader) or isinstance(dataset, IterableDataset):
            raise ArgumentError(
                "each record must be read exactly once: pass a torch.utils.data.DataLoader over a"
                " map-style data set (__len__ and __getitem__)",
                code="loader-iterable",
            )
        require_no_repeats(dataset)
        collate: Any = RecordwiseCollate(users_collate(loader))
        if reads_whole_batches(dataset):
            dataset, collate = BatchedDataset(dataset, collate), unchanged
        return _EveryRecord(dataset, batch_size=_ROWS, collate_fn=collate)

    def num_charges(self, epochs: int) -> int:
        """The number of charges for so many passes."""
        return epochs * len(self) // self.sampler_of_draws.steps_per_charge

    def __iter__(self) -> Iterator[Any]:
        sampler, this, process = self.sampler_of_draws, 0, this_process()
        if self.num_workers > 0:  # in torch's loop an error would close workers' pipes twice
            sampler.look_at_data()
        for batch in self._read():
            if self.num_workers > 0 and this_process() != process:
                raise StateError(
                    "this pass over the private loader began in another process, which draws its"
                    " batches: begin a new pass",
                    code="forked",
                )
            this = this or sampler.passes
            sampler.require_latest(this)
            sampler.delivered()
            if sampler.delivery is not None:
                batch = sampler.delivery(batch, sampler.part_size)
            yield batch

    def _read(self) -> Iterator[Any]:
        with self._private_numbers():  # workers get their seeds from these
            batches = super().__iter__() if self._batched is None else iter(self._batched)
        if self.num_workers > 0:
            return batches
        left = self.sampler_of_draws.left_in_pass()
        return _drawing_privately(batches, left, self._private_numbers)


def _drawing_privately(
    batches: Iterator[Any], count: int, private_numbers: Callable[[], AbstractContextManager[None]]
) -> Iterator[Any]:
    for _ in range(count):
        with private_numbers():
            batch = next(batches)
        yield batch


class _EveryRecord(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        private_numbers = partial(PrivateRandomness(), OF_RECORDS)
        return _drawing_privately(super().__iter__(), len(self), private_numbers)


# -- collate functions ----------------------------------------------------------------------------


def users_collate(data_loader: DataLoader[Any]) -> Callable[[list[Any]], Any]:
    """The user's collate function, also if the loader was made private before."""
    collate_fn: Any = data_loader.collate_fn
    while hasattr(collate_fn, "wrapped_collator_fn"):
        collate_fn = collate_fn.wrapped_collator_fn
    return collate_fn


def _is_plain(value: Any) -> bool:
    """Whether ``default_collate`` runs no code of the user for this value. It would for the user's
    own types of containers and tensors, which it builds and stacks.
    """
    kind = type(value)
    if isinstance(value, (Mapping, list, tuple)):
        is_named = kind.__base__ is tuple and hasattr(kind, "_fields")
        parts = value.values() if isinstance(value, Mapping) else value
        return (is_named or kind.__module__ in _PLAIN) and all(map(_is_plain, parts))
    return not isinstance(value, Tensor) or kind is Tensor


def _layout(part: Any) -> str:
    leaves = [v.shape if isinstance(v, Tensor) else v for v in leaves_in(part)]
    return repr((nesting_of(part), leaves))


class RecordwiseCollate:
    """Calls a collate function with each record alone, so that no batch mixes records. Torch's own
    function, and one that the user vouches for, get whole batches.

    The records ``like`` define the nesting of all batches, and an empty batch.
    """

    def __init__(
        self, collate_fn: Callable[[list[Any]], Any], like: list[Any] | None = None
    ) -> None:
        self.wrapped_collator_fn = collate_fn
        self.is_vouched, self._nesting = False, ""
        if like is None:
            return
        batch = self(like)
        for leaf in list(leaves_in(batch)) or [None]:
            if not isinstance(leaf, Tensor) or not leaf.dim():
                raise _no_empty_batch(like[0], f"there is a value of type {type(leaf).__name__}")
        self._empty, self._nesting = map_tensors(batch, itemgetter(slice(0, 0))), nesting_of(batch)

    @property
    def is_torchs(self) -> bool:
        """Whether the function is torch's own, without functions registered by the user."""
        if self.wrapped_collator_fn is not default_collate:
            return False
        for function in default_collate_fn_map.values():
            if getattr(function, "__globals__", None) is not vars(torch_collate):
                return False
        return True

    def __call__(self, records: Any) -> Any:
        if self._nesting and not records:
            return map_tensors(self._empty, torch.clone)
        batch = self._batch_of(records)
        if self._nesting and nesting_of(batch) != self._nesting:
            raise ArgumentError(_FIELDS, code="loader-collate")
        if any(t.requires_grad for t in tensors_in(batch)):
            raise ArgumentError(
                "the data set or collate_fn returns tensors that require grad, so it would be"
                " trained without clipping and noise: detach() them, or move this into the model",
                code="loader-collate",
            )
        return batch

    def _batch_of(self, records: Any) -> Any:
        is_plain = self.is_torchs and all(map(_is_plain, records))
        nestings = [*map(nesting_of, records)] if is_plain else []
        if any(nesting != nestings[0] for nesting in nestings):  # torch uses the first for all
            raise ArgumentError(_FIELDS, code="loader-collate")
        if self.is_vouched or is_plain:
            try:
                return self.wrapped_collator_fn(records)
            except RuntimeError as error:  # its text contains shapes of records
                if "equal size" in str(error):
                    raise ArgumentError(_SHAPES, code="loader-collate") from None
                raise
        if isinstance(records, list):
            parts = [self.wrapped_collator_fn([record]) for record in records]
            # values other than tensors must be the same for all records
            is_row = [t.dim() > 0 and len(t) == 1 for t in tensors_in(parts[0])]
            if all(is_row) and len({*map(_layout, parts)}) == 1:
                columns = zip(*map(tensors_in, parts), strict=True)
                # plain tensors, so that no user class gets all records; Derived keeps its marks
                plain = ([t if isinstance(t, Derived) else as_plain(t) for t in c] for c in columns)
                whole = [torch.cat(column) for column in plain]
                rest = iter(whole)
                batch = map_tensors(parts[0], lambda _: next(rest))
                found = [(id(t), writes_into(t)) for t in tensors_in(batch)]
                if found == [(id(t), 0) for t in whole]:  # no container changed them
                    return batch
        raise ArgumentError(
            "collate_fn gets each record alone, and must return tensors with one row and the same"
            " shape for all records: pad to a fixed length, or vouch by"
            " assume_independent_records=True",
            code="loader-collate",
        )


def require_own_memory(dataset: Any, record: Any, collate_fn: Callable[[list[Any]], Any]) -> None:
    """Raise if reading records changes a record. If another one does, a batch would repeat its last
    one. If the record itself does, its value depends on its position: this function reads some.
    """
    looks: list[list[Tensor]] = []
    read = {0, 1, len(dataset) // 2, len(dataset) - 1} - {len(dataset)}
    for positions in (set[int](), set[int](), read):
        for k in positions:
            dataset[k]
        with seeded(0):
            looks.append([t.clone() for t in tensors_in(collate_fn([record]))])
    first, again, after = looks
    if _are_equal(first, again) and not _are_equal(again, after):
        raise ArgumentError(
            "a record changes when it or another one is read again (a shared buffer, or a change of"
            " stored data in place?): make a clone() first, and return that",
            code="loader-collate",
        )


def _no_empty_batch(record: Any, what: str) -> ArgumentError:
    fields = record.items() if isinstance(record, Mapping) else ()
    texts = [repr(name) for name, value in fields if isinstance(value, (str, bytes))]
    what = f"{', '.join(texts)} is text" if texts else what
    return ArgumentError(
        "Poisson sampling sometimes needs an empty batch, but these records do not allow one:"
        f" {what}. Use records of tensors and numbers, in tuples, lists or dicts; leave out names"
        " and paths.",
        code="loader-collate",
    )


def _are_equal(found: list[Tensor], others: list[Tensor]) -> bool:
    """Whether the tensors are equal; NaN equals NaN."""
    wide = [t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (*found, *others)]
    pairs = zip(wide[: len(found)], wide[len(found) :], strict=True)
    return all(torch.allclose(a, b, 0.0, 0.0, equal_nan=True) for a, b in pairs)
