"""Time and memory as work grows: of a step, of the accountant, of the ledger and of predictions.

    python scripts/benchmarks/cost_as_work_grows.py [--plot cost_as_work_grows.png] [--rounds 5]

Every measurement runs in a forked process of its own. Times are processor times, medians over
rounds; memory is what the peak resident size gains over that of the smallest size, by the operating
system, of the process that measures (not of ranks, which are others). The data set is simulated: a
record is worked out from its position, so that 10⁹ of them need no disk.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import resource
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import start_processes
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import torch_dpbayes as dpb
from torch_dpbayes.accounting import events
from torch_dpbayes.accounting.ledger.session import jobs_of_this_process

RECORDS = [10**k for k in range(4, 10)]
PARAMETERS = [10**k for k in range(2, 9)]
RANKS = [1, 2, 4]
STEPS = [10**k for k in range(1, 10, 2)]
SETTINGS = [1, 10, 100, 1000]
HISTORY = [1, 10, 100, 1000]
JOBS = [1, 4, 16, 64]
SAMPLES = [2, 10, 100, 1000]
GAUSSIAN = events.GaussianDpEvent(1.1)


class Simulated(Dataset[Any]):
    """``size`` records of 20 features, each a function of its position."""

    def __init__(self, size: int, width: int = 20) -> None:
        self.size, self.scale = size, torch.linspace(0.1, 3.0, width)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return (self.scale * (i % 1013)).sin(), i % 2

    def __getitems__(self, positions: list[int]) -> list[tuple[torch.Tensor, int]]:
        places = torch.tensor(positions, dtype=torch.float64) % 1013
        x = (places[:, None] * self.scale).sin().float()
        return list(zip(x, [i % 2 for i in positions], strict=True))


def memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def forked(work: Callable[[int], float], size: int, smallest: int) -> tuple[float, float]:
    """Milliseconds that ``work(size)`` says, and megabytes that it takes more than the smallest."""
    ours, theirs = multiprocessing.Pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work(smallest)  # imports too
            before = memory()
            milliseconds = work(size)
            theirs.send((milliseconds, (memory() - before) / 1e3))
            code = 0
        finally:
            os._exit(code)
    theirs.close()
    try:
        found: tuple[float, float] = ours.recv()
    finally:
        os.waitpid(pid, 0)
    print(work.__name__, size, *(f"{x:.4g}" for x in found), flush=True)
    return found


def timed(work: Callable[[], Any], rounds: int, times: int = 1) -> float:
    """Median milliseconds of ``work``, which is called before, too."""
    work()
    found = []
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(times):
            work()
        found.append((time.process_time() - start) / times * 1e3)
    return statistics.median(found)


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def trained(net: nn.Module, data: Dataset[Any], batch: int, **engine: Any) -> Callable[[], None]:
    """Takes a private step, its batch included."""
    net, optimizer, loader = dpb.PrivacyEngine(**engine).make_private(
        module=net,
        optimizer=partial(dpb.optim.DPSGLD, lr=1e-3),
        data_loader=DataLoader(data, batch_size=batch),
        max_grad_norm=1.0,
        noise_multiplier=1.0,
    )
    batches = endless(loader)

    def step() -> None:
        x, y = next(batches)
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()

    return step


ROUNDS = 5


def step_by_records(num_data: int) -> float:
    return timed(trained(nn.Linear(20, 2), Simulated(num_data), 256), ROUNDS, 10)


def step_by_parameters(parameters: int) -> float:
    width = max(1, parameters // 22)
    net = nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, 2))
    return timed(trained(net, Simulated(10_000), 16), ROUNDS, 10 if parameters < 10**6 else 2)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rank(rank: int, size: int, port: int, out: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size
    )
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = nn.Sequential(nn.Linear(20, 500), nn.ReLU(), nn.Linear(500, 2))
    step = trained(net, Simulated(100_000), 512, process_group=dist.group.WORLD)
    milliseconds = timed(step, ROUNDS, 10)
    dist.barrier()
    if rank == 0:
        Path(out).write_text(str(milliseconds))
    dist.destroy_process_group()


def step_by_ranks(size: int) -> float:
    """Processor time of one rank."""
    with tempfile.TemporaryDirectory() as folder:
        out, port = f"{folder}/milliseconds", free_port()
        start_processes(_rank, (size, port, out), nprocs=size, start_method="fork")
        return float(Path(out).read_text())


def epsilon_by_steps(steps: int) -> float:
    def work() -> None:
        accountant = dpb.PrivacyAccountant()
        accountant.compose(events.PoissonSampledDpEvent(1e-6, GAUSSIAN), steps)
        accountant.get_epsilon(1e-6)

    return timed(work, 1)


def epsilon_by_settings(settings: int) -> float:
    def work() -> None:
        accountant = dpb.PrivacyAccountant()
        for i in range(settings):
            gaussian = events.GaussianDpEvent(1.0 + i / settings)
            accountant.compose(events.PoissonSampledDpEvent(1e-3, gaussian))
        accountant.get_epsilon(1e-6)

    return timed(work, 1)


def ledger_by_history(kinds: int) -> float:
    """A step of a job whose ledger has so many kinds of releases; opening it included."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/ledger.db"
        accountant = dpb.PrivacyAccountant(1000.0, 1e-6, path=path)
        for i in range(kinds):
            gaussian = events.GaussianDpEvent(20.0 + i / kinds)
            accountant.compose(events.PoissonSampledDpEvent(1e-3, gaussian))

        def work() -> None:
            dpb.PrivacyAccountant(1000.0, 1e-6, path=path).compose(
                events.PoissonSampledDpEvent(1e-3, events.GaussianDpEvent(20.0))
            )

        return timed(work, ROUNDS)


