"""The record terms of a model on its data, or statistics of records: exact, clipped and summed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..per_sample.record_map import RecordMap
from .arguments import Arguments, aligned, full_vectors, of_full_vectors, one_thread, pick, replaced
from .locality import MadeUpRecords
from .pieces import dense, norms_of
from .program import Program, record_programs
from .pyro_runs import (
    FLAVOURS,
    InvalidPoint,
    Model,
    UnfitModel,
    made_up,
    public_randomness,
    without_parameters,
    without_value_checks,
)
from .structure import find_structure

_NUMBERS_IN_FLOAT64 = 2**17  # more do not fit into the processor's caches
_ROWS_IN_FLOAT64 = 2**13  # a sum of more rows, one after the other, loses digits
# computed together if the number of records is private: a product of matrices of another size may
# be rounded differently in all rows
_ROWS_IF_PRIVATE = 2**13
_STATISTICS_BYTES, _MADE_UP = 2**22, 3  # of records whose statistics are computed together


class RecordDensity:
    r"""log p(x_i | θ) of every record, clipped sums over the records, and the prior.

    Args:
        model: a Pyro model with one vectorised data plate that contains every observed site. Its
            arguments contain the data.
        args, kwargs: these arguments. A tensor with a dimension as long as the data plate is data,
            with records along the first such dimension; every other argument is a public constant.
        data_plate: the plate's name.
        gradients: also record the gradients.
        rows_at_once: the usual maximum number of records that :meth:`of` selects. None: all
            records are used together, or 8,192 if their number is private.
        count_is_public: whether errors may depend on the number of records. False (for
            add-or-remove-one): every tensor is data, with records along its first dimension, and
            the model is checked on another number of rows.

    Attributes:
        arguments: the model's arguments, without the data.
        prior: θ's coordinates and log prior, a :class:`Prior`.
        observed: names of the observed sites.

    Raises:
        ValueError: the model has no such plate, observes something outside it, has local continuous
            or global discrete latents or parameters, subsamples, or a record's term depends on
            other records; the message says what to write instead. All this is checked on synthetic
            rows.

    **Privacy.** The methods return exact functions of the data, which must not be released: charge
    a clipped sum, then add noise to it. A clipped sum moves by at most its bound when a record is
    added or removed, and by twice that when one is replaced. A record contributes 0 if its term or
    gradient is not finite, or if the computation fails. Values that the model does not get as
    arguments cannot be checked and count as public. If the model cannot be evaluated at θ, even for
    synthetic records, the methods raise :class:`InvalidPoint`.
    """

    def __init__(
        self,
        model: Model,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        data_plate: str = "data",
        gradients: bool = True,
        rows_at_once: int | None = None,
        count_is_public: bool = True,
    ) -> None:
        self.arguments = Arguments(args, kwargs, count_is_public)
        model = partial(without_parameters, model)
        with torch.no_grad(), without_value_checks():
            structure = find_structure(model, self.arguments, data_plate)
            self._rows = self.arguments.take_rows(structure.plate_size)
            self.made_up = MadeUpRecords(model, self.arguments, structure)
            self.made_up.require_local()
        self.prior = self.made_up.prior
        self.observed = structure.observed
        self._is_in_place = count_is_public  # one record more or less does not move others
        self._left_out = self._none_of(self.num_records)  # records at which computations fail
        together = rows_at_once or (self.num_records if count_is_public else _ROWS_IF_PRIVATE)
        self._terms, found = record_programs(self.made_up, max(1, together), gradients)
        self._few_rows = self.made_up.rows(full_vectors(1))
        # a model that cannot be recorded is refused before anything is charged
        if found is not None:
            self._gradients = found
            self.prior.log_density_and_gradient(self.made_up.theta)
        self.prior.log_density(self.made_up.theta)

    @property
    def num_records(self) -> int:
        """Number of rows. Under add-or-remove-one it is private."""
        return len(self._rows[0])

    @property
    def chunk(self) -> int:
        """The number of records that are computed together."""
        return self._terms.rows

    @property
    def read(self) -> Tensor:
        """For each coordinate of θ, whether the records' terms depend on it, ``[dimension]``. All
        coordinates of a site have the same value. If False, gradients are exactly 0, whatever the
        records are: the site is only a parent of other latents.
        """
        return self.prior.read_in(self._terms.graph)

    def rows(self) -> list[Tensor]:
        """The data arguments, with records along the first dimension. Private data."""
        return list(self._rows)

    def with_rows(self, rows: Sequence[Tensor]) -> RecordDensity:
        """The density of other records: rows of data arguments, in the order of :meth:`rows`."""
        other = copy(self)
        other.__dict__.update(_rows=list(rows), _left_out=self._none_of(len(rows[0])))
        return other

    def of(self, records: Tensor) -> RecordDensity:
        """The density of the records with these indices, each at most once. Private data."""
        chosen = self.with_rows(pick(self._rows, records))
        chosen.__dict__.update(_left_out=self._left_out[records], _is_in_place=False)
        return chosen

    def _none_of(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.bool, device=self.prior.device)

    # -- what kernels use --------------------------------------------------------------------------

    @torch.no_grad()
    def is_valid(self, theta: Tensor) -> bool:
        """Whether synthetic records have terms at θ. This does not depend on the data."""
        terms = self._terms.of_few(theta, self._few_rows)
        return terms is not None and not bool(terms.isnan().all())

    @torch.no_grad()
    def has_gradients(self, theta: Tensor) -> bool:
        """Whether gradients of synthetic records can be computed at θ. This does not depend on the
        data: no record decides whether gradients of others are computed.
        """
        return self.is_valid(theta) and self._gradients.of_few(theta, self._few_rows) is not None

    @torch.no_grad()
    def log_likelihoods(self, theta: Tensor) -> Tensor:
        """log p(x_i | θ) of every record, (num_records,). Private data."""
        result = torch.empty(self.num_records, dtype=self.prior.dtype, device=self.prior.device)
        for records, terms in self._by_chunks(self._terms, theta):
            result[records] = terms
        return result.masked_fill_(self._left_out, math.nan)

    def log_likelihoods_of_first(self, thetas: Tensor, count: int) -> Tensor:
        """log p(x_i | θ) of the first records for rows of θ, ``[m, count]``; differentiable, no
        record is left out. Private data, unless the records are simulated.
        """
        few = len(self._few_rows[0])
        filling = zip(self._rows, self.made_up.rows(-count % few), strict=True)
        rows = [torch.cat([row[:count], more.to(row.dtype)]) for row, more in filling]
        return self._terms.of_thetas(thetas, rows, few)[:, :count]

    @torch.no_grad()
    def gradients(self, theta: Tensor) -> Tensor:
        """∇_θ log p(x_i | θ) of every record, (num_records, dimension) in float64; 0 if it is not
        finite. Private data, unless the records are simulated.
        """
        shape, device = (self.num_records, self.prior.dimension), self.prior.device
        result = torch.zeros(shape, dtype=torch.float64, device=device)
        for records, pieces in self._by_chunks(self._gradients, theta):
            result[records] = dense(pieces, self.prior.dimension).double()
        is_sound = result.isfinite().all(1) & ~self._left_out
        return result.masked_fill_(~is_sound[:, None], 0.0)

    @torch.no_grad()
    def clipped_gradient_sum(
        self, theta: Tensor, max_norm: float, chosen: Tensor | None = None
    ) -> Tensor:
        r"""Σ_i g_i·min(1, ``max_norm``/‖g_i‖) with g_i = ∇_θ log p(x_i | θ), over the records in
        the mask ``chosen`` (None: all) whose gradients are finite; (dimension,) in float64. Private
        data.

        Add the noise before you round the sum: in float32, a sum over a million records can move by
        thousands of bounds if one is removed, because the rounding of the others changes. Outside
        of 1e-30 < ``max_norm`` < 1e150 the bound does not hold: float64 overflows or underflows.
        """
        result = torch.zeros(self.prior.dimension, dtype=torch.float64, device=self.prior.device)
        for records, pieces in self._by_chunks(self._gradients, theta):
            some = ~self._left_out[records]  # also records that failed in this chunk
            if chosen is not None:
                some &= chosen[records]
            if not some.all():
                pieces = [piece.of(some) for piece in pieces]
            each = sum(piece.values[:1].numel() for piece in pieces)
            rows = min(_ROWS_IN_FLOAT64, max(1, _NUMBERS_IN_FLOAT64 // max(1, each)))
            for start in range(0, len(pieces[0].values), rows):
                block = [piece.of(slice(start, start + rows)).in_float64() for piece in pieces]
                norms = norms_of(block)
                finite = norms.isfinite()
                if not finite.all():  # 0·inf is NaN: remove such a record
                    block, norms = [piece.of(finite) for piece in block], norms[finite]
                factors = (max_norm / norms).clamp_(max=1.0)
                for piece in block:
                    result[piece.columns] += piece.weighted_sum(factors)
        return result

    # -- chunks of records -------------------------------------------------------------------------

    def _by_chunks(self, program: Program, theta: Tensor) -> Iterator[tuple[slice, Any]]:
        """Results of ``program``, chunk by chunk, with the records of each chunk."""
        # checked on synthetic rows alone: no record decides whether a trajectory ends here
        if not (self.is_valid if program is self._terms else self.has_gradients)(theta):
            raise InvalidPoint

        for start in range(0, self.num_records, program.rows):
            chunk = slice(start, min(start + program.rows, self.num_records))
            rows, gone = [row[chunk] for row in self._rows], self._left_out[chunk]
            rows = replaced(rows, program.made_up, gone)
            with nullcontext() if self._is_in_place else one_thread():
                result, fails = of_full_vectors(partial(program, theta), rows, program.made_up)
            gone |= fails.to(gone.device)
            yield chunk, result


def clipped_ratio_sum(current: Tensor, proposed: Tensor, bound: float) -> float:
    r"""Σ_i clip(proposed_i − current_i, ±``bound``), where NaN counts as 0. Private data.

    **Privacy.** Moves by at most ``bound`` when a record is added or removed.
    """
    return float(
        (proposed.double() - current.double()).clamp_(-bound, bound).nan_to_num_(nan=0.0).sum()
    )


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
        whole = full_vectors(min(_ROWS_IF_PRIVATE, _STATISTICS_BYTES // max(each, 1)))
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
