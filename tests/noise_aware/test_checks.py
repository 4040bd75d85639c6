"""p values of releases: uniform where the model is right, small where it is not."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats

import torch_dpbayes as dpb
from torch_dpbayes.density import Prior
from torch_dpbayes.noise_aware import posterior
from torch_dpbayes.noise_aware.checks import note, prior_p_value, release_p_values
from torch_dpbayes.noise_aware.latents import Latents
from torch_dpbayes.noise_aware.likelihood import Fit, Moments, Release, posterior_precision

SIZE, N = 4, 1000


def latents_of(std=2.0):
    def model():
        pyro.sample("w", dist.Normal(torch.zeros(SIZE, dtype=torch.float64), std).to_event(1))

    return Latents(Prior(model), torch.arange(SIZE))


def linear_case(theta, wrong=0.0):
    """Three releases of n(θ + noise of records) with noise of their own."""
    noise = (60.0, 40.0, 30.0)
    eye = torch.eye(SIZE, dtype=torch.float64)
    jacobian = torch.cat([eye, eye, eye])
    records = N**0.5 * torch.randn(SIZE, dtype=torch.float64)
    releases = [
        Release(
            torch.zeros(SIZE, dtype=torch.float64),
            eye,
            N * theta + records + z * torch.randn(SIZE, dtype=torch.float64),
            z,
        )
        for z in noise
    ]
    if wrong:
        releases[-1] = releases[-1]._replace(value=releases[-1].value + wrong)
    zeros = torch.zeros(3 * SIZE, dtype=torch.float64)
    covariance = jacobian @ jacobian.T
    found = Moments(zeros, jacobian, covariance, 0 * covariance, eye, jacobian)
    total = N * covariance + torch.diag(
        torch.tensor(noise).double().square().repeat_interleave(SIZE)
    )
    prior = eye / 4.0
    precision, _ = posterior_precision(found, total, prior, N)
    centre = torch.zeros(SIZE, dtype=torch.float64)
    return Fit(centre, precision, prior, found, total, centre, 0.0, None, None), releases


def test_p_values_are_uniform_where_the_model_is_right():
    """Fails once in a thousand times for each of four tests."""
    latents = latents_of()
    of_releases, of_prior = [], []
    for _ in range(200):
        theta = 2.0 * torch.randn(SIZE, dtype=torch.float64)
        fit, releases = linear_case(theta)
        of_releases.append(release_p_values(fit, releases, latents, N))
        of_prior.append(prior_p_value(fit, releases, latents, N))
    for values in zip(*of_releases, strict=True):
        assert stats.kstest(values, "uniform").pvalue > 1e-3
    # deviations of the prior are quantiles of 500 draws
    assert stats.kstest(of_prior, "uniform").pvalue > 1e-4


def test_p_values_find_what_is_wrong():
    latents = latents_of()
    fit, releases = linear_case(torch.ones(SIZE, dtype=torch.float64), wrong=400.0)
    assert min(release_p_values(fit, releases, latents, N)) < 1e-3
    narrow = latents_of(std=0.5)
    found = 0
    for _ in range(20):
        fit, releases = linear_case(2.0 * torch.randn(SIZE, dtype=torch.float64))
        found += prior_p_value(fit, releases, narrow, N) < 0.01
    assert found >= 16  # 4 times too narrow; 18 are expected, of 4 parameters alone


def test_warnings_come_with_small_p_values_alone():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(note([0.4, 0.01, 0.9], 0.3)) == 1
    with pytest.warns(UserWarning, match="contradict each other"):
        note([0.4, 0.0001, 0.9], 0.3)
    with pytest.warns(UserWarning, match="contradict the prior"):
        note([0.4, 0.2, 0.9], 0.001)


def test_a_prior_far_off_is_reported():
    def model(x):
        m = pyro.sample("m", dist.Normal(torch.zeros((), dtype=torch.float64), 0.1))
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Normal(m, 1.0), obs=x)

    x = 1.5 + torch.randn(2000, dtype=torch.float64)
    with pytest.warns(UserWarning, match="contradict the prior"):
        found = posterior(
            model,
            x,
            accountant=dpb.PrivacyAccountant(epsilon=1.0, delta=1e-5),
            num_data=2000,
            num_simulated=8000,
        )
    assert "NOT LIKELY" in found.guarantee()
