"""Truncated Poisson draws, batches of fixed size and random allocation: their joint laws, what they
are charged as, and that they go on where they were.
"""

import copy
import math
from functools import partial

import pytest
import torch
from dp_accounting.dp_event import TruncatedSubsampledGaussianDpEvent
from opacus.utils.batch_memory_manager import BatchMemoryManager
from support import steps
from support.training import values
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes import noise
from torch_dpbayes.accounting.events import (
    GaussianDpEvent,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
)
from torch_dpbayes.accounting.random_allocation import RandomAllocationDpEvent


def loader_of(rows=12, batch_size=4, **options):
    x = torch.arange(float(rows))[:, None] / rows
    return DataLoader(TensorDataset(x, torch.zeros(rows, 1)), batch_size=batch_size, **options)


def private(
    rows=12, batch_size=4, accountant=None, temperature=0.0, noise_multiplier=1.0, **options
):
    made = {k: options.pop(k) for k in ("generator", "num_workers") if k in options}
    return dpb.PrivacyEngine(accountant).make_private(
        module=nn.Linear(1, 1),
        optimizer=partial(dpb.optim.DPSGLD, lr=1e-4, temperature=temperature),
        data_loader=loader_of(rows, batch_size, **made),
        max_grad_norm=1.0,
        noise_multiplier=noise_multiplier,
        **options,
    )


one = partial(steps.one, loss=nn.functional.mse_loss)
train = partial(steps.train, loss=nn.functional.mse_loss)


def records(batch, rows=12):
    return tuple((values(batch[0])[:, 0] * rows).round().int().tolist())


def events_of(accountant):
    return [tuple(charge[:2]) for charge in accountant.history]


# -- what is charged -------------------------------------------------------------------------------


def test_random_allocation_is_charged_once_a_pass():
    net, optimizer, loader = private(sampling="random_allocation", noise_multiplier=2.0)
    event = RandomAllocationDpEvent(3, GaussianDpEvent(2.0))
    for epoch in (1, 2):
        seen = []
        for batch in loader:
            one(net, optimizer, batch)
            seen += records(batch)
            assert events_of(optimizer.accountant) == [(event, epoch)]
        assert sorted(seen) == list(range(12))
    assert optimizer.sampling == "random_allocation"


def test_a_pass_that_was_left_goes_on_and_ends():
    net, optimizer, loader = private(sampling="random_allocation")
    first = next(iter(loader))
    assert records(first) == records(next(iter(loader)))
    seen = []
    for batch in loader:
        one(net, optimizer, batch)
        seen += records(batch)
        break
    rest = list(loader)
    assert len(rest) == 2
    assert sorted(seen + [r for batch in rest for r in records(batch)]) == list(range(12))
    train(net, optimizer, loader)
    assert len(optimizer.accountant) == 1


def test_the_noise_must_not_fall_within_a_pass():
    net, optimizer, loader = private(
        sampling="random_allocation", noise_multiplier=0.1, temperature=1.0
    )
    group = optimizer.param_groups[0]
    batches = iter(loader)
    one(net, optimizer, next(batches))
    charged = optimizer.effective_noise_multiplier
    group["lr"] = 1e-5  # more noise
    one(net, optimizer, next(batches))
    group["lr"] = 1e-2
    batch = next(batches)
    with pytest.raises(ValueError, match="change lr between passes"):
        one(net, optimizer, batch)
    group["lr"] = 1e-4
    one(net, optimizer, next(iter(loader)))
    event = RandomAllocationDpEvent(3, GaussianDpEvent(charged))
    assert events_of(optimizer.accountant) == [(event, 1)]
    group["lr"] = 1e-2
    one(net, optimizer, next(iter(loader)))
    assert len(optimizer.accountant) == 2


def test_a_step_that_failed_after_its_charge_is_charged_again(monkeypatch):
    """It may have been released."""
    net, optimizer, loader = private(sampling="random_allocation")
    one(net, optimizer, next(iter(loader)))
    original = optimizer.release.query.add_noise

    def fails(*_):
        raise OSError("no noise")

    batch = next(iter(loader))
    monkeypatch.setattr(optimizer.release.query, "add_noise", fails)
    with pytest.raises(OSError, match="no noise"):
        one(net, optimizer, batch)
    monkeypatch.setattr(optimizer.release.query, "add_noise", original)
    assert len(optimizer.accountant) == 1
    one(net, optimizer, next(iter(loader)))
    assert len(optimizer.accountant) == 2


@pytest.mark.parametrize("neighboring", ["add_or_remove_one", "replace_one"])
@pytest.mark.parametrize(
    "options, event",
    [
        (
            {"max_batch_size": 6},
            lambda z: TruncatedSubsampledGaussianDpEvent(12, 1 / 3, 6, z),
        ),
        (
            {"sampling": "fixed_size"},
            lambda z: SampledWithoutReplacementDpEvent(12, 4, GaussianDpEvent(z)),
        ),
        ({}, lambda z: PoissonSampledDpEvent(1 / 3, GaussianDpEvent(z))),
    ],
)
def test_each_law_is_charged_as_itself(options, event, neighboring):
    accountant = dpb.PrivacyAccountant(neighboring=neighboring)
    net, optimizer, loader = private(accountant=accountant, noise_multiplier=1.5, **options)
    for batch in loader:
        assert len(batch[0]) <= options.get("max_batch_size", 12)
        if "sampling" in options:
            assert len(batch[0]) == 4
        one(net, optimizer, batch)
    assert events_of(accountant) == [(event(1.5), 3)]


