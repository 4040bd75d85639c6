"""DP-SGFS: stochastic gradient Fisher scoring, preconditioned by a private estimate of the
Fisher information.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, Unpack

import torch
from torch import Tensor

from ..accounting.events import neighboring_relation
from ..errors import ArgumentError, StateError
from ..noise import add_gaussian, check_positive, digest
from ..per_sample.gradient_source import GradientSource
from ..release import ClippedSum, GroupGradient, Layout
from .base import PrivateOptimizer
from .settings import Options, read_only, require_fraction


class DPSGFS(PrivateOptimizer):
    r"""Differentially private stochastic gradient Fisher scoring.

    .. math::
        S = \sum_{i \in \mathrm{batch}} g_i + z C \xi, \qquad
        M = \sum_{i \in \mathrm{batch}} g_i g_i^\top + W, \qquad
        \hat g = S / B + \nabla r(\theta) / N

    .. math::
        \theta \leftarrow \theta - 2T (T A + K)^{-1} N \hat g, \qquad
        A = N \hat I + \nabla^2 r, \qquad K = \frac{1-q}{q} N \hat I + (z C / q)^2

    .. math:: \hat I \leftarrow (1 - \beta) \hat I + \beta M / B

    with gradients g_i clipped to C, W a symmetric Gaussian matrix whose diagonal has the standard
    deviation σ_F = zC²/√ϕ and the rest σ_F/√2, q = B/N. K is the covariance of N·ĝ, with privacy
    noise and minibatch noise. On a Gaussian posterior the stationary covariance is exactly T·A⁻¹ if
    Î is the true Fisher information per record, for every z, q and prior. z =
    max(``noise_multiplier``, z_L) with SGLD's z_L = (B/C)·√(2T/(ηN)): η only sets the noise, and
    η → 0 is SGLD. A step uses Î before its own M is added. Î starts at C², its largest value, so
    that the first steps are small, and averages with β = max(1 − ``fisher_decay``, 1/(t+2)).
    Eigenvalues of Î below its noise level s√(2d) are raised to it (entries below s√2 for
    ``"diagonal"``); s is the standard deviation of the noise that remains after averaging,
    (σ_F/B)·√(β/(2−β)) in the long run. (A floor at the noise of a single M would raise accurately
    estimated eigenvalues, and make the covariance too small.)

    ``fisher="diagonal"`` keeps only Σ g∘g, for any number of parameters d. It is exact if the
    posterior's precision is diagonal, or if privacy noise dominates, so that steps are small;
    otherwise correlations make the samples too wide or too narrow.

    Source: Ahn, Korattikara and Welling (2012); Wang, Fienberg and Smola (2015), Algorithm 4.
    We correct four defects of theirs: the step goes uphill; the noise that is added to the privacy
    noise has variance 1/(N²η) instead of 4/(N²η); W, and so the preconditioner, is not symmetric;
    its constants add up to about 3ε instead of the claimed 2ε. Their preconditioner also omits the
    prior's precision, so the covariance is not that of the posterior.

    Args:
        params: as for :class:`DPSGLD`.
        lr: η of the z_L above: the step size at which SGLD would add this much noise; ``"free"``
            is :attr:`free_lr`.
        fisher: ``"full"`` for up to a few thousand parameters (a d × d matrix is factorised every
            step), ``"diagonal"`` for any number.
        fisher_decay: 1 − β in [0, 1).
        fisher_share: ϕ > 0. Larger values make the Fisher estimate more precise and the step more
            expensive. On full batches under replace-one, values up to ½ cost nothing.
        sensitivity_scale: F, a public positive vector of length d, for all trainable parameters in
            order, from public data or earlier releases. Gradients are clipped to ‖g/F‖ ≤ C and the
            noise is zC·F∘ξ: less for parameters whose gradients are known to be small.
        options: as for :class:`DPSGLD`. The temperature is positive; if it is derived from the
            noise, all groups get the highest one. ``log_prior`` is refused: the step needs its
            Hessian.

    Raises:
        ValueError: an argument is out of range, or a full Fisher matrix does not fit into memory;
            the message says what to write.

    **Privacy.** One step releases (S, M) jointly. Adding or removing a record moves S by at most C
    and M by at most C² in Frobenius norm: together √(1+ϕ)/z standard deviations. Replacing one on
    full batches, or swapping one member of an unspecified batch, moves them by √s/z with s = 4 for
    ϕ ≤ ½ and 2 + 2ϕ + 1/(2ϕ) beyond. The event is ``PoissonSampledDpEvent(B/N,
    GaussianDpEvent(z/√(1+ϕ)))`` under Poisson sampling; ``GaussianDpEvent(z/√(1+ϕ))`` (add or
    remove) or ``GaussianDpEvent(2z/√s)`` (replace) on full batches, on other batches
    ``UnspecifiedBatchGaussianDpEvent(2z/√s)`` (replace-one) or, with ``sampling="recordwise"``,
    ``RecordwiseBatchGaussianDpEvent(2z/√s)``; ``NonPrivateDpEvent()`` at z = 0.
    """

    _holds_temperature = _needs_temperature = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Literal["free"],
        *,
        fisher: Literal["full", "diagonal"] = "full",
        fisher_decay: float = 0.99,
        fisher_share: float = 0.5,
        sensitivity_scale: Tensor | None = None,
        **options: Unpack[Options],
    ) -> None:
        if fisher not in ("full", "diagonal"):
            raise ArgumentError(f'fisher must be "full" or "diagonal", got {fisher!r}')
        if options.get("log_prior") is not None:
            raise ArgumentError(
                "DPSGFS does not support log_prior=, because it needs the curvature: use prior_std="
            )
        self._fisher, self._fisher_decay = fisher, require_fraction("fisher_decay", fisher_decay)
        self._fisher_share = check_positive("fisher_share", fisher_share)
        super().__init__(params, lr, **options)
        trainable = [p for g in self.param_groups for p in g["params"] if p.requires_grad]
        if trainable:
            self._query.extra_size(sum(p.numel() for p in trainable), trainable[0].device)
        if sensitivity_scale is not None:
            self._set_scale(sensitivity_scale)

    def _set_scale(self, given: Tensor) -> None:
        like = self._current_layout().gradient
        scale = torch.as_tensor(given).detach().clone().to(like)
        if scale.shape != like.shape or not bool((scale > 0).all() & (scale < math.inf).all()):
            raise ArgumentError(
                "sensitivity_scale must be a vector of positive finite numbers, one for each of"
                f" {len(like)} trainable parameters, got shape {tuple(scale.shape)}"
            )
        self._query.scale = scale

    def _make_query(self, max_grad_norm: float, expected_batch_size: float) -> FisherSum:
        is_full, share = self._fisher == "full", self._fisher_share
        return FisherSum(max_grad_norm, expected_batch_size, is_full=is_full, share=share)

    @property
    def _query(self) -> FisherSum:
        query = self.release.query
        assert isinstance(query, FisherSum)
        return query

    def _settings(self) -> dict[str, Any]:
        scale = "" if self._query.scale is None else digest([self._query.scale], 64).hex()
        own = {"fisher": self._fisher, "fisher_share": self.fisher_share}
        return {**super()._settings(), **own, "sensitivity_scale": scale}

    fisher: Final[Literal["full", "diagonal"]] = read_only("_fisher", '"full" or "diagonal".')
    fisher_share: Final[float] = read_only(
        "_fisher_share", "ϕ: (zC²/σ_F)², the weight of the Fisher release."
    )

    @property
    def sensitivity_scale(self) -> Tensor | None:
        """F, the scale of each parameter's gradient; None: all are 1."""
        return None if self._query.scale is None else self._query.scale.clone()

    def state_dict(self) -> dict[str, Any]:
        """The state of every private optimizer, and F, the unit of the Fisher estimate."""
        state = super().state_dict()
        state["private_step"]["sensitivity_scale"] = self._query.scale
        return state

    def _load(self, state_dict: dict[str, Any]) -> None:  # sets F to the saved one
        super()._load(state_dict)
        self._query.scale = None
        if (scale := state_dict["private_step"]["sensitivity_scale"]) is not None:
            self._set_scale(scale)

    # -- the step ----------------------------------------------------------------------------------

    def _update(self, parts: list[GroupGradient]) -> None:
        smallest = min(part.noise_multiplier for part in parts)
        if not math.isfinite(smallest):
            return  # every lr is 0: nothing was released
        layout = self._current_layout()
        state = self.state[layout.parameters[0]]
        moment = self._query.second_moment(layout)
        if state.get("fisher", torch.empty(0)).shape != moment.shape:
            start = torch.full_like(layout.gradient, self.max_grad_norm**2)
            state["fisher"] = start if self._fisher == "diagonal" else torch.diag(start)
            state["fisher_steps"], state["fisher_noise"] = 0, 0.0
        fisher: Tensor = state["fisher"].to(moment)
        state["fisher"] = fisher
        beta = max(1 - self._fisher_decay, 1 / (state["fisher_steps"] + 2))
        state["fisher_steps"] += 1
        floor = math.sqrt(2 * state["fisher_noise"])
        added = (self._query.fisher_noise(smallest) / self.expected_batch_size) ** 2
        # variance of the noise in the estimate
        state["fisher_noise"] = (1 - beta) ** 2 * state["fisher_noise"] + beta**2 * added
        if self._fisher == "diagonal":
            self._step_diagonal(parts, fisher, floor)
            fisher.lerp_(moment, beta)
        else:
            self._step_full(parts, fisher, floor * math.sqrt(len(fisher)))
            fisher.lerp_((moment + moment.T).div_(2), beta)

    def _curvature_weight(self) -> float:
        """T·A + K = weight·Î + T·∇²r + Σ."""
        rate = self.expected_batch_size / self.num_data
        return self.num_data * (self.effective_temperature + (1 - rate) / rate)

    def _privacy_variance(self, part: GroupGradient) -> float:
        """Σ: the variance of the privacy noise in N·ĝ."""
        if part.group["lr"] == 0:  # this group takes no step
            return 0.0
        noise = part.noise_multiplier * self.max_grad_norm  # rounding depends on this order
        return (noise * self.num_data / self.expected_batch_size) ** 2

    def _step_diagonal(self, parts: list[GroupGradient], fisher: Tensor, floor: float) -> None:
        weight, sizes = self._curvature_weight(), [len(part.gradient) for part in parts]
        temperature = self.effective_temperature
        scales: Sequence[Tensor | None] = (
            [None] * len(parts) if self._query.scale is None else self._query.scale.split(sizes)
        )
        for part, information, scale in zip(parts, fisher.split(sizes), scales, strict=True):
            if part.group["lr"] == 0:
                continue
            noise = self._privacy_variance(part) / weight
            priors = [temperature / std**2 / weight for std in part.prior_stds]
            if scale is None:
                damping = _spread([noise + p for p in priors], part.gradients, part.gradient)
            else:  # in the units of F, as the estimate
                damping = _spread(priors, part.gradients, part.gradient)
                damping.div_(scale.square()).add_(noise)
                part.gradient.div_(scale.square())
            part.gradient.div_(information.clamp(min=floor).add_(damping))
            alpha = -2 * temperature * self.num_data / weight
            torch._foreach_add_(part.parameters, part.gradients, alpha=alpha)

    def _step_full(self, parts: list[GroupGradient], fisher: Tensor, floor: float) -> None:
        if (temperature := self.effective_temperature) == 0:
            return  # every lr is 0
        matrix = _at_least(fisher, floor).to(torch.float64) * self._curvature_weight()
        flats = [part.gradient for part in parts]
        still = _spread([part.group["lr"] == 0 for part in parts], flats, matrix)
        noise = _spread([*map(self._privacy_variance, parts)], flats, matrix)
        # groups with lr = 0 get almost infinite noise
        noise += still * 1e12 * (noise.amax() + matrix.diagonal().amax())
        matrix.diagonal().add_(noise)
        # convert from the units of F
        if (scale := self._query.scale) is not None:
            matrix = matrix * scale.double().outer(scale.double())
        priors = [temperature / std**2 for part in parts for std in part.prior_stds]
        pieces = [gradient for part in parts for gradient in part.gradients]
        matrix.diagonal().add_(_spread(priors, pieces, matrix))
        gradient = torch.cat(flats).to(torch.float64)
        step = torch.cholesky_solve(gradient[:, None], torch.linalg.cholesky(matrix))[:, 0]
        moves = (step * (1 - still)).split([*map(len, flats)])
        for part, move in zip(parts, moves, strict=True):
            part.gradient.copy_(move)
            alpha = -2 * temperature * self.num_data
            torch._foreach_add_(part.parameters, part.gradients, alpha=alpha)


