"""What ``poutine.scale`` and ``pyro.factor`` make of a Pyro model is counted, or refused."""

import pyro
import pyro.distributions as dist
import pyro.optim
import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoNormal

import torch_dpbayes as dpb
from torch_dpbayes.noise_aware import laplace

BUDGET = {"epsilon": 8.0, "delta": 1e-5, "max_grad_norm": 5.0}


def weighted(weight_of):
    def model(y):
        mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
        with pyro.plate("data", len(y)), poutine.scale(scale=weight_of(y)):
            pyro.sample("obs", dist.Normal(mu, 1.0), obs=y.float())

    return model


WEIGHTS = {
    "a number": lambda y: 4.0,
    "below 1": lambda y: 0.1,
    "of the data": lambda y: 1 + y.abs(),
    "of large values alone": lambda y: torch.where(y > 1000, 2.0, 1.0),
}


@pytest.mark.parametrize("curvature", ["full", "diagonal"])
@pytest.mark.parametrize("weight", WEIGHTS)
def test_weighted_records_are_refused(weight, curvature):
    """With weights of 4, standard deviations were half of those of the posterior."""
    accountant = dpb.PrivacyAccountant(epsilon=8.0, delta=1e-5, neighboring="replace_one")
    with pytest.raises(ValueError, match=r"poutine\.scale weights the records' site 'obs'"):
        laplace(
            weighted(WEIGHTS[weight]),
            torch.randn(500),
            accountant=accountant,
            max_grad_norm=5.0,
            curvature=curvature,
        )
    assert not accountant.history


def test_whole_numbers_that_weight_records_are_refused():
    for _ in range(5):
        with pytest.raises(ValueError, match="weights the records' site"):
            laplace(weighted(lambda y: y), torch.randint(1, 9, (500,)), **BUDGET)


def test_a_weight_of_0_or_1_leaves_records_out_and_is_taken():
    def model(y, is_seen):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)), poutine.scale(scale=is_seen.float()):
            pyro.sample("obs", dist.Normal(mu, 1.0), obs=y)

    is_seen = torch.rand(2000) < 0.5
    found = laplace(model, torch.randn(2000), is_seen, **BUDGET)
    assert float(found.stddev["mu"]) == pytest.approx(float(is_seen.sum()) ** -0.5, rel=0.5)


def test_a_run_of_dpsvi_with_weighted_records_has_no_posterior_of_its_noise():
    pyro.clear_param_store()
    model, y = weighted(lambda y: 4.0), torch.randn(500)
    svi = dpb.infer.DPSVI(
        model,
        AutoNormal(model),
        pyro.optim.Adam({"lr": 0.02}),
        Trace_ELBO(),
        max_grad_norm=5.0,
        noise_multiplier=4.0,
        expected_batch_size=100,
    )
    svi.run(20, y)
    with pytest.raises(ValueError, match="weights the records' site 'obs'"):
        svi.posterior()


def drawn_to_2():
    mu = pyro.sample("mu", dist.Normal(0.0, 3.0))
    pyro.factor("near", dist.Normal(2.0, 0.01).log_prob(mu))
    return mu


def scaled_prior():
    with poutine.scale(scale=1e4):
        return pyro.sample("mu", dist.Normal(2.0, 1.0))


@pytest.mark.parametrize("prior, name", [(drawn_to_2, "near"), (scaled_prior, "mu")])
def test_the_diagonal_form_refuses_a_prior_that_is_not_what_latents_are_drawn_from(prior, name):
    """Its mean lay at the records' 3, and the posterior's lies at 2.33."""

    def model(y):
        mu = prior()
        with pyro.plate("data", len(y)):
            pyro.sample("obs", dist.Normal(mu, 1.0), obs=y)

    y = 3 + torch.randn(5000)
    with pytest.raises(ValueError, match=f"site '{name}' .* use curvature=\"full\""):
        laplace(model, y, **BUDGET, curvature="diagonal")
    found = laplace(model, y, **BUDGET)
    assert float(found.mean["mu"]) == pytest.approx(2 + 1 / 3, abs=0.06)
    assert float(found.stddev["mu"]) == pytest.approx(15000**-0.5, rel=0.2)
