"""The penalty algorithm under privacy (Yildirim 2016; Yildirim and Ermis 2019): what it affords,
what it accepts, and for how many owners.

    reproduce_penalty.py --quick       # few repeats, a minute
    reproduce_penalty.py               # the figures of docs/reproductions

The model is theirs: n coin tosses, three tenths of them heads, with a Beta(2, 2) prior; the chain
moves in the log odds, where one record's log-likelihood ratio is at most the distance of the move
(log_ratio_slope = 1, nothing is ever clipped). Neighbours replace one record. σ is the standard
deviation of all noise in a log ratio, at the root mean square distance of the proposals. Chains
start at a draw from the posterior, which no user has, so that every state has the law that the
chain should keep.

"theirs" is accounting as in their Theorem 1: the classical Gaussian mechanism for an iteration,
advanced composition, and half of δ for each. "exact" is the library's: k full-batch Gaussians are
one. "statistics" is ExponentialFamilyPenalty on x − 1/2, whose norm is 1/2. J owners run one chain;
each adds noise, so that the sum has √J times the noise of one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from numpy.typing import NDArray
from reproduction import (
    Panel,
    Row,
    columns,
    digest,
    finish,
    grouped,
    having,
    mean_and_error,
    one_of,
    parser_of,
)
from scipy.special import log_ndtr
from scipy.stats import beta
from torch import Tensor

import torch_dpbayes as dpb
from torch_dpbayes.accounting.bounds import largest
from torch_dpbayes.accounting.events import GaussianDpEvent
from torch_dpbayes.mcmc import DPPenalty, ExponentialFamilyPenalty
from torch_dpbayes.mcmc.kernel import PrivateKernel

Array = NDArray[np.float64]

EPSILON, DELTA = 1.0, 1e-6
HEADS, PRIOR = 0.3, 2.0
# where acceptance is measured, and where the proposals of all powers α have a posterior standard
# deviation
RECORDS = 1000
BEST = 2.4  # σ at which small steps go farthest for their cost
KERNELS = {"ratios": 1.0, "statistics": 0.5}  # clip bound for each unit of distance
POWERS = (0.5, 0.75, 1.0)
OWNERS = (1, 2, 3, 5, 10)


# -- the model -------------------------------------------------------------------------------------


def prior() -> Tensor:
    shape = torch.tensor(PRIOR, dtype=torch.float64)
    return pyro.sample("chance", dist.Beta(shape, shape))


def tosses(x: Tensor) -> None:
    chance = prior()
    with pyro.plate("data", len(x)):
        pyro.sample("x", dist.Bernoulli(chance), obs=x)


def data(num_data: int) -> Tensor:
    x = torch.zeros(num_data, dtype=torch.float64)
    x[: round(HEADS * num_data)] = 1
    return x


def posterior(num_data: int) -> Any:
    heads = round(HEADS * num_data)
    return beta(PRIOR + heads, PRIOR + num_data - heads)


def log_odds(chance: Array) -> Array:
    return np.log(chance) - np.log1p(-chance)


def log_posterior(odds: Array, num_data: int) -> Array:
    """In the space of log odds, up to a constant."""
    heads = round(HEADS * num_data)
    return (PRIOR + heads) * odds - (2 * PRIOR + num_data) * np.logaddexp(0, odds)


def on_grid(num_data: int, points: int = 801) -> tuple[Array, Array]:
    """Log odds, and what probability the posterior gives to each."""
    law = posterior(num_data)
    center = float(log_odds(np.array(law.mean())))
    spread = float(law.std() / (law.mean() * (1 - law.mean())))
    odds = center + spread * np.linspace(-9, 9, points)
    log_density = log_posterior(odds, num_data)
    density = np.exp(log_density - log_density.max())
    return odds, density / density.sum()


def posterior_moments(num_data: int) -> tuple[float, float]:
    """Mean and standard deviation of the log odds."""
    odds, density = on_grid(num_data, 4001)
    mean = float((odds * density).sum())
    return mean, math.sqrt(float(((odds - mean) ** 2 * density).sum()))


def kernel_for(
    name: str, noise_multiplier: float, scale: float, accountant: dpb.PrivacyAccountant
) -> PrivateKernel:
    common: Row = {
        "noise_multiplier": noise_multiplier,
        "proposal_scale": scale,
        "accountant": accountant,
        "target_accept_prob": None,
    }
    if name == "ratios":
        return DPPenalty(tosses, log_ratio_slope=KERNELS[name], **common)

    def normalizer(values: dict[str, Tensor]) -> Tensor:
        """log(1 + e^η) − η/2, as the statistic is x − 1/2."""
        return -torch.log1p(-values["chance"]) - torch.logit(values["chance"]) / 2

    return ExponentialFamilyPenalty(
        prior,
        sufficient_statistics=lambda x: x - 0.5,
        natural_parameters=lambda values: torch.logit(values["chance"]).reshape(1),
        log_normalizer=normalizer,
        max_statistic_norm=KERNELS[name],
        **common,
    )


# -- what theory says ------------------------------------------------------------------------------


def accepted(ratio: Array, std: Array) -> Array:
    """E min(1, e^(r + sξ − s²/2)) = Φ(r/s − s/2) + e^r Φ(−r/s − s/2) for the log posterior
    ratio r and noise of standard deviation s.
    """
    return np.exp(log_ndtr(ratio / std - std / 2)) + np.exp(
        ratio + log_ndtr(-ratio / std - std / 2)
    )


def expected(num_data: int, sigma: float, scale: float) -> tuple[float, float]:
    """Rate of acceptance in the end, and the mean squared distance moved by an iteration, by
    quadrature.
    """
    odds, density = on_grid(num_data)
    half, legendre = np.polynomial.legendre.leggauss(60)
    # the integrand has a kink at 0
    nodes = np.concatenate([-4.5 * (1 + half), 4.5 * (1 + half)])
    weights = np.tile(legendre, 2) * np.exp(-(nodes**2) / 2)
    move = scale * nodes
    ratio = log_posterior(odds[:, None] + move, num_data) - log_posterior(odds, num_data)[:, None]
    by_step = (density @ accepted(ratio, sigma * np.abs(nodes))) * weights / weights.sum()
    return float(by_step.sum()), float((by_step * move**2).sum())


def multiplier(name: str, sigma: float, scale: float) -> float:
    """Noise multiplier at which σ is the noise's standard deviation at distance ``scale``."""
    return sigma / (KERNELS[name] * scale)


