"""Draws of linear models, one posterior sample and guides predict as samples of a network do."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from torch import nn

import torch_dpbayes as dpb
from torch_dpbayes import ops
from torch_dpbayes.posterior import PosteriorSamples

LIKELIHOODS = {
    "bernoulli": (ops.GLM(), "bernoulli", {}),
    "gaussian": (ops.GLM("gaussian", noise_std=0.5), "normal", {"noise_std": 0.5}),
    "softmax": (ops.Softmax(3), "categorical", {}),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_draws_of_a_linear_model(name):
    """The average of the model's own predictions, one draw at a time."""
    model, likelihood, options = LIKELIHOODS[name]
    x = 2 * torch.randn(40, 4)  # longer than the model's bound
    shape = (3, 4) if name == "softmax" else (4,)
    draws = [{"weights": torch.randn(shape, dtype=torch.float64)} for _ in range(5)]
    for given in (draws, {"weights": torch.stack([d["weights"] for d in draws])}):
        samples = PosteriorSamples.from_draws(given, likelihood, **options)
        wanted = torch.stack([model.predict(draw, x) for draw in draws]).mean(0)
        net = model.module(4)
        assert torch.allclose(samples.predict(net, x), wanted, atol=1e-6)
        y = torch.ones(40) if name == "gaussian" else torch.ones(40, dtype=torch.long)
        log_likelihood = samples.log_likelihood(net, x, y)
        assert log_likelihood.shape == samples.predictive_entropy(net, x).shape == (40,)
        assert (samples.mutual_information(net, x) >= 0).all()
    if name != "gaussian":
        p = wanted[:, 1] if name == "softmax" else wanted
        assert torch.allclose(log_likelihood.exp(), p.double(), atol=1e-6)
    posterior = PosteriorSamples.from_draws(draws[:1], likelihood, **options)
    assert torch.allclose(posterior.predict(net, x), model.predict(draws[0], x), atol=1e-6)


def test_one_posterior_sample():
    x, y = torch.randn(200, 2) / 3, torch.randint(2, (200,)).float()
    one = ops.OnePosteriorSample(
        ops.GLM(prior_std=1.0), ops.FiniteRunLangevin(steps=100), epsilon=2.0, delta=1e-5
    )
    samples = PosteriorSamples.from_draws([one.sample(x, y)], "bernoulli")
    assert samples.predict(ops.GLM().module(2), x).shape == (200,)


def test_a_guide_of_a_network():
    """Sites that are named as the network's parameters are."""
    net = nn.Linear(3, 2)

    def model(x, y):
        weight = pyro.sample("weight", dist.Normal(torch.zeros(2, 3), 1.0).to_event(2))
        bias = pyro.sample("bias", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Categorical(logits=x @ weight.T + bias), obs=y)

    pyro.clear_param_store()
    x, y = torch.randn(60, 3), torch.randint(2, (60,))
    guide = AutoNormal(model)
    svi = dpb.infer.DPSVI(
        model,
        guide,
        pyro.optim.Adam({"lr": 0.05}),
        Trace_ELBO(),
        max_grad_norm=1.0,
        noise_multiplier=1.0,
        expected_batch_size=30,
    )
    svi.run(3, x, y)
    draws = [guide() for _ in range(20)]
    pyro.clear_param_store()
    samples = PosteriorSamples.from_draws(draws, "categorical")
    wanted = [(x @ d["weight"].T + d["bias"]).softmax(-1) for d in draws]
    assert torch.allclose(samples.predict(net, x), torch.stack(wanted).mean(0), atol=1e-6)
    assert len(samples) == 20


def test_draws_that_do_not_fit():
    for draws in ({}, [], {"a": torch.zeros(2, 1), "b": torch.zeros(3, 1)}):
        with pytest.raises(ValueError, match="the same number of draws, one or more"):
            PosteriorSamples.from_draws(draws)
