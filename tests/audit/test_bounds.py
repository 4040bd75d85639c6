"""Lower bounds from guesses: never above the truth but with the stated probability, and sharp."""

from bisect import bisect_left
from functools import cache, partial

import numpy as np
import pytest
import torch
from scipy import optimize, special, stats

from torch_dpbayes.accounting import PrivacyAccountant
from torch_dpbayes.accounting.events import (
    BoundedRangeDpEvent,
    GaussianDpEvent,
    PoissonSampledDpEvent,
)
from torch_dpbayes.accounting.gdp import gaussian_delta, gaussian_epsilon, gaussian_mu
from torch_dpbayes.accounting.risk import Profile, TradeOff
from torch_dpbayes.audit.bounds import (
    GaussianCurves,
    Guesses,
    StatedCurve,
    best_number,
    epsilon_lower_bound,
    expected_guesses,
    independent_mu_lower_bound,
    mu_lower_bound,
    refuted,
)
from torch_dpbayes.audit.result import Pricing

DELTA = 1e-5


def fresh():
    """A generator of NumPy's that the test's seed decides."""
    return np.random.default_rng(torch.randint(2**62, ()).item())


def curve_of(epsilons, deltas):
    """All of (ε_k, δ_k) hold, in both directions."""
    profile = Profile(np.asarray(epsilons), np.asarray(deltas))
    return StatedCurve([TradeOff.of_profiles(profile, profile)])


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
        assert not refuted(curve_of(epsilons, deltas), guesses, confidence).any()
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
    hypothesis = curve_of([epsilon], [delta])
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


def mixed_responses(rng, runs, canaries, probability, epsilon):
    """With this probability all coins are told by randomised response, else nothing is told: which
    guesses are right.
    """
    accuracy = np.where(rng.random((runs, 1)) < probability, special.expit(epsilon), 0.5)
    return rng.random((runs, canaries)) < accuracy


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_bounds_of_randomised_response_are_valid(epsilon):
    """Of 1,000 repeats at 95 % on each, as for Gaussians. A Gaussian that reveals as much
    of one coin has Φ(μ/2) = e^ε/(e^ε + 1), and reveals more than that of the surest ones.
    """
    rng, made = fresh(), 100
    answers = mixed_responses(rng, 1000, 300, 1.0, epsilon)
    right = answers[:, :made].sum(1)  # none is surer than another
    mu = 2 * special.ndtri(special.expit(epsilon))
    guesses = [Guesses(300, made, int(v)) for v in right]
    assert sum(basic(g, 0.0) > epsilon + 1e-9 for g in guesses) <= 87
    assert sum(gaussian(g) > mu + 1e-9 for g in guesses) <= 87
    everything = [Guesses(300, 300, int(v)) for v in answers.sum(1)]
    assert sum(independent_mu_lower_bound(g) > mu + 1e-9 for g in everything) <= 87


def test_one_run_may_tell_of_all_coins_or_of_none():
    """Gaussian differential privacy allows what no product of Gaussians does: with probability 0.16
    an answer about every coin. The bound for dependent canaries is right about it, and the one for
    releases that show each canary apart is wrong far more often than once in twenty.
    """
    mu, probability, epsilon, canaries = 1.0, 0.16, 2.0, 400
    losses = np.linspace(0.0, epsilon, 200)
    of_mixture = probability * (np.exp(epsilon) - np.exp(losses)) / (1 + np.exp(epsilon))
    assert all(of_mixture <= [gaussian_delta(mu, loss) for loss in losses])
    right = mixed_responses(fresh(), 1000, canaries, probability, epsilon).sum(1)
    valid = {v: mu_lower_bound(Guesses(canaries, canaries, v)) for v in set(right.tolist())}
    assert sum(valid[v] > mu for v in right.tolist()) <= 87
    # 160 expected, 97 in all but one of ten million tries
    wrong = sum(
        independent_mu_lower_bound(Guesses(canaries, canaries, v)) > mu for v in right.tolist()
    )
    assert wrong >= 97 and stats.binom.cdf(96, 1000, 0.16) < 1e-7


@pytest.mark.parametrize("mu", [0.5, 1.666])
def test_independent_guesses_are_bounded_validly_and_sharply(mu):
    """Half the highest, half the lowest scores: which are right depends on how many coins say "in",
    and yet no more are right than of independent guesses. At 95 % at most 87 of 1,000 too high.
    """
    rng, canaries = fresh(), 1000
    found = [gaussian_guesses(rng, canaries, canaries, mu) for _ in range(1000)]
    bounds = np.array([independent_mu_lower_bound(guesses) for guesses in found])
    assert (bounds > mu).sum() <= 87
    others = gaussian(expected_guesses(canaries, best_number(canaries, mu, gaussian), mu))
    assert np.median(bounds) > max(0.65 * mu, 1.1 * others)


