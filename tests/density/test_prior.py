"""The prior of a Pyro model: its density, draws from it, and terms outside the data plate."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.reparam import LocScaleReparam
from scipy.stats import gamma, kstest
from support.pyro_models import gaussian, weights
from torch.distributions import Normal

import torch_dpbayes as dpb
from torch_dpbayes import mcmc
from torch_dpbayes.density import Prior, RecordDensity, prior_without_data
from torch_dpbayes.noise_aware import ExponentialFamily, sufficient_statistics

pytestmark = pytest.mark.usefixtures("double")
Y = torch.randn(12, dtype=torch.float64)


@pytest.mark.chance(1e-4)
def test_draws_come_from_the_prior_and_leave_the_callers_seed():
    prior = Prior(lambda: pyro.sample("rate", dist.Gamma(3.0, 2.0)))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    draws = [float(prior.constrain(theta)["rate"]) for theta in prior.samples(300)]
    assert torch.equal(torch.get_rng_state(), state)
    assert kstest(draws, gamma(3.0, scale=0.5).cdf).pvalue > 1e-4
    torch.manual_seed(1)
    assert float(prior.constrain(prior.sample())["rate"]) != draws[0]


def test_densities_of_many_rows_where_vmap_lacks_an_operation_of_the_model():
    """``OrderedLogistic`` writes into a tensor in place."""

    def ordinal():
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        with pyro.plate("cuts", 2):
            cuts = pyro.sample("gaps", dist.Gamma(2.0, 1.0)).cumsum(-1)
        with pyro.plate("data", 4):
            pyro.sample("y", dist.OrderedLogistic(slope * torch.ones(4), cuts), obs=torch.ones(4))

    prior = Prior(ordinal)
    thetas = prior.samples(5)
    gaps, slope = thetas[:, :2], thetas[:, 2]
    expected = dist.Normal(0.0, 1.0).log_prob(slope)
    expected += (dist.Gamma(2.0, 1.0).log_prob(gaps.exp()) + gaps).sum(1)  # gaps = log of them
    torch.testing.assert_close(prior.log_densities(thetas), expected)
    values, gradients = prior.log_densities_and_gradients(thetas)
    torch.testing.assert_close(values, expected)
    torch.testing.assert_close(gradients[:, 2], -slope)


# -- terms of the latents outside the data plate ---------------------------------------------------


def normal(x, mean=0.0, std=1.0):
    return float(-0.5 * ((x - mean) / std) ** 2 - math.log(std) - 0.5 * math.log(2 * math.pi))


def groups(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with pyro.plate("groups", 3):
        group = pyro.sample("group", dist.Normal(mean, scale))
    gaussian(y, group.sum())


@pytest.mark.parametrize("centered", [0.0, 0.3])
def test_a_location_and_scale_may_be_taken_out(centered, caplog):
    model = poutine.reparam(groups, {"group": LocScaleReparam(centered)})
    density = RecordDensity(model, (Y,), gradients=False)
    assert list(density.prior.transforms) == ["group_decentered", "mean", "scale"]
    theta = torch.tensor([0.3, -0.4, 0.8, 0.7, 0.2])  # three groups, mean, log scale
    mean, scale = 0.7, math.exp(0.2)
    expected = normal(0.7, 0.0, 2.0) + normal(0.2)
    expected += sum(normal(g, centered * mean, scale**centered) for g in (0.3, -0.4, 0.8))
    assert density.prior.log_density(theta) == pytest.approx(expected)
    group = [mean + scale ** (1 - centered) * (g - centered * mean) for g in (0.3, -0.4, 0.8)]
    torch.testing.assert_close(density.log_likelihoods(theta), Normal(sum(group), 1.0).log_prob(Y))
    assert not caplog.records  # what a reparametrisation leaves behind is no one's own


def test_factors_of_latents_count_with_their_gradient_and_are_named(caplog):
    def penalised(y):
        mean = weights("mean")
        pyro.factor("penalty", -3.0 * mean**4)
        gaussian(y, mean)

    density = RecordDensity(penalised, (Y,), gradients=False)
    theta = torch.tensor([0.7])
    value, gradient = density.prior.log_density_and_gradient(theta)
    assert value == pytest.approx(normal(0.7) - 3 * 0.7**4)
    assert float(gradient) == pytest.approx(-0.7 - 12 * 0.7**3)
    torch.testing.assert_close(density.log_likelihoods(theta), Normal(0.7, 1.0).log_prob(Y))
    (said,) = caplog.records
    assert said.getMessage().startswith("sites ['penalty'] outside the plate 'data' count as part")


def test_records_that_a_factor_closes_over_are_refused():
    def model(y):
        mean = weights("mean")
        pyro.factor("closed over", Normal(mean, 0.1).log_prob(Y).sum())
        gaussian(y, mean)

    with pytest.raises(ValueError, match=r"'closed over'.*neither clipped nor charged"):
        RecordDensity(model, (Y,))


def fitted():
    pyro.sample("mean", dist.Normal(pyro.param("fit", Y.mean()), 1e-3))


def observing():
    pyro.sample("y", dist.Normal(pyro.sample("mean", dist.Normal(0.0, 1.0)), 1.0), obs=Y[0])


def closing_over():
    pyro.factor("f", -(pyro.sample("mean", dist.Normal(0.0, 1.0)) - Y).square().sum())


def switching():
    pyro.sample("mean", dist.Normal(5 * pyro.sample("k", dist.Bernoulli(0.5)), 1.0))


def kernel(prior):
    mcmc.ExponentialFamilyPenalty(
        prior,
        sufficient_statistics=torch.atleast_1d,
        natural_parameters=lambda latents: latents["mean"],
        log_normalizer=lambda latents: latents["mean"].square() / 2,
        max_statistic_norm=1.0,
        noise_multiplier=1.0,
        proposal_scale=1.0,
        accountant=dpb.PrivacyAccountant(),
    ).setup(0, Y)


def one_release(prior):
    family = ExponentialFamily(
        prior, torch.atleast_1d, lambda v: v["mean"][None], lambda eta: eta.square().sum() / 2, 1.0
    )
    sufficient_statistics(family, Y, epsilon=1.0, delta=1e-5)


@pytest.mark.parametrize("use", [kernel, one_release])
@pytest.mark.parametrize(
    "prior, why",
    [
        (fitted, "has a parameter 'fit'"),
        (observing, "'y' is observed in a prior"),
        (closing_over, "reads a tensor"),
        (switching, "'k' of the prior is discrete"),
    ],
)
def test_a_prior_that_may_have_records_or_another_law_is_refused(prior, why, use):
    with pytest.raises(ValueError, match=why) as caught:
        use(prior)
    assert "Trace Shapes" not in str(caught.value)


def test_factors_of_a_prior_without_data_count():
    def penalised():
        mean = pyro.deterministic("mean", weights("raw"))
        pyro.factor("penalty", -3.0 * mean**4)

    prior = prior_without_data(penalised)
    assert prior.log_density(torch.tensor([0.7])) == pytest.approx(normal(0.7) - 3 * 0.7**4)


def test_a_covariance_that_is_singular_where_all_latents_are_zero():
    def model():
        root = pyro.sample("root", dist.Normal(torch.zeros(2, 2), 1.0).to_event(2))
        covariance = root @ root.T
        pyro.sample("x", dist.MultivariateNormal(torch.zeros(2), covariance_matrix=covariance))

    prior = Prior(model)
    theta = torch.tensor([2.0, 0.0, 0.0, 1.0, 0.5, -1.0])  # the root, then x
    expected = Normal(0.0, 1.0).log_prob(theta[:4]).sum()
    expected += Normal(0.0, 2.0).log_prob(theta[4]) + Normal(0.0, 1.0).log_prob(theta[5])
    assert prior.log_density(theta) == pytest.approx(expected.item(), rel=1e-5)
