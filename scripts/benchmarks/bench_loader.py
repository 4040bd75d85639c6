"""What the private loader costs: a draw against the number of records, batches against torch's own
``DataLoader`` with equal settings, records of tar shards against reading the shards from end to
end, and private training end to end against plain SGLD.

    python scripts/benchmarks/bench_loader.py [--rounds 15]

Processor times, medians of interleaved rounds; memory is the operating system's figure. Torch's
loader reads record by record; ``batched`` is torch's loader over a data set with ``__getitems__``.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import logging
import os
import resource
import statistics
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_clipping import model_and_batch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes.batches.draws import PoissonSampler
from torch_dpbayes.batches.poisson_loader import PoissonLoader
from torch_dpbayes.batches.shards import TarShards

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


def write_shards(folder: Path, shards: int, records: int) -> Path:
    """Records of a picture of 784 bytes and a label; returns the index."""
    listed = []
    for number in range(shards):
        name = f"train-{number:04}.tar"
        with tarfile.open(folder / name, "w") as tar:
            for k in range(records):
                for extension, content in (("pixels", os.urandom(784)), ("cls", b"7")):
                    info = tarfile.TarInfo(f"{number * records + k:08}.{extension}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
        listed.append({"url": name, "nsamples": records})
    index = folder / "index.json"
    index.write_text(json.dumps({"shardlist": listed}))
    return index


def decoded(files: dict[str, bytes]) -> tuple[torch.Tensor, int]:
    pixels = np.frombuffer(files["pixels"], np.uint8).reshape(1, 28, 28)
    return torch.from_numpy(pixels / np.float32(255)), int(files["cls"])


def in_their_order(paths: Iterable[Path]) -> Iterator[tuple[torch.Tensor, int]]:
    """What WebDataset does: one record after another."""
    for path in paths:
        with tarfile.open(path) as tar:
            name, files = "", dict[str, bytes]()
            for member in tar:
                of, _, extension = member.name.partition(".")
                if files and of != name:
                    yield decoded(files)
                    files = {}
                stream = tar.extractfile(member)
                assert stream is not None
                name, files[extension] = of, stream.read()
            yield decoded(files)


def shards(rounds: int) -> None:
    """Microseconds a record: to open, to read in batches of records anywhere, and in order."""
    with tempfile.TemporaryDirectory() as name:
        index = write_shards(Path(name), 10, 1000)
        paths = sorted(Path(name).glob("*.tar"))
        taken: dict[str, list[float]] = {"open": [], "anywhere": [], "in order": []}
        for _ in range(rounds):
            start = time.process_time()
            data = TarShards(index, decoded)
            taken["open"].append((time.process_time() - start) / len(data))
            batches = [torch.randperm(len(data))[:BATCH].tolist() for _ in range(8)]
            passed = seconds(map(data.__getitems__, batches))
            taken["anywhere"].append(passed / (len(batches) * BATCH))
            taken["in order"].append(seconds(in_their_order(paths)) / len(data))
    micro = {way: 1e6 * statistics.median(found) for way, found in taken.items()}
    print(
        f"tar shards, a record: {micro['open']:.0f} us to open; {micro['anywhere']:.0f} us to read"
        f" anywhere, {micro['in order']:.0f} us one after another by tarfile"
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
    shards(rounds)
    end_to_end(rounds)


if __name__ == "__main__":
    main()
