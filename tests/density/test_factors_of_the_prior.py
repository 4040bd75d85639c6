"""Terms of the latents outside the data plate belong to the prior, as the closed forms say."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.reparam import LocScaleReparam, TransformReparam
from torch.distributions import Normal

from torch_dpbayes.density import RecordDensity

pytestmark = pytest.mark.usefixtures("double")
Y = torch.randn(12, dtype=torch.float64)


def normal(x, mean=0.0, std=1.0):
    return float(-0.5 * ((x - mean) / std) ** 2 - math.log(std) - 0.5 * math.log(2 * math.pi))


def groups(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with pyro.plate("groups", 3):
        group = pyro.sample("group", dist.Normal(mean, scale))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(group.sum(), 1.0), obs=y)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("centered", [0.0, 0.3])
def test_a_location_and_scale_may_be_taken_out(centered):
    density = RecordDensity(poutine.reparam(groups, {"group": LocScaleReparam(centered)}), (Y,))
    assert list(density.prior.transforms) == ["group_decentered", "mean", "scale"]
    theta = torch.tensor([0.3, -0.4, 0.8, 0.7, 0.2])  # three groups, mean, log scale
    mean, scale = 0.7, math.exp(0.2)
    expected = normal(0.7, 0.0, 2.0) + normal(0.2)
    expected += sum(normal(g, centered * mean, scale**centered) for g in (0.3, -0.4, 0.8))
    assert density.prior.log_density(theta) == pytest.approx(expected)
    group = [mean + scale ** (1 - centered) * (g - centered * mean) for g in (0.3, -0.4, 0.8)]
    torch.testing.assert_close(density.log_likelihoods(theta), Normal(sum(group), 1.0).log_prob(Y))


def scaled(y):
    affine = dist.transforms.AffineTransform(1.0, 2.0)
    mean = pyro.sample("mean", dist.TransformedDistribution(dist.Normal(0.0, 1.0), [affine]))
    pyro.deterministic("twice", 2 * mean)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def test_a_transform_may_be_taken_out():
    density = RecordDensity(poutine.reparam(scaled, {"mean": TransformReparam()}), (Y,))
    theta = torch.tensor([0.6])
    assert density.prior.log_density(theta) == pytest.approx(normal(0.6))
    torch.testing.assert_close(density.log_likelihoods(theta), Normal(2.2, 1.0).log_prob(Y))


def penalised(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    pyro.factor("penalty", -3.0 * mean**4)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def test_factors_of_latents_count_with_their_gradient():
    density = RecordDensity(penalised, (Y,))
    theta = torch.tensor([0.7])
    value, gradient = density.prior.log_density_and_gradient(theta)
    assert value == pytest.approx(normal(0.7) - 3 * 0.7**4)
    assert float(gradient) == pytest.approx(-0.7 - 12 * 0.7**3)
    torch.testing.assert_close(density.log_likelihoods(theta), Normal(0.7, 1.0).log_prob(Y))


def data_in_a_factor(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    pyro.factor("closed over", dist.Normal(mean, 0.1).log_prob(Y).sum())
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def test_records_that_a_factor_closes_over_are_refused():
    with pytest.raises(ValueError, match=r"'closed over'.*neither clipped nor charged"):
        RecordDensity(data_in_a_factor, (Y,))


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("model", [penalised, groups, scaled])
def test_what_counts_as_prior_and_could_close_over_records_is_named(model, caplog):
    by_model = {groups: {"group": LocScaleReparam(0.3)}, scaled: {"mean": TransformReparam()}}
    RecordDensity(poutine.reparam(model, by_model.get(model, {})), (Y,))
    said = [record.getMessage() for record in caplog.records]
    if model is penalised:
        (text,) = said
        assert text.startswith("sites ['penalty'] outside the plate 'data' count as part")
    else:  # what a reparametrisation leaves behind is no one's own
        assert not said
