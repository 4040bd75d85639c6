"""Noise for a budget, and iterations for a noise, before anything is spent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ..accounting import events
from ..accounting.accountant import PrivacyAccountant, PrivacyBudgetExceeded
from ..accounting.calibration import noise_multiplier_for
from ..accounting.events import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    Neighboring,
    NeighboringRelation,
    SelfComposedDpEvent,
    check_delta,
    check_epsilon,
    neighboring_relation,
)
from ..errors import ArgumentError
from .checks import check_positive
from .exponential_family import ExponentialFamilyPenalty
from .hmc import DPHMC, checked_jitter
from .kernel import PrivateKernel
from .multi_owner import MultiOwnerHMC, MultiOwnerPenalty
from .penalty import DPPenalty
from .reach import (
    Iteration,
    Tuned,
    squared_distance,
    standard_deviations,
    tuned,
    warn_if_few,
)


class Plan(NamedTuple):
    """What a run will use and cost.

    Attributes:
        noise_multipliers: arguments for the kernel, ``DPHMC(model, **plan.noise_multipliers,
            ...)``.
        num_iterations: (warm-up + samples) × chains, of all chains together.
        epsilon: what they will have cost, together with the history, at ``delta``.
        delta: the target.
        num_steps: L of ``DPHMC``, 0 for a penalty kernel.
        log_ratio_slope, max_grad_norm: c and b, as far as they were given.
        jitter: of the step size of ``DPHMC``.
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
        r"""The squared distance in unconstrained space that all iterations of all chains together
        can move,

        .. math:: a\,k \,/\, \big(z_l^2c^2 + z_g^2b^2(L-\tfrac12)/L^2\big),

        the second term for DP-HMC only. a is 1.33, with the default jitter of DP-HMC 1.30. At the
        planned split of the noise this is a·μ²/c² for a penalty kernel and a·μ²/(c + b√(1−1/2L))²
        for DP-HMC, μ of the budget as Gaussian DP. Well above 10 times the sum of the posterior's
        variances is needed to mix. Plans of J equal owners overstate it J times: all of their
        noise is in the way.

        Raises:
            ValueError: ``plan`` was not told the clip bounds.
        """
        iteration = self._iteration
        return squared_distance(iteration.jitter) * self.num_iterations / iteration.variance

    def expected_sample_size(
        self, posterior_stddev: float | Tensor | Mapping[str, Tensor], *, shaped: bool = False
    ) -> float:
        """How many independent draws all iterations together are worth in the worst coordinate, at
        the best step size, on a Gaussian posterior. Warm-up counts here as if it were kept. On a
        posterior that is bent this is an upper bound.

        Args:
            posterior_stddev: standard deviations in unconstrained space, one a coordinate that
                records read, as the other latents move for free: a tensor, tensors by site
                (``stddev`` of a noise-aware posterior or of a pilot run on public data), or a
                number for one coordinate.
            shaped: whether the mass matrix or the random walk will have the posterior's shape.

        Raises:
            ValueError: a standard deviation is not positive, or ``plan`` was not told the clip
                bounds.

        **Privacy.** A function of public numbers: nothing is released or charged.
        """
        found = self.num_iterations * self._tuned(posterior_stddev, shaped).worth
        warn_if_few(found)
        return found

    def step_size(
        self, posterior_stddev: float | Tensor | Mapping[str, Tensor], *, shaped: bool = False
    ) -> float:
        """The scale of the moves at which that many samples are expected: ``step_size`` of
        ``DPHMC``; of a random walk, the factor of ``posterior_stddev`` if ``shaped``, else of 1.
        With it no charged warm-up has to find one: ``target_accept_prob=None``.

        Args:
            posterior_stddev, shaped: as for :meth:`expected_sample_size`.

        **Privacy.** A function of public numbers: nothing is released or charged.
        """
        return self._tuned(posterior_stddev, shaped).scale

    def _tuned(
        self, posterior_stddev: float | Tensor | Mapping[str, Tensor], shaped: bool
    ) -> Tuned:
        return tuned(self._iteration, standard_deviations(posterior_stddev), shaped)

    @property
    def _iteration(self) -> Iteration:
        ratio, *gradient = self.noise_multipliers.values()
        if self.log_ratio_slope is None or (gradient and self.max_grad_norm is None):
            raise ArgumentError(
                "how far a chain gets depends on the clip bounds: give plan log_ratio_slope="
                + (" and max_grad_norm=." if gradient else ".")
            )
        gradient_std = gradient[0] * (self.max_grad_norm or 0.0) if gradient else 0.0
        return Iteration(ratio * self.log_ratio_slope, gradient_std, self.num_steps, self.jitter)


