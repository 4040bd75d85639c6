"""Where the numbers of one release live."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..errors import StateError

_MANY_RECORDS = 2**14

# a parameter group with the names and the tensors of its trainable parameters
Member = tuple[dict[str, Any], list[str], list[Tensor]]


def trainable_members(groups: list[dict[str, Any]]) -> list[Member]:
    """The parameter groups of an optimizer that have trainable parameters.

    Raises:
        StateError: there is none, or parameters live on several devices.
    """
    members: list[Member] = []
    for i, group in enumerate(groups):
        given = group.get("param_names", [f"{j} of group {i}" for j in range(len(group["params"]))])
        trainable = [
            (name, p) for name, p in zip(given, group["params"], strict=True) if p.requires_grad
        ]
        if trainable:
            members.append((group, [name for name, _ in trainable], [p for _, p in trainable]))
    if not members:
        raise StateError("every parameter is frozen: there is nothing to sample")
    if len({p.device for _, _, parameters in members for p in parameters}) > 1:
        raise StateError(
            "the parameters live on several devices; one norm per record needs them on one"
        )
    return members


class GroupGradient:
    """One parameter group's share of a step: what an algorithm's ``_update`` gets.

    Attributes:
        group: torch's parameter group with its options.
        names, parameters: of its trainable parameters.
        gradient: ĝ over all of them, one flat vector; a step's update may use it up.
        gradients: the same memory, shaped like the parameters.
        noise_multiplier: z of this step; infinite where lr = 0 and nothing was taken from the data.
        prior_stds: of the Gaussian prior, one for each parameter.
        kept: vectors that an algorithm keeps between steps, flat and by views.
    """

    def __init__(self, member: Member, gradient: Tensor) -> None:
        self.group, self.names, self.parameters = member
        self.gradient = gradient
        self.prior_stds: list[float] = []
        self.gradients = self.views(gradient)
        self.noise_multiplier = math.inf
        self.options: list[Any] = []  # with which it was computed
        self.kept: dict[str, tuple[Tensor, list[Tensor]]] = {}

    def current_options(self) -> list[Any]:
        """The group's options, numbers in place of tensors, which may be changed in place."""
        return [
            value.tolist()
            if isinstance(value, Tensor)
            else dict(value)
            if isinstance(value, dict)
            else value
            for name, value in self.group.items()
            if name != "params"
        ]

    def views(self, flat: Tensor) -> list[Tensor]:
        """``flat`` by pieces that are shaped like the parameters."""
        pieces = flat.split([p.numel() for p in self.parameters])
        return [piece.view(p.shape) for piece, p in zip(pieces, self.parameters, strict=True)]


class Layout:
    """The flat buffer of one release, which holds Σ clip(g), then S, then S/B.

    For several ranks it has one number more, 0 unless a rank failed after all of them had agreed to
    take the step.

    Args:
        members: the parameter groups that have trainable parameters.
        extra_size: how many numbers are released beside the gradient.
        records: expected number of records in a sum, which decides its precision.
        is_shared: whether several ranks add up their buffers.

    Attributes:
        is_plain: whether all parameters have the type of the sum.
    """

    def __init__(
        self, members: list[Member], extra_size: int, records: float, *, is_shared: bool
    ) -> None:
        self.parameters = [p for _, _, parameters in members for p in parameters]
        self.names = [name for _, names, _ in members for name in names]
        self.named = list(zip(self.names, self.parameters, strict=True))
        self.dtype, self.device = _sum_dtype(self.parameters, records), self.parameters[0].device
        self.is_plain = all(p.dtype is self.dtype for p in self.parameters)
        sizes = [p.numel() for p in self.parameters]
        self.description = repr((self.names, sizes, self.dtype))
        self.buffer = torch.zeros(
            sum(sizes) + extra_size + is_shared, dtype=self.dtype, device=self.device
        )
        self.gradient, self.extra, self.failed = self.buffer.split(
            [sum(sizes), extra_size, int(is_shared)]
        )
        self.pieces = list(self.gradient.split(sizes))
        totals = [sum(p.numel() for p in parameters) for _, _, parameters in members]
        self.groups = [
            GroupGradient(member, flat)
            for member, flat in zip(members, self.gradient.split(totals), strict=True)
        ]

    @property
    def smallest_noise_multiplier(self) -> float:
        """z that the release is charged for; infinite where nothing is taken from the data."""
        return min(group.noise_multiplier for group in self.groups)


def _sum_dtype(parameters: list[Tensor], records: float) -> torch.dtype:
    """Of norms, sums and noise: float64 where a parameter has it or where so many records are
    added that float32 would round by more than 10⁻³·C.
    """
    wide = records >= _MANY_RECORDS or any(p.dtype == torch.float64 for p in parameters)
    return torch.float64 if wide else torch.float32
