"""Twelve models of Pyro's examples and tests at N = 5,000: Pyro's NUTS without privacy, DP-HMC
without noise (ε = ∞), and ``noise_aware.posterior`` at ε = 8.

    python pyro_examples.py [--only "eight schools" …]

Records are simulated from fixed parameters, which NUTS starts from; the others do not know them.
DP-HMC without noise takes its start and its mass matrix from the draws of NUTS, as nothing is
private. The noise-aware posterior has its defaults and δ = 1e-6; records are added or removed, or
replaced where covariates are public. It cannot run on survival, whose likelihood, a factor, cannot
be simulated.

All figures are those of the worst coordinate in unconstrained space. "error" is the difference of
means to NUTS: for chains over its Monte Carlo standard error, for a noise-aware posterior over its
standard deviation, which includes the privacy noise. "warned" says whether the run gave a warning.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS
from pyro.infer.autoguide.initialization import init_to_value
from pyro.ops.stats import effective_sample_size
from reproduction import Panel, Row, Run, columns, finish, having, parser_of
from torch import Tensor

import torch_dpbayes as dpb
from torch_dpbayes.density import RecordDensity

DELTA, EPSILON = 1e-6, 8.0
NUTS_WARMUP, NUTS_DRAWS, HMC_DRAWS, STEPS = 150, 500, 400, 3
DRAWS = [NUTS_WARMUP, NUTS_DRAWS, HMC_DRAWS, STEPS]
METHODS = ("NUTS", "no noise", NOISE_AWARE := "noise-aware, epsilon 8")
RUNS = ("without privacy", NOISE_AWARE)  # the first has two methods
Values = dict[str, Tensor]


class Example(NamedTuple):
    """A model, and how its records are made.

    Attributes:
        model: of the records, in one plate.
        truth: by site.
        covariates: of that many records.
        options: of ``noise_aware.posterior``: which covariates are public, or how long they are.
    """

    model: Callable[..., None]
    truth: Row
    covariates: Callable[[int], Tensor] | None = None
    options: Mapping[str, Any] = MappingProxyType({})

    def records(self, count: int) -> tuple[Tensor, ...]:
        """Simulated from the model at the truth."""
        if self.model is survival:  # a factor cannot be simulated
            return times(count)
        truth = {name: torch.as_tensor(value) for name, value in self.truth.items()}
        covariates = () if self.covariates is None else (self.covariates(count),)
        simulated = pyro.condition(poutine.uncondition(self.model), data=truth)
        nodes = poutine.trace(simulated).get_trace(*covariates, torch.zeros(count)).nodes
        return (*covariates, nodes["obs"]["value"].to(torch.get_default_dtype()))


def eight_schools(sigma: Tensor, y: Tensor) -> None:
    """The schools' effects are integrated out. Their mean has units in which records pull at
    it about as hard as at log tau.
    """
    mu = 4.0 * pyro.sample("quarter of mu", dist.Normal(0.0, 2.5))
    tau = pyro.sample("tau", dist.HalfCauchy(25.0))
    with pyro.plate("data", len(y)):
        pyro.sample("obs", dist.Normal(mu, (tau**2 + sigma**2).sqrt()), obs=y)


def baseball_pooled(at_bats: Tensor, hits: Tensor) -> None:
    phi = pyro.sample("phi", dist.Uniform(0.0, 1.0))
    with pyro.plate("data", len(hits)):
        pyro.sample("obs", dist.Binomial(at_bats, phi), obs=hits)


def baseball_partially_pooled(at_bats: Tensor, hits: Tensor) -> None:
    """With the players' chances integrated out."""
    m = pyro.sample("m", dist.Uniform(0.0, 1.0))
    kappa = pyro.sample("kappa", dist.Pareto(1.0, 1.5))
    with pyro.plate("data", len(hits)):
        pyro.sample("obs", dist.BetaBinomial(m * kappa, (1 - m) * kappa, at_bats), obs=hits)


