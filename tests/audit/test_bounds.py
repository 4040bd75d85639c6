"""Lower bounds from guesses: never above the truth but with the stated probability, and sharp."""

from bisect import bisect_left
from functools import cache

import numpy as np
import pytest
from audit_power import median_bound
from scipy import special, stats
from support.audits import charged, fresh

from torch_dpbayes.accounting.events import (
    BoundedRangeDpEvent,
    GaussianDpEvent,
    PoissonSampledDpEvent,
)
from torch_dpbayes.audit.bounds import (
    Guesses,
    LowerBound,
    epsilon_lower_bound,
    gaussian_inverse,
    gaussian_mu,
    independent_epsilon_lower_bound,
    independent_mu_lower_bound,
    mu_lower_bound,
    refuted,
    stated_inverse,
)

DELTA = 1e-5


def inverse_of(epsilons, deltas):
    """f̄⁻¹ if all of (ε_k, δ_k) hold, in both directions."""
    odds, delta = np.exp(np.asarray(epsilons))[:, None], np.asarray(deltas)[:, None]
    return lambda right: np.maximum(
        np.maximum((right - delta) / odds, 1 - delta - (1 - right) * odds).max(0), 0.0
    )


@pytest.mark.parametrize(("made", "epsilon"), [(20, 0.0), (100, 0.3), (100, 3.0), (1000, 1.0)])
def test_randomised_response_is_bounded_as_by_clopper_and_pearson(epsilon, made):
    """Without δ its right guesses are binomial, and their exact interval is known."""
    law = stats.binom(made, special.expit(epsilon))
    for quantile in (0.01, 0.5, 0.9, 0.99):
        correct = int(law.ppf(quantile))
        low = stats.binomtest(correct, made).proportion_ci(0.90, "exact").low
        exact = max(0.0, min(float(special.logit(low)), 40.0))
        found = epsilon_lower_bound(Guesses(1000, made, correct), 0.0)
        assert found == pytest.approx(exact, abs=2e-4)
    of_all = [Guesses(1000, made, v) for v in range(made + 1)]
    first = bisect_left(of_all, True, key=lambda g: epsilon_lower_bound(g, 0.0) > epsilon)
    assert law.sf(first - 1) <= 0.05


@pytest.mark.parametrize("truth", [0.0, 0.4, 1.5])
def test_independent_guesses_are_bounded_exactly(truth):
    """How often the bound is too high is a sum of binomial probabilities."""
    of_all = [Guesses(300, 300, v) for v in range(301)]
    by_mu = [independent_mu_lower_bound(guesses) for guesses in of_all]
    by_epsilon = [independent_epsilon_lower_bound(guesses, 0.01, 0.95) for guesses in of_all]
    for accuracy, bounds in (
        (stats.norm.cdf(truth / 2), by_mu),
        ((np.exp(truth) + 0.01) / (np.exp(truth) + 1), by_epsilon),
    ):
        first = int(np.argmax(np.array(bounds) > truth))
        # right, and not by much more than it has to be
        assert 0.02 < stats.binom.sf(first - 1, 300, accuracy) <= 0.05


@pytest.mark.parametrize("seed", range(20))
def test_no_mechanism_of_few_canaries_guesses_better(seed):
    """A mechanism of arbitrary probabilities and an arbitrary rule of guessing: the probability of
    right guesses is known, and so is what the mechanism reveals.
    """
    rng = fresh()
    canaries, outputs = int(rng.integers(1, 6)), int(rng.integers(2, 9))
    made = int(rng.integers(1, canaries + 1))
    included = (np.arange(2**canaries)[:, None] >> np.arange(canaries)) & 1
    law = rng.dirichlet(np.full(outputs, rng.choice([0.3, 1, 10])), size=2**canaries)
    rule = np.zeros((outputs, canaries), dtype=int)  # 0 where nothing is said
    for output in range(outputs):
        order = rng.permutation(canaries)[:made]
        # what is the more probable, or anything
        best = np.where((law[:, output, None] * (2 * included - 1)).sum(0) > 0, 1, -1)[order]
        rule[output, order] = np.where(rng.random(made) < 0.9, best, -best)
    right = ((2 * included - 1)[:, None, :] * rule[None] == 1).sum(2)
    epsilons = np.linspace(0, 8, 200)
    deltas = np.zeros(200)
    for bit in range(canaries):
        other = law[np.arange(2**canaries) ^ (1 << bit)]
        excess = law[None] - np.exp(epsilons)[:, None, None] * other[None]
        deltas = np.maximum(deltas, np.maximum(excess, 0).sum(2).max(1))
    deltas = np.minimum(deltas + 1e-12, 1.0)
    for guesses in (Guesses(canaries, made, correct) for correct in range(made + 1)):
        confidence = 1 - (law * (right >= guesses.correct)).sum() / 2**canaries + 1e-9
        assert not refuted(inverse_of(epsilons, deltas), guesses, confidence).any()
        for k in (0, 40, 100):
            assert epsilon_lower_bound(guesses, deltas[k], confidence) <= epsilons[k] + 1e-9


