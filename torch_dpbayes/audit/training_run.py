"""One training run, many canaries: a lower bound on its ε."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..accounting.accountant import PrivacyAccountant
from ..errors import ArgumentTypeError, AuditError
from .audited_engine import AuditedEngine
from .bounds import Array, Guesses
from .canaries import GradientCanaries, WithPlaces, WithRecords
from .coin import Coins, auditor, toss
from .result import AuditResult, Pricing
from .scores import minus_loss, require_finite
from .transcripts import from_scores

Train = Callable[[Any, AuditedEngine], Any]
Loss = Callable[[Any, Any], Tensor]

_MANY = 2**15

_WHITE_BOX = (
    "white-box: canaries have gradients of norm C of their own, {scores} of every release are seen,"
    " and all other records are known; clipping in the model is not part of it"
)
_BLACK_BOX = (
    "black-box: canaries are records, of which the trained model's loss is seen, and nothing of the"
    " training"
)


def one_run(
    train: Train,
    dataset: Any,
    *,
    num_canaries: int,
    canaries: Sequence[Any] | None = None,
    loss: Loss | None = None,
    delta: float | None = None,
    confidence: float = 0.95,
    bound: str = "gaussian",
    num_guesses: int | None = None,
    scores: str = "sums",
    accountant: PrivacyAccountant | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
    seed: int | None = None,
) -> AuditResult:
    r"""Train once on data with canaries in it, and say what ε the run has at least.

    Each canary is in the data by the toss of a fair coin; what is released scores how much each of
    them looks as if it were; the coins of the most extreme scores are guessed, as many as are best
    at the ε that the accountant states. How many guesses are right bounds ε from below.

    Args:
        train: ``train(dataset, engine)``, your training: it calls ``engine.make_private`` or
            ``engine.make_private_with_epsilon`` once, takes its steps, and returns the model. Its
            loader reads ``dataset``, which is not quite yours.
        dataset: the records, in a map-style data set.
        num_canaries: m; thousands.
        canaries: None: gradients of norm C, each along a direction of its own in each step
            (white-box). m records: they join the data set, and the trained model's ``loss`` scores
            them (black-box); mislabelled ones show most.
        loss: of black-box canaries, ``(output, target) -> scalar`` for one record, as a batch of
            one; None: ``torch.nn.functional.cross_entropy``.
        delta: δ at which to compare; None: that of the accountant's budget.
        confidence: the probability that the bound is right.
        bound: ``"gaussian"``, ``"independent"`` or ``"basic"``, see :class:`AuditResult`;
            ``"independent"`` is for white-box canaries, and for batches that draw each record for
            itself, as full and Poisson batches do; with others it is refused.
        num_guesses: how many coins to guess; None: the best number at the stated ε.
        scores: of white-box canaries: ``"sums"``, or ``"differences"`` of consecutive releases,
            which tell noise that is used twice.
        accountant, process_group: of the engine that ``train`` gets, as for
            :class:`~torch_dpbayes.PrivacyEngine`.
        seed: of coins and directions; None: the operating system's entropy. They have a generator
            of their own, which shares nothing with those of the training.

    Returns:
        The bound, the stated ε, confidence, threat and guesses.

    Raises:
        ValueError: too few canaries for any bound, canaries that are none of this data set's kind,
            or on which the model fails, fewer records than canaries, no δ, a run without noise or
            without ``engine``, or a bound that its batches do not allow.

    **Privacy.** The result is computed from releases and from unprotected sums. Without canaries,
    it depends on no record: what others add is subtracted. A model that was trained with canaries
    is for the audit alone; in use it would carry them.
    """
    delta = delta_of(accountant, delta)
    pricing = Pricing(bound, delta, confidence)
    require_enough(num_canaries, pricing, None if accountant is None else accountant.epsilon)
    generator = auditor(seed)
    coins = toss(num_canaries, generator)
    found: Array
    if canaries is None:
        gradients, engine, threat = white_box(
            coins, generator, scores, pricing, accountant, process_group
        )
        finished(train, WithPlaces(dataset, num_canaries), engine)
        found = gradients.scores
    else:
        if bound == "independent":
            raise AuditError(
                'the losses of one model depend on each other\'s canaries: pass bound="gaussian"'
            )
        _require_alike(canaries, dataset, num_canaries)
        loss = loss or nn.functional.cross_entropy
        try_model = partial(require_finite, records=canaries, loss=loss)
        engine, threat = AuditedEngine(accountant, process_group, None, try_model), _BLACK_BOX
        trained = finished(train, WithRecords(dataset, canaries, coins), engine)
        if not isinstance(trained, nn.Module):
            raise ArgumentTypeError(
                f"train must return the trained model, whose losses score the canaries; it returned"
                f" {type(trained).__name__}"
            )
        found = minus_loss(trained, canaries, loss)
    return from_scores(
        found,
        coins,
        delta=delta,
        accountant=engine.accountant,
        confidence=confidence,
        bound=bound,
        num_guesses=num_guesses,
        threat=threat,
    )


def white_box(
    coins: Coins,
    generator: np.random.Generator,
    scores: str,
    pricing: Pricing,
    accountant: PrivacyAccountant | None,
    process_group: torch.distributed.ProcessGroup | None,
) -> tuple[GradientCanaries, AuditedEngine, str]:
    """Canaries that are gradients, the engine that lets them in, and who sees them."""
    gradients = GradientCanaries(coins, generator, scores, are_apart=pricing.bound == "independent")
    engine = AuditedEngine(accountant, process_group, gradients)
    return gradients, engine, _WHITE_BOX.format(scores=scores)


def finished(train: Train, dataset: Any, engine: AuditedEngine) -> Any:
    """What ``train`` returns, after private steps."""
    trained = train(dataset, engine)
    if not engine.is_used or len(engine.accountant) == 0:
        raise AuditError(
            "train took no private step with the engine that it was given: call"
            " engine.make_private, and step"
        )
    return trained


def delta_of(accountant: PrivacyAccountant | None, delta: float | None) -> float:
    if delta is not None:
        return float(delta)
    if accountant is None or accountant.delta is None:
        raise AuditError("no accountant with a budget says at which δ to compare: pass delta=1e-5")
    return accountant.delta


def require_enough(canaries: int, pricing: Pricing, epsilon: float | None) -> None:
    """Raise where no guesses, or none that the budget allows, give a bound."""
    if isinstance(canaries, bool) or not isinstance(canaries, int) or canaries < 1:
        raise AuditError(f"num_canaries must be a positive integer, got {canaries!r}")

    def gives(number: int) -> bool:
        if epsilon is not None:
            return pricing.expected(number, epsilon) > 0
        return pricing(Guesses(number, number, number)) > 0

    if gives(canaries):
        return
    enough = 2 * canaries
    while enough < _MANY and not gives(enough):
        enough *= 2
    what = f"num_canaries={enough}" if enough < _MANY else f"more than {_MANY}"
    raise AuditError(
        f"{canaries} canaries give no lower bound at {pricing.confidence:.0%} confidence"
        f"{'' if epsilon is None else f' and epsilon = {epsilon:g}'}: use {what}"
    )


def _require_alike(canaries: Sequence[Any], dataset: Any, number: int) -> None:
    if len(canaries) != number:
        raise AuditError(f"num_canaries = {number}, but there are {len(canaries)} canaries")
    if len(dataset) < number:
        raise AuditError(
            f"{len(dataset)} records cannot hide {number} canaries, which would make most of the"
            f" training: use {len(dataset)} canaries at most"
        )
    kind = _kind(dataset[0])
    for i, canary in enumerate(canaries):
        if _kind(canary) != kind:
            raise AuditError(
                f"canary {i} is none of this data set's records: it has {_kind(canary)}, they have"
                f" {kind}"
            )


def _kind(record: Any) -> Any:
    """Types and shapes."""
    if isinstance(record, Tensor):
        return (tuple(record.shape), str(record.dtype).removeprefix("torch."))
    if isinstance(record, (tuple, list)):
        return tuple(_kind(part) for part in record)
    if isinstance(record, dict):
        return {name: _kind(part) for name, part in record.items()}
    return type(record).__name__
