#!/usr/bin/env python3
"""Noise-aware posteriors in the setting of NA-DPVI, beside the authors' own program.

    python na_dpvi.py linear [--repeats 40] [--theirs CHECKOUT --python PYTHON] [--stored]
    python na_dpvi.py adult --data-root FOLDER [--repeats 3] [--stored]
        [--theirs CHECKOUT --python PYTHON [--steps 1000]]

NA-DPVI (Alrawajfeh, Jälkö and Honkela 2025, arXiv 2410.19371) runs DP-SGD on the parameters of a
diagonal Gaussian guide for 10,000 steps and explains its transcript by a quadratic objective.

"linear" is their regression: 5000 records, ten N(0, 1) features and a column of ones, σ² ~
InverseGamma(20, ½), w | σ ~ N(0, 4σ²), ε = .1, .3 and 1 for adding or removing a record, δ = 1e-5.
Parameters come from the prior, so that central intervals of a right posterior hold them as often as
they say; both programs get the same records. "width" is that of the weights over σ/√n, about the
posterior's without privacy, and "warned" the share of runs with a warning. CHECKOUT is
https://github.com/DPBayes/noise-aware-dpvi, PYTHON an interpreter with their requirements (jax
0.4.25, numpyro, optax; for Adult also pandas, scikit-learn and tueplots). Their clip bound, rates
and Laplace approximation are those of their file, and the noise is this library's for their 10,000
batches of rate .1. Ours is ``noise_aware.posterior`` of the model as one writes it in Pyro, with
rows no longer than 6 and the column of ones stated as constant.

"adult" is their logistic regression: 57 columns, N(0, 1) priors, ε = .1, .3 and 1. Numbers have
mean 0 and variance 1 over the training records, which counts as public, as it does there. Rows are
at most 6 long here, which shortens 2 % of them. Theirs is main() of their file for Adult with the
Laplace approximation, given our records and noise. Its 10,000 steps would take two hours; --steps
asks for fewer, each with less noise and, by their formula, a larger rate. "error" and "covers" are
against the posterior without privacy, "calibration" is the largest difference between the mean
predicted probability and the share of ones, in ten parts of the test records by that probability.
"""

from __future__ import annotations

import logging
import math
import subprocess
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyro
import pyro.distributions as dist
import reproduce_privacy_for_free as free
import reproduction
import torch
from pyro.distributions.transforms import PowerTransform
from torch import Tensor, nn

import torch_dpbayes as dpb
from torch_dpbayes import noise_aware, ops

DELTA, EPSILONS, RELATION = 1e-5, (0.1, 0.3, 1.0), "add_or_remove_one"
SIZE, DIMENSION, STEPS, RATE, DRAWS = 5000, 11, 10_000, 0.1, 1000
FEATURE_BOUND = 6.0
NUMBERS, LEVELS = (0, 2, 10, 11, 12), (1, 3, 5, 6, 8, 9)

# In an interpreter of its own. Opacus is only asked for the noise, which is given here.
BEGINNING = """
import pathlib, pickle, sys, time, types
checkout, source, target = sys.argv[1:]
sys.path.insert(0, checkout)
for name in ("opacus", "opacus.accountants", "opacus.accountants.utils"):
    sys.modules[name] = types.ModuleType(name)
sys.modules[name].get_noise_multiplier = None
import jax.numpy as jnp, numpy as np
from utils import DynamicAttributes
given = np.load(source)
"""
END = """
seconds = time.process_time() - start
np.savez(target, mean=found.theta_means, std=found.theta_stds, seconds=seconds)
"""
REGRESSION = """
import coverage_experiment as theirs
args = theirs.set_default_args_linear_regression10d(DynamicAttributes())
args.use_mcmc_sampling = False
args.custom_noise_scale, args.target_epsilon = float(given["noise"]), 0.0
args.data_size = args.training_data_size = len(given["x"])
args.theta_true = jnp.asarray(given["theta"], jnp.float32)
args.random_seed, args.data_random_seed = int(given["seed"]), 0
x, y = (jnp.asarray(given[name], jnp.float32) for name in "xy")
args.data_generator_function = lambda theta, prng_key, N: (x, y)
start = time.process_time()
found, _ = theirs.perform_coverage_test(args)
"""
# main() reads the records that an earlier call has stored, and stores what it finds.
ADULT = """
import adult_uci_experiments as theirs
defaults, stored = theirs.set_default_args, []
def settings(args):
    args = defaults(args)
    args.custom_noise_scale, args.training_iterations = float(given["noise"]), int(given["steps"])
    return args
theirs.set_default_args = settings
theirs.joblib = types.SimpleNamespace(dump=lambda found, path: stored.append(found))
folder = pathlib.Path(target).parent
records = [given[name] for name in ("x", "y", "x_test", "y_test")]
(folder / "preprocessed_data.pickle").write_bytes(pickle.dumps((None, None, None, None, *records)))
sys.argv[1:] = ["--method", "laplace", "--task_id", str(given["seed"])]
sys.argv += ["--output_directory", str(folder), "--debug_output_directory", str(folder)]
start = time.process_time()
theirs.main()
found = stored[-1]
"""


