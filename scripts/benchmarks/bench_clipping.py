#!/usr/bin/env python3
"""What a private step costs beside a plain one, for five models: ours, and Opacus' hooks and ghost
modes.

    python scripts/benchmarks/bench_clipping.py [--seconds 20] [--models mlp cnn]

The plain step is SGLD without clipping: forward, backward, the same Gaussian noise on the gradient,
the update. Data are tensors in memory. Rounds are interleaved, one step of each way in turn. A
figure is the median processor time, divided by the plain step's median in the same process.

Every model is measured under two settings of the C library's allocator: "default", and "kept", in
which freed memory stays with the process (MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ =
4 GiB). Memory is the peak resident size (VmHWM) of six steps of one way in a fresh process under
the default setting, less what was resident before model and batch were made. It includes
parameters, data, gradients and buffers, but not what libraries load at their first step.
"""

import argparse
import gc
import json
import operator
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_dpbayes as dpb
from torch_dpbayes.per_sample.bookkeeping import BookkeepingGradientSource, VmapGradientSource
from torch_dpbayes.per_sample.operations import Delivery

KEPT = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**32)}
WAYS = ("plain", "ours", "vmap", "hooks", "ghost")
LR, CLIP, RECORDS = 0.01, 1.0, 32561
Made = tuple[nn.Module, Tensor, Tensor]
Step = Callable[[], None]


# -- models, each with a batch and its labels ------------------------------------------------------


class Residual(nn.Module):
    """Two convolutions with GroupNorm; ``first`` normalises before them (wide ResNet) or after."""

    def __init__(self, width_in: int, width: int, stride: int, groups: int, *, first: bool) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, width_in if first else width)
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.norm2 = nn.GroupNorm(groups, width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        is_same, self.first = width_in == width and stride == 1, first
        self.short = nn.Identity() if is_same else nn.Conv2d(width_in, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            h = self.conv1(F.relu(self.norm1(x)))
            return self.conv2(F.relu(self.norm2(h))) + self.short(x)
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.short(x))


def residual(
    batch: int, widths: list[int], blocks: int, groups: int, *, first: bool, stem: bool = False
) -> Made:
    """``stem``: the first convolution is normalised, too, as in ResNets for CIFAR."""
    before = 16 if first else widths[0]
    layers: list[nn.Module] = [nn.Conv2d(3, before, 3, 1, 1, bias=False)]
    layers += [nn.GroupNorm(groups, before), nn.ReLU()] if stem else []
    for place, width in enumerate(widths):
        for block in range(blocks):
            stride = 2 if block == 0 and place > 0 else 1
            layers.append(Residual(before, width, stride, groups, first=first))
            before = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10)]
    return nn.Sequential(*layers), torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))


def mlp(batch: int) -> Made:
    first, second = nn.Linear(784, 1024), nn.Linear(1024, 1024)
    net = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(1024, 10))
    return net, torch.randn(batch, 784), torch.randint(10, (batch,))


def cnn(batch: int) -> Made:
    """LeNet-5 with ReLU and max pooling."""
    first, second = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5)
    maps = nn.ReLU(), nn.MaxPool2d(2), second, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    head = nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)
    net = nn.Sequential(first, *maps, *head)
    return net, torch.randn(batch, 1, 28, 28), torch.randint(10, (batch,))


class Encoder(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.first, self.second, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        wide = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.feed = nn.Sequential(*wide)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.first(x)).chunk(3, 2)
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        found = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(found)
        return x + self.feed(self.second(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(1000, 128)
        self.layers = nn.Sequential(Encoder(128, 4), Encoder(128, 4), nn.LayerNorm(128))
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.tokens(x)).mean(1))


def logistic(batch: int) -> Made:
    return nn.Linear(109, 2), torch.randn(batch, 109), torch.randint(2, (batch,))


def transformer(batch: int) -> Made:
    return Transformer(), torch.randint(1000, (batch, 128)), torch.randint(10, (batch,))


# He et al. (2016), 20 layers for CIFAR, with GroupNorm
resnet = partial(residual, widths=[16, 32, 64], blocks=3, groups=8, first=False, stem=True)
MODELS: dict[str, tuple[str, Callable[[int], Made], int]] = {  # with their batches
    "logistic": ("logistic regression", logistic, 181),
    "mlp": ("MLP 784-1024-1024-10", mlp, 256),
    "cnn": ("LeNet-type CNN", cnn, 256),
    "resnet": ("ResNet with GroupNorm", resnet, 64),
    "transformer": ("transformer", transformer, 32),
}


# -- steps -----------------------------------------------------------------------------------------