def _spread(values: Sequence[float], pieces: Sequence[Tensor], like: Tensor) -> Tensor:
    """One value per piece, repeated for all its numbers."""
    pairs = zip(values, pieces, strict=True)
    return torch.cat([like.new_full((piece.numel(),), value) for value, piece in pairs])


def _at_least(fisher: Tensor, floor: float) -> Tensor:
    """``fisher`` with eigenvalues below ``floor`` raised to it; without such eigenvalues, no
    decomposition is computed.
    """
    shifted = fisher.clone()
    shifted.diagonal().sub_(floor)
    if int(torch.linalg.cholesky_ex(shifted)[1]) == 0:
        return fisher
    values, vectors = torch.linalg.eigh(fisher)
    return (vectors * values.clamp(min=floor)) @ vectors.T


class FisherSum(ClippedSum):
    """(Σ g_i, Σ g_i g_iᵀ) of clipped gradients, or Σ g_i∘g_i for the diagonal. ``share`` is ϕ =
    (zC²/σ_F)², the weight of the second moment. Gradients are divided by F, ``scale``, before they
    are clipped; None means 1.

    **Privacy.** :class:`DPSGFS` states the sensitivity.
    """

    def __init__(
        self, max_grad_norm: float, expected_batch_size: float, *, is_full: bool, share: float
    ) -> None:
        super().__init__(max_grad_norm, expected_batch_size)
        self.is_full, self.share = is_full, share
        self.scale: Tensor | None = None

    def extra_size(self, num_parameters: int, device: torch.device) -> int:
        if not self.is_full:
            return num_parameters
        # buffer, estimate, and three matrices in float64
        needed, available = 48 * num_parameters**2, _available_memory(device)
        if needed > available:
            raise ArgumentError(
                f'fisher="full" needs {num_parameters} x {num_parameters} matrices, together'
                f" {needed / 2**30:.1f} GiB, but there are {available / 2**30:.1f} GiB: use"
                ' fisher="diagonal", or freeze parameters by requires_grad_(False).'
            )
        return num_parameters**2

    def second_moment(self, layout: Layout) -> Tensor:
        """A view of the second moment in the buffer, in its own shape."""
        size = len(layout.gradient)
        return layout.extra.view(size, size) if self.is_full else layout.extra

    def fisher_noise(self, noise_multiplier: float) -> float:
        """σ_F = zC²/√ϕ."""
        return noise_multiplier * self.max_grad_norm**2 / math.sqrt(self.share)

    def collect(self, source: GradientSource, layout: Layout) -> int:
        if self.scale is not None:
            if len(self.scale) != len(layout.gradient):
                raise StateError(
                    "the trainable parameters changed since sensitivity_scale was given: build"
                    " the optimizer again"
                )
            self.scale = self.scale.to(layout.gradient)
        return source.add_clipped_sum(
            layout.named,
            self.max_grad_norm,
            layout.pieces,
            scale=self.scale,
            second_moment=self.second_moment(layout),
            beta=layout.beta,
        )

    def add_noise(self, layout: Layout, smallest: float, stream: torch.Generator | None) -> None:
        super().add_noise(layout, smallest, stream)
        if stream is None:
            layout.extra.div_(self.expected_batch_size)
        # noise on all d² entries; after averaging M and Mᵀ its std is σ_F on the diagonal and
        # σ_F/√2 elsewhere
        else:
            std = self.fisher_noise(smallest)
            add_gaussian(layout.extra, std, self.expected_batch_size, stream)
        if self.scale is not None:
            layout.gradient.mul_(self.scale)

    def equivalent_noise_multiplier(
        self, noise_multiplier: float, *, is_full: bool, sampling: str | None, neighboring: str
    ) -> float:
        share = self.share
        swap = 4.0 if share <= 0.5 else 2 + 2 * share + 1 / (2 * share)
        is_replacement = neighboring_relation(neighboring) == "replace_one"
        # a swap in a truncated batch is charged at twice the distance of an addition, which is more
        is_drawn = sampling in ("poisson", "truncated_poisson", "random_allocation", "users")
        is_swap = is_replacement if is_full else not is_drawn
        return (
            2 * noise_multiplier / math.sqrt(swap)
            if is_swap
            else noise_multiplier / math.sqrt(1 + share)
        )


def _available_memory(device: torch.device) -> int:
    """Bytes of free memory on a GPU, or of all memory on the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
