"""Draws from a caller's generator: how much they take of it, and that they are independent where
streams overlap.
"""

from functools import partial

import numpy as np
import pytest
import torch
from scipy import stats

from torch_dpbayes import noise
from torch_dpbayes.batches.sampler import PoissonSampler
from torch_dpbayes.batches.sampling_schemes import (
    FixedSizeSampler,
    RandomAllocationSampler,
    TruncatedPoissonSampler,
    Users,
    UserSampler,
)

FALSE_ALARM = 1e-6  # of each test


def people(num_data, *settings):
    return UserSampler(
        num_data, *settings, users=Users([i // 2 for i in range(num_data)], num_data, 1)
    )


KINDS = {
    "poisson": PoissonSampler,
    "truncated": partial(TruncatedPoissonSampler, max_batch_size=60),
    "fixed size": FixedSizeSampler,
    "random allocation": RandomAllocationSampler,
    "people": people,
}


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch):
    monkeypatch.setattr(noise, "_used_positions", set())


def draws_of(sampler, number):
    """Draws, each used up before the next is drawn."""
    found = []
    while len(found) < number:
        for batch in sampler:
            sampler.delivered()
            sampler.use()
            sampler.mark_used()
            found.append(batch)
            if len(found) == number:
                break
    return found


def members(num_data, batches):
    table = torch.zeros(len(batches), num_data, dtype=torch.float64)
    for row, batch in zip(table, batches, strict=True):
        row[batch] = 1
    return table


@pytest.mark.chance(FALSE_ALARM)
@pytest.mark.parametrize(
    ("kind", "rate", "used"),  # darts, or a number for every record; of 32 bits, a key takes 8
    [
        (PoissonSampler, 0.01, 1),
        (PoissonSampler, 0.1, 4),
        (FixedSizeSampler, 0.01, 300),
        (FixedSizeSampler, 0.1, 1),
        (RandomAllocationSampler, 0.1, 13),
    ],
)
def test_streams_that_overlap_give_independent_draws(kind, rate, used):
    """Two loaders of one seed, where the user took a few numbers from one generator before. In no
    pair of draws are there more or fewer records of both than by chance.
    """
    num_data, number, seed = 5000, 40, torch.initial_seed()
    tables = []
    for taken in (0, used):
        generator = torch.Generator().manual_seed(seed)
        torch.rand(taken, generator=generator)
        tables.append(members(num_data, draws_of(kind(num_data, rate, generator, 0), number)))
    first, second = tables
    common = (first @ second.T).numpy()
    sizes = first.sum(1).numpy()[:, None], second.sum(1).numpy()[None]
    # any records are as likely as others, so that given how many they are this is the law
    law = stats.hypergeom(num_data, *sizes)
    tails = np.minimum(law.cdf(common), law.sf(common - 1))
    assert 2 * tails.min() * number**2 > FALSE_ALARM / 2, common
    # of all steps together, where the variance is below that of a Poisson number
    law = stats.poisson((sizes[0][:, 0] * sizes[1][0]).sum() / num_data)
    same = common.trace()
    assert 2 * min(law.cdf(same), law.sf(same - 1)) > FALSE_ALARM / 2, same


@pytest.mark.parametrize("cached", [False, True])
def test_streams_that_stand_at_one_position_are_refused(cached):
    """Also where a normal number, of which torch makes two at a time, was kept back."""
    seed = torch.initial_seed()
    draws_of(PoissonSampler(1000, 0.01, torch.Generator().manual_seed(seed), 0), 5)
    generator = torch.Generator().manual_seed(seed)
    if cached:  # takes 128 bits
        torch.randn(1, generator=generator)
        torch.rand(4, generator=generator)
    else:
        torch.rand(8, generator=generator)
    with pytest.raises(ValueError, match="a batch was already drawn"):
        draws_of(PoissonSampler(1000, 0.01, generator, 0), 1)


@pytest.mark.parametrize("rate", [0.01, 0.1])
@pytest.mark.parametrize("law", KINDS)
def test_every_draw_takes_256_bits(law, rate):
    """Of the caller's generator, whatever it draws; random allocation takes them for a pass."""
    seed = torch.initial_seed()
    generator, other = (torch.Generator().manual_seed(seed) for _ in range(2))
    sampler = KINDS[law](1000, rate, generator, 0)
    draws_of(sampler, 2 * sampler.steps)
    keys = 2 * (1 if law == "random allocation" else sampler.steps)
    torch.empty(keys * 4, dtype=torch.int64).random_(-(2**63), None, generator=other)
    assert torch.equal(generator.get_state(), other.get_state())


def test_noise_and_draws_of_one_seed_come_from_other_streams(monkeypatch):
    seeded, states = noise._generator_from, []

    def seen(*settings):
        stream = seeded(*settings)
        states.append(stream.get_state())
        return stream

    monkeypatch.setattr(noise, "_generator_from", seen)
    seed = torch.initial_seed()
    noise.GaussianNoise(torch.Generator().manual_seed(seed)).next_stream(torch.device("cpu"), ())
    sampler = PoissonSampler(1000, 0.01, torch.Generator().manual_seed(seed), 0)
    draws_of(sampler, 1)
    assert len(states) == 2 and not torch.equal(*states)


@pytest.mark.parametrize("rate", [0.01, 0.1])
@pytest.mark.parametrize("law", KINDS)
def test_batches_are_drawn_on_the_cpu_whatever_the_default_device(law, rate):
    seed, found = torch.initial_seed(), []
    for device in ("cpu", "meta"):
        noise._used_positions.clear()
        sampler = KINDS[law](1000, rate, torch.Generator().manual_seed(seed), 0)
        with torch.device(device):
            found.append(draws_of(sampler, 5))
            draws_of(KINDS[law](1000, rate, None, 0), 2)
    assert found[0] == found[1]
