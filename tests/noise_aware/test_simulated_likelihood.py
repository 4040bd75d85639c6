"""The synthetic likelihood against closed forms: a Gaussian mean, whose posterior given all
releases is known exactly, and moments by quadrature.
"""

import math
from functools import cache

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import integrate, stats

from torch_dpbayes.noise_aware import inference, posterior
from torch_dpbayes.noise_aware.covariates import PublicRows, Released
from torch_dpbayes.noise_aware.latents import Latents
from torch_dpbayes.noise_aware.likelihood import (
    LawDifferences,
    Release,
    Simulator,
    SyntheticLikelihood,
    find_mode,
    law_differences,
    moments,
)
from torch_dpbayes.noise_aware.records import ModelRecords

pytestmark = pytest.mark.usefixtures("recorded_once")
PRIOR_STD, NOISE_STD, N = 2.0, 1.5, 4000
ONE = torch.ones((), dtype=torch.float64)


def gaussian_mean(x):
    mean = pyro.sample("mean", dist.Normal(0 * ONE, PRIOR_STD * ONE))
    with pyro.plate("data", len(x)):
        pyro.sample("x", dist.Normal(mean, NOISE_STD), obs=x)


def records_of(model, *data, **options):
    settings = {"data_plate": "data", "count_is_public": True, "public": (), "chunk": 2000}
    return ModelRecords(model, data, **(settings | options))


def simulator_of(records, count=20_000, seed=3, n=N):
    return Simulator(records, Released(records, 0), n, count, seed)


def release_at(place, bound, value=0.0, noise=1.0):
    """Of scores that are clipped at ``bound``."""
    theta, whitening = torch.tensor([place]).double(), torch.eye(1).double() / bound
    return Release(theta, whitening, torch.tensor([value]).double(), noise)


@cache
def gaussian_records():
    return records_of(gaussian_mean, torch.zeros(100, dtype=torch.float64))


@cache
def gaussian_latents():
    return Latents(gaussian_records().density.prior, gaussian_records().read)


def likelihood_of(releases, count=20_000, few=4000, most_batches=1, n=N):
    """With the fit that it is made of."""
    records = gaussian_records()
    simulator = simulator_of(records, count, n=n)
    fit = find_mode(
        simulator, releases, gaussian_latents(), torch.zeros(1, dtype=torch.float64), 20
    )
    laws = law_differences(fit, [simulator], releases)
    made = SyntheticLikelihood(simulator, releases, fit, laws, few=few, most_batches=most_batches)
    return made, fit


def exact_posterior(releases, bound):
    """Mean and deviation of θ given T_k = Σ (x_i − θ_k)/(s²C) + noise, all linear in Σ x_i."""
    values = torch.tensor([float(r.value) for r in releases])
    places = torch.tensor([float(r.theta) for r in releases])
    variances = torch.tensor([r.noise_std**2 for r in releases])
    scale = NOISE_STD**2 * bound
    # each release is an observation of the mean of x with its own noise; those share x
    observed = places + values * scale / N
    of_noise = variances * (scale / N) ** 2
    weights = 1 / of_noise
    mean, variance = (weights * observed).sum() / weights.sum(), 1 / weights.sum()
    precision = 1 / (variance + NOISE_STD**2 / N)
    total = precision + PRIOR_STD**-2
    return float(precision * mean / total), float(total**-0.5)


@pytest.mark.chance(1e-4)
def test_posterior_of_a_gaussian_mean_is_exact(monkeypatch):
    """At a budget where the noise and the records count alike."""
    x = 0.7 + NOISE_STD * torch.randn(N, dtype=torch.float64)
    bound = 40.0 / NOISE_STD  # 40 standard deviations of a score: nothing is clipped
    monkeypatch.setattr(inference, "_DRAWS", 1000)
    found = posterior(
        gaussian_mean, x, epsilon=0.3, delta=1e-5, max_grad_norm=bound, num_simulated=8000
    )
    mean, std = exact_posterior(found.transcript.scores, bound)
    # 1000 draws and the simulation's own error: 4.5 standard deviations of either
    assert abs(float(found.mean["mean"]) - mean) < 0.25 * std
    assert float(found.stddev["mean"]) == pytest.approx(std, rel=0.1)


