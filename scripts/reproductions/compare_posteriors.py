#!/usr/bin/env python3
"""What private methods say about the weights of a logistic regression on real data, beside the
posterior without privacy.

    python compare_posteriors.py --data-root FOLDER [--repeats 10] [--data Abalone] [--stored]

FOLDER has UCI's ``adult/`` and ``abalone/``; breast cancer is scikit-learn's. Adult with seven
columns has age, years of education, capital gain and loss, hours, sex and a column of ones; breast
cancer the ten means. Features are scaled by documented ranges, rows are at most 1 long.

Every method gets the same records, N(0, s²) prior, ε (for replacing a record) and δ = 1e-5. Batches
are full. Repeats have other noise, and of Abalone and breast cancer another division.

``noise_aware.laplace`` has its defaults. The other methods run with several clip norms, numbers of
steps and rates, and each cell of the table has the one of them whose mean is nearest to that of the
posterior without privacy: picked on the data, which no user can do, in their favour. Numbers of
steps are those of ``reproduce_privacy_for_free.py``, but at most 300, and 3000; variational ones
200, and 2000 in batches of a tenth.

The two oracles are no private methods: both spend all of the budget on one gradient at the mode,
with noise of the same size in all directions. "oracle" knows the curvature of the records there,
"oracle, features" (up to 50 columns) all their features, so that it knows how curvatures change on
the way to the prior: p(gradient | θ) is normal with the mean and the covariance that targets drawn
at θ give it. What the second one errs, and what its intervals miss, is due to that noise and to the
prior, which counts for more under more noise.

"error" is the root mean square over the weights of (mean − non-private mean) / non-private sd,
"width" the mean of sd / non-private sd, "covers" how often 90 % intervals hold the non-private
mean, "log likelihood" that of test records under the average over draws. A draw and a minimiser
have no intervals. The non-private posterior is weighted by importance, and with 108 columns a
Gaussian at the mode.
"""

from __future__ import annotations

import argparse
import logging
import math
import time
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import reproduce_privacy_for_free as free
import reproduction
import torch
from pyro.infer.autoguide import AutoDiagonalNormal
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes import noise_aware, ops
from torch_dpbayes.accounting.events import GaussianDpEvent
from torch_dpbayes.noise_aware.planning import total_multiplier
from torch_dpbayes.noise_aware.sampling import WeightedDraws
from torch_dpbayes.noise_aware.scores import Bernoulli, scores, slopes, variances

DELTA, EPSILONS, PRIOR_STDS = 1e-5, (1.0, 3.0, 8.0), (3.0, 10.0)
DATA = ("breast cancer", "Abalone", "Adult (7)", "Adult (108)")
DRAWS = 1000
FEW_COLUMNS = 50  # beyond which neither the second oracle nor the longest runs are made


# -- data ------------------------------------------------------------------------------------------


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
    x = free.bounded(numbers.clamp(0, 1), math.sqrt(len(free.NUMBERS) / 3 + 2))
    size = free.ADULT_TRAINING
    return free.Data(x[:size], data.y, x[size:], data.y_test)


