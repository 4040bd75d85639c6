"""Other ways than Poisson sampling to draw batches, each with what it is charged as."""

from __future__ import annotations

from typing import Any

import torch
from dp_accounting.dp_event import TruncatedSubsampledGaussianDpEvent

from ..accounting.events import DpEvent, GaussianDpEvent, SampledWithoutReplacementDpEvent
from ..accounting.random_allocation import RandomAllocationDpEvent
from ..errors import ArgumentError, CheckpointError
from ..ranks import Ranks
from .draws import _OTHER_LAW, PoissonSampler, _Draw
from .joining import some_of, uniform


def _chosen(number: int, most: int, generator: torch.Generator) -> torch.Tensor:
    """``most`` of ``number`` positions, every such set with the same probability, in rising
    order: those with the smallest of independent random keys. Keys that do not decide are drawn
    again.
    """
    while True:
        keys = torch.empty(number, dtype=torch.int64, device="cpu").random_(generator=generator)
        smallest, chosen = torch.topk(keys, most, largest=False)
        if int((keys <= smallest.max()).sum()) == most:
            return chosen.sort().values


class TruncatedPoissonSampler(PoissonSampler):
    """Poisson draws, of which those of more than ``max_batch_size`` records are cut to so many,
    chosen at random: no batch needs more memory.

    Args:
        num_data, sample_rate, generator, num_workers, ranks: as for :class:`PoissonSampler`.
        max_batch_size: the most records of a batch, those of all ranks together.
    """

    law, batches = "truncated_poisson", "truncated Poisson batches"

    def __init__(
        self,
        num_data: int,
        sample_rate: float,
        generator: torch.Generator | None,
        num_workers: int,
        ranks: Ranks | None = None,
        *,
        max_batch_size: int,
    ) -> None:
        super().__init__(num_data, sample_rate, generator, num_workers, ranks)
        self.max_batch_size = max_batch_size

    def __reduce__(self) -> tuple[Any, ...]:
        return _truncated, (*super().__reduce__()[1], self.max_batch_size)

    def _joining(self, stream: torch.Generator) -> torch.Tensor:
        joining = super()._joining(stream)
        if len(joining) > self.max_batch_size:
            joining = joining[_chosen(len(joining), self.max_batch_size, stream)]
        return joining

    def event(self, gaussian: GaussianDpEvent) -> DpEvent:
        return TruncatedSubsampledGaussianDpEvent(
            self.num_samples, self.sample_rate, self.max_batch_size, gaussian.noise_multiplier
        )


def _truncated(
    num_data: int, sample_rate: float, generator: None, num_workers: int, max_batch_size: int
) -> TruncatedPoissonSampler:
    return TruncatedPoissonSampler(
        num_data, sample_rate, generator, num_workers, max_batch_size=max_batch_size
    )


class FixedSizeSampler(PoissonSampler):
    """Batches of one size, drawn without replacement, each independently of the others."""

    law, batches = "fixed_size", "batches of fixed size"

    @property
    def batch_size(self) -> int:
        """How many records a batch has."""
        return round(self.sample_rate * self.num_samples)

    def _joining(self, stream: torch.Generator) -> torch.Tensor:
        choose = some_of if self._is_by_darts else _chosen
        return choose(self.num_samples, self.batch_size, stream)

    def event(self, gaussian: GaussianDpEvent) -> DpEvent:
        return SampledWithoutReplacementDpEvent(self.num_samples, self.batch_size, gaussian)


