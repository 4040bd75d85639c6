"""Masks of dropout are as unknown as noise, though torch's seed is known."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes.noise import PrivateRandomness

RECORDS = 40


def made(mode):
    return dpb.PrivacyEngine().make_private(
        module=nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5)),
        optimizer=partial(dpb.optim.DPSGLD, lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.ones(RECORDS, 8)), batch_size=RECORDS),
        max_grad_norm=1.0,
        noise_multiplier=1.0,
        grad_sample_mode=mode,
    )


def draws(run, steps=2):
    """Which outputs each step dropped, and numbers that the loop's own loss drew."""
    net, opt, loader = run
    for _ in range(steps):
        torch.manual_seed(42)
        for (x,) in loader:
            before = torch.get_rng_state()
            out = net(x)
            noise = torch.randn_like(x)
            assert torch.equal(torch.get_rng_state(), before)
            (out.square().sum(1) + noise.sum(1) * 0).mean().backward()
            opt.step()
            yield torch.cat([(out == 0).double(), noise], 1)


@pytest.mark.parametrize("mode", ["bookkeeping", "vmap"])
def test_masks_do_not_follow_the_programs_seed(mode):
    first, second = (torch.stack([*draws(made(mode))]) for _ in range(2))
    assert 0.4 < first[..., :64].mean() < 0.6
    # 2⁻⁶⁴ for a row of masks
    assert not any(torch.equal(a, b) for a in first for b in (second[0], second[1]))
    rows = torch.cat([*first, *second])
    assert len(rows.unique(dim=0)) == len(rows)


def test_numbers_repeat_with_the_callers_generator_and_differ_between_ranks_and_steps():
    seed = torch.seed() % 2**62

    def drawn(rank):
        generator = torch.Generator().manual_seed(seed)
        randomness, found = PrivateRandomness(generator, rank), []
        for _ in range(2):
            for _ in range(2):
                with randomness(torch.device("cpu")), randomness(torch.device("cpu")):
                    found.append(torch.rand(8))
            torch.rand(1, generator=generator)  # a release
        return torch.stack(found)

    assert torch.equal(drawn(0), drawn(0))
    assert len(torch.cat([drawn(0), drawn(1)]).unique(dim=0)) == 8


def test_an_error_gives_the_programs_stream_back():
    before, randomness = torch.get_rng_state(), PrivateRandomness()
    with pytest.raises(KeyError), randomness(torch.device("cpu")):
        torch.rand(3)
        raise KeyError
    assert torch.equal(torch.get_rng_state(), before)
    assert not copy.deepcopy(randomness)._streams