def accountant(epsilon: float) -> dpb.PrivacyAccountant:
    return dpb.PrivacyAccountant(epsilon, DELTA, neighboring=RELATION)


class Normal(NamedTuple):
    """Independent normals, and the processor time that they took."""

    mean: Tensor
    std: Tensor
    seconds: float


def theirs(
    program: str,
    records: Mapping[str, Tensor],
    epsilon: float,
    seed: int,
    steps: int,
    checkout: str | None,
    python: str,
) -> Normal:
    if checkout is None:
        raise ValueError("runs of NA-DPVI need --theirs CHECKOUT, a clone of its repository.")
    noise = dpb.get_noise_multiplier(
        target_epsilon=epsilon,
        target_delta=DELTA,
        sample_rate=RATE,
        steps=steps,
        neighboring=RELATION,
    )
    with tempfile.TemporaryDirectory() as folder:
        source, target = (str(Path(folder) / name) for name in ("given.npz", "found.npz"))
        given: dict[str, Any] = {name: values.numpy() for name, values in records.items()}
        np.savez(source, noise=noise, seed=seed, steps=steps, **given)
        subprocess.run(
            [python, "-c", BEGINNING + program + END, checkout, source, target],
            check=True,
            capture_output=True,
        )
        found = np.load(target)
        mean, std = (torch.as_tensor(found[name]).double() for name in ("mean", "std"))
        return Normal(mean, std, float(found["seconds"]))


# -- linear regression -----------------------------------------------------------------------------


def prior_of(dimension: int) -> tuple[Tensor, Tensor]:
    shape, scale, half = (torch.tensor(v, dtype=torch.float64) for v in (20.0, 0.5, 0.5))
    zeros = torch.zeros(dimension, dtype=torch.float64)
    spread = dist.TransformedDistribution(dist.InverseGamma(shape, scale), [PowerTransform(half)])
    sigma = pyro.sample("noise_std", spread)
    return pyro.sample("weights", dist.Normal(zeros, 2 * sigma).to_event(1)), sigma


def regression(x: Tensor, y: Tensor) -> None:
    weights, sigma = prior_of(DIMENSION)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ weights, sigma), obs=y)


class Problem(NamedTuple):
    """Records and the parameters behind them."""

    x: Tensor
    y: Tensor
    weights: Tensor
    sigma: Tensor


def problem(repeat: int) -> Problem:
    generator = torch.Generator().manual_seed(repeat)
    gamma = np.random.default_rng(repeat).gamma(20.0)
    sigma = torch.tensor(math.sqrt(0.5 / gamma), dtype=torch.float64)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    weights = 2 * sigma * normal(DIMENSION)
    x = torch.cat([normal(SIZE, DIMENSION - 1), torch.ones(SIZE, 1, dtype=torch.float64)], 1)
    return Problem(x, x @ weights + sigma * normal(SIZE), weights, sigma)


def ours(given: Problem, epsilon: float) -> dict[str, Any]:
    start = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        post = noise_aware.posterior(
            regression,
            given.x,
            given.y,
            accountant=accountant(epsilon),
            num_data=SIZE,
            max_feature_norm=FEATURE_BOUND,
            constant_columns=[DIMENSION - 1],
        )
    draws = post.sample(DRAWS)
    seconds = time.process_time() - start
    ranks = torch.cat(
        [
            (draws["weights"] < given.weights).double().mean(0),
            (draws["noise_std"] < given.sigma).double().mean()[None],
        ]
    )
    warned = {"warned": float(bool(caught))}
    return judged(ranks, draws["weights"].std(0), given.sigma, seconds) | warned


