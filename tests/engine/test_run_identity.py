"""Whose releases a history holds: a run goes on only where its own are counted, whatever else
is there.
"""

import copy
import logging
import shutil

import pytest
from support.steps import bare, fill, zeros

from torch_dpbayes.accounting import PrivacyAccountant
from torch_dpbayes.accounting.accountant import PrivacyBudgetExceeded
from torch_dpbayes.accounting.events import GaussianDpEvent, PoissonSampledDpEvent

STEP = PoissonSampledDpEvent(0.1, GaussianDpEvent(2.0))


def run_on(accountant, state=None):
    """An optimizer of a new run, or of one that goes on."""
    optimizer = bare([zeros(3)], noise_multiplier=2.0, temperature=0.0, accountant=accountant)
    if state is not None:
        optimizer.load_state_dict(state)
    return optimizer


def step(optimizer, times=1):
    for _ in range(times):
        fill(optimizer.param_groups[0]["params"], records=4)
        optimizer.step()
    return optimizer


def saved(optimizer):
    return copy.deepcopy(optimizer.state_dict())


def is_one_of_several(optimizer):
    """Whether its accountant says that other copies may have released more."""
    return any("another copy" in note for note in optimizer.accountant.notes)


def test_copies_in_memory_say_so_and_copies_with_a_ledger_are_counted(tmp_path, caplog):
    caplog.set_level(logging.WARNING, logger="torch_dpbayes")
    path, first = tmp_path / "ledger.db", run_on(PrivacyAccountant())
    before = saved(first)
    state = saved(step(first, 5))
    alone = step(run_on(PrivacyAccountant(), state))
    assert len(alone.accountant) == 6 and is_one_of_several(alone) and "path=" in caplog.text
    # also of what was saved before the first release, once something is released
    copied = run_on(PrivacyAccountant(), before)
    assert not is_one_of_several(copied) and is_one_of_several(step(copied))
    PrivacyAccountant(path=path).close()
    caplog.clear()
    for _ in range(2):
        step(run_on(PrivacyAccountant(path=path), state)).accountant.close()
    assert len(PrivacyAccountant(path=path)) == 7 and not caplog.text


@pytest.mark.parametrize("times", [0, 3])
@pytest.mark.parametrize("is_kept", [False, True])
def test_a_run_that_goes_back_within_itself_rests_on_nothing(is_kept, times, tmp_path):
    place = tmp_path / "budget.db" if is_kept else None
    optimizer = step(run_on(PrivacyAccountant(path=place)), times)
    optimizer.load_state_dict(saved(optimizer))
    assert not is_one_of_several(step(optimizer))


def test_what_an_open_block_reserves_is_not_given_away(tmp_path):
    """Releases of another kind, until none fits, leave room for those that a block holds."""
    reserved, other = GaussianDpEvent(12.0), PoissonSampledDpEvent(0.1, GaussianDpEvent(1.0))
    total, alone = PrivacyAccountant(4.0, 1e-5, path=tmp_path / "budget.db"), PrivacyAccountant()
    for _ in range(2):
        total.compose(reserved)
    for event in (other, reserved):
        with pytest.raises(PrivacyBudgetExceeded):
            for _ in range(1000):
                total.compose(event)
    for charge in total.history:
        alone.compose(charge.event, charge.count)
    assert alone.get_epsilon(1e-5) <= 4.0


def test_equal_releases_of_another_run_do_not_count(tmp_path):
    """Nor do those of a file that was put back and charged as often since."""
    state = PrivacyAccountant().compose(STEP, 2).state_dict()
    other, own = PrivacyAccountant().compose(STEP, 3), PrivacyAccountant()
    own.resume(state)
    own.compose(STEP).resume(state)
    with pytest.raises(ValueError):
        other.resume(state)
    assert len(own) == len(other) == 3
    path, backup = tmp_path / "budget.db", tmp_path / "backup.db"
    PrivacyAccountant(path=path).compose(STEP).close()
    shutil.copy(path, backup)
    later = PrivacyAccountant(path=path).compose(STEP, 2)
    later.close()
    state = later.state_dict()
    later.resume(state)
    assert len(later) == 3
    shutil.copy(backup, path)
    restored = PrivacyAccountant(path=path).compose(STEP, 2)
    assert len(restored) == 3
    with pytest.raises(ValueError):
        restored.resume(state)
