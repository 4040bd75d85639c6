"""The lists of faults that the tests have to find fit the code as it is."""

import mutants


def test_mutants_can_be_made_and_their_tests_exist():
    for mutant in mutants.mutants():
        assert mutant.applied_to(mutants.ROOT / "torch_dpbayes")
        assert mutant.new != mutant.old
        assert mutant.tests and all((mutants.ROOT / name).exists() for name in mutant.tests), mutant
