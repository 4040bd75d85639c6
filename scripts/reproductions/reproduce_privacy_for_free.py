"""Private logistic regression beside the baselines, and chains on a known posterior, as in "Privacy
for free" (Wang, Fienberg, Smola 2015).

    reproduce_privacy_for_free.py --quick              # made-up data only, two minutes
    reproduce_privacy_for_free.py --full --data-root FOLDER    # UCI's abalone/ and adult/
    reproduce_privacy_for_free.py --full --download    # gets them through ucimlrepo
    reproduce_privacy_for_free.py --full --repeats 3   # fewer; later runs add the rest

**Figure 1**: linear regression with two weights, whose posterior is known, at ε = 10: what DP-SGLD
and DP-SGNHT sample, and what the constants of the paper do. **Figure 2**: test accuracy against ε,
for two Gaussians (made up), Abalone (10 rings and more against fewer) and Adult.

Every ε here is for *replacing* one record, the relation of the paper, under which the number of
records N is public; δ = 1/N^1.1. Baselines are written for the same relation, which costs them the
factor 2 in sensitivity that it costs the library's methods.

Features are mapped to [-1, 1] or [0, 1] by documented ranges or are one-hot by the documented code
book, with a column of ones; divided by the norm that a row has on average if its numbers are
uniform; rows longer than 1 are shortened to 1. The ranges are constants, but those of Abalone lie
around what its description says of the records. Settings of methods are functions of (N, d, ε, δ),
with constants that were chosen on made-up data (``METHODS``), but for the limits on the numbers of
steps, which were raised once, after results on all three had been seen.
"""

from __future__ import annotations

import argparse
import csv
import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import reproduction
import torch
from published_calibration import wang_noise_multiplier
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

import torch_dpbayes as dpb
from torch_dpbayes import ops
from torch_dpbayes.accounting.events import GaussianDpEvent

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
CODES = {  # of adult.names, by column
    1: (
        "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov Without-pay"
        " Never-worked"
    ),
    3: (
        "Bachelors Some-college 11th HS-grad Prof-school Assoc-acdm Assoc-voc 9th 7th-8th 12th"
        " Masters 1st-4th 10th Doctorate 5th-6th Preschool"
    ),
    5: (
        "Married-civ-spouse Divorced Never-married Separated Widowed Married-spouse-absent"
        " Married-AF-spouse"
    ),
    6: (
        "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty"
        " Handlers-cleaners Machine-op-inspct Adm-clerical Farming-fishing Transport-moving"
        " Priv-house-serv Protective-serv Armed-Forces"
    ),
    7: "Wife Own-child Husband Not-in-family Other-relative Unmarried",
    8: "White Asian-Pac-Islander Amer-Indian-Eskimo Other Black",
    9: "Female Male",
    13: (
        "United-States Cambodia England Puerto-Rico Canada Germany Outlying-US(Guam-USVI-etc) India"
        " Japan Greece South China Cuba Iran Honduras Philippines Italy Poland Jamaica Vietnam"
        " Mexico Portugal Ireland France Dominican-Republic Laos Ecuador Taiwan Haiti Columbia"
        " Hungary Guatemala Nicaragua Scotland Thailand Yugoslavia El-Salvador Trinadad&Tobago Peru"
        " Hong Holand-Netherlands"
    ),
}
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


