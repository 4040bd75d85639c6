"""Private logistic regression beside the baselines, and a chain on a known posterior, as in
"Privacy for free" (Wang, Fienberg, Smola 2015).

    reproduce_privacy_for_free.py --quick                 # simulated data only, two minutes
    reproduce_privacy_for_free.py --data-root FOLDER      # UCI's abalone/ and adult/

**Figure 1**: linear regression with two weights, whose posterior is known, at ε = 10: what DP-SGLD
samples, with our constants and with the paper's. **Figure 2**: test accuracy against ε, for two
Gaussians (simulated), Abalone (10 rings and more against fewer) and Adult.

Every ε here is for *replacing* one record, the relation of the paper, under which the number of
records N is public; δ = 1/N^1.1. Baselines are written for the same relation, which costs them the
factor 2 in sensitivity that it costs the library's methods.

Numbers are mapped to [-1, 1] or [0, 1] by documented ranges, categories are one-hot by the
documented code book, and a column of ones is added. Rows are divided by the average norm of a row
of uniform numbers, and shortened to 1 if they are longer. The ranges are constants; those of
Abalone follow what its description says of the records. Settings of methods are functions of (N, d,
ε, δ), with constants that we chose on simulated data (``METHODS``). We raised the limits on the
numbers of steps once, after we had seen results on all three data sets.
"""

from __future__ import annotations

import csv
import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from reproduction import (
    Panel,
    Row,
    columns,
    digest,
    finish,
    grouped,
    having,
    mean_and_error,
    parser_of,
)
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes import ops

RELATION: Any = "replace_one"
EPSILONS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
CURVATURE = 0.25  # largest second derivative of a record's loss, for features of norm at most 1
BATCHES = 20  # to a pass


# -- data ------------------------------------------------------------------------------------------


