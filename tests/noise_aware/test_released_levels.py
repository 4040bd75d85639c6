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
from torch_dpbayes.noise_aware.planning import general_plan
from torch_dpbayes.noise_aware.records import DensitySums
from torch_dpbayes.noise_aware.transcript import CurvatureRelease, GradientRelease, LevelRelease

DOUBLE = torch.float64
SIGNIFICANCE = 1e-6
RELATIONS = ["add_or_remove_one", "replace_one"]
GROUPS, SLOPES, BOUND = 6, 2, 1.3
SITE = torch.tensor([0] * 12 + [1] * 3)


def is_chi_squared(total: float, count: int) -> bool:
    return bool(chi2.ppf(SIGNIFICANCE / 2, count) < total < chi2.ppf(1 - SIGNIFICANCE / 2, count))


def model(group, x, y):
    zeros = torch.zeros(GROUPS, dtype=DOUBLE)
    with pyro.plate("groups", GROUPS):
        intercept = pyro.sample("intercept", dist.Normal(zeros, 1.0))
    slope = pyro.sample("slope", dist.Normal(zeros[:SLOPES], 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=intercept[group] + x @ slope), obs=y)


def records(count=200):
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
            model, *data, accountant=accountant, num_data=200, max_grad_norm=BOUND
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
    assert plan(1000, has_groups=False).level_multipliers == ()
    # what stands for a curvature there may have a larger trace than its Frobenius norm
    assert plan(1000, clips=False).level_multipliers == ()
    # and matrices pay for it, not gradients
    assert plan(1000).gradient_multipliers == plan(1000, has_groups=False).gradient_multipliers


def noisy(exact, std):
    noise = std * torch.randn(len(exact), len(exact), dtype=DOUBLE)
    return exact + (noise + noise.T) / 2


def test_levels_err_as_much_as_is_stated():
    """Of a matrix and sums besides, and of two of both at points that are alike: 2,000 each."""
    blocks, exact = BlockLevels(SITE, 1000), torch.diag((40.0 + 300 * SITE).to(DOUBLE))
    levels = blocks.means(exact)
    errors_made = []
    for _ in range(2000):
        both = []
        for std, of_sums in ((30.0, 40.0), (20.0, 25.0)):
            totals = blocks.totals(exact) + of_sums * torch.randn(2, dtype=DOUBLE)
            variances = torch.full((2,), of_sums**2, dtype=DOUBLE)
            both.append(
                blocks.with_levels(noisy(exact, std), blocks.errors(std), totals, variances)
            )
        (first, errors), (second, later) = both
        found, combined = blocks.combined(first, errors, second, later)
        made = [
            (blocks.means(value) - levels) / stated.levels.sqrt()
            for value, stated in ((first, errors), (second, later), (found, combined))
        ]
        errors_made.append(torch.stack(made))
    squares = torch.stack(errors_made).square().mean(0)
    assert bool(((squares[:2] - 1).abs() < 6 * math.sqrt(2 / 2000)).all())
    # of the average less than of the better one; a change is looked for, which states more
    assert bool((squares[2] < 1.2).all()) and bool((squares[2] > 0.3).all())
    assert bool((combined.levels < 1.01 * later.levels).all())
    # sums of a site of twelve tell more of its level than the matrix does
    assert float(errors.levels[0]) < 0.2 * 30.0**2 / 12 * 12
    assert float(errors.levels[0]) == pytest.approx(1 / (12 / 30.0**2 + 144 / 40.0**2))


def test_only_the_levels_of_a_matrix_are_moved():
    blocks, value = BlockLevels(SITE, 1000), noisy(torch.eye(15, dtype=DOUBLE), 5.0)
    totals, sure = torch.tensor([240.0, 30.0], dtype=DOUBLE), torch.zeros(2, dtype=DOUBLE)
    moved, errors = blocks.with_levels(value, blocks.errors(5.0), totals, sure)
    torch.testing.assert_close(blocks.means(moved), torch.tensor([20.0, 10.0], dtype=DOUBLE))
    change = (moved - value).diagonal()
    torch.testing.assert_close(moved - value, torch.diag(change))
    torch.testing.assert_close(change[:12], change[:1].expand(12))
    assert blocks.are_known(moved, errors, 0.1)
    assert not blocks.are_known(moved, blocks.errors(60.0), 0.1)


def test_where_the_level_changed_the_later_one_is_taken():
    blocks, exact = BlockLevels(SITE, 1000), 50 * torch.eye(15, dtype=DOUBLE)
    variances = torch.full((2,), 100.0, dtype=DOUBLE)

    def measured(value):
        return blocks.with_levels(
            noisy(value, 20.0), blocks.errors(20.0), blocks.totals(value), variances
        )

    (first, errors), (second, later) = measured(6 * exact), measured(exact)
    found, combined = blocks.combined(first, errors, second, later)
    torch.testing.assert_close(blocks.means(found), blocks.means(second), rtol=0.05, atol=0)
    assert bool((combined.levels > 0.9 * later.levels).all())


@pytest.mark.parametrize("shift", [0.0, 4.0])
def test_levels_about_the_mean_err_as_much_as_is_stated(shift):
    """Or less: the gradients' mean is taken off with its noise, all of which each site is said to
    have. 2,000 releases.
    """
    blocks, count, size = BlockLevels(SITE, 1000), 1000, 15
    rows = shift / math.sqrt(size) + torch.randn(count, size, dtype=DOUBLE)
    total, outer = rows.sum(0), rows.T @ rows
    exact = blocks.means(outer - total.outer(total) / count)
    theta, std = torch.zeros(size, dtype=DOUBLE), (60.0, 50.0, 30.0)
    squares = []
    for _ in range(2000):
        value = total + std[0] * torch.randn(size, dtype=DOUBLE)
        totals = blocks.totals(outer) + std[1] * torch.randn(2, dtype=DOUBLE)
        found = MeasuredCurvature.about_the_mean(
            CurvatureRelease(theta, noisy(outer, std[2]), std[2]),
            LevelRelease(theta, totals, std[1]),
            GradientRelease(theta, value, std[0]),
            count,
            blocks,
        )
        assert not found.holds_mean
        matrix, errors = found.on(blocks)
        squares.append((blocks.means(matrix) - exact).square() / errors.levels)
    found = torch.stack(squares).mean(0)
    assert bool((found < 1.2).all()) and float(found[0]) > 0.6


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
    assert found.holds_mean and torch.equal(found.totals, levels)
    assert (found.of_each, found.of_square) == (4.0, 0.0)