def abalone(rows: Sequence[Sequence[str]], repeat: int) -> Data:
    """Five parts, of which the last is for testing. Of the sexes, infants are told from the
    others.
    """
    numbers = torch.tensor([[float(value) for value in row[1:]] for row in rows])
    low, high = torch.tensor(ABALONE).T
    columns = [
        (2 * (numbers[:, :-1] - low) / (high - low) - 1).clamp(-1, 1),
        torch.tensor([[2.0 * (row[0] == "I") - 1] for row in rows]),
    ]
    x, y = (
        bounded(torch.cat(columns, 1), math.sqrt(len(ABALONE) / 3 + 2)),
        (numbers[:, -1] >= 10).float(),
    )
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(repeat))
    train, test = order[: 4 * len(rows) // 5], order[4 * len(rows) // 5 :]
    return Data(x[train], y[train], x[test], y[test])


def adult(rows: Sequence[Sequence[str]]) -> Data:
    """The published division. A level that is not in the code book has no column."""
    columns = [
        torch.tensor([scale(float(row[column])) for row in rows]).clamp(0, 1)
        for column, scale in NUMBERS.items()
    ]
    columns += [
        torch.tensor([float(row[column] == code) for row in rows])
        for column, codes in CODES.items()
        for code in codes.split()
    ]
    x = bounded(torch.stack(columns, 1), math.sqrt(len(NUMBERS) / 3 + len(CODES) + 1))
    y = torch.tensor([float(row[14].startswith(">50K")) for row in rows])
    return Data(x[:ADULT_TRAINING], y[:ADULT_TRAINING], x[ADULT_TRAINING:], y[ADULT_TRAINING:])


def bounded(x: Tensor, unit: float) -> Tensor:
    """With a column of ones, in units of ``unit``, rows of norm at most 1."""
    x = torch.cat([x, torch.ones(len(x), 1)], 1) / unit
    return x / torch.linalg.vector_norm(x, dim=1, keepdim=True).clamp_min(1)


@cache
def table(name: str, root: str | None) -> list[list[str]]:
    """UCI's rows as text; Adult's training records come first."""
    if root is None:
        import ucimlrepo

        frame = ucimlrepo.fetch_ucirepo(id={"Abalone": 1, "Adult": 2}[name]).data.original
        return [[str(value).strip() for value in row] for row in frame.itertuples(index=False)]
    files = [
        list(csv.reader((Path(root) / file).read_text().splitlines(), skipinitialspace=True))
        for file in FILES[name]
    ]
    # not the first line of adult.test, nor empty ones
    first, *rest = ([line for line in file if len(line) > 1] for file in files)
    if name == "Adult" and len(first) != ADULT_TRAINING:
        raise ValueError(
            f"adult.data has {len(first):,} records, not {ADULT_TRAINING:,}: it was cut short, or"
            " is another file"
        )
    return [line for file in (first, *rest) for line in file]


@lru_cache(maxsize=3)
def load(name: str, repeat: int, root: str | None) -> Data:
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
        return float(
            ndtr(mu / 2 - epsilon / mu)
            - math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu))
            - delta
        )

    return float(brentq(excess, 1e-4, 100.0, xtol=1e-12))


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

    def excess(log_s: float) -> float:
        s = math.exp(log_s)
        r = (epsilon - math.log1p(CURVATURE / strength)) / s - s / 2
        return (
            math.log(math.sqrt(2 * math.pi) * s)
            + s * r
            + s**2 / 2
            + float(log_ndtr(-r - s))
            - math.log(delta)
            if r > 0
            else math.inf
        )

    largest = math.sqrt(2 * (epsilon - math.log1p(CURVATURE / strength)))
    return 2 / math.exp(
        brentq(
            lambda u: max(min(excess(u), 1e3), -1e3),
            math.log(largest * 1e-6),
            math.log(largest * (1 - 1e-9)),
        )
    )


def published_objective_noise(epsilon: float, delta: float) -> float:
    """Theirs (Kifer, Smith and Thakurta 2012, Algorithm 1), with the sensitivity 2C of
    replacing, at Λ ≥ 2β/ε.
    """
    return 2 * math.sqrt(8 * math.log(2 / delta) + 4 * epsilon) / epsilon


# -- methods ---------------------------------------------------------------------------------------


class Fit(NamedTuple):
    """Scores (logits) of test records, and what was spent."""

    scores: Tensor
    epsilon: float
    settings: dict[str, Any]


class Records(TensorDataset):
    """Fetched a batch at a time."""

    def __getitems__(self, indices: list[int]) -> Records:
        return Records(*(values[indices] for values in self.tensors))


def collate(records: Any) -> Any:
    return records.tensors if isinstance(records, Records) else default_collate(records)


