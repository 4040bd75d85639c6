"""Three hospitals sample one logistic regression, and no record leaves its hospital.

Every hospital is one process with its own records and its own privacy budget. In each iteration it
sends one number that depends on its records: their clipped log-likelihood ratio, with noise. This
noise alone is enough for its epsilon. All three hospitals get the same samples of the posterior
given all records.

    torchrun --nproc-per-node 3 examples/multi_owner.py
    python examples/multi_owner.py                       # starts the three processes itself
    torchrun --nproc-per-node 3 examples/multi_owner.py --data 'hospital_{}.csv'

Without --data the records are synthetic, and the program also shows the posterior given all records
together, without privacy. On three machines, give torchrun --nnodes 3, --node-rank, --master-addr
and --master-port, inside a private network: the messages are not encrypted.

The noise limits how far the chain moves in an iteration; the number of records does not. With far
fewer records than the default the posterior is wider, and 1500 iterations are too few to explore
it.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # processes share the cores

import pyro
import pyro.distributions as dist
import torch
import torch.distributed
from pyro.infer import MCMC
from torch import Tensor

import torch_dpbayes as dpb
from torch_dpbayes.mcmc import MultiOwnerPenalty, plan

HOSPITALS = ("Aachen", "Bern", "Cork")
SHARES = (1 / 6, 1 / 3, 1 / 2)  # of the synthetic records
TRUTH = torch.tensor([1.0, -2.0, 1.5, 0.0, -1.0])
PRIOR_STD = 3.0


def made_up(hospital: int, records: int, seed: int) -> tuple[Tensor, Tensor]:
    """Covariates of norm at most 1 and 0/1 labels; one covariate differs between hospitals."""
    generator = torch.Generator().manual_seed(len(HOSPITALS) * seed + hospital)
    x = torch.rand(round(records * SHARES[hospital]), len(TRUTH), generator=generator) * 2 - 1
    x[:, 0] = 1.0
    x[:, 1] = (x[:, 1] + hospital - 1).clamp(-1, 1)
    x /= math.sqrt(len(TRUTH))
    return x, torch.bernoulli((x @ TRUTH).sigmoid(), generator=generator)


def read(path: Path) -> tuple[Tensor, Tensor]:
    """Rows of numbers in [-1, 1], divided by public bounds before; the last column is 0 or 1."""
    rows = torch.tensor(
        [
            [float(value) for value in line.split(",")]
            for line in path.read_text().splitlines()
            if line
        ]
    )
    x = torch.cat([torch.ones(len(rows), 1), rows[:, :-1].clamp(-1, 1)], 1)
    return x / math.sqrt(x.shape[1]), rows[:, -1]


def model(x: Tensor, y: Tensor) -> None:
    weights = pyro.sample("weights", dist.Normal(0.0, PRIOR_STD).expand([x.shape[1]]).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=x @ weights), obs=y)


def without_privacy(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Mode and standard deviations of the posterior by Newton's method: for synthetic records
    only.
    """
    x, y, weights = x.double(), y.double(), torch.zeros(x.shape[1], dtype=torch.float64)
    for _ in range(30):
        p = (x @ weights).sigmoid()
        precision = (x.T * (p * (1 - p))) @ x + torch.eye(len(weights)) / PRIOR_STD**2
        weights = weights + torch.linalg.solve(precision, x.T @ (y - p) - weights / PRIOR_STD**2)
    return weights, precision.inverse().diagonal().sqrt()


