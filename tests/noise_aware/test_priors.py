"""Priors as the steps use them, against laws in closed form."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from torch_dpbayes.mcmc.density import Prior
from torch_dpbayes.noise_aware.priors import GaussianPrior, PyroPrior

DOUBLE = torch.float64
ONE = torch.ones((), dtype=DOUBLE)


def groups():
    mean = pyro.sample("mean", dist.Normal(0 * ONE, ONE))
    with pyro.plate("groups", 3):
        pyro.sample("effect", dist.Normal(mean, ONE))


def test_effects_of_one_mean_are_correlated():
    """Correlations ½ between effects and √½ with the mean; of 500 draws, six standard errors."""
    prior = PyroPrior(Prior(groups)).gaussian()
    covariance = torch.linalg.inv(prior.matrix)
    std = covariance.diagonal().sqrt()
    found = covariance / torch.outer(std, std)
    assert found[0, 1].item() == pytest.approx(0.5, abs=6 * 0.75 / math.sqrt(500) + 0.05)
    assert found[0, 3].item() == pytest.approx(math.sqrt(0.5), abs=6 * 0.5 / math.sqrt(500) + 0.05)
    torch.testing.assert_close(prior.precision, 1 / covariance.diagonal())


def test_latents_without_parents_stay_independent():
    def flat():
        pyro.sample("w", dist.Normal(torch.zeros(40, dtype=DOUBLE), 1.0).to_event(1))

    prior = PyroPrior(Prior(flat)).gaussian()
    assert torch.equal(prior.matrix, torch.diag(prior.precision))


def test_a_normal_prior_with_a_covariance_is_itself():
    root = torch.tensor([[2.0, 0.0], [1.0, 0.5]], dtype=DOUBLE)
    covariance, mean = root @ root.T, torch.tensor([1.0, -2.0], dtype=DOUBLE)
    prior = GaussianPrior(mean, 1 / covariance.diagonal(), covariance)
    reference = torch.distributions.MultivariateNormal(mean, covariance)
    theta = torch.randn(5, 2, dtype=DOUBLE)
    found, expected = prior.log_density(theta), reference.log_prob(theta)
    torch.testing.assert_close(found - found[0], expected - expected[0])
    torch.testing.assert_close(prior.root @ prior.root.T, covariance)
    second = prior.of(torch.tensor([False, True]))
    torch.testing.assert_close(second.matrix, 1 / covariance[1:, 1:])
