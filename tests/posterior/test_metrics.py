"""Metrics against their definitions, written once more in NumPy, and cases worked by hand."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import refused

from torch_dpbayes import metrics

seeds = st.integers(0, 2**32 - 1)


@given(st.integers(2, 40), st.integers(2, 6), st.integers(1, 20), seeds)
def test_probabilities_of_classes(n, classes, num_bins, seed):
    draw = np.random.default_rng(seed)
    p, y = draw.dirichlet(np.full(classes, 0.5), size=n), draw.integers(classes, size=n)
    chosen = p[np.arange(n), y].clip(np.finfo(float).tiny, None)
    confidence, right = p.max(1), p.argmax(1) == y
    error = 0.0
    for b in range(num_bins):
        inside = (confidence > b / num_bins) & (confidence <= (b + 1) / num_bins)
        if inside.any():
            error += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    wanted = {
        metrics.negative_log_likelihood: -np.log(chosen).mean(),
        metrics.accuracy: right.mean(),
        metrics.brier_score: np.square(p - np.eye(classes)[y]).sum(1).mean(),
        partial(metrics.expected_calibration_error, num_bins=num_bins): error,
    }
    for metric, value in wanted.items():
        assert metric(p, y) == metric(torch.from_numpy(p), y.tolist()) == pytest.approx(value)


@given(st.integers(1, 20), st.integers(0, 3), seeds)
def test_targets_that_are_0_or_1_are_two_classes(n, targets, seed):
    generator = torch.Generator().manual_seed(seed)
    shape = (n, targets) if targets else (n,)
    p = torch.rand(shape, generator=generator, dtype=torch.float64)
    labels = torch.randint(2, shape, generator=generator)
    both = torch.stack([1 - p.flatten(), p.flatten()], 1)
    names = "accuracy brier_score negative_log_likelihood expected_calibration_error"
    for metric in (getattr(metrics, name) for name in names.split()):
        wanted = pytest.approx(metric(both, labels.flatten()), abs=1e-12)
        for given_labels in (labels, labels.double(), labels.bool()):
            assert metric(p, given_labels) == wanted


scores = st.lists(st.integers(-5, 5), min_size=1, max_size=30)


@given(scores, scores)
def test_area_under_roc_is_how_often_an_outside_score_is_larger_ties_half(inside, outside):
    larger = np.sign(np.array(outside)[:, None] - np.array(inside)) / 2 + 0.5
    found = metrics.area_under_roc(torch.tensor(inside), torch.tensor(outside))
    assert found == pytest.approx(larger.mean())


def test_a_bin_holds_its_upper_end_and_an_empty_one_is_nan():
    """Of ten bins (0.5, 0.6] holds 0.6, right and wrong, and (0.9, 1] holds 1."""
    curve = metrics.reliability_curve([[0.6, 0.4], [0.6, 0.4], [1.0, 0.0]], [0, 1, 0], num_bins=10)
    assert curve.num_records.tolist() == [0, 0, 0, 0, 0, 2, 0, 0, 0, 1]
    assert curve.accuracy[[5, 9]].tolist() == pytest.approx([0.5, 1])
    assert curve.confidence[[5, 9]].tolist() == pytest.approx([0.6, 1])
    assert curve.accuracy[:5].isnan().all()


def test_cases_worked_by_hand():
    values, targets = np.array([1.0, 2.0, 4.0]), [1.0, 4.0, 3.0]
    assert metrics.interval_coverage(values, values + 1, targets) == pytest.approx(1 / 3)
    assert metrics.interval_coverage(values - 2, values, targets) == pytest.approx(2 / 3)
    assert math.isfinite(metrics.negative_log_likelihood(torch.eye(3).roll(1, 0), torch.arange(3)))


ROWS, LABELS = torch.eye(2), torch.arange(2)


@pytest.mark.parametrize(
    "call",
    [
        lambda: metrics.expected_calibration_error(ROWS, LABELS, num_bins=0),
        lambda: metrics.accuracy(torch.randn(2, 3), LABELS),
        lambda: metrics.accuracy(ROWS, LABELS + 1),
        lambda: metrics.accuracy(torch.tensor([0.3, 0.4]), LABELS + 0.5),
        lambda: metrics.brier_score(ROWS[:0], LABELS[:0]),
        lambda: metrics.area_under_roc(torch.tensor([torch.nan]), torch.ones(1)),
        lambda: metrics.area_under_roc(torch.ones(1), torch.ones(0)),
        lambda: metrics.interval_coverage(torch.zeros(3), torch.zeros(3, 1), torch.zeros(3)),
        lambda: metrics.interval_coverage(*3 * [torch.zeros(0)]),
    ],
)
def test_what_does_not_fit_is_refused(call):
    with refused("argument"):
        call()
