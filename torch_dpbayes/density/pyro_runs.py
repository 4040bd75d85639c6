"""Run a user's Pyro model without the data, the caller's random numbers, parameters, and checks
whose errors depend on values.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import UnfitModel as UnfitModel
from ..noise import fresh_generator
from ..per_sample.arithmetic import full_precision
from ..processes import Lock

Model = Callable[..., Any]
OfTheta = Callable[[Tensor], Tensor]
Trace = Any  # pyro.poutine.trace_struct.Trace

_CHECKS_VALUES = "_validate_args"  # torch has no public switch for one distribution
FLAVOURS = ("normal", "uniform", "binary", "counts")
_PERTURBED, _FEW = 8, 1e-5  # number and largest relative size of perturbations that show rounding


class _UsingPyro(Lock):
    """All threads share Pyro's stack of handlers and torch's global generator: only one thread at a
    time may use them. Inside, autocast, reduced products and anomaly detection are off: recorded
    programs would differ from the model, and one record's NaN would raise an error.
    """

    def __init__(self) -> None:
        super().__init__()
        self._entered: list[ExitStack] = []

    def __enter__(self) -> _UsingPyro:
        super().__enter__()
        self._entered.append(stack := ExitStack())
        for kind in ("cpu", "cuda"):
            stack.enter_context(full_precision(torch.device(kind)))
        stack.enter_context(torch.autograd.set_detect_anomaly(False))
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().close()
        super().__exit__(*error)


using_pyro = _UsingPyro()


class InvalidPoint(ArithmeticError):
    """The model cannot be evaluated at this θ, whatever the data are."""


@contextmanager
def without_value_checks() -> Iterator[None]:
    """Switches off Pyro's and torch's checks of values: their errors depend on the values."""
    with using_pyro, pyro.validation_enabled(False):
        yield


@contextmanager
def public_randomness() -> Iterator[None]:
    """Random numbers inside come from the operating system's entropy. The caller's generators are
    neither used nor changed.
    """
    devices = [*range(torch.cuda.device_count())] if torch.cuda.is_initialized() else []
    with using_pyro, torch.random.fork_rng(devices):
        torch.set_rng_state(fresh_generator().get_state())
        for device in devices:
            torch.cuda.set_rng_state(fresh_generator(f"cuda:{device}").get_state(), device)
        yield


def made_up(shape: torch.Size, like: Tensor, flavour: str) -> Tensor:
    """Synthetic values with the dtype and device of ``like``, independent of its values. Integers
    start at 0, like indices.
    """
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


def trace_at(
    model: Model, values: dict[str, Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Trace:
    """One run of the model at these values of its latents. The caller's handlers have no effect:
    they could change the law that is sampled.
    """
    with using_pyro, poutine.block():
        try:
            return poutine.trace(poutine.condition(model, values)).get_trace(*args, **kwargs)
        except UnfitModel as error:  # without Pyro's table of shapes
            raise UnfitModel(str(error).splitlines()[0]) from None


def is_plate(site: Any) -> bool:
    """Whether a site of a trace only has the indices of a plate."""
    return isinstance(site["fn"], _Subsample)


def sample_sites(trace: Trace) -> dict[str, Any]:
    """The sites of a trace that have a distribution."""
    return {
        name: site
        for name, site in trace.nodes.items()
        if site["type"] == "sample" and not is_plate(site)
    }


def continuous_latents(trace: Trace) -> list[str]:
    """Names of the latent sites of a trace that are not summed out."""
    return [
        name
        for name, site in sample_sites(trace).items()
        if not site["is_observed"] and not site["fn"].has_enumerate_support
    ]


def compute_log_prob(trace: Trace, wanted: Container[str]) -> None:
    """Compute the log density of the ``wanted`` sites. Distributions from outside the model (those
    of PyroSample) have their own checks of values: these are switched off here.
    """
    checking = []
    for name, site in trace.nodes.items():
        distribution = site["fn"] if name in wanted else None
        while distribution is not None:
            if getattr(distribution, _CHECKS_VALUES, False):
                setattr(distribution, _CHECKS_VALUES, False)
                checking.append(distribution)
            distribution = getattr(distribution, "base_dist", None)
    try:
        trace.compute_log_prob(lambda name, _site: name in wanted)
    finally:
        for distribution in checking:
            setattr(distribution, _CHECKS_VALUES, True)


def first_line(error: Exception) -> str:
    """An error without Pyro's table of shapes, which has the number of records."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def improper(error: Exception) -> UnfitModel:
    return UnfitModel(
        f"the model cannot be sampled from: {first_line(error)}. Latents need proper priors:"
        " write a wide Normal instead of an improper distribution."
    )


