"""Models from Pyro's own examples and tests, their records in a plate: log density and gradient are
those that Pyro's kernels would use, or the model is refused in words that name what to change.
"""

from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.distributions import constraints
from pyro.infer.mcmc.util import initialize_model
from pyro.infer.reparam import (
    ConjugateReparam,
    LatentStableReparam,
    LocScaleReparam,
    SymmetricStableReparam,
)
from pyro.nn import PyroModule, PyroSample

from torch_dpbayes.density import RecordDensity

pytestmark = pytest.mark.usefixtures("double")
COUNT = 23


def eight_schools(sigma, y):
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    tau = pyro.sample("tau", dist.HalfCauchy(25.0))
    with pyro.plate("data", len(y)):
        pyro.sample("obs", dist.Normal(mu, (tau**2 + sigma**2).sqrt()), obs=y)


def eight_schools_with_effects(sigma, y):
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    tau = pyro.sample("tau", dist.HalfCauchy(25.0))
    with pyro.plate("data", len(y)):
        eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
        pyro.sample("obs", dist.Normal(mu + tau * eta, sigma), obs=y)


def baseball_pooled(at_bats, hits):
    phi = pyro.sample("phi", dist.Uniform(0.0, 1.0))
    with pyro.plate("data", len(hits)):
        pyro.sample("obs", dist.Binomial(at_bats, phi), obs=hits)


def baseball_partially_pooled(at_bats, hits):
    m = pyro.sample("m", dist.Uniform(0.0, 1.0))
    kappa = pyro.sample("kappa", dist.Pareto(1.0, 1.5))
    with pyro.plate("data", len(hits)):
        pyro.sample("obs", dist.BetaBinomial(m * kappa, (1 - m) * kappa, at_bats), obs=hits)


def groups(group, x, y):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with pyro.plate("groups", 4):
        alpha = pyro.sample("alpha", dist.Normal(mu, tau))
    beta = pyro.sample("beta", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=alpha[group] + beta * x), obs=y)


def lkj(y):
    theta = pyro.sample("theta", dist.HalfCauchy(torch.ones(3)).to_event(1))
    omega = pyro.sample("omega", dist.LKJCholesky(3, 1.5))
    scale = theta.sqrt()[:, None] * omega
    with pyro.plate("data", len(y)):
        pyro.sample("obs", dist.MultivariateNormal(torch.zeros(3), scale_tril=scale), obs=y)


def mixture(y):
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("components", 3):
        locs = pyro.sample("locs", dist.Normal(0.0, 3.0))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(weights))
        pyro.sample("obs", dist.Normal(locs[z], scale), obs=y)


def two_hidden_coins(y):
    p = pyro.sample("p", dist.Beta(1.0, 1.0))
    with pyro.plate("data", len(y)):
        first = pyro.sample("first", dist.Bernoulli(p))
        second = pyro.sample("second", dist.Bernoulli(0.65 * first + 0.1))
        pyro.sample("obs", dist.Normal(2.0 * second, 1.0), obs=y)


def ordinal(x, y):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("cuts", 2):
        gaps = pyro.sample("gaps", dist.Gamma(2.0, 1.0))
    cuts = gaps.cumsum(-1) - 2.0
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.OrderedLogistic(slope * x, cuts), obs=y)


def survival(x, time, died):
    """Weibull times, some of them censored."""
    beta = pyro.sample("beta", dist.Normal(0.0, 1.0))
    shape = pyro.sample("shape", dist.LogNormal(0.0, 0.5))
    with pyro.plate("data", len(time)):
        hazard = (time * (beta * x).exp()) ** shape
        pyro.factor("died", died * (shape.log() + hazard.log() - time.log()) - hazard)


def two_columns(y):
    """The plate of the records is not the last dimension."""
    p = pyro.sample("p", dist.Beta(torch.full((2,), 1.1), 1.1).to_event(1))
    with pyro.plate("columns", 2, dim=-1), pyro.plate("data", len(y), dim=-2):
        pyro.sample("obs", dist.Bernoulli(p), obs=y)


def rates_with_hyperpriors(y):
    """Two plates, one inside the other."""
    with pyro.plate("latents", y.shape[1], dim=-1):
        alpha = pyro.sample("alpha", dist.HalfCauchy(1.0))
        rate = pyro.sample("rate", dist.Gamma(alpha, 1.0))
        with pyro.plate("data", len(y), dim=-2):
            pyro.sample("obs", dist.Poisson(rate), obs=y)


