"""What the parts of the library cost beside the same work without privacy, on one core each.

    python scripts/benchmarks/speed.py                       # all four tables, 5 minutes
    python scripts/benchmarks/speed.py kernels --seconds 2   # one of them, shorter

* ``optimizers``: charge, noise, prior and update of a step, over ``torch.optim.SGD`` and one
  ``torch.randn`` per parameter;
* ``loader``: a Poisson draw against the number of records, and batches over torch's ``DataLoader``;
* ``kernels``: clipped gradients and record terms of Pyro models, over Pyro's gradient and trace;
* ``ranks``: the processor time of a step of one process and of each of two (gloo on loopback).

Medians of interleaved rounds. What clipping costs is in bench_clipping.py, GPUs are in gpu.py.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer.mcmc.util import initialize_model
from pyro.ops.integrator import potential_grad
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes.batches.poisson_loader import PoissonLoader
from torch_dpbayes.batches.sampler import PoissonSampler
from torch_dpbayes.density import RecordDensity
from torch_dpbayes.per_sample.hooks import HooksGradientSource

Work = Callable[[], Any]


def medians(works: Sequence[Work], seconds: float) -> list[float]:
    """Median seconds of a processor of each, taken in turn."""
    times: list[list[float]] = [[] for _ in works]
    for work in works:
        work()
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times[0]) < 5:
        for work, found in zip(works, times, strict=True):
            start = time.process_time()
            work()
            found.append(time.process_time() - start)
    return [statistics.median(found) for found in times]


def row(*cells: Any) -> None:
    """Of a table; numbers are ratios."""
    print("|", *(f"{c:.2f} |" if isinstance(c, float) else f"{c} |" for c in cells), flush=True)


def head(*cells: str) -> None:
    row(*cells)
    print("|---" * len(cells) + "|", flush=True)


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2g} ms"


# --- optimizers -----------------------------------------------------------------------------------

SHAPES: dict[int, list[tuple[int, ...]]] = {
    110: [(1, 109), (1,)],
    10**4: [(100, 90), (100,), (8, 100), (100,)],
    10**6: [(1000, 784), (1000,), (204, 1000), (204,), (10, 204), (10,)],
    10**7: [(1000, 1000)] * 9 + [(999, 1000), (1000,)],
}
SAMPLERS: dict[str, Callable[..., Any]] = {
    "SGLD": dpb.optim.DPSGLD,
    "SGHMC": dpb.optim.DPSGHMC,
    "SGNHT": dpb.optim.DPSGNHT,
    "SGFS, diagonal": partial(dpb.optim.DPSGFS, fisher="diagonal"),
}


class GivenSum(HooksGradientSource):
    """A clipped sum that was computed before."""

    def add_clipped_sum(self, _: Any, __: Any, out: list[Tensor], **options: Any) -> int:
        torch._foreach_zero_(out)
        return 64


def private_update(name: str, parameters: list[nn.Parameter]) -> Work:
    optimizer = SAMPLERS[name](
        parameters,
        1e-3,
        assume_independent_records=True,
        num_data=10_000,
        expected_batch_size=64,
        max_grad_norm=1.0,
        sampling="poisson",
    )
    optimizer.release.source = GivenSum()
    return optimizer.step


def plain_update(parameters: list[nn.Parameter]) -> Work:
    for p in parameters:
        p.grad = torch.randn_like(p)
    optimizer = torch.optim.SGD(parameters, 1e-9, foreach=True)

    def step() -> None:
        for p in parameters:
            torch.randn(p.shape)
        optimizer.step()

    return step


def optimizers(seconds: float) -> None:
    head("parameters", *SAMPLERS)
    for size, shapes in SHAPES.items():
        made = [[nn.Parameter(0.01 * torch.randn(s)) for s in shapes] for _ in range(2)]
        works = [(private_update(name, made[0]), plain_update(made[1])) for name in SAMPLERS]
        found = [medians(both, seconds) for both in works]
        row(f"{size:,}", *(ours / theirs for ours, theirs in found))


# --- loader ---------------------------------------------------------------------------------------

BATCH = 256


class AtOnce(Dataset[Any]):
    """Tensors; one index reads a whole batch."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitems__(self, positions: list[int]) -> list[Tensor]:
        index = torch.from_numpy(np.array(positions))
        return [t[index] for t in self.tensors]


