"""Batches are what reading and collating record by record gives, at once or not, in workers or not;
and a record that stands in a data set several times is refused where torch's wrappers show it.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.refusals import refused
from support.steps import in_parts
from test_collate import CentredTensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from torch_dpbayes.batches.datasets import require_no_repeats
from torch_dpbayes.batches.poisson_loader import PoissonLoader


class Table(Dataset):
    """As those of Hugging Face's ``datasets``: columns by name, rows in lists or tensors."""

    __module__ = "datasets.arrow_dataset"

    def __init__(self, size, kind="torch"):
        self.format = {"type": kind}
        self.x, self.label = torch.randn(size, 3), torch.arange(size)
        self.reads = []

    def __len__(self):
        return len(self.x)

    def __getitem__(self, at):
        self.reads.append(at)
        row = {"x": self.x[at], "label": self.label[at]}
        return row if self.format["type"] == "torch" else {k: v.tolist() for k, v in row.items()}

    def __getitems__(self, positions):
        columns = self[positions]
        return [{k: columns[k][i] for k in columns} for i in range(len(positions))]


class Backwards:
    """As torch asks of a ``Subset`` with code of its own: one by one, and several."""

    def __getitem__(self, i):
        return super().__getitem__(len(self) - 1 - i)

    def __getitems__(self, positions):
        return [self[i] for i in positions]


TensorsBackwards = type("TensorsBackwards", (Backwards, TensorDataset), {})
PartBackwards = type("PartBackwards", (Backwards, Subset), {})


class Centred(Table):
    """Whose batches are not its records, as of a transform of Hugging Face's that pads them."""

    __module__ = Table.__module__

    def __getitems__(self, positions):
        self.reads.append(positions)
        x = self.x[positions]
        rows = x - x.mean(0), self.label[positions]
        return [{"x": a.tolist(), "label": int(b)} for a, b in zip(*rows)]


def plain(size):
    return TensorDataset(torch.randn(size, 2, 2), torch.arange(size), torch.rand(size) < 0.5)


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert type(found) is type(expected)


def private(dataset, **options):
    return PoissonLoader(DataLoader(dataset, **options), 3 / 60)


def doubled(records):
    return [2 * t for t in default_collate(records)]


