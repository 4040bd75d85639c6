"""Accountants of records and of users take nothing of each other, in memory and in a ledger."""

import pytest

import torch_dpbayes as dpb
from torch_dpbayes.accounting import events
from torch_dpbayes.accounting.accountant import look_at
from torch_dpbayes.accounting.events import (
    ComposedDpEvent,
    GaussianDpEvent,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    PureDpEvent,
    RecordwiseBatchGaussianDpEvent,
    UserLevelDpEvent,
)

STEP = PoissonSampledDpEvent(0.1, GaussianDpEvent(1.0))
OF = {"record": STEP, "user": UserLevelDpEvent(STEP)}


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize(
    ("unit", "event"),
    [
        ("user", STEP),
        ("user", PureDpEvent(0.1)),
        ("user", NonPrivateDpEvent()),
        ("user", ComposedDpEvent([OF["user"], STEP])),
        ("user", UserLevelDpEvent(OF["user"])),
        ("record", OF["user"]),
        ("record", ComposedDpEvent([STEP, OF["user"]])),
    ],
)
def test_what_protects_the_other_is_refused(unit, event, is_kept, tmp_path):
    place = {"path": tmp_path / "budget.db"} if is_kept else {}
    accountant = dpb.PrivacyAccountant(5.0, 1e-5, unit=unit, **place)
    for call in (accountant.compose, accountant.remaining):
        with pytest.raises((ValueError, TypeError)):
            call(event)
    assert len(accountant) == 0
    assert len(accountant.compose(OF[unit])) == 1


@pytest.mark.parametrize(("unit", "other"), [("user", "record"), ("record", "user")])
def test_a_ledger_stays_what_it_is(unit, other, tmp_path):
    path = tmp_path / "budget.db"
    with dpb.PrivacyAccountant(5.0, 1e-5, path=path, unit=unit) as accountant:
        accountant.compose(OF[unit], 3)
    assert look_at(path)[0].unit == unit
    with pytest.raises(ValueError):
        dpb.PrivacyAccountant(5.0, 1e-5, path=path, unit=other)
    epsilon = dpb.PrivacyAccountant().compose(STEP, 3).get_epsilon(1e-5)
    assert accountant.get_epsilon() == pytest.approx(epsilon, rel=1e-9)


def test_events_of_users_are_kept_and_lowered():
    event = OF["user"]
    assert events.decode(events.encode(event)) == event
    assert [*events.elementary(ComposedDpEvent([event, event]), 2)] == [(event, 2), (event, 2)]
    low = events.lowered(event, 1.0)
    assert isinstance(low, UserLevelDpEvent) and low.event.event.noise_multiplier <= 1.0


def test_what_a_charge_of_users_rests_on_is_stated():
    event = UserLevelDpEvent(RecordwiseBatchGaussianDpEvent(2.0))
    accountant = dpb.PrivacyAccountant(unit="user").compose(event)
    assert any("Recordwise" in note for note in accountant.notes)
