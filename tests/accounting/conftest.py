"""What the tests of accounting share."""

import random

import pytest
import torch


@pytest.fixture
def path(tmp_path):
    """Where a ledger may be made."""
    return tmp_path / "budget.db"


@pytest.fixture(autouse=True)
def seeded():
    """``random`` follows the seed that a failed test prints."""
    random.seed(torch.initial_seed())
