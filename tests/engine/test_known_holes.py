"""What the library cannot see, as the sharp edges in docs say: none of it is "by construction"."""

import math
from functools import partial

import numpy as np
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


def step(x, y, middle=plain, collate=None, make_first=None, mode=None):
    """One step on all records: what it released in units of C, and what its accountant says."""
    torch.manual_seed(1)  # equal parameters, whatever they are
    net, accountant = Net(middle), dpb.PrivacyAccountant()
    if make_first is not None:
        make_first(net)
    start = [p.detach().clone() for p in net.parameters()]
    net, optimizer, loader = dpb.PrivacyEngine(accountant=accountant).make_private(
        module=net,
        optimizer=partial(dpb.optim.DPSGLD, lr=1.0, temperature=0.0, prior_std=math.inf),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x), collate_fn=collate),
        max_grad_norm=CLIP,
        noise_multiplier=1e-4,
        grad_sample_mode=mode,
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


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(
    "name, middle, reason",
    [
        ("autograd.Function", Identity.apply, "Identity is an autograd.Function of its own"),
        ("NumPy", through_numpy, "Net"),
        ("two decisions", two_decisions, "takes a number or a truth value"),
    ],
)
def test_what_only_a_test_has_seen_is_called_tested(name, middle, reason):
    _, summary, optimizer = step(*records(), middle)
    assert optimizer.independence.startswith("tested on made-up records: ")
    assert reason in optimizer.independence
    assert "by construction" not in summary and "tested on made-up records" in summary


@pytest.mark.parametrize("middle", [Identity.apply, through_numpy, two_decisions])
def test_isolated_records_do_without_it(middle):
    with pytest.raises(ValueError, match='grad_sample_mode="isolated"'):
        step(*records(), middle, mode="isolated")


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("middle", [plain, Identity.apply])
def test_mixing_before_the_model_is_not_seen_and_the_summary_says_so(middle):
    """One record moves the sum by more than C, as docs/sharp_edges says: a NumPy generator of
    its own hides what a collate function does, which is refused without it.
    """
    own = np.random.default_rng()

    def standardised(items):
        x, y = torch.utils.data.default_collate(items)
        # so much that two draws differ in float32
        return x - x.mean(0) + 1e-3 * own.normal(), y

    x, y = records()
    whole, summary, _ = step(x, y, middle, standardised)
    less, _, _ = step(x[1:], y[1:], middle, standardised)
    assert (whole - less).norm() > 1.01
    assert "how a batch was made of its records, before the model, is not seen" in summary
    assert "DPSGLD: records are independent" not in summary
