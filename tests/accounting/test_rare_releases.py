"""One or few releases at small rates: closed forms against 50 digits, compositions against an
integral of the closed form.
"""

import itertools
import math

import mpmath
import numpy as np
import pytest
from scipy import integrate, optimize

from torch_dpbayes.accounting import PrivacyAccountant, bounds
from torch_dpbayes.accounting.bounds import epsilon_by_cut
from torch_dpbayes.accounting.dominating_pairs import (
    Gaussian,
    Pure,
    Sampled,
    directions,
)
from torch_dpbayes.accounting.events import GaussianDpEvent, PoissonSampledDpEvent
from torch_dpbayes.accounting.fft_composition import compose
from torch_dpbayes.accounting.gdp import advantage_sum, sampled_delta, sampled_epsilon

mpmath.mp.dps = 50


def exact_delta(pair, epsilon):
    """From the definition: the half line on which the likelihood ratio passes exp(epsilon)."""
    q, z, e = (mpmath.mpf(x) for x in (pair.rate, pair.noise, epsilon))

    def above(mean, x):
        return mpmath.erfc((x - mean) / (z * mpmath.sqrt(2))) / 2

    if pair.kind == "antipodal":

        def loss(x):
            up = 1 - q + q * mpmath.exp((2 * x - 1) / (2 * z**2))
            return mpmath.log(up / (1 - q + q * mpmath.exp((-2 * x - 1) / (2 * z**2)))) - e

        low, high = mpmath.mpf(0), 2 + 40 * z + 40 * z**2
        for _ in range(120):
            low, high = (
                ((low + high) / 2, high) if loss((low + high) / 2) < 0 else (low, (low + high) / 2)
            )
        x = high
        with_it = (1 - q) * above(0, x) + q * above(1, x)
        return with_it - mpmath.exp(e) * ((1 - q) * above(0, x) + q * above(-1, x))
    x = z**2 * mpmath.log(1 + mpmath.expm1(e) / q) + mpmath.mpf(1) / 2
    removed = (1 - q) * above(0, x) + q * above(1, x) - mpmath.exp(e) * above(0, x)
    left = 1 - (1 - q) * mpmath.exp(e)
    if pair.kind == "symmetric" or left <= 0:
        return removed
    x = z**2 * mpmath.log(1 + mpmath.expm1(-e) / q) + mpmath.mpf(1) / 2
    below = 1 - above(0, x)
    added = below - mpmath.exp(e) * ((1 - q) * below + q * (1 - above(1, x)))
    return max(removed, added)


@pytest.mark.parametrize("kind", ["directed", "antipodal", "symmetric"])
@pytest.mark.parametrize(
    ("rate", "noise", "delta"),
    [
        (1e-7, 0.412, 3.8e-13),
        (1e-8, 0.3, 1e-15),
        (0.4, 0.3, 0.1),
        (0.9, 5.0, 1e-15),
    ],
)
def test_one_release_in_closed_form(kind, rate, noise, delta):
    pair = Sampled(kind, rate, noise)
    found = sampled_epsilon(pair, delta)
    truth = float(exact_delta(pair, found))
    assert truth <= delta <= truth * (1 + 1e-8)
    assert bounds.upper_epsilon({pair: 1}, delta) == found
    for epsilon in (1e-6, 0.3, 12.0):
        exact = float(exact_delta(pair, epsilon))
        assert exact <= sampled_delta(pair, epsilon) <= exact * (1 + 1e-7) + 1e-25 * rate


def test_what_no_attack_sees_at_delta_costs_nothing():
    counts = {Sampled("directed", 1e-6, 1.0): 20, Gaussian(1e-6): 3, Pure(1e-7): 2}
    total = advantage_sum(counts)
    assert total == pytest.approx(20e-6 * math.erf(8**-0.5) + 3e-6 * 0.39894228 + 1e-7, rel=1e-6)
    assert bounds.upper_epsilon(counts, total * (1 + 1e-9)) == 0.0
    assert bounds.upper_epsilon(counts, total / 50) > 0.0


