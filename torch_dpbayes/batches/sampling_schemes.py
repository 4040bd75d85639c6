"""Other sampling schemes than Poisson draws of records, with their events: truncated Poisson draws,
fixed size, random allocation, and Poisson draws of users.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from dp_accounting.dp_event import TruncatedSubsampledGaussianDpEvent
from numpy.typing import NDArray

from ..accounting.events import (
    DpEvent,
    GaussianDpEvent,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
    UserLevelDpEvent,
    positive_count,
)
from ..accounting.random_allocation import RandomAllocationDpEvent
from ..errors import ArgumentError, ArgumentTypeError
from .poisson_sampling import dense_choice, sparse_choice, uniform
from .sampler import PoissonSampler, _Draw


class TruncatedPoissonSampler(PoissonSampler):
    """Poisson draws. From a draw of more than ``max_batch_size`` records (on all ranks together) so
    many are chosen at random.
    """

    scheme, batches = "truncated_poisson", "truncated Poisson batches"

    def _joining(self, stream: torch.Generator) -> torch.Tensor:
        joining, most = super()._joining(stream), self._options["max_batch_size"]
        if len(joining) > most:
            joining = joining[dense_choice(len(joining), most, stream)]
        return joining

    def event(self, gaussian: GaussianDpEvent) -> DpEvent:
        return TruncatedSubsampledGaussianDpEvent(
            self.num_samples,
            self.sample_rate,
            self._options["max_batch_size"],
            gaussian.noise_multiplier,
        )


class FixedSizeSampler(PoissonSampler):
    """Batches of fixed size, each drawn without replacement, independently of each other."""

    scheme, batches = "fixed_size", "batches of fixed size"

    batch_size = property(lambda self: round(self.sample_rate * self.num_samples))

    def _joining(self, stream: torch.Generator) -> torch.Tensor:
        choose = sparse_choice if self._is_sparse else dense_choice
        return choose(self.num_samples, self.batch_size, stream)

    def event(self, gaussian: GaussianDpEvent) -> DpEvent:
        return SampledWithoutReplacementDpEvent(self.num_samples, self.batch_size, gaussian)


class RandomAllocationSampler(PoissonSampler):
    """Random allocation: in each pass every record joins one of the pass's t batches, uniformly and
    independently.

    A whole pass is charged at its first release, with the noise of this step. Later steps of the
    pass may have more noise, not less. The next loop over the loader continues an interrupted pass
    and ends with it. If a step fails after its charge, a whole pass is charged again. All batches
    of a pass are drawn together, in O(N). ``sample_rate`` is 1/t.
    """

    scheme, batches = "random_allocation", "batches by random allocation"

    steps_per_charge = property(attrgetter("_steps"))

    def event(self, gaussian: GaussianDpEvent) -> DpEvent:
        return RandomAllocationDpEvent(self.steps, gaussian)

    def _renew(self, generator: torch.Generator) -> None:
        super()._renew(generator)
        self._begin_allocation()

    def _begin_allocation(self) -> None:
        self._allocation: list[torch.Tensor] = []  # the batches of this pass; empty: not yet drawn
        self._allocation_state: torch.Tensor | None = None  # state of the generator before the pass
        self._released = 0  # the number of batches with a release
        self._charged_noise: float | None = None  # the noise multiplier in the charge of the pass
        self._is_begun = False  # a release of the next draw was charged, and may have been made

    def left_in_pass(self) -> int:
        return self.steps - self._released

    def _why_in_order(self) -> str:
        if self._charged_noise is not None:
            return "in the middle of a pass of random allocation, which is charged once"
        return super()._why_in_order()

    def _next_draw(self) -> _Draw:
        if self._allocation:
            return self._share(self._next_batch(), self._allocation_state)
        draw = super()._next_draw()
        self._allocation_state = draw.state
        return draw

    def _joining(self, stream: torch.Generator) -> torch.Tensor:
        joined = torch.from_numpy(uniform(self.num_samples, self.steps, stream))
        sizes = joined.bincount(minlength=self.steps)
        self._allocation = list(joined.argsort(stable=True).split(sizes.tolist()))
        return self._next_batch()

    def _next_batch(self) -> torch.Tensor:
        return self._allocation[self._released + len(self._draws)]

    def is_charged(self, noise_multiplier: float) -> bool:
        """Whether the pass is already charged. Call this before each release."""
        if self._charged_noise is None or self._is_begun:
            return False
        if noise_multiplier < self._charged_noise:
            raise ArgumentError(
                f"the noise multiplier fell from {self._charged_noise:g} to {noise_multiplier:g}"
                " within a pass, but the whole pass was charged at its start: change lr between"
                " passes.",
                code="pass-charged",
            )
        self._is_begun = True
        return True

    def mark_charged(self, noise_multiplier: float) -> None:
        """Note that the next release, and the pass, was charged with this noise multiplier."""
        before = self._charged_noise
        self._charged_noise = noise_multiplier if before is None else min(noise_multiplier, before)
        self._is_begun = True

    def mark_used(self) -> None:
        super().mark_used()
        self._released, self._is_begun = self._released + 1, False
        if self._released == self.steps:
            self._begin_allocation()

    def position(self) -> dict[str, Any]:
        own = {"released": self._released, "charged_noise": self._charged_noise}
        return super().position() | own

    def _waiting_states(self) -> list[torch.Tensor]:
        """All batches of a pass come from one state."""
        state = self._allocation_state
        return [*self._waiting] if state is None else [state]

    def resume(self, position: dict[str, Any]) -> None:
        super().resume(position)
        self._released, self._charged_noise = position["released"], position["charged_noise"]


_USER_IDS = (
    "user_ids must contain the id of each record's user: a whole number or a string for each of {}"
    " records, all of one type and none missing"
)


class Users:
    """The user of each record, and the largest number of records of a user in a batch. Read-only,
    because steps are charged for these values. Ids are whole numbers or strings, in a tensor, an
    array, a column or a list.
    """

    def __init__(self, user_ids: Iterable[Any], num_data: int, records_per_user: int) -> None:
        k = positive_count(records_per_user, "records_per_user")
        users = torch.from_numpy(_numbered(user_ids, num_data))
        self._records_per_user = k
        # records ordered by user, and the number and the start of each user's records
        self._records = users.argsort(stable=True)
        self._counts = torch.bincount(users)
        self._starts = self._counts.cumsum(0) - self._counts
        self._counted_records = int(self._counts.clamp(max=k).sum())

    records_per_user = property(attrgetter("_records_per_user"))  # k
    # the number of records if each user keeps at most k
    counted_records = property(attrgetter("_counted_records"))

    def __len__(self) -> int:
        return len(self._counts)

    def records_of(self, drawn: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """The positions of these users' records in the batch, in rising order: all of a user's
        records, or, if there are more than k, a random set of k.
        """
        counts = self._counts[drawn]
        owners = torch.arange(len(drawn), device="cpu").repeat_interleave(counts)
        places = torch.arange(len(owners), device="cpu") - (counts.cumsum(0) - counts)[owners]
        records = self._records[self._starts[drawn][owners] + places]
        if bool((counts > self._records_per_user).any()):
            keys = torch.empty(len(records), dtype=torch.int64, device="cpu")
            order = keys.random_(generator=generator).argsort()
            order = order[owners[order].argsort(stable=True)]  # by user, shuffled for each user
            records = records[order][places < self._records_per_user]
        return records.sort().values


def _numbered(ids: Iterable[Any], num_data: int) -> NDArray[np.int64]:
    """The ids as numbers from 0 on; equal ids have equal numbers."""
    values = ids.detach().cpu().numpy() if isinstance(ids, torch.Tensor) else np.asarray(ids)
    if np.ma.is_masked(ids) or values.shape != (num_data,):
        raise ArgumentError(_USER_IDS.format(num_data))
    if values.dtype.kind in "iu":
        return np.unique(values, return_inverse=True)[1].astype(np.int64)
    # not as NumPy strings: some different ids would become equal
    whole = values.tolist() if isinstance(ids, torch.Tensor | np.ndarray) else list(ids)
    if {type(value) for value in whole} not in ({str}, {int}):
        raise ArgumentTypeError(_USER_IDS.format(num_data))
    known: dict[Any, int] = {}
    return np.array([known.setdefault(value, len(known)) for value in whole], dtype=np.int64)


class UserSampler(PoissonSampler):
    r"""Each user joins a batch independently with probability q, with at most k of their records,
    which are drawn again for each batch. The expected batch size is q ``users.counted_records``.

    **Privacy.** One step releases :math:`\sum_i \mathrm{clip}(g_i) + zC\xi` over the batch. Each
    user's inclusion and records are drawn independently, so the others' sum r has the same
    distribution with and without a user. Given r, the release without the user is
    :math:`N(r, z^2C^2)`, and with the user the mixture
    :math:`(1-q) N(r, z^2C^2) + q \sum_s \pi_s N(r + v_s, z^2C^2)` over the sets s of at most k
    records, with :math:`\|v_s\| \le kC` by the triangle inequality. Hockey-stick divergences are
    jointly convex, so no mixture over s or r is worse than its worst part. That is no worse than
    with :math:`\|v_s\| = kC`: the pair of ``PoissonSampledDpEvent(q, GaussianDpEvent(z / k))``.
    If another user replaces the user, couple all pairs of sets: each part is a pair
    :math:`((1-q) N(r, \cdot) + q N(r + v, \cdot), (1-q) N(r, \cdot) + q N(r + w, \cdot))` with v
    and w within kC, as for a record. q and k are fixed and public.
    """

    scheme, batches = "users", "Poisson batches of users"

    _users = property(lambda self: self._options["users"])
    counted_records = property(attrgetter("_users.counted_records"))  # at most k of each user

    def _joining(self, stream: torch.Generator) -> torch.Tensor:
        return self._users.records_of(super()._joining(stream), stream)

    @property
    def drawn(self) -> tuple[int, str]:
        return len(self._users), "users"

    def _why_in_order(self) -> str:
        return "but user_ids= refer to positions"

    def event(self, gaussian: GaussianDpEvent) -> DpEvent:
        of_a_user = GaussianDpEvent(gaussian.noise_multiplier / self._users.records_per_user)
        return UserLevelDpEvent(PoissonSampledDpEvent(self.sample_rate, of_a_user))