def first_of(number, is_refuted):
    """How many of so many guesses have to be right."""
    return number // 2 + bisect_left(
        range(number // 2, number),
        True,
        key=lambda right: is_refuted(Guesses(1000, number, right)),
    )


@pytest.mark.parametrize(
    "event, is_gaussian",
    [
        (GaussianDpEvent(2.0), True),
        (BoundedRangeDpEvent(2.0), False),
        (PoissonSampledDpEvent(0.02, GaussianDpEvent(0.9)), False),
    ],
)
@pytest.mark.first_cases(2)
def test_an_accountants_whole_curve_is_tested(event, is_gaussian):
    """Of a Gaussian it is what its μ says. Otherwise ε at one δ says little about a coin: a draw of
    bounded range reveals more of it than the Gaussian of the same ε, and is not refuted for that.
    """
    accountant = PrivacyAccountant()
    accountant.compose(event, 40 if isinstance(event, PoissonSampledDpEvent) else 1)
    epsilon = accountant.get_epsilon(DELTA)
    mu = gaussian_mu(epsilon, DELTA)
    best = (1 + accountant.get_delta(0.0)) / 2  # accuracy of one guess
    for kind, number in (("gaussian", 250), ("independent", 1000)):
        pricing = Pricing(kind, DELTA, 0.95)
        by_mu = first_of(number, lambda guesses, price=pricing: price(guesses) > epsilon)
        by_curve = first_of(number, partial(pricing.refutes, accountant))
        if is_gaussian:
            assert abs(by_mu - by_curve) <= 1
        elif best > special.ndtr(mu / 2):
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


def test_a_curve_is_the_envelope_of_its_points():
    """A Gaussian's own (ε, δ) pairs, tightly spaced, refute what the Gaussian does."""
    mu = 1.0
    epsilons = np.linspace(0, 12, 2000)
    deltas = np.array([gaussian_delta(mu, e) for e in epsilons])
    y = np.linspace(1e-6, 1 - 1e-6, 200)
    stated = curve_of(epsilons, deltas)
    envelope = np.array([stated.least(np.array([one]))[0] for one in y])
    curve = GaussianCurves(np.array([mu])).least(y)
    assert np.all(envelope <= curve + 1e-12)
    assert envelope == pytest.approx(curve, abs=1e-5)


def test_a_stated_curve_is_that_of_the_worse_direction():
    """What is wrong with this probability is right with that one at most, under either data set."""
    accountant = PrivacyAccountant()
    accountant.compose(PoissonSampledDpEvent(0.2, GaussianDpEvent(0.7)), 3)
    curves = accountant.risk(delta=DELTA).curves
    assert len(curves) == 2
    right = np.linspace(0.05, 0.95, 50)
    wrong = StatedCurve(curves).least(right)
    assert np.max([curve(wrong) for curve in curves], axis=0) == pytest.approx(right, rel=1e-9)
    sure = TradeOff.of_lines(np.array([4.0, 0.0]), np.array([0.1, 1.0]))
    assert StatedCurve([sure]).least(np.array([0.05, 0.5, 1.0, 1.1])) == pytest.approx(
        [0.0, 0.1, 0.225, 0.225]
    )


@pytest.mark.parametrize(
    "canaries, made, correct, of_basic, of_gaussian",
    [
        (100, 25, 22, 0.9347, 1.6350),
        (1000, 250, 225, 1.8395, 3.0267),
        (1000, 1000, 700, 0.7317, 1.3720),
        (10_000, 2500, 1750, 0.7737, 1.1213),
        (10_000, 10_000, 10_000, 7.8343, 16.1110),
    ],
)
def test_figures_of_jax_privacy(canaries, made, correct, of_basic, of_gaussian):
    """``_epsilon_one_run`` and ``_epsilon_one_run_fdp`` of JAX Privacy, commit 8967688."""
    guesses = Guesses(canaries, made, correct)
    assert basic(guesses) == pytest.approx(of_basic, abs=3e-4)
    assert gaussian_epsilon(gaussian(guesses), DELTA) == pytest.approx(of_gaussian, abs=3e-4)
