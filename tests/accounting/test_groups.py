"""People with several records: mixtures of Gaussians, and paths of neighbours."""

import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy import stats

from torch_dpbayes import PrivacyAccountant
from torch_dpbayes.accounting.events import (
    ComposedDpEvent,
    FailureDpEvent,
    GaussianDpEvent,
    MuGaussianDpEvent,
    PoissonSampledDpEvent,
    PureDpEvent,
)
from torch_dpbayes.accounting.risk import curves_of

STEP = PoissonSampledDpEvent(0.02, GaussianDpEvent(1.0))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("rate", "noise", "steps", "size"), [(0.02, 1.0, 300, 3), (0.1, 4.0, 200, 2)]
)
def test_sampled_sums_equal_dp_accountings_mixture(rate, noise, steps, size):
    accountant = PrivacyAccountant()
    accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), steps)
    joined = np.arange(size + 1)
    mixture = privacy_loss_distribution.from_mixture_gaussian_mechanism(
        noise, joined.astype(float).tolist(), stats.binom.pmf(joined, size, rate).tolist(),
        value_discretization_interval=1e-3,
    ).self_compose(steps)  # fmt: skip
    risk = accountant.risk(records_per_person=size)
    assert risk.epsilon == pytest.approx(mixture.get_epsilon_for_delta(1e-5), rel=2e-3)
    assert risk.advantage == pytest.approx(mixture.get_delta_for_epsilon(0.0), rel=2e-3)
    # a path of neighbours says less, but not much
    path = [curve.of_groups(size) for curve in curves_of(accountant._history)]
    assert risk.epsilon <= max(curve.epsilon(1e-5) for curve in path) <= 1.2 * risk.epsilon


@pytest.mark.thorough
def test_one_release_is_the_closed_form():
    """The best test of the sum is a threshold."""
    accountant = PrivacyAccountant().compose(PoissonSampledDpEvent(0.3, GaussianDpEvent(1.5)))
    there, _ = accountant.risk(records_per_person=2).curves
    x = np.linspace(-4.0, 6.0, 30)
    chances = stats.binom.pmf([0, 1, 2], 2, 0.3)
    true = sum(p * stats.norm.sf((x - j) / 1.5) for j, p in enumerate(chances))
    bound = there(stats.norm.sf(x / 1.5))
    assert np.all(true * (1 - 1e-9) <= bound) and np.all(bound <= true * 1.01)


def test_gaussians_count_as_often():
    accountant = (
        PrivacyAccountant().compose(GaussianDpEvent(4.0), 3).compose(MuGaussianDpEvent(0.2))
    )
    mu = 3 * math.sqrt(3 / 16 + 0.04)
    alone = PrivacyAccountant().compose(MuGaussianDpEvent(mu))
    found = accountant.risk(records_per_person=3)
    assert found.epsilon == pytest.approx(alone.get_epsilon(1e-5), rel=1e-3)
    assert found.epsilon >= alone.get_epsilon(1e-5) * (1 - 1e-9)


def test_parts_of_a_pair_are_no_releases_of_their_own():
    """What is (1, 1e-6)-private is (k, 1e-6 (e^k - 1) / (e - 1))-private for k records."""
    event = ComposedDpEvent([PureDpEvent(1.0), FailureDpEvent(1e-6)])
    accountant = PrivacyAccountant().compose(event)
    for size in (2, 3):
        (curve,) = accountant.risk(records_per_person=size).curves
        truth = 1e-6 * (math.e**size - 1) / (math.e - 1)
        assert truth * 0.999 <= curve(1e-15) <= truth * 1.001


def test_replaced_records_and_filters_take_the_path():
    replaced = PrivacyAccountant(neighboring="replace_one").compose(STEP, 100)
    limited = PrivacyAccountant(2.0, 1e-5).compose(STEP, 10, adaptive=True)
    for accountant in (replaced, limited):
        one = accountant.risk()
        two = accountant.risk(records_per_person=2)
        rates = np.geomspace(1e-6, 0.5, 9)
        assert two.true_positive_rates(rates) == pytest.approx(
            one.true_positive_rates(one.true_positive_rates(rates)), rel=1e-6
        )
        assert 2 * one.epsilon < two.epsilon < 4 * one.epsilon


@pytest.mark.thorough
def test_risk_grows_with_the_records_of_a_person():
    accountant = PrivacyAccountant(3.0, 1e-5).compose(STEP, 200)
    found = [accountant.risk(records_per_person=size) for size in (1, 2, 4)]
    assert found[0].epsilon < found[1].epsilon < found[2].epsilon
    assert found[0].true_positive_rate < found[1].true_positive_rate < found[2].true_positive_rate
