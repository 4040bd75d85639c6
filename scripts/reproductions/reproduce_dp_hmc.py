"""Räisä, Koskela and Honkela (2021), "Differentially private Hamiltonian Monte Carlo", with this
library's kernels and its accounting.

    python reproduce_dp_hmc.py --quick           # two minutes
    python reproduce_dp_hmc.py --starts truth    # four hours

Their two models, n = 100,000 records, 4 chains that share the budget, δ = 0.1/n for replacing a
record, the first half of each chain dropped, their settings: noise of 2τ√n clip bounds. Chains
start at a draw from the prior, which no record can choose. ``--starts truth`` starts them around
the true parameter, as the paper did: those runs are *not private*.

* Figure 1: maximum mean discrepancy (MMD) to the posterior and error of the mean against ε. A run
  at one ε begins like the run at a larger one. So each repeat makes only the longest run, and we
  evaluate it where each budget ends. The points of one repeat are correlated.
* What their accounting and their DP-SGLD get wrong: see ``accounting`` and ``half_the_variance``.

MMD is defined as theirs: √|unbiased estimate of MMD²| of 1000 draws each, with a Gaussian kernel
whose width is the median distance between draws and truth.

The data are 10,000 different records that occur ten times each, so that sums cost a tenth. DP-HMC
and DP-penalty see weighted rows that stand for ten records each; clipping and noise stay the same.
Chains and ε are those of 100,000 records of which one is replaced.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC
from pyro.ops.stats import split_gelman_rubin
from reproduction import Panel, Row, chain_of, columns, digest, finish, grouped, having, parser_of
from torch import Tensor, nn

import torch_dpbayes as dpb
from torch_dpbayes.accounting.events import ComposedDpEvent, GaussianDpEvent, SelfComposedDpEvent
from torch_dpbayes.mcmc import DPHMC, DPPenalty
from torch_dpbayes.mcmc.kernel import PrivateKernel

NUM_DATA, DELTA, CHAINS, DRAWS = 100_000, 1e-6, 4, 1000
BATCH = 1000
BEND = 20.0
# Their code names seeds. From those, with a later JAX whose gamma sampler was put back to that of
# their release: the eigenvalues of the covariance, Gamma(1/2, 1) draws, and how many standard
# errors the means of the data lie from the truth, which says where on the banana the posterior is
EIGENVALUES = (0.012671, 0.034694, 0.049567, 0.105331, 0.326650, 0.371894, 0.527502)
EIGENVALUES += (0.834815, 0.884533, 4.774419)
VARIANCES = {"banana": (2000.0, 2500.0), "Gaussian": EIGENVALUES}
OFFSETS = {
    "banana": (0.943, -0.418),
    "Gaussian": (1.137, 0.059, 0.574, 0.948, -1.227, -0.337, 0.069, -0.084, 1.147, -0.754),
}
EPSILONS = (2.0, 4.0, 8.0, 15.0)


@dataclass(frozen=True)
class Settings:
    """Theirs, in our units: a noise multiplier is 2τ√n, an lr acts on the mean loss."""

    penalty: dict[str, float]
    hmc: dict[str, Any]
    sgld: tuple[float, float]  # their η, and the clip norm
    sgnht: tuple[float, float, float]  # their η, A, and the clip norm


def noise(tau: float) -> float:
    return 2 * tau * math.sqrt(NUM_DATA)


SETTINGS = {
    "banana": Settings(
        penalty={"proposal_scale": 0.06, "log_ratio_slope": 0.15, "noise_multiplier": noise(0.17)},
        hmc={
            "step_size": 0.006,
            "num_steps": 25,
            "log_ratio_slope": 0.1,
            "max_grad_norm": 0.05,
            "ratio_noise_multiplier": noise(0.10),
            "grad_noise_multiplier": noise(0.55),
        },
        sgld=(1.0, 0.2),
        sgnht=(100.0, 50.0, 0.2),
    ),
    "Gaussian": Settings(
        penalty={"proposal_scale": 0.0007, "log_ratio_slope": 10, "noise_multiplier": noise(0.05)},
        hmc={
            "step_size": 0.00015,
            "num_steps": 12,
            "log_ratio_slope": 6.0,
            "max_grad_norm": 10.0,
            "ratio_noise_multiplier": noise(0.1),
            "grad_noise_multiplier": noise(0.25),
        },
        sgld=(0.008, 15.0),
        sgnht=(0.2, 30.0, 12.0),
    ),
}
HMC, PENALTY, SGLD, SGNHT = "DP-HMC", "DP-penalty", "DP-SGLD", "DP-SGNHT"
THEIR_SGLD, THEIR_SGNHT = "DP-SGLD as published", "DP-SGNHT as published"
ALGORITHMS = (HMC, PENALTY, THEIR_SGLD, THEIR_SGNHT, SGLD, SGNHT)


class Problem:
    """x_i ~ N(u(θ), diag σ²), u ~ N(0, s²I): with u = θ a Gaussian, with u = (θ₁, θ₂ + aθ₁²) their
    banana. The posterior of u is Gaussian, exactly.

    Gaussian axes are the eigenvectors of the covariance, which changes nothing: proposals, mass,
    clip norms and MMD are rotation-invariant.

    Args:
        repeat: seeds the data: pairs symmetric about the mean that their data have.
        records: different ones among them; each stands for ``NUM_DATA / records`` equal ones.
    """

    def __init__(self, name: str, repeat: int, records: int) -> None:
        self.name, self.bend = name, BEND if name == "banana" else 0.0
        self.variances = torch.tensor(VARIANCES[name], dtype=torch.float64)
        self.prior_std = math.sqrt(1000.0) if name == "banana" else 100.0
        self.truth = torch.zeros_like(self.variances)
        self.truth[1] = 3.0
        self.weight = NUM_DATA / records
        generator, size = torch.Generator().manual_seed(repeat), (records // 2, len(self.truth))
        noise = torch.randn(size, generator=generator, dtype=torch.float64)
        offsets = torch.tensor(OFFSETS[name]) / math.sqrt(NUM_DATA)
        self.data = self.truth + self.variances.sqrt() * (torch.cat([noise, -noise]) + offsets)
        self.posterior_variances = 1 / (NUM_DATA / self.variances + 1 / self.prior_std**2)
        self._mean = self.posterior_variances * NUM_DATA / self.variances * self.data.mean(0)
        self.mean = self.curved(self._mean)
        self.mean[1] -= self.bend * self.posterior_variances[0]

    def straight(self, theta: Tensor) -> Tensor:
        """u of θ (..., d)."""
        return self._bent(theta, self.bend)

    def curved(self, u: Tensor) -> Tensor:
        """θ of u (..., d)."""
        return self._bent(u, -self.bend)

    @staticmethod
    def _bent(x: Tensor, bend: float) -> Tensor:
        bent = x.clone()
        bent[..., 1] += bend * x[..., 0] ** 2
        return bent

    def draws(self, count: int) -> Tensor:
        """Exact draws from the posterior."""
        noise = torch.randn(count, len(self.variances), dtype=torch.float64)
        return self.curved(self._mean + self.posterior_variances.sqrt() * noise)

    def start(self, starts: str) -> Tensor:
        """A draw from the prior, or one around the truth with the posterior's average
        standard deviation, as in their code.
        """
        if starts == "prior":
            return self.curved(self.prior_std * torch.randn_like(self.truth))
        spread = (
            self.draws(DRAWS).std(0).mean() if self.bend else self.posterior_variances.mean().sqrt()
        )
        return self.truth + spread * torch.randn_like(self.truth)

    def model(self, x: Tensor) -> None:
        """For Pyro. ``factor`` is the Gaussian density up to a constant, to the power of the
        records that a row stands for.
        """
        if self.bend:
            first = pyro.sample("first", dist.Normal(x.new_zeros(()), self.prior_std))
            second = pyro.sample("second", dist.Normal(-self.bend * first**2, self.prior_std))
            u = torch.stack([first, second + self.bend * first**2])
        else:
            prior = dist.Normal(x.new_zeros(len(self.variances)), self.prior_std).to_event(1)
            u = pyro.sample("theta", prior)
        scale = (self.weight / self.variances).sqrt().to(x)
        with pyro.plate("data", len(x)):
            pyro.factor("x", -0.5 * ((x - u) * scale).square().sum(-1))

    def by_site(self, theta: Tensor) -> dict[str, Tensor]:
        return {"first": theta[0], "second": theta[1]} if self.bend else {"theta": theta}

    def by_row(self, samples: dict[str, Tensor]) -> Tensor:
        if not self.bend:
            return samples["theta"].double()
        return torch.stack([samples["first"], samples["second"]], 1).double()

    def gradients(self, theta: Tensor, rows: Tensor) -> Tensor:
        """∇ of −log p(x_i | θ) of some of the ``NUM_DATA`` records, (rows, d)."""
        u, bend = theta.clone(), self.bend * float(theta[0])
        u[1] += bend * theta[0]
        gradients = torch.index_select(self.data, 0, rows)
        torch.sub(u, gradients, out=gradients).div_(self.variances)
        if bend:
            gradients[:, 0].add_(gradients[:, 1], alpha=2 * bend)
        return gradients


# -- chains ----------------------------------------------------------------------------------------


def make_kernel(
    problem: Problem, algorithm: str, accountant: dpb.PrivacyAccountant
) -> PrivateKernel:
    """Their settings, in units of a row: it weighs ``weight`` records, so its clip bounds are
    as much larger, and the noise stays what it is.
    """
    theirs = SETTINGS[problem.name]
    settings = dict(theirs.hmc if algorithm == HMC else theirs.penalty)
    for name in settings:
        if name in ("log_ratio_slope", "max_grad_norm"):
            settings[name] *= problem.weight
        elif name.endswith("noise_multiplier"):
            settings[name] /= problem.weight
    kind = DPHMC if algorithm == HMC else DPPenalty
    if kind is DPHMC:  # theirs are uniform from 0 to the step size
        settings |= {"step_size": settings["step_size"] / 2, "jitter": 1.0}
    return kind(problem.model, accountant=accountant, target_accept_prob=None, **settings)


def langevin(
    problem: Problem, algorithm: str, accountant: dpb.PrivacyAccountant | None, start: Tensor
) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    """Their DP-SGLD moves by (η/n)·∇log p and adds noise of variance η/n, which is our lr = η at
    temperature ½; DP-SGLD has the same noise and twice the drift. Their SGNHT in the velocity v =
    (η/n)p has lr = η²/n, friction Aη/n and gain (η/n)². Batches are Poisson samples, theirs had a
    fixed size.
    """
    theta = nn.Parameter(start)
    theirs = SETTINGS[problem.name]
    eta, *rest = theirs.sgld if "SGLD" in algorithm else theirs.sgnht
    common: dict[str, Any] = {
        "assume_independent_records": True,
        "num_data": NUM_DATA,
        "expected_batch_size": BATCH,
        "max_grad_norm": rest[-1],
        "sampling": "poisson",
        "accountant": accountant,
        # the banana's prior has 1/50,000 of the data's precision
        "prior_std": math.inf if problem.bend else problem.prior_std,
    }
    if algorithm == THEIR_SGLD:
        return theta, dpb.optim.DPSGLD([theta], eta, temperature=0.5, **common)
    if algorithm == SGLD:
        return theta, dpb.optim.DPSGLD([theta], 2 * eta, **common)
    step = eta / NUM_DATA
    return theta, dpb.optim.DPSGNHT(
        [theta], step * eta, momentum=1 - rest[0] * step, thermostat_gain=step**2, **common
    )


def langevin_chain(
    problem: Problem,
    algorithm: str,
    accountant: dpb.PrivacyAccountant,
    start: Tensor,
    iterations: int,
) -> Tensor:
    theta, optimizer = langevin(problem, algorithm, accountant, start)
    draw = np.random.default_rng()

    def gradients(theta: Tensor) -> Tensor:
        """Of a Poisson sample."""
        size = draw.binomial(NUM_DATA, BATCH / NUM_DATA)
        rows = draw.choice(NUM_DATA, size, replace=False, shuffle=False)
        return problem.gradients(theta, torch.from_numpy(rows % len(problem.data)))

    return chain_of(theta, optimizer, gradients, iterations)


# -- what it costs ---------------------------------------------------------------------------------


@cache
def iterations(model: str, algorithm: str, epsilon: float, reuse: bool = True) -> int:
    """Of each chain, that ε affords; "as published" by their accounting. ``reuse``: of
    DP-HMC's gradients.
    """
    target: Row = {"target_epsilon": epsilon, "target_delta": DELTA, "neighboring": "replace_one"}
    settings = SETTINGS[model]
    accountant = dpb.PrivacyAccountant(epsilon, DELTA, neighboring="replace_one")
    if algorithm == PENALTY:
        ratio = GaussianDpEvent(settings.penalty["noise_multiplier"])
        return int(accountant.remaining(ratio)) // CHAINS
    if algorithm == HMC:
        ratio = GaussianDpEvent(settings.hmc["ratio_noise_multiplier"])
        gradient = GaussianDpEvent(settings.hmc["grad_noise_multiplier"])
        steps = settings.hmc["num_steps"]
        if reuse:
            accountant.compose(gradient, CHAINS)
        each = SelfComposedDpEvent(gradient, steps if reuse else steps + 1)
        return int(accountant.remaining(ComposedDpEvent([ratio, each]))) // CHAINS
    start = torch.zeros(2, dtype=torch.float64)
    _, optimizer = langevin(Problem(model, 0, 2), algorithm, None, start)
    multiplier: float = optimizer.effective_noise_multiplier  # type: ignore[attr-defined]
    # half the noise, in a formula that has the factor 2 of the replace-one relation already
    if "published" in algorithm:
        multiplier /= 2
    rate = BATCH / NUM_DATA
    return dpb.get_num_steps(noise_multiplier=multiplier, sample_rate=rate, **target) // CHAINS


def accounting(epsilons: Sequence[float]) -> list[Row]:
    """Iterations a chain, as they counted them and as they can be had.

    DP-HMC: keeping the gradient where the chain stays is exact and affords a few per cent more, a
    question that they left open. DP-SGLD and DP-SGNHT: theirs halve the noise multiplier for the
    replace-one relation and use a formula for that relation, so they spend less than half of ε.
    """
    rows: list[Row] = []
    algorithms = ((HMC, False), (PENALTY, True), (THEIR_SGLD, True), (THEIR_SGNHT, True))
    for model, epsilon, (algorithm, reuse) in product(SETTINGS, epsilons, algorithms):
        ours = algorithm.removesuffix(" as published")
        row: Row = {"model": model, "algorithm": ours, "epsilon": epsilon}
        row["theirs"] = iterations(model, algorithm, epsilon, reuse)
        row["ours"] = iterations(model, ours, epsilon)
        rows.append(row)
    return rows


# -- how good it is --------------------------------------------------------------------------------


def mmd(a: Tensor, b: Tensor) -> float:
    """√|unbiased MMD²| with a Gaussian kernel, as wide as the median distance between a and b."""
    between = torch.cdist(a, b)
    width = between.median()

    def kernel(distance: Tensor) -> Tensor:
        return torch.exp(-distance.square() / (2 * width**2))

    def within(x: Tensor) -> Tensor:
        return (kernel(torch.cdist(x, x)).sum() - len(x)) / (len(x) * (len(x) - 1))

    return math.sqrt(abs(float(within(a) + within(b) - 2 * kernel(between).mean())))


def measured(problem: Problem, chains: Tensor) -> dict[str, float]:
    """MMD, distance of the means, R̂ and average variance ratio (in straight coordinates) of chains
    (chains, iterations, d), first halves dropped; infinite for chains that diverged.
    """
    kept = chains[:, chains.shape[1] // 2 :]
    if not bool(kept.isfinite().all()) or kept.shape[1] < 4:
        return dict.fromkeys(("MMD", "mean error", "variance ratio", "R-hat"), math.inf)
    draws = kept.reshape(-1, kept.shape[2])
    some = draws[torch.linspace(0, len(draws) - 1, min(DRAWS, len(draws))).long()]
    # of chains that never moved
    r_hat = split_gelman_rubin(kept, 0, 1).nan_to_num(math.inf, math.inf)
    return {
        "MMD": mmd(some, problem.draws(DRAWS)),
        "mean error": float((draws.mean(0) - problem.mean).norm()),
        "variance ratio": float(
            (problem.straight(draws).var(0) / problem.posterior_variances).mean()
        ),
        "R-hat": float(r_hat.max()),
    }


# -- the runs --------------------------------------------------------------------------------------


def kernel_chains(
    problem: Problem, algorithm: str, starts: Sequence[Tensor], iterations: int
) -> tuple[Tensor, float]:
    """Chains (chains, iterations, d) by Pyro's own runner, and their rate of noisy acceptances."""
    # the accountant counts rows, not the records in them: what it holds is not ε
    accountant = dpb.PrivacyAccountant(neighboring="replace_one")
    dtype = torch.float32 if problem.bend else torch.float64
    chains, accepted = [], []
    for start in starts:
        initial = {name: value.to(dtype) for name, value in problem.by_site(start).items()}
        mcmc = MCMC(
            make_kernel(problem, algorithm, accountant),
            num_samples=iterations,
            warmup_steps=0,
            initial_params=initial,
            disable_progbar=True,
        )
        mcmc.run(problem.data.to(dtype))
        chains.append(problem.by_row(mcmc.get_samples()))
        accepted.append(mcmc.diagnostics()["acceptance rate"]["chain 0"])
    return torch.stack(chains), statistics.fmean(accepted)


