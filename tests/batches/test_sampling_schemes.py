"""Draws of users, truncated Poisson draws, batches of fixed size and random allocation: what they
are charged as, that passes and batches go on where they were, and that users are kept apart.
"""

import copy
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from dp_accounting.dp_event import TruncatedSubsampledGaussianDpEvent
from support import steps, training
from support.refusals import refused
from support.training import deliver, values
from test_samplers_of_draws import draws_of
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, StackDataset, Subset, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes import noise
from torch_dpbayes.accounting import events
from torch_dpbayes.accounting.events import GaussianDpEvent, UserLevelDpEvent
from torch_dpbayes.accounting.random_allocation import RandomAllocationDpEvent
from torch_dpbayes.batches.poisson_loader import PoissonLoader
from torch_dpbayes.batches.sampling_schemes import Users

IDS = [7, 3, 7, 3, 7, 5, 3, 3, 3, 3, 3, 3]  # of twelve records: eight, three, and one
X, Y = torch.arange(12.0)[:, None] / 12, torch.zeros(12, 1)
ALLOCATION = {"sampling": "random_allocation"}

one = partial(steps.one, loss=nn.functional.mse_loss)
train = partial(steps.train, loss=nn.functional.mse_loss)


def private(batch_size=4, engine=None, temperature=0.0, noise_multiplier=1.0, **options):
    loader = {k: options.pop(k) for k in ("generator", "num_workers") if k in options}
    unit = "user" if "user_ids" in options else "record"
    options |= {"engine": engine or dpb.PrivacyEngine(dpb.PrivacyAccountant(unit=unit))}
    options |= {"loader": loader, "noise_multiplier": noise_multiplier}
    options.setdefault("optimizer", partial(dpb.optim.DPSGLD, lr=1e-4, temperature=temperature))
    return training.private(nn.Linear(1, 1), TensorDataset(X, Y), batch_size, **options)


def records(batch):
    return (values(batch[0])[:, 0] * 12).round().int().tolist()


def events_of(accountant):
    return [tuple(charge[:2]) for charge in accountant.history]


def generator(monkeypatch):
    """Of one seed in one test, as in a process of its own."""
    monkeypatch.setattr(noise, "_used_positions", set())
    return torch.Generator().manual_seed(torch.initial_seed())


# -- what is charged -------------------------------------------------------------------------------


def poisson(z, rate=1 / 3):
    return events.PoissonSampledDpEvent(rate, GaussianDpEvent(z))


NOISE = GaussianDpEvent(1.5)
TWO_OF_A_USER = {"user_ids": IDS, "records_per_user": 2}


@pytest.mark.parametrize(
    ("options", "event"),
    [
        ({}, poisson(1.5)),
        ({"max_batch_size": 6}, TruncatedSubsampledGaussianDpEvent(12, 1 / 3, 6, 1.5)),
        ({"sampling": "fixed_size"}, events.SampledWithoutReplacementDpEvent(12, 4, NOISE)),
        ({"sampling": "fixed_size", "batch_size": 12}, NOISE),
        ({**ALLOCATION, "batch_size": 12}, NOISE),
        ({"user_ids": IDS, "batch_size": 1}, UserLevelDpEvent(poisson(1.5))),
        # three users bring at most five records, and noise hides two of each
        ({**TWO_OF_A_USER, "batch_size": 2}, UserLevelDpEvent(poisson(0.75, 2 / 5))),
    ],
)
def test_each_law_is_charged_as_itself(options, event):
    net, optimizer, loader = private(noise_multiplier=1.5, **options)
    for batch in loader:
        assert len(batch[0]) <= options.get("max_batch_size", 12)
        if options.get("sampling") == "fixed_size":
            assert len(batch[0]) == options.get("batch_size", 4)
        one(net, optimizer, batch)
    assert events_of(optimizer.accountant) == [(event, len(loader))]


