"""Compares DPPenalty at epsilon 8 with Pyro's No-U-Turn without privacy, for five groups of
Bernoulli records: prints the ratios of their posterior standard deviations.

    hierarchical_kernel.py [--records 50000] [--iterations 1500] [--seed 0]
"""

from __future__ import annotations

import argparse

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, NUTS
from torch import Tensor

import torch_dpbayes as dpb

GROUPS, EPSILON, DELTA = 5, 8.0, 1e-6


def levels() -> Tensor:
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with pyro.plate("groups", GROUPS):
        level: Tensor = pyro.sample("level", dist.Normal(mu, tau))
    return level


def model(group: Tensor, y: Tensor) -> None:
    level = levels()
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=level[group]), obs=y)


def of_counts(counts: Tensor, ones: Tensor) -> None:
    level = levels()
    with pyro.plate("counts", GROUPS):
        pyro.sample("ones", dist.Binomial(counts, logits=level), obs=ones)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--records", type=int, default=50_000)
    parser.add_argument("--iterations", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    group = torch.randint(GROUPS, (options.records,))
    y = torch.bernoulli((0.3 + 0.5 * torch.randn(GROUPS))[group].sigmoid())
    counts = torch.bincount(group, minlength=GROUPS).float()
    ones = torch.zeros(GROUPS).index_add(0, group, y)

    exact = MCMC(NUTS(of_counts), num_samples=2000, warmup_steps=500, disable_progbar=True)
    exact.run(counts, ones)
    truth = exact.get_samples()

    width = [float(1 / (options.records / GROUPS / 4) ** 0.5)] * GROUPS  # of a logit
    plan = dpb.mcmc.plan(
        dpb.mcmc.DPPenalty,
        target_epsilon=EPSILON,
        target_delta=DELTA,
        num_iterations=options.iterations,
        log_ratio_slope=1.0,
    )
    kernel = dpb.mcmc.DPPenalty(
        model,
        proposal_scale=plan.step_size(width),
        log_ratio_slope=1.0,
        accountant=dpb.PrivacyAccountant(EPSILON, DELTA),
        target_accept_prob=None,
        **plan.noise_multipliers,
    )
    # as if a public pilot had found the levels; mu and tau start at 0 in unconstrained space
    start = {
        "mu": torch.tensor(0.0),
        "tau": torch.tensor(0.0),
        "level": truth["level"].mean(0) + width[0] * torch.randn(GROUPS),
    }
    runner = dpb.mcmc.MCMC(
        kernel, options.iterations, 0, initial_params=start, disable_progbar=True
    )
    runner.run(group, y)
    for name, draws in runner.get_samples().items():
        print(name, "sd over No-U-Turn's:", (draws.std(0) / truth[name].std(0)).tolist())


if __name__ == "__main__":
    main()
