"""What makes no audit is refused, before a training wherever it can be known."""

from copy import deepcopy
from functools import partial

import numpy as np
import pytest
import torch
from dp_accounting.dp_event import TruncatedSubsampledGaussianDpEvent
from support.audits import charged
from support.refusals import refused
from test_training_run import private, records, train

import torch_dpbayes as dpb
from torch_dpbayes.accounting.events import FailureDpEvent, GaussianDpEvent
from torch_dpbayes.audit import from_scores, one_run, repeated, transcripts
from torch_dpbayes.optim import DPSGFS

GAUSSIAN = GaussianDpEvent(2.0)


def scores(values=(1.0, 2.0), included=(True, False), **options):
    return partial(from_scores, list(values), list(included), **{"delta": 1e-5, **options})


INDEPENDENT = {"bound": "independent"}
OF_SCORES = {
    "too few repeats": partial(repeated, float, epsilon=1, delta=1e-5, repeats=4),
    "delta 0 of a Gaussian": partial(repeated, float, epsilon=1, delta=0),
    "inclusions of int": scores([1.0], [1], epsilon=1),
    "two lengths": scores([1.0], epsilon=1),
    "nan": scores([np.nan], [True], epsilon=1),
    "more guesses than canaries": scores(epsilon=1, num_guesses=3),
    "nan of a release": partial(repeated, lambda is_in: np.nan, epsilon=1, delta=1e-5),
    "no guess": scores(epsilon=1, num_guesses=0),
    "not all if independent": scores(epsilon=1, num_guesses=1, **INDEPENDENT),
    "another bound": scores(epsilon=1, bound="tight"),
    "nothing stated": scores(),
    "stated twice": scores(epsilon=1, accountant=dpb.PrivacyAccountant()),
    "an infinite epsilon": scores(accountant=charged(FailureDpEvent(0.5))),
    **{
        f"guesses on {type(event).__name__} called independent": scores(
            accountant=charged(GAUSSIAN, event), **INDEPENDENT
        )
        for event in (
            transcripts.SampledWithoutReplacementDpEvent(100, 10, GAUSSIAN),
            transcripts.RandomAllocationDpEvent(10, GAUSSIAN),
            TruncatedSubsampledGaussianDpEvent(100, 0.1, 20, 2.0),
        )
    },
}


@pytest.mark.parametrize("name", OF_SCORES)
def test_scores_that_make_no_audit(name):
    with refused("audit"):
        OF_SCORES[name]()


@pytest.mark.parametrize("epsilon", [-1.0, np.nan, "1"])
def test_no_audit_of_what_no_epsilon_is(epsilon):
    wrong = scores(epsilon=epsilon), scores(epsilon=1.0, delta=None)
    for audit in (*wrong, partial(repeated, float, epsilon=epsilon, delta=1e-5)):
        with pytest.raises((dpb.errors.ArgumentError, dpb.errors.ArgumentTypeError)):
            audit()


def without_a_step(dataset, engine):
    raise AssertionError("trained all the same")


def without_a_model(dataset, engine):
    train(dataset, engine)


def elsewhere(dataset, engine):
    private(dataset, engine)
    train(records(), dpb.PrivacyEngine())


ODD = [(torch.zeros(6), torch.tensor(1))]
SCALED = partial(DPSGFS, sensitivity_scale=torch.ones(403))
BEFORE = {
    "too few canaries": {"num_canaries": 4},
    "no delta": {"delta": None},
    "delta above 1": {"delta": 1.5},
    "confidence 1": {"confidence": 1.0},
    "too few records": {"canaries": ODD},
    "losses of one model": {"canaries": 100 * ODD, **INDEPENDENT},
    "too small a budget": {"delta": None, "accountant": charged(epsilon=0.05, delta=1e-5)},
}
RUNS = {
    **{name: (without_a_step, options) for name, options in BEFORE.items()},
    "too few parameters": (train, {"num_canaries": 5000}),
    "workers": (partial(train, workers=1), {}),
    "no step": (elsewhere, {}),
    "no noise": (partial(train, z=0.0, temperature=0.0), {}),
    "a sensitivity_scale": (partial(train, factory=SCALED), {}),
    "fixed sizes": (partial(train, rate=0.2, sampling="fixed_size"), INDEPENDENT),
    "users": (partial(train, user_ids=range(140)), {"accountant": charged(unit="user")}),
    "no model": (without_a_model, {"canaries": [deepcopy(odd) for odd in 100 * ODD]}),
}


@pytest.mark.parametrize("name", RUNS)
def test_runs_that_make_no_audit(name):
    training, options = RUNS[name]
    with refused("argument-type" if name == "no model" else "audit"):
        one_run(training, records(), **{"num_canaries": 100, "delta": 1e-5, **options})
