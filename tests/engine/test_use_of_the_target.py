"""What of a target is not used, or was used before, is said with the number that changes it."""

import logging
import math
from functools import partial

import pytest
import torch
from support.steps import train
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes.accounting.events import GaussianDpEvent

DELTA = 1e-5


def arguments(**options):
    data = TensorDataset(torch.randn(200, 4), torch.randint(3, (200,)))
    given = {
        "module": nn.Linear(4, 3),
        "optimizer": partial(dpb.optim.DPSGLD, lr=0.05, temperature=1.0),
        "data_loader": DataLoader(data, batch_size=20),
        "max_grad_norm": 1.0,
        "target_delta": DELTA,
        "epochs": 2,
    }
    return {**given, **options}


def warnings_of(caplog):
    messages = [record.getMessage() for record in caplog.records]
    return [message for message in messages if "now draws" not in message]


@pytest.mark.parametrize(("lr", "is_said"), [(0.05, True), ("free", False), (50.0, False)])
def test_a_floor_that_the_samplers_own_noise_exceeds_is_said(lr, is_said, caplog):
    given = {k: v for k, v in arguments().items() if k not in ("target_delta", "epochs")}
    given["optimizer"] = partial(dpb.optim.DPSGLD, lr=lr, temperature=1.0)
    with caplog.at_level(logging.WARNING, logger="torch_dpbayes"):
        _, optimizer, _ = dpb.PrivacyEngine().make_private(**given, noise_multiplier=1.0)
    warnings = warnings_of(caplog)
    assert len(warnings) == is_said
    if is_said:
        assert "noise_multiplier = 1 is only a floor" in warnings[0]
        assert f"own noise is {optimizer.effective_noise_multiplier:.4g}" in warnings[0]
        assert f"lr = {optimizer.free_lr:.4g}" in warnings[0]


@pytest.mark.thorough
def test_little_left_of_a_target_is_said_and_a_share_can_be_had(caplog):
    accountant = dpb.PrivacyAccountant()
    lrs = partial(dpb.optim.DPSGLD, lr="free")
    noise = []
    with caplog.at_level(logging.WARNING, logger="torch_dpbayes"):
        for target in ({"target_epsilon": 1.5}, {"target_epsilon": 1.51}):
            made = dpb.PrivacyEngine(accountant).make_private_with_epsilon(
                **arguments(optimizer=lrs, **target)
            )
            train(*made, epochs=2)
            noise.append(made[1].noise_multiplier)
    assert noise[1] > 3 * noise[0]
    (warning,) = warnings_of(caplog)
    assert "was spent before" in warning and "additional_epsilon=" in warning

    caplog.clear()
    before = accountant.get_epsilon(DELTA)
    share = arguments(optimizer=lrs, additional_epsilon=1.5)
    planned = dpb.PrivacyEngine(accountant).plan(**share)
    with caplog.at_level(logging.WARNING, logger="torch_dpbayes"):
        made = dpb.PrivacyEngine(accountant).make_private_with_epsilon(**share)
    train(*made, epochs=2)
    assert not warnings_of(caplog)
    assert before + 1.45 < accountant.get_epsilon(DELTA) <= before + 1.5
    assert math.isclose(planned.epsilon, accountant.get_epsilon(DELTA), rel_tol=1e-3)


def test_a_share_is_a_number_beside_no_target_and_of_charges_that_add_up():
    engine = dpb.PrivacyEngine()
    with pytest.raises(ValueError, match="pass one of them"):
        engine.make_private_with_epsilon(**arguments(target_epsilon=1.0, additional_epsilon=1.0))
    with pytest.raises(TypeError, match="target_epsilon is needed"):
        engine.make_private_with_epsilon(**arguments())
    with pytest.raises(ValueError, match="epsilon"):
        engine.make_private_with_epsilon(**arguments(additional_epsilon=-1.0))
    held = dpb.PrivacyAccountant(3.0, DELTA)
    held.compose(GaussianDpEvent(9.0), adaptive=True)
    with pytest.raises(ValueError, match="its budget as a whole"):
        dpb.PrivacyEngine(held).make_private_with_epsilon(**arguments(additional_epsilon=1.0))
