"""Objects say what matters: noise, temperature, what is spent, how records are kept apart."""

from functools import partial

import torch
from support import steps
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb


def run():
    data = TensorDataset(torch.randn(200, 4), torch.randint(3, (200,)))
    engine = dpb.PrivacyEngine()
    made = engine.make_private_with_epsilon(
        module=nn.Linear(4, 3),
        optimizer=partial(dpb.optim.DPSGLD, lr=0.5),
        data_loader=DataLoader(data, 20),
        max_grad_norm=1.0,
        target_epsilon=3.0,
        target_delta=1e-5,
        epochs=3,
    )
    steps.train(*made, steps=2)
    return engine, *made


def test_what_is_spent_and_how_records_are_kept_apart_is_said():
    engine, _, optimizer, loader = run()
    spent = f"epsilon = {engine.get_epsilon(1e-5):.4g} of 3 spent at delta = 1e-05"
    for thing in (engine, optimizer, engine.accountant):
        assert repr(thing).endswith(spent)
        assert f"width:{engine.get_epsilon() / 3.0:.1%}" in thing._repr_html_()
    temperature = f"temperature={optimizer.effective_temperature:.6g}"
    assert temperature in repr(optimizer) and "by construction" in repr(optimizer)
    assert "200 records" in repr(loader) and "probability 0.1" in repr(loader)
    assert "nothing is made private" in repr(dpb.PrivacyEngine())
