"""FiniteRunLangevin: the last of finitely many steps of Langevin dynamics, converged or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from ...accounting.dominating_pairs import Array
from ...accounting.events import MuGaussianDpEvent, positive_count
from ...errors import CertificateError
from ...mcmc.checks import check_positive
from ...noise import GaussianNoise
from ..langevin import mu_of_last_state, overdamped
from ..models import Model
from .certificate import ROUND_UP, Asserted, Setting, Statement, StepTooLarge


@dataclass(frozen=True)
class FiniteRunLangevin(Asserted):
    r"""The last of t steps of full-batch Langevin dynamics, converged or not.

    .. math::
        \theta \leftarrow \theta - h \nabla U(\theta) + \sqrt{2h}\,\xi, \qquad
        U = r + \rho \sum_i \ell_i, \qquad c = \max(|1 - h\lambda|, |1 - hM|)

    If U is λ-strongly convex and M-smooth for every data set, a step is a c-contraction, and what a
    record did long ago is forgotten: with Δ = 2ρL (replace one) or ρL (add or remove one)

    .. math::
        \mu^2 = \frac{\Delta^2}{2} \frac{(\sum_i h_i C_i)^2}{\sum_i h_i C_i^2}, \quad
        C_i = \prod_{j>i} c_j; \qquad \mu^2 = \frac{\Delta^2 h}{2}
        \frac{1 - c^t}{1 + c^t}\,\frac{1 + c}{1 - c} \text{ of equal steps.}

    For a :class:`~torch_dpbayes.ops.GLM` or :class:`~torch_dpbayes.ops.Softmax` all constants are
    derived and enforced, and nothing is assumed.

    Source: Bok, Su, Altschuler (2024), "Shifted interpolation for differential privacy".

    Args:
        steps: t. More steps sample better and cost more, up to μ ≈ Δ/√λ.
        step_size: h, or one for each step, fixed before the data are seen, at most 2/M. None: 1/M.
            The draw's variance exceeds the target's by a factor of up to 1/(1 − hM/2).
        max_grad_norm: clip norm of one record's gradient of a GLM, before tempering.
        lipschitz: L, asserted: the largest norm of a record's gradient, which is clipped to it.
        strength: λ, asserted: −log prior is λ-strongly convex (0: convex) in the unconstrained
            space, and every record's loss is convex.
        smoothness: M, asserted: U without tempering is M-smooth for every possible data set.

    Raises:
        ValueError: a constant is out of range, or a step exceeds 2/M, where distances grow.

    **Privacy.** Released is the last state; the event is ``MuGaussianDpEvent(μ)``. The start does
    not depend on data, and all noise comes from the operating system's entropy.
    """

    steps: int
    step_size: float | Sequence[float] | None = None
    max_grad_norm: float = 1.0
    lipschitz: float | None = None
    strength: float | None = None
    smoothness: float | None = None

    def __post_init__(self) -> None:
        positive_count(self.steps, "steps")
        self._check_constants(strength=self.strength, smoothness=self.smoothness)
        if self.step_size is not None:
            sizes = np.asarray(self.step_size, dtype=np.float64)
            if sizes.shape not in ((), (self.steps,)) or not (
                0 < sizes.min() <= sizes.max() < np.inf
            ):
                raise CertificateError(
                    f"step_size must be one positive number, or one for each of the {self.steps}"
                    f" steps; got {self.step_size!r}."
                )
            own = sizes.tolist()  # nobody else's list
            object.__setattr__(self, "step_size", tuple(own) if sizes.ndim else own)
        if self.strength is not None:
            if not 0 <= self.strength <= check_positive("smoothness", self.smoothness):
                raise CertificateError(
                    f"strength must lie between 0 and smoothness, got {self.strength}: where U is"
                    " not convex use dpb.optim.DPSGLD, which charges every step."
                )

    def needs_num_data(self, model: Model) -> bool:
        return self.lipschitz is None

    def event(self, model: Model, setting: Setting) -> MuGaussianDpEvent:
        lipschitz, strength, smoothness = self.constants(model, setting)
        sizes = self.sizes(smoothness)
        # 1 − c, rounded down, of the four distances to 0 and 2: both ends lie in between
        gaps = np.minimum(sizes * strength, 2 - sizes * smoothness - 1e-15)
        if (gaps < -1e-14).any():
            raise StepTooLarge(
                f"step_size = {float(sizes.max()):.4g} is above 2/M = {2 / smoothness:.4g}, M the"
                " smoothness of U, where distances grow: leave out step_size for 1/M."
            )
        sensitivity = setting.records_changed * setting.tempering * lipschitz
        mu = mu_of_last_state(sensitivity, sizes, np.maximum(gaps, 0.0), self.steps)
        return MuGaussianDpEvent(mu * ROUND_UP)

    def statement(self, model: Model, setting: Setting) -> Statement:
        lipschitz, strength, smoothness = self.constants(model, setting)
        numbers = (
            f"one record's gradient has norm at most L = {lipschitz:g}; U is"
            f" {strength:.4g}-strongly convex and {smoothness:.6g}-smooth for every data set"
        )
        run = (
            f"{self.steps} steps, at most {self.sizes(smoothness).max():.4g} long, from a start that"
            " no record chose; shifted interpolation bounds the last state, converged or not, and"
            " nothing else leaves (Bok, Su, Altschuler 2024)"
        )
        if self.lipschitz is None:
            most = "" if setting.records_changed == 2 else "both data sets have at most "
            why = f"{model!r} enforces it by clipping; {most}N = {setting.num_data} records"
            return Statement([f"{numbers} ({why})", run], [])
        assumed = (
            f"constants asserted by the caller, not checked: {numbers}; every record's loss is"
            " convex, and its gradient reaches L nowhere, so that clipping does not change it"
        )
        return Statement([run + ", if what is assumed holds"], [assumed])

    def draw(
        self, model: Model, data: tuple[Any, ...], setting: Setting, noise: GaussianNoise
    ) -> Tensor:
        sizes = self.sizes(self.constants(model, setting)[2])
        clip = self.max_grad_norm if self.lipschitz is None else self.lipschitz
        target = model.target(data, tempering=setting.tempering, max_grad_norm=clip)
        return overdamped(target, np.broadcast_to(sizes, self.steps).tolist(), noise)

    def constants(self, model: Model, setting: Setting) -> tuple[float, float, float]:
        """L, λ and M."""
        if self.lipschitz is not None and self.strength is not None and self.smoothness is not None:
            return self.lipschitz, self.strength, self.smoothness
        derived, count = model.derived_constants(self.max_grad_norm), setting.num_data
        assert derived is not None and count is not None
        smoothness = (
            derived.prior_smoothness + setting.tempering * count * derived.record_smoothness
        )
        return derived.lipschitz, derived.strength, smoothness

    def sizes(self, smoothness: float) -> Array:
        """h, or one for each step."""
        given = self.step_size
        return np.asarray(1 / smoothness if given is None else given, dtype=np.float64)
