"""The penalty algorithm under privacy (Yildirim 2016; Yildirim and Ermis 2019): what it affords,
what it accepts, and for how many owners.

    reproduce_penalty.py --quick       # few repeats, two or three minutes
    reproduce_penalty.py --full        # the figures of docs/reproductions
    reproduce_penalty.py --full --csv FILE --picture FILE

The model is theirs: n coin tosses, three tenths of them heads, with a Beta(2, 2) prior; the chain
moves in the log odds, where one record's log-likelihood ratio is at most the distance of the move
(log_ratio_slope = 1, nothing is ever clipped). Neighbours replace one record. σ is the standard
deviation of all noise in a log ratio, at the root mean square distance of the proposals. Chains
start at a draw from the posterior, as no user could, so that every state has the law that the chain
should keep.

"theirs" is accounting of the kind of their Theorem 1, the classical Gaussian mechanism for an
iteration and advanced composition, δ halved between them; "exact" is the library's, in which k
full-batch Gaussians are one. "statistics" is ExponentialFamilyPenalty on x − 1/2, whose norm is
1/2.
"""

from __future__ import annotations

import math
import queue
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import reproduction
import torch
from numpy.typing import NDArray
from reproduction import Rows
from scipy.optimize import brentq, minimize_scalar
from scipy.special import log_ndtr, ndtr
from scipy.stats import beta, chi
from torch import Tensor

import torch_dpbayes as dpb
from torch_dpbayes.accounting.events import GaussianDpEvent, NoOpDpEvent
from torch_dpbayes.mcmc import DPPenalty, ExponentialFamilyPenalty, plan
from torch_dpbayes.mcmc.kernel import PrivateKernel

Array = NDArray[np.float64]

EPSILON, DELTA = 1.0, 1e-6
HEADS, PRIOR = 0.3, 2.0
MANY = 100_000  # for the accounting of many owners
# where acceptance is measured, and where the proposals of all powers α have a posterior standard
# deviation
RECORDS = 1000
BEST = 2.4  # σ at which small steps go farthest for their cost
KERNELS = {"ratios": 1.0, "statistics": 0.5}  # clip bound for each unit of distance
POWERS = (0.5, 0.75, 1.0)


# -- the model -------------------------------------------------------------------------------------


def prior() -> Tensor:
    shape = torch.tensor(PRIOR, dtype=torch.float64)
    value: Tensor = pyro.sample("chance", dist.Beta(shape, shape))
    return value


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


def posterior_moments(num_data: int) -> tuple[float, float]:
    """Mean and standard deviation of the log odds."""
    odds, density = on_grid(num_data)
    mean = float((odds * density).sum())
    return mean, math.sqrt(float(((odds - mean) ** 2 * density).sum()))


def on_grid(num_data: int, points: int = 4001, gap: float | None = None) -> tuple[Array, Array]:
    """Log odds, ``gap`` apart or so many, and what probability the posterior gives to each."""
    law = posterior(num_data)
    center, spread = (
        float(log_odds(np.array(law.mean()))),
        float(law.std() / (law.mean() * (1 - law.mean()))),
    )
    odds = center + (
        spread * np.linspace(-9, 9, points)
        if gap is None
        else np.arange(-9 * spread, 9 * spread, gap)
    )
    log_density = log_posterior(odds, num_data)
    density = np.exp(log_density - log_density.max())
    return odds, density / density.sum()


def log_posterior(odds: Array, num_data: int) -> Array:
    """In the space of log odds, up to a constant."""
    heads = round(HEADS * num_data)
    found: Array = (PRIOR + heads) * odds - (2 * PRIOR + num_data) * np.logaddexp(0, odds)
    return found


class FixedLength:
    """One step up or down, which looks at no data."""

    event = NoOpDpEvent()

    def __init__(self, length: float) -> None:
        self._length, self._random = length, np.random.default_rng()

    def propose(self, params: dict[str, Tensor]) -> tuple[dict[str, Tensor], float]:
        return {
            "chance": params["chance"] + self._length * float(self._random.choice((-1, 1)))
        }, 0.0


