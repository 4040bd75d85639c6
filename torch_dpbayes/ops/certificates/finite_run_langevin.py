"""FiniteRunLangevin: the last of finitely many steps of Langevin dynamics, converged or not."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ...accounting.events import MuGaussianDpEvent, positive_count
from ...errors import CertificateError
from ...noise import GaussianNoise, check_positive
from ..langevin import Overdamped, mu_of_last_state
from ..models import Data, Limits, Model
from .certificate import ROUND_UP, Asserted, Setting, Statement


class StepTooLarge(CertificateError):
    """A step size above 2/M."""


@dataclass(frozen=True)
class FiniteRunLangevin(Asserted):
    r"""The last state after t steps of full-batch Langevin dynamics, converged or not.

    .. math::
        \theta \leftarrow \theta - h \nabla U(\theta) + \sqrt{2h}\,\xi, \qquad
        U = r + \rho \sum_i \ell_i, \qquad c = \max(|1 - h\lambda|, |1 - hM|)

    If U is λ-strongly convex and M-smooth for every data set, a step is a c-contraction, and old
    steps are forgotten: with Δ = 2ρL (replace one) or ρL (add or remove one)

    .. math:: \mu^2 = \frac{\Delta^2 h}{2} \frac{1 - c^t}{1 + c^t}\,\frac{1 + c}{1 - c}.

    All constants of a GLM or a Softmax are derived and enforced, and nothing is assumed. Source:
    Bok, Su, Altschuler (2024), "Shifted interpolation for differential privacy".

    Args:
        steps: t. More steps come closer to the posterior and cost more, up to μ ≈ Δ/√λ.
        step_size: h, at most 2/M, chosen without the data. None: 1/M. The draw's variance exceeds
            the target's by a factor of up to 1/(1 − hM/2).
        max_grad_norm: clip norm of one record's gradient of a GLM, before tempering.
        lipschitz: L, asserted: the largest norm of a record's gradient, which is clipped to it.
        strength: λ, asserted: −log prior is λ-strongly convex (0: convex) in unconstrained space,
            and every record's loss is convex.
        smoothness: M, asserted: U without tempering is M-smooth for every possible data set.

    Raises:
        ValueError: a constant is out of range, or ``step_size`` exceeds 2/M.

    **Privacy.** The last state is released; the event is ``MuGaussianDpEvent(μ)``.
    """

    steps: int
    step_size: float | None = None
    max_grad_norm: float = 1.0
    lipschitz: float | None = None
    strength: float | None = None
    smoothness: float | None = None

    def __post_init__(self) -> None:
        positive_count(self.steps, "steps")
        self._check_constants(strength=self.strength, smoothness=self.smoothness)
        if self.step_size is not None:
            check_positive("step_size", self.step_size)
        if not 0 <= (self.strength or 0.0) <= (self.smoothness or math.inf):
            raise CertificateError(
                "strength must lie between 0 and smoothness: if U is not convex use DPSGLD."
            )

    def needs_num_data(self, model: Model) -> bool:
        return self.lipschitz is None

    def event(self, model: Model, setting: Setting) -> MuGaussianDpEvent:
        lipschitz, strength, smoothness, size = self.resolved(model, setting)
        # 1 − c, rounded down, of the four distances to 0 and 2: both ends lie in between
        gap = min(size * strength, 2 - size * smoothness - 1e-15)
        if gap < -1e-14:
            raise StepTooLarge(
                f"step_size {size:.4g} is above 2/M = {2 / smoothness:.4g}: leave it out."
            )
        moved = setting.records_changed * setting.tempering * lipschitz
        mu = mu_of_last_state(moved, size, max(gap, 0.0), self.steps)
        return MuGaussianDpEvent(mu * ROUND_UP)

    def statement(self, model: Model, setting: Setting) -> Statement:
        lipschitz, strength, smoothness, size = self.resolved(model, setting)
        numbers = (
            f"one record's gradient has norm at most L = {lipschitz:g}; U is"
            f" {strength:.4g}-strongly convex and {smoothness:.6g}-smooth for every data set"
        )
        run = (
            f"{self.steps} steps of {size:.4g} from a start that does not depend on records:"
            " shifted interpolation bounds the last state (Bok, Su, Altschuler 2024)"
        )
        if self.lipschitz is None:
            count = f"{'' if setting.records_changed == 2 else 'at most '}N = {setting.num_data}"
            return Statement([f"{numbers} of {count} records ({model!r} clips)", run], [])
        assumed = (
            f"constants asserted by the caller, not checked: {numbers}; losses are convex, and"
            " clipping changes none of their gradients"
        )
        return Statement([run + ", if what is assumed holds"], [assumed])

    def draw(self, model: Model, data: Data, setting: Setting, noise: GaussianNoise) -> Tensor:
        *_, size = self.resolved(model, setting)
        clip = self.max_grad_norm if self.lipschitz is None else self.lipschitz
        target = model.target(data, Limits(setting.tempering, clip))
        return Overdamped(self.steps, size).draw(target, noise)

    def resolved(self, model: Model, setting: Setting) -> tuple[float, float, float, float]:
        """L, λ, M and h."""
        lipschitz, strength, of_prior, of_record = self._constants(model)
        smoothness = self.smoothness
        if smoothness is None:
            assert setting.num_data is not None
            smoothness = of_prior + setting.tempering * setting.num_data * of_record
        return lipschitz, strength, smoothness, self.step_size or 1 / smoothness
