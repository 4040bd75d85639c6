"""Runs that are quick."""

import pytest

from torch_dpbayes.noise_aware import inference


@pytest.fixture
def few_draws(monkeypatch):
    """Where neither the width of a posterior nor the noise of covariates is looked at."""
    monkeypatch.setattr(inference, "_DRAWS", 200)
    monkeypatch.setattr(inference, "_LAWS", 2)
