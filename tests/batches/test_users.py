"""Draws of people: their joint law, what a person's records do to a sum, what that is charged as,
and that accountants of records and of people take nothing of each other.
"""

import pickle
from functools import partial

import numpy as np
import pytest
import torch
from support.steps import one as step_on
from support.training import deliver
from test_samplers_of_draws import draws_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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
from torch_dpbayes.batches.sampling_schemes import Users

STEP = PoissonSampledDpEvent(0.1, GaussianDpEvent(1.0))
IDS = [7, 3, 7, 3, 7, 5]  # of six records


def private(ids=IDS, batch_size=2, accountant=None, noise_multiplier=1.0, data=None, **options):
    x = torch.arange(float(len(ids)))[:, None] if data is None else data
    net = nn.Linear(x.shape[1], 1)
    made = dpb.PrivacyEngine(accountant).make_private(
        **{
            "module": net,
            "optimizer": partial(dpb.optim.DPSGLD, lr=1e-4, temperature=0.0),
            "data_loader": DataLoader(TensorDataset(x, torch.zeros(len(x), 1)), batch_size),
            "max_grad_norm": 1.0,
            "noise_multiplier": noise_multiplier,
            "user_ids": ids,
            **options,
        }
    )
    return made


one = partial(step_on, loss=nn.functional.mse_loss)


