"""What accounting refuses: each wrong input is an error with its code, and nothing is recorded."""

import enum
import math
from functools import partial

import dp_accounting as dpa
import pytest
from dp_accounting import dp_event as upstream
from support.ledgers import DELTA, STEP, sampled
from support.steps import bare, zeros
from support.training import made_private
from torch import nn

import torch_dpbayes as dpb
from torch_dpbayes.accounting import (
    PrivacyAccountant,
    PrivacyBudgetExceeded,
    events,
    get_noise_multiplier,
    get_num_steps,
    noise_multiplier_for,
)
from torch_dpbayes.accounting.dominating_pairs import dominating_pair
from torch_dpbayes.accounting.mechanisms import DiscreteGaussianDpEvent, EpsilonDeltaDpEvent
from torch_dpbayes.accounting.random_allocation import RandomAllocationDpEvent
from torch_dpbayes.accounting.selection import Repetitions, selection_epsilon, selection_event
from torch_dpbayes.ops.certificates import Setting
from torch_dpbayes.optim.sgfs import FisherSum
from torch_dpbayes.per_sample.bookkeeping import BookkeepingGradientSource
from torch_dpbayes.per_sample.hooks import HooksGradientSource

JOINT = events.ComposedDpEvent([events.GaussianDpEvent(1.0), events.PureDpEvent(1.0)])
ADD, REPLACE = "add_or_remove_one", "replace_one"
TARGET = {"target_epsilon": 1.0, "target_delta": DELTA}
PLAN = {**TARGET, "sample_rate": 0.1, "steps": 10}
PLANNED = partial(dpb.mcmc.plan, dpb.mcmc.DPPenalty, **TARGET)


def is_refused(work, kind=ValueError, code="argument"):
    with pytest.raises(kind) as refused:
        work()
    assert refused.value.code == code, refused.value


# --- settings -------------------------------------------------------------------------------------

NUMBERS = {
    "epsilon": [0.0, -1.0, math.inf, math.nan],
    "delta": [0.0, 1.0, 1e-31, math.nan],
    "sample_rate": [0.0, 1.1, math.nan],
    "steps": [0, -1, 1.5, True, "2", 2**54],
    "prior": [0, 1, math.nan],
    "false_positive_rate": [0, 1.5],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in NUMBERS.items() for v in vs])
def test_numbers_out_of_range(name, value):
    accountant = PrivacyAccountant().compose(STEP)
    if name in ("epsilon", "delta"):
        is_refused(lambda: PrivacyAccountant(**{"epsilon": 1.0, "delta": DELTA} | {name: value}))
        name = f"target_{name}"
    if name in PLAN:
        is_refused(lambda: get_noise_multiplier(**PLAN | {name: value}))
    else:
        is_refused(lambda: accountant.risk(**{name: value}))
    if name == "steps":
        is_refused(lambda: accountant.compose(STEP, value))
    assert len(accountant) == 1


@pytest.mark.parametrize("value", ["1", b"1", [1.0]])
def test_what_is_no_number(value):
    for name in ("target_epsilon", "target_delta", "sample_rate"):
        is_refused(
            lambda name=name: get_noise_multiplier(**PLAN | {name: value}),
            TypeError,
            "argument-type",
        )


def test_settings_that_do_not_go_together(tmp_path):
    is_refused(lambda: PrivacyAccountant(1.0))
    is_refused(lambda: PrivacyAccountant().get_epsilon(), code="budget-delta")
    for path in (":memory:", "", "file:budget.db?mode=memory"):
        is_refused(lambda path=path: PrivacyAccountant(path=path))
    limited, unlimited = tmp_path / "limited.db", tmp_path / "unlimited.db"
    PrivacyAccountant(3.0, DELTA, path=limited)
    PrivacyAccountant(path=unlimited)
    for path, other in (
        (limited, {"epsilon": 2.0, "delta": DELTA}),
        (limited, {"epsilon": 3.0, "delta": 1e-6}),
        (limited, {"neighboring": REPLACE}),
        (limited, {"method": "rdp"}),
        (limited, {"unit": "user"}),
        (unlimited, {"epsilon": 3.0, "delta": DELTA}),
    ):
        is_refused(lambda path=path, other=other: PrivacyAccountant(**other, path=path))


