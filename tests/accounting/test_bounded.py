"""Releases with a bounded loss: basic composition, and the optimal one of pure releases."""

import itertools
import math
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from torch_dpbayes import PrivacyAccountant, PrivacyBudgetExceeded
from torch_dpbayes.accounting import bounds
from torch_dpbayes.accounting.dominating_pairs import Pure
from torch_dpbayes.accounting.events import PureDpEvent

DELTA = 1e-5
METHODS = ("pld", "rdp")


def optimal_delta(epsilons, epsilon):
    """Murtagh and Vadhan 2016, Theorem 1.5, in exact arithmetic but for the exponentials, which
    Decimal rounds at 50 digits.
    """
    from decimal import localcontext

    with localcontext() as context:
        context.prec = 60
        total = Decimal(0)
        for signs in itertools.product((1, -1), repeat=len(epsilons)):
            loss = sum(sign * Decimal(e) for sign, e in zip(signs, epsilons, strict=True))
            mass = Decimal(1)
            for sign, e in zip(signs, epsilons, strict=True):
                mass *= (sign * Decimal(e)).exp() / (1 + (sign * Decimal(e)).exp())
            if loss > Decimal(epsilon):
                total += mass * (1 - (Decimal(epsilon) - loss).exp())
        return float(total)


def counted(epsilons):
    counts = {}
    for e in epsilons:
        counts[Pure(e)] = counts.get(Pure(e), 0) + 1
    return counts


@given(
    epsilons=st.lists(st.floats(1e-3, 3.0), min_size=1, max_size=6),
    share=st.floats(0.0, 1.1),
)
@examples(40)
def test_pure_releases_cost_what_the_optimal_composition_theorem_says(epsilons, share):
    epsilon = share * math.fsum(epsilons)
    truth = optimal_delta(epsilons, epsilon)
    bound = bounds.upper_delta(counted(epsilons), epsilon)
    # at the sum of all decimals delta is 0, where their sum in floats leaves truth at 1e-17
    assert truth * (1 - 1e-12) - 1e-15 <= bound
    # by the discretisation, which at epsilon = 0 moves delta alone
    assert bound <= optimal_delta(epsilons, epsilon * (1 - 1e-3)) * (1 + 1e-4) + 1e-12
    if 1e-9 < truth < 1:
        found = bounds.upper_epsilon(counted(epsilons), truth)
        assert optimal_delta(epsilons, found) <= truth * (1 + 1e-12)
        # by the discretisation; more where delta hardly falls
        assert found <= epsilon * (1 + 1e-3) or optimal_delta(epsilons, found) >= truth * (1 - 1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("epsilons", "budget"),
    [((1.0,), 1.0), ((1.0, 2.0), 3.0), ((0.1,) * 3, 0.3), ((0.7, 0.1, 0.1), 0.9)],
)
def test_basic_composition_fits_whatever_floats_add_up_to(method, epsilons, budget):
    accountant = PrivacyAccountant(budget, 1e-9, method=method)
    for epsilon in epsilons:
        accountant.compose(PureDpEvent(epsilon))
    assert accountant.get_epsilon() <= budget
    assert accountant.get_delta(budget) == 0.0
    assert accountant.remaining(PureDpEvent(0.5)) == 0
    with pytest.raises(PrivacyBudgetExceeded):
        accountant.compose(PureDpEvent(0.5))
