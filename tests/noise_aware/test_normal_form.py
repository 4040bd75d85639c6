"""The normal form against its definition, and against the surrogate of the Newton runs."""

import math

import pytest
import torch

from torch_dpbayes.noise_aware.normal_form import NormalForm, roots, sure_part
from torch_dpbayes.noise_aware.priors import GaussianPrior
from torch_dpbayes.noise_aware.response import LinearResponse
from torch_dpbayes.noise_aware.surrogate import Surrogate
from torch_dpbayes.noise_aware.transcript import GradientRelease

DOUBLE = torch.float64


def positive(size, scale=1.0):
    root = torch.randn(size, 2 * size, dtype=DOUBLE)
    return scale * root @ root.T / (2 * size)


def form(size=3, std=0.7):
    curvature, noise, shape = positive(size, 40.0), positive(size, 10.0), positive(size, 5.0)
    point, gradient = torch.randn(size, dtype=DOUBLE), 5 * torch.randn(size, dtype=DOUBLE)
    return NormalForm(point, gradient, noise, curvature, shape, std), (noise, shape, gradient)


def test_it_is_the_gaussian_of_its_definition():
    found, (noise, shape, gradient) = form()
    thetas = torch.randn(5, 3, dtype=DOUBLE)
    values = []
    for theta in thetas:
        delta = found.centre - theta
        moved = shape @ delta
        covariance = found.curvature + noise
        covariance = covariance + 0.5 * 0.7**2 * (
            delta @ moved * shape + moved[:, None] * moved[None, :]
        )
        normal = torch.distributions.MultivariateNormal(found.curvature @ delta, covariance)
        values.append(normal.log_prob(gradient))
    expected = torch.stack(values)
    value = found.log_likelihood(thetas)
    torch.testing.assert_close(value - value[0], expected - expected[0])


def test_the_error_of_the_curvature_has_the_covariance_that_counts():
    found, (_, shape, _) = form()
    half, _ = roots(shape)
    count = 200_000
    draws = torch.randn(count, 3, 3, dtype=DOUBLE)
    errors = 0.7 * half @ (draws + draws.mT) / 2 @ half
    delta = torch.tensor([0.5, -1.0, 2.0], dtype=DOUBLE)
    covariance = torch.cov((errors @ delta).T)
    expected = found.of_curvature_error(delta)
    variances = expected.diag()
    standard_errors = ((variances.outer(variances) + expected**2) / count).sqrt()
    # one of the nine passes 6 in about 1e8 runs
    assert float(((covariance - expected) / standard_errors).abs().max()) < 6.0


@pytest.mark.parametrize("std", [0.1, 3.0])
def test_a_prior_far_away_does_not_take_the_place_of_the_records(std):
    """The run was where likelihood and prior pull alike, thirty posterior deviations from the
    prior's mean; a third of the curvature is noise, or a hundredth.
    """
    size = 3
    eye, point = torch.eye(size, dtype=DOUBLE), 10 * torch.ones(size, dtype=DOUBLE)
    prior = GaussianPrior(torch.zeros(size, dtype=DOUBLE), torch.ones(size, dtype=DOUBLE))
    found = NormalForm(point, -point, 0.1 * eye, 10.0 * eye, eye, std)
    assert (found.plateau(prior) is None) == (std < 1)
    assert found.plateau(GaussianPrior(prior.mean, 1e-3 * prior.precision)) is None


def test_a_plateau_has_no_say_and_what_is_near_stays():
    """A curvature known to a third, under a prior forty times as wide as the posterior."""
    eye = torch.eye(2, dtype=DOUBLE)
    gradient = torch.tensor([1.0, -0.5], dtype=DOUBLE)
    full = NormalForm(torch.zeros(2, dtype=DOUBLE), gradient, eye, eye, eye, 0.33)
    found = full.without_plateau()
    near, far = torch.randn(9, 2, dtype=DOUBLE), 40 * torch.tensor([[1.0, 0.0]], dtype=DOUBLE)
    torch.testing.assert_close(found.log_likelihood(near), full.log_likelihood(near))
    for mine, theirs in zip(found.precision(near[0]), full.precision(near[0]), strict=True):
        torch.testing.assert_close(mine, theirs)
    at_centre = full.log_likelihood(full.centre)
    assert float(full.log_likelihood(far) - at_centre) > -15  # 1600 times the area makes up for it
    assert float(found.log_likelihood(far) - at_centre) < -50


