"""Lower bounds on what a mechanism reveals, from how many guesses about its input were right.

Each of m canaries is in the data by the toss of a fair coin. Somebody who sees the mechanism's
output guesses r of the coins, and v of the guesses are right. What a private mechanism allows for v
is known, also where one output serves all the guesses, which therefore depend on each other:

* (ε, δ): Steinke, Nasr and Jagielski 2023, Theorem 5.2. With W ~ Binomial(r, e^ε/(1+e^ε))::

      P(V ≥ v) ≤ P(W ≥ v) + 2mδ·max_{1≤i≤v} P(v > W ≥ v − i)/i

* a trade-off curve f: Mahloujifar, Melis and Chaudhuri 2025, Algorithm 3. With p_n = P(V = n),
  R_j = Σ_{n≥j} n·p_n/m and H_j = Σ_{n≥j} (r − n)·p_n/m, a coin that is tossed again turns right
  guesses into wrong ones, so that R_j ≤ f̄(H_{j−1}), f̄ = 1 − f, for every j. If P(V ≥ v) were τ,
  R_v + H_v would be τr/m; the least R and H that this leaves for v − 1, …, 0 add up to more than
  R_0 + H_0 = r/m where τ is too large.

* a trade-off curve, for releases that show each canary apart: what is seen of one depends on no
  other one's coin, nor on noise that another one shares. Given all that is seen, the coins are
  independent then, so that m guesses on m canaries, by whatever rule, are right no more often than
  m independent ones that are right with probability Φ(μ/2) each. Noise drawn for each parameter and
  canaries along parameters of their own are of this kind; losses of one model are not.

A hypothesis that makes this many right guesses less probable than 1 − confidence is refuted. The
lower bound is the strongest hypothesis that is not. m and r are fixed before anything is scored.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import optimize, special, stats

from ..accounting.risk import TradeOff

Array = npt.NDArray[np.float64]
Refuted = npt.NDArray[np.bool_]

_LARGEST = 40.0  # no number of canaries that fits into a computer supports a larger ε or μ
_POINTS = 41  # hypotheses that are tried at a time
_ACCURACY = 1e-4


class Guesses(NamedTuple):
    """How the guesses went.

    Attributes:
        canaries: m, records whose coin was tossed.
        made: r, coins that were guessed; nothing was said about the others.
        correct: v, guesses that were right.
    """

    canaries: int
    made: int
    correct: int


class Curves(ABC):
    """Trade-off curves f, one for each entry of an array of hypotheses."""

    @abstractmethod
    def least(self, right: Array) -> Array:
        """f̄⁻¹: what is ``right`` with this probability under one data set is wrong with at least
        that probability under its neighbour.
        """


class GaussianCurves(Curves):
    """f(x) = Φ(Φ⁻¹(1 − x) − μ): a Gaussian of sensitivity μ and std 1.

    Args:
        mu: one for each hypothesis.
    """

    def __init__(self, mu: Array) -> None:
        self._mu = mu

    def least(self, right: Array) -> Array:
        wrong: Array = special.ndtr(special.ndtri(np.minimum(right, 1.0)) - self._mu)
        return wrong


class StatedCurve(Curves):
    """One hypothesis: what an attack on either of two neighbours can do at most.

    Args:
        curves: upper bounds on its true-positive rate at each false-positive rate.
    """

    def __init__(self, curves: Sequence[TradeOff]) -> None:
        self._vertices = []
        for curve in curves:
            rates, powers = curve.vertices
            rising = np.append(True, np.diff(powers) > 0)  # from 1 on it says nothing
            self._vertices.append((powers[rising], rates[rising]))

    def least(self, right: Array) -> Array:
        right = np.minimum(right, 1.0)
        wrong: Array = np.min([np.interp(right, *inverse) for inverse in self._vertices], axis=0)
        return wrong


def refuted(curves: Curves, guesses: Guesses, confidence: float) -> Refuted:
    """Which of the curves make this many right guesses less probable than 1 − confidence."""
    canaries, made, correct = guesses
    right = np.array([(1 - confidence) * correct / canaries])
    wrong = np.array([(1 - confidence) * (made - correct) / canaries])
    for n in range(correct - 1, -1, -1):
        more = np.maximum(curves.least(right) - wrong, 0.0)
        wrong = wrong + more
        right = right + n / (made - n) * more
    result: Refuted = right + wrong > made / canaries
    return result


def independent_refuted(best_guess: float, guesses: Guesses, confidence: float) -> bool:
    """The same for independent guesses, none of them left out, each of which is right with
    probability ``best_guess`` at most.
    """
    return _least_accuracy(guesses, confidence) > best_guess


def epsilon_lower_bound(guesses: Guesses, delta: float, confidence: float = 0.95) -> float:
    """The least ε at which a mechanism that keeps (ε, δ) allows this many right guesses.

    Source: Steinke, Nasr and Jagielski 2023, Theorem 5.2.
    """
    canaries, made, correct = guesses

    def is_refuted(epsilons: Array) -> Refuted:
        accuracy = special.expit(epsilons)[:, None]
        tail = stats.binom.sf(correct - 1, made, accuracy[:, 0])
        fewer = np.arange(1, correct + 1)
        below = np.cumsum(stats.binom.pmf(correct - fewer, made, accuracy), axis=1) / fewer
        worst = below.max(axis=1, initial=0.0)
        result: Refuted = tail + 2 * canaries * delta * worst < 1 - confidence
        return result

    return _least_that_stands(is_refuted)


def mu_lower_bound(guesses: Guesses, confidence: float = 0.95) -> float:
    """The least μ at which a mechanism no less private than a Gaussian of sensitivity μ and std
    1 allows this many right guesses.

    Source: Mahloujifar, Melis and Chaudhuri 2025, Algorithm 3, for Gaussian trade-off curves.
    """
    return _least_that_stands(lambda mu: refuted(GaussianCurves(mu), guesses, confidence))


def independent_epsilon_lower_bound(
    guesses: Guesses, delta: float, confidence: float = 0.95
) -> float:
    """The same from independent guesses, none of them left out: each is right with
    probability (e^ε + δ)/(e^ε + 1) at most, whose exact interval is that of Clopper and Pearson.
    """
    least = _least_accuracy(guesses, confidence)
    return 0.0 if least - delta <= 1 - least else math.log((least - delta) / (1 - least))


def independent_mu_lower_bound(guesses: Guesses, confidence: float = 0.95) -> float:
    """The same for μ: each is right with probability Φ(μ/2) at most."""
    return max(0.0, 2 * float(special.ndtri(_least_accuracy(guesses, confidence))))


def _least_accuracy(guesses: Guesses, confidence: float) -> float:
    _, made, correct = guesses
    return (
        float(special.betaincinv(correct, made - correct + 1, 1 - confidence)) if correct else 0.0
    )


def _least_that_stands(is_refuted: Callable[[Array], Refuted]) -> float:
    """A hypothesis of which the lesser ones are refuted, the next not."""
    low, high = 0.0, _LARGEST
    while high - low > _ACCURACY:
        tried = np.linspace(low, high, _POINTS)
        stands = ~np.broadcast_to(is_refuted(tried), tried.shape)
        if not stands.any():
            return high
        first = int(stands.argmax())
        if first == 0:
            return float(low)
        low, high = tried[first - 1], tried[first]
    return float(low)


# -- how many guesses to make ----------------------------------------------------------------------


def expected_guesses(canaries: int, made: int, mu: float) -> Guesses:
    """How guesses go on scores N(±μ/2, 1) if the extreme ones are guessed, half of them high."""
    if made == canaries:
        threshold = 0.0
    else:
        threshold = optimize.brentq(
            lambda t: float(special.ndtr(mu / 2 - t) + special.ndtr(-mu / 2 - t)) - made / canaries,
            0.0,
            mu / 2 + 40.0,
        )
    accuracy = float(special.ndtr(mu / 2 - threshold)) * canaries / made
    return Guesses(canaries, made, min(made, int(made * accuracy)))


def best_number(canaries: int, mu: float, bound: Callable[[Guesses], float]) -> int:
    """How many guesses give the largest bound where a canary is as visible as under a Gaussian of
    sensitivity μ and std 1; even.
    """
    shares = 2.0 ** -np.arange(0.0, 8.0, 0.5)
    numbers = sorted({max(2, 2 * round(canaries * share / 2)) for share in shares})
    numbers = [number for number in numbers if number <= canaries]
    bounds = [bound(expected_guesses(canaries, number, mu)) for number in numbers]
    return numbers[int(np.argmax(bounds))]
