"""Latents with an entry for each group, of which a record reads one: seen on made-up rows, before
the data.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .prior import Prior

_NONE = -1  # of the groups


def groups(prior: Prior, gradients: Iterable[Tensor]) -> Tensor | None:
    """The latents whose gradients are those of one group in each record.

    Args:
        prior: of the latents.
        gradients: of made-up records at several θ, ``[rows, dimension]`` each.

    Returns:
        The places of every group's own entries in θ, ``[groups, m]``: of the latent with the most
        groups and of all that go with it, as slopes do with intercepts. Groups that no made-up row
        has are taken for such, too. None where there are none.
    """
    finite = [rows[rows.isfinite().all(1)].cpu() != 0 for rows in gradients]
    seen = torch.cat([torch.zeros(0, prior.dimension, dtype=torch.bool), *finite])
    found = []
    for place in prior.unflatten(torch.arange(prior.dimension)).values():
        for dim in range(place.dim()):
            rows = place.movedim(dim, 0).flatten(1) if place.dim() > 1 else place[:, None]
            read = _read(seen[:, rows].any(2))
            if read is not None:
                found.append((rows, read))
    if not found:
        return None
    first, of_first = max(found, key=lambda each: len(each[0]))
    together = [
        rows
        for rows, read in found
        if len(rows) == len(first)
        and (rows is first or not torch.isin(rows, first).any())
        and _is_same(read, of_first)
    ]
    return torch.cat(together, 1)


def _read(read: Tensor) -> Tensor | None:
    """The group that each row reads; None where one reads two, or all the same one.

    Args:
        read: which groups rows read, ``[rows, groups]``.
    """
    if bool((read.sum(1) > 1).any()):
        return None
    numbers = torch.where(read.any(1), read.to(torch.int64).argmax(1), _NONE)
    return numbers if _differ(numbers) else None


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether rows that read both latents read the same group of both."""
    both = (one != _NONE) & (other != _NONE)
    return bool((one == other)[both].all()) and _differ(one[both])


def _differ(numbers: Tensor) -> bool:
    return len(numbers[numbers != _NONE].unique()) > 1
