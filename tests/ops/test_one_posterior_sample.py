"""One posterior sample: charges, tempering, words, what must not leave, and refusals."""

import logging
import math
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from scipy import optimize
from support.one_draw import RELATIONS, Interrupted, finite, problem
from support.profiles import stated

import torch_dpbayes as dpb
from torch_dpbayes import ops
from torch_dpbayes.accounting import PrivacyAccountant, PrivacyBudgetExceeded
from torch_dpbayes.accounting.events import (
    BoundedRangeDpEvent,
    ComposedDpEvent,
    FailureDpEvent,
    GaussianDpEvent,
    MuGaussianDpEvent,
    PoissonSampledDpEvent,
    PureDpEvent,
)
from torch_dpbayes.ops.certificates import Setting
from torch_dpbayes.ops.nuts import no_u_turn
from torch_dpbayes.ops.one_posterior_sample import largest_tempering

LOG_CONCAVE = ops.StronglyLogConcave()
WALK = ops.Overdamped(5, 0.01)
RENYI = ops.RenyiClose(LOG_CONCAVE, WALK, divergence=0.02, order=50.0, delta=1e-6)
VARIATION = ops.TotalVariationClose(ops.Bounded(0.2), 1e-9, 1e-6, ops.Underdamped(5, 0.1))


def held(*budget, **options):
    return PrivacyAccountant(*budget, **{"neighboring": "replace_one", **options})


def one(model=None, certificate=None, *target, **options):
    return ops.OnePosteriorSample(model or ops.GLM(), certificate or finite(), *target, **options)


# --- charging -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("neighboring", "method", "before"),
    [("replace_one", "pld", 0), ("replace_one", "rdp", 50), ("add_or_remove_one", "pld", 50)],
)
def test_the_target_is_met_with_what_the_accountant_holds(neighboring, method, before):
    accountant = PrivacyAccountant(method=method, neighboring=neighboring)
    if before:
        accountant.compose(PoissonSampledDpEvent(0.01, GaussianDpEvent(2.0)), before)
    sampler = one(None, finite(500), 1.0, 1e-5, accountant, num_data=50)
    draw = sampler.sample(*problem())
    assert list(draw) == ["weights"] and draw["weights"].shape == (3,)
    assert not draw["weights"].requires_grad and len(accountant) == before + 1
    assert accountant.history[-1].event == sampler.event
    assert 1.0 - 1e-4 <= accountant.get_epsilon(1e-5) <= 1.0 + 1e-9
    assert 0 < sampler.tempering < 1
    assert sampler.variance_inflation == 1 + 1 / sampler.tempering
    with pytest.raises(PrivacyBudgetExceeded):
        sampler.sample(*problem())


def test_nothing_is_drawn_where_the_charge_is_refused_or_another_comes_in_between():
    seen = []

    def sampler(accountant, *target, **options):
        class Noting(ops.FiniteRunLangevin):
            def draw(self, *arguments):
                seen.append(len(accountant))
                return super().draw(*arguments)

        return one(None, Noting(5), *target, accountant=accountant, **options)

    small = held(1e-3, 1e-5)
    with pytest.raises(PrivacyBudgetExceeded):
        sampler(small).sample(*problem())
    assert not seen and len(small) == 0
    shared = Interrupted(neighboring="replace_one")
    late = sampler(shared, 1.0, 1e-5, num_data=50)
    late.tempering  # noqa: B018  solved before the other charge
    with pytest.raises(PrivacyBudgetExceeded, match="Nothing was drawn, but the charge stays"):
        late.sample(*problem())
    assert not seen and len(shared) == 4
    sampler(held()).sample(*problem())
    assert seen == [1]


class Slow(PrivacyAccountant):
    """So slow that all threads have looked before the first has charged."""

    def compose(self, event, count=1, label=None, adaptive=False):
        time.sleep(0.05)
        return super().compose(event, count, label, adaptive)


def test_of_many_threads_one_gets_the_draw():
    accountant = Slow(neighboring="replace_one")
    sampler = one(None, finite(5), 1.0, 1e-5, accountant, num_data=50)
    sampler.tempering  # noqa: B018
    with ThreadPoolExecutor(4) as pool:
        draws = [pool.submit(sampler.sample, *problem()) for _ in range(4)]
    errors = [draw.exception() for draw in draws if draw.exception() is not None]
    assert [type(error) for error in errors] == [PrivacyBudgetExceeded] * 3
    assert len(accountant) == 1 and accountant.get_epsilon(1e-5) <= 1.0


