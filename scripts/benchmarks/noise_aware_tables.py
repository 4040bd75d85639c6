"""Noise-aware posteriors of logistic regression on real tables, beside the posterior without
privacy.

    python scripts/benchmarks/noise_aware_tables.py --data-root FOLDER --prior-std 3

FOLDER has UCI's ``adult/`` and ``abalone/``; breast cancer is scikit-learn's, its ten means. Adult
has age, years of education, capital gain and loss, hours and sex. Features are scaled by documented
ranges and divided by the root of their number, a column of that size is constant, and rows are at
most 1 long. The model is Pyro's, run by ``noise_aware.posterior``; neighbours replace a record.

Each figure is given at ε = 1, 3 and 8. "error" is the root mean square over the weights of (mean −
non-private mean) / non-private sd. "width" is the mean of sd / non-private sd. "covers" is how
often 90 % intervals hold the non-private mean. "alarms" counts runs in which a check warned that
releases contradict each other or the prior. The non-private posterior is Gaussian at its mode.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean

import torch
from noise_aware_calibration import logistic_model
from torch import Tensor

from torch_dpbayes.noise_aware import posterior

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "reproductions"))
import reproduce_privacy_for_free as free
from reproduction import Row, finish, grouped, having, parser_of

DELTA, EPSILONS = 1e-5, (1.0, 3.0, 8.0)
AIMS = {"abalone": "2.6, 1.7, 1.1", "adult": ".80, .28, .15", "breast cancer": "2.3, 1.3, .9"}
TABLES = tuple(AIMS)


def bounded(x: Tensor, unit: float) -> Tensor:
    """With a constant column, in units of ``unit``; the other columns' rows are no longer than
    leaves the whole row at 1.
    """
    x, constant = x.double() / unit, 1 / unit
    bound = math.sqrt(1 - constant**2)
    x = x / (x.norm(dim=1, keepdim=True) / bound).clamp_min(1.0)
    return torch.cat([x, torch.full((len(x), 1), constant).double()], 1)


def load(name: str, root: str, repeat: int) -> tuple[Tensor, Tensor]:
    """Features and labels of four fifths; of Adult the records that are published for training."""
    if name == "adult":
        rows = free.table("Adult", root)[: free.ADULT_TRAINING]
        columns = [[f(float(row[place])) for row in rows] for place, f in free.NUMBERS.items()]
        columns.append([float(row[9] == "Male") for row in rows])
        x = bounded(torch.tensor(columns).T.clamp(0, 1), math.sqrt(5 / 3 + 2))
        return x, torch.tensor([float(row[14].startswith(">50K")) for row in rows]).double()
    if name == "abalone":
        x, y = free.abalone_columns(free.table("Abalone", root))
        x, y = bounded(x, math.sqrt(7 / 3 + 2)), y.double()
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


def one(root: str, table: str, epsilon: float, prior_std: float, repeat: int) -> Row:
    """Figures of one run."""
    x, y = load(table, root, repeat)
    unit = 1 / float(x[0, -1])
    mode, stddev = without_privacy(x, y, prior_std)
    torch.manual_seed(repeat)
    started = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        found = posterior(
            logistic_model(prior_std),
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
        "error": float(((found.mean["w"] - mode) / stddev).square().mean().sqrt()),
        "width": float((found.stddev["w"] / stddev).mean()),
        "covers": float(((low < mode) & (mode < high)).double().mean()),
        "alarm": any("contradict" in str(warning.message) for warning in caught),
        "seconds": seconds,
    }


def summary(rows: Sequence[Row]) -> list[Row]:
    """Means over repeats, for each ε."""
    lines = []
    for (table, prior_std), some in grouped(rows, "table", "prior_std").items():
        line: Row = {"table": table if prior_std == 3 else f"{table}, prior sd {prior_std:g}"}
        by_epsilon = [having(some, epsilon=epsilon) for epsilon in EPSILONS]
        for name in ("error", "width", "covers"):
            means = [fmean(row[name] for row in part) for part in by_epsilon]
            line[name] = ", ".join(f"{mean:.2f}" for mean in means)
            line |= {"aim": AIMS[table]} if name == "error" else {}
        alarms = f"{sum(row['alarm'] for row in some)} of {len(some)}"
        lines.append(line | {"alarms": alarms})
    return lines


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "noise_aware_tables")
    parser.add_argument("--data-root", default="", help="folder with adult/ and abalone/")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tables", nargs="*", default=TABLES, choices=TABLES)
    parser.add_argument("--prior-std", nargs="*", type=float, default=[3.0, 10.0])
    options = parser.parse_args(arguments)
    if options.quick:
        options.tables, options.repeats = ["breast cancer"], 1
    grid = product(range(options.repeats), options.prior_std, options.tables, EPSILONS)
    names = ("repeat", "prior_std", "table", "epsilon")
    jobs = [dict(zip(names, values, strict=True)) for values in grid]
    make = partial(one, options.data_root)
    finish(options, make, jobs, tables=lambda rows: {"": summary(rows)})


if __name__ == "__main__":
    main()
