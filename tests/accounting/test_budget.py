"""A budget admits nothing that a reference refuses, and nearly all else; an epsilon at any time."""

import itertools
import math
from random import Random

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from hypothesis import given
from hypothesis import strategies as st
from random_compositions import in_worse_direction, of_poisson
from support.examples import examples
from support.ledgers import DELTA, STEP, sampled

from torch_dpbayes.accounting import (
    PrivacyAccountant,
    PrivacyBudgetExceeded,
    bounds,
    budget,
    events,
    odometer,
    renyi,
)
from torch_dpbayes.accounting.budget import Budget, Composed, Filter
from torch_dpbayes.accounting.dominating_pairs import (
    Failure,
    Gaussian,
    NonPrivate,
    Pure,
    Sampled,
    added,
    uncovered,
)
from torch_dpbayes.accounting.gdp import gaussian_delta


def used_up(limits, pairs):
    """Charges these pairs one by one until one does not fit: what was charged, and that one."""
    counts = {}
    for pair in pairs:
        if not limits.fits(counts, {pair: 1}):
            return counts, pair
        counts = added(counts, {pair: 1})
        limits.spend(pair, 1)
    raise AssertionError("everything fitted")


def true_delta(counts, epsilon):
    """delta of sampled releases in the worse direction, by an integral."""
    laws = [(of_poisson(p.rate, p.noise, p.kind == "antipodal"), n) for p, n in counts.items()]
    return in_worse_direction(laws, epsilon, 1)[0] if laws else 0.0


def of_dp_accounting(counts, epsilon, pessimistic):
    """The same by dp_accounting's distributions, rounded up or down, for any number of releases."""
    found = None
    for pair, count in counts.items():
        each = pld.from_gaussian_mechanism(
            pair.noise,
            sampling_prob=pair.rate,
            value_discretization_interval=1e-4 if sum(counts.values()) < 50 else 1e-3,
            pessimistic_estimate=pessimistic,
            log_mass_truncation_bound=-30,  # e⁻³⁰ of delta; fewer losses to go through
        ).self_compose(count)
        found = each if found is None else found.compose(each)
    return found.get_delta_for_epsilon(epsilon) if counts else 0.0


@given(st.floats(0.05, 3.0), st.floats(0.5, 6.0), st.floats(0.01, 2.0), st.integers(1, 5))
@examples(40)
def test_what_joins_a_composition_is_bounded(mu, epsilon, more, times):
    """Of Gaussians, whose composition has a closed form."""
    joint = Composed.of({Gaussian(mu): 1}, {}, epsilon, DELTA).followed_by({Gaussian(more): times})
    if joint is None:  # too wide for the grid: the composition that is reported decides
        return
    true = gaussian_delta(math.sqrt(mu**2 + times * more**2), epsilon)
    assert joint.log_excess(DELTA) >= math.log(max(true, 1e-300) / DELTA)


def test_an_added_record_whose_losses_are_bounded_beside_a_gaussian():
    """Whose own are not: both directions count."""
    sampled = Sampled("directed", 1e-3, 0.5)
    joint = Composed.of({Gaussian(0.5): 1}, {}, 1.0, DELTA).followed_by({sampled: 3})
    assert joint is None
    joint = Composed.of({Gaussian(0.5): 1}, {sampled: 3}, 1.0, DELTA).followed_by({sampled: 3})
    assert len(joint.grids) == 2
    assert len(Composed.of({sampled: 1}, {}, 1.0, DELTA).grids) == 1


@given(
    st.lists(
        st.tuples(st.floats(4e-3, 0.1), st.floats(0.8, 2.0)), min_size=1, max_size=2, unique=True
    ),
    st.floats(0.5, 2.0),
    st.builds(Random, st.integers(0, 10**6)),
)
@examples(8)
def test_what_is_accepted_is_what_a_reference_accepts(settings, epsilon, random):
    pairs = [Sampled("directed", rate, noise) for rate, noise in settings]
    limits = Budget(epsilon, DELTA, "pld")
    counts, refused = used_up(limits, (random.choice(pairs) for _ in itertools.count()))
    assert of_dp_accounting(counts, epsilon, pessimistic=False) <= DELTA
    assert of_dp_accounting(added(counts, {refused: 1}), epsilon, pessimistic=True) > DELTA


