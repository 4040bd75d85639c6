"""What make_private refuses: one table of arguments, with the code and the words of the error."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import torch_dpbayes as dpb

DATA = TensorDataset(torch.randn(60, 4), torch.arange(60) % 3)
NET = nn.Linear(4, 3)
IDS = [i // 2 for i in range(60)]
USERS = {"accountant": dpb.PrivacyAccountant(unit="user"), "user_ids": IDS}
SGLD = partial(dpb.optim.DPSGLD, lr=0.1)
LOW = {"num_data": 60, "expected_batch_size": 12, "max_grad_norm": 1.0, "noise_multiplier": 0.3}
TARGET = {"target_epsilon": 1.0, "target_delta": 1e-5, "epochs": 1}


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(4), 0


def loader(**options):
    return {"data_loader": DataLoader(DATA, **{"batch_size": 12, **options})}


def factory(make):
    return {"optimizer": make}


def elsewhere(params, **_):
    return dpb.optim.DPSGLD(params, 0.1, **{**LOW, "num_data": 60_000}, sampling="poisson")


def without_floor(params, **options):
    return dpb.optim.DPSGLD(params, 0.1, **{**options, "noise_multiplier": 0.0})


REFUSED = [
    ({"data_loader": DataLoader(Stream(), batch_size=4)}, "loader-iterable", "amplification"),
    (
        {"data_loader": DataLoader(DATA, batch_sampler=[[0, 1], [2, 3]])},
        "loader-sampler",
        "batch sampler decides",
    ),
    (loader(batch_size=None), "loader-sampler", "batch sampler decides"),
    (
        loader(sampler=WeightedRandomSampler([1.0] * 60, 60)),
        "loader-sampler",
        "WeightedRandomSampler",
    ),
    (
        loader(sampler=SubsetRandomSampler(range(10))),
        "loader-sampler",
        "SubsetRandomSampler.*Subset",
    ),
    (loader(sampler=RandomSampler(DATA, replacement=True)), "loader-sampler", "RandomSampler"),
    (loader(sampler=RandomSampler(DATA, num_samples=10)), "loader-sampler", "RandomSampler"),
    (loader(batch_size=61), "argument", "larger than the data set"),
    ({"data_loader": [(torch.zeros(4), 0)]}, "argument-type", "torch.utils.data.DataLoader"),
    (
        factory(torch.optim.SGD(NET.parameters(), 0.3)),
        "optimizer-not-private",
        r"SGD is not private: pass optimizer=partial\(torch_dpbayes.optim.DPSGLD, lr=0.25\)",
    ),
    (
        factory(lambda parameters, **_: torch.optim.SGD([p for _, p in parameters], 0.3)),
        "optimizer-not-private",
        "SGD, which the factory made, is not private",
    ),
    (factory(partial(SGLD, max_grad_norm=2.0)), "optimizer-settings", "max_grad_norm = 2.0 in the"),
    (factory(partial(SGLD, num_data=7)), "optimizer-settings", "num_data = 7 in the optimizer"),
    (
        factory(partial(SGLD, accountant=dpb.PrivacyAccountant())),
        "optimizer-settings",
        "accountant",
    ),
    (factory(elsewhere), "optimizer-settings", "accountant"),
    (
        {"optimizer": without_floor, "noise_multiplier": 5.0},
        "optimizer-settings",
        "noise_multiplier",
    ),
    (
        factory(lambda p, **options: dpb.optim.DPSGLD([NET.weight], 0.1, **options)),
        "optimizer-parameters",
        "exactly the model's trainable parameters",
    ),
    (
        factory(lambda p, **options: SGLD(nn.Linear(4, 3).parameters(), **options)),
        "optimizer-parameters",
        "exactly the model's",
    ),
    ({"module": nn.Linear(4, 3).requires_grad_(False)}, "argument", "frozen"),
    ({"grad_sample_mode": "ghost"}, "argument", "grad_sample_mode"),
    ({"loss_reduction": "none"}, "argument", "loss_reduction"),
    ({"loss": 3}, "argument-type", "a function of output and targets"),
    ({"assume_independent_records": "False"}, "argument-type", "True or False"),
    ({"sampling": "shuffle"}, "argument", "sampling must be one of 'poisson', 'random_allocation'"),
    ({"sampling": "fixed_size", "max_batch_size": 5}, "argument", "max_batch_size cuts Poisson"),
    ({"max_batch_size": 3}, "argument", "below the batch size 12"),
    ({"max_batch_size": 5.5}, "argument", "must be a positive whole number"),
    ({"user_ids": IDS, "accountant": dpb.PrivacyAccountant()}, "argument", 'unit="user"'),
    ({"accountant": dpb.PrivacyAccountant(unit="user")}, "argument", "protects users"),
    ({**USERS, "sampling": "fixed_size"}, "argument", "leave out"),
    ({**USERS, "max_batch_size": 50}, "argument", "leave out"),
    ({"records_per_user": 2}, "argument", "needs user_ids="),
    ({**USERS, "records_per_user": 0}, "argument", "records_per_user"),
    ({**USERS, **loader(batch_size=31)}, "argument", "users bring"),
    ({**TARGET, "epochs": None}, "argument", "epochs"),
    ({**TARGET, "epochs": 0}, "argument", "epochs"),
    ({**TARGET, "epochs": 1.5}, "argument", "epochs"),
    ({**TARGET, "target_epsilon": -1.0}, "argument", "epsilon"),
    ({**TARGET, "target_delta": 1.5}, "argument", "delta"),
    *(
        ({**TARGET, "calibrate": share}, "argument", "is a share of the target")
        for share in (0.0, 1.0, -0.1)
    ),
    ({**TARGET, **USERS, "calibrate": 0.1}, "argument", "leave one out"),
    ({**TARGET, "data_loader": None}, "argument-type", "data_loader= is missing"),
    (
        {**TARGET, "optimizer": dpb.optim.DPSGLD(NET.parameters(), 20.0, **LOW)},
        "optimizer-settings",
        "noise_multiplier = 0.3.*needs at least",
    ),
]


@pytest.mark.parametrize(("options", "code", "says"), REFUSED)
def test_arguments(options, code, says):
    options = {"module": NET, "optimizer": SGLD, "max_grad_norm": 1.0, **loader(), **options}
    engine = dpb.PrivacyEngine(options.pop("accountant", None))
    make = engine.make_private_with_epsilon if "epochs" in options else engine.make_private
    with pytest.raises(dpb.DPBayesError, match=says) as refused:
        make(**options)
    assert refused.value.code == code


def test_a_factory_may_have_the_engines_accountant():
    budget = dpb.PrivacyAccountant(0.5, 1e-5)
    dpb.PrivacyEngine(budget).make_private(
        module=NET, optimizer=partial(SGLD, accountant=budget), max_grad_norm=1.0, **loader()
    )


def test_a_bare_optimizer_is_vouched_for_by_true_alone():
    with pytest.raises(TypeError, match="True or False"):
        dpb.optim.DPSGLD(NET.parameters(), 0.1, **LOW, assume_independent_records="no")
