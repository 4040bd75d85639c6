"""Warnings that point to the line of the user's program."""

from __future__ import annotations

import inspect
import warnings

_PACKAGE = __name__.partition(".")[0]


def warn(message: str) -> None:
    """A ``UserWarning`` at the line that called this package."""
    frame, depth = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, stacklevel=depth)
