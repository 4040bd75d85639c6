"""What fits a budget: nothing that an independent reference refuses, and nearly all that fits."""

import itertools
import math
from random import Random

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from torch_dpbayes.accounting import bounds, budget, renyi
from torch_dpbayes.accounting.budget import Budget, Composed, Filter
from torch_dpbayes.accounting.dominating_pairs import (
    Failure,
    Gaussian,
    NonPrivate,
    Pure,
    Sampled,
    added,
)
from torch_dpbayes.accounting.gdp import gaussian_delta, gaussian_epsilon

DELTA = 1e-5
KINDS = ["directed", "antipodal", "symmetric"]


def used_up(limits, pairs):
    """Charges these pairs one by one until one does not fit: what was charged, and that one."""
    counts = {}
    for pair in pairs:
        if not limits.fits(counts, {pair: 1}):
            return counts, pair
        counts = added(counts, {pair: 1})
        limits.spend(pair, 1)
    raise AssertionError("everything fitted")


def reference(counts, epsilon, pessimistic):
    """delta of sampled releases by dp_accounting's distributions, rounded up or down."""
    found = None
    for pair, count in counts.items():
        each = pld.from_gaussian_mechanism(
            pair.noise,
            sampling_prob=pair.rate,
            value_discretization_interval=1e-4 if sum(counts.values()) < 50 else 1e-3,
            pessimistic_estimate=pessimistic,
        ).self_compose(count)
        found = each if found is None else found.compose(each)
    return found.get_delta_for_epsilon(epsilon) if counts else 0.0


@given(st.floats(0.05, 3.0), st.floats(0.1, 6.0), st.floats(0.01, 2.0))
@examples(40)
def test_an_anchor_bounds_what_follows_it(mu, epsilon, more):
    """Of Gaussians, whose composition has a closed form."""
    anchor = Composed.of({Gaussian(mu): 1}, DELTA).anchor(epsilon, 0.5)
    if anchor is None:
        return
    lambdas = np.array(anchor.orders) - 1
    divergences = np.array(anchor.orders) * more**2 / 2
    bound = np.exp((anchor.logs + lambdas * divergences).min()) + 0.5 - anchor.lefts.min()
    assert bound >= gaussian_delta(math.hypot(mu, more), epsilon) * (1 - 1e-9)


@pytest.mark.parametrize("used", [0.85, 0.95, 0.99])
@pytest.mark.parametrize("mu", [0.3, 1.0, 4.0])
def test_an_anchor_admits_nearly_all_that_is_left(mu, used):
    """To first order all of it."""
    epsilon = gaussian_epsilon(mu, DELTA)
    anchor = Composed.of({Gaussian(math.sqrt(used) * mu): 1}, DELTA).anchor(epsilon, DELTA)
    left, step = (1 - used) * mu**2, np.append(np.array(anchor.orders) / 2, 0.0)
    fit = max(share for share in np.linspace(0, 1, 201) if anchor.keep(share * left * step))
    assert 0.8 < fit <= 1 - 1e-6 or fit == 0.995


@given(
    st.lists(
        st.tuples(st.floats(2e-3, 0.1), st.floats(0.8, 3.0)), min_size=1, max_size=3, unique=True
    ),
    st.floats(0.5, 4.0),
    st.builds(Random, st.integers(0, 10**6)),
)
@examples(8)
def test_what_is_accepted_is_what_a_reference_accepts(settings, epsilon, random):
    """dp_accounting's distributions, rounded up and rounded down."""
    pairs = [Sampled("directed", rate, noise) for rate, noise in settings]
    limits = Budget(epsilon, DELTA, "pld")
    counts, refused = used_up(limits, (random.choice(pairs) for _ in itertools.count()))

    assert reference(counts, epsilon, pessimistic=False) <= DELTA
    assert reference(added(counts, {refused: 1}), epsilon, pessimistic=True) > DELTA


