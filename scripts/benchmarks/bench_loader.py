"""What the private loader costs: a draw against the number of records, and batches against torch's
own ``DataLoader`` with equal settings.

    python scripts/benchmarks/bench_loader.py [--rounds 15]

Processor times, medians of interleaved rounds; memory is the operating system's figure. Torch's
loader reads record by record; ``batched`` is torch's loader over a data set with ``__getitems__``.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from torch_dpbayes.batches.draws import PoissonSampler
from torch_dpbayes.batches.poisson_loader import PoissonLoader

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    draws(rounds)
    throughput(rounds)


if __name__ == "__main__":
    main()
