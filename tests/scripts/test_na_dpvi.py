"""The comparison with NA-DPVI: the authors' program is a stub, the data are made up."""

import json
import math
import sys

import na_dpvi as script
import pytest
import torch

STUBS = {
    "jax/__init__.py": "",
    "jax/numpy.py": "from numpy import *",
    "utils.py": "class DynamicAttributes: pass",
    "coverage_experiment.py": """
import numpy as np
def set_default_args_linear_regression10d(args):
    return args
def perform_coverage_test(args):
    x, y = args.data_generator_function(args.theta_true, None, args.data_size)
    assert args.data_size == args.training_data_size == len(x) and args.custom_noise_scale > 100
    weights = np.linalg.lstsq(x, y, rcond=None)[0]
    variance = np.mean((y - x @ weights) ** 2)
    args.theta_means = np.append(weights, np.log(np.expm1(variance)))
    args.theta_stds = np.append(np.full(11, np.sqrt(variance / len(x))), np.sqrt(2 / len(x)))
    return args, None
""",
}


@pytest.mark.thorough
def test_both_programs_get_the_same_records_and_are_judged_alike(tmp_path, monkeypatch, capsys):
    for name, text in STUBS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(script, "EPSILONS", (0.1,))
    monkeypatch.setattr(sys, "argv", ["na_dpvi.py"])
    results = tmp_path / "runs.jsonl"
    arguments = f"linear --repeats 2 --theirs {tmp_path} --python {sys.executable}"
    script.main([*arguments.split(), "--results", str(results), "--csv", str(tmp_path / "a.csv")])
    assert "| linear | NA-DPVI | 0.1 | 2 |" in capsys.readouterr().out
    assert (tmp_path / "a.csv").exists()
    found = [json.loads(line) for line in results.read_text().splitlines()]
    widths = {run["job"]["method"]: run["result"]["width"] for run in found}
    # least squares has the width without privacy; ours lies between it and the prior's, 2√n, which
    # a thousand draws tell to two percent for each parameter
    assert widths["NA-DPVI"] == pytest.approx(1, abs=0.1)
    assert 1 < widths["noise_aware.posterior"] < 1.1 * 2 * math.sqrt(script.SIZE)


def test_least_squares_lies_where_its_own_intervals_say():
    """The records follow the parameters that are said to be behind them."""
    squares = []
    for repeat in range(20):
        given = script.problem(repeat)
        found = torch.linalg.lstsq(given.x, given.y[:, None]).solution[:, 0]
        factor = torch.linalg.cholesky(given.x.T @ given.x)
        squares.append(((factor.T @ (found - given.weights)) / given.sigma).square().sum())
    # chi-square with 11 degrees of freedom each; the records are the same in every run
    assert 165 < float(torch.stack(squares).sum()) < 280


def test_adult_has_their_columns(tmp_path, monkeypatch):
    """Levels of the training records, standardised numbers, ones; no rows with question marks."""
    row = ["39", "State-gov", "77516", "Bachelors", "13", "Never-married", "Adm-clerical"]
    row += ["Not-in-family", "White", "Male", "2174", "0", "40", "United-States", "<=50K"]
    rows = []
    for number in range(8):
        rows.append(list(row))
        for column in script.NUMBERS:
            rows[-1][column] = str(number * (column + 1))
        rows[-1][9] = ("Male", "Female")[number % 2]
        rows[-1][14] = ("<=50K", ">50K.")[number // 2 % 2]
    rows[2][1] = "?"
    monkeypatch.setattr(script.free, "table", lambda name, root: rows)
    monkeypatch.setattr(script.free, "ADULT_TRAINING", 5)
    data = script.adult(str(tmp_path))
    assert data.x.shape == (4, 5 + 7 + 1) and data.x_test.shape == (3, 13)
    torch.testing.assert_close(data.x[:, :5].square().mean(0), torch.ones(5))
    assert bool((data.x[:, 5:].sum(1) == 7).all())  # six levels and the ones
    assert data.y.tolist() == [0.0, 0.0, 1.0, 0.0] and data.y_test.tolist() == [0.0, 1.0, 1.0]
