"""An audit on a picture."""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .result import AuditResult

_INK, _MEASURED, _REFUTED = "#333333", "#2a6f97", "#b23a48"
_WIDTH = 95  # characters of a line below the bars


def plot(result: AuditResult, ax: Any = None) -> Any:
    """Two bars from 0: what was measured at least, and what is stated."""
    if ax is None:
        try:
            from matplotlib import pyplot
        except ImportError:
            raise ImportError("pictures need Matplotlib: pip install matplotlib") from None
        ax = pyplot.figure(figsize=(7.2, 2.9), layout="constrained").add_subplot()
    colour = _REFUTED if result.is_refuted else _MEASURED
    values = [result.epsilon, result.epsilon_lower_bound]
    ax.barh([1, 0], values, height=0.55, color=["#c9ced3", colour])
    for height, value in zip([1, 0], values, strict=True):
        ax.annotate(
            f"{value:.2f}",
            (value, height),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color=_INK,
        )
    ax.set_yticks([1, 0], ["stated by the\naccountant", "measured,\nat least"])
    ax.set_xlim(0, 1.15 * max([*values, 1e-3]))
    canaries, made, correct = result.guesses
    verdict = "refuted" if result.is_refuted else "not refuted"
    ax.set_title(
        f"Stated ε {verdict} at {result.confidence:.0%} confidence", loc="left", color=_INK
    )
    facts = [
        f"ε at δ = {result.delta:g}, {result.neighboring}",
        f"{correct} of {made} guesses right, {canaries} canaries, {result.bound} bound",
        result.threat,
        result.command,
    ]
    ax.set_xlabel(
        "\n".join(line for fact in facts for line in wrap(fact, _WIDTH)), loc="left", fontsize=8
    )
    ax.spines[["top", "right"]].set_visible(False)
    return ax
