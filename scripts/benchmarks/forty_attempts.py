"""Forty attempts of people who come to the library: each ends in a right result, or in an error of
at most 35 words that names what to write instead.

    python scripts/benchmarks/forty_attempts.py

Prints a line for each, and fails where one of them is not so.
"""

from __future__ import annotations

import copy
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import opacus
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.validators import ModuleValidator
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import torch_dpbayes as dpb

LONGEST = 35  # words of an error
N, FEATURES, CLASSES = 60, 4, 3
SAMPLER = partial(dpb.optim.DPSGLD, lr=0.05)
DELTA = 1e-5


def data(*shape: int) -> TensorDataset:
    return TensorDataset(torch.randn(N, *(shape or (FEATURES,))), torch.randint(CLASSES, (N,)))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def made(net: nn.Module | None = None, engine: Any = None, shape: Any = (), **options: Any) -> Any:
    given = {
        "module": network() if net is None else net,
        "optimizer": SAMPLER,
        "data_loader": DataLoader(data(*shape), 10),
        "max_grad_norm": 1.0,
        "noise_multiplier": 1.0,
    }
    engine = dpb.PrivacyEngine() if engine is None else engine
    return (engine, *engine.make_private(**{**given, **options}))


def with_epsilon(**options: Any) -> Any:
    engine = dpb.PrivacyEngine()
    given = {
        "module": network(),
        "optimizer": partial(dpb.optim.DPSGLD, lr="free"),
        "data_loader": DataLoader(data(), 10),
        "max_grad_norm": 1.0,
        "target_epsilon": 3.0,
        "target_delta": DELTA,
        "epochs": 1,
    }
    return (engine, *engine.make_private_with_epsilon(**{**given, **options}))


def train(engine: Any, net: Any, optimizer: Any, loader: Any, epochs: int = 1) -> bool:
    """Whether each batch of so many passes was charged as a step."""
    before = len(engine.accountant)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
    return len(engine.accountant) == before + epochs * len(loader)


def skipping() -> None:
    _, net, optimizer, loader = made()
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        if i % 2:
            optimizer.step()


def own_loader() -> None:
    _, net, optimizer, loader = made()
    for x, y in DataLoader(loader.dataset, 10, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()


def own_loss() -> None:
    _, net, optimizer, loader = made(loss=nn.functional.cross_entropy)
    for x, y in loader:
        net.private_loss(x, y).backward()
        optimizer.step()


def centred() -> None:
    _, net, optimizer, loader = made()
    x, y = next(iter(loader))
    nn.functional.cross_entropy(net(x - x.mean(0)), y).backward()
    optimizer.step()


def penalty() -> None:
    _, net, optimizer, loader = made()
    x, y = next(iter(loader))
    loss = nn.functional.cross_entropy(net(x), y) + sum(p.square().sum() for p in net.parameters())
    loss.backward()
    optimizer.step()


def in_pieces() -> bool:
    engine, net, optimizer, loader = made()
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=4, optimizer=optimizer
    ) as parts:
        for x, y in parts:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
    return len(engine.accountant) == len(loader)


def resumed() -> bool:
    engine, net, optimizer, loader = made()
    train(engine, net, optimizer, loader)
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(Path(folder) / "run.pt", module=net, optimizer=optimizer)
        other = made()
        other[0].load_checkpoint(Path(folder) / "run.pt", module=other[1], optimizer=other[2])
    return len(other[0].accountant) == len(loader) and train(*other)


def overspent() -> None:
    made_private = with_epsilon()
    for _ in range(3):
        train(*made_private)


def sampled() -> bool:
    made_private = with_epsilon(epochs=3)
    samples = dpb.PosteriorSamples()
    for _ in range(3):
        train(*made_private)
        samples.collect(made_private[1])
    probabilities = samples.predict(made_private[1], torch.randn(5, FEATURES))
    return torch.allclose(probabilities.sum(1), torch.ones(5), atol=1e-5)


def planned() -> bool:
    plan = dpb.PrivacyEngine().plan(
        module=network(),
        optimizer=SAMPLER,
        data_loader=DataLoader(data(), 10),
        max_grad_norm=1.0,
        target_epsilon=3.0,
        target_delta=DELTA,
        epochs=2,
    )
    return plan.steps == 12 and plan.epsilon <= 3.0


def drawn() -> bool:
    x = numpy.random.default_rng().uniform(-0.5, 0.5, (N, 2))
    y = (x[:, 0] > 0).astype(float)
    glm = dpb.ops.GLM("bernoulli", prior_std=1.0, max_feature_norm=1.0)
    draw = dpb.ops.OnePosteriorSample(glm, epsilon=1.0, delta=DELTA).sample(x, y)
    return draw["weights"].shape == (2,)


def shared_budget() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "budget.db"
        for _ in range(2):
            with dpb.PrivacyAccountant(3.0, DELTA, path=path) as accountant:
                engine = dpb.PrivacyEngine(accountant)
                fine = train(*made(engine=engine, noise_multiplier=20.0))
    return fine


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter([(torch.zeros(FEATURES), 0)])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(FEATURES, 6, batch_first=True), nn.Linear(6, CLASSES)

    def forward(self, x: Any) -> Any:
        return self.head(self.body(x)[0][:, -1])


def pictures() -> nn.Module:
    layers = (nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(32 * 36, CLASSES))


class Spare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.spare = network(), nn.Linear(2, 2)

    def forward(self, x: Any) -> Any:
        return self.inner(x)


