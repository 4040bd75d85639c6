"""What can be said about the privacy of one posterior draw, with every constant, and how the
draw is made.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ..accounting.accountant import check_delta
from ..accounting.choices import Neighboring, neighboring_relation
from ..accounting.events import (
    BoundedRangeDpEvent,
    ComposedDpEvent,
    DpEvent,
    FailureDpEvent,
    MuGaussianDpEvent,
    PureDpEvent,
)
from ..accounting.pairs import Array
from ..noise import GaussianNoise
from . import close, langevin
from .glm import GLM, require_representable
from .langevin import Density, Sampler
from .models import Model
from .nuts import no_u_turn

_ROUND_UP = 1 + 1e-9  # of a mu computed in floats
_LEAST_GAP = 1e-290  # below it digits are lost, and the limit c = 1 is an upper bound


class Setting(NamedTuple):
    """What a certificate's constants depend on besides the model; all of it public."""

    tempering: float  # ρ, the factor of every record's log likelihood
    num_data: int | None  # exact under replace-one, an upper bound under add-or-remove-one
    neighboring: Neighboring

    @property
    def records_changed(self) -> int:
        """How many records' contributions one step towards a neighbour can change: a replaced
        record goes and another comes.
        """
        return 2 if neighboring_relation(self.neighboring) == "replace_one" else 1


class Statement(NamedTuple):
    """A guarantee in words."""

    proved: list[str]
    assumed: list[str]


class Certificate(ABC):
    """What is known about one draw. A subclass is a frozen record of public constants."""

    @abstractmethod
    def check(self, model: Model) -> None:
        """Refuse a model for which the certificate says nothing."""

    @abstractmethod
    def needs_num_data(self, model: Model) -> bool:
        """Whether the guarantee depends on the number of records."""

    @abstractmethod
    def event(self, model: Model, setting: Setting) -> DpEvent:
        """What one draw is charged for."""

    @abstractmethod
    def statement(self, model: Model, setting: Setting) -> Statement:
        """What was proved and what was assumed."""

    @abstractmethod
    def draw(
        self, model: Model, data: tuple[Any, ...], setting: Setting, noise: GaussianNoise
    ) -> Tensor:
        """One draw, flat, in the space that the sampler moves in. The only place of a
        certificate that sees data.
        """


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
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(f"steps must be a positive whole number, got {self.steps!r}")
        _require_positive("max_grad_norm", self.max_grad_norm)
        if self.step_size is not None:
            steps = np.asarray(self.step_size, dtype=np.float64)
            # nobody else's list
            object.__setattr__(
                self, "step_size", float(steps) if steps.ndim == 0 else tuple(steps.tolist())
            )
            if steps.ndim > 1 or (steps.ndim == 1 and len(steps) != self.steps):
                raise ValueError(
                    f"step_size must be one number or one for each of the {self.steps} steps, got"
                    f" {list(steps.shape)} of them"
                )
            if not (np.isfinite(steps).all() and (steps > 0).all()):
                raise ValueError(f"step_size must be positive and finite, got {self.step_size!r}")
        asserted = {
            "lipschitz": self.lipschitz,
            "strength": self.strength,
            "smoothness": self.smoothness,
        }
        missing = [name for name, value in asserted.items() if value is None]
        if 0 < len(missing) < 3:
            raise ValueError(
                f"asserted constants come together: {', '.join(missing)} missing. For a GLM leave"
                " all three out, they are derived"
            )
        if self.lipschitz is not None and self.strength is not None and self.smoothness is not None:
            _require_positive("lipschitz", self.lipschitz)
            _require_positive("smoothness", self.smoothness)
            if not 0 <= self.strength < math.inf:
                raise ValueError(
                    f"strength must be 0 or positive and finite, got {self.strength}: with a"
                    " negative one U is not convex, steps expand distances, and no finite-run"
                    " guarantee is known. Use dpb.optim.DPSGLD, which charges every step, or"
                    " another certificate."
                )
            if self.strength > self.smoothness:
                raise ValueError(
                    f"strength = {self.strength} exceeds smoothness = {self.smoothness}: no"
                    " function has both"
                )

    def check(self, model: Model) -> None:
        if isinstance(model, GLM):
            if self.lipschitz is not None:
                raise ValueError(
                    "the constants of a GLM are derived, not asserted: leave out lipschitz=,"
                    " strength= and smoothness="
                )
            require_representable("max_grad_norm", self.max_grad_norm)
        elif self.lipschitz is None:
            raise ValueError(
                "for a model that is not a GLM nobody knows the constants that this guarantee rests"
                " on: assert them with FiniteRunLangevin(steps=..., lipschitz=..., strength=...,"
                " smoothness=...), which is then labelled as asserted; or write the model as a"
                " dpb.ops.GLM, for which they are derived; or use dpb.optim.DPSGLD, whose guarantee"
                " needs none."
            )
        else:
            model.require_unconstrained("FiniteRunLangevin")

    def needs_num_data(self, model: Model) -> bool:
        return isinstance(model, GLM)

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
        if isinstance(model, GLM):
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
        return langevin.overdamped(target, np.broadcast_to(steps, self.steps).tolist(), noise)

    def _constants(self, model: Model, setting: Setting) -> _Constants:
        if self.lipschitz is not None and self.strength is not None and self.smoothness is not None:
            return _Constants(self.lipschitz, self.strength, self.smoothness)
        assert isinstance(model, GLM) and setting.num_data is not None
        records = setting.tempering * setting.num_data * model.record_smoothness(self.max_grad_norm)
        return _Constants(
            model.lipschitz(self.max_grad_norm), model.strength, model.prior_smoothness + records
        )

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
                f" {2 / constants.smoothness:.4g} (M = {constants.smoothness:.6g} is the smoothness"
                " of U over all data sets): such a step expands distances, so early differences"
                " between neighbouring data sets grow instead of being forgotten. Leave out"
                " step_size for 1/M."
            )
        return np.maximum(gaps, 0.0)


