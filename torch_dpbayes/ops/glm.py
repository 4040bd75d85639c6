"""Generalised linear models: the one family whose constants hold for every data set. The only
file of ``ops`` that reads a GLM's records.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ArgumentError, ArgumentTypeError
from .models import Constants

FAMILIES = ("bernoulli", "gaussian", "poisson")

# Clipped features are shortened by this share, which covers the rounding of float32 features and of
# their norms.
_ROUNDING = 1e-6
_LEAST_STD = 1e-50
# of a constant in the records' units, and 1 over the least: beyond, what bounds a record is lost in
# the rounding of float32
_LARGEST = 1e15
# of a Poisson rate; beyond, any clip has long been reached, and infinity would turn gradients into
# NaN
_LARGEST_EXPONENT = 600.0
_CHUNK = 8192  # rows; norms are computed in float64 without a float64 copy of all features


class GLM:
    r"""A generalised linear model with canonical link: one scalar linear predictor :math:`u_i =
    x_i^\top w` a record.

    .. math::
        \ell_i(w) = b(u_i) - y_i u_i \ \text{(times } 1/s^2 \text{ for "gaussian")}, \qquad
        r(w) = \tfrac12 \sum_j w_j^2 / \text{prior\_std}_j^2

    with b(u) = log(1 + e^u) for ``"bernoulli"``, u²/2 for ``"gaussian"``, e^u for ``"poisson"``.
    Rows are scaled down to norm ``max_feature_norm`` (R_x), all columns together: an intercept is a
    column of ones of the caller's and is clipped with the rest. Targets are clamped to [0, 1]
    (``"bernoulli"``) or [0, ``max_count``] (``"poisson"``). A row with a value that is not finite
    contributes exactly nothing. No record can make any of this raise: check labels before.

    The losses are convex and enter through a scalar, so that clipping a record's gradient to norm C
    (Huber's loss in u) keeps them convex, with gradient Lipschitz constant at most β R_x²: β = ¼
    (Bernoulli), 1/s² (Gaussian), ``max_count`` + C/R_x (Poisson: where the gradient is not clipped,
    e^u ≤ y + C/‖x‖). With more than one predictor a record this is false: clipped gradients are
    then no gradients of a convex function. For several classes see
    :class:`~torch_dpbayes.ops.Softmax`, whose gradients need no clipping.

    Args:
        family: ``"bernoulli"`` (targets 0 and 1), ``"gaussian"`` or ``"poisson"``.
        prior_std: standard deviation of the N(0, prior_std²) prior of each weight, a number or one
            for each column; ``math.inf`` for no prior.
        max_feature_norm: R_x, the largest Euclidean norm of a row of features.
        noise_std: s, the known standard deviation of a Gaussian target. Needed there, refused
            elsewhere.
        max_count: the largest count of a Poisson target. Needed there, refused elsewhere.

    Raises:
        ValueError: an argument is out of range, or the family is not one of the three.

    **Privacy.** Nothing is released. All constants are data-free.
    """

    def __init__(
        self,
        family: str = "bernoulli",
        prior_std: float | Sequence[float] | Tensor = 1.0,
        max_feature_norm: float = 1.0,
        *,
        noise_std: float | None = None,
        max_count: float | None = None,
    ) -> None:
        if family not in FAMILIES:
            raise ArgumentError(
                f"family must be one of {', '.join(map(repr, FAMILIES))}, got {family!r}: for"
                " several classes use dpb.ops.Softmax, for other models a Pyro model with asserted"
                " constants, or dpb.optim.DPSGLD."
            )
        if isinstance(max_feature_norm, Tensor | bool) or not 0 < max_feature_norm < math.inf:
            raise ArgumentError(
                f"max_feature_norm must be a positive finite number, got {max_feature_norm!r}."
            )
        require_representable("max_feature_norm", max_feature_norm)
        for name, value, owner in (
            ("noise_std", noise_std, "gaussian"),
            ("max_count", max_count, "poisson"),
        ):
            if family == owner and (value is None or not 0 < value < math.inf):
                raise ArgumentError(
                    f"family={family!r} needs {name}, a positive finite public number; got"
                    f" {value!r}"
                )
            if family != owner and value is not None:
                raise ArgumentError(f"{name} belongs to family={owner!r}, not to {family!r}")
            if value is not None:
                require_representable(name, value)
        stds = torch.as_tensor(prior_std, dtype=torch.float64, device="cpu").detach().clone()
        if stds.dim() > 1 or stds.numel() == 0 or not bool((stds >= _LEAST_STD).all()):
            raise ArgumentError(
                f"prior_std must be one number of at least {_LEAST_STD:g}, or one for each column"
                f" of the features; got {prior_std!r}"
            )
        self._family = family
        self._prior_std = stds
        self._max_feature_norm = float(max_feature_norm)
        self._noise_std = None if noise_std is None else float(noise_std)
        self._max_count = None if max_count is None else float(max_count)

    def __repr__(self) -> str:
        std = (
            float(self._prior_std)
            if self._prior_std.dim() == 0
            else f"<{len(self._prior_std)} values>"
        )
        parts = [
            repr(self._family),
            f"prior_std={std}",
            f"max_feature_norm={self._max_feature_norm:g}",
        ]
        parts += [
            f"{n}={v:g}"
            for n, v in (("noise_std", self._noise_std), ("max_count", self._max_count))
            if v is not None
        ]
        return f"GLM({', '.join(parts)})"

    @property
    def family(self) -> str:
        """``"bernoulli"``, ``"gaussian"`` or ``"poisson"``."""
        return self._family

    @property
    def max_feature_norm(self) -> float:
        """R_x."""
        return self._max_feature_norm

    # --- constants, none of which depends on data -------------------------------------------------

    @property
    def strength(self) -> float:
        """λ, the smallest eigenvalue of the prior's precision: U is λ-strongly convex for
        every data set.
        """
        return float(self._prior_std.max()) ** -2

    @property
    def prior_smoothness(self) -> float:
        """The largest eigenvalue of the prior's precision."""
        return float(self._prior_std.min()) ** -2

    def lipschitz(self, max_grad_norm: float = math.inf) -> float:
        """L: the largest norm of one record's gradient after clipping to ``max_grad_norm``."""
        return (
            min(max_grad_norm, self._max_feature_norm)
            if self._family == "bernoulli"
            else max_grad_norm
        )

    @property
    def prior_precision(self) -> Tensor:
        """1/prior_std², one number or one for each column, in float64."""
        return self._prior_std**-2

    @property
    def max_count(self) -> float | None:
        """The largest count of a Poisson target."""
        return self._max_count

    def record_smoothness(self, max_grad_norm: float = math.inf) -> float:
        """The Lipschitz constant of one record's clipped gradient, times R_x² already."""
        squared = self._max_feature_norm**2
        if self._noise_std is not None:
            return squared / self._noise_std**2
        if self._max_count is not None:
            return self._max_count * squared + max_grad_norm * self._max_feature_norm
        return squared / 4

    def derived_constants(self, max_grad_norm: float = 1.0) -> Constants:
        """The constants above with gradients clipped to ``max_grad_norm``."""
        require_representable("max_grad_norm", max_grad_norm)
        return Constants(
            self.lipschitz(max_grad_norm),
            self.strength,
            self.prior_smoothness,
            self.record_smoothness(max_grad_norm),
        )

    # --- records ----------------------------------------------------------------------------------

    def features(self, features: Tensor) -> Tensor:
        """The rows as the model sees them: scaled down to norm ``max_feature_norm``; zero where a
        value is not finite.

        Args:
            features: ``[n, d]``.

        Returns:
            ``[n, d]`` in float64 if that is what came, else float32.
        """
        _require_matrix(features)
        clipped = torch.empty(features.shape, dtype=_dtype(features), device=features.device)
        for rows, out in zip(features.detach().split(_CHUNK), clipped.split(_CHUNK), strict=True):
            wide = rows.to(torch.float64)
            norms = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
            factor = (self._max_feature_norm * (1 - _ROUNDING) / norms).clamp_max_(1.0)
            out.copy_(torch.where(norms.isfinite(), wide * factor, 0.0))
        return clipped

    def predict(self, draw: dict[str, Tensor], features: Tensor) -> Tensor:
        """The expected target of each row, ``[n]``: a probability, a mean or a rate, with the
        features clipped as in fitting.

        Args:
            draw: what ``OnePosteriorSample(...).sample`` returned.
            features: ``[n, d]``.
        """
        predictor = self.features(features) @ draw["weights"].to(
            device=features.device, dtype=_dtype(features)
        )
        return (
            predictor.sigmoid()
            if self._family == "bernoulli"
            else predictor.exp()
            if self._family == "poisson"
            else predictor
        )

    # --- what certificates ask --------------------------------------------------------------------

    def num_records(self, data: tuple[Any, ...]) -> int:
        """The number of rows."""
        return len(data[0])

    def prepare(self, data: tuple[Any, ...]) -> tuple[Any, ...]:
        """(features, targets), with shapes and types checked."""
        if len(data) != 2:
            raise ArgumentTypeError(
                f"a GLM samples from (features, targets), got {len(data)} arguments"
            )
        features, targets = map(_as_tensor, data)
        _require_matrix(features)
        if self._prior_std.dim() == 1 and len(self._prior_std) != features.shape[1]:
            raise ArgumentError(
                f"prior_std has {len(self._prior_std)} values, the features have"
                f" {features.shape[1]} columns"
            )
        if features.shape[1] == 0:
            raise ArgumentError("the features have no column: there is no weight to sample")
        if (
            not isinstance(targets, Tensor)
            or targets.is_complex()
            or targets.layout != torch.strided
            or targets.shape != features.shape[:1]
        ):
            more = (
                " A GLM has one predictor a record; one-hot or multi-output targets belong to other"
                " models."
                if _many(targets)
                else ""
            )
            raise ArgumentError(
                f"targets must be a real dense tensor [{len(features)}], one number a record, got"
                f" {_shape(targets)}.{more}"
            )
        return features, targets

    def target(self, data: tuple[Any, ...], *, tempering: float, max_grad_norm: float) -> GLMTarget:
        """∝ prior · Π likelihood^tempering, with clipped gradients."""
        features, targets = data
        records = self.records(features, targets, max_grad_norm)
        # column by column the two products of a step take two thirds of the time
        records.x = records.x.T.contiguous().T
        return GLMTarget(records, tempering)

    def release(self, theta: Tensor) -> dict[str, Tensor]:
        """``{"weights": [d]}``."""
        return {"weights": theta}

    def require_unconstrained(self, certificate: str) -> None:
        """Weights live on all of ℝ^d."""

    def prior_of_optimizer(self, module: torch.nn.Module) -> dict[str, Any]:
        """The prior of ``module``'s one parameter, as an argument of the private optimizers."""
        if self._prior_std.dim() == 0:
            return {"prior_std": float(self._prior_std)}
        ((name, weights),) = module.named_parameters()
        precision = (self._prior_std**-2).to(weights)
        return {
            "log_prior": lambda named: -0.5 * (precision * named[name].reshape(-1).square()).sum()
        }

    def records(
        self, features: Tensor, targets: Tensor, max_grad_norm: float = math.inf
    ) -> Records:
        """The data with every record's part in the potential bounded; nothing about their
        values can raise.
        """
        clipped = self.features(features)
        y = targets.detach().to(device=clipped.device, dtype=torch.float64)
        clipped.masked_fill_(~y.isfinite()[:, None], 0.0)
        y = torch.where(y.isfinite(), y, 0.0)
        if self._family != "gaussian":
            y = y.clamp(0.0, 1.0 if self._max_count is None else self._max_count)
        # rounding a huge target to float32 must not make it infinite: inf - inf is NaN, and would
        # be released
        largest = torch.finfo(clipped.dtype).max / 4
        y = y.clamp(-largest, largest).to(clipped.dtype)
        bounds = None
        if max_grad_norm < math.inf and not (
            self._family == "bernoulli" and max_grad_norm >= self._max_feature_norm
        ):
            norms = torch.linalg.vector_norm(clipped, dim=1, dtype=torch.float64)
            bounds = (max_grad_norm * (1 - _ROUNDING) / norms).clamp_max_(largest).to(clipped.dtype)
        precision = (self._prior_std**-2).to(clipped.device)
        return Records(self._family, clipped, y, bounds, precision, (self._noise_std or 1.0) ** -2)


@dataclass(eq=False, slots=True)
class Records:
    """Bounded records of a GLM. ``bounds``: the largest |∂ℓ_i/∂u| that clipping leaves, None
    where nothing can exceed it.
    """

    family: str
    x: Tensor  # [n, d]
    y: Tensor  # [n]
    bounds: Tensor | None  # [n]
    precision: Tensor  # [] or [d], float64
    weight: float  # of the loss, 1 / noise_std²
    _u: Tensor | None = None

    def loss_gradient(self, weights: Tensor) -> Tensor:
        """Σ_i of clipped gradients, ``[d]``, two matrix products.

        The second in float64: in float32 one record would change the rounding of millions of
        others, by a good part of its clip norm.
        """
        if self._u is None:
            self._u = torch.empty_like(self.y)
        # as in predictors
        u = torch.mv(self.x, weights.to(self.x.dtype), out=self._u).nan_to_num_(nan=0.0)
        if self.family == "bernoulli":
            u.sigmoid_()
        elif self.family == "poisson":
            u.exp_()
        u.sub_(self.y)
        if self.weight != 1.0:
            u.mul_(self.weight)
        if self.bounds is not None:
            torch.clamp(u, -self.bounds, self.bounds, out=u)
        return self.weighted_sum(u)

    def gram(self) -> Tensor:
        """Σ_i x_i x_iᵀ, ``[d, d]`` in float64; a row adds at most R_x² in Frobenius norm."""
        return self.outer_sum(None)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """Σ_i factor_i x_i, ``[d]`` in float64."""
        total = torch.zeros(self.x.shape[1], dtype=torch.float64, device=self.x.device)
        for rows, some in zip(self.x.split(_CHUNK), factors.split(_CHUNK), strict=True):
            total += rows.to(torch.float64).T @ some.to(torch.float64)
        return total

    def outer_sum(self, factors: Tensor | None) -> Tensor:
        """Σ_i factor_i x_i x_iᵀ, ``[d, d]`` in float64; factors of None are 1."""
        total = torch.zeros(
            self.x.shape[1], self.x.shape[1], dtype=torch.float64, device=self.x.device
        )
        for start in range(0, len(self.x), _CHUNK):
            rows = self.x[start : start + _CHUNK].to(torch.float64)
            total += rows.T @ (
                rows if factors is None else factors[start : start + _CHUNK, None] * rows
            )
        return total

    def square_sum(self, factors: Tensor) -> Tensor:
        """Σ_i factor_i x_i∘x_i, ``[d]`` in float64."""
        total = torch.zeros(self.x.shape[1], dtype=torch.float64, device=self.x.device)
        for rows, some in zip(self.x.split(_CHUNK), factors.split(_CHUNK), strict=True):
            total += rows.to(torch.float64).square().T @ some.to(torch.float64)
        return total

    def huber_losses(self, weights: Tensor) -> Tensor:
        """ℓ_i where its slope is within bounds, straight lines beyond, ``[n]``; the gradient
        of their sum is :meth:`loss_gradient`.
        """
        u = self.predictors(weights)
        y = self.y.to(torch.float64)
        if self.bounds is None:
            return self._losses(u, y)
        bounds = self.bounds.to(torch.float64)
        if self.family == "gaussian":
            low, high = y - bounds / self.weight, y + bounds / self.weight
        # logit or log of the mean at which the slope is at its bound; where there is none, the loss
        # stays as it is
        else:
            link = torch.logit if self.family == "bernoulli" else torch.log
            low = torch.where(y > bounds, link(y - bounds), -math.inf)
            high = torch.where(
                y + bounds < (1.0 if self.family == "bernoulli" else math.inf),
                link(y + bounds),
                math.inf,
            )
        inside = u.detach().clamp(low, high)
        slopes = self._slopes(inside, y)
        # a straight line through ``inside``, and the loss itself where that is u
        return torch.where(
            inside == u,
            self._losses(u.clamp(low, high), y),
            self._losses(inside, y) + slopes * (u - inside),
        )

    def log_likelihoods(self, weights: Tensor) -> Tensor:
        """log p(y_i | x_i, w) with its constants, ``[n]`` in float64, not clipped."""
        u = self.predictors(weights)
        y = self.y.to(torch.float64)
        if self.family == "gaussian":
            return -self._losses(u, y) + 0.5 * math.log(self.weight / (2 * math.pi))
        return -self._losses(u, y) - (torch.lgamma(y + 1) if self.family == "poisson" else 0.0)

    def predictors(self, weights: Tensor) -> Tensor:
        """u in float64; beyond the range of floats, where it would not be a number for some
        records and not for others, it is 0.
        """
        return torch.mv(self.x, weights.to(self.x.dtype)).nan_to_num(nan=0.0).to(torch.float64)

    def _losses(self, u: Tensor, y: Tensor) -> Tensor:
        if self.family == "gaussian":
            return self.weight / 2 * (u - y).square()
        if self.family == "bernoulli":
            return torch.nn.functional.softplus(u) - y * u
        return u.clamp(max=_LARGEST_EXPONENT).exp() - y * u

    def _slopes(self, u: Tensor, y: Tensor) -> Tensor:
        if self.family == "gaussian":
            return self.weight * (u - y)
        return (u.sigmoid() if self.family == "bernoulli" else u.exp()) - y


class GLMTarget:
    """U(w) = r(w) + ρ Σ ℓ_i(w) of a GLM."""

    def __init__(self, records: Records, tempering: float) -> None:
        self._records, self._tempering = records, tempering

    @property
    def start(self) -> Tensor:
        """The prior's mean."""
        return torch.zeros(
            self._records.x.shape[1], dtype=torch.float64, device=self._records.x.device
        )

    def potential(self, theta: Tensor) -> Tensor:
        """U, differentiable."""
        return self._prior(theta) + self._tempering * self._records.huber_losses(theta).sum()

    def clipped_potential(self, theta: Tensor, low: float, high: float, relative: bool) -> Tensor:
        """The same with every log likelihood clipped into [low, high] instead of every gradient;
        ``relative``: its difference to that at the start.
        """
        values = self._records.log_likelihoods(theta)
        if relative:
            values = values - self._records.log_likelihoods(self.start)
        return self._prior(theta) - self._tempering * values.clamp(low, high).sum()

    def _prior(self, theta: Tensor) -> Tensor:
        return (self._records.precision * theta.square()).sum() / 2

    def gradient(self, theta: Tensor) -> Tensor:
        """∇U, ``[d]``."""
        return (
            self._records.loss_gradient(theta)
            .mul_(self._tempering)
            .addcmul_(self._records.precision, theta)
        )


def require_representable(name: str, value: float) -> None:
    """Raise unless sums over records that this number bounds stay within what float32 can hold."""
    if not 1 / _LARGEST <= value <= _LARGEST:
        raise ArgumentError(
            f"{name} = {value:g} is not between {1 / _LARGEST:g} and {_LARGEST:g}, as sums over"
            " records in float32 need: choose units in which the numbers are closer to 1."
        )


def _dtype(features: Tensor) -> torch.dtype:
    return torch.float64 if features.dtype == torch.float64 else torch.float32


def _as_tensor(value: Any) -> Any:
    """A tensor of an array or of a pandas frame of numbers; anything else as it is.

    Whether it can be one is decided by types of columns, never by what stands in a record.
    """
    if hasattr(value, "to_numpy"):
        kinds = [dtype.kind for dtype in np.atleast_1d(value.dtypes)]
        others = [k for k, kind in enumerate(kinds) if kind not in "biuf"]
        if others:
            names = [repr(value.columns[k]) for k in others] if hasattr(value, "columns") else []
            what = f"{', '.join(names)} of the " if names else "the "
            raise ArgumentError(
                f"{what}{type(value).__name__} is not numeric: code categories as numbers by a list"
                " that is fixed beforehand, or leave them out"
            )
        value = value.to_numpy(dtype="float64", na_value=math.nan)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return torch.tensor(value)  # a copy: arrays of frames are not writable
    return value


def _require_matrix(features: Any) -> None:
    if (
        not isinstance(features, Tensor)
        or features.dim() != 2
        or features.is_complex()
        or features.layout != torch.strided
    ):
        raise ArgumentError(
            "features must be a real dense tensor, array or frame of numbers [records, columns],"
            f" got {_shape(features)}"
        )


def _shape(value: Any) -> str:
    return (
        f"a tensor of shape {list(value.shape)}"
        if isinstance(value, Tensor)
        else type(value).__name__
    )


def _many(targets: Any) -> bool:
    return isinstance(targets, Tensor) and targets.dim() > 1
