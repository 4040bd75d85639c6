"""What every certificate says about one draw, and what it may depend on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from torch import Tensor

from ...accounting.events import DpEvent, Neighboring, neighboring_relation
from ...noise import GaussianNoise
from ..models import Model

ROUND_UP = 1 + 1e-9  # of a cost computed in floats
NOTHING_CHECKED = "nothing was checked, because a diagnostic would itself depend on the records"


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
