"""The law of the noise, into its tails."""

import math

import pytest
import torch
from scipy.stats import kstest, norm, poisson

from torch_dpbayes.noise import GaussianNoise, add_gaussian, fresh_generator

END = math.sqrt(2 * 24 * math.log(2))  # of single precision normals that are made of 24 bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [7, 100_000])  # torch has two ways to draw them
def test_noise_is_gaussian_of_the_stated_size(dtype, size):
    target, stream, draws = torch.full((size,), 5.0, dtype=dtype), fresh_generator(), []
    for _ in range(-(-100_000 // size)):
        target.fill_(5.0)
        add_gaussian(target, 3.0, 7.0, stream)
        draws.append(target.double().clone())
    assert kstest(torch.cat(draws).numpy(), norm(5 / 7, 3 / 7).cdf).pvalue > 1e-6 / 8
    draws = torch.cat([GaussianNoise().standard_normal(size, dtype=dtype, device=torch.device("cpu")) for _ in range(-(-100_000 // size))])
    assert draws.dtype == dtype and kstest(draws.double().numpy(), "norm").pvalue > 1e-6 / 8


@pytest.mark.slow
def test_single_precision_noise_goes_beyond_24_bits():
    """Torch's own ends there, by its construction: 8·10⁻⁹ of all draws lie beyond."""
    draws, stream, beyond = 3_000_000_000, fresh_generator(), 0
    own = torch.empty(2**16)
    ends = max(float(own.normal_(generator=stream).abs().max()) for _ in range(2000))
    assert ends <= END + 1e-6
    target = torch.empty(2**16)
    for _ in range(draws // len(target)):
        add_gaussian(target.zero_(), 1.0, 1.0, stream)
        beyond += int((target.abs() > END).sum())
    expected = 2 * norm.sf(END) * draws
    assert poisson.ppf(1e-6, expected) <= beyond <= poisson.isf(1e-6, expected)
