#!/usr/bin/env python3
"""Are noise-aware intervals as wide as they say? Calibration by simulation, and sharpness against
an oracle.

    python scripts/benchmarks/calibration_noise_aware.py results.csv [--only logistic]
        [--sizes 1000] [--epsilons 0.3 1] [--prior-stds 3] [--features correlated]
        [--data-sets 100] [--seconds 170]

Parameters are drawn from the prior, records from the model, and a private posterior is made of them
by the public functions. If the posterior is right, central 50 % and 90 % intervals hold the
parameters in 50 % and 90 % of the cases, whatever n and ε. Every cell is one line of the file, with
the standard error over data sets. The oracle knows the curvature at the true parameters and spends
the same gradients (or, in the second column, all of the budget) at the mode. Every cell gets some
data sets before any gets many, and the file is written again after each cell, with the commits of
the code that made its data sets: a later call goes on from there.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

import torch_dpbayes as dpb
from torch_dpbayes import noise_aware
from torch_dpbayes.noise_aware.planning import total_multiplier

sys.path.append(str(Path(__file__).resolve().parents[1] / "reproductions"))
from reproduction import commit

DELTA = 1e-5
DRAWS = 1000
ORACLE_DRAWS = 10  # of noises
SIZES, EPSILONS = (10_000, 1_000, 100_000), (1.0, 0.3, 3.0, 0.1)
ROUNDS = (10, 25, 60, 120, 250, 500, 2000)


@dataclass(frozen=True)
class Cell:
    """One setting of the simulation."""

    model: str
    num_data: int
    epsilon: float
    prior_std: float = 1.0
    features: str = "gaussian"
    neighboring: str = "add_or_remove_one"


@dataclass
class Totals:
    """What was found in a cell: sums over data sets of each data set's mean over parameters."""

    data_sets: int = 0
    inside_50: float = 0.0
    inside_50_squared: float = 0.0
    inside_90: float = 0.0
    inside_90_squared: float = 0.0
    sharpness: float = 0.0
    sharpness_whole_budget: float = 0.0
    seconds: float = 0.0
    commits: str = ""


@dataclass(frozen=True)
class Outcome:
    """One data set: where the true parameters lie in their posteriors (0 to 1), and mean
    posterior standard deviations.
    """

    ranks: Tensor
    stddev: float
    oracle: float = math.nan
    oracle_whole_budget: float = math.nan
    scale_rank: Tensor | None = None
    """Of the groups' scale, which is among ``ranks``, too."""


def features(kind: str, num_data: int, dimension: int) -> Tensor:
    """Rows of norm at most 1."""
    if kind == "gaussian":
        x = torch.randn(num_data, dimension, dtype=torch.float64)
    elif kind == "binary":
        x = (
            torch.rand(num_data, dimension, dtype=torch.float64)
            < torch.linspace(0.1, 0.9, dimension, dtype=torch.float64)
        ).double()
    elif kind == "correlated":  # standard deviations from 1 to 1/30, in any directions
        scales = torch.logspace(0, -1.5, dimension, dtype=torch.float64)
        x = torch.randn(num_data, dimension, dtype=torch.float64) * scales
        x = x @ torch.linalg.qr(torch.randn(dimension, dimension, dtype=torch.float64))[0]
        x = x * math.sqrt(dimension / float(scales.square().sum()))
    else:
        x = torch.distributions.StudentT(torch.tensor(3.0, dtype=torch.float64)).sample(
            (num_data, dimension)
        ) / math.sqrt(3)
    x = x / math.sqrt(dimension)
    return x / x.norm(dim=1, keepdim=True).clamp_min(1.0)


def accountant(cell: Cell) -> dpb.PrivacyAccountant:
    return dpb.PrivacyAccountant(cell.epsilon, DELTA, neighboring=cell.neighboring)


@cache
def whole_budget(cell: Cell) -> float:
    """The noise multiplier of the one release that uses the budget up."""
    return total_multiplier(accountant(cell), None, None)


