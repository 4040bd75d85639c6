"""Seeded runs of everything that the library computes: what compare_commits.py compares.

    PYTHONPATH=. python scripts/benchmarks/recorded_runs.py runs.pt [--only PART_OF_NAME]

Only public names are used, so that one program runs with many versions of the library, also with
those since commit 8727aaa. Entropy of the operating system is replaced by a stream
that starts anew with each run, separately for each number of bytes asked for. A change that draws
fresh generators more often, or in another order, therefore differs here although no law has
changed. Noise comes from the generator alone: what a release hides does not enter it, so that a sum
that is rounded otherwise does not change all that follows.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import io
import logging
import os
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain as chained
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from opacus.layers import DPLSTM
from opacus.utils.batch_memory_manager import BatchMemoryManager
from pyro.infer import MCMC
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes import mcmc, noise, ops
from torch_dpbayes.accounting import events
from torch_dpbayes.mcmc import DPHMC, DPPenalty, ExponentialFamilyPenalty
from torch_dpbayes.optim import DPSGFS, DPSGHMC, DPSGLD, DPSGNHT, schedules

Values = dict[str, Any]  # tensors, numbers and words by name
Case = Callable[[], Values]

HISTORIES = 300
RELATIONS = ("add_or_remove_one", "replace_one")
DELTA = 1e-5
RECORDS, CLASSES, STEPS = 48, 3, 6


class Entropy:
    """Replaces ``os.urandom``: a stream for each number of bytes, seeded by a name."""

    def __init__(self, name: str) -> None:
        self.name, self.asked = name, Counter[int]()

    def __call__(self, size: int) -> bytes:
        self.asked[size] += 1
        text = f"{self.name} {size} {self.asked[size]}"
        return hashlib.shake_256(text.encode()).digest(size)


def number_of(name: str) -> int:
    return zlib.crc32(name.encode())


# --- optimizers and engine modes ------------------------------------------------------------------


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 4)
        self.hidden, self.last = nn.Linear(4, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.hidden(self.embedding(x))).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = DPLSTM(4, 5, batch_first=True), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(x)[0][:, -1])


def dense(*inner: nn.Module) -> nn.Module:
    inner = inner or (nn.LayerNorm(6), nn.Tanh())
    return nn.Sequential(nn.Linear(4, 6), *inner, nn.Linear(6, CLASSES))


def convolutional() -> nn.Module:
    first, second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, stride=2, groups=2)
    norm = nn.GroupNorm(2, 4)
    return nn.Sequential(first, norm, nn.ReLU(), second, nn.Flatten(1), nn.Linear(16, CLASSES))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "dense": (dense, lambda: torch.randn(RECORDS, 4)),
    "dropout": (lambda: dense(nn.ReLU(), nn.Dropout(0.3)), lambda: torch.randn(RECORDS, 4)),
    "convolutional": (convolutional, lambda: torch.randn(RECORDS, 2, 5, 5)),
    "sequence": (Sequence, lambda: torch.randint(20, (RECORDS, 7))),
    "recurrent": (Recurrent, lambda: torch.randn(RECORDS, 5, 4)),
}

SAMPLERS: dict[str, Callable[..., Any]] = {
    "DPSGLD": DPSGLD,
    "DPSGHMC": partial(DPSGHMC, momentum=0.7),
    "DPSGHMC matched": partial(DPSGHMC, momentum="matched"),
    "DPSGNHT": DPSGNHT,
    "DPSGFS full": partial(DPSGFS, fisher="full"),
    "DPSGFS diagonal": partial(DPSGFS, fisher="diagonal"),
}


def cauchy(named: Mapping[str, Tensor]) -> Tensor:
    return -sum((p.square().log1p().sum() for p in named.values()), torch.zeros(()))


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "polynomial": lambda optimizer: schedules.PolynomialDecay(optimizer, offset=3.0),
    "cyclical": lambda optimizer: schedules.Cyclical(optimizer, 6, 2),
}


def charges(accountant: Any) -> Values:
    history = [(repr(charge.event), charge.count) for charge in accountant.history]
    return {"history": repr(history), "epsilon": accountant.get_epsilon(DELTA)}


def trained(
    name: str,
    sampler: str,
    *,
    model: str = "dense",
    mode: str | None = None,
    own_loss: bool = False,
    is_vouched: bool = False,
    schedule: str | None = None,
    physical_batch: int | None = None,
    resumed: bool = False,
    neighboring: str = "add_or_remove_one",
    dtype: torch.dtype = torch.float32,
    batch_size: int = 8,
    **options: Any,
) -> Values:
    """What a few private steps make of a model, what they were charged, and the state."""
    make, inputs = MODELS[model]
    net, x = make(), inputs()
    if x.is_floating_point():
        net, x = net.to(dtype), x.to(dtype)
    data = TensorDataset(x, torch.randint(CLASSES, (RECORDS,)))
    seed = number_of(name)
    loader = DataLoader(data, batch_size, generator=torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(seed + 1)
    factory = partial(
        SAMPLERS[sampler], generator=generator, **{"lr": 0.05, "temperature": 1.0, **options}
    )
    loss_of = nn.CrossEntropyLoss()
    engine = dpb.PrivacyEngine(dpb.PrivacyAccountant(neighboring=neighboring))
    net, optimizer, private = engine.make_private(
        module=net,
        optimizer=factory,
        data_loader=loader,
        max_grad_norm=0.8,
        noise_multiplier=1.1,
        grad_sample_mode=mode,
        assume_independent_records=is_vouched or mode == "hooks",
        loss=loss_of if own_loss else None,
    )
    scheduler = None if schedule is None else SCHEDULES[schedule](optimizer)
    samples = dpb.PosteriorSamples(burn_in=1, thin=2)

    def train() -> None:
        split: Any = contextlib.nullcontext(private)
        if physical_batch:
            split = BatchMemoryManager(
                data_loader=private, max_physical_batch_size=physical_batch, optimizer=optimizer
            )
        with split as batches:
            passes = batch_size * STEPS // RECORDS
            for inputs, targets in chained.from_iterable(batches for _ in range(passes)):
                optimizer.zero_grad()
                if own_loss:
                    net.private_loss(inputs, targets).backward()
                else:
                    loss_of(net(inputs), targets).backward()
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
                samples.collect(net)

    train()
    if resumed:
        stream = io.BytesIO()
        torch.save(optimizer.state_dict(), stream)
        stream.seek(0)
        optimizer.load_state_dict(torch.load(stream, weights_only=True))
        train()
    found: Values = {f"parameter {k}": p.detach().clone() for k, p in net.named_parameters()}
    for k, p in net.named_parameters():
        for what, value in optimizer.state.get(p, {}).items():
            found[f"state {k} {what}"] = copy.deepcopy(value)
    found["prediction"] = samples.predict(net.eval(), x, transform=partial(F.softmax, dim=-1))
    for what in ("langevin_noise_multiplier", "effective_noise_multiplier", "free_lr"):
        found[what] = getattr(optimizer, what)
    return {**found, **charges(engine.accountant)}


def bare(name: str, sampler: str, sampling: str | None, neighboring: str) -> Values:
    """Steps of an optimizer without an engine, on per-record gradients that are given."""
    parameters = [nn.Parameter(0.1 * torch.randn(3)), nn.Parameter(0.1 * torch.randn(2, 2))]
    accountant = dpb.PrivacyAccountant(neighboring=neighboring)
    groups = [{"params": [parameters[0]], "lr": 0.02, "prior_std": 0.5}, {"params": parameters[1:]}]
    optimizer = SAMPLERS[sampler](
        groups,
        0.05,
        assume_independent_records=True,
        num_data=40,
        expected_batch_size=10,
        max_grad_norm=0.5,
        temperature=1.0,
        noise_multiplier=1.3,
        sampling=sampling,
        accountant=accountant,
        generator=torch.Generator().manual_seed(number_of(name)),
    )
    for _ in range(4):
        for p in parameters:
            p.grad_sample = torch.randn(10, *p.shape)  # type: ignore[attr-defined]
        optimizer.step()
    found = {str(i): p.detach().clone() for i, p in enumerate(parameters)}
    return {**found, **charges(accountant)}


def engine_numbers() -> Values:
    """What an engine plans and calibrates, and what is said about clip norms."""
    net, data = dense(), TensorDataset(torch.randn(200, 4), torch.randint(CLASSES, (200,)))
    loader = DataLoader(data, batch_size=20)
    found: Values = {}
    for epsilon in (0.5, 3.0):
        sampler = partial(DPSGLD, lr=0.25, temperature=1.0)
        arguments = {"module": net, "optimizer": sampler, "data_loader": loader}
        engine = dpb.PrivacyEngine()
        target = {"target_epsilon": epsilon, "target_delta": DELTA, "epochs": 3}
        found[f"plan {epsilon}"] = repr(engine.plan(**arguments, **target, max_grad_norm=1.0))
        _, optimizer, _ = engine.make_private_with_epsilon(
            **{**arguments, "module": dense()}, **target, max_grad_norm=1.0
        )
        found[f"noise {epsilon}"] = optimizer.noise_multiplier
    return found


# --- chains ---------------------------------------------------------------------------------------


def gaussian(x: Tensor) -> None:
    mean = pyro.sample("mean", dist.Normal(0.0, 0.5).expand([x.shape[1]]).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("x", dist.Normal(mean, 1.0).to_event(1), obs=x)


def logistic(x: Tensor, y: Tensor) -> None:
    weights = pyro.sample("weights", dist.Normal(0.0, 2.0).expand([x.shape[1]]).to_event(1))
    offset = pyro.sample("offset", dist.LogNormal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=x @ weights - offset), obs=y)


def gaussian_prior() -> None:
    pyro.sample("mean", dist.Normal(0.0, 10.0))


PENALTY: Values = {"proposal_scale": 0.2, "log_ratio_slope": 2.0, "noise_multiplier": 3.0}
HMC: Values = {
    "step_size": 0.1,
    "num_steps": 3,
    "log_ratio_slope": 2.0,
    "max_grad_norm": 2.0,
    "ratio_noise_multiplier": 3.0,
    "grad_noise_multiplier": 4.0,
}
FAMILY: Values = {
    "sufficient_statistics": lambda x: torch.stack([x, torch.ones_like(x)]),
    "natural_parameters": lambda theta: torch.stack([theta["mean"], torch.zeros(())]),
    "log_normalizer": lambda theta: theta["mean"] ** 2 / 2,
    "max_statistic_norm": 3.0,
    "noise_multiplier": 2.0,
    "proposal_scale": 0.3,
}


def chain(kernel: Callable[..., Any], model: Any, relation: str, **options: Any) -> Values:
    if model is logistic:
        x = torch.randn(30, 2)
        data = (x / 3, torch.bernoulli(x[:, 0].sigmoid()))
    else:
        data = (torch.randn(30) + 0.5,) if model is gaussian_prior else (torch.randn(30, 2) + 0.5,)
    accountant = dpb.PrivacyAccountant(neighboring=relation)
    made = kernel(model, accountant=accountant, **options)
    runner = MCMC(made, num_samples=25, warmup_steps=10, disable_progbar=True)
    runner.run(*data)
    found: Values = dict(runner.get_samples())
    for what, value in made.diagnostics().items():
        found[f"diagnostic {what}"] = value
    return {**found, **charges(accountant)}


def owners(kernel: Callable[..., Any], relation: str, **options: Any) -> Values:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        return chain(kernel, gaussian, relation, **options)
    finally:
        torch.distributed.destroy_process_group()


def chain_plans() -> Values:
    found: Values = {}
    for kernel in (DPPenalty, ExponentialFamilyPenalty, DPHMC):
        bounds = {"log_ratio_slope": 1.0, "max_grad_norm": 1.0}
        options = {"num_steps": 3, **bounds} if kernel is DPHMC else {}
        for relation in RELATIONS:
            made = mcmc.plan(
                kernel,
                target_epsilon=2.0,
                target_delta=DELTA,
                num_iterations=500,
                neighboring=relation,
                **options,
            )
            found[f"{kernel.__name__} {relation}"] = repr(made.noise_multipliers)
    return found


# --- one posterior sample -------------------------------------------------------------------------

_CLOSE = {"divergence": 0.05}
CERTIFICATES: dict[str, Callable[[], Any]] = {
    "finite run": lambda: ops.FiniteRunLangevin(steps=60),
    "finite run, small steps": lambda: ops.FiniteRunLangevin(steps=60, step_size=0.01),
    "bounded": lambda: ops.Bounded(2.0),
    "log-concave": ops.StronglyLogConcave,
    "Renyi, finite order": lambda: ops.RenyiClose(
        ops.StronglyLogConcave(),
        ops.Underdamped(steps=60, step_size=0.05),
        order=40.0,
        delta=1e-6,
        **_CLOSE,
    ),
    "total variation": lambda: ops.TotalVariationClose(
        ops.Bounded(2.0), xi=1e-9, delta=1e-6, sampler=ops.Underdamped(steps=60, step_size=0.02)
    ),
}


def posterior_sample(certificate: str, relation: str, epsilon: float | None, family: str) -> Values:
    x = torch.randn(40, 3)
    y = x[:, 0] / 2 if family == "gaussian" else torch.bernoulli(x[:, 0].sigmoid())
    accountant = dpb.PrivacyAccountant(neighboring=relation)
    accountant.compose(events.GaussianDpEvent(20.0))
    noise = {"noise_std": 0.5} if family == "gaussian" else {}
    model = ops.GLM(family, prior_std=0.7, max_feature_norm=1.0, **noise)
    sampler = ops.OnePosteriorSample(
        model, CERTIFICATES[certificate](), epsilon, DELTA, accountant, num_data=40
    )
    found: Values = dict(sampler.sample(x, y))
    found["tempering"], found["guarantee"] = sampler.tempering, sampler.guarantee()
    return {**found, **charges(accountant)}


def pyro_sample() -> Values:
    x = torch.randn(30, 2)
    certificate = ops.FiniteRunLangevin(steps=40, lipschitz=1.0, strength=0.25, smoothness=10.0)
    sampler = ops.OnePosteriorSample(logistic_without_offset, certificate, 1.0, DELTA)
    found: Values = dict(sampler.sample(x / 3, torch.bernoulli(x[:, 0].sigmoid())))
    return {**found, **charges(sampler.accountant)}


def logistic_without_offset(x: Tensor, y: Tensor) -> None:
    weights = pyro.sample("weights", dist.Normal(0.0, 2.0).expand([x.shape[1]]).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=x @ weights), obs=y)


def hybrid(sampler: str) -> Values:
    x = torch.randn(60, 3)
    result = ops.hybrid(
        ops.GLM(prior_std=0.5),
        x,
        (x[:, 0] > 0).float(),
        certificate=ops.FiniteRunLangevin(steps=50),
        optimizer=partial(SAMPLERS[sampler], lr=0.05, temperature=1.0),
        epsilon=2.0,
        delta=DELTA,
        epochs=2,
        batch_size=10,
    )
    found: Values = {k: p.detach().clone() for k, p in result.module.named_parameters()}
    found |= {f"start {k}": v for k, v in result.start.items()}
    return {**found, **charges(result.accountant)}


# --- accounting -----------------------------------------------------------------------------------


def random_event(random: np.random.Generator, relation: str, depth: int = 0) -> events.DpEvent:
    """An event of any kind that the accountant knows."""

    def uniform(low: float, high: float) -> float:
        return float(np.exp(random.uniform(np.log(low), np.log(high))))

    def gaussian() -> events.DpEvent:
        return events.GaussianDpEvent(uniform(0.8, 60.0))

    size = int(random.integers(50, 5000))
    kinds: list[Callable[[], events.DpEvent]] = [
        gaussian,
        lambda: events.PoissonSampledDpEvent(uniform(1e-4, 1.0), gaussian()),
        lambda: events.PoissonSampledDpEvent(uniform(1e-3, 0.1), gaussian()),
        lambda: events.PoissonSampledDpEvent(1.0, gaussian()),
        lambda: events.SampledWithoutReplacementDpEvent(
            size, int(random.integers(1, size)), gaussian()
        ),
        lambda: events.RecordwiseBatchGaussianDpEvent(uniform(2.0, 60.0)),
        lambda: events.MuGaussianDpEvent(uniform(0.01, 1.0)),
        lambda: events.PureDpEvent(uniform(1e-3, 1.0)),
        lambda: events.BoundedRangeDpEvent(uniform(1e-3, 1.0)),
        lambda: events.FailureDpEvent(uniform(1e-9, 3e-6)),
        lambda: events.ZCDpEvent(uniform(1e-4, 0.1), float(random.choice([0.0, 0.05]))),
        events.NoOpDpEvent,
    ]
    if relation == "replace_one":
        kinds.append(lambda: events.UnspecifiedBatchGaussianDpEvent(uniform(2.0, 60.0)))
        kinds.append(lambda: events.ShuffledEpochDpEvent(uniform(2.0, 60.0)))
    if depth < 2:
        inner = partial(random_event, random, relation, depth + 1)
        kinds.append(lambda: events.ComposedDpEvent([inner(), inner()]))
        kinds.append(lambda: events.SelfComposedDpEvent(inner(), int(random.integers(0, 20))))
    if random.random() < 0.01:
        return events.NonPrivateDpEvent()
    return kinds[random.integers(len(kinds))]()


def random_history(number: int, relation: str) -> list[tuple[events.DpEvent, int]]:
    random = np.random.default_rng([number, RELATIONS.index(relation)])
    length = int(random.integers(1, 9))
    return [
        (random_event(random, relation), int(np.exp(random.uniform(0, np.log(300)))))
        for _ in range(length)
    ]


def priced(number: int) -> Values:
    """Epsilon and delta of one random history, under each relation by each method."""
    found: Values = {}
    for relation in RELATIONS:
        history = random_history(number, relation)
        for method in ("pld", "rdp"):
            accountant = dpb.PrivacyAccountant(method=method, neighboring=relation)
            for event, count in history:
                if method == "rdp" or "ZCDp" not in repr(event):  # has a Renyi curve only
                    accountant.compose(event, count)
            delta = (1e-3, 1e-5, 1e-8)[number % 3]
            key = f"{relation} {method}"
            found[f"{key} epsilon"] = accountant.get_epsilon(delta)
            found[f"{key} delta"] = accountant.get_delta(2.0)
            if method == "pld" and number % 5 == 0:
                found[f"{key} bounds"] = repr(accountant.get_epsilon(delta, return_bounds=True))
            found[f"{key} history"] = repr(accountant.history)
    return found


# --- all of them ----------------------------------------------------------------------------------


def _cases() -> dict[str, Case]:
    made: dict[str, Case] = {}

    def add(name: str, function: Callable[..., Values], *arguments: Any, **options: Any) -> None:
        made[name] = partial(function, *arguments, **options)

    def train(name: str, sampler: str, **options: Any) -> None:
        add(f"training: {name}", trained, name, sampler, **options)
        # no draw decides who joins: these differ only where something else than the draws does
        everybody = f"all records: {name}"
        add(everybody, trained, everybody, sampler, batch_size=RECORDS, **options)

    for sampler in SAMPLERS:
        train(sampler, sampler)
        train(f"{sampler}, replace one", sampler, neighboring="replace_one", prior_std=0.5)
        train(f"{sampler}, cold and double", sampler, temperature=0.1, dtype=torch.float64)
        train(f"{sampler}, resumed", sampler, resumed=True)
        train(f"{sampler}, split batches", sampler, physical_batch=3)
        add(f"bare optimizer: {sampler}", bare, f"bare {sampler}", sampler, "poisson", RELATIONS[0])
        if sampler in ("DPSGLD", "DPSGHMC", "DPSGNHT"):
            train(f"{sampler}, own prior", sampler, log_prior=cauchy)
    for sampling, relation in (("recordwise", RELATIONS[0]), (None, RELATIONS[1])):
        name = f"DPSGLD, sampling {sampling}"
        add(f"bare optimizer: {name}", bare, f"bare {name}", "DPSGLD", sampling, relation)
    for schedule in SCHEDULES:
        train(f"schedule {schedule}", "DPSGLD", schedule=schedule)
        train(f"schedule {schedule}, DPSGNHT", "DPSGNHT", schedule=schedule)
    train("momentum, gain", "DPSGNHT", momentum=0.8, thermostat_gain=0.05)
    train("Fisher share", "DPSGFS full", fisher_share=0.3, fisher_decay=0.9)
    for model in MODELS:
        if model != "recurrent":
            train(f"{model}, book-keeping mapped", "DPSGLD", model=model)
            train(f"{model}, vmap", "DPSGLD", model=model, mode="vmap")
            train(f"{model}, own loss", "DPSGLD", model=model, own_loss=True)
        if model != "dropout":
            train(f"{model}, vouched for", "DPSGLD", model=model, is_vouched=True)
            train(f"{model}, hooks", "DPSGLD", model=model, mode="hooks")
    add("engine: plans and calibration", engine_numbers)

    for relation in RELATIONS:
        for name, kernel, model, options in (
            ("DPPenalty, Gaussian", DPPenalty, gaussian, PENALTY),
            ("DPPenalty, logistic", DPPenalty, logistic, PENALTY),
            ("DPHMC, Gaussian", DPHMC, gaussian, {**HMC, "jitter": 0}),
            ("DPHMC, logistic", DPHMC, logistic, {**HMC, "reuse_gradients": False}),
            ("ExponentialFamilyPenalty", ExponentialFamilyPenalty, gaussian_prior, FAMILY),
        ):
            if kernel is ExponentialFamilyPenalty and relation == RELATIONS[0]:
                options = {**options, "num_data": 30}
            add(f"chain: {name}, {relation}", chain, kernel, model, relation, **options)
        for kernel, options in ((mcmc.MultiOwnerPenalty, PENALTY), (mcmc.MultiOwnerHMC, HMC)):
            add(f"chain: {kernel.__name__}, {relation}", owners, kernel, relation, **options)
    add("chain: plans", chain_plans)

    for relation in RELATIONS:
        for certificate in CERTIFICATES:
            family = "gaussian" if certificate == "bounded" else "bernoulli"
            if family == "bernoulli" or relation == RELATIONS[1]:  # a long chain
                name = f"one posterior sample: {certificate}, {relation}"
                add(name, posterior_sample, certificate, relation, None, family)
        name = f"one posterior sample: tempered, {relation}"
        add(name, posterior_sample, "finite run", relation, 1.0, "bernoulli")
    add("one posterior sample: Pyro model", pyro_sample)
    for sampler in ("DPSGLD", "DPSGNHT"):
        add(f"hybrid: {sampler}", hybrid, sampler)

    for number in range(HISTORIES):
        add(f"history: {number}", priced, number)
    return made


def record(only: str = "") -> dict[str, Values | str]:
    """The values of every run whose name holds ``only``, or its error in words if it failed."""
    found: dict[str, Values | str] = {}
    for name, case in _cases().items():
        if only not in name:
            continue
        os.urandom = Entropy(name)
        torch.manual_seed(number_of(name))
        np.random.seed(number_of(name))
        pyro.clear_param_store()
        try:
            with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found[name] = case()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    stream = noise.stream_of_key

    def of_the_generator(what: str, generator: Any, parts: Any, device: Any) -> torch.Generator:
        return stream(what, generator, (), device)

    with mock.patch.object(noise, "stream_of_key", of_the_generator):
        torch.save({"library": dpb.__file__, "runs": record(given.only)}, given.file)


if __name__ == "__main__":
    main()