@dataclass(frozen=True)
class Bounded(Certificate):
    r"""A draw from a posterior in which no record's log likelihood moves by more than a stated
    range.

    .. math:: p(\theta \mid x) \propto p(\theta) \prod_i \exp\big(\rho\, \mathrm{clip}(\log p(x_i
    \mid \theta), a, b)\big), \qquad R = b - a

    The log ratio of the densities on neighbouring data sets spans at most ε_B = 2ρR (replace one)
    or ρR (add or remove one): the draw is the exponential mechanism, with its bounded-range profile
    δ(g) = (1 − e^{−(ε_B−g)/2})²/(1 − e^{−ε_B}), which is below that of ε_B-differential privacy.

    Sources: Wang, Fienberg, Smola (2015), Theorem 1 (their 4Bρ is 2ρR with R = 2B); Dong, Durfee,
    Rogers (2020) for the profile.

    Args:
        log_likelihood_range: (a, b), chosen without the data; one number R stands for (−R, 0),
            which suits probabilities of discrete data. Every record's log likelihood is clipped
            into it, and the clipped model is what is sampled. A density's log likelihood changes
            with the units of the data.
        temper: ``"likelihood"``, or ``"posterior"`` to raise the prior to the power ρ as well (Wang
            et al., Algorithm 1), at the same cost.
        warmup_steps: adaptive steps of the No-U-Turn sampler before the state that is released.
        relative: clip the difference to the record's log likelihood at the start of the chain
            instead; :meth:`from_lipschitz`.

    Raises:
        ValueError: the range is not finite, or the prior is not proper: with a bounded likelihood
            no data can make up for that.

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
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ValueError(
                "log_likelihood_range must be a finite interval (lowest, highest) of one record's"
                f" log likelihood, got {given!r}: without a clip a single record can move the"
                " posterior by any amount, and no epsilon holds"
            )
        object.__setattr__(self, "log_likelihood_range", (low, high))
        if self.temper not in ("likelihood", "posterior"):
            raise ValueError(f'temper must be "likelihood" or "posterior", got {self.temper!r}')
        _require_warmup(self.warmup_steps)

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
        ``radius`` of the start of the chain.

        There a record's log likelihood differs by at most ``lipschitz · radius`` from that at the
        start. The difference is clipped to that, so that the guarantee holds whether the two
        numbers are right or not; if they are, the clip changes nothing.
        """
        _require_positive("lipschitz", lipschitz)
        _require_positive("radius", radius)
        bound = lipschitz * radius
        return cls((-bound, bound), temper=temper, warmup_steps=warmup_steps, relative=True)

    @property
    def _range(self) -> tuple[float, float]:
        assert isinstance(self.log_likelihood_range, tuple)
        return self.log_likelihood_range

    def check(self, model: Model) -> None:
        if isinstance(model, GLM) and model.strength == 0:
            raise ValueError(
                "prior_std is infinite: a bounded likelihood with a flat prior has no posterior to"
                " draw from. State a finite prior_std."
            )

    def needs_num_data(self, model: Model) -> bool:
        return False

    def event(self, model: Model, setting: Setting) -> BoundedRangeDpEvent:
        low, high = self._range
        return BoundedRangeDpEvent(
            setting.records_changed * (high - low) * setting.tempering * _ROUND_UP
        )

    def statement(self, model: Model, setting: Setting) -> Statement:
        return Statement(
            self.conditions(model, setting).proved, [_EXACT_SAMPLE.format(self.warmup_steps)]
        )

    def conditions(self, model: Model, setting: Setting) -> Statement:
        """The statement without that about the sampler."""
        low, high = self._range
        what = (
            "log likelihood, less that at the start of the chain,"
            if self.relative
            else "log likelihood"
        )
        return Statement(
            [
                f"every record's {what} is clipped into [{low:g}, {high:g}]; "
                + (
                    "prior and likelihood are"
                    if self.temper == "posterior"
                    else "the likelihood alone is"
                )
                + " tempered",
                (
                    "an exact draw is then the exponential mechanism, whose privacy loss spans at"
                    f" most {setting.records_changed} x {high - low:g} x rho (Wang, Fienberg, Smola"
                    " 2015; Dong, Durfee, Rogers 2020)"
                ),
            ],
            [],
        )

    def density(self, model: Model, data: tuple[Any, ...], setting: Setting) -> Density:
        """What an exact draw is drawn from."""
        whole = self.temper == "posterior"
        target = model.target(
            data, tempering=1.0 if whole else setting.tempering, max_grad_norm=math.inf
        )
        power = setting.tempering if whole else 1.0

        def potential(theta: Tensor) -> Tensor:
            return power * target.clipped_potential(theta, *self._range, self.relative)

        return Density(target.start, potential, langevin.gradient_of(potential))

    def draw(
        self, model: Model, data: tuple[Any, ...], setting: Setting, noise: GaussianNoise
    ) -> Tensor:
        density = self.density(model, data, setting)
        return no_u_turn(density.potential, density.start, self.warmup_steps)


