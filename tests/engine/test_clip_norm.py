"""Choosing a clip norm: the count that is charged, and the norms that are free."""

import gc
import math
from functools import partial

import pytest
import torch
from opacus.data_loader import DPDataLoader
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Subset,
    TensorDataset,
    default_collate,
)

import torch_dpbayes as dpb


def private(rows=400, batch_size=100, collate_fn=None, data=None, **accountant):
    net = nn.Linear(5, 1, bias=False)
    data = TensorDataset(torch.randn(rows, 5), torch.randn(rows, 1)) if data is None else data
    loader = DataLoader(data, batch_size=batch_size, collate_fn=collate_fn)
    engine = dpb.PrivacyEngine(dpb.PrivacyAccountant(**accountant))
    return engine, *engine.make_private(
        module=net,
        optimizer=partial(dpb.optim.DPSGLD, lr=0.1),
        data_loader=loader,
        max_grad_norm=1.0,
    )


def true_norms(net, loader):
    x, y = loader.dataset.tensors
    return (2 * (nn.functional.linear(x, net.weight) - y) * x).norm(dim=1).detach()


@pytest.mark.chance(2e-6)
def test_the_share_is_right_up_to_noise_that_is_charged():
    engine, net, optimizer, loader = private()
    norms = true_norms(net, loader)
    z, draws = 4.0, 100
    for quantile in (0.1, 0.5, 0.9):
        bound = norms.quantile(quantile).item()
        shares = torch.tensor(
            [
                dpb.private_clipped_fraction(
                    net,
                    optimizer,
                    loader,
                    noise_multiplier=z,
                    max_grad_norm=bound,
                    criterion=nn.functional.mse_loss,
                )
                for _ in range(draws)
            ]
        )
        truth = (norms > bound).float().mean().item()
        # each record of ±1/2 joins with probability 1/4; then the noise z/2; all over B = 100
        deviation = math.sqrt(400 * 0.25 * 0.25 * 0.75 + (z / 2) ** 2) / 100
        assert abs(shares.mean() - truth) < 5 * deviation / math.sqrt(draws)
        assert 0.6 < shares.std() / deviation < 1.4
    (charge,) = engine.accountant.history
    assert charge.count == 3 * draws and charge.label == "private_clipped_fraction"
    assert charge.event.sampling_probability == 0.25 and charge.event.event.noise_multiplier == z


@pytest.mark.chance(2e-6)
def test_the_noise_of_the_share_is_the_one_that_is_charged():
    """Of full batches: N(0, (z/2B)²) alone, whose standard deviation is seen to 20 %."""
    engine, net, optimizer, loader = private(batch_size=400)
    bound, z, draws = true_norms(net, loader).median().item(), 40.0, 320
    ask = partial(
        dpb.private_clipped_fraction,
        net,
        optimizer,
        loader,
        max_grad_norm=bound,
        noise_multiplier=z,
    )
    shares = torch.tensor([ask(criterion=nn.functional.mse_loss) for _ in range(draws)])
    assert 0.8 < float(shares.std()) / (z / 2 / 400) < 1.2
    (charge,) = engine.accountant.history
    assert charge.count == draws and charge.event.noise_multiplier == z


@pytest.mark.parametrize(
    "collated",
    [lambda records: records[:-1], lambda records: records + records[:1]],
    ids=["one left out", "one twice"],
)
def test_a_record_of_the_draw_counts_exactly_once(collated):
    with pytest.raises((ValueError, IndexError)):
        private(collate_fn=lambda records: default_collate(collated(records)))


def test_the_count_leaves_training_alone():
    _, net, optimizer, loader = private()
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
        if i == 1:
            dpb.private_clipped_fraction(
                net, optimizer, loader, noise_multiplier=5.0, criterion=nn.functional.mse_loss
            )
    assert len(optimizer.accountant) == len(loader) + 1


def test_a_criterion_that_mixes_records_is_refused():
    _, net, optimizer, loader = private()
    for mixing in (
        lambda out, y: nn.functional.mse_loss(out / out.detach().std(), y),
        lambda out, y: torch.vmap(nn.functional.mse_loss)(out, y).mean(),
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
            net, optimizer, loader, noise_multiplier=0.1, criterion=nn.functional.mse_loss
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
    _, net, optimizer, loader = private()
    _, other, _, _ = private()
    for arguments in (
        (other, optimizer, loader),
        (nn.Linear(5, 1), optimizer, loader),
        (net, optimizer, DataLoader(loader.dataset)),
    ):
        with pytest.raises(ValueError, match="make_private"):
            dpb.private_clipped_fraction(*arguments, noise_multiplier=1.0)


def test_another_private_loader_is_refused():
    engine, net, _, coarse = private(rows=400, batch_size=400)
    factory = partial(dpb.optim.DPSGLD, lr=0.1)
    net, optimizer, fine = engine.make_private(
        module=net,
        optimizer=factory,
        data_loader=DataLoader(coarse.dataset, batch_size=4),
        max_grad_norm=1.0,
    )
    with pytest.raises(ValueError, match="make_private"):
        dpb.private_clipped_fraction(net, optimizer, coarse, noise_multiplier=2.0)


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
            dpb.simulate_gradient_norms(net, ways.pop(0), criterion=nn.functional.mse_loss)
        assert refused.value.code == "data-private"
        gc.collect()
    for public in (rows(12), Wrapped(rows(12)), ConcatDataset([rows(6), rows(6)])):
        loader = DataLoader(public, batch_size=5)
        norms = dpb.simulate_gradient_norms(net, loader, criterion=nn.functional.mse_loss)
        assert len(norms) == 12


def test_simulated_norms_are_the_norms_and_cost_nothing():
    engine, net, _, loader = private()
    public = DataLoader(TensorDataset(torch.randn(30, 5), torch.randn(30, 1)), batch_size=7)
    for module in (net, nn.Linear(5, 1, bias=False)):
        norms = dpb.simulate_gradient_norms(module, public, criterion=nn.functional.mse_loss)
        torch.testing.assert_close(norms, true_norms(module, public), rtol=1e-4, atol=1e-5)
        assert module.weight.grad is None
    assert not hasattr(module.weight, "grad_sample") and len(engine.accountant) == 0
    with pytest.raises(ValueError, match="was made private"):
        dpb.simulate_gradient_norms(net, loader)
