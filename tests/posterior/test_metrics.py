"""Metrics against scikit-learn, scipy and cases worked by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss, roc_auc_score

from torch_dpbayes import metrics

shapes = st.tuples(st.integers(2, 40), st.integers(2, 6), st.integers(0, 2**32 - 1))


def predictions(shape):
    n, classes, seed = shape
    generator = np.random.default_rng(seed)
    probabilities = generator.dirichlet(np.full(classes, 0.5), size=n)
    labels = generator.integers(classes, size=n)
    return probabilities, labels, torch.from_numpy(probabilities), torch.from_numpy(labels)


@given(shapes)
def test_agree_with_scikit_learn(shape):
    probabilities, labels, p, y = predictions(shape)
    classes = list(range(shape[1]))
    probabilities = probabilities.clip(np.finfo(float).eps, None)
    probabilities /= probabilities.sum(1, keepdims=True)
    p = torch.from_numpy(probabilities)
    assert metrics.negative_log_likelihood(p, y) == pytest.approx(
        log_loss(labels, probabilities, labels=classes)
    )
    assert metrics.accuracy(p, y) == pytest.approx(accuracy_score(labels, probabilities.argmax(1)))
    one_hot = np.eye(shape[1])[labels]
    per_class = [brier_score_loss(one_hot[:, c], probabilities[:, c], pos_label=1) for c in classes]
    assert metrics.brier_score(p, y) == pytest.approx(sum(per_class))


@given(
    st.lists(st.integers(-5, 5), min_size=1, max_size=30),
    st.lists(st.integers(-5, 5), min_size=1, max_size=30),
)
def test_area_under_roc_agrees_with_scikit_learn_ties_included(inside, outside):
    expected = roc_auc_score([0] * len(inside) + [1] * len(outside), inside + outside)
    assert metrics.area_under_roc(torch.tensor(inside), torch.tensor(outside)) == pytest.approx(
        expected
    )


def test_expected_calibration_error_by_hand():
    # ten bins: (0.5, 0.6] holds 0.6 right and 0.6 wrong; (0.8, 0.9] holds 0.9, right twice and
    # wrong once; (0.9, 1] 1.0
    confidence = torch.tensor([0.6, 0.6, 0.9, 0.9, 0.9, 1.0], dtype=torch.float64)
    probabilities = torch.stack([confidence, 1 - confidence], 1)
    labels = torch.tensor([0, 1, 0, 0, 1, 0])
    expected = (2 * abs(0.5 - 0.6) + 3 * abs(2 / 3 - 0.9) + 1 * 0) / 6
    assert metrics.expected_calibration_error(probabilities, labels, num_bins=10) == pytest.approx(
        expected
    )
    curve = metrics.reliability_curve(probabilities, labels, num_bins=10)
    assert curve.num_records.tolist() == [0, 0, 0, 0, 0, 2, 0, 0, 3, 1]
    assert curve.accuracy[[5, 8, 9]].tolist() == pytest.approx([0.5, 2 / 3, 1])
    assert curve.confidence[[5, 8, 9]].tolist() == pytest.approx([0.6, 0.9, 1])
    assert curve.accuracy[:5].isnan().all()


@given(shapes, st.integers(1, 20))
def test_expected_calibration_error_is_the_sum_over_bins(shape, num_bins):
    probabilities, labels, p, y = predictions(shape)
    confidence, right = probabilities.max(1), probabilities.argmax(1) == labels
    expected = 0.0
    for b in range(num_bins):
        inside = (confidence > b / num_bins) & (confidence <= (b + 1) / num_bins)
        if inside.any():
            expected += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    assert metrics.expected_calibration_error(p, y, num_bins) == pytest.approx(expected)


def test_perfect_and_worst_predictions():
    right = torch.eye(3)
    labels = torch.arange(3)
    assert metrics.accuracy(right, labels) == 1
    assert metrics.negative_log_likelihood(right, labels) == 0
    assert metrics.brier_score(right, labels) == 0
    assert metrics.expected_calibration_error(right, labels) == 0
    wrong = right.roll(1, 0)
    assert metrics.brier_score(wrong, labels) == 2
    assert metrics.expected_calibration_error(wrong, labels) == 1
    assert math.isfinite(metrics.negative_log_likelihood(wrong, labels))


@given(st.integers(1, 20), st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_targets_that_are_0_or_1_are_two_classes(n, targets, seed):
    generator = torch.Generator().manual_seed(seed)
    shape = (n, targets) if targets else (n,)
    probabilities = torch.rand(shape, generator=generator, dtype=torch.float64)
    labels = torch.randint(2, shape, generator=generator)
    both = torch.stack([1 - probabilities.flatten(), probabilities.flatten()], 1)
    for metric in (
        metrics.accuracy,
        metrics.brier_score,
        metrics.negative_log_likelihood,
        metrics.expected_calibration_error,
    ):
        wanted = pytest.approx(metric(both, labels.flatten()), abs=1e-12)
        for given_labels in (labels, labels.double(), labels.bool()):
            assert metric(probabilities, given_labels) == wanted
    with pytest.raises(ValueError, match="labels must be"):
        metrics.accuracy(probabilities, labels + 2)
    with pytest.raises(ValueError, match="labels must be"):
        metrics.accuracy(probabilities, labels + 0.5)


def test_bad_input_elsewhere():
    with pytest.raises(ValueError, match="num_bins"):
        metrics.expected_calibration_error(torch.eye(2), torch.arange(2), num_bins=0)
    with pytest.raises(ValueError, match="without NaN"):
        metrics.area_under_roc(torch.tensor([float("nan")]), torch.tensor([1.0]))
    with pytest.raises(ValueError, match="out_of_distribution"):
        metrics.area_under_roc(torch.tensor([1.0]), torch.tensor([]))
    with pytest.raises(ValueError, match="one shape"):
        metrics.root_mean_squared_error(torch.zeros(3, 1), torch.zeros(3))
    with pytest.raises(ValueError, match="no targets"):
        metrics.interval_coverage(torch.zeros(0), torch.zeros(0), torch.zeros(0))
