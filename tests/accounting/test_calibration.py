"""Calibration: safe, and close."""

import dp_accounting as dpa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from torch_dpbayes.accounting import (
    PrivacyAccountant,
    get_noise_multiplier,
    get_num_steps,
    noise_multiplier_for,
)
from torch_dpbayes.accounting.events import (
    GaussianDpEvent,
    PoissonSampledDpEvent,
    UnspecifiedBatchGaussianDpEvent,
)
from torch_dpbayes.errors import ArgumentError

RELATIONS = ("add_or_remove_one", "replace_one")


@pytest.mark.thorough
@given(
    epsilon=st.floats(0.1, 20.0),
    rate=st.floats(1e-3, 1.0),
    steps=st.integers(1, 3000),
    neighboring=st.sampled_from(RELATIONS),
)
@examples(12)
def test_result_is_safe_and_close(epsilon, rate, steps, neighboring):
    target = {"target_epsilon": epsilon, "target_delta": 1e-5}
    noise = get_noise_multiplier(**target, sample_rate=rate, steps=steps, neighboring=neighboring)

    def spent(multiplier):
        accountant = PrivacyAccountant(neighboring=neighboring)
        accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(multiplier)), steps)
        return accountant.get_epsilon(1e-5)

    assert spent(noise) <= epsilon
    if noise > 0.02:
        assert spent(noise * 0.999) > epsilon


def test_history_counts():
    accountant = PrivacyAccountant(2.0, 1e-5)
    accountant.compose(PoissonSampledDpEvent(0.02, GaussianDpEvent(1.2)), 200)
    plan = {"target_epsilon": 2.0, "target_delta": 1e-5, "sample_rate": 0.01, "steps": 500}
    fresh = get_noise_multiplier(**plan)
    noise = get_noise_multiplier(**plan, history=accountant.history)
    assert noise > fresh
    accountant.compose(PoissonSampledDpEvent(0.01, GaussianDpEvent(noise)), 500)
    assert accountant.get_epsilon() <= 2.0
    with pytest.raises(ArgumentError):
        get_noise_multiplier(**{**plan, "target_epsilon": 0.5}, history=accountant.history)


def test_steps_after_a_history():
    history = [(PoissonSampledDpEvent(0.02, GaussianDpEvent(1.2)), 200)]
    plan = {"noise_multiplier": 1.0, "sample_rate": 0.01, "history": history}
    steps = get_num_steps(**plan, target_epsilon=2.0, target_delta=1e-5)

    def spent(more):
        accountant = PrivacyAccountant().compose(*history[0])
        step = PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0))
        return accountant.compose(step, steps + more).get_epsilon(1e-5)

    assert spent(0) <= 2.0 < spent(1)


def test_the_method_is_the_accountant_s():
    target = {"target_epsilon": 2.0, "target_delta": 1e-5, "steps": 9}
    noise = noise_multiplier_for(GaussianDpEvent, **target, method="rdp")
    accountant = PrivacyAccountant(method="rdp").compose(GaussianDpEvent(noise), 9)
    assert 0.998 * 2.0 <= accountant.get_epsilon(1e-5) <= 2.0


def test_any_event():
    target = {"target_epsilon": 1.0, "target_delta": 1e-5, "steps": 16}
    with pytest.raises(ArgumentError):
        noise_multiplier_for(UnspecifiedBatchGaussianDpEvent, **target)
    noise = noise_multiplier_for(
        UnspecifiedBatchGaussianDpEvent, **target, neighboring="replace_one"
    )
    assert noise == pytest.approx(dpa.get_sigma_gaussian(1.0, 1e-5) * 8.0, rel=1e-3)


@pytest.mark.parametrize("neighboring", RELATIONS)
def test_number_of_steps_is_the_largest(neighboring):
    target = {
        "noise_multiplier": 1.0,
        "sample_rate": 0.01,
        "target_epsilon": 3.0,
        "target_delta": 1e-5,
    }
    steps = get_num_steps(**target, neighboring=neighboring)
    event = PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0))
    spent = [
        PrivacyAccountant(neighboring=neighboring).compose(event, steps + k).get_epsilon(1e-5)
        for k in (0, 1)
    ]
    assert spent[0] <= 3.0 < spent[1]
    assert get_num_steps(**{**target, "noise_multiplier": 0.1}, neighboring=neighboring) == 0
