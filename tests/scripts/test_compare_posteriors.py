"""Other methods' posteriors on real data: the judge, the choice of settings, and the references."""

import math

import compare_posteriors as script
import pytest
import torch
from reproduce_privacy_for_free import Data
from reproduction import Run

# of a reproduction, not of the library
pytestmark = pytest.mark.thorough

pytest.importorskip("matplotlib")


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
    # of about four thousand weighted candidates: six standard errors
    assert float(found.mean[0]) == pytest.approx(mean, abs=0.1 * stddev)
    assert float(found.stddev[0]) == pytest.approx(stddev, rel=0.1)


def test_draws_are_judged_by_where_they_lie():
    data = records(500, [1.0, -1.0])
    known = script.Reference(data, 3.0)
    draws = known.mean + known.stddev * (2 + 3 * torch.randn(20_000, 2).double())
    found = script.judged(draws, data, known)
    assert found["error"] == pytest.approx(2, abs=0.2)
    assert found["width"] == pytest.approx(3, rel=0.05)
    assert found["covers"] == 1.0  # two thirds of a deviation off
    assert script.judged(known.mean + known.stddev * 0.1 * draws, data, known)["covers"] < 1.0
    point = script.judged(known.mean[None], data, known)
    assert point["error"] == 0.0 and "width" not in point
    assert point["log_likelihood"] > found["log_likelihood"]
    assert script.judged(torch.empty(0, 2), data, known) == {}


@pytest.mark.parametrize("method", [script.oracle, script.feature_oracle])
def test_oracles_of_a_large_budget_are_near_the_posterior(method):
    """But for what the clip bound of the scores takes from the information."""
    data = records(2000, [1.0, -1.0, 0.5])
    known = script.Reference(data, 3.0)
    (draws,) = method(data, 50.0, 3.0, known).values()
    found = script.judged(draws, data, known)
    assert found["error"] < 1.5
    assert 0.8 < found["width"] < 1.5


def done(error, name, repeat):
    figures = {} if error is None else {"error": error, "log_likelihood": -1.0}
    job = {"data": "Abalone", "prior_std": 3.0, "epsilon": 1.0, "method": "m", "repeat": repeat}
    return Run(job, {"seconds": 1.0, "figures": {name: figures}}, 1.0, "2026", "abc")


def test_the_settings_that_are_nearest_stand_in_the_table():
    runs = [done(e, "A, with clip 1", k) for k, e in enumerate((3.0, 5.0))]
    runs += [done(e, "A, with clip 2", k) for k, e in enumerate((2.0, 2.5))]
    runs += [done(e, "A, with clip 3", k) for k, e in enumerate((0.1, None))]
    (row,) = script.summary(runs)
    assert (row["method"], row["settings"], row["repeats"]) == ("A", "clip 2", 2)
    assert row["error"] == pytest.approx(2.25) and row["refused"] == 0
    assert row["error_se"] == pytest.approx(0.25)
    assert "| A | 2.25 / – / – / -1.000 |" in script.table([row], "Abalone", 3.0)


def test_it_runs_and_goes_on(tmp_path, monkeypatch, capsys):
    pytest.importorskip("sklearn")
    monkeypatch.setattr(script, "EPSILONS", (3.0,))
    monkeypatch.setattr(script, "PRIOR_STDS", (3.0,))
    arguments = [f"--data-root={tmp_path}", f"--folder={tmp_path}", "--data", "breast cancer"]
    methods = ["--methods", "non-private", "laplace", "objective"]
    script.main([*arguments, "--repeats", "2", *methods])
    found = capsys.readouterr().out
    assert "breast cancer, prior sd 3" in found and "| noise_aware.laplace | " in found
    before = (tmp_path / "runs.jsonl").read_text()
    assert len(before.splitlines()) == 6
    script.main([*arguments, "--repeats", "2", *methods, "--stored"])
    assert (tmp_path / "runs.jsonl").read_text() == before