def plan(
    kernel: type[PrivateKernel],
    *,
    target_epsilon: float,
    target_delta: float,
    num_iterations: int | None = None,
    noise_multiplier: float | None = None,
    ratio_noise_multiplier: float | None = None,
    grad_noise_multiplier: float | None = None,
    num_steps: int | None = None,
    log_ratio_slope: float | None = None,
    max_grad_norm: float | None = None,
    jitter: float = 0.2,
    reuse_gradients: bool = True,
    num_chains: int = 1,
    neighboring: Neighboring | NeighboringRelation = "add_or_remove_one",
    history: Iterable[tuple[Any, ...]] = (),
) -> Plan:
    r"""Noise multipliers for a number of iterations, or a number of iterations for noise
    multipliers, within a budget.

    One iteration of DP-HMC takes a ratio with noise z_l·c·d, d the distance moved, and L gradients
    with noise z_g·b. On a straight trajectory the gradient noises change the energy by a variance
    of z_g²b²d²(L−½)/L², so that the logarithm of the acceptance probability is N(−s²/2, s²) with s²
    = d²·(z_l²c² + z_g²b²(L−½)/L²), and costs 1/z_l² + L/z_g². At equal cost s is smallest for

    .. math:: z_g / z_l = \sqrt{c/b}\,\big(L^3/(L-\tfrac12)\big)^{1/4} \approx \sqrt{Lc/b},

    which is the split that is used. In simulations (leapfrog on N(0, I), step size optimised for
    the squared distance moved; L = 1, 6, 20, c/b = 0.3 and 3, little noise and much) it reaches 96
    to 100 % of the best of six splits in 5 dimensions. In one dimension with much noise and c/b =
    0.3 it reaches 63 to 68 %: a z_g 2 to 3 times as large is better there.

    Args:
        kernel: ``DPPenalty``, ``ExponentialFamilyPenalty`` or ``DPHMC``; ``MultiOwnerPenalty`` and
            ``MultiOwnerHMC`` with one owner's budget.
        target_epsilon, target_delta: for everything together.
        num_iterations: (warm-up + samples) × chains. Leave it out to ask how many the noise
            affords.
        noise_multiplier: z of the penalty kernels, if ``num_iterations`` is asked for.
        ratio_noise_multiplier, grad_noise_multiplier: likewise z_l and z_g of ``DPHMC``.
        num_steps: L of ``DPHMC``.
        log_ratio_slope: c, for :attr:`Plan.reach`; of ``ExponentialFamilyPenalty``
            ``max_statistic_norm`` times the most that η moves for each unit of distance.
        max_grad_norm: b of ``DPHMC``. The budget is split by c and b; if the noise is given, only
            the reach needs them.
        jitter: as in ``DPHMC``.
        reuse_gradients: as in ``DPHMC``.
        num_chains: each begins with one gradient more, if they are reused.
        neighboring: the accountant's relation, as ``PrivacyAccountant`` takes it.
        history: what was charged before: ``accountant.history``, or pairs (event, count).

    Returns:
        A :class:`Plan`.

    Raises:
        ValueError: an argument is missing, superfluous or out of range, or the history alone passes
            the target.

    **Privacy.** A number from public numbers: nothing is released or charged.
    """
    epsilon, delta = check_epsilon(target_epsilon), check_delta(target_delta)
    chains = events.positive_count(num_chains, "num_chains")
    neighboring = neighboring_relation(neighboring)
    history = tuple(history)
    is_hmc = kernel in (DPHMC, MultiOwnerHMC)
    if is_hmc:
        if num_steps is None:
            raise ArgumentError(
                "num_steps is needed for DPHMC, the number L of leapfrog steps of an iteration."
            )
        steps = events.positive_count(num_steps, "num_steps")
        given = {
            "ratio_noise_multiplier": ratio_noise_multiplier,
            "grad_noise_multiplier": grad_noise_multiplier,
        }
        _require_none("DPHMC", noise_multiplier=noise_multiplier)
    elif kernel in (DPPenalty, ExponentialFamilyPenalty, MultiOwnerPenalty):
        steps, given = 0, {"noise_multiplier": noise_multiplier}
        of_hmc = {"num_steps": num_steps, "max_grad_norm": max_grad_norm}
        _require_none(
            kernel.__name__,
            ratio_noise_multiplier=ratio_noise_multiplier,
            grad_noise_multiplier=grad_noise_multiplier,
            **of_hmc,
        )
    else:
        raise ArgumentError(
            "kernel must be DPPenalty, ExponentialFamilyPenalty, DPHMC, MultiOwnerPenalty or"
            f" MultiOwnerHMC, got {kernel!r}."
        )
    slope = norm = None
    if log_ratio_slope is not None:
        slope = check_positive(
            "log_ratio_slope",
            log_ratio_slope,
            "a bound on |log-likelihood ratio| / distance of a record",
        )
    if max_grad_norm is not None:
        norm = check_positive(
            "max_grad_norm", max_grad_norm, "the clip bound of a record's gradient"
        )
    noises = {
        name: events.gaussian_noise_multiplier(value, name)
        for name, value in given.items()
        if value is not None
    }
    if (num_iterations is None) == (not noises) or (noises and len(noises) < len(given)):
        raise ArgumentError(f"give either num_iterations, or the noise: {' and '.join(given)}.")

    extra = 0 if reuse_gradients else 1  # gradients an iteration beyond L

    def start(noises: dict[str, float]) -> DpEvent:
        gradient = (
            [GaussianDpEvent(noises["grad_noise_multiplier"])] if is_hmc and reuse_gradients else []
        )
        return ComposedDpEvent([SelfComposedDpEvent(event, chains) for event in gradient])

    def each(noises: dict[str, float]) -> DpEvent:
        ratio, *gradient = (GaussianDpEvent(value) for value in noises.values())
        return ComposedDpEvent(
            [ratio, *(SelfComposedDpEvent(event, steps + extra) for event in gradient)]
        )

    if num_iterations is None:
        limited = _accountant(history, epsilon, delta, neighboring)
        iterations = 0
        if limited.remaining(start(noises)) >= 1:
            iterations = int(limited.compose(start(noises)).remaining(each(noises)))
    else:
        iterations = events.positive_count(num_iterations, "num_iterations")
        split = 1.0
        if is_hmc:
            if slope is None or norm is None:
                raise ArgumentError(
                    "log_ratio_slope and max_grad_norm are needed for DPHMC: the noise is split"
                    " between ratio and gradients by them."
                )
            split = math.sqrt(slope / norm) * (steps**3 / (steps - 0.5)) ** 0.25

        def scaled(z: float) -> dict[str, float]:
            return dict(zip(given, (z, z * split), strict=False))

        def run(z: float) -> DpEvent:
            return ComposedDpEvent(
                [start(scaled(z)), SelfComposedDpEvent(each(scaled(z)), iterations)]
            )

        noise = noise_multiplier_for(
            run,
            target_epsilon=epsilon,
            target_delta=delta,
            steps=1,
            neighboring=neighboring,
            history=history,
        )
        noises = scaled(noise)
    accountant = _accountant(history, None, delta, neighboring)
    if iterations:
        accountant.compose(start(noises)).compose(each(noises), iterations)
    scatter = checked_jitter(jitter) if is_hmc else 0.0
    return Plan(noises, iterations, accountant.get_epsilon(), delta, steps, slope, norm, scatter)


def _accountant(
    history: Iterable[tuple[Any, ...]],
    epsilon: float | None,
    delta: float,
    neighboring: Neighboring,
) -> PrivacyAccountant:
    accountant = PrivacyAccountant(epsilon, delta, neighboring=neighboring)
    for event, count, *rest in history:
        if len(rest) > 1 and rest[1]:
            raise ArgumentError(
                "the history holds adaptive charges, which only their accountant's budget as a"
                " whole covers: plan for a new accountant, without history=.",
                code="budget-whole",
            )
        try:
            accountant.compose(event, count)
        except PrivacyBudgetExceeded as error:
            raise ArgumentError(
                f"what was charged before costs more than epsilon = {epsilon:g} at delta ="
                f" {delta:g} alone: raise the target.",
                code="budget-spent",
            ) from error
    return accountant


def _require_none(kernel: str, **arguments: Any) -> None:
    if superfluous := [name for name, value in arguments.items() if value is not None]:
        raise ArgumentError(
            f"{' and '.join(superfluous)} says nothing about a {kernel}: leave it out."
        )
