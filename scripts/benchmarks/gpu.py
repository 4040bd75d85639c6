"""A private step on a GPU: is it right, and what does it cost?

Prints rows as they come: first the clipped sum against a loop over records, for every mode,
precision and sampler; then, for each model, time and peak memory of a private step over a plain
one, here and in two modes of Opacus, with the kernels launched and the synchronisations of one
step. If a mode fails, its row says so. Models come from torchvision, timm and transformers; what is
not installed is left out. On a machine without a GPU batches are small, and only the counts of
operations tell anything.

    python scripts/benchmarks/gpu.py --seconds 330
"""

import argparse
import gc
import importlib
import statistics
import time
import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from bench_clipping import LR, Made, Step, mlp, private_step, residual
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import torch_dpbayes as dpb
from torch_dpbayes.per_sample.bookkeeping import BookkeepingGradientSource, VmapGradientSource
from torch_dpbayes.per_sample.operations import Delivery

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RECORDS = 50_000


def vit(batch: int) -> Made:
    timm = importlib.import_module("timm")
    net = timm.create_model("vit_small_patch16_224", num_classes=100)
    return net, torch.randn(batch, 3, 224, 224), torch.randint(100, (batch,))


class Logits(nn.Module):
    """A transformers model that takes tokens and returns the logits of the last one."""

    def __init__(self, net: Any, **options: Any) -> None:
        super().__init__()
        self.net, self.options = net, options

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape)
        found: Tensor = self.net(input_ids=x, position_ids=positions, **self.options).logits
        return found[:, -1] if found.dim() == 3 else found


def bert(batch: int) -> Made:
    theirs = importlib.import_module("transformers")
    options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 2}
    net = Logits(theirs.BertForSequenceClassification(theirs.BertConfig(**options)))
    return net, torch.randint(30000, (batch, 128)), torch.randint(2, (batch,))


def gpt2(batch: int) -> Made:
    theirs = importlib.import_module("transformers")
    config = theirs.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    net = Logits(theirs.GPT2LMHeadModel(config), use_cache=False)
    return net, torch.randint(50000, (batch, 256)), torch.randint(50000, (batch,))


resnet18 = partial(residual, widths=[64, 128, 256, 512], blocks=2, groups=8, first=False)
wrn16_4 = partial(residual, widths=[64, 128, 256], blocks=2, groups=16, first=True)
# By name: what makes it, its batch, and one for a machine without a GPU.
MODELS: dict[str, tuple[Callable[[int], Made], int, int]] = {
    "mlp": (mlp, 1024, 8),
    "resnet18": (resnet18, 256, 4),
    "wrn16_4": (wrn16_4, 512, 4),
    "vit_s": (vit, 64, 2),
    "bert": (bert, 32, 2),
    "gpt2": (gpt2, 16, 2),
}
HALF = ("vit_s", "bert", "gpt2")  # in bfloat16 as well


def made(name: str) -> Made:
    make, batch, small = MODELS[name]
    torch.manual_seed(0)
    net, x, y = (part.to(DEVICE) for part in make(batch if DEVICE == "cuda" else small))
    return net.train(), x, y


def stepper(way: str, name: str, *, is_half: bool) -> Step:
    """A function that makes one step."""
    net, x, y = made(name)

    def outputs(model: nn.Module, given: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=is_half):
            found: Tensor = model(given)
        return found.float()

    if way != "plain":
        return private_step(way, (net, x, y), RECORDS, 1.0, 0.0, outputs)
    parameters = list(net.parameters())

    def step() -> None:
        net.zero_grad()
        F.cross_entropy(outputs(net, x), y).backward()
        with torch.no_grad():
            gradients = [p.grad for p in parameters]
            noise = [torch.randn_like(p) for p in parameters]
            torch._foreach_add_(gradients, noise, alpha=1 / len(x))
            torch._foreach_add_(gradients, parameters, alpha=1 / RECORDS)
            torch._foreach_add_(parameters, gradients, alpha=-LR)

    return step


# -- is it right -----------------------------------------------------------------------------------


