"""A collate function is given each record alone, so that none mixes them."""

import functools
import itertools
from collections import UserDict, namedtuple
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.refusals import refused
from support.training import private
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import TensorDataset, default_collate
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from torch_dpbayes.batches.poisson_loader import RecordwiseCollate, require_own_memory
from torch_dpbayes.per_sample.nested import tensors_in
from torch_dpbayes.per_sample.operations import Delivery

PICTURES = [(torch.rand(3, 4, 4), 1), (torch.rand(3, 4, 4), 0)]
LENGTHS = [(torch.randn(n, 2), n % 2) for n in (5, 7, 6)]
TABLE = [{"x": np.random.randn(3), "age": 40, "weight": 70.5, "y": np.int64(1)}]


def changed(change):
    """``change`` of a batch of torch's own collate function."""
    return lambda records: change(*default_collate(records))


def mixup(x, y):
    weight = np.random.beta(0.2, 0.2)
    return weight * x + (1 - weight) * x[torch.randperm(len(x))], y


def mixed_labels(x, y):
    labels = F.one_hot(y, 2).float()
    return x, 0.9 * labels + 0.1 * labels.flip(0)


@pytest.mark.parametrize("mix", [mixup, mixed_labels])
def test_no_record_moves_another_whatever_is_made_of_it(mix):
    exchanged = [*PICTURES, (torch.rand(3, 4, 4), 0)]
    function = RecordwiseCollate(changed(mix))
    for before, after in zip(function([*PICTURES, PICTURES[0]]), function(exchanged)):
        torch.testing.assert_close(before[:2], after[:2])
        assert len(before) == 3


def columns(records, stack):
    features, labels = zip(*records, strict=True)
    return stack(list(features)), torch.tensor(labels)