@pytest.mark.chance(1e-8)
@pytest.mark.parametrize(
    "canaries, epsilon, of_basic, of_gaussian", [(1000, 2.0, 0.5, 0.9), (1000, 8.0, 2.6, 4.3)]
)
def test_bounds_are_sharp(canaries, epsilon, of_basic, of_gaussian):
    """The median run on a Gaussian with known ε. The median of 1,000 runs is within one right
    guess, and the limits are more than 1.5 away.
    """
    for kind, least in (("basic", of_basic), ("gaussian", of_gaussian)):
        assert least < median_bound(kind, epsilon, fresh(), canaries) < epsilon


@cache
def stated(event):
    """An accountant, and the risk of an inclusion by it."""
    accountant = charged(event)
    return accountant, accountant.risk(prior=0.5, delta=DELTA)


SAMPLED, GAUSSIAN = PoissonSampledDpEvent(0.3, GaussianDpEvent(0.7)), GaussianDpEvent(2.0)


@pytest.mark.parametrize("event", [GAUSSIAN, BoundedRangeDpEvent(2.0), SAMPLED])
def test_an_accountants_whole_curve_is_tested(event):
    """For a Gaussian it says what its μ says. Otherwise ε at one δ says little about an inclusion:
    a draw of bounded range reveals more of it than the Gaussian of the same ε, and is not refuted
    for that.
    """
    accountant, risk = stated(event)
    epsilon = accountant.get_epsilon(DELTA)
    best = (1 + accountant.get_delta(0.0)) / 2  # accuracy of one guess
    for kind, number in (("gaussian", 250), ("independent", 1000)):
        bound = LowerBound(kind, DELTA, 0.95)
        rights = range(number // 2, number)
        all_of = [Guesses(1000, number, v) for v in rights]
        by_mu = rights[bisect_left(all_of, True, key=lambda g, b=bound: b(g) > epsilon)]
        by_curve = rights[bisect_left(all_of, True, key=lambda g, b=bound: b.refutes(risk, g))]
        if event is GAUSSIAN:
            assert abs(by_mu - by_curve) <= 1
        elif best > special.ndtr(gaussian_mu(epsilon, DELTA) / 2):
            assert by_curve > by_mu + 1
        else:
            assert by_curve < by_mu
        if kind == "independent":
            assert stats.binom.sf(by_curve - 1, number, best) <= 0.05


def test_all_right_and_all_wrong():
    assert mu_lower_bound(Guesses(100, 100, 0)) == epsilon_lower_bound(Guesses(100, 100, 0), 0) == 0
    assert mu_lower_bound(Guesses(100, 0, 0)) == 0
    few, many = (mu_lower_bound(Guesses(1000, n, n)) for n in (10, 1000))
    assert 0 < few < many < 40


def test_a_stated_curve_is_that_of_the_worse_direction():
    """What is wrong with this probability is right with that one at most, under either data set.
    A Gaussian's is its own.
    """
    risk, right = stated(SAMPLED)[1], np.linspace(0.05, 0.95, 50)
    assert len(risk.curves) == 2
    worst = np.max([curve(stated_inverse(risk)(right)) for curve in risk.curves], axis=0)
    assert worst == pytest.approx(right, rel=1e-9)
    envelope = stated_inverse(stated(GAUSSIAN)[1])(right)
    exact = gaussian_inverse(np.array([0.5]))(right)
    assert (envelope <= exact + 1e-12).all() and envelope == pytest.approx(exact, abs=1e-3)
