"""What tests ask of an error: its code, not its words."""

from contextlib import contextmanager

import pytest

import torch_dpbayes as dpb


@contextmanager
def refused(code):
    """The block raises an error of this code."""
    with pytest.raises(dpb.DPBayesError) as caught:
        yield caught
    assert caught.value.code == code, caught.value
