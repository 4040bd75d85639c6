"""What a transcript says about θ where the level of its curvature is not much more than noise."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .surrogate import AnySurrogate

_NOTHING = 1e-12  # of the weights


class UncertainLevel:
    r"""The mean of the surrogates' likelihoods, each of which has another level λ of the curvature:

    .. math:: p(\text{transcript} \mid \theta) = \tfrac1K \sum_k p_k(\text{transcript} \mid \theta)

    A surrogate marginalises the curvature's noise under a flat prior. Where that noise is the
    larger part, this prior holds a curvature for likely that no records have, and a gradient near
    zero would then say that θ is near. Here λ is a scale: p(λ) ∝ 1/λ between bounds that are
    public.

    Args:
        parts: one surrogate for each of the equally likely levels.
        middle: the one with the estimated curvature: it checks the run.
    """

    def __init__(
        self,
        parts: Sequence[AnySurrogate],
        middle: AnySurrogate,
    ) -> None:
        self._parts, self._middle = parts, middle
        self.centre, self.predictor_std = middle.centre, middle.predictor_std
        self.gradient_std = middle.gradient_std
        forms = [form for part in parts if (form := part.form()) is not None]
        self._together = forms[0].stacked(forms) if len(forms) == len(parts) else None

    def log_likelihood(self, theta: Tensor) -> Tensor:
        """log p(transcript | θ) up to a constant, ``[...]`` for θ ``[..., d]``; differentiable."""
        return self._each(theta).logsumexp(0)

    def precision(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """H and Hθ̂ of a Gaussian likelihood: the means of the surrogates', by how likely each is
        at ``theta``.
        """
        weights = self._each(theta).softmax(0)
        precision, product = theta.new_zeros(len(theta), len(theta)), torch.zeros_like(theta)
        for weight, part in zip(weights, self._parts, strict=True):
            if weight > _NOTHING:
                own, its_product = part.precision(theta)
                precision, product = precision + weight * own, product + weight * its_product
        return precision, product

    def _each(self, theta: Tensor) -> Tensor:
        if self._together is not None:
            rows = theta.reshape(-1, theta.shape[-1])
            return self._together.log_likelihood(rows).reshape(-1, *theta.shape[:-1])
        return torch.stack([part.log_likelihood(theta) for part in self._parts])

    def agreement(self, mode: Tensor, precision: Tensor) -> float:
        """See :meth:`AnySurrogate.agreement`."""
        return self._middle.agreement(mode, precision)
