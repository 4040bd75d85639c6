r"""Clipped scores (gradients of the log-likelihood) of a linear layer, for labels, and for numbers
with noise of variance 1.

A target t ``[K]`` has the mean μ given the outputs Wx: p = softmax(Wx) for a label t = e_y, and Wx
for numbers. Release j, at the weights W_j with clip bound C_j, scales scores by :math:`s_j =
\min(1/C_j, 1/(\|t - \mu_j\| \|Ax\|))`, where A whitens the features. The law of its sum needs
:math:`q_j = E[s_j (t - \mu_j) | x, W]`. For a label this is

.. math:: q_j = p \circ s_j - \langle p, s_j \rangle p_j,

and for numbers, with Δ = (W − W_j)x and X noncentral χ²,

.. math:: q_j = \frac{\Delta}{C_j}\, h\Big(\|\Delta\|, \frac{C_j}{\|Ax\|}\Big), \qquad
          h(d, \tau) = E \min\big(1, \tau/\sqrt X\big), \quad X \sim \chi^2_{K+2}(d^2),

because E[v f(‖v‖²)] = Δ E f(X) for v ~ N(Δ, I) (Bock 1975, "Minimax estimators of the mean of a
multivariate normal distribution"). X is (z + d)² + χ² with z normal and K + 1 degrees of freedom.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from scipy.special import roots_legendre
from scipy.stats import chi2
from torch import Tensor
from torch.nn.functional import one_hot, pad

from ..errors import ArgumentError, ArgumentTypeError

_NODES = 40  # of each integral
# the table of h: τ and d are in units of √K, on even grids of log τ and log(1 + d)
_LEAST, _MOST, _FARTHEST = 0.02, 40.0, 30.0
_BOUNDS, _DISTANCES = 384, 128
_LARGEST = 1e100  # largest private target: its square is finite


class LabelScores:
    """Scores of labels with a softmax, for M feature vectors x with norms ‖Ax‖ ``[M]``. The last
    dimension is always M.

    Attributes:
        own: μ_j at the points of releases, ``[J, K, M]``.
    """

    def __init__(self, lengths: Tensor, num_outputs: int) -> None:
        self.lengths, self._size = lengths, num_outputs
        self._normal = torch.randn(num_outputs, len(lengths)).to(lengths)
        self._bounds = lengths.new_empty(0, 1)
        self.own = lengths.new_empty(0, num_outputs, len(lengths))
        self._left = list[Tensor]()

    def add(self, means: Tensor, bound: float) -> None:
        """Add a release with μ_j ``[K, M]`` and C_j."""
        self.own = torch.cat([self.own, means[None]])
        self._bounds = torch.cat([self._bounds, self._bounds.new_full((1, 1), bound)])
        self._left.append(self._shortened(means, bound))
        self._kept = torch.stack(self._left)

    def clipped(self, targets: Tensor) -> Tensor:
        """s_j (t − μ_j) of targets ``[K, M]``, ``[J, K, M]``."""
        apart = targets - self.own
        norms = apart.norm(dim=1) * self.lengths
        return apart / torch.maximum(norms, self._bounds)[:, None]

    @staticmethod
    def checked(targets: Tensor, num_outputs: int) -> Tensor:
        """Private targets, on the CPU.

        Raises:
            ValueError, TypeError: their shape or type does not fit.
        """
        if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.dim() != 1:
            raise ArgumentTypeError("targets must be a tensor of integers, [n].")
        return targets.detach().cpu().long()

    @staticmethod
    def residuals(outputs: Tensor, targets: Tensor) -> Tensor:
        """t − μ ``[n, K]`` of private records; 0 for an invalid target."""
        classes = outputs.shape[1]
        is_class = (targets >= 0) & (targets < classes)
        apart = one_hot(torch.where(is_class, targets, 0), classes) - outputs.softmax(1)
        return apart * is_class[:, None]

    def expected(self, outputs: Tensor) -> Tensor:
        """μ ``[..., K, M]``."""
        return outputs.softmax(-2)

    def drawn(self, means: Tensor) -> Tensor:
        """Draws of targets ``[K, M]``, with the same random numbers at every point."""
        labels = (means.cumsum(0) < torch.special.ndtr(self._normal[0])).sum(0)
        return one_hot(labels.clamp_max(self._size - 1), self._size).T.float()

    def basis(self, means: Tensor) -> Tensor:
        """Eigenvectors of E Cov(t | x) = E[diag(p) − ppᵀ], over ``[C, K, M]``."""
        curvature = torch.diag(means.mean((0, 2))) - (means @ means.mT).mean(0) / means.shape[2]
        return torch.linalg.eigh(curvature)[1]

    def means(self, means: Tensor) -> Tensor:
        """q_j ``[C, J, K, M]`` if targets have the means ``[C, K, M]``."""
        kept = means[:, None] * self._kept
        return kept - kept.sum(2, keepdim=True) * self.own

    def slopes(self, means: Tensor, inner: Tensor) -> Tensor:
        """The gradient ``[C, K, M]``, by the outputs, of the product of q with ``inner``."""
        inner = (self._kept * (inner - (self.own * inner).sum(2, keepdim=True))).sum(1)
        return means * (inner - (means * inner).sum(1, keepdim=True))

    def _shortened(self, means: Tensor, bound: float) -> Tensor:
        """s_j of every class, ``[K, M]``."""
        norms = (means.square().sum(0) - 2 * means + 1).clamp_min(0.0).sqrt() * self.lengths
        return 1 / norms.clamp_min(bound)


class NumberScores(LabelScores):
    """Scores of numbers with independent noise of variance 1."""

    @staticmethod
    def checked(targets: Tensor, num_outputs: int) -> Tensor:
        shape = [] if num_outputs == 1 else [num_outputs]
        if not isinstance(targets, Tensor) or targets.is_complex():
            raise ArgumentTypeError("targets must be a tensor of numbers.")
        if list(targets.shape[1:]) != shape or not targets.dim():
            shown = ", ".join(["n", *map(str, shape)])
            raise ArgumentError(f"targets must have the shape [{shown}].")
        return targets.detach().cpu().double().reshape(len(targets), num_outputs)

    @staticmethod
    def residuals(outputs: Tensor, targets: Tensor) -> Tensor:
        is_number = targets.isfinite().all(1, keepdim=True)
        return torch.where(is_number, targets.clamp(-_LARGEST, _LARGEST) - outputs, 0.0)

    def expected(self, outputs: Tensor) -> Tensor:
        return outputs

    def drawn(self, means: Tensor) -> Tensor:
        return means + self._normal

    def basis(self, means: Tensor) -> Tensor:
        return torch.eye(self._size, dtype=means.dtype)

    def means(self, means: Tensor) -> Tensor:
        apart, factor, _ = self._factors(means)
        return apart * factor

    def slopes(self, means: Tensor, inner: Tensor) -> Tensor:
        apart, factor, curved = self._factors(means)
        return (factor * inner + curved * (apart * inner).sum(2, keepdim=True) * apart).sum(1)

    def _shortened(self, means: Tensor, bound: float) -> Tensor:
        """h/C_j by distances and features, ``[L, M]``."""
        unit = bound / self.lengths.double().clamp_min(1e-300) / math.sqrt(self._size)
        place = (unit.clamp(_LEAST, _MOST) / _LEAST).log() / math.log(_MOST / _LEAST)
        place = (place * (_BOUNDS - 1))[:, None]
        cell, table = place[:, 0].long().clamp_max(_BOUNDS - 2), _table(self._size)
        found = torch.lerp(table[cell], table[cell + 1], place - cell[:, None])
        # below the least τ every score is clipped
        found *= (unit / _LEAST).clamp_max(1.0)[:, None] / bound
        return found.T.contiguous().to(self.lengths)

    def _factors(self, means: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Δ, h/C and ∂(h/C)/∂d / d. Beyond the distances of the table h decreases as 1/d."""
        apart, root = means[:, None] - self.own, math.sqrt(self._size)
        distance = apart.norm(dim=2, keepdim=True).clamp_min(1e-9)
        step = math.log1p(_FARTHEST) / (_DISTANCES - 1)
        place = (distance / root).clamp_max(_FARTHEST).log1p() / step
        cell = place.long().clamp_max(_DISTANCES - 2)
        table = self._kept.expand(len(means), *self._kept.shape)
        low = table.gather(2, cell)
        more = table.gather(2, cell + 1) - low
        beyond = (_FARTHEST * root / distance).clamp_max(1.0)
        factor = (low + more * (place - cell)) * beyond
        slope = torch.where(beyond < 1, -factor / distance, more / step / (root + distance))
        return apart, factor, slope / distance


