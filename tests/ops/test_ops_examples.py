"""The examples of ``ops``, as people call them."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["one_posterior_sample", "private_mean"])
def test_an_example_runs_offline_and_prints_its_guarantee(name):
    call = [sys.executable, str(EXAMPLES / f"{name}.py"), "--records", "300", "--epsilon", "0.7"]
    done = subprocess.run(call, capture_output=True, text=True, cwd=EXAMPLES.parent, timeout=600)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert "epsilon = 0.7 at delta" in done.stdout and "when one record is replaced" in done.stdout
    assert "proved" in done.stdout and "ASSUMED" not in done.stdout
