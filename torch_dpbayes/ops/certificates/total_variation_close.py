"""TotalVariationClose: the law of a draw is close to that of an exact one in total variation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ...accounting.events import check_delta
from ...errors import CertificateError
from ...noise import check_positive
from ..langevin import Sampler
from ..models import Model
from .certificate import ROUND_UP, CloseDraw, ExactDraw, ExactEvent, Setting, TooFar, exact_delta

_POINTS, _ROUNDS = 401, 5  # of a grid that is refined: 1e-13 of the first one


@dataclass(frozen=True)
class TotalVariationClose(CloseDraw):
    r"""A draw whose law is within total variation distance ξ of an exact draw's, on every data set
    that could occur.

    .. math::
        \|Q - P\|_{TV} \le \xi \quad \Rightarrow \quad \delta_Q(\varepsilon) \le
        \delta_P(\varepsilon) + (1 + e^\varepsilon)\,\xi

    Source: Wang, Fienberg and Smola (2015), Proposition 10.

    Args:
        target: what is known about an exact draw, and which density that is: a :class:`Bounded` or
            a :class:`StronglyLogConcave`.
        xi: ξ, asserted. It has to be far below δ: a converged chain is hardly ever known to be that
            close.
        delta: the δ of this release, public: its guarantee is one pair (ε, δ). n draws use up nδ of
            the accountant's delta.
        sampler: as for :class:`RenyiClose`. None: the No-U-Turn chain of ``target``.

    Raises:
        ValueError: a constant is out of range, or ``xi`` too large for ``delta``.

    **Privacy.** The event is ``PureDpEvent(ε)`` and ``FailureDpEvent(δ)``. Closeness is assumed; no
    diagnostic of it is computed, for its value would be a release.
    """

    target: ExactDraw
    xi: float
    delta: float
    sampler: Sampler | None = None

    def __post_init__(self) -> None:
        self._check_parts()
        check_delta(self.delta)
        check_positive("xi", self.xi)
        if 2 * self.xi >= self.delta:
            raise CertificateError(
                f"xi = {self.xi:g} must be below delta / 2 = {self.delta / 2:g}: state a larger"
                " delta, or a sampler that is closer."
            )

    def single_guarantee(self, model: Model, setting: Setting) -> tuple[float, float]:
        """(ε, δ) of one draw."""
        exact = self.target.event(model, setting)
        return total_variation_close(exact, self.xi, self.delta), self.delta

    def closeness(self) -> str:
        return f"total variation distance {self.xi:g} of an exact draw"


def total_variation_close(event: ExactEvent, distance: float, delta: float) -> float:
    r"""ε at ``delta`` of (Q, Q') where the total variation distances of (P, Q) and (P', Q') are at
    most ξ: Q(S) ≤ P(S) + ξ ≤ e^ε P'(S) + δ_P(ε) + ξ ≤ e^ε Q'(S) + δ_P(ε) + (1 + e^ε)ξ.

    Raises:
        TooFar: no ε meets ``delta``.
    """
    if delta > 2 * distance:
        low, high = 0.0, math.log(delta / distance - 1)  # beyond, (1 + e^ε)ξ alone is too large
        for _ in range(_ROUNDS):
            points = np.linspace(low, high, _POINTS)
            meets = exact_delta(event, points) + (1 + np.exp(points)) * distance <= delta
            if not meets.any():
                break
            first = int(meets.argmax())
            low, high = float(points[max(first - 1, 0)]), float(points[first])
        else:
            return high * ROUND_UP
    raise TooFar(
        f"xi = {distance:g} is too large for delta = {delta:g} at every epsilon: state a larger"
        " delta, an exact draw that costs less, or a sampler that is closer."
    )