def test_beyond_its_reach_the_error_of_the_curvature_grows_no_more():
    """In one dimension, by the formula; nothing in it is 1."""
    gradient, noise, curvature, shape, std = 1.5, 3.0, 2.0, 0.7, 0.4
    given = (torch.full((1,) * k, v, dtype=DOUBLE) for k, v in zip(
        (1, 1, 2, 2, 2), (0.3, gradient, noise, curvature, shape), strict=True
    ))  # fmt: skip
    found = NormalForm(*given, std).without_plateau()
    # √(ΔᵀHΔ) with H = F²/(F + V)
    longest = abs(gradient) / math.sqrt(curvature + noise) + 4.891638  # √χ², one in 10⁶
    longest *= math.sqrt(curvature + noise) / curvature
    for away in (0.5, 0.99 * longest, 1.01 * longest, 5 * longest):
        square = min(away, longest) ** 2 * (std * shape) ** 2
        variance = curvature + noise + square
        expected = -((gradient - curvature * away) ** 2) / variance / 2 - math.log(variance) / 2
        theta = torch.tensor([0.3 - away], dtype=DOUBLE)
        # R is in units of which M is stated: a constant
        constant = math.log(shape) / 2
        assert float(found.log_likelihood(theta)) == pytest.approx(expected + constant)


def test_without_the_plateau_intervals_cover_what_they_say_and_are_shorter():
    """One dimension, by sums over a grid; the truth is where a run that arrived leaves it."""
    count, error, variance = 1000, 1 / 3, 1.0
    grid = torch.sinh(torch.linspace(-6, 6, 2001, dtype=DOUBLE))
    measure = torch.gradient(grid)[0] * torch.exp(-0.5 * (grid / 45) ** 2)
    curvatures = 1 + error * torch.randn(count, dtype=DOUBLE)
    points = torch.randn(count, dtype=DOUBLE)
    gradients = points + variance**0.5 * torch.randn(count, dtype=DOUBLE)
    truths = torch.randn(count, dtype=DOUBLE)
    covered, widths = {True: 0, False: 0}, {True: [], False: []}
    for curvature, point, gradient, truth in zip(
        curvatures, points, gradients, truths, strict=True
    ):
        form = NormalForm(
            point[None],
            gradient[None],
            variance * torch.ones(1, 1, dtype=DOUBLE),
            curvature.clamp_min(0.1 * error) * torch.ones(1, 1, dtype=DOUBLE),
            torch.ones(1, 1, dtype=DOUBLE),
            error,
        )
        for plateau, some in ((True, form), (False, form.without_plateau())):
            mass = some.log_likelihood(grid[:, None]).exp() * measure
            cdf = mass.cumsum(0) / mass.sum()
            low, high = (grid[int(torch.searchsorted(cdf, p))] for p in (0.05, 0.95))
            covered[plateau] += int(low < truth < high)
            widths[plateau].append(float(high - low) / 3.29)
    share = covered[False] / count
    assert 0.85 < share < covered[True] / count + 0.01  # five standard errors below 0.9
    assert torch.tensor(widths[True]).quantile(0.8) > 2 * torch.tensor(widths[False]).quantile(0.8)


