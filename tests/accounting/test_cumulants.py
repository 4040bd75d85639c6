"""Bounds against an oracle without a grid, and against themselves: to epsilon and back."""

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from scipy import special, stats
from support.cumulants import true_delta
from support.examples import examples

from torch_dpbayes import PrivacyAccountant
from torch_dpbayes.accounting import bounds
from torch_dpbayes.accounting.dominating_pairs import BoundedRange, Gaussian, Pure, Sampled
from torch_dpbayes.accounting.events import GaussianDpEvent, PoissonSampledDpEvent
from torch_dpbayes.accounting.fft_composition import compose

rates = st.floats(-3.0, -0.05).map(lambda x: 10**x)
noises = st.floats(-0.3, 1.0).map(lambda x: 10**x)
losses = st.floats(-2.0, 0.3).map(lambda x: 10**x)
smooth_pair = st.one_of(
    st.builds(Sampled, st.sampled_from(["directed", "antipodal"]), rates, noises),
    st.builds(Gaussian, losses),
)
any_pair = st.one_of(smooth_pair, st.builds(Pure, losses), st.builds(BoundedRange, losses))
deltas = st.floats(-29.5, -2.0).map(lambda x: 10**x)


@pytest.mark.thorough
@given(
    history=st.lists(st.tuples(smooth_pair, st.integers(5, 3000)), min_size=1, max_size=2),
    delta=deltas,
)
@examples(12)
def test_bounds_meet_the_integral_over_the_cumulant(history, delta):
    counts = dict(history)
    epsilon = bounds.upper_epsilon(counts, delta)
    assume(0 < epsilon < 500)
    truth = true_delta(counts, epsilon)
    assume(truth > 1e-40)  # else, or if the integral does not settle, nothing is known
    assert truth * (1 - 1e-9) <= delta <= truth * 1.01
    assert truth * (1 - 1e-9) <= bounds.upper_delta(counts, epsilon) <= truth * 1.01


@pytest.mark.thorough
@given(
    history=st.lists(st.tuples(any_pair, st.integers(1, 3000)), min_size=1, max_size=3),
    delta=deltas.filter(
        lambda delta: delta > 1e-18
    ),  # below, few releases of a small rate are loose
)
@examples(30)
def test_epsilon_and_delta_agree_with_each_other(history, delta):
    counts = dict(history)
    epsilon = bounds.upper_epsilon(counts, delta)
    assume(0 < epsilon < 1000)
    largest = math.fsum(
        n * p.epsilon for p, n in counts.items() if isinstance(p, Pure | BoundedRange)
    )
    bounded = all(isinstance(pair, Pure | BoundedRange) for pair in counts)
    assume(not bounded or epsilon < 0.999 * largest)  # at the very end delta falls as it likes
    back = bounds.upper_delta(counts, epsilon)
    assert 0.99 * delta <= back <= 1.01 * delta
    assert bounds.upper_epsilon(counts, back) == pytest.approx(epsilon, rel=1e-2)


def delta_of_one(rate, noise, epsilon):
    """Of one sampled release, removed record and added one, at 60 digits: the loss
    log(1 - q + q exp((2x - 1) / 2z²)) grows with x and passes epsilon at the point ``at``.
    """
    with mpmath.workdps(60):
        q, z, factor = mpmath.mpf(rate), mpmath.mpf(noise), mpmath.exp(mpmath.mpf(epsilon))

        def at(likelihood_ratio):
            return (1 + 2 * z**2 * mpmath.log((likelihood_ratio - 1 + q) / q)) / 2

        def mass(x, center):  # of the smaller tail, below x
            return mpmath.erfc((center - x) / z / mpmath.sqrt(2)) / 2

        x = -at(factor)
        removed = (1 - q - factor) * mass(x, 0) + q * mass(x, -1)
        if factor * (1 - q) >= 1:
            return removed
        x = at(1 / factor)
        return max(removed, (1 - factor * (1 - q)) * mass(x, 0) - factor * q * mass(x, 1))


@given(rate=rates, noise=noises, delta=deltas)
@example(rate=1e-3, noise=10**0.25, delta=1e-28)  # thirteen times more than the truth
@examples(20)
def test_one_sampled_release_meets_its_closed_form(rate, noise, delta):
    counts = {Sampled("directed", rate, noise): 1}
    epsilon = bounds.upper_epsilon(counts, delta)
    assume(0 < epsilon < 500)
    truth = delta_of_one(rate, noise, epsilon)
    back = bounds.upper_delta(counts, epsilon)
    assert truth * (1 - 1e-9) <= min(delta, back)
    assert delta < 1e-18 or max(delta, back) <= truth * 1.01


