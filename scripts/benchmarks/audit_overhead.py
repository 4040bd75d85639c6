#!/usr/bin/env python3
"""What an audit adds to the processor time of a whole run.

    python audit_overhead.py [--records 5120] [--rate 0.1] [--epochs 2] [--canaries 1000]

A run is LeNet-5 made private at ε = 8 and trained by DPSGLD on Poisson batches of made-up pictures.
In each round it runs without an audit, with gradient canaries, and with mislabelled records as
canaries, in this order and then backwards, on one thread. The audited runs have places for canaries
beside as many records, drawn at the same rate, and end with their result. Prints the medians and
what they are of the run without an audit.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from bench_clipping import model_and_batch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb

DELTA = 1e-5


def train(dataset: Any, engine: dpb.PrivacyEngine, rate: float, epochs: int) -> nn.Module:
    net, optimizer, loader = engine.make_private_with_epsilon(
        module=model_and_batch("cnn", 1)[0],  # LeNet-5
        optimizer=partial(dpb.optim.DPSGLD, lr=0.01, temperature=0.0),
        data_loader=DataLoader(dataset, batch_size=round(rate * len(dataset))),
        max_grad_norm=1.0,
        target_epsilon=8.0,
        target_delta=DELTA,
        epochs=epochs,
    )
    for _ in range(epochs):
        for x, y in loader:
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
    trained: nn.Module = net
    return trained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=5120)
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--canaries", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = TensorDataset(
        torch.randn(options.records, 1, 28, 28), torch.randint(10, (options.records,))
    )
    a_run = partial(train, rate=options.rate, epochs=options.epochs)
    audit = partial(dpb.audit.one_run, a_run, data, num_canaries=options.canaries, delta=DELTA)
    mislabelled = [(data[i % len(data)][0], torch.tensor(i % 10)) for i in range(options.canaries)]
    kinds: dict[str, Callable[[], Any]] = {
        "no audit": lambda: a_run(data, dpb.PrivacyEngine()),
        "gradients as canaries": audit,
        "records as canaries": lambda: audit(canaries=mislabelled),
    }
    for kind in kinds.values():  # what is paid once in a process
        kind()
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(options.rounds):
        for name in [*kinds, *reversed(kinds)]:
            start = time.process_time()
            kinds[name]()
            seconds[name].append(time.process_time() - start)
    plain = statistics.median(seconds["no audit"])
    for name, found in seconds.items():
        median = statistics.median(found)
        print(f"{name:22} {median:7.2f} s {median / plain:6.2f}", flush=True)


if __name__ == "__main__":
    main()
