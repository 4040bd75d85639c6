"""Latents on which records depend by steps, so that no gradient tells them."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from torch_dpbayes.mcmc import RecordDensity
from torch_dpbayes.noise_aware import laplace

BUDGET = {"epsilon": 8.0, "delta": 1e-5, "max_grad_norm": 5.0}


def observe(y, mean):
    with pyro.plate("data", len(y)):
        pyro.sample("obs", dist.Normal(mean, 1.0), obs=y)


def rounded(x, y):
    observe(y, pyro.sample("step", dist.Uniform(0.0, 10.0)).round())


def detached(x, y):
    a = pyro.sample("a", dist.Normal(0.0, 3.0))
    observe(y, a + x * pyro.sample("step", dist.Normal(torch.zeros(1), 1.0)).detach())


def changepoint(x, y):
    a, b = (pyro.sample(name, dist.Normal(0.0, 3.0)) for name in "ab")
    observe(y, torch.where(x > pyro.sample("step", dist.Uniform(0.0, 1.0)), a, b))


@pytest.mark.parametrize("curvature", ["full", "diagonal"])
@pytest.mark.parametrize("model", [rounded, detached, changepoint])
def test_they_are_refused_by_name(model, curvature):
    with pytest.raises(ValueError, match="depend on latent 'step' by steps"):
        laplace(model, torch.rand(500), torch.randn(500), **BUDGET, curvature=curvature)


def not_read(x, y):
    observe(y, pyro.sample("a", dist.Normal(pyro.sample("parent", dist.Normal(0.0, 1.0)), 1.0)))


def rare_groups(x, y):
    effects = pyro.sample("effects", dist.Normal(torch.zeros(500), 1.0).to_event(1))
    observe(y, effects[(x > 0.5).long()])


def kinked(x, y):
    a, b = (pyro.sample(name, dist.Normal(0.0, 3.0)) for name in "ab")
    observe(y, a + torch.relu(x - b))


@pytest.mark.parametrize("model", [not_read, rare_groups, kinked])
def test_gradients_of_0_elsewhere_are_none_of_them(model):
    for _ in range(5):
        found = RecordDensity(model, (torch.rand(500), torch.randn(500)))
        assert found.latents_without_slopes() == []
