"""What fits a budget: no more than a finer composition shows, and nearly all of it."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from torch_dpbayes.accounting import bounds, budget, renyi
from torch_dpbayes.accounting.budget import Budget, Filter
from torch_dpbayes.accounting.dominating_pairs import (
    BoundedRange,
    Failure,
    Gaussian,
    Laplace,
    NonPrivate,
    Pure,
    Sampled,
    added,
    merge,
)
from torch_dpbayes.accounting.fft_composition import compose
from torch_dpbayes.accounting.privacy_loss import beside_failures

KINDS = ["directed", "antipodal", "symmetric"]


def fine_epsilon(counts, delta):
    """Epsilon of a composition on a grid some thirty times as fine."""
    return beside_failures(
        counts,
        delta,
        lambda others, left: max(
            found.upper_epsilon(left) for found in compose(merge(others), delta=left, accuracy=1e-5)
        ),
    )


def pairs(kind):
    return st.one_of(
        st.builds(Sampled, st.just(kind), st.floats(1e-3, 0.3), st.floats(0.7, 4.0)),
        st.builds(Gaussian, st.floats(0.005, 0.1)),
        st.builds(Laplace, st.floats(0.01, 1.0), st.floats(5.0, 50.0)),
        st.builds(Pure, st.floats(0.001, 0.1)),
        st.builds(BoundedRange, st.floats(0.001, 0.1)),
    )


@st.composite
def histories(draw):
    """A budget, and a history that uses most of it."""
    kind = draw(st.sampled_from(KINDS))
    epsilon, delta = draw(st.floats(0.2, 8.0)), draw(st.sampled_from([1e-5, 1e-7, 1e-9]))
    base = draw(st.builds(Sampled, st.just(kind), st.floats(1e-3, 0.3), st.floats(0.7, 4.0)))
    counts = {pair: draw(st.integers(1, 5)) for pair in draw(st.lists(pairs(kind), max_size=3))}
    if draw(st.booleans()):
        counts[Failure(delta / 10)] = draw(st.integers(1, 5))
    fit = Budget(epsilon, delta, "pld").max_count(counts, {base: 1})
    counts = added(counts, {base: int(draw(st.floats(0.5, 1.0)) * fit)})
    need = {pair: draw(st.integers(1, 3)) for pair in draw(st.lists(pairs(kind), min_size=1))}
    return epsilon, delta, {pair: n for pair, n in counts.items() if n}, need


@given(histories())
@examples(25)
def test_limits_after_a_history_admit_no_more_than_fits(case):
    epsilon, delta, counts, need = case
    limits = Budget(epsilon, delta, "pld")
    limits.restart(counts)
    limits._anchor(counts)
    times = limits._additive(need, {})
    if times and set(map(type, counts)) - {Gaussian, Failure}:
        joint = added(counts, need, min(times, 10**6))
        assert fine_epsilon(joint, delta) <= epsilon * (1 + 3e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("used", [0.9, 0.98])
@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 1e-5), (6.0, 1e-9)])
def test_limits_after_a_history_admit_most_of_what_fits(kind, used, epsilon, delta):
    past, next_one = Sampled(kind, 0.01, 1.0), Sampled(kind, 0.02, 1.5)
    plan = Budget(epsilon, delta, "pld")
    counts = {past: int(used * plan.max_count({}, {past: 1}))}
    limits = Budget(epsilon, delta, "pld")
    limits.restart(counts)
    fit = limits.max_count(counts, {next_one: 1})
    limits._anchor(counts)
    assert 0.4 * fit < limits._additive({next_one: 1}, {}) <= fit


@pytest.mark.parametrize("method", ["pld", "rdp"])
def test_few_compositions_use_a_budget_up(method, monkeypatch):
    """Releases that differ, one by one, to the last that fits."""
    composed = []
    for module in (bounds, budget):
        original = module.compose
        monkeypatch.setattr(
            module, "compose", lambda *a, f=original, **k: (composed.append(1), f(*a, **k))[1]
        )
    limits, counts, done = Budget(2.0, 1e-5, method), {}, 0
    while True:
        pair = Sampled("directed", [0.01, 0.02][done % 2], [1.0, 1.3, 0.9, 2.0][done % 4])
        if not limits.fits(counts, {pair: 1}):
            break
        counts, done = added(counts, {pair: 1}), done + 1
        limits.spend(pair, 1)
    assert limits.max_count(counts, {pair: 1}) == 0
    bound = (bounds if method == "pld" else renyi).upper_epsilon
    assert bound(counts, 1e-5) <= 2.0 < bound(added(counts, {pair: 1}), 1e-5)
    assert done > 300 and len(composed) < done / 2


def test_what_was_given_back_fits_again():
    limits, pair = Budget(1.0, 1e-5, "pld"), Sampled("directed", 0.01, 1.0)
    fit = limits.max_count({}, {pair: 1})
    limits.spend(pair, fit)
    assert not limits.fits({pair: fit}, {pair: 1})
    limits.spend(pair, -10)
    assert limits.fits({pair: fit - 10}, {pair: 1}, 10)
    assert not limits.fits({pair: fit - 10}, {pair: 1}, 11)
    assert not limits.fits({pair: fit - 10}, {pair: 1}, 4, reserved={pair: 7})
    assert limits.fits({pair: fit - 10}, {pair: 1}, 3, reserved={pair: 7})


@pytest.mark.parametrize("rule", [None, Filter.gaussian(1.0, 1e-5), Filter("renyi", 8.0, 1.0)])
@pytest.mark.parametrize("method", ["pld", "rdp"])
def test_what_is_not_private_never_fits(rule, method):
    limits = Budget(1.0, 1e-5, method, rule)
    assert not limits.fits({}, {NonPrivate(): 1}) and not limits.certain({}, {NonPrivate(): 1})
    assert limits.max_count({}, {NonPrivate(): 1}) == 0
    assert limits.max_count({NonPrivate(): 1}, {Gaussian(0.01): 1}) == 0


@pytest.mark.parametrize("kind", ["gaussian", "renyi"])
def test_a_filter_is_its_limit(kind):
    """Counted by hand."""
    first = Sampled("directed", 0.01, 1.0)
    rule = Filter.gaussian(2.0, 1e-5) if kind == "gaussian" else Filter.renyi(2.0, 1e-5, {first: 1})
    assert Filter.decoded(rule.code, (2.0, 1e-5)) == rule
    pair = Gaussian(0.1)
    each = 0.1**2 if kind == "gaussian" else rule.order * 0.1**2 / 2
    limits = Budget(2.0, 1e-5, "pld", rule)
    fit = limits.max_count({}, {pair: 1})
    assert fit == math.floor(rule.limit / each * (1 + 1e-12))
    limits.spend(pair, fit)
    assert not limits.fits({pair: fit}, {pair: 1})
    assert rule.epsilon(1e-5) == pytest.approx(2.0, rel=1e-8)
    assert rule.delta(2.0) == pytest.approx(1e-5, rel=1e-6)


@given(
    st.lists(st.tuples(st.floats(0.3, 30.0), st.floats(1e-5, 0.9999)), min_size=1, max_size=5),
    st.sampled_from(KINDS),
)
@examples(20)
def test_shared_costs_round_towards_less_privacy(settings, kind):
    limits = Budget(2.0, 1e-5, "pld")
    limits._costs = {k: np.zeros(0) for k in range(100)}  # as after many different releases
    for noise, rate in [near for z, q in settings for near in ((1.01 * z, q / 1.01), (z, q))]:
        pair = Sampled(kind, rate, noise)
        assert (
            limits._cost(pair) >= renyi.curve({pair: 1}, limits._rule.orders) * (1 - 1e-8)
        ).all()
