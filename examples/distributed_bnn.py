"""Trains one private Bayesian neural network on several processes, which divide every batch among
them.

    torchrun --nproc-per-node 2 examples/distributed_bnn.py    # digits, well under a minute
    python examples/distributed_bnn.py                         # the same on one process

Rank 0 prints epsilon, and the accuracy of the predictions on the test records. Epsilon is the same
as on one process: records are sampled at the global rate, the noise is added once, and a step
is charged once for all ranks.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes import metrics


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--epsilon", type=float, default=5.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument(
        "--batch-size",
        type=int,
        default=512,
        help="expected number of records in a batch, for all ranks together",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw predictive entropies")
    options = parser.parse_args(arguments)

    rank, device = 0, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if "RANK" in os.environ:  # torchrun sets it
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=2)
        )
        rank = dist.get_rank()
    if rank == 0:
        # shows the engine's warnings
        logging.basicConfig(format="%(message)s")

    # all ranks need the same model and split; this seed does not set noise and batches, which stay
    # secret
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 8 - 1, torch.tensor(labels)  # 0..16 to -1..1
    order = torch.randperm(len(x))
    train, test = order[360:], order[:360]
    network = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).to(device)

    engine = dpb.PrivacyEngine(process_group=dist.group.WORLD)  # None on one process
    network, optimizer, loader = engine.make_private_with_epsilon(
        module=network,
        # no noise except the privacy noise; see optimizer.effective_temperature
        optimizer=partial(dpb.optim.DPSGLD, lr=4.0, temperature=0.0),
        data_loader=DataLoader(TensorDataset(x[train], y[train]), batch_size=options.batch_size),
        max_grad_norm=0.5,
        target_epsilon=options.epsilon,
        target_delta=options.delta,
        epochs=options.epochs,
    )
    steps = options.epochs * len(loader)
    samples = dpb.PosteriorSamples(burn_in=int(0.6 * steps), thin=max(1, steps // 100))
    start = time.perf_counter()
    for _ in range(options.epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(network(inputs.to(device)), targets.to(device)).backward()
            optimizer.step()
            samples.collect(network)
    seconds = time.perf_counter() - start

    if rank == 0:
        probabilities = samples.predict(network, x[test].to(device)).cpu()
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        print(f"ranks                 {ranks}, {steps / seconds:.0f} steps per second")
        print(
            f"test accuracy         {metrics.accuracy(probabilities, y[test]):.2%}, average of"
            f" {len(samples)} samples"
        )
        spent = engine.accountant.get_epsilon(options.delta)
        print(
            f"epsilon               {spent:.4g} at delta = {options.delta:g},"
            f" {len(engine.accountant)} steps"
        )
        print(f"temperature           {optimizer.effective_temperature:.4g}")
        if options.plot is not None:
            picture(probabilities, y[test], options.plot)
    if dist.is_initialized():
        dist.destroy_process_group()


def picture(probabilities: torch.Tensor, truth: torch.Tensor, file: Path) -> None:
    """Draw the entropy of right and of wrong predictions."""
    from matplotlib.figure import Figure

    entropy = torch.special.entr(probabilities).sum(1)
    is_right = probabilities.argmax(1) == truth
    figure = Figure(figsize=(6, 2.6), layout="constrained")
    axes = figure.subplots()
    bins = [0.1 * k for k in range(24)]
    for which, name, color in ((is_right, "right", "tab:blue"), (~is_right, "wrong", "tab:red")):
        label = f"{name}, {int(which.sum())} pictures"
        axes.hist(entropy[which].tolist(), bins, density=True, alpha=0.6, color=color, label=label)
    axes.set(xlabel="entropy of the prediction (nats)", ylabel="density")
    axes.legend(fontsize=8)
    figure.savefig(file, dpi=100)


if __name__ == "__main__":
    main()
