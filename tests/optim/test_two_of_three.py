"""Of lr, temperature and clip norm the third follows from the noise."""

import copy
import io
import logging
import math
from functools import partial

import pytest
import torch
from support.steps import bare, train, without_noise, zeros
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes.optim import DPSGFS, DPSGHMC, DPSGLD, DPSGNHT

N, B, LR, Z = 1000, 50, 0.2, 1.3
# a in z_L = (B/C)·√(2aT/(ηN)), from the table of the samplers
SAMPLERS = {
    "sgld": (DPSGLD, 1.0),
    "sghmc": (partial(DPSGHMC, momentum=0.7), 0.3),
    "sgnht": (partial(DPSGNHT, momentum=0.8), 0.2),
    "sgfs": (partial(DPSGFS, fisher="diagonal"), 1.0),
}
every_sampler = pytest.mark.parametrize(
    ("make", "friction"), SAMPLERS.values(), ids=SAMPLERS.keys()
)


def built(make, params=None, **options):
    given = {"num_data": N, "expected_batch_size": B, "noise_multiplier": Z, "max_grad_norm": None}
    return bare([zeros(4)] if params is None else params, make, **{"lr": LR, **given, **options})


@pytest.mark.parametrize("temperature", [None, 0.3])
@every_sampler
def test_the_clip_norm_makes_the_noise_the_samplers_own(make, friction, temperature):
    optimizer = built(make, temperature=temperature)
    heat = 1.0 if temperature is None else temperature
    assert optimizer.temperature == heat
    wanted = B / Z * math.sqrt(2 * friction * heat / (LR * N))
    assert optimizer.max_grad_norm == pytest.approx(wanted, rel=1e-12)
    assert optimizer.langevin_noise_multiplier == pytest.approx(Z, rel=1e-12)
    assert optimizer.effective_noise_multiplier == pytest.approx(Z, rel=1e-12)
    assert optimizer.effective_temperature == pytest.approx(heat, rel=1e-12)
    # one temperature, whichever clip norm C' one starts from: C'·z_L(C')/z
    other = built(make, max_grad_norm=0.37, temperature=heat)
    again = 0.37 * other.langevin_noise_multiplier / Z
    assert optimizer.max_grad_norm == pytest.approx(again, rel=1e-12)


@every_sampler
def test_the_temperature_follows_from_a_clip_norm(make, friction):
    optimizer = built(make, max_grad_norm=0.7)
    assert optimizer.temperature is None
    group = optimizer.param_groups[0]
    for lr in (LR, 3 * LR):  # "the current lr"
        group["lr"] = lr
        wanted = lr * N * (Z * 0.7 / B) ** 2 / (2 * friction)
        assert optimizer.effective_temperature == pytest.approx(wanted, rel=1e-12)
        assert optimizer.effective_noise_multiplier == Z
        assert optimizer.langevin_noise_multiplier == Z
        stated = built(make, max_grad_norm=0.7, temperature=wanted, lr=lr)
        assert stated.langevin_noise_multiplier == pytest.approx(Z, rel=1e-12)


@every_sampler
def test_a_given_temperature_that_is_the_noises_gives_the_same_steps(make, friction):
    start = torch.randn(4, dtype=torch.float64)
    records = torch.randn(3, 5, 4, dtype=torch.float64)
    ends = []
    wanted = LR * N * (Z * 0.7 / B) ** 2 / (2 * friction)
    for temperature in (None, wanted):
        p = nn.Parameter(start.clone())
        optimizer = built(make, [p], max_grad_norm=0.7, temperature=temperature)
        without_noise(optimizer)
        for batch in records:
            p.grad_sample = batch.clone()
            optimizer.step()
        ends.append(p.detach())
    torch.testing.assert_close(*ends, rtol=1e-10, atol=1e-12)


def test_a_thermostat_starts_at_the_friction_of_its_momentum():
    groups = [
        {"params": [nn.Parameter(torch.zeros(size, dtype=torch.float64))], "lr": lr}
        for size, lr in ((3, 0.1), (5, 0.4))
    ]
    optimizer = built(DPSGNHT, groups, momentum=0.8, max_grad_norm=0.7, thermostat_gain=1e-3)
    for group in groups:
        group["params"][0].grad_sample = torch.zeros(2, *group["params"][0].shape)
    optimizer.step()
    assert optimizer.friction == pytest.approx(0.2, abs=0.1)
    kinetic, gain = 0.0, optimizer.thermostat_gain  # of −ηĝ/2, in each group's own temperature
    for group in groups:
        velocity = optimizer.state[group["params"][0]]["velocity"]
        heat = group["lr"] * N * (Z * 0.7 / B) ** 2 / (2 * 0.2)
        kinetic += N * float((velocity / 2).square().sum()) / (8 * group["lr"] * heat)
    assert optimizer.friction == pytest.approx(0.2 + gain * (kinetic - 1), rel=1e-12)


