"""A loader that delivers the draws of a sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

from opacus.data_loader import DPDataLoader
from torch.utils.data import DataLoader, IterableDataset

from ..distributed import Ranks
from ..errors import ArgumentError, StateError
from ..processes import this_process
from .collate import CollateWithEmpty, RecordwiseCollate, require_own_memory, users_collate
from .datasets import (
    BatchedDataset,
    reads_whole_batches,
    register_private,
    require_no_repeats,
    unchanged,
)
from .sampler import PoissonSampler

_ROWS = 256  # of a batch of all records
_TAKEN_OVER = (
    "num_workers pin_memory timeout worker_init_fn multiprocessing_context prefetch_factor"
    " persistent_workers"
).split()


class _DeliveringCollate:
    """A collate function of the main process, which delivers the parts of a draw that Opacus'
    BatchMemoryManager takes. All else is delivered by the loader, or is an ordinary batch.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any], sampler: PoissonSampler) -> None:
        self.wrapped_collator_fn, self._sampler = collate_fn, sampler

    def __call__(self, records: list[Any]) -> Any:
        is_part = self._sampler.takes_part(len(records))
        batch, deliver = self.wrapped_collator_fn(records), self._sampler.delivery
        return deliver(batch, len(records)) if is_part and deliver is not None else batch


def _refuse(_: PoissonLoader, value: Any) -> None:
    raise StateError(
        "what a private loader draws and how it collates is fixed: pass another DataLoader(...,"
        " collate_fn=f) to make_private"
    )


class PoissonLoader(DPDataLoader):
    """Delivers the batches that a :class:`PoissonSampler`, or one of another scheme, draws.

    A batch waits until it was stepped on. A new pass, ``next(iter(loader))`` included, begins with
    the batches that wait: looking at batches changes nothing, and a pass that ``break`` leaves goes
    on in the next one.

    Args:
        data_loader: the user's loader. Its data set, collate function and worker settings are taken
            over; a collate function other than torch's own is called for each record alone.
        sample_rate: q in (0, 1].
        ranks: the ranks that share the draws; None: there is one.
        draws: the sampler, called with its arguments.

    **Privacy.** The batches are data; nothing is released. Draws use the generator of
    ``data_loader`` if it has one (its seed is then a secret like the noise's), else fresh entropy
    of the operating system, anew in each forked process and each copy. How many steps are taken,
    and at which lr, must not be decided by looking at batches.
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
                    "this loader's draws are shared by several ranks, but here nothing is said"
                    " about the others: do this on one process",
                    code="ranks-alone",
                )
            if before.generator is not None:
                before.require_own_process()
                generator = before.generator
        self.recordwise = RecordwiseCollate(users_collate(data_loader))
        record = dataset[0]
        collate_fn: Any = CollateWithEmpty(self.recordwise, record)
        require_own_memory(dataset, record, self.recordwise)
        sampler = draws(len(dataset), sample_rate, generator, data_loader.num_workers, ranks)
        settings: dict[str, Any] = {name: getattr(data_loader, name) for name in _TAKEN_OVER}
        settings["batch_sampler"] = sampler
        self._aside: PoissonLoader | None = None
        self._batched: DataLoader[Any] | None = None  # the same batches, read at once
        # not with worker_init_fn, which may look for the user's data set
        is_at_once = settings["worker_init_fn"] is None and self.recordwise.is_torchs
        is_alone = reads_whole_batches(dataset)
        if is_alone or (is_at_once and BatchedDataset.fits(dataset)):
            batched = BatchedDataset(dataset, collate_fn)
            self._batched = DataLoader(batched, collate_fn=unchanged, **settings)
        if data_loader.num_workers == 0 and not is_alone:
            collate_fn = _DeliveringCollate(collate_fn, sampler)
        # num_workers is read-only here, and torch's __init__ would set it
        self.__setstate__(vars(DataLoader(dataset, collate_fn=collate_fn, **settings)))

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

    # read-only, as steps are charged for the rate, parts of draws need the main process, and the
    # collate function keeps records apart
    num_workers = property(lambda self: self.__dict__["num_workers"], _refuse)
    collate_fn = property(lambda self: self.__dict__["collate_fn"], _refuse)
    sample_rate = property(lambda self: self.sampler_of_draws.sample_rate, _refuse)
    expected_batch_size = property(
        lambda self: self.sample_rate * self.sampler_of_draws.num_samples
    )

    # the sampler, which knows what was drawn and delivered
    sampler_of_draws: PoissonSampler = property(attrgetter("batch_sampler"))  # type: ignore[assignment]

    def aside(self) -> PoissonLoader:
        """A loader with draws of its own, always the same: one that got no release comes again."""
        if self._aside is None:
            self._aside = PoissonLoader(self, self.sample_rate)
        return self._aside

    @staticmethod
    def every_record(loader: DataLoader[Any]) -> DataLoader[Any]:
        """All records of a loader once each, in the data set's order, collated each alone."""
        dataset: Any = getattr(loader, "dataset", None)
        if not isinstance(loader, DataLoader) or isinstance(dataset, IterableDataset):
            raise ArgumentError(
                "every record is read once: pass a torch.utils.data.DataLoader over a map-style"
                " data set (__len__ and __getitem__)",
                code="loader-iterable",
            )
        require_no_repeats(dataset)
        collate: Any = RecordwiseCollate(users_collate(loader))
        if reads_whole_batches(dataset):
            dataset, collate = BatchedDataset(dataset, collate), unchanged
        return DataLoader(dataset, batch_size=_ROWS, collate_fn=collate)

    def num_charges(self, epochs: int) -> int:
        """How often the accountant is charged for so many passes."""
        return epochs * len(self) // self.sampler_of_draws.steps_per_charge

    def __iter__(self) -> Iterator[Any]:
        sampler, this, process = self.sampler_of_draws, 0, this_process()
        if self.num_workers > 0:  # torch closes pipes twice of workers whose sampler raises
            sampler.look_at_data()
        for batch in super().__iter__() if self._batched is None else self._batched:
            if self.num_workers > 0 and this_process() != process:
                raise StateError(
                    "this pass over the private loader began in another process, whose workers'"
                    " batches come from draws of that process: begin a new pass",
                    code="forked",
                )
            this = this or sampler.passes
            sampler.require_latest(this)
            sampler.delivered()
            if sampler.delivery is not None:
                batch = sampler.delivery(batch, sampler.part_size)
            yield batch
