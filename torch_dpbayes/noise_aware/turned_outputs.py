r"""A module's parameters in coordinates in which its loss does not couple a record's outputs.

The outputs of a softmax depend on each other: what one class has, the others lack, and weights that
grow together change nothing. A diagonal of the curvature takes them for independent, and is far too
large for what they have in common; of the whole, what is released of the common part is noise. In
Qᵀz of the outputs z = Wh + b, with eigenvectors Q of the loss's Hessian where all outputs are about
alike, it is diagonal there: for a softmax one coordinate is the mean of all, of which records tell
nothing, and the others are contrasts. So the run is one of φ = (QᵀW, Qᵀb). Q is orthogonal: a
record's gradient is as long in φ as in θ, and an isotropic prior is the same.

Derived in this project.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..mcmc.density import Prior
from .coupled_outputs import Coupling
from .diagonal import DiagonalSurrogate


class Turn:
    """φ of θ: the rows of ``index`` are turned by Qᵀ, and what is not in them stays.

    Args:
        index: places in θ of each output's parameters, ``[K, m]``.
        basis: Q ``[K, K]``, orthogonal.
        told: which coordinates of φ records tell, ``[D]``.
    """

    def __init__(self, index: Tensor, basis: Tensor, told: Tensor) -> None:
        self._index, self.basis, self.told = index, basis, told

    def of(self, theta: Tensor) -> Tensor:
        """φ, ``[..., D]``."""
        return self._by(self.basis.T, theta)

    def back(self, phi: Tensor) -> Tensor:
        """θ, ``[..., D]``."""
        return self._by(self.basis, phi)

    def of_matrix(self, matrix: Tensor) -> Tensor:
        """Of a symmetric matrix in θ's coordinates, in those of φ."""
        return self.of(self.of(matrix).T)

    def back_of_matrix(self, matrix: Tensor) -> Tensor:
        """The reverse."""
        return self.back(self.back(matrix).T)

    def back_of_variances(self, variances: Tensor) -> Tensor:
        """Of θ's coordinates, where those of φ are independent."""
        return self._by(self.basis.square(), variances)

    def _by(self, matrix: Tensor, vector: Tensor) -> Tensor:
        turned = vector.clone()
        turned[..., self._index] = matrix.to(vector) @ vector[..., self._index]
        return turned


def turn_of_layer(prior: Prior, coupling: Coupling) -> Turn | None:
    """The turn of the outputs of that layer; None where there is none, or it is frozen.

    Args:
        prior: of the module's parameters.
        coupling: which layer, and Q.
    """
    places = prior.unflatten(torch.arange(prior.dimension))
    rows = [
        places[name].reshape(len(coupling.basis), -1)
        for name in (f"{coupling.layer}.weight".lstrip("."), f"{coupling.layer}.bias".lstrip("."))
        if coupling.layer is not None and name in places
    ]
    if not rows:
        return None
    index = torch.cat(rows, dim=1)
    told = torch.ones(prior.dimension, dtype=torch.bool)
    told[index[~coupling.told]] = False
    return Turn(index, coupling.basis, told)


class TurnedMixture:
    """The posterior of θ, where φ's coordinates are independent.

    Args:
        inner: of φ.
        turn: which φ.
    """

    def __init__(self, inner: DiagonalSurrogate, turn: Turn) -> None:
        self._inner, self._turn = inner, turn
        self.mean = turn.back(inner.mean)
        self.variance = turn.back_of_variances(inner.variance)

    def log_density(self, theta: Tensor) -> Tensor:
        """log p(θ | transcript), ``[...]`` for θ ``[..., D]``."""
        return self._inner.log_density(self._turn.of(theta))

    def draws(self, count: int) -> Tensor:
        """``[count, D]``."""
        return self._turn.back(self._inner.draws(count))

    def agreement(self) -> float:
        """Tail probability of the way from the last point to the mean."""
        return self._inner.agreement()
