"""Curvatures of parameters that belong to several sites, against matrices that are known."""

import math

import pytest
import torch

from torch_dpbayes.noise_aware.block_levels import BlockLevels

DOUBLE = torch.float64
SITES = torch.tensor([0] * 12 + [1] * 3)
EXACT = torch.diag(torch.tensor([40.0] * 12 + [600.0] * 3, dtype=DOUBLE))


def released(exact, std):
    noise = std * torch.randn(len(exact), len(exact), dtype=DOUBLE)
    return exact + (noise + noise.T) / 2


def test_each_site_keeps_its_level_where_noise_hides_single_entries():
    """Levels are wrong by 60/√12 and 60/√3 in one standard deviation; six are allowed."""
    blocks, std = BlockLevels(SITES, 1000), 60.0
    found, left = blocks.denoised(released(EXACT, std), blocks.errors(std))
    assert abs(float(found.diagonal()[:12].mean()) - 40) < 6 * std / math.sqrt(12)
    assert abs(float(found.diagonal()[12:].mean()) - 600) < 6 * std / math.sqrt(3)
    assert 0 < left < std
    assert float(torch.linalg.eigvalsh(found).min()) > 0


def test_entries_that_stand_out_on_the_diagonal_are_kept_among_zeros_off_it():
    exact = torch.diag(torch.linspace(10.0, 200.0, 30, dtype=DOUBLE))
    blocks, std = BlockLevels(torch.zeros(30, dtype=torch.int64), 1000), 15.0
    found, _ = blocks.denoised(released(exact, std), blocks.errors(std))
    error = found - exact
    assert float(error.diagonal().square().mean().sqrt()) < 1.5 * std
    assert float((error - torch.diag(error.diagonal())).abs().max()) < std


def test_what_is_left_of_the_noise_is_the_error_that_is_made():
    """In the mean over 300 releases, or a little more: a site's level is counted generously."""
    exact = EXACT.clone()
    exact[:12, 12:] = 20.0
    exact[12:, :12] = 20.0
    exact += torch.diag(torch.cat([torch.linspace(-30, 30, 12), torch.zeros(3)]).double())
    exact += 100 * torch.eye(15, dtype=DOUBLE)
    blocks, std, total, stated = BlockLevels(SITES, 1000), 20.0, 0.0, 0.0
    for _ in range(300):
        found, left = blocks.denoised(released(exact, std), blocks.errors(std))
        total += float((found - exact).square().sum()) / (15 * 16 / 2)
        stated += left**2
    assert 0.6 < math.sqrt(total / stated) < 1.05


def test_a_later_release_takes_over_where_the_curvature_changed():
    """Of the first site alone: there the later matrix is taken, in the other both are averaged."""
    blocks, std = BlockLevels(SITES, 1000), 20.0
    earlier = EXACT.clone()
    earlier[:12, :12] += 300 * torch.eye(12, dtype=DOUBLE)
    first, second = released(earlier, std), released(EXACT, std)
    own = blocks.errors(std)
    found, errors = blocks.combined(first, own, second, own)
    moved = (found - first).diagonal() / (second - first).diagonal()
    assert bool((moved[:12] > 0.95).all())
    assert float(errors.entries[0]) > 0.95 * std**2
    off_diagonal = errors.entries[2:]
    assert bool((off_diagonal < 0.8 * std**2).any())


def test_levels_are_moved_and_nothing_else():
    blocks = BlockLevels(SITES, 1000)
    matrix = EXACT + torch.diag(torch.linspace(-20, 20, 15, dtype=DOUBLE))
    levels = torch.tensor([70.0, 500.0], dtype=DOUBLE)
    moved = blocks.at(matrix, levels)
    torch.testing.assert_close(blocks.means(moved), levels)
    assert float(torch.linalg.eigvalsh(moved).min()) > 0
    # from far below zero, too
    low = blocks.at(matrix, torch.tensor([1.0, 2.0], dtype=DOUBLE))
    torch.testing.assert_close(blocks.means(low), torch.tensor([1.0, 2.0], dtype=DOUBLE))
    assert float(torch.linalg.eigvalsh(low).min()) > 0


def test_likely_levels_have_each_sites_own_law():
    """Half of them are below what was released where that is sure; each is drawn once."""
    blocks, std = BlockLevels(SITES, 1000), 20.0
    drawn = torch.stack(blocks.likely(EXACT, blocks.errors(std), 10.0, 1e4, 12))
    assert drawn.shape == (12, 2)
    for column, exact, size in zip(drawn.T, (40.0, 600.0), (12, 3), strict=True):
        assert len(column.unique()) == 12
        assert abs(float(column.median()) - exact) < std / math.sqrt(size)
        assert float(column.std()) == pytest.approx(std / math.sqrt(size), rel=0.25)
    # and the sites' are not sorted alike
    assert abs(float(torch.corrcoef(drawn.T)[0, 1])) < 0.5


def test_levels_of_few_records_are_no_higher_than_these_allow():
    """Under a narrow prior the level at which records begin to say something may be higher."""
    blocks, most = BlockLevels(SITES, 10), 90.0
    drawn = torch.stack(blocks.likely(EXACT, blocks.errors(1e4), 100.0, most, 12))
    for column, size in zip(drawn.T, (12, 3), strict=True):
        assert float(column.max()) <= most / size
        assert float(column.min()) < 0.2 * most / size


@pytest.mark.parametrize("spread", [0.0, 10.0, 300.0])
def test_an_error_is_no_larger_than_the_levels(spread):
    blocks, levels = BlockLevels(SITES, 1000), torch.tensor([40.0, 600.0], dtype=DOUBLE)
    scales = blocks.shape_scales(levels, spread)
    root = levels.sqrt()[SITES] * (1 + 1e-9)
    assert bool((spread * torch.outer(scales, scales) <= torch.outer(root, root)).all())
    assert bool((scales <= 1).all())


def test_a_level_is_known_when_all_sites_are():
    blocks = BlockLevels(SITES, 1000)
    assert blocks.are_known(EXACT, blocks.errors(10.0), 0.1)
    assert not blocks.are_known(EXACT, blocks.errors(20.0), 0.1)
