"""What a private step costs from the clipped sum on, against torch.optim.SGD and one torch.randn
per parameter.

    scripts/benchmarks/bench_optimizers.py

Times charge, noise, prior and update of each sampler, interleaved with the reference in one run on
one core; prints medians and their ratio.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import torch_dpbayes as dpb
from torch_dpbayes.per_sample.hooks import HooksGradientSource

SHAPES = {
    110: [(1, 109), (1,)],
    10**4: [(100, 90), (100,), (8, 100), (100,)],
    10**6: [(1000, 784), (1000,), (204, 1000), (204,), (10, 204), (10,)],
    10**7: [(1000, 1000)] * 9 + [(999, 1000), (1000,)],
}


class GivenSum(HooksGradientSource):
    """A clipped sum that is there already."""

    def add_clipped_sum(
        self,
        named_parameters: Sequence[tuple[str, Tensor]],
        max_grad_norm: float,
        out: Sequence[Tensor],
        *,
        scale: Tensor | None = None,
        second_moment: Tensor | None = None,
    ) -> int:
        return 64


def parameters_of(size: int) -> list[nn.Parameter]:
    return [nn.Parameter(0.01 * torch.randn(shape)) for shape in SHAPES[size]]


def private(name: str, size: int) -> Callable[[], None]:
    kinds: dict[str, Callable[..., dpb.optim.base.PrivateOptimizer]] = {
        "SGLD": dpb.optim.DPSGLD,
        "SGHMC": dpb.optim.DPSGHMC,
        "SGNHT": dpb.optim.DPSGNHT,
        "SGFS (diagonal)": lambda *args, **options: dpb.optim.DPSGFS(
            *args, fisher="diagonal", **options
        ),
    }
    optimizer = kinds[name](
        parameters_of(size),
        1e-3,
        assume_independent_records=True,
        num_data=10_000,
        expected_batch_size=64,
        max_grad_norm=1.0,
        sampling="poisson",
    )
    optimizer.release.source = GivenSum()

    def release() -> None:
        with torch.no_grad():
            optimizer._step()

    return release


def reference(size: int) -> Callable[[], None]:
    parameters = parameters_of(size)
    for p in parameters:
        p.grad = torch.randn_like(p)
    optimizer = torch.optim.SGD(parameters, 1e-9, foreach=True)

    def step() -> None:
        for p in parameters:
            torch.randn(p.shape)
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="per number of parameters and sampler"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'parameters':>12}  {'sampler':<16} {'step':>12}  {'reference':>12}  {'ratio':>6}")
    for size in SHAPES:
        for name in ("SGLD", "SGHMC", "SGNHT", "SGFS (diagonal)"):
            pair = (private(name, size), reference(size))
            times: tuple[list[float], list[float]] = ([], [])
            end = time.perf_counter() + arguments.seconds
            while time.perf_counter() < end or len(times[0]) < 10:
                for run, taken in zip(pair, times, strict=True):
                    start = time.perf_counter()
                    run()
                    taken.append(time.perf_counter() - start)
            ours, theirs = (1e6 * statistics.median(t[3:]) for t in times)
            number = sum(torch.Size(shape).numel() for shape in SHAPES[size])
            print(
                f"{number:>12}  {name:<16} {ours:>9.1f} us  {theirs:>9.1f} us "
                f" {ours / theirs:>6.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