def read(batches: Iterable[Any]) -> None:
    for _ in batches:
        pass


def read_private(loader: PoissonLoader) -> None:
    """Reads one epoch, and uses up each draw, as a step on it would."""
    read(loader)
    loader.sampler_of_draws._draws.clear()
    loader.sampler_of_draws._begin()


def loader(seconds: float) -> None:
    head("a batch of 256 records", "here", "torch", "here / torch")
    for size in (10**4, 10**6, 10**9):
        sampler = PoissonSampler(size, BATCH / size, None, 0)
        row(f"a Poisson draw from {size:,}", ms(medians([sampler._next_draw], seconds)[0]), "", "")
    for width, size in ((20, 51_200), (784, 12_800)):
        data = TensorDataset(torch.randn(size, width), torch.randint(10, (size,)))
        private = PoissonLoader(DataLoader(data, BATCH), BATCH / len(data))
        at_once = DataLoader(AtOnce(*data.tensors), BATCH, shuffle=True, collate_fn=lambda b: b)
        others = {"record by record": DataLoader(data, BATCH, shuffle=True), "at once": at_once}
        works = [partial(read_private, private), *(partial(read, o) for o in others.values())]
        ours, *theirs = medians(works, seconds)
        for how, found in zip(others, theirs, strict=True):
            both = ms(ours * BATCH / size), ms(found * BATCH / size)
            row(f"{width} features, torch's {how}", *both, ours / found)


# --- kernels --------------------------------------------------------------------------------------


def normal(name: str, *shape: int) -> Tensor:
    return pyro.sample(name, dist.Normal(0.0, 1.0).expand(shape).to_event(len(shape)))


def logistic(x: Tensor, y: Tensor) -> None:
    weights = normal("weights", x.shape[1])
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=x @ weights), obs=y)


def gaussian(x: Tensor) -> None:
    mean = normal("mean", x.shape[1])
    with pyro.plate("data", len(x)):
        pyro.sample("x", dist.Normal(mean, 1.0).to_event(1), obs=x)


def hierarchical(group: Tensor, y: Tensor) -> None:
    center, spread = normal("center"), pyro.sample("spread", dist.HalfNormal(1.0))
    with pyro.plate("groups", 20):
        effect = pyro.sample("effect", dist.Normal(center, spread))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(effect[group], 1.0), obs=y)


def network(x: Tensor, y: Tensor) -> None:
    first, bias, second = normal("first", 3, 50), normal("bias", 50), normal("second", 50)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(torch.tanh(x @ first + bias) @ second, 1.0), obs=y)


MODELS: dict[str, tuple[Callable[..., None], Callable[[], tuple[Tensor, ...]]]] = {
    "logistic, N = 10,000, d = 20": (
        logistic,
        lambda: (torch.randn(10_000, 20), torch.full((10_000,), 0.5).bernoulli()),
    ),
    "Gaussian, N = 100,000, d = 10": (gaussian, lambda: (torch.randn(100_000, 10),)),
    "hierarchical, N = 100,000, 22 latents": (
        hierarchical,
        lambda: (torch.randint(0, 20, (100_000,)), torch.randn(100_000)),
    ),
    "network 3-50-1, N = 2,000": (network, lambda: (torch.randn(2_000, 3), torch.randn(2_000))),
}


