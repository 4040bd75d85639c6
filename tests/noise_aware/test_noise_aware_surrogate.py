"""The surrogate against simulated transcripts whose law is known exactly: squared errors in
posterior units are χ² distributed.

Two-sided tests at a significance of 1e-6 each. Every defect that the formula guards against is also
put in on purpose, and has to be found.
"""

import math

import pytest
import torch
from scipy.stats import chi2

from torch_dpbayes.noise_aware import surrogate as module
from torch_dpbayes.noise_aware.modes import mode
from torch_dpbayes.noise_aware.priors import GaussianPrior
from torch_dpbayes.noise_aware.response import (
    LinearResponse,
    NormalFeatureResponse,
    OuterProductResponse,
    denoised,
)
from torch_dpbayes.noise_aware.scores import Bernoulli, Poisson, slopes
from torch_dpbayes.noise_aware.surrogate import AnySurrogate, Surrogate, positive
from torch_dpbayes.noise_aware.transcript import GradientRelease
from torch_dpbayes.noise_aware.uncertain_level import UncertainLevel

DIMENSION = 4
SIGNIFICANCE = 1e-6
UNCLIPPED = torch.tensor(1e30, dtype=torch.float64)
EYE = torch.eye(DIMENSION, dtype=torch.float64)
CURVATURE = torch.diag(torch.tensor([4.0, 10.0, 25.0, 60.0], dtype=torch.float64)) + 1.5


def symmetric(std: float) -> torch.Tensor:
    noise = std * torch.randn(DIMENSION, DIMENSION, dtype=torch.float64)
    return (noise + noise.T) / 2


def is_calibrated(
    *,
    noise_std=6.0,
    rate=1.0,
    curvature_std=0.0,
    believed_curvature_std=None,
    scale=1.0,
    offsets=(1.0, -0.5),
) -> bool:
    """Parameters from the prior, the maximum of the likelihood from its law, releases from
    theirs.
    """
    prior_std, data_sets, curvature = 1.0, 400, scale * CURVATURE
    if believed_curvature_std is None:
        believed_curvature_std = curvature_std
    prior = GaussianPrior(
        torch.zeros(DIMENSION, dtype=torch.float64),
        torch.full((DIMENSION,), prior_std**-2, dtype=torch.float64),
    )
    root = torch.linalg.cholesky(curvature)
    total = 0.0
    for _ in range(data_sets):
        truth = prior_std * torch.randn(DIMENSION, dtype=torch.float64)
        best = truth + torch.linalg.solve(root.T, torch.randn(DIMENSION, dtype=torch.float64))
        releases = []
        for std, offset in zip((1.5 * noise_std, noise_std), offsets):
            point = truth + offset
            sampling = (
                math.sqrt((1 - rate) / rate) * root @ torch.randn(DIMENSION, dtype=torch.float64)
            )
            value = (
                curvature @ (point - best)
                + std * torch.randn(DIMENSION, dtype=torch.float64)
                + sampling
            )
            releases.append(GradientRelease(point, value, std, rate))
        believed = curvature + symmetric(curvature_std)
        found = Surrogate(
            releases, LinearResponse(believed), believed, believed_curvature_std, releases[-1].theta
        )
        precision, product = found.precision(truth)
        precision = precision + torch.diag(prior.precision)
        error = torch.linalg.solve(precision, product) - truth
        total += float(error @ precision @ error)
    count = data_sets * DIMENSION
    return bool(chi2.ppf(SIGNIFICANCE / 2, count) < total < chi2.ppf(1 - SIGNIFICANCE / 2, count))


def test_intervals_count_the_privacy_noise(monkeypatch):
    assert is_calibrated()
    monkeypatch.setattr(
        module, "noises", lambda releases, dtype: torch.tensor([[1e-3, 0.0]] * 2, dtype=dtype)
    )
    assert not is_calibrated()


