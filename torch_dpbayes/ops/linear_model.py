"""Linear predictors of clipped features: what a GLM and a Softmax share."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, ArgumentTypeError
from .models import Data, Density, Limits, Model, gradient_of

ROUNDING = 1e-6  # relative reduction of the clip bounds, which covers rounding in float32
_LEAST_STD = 1e-50
_LARGEST = 1e15  # largest constant, and 1 / the least: beyond, float32 cannot hold a record's bound
_CHUNK = 2048  # rows: all sums are in float64 without a float64 copy of all features


class LinearModel(Model):
    """A Gaussian prior of weights, and linear predictors of features: one per record, or one per
    record and class. Features are scaled down to norm ``max_feature_norm``.
    """

    def __init__(
        self, prior_std: float | Sequence[float] | Tensor, max_feature_norm: float
    ) -> None:
        require_representable("max_feature_norm", max_feature_norm)
        stds = torch.as_tensor(prior_std, dtype=torch.float64, device="cpu").detach().clone()
        if stds.dim() > 1 or stds.numel() == 0 or not bool((stds >= _LEAST_STD).all()):
            raise ArgumentError(
                f"prior_std must be one number of at least {_LEAST_STD:g}, or one for each column"
                f" of the features; got {prior_std!r}"
            )
        self._prior_std, self._max_feature_norm = stds, float(max_feature_norm)

    @property
    def max_feature_norm(self) -> float:
        """R_x."""
        return self._max_feature_norm

    @property
    def prior_std(self) -> Any:
        """The prior standard deviation of the weights: one number, or one for each column, in
        float64.
        """
        return self._prior_std.clone()

    @property
    def prior_precision(self) -> Tensor:
        """1/prior_std²."""
        return self._prior_std**-2

    @abstractmethod
    def records(self, features: Tensor, targets: Tensor, max_grad_norm: float = math.inf) -> Any:
        """The data, where every record has a bounded influence. No value can cause an error."""

    @abstractmethod
    def _shape(self, num_features: int) -> tuple[int, ...]: ...  # of the weights

    @abstractmethod
    def _mean(self, predictors: Tensor) -> Tensor: ...  # of a target

    def features(self, features: Tensor) -> Tensor:
        """The clipped rows ``[n, d]``: scaled down to norm ``max_feature_norm``, zero if a value is
        not finite; in float64 if the input is, else in float32.
        """
        _require_dense("features", features, "[records, columns]", 2)
        dtype = torch.float64 if features.dtype == torch.float64 else torch.float32
        clipped = torch.empty(features.shape, dtype=dtype, device=features.device)
        for rows, out in zip(features.detach().split(_CHUNK), clipped.split(_CHUNK), strict=True):
            wide = rows.to(torch.float64)
            norms = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
            factor = (self._max_feature_norm * (1 - ROUNDING) / norms).clamp_max_(1.0)
            out.copy_(torch.where(norms.isfinite(), wide * factor, 0.0))
        return clipped

    def predict(self, draw: dict[str, Tensor], features: Tensor) -> Tensor:
        """The expected target of each row of ``[n, d]`` given a released draw, with features
        clipped as in fitting: a probability, a mean or a rate ``[n]``; for a Softmax the
        probabilities of classes ``[n, K]``.
        """
        return expected_targets(self, draw["weights"], self.features(features))

    def module(self, num_features: int) -> LinearPredictor:
        """The linear predictors as a network with one parameter, ``weights`` ``[num_features]``, or
        ``[K, num_features]`` for a Softmax. Use it with :meth:`.PosteriorSamples.from_draws` for
        "bernoulli", "normal" with ``noise_std``, or "categorical"; for rates call ``predict(...,
        torch.exp)``. It scales down whole rows, but ``noise_aware.posterior`` does not scale
        constant columns and public rows: for draws of such a run use its own ``predict``.
        """
        return LinearPredictor(self._shape(num_features), self.features)

    def prepare(self, data: Data) -> Data:
        if len(data) != 2:
            raise ArgumentTypeError(f"pass two arguments, features and targets; got {len(data)}.")
        features, targets = data
        _require_dense("features", features, "[records, columns]", 2)
        if self._prior_std.dim() == 1 and len(self._prior_std) != features.shape[1]:
            raise ArgumentError(
                f"prior_std has {len(self._prior_std)} values, but the features have"
                f" {features.shape[1]} columns"
            )
        if features.shape[1] == 0:
            raise ArgumentError("the features have no columns, so there is no weight to sample")
        _require_dense("targets", targets, "[n], one number per record", 1)
        if len(targets) != len(features):
            raise ArgumentError("features and targets differ in their number of records.")
        return features, targets

    def target(self, data: Data, limits: Limits) -> Density:
        """U(w) = Σ_j precision_j w_j² / 2 + ρ Σ ℓ_i(w). The start is the prior's mean."""
        tempering, max_grad_norm, interval, _ = limits
        records = self.records(data[0], data[1], max_grad_norm)
        precision = self.prior_precision.to(records.x.device)

        def potential(theta: Tensor) -> Tensor:
            prior = (precision * theta.square()).sum() / 2
            if interval is None:
                return prior + tempering * records.losses(theta).sum()
            return prior - tempering * records.log_likelihoods(theta).clamp(*interval).sum()

        def gradient(theta: Tensor) -> Tensor:
            total = records.gradient_sum(theta).mul_(tempering)
            return total.addcmul_(precision, theta)

        size = math.prod(self._shape(records.x.shape[1]))
        start = torch.zeros(size, dtype=torch.float64, device=records.x.device)
        return Density(start, potential, gradient if interval is None else gradient_of(potential))

    def release(self, theta: Tensor) -> dict[str, Tensor]:
        return {"weights": theta.reshape(self._shape(-1))}


