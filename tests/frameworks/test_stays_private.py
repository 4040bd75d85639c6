"""What a callback looks at before the first batch, and what it shows; no framework is needed."""

import pytest
import torch
from support.frameworks import DELTA, made
from support.refusals import refused
from torch.utils.data import DataLoader

import torch_dpbayes as dpb
from torch_dpbayes.frameworks.stays_private import StaysPrivate


class Callback(StaysPrivate):
    framework, pass_loader = "Framework", "pass the loader"
    pass_optimizer = "pass the optimizer"


def run(engine, optimizers, loader, delta=DELTA):
    Callback(engine, delta).require_private(loader, optimizers)


def test_what_is_replaced_is_refused_and_the_rest_is_not():
    engine, net, optimizer, loader = made()
    other_engine, _, other_optimizer, other_loader = made()
    sgd = torch.optim.SGD(net.parameters(), 0.1)
    run(engine, [optimizer], loader)
    for arguments in (
        (engine, [sgd], loader),
        (engine, [optimizer, sgd], loader),
        (engine, [], loader),
        (engine, [optimizer], DataLoader(loader.dataset)),
        (engine, [optimizer], other_loader),
        (other_engine, [optimizer], loader),
        (engine, [other_optimizer], other_loader),
    ):
        with refused("framework-replaced"):
            run(*arguments)
    with refused("budget-delta"):
        run(engine, [optimizer], loader, delta=None)
    with refused("argument-type"):
        Callback(engine.accountant)


def test_what_is_shown_is_epsilon_and_the_numbers_of_the_optimizer():
    engine = dpb.PrivacyEngine(dpb.PrivacyAccountant(9.0, DELTA))
    _, net, optimizer, _ = made(engine)
    engine.accountant.step(noise_multiplier=2.0, sample_rate=0.1)
    epsilon = engine.get_epsilon(DELTA)
    plain = torch.optim.SGD(net.parameters(), 0.1)
    assert Callback(engine, DELTA).numbers(plain) == {"epsilon": epsilon}
    assert Callback(engine).numbers(optimizer) == {
        "epsilon": epsilon,
        "clip_norm": 1.0,
        "temperature": pytest.approx(optimizer.effective_temperature),
        "noise_multiplier": 2.0,
    }