@dataclass(frozen=True)
class StronglyLogConcave(Certificate):
    r"""A draw from a posterior whose prior is strongly log-concave and whose likelihood is
    log-concave and Lipschitz.

    .. math:: p(\theta \mid x) \propto p(\theta) \prod_i p(x_i \mid \theta)^\rho \ \text{ is } \
    G/\sqrt{\lambda}\text{-GDP},

    G = 2Lρ (replace one) or Lρ (add or remove one). Only the likelihood is tempered: tempering the
    prior too would give 2L√(ρ/λ), which is worse.

    Source: Gopi, Lee, Liu (2022), "Private convex optimization via exponential mechanism", Theorem
    4.1.

    Args:
        max_grad_norm: clip norm of one record's gradient of a :class:`~torch_dpbayes.ops.GLM`, for
            which L and λ are derived. What is sampled has the clipped gradient (a Huber loss in the
            linear predictor).
        lipschitz: L, asserted for other models: the largest norm of the gradient of one record's
            log likelihood over the whole support. It is not enforced: a clipped gradient of a
            general model is not the gradient of anything.
        strength: λ, asserted: −log prior is λ-strongly convex, λ > 0, and every record's loss is
            convex, in the unconstrained space.
        warmup_steps: adaptive steps of the No-U-Turn sampler before the state that is released.

    Raises:
        ValueError: a constant is out of range, or the prior is not strongly log-concave.

    **Privacy.** The event is ``MuGaussianDpEvent(G/√λ)``, for an *exact* draw: that the chain has
    converged is assumed, and no diagnostic of it is computed, for its value would be a release.
    :class:`~torch_dpbayes.ops.FiniteRunLangevin` costs the same and assumes nothing.
    """

    max_grad_norm: float = 1.0
    lipschitz: float | None = None
    strength: float | None = None
    warmup_steps: int = 1000

    def __post_init__(self) -> None:
        _require_positive("max_grad_norm", self.max_grad_norm)
        if (self.lipschitz is None) != (self.strength is None):
            raise ValueError(
                "lipschitz and strength are asserted together; for a GLM leave both out, they are"
                " derived"
            )
        if self.lipschitz is not None:
            _require_positive("lipschitz", self.lipschitz)
            _require_positive("strength", self.strength)
        _require_warmup(self.warmup_steps)

    def check(self, model: Model) -> None:
        if isinstance(model, GLM):
            if self.lipschitz is not None:
                raise ValueError(
                    "the constants of a GLM are derived, not asserted: leave out lipschitz= and"
                    " strength="
                )
            require_representable("max_grad_norm", self.max_grad_norm)
            if model.strength == 0:
                raise ValueError(
                    "prior_std is infinite, so the prior has strength 0 and the guarantee G/sqrt(0)"
                    " is none. State a finite prior_std."
                )
        elif self.lipschitz is None:
            raise ValueError(
                "for a model that is not a GLM the constants must be asserted:"
                " StronglyLogConcave(lipschitz=..., strength=...). Or write it as a dpb.ops.GLM."
            )
        else:
            model.require_unconstrained("StronglyLogConcave")

    def needs_num_data(self, model: Model) -> bool:
        return False

    def event(self, model: Model, setting: Setting) -> MuGaussianDpEvent:
        lipschitz, strength = self._constants(model)
        return MuGaussianDpEvent(
            setting.records_changed
            * setting.tempering
            * lipschitz
            / math.sqrt(strength)
            * _ROUND_UP
        )

    def statement(self, model: Model, setting: Setting) -> Statement:
        proved, assumed = self.conditions(model, setting)
        return Statement(proved, [*assumed, _EXACT_SAMPLE.format(self.warmup_steps)])

    def conditions(self, model: Model, setting: Setting) -> Statement:
        """The statement without that about the sampler."""
        lipschitz, strength = self._constants(model)
        numbers = (
            f"one record's gradient has norm at most L = {lipschitz:g}; -log prior is"
            f" {strength:.4g}-strongly convex"
        )
        theorem = (
            "an exact draw is then (G / sqrt(strength))-Gaussian differentially private (Gopi, Lee,"
            " Liu 2022)"
        )
        if isinstance(model, GLM):
            return Statement([f"{numbers} ({model!r} enforces it by clipping)", theorem], [])
        return Statement(
            [theorem],
            [
                f"constants asserted by the caller, neither checked nor enforced: {numbers}; every"
                " record's loss is convex"
            ],
        )

    def density(self, model: Model, data: tuple[Any, ...], setting: Setting) -> Density:
        """What an exact draw is drawn from."""
        clip = self.max_grad_norm if self.lipschitz is None else math.inf
        target = model.target(data, tempering=setting.tempering, max_grad_norm=clip)
        return Density(target.start, target.potential, target.gradient)

    def draw(
        self, model: Model, data: tuple[Any, ...], setting: Setting, noise: GaussianNoise
    ) -> Tensor:
        density = self.density(model, data, setting)
        return no_u_turn(density.potential, density.start, self.warmup_steps)

    def _constants(self, model: Model) -> tuple[float, float]:
        if self.lipschitz is not None and self.strength is not None:
            return self.lipschitz, self.strength
        assert isinstance(model, GLM)
        return model.lipschitz(self.max_grad_norm), model.strength


