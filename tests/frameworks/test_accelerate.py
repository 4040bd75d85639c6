"""accelerate moves models and optimizers of a private run; a loader that it takes over ends in an
error.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.training import recorded
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb

pytestmark = pytest.mark.slow
RECORDS, BATCH = 60, 10


def made(**options):
    data = TensorDataset(torch.randn(RECORDS, 4), torch.randint(3, (RECORDS,)))
    engine = dpb.PrivacyEngine()
    given = {
        "module": nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)),
        "optimizer": partial(dpb.optim.DPSGLD, lr=0.05),
        "data_loader": DataLoader(data, batch_size=BATCH),
        "max_grad_norm": 1.0,
        "noise_multiplier": 2.0,
    }
    return engine, *engine.make_private(**{**given, **options})


def accelerator_of(**options):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return Accelerator(cpu=True, **options)


def train(accelerator, net, optimizer, loader):
    for x, y in loader:
        with accelerator.accumulate(net):
            optimizer.zero_grad()
            x, y = x.to(accelerator.device), y.to(accelerator.device)
            accelerator.backward(F.cross_entropy(net(x), y))
            optimizer.step()


@pytest.mark.parametrize("mode", ["bookkeeping", "hooks"])
@pytest.mark.parametrize("what", ["loader", "ordinary loader", "accumulation"])
def test_what_is_replaced_ends_in_an_error(what, mode):
    accelerator = accelerator_of(
        gradient_accumulation_steps=2 if what == "accumulation" else 1,
    )
    engine, net, optimizer, loader = made(**recorded(mode))
    start = [p.detach().clone() for p in net.parameters()]
    if what == "ordinary loader":
        loader = DataLoader(loader.dataset, batch_size=BATCH, shuffle=True)
    if what in ("loader", "ordinary loader"):
        net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    else:
        net, optimizer = accelerator.prepare(net, optimizer)
    said = "accelerate|did not deliver" if what == "loader" else None
    with pytest.raises((RuntimeError, ValueError), match=said):
        train(accelerator, net, optimizer, loader)
    assert all(torch.equal(a, b) for a, b in zip(start, net.parameters()))
    assert len(engine.accountant) == 0
