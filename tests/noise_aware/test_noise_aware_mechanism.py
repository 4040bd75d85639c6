"""What is charged against what is done: noise is measured in releases, sensitivities on
neighbouring data.
"""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.stats import chi2

import torch_dpbayes as dpb
from torch_dpbayes.accounting.events import GaussianDpEvent
from torch_dpbayes.mcmc.density import RecordDensity
from torch_dpbayes.noise_aware.feature_lengths import EDGES
from torch_dpbayes.noise_aware.mechanism import Mechanism
from torch_dpbayes.noise_aware.planning import (
    diagonal_plan,
    general_plan,
    glm_plan,
    total_multiplier,
)
from torch_dpbayes.noise_aware.records import DensitySums, GLMSums, SoftmaxSums
from torch_dpbayes.ops import GLM, Softmax

SIGNIFICANCE = 1e-6
RELATIONS = ["add_or_remove_one", "replace_one"]
GLMS = [
    (GLM("bernoulli", max_feature_norm=2.0), None),
    (GLM("poisson", max_feature_norm=1.5, max_count=9.0), 2.5),
    (GLM("gaussian", max_feature_norm=0.7, noise_std=0.4), 1.3),
]


def is_chi_squared(total: float, count: int) -> bool:
    return bool(chi2.ppf(SIGNIFICANCE / 2, count) < total < chi2.ppf(1 - SIGNIFICANCE / 2, count))


def records(count: int = 300, dimension: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        2 * torch.randn(count, dimension, dtype=torch.float64),
        torch.randint(0, 2, (count,)).double(),
    )


