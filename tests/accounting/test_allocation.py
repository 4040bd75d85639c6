"""Random allocation: its pair against quadrature of the mixtures, Poisson sampling, simulation."""

import itertools
import math
import random

import numpy as np
import pytest
import torch
from scipy import special

from torch_dpbayes.accounting import PrivacyAccountant, privacy_loss, random_allocation, renyi
from torch_dpbayes.accounting.dominating_pairs import Allocated, dominating_pair
from torch_dpbayes.accounting.events import GaussianDpEvent, PoissonSampledDpEvent
from torch_dpbayes.accounting.fft_composition import compose
from torch_dpbayes.accounting.random_allocation import RandomAllocationDpEvent, _average, _replaced

FALSE_ALARM = 1e-6  # of a statistical test


@pytest.fixture(autouse=True)
def seeded():
    random.seed(torch.initial_seed())


def fine_epsilons(losses, masses):
    """Between the losses that matter."""
    order = np.argsort(losses)
    share = np.cumsum(masses[order])
    return np.interp([0.3, 0.6, 0.9, 0.99, 0.9999], share, losses[order])


def profile(pair, epsilon, reverse=False, tail=1e-12):
    """That of the pair's nodes, without their tails."""
    losses, masses, _ = privacy_loss.loss_nodes(pair, tail)
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


@pytest.mark.parametrize("steps", [2, 3])
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


@pytest.mark.parametrize("steps", [2, 3])
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


@pytest.mark.first_cases(2)
@pytest.mark.parametrize(
    "steps, noise, epochs",
    [
        (100, 1.0, 50),
        (1000, 0.6, 1),
        (10, 2.0, 10),
        (2, 1.0, 3),
        (1000, 1.0, 10),
        (37, 0.5, 2),
        (100, 5.0, 100),
        (3, 0.4, 1),
        (250, 0.8, 400),
        (1000, 0.4, 1),
        (600, 20.0, 1000),
    ],
)
def test_it_costs_no_more_than_poisson_sampling(steps, noise, epochs):
    allocated, poisson = PrivacyAccountant(), PrivacyAccountant()
    gaussian = GaussianDpEvent(noise)
    allocated.compose(RandomAllocationDpEvent(steps, gaussian), epochs)
    poisson.compose(PoissonSampledDpEvent(1 / steps, gaussian), steps * epochs)
    for delta in (1e-4, 1e-6, 1e-10):  # the grids add up to .05 % to the variance of the loss
        assert allocated.get_epsilon(delta) <= poisson.get_epsilon(delta) * (1 + 5e-4)


def test_a_replaced_record_costs_what_the_mixtures_do():
    """And more than with Poisson sampling, for it is in one of two batches for certain."""
    noise = random.uniform(0.7, 2.5)
    points, weight = quadrature(2, 8.0 + 1 / noise)
    p, q = ratios(points, noise), ratios(points, noise, -1.0)
    poisson = [
        np.prod((1 + np.exp(sign * points / noise - 1 / (2 * noise**2))) / 2, axis=1)
        for sign in (1.0, -1.0)
    ]
    pair = Allocated("antipodal", 2, noise)
    losses, masses, _ = privacy_loss.loss_nodes(pair, 1e-12)
    for epsilon in [0.0, *fine_epsilons(losses, masses)[:4]]:
        ratio = math.exp(max(epsilon, 0.0))
        truth = float(weight @ np.maximum(p - ratio * q, 0.0))
        margin = margin_of(2, truth)
        assert truth - margin <= profile(pair, max(epsilon, 0.0)) <= truth * 1.04 + margin
        drawn = float(weight @ np.maximum(poisson[0] - ratio * poisson[1], 0.0))
        assert drawn <= truth + margin
    at_zero = [float(weight @ np.maximum(a - b, 0.0)) for a, b in ((p, q), poisson)]
    assert at_zero[1] < at_zero[0] * 0.99


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


def test_the_profile_of_a_replaced_record_is_never_below_the_exact_one():
    """At each epsilon at which it is computed, for between them it lies above its own chords."""
    noise = math.exp(random.uniform(math.log(1.2), math.log(100.0)))
    epsilons, deltas = _replaced(2, noise)
    truths = np.array([exact_divergence(noise, epsilon) for epsilon in epsilons])
    seen = truths > 1e-11
    assert seen.sum() > 50
    assert np.all(deltas >= truths * (1 - 1e-10))
    likely = truths > 1e-3
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


