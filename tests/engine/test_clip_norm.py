"""Choosing a clip norm: the count that is charged, and the norms that are free."""

import gc
import math
from functools import partial

import pytest
import torch
from opacus.data_loader import DPDataLoader
from support import training
from support.refusals import refused
from support.steps import in_parts, one
from support.training import recorded
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Subset,
    TensorDataset,
    default_collate,
)

import torch_dpbayes as dpb
from torch_dpbayes.accounting.events import GaussianDpEvent, PoissonSampledDpEvent
from torch_dpbayes.engine import clip_norm


def private(rows=400, batch_size=100, data=None, accountant=None, **options):
    data = TensorDataset(torch.randn(rows, 5), torch.randn(rows, 1)) if data is None else data
    options["engine"] = dpb.PrivacyEngine(accountant)
    return training.private(nn.Linear(5, 1, bias=False), data, batch_size, **options)


share_of = partial(dpb.private_clipped_fraction, criterion=F.mse_loss)
norms_of = partial(dpb.simulate_gradient_norms, criterion=F.mse_loss)


def true_norms(net, loader):
    x, y = loader.dataset.tensors
    return (2 * (nn.functional.linear(x, net.weight) - y) * x).norm(dim=1).detach()


@pytest.mark.chance(2e-06)
def test_the_share_is_right_up_to_the_noise_that_is_charged():
    """Of full batches: N(share, (z/2B)²)."""
    net, optimizer, loader = private(batch_size=400)
    norms, z, draws = true_norms(net, loader), 40.0, 100
    bound = norms.quantile(0.3).item()
    options = {"max_grad_norm": bound, "noise_multiplier": z}
    shares = torch.tensor([share_of(net, optimizer, loader, **options) for _ in range(draws)])
    std = z / 2 / 400
    assert abs(shares.mean() - (norms > bound).double().mean()) < 5 * std / math.sqrt(draws)
    assert 0.68 < float(shares.std()) / std < 1.4
    ((event, count, label, _),) = optimizer.accountant.history
    assert (event.noise_multiplier, count, label) == (z, draws, "private_clipped_fraction")
    # one record more changed the rounding of 64 of 256 others
    norms = torch.ones(400, dtype=torch.float64)
    shares = [
        clip_norm.share_of(optimizer.release, 1e-6, 1.0, norms * (1 + r)) for r in (-1e-7, 1e-7)
    ]
    assert abs(shares[1] - shares[0]) < 1e-4


def test_a_count_leaves_training_alone_and_is_taken_again_on_the_draw_where_it_failed():
    """The criterion sees the expected number of records, whatever that draw holds."""
    net, optimizer, loader = private(rows=50, batch_size=25)
    batches, drawn = iter(loader), []
    one(net, optimizer, next(batches), F.mse_loss)

    def counting(output, target, fails=False):
        assert len(output) == len(target) == 25
        drawn.append(loader.aside().sampler_of_draws.size)
        if fails:
            raise OSError("not this one")
        return F.mse_loss(output, target)

    count = partial(share_of, net, optimizer, loader, noise_multiplier=5.0)
    for _ in range(5):
        with pytest.raises(OSError, match="not this one"):
            count(criterion=partial(counting, fails=True))
    count(criterion=counting)
    assert len(set(drawn)) == 1
    for _ in range(8):
        count(criterion=counting)
    assert len(set(drawn)) > 1
    one(net, optimizer, next(batches), F.mse_loss)
    steps, counts = optimizer.accountant.history
    assert (steps.count, counts.count) == (2, 9)
    assert counts.event == PoissonSampledDpEvent(0.5, GaussianDpEvent(5.0))


class Folding(nn.Sequential):
    """Shows its numbers to the layer as records of their own."""

    def forward(self, x):
        return super().forward(x.reshape(-1, 1)).reshape(len(x), 5).sum(1, keepdim=True)


def test_what_is_no_count_of_records_is_refused_before_a_release():
    own, folding = private(), private(module=Folding(nn.Linear(1, 1)), **recorded("hooks"))
    other, poor = private(), private(accountant=dpb.PrivacyAccountant(0.5, 1e-5))
    users = private(accountant=dpb.PrivacyAccountant(unit="user"), user_ids=range(400))
    mixing = {"criterion": lambda output, y: F.mse_loss(output / output.detach().std(), y)}
    for code, parts, options in (
        *(("argument", own, {"noise_multiplier": bad}) for bad in (0.0, math.nan)),
        *(("argument", own, {"max_grad_norm": bad}) for bad in (-1.0, math.inf)),
        ("loss-mixes", own, mixing),
        ("step-records", folding, {}),
        ("budget-exceeded", poor, {"noise_multiplier": 0.1}),
        ("argument", users, {}),
        # what does not belong together
        ("argument", (*own[:2], other[2]), {}),
        ("argument", (other[0], *own[1:]), {}),
        ("argument", (*own[:2], DataLoader(own[2].dataset)), {}),
    ):
        with refused(code):
            share_of(*parts, **{"noise_multiplier": 1.0, **options})
    runs = (own, folding, other, poor, users)
    assert not any(len(optimizer.accountant) for _, optimizer, _ in runs)


def rows(number):
    return [(torch.randn(5), torch.randn(1)) for _ in range(number)]


class Rows(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


@pytest.mark.parametrize("kind", [list, Rows, lambda of: TensorDataset(*default_collate(of))])
def test_no_loader_over_private_records_is_taken_for_a_public_one(kind):
    """Also when the private loader is gone, but for a list, of which Python keeps no note."""
    data = kind(rows(40))
    net, optimizer, loader = private(data=data, batch_size=8)
    with in_parts(loader, optimizer, 20) as parts:
        for way in (loader, parts, DPDataLoader.from_data_loader(DataLoader(data, batch_size=8))):
            with refused("data-private"):
                norms_of(net, way)
    kept = [loader, optimizer] if kind is list else []
    del loader, parts, optimizer, way
    gc.collect()  # once: it takes long late in a run
    for of in (data, Subset(Subset(data, range(9)), [1, 2]), ConcatDataset([data])):
        with refused("data-private"):
            norms_of(net, DataLoader(of, batch_size=8))
    if hasattr(data, "tensors"):
        with refused("data-private"):
            norms_of(net, DataLoader(TensorDataset(*(t[3:9] for t in data.tensors)), 3))
        for batch in (
            data.tensors,
            data[:],
            data[3:9],
            next(iter(private(data=data, batch_size=8)[2])),
        ):
            with refused("data-private"):
                norms_of(net, [batch])
    assert bool(kept) is (kind is list)
    for public in (rows(12), ConcatDataset([rows(6), rows(6)])):
        assert len(norms_of(net, DataLoader(public, batch_size=5))) == 12


def test_simulated_norms_are_the_norms_and_cost_nothing():
    net, optimizer, _ = private()
    public = DataLoader(TensorDataset(torch.randn(30, 5), torch.randn(30, 1)), batch_size=7)
    for module in (net, nn.Linear(5, 1, bias=False)):
        given = torch.ones_like(module.weight)
        module.weight.grad = given
        norms = norms_of(module, public)
        torch.testing.assert_close(norms, true_norms(module, public), rtol=1e-4, atol=1e-5)
        assert module.weight.grad is given
    assert not hasattr(module.weight, "grad_sample") and len(optimizer.accountant) == 0
