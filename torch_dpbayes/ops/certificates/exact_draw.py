"""What certificates of an exact draw share: the No-U-Turn chain that makes it."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor

from ...accounting.events import BoundedRangeDpEvent, MuGaussianDpEvent
from ...errors import ArgumentTypeError
from ...noise import GaussianNoise
from ..models import Density, Model
from ..nuts import no_u_turn
from .certificate import NOTHING_CHECKED, Certificate, Setting, Statement


class ExactDraw(Certificate):
    """A certificate for a draw from the posterior itself. The No-U-Turn sampler makes it, whose
    convergence is assumed.
    """

    warmup_steps: int

    @abstractmethod
    def event(self, model: Model, setting: Setting) -> BoundedRangeDpEvent | MuGaussianDpEvent:
        """What one draw is charged for."""

    @abstractmethod
    def conditions(self, model: Model, setting: Setting) -> Statement:
        """What was proved and assumed, the sampler aside."""

    @abstractmethod
    def density(self, model: Model, data: tuple[Any, ...], setting: Setting) -> Density:
        """What a draw is drawn from."""

    def needs_num_data(self, model: Model) -> bool:
        return False

    def statement(self, model: Model, setting: Setting) -> Statement:
        proved, assumed = self.conditions(model, setting)
        converged = (
            "the draw is exact: the No-U-Turn sampler has converged after"
            f" {self.warmup_steps} warm-up steps, on every data set; {NOTHING_CHECKED}"
        )
        return Statement(proved, [*assumed, converged])

    def draw(
        self, model: Model, data: tuple[Any, ...], setting: Setting, noise: GaussianNoise
    ) -> Tensor:
        density = self.density(model, data, setting)
        return no_u_turn(density.potential, density.start, self.warmup_steps)


def require_exact(target: Any) -> None:
    """Refuse what is no certificate of an exact draw."""
    if not isinstance(target, ExactDraw):
        raise ArgumentTypeError(
            "target must be the certificate of an exact draw, Bounded or StronglyLogConcave; got"
            f" {target!r}."
        )