@every_sampler
def test_of_several_groups_the_smallest_clip_norm_is_taken(make, friction):
    """Each group then has the noise of its own z_L, and none is hotter than T."""
    lrs = (0.05, 0.8)
    groups = [{"params": [nn.Parameter(torch.zeros(2))], "lr": lr} for lr in lrs]
    optimizer = built(make, groups)
    wanted = [B / Z * math.sqrt(2 * friction / (lr * N)) for lr in lrs]
    assert optimizer.max_grad_norm == pytest.approx(min(wanted), rel=1e-12)
    assert optimizer.effective_noise_multiplier == pytest.approx(Z, rel=1e-12)
    multipliers = [optimizer._multiplier(group) for group in optimizer.param_groups]
    assert multipliers == pytest.approx([4 * Z, Z], rel=1e-12)
    assert optimizer.effective_temperature == pytest.approx(1.0, rel=1e-12)


def test_a_schedule_leaves_the_clip_norm_and_takes_the_larger_noise():
    optimizer = built(DPSGLD)
    bound, group = optimizer.max_grad_norm, optimizer.param_groups[0]
    group["lr"] = LR / 4
    assert optimizer.effective_noise_multiplier == pytest.approx(2 * Z)
    assert optimizer.effective_temperature == pytest.approx(1.0)
    group["lr"] = 4 * LR
    assert optimizer.effective_noise_multiplier == pytest.approx(Z)
    assert optimizer.effective_temperature == pytest.approx(4.0)
    assert optimizer.max_grad_norm == bound


def test_without_a_floor_a_given_clip_norm_samples_temperature_one():
    optimizer = built(DPSGLD, max_grad_norm=0.7, noise_multiplier=0.0)
    assert optimizer.temperature == 1.0
    assert optimizer.effective_temperature == pytest.approx(1.0, rel=1e-12)
    free = built(DPSGLD, max_grad_norm=0.7, lr="free")
    assert free.temperature == 1.0 and free.effective_temperature == pytest.approx(1.0)


@every_sampler
def test_a_resumed_run_keeps_the_noise(make, friction):
    """Also where the schedule has moved lr on, or the budget that is left asks for another z."""
    first = built(make)
    for p in first.param_groups[0]["params"]:
        p.grad_sample = torch.zeros(2, *p.shape)
    first.step()
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    for options in ({}, {"lr": LR / 9}, {"noise_multiplier": 2 * Z}):
        file.seek(0)
        second = built(make, **options)
        second.load_state_dict(torch.load(file, weights_only=True))
        noise = second.noise_multiplier * second.max_grad_norm
        assert noise == pytest.approx(first.noise_multiplier * first.max_grad_norm, rel=1e-12)
        assert second.effective_temperature == pytest.approx(1.0, rel=1e-9)
        if not options:
            assert second.max_grad_norm == first.max_grad_norm
        assert copy.deepcopy(second).max_grad_norm == second.max_grad_norm
    for options in ({"max_grad_norm": 0.7}, {"temperature": 3.0}):  # of the user's own
        file.seek(0)
        other = built(make, **options)
        bound = other.max_grad_norm
        other.load_state_dict(torch.load(file, weights_only=True))
        assert other.max_grad_norm == bound


# -- by the engine ---------------------------------------------------------------------------------


def arguments(make=DPSGLD, lr=LR, **options):
    data = TensorDataset(torch.randn(200, 4), torch.randint(3, (200,)))
    return {
        "module": nn.Linear(4, 3),
        "optimizer": partial(make, lr=lr),
        "data_loader": DataLoader(data, batch_size=20),
        "target_epsilon": 2.0,
        "target_delta": 1e-5,
        "epochs": 2,
        **options,
    }


