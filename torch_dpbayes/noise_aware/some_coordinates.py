"""A likelihood of some coordinates of θ, as one of all."""

from __future__ import annotations

import torch
from torch import Tensor

from .feature_shape import InShape
from .surrogate import AnySurrogate
from .uncertain_level import UncertainLevel


class OfSome:
    """What was released says nothing of the other coordinates but by the prior.

    Args:
        inner: the likelihood of ``theta[chosen]``.
        chosen: ``[D]``, which d coordinates.
        place: where the others are at the centre, ``[D]``.
    """

    def __init__(
        self, inner: AnySurrogate | UncertainLevel | InShape, chosen: Tensor, place: Tensor
    ) -> None:
        self._inner, self._chosen = inner, chosen
        self.centre = place.clone()
        self.centre[chosen] = inner.centre

    def log_likelihood(self, theta: Tensor) -> Tensor:
        """log p(transcript | θ) up to a constant, ``[...]`` for θ ``[..., D]``; differentiable."""
        return self._inner.log_likelihood(theta[..., self._chosen])

    def precision(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """H and Hθ̂ of the Gaussian likelihood that is tangent to this one at ``theta``."""
        some, product = self._inner.precision(theta[self._chosen])
        precision, padded = theta.new_zeros(len(theta), len(theta)), torch.zeros_like(theta)
        padded[self._chosen] = product
        rows = self._chosen.nonzero()
        precision[rows, rows.T] = some
        return precision, padded

    def agreement(self, mode: Tensor, precision: Tensor) -> float:
        """See :meth:`~torch_dpbayes.noise_aware.surrogate.Surrogate.agreement`."""
        rows = self._chosen.nonzero()
        return self._inner.agreement(mode[self._chosen], precision[rows, rows.T])