def kernel_for(
    name: str,
    noise_multiplier: float,
    scale: float,
    accountant: dpb.PrivacyAccountant,
    steps: str = "Gaussian",
) -> PrivateKernel:
    common: dict[str, Any] = {
        "noise_multiplier": noise_multiplier,
        "target_accept_prob": None,
        "accountant": accountant,
    }
    common |= {"proposal_scale": scale} if steps == "Gaussian" else {"proposal": FixedLength(scale)}
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
    found: Array = np.exp(log_ndtr(ratio / std - std / 2)) + np.exp(
        ratio + log_ndtr(-ratio / std - std / 2)
    )
    return found


def expected(
    num_data: int, sigma: float, scale: float, steps: str = "Gaussian"
) -> tuple[float, float]:
    """Rate of acceptance in the end, and the mean squared distance moved by an iteration, by
    quadrature.
    """
    odds, density = on_grid(num_data, 801)
    if steps == "Gaussian":
        half, legendre = np.polynomial.legendre.leggauss(60)
        # the integrand has a kink at 0
        nodes = np.concatenate([-4.5 * (1 + half), 4.5 * (1 + half)])
        weights = np.tile(legendre, 2) * np.exp(-(nodes**2) / 2)
    else:
        nodes, weights = np.array([-1.0, 1.0]), np.ones(2)
    move = scale * nodes
    ratio = log_posterior(odds[:, None] + move, num_data) - log_posterior(odds, num_data)[:, None]
    by_step = (density @ accepted(ratio, sigma * np.abs(nodes))) * weights / weights.sum()
    return float(by_step.sum()), float((by_step * move**2).sum())


def spread_of_averages(
    num_data: int, sigma: float, scale: float, length: int, steps: str = "Gaussian"
) -> tuple[float, float, float]:
    """Variances of averages over a stationary chain: of θ, the log odds in posterior standard
    deviations from their mean, of θ² and of acceptances.

    From the chain's eigenvalues on a grid: those of a reversible kernel are real, and Cov(f_0, f_t)
    = Σ_j c_j² λ_j^t. Accepted moves are as reversible, so that the acceptances of two iterations t
    apart have Cov(a_0, a_(t−1)), a the rate of acceptance by state. With steps of one length the
    grid is one of the lattices that a chain can be on, which hardly differ up to steps of a
    standard deviation or two.
    """
    odds, density = on_grid(num_data, 801) if steps == "Gaussian" else on_grid(num_data, gap=scale)
    mean, spread = posterior_moments(num_data)
    distance = np.abs(odds[:, None] - odds)
    if steps == "Gaussian":
        proposed = (
            np.exp(-((distance / scale) ** 2) / 2)
            * (odds[1] - odds[0])
            / (scale * math.sqrt(2 * math.pi))
        )
    else:
        proposed = np.where(np.abs(distance / scale - 1) < 0.5, 0.5, 0.0)
    np.fill_diagonal(distance, scale)  # any: a move of no length is always accepted
    log_target = log_posterior(odds, num_data)
    kernel = proposed * accepted(log_target - log_target[:, None], sigma * distance / scale)
    np.fill_diagonal(kernel, np.diag(proposed))
    rates = kernel.sum(axis=1)
    kernel += np.diag(1 - rates)
    root = np.sqrt(density)
    symmetric = root[:, None] * kernel / root
    values, vectors = np.linalg.eigh((symmetric + symmetric.T) / 2)
    values, vectors = values[:-1], vectors[:, :-1]  # the last is the stationary law
    slow = 1 - values
    later = 2 * (length * slow - 1 + values**length) / slow**2  # 2 Σ_t (length − t) λ^(t−1)
    white, rate = (odds - mean) / spread, float(density @ rates)
    first, second, left = (((root * f) @ vectors) ** 2 for f in (white, white**2, rates))
    sums = (
        first @ (length + values * later),
        second @ (length + values * later),
        length * rate * (1 - rate) + left @ later,
    )
    of_mean, of_square, of_acceptance = (float(variance) / length**2 for variance in sums)
    return of_mean, of_square, of_acceptance