def test_a_round_shape_is_the_surrogate():
    size, std = 3, 1.3
    curvature, point = positive(size, 40.0), torch.randn(size, dtype=DOUBLE)
    gradient = torch.randn(size, dtype=DOUBLE)
    release = GradientRelease(point, gradient, 2.0)
    surrogate = Surrogate([release], LinearResponse(curvature), curvature, std, point)
    eye = torch.eye(size, dtype=DOUBLE)
    found = NormalForm(point, gradient, 4.0 * eye, curvature, eye, std)
    thetas = torch.randn(6, size, dtype=DOUBLE)
    apart = found.log_likelihood(thetas) - surrogate.log_likelihood(thetas)
    torch.testing.assert_close(apart, apart[0].expand(6))
    for mine, theirs in zip(
        found.precision(thetas[0]), surrogate.precision(thetas[0]), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_its_tangent_without_an_error_of_the_curvature_is_itself():
    found, _ = form(std=1e-9)
    theta = torch.randn(3, dtype=DOUBLE)
    precision, product = found.precision(theta)
    hessian = torch.autograd.functional.hessian(found.log_likelihood, theta)
    torch.testing.assert_close(precision, -hessian)
    slope = torch.autograd.functional.jacobian(found.log_likelihood, theta)
    torch.testing.assert_close(product - precision @ theta, slope)


def test_an_estimate_that_is_all_error_becomes_round_and_a_sure_one_stays():
    shape = positive(4, 5.0)
    half, inverse = roots(shape)
    curvature = half @ torch.diag(torch.tensor([100.0, 50.0, 20.0, 10.0], dtype=DOUBLE)) @ half
    kept, _, _ = sure_part(curvature, shape, 1e-3)
    torch.testing.assert_close(kept, curvature, rtol=1e-3, atol=1e-3)
    draws = torch.randn(4, 4, dtype=DOUBLE)
    noisy = half @ (100 * torch.eye(4, dtype=DOUBLE) + 30.0 * (draws + draws.T) / 2) @ half
    kept, left, std = sure_part(noisy, shape, 30.0)
    values = torch.linalg.eigvalsh(inverse @ kept @ inverse)
    assert float(values.min()) > 0
    assert std == 30.0
    assert float(torch.linalg.eigvalsh(inverse @ left @ inverse).max()) < 1 + 1e-9
    assert math.isfinite(float(values.max() / values.min()))


def test_a_direction_that_stands_out_is_freed_of_what_the_error_adds_to_it():
    """λ = ℓ + d/(2ℓ) in the mean: 13.3 for 12, d = 30, where noise alone reaches 7.7."""
    size, true, repeats = 30, 12.0, 200
    eye = torch.eye(size, dtype=DOUBLE)
    found, raw, unsure = [], [], []
    for _ in range(repeats):
        draws = torch.randn(size, size, dtype=DOUBLE)
        curvature = 1e-3 * eye + (draws + draws.T) / 2
        curvature[0, 0] += true
        raw.append(torch.linalg.eigvalsh(curvature)[-1])
        kept, left, _ = sure_part(curvature, eye, 1.0)
        found.append(torch.linalg.eigvalsh(kept)[-1])
        unsure.append(left.diagonal())
    # a standard deviation of about 1 each
    assert abs(float(torch.stack(found).mean()) - true) < 5.5 / repeats**0.5
    assert float(torch.stack(raw).mean()) > true + 0.8
    of_each = torch.stack(unsure).mean(0)
    assert float(of_each[0]) > 0.85  # as unsure as before; the others are not
    assert float(of_each.sum()) < 0.5 * size


def test_a_direction_that_is_set_apart_is_not_shrunk_to_the_others():
    """A third of the others' curvature, ten standard deviations of its error below them: too little
    for it to stand out among so many. The mean of 40 has a standard error of 1/√40.
    """
    size, repeats = 30, 40
    exact = 15 * torch.eye(size, dtype=DOUBLE)
    exact[0, 0] = 5.0
    shape = torch.diag(torch.linspace(0.5, 2.0, size, dtype=DOUBLE))
    root = shape.sqrt()
    apart = torch.zeros(size, dtype=DOUBLE)
    apart[0] = 7.0
    found, shrunk = [], []
    for _ in range(repeats):
        draws = torch.randn(size, size, dtype=DOUBLE)
        noisy = root @ (exact + (draws + draws.T) / 2) @ root
        kept, left, _ = sure_part(noisy, shape, 1.0, apart)
        found.append(kept[0, 0] / shape[0, 0])
        assert float(left[0, 0] / shape[0, 0]) == pytest.approx(1.0)
        shrunk.append(sure_part(noisy, shape, 1.0)[0][0, 0] / shape[0, 0])
    assert float(torch.stack(found).mean()) == pytest.approx(5.0, abs=5 / repeats**0.5)
    assert float(torch.stack(shrunk).mean()) > 6.5


@pytest.mark.parametrize("size", [6, 30])
def test_what_a_direction_set_apart_has_in_common_with_others_is_shrunk_too(size):
    """Where there is nothing, an error of 1/√2 in each of so many entries is no coupling: left as
    it was, it made eigenvalues of .24 to 1.84 of the truth at size 30.
    """
    exact = 5 * torch.eye(size, dtype=DOUBLE)
    apart = torch.randn(size, dtype=DOUBLE)
    apart /= apart.norm()
    squares, stated = 0.0, 0.0
    for _ in range(20):
        draws = torch.randn(size, size, dtype=DOUBLE)
        kept, left, _ = sure_part(
            exact + (draws + draws.T) / 2, torch.eye(size, dtype=DOUBLE), 1.0, apart
        )
        across = (kept - exact) @ apart
        across -= apart * (apart @ across)
        squares += float(across.square().sum())
        # of R^{1/2}ER^{1/2}, by its law: ½(aᵀRa·R + Raaᵀ R) in directions across
        stated += 0.5 * float(apart @ left @ apart) * float(left.trace() - apart @ left @ apart)
    assert squares < stated