def their_regression(
    given: Problem, epsilon: float, seed: int, checkout: str | None, python: str
) -> dict[str, Any]:
    """Their posterior is normal in w and in log(exp(σ²) − 1)."""
    truth = torch.cat([given.weights, given.sigma.square()[None]])
    records = {"x": given.x, "y": given.y, "theta": truth}
    found = theirs(REGRESSION, records, epsilon, seed, STEPS, checkout, python)
    truth = torch.cat([given.weights, given.sigma.square().expm1().log()[None]])
    ranks = torch.special.ndtr((truth - found.mean) / found.std)
    return judged(ranks, found.std[:-1], given.sigma, found.seconds)


def judged(ranks: Tensor, stds: Tensor, sigma: Tensor, seconds: float) -> dict[str, Any]:
    """Shares of parameters inside central intervals, widths, and processor time."""
    apart = (ranks - 0.5).abs()
    return {
        "covers_50": float((apart < 0.25).double().mean()),
        "covers_90": float((apart < 0.45).double().mean()),
        "sigma_inside_90": float(apart[-1] < 0.45),
        "width": float(stds.mean() / sigma * math.sqrt(SIZE)),
        "seconds": seconds,
    }


def run_linear(
    checkout: str | None, python: str, method: str, epsilon: float, repeat: int
) -> dict[str, Any]:
    given = problem(repeat)
    if method == "NA-DPVI":
        return their_regression(given, epsilon, repeat, checkout, python)
    return ours(given, epsilon)


# -- Adult -----------------------------------------------------------------------------------------


@cache
def adult(root: str) -> free.Data:
    """Their columns: six of levels, five of numbers, and ones; records with a question mark are
    left out.
    """
    rows = free.table("Adult", root)
    parts = [
        [row for row in part if "?" not in row]
        for part in (rows[: free.ADULT_TRAINING], rows[free.ADULT_TRAINING :])
    ]
    levels = {column: sorted({row[column] for row in parts[0]}) for column in LEVELS}
    found: list[Tensor] = []
    for part in parts:
        numbers = torch.tensor([[float(row[c]) for c in NUMBERS] for row in part])
        numbers = (numbers - numbers.mean(0)) / numbers.std(0, unbiased=False)
        is_level = [
            [float(row[column] == level) for column in LEVELS for level in levels[column]]
            for row in part
        ]
        ones = torch.ones(len(part), 1)
        found.append(torch.cat([numbers, torch.tensor(is_level), ones], 1))
        found.append(torch.tensor([float(row[14].startswith(">50K")) for row in part]))
    return free.Data(*found)


class Reference(NamedTuple):
    """The posterior without privacy: a Gaussian at the mode."""

    mean: Tensor
    stddev: Tensor
    draws: Tensor


@cache
def reference(root: str) -> Reference:
    data = adult(root)
    mode = free.minimiser(data, 1.0, clip=math.inf)
    x = data.x.double()
    p = (x @ mode).sigmoid()
    precision = (x.T * (p * (1 - p))) @ x + torch.eye(len(mode), dtype=torch.float64)
    law = torch.distributions.MultivariateNormal(mode, precision_matrix=precision)
    return Reference(mode, law.stddev, law.sample((DRAWS,)))


def run_adult(
    root: str,
    checkout: str | None,
    python: str,
    method: str,
    epsilon: float,
    repeat: int,
    steps: int,
) -> dict[str, Any]:
    data, known = adult(root), reference(root)
    if method == "NA-DPVI":
        records = {"x": data.x, "y": data.y, "x_test": data.x_test, "y_test": data.y_test}
        found = theirs(ADULT, records, epsilon, repeat, steps, checkout, python)
        draws = torch.distributions.Normal(found.mean, found.std).sample((DRAWS,))
        return judged_adult(data, known, draws, found.seconds)
    start = time.process_time()
    if method == "non-private":
        draws = known.draws
    else:
        model = ops.GLM("bernoulli", prior_std=1.0, max_feature_norm=FEATURE_BOUND)
        post = noise_aware.posterior(
            model, data.x, data.y, accountant=accountant(epsilon), num_data=data.size
        )
        draws = post.sample(DRAWS)["weights"].double()
    return judged_adult(data, known, draws, time.process_time() - start)


