"""TotalVariationClose: the law of a draw is close to that of an exact one in total variation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ...errors import CertificateError
from ...noise import check_positive
from ..langevin import Overdamped, Underdamped
from .certificate import ROUND_UP, CloseDraw, ExactDraw, ExactEvent, TooFar, exact_delta

_POINTS, _ROUNDS = 401, 5  # of a grid that is refined: 1e-13 of the first one


@dataclass(frozen=True)
class TotalVariationClose(CloseDraw):
    r"""A draw whose distribution is within total variation distance ξ of that of an exact draw, on
    every possible data set.

    .. math::
        \|Q - P\|_{TV} \le \xi \quad \Rightarrow \quad \delta_Q(\varepsilon) \le
        \delta_P(\varepsilon) + (1 + e^\varepsilon)\,\xi

    Source: Wang, Fienberg and Smola (2015), Proposition 10.

    Args:
        target, delta: as for :class:`RenyiClose`.
        xi: ξ, asserted. It must be far below δ; one can rarely know that a chain is so close.
        sampler: as for :class:`RenyiClose`. None: the No-U-Turn chain of ``target``.

    Raises:
        ValueError: a constant is out of range, or ``xi`` too large for ``delta``.

    **Privacy.** The event is ``PureDpEvent(ε)`` and ``FailureDpEvent(δ)``. Closeness is assumed; no
    diagnostic is computed, because its value would be a release.
    """

    target: ExactDraw
    xi: float
    delta: float
    sampler: Overdamped | Underdamped | None = None

    def __post_init__(self) -> None:
        self._check_parts()
        check_positive("xi", self.xi)
        if 2 * self.xi >= self.delta:
            raise CertificateError(
                f"xi = {self.xi:g} must be below delta / 2 = {self.delta / 2:g}: pass a larger"
                " delta, or a sampler that is closer."
            )

    def closeness(self) -> str:
        return f"total variation distance {self.xi:g}"

    def epsilon_given(self, event: ExactEvent) -> float:
        """ε of one draw at ``delta``, if the total variation distances of (P, Q) and (P', Q') are
        at most ξ: Q(S) ≤ P(S) + ξ ≤ e^ε P'(S) + δ_P(ε) + ξ ≤ e^ε Q'(S) + δ_P(ε) + (1 + e^ε)ξ.
        """
        low, high = 0.0, math.log(self.delta / self.xi - 1)  # beyond, (1 + e^ε)ξ is too large
        for _ in range(_ROUNDS):
            points = np.linspace(low, high, _POINTS)
            meets = exact_delta(event, points) + (1 + np.exp(points)) * self.xi <= self.delta
            if not meets.any():
                raise TooFar(
                    f"xi = {self.xi:g} is too large for delta = {self.delta:g} at every epsilon:"
                    " pass a larger delta, an exact draw that costs less, or a sampler that is"
                    " closer."
                )
            first = int(meets.argmax())
            low, high = float(points[max(first - 1, 0)]), float(points[first])
        return high * ROUND_UP
