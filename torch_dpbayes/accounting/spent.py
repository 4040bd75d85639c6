"""What is spent of a budget, in a few words and as a bar."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .accountant import PrivacyAccountant

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


def bar(accountant: PrivacyAccountant) -> str:
    """ε as a bar of HTML where there is a budget; nothing elsewhere."""
    epsilon, _ = spent(accountant)
    if accountant.epsilon is None or not math.isfinite(epsilon):
        return ""
    share = min(1.0, epsilon / accountant.epsilon)
    return (
        '<div style="width:20em;border:1px solid #888"><div style="height:0.7em;'
        f'background:#47c;width:{share:.1%}"></div></div>'
    )