def test_a_run_uses_all_of_its_target_at_temperature_one(caplog):
    make, friction = SAMPLERS["sghmc"]
    engine, given = dpb.PrivacyEngine(), arguments(make)
    plan = engine.plan(**given)
    with caplog.at_level(logging.INFO, logger="torch_dpbayes"):
        net, optimizer, loader = engine.make_private_with_epsilon(**given)
    assert "clip norm" in caplog.text and "derived from public numbers" in caplog.text
    assert "was asked for" not in caplog.text
    z = optimizer.noise_multiplier
    assert optimizer.max_grad_norm == pytest.approx(20 / z * math.sqrt(2 * friction / (LR * 200)))
    assert (plan.max_grad_norm, plan.effective_temperature) == pytest.approx(
        (optimizer.max_grad_norm, 1.0)
    )
    assert f"C = {optimizer.max_grad_norm:.4g}, derived" in str(plan) and "T = 1 " in str(plan)
    train(net, optimizer, loader, epochs=2)
    assert 1.98 < engine.get_epsilon() <= 2.0
    assert f"clip norm {optimizer.max_grad_norm:.4g}, derived" in engine.accountant.summary()
    assert f"max_grad_norm={optimizer.max_grad_norm:.6g}" in repr(optimizer)


def test_a_bare_optimizer_says_so_at_its_first_step(caplog):
    p = nn.Parameter(torch.zeros(4))
    optimizer = built(DPSGLD, [p], max_grad_norm=0.5, temperature=1.0, noise_multiplier=0.1)
    with caplog.at_level(logging.WARNING, logger="torch_dpbayes"):
        for _ in range(2):
            p.grad_sample = torch.zeros(2, 4)
            optimizer.step()
    (record,) = caplog.records
    assert "only a floor" in record.getMessage() and "leave it out" in record.getMessage()


def test_noise_that_leaves_nothing_to_learn_is_said_before_it_is_spent(caplog):
    hot = dpb.PrivacyEngine().plan(**arguments(max_grad_norm=1.0, lr=50.0))
    assert hot.effective_temperature > 1 and "hotter than the posterior" in str(hot)
    cold = hot.max_grad_norm / math.sqrt(hot.effective_temperature)
    assert f"max_grad_norm = {cold:.4g}" in str(hot)
    fine = dpb.PrivacyEngine().plan(**arguments())
    assert fine.too_much_noise == []
    wide = arguments(
        target_epsilon=0.01, module=nn.Sequential(nn.Linear(4, 400), nn.Linear(400, 3))
    )
    with caplog.at_level(logging.WARNING, logger="torch_dpbayes"):
        dpb.PrivacyEngine().make_private_with_epsilon(**wide)
    assert "cannot train the model" in caplog.text


def test_make_private_needs_a_noise_or_a_clip_norm():
    given = {k: v for k, v in arguments().items() if not k.startswith(("target", "epochs"))}
    with pytest.raises(ValueError, match="without noise none follows"):
        dpb.PrivacyEngine().make_private(**given)
    _, optimizer, _ = dpb.PrivacyEngine().make_private(**given, noise_multiplier=1.5)
    assert optimizer.derives_clip_norm and optimizer.effective_temperature == pytest.approx(1.0)


def records():
    """A number that was computed from records of a private loader."""
    model = nn.Linear(2, 1)
    data = TensorDataset(torch.randn(40, 2), torch.randn(40, 1))
    model, optimizer, loader = dpb.PrivacyEngine().make_private(
        module=model,
        optimizer=partial(DPSGLD, lr=0.1),
        data_loader=DataLoader(data, batch_size=20),
        noise_multiplier=1.0,
    )
    x, y = next(iter(loader))
    nn.functional.mse_loss(model(x), y).backward()
    return x.norm(), optimizer


def test_no_setting_is_computed_from_records():
    number, optimizer = records()
    for options in ({"max_grad_norm": number}, {"lr": number}, {"prior_std": {"0": number}}):
        with pytest.raises(RuntimeError, match="computed from records"):
            built(DPSGLD, **options)
    with pytest.raises(RuntimeError, match="computed from records"):
        built(DPSGLD, [{"params": [nn.Parameter(torch.zeros(4))], "lr": number}])
    optimizer.param_groups[0]["prior_std"] = {"weight": number}
    with pytest.raises(RuntimeError, match="computed from records"):
        optimizer.step()
    assert len(optimizer.accountant) == 0


@pytest.mark.parametrize("fisher", ["full", "diagonal"])
def test_fisher_scoring_stays_where_it_is_at_lr_0_on_full_batches(fisher):
    p = nn.Parameter(torch.ones(4, dtype=torch.float64))
    optimizer = built(partial(DPSGFS, fisher=fisher), [p], expected_batch_size=N)
    for lr in (0.0, torch.tensor(0.3)):
        optimizer.param_groups[0]["lr"] = lr
        p.grad_sample = torch.zeros(N, 4, dtype=torch.float64)
        optimizer.step()
        assert torch.equal(p, torch.ones_like(p)) == (float(lr) == 0)
    assert isinstance(optimizer.effective_temperature, float)
