"""Handlers of Pyro's that no kernel can run with, refused by their own names instead of those of
sites that the user never wrote.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NoReturn

from pyro.infer.reparam import ConjugateReparam
from pyro.infer.reparam.reparam import Reparam
from pyro.poutine.collapse_messenger import CollapseMessenger

from .pyro_runs import UnfitModel

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
