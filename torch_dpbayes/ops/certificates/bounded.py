"""Bounded: no record's log likelihood moves by more than a stated range."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...accounting.events import BoundedRangeDpEvent, positive_count
from ...errors import CertificateError
from ...noise import check_positive
from ..models import Density, Model, gradient_of
from .certificate import ROUND_UP, ExactDraw, Setting, Statement


@dataclass(frozen=True)
class Bounded(ExactDraw):
    r"""A draw from a posterior in which no record's log likelihood moves by more than a stated
    range.

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
        temper: ``"likelihood"``, or ``"posterior"`` to raise the prior to the power ρ as well (Wang
            et al., Algorithm 1), at the same cost.
        warmup_steps: adaptive steps of the No-U-Turn sampler before the state that is released.
        relative: clip the difference to the log likelihood at the chain's start instead.

    Raises:
        ValueError: the range is not finite, or the prior is not proper.

    **Privacy.** The event is ``BoundedRangeDpEvent(ε_B)``, for an *exact* draw: that the chain has
    converged is assumed, and no diagnostic of it is computed, for its value would be a release.
    """

    log_likelihood_range: float | tuple[float, float]
    temper: str = "likelihood"
    warmup_steps: int = 1000
    relative: bool = False

    def __post_init__(self) -> None:
        given = self.log_likelihood_range
        low, high = (-float(given), 0.0) if isinstance(given, int | float) else map(float, given)
        if not -math.inf < low < high < math.inf:
            raise CertificateError(
                "log_likelihood_range must be a finite interval (lowest, highest) of one record's"
                f" log likelihood, got {given!r}."
            )
        object.__setattr__(self, "log_likelihood_range", (low, high))
        if self.temper not in ("likelihood", "posterior"):
            raise CertificateError(f'temper must be "likelihood" or "posterior": {self.temper!r}.')
        positive_count(self.warmup_steps, "warmup_steps")

    @classmethod
    def from_lipschitz(
        cls,
        lipschitz: float,
        radius: float,
        *,
        temper: str = "likelihood",
        warmup_steps: int = 1000,
    ) -> Bounded:
        """For log likelihoods that are ``lipschitz``-Lipschitz in θ, and a posterior within
        ``radius`` of the start of the chain. The difference to a record's log likelihood at the
        start is clipped to ``lipschitz · radius``: the guarantee holds whether the two numbers are
        right or not.
        """
        check_positive("lipschitz", lipschitz)
        check_positive("radius", radius)
        bound = lipschitz * radius
        return cls((-bound, bound), temper=temper, warmup_steps=warmup_steps, relative=True)

    @property
    def _range(self) -> tuple[float, float]:
        assert isinstance(self.log_likelihood_range, tuple)
        return self.log_likelihood_range

    def check(self, model: Model) -> None:
        constants = model.derived_constants()
        if constants is not None and constants.strength == 0:
            raise CertificateError(
                "prior_std is infinite, and a bounded likelihood with a flat prior has no"
                " posterior: state a finite prior_std."
            )

    def event(self, model: Model, setting: Setting) -> BoundedRangeDpEvent:
        low, high = self._range
        return BoundedRangeDpEvent(
            setting.records_changed * (high - low) * setting.tempering * ROUND_UP
        )

    def conditions(self, model: Model, setting: Setting) -> Statement:
        low, high = self._range
        start = ", less that at the start of the chain," if self.relative else ""
        tempered = f"the {self.temper} is tempered"
        clipped = (
            f"every record's log likelihood{start} is clipped into [{low:g}, {high:g}]; {tempered}"
        )
        theorem = (
            "an exact draw is then the exponential mechanism, whose privacy loss spans at most"
            f" {setting.records_changed} x {high - low:g} x rho (Wang, Fienberg, Smola 2015; Dong,"
            " Durfee, Rogers 2020)"
        )
        return Statement([clipped, theorem], [])

    def density(self, model: Model, data: tuple[Any, ...], setting: Setting) -> Density:
        rho, power = setting.tempering, 1.0
        if self.temper == "posterior":
            rho, power = power, rho
        target = model.target(data, tempering=rho, max_grad_norm=math.inf)

        def potential(theta: Tensor) -> Tensor:
            return power * target.clipped_potential(theta, *self._range, self.relative)

        return Density(target.start, potential, gradient_of(potential))
