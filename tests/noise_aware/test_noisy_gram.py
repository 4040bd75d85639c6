"""What is left of the noise on a Gram matrix, against matrices whose exact part is known."""

import math

import pytest
import torch
from scipy.stats import norm

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
    stated = NoisyGram(torch.eye(SIZE, dtype=DOUBLE), 1.0, kept).error_covariance(delta)
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
    assert steep.kept > 1 - 1e-6
    assert float((steep.matrix - exact).abs().max()) < 1.0  # ten standard deviations


def test_a_number_has_no_shape():
    released = torch.tensor([[70.0]], dtype=DOUBLE)
    found = estimated(released, 1.0, 100)
    assert found.kept == 0.0
    assert float(found.matrix) == pytest.approx(70.0, rel=1e-3)
    assert float(found.error_covariance(torch.tensor([2.0], dtype=DOUBLE))) == pytest.approx(4.0)


def test_nothing_but_noise_stays_positive_definite():
    found = estimated(-symmetric(5.0, 1)[0].abs(), 5.0, 10)
    assert float(torch.linalg.eigvalsh(found.matrix).min()) > 0