CASES = {
    "tensors": (lambda: plain(60), {}),
    "a part of a part": (lambda: Subset(Subset(plain(90), range(5, 85)), range(62, 2, -1)), {}),
    "a table": (lambda: Table(60), {}),
    "a table of lists": (lambda: Table(60, None), {}),
    "a part of a table": (lambda: Subset(Table(90), list(range(60))), {}),
    "tensors with code": (lambda: TensorDataset(torch.randn(60, 2).as_subclass(CentredTensor)), {}),
    "one that reads several": (lambda: TensorsBackwards(*plain(60).tensors), {}),
    "a part with code": (
        lambda: PartBackwards(TensorsBackwards(*plain(90).tensors), range(60)),
        {},
    ),
    "a collate function": (lambda: plain(60), {"collate_fn": doubled}),
    "mappings": (lambda: [{"x": torch.randn(4), "y": 1} for _ in range(60)], {}),
    "a transform of batches": (lambda: Centred(60, "custom"), {}),
    "a table of one's own": (lambda: type("Own", (Centred,), {"__module__": "mine"})(60, None), {}),
    "a part of a transform": (lambda: Subset(Centred(90, "custom"), list(range(60))), {}),
    "it beside others": (lambda: StackDataset(Centred(60, "custom"), plain(60)), {}),
    "it with worker_init_fn": (lambda: Centred(60, "custom"), {"worker_init_fn": print}),
    "tensors in workers": (lambda: plain(60), {"num_workers": 2}),
    "a table in workers": (lambda: Table(60), {"num_workers": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_batch_is_what_its_records_are_one_by_one(name):
    """Values, types and order; also of draws without records."""
    make, options = CASES[name]
    dataset = make()
    loader = private(dataset, **options)
    for number, batch in enumerate(loader):
        positions = loader.sampler_of_draws._draws[number].records.tolist()
        same(batch, loader.collate_fn([dataset[i] for i in positions]))
    assert number == 19
    collate = options.get("collate_fn", default_collate)
    same(loader.collate_fn([dataset[3]]), collate([dataset[3]]))


def test_what_reads_whole_batches_reads_none_of_private_records():
    table = Centred(60, "custom")
    (whole,) = PoissonLoader.every_record(DataLoader(table))
    same(whole, default_collate([table[i] for i in range(60)]))
    loader, parts = private(table), []
    draws = loader.sampler_of_draws
    draws.delivery = lambda batch, size: parts.append(size) or batch

    def signal(do_skip):
        draws.delivered(is_part=True, is_last=not do_skip)

    with in_parts(loader, SimpleNamespace(signal_skip_step=signal), 4) as managed:
        assert sum(1 for _ in managed) and not parts


def test_no_record_is_read_alone():
    table = Table(60)
    loader = private(table)
    table.reads.clear()
    assert len(list(loader)) == 20 and all(isinstance(at, list) for at in table.reads)


def test_a_table_gets_no_transform_later():
    """Batches of tables draw no random numbers, so nothing would keep its numbers secret."""
    loader = private(Subset(table := Table(60), list(range(60))))
    table.format = {"type": "custom"}
    with refused("data-changed"):
        next(iter(loader))


def test_settings_of_the_user_s_loader_are_those_of_batches_too():
    options = {"num_workers": 1, "prefetch_factor": 3, "timeout": 7.0, "persistent_workers": True}
    loader = private(plain(60), **options)
    for name, value in options.items():
        assert getattr(loader._batched, name) == getattr(loader, name) == value


# -- repeated records ------------------------------------------------------------------------------


class Marked(Dataset):
    """Its records say who they are."""

    def __init__(self, name, size):
        self.name, self.size = name, size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        return self.name, int(i) % self.size


LEAF = Marked("leaf", 20)


def positions_in(dataset):
    first = -len(dataset) if type(dataset) is not ConcatDataset else 0
    return st.lists(st.integers(first, len(dataset) - 1), min_size=1, max_size=4)


def grown(inner):
    """Data sets of data sets."""
    kinds = st.sampled_from([list, np.array, torch.tensor])
    return st.one_of(
        inner.flatmap(
            lambda d: st.builds(lambda at, of: Subset(d, of(at)), positions_in(d), kinds)
        ),
        st.lists(inner, min_size=1, max_size=3).map(ConcatDataset),
        inner.map(lambda d: Subset(d, range(len(d)))),
        inner.map(lambda d: StackDataset(d, d)),
    )


LEAVES = st.sampled_from([Marked("a", 3), Marked("b", 4), Marked("c", 2)])


@example(Subset(Marked("a", 20), [-1, 19]))
@example(PartBackwards(LEAF, [1, 5, 1]))
@example(StackDataset(*2 * [Subset(LEAF, [1, 5, 1])]))
@example(ConcatDataset([Subset(LEAF, range(12)), Subset(LEAF, range(8, 20))]))
@given(st.recursive(LEAVES, grown, max_leaves=4))
def test_refused_are_those_that_hold_a_record_twice(dataset):
    records = [dataset[i] for i in range(len(dataset))]
    repeats = len(set(records)) < len(records)
    with refused("loader-repeats") if repeats else nullcontext():
        require_no_repeats(dataset)


def test_an_object_that_stands_in_a_list_twice_is_one_record():
    """Records are: labels and numbers are parts of several."""
    records = [(torch.rand(2), k % 2) for k in range(4)]
    twice = StackDataset(Subset(LEAF, [0, 0]), [1, 2])
    joined = ConcatDataset([records, records[:1]])
    x = torch.rand(4, 2)
    tables = ConcatDataset([TensorDataset(x), Subset(TensorDataset(x), [3])])
    arrays = [np.zeros(2)] * 2
    for repeated in (records * 2, joined, [torch.zeros(2)] * 2, arrays, twice, tables):
        with refused("loader-repeats"):
            require_no_repeats(repeated)
    label = torch.ones(())
    for alike in (records, [7, 7], StackDataset([r[0] for r in records], [label] * 4)):
        require_no_repeats(alike)


def test_a_thousand_million_records_are_not_counted():
    huge = Marked("a", 10**9)
    require_no_repeats(Subset(huge, range(0, 10**9, 2)))
    require_no_repeats(ConcatDataset([huge, Subset(Marked("b", 10**9), [5, 7])]))