def private_step(
    way: str,
    made: Made,
    num_data: int,
    noise_multiplier: float,
    temperature: float,
    outputs: Callable[[nn.Module, Tensor], Tensor] = operator.call,
) -> Step:
    """A function that makes one step of this library, or of Opacus without the temperature.
    ``outputs`` are those of a model for a batch.
    """
    net, x, y = made
    common: dict[str, Any] = {"expected_batch_size": len(x), "max_grad_norm": CLIP}
    common["noise_multiplier"] = noise_multiplier
    if way in ("ours", "vmap"):
        # what make_private builds, less the loader, whose Poisson draws would vary the batch
        private = dpb.optim.DPSGLD(
            net.named_parameters(),
            LR,
            num_data=num_data,
            temperature=temperature,
            sampling="poisson",
            **common,
        )
        source = VmapGradientSource if way == "vmap" else BookkeepingGradientSource
        private.release.source = source(net)
        deliver = Delivery(len(x))

        def step() -> None:
            private.zero_grad()
            inputs, targets = deliver((x, y), len(x))
            F.cross_entropy(outputs(net, inputs), targets).backward()
            private.step()

        return step
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer
    from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    theirs: Any
    criterion: Callable[..., Any] = F.cross_entropy
    sgd = torch.optim.SGD(net.parameters(), LR, weight_decay=1 / num_data)
    if way == "hooks":
        theirs, optimizer = GradSampleModule(net), DPOptimizer(sgd, **common)
    else:
        theirs = GradSampleModuleFastGradientClipping(
            net, max_grad_norm=CLIP, use_ghost_clipping=True
        )
        optimizer = DPOptimizerFastGradientClipping(sgd, **common)
        criterion = DPLossFastGradientClipping(theirs, optimizer, nn.CrossEntropyLoss())

    def their_step() -> None:
        optimizer.zero_grad()
        criterion(outputs(theirs, x), y).backward()
        optimizer.step()

    return their_step


def made(name: str) -> Made:
    _, make, batch = MODELS[name]
    return make(batch)


def stepper(way: str, made: Made) -> Step:
    """One step of this model on its batch."""
    net, x, y = made
    std = (2 / (LR * RECORDS)) ** 0.5
    if way != "plain":
        return private_step(way, made, RECORDS, len(x) / CLIP * std, 1.0)
    parameters = list(net.parameters())

    def step() -> None:
        net.zero_grad()
        F.cross_entropy(net(x), y).backward()
        with torch.no_grad():
            for p in parameters:
                p.grad.add_(torch.randn_like(p), alpha=std).add_(p, alpha=1 / RECORDS)
                p.add_(p.grad, alpha=-LR)

    return step


# -- measures --------------------------------------------------------------------------------------


def times(name: str, seconds: float) -> dict[str, float]:
    """Median milliseconds of a step, for each way, in this process."""
    steps = {way: stepper(way, made(name)) for way in WAYS}
    found: dict[str, list[float]] = {way: [] for way in steps}
    for step in steps.values():
        for _ in range(3):
            step()
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or len(found["plain"]) < 9:
        for way, step in steps.items():
            before = time.process_time()
            step()
            found[way].append(time.process_time() - before)
    return {way: 1e3 * statistics.median(values) for way, values in found.items()}


def peak(name: str, way: str) -> dict[str, float]:
    """Peak MiB of a few steps over what was resident before the first one."""

    def status(key: str) -> int:
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith(key))

    labels, convolution = torch.zeros(4, dtype=torch.long), nn.Conv2d(1, 2, 3)
    stepper(way, (nn.Linear(2, 2), torch.randn(4, 2), labels))()
    stepper(way, (nn.Sequential(convolution, nn.Flatten()), torch.randn(4, 1, 3, 3), labels))()
    gc.collect()
    before = status("VmRSS")
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    step = stepper(way, made(name))
    for _ in range(6):
        step()
    return {"peak": (status("VmHWM") - before) / 1024}


def run(environment: dict[str, str], *arguments: str) -> dict[str, float]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    one = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, __file__, *arguments]
    finished = subprocess.run(
        command, env={**clean, **one, **environment}, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(finished.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of a model and allocator")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--times", help=argparse.SUPPRESS)
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # Opacus' own
    torch.set_num_threads(1)
    if arguments.times:
        print(json.dumps(times(arguments.times, arguments.seconds)))
        return
    if arguments.peak:
        print(json.dumps(peak(*arguments.peak)))
        return
    columns = "time", "time, freed memory kept", "peak memory", "time, vmap", "time, Opacus' best"
    print("| model | plain step |", " | ".join(columns), "|\n" + "|---" * 7 + "|")
    for name in arguments.models:
        options = ["--seconds", str(arguments.seconds)]
        measured = {
            "default": run({}, "--times", name, *options),
            "kept": run(KEPT, "--times", name, *options),
            "memory": {way: run({}, "--peak", name, way)["peak"] for way in WAYS},
        }
        base, kept, memory = (found.pop("plain") for found in measured.values())
        time, ours = measured["default"], measured["memory"]["ours"]
        shares = [time["ours"] / base, measured["kept"]["ours"] / kept, ours / max(memory, 1e-9)]
        shares += [time["vmap"] / base, min(time["hooks"], time["ghost"]) / base]
        cells = [f"{share:.2f}" for share in shares]
        cells[2] = cells[2] if memory > 0.1 else f"{ours:.2f} MiB"
        title, _, batch = MODELS[name]
        print(f"| {title}, batch {batch} | {base:.3g} ms |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
