r"""How the gradient sum changes with θ where the curvature changes along the way of a run.

Where weights become large, a log likelihood has several times less curvature at the end of a run
than at its beginning, most of all along the way itself. One curvature for all of it promises a
gradient that is not there: steps stay short of the maximum, and a gradient near zero at the end is
better explained by θ near the prior's mean and hardly any curvature. With the way u = c − θ₁ from
the first point to the centre c, and F at the centre,

.. math:: r(\theta) = F(\theta - c) + (h(s) - s)\, F u, \qquad s = \frac{u^\top F (\theta -
    c)}{u^\top F u}, \qquad h(0) = 0, \quad h'(s) = e^{-\kappa s}

so that the curvature along the way is e^κ times as large at its beginning, s = −1, as at its end.
It stays what it is beyond |s| = 1, and across the way it is taken for the same everywhere.

Derived in this project.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .response import MISFIT


class BentResponse:
    """r and its derivative.

    Args:
        curvature: F at the centre, positive definite.
        centre: c.
        way: u.
        bend: κ.
    """

    misfit = MISFIT

    def __init__(self, curvature: Tensor, centre: Tensor, way: Tensor, bend: float) -> None:
        self._curvature, self._centre = curvature, centre
        self._bend = curvature.new_tensor(bend)
        self._moved = curvature @ way
        self._square = float(way @ self._moved)

    def value(self, theta: Tensor) -> Tensor:
        """r(θ)."""
        more, _ = bent(self._along(theta), self._bend)
        return (theta - self._centre) @ self._curvature + more[..., None] * self._moved

    def slope(self, theta: Tensor) -> Tensor:
        """∂r/∂θ."""
        _, slope = bent(self._along(theta), self._bend)
        of_way = torch.outer(self._moved, self._moved) / self._square
        return self._curvature + (slope - 1)[..., None, None] * of_way

    def variability(self, theta: Tensor) -> float:
        """1: as where nothing is clipped."""
        return 1.0

    def predictor_std(self, theta: Tensor) -> float:
        """It rests on none."""
        return 0.0

    def _along(self, theta: Tensor) -> Tensor:
        """s."""
        return (theta - self._centre) @ self._moved / self._square


def bent(along: Tensor, bend: Tensor) -> tuple[Tensor, Tensor]:
    """h(s) − s and h'(s)."""
    inside = along.clamp(-1.0, 1.0)
    slope = (-bend * inside).exp()
    is_straight = bend == 0
    divisor = torch.where(is_straight, 1.0, bend)  # no 0/0 in a gradient
    within = torch.where(is_straight, inside, (1 - slope) / divisor)
    return within + slope * (along - inside) - along, slope
