"""Outer products of clipped gradients as curvatures, against derivatives of the clipped sums."""

import dataclasses
import math

import pyro
import pyro.distributions as dist
import pytest
import torch

import torch_dpbayes as dpb
from torch_dpbayes.noise_aware import laplace, newton
from torch_dpbayes.noise_aware.saturation import _mean_square, _unclipped, share_of_curvature
from torch_dpbayes.noise_aware.transcript import CurvatureRelease


def clipped(residuals, x, bound):
    gradients = residuals[:, None] * x
    return gradients * (bound / gradients.norm(dim=1).clamp_min(bound))[:, None]


@pytest.mark.parametrize("away", [0.0, 1.0, 3.0, 6.0, 12.0])
def test_share_is_what_the_clipped_sum_changes_by(away):
    """Of linear regression whose residuals have a deviation of 1 at the truth."""
    torch.manual_seed(0)
    n, size = 40_000, 6
    x = torch.randn(n, size, dtype=torch.float64)
    bound = 2 * math.sqrt(size)
    start = torch.full((size,), away / math.sqrt(size), dtype=torch.float64)
    noise = torch.randn(n, dtype=torch.float64)
    outer = clipped(noise + x @ start, x, bound)
    release = CurvatureRelease(start, outer.T @ outer, 0.0)
    step = 1e-3 * torch.eye(size, dtype=torch.float64)
    changes = [
        (clipped(noise + x @ (start + s), x, bound) - clipped(noise + x @ (start - s), x, bound))
        .sum(0)
        .div(2e-3)
        for s in step
    ]
    true = float(torch.stack(changes).trace())
    share = share_of_curvature(release, n * bound**2)
    told = float(release.value.trace())
    assert true / 1.7 < share * told < 1.7 * true
    if away >= 6:
        assert told > 3.5 * true


def test_moments_are_those_of_a_normal_length():
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(400_000, generator=generator, dtype=torch.float64)
    for length in (0.3, 0.5, 1.0, 4.0):
        inside = (length * z).abs() < 1
        error = 5 / math.sqrt(len(z))
        assert _unclipped(length) == pytest.approx(float(inside.double().mean()), abs=error)
        square = (length * z).square().clamp(max=1)
        assert _mean_square(length) == pytest.approx(float(square.mean()), abs=error)


def test_noise_is_not_taken_for_clipping():
    """A matrix of noise has a trace of that size by chance."""
    size, count = 9, 1000
    value = torch.eye(size, dtype=torch.float64) * 0.23 * count / size
    quiet = CurvatureRelease(torch.zeros(size), value, 0.0)
    assert share_of_curvature(quiet, float(count)) == 1.0
    noise = 0.5 * count / math.sqrt(size)
    moved = value + noise / math.sqrt(size) * torch.eye(size)
    loud = CurvatureRelease(torch.zeros(size), moved, noise)
    assert share_of_curvature(loud, float(count)) == 1.0
    assert share_of_curvature(dataclasses.replace(loud, noise_std=0.0), float(count)) < 0.6


@pytest.mark.parametrize("square", [0.9, 1.0, 3.0])
def test_all_clipped(square):
    value = torch.eye(4, dtype=torch.float64) * square / 4
    share = share_of_curvature(CurvatureRelease(torch.zeros(4), value, 0.0), 1.0)
    assert 0 < share < 0.1


def test_runs_from_far_away_arrive():
    """Ten weights, seven standard deviations of the residuals away from the prior's median, where
    nearly all gradients are clipped. One run in fifty does not, and says so.
    """
    n, size, std, errors = 5000, 10, 0.2, []
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(n, size, dtype=torch.float64, generator=generator)
        weights = torch.randn(size, dtype=torch.float64, generator=generator)
        weights *= 7 * std / weights.norm()
        y = x @ weights + std * torch.randn(n, dtype=torch.float64, generator=generator)

        def model(x, y):
            prior = dist.Normal(torch.zeros(size, dtype=x.dtype), 0.5).to_event(1)
            w = pyro.sample("w", prior)
            with pyro.plate("data", len(x)):
                pyro.sample("y", dist.Normal(x @ w, std), obs=y)

        post = dpb.noise_aware.laplace(
            model, x, y, epsilon=0.3, delta=1e-5, max_grad_norm=2 * math.sqrt(size) / std
        )
        errors.append(float((post.transcript.gradients[-1].theta - weights).norm()) / std)
    assert float(torch.tensor(errors).median()) < 0.3


def test_a_curvature_without_the_mean_is_not_averaged_with_ones_that_hold_it(monkeypatch):
    """Of few records noise hides how far apart they are."""
    eye = torch.ones(1, 1, dtype=torch.float64)
    steps = [(500.0, True), (500.0, True), (100.0, False)]
    monkeypatch.setattr(
        newton.MeasuredCurvature,
        "about_the_mean",
        lambda *_: newton.MeasuredCurvature(steps[0][0] * eye, 300.0, holds_mean=steps.pop(0)[1]),
    )
    seen = []
    denoised = newton.BlockLevels.denoised
    monkeypatch.setattr(
        newton.BlockLevels,
        "denoised",
        lambda self, raw, errors: seen.append(float(raw)) or denoised(self, raw, errors),
    )

    def model(x):
        mean = pyro.sample("mean", dist.Normal(0 * eye[0, 0], 5 * eye[0, 0]))
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Normal(mean, eye[0, 0]), obs=x)

    laplace(model, torch.randn(40).double(), epsilon=2.0, delta=1e-5, max_grad_norm=8.0)
    assert seen == [500.0, 500.0, 100.0]
