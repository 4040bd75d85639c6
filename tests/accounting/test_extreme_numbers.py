"""However extreme the numbers that are taken are, the bound holds."""

import math

import mpmath
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from torch_dpbayes.accounting import (
    PrivacyAccountant,
    PrivacyBudgetExceeded,
    bounds,
)
from torch_dpbayes.accounting.dominating_pairs import Gaussian, Sampled
from torch_dpbayes.accounting.events import (
    BoundedRangeDpEvent,
    FailureDpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    MuGaussianDpEvent,
    PoissonSampledDpEvent,
    PureDpEvent,
    SampledWithoutReplacementDpEvent,
)
from torch_dpbayes.accounting.gdp import gaussian_delta, gaussian_epsilon

DELTA = 1e-5
SIZES = st.sampled_from(
    [1e-320, 1e-60, 1e-50, 1e-20, 1e-9, 1e-3, 0.3, 30.0, 499.0, 501.0, 1e4, 1e7, 1e50]
)
COUNTS = st.sampled_from([1, 2, 1000, 10**6, 10**9])
RELATIONS = st.sampled_from(["add_or_remove_one", "replace_one"])
METHODS = st.sampled_from(["pld", "rdp"])


def exact_epsilon(event, delta):
    """Of one release, in 60 digits."""
    with mpmath.workdps(60):
        delta, size = mpmath.mpf(delta), mpmath.mpf(event.epsilon)
        if isinstance(event, PureDpEvent):
            found = size + mpmath.log1p(-delta * (1 + mpmath.exp(-size)))
        else:
            found = size + 2 * mpmath.log1p(-mpmath.sqrt(delta * -mpmath.expm1(-size)))
        return max(float(mpmath.re(found)), 0.0)


@pytest.mark.parametrize("delta", [1e-10, 1e-5, 0.5])
@pytest.mark.parametrize("size", [1e-320, 1e-50, 1e-9, 0.3, 2.0, 501.0, 1e4, 1e50])
@pytest.mark.parametrize("kind", [PureDpEvent, BoundedRangeDpEvent])
def test_one_release_of_bounded_loss_costs_at_least_the_truth(kind, size, delta):
    for method in ("pld", "rdp"):
        one = PrivacyAccountant(method=method).compose(kind(size))
        exact = exact_epsilon(kind(size), delta)
        assert exact * (1 - 1e-12) <= one.get_epsilon(delta)
        if method == "pld" and exact > 1e-6:
            assert one.get_epsilon(delta) <= exact * (1 + 1e-9)
        for epsilon in (1e-300, 1e300):
            assert 0 <= one.get_delta(epsilon) <= 1


@given(
    kind=st.sampled_from([PureDpEvent, BoundedRangeDpEvent]),
    size=SIZES,
    count=COUNTS,
    method=METHODS,
    delta=st.sampled_from([1e-10, 1e-5, 0.5]),
)
@examples(15)
def test_several_extreme_releases_cost_at_least_one(kind, size, count, method, delta):
    stated = PrivacyAccountant(method=method).compose(kind(size)).get_epsilon(delta)
    several = PrivacyAccountant(method=method).compose(kind(size), count)
    assert stated <= several.get_epsilon(delta) * (1 + 1e-9)
    if method == "pld":
        assert several.get_epsilon(delta) <= count * max(size, 1e-50) * (1 + 1e-9)


@pytest.mark.parametrize("kind", [PureDpEvent, BoundedRangeDpEvent])
@pytest.mark.parametrize(("size", "count"), [(1e-320, 10**6), (1e-30, 10**6)])
def test_losses_too_small_for_the_smallest_delta_have_a_risk(kind, size, count):
    """Of the sum, the advantage is that of an almost normal variable."""
    risk = PrivacyAccountant().compose(kind(size), count).risk(delta=DELTA)
    assert 0.2 * size * math.sqrt(count) < risk.advantage < 1e-6


