"""A lower bound on the ε of one training run, from many canaries."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, default_collate

from ..accounting import PrivacyAccountant
from ..batches.poisson_loader import PoissonLoader
from ..engine.privacy_engine import PrivacyEngine
from ..errors import ArgumentTypeError, AuditError
from ..optim.base import PrivateOptimizer
from ..per_sample.gradient_source import GradientSource
from ..release import Layout
from .bounds import Array, LowerBound
from .transcripts import AuditResult, Inclusion, draw_inclusion, from_scores, generator_of

_WHITE_BOX = (
    "white-box: canaries are gradients of norm C, all else is known; clipping is not tested"
)
_BLACK_BOX = "black-box: canaries are records; the attacker sees only the trained model's loss"


class Slot(int):
    """The item at a canary's position in the data set; the sampler draws slots like records."""


class _WithoutSlots:
    """A collate function that removes slots from the batch and remembers them."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any]) -> None:
        self.wrapped_collator_fn, self.slots = collate_fn, np.array([], dtype=np.intp)

    def __call__(self, records: list[Any]) -> Any:
        self.slots = np.array([r for r in records if isinstance(r, Slot)], dtype=np.intp)
        return self.wrapped_collator_fn([r for r in records if not isinstance(r, Slot)])


class GradientCanaries:
    """Canaries of one training. In each step, each has a gradient ±C along a parameter that no
    other canary uses in this step.

    If a canary is ``included`` and its slot is in the batch, its gradient is added to the sum of
    clipped gradients. The attacker sees the releases and knows all other records, so their part of
    a sum is subtracted. The directions come from the auditor's ``generator``. ``scores`` contains
    log p(releases | in) − log p(releases | out) for each canary.
    """

    def __init__(
        self,
        included: Inclusion,
        generator: np.random.Generator,
        optimizer: PrivateOptimizer,
        loader: PoissonLoader,
    ) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._size = sum(p.numel() for p in parameters if p.requires_grad)
        if self._size < len(included) or loader.num_workers > 0:
            raise AuditError(
                f"the model has {self._size} parameters: {len(included)} gradient canaries need at"
                " least as many parameters, and a DataLoader with num_workers=0"
            )
        self._included, self._generator = included, generator
        self._batch_size, self._bound = optimizer.expected_batch_size, optimizer.max_grad_norm
        self._rate, self._draws = loader.sample_rate, loader.sampler_of_draws
        outer: Any = loader.collate_fn
        inner = outer.wrapped_collator_fn = self._collate = _WithoutSlots(outer.wrapped_collator_fn)
        if (deliver := self._draws.delivery) is not None:
            self._draws.delivery = lambda batch, drawn: deliver(batch, drawn - len(inner.slots))
        self._query = query = optimizer.release.query
        self._collect_records, vars(query)["collect"] = query.collect, self._collect
        optimizer.release.watch = self._score
        self.scores: Array = np.zeros(len(included))
        self._draw = -1

    def _collect(self, source: GradientSource, layout: Layout) -> int:
        """Add the gradients of the records and canaries in this batch or part of a batch. Returns
        the number of records and slots.
        """
        records = self._collect_records(source, layout)
        if getattr(self._query, "scale", None) is not None:
            raise AuditError("an audit has no sensitivity_scale: leave it out while auditing")
        if self._draws.draw != self._draw:  # a new batch: drop the canaries of a failed step
            self._draw, self._own = self._draws.draw, torch.zeros_like(layout.gradient)
            self._along = self._generator.choice(self._size, len(self._included), replace=False)
            self._signs: Array = self._generator.choice([-1.0, 1.0], len(self._included))
        self._others = layout.gradient - self._own
        joined = self._collate.slots[self._included[self._collate.slots]]
        added = torch.zeros_like(layout.gradient)
        added[self._along[joined]] = torch.as_tensor(self._bound * self._signs[joined]).to(added)
        self._own += added
        layout.gradient.add_(added)
        return records + len(self._collate.slots)

    def _score(self, layout: Layout) -> None:
        """Add the log likelihood ratios of the release in ``layout``. An included canary moves its
        Gaussian of standard deviation z by 1 with probability q.
        """
        if min(group.noise_multiplier for group in layout.groups) == 0:
            raise AuditError("the run has no noise, so its ε is infinite and cannot be refuted")
        total = (layout.gradient * self._batch_size - self._others) / self._bound
        seen = total.cpu().double().numpy()[self._along] * self._signs
        z = np.concatenate([np.full(len(g.gradient), g.noise_multiplier) for g in layout.groups])
        joined = np.log(self._rate) + (seen - 0.5) / z[self._along] ** 2
        absent = math.log1p(-self._rate) if self._rate < 1 else -math.inf
        self.scores += np.logaddexp(absent, joined)


class AuditedEngine(PrivacyEngine):
    """An engine that calls ``attach`` for every training that it makes private."""

    attach: Callable[[PrivateOptimizer, PoissonLoader], None]

    def _made_private(self, *options: Any, **target: Any) -> Any:
        model, optimizer, loader = super()._made_private(*options, **target)
        self.attach(optimizer, loader)
        return model, optimizer, loader


def one_run(
    train: Callable[[Any, AuditedEngine], Any],
    dataset: Any,
    *,
    num_canaries: int,
    canaries: Sequence[Any] | None = None,
    loss: Callable[[Any, Any], Tensor] = nn.functional.cross_entropy,
    delta: float | None = None,
    confidence: float = 0.95,
    bound: str = "gaussian",
    num_guesses: int | None = None,
    accountant: PrivacyAccountant | None = None,
    seed: int | None = None,
) -> AuditResult:
    """Train once on data with canaries, and bound the run's ε from below.

    Each canary is in the data with probability 1/2. Its score, computed from the releases, measures
    how likely this is. The auditor guesses for the canaries with the most extreme scores (as many
    as are best at the stated ε); the number of right guesses gives the bound.

    Args:
        train: ``train(dataset, engine)``, your training. It calls ``engine.make_private`` or
            ``engine.make_private_with_epsilon`` with a loader of ``dataset``, takes its steps, and
            returns the model. If ``train`` makes several runs, they are audited
            together.
        dataset: the records, a map-style data set.
        num_canaries: m, for example thousands.
        canaries: None (white-box): a canary is a gradient of norm C, in a new direction in each
            step. Or m records (black-box): the included ones are added to the data set, and the
            trained model's ``loss`` scores all. Mislabelled records work best.
        loss: ``(output, target) -> scalar`` for a batch of one; for black-box canaries.
        delta: δ at which to compare; None: that of the accountant's budget.
        confidence, bound, num_guesses: as for :func:`from_scores`. ``bound="independent"`` is only
            for white-box canaries.
        accountant: the accountant of the engine; None: a new one.
        seed: the seed of the auditor's randomness, which the training never uses; None: the
            operating system's entropy.

    Raises:
        AuditError: too few canaries for any bound, no δ, a run without noise or without
            ``engine``, or a bound that is not valid for these canaries or batches.

    **Privacy.** The bound is computed from releases and from sums without noise. It depends only on
    canaries, because the part of other records is subtracted. Do not use the model: it has learned
    the canaries.
    """
    if delta is None and (accountant is None or (delta := accountant.delta) is None):
        raise AuditError("δ is missing, and the accountant has no budget: pass delta=1e-5")
    epsilon = None if accountant is None else accountant.epsilon
    LowerBound(bound, delta, confidence).require_enough(num_canaries, epsilon)
    if canaries is not None and (bound == "independent" or len(canaries) != num_canaries):
        raise AuditError(
            f"canaries= needs num_canaries = {num_canaries} records, got {len(canaries)}, and"
            ' bound="gaussian" or "basic", because their losses depend on each other'
        )
    generator, engine, found = generator_of(seed), AuditedEngine(accountant), list[Array]()
    included = draw_inclusion(num_canaries, generator)
    joined: Any = [Slot(i) for i in range(num_canaries)]
    if canaries is not None:
        joined = [canary for canary, is_in in zip(canaries, included, strict=True) if is_in]

    def attach(optimizer: PrivateOptimizer, loader: PoissonLoader) -> None:
        if engine.accountant.unit != "record":
            raise AuditError('a canary is one record: pass an accountant with unit="record"')
        if canaries is None:
            found.append(GradientCanaries(included, generator, optimizer, loader).scores)

    engine.attach = attach
    charged = 0 if accountant is None else len(accountant)
    trained = train(ConcatDataset([dataset, joined]), engine)
    if len(engine.accountant) == charged:
        raise AuditError("train took no private step: call engine.make_private and step()")
    return from_scores(
        sum(found) if canaries is None else _minus_losses(trained, canaries, loss),
        included,
        delta=delta,
        accountant=engine.accountant,
        confidence=confidence,
        bound=bound,
        num_guesses=num_guesses,
        threat=_WHITE_BOX if canaries is None else _BLACK_BOX,
    )


@torch.no_grad()
def _minus_losses(
    model: Any, canaries: Sequence[Any], loss: Callable[[Any, Any], Tensor]
) -> list[float]:
    """Minus the loss of each canary ``(input, target)``: records in the data have small losses."""
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"train must return the trained model, not {type(model).__name__}")
    device = next(model.parameters()).device
    model.eval()
    pairs = ([part.to(device) for part in default_collate([canary])] for canary in canaries)
    return [-float(loss(model(x), y)) for x, y in pairs]
