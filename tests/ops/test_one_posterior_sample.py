"""One posterior sample: charges, tempering, words, and what must not leave."""

import logging
import math

import pytest
import torch
from support.one_draw import (
    finite,
    problem,
)

from torch_dpbayes import ops
from torch_dpbayes.accounting import PrivacyAccountant, PrivacyBudgetExceeded
from torch_dpbayes.accounting.events import GaussianDpEvent, PoissonSampledDpEvent

# --- charging -------------------------------------------------------------------------------------


def test_a_draw_has_the_shape_of_the_model_and_is_charged_once():
    x, y = problem()
    accountant = PrivacyAccountant(neighboring="replace_one")
    sampler = ops.OnePosteriorSample(ops.GLM(), finite(), accountant=accountant)
    draw = sampler.sample(x, y)
    assert (
        list(draw) == ["weights"]
        and draw["weights"].shape == (3,)
        and not draw["weights"].requires_grad
    )
    assert [(charge.event, charge.count) for charge in accountant.history] == [(sampler.event, 1)]
    assert not torch.equal(sampler.sample(x, y)["weights"], draw["weights"])
    assert len(accountant) == 2


@pytest.mark.parametrize("method", ["pld", "rdp"])
@pytest.mark.parametrize("neighboring", ["replace_one", "add_or_remove_one"])
@pytest.mark.parametrize("held", [False, True])
def test_the_target_is_met_with_what_the_accountant_holds(held, neighboring, method):
    accountant = PrivacyAccountant(method=method, neighboring=neighboring)
    if held:
        accountant.compose(PoissonSampledDpEvent(0.01, GaussianDpEvent(2.0)), 50)
    sampler = ops.OnePosteriorSample(ops.GLM(), finite(500), 1.0, 1e-5, accountant, num_data=50)
    sampler.sample(*problem())
    assert accountant.get_epsilon(1e-5) == pytest.approx(1.0, rel=1e-4 if held else 1e-6)
    assert accountant.get_epsilon(1e-5) <= 1.0 + 1e-9
    assert 0 < sampler.tempering < 1
    assert sampler.variance_inflation == 1 + 1 / sampler.tempering
    with pytest.raises(PrivacyBudgetExceeded, match="n draws cost n releases"):
        sampler.sample(*problem())


def test_the_default_certificate_is_a_finite_run():
    sampler = ops.OnePosteriorSample(ops.GLM(prior_std=0.5), num_data=32561)
    assert (
        sampler.event
        == ops.OnePosteriorSample(ops.GLM(prior_std=0.5), finite(10_000), num_data=32561).event
    )
    with pytest.raises(ValueError, match="not a GLM"):
        ops.OnePosteriorSample(lambda x: None)


def test_a_target_above_the_cost_leaves_the_likelihood_alone():
    sampler = ops.OnePosteriorSample(
        ops.GLM(prior_std=0.5), finite(10_000), 50.0, 1e-5, num_data=32561
    )
    assert sampler.tempering == 1.0
    assert "rho = 1" in sampler.guarantee() and "epsilon = 4.3395" in sampler.guarantee()


class Recording(ops.Certificate):
    """Wraps a certificate and notes whether anything was drawn."""

    def __init__(self, inner):
        self.inner, self.drawn = inner, 0

    def check(self, model):
        self.inner.check(model)

    def needs_num_data(self, model):
        return self.inner.needs_num_data(model)

    def event(self, model, setting):
        return self.inner.event(model, setting)

    def statement(self, model, setting):
        return self.inner.statement(model, setting)

    def draw(self, *arguments):
        self.drawn += 1
        return self.inner.draw(*arguments)


def test_nothing_is_drawn_when_the_charge_is_refused():
    certificate = Recording(finite())
    accountant = PrivacyAccountant(1e-3, 1e-5, neighboring="replace_one")
    with pytest.raises(PrivacyBudgetExceeded):
        ops.OnePosteriorSample(ops.GLM(), certificate, accountant=accountant).sample(*problem())
    assert certificate.drawn == 0 and len(accountant) == 0


def test_bad_shapes_cost_nothing():
    sampler = ops.OnePosteriorSample(ops.GLM(), finite())
    x, y = problem()
    for data in (
        (x, y[:-1]),
        (x, y[:, None]),
        (x, y.repeat(3, 1).T),
        (x[0], y),
        (x.tolist(), y),
        (x.to_sparse(), y),
        (x[:, :0], y),
    ):
        with pytest.raises(ValueError):
            sampler.sample(*data)
    with pytest.raises(TypeError):
        sampler.sample(x)
    assert len(sampler.accountant) == 0


