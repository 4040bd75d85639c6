"""Pictures of a guarantee, by matplotlib, which is imported only here and when it is needed."""

from __future__ import annotations

from typing import Any

import numpy as np

from .risk import Risk


def draw(risk: Risk, axes: Any = None) -> Any:
    """True- against false-positive rates of the best attack, on logarithmic axes."""
    if axes is None:
        try:
            from matplotlib import pyplot
        except ImportError:
            raise ImportError("plot_risk() needs matplotlib: pip install matplotlib") from None
        axes = pyplot.subplots(figsize=(5.5, 4.5))[1]
    lowest = min(1e-5, risk.false_positive_rate / 10)
    rates = np.geomspace(lowest, 1.0, 500)
    best = risk.true_positive_rates(rates)
    axes.fill_between(rates, rates, best, alpha=0.15, linewidth=0)
    axes.plot(rates, best, label="best attack, at most")
    axes.plot(rates, rates, color="black", linestyle=":", linewidth=1, label="guessing")
    axes.plot(
        [risk.false_positive_rate],
        [risk.true_positive_rate],
        "o",
        label=f"finds {risk.true_positive_rate:.3g} at {risk.false_positive_rate:g}",
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(lowest, 1.0)
    axes.set_ylim(lowest, 1.2)
    axes.set_xlabel("false-positive rate: accused, though not there")
    axes.set_ylabel("true-positive rate: there, and accused")
    people = "" if risk.records_per_person == 1 else f", {risk.records_per_person} records a person"
    axes.set_title(f"advantage ≤ {risk.advantage:.3g}{people}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    return axes
