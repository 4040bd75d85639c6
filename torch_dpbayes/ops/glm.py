"""Generalised linear models, whose constants hold for every data set."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ArgumentError, ArgumentTypeError
from .models import Constants, LinearPredictor

_Elementwise = Callable[[Tensor], Tensor]
# the mean as a function of the linear predictor, and its inverse
_MEANS: dict[str, _Elementwise] = {
    "bernoulli": torch.sigmoid,
    "gaussian": torch.clone,
    "poisson": torch.exp,
}
_LINKS: dict[str, _Elementwise] = {
    "bernoulli": torch.logit,
    "gaussian": torch.clone,
    "poisson": torch.log,
}
FAMILIES = tuple(_MEANS)

_ROUNDING = 1e-6  # by which features and gradients are shortened: covers rounding in float32
_LEAST_STD = 1e-50
_LARGEST = 1e15  # of a constant, and 1 / the least: beyond, float32 loses what bounds a record
_LARGEST_EXPONENT = 600.0  # of a Poisson rate: finite, and beyond any clip
_CHUNK = 8192  # rows: norms and sums are in float64 without a float64 copy of all features


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

    Clipping a record's gradient to norm C (Huber's loss in u) keeps the losses convex, as there is
    one u a record, with gradient Lipschitz constant at most β R_x²: β = ¼ (Bernoulli), 1/s²
    (Gaussian), ``max_count`` + C/R_x (Poisson: where it is not clipped, e^u ≤ y + C/‖x‖). With
    several predictors a record this is false; see :class:`~torch_dpbayes.ops.Softmax`.

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
        require_representable("max_feature_norm", max_feature_norm)
        for name, value, owner in (
            ("noise_std", noise_std, "gaussian"),
            ("max_count", max_count, "poisson"),
        ):
            if family != owner and value is not None:
                raise ArgumentError(f"{name} belongs to family={owner!r}, not to {family!r}")
            if family == owner:
                require_representable(name, value)
        stds = torch.as_tensor(prior_std, dtype=torch.float64, device="cpu").detach().clone()
        if stds.dim() > 1 or stds.numel() == 0 or not bool((stds >= _LEAST_STD).all()):
            raise ArgumentError(
                f"prior_std must be one number of at least {_LEAST_STD:g}, or one for each column"
                f" of the features; got {prior_std!r}"
            )
        self._family, self._prior_std = family, stds
        self._max_feature_norm = float(max_feature_norm)
        self._noise_std = None if noise_std is None else float(noise_std)
        self._max_count = None if max_count is None else float(max_count)

    def __repr__(self) -> str:
        stds = self._prior_std
        shown = f"{float(stds)}" if stds.dim() == 0 else f"<{len(stds)} values>"
        parts = [f"{self._family!r}", f"prior_std={shown}"]
        for name in ("max_feature_norm", "noise_std", "max_count"):
            if (value := getattr(self, f"_{name}")) is not None:
                parts.append(f"{name}={value:g}")
        return f"GLM({', '.join(parts)})"

    @property
    def family(self) -> str:
        """``"bernoulli"``, ``"gaussian"`` or ``"poisson"``."""
        return self._family

    @property
    def max_feature_norm(self) -> float:
        """R_x."""
        return self._max_feature_norm

    @property
    def max_count(self) -> float | None:
        """The largest count of a Poisson target."""
        return self._max_count

    @property
    def prior_std(self) -> Tensor:
        """One number or one for each column, in float64."""
        return self._prior_std.clone()

    @property
    def prior_precision(self) -> Tensor:
        """1/prior_std²."""
        return self._prior_std**-2

    # --- constants, none of which depends on data -------------------------------------------------

    def record_smoothness(self, max_grad_norm: float = math.inf) -> float:
        """The Lipschitz constant of one record's clipped gradient, times R_x² already."""
        squared = self._max_feature_norm**2
        if self._noise_std is not None:
            return squared / self._noise_std**2
        if self._max_count is not None:
            return self._max_count * squared + max_grad_norm * self._max_feature_norm
        return squared / 4

    def derived_constants(self, max_grad_norm: float = 1.0) -> Constants:
        """The constants with gradients clipped to ``max_grad_norm``."""
        require_representable("max_grad_norm", max_grad_norm)
        largest = self._max_feature_norm if self._family == "bernoulli" else math.inf
        return Constants(
            lipschitz=min(max_grad_norm, largest),
            strength=float(self._prior_std.max()) ** -2,
            prior_smoothness=float(self._prior_std.min()) ** -2,
            record_smoothness=self.record_smoothness(max_grad_norm),
        )

    # --- records ----------------------------------------------------------------------------------

    def features(self, features: Tensor) -> Tensor:
        """The rows ``[n, d]`` as the model sees them: scaled down to norm ``max_feature_norm``;
        zero where a value is not finite; in float64 if that is what came, else float32.
        """
        _require_matrix(features)
        dtype = torch.float64 if features.dtype == torch.float64 else torch.float32
        clipped = torch.empty(features.shape, dtype=dtype, device=features.device)
        for rows, out in zip(features.detach().split(_CHUNK), clipped.split(_CHUNK), strict=True):
            wide = rows.to(torch.float64)
            norms = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
            factor = (self._max_feature_norm * (1 - _ROUNDING) / norms).clamp_max_(1.0)
            out.copy_(torch.where(norms.isfinite(), wide * factor, 0.0))
        return clipped

    def predict(self, draw: dict[str, Tensor], features: Tensor) -> Tensor:
        """The expected target of each row of ``[n, d]`` given a released draw, ``[n]``: a
        probability, a mean or a rate, with features clipped as in fitting.
        """
        x = self.features(features)
        return _MEANS[self._family](x @ draw["weights"].to(x))

    def module(self, num_features: int) -> LinearPredictor:
        """The linear predictor as a network of one parameter, ``weights`` ``[num_features]``: with
        it :meth:`.PosteriorSamples.from_draws` predicts as "bernoulli", or as "normal" with
        ``noise_std``; rates by ``predict(..., torch.exp)``.
        """
        return LinearPredictor((num_features,), self.features)

    # --- what certificates ask --------------------------------------------------------------------

    def num_records(self, data: tuple[Any, ...]) -> int:
        """The number of rows."""
        return len(data[0])

    def prepare(self, data: tuple[Any, ...]) -> tuple[Any, ...]:
        """(features, targets), with shapes and types checked."""
        if len(data) != 2:
            raise ArgumentTypeError(
                f"the data are features and targets, two arguments; got {len(data)}."
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
        if not _is_dense(targets) or targets.dim() != 1:
            raise ArgumentError(
                "targets must be a real dense tensor [n], one number a record, got"
                f" {_shape(targets)}. One-hot or multi-output targets belong to other models."
            )
        if len(targets) != len(features):
            raise ArgumentError("features and targets differ in their number of records.")
        return features, targets

    def target(
        self, data: tuple[Any, ...], *, tempering: float, max_grad_norm: float
    ) -> LinearTarget:
        """∝ prior · Π likelihood^tempering, with clipped gradients."""
        records = self.records(data[0], data[1], max_grad_norm)
        # column by column the two products of a step take two thirds of the time
        records.x = records.x.T.contiguous().T
        return LinearTarget(records, self.prior_precision.to(records.x.device), tempering)

    def release(self, theta: Tensor) -> dict[str, Tensor]:
        """``{"weights": [d]}``."""
        return {"weights": theta}

    def require_unconstrained(self, certificate: str) -> None:
        """Weights live on all of ℝ^d."""

    def records(
        self, features: Tensor, targets: Tensor, max_grad_norm: float = math.inf
    ) -> Records:
        """The data with every record's part bounded; nothing about their values can raise."""
        clipped = self.features(features)
        y = targets.detach().to(device=clipped.device, dtype=torch.float64)
        clipped.masked_fill_(~y.isfinite()[:, None], 0.0)
        y = torch.where(y.isfinite(), y, 0.0)
        if self._family != "gaussian":
            y = y.clamp(0.0, 1.0 if self._max_count is None else self._max_count)
        # a huge target must not round to infinity: inf - inf is NaN, and would be released
        largest = torch.finfo(clipped.dtype).max / 4
        y = y.clamp(-largest, largest).to(clipped.dtype)
        bounds = None
        if max_grad_norm < math.inf and (
            self._family != "bernoulli" or max_grad_norm < self._max_feature_norm
        ):
            norms = torch.linalg.vector_norm(clipped, dim=1, dtype=torch.float64)
            bounds = (max_grad_norm * (1 - _ROUNDING) / norms).clamp_max_(largest).to(clipped.dtype)
        return Records(self._family, clipped, y, bounds, (self._noise_std or 1.0) ** -2)


@dataclass(eq=False, slots=True)
class Records:
    """Bounded records of a GLM."""

    family: str
    x: Tensor  # [n, d]
    y: Tensor  # [n]
    bounds: Tensor | None  # [n], the largest |∂ℓ_i/∂u| that clipping leaves; None: any
    weight: float  # of the loss, 1 / noise_std²
    size: int = field(init=False)  # of the weights
    _u: Tensor = field(init=False)  # reused in each step

    def __post_init__(self) -> None:
        self.size, self._u = self.x.shape[1], torch.empty_like(self.y)

    def gradient_sum(self, weights: Tensor) -> Tensor:
        """Σ_i of clipped gradients, ``[d]``. In float32 one record would change the rounding of
        the sum of millions of others, by a good part of its clip norm: it is in float64.
        """
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
        return chunked_sum(lambda x, slopes: x.T @ slopes, self.x, u)

    def losses(self, weights: Tensor) -> Tensor:
        """ℓ_i up to a constant where its slope is within bounds, straight lines beyond, ``[n]``;
        the gradient of their sum is :meth:`gradient_sum`.
        """
        u = self.predictors(weights)
        y = self.y.to(torch.float64)
        if self.bounds is None:
            return self._losses(u, y)
        # where the slope is at its bound; where there is none, the loss stays as it is
        reach = self.bounds.to(torch.float64) / self.weight
        link, ends = _LINKS[self.family], {"neginf": -math.inf, "posinf": math.inf}
        low = link(y - reach).nan_to_num(nan=-math.inf, **ends)
        high = link(y + reach).nan_to_num(nan=math.inf, **ends)
        inside = u.detach().clamp(low, high)
        slopes = self.weight * (_MEANS[self.family](inside) - y)
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


def chunked_sum(term: Callable[[Tensor, Tensor], Tensor], x: Tensor, factors: Tensor) -> Tensor:
    """Σ term(rows, factors) over chunks of rows in float64, without a float64 copy of all."""
    pairs = zip(x.split(_CHUNK), factors.split(_CHUNK), strict=True)
    rows, some = next(pairs)
    total = term(rows.to(torch.float64), some.to(torch.float64))
    for rows, some in pairs:
        total += term(rows.to(torch.float64), some.to(torch.float64))
    return total


class LinearTarget:
    """U(w) = Σ_j precision_j w_j² / 2 + ρ Σ ℓ_i(w), of :class:`Records` or those of a Softmax."""

    def __init__(self, records: Any, precision: Tensor, tempering: float) -> None:
        self._records, self._precision, self._tempering = records, precision, tempering

    @property
    def start(self) -> Tensor:
        """The prior's mean."""
        return torch.zeros(self._records.size, dtype=torch.float64, device=self._records.x.device)

    def potential(self, theta: Tensor) -> Tensor:
        """U, differentiable."""
        return self._prior(theta) + self._tempering * self._records.losses(theta).sum()

    def clipped_potential(self, theta: Tensor, low: float, high: float) -> Tensor:
        """The same with log likelihoods clipped into [low, high] instead of gradients."""
        values = self._records.log_likelihoods(theta)
        return self._prior(theta) - self._tempering * values.clamp(low, high).sum()

    def gradient(self, theta: Tensor) -> Tensor:
        """∇U."""
        gradient = self._records.gradient_sum(theta).mul_(self._tempering)
        return gradient.addcmul_(self._precision, theta)

    def _prior(self, theta: Tensor) -> Tensor:
        return (self._precision * theta.square()).sum() / 2


def require_representable(name: str, value: Any) -> None:
    """Raise unless sums over records that this number bounds stay within what float32 can hold."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ArgumentError(f"{name} must be a positive finite public number, got {value!r}")
    if not 1 / _LARGEST <= float(value) <= _LARGEST:
        raise ArgumentError(
            f"{name} = {value:g} is not between {1 / _LARGEST:g} and {_LARGEST:g}, as sums over"
            " records in float32 need: choose units in which the numbers are closer to 1."
        )


def _as_tensor(value: Any) -> Any:
    """A tensor of an array or of a pandas frame of numbers; anything else as it is. The types of
    columns decide whether it can be one, never a record.
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


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_complex() and value.layout == torch.strided


def _require_matrix(features: Any) -> None:
    if not _is_dense(features) or features.dim() != 2:
        raise ArgumentError(
            "features must be a real dense tensor, array or frame of numbers [records, columns],"
            f" got {_shape(features)}"
        )


def _shape(value: Any) -> str:
    """For errors, without the number of records, which may be private."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"a tensor of shape [{', '.join(['n', *map(str, value.shape[1:])][: value.dim()])}]"
