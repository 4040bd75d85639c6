"""Coordinates of the features in which noise does least harm: bounds of what a record adds there,
the scores' mean, and the choice itself.
"""

import math

import pytest
import torch

from torch_dpbayes.noise_aware import laplace
from torch_dpbayes.noise_aware.feature_shape import (
    InShape,
    _best_scales,
    feature_shape,
)
from torch_dpbayes.noise_aware.priors import GaussianPrior
from torch_dpbayes.noise_aware.records import GLMSums
from torch_dpbayes.ops import GLM

DOUBLE = torch.float64
GLMS = [
    (GLM("bernoulli", max_feature_norm=2.0), 0.7),
    (GLM("bernoulli"), None),
    (GLM("gaussian", noise_std=0.5), 1.5),
    (GLM("poisson", max_count=20.0), 3.0),
]


def stretched(rows, size=3):
    return torch.randn(rows, size, dtype=DOUBLE) * torch.tensor([1.0, 0.1, 0.01], dtype=DOUBLE)


@pytest.mark.parametrize("glm, clip", GLMS, ids=[glm.family for glm, _ in GLMS])
def test_one_record_moves_the_sums_by_no_more_than_the_bounds(glm, clip):
    shape = torch.diag(torch.tensor([0.5, 4.0, 60.0], dtype=DOUBLE))
    shape = shape @ torch.linalg.qr(torch.randn(3, 3, dtype=DOUBLE))[0]
    theta = torch.linalg.inv(shape).T @ torch.randn(3, dtype=DOUBLE)
    far = torch.full((3,), 1e9, dtype=DOUBLE)
    # one whose features are as long as they may be, and no longer once they are stretched
    exact = torch.linalg.solve(shape, torch.tensor([0.9999, 0.0, 0.0], dtype=DOUBLE))
    rows = [stretched(1)[0] for _ in range(30)]
    seen = []
    for row in [far, -far, far * math.nan, torch.zeros(3, dtype=DOUBLE), 1e-3 * far, exact, *rows]:
        for target in (0.0, 1.0, 1e9, math.nan):
            one = GLMSums(glm, row[None], torch.tensor([target], dtype=DOUBLE), clip)
            sums = one.in_shape(shape)
            moved = (
                (sums.gradient_sum(theta), sums.gradient_bound),
                (sums.gram_sum(), sums.gram_bound),
                (sums.curvature_sum(theta), sums.curvature_bound),
            )
            seen.append([float(change.norm()) / bound for change, bound in moved])
            if float(row.norm()) < glm.max_feature_norm:
                assert sums.gradient_bound == pytest.approx(
                    one.gradient_bound / glm.max_feature_norm
                )
    largest = torch.tensor(seen).amax(0)
    assert bool((largest <= 1 + 1e-9).all())
    assert float(largest[1]) > 0.9


def test_weighted_scores_have_mean_zero_at_the_truth_and_the_released_slope():
    shape = torch.diag(torch.tensor([1.0, 8.0, 90.0], dtype=DOUBLE))
    weights = torch.randn(3, dtype=DOUBLE)
    theta = torch.linalg.inv(shape).T @ weights
    is_cut = False
    for row in stretched(20)[:, None]:
        row = row / row.norm().clamp_min(1.0)
        probability = (row[0] @ weights).sigmoid()
        found = [
            GLMSums(GLM(), row, torch.full((1,), y, dtype=DOUBLE), None).in_shape(shape)
            for y in (0.0, 1.0)
        ]
        zero, one = (sums.gradient_sum(theta) for sums in found)
        mean = probability * one + (1 - probability) * zero
        assert float(mean.norm()) < 1e-5 * float((one - zero).norm())
        is_cut |= float((shape @ row[0]).norm()) > 1
        step = 1e-3 * torch.randn(3, dtype=DOUBLE)
        later, earlier = (
            probability * found[1].gradient_sum(t) + (1 - probability) * found[0].gradient_sum(t)
            for t in (theta + step, theta - step)
        )
        expected = 2 * found[0].curvature_sum(theta) @ step
        torch.testing.assert_close(later - earlier, expected, rtol=0.01, atol=1e-9)
    assert is_cut  # or the weights were not seen


def test_the_choice_is_the_best_one_under_its_bound():
    # all worth more than the least share
    squares = 0.05 + 0.5 * torch.rand(6, dtype=DOUBLE)
    told = 10 + 20 * torch.rand(6, dtype=DOUBLE)
    scales = _best_scales(squares, told, 0.5)

    def learnt(a):
        return torch.log1p(told.square() / (told + 0.5 / a)).sum()

    assert float((scales * squares).sum()) == pytest.approx(0.5)
    for _ in range(200):
        other = scales * (0.3 * torch.randn(6, dtype=DOUBLE)).exp()
        other = 0.5 * other / (other * squares).sum()
        assert float(learnt(other)) <= float(learnt(scales)) + 1e-6


