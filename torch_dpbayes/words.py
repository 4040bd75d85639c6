"""Shared ``__repr__`` and HTML of engine, optimizers, kernels and draws."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import TypeVar

from tqdm.auto import tqdm

from .accounting.accountant import PrivacyAccountant
from .accounting.report import bar, spent_in_words

_SOON = 2.0  # seconds before a progress bar appears

Step = TypeVar("Step")


def shown(steps: Iterable[Step], what: str) -> Iterable[Step]:
    """The steps, with a progress bar if they take long (in a terminal or a notebook)."""
    return tqdm(steps, what, delay=_SOON, disable=None, leave=False)


def one_line(of: object, numbers: Mapping[str, object], accountant: PrivacyAccountant) -> str:
    """A ``repr``: the class, its numbers, and the spent epsilon."""
    shown = [f"{name}={_rounded(value)}" for name, value in numbers.items()]
    return f"{type(of).__name__}({', '.join(shown)}): {spent_in_words(accountant)}"


def html(of: object, numbers: Mapping[str, object], accountant: PrivacyAccountant) -> str:
    """The same as HTML for a notebook; if there is a budget, a bar shows ε."""
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(_rounded(value).strip(chr(39)))}</td></tr>"
        for name, value in numbers.items()
    )
    return (
        f"<b>{escape(type(of).__name__)}</b><br>{escape(spent_in_words(accountant))}{bar(accountant)}"
        f"<table>{rows}</table>"
    )


def _rounded(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return f"[{', '.join(map(_rounded, value))}]"
    return repr(value)