@pytest.mark.parametrize("how", ["left", "in parts", "in workers"])
def test_random_allocation_is_charged_once_a_pass(how):
    """A pass that was left goes on in the next one."""
    workers = {"num_workers": 1} if how == "in workers" else {}
    net, optimizer, loader = private(**ALLOCATION, noise_multiplier=2.0, **workers)
    event, batches = RandomAllocationDpEvent(3, GaussianDpEvent(2.0)), loader
    parts = steps.in_parts(loader, optimizer, 2)
    for epoch in (1, 2):
        seen = []
        if how == "left":
            one(net, optimizer, batch := next(iter(loader)))
            seen += records(batch)
        with parts as managed:
            for batch in managed if how == "in parts" else batches:
                one(net, optimizer, batch)
                seen += records(batch)
        assert events_of(optimizer.accountant) == [(event, epoch)]
        assert sorted(seen) == list(range(12))


def test_the_noise_must_not_fall_within_a_pass():
    net, optimizer, loader = private(**ALLOCATION, noise_multiplier=0.1, temperature=1.0)
    group = optimizer.param_groups[0]

    def step(lr):
        group["lr"] = lr
        one(net, optimizer, next(iter(loader)))

    step(1e-4)
    charged = optimizer.effective_noise_multiplier
    step(1e-5)  # more noise
    with refused("pass-charged"):
        step(1e-2)
    step(1e-4)
    event = RandomAllocationDpEvent(3, GaussianDpEvent(charged))
    assert events_of(optimizer.accountant) == [(event, 1)]
    step(1e-2)
    assert len(optimizer.accountant) == 2


def test_a_step_that_failed_after_its_charge_is_charged_again(monkeypatch):
    """It may have been released."""
    net, optimizer, loader = private(**ALLOCATION)
    one(net, optimizer, next(iter(loader)))

    def fails(*_):
        raise OSError("no noise")

    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(optimizer.release.query, "add_noise", fails)
        one(net, optimizer, next(iter(loader)))
    assert len(optimizer.accountant) == 1
    one(net, optimizer, next(iter(loader)))
    assert len(optimizer.accountant) == 2


def test_an_optimizer_with_another_loader_is_charged_for_that_one():
    net, optimizer, loader = private(max_batch_size=8)
    one(net, optimizer, next(iter(loader)))
    net, optimizer, loader = dpb.PrivacyEngine().make_private(
        module=net, optimizer=optimizer, data_loader=DataLoader(loader.dataset, 4), max_batch_size=4
    )
    one(net, optimizer, next(iter(loader)))
    cut = [event.truncated_batch_size for event, _ in events_of(optimizer.accountant)]
    assert cut == [8, 4]


@pytest.mark.parametrize("options", [TWO_OF_A_USER, ALLOCATION])
def test_the_noise_of_a_target_is_that_of_the_law(options):
    engine = dpb.PrivacyEngine()
    target = {"target_epsilon": 4.0, "target_delta": 1e-5, "epochs": 2, "max_grad_norm": 1.0}
    optimizer = partial(dpb.optim.DPSGLD, lr=1e-9, temperature=0.0)
    loader = DataLoader(TensorDataset(X, Y), 3)
    arguments = {"module": nn.Linear(1, 1), "optimizer": optimizer, "data_loader": loader}
    arguments |= target | options
    plan = engine.plan(**arguments)
    net, optimizer, loader = engine.make_private_with_epsilon(**arguments)
    train(net, optimizer, loader, epochs=2)
    assert plan.steps == 2 * len(loader)
    assert 4.0 * 0.99 <= engine.get_epsilon() <= 4.0
    assert plan.epsilon == pytest.approx(engine.get_epsilon(), rel=1e-9)
    with pytest.raises(dpb.PrivacyBudgetExceeded):
        one(net, optimizer, next(iter(loader)))


# -- saved runs ------------------------------------------------------------------------------------


def test_a_saved_run_of_another_law_is_refused(monkeypatch):
    laws = ("poisson", "random_allocation")
    made = [private(sampling=law, generator=generator(monkeypatch))[1] for law in laws]
    for optimizer, other in (made, made[::-1]):
        with refused("checkpoint"):
            optimizer.load_state_dict(other.state_dict())


