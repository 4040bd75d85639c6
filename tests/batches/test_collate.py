"""A collate function is given each record alone, so that none mixes them; one that makes something
else of a record alone is refused on what it makes of synthetic ones.
"""

import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

import torch_dpbayes as dpb
from torch_dpbayes.batches.collate import RecordwiseCollate


class Listed(Dataset):
    def __init__(self, *records):
        self.records = records

    def __len__(self):
        return len(self.records)

    def __getitem__(self, i):
        return self.records[i]


PICTURES = Listed((torch.rand(3, 4, 4), 1), (torch.rand(3, 4, 4), 0))
LENGTHS = Listed(*((torch.randn(n, 2), n % 2) for n in (5, 7, 6)))
TABLE = Listed({"x": np.random.randn(3), "age": 40, "weight": 70.5, "y": np.int64(1)})
TOKENS = Listed({"input_ids": [5, 0, 2, 9], "labels": 1})


def changed(change):
    """``change`` of a batch of torch's own collate function."""
    return lambda records: change(*default_collate(records))


def mixup(x, y):
    weight = np.random.beta(0.2, 0.2)
    partner = torch.randperm(len(x))
    return weight * x + (1 - weight) * x[partner], y


def cutmix(x, y):
    x = x.clone()
    x[:, :, :2] = x.roll(1, 0)[:, :, :2]
    return x, y


def mixed_labels(x, y):
    labels = F.one_hot(y, 2).float()
    return x, 0.9 * labels + 0.1 * labels.flip(0)


MIXING = {
    "centred": (PICTURES, changed(lambda x, y: (x - x.mean(0), y))),
    "ranks": (TABLE, lambda records: torch.tensor([r["age"] for r in records]).argsort().argsort()),
    "a float": (
        TABLE,
        lambda records: torch.tensor(
            [r["weight"] - max(s["weight"] for s in records) for r in records]
        ),
    ),
}


@pytest.mark.parametrize("name", MIXING)
def test_mixing_is_refused(name):
    dataset, function = MIXING[name]
    with pytest.raises(dpb.DPBayesError, match="nor the others, as mixup does"):
        RecordwiseCollate(function).require_same_alone(dataset)


@pytest.mark.parametrize("mix", [mixup, cutmix, mixed_labels])
def test_no_record_moves_another_whatever_is_made_of_it(mix):
    records = [(torch.rand(3, 4, 4), 1), (torch.rand(3, 4, 4), 0), (torch.rand(3, 4, 4), 1)]
    exchanged = [*records[:2], (torch.rand(3, 4, 4), 0)]
    function = RecordwiseCollate(changed(mix))
    for before, after in zip(function(records), function(exchanged)):
        torch.testing.assert_close(before[:2], after[:2])
        assert len(before) == 3


def padded(records):
    features, labels = zip(*records, strict=True)
    return pad_sequence(list(features), batch_first=True), torch.tensor(labels)


def time_first(records):
    features, labels = zip(*records, strict=True)
    return pad_sequence(list(features)), torch.tensor(labels)


def masked(records):
    tokens = torch.tensor([r["input_ids"] for r in records])
    hidden = torch.bernoulli(torch.full(tokens.shape, 0.3)).bool()
    return {"input_ids": tokens.masked_fill(hidden, 3), "labels": tokens}


def with_own_generator(x, y):
    return x + torch.from_numpy(np.random.default_rng().normal(size=x.shape)), y


def failing(records):
    raise KeyError("name")


SEPARATE = {
    "torch's own": (PICTURES, default_collate),
    "scaled": (PICTURES, changed(lambda x, y: (x / 255, F.one_hot(y, 2)))),
    "flipped at random": (
        PICTURES,
        changed(lambda x, y: (torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(3), x), y)),
    ),
    "Python's randomness": (
        PICTURES,
        lambda records: default_collate([(x * random.random(), y) for x, y in records]),
    ),
    "a generator of its own": (PICTURES, changed(with_own_generator)),
    "padded": (LENGTHS, padded),
    "padded, time first": (LENGTHS, time_first),
    "time first of five": (Listed((torch.randn(5, 2), 1)), time_first),
    "masked at random": (TOKENS, masked),
    "no tensors": (TABLE, lambda records: records),
    "no numbers": (PICTURES, lambda records: (default_collate(records)[0], "name")),
    "not a number": (PICTURES, changed(lambda x, y: (torch.where(x > 0.5, torch.nan, x), y))),
    "numbers of eight bits": (PICTURES, changed(lambda x, y: (x.to(torch.float8_e4m3fn), y))),
    "complex numbers": (PICTURES, changed(lambda x, y: (torch.complex(x, x / 0), y))),
    "fails": (TABLE, failing),
    "a number of tensors that changes": (
        PICTURES,
        lambda records: [x for x, _ in records if x.mean() > 0.5],
    ),
    "a random number for every pair": (PICTURES, lambda records: torch.rand(2 * [len(records)])),
    "counts records": (PICTURES, changed(lambda x, y: (x, y, torch.full((len(x),), len(x))))),
    "no records": (Listed(), changed(mixup)),
}


ALONE = (
    "time first of five",
    "padded, time first",
    "counts records",
    "a random number for every pair",
    "a number of tensors that changes",
    "no tensors",
)


RANDOM = ("flipped at random", "Python's randomness", "a generator of its own", "masked at random")


@pytest.mark.parametrize("name", SEPARATE)
def test_what_differs_alone_is_refused(name):
    dataset, function = SEPARATE[name]
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    if name in ALONE:
        with pytest.raises(dpb.DPBayesError, match="collate_fn is given each record alone"):
            RecordwiseCollate(function).require_same_alone(dataset)
    else:
        told = RecordwiseCollate(function).require_same_alone(dataset)
        assert ("draws random numbers" in told) == (name in RANDOM)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]


def test_no_value_of_a_record_is_used():
    seen = []

    def function(records):
        seen.extend(records)
        return default_collate(records)

    record = (torch.full((2,), 77.0), torch.tensor(77), np.full(2, 77.0), 77, 77.0, np.float32(77))
    RecordwiseCollate(function).require_same_alone(Listed(record))
    assert len(seen) >= 15
    for made in seen:
        assert [type(a) for a in made] == [type(a) for a in record]
        assert all((torch.as_tensor(a) <= 1).all() for a in made)


def test_the_engine_asks_and_says_what_the_user_vouches_for(caplog):
    def make(function, is_vouched):
        data = TensorDataset(torch.randn(40, 3), torch.arange(40) % 2)
        caplog.clear()
        dpb.PrivacyEngine().make_private(
            module=torch.nn.Linear(3, 2),
            optimizer=partial(dpb.optim.DPSGLD, lr=0.1),
            data_loader=DataLoader(data, batch_size=8, collate_fn=function),
            max_grad_norm=1.0,
            assume_independent_records=is_vouched,
        )
        return "collate_fn is given whole batches" in caplog.text

    with pytest.raises(ValueError, match="collate_fn is given each record alone"):
        make(changed(mixed_labels), False)
    assert make(changed(mixed_labels), True) and not make(default_collate, True)
