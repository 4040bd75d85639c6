r"""One temperature for predictions, by a private posterior of one parameter.

A record's score :math:`\psi` says whether its prediction is too confident or not confident enough.
It is bounded by 1, and its expectation is zero if the predictive distribution is right. For classes
it is the slope of :math:`\log p_T(y \mid x)` in :math:`\log T`, clipped to ±½, minus the slope's
expectation under :math:`p_T(\cdot \mid x)`. For a normal target with predictive distribution
function F it is :math:`(\min(z^2, l^2) - c) / (l^2 - c)`, with z = Φ⁻¹(F(y)), l = 2.5, and c the
expectation of the first term for normal z: a bounded form of the slope of a Gaussian's log density
in the log of its scale. The sum is released five times, each time at the current posterior mean:

.. math:: \tilde S_k = \sum_i \psi_i(t_k) + z_k \xi_k = J\,h(t - t_k) + \sqrt J \xi + J (t_k - t)^2
          \xi'_k + z_k \xi''_k

Here t is log T, or for normal targets the log of the factor of the noise scale. J, the effective
number of records, is unknown, as t is. h has the slope 1 at 0. For normal targets it has the shape
of the expectation of ψ. For classes it is :math:`\frac12 (1 - e^{-2d})`, the shape of networks'
scores: it is bounded, as a score is, even for a far too confident network. The second term is the
records' sampling error, with variance at most J (a clipped slope ψ has Var ψ ≤ Cov(ψ, slope) = J);
all releases have it in common. The third term is the possible error of the shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..accounting.accountant import PrivacyAccountant
from ..accounting.calibration import total_multiplier
from ..accounting.events import ComposedDpEvent, GaussianDpEvent
from ..batches.poisson_loader import PoissonLoader
from ..distributed import require_single_process
from ..errors import ArgumentError, SamplesError
from ..noise import GaussianNoise
from .likelihoods import Likelihood, Normal, mean_square

# number of releases, and growth of their shares of the budget: the first ones only come near t
_RELEASES, _GROWTH = 5, 1.8
PRIOR_STD = 0.5  # of t: T is between .37 and 2.7 with prior probability .95
# half of the prior std of t; a warning if the posterior std is above. With J = 200 z (z of all
# releases together) that std is .07, and fewer than 1 in 100 runs warn; with J = z, over 9 in 10
UNDETERMINED = 0.25
_T = np.linspace(-2.5, 2.5, 1001)[:, None]
_J = np.geomspace(1.0, 1e9, 60)[None]  # from one record to the largest data sets
_SPACING = float(_T[1, 0] - _T[0, 0])


def multipliers(total: float) -> list[float]:
    """Noise multipliers of the releases: together they cost as much as one with ``total``."""
    shares = _GROWTH ** np.arange(_RELEASES)
    return [float(total / math.sqrt(share)) for share in shares / shares.sum()]


def event_of(total: float) -> ComposedDpEvent:
    return ComposedDpEvent([GaussianDpEvent(z) for z in multipliers(total)])


def charged_to(
    loader: DataLoader[Any],
    accountant: PrivacyAccountant | None,
    epsilon: float | None,
    delta: float | None,
) -> tuple[PrivacyAccountant, float]:
    """The accountant of a calibration, and the noise multiplier of all its releases together."""
    reserved = None
    if isinstance(loader, PoissonLoader):
        draws = loader.sampler_of_draws
        if accountant is not None and draws.accountant not in (None, accountant):
            raise ArgumentError(
                "the loader's run is charged to another accountant, which would not count this"
                " calibration: leave out accountant="
            )
        accountant = draws.accountant if accountant is None else accountant
        reserved = draws.reserved
        if draws.ranks is not None:
            raise ArgumentError(
                "the records are shared by several ranks: save the samples, and calibrate in one"
                " process, with accountant= and a DataLoader"
            )
    require_single_process()
    if not isinstance(accountant, PrivacyAccountant):
        raise ArgumentError(
            "calibrate reads private records: pass the loader that make_private returned, or"
            " accountant=, a PrivacyAccountant"
        )
    if reserved is not None and epsilon is None:
        return accountant, reserved
    return accountant, total_multiplier(accountant, epsilon, delta)


def shape_of_scores(distance: np.ndarray, is_normal: bool) -> np.ndarray:
    """h: Σψ divided by J if the log of the scale is too small by ``distance``."""
    if not is_normal:
        return (1 - np.exp(-2 * distance)) / 2
    right, slope = mean_square(1.0)
    return (mean_square(np.exp(distance))[0] - right) / slope


def estimate(score: Callable[[float], float], total: float, is_normal: bool) -> tuple[float, float]:
    """Posterior mean and standard deviation of t from noisy values of ``score``, a sum of scores
    that are bounded by 1.

    **Privacy.** The releases of :func:`event_of`; the caller has charged them.
    """
    noise, mean = GaussianNoise(), 0.0
    # Σ 1/d, Σ r/d and Σ r²/d + log d, for the errors r_k and their independent variances d_k; their
    # common variance is J
    ones, errors, squares = (np.zeros((len(_T), _J.size)) for _ in range(3))
    for z in multipliers(total):
        released = _released(score(mean), z, noise)
        distance = mean - _T
        variance = z**2 + (_J * (distance**2 + _SPACING)) ** 2  # at least the grid's error
        error = released - _J * shape_of_scores(-distance, is_normal)
        ones += 1 / variance
        errors += error / variance
        squares += error**2 / variance + np.log(variance)
        common = 1 + _J * ones
        prior = (_T / PRIOR_STD) ** 2
        log_density = (_J * errors**2 / common - squares - np.log(common) - prior) / 2
        weights = np.exp(log_density - log_density.max())
        weights /= weights.sum()
        mean = float((weights * _T).sum())
    return mean, float((weights * (_T - mean) ** 2).sum() ** 0.5)


def _released(total: float, multiplier: float, noise: GaussianNoise) -> float:
    xi = noise.standard_normal(1, dtype=torch.float64, device=torch.device("cpu"))
    return total + multiplier * float(xi)


def score_of(likelihood: Likelihood, compact: Tensor, y: Tensor) -> Callable[[float], float]:
    """Σ ψ_i as a function of t; a record with a value that is not finite counts as zero."""
    dimensions = 3 if isinstance(likelihood, Normal) else 2  # [n, samples, 2] or [n, classes]
    if compact.dim() != dimensions or y.numel() != len(compact):
        raise SamplesError(
            "calibrate needs one target per record, but model or batches have several"
        )
    targets = y.reshape(-1).to(compact)

    def score(t: float) -> float:
        psi = likelihood.scores(compact, targets, t)
        return float(psi.nan_to_num(nan=0.0).clamp(-1, 1).sum())

    return score
