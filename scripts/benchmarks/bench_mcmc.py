"""What the per-record work of the Pyro kernels costs beside what Pyro does without privacy, and how
much memory a million records take.

    bench_mcmc.py
    bench_mcmc.py --memory    # the peak of a million rows, in a process of its own

Clipped gradients against Pyro's own potential and gradient of the same model, record terms against
Pyro's trace of the model with its log densities, interleaved in one run; prints medians of
processor time and their ratio, and the seconds that a kernel takes to set itself up.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer.mcmc.util import initialize_model
from pyro.ops.integrator import potential_grad
from torch import Tensor

from torch_dpbayes.mcmc import RecordDensity

FIGURES = {"gradient": 1.2, "terms": 1.2}


def normal(name: str, *shape: int) -> Tensor:
    value: Tensor = pyro.sample(name, dist.Normal(0.0, 1.0).expand(shape).to_event(len(shape)))
    return value


def logistic(x: Tensor, y: Tensor) -> None:
    weights = normal("weights", x.shape[1])
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=x @ weights), obs=y)


def gaussian(x: Tensor) -> None:
    mean = normal("mean", x.shape[1])
    with pyro.plate("data", len(x)):
        pyro.sample("x", dist.Normal(mean, 1.0).to_event(1), obs=x)


def hierarchical(group: Tensor, y: Tensor) -> None:
    center, spread = normal("center"), pyro.sample("spread", dist.HalfNormal(1.0))
    with pyro.plate("groups", 20):
        effect = pyro.sample("effect", dist.Normal(center, spread))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(effect[group], 1.0), obs=y)


def network(x: Tensor, y: Tensor) -> None:
    first, bias, second, last = (
        normal("first", 3, 50),
        normal("bias", 50),
        normal("second", 50),
        normal("last"),
    )
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(torch.tanh(x @ first + bias) @ second + last, 1.0), obs=y)


def problems() -> dict[str, tuple[Callable[..., None], tuple[Tensor, ...]]]:
    return {
        "logistic, N = 10,000, d = 20": (
            logistic,
            (torch.randn(10_000, 20), torch.bernoulli(torch.full((10_000,), 0.5))),
        ),
        "Gaussian, N = 100,000, d = 10": (gaussian, (torch.randn(100_000, 10),)),
        "hierarchical, N = 100,000, 22 latents": (
            hierarchical,
            (torch.randint(0, 20, (100_000,)), torch.randn(100_000)),
        ),
        "network 3-50-1, N = 2,000": (network, (torch.randn(2_000, 3), torch.randn(2_000))),
    }


def alternatives(
    model: Callable[..., None], data: tuple[Tensor, ...]
) -> tuple[float, dict[str, tuple[Callable[[], Any], Callable[[], Any]]]]:
    """Seconds of the set-up, and pairs (ours, Pyro's)."""
    start = time.perf_counter()
    density = RecordDensity(model, data)
    seconds = time.perf_counter() - start
    theta = 0.1 * torch.randn(density.prior.dimension)
    _, potential, _, _ = initialize_model(model, data)
    unconstrained = density.prior.unflatten(theta)
    conditioned = poutine.condition(model, density.prior.constrain(theta))

    def trace() -> None:
        with torch.no_grad():
            poutine.trace(conditioned).get_trace(*data).compute_log_prob()

    return seconds, {
        "gradient": (
            lambda: density.clipped_gradient_sum(theta, 1.0),
            lambda: potential_grad(potential, dict(unconstrained)),
        ),
        "terms": (lambda: density.log_likelihoods(theta), trace),
    }


def interleaved(
    ours: Callable[[], Any], theirs: Callable[[], Any], seconds: float
) -> tuple[float, float]:
    """Median seconds of the processor of each."""
    times: tuple[list[float], list[float]] = ([], [])
    for run in (ours, theirs):
        run()
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times[0]) < 5:
        for run, found in zip((ours, theirs), times, strict=True):
            start = time.process_time()
            run()
            found.append(time.process_time() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def memory() -> None:
    """Peak resident memory of a million rows: after the imports, with the data, and after
    terms and gradients.
    """

    def peak() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

    torch.set_num_threads(1)
    print(f"imports                      {peak():.2f} GB")
    data = torch.randn(1_000_000, 20), torch.zeros(1_000_000).bernoulli_(0.5)
    print(f"with the data                {peak():.2f} GB")
    density = RecordDensity(logistic, data)
    for _ in range(3):
        density.log_likelihoods(torch.randn(20))
        density.clipped_gradient_sum(torch.randn(20), 1.0)
    print(f"with terms and gradients     {peak():.2f} GB")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="for each comparison; default: 5"
    )
    parser.add_argument("--only", default="", help="models whose names begin with this")
    parser.add_argument("--memory", action="store_true", help="measure memory instead of time")
    options = parser.parse_args(arguments)
    if options.memory:
        memory()
        return
    torch.set_num_threads(1)
    print(f"{'':40}{'ours':>10}{'Pyro':>10}{'ratio':>8}{'aim':>6}")
    for name, (model, data) in problems().items():
        if not name.startswith(options.only):
            continue
        set_up, pairs = alternatives(model, data)
        for what, (ours, theirs) in pairs.items():
            a, b = interleaved(ours, theirs, options.seconds)
            print(
                f"{name + ', ' + what:48.48}{a * 1e3:7.2f} ms{b * 1e3:7.2f}"
                f" ms{a / b:6.2f}{FIGURES[what]:6.1f}",
                flush=True,
            )
        print(f"{name + ', set-up':48.48}{set_up:7.2f} s", flush=True)


if __name__ == "__main__":
    main()
