"""The noise that is added is the noise that is charged: by every door, under both relations.

Every standard normal number is 1 here, so that a release less its exact sum is its noise's standard
deviation. μ² of all releases, by the sensitivity of each, has to be μ² of the events on the
accountant and of the budget.
"""

import math

import pyro.distributions as dist
import pytest
import torch

import torch_dpbayes as dpb
from torch_dpbayes.accounting.calibration import total_multiplier
from torch_dpbayes.noise import GaussianNoise
from torch_dpbayes.noise_aware import (
    LinearRegression,
    beta_bernoulli,
    dirichlet_categorical,
    gamma_poisson,
    posterior,
    posterior_for_module,
    sufficient_statistics,
)

DOUBLE = torch.float64
pytestmark = pytest.mark.usefixtures("few_draws")
RELATIONS = ("add_or_remove_one", "replace_one")
EPSILON, DELTA, N = 1.0, 1e-5, 400


@pytest.fixture
def ones(monkeypatch):
    monkeypatch.setattr(
        GaussianNoise,
        "standard_normal",
        lambda self, size, *, dtype, device, hides=(): torch.ones(size, dtype=dtype, device=device),
    )


def accountant(relation):
    return dpb.PrivacyAccountant(EPSILON, DELTA, neighboring=relation)


def squared_mu_of(history, relation):
    """Σ (sensitivity / z)² of Gaussian events; the accountant's sensitivity is 1, or 2."""
    total = 0.0
    for charge in history:
        for event in getattr(charge.event, "events", [charge.event]):
            total += (
                charge.count
                * (1 if relation == "add_or_remove_one" else 4)
                / (event.noise_multiplier**2)
            )
    return total


def squared_mu_of_budget(relation):
    factor = 1 if relation == "add_or_remove_one" else 4
    return factor / total_multiplier(accountant(relation), None, None) ** 2


def squared_mu_of_run(transcript, relation):
    """By the sensitivities of the documentation."""
    is_swap = relation == "replace_one"
    found = sum((2.0 if is_swap else 1.0) ** 2 / r.noise_std**2 for r in transcript.scores)
    found += 1.0 / transcript.clipped[1] ** 2
    if transcript.moments is not None:
        found += (4 if is_swap else 1) / transcript.moments.total_std**2
        found += (2 if is_swap else 1) / transcript.moments.products_std**2
    for _, std in transcript.histograms.values():
        found += len(transcript.histograms) * (2 if is_swap else 1) / std**2
    return found


def classes():
    x = torch.randn(N, 3, dtype=DOUBLE) / 2
    return x, torch.randint(3, (N,))


def runs(relation):
    """Posteriors by the doors that release scores."""
    x, y = classes()
    given = {"num_data": N, "num_simulated": 500}
    yield posterior, dpb.ops.Softmax(3), x, y, given
    yield posterior, dpb.ops.GLM(), x, (y > 0).double(), given | {"num_releases": 3}
    net = torch.nn.Linear(3, 3).double()
    options = {"likelihood": "categorical", "prior_std": 1.0} | given
    yield posterior_for_module, net, x, y, options
    model = LinearRegression(dist.LogNormal(torch.zeros((), dtype=DOUBLE), 1.0))
    yield posterior, model, x, y.double(), given


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("which", range(4))
def test_runs_charge_the_noise_of_their_releases(relation, which, ones):
    door, model, x, y, options = list(runs(relation))[which]
    spent = accountant(relation)
    found = door(model, x, y, accountant=spent, **options).transcript
    short = x / x.norm(dim=1, keepdim=True).clamp_min(1.0)
    apart = found.moments.total - short.sum(0)
    torch.testing.assert_close(
        apart, torch.full_like(apart, found.moments.total_std), rtol=0, atol=1e-2
    )
    apart = (found.moments.products - short.T @ short).diagonal()
    torch.testing.assert_close(
        apart, torch.full_like(apart, found.moments.products_std), rtol=0, atol=1e-2
    )
    expected = pytest.approx(squared_mu_of_budget(relation), rel=1e-6)
    assert squared_mu_of_run(found, relation) == expected
    assert squared_mu_of(spent.history, relation) == expected


FAMILIES = {
    "Bernoulli": (beta_bernoulli(), torch.tensor([0.0, 1.0, 1.0]), lambda x: x[:, None] - 0.5, 0.5),
    "Poisson": (
        gamma_poisson(1.0, 1.0, 8.0),
        torch.tensor([0.0, 3.0, 20.0]),
        lambda x: x.clamp(0, 8)[:, None] - 4,
        4.0,
    ),
    "categorical": (
        dirichlet_categorical([1.0, 1.0, 1.0]),
        torch.tensor([0, 2, 2]),
        lambda x: torch.nn.functional.one_hot(x, 3).double() - 1 / 3,
        math.sqrt(2 / 3),
    ),
}


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_sufficient_statistics_charge_their_noise(name, relation, ones):
    family, x, statistics, bound = FAMILIES[name]
    spent = accountant(relation)
    released = sufficient_statistics(family, x, accountant=spent, num_data=3).transcript
    noise = released - statistics(x).double().sum(0) / bound
    std = float(noise[0])
    assert noise.tolist() == pytest.approx([std] * len(noise), rel=1e-6)
    mu = (1.0 if relation == "add_or_remove_one" else 2.0) / std
    assert mu**2 == pytest.approx(squared_mu_of(spent.history, relation), rel=1e-6)
    assert mu**2 == pytest.approx(squared_mu_of_budget(relation), rel=1e-6)


@pytest.mark.parametrize("relation", RELATIONS)
def test_a_covariance_charges_its_noise(relation, ones):
    """A replaced record moves a sum of positive semi-definite matrices by √2 of the bound."""
    x, spent = torch.randn(30, 4, dtype=DOUBLE), accountant(relation)
    found = dpb.noise_aware.covariance(x, accountant=spent, noise_multiplier=20.0)
    short = x / x.norm(dim=1, keepdim=True).clamp_min(1.0)
    noise = found.matrix - short.T @ short
    torch.testing.assert_close(noise, torch.full_like(noise, 20.0), rtol=1e-6, atol=1e-5)
    mu = (1.0 if relation == "add_or_remove_one" else math.sqrt(2)) / 20.0
    assert squared_mu_of(spent.history, relation) == pytest.approx(mu**2, rel=1e-9)
