"""A private loader in place of the user's."""

from __future__ import annotations

import math
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

from ..batches.datasets import require_no_repeats
from ..batches.poisson_loader import PoissonLoader
from ..batches.sampling_schemes import TruncatedPoissonSampler, Users, UserSampler
from ..distributed import Ranks
from ..errors import ArgumentError, ArgumentTypeError
from ..noise import stream_position
from ..optim.base import PrivateOptimizer
from .settings import SCHEMES, Settings


def private_loader(settings: Settings[Any], ranks: Ranks | None) -> PoissonLoader:
    """A private loader in place of the user's, or an error that says why there is none."""
    data_loader = settings.data_loader
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
    if settings.user_ids is None:
        require_no_repeats(data_loader.dataset)
    if isinstance(data_loader, DPDataLoader):  # PoissonLoader included
        records: Any = data_loader.dataset
        rate, draws = float(data_loader.sample_rate), data_loader.batch_sampler
        if isinstance(draws, UserSampler):  # batches stay as large, not the rate of users
            rate *= draws.users.counted_records / len(records)
        is_plain = settings.sampling == "poisson" and settings.max_batch_size is None
        if is_plain and settings.user_ids is None:
            return PoissonLoader(data_loader, rate, ranks)
        return _drawing(settings, rate * len(records), ranks)
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
    return _drawing(settings, data_loader.batch_size, ranks)


def _drawing(settings: Settings[Any], batch_size: float, ranks: Ranks | None) -> PoissonLoader:
    """The loader that draws batches of about this size."""
    data_loader, most = settings.data_loader, settings.max_batch_size
    dataset: Any = data_loader.dataset
    size = len(dataset)
    if settings.user_ids is not None:
        users = Users(settings.user_ids, size, settings.records_per_user)
        counted = users.counted_records
        if batch_size > counted:
            raise ArgumentError(
                f"batch_size = {batch_size:g} is more than the {counted} records that all users"
                " bring together: pass a smaller one, or a larger records_per_user="
            )
        draws_of_users = partial(UserSampler, users=users)
        return PoissonLoader(data_loader, batch_size / counted, ranks, draws_of_users)
    if most is not None and most < batch_size:
        raise ArgumentError(
            f"max_batch_size = {most} is below the batch size {batch_size:g}, so that most"
            " draws would be cut: pass a smaller batch_size, or a larger max_batch_size"
        )
    scheme = settings.sampling if batch_size < size else "poisson"  # all records: one for all
    if scheme == "fixed_size":
        batch_size = round(batch_size)
    elif scheme == "random_allocation":
        batch_size = size / math.ceil(size / batch_size - 1e-9)
    draws = SCHEMES[scheme]
    if most is not None and batch_size < size:
        draws = partial(TruncatedPoissonSampler, max_batch_size=most)
    return PoissonLoader(data_loader, batch_size / size, ranks, draws)


def require_own_streams(optimizer: PrivateOptimizer, loader: PoissonLoader) -> None:
    noise, draws = optimizer.release.noise.generator, loader.sampler_of_draws.generator
    if draws is None:
        return
    if optimizer.accountant.path is not None:
        raise ArgumentError(
            "the data loader's generator= draws the same batches in every job that seeds it alike,"
            " which a ledger does not charge for: leave it out, or the accountant's path=.",
            code="loader-generator",
        )
    if noise is not None and (
        noise is draws
        or (noise.device == draws.device and stream_position(noise) == stream_position(draws))
    ):
        raise ArgumentError(
            "noise and sampling would use the same random numbers, so the noise could be read off"
            " the batches: give the DataLoader and the optimizer generators with different seeds",
            code="loader-generator",
        )
