"""Releases that fail outright with some probability, and (epsilon, delta) pairs made of them,
against closed forms and dp_accounting.
"""

import math
from decimal import Decimal, localcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dpbayes.accounting import (
    PrivacyAccountant,
    PrivacyBudgetExceeded,
    noise_multiplier_for,
)
from torch_dpbayes.accounting.__main__ import main
from torch_dpbayes.accounting.bounds import lower_epsilon
from torch_dpbayes.accounting.dominating_pairs import Failure, Pure
from torch_dpbayes.accounting.events import (
    BoundedRangeDpEvent,
    ComposedDpEvent,
    FailureDpEvent,
    GaussianDpEvent,
    MuGaussianDpEvent,
    PoissonSampledDpEvent,
    PureDpEvent,
)
from torch_dpbayes.accounting.privacy_loss import failing

STEP = PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0))
METHODS = ("pld", "rdp")


def pair(epsilon, delta):
    return ComposedDpEvent([PureDpEvent(epsilon), FailureDpEvent(delta)])


# --- against the truth ----------------------------------------------------------------------------


def test_one_pair_costs_its_epsilon_at_its_delta():
    """Not infinity: at the delta of the failures a loss that is bounded leaves no more to pay
    for.
    """
    for method in METHODS:
        accountant = PrivacyAccountant(method=method).compose(pair(0.7, 1e-6))
        assert accountant.get_epsilon(1e-6) == pytest.approx(0.7, rel=1e-12)
        assert accountant.get_epsilon(math.nextafter(1e-6, 0)) == math.inf
        assert accountant.compose(BoundedRangeDpEvent(0.3)).get_epsilon(1e-6) == pytest.approx(
            1.0, rel=1e-12
        )
        assert accountant.compose(MuGaussianDpEvent(0.1)).get_epsilon(1e-6) == math.inf


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
    step = ComposedDpEvent([STEP, FailureDpEvent(1e-6)])
    for event in (FailureDpEvent(1.1e-6), pair(0.1, 1e-5), step):
        assert accountant.remaining(event) == 0
        with pytest.raises(PrivacyBudgetExceeded):
            accountant.compose(event)
    assert len(accountant) == 0
    accountant.compose(pair(0.1, 1e-6))
    with pytest.raises(PrivacyBudgetExceeded):
        accountant.compose(STEP)  # a loss without bound, and no delta left
    with pytest.raises(PrivacyBudgetExceeded):
        PrivacyAccountant(5.0, 1e-7).load_state_dict(accountant.state_dict())


def test_adaptive_charges_refuse_it():
    for first in (FailureDpEvent(1e-7), pair(0.1, 1e-7)):
        accountant = PrivacyAccountant(3.0, 1e-5)
        with pytest.raises(PrivacyBudgetExceeded):
            accountant.compose(first, adaptive=True)
        assert len(accountant) == 0 and accountant.guarantee == "fixed"
        for begin in (GaussianDpEvent(50.0), STEP):
            accountant = PrivacyAccountant(3.0, 1e-5).compose(begin, adaptive=True)
            assert accountant.remaining(first) == 0
            for adaptive in (True, False):
                with pytest.raises(PrivacyBudgetExceeded):
                    accountant.compose(first, adaptive=adaptive)
            assert len(accountant) == 1


# --- failures that use all of delta ---------------------------------------------------------------

ALL_OF_IT = "2e-05 in all, which leaves nothing of delta = 1e-05"


@pytest.mark.parametrize("method", ["pld", "rdp"])
def test_failures_that_use_all_of_delta_say_so(method, path, capsys):
    failing = PrivacyAccountant(path=path, method=method).compose(FailureDpEvent(2e-5))
    failing.compose(GaussianDpEvent(9.0)).close()
    assert failing.get_epsilon(1e-5) == math.inf and math.isfinite(failing.get_epsilon(1e-4))
    assert main([str(path)]) == 0 and ALL_OF_IT in capsys.readouterr().out
    assert ALL_OF_IT in failing.summary()
    with pytest.raises(PrivacyBudgetExceeded, match=ALL_OF_IT):
        PrivacyAccountant(3.0, 1e-5, method=method).compose(FailureDpEvent(2e-5))
    for history, make in (
        ([(FailureDpEvent(2e-5), 1)], GaussianDpEvent),
        ([], lambda z: ComposedDpEvent([GaussianDpEvent(z), FailureDpEvent(2e-5)])),
    ):
        plan = {"target_epsilon": 1.0, "target_delta": 1e-5, "steps": 1, "history": history}
        with pytest.raises(ValueError, match=ALL_OF_IT):
            noise_multiplier_for(make, **plan)


def test_failures_that_use_exactly_all_of_delta_leave_bounded_losses_finite():
    exactly = PrivacyAccountant().compose(FailureDpEvent(1e-5)).compose(PureDpEvent(0.1))
    assert math.isfinite(exactly.get_epsilon(1e-5)) and "leaves nothing" not in exactly.summary()
    exactly.compose(GaussianDpEvent(9.0))
    assert exactly.get_epsilon(1e-5) == math.inf and "leaves nothing" in exactly.summary()
