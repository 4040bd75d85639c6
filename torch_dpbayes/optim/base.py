"""The private step that all optimizers share: collect, check, charge, add one Gaussian, update.

A step releases S (:mod:`torch_dpbayes.release`). ĝ = S/B + ∇r(θ)/N is the noisy gradient of the
mean potential, with N = ``num_data``, B = ``expected_batch_size`` and r = −log prior. The privacy
noise *is* the noise of the sampler. The sampler needs ``z_L``, the user requires at least
``noise_multiplier``, and z is the larger of the two. The algorithm's use of ĝ is post-processing.
"""

from __future__ import annotations

import functools
import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from copy import deepcopy
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ..accounting import events
from ..errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    DivergedError,
    StateError,
    reading_state,
)
from ..release import GroupGradient, Layout, OnlyPublic, Release, require_public
from .declared import DeclaredOptimizer
from .settings import LogPrior, fits

_ORDINARY = 1e9  # smaller numbers cannot overflow float32 in one step
_kind_of = attrgetter("requires_grad", "dtype", "device")
_log = logging.getLogger("torch_dpbayes")


class PrivateOptimizer(DeclaredOptimizer):
    """Base class of the private samplers. A subclass states how much noise it needs (``_friction``
    or ``_group_langevin_noise_multiplier``), and what it does with the noisy gradient
    (``_update``).

    Args:
        params: parameters, named parameters or parameter groups, as for every torch optimizer.
            ``lr``, ``prior_std`` and ``prior_mean`` may differ between groups.
        lr: step size η. It and all other arguments are as for :class:`.DPSGLD`.

    **Privacy.** A step releases S and nothing else. Its sensitivity and event are those of
    :class:`~torch_dpbayes.optim.DPSGLD`; if groups have different z, the smallest is charged.
    """

    _layout: Layout | None = None
    _layout_made_for: list[Any] = []  # noqa: RUF012

    @abstractmethod
    def _update(self, parts: list[GroupGradient]) -> None:
        """New parameters from the noisy gradient ĝ of the mean potential, in place."""

    # torch's GradScaler skips a step if a gradient overflows, and one record can cause this. With
    # this flag it always calls step(), which raises an error
    _step_supports_amp_scaling = True

    @torch.compiler.disable  # a compiled training step calls it as it is
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Charge one release to the accountant, draw it, and move the parameters.

        Args:
            closure: evaluates the model and calls ``backward()``, as in torch; its value is
                returned unchanged.

        Raises:
            PrivacyBudgetExceeded: the step does not fit into the budget; parameters, state and
                history are unchanged.
            RuntimeError: a parameter has no per-record gradients; the batch is not a fresh,
                complete draw of the private loader; a buffer or a frozen parameter changed since
                the loader's first batch; or the model is not the one that was checked.
            DivergedError: a parameter is not finite, and nothing was charged; or it would not be
                finite after the step, so parameters and state are unchanged and the charge stays.
            ArgumentError: an option is not finite.
        """
        release, loss = self.release, None
        # if one rank raises an error, all ranks do
        with release.lock, release.ranks or release.lock, torch.set_grad_enabled(False):
            try:
                if closure is not None:
                    with torch.enable_grad():
                        loss = closure()
                if hasattr(self, "grad_scale"):  # a scaler does not delete them if step() raises
                    del self.__dict__["grad_scale"], self.__dict__["found_inf"]
                    raise StateError(
                        "GradScaler scales gradients before clipping, and skips a step if one"
                        " record overflows: use torch.autocast with bfloat16 and no GradScaler.",
                        code="grad-scaler",
                    )
                require_public("the optimizer's state", self.state.values())
                layout = self._current_layout()
                for part in layout.groups:
                    if (options := part.current_options()) != part.options:  # z depends on them
                        part.noise_multiplier, part.options = self._multiplier(part.group), options
                        part.prior_stds = _prior_stds(part)
                norm = _finite_norm(layout)
                log_prior = self._constants.log_prior
                slopes = None if log_prior is None else _slopes(log_prior, layout)
                saved = None
                if not self._cannot_overflow(layout, norm, slopes):
                    values = [p.detach().clone() for p in layout.parameters]
                    saved = values, self._copied_state({id(p): p for p in self._parameters()})
                # collect the clipped sum, check that nothing changed, charge, add noise
                if release.take(layout, self._settings, norm):
                    _add_prior(slopes, layout, self._constants.num_data)
                    self._update(layout.groups)
                    if saved is not None and (broken := _not_finite(layout)):
                        self._undo(layout, *saved)
                        raise DivergedError(
                            f"{broken!r} is not finite after this step: use a smaller lr (now"
                            f" {', '.join(str(g['lr']) for g in self.param_groups)}). Parameters"
                            " and state are unchanged; the charge stays."
                        )
            except BaseException:
                release.forget_parts()
                if self._layout is not None:
                    self._layout.buffer.zero_()  # it may hold sums without noise
                raise
            finally:
                parameters = self._parameters()
                release.source.discard(parameters)
                for p in parameters:
                    p.grad = None  # hooks write the ordinary gradient there: it is not private
        return loss

    def _parameters(self) -> list[Tensor]:
        return [*chain.from_iterable(map(itemgetter("params"), self.param_groups))]

    def _current_layout(self) -> Layout:
        """The flat buffers of a step, built again if other parameters are trainable."""
        made_for: list[Any] = [self.release.ranks is not None]
        for group in self.param_groups:
            made_for += id(group), [*map(id, group["params"])], [*map(_kind_of, group["params"])]
        if self._layout is None or self._layout_made_for != made_for:
            for group in self.param_groups:
                require_public("a parameter group", group.values())
            if self._layout is None and self.release.draws is None:
                for warning in self.unused_floor:
                    _log.warning("%s", warning)
            self._layout = self.release.layout_of(self.param_groups)
            self._layout_made_for = made_for
        return self._layout

    def _cannot_overflow(self, layout: Layout, norm: float, slopes: list[Tensor] | None) -> bool:
        """Whether one step cannot overflow float32 in any number of this layout."""
        bound, c = norm, self._constants
        for part in layout.groups:
            noise = part.noise_multiplier if math.isfinite(part.noise_multiplier) else 0.0
            scale = (c.num_data + 12 * noise) * self.max_grad_norm / c.expected_batch_size
            if slopes is not None:
                pull = float(torch.stack(torch._foreach_norm(slopes)).amax())
            else:
                pull = norm / min(part.prior_stds) ** 2
            longest = max(1.0, part.group["lr"])
            bound = max(bound, longest, longest * scale, longest * pull)
        return bound < _ORDINARY and (
            layout.is_plain or all(p.dtype is not torch.float16 for p in layout.parameters)
        )

    def _undo(self, layout: Layout, values: list[Tensor], copied: dict[str, Any]) -> None:
        """Restore parameters, groups and state; the groups stay the objects that the caller has."""
        torch._foreach_copy_(layout.parameters, values)
        for group, before in zip(self.param_groups, copied["param_groups"], strict=True):
            group.clear()
            group.update(before)
        self.state = copied["state"]

    def _kept(self, part: GroupGradient, name: str) -> list[Tensor]:
        """What an algorithm keeps between steps, initially 0: one tensor for each parameter, in the
        type of the gradient.
        """
        found = []
        for p, gradient in zip(part.parameters, part.gradients, strict=True):
            kept = self.state[p].get(name)
            kept = torch.zeros_like(gradient) if kept is None else kept.to(gradient)
            self.state[p][name] = kept
            found.append(kept)
        return found

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Delete the gradients of the last backward pass, also per-record ones."""
        parameters = self._parameters()
        self.release.source.zero_grad(parameters)
        if not set_to_none:
            super().zero_grad(False)
            return
        for p in parameters:
            p.grad = None

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Opacus' ``BatchMemoryManager`` calls this before each part of a draw; ``do_skip`` means
        that more parts follow.
        """
        if self.release.draws is None:
            raise StateError(
                "BatchMemoryManager needs the loader that PrivacyEngine.make_private returns:"
                " only this loader knows which parts belong to one batch.",
                code="loader-memory-manager",
            )
        self.release.source.is_in_parts = True
        self.release.draws.delivered(is_part=True, is_last=not do_skip)

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Use torch's wrapper of :meth:`step` only with a profiler or hooks: it costs 5 % of the
        time of a small step.
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

    def event(self, noise_multiplier: float) -> events.DpEvent:
        """The event of one step on a Poisson batch, with this noise std / clip bound."""
        return self.release.event(noise_multiplier, "poisson")

    # -- groups, copies, checkpoints ---------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> PrivateOptimizer:
        """A copy that charges the same accountant and draws its own noise."""
        copy = object.__new__(type(self))
        memo[id(self)] = copy
        for name, value in vars(self).items():
            if name.startswith("_") and not name.startswith("_optimizer_"):
                setattr(copy, name, value)
        Optimizer.__setstate__(copy, self._copied_state(memo))
        pairs = zip(self._parameters(), copy._parameters(), strict=True)
        is_other = any(own is not copied for own, copied in pairs)
        copy.release = self.release.duplicate(has_other_parameters=is_other)
        copy._layout = None
        return copy

    def _copied_state(self, memo: dict[int, Any]) -> dict[str, Any]:
        """A copy of torch's part: groups, state and defaults."""
        return deepcopy(Optimizer.__getstate__(self), memo)

    def __getstate__(self) -> dict[str, Any]:
        raise ArgumentTypeError(
            f"{type(self).__name__} cannot be pickled: a copy would draw the same noise and charge"
            " another accountant. Save state_dict().",
            code="copied",
        )

    def _shapes(self) -> list[list[list[int]]]:
        return [[list(p.shape) for p in group["params"]] for group in self.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """torch's state, the accountant's history, and the streams of noise and sampling if
        the caller passed ``generator=``.
        """
        release = self.release
        private: dict[str, Any] = {
            "algorithm": type(self).__name__,
            "shapes": self._shapes(),
            "accountant": release.accountant.state_dict(),
            "clip_norm_and_noise": (self.max_grad_norm, self.noise_multiplier),
        }
        if release.noise.generator is not None:
            private["noise"] = release.noise.generator.get_state()
        if release.draws is not None and release.draws.generator is not None:
            private["sampler"] = release.draws.position()
        if self.derives_clip_norm:
            private["derived_noise"] = self._derived_noise
        return {**super().state_dict(), "private_step": private}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume. The accountant must contain the charges of the saved run; an empty one copies
        them.

        Equal charges of another run do not count as those of the saved run. If you resume several
        copies of one state, a ledger (``PrivacyAccountant(path=...)``) counts all copies. An
        accountant in memory counts only its own; a log line and ``accountant.summary()`` say so.

        Raises:
            ValueError: the state belongs to another optimizer or to other parameters, or the
                accountant does not contain the charges of the saved run.
        """
        with reading_state():
            self._load(state_dict)

    def _load(self, state_dict: dict[str, Any]) -> None:
        private = state_dict.get("private_step")
        if private is None or not {"algorithm", "shapes", "accountant"} <= private.keys():
            private = {"algorithm": "a non-private optimizer"}
        if private["algorithm"] != type(self).__name__:
            raise CheckpointError(
                f"this is the state of {private['algorithm']}, not of {type(self).__name__}"
            )
        if private["shapes"] != self._shapes():
            raise CheckpointError(
                "the state belongs to an optimizer with another number or other shapes of"
                " parameters"
            )
        for name in self._group_options:
            if any(name not in group for group in state_dict["param_groups"]):
                raise CheckpointError(
                    f"the parameter groups of the state have no {name}: build the optimizer with"
                    " the arguments of the saved run"
                )
        then = [float(value) for value in private.get("clip_norm_and_noise", ())]
        noise, draws = self.release.noise.generator, self.release.draws
        if "sampler" not in private or draws is None or draws.generator is None:
            draws = None  # these draws do not go on from the saved position
        _resume_charges(self.release, private, draws)
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "private_step"})
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        for i, p in zip(saved_ids, self._parameters(), strict=True):
            for name, value in state_dict["state"].get(i, {}).items():
                # torch has rounded it to the parameter's dtype
                if isinstance(value, Tensor) and value.dtype != p.dtype:
                    self.state[p][name] = value.detach().clone().to(p.device)
        self.release.start_afresh()
        if "noise" in private and noise is not None:
            noise.set_state(private["noise"])
        if draws is not None:
            draws.resume(private["sampler"])
        self._resume_bound(private.get("derived_noise"))
        now = self.max_grad_norm, self.noise_multiplier
        if not all(map(math.isclose, now, then)):
            _log.warning(
                "clip norm and noise multiplier are %g and %g; the saved run had %g and %g:"
                " samples of the two may have different temperatures",
                *now,
                *then,
            )
        self._layout = None


def _resume_charges(release: Release, saved: Mapping[str, Any], draws: Any) -> None:
    """Check that the accountant contains the saved run's charges; an empty one copies them.
    ``draws``: the sampler, if it goes on from the saved position.

    Raises:
        ValueError: a charge is missing, or the saved run's batches would be drawn again.
    """
    if draws is not None:
        draws.require_position(saved["sampler"])
    accountant, releases = release.accountant, len(release.accountant)
    charged = sum(int(count) for _, count, *_ in saved["accountant"]["history"])
    speaks = release.ranks is None or release.ranks.rank == 0
    # other ranks' states name the job of rank 0: rank 0 compares the jobs, and it adds the noise
    if speaks or accountant.path is not None or releases < charged:
        accountant.resume(saved["accountant"])
        if speaks and accountant.path is None and not releases and len(accountant):
            _log.warning(
                "resumed with an accountant in memory: releases after this state was saved, or from"
                " another copy of it, are not counted. PrivacyAccountant(path=...) counts all."
            )
    if draws is None:
        return
    # later steps of a pass that is paid add no charge by which a filled accountant could tell
    is_paid = saved["sampler"].get("charged_noise") is not None
    if len(accountant) > charged or (is_paid and releases):
        later = "may count steps" if is_paid else "was charged"
        raise CheckpointError(
            f"the accountant {later} after this state was saved, and the DataLoader's generator="
            " would draw those batches again, with other noise: leave it out."
        )


# -- the prior -------------------------------------------------------------------------------------


def _prior_stds(part: GroupGradient) -> list[float]:
    """σ of each parameter's Gaussian prior."""
    result = []
    for name, p in zip(part.names, part.parameters, strict=True):
        stated = part.group["prior_std"]
        if isinstance(stated, Mapping):
            found = [key for key in stated if fits(key, name)]
            stated = stated[max(found, key=len)] if found else 1.0
        fan_in = math.sqrt(2 / p[0].numel()) if stated == "fan_in" and p.dim() > 1 else 1.0
        result.append(fan_in if stated == "fan_in" else float(stated))
    return result


def _slopes(log_prior: LogPrior, layout: Layout) -> list[Tensor]:
    """∇r of a ``log_prior``; :func:`_add_prior` itself computes it for the Gaussian prior."""
    with torch.enable_grad():
        named = {name: p.detach().requires_grad_() for name, p in layout.named}
        with OnlyPublic():
            value = log_prior(named)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ArgumentError(
                "log_prior must return a scalar tensor, the log density of the parameters"
            )
        require_public("log_prior", [value])
        found = torch.autograd.grad(value, list(named.values()), allow_unused=True)
    result = [
        torch.zeros_like(p) if g is None else -g
        for p, g in zip(layout.parameters, found, strict=True)
    ]
    if not all(bool(torch.isfinite(g).all()) for g in result):
        raise ArgumentError("the gradient of log_prior is not finite at the current parameters")
    return result


def _add_prior(found: list[Tensor] | None, layout: Layout, num_data: int) -> None:
    """Turn S/B into ĝ = S/B + ∇r(θ)/N, in place."""
    if found is not None:
        gradients = [gradient for part in layout.groups for gradient in part.gradients]
        torch._foreach_add_(gradients, found, alpha=1.0 / num_data)
        return
    for part in layout.groups:
        if math.isfinite(min(part.prior_stds)):
            weights = [1.0 / (std**2 * num_data) for std in part.prior_stds]
            if len(set(weights)) == 1:
                torch._foreach_add_(part.gradients, part.parameters, alpha=weights[0])
            else:
                for gradient, p, weight in zip(
                    part.gradients, part.parameters, weights, strict=True
                ):
                    gradient.add_(p, alpha=weight)
            if (mean := part.group["prior_mean"]) != 0.0:
                torch._foreach_sub_(part.gradients, [weight * mean for weight in weights])


def _finite_norm(layout: Layout) -> float:
    """The sum of the parameters' norms.

    Raises:
        DivergedError: a parameter is not finite.
    """
    dtype = None if layout.is_plain else layout.dtype
    norms = torch._foreach_norm(layout.parameters, 2, dtype=dtype)
    numbers = map(float, norms) if norms[0].is_cpu else torch.stack(norms).tolist()
    total: float = sum(numbers)  # NaN if one of them is NaN
    if not math.isfinite(total) and (broken := _not_finite(layout)):
        raise DivergedError(
            f"parameter {broken!r} is not finite, so every gradient would count as zero: load a"
            " saved state and use a smaller lr. Nothing was charged."
        )
    return total


def _not_finite(layout: Layout) -> str:
    """Name of a parameter that is not finite, or an empty string."""
    return next((name for name, p in layout.named if not bool(torch.isfinite(p).all())), "")
