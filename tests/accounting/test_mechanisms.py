"""Events of other mechanisms: against dp-accounting on both sides, closed forms and quadrature."""

import itertools
import math
import random
import tracemalloc

import numpy as np
import pytest
from dp_accounting import dp_event as upstream
from scipy import optimize, special, stats

from torch_dpbayes.accounting import PrivacyAccountant, events
from torch_dpbayes.accounting.dominating_pairs import directions, dominating_pair
from torch_dpbayes.accounting.fft_composition import compose
from torch_dpbayes.accounting.mechanisms import (
    EpsilonDeltaDpEvent,
    ExponentialMechanismDpEvent,
    PermuteAndFlipDpEvent,
)

ADD, REPLACE = "add_or_remove_one", "replace_one"
DELTA = 1e-6


def between(low, high):
    """Even in its logarithm."""
    return math.exp(random.uniform(math.log(low), math.log(high)))


def test_sampled_laplace_noise_that_is_large_takes_little_memory(rate=0.5, scale=1e4):
    tracemalloc.start()
    event = upstream.PoissonSampledDpEvent(rate, upstream.LaplaceDpEvent(scale))
    accountant = PrivacyAccountant().compose(event)
    found, bound = accountant.get_epsilon(1e-15), math.log1p(rate * math.expm1(1 / scale))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0.9 * bound < found < bound * (1 + 1e-6) and peak < 2**29


def test_events_that_are_others():
    epsilon, delta = between(0.01, 3), between(1e-9, 1e-3)
    both = upstream.ComposedDpEvent([events.PureDpEvent(epsilon), events.FailureDpEvent(delta)])
    same = [
        (EpsilonDeltaDpEvent(epsilon, delta), both),
        (EpsilonDeltaDpEvent(epsilon, 0.0), events.PureDpEvent(epsilon)),
        (ExponentialMechanismDpEvent(epsilon), events.BoundedRangeDpEvent(epsilon)),
        (PermuteAndFlipDpEvent(epsilon), events.PureDpEvent(epsilon)),
        (upstream.RandomizedResponseDpEvent(0.0, 3), upstream.NonPrivateDpEvent()),
    ]
    for one, other in same:
        assert list(events.elementary(one, 3)) == list(events.elementary(other, 3))
    for p, buckets in ((1.0, 3), (0.1, 1)):
        assert list(events.elementary(upstream.RandomizedResponseDpEvent(p, buckets))) == []
    assert list(events.elementary(upstream.MixtureOfGaussiansDpEvent(1.0, [0.0], [1.0]))) == []


def test_a_replaced_record_moves_an_answer_twice_as_far():
    costs = [
        PrivacyAccountant(neighboring=relation).compose(upstream.DiscreteLaplaceDpEvent(0.3, moved))
        for relation, moved in ((REPLACE, 2), (ADD, 4))
    ]
    assert costs[0].get_epsilon(DELTA) == costs[1].get_epsilon(DELTA) > 0


def test_a_mixture_that_moves_for_certain_costs_what_dp_accounting_says():
    moved = upstream.MixtureOfGaussiansDpEvent(1.0, [3.0, 4.0], [0.5, 0.5])
    assert PrivacyAccountant().compose(moved).get_epsilon(1e-6) == pytest.approx(25.10045, rel=1e-6)


@pytest.mark.parametrize("rate", [1e-6, 0.1, 1.0])
@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 0.0), (2.0, 1e-7), (60.0, 0.0), (1e-13, 0.0)])
def test_poisson_batches_amplify_what_is_known_by_epsilon_and_delta(rate, epsilon, delta):
    """Against randomised response with a failure, sampled: its four outputs are enumerated."""
    release = EpsilonDeltaDpEvent(epsilon, delta)
    accountant = PrivacyAccountant()
    accountant.compose(upstream.PoissonSampledDpEvent(rate, release))
    with_it = np.array([delta, (1 - delta) * special.expit(epsilon), 0.0, 0.0])
    with_it[2] = 1 - with_it.sum()
    without = np.array([0.0, with_it[2], with_it[1], delta])
    sampled = (1 - rate) * without + rate * with_it
    for at in (0.0, 0.05, 0.4, 1.5):
        true = max(
            np.maximum(a - math.exp(at) * b, 0.0).sum()
            for a, b in ((sampled, without), (without, sampled))
        )
        assert accountant.get_delta(at) >= true * (1 - 1e-9)
    amplified = math.log1p(rate * math.expm1(epsilon))
    at_delta = rate * delta + 1e-12
    assert accountant.get_epsilon(at_delta) <= amplified * (1 + 1e-9)
    assert accountant.get_epsilon(1e-30) >= amplified * (1 - 1e-6)


