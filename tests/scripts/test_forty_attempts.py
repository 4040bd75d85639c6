"""What newcomers try ends in a right result, or in a short error that names the fix."""

import forty_attempts
import pytest


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", forty_attempts.ATTEMPTS)
def test_an_attempt_ends_well(name):
    assert not (what := forty_attempts.outcome(name)).startswith("WRONG"), what


def test_there_are_forty():
    assert len(forty_attempts.ATTEMPTS) == 40
