"""A statistical test is looked at again before it fails; listed faults fit the code as it is."""

import io
import shutil
from contextlib import redirect_stdout
from pathlib import Path

import mutants
import pytest
from support.children import in_child

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
    options = "-q -n 0 -p no:cacheprovider -c /dev/null -W ignore --rootdir".split()

    def run():
        with redirect_stdout(io.StringIO()) as said:
            pytest.main([*options, str(tmp_path), str(tmp_path)])
        return said.getvalue()

    said = in_child(run)
    assert "1 passed" in said and "3 failed" in said, said
    assert "looked 3 times" in said and "at once" in said
    assert "assert 3 == 4" in said


def test_mutants_can_be_made_and_their_tests_exist():
    for mutant in mutants.mutants():
        assert mutant.applied_to(mutants.ROOT / "torch_dpbayes")
        assert mutant.new != mutant.old
        assert mutant.tests and all((mutants.ROOT / name).exists() for name in mutant.tests), mutant
