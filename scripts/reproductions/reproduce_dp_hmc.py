"""Räisä, Koskela and Honkela (2021), "Differentially private Hamiltonian Monte Carlo", with this
library's kernels and its accounting.

    python reproduce_dp_hmc.py --quick    # two minutes
    python reproduce_dp_hmc.py            # hours; finished runs are stored and not repeated
    python reproduce_dp_hmc.py --full     # as often and at as many ε as they did: days

Their two models, n = 100,000 records, 4 chains that share the budget, δ = 0.1/n for replacing a
record, the first half of each chain dropped, their settings: noise of 2τ√n clip bounds. Chains
start at a draw from the prior, which no record can choose. ``--starts truth`` starts them around
the true parameter, as the paper did: those runs are *not private*.

* Figure 1: maximum mean discrepancy (MMD) to the posterior and error of the mean against ε. A run
  at one ε begins like the run at a larger one, so each repeat makes the longest, and is evaluated
  where each budget ends: within a repeat the points are correlated.
* Figure 2: the best, the median and the worst run at the largest ε.
* Figure 3: the cost of clipping log-likelihood ratios, without noise (not private); hollow where R̂
            is not below 1.05.
* Acceptance against dimension, from 2 to 30, on N(θ, I) with their settings for the Gaussian.
* What their accounting and their DP-SGLD get wrong: see ``accounting`` and ``half_the_variance``.

MMD is theirs: Gaussian kernel, its width the median distance between draws and truth, √|unbiased
estimate of MMD²|, 1000 draws of each.

``--records 10000`` makes data of 10,000 different records that occur ten times each, whose sums
cost a tenth. DP-HMC and DP-penalty then see weighted rows, ten records in one, and clip and noise
are as before: the chains are those of the 100,000 records, and so is ε, for replacing one of them.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC
from pyro.ops.stats import split_gelman_rubin
from reproduction import (
    ROOT,
    Run,
    digest,
    markdown,
    origin,
    positive,
    run_jobs,
    stored_runs,
    write_csv,
)
from torch import Tensor, nn

import torch_dpbayes as dpb
from torch_dpbayes.mcmc import DPHMC, DPPenalty, plan
from torch_dpbayes.mcmc.kernel import PrivateKernel

NUM_DATA, DELTA, CHAINS, DRAWS = 100_000, 1e-6, 4, 1000
BATCH = 1000
BEND = 20.0
# Their code names seeds. From those, with a later JAX whose gamma sampler was put back to that of
# their release: the eigenvalues of the covariance, Gamma(1/2, 1) draws, and how many standard
# errors the means of the data lie from the truth, which says where on the banana the posterior is
EIGENVALUES = (
    0.012671,
    0.034694,
    0.049567,
    0.105331,
    0.326650,
    0.371894,
    0.527502,
    0.834815,
    0.884533,
    4.774419,
)
OFFSETS = {
    "banana": (0.943, -0.418),
    "Gaussian": (1.137, 0.059, 0.574, 0.948, -1.227, -0.337, 0.069, -0.084, 1.147, -0.754),
}
EPSILONS = (2.0, 4.0, 8.0, 15.0)
RATIO_SLOPES = {
    "banana": (0.01, 0.025, 0.05, 0.1, 0.2, 1.0),
    "Gaussian": (0.2, 1.0, 5.0, 10.0, 20.0, 50.0),
}
DIMENSIONS = (2, 5, 10, 20, 30)


@dataclass(frozen=True)
class Settings:
    """Theirs, in our units: a noise multiplier is 2τ√n, an lr acts on the mean loss."""

    penalty: dict[str, float]
    hmc: dict[str, Any]
    clip_hmc: dict[str, Any]  # of Figure 3, and the number of iterations there
    clip_penalty: dict[str, float]
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
        clip_hmc={"step_size": 0.01, "num_steps": 50, "max_grad_norm": 10.0, "iterations": 200},
        clip_penalty={"proposal_scale": 0.3, "iterations": 5000},
        sgld=(1.0, 0.2),
        sgnht=(100.0, 50.0, 0.2),
    ),
    "Gaussian": Settings(
        penalty={
            "proposal_scale": 0.0007,
            "log_ratio_slope": 10.0,
            "noise_multiplier": noise(0.05),
        },
        hmc={
            "step_size": 0.00015,
            "num_steps": 12,
            "log_ratio_slope": 6.0,
            "max_grad_norm": 10.0,
            "ratio_noise_multiplier": noise(0.1),
            "grad_noise_multiplier": noise(0.25),
        },
        clip_hmc={"step_size": 0.0005, "num_steps": 12, "max_grad_norm": 100.0, "iterations": 600},
        clip_penalty={"proposal_scale": 0.0007, "iterations": 8000},
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

    def __init__(
        self,
        name: str,
        repeat: int,
        records: int = NUM_DATA,
        variances: Sequence[float] | None = None,
    ) -> None:
        self.name, self.bend = name, BEND if name == "banana" else 0.0
        offsets: Sequence[float] = OFFSETS[name] if variances is None else [0.0] * len(variances)
        if variances is None:
            variances = (2000.0, 2500.0) if name == "banana" else EIGENVALUES
        self.variances = torch.tensor(variances, dtype=torch.float64)
        self.prior_std = math.sqrt(1000.0) if name == "banana" else 100.0
        self.truth = torch.zeros_like(self.variances)
        self.truth[1] = 3.0
        self.weight = NUM_DATA / records
        noise = torch.randn(
            records // 2,
            len(variances),
            generator=torch.Generator().manual_seed(repeat),
            dtype=torch.float64,
        )
        self.data = self.truth + self.variances.sqrt() * (
            torch.cat([noise, -noise]) + torch.tensor(offsets) / math.sqrt(NUM_DATA)
        )
        self.posterior_variances = 1 / (NUM_DATA / self.variances + 1 / self.prior_std**2)
        self._mean = self.posterior_variances * NUM_DATA / self.variances * self.data.mean(0)
        self.mean = self.curved(self._mean)
        self.mean[1] -= self.bend * self.posterior_variances[0]

    def straight(self, theta: Tensor) -> Tensor:
        """u of θ (..., d)."""
        return (
            theta
            if not self.bend
            else torch.stack([theta[..., 0], theta[..., 1] + self.bend * theta[..., 0] ** 2], -1)
        )

    def curved(self, u: Tensor) -> Tensor:
        """θ of u (..., d)."""
        return (
            u.clone()
            if not self.bend
            else torch.stack([u[..., 0], u[..., 1] - self.bend * u[..., 0] ** 2], -1)
        )

    def draws(self, count: int) -> Tensor:
        """Exact draws from the posterior."""
        return self.curved(
            self._mean
            + self.posterior_variances.sqrt()
            * torch.randn(count, len(self.variances), dtype=torch.float64)
        )

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
            u = pyro.sample(
                "theta", dist.Normal(x.new_zeros(len(self.variances)), self.prior_std).to_event(1)
            )
        scale = (self.weight / self.variances).sqrt().to(x)
        with pyro.plate("data", len(x)):
            pyro.factor("x", -0.5 * ((x - u) * scale).square().sum(-1))

    def by_site(self, theta: Tensor) -> dict[str, Tensor]:
        return {"first": theta[0], "second": theta[1]} if self.bend else {"theta": theta}

    def by_row(self, samples: dict[str, Tensor]) -> Tensor:
        rows = (
            torch.stack([samples["first"], samples["second"]], 1) if self.bend else samples["theta"]
        )
        return rows.double()

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


def kernel_chain(
    problem: Problem, kernel: PrivateKernel, start: Tensor, iterations: int, dtype: torch.dtype
) -> tuple[Tensor, float]:
    """A chain (iterations, d) by Pyro's own runner, and its rate of noisy acceptances."""
    initial = {name: value.to(dtype) for name, value in problem.by_site(start).items()}
    mcmc = MCMC(
        kernel, num_samples=iterations, warmup_steps=0, initial_params=initial, disable_progbar=True
    )
    mcmc.run(problem.data.to(dtype))
    return problem.by_row(mcmc.get_samples()), mcmc.diagnostics()["acceptance rate"]["chain 0"]


