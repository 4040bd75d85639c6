"""Draws from a posterior density, by importance weights or short chains.

They come from an approximation: the likelihood's Gaussians at
the mode, or, of a hierarchical prior, the prior times these Gaussians, by Pyro's No-U-Turn sampler.
Pareto-smoothed weights make draws from the posterior of them. Where these are not to be relied on,
short chains begin at the draws.

Sources: Vehtari, Simpson, Gelman, Yao and Gabry (2024), "Pareto smoothed importance sampling";
Cotter, Roberts, Stuart and White (2013), "MCMC methods for functions"; Hoffman and Gelman (2014),
"The No-U-Turn sampler".

**Privacy.** Post-processing. Randomness is torch's global generator.
"""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import torch
from pyro.infer import MCMC, NUTS
from pyro.ops.stats import effective_sample_size, fit_generalized_pareto
from torch import Tensor

from ..ops.models import using_pyro
from .latents import Latents, NonCentred
from .likelihood import Likelihood, ridged

LARGEST_PARETO_K = 0.7  # beyond which importance draws are not to be relied on (Vehtari et al.)
# squared coefficient of variation of weights: k̂ is of a tail that has no weight then
_HARMLESS_SPREAD = 0.05
_CHAINS, _SWEEPS = 64, 60  # short ones; steps of each that are kept, after as many that are not
# β at first, and the acceptance that it is adapted to, the best one of random walks (Roberts,
# Gelman and Gilks 1997)
_FIRST_STEP, _ACCEPTANCE = 0.5, 0.234
_NUTS_DRAWS, _NUTS_WARMUP = 1000, 400
_MOST_DOUBLINGS = 8  # of a trajectory
_ROUNDING = 1e-9  # of log weights
_LEAST_TAIL = 5  # draws that a Pareto distribution is fitted to


class Draws(NamedTuple):
    """Weighted draws of θ.

    Attributes:
        theta: ``[m, D]``.
        weights: ``[m]``, which add up to 1.
        pareto_k: k̂ of the weights.
        effective: number of independent draws that they are worth.
        method: in words.
        far: how many of them no simulated records are near enough.
    """

    theta: Tensor
    weights: Tensor
    pareto_k: float
    effective: float
    method: str
    far: int


def draw_posterior(latents: Latents, likelihood: Likelihood, count: int) -> Draws:
    """Draws from the posterior."""
    theta = likelihood.centre.repeat(count, 1)
    if latents.is_hierarchical:
        theta, worth = _by_no_u_turn(latents, likelihood)
        moved, method = torch.arange(theta.shape[1]), "the No-U-Turn sampler"
        gaussians = _Gaussians(
            theta.mean(0)[None], torch.linalg.inv(ridged(torch.cov(theta.T)))[None]
        )
        approximation = likelihood.gaussian(theta) + latents.log_density(theta)
    else:
        moved, worth, method = latents.read, float(count), "importance sampling"
        gaussians = _Gaussians(likelihood.modes, likelihood.precisions)
        theta[:, moved] = gaussians.places(count) + gaussians.moves(count)
        approximation = gaussians.of_each(theta[:, moved]).logsumexp(1)
    terms, far = likelihood(theta)
    log_weights, k = smoothed(terms + latents.log_density(theta) - approximation)
    weights = log_weights.exp()
    effective = worth / float(len(theta) * weights.square().sum())
    found = Draws(latents.with_unread(theta, moved), weights, k, effective, method, far)
    if is_reliable(found):
        return found
    return _by_short_chains(latents, likelihood, gaussians, theta, moved)


def is_reliable(draws: Draws) -> bool:
    """Whether weights may be relied on: k̂ is at most .7, or they are nearly all the same."""
    spread = len(draws.weights) * float(draws.weights.square().sum()) - 1
    return draws.pareto_k <= LARGEST_PARETO_K or spread < _HARMLESS_SPREAD


class _Gaussians:
    """The mixture of Gaussians that the posterior is, about. Row k of draws is of number k mod L.

    Args:
        modes: ``[L, d]``.
        precisions: ``[L, d, d]``.
    """

    def __init__(self, modes: Tensor, precisions: Tensor) -> None:
        self.modes = modes
        self._roots = torch.linalg.cholesky(precisions).mT

    def moves(self, count: int) -> Tensor:
        """Draws around 0, ``[count, d]``."""
        result = torch.randn(count, self.modes.shape[1], dtype=torch.float64)
        for k, root in enumerate(self._roots):
            own = result[k :: len(self.modes)]
            own.copy_(torch.linalg.solve_triangular(root, own.T, upper=True).T)
        return result

    def places(self, count: int) -> Tensor:
        """Modes, ``[count, d]``."""
        return self.modes[torch.arange(count) % len(self.modes)]

    def of_each(self, theta: Tensor) -> Tensor:
        """Log densities ``[m, L]``."""
        result = torch.empty(len(theta), len(self.modes), dtype=torch.float64)
        for k, (mode, root) in enumerate(zip(self.modes, self._roots, strict=True)):
            squares = ((theta - mode) @ root.T).square().sum(1)
            result[:, k] = root.diagonal().log().sum() - squares / 2
        return result


