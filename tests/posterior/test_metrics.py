"""Metrics against their definitions, written once more in NumPy, and cases worked by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import refused

from torch_dpbayes import metrics

shapes = st.tuples(st.integers(2, 40), st.integers(2, 6), st.integers(0, 2**32 - 1))


def predictions(shape):
    n, classes, seed = shape
    generator = np.random.default_rng(seed)
    probabilities = generator.dirichlet(np.full(classes, 0.5), size=n)
    labels = generator.integers(classes, size=n)
    return probabilities, labels, torch.from_numpy(probabilities), torch.from_numpy(labels)


@given(shapes)
def test_probabilities_of_classes(shape):
    probabilities, labels, p, y = predictions(shape)
    chosen = probabilities[np.arange(len(labels)), labels].clip(np.finfo(float).tiny, None)
    assert metrics.negative_log_likelihood(p, y) == pytest.approx(-np.log(chosen).mean())
    right = probabilities.argmax(1) == labels
    assert metrics.accuracy(p, y) == pytest.approx(right.mean())
    squares = np.square(probabilities - np.eye(shape[1])[labels]).sum(1)
    assert metrics.brier_score(p, y) == pytest.approx(squares.mean())


scores = st.lists(st.integers(-5, 5), min_size=1, max_size=30)


@given(scores, scores)
def test_area_under_roc_is_how_often_an_outside_score_is_larger_ties_half(inside, outside):
    larger = np.sign(np.array(outside)[:, None] - np.array(inside)) / 2 + 0.5
    found = metrics.area_under_roc(torch.tensor(inside), torch.tensor(outside))
    assert found == pytest.approx(larger.mean())


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


def test_a_bin_holds_its_upper_end_and_an_empty_one_is_nan():
    """Of ten bins (0.5, 0.6] holds 0.6, right and wrong, and (0.9, 1] holds 1."""
    confidence = torch.tensor([0.6, 0.6, 1.0], dtype=torch.float64)
    probabilities, labels = torch.stack([confidence, 1 - confidence], 1), torch.tensor([0, 1, 0])
    curve = metrics.reliability_curve(probabilities, labels, num_bins=10)
    assert curve.num_records.tolist() == [0, 0, 0, 0, 0, 2, 0, 0, 0, 1]
    assert curve.accuracy[[5, 9]].tolist() == pytest.approx([0.5, 1])
    assert curve.confidence[[5, 9]].tolist() == pytest.approx([0.6, 1])
    assert curve.accuracy[:5].isnan().all()


def test_arrays_and_lists_are_taken_as_they_are():
    bound = np.array([0.1, 0.3])
    assert metrics.interval_coverage(bound, bound[::-1], [0.1, 0.3]) == 0.5
    assert metrics.accuracy([[0.2, 0.8], [0.9, 0.1]], np.array([1, 1])) == 0.5


def test_cases_worked_by_hand():
    values, targets = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 4.0, 3.0])
    assert metrics.root_mean_squared_error(values, targets) == pytest.approx((5 / 3) ** 0.5)
    assert metrics.interval_coverage(values, values + 1, targets) == pytest.approx(1 / 3)
    assert metrics.interval_coverage(values - 2, values, targets) == pytest.approx(2 / 3)
    wrong, labels = torch.eye(3).roll(1, 0), torch.arange(3)
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


ROWS, LABELS = torch.eye(2), torch.arange(2)
REFUSED = {
    "no bins": lambda: metrics.expected_calibration_error(ROWS, LABELS, num_bins=0),
    "scores": lambda: metrics.accuracy(torch.randn(2, 3), LABELS),
    "a label too many": lambda: metrics.accuracy(ROWS, LABELS + 1),
    "half a label": lambda: metrics.accuracy(torch.tensor([0.3, 0.4]), LABELS + 0.5),
    "no record": lambda: metrics.brier_score(ROWS[:0], LABELS[:0]),
    "a score of nan": lambda: metrics.area_under_roc(torch.tensor([torch.nan]), torch.ones(1)),
    "no score": lambda: metrics.area_under_roc(torch.ones(1), torch.ones(0)),
    "another shape": lambda: metrics.root_mean_squared_error(torch.zeros(3, 1), torch.zeros(3)),
    "no target": lambda: metrics.interval_coverage(*3 * [torch.zeros(0)]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name):
    with refused("argument"):
        REFUSED[name]()
