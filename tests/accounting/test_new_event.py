"""A new kind of event is one file: here is one, and everything takes it."""

import math

import attr
import pytest

from torch_dpbayes.accounting import PrivacyAccountant, PrivacyBudgetExceeded
from torch_dpbayes.accounting.dominating_pairs import Gaussian, pair_of
from torch_dpbayes.accounting.events import (
    DpEvent,
    GaussianDpEvent,
    SelfComposedDpEvent,
    gaussian_noise_multiplier,
    parts_of,
)

DELTA = 1e-5


@attr.s(frozen=True, slots=True, auto_attribs=True)
class TwoSumsDpEvent(DpEvent):
    """Two Gaussian sums over all records, each with noise of its own."""

    first: float
    second: float


@parts_of.register
def _(event: TwoSumsDpEvent, count):
    yield TwoSumsDpEvent(*map(gaussian_noise_multiplier, (event.first, event.second))), count


@pair_of.register
def _(event: TwoSumsDpEvent, replace):
    return Gaussian((1 + replace) * math.hypot(1 / event.first, 1 / event.second))


@pytest.mark.parametrize("method", ["pld", "rdp"])
@pytest.mark.parametrize("neighboring", ["add_or_remove_one", "replace_one"])
def test_it_is_charged_saved_and_read(method, neighboring, path):
    settings = {"method": method, "neighboring": neighboring}
    with PrivacyAccountant(9.0, DELTA, path=path, **settings) as accountant:
        accountant.compose(SelfComposedDpEvent(TwoSumsDpEvent(3.0, 4.0), 2))
    known = PrivacyAccountant(**settings).compose(GaussianDpEvent(3.0), 2)
    truth = known.compose(GaussianDpEvent(4.0), 2).get_epsilon(DELTA)
    loaded = PrivacyAccountant(9.0, DELTA, path=path, **settings)
    assert loaded.get_epsilon() == pytest.approx(truth, rel=1e-9)
    assert [tuple(charge[:2]) for charge in loaded.history] == [(TwoSumsDpEvent(3.0, 4.0), 2)]
    with pytest.raises(PrivacyBudgetExceeded):
        loaded.compose(TwoSumsDpEvent(3.0, 4.0), 10_000)
