"""Batches drawn by Poisson sampling, and the book that makes sure that each of them is used for exactly one step."""

from __future__ import annotations

import contextlib
import hashlib
import math
import random
import zlib
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from opacus.data_loader import DPDataLoader, wrap_collate_with_empty
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch.utils.data import DataLoader, Subset

from .data_parallel import Ranks
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

    On several ranks all draw the same batch from one stream, and rank r of W takes its records r, r + W, r + 2W and so on: no record is on two
    ranks, and which ones join does not depend on W.

    Args:
        num_data: number of records N, those of other ranks included.
        sample_rate: q in (0, 1]. The draw compares 24-bit uniform numbers with it; it is rounded down to that grid, so that the rate
            in force is never above the one that is charged.
        generator: the caller's source of randomness, of which every position is used once in a process. None: entropy of the operating system.
        num_workers: that of the loader.
        ranks: the ranks that share the draws; None: there is one.
    """

    def __init__(
        self, num_data: int, sample_rate: float, generator: torch.Generator | None, num_workers: int, ranks: Ranks | None = None
    ) -> None:
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
        self.ranks = ranks
        self.passes = 0
        self.before_delivery: Callable[[], None] = lambda: None  # forgets gradients of earlier batches
        self._reset()

    def _reset(self) -> None:
        self._drawn: deque[tuple[int, int]] = deque()  # size and checksum of what was drawn and not yet delivered
        self._size = 0  # of the draw that was delivered last
        self.checksum = 0  # of that draw, with the records of other ranks
        self._part_size = 0  # of the batch that was delivered last
        self._ready = False  # a batch was delivered and not yet stepped on
        self._is_last = True  # it completes its draw
        self._missed = False  # a batch was delivered and never stepped on
        self.draw = getattr(self, "draw", 0) + 1

    def __iter__(self) -> Iterator[list[int]]:
        self._reset()
        self.passes += 1
        draws = super().__iter__()
        for _ in range(self.steps):
            if self.has_user_generator:
                use_position("a batch", self.generator)
            indices, checksum = next(draws), 0
            if self.ranks is not None:
                checksum = zlib.crc32(array("q", indices).tobytes())
                indices = [i for i in indices if i % self.ranks.size == self.ranks.rank]
            self._drawn.append((len(indices), checksum))
            yield indices

    def draw_from(self, state: torch.Tensor) -> None:
        """Draw what rank 0 draws, unless the caller's generators do so already."""
        if not self.has_user_generator:
            self.generator.set_state(state)

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
            if not self._drawn:
                raise RuntimeError("two passes over one private loader at a time: their draws cannot be told apart")
            self._size, self.checksum = self._drawn.popleft()
            self._part_size = self._size
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
        """Number of this rank's records in the draw delivered last: data, which must not leave the library."""
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
        ranks: the ranks that share the draws, each of which sees all of the data set and delivers its part; None: there is one.

    **Privacy.** The batches are data; nothing is released. Draws use the generator of ``data_loader`` if it has one (its seed is then a
    secret like the noise's), fresh entropy of the operating system otherwise.
    """

    def __init__(self, data_loader: DataLoader[Any], sample_rate: float, ranks: Ranks | None = None) -> None:
        dataset: Any = data_loader.dataset
        if ranks is None and isinstance(data_loader, PoissonLoader) and data_loader.sampler_of_draws.ranks is not None:
            raise ValueError("this loader's draws are shared by several ranks, but here nothing is said about the others: do this on one process")
        self.sample_rate = sample_rate
        self.distributed = ranks is not None
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
        sampler = PoissonSampler(len(dataset), sample_rate, generator, data_loader.num_workers, ranks)
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

    def records_digests(self) -> dict[str, str | None]:
        """Digests of up to 64 records in their order, of augmented ones under one seed: of each part of a record, None if it differs at every look.

        Ranks that keep the same records in another order would use some of them twice.

        Raises:
            ValueError: the parts that stay the same do not tell records apart.
        """
        collate: Any = self.collate_fn
        while hasattr(collate, "wrapped_collator_fn"):
            collate = collate.wrapped_collator_fn
        num_data = self.sampler_of_draws.num_samples
        positions = sorted({round(i * (num_data - 1) / 63) for i in range(64)})

        def look() -> defaultdict[str, list[bytes]]:
            parts: defaultdict[str, list[bytes]] = defaultdict(list)
            with _one_seed():
                for i in positions:
                    _digest_into(parts, "record", collate([self.dataset[i]]))
            return parts

        first, second = look(), look()
        lasting = {part: digests for part, digests in first.items() if second[part] == digests}
        if len(lasting) < len(first) and all(len(set(digests)) == 1 for digests in lasting.values()):
            raise ValueError(
                "the records differ at every look, and no part of them that stays the same tells them apart: nobody can see whether all ranks keep "
                "them in one order, and a record at two positions would be used twice. Let the data set draw what it changes from torch's, "
                "NumPy's or Python's global random numbers, or hand out a label with every record."
            )
        return {part: hashlib.blake2b(b"".join(lasting[part]), digest_size=16).hexdigest() if part in lasting else None for part in first}


@contextlib.contextmanager
def _one_seed() -> Iterator[None]:
    """Python's, NumPy's and torch's global random numbers are always the same inside, and go on afterwards as if nothing had been."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            random.seed(0)
            np.random.seed(0)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _digest_into(parts: Mapping[str, list[bytes]], part: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        parts[f"{part}, its shape"].append(hashlib.blake2b(repr((value.dtype, tuple(value.shape))).encode()).digest())
        parts[part].append(hashlib.blake2b(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data).digest())
    elif isinstance(value, Mapping):
        for name, item in value.items():
            _digest_into(parts, f"{part}[{name!r}]", item)
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            _digest_into(parts, f"{part}[{i}]", item)
