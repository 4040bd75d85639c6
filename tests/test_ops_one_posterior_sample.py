"""One posterior sample: charging, refusing, and what must not leave."""

import logging
import math

import pytest
import torch

from torch_dpbayes import ops
from torch_dpbayes.accounting import PrivacyAccountant, PrivacyBudgetExceeded
from torch_dpbayes.accounting.events import GaussianDpEvent, PoissonSampledDpEvent


def problem(n=50, d=3):
    x = torch.randn(n, d)
    return x, (torch.rand(n) < x[:, 0].sigmoid()).float()


def finite(steps=20, **options):
    return ops.FiniteRunLangevin(steps=steps, **options)


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


def test_the_budget_of_a_draw_is_for_one():
    sampler = ops.OnePosteriorSample(ops.GLM(), finite(), 1.0, 1e-5)
    data = problem()
    sampler.sample(*data)
    with pytest.raises(PrivacyBudgetExceeded):
        sampler.sample(*data)
    assert len(sampler.accountant) == 1


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
        (x.numpy(), y),
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


def test_the_bound_on_the_records_decides_step_and_cost():
    small, large = (
        ops.OnePosteriorSample(ops.GLM(), finite(), accountant=PrivacyAccountant(), num_data=n)
        for n in (100, 10_000)
    )
    assert small.event.mu > large.event.mu  # a larger M means smaller steps


# --- what must not leave --------------------------------------------------------------------------


BROKEN = [math.nan, math.inf, -math.inf, 1e300]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("family", ops.glm.FAMILIES)
@pytest.mark.parametrize("where", ["features", "targets"])
@pytest.mark.parametrize("value", BROKEN)
def test_no_value_of_a_record_raises_or_counts_more_than_its_clip(family, where, value, dtype):
    extra = {"gaussian": {"noise_std": 1e-3}, "poisson": {"max_count": 3.0}}.get(family, {})
    glm = ops.GLM(family, **extra)
    x, y = problem(6)
    x, y = x.to(dtype), y.to(dtype)
    broken_x, broken_y, value = (
        x.clone(),
        y.clone(),
        float(torch.tensor(value, dtype=torch.float64).to(dtype)),
    )
    if where == "features":
        broken_x[2, 1] = value
    else:
        broken_y[2] = value
    w = torch.randn(3, dtype=torch.float64)
    keep = torch.arange(6) != 2
    with_it = glm.records(broken_x, broken_y, 0.5).loss_gradient(w)
    without = glm.records(x[keep], y[keep], 0.5).loss_gradient(w)
    difference = float((with_it - without).norm())
    assert difference <= 0.5 + 1e-5
    if not math.isfinite(value):
        assert difference < 1e-6
    for certificate in (
        finite(3),
        ops.Bounded(5.0, warmup_steps=2),
        ops.StronglyLogConcave(warmup_steps=2),
    ):
        draw = ops.OnePosteriorSample(glm, certificate).sample(broken_x, broken_y)["weights"]
        assert torch.isfinite(draw).all()


@pytest.mark.parametrize("family", ops.glm.FAMILIES)
def test_beyond_the_range_of_floats_a_record_counts_no_more_than_its_clip(family):
    """Where the linear predictor overflows, whether it is infinite or not a number would
    depend on the records.
    """
    glm = ops.GLM(
        family,
        max_feature_norm=1e15,
        **{"gaussian": {"noise_std": 1.0}, "poisson": {"max_count": 3.0}}.get(family, {}),
    )
    x = 1e15 * torch.tensor([[0.6, -0.6], [0.8, 0.0], [0.0, 0.5]])
    for weights in ([1e30, 1e30], [1e200, 1.0], [math.inf, 0.0]):
        weights = torch.tensor(weights, dtype=torch.float64)
        records = glm.records(x, torch.tensor([0.0, 1.0, 1.0]), 1.0)
        assert float(records.loss_gradient(weights).norm()) <= 3.0
        assert (
            not records.huber_losses(weights).isnan().any()
            and not records.log_likelihoods(weights).isnan().any()
        )


