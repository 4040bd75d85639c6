"""Small models that the tests of noise-aware posteriors share, how their records are read, and
how draws are compared with a grid.
"""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from support.pyro_models import gaussian, weights

from torch_dpbayes.noise_aware.records import ModelRecords

SHORT = {"num_simulated": 500, "num_releases": 2}
BUDGET = {"epsilon": 1.0, "delta": 1e-5}


def records_of(model, *data, **options):
    settings = {"count_is_public": True, "public": (), "chunk": 500}
    return ModelRecords(model, data, **(settings | options))


def linear(x, y):
    gaussian(y, x @ weights("w", x.shape[1]))


def coins(logits, y):
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def logistic(x, y):
    coins(x @ weights("w", x.shape[1]), y)


def grouped(x, g, y):
    coins(weights("a", 3)[g] + x @ weights("w", 2), y)


def grouped_data(n=500):
    return torch.randn(n, 2), torch.randint(3, (n,)), torch.randint(2, (n,)).double()


def moments_of(values, weights):
    """The mean and the deviation of values of these weights, which add up to 1."""
    mean = float(weights @ values)
    return mean, math.sqrt(float(weights @ (values - mean).square()))


def assert_like(draws, values, weights, *, of_mean, of_std):
    """Draws have the mean and the deviation of a grid, up to these shares of the deviation."""
    mean, std = moments_of(values, weights)
    assert float(draws.mean()) == pytest.approx(mean, abs=of_mean * std)
    assert float(draws.std()) == pytest.approx(std, rel=of_std)
