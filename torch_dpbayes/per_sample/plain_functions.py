"""Functions that replace torch's functions inside a map.

They compute recurrent layers, cells, embeddings, RMSNorm and losses of classes by operations for
which ``vmap`` has rules; torch's own functions would fail, or run for one record after another.
They return None for arguments for which torch's own function works.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_gradtrackingtensor
from torch._decomp import decompositions as rnn

from ..errors import ModelError
from . import memory


def _recurrent(one_layer: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
    """A recurrent network for inputs that are not packed, by torch's decomposition of a layer."""

    def run(
        input: Tensor,
        hx: Any,
        weights: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        steps = input.transpose(0, 1) if batch_first else input
        states = list(hx) if isinstance(hx, Tensor) else list(zip(*hx, strict=True))
        directions, each = (2 if bidirectional else 1), len(weights) // len(states)
        for place in range(0, len(states), directions):
            if place and dropout > 0 and train:
                steps = F.dropout(steps, dropout)
            outputs = []
            for k in range(place, place + directions):
                own = weights[k * each : (k + 1) * each]
                found = one_layer(steps, states[k], own, has_biases, reverse=k > place)
                outputs.append(found[0])
                states[k] = found[1]
            steps = torch.cat(outputs, -1)
        last: Any = [states] if isinstance(hx, Tensor) else zip(*states, strict=True)
        output = steps.transpose(0, 1) if batch_first else steps
        return (output, *(torch.stack(list(state)) for state in last))

    return run


def _cell(one_layer: Callable[..., Any]) -> Callable[..., Any]:
    """A cell is one step of a layer."""

    def run(input: Tensor, hx: Any, *weights: Any) -> Any:
        own = [w for w in weights if w is not None]
        return one_layer(input[None], hx, own, len(own) > 2)[1]

    return run


def embedding(
    tokens: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: Any = None,
    *_: Any,
    **__: Any,
) -> Tensor | None:
    """A table with a copy for each record. vmap puts these copies one after another, so a token
    beyond the table would read the next record's copy. Here it gives NaN, which counts as zero.
    vmap also computes a gradient for the row of the padding; here it has none.
    """
    if not (is_batchedtensor(weight) or is_gradtrackingtensor(weight)):
        return None
    is_wrong = (tokens < 0) | (tokens >= len(weight))
    inside = tokens.masked_fill(is_wrong, 0)
    found = torch.embedding(weight, inside)
    if padding_idx is not None:
        is_padding = (tokens == padding_idx % len(weight)).unsqueeze(-1)
        found = torch.where(is_padding, found.detach(), found)
    return found.masked_fill(is_wrong.unsqueeze(-1), math.nan)


def _table(weight: Tensor, indices: Tensor, padding_idx: int = -1, *_: Any) -> Tensor | None:
    return embedding(indices, weight, None if padding_idx < 0 else padding_idx)


def _ctc(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """CTC loss. For a label that is not a class, torch reads another record's memory; here the
    loss is NaN.
    """

    def run(
        log_probs: Tensor,
        targets: Tensor,
        input_lengths: Any,
        target_lengths: Any,
        *rest: Any,
        **options: Any,
    ) -> Tensor:
        wrong = (targets < 0) | (targets >= log_probs.shape[-1])
        lengths = torch.as_tensor(target_lengths, device=targets.device).reshape(-1)
        ends = lengths.sum() if targets.dim() == 1 else lengths.unsqueeze(-1)
        is_read = torch.arange(targets.shape[-1], device=targets.device) < ends
        labels = targets.masked_fill(wrong, 0)
        found = function(log_probs, labels, input_lengths, target_lengths, *rest, **options)
        is_bad = wrong & is_read
        are_rows = found.dim() > 0 and targets.dim() > 1
        return found.masked_fill(is_bad.any(-1) if are_rows else is_bad.any(), math.nan)

    return run


def embedding_bag(
    indices: Tensor,
    weight: Tensor,
    *,
    mode: str = "mean",
    per_sample_weights: Tensor | None = None,
    padding_idx: int | None = None,
    **options: Any,
) -> Tensor | None:
    """Like ``F.embedding_bag`` for bags of equal length; None if torch refuses these options, or
    if they mix records.
    """
    is_refused = per_sample_weights is not None and mode != "sum"
    is_refused |= any(options.get(name) is not None for name in ("offsets", "max_norm"))
    is_refused |= options.get("scale_grad_by_freq", False) or indices.numel() == 0
    if is_refused or mode not in ("sum", "mean", "max"):
        return None
    if (found := embedding(indices, weight)) is None:
        found = F.embedding(indices, weight)  # (bags, places, numbers)
    if per_sample_weights is not None:
        found = found * per_sample_weights.unsqueeze(-1)
    there = torch.ones_like(indices, dtype=torch.bool).unsqueeze(-1)
    if padding_idx is not None:
        there = (indices != padding_idx % len(weight)).unsqueeze(-1)
    count = there.sum(1)
    if mode == "max":
        largest = torch.where(there, found, -math.inf).max(1).values
        return torch.where(count > 0, largest, 0.0)
    total = torch.where(there, found, 0.0).sum(1)
    return total / count.clamp(min=1) if mode == "mean" else total


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None
) -> Tensor:
    """Like ``F.rms_norm``, whose fused backward pass on GPUs has no rule for vmap."""
    wide = input.double() if input.dtype == torch.float64 else input.float()
    dims = tuple(range(-len(normalized_shape), 0))
    least = torch.finfo(wide.dtype).eps if eps is None else eps
    found = wide * (wide.square().mean(dims, keepdim=True) + least).rsqrt()
    return (found if weight is None else found * weight).to(input.dtype)


def rrelu(
    input: Tensor, lower: float, upper: float, training: bool = False, inplace: bool = False
) -> Tensor | None:
    """Like ``F.rrelu``, which has no rule for vmap; None if it is in place."""
    if inplace:
        return None
    slope = torch.rand_like(input) if training else torch.full_like(input, 0.5)
    return torch.where(input <= 0, lower + (upper - lower) * slope, 1) * input


def one_hot(labels: Tensor, num_classes: int = -1) -> Tensor | None:
    """Like ``F.one_hot``, which reads the labels; zeros for a label that is not a class."""
    if num_classes < 1:
        return None
    classes = torch.arange(num_classes, device=labels.device)
    return (labels.unsqueeze(-1) == classes).long()


def _of_classes(function: Callable[..., Tensor]) -> Callable[..., Tensor | None]:
    """A loss of classes; NaN for a label that is not a class. Torch raises an error for it."""

    def run(input: Tensor, target: Tensor, *rest: Any, **options: Any) -> Tensor | None:
        if target.is_floating_point():
            return None
        ignored = options.get("ignore_index", rest[2] if len(rest) > 2 else -100)
        classes = input.shape[0 if input.dim() == 1 else 1]
        wrong = ((target < 0) | (target >= classes)) & (target != ignored)
        return _without(wrong, function(input, target.masked_fill(wrong, 0), *rest, **options))

    return run


def binary_cross_entropy(input: Tensor, target: Tensor, *rest: Any, **options: Any) -> Tensor:
    """Like ``F.binary_cross_entropy``; NaN for a value that is not a probability. Torch raises an
    error for it.
    """
    wrong = ~((input >= 0) & (input <= 1) & (target >= 0) & (target <= 1))
    inside = input.masked_fill(wrong, 0.5), target.masked_fill(wrong, 0.5)
    return _without(wrong, F.binary_cross_entropy(*inside, *rest, **options))


def _without(wrong: Tensor, losses: Tensor) -> Tensor:
    """Replace losses of wrong arguments, or their mean or sum, by NaN."""
    return losses.masked_fill(wrong if losses.shape == wrong.shape else wrong.any(), math.nan)


def gaussian_nll(
    input: Any,
    target: Any,
    var: Any,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Any:
    """Like ``F.gaussian_nll_loss``, which raises an error if a record's variance is negative."""
    with torch._C._EnableTorchFunction():  # noqa: SLF001 - for followed tensors
        if not isinstance(var, Tensor):
            var = torch.full_like(input, var)
        elif var.dim() == input.dim() - 1:
            var = var.unsqueeze(-1)
        var = var.clamp(min=eps).detach() + (var - var.detach())
        loss = 0.5 * (var.log() + (input - target) ** 2 / var)
        loss = loss + 0.5 * math.log(2 * math.pi) if full else loss
        return {"mean": loss.mean, "sum": loss.sum, "none": lambda: loss}[reduction]()


def _grid(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Sampling at the positions of a grid. For a position that is not finite, torch may read
    another record's memory, or invalid memory; here the result is NaN.
    """

    def run(input: Tensor, grid: Tensor, *rest: Any, **options: Any) -> Tensor:
        wrong = ~grid.isfinite()
        found = function(input, grid.masked_fill(wrong, 0.0), *rest, **options)
        return found.masked_fill(wrong.any(-1).unsqueeze(1), math.nan)

    return run


def _of_any_size(input: Tensor, *_: Any, **__: Any) -> None:
    """Refuse results whose size depends on a record: they fail beside a record of another size."""
    if is_batchedtensor(input) or is_gradtrackingtensor(input):
        raise ModelError(
            "the size of a result depends on the record: write t != 0 for argwhere,"
            " F.one_hot(t, n).sum(0) for bincount, and a mask for a packed sequence",
            code="model-map",
        )


def batch_norm(
    input: Tensor, running_mean: Any = None, running_var: Any = None, *rest: Any, **options: Any
) -> Tensor:
    """Like ``F.batch_norm``, whose rule for vmap fails for mixed types, as under autocast."""
    memory.statistics(1)(input, running_mean, running_var)
    wide = input if running_mean is None else input.to(running_mean.dtype)
    return F.batch_norm(wide, running_mean, running_var, *rest, **options).to(input.dtype)


def roll(input: Tensor, *_: Any, **__: Any) -> Tensor | None:
    """Like ``torch.roll`` for a scalar, which vmap would exchange with another record's."""
    return input if input.dim() == 0 else None


def prod(
    input: Tensor,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
    out: Any = None,
    axis: Any = None,
    keepdims: bool = False,
) -> Tensor | None:
    """Like ``torch.prod``. If there is a zero in any record, torch computes the gradients of all
    in another way, and some are finite only in one of them. Here they are products of numbers.
    """
    t = input if dtype is None else input.to(dtype)
    if out is not None or not (t.is_floating_point() or t.is_complex()):  # vmap refuses out=
        return None
    # torch takes NumPy's names, too
    dim, keepdim = (dim if axis is None else axis), keepdim or keepdims
    if dim is None or t.dim() == 0:
        t, dim, keepdim = t.reshape(-1), 0, False
    t = t.movedim(dim, -1)
    while (n := t.shape[-1]) != 1:
        t = F.pad(t, (0, 1), value=1.0) if n == 0 or n % 2 else t
        t = t if n == 0 else t[..., : (n + 1) // 2] * t[..., (n + 1) // 2 :]
    return t.movedim(-1, dim) if keepdim else t[..., 0]


def new(t: Tensor, *given: Any, **options: Any) -> Tensor:
    """Like ``t.new``, which makes a tensor of numbers or of a size."""
    first: Any = given[0] if given else 0
    if isinstance(first, Tensor):  # of the same type
        return first.detach().clone()
    is_size = isinstance(first, (int, torch.Size))
    size = given if len(given) > 1 else first
    return t.new_zeros(size, **options) if is_size else t.new_tensor(first, **options)


def _fill(t: Tensor, mask: Any, value: Any) -> Tensor | None:
    """``t[mask] = number``, which vmap refuses; None for other writes."""
    is_mask = isinstance(mask, Tensor) and mask.dtype == torch.bool
    is_number = value.dim() == 0 if isinstance(value, Tensor) else isinstance(value, int | float)
    if not (is_mask and is_number and mask.shape == t.shape[: mask.dim()]):
        return None
    where = mask[(..., *[None] * (t.dim() - mask.dim()))]
    return t.copy_(torch.where(where, value, t))  # torch 2.12 maps no masked_fill_ of a tensor


def _is_all_true(t: Tensor) -> Tensor:
    """``torch.distributions`` checks all records together and raises an error. Here the values of
    an invalid record are not finite, and count as zero.
    """
    return torch.ones((), dtype=torch.bool, device=t.device)


# Losses that compute each number from one element of the outputs and one of the labels, for equal
# shapes; without weights, their other arguments are numbers. No values make them raise an error.
BY_ELEMENT = frozenset(
    (*(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss), F.binary_cross_entropy_with_logits)
)
OF_CLASSES = frozenset((F.cross_entropy, F.nll_loss))


def is_row_by_row(
    function: Any, shape: Sequence[int], labels: Sequence[int], options: dict[str, Any]
) -> bool:
    """Whether a loss is known to be computed element by element, or row by row of classes. The
    shapes are those of one record's outputs and labels, (rows, ...).
    """
    if function in BY_ELEMENT:  # weights could be from other records
        return shape == labels and options.keys().isdisjoint(("weight", "pos_weight"))
    return function in OF_CLASSES and len(shape) > 1 and labels == (shape[0], *shape[2:])


def losses_at_once(
    function: Any, outputs: Tensor, labels: Tensor, options: dict[str, Any]
) -> Tensor:
    """The losses of all records, in dimension 0, if :func:`is_row_by_row` is true.

    A record whose label is not a class gets the loss NaN, which counts as zero; the step goes on.

    Args:
        outputs, labels: (records, rows of a record, ...).
        options: the other arguments, by name.
    """
    shape, options = outputs.shape, {**options, "reduction": "none"}
    if function in BY_ELEMENT:
        return function(outputs, labels, **options)
    is_one = shape[1] == 1  # row of a record
    values = [t.squeeze(1) if is_one else t.flatten(0, 1) for t in (outputs, labels)]
    try:  # torch raises an error on the CPU, but aborts on other devices
        found = (function if outputs.is_cpu else FUNCTIONS[function])(*values, **options)
    except IndexError:
        found = FUNCTIONS[function](*values, **options)
    return found if is_one else found.unflatten(0, shape[:2])


_layer = rnn.one_layer_rnn
_RECURRENT: tuple[tuple[Any, Any, Callable[..., Any]], ...] = (
    (torch.lstm_cell, torch.lstm, rnn.one_layer_lstm),
    (torch.gru_cell, torch.gru, partial(_layer, hidden_fn=rnn.gru_cell)),
    (torch.rnn_tanh_cell, torch.rnn_tanh, partial(_layer, hidden_fn=rnn.rnn_cell(torch.tanh))),
    (torch.rnn_relu_cell, torch.rnn_relu, partial(_layer, hidden_fn=rnn.rnn_cell(torch.relu))),
)
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    Tensor.__setitem__: _fill,
    torch._is_all_true: _is_all_true,  # noqa: SLF001
    **dict.fromkeys((torch.as_strided, Tensor.as_strided, torch.as_strided_copy), memory.strided),
    **dict.fromkeys((torch.argwhere, Tensor.argwhere), _of_any_size),
    **dict.fromkeys((torch.bincount, Tensor.bincount), _of_any_size),
    torch._pack_padded_sequence: lambda _, lengths, *__: _of_any_size(lengths),  # noqa: SLF001
    F.batch_norm: batch_norm,
    **dict.fromkeys(
        (torch.batch_norm, torch.native_batch_norm, torch._native_batch_norm_legit),  # noqa: SLF001
        memory.statistics(3),
    ),
    torch._batch_norm_impl_index: memory.statistics(3),  # noqa: SLF001
    Tensor.storage_offset: memory.offset,
    Tensor.new: new,
    **{f: memory.layout(f) for f in (Tensor.stride, Tensor.dim_order)},
    F.embedding: embedding,
    torch.embedding: _table,
    F.embedding_bag: embedding_bag,
    F.ctc_loss: _ctc(F.ctc_loss),
    torch.ctc_loss: _ctc(torch.ctc_loss),
    F.one_hot: one_hot,
    F.grid_sample: _grid(F.grid_sample),
    torch.grid_sampler: _grid(torch.grid_sampler),
    torch.grid_sampler_2d: _grid(torch.grid_sampler_2d),
    torch.grid_sampler_3d: _grid(torch.grid_sampler_3d),
    torch.roll: roll,
    Tensor.roll: roll,
    **dict.fromkeys((torch.prod, Tensor.prod), prod),
    F.nll_loss: _of_classes(F.nll_loss),
    F.cross_entropy: _of_classes(F.cross_entropy),
    F.binary_cross_entropy: binary_cross_entropy,
    F.rms_norm: rms_norm,
    torch.rms_norm: rms_norm,
    F.gaussian_nll_loss: gaussian_nll,
    F.rrelu: rrelu,
    **{cell: _cell(one_layer) for cell, _, one_layer in _RECURRENT},
    **{network: _recurrent(one_layer) for _, network, one_layer in _RECURRENT},
}
