"""Bounds on one or few releases against closed forms and integrals, however extreme the numbers."""

import itertools
import math
from contextlib import nullcontext

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, optimize, stats
from support.examples import examples
from support.ledgers import sampled

from torch_dpbayes.accounting import (
    PrivacyAccountant,
    PrivacyBudgetExceeded,
    bounds,
    events,
    fft_composition,
)
from torch_dpbayes.accounting.bounds import epsilon_by_cut
from torch_dpbayes.accounting.dominating_pairs import (
    Capped,
    Gaussian,
    Mixed,
    Pure,
    Sampled,
    directions,
)
from torch_dpbayes.accounting.fft_composition import compose
from torch_dpbayes.accounting.gdp import (
    advantage_sum,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_mu,
    sampled_epsilon,
)
from torch_dpbayes.accounting.privacy_loss import loss_nodes

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

        low, x = mpmath.mpf(0), 2 + 40 * z + 40 * z**2
        for _ in range(120):
            middle = (low + x) / 2
            low, x = (middle, x) if loss(middle) < 0 else (low, middle)
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
        (0.9, 0.03, 1e-9),
    ],
)
def test_one_release_in_closed_form(kind, rate, noise, delta):
    pair = Sampled(kind, rate, noise)
    found = sampled_epsilon(pair, delta)
    truth = float(exact_delta(pair, found))
    assert truth <= delta <= truth * (1 + 1e-8)
    assert bounds.upper_epsilon({pair: 1}, delta) == found
    for epsilon in (1e-6, 0.3, 12.0, 1e3):
        exact = float(exact_delta(pair, epsilon))
        assert exact <= bounds.upper_delta({pair: 1}, epsilon) <= exact * (1 + 1e-7) + 1e-25 * rate


@pytest.mark.parametrize("kind", ["directed", "antipodal"])
def test_one_release_of_a_truncated_batch_in_closed_form(kind):
    parts = [Sampled(kind, 2.5e-4, 1.1), Sampled("symmetric", 1.5e-4, 0.55)]
    pair = Mixed(tuple(zip((0.7, 0.3), parts, strict=True)))

    def exact(epsilon):
        return float(0.7 * exact_delta(parts[0], epsilon) + 0.3 * exact_delta(parts[1], epsilon))

    for delta in (8e-5, 1e-6):
        found = bounds.upper_epsilon({pair: 1}, delta)
        assert exact(found) <= delta <= exact(found) * (1 + 1e-8)
    for epsilon in (1e-6, 0.3, 5.0):
        assert 1 <= bounds.upper_delta({pair: 1}, epsilon) / exact(epsilon) <= 1 + 1e-7
    assert bounds.upper_epsilon({pair: 3}, 3 * exact(0.0) * (1 + 1e-9)) == 0.0


def test_what_no_attack_sees_at_delta_costs_nothing():
    counts = {Sampled("directed", 1e-6, 1.0): 20, Gaussian(1e-6): 3, Pure(1e-7): 2}
    total = advantage_sum(counts)
    assert total == pytest.approx(20e-6 * math.erf(8**-0.5) + 3e-6 * 0.39894228 + 1e-7, rel=1e-6)
    assert bounds.upper_epsilon(counts, total * (1 + 1e-9)) == 0.0
    assert bounds.upper_epsilon(counts, total / 50) > 0.0


def test_a_replaced_record_of_a_sampled_release_is_seen_at_twice_the_shift():
    """Where no attack sees an added record at delta, the best one still sees a replaced record."""
    event = sampled(1.5)
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


@pytest.mark.parametrize(
    ("rate", "noise", "delta", "share"),
    [
        (1e-7, 0.412, 3.8e-13, 0.0),
        (1e-3, 0.7, 1e-7, 0.0),
        (3.06e-5, 0.486, 1.817e-5, 0.0),
        # a little less than at epsilon = 0: on the usual grid epsilon was 1.5 % high
        (5.1e-4, 0.57, None, 3e-3),
        (5.1e-4, 0.57, None, 2e-2),
    ],
)
@pytest.mark.filterwarnings("ignore::scipy.integrate.IntegrationWarning")
def test_two_rare_releases_against_an_integral(rate, noise, delta, share):
    delta = delta or (1 - share) * two_releases(rate, noise, 0.0)
    found = bounds.upper_epsilon({Sampled("directed", rate, noise): 2}, delta)
    highest, lowest = found / (1 - (1e-4 if share else 1e-7)), found / (1 + 1e-3)  # of the truth
    assert two_releases(rate, noise, highest) <= delta <= two_releases(rate, noise, lowest)


