"""p values of releases: uniform where the model is right, small where it is not."""

import math
import warnings
from copy import copy
from functools import cache

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats
from small_models import BUDGET, SHORT

import torch_dpbayes as dpb
from torch_dpbayes.density import Prior
from torch_dpbayes.noise_aware import posterior_for_module
from torch_dpbayes.noise_aware.checks import (
    FALSE_ALARMS,
    note_prior,
    note_prior_width,
    note_releases,
    prior_p_value,
    release_p_values,
)
from torch_dpbayes.noise_aware.drawing import Draws
from torch_dpbayes.noise_aware.latents import Latents
from torch_dpbayes.noise_aware.likelihood import (
    Fit,
    LawDifferences,
    Moments,
    Release,
    posterior_precision,
)
from torch_dpbayes.noise_aware.run import Mechanism

pytestmark = pytest.mark.usefixtures("recorded_once", "double")
SIZE, N = 4, 1000


@cache
def gaussian(size, std):
    def model():
        pyro.sample("w", dist.Normal(torch.zeros(size), std).to_event(1))

    return Latents(Prior(model), torch.arange(size))


def latents_of(std=2.0):
    latents = copy(gaussian(SIZE, std))
    # more of them, at once: the model would run once for each
    latents.draws = std * torch.randn(4000, SIZE)
    return latents


def laws_of(count, size=0.1):
    """Differences that noise hides of the mean, more of early releases, in some directions."""
    scales = torch.logspace(0, -1, SIZE)
    apart = size * scales * torch.randn(count, SIZE)
    means = torch.cat([share * apart for share in (1.0, 0.3, 0.1)], 1)
    return LawDifferences(means, torch.zeros(count, 3 * SIZE, SIZE))


def no_laws():
    return laws_of(1, 0.0)


def linear_case(theta, wrong=0.0, shift=None):
    """Three releases of n(θ + noise of records) with noise of their own."""
    noise = torch.tensor([60.0, 40.0, 30.0]).repeat_interleave(SIZE)
    eye = torch.eye(SIZE)
    jacobian = torch.cat([eye, eye, eye])
    records = N**0.5 * torch.randn(SIZE)
    value = N * (jacobian @ theta + (shift or no_laws()).means[0]) + jacobian @ records
    value = value + noise * torch.randn(3 * SIZE)
    value[2 * SIZE :] += wrong
    zeros = torch.zeros(SIZE)
    releases = [
        Release(zeros, eye, part, float(noise[k * SIZE]))
        for k, part in enumerate(value.split(SIZE))
    ]
    covariance = jacobian @ jacobian.T
    found = Moments(torch.cat(3 * [zeros]), jacobian, covariance, 0 * covariance, eye, jacobian)
    total = N * covariance + torch.diag(noise.square())
    prior = eye / 4.0
    precision, _ = posterior_precision(found, total, prior, N)
    return Fit(zeros, precision, prior, found, total, 0.0, None, zeros), releases


def p_values(fit, releases, latents, laws=None):
    covariance = torch.linalg.inv(fit.precision)
    return release_p_values(fit, releases, latents, N, laws or no_laws(), covariance)


def prior_p(fit, releases, latents):
    value = torch.cat([release.value for release in releases])
    slope, prior = latents.slope_and_precision(fit.centre)
    precision, pulled = posterior_precision(fit.moments, fit.covariance, prior, N)
    fit = fit._replace(precision=precision, prior_precision=prior, slope=slope)
    covariance = torch.linalg.inv(precision)
    return prior_p_value(fit, latents, covariance @ (pulled.T @ value), covariance)


@pytest.mark.chance(1e-3)
def test_p_values_are_uniform_where_the_model_is_right():
    latents = latents_of()
    of_releases, of_prior = [], []
    for _ in range(100):
        fit, releases = linear_case(2.0 * torch.randn(SIZE))
        of_releases.append(p_values(fit, releases, latents))
        of_prior.append(prior_p(fit, releases, latents))
    for values in zip(*of_releases, strict=True):
        assert stats.kstest(values, "uniform").pvalue > 2.5e-4
    # deviations of the prior are quantiles of 500 draws
    assert stats.kstest(of_prior, "uniform").pvalue > 2.5e-5


@pytest.mark.chance(1e-3)
def test_covariates_that_are_not_known_raise_no_more_alarms(monkeypatch):
    """Of 100 right runs one is expected to alarm, and 6 or more once in 1,800 times. With the
    covariance of 32 laws of 40 columns in the place of their lengths half of them do.
    """
    monkeypatch.setitem(globals(), "SIZE", 40)
    latents, alarms = latents_of(), 0
    for _ in range(100):
        theta = 2.0 * torch.randn(SIZE)
        fit, releases = linear_case(theta, shift=laws_of(1, 0.4))
        alarms += 3 * min(p_values(fit, releases, latents, laws_of(32, 0.4))) < FALSE_ALARMS
    assert alarms < 6


