"""Releases a private mean of numbers in a known range, with an interval that includes the noise.

    python examples/private_mean.py [--epsilon 0.5]

The mean is one posterior sample of a Gaussian model whose only column is ones. The numbers are
synthetic.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch

import torch_dpbayes.ops as ops

# public: the range of a number, and the spread that the model assumes
LOW, HIGH, STD = 0.0, 10.0, 2.0


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--epsilon", type=float, default=0.5)
    parser.add_argument("--delta", type=float, default=1e-6)
    parser.add_argument("--records", type=int, default=5000)
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw the synthetic numbers and the interval"
    )
    options = parser.parse_args(arguments)

    n, middle = options.records, (LOW + HIGH) / 2
    values = (3.5 + STD * torch.randn(n)).clamp(LOW, HIGH)
    model = ops.GLM("gaussian", prior_std=HIGH - LOW, noise_std=STD)
    # with this step size, a tenth of the posterior variance, the variance is 5 % too large, and 100
    # steps forget the start
    run = ops.FiniteRunLangevin(
        steps=100, step_size=0.1 * STD**2 / n, max_grad_norm=(HIGH - LOW) / STD**2
    )
    release = ops.OnePosteriorSample(
        model, run, epsilon=options.epsilon, delta=options.delta, num_data=n
    )
    print(release.guarantee())
    draw = release.sample(torch.ones(n, 1), values - middle)["weights"].item() + middle
    half = 1.96 * STD * math.sqrt(release.variance_inflation / n)
    print(
        f"private mean: {draw:.3f}, 95 % interval {draw - half:.3f} to {draw + half:.3f}; the"
        " numbers were made with mean 3.532"
    )
    if options.plot is not None:
        picture(values, draw, half, options.plot)


def picture(values: torch.Tensor, draw: float, half: float, file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.6), layout="constrained")
    numbers, mean = figure.subplots(1, 2)
    numbers.hist(values.tolist(), bins=40, color="0.75")
    numbers.axvline(draw, color="tab:blue")
    numbers.set(xlabel="number", ylabel="records", title="the numbers")
    mean.errorbar([draw], ["private"], xerr=half, fmt="o", color="tab:blue", capsize=4)
    mean.plot([float(values.mean())], ["without privacy"], "o", color="0.4")
    mean.axvline(3.532, color="tab:red", linestyle="--", label="they were made with")
    mean.set(xlabel="mean", title="mean, 95 % interval")
    mean.margins(y=0.6)
    mean.legend(fontsize=8)
    figure.savefig(file, dpi=100)


if __name__ == "__main__":
    main()