@pytest.mark.parametrize("noises", [lambda k: 2.4 * 0.997**k, lambda k: 1.6 + 0.4 * math.sin(k)])
def test_many_different_releases_use_a_budget_up(noises, monkeypatch):
    """Against dp_accounting's distributions, rounded down and up."""
    composed = []
    original = budget.compose
    monkeypatch.setattr(budget, "compose", lambda *a, **k: composed.append(1) or original(*a, **k))
    pairs = (Sampled("directed", 0.04, noises(k)) for k in itertools.count())
    counts, refused = used_up(Budget(1.5, DELTA, "pld"), pairs)
    assert len(counts) > 60 and len(composed) < 20
    assert reference(counts, 1.5, pessimistic=False) <= DELTA
    assert reference(added(counts, {refused: 1}), 1.5, pessimistic=True) > DELTA


@pytest.mark.parametrize("method", ["pld", "rdp"])
def test_two_events_in_turn(method, monkeypatch):
    """Few compositions, to the last that fits."""
    asked = []
    bound = (bounds if method == "pld" else renyi).upper_epsilon
    module = bounds if method == "pld" else renyi
    monkeypatch.setattr(module, "upper_epsilon", lambda *a: asked.append(1) or bound(*a))
    both = [Sampled("directed", 0.01, 1.0), Sampled("directed", 0.02, 1.3)]
    limits = Budget(2.0, DELTA, method)
    counts, refused = used_up(limits, (both[k % 2] for k in range(10_000)))
    assert sum(counts.values()) > 200 and len(asked) < 60
    assert bound(counts, DELTA) <= 2.0 < bound(added(counts, {refused: 1}), DELTA)
    assert limits.max_count(counts, {refused: 1}) == 0


@pytest.mark.parametrize("pair", [Sampled("directed", 1e-4, 0.4), Pure(0.1), Failure(1e-7)])
def test_few_large_losses(pair):
    """Whose profile no divergence follows."""
    limits = Budget(2.0, DELTA, "pld")
    fit = limits.max_count({}, {pair: 1})
    counts, _ = used_up(limits, [pair] * (fit + 1))
    assert counts == {pair: fit}


def test_what_was_given_back_fits_again():
    limits, pair = Budget(1.0, DELTA, "pld"), Sampled("directed", 0.01, 1.0)
    fit = limits.max_count({}, {pair: 1})
    limits.spend(pair, fit)
    assert not limits.fits({pair: fit}, {pair: 1})
    limits.spend(pair, -10)
    assert limits.fits({pair: fit - 10}, {pair: 1}, 10)
    assert not limits.fits({pair: fit - 10}, {pair: 1}, 11)
    assert not limits.fits({pair: fit - 10}, {pair: 1}, 4, reserved={pair: 7})
    assert limits.fits({pair: fit - 10}, {pair: 1}, 3, reserved={pair: 7})


def test_what_was_given_back_fits_once():
    """Whatever took its place."""
    limits, pair, other = Budget(1.0, DELTA, "pld"), Gaussian(0.02), Gaussian(0.01)
    fit = limits.max_count({}, {pair: 1})
    limits.spend(pair, fit)
    limits.spend(pair, -1)
    counts = {pair: fit - 1}
    while limits.fits(counts, {other: 1}):
        limits.spend(other, 1)
        counts = added(counts, {other: 1})
    assert bounds.upper_epsilon(counts, DELTA) <= 1.0 and counts[other] <= 8


@pytest.mark.parametrize("rule", [None, Filter.gaussian(1.0, 1e-5), Filter("renyi", 8.0, 1.0)])
@pytest.mark.parametrize("method", ["pld", "rdp"])
def test_what_is_not_private_never_fits(rule, method):
    limits = Budget(1.0, DELTA, method, rule)
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
    limits = Budget(2.0, DELTA, "pld", rule)
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
    limits = Budget(2.0, DELTA, "pld")
    for k in range(16):  # different releases, after which costs are shared
        limits.spend(Sampled(kind, 0.01, 40.0 + k), 1)
    for noise, rate in [near for z, q in settings for near in ((1.01 * z, q / 1.01), (z, q))]:
        before = limits._spent
        limits.spend(Sampled(kind, rate, noise), 1)
        exact = renyi.curve({Sampled(kind, rate, noise): 1}, limits._anchor.orders)
        assert ((limits._spent - before)[:-1] >= exact * (1 - 1e-8)).all()
