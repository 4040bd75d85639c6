"""The tempering that a target leaves: closed forms, costs that jump, and what a search costs."""

import math
import sys

import pytest
import torch
from scipy import optimize
from support.one_draw import problem
from support.profiles import stated

from torch_dpbayes import ops
from torch_dpbayes.accounting import PrivacyAccountant
from torch_dpbayes.accounting.events import MuGaussianDpEvent
from torch_dpbayes.ops.tempering import largest_tempering

COSTS = {
    "proportional": lambda r: 7.3 * r,
    "quadratic": lambda r: 40 * r**2 + 3 * r,
    "above what is held": lambda r: 0.9 + 5 * r,
    "nothing below": lambda r: max(0.0, 60 * (r - 0.01)),
    "not certified above": lambda r: 0.4 * r if r < 0.2345 else math.inf,
    "a jump": lambda r: 0.4 if r < 0.0123 else 30.0,
    "tiny": lambda r: 3e6 * r,
}


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
def test_the_largest_tempering_meets_the_target_and_no_larger_one_does(cost):
    found = largest_tempering(cost, 1.0)
    assert cost(found) <= 1.0 < cost(found * (1 + 1e-6))


def test_a_target_that_everything_or_nothing_meets():
    assert largest_tempering(lambda r: 0.99 * r, 1.0) == 1.0
    assert largest_tempering(lambda r: 1.0 + r, 1.0) is None
    assert largest_tempering(lambda r: math.inf, 1.0) is None


@pytest.mark.parametrize("neighboring", ["replace_one", "add_or_remove_one"])
def test_the_tempering_of_a_gaussian_guarantee_is_that_of_the_closed_form(neighboring):
    """G/√λ = 2ρ/√λ or ρ/√λ, beside a Gaussian that the accountant holds."""
    accountant = PrivacyAccountant(neighboring=neighboring).compose(MuGaussianDpEvent(0.05), 4)
    sampler = ops.OnePosteriorSample(
        ops.GLM(prior_std=2.0), ops.StronglyLogConcave(), 0.8, 1e-6, accountant
    )
    mu = optimize.brentq(lambda m: stated(MuGaussianDpEvent(m), 0.8) - 1e-6, 0.01, 2)
    expected = math.sqrt(mu**2 - 0.1**2) / 2 / (2 if neighboring == "replace_one" else 1)
    assert sampler.tempering == pytest.approx(expected, rel=1e-6)
    assert accountant.compose(sampler.event).get_epsilon(1e-6) <= 0.8


FEW_CALLS = {
    "finite run": ops.FiniteRunLangevin(steps=400),
    "log-concave": ops.StronglyLogConcave(),
    "bounded": ops.Bounded(3.0),
    "variation": ops.TotalVariationClose(ops.StronglyLogConcave(), 1e-9, 1e-6),
}


@pytest.mark.parametrize("certificate", FEW_CALLS.values(), ids=FEW_CALLS)
def test_a_draw_makes_few_calls_besides_its_sampler(certificate, monkeypatch):
    """10,000 and more where each trial of the search built an accountant."""
    kind = type(certificate)
    monkeypatch.setattr(kind, "draw", lambda self, m, d, s, n: torch.zeros(3, dtype=torch.float64))
    data = problem(100)

    def draw(epsilon):
        sampler = ops.OnePosteriorSample(ops.GLM(prior_std=3.0), certificate, epsilon, 1e-5)
        sampler.sample(*data)
        assert sampler.tempering < 0.9

    draw(1.3)  # what is imported and cached
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        draw(1.0)
    finally:
        sys.setprofile(None)
    assert calls <= 3000
