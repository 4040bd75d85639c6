"""Poisson draws of people, each with all of their records or some."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from ..accounting.events import DpEvent, GaussianDpEvent, PoissonSampledDpEvent, UserLevelDpEvent
from ..errors import ArgumentError, ArgumentTypeError, FixedAttributeError
from ..ranks import Ranks
from .draws import PoissonSampler

_IDS = (
    "people must hold the id of each record's person, a whole number or a string for each of {}"
    " records and all of one kind: {}."
)


class People:
    """Whose each record is.

    Args:
        ids: for each record in the order of the data set the id of its person: whole numbers or
            strings, in a tensor, an array, a column or a list.
        num_data: how many records there are.
        most: how many records of a person join a batch at most.

    Raises:
        ValueError, TypeError: ids are of another number or kind.
    """

    def __init__(self, ids: Iterable[Any], num_data: int, most: int) -> None:
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise ArgumentError(f"records_per_person must be a positive whole number, got {most!r}")
        persons = torch.from_numpy(_numbered(ids, num_data))
        self._most = most
        # records by person, and where each person's begin
        self._records = persons.argsort(stable=True)
        self._counts = torch.bincount(persons)
        self._starts = self._counts.cumsum(0) - self._counts
        self._counted = int(self._counts.clamp(max=most).sum())

    # read only, as steps are charged for them

    @property
    def most(self) -> int:
        """How many records of a person join a batch at most."""
        return self._most

    @property
    def number(self) -> int:
        """Of people."""
        return len(self._counts)

    @property
    def counted(self) -> int:
        """How many records there would be if everybody had at most :attr:`most`."""
        return self._counted

    def records_of(self, drawn: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """The positions of what these people bring, in rising order: all of a person's records, or
        ``most`` of them, each such set with the same probability.
        """
        counts = self._counts[drawn]
        owners = torch.arange(len(drawn), device="cpu").repeat_interleave(counts)
        places = torch.arange(len(owners), device="cpu") - (counts.cumsum(0) - counts)[owners]
        records = self._records[self._starts[drawn][owners] + places]
        if bool((counts > self.most).any()):
            keys = torch.empty(len(records), dtype=torch.int64, device="cpu")
            keys.random_(generator=generator)
            order = keys.argsort()
            order = order[owners[order].argsort(stable=True)]  # by person, at random within
            records = records[order][places < self.most]
        return records.sort().values


def _numbered(ids: Iterable[Any], num_data: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """A number from 0 on for each id, the same for equal ones."""
    if np.ma.is_masked(ids):
        raise ArgumentTypeError(
            _IDS.format(num_data, "got a masked array in which some are missing")
        )
    values = ids.detach().cpu().numpy() if isinstance(ids, torch.Tensor) else np.asarray(ids)
    if values.shape != (num_data,):
        raise ArgumentError(_IDS.format(num_data, f"got ids of shape {tuple(values.shape)}"))
    if values.dtype.kind in "iu":
        return np.unique(values, return_inverse=True)[1].astype(np.int64)
    # not as NumPy's strings, of which some that differ are equal
    whole = values.tolist() if isinstance(ids, torch.Tensor | np.ndarray) else list(ids)
    kinds = {type(value) for value in whole}
    if kinds not in ({str}, {int}):
        found = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ArgumentTypeError(_IDS.format(num_data, f"got {found}"))
    known: dict[Any, int] = {}
    return np.array([known.setdefault(value, len(known)) for value in whole], dtype=np.int64)


class PeopleSampler(PoissonSampler):
    r"""Poisson draws of people: each joins a batch independently with probability q, with at most k
    of their records, drawn anew for each batch.

    Args:
        num_data: :attr:`People.counted`, of which a batch holds q on average.
        sample_rate, generator, num_workers, ranks: as for :class:`PoissonSampler`.
        people: whose each record is, and k.

    **Privacy.** One step releases :math:`\sum_i \mathrm{clip}(g_i) + zC\xi` over the batch.
    Whether somebody joins, and with which records, is drawn for each person by itself, so that
    what the others bring, r, has the same law with and without this person. Given r, the release
    without the person is :math:`N(r, z^2C^2)`, and with the person the mixture
    :math:`(1-q) N(r, z^2C^2) + q \sum_s \pi_s N(r + v_s, z^2C^2)` over the sets s of at most k
    records. By the triangle inequality :math:`\|v_s\| \le kC`. The hockey-stick divergences are
    jointly convex, so that no mixture over s or r is worse than its worst part; and that one is
    no worse than at :math:`\|v_s\| = kC`: the pair of
    ``PoissonSampledDpEvent(q, GaussianDpEvent(z / k))``. For a person who takes another's place,
    all pairs of sets are coupled, and each part is a pair :math:`((1-q) N(r, \cdot) + q N(r + v,
    \cdot), (1-q) N(r, \cdot) + q N(r + w, \cdot))` with v and w within kC, as for a record.
    q and k are fixed and public.
    """

    law, batches = "people", "Poisson batches of people"

    def __init__(
        self,
        num_data: int,
        sample_rate: float,
        generator: torch.Generator | None,
        num_workers: int,
        ranks: Ranks | None = None,
        *,
        people: People,
    ) -> None:
        self.people = people
        super().__init__(num_data, sample_rate, generator, num_workers, ranks)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "people" and name in self.__dict__:
            raise FixedAttributeError(
                "people of a private loader are fixed: every step is charged for them. Make a"
                " loader with other ones by make_private(..., people=, records_per_person=)."
            )
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_people, (*super().__reduce__()[1], self.people)

    def _joining(self, stream: torch.Generator) -> torch.Tensor:
        return self.people.records_of(super()._joining(stream), stream)

    @property
    def drawn(self) -> tuple[int, str]:
        return self.people.number, "people"

    def event(self, gaussian: GaussianDpEvent) -> DpEvent:
        to_a_person = GaussianDpEvent(gaussian.noise_multiplier / self.people.most)
        return UserLevelDpEvent(PoissonSampledDpEvent(self.sample_rate, to_a_person))


def _of_people(
    num_data: int, sample_rate: float, generator: None, num_workers: int, people: People
) -> PeopleSampler:
    return PeopleSampler(num_data, sample_rate, generator, num_workers, people=people)
