"""What private optimizers and schedules refuse when they are made or changed: tables."""

import math
from typing import Unpack

import pytest
import torch
from support.refusals import refused
from support.steps import bare, fill, zeros
from support.training import deliver
from torch import nn

from torch_dpbayes.errors import ArgumentError, ArgumentTypeError
from torch_dpbayes.optim import DPSGFS, DPSGHMC, DPSGLD, DPSGNHT
from torch_dpbayes.optim.schedules import Cyclical, PolynomialDecay
from torch_dpbayes.optim.settings import Options
from torch_dpbayes.per_sample.bookkeeping import BookkeepingGradientSource
from torch_dpbayes.release import ClippedSum

NONE_GIVEN = {"max_grad_norm": None, "temperature": None, "noise_multiplier": 1.0}
GIVEN = {"num_data": 100, "expected_batch_size": 10, "max_grad_norm": 1.0, "temperature": 1.0}
MATCHED = {"momentum": "matched", "noise_multiplier": 1.0, "temperature": 1.0, "max_grad_norm": 1.0}


def number(named):
    return sum(p.sum() for p in named.values())


def made(kind, named=True, lr=0.1, **options):
    net = nn.Sequential(nn.Linear(2, 1))
    params = net.named_parameters() if named else net.parameters()
    return kind(params, lr, sampling=options.pop("sampling", "poisson"), **GIVEN | options)


# every option, or several, that is wrong where all the others are right
REFUSED = [
    *((DPSGLD, {"lr": bad}) for bad in (0.0, math.nan, "fast", "free")),
    *((DPSGLD, {"max_grad_norm": bad}) for bad in (-1.0, math.nan, 1e-20, 1e19)),
    *((DPSGLD, {"num_data": bad}) for bad in (0, 12.5, 9)),
    *((DPSGLD, {"expected_batch_size": bad}) for bad in (0, 101, 1e-38)),
    *((DPSGLD, {"noise_multiplier": bad}) for bad in (-0.1, math.inf)),
    *((DPSGLD, {"prior_std": bad}) for bad in (0.0, math.nan, "fan-in", None, torch.ones(3))),
    *((DPSGLD, {"prior_std": {"0": bad}}) for bad in ("wide", 0.0)),
    *((DPSGLD, {"prior_std": {name: 1.0}}) for name in ("first", "0.wei")),
    (DPSGLD, {"prior_std": {"0": 1.0}, "named": False}),
    (DPSGLD, {"prior_mean": math.inf}),
    (DPSGLD, {"temperature": -1.0}),
    (DPSGLD, {"sampling": "shuffle"}),
    (DPSGLD, {"assume_independent_records": "yes"}),
    (DPSGLD, {"log_prior": "flat"}),
    (DPSGLD, {"log_prior": number, "named": False}),
    *((DPSGLD, {"log_prior": number, "prior_std": std}) for std in (2.0, "fan_in", {"0": 1.0})),
    (DPSGLD, {"log_prior": number, "prior_mean": 1.0}),
    *((DPSGLD, NONE_GIVEN | {name: 0.0}) for name in ("temperature", "noise_multiplier")),
    *((DPSGLD, NONE_GIVEN | {"lr": lr}) for lr in ("free", 1e29)),
    *((DPSGHMC, {"momentum": bad}) for bad in (1.0, math.nan, "adaptive", None)),
    *((DPSGHMC, MATCHED | {n: bad}) for n in list(MATCHED)[1:] for bad in (None, 0.0)),
    (DPSGNHT, {"momentum": 1.0}),
    *((DPSGNHT, {n: bad}) for n in ("temperature", "thermostat_gain") for bad in (0.0, "1")),
    *((DPSGFS, {name: 0.0}) for name in ("temperature", "fisher_share")),
    (DPSGFS, {"fisher": "block"}),
    *((DPSGFS, {"fisher_decay": bad}) for bad in (1.0, None)),
    (DPSGFS, {"log_prior": number}),
    *((DPSGFS, {"sensitivity_scale": torch.ones(size)}) for size in ((2,), (3, 3))),
    *((DPSGFS, {"sensitivity_scale": torch.full((3,), bad)}) for bad in (0.0, math.inf)),
]


@pytest.mark.parametrize(("kind", "options"), REFUSED)
def test_arguments(kind, options):
    made(kind)
    with pytest.raises((ArgumentError, ArgumentTypeError)) as error:
        made(kind, **options)
    assert error.value.code in ("argument", "argument-type")


