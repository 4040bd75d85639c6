"""Levels of the groups' curvature, released by themselves: what they cost, and how they err."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.stats import chi2

import torch_dpbayes as dpb
from torch_dpbayes.accounting.events import GaussianDpEvent
from torch_dpbayes.mcmc.density import RecordDensity
from torch_dpbayes.noise_aware.block_levels import BlockLevels
from torch_dpbayes.noise_aware.measured_curvature import MeasuredCurvature
from torch_dpbayes.noise_aware.mechanism import Mechanism
from torch_dpbayes.noise_aware.planning import general_plan, total_multiplier
from torch_dpbayes.noise_aware.records import DensitySums, SoftmaxSums
from torch_dpbayes.noise_aware.transcript import CurvatureRelease, GradientRelease, LevelRelease
from torch_dpbayes.ops import Softmax

DOUBLE = torch.float64
SIGNIFICANCE = 1e-6
RELATIONS = ["add_or_remove_one", "replace_one"]
GROUPS, SLOPES, BOUND = 6, 2, 1.3
SITE = torch.tensor([0] * 12 + [1] * 3)
SIZES = torch.tensor([12.0, 3.0], dtype=DOUBLE)


def is_chi_squared(total: float, count: int) -> bool:
    return bool(chi2.ppf(SIGNIFICANCE / 2, count) < total < chi2.ppf(1 - SIGNIFICANCE / 2, count))


def model(group, x, y):
    zeros = torch.zeros(GROUPS, dtype=DOUBLE)
    with pyro.plate("groups", GROUPS):
        intercept = pyro.sample("intercept", dist.Normal(zeros, 1.0))
    slope = pyro.sample("slope", dist.Normal(zeros[:SLOPES], 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=intercept[group] + x @ slope), obs=y)


def records(count=500):
    return (
        torch.randint(0, GROUPS, (count,)),
        torch.randn(count, SLOPES, dtype=DOUBLE),
        torch.randint(0, 2, (count,)).double(),
    )


@pytest.mark.parametrize("neighboring", RELATIONS)
def test_the_charge_is_that_of_the_noise_in_the_sums(neighboring):
    data = records()
    sums = DensitySums(RecordDensity(model, data), BOUND)
    cheaper = math.sqrt(2) if neighboring == "replace_one" else 1.0
    total, count = 0.0, 0
    for _ in range(4):
        accountant = dpb.PrivacyAccountant(1.0, 1e-5, neighboring=neighboring)
        post = dpb.noise_aware.laplace(
            model, *data, accountant=accountant, num_data=500, max_grad_norm=BOUND
        )
        events = [event for charge in accountant.history for event in [charge.event] * charge.count]
        assert all(type(event) is GaussianDpEvent for event in events)
        transcript = post.transcript
        assert len(transcript.levels) == len(transcript.curvatures) == 3
        assert len(events) == len(transcript.gradients) + 3 + 3 + len(transcript.clipped)
        stated = [round(event.noise_multiplier, 9) for event in events]
        for release, matrix in zip(transcript.levels, transcript.curvatures, strict=True):
            stated.remove(round(cheaper * release.noise_std / BOUND**2, 9))
            stated.remove(round(cheaper * matrix.noise_std / BOUND**2, 9))
            assert torch.equal(release.theta, matrix.theta)
            diagonal = sums.curvature_sum(release.theta).diagonal()
            exact = torch.stack([diagonal[sums.site == k].sum() for k in range(2)])
            total += float(((release.value - exact) / release.noise_std).square().sum())
            count += 2
    assert is_chi_squared(total, count)


def test_one_record_moves_the_sums_by_no_more_than_the_bound(monkeypatch):
    """Added or removed; and replaced, by no more than √2 bounds."""
    monkeypatch.setattr(
        Mechanism, "_standard_normal", lambda self, size: torch.zeros(size, dtype=DOUBLE)
    )
    rows, seen = [], []
    for scale in (1e-3, 1.0, 1e3, 1e12):
        for group in range(GROUPS):
            one = (torch.tensor([group]), scale * torch.randn(1, SLOPES, dtype=DOUBLE))
            sums = DensitySums(RecordDensity(model, (*one, torch.ones(1, dtype=DOUBLE))), 0.5)
            theta = torch.randn(GROUPS + SLOPES, dtype=DOUBLE)
            theta[:GROUPS] -= 3  # where all gradients are long
            _, levels = Mechanism(sums).curvature_with_levels(sums, theta, 1.0, 1.0)
            assert bool((levels.value >= 0).all())
            rows.append(levels.value / sums.curvature_bound)
            seen.append(float(rows[-1].norm()))
    assert 0.9 < max(seen) <= 1.0
    apart = torch.cdist(torch.stack(rows), torch.stack(rows))
    assert 1.2 < float(apart.max()) <= math.sqrt(2)


@pytest.mark.parametrize("neighboring", RELATIONS)
def test_a_plan_pays_for_levels_where_noise_hides_them(neighboring):
    def plan(num_data, *, has_groups=True, clips=True):
        return general_plan(4.0, 22, num_data, neighboring, clips=clips, has_groups=has_groups)

    assert len(plan(1000).level_multipliers) == len(plan(1000).curvature_multipliers)
    assert plan(30_000).level_multipliers == ()
    assert plan(100).level_multipliers == ()  # a run says little of single groups there
    assert plan(1000, has_groups=False).level_multipliers == ()
    # what stands for a curvature there may have a larger trace than its Frobenius norm
    assert plan(1000, clips=False).level_multipliers == ()
    # and matrices pay for it, not gradients
    assert plan(1000).gradient_multipliers == plan(1000, has_groups=False).gradient_multipliers


def noisy(exact, std):
    noise = std * torch.randn(len(exact), len(exact), dtype=DOUBLE)
    return exact + (noise + noise.T) / 2


def measured(exact, std, of_sums, blocks):
    """A matrix, its sums besides, and what is then known of its levels."""
    totals = blocks.totals(exact) + of_sums * torch.randn(2, dtype=DOUBLE)
    release = LevelRelease(torch.zeros(15, dtype=DOUBLE), totals, of_sums)
    moved, variances = blocks.with_levels(noisy(exact, std), std, release)
    return moved, blocks.errors(std)._replace(levels=variances)


def test_levels_err_as_much_as_is_stated():
    """Of a matrix and sums besides, and of two of both at points that are alike: 2,000 each."""
    blocks, exact = BlockLevels(SITE, 1000), torch.diag((40.0 + 300 * SITE).to(DOUBLE))
    levels = blocks.means(exact)
    errors_made = []
    for _ in range(2000):
        (first, errors), (second, later) = (
            measured(exact, 30.0, 40.0, blocks),
            measured(exact, 20.0, 25.0, blocks),
        )
        found, combined = blocks.combined(first, errors, second, later)
        made = [
            (blocks.means(value) - levels) / stated.levels.sqrt()
            for value, stated in ((first, errors), (second, later), (found, combined))
        ]
        errors_made.append(torch.stack(made))
    squares = torch.stack(errors_made).square().mean(0)
    error = math.sqrt(2 / 2000)
    assert bool(((squares[:2] - 1).abs() < 6 * error).all())
    # a change between the points is looked for, which chance feigns: 1.05 times the variance
    assert bool(((squares[2] - 1.05).abs() < 8 * error).all())
    assert bool((combined.levels < 1.01 * later.levels).all())
    # sums of a site of twelve tell more of its level than the matrix does
    assert float(errors.levels[0]) == pytest.approx(1 / (12 / 30.0**2 + 144 / 40.0**2))
    assert float(errors.levels[0]) < 0.2 * 30.0**2 / 12


def test_only_the_levels_of_a_matrix_are_moved():
    blocks, value = BlockLevels(SITE, 1000), noisy(torch.eye(15, dtype=DOUBLE), 5.0)
    sums = LevelRelease(torch.zeros(15), torch.tensor([240.0, 30.0], dtype=DOUBLE), 0.0)
    moved, variances = blocks.with_levels(value, 5.0, sums)
    torch.testing.assert_close(blocks.means(moved), torch.tensor([20.0, 10.0], dtype=DOUBLE))
    change = (moved - value).diagonal()
    torch.testing.assert_close(moved - value, torch.diag(change))
    torch.testing.assert_close(change[:12], change[:1].expand(12))
    assert not variances.any()


def test_what_is_known_of_levels_counts():
    """Whether they are known, how far likely ones are apart, and what is left of the error."""
    blocks, exact = BlockLevels(SITE, 1000), torch.diag((40.0 + 300 * SITE).to(DOUBLE))
    sure = blocks.errors(60.0)._replace(levels=torch.full((2,), 4.0, dtype=DOUBLE))
    assert blocks.are_known(exact, sure, 0.1)
    assert not blocks.are_known(exact, blocks.errors(60.0), 0.1)
    drawn = torch.stack(blocks.likely(exact, sure, 1.0, 1e4, 12))
    assert bool((drawn.std(0) < 2.5).all())
    assert blocks.denoised(exact, sure)[1] < 0.5 * blocks.denoised(exact, blocks.errors(60.0))[1]


def test_where_the_level_changed_the_later_one_is_taken():
    blocks, exact = BlockLevels(SITE, 1000), 50 * torch.eye(15, dtype=DOUBLE)
    (first, errors) = measured(6 * exact, 20.0, 10.0, blocks)
    (second, later) = measured(exact, 20.0, 10.0, blocks)
    found, combined = blocks.combined(first, errors, second, later)
    torch.testing.assert_close(blocks.means(found), blocks.means(second), rtol=0.05, atol=0)
    assert bool((combined.levels > 0.9 * later.levels).all())


@pytest.mark.parametrize("std, of_sums, of_gradient", [(30, 50, 60), (20, 35, 100), (100, 170, 30)])
@pytest.mark.parametrize("where", [None, 0, 14], ids=["nowhere", "in a large site", "alone"])
def test_levels_about_the_mean_err_as_much_as_is_stated(where, std, of_sums, of_gradient):
    """Or less, by the noise of the mean's square. 2,000 releases; the last site has one coordinate,
    which may hold all of the mean.
    """
    site = torch.tensor([0] * 14 + [1])
    blocks, count, size = BlockLevels(site, 1000), 1000, 15
    mean = torch.zeros(size, dtype=DOUBLE)
    if where is not None:
        mean[where] = 0.3
    rows = mean + 0.3 * torch.randn(count, size, dtype=DOUBLE)
    total, outer = rows.sum(0), rows.T @ rows
    exact = blocks.means(outer - total.outer(total) / count)
    theta = torch.zeros(size, dtype=DOUBLE)
    squares = []
    for _ in range(2000):
        value = total + of_gradient * torch.randn(size, dtype=DOUBLE)
        totals = blocks.totals(outer) + of_sums * torch.randn(2, dtype=DOUBLE)
        found = MeasuredCurvature.about_the_mean(
            CurvatureRelease(theta, noisy(outer, std), std),
            LevelRelease(theta, totals, of_sums),
            GradientRelease(theta, value, of_gradient),
            count,
            blocks,
        )
        assert not found.holds_mean
        matrix, errors = found.on(blocks)
        squares.append(torch.stack([(blocks.means(matrix) - exact).square(), errors.levels]))
    made, stated = torch.stack(squares).mean(0)
    ratios = made / stated
    assert bool((ratios < 1 + 6 * math.sqrt(2 / 2000)).all()) and bool((ratios > 0.3).all())


def test_of_few_records_the_mean_stays_in_the_sums_too():
    blocks, eye = BlockLevels(SITE, 10), torch.eye(15, dtype=DOUBLE)
    theta, levels = torch.zeros(15, dtype=DOUBLE), torch.tensor([5.0, 6.0], dtype=DOUBLE)
    found = MeasuredCurvature.about_the_mean(
        CurvatureRelease(theta, eye, 1.0),
        LevelRelease(theta, levels, 2.0),
        GradientRelease(theta, theta + 9, 30.0),
        10,
        blocks,
    )
    assert found.holds_mean
    torch.testing.assert_close(found.of_levels, 1 / (SIZES + SIZES.square() / 4))
    torch.testing.assert_close(
        blocks.means(found.value), (SIZES + levels / SIZES * SIZES.square() / 4) * found.of_levels
    )


def test_traces_of_other_matrices_are_refused():
    """Those of a softmax are up to 1.6 times as large as the bound on the matrix."""
    x, y = torch.randn(9, 2), torch.randint(0, 5, (9,))
    sums = SoftmaxSums(Softmax(5), x, y)
    theta = torch.zeros(sums.dimension, dtype=DOUBLE)
    with pytest.raises(ValueError, match="larger than their bound"):
        Mechanism(sums).curvature_with_levels(sums, theta, 1.0, 1.0)


@pytest.mark.parametrize("neighboring", RELATIONS)
@pytest.mark.parametrize("epsilon, num_data", [(0.1, 8000), (1.0, 1000)])
def test_a_plan_with_levels_spends_the_budget_and_no_more(neighboring, epsilon, num_data):
    multiplier = total_multiplier(
        dpb.PrivacyAccountant(epsilon, 1e-5, neighboring=neighboring), None, None
    )
    plan = general_plan(multiplier, 22, num_data, neighboring, clips=True, has_groups=True)
    assert plan.level_multipliers
    cheaper = math.sqrt(2) if neighboring == "replace_one" else 1.0
    matrices = plan.curvature_multipliers + plan.level_multipliers + plan.clipped_multipliers
    spent = sum(z**-2 for z in plan.gradient_multipliers)
    spent += sum((cheaper * z) ** -2 for z in matrices)
    assert spent == pytest.approx(multiplier**-2, rel=1e-6)


def test_everything_is_charged_before_anything_is_released(monkeypatch):
    data, accountant, seen = records(), dpb.PrivacyAccountant(1.0, 1e-5), []
    monkeypatch.setattr(
        Mechanism,
        "_standard_normal",
        lambda self, size: seen.append(len(accountant)) or torch.zeros(size, dtype=DOUBLE),
    )
    how = {"accountant": accountant, "num_data": 500, "max_grad_norm": BOUND}
    post = dpb.noise_aware.laplace(model, *data, **how)
    assert len(post.transcript.levels) == 3 and set(seen) == {len(accountant)}
    assert "traces over each site" in post.guarantee()
    drawn = len(seen)
    with pytest.raises(dpb.PrivacyBudgetExceeded):
        dpb.noise_aware.laplace(model, *data, **how, epsilon=5.0)
    assert len(seen) == drawn
