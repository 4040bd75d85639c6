r"""How much of the outer products of clipped gradients is curvature.

Where a model fits and few gradients are clipped, Σ c cᵀ is the curvature in expectation. Far from
there nearly all gradients are longer than the bound C: Σ c cᵀ is then as large as the bound allows,
while the sum of the clipped gradients hardly changes with θ. Newton's steps would be the shorter
the further there is to go. If gradients are s·C·|z| long, z ~ N(0, 1), a release tells q and with
it s,

.. math::
    q = \frac{\operatorname{tr} \sum c c^\top}{n C^2} = \mathrm{E} \min(s^2 z^2, 1), \qquad
    p = \mathrm{P}(s |z| < 1), \qquad \lambda = \min\Big(1,\ \frac{s_0^2\, p}{q}\Big)

Only gradients that are not clipped, the share p, change with θ, by the curvature that they have
where the model fits; s₀² is n⁻¹C⁻² times the trace of that, as gradients are s₀·C·|z| long there.
λ·Σ c cᵀ is what the sum changes by on the way. It chooses where gradients are released, and no
more: posteriors have Σ c cᵀ of the last points.

Derived in this project.

**Privacy.** Post-processing of a released matrix.
"""

from __future__ import annotations

import math

from scipy.optimize import brentq

from .transcript import CurvatureRelease

_AT_THE_MODE = 0.5  # s₀: one gradient in twenty is longer than the bound
_LONGEST = 50.0  # s, where 98.9 % of the gradients are clipped


def share_of_curvature(release: CurvatureRelease, most: float) -> float:
    """λ, between 0 and 1.

    Args:
        release: Σ c cᵀ with its noise, of which one standard deviation is taken off the trace.
        most: n·C², the trace if all gradients are clipped.
    """
    noise = math.sqrt(len(release.value)) * release.noise_std
    square = min((float(release.value.trace()) - noise) / most, _mean_square(_LONGEST))
    if square <= _mean_square(_AT_THE_MODE):
        return 1.0
    length = brentq(lambda s: _mean_square(s) - square, _AT_THE_MODE, _LONGEST)
    return min(1.0, _AT_THE_MODE**2 * _unclipped(length) / square)


def _unclipped(length: float) -> float:
    """p(s)."""
    return math.erf(1 / (length * math.sqrt(2)))


def _mean_square(length: float) -> float:
    """q(s)."""
    x = 1 / length
    inside = _unclipped(length) - x * math.sqrt(2 / math.pi) * math.exp(-x * x / 2)
    return length**2 * inside + 1 - _unclipped(length)
