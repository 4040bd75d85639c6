"""Private sums of the three kinds of models: generalised linear ones, multinomial logistic
regressions, and Pyro models with one data plate.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from ..mcmc.density import RecordDensity
from ..ops.glm import GLM
from ..ops.softmax import Softmax
from .groups import Groups
from .priors import GaussianPrior
from .response import LinearResponse, NormalFeatureResponse, Response
from .scores import Bernoulli, Gaussian, Poisson, Target, scores, slopes, variances
from .turned import Turn

_LARGEST_RESIDUAL = 1e30  # of a record whose features are zero: its gradient is zero anyway
_ROUNDING = 1e-6  # clipped gradients are shortened by this share, which covers float32


class GLMSums:
    """Sums over the records of a generalised linear model.

    Args:
        model: the family, the prior and the bound on the features.
        features: ``[n, d]``.
        targets: ``[n]``.
        max_grad_norm: clip bound of a record's gradient. None: the largest that a logistic
            regression's can be.

    Raises:
        ValueError: gradients are unbounded and there is no clip bound, or the prior is improper.
    """

    curvature_is_of_gradients = False

    def __init__(
        self, model: GLM, features: Tensor, targets: Tensor, max_grad_norm: float | None
    ) -> None:
        features, targets = model.prepare((features, targets))
        if (
            not math.isfinite(float(model.prior_precision.min()))
            or float(model.prior_precision.min()) <= 0
        ):
            raise ValueError(
                "the prior is improper (prior_std is infinite): where noise hides the data the"
                " posterior is the prior. State prior_std."
            )
        if max_grad_norm is None:
            if model.family != "bernoulli":
                raise ValueError(
                    f"gradients of family={model.family!r} are unbounded: state max_grad_norm, a"
                    " public number that few records' gradients exceed."
                )
            max_grad_norm = model.max_feature_norm
        self.max_feature_norm: float | None = model.max_feature_norm
        self.gram_bound = model.max_feature_norm**2
        self._model, self._records = model, model.records(features, targets)
        self._target = target_of(model, self._records.weight)
        self._y = self._records.weight * self._records.y.to(torch.float64)
        self._length, self._weights = model.max_feature_norm, torch.ones_like(self._y)
        self._clip_at(max_grad_norm)
        self.dimension = features.shape[1]
        self.num_records = len(features)
        precision = model.prior_precision.expand(self.dimension).clone()
        self.prior = GaussianPrior(torch.zeros(self.dimension, dtype=torch.float64), precision)

    def _clip_at(self, max_grad_norm: float) -> None:
        self._max_grad_norm = max_grad_norm
        self.gradient_bound = self._model.lipschitz(max_grad_norm)
        self._largest_factor = _largest_factor(self._model, max_grad_norm)
        self.curvature_bound = self._largest_factor * self.gram_bound
        norms = torch.linalg.vector_norm(self._records.x, dim=1, dtype=torch.float64)
        self._bounds = (max_grad_norm * (1 - _ROUNDING) / norms).clamp_max(_LARGEST_RESIDUAL)

    def clipped_at(self, max_grad_norm: float) -> GLMSums:
        """The sums with another clip bound."""
        found = copy.copy(self)
        GLMSums._clip_at(found, max_grad_norm)
        return found

    def is_valid(self, theta: Tensor) -> bool:
        """Everywhere."""
        return bool(theta.isfinite().all())

    def gradient_sum(self, theta: Tensor) -> Tensor:
        """Σ ψ_i(θ) x_i, clipped gradients of mean zero at the truth. Private data."""
        found = scores(self._target, self._predictors(theta), self._y, self._bounds)
        return self._records.weighted_sum(self._weights * found)

    def curvature_sum(self, theta: Tensor) -> Tensor:
        """Σ J_i(θ) x_i x_iᵀ, their expected slope. Private data."""
        factors = slopes(self._target, self._predictors(theta), self._bounds)
        return self._records.outer_sum(self._weights * factors.clamp(max=self._largest_factor))

    def curvature_diagonal(self, theta: Tensor) -> Tensor:
        """Σ J_i(θ) x_i∘x_i, which is as short as the whole: ‖x∘x‖ ≤ ‖x‖². Private data."""
        factors = slopes(self._target, self._predictors(theta), self._bounds)
        return self._records.square_sum(factors.clamp(max=self._largest_factor))

    def clipped_count(self, theta: Tensor) -> int:
        """None: clipped or not, scores have mean zero at the truth."""
        return 0

    def gram_sum(self) -> Tensor:
        """Σ x xᵀ. Private data."""
        return self._records.outer_sum(self._weights)

    def slope(self, length: float) -> float:
        """J at u = 0 of features that are ``length``·R long."""
        bound = torch.tensor(self._max_grad_norm / (length * self._length), dtype=torch.float64)
        return float(slopes(self._target, torch.zeros((), dtype=torch.float64), bound))

    def length_counts(self, shape: Tensor, edges: Sequence[float]) -> Tensor:
        """Of ‖Ax‖²: each record is in one bin. Private data."""
        squares = self._in_shape(shape).square().sum(1)
        bins = torch.bucketize(squares, torch.tensor(edges).to(squares))
        return torch.bincount(bins, minlength=len(edges) + 1).to(torch.float64)

    def in_shape(self, shape: Tensor) -> GLMSums:
        """The sums for the features Ax, whose rows have norm n_i, with weights w_i = min(1, 1/n_i²)
        and residuals clipped to C/(R w_i n_i): no record adds more than C/R to a gradient, than 1
        to the Gram matrix, or than a bounded second derivative to the Hessian. Parameters are
        A⁻ᵀθ.
        """
        found = copy.copy(self)
        GLMSums._stretch(found, shape)
        return found

    def _stretch(self, shape: Tensor) -> None:
        features = self._in_shape(shape)
        norms = torch.linalg.vector_norm(features, dim=1)
        self._records = dataclasses.replace(self._records, x=features)
        self._weights = (1 - _ROUNDING) / norms.square().clamp_min(1.0)
        self.gradient_bound /= self._length
        self._max_grad_norm /= self._length
        self.curvature_bound = self._largest_factor
        self._length, self.gram_bound = 1.0, 1.0
        bounds = self._max_grad_norm * (1 - _ROUNDING) / (self._weights * norms)
        self._bounds = bounds.clamp_max(_LARGEST_RESIDUAL)
        self.prior = GaussianPrior(
            torch.zeros_like(self.prior.mean), shape.square() @ self.prior.precision
        )

    def _in_shape(self, shape: Tensor) -> Tensor:
        return self._records.x.to(torch.float64) @ shape.T.to(self._records.x.device)

    def response(self, gram: Tensor, num_data: int) -> Response:
        """How gradients change with θ if the Gram matrix is ``gram``."""
        length = min(math.sqrt(float(gram.trace()) / num_data), self._length)
        bound = torch.tensor(self._max_grad_norm / length, dtype=torch.float64)
        if isinstance(self._target, Gaussian):
            zero = torch.zeros((), dtype=torch.float64)
            slope = float(slopes(self._target, zero, bound))
            variability = float(variances(self._target, zero, bound)) / slope
            return LinearResponse(slope * gram, variability)
        return NormalFeatureResponse(self._target, bound, gram, num_data)

    def _predictors(self, theta: Tensor) -> Tensor:
        return self._records.predictors(theta.to(self._records.x.device))

    @property
    def is_quadratic(self) -> bool:
        """Whether the Hessian is a multiple of the Gram matrix."""
        return self._model.family == "gaussian"


def target_of(model: GLM, weight: float) -> Target:
    """The distribution of a record's target, times ``weight``."""
    if model.family == "gaussian":
        return Gaussian(weight)
    return Bernoulli() if model.max_count is None else Poisson(model.max_count)


