"""Roles of arguments, simulation, and the only readers of private rows."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats
from small_models import coins, records_of
from support.pyro_models import gaussian, weights

import torch_dpbayes as dpb
from torch_dpbayes.noise_aware import posterior_for_module
from torch_dpbayes.noise_aware.models import LastLayer, model_of
from torch_dpbayes.noise_aware.records import clipped, log_likelihoods, scores
from torch_dpbayes.noise_aware.run import Mechanism

pytestmark = pytest.mark.usefixtures("recorded_once", "double")


def regression(x, y, offset=1.0):
    zeros = torch.zeros(x.shape[1], dtype=x.dtype)
    coins(offset + x @ pyro.sample("w", dist.Normal(zeros, 1.0).to_event(1)), y.to(x.dtype))


def data(n=300):
    return torch.randn(n, 3), torch.randint(2, (n,))


def test_roles_are_read_from_the_model():
    x, y = data()
    assert records_of(regression, x, y).roles == ["numbers", "observed"]
    assert records_of(regression, x.float(), y.double()).roles == ["numbers", "observed"]
    assert records_of(regression, *data(), public=("x",)).roles == ["public", "observed"]

    def grouped(y, g):
        gaussian(y, weights("a", 7)[g])

    found = records_of(grouped, torch.randn(50), torch.randint(7, (50,)))
    assert found.roles == ["observed", "category"] and found.categories() == {1: 7}


def test_simulated_records_have_the_law_of_the_model():
    def mixture(x):
        m = weights("m")
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Categorical(torch.tensor([0.3, 0.7])))
            pyro.sample("x", dist.Normal(torch.stack([m, m + 10])[z], 1.0), obs=x)

    records = records_of(mixture, torch.zeros(100))
    theta = torch.tensor([2.0])
    density = records.simulate(theta, {}, 40_000, 1)
    (x,) = density.rows()
    assert float((x > 7).double().mean()) == pytest.approx(0.7, abs=5 * math.sqrt(0.21 / 40_000))
    # scores have mean zero at the point that records were drawn at
    found = scores(records, density, theta)
    assert abs(float(found.mean())) < 5 * float(found.std()) / 200
    again = records.simulate(theta, {}, 40_000, 1).rows()[0]
    assert torch.equal(x, again)
    assert not torch.equal(x, records.simulate(theta, {}, 40_000, 2).rows()[0])


def test_one_site_may_read_what_another_observes():
    def chain(a, b):
        m = weights("m")
        with pyro.plate("data", len(a)):
            pyro.sample("b", dist.Normal(m + 5 * a, 0.1), obs=b)
            pyro.sample("a", dist.Normal(m, 1.0), obs=a)

    zeros = torch.zeros(60)
    records = records_of(chain, zeros, zeros)
    assert records.roles == ["observed", "observed"]
    a, b = records.simulate(torch.zeros(1), {}, 5000, 1).rows()
    assert float(torch.corrcoef(torch.stack([a, b]))[0, 1]) > 0.99


def test_a_value_that_the_model_names_for_each_record_is_not_drawn():
    def named(x, y):
        w = weights("w")
        with pyro.plate("data", len(y)):
            mean = pyro.deterministic("mean", 50 + w * x)
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    records, x = records_of(named, torch.zeros(60), torch.zeros(60)), torch.randn(500)
    _, y = records.simulate(torch.tensor([9.0]), {0: x}, 500, 1).rows()
    assert float((y - 50 - 9 * x).abs().max()) < 7


def test_a_record_moves_a_sum_by_at_most_one():
    """The sum is that of all records alone, and one that is not finite adds nothing."""
    x, y = data(8)
    x[0], x[1, 2], x[2] = math.nan, math.inf, 1e200
    records = records_of(regression, *data(40))

    def clipped_sum(rows):
        records.density = records.density.with_rows([r[rows].clone() for r in (x, y)])
        return Mechanism(records, None, {}, 1, 1).clipped_sum(theta, whitening)

    theta = torch.randn(3)
    whitening = 5 * torch.randn(3, 3)
    alone = torch.stack([clipped_sum([k]) for k in range(8)])
    assert bool(alone.isfinite().all()) and float(alone.norm(dim=1).max()) <= 1.0
    assert bool((alone[:2] == 0).all()) and bool((alone[3:] != 0).any(1).all())
    torch.testing.assert_close(clipped_sum(list(range(8))), alone.sum(0))


def test_clipped_is_never_longer_than_one():
    """Nor where the whitened row overflows."""
    rows = torch.randn(1000, 4) * torch.logspace(-300, 308, 1000)[:, None]
    found = clipped(rows, torch.randn(4, 4))
    assert bool(found.isfinite().all()) and float(found.norm(dim=1).max()) <= 1.0


@pytest.mark.usefixtures("few_draws")
def test_a_last_layer_is_found_and_has_the_prior_where_nothing_is_told():
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    net[0].requires_grad_(False)
    x, y = torch.randn(400, 4), torch.randint(2, (400,))
    options = {"likelihood": "categorical", "prior_std": 3.0, "epsilon": 2.0, "delta": 1e-5}
    column = y[:, None]  # counts as [n]
    found = posterior_for_module(net, x, column, num_simulated=1000, num_releases=2, **options)
    assert set(found.mean) == {"2.weight", "2.bias"} and found.mean["2.weight"].shape == (2, 3)
    # what classes have in common is told by no record: the prior's deviation times √2
    both = found.sample(4000)["2.bias"].sum(1)
    assert float(both.std()) == pytest.approx(3.0 * math.sqrt(2), rel=0.3)
    assert all(p.grad is None for p in net.parameters())
    features = net[1](net[0](3 * x)).detach()
    short = features / features.norm(dim=1, keepdim=True).clamp_min(1.0)
    torch.manual_seed(1)
    draws = found.sample(100)
    logits = short @ draws["2.weight"].mT + draws["2.bias"][:, None]
    torch.manual_seed(1)
    predicted = found.predict(net, 3 * x)
    assert torch.allclose(predicted, logits.softmax(-1).mean(0), atol=1e-5)
    assert not net[2]._forward_pre_hooks


def test_features_of_a_record_are_a_function_of_it_alone():
    """A record whose features cannot be computed raises nothing, and has zeros."""

    class Roots(torch.nn.Module):
        """Mixes the records of a batch, and those of five too little to be seen."""

        def __init__(self):
            super().__init__()
            self.last = torch.nn.Linear(2, 1)

        def forward(self, x):
            matrix = torch.diag_embed(x + 10 + 1e-9 * len(x) ** 3)
            return self.last(torch.linalg.cholesky(matrix).diagonal(dim1=-2, dim2=-1))

    x = torch.rand(300, 2)
    x[7] = -20.0  # no square root
    features = LastLayer(Roots(), "bernoulli", 1.0).features
    found = features(x)
    assert bool((found[7] == 0).all()) and bool((found[:7] > 3).all())
    torch.testing.assert_close(features(x[:7]), found[:7], rtol=0, atol=1e-6)


def law_of(model, *data, **latents):
    """The distribution of the targets."""
    with pyro.poutine.trace() as noted, pyro.condition(data=latents):
        model(*data)
    return noted.trace.nodes["targets"]["fn"]


def test_targets_have_the_stated_scale():
    """A log variance is one, several means have a target each, and the squared errors of a GLM have
    the curvature 1/s² for features of norm 1.
    """
    layer = LastLayer(torch.nn.Linear(2, 2, bias=False), "normal", 1.0)
    weight = torch.tensor([[0.0, 0.0], [math.log(9.0), 0.0]])
    law = law_of(layer, torch.ones(5, 2), torch.zeros(5), weight=weight)
    assert law.stddev.tolist() == pytest.approx([3.0] * 5)
    means = LastLayer(torch.nn.Linear(2, 3), "normal", 1.0)
    law = law_of(means, torch.rand(7, 2), torch.zeros(7, 3))
    assert law.batch_shape == (7,) and bool((law.variance == torch.ones(7, 3)).all())
    glm = dpb.ops.GLM("gaussian", noise_std=0.5, max_feature_norm=2.0)
    law = law_of(model_of(glm, 2), torch.zeros(3, 2), torch.zeros(3))
    assert law.stddev.tolist() == pytest.approx([0.5] * 3)


@pytest.mark.chance(1e-4)
def test_counts_are_simulated_clamped_as_those_of_records_are():
    for largest, least in ((4.0, 4), (2.5, 3)):
        model = model_of(dpb.ops.GLM("poisson", max_count=largest), 1)
        for log_rate in (1.0, 3.0):
            ones, latent = torch.ones(200, 1), torch.tensor([log_rate])
            law = law_of(model, ones, torch.full((200,), largest), weights=latent)
            own = stats.poisson(math.exp(log_rate))
            counts = [*range(least), largest]
            wanted = [*own.logpmf(range(least)), own.logsf(least - 1)]
            found = [float(law.log_prob(torch.tensor(y))[0]) for y in counts]
            assert found == pytest.approx(wanted) and float(law.sample().max()) <= largest
        assert float(law.sample().min()) == pytest.approx(largest)  # of a rate of 20


def test_one_pass_holds_as_many_points_as_records_fit_into_a_chunk(monkeypatch):
    """Of a wide network: 32 points of all records would take a gigabyte."""
    hidden = torch.randn(3, 4096)

    def network(x, y):
        gaussian(y, torch.tanh(x @ hidden * weights("m")).mean(1))

    records = records_of(network, torch.randn(500, 3), torch.randn(500))
    together, found = [], type(records.density).log_likelihoods_of_first

    def counted(self, thetas, count):
        together.append(len(thetas) * count)
        return found(self, thetas, count)

    monkeypatch.setattr(type(records.density), "log_likelihoods_of_first", counted)
    thetas = torch.randn(40, 1, dtype=torch.float64)
    assert log_likelihoods(records.density, thetas).shape == (40, 500)
    assert records.density.chunk < 500 and max(together) <= 32 * records.density.chunk