@pytest.mark.parametrize(
    ("epsilon", "delta", "rate", "noise"),
    [(2.6477, 1.29e-7, 0.003607, 1.2086), (1.00695, 2.016e-5, 0.0035576, 3.9058)],
)
def test_what_remains_is_what_is_admitted(epsilon, delta, rate, noise):
    """Up to five more than 20,000 to 100,000 were, on a finer grid than that of the bound."""
    accountant = PrivacyAccountant(epsilon, delta)
    step = sampled(noise, rate)
    accountant.compose(step, accountant.remaining(step) - 2)
    for left in (2, 1):
        assert accountant.remaining(step) == left
        accountant.compose(step)
    with pytest.raises(PrivacyBudgetExceeded):
        accountant.compose(step)


def test_many_different_releases_use_a_budget_up(monkeypatch):
    """More than are composed one by one."""
    composed, original = [], budget.compose
    monkeypatch.setattr(budget, "EXACT_LEVELS", 8)
    monkeypatch.setattr(budget, "compose", lambda *a, **k: composed.append(1) or original(*a, **k))
    pairs = (Sampled("directed", 0.06, 2.2 * 0.985**k) for k in itertools.count())
    counts, refused = used_up(Budget(0.8, DELTA, "pld"), pairs)
    assert len(counts) > 15 and len(composed) < 15
    assert true_delta(counts, 0.8) <= DELTA * (1 + 1e-6)
    assert true_delta(added(counts, {refused: 1}), 0.8 * (1 - 2e-3)) > DELTA


@pytest.mark.parametrize("method", ["pld", "rdp"])
def test_two_events_in_turn(method, monkeypatch):
    """Few compositions, to the last that fits."""
    asked = []
    module = bounds if method == "pld" else renyi
    bound = module.upper_epsilon
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


@pytest.mark.parametrize("method", ["pld", "rdp"])
def test_beside_a_failure_less_of_delta_is_left(method):
    failure, pair = Failure(0.999 * DELTA), Sampled("directed", 0.02, 1.0)
    limits, counts = Budget(2.0, DELTA, method), {failure: 1}
    limits.spend(failure, 1)
    while limits.fits(counts, {pair: 1}, 50):
        limits.spend(pair, 50)
        counts = added(counts, {pair: 50})
    bound = bounds if method == "pld" else renyi
    assert bound.upper_epsilon(counts, DELTA) <= 2.0 * (1 + 1e-6)


def test_many_different_releases_count_at_least_their_divergences():
    """The cost of most is taken from a grid."""
    limits, exact = Budget(20.0, DELTA, "pld"), 0.0
    for rate, noise in np.exp(np.random.default_rng().uniform([-7, 0], [-1, 2], (60, 2))).tolist():
        limits.spend(pair := Sampled("directed", rate, noise), 1)
        exact = exact + renyi.divergences(pair, limits._orders)
    assert (exact <= limits._spent[:-1]).all() and (limits._spent[:-1] <= 1.3 * exact).all()


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


def test_only_what_dominates_a_release_stands_for_it():
    held = {Gaussian(0.1): 3, Sampled("directed", 0.02, 1.0): 2, Pure(1.0): 1}
    less = Sampled("directed", 0.01, 1.0)
    larger = [
        Sampled("directed", 0.03, 2.0),
        Sampled("directed", 0.01, 0.9),
        Sampled("antipodal", 0.01, 1.0),
        Gaussian(0.2),
        Pure(0.5),
    ]
    need = {**dict.fromkeys(larger, 1), less: 3, Gaussian(0.05): 2}
    assert uncovered(held, need) == {**dict.fromkeys(larger, 1), less: 1}
    assert list(held.values()) == [1, 0, 1]


@pytest.mark.parametrize(
    "rule", [None, Filter("gaussian", math.inf, 1.0), Filter("renyi", 8.0, 1.0)]
)
@pytest.mark.parametrize("method", ["pld", "rdp"])
def test_what_is_not_private_never_fits(rule, method):
    limits = Budget(1.0, DELTA, method, rule)
    assert not limits.fits({}, {NonPrivate(): 1}) and not limits.certain({}, {NonPrivate(): 1})
    assert limits.max_count({}, {NonPrivate(): 1}) == 0
    limits.spend(NonPrivate(), 1)
    assert limits.max_count({NonPrivate(): 1}, {Gaussian(0.01): 1}) == 0


