r"""Noise multipliers for a budget, and how far a chain moves with them, before any charge.

If noise limits the step size, an iteration over a distance d has the log acceptance ratio
N(−s²/2, s²), s² = d²·v, and is accepted with probability 2Φ(−s/2). Its expected squared distance
2Φ(−s/2)·s²/v is largest at s = 2.38, where it is 1.326/v. The *reach* is this number times the
number of iterations k. No step size, mass matrix or number of iterations has a larger reach at the
same budget. Jitter reduces it: to 1.298·k/v at j = 0.2, and to .880·k/v at j = 1.

The effective sample size depends on the posterior. For a Gaussian with given standard deviations
one iteration from stationarity is simulated, for many step sizes and with the kernel's own noise.
If ρ is a coordinate's first autocorrelation, k iterations are worth k(1−ρ)/(1+ρ) samples. Derived
in this project.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..accounting import bounds, events
from ..accounting.calibration import counts_of, noise_multiplier_for
from ..errors import ArgumentError
from ..noise import check_positive
from .exponential_family import ExponentialFamilyPenalty
from .hmc import DPHMC, checked_jitter
from .kernel import PrivateKernel
from .multi_owner import MultiOwnerHMC, MultiOwnerPenalty
from .penalty import DPPenalty

FEW = 10  # a kernel with fewer effective samples has not mixed
_DRAWS, _SCALES = 1024, 40
_LONGEST, _SHORTEST = 2.5, 0.01  # tested scales: largest / optimum for noise, smallest / largest


class Plan(NamedTuple):
    """The noise and the cost of a run.

    Attributes:
        noise_multipliers: arguments for the kernel, ``DPHMC(model, **plan.noise_multipliers,
            ...)``.
        num_iterations: (warm-up + samples) × chains.
        epsilon: ε at ``delta`` of these iterations and the history together.
        delta: the target δ.
        num_steps: L of ``DPHMC``, 0 for a penalty kernel.
        log_ratio_slope, max_grad_norm: c and b, if given.
        jitter: jitter of the step size of ``DPHMC``.
    """

    noise_multipliers: dict[str, float]
    num_iterations: int
    epsilon: float
    delta: float
    num_steps: int = 0
    log_ratio_slope: float | None = None
    max_grad_norm: float | None = None
    jitter: float = 0.0

    @property
    def reach(self) -> float:
        """The largest expected sum of the squared lengths of all moves, in unconstrained space. For
        k iterations it is 1.33·k/v, or 1.30·k/v with DP-HMC's default jitter. Here v is the
        variance of the log acceptance ratio of a move with length 1. For chains to mix, the reach
        must be well above 10 times the sum of the posterior's variances. With J equal owners it is
        J times too large, because the noise of all owners counts.

        Raises:
            ValueError: ``plan`` got no clip bounds.
        """
        return squared_distance(self.jitter) * self.num_iterations / self._variance

    def expected_sample_size(
        self, posterior_stddev: float | Tensor | Mapping[str, Tensor], *, shaped: bool = False
    ) -> float:
        """The effective sample size of all iterations together in the worst coordinate, with the
        best step size and a Gaussian posterior. Warm-up iterations count, too. For other posteriors
        this is an upper bound.

        Args:
            posterior_stddev: standard deviations in unconstrained space, one for each coordinate
                on which the likelihood depends (moves of others cost nothing): a tensor, tensors by
                site, or a number for one coordinate. Use ``unconstrained_stddev`` of a noise-aware
                posterior (only these coordinates), or a pilot run on public data.
            shaped: whether the mass matrix or the random walk will have the posterior's shape.

        Raises:
            ValueError: a standard deviation is not positive, or ``plan`` got no clip bounds.

        **Privacy.** A function of public numbers: nothing is released or charged.
        """
        found = self.num_iterations * self._tuned(posterior_stddev, shaped)[1]
        if found < FEW:
            warnings.warn(
                f"this budget gives {found:.2g} effective samples: the kernel cannot mix on such a"
                " posterior, whatever its settings. Use noise_aware.posterior, more records or a"
                " larger epsilon.",
                stacklevel=2,
            )
        return found

    def step_size(
        self, posterior_stddev: float | Tensor | Mapping[str, Tensor], *, shaped: bool = False
    ) -> float:
        """The scale of the moves that gives :meth:`expected_sample_size`: ``step_size`` of
        ``DPHMC``; for a random walk, the factor of ``posterior_stddev`` if ``shaped``, else the
        standard deviation. With it you need no charged warm-up: ``target_accept_prob=None``.

        Args:
            posterior_stddev, shaped: as for :meth:`expected_sample_size`.

        **Privacy.** A function of public numbers: nothing is released or charged.
        """
        return self._tuned(posterior_stddev, shaped)[0]

    @property
    def _stds(self) -> tuple[float, float]:
        """Standard deviations of the noise: on the log ratio per unit of distance, and on each
        gradient (0 for a penalty kernel).
        """
        ratio, *gradient = self.noise_multipliers.values()
        if self.log_ratio_slope is None or (gradient and self.max_grad_norm is None):
            raise ArgumentError(
                "how far a chain moves depends on the clip bounds: pass log_ratio_slope= to plan"
                + (" and max_grad_norm=." if gradient else ".")
            )
        gradient_std = gradient[0] * (self.max_grad_norm or 0.0) if gradient else 0.0
        return ratio * self.log_ratio_slope, gradient_std

    @property
    def _variance(self) -> float:
        """v, the variance of the log acceptance ratio per unit of squared distance."""
        (ratio_std, gradient_std), steps = self._stds, max(self.num_steps, 1)
        return ratio_std**2 + gradient_std**2 * (steps - 0.5) / steps**2

    def _tuned(
        self, posterior_stddev: float | Tensor | Mapping[str, Tensor], shaped: bool
    ) -> tuple[float, float]:
        """The best scale of the moves on a Gaussian posterior with independent coordinates, and the
        effective sample size of an iteration with it.
        """
        (ratio_std, gradient_std), num_steps = self._stds, self.num_steps
        stddev = standard_deviations(posterior_stddev)
        shape = stddev if shaped else torch.ones_like(stddev)
        # a fixed seed, for the same result in every call: all numbers are public
        generator = torch.Generator().manual_seed(0)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, len(stddev), generator=generator, dtype=torch.float64)

        start, momentum = stddev * normal(_DRAWS), normal(_DRAWS)

        def gradient(theta: Tensor, kick: Tensor) -> Tensor:
            # in coordinates in which the mass matrix is the identity
            return shape * (gradient_std * kick + theta / stddev**2)

        def trajectory(lengths: Tensor) -> tuple[Tensor, Tensor]:
            """End points of iterations, and the exact log ratios of their tests."""
            if not num_steps:
                moved = start + lengths * shape * momentum
                return moved, ((start / stddev).square() - (moved / stddev).square()).sum(1) / 2
            moved, p, slope = start, momentum, gradient(start, kicks[0])
            for kick in kicks[1:]:
                p = p - lengths / 2 * slope
                moved = moved + lengths * shape * p
                slope = gradient(moved, kick)
                p = p - lengths / 2 * slope
            kinetic = (momentum.square() - p.square()).sum(1) / 2
            change = ((start / stddev).square() - (moved / stddev).square()).sum(1) / 2
            return moved, (change + kinetic).nan_to_num(nan=-math.inf)

        kicks = normal(num_steps + 1, _DRAWS) if num_steps else start
        uniform = torch.rand(2, _DRAWS, generator=generator, dtype=torch.float64)
        test = torch.randn(_DRAWS, generator=generator, dtype=torch.float64)
        narrowest = float((stddev / shape).min())
        spread = float(torch.linalg.vector_norm(shape))
        by_noise = _LONGEST * 2.38 / (max(num_steps, 1) * spread * math.sqrt(self._variance))
        # leapfrog steps are stable below twice the narrowest direction; a walk has no such limit
        by_shape = (2.0 if num_steps else 10.0) * narrowest
        longest = min(by_noise, by_shape)
        best, most = longest, 0.0
        for scale in (longest * _SHORTEST ** (torch.arange(_SCALES) / (_SCALES - 1))).tolist():
            lengths = (scale * (1 + self.jitter * (2 * uniform[0] - 1)))[:, None]
            moved, log_ratio = trajectory(lengths)
            std = ratio_std * torch.linalg.vector_norm(moved - start, dim=1)
            accepted = uniform[1].log() < log_ratio + std * test - std**2 / 2
            squared = torch.where(accepted[:, None], (moved - start) ** 2, 0.0).mean(0)
            unlike = (squared / (2 * stddev**2)).clamp(max=1.0)  # 1 − ρ
            worth = float((unlike / (2 - unlike)).min())
            if worth > most:
                best, most = scale, worth
        return best, most


def plan(
    kernel: type[PrivateKernel],
    *,
    target_epsilon: float,
    target_delta: float,
    num_iterations: int,
    num_steps: int | None = None,
    log_ratio_slope: float | None = None,
    max_grad_norm: float | None = None,
    jitter: float = 0.2,
    reuse_gradients: bool = True,
    num_chains: int = 1,
    neighboring: events.Neighboring | events.NeighboringRelation = "add_or_remove_one",
    history: Iterable[tuple[Any, ...]] = (),
) -> Plan:
    r"""Noise multipliers for a number of iterations within a budget. (For a given noise
    ``PrivacyAccountant.remaining`` returns the number of iterations that fit.)

    One iteration of DP-HMC releases a ratio with noise z_l·c·d, where d is the distance moved, and
    L gradients with noise z_g·b. Its cost is 1/z_l² + L/z_g². On a straight trajectory the gradient
    noise changes the energy with variance z_g²b²d²(L−½)/L². So the log acceptance ratio is N(−s²/2,
    s²) with s² = d²·(z_l²c² + z_g²b²(L−½)/L²). At equal cost s is smallest for

    .. math:: z_g / z_l = \sqrt{c/b}\,\big(L^3/(L-\tfrac12)\big)^{1/4} \approx \sqrt{Lc/b}.

    This split is used. (For one dimension, much noise and c/b = 0.3, a z_g 2 to 3 times as large
    would be better.)

    Args:
        kernel: ``DPPenalty``, ``ExponentialFamilyPenalty`` or ``DPHMC``; ``MultiOwnerPenalty`` and
            ``MultiOwnerHMC`` with one owner's budget.
        target_epsilon, target_delta: for all iterations and the history together.
        num_iterations: (warm-up + samples) × chains.
        num_steps, jitter, reuse_gradients: as in ``DPHMC``.
        log_ratio_slope: c, for ``DPHMC`` and for :attr:`Plan.reach`. For
            ``ExponentialFamilyPenalty`` it is ``max_statistic_norm`` times the largest change of η
            per unit of distance.
        max_grad_norm: b of ``DPHMC``; c and b decide how its budget is split.
        num_chains: with ``reuse_gradients`` each chain begins with one extra gradient.
        neighboring: the accountant's relation, as for ``PrivacyAccountant``.
        history: earlier charges: ``accountant.history``, or pairs (event, count).

    Raises:
        ValueError: an argument is missing, superfluous or out of range, or the history alone
            exceeds the target.

    **Privacy.** Computed from public numbers: nothing is released or charged.
    """
    delta = events.check_delta(target_delta)
    iterations = events.positive_count(num_iterations, "num_iterations")
    chains = events.positive_count(num_chains, "num_chains")
    given = {"log_ratio_slope": log_ratio_slope, "max_grad_norm": max_grad_norm}
    slope, norm = (
        None if value is None else check_positive(name, value, "a clip bound of a record")
        for name, value in given.items()
    )
    names, steps, gradients, split, scatter = ["noise_multiplier"], 0, 0, 1.0, 0.0
    if kernel in (DPHMC, MultiOwnerHMC):
        if slope is None or norm is None:
            raise ArgumentError(
                "log_ratio_slope and max_grad_norm are needed for DPHMC: they decide how the"
                " noise is split between ratio and gradients."
            )
        names = ["ratio_noise_multiplier", "grad_noise_multiplier"]
        steps = events.positive_count(num_steps, "num_steps")
        gradients = steps * iterations + (chains if reuse_gradients else iterations)
        split = math.sqrt(slope / norm) * (steps**3 / (steps - 0.5)) ** 0.25
        scatter = checked_jitter(jitter)
    elif kernel not in (DPPenalty, ExponentialFamilyPenalty, MultiOwnerPenalty):
        raise ArgumentError(
            "kernel must be DPPenalty, ExponentialFamilyPenalty, DPHMC, MultiOwnerPenalty or"
            f" MultiOwnerHMC, got {kernel!r}."
        )
    elif num_steps is not None or norm is not None:
        raise ArgumentError(
            f"num_steps and max_grad_norm have no effect on {kernel.__name__}: leave them out."
        )

    def event_of(z: float) -> events.DpEvent:
        counts = [(z, iterations), (z * split, gradients)]
        each = [events.SelfComposedDpEvent(events.GaussianDpEvent(m), n) for m, n in counts if n]
        return events.ComposedDpEvent(each)

    history = tuple(history)
    noise = noise_multiplier_for(
        event_of,
        target_epsilon=target_epsilon,
        target_delta=delta,
        steps=1,
        neighboring=neighboring,
        history=history,
    )
    charges = counts_of([*history, (event_of(noise), 1)], neighboring)
    spent = bounds.upper_epsilon(charges, delta)
    noises = dict(zip(names, (noise, noise * split), strict=False))
    return Plan(noises, iterations, spent, delta, steps, slope, norm, scatter)


# -- how far a chain moves -------------------------------------------------------------------------


def squared_distance(jitter: float = 0.0) -> float:
    """max over s of E[S²·2Φ(−S/2)], S = s·(1 + ``jitter``·(2u − 1)) with u uniform: the expected
    squared distance of an iteration, times v.
    """
    uniform = (torch.arange(200, dtype=torch.float64) + 0.5) / 200
    s = torch.linspace(1.0, 4.0, 601, dtype=torch.float64)[:, None]
    s = s * (1 + jitter * (2 * uniform - 1))
    return float((s**2 * 2 * torch.special.ndtr(-s / 2)).mean(1).max())


def standard_deviations(value: float | Tensor | Mapping[str, Tensor]) -> Tensor:
    """``value`` as a vector, with the sites sorted by name."""
    if isinstance(value, Mapping):
        sites = [torch.as_tensor(value[name]).reshape(-1) for name in sorted(value)]
        value = torch.cat(sites) if sites else torch.empty(0)
    vector = torch.as_tensor(value, dtype=torch.float64).detach().cpu().reshape(-1)
    if not len(vector) or not bool((vector.isfinite() & (vector > 0)).all()):
        raise ArgumentError(
            "posterior_stddev must have one positive standard deviation for each unconstrained"
            " coordinate on which the likelihood depends: pass a number, a tensor, or tensors by"
            " site."
        )
    return vector
