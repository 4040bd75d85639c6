"""Draws from a posterior density: Pareto-smoothed importance sampling around the mode; where that
is not close enough short chains that begin there; of a hierarchical prior Pyro's No-U-Turn sampler.

That sampler runs on the prior times the likelihood's Gaussian at the mode; its draws are weighted
for the likelihood itself. Where these weights are not to be relied on, it runs on the likelihood,
which takes a hundred times longer.

Sources: Vehtari, Simpson, Gelman, Yao and Gabry (2024), "Pareto smoothed importance sampling";
Cotter, Roberts, Stuart and White (2013), "MCMC methods for functions"; Hoffman and Gelman (2014),
"The No-U-Turn sampler".

**Privacy.** Post-processing. Randomness is torch's global generator.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from pyro.infer import MCMC, NUTS
from pyro.ops.stats import effective_sample_size, fit_generalized_pareto
from torch import Tensor

from ..ops.models import using_pyro
from .latents import Latents
from .likelihood import Likelihood

LARGEST_PARETO_K = 0.7  # beyond which importance draws are not to be relied on (Vehtari et al.)
# squared coefficient of variation of weights: k̂ is of a tail that has no weight then
_HARMLESS_SPREAD = 0.05
_CHAINS, _SWEEPS = 64, 60  # short ones; steps of each that are kept, after as many that are not
# β at first, and the acceptance that it is adapted to, the best one of random walks (Roberts,
# Gelman and Gilks 1997)
_FIRST_STEP, _ACCEPTANCE = 0.5, 0.234
_CHAIN, _EXACT_CHAIN = (1000, 300), (300, 100)  # steps of No-U-Turn, and before them of warm-up
_NEWTON_STEPS, _RISE = 30, 1e-3  # and the least rise of a log density for which one more is done
_TRIALS = 500  # draws that tell which coordinates suit
_DIFFERENCE = 1e-4  # of a coordinate's scale, by which gradients are differenced
_LEAST_CURVATURE = 0.1  # in units of the scales: of directions with heavy tails
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
    if not latents.is_hierarchical:
        found = _by_importance(latents, likelihood, count)
        return found if is_reliable(found) else _by_short_chains(latents, likelihood)
    found = _by_chain(latents, likelihood, exactly=False)
    return found if is_reliable(found) else _by_chain(latents, likelihood, exactly=True)


def is_reliable(draws: Draws) -> bool:
    """Whether weights may be relied on: k̂ is at most .7, or they are nearly all the same."""
    spread = len(draws.weights) * float(draws.weights.square().sum()) - 1
    return draws.pareto_k <= LARGEST_PARETO_K or spread < _HARMLESS_SPREAD


def _by_importance(latents: Latents, likelihood: Likelihood, count: int) -> Draws:
    gaussians = _Gaussians(likelihood)
    moved = gaussians.sample(count)
    theta = likelihood.centre.repeat(count, 1)
    theta[:, latents.read] = moved
    terms, far = likelihood.with_new_centres(theta)
    ratios = terms + latents.log_density(theta) - gaussians.log_densities(moved)
    log_weights, k = smoothed(ratios)
    weights = log_weights.exp()
    effective = float(1 / weights.square().sum())
    theta = _with_unread(latents, theta)
    return Draws(theta, weights, k, effective, "importance sampling", far)


def _with_unread(latents: Latents, theta: Tensor) -> Tensor:
    """What no record reads is independent of the rest, and drawn from its prior."""
    if len(latents.read) == theta.shape[1]:
        return theta
    result = latents.sample(len(theta))
    result[:, latents.read] = theta[:, latents.read]
    return result


class _Gaussians:
    """The mixture of Gaussians that the posterior is, about."""

    def __init__(self, likelihood: Likelihood) -> None:
        self.modes = likelihood.modes
        self._roots = torch.linalg.cholesky(likelihood.precisions).mT

    def moves(self, count: int) -> Tensor:
        """Draws around 0 ``[count, d]`` of one Gaussian after the other."""
        result = torch.randn(count, self.modes.shape[1], dtype=torch.float64)
        for k, root in enumerate(self._roots):
            own = result[k :: len(self.modes)]
            own.copy_(torch.linalg.solve_triangular(root, own.T, upper=True).T)
        return result

    def places(self, count: int) -> Tensor:
        """Modes of one Gaussian after the other, ``[count, d]``."""
        return self.modes[torch.arange(count) % len(self.modes)]

    def sample(self, count: int) -> Tensor:
        """Draws ``[count, d]``."""
        return self.places(count) + self.moves(count)

    def of_each(self, theta: Tensor) -> Tensor:
        """Log densities ``[m, L]``."""
        result = torch.empty(len(theta), len(self.modes), dtype=torch.float64)
        for k, (mode, root) in enumerate(zip(self.modes, self._roots, strict=True)):
            squares = ((theta - mode) @ root.T).square().sum(1)
            result[:, k] = root.diagonal().log().sum() - squares / 2
        return result

    def log_densities(self, theta: Tensor) -> Tensor:
        """Of the mixture, ``[m]``."""
        return self.of_each(theta).logsumexp(1)


def _by_short_chains(latents: Latents, likelihood: Likelihood) -> Draws:
    r"""Chains that begin at draws of the Gaussians; each goes on with its own one by

    .. math::
        \theta' = \mu + \sqrt{1 - \beta^2}\,(\theta - \mu) + \beta\xi, \quad \xi \sim N(0,
        \Lambda^{-1})

    which leaves that Gaussian as it is, so that a step is accepted by what the posterior differs in
    from it: in any number of dimensions.
    """
    gaussians, read = _Gaussians(likelihood), latents.read
    place = gaussians.places(_CHAINS)
    own = torch.arange(_CHAINS) % len(gaussians.modes)
    theta = likelihood.centre.repeat(_CHAINS, 1)
    step, kept = _FIRST_STEP, list[Tensor]()

    def ratios(theta: Tensor) -> tuple[Tensor, int]:
        terms, far = likelihood.with_new_centres(theta)
        of_own = gaussians.of_each(theta[:, read])[torch.arange(_CHAINS), own]
        return (terms + latents.log_density(theta) - of_own).nan_to_num(-math.inf), far

    theta[:, read] = gaussians.sample(_CHAINS)
    before, far = ratios(theta)
    for number in range(2 * _SWEEPS):
        proposed = theta.clone()
        shrunk = math.sqrt(1 - step**2) * (theta[:, read] - place)
        proposed[:, read] = place + shrunk + step * gaussians.moves(_CHAINS)
        after, far = ratios(proposed)
        chance = (after - before).clamp(max=0.0).exp().nan_to_num(0.0)
        moved = torch.rand(_CHAINS, dtype=torch.float64) < chance
        theta, before = torch.where(moved[:, None], proposed, theta), before.where(~moved, after)
        if number < _SWEEPS:
            step = min(step * math.exp(float(chance.mean()) - _ACCEPTANCE), 1.0)
        else:
            kept.append(_with_unread(latents, theta))
    chains = torch.stack(kept)
    worth = float(effective_sample_size(chains[:, :, read], chain_dim=1, sample_dim=0).min())
    found = chains.reshape(-1, chains.shape[2])
    weights = torch.full((len(found),), 1 / len(found), dtype=torch.float64)
    return Draws(found, weights, 0.0, worth, "short chains", far)


def _by_chain(latents: Latents, likelihood: Likelihood, exactly: bool) -> Draws:
    target = likelihood if exactly else likelihood.gaussian
    # centred coordinates suit where records tell much, non-centred ones where they tell little; in
    # each those in which a Gaussian at the mode is standard normal
    choices = (False, True) if latents.is_hierarchical else (True,)
    frames = [_Frame(latents, target, likelihood.centre, each) for each in choices]
    frame = max(frames, key=lambda each: each.worth())

    def log_density(eta: Tensor) -> Tensor:
        return frame.log_densities(frame.place(eta[None]))[0]

    count, warmup = _EXACT_CHAIN if exactly else _CHAIN
    start = torch.zeros_like(likelihood.centre)
    eta, worth = no_u_turn_draws(log_density, start, count, warmup)
    theta = frame.outer(frame.place(eta))[0].detach()
    terms, far = likelihood.with_new_centres(theta)
    log_weights, k = smoothed(terms - target(theta))
    weights = log_weights.exp()
    effective = worth / float(len(eta) * weights.square().sum())
    return Draws(theta, weights, k, effective, "the No-U-Turn sampler", far)


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


class _Frame:
    """Coordinates ξ of a chain."""

    def __init__(
        self,
        latents: Latents,
        likelihood: Callable[[Tensor], Tensor],
        centre: Tensor,
        is_centred: bool,
    ) -> None:
        self._latents, self._likelihood, self._is_centred = latents, likelihood, is_centred
        start, scales = centre, latents.stddev
        if not is_centred:
            start, scales = latents.inner(centre[None])[0], torch.ones_like(scales)
        self._mode, self._root = gaussian_at_mode(self.log_densities, start, scales)

    def outer(self, xi: Tensor) -> tuple[Tensor, Tensor]:
        """θ and log |∂θ/∂ξ| of every row."""
        return (xi, xi.new_zeros(len(xi))) if self._is_centred else self._latents.outer(xi)

    def place(self, eta: Tensor) -> Tensor:
        """ξ of rows that are standard normal if the density is Gaussian."""
        return self._mode + eta @ self._root.T

    def log_densities(self, xi: Tensor) -> Tensor:
        """Of rows of ξ."""
        theta, log_jacobian = self.outer(xi)
        return self._likelihood(theta) + self._latents.log_density(theta) + log_jacobian

    def worth(self) -> float:
        """What part of draws from the Gaussian counts."""
        eta = torch.randn(_TRIALS, len(self._mode), dtype=torch.float64)
        ratios = self.log_densities(self.place(eta)) + 0.5 * eta.square().sum(1)
        weights = torch.softmax(ratios.nan_to_num(-math.inf, -math.inf, -math.inf), 0)
        return float((1 / weights.square().sum()).nan_to_num(0.0))


def gaussian_at_mode(
    log_densities: Callable[[Tensor], Tensor], start: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor]:
    """The mode by Newton's method, and R of the covariance RRᵀ of the Gaussian there.

    Args:
        log_densities: of rows ``[m, D]``, differentiable.
        start: ``[D]``.
        scales: of the coordinates, ``[D]``.
    """

    def slopes(rows: Tensor) -> Tensor:
        with torch.enable_grad():
            point = rows.detach().requires_grad_()
            (found,) = torch.autograd.grad(log_densities(point).sum(), point)
        return found.nan_to_num(0.0, 0.0, 0.0)

    steps = torch.diag(_DIFFERENCE * scales)
    point, value, shorter = start, float(log_densities(start[None])), 1.0
    for _ in range(_NEWTON_STEPS):
        around = slopes(torch.cat([point + steps, point - steps, point[None]]))
        up, down, slope = around.split([len(point), len(point), 1])
        curvature = scales[:, None] * (down - up).T / (2 * _DIFFERENCE)
        values, vectors = torch.linalg.eigh((curvature + curvature.T) / 2)
        values = values.abs().clamp_min(_LEAST_CURVATURE)
        root = scales[:, None] * vectors * values.rsqrt()
        step = root @ (root.T @ slope[0])
        shorter = min(1.0, 2 * shorter)
        while shorter > 1e-3:
            moved = float(log_densities((point + shorter * step)[None]))
            if moved > value:
                break
            shorter /= 2
        if not moved > value + _RISE:
            break
        point, value = point + shorter * step, moved
    return point, root


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
    kernel = NUTS(
        potential_fn=lambda params: -log_density(params["xi"]),
        max_tree_depth=_MOST_DOUBLINGS,
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
        effective = effective_sample_size(found[None], chain_dim=0, sample_dim=1).min()
    return found, float(effective)