def judged_adult(
    data: free.Data, known: Reference, draws: Tensor, seconds: float
) -> dict[str, Any]:
    inside = ((draws < known.mean).double().mean(0) - 0.5).abs() < 0.45
    p = (data.x_test.double() @ draws.T).sigmoid().mean(1)
    y = data.y_test.double()
    parts = [(p[some] - y[some]).mean().abs() for some in p.argsort().chunk(10)]
    return {
        "error": float(((draws.mean(0) - known.mean) / known.stddev).square().mean().sqrt()),
        "width": float((draws.std(0) / known.stddev).mean()),
        "covers_90": float(inside.double().mean()),
        "log_likelihood": -float(nn.functional.binary_cross_entropy(p, y)),
        "accuracy": float(((p > 0.5) == (y > 0.5)).double().mean()),
        "calibration": float(torch.stack(parts).max()),
        "seconds": seconds,
    }


# -- runs ------------------------------------------------------------------------------------------


def jobs(setting: str, repeats: int, methods: Sequence[str], steps: int) -> list[dict[str, Any]]:
    """One repeat of everything after the other."""
    return [
        {"setting": setting, "method": method, "epsilon": epsilon, "repeat": repeat}
        | ({"steps": steps} if (setting, method) == ("adult", "NA-DPVI") else {})
        for repeat in range(repeats)
        for epsilon in EPSILONS
        for method in methods
        if method != "non-private" or (epsilon, repeat) == (EPSILONS[-1], 0)
    ]


def summary(runs: Sequence[reproduction.Run]) -> list[dict[str, Any]]:
    """A row for each method, ε and number of steps: means over repeats, with standard errors of the
    coverage.
    """
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for done in runs:
        key = (
            *(done.job[name] for name in ("setting", "method", "epsilon")),
            done.job.get("steps", 0),
        )
        found.setdefault(key, []).append(done.result)
    rows = []
    for (setting, method, epsilon, steps), results in sorted(found.items()):
        row = {"setting": setting, "method": method, "epsilon": epsilon, "repeats": len(results)}
        if steps:
            row["steps"] = steps
        for name in results[0]:
            values = torch.tensor([result[name] for result in results], dtype=torch.float64)
            row[name] = float(values.mean())
            if name.startswith("covers") and len(values) > 1:
                row[f"{name}_error"] = float(values.std() / math.sqrt(len(values)))
        rows.append(row)
    return rows


def run(
    root: str | None,
    checkout: str | None,
    python: str,
    setting: str,
    method: str,
    epsilon: float,
    repeat: int,
    steps: int = STEPS,
) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        if setting == "linear":
            return run_linear(checkout, python, method, epsilon, repeat)
        if root is None:
            raise ValueError("Adult needs --data-root, the folder with adult/.")
        return run_adult(root, checkout, python, method, epsilon, repeat, steps)


METHODS: dict[str, tuple[str, ...]] = {
    "linear": ("noise_aware.posterior", "NA-DPVI"),
    "adult": ("non-private", "noise_aware.posterior", "NA-DPVI"),
}


def main(arguments: list[str] | None = None) -> None:
    parser = reproduction.parser_of(__doc__, "na_dpvi")
    parser.add_argument("setting", choices=list(METHODS))
    parser.add_argument("--repeats", type=reproduction.positive, default=40)
    parser.add_argument("--data-root", help="folder with adult/")
    parser.add_argument("--theirs", help="a clone of their repository")
    parser.add_argument("--python", default="python", help="an interpreter with what it requires")
    parser.add_argument(
        "--steps",
        type=reproduction.positive,
        default=STEPS,
        help="of their program on Adult; default: theirs, %(default)s",
    )
    options = parser.parse_args(arguments)
    logging.getLogger("torch_dpbayes").setLevel(logging.ERROR)
    methods = METHODS[options.setting]
    if options.theirs is None and not options.stored:
        methods = tuple(method for method in methods if method != "NA-DPVI")
    wanted = jobs(options.setting, options.repeats, methods, options.steps)
    function = partial(run, options.data_root, options.theirs, options.python)
    runs = reproduction.runs_of(function, wanted, options.results, stored=options.stored)
    rows = summary(runs)
    if options.csv:
        reproduction.write_csv(rows, options.csv)
    columns = {name: "" if name in ("setting", "method") else ".3g" for row in rows for name in row}
    print(f"\n{reproduction.markdown(rows, columns)}\n\n{reproduction.origin(runs)}")


if __name__ == "__main__":
    main()
