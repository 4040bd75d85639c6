"""The Poisson sampler of a private loader: each draw is used for exactly one step."""

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
from ..distributed import MAKE_PRIVATE, Ranks
from ..errors import ArgumentError, ArgumentTypeError, CheckpointError, StateError
from ..noise import fresh_generator, stream_of_key
from ..processes import this_process
from .datasets import Arrangement, require_each_once, require_no_repeats
from .poisson_sampling import MAX_RECORDS, DenseSubset, SparseSubset

if TYPE_CHECKING:
    from ..accounting.accountant import PrivacyAccountant

_DENSE_RATE = 1 / 16  # at larger rates a random number for every record costs no more than darts
_MAX_BATCHES = 2**63  # in a pass


class _Draw(NamedTuple):
    records: torch.Tensor  # positions of this rank's records
    checksum: int  # of all ranks' records
    state: torch.Tensor | None  # of the caller's generator before the draw


class DrawSequence:
    """The sequence of draws of one process and one thread: its random stream, the draws that wait
    for a step, and the position from which a resumed run draws them again.
    """

    ranks: Ranks | None
    generator: torch.Generator | None
    num_samples: int
    passes: int
    draw: int
    event: Any  # of the steps on these draws
    _process: Any

    def _renew(self, generator: torch.Generator) -> None:
        """Begin a new sequence of draws."""
        self._stream = generator
        # the thread of the pass, and a new lock: a fork copies no other threads
        self._thread, self._lock = threading.current_thread(), threading.Lock()
        self._thread_id = get_ident()
        self._draws = deque[_Draw]()  # draws without a step
        # in a resumed run: generator states from which the waiting draws are repeated first
        self._waiting = deque[torch.Tensor]()

    def _begin(self) -> None:
        """Begin a pass, with the waiting draws."""
        self._handed = 0  # draws of this pass that the loader has read
        self._delivered = 0  # draws of this pass that the loader has delivered
        self._is_ready = False  # a batch was delivered and has no step yet
        self._is_last = True  # this batch completes its draw
        self._is_missed = False  # a batch of this pass was delivered and got no step
        self._is_part_due = False  # Opacus announced a part of a draw that is not collated yet
        self.draw += 1

    def _enter_process(self) -> None:
        """In a forked child begin a new sequence with fresh randomness."""
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
        """Raise in a forked child that would repeat its parent's draws."""
        if this_process() != self._process and self._is_shared:
            raise StateError(
                "this private loader was made in another process, and a forked child would draw the"
                " same batches. Call make_private in the child on a DataLoader with another"
                " generator=, or without one.",
                code="forked",
            )

    def _enter_thread(self, *, begins: bool = False) -> None:
        """Raise unless this thread owns the pass: gradients of two threads would be added up. A
        thread may begin and own a pass while no batch waits for a step. Call under the lock.
        """
        if begins and (not self._delivered or not self._thread.is_alive()):
            self._thread, self._thread_id = threading.current_thread(), get_ident()
        elif get_ident() != self._thread_id:
            raise StateError(
                "another thread took a batch of this private loader and has not stepped on it: step"
                " there first, or call make_private for each thread, with one accountant.",
                code="loader-two-passes",
            )

    def draw_as_rank_0(self, ranks: Ranks) -> None:
        """Draw the same batches as rank 0; with callers' generators they are the same already."""
        state = ranks.from_rank_0(MAKE_PRIVATE, lambda: self._stream.get_state().tolist())
        if self.generator is None:
            self._renew(self._stream.set_state(torch.tensor(state, dtype=torch.uint8)))

    # -- checkpoints -------------------------------------------------------------------------------

    def position(self) -> dict[str, Any]:
        """States of the caller's generator: before each waiting draw, and the present one."""
        states = torch.stack([*self._waiting_states(), self._stream.get_state()])
        event = repr(self.event(GaussianDpEvent(1.0)))
        return {"states": states, "of": [self.num_samples, event]}

    def _waiting_states(self) -> list[torch.Tensor]:
        return [*(draw.state for draw in self._draws if draw.state is not None), *self._waiting]

    def require_position(self, position: dict[str, Any]) -> None:
        """Raise unless the draws that waited at ``position`` can be repeated."""
        own = self.position()
        is_unfinished = len(position["states"]) > 1
        if position.keys() != own.keys() or (is_unfinished and position["of"] != own["of"]):
            raise CheckpointError(
                "the saved run used another sampling scheme, or has an unfinished draw or pass with"
                " other data or batches: keep data, batch size and sampling=, or leave out"
                " generator=."
            )

    def resume(self, position: dict[str, Any]) -> None:
        """Continue a saved run in a new pass; the draws that waited come first."""
        *waiting, here = (state.clone() for state in position["states"])
        self._renew(self._stream.set_state(here))
        self._waiting.extend(waiting)
        self.passes += 1
        self._begin()


