"""Draws from data-free densities against densities whose moments are known."""

import pytest
import torch

from torch_dpbayes.noise_aware.sampling import WeightedDraws, no_u_turn

EYE = torch.eye(2, dtype=torch.float64)
TRIGAMMA_9 = float(torch.special.polygamma(1, torch.tensor(9.0, dtype=torch.float64)))
DIGAMMA_9 = float(torch.special.digamma(torch.tensor(9.0, dtype=torch.float64)))


def log_gammas(theta):
    """Two independent logarithms of Gamma(9, 1): skewed, with known moments."""
    return (9 * theta - theta.exp()).sum(-1)


@pytest.mark.parametrize(
    "start, precision", [(2.1, 9.0), (0.0, 30.0)], ids=["near", "far and narrow"]
)
def test_weighted_draws_have_the_moments_of_the_density(start, precision):
    found = WeightedDraws(log_gammas, torch.full((2,), start, dtype=torch.float64), precision * EYE)
    assert found.are_good
    error = (TRIGAMMA_9 / found.worth) ** 0.5
    mean = found.weights @ found.values
    assert bool(((mean - DIGAMMA_9).abs() < 6 * error).all())
    variance = found.weights @ (found.values - mean).square()
    assert bool(((variance / TRIGAMMA_9 - 1).abs() < 12 / found.worth**0.5).all())
    assert found.resampled(7).shape == (7, 2)


def test_a_density_that_no_candidate_meets_is_worth_nothing():
    found = WeightedDraws(
        lambda theta: torch.full(theta.shape[:1], -torch.inf, dtype=torch.float64),
        torch.zeros(2, dtype=torch.float64),
        EYE,
    )
    assert not found.are_good


def test_a_no_u_turn_chain_has_the_moments_of_the_density():
    draws = no_u_turn(log_gammas, torch.full((2,), 2.0, dtype=torch.float64), 4 * EYE, 400)
    assert draws.shape == (400, 2)
    # a quarter of the draws' worth is more than cautious
    assert bool(((draws.mean(0) - DIGAMMA_9).abs() < 6 * (TRIGAMMA_9 / 100) ** 0.5).all())
    assert bool((draws.var(0) / TRIGAMMA_9 - 1).abs().lt(0.8).all())
