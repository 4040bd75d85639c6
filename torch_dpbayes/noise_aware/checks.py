r"""Check whether the releases agree with each other and with the prior.

With m linear around the mode, T ~ N(n(m + J(θ − θ_c)), Σ). If this holds, the false-alarm rate of
each of the two checks is its threshold:

* *each release given the others*, and the number of clipped records, too: with θ integrated out
  over the prior's Gaussian, the residual of one block of T given the others has the covariance
  :math:`Q_{kk}^{-1}`, where Q is the precision of T. Its squared length is χ² if the law of the
  covariates is known. Under another law l it is noncentral χ², and its noncentrality
  :math:`\lambda_l` is the squared length of the shift of the residual under l. The mixture over
  laws drawn from their posterior is approximated by the χ² with the same three moments (Imhof 1961,
  "Computing the distribution of quadratic forms in normal variables"). A covariance of so few laws
  would be singular, and cause false alarms;
* *the prior*: the distance of the likelihood's maximum from the prior's median, in the directions
  where the releases have more information than the prior, compared with draws of the prior.

**Privacy.** Post-processing of released values.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
from scipy.stats import chi2, norm
from torch import Tensor

from .drawing import Draws, is_reliable
from .latents import Latents, half_distance
from .likelihood import LARGEST_ERROR, LONGEST_MOVE, Fit, LawDifferences, Likelihood, Release

FALSE_ALARMS = 0.01  # rate of each check, over all its tests
_BELOW = float(norm.cdf(-1.0))
# relative error of a Gaussian's deviation by half_distance, times √(number of draws)
_QUANTILE_ERROR = math.sqrt(_BELOW * (1 - 2 * _BELOW) / 2) / float(norm.pdf(1.0))
_LEVEL = 5  # stack: warn, note, infer, posterior, the caller


def release_p_values(
    fit: Fit,
    releases: Sequence[Release],
    latents: Latents,
    num_data: int,
    laws: LawDifferences,
    theta_covariance: Tensor,
) -> list[float]:
    """A p-value of each release given the others, near a posterior with this covariance."""
    n, found = num_data, fit.moments
    value = torch.cat([r.value for r in releases])
    slope, prior_precision = latents.slope_and_precision(fit.centre)
    prior_mean = torch.linalg.solve(prior_precision, slope)  # of θ − θ_c
    jacobian = n * found.jacobian
    residual = value - n * found.mean - jacobian @ prior_mean
    # one draw of θ − θ_c under each law
    white = torch.randn(len(laws.means), len(prior_mean), dtype=torch.float64)
    moved = white @ torch.linalg.cholesky(theta_covariance).T
    under_laws = n * (laws.means + torch.einsum("lqd,ld->lq", laws.jacobians, moved))
    # the precision of T with θ integrated out (Woodbury)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(fit.covariance))
    pulled = inverse @ jacobian
    precision = inverse - pulled @ torch.linalg.solve(fit.precision, pulled.T)
    weighted = torch.cat([residual[None], under_laws]) @ precision
    result, start = [], 0
    for release in releases:
        block = slice(start, start + len(release.value))
        start += len(release.value)
        root = torch.linalg.cholesky(precision[block, block])
        own = torch.linalg.solve_triangular(root, weighted[:, block].T, upper=False)
        square, *shifts = own.square().sum(0).tolist()
        lengths = torch.tensor(shifts, dtype=torch.float64)
        result.append(tail_probability(square, lengths, len(release.value)))
    return result


def tail_probability(square: float, lengths: Tensor, size: int) -> float:
    """P(X ≥ ``square``) for X | l ~ noncentral χ²(``size``, λ_l), by the mixture's cumulants."""
    mean = float(lengths.mean())
    apart = lengths - mean
    variance = 2 * size + 4 * mean + float(apart.square().mean())
    third = 8 * size + 24 * mean + float((12 * apart.square() + apart**3).mean())
    freedom = 8 * variance**3 / max(third, 8 * size) ** 2
    moved = (square - size - mean) * math.sqrt(2 * freedom / variance)
    return float(chi2.sf(moved + freedom, freedom))


def prior_p_value(fit: Fit, latents: Latents, mean: Tensor, covariance: Tensor) -> float:
    """The approximate p-value of the likelihood's distance from the prior, from the posterior's
    mean and covariance in the coordinates that records read; 1 if releases have no information.
    """
    precision = torch.linalg.inv(covariance)
    centre, median = fit.centre[latents.read], latents.median[latents.read]
    gradient = precision @ (mean - centre) - fit.slope  # of the likelihood
    # directions in units of the prior's deviations
    scale = latents.stddev[latents.read]
    information = scale[:, None] * (precision - fit.prior_precision) * scale
    values, vectors = torch.linalg.eigh((information + information.T) / 2)
    identified = values > 1
    if not bool(identified.any()):
        return 1.0
    # a gradient to a distance in these units
    into = (vectors[:, identified] / values[identified]).T * scale
    place = (vectors[:, identified].T / scale) @ (centre - median) + into @ gradient
    draws = latents.draws[:, latents.read] - median
    expected = (draws / scale) @ vectors[:, identified]
    expected = expected + torch.randn_like(expected) * values[identified].rsqrt()
    variances = 1 + 1 / values[identified]
    own = float((place.square() / variances).sum())
    others = (expected.square() / variances).sum(1)
    # the draws and the observed one are exchangeable if the prior is right
    return (1 + int((others >= own).sum())) / (1 + len(others))