class Data(NamedTuple):
    """Rows of norm at most 1, labels 0 and 1."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor

    @property
    def size(self) -> int:
        return len(self.x)

    @property
    def dimension(self) -> int:
        return self.x.shape[1]

    @property
    def delta(self) -> float:
        return self.size**-1.1


# records; standard deviations of the features, whose means are those times ±1/√20: the best
# accuracy is Φ(1) = 84.1 %, if all of them are used
GAUSSIANS, SPREADS = 5000, torch.from_numpy(np.geomspace(1.0, 0.1, 20)).float()
# units of 200 mm and 200 g: lowest and highest by round numbers around the ranges in abalone.names,
# in which two heights are misprints
ABALONE = ((0.0, 1.0), (0.0, 0.8), (0.0, 0.4), (0.0, 3.0), (0.0, 1.5), (0.0, 0.8), (0.0, 1.0))
LEVELS = (1, 3, 5, 6, 7, 8, 9, 13)  # columns of codes in adult.names, all of which occur
NUMBERS: dict[int, Callable[[float], float]] = {  # of adult.names
    0: lambda age: age / 100,
    4: lambda years: years / 16,
    10: lambda gain: math.log1p(gain) / math.log1p(1e5),
    11: lambda loss: math.log1p(loss) / math.log1p(5e3),
    12: lambda hours: hours / 100,
}
ADULT_TRAINING = 32_561
FILES = {"Abalone": ["abalone/abalone.data"], "Adult": ["adult/adult.data", "adult/adult.test"]}


def two_gaussians(repeat: int) -> Data:
    generator = torch.Generator().manual_seed(1000 + repeat)
    y = torch.bernoulli(torch.full((3 * GAUSSIANS,), 0.5), generator=generator)
    x = torch.randn(len(y), len(SPREADS), generator=generator) + (2 * y - 1)[:, None] / math.sqrt(
        len(SPREADS)
    )
    x = bounded(x * SPREADS, math.sqrt(float(SPREADS.square().sum()) * (1 + 1 / len(SPREADS)) + 1))
    return Data(x[:GAUSSIANS], y[:GAUSSIANS], x[GAUSSIANS:], y[GAUSSIANS:])


def abalone_columns(rows: Sequence[Sequence[str]]) -> tuple[Tensor, Tensor]:
    """Features and labels. Of the sexes, infants are told from the others."""
    numbers = torch.tensor([[float(value) for value in row[1:]] for row in rows])
    low, high = torch.tensor(ABALONE).T
    sizes = (2 * (numbers[:, :-1] - low) / (high - low) - 1).clamp(-1, 1)
    infants = torch.tensor([[2.0 * (row[0] == "I") - 1] for row in rows])
    return torch.cat([sizes, infants], 1), (numbers[:, -1] >= 10).float()


def abalone(rows: Sequence[Sequence[str]], repeat: int) -> Data:
    """Five parts, of which the last is for testing."""
    x, y = abalone_columns(rows)
    x = bounded(x, math.sqrt(len(ABALONE) / 3 + 2))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(repeat))
    train, test = order[: 4 * len(rows) // 5], order[4 * len(rows) // 5 :]
    return Data(x[train], y[train], x[test], y[test])


def adult(rows: Sequence[Sequence[str]]) -> Data:
    """The published division. Missing values have no column of their own."""
    columns = [
        torch.tensor([scale(float(row[column])) for row in rows]).clamp(0, 1)
        for column, scale in NUMBERS.items()
    ]
    columns += [
        torch.tensor([float(row[column] == code) for row in rows])
        for column in LEVELS
        for code in sorted({row[column] for row in rows} - {"?"})
    ]
    x = bounded(torch.stack(columns, 1), math.sqrt(len(NUMBERS) / 3 + len(LEVELS) + 1))
    y = torch.tensor([float(row[14].startswith(">50K")) for row in rows])
    return Data(x[:ADULT_TRAINING], y[:ADULT_TRAINING], x[ADULT_TRAINING:], y[ADULT_TRAINING:])


def bounded(x: Tensor, unit: float) -> Tensor:
    """With a column of ones, in units of ``unit``, rows of norm at most 1."""
    x = torch.cat([x, torch.ones(len(x), 1)], 1) / unit
    return x / torch.linalg.vector_norm(x, dim=1, keepdim=True).clamp_min(1)


@cache
def table(name: str, root: str) -> list[list[str]]:
    """UCI's rows as text; Adult's training records come first."""
    files = [
        list(csv.reader((Path(root) / file).read_text().splitlines(), skipinitialspace=True))
        for file in FILES[name]
    ]
    # not the first line of adult.test, nor empty ones
    first, *rest = ([line for line in file if len(line) > 1] for file in files)
    if name == "Adult" and len(first) != ADULT_TRAINING:
        raise ValueError(f"adult.data has {len(first):,} records, not {ADULT_TRAINING:,}")
    return [line for file in (first, *rest) for line in file]


@lru_cache(maxsize=3)
def load(name: str, repeat: int, root: str) -> Data:
    """Adult is the same in every repeat."""
    if name == "Two Gaussians":
        return two_gaussians(repeat)
    return abalone(table(name, root), repeat) if name == "Abalone" else adult(table(name, root))


# -- what ε allows ---------------------------------------------------------------------------------


@cache
def gaussian_mu(epsilon: float, delta: float) -> float:
    """The μ at which a Gaussian mechanism is exactly (ε, δ)-differentially private (Dong,
    Roth, Su 2022).
    """

    def excess(mu: float) -> float:
        tail = math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu))
        return float(ndtr(mu / 2 - epsilon / mu)) - tail - delta

    return float(brentq(excess, 1e-4, 100.0, xtol=1e-12))


@cache
def noise(epsilon: float, delta: float, sample_rate: float, steps: int) -> float:
    return dpb.get_noise_multiplier(
        target_epsilon=epsilon,
        target_delta=delta,
        sample_rate=sample_rate,
        steps=steps,
        neighboring=RELATION,
    )


def published_noise(epsilon: float, delta: float, size: int, batch: float, passes: float) -> float:
    r"""The noise multiplier of DP-SGLD by Theorem 4 of Wang, Fienberg and Smola (2015),

    .. math::
        z = \frac1\varepsilon \sqrt{128\, \frac{T B}{N}\, \log\frac{5NT}{2B\delta}
        \, \log\frac2\delta}.

    The paper states the variance of the noise on the estimate (N/B)·Σ g of the full gradient,
    128·NTL²/(Bε²)·log(5NT/(2Bδ))·log(2/δ), times the squared step size; here it is on the batch
    sum, in units of L = C. It holds for T ≥ ε²N/(32·B·log(2/δ)).
    """
    logs = math.log(2.5 * size * passes / batch / delta) * math.log(2 / delta)
    return math.sqrt(128 * passes * batch / size * logs) / epsilon


@cache
def objective_noise(epsilon: float, delta: float, strength: float) -> float:
    r"""Noise std / clip norm of objective perturbation for replacing a record, with ``strength`` Λ
    of the regulariser.

    The minimiser θ tells b = −∇(Σℓ + Λ‖θ‖²/2)(θ). Replacing a record changes the Jacobian's
    determinant by a factor of at most 1 + β/Λ, and b by v with ‖v‖ ≤ 2C in the plane of both
    records, where b/σ has a Rayleigh-distributed length ϱ: the privacy loss is at most log(1 + β/Λ)
    + sϱ + s²/2 with s = 2C/σ, and δ(ε) = √(2π)·s·exp(sr + s²/2)·Φ(−r − s) with r = (ε − log(1 +
    β/Λ) − s²/2)/s, if r ≥ 0.
    """

    lost = math.log1p(CURVATURE / strength)

    def excess(log_s: float) -> float:
        s = math.exp(log_s)
        r = (epsilon - lost) / s - s / 2
        if r <= 0:
            return 1e3
        tail = s * r + s**2 / 2 + float(log_ndtr(-r - s))
        return max(math.log(math.sqrt(2 * math.pi) * s) + tail - math.log(delta), -1e3)

    largest = math.log(2 * (epsilon - lost)) / 2
    return 2 / math.exp(brentq(excess, largest - 14, largest - 1e-9))


# -- methods ---------------------------------------------------------------------------------------


Fit = tuple[Tensor, float]  # scores (logits) of test records, and the ε that was spent


def linear(dimension: int) -> nn.Linear:
    """x ↦ xᵀw, w = 0 at first."""
    model = nn.Linear(dimension, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def loss(scores: Tensor, y: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(scores.squeeze(-1), y)


Limits = tuple[float, int, float]  # of the distance to go, of steps, and of records seen


def steps(data: Data, epsilon: float, clip: float, lr: float, limits: Limits) -> int:
    """Steps with lr·steps = reach·Nμ/(2C√d): a direction is followed as long as it gains more than
    its noise. The other limits save computing time. The result is a multiple of
    ``BATCHES``, whole passes.
    """
    reach, most, work = limits
    signal = data.size * gaussian_mu(epsilon, data.delta) / (2 * clip * math.sqrt(data.dimension))
    affordable = int(min(most, work / data.size) / BATCHES)
    return BATCHES * max(1, min(round(reach * signal / (lr * BATCHES)), affordable))


def chain(
    data: Data,
    epsilon: float,
    sampler: str,
    *,
    lr: float,
    clip: float,
    limits: Limits,
    published: bool = False,
    averaged: bool = True,
    temperature: float = 1.0,
    **options: Any,
) -> Fit:
    """Scores averaged over the second half of a private chain, which is post-processing, or those
    of its last state. ``published``: with the noise of the paper's Theorem 4.

    Noise beyond what temperature 1 needs makes the chain hotter: it is then an optimizer, whose
    average is near the mode.
    """
    full = 2 * lr if sampler == "DPSGNHT" else lr
    epochs = steps(data, epsilon, clip, full, limits) // BATCHES
    size = data.size // BATCHES
    count, accountant = epochs * BATCHES, dpb.PrivacyAccountant(neighboring=RELATION)
    if published:
        fewest = epsilon**2 * data.size / (32 * size * math.log(2 / data.delta))
        epochs = max(epochs, math.ceil(fewest))
        count = epochs * BATCHES
        passes = count * size / data.size
        floor = published_noise(epsilon, data.delta, data.size, size, passes)
    else:
        accountant = dpb.PrivacyAccountant(epsilon, data.delta, neighboring=RELATION)
        floor = noise(epsilon, data.delta, size / data.size, count)
    if sampler == "DPSGNHT":  # a friction of ½ at most: as much hotter as ε demands
        temperature = max(1.0, lr * data.size * (floor * clip / size) ** 2)
    model, optimizer, private = dpb.PrivacyEngine(accountant).make_private(
        module=linear(data.dimension),
        optimizer=partial(getattr(dpb.optim, sampler), lr=lr, temperature=temperature, **options),
        data_loader=DataLoader(TensorDataset(data.x, data.y), batch_size=size),
        max_grad_norm=clip,
        noise_multiplier=floor,
    )
    burn_in = count // 2 if averaged else count - 1
    samples = dpb.PosteriorSamples(burn_in=burn_in, max_samples=count + 1)
    for _ in range(epochs):
        for x, y in private:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
            samples.collect(model)
    scores = samples.predict(model, data.x_test, transform=None).squeeze(-1)
    return scores, accountant.get_epsilon(data.delta)


def posterior_sample(
    data: Data, epsilon: float, certificate: ops.Certificate, prior_std: float
) -> Fit:
    model = ops.GLM("bernoulli", prior_std=prior_std, max_feature_norm=1.0)
    release = ops.OnePosteriorSample(
        model, certificate, epsilon=epsilon, delta=data.delta, num_data=data.size
    )
    draw = release.sample(data.x, data.y)["weights"].float()
    return data.x_test @ draw, release.accountant.get_epsilon(data.delta)


def finite_run(data: Data, epsilon: float, *, limits: Limits, clip: float, prior_std: float) -> Fit:
    count = steps(data, epsilon, clip, 1 / CURVATURE, limits)
    certificate = ops.FiniteRunLangevin(steps=count, max_grad_norm=clip)
    return posterior_sample(data, epsilon, certificate, prior_std)


def hybrid(
    data: Data,
    epsilon: float,
    *,
    start_share: float,
    start_limits: Limits,
    lr: float,
    clip: float,
    limits: Limits,
    prior_std: float,
    **options: Any,
) -> Fit:
    """Algorithm 3: a posterior sample, by the rules of :func:`finite_run`, then DP-SGNHT, by
    those of :func:`chain`.
    """
    start = steps(data, start_share * epsilon, clip, 1 / CURVATURE, start_limits)
    count = steps(data, epsilon, clip, 2 * lr, limits)
    size = data.size // BATCHES
    # at least what the library will choose
    floor = noise(epsilon * (1 - start_share), data.delta, size / data.size, count)
    temperature = max(1.0, lr * data.size * (floor * clip / size) ** 2)
    run = ops.hybrid(
        ops.GLM("bernoulli", prior_std=prior_std, max_feature_norm=1.0),
        data.x,
        data.y,
        certificate=ops.FiniteRunLangevin(steps=start, max_grad_norm=clip),
        optimizer=partial(dpb.optim.DPSGNHT, lr=lr, temperature=temperature, **options),
        epsilon=epsilon,
        delta=data.delta,
        epochs=count // BATCHES,
        batch_size=size,
        max_grad_norm=clip,
        start_share=start_share,
        samples=dpb.PosteriorSamples(max_samples=count + 1),
    )
    scores = run.samples.predict(run.module, data.x_test, transform=None)
    return scores, run.accountant.get_epsilon(data.delta)


# -- baselines -------------------------------------------------------------------------------------


def minimiser(
    data: Data, strength: float, linear: Tensor | None = None, clip: float = 1.0
) -> Tensor:
    """argmin of Σ ℓ_i + Λ‖w‖²/2 + bᵀw, where ℓ_i's gradient is clipped to norm C (Huber's
    loss in the linear predictor): Newton's method.
    """
    x = data.x.double() * (2 * data.y.double() - 1)[:, None]
    bounds = (clip / torch.linalg.vector_norm(x, dim=1)).clamp_max(1 - 1e-12)
    edge = torch.log((1 - bounds) / bounds)  # margin below which the slope stays at its bound
    b = torch.zeros(x.shape[1], dtype=torch.float64) if linear is None else linear

    def value(w: Tensor) -> Tensor:
        margin = x @ w
        inside = torch.maximum(margin, edge)
        return (
            (nn.functional.softplus(-inside) + bounds * (inside - margin)).sum()
            + strength / 2 * w @ w
            + b @ w
        )

    w = torch.zeros_like(b)
    for _ in range(100):
        margin = x @ w
        p = torch.minimum(torch.sigmoid(-margin), bounds)
        gradient = -(x.T @ p) + strength * w + b
        if float(gradient.norm()) < 1e-8 * data.size:
            return w
        curvature = torch.where(margin > edge, p * (1 - p), 0.0)
        direction = torch.linalg.solve(
            x.T @ (x * curvature[:, None]) + strength * torch.eye(len(w), dtype=w.dtype), gradient
        )
        length, now, slope = 1.0, value(w), float(gradient @ direction)
        while value(w - length * direction) > now - 1e-4 * length * slope and length > 1e-10:
            length /= 2
        w = w - length * direction
    raise RuntimeError("the privacy of these baselines rests on the exact minimiser: not found")


def non_private(data: Data, epsilon: float, *, prior_std: float) -> Fit:
    """The posterior's mode."""
    return data.x_test @ minimiser(data, prior_std**-2).float(), math.inf


