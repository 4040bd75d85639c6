r"""What each method can be expected to reach, from public numbers alone, before anything is spent.

All of it is for a likelihood with the curvature F = n·``information`` in every direction, a
N(0, ``prior_std``²) prior, and the one noise multiplier z that would use the budget up in a single
release: what a method can do is a function of that and hardly of how it divides it.

* noise-aware: Λ = P + F²/(F + V + curvature error), V from the method's own plan. A full curvature
  errs by ½v²(‖Δ‖² + Δ_j²) in a direction, a diagonal one by v²Δ_j², Δ being as long as the width.
* chains and samplers are diffusions with the posterior as their law. What matters is how long they
  are: τ relaxation times. A kernel moves a squared distance of at most ``reach`` over all its
  iterations, so τ = reach·(F+P)/2d; a sampler at temperature T has τ = 2T(F+P)/(zC)². The first
  half of them is warm-up. Of a diffusion of length τ, begun at a distance x₀, with s² = T/(F+P):

.. math::
    \mathrm{error}^2 = x_0^2\Big(\frac{1-e^{-\tau}}\tau\Big)^2 + \frac{s^2}{\tau^2}(2\tau - 3 +
    4e^{-\tau} - e^{-2\tau}), \qquad
    \mathrm{width}^2 = s^2 + (x_0^2 - s^2)\frac{1-e^{-2\tau}}{2\tau} - \mathrm{error}^2
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..accounting.accountant import PrivacyAccountant
from ..accounting.events import Neighboring, positive_count
from ..mcmc.checks import check_positive
from ..mcmc.reach import squared_distance
from .from_gradients import steps_needed
from .from_run import independent_samples_needed, samples_needed
from .planning import LARGEST_FULL_CURVATURE, diagonal_plan, general_plan, total_multiplier

_ENOUGH = 10.0  # relaxation times
_SHORT_BY = 1.25  # how much too narrow a posterior may be and still be said to cover
_ROUNDS = 20
_LEAST, _MOST = 1e-30, 1e30  # of a number whose fourth power is taken


@dataclass(frozen=True, slots=True)
class MethodForecast:
    """What one method can be expected to reach, per direction, in standard deviations of the
    records' own posterior.
    """

    method: str
    width: float
    """Standard deviation that the method states."""
    error: float
    """Root mean square distance of its mean from that of the records' own posterior."""
    note: str = ""
    is_possible: bool = True
    """False where so many parameters would need a matrix too large to be held."""

    @property
    def covers(self) -> bool:
        """Whether its intervals hold the truth about as often as they say."""
        return math.hypot(self.error, 1.0) <= _SHORT_BY * self.width


@dataclass(frozen=True, slots=True)
class MethodComparison:
    """Forecasts for all methods; ``print`` it for a table."""

    forecasts: tuple[MethodForecast, ...]
    posterior_std: float
    """Standard deviation of the records' own posterior, which no private method states."""
    noise_multiplier: float
    """Of the one release that would use the budget up."""

    @property
    def recommended(self) -> MethodForecast:
        """The sharpest of those that cover and are possible."""
        found = (f for f in self.forecasts if f.covers and f.is_possible)
        return min(found, key=lambda f: f.width)

    def __str__(self) -> str:
        wide = max(30, *(len(f.method) + 1 for f in self.forecasts))
        lines = [
            (
                f"posterior sd of the records {self.posterior_std:.3g}; noise multiplier of one"
                f" release with all of the budget {self.noise_multiplier:.3g}"
            ),
            f"{'method':<{wide}}{'width':>8}{'error':>8}  covers   (in those posterior sds)",
        ]
        for f in self.forecasts:
            covers = "yes" if f.covers else "no"
            lines.append(
                f"{f.method:<{wide}}{f.width:>8.3g} {f.error:>7.3g}  {covers:<7}  {f.note}"
            )
        lines.append(f"expected best: {self.recommended.method}")
        return "\n".join(lines)