@pytest.mark.parametrize("neighboring", ["add_or_remove_one", "replace_one"])
def test_one_step_is_the_gaussian(neighboring):
    noise = random.uniform(0.5, 5.0)
    truth = PrivacyAccountant(neighboring=neighboring).compose(GaussianDpEvent(noise))
    for pair in (
        dominating_pair(GaussianDpEvent(noise), neighboring),
        Allocated("antipodal" if neighboring == "replace_one" else "directed", 1, noise),
    ):
        found = max(c.upper_epsilon(1e-6) for c in compose({pair: 1}, delta=1e-6))
        assert truth.get_epsilon(1e-6) * (1 - 1e-9) <= found <= truth.get_epsilon(1e-6) * 1.002


@pytest.mark.parametrize("kind", ["directed", "antipodal"])
def test_simulated_epochs_lie_below(kind):
    """delta at the claimed epsilon by 200,000 simulated epochs of t = 40 steps."""
    steps, noise, number = 40, random.uniform(0.6, 1.5), 200_000
    accountant = PrivacyAccountant(
        neighboring="replace_one" if kind == "antipodal" else "add_or_remove_one"
    )
    accountant.compose(RandomAllocationDpEvent(steps, GaussianDpEvent(noise)))
    epsilon = accountant.get_epsilon(1e-2)
    generator = np.random.default_rng(torch.initial_seed())
    inside = 0
    for _ in range(10):
        x = noise * generator.standard_normal((number // 10, steps))
        x[np.arange(len(x)), generator.integers(steps, size=len(x))] += 1
        up = special.logsumexp(x / noise**2, axis=1)
        if kind == "antipodal":
            loss = up - special.logsumexp(-x / noise**2, axis=1)
        else:
            loss = up - 1 / (2 * noise**2) - math.log(steps)
        inside += np.sum(-np.expm1(np.minimum(epsilon - loss, 0.0)))
    # each term lies in [0, 1]: Bernstein at the largest variance
    margin = math.sqrt(2 * 1e-2 * number * -math.log(FALSE_ALARM)) - math.log(FALSE_ALARM)
    assert inside <= 1e-2 * number + margin
    assert inside >= 0.9 * 1e-2 * number - margin


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


def test_more_steps_more_noise_and_fewer_epochs_cost_less():
    noise, steps = random.uniform(0.5, 3.0), random.randint(2, 60)

    def cost(t, z, epochs):
        accountant = PrivacyAccountant()
        accountant.compose(RandomAllocationDpEvent(t, GaussianDpEvent(z)), epochs)
        return accountant.get_epsilon(1e-5)

    base = cost(steps, noise, 3)
    assert cost(2 * steps, noise, 3) < base
    assert cost(steps, 1.2 * noise, 3) < base
    assert cost(steps, noise, 2) < base < cost(steps, noise, 4)


@pytest.mark.thorough
def test_many_noise_levels_are_few_kinds():
    accountant, flat = PrivacyAccountant(), PrivacyAccountant()
    for i in range(12):
        accountant.compose(RandomAllocationDpEvent(50, GaussianDpEvent(2.0 + 0.01 * i)))
    flat.compose(RandomAllocationDpEvent(50, GaussianDpEvent(2.11)), 12)
    least = flat.get_epsilon(1e-5)
    most = PrivacyAccountant().compose(RandomAllocationDpEvent(50, GaussianDpEvent(1.98)), 12)
    assert least < accountant.get_epsilon(1e-5) < most.get_epsilon(1e-5)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("steps", [2, 37, 3000])
def test_values_far_apart_are_added_up(steps):
    """Losses from -400 to 300: W has all its probability, and mean 1."""
    losses, masses = _average(steps, random.uniform(0.05, 0.08), 1e-60, 1e-12)
    assert masses.sum() == pytest.approx(1.0, abs=1e-9)
    assert masses @ np.exp(losses) == pytest.approx(1.0, abs=1e-9)


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


def test_with_much_noise_an_epoch_is_the_gaussian_of_its_average():
    """Also where batches are no power of two: sums of 4 and of 1 are far apart on a fine grid."""
    noise = random.uniform(1000.0, 9000.0)
    epoch, gaussian = (
        PrivacyAccountant().compose(event)
        for event in (
            RandomAllocationDpEvent(5, GaussianDpEvent(noise)),
            GaussianDpEvent(noise * math.sqrt(5)),
        )
    )
    assert epoch.get_epsilon(1e-10) == pytest.approx(gaussian.get_epsilon(1e-10), rel=2e-3)
