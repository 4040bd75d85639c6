"""A private loader in place of the user's."""

from __future__ import annotations

from typing import Any

from opacus.data_loader import DPDataLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from ..batches.poisson_loader import PoissonLoader
from ..noise import stream_position
from ..optim.base import PrivateOptimizer
from ..ranks import Ranks


def poisson_loader(data_loader: DataLoader[Any], ranks: Ranks | None) -> PoissonLoader:
    """A private loader in place of the user's, or an error that says why there is none."""
    if not isinstance(data_loader, DataLoader):
        raise TypeError(
            f"data_loader must be a torch.utils.data.DataLoader, got {type(data_loader).__name__}"
        )
    if isinstance(data_loader.dataset, IterableDataset):
        raise ValueError(
            "an iterable data set hands out records in its own order, so no record can be left out"
            " at random, and amplification by sampling does not hold. Use a map-style data set"
            " (__len__ and __getitem__)."
        )
    if isinstance(data_loader, DPDataLoader):  # PoissonLoader included
        return PoissonLoader(data_loader, float(data_loader.sample_rate), ranks)
    if data_loader.batch_size is None or type(data_loader.batch_sampler) is not BatchSampler:
        raise ValueError(
            "a batch sampler decides itself which records share a batch; amplification holds only"
            " for records drawn independently. Pass DataLoader(dataset, batch_size=...): it is"
            " redrawn by Poisson sampling at that expected size."
        )
    dataset: Any = data_loader.dataset
    num_data = len(dataset)
    sampler: Any = data_loader.sampler
    if (
        type(sampler) not in (SequentialSampler, RandomSampler)
        or getattr(sampler, "replacement", False)
        or len(sampler) != num_data
    ):
        raise ValueError(
            f"{type(sampler).__name__} does not visit every record once a pass: leave out sampler=,"
            " also on several ranks, and take torch.utils.data.Subset for a part of the data."
        )
    if data_loader.batch_size > num_data:
        raise ValueError(
            f"batch_size = {data_loader.batch_size} is larger than the data set ({num_data}"
            f" records): use batch_size={num_data}"
        )
    return PoissonLoader(data_loader, data_loader.batch_size / num_data, ranks)


def require_own_streams(optimizer: PrivateOptimizer, loader: PoissonLoader) -> None:
    if loader.sampler_of_draws.has_user_generator and optimizer.accountant.path is not None:
        raise ValueError(
            "the data loader's generator= draws the same batches in every job that seeds it alike,"
            " which a ledger does not charge for: leave it out, or use an accountant without path=."
        )
    noise, draws = optimizer.release.noise.generator, loader.sampler_of_draws.generator
    if noise is not None and (
        noise is draws
        or (noise.device == draws.device and stream_position(noise) == stream_position(draws))
    ):
        raise ValueError(
            "noise and sampling would use the same random numbers, so the noise could be read off"
            " the batches: give the DataLoader and the optimizer generators with different seeds"
        )
