"""Lower bounds from guesses: never above the truth but with the stated probability, and sharp."""

from bisect import bisect_left
from functools import cache

import numpy as np
import pytest
import torch
from scipy import optimize, special, stats

from torch_dpbayes.accounting.gaussian import gaussian_epsilon, gaussian_mu
from torch_dpbayes.audit.bounds import (
    GaussianCurves,
    Guesses,
    Profile,
    best_number,
    epsilon_lower_bound,
    mu_lower_bound,
    refuted,
)

DELTA = 1e-5


def fresh():
    """A generator of NumPy's that the test's seed decides."""
    return np.random.default_rng(torch.randint(2**62, ()).item())


@cache
def basic(guesses, delta=DELTA):
    return epsilon_lower_bound(guesses, delta)


@cache
def gaussian(guesses):
    return mu_lower_bound(guesses)


def extreme_guesses(scores, coins, made):
    """Half of the guesses on the highest scores, half on the lowest."""
    order = np.argsort(scores)
    right = coins[order[-(made // 2) :]].sum() + (~coins[order[: made // 2]]).sum()
    return Guesses(len(coins), made, int(right))


def gaussian_guesses(rng, canaries, made, mu):
    """What an attack on a Gaussian that is this private guesses."""
    coins = rng.random(canaries) < 0.5
    return extreme_guesses(rng.normal(size=canaries) + mu * coins, coins, made)


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("made", [20, 100, 1000])
@pytest.mark.first_cases(6)
def test_randomised_response_is_bounded_as_by_clopper_and_pearson(epsilon, made):
    """Without δ its right guesses are a binomial, whose exact interval is known."""
    law = stats.binom(made, special.expit(epsilon))
    for quantile in (0.01, 0.5, 0.9, 0.99):
        correct = int(law.ppf(quantile))
        low = stats.binomtest(correct, made).proportion_ci(0.90, "exact").low
        exact = max(0.0, min(float(special.logit(low)), 40.0))
        assert epsilon_lower_bound(Guesses(1000, made, correct), 0.0) == pytest.approx(
            exact, abs=2e-4
        )
    first = bisect_left(
        range(made + 1),
        True,
        key=lambda correct: epsilon_lower_bound(Guesses(1000, made, correct), 0.0) > epsilon,
    )
    assert law.sf(first - 1) <= 0.05


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.first_cases(4)
def test_no_mechanism_of_few_canaries_guesses_better(seed):
    """A mechanism of arbitrary probabilities, an arbitrary rule of guessing: how probable its right
    guesses are is known, and so is what the mechanism reveals.
    """
    rng = fresh()
    canaries, outputs = int(rng.integers(1, 6)), int(rng.integers(2, 9))
    made = int(rng.integers(1, canaries + 1))
    coins = (np.arange(2**canaries)[:, None] >> np.arange(canaries)) & 1
    law = rng.dirichlet(np.full(outputs, rng.choice([0.3, 1, 10])), size=2**canaries)
    likely = np.array(law)
    rule = np.zeros((outputs, canaries), dtype=int)  # 0 where nothing is said
    for output in range(outputs):
        order = rng.permutation(canaries)[:made]
        # what is the more probable, or anything
        odds = (law[:, output, None] * (2 * coins - 1)).sum(0)
        best = np.where(odds > 0, 1, -1)
        rule[output, order] = np.where(rng.random(made) < 0.9, best[order], -best[order])
    right = ((2 * coins - 1)[:, None, :] * rule[None] == 1).sum(2)
    epsilons = np.linspace(0, 8, 200)
    deltas = np.zeros(200)
    for bit in range(canaries):
        other = law[np.arange(2**canaries) ^ (1 << bit)]
        excess = law[None] - np.exp(epsilons)[:, None, None] * other[None]
        deltas = np.maximum(deltas, np.maximum(excess, 0).sum(2).max(1))
    deltas = np.minimum(deltas + 1e-12, 1.0)
    for correct in range(made + 1):
        probability = (likely * (right >= correct)).sum() / 2**canaries
        guesses = Guesses(canaries, made, correct)
        confidence = 1 - probability + 1e-9
        assert not refuted(Profile(epsilons, deltas), guesses, confidence).any()
        for k in (0, 40, 100):
            assert epsilon_lower_bound(guesses, deltas[k], confidence) <= epsilons[k] + 1e-9


@pytest.mark.parametrize("epsilon, delta", [(0.5, 0.0), (1.0, 0.01), (2.0, 0.05)])
def test_the_recursion_is_the_linear_program(epsilon, delta):
    """How probable v right guesses can be at most, by an optimiser."""
    canaries, made = 12, 8
    right = np.tril(np.ones((made + 1, made + 1))).T * np.arange(made + 1) / canaries
    wrong = np.tril(np.ones((made + 1, made + 1))).T * (made - np.arange(made + 1)) / canaries
    rows, limits = [], []
    for j in range(1, made + 1):  # R_j ≤ e^ε·H_{j−1} + δ and R_j ≤ 1 − e^{−ε}(1 − δ − H_{j−1})
        rows += [
            right[j] - np.exp(epsilon) * wrong[j - 1],
            right[j] - np.exp(-epsilon) * wrong[j - 1],
        ]
        limits += [delta, 1 - np.exp(-epsilon) * (1 - delta)]
    hypothesis = Profile(np.array([epsilon]), np.array([delta]))
    for correct in range(made // 2 + 1, made + 1):
        best = -optimize.linprog(
            -(np.arange(made + 1) >= correct).astype(float),
            A_ub=np.array(rows),
            b_ub=limits,
            A_eq=np.ones((1, made + 1)),
            b_eq=[1.0],
        ).fun
        guesses = Guesses(canaries, made, correct)
        assert refuted(hypothesis, guesses, 1 - best * 1.01).all()
        assert not refuted(hypothesis, guesses, 1 - best * 0.99).any()


@pytest.mark.parametrize("mu", [0.0, 0.5, 1.666])
def test_gaussian_bounds_are_valid(mu):
    """Of 1,000 repeats at 95 %, at most 87 too high: 50 would be allowed on average, and 88 are
    seen once in 10⁷ tries.
    """
    rng = fresh()
    too_high = {"basic": 0, "gaussian": 0}
    for _ in range(1000):
        guesses = gaussian_guesses(rng, 300, 60, mu)
        too_high["gaussian"] += gaussian(guesses) > mu + 1e-9
        too_high["basic"] += basic(guesses) > (gaussian_epsilon(mu, DELTA) if mu else 0.0) + 1e-9
    assert stats.binom.sf(87, 1000, 0.05) < 1e-6
    assert max(too_high.values()) <= 87


@pytest.mark.parametrize(
    "canaries, epsilon, of_basic, of_gaussian",
    [(1000, 2.0, 0.5, 0.9), (1000, 8.0, 2.6, 4.3), (10_000, 8.0, 3.6, 5.0)],
)
@pytest.mark.first_cases(2)
def test_bounds_are_sharp(canaries, epsilon, of_basic, of_gaussian):
    """The median run on a Gaussian whose ε is known: the bounds grow with the right guesses, of
    which the median of 1,000 runs is within a guess; the limits are more than 1.5 away.
    """
    rng = fresh()
    mu = gaussian_mu(epsilon, DELTA)
    for bound, least, priced in (
        (basic, of_basic, lambda found: found),
        (gaussian, of_gaussian, lambda found: gaussian_epsilon(found, DELTA)),
    ):
        made = best_number(canaries, mu, bound)
        runs = [gaussian_guesses(rng, canaries, made, mu).correct for _ in range(1000)]
        median = Guesses(canaries, made, int(np.median(runs)))
        assert least < priced(bound(median)) < epsilon


def test_all_right_and_all_wrong():
    assert mu_lower_bound(Guesses(100, 100, 0)) == epsilon_lower_bound(Guesses(100, 100, 0), 0) == 0
    assert mu_lower_bound(Guesses(100, 0, 0)) == 0
    few, many = (mu_lower_bound(Guesses(1000, n, n)) for n in (10, 1000))
    assert 0 < few < many < 40


def test_a_curve_is_the_envelope_of_its_points():
    """A Gaussian's own (ε, δ) pairs, tightly spaced, refute what the Gaussian does."""
    from torch_dpbayes.accounting.gaussian import gaussian_delta

    mu = 1.0
    epsilons = np.linspace(0, 12, 2000)
    deltas = np.array([gaussian_delta(mu, e) for e in epsilons])
    y = np.linspace(1e-6, 1 - 1e-6, 200)
    profile = Profile(epsilons, deltas)
    envelope = np.array([profile.least(np.array([one]))[0] for one in y])
    curve = GaussianCurves(np.array([mu])).least(y)
    assert np.all(envelope <= curve + 1e-12)
    assert envelope == pytest.approx(curve, abs=1e-5)
