r"""One temperature for predictions, by a private posterior of one parameter.

A record's score :math:`\psi` says whether the prediction is too sure of it or not sure enough. It
is bounded by 1, and its expectation is zero where the prediction is right: for classes it is the
slope of :math:`\log p_T(y \mid x)` in :math:`\log T`, clipped to ±½, minus the expectation of that
under :math:`p_T(\cdot \mid x)`; for a normal target with the predictive distribution function F it
is :math:`(\min(z^2, l^2) - c) / (l^2 - c)`, z = Φ⁻¹(F(y)), l = 2.5, c the expectation of the first
term for normal z: the slope of a Gaussian's log density in the log of its scale, but bounded.
The sum is released a few times, each time at the mean of what is known by then:

.. math:: \tilde S_k = \sum_i \psi_i(t_k) + z_k \xi_k = J\,h(t - t_k) + \sqrt J \xi + J (t_k - t)^2
          \xi'_k + z_k \xi''_k

for t = log T, or log of the factor of a noise scale. How many records count, J, is as unknown as t.
h has the slope 1 at 0: for normal targets it is the expectation of ψ; for classes :math:`\frac12 (1
- e^{-2d})`, the shape that scores of networks have: one that is far too sure loses no more than a
bounded score. The records are a sample, of variance at most J (a clipped slope ψ has Var ψ ≤
Cov(ψ, slope) = J), in common to all releases; the third term is what the shape may be wrong by.
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

# of the budget from one release to the next: the first ones only serve to arrive
_RELEASES, _GROWTH = 5, 1.8
PRIOR_STD = 0.5  # of t beforehand: T between .37 and 2.7 with probability .95
# of t, half of that: with J = 200 z (z of all releases together) t is known to .07, and fewer than
# 1 in 100 runs pass it; with J = z more than 9 in 10 do
UNDETERMINED = 0.25
_T = np.linspace(-2.5, 2.5, 1001)[:, None]
_J = np.geomspace(1.0, 1e9, 60)[None]  # between one record and all there may be
_SPACING = float(_T[1, 0] - _T[0, 0])


def multipliers(total: float) -> list[float]:
    """Noise multipliers of the releases that cost together what one does with ``total``."""
    shares = _GROWTH ** np.arange(_RELEASES)
    return [float(total / math.sqrt(share)) for share in shares / shares.sum()]


def event_of(total: float) -> ComposedDpEvent:
    """The event that a calibration is charged as."""
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
                "the loader's run is charged to another accountant, which would not count this:"
                " leave out accountant="
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
    """h: Σψ over J where the log of the scale is too small by ``distance``."""
    if not is_normal:
        return (1 - np.exp(-2 * distance)) / 2
    right, slope = mean_square(1.0)
    return (mean_square(np.exp(distance))[0] - right) / slope


def estimate(score: Callable[[float], float], total: float, is_normal: bool) -> tuple[float, float]:
    """Posterior mean and standard deviation of t from noisy values of ``score``, whose parts are
    bounded by 1.

    **Privacy.** Releases what :func:`event_of` says; the caller has charged it.
    """
    noise, mean = GaussianNoise(), 0.0
    # of the errors r_k and their own variances d_k, with J in common: Σ 1/d, Σ r/d, and
    # Σ r²/d + log d
    ones, errors, squares = (np.zeros((len(_T), _J.size)) for _ in range(3))
    for z in multipliers(total):
        released = _released(score(mean), z, noise)
        distance = mean - _T
        variance = z**2 + (_J * (distance**2 + _SPACING)) ** 2  # no finer than the grid
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
    """The sum with its noise."""
    xi = noise.standard_normal(1, dtype=torch.float64, device=torch.device("cpu"))
    return total + multiplier * float(xi)


def score_of(likelihood: Likelihood, compact: Tensor, y: Tensor) -> Callable[[float], float]:
    """Σ ψ_i as a function of t; a record with a value that is not finite counts as zero."""
    dimensions = 3 if isinstance(likelihood, Normal) else 2  # of samples' moments; of classes
    if compact.dim() != dimensions or y.numel() != len(compact):
        raise SamplesError(
            "calibrate needs one target per record, but model or batches have several"
        )
    targets = y.reshape(-1).to(compact)

    def score(t: float) -> float:
        psi = likelihood.scores(compact, targets, t)
        return float(psi.nan_to_num(nan=0.0).clamp(-1, 1).sum())

    return score
