"""How many gradients a run clips: released, charged, and named where they are too many."""

import math
import warnings
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.stats import chi2
from torch import nn

import torch_dpbayes as dpb
from torch_dpbayes.accounting.events import GaussianDpEvent
from torch_dpbayes.mcmc.density import RecordDensity
from torch_dpbayes.noise_aware.mechanism import Mechanism
from torch_dpbayes.noise_aware.records import DensitySums

DOUBLE = torch.float64


def model(y):
    """Normal records of a known mean, whose scores ½(y²e^λ − 1) have a tail to one side."""
    log_precision = pyro.sample("l", dist.Normal(torch.zeros((), dtype=DOUBLE), 2.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(torch.zeros_like(y), torch.exp(-log_precision / 2)), obs=y)


def records(count, log_precision=0.7):
    return torch.randn(count, dtype=DOUBLE) * math.exp(-log_precision / 2)


def sums_of(y, bound):
    return DensitySums(RecordDensity(model, (y,), count_is_public=True), bound)


def test_count_is_of_gradients_longer_than_the_bound():
    y = records(500)
    theta = torch.tensor([0.4], dtype=DOUBLE)
    longer = (0.5 * (1 - y.square() * theta.exp())).abs() > 1.0
    assert sums_of(y, 1.0).clipped_count(theta) == int(longer.sum()) > 0


def laplacian(y):
    """Every gradient is as long as 1 exactly, or as 1 up to rounding for three coordinates."""
    mean = pyro.sample("mean", dist.Normal(torch.zeros(y.shape[1:]), 1.0).to_event(y.dim() - 1))
    direction = torch.ones(y.shape[1:]) / math.sqrt(max(y[0].numel(), 1))
    along = (mean * direction).sum()
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Laplace(along, 1.0), obs=y.reshape(len(y), -1)[:, 0])