@pytest.mark.chance(1e-3)
def test_p_values_find_what_is_wrong():
    """A release that is wrong; a prior that is four times too narrow, in nine of ten runs: of 100
    less than 80 once in a thousand times.
    """
    latents = latents_of()
    fit, releases = linear_case(torch.ones(SIZE), wrong=400.0)
    assert min(p_values(fit, releases, latents)) < 1e-3
    narrow, found = latents_of(std=0.5), 0
    for _ in range(100):
        fit, releases = linear_case(2.0 * torch.randn(SIZE))
        found += prior_p(fit, releases, narrow) < FALSE_ALARMS
    assert found >= 80


def test_warnings_come_with_small_p_values_alone():
    """The least of three is three times as likely to be small."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(note_releases([0.4, 0.005, 0.9])) == len(note_prior(0.3)) == 1
    for lines, p_values in ((note_releases, [0.4, 0.003, 0.9]), (note_prior, 0.009)):
        with pytest.warns(UserWarning):
            assert len(lines(p_values)) == 2
    with pytest.warns(UserWarning):
        note_releases([math.nan])


def test_draws_that_are_worth_nothing_do_not_say_that_the_prior_comes_back():
    latents, weights = latents_of(), torch.full((500,), 1 / 500)
    theta = 0.01 * torch.randn(500, SIZE)
    for worth, scale, is_said in (
        (0.0, 1.0, 0),
        (0.0, 200.0, 0),
        (500.0, 1.0, 0),
        (500.0, 400.0, 1),
    ):
        draws = Draws(scale * theta, weights, 0.0, worth, 1.0 if is_said else math.inf, "chains")
        with warnings.catch_warnings(record=True, action="always") as told:
            note_prior_width(draws, latents)
        assert len(told) == is_said


@pytest.mark.usefixtures("few_draws")
def test_a_prior_far_off_is_reported():
    y, layer = 1.5 + torch.randn(2000), torch.nn.Linear(1, 1)
    options = {"likelihood": "normal", "prior_std": 0.1, **BUDGET, **SHORT}
    with pytest.warns(UserWarning, match="contradict the prior") as told:
        found = posterior_for_module(layer, torch.zeros(2000, 1), y, **options)
    assert "NOT LIKELY" in found.guarantee() and told[0].filename == __file__
    assert found.noise_std == 1.0 and found.predict(layer, torch.zeros(7, 1)).shape == (7,)


@pytest.mark.chance(1e-3)
@pytest.mark.parametrize("more", [0, 150])
def test_the_number_of_clipped_records_is_checked(monkeypatch, more):
    exact = Mechanism.clipped_count
    monkeypatch.setattr(Mechanism, "clipped_count", lambda *given: exact(*given) + more)
    x = torch.randn(1000, 2) / 6
    glm = dpb.ops.GLM("gaussian", noise_std=0.3)
    y = x @ torch.tensor([1.0, -1.0]) + 0.3 * torch.randn(len(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other checks
        post = dpb.noise_aware.posterior(
            glm, x, y, epsilon=30.0, delta=1e-5, max_grad_norm=1.0, **SHORT
        )
    assert (post.checks[0][-1] < 1e-6) == (more > 0) and post.checks[0][-1] > 1e-3 * (more == 0)


@pytest.mark.slow
@pytest.mark.chance(1e-5)
@pytest.mark.parametrize("far", [1.0, 1000.0])
def test_a_wide_prior_is_right_or_says_that_its_draws_are_not(far):
    """Some hundred deviations of a record from the prior's median, the search ends elsewhere."""
    x = torch.randn(10_000, 5, dtype=torch.float64) / 4
    x = x / x.norm(dim=1, keepdim=True).clamp(min=1)
    weights = far * torch.tensor([1.0, -1.0, 0.5, -0.5, 1.0], dtype=torch.float64)
    y = x @ weights + torch.randn(len(x), dtype=torch.float64)
    glm = dpb.ops.GLM("gaussian", prior_std=500.0, noise_std=1.0, max_feature_norm=1.0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        post = dpb.noise_aware.posterior(glm, x, y, epsilon=3.0, delta=1e-5)
    apart = (post.mean["weights"] - weights) / post.stddev["weights"]
    is_told = any("use a prior that is narrower" in str(each.message) for each in told)
    assert float(apart.abs().max()) < 5 or (far > 1 and is_told)
