"""Learns a private linear head on wavelet features of scikit-learn's digits, and says how good its
predictions are, and how good those of which it is sure.

    python examples/private_head.py               # some seconds
    python examples/private_head.py --epsilon 1

Features are made of each picture alone, so they cost nothing. What is printed is computed on the
test pictures, taken to be public here.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits

import torch_dpbayes as dpb
from torch_dpbayes import metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw accuracy by certainty")
    options = parser.parse_args()

    pixels, labels = load_digits(return_X_y=True)
    pictures = torch.tensor(pixels / 16, dtype=torch.float32).reshape(-1, 8, 8)
    maps = dpb.heads.Scattering(8, scales=1)(pictures)  # [1797, 9, 4, 4]
    features = dpb.heads.group_normalised(maps, groups=1).flatten(1)
    order = torch.randperm(len(features))
    train, test = order[:1437], order[1437:]

    head = dpb.heads.PrivateLinear(10, method=dpb.heads.SGHMC(lr=2.0, epochs=150, batch_size=512))
    answers = torch.tensor(labels)
    posterior = head.fit(features[train], answers[train], epsilon=options.epsilon, delta=1e-5)
    print(posterior.guarantee())

    truth = answers[test]
    for name, predict in (
        ("last iterate", posterior.predict_last),
        ("averaged weights", posterior.predict_with_mean),
        ("posterior average", posterior.predict),
    ):
        p = predict(features[test])
        print(
            f"{name:18} accuracy {metrics.accuracy(p, truth):.3f}"
            f"  NLL {metrics.negative_log_likelihood(p, truth):.3f}"
            f"  ECE {metrics.expected_calibration_error(p, truth):.3f}"
        )
    by_certainty = posterior.predictive_entropy(features[test]).argsort()
    sure = by_certainty[: int(0.9 * len(test))]
    of_sure = metrics.accuracy(posterior.predict(features[test[sure]]), truth[sure])
    print(f"of the nine tenths it is surest of: accuracy {of_sure:.3f}")
    if options.plot is not None:
        is_right = posterior.predict(features[test]).argmax(1) == truth
        picture(is_right[by_certainty].double(), options)


def picture(is_right: torch.Tensor, options: argparse.Namespace) -> None:
    """How many of the surest answers are right, where less sure ones are left to somebody else."""
    from matplotlib.figure import Figure

    counts = torch.arange(1, len(is_right) + 1)
    accuracy = is_right.cumsum(0) / counts
    figure = Figure(figsize=(6, 2.8), layout="constrained")
    axes = figure.subplots()
    first = len(is_right) // 10
    axes.plot(100 * counts[first:] / len(counts), 100 * accuracy[first:], color="tab:blue")
    axes.set(
        xlabel="answered, the surest first (% of test pictures)",
        ylabel="of these right (%)",
        title=f"a private head on digits, ε = {options.epsilon:g}",
    )
    axes.grid(alpha=0.3)
    figure.savefig(options.plot, dpi=100)


if __name__ == "__main__":
    main()
