"""The list of faults that the tests have to find fits the code as it is."""

import ast

import mutants
import pytest

ROOT = mutants.ROOT


@pytest.mark.parametrize("mutant", mutants.mutants(), ids=lambda m: m.file)
def test_a_mutant_can_be_made_and_its_tests_exist(mutant):
    changed = mutant.applied_to(ROOT / "torch_dpbayes")
    ast.parse(changed)
    assert mutant.new != mutant.old
    assert mutant.tests and all((ROOT / name).exists() for name in mutant.tests)
