"""The front door: loaders, optimizers, budgets and plans; misuse is impossible or loud."""

import logging
import math
from functools import partial

import pytest
import torch
from opacus.data_loader import DPDataLoader
from support.steps import train
from support.training import values
from torch import nn
from torch.utils.data import (
    DataLoader,
    TensorDataset,
)

import torch_dpbayes as dpb
from torch_dpbayes.accounting import events
from torch_dpbayes.batches.poisson_loader import PoissonLoader

FACTORY = partial(dpb.optim.DPSGLD, lr=0.1)


def data(rows=60):
    return TensorDataset(torch.randn(rows, 4), torch.randint(3, (rows,)))


def make(engine=None, *, module=None, optimizer=FACTORY, loader=None, **options):
    engine = dpb.PrivacyEngine() if engine is None else engine
    module = nn.Linear(4, 3) if module is None else module
    loader = DataLoader(data(), batch_size=12, shuffle=True) if loader is None else loader
    return engine, *engine.make_private(
        module=module, optimizer=optimizer, data_loader=loader, **{"max_grad_norm": 1.0, **options}
    )


# -- loaders ---------------------------------------------------------------------------------------


@pytest.mark.chance(2e-6)
def test_a_shuffled_loader_becomes_poisson_at_the_declared_rate_and_the_user_is_told(caplog):
    with caplog.at_level(logging.WARNING, logger="torch_dpbayes"):
        _, _, optimizer, loader = make(
            loader=DataLoader(data(1000), batch_size=64, shuffle=True, drop_last=True)
        )
    assert "Poisson" in caplog.text and "0.064" in caplog.text
    assert isinstance(loader, DPDataLoader) and loader.sample_rate == 64 / 1000
    assert (
        optimizer.num_data == 1000
        and optimizer.expected_batch_size == pytest.approx(64)
        and optimizer.sampling == "poisson"
    )
    assert len(loader) == 15
    loader.batch_sampler._steps = 300
    sizes = torch.tensor([float(len(values(x))) for x, _ in loader])
    assert abs(sizes.mean() - 64) < 5 * math.sqrt(64 * 0.936 / len(sizes))
    # binomial sizes; the bounds are five standard errors of a variance of 300 sizes
    assert 0.5 < sizes.var() / (64 * 0.936) < 1.7


def test_private_loaders_keep_their_rate():
    ready = DPDataLoader(data(), sample_rate=0.25)
    _, _, optimizer, loader = make(loader=ready)
    assert (
        type(loader) is PoissonLoader
        and loader.sample_rate == 0.25
        and optimizer.expected_batch_size == 15
    )
    _, net, again, other = make(loader=loader)
    assert other is not loader and other.sample_rate == 0.25
    train(net, again, other)


def test_empty_batches_keep_the_structure_of_a_batch():
    records = [{"x": torch.randn(4), "y": 1} for _ in range(30)]
    loader = PoissonLoader(DataLoader(records, batch_size=1), 1e-6)
    batch = loader.collate_fn([])
    assert (
        batch["x"].shape == (0, 4) and batch["y"].shape == (0,) and batch["y"].dtype == torch.int64
    )


def test_noise_and_sampling_never_share_a_stream():
    shared = torch.Generator().manual_seed(torch.seed())
    equal = [torch.Generator().manual_seed(torch.seed() % 2**31) for _ in range(2)]
    equal[1].set_state(equal[0].get_state())
    for noise, draws in ((shared, shared), equal):
        with pytest.raises(ValueError, match="different seeds"):
            make(
                optimizer=partial(dpb.optim.DPSGLD, lr=0.1, generator=noise),
                loader=DataLoader(data(), batch_size=12, generator=draws),
            )


# -- optimizers ------------------------------------------------------------------------------------


