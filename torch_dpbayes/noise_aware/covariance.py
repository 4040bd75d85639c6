"""One noisy second-moment matrix of features, for whitening them before a private run."""

from __future__ import annotations

import math
import sys
from typing import NamedTuple

import torch
from torch import Tensor

from ..accounting.accountant import PrivacyAccountant
from ..accounting.events import GaussianDpEvent
from ..errors import ArgumentError, ArgumentTypeError
from ..noise import GaussianNoise, check_positive
from .records import shorten

_ROWS = 2_000


class NoisyCovariance(NamedTuple):
    """The release of :func:`covariance`.

    Attributes:
        matrix: ``[d, d]`` in float64, symmetric, not always positive definite.
        noise_std: standard deviation of the noise of a diagonal entry.
    """

    matrix: Tensor
    noise_std: float

    def whitening(self, floor: float = 0.3) -> Tensor:
        r"""The matrix that gives all features about equal variance, as far as the release shows.

        .. math::
            W \propto \big(S_+ + \max(\phi \, \mathrm{tr} S / d, \; \sigma \sqrt{2d}) \,
            I\big)^{-1/2}

        :math:`\sigma\sqrt{2d}` is the operator norm of the noise. W is symmetric; its largest
        eigenvalue is 1. Multiply rows of float32 by it: ``x @ W``.

        Args:
            floor: φ, a share of the mean eigenvalue. It limits how far features with little
                variance are scaled up.

        Returns:
            ``[d, d]`` in float32.

        Raises:
            ArgumentError: ``floor`` is negative or not finite.

        **Privacy.** Post-processing of the release.
        """
        if floor != 0:
            floor = check_positive("floor", floor, "or 0")
        values, vectors = torch.linalg.eigh(self.matrix)
        size = len(values)
        added = max(floor * float(values.sum()) / size, self.noise_std * math.sqrt(2 * size))
        scales = (values.clamp_min(0.0) + added).rsqrt()
        return ((vectors * (scales / scales.max())) @ vectors.T).float()


def covariance(
    x: Tensor,
    *,
    accountant: PrivacyAccountant,
    noise_multiplier: float = 10.0,
    max_feature_norm: float = 1.0,
) -> NoisyCovariance:
    r"""The sum of the records' second moments, with noise.

    Gradient descent learns slowly in directions in which features vary little, and clipping and
    noise are the same for all directions. Whitening by a private covariance makes the variances
    about equal.

    .. math::
        S = \sum_i \tilde x_i^\top \tilde x_i + z R^2 E, \qquad
        \tilde x_i = x_i \min(1, R / \lVert x_i \rVert_F)

    with symmetric E, whose entries are N(0, 1) on the diagonal and N(0, 1/2) off it. ::

        accountant = dpb.PrivacyAccountant(epsilon=3, delta=1e-5)
        W = dpb.noise_aware.covariance(x, accountant=accountant).whitening()
        data = TensorDataset(x @ W, y)  # and PrivacyEngine(accountant)

    Source: Dwork et al. (2014), "Analyze Gauss", algorithm 1.

    Args:
        x: ``[n, d]``, or ``[n, positions, d]``, where a whole record is scaled down. A record with
            a number that is not finite counts as zero.
        accountant: charged before the release. The run that follows should use it, too.
        noise_multiplier: z. 10 costs a hundredth of a run at μ = 1.
        max_feature_norm: R, a public number. Records with a larger norm are scaled down to it.

    Raises:
        ArgumentError, ArgumentTypeError: a shape or a number is out of range. Nothing is charged.
        PrivacyBudgetExceeded: the release would exceed the budget. Nothing is released.

    **Privacy.** A record's part is positive semi-definite with a trace of at most R², so its
    Frobenius norm is at most R²: one Gaussian event of multiplier z. Two such parts differ by at
    most √2·R² in Frobenius norm, which is the sensitivity if neighbours replace one record.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.layout != torch.strided:
        raise ArgumentTypeError("x must be a dense floating-point tensor.")
    if x.dim() not in (2, 3) or 0 in x.shape[1:]:  # the number of records may be private
        raise ArgumentError(f"x must be [n, d] or [n, positions, d], got {['n', *x.shape[1:]]}.")
    if not isinstance(accountant, PrivacyAccountant):
        raise ArgumentTypeError(
            f"accountant must be a dpb.PrivacyAccountant, got {type(accountant).__name__}."
        )
    noise_multiplier = check_positive("noise_multiplier", noise_multiplier)
    max_feature_norm = check_positive("max_feature_norm", max_feature_norm)
    unit = max_feature_norm * max_feature_norm
    if not sys.float_info.min <= unit * noise_multiplier < math.inf:
        raise ArgumentError(
            f"max_feature_norm = {max_feature_norm:g} is out of range: its square overflows, or is"
            " next to 0"
        )
    # the accountant doubles the bound under replace-one, where matrices move by √2 of it
    factor = math.sqrt(2) if accountant.neighboring == "replace_one" else 1.0
    event = GaussianDpEvent(noise_multiplier * factor)
    accountant.compose(event, label="noise_aware.covariance")
    total = _second_moments(x.detach(), max_feature_norm).cpu()
    released = with_symmetric_noise(total, noise_multiplier)
    return NoisyCovariance(unit * released, unit * noise_multiplier)


def normal_numbers(size: int) -> Tensor:
    """Fresh ones, ``[size]``."""
    return GaussianNoise().standard_normal(size, dtype=torch.float64, device=torch.device("cpu"))


def with_symmetric_noise(exact: Tensor, std: float) -> Tensor:
    """A symmetric matrix ``[d, d]`` with noise of standard deviation ``std`` on the diagonal and
    ``std``/√2 off it: the mean of a Gaussian matrix and its transpose.
    """
    draws = normal_numbers(exact.numel()).reshape(exact.shape)
    # one triangle is mirrored, for rounding makes sums unsymmetric, and a difference of the halves
    # would have no noise
    upper = torch.triu(exact + std * (draws + draws.T) / 2)
    return upper + torch.triu(upper, 1).T


def _second_moments(x: Tensor, max_norm: float) -> Tensor:
    """Their sum over records that are shortened, in units of ``max_norm``². Private data."""
    size, positions = x.shape[-1], math.prod(x.shape[1:-1])
    total = torch.zeros(size, size, dtype=torch.float64, device=x.device)
    for rows in x.split(_ROWS):
        records = rows.double().reshape(len(rows), positions, size) / max_norm
        squares = records.square().sum((1, 2), keepdim=True)
        short = torch.where(squares.isfinite(), records * shorten(squares, 1.0), 0.0)
        flat = short.flatten(0, 1)
        total += flat.T @ flat
    return total
