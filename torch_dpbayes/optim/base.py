"""The private step that all optimizers share: collect, charge, add one Gaussian, hand over.

Each step releases one vector and nothing else::

    S = Σ_{i in batch} g_i·min(1, C/‖g_i‖) + z·C·ξ,   ξ ~ N(0, I)    the only access to the data
    ĝ = S/B + ∇r(θ)/N                               noisy gradient of the mean potential

with N = ``num_data``, B = ``expected_batch_size``, C = ``max_grad_norm`` and r = −log prior. The
noise that the sampler wants *is* the privacy noise: the sampler asks for ``z_L``, the user for at
least ``noise_multiplier``, and z is the larger of the two. Whatever the algorithm does with ĝ is
post-processing. On several ranks the sum over the batch is a sum over ranks, and the noise is rank
0's. Parameter groups with different step sizes have their own z: the gradient is clipped over all
groups together, and the smallest z is charged, which bounds the release whose groups are scaled to
equal noise.
"""

from __future__ import annotations

import functools
import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any, Self

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from .. import words
from ..accounting import events
from ..accounting.accountant import PrivacyAccountant
from ..errors import ArgumentError, ArgumentTypeError, CheckpointError, StateError
from ..release import saved_state
from ..release.layout import GroupGradient, Layout, Member
from ..release.query import ClippedSum
from ..release.release import Release
from . import finite_steps, priors
from .priors import LogPrior
from .settings import (
    LARGEST_LR,
    LARGEST_NOISE_MULTIPLIER,
    SETTINGS,
    Defaults,
    Settings,
    require_number,
    require_positive,
)

_ELSEWHERE = {  # arguments of other optimizers
    "weight_decay": "weight_decay=: pass prior_std=, which is 1 / sqrt(weight_decay * num_data)",
    "momentum": "momentum=: take DPSGHMC, which has it",
    "betas": "betas=: DPSGHMC has momentum=, the first of them",
}
_NEEDED = ("lr", "num_data", "expected_batch_size", "max_grad_norm")
_OPTIONS_OF_NO_GROUP = frozenset(("weight_decay", "momentum", *SETTINGS))


