"""What an iteration of two owners costs beside one's over the same number of records of its own,
and how much of that are the messages themselves.

    bench_owners.py [--records 1000] [--rounds 40] [--profile]

Two processes, one an owner. Each runs, interleaved in rounds of 25 iterations, ``DPPenalty`` on its
records, ``MultiOwnerPenalty`` on both owners', and the two messages of such an iteration with
nothing around them. Prints medians of processor time over the rounds, in milliseconds an iteration.
"""

from __future__ import annotations

import argparse
import cProfile
import multiprocessing
import os
import pstats
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from torch_dpbayes import PrivacyAccountant
from torch_dpbayes.mcmc import DPPenalty, MultiOwnerPenalty

ITERATIONS = 25


def logistic(x: Tensor, y: Tensor) -> None:
    weights = pyro.sample("weights", dist.Normal(torch.zeros(x.shape[1]), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=x @ weights), obs=y)


def owner(rank: int, options: argparse.Namespace, meeting_place: str) -> None:
    """What one owner runs."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=meeting_place,
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=300),
    )
    warnings.simplefilter("ignore")
    data = torch.randn(options.records, 5), torch.bernoulli(torch.full((options.records,), 0.5))

    def iterations(kind: type[DPPenalty]) -> Callable[[], None]:
        kernel = kind(
            logistic,
            proposal_scale=0.1,
            log_ratio_slope=3.0,
            noise_multiplier=50.0,
            accountant=PrivacyAccountant(100.0, 1e-5),
            target_accept_prob=None,
        )
        kernel.setup(0, *data)
        params = kernel.initial_params

        def run() -> None:
            nonlocal params
            for _ in range(ITERATIONS):
                params = kernel.sample(params)

        return run

    message = torch.zeros(258, dtype=torch.float64)

    def messages() -> None:
        for _ in range(2 * ITERATIONS):
            torch.distributed.all_reduce(message)

    runs = {
        "one owner": iterations(DPPenalty),
        "two owners": iterations(MultiOwnerPenalty),
        "their two messages alone": messages,
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(options.rounds):
        for name, run in runs.items():
            torch.distributed.barrier()
            wall, begin = time.perf_counter(), time.process_time()
            run()
            times[name].append((time.process_time() - begin, time.perf_counter() - wall))
    if rank == 0:
        for name, found in times.items():
            used, wall = (
                1e3 * statistics.median(column) / ITERATIONS for column in zip(*found, strict=True)
            )
            print(f"{name:28}{used:7.3f} ms of the processor{wall:8.3f} ms", flush=True)
    if options.profile:
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(20):
            runs["two owners"]()
        profile.disable()
        if rank == 0:
            pstats.Stats(profile).sort_stats("tottime").print_stats(35)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--records", type=int, default=1000, help="of each owner; default: 1000")
    parser.add_argument("--rounds", type=int, default=40, help="default: 40")
    parser.add_argument("--profile", action="store_true", help="where two owners' time goes")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        processes = [
            context.Process(target=owner, args=(rank, options, f"file://{folder}/store"))
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit("an owner failed; its message stands above")


if __name__ == "__main__":
    main()
