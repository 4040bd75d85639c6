"""Schedules against their formulas; torch's are charged step by step at the z of the lr that was
used.
"""

import math
from fractions import Fraction
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.steps import bare, fill, zeros
from torch import nn
from torch.optim import lr_scheduler

from torch_dpbayes.optim import DPSGHMC, DPSGLD
from torch_dpbayes.optim.schedules import Cyclical, PolynomialDecay

N, B, C, T, STEPS = 100, 10, 0.5, 1.0, 14


def private(kind=DPSGLD, **options):
    numbers = {"num_data": N, "expected_batch_size": B, "max_grad_norm": C, "temperature": T}
    return bare([zeros(2)], kind, 0.4, **numbers, **options)


def wanted_noise(group):
    """z_L as in the table of the samplers, from the numbers alone."""
    return B / C * math.sqrt(2 * (1 - group["momentum"]) * T / (group["lr"] * N))


def charged(optimizer):
    """z of each charge."""
    found = []
    for charge in optimizer.accountant.history:
        assert charge.event.sampling_probability == B / N
        found += [charge.event.event.noise_multiplier] * int(charge.count)
    return sorted(found)


def run(schedule, steps):
    """The first group at each step, and whether the step is one to collect."""
    seen = []
    for _ in range(steps):
        (group,) = schedule.optimizer.param_groups
        now = {k: float(group[k]) for k in ("lr", "momentum") if k in group}
        seen.append(now | {"collects": getattr(schedule, "is_sampling", None)})
        fill(group["params"], records=7)
        schedule.optimizer.step()
        schedule.step()
    return seen


# -- values ----------------------------------------------------------------------------------------


@given(st.floats(0.5, 100), st.floats(0.1, 2), st.integers(1, 20))
def test_polynomial_decay_is_a_times_b_plus_t_to_the_minus_gamma(offset, gamma, steps):
    optimizer = torch.optim.SGD(
        [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.4, 0.02)]
    )
    schedule = PolynomialDecay(optimizer, offset, gamma)
    for t in range(steps):
        for group, first in zip(optimizer.param_groups, (0.4, 0.02)):
            a = first * offset**gamma
            assert group["lr"] == pytest.approx(a * (offset + t) ** -gamma, rel=1e-12)
        optimizer.step()
        schedule.step()


@given(st.integers(1, 40), st.data(), st.integers(0, 99))
def test_cyclical_is_the_papers_formula_and_collects_the_last_share_of_each_cycle(
    total, data, percent
):
    cycles = data.draw(st.integers(1, total))
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    schedule = Cyclical(optimizer, total, cycles, exploration=percent / 100)
    length = math.ceil(Fraction(total, cycles))
    collected = []
    for k in range(1, 2 * total + 1):
        position = Fraction((k - 1) % length, length)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(
            0.15 * (math.cos(math.pi * position) + 1), rel=1e-12
        )
        assert optimizer.param_groups[0]["lr"] > 0
        is_last = (k - 1) % length == length - 1
        assert schedule.is_sampling == (position >= Fraction(percent, 100) or is_last)
        collected.append(schedule.is_sampling)
        optimizer.step()
        schedule.step()
    assert any(collected[:length])


# -- resume ----------------------------------------------------------------------------------------

OURS = {
    "polynomial": partial(PolynomialDecay, offset=3),
    "cyclical": partial(Cyclical, total_steps=12, cycles=3, exploration=0.5),
}


@pytest.mark.parametrize("make", OURS.values(), ids=OURS)
def test_resumed_schedule_goes_on_as_if_nothing_had_happened(make):
    at = 5
    whole, first = run(make(private()), 12), make(private())
    before = run(first, at)
    saved = {"optimizer": first.optimizer.state_dict(), "schedule": first.state_dict()}
    second = make(private())
    second.optimizer.load_state_dict(saved["optimizer"])
    second.load_state_dict(saved["schedule"])
    assert before + run(second, 12 - at) == whole
    assert len(charged(second.optimizer)) == 12
    third = private()  # and by torch's last_epoch
    third.load_state_dict(saved["optimizer"])
    assert run(make(third, last_epoch=at - 1), 12 - at) == whole[at:]


# -- torch's schedulers ----------------------------------------------------------------------------

SCHEDULES = {
    "CosineAnnealingLR": partial(lr_scheduler.CosineAnnealingLR, T_max=6),  # reaches 0
    "OneCycleLR": partial(lr_scheduler.OneCycleLR, max_lr=0.4, total_steps=STEPS + 1),
    "a sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.2, total_iters=4), Cyclical(o, 10, 2)], milestones=[4]
    ),
}


@pytest.mark.parametrize("has_floor", [True, False])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_step_is_charged_at_the_noise_of_its_own_lr_and_momentum(name, has_floor):
    """A step at lr 0 is charged at the floor, and free without one."""
    # reached in the middle of the schedules
    floor = 1.5 * wanted_noise({"lr": 0.4, "momentum": 0.9}) * has_floor
    optimizer = private(DPSGHMC, noise_multiplier=floor)
    seen = run(SCHEDULES[name](optimizer), STEPS)
    expected = [max(wanted_noise(now), floor) if now["lr"] > 0 else floor for now in seen]
    assert charged(optimizer) == pytest.approx(sorted(z for z in expected if z > 0))
    assert len({now["lr"] for now in seen}) > 1
    assert len({now["momentum"] for now in seen}) > 1 or name != "OneCycleLR"
