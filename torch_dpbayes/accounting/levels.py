"""Levels: different releases of one history, brought to as few as needed.

Lowering a noise multiplier or raising a sampling rate only weakens privacy, so close levels are
merged at their least private member.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from .loss_grid import has_loss_distribution
from .pairs import Allocated, BoundedRange, Gaussian, Mixed, Pair, Sampled, has_two_directions

EXACT_LEVELS = 48  # up to this many different levels are composed as they are
_MOST_LEVELS = 1000
_MOST_EPOCHS, _EPOCHS_RATIO = 8, 1.01  # of random allocation: each kind takes a second


def merge(
    counts: Mapping[Pair, int],
    ratio: float = 1.0,
    *,
    upper: bool = True,
    concentrated: bool = False,
    fixed: bool = False,
) -> dict[Pair, int]:
    """Gaussians become one; close levels of sampled releases become their least private member.

    Args:
        counts: how often each pair occurs.
        ratio: levels are merged if there are many and their noise and rate are within it; of upper
            bounds only where ``fixed``, as compositions place many levels between a few.
        upper: ``False`` merges at the most private member, and leaves out what need not cost
            anything.
        concentrated: keep pairs that have no privacy loss distribution.
        fixed: merged levels stand on a fixed grid, whatever the members (so that what is computed
            for one can be kept).
    """
    squared = 0.0
    merged: dict[Pair, int] = {}
    sampled: list[tuple[Sampled, int]] = []
    allocated: list[tuple[Allocated, int]] = []
    for pair, count in counts.items():
        if isinstance(pair, Gaussian):
            squared += count * pair.mu**2
        elif isinstance(pair, Sampled):
            if not upper and pair.kind == "symmetric":
                pair = Sampled("directed", pair.rate, pair.noise)
            sampled.append((pair, count))
        elif not upper and isinstance(pair, (BoundedRange, Allocated, Mixed)):
            continue  # its profile bounds its privacy from one side only
        elif isinstance(pair, Allocated):
            allocated.append((pair, count))
        elif has_loss_distribution(pair) or concentrated:
            merged[pair] = merged.get(pair, 0) + count
        elif upper:
            raise TypeError(f"{pair!r} has no privacy loss distribution.")
    for epoch, count in allocated:
        if len(allocated) > _MOST_EPOCHS:
            cell = math.floor(math.log(epoch.noise) / math.log(_EPOCHS_RATIO))
            epoch = replace(epoch, noise=min(_EPOCHS_RATIO**cell, epoch.noise))
        merged[epoch] = merged.get(epoch, 0) + count
    if len(sampled) <= EXACT_LEVELS or (upper and not fixed):
        for pair, count in sampled:
            merged[pair] = merged.get(pair, 0) + count
    else:
        while True:
            groups = _group(sampled, ratio, upper, fixed)
            if len(groups) <= _MOST_LEVELS:
                break
            ratio = 1 + 2 * (ratio - 1)
        merged.update(groups)
    if squared:
        merged[Gaussian(math.sqrt(squared))] = 1
    return merged


def scattered_of(
    levels: Mapping[Pair, int],
) -> tuple[list[tuple[Sampled, int]], dict[Pair, int]]:
    """Sampled releases, if they are too many to be composed one by one, and the others."""
    sampled = [(pair, count) for pair, count in levels.items() if isinstance(pair, Sampled)]
    if len(sampled) <= EXACT_LEVELS:
        return [], dict(levels)
    return sampled, {pair: n for pair, n in levels.items() if not isinstance(pair, Sampled)}


def _group(
    sampled: list[tuple[Sampled, int]], ratio: float, upper: bool, fixed: bool
) -> dict[Pair, int]:
    noise = np.array([pair.noise for pair, _ in sampled])
    rate = np.array([pair.rate for pair, _ in sampled])
    noise_cell = np.floor(np.log(noise) / math.log(ratio)).astype(np.int64)
    rate_cell = np.floor(np.log(rate) / math.log(ratio)).astype(np.int64)
    members: dict[tuple[str, int, int], list[int]] = {}
    for i, (pair, _) in enumerate(sampled):
        members.setdefault((pair.kind, int(noise_cell[i]), int(rate_cell[i])), []).append(i)
    groups: dict[Pair, int] = {}
    for (kind, _, _), index in members.items():
        least, most = (np.min, np.max) if upper else (np.max, np.min)
        level = Sampled(kind, float(most(rate[index])), float(least(noise[index])))  # type: ignore[arg-type]
        if fixed:
            level = Sampled(
                level.kind, level.rate, min(level.noise, ratio ** int(noise_cell[index[0]]))
            )
        groups[level] = groups.get(level, 0) + sum(sampled[i][1] for i in index)
    return groups


def directions(levels: Mapping[Pair, int]) -> tuple[bool, ...]:
    """Whether to look at the pairs as they are (a record was removed) and at their reverse (a
    record was added).
    """
    return (False, True) if any(map(has_two_directions, levels)) else (False,)


def only_mu(levels: Mapping[Pair, int]) -> float | None:
    """mu of merged levels that are one Gaussian; 0 if there are none; ``None`` if there is
    anything else.
    """
    mu = 0.0
    for pair in levels:
        if not isinstance(pair, Gaussian):
            return None
        mu = pair.mu
    return mu
