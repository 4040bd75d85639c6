"""Generalised linear models: bounded records, their losses, gradients and constants."""

import math

import pytest
import torch
from support.one_draw import (
    finite,
    problem,
)

from torch_dpbayes import ops

FAMILIES = {"bernoulli": {}, "gaussian": {"noise_std": 0.7}, "poisson": {"max_count": 2.0}}
BROKEN = [math.nan, math.inf, -math.inf, 1e300]


@pytest.mark.parametrize("family", ops.glm.FAMILIES)
def test_no_value_of_a_record_raises_or_counts_more_than_its_clip(family):
    extra = {"gaussian": {"noise_std": 1e-3}, "poisson": {"max_count": 3.0}}.get(family, {})
    glm, keep, w = ops.GLM(family, **extra), torch.arange(6) != 2, torch.randn(3).double()
    for dtype in (torch.float32, torch.float64, torch.float16):
        x, y = (values.to(dtype) for values in problem(6))
        without = glm.records(x[keep], y[keep], 0.5).gradient_sum(w)
        for value in BROKEN:
            value = float(torch.tensor(value, dtype=torch.float64).to(dtype))
            for broken_x, broken_y in (
                (torch.where(keep[:, None], x, value), y),
                (x, torch.where(keep, y, value)),
            ):
                with_it = glm.records(broken_x, broken_y, 0.5).gradient_sum(w)
                difference = float((with_it - without).norm())
                assert difference <= (0.5 + 1e-5 if math.isfinite(value) else 1e-6)
                draw = ops.OnePosteriorSample(glm, finite(3)).sample(broken_x, broken_y)
                assert torch.isfinite(draw["weights"]).all()
    for certificate in (ops.Bounded(5.0, warmup_steps=2), ops.StronglyLogConcave(warmup_steps=2)):
        draw = ops.OnePosteriorSample(glm, certificate).sample(broken_x, y)
        assert torch.isfinite(draw["weights"]).all()


@pytest.mark.parametrize("family", ops.glm.FAMILIES)
def test_beyond_the_range_of_floats_a_record_counts_no_more_than_its_clip(family):
    """Where the linear predictor overflows, whether it is infinite or not a number would
    depend on the records.
    """
    glm = ops.GLM(family, max_feature_norm=1e15, **FAMILIES[family])
    x = 1e15 * torch.tensor([[0.6, -0.6], [0.8, 0.0], [0.0, 0.5]])
    for weights in ([1e30, 1e30], [1e200, 1.0], [math.inf, 0.0]):
        weights = torch.tensor(weights, dtype=torch.float64)
        records = glm.records(x, torch.tensor([0.0, 1.0, 1.0]), 1.0)
        assert float(records.gradient_sum(weights).norm()) <= 3.0
        assert (
            not records.losses(weights).isnan().any()
            and not records.log_likelihoods(weights).isnan().any()
        )


def test_among_many_records_one_moves_the_sum_by_its_own_gradient_and_not_by_rounding():
    n = 1_000_000
    x = torch.full((n, 2), 0.3)
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
        assert float((sums[0] - sums[1] - alone[0] + alone[1]).norm()) < 1e-6


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
    for family, extra in FAMILIES.items():
        glm = ops.GLM(family, max_feature_norm=1.5, **extra)
        for clip in (0.2, 1.0, 50.0):
            total = torch.zeros(4, dtype=torch.float64)
            for row, target in zip(glm.features(x), y):
                v = w.clone().requires_grad_()
                (g,) = torch.autograd.grad(losses[family](row @ v, target), v)
                total += g * min(1.0, clip / float(g.norm()))
            records = glm.records(x, y, clip)
            assert torch.allclose(records.gradient_sum(w), total, rtol=1e-4, atol=1e-6)
            v = w.clone().requires_grad_()
            (g,) = torch.autograd.grad(records.losses(v).sum(), v)
            assert torch.allclose(g, records.gradient_sum(w), rtol=1e-9)


def test_log_likelihoods_are_torchs():
    x, y = torch.randn(20, 4, dtype=torch.float64), torch.randint(0, 3, (20,)).double()
    w = torch.randn(4, dtype=torch.float64)
    laws = {
        "bernoulli": lambda u: torch.distributions.Bernoulli(logits=u).log_prob(y.clamp(0, 1)),
        "gaussian": lambda u: torch.distributions.Normal(u, 0.7).log_prob(y),
        "poisson": lambda u: torch.distributions.Poisson(u.exp()).log_prob(y),
    }
    for family, extra in FAMILIES.items():
        glm = ops.GLM(family, **extra)
        records = glm.records(x, y)
        assert torch.allclose(records.log_likelihoods(w), laws[family](glm.features(x) @ w))


def test_smoothness_is_a_bound_on_the_curvature():
    for family, extra in FAMILIES.items():
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
                        float(records.gradient_sum(torch.tensor([w], dtype=torch.float64)))
                        for w in torch.linspace(-6, 6, 1201)
                    ]
                )
                curvature = float(slopes.diff().max()) / 0.01
                assert curvature <= bound * (1 + 1e-3) and float(slopes.diff().min()) > -1e-6
                reached = max(reached, curvature / bound)
        assert reached > 0.9


def test_predictions_clip_features_as_fitting_does():
    short = torch.tensor([[0.3, 0.1, -0.2]])
    assert torch.equal(ops.GLM().features(short), short)
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


def test_constants_of_priors_that_differ_by_column():
    """The weakest pull bounds how fast a chain forgets, the strongest how far it may step."""
    constants = ops.GLM(prior_std=[1.0, 3.0]).derived_constants()
    assert constants.strength == pytest.approx(1 / 9)
    assert constants.prior_smoothness == pytest.approx(1.0)
