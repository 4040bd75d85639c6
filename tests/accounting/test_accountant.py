"""The accountant: what it records, what it refuses, and what it says."""

import math
from pathlib import Path

import dp_accounting as dpa
import numpy as np
import pytest
import torch

from torch_dpbayes.accounting import (
    PrivacyAccountant,
    PrivacyBudgetExceeded,
)
from torch_dpbayes.accounting.calibration import get_noise_multiplier
from torch_dpbayes.accounting.events import (
    BoundedRangeDpEvent,
    ComposedDpEvent,
    FailureDpEvent,
    GaussianDpEvent,
    MuGaussianDpEvent,
    NonPrivateDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    PureDpEvent,
    RecordwiseBatchGaussianDpEvent,
    SampledWithoutReplacementDpEvent,
    SelfComposedDpEvent,
    ShuffledEpochDpEvent,
    UnspecifiedBatchGaussianDpEvent,
    ZCDpEvent,
)
from torch_dpbayes.accounting.mechanisms import DiscreteGaussianDpEvent
from torch_dpbayes.accounting.random_allocation import RandomAllocationDpEvent
from torch_dpbayes.errors import ArgumentError

DELTA = 1e-5
RELATIONS = ("add_or_remove_one", "replace_one")
OF_ADDED_RECORDS = {"MixtureOfGaussiansDpEvent"}  # refused where records are replaced
STEP = PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0))

EXAMPLES = {
    "GaussianDpEvent": GaussianDpEvent(2.0),
    "PoissonSampledDpEvent": PoissonSampledDpEvent(0.1, GaussianDpEvent(2.0)),
    "SampledWithoutReplacementDpEvent": SampledWithoutReplacementDpEvent(
        100, 10, GaussianDpEvent(2.0)
    ),
    "UnspecifiedBatchGaussianDpEvent": UnspecifiedBatchGaussianDpEvent(2.0),
    "RecordwiseBatchGaussianDpEvent": RecordwiseBatchGaussianDpEvent(2.0),
    "ShuffledEpochDpEvent": ShuffledEpochDpEvent(2.0),
    "TruncatedSubsampledGaussianDpEvent": dpa.dp_event.TruncatedSubsampledGaussianDpEvent(
        100, 0.1, 14, 2.0
    ),
    "RandomAllocationDpEvent": RandomAllocationDpEvent(20, GaussianDpEvent(2.0)),
    "LaplaceDpEvent": dpa.LaplaceDpEvent(3.0),
    "DiscreteLaplaceDpEvent": dpa.dp_event.DiscreteLaplaceDpEvent(0.2, 2),
    "DiscreteGaussianDpEvent": DiscreteGaussianDpEvent(4.0, 2, 1),
    "RandomizedResponseDpEvent": dpa.dp_event.RandomizedResponseDpEvent(0.6, 4),
    "MixtureOfGaussiansDpEvent": dpa.dp_event.MixtureOfGaussiansDpEvent(
        2.0, (1.0, 2.0, 0.0), (0.2, 0.1, 0.7)
    ),
    "MuGaussianDpEvent": MuGaussianDpEvent(0.5),
    "ZCDpEvent": ZCDpEvent(0.1, 0.05),
    "PureDpEvent": PureDpEvent(0.3),
    "BoundedRangeDpEvent": BoundedRangeDpEvent(0.3),
    "FailureDpEvent": FailureDpEvent(1e-6),
    "NonPrivateDpEvent": NonPrivateDpEvent(),
    "NoOpDpEvent": NoOpDpEvent(),
}


def table():
    """The page's rows: name, relation, verdicts of both methods. What costs something is left to
    .ci/run, since ``test_compositions`` compares it with its definition.
    """
    text = (Path(__file__).resolve().parents[2] / "docs/reference/events.md").read_text()
    for line in text.splitlines():
        if "DpEvent |" not in line:
            continue
        name, *verdicts = [cell.strip() for cell in line.strip("|").split("|")]
        for i, relation in enumerate(RELATIONS):
            row = (name, relation, *verdicts[2 * i : 2 * i + 2])
            marks = [pytest.mark.thorough] if {"tight", "bound"} & {*row} else []
            yield pytest.param(*row, marks=marks)


def test_the_table_is_complete():
    assert {row.values[:2] for row in table()} == {
        (name, relation) for name in EXAMPLES for relation in RELATIONS
    }


