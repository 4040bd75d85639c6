"""Draws from data-free densities against densities whose moments are known."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.stats import kstest

from torch_dpbayes.mcmc.density import Prior
from torch_dpbayes.noise_aware.priors import PyroPrior
from torch_dpbayes.noise_aware.sampling import Chains, WeightedDraws

ONE = torch.ones((), dtype=torch.float64)
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


@pytest.mark.parametrize("start, precision", [(2.1, 9.0), (-1.0, 100.0)], ids=["near", "far"])
def test_hamiltonian_chains_have_the_moments_of_the_density(start, precision):
    chains = Chains(log_gammas, start + torch.randn(64, 2).double() / 10, precision * EYE)
    draws = chains.draws(2000)
    assert draws.shape == (2000, 2)
    assert chains.r_hat < 1.2
    # two means and two variances, of draws that are worth a quarter of their number: 6 errors each
    assert bool(((draws.mean(0) - DIGAMMA_9).abs() < 6 * (TRIGAMMA_9 / 500) ** 0.5).all())
    assert bool((draws.var(0) / TRIGAMMA_9 - 1).abs().lt(6 * (3 / 500) ** 0.5).all())


def test_chains_that_disagree_are_told():
    """Two modes that no chain can cross between."""
    two = lambda theta: torch.logaddexp(  # noqa: E731
        -0.5 * ((theta - 40) ** 2).sum(-1), -0.5 * ((theta + 40) ** 2).sum(-1)
    )
    chains = Chains(two, 40 * torch.randn(64, 2).double(), EYE)
    chains.draws(100)
    assert chains.r_hat > 2


def funnel():
    scale = pyro.sample("scale", dist.HalfNormal(ONE))
    with pyro.plate("groups", 12):
        pyro.sample("effect", dist.Normal(0 * ONE, scale))


def log_scales(frames):
    """Of chains on the prior, which start where the scale is near 1."""
    prior = PyroPrior(Prior(funnel))
    starts = torch.cat([torch.randn(64, 12), 0.1 * torch.randn(64, 1)], 1).double()
    precision = torch.eye(13, dtype=torch.float64)
    chains = Chains(prior.log_density, starts, precision, prior.frames if frames else ())
    return chains.draws(640)[:, 12].exp(), chains.r_hat


def test_chains_get_into_a_funnel_and_out_again():
    """Draws are autocorrelated: one in ten of them is taken for independent."""
    scales, r_hat = log_scales(frames=True)
    assert r_hat < 1.3
    assert kstest(scales[::10], "halfnorm").pvalue > 1e-6


@pytest.mark.thorough
def test_without_the_other_coordinates_they_do_not():
    scales, _ = log_scales(frames=False)
    assert kstest(scales[::10], "halfnorm").pvalue < 1e-2 or float(scales.min()) > 0.01
