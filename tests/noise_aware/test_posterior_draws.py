"""Draws: Pareto smoothing against ArviZ', chains against quadrature, sufficient statistics against
sums over all counts.
"""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats
from small_models import moments_of
from support.pyro_models import weights

import torch_dpbayes as dpb
from torch_dpbayes.accounting.calibration import total_multiplier
from torch_dpbayes.density import Prior
from torch_dpbayes.errors import ArgumentError
from torch_dpbayes.noise_aware import (
    ExponentialFamily,
    beta_bernoulli,
    dirichlet_categorical,
    drawing,
    gamma_poisson,
    sufficient_statistics,
)
from torch_dpbayes.noise_aware import latents as latents_module
from torch_dpbayes.noise_aware.hamiltonian import mixing
from torch_dpbayes.noise_aware.latents import Latents, NonCentred
from torch_dpbayes.noise_aware.result import NoiseAwarePosterior

pytestmark = pytest.mark.usefixtures("double")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Chains are run until they are worth enough, whatever their number of draws is."""
    monkeypatch.setattr(latents_module, "_DRAWS", 100)
    monkeypatch.setattr(drawing, "_WARM_UP", 20)
    monkeypatch.setattr(drawing, "_KEPT", 16)


@pytest.mark.parametrize("scale", [0.3, 1.0, 2.5])
def test_pareto_smoothing_is_that_of_arviz(scale):
    arviz = pytest.importorskip("arviz")
    if not hasattr(arviz, "psislw"):
        pytest.skip("ArviZ 1 has no psislw, and another estimate of k")
    ratios = scale * torch.randn(1000).square()
    weights, k = drawing.smoothed(ratios)
    expected, other = arviz.psislw(ratios.numpy().copy())
    assert k == pytest.approx(float(other), abs=1e-8)
    assert torch.allclose(weights, torch.tensor(expected), atol=1e-8)


def test_weights_without_a_tail():
    weights, k = drawing.smoothed(torch.zeros(100))
    assert float(weights.exp().sum()) == pytest.approx(1.0) and not math.isnan(k)
    weights, k = drawing.smoothed(torch.full((100,), -math.inf))
    assert k == math.inf


def latents_of(model, count=1):
    """Of which records read the first few."""
    return Latents(Prior(model), torch.arange(count))


def normal_latents(size, std=1.0):
    return latents_of(
        lambda: pyro.sample("w", dist.Normal(torch.zeros(size), std).to_event(1)), size
    )


class OneObservation:
    """y ~ N(θ, std²) of the latents that are read, as a likelihood that is Gaussian."""

    is_bent = False

    def __init__(self, latents, y, std):
        self.centre, self.y, self.std = latents.median, y, std
        slope, precision = latents.slope_and_precision(self.centre)
        precision = precision + torch.eye(len(latents.read)) / std**2
        middle = self.centre[latents.read]
        step = torch.linalg.solve(precision, slope + (y - middle) / std**2)
        self.precisions, self.modes = precision[None], (middle + step)[None]
        self._read = latents.read

    def gaussian(self, theta):
        return -0.5 * ((theta[:, self._read] - self.y) / self.std).square().sum(1)

    def __call__(self, theta):
        return OneObservation.gaussian(self, theta)


@pytest.mark.chance(1e-3)
def test_what_no_record_reads_has_its_prior(monkeypatch):
    def model():
        pyro.sample("a", dist.Normal(0.0, 1.0))
        pyro.sample("b", dist.Normal(5.0, 2.0))

    latents = latents_of(model)
    likelihood = OneObservation(latents, torch.ones(1), 0.5)
    found = drawing.draw_posterior(latents, likelihood, 300)
    assert found.method == "importance sampling"
    b = found.theta[:, 1]
    assert float(found.weights @ b) == pytest.approx(5.0, abs=0.7)
    assert float(b.std()) == pytest.approx(2.0, rel=0.25)
    # and where parameters of the same records lie on a curve, chains are taken
    likelihood.is_bent = True
    monkeypatch.setattr(drawing, "_Chains", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        drawing.draw_posterior(latents, likelihood, 300)


def test_draws_are_relied_on_where_weights_have_no_heavy_tail():
    equal = torch.full((400,), 1 / 400)
    uneven = torch.cat([torch.full((40,), 0.02), torch.full((360,), 0.2 / 360)])
    for shares, k, worth, r_hat, is_reliable in (
        (equal, 0.0, 400.0, 1.0, True),
        (equal, 2.0, 400.0, 1.0, True),  # a tail without weight
        (uneven, 0.5, 200.0, 1.0, True),
        (uneven, 0.8, 200.0, 1.0, False),
        (equal, 0.0, 99.0, 1.0, False),
        (equal, 0.0, 147.0, 1.27, False),  # chains of mu + tau * z: tau was too large
    ):
        draws = drawing.Draws(torch.zeros(400, 1), shares, k, worth, r_hat, "")
        assert drawing.is_reliable(draws) == is_reliable


def tied():
    a, b = weights("a"), weights("b")
    pyro.factor("tie", dist.Normal(a, 0.1).log_prob(b))


def weighted():
    weights("a")
    with pyro.poutine.scale(scale=torch.tensor([1.0, 4.0])), pyro.plate("two", 2):
        weights("b")


def spiked():
    """Two runs hardly ever differ in the width of w."""
    z = pyro.sample("z", dist.Beta(1.0, 1.0))
    pyro.sample("w", dist.Normal(0.0, torch.where(z > 0.9999, 0.1, 2.0)))


def test_a_prior_whose_density_is_not_that_of_its_draws_is_sampled_by_chains(monkeypatch):
    monkeypatch.setattr(latents_module, "_DRAWS", 2)
    for model, factors in ((tied, ("tie",)), (weighted, ()), (spiked, ())):
        assert Latents(Prior(model, factors=factors), torch.arange(1)).is_hierarchical
    assert not latents_of(tied).is_hierarchical


@pytest.mark.chance(1e-3)
def test_a_hierarchical_prior_is_sampled():
    """log s ~ N(0, 1), a | s ~ N(0, s²), y ~ N(a, 1/2): the posterior of log s by quadrature."""

    def model():
        s = pyro.sample("s", dist.LogNormal(0.0, 1.0))
        pyro.sample("a", dist.Normal(torch.zeros(5), s).to_event(1))

    latents = latents_of(model, 5)  # a comes first
    assert latents.is_hierarchical
    y, std = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0]), 0.5
    likelihood = OneObservation(latents, y, std)
    found = drawing.draw_posterior(latents, likelihood, 1000)
    log_s = found.theta[:, 5]
    grid = torch.linspace(-4, 4, 2001)
    log_p = -0.5 * grid.square()
    scale = (grid.exp().square() + std**2).sqrt()
    log_p = log_p + torch.distributions.Normal(0.0, scale[:, None]).log_prob(y).sum(1)
    p = torch.softmax(log_p, 0)
    (mean, std), own = moments_of(grid, p), moments_of(log_s, found.weights)
    assert found.effective > 100
    assert own[0] == pytest.approx(mean, abs=5 * std / math.sqrt(found.effective))
    assert own[1] == pytest.approx(std, rel=0.25)


@pytest.mark.chance(1e-3)
def test_non_centred_coordinates_have_the_law_of_the_prior(monkeypatch):
    """θ(ξ) of draws of ξ against draws of θ; log p(ξ) against that of normal numbers."""
    monkeypatch.setattr(latents_module, "_DRAWS", 200)

    def model():
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
        with pyro.plate("groups", 2):
            pyro.sample("effect", dist.Normal(mean, scale))
        pyro.sample("rate", dist.LogNormal(mean, 1.0).expand([1]).to_event(1))
        pyro.sample("heavy", dist.StudentT(4.0, mean, scale))

    latents = latents_of(model, 6)
    told = torch.tensor([0.0, 1e9, 0.5, 0.0, 0.0, 0.0])
    frame = NonCentred(latents.prior, latents.median, told)
    own = frame.prior
    assert [name for name in own.transforms if "decentered" in name] == [
        *("effect_decentered", "heavy_decentered", "mean_decentered", "rate_base_decentered")
    ]
    theta, _ = frame(own.samples(200))
    for k, moved in enumerate(latents.draws.T):
        assert stats.ks_2samp(moved, theta[:, k]).pvalue > 1e-3 / 6
    xi = torch.zeros(2, own.dimension)
    xi[1, 0] = 1.5  # of an effect
    values = frame(xi)[1]
    assert float(values[0] - values[1]) == pytest.approx(1.5**2 / 2)


def test_the_weight_of_a_latent_is_not_that_of_its_other_coordinates():
    """log p(ξ) = log p(θ) + log |dθ/dξ|, where poutine.scale has a say in p alone."""

    def model():
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        with pyro.poutine.scale(scale=0.2):
            pyro.sample("weighted", dist.Normal(0.0, scale))
        pyro.sample("plain", dist.Normal(0.0, scale))

    prior = Prior(model)
    frame = NonCentred(prior, torch.zeros(3), torch.tensor([0.0, 0.5, 0.5]))
    for xi in frame.prior.samples(5):
        theta, log_density = frame(xi[None])
        moved = torch.autograd.functional.jacobian(lambda at: frame(at[None])[0][0], xi)
        expected = prior.log_densities(theta)[0] + torch.linalg.slogdet(moved)[1]
        assert float(log_density[0]) == pytest.approx(float(expected), rel=1e-4, abs=1e-4)


def test_chains_of_the_prior_come_to_a_posterior_a_hundred_times_as_narrow():
    """In powers that few chains at a time lose all weight by: their mean square is within .75 to
    1.25 then, and above 100 where all go on from the best of them.
    """

    y, precision, latents = torch.linspace(-1, 1, 3), 1 + 0.01**-2, normal_latents(3)
    chains = drawing._Chains(latents, OneObservation(latents, y, 0.01))
    chains.anneal()
    white = (chains._frame(chains._states.at)[0] - y / 0.01**2 / precision) * precision**0.5
    assert 0.3 < float(white.square().mean()) < 3


def test_chains_end_in_the_posterior():
    """In five dimensions from two Gaussians that are 1.6 times too wide and two deviations off; the
    gradients that trajectories follow are of a likelihood that is off.
    """

    latents = normal_latents(5)
    y, std = torch.linspace(-1, 1, 5), 0.5
    likelihood = OneObservation(latents, y, std)
    precision = 1 + std**-2
    mean = y / std**2 / precision
    apart = 1 / math.sqrt(precision)
    likelihood.modes = torch.stack([mean + 2 * apart, mean - 2 * apart])
    likelihood.precisions = (precision / 1.6**2 * torch.eye(5)).expand(2, 5, 5)
    own = likelihood.gaussian
    likelihood.gaussian = lambda theta: own(theta - 1.7 * apart) / 1.2**2
    found = drawing.draw_posterior(latents, likelihood, 2000)
    assert found.method == "Hamiltonian chains"
    own = found.weights @ found.theta
    white = (found.theta - mean) * math.sqrt(precision)
    # worth about 100 draws in each dimension, or more: 5 standard deviations are .22 and .32
    assert float((own - mean).mean()) * math.sqrt(precision) == pytest.approx(0.0, abs=0.22)
    assert float(white.square().mean()) == pytest.approx(1.0, abs=0.32)


def test_chains_that_do_not_mix_in_the_approximation_take_no_likelihood(monkeypatch):
    latents = normal_latents(2, 10.0)
    likelihood = OneObservation(latents, torch.zeros(2), 0.05)
    monkeypatch.setattr(OneObservation, "__call__", lambda _, theta: 500 * theta.sum(1))
    ran = torch.randn(64, 2), 99.0, 3.0  # worth 99 draws, R-hat
    monkeypatch.setattr(drawing._Chains, "anneal", lambda self: None)
    monkeypatch.setattr(drawing._Chains, "run", lambda self: ran)
    monkeypatch.setattr(drawing._Chains, "begin", None)  # would fail
    monkeypatch.setattr(drawing, "smoothed", lambda ratios: (ratios.log_softmax(0), math.inf))
    found = drawing.draw_posterior(latents, likelihood, 200)
    assert found.method == "Hamiltonian chains" and not drawing.is_reliable(found)
    assert torch.equal(found.theta, ran[0]) and (found.effective, found.r_hat) == ran[1:]


@pytest.mark.chance(0.03, looks=4)
@pytest.mark.filterwarnings("ignore:the draws are unreliable")
def test_bernoulli_posterior_is_that_of_all_counts():
    """One run in a hundred takes chains of which one never moves, as short as they are here."""
    n, epsilon = 60, 1.0
    x = (torch.rand(n) < 0.2).double()
    found = sufficient_statistics(beta_bernoulli(2.0, 3.0), x, epsilon=epsilon, delta=1e-5)
    budget = dpb.PrivacyAccountant(epsilon, 1e-5, neighboring="replace_one")
    z = total_multiplier(budget, None, None)
    released, std = float(found.transcript) * 0.5, z * 0.5
    p = torch.linspace(0, 1, 2003)[1:-1]
    counts = torch.arange(n + 1.0)
    of_noise = torch.tensor(stats.norm.pdf(released, counts.numpy() - n / 2, std))
    of_count = torch.tensor(stats.binom.pmf(counts.numpy()[None], n, p.numpy()[:, None]))
    weights = (of_count @ of_noise) * torch.tensor(stats.beta.pdf(p.numpy(), 2, 3))
    weights = weights / weights.sum()
    mean, std = moments_of(p, weights)
    assert float(found.mean["probability"]) == pytest.approx(mean, abs=0.15 * std)
    assert float(found.stddev["probability"]) == pytest.approx(std, rel=0.1)


EXPONENTIAL = ExponentialFamily(
    lambda: pyro.sample("rate", dist.LogNormal(0.0, 1.0)),
    lambda x: x[None],
    lambda values: -values["rate"][None],
    lambda eta: -(-eta).log().sum(),
    20.0,
)
# a family, its data, the truth, and the largest deviation; a third of the counts are clamped
FAMILIES = {
    "categorical": lambda: (
        dirichlet_categorical([1.0, 1.0, 1.0]),
        torch.multinomial(torch.tensor([0.2, 0.3, 0.5]), 20_000, replacement=True),
        ("probabilities", torch.tensor([0.2, 0.3, 0.5]), 0.01),
    ),
    "clamped counts": lambda: (
        gamma_poisson(2.0, 0.5, 4.0),
        torch.poisson(torch.full((20_000,), 4.0)),
        ("rate", torch.tensor(4.0), 0.05),
    ),
    "own": lambda: (
        EXPONENTIAL,
        torch.distributions.Exponential(2.0).sample((20_000,)),
        ("rate", torch.tensor(2.0), 0.05),
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families_find_their_parameters(name):
    family, x, (site, truth, largest) = FAMILIES[name]()
    found = sufficient_statistics(family, x, epsilon=10.0, delta=1e-5)
    assert found.method == "importance sampling"  # its Gaussian is near
    mean, stddev = found.mean[site], found.stddev[site]
    assert bool(((mean - truth).abs() < 5 * stddev).all()) and float(stddev.max()) < largest


@pytest.mark.parametrize("most", [1, 2, 7, 1000])
@pytest.mark.parametrize("rate", [0.01, 1.0, 5.0, 300.0])
def test_clamped_counts_have_the_moments_of_their_probabilities(most, rate):
    counts = torch.arange(most + 1.0)
    shares = (counts * math.log(rate) - rate - torch.lgamma(counts + 1)).exp()
    shares[-1] = 1 - shares[:-1].sum()
    expected = shares @ counts, shares @ (counts - shares @ counts).square()
    mean, variance = gamma_poisson(1.0, 1.0, most).moments(torch.tensor([rate]).log())
    assert float(mean) + most / 2 == pytest.approx(float(expected[0]), abs=1e-7)
    assert float(variance) == pytest.approx(float(expected[1]), abs=1e-6)


# -- what a posterior gives ------------------------------------------------------------------------


def test_a_density_is_that_of_the_sites_own_values():
    """LogNormal(0, 1) of a site, N(log s; 1, 1/2) of its logarithm told."""
    latents = latents_of(lambda: pyro.sample("s", dist.LogNormal(0.0, 1.0)))
    likelihood = OneObservation(latents, torch.ones(1), 0.5)
    draws = drawing.draw_posterior(latents, likelihood, 200)
    values, density = latents.values(draws.theta, draws.weights), (latents, likelihood)
    found = NoiseAwarePosterior(draws, values, [], None, density=density)
    own = [found.log_density({"s": s}) for s in (0.5, 4.0)]
    s = torch.tensor([0.5, 4.0])
    prior = torch.distributions.LogNormal(0.0, 1.0).log_prob(s)
    expected = prior - 0.5 * ((s.log() - 1) / 0.5) ** 2
    assert own[1] - own[0] == pytest.approx(float(expected[1] - expected[0]), abs=1e-4)
    with pytest.raises(ArgumentError):
        found.log_density({"s": torch.zeros(2)})


def test_samples_and_moments_are_those_of_weighted_draws():
    latents = latents_of(lambda: weights("m"))
    theta, shares = torch.tensor([[0.0], [10.0]]), torch.tensor([0.9, 0.1])
    draws = drawing.Draws(theta, shares, 0.0, 2.0, 1.0, "")
    found = NoiseAwarePosterior(draws, latents.values(theta, shares), [], None)
    assert float(found.mean["m"]) == pytest.approx(1.0)
    for stddev in (found.stddev["m"], found.unconstrained_stddev):
        assert float(stddev) == pytest.approx(3.0)
    # 2,000 draws: five standard errors
    assert float(found.sample(2000)["m"].mean()) == pytest.approx(1.0, abs=0.34)


# -- mixing ----------------------------------------------------------------------------------------


def test_mixing_is_that_of_the_worst_number():
    states = torch.randn(4, 200, 5)
    worth, r_hat = mixing(states)
    assert 300 < worth <= 800 and r_hat < 1.1
    states[0, :, 3] += 3  # one chain is elsewhere
    worth, r_hat = mixing(states)
    assert worth < 20 and r_hat > 1.3
    # states that alternate are worth no less than independent ones
    signs = torch.tensor([1.0, -1.0]).repeat(15)
    assert mixing(signs[:, None] + 0.1 * torch.randn(4, 30, 3))[0] == 120.0


def test_a_chain_that_never_moves_is_worth_nothing():
    states = torch.randn(4, 30, 2)
    states[2] = 0.1
    for still in (states, torch.full((4, 30, 2), 0.1), torch.randn(4, 1, 2).expand(4, 30, 2)):
        assert mixing(still) == (0.0, math.inf)