def compare_methods(
    *,
    num_data: int,
    dimension: int,
    epsilon: float,
    delta: float,
    max_grad_norm: float,
    prior_std: float = 1.0,
    information: float | None = None,
    log_ratio_slope: float | None = None,
    neighboring: Neighboring = "replace_one",
) -> MethodComparison:
    """Width and error that each method of this library can be expected to reach.

    Orders of magnitude, to choose by: real posteriors are not round, and clipping that changes many
    gradients is not in the formulas. The kernels' chains are taken to relax exponentially; from a
    start dozens of posterior standard deviations away a random walk takes longer. Beyond 4000
    parameters the forecast of ``laplace`` is that of ``curvature="diagonal"``, of a curvature that
    has little beside its diagonal, and ``DPSVI``'s ``posterior()``, with d² numbers, is not
    recommended.

    Args:
        num_data: n, the public number of records.
        dimension: d, the number of parameters.
        epsilon, delta: the budget.
        max_grad_norm: C, the clip bound of a record's gradient.
        prior_std: of every parameter.
        information: a record's curvature of −log p(x | θ) in one direction, a public guess. None:
            C²/4d, gradients half as long as the bound on average.
        log_ratio_slope: clip bound of the kernels' log ratios for each unit of distance. None: C.
        neighboring: the accountant's relation.

    Returns:
        A :class:`MethodComparison`.

    Raises:
        ValueError: a number is not positive, or so extreme that its powers are lost in floats.

    **Privacy.** A function of public numbers: nothing is released or charged.
    """
    count, size = positive_count(num_data, "num_data"), positive_count(dimension, "dimension")
    bound = _moderate("max_grad_norm", max_grad_norm, "the clip bound of a gradient")
    slope = bound
    if log_ratio_slope is not None:
        slope = _moderate("log_ratio_slope", log_ratio_slope, "the clip bound of a ratio")
    prior = _moderate("prior_std", prior_std, "of every parameter") ** -2
    each = bound**2 / (4 * size)
    if information is not None:
        each = _moderate("information", information, "a record's curvature")
    accountant = PrivacyAccountant(epsilon, delta, neighboring=neighboring)
    z = total_multiplier(accountant, epsilon, delta)
    curvature = count * each
    total = curvature + prior
    width = total**-0.5

    def forecast(
        method: str, stated: float, error: float, note: str = "", is_possible: bool = True
    ) -> MethodForecast:
        return MethodForecast(method, stated / width, error / width, note, is_possible)

    def noise_aware(
        method: str, noise: float, spread: float, note: str = "", is_possible: bool = True
    ) -> MethodForecast:
        stated = _noise_aware_width(curvature, prior, noise, spread)
        error = math.sqrt(max(stated**2 - width**2, 0.0))
        return forecast(method, stated, error, note, is_possible)

    def diffusion(
        method: str, times: float, start: float, heat: float, note: str
    ) -> MethodForecast:
        after = start * math.exp(-times) - heat / total * math.expm1(-times)  # the warm-up
        return forecast(method, *_of_diffusion(times / 2, after, heat / total), note)

    is_small = size <= LARGEST_FULL_CURVATURE
    if is_small:
        plan = general_plan(z, size, count, accountant.neighboring, clips=True)
        laplace, entries = "noise_aware.laplace", 0.5 * (size + 1)
    else:
        plan = diagonal_plan(z, accountant.neighboring, clips=True)
        laplace, entries = 'noise_aware.laplace(curvature="diagonal")', 1.0
    gradients = bound**2 / sum(m**-2 for m in plan.gradient_multipliers)
    matrices = bound**4 / sum(m**-2 for m in plan.curvature_multipliers)
    all_on_gradients = (z * bound) ** 2
    half = 2 * all_on_gradients  # the later half of DPSVI's steps
    steps = f"posterior() needs {steps_needed(size):,} steps"
    from_prior = 1 / prior + (1 / prior - 1 / total)  # squared, of a draw
    from_mean = 1 / prior - 1 / total  # of the prior's mean
    rows = [
        noise_aware(laplace, gradients, entries * matrices),
        noise_aware(
            "infer.DPSVI, posterior()",
            half,
            0.5 * (size + 1) * half * curvature,
            steps if is_small else f"{steps} and {size:,}² numbers, too many",
            is_small,
        ),
    ]
    for name, reach in (
        ("mcmc.DPPenalty", squared_distance() / (z * slope) ** 2),
        ("mcmc.DPHMC", squared_distance() / (z * (slope + bound)) ** 2),
    ):
        share = reach * total / size
        note = f"reach / posterior variance {share:.2g}, well above 10 is needed"
        rows.append(diffusion(name, share / 2, from_prior, 1.0, note))
    relaxations = 2 * total / all_on_gradients
    rows.append(
        diffusion(
            "optim, temperature 1", relaxations, from_mean, 1.0, f"{relaxations:.2g} relaxations"
        )
    )
    if relaxations < _ENOUGH:
        heat = _ENOUGH / relaxations
        independent = independent_samples_needed(size)
        enough = 2 * 2 * independent / relaxations  # of a mean's two a sample, half of it warm-up
        note = (
            f"from_run() needs {samples_needed(size):,} samples worth {independent:,} independent"
            f" ones: temperature {enough:.2g}"
        )
        rows.append(diffusion(f"optim, temperature {heat:.2g}", _ENOUGH, from_mean, heat, note))
    return MethodComparison(tuple(rows), width, z)


def _moderate(name: str, value: float, what: str) -> float:
    if not _LEAST <= (number := check_positive(name, value, what)) <= _MOST:
        raise ValueError(
            f"{name} = {value!r} is too extreme for a forecast: take a value between {_LEAST:g} and"
            f" {_MOST:g}, in other units of the parameters if need be."
        )
    return number


def _noise_aware_width(curvature: float, prior: float, noise: float, spread: float) -> float:
    """Λ^{-1/2}; the error of the curvature counts by how far θ is from where gradients were taken,
    which is this width: ``spread`` is for each unit of its square.
    """
    width = prior**-0.5
    for _ in range(_ROUNDS):
        extra = spread * width**2
        width = (prior + curvature**2 / (curvature + noise + extra)) ** -0.5
    return width


def _of_diffusion(times: float, start: float, variance: float) -> tuple[float, float]:
    """Standard deviation along a path of ``times`` relaxation times, and the error of its mean.

    Args:
        times: τ.
        start: squared distance of the start.
        variance: of the stationary law.
    """
    decayed = -math.expm1(-times) / times
    if times > 1e-2:
        of_mean = (2 * times - 3 + 4 * math.exp(-times) - math.exp(-2 * times)) / times**2
    else:  # by its series: the terms cancel
        of_mean = 2 * times / 3
    error = start * decayed**2 + variance * of_mean
    second = variance + (start - variance) * -math.expm1(-2 * times) / (2 * times)
    return math.sqrt(max(second - error, 0.0)), math.sqrt(error)