class PrivateOptimizer(Optimizer):
    """Base of the private samplers. A subclass says how much noise it wants and what it does with
    the noisy gradient.

    Args:
        params: parameters, named parameters or parameter groups, as for every torch optimizer.
            ``lr``, ``prior_std`` and ``prior_mean`` may differ between groups.
        defaults: the options that a group may override.
        num_data: number of records N, a public constant.
        expected_batch_size: B, a public constant; under Poisson sampling B/N is the sampling rate.
        max_grad_norm: clip norm C of one record's gradient, over all parameters together; at least
            1e-12.
        noise_multiplier: floor of the noise std on the clipped sum, in units of C.
        temperature: T of the target ∝ exp(−U/T).
        log_prior: ``{name: parameter} -> log p(θ)``, a scalar, instead of the Gaussian prior; needs
            named parameters. It must not look at data.
        sampling: what is known about batches with B < N. ``"poisson"`` asserts that every batch is
            an independent Poisson draw at rate B/N, stepped on once (``PrivacyEngine.make_private``
            sets this and verifies it). ``"recordwise"`` asserts that who is in a batch does not
            depend on other records: whether a record is in it is a function of this record, of
            public things, and of chance that has nothing to do with other records. A hash of the
            record's name or its date decides like that; a shuffled loader does not. None asserts
            only that what the records hold does not decide who is in a batch. The last two are
            charged at sensitivity 2C without amplification, and None is refused under
            add-or-remove-one, where one record more may change whole batches. Full batches, B = N,
            are charged as such, and their length is checked. In every case a record is in a batch
            at most once, which an optimizer without an engine cannot see: one that is there k times
            (a sampler with replacement, a bootstrap) moves the sum by kC.
        accountant: where the steps are charged. None: an accountant of its own.
        generator: source of the noise, for runs that repeat bit for bit; its seed is then a secret.
            None: operating-system entropy.
        assume_independent_records: you vouch that each per-sample gradient in ``p.grad_sample``
            depends on one record alone. Needed for gradients that ``make_private`` did not record;
            the accountant's summary says so.
        query: ``(max_grad_norm, expected_batch_size) ->`` what a step asks of the data.
    """

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Say in plain words which arguments are missing."""
        try:
            signature = inspect.signature(cls.__init__)
            given = {*signature.bind_partial(None, *args, **options).arguments, *options}
        except TypeError as error:
            instead = (_ELSEWHERE[name] for name in options if name in _ELSEWHERE)
            if "unexpected keyword" in str(error) and (line := next(instead, None)) is not None:
                raise ArgumentTypeError(f"{cls.__name__} has no {line}") from None
            raise ArgumentTypeError(f"{cls.__name__}: {error}") from None
        # a subclass that hands on what it is given has no names for it
        missing = [name for name in _NEEDED if name not in given and name in signature.parameters]
        if "num_data" in missing or "expected_batch_size" in missing:
            raise ArgumentTypeError(
                f"{cls.__name__} also needs {', '.join(missing)}:"
                f" pass optimizer=partial({cls.__name__}, lr=0.1) and max_grad_norm=1.0 to"
                " PrivacyEngine().make_private, which knows the rest"
            )
        if missing:
            raise ArgumentTypeError(
                f"{cls.__name__} needs {' and '.join(missing)}: pass"
                f" optimizer=partial({cls.__name__}, lr=0.1) and max_grad_norm=1.0, the clip norm"
                " of one record's gradient"
            )
        return super().__new__(cls)

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        num_data: int,
        expected_batch_size: float,
        max_grad_norm: float,
        noise_multiplier: float,
        temperature: float,
        log_prior: LogPrior | None,
        sampling: str | None,
        accountant: PrivacyAccountant | None,
        generator: torch.Generator | None,
        assume_independent_records: bool = False,
        query: Callable[[float, float], ClippedSum] = ClippedSum,
    ) -> None:
        settings = Settings(
            num_data, expected_batch_size, max_grad_norm, noise_multiplier, temperature, sampling
        )
        if (
            log_prior is not None
            and not math.isinf(defaults["prior_std"])
            and defaults["prior_std"] != 1.0
        ):
            raise ArgumentError("log_prior replaces the Gaussian prior: leave out prior_std")
        self._constants, self._log_prior = settings, log_prior
        self.release = Release(  # what stands between batches and the noisy gradient
            query(settings.max_grad_norm, settings.expected_batch_size),
            num_data=num_data,
            sampling=sampling,
            accountant=PrivacyAccountant() if accountant is None else accountant,
            generator=generator,
            label=type(self).__name__,
            assume_independent=assume_independent_records,
        )
        self._layout: Layout | None = None
        self._layout_made_for: list[Any] = []
        # by group, and how many steps in a row had them
        self._last_numbers: tuple[list[tuple[float, ...]], int] = ([], 0)
        self.defaults = defaults  # which the free lr is a function of
        super().__init__(params, {**defaults, "lr": self._resolved(defaults["lr"])})
        self.defaults = Defaults(self.defaults, type(self).__name__)
        if log_prior is not None and any("param_names" not in group for group in self.param_groups):
            raise ArgumentError(
                "log_prior takes parameters by name: construct the optimizer with"
                " model.named_parameters()"
            )

    # -- what an algorithm's file provides ---------------------------------------------------------

    @abstractmethod
    def _group_langevin_noise_multiplier(self, group: dict[str, Any]) -> float:
        """z_L of a group whose ``lr`` is positive."""

    @abstractmethod
    def _group_temperature(self, group: dict[str, Any], noise_multiplier: float) -> float:
        """Temperature at which the Gaussian noise alone would sample."""

    @abstractmethod
    def _free_lr(self) -> float:
        """The largest lr whose Langevin noise is at least the floor."""

    @abstractmethod
    def _update(self, parts: list[GroupGradient]) -> None:
        """New parameters from the noisy gradient ĝ of the mean potential, in place."""

    # torch's GradScaler skips steps when a gradient overflows, which one record decides: step()
    # refuses instead of being skipped
    _step_supports_amp_scaling = True

    # -- public constants and reports --------------------------------------------------------------

    @property
    def accountant(self) -> PrivacyAccountant:
        """Where every step is charged."""
        return self.release.accountant

    @property
    def num_data(self) -> int:
        """N, the public number of records."""
        return self._constants.num_data

    @property
    def expected_batch_size(self) -> float:
        """B, the public expected batch size."""
        return self._constants.expected_batch_size

    @property
    def max_grad_norm(self) -> float:
        """C, the clip norm of one record's gradient."""
        return self._constants.max_grad_norm

    @property
    def noise_multiplier(self) -> float:
        """z_min, the floor under the noise multiplier."""
        return self._constants.noise_multiplier

    @property
    def temperature(self) -> float:
        """T of the target ∝ exp(−U/T)."""
        return self._constants.temperature

    @property
    def has_own_log_prior(self) -> bool:
        """Whether ``log_prior=`` replaces the Gaussian prior."""
        return self._log_prior is not None

    @property
    def sampling(self) -> str | None:
        """``"poisson"`` or another way in which ``make_private`` draws batches, ``"recordwise"``,
        or None for batches of which nothing is stated.
        """
        return self.release.sampling

    @property
    def langevin_noise_multiplier(self) -> float:
        """z_L: the sampler's own noise in units of C; the smallest over the groups. Infinite
        where every lr is 0.
        """
        return min(self._langevin(group) for group in self._trained_groups())

    @property
    def effective_noise_multiplier(self) -> float:
        """z in force, which is what a step is charged for; the smallest over the groups."""
        return min(self._multiplier(group) for group in self._trained_groups())

    @property
    def effective_temperature(self) -> float:
        """Temperature of the Gaussian noise in force; the largest over the groups.

        For q < 1 the minibatch noise comes on top, so this is a lower bound on the temperature of
        the samples.
        """
        return max(
            self._group_temperature(g, self._multiplier(g)) if g["lr"] > 0 else 0.0
            for g in self._trained_groups()
        )

    @property
    def free_lr(self) -> float:
        """The largest lr at which privacy is free: the sampler's own noise reaches the floor.
        Infinite without a floor.
        """
        return math.inf if self.noise_multiplier == 0 else self._free_lr()

    @property
    def independence(self) -> str:
        """How records are kept apart: ``"by construction, …"`` or ``"vouched for …"``."""
        return self.release.independence

    @property
    def equal_steps(self) -> int:
        """How many steps in a row, up to the last one, were made with the learning rates, noise and
        priors that are in force now.
        """
        now = [self._numbers_of(g, self._multiplier(g)) for g in self._trained_groups()]
        numbers, steps = self._last_numbers
        return steps if now == numbers else 0

    @staticmethod
    def _numbers_of(group: dict[str, Any], noise_multiplier: float) -> tuple[float, ...]:
        return (group["lr"], group["prior_std"], group["prior_mean"], noise_multiplier)

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
        """The numbers in force, and what is spent."""
        try:
            numbers = self._numbers
        except (ValueError, TypeError) as error:  # of an option that was set to what it cannot be
            numbers = {"invalid": str(error)}
        return words.one_line(self, numbers, self.accountant)

    def _repr_html_(self) -> str:
        return words.html(self, self._numbers, self.accountant)

    def _trained_groups(self) -> list[dict[str, Any]]:
        """Groups that are not frozen; all of them if every one is."""
        return [
            group for group in self.param_groups if any(p.requires_grad for p in group["params"])
        ] or self.param_groups

    # -- the private step --------------------------------------------------------------------------

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Charge one release to the accountant, draw it, and move the parameters.

        Args:
            closure: evaluates the model and calls ``backward()``, as in torch; its value is
                returned as it is.

        Raises:
            PrivacyBudgetExceeded: the step does not fit into the budget; parameters, state and
                history are as they were.
            RuntimeError: a parameter has no per-record gradients, the batch is not a fresh draw of
                the private loader, or is not complete; a buffer or a frozen parameter of the model
                was written to since the loader's first batch; or the model is not the one that was
                checked.
            DivergedError: a parameter is not finite.
            ArgumentError: an option is not.
            FloatingPointError: the step took a parameter beyond its dtype; parameters and state are
                as before, the charge is kept.
        """
        with self.release.turn, torch.no_grad():
            return self._whole_step(closure)

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """What torch puts around :meth:`step`, only where it does something: its note to a profiler
        takes a twentieth of a small step.
        """
        watched = Optimizer.profile_hook_step(func)

        @functools.wraps(func)
        def step(self: PrivateOptimizer, *args: Any, **options: Any) -> Any:
            if (
                _profiler_enabled()
                or self._optimizer_step_pre_hooks
                or self._optimizer_step_post_hooks
                or _global_optimizer_pre_hooks
                or _global_optimizer_post_hooks
            ):
                return watched(self, *args, **options)
            return func(self, *args, **options)

        return step

    def _whole_step(self, closure: Callable[[], float] | None) -> float | None:
        loss = None
        try:
            with self.release.together():
                if closure is not None:
                    with torch.enable_grad():
                        loss = closure()
                self._step()
        except BaseException:
            self.release.forget_parts()
            if self._layout is not None:
                self._layout.buffer.zero_()  # sums without noise
            raise
        finally:
            parameters = self._parameters()
            self.release.source.discard(parameters)
            for p in parameters:
                p.grad = None  # not private: hooks leave the ordinary gradient there
        return loss

    def _step(self) -> None:
        if hasattr(self, "grad_scale"):
            # the scaler leaves them behind when step() raises
            for name in ("grad_scale", "found_inf"):
                self.__dict__.pop(name, None)
            raise StateError(
                "GradScaler scales gradients before they are clipped, and skips steps that one"
                " record's overflow decides: use torch.autocast with bfloat16 and no scaler.",
                code="grad-scaler",
            )
        layout = self._current_layout()
        largest = finite_steps.require_finite(layout)
        for part in layout.groups:
            part.noise_multiplier = self._multiplier(part.group)
        prior_gradients = priors.gradients(self._log_prior, layout)
        undo = finite_steps.Undo(self, layout, self._constants, largest, prior_gradients)
        if not self.release.take(layout, self._settings, largest):
            return
        priors.add(prior_gradients, layout, self.num_data)
        self._update(layout.groups)
        undo.require_finite()
        numbers = [self._numbers_of(part.group, part.noise_multiplier) for part in layout.groups]
        last, steps = self._last_numbers
        self._last_numbers = numbers, steps + 1 if numbers == last else 1

    def _kept(self, part: GroupGradient, name: str) -> tuple[Tensor, list[Tensor]]:
        """A vector that an algorithm keeps between steps, one number for each of the part's, 0 at
        first: flat, and its views.

        The views are shaped like the parameters and stand in ``self.state``, where ``state_dict``
        and ``deepcopy`` find them.
        """
        kept = part.kept.get(name)
        if kept is None or self.state[part.parameters[0]].get(name) is not kept[1][0]:
            flat = torch.zeros_like(part.gradient)
            kept = part.kept[name] = (flat, part.views(flat))
            for p, view in zip(part.parameters, kept[1], strict=True):
                if name in self.state[p]:
                    view.copy_(self.state[p][name])
                self.state[p][name] = view
        return kept

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the last backward pass, per-record ones included."""
        parameters = self._parameters()
        self.release.source.zero_grad(parameters)
        if not set_to_none:
            super().zero_grad(False)
            return
        for p in parameters:
            p.grad = None

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Called by Opacus' ``BatchMemoryManager`` before each part of a draw; ``do_skip``
        says that more parts follow.
        """
        if self.release.draws is None:
            raise StateError(
                "BatchMemoryManager needs the loader that PrivacyEngine.make_private returns:"
                " without it the parts of two batches cannot be told apart.",
                code="loader-memory-manager",
            )
        self.release.draws.delivered_part(is_last=not do_skip)

    # -- what a step is charged for ----------------------------------------------------------------

    def event(self, noise_multiplier: float) -> events.DpEvent:
        """The event of one step on a Poisson batch, in noise std / clip bound."""
        return self.release.event(noise_multiplier, "poisson")

    def _langevin(self, group: dict[str, Any]) -> float:
        if not group["lr"] > 0:
            return math.inf
        noise_multiplier = self._group_langevin_noise_multiplier(group)
        if not noise_multiplier < LARGEST_NOISE_MULTIPLIER:
            raise ArgumentError(
                f"lr = {group['lr']} is so small that the sampler's own noise overflows (noise"
                f" multiplier {noise_multiplier:.3g}): use a larger lr, 0 to leave the group as it"
                " is, or temperature=0."
            )
        return noise_multiplier

    def _multiplier(self, group: dict[str, Any]) -> float:
        """z of a group. lr = 0 uses nothing of the gradient: the floor applies, and without a
        floor nothing is released.
        """
        self._require_options(group)
        if not math.isfinite(group["prior_mean"]):
            raise ArgumentError(f"prior_mean = {group['prior_mean']} is not finite")
        require_positive("prior_std", group["prior_std"], allow_infinite=True)
        require_number("lr", group["lr"])
        if not 0 <= group["lr"] < LARGEST_LR:
            raise ArgumentError(
                f"lr = {group['lr']} is negative, not finite, or so large that a step overflows"
            )
        if group["lr"] == 0:
            return self.noise_multiplier or math.inf
        return max(self._langevin(group), self.noise_multiplier)

    # -- groups, copies, checkpoints ---------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; ``lr``, ``prior_std`` and ``prior_mean`` are checked."""
        if isinstance(param_group.get("lr"), str):
            param_group = {**param_group, "lr": self._resolved(param_group["lr"])}
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._require_options(group)
            require_positive("lr", group["lr"])
            require_positive("prior_std", group["prior_std"], allow_infinite=True)
            require_number("prior_mean", group["prior_mean"])
            if not math.isfinite(group["prior_mean"]):
                raise ArgumentError(f"prior_mean must be finite, got {group['prior_mean']}")
            for p in group["params"]:
                if not p.is_floating_point():
                    raise ArgumentTypeError(
                        f"parameters must be real floating-point tensors, got {p.dtype}"
                    )
        except Exception:
            self.param_groups.pop()
            raise
        self._layout = None
        self.release.forget_parts()

    def _resolved(self, lr: Any) -> Any:
        """``lr``, which is :attr:`free_lr` where ``"free"`` is asked for."""
        if not isinstance(lr, str):
            return lr
        if lr != "free":
            raise ArgumentError(f'lr must be a number or "free", got {lr!r}')
        if not (self.noise_multiplier > 0 and self.temperature > 0):
            raise ArgumentError(
                'lr="free" is where the sampler\'s own noise reaches the floor: it needs'
                " noise_multiplier > 0 (or a target epsilon) and temperature > 0"
            )
        return self._free_lr()

    def _require_options(self, group: dict[str, Any]) -> None:
        if _OPTIONS_OF_NO_GROUP.isdisjoint(group):
            return
        if foreign := [
            name for name in group if name in _OPTIONS_OF_NO_GROUP and name not in self.defaults
        ]:
            raise ArgumentError(
                f"{foreign[0]} is not an option of a parameter group of {type(self).__name__}: its"
                f" groups take {', '.join(self.defaults)}. Set it for all groups when the optimizer"
                " is made."
            )

    def _current_layout(self) -> Layout:
        is_shared = self.release.ranks is not None
        made_for = [
            is_shared,
            *[
                (id(group), id(p), p.requires_grad, p.dtype, p.device)
                for group in self.param_groups
                for p in group["params"]
            ],
        ]
        if self._layout is None or self._layout_made_for != made_for:
            self._layout = self._new_layout(is_shared)
            self._layout_made_for = made_for
        return self._layout

    def _new_layout(self, is_shared: bool) -> Layout:
        members: list[Member] = []
        for i, group in enumerate(self.param_groups):
            given = group.get(
                "param_names", [f"{j} of group {i}" for j in range(len(group["params"]))]
            )
            trainable = [
                (name, p) for name, p in zip(given, group["params"], strict=True) if p.requires_grad
            ]
            if trainable:
                members.append((group, [name for name, _ in trainable], [p for _, p in trainable]))
        if not members:
            raise StateError("every parameter is frozen: there is nothing to sample")
        parameters = [p for _, _, trainables in members for p in trainables]
        if len({p.device for p in parameters}) > 1:
            raise StateError(
                "the parameters live on several devices; one norm per record needs them on one"
            )
        self.release.forget_parts()
        layout = Layout(
            members,
            self.release.query.numbers_beside(
                sum(p.numel() for p in parameters), parameters[0].device
            ),
            self.expected_batch_size,
            is_shared=is_shared,
        )
        self.release.layout_changed()
        return layout

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def __deepcopy__(self, memo: dict[int, Any]) -> PrivateOptimizer:
        """A copy that charges the same accountant and draws its own noise."""
        copy = object.__new__(type(self))
        memo[id(self)] = copy
        shared = {
            k: v
            for k, v in self.__dict__.items()
            if k.startswith("_") and not k.startswith("_optimizer_")
        }
        copy.__dict__.update(shared)
        Optimizer.__setstate__(copy, deepcopy(Optimizer.__getstate__(self), memo))
        is_other = any(
            a is not b for a, b in zip(self._parameters(), copy._parameters(), strict=True)
        )
        copy.release = self.release.duplicate(has_other_parameters=is_other)
        copy._layout = None
        return copy

    def __getstate__(self) -> dict[str, Any]:
        raise ArgumentTypeError(
            f"{type(self).__name__} cannot be pickled: a copy would draw the same noise and charge"
            " another accountant. Save state_dict().",
            code="copied",
        )

    def state_dict(self) -> dict[str, Any]:
        """torch's state, the accountant's history, and the streams of noise and sampling if
        the caller passed ``generator=``.
        """
        state = super().state_dict()
        private: dict[str, Any] = {
            "algorithm": type(self).__name__,
            "shapes": [[list(p.shape) for p in group["params"]] for group in self.param_groups],
            "last_numbers": self._last_numbers,
            **saved_state.save(self.release),
        }
        state["private_step"] = private
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume. What the saved run was charged must be on this accountant: an empty one takes it
        over.

        Releases of other runs never stand for the saved run's, equal ones included. Several copies
        of one state may be resumed: with one ledger (``PrivacyAccountant(path=...)``) all are
        counted; in memory none knows of the others, which a line in the log and
        ``accountant.summary()`` say.

        Raises:
            ValueError: the state belongs to another optimizer or to other parameters, or the
                accountant does not hold what the saved run was charged.
        """
        private = state_dict.get("private_step")
        if private is None or private["algorithm"] != type(self).__name__:
            other = "a non-private optimizer" if private is None else private["algorithm"]
            raise CheckpointError(f"this is the state of {other}, not of {type(self).__name__}")
        if private["shapes"] != [
            [list(p.shape) for p in group["params"]] for group in self.param_groups
        ]:
            raise CheckpointError(
                "the state belongs to parameters of another number or other shapes than this"
                " optimizer's"
            )
        saved_state.resume_charges(self.release, private)
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "private_step"})
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        for i, p in zip(saved_ids, self._parameters(), strict=True):
            for name, value in state_dict["state"].get(i, {}).items():
                # torch rounds it to the parameter's dtype
                if isinstance(value, Tensor) and value.dtype != p.dtype:
                    self.state[p][name] = value.detach().clone().to(p.device)
        saved_state.resume_streams(self.release, private)
        # states of earlier versions do not know
        self._last_numbers = private.get("last_numbers", ([], 0))
        self._layout = None

    def _settings(self) -> dict[str, Any]:
        """On which the law of a release depends."""
        return {name: getattr(self, name) for name in SETTINGS}

    def described(self) -> dict[str, Any]:
        """Every constant that ranks must agree on."""
        constants = (bool, int, float, str, type(None))
        own = {name: v for name, v in vars(self).items() if isinstance(v, constants)}
        return {**own, **self._settings()}