@lru_cache(maxsize=4)
def _table(size: int) -> Tensor:
    """h by bounds and distances, ``[_BOUNDS, _DISTANCES]``."""
    points, weights = (torch.from_numpy(found) for found in roots_legendre(_NODES))
    at, root = (points + 1) / 2, math.sqrt(size)
    normal, rest = torch.special.ndtri(at), torch.from_numpy(chi2.ppf(at.numpy(), size + 1))
    both = (weights[:, None] * weights).flatten() / 4
    bounds = torch.logspace(math.log10(_LEAST), math.log10(_MOST), _BOUNDS, dtype=torch.float64)
    distances = torch.linspace(0.0, math.log1p(_FARTHEST), _DISTANCES, dtype=torch.float64).expm1()
    columns = []
    for distance in (root * distances).tolist():
        inverse, order = ((normal + distance).square()[:, None] + rest).rsqrt().flatten().sort()
        weight = both[order]
        # E min(1, τ/√X): numbers up to 1/τ are kept, the others count as 1
        below = torch.searchsorted(inverse, 1 / (root * bounds))
        kept = pad((weight * inverse).cumsum(0), (1, 0))[below]
        columns.append(root * bounds * kept + 1 - pad(weight.cumsum(0), (1, 0))[below])
    return torch.stack(columns, 1)
