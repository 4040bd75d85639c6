"""The examples of ``ops``, as people call them."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from scipy import integrate, stats

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["one_posterior_sample", "private_mean"])
def test_an_example_runs_offline_and_prints_its_guarantee(name):
    call = [sys.executable, str(EXAMPLES / f"{name}.py"), "--records", "300", "--epsilon", "0.7"]
    done = subprocess.run(call, capture_output=True, text=True, cwd=EXAMPLES.parent, timeout=600)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert "epsilon = 0.7 at delta" in done.stdout and "when one record is replaced" in done.stdout
    assert "proved" in done.stdout and "ASSUMED" not in done.stdout


@pytest.mark.thorough
def test_the_interval_of_the_private_mean_covers_the_truth(capsys):
    example, inside, runs = load("private_mean"), 0, 40
    clamped = integrate.quad(
        lambda x: min(max(x, 0), 10) * stats.norm.pdf(x, 3.5, 2), -8.5, 15.5, points=[0, 10]
    )[0]
    assert clamped == pytest.approx(3.532, abs=5e-4)  # as the example says
    for _ in range(runs):
        example.main(["--records", "1000", "--epsilon", "1.0"])
        low, high = map(
            float, re.search(r"interval (-?[\d.]+) to (-?[\d.]+)", capsys.readouterr().out).groups()
        )
        inside += low < clamped < high
    # 94 %: the run's discretisation makes the draw a little wider than stated
    assert stats.binom.cdf(inside, runs, 0.94) > 1e-6
