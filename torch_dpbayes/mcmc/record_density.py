r"""A Pyro model and its data as a vector of record terms, their gradients, and the prior.

For a model whose observations lie in one data plate, log p(θ, x) = log p(θ) + Σ_i log p(x_i | θ). Everything is a function of one flat
vector θ of all latents in *unconstrained* space, the sites in sorted order; the Jacobians of the transforms belong to the prior. Discrete
latents inside the plate are summed out.

The model's own code never sees the data. It runs on one made-up row at a time (``torch.func.vmap``), and what it computes is recorded as a fixed
graph of tensor operations, which is then replayed on the data in chunks of rows. Hence a record can neither raise an exception, nor
choose a branch, nor reach the term of another record, and refusals depend on the model and on shapes alone. A model that mixes rows would
become another model that way. So made-up rows are exchanged, dropped, and set to NaN or to large values before: where that changes the term of
another row, or the prior, the model is refused.
"""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer import config_enumerate
from pyro.ops.contract import contract_tensor_tree
from pyro.ops.rings import LogRing
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor
from torch.distributions import biject_to
from torch.func import grad, grad_and_value, jacfwd, vmap
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..noise import fresh_generator

Model = Callable[..., Any]
Trace = Any  # pyro.poutine.trace_struct.Trace

_CHUNK_BYTES = 2**24  # of intermediate results: larger chunks fall out of the processor's caches
_LARGE = 10**4
_ROWS_IN_FLOAT64 = 2**13  # likewise
_ROWS = 7  # made-up rows of the checks, and one to exchange for


_SUBSAMPLES = (
    "plate {!r} subsamples. Every release is accounted as one over the full data, in which each record counts once: leave out subsample_size= and "
    "subsample=."
)


class UnfitModel(ValueError):
    """A model or arguments to which record-wise clipping gives no guarantee; the message says what to write instead."""


_IMPROPER = (
    "the model cannot be sampled from: {}. Latents need proper priors, from which the shapes of θ and the start of a chain are drawn: write a wide "
    "Normal instead of an improper distribution."
)


class InvalidPoint(ArithmeticError):
    """The model cannot be evaluated at this θ, whatever the data are."""


