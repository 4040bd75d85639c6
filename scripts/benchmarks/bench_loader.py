"""What the private loader costs: a draw against the number of records, batches against torch's own
``DataLoader`` with equal settings, and private training end to end against plain SGLD.

    python scripts/benchmarks/bench_loader.py [--rounds 15]

Processor times, medians of interleaved rounds; memory is the operating system's figure. Torch's
loader reads record by record; ``batched`` is torch's loader over a data set with ``__getitems__``.
"""

from __future__ import annotations

import argparse
import copy
import logging
import resource
import statistics
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from bench_clipping import model_and_batch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes.batches.poisson_loader import PoissonLoader
from torch_dpbayes.batches.sampler import PoissonSampler

BATCH = 256


class AtOnce(Dataset[Any]):
    """Tensors of which a batch is read by one index."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitems__(self, positions: list[int]) -> list[torch.Tensor]:
        index = torch.from_numpy(np.array(positions))
        return [t[index] for t in self.tensors]


def as_it_is(batch: Any) -> Any:
    return batch


def seconds(batches: Iterable[Any]) -> float:
    start = time.process_time()
    for _ in batches:
        pass
    return time.process_time() - start


def draws_used_up(sampler: PoissonSampler) -> None:
    """As after a step on each: the next pass draws anew."""
    sampler._draws.clear()
    sampler._begin()


def draws(rounds: int) -> None:
    """Milliseconds of a draw, with its bookkeeping, and megabytes that N more records take."""
    print(f"{'records':>12}  ms a draw  MB more than before")
    for num_data in (10**4, 10**5, 10**6, 10**7, 10**8, 10**9):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        times = []
        sampler = PoissonSampler(num_data, BATCH / num_data, None, 0)
        for _ in range(rounds):
            start = time.process_time()
            for _ in range(20):
                sampler._next_draw()
            times.append((time.process_time() - start) / 20)
        more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3
        print(f"{num_data:12}  {1e3 * statistics.median(times):9.3f}  {more:.1f}")


def throughput(rounds: int) -> None:
    """Time of a pass, ours over torch's."""
    for name, width, size in (("20 features", 20, 51_200), ("784 features", 784, 12_800)):
        data = TensorDataset(torch.randn(size, width), torch.randint(10, (size,)))
        private = PoissonLoader(DataLoader(data, BATCH), BATCH / len(data))
        loaders: dict[str, DataLoader[Any]] = {
            "record by record": DataLoader(data, BATCH, shuffle=True),
            "batched": DataLoader(AtOnce(*data.tensors), BATCH, shuffle=True, collate_fn=as_it_is),
            "private": private,
        }
        ratios: dict[str, list[float]] = {"record by record": [], "batched": []}
        times = []
        for _ in range(rounds):
            taken = {kind: seconds(loader) for kind, loader in loaders.items()}
            draws_used_up(private.sampler_of_draws)
            times.append(taken["private"] / (size // BATCH))
            for kind, found in ratios.items():
                found.append(taken["private"] / taken[kind])
        print(
            f"{name}: {1e3 * statistics.median(times):.3f} ms a private batch; time over torch's"
            f" record by record {statistics.median(ratios['record by record']):.2f}, batched"
            f" {statistics.median(ratios['batched']):.2f}"
        )


def plain_step(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """SGLD without clipping."""
    net.zero_grad()
    F.cross_entropy(net(x), y).backward()
    with torch.no_grad():
        for p in net.parameters():
            assert p.grad is not None
            p.add_(p.grad + torch.randn_like(p), alpha=-1e-6)


def private_step(net: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(net(x), y).backward()
    optimizer.step()


def end_to_end(rounds: int) -> None:
    """Time of a private step with its batch over a plain one with its own, 5 a round, interleaved:
    of batches that torch's loader reads record by record, or at once.
    """
    logging.getLogger("torch_dpbayes").setLevel(logging.ERROR)
    for name in ("logistic", "mlp", "cnn"):
        net, x, y = model_and_batch(name, 20)
        data, batch, twin = TensorDataset(x, y), len(x) // 20, copy.deepcopy(net)
        private, optimizer, loader = dpb.PrivacyEngine().make_private(
            module=net,
            optimizer=partial(dpb.optim.DPSGLD, lr=1e-6),
            data_loader=DataLoader(data, batch_size=batch),
            max_grad_norm=1.0,
            noise_multiplier=1.0,
        )

        at_once = DataLoader(AtOnce(x, y), batch, shuffle=True, collate_fn=as_it_is)
        ways = {
            "private": (endless(loader), partial(private_step, private, optimizer)),
            "record by record": (
                endless(DataLoader(data, batch, shuffle=True)),
                partial(plain_step, twin),
            ),
            "at once": (endless(at_once), partial(plain_step, twin)),
        }
        ratios: dict[str, list[float]] = {"record by record": [], "at once": []}
        for _ in range(rounds + 1):
            taken = {}
            for way, (batches, step) in ways.items():
                start = time.process_time()
                for _ in range(5):
                    step(*next(batches))
                taken[way] = time.process_time() - start
            for way, found in ratios.items():
                found.append(taken["private"] / taken[way])
        said = ", ".join(f"{way} {statistics.median(r[1:]):.2f}" for way, r in ratios.items())
        print(f"{name}, batch {batch}: private over plain, its batches read {said}", flush=True)


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    draws(rounds)
    throughput(rounds)
    end_to_end(rounds)


if __name__ == "__main__":
    main()
