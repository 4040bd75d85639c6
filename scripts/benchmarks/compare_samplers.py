"""What the four samplers sample under privacy noise, and how fast, beside the non-private samplers
of ``posteriors``.

    python compare_samplers.py [--quick] [--steps STEPS]

The target is a Gaussian in ten correlated dimensions (linear regression). Every run starts at the
posterior mean and makes the same number of passes over the data, with the same lr and momentum 0.9.
Its first fifth is dropped.

Batches are full. The noise of minibatches also heats a sampler, by an amount that depends on the
data. Without it, the table shows the sampler and its privacy noise alone, which theory predicts.

"noise" is z / z_L: 1 is the sampler's own noise, 3 asks for three times as much by
``noise_multiplier``. "mean bias" is the root mean square over the coordinates of (mean − true mean)
/ true sd. "variance ratio" is the average over the coordinates of variance / true variance, ± one
Monte Carlo standard error. This error follows from the effective sample size, as if coordinates
were independent; it is too small where that size is below about 10. "ESS" is the least effective
sample size of a coordinate for 1000 gradients of the whole data. A chain with a wrong law may have
a large one. "epsilon" is for delta = 1e-5 under add-or-remove-one and 1000 records; it falls with
the square root of the number of records.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import torch_dpbayes as dpb

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # of both, at import
    import arviz
    import posteriors

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "reproductions"))
from reproduction import Row, chain_of, markdown

NUM_DATA, MOMENTUM, DELTA = 1000, 0.9, 1e-5
DIMENSIONS = 10

OURS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "DPSGLD": (dpb.optim.DPSGLD, {}),
    "DPSGHMC": (dpb.optim.DPSGHMC, {"momentum": MOMENTUM}),
    "DPSGHMC matched": (dpb.optim.DPSGHMC, {"momentum": "matched"}),
    "DPSGNHT": (dpb.optim.DPSGNHT, {"momentum": MOMENTUM}),
    "DPSGFS": (dpb.optim.DPSGFS, {}),
}
THEIRS = ("SGLD", "SGHMC", "SGNHT")


@dataclass
class Target:
    """A posterior of ``NUM_DATA`` records: its per-record gradients, and exact samples."""

    lr: float
    prior_std: float
    gradients: Callable[[Tensor], Tensor]  # θ (d,) -> ∇ of −log p of every record, (N, d)
    log_likelihood: Callable[[Tensor], Tensor]  # θ (d,) -> Σ log p
    truth: Tensor  # (samples, d)
    max_grad_norm: float = field(init=False)

    def __post_init__(self) -> None:
        """The clip norm is far above what the posterior needs, so that nothing but noise
        disturbs it.
        """
        largest = max(self.gradients(theta).norm(dim=1).max().item() for theta in self.truth[:200])
        self.max_grad_norm = 1.5 * largest


def gaussian(num_samples: int) -> Target:
    """Linear regression with unit noise; features whose covariance has eigenvalues from 0.2
    to 1.
    """
    basis = torch.linalg.qr(torch.randn(DIMENSIONS, DIMENSIONS, dtype=torch.float64))[0]
    features = (
        torch.randn(NUM_DATA, DIMENSIONS, dtype=torch.float64)
        @ (basis * torch.linspace(0.2, 1.0, DIMENSIONS).sqrt())
        @ basis.T
    )
    labels = features @ torch.ones(DIMENSIONS, dtype=torch.float64) + torch.randn(
        NUM_DATA, dtype=torch.float64
    )
    precision = features.T @ features + torch.eye(DIMENSIONS, dtype=torch.float64)
    mean = torch.linalg.solve(precision, features.T @ labels)
    exact = torch.distributions.MultivariateNormal(mean, precision_matrix=precision)
    return Target(
        0.03,
        1.0,
        lambda theta: features * (features @ theta - labels)[:, None],
        lambda theta: -0.5 * (features @ theta - labels).square().sum(),
        exact.sample((num_samples,)),
    )


# -- one run ---------------------------------------------------------------------------------------


def ours(target: Target, name: str, noise: float, steps: int) -> tuple[Tensor, float]:
    """The chain of a private sampler at ``noise`` times its own, and its ε."""
    kind, options = OURS[name]
    common = {
        "assume_independent_records": True,
        "num_data": NUM_DATA,
        "expected_batch_size": NUM_DATA,
        "max_grad_norm": target.max_grad_norm,
        "temperature": 1.0,
        "prior_std": target.prior_std,
    }
    theta = nn.Parameter(target.truth.mean(0))
    # "matched" has no z_L: that of the same momentum
    plain = {**options, "momentum": MOMENTUM} if options else options
    wanted = kind([theta], target.lr, **common, **plain).langevin_noise_multiplier
    optimizer = kind([theta], target.lr, noise_multiplier=noise * wanted, **common, **options)
    chain = chain_of(theta, optimizer, target.gradients, steps)
    return chain, optimizer.accountant.get_epsilon(DELTA)


def theirs(target: Target, name: str, steps: int) -> Tensor:
    """The chain of a sampler of ``posteriors`` at the same step.

    Their samplers have a step ε and a friction A on the potential U/N at temperature 1/N: η = ε²,
    momentum 1 − εA. Their SGNHT changes its friction with gain η/N.
    """

    def log_posterior(theta: Tensor, _batch: Any) -> tuple[Tensor, Tensor]:
        return (
            target.log_likelihood(theta) - theta.square().sum() / (2 * target.prior_std**2)
        ) / NUM_DATA, torch.empty(0)

    options = {"lr": target.lr, "temperature": 1 / NUM_DATA}
    if name != "SGLD":
        step = math.sqrt(target.lr)
        options |= {"lr": step, "alpha": (1 - MOMENTUM) / step, "momenta": 0.0}
    transform = getattr(posteriors.sgmcmc, name.lower()).build(log_posterior, **options)
    state = transform.init(target.truth.mean(0))
    chain = torch.full((steps, target.truth.shape[1]), math.nan, dtype=torch.float64)
    for position in chain:
        state, _ = transform.update(state, None)
        position.copy_(state.params)
        if not bool(state.params.isfinite().all()):
            break
    return chain


def measured(chain: Tensor, truth: Tensor) -> dict[str, float]:
    """Bias and effective sample size of a chain whose first fifth is dropped; NaN if it
    diverged.
    """
    kept = chain[len(chain) // 5 :]
    if not bool(kept.isfinite().all()):
        return dict.fromkeys(("mean bias", "variance ratio", "standard error", "ESS"), math.nan)
    ess = np.array([float(arviz.ess(column[None].numpy())) for column in kept.T])
    ratio = kept.var(0) / truth.var(0)
    return {
        "mean bias": float(((kept.mean(0) - truth.mean(0)) / truth.std(0)).square().mean().sqrt()),
        "variance ratio": float(ratio.mean()),
        "standard error": float(np.sqrt((2 * ratio.numpy() ** 2 / ess).sum()) / len(ess)),
        "ESS": 1000 * float(ess.min()) / len(kept),
    }


# -- all of them -----------------------------------------------------------------------------------


def shown(row: dict[str, Any]) -> Row:
    """The row as the table has it."""
    line = {"sampler": row["sampler"], "noise": f"{row['noise']:g}", "mean bias": "diverged"}
    if math.isfinite(row["ESS"]):
        line["mean bias"] = f"{row['mean bias']:.2f}"
        line["variance ratio"] = f"{row['variance ratio']:.2f} ± {row['standard error']:.2f}"
        line["ESS"] = f"{row['ESS']:.2g}"
    return line | ({"epsilon": f"{row['epsilon']:.3g}"} if "epsilon" in row else {})


def compare(steps: int, num_samples: int) -> list[Row]:
    """Rows of the table."""
    rows, target = [], gaussian(num_samples)
    for name, noise in product(OURS, (1.0, 3.0)):
        if (name, noise) == ("DPSGHMC matched", 1.0):
            continue  # that is DPSGHMC
        chain, epsilon = ours(target, name, noise, steps)
        row = {"sampler": name, "noise": noise, **measured(chain, target.truth)}
        rows.append(shown({**row, "epsilon": epsilon}))
    for name in THEIRS:
        found = measured(theirs(target, name, steps), target.truth)
        rows.append(shown({"sampler": f"posteriors {name}", "noise": 1.0, **found}))
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="500 steps, to see that it runs")
    parser.add_argument("--steps", type=int, default=15_000, help="gradients of the whole data")
    options = parser.parse_args(arguments)
    steps, num_samples = (500, 4000) if options.quick else (options.steps, 20_000)
    print(markdown(compare(steps, num_samples)))


if __name__ == "__main__":
    main()
