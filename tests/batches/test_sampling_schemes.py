"""Draws of users, truncated Poisson draws, batches of fixed size and random allocation: what they
are charged as, that passes and batches go on where they were, and that users are kept apart.
"""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from dp_accounting.dp_event import TruncatedSubsampledGaussianDpEvent
from opacus.utils.batch_memory_manager import BatchMemoryManager
from support import steps, training
from support.refusals import refused
from support.training import deliver, values
from test_samplers_of_draws import draws_of
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, StackDataset, Subset, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes import noise
from torch_dpbayes.accounting import events
from torch_dpbayes.accounting.events import (
    ComposedDpEvent,
    GaussianDpEvent,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    PureDpEvent,
    RecordwiseBatchGaussianDpEvent,
    SampledWithoutReplacementDpEvent,
    UserLevelDpEvent,
)
from torch_dpbayes.accounting.random_allocation import RandomAllocationDpEvent
from torch_dpbayes.batches.sampling_schemes import Users

IDS = [7, 3, 7, 3, 7, 5, 3, 3, 3, 3, 3, 3]  # of twelve records: eight, three, and one


def data(rows=12):
    return TensorDataset(torch.arange(float(rows))[:, None] / rows, torch.zeros(rows, 1))


def private(
    rows=12, batch_size=4, accountant=None, temperature=0.0, noise_multiplier=1.0, **options
):
    loader = {k: options.pop(k) for k in ("generator", "num_workers") if k in options}
    if "user_ids" in options and accountant is None:
        accountant = dpb.PrivacyAccountant(unit="user")
    options |= {"noise_multiplier": noise_multiplier, "engine": dpb.PrivacyEngine(accountant)}
    options.setdefault("optimizer", partial(dpb.optim.DPSGLD, lr=1e-4, temperature=temperature))
    return training.private(nn.Linear(1, 1), data(rows), batch_size, loader=loader, **options)


one = partial(steps.one, loss=nn.functional.mse_loss)
train = partial(steps.train, loss=nn.functional.mse_loss)


def records(batch, rows=12):
    return tuple((values(batch[0])[:, 0] * rows).round().int().tolist())


def events_of(accountant):
    return [tuple(charge[:2]) for charge in accountant.history]


def poisson(z, rate=1 / 3):
    return PoissonSampledDpEvent(rate, GaussianDpEvent(z))


# -- what is charged -------------------------------------------------------------------------------


@pytest.mark.parametrize("neighboring", ["add_or_remove_one", "replace_one"])
@pytest.mark.parametrize(
    ("options", "event"),
    [
        ({}, poisson(1.5)),
        ({"max_batch_size": 6}, TruncatedSubsampledGaussianDpEvent(12, 1 / 3, 6, 1.5)),
        ({"sampling": "fixed_size"}, SampledWithoutReplacementDpEvent(12, 4, GaussianDpEvent(1.5))),
        ({"sampling": "fixed_size", "batch_size": 12}, GaussianDpEvent(1.5)),
        ({"sampling": "random_allocation", "batch_size": 12}, GaussianDpEvent(1.5)),
        ({"user_ids": IDS, "batch_size": 1}, UserLevelDpEvent(poisson(1.5))),
        (  # three users bring at most five records, and noise hides two of each
            {"user_ids": IDS, "records_per_user": 2, "batch_size": 2},
            UserLevelDpEvent(poisson(0.75, 2 / 5)),
        ),
        (
            {"user_ids": IDS, "records_per_user": 2, "batch_size": 5},
            UserLevelDpEvent(poisson(0.75, 1.0)),
        ),
    ],
)
def test_each_law_is_charged_as_itself(options, event, neighboring):
    unit = "user" if "user_ids" in options else "record"
    accountant = dpb.PrivacyAccountant(neighboring=neighboring, unit=unit)
    net, optimizer, loader = private(accountant=accountant, noise_multiplier=1.5, **options)
    for batch in loader:
        assert len(batch[0]) <= options.get("max_batch_size", 12)
        if options.get("sampling") == "fixed_size":
            assert len(batch[0]) == options.get("batch_size", 4)
        one(net, optimizer, batch)
    assert events_of(accountant) == [(event, len(loader))]


