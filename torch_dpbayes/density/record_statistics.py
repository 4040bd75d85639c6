"""Statistics or features of records, each computed from one record alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..per_sample.record_map import RecordMap
from .arguments import aligned, full_vectors, of_full_vectors, one_thread
from .pyro_runs import FLAVOURS, UnfitModel, made_up, public_randomness

_MADE_UP = 3
# records computed together: they must not depend on the number of records, because a product of
# matrices of another size may be rounded differently in all rows
_MOST_ROWS, _MOST_BYTES = 2**13, 2**22


class RecordStatistics:
    """s(x) of every record. No record can read another, raise an exception, or contribute more than
    a clip bound.

    Args:
        statistics: a function from one record (its row of every tensor) to the vector s(x).
        data: tensors of one length, with one row per record.

    Attributes:
        size: length of s(x).

    Raises:
        ValueError: the function cannot be mapped over synthetic records.
    """

    def __init__(self, statistics: Callable[..., Tensor], data: Sequence[Tensor]) -> None:
        self._statistics, self._data = statistics, [aligned(arg) for arg in data]
        self._made_up, self.size = self._tried()

    def clipped_sum(self, max_norm: float) -> Tensor:
        """Σ s(x_i)·min(1, ``max_norm``/‖s(x_i)‖), (size,) in float64. Private data; a record
        that is not finite counts as 0.
        """
        total = torch.zeros(self.size, dtype=torch.float64, device=self._data[0].device)
        for found in map(Tensor.double, self.by_chunks()):
            norm = torch.linalg.vector_norm(found, dim=1)
            finite = norm.isfinite()
            total += (max_norm / norm[finite]).clamp_(max=1.0) @ found[finite]
        return total

    def by_chunks(self) -> Iterator[Tensor]:
        """s of every record in chunks (rows, size); 0 if the computation fails, because an error
        would reveal a record. Private data.
        """
        count, each = len(self._data[0]), sum(some[:1].nbytes for some in self._made_up)
        whole = full_vectors(min(_MOST_ROWS, _MOST_BYTES // max(each, 1)))
        stand_ins = [
            some[torch.arange(whole, device=some.device) % _MADE_UP] for some in self._made_up
        ]
        for start in range(0, count, whole):
            rows = [arg[start : start + whole] for arg in self._data]
            with one_thread():
                found, fails = of_full_vectors(
                    lambda filled, own: self._map(*filled)[:own], rows, stand_ins
                )
            yield found.masked_fill(fails[:, None], 0.0)

    def _tried(self) -> tuple[list[Tensor], int]:
        """Synthetic rows, and the length of their s(x)."""
        error: Exception | None = None
        for flavour in FLAVOURS:
            with public_randomness():
                shapes = [torch.Size([_MADE_UP, *arg.shape[1:]]) for arg in self._data]
                rows = [made_up(*each, flavour) for each in zip(shapes, self._data, strict=True)]
            try:
                return rows, self._map(*rows).shape[1]
            except UnfitModel:
                raise
            except Exception as caught:
                error = error or caught
        raise UnfitModel(
            "the statistics or features of a record cannot be computed for synthetic ones:"
            f" {type(error).__name__}: {error}. Take one record, without the dimension of the"
            " records, and return a vector, by tensor operations alone."
        ) from error

    def _map(self, *rows: Tensor) -> Tensor:
        with torch.no_grad():
            records = RecordMap(len(rows[0]), is_random=False)
            (found,) = records(lambda row: [self._statistics(*row)], list(rows))
        if records.kept():
            raise UnfitModel("the function stores a tensor of a record: return it instead.")
        if found.dim() > 2:
            raise ValueError("the statistics of a record must be a vector or one number")
        return found.reshape(len(rows[0]), -1)