def oracle_stddev(precision: Tensor, curvature: Tensor, noise_variance: float) -> float:
    """Mean standard deviation of the normal form at the true curvature."""
    noisy = curvature + noise_variance * torch.eye(len(curvature), dtype=torch.float64)
    total = torch.diag(precision) + curvature @ torch.linalg.solve(noisy, curvature)
    return float(torch.linalg.inv(total).diagonal().sqrt().mean())


def ranks(draws: Tensor, truth: Tensor) -> Tensor:
    return (draws < truth).double().mean(0)


def of_glm(cell: Cell, dimension: int) -> Outcome:
    theta = cell.prior_std * torch.randn(dimension, dtype=torch.float64)
    x = features(cell.features, cell.num_data, dimension)
    u = x @ theta
    if cell.model == "logistic":
        y = (torch.rand(cell.num_data, dtype=torch.float64) < u.sigmoid()).double()
        model, bound, second = (
            dpb.ops.GLM("bernoulli", prior_std=cell.prior_std),
            1.0,
            u.sigmoid() * (1 - u.sigmoid()),
        )
    else:
        y = torch.poisson(u.exp())
        model, bound, second = (
            dpb.ops.GLM("poisson", prior_std=cell.prior_std, max_count=50.0),
            3.0,
            u.exp(),
        )
    held = accountant(cell)
    post = noise_aware.laplace(
        model, x, y, accountant=held, max_grad_norm=bound, num_data=cell.num_data
    )
    return of_weights(post, "weights", theta, (x.T * second) @ x, bound, cell)


def of_weights(
    post: noise_aware.NoiseAwarePosterior,
    site: str,
    theta: Tensor,
    curvature: Tensor,
    bound: float,
    cell: Cell,
) -> Outcome:
    precision = torch.full((len(theta),), cell.prior_std**-2, dtype=torch.float64)
    spent = 1 / sum(g.noise_std**-2 for g in post.transcript.gradients)
    whole = (bound * whole_budget(cell)) ** 2
    return Outcome(
        ranks(post.sample(DRAWS)[site], theta),
        float(post.stddev[site].mean()),
        oracle_stddev(precision, curvature, spent),
        oracle_stddev(precision, curvature, whole),
    )


def pyro_logistic(cell: Cell) -> Outcome:
    """The same regression as a Pyro model, of whose likelihood nothing is known beforehand."""
    dimension = 8

    def model(x: Tensor, y: Tensor | None = None) -> None:
        prior = dist.Normal(torch.zeros(dimension, dtype=torch.float64), cell.prior_std)
        weights = pyro.sample("weights", prior.to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Bernoulli(logits=x @ weights), obs=y)

    x = features(cell.features, cell.num_data, dimension)
    truth = pyro.poutine.trace(model).get_trace(x)
    theta, y = (truth.nodes[name]["value"] for name in ("weights", "y"))
    post = noise_aware.laplace(
        model, x, y, accountant=accountant(cell), max_grad_norm=1.0, num_data=cell.num_data
    )
    mean = (x @ theta).sigmoid()
    return of_weights(post, "weights", theta, (x.T * (mean * (1 - mean))) @ x, 1.0, cell)


def logistic(cell: Cell) -> Outcome:
    return of_glm(cell, 8)


def poisson(cell: Cell) -> Outcome:
    return of_glm(cell, 5)


