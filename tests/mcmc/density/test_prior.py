"""The prior of a Pyro model, and draws from it."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.stats import gamma, kstest
from support.pyro_models import (
    weights,
)

from torch_dpbayes.mcmc.density import Prior

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
