"""Whose releases a history holds: a run goes on only where its own are counted, whatever else
is there.
"""

import copy
import json
import logging
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule
from support.examples import examples
from torch import nn

import torch_dpbayes as dpb
from torch_dpbayes.accounting import PrivacyAccountant
from torch_dpbayes.accounting.events import GaussianDpEvent, PoissonSampledDpEvent

STEP = PoissonSampledDpEvent(0.1, GaussianDpEvent(2.0))


def run_on(accountant):
    """An optimizer of a new run."""
    p = nn.Parameter(torch.zeros(3))
    return dpb.optim.DPSGLD(
        [p],
        0.1,
        assume_independent_records=True,
        num_data=100,
        expected_batch_size=10,
        max_grad_norm=1.0,
        noise_multiplier=2.0,
        temperature=0.0,
        sampling="poisson",
        accountant=accountant,
    )


def step(optimizer, times=1):
    (p,) = optimizer.param_groups[0]["params"]
    for _ in range(times):
        p.grad_sample = torch.zeros(4, 3)
        optimizer.step()
    return optimizer


def saved(optimizer):
    return copy.deepcopy(optimizer.state_dict())


@pytest.fixture(params=["memory", "file"])
def accountant(request, tmp_path):
    """An empty one."""
    return PrivacyAccountant(path=tmp_path / "budget.db" if request.param == "file" else None)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.db"


def says_more(accountant):
    """Than that records are independent, which these tests vouch for."""
    return [note for note in accountant.notes if "assume_independent_records" not in note]


# --- copies that cannot know of each other --------------------------------------------------------


def test_copies_in_memory_say_so_and_copies_with_a_ledger_are_counted(path, caplog):
    state = saved(step(run_on(PrivacyAccountant()), 5))
    for _ in range(2):
        alone = run_on(PrivacyAccountant())
        with caplog.at_level(logging.WARNING, logger="torch_dpbayes"):
            caplog.clear()
            alone.load_state_dict(state)
        assert "path=" in caplog.text
        step(alone)
        assert len(alone.accountant) == 6
        said = alone.accountant.summary()
        assert "resumed from a saved state" in said and "parameters were fixed before" in said
        assert "another copy" in " ".join(saved(alone)["private_step"]["accountant"]["notes"])
    PrivacyAccountant(path=path).close()
    caplog.clear()
    for _ in range(2):
        together = run_on(PrivacyAccountant(path=path))
        together.load_state_dict(state)
        step(together).accountant.close()
    assert len(PrivacyAccountant(path=path)) == 7 and not caplog.text


def test_copies_of_what_was_saved_before_the_first_release_say_so_too():
    first = run_on(PrivacyAccountant())
    state = saved(first)
    step(first, 5)
    copied = run_on(PrivacyAccountant())
    copied.load_state_dict(state)
    assert not says_more(copied.accountant)  # nothing was released here
    assert "another copy" in " ".join(step(copied).accountant.notes)
    again = run_on(PrivacyAccountant())
    first_again = saved(again)
    again.load_state_dict(first_again)
    assert not says_more(step(again).accountant)


def test_a_run_that_was_never_resumed_rests_on_nothing(accountant):
    optimizer = step(run_on(accountant), 3)
    state = saved(optimizer)
    optimizer.load_state_dict(state)
    assert not says_more(step(optimizer).accountant)


# --- any sequence ---------------------------------------------------------------------------------


class Resuming(RuleBasedStateMachine):
    """Accountants beside a model of them that knows every single release by a name of its own."""

    accountants, states, copies = Bundle("accountants"), Bundle("states"), Bundle("copies")

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.released = 0
        self.in_memory = {}  # accountant -> names of the releases that it ought to count
        self.in_file = set()  # the same, of the ledger
        self.replaced = set()  # accountants of a file that was put back

    def held(self, accountant):
        return self.in_file if accountant.path else self.in_memory[accountant]

    @rule(target=accountants, in_file=st.booleans())
    def make(self, in_file):
        accountant = PrivacyAccountant(path=self.folder / "budget.db" if in_file else None)
        if not in_file:
            self.in_memory[accountant] = set()
        return accountant

    @rule(accountant=accountants, count=st.integers(1, 2))
    def charge(self, accountant, count):
        if accountant in self.replaced:
            return
        for _ in range(count):
            accountant.compose(STEP)
            self.released += 1
            self.held(accountant).add(self.released)
        accountant.close()

    @rule(target=states, accountant=accountants)
    def save(self, accountant):
        if accountant in self.replaced:
            accountant = PrivacyAccountant(path=accountant.path)
        state = json.loads(json.dumps(accountant.state_dict()))
        return state, frozenset(self.held(accountant)), accountant.path

    @rule(accountant=accountants, given=states)
    def resume(self, accountant, given):
        if accountant in self.replaced:
            return
        state, names, home = given
        held = self.held(accountant)
        belongs = home is None or home == accountant.path
        try:
            accountant.resume(state)
        except ValueError:
            # a ledger without the charges of its own run is an older copy
            is_honest = names <= held or (home is None and not held)
            assert not (belongs and is_honest), "an honest run was refused"
            return
        assert belongs
        if home is None and not held:
            held |= names
        assert names <= held, "releases of the saved run were forgotten"

    @rule(target=copies)
    def back_up(self):
        PrivacyAccountant(path=self.folder / "budget.db")
        backup = Path(tempfile.mkdtemp(dir=self.folder)) / "backup.db"
        shutil.copy(self.folder / "budget.db", backup)
        return backup, frozenset(self.in_file)

    @rule(target=accountants, backup=copies, as_many=st.booleans())
    def put_back(self, backup, as_many):
        """An older copy of the file; perhaps charged until it counts as many releases as before."""
        copied, names = backup
        lost = len(self.in_file - names)
        path = self.folder / "budget.db"
        for suffix in ("-wal", "-shm"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)
        shutil.copy(copied, path)
        self.in_file = set(names)
        self.replaced |= {a for a in self.all_accountants() if a.path is not None}
        accountant = PrivacyAccountant(path=path)
        if as_many and lost:
            self.charge(accountant, lost)
        return accountant

    def all_accountants(self):
        return [
            value for value in self.names_to_values.values() if isinstance(value, PrivacyAccountant)
        ]

    @invariant()
    def every_release_counts_once(self):
        for accountant in self.all_accountants():
            if accountant not in self.replaced:
                assert len(accountant) == len(self.held(accountant))

    def teardown(self):
        shutil.rmtree(self.folder)


Resuming.TestCase.settings = examples(30, stateful_step_count=25)
TestResuming = Resuming.TestCase


class LongResuming(Resuming):
    pass


LongResuming.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestLongResuming = pytest.mark.slow(LongResuming.TestCase)