@pytest.mark.parametrize("certificate", [RENYI, VARIATION])
def test_a_pair_with_delta_is_never_charged_as_less_tempered_and_used_up(certificate):
    glm, setting = ops.GLM(prior_std=0.2), Setting(1.0, None, "replace_one")
    epsilon, delta = certificate.single_guarantee(glm, setting)
    exact = certificate.target.event(glm, setting)
    assert epsilon > optimize.brentq(lambda e: stated(exact, e) - delta, 0, 40) and delta == 1e-6
    release = one(glm, certificate)
    assert f"({epsilon:.5g}, 1e-06)" in release.guarantee()
    assert release.event == ComposedDpEvent([PureDpEvent(epsilon), FailureDpEvent(1e-6)])
    alone = held().compose(release.event)
    assert alone.get_epsilon(1e-6) == pytest.approx(epsilon, rel=1e-9)
    assert alone.get_epsilon(0.9e-6) == math.inf
    for method in ("pld", "rdp"):
        accountant = held(1.0, 1e-5, method=method)
        release = one(None, certificate, 1.0, accountant=accountant)
        assert torch.isfinite(release.sample(*problem())["weights"]).all()
        assert accountant.get_epsilon() <= 1.0 and 0 < release.tempering <= 1
        if release.tempering < 1:
            assert accountant.get_epsilon() == pytest.approx(1.0, rel=1e-3)
    # each uses up a tenth of delta, and their losses are bounded
    assert held(1e3, 1e-5, method="rdp").remaining(release.event) == 10
    with pytest.raises(ValueError, match="cannot be met"):  # a delta below that of the certificate
        one(None, certificate, 1.0, 0.9e-6).tempering  # noqa: B018


def test_a_distance_that_is_too_large_for_a_full_likelihood_is_met_by_tempering():
    glm, certificate = ops.GLM(prior_std=2.0), ops.TotalVariationClose(LOG_CONCAVE, 2e-7, 1e-6)
    release = one(glm, certificate, 30.0, 1e-5)
    assert 0 < release.tempering < 1 and math.isfinite(release.event.events[0].epsilon)
    far = ops.RenyiClose(LOG_CONCAVE, WALK, divergence=1e4, order=50.0, delta=1e-6)
    for held_to, epsilon, message in (
        (certificate, None, "too large"),
        (far, None, "no finite epsilon"),
        (far, 1.0, "no finite epsilon|cannot be met"),
    ):
        with pytest.raises(ValueError, match=message):
            one(glm, held_to, epsilon, 1e-5).event  # noqa: B018


# --- the tempering --------------------------------------------------------------------------------

COSTS = {
    "proportional": lambda r: 7.3 * r,
    "quadratic": lambda r: 40 * r**2 + 3 * r,
    "above what is held": lambda r: 0.9 + 5 * r,
    "nothing below": lambda r: max(0.0, 60 * (r - 0.01)),
    "not certified above": lambda r: 0.4 * r if r < 0.2345 else math.inf,
    "a jump": lambda r: 0.4 if r < 0.0123 else 30.0,
    "tiny": lambda r: 3e6 * r,
}


def test_the_largest_tempering_meets_the_target_and_no_larger_one_does():
    for cost in COSTS.values():
        found = largest_tempering(cost, 1.0)
        assert cost(found) <= 1.0 < cost(found * (1 + 1e-6))
    assert largest_tempering(lambda r: 0.99 * r, 1.0) == 1.0
    assert largest_tempering(lambda r: 1.0 + r, 1.0) is None
    assert largest_tempering(lambda r: math.inf, 1.0) is None


def test_a_first_draw_composes_nothing(monkeypatch):
    """What it is charged has a closed form, also where no cheap bound shows that it fits."""
    monkeypatch.setattr("torch_dpbayes.accounting.bounds.compose", None)
    assert one(None, RENYI, 3.0, 1e-5).sample(*problem())