IMAGES, SEQUENCES = (3, 8, 8), (5, FEATURES)
DPSGD = torch.optim.SGD
# what is tried, and the words that the answer must have; None: it has to work
ATTEMPTS: dict[str, tuple[Callable[[], Any], str | None]] = {
    "train": (lambda: train(*made()), None),
    "train to a target": (lambda: train(*with_epsilon()), None),
    "predict from samples": (sampled, None),
    "plan beforehand": (planned, None),
    "save and resume": (resumed, None),
    "batches in pieces": (in_pieces, None),
    "one draw of NumPy arrays": (drawn, None),
    "two jobs on one budget": (shared_budget, None),
    "BatchNorm made GroupNorm": (
        lambda: train(*made(ModuleValidator.fix(pictures()), shape=IMAGES)),
        None,
    ),
    "LSTM made DPLSTM": (
        lambda: train(*made(ModuleValidator.fix(Recurrent()), shape=SEQUENCES)),
        None,
    ),
    "OneCycleLR": (
        lambda: torch.optim.lr_scheduler.OneCycleLR(
            made()[2], max_lr=0.4, total_steps=6, cycle_momentum=False
        ),
        None,
    ),
    "a loss of each record": (
        own_loss,
        None,
    ),
    "model.train() forgotten": (lambda: made(network().eval()), "model.train()"),
    "BatchNorm": (lambda: made(pictures(), shape=IMAGES), "ModuleValidator.fix"),
    "LSTM": (lambda: train(*made(Recurrent(), shape=SEQUENCES)), None),
    "centring on the batch": (centred, "several records"),
    "a layer that is not used": (lambda: made(Spare()), "requires_grad_(False)"),
    "GradSampleModule": (lambda: made(opacus.GradSampleModule(network())), "model._module"),
    "optimizer=DPSGLD": (lambda: made(optimizer=dpb.optim.DPSGLD), "partial(DPSGLD, lr=0.1"),
    "DPSGLD(parameters)": (
        lambda: dpb.optim.DPSGLD(network().parameters(), lr=0.1),
        "PrivacyEngine().make_private",
    ),
    "optimizer=Adam": (lambda: made(optimizer=torch.optim.Adam), "torch_dpbayes.optim.DPSGLD"),
    "a built SGD": (
        lambda: made(optimizer=DPSGD(network().parameters(), lr=0.5)),
        "partial(torch_dpbayes.optim.DPSGLD, lr=0.5)",
    ),
    "momentum cycled": (
        lambda: torch.optim.lr_scheduler.OneCycleLR(made()[2], max_lr=0.4, total_steps=6),
        "cycle_momentum=False",
    ),
    "accountant='rdp'": (
        lambda: dpb.PrivacyEngine(accountant="rdp"),  # type: ignore[arg-type]
        'PrivacyAccountant(method="rdp")',
    ),
    "secure_mode=": (lambda: made(secure_mode=True), "secure_mode"),
    "poisson_sampling=": (lambda: made(poisson_sampling=False), "poisson_sampling"),
    "positional arguments": (
        lambda: dpb.PrivacyEngine().make_private(network(), SAMPLER),  # type: ignore[misc]
        "positional argument",
    ),
    "epochs= for the noise": (
        lambda: dpb.get_noise_multiplier(
            target_epsilon=1.0,
            target_delta=DELTA,
            sample_rate=0.1,
            epochs=3,  # type: ignore[call-arg]
        ),
        "'epochs'",
    ),
    "an iterable data set": (
        lambda: made(data_loader=DataLoader(Stream(), 10)),
        "map-style data set",
    ),
    "a batch that is too large": (
        lambda: made(data_loader=DataLoader(data(), 100)),
        f"batch_size={N}",
    ),
    "no target": (lambda: with_epsilon(target_epsilon=None), "target_epsilon is needed"),
    "ε < 0": (lambda: with_epsilon(target_epsilon=-1.0), "epsilon"),
    "no δ": (lambda: dpb.PrivacyAccountant().get_epsilon(), "delta is needed"),
    "a pickled accountant": (
        lambda: copy.deepcopy(dpb.PrivacyAccountant(3.0, DELTA)),
        "path=",
    ),
    "beyond the budget": (overspent, "budget"),
    "batches that are skipped": (skipping, "BatchMemoryManager"),
    "a loader of one's own": (own_loader, "the private loader"),
    "a penalty in the loss": (penalty, "prior_std="),
    "thin=0": (lambda: dpb.PosteriorSamples(thin=0), "thin"),
    "a mistyped name": (lambda: made(max_grad_nrom=1.0), "max_grad_nrom"),
}


def outcome(name: str) -> str:
    """What came of it; begins with ``WRONG`` where it should not have."""
    attempt, words = ATTEMPTS[name]
    try:
        result = attempt()
    except Exception as error:
        said = str(error)
        if words is None or words not in said or len(said.split()) > LONGEST:
            return f"WRONG {type(error).__name__}: {said}"
        return f"said: {said}"
    return "works" if words is None and result is not False else f"WRONG result {result!r}"


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("torch_dpbayes").setLevel(logging.ERROR)
    found = {name: outcome(name) for name in ATTEMPTS}
    for name, what in found.items():
        print(f"{name:28}{what}")
    wrong = sum(what.startswith("WRONG") for what in found.values())
    print(f"{len(found) - wrong} of {len(found)} end in a right result or a sentence with the fix")
    if wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()
