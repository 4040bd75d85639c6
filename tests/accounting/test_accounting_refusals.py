"""What accounting refuses: each wrong input is an error with its code, and nothing is recorded."""

import math
from functools import partial

import dp_accounting as dpa
import pytest
from dp_accounting import dp_event as upstream
from support.training import bare, made_private

import torch_dpbayes as dpb
from torch_dpbayes.accounting import (
    PrivacyAccountant,
    PrivacyBudgetExceeded,
    get_noise_multiplier,
    get_num_steps,
    noise_multiplier_for,
)
from torch_dpbayes.accounting.events import (
    BoundedRangeDpEvent,
    ComposedDpEvent,
    FailureDpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    MuGaussianDpEvent,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    PureDpEvent,
    SampledWithoutReplacementDpEvent,
    SelfComposedDpEvent,
    ShuffledEpochDpEvent,
    UnspecifiedBatchGaussianDpEvent,
    UserLevelDpEvent,
    ZCDpEvent,
)
from torch_dpbayes.accounting.mechanisms import DiscreteGaussianDpEvent, EpsilonDeltaDpEvent
from torch_dpbayes.accounting.random_allocation import RandomAllocationDpEvent
from torch_dpbayes.accounting.selection import Repetitions, selection_epsilon, selection_event

DELTA = 1e-5
STEP = PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0))
JOINT = ComposedDpEvent([GaussianDpEvent(1.0), PureDpEvent(1.0)])
ADD, REPLACE = "add_or_remove_one", "replace_one"
PLAN = {"target_epsilon": 1.0, "target_delta": DELTA, "sample_rate": 0.1, "steps": 10}


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
    is_refused(lambda: PrivacyAccountant().get_epsilon())
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
    *map(GaussianDpEvent, (-1.0, math.nan, math.inf, ABSURD, 1e-60)),
    PoissonSampledDpEvent(0.01, GaussianDpEvent(ABSURD)),
    SampledWithoutReplacementDpEvent(100, 1, GaussianDpEvent(ABSURD)),
    UnspecifiedBatchGaussianDpEvent(ABSURD),
    ShuffledEpochDpEvent(ABSURD),
    MuGaussianDpEvent(ABSURD),
    PureDpEvent(ABSURD),
    BoundedRangeDpEvent(1.7e308),
    ZCDpEvent(ABSURD, 0.0),
    ZCDpEvent(0.1, ABSURD),
    PoissonSampledDpEvent(1.5, GaussianDpEvent(1.0)),
    PoissonSampledDpEvent(-0.1, GaussianDpEvent(1.0)),
    PoissonSampledDpEvent(1.1, PureDpEvent(1.0)),
    PoissonSampledDpEvent(0.1, FailureDpEvent(1.0)),
    SampledWithoutReplacementDpEvent(10, 11, GaussianDpEvent(1.0)),
    SelfComposedDpEvent(STEP, -1),
    PureDpEvent(-1.0),
    *map(FailureDpEvent, (0.0, 1.0, -1e-6, math.nan)),
    ZCDpEvent(math.nan),
    RandomAllocationDpEvent(0, GaussianDpEvent(1.0)),
    upstream.TruncatedSubsampledGaussianDpEvent(9, 1.1, 3, 1.0),
    upstream.MixtureOfGaussiansDpEvent(1.0, [1.0, 2.0], [0.5, 0.4]),
    upstream.MixtureOfGaussiansDpEvent(1.0, [-1.0], [1.0]),
    upstream.RandomizedResponseDpEvent(1.3, 2),
    UserLevelDpEvent(STEP),
]
UNKNOWN = [
    GaussianDpEvent("loud"),
    FailureDpEvent("rarely"),
    PoissonSampledDpEvent(0.1, JOINT),
    SampledWithoutReplacementDpEvent(9, 3, JOINT),
    RandomAllocationDpEvent(3, PureDpEvent(1.0)),
    UserLevelDpEvent(UserLevelDpEvent(STEP)),
    upstream.UnsupportedDpEvent(),
    dpa.SampledWithReplacementDpEvent(10, 2, GaussianDpEvent(1.0)),
    1.0,
]
UNDER = [
    (ADD, upstream.RandomizedResponseDpEvent(0.3, 2)),
    (REPLACE, PoissonSampledDpEvent(0.1, LaplaceDpEvent(1.0))),
    (REPLACE, PoissonSampledDpEvent(0.1, EpsilonDeltaDpEvent(1.0, 1e-7))),
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
     (1e9, 1.0), (1e4, -0.9)],
)  # fmt: skip
def test_laws_of_a_selection_out_of_range(mean, shape):
    is_refused(lambda: Repetitions(mean, shape))


@pytest.mark.parametrize("event", [NonPrivateDpEvent(), FailureDpEvent(1e-7)])
def test_what_is_not_private_cannot_be_selected(event):
    is_refused(lambda: selection_event([(event, 1)], Repetitions(10.0), 1e-7, ADD))
    is_refused(lambda: selection_epsilon([(PureDpEvent(1.0), 1)], Repetitions(10.0), 1e-26))


def test_an_absurd_size_is_refused_wherever_it_comes_in():
    event, accountant = GaussianDpEvent(ABSURD), PrivacyAccountant(3.0, DELTA)
    target = {name: PLAN[name] for name in ("target_epsilon", "target_delta")}
    steps = {"sample_rate": 0.1, **target}
    plan = partial(dpb.mcmc.plan, dpb.mcmc.DPPenalty, **target)
    penalty = {"proposal_scale": 0.1, "log_ratio_slope": 1.0, "accountant": accountant}
    for use in (
        lambda: accountant.compose(SelfComposedDpEvent(event, 3)),
        lambda: accountant.remaining(event),
        lambda: accountant.compose(SelfComposedDpEvent(STEP, 2**40), 2**40),
        lambda: get_noise_multiplier(**PLAN, history=[(event, 2)]),
        lambda: noise_multiplier_for(lambda _: event, **target, steps=9),
        *(
            partial(call, noise)
            for noise in (ABSURD, 1e-60)
            for call in (
                lambda z: accountant.step(noise_multiplier=z, sample_rate=0.1),
                lambda z: get_num_steps(**steps, noise_multiplier=z),
                lambda z: plan(noise_multiplier=z),
                lambda z: dpb.mcmc.DPPenalty(print, **penalty, noise_multiplier=z),
                lambda z: made_private(noise_multiplier=z),
                lambda z: bare(dpb.optim.DPSGLD, noise_multiplier=z),
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
