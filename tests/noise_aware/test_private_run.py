"""What a run charges and releases: noise that was charged, points from earlier releases alone."""

import itertools
import math
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch

import torch_dpbayes as dpb
from torch_dpbayes.accounting.calibration import total_multiplier
from torch_dpbayes.noise import GaussianNoise
from torch_dpbayes.noise_aware import plan, posterior
from torch_dpbayes.noise_aware.budget import plan_run
from torch_dpbayes.noise_aware.covariates import feature_shape
from torch_dpbayes.noise_aware.records import ModelRecords
from torch_dpbayes.noise_aware.run import Mechanism

pytestmark = pytest.mark.usefixtures("few_draws")
ONE = torch.ones((), dtype=torch.float64)


def grouped(x, g, y):
    a = pyro.sample("a", dist.Normal(torch.zeros(3, dtype=torch.float64), 1.0).to_event(1))
    w = pyro.sample("w", dist.Normal(torch.zeros(2, dtype=torch.float64), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=a[g] + x @ w), obs=y)


def data(n=500):
    x = torch.randn(n, 2, dtype=torch.float64)
    return x, torch.randint(3, (n,)), torch.randint(2, (n,)).double()


@pytest.mark.parametrize("neighboring", ["add_or_remove_one", "replace_one"])
def test_noise_that_is_drawn_is_what_is_charged(neighboring, monkeypatch):
    """Every standard normal number is 1: releases less their sums are the noise's deviations, and
    sensitivities over these give back the μ of the budget.
    """
    drawn = []

    def ones(self, size, *, dtype, device, hides=()):
        drawn.append(size)
        return torch.ones(size, dtype=dtype, device=device)

    monkeypatch.setattr(GaussianNoise, "standard_normal", ones)
    accountant = dpb.PrivacyAccountant(epsilon=1.0, delta=1e-5, neighboring=neighboring)
    n = 500
    x, g, y = data(n)
    found = posterior(
        grouped, x, g, y, accountant=accountant, num_data=n, num_simulated=1000
    ).transcript
    is_swap = neighboring == "replace_one"
    two, root = (2.0, math.sqrt(2)) if is_swap else (1.0, 1.0)
    counts = torch.bincount(g, minlength=3).double()
    noisy, std = found.histograms[1]
    assert torch.allclose(noisy - counts, torch.full((3,), std, dtype=torch.float64))
    short = x / x.norm(dim=1, keepdim=True).clamp_min(1.0)
    assert torch.allclose(
        found.moments.total - short.sum(0),
        torch.full((2,), found.moments.total_std).double(),
        atol=1e-2,
    )
    assert torch.allclose(
        (found.moments.products - short.T @ short).diagonal(),
        torch.full((2,), found.moments.products_std).double(),
        atol=1e-2,
    )
    records = ModelRecords(
        grouped, (x, g, y), data_plate="data", count_is_public=True, public=(), chunk=500
    )
    own = Mechanism(records, feature_shape(records, 1.0, {}), {})
    for release in found.scores:
        apart = release.value - own.clipped_sum(release.theta, release.whitening)
        assert apart.tolist() == pytest.approx([release.noise_std] * 5, abs=1e-2)
    last = found.scores[-1]
    assert sorted(drawn) == sorted([3, 2, 4, 1] + 7 * [5])
    count = own.clipped_count(last, 0.0)
    assert found.clipped[0] - found.clipped[1] == pytest.approx(count, abs=1.01)
    squares = [(two / r.noise_std) ** 2 for r in found.scores]
    squares.append((two / found.moments.total_std) ** 2)
    squares.append((root / found.moments.products_std) ** 2)
    squares.append((root / std) ** 2)
    squares.append((1.0 / found.clipped[1]) ** 2)
    total = total_multiplier(
        dpb.PrivacyAccountant(epsilon=1.0, delta=1e-5, neighboring=neighboring), None, None
    )
    assert sum(squares) == pytest.approx((two / total) ** 2, rel=1e-6)
    assert 0.99 < accountant.get_epsilon() <= 1.0