class Prior:
    """The latents of a Pyro model as one unconstrained vector θ, and their log density with the Jacobian terms.

    Args:
        model: its continuous latents make up θ; what it observes is left aside.
        args, kwargs: the model's arguments. No data: for a model with data, made-up ones.

    **Privacy.** A function of θ and public arguments; nothing is charged for it.
    """

    def __init__(self, model: Model, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> None:
        self._model, self._args, self._kwargs = model, tuple(args), dict(kwargs or {})
        self.transforms: dict[str, Any] = {}
        self._shapes: dict[str, torch.Size] = {}
        with public_randomness(), quiet():
            first, second = self._trace(), self._trace()
        latents = continuous_latents(first)
        if not latents:
            raise UnfitModel("the model has no continuous latent site to sample: write pyro.sample(name, distribution) without obs=.")
        if set(latents) != set(continuous_latents(second)):
            raise UnfitModel("two runs of the model have different latent sites; a kernel needs the same ones in every run.")
        samples = []
        for name in sorted(latents):
            site = first.nodes[name]
            self.transforms[name] = biject_to(site["fn"].support).inv
            value = self.transforms[name](site["value"].detach())
            other = biject_to(second.nodes[name]["fn"].support)
            if not torch.equal(self.transforms[name].inv(torch.ones_like(value)), other(torch.ones_like(value))):
                raise UnfitModel(
                    f"the support of latent {name!r} changes from one run of the model to the next: it depends on another latent. Sample in a fixed "
                    "support and scale the value, so that there is one transform to unconstrained space."
                )
            self._shapes[name] = value.shape
            samples.append(value)
        dtypes = {sample.dtype for sample in samples}
        self.dtype = dtypes.pop() if len(dtypes) == 1 else torch.float64
        self.device = samples[0].device
        self._sizes = [s.numel() for s in self._shapes.values()]
        self._value: GraphModule | None = None
        self._value_and_gradient: GraphModule | None = None

    @property
    def dimension(self) -> int:
        """Length of θ."""
        return sum(self._sizes)

    def flatten(self, params: Mapping[str, Tensor]) -> Tensor:
        """θ from unconstrained values by site; the sites and shapes are checked.

        Raises:
            ValueError: a site is missing or unknown, or has another shape.
        """
        if set(params) != set(self._shapes):
            raise UnfitModel(f"values for the latents {sorted(self._shapes)} are needed, got {sorted(params)}.")
        for name, shape in self._shapes.items():
            if params[name].shape != shape:
                raise UnfitModel(f"latent {name!r} has the unconstrained shape {tuple(shape)}, got {tuple(params[name].shape)}.")
        return torch.cat([params[name].detach().reshape(-1).to(self.device, self.dtype) for name in self._shapes])

    def unflatten(self, theta: Tensor) -> dict[str, Tensor]:
        """Unconstrained values by site."""
        parts = theta.split(self._sizes)
        return {name: part.reshape(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}

    def constrain(self, theta: Tensor) -> dict[str, Tensor]:
        """Values by site, in the supports of the model's distributions."""
        return {name: self.transforms[name].inv(value) for name, value in self.unflatten(theta).items()}

    def log_density(self, theta: Tensor) -> float:
        """log p(θ) with the Jacobian terms."""
        if self._value is None:
            self._value = self._recorded(self._log_density, theta)
        with torch.no_grad():
            return float(self._value(theta))

    def log_densities(self, thetas: Tensor) -> Tensor:
        """log p(θ) with the Jacobian terms of every row of ``thetas``, (rows,)."""
        with torch.no_grad(), quiet():
            values: Tensor = vmap(self._log_density)(thetas)
        return values

    def log_density_and_gradient(self, theta: Tensor) -> tuple[float, Tensor]:
        """log p(θ) with the Jacobian terms, and its gradient."""
        if self._value_and_gradient is None:
            self._value_and_gradient = self._recorded(grad_and_value(self._log_density), theta)
        with torch.no_grad():
            gradient, value = self._value_and_gradient(theta)
        return float(value), gradient

    def _recorded(self, function: Callable[..., Any], theta: Tensor) -> GraphModule:
        try:
            with quiet():
                return _record(lambda theta: function(theta), theta)  # make_fx counts the arguments of a bound method wrongly
        except Exception as error:
            raise UnfitModel(
                f"the model cannot be recorded as tensor operations for its prior: {_first_line(error)}. Write it, likelihood included, without "
                "Python branches on tensor values, .item(), .numpy(), one_hot (write z[..., None] == torch.arange(K)) and custom autograd functions."
            ) from error

    def sample(self) -> Tensor:
        """A draw of θ from the prior.

        Raises:
            ValueError: its draws are not finite.
        """
        for _ in range(100):
            with public_randomness(), quiet():
                trace = self._trace()
            theta = self.flatten({name: self.transforms[name](trace.nodes[name]["value"]) for name in self._shapes})
            if theta.isfinite().all() and math.isfinite(self.log_density(theta)):
                return theta
        raise UnfitModel("100 draws from the prior had no finite density: pass initial_params= to MCMC, made without the data.")

    def _log_density(self, theta: Tensor) -> Tensor:
        return self.log_density_with(theta, self._args, self._kwargs)

    def log_density_with(self, theta: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """log p(θ) as the model computes it from other arguments."""
        unconstrained, values = self.unflatten(theta), self.constrain(theta)
        trace = poutine.trace(poutine.condition(self._model, values)).get_trace(*args, **kwargs)
        _compute_log_prob(trace, self._shapes)
        result = theta.new_zeros(())
        for name in self._shapes:
            jacobian = self.transforms[name].log_abs_det_jacobian(values[name], unconstrained[name])
            result = result + trace.nodes[name]["log_prob_sum"] - jacobian.sum()
        return result

    def _trace(self) -> Trace:
        with poutine.block():
            try:
                return poutine.trace(self._model).get_trace(*self._args, **self._kwargs)
            except NotImplementedError as error:
                raise UnfitModel(_IMPROPER.format(_first_line(error))) from error


class RecordDensity:
    r"""log p(x_i | θ) of every record, clipped sums over the records, and the prior.

    Args:
        model: a Pyro model with one vectorised data plate that holds every observed site. Its data are its arguments.
        args, kwargs: those arguments. A tensor with a dimension as long as the data plate is data, one row a record along the first such
            dimension; every other argument is a public constant.
        data_plate: the plate's name.
        gradients: also record the gradients.
        chunk_bytes: bound on the intermediate results of one chunk of rows.

    Attributes:
        prior: θ's coordinates and log prior, a :class:`Prior`.

    Raises:
        ValueError: the model has no such plate, observes something outside it, has local continuous or global discrete latents, subsamples,
            or a record's term depends on other records; the message says what to write instead. All of it is found on made-up rows.

    **Privacy.** The methods return exact functions of the data, which are no release: add noise to a clipped sum, and charge it
    before. A clipped sum moves by at most its bound when a record is added or removed, and by twice that when one is
    replaced. A record whose term or gradient is not finite, or at which the computation fails, contributes 0. What the model takes from
    elsewhere than its arguments cannot be checked and counts as public.
    """

    def __init__(
        self,
        model: Model,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        data_plate: str = "data",
        gradients: bool = True,
        chunk_bytes: int = _CHUNK_BYTES,
    ) -> None:
        self._model, self._plate, self._chunk_bytes = model, data_plate, chunk_bytes
        self._leaves, self._structure = tree_flatten((tuple(args), dict(kwargs or {})))
        for leaf in self._leaves:
            if type(leaf).__module__.split(".")[0] in ("numpy", "pandas", "polars", "jax"):
                raise TypeError(
                    f"an argument of the model is a {type(leaf).__name__}: pass data as torch tensors (torch.as_tensor), which are taken apart by "
                    "rows."
                )
        self._leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        with torch.no_grad(), quiet():
            self._find_structure()
            self._prepare_made_up_rows()
            self._check_locality()
        self._failed: Tensor | None = None
        self._programs: dict[str, _Program] = {"terms": self._record_terms_program()}
        self.prior.log_density(self._theta)  # what cannot be recorded is refused before anything is charged
        if gradients:
            self._programs["gradients"] = self._record_gradients_program()
            self.prior.log_density_and_gradient(self._theta)
        with torch.no_grad(), quiet():
            self._few_rows = self._tiled(self._made_up_count)
            self._few_terms = _record(lambda t, *rows: self._record_terms(t, rows), self._theta, *self._few_rows)

    # -- what kernels use ----------------------------------------------------------------------------------------------

    @property
    def num_records(self) -> int:
        """Number of rows: under add-or-remove-one not a public number."""
        return self._num_records

    @torch.no_grad()
    def log_likelihoods(self, theta: Tensor) -> Tensor:
        """log p(x_i | θ) of every record, (num_records,). Private data.

        Raises:
            InvalidPoint: the terms of made-up records are not numbers either: θ lies outside of what the model can compute.
        """
        if not self.is_valid(theta):
            raise InvalidPoint
        program = self._programs["terms"]
        result = torch.empty(self._num_records, dtype=self.prior.dtype, device=self.prior.device)
        for start, count, rows in self._chunks(program.rows):
            terms = self._run(program, theta, start, rows)[:count]
            result[start : start + count] = terms
        if self._failed is not None:
            result[self._failed] = math.nan
        return result

    @torch.no_grad()
    def clipped_gradient_sum(self, theta: Tensor, max_norm: float) -> Tensor:
        r"""Σ_i g_i·min(1, ``max_norm``/‖g_i‖) with g_i = ∇_θ log p(x_i | θ), (dimension,) in float64. Private data.

        Add the noise before anything is rounded: in float32 the sum over a million records can move by thousands of bounds when one is taken
        out, as the rounding of all others changes with it. Outside of 1e-30 < ``max_norm`` < 1e150 the bound does not hold: float64 overflows, or
        rounds to nothing.

        Raises:
            InvalidPoint: the model cannot be evaluated at θ.
        """
        result = torch.zeros(self.prior.dimension, dtype=torch.float64, device=self.prior.device)
        for block, factors in self._gradients(theta, max_norm):
            result += factors @ block
        return result

    @torch.no_grad()
    def clipped_outer_sum(self, theta: Tensor, max_norm: float) -> Tensor:
        r"""Σ_i c_i c_iᵀ of the clipped gradients c_i of :meth:`clipped_gradient_sum`, (dimension, dimension) in float64. Private data.

        In Frobenius norm it moves by at most ``max_norm``² when a record is added or removed, and by at most √2·``max_norm``² when one is replaced.

        Raises:
            InvalidPoint: the model cannot be evaluated at θ.
        """
        result = torch.zeros(self.prior.dimension, self.prior.dimension, dtype=torch.float64, device=self.prior.device)
        for block, factors in self._gradients(theta, max_norm):
            clipped = factors[:, None] * block
            result += clipped.T @ clipped
        return result

    def _gradients(self, theta: Tensor, max_norm: float) -> Iterator[tuple[Tensor, Tensor]]:
        """Blocks of the records' finite gradients in float64, and the factors that clip them."""
        if not self.is_valid(theta):  # asked of made-up rows alone: no record decides whether a trajectory ends here
            raise InvalidPoint
        program = self._programs["gradients"]
        for start, count, rows in self._chunks(program.rows):
            gradients = self._run(program, theta, start, rows)[:count]
            if self._failed is not None:
                gradients = gradients[~self._failed[start : start + count]]
            for some in gradients.split(_ROWS_IN_FLOAT64):
                block = some.to(torch.float64)
                norm = torch.linalg.vector_norm(block, dim=1)
                finite = norm.isfinite()
                if not finite.all():  # 0·inf is nan: such a record is cut out, not scaled away
                    block, norm = block[finite], norm[finite]
                yield block, (max_norm / norm).clamp_(max=1.0)

    @torch.no_grad()
    def is_valid(self, theta: Tensor) -> bool:
        """Whether made-up records have terms at θ. No function of the data."""
        try:
            terms = self._few_terms(theta, *self._few_rows)
        except torch.OutOfMemoryError:
            raise
        except Exception:
            return False
        return not bool(terms.isnan().all())

    # -- structure, from shapes alone ------------------------------------------------------------------------------------

    def _find_structure(self) -> None:
        trace = self._first_trace()
        plates: dict[str, set[tuple[int | None, int]]] = {}
        for name, site in trace.nodes.items():
            if site["type"] != "sample":
                continue
            if isinstance(site["fn"], _Subsample):
                if site["fn"].subsample_size is not None and site["fn"].subsample_size < site["fn"].size:
                    raise UnfitModel(_SUBSAMPLES.format(name))
                continue
            for frame in site["cond_indep_stack"]:
                if frame.full_size not in (None, frame.size):
                    raise UnfitModel(_SUBSAMPLES.format(frame.name))
                plates.setdefault(frame.name, set()).add((frame.dim if frame.vectorized else None, frame.size))
        mine = self._plate
        if mine not in plates:
            found = f"its plates are {sorted(plates)}" if plates else "it has no plate"
            raise UnfitModel(
                f"the model has no sites in a plate named {mine!r} ({found}). Which factors belong to one record is what the guarantee is about: "
                f"write with pyro.plate({mine!r}, len(y)): around the observations, or name the plate with data_plate=."
            )
        if len(plates[mine]) > 1:
            raise UnfitModel(f"the plate {mine!r} occurs more than once, with different dimensions or sizes: put all observations into one.")
        ((dim, size),) = plates[mine]
        if dim is None:
            raise UnfitModel(f"the plate {mine!r} is iterated over: write it as a context, with pyro.plate({mine!r}, ...), which is vectorised.")
        self._plate_dim, self._num_records = dim, size
        self._observed: list[str] = []
        self._local: list[str] = []
        latents = set(continuous_latents(trace))
        for name, site in trace.nodes.items():
            if site["type"] != "sample" or isinstance(site["fn"], _Subsample) or site["infer"].get("_deterministic"):
                continue
            inside = any(frame.name == mine for frame in site["cond_indep_stack"])
            if site["is_observed"]:
                self._require_plated(name, site, inside)
                self._observed.append(name)
            elif name in latents and inside:
                raise UnfitModel(
                    f"latent {name!r} lies in the data plate: every record has its own, which would be a release about that record alone. Integrate "
                    "it out, or move it out of the plate; discrete latents are summed out by themselves."
                )
            elif name not in latents:
                if not inside:
                    raise UnfitModel(
                        f"discrete latent {name!r} lies outside the data plate: summing it out ties all records together. Move it into the plate, or "
                        "replace it by a continuous one."
                    )
                if site["infer"].get("enumerate", "parallel") != "parallel":
                    raise UnfitModel(f'latent {name!r} is enumerated sequentially: leave out infer=, or write infer={{"enumerate": "parallel"}}.')
                self._local.append(name)
        if not self._observed:
            raise UnfitModel(f"nothing is observed in the plate {mine!r}: pass obs= to a site in it.")
        self._nesting = max(-frame.dim for n in trace.nodes.values() if n["type"] == "sample" for frame in n["cond_indep_stack"] if frame.vectorized)
        self._dims = {
            k: next(d for d, s in enumerate(leaf.shape) if s == self._num_records)
            for k, leaf in enumerate(self._leaves)
            if isinstance(leaf, Tensor) and self._num_records in leaf.shape
        }
        if not self._dims:
            raise UnfitModel(
                "no argument of the model has a dimension as long as the data plate. The data have to be arguments, MCMC.run(x, "
                "y): what a model takes from elsewhere counts as public."
            )

    def _first_trace(self) -> Trace:
        """A run on made-up data of the size of the real ones: for shapes only."""
        errors = []
        for flavour in ("zeros", *FLAVOURS):
            with public_randomness(), poutine.block():
                leaves = [made_up(leaf.shape, leaf, flavour) if isinstance(leaf, Tensor) and leaf.dim() else leaf for leaf in self._leaves]
                args, kwargs = tree_unflatten(leaves, self._structure)
                try:
                    return poutine.trace(self._model).get_trace(*args, **kwargs)
                except Exception as error:
                    errors.append(error)
        if isinstance(errors[0], NotImplementedError):
            raise UnfitModel(_IMPROPER.format(_first_line(errors[0]))) from errors[0]
        raise UnfitModel(
            f"the model does not run on made-up data of the shapes that were passed: {_first_line(errors[0])} (It is never run on the data "
            "themselves, so that no record can cause an error.)"
        ) from errors[0]

    def _require_plated(self, name: str, site: Any, inside: bool) -> None:
        if not inside:
            raise UnfitModel(
                f"site {name!r} is observed outside the plate {self._plate!r}: which of its factors belong to one record is not known, so nothing "
                "bounds what one record can do. Move it into the data plate."
            )
        batch = site["fn"].batch_shape
        if len(batch) >= -self._plate_dim and batch[self._plate_dim] != self._num_records:
            raise UnfitModel(
                f"site {name!r} has another number of entries along the data plate {self._plate!r} than the plate: every record needs exactly one."
            )
        if site["value"].numel() and not type(site["fn"]).__name__ == "Unit":
            dim = self._plate_dim - site["fn"].event_dim
            length = site["value"].shape[dim] if site["value"].dim() >= -dim else 1
            if length != self._num_records:
                raise UnfitModel(
                    f"the observation of site {name!r} has another length along the data plate {self._plate!r} than the plate: "
                    "a row for every record is needed, no more and no less."
                )

    # -- made-up rows ---------------------------------------------------------------------------------------------------

    def _prepare_made_up_rows(self) -> None:
        """Rows on which all terms are finite, and θ where they are. Independent of the data but for their shapes and dtypes."""
        count = _ROWS + 1 if self._num_records not in (_ROWS - 1, _ROWS, _ROWS + 1) else _ROWS + 4
        self._made_up_count = count - 1
        error: Exception | None = None
        for flavour in FLAVOURS:
            for spread in (1.0, 0.3, 0.03):
                with public_randomness():
                    try:
                        rows = [made_up(self._shape(k, count), self._leaves[k], flavour) for k in self._dims]
                        self.prior = Prior(self._model, *self._arguments(self._pick(rows, range(count - 1))))
                        theta = spread * (2 * torch.rand(self.prior.dimension, dtype=self.prior.dtype, device=self.prior.device) - 1)
                        rows = self._draw_observations(rows, theta)
                        terms = self._record_terms(theta, rows)
                    except UnfitModel:
                        raise
                    except Exception as caught:
                        error = error or caught
                        continue
                if bool(terms.isfinite().all()):
                    self._made_up_rows, self._theta = rows, theta
                    return
        if error is not None:
            raise UnfitModel(
                f"the model does not run on {count} made-up rows: {_first_line(error)}. Its plate has to take its size from the data, "
                f"pyro.plate({self._plate!r}, len(y)), its data have to be its arguments, and every tensor argument with a dimension of that length "
                "is taken as data; bind other arguments with functools.partial."
            ) from error
        raise UnfitModel(
            "the log likelihood of made-up rows is not finite: standard normal, uniform, 0/1 and small whole numbers were tried for the arguments, "
            "and draws from the model for what is observed. Let the model take arguments in such a range and convert them itself."
        )

    def _draw_observations(self, rows: list[Tensor], theta: Tensor) -> list[Tensor]:
        """Arguments that are observed as they are get draws from the model's own distributions."""
        args, kwargs = self._arguments(rows)
        trace = poutine.trace(poutine.condition(self._model, self.prior.constrain(theta))).get_trace(*args, **kwargs)
        result = list(rows)
        for name in self._observed:
            site: Any = trace.nodes[name]
            for k, row in enumerate(rows):
                if site["value"] is row:
                    try:
                        draw = site["fn"].sample()
                    except NotImplementedError:
                        continue
                    if draw.shape == row.shape:
                        result[k] = draw.to(row.dtype)
        return result

    def _check_locality(self) -> None:
        theta, last = self._theta, self._made_up_count
        everything = self._pick(self._made_up_rows, range(last))
        expected, prior = self._record_terms(theta, everything), self._prior_with(theta, everything)
        if not _close(self._record_terms(theta, everything), expected):
            raise UnfitModel(
                "two evaluations of the model at the same values differ: it draws random numbers that are no sample sites (dropout?). Switch them "
                "off, model.eval()."
            )
        others = list(range(1, last))
        # what happens, the rows after it, and which of the rows before it the first ones of these are
        cases = [
            ("another row is exchanged", self._pick(self._made_up_rows, [*others, last]), others),
            ("another row is left out", self._pick(self._made_up_rows, others), others),
            *(("all other rows are left out", self._pick(self._made_up_rows, [j]), [j]) for j in range(last)),
        ]
        for what, rows, kept in cases:
            try:
                terms, other_prior = self._record_terms(theta, rows)[: len(kept)], self._prior_with(theta, rows)
            except Exception as error:
                raise UnfitModel(
                    f"the model fails when {what}: {_first_line(error)}. The data plate has to take its size from the data: "
                    f"pyro.plate({self._plate!r}, len(y))."
                ) from error
            self._require_local(what, terms, expected[kept], other_prior, prior)
        odd = last // 2
        others.insert(0, 0)
        others.remove(odd)
        for what, rows in self._odd_rows(everything, odd):
            try:
                terms, other_prior = self._record_terms(theta, rows), self._prior_with(theta, rows)
                (alone,) = self._record_terms(theta, self._pick(rows, [odd]))
            except Exception:  # as the values may be impossible ones
                continue
            self._require_local(f"another row {what}", terms[others], expected[others], other_prior, prior)
            self._require_local(f"the others are left out and it {what}", alone, terms[odd], other_prior, prior)

    @staticmethod
    def _require_local(what: str, terms: Tensor, expected: Tensor, other_prior: Tensor, prior: Tensor) -> None:
        if not _close(terms, expected):
            raise UnfitModel(
                f"the log likelihood of a record changes when {what} (seen on made-up rows): the terms of records have to be independent of each "
                "other for clipping to bound what one record does. Centre, scale, count and fill in with public constants, not with the data's own "
                "mean, largest value or number."
            )
        if not _close(other_prior, prior):
            raise UnfitModel(
                f"the prior changes when {what} (seen on made-up rows): a prior that is made from the data would be released without a charge. "
                "Use a prior with public constants."
            )

    def _odd_rows(self, rows: list[Tensor], odd: int) -> Iterator[tuple[str, list[Tensor]]]:
        """Rows of which the one numbered ``odd`` has extreme or missing values: in all arguments, and in one at a time, which is enough for some
        models to fail on."""

        def altered(chosen: Iterable[int], alter: Callable[[Tensor], object]) -> list[Tensor]:
            result = list(rows)
            for k in chosen:
                result[k] = rows[k].clone()
                entries = result[k].select(list(self._dims.values())[k], odd)
                alter(entries)
            return result

        def fill(value: float) -> Callable[[Tensor], object]:
            return lambda entries: entries.fill_(value)

        def forget_some(entries: Tensor) -> None:
            missing = torch.arange(entries.numel(), device=entries.device).reshape(entries.shape) % 2 == 0
            entries.masked_fill_(missing, math.nan)

        floating = [k for k, row in enumerate(rows) if row.is_floating_point()]
        # On a GPU an index out of range would end the process.
        whole = [k for k, row in enumerate(rows) if not row.is_floating_point() and row.dtype != torch.bool and row.device.type == "cpu"]
        for chosen in (floating, *([k] for k in floating)) if len(floating) > 1 else (floating,):
            yield "is not a number", altered(chosen, fill(math.nan))
            yield "lacks some values", altered(chosen, forget_some)
            yield "is very large", altered(chosen, fill(_LARGE))
            yield "is very small", altered(chosen, fill(-_LARGE))
        for k in whole:
            yield "is very large", altered([k], fill(min(_LARGE, torch.iinfo(rows[k].dtype).max)))

    def _prior_with(self, theta: Tensor, rows: list[Tensor]) -> Tensor:
        return self.prior.log_density_with(theta, *self._arguments(rows))

    def _pick(self, rows: list[Tensor], index: Iterable[int]) -> list[Tensor]:
        chosen = torch.tensor(list(index))
        return [row.index_select(dim, chosen.to(row.device)) for row, dim in zip(rows, self._dims.values(), strict=True)]

    def _shape(self, k: int, count: int) -> torch.Size:
        shape = list(self._leaves[k].shape)
        shape[self._dims[k]] = count
        return torch.Size(shape)

    def _arguments(self, rows: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves = list(self._leaves)
        for k, row in zip(self._dims, rows, strict=True):
            leaves[k] = row
        args, kwargs = tree_unflatten(leaves, self._structure)
        return args, kwargs

    # -- the terms as Pyro computes them ------------------------------------------------------------------------------------

    def _record_terms(self, theta: Tensor, rows: Sequence[Tensor]) -> Tensor:
        """log p(row | θ), one for each row, by running the model."""
        args, kwargs = self._arguments(rows)
        count = rows[0].shape[next(iter(self._dims.values()))]
        model = poutine.condition(self._model, self.prior.constrain(theta))
        if self._local:
            model = poutine.enum(config_enumerate(model), first_available_dim=-1 - self._nesting)
        trace = poutine.trace(model).get_trace(*args, **kwargs)
        wanted = {*self._observed, *self._local}
        _compute_log_prob(trace, wanted)
        if set(trace.nodes) & wanted != wanted:
            raise UnfitModel("the model has different sites in different runs; a kernel needs the same ones in every run.")
        return self._summed_out(trace, count) if self._local else self._summed(trace, count)

    def _summed(self, trace: Trace, count: int) -> Tensor:
        total: Tensor | None = None
        for name in self._observed:
            terms = trace.nodes[name]["log_prob"]
            if terms.dim() < -self._plate_dim or terms.shape[self._plate_dim] != count:
                raise UnfitModel(
                    f"site {name!r} has factors of shape {tuple(terms.shape)} for {count} made-up rows: the data plate has to take its size from the "
                    f"data, pyro.plate({self._plate!r}, len(y))"
                )
            if other := [d for d in range(-terms.dim(), 0) if d != self._plate_dim]:
                terms = terms.sum(other)
            total = terms if total is None else total + terms
        assert total is not None
        return total

    def _summed_out(self, trace: Trace, count: int) -> Tensor:
        trace.pack_tensors()
        mine = trace.plate_to_symbol[self._plate]
        factors: OrderedDict[frozenset[str], list[Tensor]] = OrderedDict()
        for name in [*self._local, *self._observed]:
            site = trace.nodes[name]
            if not any(f.name == self._plate and f.size == count for f in site["cond_indep_stack"]):
                raise UnfitModel(f"the data plate has to take its size from the data: pyro.plate({self._plate!r}, len(y))")
            plates = frozenset(trace.plate_to_symbol[f.name] for f in site["cond_indep_stack"] if f.vectorized)
            factors.setdefault(plates, []).append(site["packed"]["log_prob"])
        discrete = set(trace.symbol_to_dim) - set(trace.plate_to_symbol.values())
        contracted = contract_tensor_tree(factors, discrete, ring=_LogSumExpRing())
        total: Tensor | None = None
        for terms in contracted.values():
            for term in terms:
                dims = term._pyro_dims
                if other := [d for d, symbol in enumerate(dims) if symbol != mine]:
                    term = term.sum(other)
                if mine not in dims:  # Pyro drops dimensions of size 1
                    term = term.expand(count)
                total = term if total is None else total + term
        assert total is not None
        return total

    # -- recorded once, replayed on the data ----------------------------------------------------------------------------------

    def _row_term(self, theta: Tensor, *row: Tensor) -> Tensor:
        rows = [r.unsqueeze(dim) for r, dim in zip(row, self._dims.values(), strict=True)]
        return self._record_terms(theta, rows).sum()

    def _row_term_with_own_tensors(self, theta: Tensor, *row: Tensor) -> Tensor:
        with _TensorsOfTheRow(row[0]):
            return self._row_term(theta, *row)

    # Rows meet only under vmap, which cannot let one see another: what the checks on made-up rows overlook still costs no privacy.

    def _record_terms_program(self) -> _Program:
        in_dims = (None, *self._dims.values())
        ways = [vmap(term, in_dims=in_dims) for term in (self._row_term, self._row_term_with_own_tensors)]
        return self._program(ways, lambda output, weights, theta, rows: _close(output, self._record_terms(theta, rows)))

    def _record_gradients_program(self) -> _Program:
        in_dims = (None, *self._dims.values())
        terms = (self._row_term, self._row_term_with_own_tensors)
        ways = [*(vmap(grad(term), in_dims=in_dims) for term in terms), *(jacfwd(vmap(term, in_dims=in_dims)) for term in terms)]

        def right(output: Tensor, weights: Tensor, theta: Tensor, rows: list[Tensor]) -> bool:
            with torch.enable_grad():
                point = theta.detach().requires_grad_()
                (expected,) = torch.autograd.grad((self._record_terms(point, rows) * weights).sum(), point)
            return not expected.isfinite().all() or _close(weights @ output, expected)

        return self._program(ways, right)

    def _program(self, ways: Sequence[Callable[..., Tensor]], right: Callable[..., bool]) -> _Program:
        """The first way that can be recorded and agrees with Pyro on other made-up rows than it was recorded on."""
        problems = []
        for way in ways:
            try:
                with quiet(), torch.no_grad():
                    few = self._tiled(16)
                    small = _record(way, self._theta, *few)
                    each = _LiveBytes(small).measure(self._theta, *few) / 16
                    limit = max(1, int(self._chunk_bytes / max(each, 1)))
                    count = max(1, math.ceil(self._num_records / math.ceil(self._num_records / limit)))
                    program = _Program(_record(way, self._theta, *self._tiled(count)), count)
                    other = self._theta.flip(0) * 0.7
                    rows = self._tiled(count, start=3)
                    weights = torch.linspace(0.5, 1.5, count, dtype=self._theta.dtype, device=self._theta.device)
                    if right(program.graph(other, *rows), weights, other, rows):
                        return program
                problems.append("the recorded operations do not reproduce the model on other rows (it computes with numpy, or with .item()?)")
            except Exception as error:
                problems.append(_first_line(error))
        raise UnfitModel(
            "the model's record terms cannot be recorded as tensor operations on one row at a time, which keeps a record out of the terms of others: "
            f"{'; '.join(dict.fromkeys(problems))}. Write torch.where(mask, a, b) instead of x[mask], x[mask] = a and other shapes that depend "
            "on values (torch.unique, torch.nonzero), (z[..., None] == torch.arange(K)) instead of one_hot, and fill in missing values with public "
            "constants; leave out Python branches on tensor values, .item(), .numpy() and custom autograd functions."
        )

    def _tiled(self, count: int, start: int = 0) -> list[Tensor]:
        return self._pick(self._made_up_rows, [(start + i) % self._made_up_count for i in range(count)])

    def _chunks(self, count: int) -> Iterator[tuple[int, int, list[Tensor]]]:
        """(first row, number of rows, rows filled up with made-up ones to the recorded length)."""
        for start in range(0, self._num_records, count):
            yield start, min(count, self._num_records - start), self._rows(start, count)

    def _rows(self, start: int, count: int) -> list[Tensor]:
        present = min(count, self._num_records - start)
        rows = [self._leaves[k].narrow(dim, start, present) for k, dim in self._dims.items()]
        if present < count:
            filling = self._tiled(count - present)
            rows = [torch.cat([row, more.to(row.dtype)], dim) for row, more, dim in zip(rows, filling, self._dims.values(), strict=True)]
        return rows

    def _run(self, program: _Program, theta: Tensor, start: int, rows: list[Tensor]) -> Tensor:
        try:
            return program(theta, rows)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            try:
                program(theta, self._tiled(program.rows))
            except Exception:
                raise InvalidPoint from error
            self._cut_out(program, theta, start, rows)
            return program(theta, self._rows(start, program.rows))

    def _cut_out(self, program: _Program, theta: Tensor, start: int, rows: list[Tensor]) -> None:
        """Exchange the rows at which the computation fails for made-up ones, for good; they contribute 0 from now on."""
        filling = self._tiled(program.rows)
        dims = list(self._dims.values())

        def failing(first: int, last: int) -> list[int]:
            mixed = [more.clone() for more in filling]
            for row, into, dim in zip(rows, mixed, dims, strict=True):
                into.narrow(dim, first, last - first).copy_(row.narrow(dim, first, last - first))
            try:
                program(theta, mixed)
                return []
            except torch.OutOfMemoryError:
                raise
            except Exception:
                if last - first == 1:
                    return [first]
                middle = (first + last) // 2
                return failing(first, middle) + failing(middle, last)

        found = failing(0, min(program.rows, self._num_records - start))
        if self._failed is None:
            self._failed = torch.zeros(self._num_records, dtype=torch.bool, device=self.prior.device)
            for k in self._dims:
                self._leaves[k] = self._leaves[k].clone()
        for i in found:
            self._failed[start + i] = True
            for k, more, dim in zip(self._dims, filling, dims, strict=True):
                self._leaves[k].select(dim, start + i).copy_(more.select(dim, i))


class _TensorsOfTheRow(TorchFunctionMode):
    """What vmap lacks: tensors that the model makes belong to the row too, so that values of the row can be written into them, and ``.data`` can be
    had, of which Pyro's enumeration takes the shape."""

    def __init__(self, row: Tensor) -> None:
        super().__init__()
        self._zero = row.new_zeros(())

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function == Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].detach()
        made = function(*args, **(kwargs or {}))
        if function not in _MAKING:
            return made
        return made.logical_or(self._zero) if made.dtype == torch.bool else made + self._zero.to(made.dtype)


_MAKING = {
    *(torch.zeros, torch.ones, torch.empty, torch.full, torch.eye, torch.tensor),
    *(torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like),
    *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_tensor),
}


class _Program:
    """Tensor operations recorded for a fixed number of rows."""

    def __init__(self, graph: GraphModule, rows: int) -> None:
        self.graph, self.rows = graph, rows

    def __call__(self, theta: Tensor, rows: list[Tensor]) -> Tensor:
        result: Tensor = self.graph(theta, *rows)
        return result


class _LogSumExpRing(LogRing):
    """Pyro's sums of products in log space without its autograd function, which torch.func cannot differentiate: one discrete site after another."""

    def sumproduct(self, terms: Sequence[Any], dims: Iterable[str]) -> Tensor:
        left = [(term._pyro_dims, term) for term in terms]
        sizes = {symbol: size for names, term in left for symbol, size in zip(names, term.shape, strict=True)}

        def joined(symbol: str) -> int:
            return math.prod(sizes[s] for s in set().union(*(names for names, _ in left if symbol in names)))

        pending = set(dims) & set(sizes)
        while pending:
            symbol = min(sorted(pending), key=joined)
            pending.remove(symbol)
            names, term = self._product([pair for pair in left if symbol in pair[0]])
            left = [pair for pair in left if symbol not in pair[0]]
            left.append((names.replace(symbol, ""), term.logsumexp(names.index(symbol))))
        names, term = self._product(left)
        result: Any = term[...]
        result._pyro_dims = names
        return result

    @staticmethod
    def _product(terms: list[tuple[str, Tensor]]) -> tuple[str, Tensor]:
        names = "".join(sorted(set().union(*(n for n, _ in terms))))
        total: Any = 0.0
        for own, term in terms:
            term = term.permute([own.index(s) for s in names if s in own])
            total = total + term.reshape([term.shape[sorted(own).index(s)] if s in own else 1 for s in names])
        return names, total


class _LiveBytes(Interpreter):
    """The most memory that intermediate results of a graph take at once."""

    def measure(self, *inputs: Tensor) -> int:
        # Not Interpreter.run: that makes a progress bar, whose lock Pyro's own progress bars may hold for ever in a process forked from theirs.
        self.args_iter, self.env, most = iter(inputs), {}, 0
        for node in self.graph.nodes:
            self.env[node] = self.run_node(node)
            storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in self.env.values() if isinstance(t, Tensor)}
            most = max(most, sum(storages.values()))
            for done in self.user_to_last_uses.get(node, ()):
                del self.env[done]
        return most


def clipped_ratio_sum(current: Tensor, proposed: Tensor, bound: float) -> float:
    r"""Σ_i clip(proposed_i − current_i, ±``bound``), where what is not a number counts as 0. Private data.

    **Privacy.** Moves by at most ``bound`` when a record is added or removed.
    """
    return float((proposed.double() - current.double()).clamp_(-bound, bound).nan_to_num_(nan=0.0).sum())


def continuous_latents(trace: Trace) -> list[str]:
    """Names of the latent sites of a trace that are not summed out."""
    return [
        name
        for name, site in trace.nodes.items()
        if site["type"] == "sample" and not site["is_observed"] and not isinstance(site["fn"], _Subsample) and not site["fn"].has_enumerate_support
    ]


def _compute_log_prob(trace: Trace, wanted: Container[str]) -> None:
    """Of the ``wanted`` sites. Distributions that were built outside of the model (PyroSample's) come with checks of values switched on."""
    checking = []
    for name, site in trace.nodes.items():
        part = site["fn"] if name in wanted else None
        while part is not None:
            if getattr(part, "_validate_args", False):
                part._validate_args = False
                checking.append(part)
            part = getattr(part, "base_dist", None)
    try:
        trace.compute_log_prob(lambda name, _site: name in wanted)
    finally:
        for part in checking:
            part._validate_args = True


quiet = partial(pyro.validation_enabled, False)
"""Without Pyro's and torch's checks of values, whose errors depend on them."""


@contextmanager
def public_randomness() -> Iterator[None]:
    """Sites drawn inside come from the operating system's entropy; the caller's seeds are neither used nor moved."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.set_rng_state(fresh_generator().get_state())
        for device in devices:
            torch.cuda.set_rng_state(fresh_generator(f"cuda:{device}").get_state(), device)
        yield


def _record(function: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", FutureWarning)  # torch's own use of it, in jacfwd
        graph: GraphModule = make_fx(function)(*inputs)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


FLAVOURS = ("normal", "uniform", "binary", "counts")


def made_up(shape: torch.Size, like: Tensor, flavour: str) -> Tensor:
    """Values of ``like``'s dtype and of nothing else of it; whole numbers start at 0, as indices have to."""
    values = torch.zeros(shape, dtype=like.dtype, device=like.device)
    if flavour == "zeros":
        return values
    if like.is_complex() or (flavour == "normal" and like.is_floating_point()):
        return values.normal_()
    if flavour == "uniform" and like.is_floating_point():
        return values.uniform_(0.05, 0.95)
    if flavour == "counts" and like.dtype != torch.bool:
        return values.random_(1, 3)
    return values.random_(0, 2)


def _first_line(error: Exception) -> str:
    """Without the table of shapes that Pyro appends, which has the number of records."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def _close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    tolerance = 1e-9 if a.dtype == torch.float64 else 1e-4 if a.dtype == torch.float32 else 3e-2
    scale = float(b.detach().nan_to_num(0.0, 0.0, 0.0).abs().max()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * (scale + 1e-30), equal_nan=True)
