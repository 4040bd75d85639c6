"""Bounded: no record's log likelihood moves by more than a stated range."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...accounting.events import BoundedRangeDpEvent, positive_count
from ...errors import CertificateError
from ..linear_model import LinearModel
from ..models import Limits, Model
from .certificate import ROUND_UP, ExactDraw, Setting, Statement


@dataclass(frozen=True)
class Bounded(ExactDraw):
    r"""A draw from a posterior in which each record's log likelihood stays in a stated range.

    .. math::
        p(\theta \mid x) \propto p(\theta) \prod_i \exp\big(\rho\, \mathrm{clip}(\log p(x_i
        \mid \theta), a, b)\big), \qquad R = b - a

    The log ratio of the densities on neighbouring data sets spans at most ε_B = 2ρR (replace one)
    or ρR (add or remove one): the draw is the exponential mechanism, with the bounded-range profile
    δ(g) = (1 − e^{−(ε_B−g)/2})²/(1 − e^{−ε_B}).

    Sources: Wang, Fienberg, Smola (2015), Theorem 1 (their 4Bρ is 2ρR with R = 2B); Dong, Durfee,
    Rogers (2020) for the profile.

    Args:
        log_likelihood_range: (a, b), chosen without the data; one number R stands for (−R, 0).
            Every record's log likelihood is clipped into it, and the clipped model is sampled.
        warmup_steps: adaptive steps of the No-U-Turn sampler before the state that is released.

    Raises:
        ValueError: the range is not finite, or the prior is not proper.

    **Privacy.** The event is ``BoundedRangeDpEvent(ε_B)``, for an *exact* draw: it assumes that the
    chain has converged. No diagnostic is computed, because its value would be a release.
    """

    log_likelihood_range: float | tuple[float, float]
    warmup_steps: int = 1000

    def __post_init__(self) -> None:
        given = self.log_likelihood_range
        low, high = (-float(given), 0.0) if isinstance(given, int | float) else map(float, given)
        if not -math.inf < low < high < math.inf:
            raise CertificateError(
                "log_likelihood_range must be a finite interval (lowest, highest) of one record's"
                f" log likelihood, got {given!r}."
            )
        object.__setattr__(self, "log_likelihood_range", (low, high))
        positive_count(self.warmup_steps, "warmup_steps")

    @property
    def _range(self) -> tuple[float, float]:
        assert isinstance(self.log_likelihood_range, tuple)
        return self.log_likelihood_range

    def check(self, model: Model) -> None:
        if isinstance(model, LinearModel) and bool((model.prior_precision == 0).any()):
            raise CertificateError(
                "prior_std is infinite, but a bounded likelihood with a flat prior has no"
                " posterior: pass a finite prior_std."
            )

    def event(self, model: Model, setting: Setting) -> BoundedRangeDpEvent:
        low, high = self._range
        return BoundedRangeDpEvent(
            setting.records_changed * (high - low) * setting.tempering * ROUND_UP
        )

    def conditions(self, model: Model, setting: Setting) -> Statement:
        low, high = self._range
        clipped = f"every record's log likelihood is clipped into [{low:g}, {high:g}]"
        theorem = (
            "an exact draw is then the exponential mechanism, whose privacy loss spans at most"
            f" {setting.records_changed} x {high - low:g} x rho (Wang, Fienberg, Smola 2015; Dong,"
            " Durfee, Rogers 2020)"
        )
        return Statement([clipped, theorem], [])

    def limits(self, setting: Setting) -> Limits:
        return Limits(setting.tempering, log_likelihood_range=self._range)
