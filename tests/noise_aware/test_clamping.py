"""Public bounds that are too small for the records are seen in the posterior, and others are not
complained of.
"""

import math
import warnings

import pytest
import torch
from scipy import stats

from torch_dpbayes import noise_aware
from torch_dpbayes.noise_aware.clamping import Clamped, Clamping, clamped_counts, clamped_residuals
from torch_dpbayes.noise_aware.modes import mode
from torch_dpbayes.noise_aware.priors import GaussianPrior
from torch_dpbayes.noise_aware.summaries import Summary

BUDGET = {"epsilon": 1.0, "delta": 1e-5}


@pytest.mark.parametrize("rate", [0.2, 4.0, 30.0])
@pytest.mark.parametrize("max_count", [0.5, 5.0, 7.3])
def test_what_clamping_takes_from_counts_is_a_sum_over_them(rate, max_count):
    found = clamped_counts(rate, max_count, 10)
    k = torch.arange(200)
    chance = torch.as_tensor(stats.poisson.pmf(k.numpy(), rate))
    assert found.share == pytest.approx(float(chance[k > max_count].sum()), rel=1e-9)
    expected = 10 * float((chance * (k - max_count).clamp_min(0)).sum())
    assert float(found.lost) == pytest.approx(expected, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("limit", [0.3, 2.0, 6.0])
def test_what_clamping_takes_from_residuals_is_an_integral(limit):
    std, count = 1.5, 100
    r = torch.linspace(-15, 15, 300_001, dtype=torch.float64)
    chance = torch.as_tensor(stats.norm.pdf(r.numpy(), scale=std)) * float(r[1] - r[0])
    products = torch.tensor([3.0, -1.0], dtype=torch.float64)
    found = clamped_residuals(products, count * std**2, limit, count)
    assert found.share == pytest.approx(float(chance[r.abs() > limit].sum()), rel=1e-3)
    torch.testing.assert_close(found.lost[:-1], found.share * products)
    expected = count * float((chance * (r.square() - limit**2).clamp_min(0)).sum())
    assert float(found.lost[-1]) == pytest.approx(expected, rel=1e-3)


def test_residuals_of_no_size_lose_nothing():
    found = clamped_residuals(torch.zeros(1, dtype=torch.float64), 0.0, 1.0, 10)
    assert found.share == 0.0 and not found.lost.any()


@pytest.mark.parametrize("truth", [4.0, 10.0])
def test_too_small_a_bound_of_counts_is_said(truth):
    counts = torch.poisson(torch.full((10_000,), truth))
    model = noise_aware.gamma_poisson(2.0, 0.1, 5.0)
    with pytest.warns(UserWarning, match="counts exceed max_count = 5 .* a larger max_count"):
        post = noise_aware.sufficient_statistics(model, counts, **BUDGET)
    assert "CLAMPED     by this posterior itself" in post.guarantee()


def regression(count, noise_std=0.2):
    x = 0.3 * torch.randn(count, 3)
    x = x / x.norm(dim=1, keepdim=True).clamp_min(1.0)
    return x, x @ torch.tensor([1.0, -1.0, 0.5]) + noise_std * torch.randn(count)


@pytest.mark.parametrize("bound", [0.02, 0.2])
def test_too_small_a_bound_of_responses_is_said(bound):
    model = noise_aware.LinearRegression(target_bound=bound)
    with pytest.warns(UserWarning, match=f"residuals exceed target_bound = {bound:g} "):
        post = noise_aware.sufficient_statistics(model, *regression(10_000), **BUDGET)
    assert "CLAMPED" in post.guarantee()


def test_a_search_that_a_first_step_threw_far_away_comes_back():
    """The noise scale from Σ r² alone, begun at exp(20) where exp(-4) is true: the likelihood is
    flat there but for its own width.
    """
    count, log_std = 10_000, -4.0

    def moments(theta):
        mean = count * (2 * theta).exp()
        return mean, (2 * mean.square() / count)[None]

    one = torch.ones(1, dtype=torch.float64)
    released = count * (2 * log_std * one).exp()
    found = mode(Summary(released, moments, 20 * one), GaussianPrior(0 * one, 0.01 * one))
    assert float(found) == pytest.approx(log_std, abs=0.01)


@pytest.mark.parametrize("count", [30, 1000, 100_000])
def test_a_bound_that_few_records_exceed_is_not_complained_of(count):
    """Whatever the data tell: of 30 records nearly nothing, and little noise shows a small loss."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*nearly the prior.*")
        counts = torch.poisson(torch.full((count,), 3.0))
        post = noise_aware.sufficient_statistics(
            noise_aware.gamma_poisson(2.0, 0.5, 12.0), counts, **BUDGET
        )
        assert "CLAMPED" not in post.guarantee()
        model = noise_aware.LinearRegression(target_bound=2.0)
        post = noise_aware.sufficient_statistics(model, *regression(count), **BUDGET)
        assert "CLAMPED" not in post.guarantee()


def test_a_posterior_that_noise_made_wide_is_not_taken_for_records_beyond_the_bound():
    """A mode of σ beyond the bound, but values within it are as good."""
    eye = torch.eye(1, dtype=torch.float64)
    prior = GaussianPrior(torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64))
    for noise_std, is_said in ((1.0, False), (0.01, True)):
        summary = Summary(
            torch.ones(1, dtype=torch.float64), lambda at, v=noise_std: (at, v**2 * eye), eye[0]
        )
        clamping = Clamping(
            "numbers",
            ("limit", 0.3),
            lambda at: Clamped(float(at > 0.3), 2.0 * (at > 0.3).double()),
        )
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            lines = clamping.note(summary, prior)
        assert bool(lines) == bool(said) == is_said


@pytest.mark.thorough
def test_what_is_let_through_is_a_small_part_of_the_width():
    """Counts of which some are clamped, over sizes: where nothing is said, the mean is not farther
    off than that, noise of four standard deviations aside.
    """
    silent = 0
    for count in (100, 1000, 10_000, 100_000):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            post = noise_aware.sufficient_statistics(
                noise_aware.gamma_poisson(2.0, 0.5, 6.0),
                torch.poisson(torch.full((count,), 2.0)),
                **BUDGET,
            )
        apart = abs(float(post.mean["rate"]) - 2.0) / float(post.stddev["rate"])
        lost = float(clamped_counts(2.0, 6.0, 1).lost) / float(post.stddev["rate"])
        if not any("max_count" in str(one.message) for one in said):
            silent += 1
            assert lost < 0.7 and apart < 4.7
        else:
            assert lost > 0.3
    assert 0 < silent < 4
    assert math.isfinite(lost)