def test_the_number_of_records_under_both_relations():
    x, y = problem()
    with pytest.raises(ValueError, match="num_data"):
        ops.OnePosteriorSample(ops.GLM(), finite(), accountant=PrivacyAccountant())
    with pytest.raises(ValueError, match="49 was stated, but there are 50"):
        ops.OnePosteriorSample(ops.GLM(), finite(), num_data=49).sample(x, y)
    bounded = ops.OnePosteriorSample(
        ops.GLM(), finite(), accountant=PrivacyAccountant(), num_data=50
    )
    event = bounded.event
    for n in (0, 1, 49, 50):
        bounded.sample(x[:n], y[:n])
    # the size that came changes nothing
    assert bounded.event == event and {charge.event for charge in bounded.accountant.history} == {
        event
    }
    with pytest.raises(ValueError, match="upper bound") as error:
        bounded.sample(torch.cat([x, x]), torch.cat([y, y]))
    assert "100" not in str(error.value)


def test_nothing_but_the_draw_is_kept_printed_or_logged(capsys, caplog):
    x, y = problem()
    with caplog.at_level(logging.DEBUG):
        for certificate in (
            finite(),
            ops.Bounded(5.0, warmup_steps=5),
            ops.StronglyLogConcave(warmup_steps=5),
        ):
            sampler = ops.OnePosteriorSample(ops.GLM(), certificate)
            text = repr(sampler.__dict__)
            sampler.sample(x, y)
            assert not any(isinstance(value, torch.Tensor) for value in vars(sampler).values())
            first = sampler.guarantee()
            sampler.sample(torch.zeros_like(x), 1 - y)
            assert sampler.guarantee() == first and "tensor" not in text
    captured = capsys.readouterr()
    assert captured.out == captured.err == "" and not caplog.records


def test_the_users_data_is_not_touched():
    x, y = 10 * torch.randn(20, 3), torch.randn(20)
    before = x.clone(), y.clone()
    ops.OnePosteriorSample(ops.GLM(), finite()).sample(x, y)
    assert torch.equal(x, before[0]) and torch.equal(y, before[1])


def test_the_finite_run_ignores_torchs_seed():
    x, y = problem()
    draws = []
    for _ in range(2):
        torch.manual_seed(0)
        draws.append(ops.OnePosteriorSample(ops.GLM(), finite()).sample(x, y)["weights"])
    assert not torch.equal(*draws)


# --- words ----------------------------------------------------------------------------------------


