#!/usr/bin/env python3
"""Steps per second on one core and on two, and the bytes that a rank sends in a step.

    python bench_distributed.py [--seconds 5] [--rounds 5] [--what cnn mlp penalty]

cnn and mlp train by DP-SGLD with data parallelism (gloo on the loopback interface) at the same
global batch size, loading from memory included; penalty runs the penalty kernel on a logistic
regression whose records lie with one owner, or divided between two. Every rank has a core of its
own, and the settings take turns, so that a slow moment of the machine hits all alike; a figure is
the median over rounds. Bytes are those that the kernel's TCP counters of a rank's sockets gain
(Linux), measured with few records and with 25 times as many. CPU is what a rank uses in a step,
which a busy machine changes less than the clock; the set-up of a chain counts in with its
iterations.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import socket
import statistics
import struct
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

BATCH, FEATURES = 512, 20
FEW, MANY = 4_000, 100_000


def bytes_sent() -> int:
    """By all TCP connections of this process so far."""
    total = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as connection:
                if (
                    connection.family in (socket.AF_INET, socket.AF_INET6)
                    and connection.type == socket.SOCK_STREAM
                ):
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += struct.unpack_from("<Q", info, 200)[0]  # tcpi_bytes_sent
        except OSError:
            continue
    return total


def training(model: str, num_records: int) -> Callable[[int], None]:
    """Takes that many steps."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import torch_dpbayes as dpb

    torch.manual_seed(0)
    if model == "mlp":
        x, net = (
            torch.randn(num_records, 784),
            nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)),
        )
    else:
        x = torch.randn(num_records, 1, 28, 28)
        net = nn.Sequential(
            nn.Conv2d(1, 16, 8, stride=2, padding=3),
            nn.Tanh(),
            nn.MaxPool2d(2, stride=1),
            nn.Conv2d(16, 32, 4, stride=2),
            nn.Tanh(),
            nn.MaxPool2d(2, stride=1),
            nn.Flatten(1),
            nn.Linear(512, 32),
            nn.Tanh(),
            nn.Linear(32, 10),
        )
    data = TensorDataset(x, torch.randint(10, (num_records,)))
    net, optimizer, loader = dpb.PrivacyEngine(process_group=dist.group.WORLD).make_private(
        module=net,
        optimizer=partial(dpb.optim.DPSGLD, lr=0.1),
        data_loader=DataLoader(data, batch_size=BATCH),
        max_grad_norm=1.0,
    )

    def steps(number: int) -> None:
        taken = 0
        while taken < number:
            for inputs, targets in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(inputs), targets).backward()
                optimizer.step()
                taken += 1
                if taken == number:
                    break

    return steps


def chain(rank: int, size: int, num_records: int) -> Callable[[int], None]:
    """Runs the penalty kernel for that many iterations."""
    import pyro
    import pyro.distributions as distributions
    import torch
    from pyro.infer import MCMC

    import torch_dpbayes as dpb
    from torch_dpbayes.mcmc import DPPenalty, MultiOwnerPenalty

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_records, FEATURES, generator=generator)
    y = (torch.rand(num_records, generator=generator) < torch.sigmoid(x[:, 0])).float()
    x, y = x[rank::size], y[rank::size]

    def model(x: torch.Tensor, y: torch.Tensor) -> None:
        weights = pyro.sample(
            "weights", distributions.Normal(0.0, 1.0).expand([FEATURES]).to_event(1)
        )
        with pyro.plate("data", len(x)):
            pyro.sample("y", distributions.Bernoulli(logits=x @ weights), obs=y)

    kind = MultiOwnerPenalty if size > 1 else DPPenalty
    settings: dict[str, Any] = dict(
        proposal_scale=1e-3, log_ratio_slope=1.0, noise_multiplier=500.0
    )

    def iterations(number: int) -> None:
        kernel = kind(model, accountant=dpb.PrivacyAccountant(), **settings)
        MCMC(kernel, num_samples=number, warmup_steps=0, disable_progbar=True).run(x, y)

    return iterations


def rank_process(
    what: str, rank: int, size: int, num_records: int, place: str, pipe: Connection
) -> None:
    with contextlib.suppress(AttributeError, OSError):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    import logging
    import warnings
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    logging.disable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{place}",
            rank=rank,
            world_size=size,
            timeout=timedelta(minutes=5),
        )
    work = chain(rank, size, num_records) if what == "penalty" else training(what, num_records)
    work(3)
    pipe.send(None)
    while (number := pipe.recv()) is not None:
        before, start, used = bytes_sent(), time.perf_counter(), time.process_time()
        work(number)
        pipe.send((time.perf_counter() - start, time.process_time() - used, bytes_sent() - before))
    if size > 1:
        dist.destroy_process_group()


class Setting:
    """Running ranks that wait for a number of steps."""

    def __init__(self, what: str, size: int, num_records: int, folder: str) -> None:
        context = multiprocessing.get_context("spawn")
        place = os.path.join(folder, f"{what}-{size}-{num_records}")
        self.pipes, self.processes = [], []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=rank_process,
                args=(what, rank, size, num_records, place, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)
        for pipe in self.pipes:
            pipe.recv()

    def run(self, number: int) -> tuple[float, float, float]:
        """Steps per second; milliseconds of a processor that a rank uses in one, and bytes
        that it sends (means over ranks).
        """
        for pipe in self.pipes:
            pipe.send(number)
        answers = [pipe.recv() for pipe in self.pipes]
        seconds, used, sent = zip(*answers, strict=True)
        return (
            number / max(seconds),
            1e3 * statistics.mean(used) / number,
            statistics.mean(sent) / number,
        )

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="of a round on one core; default: 5"
    )
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument(
        "--what", nargs="+", choices=("cnn", "mlp", "penalty"), default=["cnn", "mlp", "penalty"]
    )
    options = parser.parse_args()
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    os.environ["OMP_NUM_THREADS"] = "1"
    if cores < 2:
        print(
            f"this process may use {cores} core: two ranks share it, and cannot be faster than one"
        )
    print(
        f"{'':10}{'1 rank, 1/s':>14}{'2 ranks, 1/s':>14}{'ratio':>8}"
        f"{'CPU ms, 1':>12}{'CPU ms, 2':>12}",
        end="",
    )
    print(f"{f'B sent, N = {FEW}':>20}{f'N = {MANY}':>14}")
    for what in options.what:
        with tempfile.TemporaryDirectory() as folder:
            settings = [Setting(what, size, MANY, folder) for size in (1, 2)]
            number = max(3, round(settings[0].run(5)[0] * options.seconds))
            rounds = [[setting.run(number) for setting in settings] for _ in range(options.rounds)]
            medians = [
                [statistics.median(column) for column in zip(*figures, strict=True)]
                for figures in zip(*rounds, strict=True)
            ]
            (one, used, _), (two, used_of_two, sent) = medians
            for setting in settings:
                setting.close()
            few = Setting(what, 2, FEW, folder)
            *_, sent_few = few.run(number)
            few.close()
        print(
            f"{what:10}{one:14.1f}{two:14.1f}{two / one:8.2f}"
            f"{used:12.2f}{used_of_two:12.2f}{sent_few:20.0f}{sent:14.0f}"
        )


if __name__ == "__main__":
    main()