@pytest.mark.parametrize(
    ("rate", "noise", "epsilon"), [(1e-7, 0.412, 0.05), (8.4e-7, 0.383, 1e-3), (3e-9, 0.6, 9e-6)]
)
@pytest.mark.filterwarnings("ignore::scipy.integrate.IntegrationWarning")
def test_delta_of_two_rare_releases_against_an_integral(rate, noise, epsilon):
    found = bounds.upper_delta({Sampled("directed", rate, noise): 2}, epsilon)
    truth = two_releases(rate, noise, epsilon)
    assert truth * (1 - 1e-6) <= found <= truth * 1.02


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
        one = compose(levels, reverse, delta=delta, accuracy=1e-6)
        truth = one.upper_epsilon(delta)
        found = epsilon_by_cut(levels, delta, 1.5 * truth, reverse)
        assert truth * (1 - 1e-5) <= found <= truth * (1 + 5e-3)
        assert epsilon_by_cut(levels, delta, 0.99 * truth, reverse) == 0.99 * truth


def test_large_losses_of_what_is_its_own_reverse_count_where_a_record_was_added():
    levels = {Sampled("symmetric", 1e-6, 0.3): 10, Sampled("directed", 0.3, 20.0): 100}
    one = compose(levels, True, delta=1e-9)
    fine = compose(levels, True, delta=1e-9, accuracy=1e-5)
    found = epsilon_by_cut(levels, 1e-9, one.upper_epsilon(1e-9), reverse=True)
    assert found >= fine.lower_epsilon(1e-9) > 3.0


def calls_of(monkeypatch, module, name):
    """The arguments of each call, from now on."""
    original, calls = getattr(module, name), []
    monkeypatch.setattr(module, name, lambda *a, **k: calls.append(a) or original(*a, **k))
    return calls


@pytest.mark.filterwarnings("ignore::scipy.integrate.IntegrationWarning")
def test_where_epsilon_is_0_one_direction_tells(monkeypatch):
    """At 0 delta is the total variation, which an added and a removed record share."""
    rate, noise = 1e-6, 1.0
    levels = {Sampled("directed", rate, noise): 2}
    for reverse in (False, True):
        at_0 = compose(levels, reverse, epsilon=0.0).upper_delta(0.0)
        assert at_0 == pytest.approx(two_releases(rate, noise, 0.0), rel=1e-2)
    delta = 1.02 * two_releases(rate, noise, 0.0)
    assert delta < advantage_sum(levels)
    composed = calls_of(monkeypatch, bounds, "compose")
    assert bounds.upper_epsilon(levels, delta) == 0
    assert [reverse for _, reverse in composed] == [False]
    assert 0 < bounds.upper_epsilon(levels, delta / 1.05)


def test_mixtures_stand_for_many_rare_releases_in_both_directions(monkeypatch):
    number = 160
    levels = {Sampled("directed", 1e-8 * 100 ** (i / number), 1.0): 1 for i in range(number)}
    exact = bounds.upper_epsilon(levels, delta := 0.3 * number**-0.5 * advantage_sum(levels))
    monkeypatch.setattr(bounds, "_MOST_CUT", number - 1)
    masses = calls_of(monkeypatch, fft_composition, "grid_masses")
    assert 1 - 1e-5 <= bounds.upper_epsilon(levels, delta) / exact <= 1 + 5e-3
    assert len(masses) < number


@pytest.mark.slow
def test_few_large_losses_do_not_decide_the_grid_of_many():
    """They make the moments large; epsilon was .6 % high."""
    share = np.arange(600) / 600
    rates, noises = 4e-5 * 50 ** ((np.arange(600) * 0.618) % 1), 0.86 * 22**share
    levels = {
        Sampled("directed", q, z): 7 for q, z in zip(rates.tolist(), noises.tolist(), strict=True)
    }
    truth = compose(levels, False, delta=1e-5, mixed=False, accuracy=1e-5).upper_epsilon(1e-5)
    assert truth * (1 - 3e-4) <= bounds.upper_epsilon(levels, 1e-5) <= truth * (1 + 4e-3)


@pytest.mark.parametrize("delta", [1e-6, 2e-4])
def test_losses_far_below_0_leave_the_sum_below_0(delta):
    """Where a record was added, and few releases can raise the loss by their rates only."""
    levels = {Sampled("directed", 1e-4, 0.7): 8, Sampled("directed", 3e-4, 2.0): 5}
    capped, is_reversed = bounds._of_added(levels)
    assert not is_reversed and all(pair.reverse for pair in capped)
    whole = compose(levels, True, delta=delta, accuracy=1e-6)
    short = compose(capped, False, delta=delta, accuracy=1e-6)
    assert short.upper_epsilon(delta) == pytest.approx(whole.upper_epsilon(delta), rel=2e-4)
    assert short.upper_epsilon(delta) >= whole.lower_epsilon(delta) > 0


