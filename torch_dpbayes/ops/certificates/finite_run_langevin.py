"""FiniteRunLangevin: the last of finitely many steps of Langevin dynamics, converged or not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ...accounting.dominating_pairs import Array
from ...accounting.events import DpEvent, MuGaussianDpEvent, positive_count
from ...errors import CertificateError
from ...mcmc.checks import check_positive
from ...noise import GaussianNoise
from ..langevin import overdamped
from ..models import Model
from .certificate import ROUND_UP, Certificate, Setting, Statement

_LEAST_GAP = 1e-290  # below it digits are lost, and the limit c = 1 is an upper bound


class StepTooLarge(CertificateError):
    """A step size above 2/M."""


class _Constants(NamedTuple):
    lipschitz: float  # of one record's loss
    strength: float
    smoothness: float


@dataclass(frozen=True)
class FiniteRunLangevin(Certificate):
    r"""The last of finitely many steps of full-batch Langevin dynamics: certified at any number of
    steps, converged or not.

    .. math::
        \theta \leftarrow \theta - h \nabla U(\theta) + \sqrt{2h}\,\xi, \qquad
        U = r + \rho \sum_i \ell_i, \qquad c = \max(|1 - h\lambda|, |1 - hM|)

    If U is λ-strongly convex and M-smooth for every data set, every step is a c-contraction, and
    what a record did long ago is forgotten. With sensitivity Δ = 2ρL (replace one) or ρL (add or
    remove one) the last state is μ-Gaussian differentially private,

    .. math::
        \mu = \Delta \sqrt{\tfrac h2}\, \sqrt{\frac{1 - c^t}{1 + c^t}\,\frac{1 + c}{1 - c}}, \qquad
        \mu = \Delta \sqrt{ht/2} \text{ at } c = 1, \qquad
        \mu^2 = \frac{\Delta^2}{2} \frac{(\sum_i h_i C_i)^2}{\sum_i h_i C_i^2},
        \ C_i = \prod_{j>i} c_j \text{ for varying steps.}

    For a :class:`~torch_dpbayes.ops.GLM` all constants are derived and enforced (features and
    gradients are clipped), and nothing is assumed: L, λ = 1/max prior_std², M = 1/min prior_std² +
    ρN·(record smoothness). For any other model they are the caller's assertion.

    Sources: Bok, Su, Altschuler (2024), "Shifted interpolation for differential privacy", for the
    noisy gradient descent that this is; Chourasia, Ye, Shokri (2021) and Altschuler, Talwar (2022)
    for its Rényi precursors.

    Args:
        steps: t. More steps sample better and cost more, up to μ ≈ Δ/√λ.
        step_size: h, or one for each step, fixed before the data are seen, at most 2/M. None: 1/M,
            from the public constants. The variance of the draw exceeds that of the target by at
            most a factor of 1/(1 − hκ/2) along a direction in which U has curvature κ.
        max_grad_norm: clip norm of one record's gradient of a GLM, before tempering.
        lipschitz: L, asserted: the largest norm of one record's gradient. Gradients are clipped to
            it, so that the assertion cannot fail unnoticed on L's account, but convexity and
            smoothness are then only the caller's word.
        strength: λ, asserted: −log prior is λ-strongly convex (0: convex) in the unconstrained
            space, and every record's loss is convex.
        smoothness: M, asserted: U without tempering is M-smooth for every data set that could
            occur.

    Raises:
        ValueError: a constant is out of range, or a step exceeds 2/M: such a step expands distances
            and nothing is forgotten.

    **Privacy.** Released is the last state. The event is ``MuGaussianDpEvent(μ)``. The chain starts
    at a point that the data did not choose, nothing about its path leaves, and all of its noise is
    privacy noise: it comes from the operating system's entropy.
    """

    steps: int
    step_size: float | Sequence[float] | None = None
    max_grad_norm: float = 1.0
    lipschitz: float | None = None
    strength: float | None = None
    smoothness: float | None = None

    def __post_init__(self) -> None:
        positive_count(self.steps, "steps")
        check_positive("max_grad_norm", self.max_grad_norm)
        if self.step_size is not None:
            steps = np.asarray(self.step_size, dtype=np.float64)
            # nobody else's list
            object.__setattr__(
                self, "step_size", float(steps) if steps.ndim == 0 else tuple(steps.tolist())
            )
            if steps.ndim > 1 or (steps.ndim == 1 and len(steps) != self.steps):
                raise CertificateError(
                    f"step_size must be one number or one for each of the {self.steps} steps, got"
                    f" {list(steps.shape)} of them."
                )
            if not (np.isfinite(steps).all() and (steps > 0).all()):
                raise CertificateError(
                    f"step_size must be positive and finite, got {self.step_size!r}."
                )
        asserted = {
            "lipschitz": self.lipschitz,
            "strength": self.strength,
            "smoothness": self.smoothness,
        }
        missing = [name for name, value in asserted.items() if value is None]
        if 0 < len(missing) < 3:
            raise CertificateError(
                f"asserted constants come together: {', '.join(missing)} missing. For a GLM leave"
                " all three out, they are derived."
            )
        if self.lipschitz is not None and self.strength is not None and self.smoothness is not None:
            check_positive("lipschitz", self.lipschitz)
            check_positive("smoothness", self.smoothness)
            if not 0 <= self.strength < math.inf:
                raise CertificateError(
                    f"strength must be 0 or positive and finite, got {self.strength}: where U is"
                    " not convex use dpb.optim.DPSGLD, which charges every step."
                )
            if self.strength > self.smoothness:
                raise CertificateError(
                    f"strength = {self.strength} exceeds smoothness = {self.smoothness}: no"
                    " function has both, so state a smaller strength."
                )

    def check(self, model: Model) -> None:
        if model.derived_constants(self.max_grad_norm) is not None:
            if self.lipschitz is not None:
                raise CertificateError(
                    "the constants of a GLM are derived, not asserted: leave out lipschitz=,"
                    " strength= and smoothness=."
                )
        elif self.lipschitz is None:
            raise CertificateError(
                "nobody knows the constants of a model that is not a GLM: assert lipschitz=,"
                " strength= and smoothness=, write a dpb.ops.GLM, or use dpb.optim.DPSGLD."
            )
        else:
            model.require_unconstrained("FiniteRunLangevin")

    def needs_num_data(self, model: Model) -> bool:
        return self.lipschitz is None

    def event(self, model: Model, setting: Setting) -> DpEvent:
        constants = self._constants(model, setting)
        gap = self._gaps(self._steps(constants), constants)
        return MuGaussianDpEvent(
            finite_run_mu(
                setting.records_changed * setting.tempering * constants.lipschitz,
                self._steps(constants),
                gap,
                self.steps,
            )
        )

    def statement(self, model: Model, setting: Setting) -> Statement:
        constants = self._constants(model, setting)
        h = self._steps(constants)
        sizes = f"{float(h):.4g}" if h.ndim == 0 else f"{h.max():.4g} to {h.min():.4g}"
        numbers = (
            f"one record's gradient has norm at most L = {constants.lipschitz:g}; U is"
            f" {constants.strength:.4g}-strongly convex and {constants.smoothness:.6g}-smooth for"
            " every data set"
        )
        run = (
            f"{self.steps} steps of size {sizes} of full-batch Langevin dynamics from a start that"
            " no record chose; only the last state leaves"
        )
        theorem = (
            "shifted interpolation (Bok, Su, Altschuler 2024) bounds the last state after any"
            " number of steps, converged or not"
        )
        if self.lipschitz is None:
            size = (
                "" if setting.neighboring == "replace_one" else "both data sets have at most "
            ) + f"N = {setting.num_data} records"
            return Statement(
                [f"{numbers} ({model!r} enforces it by clipping; {size})", run, theorem], []
            )
        return Statement(
            [
                (
                    f"one record's gradient has norm at most L = {constants.lipschitz:g}: it is"
                    " clipped"
                ),
                run,
                theorem + ", if what is assumed holds",
            ],
            [
                f"constants asserted by the caller, not checked: {numbers}; every record's loss is"
                " convex, and its gradient reaches L nowhere, so that clipping does not change it"
            ],
        )

    def draw(
        self, model: Model, data: tuple[Any, ...], setting: Setting, noise: GaussianNoise
    ) -> Tensor:
        constants = self._constants(model, setting)
        steps = self._steps(constants)
        clip = self.max_grad_norm if self.lipschitz is None else self.lipschitz
        target = model.target(data, tempering=setting.tempering, max_grad_norm=clip)
        return overdamped(target, np.broadcast_to(steps, self.steps).tolist(), noise)

    def _constants(self, model: Model, setting: Setting) -> _Constants:
        if self.lipschitz is not None and self.strength is not None and self.smoothness is not None:
            return _Constants(self.lipschitz, self.strength, self.smoothness)
        derived = model.derived_constants(self.max_grad_norm)
        assert derived is not None and setting.num_data is not None
        records = setting.tempering * setting.num_data * derived.record_smoothness
        return _Constants(derived.lipschitz, derived.strength, derived.prior_smoothness + records)

    def _steps(self, constants: _Constants) -> Array:
        return np.asarray(
            1 / constants.smoothness if self.step_size is None else self.step_size, dtype=np.float64
        )

    def _gaps(self, steps: Array, constants: _Constants) -> Array:
        """1 − c of each step, rounded down."""
        near, far = steps * constants.strength, steps * constants.smoothness
        # of the four distances, as near <= far and both ends lie in [0, 2]
        gaps = np.minimum(near, 2 - far - 1e-15)
        if (gaps < -1e-14).any():
            raise StepTooLarge(
                f"step_size = {float(steps.max()):.4g} is above 2/M ="
                f" {2 / constants.smoothness:.4g}, M the smoothness of U, where distances grow:"
                " leave out step_size for 1/M."
            )
        return np.maximum(gaps, 0.0)


def finite_run_mu(sensitivity: float, steps: Array, gaps: Array, count: int) -> float:
    """μ of the last of ``count`` steps of sizes ``steps`` (one or one each), each a
    contraction by 1 − ``gaps``, T = 1.
    """
    if steps.ndim == 0:
        h, gap = float(steps), float(gaps)
        if gap < _LEAST_GAP:
            forgotten = float(count)
        else:
            # (1 − c^t)/(1 + c^t) = tanh(−t log(c)/2), which loses no digits where c is close to 1
            forgotten = (
                (math.tanh(-count * math.log1p(-gap) / 2) if gap < 1 else 1.0) * (2 - gap) / gap
            )
        return sensitivity * math.sqrt(h / 2 * forgotten) * ROUND_UP
    with np.errstate(divide="ignore"):
        logs = np.log1p(-gaps)
    # C_i, the product of all later contractions
    later = np.exp(np.concatenate([np.cumsum(logs[:0:-1])[::-1], [0.0]]))
    return (
        sensitivity
        * float(np.sum(steps * later) / math.sqrt(2 * np.sum(steps * later**2)))
        * ROUND_UP
    )
