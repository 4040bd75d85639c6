"""The arguments of a private optimizer, their checks, and its reports."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, ClassVar, Self, Unpack

from torch import Tensor

from .. import words
from ..accounting.accountant import PrivacyAccountant
from ..accounting.events import within
from ..errors import ArgumentError, ArgumentTypeError
from ..release import ClippedSum, Release, require_public
from .settings import NAMES, Options, OwnNoise, PriorStd, Settings, fits

_LARGEST_LR = 1e30
_OPTIONS_OF_NO_GROUP = frozenset(("weight_decay", "momentum", "sampling", *NAMES))


class DeclaredOptimizer(OwnNoise):
    """The part of :class:`~torch_dpbayes.optim.base.PrivateOptimizer` that never sees data: its
    arguments, their checks, and the numbers derived from them.
    """

    # a subclass's options that may differ between groups, set before __init__ is called
    _group_options: dict[str, Any] = {}  # noqa: RUF012
    _needs_temperature = False
    _is_made = False
    __signature__: ClassVar[inspect.Signature]  # help() shows it

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _, *own = inspect.signature(cls.__init__).parameters.values()
        if own and own[-1].kind is inspect.Parameter.VAR_KEYWORD and "Unpack" in str(own[-1]):
            # and the arguments that it passes on as keywords
            passed = inspect.signature(Settings).parameters.values()
            own = [*own[:-1], *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in passed)]
        cls.__signature__ = inspect.Signature(own)

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Refuse unknown and missing arguments, and values of records."""
        try:
            given = {*cls.__signature__.bind_partial(*args, **options).arguments, *options}
        except TypeError as error:
            raise ArgumentTypeError(f"{cls.__name__}: {error}") from None
        # a subclass that passes all on as keywords names none of them
        needed = {"lr", "num_data", "expected_batch_size"} & cls.__signature__.parameters.keys()
        if missing := sorted(needed - given, reverse=True):
            raise ArgumentTypeError(
                f"{cls.__name__} also needs {', '.join(missing)}: pass"
                f" optimizer=partial({cls.__name__}, lr=0.1) to PrivacyEngine().make_private, which"
                " knows the rest"
            )
        require_public(f"an argument of {cls.__name__}", [*args, *options.values()])
        return super().__new__(cls)

    def __init__(self, params: Iterable[Any], lr: float | str, **options: Unpack[Options]) -> None:
        settings = Settings(**options)
        self._derives_bound = settings.max_grad_norm is None
        if self._derives_bound:
            settings = replace(settings, max_grad_norm=1.0)  # the unit of z_L below
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
        is_derived = self._derives_bound or not has_noise or isinstance(lr, str)
        if settings.temperature is None and is_derived:
            settings = replace(settings, temperature=1.0)
        self._constants = settings
        self.release = Release(  # turns batches into noisy gradients
            self._make_query(self.max_grad_norm, settings.expected_batch_size),
            num_data=settings.num_data,
            sampling=settings.sampling,
            accountant=PrivacyAccountant() if settings.accountant is None else settings.accountant,
            generator=settings.generator,
            label=type(self).__name__,
            assume_independent=settings.assume_independent_records,
        )
        own = {"prior_std": settings.prior_std, "prior_mean": settings.prior_mean}
        self.defaults = {**own, **self._group_options}  # the free lr depends on these
        super().__init__(params, {"lr": self._resolved(lr, self.defaults), **self.defaults})
        self._is_made = True  # before, a prior may name parameters of later groups
        for group in (self.defaults, *self.param_groups):
            _require_used(group["prior_std"], self.param_groups)
        if self._derives_bound:
            self._set_bound(self.langevin_noise_multiplier / settings.noise_multiplier)
        nameless = [group for group in self.param_groups if "param_names" not in group]
        if settings.log_prior is not None and nameless:
            raise ArgumentError(
                "log_prior needs parameter names: construct the optimizer with"
                " model.named_parameters()"
            )

    def _make_query(self, max_grad_norm: float, expected_batch_size: float) -> ClippedSum:
        """The query that a step makes of the data."""
        return ClippedSum(max_grad_norm, expected_batch_size)

    # -- a derived clip norm -----------------------------------------------------------------------

    def _set_bound(self, max_grad_norm: float) -> None:
        """Set a clip norm that was derived from public numbers, before a step."""
        self._constants = replace(self._constants, max_grad_norm=max_grad_norm)
        self.release.query = self._make_query(max_grad_norm, self.expected_batch_size)
        self.release.bound_from = (
            f"clip norm {max_grad_norm:.4g}, derived from public numbers: temperature"
            f" {self.temperature:.4g}, noise multiplier {self.noise_multiplier:.4g}, lr, batch size"
        )

    @property
    def _derived_noise(self) -> list[float]:
        """The noise zC at a derived clip norm, and the other numbers that C was derived from."""
        noise = self.noise_multiplier * self.max_grad_norm
        return [noise, self.num_data, self.expected_batch_size, self.temperature or 0.0]

    def _resume_bound(self, saved: list[float] | None) -> None:
        """Continue with the saved run's noise zC, if this optimizer was built with another lr but
        equal other numbers.
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
            self._require_group(group)
            if group["lr"] == 0:
                raise ArgumentError("lr must be positive: only a schedule may set it to 0")
            if self._is_made:
                _require_used(group["prior_std"], self.param_groups)
            for p in group["params"]:
                if not p.is_floating_point():
                    raise ArgumentTypeError(
                        f"parameters must be real floating-point tensors, got {p.dtype}"
                    )
        except Exception:
            self.param_groups.pop()
            raise

    def _require_group(self, group: dict[str, Any]) -> None:
        """Raise unless a group's options are valid; schedules may change them."""
        if foreign := [n for n in group if n in _OPTIONS_OF_NO_GROUP and n not in self.defaults]:
            raise ArgumentError(
                f"{foreign[0]} is not an option of a parameter group of {type(self).__name__}: its"
                f" groups have {', '.join(self.defaults)}. Set it for all groups when the"
                " optimizer is made."
            )
        if missing := {"lr", "prior_std", "prior_mean", *self._group_options} - group.keys():
            raise ArgumentError(f"a parameter group has no {min(missing)}: set it to a number")
        _require_prior_std(group)
        is_default = group["prior_std"] in (1.0, math.inf) and group["prior_mean"] == 0
        if self._constants.log_prior is not None and not is_default:
            raise ArgumentError(
                "log_prior replaces the Gaussian prior: leave out prior_std and prior_mean"
            )
        within(group["prior_mean"], "prior_mean", math.isfinite, "be finite")
        rule = "be at least 0, finite, and so small that no step overflows"
        within(group["lr"], "lr", lambda lr: 0 <= lr < _LARGEST_LR, rule)

    def _resolved(self, lr: float | str, group: dict[str, Any]) -> float:
        """``lr`` as a number: for ``"free"`` the largest free lr of the group."""
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

    def _settings(self) -> dict[str, Any]:
        """The settings that determine the distribution of a release."""
        return {name: getattr(self, name) for name in (*NAMES, "sampling")}

    def described(self) -> dict[str, Any]:
        """All constants that must be equal on all ranks."""
        constants = (bool, int, float, str, type(None))
        own = {name: v for name, v in vars(self).items() if isinstance(v, constants)}
        return {**own, **self._settings()}

    # -- reports -----------------------------------------------------------------------------------

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
        except (ValueError, TypeError) as error:  # an option has an invalid value
            return words.one_line(self, {"invalid": str(error)}, self.accountant)

    def _repr_html_(self) -> str:
        return words.html(self, self._numbers, self.accountant)


