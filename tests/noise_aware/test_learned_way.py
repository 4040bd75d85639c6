"""Many parameters, of whose curvature the gradients' differences tell the row along the way."""

import math

import pytest
import torch

from torch_dpbayes.noise_aware import bends
from torch_dpbayes.noise_aware.bent_response import bent
from torch_dpbayes.noise_aware.hidden_directions import HiddenDirections
from torch_dpbayes.noise_aware.learned_way import Across, LearnedWaySurrogate, _along_the_way
from torch_dpbayes.noise_aware.surrogate import gaussian_log_likelihood
from torch_dpbayes.noise_aware.transcript import GradientRelease

DOUBLE = torch.float64
SIZE, HIDDEN = 7, 3


def surrogate(bend, power=1.0):
    way = 3 * torch.randn(SIZE, dtype=DOUBLE)
    unit = way / way.norm()
    beside = torch.linalg.svd(unit[None])[2][1:]
    turn = torch.cat([beside, unit[None]]).T
    values = torch.tensor([2.0, 2, 2, 40, 60, 80], dtype=DOUBLE)
    across = Across(turn, values, 5.0, HIDDEN, 0.4, power)
    root = torch.randn(SIZE, SIZE, dtype=DOUBLE)
    truth = 20 * (root @ root.T / SIZE + torch.eye(SIZE))
    points = [share * way + 0.1 * torch.randn(SIZE, dtype=DOUBLE) for share in (0, 0.5, 0.8, 1)]
    gradients = [
        GradientRelease(point, truth @ (point - way) + torch.randn(SIZE, dtype=DOUBLE), 2.0)
        for point in points
    ]
    return LearnedWaySurrogate(gradients, across, truth + 1.0, 5.0, way, way, bend)


def law(found, theta):
    """Residual, covariance and covariance without bends, of r ~ N(0, T F̂ Tᵀ + noise + error)."""
    form, eye = found.form(), torch.eye(SIZE, dtype=DOUBLE)
    way = found.centre
    moved = found.curvature @ way
    direction = moved / (way @ moved)
    along = (theta - way) @ direction
    further, slope = bent(along, torch.tensor(found._bend, dtype=DOUBLE))
    phi = theta + further * way
    change = eye + 2 / 3 * (slope.sqrt() - 1) * torch.outer(direction, way)
    rest = found.noise + found._of_curvature_error(phi)
    covariance = change @ found.curvature @ change.T + rest
    turn = form.turn
    residual = found._mean + phi @ found.curvature
    return turn.T @ residual, turn.T @ covariance @ turn, turn.T @ (found.curvature + rest) @ turn


@pytest.mark.parametrize("bend", [-1.0, 0.0, 3.0])
def test_a_diagonal_and_a_change_of_rank_five_are_the_law_of_a_bent_response(bend):
    found = surrogate(bend)
    for theta in found.centre + torch.randn(5, SIZE, dtype=DOUBLE):
        expected = found.log_evidence + gaussian_log_likelihood(*law(found, theta))
        torch.testing.assert_close(found.log_likelihood(theta), expected)


def test_what_hidden_directions_add_to_the_others_counts_by_its_power():
    found = surrogate(2.0, power=0.3)
    for theta in found.centre + torch.randn(5, SIZE, dtype=DOUBLE):
        parts = law(found, theta)
        seen = [part[..., HIDDEN:] for part in parts]
        seen = [seen[0], *(part[HIDDEN:] for part in seen[1:])]
        of_seen, whole = gaussian_log_likelihood(*seen), gaussian_log_likelihood(*parts)
        expected = found.log_evidence + of_seen + 0.3 * (whole - of_seen)
        torch.testing.assert_close(found.log_likelihood(theta), expected)