# -- the law of the draws --------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 3])
def test_a_person_moves_the_sum_by_no_more_than_is_charged(most):
    """Of people with up to nine records, all of whose gradients are far above the clip norm."""
    ids = [who for who in range(6) for _ in range(1 + who * 8 // 5)]
    x = torch.randn(len(ids), 3) * 100
    net, optimizer, loader = private(
        ids, 4, dpb.PrivacyAccountant(unit="user"), data=x, records_per_user=most
    )
    source, named = optimizer.release.source, [*net.named_parameters()]
    whose = torch.tensor(ids)
    size = sum(p.numel() for _, p in named)
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
    assert size == 4 and 0.5 < largest <= most * (1 + 1e-5)
    charged = optimizer.release.event(1.0, "users", loader.sampler_of_draws)
    assert charged.event.event.noise_multiplier * most == 1.0


# -- what is charged -------------------------------------------------------------------------------


@pytest.mark.parametrize(("most", "relation"), [(1, "replace_one"), (2, "add_or_remove_one")])
def test_the_charge_of_a_step(most, relation):
    accountant = dpb.PrivacyAccountant(neighboring=relation, unit="user")
    net, optimizer, loader = private(accountant=accountant, records_per_user=most)
    for batch in loader:
        one(net, optimizer, batch)
    rate = 2 / {1: 3, 2: 5}[most]
    assert loader.sample_rate == pytest.approx(rate) and len(loader) == int(1 / rate)
    (charge,) = accountant.history
    assert charge.event == UserLevelDpEvent(
        PoissonSampledDpEvent(loader.sample_rate, GaussianDpEvent(1.0 / most))
    )
    if most == 1:
        assert "user with all their records" in accountant.summary()
    assert "unit='user'" in repr(accountant)


def test_full_batches_are_charged_for_all_of_a_persons_records():
    for most in (1, 3):
        accountant = dpb.PrivacyAccountant(unit="user")
        net, optimizer, loader = private(
            batch_size={1: 3, 3: 6}[most], accountant=accountant, records_per_user=most
        )
        one(net, optimizer, next(iter(loader)))
        epsilon = dpb.PrivacyAccountant().compose(GaussianDpEvent(1.0 / most)).get_epsilon(1e-5)
        assert accountant.get_epsilon(1e-5) == pytest.approx(epsilon, rel=1e-9)


def test_second_moments_of_a_person_count_too():
    accountant = dpb.PrivacyAccountant(unit="user")
    net, optimizer, loader = private(
        accountant=accountant,
        records_per_user=2,
        optimizer=partial(dpb.optim.DPSGFS, lr=1e-3, fisher="diagonal"),
        noise_multiplier=3.0,
    )
    plain = private(noise_multiplier=3.0, records_per_user=2)[1]
    z = optimizer.effective_noise_multiplier
    noisy = optimizer.release.event(z, "users", loader.sampler_of_draws)
    alone = plain.release.event(z, "users", loader.sampler_of_draws)
    assert noisy.event.event.noise_multiplier < alone.event.event.noise_multiplier


# -- records and people do not mix -----------------------------------------------------------------


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize(
    "event",
    [STEP, PureDpEvent(0.1), NonPrivateDpEvent(), ComposedDpEvent([UserLevelDpEvent(STEP), STEP])],
)
def test_an_accountant_of_people_takes_nothing_of_records(event, is_kept, tmp_path):
    place = {"path": tmp_path / "budget.db"} if is_kept else {}
    accountant = dpb.PrivacyAccountant(5.0, 1e-5, unit="user", **place)
    for refused in (
        accountant.compose,
        accountant.remaining,
    ):
        with pytest.raises(ValueError, match="users"):
            refused(event)
    assert len(accountant) == 0
    assert len(accountant.compose(UserLevelDpEvent(STEP))) == 1


def test_an_accountant_of_records_takes_nothing_of_people():
    accountant = dpb.PrivacyAccountant(5.0, 1e-5)
    for event in (UserLevelDpEvent(STEP), ComposedDpEvent([STEP, UserLevelDpEvent(STEP)])):
        with pytest.raises(ValueError, match='unit="user"'):
            accountant.compose(event)
    assert len(accountant) == 0


def test_a_ledger_stays_what_it_is(tmp_path):
    for unit, other in (("user", "record"), ("record", "user")):
        path = tmp_path / f"{unit}.db"
        event = UserLevelDpEvent(STEP) if unit == "user" else STEP
        with dpb.PrivacyAccountant(5.0, 1e-5, path=path, unit=unit) as accountant:
            accountant.compose(event, 3)
        assert look_at(path)[0].unit == unit
        with pytest.raises(ValueError, match="unit"):
            dpb.PrivacyAccountant(5.0, 1e-5, path=path, unit=other)
        again = pickle.loads(pickle.dumps(accountant))
        assert again.unit == unit and again.history[0].event == event
        epsilon = dpb.PrivacyAccountant().compose(STEP, 3).get_epsilon(1e-5)
        assert accountant.get_epsilon() == pytest.approx(epsilon, rel=1e-9)


def test_events_of_people_are_kept_and_lowered():
    event = UserLevelDpEvent(STEP)
    assert events.decode(events.encode(event)) == event
    assert [*events.elementary(ComposedDpEvent([event, event]), 2)] == [(event, 2), (event, 2)]
    low = events.lowered(event, 1.0)
    assert isinstance(low, UserLevelDpEvent) and low.event.event.noise_multiplier <= 1.0
    with pytest.raises(TypeError, match="only one"):
        dpb.PrivacyAccountant(unit="user").compose(UserLevelDpEvent(event))


def test_statements_of_events_of_people_are_shown():
    event = UserLevelDpEvent(RecordwiseBatchGaussianDpEvent(2.0))
    accountant = dpb.PrivacyAccountant(unit="user").compose(event)
    assert any("Recordwise" in note for note in accountant.notes)


def test_the_share_of_clipped_records_is_no_release_of_people():
    accountant = dpb.PrivacyAccountant(unit="user")
    net, optimizer, loader = private(accountant=accountant)
    with pytest.raises(ValueError, match="users"):
        dpb.private_clipped_fraction(
            net, optimizer, loader, noise_multiplier=1.0, criterion=nn.functional.mse_loss
        )
    assert len(accountant) == 0


@pytest.mark.parametrize(("most", "rate"), [(1, 2 / 3), (2, 2 / 5), (3, 2 / 6)])
def test_a_loader_made_private_again_keeps_the_size_of_its_batches(most, rate):
    """Two records on average, of three people who have one, two and three."""
    loader = private(accountant=dpb.PrivacyAccountant(unit="user"), records_per_user=most)[2]
    assert loader.sample_rate == pytest.approx(rate)
    of_records = private(user_ids=None, data_loader=loader)[2]
    assert of_records.sample_rate == pytest.approx(2 / 6)
    accountant = dpb.PrivacyAccountant(unit="user")
    again = private(accountant=accountant, data_loader=loader, records_per_user=2)[2]
    assert again.sample_rate == pytest.approx(2 / 5)


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
    with pytest.raises((ValueError, TypeError), match="id of each record's user"):
        private(user_ids=ids)


@pytest.mark.parametrize(
    "ids",
    [
        torch.tensor(IDS),
        np.array(IDS, dtype=np.uint64),
        [str(i) for i in IDS],
        np.array([str(i) for i in IDS]),
        np.array([str(i) for i in IDS], dtype=object),
        tuple(IDS),
    ],
)
def test_ids_come_as_they_are(ids):
    people = Users(ids, len(IDS), 1)
    assert (len(people), people.counted_records) == (3, 3)
    own = people.records_of(torch.arange(3), torch.Generator())
    assert sorted(IDS[place] for place in own.tolist()) == [3, 5, 7]


def test_strings_that_numpy_takes_for_equal_are_two_people():
    assert len(Users(["a", "a\0"], 2, 1)) == 2