class _OtherDigits(TorchDispatchMode):
    def __init__(self, share: float) -> None:
        super().__init__()
        self._share = share

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        is_own = not any(result.alias_info for result in func._schema.returns)
        if not (is_own and isinstance(found, Tensor) and found.is_floating_point()):
            return found
        return found * (1 + self._share * torch.randn_like(found).sign())


def rounding(function: OfTheta, theta: Tensor) -> Tensor:
    """How far rounding may move the results of ``function``: as far as random changes of the last
    digits of all its intermediate results.
    """
    # bounded: in a dtype of few digits such changes would hide a dependence
    share = min(16 * torch.finfo(theta.dtype).eps, _FEW)
    expected, others = function(theta), []
    with public_randomness():
        for _ in range(_PERTURBED):
            with _OtherDigits(share):
                others.append(function(theta.clone()))
    return (torch.stack(others) - expected).abs().amax(0)


def agree(ours: OfTheta, theirs: OfTheta, theta: Tensor, size: float = 0.0) -> bool:
    """Whether two functions are the same at θ up to rounding, also the rounding of large numbers
    that cancel.
    """
    a, b = ours(theta), theirs(theta)
    if nearly_equal(a, b, size):
        return True
    return nearly_equal(a, b, size, rounding(ours, theta) + rounding(theirs, theta))


def nearly_equal(a: Tensor, b: Tensor, size: float = 0.0, rounding: Tensor | float = 0.0) -> bool:
    """Whether two results agree up to rounding in their dtypes. ``size``: size of their summands,
    which may cancel. ``rounding``: a further tolerance, which is at most the usual one for numbers
    of size 1.
    """
    if a.shape != b.shape:
        return False
    # a factor may have whole numbers: they count as the default dtype
    eps = max(torch.finfo(torch.result_type(result, 0.0)).eps for result in (a, b))
    tolerance = 1e-9 if eps < 1e-12 else 1e-4 if eps < 1e-6 else 3e-2
    scale = float(b.detach().nan_to_num(0.0, 0.0, 0.0).abs().max()) if b.numel() else 0.0
    scale = max(scale, size)
    besides = torch.as_tensor(rounding, device=b.device).nan_to_num(0.0).clamp(max=tolerance)
    near = (a - b).abs() <= tolerance * (b.abs() + scale + 1e-30) + besides
    return bool((near | (a == b) | (a.isnan() & b.isnan())).all())


def without_parameters(model: Model, *args: Any, **kwargs: Any) -> Any:
    """Run the model, where :func:`pyro.param` raises :class:`UnfitModel`: its value may come from
    Pyro's store, where a run without privacy has stored a fit to the same records. The store is
    empty, so nothing can be read if a handler in the model hides a parameter. Frozen parameters of
    modules are public and stay frozen; Pyro alone would let them be trained.
    """
    with pyro.get_param_store().scope() as used, _RefusesParameters():
        result = model(*args, **kwargs)
    for name in used["params"]:
        raise _parameter(name)
    return result


@contextmanager
def frozen_ones_kept(model: Model) -> Iterator[None]:
    """Pyro makes a module's frozen parameters trainable when it runs: freeze them again."""
    own = list(model.parameters()) if isinstance(model, Module) else []
    frozen = [p for p in own if not p.requires_grad]
    try:
        yield
    finally:
        for p in frozen:
            p.requires_grad_(False)


class _RefusesParameters(Messenger):
    def _pyro_param(self, message: Any) -> None:
        name, *start = message["args"]
        if not start or not isinstance(start[0], Parameter) or start[0].requires_grad:
            raise _parameter(name)
        message["value"], message["done"] = start[0], True


def _parameter(name: str) -> UnfitModel:
    return UnfitModel(
        f"the model has a parameter {name!r}, which may be fitted to the records but would count"
        " as public: make it a pyro.sample site, write a public number, or freeze its module"
        " (requires_grad_(False))."
    )
