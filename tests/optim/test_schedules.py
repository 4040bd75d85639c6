"""Schedules against their formulas, and every scheduler of torch charged step by step at the
z of the lr that was used.
"""

import math
from fractions import Fraction

import pytest
import torch
from dp_accounting import dp_event
from hypothesis import given
from hypothesis import strategies as st
from support.steps import bare, fill, zeros
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from torch_dpbayes.optim import DPSGFS, DPSGHMC, DPSGLD, DPSGNHT
from torch_dpbayes.optim.schedules import Cyclical, PolynomialDecay

N, B, C, T = 100, 10, 0.5, 1.0


def private(kind=DPSGLD, lr=0.4, **options):
    given = {"num_data": N, "expected_batch_size": B, "max_grad_norm": C, "temperature": T}
    return bare([zeros(2)], kind, lr, **{**given, **options})


def step(optimizer):
    for group in optimizer.param_groups:
        fill(group["params"], records=7)
    optimizer.step()


def wanted_noise(kind, lr):
    """z_L as in the table of the samplers, from the numbers alone; momentum is 0.9."""
    friction = 0.1 if kind in (DPSGHMC, DPSGNHT) else 1.0
    return B / C * math.sqrt(2 * friction * T / (lr * N))


def charged(optimizer):
    """z of the Gaussian on the gradient, for each charge in order; SGFS releases its Fisher
    with it, at share 1/2.
    """
    released_too = math.sqrt(1.5) if isinstance(optimizer, DPSGFS) else 1.0
    found = []
    for charge in optimizer.accountant.history:
        assert isinstance(charge.event, dp_event.PoissonSampledDpEvent)
        assert charge.event.sampling_probability == B / N
        found += [charge.event.event.noise_multiplier * released_too] * int(charge.count)
    return found


def run(schedule, steps):
    """lr of the first group at each step, and whether the step is one to collect."""
    lrs, sampling = [], []
    for _ in range(steps):
        lrs.append(schedule.optimizer.param_groups[0]["lr"])
        step(schedule.optimizer)
        sampling.append(getattr(schedule, "is_sampling", None))
        schedule.step()
    return lrs, sampling


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
    "polynomial": lambda o: PolynomialDecay(o, 3),
    "cyclical": lambda o: Cyclical(o, 12, 3, exploration=0.5),
}


@pytest.mark.parametrize("at", [1, 5, 9])
@pytest.mark.parametrize("make", OURS.values(), ids=OURS)
def test_resumed_schedule_goes_on_as_if_nothing_had_happened(make, at):
    options = {"noise_multiplier": 2 * wanted_noise(DPSGLD, 0.4)}
    lrs, sampling = run(make(private(**options)), 12)

    first = make(private(**options))
    before = run(first, at)
    saved = {"optimizer": first.optimizer.state_dict(), "schedule": first.state_dict()}
    second = make(private(**options))
    second.optimizer.load_state_dict(saved["optimizer"])
    second.load_state_dict(saved["schedule"])
    after = run(second, 12 - at)
    assert before[0] + after[0] == lrs
    assert before[1] + after[1] == sampling
    assert len(charged(second.optimizer)) == 12

    third = private(**options)  # and by torch's last_epoch
    third.load_state_dict(saved["optimizer"])
    name = type(first)
    arguments = {PolynomialDecay: (3,), Cyclical: (12, 3, 0.5)}[name]
    assert run(name(third, *arguments, last_epoch=at - 1), 12 - at)[0] == lrs[at:]


# -- torch's schedulers ----------------------------------------------------------------------------

STEPS = 14
TORCH = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=6),  # reaches 0
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=2, factor=0.5),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(
        o, base_lr=0.01, max_lr=0.4, step_size_up=3, cycle_momentum=False
    ),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(
        o, max_lr=0.4, total_steps=STEPS + 1, cycle_momentum=False
    ),
    "SWALR": lambda o: SWALR(o, swa_lr=0.05, anneal_epochs=5),
    "sequence of ours": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.2, total_iters=4), Cyclical(o, 10, 2)], milestones=[4]
    ),
    **OURS,
}


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        *((DPSGLD, make) for make in TORCH.values()),
        *((kind, OURS["cyclical"]) for kind in (DPSGHMC, DPSGNHT, DPSGFS)),
    ],
)
def test_every_step_is_charged_at_the_noise_of_its_own_lr(kind, make):
    floor = wanted_noise(kind, 0.2)  # reached in the middle of most schedules
    optimizer = private(kind, noise_multiplier=floor)
    schedule = make(optimizer)
    expected, found = [], []
    for _ in range(STEPS):
        lr = float(optimizer.param_groups[0]["lr"])
        assert 0 <= lr <= 0.4 * (1 + 1e-12)
        expected.append(max(wanted_noise(kind, lr), floor) if lr > 0 else floor)
        known = sorted(charged(optimizer))
        step(optimizer)
        now = sorted(charged(optimizer))
        assert len(now) == len(known) + 1
        found.append(sum(now) - sum(known))
        (
            schedule.step(1.0)
            if isinstance(schedule, lr_scheduler.ReduceLROnPlateau)
            else schedule.step()
        )
    assert found == pytest.approx(expected, rel=1e-9)
    assert len(set(expected)) > 1
    assert torch.isfinite(optimizer.param_groups[0]["params"][0]).all()


def test_lr_zero_is_free_without_a_floor_and_moves_nothing():
    optimizer = private()
    schedule = lr_scheduler.LambdaLR(optimizer, lambda t: float(t % 2 == 0))
    (p,) = optimizer.param_groups[0]["params"]
    moved = []
    for _ in range(6):
        before = p.detach().clone()
        step(optimizer)
        moved.append(bool((p != before).any()))
        schedule.step()
    assert moved == [True, False] * 3
    assert charged(optimizer) == pytest.approx([wanted_noise(DPSGLD, 0.4)] * 3)


@pytest.mark.parametrize(
    "cycle",
    [
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.4, total_steps=STEPS + 1),
        lambda o: lr_scheduler.CyclicLR(o, base_lr=0.01, max_lr=0.4, step_size_up=3),
    ],
    ids=["OneCycleLR", "CyclicLR"],
)
def test_momentum_is_cycled_and_each_step_is_charged_at_its_own(cycle):
    optimizer = private(DPSGHMC)
    schedule, wanted, momenta = cycle(optimizer), [], []
    for _ in range(STEPS):
        momenta.append(optimizer.momentum)
        needed = [
            math.sqrt(2 * (1 - group["momentum"]) * T / (group["lr"] * N))
            for group in optimizer.param_groups
        ]
        wanted.append(B / C * min(needed))
        step(optimizer)
        schedule.step()
    assert max(momenta) - min(momenta) > 0.05
    assert sorted(charged(optimizer)) == pytest.approx(sorted(wanted))


def test_momentum_has_its_limits_whoever_sets_it():
    optimizer = private(DPSGHMC)
    for momentum in (1.0, -0.1, math.nan):
        optimizer.param_groups[0]["momentum"] = momentum
        with pytest.raises(ValueError, match=r"momentum must be in \[0, 1\)"):
            step(optimizer)
    assert len(optimizer.accountant) == 0
