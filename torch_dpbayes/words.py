"""What objects say of themselves: their numbers, and what their accountant holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape

from .accounting.accountant import PrivacyAccountant

_DELTA = 1e-5  # where there is no budget to take it from


def spent(accountant: PrivacyAccountant) -> tuple[float, float]:
    """(ε, δ) of what the accountant holds; ε is NaN where its ledger cannot be read."""
    delta = _DELTA if accountant.delta is None else accountant.delta
    try:
        return accountant.get_epsilon(delta), delta
    except Exception:  # what says something for a person never fails
        return math.nan, delta


def spent_in_words(accountant: PrivacyAccountant) -> str:
    """As in ``epsilon = 0.5 of 3 spent at delta = 1e-05``."""
    epsilon, delta = spent(accountant)
    budget = "" if accountant.epsilon is None else f" of {accountant.epsilon:g}"
    return f"epsilon = {epsilon:.4g}{budget} spent at delta = {delta:g}"


def one_line(of: object, numbers: Mapping[str, object], accountant: PrivacyAccountant) -> str:
    """A ``repr``: the class, its numbers, and what is spent."""
    shown = [
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value!r}"
        for name, value in numbers.items()
    ]
    return f"{type(of).__name__}({', '.join(shown)}): {spent_in_words(accountant)}"


def html(of: object, numbers: Mapping[str, object], accountant: PrivacyAccountant) -> str:
    """The same for a notebook, with ε as a bar where there is a budget."""
    epsilon, _ = spent(accountant)
    bar = ""
    if accountant.epsilon is not None and math.isfinite(epsilon):
        share = min(1.0, epsilon / accountant.epsilon)
        bar = (
            '<div style="width:20em;border:1px solid #888"><div style="height:0.7em;'
            f'background:#47c;width:{share:.1%}"></div></div>'
        )
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(str(value))}</td></tr>"
        for name, value in numbers.items()
    )
    return (
        f"<b>{escape(type(of).__name__)}</b><br>{escape(spent_in_words(accountant))}{bar}"
        f"<table>{rows}</table>"
    )