def test_random_allocation_is_charged_once_a_pass():
    net, optimizer, loader = private(sampling="random_allocation", noise_multiplier=2.0)
    event = RandomAllocationDpEvent(3, GaussianDpEvent(2.0))
    for epoch in (1, 2):
        seen = []
        for is_left in (True, False):  # a pass that was left goes on in the next one
            for batch in loader:
                one(net, optimizer, batch)
                seen += records(batch)
                assert events_of(optimizer.accountant) == [(event, epoch)]
                if is_left:
                    break
        assert sorted(seen) == list(range(12))


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
    with refused("pass-charged"):
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

    def fails(*_):
        raise OSError("no noise")

    batch = next(iter(loader))
    with monkeypatch.context() as patch:
        patch.setattr(optimizer.release.query, "add_noise", fails)
        with pytest.raises(OSError, match="no noise"):
            one(net, optimizer, batch)
    assert len(optimizer.accountant) == 1
    one(net, optimizer, next(iter(loader)))
    assert len(optimizer.accountant) == 2


def test_an_optimizer_with_another_loader_is_charged_for_that_one():
    net, optimizer, loader = private(max_batch_size=8)
    one(net, optimizer, next(iter(loader)))
    net, optimizer, loader = dpb.PrivacyEngine().make_private(
        module=net, optimizer=optimizer, data_loader=DataLoader(data(), 4), max_batch_size=4
    )
    one(net, optimizer, next(iter(loader)))
    cut = [event.truncated_batch_size for event, _ in events_of(optimizer.accountant)]
    assert cut == [8, 4]


@pytest.mark.parametrize(
    "options",
    [
        {"sampling": "fixed_size"},
        {"user_ids": IDS, "records_per_user": 2},
        {"sampling": "random_allocation"},
    ],
)
def test_the_noise_of_a_target_is_that_of_the_law(options):
    epochs, target = 2, 4.0
    engine = dpb.PrivacyEngine()
    arguments = {
        "module": nn.Linear(1, 1),
        "optimizer": partial(dpb.optim.DPSGLD, lr=1e-9, temperature=0.0),
        "data_loader": DataLoader(data(), 3),
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


# -- saved runs, parts and workers -----------------------------------------------------------------


def test_a_saved_run_of_another_law_is_refused(monkeypatch):
    states = {}
    laws = ("poisson", "random_allocation")
    for sampling in laws:
        monkeypatch.setattr(noise, "_used_positions", set())
        made = private(sampling=sampling, generator=torch.Generator())
        states[sampling] = made[1].state_dict()
    for sampling, other in (laws, laws[::-1]):
        monkeypatch.setattr(noise, "_used_positions", set())
        _, optimizer, _ = private(sampling=sampling, generator=torch.Generator())
        with refused("checkpoint"):
            optimizer.load_state_dict(states[other])


def test_a_pass_that_is_paid_does_not_go_on_with_a_dearer_query(monkeypatch):
    """The same noise hides less where more is released."""
    state = None
    for share in (0.1, 1.0):
        monkeypatch.setattr(noise, "_used_positions", set())
        net, optimizer, loader = private(
            optimizer=partial(dpb.optim.DPSGFS, lr=1e-6, fisher_share=share),
            generator=torch.Generator(),
            noise_multiplier=1e3,
            sampling="random_allocation",
        )
        if state is None:
            one(net, optimizer, next(iter(loader)))
            state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    with refused("pass-charged"):
        one(net, optimizer, next(iter(loader)))


def test_a_pass_is_not_drawn_again_in_one_process():
    """Its later steps add no charge by which the accountant could tell."""
    generator = torch.Generator().manual_seed(torch.initial_seed())
    net, optimizer, loader = private(sampling="random_allocation", generator=generator)
    one(net, optimizer, next(iter(loader)))
    state = copy.deepcopy(optimizer.state_dict())
    one(net, optimizer, next(iter(loader)))
    optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match="already drawn"):
        next(iter(loader))


def test_parts_and_workers():
    net, optimizer, loader = private(sampling="random_allocation")
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
    ) as parts:
        for batch in parts:
            one(net, optimizer, batch)
    assert len(optimizer.accountant) == 1
    net, optimizer, loader = private(num_workers=1, sampling="random_allocation")
    seen = []
    for batch in loader:
        one(net, optimizer, batch)
        seen += records(batch)
    assert sorted(seen) == list(range(12))