def horseshoe(x, y):
    tau = pyro.sample("tau", dist.HalfCauchy(0.5))
    lam = pyro.sample("lam", dist.HalfCauchy(torch.ones(4)).to_event(1))
    beta = pyro.sample("beta", dist.Normal(0.0, tau * lam).to_event(1))
    sigma = pyro.sample("sigma", dist.InverseGamma(2.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.StudentT(4.0, x @ beta, sigma), obs=y)


def beta_shape(y):
    alpha = pyro.sample("alpha", dist.Gamma(1.0, 1.0))
    beta = pyro.sample("beta", dist.Gamma(1.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Beta(alpha, beta), obs=y)


def chain_of_latents(y):
    loc = torch.zeros(2)
    for k in range(3):
        loc = pyro.sample(f"loc_{k}", dist.Normal(loc, 1.0).to_event(1))
    pyro.deterministic("last", loc)
    with pyro.plate("data", len(y)):
        pyro.sample("obs", dist.Normal(loc, 1.0).to_event(1), obs=y)


class Network(PyroModule):
    def __init__(self):
        super().__init__()
        self.hidden = PyroModule[torch.nn.Linear](3, 4)
        self.hidden.weight = PyroSample(dist.Normal(0.0, 1.0).expand([4, 3]).to_event(2))
        self.hidden.bias = PyroSample(dist.Normal(0.0, 1.0).expand([4]).to_event(1))
        self.out = PyroModule[torch.nn.Linear](4, 1)
        self.out.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 4]).to_event(2))
        self.out.bias = PyroSample(dist.Normal(0.0, 1.0).expand([1]).to_event(1))

    def forward(self, x, y):
        mean = self.out(self.hidden(x).tanh())[:, 0]
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mean, 0.5), obs=y)


def coins(*shape):
    return torch.bernoulli(torch.full((COUNT, *shape), 0.4))


def counts(*shape):
    return torch.poisson(torch.full((COUNT, *shape), 3.0))


def normals(*shape):
    return torch.randn(COUNT, *shape)


ACCEPTED = {
    "eight schools": (eight_schools, lambda: (torch.rand(COUNT) + 1, normals())),
    "baseball, pooled": (baseball_pooled, lambda: (counts() + 9, counts().clamp(max=9))),
    "baseball, partially": (
        baseball_partially_pooled,
        lambda: (counts() + 9, counts().clamp(max=9)),
    ),
    "groups": (groups, lambda: (torch.randint(4, (COUNT,)), normals(), coins())),
    "groups, decentred": (
        poutine.reparam(groups, {"alpha": LocScaleReparam(0.0)}),
        lambda: (torch.randint(4, (COUNT,)), normals(), coins()),
    ),
    "LKJ": (lkj, lambda: (normals(3),)),
    "mixture": (mixture, lambda: (normals(),)),
    "two hidden coins": (two_hidden_coins, lambda: (normals(),)),
    "ordinal": (ordinal, lambda: (normals(), torch.randint(3, (COUNT,)).double())),
    "survival": (survival, lambda: (normals(), torch.rand(COUNT) + 0.1, coins())),
    "two columns": (two_columns, lambda: (coins(2),)),
    "rates with hyperpriors": (rates_with_hyperpriors, lambda: (counts(3),)),
    "horseshoe": (horseshoe, lambda: (normals(4), normals())),
    "shape of a Beta": (beta_shape, lambda: (torch.rand(COUNT) * 0.9 + 0.05,)),
    "chain of latents": (chain_of_latents, lambda: (normals(2),)),
    "network": (Network, lambda: (normals(3), normals())),
}


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("name", ACCEPTED)
def test_density_and_gradient_are_pyros(name):
    model, made = ACCEPTED[name]
    if model is Network:
        model = Network()  # of the dtype that is the default now
    data = made()
    density = RecordDensity(model, data)
    _, potential, _, _ = initialize_model(model, data, max_plate_nesting=2)
    theta = 0.4 * torch.randn(density.prior.dimension)
    sites = {k: v.detach().requires_grad_() for k, v in density.prior.unflatten(theta).items()}
    with pyro.validation_enabled(False):
        value = -potential(sites)
    gradients = torch.autograd.grad(value, list(sites.values()))
    log_prior, gradient = density.prior.log_density_and_gradient(theta)
    total = log_prior + float(density.log_likelihoods(theta).sum())
    assert total == pytest.approx(float(value.detach()), rel=1e-8)
    gradient = gradient + density.clipped_gradient_sum(theta, 1e100)
    expected = torch.cat([g.reshape(-1) for g in gradients])
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-6)


def pairs(i, j, y):
    """Crossed random effects of records and nothing else."""
    with pyro.plate("data", len(y)):
        ability = pyro.sample("ability", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Bernoulli(logits=ability + i - j), obs=y)


