"""What a step asks of the data, and what that is charged for."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch

from ..accounting import events
from ..accounting.accountant import PrivacyAccountant
from ..batches.sampler import PoissonSampler
from ..errors import ArgumentError
from ..noise import add_gaussian
from ..per_sample.gradient_source import GradientSource
from .layout import Layout


class ClippedSum:
    """Σ clip(g_i), of which every step releases S = Σ clip(g_i) + zC·ξ.

    A query that releases more is a subclass: it says how many numbers more, fills
    ``layout.extra``, adds their noise, and states the noise multiplier that a release of the
    clipped sum alone would have at the same cost.

    Args:
        max_grad_norm: clip norm C of one record's gradient.
        expected_batch_size: B, by which sums are divided.

    **Privacy.** Adding or removing a record moves the sum by at most C, replacing one by 2C.
    """

    def __init__(self, max_grad_norm: float, expected_batch_size: float) -> None:
        # plain numbers, which nobody can change and no type rounds
        self.max_grad_norm = float(max_grad_norm)
        self.expected_batch_size = float(expected_batch_size)

    def independence(self, source: GradientSource) -> str:
        """How records are kept apart, in the model and in the loss."""
        return source.independence

    def extra_size(self, num_parameters: int, device: torch.device) -> int:
        """How many numbers a step releases beside the gradient."""
        return 0

    def collect(self, source: GradientSource, layout: Layout) -> int:
        """Add the batch's sum to ``layout``; returns how many records it had."""
        return source.add_clipped_sum(layout.named, self.max_grad_norm, layout.pieces)

    def add_noise(self, layout: Layout, smallest: float, stream: torch.Generator | None) -> None:
        """Σ clip(g_i) turns into S/B, for each group with its own z, of which ``smallest`` is the
        smallest; without a stream into a rank's share of it that has no noise.
        """
        for group in layout.groups:
            if not math.isfinite(group.noise_multiplier):
                group.gradient.zero_()
            elif stream is None:
                group.gradient.div_(self.expected_batch_size)
            else:
                std = group.noise_multiplier * self.max_grad_norm
                add_gaussian(group.gradient, std, self.expected_batch_size, stream)

    def equivalent_noise_multiplier(
        self, noise_multiplier: float, *, is_full: bool, sampling: str | None, neighboring: str
    ) -> float:
        """z at which the clipped sum alone would cost what this query costs."""
        return noise_multiplier


class Charged:
    """What a release is charged for."""

    query: ClippedSum
    num_data: int
    sampling: str | None
    accountant: PrivacyAccountant
    label: str
    draws: PoissonSampler | None
    _last_event: tuple[Any, tuple[events.DpEvent, float]] | None
    _warned: bool

    @property
    def sample_rate(self) -> float:
        """q = B/N."""
        return self.query.expected_batch_size / self.num_data

    def _is_full(self) -> bool:
        return self.query.expected_batch_size == self.num_data

    def event(
        self, noise_multiplier: float, sampling: str | None, draws: PoissonSampler | None = None
    ) -> events.DpEvent:
        """The event of one step, in noise std / clip bound; the accountant turns it into
        noise / sensitivity. Of batches that ``draws`` made it is what they say, for as many steps
        as they are charged together.
        """
        z = float(noise_multiplier)
        if z == 0.0:
            return events.NonPrivateDpEvent()
        z = self._equivalent(z, sampling)
        if draws is not None and draws.scheme == "users":  # of several records each, also of all
            return draws.event(events.GaussianDpEvent(z))
        if self._is_full():
            return events.GaussianDpEvent(z)
        if draws is not None and draws.scheme != "poisson":
            return draws.event(events.GaussianDpEvent(z))
        if sampling == "poisson":
            return events.PoissonSampledDpEvent(self.sample_rate, events.GaussianDpEvent(z))
        if sampling == "recordwise":
            return events.RecordwiseBatchGaussianDpEvent(z)
        if self.accountant.neighboring != "replace_one":
            raise ArgumentError(
                "who is in these batches is not known, and one record more may change them all: use"
                ' PrivacyEngine.make_private, PrivacyAccountant(neighboring="replace_one"), or'
                ' sampling="recordwise" if no record\'s place depends on others.',
                code="sampling-unknown",
            )
        return events.UnspecifiedBatchGaussianDpEvent(z)

    def _charge(self, noise_multiplier: float, *, is_mine: bool = True) -> None:
        """Charge the step, unless that was done with an earlier one of its pass, or, where it is
        not ``is_mine``, by another rank.
        """
        event, cost = self._event_of(noise_multiplier)
        if self.draws is not None and self.draws.is_charged(cost):
            return
        if is_mine:
            self.accountant.compose(event, label=self.label)
        if self.draws is not None:
            self.draws.mark_charged(cost)

    def _equivalent(self, noise_multiplier: float, sampling: str | None) -> float:
        return self.query.equivalent_noise_multiplier(
            noise_multiplier,
            is_full=self._is_full(),
            sampling=sampling,
            neighboring=self.accountant.neighboring,
        )

    def _event_of(self, noise_multiplier: float) -> tuple[events.DpEvent, float]:
        """:meth:`event` of these steps, and the noise multiplier that it has for a clipped sum
        alone; worked out once for as long as nothing changes.
        """
        made_for = (noise_multiplier, self.sampling)
        if self._last_event is None or self._last_event[0] != made_for:
            event = self.event(noise_multiplier, self.sampling, self.draws)
            cost = self._equivalent(noise_multiplier, self.sampling)
            self._last_event = made_for, (event, cost)
            if isinstance(event, events.UnspecifiedBatchGaussianDpEvent) and not self._warned:
                self._warned = True
                warnings.warn(
                    "steps are charged at sensitivity 2C, without amplification: nothing is known"
                    " of how batches are drawn, except that no record is in one twice."
                    " PrivacyEngine().make_private(...) draws Poisson batches, which cost less.",
                    stacklevel=7,
                )
        return self._last_event[1]
