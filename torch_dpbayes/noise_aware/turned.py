r"""Latents of which records tell only differences, in coordinates that set apart what they have in
common.

A number that is added to the weights of all classes of a softmax changes no probability. Gradient
and curvature are exactly 0 that way: what would be released of them is noise, and a posterior that
takes it for curvature is too narrow. The diagonal of a curvature, which takes weights of the
classes for independent, is also far too large for what they have in common. So a run is one of φ =
Qθ, with the reflection

.. math:: Q = I - \frac{2}{v^\top v}\, v v^\top, \qquad v = \mathbf 1/\sqrt K - e_1

over each K entries whose gradients add up to 0: the first coordinate is √K times their mean, of
which records tell nothing, and the others are contrasts, in which the curvature of a softmax of
about equal probabilities is diagonal. Q is orthogonal: a record's gradient is as long in φ as in θ.

Derived in this project.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .diagonal import DiagonalSurrogate
from .modes import Likelihood
from .priors import GaussianPrior


class Turn:
    """φ of θ, and back: a reflection is its own inverse.

    Args:
        places: of each K entries in θ whose gradients add up to 0, ``[K, m]``.
        read: which coordinates of θ records read, ``[D]``.
        mean: the prior's, ``[D]``: where φ is that records do not tell.
    """

    def __init__(self, places: Sequence[Tensor], read: Tensor, mean: Tensor) -> None:
        self.places = list(places)
        self.told = read.clone()
        """Which d coordinates of φ records tell, ``[D]``."""
        for rows in self.places:
            self.told[rows[0]] = False
        self._place = self.of(mean)

    def note(self) -> str:
        """For a statement."""
        return (
            f"  told        records tell {int(self.told.sum())} of {len(self.told)} unconstrained"
            " coordinates; the others follow from them by the prior"
        )

    def of(self, theta: Tensor) -> Tensor:
        """φ for θ, or θ for φ, ``[..., D]``; differentiable."""
        turned = theta.clone()
        for rows in self.places:
            v = _mirror(len(rows), theta)
            entries = theta[..., rows]
            turned[..., rows] = entries - v[:, None] * (v @ entries)[..., None, :]
        return turned

    def some(self, theta: Tensor) -> Tensor:
        """What records tell of θ, ``[..., d]``."""
        return self.of(theta)[..., self.told]

    def whole(self, phi: Tensor) -> Tensor:
        """The θ of these d coordinates that has the prior's mean in the others."""
        whole = self._place.to(phi).expand(*phi.shape[:-1], -1).clone()
        whole[..., self.told] = phi
        return self.of(whole)

    def of_matrix(self, matrix: Tensor) -> Tensor:
        """Q·matrix·Q for a symmetric matrix."""
        return self.of(self.of(matrix).T)

    def some_of_matrix(self, matrix: Tensor) -> Tensor:
        """Of a symmetric matrix, ``[d, d]``."""
        return self.some(self.some(matrix).T)

    def whole_vector(self, phi: Tensor) -> Tensor:
        """Q·(φ, 0)."""
        whole = phi.new_zeros(*phi.shape[:-1], len(self.told))
        whole[..., self.told] = phi
        return self.of(whole)

    def whole_matrix(self, matrix: Tensor) -> Tensor:
        """Q·matrix·Q, with zeros in the other coordinates."""
        return self.whole_vector(self.whole_vector(matrix).T)

    def of_variances(self, variances: Tensor) -> Tensor:
        """The diagonal of Q·diag(variances)·Q."""
        turned = variances.clone()
        for rows in self.places:
            squares = _mirror(len(rows), variances).square()[:, None]
            entries = variances[rows]
            turned[rows] = entries * (1 - 2 * squares) + squares * (squares * entries).sum(0)
        return turned

    def told_of_groups(self, places: Tensor) -> Tensor:
        """Of each group's coordinates those that records tell, by their number among these,
        ``[groups, m']``: none where φ mixes groups, or where they have not equally many.

        Args:
            places: of groups' entries in θ, ``[groups, m]``, of which no record reads two groups'.
        """
        group = torch.full_like(self.told, -1, dtype=torch.int64)
        group[places] = torch.arange(len(places))[:, None]
        for rows in self.places:
            mixed = (group[rows] != group[rows[0]]).any(0)
            group[rows[:, mixed]] = -1
        told = group[self.told]
        own = [(told == g).nonzero().flatten() for g in range(len(places))]
        if any(len(some) != len(own[0]) for some in own):
            return places.new_empty(0, 0)
        return torch.stack(own)

    def of_prior(self, prior: GaussianPrior) -> GaussianPrior:
        """The prior of φ; without correlations, as the one of θ, unless that has them."""
        mean = self.of(prior.mean)
        if not prior.is_diagonal:
            covariance = self.of_matrix(prior.covariance)
            return GaussianPrior(mean, 1 / covariance.diagonal(), covariance)
        return GaussianPrior(mean, 1 / self.of_variances(1 / prior.precision))

    def of_alike(self, prior: GaussianPrior) -> GaussianPrior:
        """The same, without correlations, where the K entries have one prior, of which that of θ is
        an estimate: then contrasts are around 0 and equally wide.
        """
        turned = self.of_prior(prior)
        mean, variance = turned.mean, 1 / turned.precision
        for rows in self.places:
            mean[rows[1:]] = 0.0
            variance[rows[1:]] = variance[rows[1:]].mean(0)
        return GaussianPrior(mean, 1 / variance)