def linear(dimension: int) -> nn.Linear:
    """x ↦ xᵀw, w = 0 at first."""
    model = nn.Linear(dimension, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def loss(scores: Tensor, y: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(scores.squeeze(-1), y)


def steps(
    data: Data, epsilon: float, clip: float, lr: float, reach: float, most: int, work: float
) -> int:
    """So that lr·steps = reach·Nμ/(2C√d): a direction is followed for as long as what it gains is
    more than the noise on it.

    ``most`` steps, and ``work``/N, where computing time ends that. The result is a multiple of
    ``BATCHES``, whole passes.
    """
    signal = data.size * gaussian_mu(epsilon, data.delta) / (2 * clip * math.sqrt(data.dimension))
    return BATCHES * max(
        1, min(round(reach * signal / (lr * BATCHES)), int(min(most, work / data.size) / BATCHES))
    )


def chain(
    data: Data,
    epsilon: float,
    sampler: str,
    *,
    published: bool,
    lr: float,
    clip: float,
    reach: float,
    most: int,
    work: float,
    prior_std: float,
    **options: Any,
) -> Fit:
    """Scores averaged over the second half of a private chain, which is post-processing.
    ``published``: with the noise of the paper's Theorem 4.

    Noise beyond what temperature 1 needs makes the chain hotter: it is then an optimizer, whose
    average is near the mode.
    """
    epochs = (
        steps(data, epsilon, clip, lr / (1.0 if sampler == "DPSGLD" else 0.5), reach, most, work)
        // BATCHES
    )
    size = data.size // BATCHES
    count, accountant = epochs * BATCHES, dpb.PrivacyAccountant(neighboring=RELATION)
    if published:
        fewest = epsilon**2 * data.size / (32 * size * math.log(2 / data.delta))
        epochs = max(epochs, math.ceil(fewest))
        count = epochs * BATCHES
        floor = wang_noise_multiplier(
            target_epsilon=epsilon,
            target_delta=data.delta,
            num_data=data.size,
            expected_batch_size=size,
            passes=count * size / data.size,
        )
    else:
        accountant = dpb.PrivacyAccountant(epsilon, data.delta, neighboring=RELATION)
        floor = noise(epsilon, data.delta, size / data.size, count)
    make: Any = partial(
        getattr(dpb.optim, sampler), lr=lr, temperature=1.0, prior_std=prior_std, **options
    )
    if sampler == "DPSGNHT":  # a friction of ½ at most: as much hotter as ε demands
        make = partial(make, temperature=max(1.0, lr * data.size * (floor * clip / size) ** 2))
    model, samples = (
        linear(data.dimension),
        dpb.PosteriorSamples(burn_in=count // 2, max_samples=count + 1),
    )
    loader = DataLoader(Records(data.x, data.y), batch_size=size, collate_fn=collate)
    model, optimizer, private = dpb.PrivacyEngine(accountant).make_private(
        module=model, optimizer=make, data_loader=loader, max_grad_norm=clip, noise_multiplier=floor
    )
    for _ in range(epochs):
        for x, y in private:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
            samples.collect(model)
    told = {
        "steps": count,
        "noise_multiplier": optimizer.effective_noise_multiplier,
        "temperature": optimizer.effective_temperature,
    }
    return Fit(
        samples.predict(model, data.x_test, transform=None).squeeze(-1),
        accountant.get_epsilon(data.delta),
        told,
    )


@cache
def noise(epsilon: float, delta: float, sample_rate: float, steps: int) -> float:
    return dpb.get_noise_multiplier(
        target_epsilon=epsilon,
        target_delta=delta,
        sample_rate=sample_rate,
        steps=steps,
        neighboring=RELATION,
    )


def posterior_sample(
    data: Data, epsilon: float, certificate: ops.Certificate, *, prior_std: float
) -> Fit:
    model = ops.GLM("bernoulli", prior_std=prior_std, max_feature_norm=1.0)
    release = ops.OnePosteriorSample(
        model, certificate, epsilon=epsilon, delta=data.delta, num_data=data.size
    )
    draw = release.sample(data.x, data.y)["weights"].float()
    return Fit(
        data.x_test @ draw,
        release.accountant.get_epsilon(data.delta),
        {"tempering": release.tempering},
    )


def finite_run(
    data: Data,
    epsilon: float,
    *,
    reach: float,
    most: int,
    work: float,
    clip: float,
    prior_std: float,
) -> Fit:
    count = steps(data, epsilon, clip, 1 / CURVATURE, reach, most, work)
    return posterior_sample(
        data, epsilon, ops.FiniteRunLangevin(steps=count, max_grad_norm=clip), prior_std=prior_std
    )


def strongly_log_concave(
    data: Data, epsilon: float, *, warmup_steps: int, clip: float, prior_std: float
) -> Fit:
    return posterior_sample(
        data,
        epsilon,
        ops.StronglyLogConcave(max_grad_norm=clip, warmup_steps=warmup_steps),
        prior_std=prior_std,
    )


def bounded_likelihood(
    data: Data, epsilon: float, *, warmup_steps: int, width: float, prior_std: float
) -> Fit:
    return posterior_sample(
        data, epsilon, ops.Bounded(width, warmup_steps=warmup_steps), prior_std=prior_std
    )


def hybrid(
    data: Data,
    epsilon: float,
    *,
    start_share: float,
    start_most: int,
    start_work: float,
    lr: float,
    clip: float,
    reach: float,
    most: int,
    work: float,
    prior_std: float,
    **options: Any,
) -> Fit:
    """Algorithm 3: a posterior sample, by the rules of :func:`finite_run`, then DP-SGNHT, by
    those of :func:`chain`.
    """
    start = steps(data, start_share * epsilon, clip, 1 / CURVATURE, reach, start_most, start_work)
    count = steps(data, epsilon, clip, 2 * lr, reach, most, work)
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
    return Fit(
        scores, run.accountant.get_epsilon(data.delta), {"steps": count, "temperature": temperature}
    )


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
    raise RuntimeError(
        "Newton's method did not converge: the privacy of these baselines rests on the exact"
        " minimiser"
    )


def linear_fit(data: Data, w: Tensor, epsilon: float, **settings: Any) -> Fit:
    return Fit(data.x_test @ w.float(), epsilon, settings)


def non_private(data: Data, epsilon: float, *, prior_std: float) -> Fit:
    """The posterior's mode."""
    return linear_fit(data, minimiser(data, prior_std**-2), math.inf)


def objective_perturbation(
    data: Data, epsilon: float, *, share: float | None, clip: float, prior_std: float
) -> Fit:
    """Kifer, Smith and Thakurta (2012). ``share``: of ε, at most, for the Jacobian, which
    fixes the least Λ; None: noise and Λ as published.
    """
    strength = max(
        prior_std**-2,
        2 * CURVATURE / epsilon if share is None else CURVATURE / math.expm1(share * epsilon),
    )
    sigma = clip * (
        published_objective_noise(epsilon, data.delta)
        if share is None
        else objective_noise(epsilon, data.delta, strength)
    )
    noise = sigma * torch.randn(data.dimension, dtype=torch.float64)
    return linear_fit(
        data, minimiser(data, strength, noise, clip), epsilon, strength=strength, sigma=sigma
    )


def output_perturbation(data: Data, epsilon: float, *, clip: float, spread: float) -> Fit:
    """The minimiser moves by 2C/Λ at most (Chaudhuri, Monteleoni, Sarwate 2011); a Gaussian
    hides it. Λ = spread·2C√d/μ.
    """
    mu = gaussian_mu(epsilon, data.delta)
    strength = spread * 2 * clip * math.sqrt(data.dimension) / mu
    sigma = 2 * clip / strength / mu
    return linear_fit(
        data,
        minimiser(data, strength, None, clip)
        + sigma * torch.randn(data.dimension, dtype=torch.float64),
        epsilon,
    )


def opacus_sgd(
    data: Data, epsilon: float, *, lr: float, clip: float, reach: float, most: int, work: float
) -> Fit:
    """DP-SGD by Opacus, last iterate; its noise is calibrated here, for Opacus accounts for
    adding and removing a record only.
    """
    import opacus

    epochs = steps(data, epsilon, clip, lr, reach, most, work) // BATCHES
    model = linear(data.dimension)
    loader = DataLoader(
        Records(data.x, data.y), batch_size=-(-data.size // BATCHES), collate_fn=collate
    )
    engine: Any = opacus.PrivacyEngine()
    engine.accountant = accountant = dpb.PrivacyAccountant(
        epsilon, data.delta, neighboring=RELATION
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model, optimizer, private = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=lr),
            data_loader=loader,
            noise_multiplier=noise(epsilon, data.delta, 1 / len(loader), epochs * len(loader)),
            max_grad_norm=clip,
        )
        for _ in range(epochs):
            for x, y in private:
                optimizer.zero_grad()
                loss(model(x), y).backward()
                optimizer.step()
    with torch.no_grad():
        return Fit(
            model(data.x_test).squeeze(-1),
            accountant.get_epsilon(data.delta),
            {"steps": epochs * len(loader)},
        )


# lr: below 2/κ, where a step is stable whatever the records are
CLIP, PRIOR_STD, LR = 0.5, 10.0, 0.9 * 2 / CURVATURE
SGD: dict[str, Any] = {"lr": LR, "clip": CLIP, "reach": 10.0, "most": 1000, "work": 1e7}
SGLD = {**SGD, "sampler": "DPSGLD", "prior_std": PRIOR_STD}
SGNHT = {
    **SGD,
    "sampler": "DPSGNHT",
    "prior_std": PRIOR_STD,
    "momentum": 0.9,
    "thermostat_gain": 0.001,
}
DRAW: dict[str, Any] = {"clip": CLIP, "prior_std": 3.0}
HYBRID = {
    **SGD,
    "most": 300,
    "work": 3.3e6,
    "prior_std": 3.0,
    "momentum": 0.9,
    "thermostat_gain": 0.001,
}
NON_PRIVATE, OBJECTIVE = "non-private", "objective perturbation"
# What is fixed here was chosen on the two Gaussians, by draws that the figure does not use, among
# two to four values each; "most" and "work" by computing time
METHODS: dict[str, tuple[Callable[..., Fit], dict[str, Any]]] = {
    NON_PRIVATE: (non_private, {"prior_std": PRIOR_STD}),
    "OPS, FiniteRunLangevin": (finite_run, {**DRAW, "reach": 10.0, "most": 20_000, "work": 5e8}),
    "OPS, StronglyLogConcave": (strongly_log_concave, {**DRAW, "warmup_steps": 50}),
    "OPS, Bounded": (bounded_likelihood, {"width": 2.0, "prior_std": 3.0, "warmup_steps": 50}),
    "hybrid DP-SGNHT": (
        hybrid,
        {**HYBRID, "start_share": 0.5, "start_most": 10_000, "start_work": 3e7},
    ),
    "DP-SGLD": (chain, {**SGLD, "published": False}),
    "DP-SGNHT": (chain, {**SGNHT, "published": False}),
    "DP-SGLD, paper's constants": (chain, {**SGLD, "published": True}),
    "DP-SGNHT, paper's constants": (chain, {**SGNHT, "published": True}),
    OBJECTIVE: (objective_perturbation, {"share": 0.2, "clip": CLIP, "prior_std": PRIOR_STD}),
    "objective perturbation, published constants": (
        objective_perturbation,
        {"share": None, "clip": 0.25, "prior_std": PRIOR_STD},
    ),
    "output perturbation": (output_perturbation, {"clip": 0.25, "spread": 0.6}),
    "DP-SGD (Opacus)": (opacus_sgd, SGD),
}
OURS = tuple(
    name
    for name in METHODS
    if name.startswith(("OPS", "hybrid", "DP-SG")) and not name.endswith(("constants", "(Opacus)"))
)
RIVALS = tuple(name for name in METHODS if name.startswith(OBJECTIVE))
COMPARED = ((OURS, RIVALS), (OURS[:1], RIVALS), (OURS, (NON_PRIVATE,)))
SLOW = ("hybrid DP-SGNHT", "DP-SGLD, paper's constants", "DP-SGNHT, paper's constants")
SLOWEST = ("OPS, StronglyLogConcave", "OPS, Bounded")  # the No-U-Turn sampler


# -- figure 1 --------------------------------------------------------------------------------------

# full batches
LINE: dict[str, Any] = {
    "records": 5000,
    "lr": 0.3,
    "clip": 3.0,
    "prior_std": 10.0,
    "momentum": 0.9,
    "epsilon": 10.0,
}
CHAINS = ("DP-SGLD", "DP-SGLD as published", "DP-SGNHT", "DP-SGNHT as published")


def line_data(repeat: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y = (1, u)·w/√2 + N(0, 1): features, targets, and the posterior's mean and covariance."""
    generator = torch.Generator().manual_seed(repeat)
    u = 2 * torch.rand(LINE["records"], generator=generator) - 1
    x = torch.stack([torch.ones_like(u), u], 1) / math.sqrt(2)
    y = x @ torch.tensor([1.0, -2.0]) + torch.randn(len(u), generator=generator)
    covariance = torch.linalg.inv((x.T @ x).double() + torch.eye(2) / LINE["prior_std"] ** 2)
    return x, y, covariance @ (x.T @ y).double(), covariance


def line_chain(name: str, repeat: int, count: int, settings: str) -> dict[str, Any]:
    """States from the posterior's mean on: how they lie, in coordinates in which the
    posterior is a standard Gaussian.
    """
    x, y, mean, covariance = line_data(repeat)
    size, lr, clip = len(x), LINE["lr"], LINE["clip"]
    delta = size**-1.1
    published = wang_noise_multiplier(
        target_epsilon=LINE["epsilon"],
        target_delta=delta,
        num_data=size,
        expected_batch_size=size,
        passes=count,
    )
    accountant = dpb.PrivacyAccountant(neighboring=RELATION)
    model = linear(2)
    with torch.no_grad():
        model.weight.copy_(mean)
    if "SGNHT as" in name:
        states, temperature = published_thermostat(x, y, mean, lr, published, count), 1.0
        accountant.compose(GaussianDpEvent(published), count)
    else:
        make: Any = partial(
            dpb.optim.DPSGLD, lr=lr, temperature=0.5 if "published" in name else 1.0
        )
        if "SGNHT" in name:
            make = partial(dpb.optim.DPSGNHT, lr=lr, temperature=1.0, momentum=LINE["momentum"])
        floor = published if "published" in name else noise(LINE["epsilon"], delta, 1.0, count)
        loader = DataLoader(Records(x, y), batch_size=size, collate_fn=collate)
        model, optimizer, private = dpb.PrivacyEngine(accountant).make_private(
            module=model,
            optimizer=partial(make, prior_std=LINE["prior_std"]),
            data_loader=loader,
            max_grad_norm=clip,
            noise_multiplier=floor,
        )
        temperature = optimizer.effective_temperature
        states = torch.empty(count, 2, dtype=torch.float64)
        for number, (rows, targets) in enumerate(endless(private, count)):
            optimizer.zero_grad()
            (0.5 * (model(rows).squeeze(-1) - targets).square()).mean().backward()
            optimizer.step()
            states[number] = model.weight.detach()[0]
    kept = states[count // 10 :]
    standard = torch.linalg.solve_triangular(
        torch.linalg.cholesky(covariance), (kept - mean).T, upper=False
    ).T
    ratio = float(standard.var(0).mean()) if bool(standard.isfinite().all()) else math.inf
    shown = kept[:: max(1, len(kept) // 300)] if repeat == 0 else kept[:0]
    told = {
        "variance": ratio,
        "temperature": temperature,
        "spent": accountant.get_epsilon(delta),
        "lr": lr,
    }
    return {**told, "states": [[round(v, 4) for v in s] for s in shown.tolist()]}


def endless(loader: Any, count: int) -> Iterator[Any]:
    """Pass after pass, ``count`` batches."""
    while True:
        for batch in loader:
            if count == 0:
                return
            count -= 1
            yield batch


def published_thermostat(
    x: Tensor, y: Tensor, start: Tensor, lr: float, noise_multiplier: float, count: int
) -> Tensor:
    """Their Algorithm 3 in the velocity v = ηp: noise beside the privacy noise, and the
    kinetic energy at the end of the step.
    """
    size, clip = len(x), LINE["clip"]
    friction = 1 - LINE["momentum"]
    extra = math.sqrt(2 * friction * lr / size)
    theta, v, alpha = start.clone(), torch.zeros(2, dtype=torch.float64), friction
    states = torch.empty(count, 2, dtype=torch.float64)
    for state in states:
        gradients = x * (x @ theta.float() - y)[:, None]
        gradients = gradients * (
            clip / torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
        ).clamp_max(1)
        total = gradients.sum(0).double() + noise_multiplier * clip * torch.randn(
            2, dtype=torch.float64
        )
        v = (
            (1 - alpha) * v
            - lr * (total / size + theta / LINE["prior_std"] ** 2 / size)
            + extra * torch.randn(2, dtype=torch.float64)
        )
        theta = theta + v
        alpha += 0.01 * (size * float(v @ v) / (2 * lr) - 1)
        state.copy_(theta)
    return states


# -- runs ------------------------------------------------------------------------------------------


def run(root: str | None, what: str, **job: Any) -> dict[str, Any]:
    return line_chain(**job) if what == "line" else accuracy(root, **job)


def accuracy(
    root: str | None, data: str, method: str, epsilon: float, repeat: int, settings: str
) -> dict[str, Any]:
    """Of a fit on test records, in percent, and the average negative log likelihood there."""
    records = load(data, 0 if data == "Adult" else repeat, root)
    function, options = METHODS[method]
    fit = function(records, epsilon, **options)
    right = ((fit.scores > 0).float() == records.y_test).double().mean()
    likelihood = nn.functional.binary_cross_entropy_with_logits(
        fit.scores.double(), records.y_test.double()
    )
    return {
        "accuracy": 100 * float(right),
        "nll": float(likelihood),
        "spent": fit.epsilon,
        **fit.settings,
    }


def jobs(
    data: Sequence[str], repeats: int, epsilons: Sequence[float], count: int
) -> list[dict[str, Any]]:
    """Three repeats of everything first; what takes longest comes last, and of draws by the
    No-U-Turn sampler there are few on Adult.
    """
    found: list[dict[str, Any]] = []
    minutes: list[dict[str, Any]] = []
    fast = tuple(name for name in METHODS if name not in SLOW + SLOWEST)
    for first, last in ((0, 3), (3, repeats)):
        for methods in (fast, SLOW, SLOWEST):
            for repeat in range(first, min(last, repeats)):
                if first == 0 and methods == SLOW:
                    line = {
                        "what": "line",
                        "repeat": repeat,
                        "count": count,
                        "settings": reproduction.digest(**LINE),
                    }
                    found += [{**line, "name": name} for name in CHAINS]
                for name, epsilon, method in product(data, epsilons, methods):
                    few = methods == SLOWEST and name == "Adult"
                    if (method != NON_PRIVATE or epsilon == epsilons[0]) and not (
                        few and (first or epsilon not in epsilons[::3])
                    ):
                        job = {
                            "what": "accuracy",
                            "data": name,
                            "method": method,
                            "epsilon": epsilon,
                            "repeat": repeat,
                        }
                        (minutes if few else found).append(
                            {**job, "settings": reproduction.digest(**METHODS[method][1])}
                        )
    return found + minutes


# -- tables and picture ----------------------------------------------------------------------------


def summary(runs: Sequence[reproduction.Run], epsilons: Sequence[float]) -> list[dict[str, Any]]:
    """A row for each data set, method and ε. "gap": to the non-private fit on the same
    records, "se" its standard error over repeats.
    """
    found: dict[tuple[str, str, float], dict[int, dict[str, Any]]] = {}
    for done in runs:
        if done.job["what"] == "accuracy":
            found.setdefault((done.job["data"], done.job["method"], done.job["epsilon"]), {})[
                done.job["repeat"]
            ] = done.result
    for (data, method, epsilon), results in list(found.items()):
        if method == NON_PRIVATE:
            found |= {(data, method, other): results for other in epsilons if other != epsilon}
    rows = []
    for (data, method, epsilon), results in found.items():
        free = found[data, NON_PRIVATE, epsilon]
        gaps = [
            results[repeat]["accuracy"] - free[repeat]["accuracy"]
            for repeat in results
            if repeat in free
        ]
        numbers = {
            name: np.array([result[name] for result in results.values()])
            for name in ("accuracy", "nll", "spent")
        }
        row = {
            "data": data,
            "method": method,
            "epsilon": epsilon,
            "relation": "" if method == NON_PRIVATE else RELATION,
            "repeats": len(results),
        }
        row |= {
            "accuracy": numbers["accuracy"].mean(),
            "sd": spread(numbers["accuracy"]),
            "worst": numbers["accuracy"].min(),
        }
        row |= {
            "gap": np.mean(gaps),
            "se": spread(gaps) / math.sqrt(len(gaps)),
            "nll": numbers["nll"].mean(),
            "spent": numbers["spent"].max(),
        }
        rows.append(
            {
                name: round(float(value), 4) if isinstance(value, float) else value
                for name, value in row.items()
            }
        )
    order = {
        name: place
        for names in (dict.fromkeys(row["data"] for row in rows), METHODS)
        for place, name in enumerate(names)
    }
    return sorted(rows, key=lambda row: (order[row["data"]], order[row["method"]], row["epsilon"]))


def spread(values: Any) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def within(mean: float, deviation: float) -> str:
    return f"{mean:.1f}" if math.isnan(deviation) else f"{mean:.1f} ± {deviation:.1f}"


def accuracy_table(rows: Sequence[dict[str, Any]], data: str, epsilons: Sequence[float]) -> str:
    """Methods by ε: accuracy ± standard deviation over repeats."""
    lines = []
    for method in METHODS:
        there = {
            row["epsilon"]: row for row in rows if row["data"] == data and row["method"] == method
        }
        cells = {
            f"{epsilon:g}": within(there[epsilon]["accuracy"], there[epsilon]["sd"])
            for epsilon in epsilons
            if epsilon in there
        }
        counts = [row["repeats"] for row in there.values()]
        if counts:
            cells["repeats"] = (
                f"{min(counts)}"
                if min(counts) == max(counts)
                else f"{min(counts)} to {max(counts)}"
            )
            lines.append({data: method} | cells)
    return reproduction.markdown(
        lines, dict.fromkeys((data, *(f"{epsilon:g}" for epsilon in epsilons), "repeats"), "")
    )


def comparisons(
    runs: Sequence[reproduction.Run], rows: Sequence[dict[str, Any]], epsilons: Sequence[float]
) -> str:
    """Differences on the same records, ± one standard error. The best is one of those methods
    that have all repeats: other means do not compare.
    """
    found: dict[tuple[str, str, float], dict[int, float]] = {}
    for done in runs:
        if done.job["what"] == "accuracy":
            found.setdefault((done.job["data"], done.job["method"], done.job["epsilon"]), {})[
                done.job["repeat"]
            ] = done.result["accuracy"]

    def best(methods: Sequence[str], data: str, epsilon: float) -> str | None:
        there = [row for row in rows if (row["data"], row["epsilon"]) == (data, epsilon)]
        most = max((row["repeats"] for row in there), default=0)
        there = [row for row in there if row["method"] in methods and row["repeats"] == most > 1]
        return str(max(there, key=lambda row: row["accuracy"])["method"]) if there else None

    lines = []
    for data, (ours, theirs) in product(dict.fromkeys(row["data"] for row in rows), COMPARED):
        line = {
            "": (
                f"{data}: {' or '.join(ours) if len(ours) == 1 else 'best of ours'} −"
                f" {'best ' * (len(theirs) > 1)}{theirs[0]}"
            )
        }
        for epsilon in epsilons:
            first, second = best(ours, data, epsilon), best(theirs, data, epsilon)
            if first is None or second is None:
                continue
            here = found[data, first, epsilon]
            there = found[data, second, epsilons[0] if second == NON_PRIVATE else epsilon]
            apart = [here[repeat] - there[repeat] for repeat in here if repeat in there]
            line[f"{epsilon:g}"] = (
                f"{np.mean(apart):+.2f} ± {spread(apart) / math.sqrt(len(apart)):.2f}"
                + f" ({first.removeprefix('OPS, ')})" * (len(ours) > 1)
            )
        lines.append(line)
    return reproduction.markdown(
        lines, dict.fromkeys(("", *(f"{epsilon:g}" for epsilon in epsilons)), "")
    )


def line_summary(runs: Sequence[reproduction.Run]) -> list[dict[str, Any]]:
    """A row for each chain of the linear regression."""
    rows = []
    for name in CHAINS:
        those = [
            done.result for done in runs if done.job["what"] == "line" and done.job["name"] == name
        ]
        if those:
            ratios = np.array([result["variance"] for result in those])
            finite = bool(np.isfinite(ratios).all())
            row = {
                "method": name,
                "lr": those[0]["lr"],
                "epsilon": LINE["epsilon"],
                "relation": RELATION,
                "spent": those[0]["spent"],
            }
            row |= {
                "repeats": len(those),
                "variance ratio": ratios.mean() if finite else math.inf,
                "sd": spread(ratios) if finite else None,
            }
            rows.append(row)
    return [
        {
            name: round(float(value), 4) if isinstance(value, float) else value
            for name, value in row.items()
        }
        for row in rows
    ]


def line_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        told = "diverges" if row["sd"] is None else f"{row['variance ratio']:.2f} ± {row['sd']:.2f}"
        lines.append(
            {
                "linear regression": row["method"],
                "lr": row["lr"],
                "variance / posterior's": told,
                "ε that it costs": row["spent"],
            }
        )
    return reproduction.markdown(
        lines,
        {
            "linear regression": "",
            "lr": ".2g",
            "variance / posterior's": "",
            "ε that it costs": ".3g",
        },
    )


def draw(runs: Sequence[reproduction.Run], rows: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row["data"] for row in rows))
    figure, grid = plt.subplots(2, 3, figsize=(16, 9.5), layout="constrained", squeeze=False)
    _, _, mean, covariance = line_data(0)
    angle = torch.linspace(0, 2 * math.pi, 200, dtype=torch.float64)
    ring = torch.linalg.cholesky(covariance) @ torch.stack([angle.cos(), angle.sin()])
    for axis, kind in zip(grid[0], ("DP-SGLD", "DP-SGNHT"), strict=False):
        for name in reversed(CHAINS):
            states: list[list[float]] = next(
                (
                    d.result["states"]
                    for d in runs
                    if d.job["what"] == "line" and d.job["name"] == name and d.job["repeat"] == 0
                ),
                [],
            )
            if (
                kind in name
                and len(states)
                and all(math.isfinite(v) for state in states for v in state)
            ):
                axis.plot(*np.array(states).T, ".", markersize=4, alpha=0.5, label=name)
        for radius in (1, 2, 3):
            centre = mean[:, None] + radius * ring
            axis.plot(
                *centre.numpy(),
                "k-",
                linewidth=0.8,
                label="posterior, 1 to 3 standard deviations" if radius == 1 else None,
            )
        size = 8 * covariance.diagonal().sqrt()
        axis.set(
            title=f"linear regression, ε = {LINE['epsilon']:g}: {kind}",
            xlabel="intercept",
            ylabel="slope",
        )
        axis.set(
            xlim=(float(mean[0] - size[0]), float(mean[0] + size[0])),
            ylim=(float(mean[1] - size[1]), float(mean[1] + size[1])),
        )
        axis.legend(fontsize="small", loc="upper right")
    colours = plt.get_cmap("tab20")
    for axis, data in zip(grid[1], names, strict=False):
        for number, method in enumerate(METHODS):
            there = sorted(
                (row["epsilon"], row["accuracy"], row["sd"])
                for row in rows
                if row["data"] == data and row["method"] == method
            )
            if not there:
                continue
            x, y, sd = np.array(there).T
            free, own = method == NON_PRIVATE, method in OURS
            look: dict[str, Any] = (
                {"fmt": "k--"}
                if free
                else {
                    "fmt": "o-" if own else "s:",
                    "color": colours((2 * number - 2) % 20 + (number > 10)),
                    "markersize": 3,
                }
            )
            x = x * 1.015 ** (number - len(METHODS) / 2)  # error bars beside each other
            axis.errorbar(
                x, y, None if free else sd, linewidth=1.2, elinewidth=0.7, label=method, **look
            )
        top = max(row["accuracy"] for row in rows if row["data"] == data)
        axis.set(
            title=f"{data}: test accuracy in %, ± one standard deviation",
            xscale="log",
            xlabel="ε, replacing one record, δ = 1/N^1.1",
        )
        axis.set(ylim=(top - 15, top + 1))
    handles, labels = grid[1][0].get_legend_handles_labels()
    grid[0][2].legend(handles, labels, loc="center", fontsize="medium")
    for axis in [grid[0][2], *grid[1][len(names) :]]:
        axis.axis("off")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument(
        "--quick", action="store_true", help="made-up data, three values of ε, few repeats"
    )
    size.add_argument("--full", action="store_true", help="all of it")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--data-root",
        help="folder with abalone/abalone.data, adult/adult.data and adult/adult.test",
    )
    source.add_argument(
        "--download", action="store_true", help="Abalone and Adult through ucimlrepo"
    )
    parser.add_argument(
        "--repeats", type=reproduction.positive, help="default: 20, or 4 with --quick"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="default: runs/privacy_for_free, with --quick runs/privacy_for_free_quick",
    )
    parser.add_argument(
        "--stored",
        action="store_true",
        help="tables and picture of the runs that are finished, without making others",
    )
    parser.add_argument(
        "--workers",
        type=reproduction.positive,
        default=1,
        help="processes with one thread each; default: 1",
    )
    options = parser.parse_args(arguments)
    real = ["Abalone", "Adult"] if options.data_root or options.download else []
    if options.quick and real:
        parser.error("--quick makes its data up: leave --data-root and --download out")
    if missing := [
        file
        for name in real
        for file in FILES[name]
        if options.data_root and not (Path(options.data_root) / file).is_file()
    ]:
        parser.error(f"there is no {' and no '.join(missing)} in the --data-root")
    # that loaders now draw Poisson batches
    logging.getLogger("torch_dpbayes").setLevel(logging.ERROR)
    epsilons = (0.5, 2.0, 10.0) if options.quick else EPSILONS
    wanted = jobs(
        ["Two Gaussians", *real],
        options.repeats or (4 if options.quick else 20),
        epsilons,
        1000 if options.quick else 3000,
    )
    folder = options.folder or reproduction.ROOT / "runs" / (
        "privacy_for_free_quick" if options.quick else "privacy_for_free"
    )
    results = folder / "runs.jsonl"
    if options.stored:
        stored = reproduction.stored_runs(results)
        runs = [stored[key] for key in map(reproduction.key, wanted) if key in stored]
        if not runs:
            parser.error(f"none of these runs is in {results}: leave --stored out")
    else:
        runs = reproduction.run_jobs(
            partial(run, options.data_root), wanted, results, options.workers
        )
    given = [
        value for value in (sys.argv[1:] if arguments is None else arguments) if value != "--stored"
    ]
    return report(
        runs,
        epsilons,
        folder,
        [
            value.replace(options.data_root, "FOLDER") if options.data_root else value
            for value in given
        ],
    )


def report(
    runs: Sequence[reproduction.Run],
    epsilons: Sequence[float],
    folder: Path,
    arguments: Sequence[str],
) -> list[dict[str, Any]]:
    """Tables, CSVs and picture."""
    rows, lines = summary(runs, epsilons), line_summary(runs)
    reproduction.write_csv(rows, folder / "rows.csv")
    reproduction.write_csv(lines, folder / "regression.csv")
    draw(runs, rows, folder / "picture.png")
    tables = [
        accuracy_table(rows, data, epsilons) for data in dict.fromkeys(row["data"] for row in rows)
    ]
    text = (
        "\n\n".join(
            [
                line_table(lines),
                *tables,
                comparisons(runs, rows, epsilons),
                reproduction.origin(runs, arguments),
            ]
        )
        + "\n"
    )
    (folder / "table.md").write_text(text)
    print(text)
    return rows


if __name__ == "__main__":
    main()
