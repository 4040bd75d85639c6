"""Writes tests/golden/: what this version of the library saves and computes.

    python scripts/benchmarks/write_golden_files.py

tests/test_golden_files.py reads the files with later versions. Write them anew only where a file
format or a number changed on purpose, and say so in the changelog.
"""

from __future__ import annotations

import base64
import copy
import json
import logging
import pickle
import sqlite3
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes import ops
from torch_dpbayes.accounting import Charge, EpsilonBounds, LedgerError, PrivacyAccountant, events
from torch_dpbayes.accounting.accountant import look_at
from torch_dpbayes.noise import GaussianNoise

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
DELTA = 1e-5
STEP = events.PoissonSampledDpEvent(0.05, events.GaussianDpEvent(1.1))

EVENTS = [
    events.GaussianDpEvent(4.0),
    STEP,
    events.SampledWithoutReplacementDpEvent(500, 10, events.GaussianDpEvent(3.0)),
    events.UnspecifiedBatchGaussianDpEvent(20.0),
    events.RecordwiseBatchGaussianDpEvent(20.0),
    events.ShuffledEpochDpEvent(20.0),
    events.MuGaussianDpEvent(0.3),
    events.PureDpEvent(0.2),
    events.BoundedRangeDpEvent(0.3),
    events.FailureDpEvent(1e-7),
    events.ZCDpEvent(0.01, 0.0),
    events.ComposedDpEvent([events.GaussianDpEvent(9.0), events.PureDpEvent(0.05)]),
    events.SelfComposedDpEvent(STEP, 100),
    events.NoOpDpEvent(),
    events.NonPrivateDpEvent(),
]


def prices() -> list[dict[str, Any]]:
    """Epsilon of each kind of event, five times, by relation and method; None: refused."""
    found = []
    for event in EVENTS:
        for neighboring in ("add_or_remove_one", "replace_one"):
            for method in ("pld", "rdp"):
                accountant = PrivacyAccountant(method=method, neighboring=neighboring)
                try:
                    epsilon = accountant.compose(event, 5).get_epsilon(DELTA)
                except ValueError:
                    epsilon = None
                setting = {"neighboring": neighboring, "method": method}
                found.append({"event": repr(event), **setting, "epsilon": epsilon})
    return found


def public_values() -> dict[str, Any]:
    """What a user may have pickled."""
    run = ops.FiniteRunLangevin(steps=10, lipschitz=1.0, strength=1.0, smoothness=2.0)
    log_concave = ops.StronglyLogConcave(lipschitz=1.0, strength=2.0)
    chain = ops.Underdamped(steps=3, step_size=0.1)
    bounded = ops.Bounded(2.0)
    return {
        **{f"event {i}": event for i, event in enumerate(EVENTS)},
        "Charge": Charge(STEP, 3, "training", False),
        "EpsilonBounds": EpsilonBounds(1.0, 2.0),
        "PrivacyBudgetExceeded": dpb.PrivacyBudgetExceeded("too much"),
        "LedgerError": LedgerError("damaged"),
        "FiniteRunLangevin": run,
        "Bounded": bounded,
        "StronglyLogConcave": log_concave,
        "RenyiClose": ops.RenyiClose(log_concave, chain, divergence=0.1, order=20.0, delta=1e-6),
        "TotalVariationClose": ops.TotalVariationClose(
            bounded, xi=1e-9, delta=1e-6, sampler=ops.Underdamped(steps=3, step_size=0.1)
        ),
        "Overdamped": ops.Overdamped(steps=3, step_size=0.1),
    }