def make_kernel(
    problem: Problem, algorithm: str, accountant: dpb.PrivacyAccountant, **changes: float
) -> PrivateKernel:
    """Their settings, in units of a row: it weighs ``weight`` records, so its clip bounds are
    as much larger, and the noise stays what it is.
    """
    settings = (
        dict(SETTINGS[problem.name].hmc if algorithm == HMC else SETTINGS[problem.name].penalty)
        | changes
    )
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
    eta, *rest = (
        SETTINGS[problem.name].sgld if "SGLD" in algorithm else SETTINGS[problem.name].sgnht
    )
    common: dict[str, Any] = {
        "assume_independent_records": True,
        "num_data": NUM_DATA,
        "expected_batch_size": BATCH,
        "max_grad_norm": rest[-1],
        "sampling": "poisson",
    }
    # 1/50,000 of the data's precision there
    common |= {
        "accountant": accountant,
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
    chain = torch.full((iterations, len(start)), math.nan, dtype=torch.float64)
    draw = np.random.default_rng()
    try:
        for position in chain:
            # a Poisson sample
            rows = draw.choice(
                NUM_DATA, draw.binomial(NUM_DATA, BATCH / NUM_DATA), replace=False, shuffle=False
            )
            theta.grad_sample = problem.gradients(
                theta.detach(), torch.from_numpy(rows % len(problem.data))
            )  # type: ignore[attr-defined]
            optimizer.step()
            position.copy_(theta.detach())
    except FloatingPointError:
        pass  # the rest stays NaN
    return chain


# -- what it costs ---------------------------------------------------------------------------------


@cache
def iterations(model: str, algorithm: str, epsilon: float, reuse: bool = True) -> int:
    """Of each chain, that ε affords; "as published" by their accounting. ``reuse``: of
    DP-HMC's gradients.
    """
    target: dict[str, Any] = {
        "target_epsilon": epsilon,
        "target_delta": DELTA,
        "neighboring": "replace_one",
    }
    if algorithm == PENALTY:
        return (
            plan(
                DPPenalty, noise_multiplier=SETTINGS[model].penalty["noise_multiplier"], **target
            ).num_iterations
            // CHAINS
        )
    if algorithm == HMC:
        given = {
            name: SETTINGS[model].hmc[name]
            for name in ("num_steps", "ratio_noise_multiplier", "grad_noise_multiplier")
        }
        return (
            plan(DPHMC, reuse_gradients=reuse, num_chains=CHAINS, **given, **target).num_iterations
            // CHAINS
        )
    multiplier = langevin_noise(model, algorithm)
    # half the noise, in a formula that has the factor 2 of the replace-one relation already
    if "published" in algorithm:
        multiplier /= 2
    return (
        dpb.get_num_steps(noise_multiplier=multiplier, sample_rate=BATCH / NUM_DATA, **target)
        // CHAINS
    )


def langevin_noise(model: str, algorithm: str) -> float:
    """z of the gradient samplers."""
    _, optimizer = langevin(
        Problem(model, 0, 2), algorithm, None, torch.zeros(2, dtype=torch.float64)
    )
    return optimizer.effective_noise_multiplier  # type: ignore[attr-defined]


def spent(model: str, algorithm: str, steps: int) -> float:
    """ε of four chains of a gradient sampler."""
    accountant = dpb.PrivacyAccountant(neighboring="replace_one")
    event = dpb.accounting.events.PoissonSampledDpEvent(
        BATCH / NUM_DATA, dpb.accounting.events.GaussianDpEvent(langevin_noise(model, algorithm))
    )
    return accountant.compose(event, CHAINS * steps).get_epsilon(DELTA)


def accounting(epsilons: Sequence[float]) -> list[dict[str, Any]]:
    """Iterations a chain, as they counted them and as they can be had, and what theirs spend in
    truth.

    DP-HMC: keeping the gradient where the chain stays is exact and affords a few per cent more, a
    question that they left open. DP-SGLD and DP-SGNHT: theirs halve the noise multiplier for the
    replace-one relation and use a formula for that relation, so they spend less than half of ε.
    """
    rows: list[dict[str, Any]] = []
    for model in SETTINGS:
        for epsilon in epsilons:
            for algorithm, reuse in (
                (HMC, False),
                (PENALTY, True),
                (THEIR_SGLD, True),
                (THEIR_SGNHT, True),
            ):
                ours = algorithm.removesuffix(" as published")
                row: dict[str, Any] = {
                    "figure": "accounting",
                    "model": model,
                    "algorithm": ours,
                    "epsilon": epsilon,
                }
                row["theirs"], row["ours"] = (
                    iterations(model, algorithm, epsilon, reuse),
                    iterations(model, ours, epsilon),
                )
                row["theirs spend"] = (
                    spent(model, algorithm, row["theirs"]) if ours != algorithm else None
                )
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


def clipped_share(problem: Problem, slope: float, chains: Tensor) -> float:
    """Of the log-likelihood ratios along the moves of chains (chains, iterations, d); for the
    figure, never released.
    """
    start, end = (
        chains[:, :-1].reshape(-1, chains.shape[2]),
        chains[:, 1:].reshape(-1, chains.shape[2]),
    )
    (moved,) = torch.where((start != end).any(1))
    if not len(moved):
        return math.nan
    pick = moved[torch.linspace(0, len(moved) - 1, min(100, len(moved))).long()]
    shares = []
    for a, b in zip(start[pick], end[pick], strict=True):
        before, after = (
            ((problem.straight(theta) - problem.data).square() / problem.variances).sum(1) / 2
            for theta in (a, b)
        )
        shares.append(float(((before - after).abs() > slope * (b - a).norm()).double().mean()))
    return statistics.fmean(shares)


# -- the runs --------------------------------------------------------------------------------------


def figure_1(
    model: str, algorithm: str, starts: str, epsilons: list[float], repeat: int, records: int
) -> dict[str, Any]:
    """Four chains for the largest ε, evaluated where each budget ends."""
    problem = Problem(model, repeat, records)
    # the accountant counts rows, not the records in them
    weighted = algorithm in (HMC, PENALTY) and records < NUM_DATA
    accountant = dpb.PrivacyAccountant(
        None if weighted else max(epsilons), None if weighted else DELTA, neighboring="replace_one"
    )
    longest = iterations(model, algorithm, max(epsilons))
    chains, accepted = [], []
    for _ in range(CHAINS):
        if algorithm in (HMC, PENALTY):
            kernel = make_kernel(problem, algorithm, accountant)
            chain, rate = kernel_chain(
                problem,
                kernel,
                problem.start(starts),
                longest,
                torch.float32 if problem.bend else torch.float64,
            )
            accepted.append(rate)
        else:
            chain = langevin_chain(problem, algorithm, accountant, problem.start(starts), longest)
        chains.append(chain)
    stacked = torch.stack(chains)
    points = []
    for epsilon in sorted(epsilons):
        count = iterations(model, algorithm, epsilon)
        points.append(
            {"epsilon": epsilon, "iterations": count, **measured(problem, stacked[:, :count])}
        )
    kept = stacked[:, longest // 2 :].reshape(-1, stacked.shape[2])
    some = kept[torch.linspace(0, len(kept) - 1, min(300, len(kept))).long()]
    return {
        "points": points,
        "spent": None if weighted else accountant.get_epsilon(DELTA),
        "acceptance": statistics.fmean(accepted) if accepted else None,
        "draws": [[float(f"{value:.4g}") for value in row] for row in some[:, :2].tolist()],
        "exact": mmd(problem.draws(DRAWS), problem.draws(DRAWS)),
    }


def figure_3(
    model: str, algorithm: str, slope: float, iterations: int, repeat: int, records: int
) -> dict[str, Any]:
    """Clipped ratios without noise: four chains from around the truth. Not private."""
    problem, accountant = (
        Problem(model, repeat, records),
        dpb.PrivacyAccountant(neighboring="replace_one"),
    )
    settings = SETTINGS[model].clip_hmc if algorithm == HMC else SETTINGS[model].clip_penalty
    changes: dict[str, float] = {
        name: value for name, value in settings.items() if name != "iterations"
    } | {"log_ratio_slope": slope}
    silent = (
        ("ratio_noise_multiplier", "grad_noise_multiplier")
        if algorithm == HMC
        else ("noise_multiplier",)
    )
    changes |= dict.fromkeys(silent, 0.0)
    chains, accepted = [], []
    for _ in range(CHAINS):
        kernel = make_kernel(problem, algorithm, accountant, **changes)
        chain, rate = kernel_chain(
            problem,
            kernel,
            problem.start("truth"),
            iterations,
            torch.float32 if problem.bend else torch.float64,
        )
        chains.append(chain)
        accepted.append(rate)
    stacked = torch.stack(chains)
    return {
        **measured(problem, stacked),
        "clipped": clipped_share(problem, slope, stacked),
        "acceptance": statistics.fmean(accepted),
    }


def dimension(
    algorithm: str, dimension: int, iterations: int, repeat: int, records: int
) -> dict[str, Any]:
    """Acceptance on N(θ, I) from exact draws of the posterior (not private) at their settings
    for the Gaussian, and what it should be.
    """
    problem, accountant = (
        Problem("Gaussian", repeat, records, [1.0] * dimension),
        dpb.PrivacyAccountant(neighboring="replace_one"),
    )
    rates = []
    for _ in range(CHAINS):
        kernel = make_kernel(problem, algorithm, accountant)
        rates.append(
            kernel_chain(problem, kernel, problem.draws(1)[0], iterations, torch.float64)[1]
        )
    return {
        "acceptance": statistics.fmean(rates),
        "expected": expected_acceptance(algorithm, dimension),
    }


def expected_acceptance(algorithm: str, dimension: int, replicas: int = 100_000) -> float:
    """In the posterior N(0, I/n) with nothing clipped: by independent iterations on
    sufficient statistics.
    """
    n, theta = NUM_DATA, torch.randn(replicas, dimension, dtype=torch.float64) / math.sqrt(NUM_DATA)
    settings = SETTINGS["Gaussian"].hmc if algorithm == HMC else SETTINGS["Gaussian"].penalty
    rest = torch.zeros(replicas, dtype=torch.float64)
    if algorithm == HMC:
        step = settings["step_size"] * torch.rand(replicas, 1, dtype=torch.float64)
        spread = settings["grad_noise_multiplier"] * settings["max_grad_norm"]
        momentum, moved = torch.randn_like(theta), theta
        rest = momentum.square().sum(1) / 2
        gradient = n * moved + spread * torch.randn_like(theta)
        for _ in range(int(settings["num_steps"])):
            momentum = momentum - step / 2 * gradient
            moved = moved + step * momentum
            gradient = n * moved + spread * torch.randn_like(theta)
            momentum = momentum - step / 2 * gradient
        rest = rest - momentum.square().sum(1) / 2
        multiplier = settings["ratio_noise_multiplier"]
    else:
        moved = theta + settings["proposal_scale"] * torch.randn_like(theta)
        multiplier = settings["noise_multiplier"]
    ratio = n / 2 * (theta.square().sum(1) - moved.square().sum(1)) + rest
    std = multiplier * settings["log_ratio_slope"] * (moved - theta).norm(dim=1)
    # E min(1, exp(N(R − σ²/2, σ²)))
    below = torch.special.ndtr((ratio - std**2 / 2) / std) + torch.exp(
        ratio + torch.special.log_ndtr(-(ratio + std**2 / 2) / std)
    )
    return float(below.mean())


def half_the_variance(theirs: bool, steps: int) -> dict[str, Any]:
    """Stationary variance / target of DP-SGLD on 1000 independent unit Gaussians, full
    batches, nothing clipped; exactly T/(1 − η/2).
    """
    size, lr = 1000, 0.1
    theta = nn.Parameter(torch.randn(size, dtype=torch.float64) / math.sqrt(BATCH))
    options: dict[str, Any] = {
        "assume_independent_records": True,
        "num_data": BATCH,
        "expected_batch_size": BATCH,
        "max_grad_norm": 1e6,
        "prior_std": math.inf,
    }
    optimizer = dpb.optim.DPSGLD([theta], lr, temperature=0.5 if theirs else 1.0, **options)
    squares = []
    for step in range(steps):
        theta.grad_sample = theta.detach().expand(BATCH, size)  # type: ignore[attr-defined]
        optimizer.step()
        if step >= steps // 2 and step % 50 == 0:
            squares.append(float(theta.detach().square().mean()) * BATCH)
    return {
        "variance ratio": statistics.fmean(squares),
        "exact": (0.5 if theirs else 1.0) / (1 - lr / 2),
    }


FIGURES = {"1": figure_1, "3": figure_3, "dimension": dimension, "variance": half_the_variance}


def run(figure: str, settings: str, **arguments: Any) -> dict[str, Any]:
    return FIGURES[figure](**arguments)  # type: ignore[operator]


def jobs_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What is cheap comes first."""
    jobs: list[dict[str, Any]] = [
        {"figure": "variance", "theirs": theirs, "steps": 1500} for theirs in (True, False)
    ]
    common = {
        "starts": options.starts,
        "epsilons": sorted(options.epsilons),
        "records": options.records,
    }
    for repeat in range(options.repeats):
        for model in SETTINGS:
            for algorithm in options.algorithms:
                if (
                    not options.quick
                    or algorithm in (HMC, PENALTY)
                    or (model == "Gaussian" and repeat == 0)
                ):
                    jobs.append(
                        {
                            "figure": "1",
                            "model": model,
                            "algorithm": algorithm,
                            **common,
                            "repeat": repeat,
                        }
                    )
    kernels = [algorithm for algorithm in options.algorithms if algorithm in (HMC, PENALTY)]
    for size in DIMENSIONS[:: 2 if options.quick else 1]:
        for algorithm in kernels:
            job = {
                "figure": "dimension",
                "algorithm": algorithm,
                "dimension": size,
                "iterations": 300,
            }
            jobs.append({**job, "repeat": 0, "records": options.records})
    for model in ("Gaussian",) if options.quick else SETTINGS:
        for slope in RATIO_SLOPES[model][:: 3 if options.quick else 1]:
            for algorithm in kernels:
                settings = (
                    SETTINGS[model].clip_hmc if algorithm == HMC else SETTINGS[model].clip_penalty
                )
                length = int(settings["iterations"] / (10 if options.quick else 1))
                for repeat in range(options.repeats if options.full else 1):
                    job = {
                        "figure": "3",
                        "model": model,
                        "algorithm": algorithm,
                        "slope": slope,
                        "iterations": length,
                    }
                    jobs.append({**job, "repeat": repeat, "records": options.records})

    def cost(job: dict[str, Any]) -> int:
        if job.get("algorithm", HMC) in (HMC, PENALTY):
            return int(job["figure"] != "1")
        return 2 + (job["model"] == "banana") + 2 * (job["algorithm"] in (SGLD, SGNHT))

    constants = digest(
        records=NUM_DATA,
        delta=DELTA,
        chains=CHAINS,
        batch=BATCH,
        bend=BEND,
        data=(EIGENVALUES, OFFSETS),
        settings=SETTINGS,
    )
    return [
        {**job, "settings": constants}
        for job in sorted(jobs, key=cost)
        if job["figure"] in options.figures
    ]


# -- tables and pictures ---------------------------------------------------------------------------


def rows_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row for each ε of a run of Figure 1, one for every other run."""
    rows = []
    for job, result, *_ in runs:
        about = {name: value for name, value in job.items() if name not in ("epsilons", "settings")}
        if job["figure"] == "1":
            for point in result["points"]:
                rows.append(
                    {
                        **about,
                        **point,
                        "acceptance": result["acceptance"],
                        "MMD of exact draws": result["exact"],
                    }
                )
        else:
            rows.append({**about, **result})
    return [
        {
            name: float(f"{value:.4g}") if isinstance(value, float) else value
            for name, value in row.items()
        }
        for row in rows
    ]


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians over the repeats of Figure 1, with the range."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if row["figure"] == "1":
            groups.setdefault(
                (row["model"], row["algorithm"], row["starts"], row["epsilon"]), []
            ).append(row)

    def spread(found: list[float], form: str) -> str:
        if len(found) == 1:
            return format(found[0], form)
        return f"{statistics.median(found):{form}} ({min(found):{form}} to {max(found):{form}})"

    table = []
    for (model, algorithm, starts, epsilon), found in groups.items():
        line = {
            "model": model,
            "algorithm": algorithm,
            "starts": starts,
            "ε": epsilon,
            "runs": len(found),
            "iterations": found[0]["iterations"],
        }
        line["acceptance"] = (
            statistics.fmean(row["acceptance"] for row in found)
            if found[0]["acceptance"] is not None
            else None
        )
        line |= {
            name: spread([row[name] for row in found], ".3g")
            for name in ("MMD", "mean error", "variance ratio")
        }
        table.append({**line, "R̂": statistics.median(row["R-hat"] for row in found)})
    return sorted(
        table,
        key=lambda line: (
            list(SETTINGS).index(line["model"]),
            line["ε"],
            ALGORITHMS.index(line["algorithm"]),
        ),
    )


COLUMNS = {
    "model": "",
    "algorithm": "",
    "ε": "g",
    "runs": "d",
    "iterations": "d",
    "acceptance": ".2f",
    "MMD": "",
    "mean error": "",
}
COLUMNS |= {"variance ratio": "", "R̂": ".3g"}


def draw(rows: Sequence[dict[str, Any]], runs: Sequence[Run], folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

    folder.mkdir(parents=True, exist_ok=True)
    cycle = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    colours = {
        HMC: cycle[0],
        PENALTY: cycle[1],
        SGLD: cycle[2],
        SGNHT: cycle[3],
        THEIR_SGLD: cycle[2],
        THEIR_SGNHT: cycle[3],
    }

    figure, grid = plt.subplots(2, 2, figsize=(11, 7), layout="constrained", sharex=True)
    for column, model in enumerate(SETTINGS):
        for axis, measure in zip(grid[:, column], ("MMD", "mean error"), strict=True):
            for place, algorithm in enumerate(ALGORITHMS):
                found = [
                    row
                    for row in rows
                    if row["figure"] == "1"
                    and (row["model"], row["algorithm"]) == (model, algorithm)
                ]
                if not found:
                    continue
                epsilons = sorted({row["epsilon"] for row in found})
                values = [
                    [row[measure] for row in found if row["epsilon"] == epsilon]
                    for epsilon in epsilons
                ]
                middle = [statistics.median(v) for v in values]
                ends = [
                    [m - min(v) for m, v in zip(middle, values, strict=True)],
                    [max(v) - m for m, v in zip(middle, values, strict=True)],
                ]
                style: dict[str, Any] = {
                    "linestyle": "--" if "published" in algorithm else "-",
                    "color": colours[algorithm],
                    "label": algorithm,
                }
                if "published" in algorithm:
                    style["markerfacecolor"] = "white"
                axis.errorbar(
                    [e * 1.02 ** (place - 2.5) for e in epsilons],
                    middle,
                    ends,
                    marker="o",
                    capsize=2,
                    **style,
                )
            if measure == "MMD":
                exact = [
                    row["MMD of exact draws"]
                    for row in rows
                    if row["figure"] == "1" and row["model"] == model
                ]
                axis.axhline(
                    statistics.median(exact),
                    color="black",
                    linewidth=0.8,
                    linestyle=":",
                    label="exact draws",
                )
                axis.set(title=model)
            axis.set(xscale="log", yscale="log", ylabel=measure)
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.xaxis.set_major_locator(
                FixedLocator(sorted({row["epsilon"] for row in rows if row["figure"] == "1"}))
            )
            for scale in (axis.xaxis, axis.yaxis):
                scale.set_major_formatter("{x:g}")
                scale.set_minor_locator(NullLocator())
        grid[1, column].set_xlabel(
            "ε at δ = 10⁻⁶, replace one record (median and range of the runs)"
        )
    handles = {
        label: handle
        for axis in grid[0]
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=4, fontsize="small")
    figure.savefig(folder / "dp_hmc.png", dpi=110)
    plt.close(figure)
    _draw_runs(runs, folder / "dp_hmc_runs.png", colours, plt)
    _draw_limits(rows, folder / "dp_hmc_limits.png", colours, plt)


def _draw_runs(runs: Sequence[Run], path: Path, colours: dict[str, Any], plt: Any) -> None:
    """Figure 2."""
    runs = [run for run in runs if run.job["figure"] == "1" and run.job["model"] == "banana"]
    largest = max((max(run.job["epsilons"]) for run in runs), default=0.0)
    runs = [run for run in runs if max(run.job["epsilons"]) == largest]
    shown = [
        algorithm
        for algorithm in ALGORITHMS
        if any(run.job["algorithm"] == algorithm for run in runs)
    ]
    if not shown:
        return
    truth = Problem("banana", 0).draws(40_000).numpy()
    height, first, second = np.histogram2d(truth[:, 0], truth[:, 1], bins=60)
    centres = (first[1:] + first[:-1]) / 2, (second[1:] + second[:-1]) / 2
    figure, grid = plt.subplots(
        3,
        len(shown),
        figsize=(3 * len(shown), 7),
        layout="constrained",
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    for column, algorithm in enumerate(shown):
        ranked = sorted(
            (run for run in runs if run.job["algorithm"] == algorithm),
            key=lambda run: run.result["points"][-1]["MMD"],
        )
        for axis, title, run in zip(
            grid[:, column],
            ("best", "median", "worst"),
            (ranked[0], ranked[len(ranked) // 2], ranked[-1]),
            strict=True,
        ):
            axis.plot(
                *np.array(run.result["draws"]).T,
                ".",
                markersize=3,
                alpha=0.5,
                color=colours[algorithm],
            )
            axis.contour(
                *centres,
                height.T,
                levels=height.max() * np.array([0.05, 0.4]),
                colors="black",
                linewidths=0.8,
            )
            axis.set_title(
                f"{algorithm}\n{title} of {len(ranked)}, MMD {run.result['points'][-1]['MMD']:.3f}",
                fontsize="small",
            )
            axis.set(xlim=(-0.45, 0.6), ylim=(-3.5, 4))
    figure.suptitle(f"banana, ε = {largest:g}", fontsize="medium")
    for axis in grid[-1]:
        axis.set_xlabel("θ₁")
    for axis in grid[:, 0]:
        axis.set_ylabel("θ₂")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_limits(
    rows: Sequence[dict[str, Any]], path: Path, colours: dict[str, Any], plt: Any
) -> None:
    """Figure 3, and acceptance against dimension."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    for axis, model in zip(axes, SETTINGS, strict=False):
        for algorithm in (HMC, PENALTY):
            found = [
                row
                for row in rows
                if row["figure"] == "3" and (row["model"], row["algorithm"]) == (model, algorithm)
            ]
            for mixed in (True, False):
                some = [row for row in found if (row["R-hat"] < 1.05) is mixed]
                style = {
                    "color": colours[algorithm],
                    "markerfacecolor": colours[algorithm] if mixed else "white",
                }
                label = f"{algorithm} without noise, R̂ {'<' if mixed else '≥'} 1.05"
                axis.plot(
                    [row["clipped"] for row in some],
                    [row["MMD"] for row in some],
                    "o",
                    label=label,
                    **style,
                )
        axis.set(
            title=f"{model}: clipping",
            xlabel="share of clipped log-likelihood ratios",
            ylabel="MMD",
            ylim=(0, None),
        )
        axis.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2)
    for algorithm in (HMC, PENALTY):
        found = sorted(
            (row for row in rows if row["figure"] == "dimension" and row["algorithm"] == algorithm),
            key=lambda row: row["dimension"],
        )
        axes[2].plot(
            [row["dimension"] for row in found],
            [row["acceptance"] for row in found],
            "o",
            color=colours[algorithm],
            label=algorithm,
        )
        expected = {row["dimension"]: row["expected"] for row in found}
        axes[2].plot(
            expected.keys(), expected.values(), "-", color=colours[algorithm], label="expected"
        )
    axes[2].set(title="N(θ, I): acceptance", xlabel="dimension", ylim=(0, 1))
    axes[2].legend(fontsize="x-small")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--quick",
        action="store_true",
        help="2000 different records, ε = 2 and 4, 2 repeats, short runs",
    )
    size.add_argument(
        "--full",
        action="store_true",
        help="10 repeats at ε = 2, 4, 6, 8, 10, 12, 15, also of Figure 3",
    )
    parser.add_argument("--repeats", type=positive, help="default: 3")
    parser.add_argument("--epsilons", type=float, nargs="+", help="default: 2 4 8 15")
    parser.add_argument(
        "--records",
        type=int,
        help="different ones among the 100,000; an even divisor. Default: all",
    )
    parser.add_argument(
        "--starts",
        choices=("prior", "truth"),
        default="prior",
        help="truth: around the true parameter, as they did; NOT PRIVATE",
    )
    parser.add_argument(
        "--algorithms",
        choices=ALGORITHMS,
        nargs="+",
        default=ALGORITHMS,
        metavar="NAME",
        help=f"of {', '.join(ALGORITHMS)}",
    )
    parser.add_argument(
        "--figures", choices=FIGURES, nargs="+", default=tuple(FIGURES), help="default: all"
    )
    parser.add_argument(
        "--report",
        action="store_true",
        help="run nothing: tables and pictures of all stored runs with these starts",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=ROOT / "runs" / "reproduce_dp_hmc.jsonl",
        help="finished runs; default: %(default)s",
    )
    parser.add_argument(
        "--workers", type=positive, default=1, help="processes with one thread each; default: 1"
    )
    parser.add_argument("--csv", type=Path, help="write all rows here")
    parser.add_argument("--pictures", type=Path, help="draw the pictures into this folder")
    options = parser.parse_args(arguments)
    options.repeats = options.repeats or (2 if options.quick else 10 if options.full else 3)
    options.epsilons = options.epsilons or (
        [2.0, 4.0]
        if options.quick
        else [2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 15.0]
        if options.full
        else EPSILONS
    )
    options.records = options.records or (2000 if options.quick else NUM_DATA)
    if options.records % 2 or NUM_DATA % options.records:
        parser.error(f"--records must be even and divide {NUM_DATA}")
    for model in SETTINGS:
        for algorithm in options.algorithms:
            # half is dropped, and R̂ halves the rest
            if "1" in options.figures and iterations(model, algorithm, min(options.epsilons)) < 8:
                parser.error(
                    f"ε = {min(options.epsilons):g} does not afford eight iterations of {algorithm}"
                    f" on the {model}: raise it"
                )
    if options.starts == "truth":
        print(
            "Chains start around the true parameter, as in the paper: these runs are not private,"
            " whatever ε says."
        )

    if options.report:
        runs = [
            run
            for run in stored_runs(options.results).values()
            if run.job.get("starts", options.starts) == options.starts
        ]
        if not runs:
            parser.error(f"there are no such runs in {options.results}: leave --report out")
    else:
        runs = run_jobs(run, jobs_of(options), options.results, options.workers)
    counted = accounting(options.epsilons)
    rows = rows_of(runs) + rows_of([Run(row, {}, 0.0, "", "") for row in counted])
    print(
        markdown(
            counted,
            {
                "model": "",
                "algorithm": "",
                "epsilon": "g",
                "theirs": "d",
                "ours": "d",
                "theirs spend": ".2f",
            },
        ),
        end="\n\n",
    )
    print(markdown(summary(rows), COLUMNS), end="\n\n")
    for figure in ("3", "dimension", "variance"):
        found = [row for row in rows if row["figure"] == figure]
        if found:
            print(
                markdown(
                    found,
                    {
                        name: "" if isinstance(value, str | bool) else ".4g"
                        for name, value in found[0].items()
                    },
                ),
                end="\n\n",
            )
    print(origin(runs, arguments))
    if options.csv:
        write_csv(rows, options.csv)
    if options.pictures:
        draw(rows, runs, options.pictures)
    return rows


if __name__ == "__main__":
    main()
