"""The base of all certificates of one draw. For a new one copy ``bounded.py``."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor

from ...accounting.events import (
    BoundedRangeDpEvent,
    DpEvent,
    MuGaussianDpEvent,
    Neighboring,
    neighboring_relation,
)
from ...errors import CertificateError
from ...noise import GaussianNoise, check_positive
from ..models import Constants, Data, Limits, Model
from ..nuts import no_u_turn

ExactEvent = BoundedRangeDpEvent | MuGaussianDpEvent  # what an exact draw is charged for
ROUND_UP = 1 + 1e-9  # of a cost computed in floats
NOTHING_CHECKED = "nothing was checked, because a diagnostic would itself depend on the records"


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
            f" {self.warmup_steps} warm-up steps, on every data set; {NOTHING_CHECKED}"
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
