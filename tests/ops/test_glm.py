"""Generalised linear models: bounded records, their losses, gradients and constants."""

import math

import pytest
import torch
from support.one_draw import finite, glm_of, problem
from torch.distributions import Bernoulli, Normal, Poisson
from torch.nn import functional

from torch_dpbayes import ops
from torch_dpbayes.ops.models import Limits

FAMILIES = {"bernoulli": {}, "gaussian": {"noise_std": 0.7}, "poisson": {"max_count": 2.0}}
LAWS = {
    "bernoulli": lambda u: Bernoulli(logits=u),
    "gaussian": lambda u: Normal(u, 0.7),
    "poisson": lambda u: Poisson(u.exp()),
}
by_family = pytest.mark.parametrize("family", ops.glm.FAMILIES)


def glm_with(family, **options):
    return ops.GLM(family, **FAMILIES[family], **options)


@by_family
def test_no_value_of_a_record_raises_or_counts_more_than_its_clip(family):
    extra = {"gaussian": {"noise_std": 1e-3}}.get(family, {})
    glm, keep, w = glm_of(family, **extra), torch.arange(6) != 2, torch.randn(3).double()
    for dtype in (torch.float32, torch.float64, torch.float16):
        x, y = (values.to(dtype) for values in problem(6))
        without = glm.records(x[keep], y[keep], 0.5).gradient_sum(w)
        for value in (math.nan, math.inf, -math.inf, 1e300):
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
        draw = ops.OnePosteriorSample(glm_of(family), certificate).sample(broken_x, broken_y)
        assert torch.isfinite(draw["weights"]).all()


@by_family
def test_beyond_the_range_of_floats_a_record_counts_no_more_than_its_clip(family):
    """Where the linear predictor overflows, whether it is infinite or not a number would
    depend on the records.
    """
    glm = glm_with(family, max_feature_norm=1e15)
    x = 1e15 * torch.tensor([[0.6, -0.6], [0.8, 0.0], [0.0, 0.5]])
    for weights in ([1e30, 1e30], [1e200, 1.0], [math.inf, 0.0]):
        weights = torch.tensor(weights, dtype=torch.float64)
        records = glm.records(x, torch.tensor([0.0, 1.0, 1.0]), 1.0)
        assert float(records.gradient_sum(weights).norm()) <= 3.0
        for values in (records.losses(weights), records.log_likelihoods(weights)):
            assert not values.isnan().any()


def test_one_record_more_leaves_the_rounding_of_the_others_as_it_is():
    """In float32 the linear predictors of these rows would be rounded otherwise in larger matrices,
    so that residuals, all nearly 0, would change their signs.
    """
    glm, count = ops.GLM("gaussian", prior_std=1e3, max_feature_norm=1e3, noise_std=1.0), 1216
    for _ in range(4):
        x, w = 30 * torch.randn(1, 500).expand(count, 500), 1e3 * torch.randn(500).double()
        for y in (glm.features(x[:-1]) @ w.float())[[0, -1], None].expand(2, count):
            with_it, without = (
                glm.target((x[:n], y[:n]), Limits(1.0, 1.0)).gradient(w) for n in (count, count - 1)
            )
            assert float((with_it - without).norm()) <= 1 + 1e-5


