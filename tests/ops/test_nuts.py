"""The randomness and the arithmetic of a No-U-Turn draw."""

import torch
from support.one_draw import (
    COLUMNS,
    conjugate,
)

from torch_dpbayes import ops
from torch_dpbayes.ops.nuts import no_u_turn


def test_the_sampler_ignores_the_global_seed_and_leaves_it_alone():
    glm, y, _, _ = conjugate()
    draws = []
    for _ in range(2):
        torch.manual_seed(0)
        before = torch.get_rng_state()
        draws.append(
            ops.OnePosteriorSample(glm, ops.Bounded(10.0, warmup_steps=5)).sample(
                torch.eye(COLUMNS), y
            )["weights"]
        )
        assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(*draws)


def test_a_seed_that_another_thread_sets_does_not_reach_the_chain():
    draws = []
    for _ in range(2):

        def potential(theta):
            torch.manual_seed(0)  # at every step, whatever the other thread is about
            return theta.square().sum() / 2

        with torch.random.fork_rng([]):
            draws.append(no_u_turn(potential, torch.zeros(3, dtype=torch.float64), 5))
    assert not torch.equal(*draws)


def test_a_draw_does_not_depend_on_the_arithmetic_that_its_caller_has_switched_on():
    glm, y, _, _ = conjugate()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        for certificate in (ops.Bounded(10.0, warmup_steps=3), ops.FiniteRunLangevin(steps=3)):
            draw = ops.OnePosteriorSample(glm, certificate).sample(torch.eye(COLUMNS), y)["weights"]
            assert draw.dtype == torch.float64 and not draw.is_inference()