def hidden_markov(y):
    transition = pyro.sample("transition", dist.Dirichlet(torch.ones(2, 2)).to_event(1))
    state = torch.zeros((), dtype=torch.long)
    for t in pyro.markov(range(len(y))):
        state = pyro.sample(f"x_{t}", dist.Categorical(transition[state]))
        pyro.sample(f"y_{t}", dist.Normal(state.double(), 1.0), obs=y[t])


def without_a_plate(x, y):
    beta = pyro.sample("beta", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    pyro.sample("y", dist.Bernoulli(logits=(beta * x).sum(-1)).to_event(1), obs=y)


def positive_parameter(y):
    scale = pyro.param("scale", torch.tensor(1.0), constraint=constraints.positive)
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, scale), obs=y)


@pytest.mark.parametrize(
    "model, made, message",
    [
        (
            eight_schools_with_effects,
            lambda: (torch.rand(COUNT) + 1, normals()),
            "latent 'eta' lies in the data plate, where every record has its own",
        ),
        (pairs, lambda: (normals(), normals(), coins()), "latent 'ability' lies in the data plate"),
        (hidden_markov, lambda: (normals(),), "no sites in a plate named 'data'"),
        (without_a_plate, lambda: (normals(3), coins()), "with pyro.plate"),
    ],
)
def test_the_others_are_refused_in_words_of_the_model(model, made, message):
    with pytest.raises(ValueError, match=message):
        RecordDensity(model, made())


def stable(y):
    with poutine.reparam(config={"center": LatentStableReparam()}):
        center = pyro.sample("center", dist.Stable(torch.tensor(1.5), 0.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(center, 1.0), obs=y)


def symmetric(y):
    with poutine.reparam(config={"center": SymmetricStableReparam()}):
        center = pyro.sample("center", dist.Stable(torch.tensor(1.5), 0.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(center, 1.0), obs=y)


def conjugate(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    guide = dist.Beta(1 + y.sum(), 1 + (1 - y).sum())
    with poutine.reparam(config={"p": ConjugateReparam(guide)}):
        p = pyro.sample("p", dist.Beta(1.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(p), obs=y)
        pyro.sample("again", dist.Normal(mean, 1.0), obs=y)


def collapsed(y):
    with poutine.collapse():
        p = pyro.sample("p", dist.Beta(1.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Bernoulli(p), obs=y)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("count_is_public", [True, False])
@pytest.mark.parametrize(
    "model, made, message",
    [
        (stable, normals, "cannot be recorded"),
        (symmetric, normals, "cannot be recorded"),
        (conjugate, coins, "changes when"),
        (collapsed, coins, "does not run on made-up data"),
    ],
)
def test_what_no_kernel_can_run_with_is_refused(model, made, message, count_is_public):
    with pytest.raises(ValueError, match=message):
        RecordDensity(model, (made(),), count_is_public=count_is_public)


def with_a_module(y, net):
    pyro.module("net", net)
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean + net.bias, 1.0), obs=y)


class Shifted(PyroModule):
    def __init__(self):
        super().__init__()
        self.shift = torch.nn.Parameter(torch.ones(()))

    def forward(self, y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mean + self.shift, 1.0), obs=y)


@pytest.mark.parametrize(
    "model, named",
    [
        (positive_parameter, "scale"),
        (partial(with_a_module, net=torch.nn.Linear(1, 1)), r"net\$\$\$weight"),
        (Shifted(), "shift"),
    ],
)
@pytest.mark.parametrize("fitted", [False, True])
def test_parameters_are_refused_as_they_may_be_fitted_to_the_records(model, named, fitted):
    pyro.clear_param_store()
    if fitted:
        poutine.trace(model).get_trace(normals())
    with pytest.raises(ValueError, match=f"parameter '{named}'"):
        RecordDensity(model, (normals(),))


def hidden_parameter(y):
    with poutine.block():
        place = pyro.param("place", torch.tensor(0.0))
    mean = pyro.sample("mean", dist.Normal(place, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def test_a_parameter_that_a_handler_hides_is_refused_and_the_store_kept():
    pyro.clear_param_store()
    pyro.param("place", torch.tensor(5.0))
    with pytest.raises(ValueError, match="parameter 'place'"):
        RecordDensity(hidden_parameter, (normals(),))
    assert float(pyro.param("place").detach()) == 5.0


def test_frozen_parameters_are_constants_and_stay_frozen():
    pyro.clear_param_store()
    model, y = Shifted().requires_grad_(False), normals()
    for _ in range(2):
        density = RecordDensity(model, (y,))
        assert list(density.prior.transforms) == ["mean"]
    assert not model.shift.requires_grad
    assert not list(pyro.get_param_store())
    at_minus_one = density.log_likelihoods(torch.tensor([-1.0]))
    torch.testing.assert_close(at_minus_one, dist.Normal(0.0, 1.0).log_prob(y))