def test_the_coordinates_are_those_of_the_prior_and_of_half_a_mean_square():
    prior = GaussianPrior(torch.zeros(3, dtype=DOUBLE), torch.tensor([0.1, 0.2, 1.0], dtype=DOUBLE))
    root = torch.linalg.qr(torch.randn(3, 3, dtype=DOUBLE))[0]
    unlike = root @ torch.diag(torch.tensor([880.0, 5.0, 2.0], dtype=DOUBLE)) @ root.T
    shape = feature_shape(unlike, 2.0, unlike / 4, prior, 3.0, 1000, 1.0).matrix
    precision = shape @ torch.diag(prior.precision) @ shape.T
    torch.testing.assert_close(precision, torch.diag(precision.diagonal()))
    # half of the bound's square on average, and no more where eigenvalues are below their noise
    mean_square = float((shape @ unlike @ shape.T).trace()) / 1000
    assert 0.3 < mean_square <= 0.5 + 1e-9


def test_variances_of_the_features_as_they_are_and_in_a_multiple_of_their_coordinates():
    """With a Gram matrix that is known, and noise only of the gradients, both are those of the
    normal form.
    """
    prior = GaussianPrior(torch.zeros(3, dtype=DOUBLE), torch.tensor([0.5, 1.0, 2.0], dtype=DOUBLE))
    gram = torch.diag(torch.tensor([300.0, 20.0, 4.0], dtype=DOUBLE))
    noise, length, norm = 5.0, 3.0, 2.0
    shape = feature_shape(gram, 1e-9, gram / 4, prior, noise, 1000, norm)

    def variances(features, std):
        """Of θ, of the posterior from gradients of these features."""
        information = gram.diagonal() / 4 * features.square()
        told = information.square() / (information + std**2)
        return 1 / (prior.precision + told / features.square())

    expected = variances(torch.ones(3, dtype=DOUBLE), noise) * prior.precision
    torch.testing.assert_close(shape.today.sort().values, expected.sort().values)
    squares = (math.sqrt(length) * shape.matrix).square().sum(0).sqrt()
    expected = variances(squares, noise / norm) * prior.precision
    found = shape.variances(length, 1.0)
    torch.testing.assert_close(found.sort().values, expected.sort().values)


def test_a_likelihood_is_the_same_in_other_coordinates():
    root = torch.randn(4, 4, dtype=DOUBLE)
    curvature = root @ root.T + torch.eye(4, dtype=DOUBLE)
    best, shape = torch.randn(4, dtype=DOUBLE), torch.randn(4, 4, dtype=DOUBLE)

    class Quadratic:
        centre = torch.randn(4, dtype=DOUBLE)
        predictor_std = 0.7  # of x·θ, which no coordinates change

        def log_likelihood(self, theta):
            return -0.5 * ((theta - best) @ curvature * (theta - best)).sum(-1)

        def precision(self, theta):
            return curvature, curvature @ best

        def agreement(self, mode, precision):
            step = mode - self.centre
            return float(step @ precision @ step)

    found = InShape(Quadratic(), shape)
    theta = torch.randn(4, dtype=DOUBLE)
    torch.testing.assert_close(shape.T @ Quadratic.centre, found.centre)
    assert found.predictor_std == Quadratic.predictor_std
    inner = torch.linalg.inv(shape).T @ theta
    torch.testing.assert_close(found.log_likelihood(theta), Quadratic().log_likelihood(inner))
    precision, product = found.precision(theta)
    hessian = torch.autograd.functional.hessian(found.log_likelihood, theta)
    torch.testing.assert_close(precision, -hessian)
    torch.testing.assert_close(precision @ shape.T @ best, product)
    step = theta - found.centre
    way = found.agreement(theta, precision)
    assert way == pytest.approx(float(step @ precision @ step), rel=1e-6)


def test_directions_that_records_hardly_have_are_told_all_the_same():
    """Two nearly equal columns: their difference is a thirtieth of the features."""
    n = 5000
    common = torch.randn(n, 1, dtype=DOUBLE)
    apart = 0.1 * torch.randn(n, 2, dtype=DOUBLE) @ torch.tensor([[1.0, -1.0], [0.1, 0.1]]).double()
    x = (common + apart) / 4
    x = x / x.norm(dim=1, keepdim=True).clamp_min(1.0)
    y = (torch.rand(n, dtype=DOUBLE) < (x @ torch.tensor([4.0, -4.0]).double()).sigmoid()).double()
    post = laplace(GLM(prior_std=5.0), x, y, epsilon=3.0, delta=1e-5)
    assert post.transcript.feature_map is not None
    p = (x @ post.mean["weights"]).sigmoid()
    curvature = (x.T * (p * (1 - p))) @ x
    noise = sum(g.noise_std**-2 for g in post.transcript.gradients) ** -0.5
    across = torch.tensor([1.0, -1.0], dtype=DOUBLE) / math.sqrt(2)
    told = float(across @ curvature @ across)
    # noise of the same size in all directions would leave at least this, were the curvature known
    isotropic = (1 / 25 + told**2 / (told + noise**2)) ** -0.5
    spread = float((post.sample(2000)["weights"] @ across).std())
    assert spread < 0.8 * isotropic
