"""Parameters, which no private method can run with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyro
from pyro.poutine.messenger import Messenger
from torch.nn import Module, Parameter

from .pyro_runs import Model, UnfitModel


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
