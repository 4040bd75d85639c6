#!/usr/bin/env python3
"""Noise-aware posteriors of a logistic regression on real data, beside the posterior without
privacy.

    python noise_aware_real_data.py --data-root FOLDER [--repeats 5] [--data Abalone] [--stored]

FOLDER has UCI's ``adult/`` and ``abalone/``; breast cancer is scikit-learn's. Adult with seven
columns has age, years of education, capital gain and loss, hours, sex and a column of ones; breast
cancer the ten means. Features are scaled by documented ranges, and rows are at most 1 long. Prior
N(0, s²), ε for replacing a record, δ = 1e-5. Repeats have other noise, and of Abalone and breast
cancer another division into training and test records.

"GLM" is ``noise_aware.posterior(ops.GLM(...))``; "Pyro" the same likelihood as a Pyro model, with
the column of ones stated as constant.

"error" is the root mean square over the weights of (mean - non-private mean) / non-private sd,
"width" the mean of sd / non-private sd, "covers" how often 90 % intervals hold the non-private
mean, "log likelihood" that of test records under the average over draws, "warned" the share of runs
with a warning.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import pyro
import pyro.distributions as dist
import reproduce_privacy_for_free as free
import reproduction
import torch
from torch import Tensor, nn

import torch_dpbayes as dpb
from torch_dpbayes import noise_aware, ops

DELTA, EPSILONS, PRIOR_STDS = 1e-5, (1.0, 3.0, 8.0), (3.0, 10.0)
DRAWS = 4000
PROPOSALS, DEGREES = 20_000, 8.0  # of freedom
FEW_COLUMNS = 50  # beyond which the posterior without privacy is a Gaussian at its mode
UNITS = {  # before scaling, the longest row that is not shortened
    "breast cancer": math.sqrt(10 / 3 + 1),
    "Abalone": math.sqrt(len(free.ABALONE) / 3 + 2),
    "Adult (7)": math.sqrt(len(free.NUMBERS) / 3 + 2),
    "Adult (108)": math.sqrt(len(free.NUMBERS) / 3 + len(free.CODES) + 1),
}


@lru_cache(maxsize=4)
def load(name: str, repeat: int, root: str) -> free.Data:
    if name == "Abalone":
        return free.abalone(free.table("Abalone", root), repeat)
    if name == "breast cancer":
        return breast_cancer(repeat)
    rows = free.table("Adult", root)
    data = free.adult(rows)
    if name == "Adult (108)":
        return data
    numbers = torch.tensor(
        [
            [scale(float(row[column])) for column, scale in free.NUMBERS.items()]
            + [float(row[9] == "Male")]
            for row in rows
        ]
    )
    x = free.bounded(numbers.clamp(0, 1), UNITS[name])
    size = free.ADULT_TRAINING
    return free.Data(x[:size], data.y, x[size:], data.y_test)


def breast_cancer(repeat: int) -> free.Data:
    """The ranges are those of scikit-learn's description, which are those of the records."""
    from sklearn.datasets import load_breast_cancer

    found = load_breast_cancer()
    numbers = torch.tensor(found.data[:, :10]).float()
    low, high = numbers.min(0).values, numbers.max(0).values
    x = free.bounded(2 * (numbers - low) / (high - low) - 1, UNITS["breast cancer"])
    y = torch.tensor(found.target).float()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(repeat))
    train, test = order[: 4 * len(x) // 5], order[4 * len(x) // 5 :]
    return free.Data(x[train], y[train], x[test], y[test])


class Reference:
    """The posterior without privacy, by importance sampling around its mode."""

    def __init__(self, data: free.Data, prior_std: float) -> None:
        x, y = data.x.double(), data.y.double()
        mode = free.minimiser(data, prior_std**-2, clip=math.inf)
        p = (x @ mode).sigmoid()
        precision = (x.T * (p * (1 - p))) @ x + prior_std**-2 * torch.eye(len(mode)).double()
        self.mean, self.stddev = mode, torch.linalg.inv(precision).diagonal().sqrt()
        if len(mode) > FEW_COLUMNS:
            return
        factor = torch.linalg.cholesky(torch.linalg.inv(precision))
        law = dist.MultivariateStudentT(torch.tensor(DEGREES).double(), mode, factor)
        draws = law.sample((PROPOSALS,))
        parts = []
        for some in draws.split(100):
            u = x @ some.T
            of_records = (y[:, None] * u - nn.functional.softplus(u)).sum(0)
            parts.append(of_records - some.square().sum(1) / (2 * prior_std**2))
        weights = torch.softmax(torch.cat(parts) - law.log_prob(draws), 0)
        self.mean = weights @ draws
        self.stddev = (weights @ (draws - self.mean).square()).sqrt()


@lru_cache(maxsize=4)
def reference(name: str, repeat: int, root: str, prior_std: float) -> Reference:
    return Reference(load(name, repeat, root), prior_std)


def model(prior_std: float, x: Tensor, y: Tensor) -> None:
    w = pyro.sample("weights", dist.Normal(x.new_zeros(x.shape[1]), prior_std).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def run(
    root: str, data: str, method: str, epsilon: float, prior_std: float, repeat: int
) -> dict[str, Any]:
    """Figures of one run."""
    division = 0 if data.startswith("Adult") else repeat
    records, known = load(data, division, root), reference(data, division, root, prior_std)
    accountant = dpb.PrivacyAccountant(epsilon, DELTA, neighboring=free.RELATION)
    what: Callable[..., Any] | ops.GLM = ops.GLM("bernoulli", prior_std=prior_std)
    options: dict[str, Any] = {}
    if method == "Pyro":
        what, one = partial(model, prior_std), 1 / UNITS[data]
        options["constant_columns"] = {records.dimension - 1: one}
        options["max_feature_norm"] = math.sqrt(1 - one**2)
    x, y = records.x.double(), records.y.double()
    start = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        post = noise_aware.posterior(what, x, y, accountant=accountant, **options)
    seconds = time.process_time() - start
    draws = post.sample(DRAWS)["weights"].double()
    said = [str(each.message) for each in caught]
    return judged(draws, records, known) | {"seconds": seconds, "said": said}


def judged(draws: Tensor, data: free.Data, known: Reference) -> dict[str, float]:
    """Error, width, coverage and test log likelihood of draws ``[m, d]``."""
    error = ((draws.mean(0) - known.mean) / known.stddev).square().mean().sqrt()
    p = (data.x_test.double() @ draws.T).sigmoid().mean(1)
    told = torch.where(data.y_test > 0, p, 1 - p).clamp_min(1e-12).log().mean()
    low, high = torch.quantile(draws, torch.tensor([0.05, 0.95]).double(), dim=0)
    return {
        "error": float(error),
        "width": float((draws.std(0) / known.stddev).mean()),
        "covers": float(((low < known.mean) & (known.mean < high)).double().mean()),
        "log likelihood": float(told),
    }


def summary(runs: Sequence[reproduction.Run]) -> list[dict[str, Any]]:
    """A row for each data set, method, prior and ε: means over repeats."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for done in runs:
        key = tuple(done.job[name] for name in ("data", "method", "prior_std", "epsilon"))
        found.setdefault(key, []).append(done.result)
    rows = []
    for (data, method, prior_std, epsilon), results in found.items():
        row = {"data": data, "method": method, "prior sd": prior_std, "epsilon": epsilon}
        row["runs"] = len(results)
        for name in ("error", "width", "covers", "log likelihood", "seconds"):
            row[name] = sum(result[name] for result in results) / len(results)
        row["warned"] = sum(bool(result["said"]) for result in results) / len(results)
        rows.append(row)
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = reproduction.parser_of(__doc__, "noise_aware_real_data")
    parser.add_argument("--data-root", required=True, help="folder with abalone/ and adult/")
    parser.add_argument("--repeats", type=reproduction.positive, default=5)
    parser.add_argument("--data", nargs="*", choices=list(UNITS), default=list(UNITS))
    parser.add_argument("--methods", nargs="*", choices=["GLM", "Pyro"], default=["GLM", "Pyro"])
    options = parser.parse_args(arguments)
    logging.getLogger("torch_dpbayes").setLevel(logging.ERROR)
    jobs = [
        {"data": name, "method": method, "epsilon": epsilon, "prior_std": std, "repeat": repeat}
        for repeat in range(options.repeats)
        for name in options.data
        for std in PRIOR_STDS
        for epsilon in EPSILONS
        for method in options.methods
    ]
    function = partial(run, options.data_root)
    runs = reproduction.runs_of(function, jobs, options.results, stored=options.stored)
    rows = summary(runs)
    if options.csv:
        reproduction.write_csv(rows, options.csv)
    columns = {"data": "", "method": "", "prior sd": "g", "epsilon": "g", "runs": "d"}
    columns |= {"error": ".2f", "width": ".2f", "covers": ".2f", "log likelihood": ".3f"}
    columns |= {"warned": ".2f", "seconds": ".1f"}
    print(f"\n{reproduction.markdown(rows, columns)}\n\n{reproduction.origin(runs)}")


if __name__ == "__main__":
    main()
