"""Batches drawn by Poisson sampling, and the book that makes sure that each of them is used
for exactly one step.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import random
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple
from weakref import WeakSet, WeakValueDictionary

import numpy as np
import torch
from opacus.data_loader import DPDataLoader, wrap_collate_with_empty
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch.utils.data import DataLoader, Sampler

from .data_parallel import Ranks
from .noise import fresh_generator, use_position

# Data sets, and tensors of batches, that are private: found by their identity for as long as they
# live. Plain lists take no weak references: they are known by the loaders that read them.
_private: WeakValueDictionary[int, Any] = WeakValueDictionary()
_private_loaders: WeakSet[DataLoader[Any]] = WeakSet()

_CELLS = 2**24  # of the unit interval: the values of torch.rand in float32
_PLACES = 2**53  # in a cell
_MANY_DELIVERIES = 100


def _note_private(item: Any) -> None:
    with contextlib.suppress(TypeError):
        _private[id(item)] = item


def is_private(item: Any) -> bool:
    """Whether this is a private loader, a batch or the data set of one, or an object that
    shows one of them among its attributes and entries.
    """
    seen, left = set(), [item]
    while left:
        item = left.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if (
            isinstance(item, (DPDataLoader, UniformWithReplacementSampler))
            or _private.get(id(item), _private) is item
        ):
            return True
        if any(loader.dataset is item for loader in _private_loaders):
            return True
        if isinstance(item, (list, tuple)):
            left += item[:1000]
        elif isinstance(item, Mapping):
            left += islice(item.values(), 1000)
        elif isinstance(item, (DataLoader, Sampler)) or (
            hasattr(type(item), "__getitem__") and not isinstance(item, torch.Tensor)
        ):
            left += getattr(item, "__dict__", {}).values()
    return False


def _state_of(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()


class _Draw(NamedTuple):
    records: torch.Tensor  # positions of this rank's
    checksum: int  # with the records of other ranks
    state: torch.Tensor | None  # of the caller's generator beforehand


class PoissonSampler(UniformWithReplacementSampler):
    """Every record joins a batch independently with probability q; knows which draw the optimizer
    may use next.

    Amplification by sampling holds for one step on each draw, whatever is in it: who skips a draw
    for what it holds has chosen the batch, also where it is an empty one. Draws therefore form one
    sequence. A draw stays until it was stepped on, once and with all of its records; a pass begins
    with those that are left from earlier ones, and a step on a later draw is refused while an
    earlier one waits.

    On several ranks all draw the same batch from one stream, and rank r of W takes its records r, r
    + W, r + 2W and so on: no record is on two ranks, and which ones join does not depend on W.

    A forked process draws a sequence of its own, and so does a copy, pickled or not.

    Args:
        num_data: number of records N, those of other ranks included.
        sample_rate: q in (0, 1]; the rate in force is at most 2⁻⁷⁷ below it, and never above,
            whatever torch's default dtype is.
        generator: the caller's source of randomness on the CPU, of which every position is used
            once in a process. None: entropy of the operating system.
        num_workers: that of the loader.
        ranks: the ranks that share the draws; None: there is one.

    **Privacy.** Nothing is released; draws are data. Rate and generator cannot be exchanged, for
    steps are charged for them.
    """

    def __init__(
        self,
        num_data: int,
        sample_rate: float,
        generator: torch.Generator | None,
        num_workers: int,
        ranks: Ranks | None = None,
    ) -> None:
        if not 0 < sample_rate <= 1:
            raise ValueError(
                f"a sampling rate is a probability between 0 and 1, got {sample_rate}: it is batch"
                " size / number of records"
            )
        if generator is not None and generator.device.type != "cpu":
            raise ValueError(
                "batches are drawn on the CPU, but the DataLoader's generator= lives on"
                f" {generator.device}: pass torch.Generator()"
            )
        super().__init__(
            num_samples=num_data,
            sample_rate=sample_rate,
            generator=fresh_generator() if generator is None else generator,
            steps=max(1, math.floor(1 / sample_rate + 1e-9)),
        )
        cell, rest = divmod(sample_rate * _CELLS, 1.0)
        # the rate in force is cell + place·2⁻⁵³·2⁻²⁴, never above q
        self._cell, self._place = cell / _CELLS, int(rest * _PLACES)
        self.has_user_generator = generator is not None
        self.num_workers = num_workers
        self.ranks = ranks
        self.passes = 0
        self.draw = 0  # changes with every delivery of a new draw
        # forgets gradients of earlier batches
        self.before_delivery: Callable[[], None] = lambda: None
        self._pid = os.getpid()
        self._state = _state_of(self.generator)  # where the last draw left the generator
        self._draws: deque[_Draw] = deque()  # what was drawn and not yet stepped on
        # of a resumed run: states from which the draws that got no step are drawn again, first
        self._waiting: deque[torch.Tensor] = deque()
        self._deliveries = 0  # of the first of them
        self._size = 0  # of the draw that was delivered last
        self.checksum = 0  # of that draw
        self._part_size = 0  # of the batch that was delivered last
        self._begin()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("sample_rate", "num_samples", "generator") and name in self.__dict__:
            raise AttributeError(
                f"{name} of a private loader's draws is fixed: every step is charged for the draws"
                " that were declared. Make a loader with other ones by"
                " PrivacyEngine.make_private(..., data_loader=DataLoader(dataset, batch_size=...,"
                " generator=...))"
            )
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.has_user_generator or self.ranks is not None:
            raise TypeError(
                "a private loader with a generator of the caller's, or of several ranks, cannot be"
                " pickled or copied: original and copy would draw the same batches, which are"
                " charged as independent ones. Make the copy's by PrivacyEngine.make_private from a"
                " DataLoader of its own"
            )
        return PoissonSampler, (self.num_samples, self.sample_rate, None, self.num_workers)

    def _begin(self) -> None:
        self._handed = 0  # draws that the loader took in this pass; those that are left come first
        self._delivered = 0  # those of them that it has handed out
        self._ready = False  # a batch was delivered and not yet stepped on
        self._is_last = True  # it completes its draw
        self._missed = False  # a batch of this pass was delivered and never stepped on
        self.draw += 1

    def _enter_process(self) -> None:
        """A forked child begins a sequence of its own, with randomness of its own."""
        if os.getpid() == self._pid:
            return
        self.require_own_process()
        self._renew(fresh_generator())
        self._pid = os.getpid()
        self._begin()

    def require_own_process(self) -> None:
        """Raise in a forked child whose draws would be its parent's."""
        if os.getpid() != self._pid and (self.has_user_generator or self.ranks is not None):
            raise RuntimeError(
                "this private loader was made in another process, with a generator of the caller's"
                " or for several ranks: a forked child draws the same batches as its parent and its"
                " siblings, which are charged as independent ones. Call make_private inside the"
                " child on a DataLoader whose generator= has a seed of the child's own, or leave"
                " out generator="
            )

    def _renew(self, generator: torch.Generator) -> None:
        self.__dict__["generator"] = generator
        self._state = _state_of(generator)
        self._draws.clear()
        self._waiting.clear()
        self._deliveries = 0

    def __iter__(self) -> Iterator[list[int]]:
        self._enter_process()
        self._begin()
        self.passes += 1
        this = self.passes
        for _ in range(self.steps):
            self.require_latest(this)
            self._enter_process()
            if self._handed == len(self._draws):
                self._draws.append(self._next_draw())
            self._handed += 1
            yield self._draws[self._handed - 1].records.tolist()

    def require_latest(self, number: int) -> None:
        """Raise if another pass began after this one."""
        if number != self.passes:
            self._missed = True
            raise RuntimeError(
                "two passes over one private loader at a time: their draws cannot be told apart,"
                " and a record could be used in two steps on one draw. End this pass, and begin a"
                " new one, which goes on with the batches that got no step. To look at records in"
                " between: DataLoader(loader.dataset, batch_size=...)"
            )

    def _next_draw(self) -> _Draw:
        state, here = None, None
        if self.has_user_generator:
            if self._waiting:
                here = self.generator.get_state()
                self.generator.set_state(self._waiting.popleft())
            state = self.generator.get_state()
            use_position("a batch", self.generator)
        elif _state_of(self.generator) != self._state:
            raise RuntimeError(
                "the private loader's own generator was seeded or used from outside: equal states"
                " draw equal batches, which are charged as independent ones. Call make_private"
                " again and leave it alone; for runs that can be repeated, give it a loader with a"
                " generator of yours: DataLoader(dataset, batch_size=...,"
                " generator=torch.Generator().manual_seed(...))"
            )
        # float32 numbers tell 2²⁴ cells apart; only records in the one that q divides need their
        # place in it
        cells = torch.rand(
            self.num_samples, dtype=torch.float32, generator=self.generator, device="cpu"
        )
        joining = (cells <= self._cell).nonzero().reshape(-1)
        divided = cells[joining] == self._cell
        if divided.any():
            places = torch.randint(_PLACES, (len(joining),), generator=self.generator, device="cpu")
            joining = joining[~divided | (places < self._place)]
        if here is not None:
            self.generator.set_state(here)
        self._state = _state_of(self.generator)
        if self.ranks is None:
            return _Draw(joining, 0, state)
        return _Draw(
            joining[joining % self.ranks.size == self.ranks.rank],
            zlib.crc32(joining.numpy().data),
            state,
        )

    def draw_from(self, state: torch.Tensor) -> None:
        """Draw what rank 0 draws, unless the caller's generators do so already."""
        if not self.has_user_generator:
            self.generator.set_state(state)
            self._renew(self.generator)

    def delivered(self) -> None:
        """The loader hands out the next draw, as one batch."""
        self._deliver(is_part=False, is_last=True)

    def delivered_part(self, is_last: bool) -> None:
        """Opacus' BatchMemoryManager is about to hand out a part of the next draw."""
        if self.num_workers > 0:
            raise RuntimeError(
                "BatchMemoryManager with num_workers > 0 announces batches before it delivers them;"
                " a skipped one would go unnoticed and two draws could mix in one step. Build the"
                " DataLoader with num_workers=0."
            )
        self._deliver(is_part=True, is_last=is_last)

    def _deliver(self, *, is_part: bool, is_last: bool) -> None:
        self._enter_process()
        self.before_delivery()
        self._missed |= self._ready
        if self._is_last or not is_part:  # of a new draw
            self._missed |= self._delivered > 0
            if self._delivered == self._handed:
                raise RuntimeError(
                    "this batch was drawn in another pass over the private loader, or by the"
                    " process from which this one was forked: begin a new pass"
                )
            self._deliveries += self._delivered == 0
            if self._deliveries > _MANY_DELIVERIES:
                self._deliveries = 0
                raise RuntimeError(
                    f"this batch was handed out {_MANY_DELIVERIES} times and got no step. A draw of"
                    " the private loader stays until a step is taken on it, for choosing batches"
                    " by what they hold would undo the amplification that is charged: call"
                    " backward() and step() on every batch, whatever is in it. To look at records,"
                    " use DataLoader(loader.dataset, batch_size=...)."
                )
            self._size, self.checksum = (
                len(self._draws[self._delivered].records),
                self._draws[self._delivered].checksum,
            )
            self._part_size = self._size
            self._delivered += 1
            self.draw += 1
        self._ready, self._is_last = True, is_last

    def use(self) -> bool:
        """The optimizer steps on the batch delivered last; returns whether it completes its
        draw.
        """
        self.require_own_process()
        if not self._ready or os.getpid() != self._pid:
            raise RuntimeError(
                "no new batch came from the private loader since the last step, or since this"
                " process was forked: amplification by sampling is accounted for one step on each"
                " draw. Take batches from the loader that make_private returned, and call step()"
                " once for each."
            )
        self._ready = False
        if self._missed:
            raise RuntimeError(
                "a batch of this pass over the private loader got no step, or the one after it was"
                " taken first. Which steps are taken must not depend on the data: call backward()"
                " and step() on every batch, empty ones included. A new pass begins with the batch"
                " that was left out."
            )
        return self._is_last

    def retire(self) -> None:
        """The optimizer has made a release out of the draw, which is used up now. A step that
        fails before leaves it waiting.
        """
        self._draws.popleft()
        self._handed, self._delivered, self._deliveries = self._handed - 1, 0, 0

    def position(self) -> torch.Tensor:
        """States of the caller's generator, a row each: those that the draws which wait for a step
        come from, then where it stands.

        Others may have drawn from it in between.
        """
        drawn = [draw.state for draw in self._draws if draw.state is not None]
        return torch.stack([*drawn, *self._waiting, self.generator.get_state()])

    def resume(self, position: torch.Tensor) -> None:
        """Go on from where a saved run was, in a new pass: with the draws that waited, then
        with new ones.
        """
        *waiting, here = (state.clone() for state in position)
        self.generator.set_state(here)
        self._renew(self.generator)
        self._waiting.extend(waiting)
        self.passes += 1
        self._begin()

    @property
    def size(self) -> int:
        """Number of this rank's records in the draw delivered last: data, which must not
        leave the library.
        """
        return self._size

    @property
    def part_size(self) -> int:
        """Number of records in the batch delivered last, a draw or a part of one: data as well."""
        return self._part_size