@pytest.mark.parametrize("statement", ["", " \n", None, 3])
def test_statements_that_say_nothing(statement):
    accountant = PrivacyAccountant()
    is_refused(lambda: accountant.note(statement))
    assert accountant.notes == ()


# --- events ---------------------------------------------------------------------------------------

ABSURD = 1e51
OUT_OF_RANGE = [
    *map(events.GaussianDpEvent, (-1.0, math.nan, math.inf, ABSURD, 1e-60)),
    *(sampled(*given) for given in ((ABSURD,), (1.0, 1.5), (1.0, -0.1))),
    events.SampledWithoutReplacementDpEvent(100, 1, events.GaussianDpEvent(ABSURD)),
    events.UnspecifiedBatchGaussianDpEvent(ABSURD),
    events.ShuffledEpochDpEvent(ABSURD),
    events.MuGaussianDpEvent(ABSURD),
    *map(events.PureDpEvent, (ABSURD, -1.0)),
    events.BoundedRangeDpEvent(1.7e308),
    *(events.ZCDpEvent(*given) for given in ((ABSURD, 0.0), (0.1, ABSURD), (math.nan,))),
    events.PoissonSampledDpEvent(1.1, events.PureDpEvent(1.0)),
    events.PoissonSampledDpEvent(0.1, events.FailureDpEvent(1.0)),
    events.SampledWithoutReplacementDpEvent(10, 11, events.GaussianDpEvent(1.0)),
    events.SelfComposedDpEvent(STEP, -1),
    *map(events.FailureDpEvent, (0.0, 1.0, -1e-6, math.nan)),
    RandomAllocationDpEvent(0, events.GaussianDpEvent(1.0)),
    upstream.TruncatedSubsampledGaussianDpEvent(9, 1.1, 3, 1.0),
    upstream.MixtureOfGaussiansDpEvent(1.0, [1.0, 2.0], [0.5, 0.4]),
    upstream.MixtureOfGaussiansDpEvent(1.0, [-1.0], [1.0]),
    upstream.RandomizedResponseDpEvent(1.3, 2),
    events.UserLevelDpEvent(STEP),
]
UNKNOWN = [
    events.GaussianDpEvent("loud"),
    events.FailureDpEvent("rarely"),
    events.PoissonSampledDpEvent(0.1, JOINT),
    events.SampledWithoutReplacementDpEvent(9, 3, JOINT),
    RandomAllocationDpEvent(3, events.PureDpEvent(1.0)),
    events.UserLevelDpEvent(events.UserLevelDpEvent(STEP)),
    upstream.UnsupportedDpEvent(),
    upstream.ComposedDpEvent({STEP}),
    dpa.SampledWithReplacementDpEvent(10, 2, events.GaussianDpEvent(1.0)),
    1.0,
]
UNDER = [
    (ADD, upstream.RandomizedResponseDpEvent(0.3, 2)),
    (REPLACE, events.PoissonSampledDpEvent(0.1, events.LaplaceDpEvent(1.0))),
    (REPLACE, events.PoissonSampledDpEvent(0.1, EpsilonDeltaDpEvent(1.0, 1e-7))),
    (REPLACE, upstream.MixtureOfGaussiansDpEvent(1.0, [1.0], [1.0])),
    (ADD, DiscreteGaussianDpEvent(1e6, 1)),
]


@pytest.mark.parametrize("event", OUT_OF_RANGE, ids=str)
@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_events_out_of_range(event, relation):
    accountant = PrivacyAccountant(method="rdp", neighboring=relation)
    is_refused(lambda: accountant.compose(event))
    assert len(accountant) == 0


@pytest.mark.parametrize("event", UNKNOWN, ids=str)
def test_events_that_are_not_accounted_for(event):
    accountant = PrivacyAccountant(method="rdp")
    is_refused(lambda: accountant.compose(event), TypeError, "argument-type")
    assert len(accountant) == 0


