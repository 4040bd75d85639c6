"""Effective samples that ``mcmc.plan`` expects, and what the library's kernels draw.

    expected_samples.py [--iterations 2000] [--only penalty HMC]

The targets are a Gaussian mean (three coordinates), a logistic regression (three weights, 200
records) and three bananas: a, b ~ N(0, 1), and a + b² known from 400 records to ± 0.6, 0.28 and
0.1. "noise" is that of the log ratio for a distance of one posterior standard deviation. Four
chains each, from draws of the posterior, with the step size that the plan gives for the posterior's
standard deviations. "width" is ``expected_sample_size`` of these; "density" is
``simulated_sample_size`` of the records' own posterior; "made-up" is that of records made up from
a draw of the posterior, which somebody can do who has a noise-aware posterior; all of them over
the effective samples of the four chains.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC
from pyro.ops.stats import effective_sample_size
from torch import Tensor

import torch_dpbayes as dpb
from torch_dpbayes.mcmc import DPHMC, DPPenalty
from torch_dpbayes.mcmc.planning import Plan

WIDTHS = (0.6, 0.28, 0.1)
NOISES = (0.5, 2.0)
CHAINS, STEPS, SLOPE = 4, 3, 100.0  # the slope is one that no record reaches
DRAWS = 4000


class Target(NamedTuple):
    """A model with records, and their posterior, which is known.

    Attributes:
        model: of one site "theta".
        args: the records.
        log_density: of rows.
        draws: of it.
        again: the same with records made up from a draw.
    """

    model: Callable[..., None]
    args: tuple[Tensor, ...]
    log_density: Callable[[Tensor], Tensor]
    draws: Tensor
    again: Callable[[], Target]


def gaussian_model(x: Tensor) -> None:
    theta = pyro.sample("theta", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("x", dist.Normal(theta, 1.0).to_event(1), obs=x)


def gaussian(theta: Tensor | None = None) -> Target:
    theta = torch.randn(3) if theta is None else theta
    x = theta + torch.randn(50, 3)
    mean, stddev = x.sum(0) / 51, 51**-0.5
    draws = mean + stddev * torch.randn(DRAWS, 3)
    return Target(
        gaussian_model,
        (x,),
        lambda rows: -((rows - mean) / stddev).square().sum(1) / 2,
        draws,
        lambda: gaussian(draws[0]),
    )


def logistic_model(x: Tensor, y: Tensor) -> None:
    theta = pyro.sample("theta", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=x @ theta), obs=y)


def logistic(theta: Tensor | None = None) -> Target:
    theta = torch.ones(3) if theta is None else theta
    x = 2 * torch.rand(200, 3) - 1
    y = torch.bernoulli((x @ theta).sigmoid())

    def log_density(rows: Tensor) -> Tensor:
        z = rows @ x.T
        return (y * z - torch.nn.functional.softplus(z)).sum(1) - rows.square().sum(1) / 2

    mode = torch.zeros(3)
    for _ in range(30):
        p = (x @ mode).sigmoid()
        precision = (x.T * (p * (1 - p))) @ x + torch.eye(3)
        mode = mode + torch.linalg.solve(precision, x.T @ (y - p) - mode)
    # importance resampling from a Gaussian at the mode, whose variances are doubled
    factor = torch.linalg.cholesky(2 * torch.linalg.inv(precision))
    normal = torch.randn(40 * DRAWS, 3)
    rows = mode + normal @ factor.T
    weight = (log_density(rows) + normal.square().sum(1) / 2).softmax(0)
    draws = rows[torch.multinomial(weight, DRAWS, replacement=True)]
    return Target(logistic_model, (x, y), log_density, draws, lambda: logistic(draws[0]))


def banana_model(y: Tensor, noise: float) -> None:
    theta = pyro.sample("theta", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(theta[0] + theta[1] ** 2, noise), obs=y)


def banana(width: float, theta: Tensor | None = None, records: int = 400) -> Target:
    noise = width * math.sqrt(records)
    centre = torch.tensor(1.0) if theta is None else theta[0] + theta[1] ** 2
    y = centre + noise * torch.randn(records)
    y += (centre - y.mean()) if theta is None else 0.0  # the three bananas differ in width alone
    mean = y.mean()

    def log_density(rows: Tensor) -> Tensor:
        off = (mean - rows[:, 0] - rows[:, 1] ** 2) / width
        return -(rows.square().sum(1) + off.square()) / 2

    grid = torch.linspace(-5, 5, 1501)
    rows = torch.cartesian_prod(grid, grid)
    draws = rows[torch.multinomial(log_density(rows).softmax(0), DRAWS, replacement=True)]
    return Target(
        lambda y: banana_model(y, noise), (y,), log_density, draws, lambda: banana(width, draws[0])
    )


TARGETS: dict[str, Callable[[], Target]] = {
    "Gaussian": gaussian,
    "logistic": logistic,
    **{f"banana, {width}": lambda width=width: banana(width) for width in WIDTHS},
}


def plan_of(kernel: type[Any], noise: float, target: Target, iterations: int) -> Plan:
    """With that much noise for a posterior standard deviation."""
    ratio = noise / float(target.draws.std(0).square().mean().sqrt()) / SLOPE
    if kernel is DPPenalty:
        return Plan({"noise_multiplier": ratio}, iterations, math.inf, 1e-6, log_ratio_slope=SLOPE)
    split = (STEPS**3 / (STEPS - 0.5)) ** 0.25  # that of mcmc.plan
    multipliers = {"ratio_noise_multiplier": ratio, "grad_noise_multiplier": split * ratio}
    return Plan(multipliers, iterations, math.inf, 1e-6, STEPS, SLOPE, SLOPE, 0.2)


def worth(draws: Tensor) -> float:
    """Of chains, (chains, draws, d)."""
    return float(effective_sample_size(draws.double(), 0, 1).min())


def measured(kernel: type[Any], found: Plan, target: Target, scale: float) -> float:
    """Effective samples of four chains of the library's own kernel."""
    options: dict[str, Any] = {"proposal_scale": scale}
    if kernel is DPHMC:
        options = {"step_size": scale, "num_steps": STEPS, "max_grad_norm": SLOPE}
    chains = []
    for start in target.draws[-CHAINS:]:
        runner = MCMC(
            kernel(
                target.model,
                log_ratio_slope=SLOPE,
                accountant=dpb.PrivacyAccountant(),
                target_accept_prob=None,
                **found.noise_multipliers,
                **options,
            ),
            num_samples=found.num_iterations,
            warmup_steps=0,
            initial_params={"theta": start},
            disable_progbar=True,
        )
        runner.run(*target.args)
        chains.append(runner.get_samples()["theta"])
    return worth(torch.stack(chains))


def compare(kernel: type[Any], name: str, noise: float, iterations: int) -> str:
    target = TARGETS[name]()
    found = plan_of(kernel, noise, target, iterations)
    stddev = target.draws.std(0)
    scale = found.step_size(stddev)
    counted = measured(kernel, found, target, scale)
    made_up = target.again()
    ratios = [
        CHAINS * expected / counted
        for expected in (
            found.expected_sample_size(stddev),
            found.simulated_sample_size(target.log_density, target.draws, step_size=scale),
            found.simulated_sample_size(made_up.log_density, made_up.draws, step_size=scale),
        )
    ]
    return f"{name} | {noise} | {counted:.0f} | " + " | ".join(f"{r:.2f}" for r in ratios)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--iterations", type=int, default=2000, help="of a chain; default: 2000")
    parser.add_argument("--only", nargs="*", default=["penalty", "HMC"])
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    for kernel, word in ((DPPenalty, "penalty"), (DPHMC, "HMC")):
        if word in options.only:
            print(f"{word}: target | noise | effective samples | width | density | made-up")
            for name in TARGETS:
                for noise in NOISES:
                    print(compare(kernel, name, noise, options.iterations), flush=True)


if __name__ == "__main__":
    main()
