"""Releases one draw from the posterior of a logistic regression, and prints its guarantee.

    python examples/one_posterior_sample.py [--epsilon 1]

The records are synthetic. The guarantee is known before the program reads them. Everything printed
after the draw is post-processing.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import torch_dpbayes.ops as ops


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw the weights; for synthetic records only"
    )
    options = parser.parse_args(arguments)

    truth = torch.tensor([2.0, -3.0, 1.0, 0.5])
    features = torch.randn(options.records, 4) / 2
    features[:, 3] = 1.0  # the intercept
    labels = torch.bernoulli((features @ truth).sigmoid())

    model = ops.GLM("bernoulli", prior_std=2.0, max_feature_norm=1.5)
    run = ops.FiniteRunLangevin(steps=3000)
    release = ops.OnePosteriorSample(
        model, run, options.epsilon, options.delta, num_data=options.records
    )
    print(release.guarantee())
    draw = release.sample(features, labels)
    print("draw of the weights:   ", [round(w, 2) for w in draw["weights"].tolist()])
    print("weights that made them:", truth.tolist())
    print(
        f"variance of the draw: {release.variance_inflation:.1f} times that of the maximum"
        " likelihood estimate"
    )
    if options.plot is not None:
        spread = release.variance_inflation**0.5
        picture(features, labels, truth, draw["weights"].cpu(), spread, options.plot)


def picture(
    features: torch.Tensor,
    labels: torch.Tensor,
    truth: torch.Tensor,
    draw: torch.Tensor,
    spread: float,
    file: Path,
) -> None:
    """Plot the draw with 95 % intervals, and the estimate without privacy by Newton's method."""
    from matplotlib.figure import Figure

    weights = torch.zeros(4)
    for _ in range(10):
        p = (features @ weights).sigmoid()
        information = features.T @ (features * (p * (1 - p))[:, None])
        weights = weights + torch.linalg.solve(information, features.T @ (labels - p))
    width = information.inverse().diagonal().sqrt()
    figure = Figure(figsize=(7, 2.8), layout="constrained")
    axes = figure.subplots()
    places = torch.arange(4)
    for shift, found, half, name, color in (
        (-0.1, draw - truth, 1.96 * spread * width, "the draw", "tab:blue"),
        (0.1, weights - truth, 1.96 * width, "without privacy", "0.4"),
    ):
        axes.errorbar(places + shift, found, yerr=half, fmt="o", color=color, capsize=4, label=name)
    axes.axhline(0, color="tab:red", linestyle="--", label="the weights that made the records")
    axes.set_xticks(places, ["first", "second", "third", "intercept"])
    axes.set(ylabel="weight, less the true one")
    axes.legend(fontsize=8, ncols=3)
    figure.savefig(file, dpi=100)


if __name__ == "__main__":
    main()