def kernels(seconds: float) -> None:
    head("model", "clipped gradients, time", "time / Pyro's", "log-likelihoods, time / Pyro's")
    for name, (model, make) in MODELS.items():
        data = make()
        density = RecordDensity(model, data)
        theta = 0.1 * torch.randn(density.prior.dimension)
        _, potential, _, _ = initialize_model(model, data)
        start = dict(density.prior.unflatten(theta))
        conditioned = poutine.condition(model, density.prior.constrain(theta))

        def trace(conditioned: Any = conditioned, data: tuple[Tensor, ...] = data) -> None:
            with torch.no_grad():
                poutine.trace(conditioned).get_trace(*data).compute_log_prob()

        gradients = (
            partial(density.clipped_gradient_sum, theta, 1.0),
            partial(potential_grad, potential, start),
        )
        terms = partial(density.log_likelihoods, theta), trace
        ours, theirs = medians(gradients, seconds)
        ours_terms, their_terms = medians(terms, seconds)
        row(name, ms(ours), ours / theirs, ours_terms / their_terms)


# --- ranks and owners -----------------------------------------------------------------------------

PARALLEL_BATCH = 512
RANKS = {"cnn": "CNN, 26,010 parameters, batch 512", "mlp": "MLP, 203,530 parameters, batch 512"}


def training(model: str) -> Callable[[int], None]:
    """Takes so many steps of DP-SGLD."""
    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
    x = torch.randn(10_000, 784)
    if model == "cnn":
        first, second = nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.Conv2d(16, 32, 4, stride=2)
        head = nn.Sequential(nn.Flatten(1), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10))
        pool = partial(nn.MaxPool2d, 2, stride=1)
        net = nn.Sequential(first, nn.Tanh(), pool(), second, nn.Tanh(), pool(), head)
        x = x.unflatten(1, (1, 28, 28))
    group = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
    net, optimizer, batches = dpb.PrivacyEngine(process_group=group).make_private(
        module=net,
        optimizer=partial(dpb.optim.DPSGLD, lr=0.1),
        data_loader=DataLoader(TensorDataset(x, torch.randint(10, (len(x),))), PARALLEL_BATCH),
        max_grad_norm=1.0,
    )

    def steps(number: int) -> None:
        left = number
        while left:
            for inputs, targets in batches:
                optimizer.zero_grad()
                F.cross_entropy(net(inputs), targets).backward()
                optimizer.step()
                left -= 1
                if not left:
                    break

    return steps


def rank_process(what: str, rank: int, size: int, place: str, pipe: Connection) -> None:
    logging.disable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if size > 1:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{place}",
            rank=rank,
            world_size=size,
            timeout=timedelta(minutes=5),
        )
    work = training(what)
    work(3)
    pipe.send(None)
    while number := pipe.recv():
        start, used = time.perf_counter(), time.process_time()
        work(number)
        pipe.send((time.perf_counter() - start, time.process_time() - used))
    if size > 1:
        torch.distributed.destroy_process_group()


def ranks(seconds: float) -> None:
    head("time of a rank for a step", "one rank", "each of two")
    for what in RANKS:
        cells = []
        for size in (1, 2):
            with tempfile.TemporaryDirectory() as folder:
                context, pipes, processes = multiprocessing.get_context("spawn"), [], []
                for rank in range(size):
                    mine, theirs = context.Pipe()
                    given = (what, rank, size, f"{folder}/store", theirs)
                    processes.append(context.Process(target=rank_process, args=given, daemon=True))
                    processes[-1].start()
                    theirs.close()
                    pipes.append(mine)
                for pipe in pipes:
                    pipe.recv()
                number, used = 5, 0.0
                for _ in range(2):  # a short run says how many steps take so many seconds
                    for pipe in pipes:
                        pipe.send(number)
                    columns = zip(*(pipe.recv() for pipe in pipes), strict=True)
                    wall, used = (max(column) / number for column in columns)
                    number = max(3, round(seconds / wall))
                for pipe in pipes:
                    pipe.send(0)
                for process in processes:
                    process.join()
            cells.append(ms(used))
        row(RANKS[what], *cells)


PARTS = {part.__name__: part for part in (optimizers, loader, kernels, ranks)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--seconds", type=float, default=4.0, help="for a row; default: 4")
    given = parser.parse_args(arguments)
    if unknown := set(given.parts) - PARTS.keys():  # choices= refuses that there are none
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    for part in given.parts or PARTS:
        PARTS[part](given.seconds)
        print(flush=True)


if __name__ == "__main__":
    main()
