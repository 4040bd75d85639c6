"""An epsilon for every moment: against adversaries that watch and stop, and against filters."""

import math
from functools import cache

import numpy as np
import pytest

from torch_dpbayes import PrivacyAccountant
from torch_dpbayes.accounting import odometer, renyi
from torch_dpbayes.accounting.dominating_pairs import Gaussian, Sampled
from torch_dpbayes.accounting.events import (
    FailureDpEvent,
    GaussianDpEvent,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    ZCDpEvent,
)

DELTA = 0.05  # large enough for simulations to see
RUNS = 4000


@pytest.mark.thorough
@pytest.mark.chance(1e-8)
def test_who_stops_at_the_best_moment_gains_nothing():
    """Of runs in which noise depends on what was seen, less after a loss that rose: an adversary
    stops as soon as the loss is above the odometer by a level, the best of some. The margin is six
    standard deviations.
    """
    generator, stds = np.random.default_rng(), (1.0, 2.5)
    curves = [renyi.curve({Gaussian(1 / z): 1}) for z in stds]
    exponents = np.array(renyi.ORDERS) - 1
    weights = np.log(odometer.weights(Gaussian(1 / stds[1]), DELTA, None)) + math.log(DELTA)

    @cache
    def shown(*counts):
        spent = counts[0] * curves[0] + counts[1] * curves[1]
        return odometer.largest(exponents, weights, spent)

    levels = np.array([0.2, 0.5, 1.0, 1.5, 2.0])
    loss, counts, rising = np.zeros(RUNS), np.zeros((RUNS, 2), dtype=int), np.zeros(RUNS, bool)
    stopped = np.full((len(levels), RUNS), -math.inf)  # the excess there
    for _ in range(60):
        z = np.where(rising, *stds)
        gain = (2 * (z * generator.standard_normal(RUNS) + 1) - 1) / (2 * z**2)
        counts[np.arange(RUNS), 1 - rising] += 1
        loss, rising = loss + gain, gain > 0
        excess = loss - [shown(*row) for row in counts.tolist()]
        first = (stopped == -math.inf) & (excess >= levels[:, None])
        stopped = np.where(first, excess, stopped)
    stopped = np.where(stopped == -math.inf, excess, stopped)
    paid = -np.expm1(-np.maximum(stopped, 0.0)).mean(axis=1)
    assert paid.max() <= DELTA + 6 * math.sqrt(DELTA * (1 - DELTA) / RUNS)


def test_the_conversion_holds_for_every_loss():
    """(1 - exp(epsilon - l))_+ <= delta * mixture, with equality somewhere."""
    generator = np.random.default_rng()
    for _ in range(20):
        first = Sampled("directed", float(generator.uniform(0.01, 0.9)), 1.5)
        spent = renyi.curve({first: 1}) * generator.integers(1, 1000)
        weights = odometer.weights(first, 1e-5, None)
        assert weights.sum() == pytest.approx(1.0) and weights.min() > 0
        exponents = np.array(renyi.ORDERS) - 1
        known = np.isfinite(spent)
        exponents, spent, weights = exponents[known], spent[known], weights[known]
        epsilon = odometer.largest(exponents, np.log(weights) + math.log(1e-5), spent)
        losses = epsilon + np.geomspace(1e-6, 30.0, 4000)
        mixture = np.exp(np.minimum(exponents * (losses[:, None] - spent), 600.0)) @ weights
        slack = 1e-5 * mixture / -np.expm1(epsilon - losses)
        assert 1 - 1e-9 <= slack.min() <= 1.001


@pytest.mark.parametrize(
    "pair",
    [Sampled("directed", 0.01, 1.0), Sampled("antipodal", 0.01, 1.0), Gaussian(0.05),
     Sampled("directed", 0.001, 0.6)],
)  # fmt: skip
def test_close_to_the_filter_on_runs_that_were_not_adaptive(pair):
    for count in (100, 1000, 10_000, 100_000):
        filtered = renyi.upper_epsilon({pair: count}, 1e-5)
        alone = odometer.epsilon({pair: count}, 1e-5, pair)
        assert filtered <= alone <= 1.15 * filtered
        budget = (filtered, 1e-5)
        assert filtered <= odometer.epsilon({pair: count}, 1e-5, pair, budget) <= alone


def test_the_accountant_shows_it():
    step = PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0))
    free = PrivacyAccountant()
    assert free.odometer(1e-5) == 0.0
    with pytest.raises(ValueError, match="delta is needed"):
        free.odometer()
    bound = PrivacyAccountant(3.0, 1e-5)
    shown = []
    for _ in range(5):
        free.compose(step, 50)
        bound.compose(step, 50, adaptive=True)
        shown.append(free.odometer(1e-5))
    assert shown == sorted(shown) and shown[0] < shown[-1]
    assert bound.odometer() == pytest.approx(shown[-1], rel=0.1)
    free.compose(GaussianDpEvent(3.0))
    assert free.odometer(1e-5) > shown[-1]
    assert free.compose(FailureDpEvent(1e-9)).odometer(1e-5) == math.inf
    assert PrivacyAccountant().compose(NonPrivateDpEvent()).odometer(1e-5) == math.inf
    concentrated = PrivacyAccountant(method="rdp").compose(ZCDpEvent(0.1, 0.0))
    assert 1 < concentrated.odometer(1e-5) < 1.5 * concentrated.get_epsilon(1e-5)
