"""torch's averages of iterates work on private training, and cost nothing."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb

BOUND = 0.5


def network():
    head = nn.Linear(4 * 36, 3)
    # smooth: a ReLU may be set otherwise where records are summed in another order
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.Flatten(), head)


def test_torchs_moving_average_of_the_iterates_costs_nothing():
    x, y = torch.randn(30, 1, 8, 8), torch.randint(0, 3, (30,))
    engine = dpb.PrivacyEngine()
    net, optimizer, loader = engine.make_private(
        module=network(),
        optimizer=partial(dpb.optim.DPSGLD, lr=0.1),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=10),
        max_grad_norm=BOUND,
        noise_multiplier=1.0,
    )
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    wanted = None
    for x, y in loader:
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        average.update_parameters(net)
        now = nn.utils.parameters_to_vector(net.parameters()).detach().clone()
        wanted = now if wanted is None else 0.9 * wanted + 0.1 * now
    found = nn.utils.parameters_to_vector(average.parameters())
    torch.testing.assert_close(found.detach(), wanted)
    assert average.eval()(torch.randn(2, 1, 8, 8)).shape == (2, 3)
    assert len(engine.accountant) == len(loader)
