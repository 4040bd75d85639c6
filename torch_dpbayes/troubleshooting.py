"""Where the documentation says why an error was raised: a note under it names the paragraph.

The doors of the library, its public classes and functions, add the note to errors that the library
itself raised; those of the caller's code and of other libraries stay as they are.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any, TypeVar, cast

PAGE = "docs/troubleshooting.md"
# headings of the page: of a room's errors
SECTIONS = {
    "accounting": "Budgets",
    "audit": "Audits",
    "batches": "The optimizer and the loader",
    "engine": "The optimizer and the loader",
    "frameworks": "Frameworks",
    "heads": "Private heads",
    "infer": "Pyro",
    "mcmc": "Pyro",
    "metrics": "Samples and predictions",
    "noise": "Random numbers",
    "noise_aware": "Noise-aware posteriors",
    "ops": "One posterior sample",
    "optim": "The optimizer and the loader",
    "per_sample": "The loop and its loss",
    "posterior": "Samples and predictions",
    "ranks": "Several processes",
    "release": "The loop and its loss",
}
# headings of the page: words of errors that have a paragraph of their own
EXPLAINED = (
    "is wrapped in Opacus'",
    "of this pass over the private loader got no step",
    "no new batch came from the private loader since the last step",
    "two passes over one private loader at a time",
    "is not private: pass partial(torch_dpbayes.optim.",
    "the optimizer must have exactly the model's trainable parameters",
    "an iterable data set hands out records in its own order",
    "this loader reads a data set that was made private",
    "exceeds the accountant's budget",
    "nothing is left of the accountant's budget",
    "this accountant's guarantee is its budget as a whole",
    "delta is needed, as this accountant has no budget",
    "cannot be copied: both copies would spend the same budget",
    "this accountant was forked into another process",
    "this accountant does not know the releases of the saved run",
)
_OURS = __name__.partition(".")[0]
_NOTE = "why: "

Door = TypeVar("Door")


def anchor(heading: str) -> str:
    """The anchor of a heading, as MyST and GitHub make it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def explained(door: Door) -> Door:
    """A function, or a class with the methods that it and its bases here have, whose errors name
    their paragraph.
    """
    if isinstance(door, type):
        for cls in door.__mro__:
            is_ours = cls.__module__.partition(".")[0] == _OURS
            if is_ours and not getattr(cls, "_is_protocol", False):
                _explain_methods(cls)
        return door
    return cast(Door, _explained(cast(Callable[..., Any], door)))


def explain_all(names: dict[str, Any]) -> None:
    """Every public class and function among the names of a module."""
    for name in names["__all__"]:
        if isinstance(names.get(name), (type, FunctionType)):
            names[name] = explained(names[name])


def _explain_methods(cls: type) -> None:
    for name, member in list(vars(cls).items()):
        is_public = not name.startswith("_") or name in ("__init__", "__call__")
        if is_public and isinstance(member, FunctionType) and not hasattr(member, "points_to_page"):
            setattr(cls, name, _explained(member))


def _explained(function: Callable[..., Any]) -> Callable[..., Any]:
    if hasattr(function, "points_to_page"):
        return function
    if inspect.isgeneratorfunction(function):

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return (yield from function(*args, **kwargs))
            except Exception as error:
                _point(error)
                raise

    else:

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                _point(error)
                raise

    call.points_to_page = True  # type: ignore[attr-defined]
    return call


def _point(error: Exception) -> None:
    """Add the note, once, to an error that was raised in this package."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ())):
        return
    package, _, rest = str(trace.tb_frame.f_globals.get("__name__")).partition(".")
    if package == _OURS and (heading := heading_of(str(error), rest.partition(".")[0])):
        error.add_note(f"{_NOTE}{PAGE}#{anchor(heading)}")


def heading_of(message: str, room: str) -> str | None:
    """The paragraph on a message that was raised in a room."""
    return next((words for words in EXPLAINED if words in message), SECTIONS.get(room))
