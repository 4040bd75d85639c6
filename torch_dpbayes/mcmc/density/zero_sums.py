"""Latents of which records tell only differences: seen on made-up rows, before the data.

A number that is added to the weights of all classes of a softmax changes no probability. The
gradients of such a latent add up to 0 along one of its dimensions, whatever the records and the
other latents are.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .prior import Prior

_ROUNDING = 30.0  # of the latents' dtype, of the largest gradient


def zero_sums(prior: Prior, gradients: Iterable[Tensor]) -> list[Tensor]:
    """The latents, and the dimension, that have such gradients.

    Args:
        prior: of the latents.
        gradients: of made-up records at several θ, ``[rows, dimension]`` each.

    Returns:
        For each of the latents the places of its entries in θ, ``[K, m]``: gradients add up to 0
        over the K, in every column in which one was seen. Others are taken for such, too: where a
        latent has a row for each group, made-up rows see few groups.
    """
    places = prior.unflatten(torch.arange(prior.dimension))
    candidates = [
        place.movedim(dim, 0).flatten(1) if place.dim() > 1 else place[:, None]
        for place in places.values()
        for dim in range(place.dim())
        if place.shape[dim] > 1
    ]
    sums = [torch.zeros(place.shape[1], dtype=torch.float64) for place in candidates]
    sizes = [torch.zeros_like(largest) for largest in sums]
    for rows in gradients:
        finite = rows[rows.isfinite().all(1)].cpu()
        if not len(finite):
            continue
        for k, place in enumerate(candidates):
            some = finite[:, place]
            total = some.sum(1, dtype=torch.float64)
            sums[k] = torch.maximum(sums[k], total.abs().amax(0))
            sizes[k] = torch.maximum(sizes[k], some.abs().sum(1, dtype=torch.float64).amax(0))
    tolerance = _ROUNDING * torch.finfo(prior.dtype).eps
    found, taken = [], torch.zeros(prior.dimension, dtype=torch.bool)
    for place, largest, size in zip(candidates, sums, sizes, strict=True):
        seen = size > 0
        adds_up = bool(seen.any()) and bool((largest <= tolerance * size).all())
        if adds_up and not taken[place].any():
            taken[place] = True
            found.append(place)
    return found
