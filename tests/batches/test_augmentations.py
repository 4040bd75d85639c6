"""What a data set draws is as unknown as noise, though the program's seeds are known: one record
more would change the augmentations of the others.
"""

import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from support.training import private, values
from torch import nn
from torch.utils.data import DataLoader, Dataset

from torch_dpbayes import noise
from torch_dpbayes.batches.poisson_loader import PoissonLoader

RECORDS, COLUMNS = 6, 8
DRAWS = {
    "torch": lambda: torch.rand(COLUMNS),
    "python": lambda: torch.tensor([random.random() for _ in range(COLUMNS)]),
    "numpy": lambda: torch.from_numpy(np.random.rand(COLUMNS)).float(),
}


class Augmented(Dataset):
    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return RECORDS

    def __getitem__(self, i):
        return DRAWS[self.draw](), torch.tensor(0)


def states():
    kind, words, *place = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), words.tolist(), place


def seed_all():
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def going_on(batches):
    """Batches of a pass, whose reading leaves the program's random numbers as they were."""
    before = None  # an iterator of torch's takes a number when it begins
    for batch in batches:
        assert before in (None, states())
        before = states()
        yield batch
    assert before == states()


def drawn(draw, *, in_parts=False, **options):
    """What two passes over the data set drew."""
    net, optimizer, loader = private(
        nn.Linear(COLUMNS, 2), Augmented(draw), RECORDS, noise_multiplier=1.0, loader=options
    )
    found = []
    for _ in range(2):
        seed_all()
        manager = BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=4, optimizer=optimizer
        )
        with manager if in_parts else nullcontext(loader) as batches:
            for x, y in going_on(batches):
                found += values(x)
                nn.functional.cross_entropy(net(x), y).backward()
                optimizer.step()
    return torch.stack(found)


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("options", [{}, {"in_parts": True}, {"num_workers": 1}])
def test_augmentations_do_not_follow_the_programs_seeds(draw, options):
    found = torch.cat([drawn(draw, **options) for _ in range(2)])
    assert len(found.unique(dim=0)) == len(found) == 4 * RECORDS


@pytest.mark.parametrize("draw", DRAWS)
def test_they_repeat_with_the_generator_of_the_loader(draw, monkeypatch):
    found, seed = [], torch.seed() % 2**62
    for _ in range(2):
        monkeypatch.setattr(noise, "_used_positions", set())  # as in another process
        monkeypatch.setattr(noise, "_blocks_at", {})
        found.append(drawn(draw, generator=torch.Generator().manual_seed(seed)))
    assert torch.equal(*found)
    assert len(found[0].unique(dim=0)) == 2 * RECORDS


@pytest.mark.parametrize("draw", DRAWS)
def test_where_every_record_is_read_once(draw):
    records = PoissonLoader.every_record(DataLoader(Augmented(draw)))
    found = []
    for _ in range(2):
        seed_all()
        for x, _ in going_on(records):
            found += x
    assert len(torch.stack(found).unique(dim=0)) == 2 * RECORDS


def test_parts_go_on_after_a_record_could_not_be_read():
    data = Augmented("torch")
    net, optimizer, loader = private(nn.Linear(COLUMNS, 2), data, RECORDS, noise_multiplier=1.0)
    for draw in ("none", "torch"):
        data.draw = draw
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=4, optimizer=optimizer
        ) as parts:
            if draw == "none":
                with pytest.raises(KeyError):
                    next(iter(parts))
                continue
            for x, y in going_on(parts):
                nn.functional.cross_entropy(net(x), y).backward()
                optimizer.step()
    assert len(optimizer.accountant) == 1
