"""RenyiClose: the law of a draw is close to that of an exact one in Rényi divergence."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ...errors import CertificateError
from ...noise import check_positive
from ..langevin import Overdamped, Underdamped
from .certificate import ROUND_UP, CloseDraw, ExactDraw, ExactEvent, TooFar, exact_epsilon

# how δ is split: to the exact draw, and of the rest to the step from Q to P; any split is valid
_SHARES = np.array(
    [
        (exact, (1 - exact) * first)
        for exact in (0.01, 0.05, 0.15, 0.33, 0.5, 0.7, 0.9, 0.97)
        for first in (0.2, 0.5, 0.8)
    ]
)


@dataclass(frozen=True)
class RenyiClose(CloseDraw):
    r"""A draw by a sampler without an accept step; its distribution is close to that of an exact
    draw in Rényi divergence.

    .. math:: D_\beta(Q \| P) \le \eta \quad \text{and} \quad D_\beta(P \| Q) \le \eta

    for the distribution Q of the draw and the target P, on every possible data set. Both directions
    are needed: with only the first, Q may have no mass where P has some, and this would reveal the
    data. The order is finite: on ℝ no chain's density stays within a constant factor of
    its target's.

    Source: Ganesh and Talwar (2020), "Faster differentially private samplers via Rényi divergence
    analysis of discretized Langevin MCMC". Their bounds for the two chains have unknown constants,
    so they alone certify nothing.

    Args:
        target: the certificate of an exact draw: a :class:`Bounded` or a
            :class:`StronglyLogConcave`.
        sampler: :class:`~torch_dpbayes.ops.Overdamped` or :class:`~torch_dpbayes.ops.Underdamped`.
        divergence: η, asserted.
        order: β > 1, finite, asserted.
        delta: the δ of this release, public: its guarantee is one pair (ε, δ). n draws use nδ of
            the accountant's δ.

    Raises:
        ValueError: a constant is out of range.

    **Privacy.** The event is ``PureDpEvent(ε)`` and ``FailureDpEvent(δ)``. Closeness is assumed; no
    diagnostic is computed, because its value would be a release.
    """

    target: ExactDraw
    sampler: Overdamped | Underdamped
    divergence: float
    order: float
    delta: float

    def __post_init__(self) -> None:
        self._check_parts()
        if self.divergence != 0:
            check_positive("divergence", self.divergence)
        if isinstance(self.order, bool) or not 1 < self.order < math.inf:
            raise CertificateError(f"order must be above 1, and finite; got {self.order!r}.")

    def closeness(self) -> str:
        return f"Renyi divergence {self.divergence:g} of order {self.order:g}, in both directions,"

    def epsilon_given(self, event: ExactEvent) -> float:
        r"""ε of one draw at ``delta``, if D_β(Q‖P), D_β(P‖Q), D_β(Q'‖P'), D_β(P'‖Q') ≤ η.

        Q(S) ≤ e^a P(S) + δ₁, P(S) ≤ e^ε P'(S) + δ₂ and P'(S) ≤ e^b Q'(S) + δ₃ make Q(S) ≤ e^{a+ε+b}
        Q'(S) + δ₁ + e^a δ₂ + e^{a+ε} δ₃, with δ₁ = e^{(β−1)(η−a)} (1−1/β)^β / (β−1) (Canonne,
        Kamath and Steinke 2020, Proposition 12), and δ₃ alike. The weak triangle inequality for
        Rényi divergences (Mironov 2017, Proposition 11) gives up to 10 percent more.
        """
        divergence, order = self.divergence, self.order
        constant = order * math.log1p(-1 / order) - math.log(order - 1)
        exact, first = self.delta * _SHARES.T
        last = self.delta - exact - first
        a = np.maximum(0.0, divergence + (constant - np.log(first)) / (order - 1))
        middle = exact_epsilon(event, exact * np.exp(-a))
        b = np.maximum(0.0, divergence + (constant + a + middle - np.log(last)) / (order - 1))
        if math.isinf(best := float((a + middle + b).min())):
            raise TooFar(
                f"divergence = {divergence:g} of order {order:g} gives no finite epsilon at delta"
                f" = {self.delta:g}: pass a larger delta, or a sampler that is closer."
            )
        return best * ROUND_UP
