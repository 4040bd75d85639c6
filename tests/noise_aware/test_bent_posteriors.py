"""Models whose records tell fewer numbers than there are parameters, as those of mu + tau * z."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from torch_dpbayes.density.program import Program
from torch_dpbayes.noise_aware import drawing, plan
from torch_dpbayes.noise_aware.covariates import PublicRows
from torch_dpbayes.noise_aware.latents import Latents
from torch_dpbayes.noise_aware.likelihood import (
    Moves,
    Release,
    Simulator,
    SyntheticLikelihood,
    find_mode,
    is_bent,
    law_differences,
)
from torch_dpbayes.noise_aware.records import ModelRecords

pytestmark = pytest.mark.usefixtures("recorded_once")
N, GROUPS, NOISE = 4000, 4, 20.0
GROUP = torch.arange(N) % GROUPS
ZERO = torch.zeros((), dtype=torch.float64)


def levels(prior):
    """A model of groups' levels, ``prior`` of mu and tau."""

    def model(g, y):
        mu = pyro.sample("mu", dist.Normal(ZERO, 1.0))
        tau = pyro.sample("tau", dist.LogNormal(ZERO - 1, 1.0))
        with pyro.plate("groups", GROUPS):
            level = prior(mu, tau)
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(level[g], 1.0), obs=y)

    return model


noncentred = levels(lambda mu, tau: mu + tau * pyro.sample("z", dist.Normal(ZERO, 1.0)))
centred = levels(lambda mu, tau: pyro.sample("level", dist.Normal(mu, tau)))
# a sum of two is not told apart either, but θ of the same records lie on a line
redundant = levels(lambda mu, tau: mu + 0.5 * pyro.sample("z", dist.Normal(ZERO, 1.0)) + tau.log())


def simulator_of(model):
    y = torch.zeros(N, dtype=torch.float64)
    settings = {"data_plate": "data", "count_is_public": True, "public": ("g",), "chunk": 2000}
    records = ModelRecords(model, (GROUP, y), **settings)
    rows = PublicRows({0: GROUP}, is_paired=False, seed=0)
    return Simulator(records, rows, N, 4000, 1)


@pytest.mark.parametrize(
    ("model", "expected"), [(noncentred, True), (centred, False), (redundant, False)]
)
def test_a_curve_of_parameters_that_mean_the_same_records_is_seen(model, expected):
    simulator = simulator_of(model)
    theta = Latents(simulator.records.density.prior, simulator.records.read).median
    for place in (theta, theta + 0.3):  # where z is about 0, and elsewhere
        assert is_bent(simulator.at(place), simulator.records) == expected


def test_moves_along_the_curve_are_none():
    simulator = simulator_of(noncentred)
    prior = simulator.records.density.prior
    z = torch.tensor([0.5, -1.0, 1.5, 0.2], dtype=torch.float64)
    theta = prior.flatten({"mu": ZERO + 0.3, "tau": ZERO - 0.5, "z": z})
    same = prior.flatten({"mu": ZERO + 0.3, "tau": ZERO + 0.5, "z": z / math.e})
    moved = prior.flatten({"mu": ZERO + 0.4, "tau": ZERO - 0.5, "z": z})
    simulated = simulator.at(theta)
    moves = Moves(simulated)(torch.stack([theta, same, moved]))
    assert float(moves[:2].abs().max()) < 1e-9
    told = simulated.scores @ torch.stack([moves[2], moved - theta], 1)
    torch.testing.assert_close(told[:, 0], told[:, 1], rtol=1e-6, atol=1e-6)


# at mu = 0, tau = 1, z = 1: what a record of a group with level l adds is l − 1, by these
PLACE = torch.tensor([0.0, 0.0, *[1.0] * GROUPS], dtype=torch.float64)
OF_LEVEL = torch.cat([torch.ones(2, GROUPS), torch.eye(GROUPS)]).double() * N / GROUPS
LEVEL, BOUND = torch.tensor([0.3, -0.2, 0.1, 0.5], dtype=torch.float64), 1e3


def likelihood_of_sum():
    """Of an unclipped sum of scores, which is Gaussian given mu and tau."""
    simulator = simulator_of(noncentred)
    latents = Latents(simulator.records.density.prior, simulator.records.read)
    whitening = torch.eye(len(PLACE), dtype=torch.float64) / BOUND
    release = Release(PLACE, whitening, OF_LEVEL @ (LEVEL - 1) / BOUND, NOISE / BOUND)
    fit = find_mode(simulator, [release], latents, latents.median)
    laws = law_differences(fit, [simulator], [release])
    made = SyntheticLikelihood(simulator, [release], fit, laws, few=1000, most_batches=1)
    return latents, made


def test_the_likelihood_of_the_same_records_is_the_same():
    """Whatever its parameters are; it falls by 1/2 in a deviation."""
    _, likelihood = likelihood_of_sum()
    same = likelihood.centre.repeat(5, 1)
    factors = torch.linspace(-2, 2, 5, dtype=torch.float64)
    same[:, 1] += factors
    same[:, 2:] *= torch.exp(-factors)[:, None]
    for found in (likelihood(same), likelihood.gaussian(same)):
        torch.testing.assert_close(found, found[2].expand(5), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.chance(1e-3)
def test_tau_of_levels_that_are_not_centred_has_its_posterior():
    """Against quadrature."""
    found = drawing.draw_posterior(*likelihood_of_sum(), 2000)
    assert drawing.is_reliable(found) and "chains" in found.method
    log_tau = torch.linspace(-6, 2, 201, dtype=torch.float64)
    mu = torch.linspace(-3, 3, 201, dtype=torch.float64)
    square, eye = OF_LEVEL @ OF_LEVEL.T, torch.eye(len(PLACE), dtype=torch.float64)
    own = square * GROUPS / N + NOISE**2 * eye + (2 * log_tau).exp()[:, None, None] * square
    law = torch.distributions.MultivariateNormal((mu[:, None] - 1) * OF_LEVEL.sum(1), own[:, None])
    log_p = law.log_prob(OF_LEVEL @ (LEVEL - 1)) - mu.square() / 2 - (log_tau[:, None] + 1) ** 2 / 2
    p = log_p.flatten().softmax(0).reshape(log_p.shape).sum(1)
    mean = float(p @ log_tau)
    std = math.sqrt(float(p @ (log_tau - mean).square()))
    drawn = found.theta[:, 1]
    middle = float(found.weights @ drawn)
    assert middle == pytest.approx(mean, abs=5 * std / math.sqrt(found.effective))
    own_std = math.sqrt(float(found.weights @ (drawn - middle).square()))
    assert own_std == pytest.approx(std, rel=0.25)


def test_terms_of_many_parameters_where_vmap_cannot_and_where_one_fails():
    """A number of θ is read, and it must not be negative."""

    def few(theta, row):
        if theta.item() < 0:
            raise RuntimeError
        return row * theta

    rows, thetas = torch.arange(128.0)[None], torch.tensor([[2.0], [-1.0]])
    found = Program(few, 64, few).of_thetas(thetas, [rows[0]], 64)
    assert torch.equal(found[0], 2 * rows[0]) and bool(found[1].isnan().all())


def test_plan_counts_the_chains_of_a_curve(monkeypatch):
    monkeypatch.setattr(drawing, "_GRADIENTS", 1e9)
    y, options = torch.zeros(N, dtype=torch.float64), {"num_simulated": 500, "num_releases": 2}
    assert plan(noncentred, GROUP, y, epsilon=1.0, delta=1e-5, **options).seconds > 1e4
