"""Weights of classes in coordinates that leave out what changes no probability."""

import math

import pytest
import torch

from torch_dpbayes.noise_aware import laplace
from torch_dpbayes.noise_aware.contrasts import Contrasts, OfContrasts
from torch_dpbayes.noise_aware.normal_form import NormalForm
from torch_dpbayes.noise_aware.records import SoftmaxSums
from torch_dpbayes.ops import Softmax

CLASSES, FEATURES = 4, 3
CONTRASTS = Contrasts(CLASSES, FEATURES)


def softmax_data(size, weights):
    x = torch.randn(size, weights.shape[1], dtype=torch.float64)
    x = x / x.norm(dim=1, keepdim=True)
    return x, torch.distributions.Categorical(logits=x @ weights.T).sample()


def test_the_basis_is_orthonormal_and_sums_to_zero():
    eye = torch.eye((CLASSES - 1) * FEATURES, dtype=torch.float64)
    back = CONTRASTS.back(eye)
    torch.testing.assert_close(back @ back.T, eye)
    torch.testing.assert_close(CONTRASTS.of(back), eye)
    sums = back.unflatten(-1, (CLASSES, FEATURES)).sum(-2)
    assert float(sums.abs().max()) < 1e-12
    matrix = torch.randn(len(eye), len(eye), dtype=torch.float64)
    torch.testing.assert_close(CONTRASTS.back_of_matrix(matrix), back.T @ matrix @ back)
    torch.testing.assert_close(CONTRASTS.of_matrix(back.T @ matrix @ back), matrix)


def test_nothing_is_lost_of_gradient_and_hessian():
    weights = torch.randn(CLASSES, FEATURES, dtype=torch.float64)
    x, labels = softmax_data(50, weights)
    sums = SoftmaxSums(Softmax(CLASSES), x, labels)
    phi = torch.randn(sums.dimension, dtype=torch.float64)

    def loss(theta):
        logits = (x * (1 - 1e-6)) @ theta.reshape(CLASSES, FEATURES).T
        return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")

    theta = CONTRASTS.back(phi) + torch.randn(FEATURES, dtype=torch.float64).repeat(CLASSES)
    gradient = torch.autograd.functional.jacobian(loss, theta)
    hessian = torch.autograd.functional.hessian(loss, theta)
    torch.testing.assert_close(
        CONTRASTS.back(sums.gradient_sum(phi)), gradient, rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        CONTRASTS.back_of_matrix(sums.curvature_sum(phi)), hessian, rtol=1e-5, atol=1e-5
    )


def test_the_tangent_is_that_of_the_likelihood():
    size = (CLASSES - 1) * FEATURES
    root = torch.randn(size, size, dtype=torch.float64)
    curvature = root @ root.T + torch.eye(size, dtype=torch.float64)
    point, gradient = torch.randn(2, size, dtype=torch.float64)
    form = NormalForm(point, gradient, 0 * curvature, curvature, curvature, 0.0)
    found = OfContrasts(form, CONTRASTS)
    theta = torch.randn(CLASSES * FEATURES, dtype=torch.float64)
    precision, product = found.precision(theta)
    slope = torch.autograd.functional.jacobian(found.log_likelihood, theta)
    torch.testing.assert_close(product - precision @ theta, slope)
    torch.testing.assert_close(
        precision, -torch.autograd.functional.hessian(found.log_likelihood, theta)
    )


@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_what_changes_no_probability_is_as_wide_as_the_prior(epsilon):
    """The noise of its gradients and curvatures is no sign of anything. Six standard errors."""
    x, labels = softmax_data(3000, torch.randn(3, 2, dtype=torch.float64))
    post = laplace(Softmax(3, prior_std=3.0), x, labels, epsilon=epsilon, delta=1e-5)
    draws = post.sample(2000)["weights"].mean(1)
    error = 6 / math.sqrt(2 * 2000 * 0.3)  # candidates that are drawn more than once
    assert bool((draws.std(0) / (3 / math.sqrt(3)) - 1).abs().lt(error).all())
    assert "for the 4 of 6 unconstrained coordinates that records depend on" in post.guarantee()


def test_few_records_leave_a_narrow_prior_as_it_is():
    """They can have a quarter of its precision; of what is drawn for their level .82 of its width
    was left when that was at least the prior's precision.
    """
    ratios = []
    for _ in range(5):
        x, labels = softmax_data(50, 0.1 * torch.randn(3, 3, dtype=torch.float64))
        post = laplace(Softmax(3, prior_std=0.1), x, labels, epsilon=8.0, delta=1e-5)
        ratios.append(float(post.sample(1000)["weights"].std(0).mean()) / 0.1)
    assert sum(ratios) / 5 > 0.93