def test_a_replaced_record_of_a_sampled_release_is_seen_at_twice_the_shift():
    """Where no attack sees an added record at delta, the best one still sees a replaced record."""
    event = PoissonSampledDpEvent(0.01, GaussianDpEvent(1.5))
    added, replaced = (0.01 * math.erf(shift / 1.5 / math.sqrt(8)) for shift in (1, 2))
    delta = (added + replaced) / 2
    costs = {
        relation: PrivacyAccountant(neighboring=relation).compose(event).get_epsilon(delta)
        for relation in ("add_or_remove_one", "replace_one")
    }
    assert costs["add_or_remove_one"] == 0.0 < costs["replace_one"]


def two_releases(q, z, epsilon):
    """delta of two removals: the integral of one release's delta over the loss of the other."""

    def loss(x):
        return np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * z**2))

    def one(e):
        x = z**2 * math.log1p(math.expm1(e) / q) + 0.5 if math.expm1(e) > -q else -math.inf
        above = [0.5 * math.erfc((x - mean) / (z * math.sqrt(2))) for mean in (0.0, 1.0)]
        return max(q * (above[1] - above[0]) - math.expm1(e) * above[0], 0.0)

    def integrand(x):
        center = math.exp(-(x**2) / (2 * z**2)) / (z * math.sqrt(2 * math.pi))
        return center * math.exp(loss(x)) * one(epsilon - loss(x))

    ends = np.linspace(-9 * z, 1 + 9 * z, 60)
    pieces = [
        integrate.quad(integrand, a, b, epsabs=0, epsrel=1e-9, limit=200)[0]
        for a, b in itertools.pairwise(ends)
    ]
    return math.fsum(pieces)


@pytest.mark.parametrize(("rate", "noise", "delta"), [(1e-7, 0.412, 3.8e-13), (1e-3, 0.7, 1e-7)])
@pytest.mark.filterwarnings("ignore::scipy.integrate.IntegrationWarning")
def test_two_rare_releases_against_an_integral(rate, noise, delta):
    found = bounds.upper_epsilon({Sampled("directed", rate, noise): 2}, delta)
    truth = optimize.brentq(
        lambda e: math.log(two_releases(rate, noise, e) / delta), found / 1.2, found * 1.2
    )
    assert truth * (1 - 1e-7) <= found <= truth * 1.001


@pytest.mark.parametrize("kind", ["directed", "antipodal", "symmetric"])
@pytest.mark.parametrize("delta", [1e-5, 1e-10])
@pytest.mark.parametrize(
    "others", [{(0.002, 0.7): 30}, {0.05: 1}], ids=["different rates", "a Gaussian"]
)
def test_cut_losses_against_one_grid(kind, delta, others):
    """Both are bounds; the grid is .0001 percent from the truth where it has enough digits."""
    levels = {Sampled(kind, 0.01, 1.0): 40}
    for of, count in others.items():
        levels[Sampled(kind, *of) if isinstance(of, tuple) else Gaussian(of)] = count
    for reverse in directions(levels):
        (one,) = compose(levels, delta=delta, reverse=reverse, accuracy=1e-6)
        truth = one.upper_epsilon(delta)
        found = epsilon_by_cut(levels, delta, 1.5 * truth, reverse)
        assert truth * (1 - 1e-5) <= found <= truth * (1 + 5e-3)
        assert epsilon_by_cut(levels, delta, 0.99 * truth, reverse) == 0.99 * truth


def test_large_losses_of_what_is_its_own_reverse_count_where_a_record_was_added():
    levels = {Sampled("symmetric", 1e-6, 0.3): 10, Sampled("directed", 0.3, 20.0): 100}
    (one,) = compose(levels, delta=1e-9, reverse=True)
    (fine,) = compose(levels, delta=1e-9, reverse=True, accuracy=1e-5)
    found = epsilon_by_cut(levels, 1e-9, one.upper_epsilon(1e-9), reverse=True)
    assert found >= fine.lower_epsilon(1e-9) > 3.0


@pytest.mark.parametrize("rate", [1e-9, 1e-12])
def test_a_profile_below_0_keeps_its_digits(rate):
    """delta is at least 1 - e^epsilon."""
    for delta in (None, rate / 10, rate):
        asked = {"epsilon": 0.0} if delta is None else {"delta": delta}
        (found,) = compose({Sampled("directed", rate, 1.0): 3}, reverse=False, **asked)
        at = -np.concatenate(
            [np.geomspace(1e-15, 1e-3, 300), -found.losses[found.losses < 0][::97]]
        )
        assert (found.profile()(at) >= -np.expm1(at)).all()