def linear(cell: Cell) -> Outcome:
    """d = 10, unknown variance, responses clipped to a public interval."""
    dimension = 10
    theta = cell.prior_std * torch.randn(dimension, dtype=torch.float64)
    noise_prior = dist.LogNormal(
        torch.tensor(-0.7, dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)
    )
    noise_std = noise_prior.sample()
    x = features(cell.features, cell.num_data, dimension)
    y = x @ theta + noise_std * torch.randn(cell.num_data, dtype=torch.float64)
    bound = 3.0 * math.sqrt(cell.prior_std**2 + 0.3)
    model = noise_aware.LinearRegression(
        target_bound=bound, prior_std=cell.prior_std, noise_std_prior=noise_prior
    )
    post = noise_aware.sufficient_statistics(
        model, x, y, accountant=accountant(cell), num_data=cell.num_data
    )
    draws = post.sample(DRAWS)
    found = torch.cat([ranks(draws["weights"], theta), ranks(draws["noise_std"], noise_std)[None]])
    curvature = x.T @ x / noise_std**2
    precision = torch.full((dimension,), cell.prior_std**-2, dtype=torch.float64)
    whole = (whole_budget(cell) * bound / float(noise_std) ** 2) ** 2
    return Outcome(
        found,
        float(post.stddev["weights"].mean()),
        oracle_stddev(precision, curvature, whole),
        oracle_stddev(precision, curvature, whole),
    )


def beta_bernoulli(cell: Cell) -> Outcome:
    """A uniform prior, of variance 1/12. The oracle knows the variance of the count."""
    probability = torch.rand((), dtype=torch.float64)
    x = torch.rand(cell.num_data, dtype=torch.float64) < probability
    post = noise_aware.sufficient_statistics(
        noise_aware.beta_bernoulli(), x, accountant=accountant(cell), num_data=cell.num_data
    )
    one = cell.num_data * probability * (1 - probability) + (whole_budget(cell) / 2) ** 2
    oracle = float((12 + cell.num_data**2 / one).rsqrt())
    return Outcome(
        ranks(post.sample(DRAWS)["probability"], probability)[None],
        float(post.stddev["probability"]),
        oracle,
        oracle,
    )


def hierarchical_oracle(
    curvature: Tensor, noise_variance: float, truth: Tensor, score: Tensor, groups: int
) -> float:
    """Mean posterior standard deviation of the groups' effects in the normal form at the true
    curvature, given a gradient at the true parameters with noise; over the groups' scale by
    quadrature, and over noises.

    Args:
        curvature: F.
        noise_variance: of the gradient.
        truth: the effects and the slopes.
        score: the gradient there without noise.
        groups: how many effects.
    """
    size, eye = len(truth), torch.eye(len(truth), dtype=torch.float64)
    precision = curvature @ torch.linalg.solve(curvature + noise_variance * eye, curvature)
    covariance = torch.linalg.inv(precision + 1e-6 * eye)
    noise = math.sqrt(noise_variance) * torch.randn(ORACLE_DRAWS, size, dtype=torch.float64)
    seen = truth - torch.linalg.solve(curvature + 1e-6 * eye, (score + noise).T).T
    scales = torch.linspace(0.01, 4.0, 200, dtype=torch.float64)
    own = torch.ones(len(scales), size, dtype=torch.float64)  # of slopes
    own[:, :groups] = scales[:, None].square()
    prior = torch.diag_embed(own)
    prior[:, :groups, :groups] += 1.0  # of the mean
    law = torch.distributions.MultivariateNormal(torch.zeros_like(truth), prior + covariance)
    weights = (law.log_prob(seen[:, None]) - scales.square() / 2).softmax(1)
    gain = torch.linalg.solve(prior + covariance, prior).mT
    means = torch.einsum("sij,nj->nsi", gain, seen)
    variances = (prior - gain @ prior).diagonal(dim1=-2, dim2=-1)
    mean = torch.einsum("ns,nsi->ni", weights, means)
    spread = variances + (means - mean[:, None]).square()
    total = torch.einsum("ns,nsi->ni", weights, spread)
    return float(total[:, :groups].sqrt().mean())