def of_any_kind(size):
    noise = min(max(size, 1e-50), 1e50)
    return [
        GaussianDpEvent(noise),
        PoissonSampledDpEvent(0.01, GaussianDpEvent(noise)),
        PoissonSampledDpEvent(1e-320, GaussianDpEvent(noise)),
        PoissonSampledDpEvent(1 - 1e-16, GaussianDpEvent(noise)),
        SampledWithoutReplacementDpEvent(2**53, 1, GaussianDpEvent(noise)),
        MuGaussianDpEvent(size),
        PureDpEvent(size),
        BoundedRangeDpEvent(size),
        FailureDpEvent(min(size, 0.5)),
    ]


EVENTS = SIZES.flatmap(lambda size: st.sampled_from(of_any_kind(size)))


@pytest.mark.slow
@given(
    events=st.lists(st.tuples(EVENTS, COUNTS), min_size=2, max_size=3),
    method=METHODS,
    relation=RELATIONS,
)
@examples(12)
def test_extreme_releases_together_cost_at_least_each(events, method, relation):
    """Warnings of NumPy are errors here."""
    together = PrivacyAccountant(method=method, neighboring=relation)
    for event, count in events:
        together.compose(event, count)
    epsilon = together.get_epsilon(DELTA)
    assert not math.isnan(epsilon)
    for event, count in events:
        alone = PrivacyAccountant(method=method, neighboring=relation).compose(event, count)
        assert alone.get_epsilon(DELTA, return_bounds=True).lower <= epsilon * (1 + 1e-9)
    for size in (0.0, 1.0, 1e300):
        assert 0 <= together.get_delta(size) <= 1


def test_beside_a_huge_gaussian_nothing_is_amplified():
    counts = {Gaussian(1.1e4): 1, Sampled("directed", 0.9, 0.05): 9}
    mu = math.sqrt(1.1e4**2 + 9 * 20.0**2)
    assert bounds.upper_epsilon(counts, DELTA) == pytest.approx(gaussian_epsilon(mu, DELTA), 1e-9)
    for epsilon in (mu**2 / 2 - mu, mu**2 / 2 + 2 * mu):
        assert bounds.upper_delta(counts, epsilon) == pytest.approx(
            gaussian_delta(mu, epsilon), rel=1e-6
        )


@pytest.mark.parametrize("epsilon", [1e-300, 1e-9, 1e300])
@pytest.mark.parametrize("method", ["pld", "rdp"])
def test_extreme_budgets(epsilon, method):
    accountant = PrivacyAccountant(epsilon, DELTA, method=method)
    for event in (GaussianDpEvent(1e50), MuGaussianDpEvent(1e-50), GaussianDpEvent(1e-3)):
        left = accountant.remaining(event)
        try:
            accountant.compose(event, 2)
        except PrivacyBudgetExceeded:
            assert left < 2
        else:
            assert left >= 2
    assert accountant.get_epsilon() <= epsilon


@pytest.mark.parametrize("method", ["pld", "rdp"])
@pytest.mark.parametrize("noise", [1e-8, 1.4e-3])
def test_laplace_noise_that_hides_nothing_has_a_large_epsilon(noise, method):
    accountant = PrivacyAccountant(method=method).compose(LaplaceDpEvent(noise), 5)
    assert 4.9 / noise < accountant.get_epsilon(1e-5) <= 5 / noise * (1 + 1e-9)
    accountant.summary()
    with pytest.raises(PrivacyBudgetExceeded):
        PrivacyAccountant(1.0, 1e-5, method=method).compose(LaplaceDpEvent(noise))


@pytest.mark.parametrize("size", [1e4, 2e4, 1e50])
def test_a_bounded_range_beyond_all_nodes_has_a_summary(size):
    assert "epsilon" in PrivacyAccountant().compose(BoundedRangeDpEvent(size)).summary()