def test_the_error_of_the_curvature_is_that_of_independent_entries():
    """Of each entry of E, in the coordinates of the way and of the eigenvectors."""
    found = surrogate(0.0)
    across, turn = found._across, found._across.vectors
    delta = found._point - torch.randn(SIZE, dtype=DOUBLE)
    expected = torch.zeros(SIZE, SIZE, dtype=DOUBLE)
    for i in range(SIZE):
        for j in range(i, SIZE):
            unit = torch.zeros(SIZE, SIZE, dtype=DOUBLE)
            unit[i, j] = unit[j, i] = 1.0
            variance = across.std**2 * (1.0 if i == j else 0.5)
            if j < HIDDEN:
                variance *= across.share**2
            if j == SIZE - 1:
                variance = float(found._left[i])
            expected += variance * torch.outer(unit @ delta, unit @ delta)
    moved = found.centre + turn @ (found._point - delta)
    torch.testing.assert_close(turn.T @ found._of_curvature_error(moved) @ turn, expected)


def test_the_row_along_the_way_is_that_of_a_normal_regression():
    places = torch.randn(6, dtype=DOUBLE)
    values, noises = torch.randn(6, 2, dtype=DOUBLE), 1 + torch.rand(6, 2, dtype=DOUBLE)
    variances = torch.tensor([0.5, 2.0], dtype=DOUBLE)
    found = _along_the_way(places, values, noises, variances)
    flat = 1e7  # the common part
    for k in range(2):
        row = variances[k] * places
        covariance = row[:, None] * places + torch.diag(noises[:, k]) + flat
        gain = torch.linalg.solve(covariance, row)
        assert float(gain @ values[:, k]) == pytest.approx(float(found.estimates[k]), rel=1e-5)
        left = variances[k] - gain @ row
        assert float(left) == pytest.approx(float(found.variances[k]), rel=1e-5)
    normal = torch.distributions.MultivariateNormal(torch.zeros(6, dtype=DOUBLE), covariance)
    expected = float(normal.log_prob(values[:, 1])) + math.log(flat) / 2 + 3 * math.log(math.tau)
    assert float(found.log_evidence[1]) == pytest.approx(expected, abs=1e-4)


def symmetric(size, std):
    noise = std * torch.randn(size, size, dtype=DOUBLE) / math.sqrt(2)
    return noise.triu(1) + noise.triu(1).T + std * torch.diag(torch.randn(size, dtype=DOUBLE))


@pytest.mark.parametrize("share", [0.2, 0.3, 1.0])
def test_the_share_of_directions_with_a_curvature_is_told_by_all_entries(share):
    """Where no single eigenvalue stands out of the noise, and no larger than is sure."""
    size, level, noise_std = 100, 5.0, 5.0
    values = torch.zeros(size, dtype=DOUBLE)
    values[: int(share * size)] = level / share
    turn = torch.linalg.qr(torch.randn(size, size, dtype=DOUBLE))[0]
    released = turn @ torch.diag(values) @ turn.T + symmetric(size, noise_std)
    hidden = HiddenDirections.of(released, noise_std)
    size = hidden.num_hidden
    assert size > 90
    found = bends._share_with_curvature(hidden, noise_std)
    spread, error = (
        level**2 * (1 / share - 1) / size,
        noise_std**2 * math.sqrt(1 / size / (size + 1)),
    )
    # two standard errors for safety, and four and a half for chance
    lowest, highest = (
        hidden.middle**2
        / (hidden.middle**2 + size * (max(spread + errors * error, 0.0) + 2 * error))
        for errors in (4.5, -4.5)
    )
    assert lowest * (1 - 1e-9) < found < highest * (1 + 1e-9)


def test_where_numbers_end_nothing_is_likely_and_nothing_raises():
    """A chain that runs away is rejected, and leaves the others alone."""
    found = surrogate(3.0, power=0.3)
    far = torch.stack([found.centre, found.centre + 1e200, found.centre * torch.nan])
    thetas = far.requires_grad_()
    values = found.log_likelihood(thetas)
    assert values.isfinite().tolist() == [True, False, False]
    (gradient,) = torch.autograd.grad(values.sum(), thetas)
    assert bool(gradient[0].isfinite().all())
