"""Selections against exact laws of the best of K runs, and published special cases."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats
from support.examples import examples
from support.ledgers import sampled

from torch_dpbayes import PrivacyAccountant
from torch_dpbayes.accounting import bounds, events
from torch_dpbayes.accounting.dominating_pairs import Gaussian
from torch_dpbayes.accounting.selection import Repetitions, selection_epsilon, selection_event

shapes = st.one_of(st.sampled_from([1.0, 0.0]), st.floats(-0.6, -0.01), st.floats(0.01, 1.0))
means = st.floats(0.1, 1.3).map(lambda x: 10**x)


RELATION = "add_or_remove_one"


def generating(repetitions):
    """E x^K from the probabilities themselves."""
    masses = repetitions.probabilities()
    return lambda x: np.array([masses @ value ** np.arange(1, len(masses) + 1) for value in x])


@given(mean=means, shape=shapes)
@examples(40)
def test_the_law(mean, shape):
    repetitions = Repetitions(mean, shape)
    gamma, masses = repetitions.gamma, repetitions.probabilities()
    k = np.arange(1, len(masses) + 1)
    assert masses.sum() == pytest.approx(1, abs=1e-12)
    assert masses @ k == pytest.approx(mean, rel=1e-6)
    few = np.arange(1, 6)
    if shape == 0:
        truth = stats.logser.pmf(few, 1 - gamma)
    else:
        products = [math.prod((i + shape) / (i + 1) for i in range(n)) for n in few]
        truth = (1 - gamma) ** few * products / (gamma**-shape - 1)
    assert masses[:5] == pytest.approx(truth, rel=1e-9)
    # the derivative of the generating function is the power that the bound rests on
    x = np.array([0.0, 0.3, 0.9, 1.0])
    derivative = [masses @ (k * value ** (k - 1.0)) for value in x]
    power = mean * (gamma / (gamma + (1 - gamma) * (1 - x))) ** (1 + shape)
    assert derivative == pytest.approx(power, rel=1e-6)


@pytest.mark.chance(1e-6)
def test_numbers_are_drawn_from_it():
    """5 or 6 cells each, together significant at 1e-6."""
    for repetitions in (Repetitions(3.0), Repetitions(6.0, 0.0), Repetitions(4.0, -0.5)):
        drawn = np.array([repetitions.draw() for _ in range(500)])
        masses = repetitions.probabilities()
        cells = np.append(masses[:5], masses[5:].sum())
        found = np.append([np.sum(drawn == k) for k in range(1, 6)], np.sum(drawn > 5))
        assert stats.chisquare(found, cells * len(drawn)).pvalue > 3e-7


@given(
    epsilon=st.floats(0.05, 1.5), count=st.integers(1, 3), mean=means, shape=shapes,
    data=st.data(), log_delta=st.floats(-9.0, -2.0),
)  # fmt: skip
@examples(20)
def test_any_order_of_randomised_responses(epsilon, count, mean, shape, data, log_delta):
    """The best of K by an adversary's order of all outcomes, exactly; both directions."""
    repetitions, delta = Repetitions(mean, shape), 10**log_delta
    right = special.expit(epsilon)
    outcomes = list(product([0, 1], repeat=count))
    order = data.draw(st.permutations(outcomes))
    p = np.array([math.prod(right if bit else 1 - right for bit in o) for o in order])
    q = np.array([math.prod(1 - right if bit else right for bit in o) for o in order])
    f = generating(repetitions)
    best_p, best_q = (np.diff(f(np.append(0.0, np.cumsum(m))), prepend=0.0)[1:] for m in (p, q))
    schedule = [(events.PureDpEvent(epsilon), count)]
    found = selection_epsilon(schedule, repetitions, delta)
    for one, other in ((best_p, best_q), (best_q, best_p)):
        assert np.maximum(one - math.exp(found) * other, 0).sum() <= delta
    assert found <= (2 + shape) * epsilon * count + 1e-5  # pure: Liu, Talwar 2019; P., S. 2022


def test_the_price_of_a_gaussian_is_that_of_its_trade_off_curve():
    """delta(epsilon) <= E[K] delta_M(epsilon - c), with c from T(u) = Phi(Phi^-1(u) + mu)."""
    mu, repetitions, delta = 0.7, Repetitions(20.0, 0.5), 1e-6
    gamma, u = repetitions.gamma, np.geomspace(1e-9, 1.0, 10_000)
    rate = stats.norm.cdf(stats.norm.ppf(u) + mu)
    c = 1.5 * np.log((gamma + (1 - gamma) * rate) / (gamma + (1 - gamma) * u)).max()
    truth = c + bounds.upper_epsilon({Gaussian(mu): 1}, delta / 20.0)
    found = selection_epsilon([(events.MuGaussianDpEvent(mu), 1)], repetitions, delta)
    assert truth * (1 - 1e-6) <= found <= truth * 1.001


def test_what_is_charged():
    step = sampled(1.0, 0.02)
    repetitions = Repetitions(10.0)
    epsilon = selection_epsilon([(step, 300)], repetitions, 1e-6)
    accountant = PrivacyAccountant(2 * epsilon, 1e-5)
    accountant.compose(selection_event([(step, 300)], repetitions, 1e-6, RELATION))
    assert accountant.get_epsilon(1e-6) == pytest.approx(epsilon, rel=1e-12)
    assert accountant.get_epsilon(1e-6) >= epsilon and accountant.get_epsilon(1e-7) == math.inf
    assert accountant.remaining(step) > 0
    replaced = selection_epsilon([(step, 300)], repetitions, 1e-6, "replace_one")
    assert replaced > 1.2 * epsilon
    assert selection_epsilon([], repetitions, 1e-6) == 0.0


def test_a_selection_of_people_is_about_people():
    """A user's guarantee is none for one of their records under add_or_remove_one."""
    run, repetitions = events.GaussianDpEvent(4.0), Repetitions(3.0)
    event = selection_event([(events.UserLevelDpEvent(run), 2)], repetitions, 1e-6, RELATION)
    with pytest.raises(ValueError, match="protects records"):
        PrivacyAccountant().compose(event)
    users = PrivacyAccountant(unit="user").compose(event)
    event = selection_event([(run, 2)], repetitions, 1e-6, RELATION)
    records = PrivacyAccountant().compose(event)
    assert users.get_epsilon(1e-6) == records.get_epsilon(1e-6)
    with pytest.raises(ValueError, match="users or records"):
        selection_event([(events.UserLevelDpEvent(run), 1), (run, 1)], repetitions, 1e-6, RELATION)
