"""Releases one draw from the posterior of a logistic regression, and prints why that is private.

    python examples/one_posterior_sample.py [--epsilon 1]

The records are made up here; the guarantee is known before they are touched. What is printed after
it is post-processing of the one draw.
"""

from __future__ import annotations

import argparse

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


if __name__ == "__main__":
    main()
