r"""What a transcript says about θ where every record reads the parameters of one group.

As in :mod:`~torch_dpbayes.noise_aware.surrogate`, for full batches, but the error of F̂ has a
variance for each kind of entry: none between two groups, and v_ij elsewhere, so that

.. math:: M(\theta) = F_\alpha + \sum_k \omega_k^2 V_k + \operatorname{diag}(V \Delta^2) + (V -
    \operatorname{diag} V) \circ \Delta\Delta^\top

for independent entries of the variances V. One variance for all of them would take the error of a
group's own curvature for one that all groups' parameters share. The Gaussian density of a group's
residual, given those before it, gives way to a mean over levels of the group's own curvature
(:class:`~torch_dpbayes.noise_aware.groups.GroupLevels`); the rest's, given the groups', stays.

Derived in this project.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .groups import GroupedMatrix, GroupLevels, Groups
from .response import OuterProductResponse, Response, shorter
from .surrogate import Surrogate
from .transcript import GradientRelease


class GroupedSurrogate(Surrogate):
    """log p(transcript | θ), and tangents to what it is with Gaussian errors; arguments as in
    :class:`~torch_dpbayes.noise_aware.surrogate.Surrogate`, with a response that does not bend, and

    Args:
        variances: V, of what is left of the error of each entry of the curvature, ``[d, d]``.
        levels: equally likely ones of each coordinate's own curvature, ``[levels, d]``.
        groups: of the parameters.
    """

    def __init__(
        self,
        gradients: Sequence[GradientRelease],
        response: Response,
        curvature: Tensor,
        variances: Tensor,
        levels: Tensor,
        centre: Tensor,
        counted: Tensor,
        groups: Groups,
    ) -> None:
        # of a symmetric Gaussian matrix that errs as much
        std = float(2 * variances.mean()) ** 0.5
        super().__init__(gradients, response, curvature, std, centre, counted)
        self._variances, self._levels, self._groups = variances, levels, groups
        self._shortening = (
            response.shortening if isinstance(response, OuterProductResponse) else 0.0
        )

    def _of_curvature_error(self, moved: Tensor) -> Tensor:
        delta = self._point - moved
        off = self._variances - torch.diag(self._variances.diagonal())
        own = torch.diag_embed(delta.square() @ self._variances)
        return own + off * delta[..., :, None] * delta[..., None, :]

    def form(self) -> GroupedForm:
        """The same, by blocks, and with levels of the groups' own curvatures."""
        groups, order = self._groups, self._groups.order
        sure = self._variability * self.curvature + self.noise
        own = self._variances.diagonal()
        off = self._variances - torch.diag(own)
        changes, _ = groups.parts((self._levels - self.curvature.diagonal())[:, order])
        return GroupedForm(
            groups,
            (self._point - self.centre)[None, None, order],
            (self._mean + self.centre @ self.curvature)[None, None, order],
            self.curvature[None, order[:, None], order],
            self._variances[None, order[:, None], order],
            groups.blocks(sure[None, None]),
            groups.blocks(off[None, None]),
            changes.movedim(0, -1)[None, None],
            groups.parts(own[order])[0][None, None],
            groups.parts(self.noise.diagonal()[order])[0][None, None],
            self.centre[None, None, order],
            torch.full((1, 1), self._shortening, dtype=sure.dtype),
        )


class GroupedForm(NamedTuple):
    """K such likelihoods at once, of parameters in the order of the groups."""

    groups: Groups
    point: Tensor
    """Where the mean release was, from the centre on, ``[K, 1, d]``."""
    mean: Tensor
    """The residual at the centre, ``[K, 1, d]``."""
    curvature: Tensor
    """F̂, ``[K, d, d]``."""
    variances: Tensor
    """V, ``[K, d, d]``."""
    sure: GroupedMatrix
    """What M has at any θ, ``[K, 1, ...]``."""
    off: GroupedMatrix
    """V without its diagonal, ``[K, 1, ...]``."""
    changes: Tensor
    """Equally likely errors of the groups' own curvatures, ``[K, 1, m, groups, levels]``."""
    own: Tensor
    """Their variances, ``[K, 1, m, groups]``."""
    noise: Tensor
    """Of the groups' gradients alone, ``[K, 1, m, groups]``."""
    centre: Tensor
    """Around which φ straightens, ``[K, 1, d]``."""
    shortening: Tensor
    """Of φ far from there, 0 for a linear response, ``[K, 1]``."""

    @staticmethod
    def stacked(forms: Sequence[GroupedForm]) -> GroupedForm:
        """All of them."""
        groups, *fields = zip(*forms, strict=True)
        return GroupedForm(groups[0], *map(_together, fields))

    def log_likelihood(self, theta: Tensor) -> Tensor:
        """log p(transcript | θ) up to a constant, ``[K, m]`` for θ ``[m, d]``; differentiable."""
        away = theta.index_select(-1, self.groups.order) - self.centre
        moved = away @ self.curvature
        if self.shortening.any():
            share = shorter((away * moved).sum(-1), self.shortening)[..., None]
            away, moved = share * away, share * moved
        delta, residual = self.point - away, self.mean + moved
        of_groups, of_rest = self.groups.parts(delta.square() @ self.variances)
        some, rest = self.groups.parts(delta)
        sure, off = self.sure, self.off
        a = sure.groups + of_groups[..., None, :] * torch.eye(some.shape[-2]).to(some)[..., None]
        if some.shape[-2] > 1:
            a = a + off.groups * some[..., :, None, :] * some[..., None, :, :]
        total = GroupedMatrix(
            a,
            sure.cross + off.cross * some[..., None, :] * rest[..., None, :, None],
            sure.rest
            + off.rest * rest[..., :, None] * rest[..., None, :]
            + torch.diag_embed(of_rest),
        )
        levels = GroupLevels(
            -self.changes * some[..., None],
            self.changes - (self.own * some.square())[..., None],
            self.noise,
        )
        return -0.5 * total.misfit(*self.groups.parts(residual), levels)


def _together(parts: Sequence[Any]) -> Any:
    """Tensors, or blocks of them, one after the other."""
    if isinstance(parts[0], Tensor):
        return torch.cat(list(parts))
    return GroupedMatrix(*map(torch.cat, zip(*parts, strict=True)))
