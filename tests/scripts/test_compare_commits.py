"""The comparison of two commits notices the last bit."""

import math

import pytest
import torch
from compare_commits import differences

RUN = {"parameter": torch.tensor([0.1, math.nan]), "epsilon": 1.5, "history": "[]"}
CHANGED = {
    "a bit": {"parameter": torch.tensor([0.1 * (1 + 2**-23), math.nan])},
    "a dtype": {"parameter": RUN["parameter"].double()},
    "a shape": {"parameter": RUN["parameter"][None]},
    "a digit": {"epsilon": math.nextafter(1.5, 2)},
    "a word": {"history": "[1]"},
    "a name": {"more": 1},
}


@pytest.mark.parametrize("name", CHANGED)
def test_one_value_that_differs_is_named(name):
    assert differences(RUN, {**RUN, "parameter": RUN["parameter"].clone()}) == []
    (found,) = differences(RUN, {**RUN, **CHANGED[name]})
    assert found.startswith(next(iter(CHANGED[name])))


def test_a_run_that_failed_is_equal_to_nothing():
    assert differences("ValueError: x", "ValueError: x")