class PoissonSampler(DrawSequence, UniformWithReplacementSampler):
    """Each record joins a batch independently with probability q. Other schemes are subclasses.

    Amplification by sampling holds if each draw gets exactly one step: skipping a draw because of
    its records, or because it is empty, means choosing the batch. Draws therefore form one
    sequence. A draw waits until a step is taken on all of its records. A pass begins with the
    waiting draws, and a step on a later draw is refused while an earlier one waits. A forked
    process, and a copy (pickled or not), draws a different sequence.

    Several ranks draw the same batch from one stream. Rank r of W uses the records at the positions
    r, r + W, r + 2W, …, so no record is on two ranks, and the batch does not depend on W.

    For q < 1/16 a draw costs O(qN), and the actual rate is q itself (:mod:`.poisson_sampling`). At
    larger rates it costs O(N), and the actual rate is at most 2⁻⁷⁷ below q, never above.

    With a caller's generator each draw is seeded by a hash of its next 256 bits, so draws of
    overlapping streams are independent. In one process, equal bits are refused.

    Args:
        num_data: number of records N of all ranks, at most 2⁵³.
        sample_rate: q in [2⁻⁶³, 1].
        generator: the caller's, on the CPU; None: the operating system's entropy.
        num_workers, ranks: those of the loader.
        options: those of the scheme.

    **Privacy.** Nothing is released, but draws are private data. Rate, number of records and
    generator are read-only, because steps are charged for them.
    """

    # names of the scheme and of its batches, and the number of releases of one charge
    scheme, batches, steps_per_charge = "poisson", "Poisson batches", 1

    def __init__(
        self,
        num_data: int,
        sample_rate: float,
        generator: torch.Generator | None,
        num_workers: int,
        ranks: Ranks | None = None,
        **options: Any,
    ) -> None:
        if not (0 < sample_rate <= 1 and 1 / sample_rate <= _MAX_BATCHES):
            raise ArgumentError(
                "a sampling rate is batch size / number of records, a probability of at least"
                f" 2**-63; got {sample_rate}"
            )
        if num_data > MAX_RECORDS:
            raise ArgumentError(
                f"{num_data} records are more than 2**53, so positions are not exact in float64:"
                " train on a part, torch.utils.data.Subset"
            )
        if generator is not None and generator.device.type != "cpu":
            raise ArgumentError(
                "batches are drawn on the CPU, but the DataLoader's generator= is on"
                f" {generator.device}: pass torch.Generator()",
                code="loader-generator",
            )
        self._num_data, self._sample_rate = num_data, sample_rate
        self._steps = max(1, math.floor(1 / sample_rate + 1e-9))  # 1/q may be rounded down
        self._user_generator = generator
        self.num_workers, self.ranks, self._options = num_workers, ranks, options
        count, _ = self.drawn
        self._is_sparse = sample_rate < _DENSE_RATE and count > 0
        self._subset = (SparseSubset if self._is_sparse else DenseSubset)(count, sample_rate)
        self.before_delivery: Callable[[], None] = lambda: None  # drops earlier batches' gradients
        self.before_part: Callable[[], None] = lambda: None  # runs before a part of a draw is read
        # makes batches whose operations run for each record alone; None: ordinary tensors
        self.delivery: Callable[[Any, int], Any] | None = None
        self._dataset: Any = None  # the data set whose positions are drawn
        self._arrangement: Arrangement | None = None  # at the last check
        # the accountant of the steps, and the noise multiplier of a calibration at the end
        self.accountant: PrivacyAccountant | None = None
        self.reserved: float | None = None
        self.passes = 0
        self.draw = 0  # changes with every delivery of a new draw
        self.checksum = 0  # of the draw that was delivered last
        # private, must not leave the library: number of this rank's records in draw and batch
        self.size = self.part_size = 0
        self._process = this_process()
        self._renew(fresh_generator() if generator is None else generator)
        self._begin()

    num_samples = property(attrgetter("_num_data"))  # Opacus' name
    counted_records = property(attrgetter("_num_data"))  # the optimizer's N
    sample_rate = property(attrgetter("_sample_rate"))
    steps = property(attrgetter("_steps"))  # batches of a pass
    generator = property(attrgetter("_user_generator"))  # None: no caller's generator

    def __reduce__(self) -> tuple[Any, ...]:
        if self._is_shared:
            raise ArgumentTypeError(
                "a private loader with your own generator, or on several ranks, cannot be copied:"
                " both would draw the same batches. Call PrivacyEngine.make_private on a second"
                " DataLoader.",
                code="copied",
            )
        self.look_at_data()
        settings = self.num_samples, self.sample_rate, None, self.num_workers
        return partial(type(self), **self._options), settings

    # -- the data set ------------------------------------------------------------------------------

    def watch(self, dataset: Any) -> None:
        """Set the data set whose positions are drawn."""
        if self._dataset is None:  # a shallow copy of the loader has it already
            self._dataset = dataset
            self.look_at_data()

    def look_at_data(self) -> None:
        """Raise if the number of records has changed, if records repeat, or if records were moved
        although their order matters.
        """
        if self._dataset is None:
            return
        if (count := len(self._dataset)) != self.num_samples:
            raise StateError(
                f"the data set has {count} records now, but had {self.num_samples} when it was"
                " made private: restore it, or call make_private again.",
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
        """The reason why the order of the records must not change; empty if it may change."""
        return "" if self.ranks is None else "but ranks share records by position"

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
            positions = records.tolist()
            if self.drawn[1] == "records":
                require_each_once(self._dataset, positions)
            yield positions

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
        if self._waiting:  # only now, because the line above may raise
            self._waiting.popleft()
        return self._share(self._joining(stream), state)

    def _joining(self, stream: torch.Generator) -> torch.Tensor:
        """The positions of the records that join the next batch, in rising order."""
        return self._subset.draw(stream)

    def _share(self, joining: torch.Tensor, state: torch.Tensor | None) -> _Draw:
        """The draw of these records; it contains this rank's share of them."""
        if self.ranks is None:
            return _Draw(joining, 0, state)
        own = joining[joining % self.ranks.size == self.ranks.rank]
        return _Draw(own, zlib.crc32(joining.numpy().data), state)

    # -- one step on each draw ---------------------------------------------------------------------

    def takes_part(self, records: int) -> bool:
        """Whether a collated batch of so many records is the part of a draw that is due. It is not
        if another loader uses the collate function.
        """
        is_due, self._is_part_due = self._is_part_due, False
        if is_due:
            self.part_size = records
        return is_due

    def delivered(self, *, is_part: bool = False, is_last: bool = True) -> None:
        """Called when the loader delivers a draw, or Opacus' BatchMemoryManager a part of it."""
        if is_part and self.num_workers > 0:
            raise StateError(
                "BatchMemoryManager with num_workers > 0 prefetches batches, so one step could mix"
                " two draws. Build the DataLoader with num_workers=0.",
                code="loader-memory-manager",
            )
        self._enter_process()
        with self._lock:
            if get_ident() != self._thread_id:
                self._enter_thread()
            self.before_delivery()
            self._is_missed |= self._is_ready
            if self._is_last or not is_part:  # a new draw begins
                self._is_missed |= self._delivered > 0
                if self._delivered == self._handed:
                    raise StateError(
                        "this batch was drawn in another pass over the private loader, or by the"
                        " parent of this forked process: begin a new pass",
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
        """Called when the optimizer steps on the last delivered batch. Returns whether this batch
        completes its draw.
        """
        if not self._is_ready or this_process() != self._process:
            self.require_own_process()
            raise StateError(
                "the private loader delivered no new batch since the last step, or since this"
                " process was forked: take one batch from it for each step(), not from a loader"
                " that accelerate or Fabric made.",
                code="loader-no-batch",
            )
        if get_ident() != self._thread_id:
            self._enter_thread()
        self._is_ready = False
        if self._is_missed:
            raise StateError(
                "an earlier batch of this pass over the private loader got no step: call backward()"
                " and step() on every batch, also on empty ones, before you take the next one."
                " Opacus' BatchMemoryManager accumulates gradients.",
                code="loader-no-step",
            )
        return self._is_last

    def mark_used(self) -> None:
        """Called after a release from the draw. If a step fails before, the draw still waits."""
        self._draws.popleft()
        self._handed, self._delivered = self._handed - 1, 0

    @property
    def drawn(self) -> tuple[int, str]:
        """The number of units that are drawn, and their name (records or users)."""
        return self._num_data, "records"

    def event(self, gaussian: GaussianDpEvent) -> DpEvent:
        """The event of ``steps_per_charge`` Gaussian sums over draws, with this noise."""
        rate = self.sample_rate
        return gaussian if rate == 1 else PoissonSampledDpEvent(rate, gaussian)
