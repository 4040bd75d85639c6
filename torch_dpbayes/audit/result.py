"""The result of an audit, in words and as a picture."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import fill
from typing import Any

from .bounds import Guesses

_STATED, _MEASURED, _REFUTED = "#c9ced3", "#2a6f97", "#b23a48"  # colours of the bars


@dataclass(frozen=True)
class AuditResult:
    """A lower bound on ε, and the ε that the accountant states.

    Attributes:
        epsilon_lower_bound: the release reveals at least this ε at ``delta``.
        epsilon: what the accountant states at ``delta``.
        delta: the δ of both.
        confidence: the probability, over the inclusions and the release, that the bound is right.
        threat: who was simulated, and what they see.
        bound: ``"gaussian"``: a lower bound on μ among Gaussian trade-off curves (Mahloujifar and
            others 2025), as the ε of that Gaussian at ``delta``. ``"independent"``: the same, but
            tighter, for releases that show each canary separately. ``"basic"``: a lower bound on ε
            among all (ε, δ) (Steinke and others 2023).
        guesses: number of canaries, of guesses, and of right guesses.
        neighboring: the relation of the accountant's ε; None: the caller stated ε.
        refutes_curve: whether the accountant's whole trade-off curve, which need not be Gaussian,
            allows fewer right guesses; None: no accountant, or the bound is ``"basic"``.
    """

    epsilon_lower_bound: float
    epsilon: float
    delta: float
    confidence: float
    threat: str
    bound: str
    guesses: Guesses
    neighboring: str | None = None
    refutes_curve: bool | None = None

    @property
    def is_refuted(self) -> bool:
        """Whether the release reveals more than stated, with this confidence: judged by the
        accountant's trade-off curve if it is known, else by ε.
        """
        if self.refutes_curve is None:
            return self.epsilon_lower_bound > self.epsilon
        return self.refutes_curve

    def __str__(self) -> str:
        canaries, made, correct = self.guesses
        verdict = (
            "REFUTED: the release reveals more than stated" if self.is_refuted else "not refuted"
        )
        if self.is_refuted != (self.epsilon_lower_bound > self.epsilon):
            verdict += ", by the accountant's trade-off curve, which is not Gaussian"
        return (
            f"epsilon at least  {self.epsilon_lower_bound:.3g}  (delta = {self.delta:g},"
            f" {self.confidence:.0%} confidence, {self.bound} bound)\n"
            f"epsilon stated    {self.epsilon:.3g}  ({self.neighboring or 'by the caller'}):"
            f" {verdict}\n"
            f"guesses           {correct} of {made} right, {canaries} canaries\n"
            f"threat            {self.threat}"
        )

    def plot(self, ax: Any = None) -> Any:
        """Draw both ε as bars on ``ax``, Matplotlib ``Axes``, or on a new figure, with the report
        below them; returns the ``Axes``.
        """
        if ax is None:
            from matplotlib import pyplot

            ax = pyplot.figure(figsize=(7.2, 2.9), layout="constrained").add_subplot()
        values = [self.epsilon, self.epsilon_lower_bound]
        colours = [_STATED, _REFUTED if self.is_refuted else _MEASURED]
        ax.bar_label(ax.barh([1, 0], values, height=0.55, color=colours), fmt="%.2f", padding=5)
        ax.set_yticks([1, 0], ["stated by the\naccountant", "measured,\nat least"])
        ax.set_xlim(0, 1.15 * max([*values, 1e-3]))
        lines = [fill(line, width=95) for line in str(self).splitlines()]  # what fits below
        ax.set_xlabel("\n".join(lines), loc="left", fontsize=8)
        ax.spines[["top", "right"]].set_visible(False)
        return ax