@dataclass(frozen=True)
class RenyiClose(Certificate):
    r"""A draw by a sampler without an accept step, whose law is close to an exact draw's in Rényi
    divergence.

    .. math:: D_\beta(Q \| P) \le \eta \quad \text{and} \quad D_\beta(P \| Q) \le \eta

    for the law Q of the draw and the target P, on every data set that could occur. Both directions
    are needed: with the first alone Q may leave out sets that P reaches, and give the data away
    there. At order ∞ the log ratio of the densities is within ±η, and the event of an exact draw
    grows from a range b to b + 4η, or from μ to μ + 4Φ⁻¹(e^η/(1+e^η)). At a finite order there is a
    δ > 0 at every ε: see ``delta``.

    Sources: Ganesh and Talwar (2020), "Faster differentially private samplers via Rényi divergence
    analysis of discretized Langevin MCMC". Their bounds for the overdamped and the underdamped
    chain hide their constants and certify nothing by themselves.

    Args:
        target: what is known about an exact draw, and which density that is: a :class:`Bounded` or
            a :class:`StronglyLogConcave`.
        sampler: :class:`~torch_dpbayes.ops.Overdamped`, :class:`~torch_dpbayes.ops.Underdamped` or
            :class:`~torch_dpbayes.ops.NoseHoover`.
        divergence: η, asserted.
        order: β > 1, asserted.
        delta: at a finite order, the δ of this release, public: its guarantee is one pair (ε, δ). n
            draws use up nδ of the accountant's delta, so it should be a small part of that. Refused
            at order ∞, which needs none.

    Raises:
        ValueError: a constant is out of range.

    **Privacy.** At order ∞ the event is ``BoundedRangeDpEvent`` or ``MuGaussianDpEvent``; at a
    finite order it is ``PureDpEvent(ε)`` and ``FailureDpEvent(δ)``, with the pair of
    :meth:`single_guarantee`. Closeness is assumed; no diagnostic of it is computed, for its value
    would be a release.
    """

    target: Bounded | StronglyLogConcave
    sampler: Sampler
    divergence: float
    order: float = math.inf
    delta: float | None = None

    def __post_init__(self) -> None:
        _require_target(self.target)
        _require_sampler(self.sampler)
        if (
            isinstance(self.divergence, bool)
            or not isinstance(self.divergence, int | float)
            or not 0 <= self.divergence < math.inf
        ):
            raise ValueError(f"divergence must be finite and not negative, got {self.divergence!r}")
        if (
            isinstance(self.order, bool)
            or not isinstance(self.order, int | float)
            or not self.order > 1
        ):
            raise ValueError(
                "order must be above 1 (math.inf for a bound on the ratio of the densities), got"
                f" {self.order!r}"
            )
        if self.order == math.inf and self.delta is not None:
            raise ValueError(
                "at order infinity the guarantee has no delta of its own: leave out delta="
            )
        if self.order < math.inf:
            if self.delta is None:
                raise ValueError(
                    "at a finite order the guarantee is a pair (epsilon, delta): state delta=, as"
                    " RenyiClose(..., order=50, delta=1e-6)"
                )
            check_delta(self.delta)

    def check(self, model: Model) -> None:
        self.target.check(model)

    def needs_num_data(self, model: Model) -> bool:
        return False

    def event(self, model: Model, setting: Setting) -> DpEvent:
        exact = self.target.event(model, setting)
        return (
            close.ratio_bounded(exact, self.divergence)
            if self.order == math.inf
            else _event_of_pair(*self.single_guarantee(model, setting))
        )

    def single_guarantee(self, model: Model, setting: Setting) -> tuple[float, float]:
        """(ε, δ) of one draw at a finite order."""
        if self.delta is None:
            raise ValueError("at order infinity the guarantee is the event")
        return (
            close.renyi_close(
                self.target.event(model, setting), self.divergence, self.order, self.delta
            ),
            self.delta,
        )

    def statement(self, model: Model, setting: Setting) -> Statement:
        proved, assumed = self.target.conditions(model, setting)
        if self.order < math.inf:
            proved = [*proved, _SINGLE.format(*self.single_guarantee(model, setting))]
        closeness = (
            f"the law of the last state of {self.sampler!r} is within Renyi divergence"
            f" {self.divergence:g} of order {self.order:g} of an exact draw, in both directions, on"
            f" every data set; {_NOTHING_CHECKED}"
        )
        return Statement(proved, [*assumed, closeness])

    def draw(
        self, model: Model, data: tuple[Any, ...], setting: Setting, noise: GaussianNoise
    ) -> Tensor:
        return self.sampler.draw(self.target.density(model, data, setting), noise)


