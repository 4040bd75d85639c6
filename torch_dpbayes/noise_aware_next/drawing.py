"""Draws from a posterior density: Pareto-smoothed importance sampling around the mode, and Pyro's
No-U-Turn sampler where that is not close enough.

Sources: Vehtari, Simpson, Gelman, Yao and Gabry (2024), "Pareto smoothed importance sampling";
Zhang and Stephens (2009), "A new and efficient estimation method for the generalized Pareto
distribution"; Hoffman and Gelman (2014), "The No-U-Turn sampler".

**Privacy.** Post-processing. Randomness is torch's global generator.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.models import using_pyro

LARGEST_PARETO_K = 0.7  # beyond which importance draws are not to be relied on (Vehtari et al.)
_PRIOR_POINTS = 30  # of Zhang and Stephens' grid, which has √n more
_PRIOR_PULL = 10  # draws that a weak prior of k around 1/2 counts as
_LEAST_TAIL = 5  # draws that a Pareto distribution is fitted to


class Draws(NamedTuple):
    """Weighted draws of θ.

    Attributes:
        theta: ``[m, D]``.
        log_weights: ``[m]``, their exponentials add up to 1.
        pareto_k: k̂ of the weights.
        effective: number of independent draws that they are worth.
    """

    theta: Tensor
    log_weights: Tensor
    pareto_k: float
    effective: float


def smoothed(log_ratios: Tensor) -> tuple[Tensor, float]:
    """Normalised log weights with Pareto-smoothed tail, and k̂; infinite with too few draws."""
    values = log_ratios.nan_to_num(-math.inf, -math.inf, -math.inf)
    if not bool((values > -math.inf).any()):
        return torch.full_like(values, -math.log(len(values))), math.inf
    values = values - values.max()
    count = len(values)
    tail = math.ceil(min(0.2 * count, 3 * math.sqrt(count)))
    order = values.argsort()
    cutoff = float(values[order[-tail - 1]]) if tail < count else -math.inf
    cutoff = max(cutoff, math.log(torch.finfo(values.dtype).tiny))
    chosen = order[values[order] > cutoff]
    k = math.inf
    if len(chosen) >= _LEAST_TAIL:
        excess = values[chosen].exp() - math.exp(cutoff)
        k, sigma = generalized_pareto(excess)
        if math.isfinite(k):
            shares = (torch.arange(len(chosen), dtype=values.dtype) + 0.5) / len(chosen)
            quantiles = sigma * torch.special.expm1(-k * torch.log1p(-shares)) / k
            values = values.clone()
            values[chosen] = (quantiles + math.exp(cutoff)).log()
        values = values.clamp_max(0.0)
    return values - values.logsumexp(0), k


def generalized_pareto(excess: Tensor) -> tuple[float, float]:
    """k and σ of ascending positive numbers; k is pulled weakly towards 1/2."""
    count = len(excess)
    points = _PRIOR_POINTS + int(math.sqrt(count))
    grid = torch.arange(1, points + 1, dtype=excess.dtype)
    quartile = excess[int(count / 4 + 0.5) - 1]
    b = 1 / excess[-1] + (1 - (points / (grid - 0.5)).sqrt()) / 3 / quartile
    k = torch.log1p(-b[:, None] * excess).mean(1)
    likelihood = count * ((-b / k).log() - k - 1)
    weights = torch.softmax(likelihood.nan_to_num(-math.inf), 0)
    b_mean = float(weights @ b)
    found = float(torch.log1p(-b_mean * excess).mean())
    sigma = -found / b_mean
    pulled = (count * found + _PRIOR_PULL * 0.5) / (count + _PRIOR_PULL)
    return pulled, sigma


def importance_draws(
    log_density: Callable[[Tensor], Tensor], centre: Tensor, precision: Tensor, count: int
) -> Draws:
    """Weighted draws from N(centre, precision⁻¹).

    Args:
        log_density: of the target up to a constant, from ``[m, d]`` to ``[m]``.
        centre: ``[d]``.
        precision: ``[d, d]``.
        count: m.
    """
    factor = torch.linalg.cholesky(precision)
    normal = torch.randn(count, len(centre), dtype=torch.float64)
    theta = centre + torch.linalg.solve_triangular(factor.T, normal.T, upper=True).T
    ratios = log_density(theta) + 0.5 * normal.square().sum(1)
    log_weights, k = smoothed(ratios)
    return Draws(theta, log_weights, k, float(1 / (2 * log_weights).exp().sum()))


def moments_of(draws: Draws) -> tuple[Tensor, Tensor]:
    """Mean and covariance of weighted draws."""
    weights = draws.log_weights.exp()
    mean = weights @ draws.theta
    apart = draws.theta - mean
    return mean, (weights[:, None] * apart).T @ apart


def no_u_turn_draws(
    log_density: Callable[[Tensor], Tensor],
    start: Tensor,
    count: int,
    warmup: int,
) -> tuple[Tensor, float]:
    """Draws of Pyro's No-U-Turn sampler, and their smallest effective number.

    Args:
        log_density: of one point ``[D]``, differentiable.
        start: ``[D]``.
        count: how many.
        warmup: steps in which step size and masses are adapted.
    """
    from pyro.infer import MCMC, NUTS

    kernel = NUTS(
        potential_fn=lambda params: -log_density(params["xi"]),
        max_tree_depth=8,
    )
    chain = MCMC(
        kernel,
        num_samples=count,
        warmup_steps=warmup,
        initial_params={"xi": start},
        disable_progbar=True,
    )
    with using_pyro, torch.enable_grad(), warnings.catch_warnings():
        chain.run()
        found: Tensor = chain.get_samples()["xi"].detach()
        effective = float(_effective(found))
    return found, effective


def _effective(draws: Tensor) -> Tensor:
    from pyro.ops.stats import effective_sample_size

    return effective_sample_size(draws[None], chain_dim=0, sample_dim=1).min()
