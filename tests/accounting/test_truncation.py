"""Truncated Poisson batches: their pair against the whole law of small batches, and others."""

import itertools
import math
import random

import numpy as np
import pytest
from dp_accounting.dp_event import TruncatedSubsampledGaussianDpEvent
from scipy import stats

from torch_dpbayes.accounting.dominating_pairs import dominating_pair
from torch_dpbayes.accounting.fft_composition import compose


def law_of_the_sum(contributions, rate, most):
    """Every sum that a batch may have, with its probability."""
    found = {}
    for size in range(len(contributions) + 1):
        for drawn in itertools.combinations(contributions, size):
            kept = list(itertools.combinations(drawn, min(size, most)))
            for batch in kept:
                chance = rate**size * (1 - rate) ** (len(contributions) - size) / len(kept)
                found[sum(batch)] = found.get(sum(batch), 0.0) + chance
    return found


def density(law, x, noise):
    return sum(p * stats.norm.pdf(x, total, noise) for total, p in law.items())


@pytest.mark.parametrize("neighboring", ["add_or_remove_one", "replace_one"])
def test_small_batches_are_covered(neighboring):
    """Every batch of up to six records is listed; contributions are the extreme ones and any."""
    size, most = random.choice([(5, 2), (4, 1), (5, 4), (5, 5)])
    rate, noise = random.uniform(0.05, 0.9), random.uniform(0.4, 3.0)
    event = TruncatedSubsampledGaussianDpEvent(size, rate, most, noise)
    pair = dominating_pair(event, neighboring)
    (found, *_) = both = compose({pair: 1}, delta=1e-3)
    x = np.linspace(-6 - 9 * noise, 6 + 9 * noise, 10_001)
    step = x[1] - x[0]
    for case in range(4):
        others = [-1.0 if case < 2 else random.uniform(-1, 1) for _ in range(size - 1)]
        mine, theirs = 1.0, (-1.0 if case % 2 else random.uniform(-1, 1))
        with_it = law_of_the_sum([*others, mine], rate, most)
        if neighboring == "replace_one":
            cases = [(with_it, law_of_the_sum([*others, theirs], rate, most))]
        else:  # of the stated number one is removed, or one is added to it
            without = law_of_the_sum(others, rate, most)
            more = law_of_the_sum([*others, mine, random.uniform(-1, 1)], rate, most)
            cases = [(with_it, without), (without, with_it), (with_it, more), (more, with_it)]
        for one, other in cases:
            p, q = density(one, x, noise), density(other, x, noise)
            for epsilon in (0.0, 0.1, 0.5, 1.0, 2.0):
                truth = step * np.maximum(p - math.exp(epsilon) * q, 0.0).sum()
                bound = max(c.upper_delta(epsilon) for c in both)
                assert truth <= bound * (1 + 1e-6) + 1e-7
    assert found.upper_delta(0.0) <= 1
