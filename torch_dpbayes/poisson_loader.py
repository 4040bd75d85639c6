"""Batches drawn by Poisson sampling, and the book that makes sure that each of them is used for exactly one step."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakValueDictionary

import torch
from opacus.data_loader import DPDataLoader, wrap_collate_with_empty
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch.utils.data import DataLoader, Subset

from .noise import fresh_generator, use_position

_private_datasets: WeakValueDictionary[int, Any] = WeakValueDictionary()


def _note_private(dataset: Any) -> None:
    with contextlib.suppress(TypeError):  # plain lists take no weak references
        _private_datasets[id(dataset)] = dataset


def is_private(dataset: Any) -> bool:
    """Whether a private loader was made over this data set, or over what it is a subset of."""
    while isinstance(dataset, Subset):
        if _private_datasets.get(id(dataset)) is dataset:
            return True
        dataset = dataset.dataset
    return dataset is not None and _private_datasets.get(id(dataset)) is dataset


class PoissonSampler(UniformWithReplacementSampler):
    """Every record joins a batch independently with probability q; knows which draw the optimizer may use next.

    Amplification by sampling holds for one step on each draw. The sampler therefore counts: a draw that was delivered must be stepped on
    exactly once, with all of its records, before the next one; also when it is empty, for a missing step would tell that it was.

    Args:
        num_data: number of records N.
        sample_rate: q in (0, 1]. The draw compares 24-bit uniform numbers with it; it is rounded down to that grid, so that the rate
            in force is never above the one that is charged.
        generator: the caller's source of randomness, of which every position is used once in a process. None: entropy of the operating system.
        num_workers: that of the loader.
    """

    def __init__(self, num_data: int, sample_rate: float, generator: torch.Generator | None, num_workers: int) -> None:
        grid_rate = math.floor(sample_rate * 2**24) / 2**24
        if grid_rate == 0.0:
            raise ValueError(f"a sampling rate of {sample_rate} is below the resolution of the uniform numbers (2**-24)")
        super().__init__(
            num_samples=num_data,
            sample_rate=grid_rate,
            generator=fresh_generator() if generator is None else generator,
            steps=max(1, math.floor(1 / sample_rate + 1e-9)),
        )
        self.has_user_generator = generator is not None
        self.num_workers = num_workers
        self.before_delivery: Callable[[], None] = lambda: None  # forgets gradients of earlier batches
        self._reset()

    def _reset(self) -> None:
        self._sizes: deque[int] = deque()  # drawn, not yet delivered
        self._size = 0  # of the draw that was delivered last
        self._part_size = 0  # of the batch that was delivered last
        self._ready = False  # a batch was delivered and not yet stepped on
        self._is_last = True  # it completes its draw
        self._missed = False  # a batch was delivered and never stepped on
        self.draw = getattr(self, "draw", 0) + 1

    def __iter__(self) -> Iterator[list[int]]:
        self._reset()
        draws = super().__iter__()
        for _ in range(self.steps):
            if self.has_user_generator:
                use_position("a batch", self.generator)
            indices = next(draws)
            self._sizes.append(len(indices))
            yield indices

    def delivered(self) -> None:
        """The loader hands out the next draw, as one batch."""
        self._deliver(new_draw=True, is_last=True)

    def delivered_part(self, is_last: bool) -> None:
        """Opacus' BatchMemoryManager is about to hand out a part of the next draw."""
        if self.num_workers > 0:
            raise RuntimeError(
                "BatchMemoryManager with num_workers > 0 announces batches before it delivers them; a skipped one would go unnoticed and "
                "two draws could mix in one step. Build the DataLoader with num_workers=0."
            )
        self._deliver(new_draw=self._is_last, is_last=is_last)

    def _deliver(self, *, new_draw: bool, is_last: bool) -> None:
        self.before_delivery()
        self._missed |= self._ready
        if new_draw:
            if not self._sizes:
                raise RuntimeError("two passes over one private loader at a time: their draws cannot be told apart")
            self._size = self._part_size = self._sizes.popleft()
            self.draw += 1
        self._ready, self._is_last = True, is_last

    def use(self) -> bool:
        """The optimizer steps on the batch delivered last; returns whether it completes its draw."""
        if not self._ready:
            raise RuntimeError(
                "no new batch came from the private loader since the last step: amplification by sampling is accounted for one step on "
                "each draw. Take batches from the loader that make_private returned, and call step() once for each."
            )
        self._ready = False
        if self._missed:
            raise RuntimeError(
                "a batch of this pass over the private loader got no step. Which steps are taken must not depend on the data: call "
                "backward() and step() on every batch, empty ones included."
            )
        return self._is_last

    @property
    def size(self) -> int:
        """Number of records in the draw delivered last: data, which must not leave the library."""
        return self._size

    @property
    def part_size(self) -> int:
        """Number of records in the batch delivered last, a draw or a part of one: data as well."""
        return self._part_size


