"""A checkpoint of another network is refused before anything of it is taken over."""

from functools import partial

import pytest
import torch
from support.steps import train
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb


class Net(nn.Module):
    """One layer; two of them have the same trainable parameters whatever else they have."""

    def __init__(self, name="layer", buffer=None):
        super().__init__()
        self.add_module(name, nn.Linear(4, 3))
        self.name = name
        if buffer is not None:
            self.register_buffer("scale", torch.ones(buffer))

    def forward(self, x):
        return getattr(self, self.name)(x)


def run(net, steps):
    engine = dpb.PrivacyEngine(dpb.PrivacyAccountant(3.0, 1e-5))
    data = TensorDataset(torch.randn(40, 4), torch.randint(3, (40,)))
    net, optimizer, loader = engine.make_private(
        module=net,
        optimizer=partial(dpb.optim.DPSGLD, lr=0.1),
        data_loader=DataLoader(data, 10),
        max_grad_norm=1.0,
        noise_multiplier=4.0,
    )
    train(net, optimizer, loader, steps)
    return engine, net, optimizer


@pytest.mark.parametrize(
    ("saved", "other", "what"),
    [
        (Net(), Net(name="head"), "layer.weight"),
        (Net(buffer=(2,)), Net(), "scale"),
        (Net(), Net(buffer=(2,)), "scale"),
        (Net(buffer=(2,)), Net(buffer=(3,)), r"scale.*\[2\] in the file and \[3\]"),
    ],
)
def test_another_network_is_refused_before_charges_are_taken_over(tmp_path, saved, other, what):
    path = tmp_path / "run.pt"
    engine, net, optimizer = run(saved, 2)
    engine.save_checkpoint(path, module=net, optimizer=optimizer)
    its_engine, its_net, its_optimizer = run(other, 0)
    before = {name: value.clone() for name, value in its_net.state_dict().items()}
    with pytest.raises(ValueError, match=what):
        its_engine.load_checkpoint(path, module=its_net, optimizer=its_optimizer)
    assert len(its_engine.accountant) == 0
    assert all(torch.equal(value, before[name]) for name, value in its_net.state_dict().items())
