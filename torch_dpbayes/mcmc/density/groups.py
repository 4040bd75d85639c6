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
        has are taken for such, too. None where there are none, and where other latents make up for
        what the groups have in common, as an intercept of all records does: there no curvature
        tells the two apart.
    """
    rows = [some[some.isfinite().all(1)].cpu() for some in gradients]
    seen = torch.cat([torch.zeros(0, prior.dimension, dtype=torch.bool), *(r != 0 for r in rows)])
    found = []
    for place in prior.unflatten(torch.arange(prior.dimension)).values():
        for dim in range(place.dim()):
            own = place.movedim(dim, 0).flatten(1) if place.dim() > 1 else place[:, None]
            read = _read(seen[:, own].any(2))
            if read is not None:
                found.append((own, read))
    if not found:
        return None
    first, of_first = max(found, key=lambda each: len(each[0]))
    together, taken = [first], torch.zeros(prior.dimension, dtype=torch.bool)
    taken[first] = True
    for own, read in found:
        if len(own) == len(first) and not taken[own].any() and _is_same(read, of_first):
            taken[own] = True
            together.append(own)
    places = torch.cat(together, 1)
    made_up_for = [_are_made_up_for(each, places, ~taken) for each in rows if len(each)]
    return None if all(made_up_for) else places


def _are_made_up_for(rows: Tensor, places: Tensor, rest: Tensor) -> bool:
    """Whether, at one θ, gradients of the rest add up to the sums over groups, or to 0."""
    sums, others = rows[:, places].sum(1).double(), rows[:, rest].double()
    others = others[:, others.any(0)]
    if not others.shape[1] or len(rows) < sums.shape[1] + others.shape[1]:
        return False
    others = others / others.norm(dim=0)
    left = others - sums @ (torch.linalg.pinv(sums) @ others)
    return bool(torch.linalg.svdvals(left)[-1] < torch.finfo(rows.dtype).eps ** 0.5)


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