def test_a_pass_that_is_paid_does_not_go_on_with_a_dearer_query(monkeypatch):
    """The same noise hides less where more is released."""

    def run(share):
        kind = partial(dpb.optim.DPSGFS, lr=1e-6, fisher_share=share)
        stream = generator(monkeypatch)
        return private(optimizer=kind, generator=stream, noise_multiplier=1e3, **ALLOCATION)

    net, optimizer, loader = run(0.1)
    one(net, optimizer, next(iter(loader)))
    state = copy.deepcopy(optimizer.state_dict())
    net, optimizer, loader = run(1.0)
    optimizer.load_state_dict(state)
    with refused("pass-charged"):
        one(net, optimizer, next(iter(loader)))


def test_a_pass_is_not_drawn_again(monkeypatch):
    """Its later steps add no charge by which a filled accountant, saved apart, could tell. An empty
    one begins where the state was saved.
    """
    run = partial(private, **ALLOCATION)
    net, optimizer, loader = run(generator=generator(monkeypatch))
    one(net, optimizer, next(iter(loader)))
    state = copy.deepcopy(optimizer.state_dict())
    one(net, optimizer, next(iter(loader)))
    engine = dpb.PrivacyEngine(dpb.PrivacyAccountant())
    engine.accountant.load_state_dict(optimizer.accountant.state_dict())
    for filled in (optimizer, run(engine=engine, generator=generator(monkeypatch))[1]):
        with refused("checkpoint"):
            filled.load_state_dict(state)
    run(engine=engine)[1].load_state_dict(state)  # it draws other batches
    for is_repeated in (False, True):
        stream = torch.Generator().manual_seed(torch.initial_seed())
        net, optimizer, loader = run(generator=stream)
        optimizer.load_state_dict(state)
        if not is_repeated:
            train(net, optimizer, loader)
            assert len(optimizer.accountant) == 1
    with refused("noise-repeats"):
        next(iter(loader))


# -- users -----------------------------------------------------------------------------------------


def test_records_of_users_may_repeat():
    data = ConcatDataset([TensorDataset(X, Y), Subset(TensorDataset(X, Y), [0, 0, 3])])
    train(*private(data_loader=DataLoader(data, 3), user_ids=[*range(12), 0, 0, 3]))


def data():
    return TensorDataset(X.clone(), Y.clone())


def rows():
    return list(zip(X, Y, strict=True))


def reverse(items):
    items[:] = [*items][::-1]