def objective_perturbation(
    data: Data, epsilon: float, *, share: float, clip: float, prior_std: float
) -> Fit:
    """Kifer, Smith and Thakurta (2012). ``share``: of ε, at most, for the Jacobian, which
    fixes the least Λ.
    """
    strength = max(prior_std**-2, CURVATURE / math.expm1(share * epsilon))
    sigma = clip * objective_noise(epsilon, data.delta, strength)
    noise = sigma * torch.randn(data.dimension, dtype=torch.float64)
    return data.x_test @ minimiser(data, strength, noise, clip).float(), epsilon


# lr: below 2/κ, where a step is stable whatever the records are
CLIP, PRIOR_STD, LR = 0.5, 10.0, 0.9 * 2 / CURVATURE
SGD: dict[str, Any] = {"lr": LR, "clip": CLIP, "limits": (10.0, 1000, 1e7)}
SGLD = {**SGD, "sampler": "DPSGLD", "prior_std": PRIOR_STD}
PLAIN: dict[str, Any] = {"sampler": "DPSGHMC", "momentum": 0.0, "temperature": 0.0}
PLAIN |= {"prior_std": math.inf, "averaged": False}
FRICTION = {"momentum": 0.9, "thermostat_gain": 0.001}
SGNHT = {**SGD, **FRICTION, "sampler": "DPSGNHT", "prior_std": PRIOR_STD}
DRAW: dict[str, Any] = {"clip": CLIP, "prior_std": 3.0}
HYBRID = {**SGD, **FRICTION, "limits": (10.0, 300, 3.3e6), "prior_std": 3.0}
HYBRID |= {"start_share": 0.5, "start_limits": (10.0, 10_000, 3e7)}
NON_PRIVATE, OBJECTIVE = "non-private", "objective perturbation"
# What is fixed here was chosen on the two Gaussians, by draws that the figure does not use, among
# two to four values each; the numbers of steps and of records by computing time
METHODS: dict[str, tuple[Callable[..., Fit], dict[str, Any]]] = {
    NON_PRIVATE: (non_private, {"prior_std": PRIOR_STD}),
    "OPS, FiniteRunLangevin": (finite_run, {**DRAW, "limits": (10.0, 20_000, 5e8)}),
    "OPS, Bounded": (
        posterior_sample,
        {"certificate": ops.Bounded(2.0, warmup_steps=50), "prior_std": 3.0},
    ),
    "hybrid DP-SGNHT": (hybrid, HYBRID),
    "DP-SGLD": (chain, SGLD),
    "DP-SGNHT": (chain, SGNHT),
    "DP-SGLD, paper's constants": (chain, {**SGLD, "published": True}),
    OBJECTIVE: (objective_perturbation, {"share": 0.2, "clip": CLIP, "prior_std": PRIOR_STD}),
    "DP-SGD": (chain, {**SGD, **PLAIN}),
}
SLOWEST = "OPS, Bounded"  # the No-U-Turn sampler