@pytest.mark.parametrize("noises", [(0.5, 0.7), (3.0, 200.0), (2000.0, 3000.0)])
def test_the_mode_and_its_width_are_those_of_the_closed_form(noises):
    """Scores that are not clipped, and two releases of which one may tell more; the prior counts
    where noise is large.
    """
    bound = 4.0
    places, truth = (0.2, -0.5), 1.0
    releases = [
        release_at(place, bound, N * (truth - place) / NOISE_STD**2 / bound, noise)
        for place, noise in zip(places, noises, strict=True)
    ]
    made, fit = likelihood_of(releases)
    mean, std = exact_posterior(releases, bound)
    assert float(fit.precision) ** -0.5 == pytest.approx(std, rel=0.05)
    assert float(made.precisions) ** -0.5 == pytest.approx(std, rel=0.05)
    assert float(made.modes) == pytest.approx(mean, abs=0.1 * std)


def test_the_error_of_the_simulation_is_counted():
    """nS + V + n²S_res/M, and the likelihood's width by it: most of what is clipped is left by the
    control variate, and M is n/8.
    """
    release = release_at(0.4, 0.2, 20.0, 10.0)
    made, fit = likelihood_of([release], count=500)
    found, n, prior = fit.moments, N, PRIOR_STD**-2
    wanted = n * found.covariance + n**2 / 500 * found.residual + 10.0**2
    assert float(n**2 / 500 * found.residual) > 0.3 * float(wanted)
    torch.testing.assert_close(fit.covariance, wanted)
    precision = float((n * found.jacobian) ** 2 / wanted) + prior
    assert float(fit.precision) == pytest.approx(precision, rel=1e-6)
    assert float(made.precisions) == pytest.approx(precision, rel=1e-6)
    assert made.simulation_error > 0.1
    # with more batches M is larger, and the mean has the control variate's error alone
    more, _ = likelihood_of([release], count=500, most_batches=40)
    assert more.num_simulated == 20_000 and more.simulation_error < made.simulation_error / 4


def test_moments_of_clipped_scores_are_those_of_quadrature():
    simulator = simulator_of(gaussian_records(), count=40_000)
    place, centre, bound = 0.4, 0.1, 0.5  # in units of the scores: a third are clipped
    release = release_at(place, bound)
    simulated = simulator.at(torch.tensor([centre], dtype=torch.float64))
    found = moments(simulator.statistics(simulated, [release]), simulated.scores, False)

    def expected(function):
        def integrand(x):
            score = (x - place) / NOISE_STD**2 / bound
            own = (x - centre) / NOISE_STD**2
            return function(max(-1.0, min(1.0, score)), own) * stats.norm.pdf(x, centre, NOISE_STD)

        return integrate.quad(integrand, centre - 12, centre + 12, limit=400)[0]

    mean = expected(lambda c, u: c)
    jacobian = expected(lambda c, u: c * u)
    variance = expected(lambda c, u: c * c) - mean**2
    left = variance - jacobian**2 * NOISE_STD**2
    error = math.sqrt(left / 40_000)  # the control variate leaves a tenth of the variance
    assert error < 0.4 * math.sqrt(variance / 40_000)
    assert float(found.mean) == pytest.approx(mean, abs=5 * error)
    assert float(found.jacobian) == pytest.approx(jacobian, abs=0.03)
    assert float(found.covariance) == pytest.approx(variance, abs=0.02)
    assert float(found.residual) == pytest.approx(left, abs=0.02)


def test_control_variate_removes_most_of_the_error():
    records, release = gaussian_records(), release_at(0.1, 2.0)
    means = {True: [], False: []}
    for seed in range(30):
        simulator = simulator_of(records, count=2000, seed=seed)
        simulated = simulator.at(torch.tensor([0.3], dtype=torch.float64))
        statistics = simulator.statistics(simulated, [release])
        means[True].append(float(moments(statistics, simulated.scores, False).mean))
        means[False].append(float(statistics.mean()))
    with_it, without = (torch.tensor(means[use]).std() for use in (True, False))
    assert with_it < without / 5  # nearly nothing is clipped: exactly linear but for the tails


def clipped_moment(theta, bound, power):
    """E of a clipped score's power, of scores at 0 and records at θ."""
    return integrate.quad(
        lambda x: (
            max(-1.0, min(1.0, x / NOISE_STD**2 / bound)) ** power
            * stats.norm.pdf(x, theta, NOISE_STD)
        ),
        theta - 12,
        theta + 12,
        limit=400,
    )[0]


def exact_log_likelihood(theta, release, bound, n):
    mean = clipped_moment(theta, bound, 1)
    variance = n * (clipped_moment(theta, bound, 2) - mean**2) + release.noise_std**2
    return -((float(release.value) - n * mean) ** 2) / variance / 2 - math.log(variance) / 2