def test_the_privacy_noise_counts_once(monkeypatch):
    honest = module.noises
    assert is_calibrated(noise_std=50.0, scale=10.0)
    monkeypatch.setattr(module, "noises", lambda releases, dtype: 2 * honest(releases, dtype))
    assert not is_calibrated(noise_std=50.0, scale=10.0)


def test_the_noise_of_sampling_records_counts(monkeypatch):
    assert is_calibrated(noise_std=1.0, rate=0.2)
    monkeypatch.setattr(
        module,
        "noises",
        lambda releases, dtype: torch.tensor([[r.noise_std**2, 0.0] for r in releases]).to(dtype),
    )
    assert not is_calibrated(noise_std=1.0, rate=0.2)


def test_noise_in_the_curvature_counts():
    # so far from the maximum that an error in the curvature outweighs everything else, and small
    # enough beside it
    far = {"scale": 10.0, "offsets": (1.0, 1.0), "noise_std": 2.0, "curvature_std": 10.0}
    assert is_calibrated(**far)
    assert not is_calibrated(**far, believed_curvature_std=0.0)


def test_the_fast_formula_for_a_quadratic_is_the_definition():
    releases = [
        GradientRelease(
            torch.randn(4, dtype=torch.float64), torch.randn(4, dtype=torch.float64), 2.0
        )
        for _ in range(3)
    ]
    found = Surrogate(releases, LinearResponse(CURVATURE), CURVATURE, 3.0, releases[-1].theta)
    weights = 1 / torch.tensor(
        [4.0 + 4.5 * float((r.theta - releases[-1].theta).square().sum()) for r in releases],
        dtype=torch.float64,
    )
    weights /= weights.sum()
    point, gradient = (
        sum(w * value for w, value in zip(weights, values))
        for values in ([r.theta for r in releases], [r.value for r in releases])
    )
    theta = torch.randn(5, 4, dtype=torch.float64)
    for at, value in zip(theta, found.log_likelihood(theta)):
        delta = point - at
        covariance = (
            CURVATURE
            + 4 * weights.square().sum() * EYE
            + 4.5 * (delta.square().sum() * EYE + torch.outer(delta, delta))
        )
        expected = torch.distributions.MultivariateNormal(CURVATURE @ delta, covariance).log_prob(
            gradient
        ) + 2 * math.log(2 * math.pi)
        assert float(value) == pytest.approx(float(expected), rel=1e-9)


