"""What a step asks of the data, and where the numbers of one release live."""

from __future__ import annotations

import math
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..errors import StateError
from ..noise import add_gaussian
from ..per_sample.gradient_source import GradientSource

_MANY_RECORDS = 2**14  # of a sum, from which on float32 would round by more than 10⁻³·C

# a parameter group with the names and the tensors of its trainable parameters
Member = tuple[dict[str, Any], list[str], list[Tensor]]


class GroupGradient:
    """One parameter group's share of a step: what an algorithm's ``_update`` gets.

    Attributes:
        group: torch's parameter group with its options.
        names, parameters: of its trainable parameters.
        gradient: ĝ over all of them, one flat vector; a step's update may use it up.
        gradients: the same memory, shaped like the parameters.
        noise_multiplier: z of this step; infinite where lr = 0 and nothing was taken from the data.
        prior_stds: of the Gaussian prior, one for each parameter.
        options: those of the group from which these two were computed.
        kept: vectors that an algorithm keeps between steps, flat and by views.
    """

    def __init__(self, member: Member, gradient: Tensor) -> None:
        self.group, self.names, self.parameters = member
        self.gradient, self.gradients = gradient, self.views(gradient)
        self.noise_multiplier, self.prior_stds = math.inf, list[float]()
        self.options: list[Any] = []
        self.kept: dict[str, tuple[Tensor, list[Tensor]]] = {}

    def current_options(self) -> list[Any]:
        """The group's options, numbers in place of tensors, which may be changed in place."""
        found = []
        for name, value in self.group.items():
            if name != "params":
                is_tensor = isinstance(value, Tensor)
                plain = dict(value) if isinstance(value, dict) else value
                found.append(value.tolist() if is_tensor else plain)
        return found

    def views(self, flat: Tensor) -> list[Tensor]:
        """``flat`` by pieces that are shaped like the parameters."""
        pieces = flat.split([p.numel() for p in self.parameters])
        return [piece.view(p.shape) for piece, p in zip(pieces, self.parameters, strict=True)]


class Layout:
    """The flat buffer of one release, which holds Σ clip(g), then S, then S/B.

    Behind the gradient stand ``extra_size`` numbers that are released beside it and, for several
    ranks, one more: 0 unless a rank failed after all of them had agreed to take the step. Norms,
    sums and noise are in float64 where a parameter is or where very many records are added.
    ``is_plain``: all parameters have the type of the sum.
    """

    def __init__(
        self, members: list[Member], extra_size: int, records: float, *, is_shared: bool
    ) -> None:
        self.parameters = [p for _, _, parameters in members for p in parameters]
        self.names = [name for _, names, _ in members for name in names]
        self.named = list(zip(self.names, self.parameters, strict=True))
        types, self.device = {p.dtype for p in self.parameters}, self.parameters[0].device
        is_wide = records >= _MANY_RECORDS or torch.float64 in types
        self.dtype = torch.float64 if is_wide else torch.float32
        self.is_plain = types == {self.dtype}
        sizes = [p.numel() for p in self.parameters]
        self.description = repr((self.names, sizes, self.dtype))
        whole = [sum(sizes), extra_size, int(is_shared)]
        self.buffer = torch.zeros(sum(whole), dtype=self.dtype, device=self.device)
        self.gradient, self.extra, self.failed = self.buffer.split(whole)
        self.pieces = list(self.gradient.split(sizes))
        totals = [sum(p.numel() for p in parameters) for _, _, parameters in members]
        flats = self.gradient.split(totals)
        self.groups = [GroupGradient(m, flat) for m, flat in zip(members, flats, strict=True)]

    @property
    def smallest_noise_multiplier(self) -> float:
        """z that the release is charged for; infinite where nothing is taken from the data."""
        return min(map(attrgetter("noise_multiplier"), self.groups))


class ClippedSum:
    """Σ clip(g_i), of which every step releases S = Σ clip(g_i) + zC·ξ.

    A query that releases more is a subclass: it says how many numbers more, fills
    ``layout.extra``, adds their noise, and states the noise multiplier that a release of the
    clipped sum alone would have at the same cost. ``independence`` says how records are kept apart,
    and is empty where the source of gradients says it.

    **Privacy.** Adding or removing a record moves the sum by at most C, replacing one by 2C.
    """

    independence = ""

    def __init__(self, max_grad_norm: float, expected_batch_size: float) -> None:
        # plain numbers, which nobody can change and no type rounds
        self.max_grad_norm = float(max_grad_norm)
        self.expected_batch_size = float(expected_batch_size)

    def extra_size(self, num_parameters: int, device: torch.device) -> int:
        """How many numbers a step releases beside the gradient."""
        return 0

    def collect(self, source: GradientSource, layout: Layout) -> int:
        """Add the batch's sum to ``layout``; returns how many records it had."""
        return source.add_clipped_sum(layout.named, self.max_grad_norm, layout.pieces)

    def add_noise(self, layout: Layout, smallest: float, stream: torch.Generator | None) -> None:
        """Σ clip(g_i) turns into S/B, for each group with its own z, of which ``smallest`` is the
        smallest; without a stream into a rank's share of it that has no noise.
        """
        for group in layout.groups:
            if not math.isfinite(group.noise_multiplier):
                group.gradient.zero_()
            elif stream is None:
                group.gradient.div_(self.expected_batch_size)
            else:
                std = group.noise_multiplier * self.max_grad_norm
                add_gaussian(group.gradient, std, self.expected_batch_size, stream)

    def equivalent_noise_multiplier(
        self, noise_multiplier: float, *, is_full: bool, sampling: str | None, neighboring: str
    ) -> float:
        """z at which the clipped sum alone would cost what this query costs."""
        return noise_multiplier


def options_of(group: dict[str, Any]) -> list[Any]:
    """What a parameter group may have of its own."""
    return [group.get(name) for name in ("lr", "prior_std", "prior_mean", "momentum")]


def trainable_members(groups: list[dict[str, Any]]) -> list[Member]:
    """The parameter groups of an optimizer that have trainable parameters, all on one device."""
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