def multiplier(name: str, sigma: float, scale: float) -> float:
    """Noise multiplier at which σ is the noise's standard deviation at distance ``scale``."""
    return sigma / (KERNELS[name] * scale)


def affordable(noise_multiplier: float) -> int:
    """Iterations by the library's accounting."""
    planned = plan(
        DPPenalty,
        target_epsilon=EPSILON,
        target_delta=DELTA,
        noise_multiplier=noise_multiplier,
        neighboring="replace_one",
    )
    return planned.num_iterations


def advanced_composition(noise_multiplier: float, count: int) -> float:
    """ε of so many iterations by Dwork and Roth (2014), Theorems A.1 and 3.20."""
    each = 2 / noise_multiplier * math.sqrt(2 * math.log(1.25 * count / (DELTA / 2)))
    if each > 1:
        return math.inf  # the classical bound holds up to 1
    return each * math.sqrt(2 * count * math.log(2 / DELTA)) + count * each * math.expm1(each)


def affordable_by_advanced_composition(noise_multiplier: float) -> int:
    low, high = 0, 1
    while advanced_composition(noise_multiplier, high) <= EPSILON:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (
            (middle, high)
            if advanced_composition(noise_multiplier, middle) <= EPSILON
            else (low, middle)
        )
    return low


def noise_by_advanced_composition(count: int) -> float:
    """Noise multiplier at which so many iterations are affordable."""
    least = 2 * math.sqrt(2 * math.log(1.25 * count / (DELTA / 2))) * (1 + 1e-9)
    return float(
        brentq(
            lambda noise: math.log(advanced_composition(noise, count) / EPSILON),
            least,
            100 * least * math.sqrt(count),
        )
    )


# -- runs ------------------------------------------------------------------------------------------


def run(what: str, settings: str, **arguments: Any) -> dict[str, Any]:
    """One finished row of the CSV; ``settings`` tell runs apart only."""
    return RUNS[what](**arguments)


def run_affordable(records: int, power: float) -> dict[str, Any]:
    """Iterations at σ = 2.4 with proposals ∝ n^−α, and how far they go together, in posterior
    variances; the noise that theirs takes for as many.
    """
    scale = proposal(records, power)
    noise = multiplier("ratios", BEST, scale)
    exact, theirs = affordable(noise), affordable_by_advanced_composition(noise)
    _, squared = expected(records, BEST, scale)
    reach = squared / posterior_moments(records)[1] ** 2
    row = {
        "exact": exact,
        "theirs": theirs,
        "reach, exact": exact * reach,
        "reach, theirs": theirs * reach,
    }
    return row | {"noise, theirs / exact": noise_by_advanced_composition(exact) / noise}


def proposal(records: int, power: float) -> float:
    return posterior_moments(RECORDS)[1] * (records / RECORDS) ** -power


def run_acceptance(
    kernel: str, steps: str, sigma: float, scale: float, chains: int, length: int
) -> dict[str, Any]:
    """``scale`` in posterior standard deviations."""
    mean, spread = posterior_moments(RECORDS)
    accountant = dpb.PrivacyAccountant(neighboring="replace_one")
    chain = kernel_for(
        kernel, multiplier(kernel, sigma, scale * spread), scale * spread, accountant, steps
    )
    found = list(paths(chain, data(RECORDS), chains, length))
    rate, squared = expected(RECORDS, sigma, scale * spread, steps)
    _, moment_variance, rate_variance = spread_of_averages(
        RECORDS, sigma, scale * spread, length, steps
    )
    return measured(found, mean, spread) | {
        "expected acceptance": rate,
        "acceptance, expected error": math.sqrt(rate_variance / chains),
        "expected squared move": squared / spread**2,
        "second moment, expected error": math.sqrt(moment_variance / chains),
    }


def paths(kernel: PrivateKernel, x: Tensor, chains: int, length: int) -> Iterator[Array]:
    """Log odds of ``chains`` chains, each from a draw of the posterior."""
    starts = log_odds(posterior(len(x)).rvs(chains, random_state=np.random.default_rng()))
    for start in starts.tolist():
        params = {"chance": torch.tensor(start, dtype=torch.float64)}
        if start == starts[0]:
            kernel.initial_params = params
            kernel.setup(0, x)
        states = [start]
        for _ in range(length):
            params = kernel.sample(params)
            states.append(float(params["chance"]))
        yield np.array(states)
    kernel.cleanup()


