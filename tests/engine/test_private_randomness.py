"""Masks of dropout are as unknown as noise, though torch's seed is known."""

import copy
import threading
from functools import partial

import pytest
import torch
from support.children import in_child
from support.training import private
from torch import nn
from torch.utils.data import TensorDataset

import torch_dpbayes as dpb
from torch_dpbayes import noise
from torch_dpbayes.noise import PrivateRandomness

RECORDS = 40
CPU = torch.device("cpu")


def made(mode=None, generator=None):
    net = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5))
    options = {"optimizer": partial(dpb.optim.DPSGLD, lr=0.1, generator=generator)}
    options |= {"noise_multiplier": 1.0, "grad_sample_mode": mode}
    return private(net, TensorDataset(torch.ones(RECORDS, 8)), RECORDS, **options)


def draws(run, steps=2):
    """Which outputs each step dropped, and numbers that the loop's own loss drew."""
    net, opt, loader = run
    for _ in range(steps):
        torch.manual_seed(42)
        for (x,) in loader:
            before = torch.get_rng_state()
            out = net(x)
            drawn = torch.randn_like(x)
            assert torch.equal(torch.get_rng_state(), before)
            (out.square().sum(1) + drawn.sum(1) * 0).mean().backward()
            opt.step()
            yield torch.cat([(out == 0).double(), drawn], 1)


@pytest.mark.parametrize("mode", ["bookkeeping", "vmap"])
def test_masks_do_not_follow_the_programs_seed(mode):
    first, second = (torch.stack([*draws(made(mode))]) for _ in range(2))
    assert 0.4 < first[..., :64].mean() < 0.6
    # 2⁻⁶⁴ for a row of masks
    assert not any(torch.equal(a, b) for a in first for b in (second[0], second[1]))
    rows = torch.cat([*first, *second])
    assert len(rows.unique(dim=0)) == len(rows)


def test_a_seeded_run_computes_metrics_of_values_that_several_records_make():
    net, opt, loader = made(generator=torch.Generator().manual_seed(torch.seed() % 2**62))
    for (x,) in loader:
        out = net(x)
        largest = (out.detach() - out.detach().mean(0)).abs().max()
        out.square().mean().backward()
        opt.step()
        assert largest.item() > 0


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


def broken(randomness):
    with pytest.raises(KeyError), randomness([CPU]):
        drawn = torch.rand(8)
        torch.manual_seed(0)
        raise KeyError
    return drawn


def seeding(randomness):
    with randomness([CPU]):
        drawn = torch.rand(8)
        torch.manual_seed(0)
    return drawn


@pytest.mark.parametrize("work", [broken, seeding])
def test_a_seed_inside_is_forgotten_and_the_programs_stream_goes_on(work):
    found = []
    for _ in range(2):
        before, randomness = torch.get_rng_state(), PrivateRandomness()
        found.append(work(randomness))
        assert torch.equal(torch.get_rng_state(), before)
        with randomness([CPU]):
            found.append(torch.rand(8))
        assert not copy.deepcopy(randomness)._streams
    assert len(torch.stack(found).unique(dim=0)) == 4


def test_a_process_forked_inside_a_block_has_numbers_of_its_own():
    randomness = PrivateRandomness()
    entered, done = threading.Event(), threading.Event()

    def drawn():
        with randomness([CPU]):
            return torch.rand(8).tolist()

    def hold():
        with randomness([CPU]):
            entered.set()
            done.wait(60)

    drawn()
    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait(60)
    theirs = in_child(drawn)
    done.set()
    thread.join()
    assert len(theirs) == 8 and theirs != drawn()
