"""Choosing a clip norm: the count that is charged, and the norms that are free."""

import gc
import math
from functools import partial

import pytest
import torch
from opacus.data_loader import DPDataLoader
from opacus.utils.batch_memory_manager import BatchMemoryManager
from support.steps import one
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


def private(rows=400, batch_size=100, data=None, **accountant):
    net = nn.Linear(5, 1, bias=False)
    data = TensorDataset(torch.randn(rows, 5), torch.randn(rows, 1)) if data is None else data
    loader = DataLoader(data, batch_size=batch_size)
    engine = dpb.PrivacyEngine(dpb.PrivacyAccountant(**accountant))
    return engine, *engine.make_private(
        module=net,
        optimizer=partial(dpb.optim.DPSGLD, lr=0.1),
        data_loader=loader,
        max_grad_norm=1.0,
    )


def sampled_at(rate, z):
    return PoissonSampledDpEvent(rate, GaussianDpEvent(z))


def true_norms(net, loader):
    x, y = loader.dataset.tensors
    return (2 * (nn.functional.linear(x, net.weight) - y) * x).norm(dim=1).detach()


@pytest.mark.chance(2e-6)
@pytest.mark.parametrize("quantile", [0.3, 0.6])
def test_the_share_is_right_up_to_the_noise_that_is_charged(quantile):
    """Of full batches: N(share, (z/2B)²), whose standard deviation is seen to 20 %."""
    engine, net, optimizer, loader = private(batch_size=400)
    norms, z, draws = true_norms(net, loader), 40.0, 320
    bound = norms.quantile(quantile).item()
    options = {"max_grad_norm": bound, "noise_multiplier": z, "criterion": F.mse_loss}
    shares = torch.tensor(
        [dpb.private_clipped_fraction(net, optimizer, loader, **options) for _ in range(draws)]
    )
    std = z / 2 / 400
    assert abs(shares.mean() - (norms > bound).double().mean()) < 5 * std / math.sqrt(draws)
    assert 0.8 < float(shares.std()) / std < 1.2
    ((event, count, label, _),) = engine.accountant.history
    assert (event.noise_multiplier, count, label) == (z, draws, "private_clipped_fraction")


def test_the_count_leaves_training_alone():
    _, net, optimizer, loader = private()
    for i, batch in enumerate(loader):
        one(net, optimizer, batch, F.mse_loss)
        if i == 1:
            dpb.private_clipped_fraction(
                net, optimizer, loader, noise_multiplier=5.0, criterion=F.mse_loss
            )
    assert len(optimizer.accountant) == len(loader) + 1
    charges = [charge for charge in optimizer.accountant.history if charge.label != "DPSGLD"]
    assert [charge.event for charge in charges] == [sampled_at(0.25, 5.0)]


def test_a_criterion_that_mixes_records_is_refused():
    _, net, optimizer, loader = private()
    for mixing in (
        lambda out, y: F.mse_loss(out / out.detach().std(), y),
        lambda out, y: torch.vmap(F.mse_loss)(out, y).mean(),
    ):
        with pytest.raises(dpb.DPBayesError):
            dpb.private_clipped_fraction(
                net, optimizer, loader, noise_multiplier=5.0, criterion=mixing
            )
    assert len(optimizer.accountant) == 0


def test_a_budget_stops_it_before_anything_is_released():
    _, net, optimizer, loader = private(epsilon=0.5, delta=1e-5)
    with pytest.raises(dpb.PrivacyBudgetExceeded):
        dpb.private_clipped_fraction(
            net, optimizer, loader, noise_multiplier=0.1, criterion=F.mse_loss
        )
    assert len(optimizer.accountant) == 0


@pytest.mark.parametrize(
    "options",
    [
        {"noise_multiplier": 0.0},
        {"noise_multiplier": math.nan},
        {"max_grad_norm": -1.0},
        {"max_grad_norm": math.inf},
    ],
)
def test_bad_arguments(options):
    _, net, optimizer, loader = private()
    with pytest.raises(ValueError, match=r"must be positive|noise_multiplier is 0"):
        dpb.private_clipped_fraction(net, optimizer, loader, **{"noise_multiplier": 1.0, **options})


def test_the_three_must_belong_together():
    engine, net, _, coarse = private(batch_size=400)
    net, optimizer, loader = engine.make_private(
        module=net,
        optimizer=partial(dpb.optim.DPSGLD, lr=0.1),
        data_loader=DataLoader(coarse.dataset, batch_size=4),
        max_grad_norm=1.0,
    )
    _, other, _, _ = private()
    for arguments in (
        (net, optimizer, coarse),
        (other, optimizer, loader),
        (nn.Linear(5, 1), optimizer, loader),
        (net, optimizer, DataLoader(loader.dataset)),
    ):
        with pytest.raises(ValueError, match="make_private"):
            dpb.private_clipped_fraction(*arguments, noise_multiplier=1.0)


class Wrapped(Dataset):
    def __init__(self, inside):
        self.inside = inside

    def __len__(self):
        return len(self.inside)

    def __getitem__(self, i):
        return self.inside[i]


def rows(number):
    return [(torch.randn(5), torch.randn(1)) for _ in range(number)]


@pytest.mark.parametrize("kind", [list, Wrapped, lambda of: TensorDataset(*default_collate(of))])
def test_no_loader_over_private_records_is_taken_for_a_public_one(kind):
    """Also when the private loader is gone, but for a list, of which Python keeps no note."""
    data = kind(rows(40))

    def made():
        return private(data=data, batch_size=8)

    _, net, optimizer, loader = made()
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=20, optimizer=optimizer
    ) as parts:
        ways = [loader, parts, DPDataLoader.from_data_loader(DataLoader(data, batch_size=8))]
    kept = [loader, optimizer] if kind is list else []
    del loader, parts, optimizer
    ways += [DataLoader(of, batch_size=8) for of in (data, Subset(Subset(data, range(9)), [1, 2]))]
    assert bool(kept) is (kind is list)
    while ways:
        with pytest.raises(dpb.DPBayesError) as refused:
            dpb.simulate_gradient_norms(net, ways.pop(0), criterion=F.mse_loss)
        assert refused.value.code == "data-private"
        gc.collect()
    for public in (rows(12), Wrapped(rows(12)), ConcatDataset([rows(6), rows(6)])):
        loader = DataLoader(public, batch_size=5)
        norms = dpb.simulate_gradient_norms(net, loader, criterion=F.mse_loss)
        assert len(norms) == 12


def test_simulated_norms_are_the_norms_and_cost_nothing():
    engine, net, _, loader = private()
    public = DataLoader(TensorDataset(torch.randn(30, 5), torch.randn(30, 1)), batch_size=7)
    for module in (net, nn.Linear(5, 1, bias=False)):
        norms = dpb.simulate_gradient_norms(module, public, criterion=F.mse_loss)
        torch.testing.assert_close(norms, true_norms(module, public), rtol=1e-4, atol=1e-5)
        assert module.weight.grad is None
    assert not hasattr(module.weight, "grad_sample") and len(engine.accountant) == 0
    with pytest.raises(ValueError, match="was made private"):
        dpb.simulate_gradient_norms(net, loader)
