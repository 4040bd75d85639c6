"""Settings that are one of a few words: anything else is an error, wherever it comes in."""

import enum
from functools import partial

import pytest
from dp_accounting import NeighboringRelation
from support.training import bare, made_private, sampled
from torch import nn

import torch_dpbayes as dpb
from torch_dpbayes.accounting import (
    PrivacyAccountant,
    get_noise_multiplier,
    get_num_steps,
    noise_multiplier_for,
)
from torch_dpbayes.accounting.dominating_pairs import dominating_pair
from torch_dpbayes.accounting.events import (
    GaussianDpEvent,
    PoissonSampledDpEvent,
)
from torch_dpbayes.errors import ArgumentError
from torch_dpbayes.ops.certificates import Setting
from torch_dpbayes.optim.fisher_sum import FisherSum
from torch_dpbayes.per_sample.bookkeeping import BookkeepingGradientSource
from torch_dpbayes.per_sample.hooks import HooksGradientSource

TARGET = {"target_epsilon": 1.0, "target_delta": 1e-5}
STEP = PoissonSampledDpEvent(0.01, GaussianDpEvent(1.5))


class Spelled(enum.StrEnum):
    REPLACE = "replace_one"


RIGHT = {
    "add_or_remove_one": ["add_or_remove_one", NeighboringRelation.ADD_OR_REMOVE_ONE],
    "replace_one": ["replace_one", NeighboringRelation.REPLACE_ONE, Spelled.REPLACE],
}
WRONG = ["replace-one", "REPLACE_ONE", "", NeighboringRelation, None, b"replace_one"]

TAKEN = {"sample_rate": 0.01, "steps": 100} | TARGET
PLANNED = partial(dpb.mcmc.plan, dpb.mcmc.DPPenalty, **TARGET)


def spent(relation, **setting):
    return PrivacyAccountant(neighboring=relation, **setting).compose(STEP, 100).get_epsilon(1e-5)


# from a relation, and a path that is free, to something that the relation decides
USES = {
    "PrivacyAccountant": lambda relation, _: spent(relation),
    "PrivacyAccountant, rdp": lambda relation, _: spent(relation, method="rdp"),
    "ledger": lambda relation, path: spent(relation, path=path),
    "get_noise_multiplier": lambda relation, _: get_noise_multiplier(**TAKEN, neighboring=relation),
    "get_num_steps": lambda relation, _: get_num_steps(
        **TARGET, sample_rate=0.01, noise_multiplier=1.0, neighboring=relation
    ),
    "noise_multiplier_for": lambda relation, _: noise_multiplier_for(
        sampled, **TARGET, steps=100, neighboring=relation
    ),
    "plan, noise": lambda relation, _: (
        PLANNED(num_iterations=50, neighboring=relation).noise_multipliers
    ),
    "plan, iterations": lambda relation, _: (
        PLANNED(noise_multiplier=30.0, neighboring=relation).num_iterations
    ),
    "dominating_pair": lambda relation, _: repr(dominating_pair(STEP, relation)),
    "a certificate's setting": lambda relation, _: Setting(1.0, None, relation).records_changed,
    "a second moment beside the sum": lambda relation, _: FisherSum(
        1.0, 10.0, is_full=False, share=0.5
    ).equivalent_noise_multiplier(1.0, is_full=True, sampling=None, neighboring=relation),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_every_use_of_a_relation_tells_the_two_apart_and_takes_nothing_else(use, tmp_path):
    found = {
        name: [use(given, tmp_path / f"{name}{i}") for i, given in enumerate(spellings)]
        for name, spellings in RIGHT.items()
    }
    assert all(value == values[0] for values in found.values() for value in values)
    assert found["replace_one"][0] != found["add_or_remove_one"][0]
    for i, given in enumerate(WRONG):
        with pytest.raises(ArgumentError):
            use(given, tmp_path / f"wrong{i}")
    assert not list(tmp_path.glob("wrong*"))


OPTIONS = {
    "method": lambda word: PrivacyAccountant(method=word),
    "method of noise_multiplier_for": lambda word: noise_multiplier_for(
        sampled, **TARGET, steps=100, method=word
    ),
    "sampling": lambda word: bare(dpb.optim.DPSGLD, sampling=word),
    "momentum": lambda word: bare(dpb.optim.DPSGHMC, momentum=word),
    "fisher": lambda word: bare(dpb.optim.DPSGFS, fisher=word),
    "grad_sample_mode": lambda word: made_private(grad_sample_mode=word),
    "loss_reduction": lambda word: made_private(loss_reduction=word),
    "loss_reduction of book-keeping": lambda word: BookkeepingGradientSource(
        nn.Linear(3, 1), loss_reduction=word
    ),
    "loss_reduction of hooks": lambda word: HooksGradientSource(
        nn.Linear(3, 1), loss_reduction=word
    ),
    "family": lambda word: dpb.ops.GLM(family=word),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_a_misspelt_option_is_an_error(option):
    for word in ("", "none", "Poisson", "RDP", "Full", "Hooks"):
        with pytest.raises(ArgumentError):
            OPTIONS[option](word)