def _mirror(count: int, like: Tensor) -> Tensor:
    """√(2/vᵀv)·v."""
    v = torch.full((count,), count**-0.5, dtype=like.dtype, device=like.device)
    v[0] -= 1
    return v / math.sqrt(1 - count**-0.5)


class OfTold:
    """A likelihood of the coordinates of φ that records tell, as one of θ: of the others only the
    prior tells.

    Args:
        inner: the likelihood of these, ``[d]``.
        turn: which.
    """

    def __init__(self, inner: Likelihood, turn: Turn) -> None:
        self._inner, self._turn = inner, turn
        self.centre = turn.whole(inner.centre)

    def log_likelihood(self, theta: Tensor) -> Tensor:
        """log p(transcript | θ) up to a constant, ``[...]`` for θ ``[..., D]``; differentiable."""
        return self._inner.log_likelihood(self._turn.some(theta))

    def precision(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """H and Hθ̂ of the Gaussian likelihood that is tangent to this one at ``theta``."""
        precision, product = self._inner.precision(self._turn.some(theta))
        return self._turn.whole_matrix(precision), self._turn.whole_vector(product)


class TurnedMixture:
    """The posterior of θ, where φ's coordinates are independent and records tell some of them.

    Args:
        inner: of those that they tell.
        prior: of φ.
        turn: which φ.
    """

    def __init__(self, inner: DiagonalSurrogate, prior: GaussianPrior, turn: Turn) -> None:
        self._inner, self._turn = inner, turn
        self._told = turn.told
        # without correlations, as all of the diagonal form
        self._rest = GaussianPrior(prior.mean[~turn.told], prior.precision[~turn.told])
        self.mean = turn.of(self._with_rest(inner.mean, self._rest.mean))
        variances = self._with_rest(inner.variance, 1 / self._rest.precision)
        self.variance = turn.of_variances(variances)

    def log_density(self, theta: Tensor) -> Tensor:
        """log p(θ | transcript) up to a constant, ``[...]`` for θ ``[..., D]``."""
        phi = self._turn.of(theta)
        rest = self._rest.log_density(phi[..., ~self._told])
        return self._inner.log_density(phi[..., self._told]) + rest

    def draws(self, count: int) -> Tensor:
        """``[count, D]``."""
        normal = torch.randn(count, len(self._rest.mean), dtype=torch.float64)
        rest = self._rest.mean + normal * self._rest.precision.rsqrt()
        return self._turn.of(self._with_rest(self._inner.draws(count), rest))

    def agreement(self) -> float:
        """Tail probability of the way from the last point to the mean."""
        return self._inner.agreement()

    def _with_rest(self, some: Tensor, rest: Tensor) -> Tensor:
        phi = some.new_zeros(*some.shape[:-1], len(self._told))
        phi[..., self._told], phi[..., ~self._told] = some, rest
        return phi
