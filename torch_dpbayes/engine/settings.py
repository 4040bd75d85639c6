"""The settings of a private run, which make_private, make_private_with_epsilon and plan share, and
the loader that they ask for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Required, TypedDict, TypeVar

from opacus.data_loader import DPDataLoader
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from ..accounting.accountant import PrivacyAccountant
from ..accounting.events import Unit, positive_count
from ..batches.poisson_loader import PoissonLoader
from ..batches.sampler import PoissonSampler
from ..batches.sampling_schemes import (
    FixedSizeSampler,
    RandomAllocationSampler,
    TruncatedPoissonSampler,
    Users,
    UserSampler,
)
from ..distributed import Ranks
from ..errors import ArgumentError, ArgumentTypeError
from ..optim.base import PrivateOptimizer
from ..optim.settings import Options as OfOptimizers
from ..optim.settings import require_flag
from ..per_sample.mapped_forward import Loss

ModuleT = TypeVar("ModuleT", bound=nn.Module)
OptimizerFactory = Callable[..., PrivateOptimizer]
Examples = tuple[Any, ...] | Mapping[str, Any]

_REQUIRED = ("module", "optimizer", "data_loader")
# the sampling schemes
SCHEMES: dict[str, Callable[..., PoissonSampler]] = {
    "poisson": PoissonSampler,
    "random_allocation": RandomAllocationSampler,
    "fixed_size": FixedSizeSampler,
}


class Options(TypedDict, Generic[ModuleT], total=False):
    """The arguments of ``make_private``, for methods that forward them."""

    module: Required[ModuleT]
    optimizer: Required[OptimizerFactory | PrivateOptimizer]
    data_loader: Required[DataLoader[Any]]
    max_grad_norm: float | None
    noise_multiplier: float | None
    sampling: str
    max_batch_size: int | None
    user_ids: Iterable[Any] | None
    records_per_user: int
    grad_sample_mode: str | None
    loss_reduction: str
    loss: Loss | None
    assume_independent_records: bool
    example_inputs: Examples | None


@dataclass(frozen=True, eq=False)
class Settings(Generic[ModuleT]):
    """Arguments of ``make_private``, ``make_private_with_epsilon`` and ``plan``, checked.

    Raises:
        ValueError, TypeError: an argument is out of range, or arguments contradict each other.
    """

    module: ModuleT
    optimizer: OptimizerFactory | PrivateOptimizer
    data_loader: DataLoader[Any]
    max_grad_norm: float | None = None
    noise_multiplier: float | None = None
    sampling: str = "poisson"
    max_batch_size: int | None = None
    user_ids: Iterable[Any] | None = field(default=None, repr=False)
    records_per_user: int = 1
    grad_sample_mode: str | None = None
    loss_reduction: str = "mean"
    loss: Loss | None = None
    assume_independent_records: bool = False
    example_inputs: Examples | None = None

    target_epsilon: float | None = None
    additional_epsilon: float | None = None
    target_delta: float | None = None
    epochs: int = 1
    calibrate: float | None = None

    def __post_init__(self) -> None:
        targets, most = (self.target_epsilon, self.additional_epsilon), self.max_batch_size
        has_target = targets != (None, None)
        if None not in targets:
            raise ArgumentError(
                "target_epsilon is for all charges of the accountant, additional_epsilon for this"
                " run: pass one of them"
            )
        if has_target and self.noise_multiplier is not None:
            raise ArgumentError("target_epsilon sets the least noise: leave out noise_multiplier")
        if (share := self.calibrate) is not None:
            if not has_target or not isinstance(share, int | float) or not 0 < share < 1:
                raise ArgumentError(
                    f"calibrate={share!r} must be a share of the target such as 0.02: pass it with"
                    " target_epsilon or additional_epsilon"
                )
            if self.user_ids is not None:
                raise ArgumentError(
                    "calibrate= protects records, but user_ids= protects users: leave one out"
                )
        positive_count(self.epochs, "epochs")
        if self.grad_sample_mode not in (None, "bookkeeping", "vmap", "hooks"):
            raise ArgumentError(
                'grad_sample_mode must be "bookkeeping" (the default, as Opacus\' "ghost"), "vmap"'
                f' or "hooks", got {self.grad_sample_mode!r}'
            )
        require_flag("assume_independent_records", self.assume_independent_records)
        if self.loss is not None and not callable(self.loss):
            raise ArgumentTypeError(
                f"loss must be a function of output and targets, got {self.loss!r}"
            )
        if self.loss is not None and self.assume_independent_records:
            raise ArgumentError(
                "loss= keeps records apart by construction: leave out assume_independent_records"
            )
        if self.sampling not in SCHEMES:
            raise ArgumentError(
                f"sampling must be one of {', '.join(map(repr, SCHEMES))}, got {self.sampling!r}"
            )
        is_other = self.sampling != "poisson"
        if self.user_ids is not None and (is_other or most is not None):
            raise ArgumentError(
                "user_ids= draws users by Poisson sampling: leave out sampling= and max_batch_size="
            )
        if self.user_ids is None and self.records_per_user != 1:
            raise ArgumentError(
                "records_per_user= needs user_ids=, the id of each record's user in the order of"
                " the data set"
            )
        if most is not None and is_other:
            raise ArgumentError(
                f"max_batch_size cuts Poisson draws: leave it out with sampling={self.sampling!r}"
            )
        if most is not None:
            positive_count(most, "max_batch_size")

    def accountant(self, found: PrivacyAccountant | None) -> PrivacyAccountant:
        """The engine's accountant, else a built optimizer's, else a new one with the target as its
        budget.

        Raises:
            ValueError: the accountant protects records instead of users, or the reverse.
        """
        if found is None and isinstance(self.optimizer, PrivateOptimizer):
            found = self.optimizer.accountant
        unit: Unit = "record" if self.user_ids is None else "user"
        if found is None:
            stated = self.target_epsilon is not None
            epsilon = self.target_epsilon if stated else self.additional_epsilon
            delta = None if epsilon is None else self.target_delta
            return PrivacyAccountant(epsilon, delta, unit=unit)
        if found.unit == unit:
            return found
        raise ArgumentError(
            f"this accountant protects {found.unit}s: users need both user_ids=, the id of each"
            " record's user in the order of the data set, and"
            ' PrivacyEngine(PrivacyAccountant(..., unit="user"))'
        )


def settings_of(options: Mapping[str, Any], **more: Any) -> Settings[Any]:
    """Settings from forwarded keyword arguments."""
    if unknown := options.keys() - Options.__annotations__.keys():
        hint = "this call takes the arguments of make_private"
        if (name := min(unknown)) in {"lr", *OfOptimizers.__annotations__}:
            hint = f"pass it to the optimizer, partial(dpb.optim.DPSGLD, ..., {name}=...)"
        raise ArgumentTypeError(f"{name}= is not an argument: {hint}")
    if missing := [name for name in _REQUIRED if options.get(name) is None]:
        raise ArgumentTypeError(f"{missing[0]}= is missing")
    return Settings(**options, **more)


# -- the loader -----------------------------------------------------------------------------------


def private_loader(settings: Settings[Any], ranks: Ranks | None) -> PoissonLoader:
    """A private loader that replaces the user's loader, or an error with the reason."""
    data_loader = settings.data_loader
    if not isinstance(data_loader, DataLoader):
        raise ArgumentTypeError(
            f"data_loader must be a torch.utils.data.DataLoader, got {type(data_loader).__name__}"
        )
    if isinstance(data_loader.dataset, IterableDataset):
        raise ArgumentError(
            "an iterable data set decides the order of its records, so records cannot be drawn at"
            " random. Use a map-style data set (__len__ and __getitem__).",
            code="loader-iterable",
        )
    records: Any = data_loader.dataset
    if isinstance(data_loader, DPDataLoader):  # PoissonLoader included
        rate, draws = float(data_loader.sample_rate), data_loader.batch_sampler
        if isinstance(draws, UserSampler):  # keep the size of batches, not the rate of users
            if settings.user_ids is None:
                raise ArgumentError(
                    "this loader draws users, and without user_ids= only records would be"
                    " protected: pass user_ids= again, or a new DataLoader"
                )
            rate *= draws.counted_records / len(records)
        is_plain = settings.sampling == "poisson" and settings.max_batch_size is None
        if is_plain and settings.user_ids is None:
            return PoissonLoader(data_loader, rate, ranks)
        return _drawing(settings, rate * len(records), ranks)
    if data_loader.batch_size is None or type(data_loader.batch_sampler) is not BatchSampler:
        raise ArgumentError(
            "a batch sampler decides which records share a batch, but records must be drawn"
            " independently. Pass DataLoader(dataset, batch_size=...): Poisson sampling draws"
            " batches of this expected size.",
            code="loader-sampler",
        )
    sampler: Any = data_loader.sampler
    is_known = type(sampler) in (SequentialSampler, RandomSampler)
    if not is_known or getattr(sampler, "replacement", False) or len(sampler) != len(records):
        raise ArgumentError(
            f"{type(sampler).__name__} does not visit every record once per pass: leave out"
            " sampler=, also on several ranks, and use torch.utils.data.Subset for a part of the"
            " data.",
            code="loader-sampler",
        )
    return _drawing(settings, data_loader.batch_size, ranks)


