"""Audits of any release: from scores of canaries, and from releases that are cheap to repeat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .bounds import Guesses
from .coin import auditor, toss
from .result import AuditResult, Pricing
from .scores import guess


def from_scores(
    scores: Any,
    coins: Any,
    *,
    epsilon: float,
    delta: float,
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
        epsilon: what is stated at ``delta``.
        delta: δ.
        confidence: the probability that the bound is right.
        bound: ``"gaussian"`` or ``"basic"``, see :class:`AuditResult`.
        num_guesses: how many coins to guess, chosen before the scores were seen; None: the best
            number at ``epsilon``.
        threat: who was simulated, for the report.
        neighboring: the relation that ``epsilon`` is for.

    Raises:
        ValueError: scores and coins do not belong together, or an argument is out of range.
    """
    found, tossed = np.asarray(scores, dtype=float), np.asarray(coins)
    if found.ndim != 1 or found.shape != tossed.shape or tossed.dtype != bool:
        raise ValueError(
            "scores and coins are vectors of one length, the coins of bool; got shapes"
            f" {found.shape} and {tossed.shape}, {tossed.dtype}"
        )
    if np.isnan(found).any():
        raise ValueError("a score is not a number: leave the canary undecided with score 0")
    pricing = Pricing(bound, delta, confidence)
    # by public numbers: neither scores nor coins decide it
    made = num_guesses if num_guesses is not None else pricing.best_number(len(found), epsilon)
    if not 1 <= made <= len(found):
        raise ValueError(f"num_guesses must be from 1 to {len(found)}, got {made}")
    guesses = guess(found, tossed, made)
    return AuditResult(
        pricing(guesses), epsilon, delta, confidence, threat, bound, guesses, neighboring
    )


def repeated(
    release: Callable[[bool], float],
    *,
    epsilon: float,
    delta: float,
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
        epsilon: what is stated at ``delta`` for one release.
        delta: δ.
        repeats: how many releases are made, each with noise of its own.
        confidence: the probability that the bound is right.
        bound: ``"gaussian"`` or ``"basic"``, see :class:`AuditResult`.
        threat: who was simulated, for the report.
        neighboring: the relation of the two data sets.
        seed: of the coins; None: the operating system's entropy.

    Raises:
        ValueError: too few repeats for any bound, or an argument is out of range.
    """
    pricing = Pricing(bound, delta, confidence, is_independent=True)
    enough = int(np.ceil(np.log(1 - confidence) / np.log(0.5))) + 1
    if repeats < enough:
        raise ValueError(
            f"{repeats} repeats give no lower bound at {confidence:.0%} confidence: use at least"
            f" {enough}, and hundreds for a useful one"
        )
    coins = toss(repeats, auditor(seed))
    correct = sum((release(bool(coin)) > 0) == bool(coin) for coin in coins)
    guesses = Guesses(repeats, repeats, int(correct))
    return AuditResult(
        pricing(guesses), epsilon, delta, confidence, threat, bound, guesses, neighboring
    )