@dataclass(frozen=True)
class TotalVariationClose(Certificate):
    r"""A draw whose law is within total variation distance ξ of an exact draw's, on every data set
    that could occur.

    .. math:: \|Q - P\|_{TV} \le \xi \quad \Rightarrow \quad \delta_Q(\varepsilon) \le
    \delta_P(\varepsilon) + (1 + e^\varepsilon)\,\xi

    Source: Wang, Fienberg and Smola (2015), Proposition 10.

    Args:
        target: what is known about an exact draw, and which density that is: a :class:`Bounded` or
            a :class:`StronglyLogConcave`.
        xi: ξ, asserted. It has to be far below δ: a converged chain is hardly ever known to be that
            close.
        delta: the δ of this release, public: its guarantee is one pair (ε, δ). n draws use up nδ of
            the accountant's delta.
        sampler: as for :class:`RenyiClose`. None: the No-U-Turn chain of ``target``.

    Raises:
        ValueError: a constant is out of range, or ``xi`` too large for ``delta``.

    **Privacy.** The event is ``PureDpEvent(ε)`` and ``FailureDpEvent(δ)``, with the pair of
    :meth:`single_guarantee`. Closeness is assumed; no diagnostic of it is computed, for its value
    would be a release.
    """

    target: Bounded | StronglyLogConcave
    xi: float
    delta: float
    sampler: Sampler | None = None

    def __post_init__(self) -> None:
        _require_target(self.target)
        if self.sampler is not None:
            _require_sampler(self.sampler)
        check_delta(self.delta)
        _require_positive("xi", self.xi)
        if 2 * self.xi >= self.delta:
            raise ValueError(
                f"xi = {self.xi:g} must be below delta / 2 = {self.delta / 2:g}: delta(epsilon) is"
                " at least (1 + e^epsilon) xi"
            )

    def check(self, model: Model) -> None:
        self.target.check(model)

    def needs_num_data(self, model: Model) -> bool:
        return False

    def event(self, model: Model, setting: Setting) -> DpEvent:
        return _event_of_pair(*self.single_guarantee(model, setting))

    def single_guarantee(self, model: Model, setting: Setting) -> tuple[float, float]:
        """(ε, δ) of one draw."""
        return (
            close.total_variation_close(self.target.event(model, setting), self.xi, self.delta),
            self.delta,
        )

    def statement(self, model: Model, setting: Setting) -> Statement:
        proved, assumed = self.target.conditions(model, setting)
        chain = (
            f"{self.sampler!r}"
            if self.sampler
            else f"the No-U-Turn sampler after {self.target.warmup_steps} warm-up steps"
        )
        closeness = (
            f"the law of the last state of {chain} is within total variation distance {self.xi:g}"
            " of an exact draw, on every data set; "
        )
        return Statement(
            [*proved, _SINGLE.format(*self.single_guarantee(model, setting))],
            [*assumed, closeness + _NOTHING_CHECKED],
        )

    def draw(
        self, model: Model, data: tuple[Any, ...], setting: Setting, noise: GaussianNoise
    ) -> Tensor:
        if self.sampler is None:
            return self.target.draw(model, data, setting, noise)
        return self.sampler.draw(self.target.density(model, data, setting), noise)


