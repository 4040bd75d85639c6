"""One noisy second-moment matrix: its charge is that of its noise, and no record exceeds it."""

import math

import pytest
import torch

import torch_dpbayes as dpb
from torch_dpbayes.noise_aware import NoisyCovariance
from torch_dpbayes.noise_aware.covariance import _second_moments, with_symmetric_noise

DOUBLE = torch.float64


def exact(x, bound):
    """The sum of the second moments of records that are shortened, one at a time."""
    total = torch.zeros(x.shape[-1], x.shape[-1], dtype=DOUBLE)
    for record in x.double():
        record = record.reshape(-1, x.shape[-1])
        moments = record.T @ record
        total += moments * min(1.0, bound**2 / float(moments.trace()))
    return total


@pytest.mark.parametrize("shape", [(50, 4), (50, 3, 4)])
def test_it_is_the_sum_of_shortened_second_moments(shape):
    x = torch.randn(shape) * torch.tensor([2.0, 1.0, 1.0, 0.1])
    found = dpb.noise_aware.covariance(
        x, accountant=dpb.PrivacyAccountant(), noise_multiplier=1e-9, max_feature_norm=1.7
    )
    torch.testing.assert_close(found.matrix, exact(x, 1.7), rtol=1e-5, atol=1e-5)


def test_the_whitening_is_its_inverse_root():
    matrix = torch.diag(torch.tensor([9.0, 1.0, 0.04], dtype=DOUBLE))
    found = NoisyCovariance(matrix, 0.01).whitening(floor=0.0)
    wanted = (matrix.diagonal() + 0.01 * math.sqrt(6)).rsqrt()
    torch.testing.assert_close(found, torch.diag(wanted / wanted.max()).float())
    floored = NoisyCovariance(matrix, 0.01).whitening(floor=0.3).diagonal()
    assert float(floored[0] / floored[2]) == pytest.approx(
        math.sqrt((0.04 + 0.3 * 10.04 / 3) / (9 + 0.3 * 10.04 / 3)), rel=1e-5
    )


HOSTILE = {
    "infinite": torch.full((3, 4), math.inf, dtype=DOUBLE),
    "not a number": torch.tensor([[math.nan, 1.0, 1.0, 1.0]] * 3, dtype=DOUBLE),
    "huge": torch.full((3, 4), 1e300, dtype=DOUBLE),
    "tiny": torch.full((3, 4), 1.5e-162, dtype=DOUBLE),
    "one feature": torch.tensor([[1e9, 0.0, 0.0, 0.0]] * 3, dtype=DOUBLE),
}


@pytest.mark.parametrize("record", HOSTILE)
@pytest.mark.parametrize("bound", [1e-300, 0.5, 1e200])
def test_no_record_moves_the_moments_by_more_than_its_bound(record, bound):
    others = torch.randn(5, 3, 4, dtype=DOUBLE)
    without = _second_moments(others, bound)
    moved = _second_moments(torch.cat([others, HOSTILE[record][None]]), bound) - without
    assert float(torch.linalg.matrix_norm(moved)) <= 1 + 1e-9
    assert bool(without.isfinite().all())


def test_the_noise_is_what_is_charged():
    """Of 400 releases of nothing: variances of the diagonal (zR²)², off it half of it, by
    chi-square; it fails in fewer than one run in 10⁶.
    """
    found = [
        dpb.noise_aware.covariance(
            torch.zeros(2, 3),
            accountant=dpb.PrivacyAccountant(),
            noise_multiplier=5.0,
            max_feature_norm=2.0,
        )
        for _ in range(400)
    ]
    assert {release.noise_std for release in found} == {20.0}
    draws = torch.stack([release.matrix for release in found])
    of_diagonal = draws.diagonal(dim1=1, dim2=2).square().sum() / 400.0
    off = draws[:, [0, 0, 1], [1, 2, 2]].square().sum() / 200.0
    for statistic in (of_diagonal, off):
        assert abs(float(statistic) - 1200) < 5 * math.sqrt(2 * 1200)


def test_both_triangles_have_the_same_noise():
    """Rounding makes sums unsymmetric: a difference of the triangles would tell of records."""
    exact = torch.randn(4, 4, dtype=DOUBLE)
    released = with_symmetric_noise(exact, 1e-3)
    assert torch.equal(released, released.T)