def _require_prior_std(group: Mapping[str, Any]) -> None:
    """Raise unless a group's ``prior_std`` is valid."""
    stated = group["prior_std"]
    if isinstance(stated, Mapping) and "param_names" not in group:
        raise ArgumentError(
            "a dictionary for prior_std needs parameter names: construct the optimizer with"
            " model.named_parameters()"
        )
    for std in stated.values() if isinstance(stated, Mapping) else [stated]:
        if std == "fan_in":
            continue
        is_number = isinstance(std, Real) or (isinstance(std, Tensor) and std.numel() == 1)
        if not is_number or isinstance(std, bool):
            raise ArgumentTypeError(
                'prior_std must be a number, "fan_in", or a dictionary of these by parameter name,'
                f" got {std!r}"
            )
        if not float(std) > 0:
            raise ArgumentError(f"prior_std must be positive, got {std}")


def _require_used(prior_std: PriorStd, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise if a name in a dictionary is neither a parameter nor a module."""
    if not isinstance(prior_std, Mapping):
        return
    names = [name for group in groups for name in group["param_names"]]
    for key in prior_std:
        if not any(fits(key, name) for name in names):
            raise ArgumentError(
                f"prior_std names {key!r}, which is neither a parameter nor a module: the"
                f" parameters are {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
            )