def ledger_by_jobs(jobs: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/ledger.db"
        event = events.PoissonSampledDpEvent(1e-3, events.GaussianDpEvent(20.0))
        for _ in range(jobs):
            jobs_of_this_process.clear()  # as another process
            dpb.PrivacyAccountant(1000.0, 1e-6, path=path).compose(event)

        def work() -> None:
            dpb.PrivacyAccountant(1000.0, 1e-6, path=path).compose(event)

        return timed(work, ROUNDS)


def predict_by_samples(number: int) -> float:
    net, x = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 2)), torch.randn(1000, 20)
    samples = dpb.PosteriorSamples(max_samples=number)
    for _ in range(number):
        nn.init.normal_(next(net.parameters()))
        samples.collect(net)
    return timed(lambda: samples.predict(net, x), ROUNDS)


PANELS: dict[str, tuple[str, list[tuple[str, Callable[[int], float], list[int]]]]] = {
    "a step": ("records N", [("logistic regression, B = 256", step_by_records, RECORDS)]),
    "a step ": ("parameters", [("two layers, B = 16", step_by_parameters, PARAMETERS)]),
    "a step on each rank": ("ranks", [("11,502 parameters, B = 512", step_by_ranks, RANKS)]),
    "ε": (
        "releases",
        [
            ("steps of one kind", epsilon_by_steps, STEPS),
            ("distinct settings", epsilon_by_settings, SETTINGS),
        ],
    ),
    "open a ledger, charge": (
        "in the ledger",
        [("kinds of releases", ledger_by_history, HISTORY), ("jobs", ledger_by_jobs, JOBS)],
    ),
    "predict": ("samples", [("1,152 parameters, 1,000 records", predict_by_samples, SAMPLES)]),
}


def picture(found: dict[str, dict[str, Any]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(12.5, 7), layout="constrained")
    titles = [title for title in PANELS if title in found]
    for axis, title in zip(axes.flat, titles, strict=False):
        label = PANELS[title][0]
        beside = axis.twinx()
        is_measured = any(row[2] for rows in found[title].values() for row in rows)
        beside.set_visible(is_measured)
        for name, rows in found[title].items():
            sizes = [row[0] for row in rows]
            (line,) = axis.loglog(sizes, [row[1] for row in rows], "o-", label=name)
            beside.plot(sizes, [row[2] for row in rows], "s:", color=line.get_color(), alpha=0.5)
        axis.set(title=title, xlabel=label, ylabel="milliseconds (line)")
        low, high = axis.get_ylim()
        axis.set_ylim(low / 2, high * 4)
        beside.set_ylabel("MB (dotted)")
        beside.set_ylim(0, max(50, 1.2 * beside.get_ylim()[1]))
        axis.legend(loc="upper left", frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    global ROUNDS
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--plot", help="draw the picture there")
    parser.add_argument("--save", help="write the figures there")
    parser.add_argument("--only", nargs="+", choices=list(PANELS), default=list(PANELS))
    parser.add_argument("--saved", help="read the figures from there, and measure nothing")
    arguments = parser.parse_args()
    ROUNDS = arguments.rounds
    torch.set_num_threads(1)
    logging.getLogger("torch_dpbayes").setLevel(logging.ERROR)
    if arguments.saved:
        found = json.loads(Path(arguments.saved).read_text())
    else:
        found = {
            title: {
                name: [(n, *forked(work, n, sizes[0])) for n in sizes]
                for name, work, sizes in lines
            }
            for title, (_, lines) in PANELS.items()
            if title in arguments.only
        }
    if arguments.save:
        Path(arguments.save).write_text(json.dumps(found))
    if arguments.plot:
        picture(found, arguments.plot)


if __name__ == "__main__":
    main()