def hierarchical(cell: Cell) -> Outcome:
    """20 groups with an intercept each around a common mean, and two slopes; the groups'
    scale has a half-normal prior.
    """
    groups, slopes, bound = 20, 2, math.sqrt(2)
    one = torch.ones((), dtype=torch.float64)

    def model(group: Tensor, x: Tensor, y: Tensor | None = None) -> None:
        scale = pyro.sample("scale", dist.HalfNormal(one))
        mean = pyro.sample("mean", dist.Normal(0 * one, one))
        with pyro.plate("groups", groups):
            intercept = pyro.sample("intercept", dist.Normal(mean, scale))
        slope = pyro.sample(
            "slope", dist.Normal(torch.zeros(slopes, dtype=torch.float64), one).to_event(1)
        )
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Bernoulli(logits=intercept[group] + x @ slope), obs=y)

    group = torch.randint(0, groups, (cell.num_data,))
    x = features(cell.features, cell.num_data, slopes)
    truth = pyro.poutine.trace(model).get_trace(group, x)
    y = truth.nodes["y"]["value"]
    held = accountant(cell)
    post = noise_aware.laplace(
        model, group, x, y, accountant=held, max_grad_norm=bound, num_data=cell.num_data
    )
    draws = post.sample(1000)
    found = [
        ranks(draws[name], truth.nodes[name]["value"]).reshape(-1)
        for name in ("intercept", "slope", "mean", "scale")
    ]
    told = torch.cat([truth.nodes[name]["value"] for name in ("intercept", "slope")])
    design = torch.cat([torch.nn.functional.one_hot(group, groups), x], 1)
    mean = (design @ told).sigmoid()
    curvature = (design.T * (mean * (1 - mean))) @ design
    score = design.T @ (mean - y)
    spent = 1 / sum(g.noise_std**-2 for g in post.transcript.gradients)
    oracles = (
        hierarchical_oracle(curvature, variance, told, score, groups)
        for variance in (spent, (bound * whole_budget(cell)) ** 2)
    )
    return Outcome(
        torch.cat(found),
        float(post.stddev["intercept"].mean()),
        *oracles,
        scale_rank=found[-1],
    )


SIMULATE: dict[str, Callable[[Cell], Outcome]] = {
    "logistic": logistic,
    "pyro_logistic": pyro_logistic,
    "linear": linear,
    "beta_bernoulli": beta_bernoulli,
    "poisson": poisson,
    "hierarchical": hierarchical,
}
DATA_SETS = {"beta_bernoulli": 2000, "hierarchical": 100, "pyro_logistic": 100}
SCALE = "hierarchical, scale"


def cells() -> Iterator[Cell]:
    """The grid: the sizes and budgets of most interest come first."""
    for size in SIZES:
        for epsilon in EPSILONS:
            for model in SIMULATE:
                for prior_std in (1.0, 3.0) if "logistic" in model else (1.0,):
                    yield Cell(model, size, epsilon, prior_std)
            if size <= 10_000 and epsilon in (0.3, 1.0):
                for kind in ("binary", "student"):
                    yield Cell("logistic", size, epsilon, 1.0, kind)
                yield Cell("linear", size, epsilon, 1.0, "correlated")
            if size >= 10_000 and epsilon in (1.0, 3.0):
                yield Cell("logistic", size, epsilon, 3.0, "correlated")
                yield Cell("pyro_logistic", size, epsilon, 3.0, "correlated")
            if size == 10_000 and epsilon == 1.0:
                for model in ("logistic", "linear", "beta_bernoulli"):
                    yield Cell(model, size, epsilon, neighboring="replace_one")


def add(totals: Totals, outcome: Outcome, seconds: float) -> None:
    """Count one data set more."""
    for share, name in ((0.5, "inside_50"), (0.9, "inside_90")):
        inside = float(((outcome.ranks - 0.5).abs() < share / 2).double().mean())
        setattr(totals, name, getattr(totals, name) + inside)
        setattr(totals, f"{name}_squared", getattr(totals, f"{name}_squared") + inside**2)
    totals.data_sets += 1
    totals.sharpness += outcome.stddev / outcome.oracle
    totals.sharpness_whole_budget += outcome.stddev / outcome.oracle_whole_budget
    totals.seconds += seconds


