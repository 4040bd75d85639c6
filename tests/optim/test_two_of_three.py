"""Of lr, temperature and clip norm the third follows from the noise: resumed, and by the engine."""

import copy
import io
import math
import re
from functools import partial

import pytest
import torch
from support.steps import bare, fill, train, zeros
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes.optim import DPSGFS, DPSGHMC, DPSGLD, DPSGNHT

N, B, LR, Z = 1000, 50, 0.2, 1.3
SAMPLERS = [
    DPSGLD,
    partial(DPSGHMC, momentum=0.7),
    partial(DPSGNHT, momentum=0.8),
    partial(DPSGFS, fisher="diagonal"),
]
HMC = SAMPLERS[1]


def built(make, params=None, **options):
    given = {"num_data": N, "expected_batch_size": B, "noise_multiplier": Z, "max_grad_norm": None}
    return bare([zeros(4)] if params is None else params, make, **{"lr": LR, **given, **options})


@pytest.mark.parametrize("make", SAMPLERS)
def test_a_resumed_run_keeps_the_noise(make):
    """Also where the schedule has moved lr on, or the budget that is left asks for another z."""
    first = built(make)
    fill(first.param_groups[0]["params"])
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


@pytest.mark.parametrize("make", SAMPLERS)
def test_what_would_use_the_noise_that_was_asked_for(make):
    """Each of the three that the report names brings the sampler's own noise to the floor."""
    given = {"max_grad_norm": 0.1, "temperature": 1.0, "noise_multiplier": 0.4}
    optimizer = built(make, **given)
    names = ("max_grad_norm", "temperature", "lr")
    said = {
        name: float(re.search(rf"{name} = ([\d.e+-]+)", optimizer.unused_noise)[1])
        for name in names
    }
    for name, value in said.items():
        better = built(make, **given | {name: value})
        own = better.langevin_noise_multiplier
        assert own == pytest.approx(0.4, rel=0.005) and better.unused_noise == ""  # three digits
    assert built(make, **given | {"lr": "free"}).param_groups[0]["lr"] == optimizer.free_lr


def test_a_free_lr_belongs_to_a_group_and_its_momentum():
    """z_L = (B/C)·√(2(1 − m)T/(ηN)) is 2 at η = 2(1 − m)·(50/2)²/1000."""
    groups = [{"params": [zeros(2)], "momentum": m, "lr": "free"} for m in (0.5, 0.9)]
    options = {"noise_multiplier": 2.0, "max_grad_norm": 1.0, "temperature": 1.0}
    optimizer = built(DPSGHMC, groups, **options)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.625, 0.125])


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


def test_a_plan_for_a_target_uses_all_of_it_at_temperature_one():
    given = arguments(HMC)
    plan = dpb.PrivacyEngine().plan(**given)
    assert plan.effective_temperature == pytest.approx(1.0) and plan.warnings == []
    assert 1.98 < plan.epsilon <= 2.0
    engine = dpb.PrivacyEngine()
    _, optimizer, _ = engine.make_private_with_epsilon(**given)
    derived = 20 / optimizer.noise_multiplier * math.sqrt(2 * 0.3 / (LR * 200))
    assert optimizer.max_grad_norm == pytest.approx(derived)
    assert plan.max_grad_norm == pytest.approx(derived)
    assert plan.noise_multiplier == optimizer.noise_multiplier


# -- by itself, and by the engine ------------------------------------------------------------------


@pytest.mark.parametrize("is_alone", [True, False])
@pytest.mark.parametrize(("clip", "is_said"), [(0.01, True), (50.0, False), (None, False)])
def test_noise_beyond_what_was_asked_for_is_said_once(clip, is_said, is_alone, caplog):
    """Where the sampler's own noise is larger, which is what is charged."""
    given = {"noise_multiplier": 0.5, "max_grad_norm": clip}
    if is_alone:
        optimizer = built(DPSGLD, [p := zeros(4), q := zeros(2)], temperature=1.0, **given)
        for is_frozen in (False, True):
            q.requires_grad_(not is_frozen)
            fill([p, q])
            optimizer.step()
    else:
        targeted = arguments(partial(DPSGLD, temperature=1.0))
        given |= {k: v for k, v in targeted.items() if not k.startswith(("target", "epochs"))}
        net, optimizer, loader = dpb.PrivacyEngine().make_private(**given)
        train(net, optimizer, loader, 1)
    own = optimizer.langevin_noise_multiplier
    assert (own > 0.51) == is_said and optimizer.effective_noise_multiplier == pytest.approx(
        max(own, 0.5)
    )
    said = [record.message for record in caplog.records if f"{own:.4g}" in record.message]
    assert len(said) == is_said