def test_a_guarantee_says_what_is_proved_and_what_is_assumed():
    finite_run = ops.OnePosteriorSample(ops.GLM(), finite(), num_data=100).guarantee()
    assert (
        "proved" in finite_run
        and "ASSUMED" not in finite_run
        and "one record is replaced" in finite_run
        and "N = 100" in finite_run
    )
    for certificate in (ops.Bounded(5.0), ops.StronglyLogConcave()):
        assert (
            "ASSUMED     the draw is exact"
            in ops.OnePosteriorSample(ops.GLM(), certificate).guarantee()
        )
    with pytest.raises(ValueError, match="num_data"):
        ops.OnePosteriorSample(ops.GLM(), finite()).guarantee()
    added = ops.OnePosteriorSample(
        ops.GLM(), finite(), accountant=PrivacyAccountant(), num_data=100
    ).guarantee()
    assert "one record is added or removed" in added and "at most N = 100 records" in added


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.first_cases(99)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ops.GLM("softmax"), "family must be one of .* got .softmax"),
        (lambda: ops.GLM("categorical"), "Pyro model with asserted constants"),
        (lambda: ops.GLM(max_feature_norm=math.inf), "max_feature_norm"),
        (lambda: ops.GLM(max_feature_norm=0.0), "max_feature_norm"),
        (lambda: ops.GLM(prior_std=-1.0), "prior_std"),
        (lambda: ops.GLM(prior_std=math.nan), "prior_std"),
        (lambda: ops.GLM(prior_std=[1.0, 0.0]), "prior_std"),
        (lambda: ops.GLM("gaussian"), "noise_std"),
        (lambda: ops.GLM("poisson"), "max_count"),
        (lambda: ops.GLM("poisson", max_count=math.inf), "max_count"),
        (lambda: ops.GLM("bernoulli", noise_std=1.0), "belongs to"),
        (lambda: ops.GLM(max_feature_norm=1e30), "float32"),
        # 1/s^2 overflows, and 0 times it is not a number
        (lambda: ops.GLM("gaussian", noise_std=1e-20), "float32"),
        (lambda: ops.GLM("poisson", max_count=1e20), "float32"),
        (lambda: ops.OnePosteriorSample(ops.GLM(), finite(max_grad_norm=1e-40)), "float32"),
        (
            lambda: ops.OnePosteriorSample(ops.GLM(), ops.StronglyLogConcave(max_grad_norm=1e36)),
            "float32",
        ),
        (lambda: finite(0), "steps"),
        (lambda: finite(2.5), "steps"),
        (lambda: finite(step_size=-0.1), "step_size"),
        (lambda: finite(step_size=math.nan), "step_size"),
        (lambda: finite(max_grad_norm=math.inf), "max_grad_norm"),
        (lambda: finite(lipschitz=1.0, strength=-0.5, smoothness=2.0), "not convex"),
        (lambda: finite(lipschitz=1.0, strength=3.0, smoothness=2.0), "between 0 and smoothness"),
        (lambda: finite(lipschitz=1.0), "missing"),
        (lambda: ops.Bounded(math.inf), "log_likelihood_range must be a finite interval"),
        (lambda: ops.Bounded((-math.inf, 0.0)), "log_likelihood_range must be a finite interval"),
        (lambda: ops.Bounded((0.0, -1.0)), "log_likelihood_range"),
        (lambda: ops.Bounded(1.0, warmup_steps=0), "warmup_steps"),
        (lambda: ops.StronglyLogConcave(lipschitz=1.0), "together"),
        (lambda: ops.StronglyLogConcave(lipschitz=1.0, strength=0.0), "strength"),
        (
            lambda: ops.OnePosteriorSample(ops.GLM(prior_std=math.inf), ops.StronglyLogConcave()),
            "not strongly log-concave",
        ),
        (
            lambda: ops.OnePosteriorSample(ops.GLM(prior_std=math.inf), ops.Bounded(1.0)),
            "flat prior",
        ),
        (
            lambda: ops.OnePosteriorSample(
                ops.GLM(), finite(lipschitz=1.0, strength=1.0, smoothness=2.0)
            ),
            "derived",
        ),
        (
            lambda: (
                ops.OnePosteriorSample(
                    ops.GLM(), finite(step_size=2.01 / (1 + 50 / 4)), num_data=50
                ).event
            ),
            "above 2/M",
        ),
        (
            lambda: (
                ops.OnePosteriorSample(
                    ops.GLM(), finite(step_size=0.1), 1.0, 1e-5, num_data=5000
                ).event
            ),
            "above 2/M",
        ),
        (lambda: ops.OnePosteriorSample(ops.GLM(), finite(), 1.0), "both numbers"),
        (lambda: ops.OnePosteriorSample(ops.GLM(), finite(), -1.0, 1e-5), "epsilon"),
        (lambda: ops.OnePosteriorSample(ops.GLM(), finite(), 1.0, 2.0), "delta"),
        (lambda: ops.OnePosteriorSample(ops.GLM(), finite(), num_data=0), "num_data"),
    ],
)
def test_bad_input_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "arguments",
    [
        (torch.nn.Linear(2, 1), ops.FiniteRunLangevin(steps=1)),
        (ops.GLM(), "finite run"),
        (ops.GLM, finite()),
    ],
)
def test_wrong_kinds_are_refused(arguments):
    with pytest.raises(TypeError):
        ops.OnePosteriorSample(*arguments)


def test_a_spent_accountant_leaves_nothing_to_temper_to():
    accountant = PrivacyAccountant(neighboring="replace_one").compose(GaussianDpEvent(0.5))
    with pytest.raises(ValueError, match="cannot be met"):
        ops.OnePosteriorSample(ops.GLM(), finite(), 1.0, 1e-5, accountant, num_data=50).sample(
            *problem()
        )


def test_adaptive_charges_have_no_target_below_their_budget():
    accountant = PrivacyAccountant(20.0, 1e-5, neighboring="replace_one").compose(
        GaussianDpEvent(10.0), adaptive=True
    )
    with pytest.raises(ValueError, match="adaptive"):
        ops.OnePosteriorSample(ops.GLM(), finite(), 1.0, 1e-5, accountant, num_data=50).sample(
            *problem()
        )
    ops.OnePosteriorSample(ops.GLM(), finite(), accountant=accountant).sample(*problem())
    assert len(accountant) == 2
