"""Channels of features made equally strong, by one private release of how they go together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..accounting.accountant import PrivacyAccountant
from ..noise import GaussianNoise
from ..noise_aware.mechanism import matrix_event, noisy_matrix

_LARGEST = 1e15  # of a feature that counts
_ROWS = 2_000


@dataclass(frozen=True)
class Whitening:
    r"""Features in coordinates in which all channels vary alike. Made by :func:`private_whitening`.

    .. math:: x' = \sqrt{m} \, \frac{W x}{\lVert W x \rVert}

    at every position, for m features a record: its row has the norm √m. A record of zeros stays
    one.

    **Privacy.** Post-processing of the release; features are a function of their own record and of
    ``matrix``.
    """

    matrix: Tensor
    """W, ``[channels, channels]`` in float32."""

    def __call__(self, features: Tensor) -> Tensor:
        """Features of the same shape ``[n, channels, ...]``, in their type.

        Raises:
            ValueError: they have another number of channels.
        """
        if _require_maps(features) != len(self.matrix):
            raise ValueError(
                f"the whitening is of {len(self.matrix)} channels in dimension 1, the features have"
                f" shape {list(features.shape)}."
            )
        matrix = self.matrix.to(features.device)
        found = torch.empty_like(features)
        for start in range(0, len(features), _ROWS):
            rows = features[start : start + _ROWS]
            maps = rows.reshape(len(rows), len(matrix), -1).float()
            white = torch.einsum("dc,ncp->ndp", matrix, maps).flatten(1)
            norms = white.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
            white *= math.sqrt(white.shape[1]) / norms
            found[start : start + _ROWS] = white.reshape(rows.shape)
        return found


def private_whitening(
    features: Tensor,
    *,
    accountant: PrivacyAccountant,
    noise_multiplier: float = 10.0,
    floor: float = 0.3,
) -> Whitening:
    r"""How to make all channels equally strong, learned from the private records at a small charge.

    Gradient descent learns weak directions last, and clipping and noise are the same for all
    directions. With the positions p of record i, and symmetric noise whose diagonal is N(0, z²),

    .. math::
        S = \sum_i \frac{\sum_p x_{ip} x_{ip}^\top}{\sum_p \lVert x_{ip} \rVert^2} + z E, \qquad
        W = \big(S_+ + \max(\phi \, \mathrm{tr} S / c, \; z \sqrt{2c}) \, I\big)^{-1/2}

    for c channels. :math:`z\sqrt{2c}` is how far E can turn S. The floor φ bounds what is made of
    channels that hardly vary. ::

        accountant = dpb.PrivacyAccountant(epsilon=3, delta=1e-5)
        whitening = dpb.heads.private_whitening(maps, accountant=accountant)
        head = dpb.heads.PrivateLinear(10, accountant=accountant)
        posterior = head.fit(whitening(maps).flatten(1), labels)
        posterior.predict(whitening(test_maps).flatten(1))

    Derived in this project; whitening by a private covariance as in principal components: Dwork et
    al. (2014), "Analyze Gauss".

    Args:
        features: ``[n, channels, ...]``, normalised record by record at best
            (:func:`group_normalised`). A record that is zero or not finite adds nothing.
        accountant: where the release is charged; the head's too, so that both share one budget.
        noise_multiplier: z. 10 is a hundredth of the cost of a run at μ = 1.
        floor: φ, of the channels' mean strength.

    Returns:
        A :class:`Whitening`.

    Raises:
        ValueError: shapes or numbers are out of range. Nothing is charged.
        PrivacyBudgetExceeded: the release would pass the accountant's budget.

    **Privacy.** A record's part is a positive semi-definite matrix of trace 1, so its Frobenius
    norm is at most 1: one Gaussian event of multiplier z, or √2·z under replace-one.
    """
    channels = _require_maps(features)
    if not isinstance(accountant, PrivacyAccountant):
        raise TypeError(
            f"accountant must be a dpb.PrivacyAccountant, got {type(accountant).__name__}: give"
            " the head the same one."
        )
    if not _is_number(noise_multiplier) or noise_multiplier <= 0:
        raise ValueError(f"noise_multiplier must be positive and finite, got {noise_multiplier!r}.")
    if not _is_number(floor) or floor < 0:
        raise ValueError(f"floor must be finite and not negative, got {floor!r}.")
    accountant.compose(matrix_event(noise_multiplier, accountant.neighboring), label="whitening")
    draws = GaussianNoise().standard_normal(
        channels * channels, dtype=torch.float64, device=torch.device("cpu")
    )
    total = noisy_matrix(
        _second_moments(features).cpu(), noise_multiplier, draws.reshape(channels, channels)
    )
    values, vectors = torch.linalg.eigh(total)
    least_value = max(
        floor * float(values.sum()) / channels, noise_multiplier * math.sqrt(2 * channels)
    )
    strengths = (values.clamp_min(0.0) + least_value).rsqrt()
    matrix = (vectors * (strengths / strengths.max())) @ vectors.T
    return Whitening(matrix.float())


def _second_moments(features: Tensor) -> Tensor:
    """Each record's, of trace 1, added up, ``[channels, channels]`` in float64. Private data."""
    channels = features.shape[1]
    total = torch.zeros(channels, channels, dtype=torch.float64, device=features.device)
    for rows in features.detach().split(_ROWS):
        maps = rows.reshape(len(rows), channels, -1).double()
        usable = (maps.abs() <= _LARGEST).flatten(1).all(1)
        maps = torch.where(usable[:, None, None], maps, 0.0)
        # by the largest first: squares of tiny numbers would be zero, and the norm too short
        largest = maps.abs().amax((1, 2), keepdim=True)
        maps = maps / torch.where(largest > 0, largest, 1.0)
        norms = maps.flatten(1).norm(dim=1)[:, None, None]
        columns = (maps / norms.clamp_min(1.0)).transpose(0, 1).flatten(1)
        total += columns @ columns.T
    return total


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _require_maps(features: Any) -> int:
    """The number of channels."""
    if (
        not isinstance(features, Tensor)
        or not features.is_floating_point()
        or features.layout != torch.strided
        or features.dim() < 2
        or 0 in features.shape
    ):
        shape = (
            f"{features.dtype} of shape {list(features.shape)}"
            if isinstance(features, Tensor)
            else type(features).__name__
        )
        raise ValueError(
            "features must be a dense floating-point tensor [n, channels, ...] with records, got"
            f" {shape}."
        )
    return features.shape[1]
