"""How often intervals of a noise-aware multinomial logistic regression hold the truth.

    python scripts/benchmarks/calibration_softmax.py [--form softmax layer diagonal reference]
        [--cells 1:20000 8:2000] [--prior-std 1] [--classes 3] [--on-sphere] [--runs 60]

Weights are drawn from the prior N(0, prior_std²) for three features in the unit ball; δ = 1e-5,
replace one record. ``softmax`` is ``noise_aware.laplace`` of ``ops.Softmax``, ``layer`` is
``laplace_for_module`` of a linear layer, ``diagonal`` the same with the diagonal of the curvature,
and ``reference`` that where the last class has no weights. The weights of one data set are not
independent, so the standard errors are of data sets; ``common`` is the mean over the classes.
"""

from __future__ import annotations

import argparse
import math
import warnings
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_dpbayes as dpb

CELLS = ("0.3:20000", "1:2000", "1:20000", "8:2000", "8:20000")
FORMS = ("softmax", "layer", "diagonal", "reference")
FEATURES, DELTA, DRAWS, BOUND = 3, 1e-5, 1000, 1.42
LEVELS = (0.5, 0.9)

cross_entropy = partial(F.cross_entropy, reduction="none")


def of_reference(outputs: Tensor, labels: Tensor) -> Tensor:
    """A softmax whose last class has the output 0."""
    return cross_entropy(F.pad(outputs, (0, 1)), labels)


def coverage(
    form: str, epsilon: float, num_data: int, prior_std: float, classes: int, on_sphere: bool
) -> list[float]:
    """Shares of one data set's weights inside their central intervals, one for each level, and of
    what the classes have in common inside the widest.
    """
    outputs = classes - (form == "reference")
    weights = prior_std * torch.randn(outputs, FEATURES)
    x = F.normalize(torch.randn(num_data, FEATURES)) * (1 - 1e-6)
    if not on_sphere:
        x = x * torch.rand(num_data, 1) ** (1 / FEATURES)
    logits = F.pad(x @ weights.T, (0, classes - outputs))
    labels = torch.distributions.Categorical(logits=logits).sample()
    if form == "softmax":
        model = dpb.ops.Softmax(classes, prior_std=prior_std)
        posterior = dpb.noise_aware.laplace(model, x.double(), labels, epsilon=epsilon, delta=DELTA)
        draws = posterior.sample(DRAWS)["weights"]
    else:
        posterior = dpb.noise_aware.laplace_for_module(
            nn.Linear(FEATURES, outputs, bias=False),
            x,
            labels,
            loss=of_reference if form == "reference" else cross_entropy,
            prior_std=prior_std,
            max_grad_norm=BOUND,
            epsilon=epsilon,
            delta=DELTA,
            curvature="full" if form == "layer" else "diagonal",
        )
        draws = posterior.sample(DRAWS)["weight"]
    ranks = (draws < weights).double().mean(0)
    common = (draws.mean(1) < weights.mean(0)).double().mean(0)
    inside = [float(((ranks - 0.5).abs() < level / 2).double().mean()) for level in LEVELS]
    return [*inside, float(((common - 0.5).abs() < LEVELS[-1] / 2).double().mean())]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--form", nargs="*", choices=FORMS, default=["softmax"])
    parser.add_argument("--cells", nargs="*", default=CELLS, help="epsilon:records")
    parser.add_argument("--prior-std", type=float, default=1.0)
    parser.add_argument("--classes", type=int, default=3)
    parser.add_argument("--on-sphere", action="store_true", help="features of length 1")
    parser.add_argument("--runs", type=int, default=60)
    options = parser.parse_args()
    # said of single data sets; how often their intervals hold the truth is what is printed
    for said in ("the (budget is too small|run has not arrived|loss couples)", ".*are clipped at"):
        warnings.filterwarnings("ignore", said)
    for form in options.form:
        for cell in options.cells:
            epsilon, num_data = cell.split(":")
            found = torch.tensor(
                [
                    coverage(
                        form,
                        float(epsilon),
                        int(num_data),
                        options.prior_std,
                        options.classes,
                        options.on_sphere,
                    )
                    for _ in range(options.runs)
                ]
            )
            error = found.std(0) / math.sqrt(options.runs)
            shown = [f"{m:.3f} ± {e:.3f}" for m, e in zip(found.mean(0), error, strict=True)]
            print(
                f"{form}, epsilon {epsilon}, n {num_data}: 50 % {shown[0]}, 90 % {shown[1]},"
                f" common 90 % {shown[2]}",
                flush=True,
            )


if __name__ == "__main__":
    main()