@pytest.mark.parametrize(("name", "relation", "pld", "rdp"), [*table()])
def test_every_cell_of_the_table(name, relation, pld, rdp):
    event = EXAMPLES[name]
    for method, verdict in (("pld", pld), ("rdp", rdp)):
        accountant = PrivacyAccountant(method=method, neighboring=relation)
        if verdict == "refused":
            with pytest.raises(ArgumentError):
                accountant.compose(event)
            assert len(accountant) == 0
            continue
        accountant.compose(event, 3)
        bounds = accountant.get_epsilon(DELTA, return_bounds=True)
        assert 0 <= bounds.lower <= bounds.upper
        if verdict == "infinite":
            assert bounds.upper == math.inf
            assert accountant.get_delta(1.0) == 1.0
        elif verdict == "free":
            assert bounds.upper == 0.0 == accountant.get_delta(0.0)
        elif verdict == "delta only":
            assert bounds == (0.0, 0.0) and accountant.get_epsilon(2.9e-6) == math.inf
            assert accountant.get_delta(0.0) == pytest.approx(3e-6, rel=1e-5)
        else:
            assert 0 < bounds.upper < math.inf
            assert 0 <= accountant.get_delta(bounds.upper * 1.001) <= DELTA
            if verdict == "tight":
                assert bounds.lower >= 0.98 * bounds.upper


@pytest.mark.thorough
def test_to_dp_event_gives_dp_accountings_epsilon():
    accountant = PrivacyAccountant()
    accountant.compose(STEP, 500, label="a").compose(GaussianDpEvent(np.float32(30.0)), 10).compose(
        STEP, 5
    )
    theirs = dpa.pld.PLDAccountant(value_discretization_interval=1e-4).compose(
        accountant.to_dp_event()
    )
    assert accountant.get_epsilon(DELTA) == pytest.approx(theirs.get_epsilon(DELTA), rel=1e-3)


def test_composed_events_are_taken_apart():
    nested = ComposedDpEvent(
        [SelfComposedDpEvent(STEP, 3), ComposedDpEvent([NoOpDpEvent(), GaussianDpEvent(9.0)])]
    )
    accountant = PrivacyAccountant().compose(nested, 2)
    assert {(charge.event, charge.count) for charge in accountant.history} == {
        (STEP, 6),
        (GaussianDpEvent(9.0), 2),
    }
    assert len(accountant) == 8


# --- budget ---------------------------------------------------------------------------------------


def test_remaining_without_budget_is_infinite():
    assert PrivacyAccountant().remaining(STEP) == math.inf
    assert PrivacyAccountant(1.0, DELTA).remaining(NonPrivateDpEvent()) == 0
    assert PrivacyAccountant(1.0, DELTA).remaining(NoOpDpEvent()) == math.inf


# --- adaptivity -----------------------------------------------------------------------------------


def test_gaussian_filter_is_exact_for_gaussians_and_takes_sampled_releases_unamplified():
    accountant = PrivacyAccountant(1.0, DELTA)
    accountant.compose(GaussianDpEvent(100.0), adaptive=True)
    limit = 1.0 / dpa.get_sigma_gaussian(1.0, DELTA)
    assert accountant.remaining(GaussianDpEvent(100.0)) == math.floor((limit**2 - 1e-4) / 1e-4)
    assert accountant.remaining(
        PoissonSampledDpEvent(0.1, GaussianDpEvent(100.0))
    ) == accountant.remaining(GaussianDpEvent(100.0))


def test_only_a_first_charge_of_something_declares_a_filter():
    accountant = PrivacyAccountant(3.0, DELTA).compose(NoOpDpEvent())
    with pytest.raises(ArgumentError):
        accountant.compose(NoOpDpEvent(), adaptive=True)
    assert accountant.compose(STEP, adaptive=True).guarantee == "filter"
    fixed = PrivacyAccountant(1.0, DELTA).compose(STEP)
    for given in (PrivacyAccountant(), fixed):
        before = len(given)
        with pytest.raises(ArgumentError):
            given.compose(STEP, adaptive=True)
        assert len(given) == before


# --- saving, copying, processes -------------------------------------------------------------------


def test_every_event_survives_saving(tmp_path):
    accountant = PrivacyAccountant(neighboring="replace_one", method="rdp")
    for name in set(EXAMPLES) - OF_ADDED_RECORDS:
        accountant.compose(EXAMPLES[name], label=name)
    torch.save(accountant.state_dict(), tmp_path / "state.pt")
    loaded = PrivacyAccountant(neighboring="replace_one", method="rdp")
    loaded.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert loaded.history == accountant.history and loaded.summary() == accountant.summary()