class LinearPredictor(nn.Module):
    """Linear predictors of clipped features, as a module with the parameter ``weights``."""

    def __init__(self, shape: tuple[int, ...], features: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
        self._features = features

    def forward(self, x: Tensor) -> Tensor:
        return _predictors(self._features(x), self.weights)


def expected_targets(model: LinearModel, weights: Tensor, rows: Tensor) -> Tensor:
    """Expected targets of rows ``[n, d]``, which are not clipped."""
    return model._mean(_predictors(rows, weights))  # noqa: SLF001


def _predictors(x: Tensor, weights: Tensor) -> Tensor:
    weights = weights.to(x)
    return x @ (weights.mT if weights.dim() > 1 else weights)


def chunks_in_float64(*of_rows: Tensor) -> Iterator[list[Tensor]]:
    """Chunks of each tensor's rows in float64, without a float64 copy of all rows. In float32 the
    rounding of a row depends on the number of rows. If large numbers cancel, one record more could
    move others, and sums of millions, by a large part of a clip norm.
    """
    for parts in zip(*(tensor.split(_CHUNK) for tensor in of_rows), strict=True):
        yield [part.to(torch.float64) for part in parts]


def chunked_predictors(x: Tensor, weights: Tensor) -> Tensor:
    """``x @ weights`` in float64, with 0 for NaN, which could be in the results of some records
    only.
    """
    weights = weights.to(torch.float64)
    found = [rows @ weights for (rows,) in chunks_in_float64(x)]
    return torch.cat(found).nan_to_num(nan=0.0)


def require_representable(name: str, value: Any) -> None:
    """Raise unless float32 can represent the sums over records that this number bounds."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ArgumentError(f"{name} must be a positive finite public number, got {value!r}")
    if not 1 / _LARGEST <= float(value) <= _LARGEST:
        raise ArgumentError(
            f"{name} = {value:g} is not between {1 / _LARGEST:g} and {_LARGEST:g}, so sums over"
            " records do not fit float32: choose units in which numbers are closer to 1."
        )


def _require_dense(name: str, value: Any, wanted: str, dims: int) -> None:
    """Raise unless ``value`` is dense; the message omits the number of records."""
    shown = type(value).__name__
    if isinstance(value, Tensor):
        if value.layout == torch.strided and not value.is_complex() and value.dim() == dims:
            return
        shape = ["n", *map(str, value.shape[1:])][: value.dim()]
        shown = f"a tensor of shape [{', '.join(shape)}]"
    raise ArgumentError(
        f"{name} must be a real dense tensor {wanted}, such as from torch.as_tensor; got {shown}"
    )
