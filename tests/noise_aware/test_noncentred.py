"""Non-centred coordinates against the priors that they belong to."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.stats import kstest

from torch_dpbayes.density import Prior
from torch_dpbayes.noise_aware.noncentred import NonCentred, is_hierarchical

DOUBLE = torch.float64
ONE = torch.ones((), dtype=DOUBLE)
SIGNIFICANCE = 1e-6


def groups():
    scale = pyro.sample("scale", dist.HalfNormal(ONE))
    mean = pyro.sample("mean", dist.Normal(0 * ONE, 2 * ONE))
    with pyro.plate("groups", 4):
        pyro.sample("effect", dist.Normal(mean, scale))


def rates():
    log_mean = pyro.sample("log_mean", dist.Normal(0 * ONE, ONE))
    scale = pyro.sample("scale", dist.HalfCauchy(ONE))
    pyro.sample("rate", dist.LogNormal(log_mean, ONE).expand([3]).to_event(1))
    pyro.sample("width", dist.HalfNormal(scale))
    pyro.sample("heavy", dist.StudentT(4 * ONE, log_mean, scale))


def correlated():
    scale = pyro.sample("scale", dist.LogNormal(0 * ONE, ONE))
    root = torch.linalg.cholesky(0.7 * torch.ones(3, 3, dtype=DOUBLE) + 0.3 * torch.eye(3).double())
    pyro.sample(
        "v", dist.MultivariateNormal(scale * torch.ones(3).double(), scale_tril=scale * root)
    )


def without_quantiles():
    shape = pyro.sample("shape", dist.Exponential(ONE))
    pyro.sample("rate", dist.Gamma(1 + shape, ONE))
    pyro.sample("part", dist.Dirichlet(torch.ones(3, dtype=DOUBLE)))


def flat():
    pyro.sample("w", dist.Normal(torch.zeros(3, dtype=DOUBLE), 2 * ONE).to_event(1))
    pyro.sample("noise", dist.HalfNormal(ONE))


def masked():
    scale = pyro.sample("scale", dist.HalfNormal(ONE))
    with pyro.plate("groups", 2), pyro.poutine.scale(scale=0.5):
        pyro.sample("effect", dist.Normal(0.0, scale).mask(torch.tensor([True, True])))


MODELS = [groups, rates, correlated, without_quantiles, flat, masked]
HIERARCHICAL = [groups, rates, correlated, without_quantiles, masked]


@pytest.mark.parametrize("model", MODELS)
def test_the_map_is_a_bijection_with_the_jacobian_that_it_says(model):
    coordinates, size = NonCentred(Prior(model)), Prior(model).dimension
    xi = torch.randn(6, size, dtype=DOUBLE)
    theta, log_jacobian = coordinates.outer(xi)
    torch.testing.assert_close(coordinates.inner(theta), xi, rtol=1e-9, atol=1e-9)
    for row, expected in zip(xi, log_jacobian, strict=True):
        jacobian = torch.autograd.functional.jacobian(
            lambda one: coordinates.outer(one[None])[0][0], row
        )
        torch.testing.assert_close(torch.linalg.slogdet(jacobian)[1], expected)


@pytest.mark.parametrize("model", [groups, correlated])
def test_the_prior_is_standard_normal_there_but_for_its_scale(model):
    prior = Prior(model)
    xi = NonCentred(prior).inner(prior.samples(2000))
    scale = list(prior.transforms).index("scale")
    first = sum(prior.unflatten(xi[0])[name].numel() for name in list(prior.transforms)[:scale])
    others = [k for k in range(prior.dimension) if k != first]
    for k in others:
        assert kstest(xi[:, k], "norm").pvalue > SIGNIFICANCE / len(others)
    correlation = torch.corrcoef(xi[:, others].T) - torch.eye(len(others), dtype=DOUBLE)
    assert float(correlation.abs().max()) < 6 / 2000**0.5


@pytest.mark.parametrize("model", MODELS)
def test_hierarchical_models_are_told_from_others(model):
    assert is_hierarchical(Prior(model)) == (model in HIERARCHICAL)


def test_a_model_that_vmap_cannot_run_is_mapped_row_by_row():
    def drawing():
        scale = pyro.sample("scale", dist.HalfNormal(ONE))
        pyro.sample("effect", dist.Normal(0.0, scale))
        pyro.sample("label", dist.Bernoulli(0.5 * ONE), infer={"enumerate": "parallel"})

    coordinates = NonCentred(Prior(drawing))
    xi = torch.randn(4, 2, dtype=DOUBLE)
    torch.testing.assert_close(coordinates.inner(coordinates.outer(xi)[0]), xi)
