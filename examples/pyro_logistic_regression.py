"""Samples a logistic regression written in Pyro. DP-SGLD finds the start point and DP-HMC samples
from there, with one accountant for both.

    python examples/pyro_logistic_regression.py                     # synthetic records
    python examples/pyro_logistic_regression.py --data-root ROOT    # Adult, from ROOT/adult
    python examples/pyro_logistic_regression.py --plot logistic.png

Every record is scaled by public constants to norm at most 1. So the norm of its gradient is at most
1, and its log-likelihood ratio is at most the distance of the move: nothing is clipped, and DP-HMC
samples the exact posterior. Epsilon limits the squared distance that a chain can travel, for any
number of iterations. The posterior is wider with fewer records, so with few records a chain stays
near its start point (see n_eff). For the synthetic records the program also shows the
posterior without privacy; on private data this would be a release. Adult is evaluated on its test
records, which count as public here.
"""

from __future__ import annotations

import argparse
import math
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from pyro.infer import MCMC
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes.mcmc import DPHMC, plan

PRIOR_STD = 5.0
# numeric columns of Adult with their public bounds: age, years of education, hours per week, and
# capital gain and loss, whose logarithms are used
ADULT_BOUNDS = {0: 90.0, 4: 16.0, 12: 99.0, 10: 1e5, 11: 1e4}
ADULT_FLAGS = {5: "Married-civ-spouse", 9: "Male"}


class Table(NamedTuple):
    """Records of norm at most 1, and 0/1 labels."""

    names: list[str]
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


def made_up(records: int) -> Table:
    truth = torch.tensor([3.0, -4.0, 2.0, 0.0, 1.0, -1.0])
    x = torch.rand(records + 5000, len(truth)) * 2 - 1
    x[:, 0] = 1.0
    x /= math.sqrt(len(truth))
    y = torch.bernoulli((x @ truth).sigmoid())
    names = ["intercept", *(f"column {j}" for j in range(1, len(truth)))]
    return Table(names, x[:records], y[:records], x[records:], y[records:])


def adult(folder: Path) -> Table:
    def read(name: str) -> tuple[Tensor, Tensor]:
        rows = [
            line.strip(" .\n").split(", ")
            for line in (folder / name).read_text().splitlines()
            if line.count(",") == 14
        ]
        columns = [[1.0] * len(rows)]
        for j, bound in ADULT_BOUNDS.items():
            scaled = [
                (
                    min(float(row[j]) / bound, 1.0)
                    if j < 10 or j > 11
                    else math.log1p(float(row[j])) / math.log1p(bound)
                )
                for row in rows
            ]
            columns.append([2 * value - 1 for value in scaled])
        columns += [
            [2.0 * (row[j] == value) - 1 for row in rows] for j, value in ADULT_FLAGS.items()
        ]
        return torch.tensor(columns).T.clamp(-1, 1) / math.sqrt(len(columns)), torch.tensor(
            [float(row[14] == ">50K") for row in rows]
        )

    names = [
        "intercept",
        "age",
        "education",
        "hours",
        "capital gain",
        "capital loss",
        "married",
        "male",
    ]
    return Table(names, *read("adult.data"), *read("adult.test"))


def model(x: Tensor, y: Tensor) -> None:
    weights = pyro.sample("weights", dist.Normal(0.0, PRIOR_STD).expand([x.shape[1]]).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=x @ weights), obs=y)