def test_what_lies_above_the_window_of_a_cut_does_not_decide():
    """From a first bound twenty times too large it was not shown to be one."""
    levels, delta = {Sampled("directed", 1.85e-7, 0.674): 119}, 2.6e-15
    near, far = (bounds.epsilon_by_cut(levels, delta, start) for start in (0.006, 0.15))
    assert far == pytest.approx(near, rel=2e-3) and near < 0.006


@pytest.mark.parametrize("rate", [1e-9, 1e-12])
def test_a_profile_below_0_keeps_its_digits(rate):
    """delta is at least 1 - e^epsilon."""
    for delta in (None, rate / 10, rate):
        asked = {"epsilon": 0.0} if delta is None else {"delta": delta}
        found = compose({Sampled("directed", rate, 1.0): 3}, False, **asked)
        at = -np.concatenate(
            [np.geomspace(1e-15, 1e-3, 300), -found.losses[found.losses < 0][::97]]
        )
        assert (found.profile()(at) >= -np.expm1(at)).all()


# --- extreme numbers ------------------------------------------------------------------------------

SIZES = st.sampled_from(
    [1e-320, 1e-60, 1e-50, 1e-20, 1e-9, 1e-3, 0.3, 30.0, 499.0, 501.0, 1e4, 1e7, 1e50]
)
COUNTS = st.sampled_from([1, 2, 1000, 10**6, 10**9])


def exact_epsilon(event, delta):
    """Of one release, in 60 digits."""
    with mpmath.workdps(60):
        delta, size = mpmath.mpf(delta), mpmath.mpf(event.epsilon)
        if isinstance(event, events.PureDpEvent):
            found = size + mpmath.log1p(-delta * (1 + mpmath.exp(-size)))
        else:
            found = size + 2 * mpmath.log1p(-mpmath.sqrt(delta * -mpmath.expm1(-size)))
        return max(float(mpmath.re(found)), 0.0)


@pytest.mark.parametrize("delta", [1e-10, 1e-5, 0.5])
@pytest.mark.parametrize("size", [1e-320, 1e-50, 1e-9, 0.3, 2.0, 501.0, 1e4, 1e50])
@pytest.mark.parametrize("kind", [events.PureDpEvent, events.BoundedRangeDpEvent])
def test_one_release_of_bounded_loss_costs_at_least_the_truth(kind, size, delta):
    for method in ("pld", "rdp"):
        one = PrivacyAccountant(method=method).compose(kind(size))
        exact = exact_epsilon(kind(size), delta)
        assert exact * (1 - 1e-12) <= one.get_epsilon(delta)
        if method == "pld" and exact > 1e-6:
            assert one.get_epsilon(delta) <= exact * (1 + 1e-9)
        for epsilon in (1e-300, 1e300):
            assert 0 <= one.get_delta(epsilon) <= 1
        assert size < 1e4 or "epsilon" in one.summary()  # beyond all nodes


@pytest.mark.parametrize("kind", [events.PureDpEvent, events.BoundedRangeDpEvent])
@pytest.mark.parametrize(("size", "count"), [(1e-320, 10**6), (1e-30, 10**6)])
def test_losses_too_small_for_the_smallest_delta_have_a_risk(kind, size, count):
    """Of the sum, the advantage is that of an almost normal variable."""
    risk = PrivacyAccountant().compose(kind(size), count).risk(delta=1e-5)
    assert 0.2 * size * math.sqrt(count) < risk.advantage < 1e-6


def of_any_kind(size):
    noise = min(max(size, 1e-50), 1e50)
    return [
        events.GaussianDpEvent(noise),
        *(sampled(noise, rate) for rate in (0.01, 1e-320, 1 - 1e-16)),
        events.SampledWithoutReplacementDpEvent(2**53, 1, events.GaussianDpEvent(noise)),
        events.MuGaussianDpEvent(size),
        events.PureDpEvent(size),
        events.BoundedRangeDpEvent(size),
        events.FailureDpEvent(min(size, 0.5)),
    ]


EVENTS = SIZES.flatmap(lambda size: st.sampled_from(of_any_kind(size)))


