"""Roles of arguments, simulation, and the only readers of private rows."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

import torch_dpbayes as dpb
from torch_dpbayes.noise_aware import posterior, posterior_for_module
from torch_dpbayes.noise_aware.records import ModelRecords, clipped, scores
from torch_dpbayes.noise_aware.run import Mechanism

ONE = torch.ones((), dtype=torch.float64)


def regression(x, y, offset=1.0):
    w = pyro.sample("w", dist.Normal(torch.zeros(x.shape[1], dtype=x.dtype), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=offset + x @ w), obs=y.to(x.dtype))


def data(n=300):
    x = torch.randn(n, 3, dtype=torch.float64)
    return x, torch.randint(2, (n,))


def records_of(model, *args, **options):
    settings = {"data_plate": "data", "count_is_public": True, "public": (), "chunk": 500}
    return ModelRecords(model, args, **(settings | options))


def test_roles_are_read_from_the_model():
    assert records_of(regression, *data()).roles == ["numbers", "observed"]
    assert records_of(regression, *data(), public=("x",)).roles == ["public", "observed"]

    def grouped(y, g):
        a = pyro.sample("a", dist.Normal(torch.zeros(7, dtype=torch.float64), 1.0).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(a[g], 1.0), obs=y)

    found = records_of(grouped, torch.randn(50, dtype=torch.float64), torch.randint(7, (50,)))
    assert found.roles == ["observed", "category"] and found.num_categories(1) == 7


def test_models_that_cannot_be_simulated_are_refused():
    def factor(x):
        m = pyro.sample("m", dist.Normal(0 * ONE, ONE))
        with pyro.plate("data", len(x)):
            pyro.factor("f", -((x - m) ** 2))

    def derived(x):
        m = pyro.sample("m", dist.Normal(0 * ONE, ONE))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(m, 1.0), obs=x.exp() + 1)

    x = torch.randn(50, dtype=torch.float64)
    accountant = dpb.PrivacyAccountant(epsilon=1.0, delta=1e-5, neighboring="replace_one")
    with pytest.raises(ValueError, match="cannot be simulated from the factor"):
        posterior(factor, x, accountant=accountant)
    with pytest.raises(ValueError, match="argument of its own"):
        posterior(derived, x, accountant=accountant)
    with pytest.raises(ValueError, match="no argument with a row"):
        posterior(regression, *data(), accountant=accountant, public=("z",))
    assert not len(accountant)


def test_simulated_records_have_the_law_of_the_model():
    def mixture(x):
        m = pyro.sample("m", dist.Normal(0 * ONE, ONE))
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Categorical(torch.tensor([0.3, 0.7]).double()))
            pyro.sample("x", dist.Normal(torch.stack([m, m + 10])[z], 1.0), obs=x)

    records = records_of(mixture, torch.zeros(100, dtype=torch.float64))
    theta = torch.tensor([2.0], dtype=torch.float64)
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
        m = pyro.sample("m", dist.Normal(0 * ONE, ONE))
        with pyro.plate("data", len(a)):
            pyro.sample("b", dist.Normal(m + 5 * a, 0.1), obs=b)
            pyro.sample("a", dist.Normal(m, 1.0), obs=a)

    zeros = torch.zeros(60, dtype=torch.float64)
    records = records_of(chain, zeros, zeros)
    assert records.roles == ["observed", "observed"]
    a, b = records.simulate(torch.zeros(1, dtype=torch.float64), {}, 5000, 1).rows()
    assert float(torch.corrcoef(torch.stack([a, b]))[0, 1]) > 0.99


def clipped_sum(theta, whitening, *rows):
    return Mechanism(records_of(regression, *rows), None, {}).clipped_sum(theta, whitening)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e200])
def test_a_record_moves_a_sum_by_at_most_one(bad):
    x, y = data()
    theta = torch.randn(3, dtype=torch.float64)
    whitening = 5 * torch.randn(3, 3, dtype=torch.float64)
    full = clipped_sum(theta, whitening, x, y)
    for i in range(5):
        kept = [r[torch.arange(len(r)) != i] for r in (x, y)]
        sums = clipped_sum(theta, whitening, *kept)
        assert float((full - sums).norm()) <= 1.0
    odd = x.clone()
    odd[0] = bad
    other = clipped_sum(theta, whitening, odd, y)
    assert bool(other.isfinite().all()) and float((full - other).norm()) <= 2.0
    if not math.isfinite(bad):
        kept = [r[1:] for r in (x, y)]
        fewer = clipped_sum(theta, whitening, *kept)
        assert torch.allclose(other, fewer)  # it counts as 0


def test_clipped_is_never_longer_than_one():
    rows = (
        torch.randn(1000, 4, dtype=torch.float64)
        * torch.logspace(-200, 200, 1000).double()[:, None]
    )
    found = clipped(rows, torch.randn(4, 4, dtype=torch.float64))
    assert bool(found.isfinite().all()) and float(found.norm(dim=1).max()) <= 1.0


def test_private_rows_are_not_kept():
    x, y = data()
    found = posterior(regression, x, y, epsilon=1.0, delta=1e-5, num_simulated=8000)
    kept = found._likelihood._simulator.records.density.rows()
    assert all(len(row) < 50 for row in kept)


def test_a_last_layer_is_found_and_others_refused():
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    x, y = torch.randn(400, 4), torch.randint(2, (400,))
    options = {"likelihood": "categorical", "prior_std": 1.0, "epsilon": 2.0, "delta": 1e-5}
    with pytest.raises(ValueError, match="the last layer"):
        posterior_for_module(net, x, y, **options)
    net[0].requires_grad_(False)
    found = posterior_for_module(net, x, y, num_simulated=8000, **options)
    assert set(found.mean) == {"2.weight", "2.bias"} and found.mean["2.weight"].shape == (2, 3)
    # what classes have in common is told by no record: the prior's deviation over √2
    both = found.sample(4000)["2.bias"].sum(1) / math.sqrt(2)
    assert float(both.std()) == pytest.approx(1.0, rel=0.1)
    with pytest.raises(ValueError, match="output is not that"):
        posterior_for_module(torch.nn.Sequential(net, torch.nn.Softmax(1)), x, y, **options)
    assert all(p.grad is None for p in net.parameters())


def test_no_record_raises_in_a_frozen_body():
    class Fails(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.last = torch.nn.Linear(2, 1)

        def forward(self, x):
            matrix = torch.diag_embed(x + 10)
            return self.last(torch.linalg.cholesky(matrix).diagonal(dim1=-2, dim2=-1))

    from torch_dpbayes.noise_aware.models import LastLayer

    x = torch.rand(50, 2)
    x[7] = -20.0  # no square root
    found = LastLayer(Fails(), "bernoulli", 1.0).features(x)
    assert bool((found[7] == 0).all()) and bool((found[:7] > 3).all())