_NOTHING_CHECKED = "nothing was checked, because a diagnostic would itself depend on the records"
_SINGLE = (
    "if what is assumed holds, one draw is (epsilon, delta) = ({:.5g}, {:g})-differentially private"
)
_EXACT_SAMPLE = (
    "the draw is exact: the No-U-Turn sampler has converged after {} warm-up steps, on every data"
    " set. Nothing was checked, because a diagnostic would itself depend on the records"
)


class StepTooLarge(ValueError):
    """A step size above 2/M."""


def _event_of_pair(epsilon: float, delta: float) -> ComposedDpEvent:
    """What dominates every (ε, δ)-differentially private release, exactly (Kairouz, Oh,
    Viswanath 2015, Theorem 3.3).
    """
    return ComposedDpEvent([PureDpEvent(epsilon), FailureDpEvent(delta)])


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
        return sensitivity * math.sqrt(h / 2 * forgotten) * _ROUND_UP
    with np.errstate(divide="ignore"):
        logs = np.log1p(-gaps)
    # C_i, the product of all later contractions
    later = np.exp(np.concatenate([np.cumsum(logs[:0:-1])[::-1], [0.0]]))
    return (
        sensitivity
        * float(np.sum(steps * later) / math.sqrt(2 * np.sum(steps * later**2)))
        * _ROUND_UP
    )


def _require_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value!r}")


def _require_target(target: Any) -> None:
    if not isinstance(target, Bounded | StronglyLogConcave):
        raise TypeError(
            "target must be the certificate of an exact draw, Bounded or StronglyLogConcave; got"
            f" {target!r}"
        )


def _require_sampler(sampler: Any) -> None:
    if not callable(getattr(sampler, "draw", None)) or isinstance(sampler, type | Certificate):
        raise TypeError(
            "sampler must be one of dpb.ops, as Underdamped(steps=1000, step_size=0.1); got"
            f" {sampler!r}"
        )


def _require_warmup(steps: Any) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"warmup_steps must be a positive whole number, got {steps!r}")
