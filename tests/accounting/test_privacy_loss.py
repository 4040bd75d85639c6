"""Privacy loss distributions against closed forms, quadrature and dp_accounting."""

import itertools
import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats
from support.examples import examples

from torch_dpbayes.accounting import bounds, fft_composition
from torch_dpbayes.accounting.dominating_pairs import Pure, Sampled
from torch_dpbayes.accounting.mixture_bounds import Near, mixtures

DELTA = 1e-5
KINDS = ("directed", "antipodal", "symmetric")

# (kind, z, q, steps, epsilon, half a unit of its last digit), dp_accounting's PLD extrapolated in
# the discretisation
REFERENCE = [
    ("directed", 1.0, 0.01, 10_000, 6.18771, 5e-6),
    ("directed", 0.8, 0.004, 100_000, 13.07032, 5e-6),
    ("directed", 20.0, 0.0055, 33_000, 0.16007, 5e-6),
    ("antipodal", 1.0, 0.01, 10_000, 10.881, 5e-4),
    ("antipodal", 0.8, 0.004, 100_000, 22.414, 5e-4),
]


@pytest.mark.parametrize(("kind", "noise", "rate", "steps", "epsilon", "half_digit"), REFERENCE)
def test_reference_values(kind, noise, rate, steps, epsilon, half_digit):
    counts = {Sampled(kind, rate, noise): steps}
    upper = bounds.upper_epsilon(counts, DELTA)
    assert epsilon - half_digit <= upper <= 1.001 * epsilon
    assert 0.99 * epsilon <= bounds.lower_epsilon(counts, DELTA) <= epsilon + half_digit


# --- the optimal composition theorem --------------------------------------------------------------


def optimal_delta(epsilons, epsilon):
    """Murtagh and Vadhan 2016, Theorem 1.5, in exact arithmetic but for the exponentials, which
    Decimal rounds at 50 digits.
    """
    with localcontext() as context:
        context.prec = 60
        total = Decimal(0)
        for signs in itertools.product((1, -1), repeat=len(epsilons)):
            loss = sum(sign * Decimal(e) for sign, e in zip(signs, epsilons, strict=True))
            mass = Decimal(1)
            for sign, e in zip(signs, epsilons, strict=True):
                mass *= (sign * Decimal(e)).exp() / (1 + (sign * Decimal(e)).exp())
            if loss > Decimal(epsilon):
                total += mass * (1 - (Decimal(epsilon) - loss).exp())
        return float(total)


def counted(epsilons):
    counts = {}
    for e in epsilons:
        counts[Pure(e)] = counts.get(Pure(e), 0) + 1
    return counts


@given(
    epsilons=st.lists(st.floats(1e-3, 3.0), min_size=1, max_size=6),
    share=st.floats(0.0, 1.1),
)
@examples(40)
def test_pure_releases_cost_what_the_optimal_composition_theorem_says(epsilons, share):
    epsilon = share * math.fsum(epsilons)
    truth = optimal_delta(epsilons, epsilon)
    bound = bounds.upper_delta(counted(epsilons), epsilon)
    # at the sum of all decimals delta is 0, where their sum in floats leaves truth at 1e-17
    assert truth * (1 - 1e-12) - 1e-15 <= bound
    # by the discretisation, which at epsilon = 0 moves delta alone
    assert bound <= optimal_delta(epsilons, epsilon * (1 - 1e-3)) * (1 + 1e-4) + 1e-12
    if 1e-9 < truth < 1:
        found = bounds.upper_epsilon(counted(epsilons), truth)
        assert optimal_delta(epsilons, found) <= truth * (1 + 1e-12)
        # by the discretisation: of epsilon, near 0 of the range of losses that the grid covers, of
        # which 1.4e-5 were seen; more where delta hardly falls
        most = epsilon + max(1e-3 * epsilon, 1e-4 * math.fsum(epsilons))
        assert found <= most or optimal_delta(epsilons, found) >= truth * (1 - 1e-5)


# --- quadrature of the hockey-stick divergence ----------------------------------------------------


def densities(kind, rate, noise):
    def normal(mean):
        return lambda x: stats.norm.pdf(x, mean, noise)

    center = normal(0.0)
    upper = lambda x: (1 - rate) * center(x) + rate * normal(1.0)(x)  # noqa: E731
    lower = lambda x: (1 - rate) * center(x) + rate * normal(-1.0)(x)  # noqa: E731
    return (upper, lower) if kind == "antipodal" else (upper, center)


