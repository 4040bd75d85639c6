"""The front door: loaders, budgets and plans, and models that take their inputs by name."""

import collections
import gc
import math
import pickle
from functools import partial

import pytest
import torch
from opacus.data_loader import DPDataLoader
from support.ledgers import later_job
from support.refusals import refused
from support.steps import train
from support.training import recorded
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

import torch_dpbayes as dpb
from torch_dpbayes.accounting import events
from torch_dpbayes.batches.poisson_loader import PoissonLoader
from torch_dpbayes.batches.sampler import PoissonSampler

DELTA = 1e-5
SPENT = events.GaussianDpEvent(5.0)


def data(rows=60):
    return TensorDataset(torch.randn(rows, 4), torch.randint(3, (rows,)))


def arguments(**options):
    given = {
        "module": nn.Linear(4, 3),
        "optimizer": partial(dpb.optim.DPSGLD, lr=20.0),
        "data_loader": DataLoader(data(), batch_size=12, shuffle=True),
        "max_grad_norm": 1.0,
    }
    return {**given, **options}


def make(accountant=None, **options):
    return dpb.PrivacyEngine(accountant).make_private(**arguments(**options))


def with_epsilon(accountant=None, **options):
    engine = dpb.PrivacyEngine(accountant)
    given = {"target_delta": DELTA, **options}
    return engine, *engine.make_private_with_epsilon(**arguments(**given))


# -- loaders and accountants -----------------------------------------------------------------------


def test_a_loader_becomes_poisson_at_its_rate_and_the_user_is_told(caplog):
    shuffled = DataLoader(data(1000), batch_size=64, shuffle=True, drop_last=True)
    _, optimizer, loader = make(data_loader=shuffled)
    assert "Poisson" in caplog.text and "0.064" in caplog.text
    assert isinstance(loader, DPDataLoader) and loader.sample_rate == 64 / 1000
    assert type(loader.batch_sampler) is PoissonSampler and len(loader) == 15
    assert optimizer.num_data == 1000 and optimizer.expected_batch_size == pytest.approx(64)

    _, optimizer, loader = make(data_loader=DPDataLoader(data(), sample_rate=0.25))
    assert type(loader) is PoissonLoader and optimizer.expected_batch_size == 15
    net, again, other = make(data_loader=loader)
    assert other is not loader and other.sample_rate == loader.sample_rate == 0.25
    train(net, again, other)


def test_an_engine_takes_a_built_optimizer_s_accountant_and_has_none_before():
    engine, net = dpb.PrivacyEngine(), nn.Linear(4, 3)
    with refused("model-layer"):  # and is as it was
        engine.make_private(**arguments(module=nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))))
    with refused("state"):
        _ = engine.accountant
    own = {"num_data": 60, "expected_batch_size": 12, "max_grad_norm": 0.7}
    built = dpb.optim.DPSGLD(net.named_parameters(), 0.1, **own)
    given = arguments(module=net, optimizer=built, max_grad_norm=None)
    _, optimizer, loader = engine.make_private(**given)
    train(net, optimizer, loader)
    assert optimizer is built and built.sampling == "poisson"
    assert engine.accountant is built.accountant and len(engine.accountant) == len(loader)


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_model_that_goes_on_under_a_new_accountant_says_so(is_kept):
    def says_so(accountant, steps=1):
        net, optimizer, loader = make(accountant, module=model, data_loader=DataLoader(data(), 10))
        train(net, optimizer, loader, steps)
        return any("another accountant before" in note for note in accountant.notes)

    model, unused, accountant = nn.Linear(4, 3), dpb.PrivacyAccountant(), dpb.PrivacyAccountant()
    assert not says_so(unused, steps=0)  # made private, and never trained
    assert not says_so(accountant) and not says_so(accountant)
    if not is_kept:
        del accountant
        gc.collect()
    assert says_so(dpb.PrivacyAccountant())


# -- budgets ---------------------------------------------------------------------------------------


MATCHED = partial(dpb.optim.DPSGHMC, lr=0.01, momentum="matched", temperature=1.0)
RUNS = [
    ("pld", partial(dpb.optim.DPSGFS, lr=20.0), 1.0),
    ("pld", partial(dpb.optim.DPSGHMC, lr=0.2, momentum=0.7), None),
    ("rdp", MATCHED, 1.0),
]


