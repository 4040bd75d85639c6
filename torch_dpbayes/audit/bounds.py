"""Lower bounds on what a mechanism reveals, from the number of right guesses about its input.

Each of m canaries is in the data with probability 1/2, independently. An attacker sees the output
and guesses r of these inclusions; v are right. Privacy limits v, even if all guesses use one output
and depend on each other:

* (ε, δ): Steinke, Nasr and Jagielski 2023, Theorem 5.2. With W ~ Binomial(r, e^ε/(1+e^ε))::

      P(V ≥ v) ≤ P(W ≥ v) + 2mδ·max_{1≤i≤v} P(v > W ≥ v − i)/i

* a trade-off curve f: Mahloujifar, Melis and Chaudhuri 2025, Algorithm 3. Let p_n = P(V = n),
  R_j = Σ_{n≥j} n·p_n/m and H_j = Σ_{n≥j} (r − n)·p_n/m. Drawing one inclusion again turns right
  guesses into wrong ones, so R_j ≤ f̄(H_{j−1}) for every j, with f̄ = 1 − f. If P(V ≥ v) is τ, then
  R_v + H_v = τr/m, and this gives the least possible R and H for v − 1, …, 0. If τ is too large,
  they add up to more than R_0 + H_0 = r/m.

* a trade-off curve, for releases that show each canary separately: the view of one canary depends
  neither on the inclusion of another one nor on shared noise. This holds for coordinates of a
  vector with independent noise, not for losses of one model. Given the output, the inclusions are
  then independent. So m guesses on m canaries, by any rule, are right no more often than m
  independent guesses that are each right with probability Φ(μ/2).

A hypothesis is refuted if it makes v or more right guesses less probable than 1 − confidence. The
lower bound is the strongest hypothesis that is not refuted. m and r are fixed before scoring.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import optimize, special, stats

from ..accounting import Risk
from ..accounting.events import real
from ..accounting.gdp import gaussian_epsilon, gaussian_mu
from ..errors import AuditError

Array = npt.NDArray[np.float64]
Refuted = npt.NDArray[np.bool_]  # one for each hypothesis
# f̄⁻¹: a test that is right with the given probability under one data set is wrong with at least the
# returned probability under its neighbour; for one or several hypotheses
Inverse = Callable[[Array], Array]

_LARGEST_HYPOTHESIS = 40.0  # ε or μ; a larger one needs e^40 right guesses. Φ(−40) is 0
_HYPOTHESES = 41  # hypotheses that are tested at the same time
_ACCURACY = 1e-4  # of a bound on ε or μ
_LARGEST_EPSILON, _SMALLEST_DELTA = 50.0, 1e-12  # limits for planning the number of guesses


class Guesses(NamedTuple):
    """The outcome of guesses: m canaries, r guesses ``made``, v of them ``correct``."""

    canaries: int
    made: int
    correct: int


def gaussian_inverse(mu: Array) -> Inverse:
    """Inverse of the trade-off f(x) = Φ(Φ⁻¹(1 − x) − μ) of a Gaussian mechanism with sensitivity μ
    and standard deviation 1.
    """
    return lambda right: np.asarray(special.ndtr(special.ndtri(np.minimum(right, 1.0)) - mu))


def stated_inverse(risk: Risk) -> Inverse:
    """Inverse of the accountant's trade-off curve, for the better of its two attacks."""
    inverses = []
    for curve in risk.curves:
        rates, powers = curve.vertices
        rising = np.append(True, np.diff(powers) > 0)  # a flat end has no inverse
        inverses.append((powers[rising], rates[rising]))
    return lambda right: np.min([np.interp(np.minimum(right, 1.0), *i) for i in inverses], axis=0)


def refuted(inverse: Inverse, guesses: Guesses, confidence: float) -> Refuted:
    """Whether each curve makes this many right guesses less probable than 1 − confidence."""
    canaries, made, correct = guesses
    right = np.array([(1 - confidence) * correct / canaries])
    wrong = np.array([(1 - confidence) * (made - correct) / canaries])
    for n in range(correct - 1, -1, -1):
        more = np.maximum(inverse(right) - wrong, 0.0)
        wrong = wrong + more
        right = right + n / (made - n) * more
    return np.asarray(right + wrong > made / canaries)


def epsilon_lower_bound(guesses: Guesses, delta: float, confidence: float = 0.95) -> float:
    """The least ε that allows so many right guesses (Steinke et al. 2023)."""
    canaries, made, correct = guesses
    fewer = np.arange(1, correct + 1)

    def is_refuted(epsilons: Array) -> Refuted:
        accuracy = special.expit(epsilons)[:, None]
        tail = stats.binom.sf(correct - 1, made, accuracy[:, 0])
        below = np.cumsum(stats.binom.pmf(correct - fewer, made, accuracy), axis=1)
        worst = (below / fewer).max(axis=1, initial=0.0)
        return np.asarray(tail + 2 * canaries * delta * worst < 1 - confidence)

    return _least_that_stands(is_refuted)


def mu_lower_bound(guesses: Guesses, confidence: float = 0.95) -> float:
    """The least μ of Gaussian privacy that allows this (Mahloujifar and others 2025)."""
    return _least_that_stands(lambda mu: refuted(gaussian_inverse(mu), guesses, confidence))