def measured(found: Sequence[Array], mean: float, spread: float) -> dict[str, Any]:
    """Averages over independent chains, with their standard errors."""

    def average(name: str, values: Sequence[float]) -> dict[str, float]:
        return {
            name: statistics.fmean(values),
            f"{name}, error": (
                statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
            ),
        }

    moves = [np.diff(path) / spread for path in found]
    white = [(path[1:] - mean) / spread for path in found]
    return {
        **average("acceptance", [float((move != 0).mean()) for move in moves]),
        **average("squared move", [float((move**2).mean()) for move in moves]),
        **average("second moment", [float((path**2).mean()) for path in white]),
        **average("squared error of the mean", [float(path.mean()) ** 2 for path in white]),
    }


def run_chain(kernel: str, records: int, power: float, chains: int) -> dict[str, Any]:
    """All iterations that ε = 1 affords at σ = 2.4, by several chains with a budget each."""
    mean, spread = posterior_moments(records)
    scale = proposal(records, power)
    noise = multiplier(kernel, BEST, scale)
    length = affordable(noise)
    found: list[Array] = []
    spent: list[float] = []
    for _ in range(chains):
        accountant = dpb.PrivacyAccountant(EPSILON, DELTA, neighboring="replace_one")
        chain = kernel_for(kernel, noise, scale, accountant)
        found += paths(chain, data(records), 1, length)
        spent.append(accountant.get_epsilon(DELTA))
        assert accountant.remaining(GaussianDpEvent(noise)) == 0
    row = measured(found, mean, spread) | {"iterations": length, "epsilon": max(spent)}
    return row | {"expected squared error": spread_of_averages(records, BEST, scale, length)[0]}


def run_error(kernel: str, records: int, power: float) -> dict[str, Any]:
    """What ``run_chain`` should find."""
    scale = proposal(records, power)
    length = affordable(multiplier(kernel, BEST, scale))
    return {
        "iterations": length,
        "expected squared error": spread_of_averages(records, BEST, scale, length)[0],
    }


def run_seconds(kernel: str, records: int, length: int) -> dict[str, Any]:
    """Median of the processor's time, which does not count what else the machine does."""
    spread = posterior_moments(records)[1]
    chain = kernel_for(
        kernel,
        multiplier(kernel, BEST, spread),
        spread,
        dpb.PrivacyAccountant(neighboring="replace_one"),
    )
    params = {"chance": torch.tensor(posterior_moments(records)[0], dtype=torch.float64)}
    chain.initial_params = params
    chain.setup(0, data(records))
    times = []
    for _ in range(length):
        start = time.thread_time()
        params = chain.sample(params)
        times.append(time.thread_time() - start)
    return {"seconds an iteration": statistics.median(times)}


def run_owners(owners: int, own_sigma: float, length: int) -> dict[str, Any]:
    """MultiOwnerPenalty in as many processes, each with its share of the records and its own
    accountant.
    """
    spread = posterior_moments(RECORDS)[1]
    # forks of a server that has imported what takes seconds, and runs no threads
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch_dpbayes.mcmc"])
    start = float(log_odds(posterior(RECORDS).rvs(random_state=np.random.default_rng())))
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        shared = (owners, own_sigma, spread, start, length, f"file://{folder}/meeting", results)
        processes = [
            context.Process(target=_own, args=(rank, *shared), daemon=True)
            for rank in range(owners)
        ]
        for process in processes:
            process.start()
        try:
            path, epsilon = _result(results, processes)
            for process in processes:
                process.join(60)
        finally:
            for process in processes:
                process.kill()
    # acceptances hang together over some iterations
    batches = np.array_split(np.diff(np.array(path)) != 0, 20)
    rates = [float(batch.mean()) for batch in batches]
    sigma = own_sigma * math.sqrt(owners)
    rate, _ = expected(RECORDS, sigma, spread)
    return {
        "acceptance": statistics.fmean(rates),
        "acceptance, error": statistics.stdev(rates) / math.sqrt(len(rates)),
        "expected acceptance": rate,
        "acceptance, expected error": math.sqrt(
            spread_of_averages(RECORDS, sigma, spread, length)[2]
        ),
        "epsilon of each owner": epsilon,
        "iterations": affordable(
            multiplier("ratios", BEST, posterior_moments(MANY)[1]) / math.sqrt(owners)
        ),
    }