def logistic_regression(x: Tensor, y: Tensor) -> None:
    beta = pyro.sample("beta", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("obs", dist.Bernoulli(logits=x @ beta), obs=y)


def beta_bernoulli(y: Tensor) -> None:
    p = pyro.sample("p", dist.Beta(torch.full((2,), 1.1), 1.1).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("obs", dist.Bernoulli(p).to_event(1), obs=y)


def gamma_normal(y: Tensor) -> None:
    rate = torch.ones(2)
    p = pyro.sample("precision", dist.Gamma(torch.ones(2), rate).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("obs", dist.Normal(1.0, p.rsqrt()).to_event(1), obs=y)


def dirichlet_categorical(y: Tensor) -> None:
    p = pyro.sample("p", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("data", len(y)):
        pyro.sample("obs", dist.Categorical(p), obs=y)


def gaussian_mixture(y: Tensor) -> None:
    """Components are told apart by their priors."""
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(2)))
    means = pyro.sample("means", dist.Normal(torch.tensor([-2.0, 2.0]), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(weights))
        pyro.sample("obs", dist.Normal(means[z], 1.0), obs=y)


def hidden_coins(y: Tensor) -> None:
    p = pyro.sample("p", dist.Beta(1.1, 1.1))
    with pyro.plate("data", len(y)):
        first = pyro.sample("first", dist.Bernoulli(p))
        second = pyro.sample("second", dist.Bernoulli(0.65 * first + 0.1))
        pyro.sample("obs", dist.Normal(2.0 * second, 1.0), obs=y)


def lkj(y: Tensor) -> None:
    theta = pyro.sample("theta", dist.HalfCauchy(torch.ones(3)).to_event(1))
    omega = pyro.sample("omega", dist.LKJCholesky(3, 1.5))
    scale = theta.sqrt()[:, None] * omega
    with pyro.plate("data", len(y)):
        pyro.sample("obs", dist.MultivariateNormal(torch.zeros(3), scale_tril=scale), obs=y)


def ordinal(x: Tensor, y: Tensor) -> None:
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("cuts", 2):
        gaps = pyro.sample("gaps", dist.Gamma(2.0, 1.0))
    cuts = gaps.cumsum(-1) - 2.0
    with pyro.plate("data", len(y)):
        pyro.sample("obs", dist.OrderedLogistic(slope * x, cuts), obs=y)


def survival(x: Tensor, time: Tensor, died: Tensor) -> None:
    """Weibull times, some of them censored."""
    beta = pyro.sample("beta", dist.Normal(0.0, 1.0))
    shape = pyro.sample("shape", dist.LogNormal(0.0, 0.5))
    with pyro.plate("data", len(time)):
        hazard = (time * (beta * x).exp()) ** shape
        pyro.factor("died", died * (shape.log() + hazard.log() - time.log()) - hazard)


def times(count: int) -> tuple[Tensor, ...]:
    x = 2 * torch.rand(count) - 1
    time = torch.empty(count).exponential_() ** (1 / 1.3) * (-0.5 * x).exp()
    return x, time.clamp(max=2.0), (time < 2.0).float()


def examples() -> dict[str, Example]:
    """By name."""
    spread = {"precision": torch.tensor([0.8, 1.3]) ** -2}
    parts = {"weights": torch.tensor([0.4, 0.6]), "means": torch.tensor([-1.5, 2.5])}
    correlations = torch.tensor([[1.0, 0.4, 0.0], [0.4, 1.0, -0.3], [0.0, -0.3, 1.0]])
    shape = {"theta": torch.ones(3), "omega": torch.linalg.cholesky(correlations)}
    sigma, at_bats = {"public": ("sigma",)}, {"public": ("at_bats",)}
    rows = {"max_feature_norm": math.sqrt(3)}
    players = {"m": 0.27, "kappa": 6.0}

    def bats(count: int) -> Tensor:
        return torch.randint(5, 15, (count,)).float()

    def uniform(count: int) -> Tensor:
        return 2 * torch.rand(count) - 1

    return {
        "eight schools": Example(
            eight_schools, {"quarter of mu": 0.75, "tau": 2.0}, lambda n: 1 + torch.rand(n), sigma
        ),
        "baseball, pooled": Example(baseball_pooled, {"phi": 0.27}, bats, at_bats),
        "baseball, partially pooled": Example(baseball_partially_pooled, players, bats, at_bats),
        "logistic regression": Example(
            logistic_regression,
            {"beta": torch.tensor([1.0, 2.0, -1.0])},
            lambda n: 2 * torch.rand(n, 3) - 1,
            rows,
        ),
        "beta and Bernoulli": Example(beta_bernoulli, {"p": torch.tensor([0.3, 0.6])}),
        "gamma and normal": Example(gamma_normal, spread),
        "Dirichlet and categorical": Example(
            dirichlet_categorical, {"p": torch.tensor([0.2, 0.3, 0.5])}
        ),
        "Gaussian mixture": Example(gaussian_mixture, parts),
        "hidden coins": Example(hidden_coins, {"p": 0.6}),
        "LKJ": Example(lkj, shape),
        "ordinal": Example(ordinal, {"slope": 1.2, "gaps": torch.tensor([1.2, 1.5])}, uniform),
        "survival": Example(survival, {"beta": 0.5, "shape": 1.3}),
    }


# -- runs ------------------------------------------------------------------------------------------


def run(model: str, what: str, records: int, draws: list[int]) -> Row:
    """Figures of one or two methods. ``draws`` are this script's, so that other numbers are other
    runs.
    """
    example = examples()[model]
    with torch.random.fork_rng():
        torch.manual_seed(0)  # all methods get the same records
        data = example.records(records)
    if what == NOISE_AWARE:
        return {what: with_privacy(example, data)}
    truth = {name: torch.as_tensor(value) for name, value in example.truth.items()}
    kernel = NUTS(example.model, init_strategy=init_to_value(values=truth))
    nuts, found = figures(kernel, data, NUTS_DRAWS, NUTS_WARMUP)
    drawn = unconstrained(nuts)
    no_noise = dpb.mcmc.DPHMC(
        example.model,
        step_size=1.5 / STEPS,
        num_steps=STEPS,
        log_ratio_slope=1e6,
        max_grad_norm=1e6,
        ratio_noise_multiplier=0.0,
        grad_noise_multiplier=0.0,
        accountant=dpb.PrivacyAccountant(),
        mass_matrix=torch.linalg.inv(torch.atleast_2d(drawn.T.cov())).float(),
        target_accept_prob=None,
    )
    start = {name: moved[-1] for name, moved in by_site(nuts).items()}
    return {"NUTS": found, "no noise": figures(no_noise, data, HMC_DRAWS, start=start)[1]}


def with_privacy(example: Example, data: tuple[Tensor, ...]) -> Row:
    """The noise-aware posterior, in the form of a chain's figures."""
    relation: Any = "replace_one" if "public" in example.options else "add_or_remove_one"
    accountant = dpb.PrivacyAccountant(EPSILON, DELTA, neighboring=relation)
    start = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            post = dpb.noise_aware.posterior(
                example.model,
                *data,
                accountant=accountant,
                num_data=len(data[0]),
                **example.options,
            )
        except dpb.DPBayesError as error:
            return {"refused": str(error)}
    seconds, prior = time.process_time() - start, RecordDensity(example.model, data).prior
    draws = post.sample(4 * NUTS_DRAWS)
    rows = torch.stack(
        [
            prior.flatten({k: t(draws[k][m]) for k, t in prior.transforms.items()}).double()
            for m in range(4 * NUTS_DRAWS)
        ]
    )
    size = [min(post.effective_sample_size, len(rows))] * rows.shape[1]
    found = {"mean": rows.mean(0).tolist(), "sd": rows.std(0).tolist(), "size": size}
    return {**found, "warned": bool(caught), "seconds": seconds}


def figures(
    kernel: Any, data: tuple[Tensor, ...], draws: int, warmup: int = 0, start: Values | None = None
) -> tuple[MCMC, Row]:
    """Of one chain: moments, whether it was warned of, and seconds of the processor."""
    begin = time.process_time()
    runner = MCMC(
        kernel, num_samples=draws, warmup_steps=warmup, initial_params=start, disable_progbar=True
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runner.run(*data)
    seconds, draws = time.process_time() - begin, unconstrained(runner).double()
    sizes = effective_sample_size(draws[None], 0, 1).clamp(max=len(draws))
    found = {"mean": draws.mean(0).tolist(), "sd": draws.std(0).tolist(), "size": sizes.tolist()}
    warned = any("have not mixed" in str(w.message) for w in caught)
    return runner, {**found, "warned": warned, "seconds": seconds}


def by_site(runner: MCMC) -> Values:
    """Draws in unconstrained space."""
    return {
        name: runner.transforms[name](values) if name in runner.transforms else values
        for name, values in sorted(runner.get_samples().items())
    }


def unconstrained(runner: MCMC) -> Tensor:
    """The same as rows, the sites sorted by name."""
    return torch.cat([moved.reshape(len(moved), -1) for moved in by_site(runner).values()], 1)


def summary(runs: Sequence[Run]) -> list[Row]:
    """A row for each model and method."""
    found = {
        (run.job["model"], method): result for run in runs for method, result in run.result.items()
    }
    rows = []
    for (model, method), result in found.items():
        if "refused" in result:
            continue
        row: Row = {"model": model, "method": method, "latents": len(result["mean"])}
        row |= {"size": min(result["size"]), "warned": "yes" if result["warned"] else ""}
        row["seconds"] = result["seconds"]
        reference = found.get((model, "NUTS"))
        if method != "NUTS" and reference is not None:
            (mean, sd, size), (true_mean, true_sd, true_size) = (
                torch.tensor([each[name] for name in ("mean", "sd", "size")])
                for each in (result, reference)
            )
            chance = (sd**2 / size + true_sd**2 / true_size).sqrt()
            apart = (mean - true_mean).abs()
            row["error"] = float((apart / (sd if method == NOISE_AWARE else chance)).max())
            row["in sds"] = float((apart / true_sd).max())
            row["narrowest"], row["widest"] = map(float, (sd / true_sd).aminmax())
        rows.append(row)
    return rows


def panels(rows: list[Row]) -> list[Panel]:
    """Differences of means to NUTS, and widths over those of NUTS."""
    differences, widths = {}, {}
    for method in METHODS[1:]:
        some = having(rows, method=method)
        differences[method] = columns(some, "in sds", "model")
        for end in ("narrowest", "widest"):
            widths[f"{method}: {end}"] = columns(some, end, "model")
    return [
        Panel("largest difference of means", "posterior sds", "", differences, ""),
        Panel("standard deviations", "over those of NUTS", "", widths, ""),
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "pyro_examples")
    parser.add_argument("--only", nargs="*", choices=list(examples()), default=list(examples()))
    options = parser.parse_args(arguments)
    logging.getLogger("torch_dpbayes").setLevel(logging.ERROR)
    jobs = [
        {"model": model, "what": what, "records": 500 if options.quick else 5000, "draws": DRAWS}
        for model in options.only
        for what in RUNS
    ]
    finish(options, run, jobs, rows_of=summary, panels=panels)


if __name__ == "__main__":
    main()
