"""Canaries: records that the auditor puts into the data, or leaves out, by the toss of a coin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..batches.poisson_loader import PoissonLoader
from ..errors import AuditError
from ..optim.base import PrivateOptimizer
from ..per_sample.gradient_source import GradientSource
from ..release.layout import Layout
from .bounds import Array
from .coin import Coins
from .scores import log_ratio, weighted_difference

# -- records ---------------------------------------------------------------------------------------


class WithRecords(Dataset[Any]):
    """A data set and the canaries whose coin says "in", at its end."""

    def __init__(self, dataset: Any, canaries: Sequence[Any], coins: Coins) -> None:
        self._dataset, self._canaries = dataset, canaries
        self._joined = np.flatnonzero(coins)

    def __len__(self) -> int:
        return len(self._dataset) + len(self._joined)

    def __getitem__(self, index: int) -> Any:
        own = index - len(self._dataset)
        return self._dataset[index] if own < 0 else self._canaries[int(self._joined[own])]


# -- gradients -------------------------------------------------------------------------------------


class _Place(int):
    """What a data set holds at a place that is kept for a canary."""


class WithPlaces(Dataset[Any]):
    """A data set with a place for each canary at its end, which draws take like any record's."""

    def __init__(self, dataset: Any, canaries: int) -> None:
        self._dataset, self._canaries = dataset, canaries

    def __len__(self) -> int:
        return len(self._dataset) + self._canaries

    def __getitem__(self, index: int) -> Any:
        own = index - len(self._dataset)
        return self._dataset[index] if own < 0 else _Place(own)


class _WithoutPlaces:
    """A collate function that keeps places out of the batch, and remembers which they were."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any]) -> None:
        self.wrapped_collator_fn = collate_fn
        self.places: list[int] = []

    def __call__(self, records: list[Any]) -> Any:
        self.places = [int(record) for record in records if isinstance(record, _Place)]
        return self.wrapped_collator_fn([r for r in records if not isinstance(r, _Place)])


class GradientCanaries:
    """Canaries of which each has a gradient of its own: ±C along one parameter, another one in each
    step, which no other canary has in that step.

    Their places are drawn as records are, and what they add goes to the sum of clipped gradients.
    Whoever looks at the releases knows all other records: their share of a sum is subtracted. Of
    the training, the sums before the noise and the releases are read, and nothing is drawn.

    Args:
        coins: which canaries are in the data.
        generator: the auditor's, for the directions.
        scores: ``"sums"`` adds up what the releases say of a canary. ``"differences"`` adds up what
            each release and the one before say against each other, which noise that is used twice
            does not hide.
        are_apart: whether the bound takes what is seen of one canary for independent of the others'
            coins, as where every record is drawn for itself.

    Attributes:
        scores: one for each canary; higher: it was in the data.
        steps: how many releases were seen.
    """

    def __init__(
        self,
        coins: Coins,
        generator: np.random.Generator,
        scores: str = "sums",
        *,
        are_apart: bool = False,
    ) -> None:
        if scores not in ("sums", "differences"):
            raise AuditError(f'scores must be "sums" or "differences", got {scores!r}')
        self._coins, self._generator, self._kind = coins, generator, scores
        self._are_apart = are_apart
        self.scores = np.zeros(len(coins))
        self.steps = 0
        self._last: _Seen | None = None

    def attach(self, optimizer: PrivateOptimizer, loader: PoissonLoader) -> None:
        """Take part in what was made private just now."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._size = sum(p.numel() for p in parameters if p.requires_grad)
        if self._size < len(self._coins):
            raise AuditError(
                f"{len(self._coins)} canaries need as many parameters, a direction each, and the"
                f" model has {self._size}: use num_canaries={self._size}, or repeated transcripts"
            )
        if loader.num_workers > 0:
            raise AuditError(
                "gradient canaries are dealt out where batches are made: build the DataLoader with"
                " num_workers=0"
            )
        draws = loader.sampler_of_draws
        if self._are_apart and draws.scheme != "poisson":
            raise AuditError(
                'bound="independent" is for full and Poisson batches of records, and this loader'
                f' draws {draws.batches}: pass bound="gaussian"'
            )
        collate: Any = loader.collate_fn
        self._places = _WithoutPlaces(collate.wrapped_collator_fn)
        collate.wrapped_collator_fn = self._places
        if (deliver := draws.delivery) is not None:
            draws.delivery = lambda batch, drawn: deliver(batch, drawn - len(self._places.places))
        self._rate, self._draws = loader.sample_rate, draws
        self._batch_size, self._bound = optimizer.expected_batch_size, optimizer.max_grad_norm
        optimizer.release.source = SourceWithCanaries(optimizer.release.source, self)
        optimizer.release.watch = self._released
        self._draw = -1
        self._turn()

    def _turn(self) -> None:
        """New directions for the next release, along other parameters than the last ones where
        there are enough.
        """
        number, half = len(self._coins), self._size // 2
        if half >= number:
            along = 2 * self._generator.choice(half, number, replace=False) + self.steps % 2
        else:
            along = self._generator.choice(self._size, number, replace=False)
        self._along = torch.as_tensor(along)
        self._signs: Array = self._generator.choice([-1.0, 1.0], number)

    def add_to(self, out: Sequence[Tensor], second_moment: Tensor | None) -> int:
        """Add the gradients of the canaries in this batch, or part of a batch.

        Returns:
            How many places it had, those of canaries that are not in the data included.
        """
        places = np.array(self._places.places, dtype=np.intp)
        joined = places[self._coins[places]]
        flat = torch.cat(list(out))
        if self._draws.draw != self._draw:  # nothing is left of a step that failed
            self._draw, self._own = self._draws.draw, torch.zeros_like(flat)
        added = torch.zeros_like(flat)
        along = self._along[joined].to(flat.device)
        added[along] = torch.as_tensor(self._bound * self._signs[joined]).to(flat)
        self._others = flat - self._own
        self._own += added
        for piece, share in zip(out, added.split([len(piece) for piece in out]), strict=True):
            piece.add_(share)
        if second_moment is not None:
            diagonal = second_moment if second_moment.dim() == 1 else second_moment.diagonal()
            diagonal[along] += self._bound**2
        return len(places)

    def _released(self, layout: Layout) -> None:
        """Score what was released."""
        if layout.smallest_noise_multiplier == 0:
            raise AuditError("the run has no noise, so its ε is infinite: nothing is to be refuted")
        total = layout.gradient * self._batch_size - self._others
        multipliers = torch.cat(
            [torch.full_like(g.gradient, g.noise_multiplier) for g in layout.groups]
        )
        now = _Seen(
            (total / self._bound).cpu().double().numpy(),
            multipliers.cpu().double().numpy(),
            self._along.numpy(),
            self._signs,
        )
        self.scores += self._sum(now) if self._kind == "sums" else self._difference(now)
        self._last = now
        self.steps += 1
        self._turn()

    def _sum(self, now: _Seen) -> Array:
        noise = now.noise[now.along]
        used = np.isfinite(noise)  # an lr is not 0
        found = np.zeros(len(noise))
        found[used] = log_ratio(now.toward(now)[used], noise[used], self._rate)
        return found

    def _difference(self, now: _Seen) -> Array:
        last = self._last
        if last is None:
            return np.zeros(len(self._coins))
        return weighted_difference(
            now.toward(now) - last.toward(now) + last.toward(last) - now.toward(last)
        )


