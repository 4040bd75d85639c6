#!/usr/bin/env python3
"""Two pictures of noise-aware posteriors: coverage of their intervals, from the table of
``calibration_noise_aware.py``, and one posterior beside the non-private one as ε grows.

    python scripts/benchmarks/picture_noise_aware.py results.csv picture.png

The data are simulated, 20,000 records of a logistic regression with two weights.
"""

from __future__ import annotations

import argparse
import csv
import warnings
from pathlib import Path
from typing import Any

import matplotlib
import torch
from torch import Tensor

from torch_dpbayes import noise_aware
from torch_dpbayes.ops import GLM

matplotlib.use("Agg")
from matplotlib import pyplot as plt

EPSILONS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
RECORDS = 20_000
COLOURS = {
    "logistic": "tab:blue",
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
    axes.set(xscale="log", ylim=(0.3, 1.0), xlabel="ε", ylabel="share of parameters inside")
    axes.set_title("central 50 % (o) and 90 % (□) intervals")
    axes.legend(fontsize=8, loc="center", bbox_to_anchor=(0.5, 0.56), ncol=3)


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", type=Path)
    parser.add_argument("picture", type=Path)
    given = parser.parse_args()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    coverage(left, given.table)
    growing(right)
    figure.tight_layout()
    figure.savefig(given.picture, dpi=110)


if __name__ == "__main__":
    main()