def read(path: Path) -> dict[Cell, Totals]:
    """What an earlier run left."""
    if not path.exists():
        return {}
    found = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            cell = Cell(
                row["model"],
                int(row["num_data"]),
                float(row["epsilon"]),
                float(row["prior_std"]),
                row["features"],
                row["neighboring"],
            )
            sums = (float(row[field.name]) for field in fields(Totals)[1:-1])
            found[cell] = Totals(int(row["data_sets"]), *sums, row["commits"])
    return found


def write(path: Path, found: dict[Cell, Totals]) -> None:
    """The file with all cells so far; whole or not at all."""
    derived = [
        "coverage_50",
        "error_50",
        "coverage_90",
        "error_90",
        "mean_sharpness",
        "mean_sharpness_whole_budget",
    ]
    part = path.with_suffix(".part")
    with part.open("w", newline="") as file:
        writer = csv.DictWriter(
            file, [*(f.name for f in fields(Cell)), *(f.name for f in fields(Totals)), *derived]
        )
        writer.writeheader()
        for cell, totals in found.items():
            count = totals.data_sets
            row: dict[str, object] = asdict(cell) | asdict(totals)
            for share in ("50", "90"):
                mean = getattr(totals, f"inside_{share}") / count
                variance = max(getattr(totals, f"inside_{share}_squared") / count - mean**2, 0.0)
                row |= {
                    f"coverage_{share}": f"{mean:.4f}",
                    f"error_{share}": f"{math.sqrt(variance / count):.4f}",
                }
            row |= {"mean_sharpness": f"{totals.sharpness / count:.3f}"}
            row |= {"mean_sharpness_whole_budget": f"{totals.sharpness_whole_budget / count:.3f}"}
            writer.writerow(row)
    part.replace(path)


def run(path: Path, wanted: list[Cell], data_sets: int | None, seconds: float) -> None:
    """Fill cells until time is up."""
    found = read(path)
    head = commit()
    end = time.monotonic() + seconds
    for count in ROUNDS:
        for cell in wanted:
            most = min(DATA_SETS.get(cell.model, 500), data_sets or 10**9, count)
            totals = found.get(cell, Totals())
            begun = totals.data_sets
            while totals.data_sets < most and time.monotonic() < end:
                start = time.process_time()
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "the budget is too small")
                    outcome = SIMULATE[cell.model](cell)
                add(totals, outcome, time.process_time() - start)
                if outcome.scale_rank is not None:
                    of_scale = found.setdefault(replace(cell, model=SCALE), Totals())
                    add(of_scale, replace(outcome, ranks=outcome.scale_rank), 0.0)
                    of_scale.commits = with_commit(of_scale.commits, head)
            if totals.data_sets == begun:
                continue
            totals.commits = with_commit(totals.commits, head)
            found[cell] = totals
            write(path, found)
            made = totals.data_sets
            print(
                cell,
                made,
                f"{totals.inside_50 / made:.3f} {totals.inside_90 / made:.3f}"
                f" {totals.sharpness / made:.3f}",
                flush=True,
            )


def with_commit(commits: str, head: str) -> str:
    return " ".join(dict.fromkeys([*commits.split(), head]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("--only", nargs="*", choices=list(SIMULATE), default=list(SIMULATE))
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--epsilons", type=float, nargs="*", default=EPSILONS)
    parser.add_argument("--features", nargs="*", default=())
    parser.add_argument("--prior-stds", type=float, nargs="*", default=(1.0, 3.0))
    parser.add_argument("--data-sets", type=int)
    parser.add_argument("--seconds", type=float, default=math.inf)
    given = parser.parse_args()
    torch.set_num_threads(1)
    wanted = [
        cell
        for cell in cells()
        if cell.model in given.only
        and cell.num_data in given.sizes
        and cell.epsilon in given.epsilons
        and cell.prior_std in given.prior_stds
        and (not given.features or cell.features in given.features)
    ]
    run(given.results, wanted, given.data_sets, given.seconds)


if __name__ == "__main__":
    main()