@pytest.mark.slow
@given(
    releases=st.lists(st.tuples(EVENTS, COUNTS), min_size=2, max_size=3),
    method=st.sampled_from(["pld", "rdp"]),
    relation=st.sampled_from(["add_or_remove_one", "replace_one"]),
)
@examples(12)
def test_extreme_releases_together_cost_at_least_each(releases, method, relation):
    """Warnings of NumPy are errors here."""
    together = PrivacyAccountant(method=method, neighboring=relation)
    for event, count in releases:
        together.compose(event, count)
    epsilon = together.get_epsilon(1e-5)
    assert not math.isnan(epsilon)
    for event, count in releases:
        alone = PrivacyAccountant(method=method, neighboring=relation).compose(event, count)
        assert alone.get_epsilon(1e-5, return_bounds=True).lower <= epsilon * (1 + 1e-9)
    for size in (0.0, 1.0, 1e300):
        assert 0 <= together.get_delta(size) <= 1


def test_beside_a_huge_gaussian_nothing_is_amplified():
    counts = {Gaussian(1.1e4): 1, Sampled("directed", 0.9, 0.05): 9}
    mu = math.sqrt(1.1e4**2 + 9 * 20.0**2)
    assert bounds.upper_epsilon(counts, 1e-5) == pytest.approx(gaussian_epsilon(mu, 1e-5), 1e-9)
    for epsilon in (mu**2 / 2 - mu, mu**2 / 2 + 2 * mu):
        assert bounds.upper_delta(counts, epsilon) == pytest.approx(
            gaussian_delta(mu, epsilon), rel=1e-6
        )


@pytest.mark.parametrize("epsilon", [1e-300, 1e-9, 1e300])
@pytest.mark.parametrize("method", ["pld", "rdp"])
def test_extreme_budgets(epsilon, method):
    accountant = PrivacyAccountant(epsilon, 1e-5, method=method)
    for event in (
        events.GaussianDpEvent(1e50),
        events.MuGaussianDpEvent(1e-50),
        events.GaussianDpEvent(1e-3),
    ):
        fits = accountant.remaining(event) >= 2
        with nullcontext() if fits else pytest.raises(PrivacyBudgetExceeded):
            accountant.compose(event, 2)
    assert accountant.get_epsilon() <= epsilon


@pytest.mark.parametrize("method", ["pld", "rdp"])
@pytest.mark.parametrize("noise", [1e-8, 1.4e-3])
def test_laplace_noise_that_hides_nothing_has_a_large_epsilon(noise, method):
    accountant = PrivacyAccountant(method=method).compose(events.LaplaceDpEvent(noise), 5)
    assert 4.9 / noise < accountant.get_epsilon(1e-5) <= 5 / noise * (1 + 1e-9)
    accountant.summary()
    with pytest.raises(PrivacyBudgetExceeded):
        PrivacyAccountant(1.0, 1e-5, method=method).compose(events.LaplaceDpEvent(noise))


@pytest.mark.parametrize("kind", ["directed", "antipodal"])
def test_losses_below_a_cap_keep_their_mass(kind):
    q, z, most = 0.02, 0.5, 0.03
    found = loss_nodes(Capped(Sampled(kind, q, z), most, reverse=kind == "directed"), 1e-12)
    mass = 1.0  # of losses up to the cap; those of the reverse are at most -log(1 - q)
    if kind == "antipodal":

        def above_cap(x):
            up, down = (1 - q + q * math.exp((2 * s * x - 1) / (2 * z**2)) for s in (1, -1))
            return math.log(up / down) - most

        x = optimize.brentq(above_cap, 0, 3)
        mass = (1 - q) * stats.norm.cdf(x / z) + q * stats.norm.cdf((x - 1) / z)
    assert found.masses.sum() == pytest.approx(mass, rel=1e-6)
    assert found.masses[found.losses > -most].sum() < 0.99 * mass


@pytest.mark.parametrize("mu", [1e-11, 1e-9, 1e-6, 1e-3])
def test_huge_noise_is_rounded_to_the_safe_side(mu):
    """Where the two terms of delta nearly cancel, and epsilon is below a root's usual tolerance."""

    def true(mu, epsilon):
        a, b = (sign * mpmath.mpf(mu) / 2 - mpmath.mpf(epsilon) / mu for sign in (1, -1))
        return mpmath.ncdf(a) - mpmath.exp(epsilon) * mpmath.ncdf(b)

    for epsilon in (mu * np.linspace(0.1, 10, 25)).tolist():
        delta = float(true(mu, epsilon))
        assert gaussian_delta(mu, epsilon) >= true(mu, epsilon)
        assert epsilon * (1 - 1e-12) <= gaussian_epsilon(mu, delta) <= epsilon * (1 + 1e-2)
        assert gaussian_delta(mu, gaussian_epsilon(mu, delta)) <= delta
        assert mu * (1 - 1e-2) <= gaussian_mu(epsilon, delta) <= mu