def _result(results: Any, processes: Sequence[Any]) -> Any:
    """What the first owner found; an error as soon as one has failed, of which the others
    hear within minutes.
    """
    while True:
        try:
            return results.get(timeout=1)
        except queue.Empty:
            if any(process.exitcode for process in processes):
                raise RuntimeError("the process of an owner failed, see above") from None


def _own(
    rank: int,
    owners: int,
    own_sigma: float,
    scale: float,
    start: float,
    length: int,
    meeting: str,
    results: Any,
) -> None:
    from torch_dpbayes.mcmc.multi_owner import MultiOwnerPenalty

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=owners, timeout=timedelta(minutes=5)
    )
    accountant = dpb.PrivacyAccountant(neighboring="replace_one")
    noise = multiplier("ratios", own_sigma, scale)
    kernel = MultiOwnerPenalty(
        tosses,
        proposal_scale=scale,
        log_ratio_slope=1.0,
        noise_multiplier=noise,
        accountant=accountant,
        target_accept_prob=None,
    )
    params = {"chance": torch.tensor(start, dtype=torch.float64)}
    kernel.initial_params = params
    kernel.setup(0, data(RECORDS)[rank::owners])
    path = [start]
    for _ in range(length):
        params = kernel.sample(params)
        path.append(float(params["chance"]))
    kernel.cleanup()
    if rank == 0:
        results.put((path, accountant.get_epsilon(DELTA)))
    torch.distributed.destroy_process_group()


RUNS: dict[str, Callable[..., dict[str, Any]]] = {
    "affordable": run_affordable,
    "acceptance": run_acceptance,
    "chain": run_chain,
    "error": run_error,
    "seconds": run_seconds,
    "owners": run_owners,
}


# law of the proposals and their scale in posterior standard deviations
STEPS = (("Gaussian", 0.1), ("Gaussian", 1.0), ("fixed", 0.1))
OWN_SIGMA = 1.0


