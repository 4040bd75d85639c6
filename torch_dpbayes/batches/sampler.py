"""The Poisson sampler of a private loader: each of its draws is used for exactly one step."""

from __future__ import annotations

import math
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from opacus.utils.uniform_sampler import UniformWithReplacementSampler

from ..accounting.events import DpEvent, GaussianDpEvent, PoissonSampledDpEvent
from ..distributed import Ranks
from ..errors import ArgumentError, ArgumentTypeError, CheckpointError, StateError
from ..noise import fresh_generator, stream_of_key
from ..processes import this_process
from .datasets import Arrangement, require_no_repeats
from .poisson_sampling import MAX_RECORDS, DenseSubset, SparseSubset

if TYPE_CHECKING:
    from ..accounting.accountant import PrivacyAccountant

_DENSE_RATE = 1 / 16  # from here on a random number for every record costs no more than darts
_MAX_BATCHES = 2**63  # of a pass


class _Draw(NamedTuple):
    records: torch.Tensor  # positions of this rank's records
    checksum: int  # of all ranks' records
    state: torch.Tensor | None  # of the caller's generator before the draw


class PoissonSampler(UniformWithReplacementSampler):
    """Each record joins a batch independently with probability q. Other schemes are subclasses.

    Amplification by sampling holds for one step on each draw: who skips a draw because of its
    records, or because it is empty, has chosen the batch. Draws therefore form one sequence. A draw
    waits until a step was taken on all of its records. A pass begins with the draws that wait, and
    a step on a later draw is refused while an earlier one waits. A forked process draws a sequence
    of its own, and so does a copy, pickled or not.

    Several ranks draw the same batch from one stream, and rank r of W takes its records r, r + W,
    r + 2W, …: no record is on two ranks, and which records join does not depend on W.

    For q < 1/16 a draw costs O(qN), and the rate in force is q itself (:mod:`.poisson_sampling`).
    At larger rates it costs O(N), and the rate in force is at most 2⁻⁷⁷ below q, never above.

    Each draw takes 256 bits of a generator of the caller's, and is seeded by their hash, so that
    draws of overlapping streams are independent; equal bits are refused in one process.

    Args:
        num_data: number of records N of all ranks, at most 2⁵³.
        sample_rate: q in [2⁻⁶³, 1].
        generator: the caller's, on the CPU; None: the operating system's entropy.
        num_workers, ranks: those of the loader.

    **Privacy.** Nothing is released; draws are data. Rate, number of records and generator are
    read-only, as steps are charged for them.
    """

    # names of the scheme and of its batches, and how many releases are charged together
    scheme, batches, steps_per_charge = "poisson", "Poisson batches", 1

    def __init__(
        self,
        num_data: int,
        sample_rate: float,
        generator: torch.Generator | None,
        num_workers: int,
        ranks: Ranks | None = None,
    ) -> None:
        if not (0 < sample_rate <= 1 and 1 / sample_rate <= _MAX_BATCHES):
            raise ArgumentError(
                "a sampling rate is batch size / number of records, a probability of at least"
                f" 2**-63; got {sample_rate}"
            )
        if num_data > MAX_RECORDS:
            raise ArgumentError(
                f"{num_data} records are more than 2**53, so positions are not exact in double"
                " precision: train on a part, torch.utils.data.Subset"
            )
        if generator is not None and generator.device.type != "cpu":
            raise ArgumentError(
                "batches are drawn on the CPU, but the DataLoader's generator= lives on"
                f" {generator.device}: pass torch.Generator()",
                code="loader-generator",
            )
        self._num_data, self._sample_rate = num_data, sample_rate
        self._steps = max(1, math.floor(1 / sample_rate + 1e-9))  # 1/q may be rounded down
        self._user_generator = generator
        self.num_workers, self.ranks = num_workers, ranks
        count, _ = self.drawn
        self._is_sparse = sample_rate < _DENSE_RATE and count > 0
        self._subset = (SparseSubset if self._is_sparse else DenseSubset)(count, sample_rate)
        self.before_delivery: Callable[[], None] = lambda: None  # forgets gradients of earlier ones
        self.before_part: Callable[[], None] = lambda: None  # of a draw, before it is read
        # makes batches whose operations run for each record alone; None: ordinary tensors
        self.delivery: Callable[[Any, int], Any] | None = None
        self._dataset: Any = None  # whose positions are drawn
        self._arrangement: Arrangement | None = None  # as it was when last looked at
        # where steps are charged, and the noise multiplier of a calibration kept for the end
        self.accountant: PrivacyAccountant | None = None
        self.reserved: float | None = None
        self.passes = 0
        self.draw = 0  # changes with every delivery of a new draw
        self.checksum = 0  # of the draw delivered last
        # data, which must not leave the library: this rank's records in the draw, and in the batch
        self.size = self.part_size = 0
        self._process = this_process()
        self._renew(fresh_generator() if generator is None else generator)
        self._begin()

    num_samples = property(attrgetter("_num_data"))  # Opacus' name
    sample_rate = property(attrgetter("_sample_rate"))
    steps = property(attrgetter("_steps"))  # batches of a pass
    generator = property(attrgetter("_user_generator"))  # nobody's but the sampler's: None

    def __reduce__(self) -> tuple[Any, ...]:
        if self._is_shared:
            raise ArgumentTypeError(
                "a private loader with your own generator, or on several ranks, cannot be copied:"
                " both would draw the same batches. Use PrivacyEngine.make_private on a"
                " DataLoader for the copy.",
                code="copied",
            )
        self.look_at_data()
        settings = self.num_samples, self.sample_rate, None, self.num_workers
        return partial(type(self), **self._options()), settings

    def _options(self) -> dict[str, Any]:
        """The keyword arguments that a subclass adds."""
        return {}

    def _renew(self, generator: torch.Generator) -> None:
        """Begin a new sequence of draws."""
        self._stream = generator
        # whose pass it is, and what makes it one's alone; a fork copies no other threads
        self._thread, self._lock = threading.current_thread(), threading.Lock()
        self._thread_id = get_ident()
        self._draws = deque[_Draw]()  # drawn, and not yet stepped on
        # of a resumed run: states from which the draws that wait are drawn again, first
        self._waiting = deque[torch.Tensor]()

    def _begin(self) -> None:
        """Begin a pass, with the draws that wait."""
        self._handed = 0  # draws of this pass that the loader took
        self._delivered = 0  # draws of this pass that it handed out
        self._is_ready = False  # a batch was delivered and not yet stepped on
        self._is_last = True  # it completes its draw
        self._is_missed = False  # a batch of this pass was delivered and never stepped on
        self._is_part_due = False  # Opacus announced a part of a draw that is not collated yet
        self.draw += 1

    def _enter_process(self) -> None:
        """A forked child begins a sequence of its own, with randomness of its own."""
        if this_process() != self._process:
            self.require_own_process()
            self._renew(fresh_generator())
            self._process = this_process()
            self._begin()

    @property
    def _is_shared(self) -> bool:
        """Whether a copy would draw the same batches."""
        return self.generator is not None or self.ranks is not None

    def require_own_process(self) -> None:
        """Raise in a forked child whose draws would be its parent's."""
        if this_process() != self._process and self._is_shared:
            raise StateError(
                "this private loader was made in another process, and a forked child draws the same"
                " batches. Call make_private inside the child on a DataLoader with another"
                " generator=, or without one.",
                code="forked",
            )

    def _enter_thread(self, *, begins: bool = False) -> None:
        """A pass belongs to the thread that began it: gradients of two would be added up. Another
        thread may begin one while no batch is out. Under the lock.
        """
        before = self._thread
        if begins and (not self._delivered or not before.is_alive()):
            self._thread, self._thread_id = threading.current_thread(), get_ident()
        elif get_ident() != self._thread_id:
            raise StateError(
                "another thread took a batch of this private loader that got no step yet: take its"
                " step there, or call make_private for each thread, with one accountant.",
                code="loader-two-passes",
            )

    # -- the data set ------------------------------------------------------------------------------

    def watch(self, dataset: Any) -> None:
        """Positions of this data set are drawn."""
        if self._dataset is None:  # in a shallow copy of the loader it is known
            self._dataset = dataset
            self.look_at_data()

    def look_at_data(self) -> None:
        """Raise if there are more or fewer records than are charged for, if some are there several
        times, or if they moved while they must not.
        """
        if self._dataset is None:
            return
        if (count := len(self._dataset)) != self.num_samples:
            raise StateError(
                f"the data set has {count} records now, and had {self.num_samples} when it was"
                " made private: put them back, or call make_private again.",
                code="data-changed",
            )
        if (now := Arrangement(self._dataset)) == self._arrangement:
            return
        if self._arrangement is not None and (why := self._why_in_order()):
            raise StateError(
                f"records of the data set were replaced or put in another order, {why}. Keep the"
                " order (draws are random anyway), or call make_private again.",
                code="data-changed",
            )
        if self.drawn[1] == "records":
            require_no_repeats(self._dataset)
        self._arrangement = now

    def _why_in_order(self) -> str:
        """Why the records must stay in their order; empty: they need not."""
        return "" if self.ranks is None else "and ranks share them by position"

    # -- drawing -----------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[list[int]]:
        self._enter_process()
        self.look_at_data()
        with self._lock:
            self._enter_thread(begins=True)
            self._begin()
            self.passes += 1
        this = self.passes
        for _ in range(self.left_in_pass()):
            self.require_latest(this)
            self._enter_process()
            with self._lock:
                if get_ident() != self._thread_id:
                    self._enter_thread()
                if self._handed == len(self._draws):
                    self._draws.append(self._next_draw())
                self._handed += 1
                records = self._draws[self._handed - 1].records
            yield records.tolist()

    def left_in_pass(self) -> int:
        """The number of draws in a pass that begins now."""
        return self._steps

    def require_latest(self, number: int) -> None:
        """Raise if another pass began after this one."""
        if number != self.passes:
            self._is_missed = True
            raise StateError(
                "two passes over one private loader are open: finish one before the next, or look"
                " at records with DataLoader(loader.dataset, batch_size=...).",
                code="loader-two-passes",
            )

    def _next_draw(self) -> _Draw:
        if self.generator is None:
            return self._share(self._joining(self._stream), None)
        source = self._stream
        if self._waiting:
            source = torch.Generator("cpu").set_state(self._waiting[0])
        state = source.get_state()
        stream = stream_of_key("a batch", source, ["a batch"], "cpu")
        if self._waiting:  # not before: it may have raised
            self._waiting.popleft()
        return self._share(self._joining(stream), state)

    def _joining(self, stream: torch.Generator) -> torch.Tensor:
        """The positions of the records that join the next batch, in rising order."""
        return self._subset.draw(stream)

    def _share(self, joining: torch.Tensor, state: torch.Tensor | None) -> _Draw:
        """A draw of these records, of which this rank has its share."""
        if self.ranks is None:
            return _Draw(joining, 0, state)
        own = joining[joining % self.ranks.size == self.ranks.rank]
        return _Draw(own, zlib.crc32(joining.numpy().data), state)

    def stream_state(self) -> torch.Tensor:
        """The position of this rank's random stream."""
        return self._stream.get_state()

    def draw_from(self, state: torch.Tensor) -> None:
        """Draw what rank 0 draws, unless the caller's generators do so already."""
        if self.generator is None:
            self._renew(self._stream.set_state(state))

    # -- one step on each draw ---------------------------------------------------------------------

    def takes_part(self, records: int) -> bool:
        """Whether so many records are the part of a draw that was announced last. They are none
        where another loader borrows the collate function.
        """
        is_due, self._is_part_due = self._is_part_due, False
        if is_due:
            self.part_size = records
        return is_due

    def delivered(self, *, is_part: bool = False, is_last: bool = True) -> None:
        """The loader hands out the next draw, or Opacus' BatchMemoryManager a part of it."""
        if is_part and self.num_workers > 0:
            raise StateError(
                "BatchMemoryManager with num_workers > 0 prefetches batches, so two draws could"
                " mix in one step. Build the DataLoader with num_workers=0.",
                code="loader-memory-manager",
            )
        self._enter_process()
        with self._lock:
            if get_ident() != self._thread_id:
                self._enter_thread()
            self.before_delivery()
            self._is_missed |= self._is_ready
            if self._is_last or not is_part:  # of a new draw
                self._is_missed |= self._delivered > 0
                if self._delivered == self._handed:
                    raise StateError(
                        "this batch was drawn in another pass over the private loader, or by the"
                        " process from which this one was forked: begin a new pass",
                        code="loader-no-batch",
                    )
                draw = self._draws[self._delivered]
                self.size = self.part_size = len(draw.records)
                self.checksum = draw.checksum
                self._delivered += 1
                self.draw += 1
            self._is_ready, self._is_last, self._is_part_due = True, is_last, is_part
        if is_part:
            self.before_part()

    def use(self) -> bool:
        """The optimizer steps on the batch delivered last; returns whether it completes its
        draw.
        """
        if not self._is_ready or this_process() != self._process:
            self.require_own_process()
            raise StateError(
                "no new batch came from the private loader since the last step, or since this"
                " process was forked: take one for each step() from it, not from a loader that"
                " accelerate or Fabric made.",
                code="loader-no-batch",
            )
        if get_ident() != self._thread_id:
            self._enter_thread()
        self._is_ready = False
        if self._is_missed:
            raise StateError(
                "an earlier batch of this pass over the private loader got no step: call backward()"
                " and step() on every batch, empty ones included, before the next one is taken."
                " Opacus' BatchMemoryManager accumulates gradients.",
                code="loader-no-step",
            )
        return self._is_last

    def mark_used(self) -> None:
        """The optimizer made a release of the draw. A step that fails before leaves it waiting."""
        self._draws.popleft()
        self._handed, self._delivered = self._handed - 1, 0

    @property
    def drawn(self) -> tuple[int, str]:
        """The number and the name of the drawn units (records or users)."""
        return self._num_data, "records"

    def event(self, gaussian: GaussianDpEvent) -> DpEvent:
        """The event of ``steps_per_charge`` Gaussian sums over draws, of this noise multiplier."""
        rate = self.sample_rate
        return gaussian if rate == 1 else PoissonSampledDpEvent(rate, gaussian)

    def position(self) -> dict[str, Any]:
        """Positions of the caller's generator: before each draw that waits for its step, and
        now.
        """
        states = torch.stack([*self._waiting_states(), self._stream.get_state()])
        event = repr(self.event(GaussianDpEvent(1.0)))
        return {"states": states, "of": [self.num_samples, event]}

    def _waiting_states(self) -> list[torch.Tensor]:
        return [*(draw.state for draw in self._draws if draw.state is not None), *self._waiting]

    def require_position(self, position: dict[str, Any]) -> None:
        """Raise unless the draws that waited at ``position`` can be drawn again."""
        own = self.position()
        is_unfinished = len(position["states"]) > 1
        if position.keys() != own.keys() or (is_unfinished and position["of"] != own["of"]):
            raise CheckpointError(
                "the saved run drew its batches in another way, or has an unfinished draw or pass"
                " of other data or batches: keep data, batch size and sampling=, or leave out"
                " generator=."
            )

    def resume(self, position: dict[str, Any]) -> None:
        """Go on from where a saved run was, in a new pass: first with the draws that waited."""
        *waiting, here = (state.clone() for state in position["states"])
        self._renew(self._stream.set_state(here))
        self._waiting.extend(waiting)
        self.passes += 1
        self._begin()
