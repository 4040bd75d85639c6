"""The settings of a private optimizer: arguments, their checks, and the resulting noise."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from numbers import Real
from operator import attrgetter
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    Never,
    Required,
    Self,
    TypedDict,
    TypeVar,
)

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import words
from ..accounting import events
from ..accounting.accountant import PrivacyAccountant
from ..errors import ArgumentError, ArgumentTypeError
from ..release import ClippedSum, Release, require_public
from .priors import LogPrior, PriorStd, require_prior_std, require_used

Shown = TypeVar("Shown")
_LARGEST_LR = 1e30
_LARGEST_NOISE_MULTIPLIER = 1e30
_WASTE = 1.02  # times the floor, from which on the sampler's own noise counts as larger


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
    """Checked settings of all parameter groups. Arguments as for
    :class:`~torch_dpbayes.optim.DPSGLD`. ``temperature`` = None: that of the noise.

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
        n, z = events.positive_count(self.num_data, "num_data"), self.noise_multiplier
        object.__setattr__(self, "num_data", n)
        for name in ("expected_batch_size", "max_grad_norm", "noise_multiplier", "temperature"):
            if (value := getattr(self, name)) is not None:
                _require_positive(name, value, or_zero=name in ("noise_multiplier", "temperature"))
                object.__setattr__(self, name, float(value))
        batch = self.expected_batch_size
        if batch > n:
            raise ArgumentError(
                f"expected_batch_size = {batch:g} is larger than num_data = {n}: their ratio is the"
                " sampling rate"
            )
        # sums of squares over 2¹⁴ records, divided by the batch size, are floats
        if not 1e-12 <= self.max_grad_norm <= 1e12 or batch < 1e-6:
            raise ArgumentError(
                f"max_grad_norm = {self.max_grad_norm} with expected_batch_size = {batch} is beyond"
                " sums in float32: use 1e-12 to 1e12, and at least 1e-6"
            )
        if z and not events.gaussian_noise_multiplier(z) < _LARGEST_NOISE_MULTIPLIER:
            raise ArgumentError(
                f"noise_multiplier = {z:g} is noise std / clip bound, and so large that steps"
                f" would overflow: use a value below {_LARGEST_NOISE_MULTIPLIER:g}"
            )
        if self.sampling not in (None, "poisson", "recordwise"):
            raise ArgumentError(
                f'sampling must be "poisson", "recordwise" or None, got {self.sampling!r}'
            )


_NAMES = tuple(Settings.__dataclass_fields__)
_OPTIONS_OF_NO_GROUP = frozenset(("weight_decay", "momentum", *_NAMES))


class ReadOnly(property, Generic[Shown]):
    """Shows an attribute that cannot be set, as steps are charged for it."""

    def __init__(self, name: str, doc: str) -> None:
        super().__init__(attrgetter(name))
        self.__doc__ = doc

    if TYPE_CHECKING:  # to a type checker a property that is no decorator is a plain attribute

        def __get__(  # type: ignore[override]
            self, instance: object, owner: type | None = None, /
        ) -> Shown: ...
        def __set__(self, instance: object, value: Never, /) -> None: ...