# --- what it says, and bad input ------------------------------------------------------------------


def test_summary_says_what_matters():
    accountant = PrivacyAccountant(3.0, DELTA, neighboring="replace_one")
    accountant.compose(PoissonSampledDpEvent(0.01, GaussianDpEvent(2.0)), 100, label="training")
    accountant.compose(GaussianDpEvent(20.0), label="report")
    text = accountant.summary()
    for part in ("replace_one", "pld", "epsilon = 3", "1e-05", "training", "report"):
        assert part in text
    assert "epsilon <= inf" in PrivacyAccountant().compose(NonPrivateDpEvent()).summary()


def test_empty_accountant():
    accountant = PrivacyAccountant()
    assert accountant and len(accountant) == 0
    assert accountant.get_epsilon(DELTA, return_bounds=True) == (0.0, 0.0)
    assert accountant.get_delta(0.0) == 0.0


# --- Opacus ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Secure RNG turned off")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_serves_as_opacus_accountant():
    from opacus import PrivacyEngine

    data = torch.utils.data.TensorDataset(torch.randn(64, 3), torch.randn(64, 1))
    engine = PrivacyEngine()
    engine.accountant = accountant = PrivacyAccountant(8.0, DELTA)
    module = torch.nn.Linear(3, 1)
    module, optimizer, loader = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader(data, batch_size=16),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for x, y in loader:
        optimizer.zero_grad()
        (module(x) - y).square().mean().backward()
        optimizer.step()
    assert accountant.history[0][:2] == (PoissonSampledDpEvent(0.25, GaussianDpEvent(1.0)), 4)
    assert engine.get_epsilon(DELTA) == accountant.get_epsilon()
    assert accountant.notes == ("Poisson sampling asserted by the caller",)
    assert "rests on    Poisson sampling asserted by the caller" in accountant.summary()
    with pytest.raises(PrivacyBudgetExceeded):
        for _ in range(1000):
            accountant.step(noise_multiplier=1.0, sample_rate=0.25)


def test_opacus_accumulated_batches_are_refused():
    class Optimizer:
        noise_multiplier = 1.0
        accumulated_iterations = 2

    accountant = PrivacyAccountant()
    with pytest.raises(RuntimeError, match="BatchMemoryManager"):
        accountant.get_optimizer_hook_fn(0.1)(Optimizer())
    assert len(accountant) == 0


def test_an_adaptive_history_keeps_its_filter_when_it_is_saved():
    accountant = PrivacyAccountant(3.0, DELTA)
    accountant.compose(ComposedDpEvent([GaussianDpEvent(20.0), STEP]), 10, adaptive=True)
    accountant.compose(STEP, 600, adaptive=True)
    loaded = PrivacyAccountant(3.0, DELTA)
    loaded.load_state_dict(accountant.state_dict())
    assert loaded.summary() == accountant.summary()
    plan = {"target_epsilon": 1.0, "target_delta": DELTA, "sample_rate": 0.01, "steps": 10}
    with pytest.raises(ArgumentError):
        get_noise_multiplier(**plan, history=accountant.history)


def test_a_loaded_history_a_hair_above_its_budget_states_its_epsilon():
    charged = PrivacyAccountant(3.0, DELTA).compose(STEP, 500)
    epsilon = charged.get_epsilon()
    budget = epsilon / 1.0005
    loaded = PrivacyAccountant(budget, DELTA)
    loaded.load_state_dict({**charged.state_dict(), "epsilon": budget})
    assert loaded.get_epsilon() == epsilon > budget and loaded.remaining(STEP) == 0


def test_a_handler_that_charges_while_epsilon_is_computed_leaves_no_stale_number(monkeypatch):
    accountant = PrivacyAccountant().compose(GaussianDpEvent(2.0))
    compute = type(accountant._session).fixed_epsilon

    def interrupted(self, delta, counts=None):
        found = compute(self, delta, counts)
        monkeypatch.undo()
        accountant.compose(GaussianDpEvent(1.0), 5)
        return found

    monkeypatch.setattr(type(accountant._session), "fixed_epsilon", interrupted)
    accountant.get_epsilon(1e-5)
    both = PrivacyAccountant().compose(GaussianDpEvent(2.0)).compose(GaussianDpEvent(1.0), 5)
    assert accountant.get_epsilon(1e-5) == both.get_epsilon(1e-5)