def test_without_noise_it_is_the_posterior_of_the_data_and_with_endless_noise_the_prior():
    point, best = torch.ones(4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    for std, expected in ((1e-6, CURVATURE), (1e6, 0 * CURVATURE)):
        release = GradientRelease(point, CURVATURE @ (point - best), std)
        precision, product = Surrogate(
            [release], LinearResponse(CURVATURE), CURVATURE, 0.0, point
        ).precision(point)
        torch.testing.assert_close(precision, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(product, expected @ best, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "target, derivative",
    [(Bernoulli(), torch.sigmoid), (Poisson(1e9), torch.exp)],
    ids=["bernoulli", "poisson"],
)
def test_the_feature_model_is_the_mean_over_normal_features(target, derivative):
    size, records = 3, 400_000
    covariance = torch.tensor(
        [[1.0, 0.3, 0.0], [0.3, 0.5, 0.1], [0.0, 0.1, 0.2]], dtype=torch.float64
    )
    theta = torch.tensor([0.9, -0.6, 1.2], dtype=torch.float64)
    response = NormalFeatureResponse(target, UNCLIPPED, 1000 * covariance, 1000)
    x = torch.randn(records, size, dtype=torch.float64) @ torch.linalg.cholesky(covariance).T
    terms = 1000 * derivative(x @ theta)[:, None] * x
    error = terms.std(0) / math.sqrt(records)
    # three comparisons: below 1e-8
    assert bool(((response.value(theta) - terms.mean(0)).abs() < 6 * error).all())
    slope = torch.autograd.functional.jacobian(response.value, theta)
    torch.testing.assert_close(response.slope(theta), slope, rtol=1e-4, atol=1e-4)


@pytest.mark.first_cases(4)
@pytest.mark.parametrize("std", [0.1, 2.0, 9.0, 30.0, 500.0])
@pytest.mark.parametrize("bound", [1e30, 0.5])
def test_the_feature_models_gradient_and_curvature_are_of_one_function(std, bound):
    """However large the linear predictors are; and the curvature is that of normal features."""
    bound = torch.tensor(bound, dtype=torch.float64)
    response = NormalFeatureResponse(
        Bernoulli(), bound, torch.eye(1, dtype=torch.float64) * 1000, 1000
    )
    theta = torch.tensor([std], dtype=torch.float64)
    slope = torch.autograd.functional.jacobian(response.value, theta)
    torch.testing.assert_close(response.slope(theta), slope, rtol=1e-9, atol=0.0)
    if std > 100:  # further out than the table goes
        return
    u = torch.linspace(-60, 60, 240_001, dtype=torch.float64)
    weights = torch.exp(-(u / std).square() / 2)
    expected = (u / std).square() * slopes(Bernoulli(), u, bound)
    exact = 1000 * float((weights * expected).sum() / weights.sum())
    if std > 10:  # the grid ends within the normal distribution
        exact *= math.erf(60 / std / math.sqrt(2))
    assert float(slope) == pytest.approx(exact, rel=2e-3)


@pytest.mark.parametrize("length", [0.0, 1.0, 30.0, 1000.0])
def test_the_feature_models_curvature_is_positive_however_large_the_parameters(length):
    response = NormalFeatureResponse(Bernoulli(), UNCLIPPED, CURVATURE, 100)
    assert (
        float(
            torch.linalg.eigvalsh(response.slope(length * torch.ones(4, dtype=torch.float64))).min()
        )
        > 0
    )


def agreement_of(believed: torch.Tensor, *, mode_offset: float = 0.0) -> float:
    """Of a run's releases of a quadratic log likelihood with the curvature ``CURVATURE``."""
    points = torch.randn(8, DIMENSION, dtype=torch.float64)
    releases = [
        GradientRelease(p, CURVATURE @ p + 3.0 * torch.randn(DIMENSION, dtype=torch.float64), 3.0)
        for p in points
    ]
    found = Surrogate(releases, LinearResponse(believed), believed, 0.0, releases[-1].theta)
    return found.agreement(releases[-1].theta + mode_offset, CURVATURE)


def test_releases_that_agree_with_the_curvature_are_let_pass():
    # the tail probability of what is let pass is conservative; 20 comparisons
    assert min(agreement_of(CURVATURE) for _ in range(20)) > SIGNIFICANCE / 20


def test_releases_that_contradict_the_curvature_are_told():
    assert agreement_of(3 * CURVATURE) < SIGNIFICANCE
    assert agreement_of(CURVATURE, mode_offset=3.0) < SIGNIFICANCE


def test_small_eigenvalues_above_the_noise_stay_as_they_are():
    """Correlated features: what hardly shows beside the largest eigenvalue is released all the
    same, and a larger value would make the posterior too narrow there.
    """
    exact = torch.diag(torch.tensor([1e5, 1e3, 50.0, 5.0], dtype=torch.float64))
    noisy = exact + symmetric(0.1)
    kept, _ = denoised(noisy, 0.1)
    for found in (kept, positive(noisy, 0.1)):
        # ten standard deviations
        assert float((found - exact).diagonal().abs().max()) < 1.0


def test_releases_from_far_away_do_not_outvote_the_last_ones():
    """The response is half of the truth; with little noise the mode is where the last release
    says.
    """
    response = NormalFeatureResponse(Bernoulli(), UNCLIPPED, 1000 * CURVATURE, 1000)
    truth = torch.tensor([0.3, -0.2, 0.1, 0.2], dtype=torch.float64)
    slope = response.slope(truth)

    def release(apart: float, std: float) -> GradientRelease:
        value = 2 * (response.value(truth + apart) - response.value(truth))
        return GradientRelease(truth + apart, value, std)

    last = release(0.001, 1e-2)
    both = Surrogate([release(0.3, 1e-2), last], response, slope, 0.0, last.theta)
    alone = Surrogate([last], response, slope, 0.0, last.theta)
    prior = GaussianPrior(torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(mode(both, prior), mode(alone, prior), rtol=0.0, atol=1e-3)


def with_error_in_units(units, records=None):
    releases = [
        GradientRelease(torch.randn(DIMENSION).double(), 5 * torch.randn(DIMENSION).double(), 3.0)
        for _ in range(3)
    ]
    centre = releases[-1].theta
    response = LinearResponse(CURVATURE)
    if records is not None:
        response = OuterProductResponse(CURVATURE, centre, records)
    return Surrogate(releases, response, CURVATURE, 2.0, centre, None, units)


@pytest.mark.parametrize("records", [None, 5])
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_a_change_of_rank_one_is_the_dense_formula(factor, records):
    """The constant as well, which weighs surrogates of different levels against each other."""
    units = factor * torch.tensor([1.0, 0.5, 0.2, 0.9], dtype=torch.float64)
    found = with_error_in_units(units, records)
    theta = torch.randn(7, DIMENSION, dtype=torch.float64)
    torch.testing.assert_close(
        found.log_likelihood(theta), AnySurrogate.log_likelihood(found, theta)
    )
    torch.testing.assert_close(found.log_likelihood(theta[0]), found.log_likelihood(theta)[0])


@pytest.mark.parametrize("records", [None, 5])
def test_surrogates_of_several_levels_are_evaluated_together(records):
    parts = [with_error_in_units(torch.full((DIMENSION,), u).double(), records) for u in (1.0, 0.5)]
    found, theta = UncertainLevel(parts, parts[0]), torch.randn(5, DIMENSION, dtype=torch.float64)
    alone = torch.stack([part.log_likelihood(theta) for part in parts]).logsumexp(0)
    torch.testing.assert_close(found.log_likelihood(theta), alone)
    torch.testing.assert_close(found.log_likelihood(theta[0]), alone[0])


def test_the_error_in_units_has_the_covariance_that_is_stated():
    """Of S E S Δ for the symmetric noise E; six standard errors of each entry."""
    units, repeats = torch.tensor([1.0, 0.5, 0.2, 0.9], dtype=torch.float64), 40_000
    found = with_error_in_units(units)
    theta = torch.randn(DIMENSION, dtype=torch.float64)
    noise = torch.randn(repeats, DIMENSION, DIMENSION, dtype=torch.float64)
    errors = 2.0 * units[:, None] * (noise + noise.mT) / 2 * units
    moved = errors @ (found._point - theta)
    products = moved[:, :, None] * moved[:, None, :]
    limit = 6 * products.std(0) / math.sqrt(repeats)
    stated = found._of_curvature_error(theta)
    assert bool(((products.mean(0) - stated).abs() < limit).all())


def test_a_gradient_sum_is_no_longer_than_its_outer_products_allow():
    """A quadratic log likelihood: S is its curvature and the square of the mean gradient."""
    point, truth = torch.randn(2, DIMENSION, dtype=torch.float64)
    total = CURVATURE @ (point - truth)
    outer = CURVATURE + total.outer(total) / 20
    response = OuterProductResponse(outer, point, 20)
    torch.testing.assert_close(response.value(truth), -total)
    torch.testing.assert_close(response.slope(point), outer)
    for theta in (truth, point + 1e3 * (truth - point)):
        torch.testing.assert_close(
            response.slope(theta), torch.autograd.functional.jacobian(response.value, theta)
        )
        value = response.value(theta)
        assert float(value @ torch.linalg.solve(outer, value)) < 20
        straight = response.straight(theta)
        torch.testing.assert_close(outer @ (straight - point), value)
        torch.testing.assert_close(
            response.slope_of_straight(theta),
            torch.autograd.functional.jacobian(response.straight, theta),
        )
    many = OuterProductResponse(outer, point, 10**15)
    torch.testing.assert_close(many.value(truth), outer @ (truth - point))