def profile(kind, rate, noise, reverse, epsilons):
    """delta of one release at many epsilons by distribution functions: it is attained on a half
    line.
    """
    x = np.linspace(-16 * noise - 2, 16 * noise + 2, 200_001)
    p, q = densities(kind, rate, noise)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log(p(x)) - np.log(q(x))
    known = np.isfinite(ratio)
    crossing = np.interp(
        -epsilons if reverse else epsilons, ratio[known], x[known], left=-np.inf, right=np.inf
    )

    def tail(mean):
        return (
            stats.norm.cdf(crossing, mean, noise)
            if reverse
            else stats.norm.sf(crossing, mean, noise)
        )

    upper = (1 - rate) * tail(0.0) + rate * tail(1.0)
    lower = (1 - rate) * tail(0.0) + rate * tail(-1.0) if kind == "antipodal" else tail(0.0)
    return np.maximum(
        lower - np.exp(epsilons) * upper if reverse else upper - np.exp(epsilons) * lower, 0.0
    )


def test_adversary_who_flips_direction_beats_one_direction_but_not_the_bound():
    """Fixed-size batches: the record's two contributions may be swapped at any step, after
    seeing earlier outputs.
    """
    rate, noise = 0.3, 0.7
    p, q = densities("directed", rate, noise)
    x = np.linspace(-10.0, 11.0, 20_001)
    ratio = np.log(p(x)) - np.log(q(x))
    won = []
    for epsilon in (0.05, 0.2, 0.5, 1.0):
        values = {}
        for first, loss, density in (("remove", ratio, p(x)), ("add", -ratio, q(x))):
            remove = profile("directed", rate, noise, False, epsilon - loss)
            add = profile("directed", rate, noise, True, epsilon - loss)
            values[first, "remove"] = integrate.simpson(density * remove, x=x)
            values[first, "add"] = integrate.simpson(density * add, x=x)
            values[first, "flip"] = integrate.simpson(density * np.maximum(remove, add), x=x)
        flipping = max(values["remove", "flip"], values["add", "flip"])
        one_direction = max(values["remove", "remove"], values["add", "add"])
        won.append(flipping > one_direction * (1 + 1e-3))
        assert flipping <= bounds.upper_delta({Sampled("symmetric", rate, noise): 2}, epsilon) * (
            1 + 1e-6
        )
    assert any(won)  # so composing one direction only is refuted


def test_groups_of_close_releases_stand_for_them(monkeypatch):
    """The mean of a group, and the bound on what that changes, against each release by itself."""
    rng = np.random.default_rng(12)
    noise = np.exp(rng.uniform(math.log(0.7), math.log(5.0), 900))
    rate = np.exp(rng.uniform(math.log(0.0005), math.log(0.03), 900))
    counts = {Sampled("directed", float(q), float(z)): 1 for z, q in zip(noise, rate, strict=True)}
    found = []
    for groups in (4096, 300):
        monkeypatch.setattr("torch_dpbayes.accounting.mixture_bounds._MOST_GROUPS", groups)
        (composed,) = fft_composition.compose(counts, delta=DELTA, reverse=False)
        found.append((composed.upper_epsilon(DELTA), composed.transform.left_out))
    (exact, least), (far, more) = found
    assert least < 1e-15 < more < 1e-6
    assert exact * (1 - 1e-7) <= far <= exact * 1.02
    assert composed.round_off > more  # which counts


@given(
    kind=st.sampled_from(KINDS),
    rates=st.tuples(st.floats(1e-4, 0.9), st.floats(1e-4, 0.9)),
    noises=st.tuples(st.floats(0.1, 10.0), st.floats(0.1, 10.0)),
    place=st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0)),
    epsilon=st.floats(0.0, 5.0),
)
@examples(60)
def test_a_release_is_dominated_by_the_mixture_of_its_corners(kind, rates, noises, place, epsilon):
    """By quadrature, at one epsilon, of every kind."""
    low, high = sorted(rates)
    rate = low + place[0] * (high - low)
    noise = min(noises) + place[1] * (max(noises) - min(noises))
    ends = [(Sampled(kind, q, z), 1) for q in rates for z in noises]
    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as patch:
        patch.setattr("torch_dpbayes.accounting.mixture_bounds._WORTH", 1.0)
        near = Near(1.0, -5.0, False)
        found = mixtures([(Sampled(kind, rate, noise), 1), *ends], 1e9, 2, near)
    if found is None:  # the release is one of the corners
        return
    assert len(found.corners) <= 4
    assert found.weights.sum(axis=1) == pytest.approx(1.0)
    grid = np.array([epsilon, -epsilon])

    def both(pair):
        if pair.kind == "symmetric":  # at epsilon >= 0 the directed one, of which the rest follows
            pair = Sampled("directed", pair.rate, pair.noise)
        return profile(pair.kind, pair.rate, pair.noise, False, grid)

    bound = sum(
        w * both(found.corners[i]) for w, i in zip(found.weights[0], found.among[0], strict=True)
    )
    assert (both(Sampled(kind, rate, noise)) <= bound * (1 + 1e-4) + 1e-7).all()
