"""Releases that fail outright with some probability, and (epsilon, delta) pairs made of them,
against closed forms and dp_accounting.
"""

import math
import re
from decimal import Decimal, localcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dpbayes.accounting import (
    PrivacyAccountant,
    PrivacyBudgetExceeded,
)
from torch_dpbayes.accounting.dominating_pairs import Failure
from torch_dpbayes.accounting.events import (
    BoundedRangeDpEvent,
    ComposedDpEvent,
    FailureDpEvent,
    GaussianDpEvent,
    MuGaussianDpEvent,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    PureDpEvent,
    SelfComposedDpEvent,
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


# --- budgets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "event",
    [pair(0.02, 2e-7), ComposedDpEvent([STEP, FailureDpEvent(2e-7)]), FailureDpEvent(2e-7)],
    ids=["pair", "step", "alone"],
)
@pytest.mark.parametrize("in_a_file", [False, True])
def test_budget_is_used_up_and_never_passed(event, method, in_a_file, tmp_path):
    path = tmp_path / "budget.db" if in_a_file else None
    accountant = PrivacyAccountant(2.0, 1e-5, method=method, path=path)
    accountant.compose(
        ComposedDpEvent(
            [STEP, PureDpEvent(0.01), GaussianDpEvent(30.0), BoundedRangeDpEvent(0.01)]
        ),
        2,
    )
    fit = accountant.remaining(event)
    assert 0 < fit <= 50  # 50 failures use up delta
    steps = 0
    with pytest.raises(PrivacyBudgetExceeded, match="Nothing was recorded"):
        while True:
            accountant.compose(event)
            steps += 1
    assert fit - 1 <= steps <= fit
    free = PrivacyAccountant(method=method)
    for charge in accountant.history:
        free.compose(charge.event, charge.count)
    assert free.get_epsilon(1e-5) <= 2.0 * (1 + 1e-4) and accountant.get_epsilon() <= 2.0
    failed = -math.expm1(steps * math.log1p(-2e-7))
    assert failed <= 1e-5
    accountant.close()


def test_a_budget_with_less_delta_than_the_failure_refuses_it():
    accountant = PrivacyAccountant(5.0, 1e-6)
    for event in (
        FailureDpEvent(1.1e-6),
        pair(0.1, 1e-5),
        ComposedDpEvent([STEP, FailureDpEvent(1e-6)]),
    ):
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
    for first in (
        FailureDpEvent(1e-7),
        pair(0.1, 1e-7),
        ComposedDpEvent([GaussianDpEvent(50.0), FailureDpEvent(1e-7)]),
    ):
        accountant = PrivacyAccountant(3.0, 1e-5)
        with pytest.raises(PrivacyBudgetExceeded, match="fits no filter"):
            accountant.compose(first, adaptive=True)
        assert len(accountant) == 0 and accountant.guarantee == "fixed"
        for begin in (GaussianDpEvent(50.0), STEP):
            accountant = PrivacyAccountant(3.0, 1e-5).compose(begin, adaptive=True)
            assert accountant.remaining(first) == 0
            for adaptive in (True, False):
                with pytest.raises(PrivacyBudgetExceeded, match="fits no filter"):
                    accountant.compose(first, adaptive=adaptive)
            assert len(accountant) == 1


# --- saying ---------------------------------------------------------------------------------------


def test_summaries_with_nothing_but_failures_or_beside_others():
    alone = PrivacyAccountant().compose(FailureDpEvent(1e-7), 2, label="draws")
    assert re.search("draws +2 releases", alone.summary()) and "epsilon <= 0 at" in alone.summary()
    assert PrivacyAccountant().compose(FailureDpEvent(0.5)).summary().count("= inf") == 2
    both = alone.compose(STEP, 10, label="chain")
    assert re.search("draws +0.0% of the cost, 2 releases", both.summary())
    assert re.search("chain +100.0% of the cost, 10 releases", both.summary())
    assert both.compose(NonPrivateDpEvent()).get_epsilon(1e-5) == math.inf
    event = both.to_dp_event()
    assert SelfComposedDpEvent(FailureDpEvent(1e-7), 2) in event.events