def _largest_factor(model: GLM, max_grad_norm: float) -> float:
    """Bound on the second derivative of a loss. A Poisson mean beyond the square of the clipped
    slope, which is several standard deviations of the count, is cut: few records get there if few
    gradients are clipped.
    """
    if model.max_count is None:
        return model.record_smoothness() / model.max_feature_norm**2
    return min(model.max_count, (max_grad_norm / model.max_feature_norm) ** 2)


class SoftmaxSums:
    """Sums over the records of a multinomial logistic regression: gradients need no clipping, and
    the curvature is the Hessian itself.

    A vector that is added to the weights of all classes changes no probability, so that parameters
    are the contrasts of the classes (:mod:`~torch_dpbayes.noise_aware.turned`).

    Args:
        model: the number of classes, the prior and the bound on the features.
        features: ``[n, d]``.
        labels: ``[n]``.
    """

    curvature_is_of_gradients = False
    groups: Groups | None = None

    def __init__(self, model: Softmax, features: Tensor, labels: Tensor) -> None:
        self._records = model.records(*model.prepare((features, labels)))
        self.max_feature_norm: float | None = model.max_feature_norm
        self.gradient_bound, self.curvature_bound = model.lipschitz, model.record_smoothness
        size = model.num_classes * features.shape[1]
        places = torch.arange(size).reshape(model.num_classes, -1)
        self.prior_of_weights = _standard(size, model.prior_std)
        self.turn = Turn([places], torch.ones(size, dtype=torch.bool), self.prior_of_weights.mean)
        self.dimension = size - features.shape[1]
        self.site = torch.zeros(self.dimension, dtype=torch.int64)
        self.num_records = len(features)
        self.prior = _standard(self.dimension, model.prior_std)

    def is_valid(self, theta: Tensor) -> bool:
        """Everywhere."""
        return bool(theta.isfinite().all())

    def gradient_sum(self, theta: Tensor) -> Tensor:
        """Σ ∇ℓ_i(φ). Private data."""
        found = self._records.gradient_sum(self.turn.whole(theta).to(self._records.x.device))
        return self.turn.some(found.cpu())

    def curvature_sum(self, theta: Tensor) -> Tensor:
        """Σ ∇²ℓ_i(φ). Private data."""
        found = self._records.hessian_sum(self.turn.whole(theta).to(self._records.x.device))
        return self.turn.some_of_matrix(found.cpu())

    def clipped_count(self, theta: Tensor) -> int:
        """None is."""
        return 0


