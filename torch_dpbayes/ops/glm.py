"""Generalised linear models, whose constants hold for every data set."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ArgumentError
from .linear_model import (
    ROUNDING,
    LinearModel,
    chunked_predictors,
    chunks_in_float64,
    require_representable,
)
from .models import Constants

# the mean as a function of the linear predictor, and its inverse
_FAMILIES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "bernoulli": (torch.sigmoid, torch.logit),
    "gaussian": (torch.clone, torch.clone),
    "poisson": (torch.exp, torch.log),
}
FAMILIES = tuple(_FAMILIES)
_LARGEST_EXPONENT = 600.0  # log of a Poisson rate: the rate is finite, and above any clip bound


class GLM(LinearModel):
    r"""A generalised linear model with canonical link: each record has one linear predictor
    :math:`u_i = x_i^\top w`.

    .. math::
        \ell_i(w) = b(u_i) - y_i u_i \ \text{(times } 1/s^2 \text{ for "gaussian")}, \qquad
        r(w) = \tfrac12 \sum_j w_j^2 / \text{prior\_std}_j^2

    with b(u) = log(1 + e^u) for ``"bernoulli"``, u²/2 for ``"gaussian"``, e^u for ``"poisson"``.
    Rows are scaled down to norm ``max_feature_norm`` (R_x), all columns together. For an intercept
    add a column of ones, which is scaled with the others. Targets are clamped to [0, 1]
    (``"bernoulli"``) or [0, ``max_count``] (``"poisson"``). A row with a value that is not finite
    contributes exactly zero. No record can cause an error: check labels before.

    Clipping a record's gradient to norm C (Huber's loss in u) keeps the losses convex, because each
    record has one u. The gradient's Lipschitz constant is at most β R_x²: β = ¼ (Bernoulli), 1/s²
    (Gaussian), ``max_count`` + C/R_x (Poisson: where nothing is clipped, e^u ≤ y + C/‖x‖). With
    several predictors per record this is false; see :class:`~torch_dpbayes.ops.Softmax`.

    Args:
        family: ``"bernoulli"`` (targets 0 and 1), ``"gaussian"`` or ``"poisson"``.
        prior_std: standard deviation of the N(0, prior_std²) prior of each weight: one number, or
            one for each column; ``math.inf`` for no prior.
        max_feature_norm: R_x, the largest Euclidean norm of a row of features.
        noise_std: s, the known standard deviation of the target, only for ``"gaussian"``.
        max_count: the largest count, only for ``"poisson"``.

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
        if family not in _FAMILIES:
            raise ArgumentError(
                f"family must be one of {', '.join(map(repr, _FAMILIES))}, got {family!r}: for"
                " several classes use dpb.ops.Softmax, for other models a Pyro model with asserted"
                " constants, or dpb.optim.DPSGLD."
            )
        super().__init__(prior_std, max_feature_norm)
        for name, value, owner in (
            ("noise_std", noise_std, "gaussian"),
            ("max_count", max_count, "poisson"),
        ):
            if family != owner and value is not None:
                raise ArgumentError(f"{name} is only for family={owner!r}, not for {family!r}")
            if family == owner:
                require_representable(name, value)
        self._family = family
        self._noise_std = None if noise_std is None else float(noise_std)
        self._max_count = None if max_count is None else float(max_count)

    def __repr__(self) -> str:
        stds = self._prior_std
        shown = f"{float(stds)}" if stds.dim() == 0 else f"<{len(stds)} values>"
        numbers = {"noise_std": self._noise_std, "max_count": self._max_count}
        more = "".join(f", {name}={value:g}" for name, value in numbers.items() if value)
        norm = f"{self._max_feature_norm:g}"
        return f"GLM({self._family!r}, prior_std={shown}, max_feature_norm={norm}{more})"

    @property
    def family(self) -> str:
        """``"bernoulli"``, ``"gaussian"`` or ``"poisson"``."""
        return self._family

    @property
    def max_count(self) -> float | None:
        """The largest count of a Poisson target."""
        return self._max_count

    @property
    def noise_std(self) -> float | None:
        """The standard deviation of a Gaussian target."""
        return self._noise_std

    def record_smoothness(self, max_grad_norm: float = math.inf) -> float:
        """The Lipschitz constant of one record's clipped gradient, times R_x²."""
        squared = self._max_feature_norm**2
        if self._noise_std is not None:
            return squared / self._noise_std**2
        if self._max_count is not None:
            return self._max_count * squared + max_grad_norm * self._max_feature_norm
        return squared / 4

    def derived_constants(self, max_grad_norm: float = 1.0) -> Constants:
        require_representable("max_grad_norm", max_grad_norm)
        largest = self._max_feature_norm if self._family == "bernoulli" else math.inf
        return Constants(
            lipschitz=min(max_grad_norm, largest),
            strength=float(self._prior_std.max()) ** -2,
            prior_smoothness=float(self._prior_std.min()) ** -2,
            record_smoothness=self.record_smoothness(max_grad_norm),
        )

    def records(
        self, features: Tensor, targets: Tensor, max_grad_norm: float = math.inf
    ) -> Records:
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
            bounds = (max_grad_norm * (1 - ROUNDING) / norms).clamp_max_(largest).to(clipped.dtype)
        return Records(self._family, clipped, y, bounds, (self._noise_std or 1.0) ** -2)

    def _shape(self, num_features: int) -> tuple[int, ...]:
        return (num_features,)

    def _mean(self, predictors: Tensor) -> Tensor:
        return _FAMILIES[self._family][0](predictors)


