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
import logging
from abc import abstractmethod
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ..accounting import events
from ..errors import ArgumentTypeError, CheckpointError, StateError
from ..release import saved_state
from ..release.layout import GroupGradient, Layout
from ..release.release import require_public
from . import finite_steps, priors
from .declared import DeclaredOptimizer

_log = logging.getLogger("torch_dpbayes")


class PrivateOptimizer(DeclaredOptimizer):
    """Base of the private samplers. A subclass says how much noise it wants and what it does with
    the noisy gradient.

    Args:
        params: parameters, named parameters or parameter groups, as for every torch optimizer.
            ``lr``, ``prior_std`` and ``prior_mean`` may differ between groups.
        lr: step size on the *mean* loss; ``"free"`` is :attr:`free_lr`.
        num_data: number of records N, a public constant.
        expected_batch_size: B, a public constant; under Poisson sampling B/N is the sampling rate.
        max_grad_norm: clip norm C of one record's gradient, over all parameters together; at least
            1e-12. None: the C at which ``noise_multiplier`` is the sampler's own noise z_L at T,
            with the lr that the optimizer is built with: C = C'·z_L(C')/z for any C'; of several
            groups the smallest. It stays: when a schedule changes lr, z is the larger of
            ``noise_multiplier`` and z_L, as ever. So build with the largest lr of the schedule: T
            holds throughout, and less than the target ε is spent; above that lr T is exceeded.
        noise_multiplier: floor of the noise std on the clipped sum, in units of C.
        temperature: T of the target ∝ exp(−U/T). None: 1 where C is derived or there is no floor,
            else what the floor samples at the lr in force: :attr:`effective_temperature`. With both
            T and C given the larger noise wins.
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
        prior_std: standard deviation of the Gaussian prior; ``math.inf`` for a flat one;
            ``"fan_in"`` for √(2/fan-in) of weights (parameters of two dimensions or more, whose
            fan-in is the size of one row) and 1 of biases and norms; or a dictionary of these by
            the name of a parameter or module, ``{"0": "fan_in", "norm": math.inf}``, of which the
            longest that fits counts, and 1 where none does. It needs named parameters.
        prior_mean: its mean.
    """

    _layout: Layout | None = None
    _layout_made_for: list[Any] = []  # noqa: RUF012
    # by group, and how many steps in a row had them
    _last_numbers: tuple[list[tuple[Any, ...]], int] = ([], 0)

    @abstractmethod
    def _update(self, parts: list[GroupGradient]) -> None:
        """New parameters from the noisy gradient ĝ of the mean potential, in place."""

    # torch's GradScaler skips steps when a gradient overflows, which one record decides: step()
    # refuses instead of being skipped
    _step_supports_amp_scaling = True

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
        loss = None
        with self.release.lock, torch.no_grad():
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
        for group in self.param_groups:
            require_public("a parameter group", group.values())
        for state in self.state.values():
            require_public("the optimizer's state", state.values())
        layout = self._current_layout()
        largest = finite_steps.require_finite(layout)
        for part in layout.groups:
            options = part.current_options()
            if options != part.options:  # z follows from them
                part.noise_multiplier, part.options = self._multiplier(part.group), options
                part.prior_stds = priors.stds(part.group, part.names, part.parameters)
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
        self.release.draws.delivered(is_part=True, is_last=not do_skip)

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

    # -- what a step is charged for ----------------------------------------------------------------

    def event(self, noise_multiplier: float) -> events.DpEvent:
        """The event of one step on a Poisson batch, in noise std / clip bound."""
        return self.release.event(noise_multiplier, "poisson")

    @property
    def equal_steps(self) -> int:
        """How many steps in a row, up to the last one, were made with the learning rates, noise and
        priors that are in force now.
        """
        now = [self._numbers_of(g, self._multiplier(g)) for g in self._trained_groups()]
        numbers, steps = self._last_numbers
        return steps if now == numbers else 0

    @staticmethod
    def _numbers_of(group: dict[str, Any], noise_multiplier: float) -> tuple[Any, ...]:
        std = group["prior_std"]
        std = dict(std) if isinstance(std, dict) else std  # which may be written to
        return (group["lr"], std, group["prior_mean"], noise_multiplier)

    # -- groups, copies, checkpoints ---------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; ``lr``, ``prior_std`` and ``prior_mean`` are checked."""
        super().add_param_group(param_group)
        self._layout = None
        self.release.forget_parts()

    def _current_layout(self) -> Layout:
        """Where the numbers of a step live, made anew when other parameters are trainable."""
        made_for: list[Any] = [self.release.ranks is not None]
        made_for += [
            (id(group), id(p), p.requires_grad, p.dtype, p.device)
            for group in self.param_groups
            for p in group["params"]
        ]
        if self._layout is None or self._layout_made_for != made_for:
            if self._layout is None and self.release.draws is None and self.unused_noise:
                _log.warning(
                    "noise_multiplier = %.4g is only a floor, below the sampler's own noise %.4g,"
                    " which is added and charged. The floor would be used with %s",
                    self.noise_multiplier,
                    self.langevin_noise_multiplier,
                    self.unused_noise,
                )
            self._layout = self.release.layout_of(self.param_groups)
            self._layout_made_for = made_for
        return self._layout

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
        if self.derives_clip_norm:
            private["derived_noise"] = self._derived_noise
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
        self._last_numbers = private["last_numbers"]
        self._resume_bound(private.get("derived_noise"))
        self._layout = None