def _standard(size: int, std: float) -> GaussianPrior:
    precision = torch.full((size,), std**-2, dtype=torch.float64)
    return GaussianPrior(torch.zeros_like(precision), precision)


class DensitySums:
    """Sums over the records of a Pyro model: Σ c cᵀ of the clipped gradients stands for the
    curvature, to which it is equal in expectation if the model is right and few gradients are
    clipped.

    Args:
        density: the model on its data.
        max_grad_norm: clip bound of a record's gradient in unconstrained space.
        turn: which coordinates of the latents sums are over. None: the latents themselves.

    Raises:
        ValueError: records are weighted, or depend on a latent by steps.
    """

    curvature_is_of_gradients = True
    max_feature_norm: float | None = None

    def __init__(
        self, density: RecordDensity, max_grad_norm: float, turn: Turn | None = None
    ) -> None:
        require_unweighted(density)
        _require_slopes(density)
        self._density, self._turn = density, turn
        told = torch.ones(density.prior.dimension, dtype=torch.bool) if turn is None else turn.told
        self.dimension = int(told.sum())
        self.site = density.sites[told].unique(return_inverse=True)[1]
        self.num_records = density.num_records
        self.gradient_bound = float(max_grad_norm)
        self.curvature_bound = self.gradient_bound**2
        self._clip = (1 - _ROUNDING) * self.gradient_bound

    @cached_property
    def groups(self) -> Groups | None:
        """Parameters of which every record reads one group's. The diagonal form does not ask: it
        has too many parameters for that.
        """
        places = self._density.groups()
        if places is not None and self._turn is not None:
            places = self._turn.told_of_groups(places)
        return None if places is None else Groups.of(places, self.dimension)

    def gradient_sum(self, theta: Tensor) -> Tensor:
        """Σ clip(−∇ log p(x_i | θ)). Private data."""
        found = -self._density.clipped_gradient_sum(self._own(theta), self._clip)
        return found if self._turn is None else self._turn.some(found)

    def curvature_sum(self, theta: Tensor) -> Tensor:
        """Σ c cᵀ. Private data."""
        found = self._density.clipped_outer_sum(self._own(theta), self._clip)
        return found if self._turn is None else self._turn.some_of_matrix(found)

    def curvature_diagonal(self, theta: Tensor) -> Tensor:
        """Σ c∘c. Private data."""
        own, turn = self._own(theta), self._turn
        if turn is None:
            return self._density.clipped_square_sum(own, self._clip)
        return self._density.clipped_square_sum(own, self._clip, turn.of)[turn.told]

    def clipped_count(self, theta: Tensor) -> int:
        """How many gradients are longer than the stated bound, but for rounding: those that end at
        the bound itself lose nothing to speak of. A record counts as 0 or 1 at any threshold.
        Private data.
        """
        threshold = (1 + _ROUNDING) * self.gradient_bound
        return self._density.clipped_count(self._own(theta), threshold)

    def is_valid(self, theta: Tensor) -> bool:
        """Whether gradients can be computed at θ, whatever the records are."""
        return self._density.has_gradients(self._own(theta))

    def _own(self, theta: Tensor) -> Tensor:
        if self._turn is not None:
            theta = self._turn.whole(theta)
        return theta.to(self._density.prior.device, self._density.prior.dtype)


def require_unweighted(density: RecordDensity) -> None:
    """Refuse records with a weight w: the curvature goes with w, and Σ c cᵀ with w²."""
    for name in density.made_up.weighted_sites():
        raise ValueError(
            f"poutine.scale weights the records' site {name!r}, which would make widths wrong:"
            " repeat a record as often as it counts, put the weight into the distribution, or use"
            " poutine.mask to leave records out."
        )


def _require_slopes(density: RecordDensity) -> None:
    """Refuse latents whose gradients say nothing, though records do."""
    for name in density.latents_without_slopes():
        raise ValueError(
            f"records depend on latent {name!r} by steps: its gradients are all 0, and say nothing"
            " of it. Leave out round, detach and comparisons with it, or write a smooth function"
            " such as a sigmoid."
        )
