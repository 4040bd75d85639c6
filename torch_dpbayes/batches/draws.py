"""Poisson draws, of which each is used for exactly one step."""

from __future__ import annotations

import itertools
import math
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from opacus.utils.uniform_sampler import UniformWithReplacementSampler

from ..accounting.events import DpEvent, GaussianDpEvent, PoissonSampledDpEvent
from ..errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    FixedAttributeError,
    StateError,
)
from ..noise import fresh_generator, stream_of_key, use_position
from ..ranks import Ranks
from .joining import MOST_RECORDS, Cells, Darts

# From this rate on a number for every record costs no more than darts. Another value would make
# other draws of the saved positions of runs.
_FEW = 1 / 16
_MOST_BATCHES = 2**63  # of a pass
_MANY_DELIVERIES = 100
_OTHER_LAW = (
    "the saved run drew its batches in another way than this loader does: pass the sampling= that"
    " it had to make_private."
)


def _state_of(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()


class _Draw(NamedTuple):
    records: torch.Tensor  # positions of this rank's
    checksum: int  # with the records of other ranks
    state: torch.Tensor | None  # of the caller's generator beforehand


class PoissonSampler(UniformWithReplacementSampler):
    """The draws of a private loader, and what they are charged as. Other laws are subclasses.

    Every record joins a batch independently with probability q; knows which draw the optimizer
    may use next.

    Amplification by sampling holds for one step on each draw, whatever is in it: who skips a draw
    for what it holds has chosen the batch, also where it is an empty one. Draws therefore form one
    sequence. A draw stays until it was stepped on, once and with all of its records; a pass begins
    with those that are left from earlier ones, and a step on a later draw is refused while an
    earlier one waits.

    On several ranks all draw the same batch from one stream, and rank r of W takes its records r, r
    + W, r + 2W and so on: no record is on two ranks, and which ones join does not depend on W.

    A forked process draws a sequence of its own, and so does a copy, pickled or not.

    Where q < 1/16, a draw takes time and memory in proportion to qN, whatever N is, and the rate in
    force is q itself (:mod:`.joining` has the proof). Larger rates take them in proportion to N;
    the one in force is at most 2⁻⁷⁷ below q, never above. It depends neither on N nor on torch's
    default dtype.

    Args:
        num_data: number of records N, those of other ranks included, at most 2⁵³.
        sample_rate: q in (0, 1].
        generator: the caller's source of randomness on the CPU. Each draw takes 256 bits of it, and
            comes from a generator that a hash of them seeds: draws of streams that overlap are
            independent of each other, and where the same bits would seed a second one in a process,
            it is refused. None: entropy of the operating system.
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
            raise ArgumentError(
                f"a sampling rate is a probability between 0 and 1, got {sample_rate}: it is batch"
                " size / number of records"
            )
        if 1 / sample_rate > _MOST_BATCHES:
            raise ArgumentError(
                f"at a sampling rate of {sample_rate:g} a pass has more than 2**63 batches: it is"
                " batch size / number of records"
            )
        if num_data > MOST_RECORDS:
            raise ArgumentError(
                f"{num_data} records are more than 2**53, from where on positions are no longer"
                " exact in double precision: train on a part, torch.utils.data.Subset"
            )
        if generator is not None and generator.device.type != "cpu":
            raise ArgumentError(
                "batches are drawn on the CPU, but the DataLoader's generator= lives on"
                f" {generator.device}: pass torch.Generator()",
                code="loader-generator",
            )
        super().__init__(
            num_samples=max(1, num_data),
            sample_rate=sample_rate,
            generator=fresh_generator() if generator is None else generator,
            steps=max(1, math.floor(1 / sample_rate + 1e-9)),
        )
        self.__dict__["num_samples"] = num_data  # also 0, where that number is private
        self._draw_as(keyed=True)
        self.has_user_generator = generator is not None
        self.num_workers = num_workers
        self.ranks = ranks
        self.passes = 0
        self.draw = 0  # changes with every delivery of a new draw
        # forgets gradients of earlier batches
        self.before_delivery: Callable[[], None] = lambda: None
        # hands out batches whose operations run for each record alone; None: ordinary tensors
        self.delivery: Callable[[Any, int], Any] | None = None
        # how many records the data set has at the moment
        self.count_records: Callable[[], int] = lambda: num_data
        self._pid = os.getpid()
        self._state = _state_of(self.generator)  # where the last draw left the generator
        self._draws: deque[_Draw] = deque()  # what was drawn and not yet stepped on
        # of a resumed run: states from which the draws that got no step are drawn again, first
        self._waiting: deque[torch.Tensor] = deque()
        self._deliveries = 0  # of the first of them
        self._size = 0  # of the draw that was delivered last
        self.checksum = 0  # of that draw
        self.part_size = 0  # records in the batch delivered last, a draw or a part of one: data
        self._begin()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("sample_rate", "num_samples", "generator") and name in self.__dict__:
            raise FixedAttributeError(
                f"{name} of a private loader's draws is fixed: every step is charged for the draws"
                " that were declared. Make a loader with other ones by"
                " PrivacyEngine.make_private(..., data_loader=DataLoader(dataset, batch_size=...,"
                " generator=...))"
            )
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.has_user_generator or self.ranks is not None:
            raise ArgumentTypeError(
                "a private loader with a generator of the caller's, or of several ranks, cannot be"
                " copied: both would draw the same batches. Use PrivacyEngine.make_private on a"
                " DataLoader for the copy.",
                code="copied",
            )
        return type(self), (self.num_samples, self.sample_rate, None, self.num_workers)

    def _begin(self) -> None:
        self._handed = 0  # draws that the loader took in this pass; those that are left come first
        self._delivered = 0  # those of them that it has handed out
        self._ready = False  # a batch was delivered and not yet stepped on
        self._is_last = True  # it completes its draw
        self._missed = False  # a batch of this pass was delivered and never stepped on
        self._is_delivering = False  # the private loader hands out batches of this pass
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
            raise StateError(
                "this private loader was made in another process, and a forked child draws the same"
                " batches. Call make_private inside the child on a DataLoader with another"
                " generator=, or without one.",
                code="forked",
            )

    def _renew(self, generator: torch.Generator) -> None:
        self.__dict__["generator"] = generator
        self._state = _state_of(generator)
        self._draws.clear()
        self._waiting.clear()
        self._deliveries = 0

    def __iter__(self) -> Iterator[list[int]]:
        self._enter_process()
        if (count := self.count_records()) != self.num_samples:
            raise StateError(
                f"the data set has {count} records now, and had {self.num_samples} when it was made"
                " private: put them back, or call make_private for the records of today.",
                code="data-changed",
            )
        self._begin()
        self.passes += 1
        this = self.passes
        for _ in range(self._left_in_pass()):
            self.require_latest(this)
            self._enter_process()
            if self._handed == len(self._draws):
                self._draws.append(self._next_draw())
            self._handed += 1
            yield self._draws[self._handed - 1].records.tolist()

    def _left_in_pass(self) -> int:
        """How many draws a pass that begins now hands out."""
        return self.steps

    def require_latest(self, number: int) -> None:
        """Raise if another pass began after this one."""
        if number != self.passes:
            self._missed = True
            raise StateError(
                "two passes over one private loader at a time: end this pass and begin a new one,"
                " or look at records by DataLoader(loader.dataset, batch_size=...).",
                code="loader-two-passes",
            )

    def _next_draw(self) -> _Draw:
        state, here, stream = None, None, self.generator
        if self.has_user_generator:
            if self._waiting:
                here = self.generator.get_state()
                self.generator.set_state(self._waiting.popleft())
            state = self.generator.get_state()
            if self._is_keyed:
                stream = stream_of_key("a batch", self.generator, ["a batch"], "cpu")
            else:
                use_position("a batch", self.generator)
        elif _state_of(self.generator) != self._state:
            raise StateError(
                "the private loader's own generator was seeded or used from outside: call"
                " make_private again and leave it alone, or give it DataLoader(...,"
                " generator=torch.Generator().manual_seed(...)).",
                code="loader-generator",
            )
        joining = self._joining(stream)
        if here is not None:
            self.generator.set_state(here)
        self._state = _state_of(self.generator)
        return self._drawn(joining, state)

    def _drawn(self, joining: torch.Tensor, state: torch.Tensor | None) -> _Draw:
        """A draw of these records, of which this rank has its share."""
        if self.ranks is None:
            return _Draw(joining, 0, state)
        return _Draw(
            joining[joining % self.ranks.size == self.ranks.rank],
            zlib.crc32(joining.numpy().data),
            state,
        )

    def _draw_as(self, *, keyed: bool) -> None:
        """Take a key of the caller's generator for each draw, which costs nothing that depends on N
        where the rate is small; if not ``keyed``, draw from that generator itself, a number for
        every record, as earlier versions did.
        """
        self._is_keyed = keyed
        number, _ = self.drawn
        self._is_by_darts = keyed and self.sample_rate < _FEW and number > 0
        kind = Darts if self._is_by_darts else Cells
        self._who: Darts | Cells = kind(number, self.sample_rate)

    def _joining(self, stream: torch.Generator) -> torch.Tensor:
        """The positions of the records that join the next batch, in rising order."""
        return self._who.draw(stream)

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
            raise StateError(
                "BatchMemoryManager with num_workers > 0 announces batches before it delivers them;"
                " a skipped one would go unnoticed and two draws could mix in one step. Build the"
                " DataLoader with num_workers=0.",
                code="loader-memory-manager",
            )
        self._deliver(is_part=True, is_last=is_last)

    def _deliver(self, *, is_part: bool, is_last: bool) -> None:
        self._enter_process()
        self.before_delivery()
        self._is_delivering = True
        self._missed |= self._ready
        if self._is_last or not is_part:  # of a new draw
            self._missed |= self._delivered > 0
            if self._delivered == self._handed:
                raise StateError(
                    "this batch was drawn in another pass over the private loader, or by the"
                    " process from which this one was forked: begin a new pass",
                    code="loader-no-batch",
                )
            self._deliveries += self._delivered == 0
            if self._deliveries > _MANY_DELIVERIES:
                self._deliveries = 0
                raise StateError(
                    f"this batch was handed out {_MANY_DELIVERIES} times and got no step: call"
                    " backward() and step() on every batch, whatever is in it. To look at records,"
                    " use DataLoader(loader.dataset, batch_size=...).",
                    code="loader-no-step",
                )
            self._size, self.checksum = (
                len(self._draws[self._delivered].records),
                self._draws[self._delivered].checksum,
            )
            self.part_size = self._size
            self._delivered += 1
            self.draw += 1
        self._ready, self._is_last = True, is_last

    def use(self) -> bool:
        """The optimizer steps on the batch delivered last; returns whether it completes its
        draw.
        """
        self.require_own_process()
        if self._handed > 0 and not self._is_delivering and os.getpid() == self._pid:
            raise StateError(
                "another loader took over the draws of the private one, as those of accelerate's"
                " prepare() and Lightning's Fabric do: take batches from the loader that"
                " make_private returned.",
                code="loader-replaced",
            )
        if not self._ready or os.getpid() != self._pid:
            raise StateError(
                "no new batch came from the private loader since the last step, or since this"
                " process was forked: take batches from the loader that make_private returned, one"
                " for each step().",
                code="loader-no-batch",
            )
        self._ready = False
        if self._missed:
            raise StateError(
                "a batch of this pass over the private loader got no step, or the one after it was"
                " taken first: call backward() and step() on every batch, empty ones included."
                " Opacus' BatchMemoryManager accumulates gradients.",
                code="loader-no-step",
            )
        return self._is_last

    def retire(self) -> None:
        """The optimizer has made a release out of the draw, which is used up now. A step that
        fails before leaves it waiting.
        """
        self._draws.popleft()
        self._handed, self._delivered, self._deliveries = self._handed - 1, 0, 0

    # -- what the draws are charged as -------------------------------------------------------------

    law, batches = "poisson", "Poisson batches"
    steps_per_charge = 1

    @property
    def drawn(self) -> tuple[int, str]:
        """How many there are of what is drawn, and what that is."""
        return self.num_samples, "records"

    def event(self, gaussian: GaussianDpEvent) -> DpEvent:
        """What is charged for ``steps_per_charge`` Gaussian sums of this noise / clip bound over
        the draws.
        """
        return PoissonSampledDpEvent(self.sample_rate, gaussian)

    def is_paid(self, noise_multiplier: float) -> bool:
        """Whether the next release was charged already, together with earlier ones; told before
        each release, which :meth:`paid` tells if it was not.
        """
        return False

    def paid(self, noise_multiplier: float) -> None:
        """The next release, and what is charged together with it, was charged at this noise."""

    # -- saved runs --------------------------------------------------------------------------------

    def position(self) -> Any:
        """Where the draws are, and what draws they are. ``states`` of the caller's generator, a row
        each: those that the draws which wait for a step come from, then where it stands.

        Others may have drawn from it in between.
        """
        drawn = [draw.state for draw in self._draws if draw.state is not None]
        return {
            "states": torch.stack([*drawn, *self._waiting, self.generator.get_state()]),
            "keyed": self._is_keyed,
            "of": self._described(),
        }

    def _described(self) -> list[Any]:
        return [self.num_samples, repr(self.event(GaussianDpEvent(1.0)))]

    def require_position(self, position: Any) -> None:
        """Raise if ``position`` is not one that such draws were saved at, and where draws that
        wait, drawn again, would take other random numbers than they did, those of later draws.
        """
        if isinstance(position, torch.Tensor):  # of versions that had no keys
            are_same = self._end_where_the_next_begin(position)
        elif "turn" in position or "keyed" not in position:
            raise CheckpointError(_OTHER_LAW)
        else:
            are_same = len(position["states"]) == 1 or position["of"] == self._described()
        if not are_same:
            raise CheckpointError(
                "the saved run left draws that got no step, which cannot be shown to be of these"
                " data and batches: keep data and batch size, or leave out generator=."
            )

    def _end_where_the_next_begin(self, states: torch.Tensor) -> bool:
        """Whether draws that wait, drawn again without keys, take the random numbers that they
        took, no more and no less. How many these are tells the number of records, which such
        positions do not say.
        """
        was, trial, are_same = self._is_keyed, torch.Generator(), True
        self._draw_as(keyed=False)
        for state, end in itertools.pairwise(states):
            trial.set_state(state.clone())
            self._joining(trial)
            are_same &= torch.equal(trial.get_state(), end)
        self._draw_as(keyed=was)
        return are_same

    def resume(self, position: Any) -> None:
        """Go on from where a saved run was, in a new pass: with the draws that waited, then
        with new ones. A run that began with a number for every record goes on so.
        """
        is_old = isinstance(position, torch.Tensor)
        self._draw_as(keyed=not is_old and position["keyed"])
        self._go_on(position if is_old else position["states"])

    def _go_on(self, states: torch.Tensor) -> None:
        *waiting, here = (state.clone() for state in states)
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
