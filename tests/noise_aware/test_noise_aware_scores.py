"""Clipped scores against sums over the target's distribution: their mean at the truth, slope and
variance, and that clipping alone would be biased.
"""

import math

import pytest
import torch
from scipy import stats

from torch_dpbayes.noise_aware import scores as module
from torch_dpbayes.noise_aware.scores import (
    Bernoulli,
    Gaussian,
    Poisson,
    scores,
    slope_curve,
    slopes,
    variances,
)

DOUBLE = torch.float64
MOST = 9.0  # counts above it are taken as that many


def distribution(kind: str, u: float):
    """The target's values, their probabilities, and the score y − E[Y] of the model."""
    if kind == "poisson":
        count = torch.arange(300, dtype=DOUBLE)
        weight = torch.tensor(stats.poisson.pmf(count.numpy(), math.exp(u)))
        return Poisson(MOST), count.clamp(max=MOST), weight, count - math.exp(u)
    if kind == "bernoulli":
        y, p = torch.tensor([0.0, 1.0], dtype=DOUBLE), 1 / (1 + math.exp(-u))
        return Bernoulli(), y, torch.tensor([1 - p, p], dtype=DOUBLE), y - p
    z = torch.linspace(-9, 9, 20001, dtype=DOUBLE)
    return Gaussian(4.0), 4 * u + 2 * z, torch.softmax(-z.square() / 2, 0), 2 * z


@pytest.mark.parametrize("bound", [0.9, 2.3, 5.0, 1e30])
@pytest.mark.parametrize("u", [-3.0, -0.5, 0.3, 1.2])
@pytest.mark.parametrize("kind", ["poisson", "bernoulli", "gaussian"])
def test_moments_are_those_of_the_targets_distribution(kind, u, bound):
    target, y, weight, score = distribution(kind, u)
    at, limit = torch.tensor(u, dtype=DOUBLE), torch.tensor(bound, dtype=DOUBLE)
    psi = scores(target, at.expand_as(y), y, limit.expand_as(y))
    assert bool((psi.abs() <= bound).all())
    slope, variance = float(-(weight * psi * score).sum()), float((weight * psi**2).sum())
    # within a fiftieth of the standard deviation, where clipping alone is off by up to a fifth
    assert abs(float((weight * psi).sum())) < 0.02 * math.sqrt(variance)
    assert float(slopes(target, at, limit)) == pytest.approx(slope, rel=1e-5, abs=1e-9)
    assert float(variances(target, at, limit)) == pytest.approx(variance, rel=2e-3, abs=1e-9)


def test_clipping_about_the_mean_is_biased(monkeypatch):
    target, y, weight, _ = distribution("poisson", 1.2)
    bound, at = torch.full_like(y, 2.3), torch.full_like(y, 1.2)
    monkeypatch.setattr(module, "_ITERATIONS", 0)
    psi = scores(target, at, y, bound)
    assert float((weight * psi).sum()) > 0.04 * math.sqrt(float((weight * psi**2).sum()))


def test_the_curve_is_that_of_the_slopes():
    u = torch.linspace(-40, 4, 777, dtype=DOUBLE, requires_grad=True)
    bound = torch.tensor(2.5, dtype=DOUBLE)
    for target in (Poisson(20.0), Bernoulli()):
        found = slope_curve(target, bound)(u)
        # a bound that passes a whole number makes a kink
        torch.testing.assert_close(found, slopes(target, u, bound), rtol=1e-2, atol=1e-9)
        assert bool(torch.autograd.grad(found.sum(), u)[0].isfinite().all())


@pytest.mark.parametrize("target", [Poisson(1e15), Bernoulli(), Gaussian(1e10)], ids=str)
def test_scores_are_bounded_whatever_the_record_holds(target):
    values = torch.tensor([0.0, 1.0, -1e30, 1e30, 700.0, -700.0, 3e38], dtype=DOUBLE)
    u, y, bound = torch.cartesian_prod(
        values, values, torch.tensor([1e-15, 1.0, 1e15, 1e30], dtype=DOUBLE)
    ).T
    found = scores(target, u, y, bound)
    assert bool((found.abs() <= bound).all())
    assert bool(found.isfinite().all())