def test_a_subclass_may_name_an_argument_that_all_have():
    class Colder(DPSGLD):
        def __init__(self, params, lr, *, temperature=0.5, **options: "Unpack[Options]"):
            super().__init__(params, lr, temperature=temperature, **options)

    assert made(Colder, temperature=0.1).temperature == 0.1
    assert {*GIVEN} < Colder.__signature__.parameters.keys()


def test_schedules():
    for kind, options in (
        (PolynomialDecay, {"offset": math.inf}),
        (PolynomialDecay, {"offset": 1, "gamma": 0}),
        (Cyclical, {"total_steps": 10.0, "cycles": 1}),
        (Cyclical, {"total_steps": 10, "cycles": 11}),
        (Cyclical, {"total_steps": 10, "cycles": 1, "exploration": 1.0}),
    ):
        with pytest.raises((ArgumentError, ArgumentTypeError)):
            kind(made(DPSGLD), **options)


GROUPS = [
    *(({name: 0.1}, {}) for name in ("noise_multiplier", "temperature", "weight_decay")),
    ({"lr": -1.0}, {}),
    ({"prior_std": 0.0}, {}),
    # priors that would be left out
    ({"prior_std": {"second": 0.1}}, {}),
    ({"prior_std": 0.1}, {"log_prior": number}),
    ({"prior_mean": 1.0}, {"log_prior": number}),
]


@pytest.mark.parametrize(("group", "options"), GROUPS)
def test_a_bad_group_is_not_added(group, options):
    optimizer = bare([("first", zeros(2))], DPSGLD, **options)
    with refused("argument"):
        optimizer.add_param_group({"params": [("third", zeros(2))], **group})
    assert len(optimizer.param_groups) == 1


def test_a_prior_s_names_may_be_those_of_any_group():
    named = [*nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).named_parameters()]
    stds = {"0": 0.1, "1": 0.2}
    groups = [{"params": part, "prior_std": dict(stds)} for part in (named[:2], named[2:])]
    assert len(bare(groups, DPSGLD).param_groups) == 2


LOST = object()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, LOST) for name in ("lr", "prior_std", "prior_mean")),
        *(("momentum", bad) for bad in (1.0, -0.1, math.nan, "matched")),
    ],
)
def test_what_a_group_lost_or_was_given_later_is_refused_by_the_step(name, value):
    optimizer = bare([p := zeros(2)], DPSGHMC)
    fill([p])
    optimizer.param_groups[0][name] = value
    if value is LOST:
        del optimizer.param_groups[0][name]
    with refused("argument-type" if value == "matched" else "argument"):
        optimizer.step()
    assert len(optimizer.accountant) == 0


def test_what_is_charged_and_clipped_is_a_plain_number_that_nobody_changes():
    clip, batch = torch.tensor(1.0), torch.tensor(10.3).half()
    options = {"num_data": 100_000, "expected_batch_size": batch}
    optimizer = bare([zeros(3)], DPSGFS, **options, max_grad_norm=clip, noise_multiplier=1.0)
    rate = optimizer.event(1.0).sampling_probability
    assert type(rate) is float and rate == float(batch) / 100_000
    query = ClippedSum(clip, 8.0)
    clip.fill_(1e-6)
    assert optimizer.release.query.max_grad_norm == optimizer.max_grad_norm == 1.0
    assert query.max_grad_norm == 1.0


def test_no_setting_is_computed_from_records():
    x, y = deliver(torch.randn(4, 2), torch.randn(4, 1))
    source = BookkeepingGradientSource(net := nn.Linear(2, 1))
    (loss := nn.functional.mse_loss(net(x), y)).backward()
    source.remove()
    number, optimizer = x.norm(), bare([p := zeros(4)])
    fill([p])
    for options in ({"max_grad_norm": number}, {"lr": number}, {"prior_std": {"0": number}}):
        with refused("model-written"):
            made(DPSGLD, **options)
    with refused("model-written"):
        bare([{"params": [zeros(4)], "lr": number}])
    for name, value in (("prior_std", {"weight": number}), ("lr", number), ("lr", loss)):
        before = optimizer.param_groups[0][name]
        optimizer.param_groups[0][name] = value
        with refused("model-written"):
            optimizer.step()
        assert len(optimizer.accountant) == 0
        optimizer.param_groups[0][name] = before
