"""A run: how its budget is split, where scores are taken and how they are scaled, and that it keeps
no records.
"""

import itertools
import math
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from small_models import BUDGET, SHORT, coins, grouped, grouped_data, records_of
from support.pyro_models import gaussian, weights

import torch_dpbayes as dpb
from torch_dpbayes.noise import GaussianNoise
from torch_dpbayes.noise_aware import drawing, inference, plan, posterior
from torch_dpbayes.noise_aware.covariates import Released
from torch_dpbayes.noise_aware.latents import Latents
from torch_dpbayes.noise_aware.likelihood import Simulator
from torch_dpbayes.noise_aware.run import Mechanism, choose_scale, plan_run

pytestmark = pytest.mark.usefixtures("few_draws", "double")
PRIOR_STD, NOISE_STD = torch.tensor([[0.5, 2.0], [1.0, 3.0]]).double()


def gaussian_means(y):
    m = pyro.sample("m", dist.Normal(torch.zeros(2), PRIOR_STD).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(m, NOISE_STD).to_event(1), obs=y)


@pytest.fixture
def timed_chains(monkeypatch):
    """Which would take very long."""
    monkeypatch.setattr(drawing, "_GRADIENTS", 1e9)
    monkeypatch.setattr(drawing, "_TIMED", 1)


def test_shares_add_up_and_grow():
    run = {"dimension": 10, "num_data": 1000, "num_releases": 7, "has_numbers": True}
    split = plan_run(dpb.PrivacyAccountant(**BUDGET), None, None, num_ones=5, **run)
    squares = [z**-2 for z in split.scores]
    assert all(b / a == pytest.approx(1.8) for a, b in itertools.pairwise(squares))
    assert sum(z**-2 for z in split.scores) == pytest.approx(split.together**-2)
    share = 2 / math.sqrt(1000 / (10 * split.total))
    found = sum(z**-2 for each in split.moments for z in each) + 5 * split.categories**-2
    assert found * split.total**2 == pytest.approx(min(share, 0.30) + 0.02)


def scale_of(n, multiplier):
    records = records_of(gaussian_means, torch.zeros(n, 2), chunk=1000)
    simulator = Simulator(records, Released(records, 0), n, 20_000, 1)
    latents = Latents(records.density.prior, records.read)
    return choose_scale(simulator, latents, torch.zeros(2), multiplier, None)


def test_scores_are_whitened_by_what_is_known_of_them():
    """A = (F + (n + z²d)/n² P)^(-1/2), F = 1/s² of each coordinate; both count here."""
    n, z = 10, 5.0
    found = scale_of(n, z)
    wanted = (NOISE_STD**-2 + (n + 2 * z**2) / n**2 * PRIOR_STD**-2).rsqrt()
    own = found.whitening * found.clip_bound
    torch.testing.assert_close(own, torch.diag(wanted), rtol=0.03, atol=0.03)


def test_the_clip_bound_is_large_where_noise_is_small():
    """Of norms of two normal numbers: half are below 1.18, a fifth above 1.79, one in a thousand
    above 3.7.
    """
    assert scale_of(1000, 0.1).clip_bound > 3.5
    assert scale_of(10_000, 1000.0).clip_bound < 1.9


def test_scores_are_taken_ever_nearer_to_the_mode():
    y = 3 * PRIOR_STD + NOISE_STD * torch.randn(4000, 2)
    found = posterior(gaussian_means, y, epsilon=3.0, delta=1e-5, num_simulated=1000)
    apart = [float((r.theta - y.mean(0)).norm()) for r in found.transcript.scores]
    # the median of few draws is .26 off; a posterior deviation is .2 at most
    assert apart[0] > 4.0 and max(apart[4:]) < 0.6
    assert "mode was not reached" not in found.guarantee()