def test_built_optimizers_keep_their_values_and_differing_arguments_raise():
    net = nn.Linear(4, 3)
    built = dpb.optim.DPSGLD(
        net.named_parameters(), 0.1, num_data=60, expected_batch_size=12, max_grad_norm=0.7
    )
    engine, _, optimizer, loader = make(module=net, optimizer=built, max_grad_norm=None)
    assert (
        optimizer is built and built.sampling == "poisson" and engine.accountant is built.accountant
    )
    train(net, optimizer, loader)
    for options, message in (
        ({"max_grad_norm": 1.0}, "max_grad_norm = 0.7"),
        ({"max_grad_norm": None, "noise_multiplier": 2.0}, "noise_multiplier = 0.0"),
        ({"max_grad_norm": None, "loader": DataLoader(data(61), batch_size=12)}, "num_data = 60"),
        (
            {"max_grad_norm": None, "loader": DataLoader(data(), batch_size=6)},
            "expected_batch_size = 12",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make(module=net, optimizer=built, **options)
    with pytest.raises(ValueError, match="different accountants"):
        make(
            dpb.PrivacyEngine(accountant=dpb.PrivacyAccountant()),
            module=net,
            optimizer=built,
            max_grad_norm=None,
        )


# -- budgets and plans -----------------------------------------------------------------------------


def with_epsilon(engine, **options):
    arguments = {
        "module": nn.Linear(4, 3),
        "optimizer": partial(dpb.optim.DPSGLD, lr=20.0),
        "data_loader": DataLoader(data(), batch_size=12),
    }
    return engine.make_private_with_epsilon(
        **{**arguments, "max_grad_norm": 1.0, "target_delta": 1e-5, **options}
    )


def test_the_target_is_met_history_included_and_cannot_be_overrun():
    engine = dpb.PrivacyEngine()
    net, optimizer, loader = with_epsilon(engine, target_epsilon=2.0, epochs=3)
    train(net, optimizer, loader, epochs=3)
    assert 1.9 < engine.accountant.get_epsilon() <= 2.0
    with pytest.raises(dpb.PrivacyBudgetExceeded):
        train(net, optimizer, loader)
    with pytest.raises(ValueError, match="exceeds the accountant's budget"):
        with_epsilon(engine, target_epsilon=3.0, epochs=3)

    shared = dpb.PrivacyAccountant(3.0, 1e-5)
    shared.compose(events.GaussianDpEvent(3.0))
    engine = dpb.PrivacyEngine(accountant=shared)
    net, optimizer, loader = with_epsilon(engine, target_epsilon=3.0, epochs=2)
    train(net, optimizer, loader, epochs=2)
    assert 2.8 < shared.get_epsilon() <= 3.0


@pytest.mark.parametrize("method", ["pld", "rdp"])
def test_the_target_is_met_by_what_the_sampler_releases_under_the_method_of_the_budget(method):
    make = partial(dpb.optim.DPSGFS, lr=20.0)
    if method == "rdp":
        make = partial(dpb.optim.DPSGHMC, lr=0.01, momentum="matched", temperature=1.0)
    accountant = dpb.PrivacyAccountant(2.0, 1e-5, method=method)
    net, optimizer, loader = with_epsilon(
        dpb.PrivacyEngine(accountant=accountant), optimizer=make, target_epsilon=2.0, epochs=3
    )
    train(net, optimizer, loader, epochs=3)
    assert 1.9 < accountant.get_epsilon() <= 2.0


def test_later_jobs_of_a_ledger_are_calibrated_to_what_is_left_of_its_budget(tmp_path):
    """The second job is held by a filter, and the third finds adaptive charges: both get the
    smallest noise whose steps all fit.
    """
    path, noise = tmp_path / "budget.db", []
    for share in (1.0, 3.0, 3.0):
        with dpb.PrivacyAccountant(3.0, 1e-5, path=path) as accountant:
            engine, epochs = dpb.PrivacyEngine(accountant=accountant), 1
            if accountant.is_later_job:
                with pytest.raises(ValueError, match="pass that as the target"):
                    with_epsilon(engine, target_epsilon=2.0, epochs=epochs)
            arguments = {"target_epsilon": share, "epochs": epochs}
            net, optimizer, loader = with_epsilon(engine, **arguments)
            plan = engine.plan(
                module=net,
                optimizer=optimizer,
                data_loader=loader,
                epochs=epochs,
                target_delta=1e-5,
                target_epsilon=share,
                max_grad_norm=1.0,
            )
            for _ in range(epochs):
                train(net, optimizer, loader)
            noise.append(optimizer.noise_multiplier)
            assert accountant.get_epsilon() == pytest.approx(plan.epsilon, rel=1e-3)
    assert noise[1] < noise[0] < 10 * noise[1] < noise[2]  # the second job left next to nothing


def test_jobs_of_a_ledger_do_not_draw_the_same_batches(tmp_path):
    """Two runs of 1000 steps at q = .01 and z = 1 with the same batches cost epsilon = 4.5,
    and 2.6 if draws are independent.
    """
    seeded = DataLoader(
        data(), batch_size=12, shuffle=True, generator=torch.Generator().manual_seed(1)
    )
    with dpb.PrivacyAccountant(3.0, 1e-5, path=tmp_path / "budget.db") as accountant:
        with pytest.raises(ValueError, match="in every job that seeds it alike"):
            with_epsilon(
                dpb.PrivacyEngine(accountant=accountant),
                data_loader=seeded,
                target_epsilon=3.0,
                epochs=1,
            )
        assert len(accountant) == 0


def test_plan_says_what_will_happen_and_changes_nothing(capsys):
    net, loader = nn.Linear(4, 3), DataLoader(data(), batch_size=12)
    arguments = {
        "module": net,
        "data_loader": loader,
        "max_grad_norm": 1.0,
        "target_delta": 1e-5,
        "epochs": 4,
        "target_epsilon": 5.0,
    }
    engine = dpb.PrivacyEngine()
    sampler = partial(dpb.optim.DPSGLD, lr=0.05, temperature=1.0)
    cold = engine.plan(optimizer=sampler, **arguments)
    assert capsys.readouterr().out == ""
    text = str(cold)
    assert (
        cold.langevin_noise_multiplier > cold.noise_multiplier
        and cold.effective_noise_multiplier == cold.langevin_noise_multiplier
    )
    assert (
        cold.epsilon < 1.0
        and "rest would be used with" in text
        and f"lr = {cold.free_lr:.4g}" in text
    )
    assert not hasattr(net.weight, "grad_sample")

    colder = cold.temperature * (cold.noise_multiplier / cold.langevin_noise_multiplier) ** 2
    # what it advises uses the rest of the target
    for options in ({"lr": cold.free_lr}, {"lr": 0.05, "temperature": colder}, {"lr": 0.05}):
        advised = engine.plan(optimizer=partial(dpb.optim.DPSGLD, **options), **arguments)
        assert 4.8 < advised.epsilon <= 5.0

    engine = dpb.PrivacyEngine()
    net, optimizer, private = engine.make_private_with_epsilon(optimizer=sampler, **arguments)
    assert optimizer.effective_noise_multiplier == pytest.approx(cold.effective_noise_multiplier)
    assert optimizer.effective_temperature == pytest.approx(cold.effective_temperature)
    train(net, optimizer, private, epochs=4)
    assert len(engine.accountant) == cold.steps
    assert engine.accountant.get_epsilon() == pytest.approx(cold.epsilon, rel=1e-6)


def test_plan_without_a_target():
    accountant = dpb.PrivacyAccountant()
    accountant.compose(events.GaussianDpEvent(5.0))
    before = accountant.get_epsilon(1e-5)
    arguments = {
        "module": nn.Linear(4, 3),
        "optimizer": FACTORY,
        "data_loader": DataLoader(data(), batch_size=12),
        "max_grad_norm": 1.0,
    }
    plan = dpb.PrivacyEngine(accountant).plan(
        **arguments, noise_multiplier=8.0, epochs=1, target_delta=1e-5
    )
    assert plan.epsilon > before and len(accountant) == 1
    with pytest.raises(ValueError, match="target_delta"):
        dpb.PrivacyEngine(accountant).plan(**arguments, epochs=1)
    with pytest.raises(ValueError, match="leave out noise_multiplier"):
        dpb.PrivacyEngine().plan(
            **arguments, noise_multiplier=8.0, epochs=1, target_delta=1e-5, target_epsilon=1.0
        )


def test_the_engine_has_its_accountant_after_make_private():
    engine = dpb.PrivacyEngine()
    with pytest.raises(RuntimeError, match="make_private"):
        _ = engine.accountant
    make(engine)
    assert isinstance(engine.accountant, dpb.PrivacyAccountant)


def test_a_failed_make_private_leaves_the_engine_as_it_was():
    engine = dpb.PrivacyEngine()
    with pytest.raises(ValueError):
        make(engine, module=nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    with pytest.raises(RuntimeError):
        _ = engine.accountant
    make(engine)
