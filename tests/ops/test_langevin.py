"""Langevin samplers against the stationary laws of their chains."""

import math

import numpy as np
import pytest
import torch
from scipy import linalg, stats

from torch_dpbayes import ops
from torch_dpbayes.noise import GaussianNoise
from torch_dpbayes.ops.models import Density

LEVEL = 1e-4 / 6  # of one look, of six comparisons a sampler
COLUMNS, REPEATS = 500, 4
CURVATURE = np.array([0.7, 2.0])


def quadratic():
    kappa = torch.as_tensor(CURVATURE).repeat(COLUMNS)
    return Density(
        torch.zeros(2 * COLUMNS, dtype=torch.float64),
        lambda x: (kappa * x * x).sum() / 2,
        lambda x: kappa * x,
    )


def moments(h, gamma, u):
    """What a step of the linear equation multiplies (x, v) by, and the covariance of its noise, by
    Van Loan's matrix exponential.
    """
    drift = np.array([[0.0, 1.0], [0.0, -gamma]])
    noise = np.diag([0.0, 2 * gamma * u])
    block = linalg.expm(np.block([[-drift, noise], [np.zeros((2, 2)), drift.T]]) * h)
    flow = block[2:, 2:].T
    return drift, flow, flow @ block[:2, 2:]


def underdamped_variance(kappa, h, gamma, u):
    """Of the chain with frozen gradients, by a Lyapunov equation."""
    drift, flow, covariance = moments(h, gamma, u)
    force = np.array([[0.0], [-u * kappa]])
    push = linalg.expm(np.block([[drift, force], [np.zeros((1, 3))]]) * h)[:2, 2:]
    step = flow + push @ np.array([[1.0, 0.0]])
    return linalg.solve_discrete_lyapunov(step, covariance)[0, 0]


SAMPLERS = [
    (ops.Overdamped(60, 0.3), lambda k: 1 / (k * (1 - 0.3 * k / 2))),
    (
        ops.Underdamped(120, 0.5, friction=2.0, inverse_mass=0.5),
        lambda k: underdamped_variance(k, 0.5, 2.0, 0.5),
    ),
]


@pytest.mark.chance(1e-4)
@pytest.mark.parametrize(("sampler", "variance"), SAMPLERS)
def test_samplers_have_the_stationary_law_of_their_chain(sampler, variance):
    draws = [sampler.draw(quadratic(), GaussianNoise()).numpy() for _ in range(REPEATS)]
    draws = np.stack(draws).reshape(-1, 2)
    for x, kappa in zip(draws.T, CURVATURE):
        x = x / math.sqrt(variance(kappa))
        # Σx² is chi-squared, which sees an error of 15 % in the variance; KS sees the shape
        low, high = stats.chi2(len(x)).ppf([LEVEL, 1 - LEVEL])
        assert low < np.sum(x**2) < high
        assert stats.kstest(x, "norm").pvalue > LEVEL


@pytest.mark.chance(1e-6)
def test_the_exact_step_of_underdamped_dynamics_has_the_moments_of_the_equation():
    """One step from rest, where W_x and W_v alone move: nothing but their variance is tested,
    at step sizes on both sides of the series.
    """
    zero = Density(
        torch.zeros(20_000, dtype=torch.float64), lambda x: 0 * x.sum(), torch.zeros_like
    )
    gamma, u = 2.0, 0.7
    for h in (1e-3, 0.03, 1.0):
        x = ops.Underdamped(1, h, gamma, u).draw(zero, GaussianNoise()).numpy()
        _, flow, covariance = moments(h, gamma, u)
        variance = covariance[0, 0] + u * flow[0, 1] ** 2  # with the velocity that it starts with
        assert abs(np.mean(x**2) / variance - 1) < 5.5 * math.sqrt(2 / len(x))
