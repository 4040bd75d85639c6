"""What the tests of kernels share."""

import pytest
import torch


@pytest.fixture
def double():
    """New tensors have 64 bits, so that closed forms can be compared to the last digits."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
