"""Tuning at one price: what is run, what is charged, and what is refused."""

import random
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from support.steps import train as train_on
from support.training import private, states
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes.accounting.events import GaussianDpEvent, PoissonSampledDpEvent, UserLevelDpEvent
from torch_dpbayes.accounting.selection import Repetitions, selection_epsilon
from torch_dpbayes.engine import tuning

STEP = PoissonSampledDpEvent(0.25, GaussianDpEvent(1.0))
SCHEDULE = [(STEP, 2)]


def accountant(**settings):
    return dpb.PrivacyAccountant(100.0, 1e-4, **settings)


@pytest.fixture
def number(monkeypatch):
    """Fixes how many runs there are."""
    return lambda count: monkeypatch.setattr(Repetitions, "draw", lambda self: count)


def best_of_runs(train, candidates=(5,), account=None, schedule=SCHEDULE, mean_runs=3.0):
    account = accountant() if account is None else account
    given = {"schedule": schedule, "accountant": account, "delta": 1e-6, "mean_runs": mean_runs}
    return tuning.best_of_runs(train, candidates, **given)


def charge(engine, candidate, count=2, step=STEP):
    engine.accountant.compose(step, count)
    return candidate, float(candidate)


def is_charged_once(total):
    epsilon = selection_epsilon(SCHEDULE, Repetitions(3.0), 1e-6)
    return epsilon <= total.get_epsilon(1e-6) <= epsilon * (1 + 1e-9)


def test_one_charge_for_the_best_of_private_trainings(number, caplog, recwarn):
    """Nothing tells how many runs there were, nor has a run drawn the numbers that come next, or
    another run's; what the best run rests on is not left out.
    """
    data = TensorDataset(torch.randn(64, 3), torch.randint(2, (64,)))
    tried, drawn, total = [], [], accountant()

    def train(engine, lr):
        options = {"optimizer": partial(dpb.optim.DPSGLD, lr=lr, temperature=0.0), "engine": engine}
        options |= {"noise_multiplier": 1.0, "assume_independent_records": True}
        made = private(nn.Linear(3, 2), data, 16, **options)
        train_on(*made, steps=2)
        warnings.warn(f"lr = {lr}", stacklevel=1)
        drawn.append((float(torch.rand(())), random.random(), np.random.rand()))
        tried.append((lr, len(engine.accountant)))
        return made[0], -abs(lr - 0.2)

    number(4)
    before = states()
    best = best_of_runs(train, [0.1, 0.2, 0.4], total)
    assert states() == before and not caplog.records and not recwarn.list
    drawn.append((float(torch.rand(())), random.random(), np.random.rand()))
    assert [len(set(of)) for of in zip(*drawn)] == [5] * 3
    assert [count for _, count in tried] == [2] * 4
    assert best.score == max(-abs(lr - 0.2) for lr, _ in tried) == -abs(best.candidate - 0.2)
    assert isinstance(best.result, nn.Linear) and is_charged_once(total)
    summary = total.summary()
    assert "only the best run was seen" in summary and "as the user vouches" in summary


def test_runs_over_users_are_charged_to_an_accountant_of_users(number):
    number(2)
    step, total = UserLevelDpEvent(STEP), accountant(unit="user")
    run = partial(charge, step=step)
    assert best_of_runs(run, account=total, schedule=[(step, 2)]).result == 5
    assert is_charged_once(total)
    for other, schedule in ((accountant(), [(step, 2)]), (accountant(unit="user"), SCHEDULE)):
        with pytest.raises(ValueError):
            best_of_runs(charge, account=other, schedule=schedule)
        assert len(other) == 0


def test_it_is_charged_before_the_first_run_and_stays_charged():
    poor, total, ran = dpb.PrivacyAccountant(0.1, 1e-5), accountant(), []

    def train(engine, candidate):
        ran.append(candidate)
        raise OSError("disk full")

    with pytest.raises(dpb.PrivacyBudgetExceeded):
        best_of_runs(train, account=poor)
    assert not ran and len(poor) == 0
    with pytest.raises(OSError, match="disk full"):
        best_of_runs(train, account=total)
    assert ran and total.get_epsilon(1e-6) > 0


@pytest.mark.parametrize("neighboring", ["add_or_remove_one", "replace_one"])
@pytest.mark.parametrize(
    "more",
    [
        lambda a: a.compose(STEP, 3),
        lambda a: a.compose(STEP, 2).compose(GaussianDpEvent(1000.0), adaptive=True),
        lambda a: a.compose(PoissonSampledDpEvent(0.25, GaussianDpEvent(0.99))),
        lambda a: a.compose(PoissonSampledDpEvent(0.26, GaussianDpEvent(1.0))),
        lambda a: a.load_state_dict(dpb.PrivacyAccountant().state_dict()),
        lambda a: None,  # nor nothing, as who does not use the engine
    ],
)
def test_a_run_may_not_release_more_than_the_schedule(more, neighboring):
    def train(engine, candidate):
        more(engine.accountant)
        return 0, 0.0

    with pytest.raises((dpb.PrivacyBudgetExceeded, RuntimeError, ValueError)):
        best_of_runs(train, account=accountant(neighboring=neighboring))


def test_a_run_may_release_less_and_only_its_own_model(number):
    number(3)
    quieter = PoissonSampledDpEvent(0.1, GaussianDpEvent(3.0))
    assert best_of_runs(partial(charge, count=1, step=quieter)) == (5, 5, 5.0)
    shared = nn.Linear(2, 2)
    with pytest.raises(RuntimeError):
        best_of_runs(lambda engine, c: ((shared, "log"), charge(engine, c)[1]))
    with pytest.raises(ValueError):
        best_of_runs(charge, [])


def test_scores_that_are_no_numbers_lose_and_candidates_are_drawn_afresh(number):
    number(60)
    tried = []

    def train(engine, candidate):
        tried.append(candidate)
        charge(engine, candidate)
        is_none = candidate == 2 or len(tried) == 1  # also of the first, beside which others win
        return candidate, float("nan") if is_none else float(candidate)

    best = best_of_runs(train, [0, 1, 2], mean_runs=60.0)
    # each is missed with probability (2 / 3)^60 = 3e-11
    assert set(tried) == {0, 1, 2} and (best.candidate, best.score) == (1, 1.0)
