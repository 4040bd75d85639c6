#!/usr/bin/env python3
"""Pictures of noise-aware posteriors: coverage of their intervals, from the table of
``calibration_noise_aware.py``, and one posterior beside the non-private one as ε grows; and, in a
second file, the same for a hierarchical model.

    python scripts/benchmarks/picture_noise_aware.py results.csv picture.png groups.png

The data are simulated: 20,000 records of a logistic regression with two weights, and ten groups of
50 to 10,000 records whose log odds have a common mean and scale.
"""

from __future__ import annotations

import argparse
import csv
import math
import warnings
from pathlib import Path
from typing import Any

import matplotlib
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from torch_dpbayes import noise_aware
from torch_dpbayes.noise_aware.sampling import CHAINS, Chains
from torch_dpbayes.ops import GLM

matplotlib.use("Agg")
from matplotlib import pyplot as plt

EPSILONS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
RECORDS = 20_000
SIZES = torch.logspace(math.log10(50), 4, 10).round().long()
ONE, MEAN, SCALE = torch.ones((), dtype=torch.float64), -0.5, 0.8
COLOURS = {
    "logistic": "tab:blue",
    "pyro_logistic": "tab:cyan",
    "linear": "tab:orange",
    "beta_bernoulli": "tab:green",
    "poisson": "tab:red",
    "hierarchical": "tab:purple",
}


def coverage(axes: Any, table: Path) -> None:
    """Every cell of the table, nominal levels as lines, two standard errors as bars."""
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for level, marker in (("50", "o"), ("90", "s")):
        axes.axhline(float(level) / 100, color="grey", linewidth=0.8)
        for shift, (model, colour) in enumerate(COLOURS.items()):
            of_model = [row for row in rows if row["model"] == model]
            if not of_model:
                continue
            axes.errorbar(
                [float(row["epsilon"]) * 1.08 ** (shift - 2) for row in of_model],
                [float(row[f"coverage_{level}"]) for row in of_model],
                [2 * float(row[f"error_{level}"]) for row in of_model],
                fmt=marker,
                color=colour,
                markersize=4,
                linewidth=0.8,
                label=model.replace("_", "-") if level == "50" else None,
            )
    axes.set(xscale="log", ylim=(0.25, 1.03), xlabel="ε", ylabel="share of parameters inside")
    axes.set_title("central 50 % (o) and 90 % (□) intervals")
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncol=3, frameon=False)


