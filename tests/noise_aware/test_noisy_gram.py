"""What is left of the noise on a Gram matrix, against matrices whose exact part is known."""

import math
import statistics

import pyro.distributions as dist
import pytest
import torch
from scipy.stats import binom, norm

from torch_dpbayes.noise_aware import LinearRegression, sufficient_statistics
from torch_dpbayes.noise_aware.noisy_gram import NoisyGram, estimated, part_kept

DOUBLE = torch.float64
SIGNIFICANCE = 1e-6
SIZE = 4
COUNT = SIZE * (SIZE + 1) // 2 - 1  # numbers that make a shape


def symmetric(std, repeats, size=SIZE):
    """Standard deviation ``std`` on the diagonal, 1/√2 of it off the diagonal."""
    matrices = torch.randn(repeats, size, size, dtype=DOUBLE)
    return std * (matrices + matrices.mT) / 2


def shapes(std, repeats):
    found = symmetric(std, repeats)
    level = found.diagonal(dim1=1, dim2=2).mean(-1)
    return found - level[:, None, None] * torch.eye(SIZE, dtype=DOUBLE)


@pytest.mark.parametrize("own", [0.0, 0.4, 3.0])
def test_the_error_has_the_covariance_that_is_stated(own):
    """Exact matrices with a shape of standard deviation ``own`` and noise 1; six standard errors of
    each entry of the covariance.
    """
    repeats, delta = 20_000, torch.tensor([0.3, -1.0, 0.5, 2.0], dtype=DOUBLE)
    kept = own**2 / (own**2 + 1)
    exact, noise = shapes(own, repeats), symmetric(1.0, repeats)
    level = noise.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None] * torch.eye(SIZE, dtype=DOUBLE)
    error = (kept * (exact + noise - level) + level - exact) @ delta
    found = error.T @ error / repeats
    products = error[:, :, None] * error[:, None, :]
    eye = torch.eye(SIZE, dtype=DOUBLE)
    stated = NoisyGram(eye, 1.0, kept, eye).error_covariance(delta)
    limit = norm.isf(SIGNIFICANCE / (2 * 3 * SIZE**2)) * products.std(0) / math.sqrt(repeats)
    assert bool(((found - stated).abs() < limit).all())


def test_the_part_kept_is_right_in_the_mean_over_its_prior():
    """A posterior mean: averaged over draws from the prior it is the average of what it states."""
    repeats, level, num_data, noise_std = 4000, 50.0, 200, 10.0
    least, most = level**2 / num_data, SIZE * (SIZE - 1) * level**2 / COUNT
    variances = least * (most / least) ** torch.rand(repeats, dtype=DOUBLE)
    total = variances + noise_std**2
    squares = total * torch.distributions.Chi2(torch.tensor(float(COUNT))).sample((repeats,))
    errors = variances / total - torch.tensor(
        [part_kept(float(s), SIZE, noise_std, level, num_data) for s in squares], dtype=DOUBLE
    )
    standard_error = float(errors.std()) / math.sqrt(repeats)
    assert abs(float(errors.mean())) < norm.isf(SIGNIFICANCE / 2) * standard_error


def test_a_shape_that_the_noise_explains_goes_and_one_that_it_does_not_stays():
    level = 1000 * torch.eye(12, dtype=DOUBLE)
    flat = estimated(level + symmetric(30.0, 1, 12)[0], 30.0, 10_000)
    # more is kept where a chi-square is above twice its 77 degrees of freedom: 10⁻⁶
    assert flat.kept < 0.5
    exact = torch.diag(torch.tensor([4000.0, 900.0, 100.0, 30.0], dtype=DOUBLE))
    steep = estimated(exact + symmetric(0.1, 1)[0], 0.1, 10_000)
    assert steep.rest.shape == (4, 1)
    delta = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=DOUBLE)
    assert float(steep.error_covariance(delta)[0, 0]) == pytest.approx(0.01, rel=1e-6)
    assert float((steep.matrix - exact).abs().max()) < 1.0  # ten standard deviations


@pytest.mark.parametrize("one, others", [(400.0, 25.0), (0.0, 100.0)])
@pytest.mark.parametrize("rotated", [False, True])
def test_a_direction_that_stands_out_is_not_shrunk(rotated, one, others):
    """One eigenvalue far above or below seven others: errors of the estimate are as large as
    stated, in every direction. Shrunk as a whole they are three times as large along the first.
    """
    size, std, repeats = 8, 10.0, 600
    values = torch.tensor([one] + [others] * 7, dtype=DOUBLE)
    turn = torch.linalg.qr(torch.randn(size, size, dtype=DOUBLE))[0] if rotated else torch.eye(size)
    turn = turn.to(DOUBLE)
    exact = (turn * values) @ turn.T
    squares = torch.zeros(repeats, size, dtype=DOUBLE)
    shrunk = []
    for k, noise in enumerate(symmetric(std, repeats, size)):
        found = estimated(exact + noise, std, 10_000)
        shrunk.append(float((turn[:, 0] @ found.rest).norm()))  # 1 if it is, as the others are
        for j, delta in enumerate(turn.T):
            error = (found.matrix - exact) @ delta
            stated = found.error_covariance(delta)
            squares[k, j] = error @ torch.linalg.solve(stated, error) / size
    assert statistics.median(shrunk) < 0.3
    assert sum(part > 0.5 for part in shrunk) <= 2  # one draw in 300,000
    means, errors = squares.mean(0), squares.std(0) / math.sqrt(repeats)
    limit = norm.isf(SIGNIFICANCE / size)
    assert bool((means < 1.1 + limit * errors).all())  # floors make the others' smaller
    assert float(means[0]) > 0.8


def test_a_number_has_no_shape():
    released = torch.tensor([[70.0]], dtype=DOUBLE)
    found = estimated(released, 1.0, 100)
    assert found.kept == 0.0
    assert float(found.matrix) == pytest.approx(70.0, rel=1e-3)
    assert float(found.error_covariance(torch.tensor([2.0], dtype=DOUBLE))) == pytest.approx(4.0)


def test_nothing_but_noise_stays_positive_definite():
    found = estimated(-symmetric(5.0, 1)[0].abs(), 5.0, 10)
    assert float(torch.linalg.eigvalsh(found.matrix).min()) > 0


@pytest.mark.slow
def test_a_direction_in_which_no_record_lies_is_covered():
    """The weight along it stays as its prior says: 90 % intervals hold .87, .62 where its
    eigenvalue was raised to the others'. Fails once in a million if they hold .82.
    """
    size, count, data_sets, inside = 10, 1000, 400, 0
    ones = torch.ones(size, dtype=DOUBLE) / math.sqrt(size)
    noise_prior = dist.LogNormal(torch.tensor(-0.7, dtype=DOUBLE), 0.3)
    model = LinearRegression(target_bound=3.5, prior_std=1.0, noise_std_prior=noise_prior)
    for _ in range(data_sets):
        weights, noise_std = torch.randn(size, dtype=DOUBLE), noise_prior.sample()
        x = torch.randn(count, size, dtype=DOUBLE)
        x -= (x @ ones)[:, None] * ones
        x /= x.norm(dim=1, keepdim=True)
        y = x @ weights + noise_std * torch.randn(count, dtype=DOUBLE)
        posterior = sufficient_statistics(model, x, y, epsilon=1.0, delta=1e-5)
        draws = posterior.sample(400)["weights"] @ ones
        inside += int(0.05 < (draws < weights @ ones).double().mean() < 0.95)
    print(inside / data_sets)
    assert inside > binom.isf(1 - SIGNIFICANCE, data_sets, 0.82)
