"""Noise-aware posteriors in the setting of NA-DPVI, beside the authors' own program.

    python na_dpvi.py [--repeats 40] [--theirs CHECKOUT --python PYTHON]

NA-DPVI (Alrawajfeh, Jälkö and Honkela 2025, arXiv 2410.19371) runs DP-SGD on the parameters of a
diagonal Gaussian guide for 10,000 steps and explains its transcript by a quadratic objective.

The model is their regression: 5000 records, ten N(0, 1) features and a column of ones, σ² ~
InverseGamma(20, ½), w | σ ~ N(0, 4σ²), ε = .1, .3 and 1 for adding or removing a record, δ = 1e-5.
Parameters come from the prior, so that central intervals of a right posterior hold them as often as
they say; both programs get the same records. "width" is that of the weights over σ/√n, about the
posterior's without privacy, and "warned" the share of runs with a warning. CHECKOUT is
https://github.com/DPBayes/noise-aware-dpvi, PYTHON an interpreter with their requirements (jax
0.4.25, numpyro, optax). Their clip bound, rates and Laplace approximation are those of their file,
and the noise is this library's for their 10,000 batches of rate .1. Ours is
``noise_aware.posterior`` of the model as one writes it in Pyro, with rows no longer than 6 and the
column of ones stated as constant.
"""

from __future__ import annotations

import logging
import math
import subprocess
import tempfile
import time
import warnings
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.distributions.transforms import PowerTransform
from reproduction import Row, finish, grouped, mean_and_error, parser_of
from torch import Tensor

import torch_dpbayes as dpb
from torch_dpbayes import noise_aware

DELTA, EPSILONS, RELATION = 1e-5, (0.1, 0.3, 1.0), "add_or_remove_one"
SIZE, DIMENSION, STEPS, RATE, DRAWS = 5000, 11, 10_000, 0.1, 1000
FEATURE_BOUND = 6.0

# In an interpreter of its own. Opacus is only asked for the noise, which is given here.
PROGRAM = """
import sys, time, types
checkout, source, target = sys.argv[1:]
sys.path.insert(0, checkout)
for name in ("opacus", "opacus.accountants", "opacus.accountants.utils"):
    sys.modules[name] = types.ModuleType(name)
sys.modules[name].get_noise_multiplier = None
import jax.numpy as jnp, numpy as np
from utils import DynamicAttributes
given = np.load(source)
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
seconds = time.process_time() - start
np.savez(target, mean=found.theta_means, std=found.theta_stds, seconds=seconds)
"""


def theirs(given: Problem, epsilon: float, seed: int, checkout: str, python: str) -> Row:
    """Their posterior is normal in w and in log(exp(σ²) − 1)."""
    truth = torch.cat([given.weights, given.sigma.square()[None]])
    noise = dpb.get_noise_multiplier(
        target_epsilon=epsilon,
        target_delta=DELTA,
        sample_rate=RATE,
        steps=STEPS,
        neighboring=RELATION,
    )
    with tempfile.TemporaryDirectory() as folder:
        source, target = (str(Path(folder) / name) for name in ("given.npz", "found.npz"))
        records = {"x": given.x.numpy(), "y": given.y.numpy(), "theta": truth.numpy()}
        np.savez(source, noise=noise, seed=seed, **records)
        command = [python, "-c", PROGRAM, checkout, source, target]
        subprocess.run(command, check=True, capture_output=True)
        found = np.load(target)
        mean, std = (torch.as_tensor(found[name]).double() for name in ("mean", "std"))
        seconds = float(found["seconds"])
    truth[-1] = truth[-1].expm1().log()
    return judged(torch.special.ndtr((truth - mean) / std), std[:-1], given.sigma, seconds)


def regression(x: Tensor, y: Tensor) -> None:
    shape, scale, half = (torch.tensor(v, dtype=torch.float64) for v in (20.0, 0.5, 0.5))
    zeros = torch.zeros(DIMENSION, dtype=torch.float64)
    spread = dist.TransformedDistribution(dist.InverseGamma(shape, scale), [PowerTransform(half)])
    sigma = pyro.sample("noise_std", spread)
    weights = pyro.sample("weights", dist.Normal(zeros, 2 * sigma).to_event(1))
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


def ours(given: Problem, epsilon: float) -> Row:
    start = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        post = noise_aware.posterior(
            regression,
            given.x,
            given.y,
            accountant=dpb.PrivacyAccountant(epsilon, DELTA, neighboring=RELATION),
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


def judged(ranks: Tensor, stds: Tensor, sigma: Tensor, seconds: float) -> Row:
    """Shares of parameters inside central intervals, widths, and processor time."""
    apart = (ranks - 0.5).abs()
    return {
        "covers_50": float((apart < 0.25).double().mean()),
        "covers_90": float((apart < 0.45).double().mean()),
        "width": float(stds.mean() / sigma * math.sqrt(SIZE)),
        "seconds": seconds,
    }


def run(checkout: str, python: str, method: str, epsilon: float, repeat: int) -> Row:
    given = problem(repeat)
    if method == "NA-DPVI":
        return theirs(given, epsilon, repeat, checkout, python)
    return ours(given, epsilon)


def summary(rows: Sequence[Row]) -> list[Row]:
    """Means over repeats, with the standard errors of shares."""
    lines = []
    for (method, epsilon), some in grouped(rows, "method", "epsilon").items():
        line: Row = {"method": method, "epsilon": epsilon, "repeats": len(some)}
        for name in ("covers_50", "covers_90"):
            line[name], line[f"{name}_error"] = mean_and_error([row[name] for row in some])
        for name in ("width", "seconds", "warned"):
            line[name] = mean_and_error([row.get(name, 0.0) for row in some])[0]
        lines.append(line)
    return lines


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "na_dpvi")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--theirs", default="", help="a clone of their repository")
    parser.add_argument("--python", default="python", help="an interpreter with what it requires")
    options = parser.parse_args(arguments)
    logging.getLogger("torch_dpbayes").setLevel(logging.ERROR)
    epsilons = EPSILONS[:1] if options.quick else EPSILONS
    methods = ["noise_aware.posterior", *(["NA-DPVI"] if options.theirs else [])]
    wanted = [
        {"method": method, "epsilon": epsilon, "repeat": repeat}
        for repeat, epsilon, method in product(range(options.repeats), epsilons, methods)
    ]
    make = partial(run, options.theirs, options.python)
    finish(options, make, wanted, tables=lambda rows: {"": summary(rows)})


if __name__ == "__main__":
    main()
