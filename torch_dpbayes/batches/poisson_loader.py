"""A loader that delivers Poisson draws of the records."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
from opacus.data_loader import DPDataLoader, wrap_collate_with_empty
from torch.utils.data import DataLoader, default_collate

from ..errors import ArgumentError, FixedAttributeError, StateError
from ..per_sample.nested import map_tensors, tensors_in
from ..ranks import Ranks
from .draws import PoissonSampler
from .fetching import Batched, as_it_is, can_be_read_at_once

# Data sets are known as long as they live. Plain lists take no weak references: they are known by
# the loaders that read them.
_private_data: WeakValueDictionary[int, Any] = WeakValueDictionary()
_private_loaders: WeakSet[DataLoader[Any]] = WeakSet()


class _CollatedAlone:
    """A collate function that is given each record alone, so that no batch mixes records.

    Args:
        collate_fn: the user's.

    Attributes:
        is_vouched: the user vouches that it keeps records apart; it is given whole batches.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any]) -> None:
        self.wrapped_collator_fn = collate_fn
        self.is_vouched = False

    def __call__(self, records: list[Any]) -> Any:
        if not self.is_vouched and not isinstance(records, list):
            raise ArgumentError(
                "the data set's __getitems__ gives one object for all records, and collate_fn sees"
                " all at once: give a list, or vouch by assume_independent_records=True",
                code="loader-collate",
            )
        if self.is_vouched:
            return self.wrapped_collator_fn(records)
        parts = [self.wrapped_collator_fn([record]) for record in records]
        no_value = torch.empty(0)
        shells = [repr(map_tensors(part, lambda _: no_value)) for part in parts]
        if any(shell != shells[0] for shell in shells):
            raise ArgumentError(
                "collate_fn makes something else than tensors of the records: make tensors with a"
                " row for each record",
                code="loader-collate",
            )
        columns = zip(*(tensors_in(part) for part in parts), strict=True)
        whole = iter([_of_all(column) for column in columns])
        return map_tensors(parts[0], lambda _: next(whole))


def _of_all(column: Sequence[torch.Tensor]) -> torch.Tensor:
    if any(t.dim() == 0 or len(t) != 1 or t.shape != column[0].shape for t in column):
        raise ArgumentError(
            "collate_fn makes tensors of different shapes: it needs one row for each record, of one"
            " length for all (the longest record of a batch shows in its padding), or"
            " assume_independent_records=True",
            code="loader-collate",
        )
    return torch.cat(list(column))


