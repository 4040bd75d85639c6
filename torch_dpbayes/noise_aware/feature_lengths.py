r"""How long the features are let be in their own coordinates: a weight is below 1 where they are
longer than 1 (:mod:`~torch_dpbayes.noise_aware.feature_shape`).

Longer features have less noise, shorter ones fewer weights below 1, and where a model is not quite
right, weights move the parameters that fit best. A noisy histogram of ‖x'‖² tells how many there
would be. With the features times √c, log ‖x'‖² ~ N(m, s²) and t = −log c, the weights take from the
records the share

.. math::
    \lambda(c) = \mathrm{E}[1 - w] = \Phi\Big(\frac{m-t}{s}\Big) -
    e^{t-m+s^2/2}\,\Phi\Big(\frac{m-s^2-t}{s}\Big)

and leave κ(c) = E[w‖x'‖²] / E‖x'‖² of the Gram matrix. Among the lengths, with the mean over m and
s given the histogram, the smallest is

.. math::
    \sum_j \log\Big(v_j(c) + \frac{\beta^2 n \lambda(c)^2}{1 + F_j}\Big),

v the posterior variance in units of the prior's, F the curvature of the log likelihood there: the
mean square error if a record's score is off by β of its standard deviation.

Derived in this project.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .feature_shape import FeatureShape
from .transcript import LengthRelease

EDGES = tuple(2 ** (k / 2) for k in range(-6, 9))
"""Of the histogram, in ‖x'‖²."""
_WRONG = 0.2  # β: about that of a logistic regression in the ages and hours of Adult
# of log standard deviation for each parameter: what half of the Gram matrix's noise costs, which is
# spent on the features as they were
_LEAST_GAIN = 0.005
_LENGTHS = tuple(2 ** (k / 4) for k in range(-8, 13))
_MEDIANS, _SPREADS = (-4.0, 1.0, 51), (0.1, 2.5, 49)  # of log ‖x'‖²: first, last, number


def best_length(
    counts: LengthRelease,
    num_data: int,
    shape: FeatureShape,
    clipped: Callable[[float], float],
) -> float | None:
    """c, or None where that would gain too little.

    Args:
        counts: the released histogram.
        num_data: n, public.
        shape: what is known of the features' directions.
        clipped: what the clip bound leaves of F, given the length of the features: gradients are
            clipped, and longer features have smaller residuals at the bound.
    """
    medians, spreads = (torch.linspace(*g, dtype=torch.float64) for g in (_MEDIANS, _SPREADS))
    m, s = (grid.flatten() for grid in torch.meshgrid(medians, spreads, indexing="ij"))
    ends = torch.tensor([0.0, *EDGES, math.inf], dtype=torch.float64).log()
    shares = torch.special.ndtr((ends - m[:, None]) / s[:, None]).diff()
    # the counts of the records vary too
    variance = counts.noise_std**2 + num_data * shares
    misses = (counts.value - num_data * shares).square() / variance + variance.log()
    mean = m + s.square() / 2 - math.log(0.5)  # of ‖x'‖², which the shape was made for
    likely = (-(misses.sum(1) + mean.square()) / 2).softmax(0)

    def loss(c: float) -> float:
        lost, kept = _taken(c, m, s)
        bias = _WRONG**2 * num_data * float(likely @ lost.square())
        left = clipped(min(math.sqrt(c * shape.mean_square), 1.0))
        variances = shape.variances(c, left * float(likely @ kept))
        return float((variances + bias / (1 + shape.told)).log().sum())

    found = min(_LENGTHS, key=loss)
    gain = (float(shape.today.log().sum()) - loss(found)) / 2
    # nor where numbers are too large to tell
    return found if gain >= _LEAST_GAIN * len(shape.told) else None


def _taken(c: float, m: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """λ and κ."""
    t = -math.log(c)
    above = torch.special.ndtr((m - t) / s)
    lost = above - (t - m + s.square() / 2).exp() * torch.special.ndtr((m - s.square() - t) / s)
    below = torch.special.ndtr((t - m - s.square()) / s)
    kept = below + above * (t - m - s.square() / 2).exp()
    return lost.clamp(0.0, 1.0), kept.clamp(0.0, 1.0)
