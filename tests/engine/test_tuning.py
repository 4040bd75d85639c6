"""Tuning at one price: what is run, what is charged, and what is refused."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes.accounting.events import GaussianDpEvent, PoissonSampledDpEvent, UserLevelDpEvent
from torch_dpbayes.accounting.selection import Repetitions, selection_epsilon
from torch_dpbayes.engine.tuning import best_of_runs

STEP = PoissonSampledDpEvent(0.25, GaussianDpEvent(1.0))
SCHEDULE = [(STEP, 2)]


def accountant(**settings):
    return dpb.PrivacyAccountant(100.0, 1e-4, **settings)


def fixed_number(monkeypatch, number):
    monkeypatch.setattr(Repetitions, "draw", lambda self: number)


def charge(engine, candidate, count=2, step=STEP):
    engine.accountant.compose(step, count)
    return candidate, float(candidate)


def test_one_charge_for_the_best_of_private_trainings(monkeypatch):
    fixed_number(monkeypatch, 4)
    x = torch.randn(64, 3)
    y = (x[:, 0] > 0).long()
    tried = []

    def train(engine, lr):
        net = nn.Linear(3, 2)
        net, optimizer, loader = engine.make_private(
            module=net,
            optimizer=partial(dpb.optim.DPSGLD, lr=lr, temperature=0.0, prior_std=1.0),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=16),
            max_grad_norm=1.0,
            noise_multiplier=1.0,
        )
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(inputs), labels).backward()
            optimizer.step()
        tried.append((lr, engine.accountant.history))
        return net, -abs(lr - 0.2)

    total = accountant()
    schedule = [(STEP, 4)]
    best = best_of_runs(
        train, [0.1, 0.2, 0.4], schedule=schedule, accountant=total, delta=1e-6, mean_runs=4.0
    )
    assert len(tried) == 4
    assert best.score == max(-abs(lr - 0.2) for lr, _ in tried)
    assert isinstance(best.result, nn.Linear) and abs(best.candidate - 0.2) == -best.score
    epsilon = selection_epsilon(schedule, Repetitions(4.0), 1e-6)
    assert epsilon <= total.get_epsilon(1e-6) <= epsilon * (1 + 1e-9)
    assert [c.label for c in total.history] == ["selection"] * 2
    assert all(sum(c.count for c in history) == 4 for _, history in tried)
    assert "only the best run was seen" in total.summary()


def test_runs_over_people_are_charged_to_an_accountant_of_people(monkeypatch):
    fixed_number(monkeypatch, 2)
    step = UserLevelDpEvent(STEP)
    total = accountant(unit="user")
    settings = {"schedule": [(step, 2)], "delta": 1e-6, "mean_runs": 3.0}
    best = best_of_runs(partial(charge, step=step), [5], accountant=total, **settings)
    assert best.result == 5
    epsilon = selection_epsilon(SCHEDULE, Repetitions(3.0), 1e-6)
    assert epsilon <= total.get_epsilon(1e-6) <= epsilon * (1 + 1e-9)
    for other, schedule in ((accountant(), [(step, 2)]), (accountant(unit="user"), SCHEDULE)):
        with pytest.raises(ValueError, match="this accountant protects"):
            best_of_runs(charge, [5], accountant=other, **settings | {"schedule": schedule})
        assert len(other) == 0


def test_it_is_charged_before_the_first_run():
    poor = dpb.PrivacyAccountant(0.1, 1e-5)
    ran = []
    with pytest.raises(dpb.PrivacyBudgetExceeded):
        best_of_runs(
            lambda engine, candidate: ran.append(1),
            [1], schedule=SCHEDULE, accountant=poor, delta=1e-6, mean_runs=3.0,
        )  # fmt: skip
    assert not ran and len(poor) == 0


def test_a_run_that_fails_stays_charged():
    total = accountant()

    def train(engine, candidate):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        best_of_runs(train, [1], schedule=SCHEDULE, accountant=total, delta=1e-6, mean_runs=3.0)
    assert total.get_epsilon(1e-6) > 0


@pytest.mark.parametrize("neighboring", ["add_or_remove_one", "replace_one"])
@pytest.mark.parametrize(
    "more",
    [
        lambda a: a.compose(STEP, 3),
        lambda a: a.compose(STEP, 2).compose(GaussianDpEvent(1000.0)),
        lambda a: a.compose(STEP, 2).compose(GaussianDpEvent(1000.0), adaptive=True),
        lambda a: a.compose(PoissonSampledDpEvent(0.25, GaussianDpEvent(0.99))),
        lambda a: a.compose(PoissonSampledDpEvent(0.26, GaussianDpEvent(1.0))),
    ],
)
def test_a_run_may_not_release_more(more, neighboring):
    def train(engine, candidate):
        more(engine.accountant)
        return 0, 0.0

    with pytest.raises((dpb.PrivacyBudgetExceeded, RuntimeError)):
        best_of_runs(
            train, [1], schedule=SCHEDULE, accountant=accountant(neighboring=neighboring),
            delta=1e-6, mean_runs=3.0,
        )  # fmt: skip


def test_a_run_may_release_less(monkeypatch):
    fixed_number(monkeypatch, 3)
    quieter = PoissonSampledDpEvent(0.1, GaussianDpEvent(3.0))
    train = partial(charge, count=1, step=quieter)
    best = best_of_runs(
        train, [5], schedule=SCHEDULE, accountant=accountant(), delta=1e-6, mean_runs=3.0
    )
    assert best == (5, 5, 5.0)


def test_who_does_not_use_the_engine_or_goes_on_with_a_model_is_refused(monkeypatch):
    fixed_number(monkeypatch, 2)
    settings = {"schedule": SCHEDULE, "delta": 1e-6, "mean_runs": 3.0}
    with pytest.raises(RuntimeError, match="engine"):
        best_of_runs(lambda engine, c: (0, 0.0), [1], accountant=accountant(), **settings)
    shared = nn.Linear(2, 2)

    def go_on(engine, candidate):
        engine.accountant.compose(STEP)
        return (shared, "log"), 0.0

    with pytest.raises(RuntimeError, match="same model"):
        best_of_runs(go_on, [1], accountant=accountant(), **settings)
    with pytest.raises(ValueError, match="empty"):
        best_of_runs(charge, [], accountant=accountant(), **settings)


def test_scores_that_are_no_numbers_lose_and_candidates_are_drawn_afresh(monkeypatch):
    fixed_number(monkeypatch, 60)
    release = GaussianDpEvent(2.0)
    tried = []

    def train(engine, candidate):
        tried.append(candidate)
        engine.accountant.compose(release)
        return candidate, float("nan") if candidate == 2 else float(candidate)

    best = best_of_runs(
        train, [0, 1, 2], schedule=[(release, 1)], accountant=accountant(), delta=1e-6,
        mean_runs=60.0,
    )  # fmt: skip
    # each is missed with probability (2 / 3)^60 = 3e-11
    assert set(tried) == {0, 1, 2} and best.candidate == 1


def test_the_generator_does_not_tell_how_many_runs_there_were(monkeypatch):
    """It is what it was, and no run has drawn the numbers that come next, nor another run's."""
    drawn = []

    def train(engine, candidate):
        drawn.append(float(torch.rand(())))
        return charge(engine, candidate)

    state = torch.get_rng_state()
    for number in (1, 3):
        fixed_number(monkeypatch, number)
        best_of_runs(
            train, [1.0], schedule=SCHEDULE, accountant=accountant(), delta=1e-6, mean_runs=2.0
        )
        assert torch.equal(torch.get_rng_state(), state)
    drawn.append(float(torch.rand(())))
    assert len(set(drawn)) == 5