def breast_cancer(repeat: int) -> free.Data:
    """The ranges are those of scikit-learn's description, which are those of the records."""
    from sklearn.datasets import load_breast_cancer

    found = load_breast_cancer()
    numbers = torch.tensor(found.data[:, :10]).float()
    low, high = numbers.min(0).values, numbers.max(0).values
    x = free.bounded(2 * (numbers - low) / (high - low) - 1, math.sqrt(10 / 3 + 1))
    y = torch.tensor(found.target).float()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(repeat))
    train, test = order[: 4 * len(x) // 5], order[4 * len(x) // 5 :]
    return free.Data(x[train], y[train], x[test], y[test])


class Reference:
    """The posterior without privacy."""

    def __init__(self, data: free.Data, prior_std: float) -> None:
        x, y = data.x.double(), data.y.double()
        mode = free.minimiser(data, prior_std**-2)
        p = (x @ mode).sigmoid()
        precision = (x.T * (p * (1 - p))) @ x + prior_std**-2 * torch.eye(len(mode)).double()
        self.mean, self.stddev = mode, torch.linalg.inv(precision).diagonal().sqrt()
        self.draws = torch.distributions.MultivariateNormal(mode, precision_matrix=precision)
        self.values = self.draws.sample((DRAWS,))
        if len(mode) > 50:
            return

        def log_density(theta: Tensor) -> Tensor:
            parts = []
            for some in theta.split(100):
                u = x @ some.T
                of_records = (y[:, None] * u - nn.functional.softplus(u)).sum(0)
                parts.append(of_records - some.square().sum(1) / (2 * prior_std**2))
            return torch.cat(parts)

        found = WeightedDraws(log_density, mode, precision)
        self.mean, self.stddev = found.weights @ found.values, found.variances.sqrt()
        self.values = found.resampled(DRAWS)


@lru_cache(maxsize=4)
def reference(name: str, repeat: int, root: str, prior_std: float) -> Reference:
    return Reference(load(name, repeat, root), prior_std)


# -- methods: draws [m, d], or one row, by the name of what states it and its settings -------------


Found = dict[str, Tensor]
SETTINGS = ", with "  # between a name and its settings


def accountant(epsilon: float) -> dpb.PrivacyAccountant:
    return dpb.PrivacyAccountant(epsilon, DELTA, neighboring=free.RELATION)


def glm(prior_std: float) -> ops.GLM:
    return ops.GLM("bernoulli", prior_std=prior_std, max_feature_norm=1.0)


def non_private(data: free.Data, epsilon: float, prior_std: float, known: Reference) -> Found:
    return {"non-private": known.values}


def laplace(data: free.Data, epsilon: float, prior_std: float, known: Reference) -> Found:
    post = noise_aware.laplace(glm(prior_std), data.x, data.y, accountant=accountant(epsilon))
    return {"noise_aware.laplace": post.sample(DRAWS)["weights"]}


def pyro_model(prior_std: float, x: Tensor, y: Tensor | None = None) -> None:
    prior = dist.Normal(torch.zeros(x.shape[1], dtype=x.dtype), prior_std).to_event(1)
    w = pyro.sample("weights", prior)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def laplace_of_pyro(data: free.Data, epsilon: float, prior_std: float, known: Reference) -> Found:
    """The same likelihood, of which the library does not know that it is one of a linear model."""
    post = noise_aware.laplace(
        partial(pyro_model, prior_std),
        data.x.double(),
        data.y.double(),
        max_grad_norm=2 * free.CLIP,  # the longest gradient of a row of length 1
        accountant=accountant(epsilon),
    )
    return {"noise_aware.laplace, Pyro": post.sample(DRAWS)["weights"]}


def oracle(data: free.Data, epsilon: float, prior_std: float, known: Reference) -> Found:
    """The normal form with the records' own curvature: what a posterior can know at this ε."""
    x, y, mode = data.x.double(), data.y.double(), known.mean
    u, bounds, eye = x @ mode, free.CLIP / x.norm(dim=1), torch.eye(data.dimension).double()
    slope = (x.T * slopes(Bernoulli(), u, bounds)) @ x
    own = (x.T * variances(Bernoulli(), u, bounds)) @ x
    std = free.CLIP * total_multiplier(accountant(epsilon), None, None)
    gradient = scores(Bernoulli(), u, y, bounds) @ x + std * torch.randn_like(mode)
    weighted = torch.linalg.solve(own + std**2 * eye, slope)
    precision = eye / prior_std**2 + slope @ weighted
    precision = (precision + precision.T) / 2
    mean = torch.linalg.solve(precision, weighted.T @ (slope @ mode - gradient))
    law = torch.distributions.MultivariateNormal(mean, precision_matrix=precision)
    return {"oracle": law.sample((DRAWS,))}


def feature_oracle(data: free.Data, epsilon: float, prior_std: float, known: Reference) -> Found:
    """What a posterior can know of one gradient at this ε if features are public."""
    x, y, mode = data.x.double(), data.y.double(), known.mean
    if data.dimension > FEW_COLUMNS:
        return {"oracle, features": torch.empty(0, data.dimension)}
    u, bounds, eye = x @ mode, free.CLIP / x.norm(dim=1), torch.eye(data.dimension).double()
    std = free.CLIP * total_multiplier(accountant(epsilon), None, None)
    gradient = scores(Bernoulli(), u, y, bounds) @ x + std * torch.randn_like(mode)
    of_zeros = scores(Bernoulli(), u, torch.zeros_like(u), bounds)
    apart = scores(Bernoulli(), u, torch.ones_like(u), bounds) - of_zeros

    def covariance(p: Tensor) -> Tensor:
        return torch.einsum("ni,...n,nj->...ij", x, p * (1 - p) * apart.square(), x) + std**2 * eye

    def log_density(theta: Tensor) -> Tensor:
        parts = []
        for some in theta.split(100):
            p = (some @ x.T).sigmoid()
            factor = torch.linalg.cholesky(covariance(p))
            residual = gradient - of_zeros @ x - (p * apart) @ x
            whitened = torch.linalg.solve_triangular(factor, residual[..., None], upper=False)
            log_scale = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
            squares = whitened.square().sum((-2, -1)) + some.square().sum(-1) / prior_std**2
            parts.append(-squares / 2 - log_scale)
        return torch.cat(parts)

    centre = maximiser(log_density, mode)
    p = (x @ centre).sigmoid()
    slope = (x.T * (p * (1 - p) * apart)) @ x
    precision = slope @ torch.linalg.solve(covariance(p), slope) + eye / prior_std**2
    found = WeightedDraws(log_density, centre, (precision + precision.T) / 2)
    return {"oracle, features": found.resampled(DRAWS)}


def maximiser(log_density: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """By L-BFGS."""
    theta = start.clone().requires_grad_(True)
    optimizer = torch.optim.LBFGS([theta], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = -log_density(theta[None])[0]
        value.backward()
        return value

    optimizer.step(loss)
    return theta.detach()


def sgd(data: free.Data, epsilon: float, prior_std: float, known: Reference) -> Found:
    found: Found = {}
    lr = free.LR
    for clip in (0.5, 1.0):
        for count in (free.steps(data, epsilon, clip, lr, 10.0, 300, 1e7), 3000):
            last, average = descent(data, epsilon, prior_std, clip, count, lr)
            of = f"{SETTINGS}clip norm {clip:g}, {count} steps"
            found |= {f"DP-SGD{of}": last[None], f"DP-SGD, average{of}": average[None]}
    return found


def descent(
    data: free.Data, epsilon: float, prior_std: float, clip: float, count: int, lr: float
) -> tuple[Tensor, Tensor]:
    """The last iterate, and the average of the second half. Clipped gradients of this model are a
    product of matrices.
    """
    z = free.noise(epsilon, DELTA, 1.0, count)
    accountant(epsilon).compose(GaussianDpEvent(z), count)
    bounds = clip / torch.linalg.vector_norm(data.x, dim=1)
    w, total = torch.zeros(data.dimension), torch.zeros(data.dimension)
    for step in range(count):
        residual = (data.x @ w).sigmoid() - data.y
        gradient = torch.minimum(torch.maximum(residual, -bounds), bounds) @ data.x
        gradient += z * clip * torch.randn(data.dimension) + w / prior_std**2
        w = w - lr / data.size * gradient
        if step >= count // 2:
            total += w
    return w, total / (count - count // 2)


def objective(data: free.Data, epsilon: float, prior_std: float, known: Reference) -> Found:
    strength = max(prior_std**-2, free.CURVATURE / math.expm1(0.2 * epsilon))
    found: Found = {}
    for clip in (0.5, 1.0):
        sigma = clip * free.objective_noise(epsilon, DELTA, strength)
        noise = sigma * torch.randn(data.dimension, dtype=torch.float64)
        estimate = free.minimiser(data, strength, noise, clip)
        found[f"objective perturbation{SETTINGS}clip norm {clip:g}"] = estimate[None]
    return found


def posterior_sample(data: free.Data, epsilon: float, prior_std: float, known: Reference) -> Found:
    found: Found = {}
    for clip in (0.5, 1.0):
        count = free.steps(data, epsilon, clip, 1 / free.CURVATURE, 10.0, 20_000, 1e8)
        release = ops.OnePosteriorSample(
            glm(prior_std),
            ops.FiniteRunLangevin(steps=count, max_grad_norm=clip),
            epsilon=epsilon,
            delta=DELTA,
            num_data=data.size,
        )
        draw = release.sample(data.x, data.y)["weights"]
        found[f"OnePosteriorSample{SETTINGS}clip norm {clip:g}"] = draw[None]
    return found


def sghmc(data: free.Data, epsilon: float, prior_std: float, known: Reference) -> Found:
    """As hot as ε demands; the second half of the iterates, as they are and cooled."""
    lr = 0.05 * free.LR
    count = free.steps(data, epsilon, 0.5, lr / 0.1, 10.0, 300, 1e8)
    found = chain(data, epsilon, prior_std, 0.5, count, lr, 0.9)
    if data.dimension <= FEW_COLUMNS:
        found |= chain(data, epsilon, prior_std, 1.0, 3000, free.LR, 0.9)
    return found


def chain(
    data: free.Data,
    epsilon: float,
    prior_std: float,
    clip: float,
    count: int,
    lr: float,
    momentum: float,
) -> Found:
    model, held = free.linear(data.dimension), accountant(epsilon)
    model, optimizer, loader = dpb.PrivacyEngine(held).make_private(
        module=model,
        optimizer=partial(
            dpb.optim.DPSGHMC, lr=lr, momentum=momentum, temperature=1.0, prior_std=prior_std
        ),
        data_loader=DataLoader(TensorDataset(data.x, data.y), batch_size=data.size),
        max_grad_norm=clip,
        noise_multiplier=free.noise(epsilon, DELTA, 1.0, count),
    )
    samples = dpb.PosteriorSamples(burn_in=count // 2, max_samples=count + 1)
    for _ in range(count):
        for x, y in loader:
            optimizer.zero_grad()
            free.loss(model(x), y).backward()
            optimizer.step()
        samples.collect(model)
    (name,) = samples.shapes()
    iterates = torch.from_numpy(samples.draws_of(name)).double().reshape(len(samples), -1)
    of = f"{SETTINGS}clip norm {clip:g}, {count} steps"
    found = {
        f"DPSGHMC, iterates{of}": iterates,
        f"DPSGHMC, average{of}": iterates.mean(0, keepdim=True),
    }
    try:
        post = noise_aware.from_run(samples, optimizer, steps_per_sample=1)
        found[f"DPSGHMC, from_run{of}"] = post.sample(DRAWS)[name].reshape(DRAWS, -1)
    except ValueError:  # the run does not say enough
        found[f"DPSGHMC, from_run{of}"] = torch.empty(0, data.dimension)
    return found


def variational(data: free.Data, epsilon: float, prior_std: float, known: Reference) -> Found:
    found = guided(data, epsilon, prior_std, 0.5, 200, 1.0, 0.1)
    if data.dimension <= FEW_COLUMNS:
        found |= guided(data, epsilon, prior_std, 1.0, 2000, 0.1, 0.1)
    return found


def guided(
    data: free.Data,
    epsilon: float,
    prior_std: float,
    clip: float,
    count: int,
    rate: float,
    lr: float,
) -> Found:
    model = partial(pyro_model, prior_std)
    pyro.clear_param_store()
    svi = dpb.infer.DPSVI(
        model,
        guide := AutoDiagonalNormal(model),
        pyro.optim.Adam({"lr": lr}),
        pyro.infer.Trace_ELBO(),
        max_grad_norm=clip,
        noise_multiplier=free.noise(epsilon, DELTA, rate, count),
        expected_batch_size=rate * data.size,
        accountant=accountant(epsilon),
    )
    svi.run(count, data.x, data.y)
    of = f"{SETTINGS}clip norm {clip:g}, {count} steps"
    found = {f"DPSVI, guide{of}": guide.get_posterior().sample((DRAWS,)).detach()}
    try:
        found[f"DPSVI, posterior(){of}"] = svi.posterior().sample(DRAWS)["weights"]
    except ValueError:
        found[f"DPSVI, posterior(){of}"] = torch.empty(0, data.dimension)
    return found


METHODS: dict[str, Callable[[free.Data, float, float, Reference], Found]] = {
    "non-private": non_private,
    "oracle": oracle,
    "features": feature_oracle,
    "laplace": laplace,
    "pyro": laplace_of_pyro,
    "sgd": sgd,
    "objective": objective,
    "ops": posterior_sample,
    "sghmc": sghmc,
    "variational": variational,
}


# -- runs ------------------------------------------------------------------------------------------


def run(
    root: str, data: str, method: str, epsilon: float, prior_std: float, repeat: int
) -> dict[str, Any]:
    """Figures of everything that a method states."""
    division = 0 if data.startswith("Adult") else repeat
    records, known = load(data, division, root), reference(data, division, root, prior_std)
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = METHODS[method](records, epsilon, prior_std, known)
    seconds = time.process_time() - start
    figures = {name: judged(values.double(), records, known) for name, values in found.items()}
    return {"seconds": seconds, "figures": figures}


def judged(values: Tensor, data: free.Data, known: Reference) -> dict[str, float]:
    """Error, width, coverage and test log likelihood of draws, or of one point."""
    if not len(values):
        return {}
    error = ((values.mean(0) - known.mean) / known.stddev).square().mean().sqrt()
    p = (data.x_test.double() @ values.T).sigmoid().mean(1)
    told = torch.where(data.y_test > 0, p, 1 - p).clamp_min(1e-12).log().mean()
    result = {"error": float(error), "log_likelihood": float(told)}
    if len(values) > 1:
        level = torch.tensor([0.05, 0.95], dtype=torch.float64)
        low, high = torch.quantile(values, level, dim=0)
        inside = (low < known.mean) & (known.mean < high)
        result["covers"] = float(inside.double().mean())
        result["width"] = float((values.std(0) / known.stddev).mean())
    return result


def jobs(
    names: Sequence[str], repeats: int, methods: Sequence[str] = tuple(METHODS)
) -> list[dict[str, Any]]:
    """One repeat of everything after the other."""
    return [
        {
            "data": name,
            "method": method,
            "epsilon": epsilon,
            "prior_std": prior_std,
            "repeat": repeat,
        }
        for repeat in range(repeats)
        for name in names
        for prior_std in PRIOR_STDS
        for epsilon in EPSILONS
        for method in methods
        if method != "non-private" or epsilon == EPSILONS[0]
    ]


def summary(runs: Sequence[reproduction.Run]) -> list[dict[str, Any]]:
    """A row for each data set, prior, ε and stated posterior, with its best settings: means over
    repeats.
    """
    found: dict[tuple[Any, ...], list[dict[str, float]]] = {}
    for done in runs:
        job = done.job
        for name, figures in done.result["figures"].items():
            key = (job["data"], job["prior_std"], job["epsilon"], name)
            found.setdefault(key, []).append({**figures, "seconds": done.result["seconds"]})
    rows = []
    for (data, prior_std, epsilon, name), results in found.items():
        row: dict[str, Any] = {
            "data": data,
            "prior_std": prior_std,
            "epsilon": epsilon,
            "method": name,
            "repeats": len(results),
            "refused": sum("error" not in r for r in results),
        }
        for figure in ("error", "width", "covers", "log_likelihood", "seconds"):
            values = torch.tensor([r[figure] for r in results if figure in r])
            if len(values):
                row[figure] = float(values.mean())
            if len(values) > 1 and figure == "error":
                row["error_se"] = float(values.std() / math.sqrt(len(values)))
        rows.append(row)
    best: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        row["method"], _, row["settings"] = row["method"].partition(SETTINGS)
        cell = tuple(row[n] for n in ("data", "prior_std", "epsilon", "method"))
        if cell not in best or rank(row) < rank(best[cell]):
            best[cell] = row
    return list(best.values())


def rank(row: dict[str, Any]) -> tuple[float, float]:
    """Settings that are refused less often come first, then those whose mean is nearest."""
    return row["refused"], row.get("error", math.inf)


def table(rows: Sequence[dict[str, Any]], data: str, prior_std: float) -> str:
    """Markdown: a row for each method; for each ε error, width, coverage and log likelihood."""
    chosen = [r for r in rows if (r["data"], r["prior_std"]) == (data, prior_std)]
    lines = []
    for name in dict.fromkeys(r["method"] for r in chosen):
        line: dict[str, Any] = {"method": name}
        for row in chosen:
            if row["method"] == name:
                told = [
                    format(row[f], form) if f in row else "–"
                    for f, form in (
                        ("error", ".2f"),
                        ("width", ".2f"),
                        ("covers", ".2f"),
                        ("log_likelihood", ".3f"),
                    )
                ]
                line[f"ε = {row['epsilon']:g}"] = " / ".join(told)
                line["repeats"] = str(row["repeats"])
        lines.append(line)
    columns = dict.fromkeys(["method", *(f"ε = {e:g}" for e in EPSILONS), "repeats"], "")
    return reproduction.markdown(lines, columns)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-root", required=True, help="folder with abalone/ and adult/")
    parser.add_argument("--repeats", type=reproduction.positive, default=10)
    parser.add_argument("--data", nargs="*", choices=DATA, default=DATA)
    parser.add_argument("--methods", nargs="*", choices=list(METHODS), default=list(METHODS))
    parser.add_argument(
        "--stored", action="store_true", help="tables of the finished runs, without making others"
    )
    folder = reproduction.ROOT / "runs" / "posteriors"
    parser.add_argument("--folder", type=Path, default=folder, help="default: %(default)s")
    options = parser.parse_args(arguments)
    logging.getLogger("torch_dpbayes").setLevel(logging.ERROR)
    results, wanted = (
        options.folder / "runs.jsonl",
        jobs(options.data, options.repeats, options.methods),
    )
    runs = reproduction.runs_of(
        partial(run, options.data_root), wanted, results, stored=options.stored
    )
    rows = summary(runs)
    reproduction.write_csv(rows, options.folder / "rows.csv")
    for data in options.data:
        for prior_std in PRIOR_STDS if any(row["data"] == data for row in rows) else ():
            print(f"\n{data}, prior sd {prior_std:g}\n\n{table(rows, data, prior_std)}")
    print(f"\n{reproduction.origin(runs, ['--data-root', 'FOLDER'])}")


if __name__ == "__main__":
    main()
