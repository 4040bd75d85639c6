"""How often intervals of ``DPSVI.posterior()`` hold the weights of a logistic regression.

    python scripts/benchmarks/calibration_svi.py [--cells 1:3000 3:3000] [--prior-std 3]
        [--steps 1000] [--lr 0.1] [--runs 25]

Weights are drawn from the prior N(0, prior_std²) for six features in the unit ball; δ = 1e-5,
replace one record. Steps have batches of a tenth, and Pyro's Adam and ``AutoDiagonalNormal``. Runs
that warn, as of a curvature that is hardly known, are counted by themselves; errors are standard
errors over data sets.
"""

from __future__ import annotations

import argparse
import math
import warnings

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoDiagonalNormal
from torch import Tensor

import torch_dpbayes as dpb

FEATURES, DELTA, DRAWS, RATE = 6, 1e-5, 1000, 0.1
LEVELS = (0.5, 0.9)


def run(epsilon: float, size: int, prior_std: float, steps: int, lr: float) -> tuple[str, Tensor]:
    """What one run says of itself, shares of its weights inside their intervals, and its width in
    units of the prior's.
    """
    truth = prior_std * torch.randn(FEATURES)
    x = torch.randn(size, FEATURES)
    x = x / x.norm(dim=1, keepdim=True).clamp_min(1.0)
    y = torch.bernoulli((x @ truth).sigmoid())

    def model(x: Tensor, y: Tensor) -> None:
        prior = dist.Normal(torch.zeros(FEATURES), prior_std).to_event(1)
        weights = pyro.sample("weights", prior)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Bernoulli(logits=x @ weights), obs=y)

    pyro.clear_param_store()
    svi = dpb.infer.DPSVI(
        model,
        AutoDiagonalNormal(model),
        pyro.optim.Adam({"lr": lr}),
        pyro.infer.Trace_ELBO(),
        max_grad_norm=1.0,
        noise_multiplier=dpb.get_noise_multiplier(
            target_epsilon=epsilon,
            target_delta=DELTA,
            sample_rate=RATE,
            steps=steps,
            neighboring="replace_one",
        ),
        expected_batch_size=RATE * size,
    )
    svi.run(steps, x, y)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            draws = svi.posterior().sample(DRAWS)["weights"]
    except ValueError:
        return "refused", torch.full((len(LEVELS) + 1,), math.nan)
    ranks = (draws < truth).double().mean(0)
    inside = [((ranks - 0.5).abs() < level / 2).double().mean() for level in LEVELS]
    width = draws.std(0).mean() / prior_std
    return "warned" if said else "silent", torch.stack([*inside, width])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cells", nargs="*", default=["1:3000", "3:3000"], help="epsilon:records")
    parser.add_argument("--prior-std", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--runs", type=int, default=25)
    options = parser.parse_args()
    for cell in options.cells:
        epsilon, size = cell.split(":")
        found: dict[str, list[Tensor]] = {}
        for _ in range(options.runs):
            kind, figures = run(
                float(epsilon), int(size), options.prior_std, options.steps, options.lr
            )
            found.setdefault(kind, []).append(figures)
        for kind, all_of_them in sorted(found.items()):
            figures = torch.stack(all_of_them)
            error = figures.std(0) / math.sqrt(len(figures))
            shown = [f"{m:.2f} ± {e:.2f}" for m, e in zip(figures.mean(0), error, strict=True)]
            print(
                f"epsilon {epsilon}, n {size}, {len(figures)} {kind}: 50 % {shown[0]},"
                f" 90 % {shown[1]}, width / prior {shown[2]}",
                flush=True,
            )


if __name__ == "__main__":
    main()