def affordable(noise_multiplier: float) -> int:
    """Iterations by the library's accounting."""
    accountant = dpb.PrivacyAccountant(EPSILON, DELTA, neighboring="replace_one")
    return int(accountant.remaining(GaussianDpEvent(noise_multiplier)))


def advanced_composition(noise_multiplier: float, count: int) -> float:
    """ε of so many iterations by Dwork and Roth (2014), Theorems A.1 and 3.20."""
    each = 2 / noise_multiplier * math.sqrt(2 * math.log(1.25 * count / (DELTA / 2)))
    if each > 1:
        return math.inf  # the classical bound holds up to 1
    return each * math.sqrt(2 * count * math.log(2 / DELTA)) + count * each * math.expm1(each)


def affordable_by_advanced_composition(noise_multiplier: float) -> int:
    return largest(lambda count: advanced_composition(noise_multiplier, count) - EPSILON)


# -- runs ------------------------------------------------------------------------------------------


def proposal(records: int, power: float) -> float:
    return posterior_moments(RECORDS)[1] * (records / RECORDS) ** -power


def run_affordable(records: int, power: float) -> Row:
    """Iterations at σ = 2.4 with proposals ∝ n^−α, and how far they go together, in posterior
    variances.
    """
    scale = proposal(records, power)
    noise = multiplier("ratios", BEST, scale)
    exact, theirs = affordable(noise), affordable_by_advanced_composition(noise)
    reach = expected(records, BEST, scale)[1] / posterior_moments(records)[1] ** 2
    return {"exact": exact, "theirs": theirs, "reach, exact": exact * reach}


def run_owners(owners: int, records: int) -> Row:
    """Iterations at ε = 1 of each, with σ = 2.4 together."""
    noise = multiplier("ratios", BEST, posterior_moments(records)[1]) / math.sqrt(owners)
    return {"iterations": affordable(noise)}


def run_acceptance(kernel: str, sigma: float, scale: float, chains: int, length: int) -> Row:
    """``scale`` in posterior standard deviations."""
    mean, spread = posterior_moments(RECORDS)
    accountant = dpb.PrivacyAccountant(neighboring="replace_one")
    noise = multiplier(kernel, sigma, scale * spread)
    chain = kernel_for(kernel, noise, scale * spread, accountant)
    found = measured(paths(chain, data(RECORDS), chains, length), mean, spread)
    rate, squared = expected(RECORDS, sigma, scale * spread)
    return found | {"expected acceptance": rate, "expected squared move": squared / spread**2}


def paths(kernel: PrivateKernel, x: Tensor, chains: int, length: int) -> list[Array]:
    """Log odds of ``chains`` chains, each from a draw of the posterior."""
    found = []
    starts = log_odds(posterior(len(x)).rvs(chains, random_state=np.random.default_rng()))
    for start in starts.tolist():
        params = {"chance": torch.tensor(start, dtype=torch.float64)}
        if not found:
            kernel.initial_params = params
            kernel.setup(0, x)
        states = [start]
        for _ in range(length):
            params = kernel.sample(params)
            states.append(float(params["chance"]))
        found.append(np.array(states))
    kernel.cleanup()
    return found


