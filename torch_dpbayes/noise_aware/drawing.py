r"""Draws from a posterior density, by importance weights or Hamiltonian chains.

Draws of Gaussians that approximate the posterior at its modes get Pareto-smoothed importance
weights. Chains are used instead in three cases: the prior is hierarchical; the weights are
unreliable; or parameters with the same likelihood lie on a curve, as for ``mu + tau * z``. Draws
around one point of a curve miss the rest, and their weights do not show it.
Trajectories follow an approximation, the prior times the likelihood's Gaussians, whose gradient
needs no simulated records. Chains start at draws of the prior. Then the power of the likelihood
grows to 1. Their draws are weighted as above. If these weights are unreliable, too, trajectories
are accepted by the posterior itself, which stays invariant whichever gradient they follow. If the
chains do not mix in the approximation, they stop here: they would not mix in the posterior, where
each sweep computes a likelihood.

Sources: Vehtari, Simpson, Gelman, Yao and Gabry (2024), "Pareto smoothed importance sampling"; Del
Moral, Doucet and Jasra (2006), "Sequential Monte Carlo samplers"; Neal (2011), "MCMC using
Hamiltonian dynamics", section 5.5 on trajectories of another energy.

**Privacy.** Post-processing. Randomness is torch's global generator.
"""

from __future__ import annotations

import math
import time
import timeit
from collections.abc import Callable
from typing import NamedTuple

import torch
from pyro.ops.stats import fit_generalized_pareto
from torch import Tensor
from torch.distributions import MultivariateNormal

from .hamiltonian import States, mixing, trajectory
from .latents import Latents, NonCentred
from .likelihood import Likelihood, Moves, ridged

LARGEST_PARETO_K = 0.7  # importance draws with a larger k are unreliable (Vehtari et al.)
LEAST_EFFECTIVE = 100.0  # independent draws: the error of a mean is a tenth of a deviation
LARGEST_R_HAT = 1.2  # above, the effective sample size is wrong, too
# below this squared coefficient of variation, weights are nearly equal and k̂ does not matter
_HARMLESS_SPREAD = 0.05
_CHAINS, _KEPT = 64, 32  # parallel chains; draws of each
_WARM_UP, _SWEEPS_OF_A_POWER = 60, 3
_MOST_APART = (16, 4)  # sweeps between draws; the second if each sweep computes a likelihood
# a step is stable up to the length 2; a trajectory is at most 8 * 0.25 = 2 long, half a period is π
_LEAPFROG_STEPS, _LONGEST_STEP = 8, 0.25
# targets of the step size: for trajectories that follow the density that accepts them (Beskos et
# al. 2013: .65 to .8); for others, which are random walks in the difference (Roberts et al. 1997)
_ACCEPTANCE, _ACCEPTANCE_OF_OTHERS = 0.8, 0.234
# share of the steps' covariance that a sweep keeps; the second while β grows
_MEMORY, _SHORT_MEMORY = 0.9, 0.5
_GRADIENTS, _TIMED = 2000, 3  # approximate number that chains need; timings of a call
_ROUNDING = 1e-9  # of log weights
_ROWS = 200  # of draws, for their densities at a time
_LEAST_TAIL = 5  # least number of draws for a fit of a Pareto distribution


class Draws(NamedTuple):
    """Weighted draws of θ."""

    theta: Tensor  # [m, D]
    weights: Tensor  # [m], which add up to 1
    pareto_k: float  # of the weights
    effective: float  # effective sample size
    r_hat: float  # the largest R̂ of chains; 1 for independent draws
    method: str  # a text


def draw_posterior(latents: Latents, likelihood: Likelihood, count: int) -> Draws:
    """Draws from the posterior."""
    if not (latents.is_hierarchical or likelihood.is_bent):
        found = _by_importance(latents, likelihood, count)
        if is_reliable(found):
            return found
    chains = _Chains(latents, likelihood)
    chains.anneal()
    theta, worth, r_hat = chains.run()
    weights, k = smoothed(likelihood(theta) - likelihood.gaussian(theta))
    found = _weighted(theta, weights.exp(), k, worth, r_hat, "weighted Hamiltonian chains")
    if is_reliable(found):
        return found
    if worth >= LEAST_EFFECTIVE:
        chains.begin(torch.multinomial(found.weights, _CHAINS, replacement=True))
        theta, worth, r_hat = chains.run()
    equal = torch.full((len(theta),), 1 / len(theta), dtype=torch.float64)
    return _weighted(theta, equal, 0.0, worth, r_hat, "Hamiltonian chains")


