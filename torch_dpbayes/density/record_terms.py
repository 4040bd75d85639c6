"""log p(x_i | θ) of rows, which Pyro computes by running the model."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import add
from typing import Any

from pyro import poutine
from pyro.infer import config_enumerate
from pyro.ops import packed
from pyro.ops.contract import contract_tensor_tree
from pyro.ops.rings import LogRing
from torch import Tensor

from .arguments import Arguments
from .prior import Prior
from .pyro_runs import Model, Trace, UnfitModel, compute_log_prob, using_pyro
from .structure import Structure

_PYRO_DIMS = "_pyro_dims"  # attribute of Pyro's packed tensors, which has no public name


class RecordTerms:
    """The terms of rows at θ: one number for each row, with discrete latents summed out."""

    def __init__(
        self, model: Model, arguments: Arguments, structure: Structure, prior: Prior
    ) -> None:
        self._model, self._arguments, self._structure = model, arguments, structure
        self._prior = prior

    def __call__(self, theta: Tensor, rows: Sequence[Tensor]) -> Tensor:
        structure = self._structure
        args, kwargs = self._arguments.with_rows(rows)
        model = poutine.condition(self._model, self._prior.constrain(theta))
        if structure.discrete:  # enumeration needs a second way of recording
            model = poutine.enum(
                config_enumerate(model), first_available_dim=-1 - structure.deepest_dim
            )
        with using_pyro, poutine.block():  # as in trace_at
            trace = poutine.trace(model).get_trace(*args, **kwargs)
        wanted = {*structure.observed, *structure.discrete}
        compute_log_prob(trace, wanted)
        if set(trace.nodes) & wanted != wanted:
            raise UnfitModel(
                "the model has different sites in different runs: write the same ones for every"
                " run."
            )
        return self._summed_out(trace, len(rows[0]))

    def of_row(self, theta: Tensor, *row: Tensor) -> Tensor:
        """The term of one row, which has no dimension for the records."""
        return self(theta, [part.unsqueeze(0) for part in row]).sum()

    def _summed_out(self, trace: Trace, count: int) -> Tensor:
        structure = self._structure
        trace.symbolize_dims()
        records = trace.plate_to_symbol[structure.plate]
        factors: OrderedDict[frozenset[str], list[Tensor]] = OrderedDict()
        for name in [*structure.discrete, *structure.observed]:
            site, plates = trace.nodes[name], trace.nodes[name]["cond_indep_stack"]
            if (structure.plate, count) not in [(plate.name, plate.size) for plate in plates]:
                raise UnfitModel(
                    f"the data plate of site {name!r} must get its size from the data:"
                    f" pyro.plate({structure.plate!r}, len(y))."
                )
            symbols = frozenset(trace.plate_to_symbol[p.name] for p in plates if p.vectorized)
            term, of_dim = site["log_prob"], site["infer"]["_dim_to_symbol"]
            if in_no_plate := [d for d in range(-term.dim(), 0) if d not in of_dim]:
                term = term.sum(in_no_plate, keepdim=True)
            factors.setdefault(symbols, []).append(packed.pack(term, of_dim))
        discrete = set(trace.symbol_to_dim) - set(trace.plate_to_symbol.values())
        contracted = contract_tensor_tree(factors, discrete, ring=_LogSumExpRing())

        def by_row(term: Tensor) -> Tensor:
            dims = _dims(term)
            if other := [d for d, symbol in enumerate(dims) if symbol != records]:
                term = term.sum(other)
            # Pyro drops dimensions of size 1
            return term if records in dims else term.expand(count)

        return reduce(add, (by_row(term) for terms in contracted.values() for term in terms))


def _dims(term: Tensor) -> str:
    """A letter for each dimension of a packed tensor."""
    dims: str = getattr(term, _PYRO_DIMS)
    return dims


class _LogSumExpRing(LogRing):
    """Pyro's sums of products in log space, one discrete site after another, without Pyro's
    autograd function, which torch.func cannot differentiate.
    """

    def sumproduct(self, terms: Sequence[Any], dims: Iterable[str]) -> Tensor:
        left = list(terms)

        def joined(symbol: str) -> int:
            together = [term for term in left if symbol in _dims(term)]
            sizes = {s: n for t in together for s, n in zip(_dims(t), t.shape, strict=True)}
            return math.prod(sizes.values())

        pending = set(dims) & set("".join(map(_dims, left)))
        while pending:
            symbol = min(sorted(pending), key=joined)
            pending.remove(symbol)
            term = _product([term for term in left if symbol in _dims(term)])
            names, left = _dims(term), [term for term in left if symbol not in _dims(term)]
            left.append(_named(term.logsumexp(names.index(symbol)), names.replace(symbol, "")))
        return _product(left)


def _product(terms: Sequence[Tensor]) -> Tensor:
    spread = packed.broadcast_all(*terms)
    return _named(reduce(add, spread), _dims(spread[0]))


def _named(term: Any, names: str) -> Tensor:
    setattr(term, _PYRO_DIMS, names)
    result: Tensor = term
    return result