def measured(found: Sequence[Array], mean: float, spread: float) -> Row:
    """Averages over independent chains, with their standard errors."""
    moves = [np.diff(path) / spread for path in found]
    white = [(path[1:] - mean) / spread for path in found]
    values = {
        "acceptance": [float((move != 0).mean()) for move in moves],
        "squared move": [float((move**2).mean()) for move in moves],
        "second moment": [float((path**2).mean()) for path in white],
        "squared error of the mean": [float(path.mean()) ** 2 for path in white],
    }
    row: Row = {}
    for name, some in values.items():
        row[name], row[f"{name}, error"] = mean_and_error(some)
    return row


def run_chain(kernel: str, records: int, power: float, chains: int) -> Row:
    """All iterations that ε = 1 affords at σ = 2.4, by several chains with a budget each."""
    mean, spread = posterior_moments(records)
    scale = proposal(records, power)
    noise = multiplier(kernel, BEST, scale)
    length = affordable(noise)
    found: list[Array] = []
    for _ in range(chains):
        accountant = dpb.PrivacyAccountant(EPSILON, DELTA, neighboring="replace_one")
        found += paths(kernel_for(kernel, noise, scale, accountant), data(records), 1, length)
    row = measured(found, mean, spread) | {"iterations": length}
    return row | {"epsilon": accountant.get_epsilon(DELTA)}


run = one_of(run_affordable, run_owners, run_acceptance, run_chain)
SCALES = (0.1, 1.0)  # of the proposals, in posterior standard deviations


def jobs(quick: bool) -> list[Row]:
    found: list[Row] = [
        {"what": "affordable", "records": round(1000 * 10 ** (step / 2)), "power": power}
        for power, step in product(POWERS, range(9))
    ]
    found += [{"what": "owners", "owners": owners, "records": 100_000} for owners in OWNERS]
    sigmas = (0.6, 2.4, 4.8) if quick else (0.3, 0.6, 1.2, 1.8, 2.4, 3.0, 3.6, 4.8)
    for kernel, scale, sigma in product(KERNELS, SCALES, sigmas):
        job = {"what": "acceptance", "kernel": kernel, "scale": scale}
        found.append(job | {"sigma": sigma, "chains": 20, "length": 200 if quick else 250})
    chains = {10_000: 6} if quick else {10_000: 20, 30_000: 8, 100_000: 4}
    for (records, count), kernel in product(chains.items(), KERNELS):
        job = {"what": "chain", "kernel": kernel, "records": records}
        found.append(job | {"power": 0.5, "chains": count})
    settings = digest(target=(EPSILON, DELTA, BEST), model=(HEADS, PRIOR, RECORDS), kernels=KERNELS)
    return [job | {"settings": settings} for job in found]


# -- tables and picture ----------------------------------------------------------------------------


TABLES = {
    "affordable": f"Iterations at ε = {EPSILON:g}, δ = {DELTA:g}, σ = {BEST}; how far they go",
    "owners": f"Iterations at ε = {EPSILON:g} of each owner, σ = {BEST} together",
    "acceptance": "Acceptance, and by quadrature",
    "chain": f"All that ε = {EPSILON:g} affords, σ = {BEST}: errors in posterior variances",
}


def tables(rows: list[Row]) -> Mapping[str, Sequence[Row]]:
    found = {}
    for what, caption in TABLES.items():
        hidden = ["what", "settings", "chains", "length"]
        hidden += [] if what == "affordable" else ["power"]
        some = having(rows, what=what)
        found[caption] = [{k: v for k, v in row.items() if k not in hidden} for row in some]
    return found


def panels(rows: list[Row]) -> list[Panel]:
    def by(what: str, x: str, *y: str, **values: Any) -> dict[str, list[Any]]:
        some = grouped(having(rows, what=what, **values), "kernel", "scale")
        return {
            ", ".join(str(part) for part in key if part is not None): columns(part, x, *y)
            for key, part in some.items()
        }

    affords, acceptance = {}, by("acceptance", "sigma", "acceptance", "acceptance, error")
    for (power,), some in grouped(having(rows, what="affordable"), "power").items():
        affords[f"exact, proposals ∝ n^-{power:g}"] = columns(some, "records", "exact")
        affords[f"theirs, ∝ n^-{power:g}"] = columns(some, "records", "theirs")
    for label, line in by("acceptance", "sigma", "expected acceptance", kernel="ratios").items():
        acceptance[f"{label}: theory"] = line
    error = by("chain", "records", "squared error of the mean", "squared error of the mean, error")
    owners = {"iterations": columns(having(rows, what="owners"), "owners", "iterations")}
    return [
        Panel(f"iterations at ε = {EPSILON:g}, σ = {BEST}", "records", "", affords),
        Panel("acceptance", "σ", "", acceptance, ""),
        Panel("iterations of J owners", "owners", "", owners),
        Panel("squared error, posterior variances", "records", "", error),
    ]


def main(arguments: list[str] | None = None) -> list[Row]:
    options = parser_of(__doc__, "reproduce_penalty").parse_args(arguments)
    return finish(options, run, jobs(options.quick), tables=tables, panels=panels)


if __name__ == "__main__":
    main()
