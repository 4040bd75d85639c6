"""How long features are let be in their own coordinates: the histogram, what weights take, and the
choice.
"""

import math

import pytest
import torch

from torch_dpbayes.noise_aware import laplace
from torch_dpbayes.noise_aware.feature_lengths import EDGES, _taken, best_length
from torch_dpbayes.noise_aware.feature_shape import FeatureShape
from torch_dpbayes.noise_aware.records import GLMSums
from torch_dpbayes.noise_aware.transcript import LengthRelease
from torch_dpbayes.ops import GLM

DOUBLE = torch.float64


def counts_of(rows, shape=None):
    shape = torch.eye(2, dtype=DOUBLE) if shape is None else shape
    sums = GLMSums(GLM(max_feature_norm=2.0), rows, torch.zeros(len(rows), dtype=DOUBLE), None)
    return sums.length_counts(shape, EDGES)


@pytest.mark.parametrize(
    "row",
    [(0.0, 0.0), (1e300, 0.0), (math.nan, 1.0), (math.inf, -math.inf), (0.3, 1e-200), (-1.0, 1.5)],
)
@pytest.mark.parametrize("size", [1e-300, 1.0, 1e200, math.nan])
def test_a_record_is_in_one_bin_whatever_it_holds(row, size):
    others = torch.randn(7, 2, dtype=DOUBLE)
    shape = size * torch.eye(2, dtype=DOUBLE)
    before = counts_of(others, shape)
    after = counts_of(torch.cat([others, torch.tensor([row], dtype=DOUBLE)]), shape)
    assert before.sum() == 7
    assert len(before) == len(EDGES) + 1
    assert float((after - before).norm()) == 1
    assert float((after - before).min()) == 0


def test_bins_are_those_of_squared_lengths_in_the_coordinates():
    rows = torch.tensor([[0.1, 0.0], [0.6, 0.8], [1.2, -1.6], [0.0, 9.0]], dtype=DOUBLE)
    shape = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=DOUBLE)
    found = counts_of(rows, 1.1 * shape)
    squares = torch.tensor([0.0121, 1.21, 4.84, 4.84], dtype=DOUBLE)  # no row is longer than 2
    for low, high, count in zip((0.0, *EDGES), (*EDGES, math.inf), found, strict=True):
        assert count == ((squares > low) & (squares <= high)).sum()


