"""What a data set draws is as unknown as noise, though the program's seeds are known: one record
more would change the augmentations of the others.
"""

import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from support import steps
from support.training import private, states, values
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torch_dpbayes import noise
from torch_dpbayes.batches.poisson_loader import PoissonLoader

RECORDS, SEEDS = 6, (torch.manual_seed, random.seed, np.random.seed)


class Augmented(TensorDataset):
    """Records are numbers of torch's, of Python's and of NumPy's, four each. Torch's own class, of
    which this one is no plain case, draws none.
    """

    fails = seeds = False

    def __init__(self):
        super().__init__(torch.zeros(RECORDS))

    def __getitem__(self, i):
        if self.fails:
            raise KeyError(i)
        drawn = torch.rand(4).tolist(), [random.random() for _ in range(4)], np.random.rand(4)
        for seed in SEEDS[1:] if self.seeds and i == RECORDS - 1 else ():
            seed(0)
        return torch.tensor(np.concatenate(drawn), dtype=torch.float32), torch.tensor(0)


def all_differ(found):
    """Records, by numbers of each kind."""
    return all(len(part.unique(dim=0)) == len(found) for part in found.split(4, dim=1))


def going_on(batches):
    """Batches of a pass, whose reading leaves the program's random numbers as they were."""
    for seed in SEEDS:
        seed(0)
    before = None  # an iterator of torch's takes a number when it begins
    for batch in batches:
        assert before in (None, states())
        before = states()
        yield batch
    assert before == states()


def run(**options):
    return private(nn.Linear(12, 2), Augmented(), RECORDS, noise_multiplier=1.0, loader=options)


def drawn(net, optimizer, loader, in_parts=False):
    """What the data set draws in two passes."""
    found = []
    for _ in range(2):
        parts = steps.in_parts(loader, optimizer, 4)
        with parts if in_parts else nullcontext(loader) as batches:
            for x, y in going_on(batches):
                found += values(x)
                steps.one(net, optimizer, (x, y))
    return torch.stack(found)


@pytest.mark.parametrize(
    ("options", "in_parts"), [({}, False), ({}, True), ({"num_workers": 1}, False)]
)
def test_augmentations_do_not_follow_the_programs_seeds(options, in_parts):
    found = torch.cat([drawn(*run(**options), in_parts) for _ in range(2)])
    assert len(found) == 4 * RECORDS and all_differ(found)


def test_a_record_that_seeds_does_not_choose_the_numbers_of_the_next_batch():
    net, optimizer, loader = run()
    loader.dataset.seeds = True  # the last record of each batch
    assert all_differ(torch.cat([drawn(net, optimizer, loader) for _ in range(2)]))


def test_they_repeat_with_the_generator_of_the_loader(monkeypatch):
    found, seed = [], torch.seed() % 2**62
    for _ in range(2):
        monkeypatch.setattr(noise, "_used_positions", set())  # as in another process
        monkeypatch.setattr(noise, "_blocks_at", {})
        found.append(drawn(*run(generator=torch.Generator().manual_seed(seed))))
    assert torch.equal(*found) and all_differ(found[0])


def test_where_every_record_is_read_once():
    records = PoissonLoader.every_record(DataLoader(Augmented()))
    found = []
    for _ in range(2):
        for x, _ in going_on(records):
            found += x
    assert len(found) == 2 * RECORDS and all_differ(torch.stack(found))


def test_parts_go_on_after_a_record_could_not_be_read():
    net, optimizer, loader = run()
    loader.dataset.fails = True
    with pytest.raises(KeyError):
        drawn(net, optimizer, loader, in_parts=True)
    loader.dataset.fails = False
    drawn(net, optimizer, loader, in_parts=True)
    assert len(optimizer.accountant) == 2
