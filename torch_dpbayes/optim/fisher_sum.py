"""The joint release of DP-SGFS: the clipped sum and the second moment of clipped gradients."""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor

from ..accounting.events import neighboring_relation
from ..errors import ArgumentError, StateError
from ..noise import add_gaussian, digest
from ..per_sample.gradient_source import GradientSource
from ..release import ClippedSum, Layout


class FisherSum(ClippedSum):
    """(Σ g_i, Σ g_i g_iᵀ) of clipped gradients, or Σ g_i∘g_i for the diagonal. ``share`` is ϕ =
    (zC²/σ_F)², the weight of the second moment; ``scale`` is F, by which gradients are divided
    before they are clipped, None for 1.

    **Privacy.** Adding or removing a record moves the sum by at most C and the second moment by at
    most C² in Frobenius norm: √(1+ϕ)/z standard deviations together. Replacing one moves them by
    √s/z with s = 4 for ϕ ≤ ½ and 2 + 2ϕ + 1/(2ϕ) beyond.
    """

    def __init__(
        self, max_grad_norm: float, expected_batch_size: float, *, is_full: bool, share: float
    ) -> None:
        super().__init__(max_grad_norm, expected_batch_size)
        self.is_full, self.share = is_full, share
        self.scale: Tensor | None = None
        self.scale_digest = ""

    def set_scale(self, scale: Tensor | None) -> None:
        """Exchange F."""
        self.scale = scale
        self.scale_digest = "" if scale is None else digest([scale], 64).hex()

    def extra_size(self, num_parameters: int, device: torch.device) -> int:
        if not self.is_full:
            return num_parameters
        # buffer, estimate, and three matrices in float64
        needed, available = 48 * num_parameters**2, _available_memory(device)
        if needed > available:
            raise ArgumentError(
                f'fisher="full" works on {num_parameters} x {num_parameters} matrices, about'
                f" {needed / 2**30:.1f} GiB in all of {available / 2**30:.1f} GiB available: use"
                ' fisher="diagonal", or freeze parameters by requires_grad_(False).'
            )
        return num_parameters**2

    def second_moment(self, layout: Layout) -> Tensor:
        """The second moment in the buffer, in its shape."""
        size = len(layout.gradient)
        return layout.extra.view(size, size) if self.is_full else layout.extra

    def fisher_noise(self, noise_multiplier: float) -> float:
        """σ_F = zC²/√ϕ."""
        return noise_multiplier * self.max_grad_norm**2 / math.sqrt(self.share)

    def collect(self, source: GradientSource, layout: Layout) -> int:
        if self.scale is not None:
            if len(self.scale) != len(layout.gradient):
                raise StateError(
                    "the trainable parameters changed since sensitivity_scale was given: build"
                    " the optimizer again"
                )
            self.scale = self.scale.to(layout.gradient)
        return source.add_clipped_sum(
            layout.named,
            self.max_grad_norm,
            layout.pieces,
            scale=self.scale,
            second_moment=self.second_moment(layout),
        )

    def add_noise(self, layout: Layout, smallest: float, stream: torch.Generator | None) -> None:
        super().add_noise(layout, smallest, stream)
        if stream is None:
            layout.extra.div_(self.expected_batch_size)
        # on all d² entries; averaging M and Mᵀ afterwards leaves σ_F on the diagonal and σ_F/√2
        # beside it
        else:
            std = self.fisher_noise(smallest)
            add_gaussian(layout.extra, std, self.expected_batch_size, stream)
        if self.scale is not None:
            layout.gradient.mul_(self.scale)

    def equivalent_noise_multiplier(
        self, noise_multiplier: float, *, is_full: bool, sampling: str | None, neighboring: str
    ) -> float:
        share = self.share
        swap = 4.0 if share <= 0.5 else 2 + 2 * share + 1 / (2 * share)
        is_replacement = neighboring_relation(neighboring) == "replace_one"
        # a swap in a batch that was cut is charged at twice the distance, which is further
        is_drawn = sampling in ("poisson", "truncated_poisson", "random_allocation", "users")
        is_swap = is_replacement if is_full else not is_drawn
        return (
            2 * noise_multiplier / math.sqrt(swap)
            if is_swap
            else noise_multiplier / math.sqrt(1 + share)
        )


def _available_memory(device: torch.device) -> int:
    """Bytes that can be allocated there without pushing others out."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(
                1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")
            )
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