# -- figure 1 --------------------------------------------------------------------------------------

# full batches
LINE: dict[str, Any] = {"records": 5000, "lr": 0.3, "clip": 3.0, "prior_std": 10.0, "epsilon": 10.0}
CHAINS = ("DP-SGLD", "DP-SGLD as published")


def line_data(repeat: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y = (1, u)·w/√2 + N(0, 1): features, targets, and the posterior's mean and covariance."""
    generator = torch.Generator().manual_seed(repeat)
    u = 2 * torch.rand(LINE["records"], generator=generator) - 1
    x = torch.stack([torch.ones_like(u), u], 1) / math.sqrt(2)
    y = x @ torch.tensor([1.0, -2.0]) + torch.randn(len(u), generator=generator)
    covariance = torch.linalg.inv((x.T @ x).double() + torch.eye(2) / LINE["prior_std"] ** 2)
    return x, y, covariance @ (x.T @ y).double(), covariance


def line_chain(name: str, repeat: int, count: int, settings: str) -> Row:
    """From the posterior's mean on: the variance over the posterior's, in coordinates in which the
    posterior is a standard Gaussian.
    """
    x, y, mean, covariance = line_data(repeat)
    size, lr, clip = len(x), LINE["lr"], LINE["clip"]
    delta, is_published = size**-1.1, "published" in name
    floor = noise(LINE["epsilon"], delta, 1.0, count)
    if is_published:
        floor = published_noise(LINE["epsilon"], delta, size, size, passes=count)
    accountant = dpb.PrivacyAccountant(neighboring=RELATION)
    model = linear(2)
    with torch.no_grad():
        model.weight.copy_(mean)
    model, optimizer, private = dpb.PrivacyEngine(accountant).make_private(
        module=model,
        optimizer=partial(
            dpb.optim.DPSGLD,
            lr=lr,
            temperature=0.5 if is_published else 1.0,
            prior_std=LINE["prior_std"],
        ),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=size),
        max_grad_norm=clip,
        noise_multiplier=floor,
    )
    states = torch.empty(count, 2, dtype=torch.float64)
    for state in states:
        for rows, targets in private:  # the full batch
            optimizer.zero_grad()
            (0.5 * (model(rows).squeeze(-1) - targets).square()).mean().backward()
            optimizer.step()
        state.copy_(model.weight.detach()[0])
    kept = states[count // 10 :]
    root = torch.linalg.cholesky(covariance)
    standard = torch.linalg.solve_triangular(root, (kept - mean).T, upper=False)
    return {"variance": float(standard.var(1).mean()), "spent": accountant.get_epsilon(delta)}


# -- runs ------------------------------------------------------------------------------------------


def run(root: str, what: str, **job: Any) -> Row:
    return line_chain(**job) if what == "line" else accuracy(root, **job)


def accuracy(root: str, data: str, method: str, epsilon: float, repeat: int, settings: str) -> Row:
    """Of a fit on test records, in percent, and the average negative log likelihood there."""
    records = load(data, 0 if data == "Adult" else repeat, root)
    function, options = METHODS[method]
    scores, spent = function(records, epsilon, **options)
    right = ((scores > 0).float() == records.y_test).double().mean()
    nll = nn.functional.binary_cross_entropy_with_logits(scores.double(), records.y_test.double())
    return {"accuracy": 100 * float(right), "nll": float(nll), "spent": spent}


def jobs(data: Sequence[str], repeats: int, epsilons: Sequence[float], count: int) -> list[Row]:
    """Of draws by the No-U-Turn sampler there are few on Adult."""
    settings, found = digest(**LINE), []
    for repeat, name in product(range(min(3, repeats)), CHAINS):
        job = {"what": "line", "repeat": repeat, "count": count, "settings": settings}
        found.append(job | {"name": name})
    for repeat, name, epsilon, method in product(range(repeats), data, epsilons, METHODS):
        if method == NON_PRIVATE and epsilon != epsilons[0]:
            continue
        if method == SLOWEST and name == "Adult" and (repeat > 2 or epsilon not in epsilons[::3]):
            continue
        job = {"what": "accuracy", "data": name, "method": method, "epsilon": epsilon}
        found.append(job | {"repeat": repeat, "settings": digest(**METHODS[method][1])})
    return found


# -- tables and picture ----------------------------------------------------------------------------


def summary(rows: Sequence[Row]) -> list[Row]:
    """A row for each data set, method and ε, with the differences ± one standard error from two
    methods on the same records.
    """
    accuracies = having(rows, what="accuracy")
    found = {
        (row["data"], row["method"], row["epsilon"], row["repeat"]): row["accuracy"]
        for row in accuracies
    }
    free = {key[::3]: value for key, value in found.items() if key[1] == NON_PRIVATE}
    lines = []
    for (data, method, epsilon), some in grouped(accuracies, "data", "method", "epsilon").items():
        values = [row["accuracy"] for row in some]
        line: Row = {"data": data, "method": method, "epsilon": epsilon, "repeats": len(some)}
        line["accuracy"] = statistics.fmean(values)
        line["sd"] = statistics.stdev(values) if len(values) > 1 else math.nan
        pairs = [(row["accuracy"], row["repeat"]) for row in some]
        line["gap"], line["se"] = mean_and_error([a - free[data, r] for a, r in pairs])
        if method != NON_PRIVATE:
            line["over objective"], line["its se"] = mean_and_error(
                [a - found[data, OBJECTIVE, epsilon, r] for a, r in pairs]
            )
        line["nll"] = statistics.fmean(row["nll"] for row in some)
        line["spent"] = max(row["spent"] for row in some)
        lines.append(line)
    return lines


def line_summary(rows: Sequence[Row]) -> list[Row]:
    """A row for each chain of the linear regression."""
    lines = []
    for (name,), some in grouped(having(rows, what="line"), "name").items():
        ratio, error = mean_and_error([row["variance"] for row in some])
        line = {"method": name, "lr": LINE["lr"], "spent": some[0]["spent"], "repeats": len(some)}
        lines.append(line | {"variance / posterior's": ratio, "se": error})
    return lines


def tables(rows: list[Row]) -> Mapping[str, Sequence[Row]]:
    return {
        f"Linear regression, target ε = {LINE['epsilon']:g}.": line_summary(rows),
        "Test accuracy in %; the differences to non-private fits and to objective perturbation.": (
            summary(rows)
        ),
    }


def panels(rows: list[Row]) -> list[Panel]:
    found = []
    for (data,), some in grouped(summary(rows), "data").items():
        lines = {
            method: columns(part, "epsilon", "accuracy", "sd")
            for (method,), part in grouped(some, "method").items()
        }
        title = f"{data}: test accuracy in %"
        found.append(Panel(title, "ε, replacing one record, δ = 1/N^1.1", "", lines, "x"))
    return found


def main(arguments: list[str] | None = None) -> list[Row]:
    parser = parser_of(__doc__, "privacy_for_free")
    parser.add_argument("--data-root", default="", help="folder with UCI's abalone/ and adult/")
    parser.add_argument("--repeats", type=int, help="default: 20, or 4 with --quick")
    options = parser.parse_args(arguments)
    # that loaders now draw Poisson batches
    logging.getLogger("torch_dpbayes").setLevel(logging.ERROR)
    wanted = jobs(
        ["Two Gaussians", *(FILES if options.data_root and not options.quick else ())],
        options.repeats or (4 if options.quick else 20),
        (0.5, 2.0, 10.0) if options.quick else EPSILONS,
        1000 if options.quick else 3000,
    )
    make = partial(run, options.data_root)
    return finish(options, make, wanted, tables=tables, panels=panels)


if __name__ == "__main__":
    main()
