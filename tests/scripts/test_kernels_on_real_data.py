"""What the script counts as silence."""

import kernels_on_real_data as script
import pytest
from reproduction import Run


def test_a_posterior_that_covers_little_is_silent_unless_one_of_two_warnings_was_given():
    def result(covers, plan, run):
        figures = {"error": 1.0, "width": 1.0, "log_likelihood": -0.5}
        chain = {**figures, "covers": covers}
        both = {"noise_aware.laplace": {**figures, "covers": 0.5}, "chain": chain}
        return {"figures": both, "plan": plan, "run": run, "seconds": 1.0}

    job = {"data": "a", "epsilon": 1.0}
    cases = [(0.5, True, False), (0.5, False, True), (0.5, False, False), (0.8, False, False)]
    (row,) = script.summary([Run(job, result(*case), 1.0, "", "") for case in cases])
    assert (row["runs"], row["plan warned"], row["run warned"]) == (4, 1, 1)
    assert (row["covers less than .8"], row["of these silent"]) == (3, 1)
    assert row["chain: covers"] == pytest.approx(0.575)