def note_releases(p_values: Sequence[float]) -> list[str]:
    """Lines of the statement. Warns if the releases contradict each other."""
    least = min(min(p_values) * len(p_values), 1.0)
    lines = [f"  checked     the releases against each other: p = {least:.2g}"]
    if not least >= FALSE_ALARMS:
        lines.append("  NOT A FIT   the releases contradict each other under this model")
        warn(
            f"the releases contradict each other under this model (p = {least:.1g}; false alarms:"
            " up to 2 %): records do not follow the model, or private rows are not Gaussian, and"
            " intervals may be wrong."
        )
    return lines


def note_prior(p_value: float) -> list[str]:
    """Lines of the statement. Warns if the releases contradict the prior."""
    lines = [f"  checked     the releases against the prior: p = {p_value:.2g}"]
    if not p_value >= FALSE_ALARMS:
        lines.append("  NOT LIKELY  the releases contradict the prior")
        warn(
            f"the releases contradict the prior (p = {p_value:.1g}; false alarms: 1 %), which"
            " biases the mean. Use a wider prior: k times as wide if you divide features by k."
        )
    return lines


def warn(message: str, level: int = _LEVEL) -> None:
    """A warning at the line that called :func:`.posterior`."""
    warnings.warn(message, stacklevel=level)


def note_clipped(clipped: tuple[float, float], num_data: int) -> list[str]:
    """The share of records that were clipped at the last point, if noise does not hide it."""
    count, noise = clipped
    if noise > num_data / 2:
        return ["  clipped     noise hides the number of clipped records"]
    share = min(max(count / num_data, 0.0), 1.0)
    return [
        f"  clipped     {share:.1%} of the records at the last point, ± {noise / num_data:.1%}: the"
        " posterior accounts for it if the model is right; if not, clipping moves the mean"
    ]


def note_prior_width(draws: Draws, latents: Latents) -> list[str]:
    """Note in how many coordinates the posterior is as wide as the prior, as far as draws show."""
    if not is_reliable(draws):
        return []
    read, count = latents.read, len(draws.theta)
    chosen = torch.multinomial(draws.weights, count, replacement=True)
    spread = half_distance(draws.theta[chosen][:, read])
    # of their ratio if posterior = prior: from draws, from resampling, from the prior's draws
    variance = 1 / draws.effective + 1 / count + 1 / len(latents.draws)
    least = 1 - float(norm.isf(FALSE_ALARMS / len(read))) * _QUANTILE_ERROR * math.sqrt(variance)
    as_wide = int((spread > least * latents.stddev[read]).sum())
    if not as_wide:
        return []
    if as_wide == len(read):
        warn("the budget is too small for these records: the posterior is as wide as the prior.")
    return [
        f"  prior       as wide as the posterior in {as_wide} of {len(read)} coordinates that"
        " records read, as far as draws show"
    ]


def note_draws(draws: Draws, advice: str, level: int = _LEVEL) -> list[str]:
    """Note how many independent draws the draws are worth, and warn if they are unreliable."""
    line = (
        f"  drawn       by {draws.method}: worth {draws.effective:.0f} independent draws, Pareto k"
        f" = {draws.pareto_k:.2f}, R-hat = {draws.r_hat:.2f}; Monte Carlo error of a mean"
        f" {1 / math.sqrt(max(draws.effective, 1.0)):.1%} of its standard deviation"
    )
    if is_reliable(draws):
        return [line]
    warn(
        f"the draws are unreliable (Pareto k = {draws.pareto_k:.2f}, worth"
        f" {draws.effective:.0f} independent ones, R-hat = {draws.r_hat:.2f}): {advice}",
        level,
    )
    return [line, "  NOT SURE    the draws are unreliable"]


def note_mode(left: float) -> list[str]:
    """Say if the search for the mode ended many posterior deviations (``left``) before it."""
    if left <= LONGEST_MOVE:
        return []
    return [f"  NOT SURE    the mode was not reached: its search ended {left:.0f} deviations away"]


def note_simulation(likelihood: Likelihood) -> list[str]:
    """Note the number of simulated records, and whether it was large enough."""
    error = likelihood.simulation_error
    lines = [
        f"  simulated   {likelihood.num_simulated} records; their error is at most {error:.1%} of a"
        " posterior standard deviation, which the width includes"
        + ("" if error <= LARGEST_ERROR else ": num_simulated= is too small")
    ]
    if likelihood.far:
        lines.append(f"  NOT SURE    {likelihood.far} draws are far from all simulated records")
    return lines