@pytest.mark.parametrize("shape", [(2000,), (2000, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_gradients_as_long_as_the_bound_are_not_counted(shape, dtype):
    y = torch.randn(shape, dtype=DOUBLE).to(dtype)
    theta = torch.full(shape[1:] or (1,), 0.1, dtype=dtype)
    y = torch.where(y == 0.1, 0.0, y)  # a gradient of 0
    density = RecordDensity(laplacian, (y,), count_is_public=True)
    assert DensitySums(density, 1.0).clipped_count(theta) == 0
    assert DensitySums(density, 1.0 - 1e-4).clipped_count(theta) == 2000


def test_a_bound_that_every_gradient_reaches_is_not_named():
    y = 0.5 + torch.distributions.Laplace(0.0, 1.0).sample((2000,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        post = dpb.noise_aware.laplace(laplacian, y, epsilon=8.0, delta=1e-5, max_grad_norm=1.0)
    assert "  CLIPPED     " not in post.guarantee()
    assert abs(float(post.mean["mean"]) - 0.5) < 6 * float(post.stddev["mean"])


@pytest.mark.parametrize("bound", [0.3, 1.0, 3.0])
def test_a_record_moves_the_count_by_at_most_one(bound):
    """Whatever the threshold is, which is what is charged."""
    y, theta = records(60), torch.tensor([0.4], dtype=DOUBLE)
    before = sums_of(y, bound).clipped_count(theta)
    for value in (0.0, 0.7, 1e3, 1e200):
        longer = torch.cat([y, torch.tensor([value], dtype=DOUBLE)])
        assert sums_of(longer, bound).clipped_count(theta) - before in (0, 1)
        replaced = torch.cat([y[1:], longer[-1:]])
        assert abs(sums_of(replaced, bound).clipped_count(theta) - before) <= 1


def test_a_record_without_a_finite_gradient_counts_as_one():
    y = records(50)
    theta = torch.zeros(1, dtype=DOUBLE)
    before = sums_of(y, 1e6).clipped_count(theta)
    y[3] = 1e200
    assert (before, sums_of(y, 1e6).clipped_count(theta)) == (0, 1)


@pytest.mark.parametrize("neighboring", ["add_or_remove_one", "replace_one"])
@pytest.mark.parametrize("curvature", ["full", "diagonal"])
def test_the_charge_is_that_of_the_noise(neighboring, curvature):
    accountant = dpb.PrivacyAccountant(20.0, 1e-5, neighboring=neighboring)
    post = dpb.noise_aware.laplace(
        model,
        records(400),
        accountant=accountant,
        max_grad_norm=4.0,
        num_data=400,
        curvature=curvature,
    )
    events = [event for charge in accountant.history for event in [charge.event] * charge.count]
    assert all(type(event) is GaussianDpEvent for event in events)
    seen = post.transcript
    assert len(events) == len(seen.gradients) + len(seen.curvatures) + len(seen.diagonals) + 1
    # the accountant takes the multiplier for one of bounds that double under replace-one
    cheaper = math.sqrt(2) if neighboring == "replace_one" else 1.0
    (clipped,) = seen.clipped
    stated = {round(event.noise_multiplier, 9) for event in events}
    assert round(cheaper * clipped.noise_std, 9) in stated


def test_noise_is_that_of_the_multiplier():
    sums, theta = sums_of(records(100), 1.0), torch.zeros(1, dtype=DOUBLE)
    exact = sums.clipped_count(theta)
    found = [Mechanism(sums).clipped_count(sums, theta, 3.0) for _ in range(600)]
    assert {release.noise_std for release in found} == {3.0}
    total = sum(((release.value - exact) / 3.0) ** 2 for release in found)
    assert 1e-6 < chi2.sf(total, 600) < 1 - 1e-6


def test_a_bound_that_clips_many_is_named():
    y = records(4000)
    with pytest.warns(UserWarning, match="of the gradients are clipped.*Raise max") as found:
        post = dpb.noise_aware.laplace(model, y, epsilon=2.0, delta=1e-5, max_grad_norm=0.8)
    assert {Path(warning.filename) for warning in found} == {Path(__file__)}
    assert "  CLIPPED     " in post.guarantee()
    (release,) = post.transcript.clipped
    exact = sums_of(y, 0.8).clipped_count(release.theta)
    assert exact > 400 and abs(release.value - exact) < 5.5 * release.noise_std


def test_a_bound_that_clips_few_is_not():
    for _ in range(5):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            post = dpb.noise_aware.laplace(
                model, records(4000), epsilon=2.0, delta=1e-5, max_grad_norm=4.0
            )
        assert "  clipped     " in post.guarantee()
        assert "  CLIPPED     " not in post.guarantee()


def rates(x):
    rate = pyro.sample("rate", dist.Gamma(torch.tensor(2.0, dtype=DOUBLE), 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("x", dist.Exponential(rate.expand(len(x))), obs=x)


def test_few_clipped_gradients_of_many_records_are_named():
    """1.8 % of 30,000: what a tail to one side loses moves the mean by several standard
    deviations.
    """
    x = torch.distributions.Exponential(torch.tensor(1.5, dtype=DOUBLE)).sample((30_000,))
    how = {"epsilon": 1.0, "delta": 1e-5}
    with pytest.warns(UserWarning, match="of the gradients are clipped"):
        post = dpb.noise_aware.laplace(rates, x, max_grad_norm=3.0, **how)
    assert "  CLIPPED     " in post.guarantee()
    assert (
        "  CLIPPED     "
        not in dpb.noise_aware.laplace(rates, x, max_grad_norm=8.0, **how).guarantee()
    )
    # of few records their own randomness is the larger part; noise names 2 of 302 all the same
    few = (dpb.noise_aware.laplace(rates, x[:300], max_grad_norm=3.0, **how) for _ in range(3))
    assert not all("  CLIPPED     " in post.guarantee() for post in few)


def test_a_share_that_noise_hides_is_not_told():
    post = dpb.noise_aware.laplace(model, records(20), epsilon=0.5, delta=1e-5, max_grad_norm=1.0)
    assert "  clipped     noise hides how many gradients are" in post.guarantee()
    assert "at the last point" not in post.guarantee()


def test_where_nothing_is_clipped_nothing_is_counted():
    x = torch.randn(200, 3) / 2
    y = torch.randint(0, 3, (200,))
    softmax = dpb.ops.Softmax(3, max_feature_norm=2.0, prior_std=1.0)
    post = dpb.noise_aware.laplace(softmax, x, y, epsilon=4.0, delta=1e-5)
    assert post.transcript.clipped == []
    assert "clipped     " not in post.guarantee()


def test_of_a_module():
    torch.manual_seed(0)
    net, x = nn.Linear(2, 1), torch.randn(300, 2)
    post = dpb.noise_aware.laplace_for_module(
        net,
        x,
        x[:, :1] + torch.randn(300, 1),
        loss=lambda out, target: 0.5 * (out - target).square().sum(-1),
        prior_std=1.0,
        max_grad_norm=8.0,
        epsilon=4.0,
        delta=1e-5,
    )
    assert len(post.transcript.clipped) == 1
