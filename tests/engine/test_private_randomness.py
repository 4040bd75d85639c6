"""Masks of dropout are as unknown as noise, though torch's seed is known."""

import contextlib
import copy
from functools import partial

import pytest
import torch
from support.children import another_thread_in, in_child
from support.training import private
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes import noise
from torch_dpbayes.noise import PrivateRandomness

RECORDS = 40
CPU = torch.device("cpu")


def draws(mode, generator):
    """Which outputs each of two steps dropped, and numbers that the loop's own loss drew."""
    net, data = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5)), torch.ones(RECORDS, 8)
    options = {"optimizer": partial(dpb.optim.DPSGLD, lr=0.1, generator=generator)}
    options |= {"noise_multiplier": 1.0, "grad_sample_mode": mode}
    net, opt, loader = private(net, TensorDataset(data), RECORDS, **options)
    for _ in range(2):
        torch.manual_seed(42)
        for (x,) in loader:
            before = torch.get_rng_state()
            out = net(x)
            drawn = torch.randn_like(x)
            assert torch.equal(torch.get_rng_state(), before)
            # of values that several records make a seeded run computes metrics, too
            largest = (out.detach() - out.detach().mean(0)).abs().max()
            (out.square().sum(1) + drawn.sum(1) * 0).mean().backward()
            opt.step()
            assert largest.item() > 0
            yield torch.cat([(out == 0).double(), drawn], 1)


@pytest.mark.parametrize("is_seeded", [True, False])
@pytest.mark.parametrize("mode", ["bookkeeping", "vmap"])
def test_masks_do_not_follow_the_programs_seed(mode, is_seeded):
    runs = [torch.Generator() if is_seeded else None for _ in range(2)]
    for generator in filter(None, runs):
        generator.seed()
    rows = torch.cat([drawn for generator in runs for drawn in draws(mode, generator)])
    assert 0.4 < rows[:, :64].mean() < 0.6
    assert len(rows.unique(dim=0)) == len(rows) == 4 * RECORDS  # 2⁻⁶⁴ for two rows of masks


def test_numbers_repeat_with_the_callers_generator_and_differ_otherwise():
    seed, data = torch.seed() % 2**62, torch.rand(3)

    def drawn(rank=0, hides=data):
        noise._blocks_at.clear()  # as in another process
        generator = torch.Generator().manual_seed(seed)
        models = [PrivateRandomness(generator, rank) for _ in range(2)]
        found = []
        for _ in range(2):
            for randomness in (*models, *models):
                with randomness([CPU], [hides]), randomness([CPU]):
                    found.append(torch.rand(8))
            torch.rand(1, generator=generator)  # a release
        return torch.stack(found)

    assert torch.equal(drawn(), drawn())
    all_of_them = torch.cat([drawn(), drawn(rank=1), drawn(hides=2 * data)])
    assert len(all_of_them.unique(dim=0)) == 24


@pytest.mark.parametrize("is_broken", [True, False])
def test_a_seed_inside_is_forgotten_and_the_programs_stream_goes_on(is_broken):
    found = []
    for _ in range(2):
        before, randomness = torch.get_rng_state(), PrivateRandomness()
        with contextlib.suppress(KeyError), randomness([CPU]):
            found.append(torch.rand(8))
            torch.manual_seed(0)
            if is_broken:
                raise KeyError
        assert torch.equal(torch.get_rng_state(), before)
        with randomness([CPU]):
            found.append(torch.rand(8))
        assert not copy.deepcopy(randomness)._streams
    assert len(torch.stack(found).unique(dim=0)) == 4


def test_a_process_forked_inside_a_block_has_numbers_of_its_own():
    randomness = PrivateRandomness()

    def drawn(wait=None):
        with randomness([CPU]):
            return wait() if wait else torch.rand(8).tolist()

    drawn()
    with another_thread_in(drawn):
        theirs = in_child(drawn)
    assert len(theirs) == 8 and theirs != drawn()
