"""Random allocation: its pair against quadrature of the mixtures, Poisson sampling, simulation."""

import itertools
import math
import random

import numpy as np
import pytest
from scipy import special

from torch_dpbayes.accounting import PrivacyAccountant, privacy_loss, random_allocation, renyi
from torch_dpbayes.accounting.dominating_pairs import Allocated
from torch_dpbayes.accounting.events import GaussianDpEvent
from torch_dpbayes.accounting.fft_composition import compose
from torch_dpbayes.accounting.random_allocation import RandomAllocationDpEvent, _average, _replaced


def quadrature(steps, reach):
    """Nodes of N(0, 1)^steps: the trapezoid rule."""
    x = np.linspace(-reach, reach, {2: 1201, 3: 121}[steps])
    points = np.stack(np.meshgrid(*[x] * steps, indexing="ij"), -1).reshape(-1, steps)
    weight = np.exp(-(points**2).sum(1) / 2) * ((x[1] - x[0]) / math.sqrt(2 * math.pi)) ** steps
    return points, weight


def ratios(points, noise, sign=1.0):
    """The likelihood ratio of an epoch with a record that moves the sums by ``sign`` to noise."""
    exponent = sign * points / noise - 1 / (2 * noise**2)
    return np.exp(exponent).mean(1)


@pytest.fixture(scope="module")
def replaced():
    """A noise for which the profile of a replaced record is computed once."""
    return random.SystemRandom().uniform(0.9, 2.0)


def exact_divergence(noise, epsilon):
    """Of two steps: E (f(x) + f(y))_+ / 2, over x in closed form, over y to 13 digits."""
    s, ratio = 1 / noise, math.exp(epsilon)
    y, weight = privacy_loss.pieces(np.linspace(-12.0 - s, 12.0 + s, 600), 5)
    rest = np.exp(s * y - s**2 / 2) - ratio * np.exp(-s * y - s**2 / 2)
    # from here on x is large enough
    start = (epsilon / 2 - np.arcsinh(rest * math.exp(s**2 / 2 - epsilon / 2) / 2)) / s
    inner = special.ndtr(s - start) - ratio * special.ndtr(-s - start) + rest * special.ndtr(-start)
    return float(weight @ (np.exp(-(y**2) / 2) * inner)) / math.sqrt(2 * math.pi) / 2


def test_an_added_record_costs_what_quadrature_says():
    points, weight = quadrature(2, 9.0)
    ratio, epsilon = ratios(points, 1.2), 0.5
    delta = float(weight @ np.maximum(ratio - math.exp(epsilon), 0.0))  # a removal's is smaller
    accountant = PrivacyAccountant()
    accountant.compose(RandomAllocationDpEvent(2, GaussianDpEvent(1.2)))
    assert delta * (1 - 1e-4) <= accountant.get_delta(epsilon) <= delta * (1 + 1e-3)


@pytest.mark.parametrize("little", [False, True])
def test_the_profile_of_a_replaced_record_is_never_below_the_exact_one(
    little, replaced, monkeypatch
):
    """At each epsilon at which it is computed, for between them it lies above its own chords. With
    little noise, one step alone may make the sum large.
    """
    if little:
        monkeypatch.setattr(random_allocation, "_EPSILONS", 60)
    noise = random.uniform(0.25, 0.5) if little else replaced
    epsilons, deltas = (found[:: 1 if little else 3] for found in _replaced(2, noise))
    truths = np.array([exact_divergence(noise, epsilon) for epsilon in epsilons])
    seen = truths > 1e-11
    assert seen.sum() > 20
    assert np.all(deltas >= truths * (1 - 1e-10))
    likely = truths > (1 if little else 1e-3)
    assert np.all(deltas[likely] <= truths[likely] * 1.005)


def test_the_profile_of_a_replaced_record_is_tight_far_out(replaced):
    """Between the epsilons at which it is computed, too."""
    noise = replaced
    losses, masses, _ = privacy_loss.loss_nodes(Allocated("antipodal", 2, noise), 1e-20)
    for epsilon in np.linspace(0.0, 12.0, 60):
        truth = exact_divergence(noise, epsilon)
        if truth > 1e-10:
            claimed = float(masses @ np.maximum(-np.expm1(epsilon - losses), 0.0))
            assert truth * (1 - 1e-9) <= claimed <= truth * 1.01


@pytest.mark.parametrize("kind", ["directed", "antipodal"])
def test_the_renyi_curve_is_above_the_divergences(kind):
    noise = random.uniform(0.8, 3.0)
    points, weight = quadrature(2, 10.0 + 8 / noise)
    p, q = ratios(points, noise), np.ones(len(points))
    if kind == "antipodal":
        q = ratios(points, noise, -1.0)
    orders = np.array([1.5, 2.0, 3.7, 6.0])
    found = renyi.divergences(Allocated(kind, 2, noise), orders)
    for order, bound in zip(orders, found, strict=True):
        for one, other in itertools.permutations((p, q)):
            moment = weight @ np.exp(order * np.log(one) - (order - 1) * np.log(other))
            truth = math.log(moment) / (order - 1)
            assert truth <= bound * (1 + 1e-6)
            if kind == "directed" and one is p and float(order).is_integer():
                assert bound <= truth * (1 + 1e-6) + 1e-9


def test_grids_of_many_steps_stay_small_and_above(monkeypatch):
    steps, noise = random.randint(2000, 4000), random.uniform(0.5, 0.7)
    pair = Allocated("directed", steps, noise)
    fine = max(compose({pair: 1}, r, delta=1e-6).upper_epsilon(1e-6) for r in (False, True))
    monkeypatch.setattr(random_allocation, "_MOST_VALUES", 200)
    _average.cache_clear()
    try:
        losses, masses = _average(steps, noise, 1e-12, 1e-12)
        coarse = max(compose({pair: 1}, r, delta=1e-6).upper_epsilon(1e-6) for r in (False, True))
    finally:
        _average.cache_clear()
    assert len(losses) < 600
    assert masses.sum() == pytest.approx(1.0, abs=1e-9)
    assert masses @ np.exp(losses) == pytest.approx(1.0, abs=1e-9)
    assert fine < coarse < 1.5 * fine


@pytest.mark.parametrize("neighboring", ["add_or_remove_one", "replace_one"])
def test_with_hardly_any_noise_every_step_has_the_record(neighboring):
    noise = random.uniform(0.02, 0.099)
    one = GaussianDpEvent(noise)
    epoch = RandomAllocationDpEvent(random.randint(2, 1000), one)
    alone, found = (PrivacyAccountant(neighboring=neighboring).compose(e) for e in (one, epoch))
    assert found.get_epsilon(1e-5) == alone.get_epsilon(1e-5)
