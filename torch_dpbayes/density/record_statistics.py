"""The sufficient statistics of records, each computed from its record alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..per_sample.record_map import RecordMap, which_fail
from .pyro_runs import FLAVOURS, UnfitModel, made_up, public_randomness

_ROWS_AT_ONCE = 2**16


class RecordStatistics:
    """s(x) of every record, where no record can see another, raise an exception, or be more than a
    clip bound away from 0.

    Args:
        statistics: from one record, its row of every tensor, to the vector s(x).
        data: tensors of one length, one row a record.

    Raises:
        ValueError: the function cannot be mapped over records; found on made-up ones.
    """

    def __init__(self, statistics: Callable[..., Tensor], data: Sequence[Tensor]) -> None:
        self._statistics, self._data = statistics, [arg.detach() for arg in data]
        self.size = self._find_size()

    def clipped_sum(self, max_norm: float) -> Tensor:
        """Σ s(x_i)·min(1, ``max_norm``/‖s(x_i)‖), (size,) in float64. Private data; a record
        that is not finite counts as 0.
        """
        total = torch.zeros(self.size, dtype=torch.float64, device=self._data[0].device)
        for rows in zip(*(arg.split(_ROWS_AT_ONCE) for arg in self._data), strict=True):
            if not len(rows[0]):  # the only chunk of no records
                break
            found = self._of_rows(*rows).double()
            norm = torch.linalg.vector_norm(found, dim=1)
            finite = norm.isfinite()
            total += (max_norm / norm[finite]).clamp_(max=1.0) @ found[finite]
        return total

    def _find_size(self) -> int:
        """Length of s(x), from made-up rows."""
        error: Exception | None = None
        for flavour in FLAVOURS:
            with public_randomness():
                rows = [
                    made_up(torch.Size([3, *arg.shape[1:]]), arg, flavour) for arg in self._data
                ]
            try:
                return self._map(*rows).shape[1]
            except UnfitModel:
                raise
            except Exception as caught:
                error = error or caught
        raise UnfitModel(
            f"sufficient_statistics cannot be mapped over made-up records: {type(error).__name__}:"
            f" {error}. It takes one record, without the dimension of the records, and returns a"
            " vector, by tensor operations alone."
        ) from error

    def _map(self, *rows: Tensor) -> Tensor:
        with torch.no_grad():
            (found,) = RecordMap(len(rows[0]), is_random=False)(
                lambda row: [self._statistics(*row)], list(rows)
            )
        if found.dim() > 2:
            raise ValueError("the statistics of a record are a vector, or one number")
        return found.reshape(len(rows[0]), -1)

    def _of_rows(self, *rows: Tensor) -> Tensor:
        """s of the rows at which the computation does not fail."""
        try:
            return self._map(*rows)
        except Exception:
            sound = ~torch.tensor(which_fail(self._map, rows), device=rows[0].device)
            kept = [row[sound] for row in rows]
            return self._map(*kept) if len(kept[0]) else kept[0].new_zeros(0, self.size)