@pytest.mark.parametrize("c", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("m, s", [(-0.9, 0.3), (-0.9, 1.2), (0.5, 0.8)])
def test_what_the_weights_take_of_log_normal_lengths(c, m, s):
    quantiles = (torch.arange(200_000, dtype=DOUBLE) + 0.5) / 200_000
    squares = (m + s * torch.special.ndtri(quantiles)).exp()
    weights = (1 / (c * squares)).clamp(max=1)
    lost, kept = _taken(c, torch.tensor(m, dtype=DOUBLE), torch.tensor(s, dtype=DOUBLE))
    assert float(lost) == pytest.approx(float((1 - weights).mean()), abs=1e-4)
    assert float(kept) == pytest.approx(float((weights * squares).sum() / squares.sum()), rel=1e-3)


def released(value, std):
    return LengthRelease(torch.eye(4, dtype=DOUBLE), value, std)


def shape_of(told, noise):
    """Of features without correlations, whose Gram matrix is known."""
    size = len(told)
    scales = torch.ones(size, dtype=DOUBLE)
    today = torch.ones(size, dtype=DOUBLE)
    return FeatureShape(torch.eye(size, dtype=DOUBLE), told, scales, noise, 0.0, 0.5, today)


def unclipped(length):
    return 1.0


def chosen(num_data, spread, noise, std=1.0, clipped=unclipped):
    """The length for log-normal features with mean square a half."""
    median = math.log(0.5) - spread**2 / 2
    ends = torch.tensor([0.0, *EDGES, math.inf], dtype=DOUBLE).log()
    shares = torch.special.ndtr((ends - median) / spread).diff()
    counts = released(num_data * shares + std * torch.randn(len(shares), dtype=DOUBLE), std)
    told = torch.full((4,), num_data / 8, dtype=DOUBLE)
    return best_length(counts, num_data, shape_of(told, noise), clipped)


def simulated(num_data, spread, noise):
    """The same from the definition, with the lengths themselves."""
    quantiles = (torch.arange(100_000, dtype=DOUBLE) + 0.5) / 100_000
    squares = (math.log(0.5) - spread**2 / 2 + spread * torch.special.ndtri(quantiles)).exp()

    def loss(c):
        weights = (1 / (c * squares)).clamp(max=1)
        told = num_data / 8 * float((weights * squares).sum() / squares.sum())
        variance = 1 / (1 + told**2 / (told + noise / c))
        bias = 0.2**2 * num_data * float((1 - weights).mean()) ** 2 / (1 + num_data / 8)
        return variance + bias

    return min((2 ** (k / 4) for k in range(-8, 13)), key=loss)


@pytest.mark.parametrize(
    "num_data, spread, noise",
    [(1000, 0.5, 300.0), (30_000, 0.5, 300.0), (30_000, 1.0, 300.0), (30_000, 1.0, 10_000.0)],
)
def test_the_choice_is_the_best_for_the_lengths_behind_the_histogram(num_data, spread, noise):
    found = chosen(num_data, spread, noise)
    assert found is not None
    expected = simulated(num_data, spread, noise)
    assert abs(math.log2(found / expected)) <= 0.26  # one step


def test_weights_are_the_fewer_the_more_records_and_the_more_the_larger_the_noise():
    assert chosen(10**6, 1.0, 300.0) < chosen(10**4, 1.0, 300.0)
    assert chosen(10**4, 1.0, 300.0) < chosen(10**4, 1.0, 30_000.0)
    assert chosen(10**5, 1.5, 300.0) < chosen(10**5, 0.4, 300.0)


def test_features_are_shorter_where_longer_ones_have_clipped_residuals():
    def clipped(length):
        return min(1.0, (0.5 / length) ** 2)

    assert chosen(1000, 0.5, 3000.0, clipped=clipped) < chosen(1000, 0.5, 3000.0)


@pytest.mark.parametrize("length", [0.3, 1.0])
def test_the_slope_is_that_of_gradients_with_that_length(length):
    glm = GLM("gaussian", max_feature_norm=2.0, noise_std=0.5)
    row = torch.tensor([[2.0 * length, 0.0]], dtype=DOUBLE)
    sums = GLMSums(glm, row, torch.zeros(1, dtype=DOUBLE), 3.0)
    expected = float(sums.curvature_sum(torch.zeros(2, dtype=DOUBLE))[0, 0]) / (2 * length) ** 2
    assert sums.slope(length) == pytest.approx(expected, rel=1e-5)


def test_a_histogram_of_noise_alone_is_no_reason_for_an_extreme():
    found = [chosen(1000, 0.7, 3000.0, std=1e5) for _ in range(20)]
    assert len(set(found)) == 1
    assert found[0] is not None
    assert 0.25 < found[0] < 8


def test_the_features_stay_as_they_are_where_that_gains_too_little():
    told = torch.full((4,), 100.0, dtype=DOUBLE)
    shape = shape_of(told, 30.0)
    counts = released(torch.zeros(len(EDGES) + 1, dtype=DOUBLE), 1e5)
    assert best_length(counts, 1000, shape, unclipped) is not None
    best = min(
        (shape.variances(2 ** (k / 4), 1.0) for k in range(-8, 13)), key=lambda v: float(v.sum())
    )
    assert best_length(counts, 1000, shape._replace(today=best), unclipped) is None
    # nor where numbers are too large to tell
    lost = shape._replace(today=torch.full((4,), math.nan, dtype=DOUBLE))
    assert best_length(counts, 1000, lost, unclipped) is None


def test_two_percent_of_the_deviations_are_a_reason_to_change_the_features():
    spread = 0.1  # no record is longer than 1 where squared lengths are .84
    ends = torch.tensor([0.0, *EDGES, math.inf], dtype=DOUBLE).log()
    shares = torch.special.ndtr((ends - math.log(0.5)) / spread).diff()
    counts = released(1000 * shares, 1.0)
    shape = shape_of(torch.full((4,), 100.0, dtype=DOUBLE), 30.0)
    best = shape.variances(2**0.75, 1.0)
    assert best_length(counts, 1000, shape._replace(today=best), unclipped) is None
    changed = best_length(counts, 1000, shape._replace(today=1.04 * best), unclipped)
    assert changed == pytest.approx(2**0.75)


def test_other_coordinates_are_taken_where_features_are_correlated_and_where_a_bound_is_loose():
    n = 4000
    weights = torch.tensor([1.0, -1.0, 0.5], dtype=DOUBLE)

    def taken(x, **options):
        y = (torch.rand(n, dtype=DOUBLE) < (x @ weights).sigmoid()).double()
        post = laplace(GLM(prior_std=3.0, **options), x, y, epsilon=1.0, delta=1e-5)
        assert len(post.transcript.lengths) == 1
        return post.transcript.feature_map is not None

    directions = torch.nn.functional.normalize(torch.randn(n, 3, dtype=DOUBLE), dim=1)
    assert not taken(directions)
    assert taken(directions, max_feature_norm=10.0)
    assert taken(directions * torch.tensor([1.0, 0.1, 0.03], dtype=DOUBLE))
