"""A record that stands in a data set several times is refused where torch's wrappers show it."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, random_split

import torch_dpbayes as dpb
from torch_dpbayes.batches.datasets import require_no_repeats

A, B = (TensorDataset(torch.zeros(20, 3), torch.arange(20) % 2) for _ in range(2))


class Marked(TensorDataset):
    """Its records say who they are."""

    def __init__(self, name, size):
        self.name, self.size = name, size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        if not -self.size <= i < self.size:
            raise IndexError
        return self.name, i % self.size


def trees(leaves):
    """Data sets of data sets."""

    def grown(inner):
        concatenated = st.lists(inner, min_size=1, max_size=3).map(ConcatDataset)
        chosen = inner.flatmap(
            lambda d: st.lists(
                st.integers(-len(d) if type(d) is not ConcatDataset else 0, len(d) - 1),
                min_size=1,
                max_size=4,
                unique=True,
            ).map(partial(Subset, d))
        )
        return concatenated | chosen

    return st.recursive(st.sampled_from(leaves), grown, max_leaves=4)


@given(trees([Marked("a", 3), Marked("b", 4), Marked("c", 2)]))
def test_refused_are_those_that_hold_a_record_twice(dataset):
    records = [dataset[i] for i in range(len(dataset))]
    if len(set(records)) == len(records):
        require_no_repeats(dataset)
    else:
        with pytest.raises(ValueError, match="some records several times"):
            require_no_repeats(dataset)


SEVERAL_TIMES = {
    "oversampled": Subset(A, [0, 0, 1, 2]),
    "an array": Subset(A, np.array([3, 3])),
    "a tensor": Subset(A, torch.tensor([3, 3])),
    "from the end": Subset(A, [-1, 19]),
    "twice": ConcatDataset([A, A]),
    "overlapping": ConcatDataset([Subset(A, range(12)), Subset(A, range(8, 20))]),
    "within": Subset(Subset(A, [0, 0, 1]), range(2)),
}
ONCE = {
    "plain": A,
    "two": ConcatDataset([A, B]),
    "parts": ConcatDataset(random_split(A, [12, 8])),
    "half of a double": Subset(ConcatDataset([A, A]), range(20)),
    "what is left of a repetition": Subset(Subset(A, [0, 0, 1]), [1, 2]),
    "back to front": Subset(A, range(19, -1, -1)),
}


def make_private(dataset, **options):
    return dpb.PrivacyEngine(options.pop("accountant", None)).make_private(
        module=torch.nn.Linear(3, 2),
        optimizer=partial(dpb.optim.DPSGLD, lr=0.1),
        data_loader=DataLoader(dataset, batch_size=2),
        max_grad_norm=1.0,
        **options,
    )


@pytest.mark.parametrize("name", SEVERAL_TIMES)
def test_records_that_are_there_several_times_are_refused(name):
    with pytest.raises(ValueError, match="some records several times"):
        make_private(SEVERAL_TIMES[name])


def test_records_that_are_there_once_pass():
    for dataset in ONCE.values():
        require_no_repeats(dataset)


def test_people_may_have_copies():
    accountant = dpb.PrivacyAccountant(10.0, 1e-5, unit="user")
    people = torch.arange(20).repeat(2)
    make_private(ConcatDataset([A, A]), user_ids=people, records_per_user=2, accountant=accountant)


def test_a_thousand_million_records_are_not_counted():
    huge = Marked("a", 10**9)
    require_no_repeats(Subset(huge, range(0, 10**9, 2)))
    require_no_repeats(ConcatDataset([huge, Subset(Marked("b", 10**9), [5, 7])]))