def test_sampled_responses_cost_what_their_binomial_law_does(rate=0.1, epsilon=1.0, number=100):
    no, yes = special.expit([-epsilon, epsilon])
    of_yes = no, (1 - rate) * no + rate * yes
    without, with_it = (stats.binom.pmf(np.arange(number + 1), number, p) for p in of_yes)
    true = optimize.brentq(
        lambda at: np.maximum(with_it - math.exp(at) * without, 0).sum() - DELTA, 0.0, 20.0
    )
    event = upstream.PoissonSampledDpEvent(rate, events.PureDpEvent(epsilon))
    found = PrivacyAccountant().compose(event, number).get_epsilon(DELTA, return_bounds=True)
    assert found.lower <= true <= found.upper <= 1.01 * true
    rarest = upstream.PoissonSampledDpEvent(5e-324, events.PureDpEvent(800.0))
    assert 0 <= PrivacyAccountant().compose(rarest).get_epsilon(DELTA) < 800.0


def law_of_the_sum(contributions, rate, most):
    """Every sum that a batch may have, with its probability."""
    found = {}
    for size in range(len(contributions) + 1):
        for drawn in itertools.combinations(contributions, size):
            kept = list(itertools.combinations(drawn, min(size, most)))
            for batch in kept:
                chance = rate**size * (1 - rate) ** (len(contributions) - size) / len(kept)
                found[sum(batch)] = found.get(sum(batch), 0.0) + chance
    return found


def density(law, x, noise):
    return sum(p * stats.norm.pdf(x, total, noise) for total, p in law.items())


@pytest.mark.parametrize("neighboring", ["add_or_remove_one", "replace_one"])
@pytest.mark.parametrize(("size", "most"), [(4, 1), (5, 2), (5, 5)])
def test_small_batches_are_covered(neighboring, size, most):
    """Every batch of up to six records is listed; contributions are the extreme ones and any."""
    rate, noise = random.uniform(0.05, 0.9), random.uniform(0.4, 3.0)
    event = upstream.TruncatedSubsampledGaussianDpEvent(size, rate, most, noise)
    pair = dominating_pair(event, neighboring)
    both = [compose({pair: 1}, reverse, delta=1e-3) for reverse in directions({pair: 1})]
    found = both[0]
    x = np.linspace(-6 - 9 * noise, 6 + 9 * noise, 10_001)
    step = x[1] - x[0]
    for case in range(4):
        others = [-1.0 if case < 2 else random.uniform(-1, 1) for _ in range(size - 1)]
        mine, theirs = 1.0, (-1.0 if case % 2 else random.uniform(-1, 1))
        with_it = law_of_the_sum([*others, mine], rate, most)
        if neighboring == "replace_one":
            cases = [(with_it, law_of_the_sum([*others, theirs], rate, most))]
        else:  # of the stated number one is removed, or one is added to it
            without = law_of_the_sum(others, rate, most)
            more = law_of_the_sum([*others, mine, random.uniform(-1, 1)], rate, most)
            cases = [(with_it, without), (without, with_it), (with_it, more), (more, with_it)]
        for one, other in cases:
            p, q = density(one, x, noise), density(other, x, noise)
            for epsilon in (0.0, 0.1, 0.5, 1.0, 2.0):
                truth = step * np.maximum(p - math.exp(epsilon) * q, 0.0).sum()
                bound = max(c.upper_delta(epsilon) for c in both)
                assert truth <= bound * (1 + 1e-6) + 1e-7
    assert found.upper_delta(0.0) <= 1