class _CountingCollate:
    """A collate function of the main process that tells the sampler how many records a part
    of a draw has.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any], sampler: PoissonSampler) -> None:
        self.wrapped_collator_fn = collate_fn
        self.sampler = sampler

    def __call__(self, records: list[Any]) -> Any:
        self.sampler._part_size = len(records)
        return self.wrapped_collator_fn(records)


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

    Raises:
        RuntimeError: while batches are taken: two passes at a time, a batch that is handed out over
            and over without a step, a generator of the library's own that somebody seeded, or a
            forked process whose parent's generator was the caller's.

    **Privacy.** The batches are data; nothing is released. Draws use the generator of
    ``data_loader`` if it has one (its seed is then a secret like the noise's), fresh entropy of the
    operating system otherwise, in each forked process and each copy anew. One step is taken on each
    draw, in the order of the draws; how many steps are taken, and at which lr, must not be decided
    by looking at batches.
    """

    def __init__(
        self, data_loader: DataLoader[Any], sample_rate: float, ranks: Ranks | None = None
    ) -> None:
        dataset: Any = data_loader.dataset
        if (
            ranks is None
            and isinstance(data_loader, PoissonLoader)
            and data_loader.sampler_of_draws.ranks is not None
        ):
            raise ValueError(
                "this loader's draws are shared by several ranks, but here nothing is said about"
                " the others: do this on one process"
            )
        self.sample_rate = sample_rate
        self.distributed = ranks is not None
        self._aside: PoissonLoader | None = None
        user_collate = data_loader.collate_fn
        while hasattr(user_collate, "wrapped_collator_fn"):  # of a loader that was private before
            user_collate = user_collate.wrapped_collator_fn
        collate_fn: Any = wrap_collate_with_empty(collate_fn=user_collate)
        # it learns the shapes of a batch from the first one that it sees, which may come out empty
        collate_fn([dataset[0]])
        try:
            collate_fn([])
        except Exception as error:
            raise ValueError(
                "no empty batch can be made of these records, which Poisson sampling delivers now"
                f" and then: {error}. Records are tensors and numbers, in tuples, lists or dicts;"
                " leave names and paths out of them."
            ) from error
        generator = data_loader.generator
        if (
            isinstance(data_loader, PoissonLoader)
            and data_loader.sampler_of_draws.has_user_generator
        ):
            data_loader.sampler_of_draws.require_own_process()
            generator = data_loader.sampler_of_draws.generator
        sampler = PoissonSampler(
            len(dataset), sample_rate, generator, data_loader.num_workers, ranks
        )
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
        self._note()

    def _note(self) -> None:
        _private_loaders.add(self)
        for item in (self.dataset, *getattr(self.dataset, "tensors", ())):
            _note_private(item)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("sample_rate", "num_workers") and "batch_sampler" in self.__dict__:
            raise AttributeError(
                f"{name} of a private loader is fixed. Make a loader with another one by"
                " PrivacyEngine.make_private(..., data_loader=DataLoader(dataset, batch_size=...,"
                " num_workers=...))"
            )
        super().__setattr__(name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._note()

    @property
    def sampler_of_draws(self) -> PoissonSampler:
        """The sampler, which knows what was drawn and delivered."""
        assert isinstance(self.batch_sampler, PoissonSampler)
        return self.batch_sampler

    def aside(self) -> PoissonLoader:
        """A loader of the same data and rate with a sequence of draws of its own, always the
        same: a draw that got no release comes again.
        """
        if self._aside is None:
            self._aside = PoissonLoader(self, self.sample_rate)
        return self._aside

    @property
    def expected_batch_size(self) -> float:
        """B = qN."""
        return self.sample_rate * self.sampler_of_draws.num_samples

    def __iter__(self) -> Iterator[Any]:
        sampler, this, process = self.sampler_of_draws, 0, os.getpid()
        for batch in super().__iter__():
            if self.num_workers > 0 and os.getpid() != process:
                raise RuntimeError(
                    "this pass over the private loader began in another process, whose workers'"
                    " batches come from draws of that process: begin a new pass"
                )
            this = this or sampler.passes
            sampler.require_latest(this)
            sampler.delivered()
            for tensor in _tensors(batch):
                _note_private(tensor)
            yield batch

    def records_digests(self) -> dict[str, str | None]:
        """Digests of up to 64 records in their order, of augmented ones under one seed: of each
        part of a record, None if it differs at every look.

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
        if len(lasting) < len(first) and all(
            len(set(digests)) == 1 for digests in lasting.values()
        ):
            raise ValueError(
                "the records differ at every look, and no part of them that stays the same tells"
                " them apart: nobody can see whether all ranks keep them in one order, and a record"
                " at two positions would be used twice. Let the data set draw what it changes from"
                " torch's, NumPy's or Python's global random numbers, or hand out a label with"
                " every record."
            )
        return {
            part: (
                hashlib.blake2b(b"".join(lasting[part]), digest_size=16).hexdigest()
                if part in lasting
                else None
            )
            for part in first
        }


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, (list, tuple, Mapping)):
        for item in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(item)


@contextlib.contextmanager
def _one_seed() -> Iterator[None]:
    """Python's, NumPy's and torch's global random numbers are always the same inside, and go
    on afterwards as if nothing had been.
    """
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
        parts[f"{part}, its shape"].append(
            hashlib.blake2b(repr((value.dtype, tuple(value.shape))).encode()).digest()
        )
        parts[part].append(
            hashlib.blake2b(
                value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            ).digest()
        )
    elif isinstance(value, Mapping):
        for name, item in value.items():
            _digest_into(parts, f"{part}[{name!r}]", item)
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            _digest_into(parts, f"{part}[{i}]", item)
