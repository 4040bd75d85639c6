"""Runs that are quick."""

import math

import pytest

from torch_dpbayes.noise_aware import drawing, inference


@pytest.fixture
def few_draws(monkeypatch):
    """Where neither the width of a posterior nor the noise of covariates is looked at: importance
    draws, however good they are.
    """
    monkeypatch.setattr(inference, "_DRAWS", 200)
    monkeypatch.setattr(inference, "_LAWS", 2)
    monkeypatch.setattr(drawing, "LEAST_EFFECTIVE", 0.0)
    monkeypatch.setattr(drawing, "LARGEST_PARETO_K", math.inf)