def seconds_of(call: Callable[[], object]) -> float:
    """Seconds of a processor core for one call."""
    return min(timeit.repeat(call, timer=time.process_time, number=1, repeat=_TIMED))


def seconds_of_chains(latents: Latents, moves: Moves | None) -> float:
    """Approximate seconds of chains, mostly for gradients of the prior and of ``moves``."""
    frame = NonCentred(latents.prior, latents.median, 0 * latents.median)
    xi = frame.prior.samples(_CHAINS).to("cpu", torch.float64).requires_grad_()

    def gradient() -> None:
        with torch.enable_grad():
            theta, log_density = frame(xi)
            moved = theta if moves is None else moves(theta)
            torch.autograd.grad(moved.sum() + log_density.sum(), xi)

    return _GRADIENTS * seconds_of(gradient)


def is_reliable(draws: Draws) -> bool:
    """Whether draws are reliable: their effective sample size is at least 100, R̂ is at most 1.2,
    and k̂ of their weights is at most .7, or the weights are nearly equal.
    """
    spread = len(draws.weights) / _worth(draws.weights) - 1
    has_no_tail = draws.pareto_k <= LARGEST_PARETO_K or spread < _HARMLESS_SPREAD
    has_mixed = draws.r_hat <= LARGEST_R_HAT
    return has_no_tail and has_mixed and draws.effective >= LEAST_EFFECTIVE


def _weighted(
    theta: Tensor, weights: Tensor, k: float, worth: float, r_hat: float, method: str
) -> Draws:
    """Weighted draws, which without weights would be worth ``worth`` independent draws."""
    return Draws(theta, weights, k, worth * _worth(weights) / len(theta), r_hat, method)


def _by_importance(latents: Latents, likelihood: Likelihood, count: int) -> Draws:
    """Weighted draws of the Gaussians that approximate the posterior."""
    laws = MultivariateNormal(
        likelihood.modes, precision_matrix=likelihood.precisions, validate_args=False
    )
    places = laws.sample((math.ceil(count / len(likelihood.modes)),)).flatten(0, 1)[:count]
    log_laws = [laws.log_prob(some[:, None]).logsumexp(1) for some in places.split(_ROWS)]
    theta = likelihood.centre.repeat(count, 1)
    theta[:, latents.read] = places
    ratios = likelihood(theta) + latents.log_density(theta) - torch.cat(log_laws)
    weights, k_hat = smoothed(ratios)
    theta = latents.with_unread(theta)
    return _weighted(theta, weights.exp(), k_hat, count, 1.0, "importance sampling")


