"""StronglyLogConcave: a strongly log-concave prior, and a log-concave Lipschitz likelihood."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...accounting.events import MuGaussianDpEvent, positive_count
from ...errors import CertificateError
from ...noise import check_positive
from ..models import Limits, Model
from .certificate import ROUND_UP, Asserted, ExactDraw, Setting, Statement


@dataclass(frozen=True)
class StronglyLogConcave(Asserted, ExactDraw):
    r"""A draw from a posterior whose prior is strongly log-concave and whose likelihood is
    log-concave and Lipschitz.

    .. math::
        p(\theta \mid x) \propto p(\theta) \prod_i p(x_i \mid \theta)^\rho \ \text{ is } \
        G/\sqrt{\lambda}\text{-GDP},

    G = 2Lρ (replace one) or Lρ (add or remove one). Only the likelihood is tempered: tempering the
    prior too would give 2L√(ρ/λ), which is worse.

    Source: Gopi, Lee, Liu (2022), "Private convex optimization via exponential mechanism", Theorem
    4.1.

    Args:
        max_grad_norm: clip norm of one record's gradient of a :class:`~torch_dpbayes.ops.GLM`, for
            which L and λ are derived. The sampled density has the clipped gradient (a Huber loss in
            the linear predictor).
        lipschitz: L, asserted for other models: the largest norm of the gradient of one record's
            log likelihood over the whole support. Gradients are not clipped to L, because in
            general no density has the clipped gradient. Instead, a record's log likelihood is
            clipped: from its value at the chain's first point it moves by at most L times the
            distance.
        strength: λ, asserted: −log prior is λ-strongly convex, λ > 0, and every record's loss is
            convex, in the unconstrained space.
        warmup_steps: adaptive steps of the No-U-Turn sampler before the state that is released.

    Raises:
        ValueError: a constant is out of range, or the prior is not strongly log-concave.

    **Privacy.** The event is ``MuGaussianDpEvent(G/√λ)``, for an *exact* draw: the certificate
    assumes that the chain has converged. No diagnostic is computed, because it would be a release.
    With its default step size :class:`~torch_dpbayes.ops.FiniteRunLangevin` costs no more, and for
    a GLM or a Softmax it assumes nothing.
    """

    max_grad_norm: float = 1.0
    lipschitz: float | None = None
    strength: float | None = None
    warmup_steps: int = 1000

    def __post_init__(self) -> None:
        self._check_constants(strength=self.strength)
        if self.strength is not None:
            check_positive("strength", self.strength)
        positive_count(self.warmup_steps, "warmup_steps")

    def check(self, model: Model) -> None:
        super().check(model)
        if not self._constants(model).strength:
            raise CertificateError(
                "prior_std is infinite, so the prior is not strongly log-concave: pass a finite"
                " prior_std."
            )

    def event(self, model: Model, setting: Setting) -> MuGaussianDpEvent:
        lipschitz, strength, *_ = self._constants(model)
        return MuGaussianDpEvent(
            setting.records_changed * setting.tempering * lipschitz / math.sqrt(strength) * ROUND_UP
        )

    def conditions(self, model: Model, setting: Setting) -> Statement:
        lipschitz, strength, *_ = self._constants(model)
        numbers = (
            f"one record's gradient has norm at most L = {lipschitz:g}; -log prior is"
            f" {strength:.4g}-strongly convex"
        )
        theorem = (
            "an exact draw is then (G / sqrt(strength))-Gaussian differentially private (Gopi, Lee,"
            " Liu 2022)"
        )
        if self.lipschitz is None:
            return Statement([f"{numbers} ({model!r} enforces it by clipping)", theorem], [])
        return Statement(
            [theorem],
            [
                f"constants asserted by the caller, neither checked nor enforced: {numbers}; every"
                " record's loss is convex"
            ],
        )

    def limits(self, setting: Setting) -> Limits:
        clip = self.max_grad_norm if self.lipschitz is None else math.inf
        return Limits(setting.tempering, clip, lipschitz=self.lipschitz or math.inf)
