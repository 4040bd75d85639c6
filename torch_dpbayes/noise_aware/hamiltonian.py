"""Parallel Hamiltonian chains, for parameters and for matrices of second moments.

Source: Neal (2011), "MCMC using Hamiltonian dynamics", section 5.5 on trajectories of another
energy.

**Privacy.** Post-processing. Randomness is torch's global generator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from pyro.ops.stats import effective_sample_size, split_gelman_rubin
from torch import Tensor


class States(NamedTuple):
    """The states of parallel Hamiltonian chains, along the first dimension."""

    at: Tensor
    values: Tensor  # −log p there
    slopes: Tensor  # gradients of −log p, or of the density that trajectories follow instead


def trajectory(
    states: States,
    momenta: Tensor,
    step: float | Tensor,
    count: int,
    potential: Callable[[Tensor], tuple[Tensor, Tensor]],
    scaled: Callable[[Tensor], Tensor],
    unscaled: Callable[[Tensor], Tensor],
    target: Callable[[Tensor], Tensor] | None = None,
) -> tuple[States, Tensor]:
    """Each chain's next state, and its acceptance probability.

    ``momenta`` are standard normal. ``scaled`` gives gradients in units of the momenta, and
    ``unscaled`` momenta in units of the states. ``target`` is −log p for the acceptance, if
    trajectories follow another density than the ``potential``.
    """
    at, values, slopes = states
    moving = momenta - step / 2 * scaled(slopes)
    for number in range(count):
        at = at + step * unscaled(moving)
        values, slopes = potential(at)
        last = number == count - 1
        moving = moving - step * (0.5 if last else 1.0) * scaled(slopes)
    values = values if target is None else target(at)
    kinetic = (momenta.square() - moving.square()).flatten(1).sum(1, dtype=torch.float64) / 2
    chances = (states.values - values + kinetic).clamp(max=0.0).exp().nan_to_num(0.0)
    accepted = torch.rand(len(at), dtype=torch.float64) < chances
    of_all = accepted.reshape(-1, *[1] * (at.dim() - 1))
    at, slopes = (
        torch.where(of_all, new, old) for new, old in ((at, states.at), (slopes, states.slopes))
    )
    return States(at, torch.where(accepted, values, states.values), slopes), chances


def mixing(states: Tensor) -> tuple[float, float]:
    """The least effective sample size and the largest split R-hat of states ``[C, kept, m]``; 0 and
    infinity if a chain never moves.
    """
    states = states.double()
    if bool((states == states[:, :1]).flatten(1).all(1).any()):
        return 0.0, math.inf
    most = states.shape[0] * states.shape[1]
    worth, r_hat = effective_sample_size(states), split_gelman_rubin(states)
    # states that alternate about their mean have a correlation time of 0 or less: count all states
    worth = torch.where(worth <= 0, most, worth).nan_to_num(0.0, most).clamp_max(most)
    return float(worth.min()), float(r_hat.nan_to_num(math.inf).max())