def jobs(full: bool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for power in POWERS:
        for records in [round(1000 * 10 ** (step / 2)) for step in range(9)]:
            found.append({"what": "affordable", "records": records, "power": power})
    for kernel in KERNELS:
        for records in (1_000, 10_000, 100_000, 1_000_000) if full else (1_000, 1_000_000):
            found.append(
                {
                    "what": "seconds",
                    "kernel": kernel,
                    "records": records,
                    "length": 200 if full else 50,
                }
            )
        for records in (3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000):
            found.append({"what": "error", "kernel": kernel, "records": records, "power": 0.5})
    for kernel in KERNELS:
        for steps, scale in STEPS:
            for sigma in (0.3, 0.6, 1.2, 1.8, 2.4, 3.0, 3.6, 4.8) if full else (0.6, 2.4, 4.8):
                size = {"chains": 20, "length": 250 if full else 200}
                found.append(
                    {
                        "what": "acceptance",
                        "kernel": kernel,
                        "steps": steps,
                        "sigma": sigma,
                        "scale": scale,
                        **size,
                    }
                )
    chains = {10_000: 20, 30_000: 8, 100_000: 4} if full else {10_000: 6, 20_000: 6}
    for records, count in chains.items():
        for kernel in KERNELS:
            found.append(
                {
                    "what": "chain",
                    "kernel": kernel,
                    "records": records,
                    "power": 0.5,
                    "chains": count,
                }
            )
    for owners in (1, 2, 3, 5, 10) if full else (1, 3):
        length = (500 if owners > 5 else 2000) if full else {1: 2000, 3: 7000}[owners]
        found.append({"what": "owners", "owners": owners, "own_sigma": OWN_SIGMA, "length": length})
    settings = reproduction.digest(
        epsilon=EPSILON,
        delta=DELTA,
        heads=HEADS,
        prior=PRIOR,
        many=MANY,
        records=RECORDS,
        best=BEST,
        kernels=KERNELS,
    )
    return [{**job, "settings": settings} for job in found]


# -- tables and picture ----------------------------------------------------------------------------


def small_steps(sigma: float, dimension: int | None) -> tuple[float, float]:
    """Acceptance of small Gaussian steps in so many dimensions (None: steps of one length), and how
    far they go for their cost, which is 1/z²: σ²·E[length²·2Φ(−σ·length/2)], the root mean square
    length 1.
    """
    length = (
        np.ones(1)
        if dimension is None
        else chi.ppf((np.arange(20_000) + 0.5) / 20_000, dimension) / math.sqrt(dimension)
    )
    rate = 2 * ndtr(-sigma * length / 2)
    return float(rate.mean()), sigma**2 * float((length**2 * rate).mean())


def best_sigma(dimension: int | None) -> float:
    """σ at which small steps go farthest for their cost."""
    return float(
        minimize_scalar(
            lambda sigma: -small_steps(sigma, dimension)[1], bounds=(0.5, 8.0), method="bounded"
        ).x
    )


def tuning_table() -> list[dict[str, Any]]:
    """By dimension: the best σ, its acceptance, and what the kernels' default acceptance goes
    for.
    """
    default, top = 0.23, small_steps(best_sigma(None), None)[1]
    lines = []
    for dimension in (1, 2, 3, 5, 10, 30, None):
        best = best_sigma(dimension)
        rate, distance = small_steps(best, dimension)
        adapted = small_steps(
            float(brentq(lambda sigma, d=dimension: small_steps(sigma, d)[0] - default, 0.5, 20)),
            dimension,
        )[1]
        line = {
            "steps": "of one length" if dimension is None else f"Gaussian, d = {dimension}",
            "best σ": best,
            "acceptance": rate,
        }
        lines.append(
            line | {"squared distance": distance / top, f"at acceptance {default:g}": adapted / top}
        )
    return lines


def affordable_table(rows: Rows) -> list[dict[str, Any]]:
    lines = []
    for power in POWERS:
        found = rows.of("affordable", power=power)
        line: dict[str, Any] = {"α": f"{power:g}"}
        for records in (100_000, 1_000_000, 10_000_000):
            (row,) = rows.of("affordable", power=power, records=records)
            line[f"n = {records:,}"] = f"{row['exact']:,} / {row['theirs']:,}"
            line[f"ratio, n = {records:,}"] = (
                row["exact"] / row["theirs"] if row["theirs"] else math.inf
            )
            line[f"noise, n = {records:,}"] = row["noise, theirs / exact"]
        possible = Rows(row for row in found if row["theirs"] >= 10)
        line["exact ∝ n^"], line["theirs ∝ n^"] = (
            found.slope("records", "exact"),
            possible.slope("records", "theirs"),
        )
        line["distance ∝ n^"] = found.slope("records", "reach, exact")
        lines.append(line)
    return lines


def acceptance_table(rows: Rows) -> list[dict[str, Any]]:
    """By kernel and kind of step: measured and expected acceptance against σ."""
    lines = []
    for steps, scale in STEPS:
        for kernel in KERNELS:
            line: dict[str, Any] = {"steps": f"{steps}, {scale:g} sd", "kernel": kernel}
            found = rows.of("acceptance", kernel=kernel, steps=steps, scale=scale)
            for row in found:
                line[f"σ = {row['sigma']:g}"] = (
                    f"{row['acceptance']:.3f} ± {row['acceptance, error']:.3f}"
                    f" ({row['expected acceptance']:.3f})"
                )
            moments = [f"{row['second moment']:.2f}" for row in found]
            line["E θ²"] = f"{min(moments)} to {max(moments)}"
            lines.append(line)
    return lines


def chain_table(rows: Rows) -> list[dict[str, Any]]:
    lines = []
    for row in rows.of("chain"):
        error = (
            f"{row['squared error of the mean']:.3g} ±"
            f" {row['squared error of the mean, error']:.2g} ({row['expected squared error']:.3g})"
        )
        line = {
            "kernel": row["kernel"],
            "n": f"{row['records']:,}",
            "iterations": f"{row['iterations']:,}",
        }
        lines.append(
            line
            | {
                "ε": row["epsilon"],
                "squared error of the mean": error,
                "E θ²": row["second moment"],
            }
        )
    return lines


def owners_table(rows: Rows) -> list[dict[str, Any]]:
    lines = []
    for row in rows.of("owners"):
        rate = (
            f"{row['acceptance']:.3f} ± {row['acceptance, error']:.3f}"
            f" ({row['expected acceptance']:.3f})"
        )
        iterations = f"iterations at ε = {EPSILON:g} each, n = {MANY:,}, σ = {BEST} together"
        lines.append(
            {
                "owners": str(row["owners"]),
                f"acceptance, each σ = {OWN_SIGMA:g}": rate,
                iterations: f"{row['iterations']:,}",
            }
        )
    return lines


def draw(rows: Rows, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(2, 3, figsize=(15, 9), layout="constrained")
    axes: list[Any] = list(grid.flat)
    colours = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    markers = dict(zip(KERNELS, "os", strict=True))
    spread = posterior_moments(RECORDS)[1]

    axis = axes[0]
    for colour, power in zip(colours, POWERS, strict=False):
        found = rows.of("affordable", power=power)
        axis.plot(
            *found.columns("records", "exact"),
            "o-",
            color=colour,
            markersize=4,
            label=f"exact, proposals ∝ n^-{power:g}",
        )
        axis.plot(
            *Rows(row for row in found if row["theirs"]).columns("records", "theirs"),
            "x--",
            color=colour,
            markersize=4,
        )
    axis.plot([], [], "kx--", label="advanced composition (Theorem 1)")
    axis.set(
        title=f"iterations at ε = {EPSILON:g}, σ = {BEST}",
        xscale="log",
        yscale="log",
        xlabel="records n",
        ylabel="iterations",
    )
    axis.legend(fontsize="x-small")

    sigmas = np.geomspace(0.2, 6, 40)
    top = small_steps(best_sigma(None), None)[1]
    for colour, (steps, scale) in zip(colours, STEPS, strict=False):
        theory = np.array(
            [expected(RECORDS, float(sigma), scale * spread, steps) for sigma in sigmas]
        )
        axes[1].plot(
            sigmas, theory[:, 0], color=colour, label=f"{steps} steps of {scale:g} sd: theory"
        )
        axes[2].plot(
            sigmas,
            sigmas**2 * theory[:, 1] / (scale * spread) ** 2 / top,
            color=colour,
            label=f"{steps} steps of {scale:g} sd: theory",
        )
        for kernel, marker in markers.items():
            found = rows.of("acceptance", kernel=kernel, steps=steps, scale=scale)
            sigma, rate, error, move, uncertain = found.columns(
                "sigma", "acceptance", "acceptance, error", "squared move", "squared move, error"
            )
            for axis, y, bar in (
                (axes[1], rate, error),
                (axes[2], sigma**2 * move / scale**2 / top, sigma**2 * uncertain / scale**2 / top),
            ):
                axis.errorbar(
                    sigma,
                    y,
                    2 * bar,
                    fmt=marker,
                    color=colour,
                    markersize=4,
                    capsize=2,
                    markerfacecolor="none",
                )
    axes[1].plot(sigmas, 2 * ndtr(-sigmas / 2), "k:", label="2Φ(−σ/2)")
    for axis in axes[1:3]:
        for kernel, marker in markers.items():
            axis.plot(
                [],
                [],
                "k" + marker,
                markerfacecolor="none",
                markersize=4,
                label=f"{kernel}: chains, ± 2 standard errors",
            )
        axis.set(
            xscale="log",
            xlabel="σ",
            xticks=[0.3, 0.6, 1.2, 2.4, 4.8],
            xticklabels=["0.3", "0.6", "1.2", "2.4", "4.8"],
        )
        axis.minorticks_off()
    axes[1].set(title="acceptance (Proposition 1)")
    axes[2].set(title="squared distance for the same ε, relative", ylim=(0, 1.75))
    axes[1].legend(fontsize="x-small", loc="lower left")
    axes[2].legend(fontsize="x-small", loc="upper left")

    axis = axes[3]
    found = rows.of("owners")
    counts = np.arange(1, 11)
    axis.plot(
        counts,
        [expected(RECORDS, OWN_SIGMA * math.sqrt(count), spread)[0] for count in counts],
        label="acceptance: theory",
    )
    number, rate, error, iterations = found.columns(
        "owners", "acceptance", "acceptance, error", "iterations"
    )
    style: dict[str, Any] = {"fmt": "o", "color": colours[0], "capsize": 3, "markersize": 4}
    axis.errorbar(
        number, rate, 2 * error, **style, label="acceptance: MultiOwnerPenalty, ± 2 standard errors"
    )
    axis.plot(
        counts,
        1 / counts,
        "--",
        color=colours[1],
        label=f"iterations at ε = 1 each and σ = {BEST} together, relative: 1/J",
    )
    axis.plot(
        number,
        iterations / iterations[0],
        "s",
        color=colours[1],
        markersize=4,
        label="the same by the accountant",
    )
    axis.set(
        title=f"J owners, each with noise of σ = {OWN_SIGMA:g}", xlabel="owners J", ylim=(0, 1.35)
    )
    axis.legend(fontsize="x-small", loc="upper right")

    axis = axes[4]
    for colour, (kernel, marker) in zip(colours, markers.items(), strict=False):
        axis.plot(
            *rows.of("error", kernel=kernel).columns("records", "expected squared error"),
            color=colour,
            label=f"{kernel}: theory",
        )
        found = rows.of("chain", kernel=kernel, power=0.5)
        n, y, error = found.columns(
            "records", "squared error of the mean", "squared error of the mean, error"
        )
        bars = np.minimum(2 * error, 0.9 * y), 2 * error
        axis.errorbar(
            n,
            y,
            bars,
            fmt=marker,
            color=colour,
            capsize=3,
            markersize=4,
            label=f"{kernel}: chains, ± 2 standard errors",
        )
    axis.set(
        title=f"posterior mean at ε = {EPSILON:g}: squared error",
        xscale="log",
        yscale="log",
        xlabel="records n",
        ylabel="posterior variances",
    )
    axis.legend(fontsize="x-small")

    axis = axes[5]
    for colour, (kernel, marker) in zip(colours, markers.items(), strict=False):
        n, seconds = rows.of("seconds", kernel=kernel).columns("records", "seconds an iteration")
        axis.plot(n, 1e3 * seconds, f"{marker}-", color=colour, markersize=4, label=kernel)
    axis.set(title="milliseconds for an iteration", xscale="log", yscale="log", xlabel="records n")
    axis.legend(fontsize="x-small")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    rows, runs = reproduction.command(run, jobs, draw, __doc__, arguments)

    def table(lines: list[dict[str, Any]]) -> str:
        return reproduction.markdown(
            lines,
            {name: "" if isinstance(value, str) else ".3g" for name, value in lines[0].items()},
        )

    tables = [
        (
            f"Iterations at ε = {EPSILON:g}, δ = {DELTA:g}, σ = {BEST}, exact / theirs; how much"
            " more noise theirs takes for as many. The squared distance that they go together."
        ),
        table(affordable_table(rows)),
        (
            "Acceptance: measured ± standard error (by quadrature). θ: log odds in posterior"
            " standard deviations from their mean."
        ),
        table(acceptance_table(rows)),
        (
            "Small steps: where they go farthest for the same ε, and how far against those of one"
            " length, by quadrature."
        ),
        table(tuning_table()),
        (
            f"All that ε = {EPSILON:g} affords, at σ = {BEST}. Squared error in posterior"
            " variances, ± standard error (expected)."
        ),
        table(chain_table(rows)),
        "Owners.",
        table(owners_table(rows)),
        reproduction.origin(runs, arguments),
    ]
    print("\n\n".join(tables))
    return rows


if __name__ == "__main__":
    main()