@pytest.mark.parametrize(("relation", "event"), UNDER, ids=str)
def test_events_that_give_no_guarantee_under_a_relation(relation, event):
    is_refused(lambda: PrivacyAccountant(neighboring=relation).compose(event))


@pytest.mark.parametrize(
    ("mean", "shape"),
    [(1.0, 1.0), (0.5, 0.0), (math.inf, 1.0), (math.nan, 1.0), (3.0, -1.0), (3.0, 1.1),
     (1e9, 1.0), (1e4, -0.9), (1 + 1e-12, 1.0), (1e5, -0.99)],
)  # fmt: skip
def test_laws_of_a_selection_out_of_range(mean, shape):
    is_refused(lambda: Repetitions(mean, shape))


@pytest.mark.parametrize(
    "event", [events.NonPrivateDpEvent(), events.FailureDpEvent(1e-7), events.ZCDpEvent(0.1)]
)
def test_what_is_not_private_cannot_be_selected(event):
    is_refused(lambda: selection_event([(event, 1)], Repetitions(10.0), 1e-7, ADD))
    is_refused(lambda: selection_epsilon([(events.PureDpEvent(1.0), 1)], Repetitions(10.0), 1e-26))


def test_an_absurd_size_is_refused_wherever_it_comes_in():
    event, accountant = events.GaussianDpEvent(ABSURD), PrivacyAccountant(3.0, DELTA)
    steps = {"sample_rate": 0.1, **TARGET}
    penalty = {"proposal_scale": 0.1, "log_ratio_slope": 1.0, "accountant": accountant}
    for use in (
        lambda: accountant.compose(events.SelfComposedDpEvent(event, 3)),
        lambda: accountant.remaining(event),
        lambda: accountant.compose(events.SelfComposedDpEvent(STEP, 2**40), 2**40),
        lambda: get_noise_multiplier(**PLAN, history=[(event, 2)]),
        lambda: noise_multiplier_for(lambda _: event, **TARGET, steps=9),
        *(
            partial(call, noise)
            for noise in (ABSURD, 1e-60)
            for call in (
                lambda z: accountant.step(noise_multiplier=z, sample_rate=0.1),
                lambda z: get_num_steps(**steps, noise_multiplier=z),
                lambda z: dpb.mcmc.DPPenalty(print, **penalty, noise_multiplier=z),
                lambda z: made_private(noise_multiplier=z),
                lambda z: bare([zeros(3)], dpb.optim.DPSGLD, noise_multiplier=z),
                lambda z: dpb.private_clipped_fraction(*made_private(), noise_multiplier=z),
            )
        ),
    ):
        is_refused(use)
    assert len(accountant) == 0


# --- saved states ---------------------------------------------------------------------------------


def test_states_that_would_change_the_guarantee():
    state = PrivacyAccountant(3.0, DELTA).compose(STEP, 1000).state_dict()
    is_refused(lambda: PrivacyAccountant().compose(STEP).load_state_dict(state))
    is_refused(lambda: PrivacyAccountant(neighboring=REPLACE).load_state_dict(state))
    for name in state:
        cut = {key: value for key, value in state.items() if key != name}
        is_refused(lambda cut=cut: PrivacyAccountant().load_state_dict(cut))
    small = PrivacyAccountant(0.2, DELTA)
    is_refused(lambda: small.load_state_dict(state), PrivacyBudgetExceeded, "budget-exceeded")
    assert len(small) == 0
    adaptive = PrivacyAccountant(3.0, DELTA).compose(STEP, adaptive=True).state_dict()
    is_refused(lambda: PrivacyAccountant(4.0, DELTA).load_state_dict(adaptive))


@pytest.mark.parametrize("flag", ["Adaptive", "", None, True, "adaptiv"])
def test_a_saved_charge_says_whether_it_was_adaptive(flag):
    state = PrivacyAccountant(3.0, DELTA).compose(STEP, adaptive=True).state_dict()
    state["history"] = [[*line[:3], flag, line[4]] for line in state["history"]]
    is_refused(lambda: PrivacyAccountant(3.0, DELTA).load_state_dict(state))


