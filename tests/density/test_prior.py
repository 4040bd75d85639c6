"""The prior of a Pyro model, and draws from it."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.stats import gamma, kstest
from support.pyro_models import (
    weights,
)

from torch_dpbayes.density import Prior

pytestmark = pytest.mark.usefixtures("double")


def test_a_start_comes_from_the_prior_alone():
    prior = Prior(lambda: pyro.sample("rate", dist.Gamma(3.0, 2.0)))
    draws = [float(prior.constrain(prior.sample())["rate"]) for _ in range(300)]
    assert kstest(draws, gamma(3.0, scale=0.5).cdf).pvalue > 1e-6


def test_drawing_from_the_prior_neither_uses_nor_moves_the_callers_seed():
    prior = Prior(lambda: weights("m", 2))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = prior.sample()
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first, prior.sample())


def test_densities_of_many_rows_where_vmap_lacks_an_operation_of_the_model():
    """``OrderedLogistic`` writes into a tensor in place."""

    def ordinal():
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        with pyro.plate("cuts", 2):
            cuts = pyro.sample("gaps", dist.Gamma(2.0, 1.0)).cumsum(-1)
        with pyro.plate("data", 4):
            pyro.sample("y", dist.OrderedLogistic(slope * torch.ones(4), cuts), obs=torch.ones(4))

    prior = Prior(ordinal)
    thetas = prior.samples(5)
    slope, gaps = thetas[:, prior_column(prior, "slope")], thetas[:, prior_column(prior, "gaps")]
    expected = dist.Normal(0.0, 1.0).log_prob(slope).sum(1)
    expected += (dist.Gamma(2.0, 1.0).log_prob(gaps.exp()) + gaps).sum(1)  # gaps = log of them
    torch.testing.assert_close(prior.log_densities(thetas), expected)
    values, gradients = prior.log_densities_and_gradients(thetas)
    torch.testing.assert_close(values, expected)
    torch.testing.assert_close(gradients[:, prior_column(prior, "slope")], -slope)


def prior_column(prior, name):
    numbers = prior.unflatten(torch.arange(prior.dimension, dtype=torch.float64))
    return numbers[name].reshape(-1).long()
