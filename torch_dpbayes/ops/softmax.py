"""Multinomial logistic regression, whose gradients are bounded without clipping."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ArgumentError, CertificateError
from .linear_model import LinearModel, chunked_predictors, chunks_in_float64, require_representable
from .models import Constants, Data


class Softmax(LinearModel):
    r"""Multinomial logistic regression: K linear predictors :math:`u_i = W x_i` per record.

    .. math::
        \ell_i(W) = \log \sum_k e^{u_{ik}} - u_{i y_i}, \qquad
        \nabla \ell_i = (p_i - e_{y_i}) x_i^\top, \qquad
        \nabla^2 \ell_i = (\mathrm{diag}(p_i) - p_i p_i^\top) \otimes x_i x_i^\top

    Features are clipped as in a :class:`~torch_dpbayes.ops.GLM`. A row with a value that is not
    finite, or with an invalid label, contributes exactly zero to any gradient. No record can cause
    an error: check labels before.

    The losses are convex. ‖∇ℓ_i‖ ≤ √2·R_x, because ‖p − e_y‖² ≤ 2(1 − p_y)². The gradient's
    Lipschitz constant is at most ½R_x². Gradients are never clipped, because clipped gradients are
    not gradients of a convex function.

    Args:
        num_classes: K, at least 2. For two classes a :class:`~torch_dpbayes.ops.GLM` needs half the
            weights.
        prior_std: standard deviation of the N(0, prior_std²) prior of each weight.
        max_feature_norm: R_x, the largest Euclidean norm of a row of features.

    Raises:
        ValueError: an argument is out of range.

    **Privacy.** Nothing is released. All constants are data-free.
    """

    def __init__(
        self, num_classes: int, prior_std: float = 1.0, max_feature_norm: float = 1.0
    ) -> None:
        if isinstance(num_classes, bool) or not isinstance(num_classes, int) or num_classes < 2:
            raise ArgumentError(f"num_classes must be an integer, at least 2, got {num_classes!r}.")
        require_representable("prior_std", prior_std)
        super().__init__(prior_std, max_feature_norm)
        self._num_classes = num_classes

    def __repr__(self) -> str:
        return (
            f"Softmax({self._num_classes}, prior_std={self.prior_std:g},"
            f" max_feature_norm={self.max_feature_norm:g})"
        )

    @property
    def num_classes(self) -> int:
        """K, the number of classes."""
        return self._num_classes

    @property
    def prior_std(self) -> float:
        """The prior standard deviation of each weight."""
        return float(self._prior_std)

    def derived_constants(self, max_grad_norm: float = 1.0) -> Constants:
        """The constants above: √2·R_x, and ½R_x², a bound on the eigenvalues of a record's Hessian.

        Raises:
            ValueError: ``max_grad_norm`` is below √2·R_x.
        """
        lipschitz = math.sqrt(2) * self.max_feature_norm
        if max_grad_norm < lipschitz:
            raise CertificateError(
                f"gradients of {self!r} have norms up to {lipschitz:g} and are not clipped: pass"
                f" max_grad_norm={math.ceil(lipschitz * 100) / 100:g} to the certificate."
            )
        precision = float(self.prior_precision)
        return Constants(lipschitz, precision, precision, self.max_feature_norm**2 / 2)

    def prepare(self, data: Data) -> Data:
        features, labels = super().prepare(data)
        if labels.dtype == torch.bool or labels.is_floating_point():
            raise ArgumentError(
                f"labels must be integers from 0 to {self._num_classes - 1}, got {labels.dtype}:"
                " write labels.long()."
            )
        return features, labels

    def records(
        self, features: Tensor, targets: Tensor, max_grad_norm: float = math.inf
    ) -> SoftmaxRecords:
        x = self.features(features)
        # a comparison in a narrow integer type would overflow at the number of classes
        y = targets.detach().to(x.device).long()
        is_class = (y >= 0) & (y < self._num_classes)
        x.masked_fill_(~is_class[:, None], 0.0)
        return SoftmaxRecords(x, torch.where(is_class, y, 0), self._num_classes)

    def _shape(self, num_features: int) -> tuple[int, ...]:
        return (self._num_classes, num_features)

    def _mean(self, predictors: Tensor) -> Tensor:
        return torch.softmax(predictors, -1)


@dataclass(eq=False)
class SoftmaxRecords:
    """Bounded records of a Softmax. The norm of a record's gradient is at most √2·R_x."""

    x: Tensor  # [n, d]
    y: Tensor  # [n], classes
    num_classes: int

    def gradient_sum(self, weights: Tensor) -> Tensor:
        """Σ (p − e_y) xᵀ, ``[K·d]`` in float64."""
        matrix = weights.reshape(self.num_classes, -1)
        total = torch.zeros_like(matrix, dtype=torch.float64)
        for x, y in chunks_in_float64(self.x, self.y):
            slopes = torch.softmax(chunked_predictors(x, matrix.T), -1)
            slopes[torch.arange(len(y), device=y.device), y.long()] -= 1
            total += slopes.T @ x
        return total.reshape(-1)

    def losses(self, weights: Tensor) -> Tensor:
        """ℓ_i, ``[n]`` in float64, differentiable."""
        u = chunked_predictors(self.x, weights.reshape(self.num_classes, -1).T)
        return torch.nn.functional.cross_entropy(u, self.y, reduction="none")

    def log_likelihoods(self, weights: Tensor) -> Tensor:
        return -self.losses(weights)