@pytest.mark.parametrize("count", [0.5, 2.7, math.inf, math.nan, "3", None, -1.0, 0.0])
def test_a_saved_charge_has_a_whole_count(count):
    state = PrivacyAccountant(3.0, DELTA).compose(STEP, 3).state_dict()
    (line,) = state["history"]
    for changed in ([line[0], count, *line[2:]], line[:4], None):
        is_refused(
            lambda changed=changed: PrivacyAccountant(3.0, DELTA).load_state_dict(
                {**state, "history": [changed]}
            )
        )


# --- words ----------------------------------------------------------------------------------------


class Spelled(enum.StrEnum):
    REPLACE = "replace_one"


def spent(relation, **setting):
    accountant = PrivacyAccountant(neighboring=relation, **setting)
    return accountant.compose(events.GaussianDpEvent(1.5)).get_epsilon(DELTA)


# from a relation, and a path that is free, to something that the relation decides
USES = {
    "PrivacyAccountant": lambda relation, _: spent(relation),
    "PrivacyAccountant, rdp": lambda relation, _: spent(relation, method="rdp"),
    "ledger": lambda relation, path: spent(relation, path=path),
    "get_noise_multiplier": lambda relation, _: get_noise_multiplier(
        **TARGET, sample_rate=1.0, steps=9, neighboring=relation
    ),
    "get_num_steps": lambda relation, _: get_num_steps(
        **TARGET, sample_rate=1.0, noise_multiplier=30.0, neighboring=relation
    ),
    "noise_multiplier_for": lambda relation, _: noise_multiplier_for(
        events.GaussianDpEvent, **TARGET, steps=9, neighboring=relation
    ),
    "plan, noise": lambda relation, _: (
        PLANNED(num_iterations=50, neighboring=relation).noise_multipliers
    ),
    "dominating_pair": lambda relation, _: repr(dominating_pair(STEP, relation)),
    "a certificate's setting": lambda relation, _: Setting(1.0, None, relation).records_changed,
    "a second moment beside the sum": lambda relation, _: FisherSum(
        1.0, 10.0, is_full=False, share=0.5
    ).equivalent_noise_multiplier(1.0, is_full=True, sampling=None, neighboring=relation),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_every_use_of_a_relation_tells_the_two_apart_and_takes_nothing_else(use, tmp_path):
    right = {
        ADD: [ADD, dpa.NeighboringRelation.ADD_OR_REMOVE_ONE],
        REPLACE: [REPLACE, dpa.NeighboringRelation.REPLACE_ONE, Spelled.REPLACE],
    }
    found = {
        name: {repr(use(given, tmp_path / f"{name}{i}")) for i, given in enumerate(spellings)}
        for name, spellings in right.items()
    }
    assert len(found[ADD]) == len(found[REPLACE]) == 1 and found[ADD] != found[REPLACE]
    for i, given in enumerate(("replace-one", "", dpa.NeighboringRelation, None)):
        is_refused(lambda i=i, given=given: use(given, tmp_path / f"wrong{i}"))
    assert not list(tmp_path.glob("wrong*"))


OPTIONS = {
    "method": lambda word: PrivacyAccountant(method=word),
    "method of noise_multiplier_for": lambda word: noise_multiplier_for(
        events.GaussianDpEvent, **TARGET, steps=100, method=word
    ),
    "sampling": lambda word: bare([zeros(3)], dpb.optim.DPSGLD, sampling=word),
    "momentum": lambda word: bare([zeros(3)], dpb.optim.DPSGHMC, momentum=word),
    "fisher": lambda word: bare([zeros(3)], dpb.optim.DPSGFS, fisher=word),
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


@pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)
def test_a_misspelt_option_is_an_error(option):
    for word in ("", "none", "Poisson", "RDP", "Full", "Hooks"):
        is_refused(lambda word=word: option(word))
