"""Runs that are quick."""

import math
from functools import cache

import pytest
from support.recorded import record_once

from torch_dpbayes.density import Prior
from torch_dpbayes.noise_aware import drawing, inference, latents, records
from torch_dpbayes.noise_aware.covariance import gram_draws


@pytest.fixture(scope="module")
def recorded_once(request):
    """And few draws of a prior are made. Of any number of records, where no test is about it."""
    with pytest.MonkeyPatch.context() as patch:
        counts_matter = getattr(request.module, "COUNTS_MATTER", False)
        record_once(patch, records, for_any_count=not counts_matter)
        patch.setattr(latents, "_DRAWS", 100)
        patch.setattr(Prior, "are_sites_independent", cache(Prior.are_sites_independent))
        yield


@pytest.fixture
def short_gram_chains(monkeypatch):
    """Where draws of second moments may depend on each other."""
    monkeypatch.setitem(gram_draws.__globals__, "_WARM_UP", 10)
    monkeypatch.setitem(gram_draws.__globals__, "_APART", 1)


@pytest.fixture
def many_gram_chains(monkeypatch):
    """More draws in less time, of which those of other chains do not depend on each other."""
    for name, value in (("_CHAINS", 32), ("_WARM_UP", 60), ("_APART", 1)):
        monkeypatch.setitem(gram_draws.__globals__, name, value)


@pytest.fixture
def few_draws(monkeypatch, recorded_once, short_gram_chains):
    """Where neither the width of a posterior nor the noise of covariates is looked at: importance
    draws, however good they are.
    """
    monkeypatch.setattr(inference, "_DRAWS", 200)
    monkeypatch.setattr(inference, "_LAWS", 2)
    monkeypatch.setattr(drawing, "LEAST_EFFECTIVE", 0.0)
    monkeypatch.setattr(drawing, "LARGEST_PARETO_K", math.inf)
