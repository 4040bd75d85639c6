"""What nobody can see or map: refused, or named on docs/models_and_losses.md."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb

CLIP = 0.05
N = 41


class Net(nn.Module):
    def __init__(self, middle):
        super().__init__()
        self.first, self.last, self.middle = nn.Linear(4, 8), nn.Linear(8, 2), middle

    def forward(self, x):
        return self.last(self.middle(torch.tanh(self.first(x))))


class Identity(torch.autograd.Function):
    """A function that keeps records apart, with a backward pass of its own."""

    generate_vmap_rule = True

    @staticmethod
    def forward(h):
        return h.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g


def through_numpy(h):
    """Mixes where a record has a value that no made-up one has."""
    values = h.detach().numpy()
    return h - h.mean(0) if ((values > 0.30) & (values < 0.30001)).any() else h


def two_decisions(h):
    """Each of them alone does nothing."""
    if h.abs().amax().item() > 0.9999 and h.abs().amin().item() < 1e-6:
        return h - h.mean(0)
    return h


def plain(h):
    return h


def step(x, y, middle=plain, collate=None, mode=None, **options):
    """One step on all records: what it released in units of C, and what its accountant says."""
    torch.manual_seed(1)  # equal parameters, whatever they are
    net, accountant = Net(middle), dpb.PrivacyAccountant()
    start = [p.detach().clone() for p in net.parameters()]
    net, optimizer, loader = dpb.PrivacyEngine(accountant=accountant).make_private(
        module=net,
        optimizer=partial(dpb.optim.DPSGLD, lr=1.0, temperature=0.0, prior_std=math.inf),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x), collate_fn=collate),
        max_grad_norm=CLIP,
        noise_multiplier=1e-4,
        grad_sample_mode=mode,
        **options,
    )
    for a, b in loader:
        optimizer.zero_grad()
        F.cross_entropy(net(a), b).backward()
        optimizer.step()
    moved = torch.cat([(s - p.detach()).flatten() for s, p in zip(start, net.parameters())])
    return moved * len(x) / CLIP, accountant.summary(), optimizer


def records():
    x = torch.randn(N, 4)
    x[0] *= 1000
    return x, torch.arange(N) % 2


@pytest.mark.parametrize("mode", ["bookkeeping", "vmap"])
@pytest.mark.parametrize("middle", [Identity.apply, through_numpy, two_decisions])
def test_what_cannot_be_mapped_is_refused(middle, mode):
    with pytest.raises(dpb.DPBayesError, match="cannot be run for one record"):
        step(*records(), middle, mode=mode)


@pytest.mark.parametrize("middle", [Identity.apply, through_numpy, two_decisions])
def test_what_cannot_be_mapped_is_vouched_for(middle):
    _, summary, optimizer = step(*records(), middle, assume_independent_records=True)
    assert optimizer.independence == "vouched for by the user (assume_independent_records=True)"
    assert "by construction" not in summary and optimizer.independence in summary
