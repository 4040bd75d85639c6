"""Numbers that nobody means are errors that say so; what is left, however extreme, has a
bound that holds.
"""

import math
from functools import partial

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.training import bare, made_private

import torch_dpbayes as dpb
from torch_dpbayes.accounting import (
    PrivacyAccountant,
    PrivacyBudgetExceeded,
    bounds,
    get_noise_multiplier,
    get_num_steps,
    noise_multiplier_for,
)
from torch_dpbayes.accounting.__main__ import main
from torch_dpbayes.accounting.dominating_pairs import Gaussian, Sampled
from torch_dpbayes.accounting.events import (
    BoundedRangeDpEvent,
    ComposedDpEvent,
    FailureDpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    MuGaussianDpEvent,
    PoissonSampledDpEvent,
    PureDpEvent,
    SampledWithoutReplacementDpEvent,
    SelfComposedDpEvent,
    ShuffledEpochDpEvent,
    UnspecifiedBatchGaussianDpEvent,
    ZCDpEvent,
)
from torch_dpbayes.accounting.gdp import gaussian_delta, gaussian_epsilon

DELTA = 1e-5
TARGET = {"target_epsilon": 1.0, "target_delta": DELTA}
ABSURD = [1e51, 1e200, 1e300, 1.7e308]

NOISES = {
    "Gaussian": GaussianDpEvent,
    "Poisson": lambda z: PoissonSampledDpEvent(0.01, GaussianDpEvent(z)),
    "without replacement": lambda z: SampledWithoutReplacementDpEvent(100, 1, GaussianDpEvent(z)),
    "unspecified": UnspecifiedBatchGaussianDpEvent,
    "shuffled": ShuffledEpochDpEvent,
    "composed": lambda z: ComposedDpEvent([SelfComposedDpEvent(GaussianDpEvent(z), 3)]),
}
LOSSES = {
    "mu": MuGaussianDpEvent,
    "pure": PureDpEvent,
    "bounded range": BoundedRangeDpEvent,
    "zCDP, rho": lambda rho: ZCDpEvent(rho, 0.0),
    "zCDP, xi": lambda xi: ZCDpEvent(0.1, xi),
}


@pytest.mark.parametrize("make", [*NOISES.values(), *LOSSES.values()], ids=[*NOISES, *LOSSES])
@pytest.mark.parametrize("value", ABSURD)
@pytest.mark.parametrize("method", ["pld", "rdp"])
def test_an_event_of_absurd_size_is_refused_wherever_it_comes_in(make, value, method):
    setting = {"method": method, "neighboring": "replace_one"}
    limited = PrivacyAccountant(3.0, DELTA, **setting)
    history = [(make(value), 2)]
    for use in (
        lambda: PrivacyAccountant(**setting).compose(make(value)),
        lambda: limited.compose(make(value), 3),
        lambda: limited.remaining(make(value)),
        lambda: get_num_steps(**TARGET, sample_rate=0.1, noise_multiplier=1.0, history=history),
        lambda: get_noise_multiplier(**TARGET, sample_rate=0.1, steps=9, history=history),
        lambda: noise_multiplier_for(lambda _: make(value), **TARGET, steps=9),
    ):
        with pytest.raises(ValueError, match="1e\\+50"):
            use()
    assert len(limited) == 0


STEPPED = PrivacyAccountant()
PLANNED = partial(dpb.mcmc.plan, dpb.mcmc.DPPenalty, **TARGET)
OPTIMIZERS = (dpb.optim.DPSGLD, dpb.optim.DPSGHMC, dpb.optim.DPSGNHT, dpb.optim.DPSGFS)
SETTINGS = {
    "step": lambda z: STEPPED.step(noise_multiplier=z, sample_rate=0.1),
    "get_num_steps": lambda z: get_num_steps(**TARGET, sample_rate=0.1, noise_multiplier=z),
    "plan": lambda z: PLANNED(noise_multiplier=z),
    "DPPenalty": lambda z: dpb.mcmc.DPPenalty(
        print, proposal_scale=0.1, log_ratio_slope=1.0, noise_multiplier=z, accountant=STEPPED
    ),
    "make_private": lambda z: made_private(noise_multiplier=z),
    **{
        kind.__name__: partial(lambda kind, z: bare(kind, noise_multiplier=z), kind)
        for kind in OPTIMIZERS
    },
}