def test_each_record_is_bounded_after_clipping():
    for family, extra in (
        ("bernoulli", {}),
        ("gaussian", {"noise_std": 0.1}),
        ("poisson", {"max_count": 3.0}),
    ):
        glm = ops.GLM(family, max_feature_norm=2.0, **extra)
        x, y = 100 * torch.randn(200, 4), 100 * torch.randn(200)
        for clip in (0.3, 1.0, 5.0):
            w = 3 * torch.randn(4, dtype=torch.float64)
            norms = [
                float(glm.records(x[i : i + 1], y[i : i + 1], clip).loss_gradient(w).norm())
                for i in range(200)
            ]
            assert max(norms) <= glm.lipschitz(clip)
            assert glm.features(x).double().norm(dim=1).max() <= 2.0


@pytest.mark.parametrize("first", [0.3, 0.1875])
def test_among_many_records_one_moves_the_sum_by_its_own_gradient_and_not_by_rounding(
    first,
):
    n = 1_000_000
    x = torch.full((n, 2), first)
    x[:, 1] = 1.5 * 2**-6
    data = x, torch.full((n,), 5.0)
    one = torch.tensor([n // 2])
    changed = data[1].index_fill(0, one, -5.0)
    w = torch.zeros(2, dtype=torch.float64)
    for glm in (ops.GLM("gaussian", noise_std=0.1), ops.GLM("gaussian", noise_std=2.0)):
        sums = [
            glm.target((x, y), tempering=1.0, max_grad_norm=1.0).gradient(w)
            for y in (data[1], changed)
        ]
        alone = [
            glm.target((x[one], y[one]), tempering=1.0, max_grad_norm=1.0).gradient(w)
            for y in (data[1], changed)
        ]
        assert float((sums[0] - sums[1] - alone[0] + alone[1]).norm()) < 1e-3


def test_gradients_are_those_of_the_clipped_losses():
    """Against autograd on the plain formula, record by record."""
    x, y = torch.randn(30, 4, dtype=torch.float64), torch.randn(30, dtype=torch.float64).abs()
    w = torch.randn(4, dtype=torch.float64)
    losses = {
        "bernoulli": lambda u, y: torch.nn.functional.binary_cross_entropy_with_logits(
            u, y.clamp(0, 1), reduction="none"
        ),
        "gaussian": lambda u, y: (u - y) ** 2 / (2 * 0.7**2),
        "poisson": lambda u, y: torch.nn.functional.poisson_nll_loss(
            u, y.clamp(0, 2), reduction="none"
        ),
    }
    for family, extra in (
        ("bernoulli", {}),
        ("gaussian", {"noise_std": 0.7}),
        ("poisson", {"max_count": 2.0}),
    ):
        glm = ops.GLM(family, max_feature_norm=1.5, **extra)
        for clip in (0.2, 1.0, 50.0):
            total = torch.zeros(4, dtype=torch.float64)
            for row, target in zip(glm.features(x), y):
                v = w.clone().requires_grad_()
                (g,) = torch.autograd.grad(losses[family](row @ v, target), v)
                total += g * min(1.0, clip / float(g.norm()))
            records = glm.records(x, y, clip)
            assert torch.allclose(records.loss_gradient(w), total, rtol=1e-4, atol=1e-6)
            v = w.clone().requires_grad_()
            (g,) = torch.autograd.grad(records.huber_losses(v).sum(), v)
            assert torch.allclose(g, records.loss_gradient(w), rtol=1e-9)


def test_log_likelihoods_are_torchs():
    x, y = torch.randn(20, 4, dtype=torch.float64), torch.randint(0, 3, (20,)).double()
    w = torch.randn(4, dtype=torch.float64)
    laws = {
        "bernoulli": lambda u: torch.distributions.Bernoulli(logits=u).log_prob(y.clamp(0, 1)),
        "gaussian": lambda u: torch.distributions.Normal(u, 0.7).log_prob(y),
        "poisson": lambda u: torch.distributions.Poisson(u.exp()).log_prob(y),
    }
    for family, extra in (
        ("bernoulli", {}),
        ("gaussian", {"noise_std": 0.7}),
        ("poisson", {"max_count": 2.0}),
    ):
        glm = ops.GLM(family, **extra)
        records = glm.records(x, y)
        assert torch.allclose(records.log_likelihoods(w), laws[family](glm.features(x) @ w))


def test_smoothness_is_a_bound_on_the_curvature():
    for family, extra in (
        ("bernoulli", {}),
        ("gaussian", {"noise_std": 0.7}),
        ("poisson", {"max_count": 2.0}),
    ):
        glm = ops.GLM(family, max_feature_norm=1.5, **extra)
        reached = 0.0
        for clip in (0.2, 1.0, 3.0):
            bound = glm.record_smoothness(clip)
            for x, y in ((1.5, 0.0), (1.5, 1.0), (1.5, 2.0), (-0.7, 1.0)):
                records = glm.records(
                    torch.tensor([[x]], dtype=torch.float64), torch.tensor([y]), clip
                )
                slopes = torch.tensor(
                    [
                        float(records.loss_gradient(torch.tensor([w], dtype=torch.float64)))
                        for w in torch.linspace(-6, 6, 1201)
                    ]
                )
                curvature = float(slopes.diff().max()) / 0.01
                assert curvature <= bound * (1 + 1e-3) and float(slopes.diff().min()) > -1e-6
                reached = max(reached, curvature / bound)
        assert reached > 0.9


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


def test_a_list_of_steps_cannot_be_changed_afterwards():
    steps = [0.01] * 20
    sampler = ops.OnePosteriorSample(ops.GLM(), finite(step_size=steps), num_data=50)
    before = sampler.event
    steps[:] = [10.0] * 20
    assert sampler.event == before


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


def test_predictions_clip_features_as_fitting_does():
    x = 50 * torch.randn(9, 3)
    draw = {"weights": torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)}
    predictor = (x / x.norm(dim=1, keepdim=True)).double() @ draw["weights"]
    assert torch.allclose(ops.GLM().predict(draw, x).double(), predictor.sigmoid(), atol=1e-5)
    assert torch.allclose(
        ops.GLM("gaussian", noise_std=1.0).predict(draw, x).double(), predictor, atol=1e-5
    )
    assert torch.allclose(
        ops.GLM("poisson", max_count=1.0).predict(draw, x).double(), predictor.exp(), atol=1e-5
    )


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ops.GLM("softmax"), "one linear predictor"),
        (lambda: ops.GLM("categorical"), "convexity"),
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
        (lambda: finite(step_size=[0.1] * 3), "one for each of the 20"),
        (lambda: finite(max_grad_norm=math.inf), "max_grad_norm"),
        (lambda: finite(lipschitz=1.0, strength=-0.5, smoothness=2.0), "not convex"),
        (lambda: finite(lipschitz=1.0, strength=3.0, smoothness=2.0), "no function has both"),
        (lambda: finite(lipschitz=1.0), "missing"),
        (lambda: ops.Bounded(math.inf), "no epsilon holds"),
        (lambda: ops.Bounded((-math.inf, 0.0)), "no epsilon holds"),
        (lambda: ops.Bounded((0.0, -1.0)), "log_likelihood_range"),
        (lambda: ops.Bounded(1.0, temper="prior"), "temper"),
        (lambda: ops.Bounded(1.0, warmup_steps=0), "warmup_steps"),
        (lambda: ops.StronglyLogConcave(lipschitz=1.0), "together"),
        (lambda: ops.StronglyLogConcave(lipschitz=1.0, strength=0.0), "strength"),
        (
            lambda: ops.OnePosteriorSample(ops.GLM(prior_std=math.inf), ops.StronglyLogConcave()),
            "strength 0",
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
        (
            lambda: ops.OnePosteriorSample(ops.GLM(), finite(), reserve=GaussianDpEvent(1.0)),
            "below a target",
        ),
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