@pytest.mark.parametrize("n, noise, reach", [(N, 30.0, 0.6), (30, 0.5, 1.5)])
def test_away_from_the_centre_moments_are_reweighted(n, noise, reach):
    """4000 records tell m to 1 %: of a log likelihood that falls by hundreds. Of 30 records it
    falls by a few, and half a unit of them is the variance's.
    """
    release = release_at(0.0, 0.5, n / 40, noise)
    likelihood, fit = likelihood_of([release], 40_000, most_batches=2, n=n)
    points = fit.centre + torch.linspace(-reach, reach, 5, dtype=torch.float64)[:, None]
    found = likelihood(points)
    wanted = torch.tensor([exact_log_likelihood(float(t), release, 0.5, n) for t in points])
    assert likelihood.far == 0
    fall = float(wanted.max() - wanted.min())
    apart = (found - found[2]) - (wanted - wanted[2])
    assert float(apart.abs().max()) < (0.05 * fall if n == N else 0.15)


def test_a_far_point_gets_records_of_its_own():
    """Four deviations of a record away, where the best of records at the mode are not."""
    release = release_at(0.0, 6.0, 0.0, 500.0)
    likelihood, fit = likelihood_of([release], few=2000)
    found = likelihood(torch.tensor([[6.0]], dtype=torch.float64))
    wanted = exact_log_likelihood(6.0, release, 6.0, N) - exact_log_likelihood(0.0, release, 6.0, N)
    assert likelihood.far == 0
    at_zero = float(likelihood(torch.zeros(1, 1, dtype=torch.float64)))
    assert float(found) - at_zero == pytest.approx(wanted, abs=0.3)


def test_a_law_of_the_covariates_moves_the_mean_and_its_slope():
    """Of a mixture over two laws: that of the likelihoods with means moved by them, by hand."""
    release = release_at(0.0, 4.0, 300.0, 30.0)
    alone, fit = likelihood_of([release])
    shifts = torch.tensor([[0.01], [-0.02]], dtype=torch.float64)
    tilts = torch.tensor([[[0.02]], [[-0.03]]], dtype=torch.float64)
    laws = LawDifferences(shifts, tilts)
    records = gaussian_records()
    made = SyntheticLikelihood(
        simulator_of(records), [release], fit, laws, few=4000, most_batches=1
    )
    found = fit.moments
    std = float(fit.covariance) ** 0.5
    points = fit.centre + torch.linspace(-0.2, 0.2, 5, dtype=torch.float64)[:, None]

    def expected(theta):
        each = []
        for shift, tilt in zip(shifts.flatten(), tilts.flatten(), strict=True):
            moved = float(theta - fit.centre)
            slope = float(found.jacobian + tilt)
            start = float(found.mean + shift)
            log_p = stats.norm.logpdf(300.0, N * (start + slope * moved), std)
            # Z_l, of the Gaussian prior and a mean that is linear
            middle = N * (start - slope * float(fit.centre))
            log_z = stats.norm.logpdf(300.0, middle, math.hypot(std, N * slope * PRIOR_STD))
            each.append(log_p - log_z)
        return float(torch.tensor(each).logsumexp(0))

    wanted = torch.tensor([expected(theta) for theta in points])
    for own in (made.gaussian(points), made(points)):
        torch.testing.assert_close(own - own[2], (wanted - wanted[2]).double(), rtol=0.02, atol=0.1)


@pytest.mark.chance(1e-6)
def test_pairs_give_moments_given_the_covariates():
    """Rows of x far apart: S is what y varies by given x, not what x makes c vary by, which is 19
    times as much. S of 20,000 records has a relative error of 2.1 %.
    """

    def model(x, y):
        w = pyro.sample("w", dist.Normal(0 * ONE, ONE))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(w * x, 1.0), obs=y)

    x = 3 * torch.randn(500, dtype=torch.float64)
    records = records_of(model, x, torch.zeros(500, dtype=torch.float64), public=("x",))
    rows = PublicRows({0: x}, is_paired=True, seed=0)
    simulator = Simulator(records, rows, 500, 20_000, 1)
    release = Release(
        torch.tensor([1.0], dtype=torch.float64),
        torch.eye(1, dtype=torch.float64) / 1000.0,
        torch.zeros(1, dtype=torch.float64),
        1.0,
    )
    simulated = simulator.at(torch.zeros(1, dtype=torch.float64))
    found = moments(simulator.statistics(simulated, [release]), simulated.scores, True)
    # c = x(y − x)/1000 with y ~ N(0, 1): mean −x², variance x² given x
    square = float(x.square().mean())
    assert float(found.covariance) * 1e6 == pytest.approx(square, rel=0.11)
    assert float(found.mean) * 1e3 == pytest.approx(-square, rel=0.03)
