"""The library audits itself: what a run states is not refuted, and is where faults are made."""

import pytest
from audit_power import FAULTS, STATED, audited_with

CAUGHT = [name for name in FAULTS if name[0] not in "12"]  # of one or two charges, not always


@pytest.mark.chance(0.01, looks=4)
@pytest.mark.slow
@pytest.mark.parametrize("fault", CAUGHT)
def test_faults_are_caught(fault):
    """They double μ at least, of which the bound shows three fifths and more in all but one of a
    hundred thousand runs; a sound run, whose canaries are records 100 times longer than the clip
    norm, is refuted in one of a hundred, and shows more than a third of ε.
    """
    (result,) = audited_with(fault)
    assert result.epsilon == pytest.approx(STATED)
    assert result.is_refuted is not fault.startswith("none")
    assert result.epsilon_lower_bound > STATED / 3 or fault == "none, by differences"
