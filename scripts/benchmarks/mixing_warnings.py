"""How often chains whose worth is known are said not to have mixed, by their draws alone.

    mixing_warnings.py [--runs 200]

First autoregressive chains that are worth so many independent draws; then walks with a kernel's
noise on a posterior that is bent: a, b ~ N(0, 1), a + b² observed as 1 ± 0.28. Of these, one chain
begins in the middle of one arm, or four share the iterations and begin at draws of a Gaussian with
the posterior's mean and covariance. A run is too narrow if a coordinate's standard deviation is
below .7 of the posterior's; "worth" is what its iterations are worth
in chains from draws of the posterior.
"""

from __future__ import annotations

import argparse
import math

import torch
from pyro.ops.stats import effective_sample_size
from torch import Tensor

from torch_dpbayes.mcmc.mixing import mixing_of

WORTHS = (5, 10, 20, 50, 100)
CHAINS = ((1, 100, 1), (1, 100, 10), (4, 50, 10), (4, 200, 1))
WALKS = ((0.06, 8.0), (0.1, 4.0), (0.15, 0.0), (0.2, 0.0), (0.4, 0.0))
ITERATIONS, NARROW, WIDTH = 1500, 0.7, 0.28
_LONG = 64  # chains that say what a walk is worth


def autoregressive(chains: int, draws: int, dimension: int, worth: float) -> Tensor:
    """Stationary chains that are together worth ``worth`` independent draws, (chains, draws,
    dimension).
    """
    share = worth / (chains * draws)
    phi = (1 - share) / (1 + share)
    state, found = torch.randn(chains, dimension), []
    for _ in range(draws):
        state = phi * state + math.sqrt(1 - phi**2) * torch.randn(chains, dimension)
        found.append(state)
    return torch.stack(found, 1)


def log_density(theta: Tensor) -> Tensor:
    a, b = theta[..., 0], theta[..., 1]
    return -(a**2 + b**2) / 2 - ((1 - a - b**2) / WIDTH) ** 2 / 2


def of_the_posterior(count: int) -> Tensor:
    grid = torch.linspace(-5, 5, 1001)
    rows = torch.cartesian_prod(grid, grid)
    return rows[torch.multinomial(log_density(rows).exp(), count, replacement=True)]


def walks(start: Tensor, scale: float, noise: float, iterations: int) -> Tensor:
    """Penalty kernels' chains from rows of ``start``, (rows, iterations, 2)."""
    theta, path = start, []
    for _ in range(iterations):
        moved = theta + scale * torch.randn_like(theta)
        std = noise * torch.linalg.vector_norm(moved - theta, dim=1)
        log_ratio = log_density(moved) - log_density(theta) + std * torch.randn(len(theta))
        accepted = torch.rand(len(theta)).log() < log_ratio - std**2 / 2
        theta = torch.where(accepted[:, None], moved, theta)
        path.append(theta)
    return torch.stack(path, 1)


def worth(scale: float, noise: float, draws: Tensor) -> float:
    """Of all iterations in the worst coordinate or distance from the median, by long chains that
    begin at draws of the posterior.
    """
    found = walks(draws[:_LONG], scale, noise, 3 * ITERATIONS)
    both = torch.cat([found, (found - draws.median(0).values).abs()], 2)
    return float(effective_sample_size(both, 0, 1).min()) / (3 * _LONG)


def is_said(chains: Tensor) -> bool:
    return mixing_of([{"x": chain} for chain in chains], None).complaint() is not None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--runs", type=int, default=200, help="of each kind; default: 200")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    runs = options.runs
    print("chains x draws, coordinates | " + " | ".join(f"worth {worth}" for worth in WORTHS))
    for chains, draws, dimension in CHAINS:
        shares = [
            sum(is_said(autoregressive(chains, draws, dimension, worth)) for _ in range(runs))
            / runs
            for worth in WORTHS
        ]
        print(f"{chains} x {draws}, {dimension} | " + " | ".join(f"{s:.0%}" for s in shares))
    draws = of_the_posterior(100_000)
    stddev, mean, factor = draws.std(0), draws.mean(0), torch.linalg.cholesky(draws.T.cov())
    print(
        "step, noise | worth | "
        + " | ".join(f"{n}: too narrow, warned of these, of others" for n in "14")
    )
    for scale, noise in WALKS:
        cells = []
        for chains in (1, 4):
            start = torch.tensor([[0.5, math.sqrt(0.5)]]).repeat(runs, 1)
            if chains > 1:
                start = mean + torch.randn(chains * runs, 2) @ factor.T
            found = walks(start, scale, noise, ITERATIONS // chains)
            found = found.reshape(runs, chains, ITERATIONS // chains, 2)
            narrow = (found.flatten(1, 2).std(1) < NARROW * stddev).any(1)
            said = torch.tensor([is_said(run) for run in found])
            of_these, of_others = (
                f"{float(said[kind].double().mean()):.0%}" if kind.any() else "-"
                for kind in (narrow, ~narrow)
            )
            cells.append(f"{float(narrow.double().mean()):.0%}, {of_these}, {of_others}")
        print(
            f"{scale}, {noise:g} | {worth(scale, noise, draws):.2g} | " + " | ".join(cells),
            flush=True,
        )


if __name__ == "__main__":
    main()
