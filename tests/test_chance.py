"""A statistical test is looked at again before it fails, and its stated chances add up."""

import shutil
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
PROGRAM = """
import pytest, torch
seen = []

@pytest.mark.chance(1e-3)
def test_by_chance():
    seen.append(torch.initial_seed())
    assert len(seen) == 2 and seen[0] != seen[1]

@pytest.mark.chance(1e-3, looks=3)
def test_wrong():
    seen.append(0)
    assert len(seen) > 9, f"looked {len(seen) - 2} times"

@pytest.mark.chance(1e-3)
def test_raises():
    raise ValueError("at once")

def test_without_a_chance():
    assert seen.count(0) == 4
"""


def test_a_failure_by_chance_passes_and_a_fault_fails(tmp_path):
    shutil.copy(TESTS / "conftest.py", tmp_path)
    (tmp_path / "test_program.py").write_text(PROGRAM)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        tmp_path,
    ]
    options = ["-c", "/dev/null", "-W", "ignore", tmp_path]
    ran = subprocess.run([*command, *options], capture_output=True, text=True)
    assert "1 passed" in ran.stdout and "3 failed" in ran.stdout, ran.stdout
    assert "looked 3 times" in ran.stdout and "at once" in ran.stdout
    assert "assert 3 == 4" in ran.stdout