@pytest.mark.parametrize("neighboring", RELATIONS)
def test_the_tempering_of_a_guarantee_is_that_of_its_closed_form(neighboring):
    """G/√λ = 2ρ/√λ or ρ/√λ, beside a Gaussian that the accountant holds."""
    accountant = PrivacyAccountant(neighboring=neighboring).compose(MuGaussianDpEvent(0.05), 4)
    glm = ops.GLM(prior_std=2.0)
    sampler = one(glm, LOG_CONCAVE, 0.8, 1e-6, accountant)
    mu = optimize.brentq(lambda m: stated(MuGaussianDpEvent(m), 0.8) - 1e-6, 0.01, 2)
    expected = math.sqrt(mu**2 - 0.1**2) / 2 / (2 if neighboring == "replace_one" else 1)
    assert sampler.tempering == pytest.approx(expected, rel=1e-6)
    bounded = one(glm, ops.Bounded(10.0), 1.0, 1e-5).event
    assert stated(bounded, 1.0) <= 1e-5 < stated(BoundedRangeDpEvent(bounded.epsilon * 1.001), 1.0)


# --- what leaves, and what is said ----------------------------------------------------------------


@pytest.mark.parametrize(
    "certificate",
    [finite(3), ops.Bounded(5.0, warmup_steps=12), ops.StronglyLogConcave(warmup_steps=12)],
    ids=["run", "bounded", "concave"],
)
def test_nothing_but_the_draw_leaves_whatever_the_caller_has_switched_on(
    certificate, capsys, caplog
):
    x, y = problem()
    before, draws = (x.clone(), y.clone()), []
    with caplog.at_level(logging.DEBUG):
        for _ in range(2):
            torch.manual_seed(0)
            state, sampler = torch.get_rng_state(), one(None, certificate)
            with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
                draws.append(sampler.sample(x, y)["weights"])
            assert torch.equal(torch.get_rng_state(), state)
            assert draws[-1].dtype == torch.float64 and not draws[-1].is_inference()
            assert not any(isinstance(value, torch.Tensor) for value in vars(sampler).values())
    assert not torch.equal(draws[0], draws[1])  # seeds do not repeat it
    assert torch.equal(x, before[0]) and torch.equal(y, before[1])
    assert capsys.readouterr() == ("", "")
    assert not [record for record in caplog.records if record.name.startswith(("torch", "pyro"))]


def test_a_seed_that_another_thread_sets_does_not_reach_the_chain():
    draws = []
    for _ in range(2):

        def potential(theta):
            torch.manual_seed(0)  # at every step, whatever the other thread is about
            return theta.square().sum() / 2

        with torch.random.fork_rng([]):
            draws.append(no_u_turn(potential, torch.zeros(3, dtype=torch.float64), 5))
    assert not torch.equal(*draws)


def test_a_guarantee_says_what_is_assumed():
    assert "ASSUMED" not in one(num_data=100).guarantee()
    asserted = finite(lipschitz=1.0, strength=1.0, smoothness=2.0)
    for certificate in (ops.Bounded(5.0), LOG_CONCAVE, RENYI, VARIATION, asserted):
        model = (lambda x: None) if certificate is asserted else None
        assert "ASSUMED" in one(model, certificate, num_data=100).guarantee()


def test_the_number_of_records_under_add_or_remove():
    x, y = problem()
    accountant = PrivacyAccountant()
    sampler = one(accountant=accountant, num_data=50)
    event = sampler.event
    for n in (0, 1, 50):
        sampler.sample(x[:n], y[:n])
    # the size that came changes nothing
    assert sampler.event == event and {charge.event for charge in accountant.history} == {event}
    with pytest.raises(ValueError, match="upper bound") as error:
        sampler.sample(torch.cat([x, x]), torch.cat([y, y]))
    assert "100" not in str(error.value)


# --- refusals -------------------------------------------------------------------------------------


def close(divergence=0.1, sampler=WALK, target=ops.Bounded(1.0), order=20.0, delta=1e-6):  # noqa: B008
    return ops.RenyiClose(target, sampler, divergence, order, delta)


def sampled(*data):
    return one().sample(*data)


def varied(xi=1e-6, delta=1e-5):
    return ops.TotalVariationClose(ops.Bounded(1.0), xi=xi, delta=delta)


