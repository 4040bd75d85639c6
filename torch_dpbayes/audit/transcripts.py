"""Audits of any release, from scores of canaries or from repeated releases; the audit's result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from textwrap import fill
from typing import Any

import numpy as np
import numpy.typing as npt
from dp_accounting.dp_event import TruncatedSubsampledGaussianDpEvent

from ..accounting import PrivacyAccountant
from ..accounting.events import SampledWithoutReplacementDpEvent, positive_count, real
from ..accounting.random_allocation import RandomAllocationDpEvent
from ..errors import AuditError
from .bounds import Array, Guesses, LowerBound

Inclusion = npt.NDArray[np.bool_]

_AUDIT = 0x61756469  # added to the seed: a training with this seed draws other numbers
_STATED, _MEASURED, _REFUTED = "#c9ced3", "#2a6f97", "#b23a48"  # colours of the bars
_DRAWN_JOINTLY = (
    RandomAllocationDpEvent,
    SampledWithoutReplacementDpEvent,
    TruncatedSubsampledGaussianDpEvent,
)


@dataclass(frozen=True)
class AuditResult:
    """A lower bound on ε, and the stated ε.

    Attributes:
        epsilon_lower_bound: the release reveals at least this ε at ``delta``.
        epsilon: the ε at ``delta`` that the accountant or the caller states.
        delta: the δ of both.
        confidence: the probability, over the inclusions and the release, that the bound is right.
        threat: the simulated attacker, and what the attacker sees.
        bound: ``"gaussian"``: a lower bound on the μ of a Gaussian trade-off curve (Mahloujifar and
            others 2025), converted to ε at ``delta``. ``"independent"``: the same, but tighter, for
            releases that show each canary separately. ``"basic"``: a lower bound on the ε of any
            (ε, δ)-private release (Steinke and others 2023).
        guesses: number of canaries, of guesses, and of right guesses.
        neighboring: the relation of the accountant's ε; None: the caller stated ε.
        refutes_curve: whether the accountant's whole trade-off curve, which need not be Gaussian,
            allows fewer right guesses; None: there is no accountant, or the bound is ``"basic"``.
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
        """Whether the release reveals more than stated, with this confidence: by the accountant's
        trade-off curve if ``refutes_curve`` is known, else by ε.
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
        """Draw both ε as bars, and the report below them, on the Matplotlib ``Axes`` ``ax`` or on a
        new figure; returns the ``Axes``.
        """
        if ax is None:
            from matplotlib import pyplot

            ax = pyplot.figure(figsize=(7.2, 2.9), layout="constrained").add_subplot()
        values = [self.epsilon, self.epsilon_lower_bound]
        colours = [_STATED, _REFUTED if self.is_refuted else _MEASURED]
        ax.bar_label(ax.barh([1, 0], values, height=0.55, color=colours), fmt="%.2f", padding=5)
        ax.set_yticks([1, 0], ["stated by the\naccountant", "measured,\nat least"])
        ax.set_xlim(0, 1.15 * max([*values, 1e-3]))
        lines = [fill(line, width=95) for line in str(self).splitlines()]  # fits the figure
        ax.set_xlabel("\n".join(lines), loc="left", fontsize=8)
        ax.spines[["top", "right"]].set_visible(False)
        return ax


def generator_of(seed: int | None) -> np.random.Generator:
    """The auditor's random generator; None: with the operating system's entropy."""
    return np.random.default_rng(None if seed is None else [_AUDIT, seed])


def draw_inclusion(canaries: int, generator: np.random.Generator) -> Inclusion:
    """Whether each canary is in the data: with probability 1/2, independently."""
    return generator.integers(0, 2, size=canaries, dtype=np.int8).astype(bool)


def guess(scores: Array, included: Inclusion, made: int) -> Guesses:
    """Guess "in" for the highest scores and "out" for the lowest, half each."""
    order = np.argsort(scores, kind="stable")
    low, high = order[: made // 2], order[len(order) - (made - made // 2) :]
    return Guesses(len(included), made, int((~included[low]).sum() + included[high].sum()))


def from_scores(
    scores: Any,
    included: Any,
    *,
    delta: float,
    epsilon: float | None = None,
    accountant: PrivacyAccountant | None = None,
    confidence: float = 0.95,
    bound: str = "gaussian",
    num_guesses: int | None = None,
    threat: str = "scores of the caller's",
) -> AuditResult:
    """Bound the ε of a release from below, by scores that were computed from it, one per canary.

    To audit several releases on the same canaries together, pass the sum of their scores.

    Args:
        scores: one for each canary; a higher score means that it is more likely in the data.
        included: whether each canary was in the data: independent fair bits, drawn before the
            release.
        delta, epsilon: the stated ε at δ; ``is_refuted`` compares it with the bound. Except for
            ``"basic"`` this is valid only for Gaussian releases: others may show more at the same
            ε.
        accountant: instead of ``epsilon``: states the release's ε and whole trade-off curve.
        confidence: the probability that the bound is right.
        bound: see :class:`AuditResult`. ``"independent"`` is valid only if the score of a canary
            does not depend on the inclusion of others and shares no noise with them. It is refused
            if the ``accountant`` was charged for batches that are neither full nor Poisson.
        num_guesses: must be chosen before the scores are seen; None: the best number at
            ``epsilon``, or all canaries for ``"independent"``.
        threat: a description of the simulated attacker, for the report.

    Raises:
        AuditError: scores and inclusions do not fit together, or an argument is out of range.

    **Privacy.** Nothing is charged: the bound is computed from the release.
    """
    found, drawn = np.asarray(scores, dtype=float), np.asarray(included)
    is_one_each = found.ndim == 1 and found.shape == drawn.shape and drawn.dtype == bool
    if not is_one_each or np.isnan(found).any():
        raise AuditError(
            "scores (without NaN) and included (bool) must be vectors of one length; got shapes"
            f" {found.shape} and {drawn.shape}, {drawn.dtype}. Score 0 means undecided."
        )
    lower_bound = LowerBound(bound, delta, confidence)
    for charge in accountant.history if accountant is not None and bound == "independent" else ():
        if isinstance(charge.event, _DRAWN_JOINTLY):
            raise AuditError(
                'bound="independent" is for full and Poisson batches, but the accountant was'
                f' charged a {type(charge.event).__name__}: pass bound="gaussian"'
            )
    epsilon = _stated(epsilon, accountant, delta)
    # the number of guesses depends on public numbers, not on scores or inclusions
    best = lower_bound.best_guesses(len(found), epsilon)
    made = best.made if num_guesses is None else num_guesses
    is_count = isinstance(made, (int, np.integer)) and 1 <= made
    if not is_count or not made <= len(found) or (bound == "independent" and made != len(found)):
        lowest = len(found) if bound == "independent" else 1
        raise AuditError(f"num_guesses must be {lowest} to {len(found)} here, got {made}")
    return _result(lower_bound, guess(found, drawn, made), epsilon, accountant, threat)


def repeated(
    release: Callable[[bool], float],
    *,
    delta: float,
    epsilon: float | None = None,
    accountant: PrivacyAccountant | None = None,
    repeats: int = 1000,
    confidence: float = 0.95,
    bound: str = "gaussian",
    threat: str = "repeated releases on worst-case data, each with its likelihood ratio",
    seed: int | None = None,
) -> AuditResult:
    """Repeat a release, each time randomly with or without one record, and guess which case it was.

    Guesses are independent, and likelihood ratios give the best guesses. So the bound is tighter
    than that from one run.

    Args:
        release: ``release(is_in)`` releases from data with or without the record and returns
            log p(release | in) − log p(release | out), or another number that is positive if "in"
            is the better guess.
        delta, epsilon, accountant: the statement on one release, as for :func:`from_scores`.
        repeats: number of releases, with independent noise.
        confidence, bound, threat: as for :func:`from_scores`.
        seed: seed of the inclusions; None: the operating system's entropy.

    Raises:
        AuditError: too few repeats for any bound, or an argument is out of range.

    **Privacy.** Nothing is charged: the data are the auditor's own.
    """
    lower_bound = LowerBound(bound, delta, confidence, is_repeated=True)
    lower_bound.require_enough(positive_count(repeats, "repeats"))
    epsilon = _stated(epsilon, accountant, delta)
    included = draw_inclusion(repeats, generator_of(seed)).tolist()
    scores = np.array([np.asarray(release(is_in), float).item() for is_in in included])
    if np.isnan(scores).any():
        raise AuditError("release returned NaN: return 0 if neither guess is better")
    correct = int(((scores > 0) == included).sum())
    return _result(lower_bound, Guesses(repeats, repeats, correct), epsilon, accountant, threat)


def _stated(epsilon: float | None, accountant: PrivacyAccountant | None, delta: float) -> float:
    """The ε to compare with."""
    if accountant is None and epsilon is not None and 0 <= real(epsilon, "epsilon") < np.inf:
        return float(epsilon)
    if accountant is None or epsilon is not None:
        raise AuditError("pass either accountant= or epsilon= (at least 0)")
    if np.isinf(found := accountant.get_epsilon(delta)):
        raise AuditError("the accountant states no ε for this run, so none can be refuted")
    return found


def _result(
    lower_bound: LowerBound,
    guesses: Guesses,
    epsilon: float,
    accountant: PrivacyAccountant | None,
    threat: str,
) -> AuditResult:
    kind, delta, confidence = lower_bound.kind, lower_bound.delta, lower_bound.confidence
    neighboring = None if accountant is None else accountant.neighboring
    found, refutes = lower_bound(guesses), None
    if accountant is not None and kind != "basic":
        refutes = lower_bound.refutes(accountant.risk(prior=0.5, delta=delta), guesses)
    return AuditResult(
        found, epsilon, delta, confidence, threat, kind, guesses, neighboring, refutes
    )