def independent_epsilon_lower_bound(guesses: Guesses, delta: float, confidence: float) -> float:
    """The same for independent guesses: right with probability ≤ (e^ε + δ)/(e^ε + 1) each."""
    least = _least_accuracy(guesses, confidence)
    return 0.0 if least - delta <= 1 - least else math.log((least - delta) / (1 - least))


def independent_mu_lower_bound(guesses: Guesses, confidence: float = 0.95) -> float:
    """The same for μ: each guess is right with probability at most Φ(μ/2)."""
    return max(0.0, 2 * float(special.ndtri(_least_accuracy(guesses, confidence))))


def _least_accuracy(guesses: Guesses, confidence: float) -> float:
    """Lower bound on the accuracy, by the exact interval of Clopper and Pearson."""
    wrong = guesses.made - guesses.correct
    least = special.betaincinv(guesses.correct, wrong + 1, 1 - confidence)
    return float(least) if guesses.correct else 0.0


def _least_that_stands(is_refuted: Callable[[Array], Refuted]) -> float:
    """The least hypothesis that is not refuted, rounded down by at most the accuracy."""
    low, high = 0.0, _LARGEST_HYPOTHESIS
    while high - low > _ACCURACY:
        tested = np.linspace(low, high, _HYPOTHESES)
        stands = ~np.broadcast_to(is_refuted(tested), tested.shape)
        if not stands.any():
            return high
        first = int(stands.argmax())
        if first == 0:
            return float(low)
        low, high = tested[first - 1], tested[first]
    return float(low)


def expected_guesses(canaries: int, made: int, mu: float) -> Guesses:
    """Expected guesses on the most extreme scores of N(±μ/2, 1), half of them high."""
    threshold = 0.0
    if made < canaries:
        threshold = optimize.brentq(
            lambda t: float(special.ndtr(mu / 2 - t) + special.ndtr(-mu / 2 - t)) - made / canaries,
            0.0,
            mu / 2 + _LARGEST_HYPOTHESIS,
        )
    accuracy = float(special.ndtr(mu / 2 - threshold)) * canaries / made
    return Guesses(canaries, made, min(made, int(made * accuracy)))


@dataclass(frozen=True)
class LowerBound:
    """Compute a lower bound on ε at δ from guesses; ``is_repeated``: there is one release for each
    guess.
    """

    kind: str
    delta: float
    confidence: float
    is_repeated: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("gaussian", "independent", "basic"):
            raise AuditError(f'bound: use "gaussian", "independent" or "basic", not {self.kind!r}')
        delta, confidence = real(self.delta, "delta"), real(self.confidence, "confidence")
        if not 0 <= delta < 1 or not 0.5 <= confidence < 1:
            raise AuditError(
                "delta and confidence must be below 1, and confidence at least 0.5; got"
                f" {delta} and {confidence}"
            )
        if self.kind != "basic" and delta == 0:
            raise AuditError('a Gaussian\'s ε is infinite at delta=0: pass bound="basic"')

    def __call__(self, guesses: Guesses) -> float:
        is_independent = self.is_repeated or self.kind == "independent"
        if self.kind == "basic":
            bound = independent_epsilon_lower_bound if is_independent else epsilon_lower_bound
            return bound(guesses, self.delta, self.confidence)
        of_mu = independent_mu_lower_bound if is_independent else mu_lower_bound
        mu = of_mu(guesses, self.confidence)
        return gaussian_epsilon(mu, self.delta) if mu > 0 else 0.0

    def refutes(self, risk: Risk, guesses: Guesses) -> bool:
        """Whether the trade-off curves of ``risk``, which has prior 1/2, make this many right
        guesses less probable than 1 − confidence.
        """
        if self.is_repeated or self.kind == "independent":
            return _least_accuracy(guesses, self.confidence) > risk.best_guess
        return bool(refuted(stated_inverse(risk), guesses, self.confidence).all())

    def best_guesses(self, canaries: int, epsilon: float) -> Guesses:
        """Expected guesses on a Gaussian release of ε, in the number with the largest bound."""
        mu = gaussian_mu(min(epsilon, _LARGEST_EPSILON), max(self.delta, _SMALLEST_DELTA))
        if self.kind == "independent":  # it needs guesses on all canaries
            return expected_guesses(canaries, canaries, mu)
        shares = 2.0 ** -np.arange(0.0, 8.0, 0.5)  # of the canaries
        numbers = sorted({min(canaries, max(2, 2 * round(canaries * s / 2))) for s in shares})
        return max((expected_guesses(canaries, number, mu) for number in numbers), key=self)

    def require_enough(self, canaries: int, epsilon: float | None = None) -> None:
        """Raise if right guesses on all canaries, or those expected at ε, give no bound."""
        guesses, where = Guesses(canaries, canaries, canaries), ""
        if epsilon is not None:
            guesses, where = self.best_guesses(canaries, epsilon), f" and epsilon = {epsilon:g}"
        if self(guesses) == 0:
            raise AuditError(
                f"{canaries} guesses give no lower bound at {self.confidence:.0%} confidence"
                f"{where}: use hundreds or thousands, or audit a larger epsilon"
            )
