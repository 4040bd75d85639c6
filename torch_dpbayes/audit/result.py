"""What an audit found."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from ..accounting.gaussian import gaussian_epsilon
from .bounds import Guesses, epsilon_lower_bound, mu_lower_bound


@dataclass(frozen=True)
class AuditResult:
    """A lower bound on ε beside the ε that the accountant states.

    Attributes:
        epsilon_lower_bound: at ``delta``; what the release is shown to cost at least.
        epsilon: what the accountant states at ``delta``.
        delta: δ of both.
        confidence: the probability, over the coins and the release, that the bound is right.
        threat: who was simulated, and what they see.
        bound: ``"gaussian"``, a lower bound on μ among Gaussian trade-off curves (Mahloujifar,
            Melis and Chaudhuri 2025), priced at ``delta``, or ``"basic"``, one on ε among all
            (ε, δ) (Steinke, Nasr and Jagielski 2023).
        guesses: how many canaries there were, how many coins were guessed, how many rightly.
        neighboring: the relation that the accountant's ε is for.
        command: that made it, if it came from a command line.
    """

    epsilon_lower_bound: float
    epsilon: float
    delta: float
    confidence: float
    threat: str
    bound: str
    guesses: Guesses
    neighboring: str
    command: str = ""

    @property
    def is_refuted(self) -> bool:
        """Whether the stated ε is too small, with this confidence."""
        return self.epsilon_lower_bound > self.epsilon

    def to_json(self) -> str:
        """For pipelines: all attributes, and ``is_refuted``."""
        values = {**asdict(self), "guesses": self.guesses._asdict(), "is_refuted": self.is_refuted}
        # JSON has no infinity
        values["epsilon"] = None if math.isinf(self.epsilon) else self.epsilon
        return json.dumps(values, indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        canaries, made, correct = self.guesses
        verdict = "REFUTED: more is revealed than stated" if self.is_refuted else "not refuted"
        return "\n".join(
            [
                f"epsilon at least  {self.epsilon_lower_bound:.3g}  (delta = {self.delta:g},"
                f" {self.confidence:.0%} confidence, {self.bound} bound)",
                f"epsilon stated    {self.epsilon:.3g}  ({self.neighboring}): {verdict}",
                f"guesses           {correct} of {made} right, {canaries} canaries",
                f"threat            {self.threat}",
            ]
        )

    def plot(self, ax: Any = None) -> Any:
        """The lower bound beside the stated ε, with all that belongs to them.

        Args:
            ax: where to draw, an ``Axes`` of Matplotlib; None: a new figure.

        Returns:
            The ``Axes``.
        """
        from .picture import plot

        return plot(self, ax)


def priced(guesses: Guesses, bound: str, delta: float, confidence: float) -> float:
    """The lower bound on ε."""
    if bound == "basic":
        return epsilon_lower_bound(guesses, delta, confidence)
    mu = mu_lower_bound(guesses, confidence)
    return gaussian_epsilon(mu, delta) if mu > 0 else 0.0