def model(x, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(4, dtype=torch.float64), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


@pytest.mark.parametrize("scales", [(1.0, 1.0, 1.0, 1.0), (1.0, 1.0, 0.03, 0.01)])
@pytest.mark.parametrize("neighboring", RELATIONS)
def test_the_charge_is_that_of_the_noise_that_was_added(neighboring, scales):
    """Releases minus exact sums at the same points, in units of the noise that the
    accountant's events state.
    """
    x, y = records()
    x = x * torch.tensor(scales)
    accountant = dpb.PrivacyAccountant(100.0, 1e-5, neighboring=neighboring)
    glm = GLM("bernoulli", max_feature_norm=2.0, prior_std=10.0)
    post = dpb.noise_aware.laplace(
        glm, x, y, accountant=accountant, num_data=300, max_grad_norm=2.0
    )
    events = [event for charge in accountant.history for event in [charge.event] * charge.count]
    assert all(type(event) is GaussianDpEvent for event in events)
    sums, transcript = GLMSums(glm, x, y, 2.0), post.transcript
    assert len(events) == len(transcript.gradients) + len(transcript.curvatures) + 3
    if min(scales) == 1.0:  # and with the others hardly ever
        assert transcript.feature_map is None
    later, length = sums, 2.0
    if transcript.feature_map is not None:
        later, length = sums.in_shape(transcript.feature_map), 1.0
    # a matrix moves by √2 bounds, not by 2
    cheaper = math.sqrt(2) if neighboring == "replace_one" else 1.0
    stated = {round(event.noise_multiplier, 9) for event in events}
    total, count = 0.0, 0
    for release in transcript.gradients:
        assert round(release.noise_std / length, 9) in stated
        noise = (release.value - later.gradient_sum(release.theta)) / release.noise_std
        total += float(noise.square().sum())
        count += 4
    first, second = transcript.grams
    matrices = [(first, sums.gram_sum(), 4.0), (second, later.gram_sum(), length**2)]
    matrices += [
        (release, later.curvature_sum(release.theta), length**2 / 4)
        for release in transcript.curvatures
    ]
    for release, exact, bound in matrices:
        assert round(cheaper * release.noise_std / bound, 9) in stated
        noise = (release.value - exact) / release.noise_std
        # or rounding of the sums would show without noise
        assert torch.equal(release.value, release.value.T)
        # in Frobenius norm every one of the 10 directions has the same variance
        total += float(noise.square().sum())
        count += 10
    (lengths,) = transcript.lengths
    assert round(cheaper * lengths.noise_std, 9) in stated
    seen = sums.length_counts(lengths.feature_map, EDGES)
    total += float(((lengths.value - seen) / lengths.noise_std).square().sum())
    count += len(seen)
    assert is_chi_squared(total, count)


def test_noise_is_new_in_every_release_and_the_same_in_all_directions():
    x, y = records(10)
    mechanism, sums = Mechanism(GLMSums(GLM(), x, y, None)), GLMSums(GLM(), x, y, None)
    theta = torch.zeros(4, dtype=torch.float64)
    vectors = (
        torch.stack(
            [mechanism.gradient(theta, 3.0).value - sums.gradient_sum(theta) for _ in range(500)]
        )
        / 3.0
    )
    matrices = (
        torch.stack([mechanism.gram(sums, 3.0).value - sums.gram_sum() for _ in range(500)]) / 3.0
    )
    eye = torch.eye(4, dtype=torch.float64)
    exact = sums.length_counts(eye, EDGES)
    releases = [mechanism.length_counts(sums, eye, EDGES, 3.0) for _ in range(500)]
    counts = torch.stack([release.value - exact for release in releases]) / releases[0].noise_std
    assert releases[0].noise_std == 3.0
    assert is_chi_squared(float(counts.square().sum()), counts.numel())
    above = torch.triu_indices(4, 4, 1)
    assert is_chi_squared(float(vectors.square().sum()), 2000)
    assert is_chi_squared(float(matrices.diagonal(dim1=1, dim2=2).square().sum()), 2000)
    assert is_chi_squared(2 * float(matrices[:, above[0], above[1]].square().sum()), 3000)
    assert is_chi_squared(float((vectors[1:] - vectors[:-1])[::2].square().sum()) / 2, 1000)


@pytest.mark.parametrize("glm, clip", GLMS, ids=[glm.family for glm, _ in GLMS])
def test_one_record_moves_the_sums_by_no_more_than_the_bounds(glm, clip):
    x, y = records(30)
    worst = [
        torch.full((4,), value, dtype=torch.float64)
        for value in (1e6, -1e6, math.nan, math.inf, 0.3)
    ]
    theta = 3 + 0.1 * torch.randn(4, dtype=torch.float64)  # along the first of the worst
    base = GLMSums(glm, x, y, clip)
    seen = []
    for row in [*worst, *5 * torch.randn(40, 4, dtype=torch.float64)]:
        for target in (0.0, 1.0, 1e9, math.nan):
            more = GLMSums(
                glm,
                torch.cat([x, row[None]]),
                torch.cat([y, torch.tensor([target], dtype=torch.float64)]),
                clip,
            )
            moved = (
                (more.gradient_sum(theta) - base.gradient_sum(theta), base.gradient_bound),
                (more.gram_sum() - base.gram_sum(), base.gram_bound),
                (more.curvature_sum(theta) - base.curvature_sum(theta), base.curvature_bound),
            )
            seen.append([float(change.norm()) / bound for change, bound in moved])
    largest = torch.tensor(seen).amax(0)
    assert bool((largest <= 1 + 1e-9).all())
    assert bool((largest[:2] > 0.9).all())  # the bounds are not far too wide, or the noise would be


@pytest.mark.parametrize("kind", [GLMSums, SoftmaxSums])
def test_a_record_does_not_change_the_rounding_of_others(kind):
    """Of many records in float32, which all stand elsewhere once the first is gone."""
    few = torch.randn(2048, 8)
    x = (few / few.norm(dim=1, keepdim=True)).repeat(50, 1)
    labels = torch.randint(0, 2, (2048,)).repeat(50)
    theta = 3 * torch.randn(8, dtype=torch.float64)

    def total(rows: slice) -> torch.Tensor:
        if kind is GLMSums:
            return GLMSums(GLM(), x[rows], labels[rows].float(), None).gradient_sum(theta)
        return SoftmaxSums(Softmax(2), x[rows], labels[rows]).gradient_sum(theta)

    apart = total(slice(None)) - total(slice(1, None)) - total(slice(1))
    assert float(apart.norm()) < 1e-5


def test_replacing_a_record_moves_a_matrix_by_less_than_the_square_root_of_two_bounds():
    x, y = records(1)
    largest = 0.0
    for _ in range(200):
        first, second = (
            GLMSums(GLM(), 9 * torch.randn(1, 4, dtype=torch.float64), y, None).gram_sum()
            for _ in range(2)
        )
        largest = max(largest, float((first - second).norm()))
    assert 1.2 < largest <= math.sqrt(2)


def test_sums_of_a_pyro_model_are_those_of_its_clipped_gradients():
    x, y = records(57)
    clip, theta = 1.1, torch.randn(4, dtype=torch.float64)
    sums = DensitySums(RecordDensity(model, (x, y)), clip)
    gradients = ((x @ theta).sigmoid() - y)[:, None] * x
    clipped = gradients * (clip * (1 - 1e-6) / gradients.norm(dim=1, keepdim=True)).clamp(max=1)
    torch.testing.assert_close(sums.gradient_sum(theta), clipped.sum(0))
    torch.testing.assert_close(sums.curvature_sum(theta), clipped.T @ clipped)


@pytest.mark.parametrize("neighboring", RELATIONS)
@pytest.mark.parametrize("epsilon", [0.05, 1.0, 8.0])
def test_plans_spend_the_budget_and_no_more(neighboring, epsilon):
    accountant = dpb.PrivacyAccountant(epsilon, 1e-6, neighboring=neighboring)
    accountant.compose(GaussianDpEvent(400.0))
    multiplier = total_multiplier(accountant, None, None)
    cheaper = math.sqrt(2) if neighboring == "replace_one" else 1.0
    for plan in (
        glm_plan(multiplier, 8, 1000, neighboring, quadratic=False),
        general_plan(multiplier, 30, 10**5, neighboring, clips=False),
        general_plan(multiplier, 30, 10**5, neighboring, clips=True),
        diagonal_plan(multiplier, neighboring, clips=False),
        diagonal_plan(multiplier, neighboring, clips=True),
    ):
        matrices = [
            *plan.curvature_multipliers,
            *plan.gram_multipliers,
            *plan.length_multipliers,
            *plan.clipped_multipliers,
        ]
        spent = sum(z**-2 for z in plan.gradient_multipliers) + sum(
            (cheaper * z) ** -2 for z in matrices
        )
        assert spent == pytest.approx(multiplier**-2, rel=1e-6)


def test_everything_is_charged_before_anything_is_released(monkeypatch):
    x, y = records(3000)
    accountant = dpb.PrivacyAccountant(1.0, 1e-5, neighboring="replace_one")
    seen = []
    monkeypatch.setattr(
        Mechanism,
        "_standard_normal",
        lambda self, size: seen.append(len(accountant)) or torch.zeros(size, dtype=torch.float64),
    )
    dpb.noise_aware.laplace(GLM(), x, y, accountant=accountant)
    assert set(seen) == {len(accountant)} and seen[0] > 0
    with pytest.raises(dpb.PrivacyBudgetExceeded):
        dpb.noise_aware.laplace(GLM(), x, y, accountant=accountant, epsilon=5.0)
    assert len(seen) == seen[0]
