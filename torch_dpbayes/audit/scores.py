"""How much a canary looks as if it were in the data, and which coins are guessed from that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from ..errors import AuditError
from .bounds import Array, Guesses
from .coin import Coins

_BATCH = 256
_LEAST_VARIANCE = 0.01


def guess(scores: Array, coins: Coins, made: int) -> Guesses:
    """Half of the guesses say "in", of the highest scores, half say "out", of the lowest."""
    order = np.argsort(scores, kind="stable")
    low, high = order[: made // 2], order[len(order) - (made - made // 2) :]
    return Guesses(len(coins), made, int((~coins[low]).sum() + coins[high].sum()))


def log_ratio(seen: Array, noise_multiplier: Array, sample_rate: float) -> Array:
    """log p(seen | in) − log p(seen | out), where a canary that is in moves a Gaussian of std
    ``noise_multiplier`` by 1 with probability ``sample_rate``.
    """
    joined = (seen - 0.5) / noise_multiplier**2
    if sample_rate == 1:
        return joined
    ratio: Array = np.logaddexp(np.log1p(-sample_rate), np.log(sample_rate) + joined)
    return ratio


def weighted_difference(seen: Array) -> Array:
    """What two releases say against each other of canaries, each of which moves it by 2 if it is
    in, divided by the variance of its noise, as it is seen: a coin has variance 1. Noise that both
    releases share is not in it.
    """
    return seen / max(float(np.var(seen)) - 1.0, _LEAST_VARIANCE)


@torch.no_grad()
def minus_loss(
    model: nn.Module, records: Sequence[Any], loss: Callable[[Any, Any], Tensor]
) -> Array:
    """−loss of every record ``(input, target)`` under the trained model: a record that was
    trained on has less of it.
    """
    was_training = model.training
    model.eval()
    try:
        found = []
        device = next(model.parameters()).device
        for start in range(0, len(records), _BATCH):
            inputs, targets = default_collate(list(records[start : start + _BATCH]))
            outputs, targets = model(inputs.to(device)), targets.to(device)
            found += [-float(loss(o[None], t[None])) for o, t in zip(outputs, targets, strict=True)]
    finally:
        model.train(was_training)
    return np.array(found)


def require_finite(
    model: nn.Module, records: Sequence[Any], loss: Callable[[Any, Any], Tensor]
) -> None:
    """Raise where the model fails on a record, or its loss is no number, before it is trained."""
    with suppress(Exception):  # where one of them fails, or its loss is no number: which one?
        if np.isfinite(minus_loss(model, records, loss)).all():
            return
    for i, record in enumerate(records):
        try:
            (found,) = minus_loss(model, [record], loss)
        except Exception as error:
            raise AuditError(
                f"the model or the loss fails on canary {i}: {error}. Make canaries that records"
                " could be."
            ) from error
        if not np.isfinite(found):
            raise AuditError(
                f"canary {i} has loss {-found} before training, so no score: make canaries of"
                " finite inputs and targets"
            )