def test_nothing_is_released_where_the_charge_is_refused(monkeypatch):
    touched = []
    monkeypatch.setattr(
        "torch_dpbayes.noise_aware.inference.Mechanism",
        lambda *args: touched.append(args),
    )
    accountant = dpb.PrivacyAccountant(epsilon=1.0, delta=1e-5)

    def refuse(*args, **kwargs):
        raise dpb.PrivacyBudgetExceeded("no")

    monkeypatch.setattr(accountant, "compose", refuse, raising=False)
    with pytest.raises(Exception, match="no"):
        posterior(grouped, *data(), accountant=accountant, num_data=500)
    assert not touched and not len(accountant)


def test_shares_add_up_and_grow():
    accountant = dpb.PrivacyAccountant(epsilon=1.0, delta=1e-5)
    split = plan_run(
        accountant,
        4.0,
        dimension=10,
        num_data=1000,
        num_releases=7,
        has_numbers=True,
        num_categories=2,
    )
    squares = [z**-2 for z in split.scores]
    assert all(b / a == pytest.approx(1.8) for a, b in itertools.pairwise(squares))
    share = 2 / math.sqrt(1000 / 40)
    assert sum(z**-2 for z in split.moments) * 16 == pytest.approx(min(share, 0.30))
    assert split.event is not None


def test_points_are_functions_of_earlier_releases(monkeypatch):
    """With the same noise, seeds and sums, the same points: two runs on other data that give the
    same releases cannot differ, for sums are all that a run reads.
    """
    sums = []

    def clipped_sum(self, theta, whitening):
        torch.manual_seed(len(sums))
        sums.append(theta)
        return torch.randn(len(whitening), dtype=torch.float64)

    monkeypatch.setattr(Mechanism, "clipped_sum", clipped_sum)
    monkeypatch.setattr(Mechanism, "clipped_count", lambda self, release, multiplier: 3)
    monkeypatch.setattr(
        GaussianNoise,
        "standard_normal",
        lambda self, size, *, dtype, device, hides=(): torch.ones(size, dtype=dtype),
    )
    monkeypatch.setattr(
        "torch_dpbayes.noise_aware.latents.Latents.sample",
        lambda self, count: torch.randn(count, self.dimension, dtype=torch.float64),
    )
    paths = []
    for seed in (1, 2):
        sums.clear()
        torch.manual_seed(seed)
        y = torch.randint(2, (500,)).double()
        x = torch.zeros(500, 2, dtype=torch.float64)
        g = torch.arange(500) % 3
        torch.manual_seed(7)
        posterior(grouped, x, g, y, epsilon=1.0, delta=1e-5, num_simulated=1000, covariates=(x, g))
        paths.append(torch.stack(sums))
    assert torch.equal(paths[0], paths[1]) and len(paths[0]) == 7


def test_arguments_are_checked_before_the_charge():
    accountant = dpb.PrivacyAccountant(epsilon=1.0, delta=1e-5)
    with pytest.raises(ValueError, match="num_data"):
        posterior(grouped, *data(), accountant=accountant)
    with pytest.raises(ValueError, match="constant_columns"):
        posterior(grouped, *data(), accountant=accountant, num_data=500, constant_columns=(5,))
    with pytest.raises(ValueError, match="max_grad_norm"):
        posterior(grouped, *data(), accountant=accountant, num_data=500, max_grad_norm=-1.0)
    with pytest.raises(TypeError, match="PrivacyAccountant"):
        posterior(grouped, *data(), accountant=3)
    assert not len(accountant)


def test_plan_reads_no_records():
    x, g, y = data()
    accountant = dpb.PrivacyAccountant(epsilon=1.0, delta=1e-5)
    found = plan(grouped, x * math.nan, g, y, accountant=accountant, num_data=500)
    assert not len(accountant) and found.clip_bound > 0 and found.seconds > 0
    assert bool((found.stddev < 1.2 * found.prior_stddev).all())
    more = plan(grouped, x, g, y, accountant=accountant, num_data=50_000)
    assert float(more.stddev.mean()) < 0.3 * float(found.stddev.mean())


@pytest.mark.parametrize("neighboring", ["add_or_remove_one", "replace_one"])
def test_a_posterior_holds_no_records(neighboring):
    accountant = dpb.PrivacyAccountant(1.0, 1e-5, neighboring=neighboring)
    x, g, y = data()
    found = posterior(
        grouped, x, g, y, accountant=accountant, num_data=500, num_releases=2, num_simulated=500
    )
    kept = pickle.dumps(found)
    assert not any(row.numpy().tobytes() in kept for row in (x[:3], g[:50], y[:50]))
