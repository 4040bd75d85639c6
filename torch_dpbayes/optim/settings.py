"""The settings of a private optimizer, and how lr, temperature, clip norm and noise follow from
each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, Literal, Required, TypedDict

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..accounting import events
from ..accounting.accountant import PrivacyAccountant
from ..errors import ArgumentError, ArgumentTypeError
from ..release import Release

LogPrior = Callable[[Mapping[str, Tensor]], Tensor]
OneStd = float | Literal["fan_in"]
PriorStd = OneStd | Mapping[str, OneStd]
_LARGEST_NOISE_MULTIPLIER = 1e30
# of all groups; they determine the distribution of a release
NAMES = tuple("num_data expected_batch_size max_grad_norm noise_multiplier temperature".split())
_WASTE = 1.02  # above this ratio to the floor, the sampler's own noise counts as larger


class Options(TypedDict, total=False):
    """Arguments of every private optimizer, for signatures that pass them on; :class:`DPSGLD
    <torch_dpbayes.optim.DPSGLD>` explains each.
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
    """The checked arguments of every private optimizer; :class:`DPSGLD
    <torch_dpbayes.optim.DPSGLD>` explains each.

    Raises:
        ValueError, TypeError: an argument is out of range, or arguments contradict each other.
    """

    num_data: int
    expected_batch_size: float
    max_grad_norm: float | None = None
    noise_multiplier: float = 0.0
    temperature: float | None = None
    prior_std: PriorStd = 1.0
    prior_mean: float = 0.0
    log_prior: LogPrior | None = None
    sampling: str | None = None
    accountant: PrivacyAccountant | None = None
    generator: torch.Generator | None = None
    assume_independent_records: bool = False

    def __post_init__(self) -> None:
        n, z = events.positive_count(self.num_data, "num_data"), self.noise_multiplier
        object.__setattr__(self, "num_data", n)
        for name in ("expected_batch_size", "max_grad_norm", "noise_multiplier", "temperature"):
            if (value := getattr(self, name)) is not None:
                rule = "be at least 0 and finite"
                found = events.within(value, name, lambda x: 0 <= x < math.inf, rule)
                object.__setattr__(self, name, found)
        batch = self.expected_batch_size
        if batch > n:
            raise ArgumentError(
                f"expected_batch_size = {batch:g} is larger than num_data = {n}: their ratio is the"
                " sampling rate"
            )
        # so that sums of squares over 2¹⁴ records are finite in float32
        clip = 1.0 if self.max_grad_norm is None else self.max_grad_norm
        if not 1e-12 <= clip <= 1e12 or batch < 1e-6:
            raise ArgumentError(
                f"max_grad_norm = {clip}, expected_batch_size = {batch}: sums would"
                " overflow in float32. Use a clip norm from 1e-12 to 1e12, batches of 1e-6 or more"
            )
        if z and not events.gaussian_noise_multiplier(z) < _LARGEST_NOISE_MULTIPLIER:
            raise ArgumentError(
                f"noise_multiplier = {z:g} (noise std / clip bound) is too large, steps would"
                f" overflow: use a value below {_LARGEST_NOISE_MULTIPLIER:g}"
            )
        if self.sampling not in (None, "poisson", "recordwise"):
            raise ArgumentError(
                f'sampling must be "poisson", "recordwise" or None, got {self.sampling!r}'
            )
        if self.log_prior is not None and not callable(self.log_prior):
            raise ArgumentTypeError(f"log_prior must be a function, got {self.log_prior!r}")
        require_flag("assume_independent_records", self.assume_independent_records)


def read_only(name: str, doc: str) -> Any:
    """A property that shows the attribute ``name``: steps are charged for its value."""
    return property(attrgetter(name), doc=doc)


