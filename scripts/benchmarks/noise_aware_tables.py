"""Noise-aware posteriors of logistic regression on real tables, beside the posterior without
privacy.

    python scripts/benchmarks/noise_aware_tables.py FILE --data-root FOLDER --repeats 3

FOLDER has UCI's ``adult/`` and ``abalone/``; breast cancer is scikit-learn's, its ten means. Adult
has age, years of education, capital gain and loss, hours and sex. Features are scaled by documented
ranges and divided by the root of their number, a column of that size is constant, and rows are at
most 1 long. The model is Pyro's, run by ``noise_aware.posterior``; neighbours replace a record.

"error" is the root mean square over the weights of (mean − non-private mean) / non-private sd,
"width" the mean of sd / non-private sd, "covers" how often 90 % intervals hold the non-private
mean. The non-private posterior is Gaussian at its mode.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import time
import warnings
from collections import defaultdict
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from torch_dpbayes.noise_aware import posterior

DELTA, EPSILONS = 1e-5, (1.0, 3.0, 8.0)
# units of 200 mm and 200 g: round numbers around the ranges in abalone.names
ABALONE = torch.tensor([1.0, 0.8, 0.4, 3.0, 1.5, 0.8, 1.0])
TABLES = ("breast_cancer", "abalone", "adult")


def bounded(x: Tensor, unit: float) -> Tensor:
    """With a constant column, in units of ``unit``; the other columns' rows are no longer than
    leaves the whole row at 1.
    """
    x, constant = x.double() / unit, 1 / unit
    bound = math.sqrt(1 - constant**2)
    x = x / (x.norm(dim=1, keepdim=True) / bound).clamp_min(1.0)
    return torch.cat([x, torch.full((len(x), 1), constant).double()], 1)


def rows_of(root: Path, *names: str) -> list[list[str]]:
    """UCI's rows as text."""
    lines = [line for name in names for line in (root / name).read_text().splitlines()]
    return [row for row in csv.reader(lines, skipinitialspace=True) if len(row) > 1]


def load(name: str, root: Path, repeat: int) -> tuple[Tensor, Tensor]:
    """Features and labels of four fifths; of Adult the records that are published for training."""
    if name == "adult":
        rows = rows_of(root, "adult/adult.data")
        columns = [
            [float(row[0]) / 100 for row in rows],
            [float(row[4]) / 16 for row in rows],
            [math.log1p(float(row[10])) / math.log1p(1e5) for row in rows],
            [math.log1p(float(row[11])) / math.log1p(5e3) for row in rows],
            [float(row[12]) / 100 for row in rows],
            [float(row[9] == "Male") for row in rows],
        ]
        x = bounded(torch.tensor(columns).T.clamp(0, 1), math.sqrt(5 / 3 + 2))
        return x, torch.tensor([float(row[14].startswith(">50K")) for row in rows]).double()
    if name == "abalone":
        rows = rows_of(root, "abalone/abalone.data")
        numbers = torch.tensor([[float(value) for value in row[1:]] for row in rows])
        infant = torch.tensor([[2.0 * (row[0] == "I") - 1] for row in rows])
        scaled = (2 * numbers[:, :-1] / ABALONE - 1).clamp(-1, 1)
        x = bounded(torch.cat([scaled, infant], 1), math.sqrt(7 / 3 + 2))
        y = (numbers[:, -1] >= 10).double()
    else:
        from sklearn.datasets import load_breast_cancer

        found = load_breast_cancer()
        numbers = torch.tensor(found.data[:, :10])
        low, high = numbers.min(0).values, numbers.max(0).values
        x = bounded(2 * (numbers - low) / (high - low) - 1, math.sqrt(10 / 3 + 1))
        y = torch.tensor(found.target).double()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(repeat))
    chosen = order[: 4 * len(x) // 5]
    return x[chosen], y[chosen]


def without_privacy(x: Tensor, y: Tensor, prior_std: float) -> tuple[Tensor, Tensor]:
    """Mode and standard deviations, by Newton's method."""
    w, eye = torch.zeros(x.shape[1]).double(), torch.eye(x.shape[1]).double()
    for _ in range(50):
        p = torch.sigmoid(x @ w)
        precision = (x * (p * (1 - p))[:, None]).T @ x + eye / prior_std**2
        w = w + torch.linalg.solve(precision, x.T @ (y - p) - w / prior_std**2)
    return w, torch.linalg.inv(precision).diagonal().sqrt()


def one(name: str, root: Path, epsilon: float, prior_std: float, repeat: int) -> dict[str, object]:
    """Figures of one run."""
    x, y = load(name, root, repeat)
    unit = 1 / float(x[0, -1])
    mode, stddev = without_privacy(x, y, prior_std)

    def model(x: Tensor, y: Tensor) -> None:
        zeros = torch.zeros(x.shape[1], dtype=torch.float64)
        w = pyro.sample("w", dist.Normal(zeros, prior_std).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)

    torch.manual_seed(repeat)
    started = time.process_time()
    found = posterior(
        model,
        x,
        y,
        epsilon=epsilon,
        delta=DELTA,
        max_feature_norm=math.sqrt(1 - unit**-2),
        constant_columns={x.shape[1] - 1: 1 / unit},
    )
    seconds = time.process_time() - started
    draws = found.sample(4000)["w"]
    low, high = torch.quantile(draws, torch.tensor([0.05, 0.95]).double(), dim=0)
    return {
        "table": name,
        "epsilon": epsilon,
        "prior_std": prior_std,
        "repeat": repeat,
        "error": float(((found.mean["w"] - mode) / stddev).square().mean().sqrt()),
        "width": float((found.stddev["w"] / stddev).mean()),
        "covers": float(((low < mode) & (mode < high)).double().mean()),
        "seconds": seconds,
        "pareto_k": found.pareto_k,
        "checks": found.checks,
    }


def main() -> None:
    """Runs what the file does not have yet, and prints means over repeats."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, help="lines of JSON, one for each run")
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tables", nargs="*", default=TABLES, choices=TABLES)
    parser.add_argument("--prior-std", nargs="*", type=float, default=[3.0, 10.0])
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", UserWarning)
    keys = ("table", "epsilon", "prior_std", "repeat")
    done: dict[tuple[object, ...], dict[str, object]] = {}
    if options.path.exists():
        rows = [json.loads(line) for line in options.path.read_text().splitlines()]
        done = {tuple(row[key] for key in keys): row for row in rows}
    for repeat in range(options.repeats):
        for prior_std in options.prior_std:
            for name in options.tables:
                for epsilon in EPSILONS:
                    key = (name, epsilon, prior_std, repeat)
                    if key not in done:
                        done[key] = one(name, options.data_root, epsilon, prior_std, repeat)
                        with options.path.open("a") as file:
                            file.write(json.dumps(done[key]) + "\n")
    found = defaultdict(list)
    for (name, epsilon, prior_std, _), row in done.items():
        found[name, prior_std, epsilon].append(row)
    print("| table | prior sd | ε | repeats | error | width | covers | s |\n" + "|---" * 8 + "|")
    for (name, prior_std, epsilon), rows in sorted(found.items()):
        means = [sum(r[k] for r in rows) / len(rows) for k in ("error", "width", "covers")]
        seconds = sum(r["seconds"] for r in rows) / len(rows)
        print(
            f"| {name} | {prior_std:g} | {epsilon:g} | {len(rows)} |"
            f" {' | '.join(f'{mean:.2f}' for mean in means)} | {seconds:.0f} |"
        )


if __name__ == "__main__":
    main()