# data sets of twelve records, and how they change
CHANGES = {
    "a list": (rows, reverse),
    "a part": (lambda: Subset(data(), [*range(12)]), lambda d: reverse(d.indices)),
    "a part of an array": (lambda: Subset(data(), np.arange(12)), lambda d: reverse(d.indices)),
    "a part of a list": (lambda: Subset(rows(), [*range(12)]), lambda d: reverse(d.dataset)),
    "parts": (lambda: ConcatDataset([rows()[:6], rows()[6:]]), lambda d: reverse(d.datasets)),
    "beside each other": (lambda: StackDataset(X.clone(), Y), lambda d: d.datasets[0].mul_(-1)),
    "tensors": (data, lambda d: setattr(d, "tensors", tuple(t.flip(0) for t in d.tensors))),
    "a tensor": (data, lambda d: d.tensors[0].mul_(-1)),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_records_stay_where_they_are_while_users_ranks_or_a_pass_rely_on_it(kind):
    """Records that moved after make_private would count as other people's, and copies look, too;
    a rank would use records of another one. A pass that goes on would use some of them twice;
    between passes they may move.
    """
    make, change = CHANGES[kind]
    loader = private(data_loader=DataLoader(dataset := make(), 2), user_ids=IDS)[2]
    list(loader)
    change(dataset)
    for use in (list, list, copy.deepcopy, lambda loader: list(copy.copy(loader))):
        with refused("data-changed"):
            use(loader)
    loader = PoissonLoader(DataLoader(dataset := make(), 2), 0.2, SimpleNamespace(rank=0, size=2))
    next(iter(loader))
    change(dataset)
    with refused("data-changed"):
        next(iter(loader))
    loader = DataLoader(dataset := make(), 4)
    net, optimizer, loader = private(data_loader=loader, **ALLOCATION)
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
    whose, largest = torch.tensor(ids), 0.0
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
        make = partial(kind, lr=1e-3)
        _, optimizer, loader = private(noise_multiplier=3.0, optimizer=make, **TWO_OF_A_USER)
        charged = optimizer.release.event(3.0, "users", loader.sampler_of_draws)
        zs.append(charged.event.event.noise_multiplier)
    assert zs[0] < zs[1] == 1.5


@pytest.mark.parametrize(("most", "rate"), [(1, 3 / 3), (2, 3 / 5), (3, 3 / 7)])
def test_a_loader_made_private_again_keeps_the_size_of_its_batches(most, rate):
    _, optimizer, loader = private(batch_size=3, user_ids=IDS, records_per_user=most)
    assert loader.sample_rate == pytest.approx(rate)
    # N counts at most k records of each user: a user's other records change no public constant
    assert (optimizer.expected_batch_size, optimizer.num_data) == pytest.approx((3, 3 / rate))
    with pytest.raises(ValueError, match="user_ids= again"):  # of records, whose users would show
        private(data_loader=loader)
    again = private(data_loader=loader, **TWO_OF_A_USER)[2]
    assert again.sample_rate == pytest.approx(3 / 5)


def test_ids_of_another_kind_are_refused():
    for ids in (
        ["a", "b", None, "a", "b", "c"],
        [1.0, 2.0, float("nan"), 1.0, 2.0, 3.0],
        [1, "1", 2, 2, 3, 3],
        [True, False] * 3,
        [1, 2, 3],
        np.ma.masked_equal([1, 2, 9, 1, 2, 3], 9),
        torch.zeros(6, 2, dtype=torch.int64),
    ):
        with pytest.raises((dpb.errors.ArgumentError, dpb.errors.ArgumentTypeError)):
            Users(ids, 6, 1)


def test_ids_come_as_they_are():
    for ids in (
        torch.tensor(IDS),
        np.array(IDS, dtype=np.uint64),
        np.array([str(i) for i in IDS], dtype=object),
        [f"a{i * chr(0)}" for i in IDS],  # which NumPy takes for equal
    ):
        people = Users(ids, len(IDS), 1)
        assert (len(people), people.counted_records) == (3, 3)
        own = people.records_of(torch.arange(3), torch.Generator())
        assert sorted(IDS[place] for place in own.tolist()) == [3, 5, 7]


# -- accountants of users --------------------------------------------------------------------------

STEP = poisson(1.0, 0.1)
OF = {"record": STEP, "user": UserLevelDpEvent(STEP)}
OF_NO_USER = STEP, events.PureDpEvent(0.1), events.NonPrivateDpEvent()
OTHERS = {"user": [*OF_NO_USER, UserLevelDpEvent(OF["user"])], "record": [OF["user"]]}


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("unit", OF)
def test_what_protects_the_other_is_refused(unit, is_kept, tmp_path):
    path = tmp_path / "budget.db" if is_kept else None
    accountant = dpb.PrivacyAccountant(5.0, 1e-5, unit=unit, path=path)
    for event in (*OTHERS[unit], events.ComposedDpEvent([*OF.values()])):
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
    event = UserLevelDpEvent(events.RecordwiseBatchGaussianDpEvent(2.0))
    assert events.decode(events.encode(event)) == event
    low = events.lowered(OF["user"], 1.0)
    assert isinstance(low, UserLevelDpEvent) and low.event.event.noise_multiplier <= 1.0
    assert any("Recordwise" in n for n in dpb.PrivacyAccountant(unit="user").compose(event).notes)
