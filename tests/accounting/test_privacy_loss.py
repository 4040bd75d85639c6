"""Privacy loss distributions against dp_accounting; releases that fail outright."""

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.ledgers import DELTA, STEP

from torch_dpbayes.accounting import (
    PrivacyAccountant,
    PrivacyBudgetExceeded,
    bounds,
    events,
    fft_composition,
    noise_multiplier_for,
)
from torch_dpbayes.accounting.bounds import lower_epsilon
from torch_dpbayes.accounting.dominating_pairs import Failure, Pure, Sampled
from torch_dpbayes.accounting.privacy_loss import failing
from torch_dpbayes.errors import ArgumentError

# (kind, z, q, steps, epsilon, half a unit of its last digit), dp_accounting's PLD extrapolated in
# the discretisation
REFERENCE = [
    ("directed", 1.0, 0.01, 10_000, 6.18771, 5e-6),
    ("directed", 0.8, 0.004, 100_000, 13.07032, 5e-6),
    ("directed", 20.0, 0.0055, 33_000, 0.16007, 5e-6),
    ("antipodal", 1.0, 0.01, 10_000, 10.881, 5e-4),
    ("antipodal", 0.8, 0.004, 100_000, 22.414, 5e-4),
]


@pytest.mark.parametrize(("kind", "noise", "rate", "steps", "epsilon", "half_digit"), REFERENCE)
def test_reference_values(kind, noise, rate, steps, epsilon, half_digit):
    counts = {Sampled(kind, rate, noise): steps}
    upper = bounds.upper_epsilon(counts, DELTA)
    assert epsilon - half_digit <= upper <= 1.001 * epsilon
    assert 0.99 * epsilon <= bounds.lower_epsilon(counts, DELTA) <= epsilon + half_digit


def test_groups_of_close_releases_stand_for_them(monkeypatch):
    """The mean of a group, and the bound on what that changes."""
    rng, exact = np.random.default_rng(12), 2.594255267
    noise = np.exp(rng.uniform(math.log(0.7), math.log(5.0), 900))
    rate = np.exp(rng.uniform(math.log(0.0005), math.log(0.03), 900))
    counts = {Sampled("directed", float(q), float(z)): 1 for z, q in zip(noise, rate, strict=True)}
    monkeypatch.setattr("torch_dpbayes.accounting.mixture_bounds._MOST_GROUPS", 300)
    composed = fft_composition.compose(counts, False, delta=DELTA)
    left_out = composed.transform.left_out
    assert exact * (1 - 1e-7) <= composed.upper_epsilon(DELTA) <= exact * 1.02
    assert 1e-15 < left_out < min(1e-6, composed.round_off)  # it counts


# --- releases that fail outright with some probability --------------------------------------------


def pair_of(epsilon, delta):
    return events.ComposedDpEvent([events.PureDpEvent(epsilon), events.FailureDpEvent(delta)])


def test_one_pair_costs_its_epsilon_at_its_delta():
    """Not infinity: at the delta of the failures, if its loss is bounded."""
    for method in ("pld", "rdp"):
        accountant = PrivacyAccountant(method=method).compose(pair_of(0.7, 1e-6))
        assert accountant.get_epsilon(1e-6) == pytest.approx(0.7, rel=1e-12)
        assert accountant.get_epsilon(math.nextafter(1e-6, 0)) == math.inf
        assert accountant.compose(events.BoundedRangeDpEvent(0.3)).get_epsilon(
            1e-6
        ) == pytest.approx(1.0, rel=1e-12)
        assert accountant.compose(events.MuGaussianDpEvent(0.1)).get_epsilon(1e-6) == math.inf


def test_a_lower_bound_beside_a_failure_is_one():
    """Of one pure release, whose delta falls from its epsilon on as that of randomised response."""
    truth = 0.7 + math.log1p(-(0.1 - 0.05) / (1 - 0.05) * (1 + math.exp(-0.7)))
    assert 0.9 * truth < lower_epsilon({Pure(0.7): 1, Failure(0.05): 1}, 0.1) <= truth


@given(
    failures=st.lists(
        st.tuples(st.floats(1e-300, 1.0, exclude_max=True), st.integers(1, 10**4)),
        min_size=1,
        max_size=5,
    )
)
def test_the_probability_of_a_failure_is_rounded_to_the_safe_side(failures):
    counts = {Failure(delta): count for delta, count in failures}
    with localcontext(prec=1200):
        exact = 1 - math.prod(
            (1 - Decimal(failure.delta)) ** count for failure, count in counts.items()
        )
        lower, upper = failing(counts, upper=False), failing(counts)
        assert Decimal(lower) <= exact <= Decimal(upper)
    assert upper - lower <= 3e-14 * upper


def test_a_budget_with_less_delta_than_the_failure_refuses_it():
    accountant = PrivacyAccountant(5.0, 1e-6)
    step = events.ComposedDpEvent([STEP, events.FailureDpEvent(1e-6)])
    for event in (events.FailureDpEvent(1.1e-6), pair_of(0.1, 1e-5), step):
        assert accountant.remaining(event) == 0
        with pytest.raises(PrivacyBudgetExceeded):
            accountant.compose(event)
    assert len(accountant) == 0
    accountant.compose(pair_of(0.1, 1e-6))
    with pytest.raises(PrivacyBudgetExceeded):
        accountant.compose(STEP)  # a loss without bound, and no delta left
    with pytest.raises(PrivacyBudgetExceeded):
        PrivacyAccountant(5.0, 1e-7).load_state_dict(accountant.state_dict())


def test_adaptive_charges_refuse_it():
    for first in (events.FailureDpEvent(1e-7), pair_of(0.1, 1e-7)):
        accountant = PrivacyAccountant(3.0, 1e-5)
        with pytest.raises(PrivacyBudgetExceeded):
            accountant.compose(first, adaptive=True)
        assert len(accountant) == 0 and accountant.guarantee == "fixed"
        for begin in (events.GaussianDpEvent(50.0), STEP):
            accountant = PrivacyAccountant(3.0, 1e-5).compose(begin, adaptive=True)
            assert accountant.remaining(first) == 0
            for adaptive in (True, False):
                with pytest.raises(PrivacyBudgetExceeded):
                    accountant.compose(first, adaptive=adaptive)
            assert len(accountant) == 1


@pytest.mark.parametrize("method", ["pld", "rdp"])
def test_failures_that_use_all_of_delta_leave_nothing(method):
    failing = PrivacyAccountant(method=method).compose(events.FailureDpEvent(2e-5))
    failing.compose(events.GaussianDpEvent(9.0))
    assert failing.get_epsilon(1e-5) == math.inf and math.isfinite(failing.get_epsilon(1e-4))
    plan = {"target_epsilon": 1.0, "target_delta": 1e-5, "steps": 1}
    with pytest.raises(ArgumentError):
        noise_multiplier_for(events.GaussianDpEvent, **plan, history=failing.history)
