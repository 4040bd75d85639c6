"""Runs that are quick."""

import math

import pytest

from torch_dpbayes.density import RecordDensity
from torch_dpbayes.noise_aware import drawing, inference, latents, noisy_gram, records


@pytest.fixture(scope="module")
def recorded_once():
    """Models are recorded once for records of the same shapes, which is half of what a quick run
    takes, and few draws of a prior are made.
    """
    made = {}

    def density(model, args, **options):
        shapes = [(arg.shape, arg.dtype) for arg in args]
        key = model, str(shapes), str(options)
        if key not in made:
            made[key] = RecordDensity(model, args, **options)
        return made[key].with_rows([args[k] for k in made[key].row_dims])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "RecordDensity", density)
        patch.setattr(latents, "_DRAWS", 200)
        yield


@pytest.fixture
def few_draws(monkeypatch, recorded_once):
    """Where neither the width of a posterior nor the noise of covariates is looked at: importance
    draws, however good they are.
    """
    monkeypatch.setattr(inference, "_DRAWS", 200)
    monkeypatch.setattr(inference, "_LAWS", 2)
    monkeypatch.setattr(noisy_gram, "_WARM_UP", 10)
    monkeypatch.setattr(drawing, "LEAST_EFFECTIVE", 0.0)
    monkeypatch.setattr(drawing, "LARGEST_PARETO_K", math.inf)
