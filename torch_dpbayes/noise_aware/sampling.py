"""Draws from a density that is free of data: importance resampling where a Gaussian comes close,
and else Pyro's No-U-Turn sampler.

All of it is post-processing. Randomness is torch's global generator: ``torch.manual_seed`` repeats
the draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from pyro.infer import MCMC, NUTS
from torch import Tensor

LogDensity = Callable[[Tensor], Tensor]

_CANDIDATES = 4000
_ROUNDS, _MOST_ADAPTED = 6, 50  # of adaptation, and dimensions
_LEAST_SHARE = 0.1  # of the candidates, that weighted ones have to be worth
_DEGREES = (8.0, math.inf)  # of freedom: heavy tails are safe, but too far out in many dimensions
_WARMUP = 300
_NUMBERS_AT_ONCE = 2**22


class WeightedDraws:
    """Candidates of a t or normal distribution, weighted for the density.

    The proposal is around a mode. Where that is not close enough, it takes over mean and covariance
    of the weighted candidates, a few times; of weights that a handful of candidates would share, a
    power is used (Cappé et al. 2008, with tempering).

    Args:
        log_density: of the target, up to a constant, over ``[m, d]``.
        mean: of the first proposal, ``[d]``.
        precision: of the first proposal, ``[d, d]``.
        count: how many candidates.
    """

    def __init__(
        self, log_density: LogDensity, mean: Tensor, precision: Tensor, count: int = _CANDIDATES
    ) -> None:
        self._log_density, self._count = log_density, max(count, _CANDIDATES)
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
        self.values, log_proposal = _proposals(mean, precision, self._count, degrees)
        rows = max(1, _NUMBERS_AT_ONCE // len(mean) ** 2)
        log_target = torch.cat([self._log_density(part) for part in self.values.split(rows)])
        self._log_weights = (log_target - log_proposal).nan_to_num(-math.inf, -math.inf, -math.inf)
        self.weights = torch.softmax(self._log_weights, dim=0)

    def _moments(self) -> tuple[Tensor, Tensor]:
        power, weights = 1.0, self.weights
        while power > 1e-3 and 1 / float(weights.square().sum()) < _LEAST_SHARE * self._count:
            power *= 0.7
            weights = torch.softmax(power * self._log_weights, dim=0)
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

    def resampled(self, count: int) -> Tensor:
        """Draws with equal weights, ``[count, d]``."""
        return self.values[torch.multinomial(self.weights, count, replacement=True)]


def _proposals(
    mean: Tensor, precision: Tensor, count: int, degrees: float
) -> tuple[Tensor, Tensor]:
    factor = torch.linalg.cholesky(precision)
    normal = torch.randn(count, len(mean), dtype=mean.dtype)
    squared = normal.square().sum(-1)
    moved = torch.linalg.solve_triangular(factor.T, normal.T, upper=True).T
    if degrees == math.inf:
        return mean + moved, -0.5 * squared
    scale = (
        torch.distributions.Chi2(torch.tensor(degrees, dtype=mean.dtype)).sample((count,)) / degrees
    )
    return mean + moved / scale.sqrt()[:, None], -(degrees + len(mean)) / 2 * torch.log1p(
        squared / scale / degrees
    )


def no_u_turn(log_density: LogDensity, mean: Tensor, precision: Tensor, count: int) -> Tensor:
    """``count`` states of a No-U-Turn chain, in coordinates in which the Gaussian approximation is
    standard normal.

    Args:
        log_density: of the target, up to a constant, differentiable.
        mean: where the chain starts, ``[d]``.
        precision: of the Gaussian approximation, ``[d, d]``.
        count: how many.
    """
    factor = torch.linalg.cholesky(precision)

    def theta(whitened: Tensor) -> Tensor:
        return mean + torch.linalg.solve_triangular(factor.T, whitened.mT, upper=True).mT

    def potential(params: dict[str, Tensor]) -> Tensor:
        return -log_density(theta(params["whitened"][None])[0])

    with torch.enable_grad():
        kernel = NUTS(potential_fn=potential, target_accept_prob=0.9)
        start = {"whitened": 0.1 * torch.randn(len(mean), dtype=mean.dtype)}
        chain = MCMC(
            kernel,
            num_samples=count,
            warmup_steps=_WARMUP,
            initial_params=start,
            disable_progbar=True,
        )
        chain.run()
    return theta(chain.get_samples()["whitened"]).detach()