@pytest.mark.parametrize(("method", "sampler", "clip"), RUNS)
def test_the_target_is_met_history_included_and_cannot_be_overrun(method, sampler, clip):
    """Where the clip norm is derived, at temperature 1. The summary says what was used."""
    accountant = dpb.PrivacyAccountant(3.0, DELTA, method=method).compose(SPENT)
    given = {"optimizer": sampler, "target_epsilon": 3.0, "epochs": 2, "max_grad_norm": clip}
    _, net, optimizer, loader = with_epsilon(accountant, **given)
    if clip is None:
        plan = dpb.PrivacyEngine(accountant).plan(**arguments(**given), target_delta=DELTA)
        assert plan.max_grad_norm == pytest.approx(optimizer.max_grad_norm)
        assert plan.effective_temperature == pytest.approx(1.0)
    train(net, optimizer, loader, epochs=2)
    summary, origin = accountant.summary(), "derived" if clip is None else "as given"
    assert f"clip norm {optimizer.max_grad_norm:.4g}, {origin}" in summary
    assert f"temperature {optimizer.effective_temperature:.4g}, noise multiplier" in summary
    assert f"noise multiplier {optimizer.effective_noise_multiplier:.4g}" in summary
    assert 2.8 < accountant.get_epsilon() <= 3.0
    with pytest.raises(dpb.PrivacyBudgetExceeded):
        train(net, optimizer, loader)


def test_later_jobs_of_a_ledger_are_calibrated_to_what_is_left_of_its_budget(tmp_path):
    """The second job is held by a filter, and the third finds adaptive charges: both get the
    smallest noise whose steps all fit.
    """
    noise = []
    for share in (1.0, 3.0, 3.0):
        with later_job(3.0, DELTA, path=tmp_path / "budget.db") as accountant:
            if noise:
                with refused("budget-whole"):
                    with_epsilon(accountant, target_epsilon=2.0, epochs=1)
            target = {"target_epsilon": share, "epochs": 1}
            engine, net, optimizer, loader = with_epsilon(accountant, **target)
            given = arguments(module=net, optimizer=optimizer, data_loader=loader)
            plan = engine.plan(**given, target_delta=DELTA, **target)
            train(net, optimizer, loader)
            noise.append(optimizer.noise_multiplier)
            assert accountant.get_epsilon() == pytest.approx(plan.epsilon, rel=1e-3)
    assert noise[1] < noise[0] < 10 * noise[1] < noise[2]  # the second job left next to nothing


def test_little_left_of_a_target_is_said_and_a_share_can_be_had(caplog):
    accountant = dpb.PrivacyAccountant()
    given = {"optimizer": partial(dpb.optim.DPSGLD, lr="free", temperature=1.0), "epochs": 2}
    for target in (1.5, 1.51):
        assert "was spent before" not in caplog.text
        _, *made = with_epsilon(accountant, **given, target_epsilon=target)
        train(*made, epochs=2)
    assert "was spent before" in caplog.text
    before, share = accountant.get_epsilon(DELTA), {**given, "additional_epsilon": 1.5}
    planned = dpb.PrivacyEngine(accountant).plan(**arguments(**share), target_delta=DELTA)
    _, *made = with_epsilon(accountant, **share)
    train(*made, epochs=2)
    assert before + 1.45 < accountant.get_epsilon(DELTA) <= before + 1.5
    assert math.isclose(planned.epsilon, accountant.get_epsilon(DELTA), rel_tol=1e-3)


# -- plans -----------------------------------------------------------------------------------------