class RandomAllocationSampler(PoissonSampler):
    """Every pass every record joins one of the pass's t batches, drawn for it alone.

    A pass is charged when its first batch is released, at that step's noise. Later steps of it may
    have more noise, not less. A pass that was left goes on in the next one, which then ends with
    it; a step that failed after it was charged is charged again, with a whole pass. A pass is drawn
    as a whole, in time and memory in proportion to N.

    Args:
        num_data, generator, num_workers, ranks: as for :class:`PoissonSampler`.
        sample_rate: 1/t.
    """

    law, batches = "random_allocation", "batches by random allocation"

    def __init__(
        self,
        num_data: int,
        sample_rate: float,
        generator: torch.Generator | None,
        num_workers: int,
        ranks: Ranks | None = None,
    ) -> None:
        self._begin_epoch()
        super().__init__(num_data, sample_rate, generator, num_workers, ranks)

    @property
    def steps_per_charge(self) -> int:  # type: ignore[override]
        """t."""
        return self.steps

    def event(self, gaussian: GaussianDpEvent) -> DpEvent:
        return RandomAllocationDpEvent(self.steps, gaussian)

    def _begin_epoch(self) -> None:
        self._batches: list[torch.Tensor] | None = None  # of this pass
        self._epoch_state: torch.Tensor | None = None  # of the generator, before they were drawn
        self._turn = 0  # draws of this pass that were released
        self._paid: float | None = None  # the noise multiplier at which this pass was charged
        self._is_begun = False  # a release of the next draw was charged, and may have been made

    def _renew(self, generator: torch.Generator) -> None:
        super()._renew(generator)
        self._begin_epoch()

    def _left_in_pass(self) -> int:
        return self.steps - self._turn

    def _next_draw(self) -> _Draw:
        if self._batches is None:
            draw = super()._next_draw()
            self._epoch_state = draw.state
            return draw
        return self._drawn(self._batch_of(self._batches), self._epoch_state)

    def _joining(self, stream: torch.Generator) -> torch.Tensor:
        joined = torch.from_numpy(uniform(self.num_samples, self.steps, stream))
        sizes = joined.bincount(minlength=self.steps)
        self._batches = list(joined.argsort(stable=True).split(sizes.tolist()))
        return self._batch_of(self._batches)

    def _batch_of(self, batches: list[torch.Tensor]) -> torch.Tensor:
        """The next one of this pass."""
        batch = self._turn + len(self._draws)
        assert batch < self.steps, "a pass has no batch beyond its last one"
        return batches[batch]

    def is_paid(self, noise_multiplier: float) -> bool:
        if self._paid is None or self._is_begun:
            return False
        if noise_multiplier < self._paid:
            raise ArgumentError(
                f"the noise multiplier fell from {self._paid:g} to {noise_multiplier:g} within a"
                " pass, which was charged as a whole when it began: change lr between passes.",
                code="pass-charged",
            )
        self._is_begun = True
        return True

    def paid(self, noise_multiplier: float) -> None:
        least = noise_multiplier if self._paid is None else min(noise_multiplier, self._paid)
        self._paid, self._is_begun = least, True

    def retire(self) -> None:
        super().retire()
        self._turn, self._is_begun = self._turn + 1, False
        if self._turn == self.steps:
            self._begin_epoch()

    def position(self) -> Any:
        waiting = self._waiting[0] if self._waiting else self._epoch_state
        states = (
            [self.generator.get_state()]
            if waiting is None
            else [
                waiting,
                self.generator.get_state(),
            ]
        )
        return {
            "states": torch.stack(states),
            "turn": self._turn,
            "paid": self._paid,
            "of": [self.num_samples, self.steps],
            "keyed": self._is_keyed,
        }

    def require_position(self, position: Any) -> None:
        if not (isinstance(position, dict) and "turn" in position):
            raise CheckpointError(_OTHER_LAW)
        if len(position["states"]) > 1 and position.get("of") != [self.num_samples, self.steps]:
            raise CheckpointError(
                "the saved run began a pass over other data or of other batches, which cannot"
                f" go on over {self.num_samples} records in {self.steps} batches: keep data"
                " and batch size, or leave out generator=."
            )

    def resume(self, position: Any) -> None:
        self._draw_as(keyed=position.get("keyed", False))
        self._go_on(position["states"])
        self._turn, self._paid = position["turn"], position["paid"]
