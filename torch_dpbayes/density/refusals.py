"""What no private method can run with: handlers of Pyro's, refused by their own names instead of
those of sites that the user never wrote, and parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NoReturn

import pyro
from pyro.infer.reparam import ConjugateReparam
from pyro.infer.reparam.reparam import Reparam
from pyro.poutine.collapse_messenger import CollapseMessenger
from pyro.poutine.messenger import Messenger
from torch.nn import Module, Parameter

from .pyro_runs import Model, UnfitModel

_COLLAPSE = (
    "poutine.collapse sums sites out over all records together: write the marginal instead, such as"
    " BetaBinomial or GammaPoisson, or leave the latents to the kernel."
)
_CONJUGATE = (
    "ConjugateReparam draws a latent anew in every run, from what was observed: leave it out, the"
    " kernel samples the latent itself."
)


def _collapses(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise UnfitModel(_COLLAPSE)


def _updates(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise UnfitModel(_CONJUGATE)


_REFUSED = (
    (CollapseMessenger, "__init__", _collapses),
    (CollapseMessenger, "__enter__", _collapses),
    (ConjugateReparam, "apply", _updates),
)


@contextmanager
def handlers_refused() -> Iterator[None]:
    """A model that runs inside and uses one of them raises :class:`UnfitModel`. They leave nothing
    in a trace by which they could be told.
    """
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in _REFUSED]
    try:
        for owner, name, refuse in _REFUSED:
            setattr(owner, name, refuse)
        yield
    finally:
        for owner, name, method in before:
            setattr(owner, name, method)


class WithoutParameters:
    """A model in which :func:`pyro.param` raises :class:`UnfitModel`: what it returns may come from
    Pyro's store, where a run that was not private has left what it fitted to the same records.
    Frozen parameters of modules are public and stay frozen, whereas Pyro would let them be trained.
    """

    def __init__(self, model: Model) -> None:
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model itself, with an empty store, from which nothing fitted can be read where a
        handler in the model hides a parameter.
        """
        with pyro.get_param_store().scope() as used, _RefusesParameters():
            result = self._model(*args, **kwargs)
        for name in used["params"]:
            raise _parameter(name)
        return result


@contextmanager
def frozen_ones_kept(model: Model) -> Iterator[None]:
    """Pyro lets a module's frozen parameters be trained whenever it runs; not afterwards."""
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
        f"the model has a parameter {name!r}, which may have been fitted to the records but would"
        " count as public: make it a pyro.sample site, write a public number, or freeze its module"
        " (requires_grad_(False))."
    )


def branching_reparam(error: BaseException) -> str | None:
    """What to say if ``error`` was raised while a graph was recorded in a reparametrisation."""
    step: TracebackType | None = error.__traceback__
    while step is not None:
        owner = step.tb_frame.f_locals.get("self")
        if isinstance(owner, Reparam):
            return (
                f"{type(owner).__name__} decides by values what it computes, which no graph of"
                " operations can: leave it out, or sample its auxiliary sites and transform them"
                " in the model."
            )
        step = step.tb_next
    return None