def test_plan_says_what_will_happen_and_changes_nothing():
    given = arguments(target_delta=DELTA, epochs=4, target_epsilon=5.0)
    given["optimizer"] = partial(dpb.optim.DPSGLD, lr=0.05, temperature=1.0)
    engine = dpb.PrivacyEngine()
    cold = engine.plan(**given)
    assert cold.noise_multiplier < cold.langevin_noise_multiplier
    assert cold.effective_noise_multiplier == cold.langevin_noise_multiplier
    assert cold.epsilon < 1.0 and f"lr = {cold.free_lr:.4g}" in str(cold)
    with refused("state"):
        _ = engine.accountant

    colder = cold.temperature * (cold.noise_multiplier / cold.langevin_noise_multiplier) ** 2
    # what it advises uses the rest of the target
    for options in ({"lr": cold.free_lr}, {"lr": 0.05, "temperature": colder}):
        advised = engine.plan(**given | {"optimizer": partial(dpb.optim.DPSGLD, **options)})
        assert 4.8 < advised.epsilon <= 5.0

    net, optimizer, private = engine.make_private_with_epsilon(**given)
    assert optimizer.effective_noise_multiplier == pytest.approx(cold.effective_noise_multiplier)
    assert optimizer.effective_temperature == pytest.approx(cold.effective_temperature)
    train(net, optimizer, private, epochs=4)
    assert len(engine.accountant) == cold.steps
    assert engine.get_epsilon() == pytest.approx(cold.epsilon, rel=1e-6)


def test_plan_without_a_target_adds_to_what_was_spent():
    accountant = dpb.PrivacyAccountant().compose(SPENT)
    given = arguments(noise_multiplier=8.0, epochs=1, target_delta=DELTA)
    plan = dpb.PrivacyEngine(accountant).plan(**given)
    assert len(accountant) == 1
    accountant.compose(SPENT)  # later than the plan
    alone = dpb.PrivacyAccountant().compose(SPENT)
    rate = events.PoissonSampledDpEvent(0.2, events.GaussianDpEvent(8.0))
    wanted = alone.compose(rate, 5).get_epsilon(DELTA)
    assert pickle.loads(pickle.dumps(plan)).epsilon == pytest.approx(wanted)


def test_plan_says_what_makes_a_run_useless():
    plan, given = dpb.PrivacyEngine().plan, {"target_delta": DELTA, "epochs": 1}
    sgld = partial(dpb.optim.DPSGLD, lr=20.0, temperature=1.0)
    given |= {"noise_multiplier": 1.0, "optimizer": sgld}
    for said, options in {
        "cannot train the model": {"noise_multiplier": 1e5},
        "not below 1 / 60 records": {"target_delta": 0.1},
        "hotter than the posterior": {"optimizer": partial(dpb.optim.DPSGLD, lr=50.0)},
    }.items():
        assert said not in str(plan(**arguments(**given)))
        assert said in str(plan(**arguments(**given | options)))


# -- inputs by name --------------------------------------------------------------------------------


class ByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("trials", torch.zeros(()))

    def forward(self, *, features, mask=None):
        return self.linear(features if mask is None else features * mask[:, None])


class ByPlace(ByName):
    def forward(self, x):
        if not torch.is_grad_enabled() and isinstance(x, dict):
            self.trials += 1
        return self.linear(x)


class Whole(ByName):
    def forward(self, batch):
        return self.linear(batch["features"])


@pytest.mark.parametrize("mode", [None, "vmap", "hooks"])
@pytest.mark.parametrize("collate", [None, lambda r: collections.UserDict(default_collate(r))])
def test_a_model_by_name_releases_what_the_same_model_by_place_does(mode, collate):
    rows = [{"features": torch.randn(4), "mask": torch.rand(()), "label": i % 3} for i in range(40)]
    found = []
    # what is no dict is looked into by name only
    for kind in (ByPlace, ByName, *([Whole] if collate is None else [])):
        torch.manual_seed(0)  # only of the initial parameters, which are to be the same
        net, optimizer, loader = make(
            module=kind(),
            optimizer=partial(dpb.optim.DPSGLD, lr=0.1, temperature=0.0),
            data_loader=DataLoader(rows, 40, collate_fn=collate),
            noise_multiplier=1e-6,
            **recorded(mode),
        )
        assert net.trials == 0  # a trial of a batch leaves the model as it was
        (batch,) = loader
        given = {"features": batch["features"]} if kind is ByName else {}
        inputs = {ByPlace: [batch["features"]], ByName: [], Whole: [batch]}[kind]
        nn.functional.cross_entropy(net(*inputs, **given), batch["label"]).backward()
        optimizer.step()
        found.append(nn.utils.parameters_to_vector(net.parameters()).detach())
    for own in found[1:]:
        torch.testing.assert_close(own, found[0], rtol=0, atol=1e-6)  # the noise is 1e-6·C/B