@pytest.mark.parametrize("kind", ["gaussian", "renyi"])
def test_a_filter_is_its_limit(kind):
    """Counted by hand."""
    first = Gaussian(1.0) if kind == "gaussian" else Sampled("directed", 0.01, 1.0)
    rule = Filter.of(2.0, 1e-5, first, declared=True)
    assert rule.kind == kind
    pair = Gaussian(0.1)
    each = 0.1**2 if kind == "gaussian" else rule.order * 0.1**2 / 2
    limits = Budget(2.0, DELTA, "pld", rule)
    fit = limits.max_count({}, {pair: 1})
    assert fit == math.floor(rule.limit / each * (1 + 1e-12))
    if kind == "gaussian":  # which sees no sampling
        assert limits.max_count({}, {Sampled("directed", 0.1, 10.0): 1}) == fit
    limits.spend(pair, fit)
    assert not limits.fits({pair: fit}, {pair: 1})
    assert rule.epsilon(1e-5) == pytest.approx(2.0, rel=1e-8)
    assert rule.delta(2.0) == pytest.approx(1e-5, rel=1e-6)


@pytest.mark.parametrize("method", ["pld", "rdp"])
@pytest.mark.parametrize(("epsilons", "budget"), [((0.1,) * 3, 0.3), ((0.7, 0.1, 0.1), 0.9)])
def test_basic_composition_fits_whatever_floats_add_up_to(method, epsilons, budget):
    accountant = PrivacyAccountant(budget, 1e-9, method=method)
    for epsilon in epsilons:
        accountant.compose(events.PureDpEvent(epsilon))
    assert accountant.get_epsilon() <= budget
    assert accountant.get_delta(budget) == 0.0
    assert accountant.remaining(events.PureDpEvent(0.5)) == 0
    with pytest.raises(PrivacyBudgetExceeded):
        accountant.compose(events.PureDpEvent(0.5))


# --- an epsilon for every moment ------------------------------------------------------------------


def test_the_conversion_holds_for_every_loss():
    """(1 - exp(epsilon - l))_+ <= delta * mixture, with equality somewhere."""
    generator = np.random.default_rng()
    for _ in range(20):
        first = Sampled("directed", float(generator.uniform(0.01, 0.9)), 1.5)
        spent = renyi.curve({first: 1}) * generator.integers(1, 1000)
        weights = odometer.weights(first, 1e-5, None)
        assert weights.sum() == pytest.approx(1.0) and weights.min() > 0
        exponents = np.array(renyi.ORDERS) - 1
        known = np.isfinite(spent)
        exponents, spent, weights = exponents[known], spent[known], weights[known]
        epsilon = odometer.largest(exponents, np.log(weights) + math.log(1e-5), spent)
        losses = epsilon + np.geomspace(1e-6, 30.0, 4000)
        mixture = np.exp(np.minimum(exponents * (losses[:, None] - spent), 600.0)) @ weights
        slack = 1e-5 * mixture / -np.expm1(epsilon - losses)
        assert 1 - 1e-9 <= slack.min() <= 1.001


@pytest.mark.parametrize(
    "pair",
    [Sampled("directed", 0.01, 1.0), Sampled("antipodal", 0.01, 1.0), Gaussian(0.05),
     Sampled("directed", 0.001, 0.6)],
)  # fmt: skip
def test_close_to_the_filter_on_runs_that_were_not_adaptive(pair):
    for count in (100, 1000, 10_000, 100_000):
        filtered = renyi.upper_epsilon({pair: count}, 1e-5)
        alone = odometer.epsilon({pair: count}, 1e-5, pair)
        assert filtered <= alone <= 1.15 * filtered
        budget = (filtered, 1e-5)
        assert filtered <= odometer.epsilon({pair: count}, 1e-5, pair, budget) <= alone


def test_the_accountant_shows_it():
    free = PrivacyAccountant()
    assert free.odometer(1e-5) == 0.0
    with pytest.raises(ValueError, match="so delta is missing"):
        free.odometer()
    bound = PrivacyAccountant(3.0, 1e-5)
    shown = []
    for _ in range(5):
        free.compose(STEP, 50)
        bound.compose(STEP, 50, adaptive=True)
        shown.append(free.odometer(1e-5))
    assert shown == sorted(shown) and shown[0] < shown[-1]
    assert bound.odometer() == pytest.approx(shown[-1], rel=0.1)
    free.compose(events.GaussianDpEvent(3.0))
    assert free.odometer(1e-5) > shown[-1]
    assert free.compose(events.FailureDpEvent(1e-9)).odometer(1e-5) == math.inf
    assert PrivacyAccountant().compose(events.NonPrivateDpEvent()).odometer(1e-5) == math.inf
    concentrated = PrivacyAccountant(method="rdp").compose(events.ZCDpEvent(0.1, 0.0))
    assert 1 < concentrated.odometer(1e-5) < 1.5 * concentrated.get_epsilon(1e-5)