def network() -> nn.Module:
    """A small network whose parameters are the same everywhere."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.linspace(-0.5, 0.5, p.numel()).view(p.shape))
    return net


def records() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.linspace(-1.0, 1.0, 72).view(24, 3).sin()
    return x, (torch.arange(24) % 3 == 0).long()


def private_run(net: nn.Module, accountant: PrivacyAccountant) -> tuple[Any, Callable[[], None]]:
    """A seeded optimizer for ``net``, and what trains it for an epoch of six steps."""
    loader = DataLoader(
        TensorDataset(*records()), batch_size=4, generator=torch.Generator().manual_seed(5)
    )
    generator = torch.Generator().manual_seed(7)
    factory = partial(dpb.optim.DPSGNHT, lr=0.1, temperature=1.0, generator=generator)
    net, optimizer, private = dpb.PrivacyEngine(accountant).make_private(
        module=net, optimizer=factory, data_loader=loader, max_grad_norm=0.5, noise_multiplier=1.2
    )

    def train() -> None:
        for x, y in private:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()

    return optimizer, train


@contextmanager
def noise_of_the_generator_alone() -> Iterator[None]:
    """What a release hides does not enter its noise: sums differ in their last bits between
    processors, and their hash would make other noise of that.
    """
    own = GaussianNoise.next_stream

    def next_stream(self: GaussianNoise, device: Any, hides: Any) -> torch.Generator:
        return own(self, device, ())

    with mock.patch.object(GaussianNoise, "next_stream", next_stream):
        yield


def write_checkpoint() -> dict[str, Any]:
    """Saves a checkpoint after an epoch, and returns the parameters after the next."""
    net, accountant = network(), PrivacyAccountant(5.0, DELTA)
    optimizer, train = private_run(net, accountant)
    train()
    saved = {"model": copy.deepcopy(net.state_dict()), "optimizer": optimizer.state_dict()}
    torch.save(saved, GOLDEN / "checkpoint.pt")
    with noise_of_the_generator_alone():
        train()
    parameters = {name: p.tolist() for name, p in net.named_parameters()}
    return {"parameters": parameters, "epsilon": accountant.get_epsilon(DELTA)}


def write_samples() -> dict[str, Any]:
    net, samples = network(), dpb.PosteriorSamples(burn_in=1, thin=2, max_samples=10)
    for k in range(8):
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(1.0 + 0.1 * k)
        samples.collect(net)
    samples.save(GOLDEN / "samples.pt")
    net.eval()
    prediction = samples.predict(net, records()[0], transform=partial(F.softmax, dim=-1))
    return {"length": len(samples), "prediction": prediction.tolist()}


def ledger_values(path: Path) -> dict[str, Any]:
    """What one reads from a ledger without writing to it."""
    accountant, rows = look_at(path)
    return {
        "guarantee": accountant.guarantee,
        "epsilon": accountant.get_epsilon(DELTA),
        "remaining": accountant.remaining(STEP),
        "releases": len(accountant),
        "history": repr(accountant.history),
        "notes": list(accountant.notes),
        "rows": len(rows),
    }


def write_ledger() -> dict[str, Any]:
    path = GOLDEN / "ledger.db"
    path.unlink(missing_ok=True)
    accountant = PrivacyAccountant(4.0, DELTA, path=path)
    accountant.compose(events.GaussianDpEvent(30.0), 2, label="a look at the norms")
    for _ in range(120):
        accountant.compose(STEP, label="training")
    accountant.note("a statement of the golden files")
    accountant.state_dict()  # writes down what was used of open blocks
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
    connection.close()
    return ledger_values(path)


def main() -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    GOLDEN.mkdir(exist_ok=True)
    pickles = {
        name: base64.b64encode(pickle.dumps(value, protocol=4)).decode()
        for name, value in public_values().items()
    }
    values = {
        "torch": torch.__version__,
        "library": dpb.__version__,
        "prices": prices(),
        "checkpoint": write_checkpoint(),
        "samples": write_samples(),
        "ledger": write_ledger(),
        "pickles": pickles,
    }
    (GOLDEN / "values.json").write_text(json.dumps(values, indent=1) + "\n")
    for file in sorted(GOLDEN.iterdir()):
        print(f"{file.name}: {file.stat().st_size / 1000:.1f} kB")


if __name__ == "__main__":
    main()
