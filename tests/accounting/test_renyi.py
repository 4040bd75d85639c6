"""Renyi curves against dp_accounting, quadrature and the tight bound."""

import math
import random

import numpy as np
import pytest
from dp_accounting.rdp import compute_epsilon
from scipy import integrate, stats

from torch_dpbayes.accounting import renyi
from torch_dpbayes.accounting.dominating_pairs import (
    Amplified,
    BoundedRange,
    Concentrated,
    Gaussian,
    Laplace,
    Pure,
    Sampled,
)

DELTA = 1e-5


@pytest.mark.parametrize("order", [1.5, 3.0, 9.3])
@pytest.mark.parametrize(("rate", "noise"), [(0.05, 0.8), (0.5, 2.0)])
@pytest.mark.parametrize("kind", ["directed", "antipodal", "symmetric"])
def test_sampled_curves_equal_quadrature(kind, rate, noise, order):
    def mixture(x, mean):
        centered = math.log1p(-rate) + stats.norm.logpdf(x, 0.0, noise)
        return np.logaddexp(centered, math.log(rate) + stats.norm.logpdf(x, mean, noise))

    def log_p(x):
        return mixture(x, 1.0)

    def log_q(x):
        return mixture(x, -1.0) if kind == "antipodal" else stats.norm.logpdf(x, 0.0, noise)

    def moment(x, power=order):
        return np.exp(power * log_p(x) + (1 - power) * log_q(x))

    def integral(function, start, *points):
        return integrate.quad(
            function, start, 2 * order + 9 * noise, points=points or None, limit=300, epsabs=1e-14
        )[0]

    if kind == "symmetric":
        value = integral(moment, 0.5, order) + integral(lambda x: moment(x, 1 - order), 0.5)
        value += 1 - integral(lambda x: np.exp(log_p(x)) + np.exp(log_q(x)), 0.5)
    else:
        value = integral(moment, -9 * noise, 0.0, order)
    ours = renyi.curve({Sampled(kind, rate, noise): 1}, [order])[0]
    assert ours == pytest.approx(math.log(value) / (order - 1), rel=1e-7)


@pytest.mark.parametrize("order", [1.5, 9.3])
def test_a_sampled_laplace_release_costs_what_its_worse_direction_does(order):
    rate, scale = 0.1, 0.5

    def without(x):
        return stats.laplace.pdf(x, 0.0, scale)

    def with_it(x):
        return (1 - rate) * without(x) + rate * stats.laplace.pdf(x, 1.0, scale)

    def divergence(p, q):
        value = integrate.quad(
            lambda x: p(x) ** order * q(x) ** (1 - order), -20, 21, points=[0, 1], epsabs=1e-14
        )[0]
        return math.log(value) / (order - 1)

    removed, added = divergence(with_it, without), divergence(without, with_it)
    ours = renyi.curve({Amplified(rate, Laplace(scale)): 1}, [order])[0]
    assert removed > 1.2 * added and ours == pytest.approx(removed, rel=1e-7)


def test_closed_forms():
    orders = [1.7, 4.0, 30.0]
    alpha = np.array(orders)
    np.testing.assert_allclose(renyi.curve({Gaussian(0.3): 5}, orders), 5 * alpha * 0.09 / 2)
    np.testing.assert_allclose(
        renyi.curve({Concentrated(0.2, 0.1): 3}, orders), 3 * (0.1 + 0.2 * alpha)
    )
    e = 0.8
    response = (np.exp(alpha * e) + np.exp((1 - alpha) * e)) / (1 + np.exp(e))
    np.testing.assert_allclose(renyi.curve({Pure(e): 1}, orders), np.log(response) / (alpha - 1))
    density = lambda g: np.exp((g - e) / 2) / (2 * (1 - np.exp(-e)))  # noqa: E731
    moments = [
        integrate.quad(lambda g, a=a: density(g) * np.exp((a - 1) * g), -e, e)[0] for a in orders
    ]
    np.testing.assert_allclose(
        renyi.curve({BoundedRange(e): 1}, orders), np.log(moments) / (alpha - 1)
    )


def test_conversion_equals_dp_accounting():
    divergences = renyi.curve({Sampled("directed", 0.01, 1.0): 10_000})
    assert renyi.epsilon(divergences, DELTA) == pytest.approx(
        compute_epsilon(renyi.ORDERS, divergences, DELTA)[0]
    )
    epsilon = renyi.epsilon(divergences, DELTA)
    assert renyi.delta(divergences, epsilon) == pytest.approx(DELTA)
    assert epsilon == pytest.approx(6.713, rel=1e-3)


def scattered(number, steps):
    """Different Poisson batches of Gaussian sums, of no pattern."""
    noise = [random.uniform(0.7, 4.0) for _ in range(number)]
    rate = [10 ** random.uniform(-3.5, -0.7) for _ in range(number)]
    return {Sampled("directed", q, z): steps for q, z in zip(rate, noise, strict=True)}


def test_the_order_that_is_searched_for_is_the_best_of_all():
    counts = scattered(50, random.choice([1, 20]))
    of_orders = sum(n * renyi._curve(pair, renyi.ORDERS) for pair, n in counts.items())
    for delta in (1e-10, 1e-5, 1e-2):
        found = renyi.upper_epsilon(counts, delta)
        assert found == pytest.approx(renyi.epsilon(of_orders, delta), rel=1e-9)
        exact = renyi.delta(of_orders, found)
        assert renyi.upper_delta(counts, found) == pytest.approx(exact, rel=1e-9)


def test_very_many_different_releases_cost_at_least_what_they_cost_one_by_one(monkeypatch):
    """Some are close to each other."""
    counts = scattered(30, 3)
    for pair in [*counts]:
        counts[Sampled("directed", 1.001 * pair.rate, pair.noise)] = 3
    exact = renyi.upper_epsilon(counts, 1e-5)
    monkeypatch.setattr(renyi, "_MOST_EXACT", 49)
    merged = renyi.upper_epsilon(counts, 1e-5)
    assert exact < merged < 1.03 * exact