@pytest.mark.chance(0.1, looks=6)
def test_a_run_arrives_from_a_vague_prior():
    """Its median is e⁻⁶⁹, and a step of Gauss-Newton no longer than 1. Noise may hold a release's
    mode where the one before was, but hardly all seven: 28 of 28 runs arrived.
    """

    def model(y):
        zero = torch.zeros(())
        precision = pyro.sample("precision", dist.Gamma(zero + 0.01, zero + 0.01))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(0.0, precision.rsqrt()), obs=y)

    y = 2 * torch.randn(4000)
    found = posterior(model, y, epsilon=3.0, delta=1e-5, num_simulated=1000)
    assert float(found.mean["precision"]) == pytest.approx(0.25, abs=0.05)


def test_points_are_functions_of_earlier_releases(monkeypatch):
    """With the same noise, seeds and sums, the same points: two runs on other data that give the
    same releases cannot differ, for sums are all that a run reads.
    """
    sums = []

    def clipped_sum(self, theta, whitening):
        torch.manual_seed(len(sums))
        sums.append(theta)
        return torch.randn(len(whitening))

    monkeypatch.setattr(Mechanism, "clipped_sum", clipped_sum)
    monkeypatch.setattr(Mechanism, "clipped_count", lambda self, release, multiplier: 3)
    monkeypatch.setattr(
        GaussianNoise,
        "standard_normal",
        lambda self, size, *, dtype, device, hides=(): torch.ones(size, dtype=dtype),
    )
    monkeypatch.setattr(
        Latents, "sample", lambda self, count: torch.randn(count, self.prior.dimension)
    )
    paths = []
    for seed in (1, 2):
        sums.clear()
        torch.manual_seed(seed)
        y = torch.randint(2, (500,)).double()
        x, g = torch.zeros(500, 2), torch.arange(500) % 3
        torch.manual_seed(7)
        posterior(grouped, x, g, y, covariates=(x, g), **BUDGET, **SHORT)
        paths.append(torch.stack(sums))
    assert torch.equal(paths[0], paths[1]) and len(paths[0]) == 2


def test_plan_reads_no_records(timed_chains):
    x, g, y = grouped_data()
    accountant = dpb.PrivacyAccountant(**BUDGET)
    options = {"accountant": accountant, "num_simulated": 1000}
    found = plan(grouped, x * math.nan, g, y, num_data=500, **options)
    assert not len(accountant) and found.clip_bound > 0 and 0 < found.seconds < 1e4  # no chains
    assert bool((found.stddev < 1.2 * found.prior_stddev).all())
    more = plan(grouped, x, g, y, num_data=50_000, **options)
    assert float(more.stddev.mean()) < 0.3 * float(found.stddev.mean())


def test_a_mode_that_was_not_reached_is_said_and_no_record_is_kept(monkeypatch):
    """The search for it converges in right runs: 20 of 20 ended within .05 deviations."""
    search = inference.find_mode
    monkeypatch.setattr(
        inference, "find_mode", lambda *given: search(*given)._replace(last_step=12.0)
    )
    x, g, y = grouped_data()
    found = posterior(grouped, x, g, y, **BUDGET, **SHORT)
    assert "mode was not reached" in found.guarantee()
    kept = pickle.dumps(found)  # it holds no records
    assert not any(row.numpy().tobytes() in kept for row in (x[:3], g[:50], y[:50]))


def with_scale(x, g, y):
    s = pyro.sample("s", dist.LogNormal(0.0, 1.0))
    coins(pyro.sample("a", dist.Normal(torch.zeros(3), s).to_event(1))[g] + x[:, 0], y)


def non_centred(x, g, y):
    s = pyro.sample("s", dist.LogNormal(0.0, 1.0))
    gaussian(y, weights("m") + s * weights("a", 3)[g])


@pytest.mark.parametrize("model", [with_scale, non_centred])
def test_plan_counts_the_chains_of_a_hierarchical_prior_and_of_a_curve(model, timed_chains):
    """By the time of a gradient, which is a millisecond or so."""
    assert plan(model, *grouped_data(), **BUDGET, **SHORT).seconds > 1e4