def find_start(table: Table, accountant: dpb.PrivacyAccountant) -> Tensor:
    """The mean of the last iterates of DP-SGLD."""
    net = nn.Linear(len(table.names), 1, bias=False)
    nn.init.zeros_(net.weight)
    loader = DataLoader(TensorDataset(table.x, table.y), batch_size=len(table.y) // 50)
    optimizer = partial(dpb.optim.DPSGLD, lr=10.0, prior_std=PRIOR_STD)
    engine = dpb.PrivacyEngine(accountant=accountant)
    net, optimizer, loader = engine.make_private(
        module=net, optimizer=optimizer, data_loader=loader, max_grad_norm=1.0, noise_multiplier=2.0
    )
    total, steps = torch.zeros(len(table.names)), 0
    for epoch in range(4):
        for x, y in loader:
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(net(x)[:, 0], y).backward()
            optimizer.step()
            if epoch == 3:
                total, steps = total + net.weight.detach()[0], steps + 1
    return total / steps


def without_privacy(table: Table) -> tuple[Tensor, Tensor]:
    """Mode and standard deviations of the posterior by Newton's method: for synthetic records
    only.
    """
    x, y, weights = (
        table.x.double(),
        table.y.double(),
        torch.zeros(len(table.names), dtype=torch.float64),
    )
    for _ in range(30):
        p = (x @ weights).sigmoid()
        precision = (x.T * (p * (1 - p))) @ x + torch.eye(len(weights)) / PRIOR_STD**2
        weights = weights + torch.linalg.solve(precision, x.T @ (y - p) - weights / PRIOR_STD**2)
    return weights, precision.inverse().diagonal().sqrt()


def draw(
    table: Table,
    samples: Tensor,
    start: Tensor,
    reference: tuple[Tensor, Tensor] | None,
    path: Path,
) -> None:
    """Draw central 90 % intervals of the weights, and the chain's path in the first two weights
    after the intercept.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    intervals, trace = figure.subplots(1, 2, width_ratios=(3, 2))
    rows = torch.arange(len(table.names))
    low, middle, high = samples.quantile(torch.tensor([0.05, 0.5, 0.95]), dim=0)
    center = middle if reference is None else reference[0].float()
    low, middle, high = low - center, middle - center, high - center
    intervals.errorbar(
        middle,
        rows + 0.12,
        xerr=torch.stack([middle - low, high - middle]),
        fmt="o",
        capsize=3,
        label="DP-HMC, 90 % of its samples",
    )
    if reference is not None:
        std = reference[1]
        intervals.errorbar(
            0 * std,
            rows - 0.12,
            xerr=1.645 * std,
            fmt="s",
            capsize=3,
            color="0.4",
            label="without privacy (normal approximation)",
        )
    intervals.plot(start - center, rows, "x", color="tab:red", label="start, by DP-SGLD")
    around = "median of the samples" if reference is None else "mode without privacy"
    intervals.set(
        yticks=rows.tolist(),
        yticklabels=table.names,
        ylim=(-0.6, len(rows) + 1.2),
        xlabel=f"weight − {around}",
    )
    intervals.legend(frameon=False, fontsize="small", loc="upper left")
    trace.plot(samples[:, 1], samples[:, 2], ".-", linewidth=0.4, markersize=3, alpha=0.6)
    trace.plot(*start[1:3], "x", color="tab:red")
    trace.set(xlabel=table.names[1], ylabel=table.names[2], title="the chain")
    figure.savefig(path, dpi=100)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--data-root",
        type=Path,
        metavar="PATH",
        help="folder with adult/adult.data and adult/adult.test",
    )
    parser.add_argument(
        "--records", type=int, default=200_000, help="synthetic records; default: 200000"
    )
    parser.add_argument("--epsilon", type=float, default=3.0, help="total; default: 3")
    parser.add_argument(
        "--iterations",
        type=int,
        default=150,
        help="iterations of DP-HMC; a third of them is warm-up; default: 150",
    )
    parser.add_argument(
        "--steps", type=int, default=5, help="leapfrog steps per iteration; default: 5"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw the intervals and the chain"
    )
    options = parser.parse_args(arguments)
    if options.plot is not None and not options.plot.parent.is_dir():
        parser.error(f"--plot: there is no folder {options.plot.parent}")

    table = (
        made_up(options.records)
        if options.data_root is None
        else adult(options.data_root / "adult")
    )
    delta = len(table.y) ** -1.1
    accountant = dpb.PrivacyAccountant(options.epsilon, delta)
    begin = time.perf_counter()
    start = find_start(table, accountant)
    print(
        f"DP-SGLD took {time.perf_counter() - begin:.0f} seconds and cost epsilon ="
        f" {accountant.get_epsilon():.3g} at delta = {delta:.2g}"
    )

    # norms of records and the derivative of the logistic loss are at most 1
    bounds = {"log_ratio_slope": 1.0, "max_grad_norm": 1.0}
    budget = {
        "target_epsilon": options.epsilon,
        "target_delta": delta,
        "history": accountant.history,
    }
    planned = plan(
        DPHMC, num_iterations=options.iterations, num_steps=options.steps, **bounds, **budget
    )
    print(
        "noise multipliers    ",
        ", ".join(f"{name} {value:.1f}" for name, value in planned.noise_multipliers.items()),
    )
    kernel = DPHMC(
        model,
        step_size=0.01,
        num_steps=options.steps,
        **bounds,
        **planned.noise_multipliers,
        target_accept_prob=0.25,
        accountant=accountant,
    )
    warm_up = options.iterations // 3
    runner = MCMC(
        kernel,
        num_samples=options.iterations - warm_up,
        warmup_steps=warm_up,
        initial_params={"weights": start},
    )
    begin = time.perf_counter()
    runner.run(table.x, table.y)
    samples = runner.get_samples()["weights"]
    print(
        f"DP-HMC took {time.perf_counter() - begin:.0f} seconds;"
        f" {kernel.get_samples()['weights'].shape[0]} samples"
    )

    reference = without_privacy(table) if options.data_root is None else None
    print(f"\n{'':16}{'mean':>8}{'std':>8}" + (f"{'without privacy':>20}" if reference else ""))
    for j, name in enumerate(table.names):
        beside = f"{reference[0][j]:12.2f}{reference[1][j]:8.3f}" if reference else ""
        print(f"{name:16}{samples[:, j].mean():8.2f}{samples[:, j].std():8.3f}{beside}")
    runner.summary()
    probability = (table.test_x @ samples.T).sigmoid().mean(1)
    print(f"\ntest accuracy        {((probability > 0.5) == table.test_y).float().mean():.2%}")
    print(accountant.summary())
    if options.plot is not None:
        draw(table, samples, start, reference, options.plot)


if __name__ == "__main__":
    main()
