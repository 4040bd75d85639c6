"""Public constants of a run, and what their values may be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, Required, TypedDict

import torch
from torch import Tensor

from ..accounting import events
from ..accounting.accountant import PrivacyAccountant
from ..errors import ArgumentError, ArgumentTypeError
from .priors import LogPrior, PriorStd

LARGEST_LR = 1e30
LARGEST_NOISE_MULTIPLIER = 1e30


class Options(TypedDict, total=False):
    """What every private optimizer takes, for signatures that hand it on; :class:`DPSGLD
    <torch_dpbayes.optim.DPSGLD>` says what each means.
    """

    num_data: Required[int]
    expected_batch_size: Required[float]
    max_grad_norm: float | None
    noise_multiplier: float
    temperature: float | None
    prior_std: PriorStd
    prior_mean: float
    log_prior: LogPrior | None
    sampling: str | None
    accountant: PrivacyAccountant | None
    generator: torch.Generator | None
    assume_independent_records: bool


@dataclass(frozen=True)
class Settings:
    """What holds for all parameter groups, checked.

    Args:
        num_data, expected_batch_size, max_grad_norm, noise_multiplier, temperature, sampling: as
            for :class:`~torch_dpbayes.optim.base.PrivateOptimizer`. ``temperature`` = None: that of
            the noise.

    Raises:
        ValueError, TypeError: one of them is out of range.
    """

    num_data: int
    expected_batch_size: float
    max_grad_norm: float
    noise_multiplier: float
    temperature: float | None
    sampling: str | None

    def __post_init__(self) -> None:
        n = self.num_data
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ArgumentError(
                f"num_data must be a positive integer, the public number of records; got {n!r}"
            )
        require_positive("expected_batch_size", self.expected_batch_size)
        if float(self.expected_batch_size) > n:
            raise ArgumentError(
                f"expected_batch_size = {self.expected_batch_size} is larger than num_data = {n}:"
                " their ratio is the sampling rate"
            )
        require_positive("max_grad_norm", self.max_grad_norm)
        if self.max_grad_norm < 1e-12:
            raise ArgumentError(
                f"max_grad_norm = {self.max_grad_norm} is below what float32 norms can resolve; use"
                " at least 1e-12"
            )
        require_not_negative("noise_multiplier", self.noise_multiplier)
        z = self.noise_multiplier
        if z and not events.gaussian_noise_multiplier(z) < LARGEST_NOISE_MULTIPLIER:
            raise ArgumentError(
                f"noise_multiplier = {z:g} is noise std / clip bound, and so large that steps would"
                f" overflow: take one below {LARGEST_NOISE_MULTIPLIER:g}"
            )
        if self.temperature is not None:
            require_not_negative("temperature", self.temperature)
            object.__setattr__(self, "temperature", float(self.temperature))
        if self.sampling not in (None, "poisson", "recordwise"):
            raise ArgumentError(
                f'sampling must be "poisson", "recordwise" or None, got {self.sampling!r}'
            )
        for name in ("expected_batch_size", "max_grad_norm", "noise_multiplier"):
            object.__setattr__(self, name, float(getattr(self, name)))


SETTINGS = tuple(Settings.__dataclass_fields__)


class Defaults(dict[str, Any]):
    """Defaults of an optimizer's parameter groups, which answer a schedule that asks for a momentum
    to cycle.

    Args:
        values: the defaults.
        of: the optimizer's name.
    """

    def __init__(self, values: dict[str, Any], of: str) -> None:
        super().__init__(values)
        self.of = of

    def __contains__(self, name: object) -> bool:
        # OneCycleLR and CyclicLR ask for Adam's where they found no momentum, and where they did
        if name == "betas" and "momentum" not in self:
            raise ArgumentError(
                f"{self.of} has no momentum that a schedule could cycle: write cycle_momentum=False"
            )
        return super().__contains__(name)


def require_number(name: str, value: Any) -> None:
    """Raise if ``value`` is not a real number or a tensor."""
    if not isinstance(value, (float, int, Tensor, Real)):
        raise ArgumentTypeError(f"{name} must be a number, got {value!r}")


def require_positive(name: str, value: float, *, allow_infinite: bool = False) -> None:
    """Raise if ``value`` is not a positive number."""
    require_number(name, value)
    if not value > 0 or (math.isinf(value) and not allow_infinite):
        raise ArgumentError(
            f"{name} must be positive{'' if allow_infinite else ' and finite'}, got {value}"
        )


def require_not_negative(name: str, value: float) -> None:
    """Raise if ``value`` is negative or not finite."""
    require_number(name, value)
    if not 0 <= value < math.inf:
        raise ArgumentError(f"{name} must be zero or positive and finite, got {value}")
