"""The numbers of one release: noise of each group's own size on the clipped sum, nothing of a group
that takes no step.
"""

import math

import pytest
import torch
from support.steps import zeros

from torch_dpbayes.release import ClippedSum, Layout, trainable_members

CLIP, BATCH = 0.25, 8.0


def layout_of(*multipliers, records=BATCH, dtype=torch.float64):
    """A release of groups with five parameters each, whose sums are 1, 2, …"""
    groups = [{"params": [zeros(5, dtype=dtype)]} for _ in multipliers]
    layout = Layout(trainable_members(groups), 0, records, is_shared=False)
    for number, (group, z) in enumerate(zip(layout.groups, multipliers), 1):
        group.gradient.fill_(number)
        group.noise_multiplier = z
    return layout


def generator():
    return torch.Generator().manual_seed(torch.initial_seed())


@pytest.mark.parametrize("is_first", [True, False])  # of several ranks the others add no noise
def test_each_group_has_its_own_noise_in_units_of_the_clip_norm(is_first):
    layout = layout_of(2.0, 3.0, math.inf)
    query, stream = ClippedSum(CLIP, BATCH), generator()
    query.add_noise(layout, 2.0, generator() if is_first else None)
    for number, (group, z) in enumerate(zip(layout.groups, (2.0, 3.0)), 1):
        xi = torch.empty(5, dtype=torch.float64).normal_(0.0, 1.0, generator=stream)
        expected = (number + z * CLIP * xi * is_first) / BATCH
        torch.testing.assert_close(group.gradient, expected)
    assert layout.groups[2].gradient.tolist() == [0.0] * 5
    assert layout.smallest_noise_multiplier == 2.0


def test_a_clip_norm_is_a_number_that_nobody_changes():
    bound = torch.tensor(CLIP)
    query = ClippedSum(bound, BATCH)
    bound.fill_(100.0)
    assert query.max_grad_norm == CLIP


@pytest.mark.parametrize(
    ("records", "dtype", "expected"),
    [
        (8.0, torch.float32, torch.float32),
        (2.0**14, torch.float32, torch.float64),
        (8.0, torch.float64, torch.float64),
        (8.0, torch.float16, torch.float32),
    ],
)
def test_sums_are_wide_enough_for_their_records(records, dtype, expected):
    assert layout_of(1.0, records=records, dtype=dtype).buffer.dtype == expected
