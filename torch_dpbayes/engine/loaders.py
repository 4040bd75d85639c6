"""A private loader in place of the user's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from opacus.data_loader import DPDataLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from ..accounting.accountant import PrivacyAccountant
from ..accounting.events import Unit
from ..batches.collate_check import check_collate
from ..batches.draws import PoissonSampler
from ..batches.other_laws import (
    FixedSizeSampler,
    RandomAllocationSampler,
    TruncatedPoissonSampler,
)
from ..batches.people import People, PeopleSampler
from ..batches.poisson_loader import PoissonLoader
from ..batches.repeated_records import require_each_once
from ..errors import ArgumentError, ArgumentTypeError
from ..noise import stream_position
from ..optim.base import PrivateOptimizer
from ..ranks import Ranks

_LAWS: dict[str, Callable[..., PoissonSampler]] = {
    "poisson": PoissonSampler,
    "random_allocation": RandomAllocationSampler,
    "fixed_size": FixedSizeSampler,
}


@dataclass(frozen=True)
class Batches:
    """How ``make_private`` draws batches: its arguments of these names, checked.

    Raises:
        ValueError: they do not go together.
    """

    sampling: str
    max_batch_size: int | None
    people: Iterable[Any] | None = field(default=None, compare=False)
    records_per_person: int = 1

    def __post_init__(self) -> None:
        if self.sampling not in _LAWS:
            raise ArgumentError(
                f"sampling must be one of {', '.join(map(repr, _LAWS))}, got {self.sampling!r}"
            )
        most = self.max_batch_size
        if self.people is not None and (self.sampling != "poisson" or most is not None):
            raise ArgumentError(
                "people= draws people by Poisson sampling: leave out sampling= and max_batch_size="
            )
        if self.people is None and self.records_per_person != 1:
            raise ArgumentError(
                "records_per_person= needs people=, the id of each record's person in the order of"
                " the data set"
            )
        if most is None:
            return
        if self.sampling != "poisson":
            raise ArgumentError(
                f"max_batch_size cuts Poisson draws: leave it out with sampling={self.sampling!r}"
            )
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise ArgumentError(f"max_batch_size must be a positive integer, got {most!r}")

    @property
    def unit(self) -> Unit:
        """What is protected by such batches."""
        return "record" if self.people is None else "user"

    def require_unit(self, accountant: PrivacyAccountant | None) -> None:
        """Raise where the accountant protects something else."""
        if accountant is None or accountant.unit == self.unit:
            return
        if self.unit == "user":
            raise ArgumentError(
                "people= makes epsilon that of people, and this accountant's is that of records:"
                ' pass PrivacyEngine(PrivacyAccountant(..., unit="user"))'
            )
        raise ArgumentError(
            "this accountant protects people: pass people=, the id of each record's person in the"
            " order of the data set"
        )

    def loader(
        self, data_loader: DataLoader[Any], batch_size: float, ranks: Ranks | None
    ) -> PoissonLoader:
        """The loader that draws batches of about this size."""
        dataset: Any = data_loader.dataset
        size, most = len(dataset), self.max_batch_size
        if self.people is not None:
            people = People(self.people, size, self.records_per_person)
            if batch_size > people.counted:
                raise ArgumentError(
                    f"batch_size = {batch_size:g} is more than the {people.counted} records that"
                    " all people bring together: pass a smaller one, or a larger"
                    " records_per_person="
                )
            draws_of_people = partial(PeopleSampler, people=people)
            return PoissonLoader(data_loader, batch_size / people.counted, ranks, draws_of_people)
        if most is not None and most < batch_size:
            raise ArgumentError(
                f"max_batch_size = {most} is below the batch size {batch_size:g}, so that most"
                " draws would be cut: pass a smaller batch_size, or a larger max_batch_size"
            )
        law = self.sampling if batch_size < size else "poisson"  # all records: every law is one
        if law == "fixed_size":
            batch_size = round(batch_size)
        elif law == "random_allocation":
            batch_size = size / math.ceil(size / batch_size - 1e-9)
        draws = _LAWS[law]
        if most is not None and batch_size < size:
            draws = partial(TruncatedPoissonSampler, max_batch_size=most)
        return PoissonLoader(data_loader, batch_size / size, ranks, draws)


POISSON = Batches("poisson", None)


def private_loader(
    data_loader: DataLoader[Any], ranks: Ranks | None, batches: Batches = POISSON
) -> PoissonLoader:
    """A private loader in place of the user's, or an error that says why there is none."""
    if not isinstance(data_loader, DataLoader):
        raise ArgumentTypeError(
            f"data_loader must be a torch.utils.data.DataLoader, got {type(data_loader).__name__}"
        )
    if isinstance(data_loader.dataset, IterableDataset):
        raise ArgumentError(
            "an iterable data set hands out records in its own order, so no record can be left out"
            " at random, and amplification by sampling does not hold. Use a map-style data set"
            " (__len__ and __getitem__).",
            code="loader-iterable",
        )
    if batches.people is None:
        require_each_once(data_loader.dataset)
    collate_fn: Any = data_loader.collate_fn
    while hasattr(collate_fn, "wrapped_collator_fn"):  # of a loader that was private before
        collate_fn = collate_fn.wrapped_collator_fn
    check_collate(data_loader.dataset, collate_fn)
    if isinstance(data_loader, DPDataLoader):  # PoissonLoader included
        records: Any = data_loader.dataset
        rate, draws = float(data_loader.sample_rate), data_loader.batch_sampler
        if isinstance(draws, PeopleSampler):  # batches stay as large, not the rate of people
            rate *= draws.people.counted / len(records)
        if batches == POISSON and batches.people is None:
            return PoissonLoader(data_loader, rate, ranks)
        return batches.loader(data_loader, rate * len(records), ranks)
    if data_loader.batch_size is None or type(data_loader.batch_sampler) is not BatchSampler:
        raise ArgumentError(
            "a batch sampler decides itself which records share a batch; amplification holds only"
            " for records drawn independently. Pass DataLoader(dataset, batch_size=...): it is"
            " redrawn by Poisson sampling at that expected size.",
            code="loader-sampler",
        )
    dataset: Any = data_loader.dataset
    num_data = len(dataset)
    sampler: Any = data_loader.sampler
    if (
        type(sampler) not in (SequentialSampler, RandomSampler)
        or getattr(sampler, "replacement", False)
        or len(sampler) != num_data
    ):
        raise ArgumentError(
            f"{type(sampler).__name__} does not visit every record once a pass: leave out sampler=,"
            " also on several ranks, and take torch.utils.data.Subset for a part of the data.",
            code="loader-sampler",
        )
    if data_loader.batch_size > num_data:
        raise ArgumentError(
            f"batch_size = {data_loader.batch_size} is larger than the data set ({num_data}"
            f" records): use batch_size={num_data}"
        )
    return batches.loader(data_loader, data_loader.batch_size, ranks)


def require_own_streams(optimizer: PrivateOptimizer, loader: PoissonLoader) -> None:
    if loader.sampler_of_draws.has_user_generator and optimizer.accountant.path is not None:
        raise ArgumentError(
            "the data loader's generator= draws the same batches in every job that seeds it alike,"
            " which a ledger does not charge for: leave it out, or the accountant's path=.",
            code="loader-generator",
        )
    noise, draws = optimizer.release.noise.generator, loader.sampler_of_draws.generator
    if noise is not None and (
        noise is draws
        or (noise.device == draws.device and stream_position(noise) == stream_position(draws))
    ):
        raise ArgumentError(
            "noise and sampling would use the same random numbers, so the noise could be read off"
            " the batches: give the DataLoader and the optimizer generators with different seeds",
            code="loader-generator",
        )
