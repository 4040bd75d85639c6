"""Draws from a density that is free of data: importance resampling where a Gaussian comes close,
and else Hamiltonian Monte Carlo.

All of it is post-processing. Randomness is torch's global generator: ``torch.manual_seed`` repeats
the draws.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from itertools import islice

import torch
from torch import Tensor

from ..words import shown
from .priors import Frame, GaussianPrior

LogDensity = Callable[[Tensor], Tensor]

_CANDIDATES = 4000
_ROUNDS, _MOST_ADAPTED = 6, 50  # of adaptation, and dimensions
# beyond which a tenth of the candidates shows whether all of them would be worth a quarter of
# what is asked of them
_TRIAL, _HOPE = 10, 0.25
_FROM_PRIOR = 0.25  # candidates of the prior for each of the proposal
_LEAST_SHARE = 0.1  # of the candidates, that weighted ones have to be worth
_DEGREES = (8.0, math.inf)  # of freedom: heavy tails are safe, but too far out in many dimensions
CHAINS = 64
_STAGES = (20, 60, 80)  # of warm-up: between them chains take over their covariance
_FOR_EACH = 9  # dimension, states that tell it
_LEAST_KEPT, _MOST_KEPT = 16, 256  # iterations of every chain
_AGREED = 1.1  # R-hat, at which draws are worth about five for each chain
_FIRST_STEP, _MOST_STEPS, _ACCEPTANCE = 0.5, 32, 0.8
_NUMBERS_AT_ONCE = 2**22


class WeightedDraws:
    """Candidates of a t or normal distribution, weighted for the density.

    The proposal is around a mode. Where that is not close enough, it takes over mean and covariance
    of the weighted candidates, a few times; of weights that a handful of candidates would share, a
    power is used (Cappé et al. 2008, with tempering).

    Weights cannot tell of a part of the density that no candidate is in: a narrow peak above a
    plateau that has most of the mass looks like a narrow peak. So one candidate in five is of a t
    distribution in the prior's place, and weights are those of the mixture (Hesterberg 1995): as
    the likelihood is bounded, so are they, unless the prior has heavier tails than that.

    Args:
        log_density: of the target, up to a constant, over ``[m, d]``.
        mean: of the first proposal, ``[d]``.
        precision: of the first proposal, ``[d, d]``.
        count: how many candidates, besides those of the prior.
        prior: None: the density is known to have one peak.
    """

    def __init__(
        self,
        log_density: LogDensity,
        mean: Tensor,
        precision: Tensor,
        count: int = _CANDIDATES,
        prior: GaussianPrior | None = None,
    ) -> None:
        self._log_density, self._count = log_density, max(count, _CANDIDATES)
        self._wide = None if prior is None else _Proposal(prior.mean, prior.matrix, _DEGREES[0])
        for degrees in _DEGREES:
            self._propose(mean, precision, degrees)
            if self.are_good:
                return
        for _ in range(_ROUNDS if len(mean) <= _MOST_ADAPTED else 0):
            if not self.worth:  # not one candidate has a density: there is nothing to learn from
                return
            mean, precision = self._moments()
            self._propose(mean, precision, _DEGREES[0])
            if self.are_good:
                return

    def _propose(self, mean: Tensor, precision: Tensor, degrees: float) -> None:
        near = _Proposal(mean, precision, degrees)
        if len(mean) > _MOST_ADAPTED:
            self._draw(near, self._count // _TRIAL)
            if self.worth < _HOPE * _LEAST_SHARE * len(self.weights):
                return
        self._draw(near, self._count)

    def _draw(self, near: _Proposal, count: int) -> None:
        self.values = near.draws(count)
        if self._wide is not None:
            more = self._wide.draws(round(_FROM_PRIOR * count))
            self.values = torch.cat([self.values, more])
        self._log_proposal = near.log_density(self.values)
        if self._wide is not None:
            of_prior = math.log(_FROM_PRIOR) + self._wide.log_density(self.values)
            self._log_proposal = torch.logaddexp(self._log_proposal, of_prior)
        self.weigh(self._log_density)

    def weigh(self, log_density: LogDensity) -> None:
        """Weights the candidates for a density."""
        rows = max(1, _NUMBERS_AT_ONCE // self.values.shape[1] ** 2)
        log_target = torch.cat([log_density(part) for part in self.values.split(rows)])
        ratios = log_target - self._log_proposal
        self._log_weights = ratios.nan_to_num(-math.inf, -math.inf, -math.inf)
        self.weights = torch.softmax(self._log_weights, dim=0)

    def weighted_for(self, log_density: LogDensity) -> WeightedDraws:
        """The same candidates, with the weights of another density."""
        other = copy.copy(self)
        other.weigh(log_density)
        return other

    def _tempered(self, worth: float) -> Tensor:
        """Weights to a power at which they are worth that many draws."""
        power, weights = 1.0, self.weights
        while power > 1e-3 and 1 / float(weights.square().sum()) < worth:
            power *= 0.7
            weights = torch.softmax(power * self._log_weights, dim=0)
        return weights

    def starts(self, count: int) -> Tensor:
        """Candidates to begin chains with, ``[count, d]``: the likelier ones, not all the same."""
        return self.values[torch.multinomial(self._tempered(count), count, replacement=True)]

    def _moments(self) -> tuple[Tensor, Tensor]:
        weights = self._tempered(_LEAST_SHARE * self._count)
        mean = weights @ self.values
        apart = self.values - mean
        covariance = (weights[:, None] * apart).T @ apart
        return mean, torch.linalg.inv(
            covariance + 1e-9 * covariance.trace() * torch.eye(len(mean), dtype=mean.dtype)
        )

    @property
    def worth(self) -> float:
        """Effective number of independent draws; 0 where no candidate has a density."""
        return float((1 / self.weights.square().sum()).nan_to_num(0.0))

    @property
    def are_good(self) -> bool:
        """Whether the proposal was close enough."""
        return self.worth >= _LEAST_SHARE * len(self.weights)

    @property
    def variances(self) -> Tensor:
        """Of every coordinate, ``[d]``."""
        return self.weights @ (self.values - self.weights @ self.values).square()

    def resampled(self, count: int) -> Tensor:
        """Draws with equal weights, ``[count, d]``."""
        return self.values[torch.multinomial(self.weights, count, replacement=True)]


class _Proposal:
    """N(mean, precision⁻¹), or a t distribution of that shape."""

    def __init__(self, mean: Tensor, precision: Tensor, degrees: float) -> None:
        self._mean, self._degrees = mean, degrees
        self._factor = torch.linalg.cholesky(precision)

    def draws(self, count: int) -> Tensor:
        normal = torch.randn(count, len(self._mean), dtype=self._mean.dtype)
        moved = torch.linalg.solve_triangular(self._factor.T, normal.T, upper=True).T
        if self._degrees < math.inf:
            degrees = torch.tensor(self._degrees, dtype=moved.dtype)
            chi2 = torch.distributions.Chi2(degrees).sample((count,))
            moved = moved * (degrees / chi2).sqrt()[:, None]
        return self._mean + moved

    def log_density(self, values: Tensor) -> Tensor:
        squared = ((values - self._mean) @ self._factor).square().sum(-1)
        size, log_scale = len(self._mean), self._factor.diagonal().log().sum()
        if self._degrees == math.inf:
            return log_scale - 0.5 * (squared + size * math.log(2 * math.pi))
        half = (self._degrees + size) / 2
        constant = math.lgamma(half) - math.lgamma(self._degrees / 2)
        constant -= size / 2 * math.log(math.pi * self._degrees)
        return log_scale + constant - half * torch.log1p(squared / self._degrees)


class Chains:
    """Hamiltonian Monte Carlo, many chains at once.

    Every chain moves by turns in θ and in each of the ``frames``, as one kind of coordinates suits
    where the data tell much and the other where they tell little (Yu and Meng 2011). Draws are kept
    when the chains agree, or after the longest run that is worth its time: ``r_hat`` says which.

    Source: Neal (2011), "MCMC using Hamiltonian dynamics".

    Args:
        log_density: of the target, up to a constant, over ``[m, d]``, differentiable.
        starts: of the chains, ``[chains, d]``.
        precision: of a Gaussian approximation, ``[d, d]``.
        frames: further coordinates, in which the prior is about standard normal.
    """

    def __init__(
        self,
        log_density: LogDensity,
        starts: Tensor,
        precision: Tensor,
        frames: Sequence[Frame] = (),
    ) -> None:
        root = torch.linalg.inv(torch.linalg.cholesky(precision))
        self._walks = [_Walk(log_density, root, None)]
        self._walks += [_Walk(log_density, torch.eye(len(root)).to(root), f) for f in frames]
        self._theta, self._kept = starts, [starts][:0]
        warmup = iter(shown(range(sum(_STAGES)), "adapting chains to the posterior"))
        states: list[Tensor] = []
        for length in _STAGES:
            self._adapt_to(states)
            rates = (1 / math.sqrt(1 + k) for k, _ in enumerate(islice(warmup, length)))
            states = [self._iterate(rate) for rate in rates]

    def draws(self, count: int) -> Tensor:
        """``count`` states in any order, ``[count, d]``."""
        needed = max(_LEAST_KEPT, math.ceil(count / len(self._theta)))
        if len(self._kept) < needed:
            self._keep(needed - len(self._kept))
        while self.r_hat > _AGREED and len(self._kept) < _MOST_KEPT:
            # what the chains did before they agreed counts as warm-up
            longer = 2 * len(self._kept)
            self._kept = []
            self._keep(longer)
        states = torch.cat(self._kept)
        return states[torch.randperm(len(states))[:count]]

    @property
    def r_hat(self) -> float:
        """The largest potential scale reduction of a coordinate, 1 where the chains agree
        (Gelman and Rubin 1992).
        """
        states = torch.stack(self._kept)
        within = states.var(0).mean(0)
        between = states.mean(0).var(0)
        return float((((len(states) - 1) / len(states) * within + between) / within).sqrt().max())

    def _adapt_to(self, states: list[Tensor]) -> None:
        """The later half of them tells the covariance, unless they are too few for it."""
        later = states[len(states) // 2 :]
        if states and len(later) * len(self._theta) >= _FOR_EACH * self._theta.shape[1]:
            for walk in self._walks:
                walk.adapt_to(torch.cat(later))

    def _keep(self, count: int) -> None:
        self._kept += [
            self._iterate(0.0) for _ in shown(range(count), "drawing from the posterior")
        ]

    def _iterate(self, learning_rate: float) -> Tensor:
        for walk in self._walks:
            self._theta = walk.moved(self._theta, learning_rate)
        return self._theta


class _Walk:
    """Moves of all chains in one kind of coordinates, in which ``root`` makes a Gaussian
    approximation standard normal.

    The number of leapfrog steps is uniform up to half of the Gaussian's period, the same for all
    chains. Each chain's step size is a random part of a common one: small steps get a chain out of
    where the density is narrow. In warm-up the common one is adapted to the mean acceptance, and
    the root to the covariance of all chains.
    """

    def __init__(self, log_density: LogDensity, root: Tensor, frame: Frame | None) -> None:
        self._log_density, self._root, self._frame = log_density, root, frame
        self._step = _FIRST_STEP
        self._theta: Tensor | None = None
        self._state: tuple[Tensor, Tensor, Tensor, Tensor]

    def adapt_to(self, states: Tensor) -> None:
        """Takes over the covariance of ``states``, ``[m, d]``."""
        if self._frame is not None:
            states = self._frame.inner(states)
        spread = torch.cov(states.T) + 1e-9 * torch.diag(states.var(0) + 1e-12)
        self._root, self._theta, self._step = torch.linalg.cholesky(spread).T, None, _FIRST_STEP

    def moved(self, theta: Tensor, learning_rate: float) -> Tensor:
        """The next states of chains at ``theta``."""
        if theta is not self._theta:
            xi = theta if self._frame is None else self._frame.inner(theta)
            self._state = self._evaluated(xi)
        xi, theta, value, gradient = self._state
        momentum = torch.randn_like(xi)
        energy = value - momentum.square().sum(-1) / 2
        longest = max(2, min(_MOST_STEPS, math.ceil(math.pi / self._step)))
        step = self._step * torch.rand_like(value)[:, None].sqrt()
        for _ in range(int(torch.randint(1, longest + 1, ()))):
            momentum = momentum + step / 2 * gradient
            xi, theta, value, gradient = self._evaluated(xi + step * momentum @ self._root)
            momentum = momentum + step / 2 * gradient
        change = (value - momentum.square().sum(-1) / 2 - energy).nan_to_num(-math.inf)
        accepted = torch.rand_like(change).log() < change
        mean_acceptance = float(change.clamp(max=0.0).exp().mean())
        self._step *= math.exp(learning_rate * (mean_acceptance - _ACCEPTANCE))
        self._state = (
            torch.where(accepted[:, None], xi, self._state[0]),
            torch.where(accepted[:, None], theta, self._state[1]),
            torch.where(accepted, value, self._state[2]),
            torch.where(accepted[:, None], gradient, self._state[3]),
        )
        self._theta = self._state[1]
        return self._theta

    def _evaluated(self, xi: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """ξ, θ, the log density of ξ, and the gradient of that in whitened coordinates."""
        with torch.enable_grad():
            point = xi.detach().requires_grad_()
            if self._frame is None:
                theta, value = point, self._log_density(point)
            else:
                theta, log_jacobian = self._frame.outer(point)
                value = self._log_density(theta) + log_jacobian
            (gradient,) = torch.autograd.grad(value.sum(), point)
        whitened = (gradient @ self._root.T).nan_to_num(0.0, 0.0, 0.0)
        return xi, theta.detach(), value.detach(), whitened
