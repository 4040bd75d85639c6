"""Whether entries of a latent have the same prior."""

from __future__ import annotations

import torch
from torch import Tensor

from .prior import Prior
from .pyro_runs import public_randomness

_POINTS = 20  # of each kind
_ROUNDING = 30.0  # of the latents' dtype, of a sum of so many terms as there are latents


@torch.no_grad()
def is_exchangeable(prior: Prior, places: Tensor) -> bool:
    r"""Whether the prior of entries ``[K, m]`` of θ stays the same when the K change places, in all
    columns alike. It has to at draws and near 0.

    For a permutation P of coordinates that leaves log p as it is, ∇log p(Pθ) = P∇log p(θ). The
    converse holds as well, as log p(Pθ) = log p(θ) where the K entries are equal. Of many latents a
    gradient shows in each entry what rounding hides in the density; the density shows what has the
    same slope on both sides. Where the prior depends on other latents with K entries, such as a
    level of each class, P moves those, too.

    Args:
        prior: of the latents.
        places: of the entries in θ.

    **Privacy.** A function of the prior alone.
    """
    points = _points(prior)
    return any(_is_same(prior, some, points) for some in (places, _with_others(prior, places)))


def _points(prior: Prior) -> Tensor:
    """Those near 0 are away from each other, however narrow the prior is."""
    with public_randomness():
        near_zero = torch.randn(_POINTS, prior.dimension, dtype=prior.dtype, device=prior.device)
    try:
        return torch.cat([prior.samples(_POINTS), near_zero])
    except ValueError:  # hardly any draw has a density
        return near_zero


def _with_others(prior: Prior, places: Tensor) -> Tensor:
    """And of other latents with K entries, along the first such dimension of theirs."""
    found = [places]
    for place in prior.unflatten(torch.arange(prior.dimension)).values():
        if len(places) in place.shape and not torch.isin(place, places).any():
            rows = place.movedim(place.shape.index(len(places)), 0)
            found.append(rows.reshape(len(places), -1))
    return torch.cat(found, 1)


def _is_same(prior: Prior, places: Tensor, points: Tensor) -> bool:
    count, eps = len(places), torch.finfo(prior.dtype).eps
    shifted, swapped = torch.arange(count).roll(1), torch.arange(count)
    swapped[:2] = swapped[:2].flip(0)
    orders = torch.stack([shifted, swapped])  # all others are made of these
    seen = False
    for theta in points:
        moved = theta.repeat(2, 1)
        moved[:, places] = theta[places[orders]]
        try:
            with public_randomness():  # sites that do not count are drawn all the same
                values, gradients = prior.log_densities_and_gradients(
                    torch.cat([theta[None], moved])
                )
        except RuntimeError:  # the density cannot be computed there
            continue
        slopes = gradients[0][places[orders]]
        if not (values[0].isfinite() and slopes.isfinite().all()):
            continue
        seen = True
        apart = (gradients[1:][:, places] - slopes).abs()
        if not (apart <= eps**0.5 * slopes.abs().amax(1, keepdim=True)).all():
            return False
        rounding = _ROUNDING * eps * (values[0].abs() + len(theta))
        if not ((values[1:] - values[0]).abs() <= rounding).all():
            return False
    return seen