class _Chains:
    r"""Parallel Hamiltonian chains, in coordinates ξ in which the prior has no funnel.

    A trajectory follows the gradient of :math:`\log p(\xi) + \beta \log \tilde p(T | \xi)`, with
    the likelihood's Gaussians :math:`\tilde p`, in units of the chains' covariance. It is accepted
    by that density or, after :meth:`begin`, by the posterior.
    """

    def __init__(self, latents: Latents, likelihood: Likelihood) -> None:
        known = torch.zeros_like(likelihood.centre)  # the likelihood's information
        _, of_prior = latents.slope_and_precision(likelihood.centre)
        known[latents.read] = (likelihood.precisions.mean(0) - of_prior).diagonal().clamp_min(0.0)
        self._frame = NonCentred(latents.prior, likelihood.centre, known)
        self._likelihood = likelihood
        self._power, self._is_exact, self._step = 0.0, False, _LONGEST_STEP
        self._move_to(self._frame.prior.samples(_CHAINS).to("cpu", torch.float64))
        self._covariance = torch.cov(self._states.at.T).reshape(2 * self._states.at.shape[1:])

    def _move_to(self, xi: Tensor) -> None:
        values, slopes = self._followed(xi)
        self._states = States(xi, self._posterior(xi) if self._is_exact else values, slopes)

    def _followed(self, xi: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            xi = xi.detach().requires_grad_()
            theta, log_prior = self._frame(xi)
            values = -(log_prior + self._power * self._likelihood.gaussian(theta))
            (slopes,) = torch.autograd.grad(values.sum(), xi)
        return values.detach().nan_to_num(math.inf), slopes.nan_to_num(0.0, 0.0, 0.0)

    def _posterior(self, xi: Tensor) -> Tensor:
        theta, log_prior = self._frame(xi)
        return -(self._likelihood(theta) + log_prior).nan_to_num(-math.inf)

    def sweep(self) -> None:
        """One trajectory of each chain, each with its own random step size."""
        root = torch.linalg.cholesky(ridged(self._covariance))
        at = self._states.at
        step = self._step * (0.5 + torch.rand(len(at), 1, dtype=torch.float64))
        self._states, chances = trajectory(
            self._states,
            torch.randn_like(at),
            step,
            _LEAPFROG_STEPS,
            self._followed,
            lambda slopes: slopes @ root,
            lambda momenta: momenta @ root.T,
            self._posterior if self._is_exact else None,
        )
        self._acceptance = float(chances.mean())

    def adapt(self, memory: float) -> None:
        """Adapt the step size, and the covariance, of which the share ``memory`` is kept."""
        wanted = _ACCEPTANCE_OF_OTHERS if self._is_exact else _ACCEPTANCE
        self._step = min(self._step * math.exp(self._acceptance - wanted), _LONGEST_STEP)
        if self._is_exact:  # chains may have started at few draws, which had all the weight
            return
        own = torch.cov(self._states.at.T).reshape_as(self._covariance)
        self._covariance = memory * self._covariance + (1 - memory) * own

    def anneal(self) -> None:
        """Move chains from the prior to the approximation. β grows until the effective size of the
        weighted chains is half of their number. Then the chains are resampled by these weights, and
        move.
        """
        while self._power < 1:
            found = self._likelihood.gaussian(self._frame(self._states.at)[0])
            is_alive = found.isfinite()
            if not bool(is_alive.any()):  # no draw of the prior can be weighted
                is_alive, found = ~is_alive, torch.zeros_like(found)
            log_weights = torch.where(is_alive, found - found[is_alive].max(), -math.inf)
            growth = 1 - self._power
            while _worth((growth * log_weights).softmax(0)) < int(is_alive.sum()) / 2:
                growth *= 0.9
            self._power += growth
            weights = (growth * log_weights).softmax(0)
            self._move_to(self._states.at[torch.multinomial(weights, _CHAINS, replacement=True)])
            # extreme draws of a heavy-tailed prior are gone: remove their part of the covariance
            ratios = self._states.at.std(0) / self._covariance.diagonal().sqrt()
            scales = ratios.nan_to_num(1.0).clamp(max=1.0)
            self._covariance = scales[:, None] * self._covariance * scales
            for _ in range(_SWEEPS_OF_A_POWER):
                self.sweep()
                self.adapt(_SHORT_MEMORY)

    def begin(self, chosen: Tensor) -> None:
        """Continue from the ``chosen`` draws of :meth:`run`, with the posterior as the target."""
        self._is_exact = True
        self._move_to(self._drawn[chosen])

    def run(self) -> tuple[Tensor, float, float]:
        """Draws of θ ``[m, D]``, the smallest effective sample size and the largest R̂. Until the
        size is large enough, every second draw is dropped, and draws get twice as far apart.
        """
        for _ in range(_WARM_UP):
            self.sweep()
            self.adapt(_MEMORY)
        kept, apart = list[Tensor](), 1
        while True:
            while len(kept) < _KEPT:
                for _ in range(apart):
                    self.sweep()
                kept.append(self._states.at)
            self._drawn = torch.cat(kept)
            theta = self._frame(self._drawn)[0]
            worth, r_hat = mixing(theta.reshape(len(kept), _CHAINS, -1).transpose(0, 1))
            if worth >= 4 * LEAST_EFFECTIVE or apart == _MOST_APART[self._is_exact]:
                break
            kept, apart = kept[1::2], 2 * apart
        return theta, worth, r_hat


def _worth(weights: Tensor) -> float:
    """The number of equal weights that are as informative as these (effective sample size)."""
    return float(weights.sum().square() / weights.square().sum())


def smoothed(log_ratios: Tensor) -> tuple[Tensor, float]:
    """Normalised log weights with Pareto-smoothed tail, and k̂ (infinite for too few draws)."""
    values = log_ratios.nan_to_num(-math.inf, -math.inf, -math.inf)
    if not bool((values > -math.inf).any()):
        return torch.full_like(values, -math.log(len(values))), math.inf
    values = values - values.max()
    count = len(values)
    if float(values.min()) > -_ROUNDING:  # equal weights: no tail
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
