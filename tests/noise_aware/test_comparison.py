"""Forecasts of ``compare_methods`` beside runs of the methods themselves."""

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from scipy.stats import chi2

import torch_dpbayes as dpb
from torch_dpbayes.noise_aware import compare_methods, laplace
from torch_dpbayes.noise_aware.comparison import MethodComparison, MethodForecast

DOUBLE = torch.float64
COUNT, SIZE, BOUND = 2000, 2, 4.0


def model(x):
    mean = pyro.sample("mean", dist.Normal(torch.zeros(SIZE, dtype=DOUBLE), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("x", dist.Normal(mean, 1.0).to_event(1), obs=x)


def data():
    """Records, few of whose gradients are clipped on the way from the prior's mean, as forecasts
    assume; mean and standard deviation of their posterior.
    """
    x = torch.randn(COUNT, SIZE, dtype=DOUBLE) + 0.5 * torch.randn(SIZE, dtype=DOUBLE)
    return x, x.sum(0) / (COUNT + 1), (COUNT + 1) ** -0.5


def forecast(epsilon, method):
    comparison = compare_methods(
        num_data=COUNT, dimension=SIZE, epsilon=epsilon, delta=1e-5, max_grad_norm=BOUND,
        information=1.0,
    )  # fmt: skip
    (found,) = (f for f in comparison.forecasts if f.method.startswith(method))
    return found, comparison


def require_within(found, expected, factor):
    assert expected / factor < found < expected * factor, (found, expected)


def require_error_within(errors, expected, factor):
    """Normal errors of whatever deviation in this range fail once in half a million runs."""
    values = torch.stack(errors).flatten()
    total = float((values / expected).square().sum())
    low, high = chi2.ppf(1e-6, len(values)), chi2.isf(1e-6, len(values))
    assert low / factor**2 < total < high * factor**2, (errors, expected)


@pytest.mark.thorough
@pytest.mark.parametrize("epsilon", [0.5, 5.0])
def test_laplace(epsilon):
    expected, _ = forecast(epsilon, "noise_aware.laplace")
    widths, errors = [], []
    for _ in range(6):
        x, mean, stddev = data()
        post = laplace(model, x, epsilon=epsilon, delta=1e-5, max_grad_norm=BOUND)
        widths.append(post.stddev["mean"] / stddev)
        errors.append((post.mean["mean"] - mean) / stddev)
    require_within(float(torch.stack(widths).mean()), expected.width, 1.5)
    require_error_within(errors, expected.error, 1.5)


@pytest.mark.thorough
def test_dpsvi():
    expected, comparison = forecast(3.0, "infer.DPSVI")
    steps, widths, errors = 160, [], []
    for _ in range(3):
        pyro.clear_param_store()
        x, mean, stddev = data()
        svi = dpb.infer.DPSVI(
            model,
            AutoNormal(model, init_scale=stddev),
            pyro.optim.Adam({"lr": 0.03}),
            Trace_ELBO(),
            max_grad_norm=BOUND,
            noise_multiplier=comparison.noise_multiplier * math.sqrt(steps),
            expected_batch_size=COUNT,
        )
        svi.run(steps, x)
        assert svi.accountant.get_epsilon(1e-5) == pytest.approx(3.0, rel=0.02)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            post = svi.posterior()
        widths.append(post.stddev["mean"] / stddev)
        errors.append((post.mean["mean"] - mean) / stddev)
    require_within(float(torch.stack(widths).median()), expected.width, 2.0)
    require_error_within(errors, expected.error, 2.0)


@pytest.mark.parametrize("epsilon", [0.3, 4.0])
def test_samplers(epsilon):
    """DP-SGLD at temperature 1 on full batches, by its update equation; chains in parallel."""
    expected, comparison = forecast(epsilon, "optim, temperature 1")
    chains, steps, precision = 400, 1500, COUNT + 1.0
    noise = comparison.noise_multiplier * BOUND * math.sqrt(steps)
    step = 2 / noise**2
    mode = torch.randn(chains, dtype=DOUBLE) * (1 - 1 / precision) ** 0.5
    theta, path = torch.zeros(chains, dtype=DOUBLE), []
    for k in range(steps):
        theta = theta - step * (
            precision * (theta - mode) + noise * torch.randn(chains, dtype=DOUBLE)
        )
        if k >= steps // 2:
            path.append(theta)
    iterates = torch.stack(path)
    scale = precision**0.5
    width = float(iterates.var(0).mean().sqrt()) * scale
    error = float((iterates.mean(0) - mode).square().mean().sqrt()) * scale
    require_within(width, expected.width, 1.2)
    require_within(error, expected.error, 1.2)


@pytest.mark.thorough
def test_the_penalty_kernel():
    """From starts among the posterior's draws: a start dozens of its deviations away is left at a
    constant speed, and the error of chains that have not arrived is not what is foretold.
    """
    epsilon = 30.0
    expected, comparison = forecast(epsilon, "mcmc.DPPenalty")
    iterations, errors = 500, []
    noise = comparison.noise_multiplier * math.sqrt(iterations)
    for _ in range(4):
        x, mean, stddev = data()
        kernel = dpb.mcmc.DPPenalty(
            model,
            # the squared distance moved in all is largest where the noise on a ratio is about 1
            proposal_scale=1.4 / (noise * BOUND * math.sqrt(SIZE)),
            log_ratio_slope=BOUND,
            noise_multiplier=noise,
            accountant=dpb.PrivacyAccountant(neighboring="replace_one"),
        )
        chain = MCMC(
            kernel,
            num_samples=iterations,
            warmup_steps=0,
            initial_params={"mean": mean + stddev * torch.randn(SIZE, dtype=DOUBLE)},
            disable_progbar=True,
        )
        chain.run(x)
        draws = chain.get_samples()["mean"][iterations // 2 :]
        errors.append((draws.mean(0) - mean) / stddev)
    require_error_within(errors, expected.error, 2.0)


def test_what_the_table_says():
    comparison = compare_methods(
        num_data=1000, dimension=8, epsilon=1.0, delta=1e-5, max_grad_norm=1.0
    )
    text = str(comparison)
    for forecast in comparison.forecasts:
        assert forecast.method in text
    assert comparison.recommended.method in text.splitlines()[-1]
    # chains stay where they are, and say too little about how far that is
    by_name = {f.method: f for f in comparison.forecasts}
    assert not by_name["mcmc.DPPenalty"].covers
    assert by_name["noise_aware.laplace"].covers


@pytest.mark.parametrize("size", [4001, 20_000, 10**9])
def test_beyond_what_a_full_curvature_can_be_of_the_diagonal_is_named(size):
    comparison = compare_methods(
        num_data=10**6, dimension=size, epsilon=1.0, delta=1e-5, max_grad_norm=1.0
    )
    assert comparison.recommended.method == 'noise_aware.laplace(curvature="diagonal")'
    by_name = {f.method: f for f in comparison.forecasts}
    assert "noise_aware.laplace" not in by_name
    assert not by_name["infer.DPSVI, posterior()"].is_possible
    assert f"{8 * (size + 1):,} steps" in by_name["infer.DPSVI, posterior()"].note
    (cooled,) = (f for f in comparison.forecasts if "from_run()" in f.note)
    assert f"{4 * (size + 2):,} samples" in cooled.note


def test_up_to_there_it_is_the_full_curvature_and_steps_are_counted():
    comparison = compare_methods(
        num_data=10**6, dimension=4000, epsilon=1.0, delta=1e-5, max_grad_norm=1.0
    )
    by_name = {f.method: f for f in comparison.forecasts}
    assert by_name["infer.DPSVI, posterior()"].is_possible
    assert "32,008 steps" in by_name["infer.DPSVI, posterior()"].note
    assert "noise_aware.laplace" in by_name


def test_what_is_not_possible_is_not_recommended():
    sharp = MethodForecast("sharp", 1.2, 0.1, is_possible=False)
    wide = MethodForecast("wide", 3.0, 0.1)
    assert MethodComparison((sharp, wide), 0.1, 5.0).recommended is wide


@pytest.mark.parametrize("name", ["prior_std", "max_grad_norm", "information", "log_ratio_slope"])
def test_extreme_numbers_have_a_forecast_or_are_refused_by_name(name):
    settings = {
        "num_data": 100, "dimension": 2, "epsilon": 1.0, "delta": 1e-5, "max_grad_norm": 1.0
    }  # fmt: skip
    for value in (1e-30, 1e30):
        found = compare_methods(**settings | {name: value})
        assert all(math.isfinite(f.width) and math.isfinite(f.error) for f in found.forecasts)
    for value in (1e-200, 1e200):
        with pytest.raises(ValueError, match=f"{name} = .* is too extreme for a forecast"):
            compare_methods(**settings | {name: value})


@pytest.mark.parametrize("neighboring", ["replace_one", "add_or_remove_one"])
def test_the_ends_of_the_range(neighboring):
    def ends(epsilon, count):
        found = compare_methods(
            num_data=count, dimension=3, epsilon=epsilon, delta=1e-6, max_grad_norm=1.0,
            prior_std=2.0, neighboring=neighboring,
        )  # fmt: skip
        return {f.method: f for f in found.forecasts}, found

    rich, found = ends(100.0, 10**7)
    for name in ("noise_aware.laplace", "infer.DPSVI, posterior()", "optim, temperature 1"):
        assert rich[name].width == pytest.approx(1.0, abs=0.02)
        assert rich[name].error < 0.05
    poor, found = ends(0.01, 100)
    prior = 2.0 / found.posterior_std
    assert poor["noise_aware.laplace"].width == pytest.approx(prior, rel=0.01)
    assert poor["mcmc.DPHMC"].width < 0.01 * prior  # it cannot move


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"num_data": 0}, "num_data"),
        ({"dimension": 2.5}, "dimension"),
        ({"max_grad_norm": math.inf}, "max_grad_norm"),
        ({"prior_std": 0.0}, "prior_std"),
        ({"information": -1.0}, "information"),
        ({"epsilon": -1.0}, "epsilon"),
    ],
)
def test_bad_numbers(how, match):
    settings = {
        "num_data": 100, "dimension": 2, "epsilon": 1.0, "delta": 1e-5, "max_grad_norm": 1.0
    } | how  # fmt: skip
    with pytest.raises((ValueError, TypeError), match=match):
        compare_methods(**settings)
