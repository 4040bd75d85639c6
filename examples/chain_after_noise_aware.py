"""A noise-aware posterior, and an exact chain that starts from it, one accountant for both.

    python examples/chain_after_noise_aware.py

The records say only what a + b² is, so the posterior of a and b is bent like a banana: no Gaussian
in the curvature's place is like it. The noise-aware posterior takes a part of the budget, and says
where the mass is and how wide it is. The chain spends the rest, and has the posterior of the
records as its law. The answer without privacy, by quadrature, is shown beside them for these
made-up records.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC
from torch import Tensor

import torch_dpbayes as dpb

NOISE = 40.0
BOUND = 0.1  # few gradients and few log ratios, each for a unit of distance, are longer


def model(y: Tensor) -> None:
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(a + b**2, NOISE), obs=y)


def without_privacy(y: Tensor) -> dict[str, tuple[float, float]]:
    """Means and standard deviations by quadrature."""
    grid = torch.linspace(-5, 5, 1001, dtype=torch.float64)
    a, b = grid[:, None], grid[None, :]
    count, mean = len(y), float(y.double().mean())
    log = -0.5 * (a**2 + b**2) - 0.5 * count * (mean - a - b**2) ** 2 / NOISE**2
    weight = (log - log.max()).exp()
    weight /= weight.sum()

    def moments(value: Tensor) -> tuple[float, float]:
        first = float((weight * value).sum())
        return first, math.sqrt(float((weight * value**2).sum()) - first**2)

    return {"a": moments(a), "b": moments(b)}


def picture(
    y: Tensor, chain: dict[str, Tensor], posterior: dpb.noise_aware.NoiseAwarePosterior, file: Path
) -> None:
    """The posterior of the records, the noise-aware one at one and two standard deviations, and the
    chain.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    a, b = torch.meshgrid(torch.linspace(-3, 3, 200), torch.linspace(-3, 3, 200), indexing="ij")
    log = -0.5 * (a**2 + b**2) - 0.5 * len(y) * (float(y.mean()) - a - b**2) ** 2 / NOISE**2
    density = (log - log.max()).exp()
    axes.contourf(a, b, density, levels=[0.05, 0.2, 0.5, 0.8, 1.01], cmap="Greys", alpha=0.6)
    axes.plot(chain["a"], chain["b"], ".", color="tab:blue", markersize=2, label="the chain")
    angle = torch.linspace(0, 2 * math.pi, 200)
    for width in (1, 2):
        axes.plot(
            float(posterior.mean["a"]) + width * float(posterior.stddev["a"]) * angle.cos(),
            float(posterior.mean["b"]) + width * float(posterior.stddev["b"]) * angle.sin(),
            color="tab:orange",
            label="noise-aware, 1 and 2 standard deviations" if width == 1 else None,
        )
    axes.set(xlabel="a", ylabel="b", xlim=(-3, 3), ylim=(-3, 3))
    axes.legend(fontsize=8, loc="lower left")
    figure.savefig(file, dpi=100)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--records", type=int, default=20_000, help="default: 20000")
    parser.add_argument("--epsilon", type=float, default=8.0, help="for everything; default: 8")
    parser.add_argument("--iterations", type=int, default=1500, help="default: 1500")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw all three")
    options = parser.parse_args(arguments)

    y = 1.0 + NOISE * torch.randn(options.records)
    accountant = dpb.PrivacyAccountant(options.epsilon, 1e-6)
    posterior = dpb.noise_aware.laplace(
        model,
        y,
        epsilon=options.epsilon / 4,
        accountant=accountant,
        max_grad_norm=BOUND,
        num_data=options.records,
    )
    kernel = dpb.noise_aware.kernel_from(
        posterior,
        model,
        accountant=accountant,
        num_iterations=options.iterations,
        log_ratio_slope=BOUND,
    )
    runner = MCMC(kernel, num_samples=options.iterations, warmup_steps=0, disable_progbar=True)
    runner.run(y)
    chain, exact = runner.get_samples(), without_privacy(y)

    print(f"\n{'':4}{'noise-aware':>20}{'chain':>20}{'without privacy':>20}   (mean, sd)")
    for name in ("a", "b"):
        found = [
            (float(posterior.mean[name]), float(posterior.stddev[name])),
            (float(chain[name].mean()), float(chain[name].std())),
            exact[name],
        ]
        print(f"{name:4}" + "".join(f"{mean:12.2f}{std:8.2f}" for mean, std in found))
    figures = kernel.diagnostics()
    print(
        f"\nthe chain: acceptance rate {figures['acceptance rate']:.2f}, R-hat"
        f" {figures['R-hat']:.2f}, {figures['effective sample size']:.0f} effective samples"
    )
    print(accountant.summary())
    if options.plot is not None:
        picture(y, chain, posterior, options.plot)


if __name__ == "__main__":
    main()
