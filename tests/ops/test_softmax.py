"""Multinomial logistic regression: its gradient, its curvature, and the bounds on both."""

import math

import pytest
import torch
import torch.nn.functional as F

import torch_dpbayes as dpb
from torch_dpbayes.ops.certificates import Bounded, FiniteRunLangevin
from torch_dpbayes.ops.models import Limits


def problem(n=40, classes=4, width=3):
    x = torch.randn(n, width, dtype=torch.float64)
    length = 0.99 * torch.rand(n, 1, dtype=torch.float64)  # none is shortened
    return F.normalize(x) * length, torch.randint(0, classes, (n,))


def hessian(records, w):
    return torch.autograd.functional.hessian(lambda v: records.losses(v).sum(), w)


def test_the_gradient_is_that_of_the_loss():
    x, y = problem()
    model = dpb.ops.Softmax(4, prior_std=0.7)
    records = model.records(x, y)
    w = torch.randn(12, dtype=torch.float64)

    def loss(w):
        return F.cross_entropy(x @ w.reshape(4, 3).T, y, reduction="sum")

    gradient = torch.autograd.functional.jacobian(loss, w)
    torch.testing.assert_close(records.gradient_sum(w), gradient)
    target = model.target((x, y), Limits(0.3, 2.0))
    of_potential = torch.autograd.functional.jacobian(target.potential, w)
    torch.testing.assert_close(target.gradient(w), of_potential)
    torch.testing.assert_close(target.gradient(w), 0.3 * gradient + w / 0.49)


@pytest.mark.parametrize("classes, size", [(2, 1e-2), (3, 1.0), (10, 1e2)])
def test_no_record_passes_its_bounds_which_two_classes_reach(classes, size):
    """Probabilities from even ones to certain ones, and features far beyond the bound."""
    model = dpb.ops.Softmax(classes, max_feature_norm=size)
    constants, slopes, curvatures = model.derived_constants(math.inf), [], []
    for spread in (0.0, 0.1, 1.0, 10.0, 1000.0):
        x = torch.randn(4, 5, dtype=torch.float64) * 100 * size
        y = torch.randint(0, classes, (4,))
        w = spread * torch.randn(classes * 5, dtype=torch.float64) / size
        for k in range(4):
            one = model.records(x[k : k + 1], y[k : k + 1])
            slopes.append(float(one.gradient_sum(w).norm()) / constants.lipschitz)
            curvatures.append(torch.linalg.eigvalsh(hessian(one, w)) / constants.record_smoothness)
    assert max(slopes) <= 1 and torch.cat(curvatures).max() <= 1
    assert torch.cat(curvatures).min() >= -1e-8
    assert classes > 2 or torch.cat(curvatures).max() > 0.99


def test_records_that_cannot_be_used_contribute_nothing():
    x, y = problem()
    w = torch.randn(12, dtype=torch.float64)
    model = dpb.ops.Softmax(4)
    used = model.records(x, y)
    bad = torch.tensor([[math.nan, 0, 0], [math.inf, 1, 1], [1, 0, 0], [1, 0, 0]])
    more = model.records(torch.cat([x, bad]), torch.cat([y, torch.tensor([0, 1, 4, -1])]))
    torch.testing.assert_close(more.gradient_sum(w), used.gradient_sum(w))


@pytest.mark.parametrize(
    ("kind", "classes"), [(torch.uint8, 256), (torch.uint8, 300), (torch.int8, 130)]
)
def test_labels_of_a_narrow_type(kind, classes):
    """Whose largest value is below the number of classes."""
    labels = torch.tensor([0, 50, 100, 127])
    found = dpb.ops.Softmax(classes).records(torch.eye(4), labels.to(kind))
    assert found.y.equal(labels)
    assert (found.x != 0).any(1).all()


@pytest.mark.parametrize(
    "certificate", [FiniteRunLangevin(50, max_grad_norm=1.5), Bounded(3.0, warmup_steps=2)]
)
def test_a_draw_has_a_row_of_weights_for_each_class(certificate):
    x, y = problem()
    model = dpb.ops.Softmax(4)
    draw = dpb.ops.OnePosteriorSample(model, certificate, epsilon=1, delta=1e-5).sample(x, y)
    assert draw["weights"].shape == (4, 3)


def test_what_is_refused():
    for arguments in ((1,), (3.0,), (3, 0.0), (3, math.inf), (3, 1.0, math.nan)):
        with pytest.raises(dpb.errors.DPBayesError):
            dpb.ops.Softmax(*arguments)
    x, y = problem()
    model = dpb.ops.Softmax(4)
    for data in ((x, y.float()), (x, F.one_hot(y, 4)), (x, y[1:])):
        with pytest.raises(dpb.errors.DPBayesError) as caught:
            model.prepare(data)
        assert "40" not in str(caught.value)  # records, whose number may be private
    with pytest.raises(dpb.errors.CertificateError):  # gradients are never clipped
        dpb.ops.OnePosteriorSample(model, FiniteRunLangevin(50))
