"""How often intervals of a noise-aware multinomial logistic regression hold the truth.

    python scripts/benchmarks/calibration_softmax.py

Weights are drawn from the prior N(0, 1), three classes, three features in the unit ball; δ = 1e-5,
replace one record. The weights of one data set are not independent, so the standard errors are of
data sets.
"""

from __future__ import annotations

import argparse
import math
import warnings

import torch
import torch.nn.functional as F

import torch_dpbayes as dpb

CELLS = ((0.3, 20_000), (1.0, 2_000), (1.0, 20_000), (8.0, 2_000), (8.0, 20_000))
CLASSES, FEATURES, DELTA, DRAWS = 3, 3, 1e-5, 1000
LEVELS = (0.5, 0.9)


def coverage(epsilon: float, num_data: int) -> list[float]:
    """Shares of the weights of one data set inside their central intervals, one for each level."""
    weights = torch.randn(CLASSES, FEATURES, dtype=torch.float64)
    directions = F.normalize(torch.randn(num_data, FEATURES, dtype=torch.float64))
    x = directions * torch.rand(num_data, 1, dtype=torch.float64) ** (1 / FEATURES)
    y = torch.distributions.Categorical(logits=x @ weights.T).sample()
    posterior = dpb.noise_aware.laplace(
        dpb.ops.Softmax(CLASSES), x, y, epsilon=epsilon, delta=DELTA
    )
    ranks = (posterior.sample(DRAWS)["weights"].double() < weights).double().mean(0)
    return [float(((ranks - 0.5).abs() < level / 2).double().mean()) for level in LEVELS]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=60)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "the (budget is too small|run has not arrived)")
    for epsilon, num_data in CELLS:
        found = torch.tensor([coverage(epsilon, num_data) for _ in range(options.runs)])
        error = found.std(0) / math.sqrt(options.runs)
        shown = [f"{m:.3f} ± {e:.3f}" for m, e in zip(found.mean(0), error, strict=True)]
        print(f"epsilon {epsilon:g}, n {num_data}: 50 % {shown[0]}, 90 % {shown[1]}", flush=True)


if __name__ == "__main__":
    main()