@dataclass(eq=False)
class Records:
    """Bounded records of a GLM."""

    family: str
    x: Tensor  # [n, d]
    y: Tensor  # [n]
    bounds: Tensor | None  # [n], clip bounds of |∂ℓ_i/∂u|; None: no clipping
    weight: float  # of the loss, 1 / noise_std²

    def gradient_sum(self, weights: Tensor) -> Tensor:
        """The sum of the clipped gradients, ``[d]`` in float64."""
        total = torch.zeros_like(weights, dtype=torch.float64)
        given = [self.x, self.y] if self.bounds is None else [self.x, self.y, self.bounds]
        for x, y, *bounds in chunks_in_float64(*given):
            u = _FAMILIES[self.family][0](chunked_predictors(x, weights))
            u.sub_(y).mul_(self.weight)
            for bound in bounds:
                torch.clamp(u, -bound, bound, out=u)
            total += x.T @ u
        return total

    def losses(self, weights: Tensor) -> Tensor:
        """ℓ_i(w) − ℓ_i(0), linear in u beyond the bounds of its slope, ``[n]``. The gradient of the
        sum is :meth:`gradient_sum`. ℓ_i itself has no bound: with one large target, the sum would
        lose the digits of all other records.
        """
        u = chunked_predictors(self.x, weights)
        y, low, high = self.y.to(torch.float64), -math.inf, math.inf
        if self.bounds is None:
            return self._between(torch.zeros_like(u), u, y)
        # between lows and highs the slope is within its bounds; without a bound they are infinite
        reach = self.bounds.to(torch.float64) / self.weight
        link, ends = _FAMILIES[self.family][1], {"neginf": -math.inf, "posinf": math.inf}
        lows = link(y - reach).nan_to_num(nan=low, **ends)
        highs = link(y + reach).nan_to_num(nan=high, **ends)
        start, end = torch.zeros_like(u).clamp(lows, highs), u.clamp(lows, highs)
        first, last = (self._slope(at.detach(), y) for at in (torch.zeros_like(u), u))
        bent = self._between(start, end, y) + first * start + last * (u - end)
        return torch.where(start == end, first * u, bent)

    def _slope(self, u: Tensor, y: Tensor) -> Tensor:
        """∂ℓ/∂u, clipped."""
        slope = self.weight * (_FAMILIES[self.family][0](u) - y)
        if self.bounds is None:
            return slope
        bounds = self.bounds.to(torch.float64)
        return slope.clamp(-bounds, bounds)

    def _between(self, start: Tensor, end: Tensor, y: Tensor) -> Tensor:
        """ℓ at ``end`` minus ℓ at ``start``, without cancellation."""
        if self.family == "gaussian":
            return (end - start) * (self._slope(start, y) + self._slope(end, y)) / 2
        if self.family == "bernoulli":
            softplus = torch.nn.functional.softplus
            return softplus(end) - softplus(start) - y * (end - start)
        capped = end.clamp(max=_LARGEST_EXPONENT)
        return start.exp() * (capped - start).expm1() - y * (end - start)

    def log_likelihoods(self, weights: Tensor) -> Tensor:
        """log p(y_i | x_i, w) with its constants, ``[n]`` in float64, not clipped."""
        u, y = chunked_predictors(self.x, weights), self.y.to(torch.float64)
        found = -self.loss_of(u, y)
        if self.family == "gaussian":
            return found + 0.5 * math.log(self.weight / (2 * math.pi))
        return found - torch.lgamma(y + 1) if self.family == "poisson" else found

    def loss_of(self, u: Tensor, y: Tensor) -> Tensor:
        """ℓ of linear predictors and targets, not clipped, up to a constant."""
        if self.family == "gaussian":
            return self.weight / 2 * (u - y).square()
        if self.family == "bernoulli":
            return torch.nn.functional.softplus(u) - y * u
        return u.clamp(max=_LARGEST_EXPONENT).exp() - y * u