# data, and a function whose batch is not a row for each record
FUNCTIONS = {
    "time first": (LENGTHS, partial(columns, stack=pad_sequence)),
    "with a graph": (PICTURES, changed(lambda x, y: (x.requires_grad_(), y))),
    "no tensors": (TABLE, lambda records: records),
    "other lengths": (LENGTHS, partial(columns, stack=partial(pad_sequence, batch_first=True))),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_makes_no_row_of_each_record_is_refused(name):
    dataset, function = FUNCTIONS[name]
    with refused("loader-collate"):
        RecordwiseCollate(function)([*dataset, (torch.zeros(3, 4, 4), 0)])


class Bound(dict):
    """What torch makes of a batch comes by way of this type's own code."""

    def update(self, columns):
        super().update({name: x - x.mean(0) for name, x in columns.items()})


class CentredTensor(torch.Tensor):
    """Whose batches are not its records."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        found = super().__torch_function__(function, types, args, kwargs or {})
        makes_batches = function in (torch.stack, torch.cat, torch.Tensor.__getitem__)
        is_batch = makes_batches and found.dim() > 1 and len(found) > 1
        return found - found.mean(0) if is_batch else found


def centred(batch, *, collate_fn_map):
    return torch.stack(batch) - torch.stack(batch).mean(0)


# a record, and what is registered with torch
CODE_IN_TORCHS = {
    "registered": (lambda x: x, {torch.Tensor: centred}),
    "wrapped": (lambda x: x, {torch.Tensor: functools.wraps(collate_tensor_fn)(centred)}),
    "a mapping": (lambda x: Bound(x=x), {}),
    "a later tensor": (lambda x: [x.as_subclass(CentredTensor) if x[0] else x], {}),
}


@pytest.mark.parametrize("name", CODE_IN_TORCHS)
def test_torch_s_function_is_trusted_where_it_runs_no_code_of_the_user(name, monkeypatch):
    """Looked at in each call: functions may be registered after make_private."""
    make, registered = CODE_IN_TORCHS[name]
    batches = [[make(torch.tensor([u, 1.0])) for u in (0.0, other)] for other in (1.0, 9.0)]
    function = RecordwiseCollate(default_collate)
    function([torch.ones(2)])
    for kind, own in registered.items():
        monkeypatch.setitem(default_collate_fn_map, kind, own)
    first, second = (next(tensors_in(function(batch)))[0] for batch in batches)
    assert torch.equal(first, second)


class Named(namedtuple("Pair", "x y")):
    __slots__ = ()

    def __new__(cls, x, y):
        return super().__new__(cls, x - x.mean(0) if isinstance(x, torch.Tensor) else x, y)


@dataclass
class InPlace:
    x: torch.Tensor

    def __post_init__(self):
        self.note = self.x.sub_(self.x.mean(0)).sum()


@pytest.mark.parametrize("make", [lambda x: Named(x, x), InPlace])
def test_a_container_makes_nothing_else_of_a_batch(make):
    """Its own code is not given what it could change."""
    function = RecordwiseCollate(lambda records: make(torch.stack(records).clone()))
    with refused("loader-collate"):
        function([torch.ones(2), torch.zeros(2)])


def test_what_a_container_keeps_beside_its_tensors_is_not_that_of_the_first_record():
    def collate(records):
        batch = UserDict(x=torch.stack(records))
        batch.longest = float(batch["x"].max())
        return batch

    batch = RecordwiseCollate(collate)([torch.ones(2), torch.zeros(2)])
    assert type(batch) is UserDict and batch["x"].shape == (2, 2) and not hasattr(batch, "longest")
    batch.longest = 1.0
    assert not hasattr(Delivery(2)(batch, 2), "longest")


def test_no_record_decides_which_fields_a_batch_has():
    rare, usual = ({"x": torch.zeros(1), **more} for more in ({}, {"weight": 0.5}))
    long = {"x": torch.zeros(2), "weight": 0.5}
    for records in ([rare, usual], [usual, rare], [usual, long]):
        with refused("loader-collate"):
            RecordwiseCollate(default_collate)(records)
    function = RecordwiseCollate(default_collate, [usual])
    function([usual, usual])
    for other in (rare, {"x": "1", "weight": 0.5}):
        with refused("loader-collate"):
            function([other])


class Buffered(list):
    """All records are read into one array."""

    buffer = np.zeros(3)

    def __getitem__(self, at):
        self.buffer[:] = super().__getitem__(at)
        return self.buffer


class Negated(list):
    """Reading a record changes it."""

    def __getitem__(self, at):
        return super().__getitem__(at).__imul__(-1)


class Copied(list):
    """Reading a record changes a copy of it."""

    def __getitem__(self, at):
        return super().__getitem__(at).copy().__imul__(-1)


def test_a_record_stays_as_it_was_read():
    """make_private reads records at some positions, which one record more would change."""
    records = [np.full(3, k + 1.0) for k in range(4)]
    for kind in (Buffered, Negated):
        with refused("loader-collate"):
            private(torch.nn.Linear(3, 2), kind(records), 2)
    private(torch.nn.Linear(3, 2), Copied(records), 2)
    calls = itertools.count()  # as of random numbers of its own
    require_own_memory(records, records[0], lambda rs: default_collate(rs) + next(calls))


@pytest.mark.parametrize("is_vouched", [False, True])
def test_the_engine_says_what_a_function_gets_and_the_user_may_vouch(is_vouched, caplog):
    data = TensorDataset(torch.randn(40, 3), torch.arange(40) % 2)
    calls = []

    def function(records):
        calls.append(len(records))
        return default_collate(records)

    options = {"loader": {"collate_fn": function}, "assume_independent_records": is_vouched}
    with caplog.at_level("WARNING", "torch_dpbayes"):
        _, _, loader = private(torch.nn.Linear(3, 2), data, 20, **options)
    assert ("gets whole batches" if is_vouched else "gets each record alone") in caplog.text
    calls.clear()
    next(iter(loader))
    assert (max(calls) > 1) == is_vouched


class Fixed(UserDict):
    """A mapping of tensors that cannot be made of others, as tensordict's of another length."""

    def __init__(self, *given, **columns):
        if given:
            raise RuntimeError("batch size")
        super().__init__(**columns)


@pytest.mark.parametrize("kind", [lambda x, y: UserDict(x=x, y=y), namedtuple("Record", "x y")])
def test_a_batch_without_records_is_like_that_of_one(kind):
    def collate(records):
        return kind(*map(torch.stack, zip(*records, strict=True)))

    records = [(torch.randn(3), torch.tensor(1)) for _ in range(4)]
    alike = RecordwiseCollate(collate, records[:1])
    for given in (records, []):
        batch = alike(given)
        x, y = batch.values() if isinstance(batch, UserDict) else batch
        assert type(batch) is type(collate(records))
        assert (x.dtype, x.shape, y.dtype) == (torch.float32, (len(given), 3), torch.int64)
    with refused("argument-type"):
        RecordwiseCollate(lambda records: Fixed(x=records[0][0][None]), records[:1])


def test_no_record_decides_what_becomes_of_the_values_of_others():
    """Numbers of Python, the first one an int."""
    collate = RecordwiseCollate(default_collate, [(torch.zeros(1), 0)])
    _, y = collate([(torch.zeros(1), number) for number in (0.9, 0, 0.9)])
    assert y.tolist() == [0.9, 0.0, 0.9]
