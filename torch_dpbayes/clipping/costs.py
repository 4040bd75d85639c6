"""Which way of computing costs least, by shapes alone: never by data or a clock."""

from __future__ import annotations

import torch
from torch import Tensor

# Nanoseconds on one core (AMD EPYC 9005, torch 2.15), fitted by hand to timings of single layers: a
# multiply-add in a matrix product, in one of float64 and in a oneDNN convolution, a number copied
# by unfold, a number written to fresh memory, a call of a convolution.
_MATMUL, _GRAM, _CONVOLUTION, _UNFOLD, _WRITE, _CALL = 0.022, 0.044, 0.012, 0.5, 1.0, 80e3


def choose_linear(positions: int, width_in: int, width_out: int) -> str:
    """``"gram"`` or ``"instantiate"`` for a linear layer, by the estimated time of either."""
    weights = width_in * width_out
    gram = positions**2 * (width_in + width_out) * _GRAM + positions * weights * _MATMUL
    instantiate = positions * weights * _MATMUL + weights * _WRITE
    return "gram" if gram < instantiate else "instantiate"


def choose_convolution(
    weights: int, groups: int, inputs: Tensor, backprops: Tensor
) -> tuple[str, bool]:
    """``"gram"``, ``"unfold"``, ``"grouped"`` or ``"loop"``, and whether the per-record
    gradients are kept for the sum.
    """
    positions = backprops[0, 0].numel()
    held = inputs[0].numel() + backprops[0].numel()
    columns = weights // backprops.shape[1]  # of the unfolded input, for each group
    products, unfolded = positions * weights, columns * groups * positions
    is_onednn = (
        inputs.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and backprops.dtype == torch.float32
    )
    times = {"unfold": products * _MATMUL + unfolded * _UNFOLD}
    if is_onednn:
        times["loop"] = products * _CONVOLUTION + _CALL
        if inputs.shape[1] // groups % 16 == 0 and backprops.shape[1] // groups % 16 == 0:
            times["grouped"] = products * _CONVOLUTION + weights * 2 * _WRITE
    way = min(times, key=lambda w: times[w])
    # the weighted sum, from inputs and output gradients
    again = products * (_CONVOLUTION if is_onednn else _MATMUL) + held * _UNFOLD
    is_kept = weights <= held or (weights <= 2 * held and weights * _WRITE < again)
    gram = unfolded * _UNFOLD + positions**2 * (columns * groups + backprops.shape[1]) * _GRAM
    if gram + again < times[way] + (weights * _WRITE if is_kept else again):
        return "gram", False
    return way, is_kept
