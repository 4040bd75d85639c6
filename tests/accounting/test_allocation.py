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


def fine_epsilons(losses, masses):
    """Between the losses that matter."""
    order = np.argsort(losses)
    share = np.cumsum(masses[order])
    return np.interp([0.3, 0.6, 0.9, 0.99, 0.9999], share, losses[order])


def profile(pair, epsilon, reverse=False):
    """That of the pair's nodes, without their tails."""
    losses, masses, _ = privacy_loss.loss_nodes(pair, 1e-12)
    if reverse:
        return float(np.sum(masses * np.exp(-losses) * -np.expm1(np.minimum(epsilon + losses, 0))))
    return float(np.sum(masses * -np.expm1(np.minimum(epsilon - losses, 0))))


def quadrature(steps, reach):
    """Nodes of N(0, 1)^steps: the trapezoid rule."""
    x = np.linspace(-reach, reach, {2: 1201, 3: 121}[steps])
    points = np.stack(np.meshgrid(*[x] * steps, indexing="ij"), -1).reshape(-1, steps)
    weight = np.exp(-(points**2).sum(1) / 2) * ((x[1] - x[0]) / math.sqrt(2 * math.pi)) ** steps
    return points, weight


def margin_of(steps, truth):
    """The error of the trapezoid rule at a kink, by far."""
    return 4e-4 * truth + 2e-5 if steps == 2 else 2e-3 * truth + 1e-4


def ratios(points, noise, sign=1.0):
    """The likelihood ratio of an epoch with a record that moves the sums by ``sign`` to noise."""
    exponent = sign * points / noise - 1 / (2 * noise**2)
    return np.exp(exponent).mean(1)


@pytest.mark.parametrize("steps", [2, pytest.param(3, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("reverse", [False, True])
def test_the_profile_of_an_epoch_is_that_of_the_mixture(steps, reverse):
    noise = random.uniform(0.7, 3.0)
    points, weight = quadrature(steps, 8.0 + 1 / noise)
    w = ratios(points, noise)
    pair = Allocated("directed", steps, noise)
    losses, masses, _ = privacy_loss.loss_nodes(pair, 1e-12)
    for epsilon in fine_epsilons(losses, masses):
        epsilon = -epsilon if reverse else epsilon
        excess = 1 - w * math.exp(epsilon) if reverse else w - math.exp(epsilon)
        truth = float(weight @ np.maximum(excess, 0.0))
        found = profile(pair, epsilon, reverse)
        margin = margin_of(steps, truth)
        assert truth - margin <= found <= truth * 1.003 + margin


@pytest.mark.parametrize("steps", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_a_replaced_record_is_covered_whatever_its_gradients(steps):
    """Contributions of any length and direction in each step, the second's chosen after the first
    output.
    """
    noise = random.uniform(0.7, 3.0)
    points, weight = quadrature(steps, 8.0 + 1 / noise)
    pair = Allocated("antipodal", steps, noise)
    losses, masses, _ = privacy_loss.loss_nodes(pair, 1e-12)
    chosen, chosen_by_output = [(1.0, -1.0)] * steps, [[1.0, -1.0]] * 2
    for case in range(4):
        p, q = np.zeros(len(points)), np.zeros(len(points))
        for j in range(steps):
            mine, theirs = chosen[j]
            if case and j:  # adaptive: others where the first output is large
                (a, b), (c, d) = chosen_by_output
                mine, theirs = (np.where(points[:, 0] > 0, *move) for move in ((a, b), (c, d)))
            for total, move in ((p, mine), (q, theirs)):
                total += np.exp(move * points[:, j] / noise - np.square(move) / (2 * noise**2))
        p, q = p / steps, q / steps
        for epsilon in fine_epsilons(losses, masses):
            truth = float(weight @ np.maximum(p - math.exp(epsilon) * q, 0.0))
            assert truth <= profile(pair, epsilon) + margin_of(steps, truth)
        chosen = [(random.uniform(-1, 1), random.uniform(-1, 1)) for _ in range(steps)]
        chosen_by_output = [
            [random.choice([-1.0, 1.0, random.random()]) for _ in "ab"] for _ in "ab"
        ]


def exact_divergence(noise, epsilon):
    """Of a replaced record and two steps: E (f(x) + f(y))_+ / 2, the expectation over x in closed
    form and the one over y, of a smooth function, to 13 digits.
    """
    s, ratio = 1 / noise, math.exp(epsilon)
    y, weight = privacy_loss.pieces(np.linspace(-12.0 - s, 12.0 + s, 600), 5)
    rest = np.exp(s * y - s**2 / 2) - ratio * np.exp(-s * y - s**2 / 2)
    # from here on x is large enough
    start = (epsilon / 2 - np.arcsinh(rest * math.exp(s**2 / 2 - epsilon / 2) / 2)) / s
    inner = special.ndtr(s - start) - ratio * special.ndtr(-s - start) + rest * special.ndtr(-start)
    return float(weight @ (np.exp(-(y**2) / 2) * inner)) / math.sqrt(2 * math.pi) / 2


@pytest.mark.parametrize(("least", "most"), [(0.25, 0.5), (1.2, 100.0)])
def test_the_profile_of_a_replaced_record_is_never_below_the_exact_one(least, most):
    """At each epsilon at which it is computed, for between them it lies above its own chords. With
    little noise, one step alone may make the sum large.
    """
    noise = math.exp(random.uniform(math.log(least), math.log(most)))
    epsilons, deltas = _replaced(2, noise)
    truths = np.array([exact_divergence(noise, epsilon) for epsilon in epsilons])
    seen = truths > 1e-11
    assert seen.sum() > 50
    assert np.all(deltas >= truths * (1 - 1e-10))
    likely = truths > (1e-3 if least > 1 else 1)
    assert np.all(deltas[likely] <= truths[likely] * 1.005)


def test_the_profile_of_a_replaced_record_is_tight_far_out():
    """Between the epsilons at which it is computed, too."""
    noise = random.uniform(0.9, 2.0)
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
    fine = max(c.upper_epsilon(1e-6) for c in compose({pair: 1}, delta=1e-6))
    monkeypatch.setattr(random_allocation, "_MOST_VALUES", 200)
    _average.cache_clear()
    try:
        losses, masses = _average(steps, noise, 1e-12, 1e-12)
        coarse = max(c.upper_epsilon(1e-6) for c in compose({pair: 1}, delta=1e-6))
    finally:
        _average.cache_clear()
    assert len(losses) < 600
    assert masses.sum() == pytest.approx(1.0, abs=1e-9)
    assert masses @ np.exp(losses) == pytest.approx(1.0, abs=1e-9)
    assert fine < coarse < 1.5 * fine


@pytest.mark.parametrize("neighboring", ["add_or_remove_one", "replace_one"])
def test_with_hardly_any_noise_every_step_has_the_record(neighboring):
    noise = random.uniform(0.02, 0.099)
    one, epoch = (
        PrivacyAccountant(neighboring=neighboring).compose(event)
        for event in (
            GaussianDpEvent(noise),
            RandomAllocationDpEvent(random.randint(2, 1000), GaussianDpEvent(noise)),
        )
    )
    assert epoch.get_epsilon(1e-5) == one.get_epsilon(1e-5)