class _Seen(NamedTuple):
    """A release without the share of the records, in units of C; the noise that was stated; and
    what the canaries' directions were.
    """

    total: Array
    noise: Array
    along: npt.NDArray[np.intp]
    signs: Array

    def toward(self, other: _Seen) -> Array:
        """How far it went in the directions of a release."""
        return self.total[other.along] * other.signs


class SourceWithCanaries(GradientSource):
    """A source whose batches have canaries beside their records.

    Args:
        source: that of the records.
        canaries: what is added to its sums.
    """

    def __init__(self, source: GradientSource, canaries: GradientCanaries) -> None:
        super().__init__(None, source.loss_reduction)
        self._source, self._canaries = source, canaries
        self.independence, self.passes = source.independence, source.passes

    def add_clipped_sum(
        self,
        named_parameters: Sequence[tuple[str, Tensor]],
        max_grad_norm: float,
        out: Sequence[Tensor],
        *,
        scale: Tensor | None = None,
        second_moment: Tensor | None = None,
    ) -> int:
        if scale is not None:
            raise AuditError("an audit knows no sensitivity_scale: leave it out while auditing")
        records = self._source.add_clipped_sum(
            named_parameters, max_grad_norm, out, second_moment=second_moment
        )
        return records + self._canaries.add_to(out, second_moment)

    def require_pass_in_training_mode(self) -> None:
        self._source.require_pass_in_training_mode()

    def zero_grad(self, parameters: Iterable[Tensor]) -> None:
        self._source.zero_grad(parameters)

    def discard(self, parameters: Iterable[Tensor]) -> None:
        self._source.discard(parameters)

    def require_nothing_kept(self) -> None:
        self._source.require_nothing_kept()

    def norms(self, named_parameters: Sequence[tuple[str, Tensor]]) -> Tensor:
        return self._source.norms(named_parameters)

    def per_record_gradients(self, parameter: Tensor) -> Tensor | None:
        return self._source.per_record_gradients(parameter)

    def require_unchanged(self) -> None:
        self._source.require_unchanged()

    def paused(self) -> AbstractContextManager[None]:
        return self._source.paused()

    def remove(self) -> None:
        self._source.remove()
