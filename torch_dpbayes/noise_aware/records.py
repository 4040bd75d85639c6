"""The records of a model, and simulated ones.

A run of the model on synthetic rows shows which arguments its sites observe. All other arguments
with a row for each record are covariates.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from pyro.poutine.uncondition_messenger import UnconditionMessenger
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..density import Model, RecordDensity, UnfitModel, without_value_checks
from ..density.pyro_runs import public_randomness, sample_sites, trace_at, without_parameters
from ..errors import ArgumentError, ArgumentTypeError

Role = Literal["observed", "public", "numbers", "category"]

_PLATE = "data"
LARGEST_DIMENSION = 500  # beyond, moments of seven releases take more than 2 GB
POINTS = 32  # at which log-likelihoods of a chunk of records are computed together
_SYNTHETIC_ROWS = 40  # two random columns of 0 and 1 are equal with probability 2⁻⁴⁰
_MOST_CATEGORIES = 1000
_ROUNDING = 1e-6
# values of test records; missing values are often coded as -1 or NaN
_ODD_VALUES = (math.nan, -1e6, -1.0, 0.0, 1e6)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, torch's random numbers repeat; its generators outside do not change."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices):
        # torch.manual_seed takes 300 times as long: it prepares devices that are not in use
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed_all(seed)
        yield


def shorten(norms_squared: Tensor, bound: float) -> Tensor:
    """Factors that scale vectors down to norm ``bound``, less a millionth for rounding."""
    least = bound * (1 - _ROUNDING)
    return (least * norms_squared.clamp_min(1e-300).rsqrt()).clamp(max=1.0)


def short(rows: Tensor, bound: float = 1.0) -> Tensor:
    """Rows, or one row, scaled down to norm ``bound``."""
    return rows * shorten(rows.square().sum(-1, keepdim=True), bound)


class _WithoutObservations(UnconditionMessenger):
    """Draws what the model observes. Values that it only names (``pyro.deterministic``) stay."""

    def _pyro_sample(self, msg: Any) -> None:
        if not msg["infer"].get("_deterministic"):
            super()._pyro_sample(msg)


class ModelRecords:
    """A Pyro model as a source of records: the roles of its arguments, and simulation.

    Errors may depend on the number of records if ``count_is_public``. ``chunk`` records are
    computed at a time.

    Attributes:
        density: density of the records; ``density.rows()`` are private.
        roles: role of each data argument, in the order of ``density.rows()``.
        read: indices of the coordinates of θ that records depend on, ``[d]``.

    Raises:
        ValueError: no records can be simulated from the model, as far as its arguments show.
    """

    def __init__(
        self,
        model: Model,
        args: Sequence[Any],
        *,
        count_is_public: bool,
        public: Sequence[str | int],
        chunk: int,
    ) -> None:
        if any(isinstance(leaf, Tensor) and leaf.is_complex() for leaf in tree_leaves(args)):
            raise UnfitModel("an argument of the model is complex: pass two real tensors.")
        self._model = partial(without_parameters, model)
        density = RecordDensity(
            model, args, data_plate=_PLATE, rows_at_once=chunk, count_is_public=count_is_public
        )
        self.density = density
        self.read = torch.arange(density.prior.dimension)[density.read]
        if not len(self.read):
            raise UnfitModel(
                "no record depends on a latent of the model: use one in the data plate."
            )
        if len(self.read) > LARGEST_DIMENSION:
            raise ArgumentError(
                f"records depend on {len(self.read)} parameters, but at most {LARGEST_DIMENSION}"
                " can be simulated: use a sampler of torch_dpbayes.optim."
            )
        positions = _argument_names(model, args)
        public = [public] if isinstance(public, str | int) else public
        if not isinstance(public, Sequence) or not all(isinstance(p, str | int) for p in public):
            raise ArgumentTypeError(
                f"public= must be names or positions of arguments, as ('x',); got {public!r:.60}."
            )
        self._observed_sites = observed = self._observed()
        self.names = [positions.get(k, str(k)) for k in density.arguments.row_dims]
        wanted = {positions.get(p, str(p)) if isinstance(p, int) else p for p in public}
        if unknown := sorted(wanted.difference(self.names)):
            raise ArgumentError(
                f"public= names {unknown[0]!r}, which is not an argument with a row for each"
                f" record; these are {sorted(self.names)}."
            )
        self.roles: list[Role] = []
        for number, (name, row) in enumerate(zip(self.names, density.rows(), strict=True)):
            role: Role = "numbers" if row.is_floating_point() else "category"
            if number in observed:
                role = "observed"
            elif name in wanted:
                role = "public"
            if role == "observed" and name in wanted:
                raise ArgumentError(f"argument {name!r} is observed: leave it out of public=.")
            self.roles.append(role)

    def of_role(self, *roles: Role) -> list[int]:
        """Numbers of the data arguments that have one of these roles."""
        return [number for number, role in enumerate(self.roles) if role in roles]

    def forget(self) -> None:
        """Replace the private records by synthetic ones."""
        self.density = self.density.with_rows(self.density.made_up.few())

    def categories(self) -> dict[int, int]:
        """The number of values of each category: the smallest positive integer at which the model
        fails.

        Raises:
            ValueError: it does not fail up to 1,000, a record has several numbers, or the model
                fails if all categories have their largest values.
        """
        own = [row.clone() for row in self.density.made_up.few()]
        found = {number: self._num_categories(number) for number in self.of_role("category")}
        for number, size in found.items():
            own[number].fill_(size - 1)
        try:
            self._terms_of(own)
        except Exception as error:
            names = ", ".join(self.names[number] for number in found)
            raise UnfitModel(
                f"the possible values of one of the arguments {names} depend on the others: pass"
                " the index of their combination as one argument."
            ) from error
        return found

    def _terms_of(self, rows: list[Tensor]) -> None:
        with torch.no_grad(), without_value_checks():
            self.density.made_up.terms(self.density.made_up.theta, rows)

    def _num_categories(self, number: int) -> int:
        row = self.density.made_up.few()[number]
        if row.dim() > 1:
            raise UnfitModel(
                f"argument {self.names[number]!r} is not one integer (a category) per record: pass"
                " each column separately, or floats, or covariates=, a public sample."
            )
        if row.dtype == torch.bool:
            return 2
        own = [synthetic.clone() for synthetic in self.density.made_up.few()]
        for value in range(1, _MOST_CATEGORIES + 1):
            own[number].fill_(value)
            try:
                self._terms_of(own)
            except Exception:
                return value
        raise UnfitModel(
            f"the values of argument {self.names[number]!r} cannot be read from the model: pass"
            " public=, or covariates=, a public sample, or pass it as a float."
        )

    # -- simulation --------------------------------------------------------------------------------

    def simulate(
        self, theta: Tensor, covariates: Mapping[int, Tensor], count: int, seed: int
    ) -> RecordDensity:
        """``count`` records drawn from the model at θ, given as many rows of covariates by number
        of the argument, as a new density. Equal seeds give equal random numbers.
        """
        rows = self.density.made_up.rows(count)
        for number, row in covariates.items():
            rows[number] = row
        for _ in self._observed_sites:  # one site may read the argument of another
            rows = self._draw(theta, rows, seed)
        return self.density.with_rows(rows)

    def _draw(self, theta: Tensor, rows: list[Tensor], seed: int) -> list[Tensor]:
        values = self.density.prior.constrain(theta.to(self.density.prior.dtype))
        model, arguments = _WithoutObservations()(self._model), self.density.arguments
        with torch.no_grad(), without_value_checks(), seeded(seed):
            trace = trace_at(model, values, *arguments.with_rows(rows))
        in_model, result = arguments.in_model(rows), list(rows)
        for number, site in self._observed_sites.items():
            drawn = trace.nodes[site]["value"].reshape(in_model[number].shape)
            result[number] = arguments.rows_first(number, drawn).to(rows[number].dtype)
        return result

    def _sites(self, rows: Sequence[Tensor]) -> dict[str, Any]:
        """The sites of one run of the model on synthetic rows."""
        values = self.density.prior.constrain(self.density.made_up.theta)
        arguments = self.density.arguments.with_rows(list(rows))
        with public_randomness(), torch.no_grad(), without_value_checks():
            return sample_sites(trace_at(self._model, values, *arguments))

    def _observed(self) -> dict[int, str]:
        """For the number of each observed argument, the site that observes it."""
        density, found = self.density, dict[int, str]()
        rows = density.made_up.other_rows(_SYNTHETIC_ROWS)
        sites = self._sites(rows)
        own = density.arguments.in_model(rows)
        for name in density.observed:
            value = sites[name]["value"]
            left = [k for k in range(len(own)) if k not in found]
            numbers = [k for k in left if _is_same_data(value, own[k])]
            if not numbers:
                raise UnfitModel(
                    f"the observation or factor of site {name!r} is not an argument of the model:"
                    " pass it as a separate argument, for pyro.sample(name, distribution,"
                    " obs=...)."
                )
            exact = [k for k in numbers if value is own[k]]
            found[(exact or numbers)[0]] = name
        self._require_no_weights(rows, found)
        return found

    def _require_no_weights(self, rows: list[Tensor], observed: Mapping[int, str]) -> None:
        """Refuse weights of records, and masks that depend on observed values. Both may be
        functions of the data, so odd values of each argument are tested, too.
        """
        usual, others = self._weights(rows), [(-1, rows)]
        for number, row in enumerate(rows):
            # on a GPU an index out of range would end the process
            is_safe = row.is_floating_point() or row.device.type == "cpu"
            for value in _ODD_VALUES if is_safe else ():
                other = torch.full(row.shape, value).to(row)
                others.append((number, [*rows[:number], other, *rows[number + 1 :]]))
        for number, other_rows in others:
            try:
                found = self._weights(other_rows)
            except Exception:  # the values may be impossible ones
                continue
            for name, weight in found.items():
                if not bool(((weight == 0) | (weight == 1)).all()):
                    raise UnfitModel(
                        f"poutine.scale weights the records' site {name!r}, and a weighted record"
                        " cannot be simulated: repeat the record, or use poutine.mask with a"
                        " separate argument."
                    )
                if number in observed and not torch.equal(weight, usual[name]):
                    raise UnfitModel(
                        f"the mask of site {name!r} is computed from observed values, so records"
                        " cannot be simulated: pass it as a separate argument."
                    )

    def _weights(self, rows: Sequence[Tensor]) -> dict[str, Tensor]:
        """Weights of the sites in the data plate: scales; 0 where a mask excludes a record."""
        found = {}
        for name, site in self._sites(rows).items():
            if all(frame.name != _PLATE for frame in site["cond_indep_stack"]):
                continue
            law, masks = site["fn"], [site["mask"]]
            while law is not None:
                masks.append(getattr(law, "_mask", None))
                law = getattr(law, "base_dist", None)
            parts = [site["scale"], *(mask for mask in masks if mask is not None)]
            found[name] = math.prod(map(torch.as_tensor, parts), start=torch.ones(()))
        return found


def scores(records: ModelRecords, density: RecordDensity, theta: Tensor) -> Tensor:
    """u(x; θ) of every record, ``[n, d]`` in float64; 0 if it or the density is not finite."""
    point = theta.to(density.prior.device, density.prior.dtype)
    found = density.gradients(point)[:, records.read]
    sound = density.log_likelihoods(point).isfinite()
    return torch.where(sound[:, None], found, 0.0).cpu()


def log_likelihoods(density: RecordDensity, theta: Tensor) -> Tensor:
    """log p(x; θ) of simulated records for rows of θ ``[m, D]``, ``[m, n]`` in float64; NaN if the
    model cannot be evaluated.
    """
    rows, count = theta.to(density.prior.device, density.prior.dtype), density.num_records
    points = max(1, POINTS * min(density.chunk, count) // count)
    found = [density.log_likelihoods_of_first(some, count) for some in rows.split(points)]
    return torch.cat(found).to("cpu", torch.float64)


def clipped(found: Tensor, whitening: Tensor) -> Tensor:
    """clip₁ of every row times ``whitening``, with a margin for rounding."""
    return short(found @ whitening.T).nan_to_num_(0.0, 0.0, 0.0)


def _is_same_data(value: Tensor, row: Tensor) -> bool:
    """Whether a site observes an argument, up to dtype and dimensions of size 1."""
    if value.numel() != row.numel():
        return False
    seen = row.to(value.dtype).to(row.dtype)
    return torch.equal(value.reshape(row.shape).to(row.dtype), seen)


def _argument_names(model: Model, args: Sequence[Any]) -> dict[int, str]:
    """Names of the arguments that are tensors, by number of the leaf."""
    try:
        names = list(inspect.signature(model).parameters)
    except (TypeError, ValueError):
        names = []
    found, leaf = {}, 0
    for position, arg in enumerate(args):
        if isinstance(arg, Tensor) and position < len(names):
            found[leaf] = names[position]
        leaf += len(tree_leaves(arg))
    return found
