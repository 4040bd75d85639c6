r"""From how close a sampler is to its target, and how private an exact draw of the target is, to
how private the sampler's draw is.

P and P' are the targets on neighbouring data sets, Q and Q' the laws of the sampler's draws. What
is known of (P, P') is an event; of (P, Q) it is assumed. No triangle inequality for privacy is
free: every bound here is larger than the event of (P, P').
"""

from __future__ import annotations

import math
from functools import singledispatch
from typing import Any

import numpy as np

from ..accounting import bounds, dominating_pairs
from ..accounting.events import BoundedRangeDpEvent, MuGaussianDpEvent
from ..errors import ArgumentTypeError, CertificateError

ExactEvent = BoundedRangeDpEvent | MuGaussianDpEvent  # of an exact draw; another kind is registered

_ROUND_UP = 1 + 1e-9
_LEAST_DELTA = 1e-290  # below it the tail of a Gaussian leaves floating point
_SHARES_OF_TARGET = (0.01, 0.05, 0.15, 0.33, 0.5, 0.7, 0.9, 0.97)  # of delta
_SHARES_OF_FIRST = (0.2, 0.5, 0.8)  # of the rest, for the step from Q to P


class TooFar(CertificateError):
    """The sampler is not close enough to its target for any ε at this δ."""


@singledispatch
def ratio_bounded(event: Any, divergence: float) -> ExactEvent:
    r"""(Q, Q') where |log dQ/dP| ≤ η everywhere: Rényi divergence η of order ∞ in both directions.

    A log ratio of P to P' that spans b becomes one that spans b + 4η. A μ-Gaussian one becomes (μ +
    2m)-Gaussian, m = 2Φ⁻¹(e^η/(1+e^η)): trade-off curves compose along Q, P, P', Q', and an
    η-differentially private pair is m-Gaussian.
    """
    raise _unknown(event)


@ratio_bounded.register
def _(event: BoundedRangeDpEvent, divergence: float) -> ExactEvent:
    return BoundedRangeDpEvent((event.epsilon + 4 * divergence) * _ROUND_UP)


@ratio_bounded.register
def _(event: MuGaussianDpEvent, divergence: float) -> ExactEvent:
    added = 2 * dominating_pairs.dominating_mu(dominating_pairs.Pure(divergence))
    return MuGaussianDpEvent((event.mu + added) * _ROUND_UP)


def renyi_close(event: ExactEvent, divergence: float, order: float, delta: float) -> float:
    r"""ε at ``delta`` of (Q, Q') where D_β(Q‖P), D_β(P‖Q), D_β(Q'‖P'), D_β(P'‖Q') ≤ η.

    Q(S) ≤ e^a P(S) + δ₁, P(S) ≤ e^ε P'(S) + δ₂ and P'(S) ≤ e^b Q'(S) + δ₃ make Q(S) ≤ e^{a+ε+b}
    Q'(S) + δ₁ + e^a δ₂ + e^{a+ε} δ₃, with δ₁ = e^{(β−1)(η−a)} (1−1/β)^β / (β−1) (Canonne, Kamath
    and Steinke 2020, Proposition 12), and δ₃ alike. One direction of closeness is used at Q, the
    other at Q'. The weak triangle inequality for Rényi divergences (Mironov 2017, Proposition 11)
    gives up to 10 percent more: it forgets what is known of (P, P') beyond its Rényi curve.

    Raises:
        TooFar: no finite ε comes out.
    """
    constant = order * math.log1p(-1 / order) - math.log(order - 1)
    best = math.inf
    for exact in _SHARES_OF_TARGET:
        for first in _SHARES_OF_FIRST:
            delta_1, delta_2, delta_3 = (
                (1 - exact) * first * delta,
                exact * delta,
                (1 - exact) * (1 - first) * delta,
            )
            a = max(0.0, divergence + (constant - math.log(delta_1)) / (order - 1))
            middle = _exact_epsilon(event, delta_2 * math.exp(-a))
            b = max(0.0, divergence + (constant + a + middle - math.log(delta_3)) / (order - 1))
            best = min(best, a + middle + b)
    if math.isinf(best):
        raise TooFar(
            f"divergence = {divergence:g} of order {order:g} gives no finite epsilon at delta ="
            f" {delta:g}: state a larger delta, or a sampler that is closer."
        )
    return best * _ROUND_UP


def total_variation_close(event: ExactEvent, distance: float, delta: float) -> float:
    r"""ε at ``delta`` of (Q, Q') where the total variation distances of (P, Q) and (P', Q') are at
    most ξ.

    Q(S) ≤ P(S) + ξ ≤ e^ε P'(S) + δ_P(ε) + ξ ≤ e^ε Q'(S) + δ_P(ε) + (1 + e^ε)ξ (Wang, Fienberg and
    Smola 2015, Proposition 10).

    Raises:
        TooFar: no ε meets ``delta``.
    """

    def meets(epsilon: float) -> bool:
        return _exact_delta(event, epsilon) + (1 + math.exp(epsilon)) * distance <= delta

    if delta > 2 * distance:
        # beyond, the second term alone is too large
        points = np.linspace(0.0, math.log(delta / distance - 1), 400).tolist()
        for low, high in zip([0.0, *points], points, strict=False):
            if meets(high):
                while high - low > 1e-10:
                    middle = (low + high) / 2
                    low, high = (low, middle) if meets(middle) else (middle, high)
                return high * _ROUND_UP
    raise TooFar(
        f"xi = {distance:g} is too large for delta = {delta:g} at every epsilon: state a larger"
        " delta, an exact draw that costs less, or a sampler that is closer."
    )


@singledispatch
def _exact_delta(event: Any, epsilon: float) -> float:
    """δ at ε of (P, P')."""
    raise _unknown(event)


@_exact_delta.register
def _(event: BoundedRangeDpEvent, epsilon: float) -> float:
    gap = max(event.epsilon - epsilon, 0.0)
    return math.expm1(-gap / 2) ** 2 / -math.expm1(-event.epsilon)


@_exact_delta.register
def _(event: MuGaussianDpEvent, epsilon: float) -> float:
    return bounds.upper_delta({dominating_pairs.Gaussian(event.mu): 1}, epsilon)


@singledispatch
def _exact_epsilon(event: Any, delta: float) -> float:
    """ε at δ of (P, P')."""
    raise _unknown(event)


@_exact_epsilon.register
def _(event: BoundedRangeDpEvent, delta: float) -> float:
    share = math.sqrt(-delta * math.expm1(-event.epsilon))
    return max(0.0, event.epsilon + 2 * math.log1p(-share)) if share < 1 else 0.0


@_exact_epsilon.register
def _(event: MuGaussianDpEvent, delta: float) -> float:
    if delta < _LEAST_DELTA:
        return math.inf
    return bounds.upper_epsilon({dominating_pairs.Gaussian(event.mu): 1}, delta)


def _unknown(event: Any) -> TypeError:
    return ArgumentTypeError(
        "an exact draw is charged as BoundedRangeDpEvent or MuGaussianDpEvent; register another"
        f" kind in ops/sampling_error.py: {event!r}."
    )