@pytest.mark.parametrize("noise_std", [0.1, 2.0])
def test_among_many_records_one_moves_the_sum_by_its_own_gradient_and_not_by_rounding(noise_std):
    n, glm = 200_000, ops.GLM("gaussian", noise_std=noise_std)
    x = torch.full((n, 2), 0.3)
    x[:, 1] = 1.5 * 2**-6
    one = torch.tensor([n // 2])
    y = torch.full((n,), 5.0)
    changed = y.index_fill(0, one, -5.0)

    def moved(*rows):
        w = torch.zeros(2, dtype=torch.float64)
        first, second = (
            glm.target((x[rows], values[rows]), Limits(1.0, 1.0)).gradient(w)
            for values in (y, changed)
        )
        return first - second

    assert float((moved(...) - moved(one)).norm()) < 1e-6


@by_family
def test_gradients_are_those_of_the_clipped_losses(family):
    """Against autograd on the plain formula, record by record."""
    losses = {
        "bernoulli": functional.binary_cross_entropy_with_logits,
        "gaussian": lambda u, y, **_: (u - y) ** 2 / (2 * 0.7**2),
        "poisson": functional.poisson_nll_loss,
    }
    x, y = torch.randn(30, 4, dtype=torch.float64), 2 * torch.randn(30, dtype=torch.float64)
    w = torch.randn(4, dtype=torch.float64, requires_grad=True)
    glm = glm_with(family, max_feature_norm=1.5)
    ends = {"bernoulli": (0, 1), "poisson": (0, 2)}.get(family, (None, math.inf))
    each = losses[family](glm.features(x) @ w, y.clamp(*ends), reduction="none")
    gradients = torch.stack([torch.autograd.grad(one, w, retain_graph=True)[0] for one in each])
    for clip in (0.2, 1.0, 50.0):
        factors = (clip / gradients.norm(dim=1, keepdim=True)).clamp(max=1.0)
        records = glm.records(x, y, clip)
        found = records.gradient_sum(w.detach())
        assert torch.allclose(found, (gradients * factors).sum(0), rtol=1e-4, atol=1e-4)
        (of_losses,) = torch.autograd.grad(records.losses(w).sum(), w)
        assert torch.allclose(of_losses, found, rtol=1e-9)


@by_family
def test_one_record_moves_differences_of_the_potential_by_its_clip_and_the_distance(family):
    """Losses with the constants that they have far from their targets leave the sum no digits."""
    x, w = 0.5 * torch.randn(50, 2), torch.randn(2, dtype=torch.float64)
    glm, clip, step = glm_with(family, max_feature_norm=1.0), 0.3, torch.tensor([0.3, -0.2])
    y = torch.randint(0, 2, (50,)).float()

    def change(*more):
        rows, targets = (torch.cat([a, torch.tensor(b)]) for a, b in zip((x, y), more, strict=True))
        potential = glm.target((rows, targets), Limits(1.0, clip)).potential
        return float(potential(w + step) - potential(w))

    without = change([[0.0, 0.0]], [0.0])
    for length in (0.0, 1e-20, 1e-9, 1e-3, 1.0, math.inf):
        for target in (1e5, 1e10, 1.1e16, -1e30, 1e38, math.nan):
            moved = abs(change([[length, 0.0]], [target]) - without)
            assert moved <= clip * float(step.norm()) + 1e-9, (length, target)


@pytest.mark.parametrize(
    ("length", "target"), [(1.0, 1.1e16), (1e-3, 1e30), (2e-8, 1e7), (0.0, 1e30)]
)
def test_a_far_target_pulls_by_its_slope(length, target):
    x, y = (torch.tensor(v, dtype=torch.float64) for v in ([[length]], [target]))
    records = ops.GLM("gaussian", noise_std=1.0).records(x, y, 0.3)
    before, after = (float(records.losses(torch.tensor([w]).double())) for w in (0.9, 1.4))
    assert after - before == pytest.approx(-0.5 * min(0.3, length * target), rel=1e-5)


@by_family
def test_log_likelihoods_are_torchs(family):
    x, w = torch.randn(20, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    y = torch.randint(0, 2 if family == "bernoulli" else 3, (20,)).double()
    glm = glm_with(family)
    wanted = LAWS[family](glm.features(x) @ w).log_prob(y)
    assert torch.allclose(glm.records(x, y).log_likelihoods(w), wanted)


@by_family
def test_smoothness_is_a_bound_on_the_curvature_that_is_reached(family):
    glm, reached = glm_with(family, max_feature_norm=1.5), 0.0
    points = torch.linspace(-6, 6, 201, dtype=torch.float64)[:, None]
    for clip in (0.2, 1.0, 3.0):
        bound = glm.record_smoothness(clip)
        for x, y in ((1.5, 0.0), (1.5, 1.0), (1.5, 2.0), (-0.7, 1.0)):
            records = glm.records(torch.tensor([[x]]).double(), torch.tensor([y]), clip)
            slopes = torch.cat([records.gradient_sum(point) for point in points])
            curvatures = slopes.diff() / 0.06
            assert curvatures.max() <= bound * (1 + 1e-3) and curvatures.min() > -1e-4
            reached = max(reached, float(curvatures.max()) / bound)
    assert reached > 0.9


@by_family
def test_predictions_clip_features_as_fitting_does(family):
    short, x = torch.tensor([[0.3, 0.1, -0.2]]), 50 * torch.randn(9, 3)
    glm, w = glm_with(family), torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    assert torch.equal(glm.features(short), short)
    wanted = LAWS[family]((x / x.norm(dim=1, keepdim=True)).double() @ w).mean
    assert torch.allclose(glm.predict({"weights": w}, x).double(), wanted, atol=1e-5)


def test_constants_of_priors_that_differ_by_column():
    """The weakest pull bounds how fast a chain forgets, the strongest how far it may step."""
    constants = ops.GLM(prior_std=[1.0, 3.0]).derived_constants()
    assert constants.strength == pytest.approx(1 / 9)
    assert constants.prior_smoothness == pytest.approx(1.0)
