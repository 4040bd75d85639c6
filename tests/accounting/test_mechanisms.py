"""Events of other mechanisms: against dp-accounting on both sides, closed forms and quadrature."""

import math
import random

import numpy as np
import pytest
from dp_accounting.dp_event import (
    ComposedDpEvent,
    LaplaceDpEvent,
    MixtureOfGaussiansDpEvent,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    RandomizedResponseDpEvent,
)
from scipy import special, stats

from torch_dpbayes.accounting import PrivacyAccountant, events, privacy_loss
from torch_dpbayes.accounting.dominating_pairs import dominating_pair
from torch_dpbayes.accounting.mechanisms import (
    DiscreteGaussianDpEvent,
    EpsilonDeltaDpEvent,
    ExponentialMechanismDpEvent,
    PermuteAndFlipDpEvent,
)

ADD, REPLACE = "add_or_remove_one", "replace_one"
DELTA = 1e-6


def between(low, high):
    """Even in its logarithm."""
    return math.exp(random.uniform(math.log(low), math.log(high)))


@pytest.mark.parametrize(("std", "move"), [(0.5, 4), (0.8, 4)])
def test_discrete_gaussian_noise_that_is_little_against_the_sensitivity(std, move):
    """Where dp-accounting has no finite answer: the sum over all values."""
    x = np.arange(-400, 401)
    log_masses = -(x**2) / (2 * std**2)
    log_masses -= np.log(np.exp(log_masses).sum())
    losses = (2 * move - 2 * x) * 2 * move / (2 * std**2)
    found = PrivacyAccountant(neighboring="replace_one")
    found.compose(DiscreteGaussianDpEvent(std, move, 1))
    for delta in (1e-3, DELTA):
        epsilon = found.get_epsilon(delta)
        for factor, sign in ((1.0, 1), (0.999, -1)):
            larger = losses > factor * epsilon
            truth = np.exp(log_masses[larger]) @ -np.expm1(factor * epsilon - losses[larger])
            assert sign * truth <= sign * delta * (1 + 1e-9)


def test_coordinates_with_laplace_noise_cost_no_more_than_one():
    """Two shifts that add up to one, by quadrature in the plane."""
    b, share = between(0.3, 3), random.uniform(0.1, 0.9)
    x = np.linspace(-12 * b, 12 * b + 1, 2501)
    step = x[1] - x[0]
    one = [stats.laplace.pdf(x, move, b) for move in (share, 1 - share, 0.0)]
    p, q = np.multiply.outer(one[0], one[1]), np.multiply.outer(one[2], one[2])
    losses, masses, _ = privacy_loss.loss_nodes(dominating_pair(LaplaceDpEvent(b), ADD), 0.0)
    for epsilon in np.linspace(0, 1 / b, 7):
        truth = step**2 * np.maximum(p - math.exp(epsilon) * q, 0.0).sum()
        bound = (masses * -np.expm1(np.minimum(epsilon - losses, 0.0))).sum()
        assert truth <= bound * (1 + 1e-3) + 5e-4 * step / b + 2e-5


def test_events_that_are_others():
    epsilon, delta = between(0.01, 3), between(1e-9, 1e-3)
    same = [
        (
            EpsilonDeltaDpEvent(epsilon, delta),
            ComposedDpEvent([events.PureDpEvent(epsilon), events.FailureDpEvent(delta)]),
        ),
        (EpsilonDeltaDpEvent(epsilon, 0.0), events.PureDpEvent(epsilon)),
        (ExponentialMechanismDpEvent(epsilon), events.BoundedRangeDpEvent(epsilon)),
        (PermuteAndFlipDpEvent(epsilon), events.PureDpEvent(epsilon)),
        (RandomizedResponseDpEvent(0.0, 3), NonPrivateDpEvent()),
    ]
    for one, other in same:
        assert list(events.elementary(one, 3)) == list(events.elementary(other, 3))
    for nothing in (RandomizedResponseDpEvent(1.0, 3), RandomizedResponseDpEvent(0.1, 1)):
        assert list(events.elementary(nothing)) == []
    assert list(events.elementary(MixtureOfGaussiansDpEvent(1.0, [0.0], [1.0]))) == []


@pytest.mark.parametrize("rate", [1e-6, 0.1, 1.0])
@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 0.0), (2.0, 1e-7), (60.0, 0.0)])
def test_poisson_batches_amplify_what_is_known_by_epsilon_and_delta(rate, epsilon, delta):
    """Against randomised response with a failure, sampled: its four outputs are enumerated."""
    release = EpsilonDeltaDpEvent(epsilon, delta)
    accountant = PrivacyAccountant()
    accountant.compose(PoissonSampledDpEvent(rate, release))
    with_it = np.array([delta, (1 - delta) * special.expit(epsilon), 0.0, 0.0])
    with_it[2] = 1 - with_it.sum()
    without = np.array([0.0, with_it[2], with_it[1], delta])
    sampled = (1 - rate) * without + rate * with_it
    for at in (0.0, 0.05, 0.4, 1.5):
        true = max(
            np.maximum(a - math.exp(at) * b, 0.0).sum()
            for a, b in ((sampled, without), (without, sampled))
        )
        assert accountant.get_delta(at) >= true * (1 - 1e-9)
    amplified = math.log1p(rate * math.expm1(epsilon))
    at_delta = rate * delta + 1e-12
    assert accountant.get_epsilon(at_delta) <= amplified * (1 + 1e-9)
