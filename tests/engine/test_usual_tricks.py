"""What other private trainers have as options of their own is plain PyTorch here: views of a
record, standardised weights and averages of iterates, against a loop over the records.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb

BOUND = 0.5


class Views(nn.Module):
    """A network on several views of each record, ``[n, views, ...]`` to ``[n, views, classes]``."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x.flatten(0, 1)).unflatten(0, x.shape[:2])


class StandardisedConv2d(nn.Conv2d):
    def forward(self, x):
        mean = self.weight.mean((1, 2, 3), keepdim=True)
        spread = self.weight.std((1, 2, 3), keepdim=True)
        return self._conv_forward(x, (self.weight - mean) / (spread + 1e-5), self.bias)


def network(convolution=nn.Conv2d):
    head = nn.Linear(4 * 36, 3)
    # smooth: a ReLU may be set otherwise where records are summed in another order
    return nn.Sequential(convolution(1, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.Flatten(), head)


def loss_of_views(output, y):
    return F.cross_entropy(output.flatten(0, 1), y.repeat_interleave(output.shape[1]))


def mean_clipped_gradient(net, loss, x, y):
    total = torch.zeros(sum(p.numel() for p in net.parameters()))
    for k in range(len(x)):
        gradient = torch.autograd.grad(loss(net(x[k : k + 1]), y[k : k + 1]), net.parameters())
        flat = torch.cat([g.flatten() for g in gradient])
        total += flat * min(1.0, BOUND / float(flat.norm()))
    return total / len(x)


@pytest.mark.parametrize(
    ("made", "loss", "shape"),
    [
        (lambda: Views(network()), loss_of_views, (30, 2, 1, 8, 8)),
        (lambda: network(StandardisedConv2d), F.cross_entropy, (30, 1, 8, 8)),
    ],
    ids=["views", "standardised weights"],
)
def test_a_step_is_the_mean_of_the_records_clipped_gradients(made, loss, shape):
    x, y = torch.randn(shape), torch.randint(0, 3, (30,))
    net = made()
    before = nn.utils.parameters_to_vector(net.parameters()).detach().clone()
    wanted = mean_clipped_gradient(net, loss, x, y)
    net, optimizer, loader = dpb.PrivacyEngine().make_private(
        module=net,
        optimizer=partial(dpb.optim.DPSGHMC, lr=1.0, momentum=0.0, temperature=0.0, prior_std=1e9),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=30),
        max_grad_norm=BOUND,
        noise_multiplier=1e-6,
    )
    ((x, y),) = loader
    loss(net(x), y).backward()
    optimizer.step()
    moved = nn.utils.parameters_to_vector(net.parameters()).detach() - before
    torch.testing.assert_close(moved, -wanted, atol=2e-5, rtol=0)
    assert optimizer.independence.startswith("by construction")


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
