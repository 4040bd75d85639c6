"""Noise-aware posteriors on real data: the judge, and the posterior without privacy."""

import math

import noise_aware_real_data as script
import pytest
import torch
from reproduce_privacy_for_free import Data

# of a reproduction, not of the library
pytestmark = pytest.mark.thorough


def records(size, weights):
    x = torch.randn(size, len(weights))
    x = x / x.norm(dim=1, keepdim=True).clamp_min(1)
    y = torch.bernoulli((x @ torch.tensor(weights)).sigmoid())
    return Data(x, y, x, y)


def test_the_reference_is_the_posterior():
    data = records(60, [2.0])
    found = script.Reference(data, 3.0)
    grid = torch.linspace(-10, 15, 20_001).double()
    u = data.x.double() * grid
    log_density = (data.y.double()[:, None] * u - torch.nn.functional.softplus(u)).sum(0)
    mass = torch.softmax(log_density - grid.square() / 18, dim=0)
    mean = float(mass @ grid)
    stddev = math.sqrt(float(mass @ (grid - mean).square()))
    # of about 15,000 effective draws: more than six standard errors
    assert float(found.mean[0]) == pytest.approx(mean, abs=0.06 * stddev)
    assert float(found.stddev[0]) == pytest.approx(stddev, rel=0.06)


def test_draws_are_judged_by_where_they_lie():
    data = records(500, [1.0, -1.0])
    known = script.Reference(data, 3.0)
    draws = known.mean + known.stddev * (2 + 3 * torch.randn(20_000, 2).double())
    found = script.judged(draws, data, known)
    assert found["error"] == pytest.approx(2, abs=0.2)
    assert found["width"] == pytest.approx(3, rel=0.05)
    assert found["covers"] == 1.0  # two thirds of a deviation off
    assert script.judged(known.mean + known.stddev * 0.1 * draws, data, known)["covers"] < 1.0


def test_a_run_on_breast_cancer_and_its_row(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(script, "EPSILONS", (8.0,))
    monkeypatch.setattr(script, "PRIOR_STDS", (3.0,))
    arguments = "--data-root . --repeats 1 --methods Pyro --data".split()
    script.main([*arguments, "breast cancer", "--results", str(tmp_path / "runs.jsonl")])
    assert "| breast cancer | Pyro | 3 | 8 | 1 |" in capsys.readouterr().out
