"""Functions that run inside a map in place of others.

Recurrent layers, cells, bags of embeddings, RMSNorm and losses of classes by operations that
``vmap`` has rules for, where torch's own would fail or run for one record after another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import _reduction as _Reduction


def _layer(name: str) -> Callable[..., Any]:
    """A recurrent layer of torch, step by step, for inputs that are not packed."""

    def run(input: Tensor, hx: Any, weights: Sequence[Tensor], has_biases: bool, *rest: Any) -> Any:
        torchs: Any = import_module("torch._decomp.decompositions")  # the first map loads it
        if name != "lstm":
            return getattr(torchs, name)(input, hx, weights, has_biases, *rest)
        # torch's own of lstm takes a fused layer, which has no rule
        params = torchs.gather_params(weights, has_biases, hx[0].size(2) != hx[1].size(2))
        hidden = list(zip(*hx, strict=True))
        run_layers, of_layer = torchs._rnn_helper, torchs.one_layer_lstm  # noqa: SLF001
        out, last = run_layers(input, hidden, params, has_biases, *rest, of_layer)
        return (out, *(torch.stack(state) for state in zip(*last, strict=True)))

    return run


def _cell(name: str) -> Callable[..., Any]:
    """A recurrent cell of torch: one step of a layer."""
    layer, has_memory = _layer(name), name == "lstm"

    def run(input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, *biases: Any) -> Any:
        given = [b for b in biases if b is not None]
        states = [h.unsqueeze(0) for h in (hx if has_memory else [hx])]
        of_one_step = [w_ih, w_hh, *given], bool(given), 1, 0.0, False, False, False
        hidden = states if has_memory else states[0]
        _, *last = layer(input.unsqueeze(0), hidden, *of_one_step)
        found = tuple(h.squeeze(0) for h in last)
        return found if has_memory else found[0]

    return run


def embedding_bag(
    indices: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor | None:
    """As ``F.embedding_bag``; None where torch refuses these options, or they mix records."""
    is_refused = per_sample_weights is not None and mode != "sum"
    is_refused |= max_norm is not None or scale_grad_by_freq or indices.numel() == 0
    if is_refused or mode not in ("sum", "mean", "max"):
        return None
    found = F.embedding(indices, weight)  # (bags, places, numbers)
    if per_sample_weights is not None:
        found = found * per_sample_weights.unsqueeze(-1)
    is_there = torch.ones_like(indices, dtype=torch.bool)
    if padding_idx is not None:
        is_there = indices != padding_idx % len(weight)
    if offsets is not None:  # one list of places, cut at these
        ends = torch.cat([offsets[1:], torch.full_like(offsets[:1], len(indices))])
        starts, ends = (offsets[:-1], offsets[1:]) if include_last_offset else (offsets, ends)
        place = torch.arange(len(indices), device=indices.device)
        is_there = (place >= starts.unsqueeze(1)) & (place < ends.unsqueeze(1)) & is_there
        found = found.unsqueeze(0)
    there = is_there.unsqueeze(-1)
    count = there.sum(1)
    if mode == "max":
        largest = torch.where(there, found, -math.inf).max(1).values
        return torch.where(count > 0, largest, 0.0)
    total = torch.where(there, found, 0.0).sum(1)
    return total / count.clamp(min=1) if mode == "mean" else total


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None
) -> Tensor:
    """As ``F.rms_norm``, whose fused backward pass on GPUs has no rule."""
    wide = input.double() if input.dtype == torch.float64 else input.float()
    dims = tuple(range(-len(normalized_shape), 0))
    least = torch.finfo(wide.dtype).eps if eps is None else eps
    found = wide * (wide.square().mean(dims, keepdim=True) + least).rsqrt()
    return (found if weight is None else found * weight).to(input.dtype)


def rrelu(
    input: Tensor, lower: float, upper: float, training: bool = False, inplace: bool = False
) -> Tensor | None:
    """As ``F.rrelu``, which has no rule; None where it is in place."""
    if inplace:
        return None
    slope = torch.rand_like(input) if training else torch.full_like(input, 0.5)
    return torch.where(input <= 0, lower + (upper - lower) * slope, 1) * input


def one_hot(labels: Tensor, num_classes: int = -1) -> Tensor | None:
    """As ``F.one_hot``, which reads the labels; of a label that is no class, zeros."""
    if num_classes < 1:
        return None
    classes = torch.arange(num_classes, device=labels.device)
    return (labels.unsqueeze(-1) == classes).long()


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float | None = 0.0,
) -> Tensor | None:
    """As ``F.cross_entropy``; NaN for a label that is no class, where torch raises an error."""
    if target.is_floating_point() or size_average is not None or reduce is not None:
        return None
    classes = input.shape[0 if input.dim() == 1 else 1]
    wrong = ((target < 0) | (target >= classes)) & (target != ignore_index)
    labels = target.masked_fill(wrong, 0)
    how: Any = _Reduction.get_enum(reduction)
    if label_smoothing is None:
        found = torch._C._nn.nll_loss_nd(input, labels, weight, how, ignore_index)
    else:
        found = torch._C._nn.cross_entropy_loss(
            input, labels, weight, how, ignore_index, label_smoothing
        )
    return found.masked_fill(wrong if reduction == "none" else wrong.any(), math.nan)


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    F.embedding_bag: embedding_bag,
    F.one_hot: one_hot,
    F.nll_loss: partial(cross_entropy, label_smoothing=None),
    F.cross_entropy: cross_entropy,
    F.rms_norm: rms_norm,
    torch.rms_norm: rms_norm,
    F.rrelu: rrelu,
    torch.lstm_cell: _cell("lstm"),
    torch.gru_cell: _cell("gru_impl"),
    torch.rnn_tanh_cell: _cell("rnn_tanh_input"),
    torch.rnn_relu_cell: _cell("rnn_relu_input"),
}
LAYERS: dict[Any, Callable[..., tuple[Tensor, ...]]] = {
    torch.lstm: _layer("lstm"),
    torch.gru: _layer("gru_impl"),
    torch.rnn_tanh: _layer("rnn_tanh_input"),
    torch.rnn_relu: _layer("rnn_relu_input"),
}


def gaussian_nll(input: Any, target: Any, var: Any, full: bool = False, eps: float = 1e-6) -> Any:
    """On followed tensors; torch's own raises an error where a record's variance is negative."""
    with torch._C._EnableTorchFunction():  # noqa: SLF001
        if not isinstance(var, Tensor):
            var = torch.full_like(input, var)
        elif var.dim() == input.dim() - 1:
            var = var.unsqueeze(-1)
        var = var.clamp(min=eps).detach() + (var - var.detach())
        loss = 0.5 * (var.log() + (input - target) ** 2 / var)
        return loss + 0.5 * math.log(2 * math.pi) if full else loss
