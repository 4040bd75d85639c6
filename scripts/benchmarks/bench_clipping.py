#!/usr/bin/env python3
"""What a private step costs beside a plain one, for five models: ours, and Opacus' hooks and ghost
modes.

    python scripts/benchmarks/bench_clipping.py [--seconds 20] [--models mlp cnn] [--batches 4]

The plain step is SGLD without clipping: forward, backward, the same Gaussian noise on the gradient,
the update. Everything runs on one core, on made-up data that lies ready as tensors, so that loading
it is nobody's cost. Rounds are interleaved, one step of each way in turn, so that a slow moment of
the machine hits all alike; a figure is the median processor time over rounds, divided by the plain
step's median of the same process. --batches 4 makes every batch four times as large.

Every model is measured under two settings of the C library's allocator, each in a process of its
own: "default", and "kept", in which freed memory stays with the process (MALLOC_MMAP_THRESHOLD_ and
MALLOC_TRIM_THRESHOLD_ = 4 GiB), as people run it who know that otherwise each large tensor is
mapped, zeroed and unmapped anew. Memory is the peak resident size (VmHWM) of six steps of one way
in a fresh process under the default setting, over what was resident before model and batch were
made, divided by that of the plain step. What libraries load at the first step of any model (small
ones have made one before) is not in it; parameters, data, gradients and buffers are.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

KEPT = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**32)}
WAYS = {
    "plain": "plain SGLD",
    "ours": "torch_dpbayes",
    "vouched": "torch_dpbayes, vouched for",
    "vmap": "vmap",
    "hooks": "Opacus hooks",
    "ghost": "Opacus ghost",
}
MODELS = ("logistic", "mlp", "cnn", "resnet", "transformer")
LR, CLIP, RECORDS = 0.01, 1.0, 32561


def model_and_batch(name: str, batches: int) -> tuple[Any, Any, Any]:
    """A model, ``batches`` times its batch, and the labels."""
    net, x, y = _model_and_batch(name)
    return net, x.repeat(batches, *[1] * (x.dim() - 1)), y.repeat(batches)


def _model_and_batch(name: str) -> tuple[Any, Any, Any]:
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, channels: int, width: int, stride: int) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(channels, width, 3, stride, 1, bias=False),
                nn.GroupNorm(8, width),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, 1, 1, bias=False),
                nn.GroupNorm(8, width),
            )
            self.short = (
                nn.Identity() if stride == 1 else nn.Conv2d(channels, width, 1, stride, bias=False)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.short(x) + self.body(x))

    class Attention(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.qkv, self.out, self.heads = (
                nn.Linear(width, 3 * width),
                nn.Linear(width, width),
                heads,
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (
                t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, 2)
            )
            return self.out(
                nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            )

    class Encoder(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.attention, self.first, self.second = (
                Attention(width, 4),
                nn.LayerNorm(width),
                nn.LayerNorm(width),
            )
            self.feed = nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.attention(self.first(x))
            return x + self.feed(self.second(x))

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(1000, 128)
            self.layers = nn.Sequential(Encoder(128), Encoder(128), nn.LayerNorm(128))
            self.head = nn.Linear(128, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.layers(self.tokens(x)).mean(1))

    if name == "tiny":
        return nn.Linear(2, 2), torch.randn(4, 2), torch.zeros(4, dtype=torch.long)
    if name == "tiny convolution":
        return (
            nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()),
            torch.randn(4, 1, 3, 3),
            torch.zeros(4, dtype=torch.long),
        )
    if name == "logistic":
        return nn.Linear(109, 2), torch.randn(181, 109), torch.randint(2, (181,))
    if name == "mlp":
        net = nn.Sequential(
            nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
        )
        return net, torch.randn(256, 784), torch.randint(10, (256,))
    if name == "cnn":  # LeNet-5 with ReLU and max pooling
        net = nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(400, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, 10),
        )
        return net, torch.randn(256, 1, 28, 28), torch.randint(10, (256,))
    if name == "resnet":  # He et al. (2016), 20 layers for CIFAR, with GroupNorm
        blocks, channels = [], 16
        for width, stride in (
            (16, 1),
            (16, 1),
            (16, 1),
            (32, 2),
            (32, 1),
            (32, 1),
            (64, 2),
            (64, 1),
            (64, 1),
        ):
            blocks.append(Block(channels, width, stride))
            channels = width
        stem = (nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.GroupNorm(8, 16), nn.ReLU())
        net = nn.Sequential(
            *stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
        )
        return net, torch.randn(64, 3, 32, 32), torch.randint(10, (64,))
    return Transformer(), torch.randint(1000, (32, 128)), torch.randint(10, (32,))


def stepper(way: str, name: str, batches: int = 1) -> Callable[[], None]:
    """A function that makes one step."""
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(1)
    net, x, y = model_and_batch(name, batches)
    n = len(x)
    noise_multiplier = n / CLIP * (2 / (LR * RECORDS)) ** 0.5
    if way == "plain":
        parameters = list(net.parameters())
        std = (2 / (LR * RECORDS)) ** 0.5

        def step() -> None:
            net.zero_grad()
            F.cross_entropy(net(x), y).backward()
            with torch.no_grad():
                for p in parameters:
                    assert p.grad is not None
                    p.grad.add_(torch.randn_like(p), alpha=std).add_(p, alpha=1 / RECORDS)
                    p.add_(p.grad, alpha=-LR)

    elif way in ("ours", "vouched", "vmap"):
        import torch_dpbayes as dpb
        from torch_dpbayes.per_sample.bookkeeping import (
            BookkeepingGradientSource,
            VmapGradientSource,
        )
        from torch_dpbayes.per_sample.operations import Delivery

        # what make_private builds, less the loader, whose Poisson draws would vary the batch
        private = dpb.optim.DPSGLD(
            net.named_parameters(),
            LR,
            num_data=RECORDS,
            expected_batch_size=n,
            max_grad_norm=CLIP,
            sampling="poisson",
        )
        private.release.source = (
            VmapGradientSource(net)
            if way == "vmap"
            else BookkeepingGradientSource(net, assume_independent=way == "vouched")
        )
        deliver = Delivery(n)

        def step() -> None:
            private.zero_grad()
            inputs, targets = (x, y) if way == "vouched" else deliver((x, y), n)
            F.cross_entropy(net(inputs), targets).backward()
            private.step()

    else:
        import warnings

        from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
        from opacus.optimizers import DPOptimizer
        from opacus.optimizers.optimizer_fast_gradient_clipping import (
            DPOptimizerFastGradientClipping,
        )
        from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

        warnings.simplefilter("ignore")
        options: dict[str, Any] = {
            "noise_multiplier": noise_multiplier,
            "max_grad_norm": CLIP,
            "expected_batch_size": n,
        }
        if way == "hooks":
            hooked = GradSampleModule(net)
            theirs = DPOptimizer(
                torch.optim.SGD(net.parameters(), LR, weight_decay=1 / RECORDS), **options
            )

            def step() -> None:
                theirs.zero_grad()
                F.cross_entropy(hooked(x), y).backward()
                theirs.step()

        else:
            ghost = GradSampleModuleFastGradientClipping(
                net, max_grad_norm=CLIP, use_ghost_clipping=True
            )
            fast = DPOptimizerFastGradientClipping(
                torch.optim.SGD(net.parameters(), LR, weight_decay=1 / RECORDS), **options
            )
            criterion = DPLossFastGradientClipping(ghost, fast, torch.nn.CrossEntropyLoss())

            def step() -> None:
                fast.zero_grad()
                criterion(ghost(x), y).backward()
                fast.step()

    return step


def times(name: str, seconds: float, batches: int) -> dict[str, float]:
    """Median milliseconds of a step, for each way, in this process."""
    steps = {way: stepper(way, name, batches) for way in WAYS}
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


def peak(name: str, way: str, batches: int) -> dict[str, float]:
    """Peak MiB of a few steps over what was resident before the first one."""

    def status(key: str) -> int:
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith(key))

    for small in ("tiny", "tiny convolution"):
        stepper(way, small)()
    gc.collect()
    before = status("VmRSS")
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    step = stepper(way, name, batches)
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
    found: dict[str, float] = json.loads(finished.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="for each model and allocator setting"
    )
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--batches", type=int, default=1, help="times the batch of each model")
    parser.add_argument("--times", help=argparse.SUPPRESS)
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.times:
        print(json.dumps(times(arguments.times, arguments.seconds, arguments.batches)))
        return
    if arguments.peak:
        print(json.dumps(peak(*arguments.peak, arguments.batches)))
        return
    print(
        "| model | | plain | torch_dpbayes | vouched | vmap | hooks | ghost"
        " |\n|---|---|---|---|---|---|---|---|"
    )
    for name in arguments.models:
        options = ["--seconds", str(arguments.seconds), "--batches", str(arguments.batches)]
        measured = {
            "default": run({}, "--times", name, *options),
            "kept": run(KEPT, "--times", name, *options),
            "memory": {way: run({}, "--peak", name, way, *options)["peak"] for way in WAYS},
        }
        for key, title, unit in (
            ("default", "time", "ms"),
            ("kept", "time, memory kept", "ms"),
            ("memory", "peak memory", "MiB"),
        ):
            base = measured[key]["plain"]
            found = [measured[key][way] / max(base, 0.004) for way in list(WAYS)[1:]]
            ratios = " | ".join(f"{ratio:.2f}" for ratio in found)
            print(f"| {name} | {title} | {base:.3g} {unit} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
