"""Of lr, temperature and clip norm the third follows from the noise; schedules against their
formulas, and torch's charged step by step at the noise of the lr that was used.
"""

import copy
import io
import math
import re
from fractions import Fraction
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.steps import bare, fill, train, zeros
from support.training import private
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

from torch_dpbayes.optim import DPSGFS, DPSGHMC, DPSGLD, DPSGNHT
from torch_dpbayes.optim.schedules import Cyclical, PolynomialDecay

N, B, LR, Z = 1000, 50, 0.2, 1.3
HMC = partial(DPSGHMC, momentum=0.7)
SAMPLERS = [DPSGLD, HMC, partial(DPSGNHT, momentum=0.8), partial(DPSGFS, fisher="diagonal")]
GIVEN = {"max_grad_norm": 0.1, "temperature": 1.0, "noise_multiplier": 0.4}


def built(make, params=None, **options):
    own = {"num_data": N, "expected_batch_size": B, "noise_multiplier": Z, "max_grad_norm": None}
    return bare([zeros(4)] if params is None else params, make, **{"lr": LR, **own, **options})


@pytest.mark.parametrize("make", SAMPLERS)
def test_a_resumed_run_keeps_the_noise(make):
    """Also where the schedule has moved lr on, or the budget that is left asks for another z."""
    first = built(make)
    fill(first.param_groups[0]["params"])
    first.step()
    torch.save(first.state_dict(), file := io.BytesIO())

    def resumed(**options):
        file.seek(0)
        other = built(make, **options)
        bound = other.max_grad_norm
        other.load_state_dict(torch.load(file, weights_only=True))
        return other, bound

    noise = first.noise_multiplier * first.max_grad_norm
    for options in ({}, {"lr": LR / 9}, {"noise_multiplier": 2 * Z}):
        second, _ = resumed(**options)
        assert second.noise_multiplier * second.max_grad_norm == pytest.approx(noise, rel=1e-12)
        assert second.effective_temperature == pytest.approx(1.0, rel=1e-9)
        assert options or second.max_grad_norm == first.max_grad_norm
        assert copy.deepcopy(second).max_grad_norm == second.max_grad_norm
    for options in ({"max_grad_norm": 0.7}, {"temperature": 3.0}):  # of the user's own
        other, bound = resumed(**options)
        assert other.max_grad_norm == bound


@pytest.mark.parametrize("make", SAMPLERS)
def test_what_would_use_the_noise_that_was_asked_for(make):
    """Each of the three that the report names brings the sampler's own noise to the floor."""
    optimizer = built(make, **GIVEN)
    for name in ("max_grad_norm", "temperature", "lr"):
        value = float(re.search(rf"{name} = ([\d.e+-]+)", optimizer.unused_noise)[1])
        better = built(make, **GIVEN | {name: value})
        assert better.langevin_noise_multiplier == pytest.approx(0.4, rel=0.005)  # three digits
        assert better.unused_noise == ""
    assert built(make, **GIVEN | {"lr": "free"}).param_groups[0]["lr"] == optimizer.free_lr


def test_a_free_lr_belongs_to_a_group_and_its_momentum():
    """z_L = (B/C)·√(2(1 − m)T/(ηN)) is 2 at η = 2(1 − m)·(50/2)²/1000."""
    groups = [{"params": [zeros(2)], "momentum": m, "lr": "free"} for m in (0.5, 0.9)]
    options = {"noise_multiplier": 2.0, "max_grad_norm": 1.0, "temperature": 1.0}
    optimizer = built(DPSGHMC, groups, **options)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.625, 0.125])


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
        data = TensorDataset(torch.randn(200, 4), torch.randint(3, (200,)))
        make = partial(DPSGLD, lr=LR, temperature=1.0)
        net, optimizer, loader = private(nn.Linear(4, 3), data, 20, optimizer=make, **given)
        train(net, optimizer, loader, steps=1)
    own = optimizer.langevin_noise_multiplier
    assert (own > 0.51) == is_said
    assert optimizer.effective_noise_multiplier == pytest.approx(max(own, 0.5))
    said = [record.message for record in caplog.records if f"{own:.4g}" in record.message]
    assert len(said) == is_said


# -- schedules -------------------------------------------------------------------------------------


@given(st.floats(0.5, 100), st.floats(0.1, 2), st.integers(1, 20))
def test_polynomial_decay_is_a_times_b_plus_t_to_the_minus_gamma(offset, gamma, steps):
    groups = [{"params": [zeros(1)], "lr": lr} for lr in (0.4, 0.02)]
    optimizer = torch.optim.SGD(groups)
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
    optimizer = torch.optim.SGD([zeros(1)], lr=0.3)
    schedule = Cyclical(optimizer, total, cycles, exploration=percent / 100)
    length, collected = math.ceil(Fraction(total, cycles)), []
    for k in range(2 * total):
        position, lr = Fraction(k % length, length), optimizer.param_groups[0]["lr"]
        assert 0 < lr == pytest.approx(0.15 * (math.cos(math.pi * position) + 1), rel=1e-12)
        is_last = k % length == length - 1
        assert schedule.is_sampling == (position >= Fraction(percent, 100) or is_last)
        collected.append(schedule.is_sampling)
        optimizer.step()
        schedule.step()
    assert any(collected[:length])


def wanted_noise(group):
    """z_L as in the table of the samplers, from the numbers alone."""
    return 10 / 0.5 * math.sqrt(2 * (1 - group["momentum"]) / (group["lr"] * 100))


def scheduled(kind=DPSGLD, **options):
    return bare([zeros(2)], kind, 0.4, max_grad_norm=0.5, temperature=1.0, **options)


def charged(optimizer):
    """z of each charge."""
    history = optimizer.accountant.history
    assert all(charge.event.sampling_probability == 0.1 for charge in history)
    return sorted(z.event.event.noise_multiplier for z in history for _ in range(int(z.count)))


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


CYCLICAL = partial(Cyclical, total_steps=12, cycles=3, exploration=0.5)


@pytest.mark.parametrize("make", [partial(PolynomialDecay, offset=3), CYCLICAL])
def test_resumed_schedule_goes_on_as_if_nothing_had_happened(make):
    at = 5
    whole, first = run(make(scheduled()), 12), make(scheduled())
    before = run(first, at)
    saved = {"optimizer": first.optimizer.state_dict(), "schedule": first.state_dict()}
    second, third = make(scheduled()), scheduled()
    second.optimizer.load_state_dict(saved["optimizer"])
    second.load_state_dict(saved["schedule"])
    assert before + run(second, 12 - at) == whole
    assert len(charged(second.optimizer)) == 12
    third.load_state_dict(saved["optimizer"])  # and by torch's last_epoch
    assert run(make(third, last_epoch=at - 1), 12 - at) == whole[at:]


@pytest.mark.parametrize("has_floor", [True, False])
def test_every_step_is_charged_at_the_noise_of_its_own_lr_and_momentum(has_floor):
    # reached in the middle of the schedule
    floor = 1.5 * wanted_noise({"lr": 0.4, "momentum": 0.9}) * has_floor
    optimizer = scheduled(DPSGHMC, noise_multiplier=floor)
    seen = run(lr_scheduler.OneCycleLR(optimizer, max_lr=0.4, total_steps=15), 14)
    expected = [max(wanted_noise(now), floor) for now in seen]
    assert charged(optimizer) == pytest.approx(sorted(expected))
    assert len({now["lr"] for now in seen}) > 1 and len({now["momentum"] for now in seen}) > 1