@pytest.mark.parametrize("delta", [1e-10, 1e-15, 1e-20, 1e-30])
@pytest.mark.parametrize("mu", [1e-3, 0.1, 1.0, 10.0])
def test_gaussians_at_tiny_deltas(mu, delta):
    """delta = phi(a) (R(a) - R(a + mu)), a = epsilon / mu - mu / 2, with Mills' ratio R, here as
    an integral of positive terms.
    """
    epsilon = bounds.upper_epsilon({Gaussian(mu): 1}, delta)
    a = epsilon / mu - mu / 2
    x = np.linspace(0.0, 40.0, 400_001)
    integrand = np.exp(-(x**2) / 2 - a * x) * -np.expm1(-mu * x)
    truth = stats.norm.pdf(a) * (integrand.sum() - integrand[-1] / 2) * x[1]
    assert truth * (1 - 1e-7) <= delta <= truth * (1 + 1e-5)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("count", [1, 4])
def test_one_sampled_release_at_tiny_deltas(count):
    """q times a Gaussian profile; and for four, by the oracle."""
    q, z, delta = 0.01, 2.0, 1e-30
    epsilon = bounds.upper_epsilon({Sampled("directed", q, z): count}, delta)
    if count > 1:
        truth = true_delta({Sampled("directed", q, z): count}, epsilon)
    else:
        other = math.log1p(math.expm1(epsilon) / q)
        tails = (
            special.log_ndtr(0.5 / z - other * z),
            other + special.log_ndtr(-0.5 / z - other * z),
        )
        truth = q * math.exp(tails[0]) * -math.expm1(tails[1] - tails[0])
    assert truth * (1 - 1e-8) <= delta <= truth * 1.01


def test_delta_at_epsilon_0_of_rare_releases_with_little_noise():
    """Most of a release's loss is of the size of q, and the largest one is 100,000 times that: the
    grid has to be fine beside the former.
    """
    q = 1e-4
    z = float(np.random.default_rng(torch.initial_seed()).uniform(0.45, 0.6))
    x = np.linspace(-12 * z, 1 + 12 * z, 400_001)
    one = 1 + q * np.expm1((2 * x - 1) / (2 * z**2))
    # E (w w' - 1)_+ = E w H(1 / w), H the divergence of the other release, in closed form
    least = (1 / one - 1 + q) / q
    start = 0.5 + z**2 * np.log(np.maximum(least, 1e-300))
    divergence = (1 - q - 1 / one) * special.ndtr(-start / z) + q * special.ndtr((1 - start) / z)
    divergence = np.where(least > 0, divergence, 1 - 1 / one)
    truth = float((one * divergence * stats.norm.pdf(x, scale=z)).sum() * (x[1] - x[0]))
    found = bounds.upper_delta({Sampled("directed", q, z): 2}, 0.0)
    assert truth * (1 - 1e-6) <= found <= truth * 1.001


def of_one_release(q, z, epsilon, added):
    """delta, in 60 digits, of one Poisson release with a removed or an added record."""
    with mpmath.workdps(60):
        q, z, epsilon = (mpmath.mpf(number) for number in (q, z, epsilon))
        level = mpmath.expm1(-epsilon if added else epsilon) / q
        if level <= -1:
            return 0.0 if added else float(-mpmath.expm1(epsilon))
        x = z**2 * mpmath.log1p(level) + mpmath.mpf(1) / 2
        with_record, without = mpmath.ncdf((1 - x) / z), mpmath.ncdf(-x / z)
        delta = (1 - q) * without + q * with_record - mpmath.exp(epsilon) * without
        if added:  # H(Q, P) at epsilon = 1 - e^epsilon + e^epsilon H(P, Q) at -epsilon
            delta = (1 - q) * without + q * with_record - mpmath.exp(-epsilon) * without
            delta = 1 - mpmath.exp(epsilon) + mpmath.exp(epsilon) * delta
        return float(delta)


@pytest.mark.parametrize("added", [False, True], ids=["removed", "added"])
def test_losses_of_billionths(added):
    """Tilts far above a million are the ones that decide; where the window ends, mass counts as
    delta, of which the losses themselves are only billionths.
    """
    rng = np.random.default_rng(torch.initial_seed())
    q, z = 10 ** rng.uniform(-11, -7), rng.uniform(1.0, 20.0)
    counts = {Sampled("directed", q, z): 1}
    for epsilon in (0.0, 0.3 * q / z):
        truth = of_one_release(q, z, epsilon, added)
        (found,) = compose(counts, epsilon=epsilon, reverse=added)
        assert truth * (1 - 1e-8) <= found.upper_delta(epsilon) <= truth * 1.001
    (found,) = compose(counts, delta=truth, reverse=added)
    assert epsilon * (1 - 1e-7) <= found.upper_epsilon(truth) <= epsilon * 1.01


def test_tiny_deltas_are_answered_and_smaller_ones_refused():
    step = PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0))
    accountant = PrivacyAccountant(12.0, 1e-30)
    assert 0 < accountant.remaining(step) < math.inf
    accountant.compose(step, 100)
    tiny, small = accountant.get_epsilon(1e-30), accountant.get_epsilon(1e-10)
    assert small < tiny < 12
    with pytest.raises(ValueError, match="1e-30"):
        accountant.get_epsilon(1e-31)
