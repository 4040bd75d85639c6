"""The base of all certificates of one draw. For a new one copy ``bounded.py``."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
from scipy import special
from torch import Tensor

from ...accounting.dominating_pairs import Array
from ...accounting.events import (
    BoundedRangeDpEvent,
    ComposedDpEvent,
    DpEvent,
    FailureDpEvent,
    MuGaussianDpEvent,
    Neighboring,
    PureDpEvent,
    check_delta,
    neighboring_relation,
)
from ...errors import ArgumentTypeError, CertificateError
from ...noise import GaussianNoise, check_positive
from ..langevin import Overdamped, Underdamped
from ..models import Constants, Data, Limits, Model
from ..nuts import no_u_turn

ExactEvent = BoundedRangeDpEvent | MuGaussianDpEvent  # what an exact draw is charged for
ROUND_UP = 1 + 1e-9  # of a cost computed in floats
_NOTHING_CHECKED = "nothing was checked, because a diagnostic would itself depend on the records"
_LEAST_DELTA = 1e-290  # below it the tail of a Gaussian leaves floating point
_GRID, _ROUNDS = np.arange(1, 33) / 32, 8  # of an interval that is refined: to 1e-12 of it


class Setting(NamedTuple):
    """The public numbers besides the model on which a certificate's constants depend."""

    tempering: float  # ρ, the factor of every record's log likelihood
    num_data: int | None  # exact under replace-one, an upper bound under add-or-remove-one
    neighboring: Neighboring

    @property
    def records_changed(self) -> int:
        """The number of records in which neighbours differ: replacing one removes one and adds
        one.
        """
        return 2 if neighboring_relation(self.neighboring) == "replace_one" else 1


class Statement(NamedTuple):
    """A guarantee in words."""

    proved: list[str]
    assumed: list[str]


class Certificate(ABC):
    """A proof that one draw is private. A subclass is a frozen dataclass of public constants."""

    @abstractmethod
    def check(self, model: Model) -> None:
        """Refuse a model for which the certificate does not hold."""

    def needs_num_data(self, model: Model) -> bool:
        return False

    @abstractmethod
    def event(self, model: Model, setting: Setting) -> DpEvent:
        """The event that one draw is charged as."""

    @abstractmethod
    def statement(self, model: Model, setting: Setting) -> Statement:
        """A text that says what was proved and what was assumed."""

    @abstractmethod
    def draw(self, model: Model, data: Data, setting: Setting, noise: GaussianNoise) -> Tensor:
        """One draw, flat and unconstrained; this is the only use of the data."""


class ExactDraw(Certificate):
    """A certificate for a draw from the posterior itself. The No-U-Turn sampler makes it, and its
    convergence is assumed.
    """

    warmup_steps: int

    @abstractmethod
    def event(self, model: Model, setting: Setting) -> ExactEvent: ...

    @abstractmethod
    def conditions(self, model: Model, setting: Setting) -> Statement:
        """A text that says what was proved and assumed, without the sampler."""

    @abstractmethod
    def limits(self, setting: Setting) -> Limits:
        """The bound of a record's term in the target density."""

    def statement(self, model: Model, setting: Setting) -> Statement:
        proved, assumed = self.conditions(model, setting)
        converged = (
            "the draw is exact: the No-U-Turn sampler has converged after"
            f" {self.warmup_steps} warm-up steps, on every data set; {_NOTHING_CHECKED}"
        )
        return Statement(proved, [*assumed, converged])

    def draw(self, model: Model, data: Data, setting: Setting, noise: GaussianNoise) -> Tensor:
        density = model.target(data, self.limits(setting))
        return no_u_turn(density.potential, density.start, self.warmup_steps)


class Asserted(Certificate):
    """A certificate whose constants are derived for a GLM, and asserted for other models."""

    max_grad_norm: float
    lipschitz: float | None
    strength: float | None

    def _constants(self, model: Model) -> Constants:
        """Those asserted, of which smoothness is none, or those derived."""
        if self.lipschitz is not None and self.strength is not None:
            return Constants(self.lipschitz, self.strength, math.nan, math.nan)
        derived = model.derived_constants(self.max_grad_norm)
        assert derived is not None
        return derived

    def check(self, model: Model) -> None:
        if (model.derived_constants(self.max_grad_norm) is None) == (self.lipschitz is None):
            raise CertificateError(
                f"{type(self).__name__}: pass its constants for a model that is not a GLM; leave"
                " them out for a GLM or Softmax, where they are derived."
            )
        if self.lipschitz is not None:
            model.require_unconstrained(type(self).__name__)

    def _check_constants(self, **others: float | None) -> None:
        """``max_grad_norm``, and ``lipschitz`` with the others: all or none."""
        check_positive("max_grad_norm", self.max_grad_norm)
        missing = [name for name, v in {"lipschitz": self.lipschitz, **others}.items() if v is None]
        if 0 < len(missing) <= len(others):
            raise CertificateError(
                f"pass all asserted constants: {', '.join(missing)} missing. Leave all out for a"
                " GLM, whose constants are derived."
            )
        if not missing:
            check_positive("lipschitz", self.lipschitz)
            if (smoothness := others.get("smoothness")) is not None:
                check_positive("smoothness", smoothness)