def test_an_optimizer_with_another_loader_is_charged_for_that_one():
    net, optimizer, loader = private(max_batch_size=8)
    one(net, optimizer, next(iter(loader)))
    net, optimizer, loader = dpb.PrivacyEngine().make_private(
        module=net, optimizer=optimizer, data_loader=loader_of(), max_batch_size=4
    )
    one(net, optimizer, next(iter(loader)))
    cut = [event.truncated_batch_size for event, _ in events_of(optimizer.accountant)]
    assert cut == [8, 4]


@pytest.mark.parametrize("sampling", ["random_allocation", "fixed_size"])
def test_full_batches_are_full_batches(sampling):
    net, optimizer, loader = private(batch_size=12, sampling=sampling)
    train(net, optimizer, loader)
    assert events_of(optimizer.accountant) == [(GaussianDpEvent(1.0), 1)]


@pytest.mark.parametrize(
    "options",
    [
        {"sampling": "fixed_size"},
        {"user_ids": [i // 3 for i in range(12)], "records_per_user": 2},
        pytest.param({"sampling": "random_allocation"}, marks=pytest.mark.thorough),
        pytest.param({"max_batch_size": 8}, marks=pytest.mark.thorough),
    ],
)
def test_the_noise_of_a_target_is_that_of_the_law(options):
    epochs, target = 2, 4.0
    engine = dpb.PrivacyEngine()
    arguments = {
        "module": nn.Linear(1, 1),
        "optimizer": partial(dpb.optim.DPSGLD, lr=1e-9, temperature=0.0),
        "data_loader": loader_of(),
        "target_epsilon": target,
        "target_delta": 1e-5,
        "epochs": epochs,
        "max_grad_norm": 1.0,
        **options,
    }
    plan = engine.plan(**arguments)
    net, optimizer, loader = engine.make_private_with_epsilon(**arguments)
    assert plan.steps == epochs * len(loader)
    train(net, optimizer, loader, epochs=epochs)
    assert target * 0.99 <= engine.get_epsilon() <= target
    assert plan.epsilon == pytest.approx(engine.get_epsilon(), rel=1e-9)
    with pytest.raises(dpb.PrivacyBudgetExceeded):
        one(net, optimizer, next(iter(loader)))


# -- saved runs and copies -------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [12, 100])
def test_a_saved_run_of_another_law_is_refused(monkeypatch, rows):
    """Nothing is changed."""
    states = {}
    for sampling in ("poisson", "random_allocation"):
        monkeypatch.setattr(noise, "_used_positions", set())
        made = private(rows, sampling=sampling, generator=torch.Generator())
        states[sampling] = made[1].state_dict()
    for sampling, other in (("poisson", "random_allocation"), ("random_allocation", "poisson")):
        monkeypatch.setattr(noise, "_used_positions", set())
        _, optimizer, _ = private(rows, sampling=sampling, generator=torch.Generator())
        with pytest.raises(ValueError, match="in another way"):
            optimizer.load_state_dict(states[other])


def test_a_pass_that_is_paid_does_not_go_on_with_a_dearer_query(monkeypatch):
    """The same noise hides less where more is released."""
    state = None
    for share in (0.1, 1.0):
        monkeypatch.setattr(noise, "_used_positions", set())
        net, optimizer, loader = dpb.PrivacyEngine().make_private(
            module=nn.Linear(1, 1),
            optimizer=partial(dpb.optim.DPSGFS, lr=1e-6, fisher_share=share),
            data_loader=loader_of(generator=torch.Generator()),
            max_grad_norm=1.0,
            noise_multiplier=1e3,
            sampling="random_allocation",
        )
        if state is None:
            one(net, optimizer, next(iter(loader)))
            state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match="fell"):
        one(net, optimizer, next(iter(loader)))


def test_a_pass_is_not_drawn_again_in_one_process():
    """Its later steps add no charge by which the accountant could tell."""
    generator = torch.Generator().manual_seed(torch.initial_seed())
    accountant = dpb.PrivacyAccountant()
    net, optimizer, loader = private(
        sampling="random_allocation", generator=generator, accountant=accountant
    )
    one(net, optimizer, next(iter(loader)))
    state = copy.deepcopy(optimizer.state_dict())
    one(net, optimizer, next(iter(loader)))
    optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match="already drawn"):
        next(iter(loader))


@pytest.mark.parametrize("options", [{"sampling": "random_allocation"}, {"sampling": "fixed_size"}])
def test_parts_and_workers(options):
    net, optimizer, loader = private(**options)
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
    ) as parts:
        for batch in parts:
            one(net, optimizer, batch)
    is_allocated = options["sampling"] == "random_allocation"
    assert len(optimizer.accountant) == (1 if is_allocated else 3)
    net, optimizer, loader = private(num_workers=1, **options)
    seen = []
    for batch in loader:
        one(net, optimizer, batch)
        seen += records(batch)
    assert len(seen) == 12 and math.isclose(loader.expected_batch_size, 4)