class _CountingCollate:
    """A collate function of the main process that tells the sampler how many records a part
    of a draw has.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any], sampler: PoissonSampler) -> None:
        self.wrapped_collator_fn = collate_fn
        self.sampler = sampler

    def __call__(self, records: list[Any]) -> Any:
        self.sampler.part_size = len(records)
        batch = self.wrapped_collator_fn(records)
        deliver = self.sampler.delivery
        return batch if deliver is None else deliver(batch, len(records))


class PoissonLoader(DPDataLoader):
    """Opacus' Poisson-sampling loader at an exact rate, with a :class:`PoissonSampler` that keeps
    count.

    A batch stays until it was stepped on: a new pass, ``next(iter(loader))`` included, begins with
    the batches that got no step. Looking at batches therefore changes nothing, and this loader
    draws no other one because of what a batch holds. A pass that ``break`` leaves goes on in the
    next.

    Args:
        data_loader: the user's loader, whose dataset, collate function and worker settings are
            taken over.
        sample_rate: q in (0, 1].
        ranks: the ranks that share the draws, each of which sees all of the data set and delivers
            its part; None: there is one.
        draws: ``(num_data, sample_rate, generator, num_workers, ranks) ->`` the sampler that
            decides who joins a batch.

    Raises:
        RuntimeError: while batches are taken: another number of records than before, two passes at
            a time, a batch that is handed out over and over without a step, a generator of the
            library's own that somebody seeded, or a forked process whose parent's generator was the
            caller's.

    **Privacy.** The batches are data; nothing is released. Draws use the generator of
    ``data_loader`` if it has one (its seed is then a secret like the noise's), fresh entropy of the
    operating system otherwise, in each forked process and each copy anew. One step is taken on each
    draw, in the order of the draws; how many steps are taken, and at which lr, must not be decided
    by looking at batches.
    """

    def __init__(
        self,
        data_loader: DataLoader[Any],
        sample_rate: float,
        ranks: Ranks | None = None,
        draws: Callable[..., PoissonSampler] = PoissonSampler,
    ) -> None:
        dataset: Any = data_loader.dataset
        if (
            ranks is None
            and isinstance(data_loader, PoissonLoader)
            and data_loader.sampler_of_draws.ranks is not None
        ):
            raise ArgumentError(
                "this loader's draws are shared by several ranks, but here nothing is said about"
                " the others: do this on one process",
                code="ranks-alone",
            )
        self.sample_rate = sample_rate
        self.distributed = ranks is not None
        self._aside: PoissonLoader | None = None
        user_collate = data_loader.collate_fn
        while hasattr(user_collate, "wrapped_collator_fn"):  # of a loader that was private before
            user_collate = user_collate.wrapped_collator_fn
        self._alone = _CollatedAlone(user_collate)
        is_custom = user_collate is not default_collate
        collate_fn: Any = wrap_collate_with_empty(
            collate_fn=self._alone if is_custom else user_collate
        )
        # it learns the shapes of a batch from the first one that it sees, which may come out empty
        collate_fn([dataset[0]])
        try:
            collate_fn([])
        except Exception as error:
            record = dataset[0]
            fields = record.items() if isinstance(record, Mapping) else ()
            texts = [repr(name) for name, value in fields if isinstance(value, (str, bytes))]
            what = f"{', '.join(texts)} is text" if texts else str(error).partition(". ")[0]
            raise ArgumentError(
                "no empty batch can be made of these records, which Poisson sampling delivers now"
                f" and then: {what}. Records are tensors and numbers, in tuples, lists or dicts;"
                " leave names and paths out.",
                code="loader-collate",
            ) from error
        generator = data_loader.generator
        if (
            isinstance(data_loader, PoissonLoader)
            and data_loader.sampler_of_draws.has_user_generator
        ):
            data_loader.sampler_of_draws.require_own_process()
            generator = data_loader.sampler_of_draws.generator
        sampler = draws(len(dataset), sample_rate, generator, data_loader.num_workers, ranks)
        settings: dict[str, Any] = {
            "batch_sampler": sampler,
            "num_workers": data_loader.num_workers,
            "pin_memory": data_loader.pin_memory,
            "timeout": data_loader.timeout,
            "worker_init_fn": data_loader.worker_init_fn,
            "multiprocessing_context": data_loader.multiprocessing_context,
            "prefetch_factor": data_loader.prefetch_factor,
            "persistent_workers": data_loader.persistent_workers,
        }
        # the same batches, read at once; worker_init_fn may look for the data set
        self._batched: DataLoader[Any] | None = None
        if data_loader.worker_init_fn is None and can_be_read_at_once(dataset, user_collate):
            batched = Batched(dataset, collate_fn)
            self._batched = DataLoader(batched, collate_fn=as_it_is, **settings)
        if data_loader.num_workers == 0:
            collate_fn = _CountingCollate(collate_fn, sampler)
        DataLoader.__init__(self, dataset, collate_fn=collate_fn, **settings)
        self._note()

    def _note(self) -> None:
        dataset: Any = self.dataset
        self.sampler_of_draws.count_records = lambda: len(dataset)
        _private_loaders.add(self)
        with contextlib.suppress(TypeError):
            _private_data[id(self.dataset)] = self.dataset

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._note()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("sample_rate", "num_workers") and "batch_sampler" in self.__dict__:
            raise FixedAttributeError(
                f"{name} of a private loader is fixed. Make a loader with another one by"
                " PrivacyEngine.make_private(..., data_loader=DataLoader(dataset, batch_size=...,"
                " num_workers=...))"
            )
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        sampler = self.sampler_of_draws
        number, what = sampler.drawn
        shared = "" if sampler.ranks is None else f", shared by {sampler.ranks.size} ranks"
        return (
            f"{type(self).__name__}({sampler.batches}: {number} {what}, each in a"
            f" batch with probability {self.sample_rate:.6g}: {self.expected_batch_size:.6g} on"
            f" average, {len(self)} batches a pass{shared})"
        )

    @property
    def sampler_of_draws(self) -> PoissonSampler:
        """The sampler, which knows what was drawn and delivered."""
        assert isinstance(self.batch_sampler, PoissonSampler)
        return self.batch_sampler

    def vouch(self) -> None:
        """The user vouches that the collate function keeps records apart."""
        self._alone.is_vouched = True

    def aside(self) -> PoissonLoader:
        """A loader of the same data and rate with a sequence of Poisson draws of its own, always
        the same: a draw that got no release comes again.
        """
        if self._aside is None:
            self._aside = PoissonLoader(self, self.sample_rate)
        return self._aside

    def num_charges(self, epochs: int) -> int:
        """How often the accountant is charged for so many passes."""
        return epochs * len(self) // self.sampler_of_draws.steps_per_charge

    @property
    def expected_batch_size(self) -> float:
        """B = qN."""
        return self.sample_rate * self.sampler_of_draws.num_samples

    def __iter__(self) -> Iterator[Any]:
        sampler, this, process = self.sampler_of_draws, 0, os.getpid()
        for batch in super().__iter__() if self._batched is None else self._batched:
            if self.num_workers > 0 and os.getpid() != process:
                raise StateError(
                    "this pass over the private loader began in another process, whose workers'"
                    " batches come from draws of that process: begin a new pass",
                    code="forked",
                )
            this = this or sampler.passes
            sampler.require_latest(this)
            sampler.delivered()
            if sampler.delivery is not None and (self._batched or self.num_workers > 0):
                batch = sampler.delivery(batch, sampler.part_size)
            yield batch


def reads_private_data(loader: Any) -> bool:
    """Whether this is a private loader, or one over its data set or a part of that."""
    data = loader
    while data is not None:
        if isinstance(data, DPDataLoader) or _private_data.get(id(data)) is data:
            return True
        if any(data is private.dataset for private in _private_loaders):
            return True
        data = getattr(data, "dataset", None)
    return False