def _by_short_chains(
    latents: Latents, likelihood: Likelihood, gaussians: _Gaussians, start: Tensor, moved: Tensor
) -> Draws:
    r"""Chains that begin at draws of the approximation; each goes on with its own Gaussian by

    .. math::
        \theta' = \mu + \sqrt{1 - \beta^2}\,(\theta - \mu) + \beta\xi, \quad \xi \sim N(0,
        \Lambda^{-1})

    which leaves that Gaussian as it is, so that a step is accepted by what the posterior differs in
    from it: in any number of dimensions.
    """
    place = gaussians.places(_CHAINS)
    own = (torch.arange(_CHAINS), torch.arange(_CHAINS) % len(gaussians.modes))
    step, kept = _FIRST_STEP, list[Tensor]()

    def ratios(theta: Tensor) -> tuple[Tensor, int]:
        terms, far = likelihood(theta)
        of_own = gaussians.of_each(theta[:, moved])[own]
        return (terms + latents.log_density(theta) - of_own).nan_to_num(-math.inf), far

    theta = start[:_CHAINS]
    before, far = ratios(theta)
    for number in range(2 * _SWEEPS):
        proposed = theta.clone()
        shrunk = math.sqrt(1 - step**2) * (theta[:, moved] - place)
        proposed[:, moved] = place + shrunk + step * gaussians.moves(_CHAINS)
        after, far = ratios(proposed)
        chance = (after - before).clamp(max=0.0).exp().nan_to_num(0.0)
        accepted = torch.rand(_CHAINS, dtype=torch.float64) < chance
        theta = torch.where(accepted[:, None], proposed, theta)
        before = torch.where(accepted, after, before)
        if number < _SWEEPS:
            step = min(step * math.exp(float(chance.mean()) - _ACCEPTANCE), 1.0)
        else:
            kept.append(latents.with_unread(theta, moved))
    chains = torch.stack(kept)
    worth = float(effective_sample_size(chains[:, :, moved], chain_dim=1, sample_dim=0).min())
    found = chains.reshape(-1, chains.shape[2])
    weights = torch.full((len(found),), 1 / len(found), dtype=torch.float64)
    return Draws(found, weights, 0.0, worth, "short chains", far)


def _by_no_u_turn(latents: Latents, likelihood: Likelihood) -> tuple[Tensor, float]:
    """Draws of θ from the prior times the likelihood's Gaussians, and their smallest effective
    number.
    """
    told = torch.zeros_like(likelihood.centre)
    _, of_prior = latents.slope_and_precision(likelihood.centre)
    told[latents.read] = (likelihood.precisions.mean(0) - of_prior).diagonal().clamp_min(0.0)
    frame = NonCentred(latents.prior, likelihood.centre, told)

    def potential(values: dict[str, Tensor]) -> Tensor:
        theta, log_prior = frame(values["xi"][None])
        return -(likelihood.gaussian(theta) + log_prior)[0]

    kernel = NUTS(potential_fn=potential, full_mass=True, max_tree_depth=_MOST_DOUBLINGS)
    chain = MCMC(
        kernel,
        num_samples=_NUTS_DRAWS,
        warmup_steps=_NUTS_WARMUP,
        initial_params={"xi": frame.start()},
        disable_progbar=True,
    )
    with using_pyro, torch.enable_grad(), warnings.catch_warnings():
        chain.run()
    theta = frame(chain.get_samples()["xi"].detach())[0].detach()
    worth = effective_sample_size(theta[None], chain_dim=0, sample_dim=1).min()
    return theta[torch.randperm(len(theta))], float(worth)  # chains begin at the first ones


def smoothed(log_ratios: Tensor) -> tuple[Tensor, float]:
    """Normalised log weights with Pareto-smoothed tail, and k̂; infinite with too few draws."""
    values = log_ratios.nan_to_num(-math.inf, -math.inf, -math.inf)
    if not bool((values > -math.inf).any()):
        return torch.full_like(values, -math.log(len(values))), math.inf
    values = values - values.max()
    count = len(values)
    if float(values.min()) > -_ROUNDING:  # all the same: no tail
        return values - values.logsumexp(0), 0.0
    tail = math.ceil(min(0.2 * count, 3 * math.sqrt(count)))
    order = values.argsort()
    cutoff = float(values[order[-tail - 1]]) if tail < count else -math.inf
    cutoff = max(cutoff, math.log(torch.finfo(values.dtype).tiny))
    chosen = order[values[order] > cutoff]
    k = math.inf
    if len(chosen) >= _LEAST_TAIL:
        excess = values[chosen].exp() - math.exp(cutoff)
        k, sigma = fit_generalized_pareto(excess)
        k = k if math.isfinite(k) else math.inf
        if math.isfinite(k):
            shares = (torch.arange(len(chosen), dtype=values.dtype) + 0.5) / len(chosen)
            quantiles = sigma * torch.special.expm1(-k * torch.log1p(-shares)) / k
            values = values.clone()
            values[chosen] = (quantiles + math.exp(cutoff)).log()
        values = values.clamp_max(0.0)
    return values - values.logsumexp(0), k