class Small(nn.Module):
    """Every kind of layer that book-keeping knows, and a parameter that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(3, 32, 3), nn.GroupNorm(4, 32), nn.Tanh(), nn.Conv2d(32, 64, 3, 2)
        )
        self.tokens, self.scale = nn.Embedding(16, 64), nn.Parameter(torch.ones(64))
        self.body = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 96), nn.GELU(), nn.RMSNorm(96))
        self.head = nn.Linear(96, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x).flatten(2).transpose(1, 2)
        h = h + self.tokens((x[:, 0, : h.shape[1], 0].abs() * 4).long().clamp(max=15)).mean(
            1, keepdim=True
        )
        return self.head(self.body(h * self.scale).mean(1))


def check(mode: str, precision: str) -> str:
    """The clipped sum of a mode against a loop over records in float64, and a step of each
    sampler.
    """
    torch.manual_seed(1)
    net, x, y = Small().to(DEVICE), torch.randn(24, 3, 14, 14), torch.randint(10, (24,))
    x, y = x.to(DEVICE), y.to(DEVICE)
    named = list(net.named_parameters())
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    rows, exact = [], deepcopy(net).double()
    for i in range(len(x)):
        loss = F.cross_entropy(exact(x[i : i + 1].double()), y[i : i + 1])
        gradients = torch.autograd.grad(loss, list(exact.parameters()))
        rows.append(torch.cat([g.flatten() for g in gradients]))
    each = torch.stack(rows)
    norms = each.norm(dim=1)
    clip = float(norms.median())
    truth = (each * (clip / norms).clamp(max=1.0)[:, None]).sum(0)
    kind = BookkeepingGradientSource if mode == "bookkeeping" else VmapGradientSource
    source = kind(net)
    out = [torch.zeros(p.numel(), device=DEVICE) for _, p in named]
    inputs, targets = Delivery(len(x))((x, y), len(x))
    with torch.autocast(DEVICE, torch.bfloat16, enabled=precision == "bf16"):
        found = net(inputs)
    F.cross_entropy(found.float(), targets).backward()
    source.add_clipped_sum(named, clip, out)
    off = float((torch.cat(out).double() - truth).norm() / truth.norm())
    source.discard([p for _, p in named])
    for sampler in ("DPSGLD", "DPSGHMC", "DPSGNHT", "DPSGFS"):
        options: dict[str, Any] = {"fisher": "diagonal"} if sampler == "DPSGFS" else {}
        options |= {"num_data": 240, "expected_batch_size": 24, "max_grad_norm": clip}
        private = getattr(dpb.optim, sampler)(named, 1e-4, sampling="poisson", **options)
        private.release.source = source
        inputs, targets = Delivery(len(x))((x, y), len(x))
        F.cross_entropy(net(inputs), targets).backward()
        private.step()
        assert all(bool(torch.isfinite(p).all()) for _, p in named), sampler
    return f"clipped sum off by {off:.1e} of itself; four samplers step"


# -- what it costs ---------------------------------------------------------------------------------

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")


def counts(step: Step) -> str:
    """Launches, synchronisations and device time of one step."""
    both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=both if DEVICE == "cuda" else both[:1]) as seen:
        step()
    wait()
    found = seen.key_averages()

    def total(names: tuple[str, ...]) -> int:
        return sum(k.count for k in found if k.key in names)

    of_host = {k.key for k in found if k.self_cpu_time_total > 0}  # ranges, such as Optimizer.step
    busy = sum(k.self_device_time_total for k in found if k.key not in of_host) / 1e3
    waits = total(WAITS) - (DEVICE == "cuda")  # the profiler's own at the end
    return f"{total(LAUNCHES)} launches, {waits} waits, {busy:.1f} ms busy"


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def measure(way: str, name: str, repeats: int, *, is_half: bool) -> tuple[float, float, str]:
    """Median milliseconds, peak MiB, and counts."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step = stepper(way, name, is_half=is_half)
    for _ in range(3):
        step()
    wait()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        wait()
        times.append(1e3 * (time.perf_counter() - start))
    peak = torch.cuda.max_memory_allocated() / 2**20 if DEVICE == "cuda" else 0.0
    return statistics.median(times), peak, counts(step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=330.0, help="no row begins later")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--ways", nargs="+", default=["plain", "ours", "ghost", "hooks"])
    parser.add_argument("--repeats", type=int, default=15 if DEVICE == "cuda" else 2)
    parser.add_argument("--no-checks", action="store_true")
    arguments = parser.parse_args()
    start = time.perf_counter()
    card = torch.cuda.get_device_name() if DEVICE == "cuda" else "no GPU"
    print(card, "torch", torch.__version__, dpb.__file__, flush=True)
    for mode in () if arguments.no_checks else ("bookkeeping", "vmap"):
        for precision in ("float32", "tf32", "bf16"):
            try:
                found = check(mode, precision)
            except Exception as error:
                found = f"FAILED {type(error).__name__}: {str(error)[:300]}"
            print(f"{mode} {precision}: {found}", flush=True)
    torch.backends.cudnn.allow_tf32 = True  # as torch has it
    print("| model | way | ms | over plain | MiB | over plain | one step |\n" + "|---" * 7 + "|")
    for name in arguments.models:
        for is_half in (False, True)[: 2 if name in HALF else 1]:
            plain: tuple[float, float] | None = None
            for way in arguments.ways:
                if time.perf_counter() - start > arguments.seconds:
                    print("time is up")
                    return
                row = f"| {name}{', bf16' if is_half else ''} | {way} |"
                try:
                    ms, peak, counted = measure(way, name, arguments.repeats, is_half=is_half)
                except Exception as error:
                    text = str(error).partition("\n")[0][:200]
                    print(row, f"FAILED {type(error).__name__}: {text} |", flush=True)
                    continue
                plain = plain or (ms, max(peak, 1.0))
                ratios = f"{ms:.2f} | {ms / plain[0]:.2f} | {peak:.0f} | {peak / plain[1]:.2f}"
                print(row, ratios, "|", counted, "|", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
