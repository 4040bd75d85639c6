"""Find which sites of a model belong to the records, and which to the prior, from shapes alone."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

from .arguments import ROWS_ONLY, Arguments
from .prior import Prior
from .pyro_runs import (
    FLAVOURS,
    Model,
    Trace,
    UnfitModel,
    continuous_latents,
    first_line,
    improper,
    is_plate,
    public_randomness,
    sample_sites,
    trace_at,
    without_parameters,
    without_value_checks,
)

_log = logging.getLogger("torch_dpbayes")


@dataclass(frozen=True)
class Structure:
    """The data plate and the names of the sites in it."""

    plate: str
    plate_size: int  # in the model's run
    observed: list[str]
    discrete: list[str]  # latents, which are all in the plate; they are summed out
    deepest_dim: int  # number of batch dimensions of all plates of the model
    # sites outside the plate that are functions of the latents alone, like pyro.factor and sites of
    # reparametrisations; they belong to the prior
    outside: list[str]
    factors: list[str]  # sites of ``outside`` that the model itself wrote


def find_structure(model: Model, arguments: Arguments, plate: str) -> Structure:
    """The structure of ``model``, from one run on synthetic data.

    Raises:
        UnfitModel: the factors of the records cannot be separated.
    """
    trace = _traced(model, arguments)
    size = _data_plate_size(trace, plate)
    observed, discrete, outside = _sites(trace, plate)
    why = f"outside the plate {plate!r}, so the influence of one record has no bound: move it into"
    if factors := _factors(trace, outside, f"{why} the plate."):
        # a number in a closure cannot be distinguished from a public constant
        _log.warning(
            "sites %s outside the plate %r count as part of the prior and are not charged:"
            " numbers in them must not come from the records",
            factors,
            plate,
        )
    deepest = max(
        -frame.dim
        for node in trace.nodes.values()
        if node["type"] == "sample"
        for frame in node["cond_indep_stack"]
        if frame.vectorized
    )
    return Structure(plate, size, observed, discrete, deepest, outside, factors)


def prior_without_data(model: Model) -> Prior:
    """The prior of a model that has no data; its factors belong to it.

    Raises:
        UnfitModel: it has a parameter or a discrete latent, it observes something, or a factor
            reads a tensor.
    """
    model = partial(without_parameters, model)
    with public_randomness(), without_value_checks():
        trace = Prior(model).trace()
    outside = []
    for name, site in sample_sites(trace).items():
        if site["is_observed"] and not _is_named(site):
            outside.append(name)
        elif not site["is_observed"] and site["fn"].has_enumerate_support:
            raise UnfitModel(f"latent {name!r} of the prior is discrete: make it continuous.")
    why = "in a prior, which has no data: leave it out, or write pyro.factor with public numbers."
    factors = _factors(trace, outside, why)
    prior = Prior(model, factors=outside)
    prior.require_no_tensors_in(factors, prior.sample())
    return prior


def _factors(trace: Trace, outside: list[str], why: str) -> list[str]:
    """The sites of ``outside`` that the model itself wrote. Refuse observations."""
    found = [name for name in outside if not _is_left_by_reparam(trace.nodes[name])]
    for name in found:
        if type(trace.nodes[name]["fn"]).__name__ != "Unit":
            raise UnfitModel(f"site {name!r} is observed {why}")
    return found


def _traced(model: Model, arguments: Arguments) -> Trace:
    errors = []
    for flavour in ("zeros", *FLAVOURS):
        with public_randomness():
            try:
                return trace_at(model, {}, *arguments.made_up_call(flavour))
            except UnfitModel:
                raise
            except Exception as error:
                errors.append(error)
    if isinstance(errors[0], NotImplementedError):
        raise improper(errors[0]) from errors[0]
    if not arguments.count_is_public:  # the error's text has shapes
        raise UnfitModel(
            f"the model does not run on synthetic data: {type(errors[0]).__name__}. Test it on such"
            f" data yourself; {ROWS_ONLY}"
        ) from None
    if any(not shape[0] for shape in arguments.shapes.values()):
        raise UnfitModel("there are no records: a plate of Pyro's cannot be empty.")
    raise UnfitModel(
        "the model does not run on synthetic data of the given shapes:"
        f" {first_line(errors[0]).rstrip('.')}. It must accept such values: it never sees the"
        " data."
    ) from errors[0]


def _data_plate_size(trace: Trace, plate: str) -> int:
    found: dict[str, set[tuple[int, int]]] = {}
    for site in trace.nodes.values():
        if site["type"] != "sample":
            continue
        if is_plate(site):
            asked = site["fn"].subsample_size
            if asked is not None and asked < site["fn"].size:
                raise _subsamples(site["name"])
            continue
        for frame in site["cond_indep_stack"]:
            if frame.full_size not in (None, frame.size):
                raise _subsamples(frame.name)
            if not frame.vectorized:
                raise UnfitModel(
                    f"the plate {frame.name!r} is iterated over: write range(n) in its place, or,"
                    f" for the records, with pyro.plate({plate!r}, ...):"
                )
            found.setdefault(frame.name, set()).add((frame.dim, frame.size))
    if plate not in found:
        others = f"its plates are {sorted(found)}" if found else "it has no plate"
        raise UnfitModel(
            f"the model has no sites in a plate named {plate!r} ({others}): write with"
            f" pyro.plate({plate!r}, len(y)): around the observations, or name their plate with"
            " data_plate=."
        )
    if len(found[plate]) > 1:
        raise UnfitModel(
            f"the plate {plate!r} occurs more than once, with different dimensions or sizes: put"
            " all observations into one."
        )
    ((_, size),) = found[plate]
    return size


def _subsamples(plate: str) -> UnfitModel:
    return UnfitModel(
        f"plate {plate!r} subsamples, but every release is charged as one over all records: leave"
        " out subsample_size= and subsample=."
    )


def _sites(trace: Trace, plate: str) -> tuple[list[str], list[str], list[str]]:
    """Names of the observed sites and of the discrete latents in the plate, and of the observed
    sites outside the plate.
    """
    observed: list[str] = []
    discrete: list[str] = []
    outside: list[str] = []
    latents = set(continuous_latents(trace))
    for name, site in sample_sites(trace).items():
        if _is_named(site):
            continue
        inside = any(frame.name == plate for frame in site["cond_indep_stack"])
        if site["is_observed"] and not inside:
            outside.append(name)
        elif site["is_observed"]:
            observed.append(name)
        elif (whole := name.removesuffix("_unobserved")) != name and inside:
            raise UnfitModel(
                f"obs_mask= makes a latent of each missing entry of site {whole!r}: write with"
                " pyro.poutine.mask(mask=...): around it instead."
            )
        elif name in latents and inside:
            raise UnfitModel(
                f"latent {name!r} lies in the data plate, so every record has its own: integrate"
                " it out, or move it out of the plate."
            )
        elif name not in latents:
            if not inside:
                raise UnfitModel(
                    f"discrete latent {name!r} lies outside the data plate, and summing it out"
                    " would mix records: move it into the plate, or make it continuous."
                )
            if site["infer"].get("enumerate", "parallel") != "parallel":
                raise UnfitModel(
                    f"latent {name!r} is enumerated sequentially: leave out infer=, or write"
                    ' infer={"enumerate": "parallel"}.'
                )
            discrete.append(name)
    if not observed:
        raise UnfitModel(f"nothing is observed in the plate {plate!r}: pass obs= to a site in it.")
    return observed, discrete, outside


def _is_named(site: Any) -> bool:
    """Whether it is a value that the model only names: pyro.deterministic."""
    return bool(site["infer"].get("_deterministic"))


def _is_left_by_reparam(site: Any) -> bool:
    distribution = site["fn"]
    while (inner := getattr(distribution, "base_dist", None)) is not None:
        distribution = inner
    return type(distribution).__name__ == "Delta" and not bool(distribution.log_density.any())
