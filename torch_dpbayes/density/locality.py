"""Checks on synthetic rows, before data are read, whether a record's term depends on other rows.

A model that mixes rows would be another model if it ran on one row at a time. So Pyro runs it on
several synthetic rows together, also with missing or large values in one of them. If a term differs
from the term of the row alone, or if the prior changes, the model is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from .arguments import Arguments, pick
from .prior import Prior
from .pyro_runs import (
    FLAVOURS,
    Model,
    UnfitModel,
    agree,
    first_line,
    nearly_equal,
    public_randomness,
    rounding,
    trace_at,
)
from .record_terms import RecordTerms
from .structure import Structure

_ROWS = 7  # synthetic rows of the checks
_LARGE = 10**4
_SPREADS = (1.0, 0.3, 0.03)  # of θ; the next if terms are not finite, or mostly rounding errors
_SURELY = 4  # times the observed rounding must be below the smallest detectable change
_ROUNDS = 10  # over all spreads: if a model takes the root of a coordinate, half of all θ fail


class MadeUpRecords:
    """Synthetic rows and a θ at which all their terms are finite. They depend only on the shapes
    and dtypes of the data.

    Attributes:
        prior: the prior, with these rows as the data.
        terms: computes the terms of any rows.
        theta: the θ, in the prior's coordinates.

    Raises:
        UnfitModel: the model does not run on synthetic rows.
    """

    def __init__(self, model: Model, arguments: Arguments, structure: Structure) -> None:
        self._arguments = arguments
        self._count = _ROWS if arguments.size != _ROWS else _ROWS + 3
        error: Exception | None = None
        found: dict[str, Any] = {}  # the first attributes with finite terms
        for _, flavour, spread in product(range(_ROUNDS), FLAVOURS, _SPREADS):
            try:
                with public_randomness():
                    terms = self._made(model, structure, flavour, spread)
                    if not terms.isfinite().all():
                        continue
                    if self._has_digits(terms):
                        return
                found = found or dict(self.__dict__)
            except UnfitModel:
                raise
            except Exception as caught:
                error = error or caught
        if found:
            self.__dict__.update(found)
            return
        if error is not None:
            raise UnfitModel(
                f"the model does not run on {self._count} synthetic rows: {first_line(error)}. Its"
                f" plate must get its size from the data, pyro.plate({structure.plate!r},"
                " len(y)). Bind other arguments with functools.partial."
            ) from error
        raise UnfitModel(
            "the log likelihood of synthetic rows (normal, uniform, 0/1 or counts) is not finite:"
            " pass arguments in one of these ranges, and convert them in the model."
        )

    def _made(self, model: Model, structure: Structure, flavour: str, spread: float) -> Tensor:
        """Terms of new rows at a new θ."""
        arguments = self._arguments
        self._flavour, rows = flavour, arguments.made_up_rows(self._count, flavour)
        self.prior = prior = Prior(model, *arguments.with_rows(rows), factors=structure.outside)
        uniform = torch.rand(prior.dimension, dtype=prior.dtype, device=prior.device)
        self.theta = spread * (2 * uniform - 1)
        prior.require_no_tensors_in(structure.factors, self.theta)
        self.terms = RecordTerms(model, arguments, structure, prior)
        self._rows = self._with_observations(model, structure, rows)
        return self.terms(self.theta, self._rows)

    def _has_digits(self, terms: Tensor) -> bool:
        """Whether rounding hardly changes the ``terms`` of the rows. If large values cancel, as in
        a Poisson probability of millions, a term in float32 may be only rounding error.
        """
        errors = rounding(lambda theta: self.terms(theta, self._rows), self.theta)
        pairs = zip(terms, terms + _SURELY * errors, strict=True)
        return all(nearly_equal(other, term) for term, other in pairs)

    def rows(self, count: int, start: int = 0) -> list[Tensor]:
        """``count`` rows, repeated if necessary."""
        return pick(self._rows, [(start + i) % self._count for i in range(count)])

    def few(self) -> list[Tensor]:
        """Each of the rows once."""
        return self._rows

    def other_rows(self, count: int) -> list[Tensor]:
        """``count`` new rows of the same kind."""
        with public_randomness():
            return self._arguments.made_up_rows(count, self._flavour)

    def _with_observations(
        self, model: Model, structure: Structure, rows: list[Tensor]
    ) -> list[Tensor]:
        """The rows, where directly observed arguments are draws from the model's distributions."""
        in_model, (args, kwargs) = self._arguments.in_model(rows), self._arguments.with_rows(rows)
        values = self.prior.constrain(self.theta)
        trace = trace_at(model, values, args, kwargs)
        result = list(rows)
        for name in structure.observed:
            site: Any = trace.nodes[name]
            for k, row in enumerate(in_model):
                try:
                    is_row = site["value"].data_ptr() == row.data_ptr()
                    draw = site["fn"].sample() if is_row else None
                except Exception:  # of a number, or of a distribution of unknown length
                    continue
                if draw is not None and draw.shape == row.shape:
                    result[k] = self._arguments.rows_first(k, draw).to(row.dtype)
        return result

    # -- the check ---------------------------------------------------------------------------------

    def require_local(self) -> None:
        """Refuse a model in which a change of one row changes the term of another, or the prior."""
        theta, rows = self.theta, self._rows
        each = [pick(rows, [k]) for k in range(self._count)]

        def alone(theta: Tensor) -> Tensor:
            return torch.cat([self.terms(theta, row) for row in each])

        first, again = (self.terms(theta, rows) for _ in range(2))
        if not nearly_equal(first, again):
            raise UnfitModel(
                "two evaluations of the model at the same values differ: it draws random numbers"
                " outside sample sites (dropout?). Switch this off with model.eval()."
            )
        prior = self._prior_with(rows)
        try:
            is_local = agree(alone, lambda theta: self.terms(theta, rows), theta)
            priors = [self._prior_with(row) for row in each]
        except Exception as error:
            raise UnfitModel(
                f"the model does not run on one synthetic row alone: {first_line(error)}. It must"
                " accept any number of rows."
            ) from error
        _require_same_prior(prior, priors, "all others are left out")
        if not is_local:
            raise _mixes("all others are left out")
        odd, size = self._count // 2, float(first.nan_to_num(0.0, 0.0, 0.0).abs().max())
        others = torch.arange(self._count) != odd
        for what, changed in self._changed_rows(odd):
            try:
                terms, now = self.terms(theta, changed), self._prior_with(changed)
                own = self.terms(theta, pick(changed, [odd]))
            except Exception:  # the values may be impossible ones
                continue
            _require_same_prior(prior, [now], f"another row {what}")
            # the others' number stays the same, so their rounding does, too
            if not nearly_equal(terms[others], first[others]):
                raise _mixes(f"another row {what}")
            if not nearly_equal(own[0], terms[odd], size):
                most = 2 * rounding(partial(self.terms, rows=pick(changed, [odd])), theta)
                if not (own - terms[odd]).abs() <= most:
                    raise _mixes(f"another row {what}")

    def _prior_with(self, rows: list[Tensor]) -> Tensor:
        return self.prior.log_density_with(self.theta, *self._arguments.with_rows(rows))

    def _changed_rows(self, odd: int) -> Iterator[tuple[str, list[Tensor]]]:
        """Rows where row ``odd`` has extreme or missing values: in all arguments, and in one
        argument at a time, because some models depend on others only then.
        """

        def altered(chosen: Iterable[int], value: float, every: int = 1) -> list[Tensor]:
            result = list(self._rows)
            for k in chosen:
                result[k] = self._rows[k].clone()
                entries = result[k][odd]
                numbers = torch.arange(entries.numel(), device=entries.device)
                entries.masked_fill_(numbers.reshape(entries.shape) % every == 0, value)
            return result

        kinds = [row.is_floating_point() or row.is_complex() for row in self._rows]
        floating = [k for k, is_floating in enumerate(kinds) if is_floating]
        for chosen in (floating, *([k] for k in floating)) if len(floating) > 1 else (floating,):
            yield "is NaN", altered(chosen, math.nan)
            yield "lacks some values", altered(chosen, math.nan, every=2)
            yield "is very large", altered(chosen, _LARGE)
            yield "is very small", altered(chosen, -_LARGE)
        for k, row in enumerate(self._rows):
            # on a GPU an index out of range would end the process
            if not kinds[k] and row.dtype != torch.bool and row.device.type == "cpu":
                yield "is very large", altered([k], min(_LARGE, torch.iinfo(row.dtype).max))


def _require_same_prior(prior: Tensor, others: Iterable[Tensor], what: str) -> None:
    if not all(nearly_equal(other, prior) for other in others):
        raise UnfitModel(
            f"the prior changes when {what} (seen on synthetic rows), so it would release the data"
            " without a charge: use a prior with public constants."
        )


def _mixes(what: str) -> UnfitModel:
    return UnfitModel(
        f"the log likelihood of a record changes when {what} (seen on synthetic rows): centre,"
        " scale, count and impute with public constants, not with the data's mean, maximum or"
        " number."
    )