class TooFar(CertificateError):
    """The sampler is not close enough to its target for any ε at this δ."""


class CloseDraw(Certificate):
    """A certificate for a draw Q that is close to an exact draw P of ``target``. With neighbours P'
    and Q', an event says what is known of (P, P'); closeness of (P, Q) and (P', Q') is assumed. No
    triangle inequality for privacy is free: each bound is larger than the event of (P, P').
    """

    target: ExactDraw
    sampler: Overdamped | Underdamped | None  # None: the No-U-Turn chain of the target
    delta: float

    @abstractmethod
    def epsilon_given(self, event: ExactEvent) -> float:
        """ε of (Q, Q') at ``delta``, for the event of (P, P'). TooFar: none is finite."""

    @abstractmethod
    def closeness(self) -> str:
        """The assumed distance between Q and the exact draw, in words."""

    def check(self, model: Model) -> None:
        self.target.check(model)

    def single_guarantee(self, model: Model, setting: Setting) -> tuple[float, float]:
        """(ε, δ) of one draw."""
        return self.epsilon_given(self.target.event(model, setting)), self.delta

    def event(self, model: Model, setting: Setting) -> DpEvent:
        """Two charges that dominate every release with this (ε, δ) (Kairouz, Oh, Viswanath 2015,
        Theorem 3.3).
        """
        epsilon, delta = self.single_guarantee(model, setting)
        return ComposedDpEvent([PureDpEvent(epsilon), FailureDpEvent(delta)])

    def statement(self, model: Model, setting: Setting) -> Statement:
        proved, assumed = self.target.conditions(model, setting)
        epsilon, delta = self.single_guarantee(model, setting)
        pair = (
            f"if what is assumed holds, one draw is (epsilon, delta) = ({epsilon:.5g}, {delta:g})"
            "-differentially private"
        )
        chain = self.sampler or (
            f"the No-U-Turn sampler after {self.target.warmup_steps} warm-up steps"
        )
        close = (
            f"the law of the last state of {chain} is within {self.closeness()} of an exact draw,"
            f" on every data set; {_NOTHING_CHECKED}"
        )
        return Statement([*proved, pair], [*assumed, close])

    def draw(self, model: Model, data: Data, setting: Setting, noise: GaussianNoise) -> Tensor:
        if self.sampler is None:
            return self.target.draw(model, data, setting, noise)
        return self.sampler.draw(model.target(data, self.target.limits(setting)), noise)

    def _check_parts(self) -> None:
        check_delta(self.delta)
        if not isinstance(self.target, ExactDraw):
            raise ArgumentTypeError(
                "target must be the certificate of an exact draw, Bounded or StronglyLogConcave;"
                f" got {self.target!r}."
            )
        if not isinstance(self.sampler, Overdamped | Underdamped | None):
            raise ArgumentTypeError(
                "sampler must be one of dpb.ops, as Underdamped(steps=1000, step_size=0.1); got"
                f" {self.sampler!r}."
            )


def exact_delta(event: ExactEvent, epsilon: Array) -> Array:
    """δ of an exact draw at each ε ≥ 0, rounded up: Dong, Durfee, Rogers (2020), or Balle, Wang
    (2018), Theorem 8, as ``accounting.gdp.gaussian_delta`` computes it.
    """
    if isinstance(event, BoundedRangeDpEvent):
        gap = np.maximum(event.epsilon - epsilon, 0.0)
        return np.expm1(-gap / 2) ** 2 / -np.expm1(-event.epsilon)
    half, ratio = event.mu / 2, epsilon / event.mu
    above = special.log_ndtr(half - ratio)
    below = epsilon + special.log_ndtr(-half - ratio)
    error = 1e-15 * (1 + epsilon - above)
    return np.exp(above) * -np.expm1(np.minimum(below - above - error, 0.0)) * (1 + 1e-12 + error)


def exact_epsilon(event: ExactEvent, delta: Array) -> Array:
    """ε of an exact draw at each δ, rounded up; infinite where δ is next to 0."""
    if isinstance(event, BoundedRangeDpEvent):
        width = np.full_like(delta, event.epsilon)
    else:  # at which the first term of δ alone is no larger
        width = event.mu**2 / 2 - event.mu * special.ndtri(np.maximum(delta, _LEAST_DELTA))
        width = np.maximum(width, 0.0)
    low = np.zeros_like(width)
    for _ in range(_ROUNDS):
        points = low + np.multiply.outer(_GRID, width)
        above = np.add.reduce(exact_delta(event, points) > delta, 0)
        width = width / len(_GRID)
        low = low + width * np.minimum(above, len(_GRID) - 1)
    return np.where(delta < _LEAST_DELTA, np.inf, (low + width) * (1 + 1e-10))
