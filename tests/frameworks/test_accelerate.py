"""accelerate moves models and optimizers of a private run; a loader that it takes over ends in an
error.
"""

from functools import partial

import pytest
import torch.nn.functional as F
from support.frameworks import BATCH, made, moves_nothing
from support.training import recorded
from torch.utils.data import DataLoader

pytestmark = pytest.mark.slow


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
    accelerator = accelerator_of(gradient_accumulation_steps=2 if what == "accumulation" else 1)
    engine, net, optimizer, loader = made(**recorded(mode))
    if what == "ordinary loader":
        loader = DataLoader(loader.dataset, batch_size=BATCH, shuffle=True)
    if what in ("loader", "ordinary loader"):
        net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    else:
        net, optimizer = accelerator.prepare(net, optimizer)
    moves_nothing(partial(train, accelerator, net, optimizer, loader), engine, net)