class DeclaredOptimizer(Optimizer):
    """The part of :class:`~torch_dpbayes.optim.base.PrivateOptimizer` that never sees data: its
    arguments, their checks, and the numbers derived from them.
    """

    # a subclass's options that may differ between groups, set before __init__ is called
    _group_options: dict[str, Any] = {}  # noqa: RUF012
    # whether larger noise does not heat the samples: friction or step follow it
    _holds_temperature = False
    _needs_temperature = False
    _is_made = False
    __signature__: ClassVar[inspect.Signature]  # help() shows it

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _, *own = inspect.signature(cls.__init__).parameters.values()
        if own and own[-1].kind is inspect.Parameter.VAR_KEYWORD and "Unpack" in str(own[-1]):
            # with those that it hands on
            _, *common = inspect.signature(DeclaredOptimizer.__init__).parameters.values()
            names = {p.name for p in own}
            own = [*own[:-1], *(p for p in common if p.name not in names)]
        cls.__signature__ = inspect.Signature(own)

    def __new__(cls, *args: Any, **options: Any) -> Self:
        _require_arguments(cls, args, options)
        require_public(f"an argument of {cls.__name__}", [*args, *options.values()])
        return super().__new__(cls)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | str,
        *,
        num_data: int,
        expected_batch_size: float,
        max_grad_norm: float | None = None,
        noise_multiplier: float = 0.0,
        temperature: float | None = None,
        prior_std: PriorStd = 1.0,
        prior_mean: float = 0.0,
        log_prior: LogPrior | None = None,
        sampling: str | None = None,
        accountant: PrivacyAccountant | None = None,
        generator: torch.Generator | None = None,
        assume_independent_records: bool = False,
    ) -> None:
        self._derives_bound = max_grad_norm is None
        bound = 1.0 if max_grad_norm is None else max_grad_norm  # in whose units z_L is, below
        settings = Settings(
            num_data, expected_batch_size, bound, noise_multiplier, temperature, sampling
        )
        has_noise = settings.noise_multiplier > 0
        if self._needs_temperature and settings.temperature == 0:
            raise ArgumentError(
                f"{type(self).__name__} needs a positive temperature; for temperature 0 use DPSGHMC"
            )
        if self._derives_bound and settings.temperature == 0:
            raise ArgumentError(
                "temperature=0 is plain DP-SGD: the sampler adds no noise, so no clip norm can be"
                " derived. Pass max_grad_norm=1.0"
            )
        if self._derives_bound and not has_noise:
            raise ArgumentError(
                "without noise no max_grad_norm can be derived: pass target_epsilon to"
                " make_private_with_epsilon, noise_multiplier=, or max_grad_norm="
            )
        if temperature is None and (self._derives_bound or not has_noise or isinstance(lr, str)):
            settings = replace(settings, temperature=1.0)
        if log_prior is not None and not callable(log_prior):
            raise ArgumentTypeError(f"log_prior must be a function, got {log_prior!r}")
        require_flag("assume_independent_records", assume_independent_records)
        self._constants, self._log_prior = settings, log_prior
        self.release = Release(  # what stands between batches and the noisy gradient
            self._make_query(settings.max_grad_norm, settings.expected_batch_size),
            num_data=settings.num_data,
            sampling=sampling,
            accountant=PrivacyAccountant() if accountant is None else accountant,
            generator=generator,
            label=type(self).__name__,
            assume_independent=assume_independent_records,
        )
        # which the free lr is a function of
        self.defaults = {"prior_std": prior_std, "prior_mean": prior_mean, **self._group_options}
        super().__init__(params, {"lr": self._resolved(lr, self.defaults), **self.defaults})
        self._is_made = True  # a prior's names may be those of any group
        for group in (self.defaults, *self.param_groups):
            require_used(group["prior_std"], self.param_groups)
        if self._derives_bound:
            self._set_bound(self.langevin_noise_multiplier / settings.noise_multiplier)
        if log_prior is not None and any("param_names" not in group for group in self.param_groups):
            raise ArgumentError(
                "log_prior needs parameter names: construct the optimizer with"
                " model.named_parameters()"
            )

    def _make_query(self, max_grad_norm: float, expected_batch_size: float) -> ClippedSum:
        """The query that a step makes of the data."""
        return ClippedSum(max_grad_norm, expected_batch_size)

    # -- the sampler's own noise: what an algorithm's file may override ----------------------------

    def _friction(self, group: dict[str, Any]) -> float:
        """a of a sampler whose own noise has the variance 2aTη/N in a step: 1 for overdamped
        Langevin dynamics, 1 − momentum for underdamped ones. The next three follow from it.
        """
        return 1.0

    def _group_langevin_noise_multiplier(self, group: dict[str, Any]) -> float:
        """z_L = (B/C)·√(2aT/(ηN)) of a group whose lr η is positive."""
        c, heat = self._constants, 2 * self._friction(group) * self._temperature_of(group)
        scale = c.expected_batch_size / c.max_grad_norm
        return scale * math.sqrt(heat / (group["lr"] * c.num_data))

    def _group_temperature(self, group: dict[str, Any], noise_multiplier: float) -> float:
        """ηN z²C²/(2aB²): the temperature at which the Gaussian noise alone would sample."""
        if self._holds_temperature:
            return self._temperature_of(group)
        return self._heat(group, noise_multiplier) / (2 * self._friction(group))

    def _matching_friction(self, group: dict[str, Any], noise_multiplier: float) -> float:
        """ηN z²C²/(2TB²): the friction with which this noise samples the temperature T."""
        return self._heat(group, noise_multiplier) / (2 * self._temperature_of(group))

    def _heat(self, group: dict[str, Any], noise_multiplier: float) -> float:
        """ηN z²C²/B²."""
        c = self._constants
        ratio = noise_multiplier * c.max_grad_norm / c.expected_batch_size
        return float(group["lr"] * c.num_data * ratio**2)

    def _free_lr(self, group: dict[str, Any]) -> float:
        """The largest lr whose z_L is at least the floor, which is positive here."""
        c = self._constants
        ratio = c.expected_batch_size / (c.max_grad_norm * c.noise_multiplier)
        temperature = 1.0 if c.temperature is None else c.temperature
        return 2 * self._friction(group) * temperature * ratio**2 / c.num_data

    def _temperature_of(self, group: dict[str, Any]) -> float:
        """T of a group; without a stated one that at which z_L is the floor at the lr in force."""
        c = self._constants
        if c.temperature is None:
            return self._heat(group, c.noise_multiplier) / (2 * self._friction(group))
        return c.temperature

    def _multiplier(self, group: dict[str, Any]) -> float:
        """z of a group. lr = 0 uses nothing of the gradient: the floor applies, and without a
        floor nothing is released.
        """
        own, floor = self._langevin(group), self._constants.noise_multiplier
        return max(own, floor) if group["lr"] > 0 else floor or math.inf

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

    # -- a clip norm that follows ------------------------------------------------------------------

    def _set_bound(self, max_grad_norm: float) -> None:
        """Clip to the norm that was derived, of public numbers only and before a step."""
        self._constants = replace(self._constants, max_grad_norm=max_grad_norm)
        self.release.query = self._make_query(max_grad_norm, self.expected_batch_size)
        self.release.bound_from = (
            f"clip norm {max_grad_norm:.4g}, derived from public numbers: temperature"
            f" {self.temperature:.4g}, noise multiplier {self.noise_multiplier:.4g}, lr, batch size"
        )

    @property
    def _derived_noise(self) -> list[float]:
        """The noise zC that a derived clip norm makes, and what it was derived from beside lr."""
        noise = self.noise_multiplier * self.max_grad_norm
        return [noise, self.num_data, self.expected_batch_size, self.temperature or 0.0]

    def _resume_bound(self, saved: list[float] | None) -> None:
        """Go on with the saved run's noise zC, where lr alone may have been another when this
        optimizer was built.
        """
        own, is_derived = self._derived_noise, self._derives_bound
        if is_derived and saved and own[1:] == saved[1:] and not math.isclose(own[0], saved[0]):
            self._set_bound(saved[0] / self.noise_multiplier)

    # -- groups ------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Like torch's method; it also checks ``lr``, ``prior_std`` and ``prior_mean``."""
        if isinstance(lr := param_group.get("lr"), str):
            resolved = self._resolved(lr, {**self.defaults, **param_group})
            param_group = {**param_group, "lr": resolved}
        require_public("a parameter group", param_group.values())
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _require_positive("lr", group["lr"])
            self._require_group(group)
            if self._is_made:
                require_used(group["prior_std"], self.param_groups)
            for p in group["params"]:
                if not p.is_floating_point():
                    raise ArgumentTypeError(
                        f"parameters must be real floating-point tensors, got {p.dtype}"
                    )
        except Exception:
            self.param_groups.pop()
            raise

    def _require_group(self, group: dict[str, Any]) -> None:
        """Raise unless a group's options, to which schedules write, are what they may be."""
        if foreign := [n for n in group if n in _OPTIONS_OF_NO_GROUP and n not in self.defaults]:
            raise ArgumentError(
                f"{foreign[0]} is not an option of a parameter group of {type(self).__name__}: its"
                f" groups have {', '.join(self.defaults)}. Set it for all groups when the"
                " optimizer is made."
            )
        if missing := {"lr", "prior_std", "prior_mean", *self._group_options} - group.keys():
            raise ArgumentError(f"a parameter group lost its {min(missing)}: put a number there")
        require_prior_std(group)
        is_default = group["prior_std"] in (1.0, math.inf) and group["prior_mean"] == 0
        if self._log_prior is not None and not is_default:
            raise ArgumentError(
                "log_prior replaces the Gaussian prior: leave out prior_std and prior_mean"
            )
        for name in ("prior_mean", "lr"):
            require_number(name, group[name])
        if not math.isfinite(group["prior_mean"]):
            raise ArgumentError(f"prior_mean must be finite, got {group['prior_mean']}")
        if not 0 <= group["lr"] < _LARGEST_LR:
            raise ArgumentError(
                f"lr = {group['lr']} is negative, not finite, or so large that a step overflows"
            )

    def _resolved(self, lr: float | str, group: dict[str, Any]) -> float:
        """``lr``, which is the largest free one of the group where ``"free"`` is asked for."""
        if not isinstance(lr, str):
            return lr
        if lr != "free":
            raise ArgumentError(f'lr must be a number or "free", got {lr!r}')
        if self._derives_bound:
            raise ArgumentError(
                'lr="free" is derived from a clip norm, and without max_grad_norm the clip norm'
                " is derived from lr: pass max_grad_norm= or a number for lr"
            )
        if not (self.noise_multiplier > 0 and self.temperature != 0):
            raise ArgumentError(
                'lr="free" is the lr at which the sampler\'s own noise equals noise_multiplier: it'
                " needs noise_multiplier > 0 (or a target epsilon) and temperature > 0"
            )
        return self._free_lr(group)

    def _trained_groups(self) -> list[dict[str, Any]]:
        """Groups that are not frozen; all of them if every one is."""
        requires_grad = attrgetter("requires_grad")
        groups = self.param_groups
        return [g for g in groups if any(map(requires_grad, g["params"]))] or groups

    def _settings(self) -> dict[str, Any]:
        """On which the law of a release depends."""
        return {name: getattr(self, name) for name in _NAMES}

    def described(self) -> dict[str, Any]:
        """All constants that must be equal on all ranks."""
        constants = (bool, int, float, str, type(None))
        own = {name: v for name, v in vars(self).items() if isinstance(v, constants)}
        return {**own, **self._settings()}

    # -- public constants and reports --------------------------------------------------------------

    accountant = ReadOnly[PrivacyAccountant]("release.accountant", "Every step charges this one.")
    num_data = ReadOnly[int]("_constants.num_data", "N, the public number of records.")
    expected_batch_size = ReadOnly[float](
        "_constants.expected_batch_size", "B, the public expected batch size."
    )
    max_grad_norm = ReadOnly[float](
        "_constants.max_grad_norm", "C, the clip norm of one record's gradient, given or derived."
    )
    derives_clip_norm = ReadOnly[bool](
        "_derives_bound", "Whether C was left out: it follows from lr, temperature and noise."
    )
    noise_multiplier = ReadOnly[float](
        "_constants.noise_multiplier", "z_min, the floor under the noise multiplier."
    )
    temperature = ReadOnly[float | None](
        "_constants.temperature",
        "T of the target ∝ exp(−U/T); None where lr, clip norm and noise decide it.",
    )
    sampling = ReadOnly[str | None](
        "release.sampling",
        'How batches are drawn, as "poisson"; "recordwise"; None where nothing is stated.',
    )
    independence = ReadOnly[str](
        "release.independence", 'How records are kept apart: "by construction" or "vouched for".'
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
        """Temperature of the current Gaussian noise; the largest over the groups.

        For q < 1 the minibatch noise is added, so this is a lower bound on the temperature of the
        samples.
        """
        return max(
            float(self._group_temperature(g, self._multiplier(g))) if g["lr"] > 0 else 0.0
            for g in self._trained_groups()
        )

    @property
    def free_lr(self) -> float:
        """The largest lr at which the sampler's own noise is at least ``noise_multiplier`` in every
        group: privacy needs no more. Infinite if that is 0.
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
            f"max_grad_norm = {self.max_grad_norm * own / floor:.4g} (leave it out), temperature ="
            f" {self.temperature * (floor / own) ** 2:.3g} (leave it out), or lr ="
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
            f" {self.langevin_noise_multiplier:.4g}, which is added and charged. The minimum would"
            f" be used with {instead}."
        ]

    @property
    def _numbers(self) -> dict[str, Any]:
        lrs = [float(group["lr"]) for group in self.param_groups]
        return {
            "lr": lrs[0] if len(lrs) == 1 else lrs,
            "noise_multiplier": self.effective_noise_multiplier,
            "temperature": self.effective_temperature,
            "max_grad_norm": self.max_grad_norm,
            "expected_batch_size": self.expected_batch_size,
            "num_data": self.num_data,
            "sampling": self.sampling,
            "records": self.independence,
        }

    def __repr__(self) -> str:
        """The current numbers, and what is spent."""
        try:
            return words.one_line(self, self._numbers, self.accountant)
        except (ValueError, TypeError) as error:  # of an option that was set to what it cannot be
            return words.one_line(self, {"invalid": str(error)}, self.accountant)

    def _repr_html_(self) -> str:
        return words.html(self, self._numbers, self.accountant)


def _require_arguments(
    cls: type[DeclaredOptimizer], args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Say in plain words which arguments are missing."""
    try:
        given = {*cls.__signature__.bind_partial(*args, **options).arguments, *options}
    except TypeError as error:
        raise ArgumentTypeError(f"{cls.__name__}: {error}") from None
    # a subclass that hands on what it is given has no names for it
    needed = {"lr", "num_data", "expected_batch_size"} & cls.__signature__.parameters.keys()
    if missing := sorted(needed - given, reverse=True):
        raise ArgumentTypeError(
            f"{cls.__name__} also needs {', '.join(missing)}: pass"
            f" optimizer=partial({cls.__name__}, lr=0.1) to PrivacyEngine().make_private, which"
            " knows the rest"
        )


def require_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{name} must be True or False, got {value!r}")


def require_number(name: str, value: Any) -> None:
    if not isinstance(value, (float, int, Tensor, Real)):
        raise ArgumentTypeError(f"{name} must be a number, got {value!r}")


def require_fraction(name: str, value: Any) -> float:
    """``value`` as a number in [0, 1)."""
    require_number(name, value)
    if not 0 <= value < 1:
        raise ArgumentError(f"{name} must be in [0, 1), got {value}")
    return float(value)


def _require_positive(name: str, value: float, *, or_zero: bool = False) -> None:
    require_number(name, value)
    if not (0 < value < math.inf or (or_zero and value == 0)):
        zero = "zero or " if or_zero else ""
        raise ArgumentError(f"{name} must be {zero}positive and finite, got {value}")
