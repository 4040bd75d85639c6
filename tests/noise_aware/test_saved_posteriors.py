"""Posteriors that are pickled and saved: they give the same draws, and hold no records."""

import io
import pickle
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from torch_dpbayes import noise_aware
from torch_dpbayes.ops.pyro_model import model_of_module

COUNT = 1234
BUDGET = {"epsilon": 5.0, "delta": 1e-5}
LOSS = nn.CrossEntropyLoss(reduction="none")


def records():
    x = torch.randn(COUNT, 3)
    x = x / x.norm(dim=1, keepdim=True).clamp_min(1.0)
    return x, x @ torch.tensor([1.0, -0.5, 0.2]) + 0.3 * torch.randn(COUNT)


def prior_of_mean():
    pyro.sample("mu", dist.Normal(torch.zeros((), dtype=torch.float64), 3.0))


def number(x):
    return x


def parameter(values):
    return values["mu"][None]


def half_square(eta):
    return (eta.square() / 2).sum()


def family(make, transform):
    def made():
        return noise_aware.sufficient_statistics(make(), transform(*records()), **BUDGET)

    return made


def regression():
    model = noise_aware.LinearRegression(target_bound=4.0)
    return noise_aware.sufficient_statistics(model, *records(), **BUDGET)


def of_module(curvature):
    x, y = records()
    return noise_aware.laplace_for_module(
        nn.Linear(3, 2),
        x,
        (y > 0).long(),
        loss=LOSS,
        prior_std=1.0,
        max_grad_norm=2.0,
        curvature=curvature,
        **BUDGET,
    )


POSTERIORS = {
    "beta": family(noise_aware.beta_bernoulli, lambda x, y: y > 0),
    "gamma": family(
        lambda: noise_aware.gamma_poisson(2.0, 1.0, 20.0), lambda x, y: torch.poisson(y.exp())
    ),
    "dirichlet": family(
        lambda: noise_aware.dirichlet_categorical([1.0, 2.0, 1.0]),
        lambda x, y: (y > 0).long() + (y > 0.5),
    ),
    "own": family(
        lambda: noise_aware.ExponentialFamily(prior_of_mean, number, parameter, half_square, 4.0),
        lambda x, y: y,
    ),
    "regression": regression,
    "module": partial(of_module, "full"),
    "diagonal": partial(of_module, "diagonal"),
}


def saved_by_torch(posterior):
    file = io.BytesIO()
    torch.save(posterior, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def tensors_in(posterior):
    found = []

    class Noting(pickle.Pickler):
        def persistent_id(self, item):
            if isinstance(item, torch.Tensor):
                found.append(item)
            return None

    Noting(io.BytesIO()).dump(posterior)
    return found


@pytest.mark.parametrize("kind", POSTERIORS)
def test_a_saved_posterior_is_the_same_posterior(kind):
    posterior = POSTERIORS[kind]()
    for again in (pickle.loads(pickle.dumps(posterior)), saved_by_torch(posterior)):
        assert again.guarantee() == posterior.guarantee()
        draws = []
        for one in (posterior, again):
            torch.manual_seed(3)
            draws.append(one.sample(20))
        assert draws[0].keys() == draws[1].keys() == posterior.mean.keys()
        assert all(torch.equal(draws[0][name], draws[1][name]) for name in draws[0])
        first = {name: values[0] for name, values in draws[0].items()}
        assert again.log_density(first) == posterior.log_density(first)
    assert not [t for t in tensors_in(posterior) if COUNT in t.shape]


def test_the_weights_that_a_module_had_are_in_no_model_of_it():
    """They may come from the records, as those of a network that was trained on them."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    net[0].requires_grad_(False)
    model = model_of_module(net, LOSS, 1.0)
    held = tensors_in(model)
    for layer in (net[0], net[2]):
        for p in layer.parameters():
            is_held = any(t.shape == p.shape and torch.equal(t, p) for t in held)
            assert is_held != p.requires_grad
    assert bool(net[2].weight.any())
    again = pickle.loads(pickle.dumps(model))
    x, y = records()
    for one in (model, again):
        torch.manual_seed(0)
        trace = pyro.poutine.trace(one).get_trace(x, (y > 0).long())
        assert {"2.weight", "2.bias", "log_likelihood"} <= set(trace.nodes)
