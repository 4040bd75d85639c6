r"""What a transcript says about θ where every record reads the parameters of one group.

As in :mod:`~torch_dpbayes.noise_aware.surrogate`, but the error of F̂ has a variance for each kind
of entry: none between two groups, and v_ij elsewhere, so that

.. math:: M(\theta) = F_\alpha + \sum_k \omega_k^2 V_k + \operatorname{diag}(V \Delta^2) + (V -
    \operatorname{diag} V) \circ \Delta\Delta^\top

for independent entries of the variances V. One variance for all of them would take the error of a
group's own curvature for one that all groups' parameters share, and intervals of hierarchical
models were twice as wide with it.

Derived in this project.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .groups import GroupedMatrix, Groups
from .response import OuterProductResponse, Response, shorter
from .surrogate import Surrogate
from .transcript import GradientRelease


class GroupedSurrogate(Surrogate):
    """log p(transcript | θ); arguments as in
    :class:`~torch_dpbayes.noise_aware.surrogate.Surrogate`, with a response that does not bend, and

    Args:
        variances: V, of what is left of the error of each entry of the curvature, ``[d, d]``.
        groups: of the parameters.
    """

    def __init__(
        self,
        gradients: Sequence[GradientRelease],
        response: Response,
        curvature: Tensor,
        variances: Tensor,
        centre: Tensor,
        counted: Tensor,
        groups: Groups,
    ) -> None:
        # of a symmetric Gaussian matrix that errs as much
        std = float(2 * variances.mean()) ** 0.5
        super().__init__(gradients, response, curvature, std, centre, counted)
        self._variances, self._groups = variances, groups
        self._shortening = (
            response.shortening if isinstance(response, OuterProductResponse) else 0.0
        )

    def _of_curvature_error(self, moved: Tensor) -> Tensor:
        delta = self._point - moved
        off = self._variances - torch.diag(self._variances.diagonal())
        own = torch.diag_embed(delta.square() @ self._variances)
        return own + off * delta[..., :, None] * delta[..., None, :]

    def form(self) -> GroupedForm:
        """The same, by blocks."""
        order, blocks = self._groups.order, self._groups.blocks
        sure = self._variability * self.curvature + self.noise
        off = self._variances - torch.diag(self._variances.diagonal())
        return GroupedForm(
            self._groups,
            self._point[None, None, order],
            self._mean[None, None, order],
            self.curvature[None, order[:, None], order],
            self._variances[None, order[:, None], order],
            blocks(sure[None, None]),
            blocks(off[None, None]),
            self.centre[None, None, order],
            torch.full((1, 1), self._shortening, dtype=sure.dtype),
        )


class GroupedForm(NamedTuple):
    """K such likelihoods at once, of parameters in the order of the groups."""

    groups: Groups
    point: Tensor
    """Where the mean release was, ``[K, 1, d]``."""
    mean: Tensor
    """m of the residual m + F̂θ, ``[K, 1, d]``."""
    curvature: Tensor
    """F̂, ``[K, d, d]``."""
    variances: Tensor
    """V, ``[K, d, d]``."""
    sure: GroupedMatrix
    """What M has at any θ, ``[K, 1, ...]``."""
    off: GroupedMatrix
    """V without its diagonal, ``[K, 1, ...]``."""
    centre: Tensor
    """Around which φ straightens, ``[K, 1, d]``."""
    shortening: Tensor
    """Of φ far from there, 0 for a linear response, ``[K, 1]``."""

    @staticmethod
    def stacked(forms: Sequence[GroupedForm]) -> GroupedForm:
        """All of them."""

        def together(name: str) -> Tensor:
            return torch.cat([getattr(form, name) for form in forms])

        def blocks(name: str) -> GroupedMatrix:
            parts = zip(*(getattr(form, name) for form in forms), strict=True)
            return GroupedMatrix(*map(torch.cat, parts))

        return GroupedForm(
            forms[0].groups,
            together("point"),
            together("mean"),
            together("curvature"),
            together("variances"),
            blocks("sure"),
            blocks("off"),
            together("centre"),
            together("shortening"),
        )

    def log_likelihood(self, theta: Tensor) -> Tensor:
        """log p(transcript | θ) up to a constant, ``[K, m]`` for θ ``[m, d]``; differentiable."""
        away = theta.index_select(-1, self.groups.order) - self.centre
        moved = away @ self.curvature
        share = shorter((away * moved).sum(-1), self.shortening)[..., None]
        delta = self.point - self.centre - share * away
        residual = self.mean + self.centre @ self.curvature + share * moved
        own, rest_own = self.groups.parts(delta.square() @ self.variances)
        some, rest = self.groups.parts(delta)
        sure, off = self.sure, self.off
        total = GroupedMatrix(
            sure.groups
            + off.groups * some[..., :, None, :] * some[..., None, :, :]
            + own[..., None, :] * torch.eye(some.shape[-2], dtype=some.dtype)[..., None],
            sure.cross + off.cross * some[..., None, :] * rest[..., None, :, None],
            sure.rest
            + off.rest * rest[..., :, None] * rest[..., None, :]
            + rest_own[..., None] * torch.eye(rest.shape[-1], dtype=rest.dtype),
        )
        square, log_determinant = total.misfit(*self.groups.parts(residual))
        return -0.5 * (square + log_determinant)