def without_privacy(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Mode and standard deviations of the records' own posterior, prior N(0, I)."""
    w = torch.zeros(x.shape[1], dtype=x.dtype)
    for _ in range(30):
        mean = (x @ w).sigmoid()
        precision = (x.T * (mean * (1 - mean))) @ x + torch.eye(len(w), dtype=x.dtype)
        w = w - torch.linalg.solve(precision, x.T @ (mean - y) + w)
    return w, torch.linalg.inv(precision).diagonal().sqrt()


def growing(axes: Any) -> None:
    """90 % intervals of both weights, for every ε one run on the same records."""
    truth = torch.tensor([1.2, -0.7], dtype=torch.float64)
    x = torch.randn(RECORDS, 2, dtype=torch.float64)
    x = x / x.norm(dim=1, keepdim=True).clamp_min(1.0)
    y = (torch.rand(RECORDS, dtype=torch.float64) < (x @ truth).sigmoid()).double()
    mean, stddev = without_privacy(x, y)
    for k, colour in enumerate(("tab:blue", "tab:orange")):
        half = 1.645 * float(stddev[k])
        axes.axhspan(float(mean[k]) - half, float(mean[k]) + half, color=colour, alpha=0.25)
        axes.axhline(float(truth[k]), color=colour, linestyle=":", linewidth=1)
    for epsilon in EPSILONS:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the budget is too small")
            post = noise_aware.laplace(GLM(), x, y, epsilon=epsilon, delta=1e-6)
        draws = post.sample(1000)["weights"]
        levels = torch.quantile(draws, torch.tensor([0.05, 0.5, 0.95], dtype=draws.dtype), dim=0)
        for k, colour in enumerate(("tab:blue", "tab:orange")):
            low, middle, high = levels[:, k].tolist()
            axes.errorbar(
                epsilon * (0.95 if k else 1.05),
                middle,
                [[middle - low], [high - middle]],
                fmt="o",
                color=colour,
                capsize=3,
                markersize=4,
            )
    axes.set(xscale="log", xlabel="ε", ylabel="weight")
    axes.set_title("90 % intervals; bands: without privacy; dotted: truth", fontsize=10)


def in_groups(group: Tensor, y: Tensor | None = None) -> None:
    """A log odds for each group, around a common mean."""
    mean = pyro.sample("mean", dist.Normal(0 * ONE, ONE))
    scale = pyro.sample("scale", dist.HalfNormal(ONE))
    with pyro.plate("groups", len(SIZES)):
        log_odds = pyro.sample("log_odds", dist.Normal(mean, scale))
    with pyro.plate("data", len(group)):
        pyro.sample("y", dist.Bernoulli(logits=log_odds[group]), obs=y)


def groups_without_privacy(positives: Tensor) -> Tensor:
    """Draws of the groups' log odds and, last, of their scale, given the records' counts."""
    count = len(SIZES)

    def log_density(theta: Tensor) -> Tensor:
        log_odds, mean, log_scale = theta[:, :count], theta[:, count], theta[:, count + 1]
        scale = log_scale.exp().clamp_min(1e-3)
        of_groups = torch.distributions.Normal(mean[:, None], scale[:, None]).log_prob(log_odds)
        of_records = positives * log_odds - SIZES * torch.nn.functional.softplus(log_odds)
        above = -mean.square() / 2 - scale.square() / 2 + log_scale
        return (of_groups + of_records).sum(1) + above

    observed = ((positives + 1) / (SIZES - positives + 1)).log()
    start = torch.cat([observed, observed.mean()[None], observed.std().log()[None]])
    each = (positives + 1) * (SIZES - positives + 1) / (SIZES + 2)
    precision = torch.diag(torch.cat([each, torch.full((2,), float(count)).double()]))
    draws = Chains(log_density, start.repeat(CHAINS, 1), precision).draws(4000)
    return torch.cat([draws[:, :count], draws[:, count + 1 :].exp()], 1)


def hierarchical(left: Any, right: Any) -> None:
    """90 % intervals of the groups' log odds and of their scale, beside those without privacy."""
    truth = MEAN + SCALE * torch.randn(len(SIZES), dtype=torch.float64)
    group = torch.repeat_interleave(torch.arange(len(SIZES)), SIZES)
    y = (torch.rand(len(group), dtype=torch.float64) < truth[group].sigmoid()).double()
    positives = torch.zeros(len(SIZES), dtype=torch.float64).index_add(0, group, y)
    every = {"without privacy": groups_without_privacy(positives)}
    for epsilon in reversed(EPSILONS[1:]):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the budget is too small")
            post = noise_aware.laplace(
                in_groups, group, y, epsilon=epsilon, delta=1e-6, max_grad_norm=1.0
            )
        found = post.sample(4000)
        every[f"ε = {epsilon:g}"] = torch.cat([found["log_odds"], found["scale"][:, None]], 1)
    levels = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)
    colours = plt.get_cmap("viridis")
    for k, (name, draws) in enumerate(every.items()):
        low, middle, high = torch.quantile(draws.double(), levels, dim=0)
        place = torch.arange(len(SIZES)) + (k - len(every) / 2 + 0.5) * 0.13
        for axes, at, part in ((left, place, slice(-1)), (right, [k], slice(-1, None))):
            axes.errorbar(
                at,
                middle[part],
                [(middle - low)[part], (high - middle)[part]],
                fmt="o",
                color=colours(k / len(every)) if k else "black",
                markersize=3,
                label=name,
            )
    left.plot(torch.arange(len(SIZES)), truth, "rx", label="truth")
    left.axhline(MEAN, color="red", linestyle=":", linewidth=1)
    right.axhline(SCALE, color="red", linestyle=":", linewidth=1)
    left.set_xticks(range(len(SIZES)), [f"{size:,}" for size in SIZES.tolist()])
    left.set(xlabel="records in the group", ylabel="log odds of the group")
    left.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncol=7, frameon=False)
    right.set_xticks(range(len(every)), list(every), rotation=60, ha="right")
    right.set(ylabel="scale of the groups")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("groups", type=Path)
    given = parser.parse_args()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    coverage(left, given.table)
    growing(right)
    figure.tight_layout()
    figure.savefig(given.picture, dpi=110)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=(4, 1))
    hierarchical(left, right)
    figure.tight_layout()
    figure.savefig(given.groups, dpi=90)


if __name__ == "__main__":
    main()