X, Y = problem()
FLAT = ops.GLM(prior_std=math.inf)
SPENT = held().compose(GaussianDpEvent(0.5))
ADAPTIVE = held(20.0, 1e-5).compose(GaussianDpEvent(10.0), adaptive=True)
REFUSED = [
    lambda: ops.GLM("softmax"),
    *(partial(ops.GLM, max_feature_norm=v) for v in (math.inf, 0.0, 1e30)),
    *(partial(ops.GLM, prior_std=v) for v in (-1.0, math.nan, [1.0, 0.0])),
    *(partial(ops.GLM, family) for family in ("gaussian", "poisson")),
    *(partial(ops.GLM, "poisson", max_count=v) for v in (math.inf, 1e20)),
    lambda: ops.GLM("bernoulli", noise_std=1.0),
    lambda: ops.GLM("gaussian", noise_std=1e-20),  # 1/s^2 overflows, and 0 times it is no number
    lambda: one(None, finite(max_grad_norm=1e-40)),
    lambda: one(None, ops.StronglyLogConcave(max_grad_norm=1e36)),
    *(partial(finite, v) for v in (0, 2.5)),
    *(partial(finite, step_size=v) for v in (-0.1, math.nan)),
    lambda: finite(max_grad_norm=math.inf),
    *(partial(finite, lipschitz=1.0, strength=v, smoothness=2.0) for v in (-0.5, 3.0)),
    lambda: finite(lipschitz=1.0),
    *(partial(ops.Bounded, v) for v in (math.inf, (-math.inf, 0.0), (0.0, -1.0))),
    lambda: ops.Bounded(1.0, warmup_steps=0),
    *(partial(ops.StronglyLogConcave, lipschitz=1.0, strength=v) for v in (None, 0.0)),
    *(partial(one, FLAT, certificate) for certificate in (LOG_CONCAVE, ops.Bounded(1.0), close())),
    lambda: one(None, finite(lipschitz=1.0, strength=1.0, smoothness=2.0)),
    lambda: one(None, finite(step_size=2.01 / (1 + 50 / 4)), num_data=50).event,
    lambda: one(None, finite(step_size=0.1), 1.0, 1e-5, num_data=5000).event,
    *(partial(one, None, None, *target) for target in ((1.0,), (-1.0, 1e-5), (1.0, 2.0))),
    lambda: one(num_data=0),
    lambda: one(accountant=PrivacyAccountant()).sample(X, Y),
    lambda: one(num_data=49).sample(X, Y),
    lambda: one().guarantee(),
    lambda: one(lambda x: None),
    lambda: one(None, None, 1.0, 1e-5, accountant=SPENT, num_data=50).event,
    lambda: one(None, None, 1.0, 1e-5, accountant=ADAPTIVE, num_data=50).event,
    *(partial(close, v) for v in (-0.1, math.inf)),
    *(partial(close, order=v) for v in (1.0, math.inf)),
    *(partial(varied, v) for v in (0.0, 6e-6)),
    *(partial(make, delta=v) for make, v in ((close, 0.0), (varied, 2.0))),
    lambda: ops.Overdamped(0, 0.1),
    lambda: ops.Underdamped(5, 0.1, friction=0.0),
    # shapes cost nothing
    *(partial(sampled, X, v) for v in (Y[:-1], Y[:, None], Y.repeat(3, 1).T)),
    *(partial(sampled, v, Y) for v in (X[0], X.tolist(), X.numpy(), X.to_sparse(), X[:, :0])),
    # other kinds of things
    lambda: one(torch.nn.Linear(2, 1)),
    lambda: one(None, "finite run"),
    lambda: one(ops.GLM),
    lambda: sampled(X),
    lambda: close(target=finite(1)),
    *(partial(close, sampler=v) for v in (ops.Bounded(1.0), ops.Overdamped)),
]


def test_refusals():
    for number, attempt in enumerate(REFUSED):
        with pytest.raises(dpb.errors.DPBayesError):
            attempt()
            pytest.fail(f"row {number} is accepted")
    assert len(SPENT) == len(ADAPTIVE) == 1
    one(accountant=ADAPTIVE).sample(X, Y)  # without a target
    assert len(ADAPTIVE) == 2
