"""The comparison of two commits notices the last bit."""

import math

import pytest
import torch
from compare_commits import differences

RUN = {"parameter": torch.tensor([0.1, 2.0]), "epsilon": 1.5, "history": "[]", "left": 7}


def test_equal_runs_do_not_differ():
    strange = {"parameter": torch.tensor([math.nan, -0.0]), "epsilon": math.nan}
    for run in (RUN, strange):
        copy = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in run.items()}
        assert differences(run, copy) == []


@pytest.mark.parametrize(
    "changed",
    [
        {"parameter": torch.tensor([0.1, 2.0 * (1 + 2**-23)])},
        {"parameter": torch.tensor([0.1, 2.0], dtype=torch.float64)},
        {"parameter": torch.tensor([[0.1, 2.0]])},
        {"epsilon": math.nextafter(1.5, 2)},
        {"history": "[1]"},
        {"left": 8},
        {"more": 1},
    ],
)
def test_one_value_that_differs_is_named(changed):
    (found,) = differences(RUN, {**RUN, **changed})
    assert found.startswith(next(iter(changed)))


def test_a_run_that_failed_is_equal_to_nothing():
    assert differences("ValueError: x", "ValueError: x")