# -- users -----------------------------------------------------------------------------------------


def test_records_of_users_may_repeat():
    data = TensorDataset(torch.rand(6, 1), torch.zeros(6, 1))
    data = ConcatDataset([data, Subset(data, [0, 0, 3])])
    loader = DataLoader(data, batch_size=3)
    net, optimizer, loader = private(data_loader=loader, user_ids=[0, 1, 2, 3, 4, 5, 0, 0, 3])
    for batch in loader:
        one(net, optimizer, batch)
    assert len(optimizer.accountant) == len(loader)


X, Y = torch.rand(12, 1), torch.zeros(12, 1)


def rows():
    return list(zip(X, Y, strict=True))


def part(dataset):
    return Subset(dataset, list(range(len(dataset))))


def exchange(items):
    items[0], items[5] = items[5], items[0]


def exchange_tensors(data):
    data.tensors = tuple(t.flip(0) for t in data.tensors)


# data sets of twelve records, and how they change
CHANGES = {
    "a list": (rows, exchange),
    "a part": (lambda: part(TensorDataset(X, Y)), lambda d: exchange(d.indices)),
    "a part of an array": (
        lambda: Subset(TensorDataset(X, Y), np.arange(12)),
        lambda d: np.copyto(d.indices, d.indices[::-1].copy()),
    ),
    "a part of a list": (lambda: part(rows()), lambda d: exchange(d.dataset)),
    "parts": (lambda: ConcatDataset([rows()[:6], rows()[6:]]), lambda d: d.datasets.reverse()),
    "beside each other": (
        lambda: StackDataset(X.clone(), Y),
        lambda d: d.datasets[0].copy_(X.flip(0)),
    ),
    "tensors": (lambda: TensorDataset(X, Y), exchange_tensors),
    "a tensor": (lambda: TensorDataset(X.clone(), Y), lambda d: d.tensors[0].copy_(X.flip(0))),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_user_ids_belong_to_positions(kind):
    """Records that moved after make_private would count as other people's; copies look, too."""
    make, change = CHANGES[kind]
    dataset = make()
    loader = private(data_loader=DataLoader(dataset, 2), user_ids=IDS)[2]
    list(loader)
    change(dataset)
    for use in (list, list, copy.deepcopy, lambda loader: list(copy.copy(loader))):
        with refused("data-changed"):
            use(loader)


@pytest.mark.parametrize("kind", CHANGES)
def test_records_stay_where_they_are_while_a_pass_is_allocated(kind):
    """A pass that goes on would use some of them twice; between passes they may move."""
    make, change = CHANGES[kind]
    dataset = make()
    loader = DataLoader(dataset, 4)
    net, optimizer, loader = private(data_loader=loader, sampling="random_allocation")
    next(iter(loader))  # charged at the first step only
    change(dataset)
    train(net, optimizer, loader)
    change(dataset)
    one(net, optimizer, next(iter(loader)))
    change(dataset)
    for _ in range(2):
        with refused("data-changed"):
            next(iter(loader))
    assert len(optimizer.accountant) == 2


@pytest.mark.parametrize("most", [1, 3])
def test_a_user_moves_the_sum_by_no_more_than_is_charged(most):
    """Of users with up to nine records, all of whose gradients are far above the clip norm."""
    ids = [who for who in range(6) for _ in range(1 + who * 8 // 5)]
    x, net = torch.randn(len(ids), 3) * 100, nn.Linear(3, 1)
    net, optimizer, loader = private(
        module=net,
        data_loader=DataLoader(TensorDataset(x, torch.zeros(len(ids), 1)), 4),
        user_ids=ids,
        records_per_user=most,
    )
    source, named = optimizer.release.source, [*net.named_parameters()]
    whose = torch.tensor(ids)
    largest = 0.0
    for batch in draws_of(loader.sampler_of_draws, 40):
        rows = torch.tensor(batch, dtype=torch.int64)
        for who in set(whose[rows].tolist()):
            own = rows[whose[rows] == who]
            inputs, target = deliver(x[own], torch.ones(len(own), 1))
            nn.functional.mse_loss(net(inputs), target).backward()
            out = [torch.zeros(p.numel()) for _, p in named]
            source.add_clipped_sum(named, 1.0, out)
            source.discard([p for _, p in named])
            largest = max(largest, float(torch.cat(out).norm()))
    assert 0.5 < largest <= most * (1 + 1e-5)


def test_second_moments_of_a_user_count_too():
    zs = []
    for kind in (partial(dpb.optim.DPSGFS, fisher="diagonal"), dpb.optim.DPSGLD):
        _, optimizer, loader = private(
            optimizer=partial(kind, lr=1e-3), noise_multiplier=3.0, user_ids=IDS, records_per_user=2
        )
        charged = optimizer.release.event(3.0, "users", loader.sampler_of_draws)
        zs.append(charged.event.event.noise_multiplier)
    assert zs[0] < zs[1] == 1.5


@pytest.mark.parametrize(("most", "rate"), [(1, 3 / 3), (2, 3 / 5), (3, 3 / 7)])
def test_a_loader_made_private_again_keeps_the_size_of_its_batches(most, rate):
    loader = private(batch_size=3, user_ids=IDS, records_per_user=most)[2]
    assert loader.sample_rate == pytest.approx(rate)
    assert private(data_loader=loader)[2].sample_rate == pytest.approx(3 / 12)
    again = private(data_loader=loader, user_ids=IDS, records_per_user=2)[2]
    assert again.sample_rate == pytest.approx(3 / 5)


def test_the_share_of_clipped_records_is_no_release_of_users():
    net, optimizer, loader = private(user_ids=IDS, batch_size=2)
    with pytest.raises(ValueError):
        dpb.private_clipped_fraction(
            net, optimizer, loader, noise_multiplier=1.0, criterion=nn.functional.mse_loss
        )
    assert len(optimizer.accountant) == 0


@pytest.mark.parametrize(
    "ids",
    [
        ["a", "b", None, "a", "b", "c"],
        [1.0, 2.0, float("nan"), 1.0, 2.0, 3.0],
        [1, "1", 2, 2, 3, 3],
        [True, False] * 3,
        [1, 2, 3],
        np.ma.masked_equal([1, 2, 9, 1, 2, 3], 9),
        torch.zeros(6, 2, dtype=torch.int64),
    ],
)
def test_ids_of_another_kind_are_refused(ids):
    with pytest.raises((dpb.errors.ArgumentError, dpb.errors.ArgumentTypeError)):
        Users(ids, 6, 1)


@pytest.mark.parametrize(
    "ids",
    [
        torch.tensor(IDS),
        np.array(IDS, dtype=np.uint64),
        [str(i) for i in IDS],
        np.array([str(i) for i in IDS], dtype=object),
        [f"a{i * chr(0)}" for i in IDS],  # which NumPy takes for equal
    ],
)
def test_ids_come_as_they_are(ids):
    people = Users(ids, len(IDS), 1)
    assert (len(people), people.counted_records) == (3, 3)
    own = people.records_of(torch.arange(3), torch.Generator())
    assert sorted(IDS[place] for place in own.tolist()) == [3, 5, 7]


# -- accountants of users --------------------------------------------------------------------------

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
    path = tmp_path / "budget.db"
    accountant = dpb.PrivacyAccountant(5.0, 1e-5, unit=unit, path=path if is_kept else None)
    for call in (accountant.compose, accountant.remaining):
        with pytest.raises((ValueError, TypeError)):
            call(event)
    assert len(accountant) == 0 and len(accountant.compose(OF[unit], 3)) == 3
    epsilon = dpb.PrivacyAccountant().compose(STEP, 3).get_epsilon(1e-5)
    assert accountant.get_epsilon() == pytest.approx(epsilon, rel=1e-9)
    accountant.close()
    if is_kept:
        with pytest.raises(ValueError):
            dpb.PrivacyAccountant(path=path, unit="record" if unit == "user" else "user")


def test_events_of_users_are_kept_lowered_and_told_of():
    event = UserLevelDpEvent(RecordwiseBatchGaussianDpEvent(2.0))
    assert events.decode(events.encode(event)) == event
    low = events.lowered(OF["user"], 1.0)
    assert isinstance(low, UserLevelDpEvent) and low.event.event.noise_multiplier <= 1.0
    assert any("Recordwise" in n for n in dpb.PrivacyAccountant(unit="user").compose(event).notes)