class OwnNoise(Optimizer):
    """The public constants of a private optimizer, and the noise that follows from them."""

    _constants: Settings
    release: Release
    _derives_bound: bool
    # whether the temperature stays the same under larger noise: friction or step size adapts
    _holds_temperature = False
    _matches_friction = False  # whether friction adapts: then it must be at most 1

    # -- the sampler's own noise: what an algorithm's file may override ----------------------------

    def _friction(self, group: dict[str, Any]) -> float:
        """a of a sampler whose own noise has the variance 2aTη/N in a step: 1 for overdamped
        Langevin dynamics, 1 − momentum for underdamped ones. The next methods use it.
        """
        return 1.0

    def _group_langevin_noise_multiplier(self, group: dict[str, Any]) -> float:
        """z_L = (B/C)·√(2aT/(ηN)) of a group whose lr η is positive."""
        c, heat = self._constants, 2 * self._friction(group) * self._temperature_of(group)
        scale = c.expected_batch_size / self.max_grad_norm
        return scale * math.sqrt(heat / (group["lr"] * c.num_data))

    def _matching_friction(self, group: dict[str, Any], noise_multiplier: float) -> float:
        """ηN z²C²/(2TB²): the friction with which this noise samples the temperature T."""
        return self._heat(group, noise_multiplier) / (2 * self._temperature_of(group))

    def _heat(self, group: dict[str, Any], noise_multiplier: float) -> float:
        """ηN z²C²/B²."""
        c = self._constants
        ratio = noise_multiplier * self.max_grad_norm / c.expected_batch_size
        return float(group["lr"] * c.num_data * ratio**2)

    def _free_lr(self, group: dict[str, Any]) -> float:
        """The largest lr whose z_L is at least the floor, which is positive here."""
        c = self._constants
        ratio = c.expected_batch_size / (self.max_grad_norm * c.noise_multiplier)
        temperature = 1.0 if c.temperature is None else c.temperature
        return 2 * self._friction(group) * temperature * ratio**2 / c.num_data

    def _temperature_of(self, group: dict[str, Any]) -> float:
        """T of a group. If it is not stated, the T at which z_L is the floor at the current lr."""
        c = self._constants
        if c.temperature is None:
            return self._heat(group, c.noise_multiplier) / (2 * self._friction(group))
        return c.temperature

    def _multiplier(self, group: dict[str, Any]) -> float:
        """z of a group. At lr = 0 the gradient is not used: z is the floor, or infinite without a
        floor, so that nothing is released.
        """
        own, floor = self._langevin(group), self._constants.noise_multiplier
        if not (lr := group["lr"]) > 0:
            return floor or math.inf
        used = max(own, floor)
        if self._matches_friction and (needed := self._matching_friction(group, used)) > 1 + 1e-9:
            raise ArgumentError(
                f"lr = {lr} at noise multiplier {used:.4g} needs a friction of {needed:.4g} > 1."
                f" Use lr <= {lr / needed:.4g}, less noise (a larger expected_batch_size, a smaller"
                " max_grad_norm), or a higher temperature."
            )
        return used

    def _langevin(self, group: dict[str, Any]) -> float:
        self._require_group(group)
        if not group["lr"] > 0:
            return math.inf
        if self._constants.temperature is None:
            return self._constants.noise_multiplier
        noise_multiplier = self._group_langevin_noise_multiplier(group)
        if not noise_multiplier < _LARGEST_NOISE_MULTIPLIER:
            raise ArgumentError(
                f"lr = {group['lr']} is so small that the sampler's own noise overflows (noise"
                f" multiplier {noise_multiplier:.3g}): use a larger lr, lr=0 to keep the group"
                " unchanged, or temperature=0."
            )
        return noise_multiplier

    def _trained_groups(self) -> list[dict[str, Any]]:
        """Groups that are not frozen; all groups if all are frozen."""
        requires_grad = attrgetter("requires_grad")
        groups = self.param_groups
        return [g for g in groups if any(map(requires_grad, g["params"]))] or groups

    def _require_group(self, group: dict[str, Any]) -> None:
        """Raise unless a group's options are valid."""

    # -- public constants and reports --------------------------------------------------------------

    accountant: Final[PrivacyAccountant] = read_only(
        "release.accountant", "Steps are charged to it."
    )
    num_data: Final[int] = read_only("_constants.num_data", "N, the public number of records.")
    expected_batch_size: Final[float] = read_only(
        "_constants.expected_batch_size", "B, the public expected batch size."
    )
    max_grad_norm: Final[float] = read_only(
        "_constants.max_grad_norm", "C, the clip norm of one record's gradient, given or derived."
    )
    derives_clip_norm: Final[bool] = read_only(
        "_derives_bound", "Whether C is derived from lr, temperature and noise."
    )
    noise_multiplier: Final[float] = read_only(
        "_constants.noise_multiplier", "z_min, the floor under the noise multiplier."
    )
    temperature: Final[float | None] = read_only(
        "_constants.temperature",
        "T of the target ∝ exp(−U/T); None if lr, clip norm and noise determine it.",
    )
    sampling: Final[str | None] = read_only(
        "release.sampling",
        'The sampling scheme, such as "poisson" or "recordwise"; None if it is not stated.',
    )
    independence: Final[str] = read_only(
        "release.source.independence",
        "How records are kept apart: by construction, or as the user vouches.",
    )

    @property
    def langevin_noise_multiplier(self) -> float:
        """z_L: the sampler's own noise in units of C; the smallest over the groups. Infinite if
        every lr is 0.
        """
        return min(map(self._langevin, self._trained_groups()))

    @property
    def effective_noise_multiplier(self) -> float:
        """The current z, for which a step is charged; the smallest over the groups."""
        return min(map(self._multiplier, self._trained_groups()))

    @property
    def effective_temperature(self) -> float:
        """Temperature of the current Gaussian noise, ηN z²C²/(2aB²); the largest over the groups.

        For q < 1 the minibatch noise is added, so this is a lower bound on the temperature of the
        samples.
        """
        found = [0.0]
        for group in self._trained_groups():
            if group["lr"] > 0:
                heat = self._heat(group, self._multiplier(group))
                is_held = self._holds_temperature
                own = self._temperature_of(group) if is_held else heat / (2 * self._friction(group))
                found.append(float(own))
        return max(found)

    @property
    def free_lr(self) -> float:
        """The largest lr at which the sampler's own noise is at least ``noise_multiplier`` in every
        group: privacy needs no more. Infinite if ``noise_multiplier`` is 0.
        """
        if self.noise_multiplier == 0:
            return math.inf
        return min(map(self._free_lr, self._trained_groups()))

    @property
    def unused_noise(self) -> str:
        """Settings that would lower the sampler's own noise to the floor; empty if it is not
        larger.
        """
        floor, own = self.noise_multiplier, self.langevin_noise_multiplier
        if not (math.inf > own > _WASTE * floor > 0) or self.temperature is None:
            return ""
        lrs = dict.fromkeys(f"{self._free_lr(group):.4g}" for group in self._trained_groups())
        return (
            f"max_grad_norm = {self.max_grad_norm * own / floor:.4g} (or leave it out), temperature"
            f" = {self.temperature * (floor / own) ** 2:.3g} (or leave it out), or lr ="
            f' {", ".join(lrs)}{" of the groups" if len(lrs) > 1 else ""} (lr="free")'
        )

    @property
    def unused_floor(self) -> list[str]:
        """A line if the sampler's own noise is larger than the requested one."""
        if not (instead := self.unused_noise):
            return []
        return [
            f"noise_multiplier = {self.noise_multiplier:.4g} is only a minimum: at temperature"
            f" {self.temperature:.4g} the sampler's own noise is"
            f" {self.langevin_noise_multiplier:.4g}, which is added and charged. To use the"
            f" minimum, pass {instead}."
        ]


def fits(key: str, name: str) -> bool:
    """Whether ``key`` names this parameter, or a module that has it."""
    return name == key or name.startswith(f"{key}.")


def require_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{name} must be True or False, got {value!r}")


def require_fraction(name: str, value: Any) -> float:
    """``value`` as a number in [0, 1)."""
    return events.within(value, name, lambda x: 0 <= x < 1, "be in [0, 1)")