class _CountingCollate:
    """A collate function of the main process that tells the sampler how many records a part of a draw has."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any], sampler: PoissonSampler) -> None:
        self.wrapped_collator_fn = collate_fn
        self.sampler = sampler

    def __call__(self, records: list[Any]) -> Any:
        self.sampler._part_size = len(records)
        return self.wrapped_collator_fn(records)


class PoissonLoader(DPDataLoader):
    """Opacus' Poisson-sampling loader at an exact rate, with a :class:`PoissonSampler` that keeps count.

    Args:
        data_loader: the user's loader, whose dataset, collate function and worker settings are taken over.
        sample_rate: q in (0, 1].

    **Privacy.** The batches are data; nothing is released. Draws use the generator of ``data_loader`` if it has one (its seed is then a
    secret like the noise's), fresh entropy of the operating system otherwise.
    """

    def __init__(self, data_loader: DataLoader[Any], sample_rate: float) -> None:
        dataset: Any = data_loader.dataset
        self.sample_rate = sample_rate
        self.distributed = False
        user_collate = data_loader.collate_fn
        while hasattr(user_collate, "wrapped_collator_fn"):  # of a loader that was private before
            user_collate = user_collate.wrapped_collator_fn
        collate_fn: Any = wrap_collate_with_empty(collate_fn=user_collate)
        collate_fn([dataset[0]])  # it learns the shapes of a batch from the first one that it sees, which may come out empty
        try:
            collate_fn([])
        except Exception as error:
            raise ValueError(
                f"no empty batch can be made of these records, which Poisson sampling delivers now and then: {error}. Records are tensors and "
                "numbers, in tuples, lists or dicts; leave names and paths out of them."
            ) from error
        generator = data_loader.generator
        if isinstance(data_loader, PoissonLoader) and data_loader.sampler_of_draws.has_user_generator:
            generator = data_loader.sampler_of_draws.generator
        sampler = PoissonSampler(len(dataset), sample_rate, generator, data_loader.num_workers)
        _note_private(dataset)
        if data_loader.num_workers == 0:
            collate_fn = _CountingCollate(collate_fn, sampler)
        DataLoader.__init__(
            self,
            dataset,
            batch_sampler=sampler,
            num_workers=data_loader.num_workers,
            collate_fn=collate_fn,
            pin_memory=data_loader.pin_memory,
            timeout=data_loader.timeout,
            worker_init_fn=data_loader.worker_init_fn,
            multiprocessing_context=data_loader.multiprocessing_context,
            prefetch_factor=data_loader.prefetch_factor,
            persistent_workers=data_loader.persistent_workers,
        )

    @property
    def sampler_of_draws(self) -> PoissonSampler:
        """The sampler, which knows what was drawn and delivered."""
        assert isinstance(self.batch_sampler, PoissonSampler)
        return self.batch_sampler

    @property
    def expected_batch_size(self) -> float:
        """B = qN."""
        return self.sample_rate * self.sampler_of_draws.num_samples

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            self.sampler_of_draws.delivered()
            yield batch
