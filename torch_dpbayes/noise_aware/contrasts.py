"""How the classes of a softmax differ: all that records tell of their weights."""

from __future__ import annotations

import torch
from torch import Tensor

from .feature_shape import InShape
from .some_coordinates import OfSome
from .surrogate import AnySurrogate
from .turned_outputs import Turn
from .uncertain_level import UncertainLevel


class Contrasts:
    """φ = (Qᵀ⊗I)θ of weights θ ``[K·d]``, Q ``[K, K−1]`` an orthonormal basis (Helmert's) of the
    vectors whose sum over the classes is 0.

    Args:
        num_classes: K.
        num_features: d.
    """

    def __init__(self, num_classes: int, num_features: int) -> None:
        self._classes, self._features = num_classes, num_features
        above = torch.ones(num_classes, num_classes - 1, dtype=torch.float64).triu()
        counts = torch.arange(1, num_classes, dtype=torch.float64)
        above[1:] -= torch.diag(counts)
        self._basis = above / (counts * (counts + 1)).sqrt()

    def of(self, theta: Tensor) -> Tensor:
        """φ, ``[..., (K−1)·d]`` for θ ``[..., K·d]``; differentiable."""
        return (self._basis.T @ theta.unflatten(-1, (self._classes, self._features))).flatten(-2)

    def back(self, phi: Tensor) -> Tensor:
        """The θ of φ whose sum over the classes is 0."""
        return (self._basis @ phi.unflatten(-1, (self._classes - 1, self._features))).flatten(-2)

    def of_matrix(self, matrix: Tensor) -> Tensor:
        """(Qᵀ⊗I)·matrix·(Q⊗I)."""
        return self.of(self.of(matrix).T).T

    def back_of_matrix(self, matrix: Tensor) -> Tensor:
        """(Q⊗I)·matrix·(Qᵀ⊗I)."""
        return self.back(self.back(matrix).T).T


class OfContrasts:
    """A likelihood of φ, as one of θ: of the rest only the prior tells.

    Args:
        inner: the likelihood of φ.
        contrasts: which φ are of θ.
    """

    def __init__(
        self,
        inner: AnySurrogate | UncertainLevel | InShape | OfSome,
        contrasts: Contrasts | Turn,
    ) -> None:
        self._inner, self._contrasts = inner, contrasts
        self.centre = contrasts.back(inner.centre)

    def log_likelihood(self, theta: Tensor) -> Tensor:
        """log p(transcript | θ) up to a constant, ``[...]`` for θ ``[..., K·d]``;
        differentiable.
        """
        return self._inner.log_likelihood(self._contrasts.of(theta))

    def precision(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """H and Hθ̂ of the Gaussian likelihood that is tangent to this one at ``theta``."""
        precision, product = self._inner.precision(self._contrasts.of(theta))
        return self._contrasts.back_of_matrix(precision), self._contrasts.back(product)

    def agreement(self, mode: Tensor, precision: Tensor) -> float:
        """See :meth:`~torch_dpbayes.noise_aware.surrogate.AnySurrogate.agreement`."""
        return self._inner.agreement(self._contrasts.of(mode), self._contrasts.of_matrix(precision))
