"""What an audit found."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from ..accounting.accountant import PrivacyAccountant
from ..accounting.gdp import gaussian_epsilon, gaussian_mu
from ..errors import AuditError
from .bounds import (
    Guesses,
    StatedCurve,
    best_number,
    epsilon_lower_bound,
    expected_guesses,
    independent_epsilon_lower_bound,
    independent_mu_lower_bound,
    independent_refuted,
    mu_lower_bound,
    refuted,
)

_LARGEST_EPSILON = 50.0  # an audit of more than that is planned for this
_SMALLEST_DELTA = 1e-12


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
            Melis and Chaudhuri 2025), priced at ``delta``: the ε of a Gaussian that reveals as
            much; ``"independent"``, the same, and nearer
            to the truth, for releases that show each canary apart; or ``"basic"``, one on ε among
            all (ε, δ) (Steinke, Nasr and Jagielski 2023).
        guesses: how many canaries there were, how many coins were guessed, how many rightly.
        neighboring: the relation that the accountant's ε is for.
        command: that made it, if it came from a command line.
        refutes_curve: whether the whole trade-off curve that the accountant states allows no so
            many right guesses, which is another question than its ε where the curve is no
            Gaussian's; None: no accountant was asked, or the bound is ``"basic"``.
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
    refutes_curve: bool | None = None

    @property
    def is_refuted(self) -> bool:
        """Whether what is stated is too little, with this confidence: the accountant's curve, or
        the ε if that is all that is known.
        """
        if self.refutes_curve is None:
            return self.epsilon_lower_bound > self.epsilon
        return self.refutes_curve

    def to_json(self) -> str:
        """For pipelines: all attributes, and ``is_refuted``."""
        values = {**asdict(self), "guesses": self.guesses._asdict(), "is_refuted": self.is_refuted}
        # JSON has no infinity
        values["epsilon"] = None if math.isinf(self.epsilon) else self.epsilon
        return json.dumps(values, indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        canaries, made, correct = self.guesses
        verdict = "REFUTED: more is revealed than stated" if self.is_refuted else "not refuted"
        if self.is_refuted != (self.epsilon_lower_bound > self.epsilon):
            verdict += ", by the accountant's trade-off curve, which is no Gaussian's"
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


@dataclass(frozen=True)
class Pricing:
    """From guesses to the lower bound on ε.

    Args:
        bound: ``"gaussian"``, ``"independent"`` or ``"basic"``.
        delta: δ at which ε is asked for.
        confidence: the probability that the bound is right.
        is_independent: each guess is on a release of its own.

    Raises:
        ValueError: an argument is out of range.
    """

    bound: str
    delta: float
    confidence: float
    is_independent: bool = False

    def __post_init__(self) -> None:
        if self.bound not in ("gaussian", "independent", "basic"):
            raise AuditError(
                f'bound must be "gaussian", "independent" or "basic", got {self.bound!r}'
            )
        if not 0 <= self.delta < 1:
            raise AuditError(f"delta is a probability below 1, got {self.delta}")
        if self.bound != "basic" and self.delta == 0:
            raise AuditError('a Gaussian\'s ε is infinite at delta=0: pass bound="basic"')
        if not 0.5 <= self.confidence < 1:
            raise AuditError(
                f"confidence is a probability from 0.5 to below 1, got {self.confidence}"
            )

    def __call__(self, guesses: Guesses) -> float:
        if self.bound == "basic":
            of_epsilon = (
                independent_epsilon_lower_bound if self.is_independent else epsilon_lower_bound
            )
            return of_epsilon(guesses, self.delta, self.confidence)
        of_mu = independent_mu_lower_bound if self._has_independent_guesses else mu_lower_bound
        mu = of_mu(guesses, self.confidence)
        return gaussian_epsilon(mu, self.delta) if mu > 0 else 0.0

    def refutes(self, accountant: PrivacyAccountant, guesses: Guesses) -> bool:
        """Whether the trade-off curves that it states allow so many right guesses with a
        probability below 1 − confidence.
        """
        risk = accountant.risk(prior=0.5, delta=self.delta)  # a coin
        if self._has_independent_guesses:
            return independent_refuted(risk.best_guess, guesses, self.confidence)
        return bool(refuted(StatedCurve(risk.curves), guesses, self.confidence).all())

    @property
    def _has_independent_guesses(self) -> bool:
        return self.is_independent or self.bound == "independent"

    def best_number(self, canaries: int, epsilon: float) -> int:
        """How many of the coins to guess where the release is worth the stated ε."""
        return self._best_number(canaries, self._mu(epsilon))

    def expected(self, canaries: int, epsilon: float) -> float:
        """The bound of a release that is worth all of the stated ε."""
        mu = self._mu(epsilon)
        return self(expected_guesses(canaries, self._best_number(canaries, mu), mu))

    def _best_number(self, canaries: int, mu: float) -> int:
        # the extreme ones of many independent guesses are right more often than one
        return canaries if self.bound == "independent" else best_number(canaries, mu, self)

    def _mu(self, epsilon: float) -> float:
        return gaussian_mu(min(epsilon, _LARGEST_EPSILON), max(self.delta, _SMALLEST_DELTA))
