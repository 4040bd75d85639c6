"""Batches that are read at once are those that reading record by record gives."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from torch_dpbayes.batches.poisson_loader import PoissonLoader


class Table(Dataset):
    """As those of Hugging Face's ``datasets``: columns by name, rows in lists or tensors."""

    column_names = ["x", "label"]  # noqa: RUF012

    def __init__(self, size, kind="torch"):
        self.format = {"type": kind}
        self.x, self.label = torch.randn(size, 3), torch.arange(size)
        self.reads = []

    def __len__(self):
        return len(self.x)

    def __getitem__(self, at):
        self.reads.append(at)
        if self.format["type"] == "torch":
            return {"x": self.x[at], "label": self.label[at]}
        if isinstance(at, int):
            return {"x": self.x[at].tolist(), "label": int(self.label[at])}
        return {"x": self.x[at].tolist(), "label": self.label[at].tolist()}

    def __getitems__(self, positions):
        columns = self[positions]
        return [{k: columns[k][i] for k in columns} for i in range(len(positions))]


class Ragged(Table):
    """Its column comes as a list of tensors."""

    def __getitem__(self, at):
        found = super().__getitem__(at)
        return found if isinstance(at, int) else {**found, "x": list(found["x"])}


class Anything(Dataset):
    """Reads batches in its own way, as torch's loader lets it."""

    def __init__(self, size):
        self.x, self.reads = torch.randn(size, 2), []

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i]

    def __getitems__(self, positions):
        self.reads.append(positions)
        return list(self.x[torch.tensor(positions, dtype=torch.long)])


def mapped(folder):
    """Arrays on disk, written and read as pages of memory."""
    np.save(folder / "x.npy", np.random.default_rng().normal(size=(60, 5)).astype(np.float32))
    np.save(folder / "y.npy", np.arange(60))
    arrays = [np.load(folder / name, mmap_mode="c") for name in ("x.npy", "y.npy")]
    return TensorDataset(*map(torch.from_numpy, arrays))


def plain(size):
    return TensorDataset(torch.randn(size, 2, 2), torch.arange(size), torch.rand(size) < 0.5)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))


DATA = {
    "tensors": lambda _: plain(60),
    "memory-mapped": mapped,
    "a part": lambda _: Subset(plain(90), list(range(75, 15, -1))),
    "a part of a part": lambda _: Subset(Subset(plain(90), range(5, 85)), range(2, 62)),
    "a table": lambda _: Table(60),
    "a table of lists": lambda _: Table(60, None),
    "a ragged table": lambda _: Ragged(60),
    "a part of a table": lambda _: Subset(Table(90), list(range(60))),
    "reads by itself": lambda _: Anything(60),
}


def private(dataset, **options):
    return PoissonLoader(DataLoader(dataset, **options), 3 / 60)


@pytest.mark.parametrize(
    ("name", "num_workers"), [*((name, 0) for name in DATA), ("tensors", 2), ("a table", 2)]
)
def test_a_batch_is_what_its_records_are_one_by_one(name, num_workers, tmp_path):
    """Values, types and order; also of draws without records."""
    dataset = DATA[name](tmp_path)
    loader = private(dataset, num_workers=num_workers)
    for number, batch in enumerate(loader):
        positions = loader.sampler_of_draws._draws[number].records.tolist()
        expected = loader.collate_fn([dataset[i] for i in positions])
        assert same(batch, expected)
    assert number == 19


def test_no_record_is_read_alone():
    data, table, other = plain(60), Table(60), Anything(60)
    loaders = private(data), private(table), private(other)
    table.reads.clear()
    data.__class__ = type("Watched", (TensorDataset,), {"__getitem__": None})
    for loader in loaders:
        assert len(list(loader)) == 20
    assert all(isinstance(at, list) for at in table.reads)
    assert len(other.reads) == 20


class Doubled(TensorDataset):
    def __getitem__(self, i):
        return tuple(2 * t for t in super().__getitem__(i))


@pytest.mark.parametrize("change", ["class", "collate"])
def test_what_is_done_to_records_one_by_one_is_done(change):
    data = plain(60)
    if change == "class":
        loader = private(Doubled(*data.tensors[:2]))
    else:
        loader = private(data, collate_fn=lambda rows: [2 * t for t in default_collate(rows)[:2]])
    for number, batch in enumerate(loader):
        positions = loader.sampler_of_draws._draws[number].records
        assert same(batch, [2 * t[positions] for t in data.tensors[:2]])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_reads_its_own_draws(copied):
    """It counts them too: a step is taken on each."""
    data = plain(60)
    loader = PoissonLoader(DataLoader(data), 3 / 60)
    other = copied(loader)
    for number, batch in enumerate(other):
        draws = other.sampler_of_draws
        positions = draws._draws[number].records
        assert same(batch, [t[positions] for t in data.tensors])
    assert loader.sampler_of_draws.passes == 0 and number == 19


def test_settings_of_the_user_s_loader_are_those_of_batches_too():
    options = {"num_workers": 1, "prefetch_factor": 3, "timeout": 7.0, "persistent_workers": True}
    loader = private(plain(60), **options)
    for name, value in options.items():
        assert getattr(loader._batched, name) == getattr(loader, name) == value
    assert loader._batched.batch_sampler is loader.batch_sampler and not loader._batched.pin_memory


def looks(worker):
    dataset = get_worker_info().dataset
    dataset.tensors = tuple(t + 1 for t in dataset.tensors)


def test_workers_are_told_of_the_user_s_data_set():
    data = TensorDataset(torch.arange(60))
    loader = private(data, num_workers=1, worker_init_fn=looks)
    for number, (batch,) in enumerate(loader):
        assert torch.equal(batch, loader.sampler_of_draws._draws[number].records + 1)
