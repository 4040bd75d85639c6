"""Audits of any release: from scores of canaries, and from releases that are cheap to repeat."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from dp_accounting.dp_event import TruncatedSubsampledGaussianDpEvent

from ..accounting.accountant import PrivacyAccountant
from ..accounting.events import SampledWithoutReplacementDpEvent
from ..accounting.random_allocation import RandomAllocationDpEvent
from ..errors import AuditError
from .bounds import Guesses
from .coin import auditor, toss
from .result import AuditResult, Pricing
from .scores import guess

_DRAWN_TOGETHER = (
    RandomAllocationDpEvent,
    SampledWithoutReplacementDpEvent,
    TruncatedSubsampledGaussianDpEvent,
)


def from_scores(
    scores: Any,
    coins: Any,
    *,
    delta: float,
    epsilon: float | None = None,
    accountant: PrivacyAccountant | None = None,
    confidence: float = 0.95,
    bound: str = "gaussian",
    num_guesses: int | None = None,
    threat: str = "scores of the caller's",
    neighboring: str = "add_or_remove_one",
) -> AuditResult:
    """What scores of canaries say about the release that they were made from.

    Scores of several releases on the same canaries add up, those of all that a ledger holds too.

    Args:
        scores: one for each canary; higher where it looks more as if it were in the data.
        coins: whether it was: independent fair coins, tossed before.
        delta: δ.
        epsilon: what is stated at ``delta``. Without an accountant, ``is_refuted`` compares it with
            the bound, which for any but ``"basic"`` is right where what was released is Gaussian:
            randomised response and draws of bounded range reveal more of a coin at the same ε.
        accountant: that states it for the release, by its whole trade-off curve.
        confidence: the probability that the bound is right.
        bound: ``"gaussian"``, ``"independent"`` or ``"basic"``, see :class:`AuditResult`.
            ``"independent"`` is right only where what is seen of a canary depends on no other
            one's coin, nor on noise that another one shares; it is refused for an ``accountant``
            that was charged batches which are neither full nor Poisson draws.
        num_guesses: how many coins to guess, chosen before the scores were seen; None: the best
            number at ``epsilon``, or all of them for ``"independent"``.
        threat: who was simulated, for the report.
        neighboring: the relation that ``epsilon`` is for, or that of the accountant.

    Raises:
        ValueError: scores and coins do not belong together, or an argument is out of range.
    """
    found, tossed = np.asarray(scores, dtype=float), np.asarray(coins)
    if found.ndim != 1 or found.shape != tossed.shape or tossed.dtype != bool:
        raise AuditError(
            "scores and coins are vectors of one length, the coins of bool; got shapes"
            f" {found.shape} and {tossed.shape}, {tossed.dtype}"
        )
    if np.isnan(found).any():
        raise AuditError("a score is not a number: leave the canary undecided with score 0")
    pricing = Pricing(bound, delta, confidence)
    if bound == "independent" and accountant is not None:
        _require_apart(accountant)
    epsilon = stated(epsilon, accountant, delta)
    # by public numbers: neither scores nor coins decide it
    made = num_guesses if num_guesses is not None else pricing.best_number(len(found), epsilon)
    if not 1 <= made <= len(found):
        raise AuditError(f"num_guesses must be from 1 to {len(found)}, got {made}")
    if bound == "independent" and made != len(found):
        raise AuditError(
            'bound="independent" is for guesses on all canaries: leave num_guesses out, or pass'
            ' bound="gaussian"'
        )
    return _result(pricing, guess(found, tossed, made), epsilon, accountant, threat, neighboring)


def repeated(
    release: Callable[[bool], float],
    *,
    delta: float,
    epsilon: float | None = None,
    accountant: PrivacyAccountant | None = None,
    repeats: int = 1000,
    confidence: float = 0.95,
    bound: str = "gaussian",
    threat: str = "many releases on worst-case data, each with its likelihood ratio",
    neighboring: str = "add_or_remove_one",
    seed: int | None = None,
) -> AuditResult:
    """Make a release many times, each with or without one record by the toss of a fair coin, and
    guess each coin.

    Where a release is cheap and its density known, this shows more than one run can: guesses are
    independent, and the likelihood ratio guesses best.

    Args:
        release: ``release(is_in)`` makes it on data with or without the record, and returns
            log p(release | in) − log p(release | out), or another number that is positive where
            "in" is the better guess.
        delta: δ.
        epsilon: what is stated at ``delta`` for one release, as for :func:`from_scores`.
        accountant: that was charged one release, and no more.
        repeats: how many releases are made, each with noise of its own.
        confidence: the probability that the bound is right.
        bound: ``"gaussian"`` or ``"basic"``, see :class:`AuditResult`.
        threat: who was simulated, for the report.
        neighboring: the relation of the two data sets, or that of the accountant.
        seed: of the coins; None: the operating system's entropy.

    Raises:
        ValueError: too few repeats for any bound, or an argument is out of range.
    """
    pricing = Pricing(bound, delta, confidence, is_independent=True)
    enough = int(np.ceil(np.log(1 - confidence) / np.log(0.5))) + 1
    if repeats < enough:
        raise AuditError(
            f"{repeats} repeats give no lower bound at {confidence:.0%} confidence: use at least"
            f" {enough}, and hundreds for a useful one"
        )
    epsilon = stated(epsilon, accountant, delta)
    coins = toss(repeats, auditor(seed))
    correct = sum((release(bool(coin)) > 0) == bool(coin) for coin in coins)
    guesses = Guesses(repeats, repeats, int(correct))
    return _result(pricing, guesses, epsilon, accountant, threat, neighboring)


def _require_apart(accountant: PrivacyAccountant) -> None:
    for charge in accountant.history:
        if isinstance(charge.event, _DRAWN_TOGETHER):
            raise AuditError(
                'bound="independent" is for full and Poisson batches, and the accountant was'
                f' charged a {type(charge.event).__name__}: pass bound="gaussian"'
            )


def stated(epsilon: float | None, accountant: PrivacyAccountant | None, delta: float) -> float:
    """The ε to compare with."""
    if accountant is None and epsilon is not None:
        return epsilon
    if accountant is None or epsilon is not None:
        raise AuditError("state what was charged, once: pass accountant=, or epsilon=")
    found = accountant.get_epsilon(delta)
    if math.isinf(found):
        raise AuditError("the accountant states no ε for this run, so none can be refuted")
    return found


def _result(
    pricing: Pricing,
    guesses: Guesses,
    epsilon: float,
    accountant: PrivacyAccountant | None,
    threat: str,
    neighboring: str,
) -> AuditResult:
    return AuditResult(
        epsilon_lower_bound=pricing(guesses),
        epsilon=epsilon,
        delta=pricing.delta,
        confidence=pricing.confidence,
        threat=threat,
        bound=pricing.bound,
        guesses=guesses,
        neighboring=neighboring if accountant is None else accountant.neighboring,
        refutes_curve=(
            None
            if accountant is None or pricing.bound == "basic"
            else pricing.refutes(accountant, guesses)
        ),
    )