def figure_1(
    model: str, algorithm: str, starts: str, epsilons: list[float], repeat: int, records: int
) -> Row:
    """Four chains for the largest ε, evaluated where each budget ends."""
    problem = Problem(model, repeat, records)
    longest = iterations(model, algorithm, max(epsilons))
    first, rate = [problem.start(starts) for _ in range(CHAINS)], None
    if algorithm in (HMC, PENALTY):
        chains, rate = kernel_chains(problem, algorithm, first, longest)
    else:
        accountant = dpb.PrivacyAccountant(max(epsilons), DELTA, neighboring="replace_one")
        chains = torch.stack(
            [langevin_chain(problem, algorithm, accountant, start, longest) for start in first]
        )
    exact = mmd(problem.draws(DRAWS), problem.draws(DRAWS))
    common = {"acceptance": rate, "MMD of exact draws": exact}
    rows = []
    for epsilon in epsilons:
        count = iterations(model, algorithm, epsilon)
        point = measured(problem, chains[:, :count])
        rows.append({"epsilon": epsilon, "iterations": count, **point, **common})
    return {"rows": rows}


def half_the_variance(theirs: bool, steps: int) -> Row:
    """Stationary variance / target of DP-SGLD on 1000 independent unit Gaussians, full
    batches, nothing clipped; exactly T/(1 − η/2).
    """
    size, lr, temperature = 1000, 0.1, 0.5 if theirs else 1.0
    theta = nn.Parameter(torch.randn(size, dtype=torch.float64) / math.sqrt(BATCH))
    optimizer = dpb.optim.DPSGLD(
        [theta],
        lr,
        temperature=temperature,
        assume_independent_records=True,
        num_data=BATCH,
        expected_batch_size=BATCH,
        max_grad_norm=1e6,
        prior_std=math.inf,
    )
    chain = chain_of(theta, optimizer, lambda theta: theta.expand(BATCH, size), steps)
    ratio = float(chain[steps // 2 :: 50].square().mean()) * BATCH
    return {"variance ratio": ratio, "exact": temperature / (1 - lr / 2)}


FIGURES: dict[str, Any] = {"1": figure_1, "variance": half_the_variance}


def run(figure: str, settings: str, **arguments: Any) -> Row:
    return FIGURES[figure](**arguments)


def jobs(
    figures: Sequence[str], epsilons: Sequence[float], repeats: int, starts: str, quick: bool
) -> list[Row]:
    """The cheap ones first."""
    records = 2000 if quick else 10_000
    found: list[Row] = [
        {"figure": "variance", "theirs": theirs, "steps": 1500} for theirs in (True, False)
    ]
    some = (HMC, PENALTY, THEIR_SGLD) if quick else ALGORITHMS
    for repeat, algorithm, model in product(range(repeats), some, SETTINGS):
        job = {"figure": "1", "model": model, "algorithm": algorithm, "starts": starts}
        job |= {"epsilons": sorted(epsilons), "repeat": repeat, "records": records}
        found.append(job)
    constants = digest(
        run=(NUM_DATA, DELTA, CHAINS, BATCH, BEND), data=(VARIANCES, OFFSETS), settings=SETTINGS
    )
    return [{**job, "settings": constants} for job in found if job["figure"] in figures]


# -- tables and picture ----------------------------------------------------------------------------


def summary(rows: Sequence[Row]) -> list[Row]:
    """Medians over the repeats of Figure 1, and the range of MMD."""
    lines = []
    names = ("model", "epsilon", "algorithm")
    for values, some in grouped(having(rows, figure="1"), *names).items():
        line: Row = dict(zip(names, values, strict=True))
        line |= {"runs": len(some), "iterations": some[0]["iterations"]}
        line["acceptance"] = some[0]["acceptance"] and statistics.fmean(
            row["acceptance"] for row in some
        )
        for name in ("MMD", "mean error", "variance ratio", "R-hat"):
            line[name] = statistics.median(row[name] for row in some)
        found = [row["MMD"] for row in some]
        lines.append(line | {"least MMD": min(found), "largest MMD": max(found)})
    return sorted(lines, key=lambda line: (line["model"], line["epsilon"]))


def panels(rows: list[Row]) -> list[Panel]:
    """MMD and error of the mean against ε."""
    found, medians = [], summary(rows)
    for model, measure in product(SETTINGS, ("MMD", "mean error")):
        lines = {
            algorithm: columns(some, "epsilon", measure)
            for (algorithm,), some in grouped(having(medians, model=model), "algorithm").items()
        }
        found.append(Panel(f"{model}: median {measure}", "ε, δ = 1e-6, replace one", "", lines))
    return found


def main(arguments: list[str] | None = None) -> list[Row]:
    parser = parser_of(__doc__, "reproduce_dp_hmc")
    parser.add_argument("--repeats", type=int, help="default: 3, or 1 with --quick")
    parser.add_argument("--starts", choices=("prior", "truth"), default="prior")
    parser.add_argument("--figures", choices=FIGURES, nargs="+", default=tuple(FIGURES))
    options = parser.parse_args(arguments)
    epsilons = (2.0, 4.0) if options.quick else EPSILONS
    repeats = options.repeats or (1 if options.quick else 3)
    if options.starts == "truth":
        print("Chains start around the true parameter, as in the paper: these are not private.")

    def tables(rows: list[Row]) -> Mapping[str, Sequence[Row]]:
        found = {
            "Iterations of a chain": accounting(epsilons),
            "Figure 1": summary(rows),
            "variance": having(rows, figure="variance"),
        }
        return {caption: lines for caption, lines in found.items() if lines}

    wanted = jobs(options.figures, epsilons, repeats, options.starts, options.quick)
    return finish(options, run, wanted, tables=tables, panels=panels)


if __name__ == "__main__":
    main()