def draw(samples: Tensor, tables: list[tuple[Tensor, Tensor]], path: Path) -> None:
    """Draw central 90 % intervals of the weights: from the chain, from all records in one place,
    and from the records of each hospital alone.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    pooled = without_privacy(torch.cat([x for x, _ in tables]), torch.cat([y for _, y in tables]))
    rows = torch.arange(len(TRUTH))
    low, middle, high = samples.quantile(torch.tensor([0.05, 0.5, 0.95]), dim=0) - pooled[0].float()
    axes.errorbar(
        middle,
        rows + 0.3,
        xerr=torch.stack([middle - low, high - middle]),
        fmt="o",
        capsize=3,
        label="chain over three hospitals",
    )
    alone = {
        f"{name} alone, no privacy": without_privacy(*table)
        for name, table in zip(HOSPITALS, tables, strict=True)
    }
    for k, (name, (mode, std)) in enumerate(
        {"all records in one place, no privacy": pooled, **alone}.items()
    ):
        style = {"fmt": "s", "markersize": 4, "capsize": 3, "color": str(0.15 + 0.2 * k)}
        axes.errorbar(
            mode - pooled[0], rows + 0.15 - 0.15 * k, xerr=1.645 * std, label=name, **style
        )
    labels = [f"weight {j}" for j in rows.tolist()]
    axes.set(
        yticks=rows.tolist(),
        yticklabels=labels,
        xlabel="weight − mode given all records; 90 % of the posterior",
    )
    axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=100)


def hospital(rank: int, options: argparse.Namespace, meeting_place: str) -> None:
    """The program of one hospital."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=meeting_place,
        rank=rank,
        world_size=len(HOSPITALS),
        timeout=timedelta(seconds=options.timeout),
    )
    x, y = (
        made_up(rank, options.records, options.seed)
        if options.data is None
        else read(Path(options.data.format(rank)))
    )
    delta = options.delta
    accountant = dpb.PrivacyAccountant(options.epsilon[rank], delta)
    budget = {"target_epsilon": options.epsilon[rank], "target_delta": delta}
    # the plan for this hospital's own noise
    planned = plan(MultiOwnerPenalty, num_iterations=options.iterations, **budget)
    kernel = MultiOwnerPenalty(
        model,
        proposal_scale=0.1,
        log_ratio_slope=1.0,  # norms are at most 1, so is the derivative of the logistic loss
        **planned.noise_multipliers,
        accountant=accountant,
    )
    warm_up = options.iterations // 3
    start = {"weights": torch.zeros(x.shape[1])}
    runner = MCMC(
        kernel,
        num_samples=options.iterations - warm_up,
        warmup_steps=warm_up,
        initial_params=start,
        disable_progbar=rank > 0 or options.quiet,
    )
    begin = time.perf_counter()
    runner.run(x, y)
    seconds = time.perf_counter() - begin
    samples = runner.get_samples()["weights"]
    print(
        f"{HOSPITALS[rank]:8} epsilon = {accountant.get_epsilon():.4f} at delta = {delta:.1g},"
        f" noise multiplier {planned.noise_multipliers['noise_multiplier']:.1f}; mean of the first"
        f" weight {samples[:, 0].mean():.6f}\n",
        end="",  # one write per line, also without buffering
        flush=True,
    )
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    if rank == 0:  # after all lines above
        tables = (
            [made_up(other, options.records, options.seed) for other in range(len(HOSPITALS))]
            if options.data is None
            else []
        )
        report(samples, seconds, runner.diagnostics()["acceptance rate"]["chain 0"], tables)
        if options.plot is not None:
            draw(samples, tables, options.plot)


def report(
    samples: Tensor, seconds: float, acceptance_rate: float, tables: list[tuple[Tensor, Tensor]]
) -> None:
    print(
        f"\n{len(samples)} samples in {seconds:.0f} seconds, acceptance rate {acceptance_rate:.2f}"
    )
    print(
        f"{'':10}{'mean':>9}{'std':>9}"
        + (f"{'all records in one place, no privacy':>42}" if tables else "")
    )
    reference = (
        without_privacy(torch.cat([x for x, _ in tables]), torch.cat([y for _, y in tables]))
        if tables
        else None
    )
    for j in range(samples.shape[1]):
        beside = f"{reference[0][j]:33.3f}{reference[1][j]:9.4f}" if reference else ""
        print(
            f"weight {j:<3}{samples[:, j].mean():9.3f}{samples[:, j].std():9.4f}{beside}",
            flush=True,
        )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--data",
        metavar="TEMPLATE",
        help="a CSV file for each hospital; {} is replaced by its number, 0, 1 or 2",
    )
    parser.add_argument(
        "--records",
        type=int,
        default=300_000,
        help="synthetic records of all hospitals; default: 300000",
    )
    parser.add_argument(
        "--epsilon",
        type=float,
        nargs=3,
        default=[2.0, 3.0, 4.0],
        help="each hospital's budget; default: 2 3 4",
    )
    parser.add_argument("--delta", type=float, default=1e-6, help="of each hospital; default: 1e-6")
    parser.add_argument(
        "--iterations", type=int, default=1500, help="a third of them is warm-up; default: 1500"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        help="seconds that a hospital waits for the others; default: 300",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the synthetic records; the noise has none"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw the intervals of synthetic records"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    options = parser.parse_args(arguments)
    if options.plot is not None and (options.data is not None or not options.plot.parent.is_dir()):
        parser.error(
            "--plot needs a folder that exists, and synthetic records: it draws them pooled"
        )

    if "RANK" in os.environ:
        if os.environ.get("WORLD_SIZE") != str(len(HOSPITALS)):
            parser.error(
                f"there are {len(HOSPITALS)} hospitals: torchrun --nproc-per-node {len(HOSPITALS)}"
            )
        if os.environ.get("MASTER_ADDR") in ("127.0.0.1", "localhost"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        hospital(int(os.environ["RANK"]), options, "env://")
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    print(
        f"not started by torchrun: starting {len(HOSPITALS)} processes on this machine", flush=True
    )
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        processes = [
            context.Process(target=hospital, args=(rank, options, f"file://{folder}/store"))
            for rank in range(len(HOSPITALS))
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit("a hospital failed; see its message above")


if __name__ == "__main__":
    main()