@pytest.mark.parametrize("use", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("value", [1e-60, 1e-300, *ABSURD])
def test_a_noise_multiplier_of_absurd_size_is_refused_wherever_it_comes_in(use, value):
    with pytest.raises(ValueError, match=r"noise_multiplier.* clip bound"):
        use(value)


def test_the_noise_of_a_clipped_fraction():
    with pytest.raises(ValueError, match=r"noise_multiplier.* clip bound"):
        dpb.private_clipped_fraction(*made_private(), noise_multiplier=1e300)


# --- what is left ---------------------------------------------------------------------------------

SIZES = st.sampled_from(
    [1e-320, 1e-60, 1e-50, 1e-20, 1e-9, 1e-3, 0.3, 30.0, 499.0, 501.0, 1e4, 1e7, 1e50]
)
COUNTS = st.sampled_from([1, 2, 1000, 10**6, 10**9])
RELATIONS = st.sampled_from(["add_or_remove_one", "replace_one"])
METHODS = st.sampled_from(["pld", "rdp"])


def exact_epsilon(event, delta):
    """Of one release, in 60 digits."""
    with mpmath.workdps(60):
        delta = mpmath.mpf(delta)
        if isinstance(event, MuGaussianDpEvent):
            mu = mpmath.mpf(event.mu)
            if mpmath.erf(mu / mpmath.sqrt(8)) <= delta:
                return 0.0
            return None
        size = mpmath.mpf(event.epsilon)
        if isinstance(event, PureDpEvent):
            found = size + mpmath.log1p(-delta * (1 + mpmath.exp(-size)))
        else:
            found = size + 2 * mpmath.log1p(-mpmath.sqrt(delta * -mpmath.expm1(-size)))
        return max(float(found), 0.0) if found > 0 else 0.0


@pytest.mark.thorough
@given(
    kind=st.sampled_from([MuGaussianDpEvent, PureDpEvent, BoundedRangeDpEvent]),
    size=SIZES,
    count=COUNTS,
    method=METHODS,
    delta=st.sampled_from([1e-10, 1e-5, 0.5]),
)
@examples(15)
def test_extreme_releases_cost_at_least_the_truth(kind, size, count, method, delta):
    event = kind(size)
    one = PrivacyAccountant(method=method).compose(event)
    stated = one.get_epsilon(delta, return_bounds=True)
    exact = exact_epsilon(event, delta)
    if exact is not None:
        assert exact * (1 - 1e-12) <= stated.upper
        assert stated.lower <= exact * (1 + 1e-9) + 1e-300
    several = PrivacyAccountant(method=method).compose(event, count)
    assert stated.upper <= several.get_epsilon(delta) * (1 + 1e-9)
    if kind is not MuGaussianDpEvent and method == "pld":
        assert several.get_epsilon(delta) <= count * max(size, 1e-50) * (1 + 1e-9)
    for epsilon in (0.0, 1e-300, 1.0, 1e10, 1e300):
        assert 0 <= several.get_delta(epsilon) <= 1
    several.summary()


@pytest.mark.parametrize("kind", [PureDpEvent, BoundedRangeDpEvent])
@pytest.mark.parametrize(("size", "count"), [(1e-320, 10**6), (1e-30, 10**6), (1e-14, 10**9)])
def test_losses_too_small_for_the_smallest_delta_have_a_risk(kind, size, count):
    """Of the sum, the advantage is that of an almost normal variable."""
    risk = PrivacyAccountant().compose(kind(size), count).risk(delta=DELTA)
    assert 0.2 * size * math.sqrt(count) < risk.advantage < 1e-6


def of_any_kind(size):
    noise = min(max(size, 1e-50), 1e50)
    return [
        GaussianDpEvent(noise),
        PoissonSampledDpEvent(0.01, GaussianDpEvent(noise)),
        PoissonSampledDpEvent(1e-320, GaussianDpEvent(noise)),
        PoissonSampledDpEvent(1 - 1e-16, GaussianDpEvent(noise)),
        SampledWithoutReplacementDpEvent(2**53, 1, GaussianDpEvent(noise)),
        MuGaussianDpEvent(size),
        PureDpEvent(size),
        BoundedRangeDpEvent(size),
        FailureDpEvent(min(size, 0.5)),
    ]


EVENTS = SIZES.flatmap(lambda size: st.sampled_from(of_any_kind(size)))


def assert_costs_at_least_each(events, method, relation):
    """Warnings of NumPy are errors here."""
    together = PrivacyAccountant(method=method, neighboring=relation)
    for event, count in events:
        together.compose(event, count)
    epsilon = together.get_epsilon(DELTA)
    assert not math.isnan(epsilon)
    for event, count in events:
        alone = PrivacyAccountant(method=method, neighboring=relation).compose(event, count)
        assert alone.get_epsilon(DELTA, return_bounds=True).lower <= epsilon * (1 + 1e-9)
    for size in (0.0, 1.0, 1e300):
        assert 0 <= together.get_delta(size) <= 1


@pytest.mark.slow
@given(
    events=st.lists(st.tuples(EVENTS, COUNTS), min_size=2, max_size=3),
    method=METHODS,
    relation=RELATIONS,
)
@examples(12)
def test_extreme_releases_together_cost_at_least_each(events, method, relation):
    assert_costs_at_least_each(events, method, relation)


def test_beside_a_huge_gaussian_nothing_is_amplified():
    counts = {Gaussian(1.1e4): 1, Sampled("directed", 0.9, 0.05): 9}
    mu = math.sqrt(1.1e4**2 + 9 * 20.0**2)
    assert bounds.upper_epsilon(counts, DELTA) == pytest.approx(gaussian_epsilon(mu, DELTA), 1e-9)
    for epsilon in (mu**2 / 2 - mu, mu**2 / 2 + 2 * mu):
        assert bounds.upper_delta(counts, epsilon) == pytest.approx(
            gaussian_delta(mu, epsilon), rel=1e-6
        )


@pytest.mark.parametrize("epsilon", [1e-300, 1e-9, 1e10, 1e300])
@pytest.mark.parametrize("method", ["pld", "rdp"])
def test_extreme_budgets(epsilon, method):
    accountant = PrivacyAccountant(epsilon, DELTA, method=method)
    for event in (
        GaussianDpEvent(1e50),
        MuGaussianDpEvent(1e-50),
        GaussianDpEvent(1e-3),
    ):
        left = accountant.remaining(event)
        try:
            accountant.compose(event, 2)
        except PrivacyBudgetExceeded:
            assert left < 2
        else:
            assert left >= 2
    assert accountant.get_epsilon() <= epsilon


# --- failures that use all of delta ---------------------------------------------------------------

ALL_OF_IT = "2e-05 in all, which leaves nothing of delta = 1e-05"


@pytest.mark.parametrize("method", ["pld", "rdp"])
def test_failures_that_use_all_of_delta_say_so(method, tmp_path, capsys):
    setting = {"method": method}
    failing = (
        PrivacyAccountant(**setting).compose(FailureDpEvent(2e-5)).compose(GaussianDpEvent(9.0))
    )
    assert failing.get_epsilon(1e-5) == math.inf and math.isfinite(failing.get_epsilon(1e-4))
    assert np.char.count(failing.summary(), ALL_OF_IT) == 1
    limited = PrivacyAccountant(3.0, 1e-5, **setting)
    with pytest.raises(PrivacyBudgetExceeded, match=ALL_OF_IT):
        limited.compose(ComposedDpEvent([PureDpEvent(0.1), FailureDpEvent(2e-5)]))
    for history, make in (
        ([(FailureDpEvent(2e-5), 1)], GaussianDpEvent),
        ([], lambda z: ComposedDpEvent([GaussianDpEvent(z), FailureDpEvent(2e-5)])),
    ):
        with pytest.raises(ValueError, match=ALL_OF_IT):
            noise_multiplier_for(make, **TARGET, steps=1, history=history)
    path = tmp_path / "ledger.db"
    PrivacyAccountant(path=path, **setting).compose(FailureDpEvent(2e-5)).close()
    assert main([str(path)]) == 0 and ALL_OF_IT in capsys.readouterr().out


def test_failures_that_leave_something_of_delta_say_nothing():
    """Nor do those that use exactly all of it beside losses that are bounded, whose epsilon
    is finite.
    """
    for event in (PureDpEvent(0.1), GaussianDpEvent(9.0)):
        accountant = PrivacyAccountant().compose(FailureDpEvent(5e-6)).compose(event)
        assert "leaves nothing" not in accountant.summary()
    exactly = PrivacyAccountant().compose(FailureDpEvent(1e-5)).compose(PureDpEvent(0.1))
    assert math.isfinite(exactly.get_epsilon(1e-5)) and "leaves nothing" not in exactly.summary()
    exactly.compose(GaussianDpEvent(9.0))
    assert exactly.get_epsilon(1e-5) == math.inf and "leaves nothing" in exactly.summary()


@pytest.mark.parametrize("method", ["pld", "rdp"])
@pytest.mark.parametrize("noise", [1e-8, 1e-3, 1.4e-3, 1e-2])
def test_laplace_noise_that_hides_nothing_has_a_large_epsilon(noise, method):
    accountant = PrivacyAccountant(method=method).compose(LaplaceDpEvent(noise), 5)
    assert 4.9 / noise < accountant.get_epsilon(1e-5) <= 5 / noise * (1 + 1e-9)
    accountant.summary()
    with pytest.raises(PrivacyBudgetExceeded):
        PrivacyAccountant(1.0, 1e-5, method=method).compose(LaplaceDpEvent(noise))


@pytest.mark.parametrize("size", [1e4, 2e4, 1e50])
def test_a_bounded_range_beyond_all_nodes_has_a_summary(size):
    assert "epsilon" in PrivacyAccountant().compose(BoundedRangeDpEvent(size)).summary()
