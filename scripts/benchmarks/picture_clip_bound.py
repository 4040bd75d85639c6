#!/usr/bin/env python3
"""A picture of what a clip bound that is too small does to a posterior: intervals of one weight of
a Poisson regression, against the share of the records that the bound clips.

    python scripts/benchmarks/picture_clip_bound.py rows.csv picture.png

The data are simulated, 20,000 records and two weights, and every interval is from a run of its own
at ε = 4. Counts are skewed: a bound cuts more off large ones than off small ones.
"""

from __future__ import annotations

import argparse
import csv
import math
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from pyro.infer import MCMC
from torch import Tensor

from torch_dpbayes import PrivacyAccountant, mcmc, noise_aware

RECORDS, EPSILON, DELTA, ITERATIONS = 20_000, 4.0, 1e-6, 800
TRUTH = torch.tensor([1.5, 1.0], dtype=torch.float64)
SHARES = (0.005, 0.05, 0.1, 0.2, 0.4)
STYLES = {
    "DPPenalty": ("tab:blue", "o"),
    "noise_aware.posterior": ("tab:orange", "s"),
}


def model(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("weights", dist.Normal(torch.zeros(2, dtype=x.dtype), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson((x @ w).exp()), obs=y)


def without_privacy(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Mode and standard deviations of the records' posterior, which is Gaussian for so many."""
    w = TRUTH.clone()
    for _ in range(30):
        mean = (x @ w).exp()
        precision = (x.T * mean) @ x + torch.eye(2, dtype=x.dtype)
        w = w - torch.linalg.solve(precision, x.T @ (mean - y) + w)
    return w, torch.linalg.inv(precision).diagonal().sqrt()


def chain(bound: float, x: Tensor, y: Tensor) -> Tensor:
    """Draws of a chain that starts at the true weights and spends the whole budget."""
    plan = mcmc.plan(
        mcmc.DPPenalty,
        target_epsilon=EPSILON,
        target_delta=DELTA,
        num_iterations=ITERATIONS,
        log_ratio_slope=bound,
    )
    kernel = mcmc.DPPenalty(
        model,
        proposal_scale=plan.step_size(without_privacy(x, y)[1].tolist()),
        log_ratio_slope=bound,
        accountant=PrivacyAccountant(EPSILON, DELTA),
        target_accept_prob=None,
        **plan.noise_multipliers,
    )
    runner = MCMC(
        kernel,
        num_samples=ITERATIONS - ITERATIONS // 5,
        warmup_steps=ITERATIONS // 5,
        initial_params={"weights": TRUTH},
        disable_progbar=True,
    )
    runner.run(x, y)
    return runner.get_samples()["weights"]


def noise_aware_draws(bound: float, x: Tensor, y: Tensor) -> Tensor:
    post = noise_aware.posterior(
        model,
        x,
        y,
        accountant=PrivacyAccountant(EPSILON, DELTA),
        max_grad_norm=bound,
        num_data=len(y),
    )
    return post.sample(4000)["weights"]


def measured() -> list[list[Any]]:
    """Share of clipped records, method, mean and standard deviation of the first weight."""
    place = 2 * torch.rand(RECORDS, dtype=torch.float64) - 1
    x = torch.stack([torch.ones_like(place), place], 1) / math.sqrt(2)
    y = torch.poisson((x @ TRUTH).exp())
    mode, stds = without_privacy(x, y)
    norms = (y - (x @ mode).exp()).abs() * x.norm(dim=1)
    rows: list[list[Any]] = [[0, "without privacy", float(mode[0]), float(stds[0])]]
    for share in SHARES:
        bound = float(norms.quantile(1 - share))
        for name, draws in (
            ("DPPenalty", chain(bound, x, y)),
            ("noise_aware.posterior", noise_aware_draws(bound, x, y)),
        ):
            rows.append([share, name, float(draws[:, 0].mean()), float(draws[:, 0].std())])
            print(*rows[-1], flush=True)
    return rows


def draw(rows: list[list[Any]], file: Path) -> None:
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    (_, _, mean, std), *runs = rows
    axes.axhspan(
        mean - 1.645 * std, mean + 1.645 * std, color="grey", alpha=0.35, label="without privacy"
    )
    for k, (name, (colour, marker)) in enumerate(STYLES.items()):
        own = [row for row in runs if row[1] == name]
        axes.errorbar(
            [SHARES.index(row[0]) + 0.15 * (k - 1) for row in own],
            [row[2] for row in own],
            [1.645 * row[3] for row in own],
            fmt=marker,
            color=colour,
            capsize=3,
            markersize=4,
            label=name,
        )
    axes.set_ylim(mean - 16 * std, mean + 3 * std)
    axes.set_xticks(range(len(SHARES)), [f"{100 * share:g} %" for share in SHARES])
    axes.set(xlabel="records whose gradient is clipped", ylabel="first weight, 90 % intervals")
    axes.legend(fontsize=8, loc="lower left")
    figure.savefig(file, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, help="drawn from, if there is such a file, else made")
    parser.add_argument("picture", type=Path)
    given = parser.parse_args()
    if not given.rows.exists():
        with given.rows.open("w", newline="") as file:
            csv.writer(file).writerows(measured())
    with given.rows.open(newline="") as file:
        rows = [[float(a), b, float(c), float(d)] for a, b, c, d in csv.reader(file)]
    draw(rows, given.picture)


if __name__ == "__main__":
    main()