def _drawing(settings: Settings[Any], batch_size: float, ranks: Ranks | None) -> PoissonLoader:
    """The loader that draws batches of this expected size."""
    data_loader, most = settings.data_loader, settings.max_batch_size
    dataset: Any = data_loader.dataset
    size, draws = len(dataset), partial(SCHEMES[settings.sampling])
    if settings.user_ids is not None:
        users = Users(settings.user_ids, size, settings.records_per_user)
        size, draws = users.counted_records, partial(UserSampler, users=users)
    if batch_size > size:
        raise ArgumentError(
            f"batch_size = {batch_size:g} is larger than the {size} records that can join a batch:"
            " pass a smaller one, or a larger records_per_user="
        )
    if most is not None and most < batch_size:
        raise ArgumentError(
            f"max_batch_size = {most} is below the batch size {batch_size:g}, so most draws would"
            " be cut: pass a smaller batch_size, or a larger max_batch_size"
        )
    if settings.user_ids is None and batch_size == size:  # full batches: all schemes are equal
        draws = partial(PoissonSampler)
    elif settings.sampling == "fixed_size":
        batch_size = round(batch_size)
    elif settings.sampling == "random_allocation":
        batch_size = size / math.ceil(size / batch_size - 1e-9)
    elif most is not None:
        draws = partial(TruncatedPoissonSampler, max_batch_size=most)
    return PoissonLoader(data_loader, batch_size / size, ranks, draws)
