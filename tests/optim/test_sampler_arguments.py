"""What private optimizers and schedules refuse when they are made: one table of arguments, and what
the error says.
"""

import math
from functools import partial

import pytest
import torch
from torch import nn

import torch_dpbayes as dpb
from torch_dpbayes.optim import DPSGFS, DPSGHMC, DPSGLD, DPSGNHT
from torch_dpbayes.optim.schedules import Cyclical, PolynomialDecay

NONE_GIVEN = {"max_grad_norm": None, "temperature": None, "noise_multiplier": 1.0}
GIVEN = {
    "num_data": 100,
    "expected_batch_size": 10,
    "max_grad_norm": 1.0,
    "temperature": 1.0,
    "sampling": "poisson",
}
REFUSED = [
    (DPSGLD, {"lr": 0.0}, "lr must be positive"),
    (DPSGLD, {"lr": math.nan}, "lr must be positive"),
    (DPSGLD, {"lr": "fast"}, 'a number or "free"'),
    (DPSGLD, {"lr": "free"}, "it needs noise_multiplier > 0"),
    (DPSGLD, {"max_grad_norm": -1.0}, "max_grad_norm must be positive"),
    (DPSGLD, {"max_grad_norm": math.nan}, "max_grad_norm must be positive and finite, got nan"),
    (DPSGLD, {"max_grad_norm": 1e-20}, "float32"),
    (DPSGLD, {"num_data": 0}, "num_data"),
    (DPSGLD, {"num_data": 12.5}, "num_data"),
    (DPSGLD, {"expected_batch_size": 0}, "expected_batch_size"),
    (DPSGLD, {"expected_batch_size": 101}, "larger than num_data"),
    (DPSGLD, {"noise_multiplier": -0.1}, "noise_multiplier"),
    (DPSGLD, {"noise_multiplier": math.inf}, "noise_multiplier"),
    (DPSGLD, {"temperature": -1.0}, "temperature"),
    (DPSGLD, {"prior_std": 0.0}, "prior_std"),
    (DPSGLD, {"prior_std": math.nan}, "prior_std"),
    (DPSGLD, {"prior_mean": math.inf}, "prior_mean"),
    (DPSGLD, {"sampling": "shuffle"}, "sampling"),
    (DPSGLD, {"log_prior": lambda p: 0.0}, "named_parameters"),
    (DPSGLD, {"log_prior": lambda p: 0.0, "prior_std": 2.0}, "leave out prior_std"),
    (DPSGLD, NONE_GIVEN | {"temperature": 0.0}, "plain DP-SGD"),
    (DPSGLD, NONE_GIVEN | {"noise_multiplier": 0.0}, "without noise none follows"),
    (DPSGLD, NONE_GIVEN | {"lr": "free"}, "pass max_grad_norm= or a number for lr"),
    (DPSGLD, NONE_GIVEN | {"lr": 1e29}, "below what float32 norms can resolve"),
    (DPSGHMC, {"momentum": 1.0}, r"\[0, 1\)"),
    (DPSGHMC, {"momentum": math.nan}, r"\[0, 1\)"),
    (DPSGHMC, {"momentum": "adaptive"}, "matched"),
    *(
        (DPSGHMC, {"momentum": "matched", "noise_multiplier": 1.0, name: bad}, "all above 0")
        for name in ("noise_multiplier", "temperature", "max_grad_norm")
        for bad in (None, 0.0)
    ),
    (DPSGNHT, {"momentum": 1.0}, r"\[0, 1\)"),
    (DPSGNHT, {"temperature": 0.0}, "DPSGHMC"),
    (DPSGNHT, {"thermostat_gain": 0.0}, "positive"),
    (DPSGFS, {"temperature": 0.0}, "positive"),
    (DPSGFS, {"fisher": "block"}, "diagonal"),
    (DPSGFS, {"fisher_decay": 1.0}, "fisher_decay"),
    (DPSGFS, {"fisher_share": 0.0}, "fisher_share"),
    (DPSGFS, {"sensitivity_scale": torch.ones(3)}, "a vector of positive finite numbers"),
    (DPSGFS, {"sensitivity_scale": torch.eye(2)}, "a vector of positive finite numbers"),
    *(
        (DPSGFS, {"sensitivity_scale": torch.full((2,), bad)}, "a vector of positive")
        for bad in (0.0, math.nan, math.inf)
    ),
]


@pytest.mark.parametrize(("kind", "options", "says"), REFUSED)
def test_arguments(kind, options, says):
    with pytest.raises(dpb.errors.ArgumentError, match=says):
        options = GIVEN | options
        kind([nn.Parameter(torch.zeros(2))], options.pop("lr", 0.1), **options)


@pytest.mark.parametrize(
    "group", [{name: 0.1} for name in ("noise_multiplier", "temperature", "weight_decay")]
)
def test_options_of_all_groups_are_not_options_of_one(group):
    (name,) = group
    with pytest.raises(ValueError, match=f"{name} is not an option of a parameter group"):
        DPSGLD([{"params": [nn.Parameter(torch.zeros(2))], **group}], 0.1, **GIVEN)


def test_a_bad_group_is_not_added():
    optimizer = DPSGLD([nn.Parameter(torch.zeros(2))], 0.1, **GIVEN)
    with pytest.raises(ValueError, match="lr"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "lr": -1.0})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    "make",
    [
        partial(PolynomialDecay, offset=math.inf),
        partial(PolynomialDecay, offset=1, gamma=0),
        partial(Cyclical, total_steps=10.0, cycles=1),
        partial(Cyclical, total_steps=10, cycles=True),
        partial(Cyclical, total_steps=10, cycles=11),
        partial(Cyclical, total_steps=10, cycles=1, exploration=1.0),
    ],
)
def test_schedules(make):
    with pytest.raises(ValueError, match=r"must be .* got"):
        make(DPSGLD([nn.Parameter(torch.zeros(2))], 0.1, **GIVEN))


def test_a_free_lr_belongs_to_a_group_and_its_momentum():
    """z_L = (B/C)·√(2(1 − m)T/(ηN)) is 2 at η = 2(1 − m)·(10/2)²/100."""
    made = [
        {"params": [nn.Parameter(torch.zeros(2))], "momentum": m, "lr": "free"} for m in (0.5, 0.9)
    ]
    optimizer = DPSGHMC(made, 0.1, noise_multiplier=2.0, **GIVEN)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.25, 0.05])
    assert optimizer.free_lr == pytest.approx(0.05)
    assert optimizer.langevin_noise_multiplier == pytest.approx(2.0) and not optimizer.unused_noise
    for group in optimizer.param_groups:
        group["lr"] /= 10
    assert "lr = 0.25, 0.05 of the groups" in optimizer.unused_noise
